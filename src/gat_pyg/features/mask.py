"""Masks of feature dropout, by the random numbers of attention dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.device import load_kernels, missing_reason
from ..kernels.models import in_front, save_arguments, saved_arguments
from ..philox import draw_seed, keep_mask, mapped_draw, philox_blocks


def drop(x: Tensor, p: float | Tensor) -> Tensor:
    """Return x k, where k is 0 with probability p, else 1 / (1 - p): `keep_mask`'s of size / 4 edges and four heads.

    The seed is drawn from torch's generator; where `torch.func.vmap` draws one for each of several models, each has the
    mask that it would have alone. Within `global_rows` it is that of those rows. On CUDA, k is not stored.
    """
    seed = draw_seed(x.device, p)
    if (blocks := philox_blocks(x.shape)) is None:
        if x.dtype in (torch.float32, torch.bfloat16, torch.float16) and hasattr(_kernels(x.device.type), "drop"):
            dropped: Tensor = _Drop.apply(x, seed, p)
            return dropped
        return x * mask_of(seed, x.numel(), p, x.dtype).view(x.shape)
    ids, start = blocks
    mask = mask_of(seed, 4 * ids.numel(), p, x.dtype, ids.flatten()).view(len(ids), 4 * ids.size(1))
    if x.size(-1) % 4:
        mask = mask.gather(1, start[:, None] + torch.arange(x.size(-1), device=x.device))
    return x * mask.view(x.shape)


def _kernels(device: str) -> Any:
    """Return the kernels for a type of device, or None."""
    return load_kernels("features", device) if missing_reason(device) is None else None


def mask_of(seed: Tensor, size: int, p: float | Tensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """`[size]`, or `[S, size]` for seeds `[S]`: the mask of `drop` that follows from a seed; with `ids`, only these
    blocks of four words."""
    mask: Tensor = _Keep.apply(seed, size, p, torch.promote_types(dtype, torch.float32), ids)
    return mask.to(dtype)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(seed: Tensor, size: int, p: float | Tensor, dtype: torch.dtype, ids: Tensor | None) -> Tensor:
        kernels = _kernels(device := seed.device.type)
        if kernels is not None and not (device == "cuda" and dtype == torch.float64):
            mask: Tensor = kernels.keep(seed, size, p, dtype, ids)
            return mask
        four = keep_mask(seed, -(-size // 4) if ids is None else ids, 4 * seed.numel(), p, dtype)
        each: Tensor = four.unflatten(1, (*seed.shape, 4)).movedim(0, -2).flatten(-2)
        return each.narrow(-1, 0, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, seed: Tensor, size: int, p: Any, *rest: Any) -> tuple[Tensor, int]:
        seed, p = mapped_draw(info, (in_dims[0], in_dims[2]), seed, p)
        mask: Tensor = _Keep.apply(seed.flatten(), size, p, *rest)
        return mask.unflatten(0, seed.shape), 0


class _Drop(torch.autograd.Function):
    """x k for a seed, or seeds `[S]` and x `[S, ...]`; k is computed again in the backward pass."""

    @staticmethod
    def forward(x: Tensor, seed: Tensor, p: float | Tensor) -> Tensor:
        dropped: Tensor = _kernels(x.device.type).drop(x, seed, p)
        return dropped

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, seed, p = inputs
        save_arguments(ctx, seed, p)
        ctx.save_for_forward(seed, p if isinstance(p, Tensor) else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Drop.apply(grad, *saved_arguments(ctx)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        dropped: Tensor = _Drop.apply(tangent, *saved_arguments(ctx))
        return dropped

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, seed: Tensor, p: float | Tensor) -> tuple[Tensor, int]:
        x = in_front(x, in_dims[0], info.batch_size)
        seed, p = mapped_draw(info, in_dims[1:], seed, p)
        if seed.dim() == 1:
            return _Drop.apply(x, seed, p), 0
        return _Drop.apply(x.flatten(0, 1), seed.flatten(), p).unflatten(0, seed.shape), 0
