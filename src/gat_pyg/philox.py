"""Counter-based random numbers: a dropout mask depends only on a seed, the edge and the head.

The generator is Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). Its key is the
seed; its counter is (edge, head // 4), where the edge is an index in the caller's order, and head % 4 selects one of
the four words. So every backend draws the same mask in any order of the edges, and draws it again in the backward pass
instead of storing it.

Several models on one graph (`torch.func.vmap`) may be computed in one call with the heads of all models. Each model
has its own seed and counts its heads from zero, so that its mask is the same as when it is computed alone. The
probability p of dropout is a number, or a tensor of floating-point numbers, one for each model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .graph.remembered import remembered
from .kernels.device import has_gpu_kernels, missing_reason
from .kernels.models import in_front

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device, p: float | Tensor = 1.0) -> Tensor:
    """Draw a seed of 63 bits from the device's generator, or as `keyed` or `seeds_from` sets, without a sync.

    A model does not draw a seed for dropout with the number 0. Where p is a tensor, which one model of a stack may have
    in the place of 0, the next seeds under `keyed` and `seeds_from` are the same as with the number.
    """
    if torch.compiler.is_compiling() or (stream := _STREAMS.current) is None or _may_be_run_again():
        return _drawn(device)
    return stream.draw(p)


def _drawn(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    if generator is None:  # a compiler refuses a generator as an argument under vmap
        return torch.randint(2**63 - 1, (), device=device)
    return torch.randint(2**63 - 1, (), device=device, generator=generator)


def _may_be_run_again() -> bool:
    """Return True if the caller may be `torch.utils.checkpoint`, which uses hooks or `no_grad` to store no values."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return (hooked or not torch.is_grad_enabled()) and not torch._C._are_functorch_transforms_active()


@contextmanager
def keyed(key: Tensor) -> Iterator[None]:
    """Context manager: the n-th seed that this thread draws depends only on n and the key, not on torch's generator.

    The key is an int64 tensor without dimensions on the device of the data, or the key with its `first_seeds`, which
    are then not computed again. `torch.func.vmap` may map over it: each model then has the same seeds as alone.

    Compiled code ignores the key. So does code outside of `vmap` if saved tensors have hooks or gradients are disabled:
    `torch.utils.checkpoint` may run such code again in the backward pass, with torch's generator restored but no key.

    Example:
        >>> with keyed(torch.tensor(7)):
        ...     first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
        >>> with keyed(torch.tensor(7)):
        ...     again = draw_seed(torch.device("cpu"))
        >>> bool(first == again), bool(first == second)
        (True, False)
    """
    before, _STREAMS.current = _STREAMS.current, _Stream(key)
    try:
        yield
    finally:
        _STREAMS.current = before


def first_seeds(key: Tensor, count: int = 63) -> Tensor:
    """Return keys `[...]`, each followed by the first seeds of its stream: `[..., 1 + count]`, for `keyed`.

    Call this on the CPU: on a GPU, computing a seed takes 13 kernels, and copying it only one.

    Example:
        >>> key = torch.tensor(7)
        >>> with keyed(key):
        ...     seed = draw_seed(torch.device("cpu"))
        >>> bool(first_seeds(key)[1] == seed)
        True
    """
    key = key.unsqueeze(-1)
    steps = torch.arange(1, 1 + count, device=key.device) * _STEP
    return torch.cat([key, _mixed(key + steps)], dim=-1)


@contextmanager
def seeds_from(generators: Sequence[torch.Generator], row: Tensor) -> Iterator[None]:
    """Context manager, also within `torch.func.vmap` over `row`: the model of row s draws its seeds from generator s.

    So each model has the seeds that it draws alone if torch's generator is in the state of its own. There is a
    generator for each row, on the device of the data.

    Example:
        >>> def seed(row):
        ...     with seeds_from([torch.Generator().manual_seed(s) for s in (3, 4)], row):
        ...         return draw_seed(row.device)
        >>> torch.manual_seed(4) and bool(torch.func.vmap(seed)(torch.arange(2))[1] == draw_seed(torch.device("cpu")))
        True
    """
    before, _STREAMS.current = _STREAMS.current, _Generators(generators, row)
    try:
        yield
    finally:
        _STREAMS.current = before


class _Generators:
    """The seeds of several models, each from its own generator."""

    def __init__(self, generators: Sequence[torch.Generator], row: Tensor) -> None:
        self.generators, self.row = generators, row

    def draw(self, p: float | Tensor) -> Tensor:
        if not torch._C._functorch.is_functorch_wrapped_tensor(self.row):
            generator = self.generators[int(self.row)]
            return _drawn(generator.device, generator)
        with torch._C._DisableFuncTorch():  # vmap would draw a seed for each row from each generator
            every = torch.zeros(len(self.generators), dtype=torch.int64, device=self.generators[0].device)  # [S]
            for row, generator in enumerate(self.generators):
                if not isinstance(p, Tensor) or _are_positive(_innermost(p))[row]:
                    every[row].random_(2**63 - 1, generator=generator)  # as `_drawn`, without a copy
        return every[self.row]


def _innermost(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@remembered
def _are_positive(p: Tensor) -> list[bool]:
    return (p > 0).tolist()


class _Stream:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a counter in golden-ratio steps, then a mixing function."""

    def __init__(self, key: Tensor) -> None:
        self.seeds = key.view(-1)  # the key, followed by the seeds that are computed already
        self.calls = 0
        self.zeros: int | Tensor = 0  # calls with a tensor p that is 0, which are not counted

    def draw(self, p: float | Tensor) -> Tensor:
        self.calls += 1
        if isinstance(p, Tensor):
            self.zeros = self.zeros + (p == 0).long()
        count = self.calls - self.zeros
        if self.calls >= self.seeds.numel():
            return _mixed(self.seeds[0] + (_wrapped(count * _GOLDEN) if isinstance(count, int) else count * _STEP))
        if isinstance(count, int):
            return self.seeds[count].clone()  # a copy, since the next epoch overwrites `seeds`
        return self.seeds.gather(0, count.view(1)).view(())


_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ _shifted(word, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    word = (word ^ _shifted(word, 27)) * _wrapped(0x94D049BB133111EB)
    return (word ^ _shifted(word, 31)) & (2**63 - 1)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Return a logical shift to the right, which fills with zeros."""
    mask: int = 2 ** (64 - by) - 1
    return (word >> by) & mask


def _wrapped(number: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


_STEP = _wrapped(_GOLDEN)


@contextmanager
def global_rows(rows: Tensor, num_rows: int, sizes: tuple[int, ...]) -> Iterator[None]:
    """Context manager: draw for x `[..., n, F]` the dropout mask of these rows of the full matrix `[..., num_rows, F]`.

    Args:
        rows: `[N]`, indices of rows of the full matrix; an x with n rows consists of the first n of them.
        num_rows: the number of rows of the full matrix.
        sizes: the allowed values of n.
    """
    before, _STREAMS.rows = _STREAMS.rows, (rows, num_rows, sizes)
    try:
        yield
    finally:
        _STREAMS.rows = before


def philox_blocks(shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """Return the Philox blocks that cover each row of x, or None outside of `global_rows`.

    Returns:
        For x `[..., n, F]` with R rows in all, the blocks of 4 words each, `[R, blocks]`, and the offset in the first
        block, `[R]`.

    Raises:
        ValueError: if the number of rows n is not one of the `sizes` of `global_rows`.
    """
    if (whole := _STREAMS.rows) is None or torch.compiler.is_compiling():
        return None
    rows, num_rows, sizes = whole
    *several, n, width = shape
    if n not in sizes:
        raise ValueError(f"x has {n} rows to drop out, expected those of a part of a graph: {sizes}.")
    copies = torch.arange(math.prod(several), device=rows.device)
    first = ((copies[:, None] * num_rows + rows[:n]) * width).flatten()
    count = (width + (6 if width % 4 else 0)) // 4
    return (first // 4)[:, None] + torch.arange(count, device=rows.device), first % 4


class _Streams(threading.local):
    current: _Stream | _Generators | None = None
    rows: tuple[Tensor, int, tuple[int, ...]] | None = None


_STREAMS = _Streams()


def drops(p: float | Tensor) -> bool:
    """Return False if p is 0, so that dropout keeps everything. A tensor's value is not read, and the result is True.

    Raises:
        ValueError: if a number is outside [0, 1], or a tensor is not one floating-point number.
    """
    if not isinstance(p, Tensor):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout is {p}, expected a probability in [0, 1].")
        return p > 0.0
    if p.dim() or not p.is_floating_point():
        raise ValueError(
            f"dropout is a tensor of shape {tuple(p.shape)} and dtype {p.dtype}, expected one floating-point number."
        )
    return True


def threshold(p: float | Tensor) -> Any:
    """Return the smallest 32-bit word with which a coefficient is kept: a share p of all words is below it."""
    return (p.double() * 2**32).long() if isinstance(p, Tensor) else math.floor(p * 2**32)


def keep_mask(
    seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the dropout mask k_ij in the caller's edge order, `[E, H]`: 0, or 1 / (1 - p) with probability 1 - p.

    `edges` is the number of edges, or their dropout ids `[E]` if these are not their indices. With seeds `[S]`, the
    result holds the masks of S models side by side: H counts the heads of all models, H // S each. A tensor p is one
    number, or `[S]`; in float64 it gives the same bits as a number.
    """
    mask: Tensor = _KeepMask.apply(seed, edges, heads, p, dtype)
    return mask


class _KeepMask(torch.autograd.Function):
    @staticmethod
    def forward(seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor, dtype: torch.dtype) -> Tensor:
        return draw_mask(seed, edges, heads, p, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, seed: Tensor, edges: Any, heads: int, p: Any, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        seed, p = mapped_draw(info, (in_dims[0], in_dims[3]), seed, p)
        mask = keep_mask(seed.flatten(), edges, info.batch_size * heads, p, dtype)
        return mask.unflatten(1, (info.batch_size, heads)), 1


def mapped_draw(info: Any, in_dims: Any, seed: Tensor, p: Any) -> tuple[Tensor, Any]:
    """Return the seeds `[S, ...]` of a mapped draw, and p: a number, or `[S ...]`, one for each seed."""
    seed, p = (in_front(value, dim, info.batch_size) for value, dim in zip((seed, p), in_dims, strict=True))
    return seed, each_p(p.view(*p.shape, *[1] * (seed.dim() - p.dim())), seed) if isinstance(p, Tensor) else p


def each_p(p: Tensor, seed: Tensor) -> Tensor:
    """Return a tensor p for each of the seeds, `[S]`."""
    return p.expand_as(seed).reshape(-1)


def draw_mask(
    seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the mask of `keep_mask`, outside of torch.func's transforms."""
    mask = draw_kept(seed, edges, heads, p).to(dtype)
    if isinstance(p, Tensor):
        kept = (1.0 - each_p(p, seed).double()).to(dtype)  # [S]
        return mask / kept.masked_fill(kept == 0.0, 1.0).repeat_interleave(heads // seed.numel())
    return mask / (1.0 - p) if p < 1.0 else mask


def draw_kept(seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor) -> Tensor:
    """Return where the mask of `keep_mask` is not 0, `[E, H]`, outside of torch.func's transforms.

    On CUDA by one kernel, and by the same arithmetic in plain torch where there is no Triton and in traced code.
    """
    is_traced = type(seed) is not Tensor or torch.compiler.is_compiling()
    if has_gpu_kernels(seed) and not is_traced and missing_reason(seed.device.type) is None:
        from .kernels.gpu.draw import kept

        return kept(seed, edges, heads, p)
    each = heads // seed.numel()
    edge = torch.arange(edges, device=seed.device) if isinstance(edges, int) else edges.long()
    edge = edge.view(-1, 1, 1)
    group = torch.arange((each + 3) // 4, device=seed.device)
    words = torch.stack(_philox(seed.view(-1, 1), edge, group), dim=-1)  # [E, S, H / S / 4, 4]
    least = threshold(each_p(p, seed).view(-1, 1) if isinstance(p, Tensor) else p)
    is_kept: Tensor = words.flatten(2)[..., :each] >= least
    return is_kept.flatten(1)


def uniform(seed: Tensor, rows: int, columns: int) -> Tensor:
    """Draw uniform numbers from [0, 1), `[rows, columns]`; the seed determines them on every device.

    Example:
        >>> u = uniform(torch.tensor(7), 1000, 10)
        >>> bool(u.min() >= 0), bool(u.max() < 1), round(float(u.mean()), 1)
        (True, True, 0.5)
    """
    row = torch.arange(rows, device=seed.device)[:, None]
    words = _philox(seed, row, torch.arange((columns + 3) // 4, device=seed.device))
    return (torch.stack(words, dim=-1).flatten(1)[:, :columns] >> 8).float() * 2**-24


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
    """Return the high and the low word of a product; int64 overflows like uint64."""
    product = word * by
    return (product >> 32) & _LOW, product & _LOW
