"""The forward pass of all scores on CUDA, the merge of chunks, and steps that the backward kernels share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.draw import drop_arguments, keep
from ...kernels.gpu.rows import (
    Walk,
    all_models,
    beside,
    block_of_edges,
    edge_id,
    edge_weights,
    gather,
    gather_features,
    load_row,
    offset,
    row_width,
    slab,
    stack_arguments,
    store_row,
    walk_of,
    work_item,
)
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
def _of_edges(p_edge_attr, i_edge, i_h, attr_stride, models, EACH: tl.constexpr, D):
    """Pointers to the features of edges, `[edges, heads]`; `[edges, 1]` where there is one model."""
    p_attr = p_edge_attr + offset(i_edge, D)[:, None]
    if models is not None:
        i_model = tl.minimum(i_h // EACH, models - 1)  # the last slab may go beyond the last head
        p_attr += offset(i_model, attr_stride)[None, :]
    return p_attr


@triton.jit
def embed(b_z, p_lin, p_edge_attr, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, H, EACH, C, D):
    """Add W_e u_ij to z of a block of edges, one feature of the edges at a time."""
    if p_lin is not None:
        p_attr = _of_edges(p_edge_attr, i_edge, i_h, attr_stride, models, EACH, D)
        for d in tl.range(0, D, num_stages=1):
            b_attr = tl.load(p_attr + d, mask=m_e[:, None], other=0.0).to(tl.float32)
            b_z += b_attr[:, :, None] * load_row(p_lin, d * H * C + o_hc, m_hc)[None, :, :]
    return b_z


@triton.jit
def features_of(p_edge_attr, p_query_edge, i_edge, i_h, o_d, m_e, attr_stride, models, EACH: tl.constexpr, D):
    """u_ij of a block of edges, `[edges, 1 or heads, features]`, for the scaled product; 0 if there are none."""
    if p_query_edge is None:
        return 0.0
    else:
        p_attr = _of_edges(p_edge_attr, i_edge, i_h, attr_stride, models, EACH, D)[:, :, None] + o_d[None, None, :]
        return tl.load(p_attr, mask=m_e[:, None, None] & (o_d < D)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def pair_score(b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, p_att, p_query_edge, slope, scale):
    """e_ij of a block of edges."""
    if p_att is not None:
        return tl.sum(b_att[None, :, :] * leaky(b_z, slope), 2)
    else:
        b_e = tl.sum(b_key * b_x_dst[None, :, :], 2)
        if p_query_edge is not None:
            b_e += tl.sum(b_attr * b_query_edge[None, :, :], 2)
        return b_e * scale


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models", "attr_stride"])
def _forward_kernel(
    p_x,
    p_edge_weight,
    p_ptr,
    p_src,
    p_perm,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_dropout_ids,
    p_out,
    p_lse,
    p_chunks,
    p_chunks_h,
    num_chunks,
    models,
    slope,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE: tl.constexpr = None,
    p_score_src=None,
    p_score_dst=None,
    p_score_edge=None,
    p_out_plus=None,
    p_mass_plus=None,
    p_x_dst=None,
    p_att=None,
    p_key=None,
    p_lin=None,
    p_query_edge=None,
    p_edge_attr=None,
    p_out_edge=None,
    p_chunks_edge=None,
    attr_stride=0,
    scale=1.0,
    D: tl.constexpr = 0,
    BLOCK_D: tl.constexpr = 1,
    X_STRIDE: tl.constexpr = None,
):
    """For one dst i: O_i = sum_j k_ij w_ij alpha_ij x_j, alpha_ij = exp(e_ij - lse_i), lse_i = log sum_j exp e_ij.

    Without `p_x_dst`, e_ij is LeakyReLU(s_j + d_i + u_ij), whose rows are `STRIDE` elements apart; O+ and A+ are what
    the edges with z > 0 give of O and of the attention mass. With att, e_ij = att . LeakyReLU(z_ij), where z_ij = x_j +
    x_i + W_e u_ij. Else e_ij = scale (<x_i, k_j> + <p_i, u_ij>), where p_i = W_e^T x_i, and S_i = sum_j k_ij w_ij
    alpha_ij u_ij too; O_i is without its W_e S_i. Rows of x and k are `X_STRIDE` elements apart.

    A chunk leaves O in `p_chunks`, S in `p_chunks_edge` and lse in `p_chunks_h`, O+ and A+ after O and lse of all.
    """
    H = all_models(EACH, models)
    i_item = tl.program_id(0)
    i_row, start, count, is_whole, is_chunk = work_item(i_item, p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    _, o_hd, _, m_hd = slab(H, D, BLOCK_H, BLOCK_D)
    o_d = tl.arange(0, BLOCK_D)
    b_d = load_row(p_score_dst, offset(i_row, row_width(H, STRIDE)) + i_h, m_h)
    b_x_dst, b_att = load_row(p_x_dst, offset(i_row, H * C) + o_hc, m_hc), load_row(p_att, o_hc, m_hc)
    b_query_edge = load_row(p_query_edge, offset(i_row, H * D) + o_hd, m_hd)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_mass_plus = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_edge = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        i_edge = edge_id(p_perm, start + o_e, m_e)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, row_width(H * C, X_STRIDE))
        b_attr = features_of(p_edge_attr, p_query_edge, i_edge, i_h, o_d, m_e, attr_stride, models, EACH, D)
        if p_x_dst is None:
            b_z = tl.zeros([BLOCK_E, BLOCK_H], tl.float32) + b_d
            b_z += gather(p_score_src, i_src, i_h, m_eh, row_width(H, STRIDE))
            b_z += gather(p_score_edge, i_edge, i_h, m_eh, H)
            b_e = leaky(b_z, slope)
        else:
            b_key = b_x
            if p_key is not None:
                b_key = gather_features(p_key, i_src, o_hc, m_e, m_hc, row_width(H * C, X_STRIDE))
            b_z = b_x + b_x_dst[None, :, :]
            b_z = embed(b_z, p_lin, p_edge_attr, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, H, EACH, C, D)
            b_e = pair_score(b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, p_att, p_query_edge, slope, scale)
        b_factor = keep(p_seed, p_dropout_ids, start + o_e, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_factor *= edge_weights(p_edge_weight, i_edge, i_h, m_eh, H)
        b_top, b_shrink, b_exp = online_softmax(tl.where(m_eh, b_e, float("-inf")), b_top)
        b_mass = b_mass * b_shrink[None, :] + b_exp
        b_out = b_out * b_shrink[:, None] + tl.sum((b_exp * b_factor)[:, :, None] * b_x, 0)
        if p_out_plus is not None:
            b_mass_plus = b_mass_plus * b_shrink[None, :] + tl.where(b_z > 0.0, b_exp, 0.0)
            b_w = tl.where(b_z > 0.0, b_exp * b_factor, 0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)
        if p_out_edge is not None:
            b_out_edge = b_out_edge * b_shrink[:, None] + tl.sum((b_exp * b_factor)[:, :, None] * b_attr, 0)

    b_mass = tl.sum(b_mass, 0)
    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)  # where there is no edge
    b_lse = b_top + tl.log2(b_mass) * LN2
    o_row, o_chunk = offset(i_row, H * C) + o_hc, offset(i_item, H * C) + o_hc
    o_row_h, o_chunk_h = offset(i_row, H) + i_h, offset(i_item, H) + i_h
    store_row(p_out, p_chunks, o_row, o_chunk, b_out / b_mass[:, None], m_hc, is_whole, is_chunk)
    if p_chunks is not None:
        tl.store(p_chunks_h + o_chunk_h, b_lse, mask=m_h & is_chunk)
    tl.store(p_lse + o_row_h, finite(b_lse), mask=m_h & is_whole)
    if p_out_plus is not None:
        o_chunk, o_chunk_h = o_chunk + offset(num_chunks, H * C), o_chunk_h + offset(num_chunks, H)
        store_row(p_out_plus, p_chunks, o_row, o_chunk, b_out_plus / b_mass[:, None], m_hc, is_whole, is_chunk)
        b_mass_plus = tl.sum(b_mass_plus, 0) / b_mass
        store_row(p_mass_plus, p_chunks_h, o_row_h, o_chunk_h, b_mass_plus, m_h, is_whole, is_chunk)
    if p_out_edge is not None:
        o_row, o_chunk = offset(i_row, H * D) + o_hd, offset(i_item, H * D) + o_hd
        store_row(p_out_edge, p_chunks_edge, o_row, o_chunk, b_out_edge / b_mass[:, None], m_hd, is_whole, is_chunk)


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


def forward_pass(call: Operation, out: Tensor, **operands: Any) -> Tensor:
    """Compute O by the operands of a score, and return its log-sum-exp.

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
        _forward_kernel[(walk.items, walk.slabs)](
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
