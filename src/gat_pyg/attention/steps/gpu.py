"""Steps that the CUDA kernels of all scores share: softmax of a row, its launch, merge of chunks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.draw import drop_arguments
from ...kernels.gpu.rows import Walk, all_models, beside, offset, slab, stack_arguments, store_row, walk_of
from ..score import Operation

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(b_e):
    """A score, or 0 for that of no edge."""
    return tl.where(b_e == float("-inf"), 0.0, b_e)


@triton.jit
def alpha(b_z, b_lse, slope, m_eh):
    """The attention coefficient exp(e - lse), at most 1 however e and lse were rounded; NaN where either is NaN."""
    b_log = tl.minimum(leaky(b_z, slope) - b_lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(m_eh, tl.exp2(b_log * LOG2E), 0.0)


@triton.jit
def leaky(b_z, slope):
    """LeakyReLU of a score."""
    return tl.where(b_z > 0.0, b_z, slope * b_z)


@triton.jit
def online_softmax(b_e, b_top):
    """A step of the online softmax: the new maximum, the factor for what was summed so far, and exp(e - maximum)."""
    b_new = tl.maximum(b_top, tl.max(b_e, 0))
    b_base = finite(b_new)
    return b_new, tl.exp2((b_top - b_base) * LOG2E), tl.exp2((b_e - b_base[None, :]) * LOG2E)


@triton.jit
def attend(b_e, b_x, b_factor, b_top, b_mass, b_out, m_eh):
    """A step of equations (2) and (4) by the online softmax, for edges with scores e, features x and factors k w.

    Returns the new maximum, mass and output; for other sums, the factor for what was summed so far and exp(e - max).
    """
    b_top, b_shrink, b_exp = online_softmax(tl.where(m_eh, b_e, float("-inf")), b_top)
    b_mass = b_mass * b_shrink[None, :] + b_exp
    b_out = b_out * b_shrink[:, None] + tl.sum((b_exp * b_factor)[:, :, None] * b_x, 0)
    return b_top, b_mass, b_out, b_shrink, b_exp


@triton.jit
def store_attended(
    p_out, p_lse, p_chunks, p_chunks_h, b_top, b_mass, b_out, i_row, i_h, o_hc, m_h, m_hc, is_whole, is_chunk, H, C
):
    """Store O and the log-sum-exp of a row or chunk."""
    b_lse = b_top + tl.log2(b_mass) * LN2
    b_out /= b_mass[:, None]
    o_chunk, o_chunk_h = offset(tl.program_id(0), H * C) + o_hc, offset(tl.program_id(0), H) + i_h
    store_row(p_out, p_chunks, offset(i_row, H * C) + o_hc, o_chunk, b_out, m_hc, is_whole, is_chunk)
    if p_chunks is not None:
        tl.store(p_chunks_h + o_chunk_h, b_lse, mask=m_h & is_chunk)
    tl.store(p_lse + offset(i_row, H) + i_h, finite(b_lse), mask=m_h & is_whole)


@triton.jit
def total_mass(b_mass):
    """The denominator of equation (2); 1 where there is no edge."""
    b_mass = tl.sum(b_mass, 0)
    return tl.where(b_mass == 0.0, 1.0, b_mass)


@triton.jit
def store_edges(p_weights, i_place, i_h, m_eh, b_w, b_f, H):
    """Store two numbers an edge and head in `[E, 2, H]`."""
    p_edge = p_weights + offset(i_place, 2 * H)[:, None] + i_h[None, :]
    tl.store(p_edge, b_w, mask=m_eh)
    tl.store(p_edge + H, b_f, mask=m_eh)


@triton.jit
def load_edges(p_weights, i_place, i_h, m_eh, H):
    """Load what `store_edges` has stored."""
    p_edge = p_weights + offset(i_place, 2 * H)[:, None] + i_h[None, :]
    return tl.load(p_edge, mask=m_eh, other=0.0), tl.load(p_edge + H, mask=m_eh, other=0.0)


@triton.jit(do_not_specialize=["models"])
def _merge_kernel(
    p_chunks,
    p_chunks_h,
    p_rows,
    p_first,
    p_out,
    p_lse,
    p_out_plus,
    p_mass_plus,
    models,
    EACH: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """For one split row of chunks q, in their order: O = sum_q softmax(lse_q) O_q, lse = log sum_q exp lse_q.

    O+ and A+ of all chunks follow after O and lse of all.
    """
    H = all_models(EACH, models)
    i_row = tl.load(p_rows + tl.program_id(0))
    first, stop = tl.load(p_first + tl.program_id(0)), tl.load(p_first + tl.program_id(0) + 1)
    num_chunks = tl.load(p_first + tl.num_programs(0))
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([BLOCK_H], tl.float32)
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for i_first in tl.range(first, stop, BLOCK_E):
        i_chunk = i_first + tl.arange(0, BLOCK_E)
        m_eh = (i_chunk < stop)[:, None] & m_h[None, :]
        m_ehc = (i_chunk < stop)[:, None, None] & m_hc[None, :, :]
        p_chunk = p_chunks + offset(i_chunk, H * C)[:, None, None] + o_hc[None, :, :]
        p_chunk_h = p_chunks_h + offset(i_chunk, H)[:, None] + i_h[None, :]
        b_e = tl.load(p_chunk_h, mask=m_eh, other=float("-inf"))
        b_top, b_shrink, b_exp = online_softmax(b_e, b_top)
        b_mass = b_mass * b_shrink + tl.sum(b_exp, 0)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * tl.load(p_chunk, mask=m_ehc, other=0.0), 0)
        if p_out_plus is not None:
            b_chunk = tl.load(p_chunk + offset(num_chunks, H * C), mask=m_ehc, other=0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * b_chunk, 0)
            b_chunk = tl.load(p_chunk_h + offset(num_chunks, H), mask=m_eh, other=0.0)
            b_mass_plus = b_mass_plus * b_shrink + tl.sum(b_exp * b_chunk, 0)

    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    o_row, o_row_h = offset(i_row, H * C) + o_hc, offset(i_row, H) + i_h
    tl.store(p_out + o_row, b_out / b_mass[:, None], mask=m_hc)
    tl.store(p_lse + o_row_h, finite(b_top + tl.log2(b_mass) * LN2), mask=m_h)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus / b_mass[:, None], mask=m_hc)
        tl.store(p_mass_plus + o_row_h, b_mass_plus / b_mass, mask=m_h)


def of_rows(edges: Edges, wanted: bool, *shape: int, device: torch.device) -> Tensor | None:
    """Room for a gradient of what belongs to edges, zero where a row may have no edge; None if it is not wanted."""
    make = torch.empty if edges.num_rows == edges.num_edges else torch.zeros
    return make(shape, dtype=torch.float32, device=device) if wanted else None


def forward_pass(kernel: Any, call: Operation, out: Tensor, **operands: Any) -> Tensor:
    """Compute O by the forward kernel of a score with these operands, and return its log-sum-exp.

    Merge the chunks of long rows; of operands that a kernel writes, `p_out_plus`, `p_mass_plus` and `p_out_edge` too.
    """
    x, edges, models = operands["p_x"], call.edges, call.x.shape[:-3].numel()
    (weight,), (_, heads, channels) = beside(call.x.shape[:-3], call.edge_weight), x.shape
    lse: Tensor = x.new_empty(edges.num_dst, heads, dtype=torch.float32)
    positive, out_edge = (operands.get("p_out_plus"), operands.get("p_mass_plus")), operands.get("p_out_edge")
    if out.numel() == 0:
        for result in (lse, *positive, out_edge):
            if result is not None:
                result.zero_()
        return lse
    features = 0 if out_edge is None else out_edge.size(2)
    walk = walk_of(edges, "dst", models, heads, channels, features)
    parts = 1 if positive[0] is None else 2
    held, held_h = walk.hold(parts, heads, channels), walk.hold(parts, heads)
    if out_edge is not None:
        held_edge = operands["p_chunks_edge"] = walk.hold(heads, features)
    with torch.cuda.device_of(x):
        kernel[(walk.items, walk.slabs)](
            p_edge_weight=weight,
            p_src=edges.src,
            p_perm=edges.perm,
            p_out=out,
            p_lse=lse,
            p_chunks=held,
            p_chunks_h=held_h,
            **operands,
            **drop_arguments(call.dropout, call.seed, edges.dropout_ids_by_dst),
            **walk.arguments,
        )
        _merge(walk, held, held_h, out, lse, *positive)
        if out_edge is not None:
            _merge(walk, held_edge, held_h, out_edge, lse, None, None)
    return lse


def _merge(walk: Walk, held: Tensor | None, held_h: Tensor | None, out: Tensor, *others: Tensor | None) -> None:
    """Merge the chunks of long rows into the results of their rows: O, and log-sum-exp, O+ and A+."""
    if walk.chunks is not None:
        chunks, tile = walk.chunks, walk.tile._replace(channels=triton.next_power_of_2(out.size(2)))
        tensors = held, held_h, chunks.rows, chunks.first, out, *others
        sizes = stack_arguments(walk.models, walk.heads) | {"C": out.size(2)}
        _merge_kernel[(chunks.rows.numel(), walk.slabs)](*tensors, **sizes, **tile.blocks)
