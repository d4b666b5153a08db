"""Cosine attention on a CPU: e_ij = r_j <q_i, x_j>, with queries q and the inverse norms r of x."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Shape, chunks_of, merge_sums, run
from ...kernels.cpu.vector import (
    LANES,
    constant,
    deinterleave,
    exp,
    lane_sum,
    larger,
    load,
    of_model,
    only_if,
    pointer,
    prefetch,
    splat,
    store,
)
from ..steps.cpu import AHEAD, merge, softmax, store_norm, weighted_sum
from . import Cosine, along_itself, inverse_norm


class Forward(NamedTuple):
    """The arrays of `_forward`."""

    src: Any
    x: Any
    query: Any
    inverse: Any
    out: Any
    norm: Any


class BackwardDst(NamedTuple):
    """The arrays of `_backward_dst`."""

    src: Any
    grad: Any
    x: Any
    query: Any
    inverse: Any
    norm: Any
    delta: Any
    weights: Any
    changes: Any
    grad_dst: Any


class BackwardSrc(NamedTuple):
    """The arrays of `_backward_src`."""

    dst: Any
    place: Any
    grad: Any
    query: Any
    weights: Any
    changes: Any
    grad_x: Any
    grad_src: Any


@inline
def _dots(x: Any, query: Any, mine: int, row: int, at: int, ids: Any, begin: int, n: int, end: int, e: Any, h: int,
          heads: int, grad: Any, product: Any, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile's share of <q_i, x_j>; and with `product` of <dO_i, x_j>."""
    tile_i = load(query, mine, tile, count)
    if product is not None:
        change = load(grad, mine, tile, count)
    for k in range(n):
        prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if product is not None:
            product[k * heads + h] += lane_sum(change * values)
        e[k * heads + h] += lane_sum(tile_i * values)


@compiled
def _forward(work: Any, chunks: Any, sizes: Any, layout: Any, drop: Any, arrays: Any) -> None:
    """The scores of some chunks, then equations (2) and (4)."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels = sizes.heads, sizes.channels
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.src.size - 1
    src, x, query = pointer(arrays.src, 0), of_model(arrays.x, model, models), of_model(arrays.query, model, models)
    inverse = of_model(arrays.inverse, model, models)
    out, norm = of_model(arrays.out, model, models), of_model(arrays.norm, model, models)
    keep, weight, shares = (
        only_if(drop, pointer(work.buffers[0], 0)),
        pointer(work.buffers[1], 0),
        pointer(work.buffers[2], 0),
    )
    chosen, whole = pointer(work.names, 0), channels // width * width
    for head in range(0, heads, G):
        count = only_if(ragged, heads - head)
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                draw_row(keep, 0, chosen, begin, n, pointer(drop[3], 0), drop, model, head, lanes)
            at, to, mine = head * channels, (o * heads + head) * channels, (i * heads + head) * channels
            for f in range(0, n * G, LANES):
                store(weight, f, splat(x, 0.0, LANES), None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _dots(x, query, mine + c, heads * channels, at + c, src, begin, n, end,
                          weight, h, G, None, None, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _dots(x, query, mine + c, heads * channels, at + c, src, begin, n, end,
                          weight, h, G, None, None, tile, channels - whole)  # fmt: skip
            tops = splat(x, -np.inf, lanes)
            for k in range(n):
                each = load(inverse, np.int64(src[begin + k]) * heads + head, lanes, count)
                e = each * load(weight, k * G, lanes, None)
                tops = larger(tops, e)
                store(weight, k * G, e, None)
            for f in range(n * G, (n * G + LANES - 1) // LANES * LANES):
                weight[f] = -np.inf
            share, _ = softmax(weight, None, keep, n, tops, lanes)  # (2)
            store_norm(norm, o * heads + head, tops, share, o == i, only_if(ragged, 2 * (heads - head)))
            store(shares, 0, share, None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    weighted_sum(x, heads * channels, at + c, src, begin, n, end, weight, None, h, G, shares[h],
                                 out, None, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    weighted_sum(x, heads * channels, at + c, src, begin, n, end, weight, None, h, G, shares[h],
                                 out, None, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _backward_dst(work: Any, chunks: Any, sizes: Any, layout: Any, drop: Any, arrays: Any) -> None:
    """k_ij alpha_ij and f_ij = r_j alpha_ij (g_ij - D_i) of some chunks, grouped by dst, and sum_j f_ij x_j."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels = sizes.heads, sizes.channels
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.src.size - 1
    src, grad, query = (
        pointer(arrays.src, 0),
        of_model(arrays.grad, model, models),
        of_model(arrays.query, model, models),
    )
    x, inverse = of_model(arrays.x, model, models), of_model(arrays.inverse, model, models)
    norm, deltas = of_model(arrays.norm, model, models), of_model(arrays.delta, model, models)
    grad_dst = of_model(arrays.grad_dst, model, models)
    weights, changes = of_model(arrays.weights, model, models), of_model(arrays.changes, model, models)
    keep, alpha, product = (
        only_if(drop, pointer(work.buffers[0], 0)),
        pointer(work.buffers[1], 0),
        pointer(work.buffers[2], 0),
    )
    chosen, whole, pair = pointer(work.names, 0), channels // width * width, (lanes, (0, 0))
    for head in range(0, heads, G):
        count, twice = only_if(ragged, heads - head), only_if(ragged, 2 * (heads - head))
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                draw_row(keep, 0, chosen, begin, n, pointer(drop[3], 0), drop, model, head, lanes)
            at, to, mine = head * channels, (o * heads + head) * channels, (i * heads + head) * channels
            for f in range(0, n * G, LANES):
                store(alpha, f, splat(x, 0.0, LANES), None)
                store(product, f, splat(x, 0.0, LANES), None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _dots(x, query, mine + c, heads * channels, at + c, src, begin, n, end,
                          alpha, h, G, grad, product, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _dots(x, query, mine + c, heads * channels, at + c, src, begin, n, end,
                          alpha, h, G, grad, product, tile, channels - whole)  # fmt: skip
            both = load(norm, 2 * (i * heads + head), pair, twice)
            delta = load(deltas, i * heads + head, lanes, count)
            top, share = deinterleave(both, 0), deinterleave(both, 1)
            for k in range(n):
                each = load(inverse, np.int64(src[begin + k]) * heads + head, lanes, count)
                value = share * exp(each * load(alpha, k * G, lanes, None) - top)
                change = load(product, k * G, lanes, None)
                kept = value
                if drop is not None:
                    mask = load(keep, k * G, lanes, None)
                    kept = value * mask
                    change = change * mask
                change = each * (value * (change - delta))
                store(product, k * G, change, None)
                store(weights, (begin + k) * heads + head, kept, count)
                store(changes, (begin + k) * heads + head, change, count)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    weighted_sum(x, heads * channels, at + c, src, begin, n, end, product, None, h, G, constant(x, 1),
                                 grad_dst, None, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    weighted_sum(x, heads * channels, at + c, src, begin, n, end, product, None, h, G, constant(x, 1),
                                 grad_dst, None, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _backward_src(work: Any, chunks: Any, sizes: Any, layout: Any, arrays: Any) -> None:
    """sum_i k_ij alpha_ij dO_i and sum_i f_ij q_i of some chunks of src rows."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, slot = chunks.bounds, chunks.slot
    heads, channels = sizes.heads, sizes.channels
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.dst.size - 1
    dst, place, grad = pointer(arrays.dst, 0), pointer(arrays.place, 0), of_model(arrays.grad, model, models)
    query, weights = of_model(arrays.query, model, models), of_model(arrays.weights, model, models)
    changes = of_model(arrays.changes, model, models)
    grad_x, grad_src = of_model(arrays.grad_x, model, models), of_model(arrays.grad_src, model, models)
    weight, change, whole = pointer(work.buffers[0], 0), pointer(work.buffers[1], 0), channels // width * width
    for head in range(0, heads, G):
        count = only_if(ragged, heads - head)
        for v in range(first, last):
            begin, n, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(slot[v])
            for k in range(n):
                edge = np.int64(place[begin + k]) * heads + head
                store(weight, k * G, load(weights, edge, lanes, count), None)
                store(change, k * G, load(changes, edge, lanes, count), None)
            at, to = head * channels, (o * heads + head) * channels
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    weighted_sum(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G,
                                 constant(grad, 1), grad_x, None, to + c, tile, None)  # fmt: skip
                    weighted_sum(query, heads * channels, at + c, dst, begin, n, end, change, None, h, G,
                                 constant(grad, 1), grad_src, None, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    weighted_sum(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G,
                                 constant(grad, 1), grad_x, None, to + c, tile, channels - whole)  # fmt: skip
                    weighted_sum(query, heads * channels, at + c, dst, begin, n, end, change, None, h, G,
                                 constant(grad, 1), grad_src, None, to + c, tile, channels - whole)  # fmt: skip


def forward(
    x: Tensor,
    score: Cosine,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator)."""
    x = x.to(dtype)
    shape = Shape.of(x, *score.operands, narrow=False)
    heads, channels = shape.heads, shape.channels
    chunks = chunks_of(edges, "dst")
    out, norm = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    x_, query, inverse = (shape.flat(t) for t in (x, score.queries(dtype), inverse_norm(x)))
    arrays = Forward(edges.src.numpy(), x_, query, inverse, out, norm)
    drop, job = shape.drop(seed, dropout, edges.dropout_ids_by_dst), shape.job(chunks.bounds, chunks.most, edges)
    run(_forward, shape.dtype, job, chunks, shape.sizes(1.0, 1.0), shape.layout, drop, arrays)
    if chunks.long.size:
        for model in range(shape.models):
            merge(model, shape.models, chunks.long, chunks.first, out, norm, None, None, heads, channels)
    return shape.tensor(out, edges.num_dst, heads, channels).to(dtype), shape.tensor(norm, edges.num_dst, heads, 2)


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
    """The gradients of x, x_dst and beta, by f_ij = r_j de_ij.

    grad q_i = sum_j f_ij x_j, and with B_j = sum_i f_ij q_i, the gradient as if |x_j| were constant,
    grad x_j = sum_i k_ij alpha_ij dO_i + B_j - r_j^2 <x_j, B_j> x_j. Of an edge, two numbers a head are held.
    """
    shape = Shape.of(x, *score.operands, narrow=False)
    heads, channels, (norm,) = shape.heads, shape.channels, saved
    x = x.to(norm.dtype)
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    inverse = inverse_norm(x)
    flat_grad, flat_x, query = (shape.flat(t) for t in (grad, x, score.queries(norm.dtype)))
    delta = shape.flat((grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    grad_query = shape.empty(by_dst.slots, heads, channels)
    norm_ = shape.flat(norm)
    arrays = BackwardDst(
        edges.src.numpy(), flat_grad, flat_x, query, shape.flat(inverse), norm_, delta, weights, changes, grad_query
    )
    drop, job = shape.drop(seed, dropout, edges.dropout_ids_by_dst), shape.job(by_dst.bounds, by_dst.most, edges)
    run(_backward_dst, shape.dtype, job, by_dst, shape.sizes(1.0, 1.0), shape.layout, drop, arrays)
    values, across = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    back = BackwardSrc(dst.numpy(), place.numpy(), flat_grad, query, weights, changes, values, across)
    job = shape.job(by_src.bounds, by_src.most, edges)
    run(_backward_src, shape.dtype, job, by_src, shape.sizes(1.0, 1.0), shape.layout, back)
    for chunks, sums in ((by_dst, grad_query), (by_src, values), (by_src, across)):
        for model in range(shape.models if chunks.long.size else 0):
            merge_sums(model, shape.models, chunks.long, chunks.first, sums, heads * channels)
    as_if_constant = shape.tensor(across, edges.num_src, heads, channels)
    grad_x = shape.tensor(values, edges.num_src, heads, channels) + as_if_constant
    grad_x += along_itself(x, inverse[..., None], as_if_constant)
    grad_x_dst, along = score.query_gradients(shape.tensor(grad_query, edges.num_dst, heads, channels))
    grad_beta = torch.from_numpy(along.numpy().sum(-2))  # torch may divide a long sum among its threads
    return grad_x, grad_x_dst, grad_beta
