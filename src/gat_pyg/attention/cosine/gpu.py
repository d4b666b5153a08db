"""Cosine attention on CUDA: e_ij = r_j <q_i, x_j>, with queries q and the inverse norms r of x."""

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
    edge_id,
    edge_weights,
    gather,
    gather_features,
    load_row,
    offset,
    slab,
    store_row,
    work_item,
)
from ..score import widened
from ..steps.gpu import alpha, attend, forward_pass, load_edges, of_rows, store_attended, store_edges, total_mass
from . import Cosine, along_itself, inverse_norm


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _forward_kernel(
    p_x,
    p_query,
    p_inverse,
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
    """For one dst i: O_i = sum_j k_ij w_ij alpha_ij x_j and lse_i; a chunk leaves them in its own place."""
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(
        tl.program_id(0), p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT
    )
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    b_query = load_row(p_query, offset(i_row, H * C) + o_hc, m_hc)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, H * C)
        b_e = gather(p_inverse, i_src, i_h, m_eh, H) * tl.sum(b_x * b_query[None, :, :], 2)
        b_keep = keep(p_seed, p_dropout_ids, start + o_e, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_factor = b_keep * edge_weights(p_edge_weight, edge_id(p_perm, start + o_e, m_e), i_h, m_eh, H)
        b_top, b_mass, b_out, _, _ = attend(b_e, b_x, b_factor, b_top, b_mass, b_out, m_eh)

    b_mass = total_mass(b_mass)
    store_attended(
        p_out, p_lse, p_chunks, p_chunks_h, b_top, b_mass, b_out, i_row, i_h, o_hc, m_h, m_hc, is_whole, is_chunk, H, C
    )


@triton.jit(do_not_specialize=["num_chunks", "threshold", "models"])
def _backward_dst_kernel(
    p_grad,
    p_x,
    p_query,
    p_inverse,
    p_edge_weight,
    p_out,
    p_lse,
    p_weights,
    p_ptr,
    p_src,
    p_perm,
    p_chunk_row,
    p_chunk_start,
    p_seed,
    p_dropout_ids,
    p_grad_query,
    p_grad_weight,
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
    """For one dst i: grad q_i = sum_j f_ij x_j, with f_ij = r_j alpha_ij (g_ij - D_i), and grad w_ij.

    Every edge leaves k_ij w_ij alpha_ij and f_ij in `p_weights` `[E, 2, H]`, for the pass over src.
    """
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(
        tl.program_id(0), p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT
    )
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), H * C) + o_hc
    b_query, b_grad = load_row(p_query, o_row, m_hc), load_row(p_grad, o_row, m_hc)
    b_lse = load_row(p_lse, offset(i_row, H) + i_h, m_h)
    b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

    b_grad_query = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, H * C)
        b_g = tl.sum(b_x * b_grad[None, :, :], 2)
        b_inverse = gather(p_inverse, i_src, i_h, m_eh, H)
        b_alpha = alpha(b_inverse * tl.sum(b_x * b_query[None, :, :], 2), b_lse, 1.0, m_eh)
        b_keep = keep(p_seed, p_dropout_ids, start + o_e, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        i_edge = edge_id(p_perm, start + o_e, m_e)
        b_factor = b_keep * edge_weights(p_edge_weight, i_edge, i_h, m_eh, H)
        b_f = b_inverse * (b_alpha * (b_g * b_factor - b_mean))
        store_edges(p_weights, start + o_e, i_h, m_eh, b_alpha * b_factor, b_f, H)
        if p_grad_weight is not None:
            tl.store(p_grad_weight + offset(i_edge, H)[:, None] + i_h[None, :], b_alpha * b_keep * b_g, mask=m_eh)
        b_grad_query += tl.sum(b_f[:, :, None] * b_x, 0)

    store_row(p_grad_query, p_chunks, o_row, o_item, b_grad_query, m_hc, is_whole, is_chunk)


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
    """For one src j: sum_i k_ij w_ij alpha_ij dO_i and B_j = sum_i f_ij q_i, from what the pass over dst left."""
    H = all_models(EACH, models)
    i_row, start, count, is_whole, is_chunk = work_item(
        tl.program_id(0), p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT
    )
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    o_row, o_item = offset(i_row, H * C) + o_hc, offset(tl.program_id(0), 2 * H * C) + o_hc

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_across = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        b_w, b_f = load_edges(p_weights, i_place, i_h, m_eh, H)
        b_grad = gather_features(p_grad, i_dst, o_hc, m_e, m_hc, H * C)
        b_query = gather_features(p_query, i_dst, o_hc, m_e, m_hc, H * C)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        b_across += tl.sum(b_f[:, :, None] * b_query, 0)

    store_row(p_grad_x, p_chunks, o_row, o_item, b_sum, m_hc, is_whole, is_chunk)
    store_row(p_across, p_chunks, o_row, o_item + H * C, b_across, m_hc, is_whole, is_chunk)


def forward(
    x: Tensor,
    score: Cosine,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and the log-sum-exp `[N_dst, H]`."""
    models = x.shape[:-3]
    x, query, inverse, weight = beside(models, x, score.queries(torch.float32), inverse_norm(widened(x)), edge_weight)
    operands = {"p_query": query, "p_inverse": inverse, "p_edge_weight": weight, "p_perm": edges.perm}
    return apart(models, *forward_pass(_forward_kernel, x, edges, models.numel(), dropout, seed, dtype, **operands))


def backward(
    grad: Tensor,
    x: Tensor,
    score: Cosine,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> dict[str, Tensor | None]:
    """The gradients of x, the edges' weights, x_dst and beta, as on a CPU: one pass over dst and one over src."""
    models, wide, inverse = x.shape[:-3], widened(x), inverse_norm(widened(x))
    grad, x, query, by_row, out, lse = beside(models, grad, x, score.queries(torch.float32), inverse, out, *saved)
    (weight,) = beside(models, edge_weight)
    (_, heads, channels), num_edges = x.shape, edges.num_edges
    grad_x, across = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    grad_query = torch.zeros_like(query)
    wants_weight = weight is not None and needs[1]
    grad_weight = of_rows(edges, wants_weight, edges.num_rows, heads, device=x.device)
    if num_edges and x.numel():
        weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
        by_dst, by_src = (Walk(edges, side, models.numel(), heads, channels) for side in ("dst", "src"))
        held_dst, held_src = by_dst.hold(heads * channels), by_src.hold(2 * heads * channels)
        shared: dict[str, Any] = {"p_grad": grad, "p_query": query, "p_weights": weights}
        _, dst, place = edges.transpose
        with torch.cuda.device_of(x):
            _backward_dst_kernel[(by_dst.items, by_dst.slabs)](
                p_x=x,
                p_inverse=by_row,
                p_edge_weight=weight,
                p_out=out,
                p_lse=lse,
                p_src=edges.src,
                p_perm=edges.perm,
                p_grad_query=grad_query,
                p_grad_weight=grad_weight,
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
                **shared,
                **by_src.arguments,
            )
            by_src.sum(held_src, grad_x, across)
    grad_x, across, grad_query, grad_weight = apart(models, grad_x, across, grad_query, grad_weight)
    grad_x = grad_x + across + along_itself(wide, inverse[..., None], across)
    grad_x_dst, along = score.query_gradients(grad_query)
    return {"x": grad_x.to(x.dtype), "edge_weight": grad_weight, "x_dst": grad_x_dst, "beta": along.sum(-2)}
