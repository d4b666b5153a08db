"""Attention whose score needs the features of both ends on CUDA: GATv2, and the scaled dot product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.draw import drop_arguments, keep
from ...kernels.gpu.rows import (
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
    row_width,
    slab,
    store_row,
    walk_of,
    work_item,
)
from ..score import Operation
from ..steps.gpu import alpha, embed, features_of, forward_pass, leaky, of_rows, pair_score
from . import Dot
from .gpu_edges import (
    Operands,
    attr_gradient,
    load_slopes,
    multiply,
    parameter_gradients,
    store_signs,
)

BLOCKS = 4096  # programs of the pass over dst that sum the gradient of att; a fixed number, whatever the GPU


# Backward. With dS_i = W_e^T dO_i, g_ij = <dO_i, x_j> + <dS_i, u_ij> and D_i = sum_j k_ij w_ij alpha_ij g_ij, which is
# <dO_i, O_i>: grad w_ij = k_ij alpha_ij g_ij, grad e_ij = alpha_ij (k_ij w_ij g_ij - D_i), and grad z_ij = att
# grad e_ij LeakyReLU'(z_ij), or for the scaled product scale grad e_ij times the other end's features. Of z_ij the
# passes after that over dst read only the sign, a bit for each channel.


@triton.jit(do_not_specialize=["num_chunks", "num_items", "threshold", "models", "attr_stride"])
def _backward_dst_kernel(
    p_grad,
    p_grad_out_edge,
    p_x,
    p_x_dst,
    p_att,
    p_key,
    p_lin,
    p_query_edge,
    p_edge_attr,
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
    p_grad_x_dst,
    p_sums_edge,
    p_grad_att,
    p_grad_weight,
    p_signs,
    p_chunks,
    num_chunks,
    num_items,
    models,
    attr_stride,
    slope,
    scale,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For every dst i of the program: grad x_i = sum_j grad z_ij; grad p_i and S_i; its share of grad att; grad w_ij.

    grad att = sum_ij grad e_ij LeakyReLU(z_ij). Every edge leaves k_ij w_ij alpha_ij and grad e_ij in `p_weights`
    `[E, 2, H]`, and for GATv2 the signs of z_ij in `p_signs`, for the passes over src and over edges.
    """
    H = all_models(EACH, models)
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)
    _, o_hd, _, m_hd = slab(H, D, BLOCK_H, BLOCK_D)
    o_d = tl.arange(0, BLOCK_D)
    b_att = load_row(p_att, o_hc, m_hc)
    b_grad_att = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_item in tl.range(0, num_items - tl.program_id(0), tl.num_programs(0), num_stages=1):
        i_item = tl.program_id(0) + o_item
        i_row, start, count, is_whole, is_chunk = work_item(
            i_item, p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT
        )
        o_row, o_row_d = offset(i_row, H * C) + o_hc, offset(i_row, H * D) + o_hd
        b_x_dst, b_query_edge = load_row(p_x_dst, o_row, m_hc), load_row(p_query_edge, o_row_d, m_hd)
        b_grad, b_grad_out_edge = load_row(p_grad, o_row, m_hc), load_row(p_grad_out_edge, o_row_d, m_hd)
        b_lse = load_row(p_lse, offset(i_row, H) + i_h, m_h)
        b_mean = tl.sum(b_grad * load_row(p_out, o_row, m_hc), 1)

        b_grad_x_dst = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        b_grad_query_edge = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        b_out_edge = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
            o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
            i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
            i_edge = edge_id(p_perm, start + o_e, m_e)
            b_x = gather_features(p_x, i_src, o_hc, m_e, m_hc, row_width(H * C, X_STRIDE))
            b_key = b_x
            if p_key is not None:
                b_key = gather_features(p_key, i_src, o_hc, m_e, m_hc, row_width(H * C, X_STRIDE))
            b_attr = features_of(p_edge_attr, p_query_edge, i_edge, i_h, o_d, m_e, attr_stride, models, EACH, D)
            b_z = b_x + b_x_dst[None, :, :]
            b_z = embed(b_z, p_lin, p_edge_attr, i_edge, i_h, o_hc, m_e, m_hc, attr_stride, models, H, EACH, C, D)
            if p_att is not None:
                store_signs(p_signs, b_z, start + o_e, i_h, m_eh, H, C, BLOCK_E, BLOCK_H, BLOCK_C)
            b_g = tl.sum(b_x * b_grad[None, :, :], 2)
            if p_query_edge is not None:
                b_g += tl.sum(b_attr * b_grad_out_edge[None, :, :], 2)
            b_e = pair_score(b_z, b_key, b_attr, b_x_dst, b_att, b_query_edge, p_att, p_query_edge, slope, scale)
            b_alpha = alpha(b_e, b_lse, 1.0, m_eh)
            o_place = start + o_e
            b_keep = keep(p_seed, p_dropout_ids, o_place, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
            b_factor = b_keep * edge_weights(p_edge_weight, i_edge, i_h, m_eh, H)
            b_grad_e = b_alpha * (b_g * b_factor - b_mean)
            p_edge = p_weights + offset(o_place, 2 * H)[:, None] + i_h[None, :]
            tl.store(p_edge, b_alpha * b_factor, mask=m_eh)
            tl.store(p_edge + H, b_grad_e, mask=m_eh)
            if p_grad_weight is not None:
                tl.store(p_grad_weight + offset(i_edge, H)[:, None] + i_h[None, :], b_alpha * b_keep * b_g, mask=m_eh)
            if p_att is not None:
                b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * tl.where(b_z > 0.0, 1.0, slope), 0)
                b_grad_att += tl.sum(b_grad_e[:, :, None] * leaky(b_z, slope), 0)
            else:
                b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * b_key, 0)
            if p_query_edge is not None:
                b_grad_query_edge += tl.sum(b_grad_e[:, :, None] * b_attr, 0)
                b_out_edge += tl.sum((b_alpha * b_factor)[:, :, None] * b_attr, 0)

        b_grad_x_dst *= b_att if p_att is not None else scale
        o_chunk = offset(i_item, H * C + (0 if p_query_edge is None else 2 * H * D))
        store_row(p_grad_x_dst, p_chunks, o_row, o_chunk + o_hc, b_grad_x_dst, m_hc, is_whole, is_chunk)
        if p_query_edge is not None:
            o_sums, o_chunk_d = offset(i_row, 2 * H * D) + o_hd, o_chunk + H * C + o_hd
            store_row(p_sums_edge, p_chunks, o_sums, o_chunk_d, b_grad_query_edge * scale, m_hd, is_whole, is_chunk)
            o_sums, o_chunk_d = o_sums + H * D, o_chunk_d + H * D
            store_row(p_sums_edge, p_chunks, o_sums, o_chunk_d, b_out_edge, m_hd, is_whole, is_chunk)
    if p_att is not None:
        tl.store(p_grad_att + offset(tl.program_id(0), H * C) + o_hc, b_grad_att, mask=m_hc)


@triton.jit(do_not_specialize=["num_chunks", "models"])
def _backward_src_kernel(
    p_grad,
    p_x_dst,
    p_att,
    p_weights,
    p_signs,
    p_ptr,
    p_dst,
    p_place,
    p_chunk_row,
    p_chunk_start,
    p_grad_x,
    p_grad_key,
    p_chunks,
    num_chunks,
    models,
    slope,
    scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one src j: grad x_j = sum_i k_ij w_ij alpha_ij dO_i + grad z_ij, from what the pass over dst left.

    With keys, the second sum is grad k_j instead. Rows of both results are `STRIDE` elements apart.
    """
    H = all_models(EACH, models)
    i_item = tl.program_id(0)
    i_row, start, count, is_whole, is_chunk = work_item(i_item, p_ptr, p_chunk_row, p_chunk_start, num_chunks, SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, C, BLOCK_H, BLOCK_C)

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # sum of k w alpha dO
    b_sum_z = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # sum of grad z without its constant factor
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, BLOCK_E)
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        b_w = gather(p_weights, i_place, i_h, m_eh, 2 * H)
        b_grad_e = gather(p_weights + H, i_place, i_h, m_eh, 2 * H)
        b_grad = gather_features(p_grad, i_dst, o_hc, m_e, m_hc, H * C)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        if p_signs is not None:
            b_other = load_slopes(p_signs, i_place, i_h, m_eh, slope, H, C, BLOCK_E, BLOCK_H, BLOCK_C)
        else:
            b_other = gather_features(p_x_dst, i_dst, o_hc, m_e, m_hc, H * C)
        b_sum_z += tl.sum(b_grad_e[:, :, None] * b_other, 0)

    b_sum_z *= load_row(p_att, o_hc, m_hc) if p_att is not None else scale
    o_row = offset(i_row, row_width(H * C, STRIDE)) + o_hc
    if p_grad_key is None:
        store_row(p_grad_x, p_chunks, o_row, offset(i_item, H * C) + o_hc, b_sum + b_sum_z, m_hc, is_whole, is_chunk)
    else:
        o_item = offset(i_item, 2 * H * C) + o_hc
        store_row(p_grad_key, p_chunks, o_row, o_item, b_sum_z, m_hc, is_whole, is_chunk)
        store_row(p_grad_x, p_chunks, o_row, o_item + H * C, b_sum, m_hc, is_whole, is_chunk)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and log-sum-exp `[N_dst, H]`."""
    models, operands = call.x.shape[:-3], Operands.of(call.x, call.score)
    x, lin = operands.x, operands.weight
    out_edge = None if operands.query_edge is None else torch.empty_like(operands.query_edge)
    out = x.new_empty(call.edges.num_dst, *x.shape[1:], dtype=dtype if out_edge is None else torch.float32)
    arguments = operands.arguments | {"p_out_edge": out_edge}
    lse = forward_pass(call, out, **arguments)
    if out_edge is not None and lin is not None:
        out += multiply("nhd,hcd->nhc", out_edge, lin)
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
    (num_src, heads, channels), num_edges = operands.x.shape, edges.num_edges
    if num_edges == 0 or operands.x.numel() == 0:
        of = {"x": x, "edge_weight": edge_weight} | dict(zip(score.shapes, score.operands, strict=True))
        grads = {name: None if each is None else torch.zeros(each.shape, device=x.device) for name, each in of.items()}
        by_rows = ("x", "edge_weight", *(name for name, shape in score.shapes.items() if shape[1] == "H"))
        return grads | dict(zip(by_rows, apart(models, *beside(models, *map(grads.get, by_rows))), strict=True))

    grad, out, lse, weight = beside(models, grad, out, *saved, edge_weight)
    key, lin, grad_edge, sums_edge = operands.key, operands.weight, None, None
    if lin is not None:
        grad_edge = multiply("nhc,hcd->nhd", grad, lin)
        sums_edge = grad_edge.new_empty(edges.num_dst, 2, *grad_edge.shape[1:])
    grad_x_dst, grad_key, both = torch.empty_like(operands.x_dst), None, None
    if operands.stride is None:
        grad_x = torch.empty_like(operands.x)
        grad_key = None if key is None else torch.empty_like(key)
    else:
        both = x.new_empty(num_src, 2, heads, channels)
        grad_key, grad_x = both.unbind(1)
    grad_weight = of_rows(edges, wanted["edge_weight"], edges.num_rows, heads, device=x.device)
    weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
    signs = None if operands.att is None else x.new_empty(num_edges, heads, -(-channels // 8), dtype=torch.uint8)
    launch = _Backward(operands, edges, models.numel(), grad, weights, signs)
    of_dst = {"p_grad_out_edge": grad_edge, "p_edge_weight": weight, "p_out": out, "p_lse": lse}
    of_dst |= {"p_grad_weight": grad_weight, **drop_arguments(dropout, seed, edges.dropout_ids_by_dst)}
    with torch.cuda.device_of(x):
        shares = launch.over_dst(grad_x_dst, sums_edge, **of_dst)
        launch.over_src(grad_x, grad_key, both)
        grad_lin = None
        if lin is not None and sums_edge is not None:
            of_query, of_out = sums_edge.unbind(1)
            grad_x_dst = grad_x_dst + multiply("nhd,hcd->nhc", of_query, lin)
            grad_lin = multiply("nhc,nhd->hcd", operands.x_dst, of_query) + multiply("nhc,nhd->hcd", grad, of_out)
        names = "x", "edge_weight", "x_dst", "key"
        grads = dict(zip(names, apart(models, grad_x, grad_weight, grad_x_dst, grad_key), strict=True))
        if isinstance(score, Dot):
            if score.lin_edge is not None:  # no sums if D is 0
                like = score.lin_edge
                grads["lin_edge"] = torch.zeros_like(like) if grad_lin is None else grad_lin.view_as(like)
            if wanted["edge_attr"]:
                grads["edge_attr"] = attr_gradient(operands, grad_edge, weights, edges, launch.models, models)
        else:
            grads["att"] = None if shares is None else shares.sum(0).view_as(score.att)
            if score.lin_edge is not None and (wanted["lin_edge"] or wanted["edge_attr"]):
                of_features = operands, score.lin_edge, weights, signs, edges, launch.models, wanted["edge_attr"]
                grads |= parameter_gradients(*of_features)
    return {name: grads.get(name) for name in ("x", "edge_weight", *score.shapes)}


class _Backward(NamedTuple):
    """The launches of a backward pass."""

    operands: Operands
    edges: Edges
    models: int
    grad: Tensor
    weights: Tensor  # [E, 2, H], from the pass over dst to the others
    signs: Tensor | None  # [E, H, C / 8], likewise

    def over_dst(self, grad_x_dst: Tensor, sums_edge: Tensor | None, **arguments: Any) -> Tensor | None:
        """Launch the pass over the rows of dst, and the sum of their chunks; return the shares of grad att.

        `sums_edge` are grad p and S, `[N_dst, 2, H, D]`.
        """
        operands, edges, (_, heads, channels) = self.operands, self.edges, self.grad.shape
        walk = walk_of(edges, "dst", self.models, heads, channels, operands.features)
        held = walk.hold(heads * (channels + 2 * operands.features))
        blocks = walk.items if operands.att is None else min(walk.items, BLOCKS)
        shares = None if operands.att is None else self.weights.new_empty(blocks, heads, channels)
        _backward_dst_kernel[(blocks, walk.slabs)](
            p_grad=self.grad,
            p_weights=self.weights,
            p_src=edges.src,
            p_perm=edges.perm,
            p_grad_x_dst=grad_x_dst,
            p_sums_edge=sums_edge,
            p_grad_att=shares,
            p_signs=self.signs,
            p_chunks=held,
            num_items=walk.items,
            **operands.arguments,
            **arguments,
            **walk.arguments,
        )
        walk.sum(held, grad_x_dst, sums_edge)
        return shares

    def over_src(self, grad_x: Tensor, grad_key: Tensor | None, both: Tensor | None) -> None:
        """Launch the pass over the rows of src, and the sum of their chunks; `both` are grad k and x side by side."""
        operands, edges, (_, heads, channels) = self.operands, self.edges, self.grad.shape
        _, dst, place = edges.transpose
        walk = walk_of(edges, "src", self.models, heads, channels)
        held = walk.hold(heads * channels * (1 if grad_key is None else 2))
        _backward_src_kernel[(walk.items, walk.slabs)](
            p_grad=self.grad,
            p_x_dst=None if operands.att is not None else operands.x_dst,
            p_att=operands.att,
            p_weights=self.weights,
            p_signs=self.signs,
            p_dst=dst,
            p_place=place,
            p_grad_x=grad_x,
            p_grad_key=grad_key,
            p_chunks=held,
            slope=operands.slope,
            scale=operands.scale,
            STRIDE=None if both is None else both.stride(0),
            **walk.arguments,
        )
        walk.sum(held, *((grad_key, grad_x) if both is None else (both,)))
