"""Steps that the CPU kernels of all scores share: softmax of a row, sums over its edges, merge of chunks.

A kernel goes through the heads, as many at once as a vector has lanes, and through the chunks of rows. A buffer has an
element for each edge of a chunk and each of these heads. Sums over features go through the tiles of each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.memory import converted, empty
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Chunks, Job, Shape, run
from ...kernels.cpu.vector import (
    LANES,
    exp,
    fold,
    inverse,
    lane_sum,
    load,
    only_if,
    per_feature,
    per_head,
    pointer,
    prefetch,
    repeat,
    replace,
    splat,
    store,
)
from ..score import Operation

AHEAD = 16  # edges between the one that is summed and the one that is prefetched


class Row(NamedTuple):
    """A chunk of a row's edges, and the heads of a vector: where their elements are."""

    ids: Any  # the other end of every edge
    end: int  # the last edge of all, beyond which none is prefetched
    begin: int  # the first edge of the chunk
    size: int  # the number of its edges
    heads: int  # of a node
    channels: int  # of a head
    head: int  # the first head of the vector
    width: int  # its heads, those that exist
    lanes: int  # its lanes, the elements of an edge in a buffer
    own: int  # the same in the operands `[N, H]` of the row's own end; times `channels` in `[N, H, C]`
    to: int  # the same in the results
    apart: int  # heads from one gathered row to the next: `heads`, where nothing lies between them


@inline
def row_of(chunks: Any, v: int, ids: Any, end: int, sizes: Any, head: int, lanes: Any, gathered: int,
           stored: int) -> Row:  # fmt: skip
    """Chunk v, and the heads from `head` on; `gathered` heads lie from one gathered row to the next, and `stored` from
    one result to the next."""
    bounds, row, slot = chunks
    heads, channels = sizes
    width = min(1 << len(lanes), heads - head)
    own, to = np.int64(row[v]) * heads + head, np.int64(slot[v]) * stored + head
    begin, size = bounds[v], bounds[v + 1] - bounds[v]
    return Row(ids, end, begin, size, heads, channels, head, width, 1 << len(lanes), own, to, gathered)


@inline
def each_tile(step: Any, tile: Any, row: Row, *operands: Any) -> None:
    """Call `step(row, h, c, tile, count, *operands)` for each head and tile; c is its first feature, h included.

    `count` is None for a whole tile, else the number of features that are left for the last one.
    """
    width = 1 << len(tile)
    whole = row.channels // width * width
    for h in range(row.width):
        for c in range(h * row.channels, h * row.channels + whole, width):
            step(row, h, c, tile, None, *operands)
        if whole < row.channels:
            step(row, h, h * row.channels + whole, tile, row.channels - whole, *operands)


@inline
def load_end(x: Any, row: Row, k: int, c: int, tile: Any, count: Any) -> Any:
    """The features from c on of the other end of edge k."""
    edge = row.begin + k
    return load(x, (np.int64(row.ids[edge]) * row.apart + row.head) * row.channels + c, tile, count)


@inline
def prefetch_end(x: Any, row: Row, k: int, c: int, tile: Any) -> None:
    """Prefetch what `load_end` will load for an edge that comes `AHEAD` after k."""
    edge = min(row.begin + k + AHEAD, row.end)
    prefetch(x, (np.int64(row.ids[edge]) * row.apart + row.head) * row.channels + c, tile)


@inline
def row_of_edge(ids: Any, edge: Any) -> Any:
    """The row of an edge among what belongs to single edges, as their features."""
    return np.int64(edge) if ids is None else np.int64(ids[edge])


@inline
def prefetch_edge(u: Any, ids: Any, row: Row, k: int, width: int) -> None:
    """Prefetch the features of an edge that comes `AHEAD` after k, up to four vectors of them."""
    if ids is not None:
        at = row_of_edge(ids, min(row.begin + k + AHEAD, row.end)) * width
        for d in range(0, min(width, 4 * LANES), LANES):
            prefetch(u, at + d, LANES)


@inline
def load_weight(w: Any, ids: Any, row: Row, k: int, lanes: Any, ragged: Any) -> Any:
    """w_ij of edge k, for the heads of the vector."""
    return load(w, row_of_edge(ids, row.begin + k) * row.heads + row.head, lanes, only_if(ragged, row.width))


@inline
def load_factors(factor: Any, drop: Any, w: Any, ids: Any, row: Row, model: int, lanes: Any, ragged: Any) -> None:
    """Load k_ij w_ij for the edges of a chunk; a missing factor counts as 1."""
    if drop is not None:
        draw_row(factor, drop, model, row.begin, row.size, row.head, lanes)
    if w is not None:
        for k in range(row.size):
            values = load_weight(w, ids, row, k, lanes, ragged)
            if drop is not None:
                values = values * load(factor, k * row.lanes, lanes, None)
            store(factor, k * row.lanes, values, None)


@inline
def clear(buffer: Any, row: Row) -> None:
    """Fill the buffer with zeros."""
    for f in range(0, row.size * row.lanes, LANES):
        store(buffer, f, splat(buffer, 0.0, LANES), None)


@inline
def softmax(weight: Any, positive: Any, keep: Any, n: int, tops: Any, lanes: Any) -> Any:
    """Replace the scores of a chunk by k_ij exp(e_ij - max e); `positive` has a 1 for those of positive score.

    Returns the inverse of the denominator of equation (2), and the share of it that `positive` has.
    """
    high = repeat(replace(tops, -np.inf, 0.0), LANES)
    total, mass = splat(weight, 0.0, LANES), splat(weight, 0.0, LANES)
    for f in range(0, n << len(lanes), LANES):
        alpha = exp(load(weight, f, LANES, None) - high)
        total = total + alpha
        dropped = alpha
        if keep is not None:
            dropped = alpha * load(keep, f, LANES, None)
        store(weight, f, dropped, None)
        if positive is not None:
            ones = load(positive, f, LANES, None)
            mass = mass + alpha * ones
            store(positive, f, dropped * ones, None)
    share = inverse(fold(total, lanes))
    return share, fold(mass, lanes) * share


@inline
def _store_lse(lse: Any, row: Row, tops: Any, share: Any, ragged: Any) -> None:
    """Store the log-sum-exp as (max, 1 / denominator): (0, 0) if no edge has a weight; (-inf, 0) for such a chunk."""
    tops = tops + (share - share)  # a NaN in the scores is in the share alone
    if row.own == row.to:
        tops = replace(tops, -np.inf, 0.0)
    at, count = 2 * row.to - row.head, only_if(ragged, row.width)
    store(lse, at, tops, count)
    store(lse, at + row.heads, share, count)


@inline
def attend(row: Row, narrow: Any, layout: Any, weight: Any, positive: Any, keep: Any, shares: Any, tops: Any, x: Any,
           out: Any, out_plus: Any, mass_plus: Any, lse: Any) -> None:  # fmt: skip
    """Turn a chunk's scores into its output by equations (2) and (4); `tops` holds the largest score of each head.

    With `positive`, a 1 for each edge of positive score, also O+ and A+.
    """
    lanes, _, ragged = layout
    n = row.size * row.lanes
    store(weight, n, splat(weight, -np.inf, LANES), None)  # up to the end of the last vector
    if positive is not None:
        store(positive, n, splat(weight, 0.0, LANES), None)
    share, mass = softmax(weight, positive, keep, row.size, tops, lanes)
    _store_lse(lse, row, tops, share, ragged)
    if positive is not None:
        store(mass_plus, row.to, mass, only_if(ragged, row.width))
    store(shares, 0, share, None)
    gather(row, narrow, layout, x, weight, positive, shares, out, out_plus, None, None, None, None)


@inline
def weigh(row: Row, narrow: Any, layout: Any, x: Any, weight: Any, out: Any) -> None:
    """Sum the features x of the other ends, times `weight`."""
    gather(row, narrow, layout, x, weight, None, None, out, None, None, None, None, None)


@inline
def dots(row: Row, narrow: Any, layout: Any, query: Any, x: Any, e: Any, grad: Any, product: Any) -> None:
    """Compute <q_i, x_j>, and <dO_i, x_j> if there is a `product`; the buffers are zero."""
    gather(row, narrow, layout, x, None, None, None, None, None, query, e, grad, product)


@inline
def gather(row: Row, narrow: Any, layout: Any, x: Any, weight: Any, positive: Any, shares: Any, out: Any, out_plus: Any,
           left: Any, e: Any, right: Any, product: Any) -> None:  # fmt: skip
    """Read the features x of the other ends once, for those of these results that are not None.

    Equation (4): `out` is the sum of `weight` times x, `out_plus` that of `positive` times x, both times the `shares`
    of the heads if present. Products with features of the row's own end: e is <left, x>, and `product` <right, x>, for
    each edge, in buffers that are zero.
    """
    lanes, tile, ragged = layout
    if narrow is not None:
        _gather_together(row, narrow, lanes, only_if(ragged, row.width * row.channels), x, weight, positive, shares,
                         out, out_plus, left, e, right, product)  # fmt: skip
    else:
        each_tile(_gather_tile, tile, row, x, weight, positive, shares, out, out_plus, left, e, right, product)


@inline
def _gather_together(row: Row, narrow: Any, lanes: Any, many: Any, x: Any, weight: Any, positive: Any, shares: Any,
                     out: Any, out_plus: Any, left: Any, e: Any, right: Any, product: Any) -> None:  # fmt: skip
    """Compute `gather` for all heads of the vector together."""
    total, plus = splat(x, 0.0, narrow), splat(x, 0.0, narrow)
    if e is not None:
        left_i = load(left, row.own * row.channels, narrow, many)
    if product is not None:
        right_i = load(right, row.own * row.channels, narrow, many)
    for k in range(row.size):
        prefetch_end(x, row, k, 0, narrow)
        values = load_end(x, row, k, 0, narrow, many)
        if out is not None:
            total = total + per_feature(load(weight, k * row.lanes, lanes, None), narrow) * values
        if out_plus is not None:
            plus = plus + per_feature(load(positive, k * row.lanes, lanes, None), narrow) * values
        if product is not None:
            store(product, k * row.lanes, per_head(right_i * values, lanes), None)
        if e is not None:
            store(e, k * row.lanes, per_head(left_i * values, lanes), None)
    if shares is not None:
        share = per_feature(load(shares, 0, lanes, None), narrow)
        total, plus = share * total, share * plus
    if out is not None:
        store(out, row.to * row.channels, total, many)
    if out_plus is not None:
        store(out_plus, row.to * row.channels, plus, many)


@inline
def _gather_tile(row: Row, h: int, c: int, tile: Any, count: Any, x: Any, weight: Any, positive: Any, shares: Any,
                 out: Any, out_plus: Any, left: Any, e: Any, right: Any, product: Any) -> None:  # fmt: skip
    """Compute `gather` for a tile; its part of a product is added."""
    total, plus = splat(x, 0.0, tile), splat(x, 0.0, tile)
    if e is not None:
        left_i = load(left, row.own * row.channels + c, tile, count)
    if product is not None:
        right_i = load(right, row.own * row.channels + c, tile, count)
    for k in range(row.size):
        prefetch_end(x, row, k, c, tile)
        values = load_end(x, row, k, c, tile, count)
        if out is not None:
            total = total + weight[k * row.lanes + h] * values
        if out_plus is not None:
            plus = plus + positive[k * row.lanes + h] * values
        if product is not None:
            product[k * row.lanes + h] += lane_sum(right_i * values)
        if e is not None:
            e[k * row.lanes + h] += lane_sum(left_i * values)
    if shares is not None:
        total, plus = shares[h] * total, shares[h] * plus
    if out is not None:
        store(out, row.to * row.channels + c, total, count)
    if out_plus is not None:
        store(out_plus, row.to * row.channels + c, plus, count)


@inline
def load_lse(lse: Any, delta: Any, row: Row, lanes: Any, ragged: Any) -> Any:
    """The max, 1 / denominator and D of a dst."""
    at, count = 2 * row.own - row.head, only_if(ragged, row.width)
    return load(lse, at, lanes, count), load(lse, at + row.heads, lanes, count), load(delta, row.own, lanes, count)


@inline
def softmax_back(row: Row, k: int, factor: Any, e: Any, product: Any, keep: Any, w: Any, ids: Any, top: Any, share: Any,
                 mean: Any, weights: Any, changes: Any, grad_w: Any, lanes: Any, ragged: Any) -> None:  # fmt: skip
    """k_ij w_ij alpha_ij and `factor` alpha_ij (g_ij - D_i) of an edge whose score is `factor` times e, also in place
    of e and of `product`, which has <dO_i, x_j>; and the gradient of w_ij if requested."""
    alpha = share * exp(factor * load(e, k * row.lanes, lanes, None) - top)
    change, dropped = load(product, k * row.lanes, lanes, None), alpha
    at, count = np.int64(row.begin + k) * row.heads + row.head, only_if(ragged, row.width)
    if keep is not None:
        mask = load(keep, k * row.lanes, lanes, None)
        dropped = alpha * mask
        change = change * mask
    if w is not None:
        if grad_w is not None:
            store(grad_w, at, alpha * change, count)
        weight = load_weight(w, ids, row, k, lanes, ragged)
        dropped = dropped * weight
        change = change * weight
    change = factor * (alpha * (change - mean))
    store(e, k * row.lanes, dropped, None)
    store(product, k * row.lanes, change, None)
    store(weights, at, dropped, count)
    store(changes, at, change, count)


@inline
def load_edges(buffer: Any, per_edge: Any, row: Row, place: Any, lanes: Any, ragged: Any) -> None:
    """Fill a buffer for the edges of a src from `[E, H]`, grouped by dst."""
    for k in range(row.size):
        at = np.int64(place[row.begin + k]) * row.heads + row.head
        store(buffer, k * row.lanes, load(per_edge, at, lanes, only_if(ragged, row.width)), None)


def _merge(chunks: Chunks, out: Tensor, lse: Tensor, *plus: Tensor | None) -> None:
    """Store the results of long rows, of those of their chunks, each weighted by its share of the denominator."""
    rows, long, number = chunks.long_rows
    top = chunks.reduced(lse[rows:, 0], "max")
    empty = lse[rows:, 0] == -torch.inf  # chunks in which no edge has a weight
    share = ((lse[rows:, 0] - top[number]).exp() / lse[rows:, 1]).masked_fill(empty, 0.0)
    total = chunks.reduced(share)
    share = share / total[number]
    lse[long, 0], lse[long, 1] = top.masked_fill(top == -torch.inf, 0.0), (1 / total).masked_fill(total == 0, 0.0)
    for each in (out, *plus):
        if each is not None:
            of = (..., *[None] * (each.dim() - 2))
            each[long] = chunks.reduced((share[of] * each[rows:]).masked_fill(empty[of], 0.0))


class Operands(NamedTuple):
    """The operands of a score as its passes over dst take them."""

    constants: tuple[Any, ...]  # before the arrays
    ids: Tensor | None  # the row of each edge among what belongs to single edges, None if nothing does
    arrays: tuple[Any, ...]  # x, then None for what the score does not have


def forward_pass(
    kernel: Any, call: Operation, shape: Shape, chunks: Chunks, operands: Operands, dtype: torch.dtype, *plus: Any
) -> tuple[Tensor, ...]:
    """Return O in `dtype`, (max, 1 / denominator) and, if requested, O+ and A+, by the forward kernel of a score.

    `plus` are the sizes of a row of O+ and A+, None for those that are not saved, for a kernel that computes them.
    """
    edges, heads, channels = call.edges, shape.heads, shape.channels
    sizes = (heads, channels), (2, heads), *plus
    results = [None if size is None else shape.empty(chunks.slots, *size) for size in sizes]
    drop = shape.drop(call.seed, call.dropout, lambda: edges.dropout_ids_by_dst)
    shape.run(kernel, chunks, edges, *operands.constants, drop, edges.src, operands.ids, *operands.arrays, *results)
    if chunks.long.size:
        for model in range(shape.models):
            _merge(chunks, *(each if each is None or not shape.batch else each[model] for each in results))  # type: ignore[arg-type]
    out, *others = [shape.first(each, edges.num_dst) for each in results if each is not None]
    return converted(out, dtype), *others


@inline
def row_dots(x: Any, at: int, a: Any, to: int, heads: int, channels: int, layout: Any, narrow: Any, scores: Any,
             place: int) -> None:  # fmt: skip
    """Store <a, x> of the heads of a vector, of which so many exist, from `scores[place]` on."""
    lanes, tile, ragged = layout
    width = 1 << len(tile)
    whole = channels // width * width
    if narrow is not None:
        many = only_if(ragged, heads * channels)
        values = load(x, at, narrow, many) * load(a, to, narrow, many)
        store(scores, place, per_head(values, lanes), only_if(ragged, heads))
    else:
        for h in range(min(1 << len(lanes), heads)):
            total = splat(x, 0.0, tile)
            for c in range(h * channels, h * channels + whole, width):
                total = total + load(x, at + c, tile, None) * load(a, to + c, tile, None)
            if whole < channels:
                c, rest = h * channels + whole, channels - whole
                total = total + load(x, at + c, tile, rest) * load(a, to + c, tile, rest)
            scores[place + h] = lane_sum(total)


@compiled
def _head_dots(work: Any, sizes: Any, layout: Any, narrow: Any, x_: Any, a_: Any, apart: int, scores_: Any) -> None:
    """<a_n, x_n> of each head for some rows; the rows of a are `apart` elements apart, 0 if it has only one."""
    heads, channels = sizes
    x, a, scores = pointer(x_, 0), pointer(a_, 0), pointer(scores_, 0)
    for n in range(work[0], work[1]):
        for head in range(0, heads, 1 << len(layout[0])):
            at, to = n * heads + head, n * apart + head * channels
            row_dots(x, at * channels, a, to, heads - head, channels, layout, narrow, scores, at)


def head_dots(shape: Shape, x: Tensor, a: Tensor) -> Tensor:
    """Return <a_n, x_n> of each head, `[..., N, H]`, of `[..., N, H, C]`; a may be the same for all rows."""
    scores = empty(*x.shape[:-1], dtype=shape.wide)
    rows, apart = scores.numel() // shape.heads, 0 if a.numel() < x.numel() else shape.heads * shape.channels
    job = Job(np.arange(rows + 1), 1, 0, x.numel())
    operands = shape.features(x), shape.flat(a), apart, scores
    run(_head_dots, shape.dtype, job, shape.sizes, shape.layout, shape.narrow, *operands)
    return scores
