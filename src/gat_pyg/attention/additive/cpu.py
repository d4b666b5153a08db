"""The fused operation on a CPU, compiled by Numba: one gather of the features forward, one of the gradient backward.

Every kernel works through rows: the neighbourhood of a dst forward, the edges out of a src backward; and through a few
heads at a time, which are the lanes of a vector. The scores, softmax and dropout of a row are made edge by edge for all
these heads at once, in buffers that a core's cache holds. Then the features are summed in vector registers, narrow
heads together and of wide ones a tile at a time, while the rows of the edges to come are prefetched. A row of more than
`SPLIT` edges is several chunks, merged in a fixed order. Several models on one graph lie one behind the other, and each
is computed as if it were alone: in a kernel `x_` is the array of all and `x` the numbers of the one that it is called
for. No result depends on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Shape, chunks_of, edge_ids, merge_sums, run
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
    per_feature,
    per_head,
    pointer,
    prefetch,
    splat,
    store,
)
from ..steps.cpu import AHEAD, close, merge, softmax, store_norm, weighted_sum
from . import Additive


class Forward(NamedTuple):
    """The arrays of `_forward` that are always there."""

    src: Any
    x: Any
    out: Any
    norm: Any


class Dense(NamedTuple):
    """The arrays of `_dense` that are always there."""

    grad: Any
    norm: Any
    stats: Any


class Backward(NamedTuple):
    """The arrays of `_backward` that are always there."""

    dst: Any
    place: Any
    grad: Any
    x: Any
    stats: Any
    grad_x: Any


class Normalise(NamedTuple):
    """The arrays of `_normalise` that are always there."""

    rowptr: Any
    src: Any
    stats: Any
    per_edge: Any
    grad_d: Any


class Collect(NamedTuple):
    """The arrays of `_collect` that are always there."""

    colptr: Any
    place: Any
    per_edge: Any
    grad_s: Any


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    layout: Any,
    narrow: Any,
    drop: Any,
    arrays: Any,
    ids_: Any,
    s_: Any,
    d_: Any,
    u_: Any,
    out_plus_: Any,
    mass_plus_: Any,
) -> None:
    """Equations (1) to (4) for some chunks, with O+ and A+ where `out_plus` is given."""
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels, slope = sizes.heads, sizes.channels, sizes.slope
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.src.size - 1
    src, ids = pointer(arrays.src, 0), pointer(ids_, 0)
    x, s, d, u = (
        of_model(arrays.x, model, models),
        of_model(s_, model, models),
        of_model(d_, model, models),
        of_model(u_, model, models),
    )
    out, norm = of_model(arrays.out, model, models), of_model(arrays.norm, model, models)
    out_plus, mass_plus = of_model(out_plus_, model, models), of_model(mass_plus_, model, models)
    keep, weight = only_if(drop, pointer(work.buffers[0], 0)), pointer(work.buffers[1], 0)
    shares = pointer(work.buffers[2], 0)
    positive, chosen = only_if(out_plus_, pointer(work.buffers[3], 0)), pointer(work.names, 0)
    one = splat(x, 1.0, lanes)
    for head in range(0, heads, G):
        count, many = only_if(ragged, heads - head), only_if(ragged, (heads - head) * channels)
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                draw_row(keep, 0, chosen, begin, n, pointer(drop[3], 0), drop, model, head, lanes)
            own, tops = splat(x, 0.0, lanes), splat(x, -np.inf, lanes)
            if d_ is not None:
                own = load(d, i * heads + head, lanes, count)
            close(weight, n * G, -np.inf)
            if out_plus_ is not None:
                close(positive, n * G, 0.0)
            for k in range(n):
                z = own
                if s_ is not None:
                    z = z + load(s, np.int64(src[begin + k]) * heads + head, lanes, count)
                if u_ is not None:
                    edge = np.int64(begin + k) if ids_ is None else np.int64(ids[begin + k])
                    z = z + load(u, edge * heads + head, lanes, count)
                e = leaky(z, z, slope)  # (3)
                tops = larger(tops, e)
                store(weight, k * G, e, None)
                if out_plus_ is not None:
                    store(positive, k * G, leaky(one, z, constant(x, 0)), None)
            share, mass = softmax(weight, positive, keep, n, tops, lanes)  # (2)
            store_norm(norm, o * heads + head, tops, share, o == i, only_if(ragged, 2 * (heads - head)))
            if out_plus_ is not None:
                store(mass_plus, o * heads + head, mass, count)
            at, to = head * channels, (o * heads + head) * channels
            if narrow is not None:
                total, plus = splat(x, 0.0, narrow), splat(x, 0.0, narrow)
                for k in range(n):
                    prefetch(x, np.int64(src[min(begin + k + AHEAD, end)]) * heads * channels + at, narrow)
                    values = load(x, np.int64(src[begin + k]) * heads * channels + at, narrow, many)
                    total = total + per_feature(load(weight, k * G, lanes, None), narrow) * values
                    if out_plus_ is not None:
                        plus = plus + per_feature(load(positive, k * G, lanes, None), narrow) * values
                scale = per_feature(share, narrow)
                store(out, to, scale * total, many)
                if out_plus_ is not None:
                    store(out_plus, to, scale * plus, many)
            else:
                store(shares, 0, share, None)
                whole = channels // width * width
                for h in range(min(G, heads - head)):
                    for c in range(h * channels, h * channels + whole, width):
                        weighted_sum(x, heads * channels, at + c, src, begin, n, end, weight, positive, h, G, shares[h],
                               out, out_plus, to + c, tile, None)  # fmt: skip
                    if whole < channels:
                        c = h * channels + whole
                        weighted_sum(x, heads * channels, at + c, src, begin, n, end, weight, positive, h, G, shares[h],
                               out, out_plus, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _dense(
    work: Any,
    sizes: Any,
    layout: Any,
    narrow: Any,
    arrays: Any,
    d_: Any,
    out_: Any,
    out_plus_: Any,
    mass_plus_: Any,
    grad_d_: Any,
) -> None:
    """For some dst (d, max, 1 / sum, D) as their `stats`, D = <dO, O>; and grad d = (1 - slope)(<dO, O+> - D A+)."""
    first, last, model, models = work.first, work.last, work.model, work.models
    heads, channels, slope = sizes.heads, sizes.channels, sizes.slope
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width = 1 << len(lanes), 1 << len(tile)
    grad, d, norm = (
        of_model(arrays.grad, model, models),
        of_model(d_, model, models),
        of_model(arrays.norm, model, models),
    )
    out, out_plus = of_model(out_, model, models), of_model(out_plus_, model, models)
    mass_plus = of_model(mass_plus_, model, models)
    stats, grad_d = of_model(arrays.stats, model, models), of_model(grad_d_, model, models)
    products, pluses = pointer(work.buffers[0], 0), pointer(work.buffers[1], 0)
    zero = splat(grad, 0.0, lanes)
    pair = (lanes, (0, 0))
    for i in range(first, last):
        for head in range(0, heads, G):
            count, many = only_if(ragged, heads - head), only_if(ragged, (heads - head) * channels)
            here, q = i * heads + head, 4 * i * heads + head
            both = load(norm, 2 * here, pair, only_if(ragged, 2 * (heads - head)))
            own = zero
            if d_ is not None:
                own = load(d, here, lanes, count)
            product = zero
            if out_ is not None:
                plus = zero
                at = here * channels
                if narrow is not None:
                    values = load(grad, at, narrow, many)
                    product = per_head(values * load(out, at, narrow, many), lanes)
                    plus = per_head(values * load(out_plus, at, narrow, many), lanes)
                else:
                    whole = channels // width * width
                    for h in range(min(G, heads - head)):
                        c = at + h * channels
                        sums, more = splat(grad, 0.0, tile), splat(grad, 0.0, tile)
                        for b in range(c, c + whole, width):
                            wide = load(grad, b, tile, None)
                            sums = sums + wide * load(out, b, tile, None)
                            more = more + wide * load(out_plus, b, tile, None)
                        if whole < channels:
                            b = c + whole
                            wide = load(grad, b, tile, channels - whole)
                            sums = sums + wide * load(out, b, tile, channels - whole)
                            more = more + wide * load(out_plus, b, tile, channels - whole)
                        products[h] = lane_sum(sums)
                        pluses[h] = lane_sum(more)
                    product, plus = load(products, 0, lanes, None), load(pluses, 0, lanes, None)
                change = (constant(grad, 1) - slope) * (plus - product * load(mass_plus, here, lanes, count))
                store(grad_d, here, change, count)
            store(stats, q, own, count)
            store(stats, q + heads, deinterleave(both, 0), count)
            store(stats, q + 2 * heads, deinterleave(both, 1), count)
            store(stats, q + 3 * heads, product, count)


@inline
def _weigh_back(grad: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, product: Any, h: int,
                heads: int, x: Any, own: int, out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """grad x_j = sum_i k_ij alpha_ij dO_i for a tile of a head, and the tile's share of <dO_i, x_j>."""
    total = splat(grad, 0.0, tile)
    mine = load(x, own, tile, count)
    for k in range(n):
        prefetch(grad, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = load(grad, np.int64(ids[begin + k]) * row + at, tile, count)
        total = total + weight[k * heads + h] * values
        if product is not None:
            product[k * heads + h] += lane_sum(mine * values)
    store(out, o, total, count)


@compiled
def _backward(
    work: Any,
    chunks: Any,
    sizes: Any,
    layout: Any,
    narrow: Any,
    drop: Any,
    arrays: Any,
    ids_: Any,
    s_: Any,
    u_: Any,
    grad_s_: Any,
    per_edge_: Any,
    scored: Any,
) -> None:
    """grad x and grad s of some chunks of src rows, in one gather of dO; `stats` has (d, max, 1 / sum, D) of each dst.

    With `grad_s`, `per_edge` is given dz_ij LeakyReLU'(z_ij), grouped by dst, where it is wanted. Without, D is not
    known yet, and `per_edge` is given g_ij = k_ij <dO_i, x_j>. `scored` is None for constant attention: then grad x is
    all there is.
    """
    first, last, model, models = work.first, work.last, work.model, work.models
    bounds, row, slot = chunks.bounds, chunks.row, chunks.slot
    heads, channels, slope = sizes.heads, sizes.channels, sizes.slope
    lanes, tile, ragged = layout.lanes, layout.tile, layout.ragged
    G, width, end = 1 << len(lanes), 1 << len(tile), arrays.dst.size - 1
    dst, place, ids = pointer(arrays.dst, 0), pointer(arrays.place, 0), pointer(ids_, 0)
    grad, x, stats = (
        of_model(arrays.grad, model, models),
        of_model(arrays.x, model, models),
        of_model(arrays.stats, model, models),
    )
    s, u, grad_x = of_model(s_, model, models), of_model(u_, model, models), of_model(arrays.grad_x, model, models)
    grad_s, per_edge = of_model(grad_s_, model, models), of_model(per_edge_, model, models)
    keep, alpha = only_if(drop, pointer(work.buffers[0], 0)), pointer(work.buffers[1], 0)
    weight = pointer(work.buffers[2], 0)
    factor, delta, share = pointer(work.buffers[3], 0), pointer(work.buffers[4], 0), pointer(work.buffers[5], 0)
    product, chosen = only_if(scored, pointer(work.buffers[6], 0)), pointer(work.names, 0)
    one = splat(x, 1.0, lanes)
    for head in range(0, heads, G):
        count, many = only_if(ragged, heads - head), only_if(ragged, (heads - head) * channels)
        for v in range(first, last):
            begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                draw_row(keep, 0, chosen, begin, n, pointer(drop[3], 0), drop, model, head, lanes)
            own = splat(x, 0.0, lanes)
            if s_ is not None:
                own = load(s, j * heads + head, lanes, count)
            for k in range(n):
                q = np.int64(dst[begin + k]) * 4 * heads + head
                z = own + load(stats, q, lanes, count)
                if u_ is not None:
                    edge = np.int64(begin + k) if ids_ is None else np.int64(ids[begin + k])
                    z = z + load(u, edge * heads + head, lanes, count)
                # rounded as in the forward pass, so that no score is above the largest
                store(alpha, k * G, leaky(z, z, slope) - load(stats, q + heads, lanes, count), None)
                store(factor, k * G, leaky(one, z, slope), None)
                store(share, k * G, load(stats, q + 2 * heads, lanes, count), None)
                store(delta, k * G, load(stats, q + 3 * heads, lanes, count), None)
            for f in range(0, n * G, LANES):
                values = exp(load(alpha, f, LANES, None)) * load(share, f, LANES, None)
                store(alpha, f, values, None)
                if drop is not None:
                    values = values * load(keep, f, LANES, None)
                store(weight, f, values, None)
            at, to, mine = head * channels, (o * heads + head) * channels, (j * heads + head) * channels
            if narrow is not None:
                total, inner = splat(x, 0.0, narrow), load(x, mine, narrow, many)
                for k in range(n):
                    prefetch(grad, np.int64(dst[min(begin + k + AHEAD, end)]) * heads * channels + at, narrow)
                    outer = load(grad, np.int64(dst[begin + k]) * heads * channels + at, narrow, many)
                    total = total + per_feature(load(weight, k * G, lanes, None), narrow) * outer
                    if scored is not None:
                        store(product, k * G, per_head(inner * outer, lanes), None)
                store(grad_x, to, total, many)
            else:
                if scored is not None:
                    for f in range(0, n * G, LANES):
                        store(product, f, splat(x, 0.0, LANES), None)
                whole = channels // width * width
                for h in range(min(G, heads - head)):
                    for c in range(h * channels, h * channels + whole, width):
                        _weigh_back(grad, heads * channels, at + c, dst, begin, n, end, weight, product, h, G,
                                    x, mine + c, grad_x, to + c, tile, None)  # fmt: skip
                    if whole < channels:
                        c = h * channels + whole
                        _weigh_back(grad, heads * channels, at + c, dst, begin, n, end, weight, product, h, G,
                                    x, mine + c, grad_x, to + c, tile, channels - whole)  # fmt: skip
            if scored is not None:
                sums = splat(x, 0.0, lanes)
                for k in range(n):
                    change = load(product, k * G, lanes, None)
                    if drop is not None:
                        change = change * load(keep, k * G, lanes, None)
                    if grad_s_ is not None:  # de = alpha (g - D) LeakyReLU'(z)
                        change = load(alpha, k * G, lanes, None) * (change - load(delta, k * G, lanes, None))
                        change = change * load(factor, k * G, lanes, None)
                        sums = sums + change
                    if per_edge_ is not None:
                        store(per_edge, np.int64(place[begin + k]) * heads + head, change, count)
                if grad_s_ is not None:
                    store(grad_s, o * heads + head, sums, count)


@compiled
def _normalise(work: Any, sizes: Any, layout: Any, arrays: Any, ids_: Any, s_: Any, u_: Any) -> None:
    """g_ij in `per_edge` to dz_ij LeakyReLU'(z_ij), by D_i = sum_j alpha_ij g_ij; and its sum, grad d."""
    first, last, model, models = work.first, work.last, work.model, work.models
    rowptr, heads, slope, lanes, ragged = arrays.rowptr, sizes.heads, sizes.slope, layout.lanes, layout.ragged
    src, ids, stats = pointer(arrays.src, 0), pointer(ids_, 0), of_model(arrays.stats, model, models)
    s, u = of_model(s_, model, models), of_model(u_, model, models)
    per_edge, grad_d = of_model(arrays.per_edge, model, models), of_model(arrays.grad_d, model, models)
    one, zero = splat(stats, 1.0, lanes), splat(stats, 0.0, lanes)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, q = only_if(ragged, heads - head), 4 * i * heads + head
            own, top = load(stats, q, lanes, count), load(stats, q + heads, lanes, count)
            share, delta, total = load(stats, q + 2 * heads, lanes, count), zero, zero
            for turn in range(2):  # D is known after the first
                for p in range(rowptr[i], rowptr[i + 1]):
                    z = own
                    if s_ is not None:
                        z = z + load(s, np.int64(src[p]) * heads + head, lanes, count)
                    if u_ is not None:
                        edge = np.int64(p) if ids_ is None else np.int64(ids[p])
                        z = z + load(u, edge * heads + head, lanes, count)
                    alpha = share * exp(leaky(z, z, slope) - top)
                    g = load(per_edge, p * heads + head, lanes, count)
                    if turn == 0:
                        delta = delta + alpha * g
                    else:
                        change = alpha * (g - delta) * leaky(one, z, slope)
                        total = total + change
                        store(per_edge, p * heads + head, change, count)
            store(grad_d, i * heads + head, total, count)


@compiled
def _collect(work: Any, sizes: Any, layout: Any, arrays: Any) -> None:
    """grad s_j = sum_i dz_ij LeakyReLU'(z_ij)."""
    first, last, model, models = work.first, work.last, work.model, work.models
    colptr, heads, lanes, ragged = arrays.colptr, sizes.heads, layout.lanes, layout.ragged
    place, per_edge, grad_s = (
        pointer(arrays.place, 0),
        of_model(arrays.per_edge, model, models),
        of_model(arrays.grad_s, model, models),
    )
    for j in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, total = only_if(ragged, heads - head), splat(per_edge, 0.0, lanes)
            for t in range(colptr[j], colptr[j + 1]):
                total = total + load(per_edge, np.int64(place[t]) * heads + head, lanes, count)
            store(grad_s, j * heads + head, total, count)


def forward(
    x: Tensor,
    score: Additive,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O `[N_dst, H, C]` in `dtype`, (max, 1 / denominator) `[N_dst, H, 2]`, and, if saved, O+ and A+."""
    score_src, score_dst, score_edge = score.operands
    shape = Shape.of(x, score_src, score_dst, score_edge)
    heads, channels = shape.heads, shape.channels
    chunks = chunks_of(edges, "dst")
    out, norm = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    out_plus = shape.empty(chunks.slots, heads, channels) if saves_output else None
    mass_plus = shape.empty(chunks.slots, heads) if saves_output else None
    x_, s, d, u = (shape.flat(t) for t in (x, *score.operands))
    arrays = Forward(edges.src.numpy(), x_, out, norm)
    sizes, drop = shape.sizes(score.negative_slope), shape.drop(seed, dropout, edges.dropout_ids_by_dst)
    job = shape.job(chunks.bounds, chunks.most, edges)
    common = (sizes, shape.layout, shape.narrow)
    run(_forward, shape.dtype, job, chunks, *common, drop, arrays, edge_ids(edges), s, d, u, out_plus, mass_plus)
    if chunks.long.size:
        for model in range(shape.models):
            merge(model, shape.models, chunks.long, chunks.first, out, norm, out_plus, mass_plus, heads, channels)
    rows = edges.num_dst
    results = shape.tensor(out, rows, heads, channels).to(dtype), shape.tensor(norm, rows, heads, 2)
    if out_plus is None or mass_plus is None:
        return results
    return *results, shape.tensor(out_plus, rows, heads, channels), shape.tensor(mass_plus, rows, heads)


def backward(
    grad: Tensor,
    x: Tensor,
    score: Additive,
    edges: Edges,
    dropout: float,
    seed: Tensor | None,
    out: Tensor | None,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of x and the scores; by D and grad d in one dense pass where O and O+ were saved."""
    score_src, score_dst, score_edge = score.operands
    norm, out_plus, mass_plus = (*saved, None, None)[:3]
    edge_grad = needs[3]
    shape = Shape.of(x, score_src, score_dst, score_edge)
    heads, channels = shape.heads, shape.channels
    colptr, dst, place = edges.transpose
    chunks = chunks_of(edges, "src")
    scored = not (score_src is None and score_dst is None and score_edge is None)
    speed = scored and out is not None
    sizes, drop = shape.sizes(score.negative_slope), shape.drop(seed, dropout, edges.dropout_ids_by_src)
    flat_grad, flat_x = shape.flat(grad), shape.flat(x)
    s, d, u = (shape.flat(t) for t in (score_src, score_dst, score_edge))

    grad_x, stats = shape.empty(chunks.slots, heads, channels), shape.empty(edges.num_dst, 4, heads)
    grad_s = shape.empty(chunks.slots, heads) if scored else None
    grad_d = shape.empty(edges.num_dst, heads) if scored else None
    per_edge = shape.empty(edges.num_edges, heads) if scored and (edge_grad or not speed) else None
    kept = (shape.flat(t) if speed else None for t in (out, out_plus, mass_plus))
    common = (sizes, shape.layout, shape.narrow)
    job = shape.job(np.arange(edges.num_dst + 1), 1, edges)
    run(_dense, shape.dtype, job, *common, Dense(flat_grad, shape.flat(norm), stats), d, *kept, grad_d)
    arrays = Backward(dst.numpy(), place.numpy(), flat_grad, flat_x, stats, grad_x)
    ids = None if u is None else edges.ids_by_src.numpy()
    sums = (grad_s if speed else None, per_edge, True if scored else None)
    job = shape.job(chunks.bounds, chunks.most, edges)
    run(_backward, shape.dtype, job, chunks, *common, drop, arrays, ids, s, u, *sums)
    if scored and not speed:
        rowptr = edges.rowptr.numpy()
        by_dst = Normalise(rowptr, edges.src.numpy(), stats, per_edge, grad_d)
        job = shape.job(rowptr, 1, edges)
        run(_normalise, shape.dtype, job, sizes, shape.layout, by_dst, edge_ids(edges), s, u)
        if score_src is not None:
            by_src = Collect(colptr.numpy(), place.numpy(), per_edge, grad_s)
            run(_collect, shape.dtype, shape.job(by_src.colptr, 1, edges), sizes, shape.layout, by_src)
    if chunks.long.size:
        for model in range(shape.models):
            merge_sums(model, shape.models, chunks.long, chunks.first, grad_x, heads * channels)
            if speed:
                merge_sums(model, shape.models, chunks.long, chunks.first, grad_s, heads)
    axis = len(shape.batch)
    return (
        shape.tensor(grad_x, edges.num_src, heads, channels),
        None if score_src is None else shape.tensor(grad_s, edges.num_src, heads),
        None if score_dst is None else shape.tensor(grad_d, edges.num_dst, heads),
        edges.ungroup(shape.tensor(per_edge, edges.num_edges, heads), axis) if edge_grad else None,
    )
