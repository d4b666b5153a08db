"""Which attention coefficients are dropped: random words that depend on a seed, an edge and a head, and nothing else.

The generator is Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). Its key is the
seed; its counter is (edge, head // 4), the edge by its place in the caller's order, and head % 4 says which of its
four words is the head's. So every backend draws the same mask, in whatever order it meets the edges, and again in the
backward pass, without keeping it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator on the device, 64-bit, without a sync."""
    return torch.randint(2**63 - 1, (), device=device)


def threshold(p: float) -> int:
    """A coefficient is kept if its word is at least this: 2^32 p of the 2^32 words are less."""
    return math.floor(p * 2**32)


def keep_mask(seed: Tensor, num_edges: int, heads: int, p: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """k_ij in the caller's edge order, `[E, H]`: 0, or 1 / (1 - p) with probability 1 - p.

    Where `torch.func.vmap` maps over seeds, the first one is for all, and each has heads of its own.
    """
    mask: Tensor = _KeepMask.apply(seed, num_edges, heads, p, dtype)
    return mask


class _KeepMask(torch.autograd.Function):
    @staticmethod
    def forward(seed: Tensor, num_edges: int, heads: int, p: float, dtype: torch.dtype) -> Tensor:
        return _mask(seed, num_edges, heads, p, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, seed: Tensor, num_edges: int, heads: int, *rest: Any) -> tuple[Tensor, int]:
        mask = keep_mask(seed.select(in_dims[0], 0), num_edges, info.batch_size * heads, *rest)
        return mask.unflatten(1, (info.batch_size, heads)), 1


def _mask(seed: Tensor, num_edges: int, heads: int, p: float, dtype: torch.dtype) -> Tensor:
    edge = torch.arange(num_edges, device=seed.device).unsqueeze(1)
    group = torch.arange((heads + 3) // 4, device=seed.device)
    words = torch.stack(_philox(seed, edge, group), dim=-1).flatten(1)[:, :heads]
    kept = (words >= threshold(p)).to(dtype)
    return kept / (1.0 - p) if p < 1.0 else kept


def _philox(seed: Tensor, edge: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = edge & _LOW, edge >> 32, group, torch.zeros_like(group)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    words: Any = torch.broadcast_tensors(c0, c1, c2, c3)
    return tuple(words)


def _product(word: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product; int64 wraps as uint64 does."""
    product = word * by
    return (product >> 32) & _LOW, product & _LOW
