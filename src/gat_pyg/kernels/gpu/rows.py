"""Rows of edges as work items on CUDA: chunks of long rows, tiles, launches."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import SPLIT as SPLIT
from ...graph.edges import Edges, Side, count_long, indices_of
from ...graph.remembered import remembered
from ..models import to_heads, to_models
from . import FP_FUSION

# Constants of the launches. `benchmarks/attention.py --variants` compares them with the values in `VARIANTS`.

NUMBERS = 1024  # of a block of features, for each warp
SLAB = 256  # numbers of a row's features that a program has at most, unless a head is wider
AHEAD = 4  # blocks of edges in a row on average from which on loads run ahead, through shared memory
STRIDED = 1 << 24  # bytes: scores of both ends up to this size are read as slices of one tensor, without copies

VARIANTS = ("AHEAD=1", "NUMBERS=512", "NUMBERS=2048", "SLAB=1024", "SPLIT=32", "SPLIT=64", "SPLIT=128")

# What the kernels share. A kernel takes several tensors as one tuple, whose elements Triton passes one by one.
# An integer that a kernel is not specialised for is an argument of its own, which `do_not_specialize` names.

# What a kernel is compiled for, a `tl.constexpr` each, or None where the kernel does not need it.
Sizes = namedtuple("Sizes", "EACH C D BLOCK_E BLOCK_H BLOCK_C BLOCK_D SPLIT STAGES STRIDE X_STRIDE")


class CSR(NamedTuple):
    """The edges in rows, by dst or by src, as the kernels take them."""

    p_ptr: Tensor
    p_chunk_row: Tensor | None
    p_chunk_start: Tensor | None
    p_ends: Tensor  # the ids of the other ends
    p_ids: Tensor | None  # of the edges: the caller's by dst, the places by dst for those by src


@triton.jit
def offset(i_row, WIDTH):
    """The offset of a row of `WIDTH` elements, in int64: N x H x C passes 2^31 long before N does."""
    return i_row.to(tl.int64) * WIDTH


@triton.jit
def row_width(WIDTH, STRIDE: tl.constexpr):
    """The number of elements from one row to the next: `STRIDE`, or `WIDTH`."""
    if STRIDE is None:
        return WIDTH
    else:
        return STRIDE


@triton.jit
def all_models(EACH: tl.constexpr, models):
    """The heads, or the elements, of all models: a product, so that the compiler knows it is divisible by `EACH`."""
    if models is None:
        return EACH
    else:
        return models * EACH


@triton.jit
def work_item(i_item, csr, num_chunks, SPLIT: tl.constexpr):
    """The row of a work item, its first edge, how many, and whether they are the whole row or a chunk of it.

    The first `num_chunks` items, the longest, are chunks; then comes one for each row, idle where the row is split.
    """
    is_chunk = i_item < num_chunks
    i_row = (i_item - num_chunks).to(tl.int64)
    if csr.p_chunk_row is not None:
        i_row = tl.where(is_chunk, tl.load(csr.p_chunk_row + i_item, mask=is_chunk, other=0), i_row)
    start = tl.load(csr.p_ptr + i_row)
    stop = tl.load(csr.p_ptr + i_row + 1)
    is_whole = stop - start <= SPLIT
    if csr.p_chunk_row is not None:
        start = tl.where(is_chunk, tl.load(csr.p_chunk_start + i_item, mask=is_chunk, other=0), start)
    count = tl.minimum(stop - start, SPLIT).to(tl.int32)
    return i_row, start, tl.where(is_whole | is_chunk, count, 0), is_whole, is_chunk


@triton.jit
def slab(H, C, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr):
    """The heads of the program, their features within a row, and the masks of the heads and features that exist."""
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    m_h = i_h < H
    return i_h, i_h[:, None] * C + o_c[None, :], m_h, m_h[:, None] & (o_c < C)[None, :]


@triton.jit
def block_of_edges(o_first, count, m_h, BLOCK_E: tl.constexpr):
    """The offsets of the row's edges from `o_first` on, and the masks of those that exist, without and with heads."""
    o_e = o_first + tl.arange(0, BLOCK_E)
    m_e = o_e < count
    return o_e, m_e, m_e[:, None] & m_h[None, :]


@triton.jit
def gather_features(p_x, i_row, o_hc, m_e, m_hc, WIDTH):
    """`[edges, heads, channels]`: the features of one end of each edge, in float32."""
    o_x = offset(i_row, WIDTH)[:, None, None] + o_hc[None, :, :]
    return tl.load(p_x + o_x, mask=m_e[:, None, None] & m_hc[None, :, :], other=0.0).to(tl.float32)


@triton.jit
def store_row(p_rows, p_chunks, o_row, o_chunk, b_row, m_row, is_whole, is_chunk):
    """Store the result of a whole row, or that of a chunk in its own place."""
    tl.store(p_rows + o_row, b_row, mask=m_row & is_whole)
    if p_chunks is not None:
        tl.store(p_chunks + o_chunk, b_row, mask=m_row & is_chunk)


@triton.jit
def gather(p_terms, i_row, i_h, m_eh, H, none: tl.constexpr = 0.0):
    """`[edges, heads]`: a term of the score, or the weights of edges, in float32; `none` if there are none."""
    if p_terms is None:
        return none
    else:
        return tl.load(p_terms + offset(i_row, H)[:, None] + i_h[None, :], mask=m_eh, other=0.0).to(tl.float32)


@triton.jit
def load_row(p_rows, o_row, m_row):
    """Load the values of one row in float32; 0 if there are none."""
    if p_rows is None:
        return 0.0
    else:
        return tl.load(p_rows + o_row, mask=m_row, other=0.0).to(tl.float32)


@triton.jit
def edge_id(p_ids, i_place, m_e):
    """Ids of the edges at CSR positions `i_place`: the caller's, or those used by dropout."""
    if p_ids is None:
        return i_place
    else:
        return tl.load(p_ids + i_place, mask=m_e, other=0)


# On the host.


class Chunks(NamedTuple):
    """The chunks of the rows of more than `SPLIT` edges."""

    row: Tensor  # [P], of each chunk
    start: Tensor  # [P], its first edge
    rows: Tensor  # [S], the rows that are split
    first: Tensor  # [S + 1], the chunks of rows[k] are first[k]:first[k + 1]


@remembered
def chunks_of(edges: Edges, side: Side) -> Chunks | None:
    """Return the chunks of long rows by "dst" or by "src", remembered with the edges, or None if no row is long.

    Without a device sync: `Edges` counted the long rows when it was built.
    """
    ptr = edges.rowptr if side == "dst" else edges.transpose[0]
    num_rows, num_chunks = map(int, count_long(ptr, SPLIT) if edges.long is None else edges.long[side])
    if num_rows == 0:
        return None
    degree = ptr.diff()
    rows = indices_of(degree > SPLIT, num_rows)
    number = (degree.index_select(0, rows) + SPLIT - 1) // SPLIT
    first = torch.cat([number.new_zeros(1), number.cumsum(0)])
    row = rows.repeat_interleave(number, output_size=num_chunks)
    place = torch.arange(num_chunks, device=ptr.device) - first[:-1].repeat_interleave(number, output_size=num_chunks)
    return Chunks(row, ptr.index_select(0, row) + place * SPLIT, rows, first)


class Tile(NamedTuple):
    """The block that a program processes at a time: `edges x heads x channels` at a time."""

    edges: int
    heads: int
    channels: int
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """What kernels are compiled for by the tile."""
        return {"BLOCK_E": self.edges, "BLOCK_H": self.heads, "BLOCK_C": self.channels, "num_warps": self.warps}


@functools.lru_cache(1024)
def tile_for(models: int, heads: int, channels: int, degree: float, features: int = 0) -> Tile:
    """A slab of heads of up to `SLAB` numbers, or one wider head; `NUMBERS` a warp, less for short rows.

    Stacks of all sizes use the same tile, since every further tile is one more kernel to compile.
    Loads run ahead, through shared memory, where rows are long enough to gain by it and two tiles fit into the 99 KiB
    that a desktop GPU has.
    With `features` of edges that are attended to beside x, half as many edges, whose features take as many registers.
    """
    block_c = triton.next_power_of_2(max(1, channels))
    width = max(block_c, triton.next_power_of_2(max(1, features)))
    block_h = max(1, SLAB // width)
    if models == 1:
        block_h = min(triton.next_power_of_2(heads), block_h)
    warps = min(16, max(1, block_h * width // 256))
    block_e = max(1, (NUMBERS // 2 if features else NUMBERS) * warps // (block_h * width))
    block_e = min(block_e, max(4, triton.next_power_of_2(round(degree))))
    return Tile(block_e, block_h, block_c, warps, 3 if degree > AHEAD * block_e and warps <= 4 else 1)


@functools.lru_cache(1024)
def compiled_for(num_warps: int = 4, **sizes: Any) -> dict[str, Any]:
    """Return a kernel's arguments for the sizes that it is compiled for, numbers or None."""
    values: dict[str, Any] = dict.fromkeys(Sizes._fields)
    values |= {name: tl.constexpr(size) for name, size in sizes.items() if size is not None}
    return {
        "SIZES": Sizes(**dict.fromkeys(Sizes._fields) | values),
        "num_warps": num_warps,
        "enable_fp_fusion": FP_FUSION,
    }


def stacked(models: int, heads: int, **sizes: Any) -> dict[str, Any]:
    """Return a kernel's arguments for the heads of all models, and for the other sizes that it is compiled for."""
    return {"models": None if models == 1 else models, **compiled_for(EACH=heads // models, **sizes)}


class Walk:
    """A launch over the rows of one side, and over the chunks of its long rows.

    Attributes:
        items: the number of work items: the chunks of long rows, then the rows.
        slabs: the number of slabs of heads.
    """

    def __init__(self, edges: Edges, side: Side, models: int, heads: int, channels: int, features: int) -> None:
        by_dst, self.chunks = (edges.rowptr, edges.src, edges.perm), chunks_of(edges, side)
        ptr, ends, ids = by_dst if side == "dst" else edges.transpose
        self.models, self.heads, self.device = models, heads, ptr.device
        num_rows = ptr.numel() - 1
        row, start, *_ = (None, None) if self.chunks is None else self.chunks
        self.num_chunks = 0 if row is None else row.numel()
        mostly_chunks = 4 * SPLIT * self.num_chunks > edges.num_edges
        degree = SPLIT if mostly_chunks else edges.num_edges / num_rows
        self.tile = tile_for(models, heads, channels, degree, features)
        self.items, self.slabs = self.num_chunks + num_rows, -(-heads // self.tile.heads)
        self._csr = {"csr": CSR(ptr, row, start, ends, ids), "num_chunks": self.num_chunks}
        self._sizes = {"C": channels, "SPLIT": SPLIT, "STAGES": self.tile.stages, **self.tile.blocks}

    def arguments(self, **sizes: Any) -> dict[str, Any]:
        """Return a kernel's arguments for the rows, chunks, heads and tile, and for what else it is compiled for."""
        return self._csr | stacked(self.models, self.heads, **self._sizes, **sizes)

    def hold(self, *widths: int) -> Tensor | None:
        """Room for a result of each chunk."""
        if self.chunks is None:
            return None
        return torch.empty(self.num_chunks, *widths, dtype=torch.float32, device=self.device)

    def sum(self, held: Tensor | None, *results: Tensor | None) -> None:
        """Add up the chunks' results, in their order, as those of their rows, which lie side by side in `held`."""
        if self.chunks is None or held is None:
            return
        totals, at = torch.segment_reduce(held, "sum", offsets=self.chunks.first, axis=0, unsafe=True), 0
        for result in results:
            if result is not None:
                width = result.numel() // result.size(0)
                total = totals[:, at : at + width].to(result.dtype)
                result.view(-1, width).index_copy_(0, self.chunks.rows, total)
                at += width


@remembered
def walk_of(edges: Edges, side: Side, models: int, heads: int, channels: int, features: int = 0) -> Walk:
    """Return the launch over the rows by "dst" or by "src" for heads of these sizes, remembered with the edges."""
    return Walk(edges, side, models, heads, channels, features)


def beside(models: torch.Size, *tensors: Tensor | None) -> list[Any]:
    """The tensors, contiguous; with models `[S, rows, H, ...]` as `[rows, S H, ...]`, their heads side by side."""
    if models:
        tensors = tuple(None if tensor is None else to_heads(tensor, 1) for tensor in tensors)
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def apart(models: torch.Size, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The inverse of `beside`."""
    if not models:
        return tensors
    return tuple(None if tensor is None else to_models(tensor, 1, *models) for tensor in tensors)
