"""The forward pass of all scores on CUDA, the merge of chunks, and steps that the backward kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu import rows
from ...kernels.gpu.draw import drop_arguments, keep
from ...kernels.gpu.rows import (
    all_models,
    block_of_edges,
    edge_id,
    gather,
    gather_features,
    load_row,
    offset,
    row_width,
    slab,
    store_row,
    work_item,
)
from ..score import Operation

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Pair(NamedTuple):
    """The operands of a score of both ends' features as the kernels take them, the heads of all models side by side."""

    p_x_dst: Any = None  # a tensor; None for the additive score
    p_att: Tensor | None = None
    p_key: Tensor | None = None
    p_lin: Tensor | None = None  # W_e of GATv2, [D, H, C]
    p_query_edge: Tensor | None = None  # p = W_e^T x_dst of the scaled product, [N_dst, H, D]
    p_edge_attr: Tensor | None = None  # [E, D] of all models, or of each in turn


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
def _of_edges(p_edge_attr, i_edge, i_h, attr_stride, models, SIZES):
    """Pointers to the features of edges, `[edges, heads]`; `[edges, 1]` where there is one model."""
    p_attr = p_edge_attr + offset(i_edge, SIZES.D)[:, None]
    if models is not None:
        i_model = tl.minimum(i_h // SIZES.EACH, models - 1)  # the last slab may go beyond the last head
        p_attr += offset(i_model, attr_stride)[None, :]
    return p_attr


@triton.jit
def embed(b_z, pair, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, SIZES):
    """Add W_e u_ij to z of a block of edges, one feature of the edges at a time."""
    if pair.p_lin is not None:
        p_attr = _of_edges(pair.p_edge_attr, i_edge, i_h, attr_stride, models, SIZES)
        width = all_models(SIZES.EACH, models) * SIZES.C
        for d in tl.range(0, SIZES.D, num_stages=1):
            b_attr = tl.load(p_attr + d, mask=m_e[:, None], other=0.0).to(tl.float32)
            b_z += b_attr[:, :, None] * load_row(pair.p_lin, d * width + o_hc, m_hc)[None, :, :]
    return b_z


@triton.jit
def features_of(pair, i_edge, i_h, m_e, attr_stride, models, SIZES):
    """u_ij of a block of edges, `[edges, 1 or heads, features]`, for the scaled product; 0 if there are none."""
    if pair.p_query_edge is None:
        return 0.0
    else:
        o_d = tl.arange(0, SIZES.BLOCK_D)[None, None, :]
        p_attr = _of_edges(pair.p_edge_attr, i_edge, i_h, attr_stride, models, SIZES)[:, :, None] + o_d
        return tl.load(p_attr, mask=m_e[:, None, None] & (o_d < SIZES.D), other=0.0).to(tl.float32)


@triton.jit
def keys_of(pair, b_x, i_src, o_hc, m_e, m_hc, H, SIZES):
    """The keys of a block of edges, which are x without `p_key`."""
    if pair.p_key is None:
        return b_x
    else:
        return gather_features(pair.p_key, i_src, o_hc, m_e, m_hc, row_width(H * SIZES.C, SIZES.X_STRIDE))


@triton.jit
def pair_score(pair, b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, slope, scale):
    """e_ij of a block of edges."""
    if pair.p_att is not None:
        return tl.sum(b_att[None, :, :] * leaky(b_z, slope), 2)
    else:
        b_e = tl.sum(b_key * b_x_dst[None, :, :], 2)
        if pair.p_query_edge is not None:
            b_e += tl.sum(b_attr * b_query_edge[None, :, :], 2)
        return b_e * scale


@triton.jit(do_not_specialize=["num_chunks", "models", "threshold", "attr_stride"])
def _forward_kernel(
    operands, pair, results, chunks, attr_stride, slope, scale, drop, threshold, csr, num_chunks, models, SIZES
):
    """For one dst i: O_i = sum_j k_ij w_ij alpha_ij x_j, alpha_ij = exp(e_ij - lse_i), lse_i = log sum_j exp e_ij.

    Without `p_x_dst`, e_ij is LeakyReLU(s_j + d_i + u_ij), whose rows are `STRIDE` elements apart; O+ and A+ are what
    the edges with z > 0 give of O and of the attention mass. With att, e_ij = att . LeakyReLU(z_ij), where z_ij = x_j +
    x_i + W_e u_ij. Else e_ij = scale (<x_i, k_j> + <p_i, u_ij>), where p_i = W_e^T x_i, and S_i = sum_j k_ij w_ij
    alpha_ij u_ij too; O_i is without its W_e S_i. Rows of x and k are `X_STRIDE` elements apart.

    A chunk leaves O in `p_chunks`, S in `p_chunks_edge` and lse in `p_chunks_h`, O+ and A+ after O and lse of all.
    """
    p_x, p_edge_weight, p_score_src, p_score_dst, p_score_edge = operands
    p_out, p_lse, p_out_plus, p_mass_plus, p_out_edge = results
    p_chunks, p_chunks_h, p_chunks_edge = chunks
    H, i_item = all_models(SIZES.EACH, models), tl.program_id(0)
    HC, HD = H * SIZES.C, H * SIZES.D
    i_row, start, count, is_whole, is_chunk = work_item(i_item, csr, num_chunks, SIZES.SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, SIZES.C, SIZES.BLOCK_H, SIZES.BLOCK_C)
    _, o_hd, _, m_hd = slab(H, SIZES.D, SIZES.BLOCK_H, SIZES.BLOCK_D)
    b_d = load_row(p_score_dst, offset(i_row, row_width(H, SIZES.STRIDE)) + i_h, m_h)
    b_x_dst = load_row(pair.p_x_dst, offset(i_row, HC) + o_hc, m_hc)
    b_att = load_row(pair.p_att, o_hc, m_hc)
    b_query_edge = load_row(pair.p_query_edge, offset(i_row, HD) + o_hd, m_hd)

    b_top = tl.full([SIZES.BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)  # summed over edges at the end
    b_out = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    b_mass_plus = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)
    b_out_plus = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    b_out_edge = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_D], tl.float32)
    for o_first in tl.range(0, count, SIZES.BLOCK_E, num_stages=SIZES.STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, SIZES.BLOCK_E)
        i_src = tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)
        i_edge = edge_id(csr.p_ids, start + o_e, m_e)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, row_width(HC, SIZES.X_STRIDE))
        b_attr = features_of(pair, i_edge, i_h, m_e, attr_stride, models, SIZES)
        if pair.p_x_dst is None:
            b_z = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32) + b_d
            b_z += gather(p_score_src, i_src, i_h, m_eh, row_width(H, SIZES.STRIDE))
            b_z += gather(p_score_edge, i_edge, i_h, m_eh, H)
            b_e = leaky(b_z, slope)
        else:
            b_key = keys_of(pair, b_x, i_src, o_hc, m_e, m_hc, H, SIZES)
            b_z = embed(b_x + b_x_dst[None, :, :], pair, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, SIZES)
            b_e = pair_score(pair, b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, slope, scale)
        b_factor = keep(drop, threshold, start + o_e, m_e, models, SIZES)
        b_factor *= gather(p_edge_weight, i_edge, i_h, m_eh, H, 1.0)
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
    o_row, o_chunk = offset(i_row, HC) + o_hc, offset(i_item, HC) + o_hc
    o_row_h, o_chunk_h = offset(i_row, H) + i_h, offset(i_item, H) + i_h
    store_row(p_out, p_chunks, o_row, o_chunk, b_out / b_mass[:, None], m_hc, is_whole, is_chunk)
    if p_chunks is not None:
        tl.store(p_chunks_h + o_chunk_h, b_lse, mask=m_h & is_chunk)
    tl.store(p_lse + o_row_h, finite(b_lse), mask=m_h & is_whole)
    if p_out_plus is not None:
        o_chunk, o_chunk_h = o_chunk + offset(num_chunks, HC), o_chunk_h + offset(num_chunks, H)
        store_row(p_out_plus, p_chunks, o_row, o_chunk, b_out_plus / b_mass[:, None], m_hc, is_whole, is_chunk)
        b_mass_plus = tl.sum(b_mass_plus, 0) / b_mass
        store_row(p_mass_plus, p_chunks_h, o_row_h, o_chunk_h, b_mass_plus, m_h, is_whole, is_chunk)
    if p_out_edge is not None:
        o_row, o_chunk = offset(i_row, HD) + o_hd, offset(i_item, HD) + o_hd
        store_row(p_out_edge, p_chunks_edge, o_row, o_chunk, b_out_edge / b_mass[:, None], m_hd, is_whole, is_chunk)


@triton.jit(do_not_specialize=["models"])
def _merge_kernel(p_chunks, p_chunks_h, p_rows, p_first, p_out, p_lse, p_out_plus, p_mass_plus, models, SIZES):
    """For one split row of chunks q, in their order: O = sum_q softmax(lse_q) O_q, lse = log sum_q exp lse_q.

    O+ and A+ of all chunks follow after O and lse of all.
    """
    H = all_models(SIZES.EACH, models)
    i_row = tl.load(p_rows + tl.program_id(0))
    first, stop = tl.load(p_first + tl.program_id(0)), tl.load(p_first + tl.program_id(0) + 1)
    num_chunks = tl.load(p_first + tl.num_programs(0))
    i_h, o_hc, m_h, m_hc = slab(H, SIZES.C, SIZES.BLOCK_H, SIZES.BLOCK_C)

    b_top = tl.full([SIZES.BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([SIZES.BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([SIZES.BLOCK_H], tl.float32)
    b_out = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    for i_first in tl.range(first, stop, SIZES.BLOCK_E):
        i_chunk = i_first + tl.arange(0, SIZES.BLOCK_E)
        m_eh = (i_chunk < stop)[:, None] & m_h[None, :]
        m_ehc = (i_chunk < stop)[:, None, None] & m_hc[None, :, :]
        p_chunk = p_chunks + offset(i_chunk, H * SIZES.C)[:, None, None] + o_hc[None, :, :]
        p_chunk_h = p_chunks_h + offset(i_chunk, H)[:, None] + i_h[None, :]
        b_e = tl.load(p_chunk_h, mask=m_eh, other=float("-inf"))
        b_top, b_shrink, b_exp = online_softmax(b_e, b_top)
        b_mass = b_mass * b_shrink + tl.sum(b_exp, 0)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * tl.load(p_chunk, mask=m_ehc, other=0.0), 0)
        if p_out_plus is not None:
            b_chunk = tl.load(p_chunk + offset(num_chunks, H * SIZES.C), mask=m_ehc, other=0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * b_chunk, 0)
            b_chunk = tl.load(p_chunk_h + offset(num_chunks, H), mask=m_eh, other=0.0)
            b_mass_plus = b_mass_plus * b_shrink + tl.sum(b_exp * b_chunk, 0)

    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    o_row, o_row_h = offset(i_row, H * SIZES.C) + o_hc, offset(i_row, H) + i_h
    tl.store(p_out + o_row, b_out / b_mass[:, None], mask=m_hc)
    tl.store(p_lse + o_row_h, finite(b_top + tl.log2(b_mass) * LN2), mask=m_h)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus / b_mass[:, None], mask=m_hc)
        tl.store(p_mass_plus + o_row_h, b_mass_plus / b_mass, mask=m_h)


def of_rows(edges: Edges, wanted: bool, *shape: int, device: torch.device) -> Tensor | None:
    """Room for a gradient of what belongs to edges, zero where a row may have no edge; None if it is not wanted."""
    make = torch.empty if edges.num_rows == edges.num_edges else torch.zeros
    return make(shape, dtype=torch.float32, device=device) if wanted else None


def forward_pass(
    call: Operation,
    x: Tensor,
    terms: Iterable[Tensor | None],
    pair: Pair,
    results: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    *numbers: float,
    **sizes: Any,
) -> Tensor:
    """Compute the output and the rest of `results`, and return the log-sum-exp.

    Args:
        call: the call of the operation.
        x, terms, pair: its operands as the kernels take them; `terms` are the additive score's, of src, dst and edges.
        results: O, O+, A+ and S, None for those that the score does not have.
        numbers: the distance from the features of edges of one model to the next's, the negative slope, the scale.
        sizes: what the kernel is compiled for beside rows and heads.
    """
    edges, models, (_, heads, channels), (out, out_plus, _, out_edge) = call.edges, call.x.shape[:-3], x.shape, results
    lse: Tensor = x.new_empty(edges.num_dst, heads, dtype=torch.float32)
    if out.numel() == 0:
        for result in (lse, *results):
            if result is not None:
                result.zero_()
        return lse
    features, parts = 0 if out_edge is None else out_edge.size(2), 1 if out_plus is None else 2
    walk = rows.walk_of(edges, "dst", models.numel(), heads, channels, features)
    held, held_h = walk.hold(parts, heads, channels), walk.hold(parts, heads)
    held_edge = None if out_edge is None else walk.hold(heads, features)
    operands = x, *rows.beside(models, call.edge_weight), *terms
    arguments = drop_arguments(call.dropout, call.seed, edges.dropout_ids_by_dst) | walk.arguments(**sizes)
    with torch.cuda.device_of(x):
        kernel, written = _forward_kernel[(walk.items, walk.slabs)], (out, lse, *results[1:])
        kernel(operands, pair, written, (held, held_h, held_edge), *numbers, **arguments)
        _merge(walk, held, held_h, *written[:4])
        if out_edge is not None:
            _merge(walk, held_edge, held_h, out_edge, lse, None, None)
    return lse


def _merge(walk: rows.Walk, held: Tensor | None, held_h: Tensor | None, out: Tensor, *others: Tensor | None) -> None:
    """Merge the chunks of long rows into the results of their rows: O, and log-sum-exp, O+ and A+."""
    if walk.chunks is not None:
        chunks, tile = walk.chunks, walk.tile._replace(channels=triton.next_power_of_2(out.size(2)))
        sizes = rows.stacked(walk.models, walk.heads, C=out.size(2), **tile.blocks)
        grid = chunks.rows.numel(), walk.slabs
        _merge_kernel[grid](held, held_h, chunks.rows, chunks.first, out, *others, **sizes)
