"""Cosine attention on a CPU: e_ij = r_j <q_i, x_j>, with queries q and the inverse norms r of x."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Shape, chunks_of, edge_ids, merge_sums, run
from ...kernels.cpu.vector import larger, load, of_model, only_if, only_if_any, pointer, splat, store
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
    row_of,
    softmax_back,
    weighted_sum,
)
from . import Cosine, along_itself, inverse_norm


@inline
def _load_inverse(inverse: Any, row: Row, k: int, lanes: Any, ragged: Any) -> Any:
    """r_j of the other end of edge k."""
    at = np.int64(row.ids[row.begin + k]) * row.heads + row.head
    return load(inverse, at, lanes, only_if(ragged, row.width))


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    x_: Any,
    query_: Any,
    inverse_: Any,
    w_: Any,
    out_: Any,
    lse_: Any,
) -> None:
    """The scores of some chunks, then equations (2) and (4)."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, query, inverse, w, out, lse = of_model((x_, query_, inverse_, w_, out_, lse_), model, models)
    keep = only_if_any((drop, w_), pointer(buffers[0], 0))
    weight, shares = pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            load_factors(keep, drop, w, ids, row, model, lanes, ragged)
            clear(weight, row)
            each_tile(dot, tile, row, query, x, weight, None, None)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                e = _load_inverse(inverse, row, k, lanes, ragged) * load(weight, k * row.lanes, lanes, None)
                tops = larger(tops, e)
                store(weight, k * row.lanes, e, None)
            attend(row, weight, keep, shares, tops, x, out, lse, layout)


@compiled
def _backward_dst(
    work: Any,
    chunks: Any,
    sizes: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    grad_: Any,
    x_: Any,
    query_: Any,
    inverse_: Any,
    w_: Any,
    lse_: Any,
    delta_: Any,
    weights_: Any,
    changes_: Any,
    grad_w_: Any,
    grad_query_: Any,
) -> None:
    """k_ij alpha_ij and f_ij = r_j alpha_ij (g_ij - D_i) of some chunks, grouped by dst, and sum_j f_ij x_j."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    grad, x, query, inverse, lse, delta = of_model((grad_, x_, query_, inverse_, lse_, delta_), model, models)
    w, weights, changes = of_model((w_, weights_, changes_), model, models)
    grad_w, grad_query = of_model((grad_w_, grad_query_), model, models)
    keep, e, product = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            clear(e, row)
            clear(product, row)
            each_tile(dot, tile, row, query, x, e, grad, product)
            top, share, mean = load_lse(lse, delta, row, lanes, ragged)
            for k in range(row.size):
                factor = _load_inverse(inverse, row, k, lanes, ragged)
                softmax_back(row, k, factor, e, product, keep, w, ids, top, share, mean, weights, changes, grad_w,
                             lanes, ragged)  # fmt: skip
            each_tile(weighted_sum, tile, row, x, product, None, None, grad_query, None)


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
    across_: Any,
) -> None:
    """sum_i k_ij alpha_ij dO_i and sum_i f_ij q_i of some chunks of src rows."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    dst, place = pointer(dst_, 0), pointer(place_, 0)
    grad, query, weights, changes = of_model((grad_, query_, weights_, changes_), model, models)
    grad_x, across = of_model((grad_x_, across_), model, models)
    weight, change = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes)
            load_edges(weight, weights, row, place, lanes, ragged)
            load_edges(change, changes, row, place, lanes, ragged)
            each_tile(weighted_sum, tile, row, grad, weight, None, None, grad_x, None)
            each_tile(weighted_sum, tile, row, query, change, None, None, across, None)


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
    """Return O in `dtype` and (max, 1 / denominator)."""
    x = x.to(dtype)
    shape, chunks = Shape.of(x, edge_weight, *score.operands, narrow=False), chunks_of(edges, "dst")
    heads, channels, rows = shape.heads, shape.channels, edges.num_dst
    out, lse = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    run(
        _forward,
        shape.dtype,
        shape.job(chunks.bounds, chunks.most, edges),
        chunks.arrays,
        shape.sizes,
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        None if edge_weight is None else edge_ids(edges),
        shape.flat(x),
        shape.flat(score.queries(dtype)),
        shape.flat(inverse_norm(x)),
        shape.flat(edge_weight),
        out,
        lse,
    )
    merge(shape, chunks, out, lse)
    return shape.tensor(out, rows, heads, channels).to(dtype), shape.tensor(lse, rows, heads, 2)


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
    """The gradients of x, x_dst and beta, by f_ij = r_j de_ij.

    grad q_i = sum_j f_ij x_j, and with B_j = sum_i f_ij q_i, the gradient as if |x_j| were constant,
    grad x_j = sum_i k_ij alpha_ij dO_i + B_j - r_j^2 <x_j, B_j> x_j. Of an edge, two numbers a head are held.
    """
    shape, (lse,) = Shape.of(x, edge_weight, *score.operands, narrow=False), saved
    heads, channels, x = shape.heads, shape.channels, x.to(lse.dtype)
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    inverse = inverse_norm(x)
    g, query = shape.flat(grad), shape.flat(score.queries(lse.dtype))
    delta = shape.flat(torch.einsum("...c,...c->...", grad.to(lse.dtype), out.to(lse.dtype)))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    grad_w = shape.empty(edges.num_edges, heads) if needs[1] else None
    grad_query = shape.empty(by_dst.slots, heads, channels)
    run(
        _backward_dst,
        shape.dtype,
        shape.job(by_dst.bounds, by_dst.most, edges),
        by_dst.arrays,
        shape.sizes,
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        None if edge_weight is None else edge_ids(edges),
        g,
        shape.flat(x),
        query,
        shape.flat(inverse),
        shape.flat(edge_weight),
        shape.flat(lse),
        delta,
        weights,
        changes,
        grad_w,
        grad_query,
    )
    values, across = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    job, chunks = shape.job(by_src.bounds, by_src.most, edges), by_src.arrays
    operands = dst.numpy(), place.numpy(), g, query, weights, changes, values, across
    run(_backward_src, shape.dtype, job, chunks, shape.sizes, shape.layout, *operands)
    merge_sums(shape.models, by_dst, heads * channels, grad_query)
    merge_sums(shape.models, by_src, heads * channels, values, across)
    as_if_constant = shape.tensor(across, edges.num_src, heads, channels)
    grad_x = shape.tensor(values, edges.num_src, heads, channels) + as_if_constant
    grad_x += along_itself(x, inverse[..., None], as_if_constant)
    grad_x_dst, along = score.query_gradients(shape.tensor(grad_query, edges.num_dst, heads, channels))
    grad_beta = torch.from_numpy(along.numpy().sum(-2))  # torch may divide a long sum among its threads
    grads: dict[str, Tensor | None] = {"x": grad_x, "x_dst": grad_x_dst, "beta": grad_beta}
    if grad_w is not None:
        grads["edge_weight"] = edges.ungroup(shape.tensor(grad_w, edges.num_edges, heads), len(shape.batch))
    return grads
