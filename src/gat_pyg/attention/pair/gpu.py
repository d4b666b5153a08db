"""Attention whose score needs the features of both ends on CUDA: GATv2, and the scaled dot product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.gpu.draw import drop_arguments, keep
from ...kernels.gpu.rows import (
    all_models,
    apart,
    beside,
    block_of_edges,
    edge_id,
    gather,
    gather_features,
    load_row,
    offset,
    row_width,
    slab,
    store_row,
    walk_of,
    work_item,
)
from ..score import Operation
from ..steps.gpu import alpha, embed, features_of, forward_pass, keys_of, leaky, of_rows, pair_score
from . import Dot
from .gpu_edges import Operands, attr_gradient, load_slopes, multiply, parameter_gradients, store_signs

BLOCKS = 4096  # programs of the pass over dst that sum the gradient of att; a fixed number, whatever the GPU


# Backward. With dS_i = W_e^T dO_i, g_ij = <dO_i, x_j> + <dS_i, u_ij> and D_i = sum_j k_ij w_ij alpha_ij g_ij, which is
# <dO_i, O_i>: grad w_ij = k_ij alpha_ij g_ij, grad e_ij = alpha_ij (k_ij w_ij g_ij - D_i), and grad z_ij = att
# grad e_ij LeakyReLU'(z_ij), or for the scaled product scale grad e_ij times the other end's features. Of z_ij the
# passes after that over dst read only the sign, a bit for each channel.


@triton.jit(do_not_specialize=["num_items", "num_chunks", "models", "threshold", "attr_stride"])
def _backward_dst_kernel(
    operands, pair, results, num_items, attr_stride, slope, scale, drop, threshold, csr, num_chunks, models, SIZES
):
    """For every dst i of the program: grad x_i = sum_j grad z_ij; grad p_i and S_i; its share of grad att; grad w_ij.

    grad att = sum_ij grad e_ij LeakyReLU(z_ij). Every edge leaves k_ij w_ij alpha_ij and grad e_ij in `p_weights`
    `[E, 2, H]`, and for GATv2 the signs of z_ij in `p_signs`, for the passes over src and over edges.
    """
    p_grad, p_grad_out_edge, p_x, p_edge_weight, p_out, p_lse = operands
    p_grad_x_dst, p_sums_edge, p_grad_att, p_grad_weight, p_weights, p_signs, p_chunks = results
    H = all_models(SIZES.EACH, models)
    HC, HD = H * SIZES.C, H * SIZES.D
    i_h, o_hc, m_h, m_hc = slab(H, SIZES.C, SIZES.BLOCK_H, SIZES.BLOCK_C)
    _, o_hd, _, m_hd = slab(H, SIZES.D, SIZES.BLOCK_H, SIZES.BLOCK_D)
    b_att = load_row(pair.p_att, o_hc, m_hc)
    b_grad_att = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    for o_item in tl.range(0, num_items - tl.program_id(0), tl.num_programs(0), num_stages=1):
        i_item = tl.program_id(0) + o_item
        i_row, start, count, is_whole, is_chunk = work_item(i_item, csr, num_chunks, SIZES.SPLIT)
        o_row, o_row_d = offset(i_row, HC) + o_hc, offset(i_row, HD) + o_hd
        b_x_dst, b_query_edge = load_row(pair.p_x_dst, o_row, m_hc), load_row(pair.p_query_edge, o_row_d, m_hd)
        b_grad, b_grad_out_edge = load_row(p_grad, o_row, m_hc), load_row(p_grad_out_edge, o_row_d, m_hd)
        b_lse = load_row(p_lse, offset(i_row, H) + i_h, m_h)
        b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

        b_grad_x_dst = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
        b_grad_query_edge = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_D], tl.float32)
        b_out_edge = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_D], tl.float32)
        for o_first in tl.range(0, count, SIZES.BLOCK_E, num_stages=SIZES.STAGES):
            o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, SIZES.BLOCK_E)
            i_src = tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)
            i_edge = edge_id(csr.p_ids, start + o_e, m_e)
            b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, row_width(HC, SIZES.X_STRIDE))
            b_attr = features_of(pair, i_edge, i_h, m_e, attr_stride, models, SIZES)
            b_key = keys_of(pair, b_x, i_src, o_hc, m_e, m_hc, H, SIZES)
            b_z = embed(b_x + b_x_dst[None, :, :], pair, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, SIZES)
            if pair.p_att is not None:
                store_signs(p_signs, b_z, start + o_e, i_h, m_eh, H, SIZES)
            b_g = tl.sum(b_x * b_grad[None, :, :], 2)
            if pair.p_query_edge is not None:
                b_g += tl.sum(b_attr * b_grad_out_edge[None, :, :], 2)
            b_e = pair_score(pair, b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, slope, scale)
            b_alpha = alpha(b_e, b_lse, 1.0, m_eh)
            o_place = start + o_e
            b_keep = keep(drop, threshold, o_place, m_e, models, SIZES)
            b_factor = b_keep * gather(p_edge_weight, i_edge, i_h, m_eh, H, 1.0)
            b_grad_e = b_alpha * (b_g * b_factor - b_mean)
            p_edge = p_weights + offset(o_place, 2 * H)[:, None] + i_h[None, :]
            tl.store(p_edge, b_alpha * b_factor, mask=m_eh)
            tl.store(p_edge + H, b_grad_e, mask=m_eh)
            if p_grad_weight is not None:
                tl.store(p_grad_weight + offset(i_edge, H)[:, None] + i_h[None, :], b_alpha * b_keep * b_g, mask=m_eh)
            if pair.p_att is not None:
                b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * tl.where(b_z > 0.0, 1.0, slope), 0)
                b_grad_att += tl.sum(b_grad_e[:, :, None] * leaky(b_z, slope), 0)
            else:
                b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * b_key, 0)
            if pair.p_query_edge is not None:
                b_grad_query_edge += tl.sum(b_grad_e[:, :, None] * b_attr, 0)
                b_out_edge += tl.sum((b_alpha * b_factor)[:, :, None] * b_attr, 0)

        b_grad_x_dst *= b_att if pair.p_att is not None else scale
        o_chunk = offset(i_item, HC + (0 if pair.p_query_edge is None else 2 * HD))
        store_row(p_grad_x_dst, p_chunks, o_row, o_chunk + o_hc, b_grad_x_dst, m_hc, is_whole, is_chunk)
        if pair.p_query_edge is not None:
            o_sums, o_chunk_d = offset(i_row, 2 * HD) + o_hd, o_chunk + HC + o_hd
            store_row(p_sums_edge, p_chunks, o_sums, o_chunk_d, b_grad_query_edge * scale, m_hd, is_whole, is_chunk)
            o_sums, o_chunk_d = o_sums + HD, o_chunk_d + HD
            store_row(p_sums_edge, p_chunks, o_sums, o_chunk_d, b_out_edge, m_hd, is_whole, is_chunk)
    if pair.p_att is not None:
        tl.store(p_grad_att + offset(tl.program_id(0), HC) + o_hc, b_grad_att, mask=m_hc)


@triton.jit(do_not_specialize=["num_chunks", "models"])
def _backward_src_kernel(operands, results, slope, scale, csr, num_chunks, models, SIZES):
    """For one src j: grad x_j = sum_i k_ij w_ij alpha_ij dO_i + grad z_ij, from what the pass over dst left.

    With keys, the second sum is grad k_j instead. Rows of both results are `STRIDE` elements apart.
    """
    p_grad, p_x_dst, p_att, p_weights, p_signs = operands
    p_grad_x, p_grad_key, p_chunks = results
    H, i_item = all_models(SIZES.EACH, models), tl.program_id(0)
    HC = H * SIZES.C
    i_row, start, count, is_whole, is_chunk = work_item(i_item, csr, num_chunks, SIZES.SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, SIZES.C, SIZES.BLOCK_H, SIZES.BLOCK_C)

    b_sum = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)  # sum of k w alpha dO
    b_sum_z = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)  # sum of grad z without its constant factor
    for o_first in tl.range(0, count, SIZES.BLOCK_E, num_stages=SIZES.STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, SIZES.BLOCK_E)
        i_dst = tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)
        i_place = tl.load(csr.p_ids + start + o_e, mask=m_e, other=0)
        b_w = gather(p_weights, i_place, i_h, m_eh, 2 * H)
        b_grad_e = gather(p_weights + H, i_place, i_h, m_eh, 2 * H)
        b_grad = gather_features(p_grad, i_dst, o_hc, m_e, m_hc, HC)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        if p_signs is not None:
            b_other = load_slopes(p_signs, i_place, i_h, m_eh, slope, H, SIZES)
        else:
            b_other = gather_features(p_x_dst, i_dst, o_hc, m_e, m_hc, HC)
        b_sum_z += tl.sum(b_grad_e[:, :, None] * b_other, 0)

    b_sum_z *= load_row(p_att, o_hc, m_hc) if p_att is not None else scale
    o_row = offset(i_row, row_width(HC, SIZES.STRIDE)) + o_hc
    if p_grad_key is None:
        store_row(p_grad_x, p_chunks, o_row, offset(i_item, HC) + o_hc, b_sum + b_sum_z, m_hc, is_whole, is_chunk)
    else:
        o_item = offset(i_item, 2 * HC) + o_hc
        store_row(p_grad_key, p_chunks, o_row, o_item, b_sum_z, m_hc, is_whole, is_chunk)
        store_row(p_grad_x, p_chunks, o_row, o_item + HC, b_sum, m_hc, is_whole, is_chunk)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and log-sum-exp `[N_dst, H]`."""
    models, of = call.x.shape[:-3], Operands.of(call.x, call.score)
    out_edge = None if of.pair.p_query_edge is None else torch.empty_like(of.pair.p_query_edge)
    out = of.x.new_empty(call.edges.num_dst, *of.x.shape[1:], dtype=dtype if out_edge is None else torch.float32)
    lse = forward_pass(call, of.x, (None, None, None), of.pair, (out, None, None, out_edge), *of.numbers, **of.sizes)
    if out_edge is not None and of.weight is not None:
        out += multiply("nhd,hcd->nhc", out_edge, of.weight)
    return apart(models, out.to(dtype), lse)


def backward(
    call: Operation, grad: Tensor, out: Tensor, saved: tuple[Tensor, ...], needs: tuple[bool, ...]
) -> dict[str, Tensor | None]:
    """The gradients, in one pass over dst and one over src, and one over the edges for those of W_e and u.

    Holds two numbers an edge and head, and for GATv2 a bit an edge and channel.
    """
    x, score, edges, edge_weight, seed, dropout = call
    models, wanted = x.shape[:-3], dict(zip(("x", "edge_weight", *score.shapes), needs, strict=True))
    operands = Operands.of(x, score)
    (num_src, heads, channels), num_edges, pair = operands.x.shape, edges.num_edges, operands.pair
    if num_edges == 0 or operands.x.numel() == 0:
        of = {"x": x, "edge_weight": edge_weight} | dict(zip(score.shapes, score.operands, strict=True))
        grads = {name: None if each is None else torch.zeros(each.shape, device=x.device) for name, each in of.items()}
        by_rows = ("x", "edge_weight", *(name for name, shape in score.shapes.items() if shape[1] == "H"))
        return grads | dict(zip(by_rows, apart(models, *beside(models, *map(grads.get, by_rows))), strict=True))

    grad, out, lse, weight = beside(models, grad, out, *saved, edge_weight)
    lin, size, grad_edge, sums_edge = operands.weight, operands.features, None, None
    if lin is not None:
        grad_edge = multiply("nhc,hcd->nhd", grad, lin)
        sums_edge = grad_edge.new_empty(edges.num_dst, 2, heads, size)  # grad p and S
    grad_x_dst, grad_key, both = torch.empty_like(pair.p_x_dst), None, None
    if operands.stride is None:
        grad_x = torch.empty_like(operands.x)
        grad_key = None if pair.p_key is None else torch.empty_like(pair.p_key)
    else:
        both = x.new_empty(num_src, 2, heads, channels)
        grad_key, grad_x = both.unbind(1)
    grad_weight = of_rows(edges, wanted["edge_weight"], edges.num_rows, heads, device=x.device)
    weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
    signs = shares = None
    by_dst = walk_of(edges, "dst", models.numel(), heads, channels, size)
    by_src = walk_of(edges, "src", models.numel(), heads, channels)
    blocks = by_dst.items
    if pair.p_att is not None:
        blocks = min(blocks, BLOCKS)
        shares = weights.new_empty(blocks, heads, channels)  # of grad att
        signs = x.new_empty(num_edges, heads, -(-channels // 8), dtype=torch.uint8)
    drop = drop_arguments(dropout, seed, edges.dropout_ids_by_dst)
    with torch.cuda.device_of(x):
        held = by_dst.hold(heads * (channels + 2 * size))
        _backward_dst_kernel[(blocks, by_dst.slabs)](
            (grad, grad_edge, operands.x, weight, out, lse),
            pair,
            (grad_x_dst, sums_edge, shares, grad_weight, weights, signs, held),
            by_dst.items,
            *operands.numbers,
            **drop,
            **by_dst.arguments(**operands.sizes),
        )
        by_dst.sum(held, grad_x_dst, sums_edge)
        held = by_src.hold(heads * channels * (1 if grad_key is None else 2))
        _backward_src_kernel[(by_src.items, by_src.slabs)](
            (grad, None if signs is not None else pair.p_x_dst, pair.p_att, weights, signs),
            (grad_x, grad_key, held),
            *operands.numbers[1:],
            **by_src.arguments(STRIDE=None if both is None else both.stride(0)),
        )
        by_src.sum(held, *((grad_key, grad_x) if both is None else (both,)))
        grad_lin = None
        if lin is not None and sums_edge is not None:
            of_query, of_out = sums_edge.unbind(1)
            grad_x_dst = grad_x_dst + multiply("nhd,hcd->nhc", of_query, lin)
            grad_lin = multiply("nhc,nhd->hcd", pair.p_x_dst, of_query) + multiply("nhc,nhd->hcd", grad, of_out)
        names = "x", "edge_weight", "x_dst", "key"
        grads = dict(zip(names, apart(models, grad_x, grad_weight, grad_x_dst, grad_key), strict=True))
        if isinstance(score, Dot):
            if score.lin_edge is not None:  # no sums if D is 0
                like = score.lin_edge
                grads["lin_edge"] = torch.zeros_like(like) if grad_lin is None else grad_lin.view_as(like)
            if wanted["edge_attr"]:
                grads["edge_attr"] = attr_gradient(operands, grad_edge, weights, edges, models)
        else:
            grads["att"] = None if shares is None else shares.sum(0).view_as(score.att)
            if score.lin_edge is not None and (wanted["lin_edge"] or wanted["edge_attr"]):
                grads |= parameter_gradients(operands, score.lin_edge, weights, signs, edges, wanted["edge_attr"])
    return {name: grads.get(name) for name in ("x", "edge_weight", *score.shapes)}
