"""The scaled dot product on a CPU: e_ij = (<q_i, k_j> + <p_i, u_ij>) / sqrt(C), with messages [x_j || u_ij]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Shape, chunks_of, edge_ids, merge_sums, run, tile_of
from ...kernels.cpu.vector import lane_sum, larger, load, of_model, only_if, only_if_any, pointer, splat, store
from ..steps.cpu import (
    Row,
    attend,
    clear,
    dot,
    each_tile,
    load_edges,
    load_factors,
    load_lse,
    merge,
    prefetch_edge,
    row_of,
    row_of_edge,
    softmax_back,
    weighted_sum,
)
from . import Dot


@inline
def _dot_edges(row: Row, u: Any, ids: Any, width: int, lanes: Any, ragged: Any, p: Any, e: Any, grad: Any,
               product: Any) -> None:  # fmt: skip
    """Add <p_i, u_ij> to e for all edges of a dst; with `product`, also <dS_i, u_ij>.

    Both p and dS are `[N, D, H]`: a vector has all heads, and none has to be summed.
    """
    own, step, count = (row.own - row.head) * width + row.head, row.heads, only_if(ragged, row.width)
    for k in range(row.size):
        prefetch_edge(u, ids, row, k, width)
        at, total = row_of_edge(ids, row.begin + k) * width, load(e, k * row.lanes, lanes, None)
        if product is not None:
            other = load(product, k * row.lanes, lanes, None)
        for d in range(width):
            total = total + u[at + d] * load(p, own + d * step, lanes, count)
            if product is not None:
                other = other + u[at + d] * load(grad, own + d * step, lanes, count)
        store(e, k * row.lanes, total, None)
        if product is not None:
            store(product, k * row.lanes, other, None)


@inline
def _sum_edges(out: Any, row: Row, u: Any, ids: Any, width: int, wide: Any, weight: Any, shares: Any) -> None:
    """The sum of u_ij over the edges of a dst, times `weight`, and times the `shares` of the heads if there are any."""
    for h in range(row.width):
        for d in range(0, width, 1 << len(wide)):
            total = splat(u, 0.0, wide)
            for k in range(row.size):
                u_ij = load(u, row_of_edge(ids, row.begin + k) * width + d, wide, width - d)
                total = total + weight[k * row.lanes + h] * u_ij
            if shares is not None:
                total = shares[h] * total
            store(out, (row.to + h) * width + d, total, width - d)


@inline
def _add_edges(grad_u: Any, row: Row, ids: Any, width: int, lanes: Any, ragged: Any, p: Any, change: Any, grad: Any,
               weight: Any) -> None:  # fmt: skip
    """Add the sum over the heads of `change` p_i + `weight` dS_i to the gradient of each u_ij; both are `[N, D, H]`."""
    own, count = (row.own - row.head) * width + row.head, only_if(ragged, row.width)
    for k in range(row.size):
        to = row_of_edge(ids, row.begin + k) * width
        changes, weights = load(change, k * row.lanes, lanes, count), load(weight, k * row.lanes, lanes, count)
        for d in range(width):
            at = own + d * row.heads
            grad_u[to + d] += lane_sum(changes * load(p, at, lanes, count) + weights * load(grad, at, lanes, count))


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    scale: Any,
    layout: Any,
    wide: Any,
    width: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    x_: Any,
    key_: Any,
    query_: Any,
    p_: Any,
    u_: Any,
    w_: Any,
    out_: Any,
    out_u_: Any,
    lse_: Any,
) -> None:
    """The scores of some chunks, then equations (2) and (4)."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, key, query, p, u, w = of_model((x_, key_, query_, p_, u_, w_), model, models)
    out, out_u, lse = of_model((out_, out_u_, lse_), model, models)
    keep = only_if_any((drop, w_), pointer(buffers[0], 0))
    weight, shares = pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            load_factors(keep, drop, w, ids, row, model, lanes, ragged)
            clear(weight, row)
            each_tile(dot, tile, row, query, key, weight, None, None)
            if u_ is not None:
                _dot_edges(row, u, ids, width, lanes, ragged, p, weight, None, None)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                e = scale * load(weight, k * row.lanes, lanes, None)
                tops = larger(tops, e)
                store(weight, k * row.lanes, e, None)
            attend(row, weight, keep, shares, tops, x, out, lse, layout)
            if u_ is not None:
                _sum_edges(out_u, row, u, ids, width, wide, weight, shares)


@compiled
def _backward_dst(
    work: Any,
    chunks: Any,
    sizes: Any,
    scale: Any,
    layout: Any,
    wide: Any,
    width: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    grad_: Any,
    grad_out_u_: Any,
    x_: Any,
    key_: Any,
    query_: Any,
    p_: Any,
    u_: Any,
    w_: Any,
    lse_: Any,
    delta_: Any,
    weights_: Any,
    changes_: Any,
    grad_w_: Any,
    grad_u_: Any,
    grad_query_: Any,
    grad_p_: Any,
) -> None:
    """k_ij w_ij alpha_ij and de_ij / sqrt(C) of some chunks, grouped by dst, and the gradients of q, p and u.

    `key` is None where it is x.
    """
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    grad, grad_out_u, x, key, query, p = of_model((grad_, grad_out_u_, x_, key_, query_, p_), model, models)
    u, w, lse, delta, weights = of_model((u_, w_, lse_, delta_, weights_), model, models)
    changes, grad_w, grad_u = of_model((changes_, grad_w_, grad_u_), model, models)
    grad_query, grad_p = of_model((grad_query_, grad_p_), model, models)
    keep, e, product = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            clear(e, row)
            clear(product, row)
            if key_ is None:
                each_tile(dot, tile, row, query, x, e, grad, product)
            else:
                each_tile(dot, tile, row, query, key, e, None, None)
                each_tile(dot, tile, row, grad, x, product, None, None)
            if u_ is not None:
                _dot_edges(row, u, ids, width, lanes, ragged, p, e, grad_out_u, product)
            top, share, mean = load_lse(lse, delta, row, lanes, ragged)
            for k in range(row.size):
                softmax_back(row, k, scale, e, product, keep, w, ids, top, share, mean, weights, changes, grad_w, lanes,
                             ragged)  # fmt: skip
            if key_ is None:
                each_tile(weighted_sum, tile, row, x, product, None, None, grad_query, None)
            else:
                each_tile(weighted_sum, tile, row, key, product, None, None, grad_query, None)
            if u_ is not None:
                _sum_edges(grad_p, row, u, ids, width, wide, product, None)
            if grad_u_ is not None:
                _add_edges(grad_u, row, ids, width, lanes, ragged, p, product, grad_out_u, e)


@compiled
def _backward_src(
    work: Any,
    chunks: Any,
    sizes: Any,
    layout: Any,
    dst_: Any,
    place_: Any,
    grad_: Any,
    query_: Any,
    weights_: Any,
    changes_: Any,
    grad_x_: Any,
    grad_key_: Any,
) -> None:
    """sum_i k_ij w_ij alpha_ij dO_i and sum_i de_ij q_i / sqrt(C) of some chunks of src rows."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    dst, place = pointer(dst_, 0), pointer(place_, 0)
    grad, query, weights, changes = of_model((grad_, query_, weights_, changes_), model, models)
    grad_x, grad_key = of_model((grad_x_, grad_key_), model, models)
    weight, change = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes)
            load_edges(weight, weights, row, place, lanes, ragged)
            load_edges(change, changes, row, place, lanes, ragged)
            each_tile(weighted_sum, tile, row, grad, weight, None, None, grad_x, None)
            each_tile(weighted_sum, tile, row, query, change, None, None, grad_key, None)


def _arguments(
    shape: Shape, x: Tensor, score: Dot, edges: Edges, edge_weight: Tensor | None
) -> tuple[dict[str, Any], int]:
    """The arguments that both passes over dst share, by name, and D, 0 without edge features."""
    width = 0 if score.edge_attr is None else score.edge_attr.size(-1)
    return {
        "scale": shape.dtype.type(max(shape.channels, 1) ** -0.5),
        "layout": shape.layout,
        "wide": tile_of(width) if width else None,
        "width": width,
        "src": edges.src.numpy(),
        "ids": None if score.edge_attr is None and edge_weight is None else edge_ids(edges),
        "x": shape.flat(x),
        "key": shape.flat(score.key),
        "query": shape.flat(score.x_dst),
        "p": None if score.query_edge is None else shape.flat(score.query_edge.mT),
        "u": shape.flat(score.edge_attr),
        "w": shape.flat(edge_weight),
    }, width


def forward(
    x: Tensor,
    score: Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator)."""
    shape, chunks = Shape.of(x, edge_weight, *score.operands, narrow=False), chunks_of(edges, "dst")
    heads, channels, rows = shape.heads, shape.channels, edges.num_dst
    given, width = _arguments(shape, x, score, edges, edge_weight)
    out, lse = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    out_u = shape.empty(chunks.slots, heads, width) if width else None
    run(
        _forward,
        shape.dtype,
        shape.job(chunks.bounds, chunks.most, edges),
        chunks.arrays,
        shape.sizes,
        given["scale"],
        given["layout"],
        given["wide"],
        width,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        given["src"],
        given["ids"],
        given["x"],
        given["x"] if given["key"] is None else given["key"],
        given["query"],
        given["p"],
        given["u"],
        given["w"],
        out,
        out_u,
        lse,
    )
    if out_u is not None:
        merge(shape._replace(channels=width), chunks, out_u, lse)
    merge(shape, chunks, out, lse)
    result = shape.tensor(out, rows, heads, channels)
    if out_u is not None:
        result = torch.cat([result, shape.tensor(out_u, rows, heads, width)], -1)
    return result.to(dtype), shape.tensor(lse, rows, heads, 2)


def backward(
    grad: Tensor,
    x: Tensor,
    score: Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> dict[str, Tensor | None]:
    """The gradients, by f_ij = de_ij / sqrt(C); of an edge, two numbers a head are held.

    grad q_i = sum_j f_ij k_j, grad p_i = sum_j f_ij u_ij, grad k_j = sum_i f_ij q_i, grad x_j = sum_i k w alpha dO_i
    and, with dS the gradient of the channels of the edges, grad u_ij = sum over the heads of f_ij p_i + k w alpha dS_i.
    """
    shape, (lse,) = Shape.of(x, edge_weight, *score.operands, narrow=False), saved
    heads, channels = shape.heads, shape.channels
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    given, width = _arguments(shape, x, score, edges, edge_weight)
    delta = shape.flat(torch.einsum("...c,...c->...", grad.to(lse.dtype), out.to(lse.dtype)))
    g = shape.flat(grad[..., :channels] if width else grad)
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    grad_w = shape.empty(edges.num_edges, heads) if needs[1] else None
    grad_u = np.zeros(shape.models * edges.num_rows * width, shape.dtype) if width and needs[5] else None
    grad_query = shape.empty(by_dst.slots, heads, channels)
    grad_p = shape.empty(by_dst.slots, heads, width) if width else None
    run(
        _backward_dst,
        shape.dtype,
        shape.job(by_dst.bounds, by_dst.most, edges),
        by_dst.arrays,
        shape.sizes,
        given["scale"],
        given["layout"],
        given["wide"],
        width,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        given["src"],
        given["ids"],
        g,
        shape.flat(grad[..., channels:].mT) if width else None,
        given["x"],
        given["key"],
        given["query"],
        given["p"],
        given["u"],
        given["w"],
        shape.flat(lse),
        delta,
        weights,
        changes,
        grad_w,
        grad_u,
        grad_query,
        grad_p,
    )
    values, keys = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    job, chunks = shape.job(by_src.bounds, by_src.most, edges), by_src.arrays
    operands = dst.numpy(), place.numpy(), g, given["query"], weights, changes, values, keys
    run(_backward_src, shape.dtype, job, chunks, shape.sizes, shape.layout, *operands)
    merge_sums(shape.models, by_dst, heads * channels, grad_query)
    merge_sums(shape.models, by_src, heads * channels, values, keys)
    grad_x, grad_key = (shape.tensor(sums, edges.num_src, heads, channels) for sums in (values, keys))
    grads: dict[str, Tensor | None] = {"x": grad_x, "key": grad_key}
    if score.key is None:
        grads = {"x": grad_x.add_(grad_key)}
    grads["x_dst"] = shape.tensor(grad_query, edges.num_dst, heads, channels)
    if grad_p is not None:
        merge_sums(shape.models, by_dst, heads * width, grad_p)
        grads["query_edge"] = shape.tensor(grad_p, edges.num_dst, heads, width)
    if grad_u is not None:
        grads["edge_attr"] = shape.tensor(grad_u, edges.num_rows, width)
    if grad_w is not None:
        grads["edge_weight"] = edges.ungroup(shape.tensor(grad_w, edges.num_edges, heads), len(shape.batch))
    return grads
