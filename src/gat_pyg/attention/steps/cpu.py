"""Steps that the CPU kernels of all scores share: softmax of a row, sums over its edges, merge of chunks.

A kernel goes through the heads, as many at once as a vector has lanes, and through the chunks of rows. A buffer has an
element for each edge of a chunk and each of these heads. Sums over features go through the tiles of each head. What a
step gets as None it leaves out, see `gat_pyg.kernels.cpu.vector`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.memory import converted
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Chunks, Shape, run
from ...kernels.cpu.vector import (
    LANES,
    exp,
    fold,
    inverse,
    lane_sum,
    load,
    of_model,
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
    count: Any  # the same, None where that is all of the vector
    lanes: int  # its lanes, the elements of an edge in a buffer
    vector: Any  # the same, as `width_of` reads it
    tile: Any  # the features that are summed at once, as `width_of` reads it
    own: int  # the first head in the operands `[N, H]` of the row's own end; times `channels` in `[N, H, C]`
    to: int  # the same in the results
    apart: int  # heads from one gathered row to the next: `heads`, where nothing lies between them


@inline
def row_of(chunks: Any, v: int, ids: Any, sizes: Any, layout: Any, head: int, gathered: int, stored: int) -> Row:
    """Chunk v, and the heads from `head` on; `gathered` heads lie from one gathered row to the next, and `stored` from
    one result to the next."""
    (bounds, row, slot), (heads, channels), (vector, _, tile, ragged) = chunks, sizes, layout
    lanes = 1 << len(vector)
    width = min(lanes, heads - head)
    own, to = np.int64(row[v]) * heads + head, np.int64(slot[v]) * stored + head
    end, begin, size, count = bounds[bounds.size - 1] - 1, bounds[v], bounds[v + 1] - bounds[v], only_if(ragged, width)
    return Row(ids, end, begin, size, heads, channels, head, width, count, lanes, vector, tile, own, to, gathered)


@inline
def each_tile(step: Any, row: Row, *operands: Any) -> None:
    """Call `step(row, h, c, tile, count, *operands)` for each head and tile; c is its first feature, h included.

    `count` is None for a whole tile, else the number of features that are left for the last one.
    """
    width = 1 << len(row.tile)
    whole = row.channels // width * width
    for h in range(row.width):
        for c in range(h * row.channels, h * row.channels + whole, width):
            step(row, h, c, row.tile, None, *operands)
        if whole < row.channels:
            step(row, h, h * row.channels + whole, row.tile, row.channels - whole, *operands)


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
def load_edge(values: Any, ids: Any, row: Row, k: int) -> Any:
    """The values of edge k, as w_ij, for the heads of the vector, of `[E, H]`."""
    return load(values, row_of_edge(ids, row.begin + k) * row.heads + row.head, row.vector, row.count)


@inline
def load_factors(factor: Any, drop: Any, w: Any, ids: Any, row: Row, model: int) -> None:
    """Load k_ij w_ij for the edges of a chunk; a missing factor counts as 1."""
    draw_row(factor, drop, model, row.begin, row.size, row.head, row.vector)
    if w is not None:
        for k in range(row.size):
            drawn = load(only_if(drop, factor), k * row.lanes, row.vector, None)
            store(factor, k * row.lanes, drawn * load_edge(w, ids, row, k), None)


@inline
def clear(buffer: Any, row: Row) -> None:
    """Fill the buffer with zeros."""
    if buffer is not None:
        for f in range(0, row.size * row.lanes, LANES):
            store(buffer, f, splat(buffer, 0.0, LANES), None)


@inline
def softmax(row: Row, weight: Any, positive: Any, keep: Any, tops: Any) -> Any:
    """Replace the scores of a chunk by k_ij exp(e_ij - max e); `positive` has a 1 for those of positive score.

    Returns the inverse of the denominator of equation (2), and the share of it that `positive` has.
    """
    high = repeat(replace(tops, -np.inf, 0.0), LANES)
    total, mass = splat(weight, 0.0, LANES), splat(weight, 0.0, LANES)
    for f in range(0, row.size * row.lanes, LANES):
        alpha, ones = exp(load(weight, f, LANES, None) - high), load(positive, f, LANES, None)
        total, mass = total + alpha, mass + alpha * ones
        dropped = alpha * load(keep, f, LANES, None)
        store(weight, f, dropped, None)
        store(positive, f, dropped * ones, None)
    share = inverse(fold(total, row.vector))
    return share, fold(mass, row.vector) * share


@inline
def _store_lse(lse: Any, row: Row, tops: Any, share: Any) -> None:
    """Store the log-sum-exp as (max, 1 / denominator): (0, 0) if no edge has a weight; (-inf, 0) for such a chunk."""
    tops, at = tops + (share - share), 2 * row.to - row.head  # a NaN in the scores is in the share alone
    if row.own == row.to:
        tops = replace(tops, -np.inf, 0.0)
    store(lse, at, tops, row.count)
    store(lse, at + row.heads, share, row.count)


@inline
def attend(row: Row, narrow: Any, weight: Any, positive: Any, keep: Any, shares: Any, tops: Any, x: Any, out: Any,
           lse: Any, out_plus: Any, mass_plus: Any) -> None:  # fmt: skip
    """Turn a chunk's scores into its output by equations (2) and (4); `tops` holds the largest score of each head.

    With `positive`, a 1 for each edge of positive score, also O+ and A+.
    """
    store(weight, row.size * row.lanes, splat(weight, -np.inf, LANES), None)  # up to the end of the last vector
    store(positive, row.size * row.lanes, splat(weight, 0.0, LANES), None)
    share, mass = softmax(row, weight, positive, keep, tops)
    _store_lse(lse, row, tops, share)
    store(mass_plus, row.to, mass, row.count)
    store(shares, 0, share, None)
    gather(row, narrow, x, weight, positive, shares, out, out_plus, None, None, None, None)


@inline
def weigh(row: Row, narrow: Any, x: Any, weight: Any, out: Any) -> None:
    """Sum the features x of the other ends, times `weight`."""
    gather(row, narrow, x, weight, None, None, out, None, None, None, None, None)


@inline
def dots(row: Row, narrow: Any, query: Any, x: Any, e: Any, grad: Any, product: Any) -> None:
    """Compute <q_i, x_j>, and <dO_i, x_j> if there is a `product`."""
    gather(row, narrow, x, None, None, None, None, None, query, e, grad, product)


@inline
def gather(row: Row, narrow: Any, x: Any, weight: Any, positive: Any, shares: Any, out: Any, out_plus: Any, left: Any,
           e: Any, right: Any, product: Any) -> None:  # fmt: skip
    """Read the features x of the other ends once, for those of these results that are not None.

    Equation (4): `out` is the sum of `weight` times x, `out_plus` that of `positive` times x, both times the `shares`
    of the heads if present. Products with features of the row's own end: e is <left, x>, and `product` <right, x>, for
    each edge. With `narrow`, the features of all heads of the vector are one tile.
    """
    clear(e, row)
    clear(product, row)
    if narrow is not None:
        count = only_if(row.count, row.width * row.channels)
        _gather(row, 0, 0, narrow, count, row.vector, x, weight, positive, shares, out, out_plus, left, e, right,
                product)  # fmt: skip
    else:
        each_tile(_gather, row, (), x, weight, positive, shares, out, out_plus, left, e, right, product)


@inline
def _gather(row: Row, h: int, c: int, tile: Any, count: Any, heads: Any, x: Any, weight: Any, positive: Any,
            shares: Any, out: Any, out_plus: Any, left: Any, e: Any, right: Any, product: Any) -> None:  # fmt: skip
    """Compute `gather` for a tile of some heads, `()` for a single one; its part of a product is added."""
    total, plus, own = splat(x, 0.0, tile), splat(x, 0.0, tile), row.own * row.channels + c
    left_i, right_i = load(left, own, tile, count), load(right, own, tile, count)
    for k in range(row.size):
        at = k * row.lanes + h
        prefetch_end(x, row, k, c, tile)
        values = load_end(x, row, k, c, tile, count)
        total = total + per_feature(load(weight, at, heads, None), tile) * values
        plus = plus + per_feature(load(positive, at, heads, None), tile) * values
        add_sums(product, at, right_i * values, heads)
        add_sums(e, at, left_i * values, heads)
    share = per_feature(load(shares, h, heads, None), tile)
    store(out, row.to * row.channels + c, share * total, count)
    store(out_plus, row.to * row.channels + c, share * plus, count)


@inline
def add_sums(product: Any, at: int, values: Any, heads: Any) -> None:
    """Add the sums over the features of some heads, `()` for a single one."""
    store(product, at, load(product, at, heads, None) + per_head(values, heads), None)


@inline
def load_stats(stats: Any, q: int, row: Row) -> Any:
    """What `_summarise` stores of a dst, for the heads of the vector: d, max, 1 / denominator and D."""
    vector, count = row.vector, row.count
    d, top = load(stats, q, vector, count), load(stats, q + row.heads, vector, count)
    return d, top, load(stats, q + 2 * row.heads, vector, count), load(stats, q + 3 * row.heads, vector, count)


@inline
def product_back(product: Any, row: Row, k: int, at: int, alpha: Any, keep: Any, w: Any, grad_w: Any) -> Any:
    """k_ij w_ij <dO_i, x_j>; stores the gradient of w_ij, alpha_ij k_ij <dO_i, x_j>, at `grad_w[at:]`."""
    change = load(product, k * row.lanes, row.vector, None) * load(keep, k * row.lanes, row.vector, None)
    store(grad_w, at, alpha * change, row.count)
    return change * w


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


def forward_pass(
    kernel: Any, call: Operation, shape: Shape, chunks: Chunks, constants: Any, ids: Any, arrays: Any, dtype: Any,
    plus: tuple[Any, Any] = (None, None),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return O in `dtype`, (max, 1 / denominator) and, if requested, O+ and A+, by the forward kernel of a score.

    `ids` are the rows of the edges among what belongs to single edges, None if nothing does. `arrays` are x and the
    operands, None for those that the score does not have. `plus` are the sizes of a row of O+ and A+, if saved.
    """
    edges, heads, channels = call.edges, shape.heads, shape.channels
    sizes = (heads, channels), (2, heads), *plus
    results = tuple([None if size is None else shape.empty(chunks.slots, *size) for size in sizes])
    drop = shape.drop(call.seed, call.dropout, lambda: edges.dropout_ids_by_dst)
    shape.run(kernel, chunks, edges, *constants, drop, (edges.src, ids), arrays, results)
    if chunks.long.size:
        for model in range(shape.models):
            _merge(chunks, *(each if each is None or not shape.batch else each[model] for each in results))  # type: ignore[arg-type]
    out, *others = [shape.first(each, edges.num_dst) for each in results if each is not None]
    return converted(out, dtype), *others


@inline
def _row_dots(x: Any, a: Any, at: int, heads: int, channels: int, narrow: Any, layout: Any, scores: Any) -> Any:
    """<a, x> of the heads of a vector, of which so many exist; zeros without a."""
    lanes, _, tile, ragged = layout
    if a is None:
        return splat(x, 0.0, lanes)
    if narrow is not None:
        many = only_if(ragged, heads * channels)
        return per_head(load(x, at, narrow, many) * load(a, at, narrow, many), lanes)
    width = 1 << len(tile)
    whole = channels // width * width
    for h in range(min(1 << len(lanes), heads)):
        total, begin = splat(x, 0.0, tile), at + h * channels
        for c in range(begin, begin + whole, width):
            total = total + load(x, c, tile, None) * load(a, c, tile, None)
        if whole < channels:
            c, rest = begin + whole, channels - whole
            total = total + load(x, c, tile, rest) * load(a, c, tile, rest)
        scores[h] = lane_sum(total)
    return load(scores, 0, lanes, None)


@compiled
def _summarise(work: Any, sizes: Any, layout: Any, rest: Any, operands: Any, results: Any) -> None:
    """For some dst (d, max, 1 / sum, D) as their `stats`, D = <dO, O>; and grad d = (1 - slope)(<dO, O+> - D A+)."""
    first, last, model, models, buffers = work
    (heads, channels), (lanes, narrow, _, ragged) = sizes, layout
    grad, out, out_plus, mass_plus, d, lse = of_model(operands, model, models)
    (stats, grad_d), scores = of_model(results, model, models), pointer(buffers[0], 0)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, here, q = only_if(ragged, heads - head), i * heads + head, 4 * i * heads + head
            product = _row_dots(grad, out, here * channels, heads - head, channels, narrow, layout, scores)
            plus = _row_dots(grad, out_plus, here * channels, heads - head, channels, narrow, layout, scores)
            store(grad_d, here, rest * (plus - product * load(mass_plus, here, lanes, count)), count)
            store(stats, q, splat(grad, 0.0, lanes) + load(d, here, lanes, count), count)
            store(stats, q + heads, load(lse, 2 * here - head, lanes, count), count)
            store(stats, q + 2 * heads, load(lse, 2 * here - head + heads, lanes, count), count)
            store(stats, q + 3 * heads, product, count)


def summarise(
    shape: Shape, edges: Any, grad: Tensor, lse: Tensor, outputs: Any, d: Any = None, rest: Any = None,
    grad_d: Any = None,
) -> np.ndarray:  # fmt: skip
    """Return what `load_stats` loads; `outputs` are O, O+ and A+ or None; with O+ also grad d, by `rest`, 1 - slope."""
    stats = shape.scratch(edges.num_dst, 4, shape.heads)
    operands = shape.features(grad), *map(shape.flat, (*outputs, d, lse))
    run(_summarise, shape, shape.job(np.arange(edges.num_dst + 1), 1, edges), rest, operands, (stats, grad_d))
    return stats
