"""Cosine attention on CUDA: e_ij = r_j <q_i, x_j>, with queries q and the inverse norms r of x."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.draw import draw, drop_arguments
from ...kernels.gpu.rows import Walk, all_models, apart, beside, edge_id, gather, load_row, offset, work_item
from ..score import widened
from ..steps import gpu as steps
from ..steps.gpu import LN2, alpha, finite, online_softmax
from . import Cosine, along_itself, inverse_norm


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _forward_kernel(
    p_x,
    p_query,
    p_inverse,
    p_ptr,
    p_src,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_names,
    p_out,
    p_lse,
    p_chunks,
    p_chunks_h,
    num_chunks,
    models,
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
    """For one dst i: O_i = sum_j k_ij alpha_ij x_j and lse_i; a chunk leaves them in `p_chunks` and `p_chunks_h`."""
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_row_h = offset(i_row, H * C) + o_hc, offset(i_row, H) + i_h
    b_query = load_row(p_query, o_row, m_hc)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        o_x = offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_e[:, None, None] & m_hc[None, :, :], other=0.0).to(tl.float32)
        b_e = gather(p_inverse, i_src, i_h, m_eh, H) * tl.sum(b_x * b_query[None, :, :], 2)
        b_top, b_shrink, b_exp = online_softmax(tl.where(m_eh, b_e, float("-inf")), b_top)
        b_mass = b_mass * b_shrink[None, :] + b_exp
        b_w = b_exp
        if p_seed is not None:
            i_name = edge_id(p_names, start + o_e, m_e)
            b_w *= draw(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)

    b_mass = tl.sum(b_mass, 0)
    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    b_lse = b_top + tl.log2(b_mass) * LN2
    b_out /= b_mass[:, None]
    if p_chunks is not None:
        tl.store(p_chunks + offset(tl.program_id(0), 2 * H * C) + o_hc, b_out, mask=m_hc & is_chunk)
        tl.store(p_chunks_h + offset(tl.program_id(0), 2 * H) + i_h, b_lse, mask=m_h & is_chunk)
    tl.store(p_out + o_row, b_out, mask=m_hc & is_whole)
    tl.store(p_lse + o_row_h, finite(b_lse), mask=m_h & is_whole)


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _backward_dst_kernel(
    p_grad,
    p_x,
    p_query,
    p_inverse,
    p_out,
    p_lse,
    p_weights,
    p_ptr,
    p_src,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_names,
    p_grad_query,
    p_chunks,
    num_chunks,
    models,
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
    """For one dst i: grad q_i = sum_j f_ij x_j, with f_ij = r_j alpha_ij (g_ij - D_i).

    Every edge leaves k_ij alpha_ij and f_ij in `p_weights` `[E, 2, H]`, for the pass over src.
    """
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_query, b_grad = load_row(p_query, o_row, m_hc), load_row(p_grad, o_row, m_hc)
    b_lse = load_row(p_lse, offset(i_row, H) + i_h, m_h)
    b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

    b_grad_query = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        o_x = offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_e[:, None, None] & m_hc[None, :, :], other=0.0).to(tl.float32)
        b_g = tl.sum(b_x * b_grad[None, :, :], 2)
        b_inverse = gather(p_inverse, i_src, i_h, m_eh, H)
        b_alpha = alpha(b_inverse * tl.sum(b_x * b_query[None, :, :], 2), b_lse, 1.0, m_eh)
        b_w = b_alpha
        if p_seed is not None:
            i_name = edge_id(p_names, start + o_e, m_e)
            b_keep = draw(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
            b_w *= b_keep
            b_g *= b_keep
        b_f = b_inverse * (b_alpha * (b_g - b_mean))
        p_edge = p_weights + offset(start + o_e, 2 * H)[:, None] + i_h[None, :]
        tl.store(p_edge, b_w, mask=m_eh)
        tl.store(p_edge + H, b_f, mask=m_eh)
        b_grad_query += tl.sum(b_f[:, :, None] * b_x, 0)

    tl.store(p_grad_query + o_row, b_grad_query, mask=m_hc & is_whole)
    if p_chunks is not None:
        tl.store(p_chunks + o_item, b_grad_query, mask=m_hc & is_chunk)


@triton.jit(do_not_specialize=["num_chunks", "models"])
def _backward_src_kernel(
    p_grad,
    p_query,
    p_weights,
    p_ptr,
    p_dst,
    p_place,
    p_chunk_row,
    p_chunk_start,
    p_grad_x,
    p_across,
    p_chunks,
    p_chunks_across,
    num_chunks,
    models,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one src j: sum_i k_ij alpha_ij dO_i and B_j = sum_i f_ij q_i, from what the pass over dst left."""
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_across = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
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
        b_f = tl.load(p_edge + H, mask=m_eh, other=0.0)
        b_grad = tl.load(p_grad + o_dst, mask=m_ehc, other=0.0).to(tl.float32)
        b_query = tl.load(p_query + o_dst, mask=m_ehc, other=0.0)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        b_across += tl.sum(b_f[:, :, None] * b_query, 0)

    tl.store(p_grad_x + o_row, b_sum, mask=m_hc & is_whole)
    tl.store(p_across + o_row, b_across, mask=m_hc & is_whole)
    if p_chunks is not None:
        tl.store(p_chunks + o_item, b_sum, mask=m_hc & is_chunk)
        tl.store(p_chunks_across + o_item, b_across, mask=m_hc & is_chunk)


def forward(
    x: Tensor,
    score: Cosine,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and the log-sum-exp `[N_dst, H]`."""
    models = x.shape[:-3]
    x, query, inverse = beside(models, x, score.queries(torch.float32), inverse_norm(widened(x)))
    _, heads, channels = x.shape
    out = x.new_empty(edges.num_dst, heads, channels, dtype=dtype)
    lse = x.new_empty(edges.num_dst, heads, dtype=torch.float32)
    if out.numel() == 0:
        return apart(models, out, lse.zero_())
    walk = Walk(edges, "dst", models.numel(), heads, channels)
    held, held_h = walk.hold(2, heads, channels), walk.hold(2, heads)
    with torch.cuda.device_of(x):
        _forward_kernel[(walk.items, walk.slabs)](
            p_x=x,
            p_query=query,
            p_inverse=inverse,
            p_src=edges.src,
            p_out=out,
            p_lse=lse,
            p_chunks=held,
            p_chunks_h=held_h,
            **drop_arguments(dropout, seed, edges.dropout_ids_by_dst),
            **walk.arguments,
        )
        steps.merge(walk, held, held_h, out, lse)
    return apart(models, out, lse)


def backward(
    grad: Tensor,
    x: Tensor,
    score: Cosine,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, x_dst and beta, as on a CPU: one pass over dst and one over src."""
    models, own, inverse = x.shape[:-3], widened(x), inverse_norm(widened(x))
    grad, x, query, by_row, out, lse = beside(models, grad, x, score.queries(torch.float32), inverse, out, *saved)
    (_, heads, channels), num_edges = x.shape, edges.num_edges
    grad_x, across = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    grad_query = torch.zeros_like(query)
    if num_edges and x.numel():
        weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
        by_dst, by_src = (Walk(edges, side, models.numel(), heads, channels) for side in ("dst", "src"))
        held_dst, held_src, held_across = (walk.hold(heads * channels) for walk in (by_dst, by_src, by_src))
        shared: dict[str, Any] = {"p_grad": grad, "p_query": query, "p_weights": weights}
        _, dst, place = edges.transpose
        with torch.cuda.device_of(x):
            _backward_dst_kernel[(by_dst.items, by_dst.slabs)](
                p_x=x,
                p_inverse=by_row,
                p_out=out,
                p_lse=lse,
                p_src=edges.src,
                p_grad_query=grad_query,
                p_chunks=held_dst,
                **shared,
                **drop_arguments(dropout, seed, edges.dropout_ids_by_dst),
                **by_dst.arguments,
            )
            by_dst.sum(held_dst, grad_query)
            _backward_src_kernel[(by_src.items, by_src.slabs)](
                p_dst=dst,
                p_place=place,
                p_grad_x=grad_x,
                p_across=across,
                p_chunks=held_src,
                p_chunks_across=held_across,
                **shared,
                **by_src.arguments,
            )
            by_src.sum(held_src, grad_x)
            by_src.sum(held_across, across)
    grad_x, across, grad_query = apart(models, grad_x, across, grad_query)
    grad_x = grad_x + across + along_itself(own, inverse[..., None], across)
    grad_x_dst, along = score.query_gradients(grad_query)
    return grad_x.to(x.dtype), grad_x_dst, along.sum(-2)
