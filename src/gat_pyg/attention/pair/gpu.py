"""Attention whose score needs the features of both ends on CUDA: GATv2, and the scaled dot product."""

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
    apart,
    beside,
    block_of_edges,
    gather_features,
    load_row,
    offset,
    slab,
    store_row,
    work_item,
)
from ..dot import Dot
from ..steps.gpu import alpha, attend, forward_pass, leaky, load_edges, store_attended, store_edges, total_mass
from . import GATv2


@triton.jit
def _score(b_x, b_x_dst, b_att, p_att, slope, scale):
    """e_ij of a block of edges."""
    if p_att is not None:
        return tl.sum(b_att[None, :, :] * leaky(b_x + b_x_dst[None, :, :], slope), 2)
    else:
        return tl.sum(b_x * b_x_dst[None, :, :], 2) * scale


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _forward_kernel(
    p_x,
    p_x_dst,
    p_att,
    p_ptr,
    p_src,
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
    """For one dst i: O_i and lse_i for e_ij = att . LeakyReLU(x_j + x_i), or scale <x_i, x_j> without att.

    A chunk leaves O in `p_chunks` and lse in `p_chunks_h`.
    """
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    b_x_dst, b_att = load_row(p_x_dst, offset(i_row, H * C) + o_hc, m_hc), load_row(p_att, o_hc, m_hc)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, H * C)
        b_e = _score(b_x, b_x_dst, b_att, p_att, slope, scale)
        b_keep = keep(p_seed, p_dropout_ids, start + o_e, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_top, b_mass, b_out, _, _ = attend(b_e, b_x, b_keep, b_top, b_mass, b_out, m_eh)

    b_mass = total_mass(b_mass)
    store_attended(
        p_out, p_lse, p_chunks, p_chunks_h, b_top, b_mass, b_out, i_row, i_h, o_hc, m_h, m_hc, is_whole, is_chunk, H, C
    )


# Backward. With g_ij = k_ij <dO_i, x_j> and D_i = sum_j alpha_ij g_ij = <dO_i, O_i>: grad e_ij = alpha_ij (g_ij - D_i),
# and grad z_ij = att grad e_ij LeakyReLU'(z_ij) with z_ij = x_j + x_i, or for the scaled product scale grad e_ij times
# the other end's features.


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
    p_dropout_ids,
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
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_x_dst, b_att = load_row(p_x_dst, o_row, m_hc), load_row(p_att, o_hc, m_hc)
    b_grad, b_lse = load_row(p_grad, o_row, m_hc), load_row(p_lse, offset(i_row, H) + i_h, m_h)
    b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

    b_grad_x_dst = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_grad_att = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, H * C)
        b_z = b_x + b_x_dst[None, :, :]
        b_g = tl.sum(b_x * b_grad[None, :, :], 2)
        b_alpha = alpha(_score(b_x, b_x_dst, b_att, p_att, slope, scale), b_lse, 1.0, m_eh)
        b_keep = keep(p_seed, p_dropout_ids, start + o_e, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_grad_e = b_alpha * (b_g * b_keep - b_mean)
        store_edges(p_weights, start + o_e, i_h, m_eh, b_alpha * b_keep, b_grad_e, H)
        if p_att is not None:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * tl.where(b_z > 0.0, 1.0, slope), 0)
            b_grad_att += tl.sum(b_grad_e[:, :, None] * leaky(b_z, slope), 0)
        else:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * b_x, 0)

    b_grad_x_dst *= b_att if p_att is not None else scale
    store_row(p_grad_x_dst, p_chunks, o_row, o_item, b_grad_x_dst, m_hc, is_whole, is_chunk)
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
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_x, b_att = load_row(p_x, o_row, m_hc), load_row(p_att, o_hc, m_hc)

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of k alpha dO
    b_sum_z = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of grad z, less its constant factor
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        b_w, b_grad_e = load_edges(p_weights, i_place, i_h, m_eh, H)
        b_grad = gather_features(p_grad, i_dst, o_hc, m_e, m_hc, H * C)
        b_x_dst = gather_features(p_x_dst, i_dst, o_hc, m_e, m_hc, H * C)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        if p_att is not None:
            b_x_dst = tl.where(b_x + b_x_dst > 0.0, 1.0, slope)
        b_sum_z += tl.sum(b_grad_e[:, :, None] * b_x_dst, 0)

    b_sum += b_sum_z * (b_att if p_att is not None else scale)
    store_row(p_grad_x, p_chunks, o_row, o_item, b_sum, m_hc, is_whole, is_chunk)


def forward(
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and log-sum-exp `[N_dst, H]` of a score by both ends' features."""
    models = x.shape[:-3]
    x, x_dst = beside(models, x, score.x_dst)
    operands = {"p_x_dst": x_dst, **_constants(score, x.size(-1))}
    return apart(models, *forward_pass(_forward_kernel, x, edges, models.numel(), dropout, seed, dtype, **operands))


def _constants(score: GATv2 | Dot, channels: int) -> dict[str, Any]:
    """The kernels' arguments for the score."""
    scale = max(channels, 1) ** -0.5
    if isinstance(score, Dot):
        return {"p_att": None, "slope": 1.0, "scale": scale}
    return {"p_att": score.att.contiguous(), "slope": float(score.negative_slope), "scale": scale}


def backward(
    grad: Tensor,
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> dict[str, Tensor | None]:
    """The gradients of x, x_dst and att, in one pass over dst and one over src; holds two numbers an edge and head."""
    att, models = None if isinstance(score, Dot) else score.att, x.shape[:-3]
    grad, x, x_dst, out, lse = beside(models, grad, x, score.x_dst, out, *saved)
    (_, heads, channels), num_edges = x.shape, edges.num_edges
    grad_x, grad_x_dst = torch.empty_like(x), torch.empty_like(x_dst)
    if num_edges == 0 or x.numel() == 0:
        results = apart(models, grad_x.zero_(), grad_x_dst.zero_())
        grad_att = None if att is None else torch.zeros_like(att)
        return {"x": results[0], "x_dst": results[1], "att": grad_att}

    weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
    by_dst, by_src = (Walk(edges, side, models.numel(), heads, channels) for side in ("dst", "src"))
    held_dst, held_src = by_dst.hold(heads * channels), by_src.hold(heads * channels)
    held_att = None if att is None else x.new_empty(by_dst.items, heads, channels, dtype=torch.float32)
    shared: dict[str, Any] = {"p_grad": grad, "p_x": x, "p_x_dst": x_dst, "p_weights": weights}
    shared |= _constants(score, channels)
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
        grad_att = None if att is None or held_att is None else held_att.sum(0).view_as(att)
        return {"x": results[0], "x_dst": results[1], "att": grad_att}
