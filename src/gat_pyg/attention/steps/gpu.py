"""Steps that the CUDA kernels of all scores share: the forward pass, softmax of a row, merge of chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.draw import draw, drop_arguments
from ...kernels.gpu.rows import (
    Walk,
    all_models,
    apart,
    beside,
    edge_id,
    gather,
    load_row,
    offset,
    stack_arguments,
    work_item,
)

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


# Forward.


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _forward_kernel(
    p_x,
    p_x_dst,
    p_att,
    p_score_src,
    p_score_dst,
    p_score_edge,
    p_ptr,
    p_src,
    p_perm,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_names,
    p_out,
    p_lse,
    p_out_plus,
    p_mass_plus,
    p_chunks,
    p_chunks_h,
    num_chunks,
    models,
    slope,
    scale,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one dst i: O_i = sum_j k_ij alpha_ij x_j, alpha_ij = exp(e_ij - lse_i), lse_i = log sum_j exp e_ij.

    e_ij is LeakyReLU(s_j + d_i + u_ij); with `p_x_dst`, att . LeakyReLU(x_j + x_i), or scale <x_i, x_j> without att.
    O+ and A+ are what the edges with z > 0 give of O and of the attention mass. The softmax is online: what was summed
    is scaled down when a larger score comes. A chunk leaves O, O+ in `p_chunks` and lse, A+ in `p_chunks_h`.
    """
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_row_h = offset(i_row, H * C) + o_hc, offset(i_row, H) + i_h
    b_d = load_row(p_score_dst, o_row_h, m_h)
    b_x_dst = load_row(p_x_dst, o_row, m_hc)
    b_att = load_row(p_att, o_hc, m_hc)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_mass_plus = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        m_ehc = m_e[:, None, None] & m_hc[None, :, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        i_edge = edge_id(p_perm, start + o_e, m_e)
        o_x = offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_ehc, other=0.0).to(tl.float32)
        b_z = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
        if p_att is not None:
            b_e = tl.sum(b_att[None, :, :] * leaky(b_x + b_x_dst[None, :, :], slope), 2)
        elif p_x_dst is not None:
            b_e = tl.sum(b_x * b_x_dst[None, :, :], 2) * scale
        else:
            b_z += b_d
            b_z += gather(p_score_src, i_src, i_h, m_eh, H)
            b_z += gather(p_score_edge, i_edge, i_h, m_eh, H)
            b_e = leaky(b_z, slope)
        b_top, b_shrink, b_exp = online_softmax(tl.where(m_eh, b_e, float("-inf")), b_top)
        b_mass = b_mass * b_shrink[None, :] + b_exp
        b_w = b_exp
        if p_seed is not None:
            i_name = edge_id(p_names, start + o_e, m_e)
            b_w *= draw(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)
        if p_out_plus is not None:
            b_mass_plus = b_mass_plus * b_shrink[None, :] + tl.where(b_z > 0.0, b_exp, 0.0)
            b_w = tl.where(b_z > 0.0, b_w, 0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)

    b_mass, b_mass_plus = tl.sum(b_mass, 0), tl.sum(b_mass_plus, 0)
    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    b_lse = b_top + tl.log2(b_mass) * LN2
    b_out /= b_mass[:, None]
    b_out_plus /= b_mass[:, None]
    b_mass_plus /= b_mass
    if p_chunks is not None:
        o_chunk, o_chunk_h = offset(tl.program_id(0), 2 * H * C) + o_hc, offset(tl.program_id(0), 2 * H) + i_h
        tl.store(p_chunks + o_chunk, b_out, mask=m_hc & is_chunk)
        tl.store(p_chunks_h + o_chunk_h, b_lse, mask=m_h & is_chunk)
        if p_out_plus is not None:
            tl.store(p_chunks + o_chunk + H * C, b_out_plus, mask=m_hc & is_chunk)
            tl.store(p_chunks_h + o_chunk_h + H, b_mass_plus, mask=m_h & is_chunk)
    tl.store(p_out + o_row, b_out, mask=m_hc & is_whole)
    tl.store(p_lse + o_row_h, finite(b_lse), mask=m_h & is_whole)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus, mask=m_hc & is_whole)
        tl.store(p_mass_plus + o_row_h, b_mass_plus, mask=m_h & is_whole)


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
    """For one split row of chunks q, in their order: O = sum_q softmax(lse_q) O_q, lse = log sum_q exp lse_q."""
    H = all_models(EACH, models)
    i_row = tl.load(p_rows + tl.program_id(0))
    first, stop = tl.load(p_first + tl.program_id(0)), tl.load(p_first + tl.program_id(0) + 1)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([BLOCK_H], tl.float32)
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for i_first in tl.range(first, stop, BLOCK_E):
        i_chunk = i_first + tl.arange(0, BLOCK_E)
        m_eh = (i_chunk < stop)[:, None] & m_h[None, :]
        m_ehc = (i_chunk < stop)[:, None, None] & m_hc[None, :, :]
        p_chunk = p_chunks + offset(i_chunk, 2 * H * C)[:, None, None] + o_hc[None, :, :]
        p_chunk_h = p_chunks_h + offset(i_chunk, 2 * H)[:, None] + i_h[None, :]
        b_e = tl.load(p_chunk_h, mask=m_eh, other=float("-inf"))
        b_top, b_shrink, b_exp = online_softmax(b_e, b_top)
        b_mass = b_mass * b_shrink + tl.sum(b_exp, 0)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * tl.load(p_chunk, mask=m_ehc, other=0.0), 0)
        if p_out_plus is not None:
            b_chunk = tl.load(p_chunk + H * C, mask=m_ehc, other=0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * b_chunk, 0)
            b_chunk = tl.load(p_chunk_h + H, mask=m_eh, other=0.0)
            b_mass_plus = b_mass_plus * b_shrink + tl.sum(b_exp * b_chunk, 0)

    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    o_row, o_row_h = offset(i_row, H * C) + o_hc, offset(i_row, H) + i_h
    tl.store(p_out + o_row, b_out / b_mass[:, None], mask=m_hc)
    tl.store(p_lse + o_row_h, finite(b_top + tl.log2(b_mass) * LN2), mask=m_h)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus / b_mass[:, None], mask=m_hc)
        tl.store(p_mass_plus + o_row_h, b_mass_plus / b_mass, mask=m_h)


def forward(
    x: Tensor,
    x_dst: Tensor | None,
    att: Tensor | None,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    score_edge: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    plus: bool,
) -> tuple[Tensor, ...]:
    """Return O, its log-sum-exp and, where `plus`, O+ and A+; of scores of pairs if `x_dst` is there."""
    models = x.shape[:-3]
    x, x_dst, score_src, score_dst, score_edge = beside(models, x, x_dst, score_src, score_dst, score_edge)
    num_dst, (_, heads, channels) = edges.num_dst, x.shape
    out = x.new_empty(num_dst, heads, channels, dtype=dtype)
    lse = x.new_empty(num_dst, heads, dtype=torch.float32)
    of_positive = (torch.empty_like(out), torch.empty_like(lse)) if plus else ()
    if out.numel() == 0:
        return apart(models, out, lse.zero_(), *(t.zero_() for t in of_positive))
    out_plus, mass_plus = of_positive or (None, None)
    walk = Walk(edges, "dst", models.numel(), heads, channels)
    held, held_h = walk.hold(2, heads, channels), walk.hold(2, heads)
    with torch.cuda.device_of(x):
        _forward_kernel[(walk.items, walk.slabs)](
            p_x=x,
            p_x_dst=x_dst,
            p_att=None if att is None else att.contiguous(),
            p_score_src=score_src,
            p_score_dst=score_dst,
            p_score_edge=score_edge,
            p_src=edges.src,
            p_perm=edges.perm,
            p_out=out,
            p_lse=lse,
            p_out_plus=out_plus,
            p_mass_plus=mass_plus,
            p_chunks=held,
            p_chunks_h=held_h,
            slope=float(negative_slope),
            scale=channels**-0.5,
            **drop_arguments(dropout, seed, edges.dropout_ids_by_dst),
            **walk.arguments,
        )
        merge(walk, held, held_h, out, lse, out_plus, mass_plus)
    return apart(models, out, lse, *of_positive)


def merge(
    walk: Walk,
    held: Tensor | None,
    held_h: Tensor | None,
    out: Tensor,
    lse: Tensor,
    out_plus: Tensor | None = None,
    mass_plus: Tensor | None = None,
) -> None:
    """Merge the chunks of long rows into the results of their rows."""
    if walk.chunks is not None:
        _merge_kernel[(walk.chunks.rows.numel(), walk.slabs)](
            held,
            held_h,
            walk.chunks.rows,
            walk.chunks.first,
            out,
            lse,
            out_plus,
            mass_plus,
            **stack_arguments(walk.models, walk.heads),
            C=walk.channels,
            **walk.tile.blocks,
        )
