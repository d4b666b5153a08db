"""Attention whose score needs the features of both ends on CUDA: GATv2, and the scaled dot product."""

from __future__ import annotations

from typing import Any

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
    load_row,
    offset,
    work_item,
)
from ..steps import gpu as steps
from ..steps.gpu import alpha, leaky
from . import Dot, GATv2

# Backward, pair. D as above and grad e_ij = alpha_ij (g_ij - D_i); grad z_ij = att grad e_ij LeakyReLU'(z_ij) with
# z_ij = x_j + x_i, or for the scaled product scale grad e_ij times the other end's features.


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _backward_dst_kernel(
    p_grad,
    p_x,
    p_x_dst,
    p_att,
    p_out,
    p_lse,
    p_weights,
    p_ptr,
    p_src,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_names,
    p_grad_x_dst,
    p_grad_att,
    p_chunks,
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
    """For one dst i: grad x_i = sum_j grad z_ij, and its share of grad att = sum_ij grad e_ij LeakyReLU(z_ij).

    Every edge leaves k_ij alpha_ij and grad e_ij in `p_weights` `[E, 2, H]`, for the pass over src.
    """
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_x_dst, b_att = load_row(p_x_dst, o_row, m_hc), load_row(p_att, o_hc, m_hc)
    b_grad, b_lse = load_row(p_grad, o_row, m_hc), load_row(p_lse, offset(i_row, H) + i_h, m_h)
    b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

    b_grad_x_dst = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_grad_att = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        o_x = offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_e[:, None, None] & m_hc[None, :, :], other=0.0).to(tl.float32)
        b_z = b_x + b_x_dst[None, :, :]
        b_g = tl.sum(b_x * b_grad[None, :, :], 2)
        if p_att is not None:
            b_e = tl.sum(b_att[None, :, :] * leaky(b_z, slope), 2)
        else:
            b_e = tl.sum(b_x * b_x_dst[None, :, :], 2) * scale
        b_alpha = alpha(b_e, b_lse, 1.0, m_eh)
        b_w = b_alpha
        if p_seed is not None:
            i_name = edge_id(p_names, start + o_e, m_e)
            b_keep = draw(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
            b_w *= b_keep
            b_g *= b_keep
        b_grad_e = b_alpha * (b_g - b_mean)
        p_edge = p_weights + offset(start + o_e, 2 * H)[:, None] + i_h[None, :]
        tl.store(p_edge, b_w, mask=m_eh)
        tl.store(p_edge + H, b_grad_e, mask=m_eh)
        if p_att is not None:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * tl.where(b_z > 0.0, 1.0, slope), 0)
            b_grad_att += tl.sum(b_grad_e[:, :, None] * leaky(b_z, slope), 0)
        else:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * b_x, 0)

    b_grad_x_dst *= b_att if p_att is not None else scale
    tl.store(p_grad_x_dst + o_row, b_grad_x_dst, mask=m_hc & is_whole)
    if p_chunks is not None:
        tl.store(p_chunks + o_item, b_grad_x_dst, mask=m_hc & is_chunk)
    if p_grad_att is not None:
        tl.store(p_grad_att + o_item, b_grad_att, mask=m_hc)


@triton.jit(do_not_specialize=["num_chunks", "models"])
def _backward_src_kernel(
    p_grad,
    p_x,
    p_x_dst,
    p_att,
    p_weights,
    p_ptr,
    p_dst,
    p_place,
    p_chunk_row,
    p_chunk_start,
    p_grad_x,
    p_chunks,
    num_chunks,
    models,
    slope,
    scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one src j: grad x_j = sum_i k_ij alpha_ij dO_i + grad z_ij, from what the pass over dst left."""
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_x, b_att = load_row(p_x, o_row, m_hc), load_row(p_att, o_hc, m_hc)

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of k alpha dO
    b_sum_z = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of grad z, less its constant factor
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        m_ehc = m_e[:, None, None] & m_hc[None, :, :]
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        o_dst = offset(i_dst, H * C)[:, None, None] + o_hc[None, :, :]
        p_edge = p_weights + offset(i_place, 2 * H)[:, None] + i_h[None, :]
        b_w = tl.load(p_edge, mask=m_eh, other=0.0)
        b_grad_e = tl.load(p_edge + H, mask=m_eh, other=0.0)
        b_grad = tl.load(p_grad + o_dst, mask=m_ehc, other=0.0).to(tl.float32)
        b_x_dst = tl.load(p_x_dst + o_dst, mask=m_ehc, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        if p_att is not None:
            b_x_dst = tl.where(b_x + b_x_dst > 0.0, 1.0, slope)
        b_sum_z += tl.sum(b_grad_e[:, :, None] * b_x_dst, 0)

    b_sum += b_sum_z * (b_att if p_att is not None else scale)
    tl.store(p_grad_x + o_row, b_sum, mask=m_hc & is_whole)
    if p_chunks is not None:
        tl.store(p_chunks + o_item, b_sum, mask=m_hc & is_chunk)


def forward(
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and log-sum-exp `[N_dst, H]` of a score by both ends' features."""
    slope = score.negative_slope
    return steps.forward(x, score.x_dst, score.att, None, None, None, edges, slope, dropout, seed, dtype, False)


def backward(
    grad: Tensor,
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, x_dst and att, in one pass over dst and one over src; holds two numbers an edge and head."""
    att, models = score.att, x.shape[:-3]
    grad, x, x_dst, out, lse = beside(models, grad, x, score.x_dst, out, *saved)
    (_, heads, channels), num_edges = x.shape, edges.num_edges
    grad_x, grad_x_dst = torch.empty_like(x), torch.empty_like(x_dst)
    if num_edges == 0 or x.numel() == 0:
        results = apart(models, grad_x.zero_(), grad_x_dst.zero_())
        return results if att is None else (*results, torch.zeros_like(att))

    weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
    by_dst, by_src = (Walk(edges, side, models.numel(), heads, channels) for side in ("dst", "src"))
    held_dst, held_src = by_dst.hold(heads * channels), by_src.hold(heads * channels)
    held_att = None if att is None else x.new_empty(by_dst.items, heads, channels, dtype=torch.float32)
    shared: dict[str, Any] = {"p_grad": grad, "p_x": x, "p_x_dst": x_dst, "p_weights": weights}
    shared |= {"p_att": None if att is None else att.contiguous()}
    shared |= {"slope": float(score.negative_slope), "scale": channels**-0.5}
    _, dst, place = edges.transpose
    with torch.cuda.device_of(x):
        _backward_dst_kernel[(by_dst.items, by_dst.slabs)](
            p_out=out,
            p_lse=lse,
            p_src=edges.src,
            p_grad_x_dst=grad_x_dst,
            p_grad_att=held_att,
            p_chunks=held_dst,
            **shared,
            **drop_arguments(dropout, seed, edges.dropout_ids_by_dst),
            **by_dst.arguments,
        )
        by_dst.sum(held_dst, grad_x_dst)
        _backward_src_kernel[(by_src.items, by_src.slabs)](
            p_dst=dst,
            p_place=place,
            p_grad_x=grad_x,
            p_chunks=held_src,
            **shared,
            **by_src.arguments,
        )
        by_src.sum(held_src, grad_x)
        results = apart(models, grad_x, grad_x_dst)
        return results if att is None or held_att is None else (*results, held_att.sum(0).view_as(att))
