"""Attention whose score needs the features of both ends on a CPU: GATv2, and the scaled dot product."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Job, Shape, chunks_of, merge_sums, run
from ...kernels.cpu.vector import (
    LANES,
    constant,
    deinterleave,
    exp,
    lane_sum,
    larger,
    leaky,
    load,
    of_model,
    only_if,
    pointer,
    prefetch,
    splat,
    store,
)
from ..steps.cpu import AHEAD, merge, softmax, store_norm, weighted_sum
from . import Dot, GATv2

BLOCK = 512  # rows that are summed one after the other


class Forward(NamedTuple):
    """The arrays of `_forward` that are always there."""

    src: Any
    x: Any
    x_dst: Any
    out: Any
    norm: Any


class BackwardDst(NamedTuple):
    """The arrays of `_backward_dst` that are always there."""

    src: Any
    grad: Any
    x: Any
    x_dst: Any
    norm: Any
    delta: Any
    weights: Any
    changes: Any
    grad_dst: Any


class BackwardSrc(NamedTuple):
    """The arrays of `_backward_src` that are always there."""

    dst: Any
    place: Any
    grad: Any
    x: Any
    x_dst: Any
    weights: Any
    changes: Any
    grad_x: Any
    grad_src: Any


@inline
def _score(x: Any, own: Any, mine: int, att: Any, a: int, row: int, at: int, ids: Any, begin: int, n: int, end: int,
           e: Any, h: int, heads: int, slope: Any, grad: Any, product: Any, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile's share of att . LeakyReLU(x_j + x_i), or of <x_i, x_j>; and with `product` of <dO_i, x_j>."""
    tile_i = load(own, mine, tile, count)
    if att is not None:
        weights = load(att, a, tile, count)
    if product is not None:
        change = load(grad, mine, tile, count)
    for k in range(n):
        prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if product is not None:
            product[k * heads + h] += lane_sum(change * values)
        if att is not None:
            values = values + tile_i
            e[k * heads + h] += lane_sum(weights * leaky(values, values, slope))
        else:
            e[k * heads + h] += lane_sum(tile_i * values)


@inline
def _spread(x: Any, own: Any, mine: int, att: Any, row: int, at: int, ids: Any, begin: int, n: int, de: Any, h: int,
            heads: int, slope: Any, out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile of sum de_ij LeakyReLU'(x_j + x_i), or of sum de_ij x_j, over the other ends of a row's edges."""
    tile_i = load(own, mine, tile, count)
    one, total = splat(x, 1.0, tile), splat(x, 0.0, tile)
    for k in range(n):
        values = load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if att is not None:
            values = leaky(one, values + tile_i, slope)
        total = total + de[k * heads + h] * values
    store(out, o, total, count)


@compiled
def _forward(work: Any, chunks: Any, sizes: Any, layout: Any, drop: Any, arrays: Any, att_: Any) -> None:
    """The scores of some chunks, `scale` times, then equations (2) and (4)."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels, slope, scale = sizes
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.src.size - 1
    src = pointer(arrays.src, 0)
    x, x_dst, att = (
        of_model(arrays.x, model, models),
        of_model(arrays.x_dst, model, models),
        of_model(att_, model, models),
    )
    out, norm = of_model(arrays.out, model, models), of_model(arrays.norm, model, models)
    keep, weight = only_if(drop, pointer(work.buffers[0], 0)), pointer(work.buffers[1], 0)
    shares = pointer(work.buffers[2], 0)
    chosen, whole = pointer(work.names, 0), channels // width * width
    for head in range(0, heads, G):
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                draw_row(keep, 0, chosen, begin, n, pointer(drop[3], 0), drop, model, head, lanes)
            at, to, mine = head * channels, (o * heads + head) * channels, (i * heads + head) * channels
            for f in range(0, n * G, LANES):
                store(weight, f, splat(x, 0.0, LANES), None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           weight, h, G, slope, None, None, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           weight, h, G, slope, None, None, tile, channels - whole)  # fmt: skip
            tops = splat(x, -np.inf, lanes)
            for k in range(n):
                e = scale * load(weight, k * G, lanes, None)
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
def _backward_dst(work: Any, chunks: Any, sizes: Any, layout: Any, drop: Any, arrays: Any, att_: Any) -> None:
    """k_ij alpha_ij and de_ij = alpha_ij (g_ij - D_i) of some chunks, grouped by dst, and the `_spread` of each dst."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels, slope, scale = sizes
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.src.size - 1
    src, grad = pointer(arrays.src, 0), of_model(arrays.grad, model, models)
    x, x_dst, att = (
        of_model(arrays.x, model, models),
        of_model(arrays.x_dst, model, models),
        of_model(att_, model, models),
    )
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
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           alpha, h, G, slope, grad, product, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           alpha, h, G, slope, grad, product, tile, channels - whole)  # fmt: skip
            both, delta = (
                load(norm, 2 * (i * heads + head), pair, twice),
                load(deltas, i * heads + head, lanes, count),
            )
            top, share = deinterleave(both, 0), deinterleave(both, 1)
            for k in range(n):
                value = share * exp(scale * load(alpha, k * G, lanes, None) - top)
                change = load(product, k * G, lanes, None)
                kept = value
                if drop is not None:
                    mask = load(keep, k * G, lanes, None)
                    kept = value * mask
                    change = change * mask
                change = scale * (value * (change - delta))
                store(product, k * G, change, None)
                store(weights, (begin + k) * heads + head, kept, count)
                store(changes, (begin + k) * heads + head, change, count)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _spread(x, x_dst, mine + c, att, heads * channels, at + c, src, begin, n, product, h, G, slope,
                            grad_dst, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _spread(x, x_dst, mine + c, att, heads * channels, at + c, src, begin, n, product, h, G, slope,
                            grad_dst, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _backward_src(work: Any, chunks: Any, sizes: Any, layout: Any, arrays: Any, att_: Any) -> None:
    """sum k_ij alpha_ij dO_i of some chunks of src rows, and the `_spread` of each src."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels, slope = sizes.heads, sizes.channels, sizes.slope
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.dst.size - 1
    dst, place, grad = pointer(arrays.dst, 0), pointer(arrays.place, 0), of_model(arrays.grad, model, models)
    x, x_dst, att = (
        of_model(arrays.x, model, models),
        of_model(arrays.x_dst, model, models),
        of_model(att_, model, models),
    )
    weights, changes = of_model(arrays.weights, model, models), of_model(arrays.changes, model, models)
    grad_x, grad_src = of_model(arrays.grad_x, model, models), of_model(arrays.grad_src, model, models)
    weight, change, whole = pointer(work.buffers[0], 0), pointer(work.buffers[1], 0), channels // width * width
    for head in range(0, heads, G):
        count = only_if(ragged, heads - head)
        for v in range(first, last):
            begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            for k in range(n):
                edge = np.int64(place[begin + k]) * heads + head
                store(weight, k * G, load(weights, edge, lanes, count), None)
                store(change, k * G, load(changes, edge, lanes, count), None)
            at, to, mine = head * channels, (o * heads + head) * channels, (j * heads + head) * channels
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    weighted_sum(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G, constant(x, 1),
                           grad_x, None, to + c, tile, None)  # fmt: skip
                    _spread(x_dst, x, mine + c, att, heads * channels, at + c, dst, begin, n, change, h, G, slope,
                            grad_src, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    weighted_sum(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G, constant(x, 1),
                           grad_x, None, to + c, tile, channels - whole)  # fmt: skip
                    _spread(x_dst, x, mine + c, att, heads * channels, at + c, dst, begin, n, change, h, G, slope,
                            grad_src, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _multiply_blocks(work: Any, a_: Any, b_: Any, rows: Any, row: Any, blocks_: Any) -> None:
    """sum_n a_n b_n, element by element, over each block of `BLOCK` rows."""
    first, last, model, models = work.first, work.last, work.model, work.models
    a, b, blocks = of_model(a_, model, models), of_model(b_, model, models), of_model(blocks_, model, models)
    for block in range(first, last):
        for c in range(row):
            blocks[block * row + c] = 0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            for c in range(row):
                blocks[block * row + c] += a[n * row + c] * b[n * row + c]


def forward(
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator) for e_ij = att . LeakyReLU(x_j + x_i).

    Without `att`, e_ij = <x_i, x_j> / sqrt(C).
    """
    x_dst, att = score.x_dst, score.att
    shape = Shape.of(x, x_dst, att, narrow=False)
    heads, channels = shape.heads, shape.channels
    chunks = chunks_of(edges, "dst")
    out, norm = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    x_, x_dst_, att_ = (shape.flat(t) for t in (x, x_dst, att))
    arrays = Forward(edges.src.numpy(), x_, x_dst_, out, norm)
    scale = 1.0 if att is not None else max(channels, 1) ** -0.5
    drop, job = shape.drop(seed, dropout, edges.dropout_ids_by_dst), shape.job(chunks.bounds, chunks.most, edges)
    run(_forward, shape.dtype, job, chunks, shape.sizes(score.negative_slope, scale), shape.layout, drop, arrays, att_)
    if chunks.long.size:
        for model in range(shape.models):
            merge(model, shape.models, chunks.long, chunks.first, out, norm, None, None, heads, channels)
    return shape.tensor(out, edges.num_dst, heads, channels).to(dtype), shape.tensor(norm, edges.num_dst, heads, 2)


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
    """The gradients of x, x_dst and att.

    Of att . LeakyReLU(v), v = x_j + x_i, they are de att LeakyReLU'(v) for both ends and de LeakyReLU(v) for att,
    which is de v LeakyReLU'(v). So with B_i = sum_j de LeakyReLU'(v) and A_j the same sum over i, grad x_i = att B_i,
    grad x_j = att A_j + sum_i k alpha dO_i and grad att = sum_i x_i B_i + sum_j x_j A_j: nothing is kept of an edge
    but two numbers a head.
    """
    x_dst, att, (norm,) = score.x_dst, score.att, saved
    shape = Shape.of(x, x_dst, att, narrow=False)
    heads, channels = shape.heads, shape.channels
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    sizes = shape.sizes(score.negative_slope, 1.0 if att is not None else max(channels, 1) ** -0.5)
    g, flat_x, flat_x_dst, flat_att = (shape.flat(t) for t in (grad, x, x_dst, att))
    delta = shape.flat((grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    flat_dst = shape.empty(by_dst.slots, heads, channels)
    arrays = BackwardDst(edges.src.numpy(), g, flat_x, flat_x_dst, shape.flat(norm), delta, weights, changes, flat_dst)
    drop, job = shape.drop(seed, dropout, edges.dropout_ids_by_dst), shape.job(by_dst.bounds, by_dst.most, edges)
    run(_backward_dst, shape.dtype, job, by_dst, sizes, shape.layout, drop, arrays, flat_att)
    flat_grad, flat_src = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    job = shape.job(by_src.bounds, by_src.most, edges)
    back = BackwardSrc(dst.numpy(), place.numpy(), g, flat_x, flat_x_dst, weights, changes, flat_grad, flat_src)
    run(_backward_src, shape.dtype, job, by_src, sizes, shape.layout, back, flat_att)
    for chunks, sums in ((by_dst, (flat_dst,)), (by_src, (flat_grad, flat_src))):
        for model, each in itertools.product(range(shape.models if chunks.long.size else 0), sums):
            merge_sums(model, shape.models, chunks.long, chunks.first, each, heads * channels)
    grad_x = shape.tensor(flat_grad, edges.num_src, heads, channels)
    spread_src = shape.tensor(flat_src, edges.num_src, heads, channels)
    spread_dst = shape.tensor(flat_dst, edges.num_dst, heads, channels)
    if att is None:
        return grad_x.add_(spread_src), spread_dst
    grad_att = _column_dots(shape, flat_x, flat_src, edges.num_src) + _column_dots(
        shape, flat_x_dst, flat_dst, edges.num_dst
    )
    wide = att.to(grad_x.dtype).unsqueeze(-3)
    return grad_x.addcmul_(spread_src, wide), spread_dst.mul_(wide), grad_att


def _column_dots(shape: Shape, a: np.ndarray, b: np.ndarray, rows: int) -> Tensor:
    """Return sum_n a_n b_n `[..., H, C]` of two `[..., N, H, C]`, added up in the same order by any number of threads.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    count, row = -(-rows // BLOCK), shape.heads * shape.channels
    blocks = shape.empty(count, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, 2 * shape.models * rows * row)
    # slots of long rows may follow the rows of b
    run(_multiply_blocks, shape.dtype, job, a, b, rows, row, blocks)
    sums = blocks.reshape(shape.models, count, row).sum(1)
    return shape.tensor(sums.reshape(-1), 1, shape.heads, shape.channels).squeeze(-3)
