"""The fused operation on a CPU, compiled by Numba: one gather of the features forward, one of the gradient backward.

Every kernel works through rows: the neighbourhood of a dst forward, the edges out of a src backward; and through a few
heads at a time, which are the lanes of a vector. The scores, softmax and dropout of a row are made edge by edge for all
these heads at once, in buffers that a core's cache holds. Then the features are summed in vector registers, narrow
heads together and of wide ones a tile at a time, while the rows of the edges to come are prefetched. A row of more than
`SPLIT` edges is several chunks, merged in a fixed order. Several models on one graph lie one behind the other, and each
is computed as if it were alone: in a kernel `x_` is the array of all and `x` the elements of the one that it is called
for. No result depends on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph.memory import elements
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import (
    Shape,
    chunks_of,
    merge_sums,
    run,
)
from ...kernels.cpu.vector import (
    LANES,
    constant,
    exp,
    larger,
    leaky,
    load,
    of_model,
    only_if,
    only_if_any,
    pointer,
    splat,
    store,
)
from ..score import Operation
from ..steps.cpu import (
    Operands,
    attend,
    clear,
    forward_pass,
    gather,
    load_factors,
    load_weight,
    row_dots,
    row_of,
)


@inline
def _add_terms(z: Any, s: Any, node: Any, u: Any, ids: Any, edge: Any, heads: int, head: int, lanes: Any,
               count: Any) -> Any:  # fmt: skip
    """Return z plus the terms that exist: s at `node[edge]`, u of the edge."""
    if s is not None:
        z = z + load(s, np.int64(node[edge]) * heads + head, lanes, count)
    if u is not None:
        at = np.int64(edge) if ids is None else np.int64(ids[edge])
        z = z + load(u, at * heads + head, lanes, count)
    return z


@inline
def _load_or_zero(array: Any, like: Any, at: Any, lanes: Any, count: Any) -> Any:
    """Return `array[at:]`, or zeros if it is None."""
    if array is None:
        return splat(like, 0.0, lanes)
    return load(array, at, lanes, count)


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    narrow: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    x_: Any,
    s_: Any,
    d_: Any,
    u_: Any,
    w_: Any,
    out_: Any,
    lse_: Any,
    out_plus_: Any,
    mass_plus_: Any,
) -> None:
    """Equations (1) to (4) for some chunks, with O+ and A+ where they are saved."""
    first, last, model, models, buffers = work
    heads, (lanes, _, ragged) = sizes[0], layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, s, d, u, w = of_model((x_, s_, d_, u_, w_), model, models)
    out, lse, out_plus, mass_plus = of_model((out_, lse_, out_plus_, mass_plus_), model, models)
    keep = only_if_any((drop, w_), pointer(buffers[0], 0))
    weight, shares = pointer(buffers[1], 0), pointer(buffers[2], 0)
    positive = only_if(out_plus_, pointer(buffers[3], 0))
    one = splat(x, 1.0, lanes)
    for head in range(0, heads, 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes, heads, heads)
            G, count = row.lanes, only_if(ragged, row.width)
            load_factors(keep, drop, w, ids, row, model, lanes, ragged)
            d_i, tops = _load_or_zero(d, x, row.own, lanes, count), splat(x, -np.inf, lanes)
            for k in range(row.size):
                z = _add_terms(d_i, s, src, u, ids, row.begin + k, heads, head, lanes, count)
                e = leaky(z, z, slope)  # (3)
                tops = larger(tops, e)
                store(weight, k * G, e, None)
                if out_plus_ is not None:
                    store(positive, k * G, leaky(one, z, constant(x, 0)), None)
            attend(row, narrow, layout, weight, positive, keep, shares, tops, x, out, out_plus, mass_plus, lse)


@compiled
def _dense(
    work: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    narrow: Any,
    grad_: Any,
    d_: Any,
    lse_: Any,
    stats_: Any,
    out_: Any,
    out_plus_: Any,
    mass_plus_: Any,
    grad_d_: Any,
) -> None:
    """For some dst (d, max, 1 / sum, D) as their `stats`, D = <dO, O>; and grad d = (1 - slope)(<dO, O+> - D A+)."""
    first, last, model, models, buffers = work
    heads, channels = sizes
    lanes, _, ragged = layout
    grad, d, lse, stats = of_model((grad_, d_, lse_, stats_), model, models)
    out, out_plus, mass_plus, grad_d = of_model((out_, out_plus_, mass_plus_, grad_d_), model, models)
    dots, dots_plus = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, here, q = only_if(ragged, heads - head), i * heads + head, 4 * i * heads + head
            product = splat(grad, 0.0, lanes)
            if out_ is not None:
                at = here * channels
                row_dots(grad, at, out, at, heads - head, channels, layout, narrow, dots, 0)
                row_dots(grad, at, out_plus, at, heads - head, channels, layout, narrow, dots_plus, 0)
                product, plus = load(dots, 0, lanes, None), load(dots_plus, 0, lanes, None)
                change = (constant(grad, 1) - slope) * (plus - product * load(mass_plus, here, lanes, count))
                store(grad_d, here, change, count)
            store(stats, q, _load_or_zero(d, grad, here, lanes, count), count)
            store(stats, q + heads, load(lse, 2 * here - head, lanes, count), count)
            store(stats, q + 2 * heads, load(lse, 2 * here - head + heads, lanes, count), count)
            store(stats, q + 3 * heads, product, count)


@compiled
def _backward(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    narrow: Any,
    drop: Any,
    dst_: Any,
    place_: Any,
    ids_: Any,
    grad_: Any,
    x_: Any,
    s_: Any,
    u_: Any,
    w_: Any,
    stats_: Any,
    grad_x_: Any,
    grad_s_: Any,
    per_edge_: Any,
    grad_w_: Any,
    scored: Any,
) -> None:
    """grad x and grad s of some chunks of src rows, in one gather of dO; `stats` has (d, max, 1 / sum, D) of each dst.

    If `grad_s` is given, `per_edge` (optional) is grad z_ij LeakyReLU'(z_ij), grouped by dst. Otherwise D is not known
    yet, and `per_edge` is g_ij = k_ij w_ij <dO_i, x_j>. `grad_w` (optional) is grad w_ij, grouped by dst. `scored` is
    None where grad x is all there is.
    """
    first, last, model, models, buffers = work
    heads, (lanes, _, ragged) = sizes[0], layout
    dst, place, ids = pointer(dst_, 0), pointer(place_, 0), pointer(ids_, 0)
    grad, x, s, u, w, stats = of_model((grad_, x_, s_, u_, w_, stats_), model, models)
    grad_x, grad_s, per_edge, grad_w = of_model((grad_x_, grad_s_, per_edge_, grad_w_), model, models)
    keep, alpha, weight = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    factor, delta, share = pointer(buffers[3], 0), pointer(buffers[4], 0), pointer(buffers[5], 0)
    product, weigh = only_if(scored, pointer(buffers[6], 0)), only_if(w_, pointer(buffers[7], 0))
    one = splat(x, 1.0, lanes)
    for head in range(0, heads, 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes, heads, heads)
            n, G, count = row.size, row.lanes, only_if(ragged, row.width)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, n, head, lanes)
            s_j = _load_or_zero(s, x, row.own, lanes, count)
            for k in range(n):
                q = np.int64(dst[row.begin + k]) * 4 * heads + head
                z = s_j + load(stats, q, lanes, count)
                z = _add_terms(z, None, dst, u, ids, row.begin + k, heads, head, lanes, count)
                # rounded as in the forward pass, so that no score is above the largest
                store(alpha, k * G, leaky(z, z, slope) - load(stats, q + heads, lanes, count), None)
                store(factor, k * G, leaky(one, z, slope), None)
                store(share, k * G, load(stats, q + 2 * heads, lanes, count), None)
                store(delta, k * G, load(stats, q + 3 * heads, lanes, count), None)
                if w_ is not None:
                    store(weigh, k * G, load_weight(w, ids, row, k, lanes, ragged), None)
            for f in range(0, n * G, LANES):
                values = exp(load(alpha, f, LANES, None)) * load(share, f, LANES, None)
                store(alpha, f, values, None)
                if drop is not None:
                    values = values * load(keep, f, LANES, None)
                if w_ is not None:
                    values = values * load(weigh, f, LANES, None)
                store(weight, f, values, None)
            if scored is not None and narrow is None:
                clear(product, row)  # to which the tiles add
            gather(row, narrow, layout, grad, weight, None, None, grad_x, None, x, product, None, None)
            if scored is not None:
                sums = splat(x, 0.0, lanes)
                for k in range(n):
                    change = load(product, k * G, lanes, None)
                    if drop is not None:
                        change = change * load(keep, k * G, lanes, None)
                    at = np.int64(place[row.begin + k]) * heads + head
                    if grad_w_ is not None:
                        store(grad_w, at, load(alpha, k * G, lanes, None) * change, count)
                    if w_ is not None:
                        change = change * load(weigh, k * G, lanes, None)
                    if grad_s_ is not None:  # de = alpha (g - D) LeakyReLU'(z)
                        change = load(alpha, k * G, lanes, None) * (change - load(delta, k * G, lanes, None))
                        change = change * load(factor, k * G, lanes, None)
                        sums = sums + change
                    if per_edge_ is not None:
                        store(per_edge, at, change, count)
                if grad_s_ is not None:
                    store(grad_s, row.to, sums, count)


@compiled
def _normalise(
    work: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    rowptr: Any,
    src_: Any,
    ids_: Any,
    s_: Any,
    u_: Any,
    stats_: Any,
    per_edge_: Any,
    grad_d_: Any,
) -> None:
    """g_ij in `per_edge` to dz_ij LeakyReLU'(z_ij), by D_i = sum_j alpha_ij g_ij; and its sum, grad d."""
    first, last, model, models, _ = work
    heads, (lanes, _, ragged) = sizes[0], layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    s, u, stats, per_edge, grad_d = of_model((s_, u_, stats_, per_edge_, grad_d_), model, models)
    one, zero = splat(stats, 1.0, lanes), splat(stats, 0.0, lanes)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, q = only_if(ragged, heads - head), 4 * i * heads + head
            d_i, top = load(stats, q, lanes, count), load(stats, q + heads, lanes, count)
            share, delta, total = load(stats, q + 2 * heads, lanes, count), zero, zero
            for turn in range(2):  # D is known after the first
                for p in range(rowptr[i], rowptr[i + 1]):
                    z = _add_terms(d_i, s, src, u, ids, p, heads, head, lanes, count)
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
def _collect(work: Any, sizes: Any, layout: Any, colptr: Any, place_: Any, per_edge_: Any, grad_s_: Any) -> None:
    """grad s_j = sum_i dz_ij LeakyReLU'(z_ij)."""
    first, last, model, models, _ = work
    heads, lanes, ragged = sizes[0], layout[0], layout[2]
    place = pointer(place_, 0)
    per_edge, grad_s = of_model((per_edge_, grad_s_), model, models)
    for j in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, total = only_if(ragged, heads - head), splat(per_edge, 0.0, lanes)
            for t in range(colptr[j], colptr[j + 1]):
                total = total + load(per_edge, np.int64(place[t]) * heads + head, lanes, count)
            store(grad_s, j * heads + head, total, count)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return O `[N_dst, H, C]` in `dtype`, (max, 1 / denominator) `[N_dst, 2, H]`, and, if saved, O+ and A+."""
    x, score, edges, edge_weight, *_ = call
    shape, chunks = Shape.of(x, edge_weight, *score.operands), chunks_of(edges, "dst")
    constants = shape.dtype.type(score.negative_slope), shape.layout, shape.narrow
    arrays = shape.features(x), *map(shape.flat, (*score.operands, edge_weight))
    plus = ((shape.heads, shape.channels), (shape.heads,)) if saves_output else (None, None)
    return forward_pass(_forward, call, shape, chunks, Operands(constants, edges.perm, arrays), dtype, *plus)


def backward(
    call: Operation, grad: Tensor, out: Tensor | None, saved: tuple[Tensor, ...], needs: tuple[bool, ...]
) -> dict[str, Tensor | None]:
    """The gradients of x and the scores; by D and grad d in one dense pass where O and O+ were saved."""
    x, score, edges, edge_weight, seed, dropout = call
    score_src, score_dst, score_edge = score.operands
    lse, out_plus, mass_plus = (*saved, None, None)[:3]
    edge_grad = needs[4]
    shape, chunks = Shape.of(x, edge_weight, *score.operands), chunks_of(edges, "src")
    heads, channels, layout = shape.heads, shape.channels, shape.layout
    colptr, dst, place = edges.transpose
    scored = not (score_src is None and score_dst is None and score_edge is None)
    speed = scored and out is not None
    sizes, slope = shape.sizes, shape.dtype.type(score.negative_slope)
    g, s, d, u = shape.features(grad), *map(shape.flat, score.operands)

    grad_x, stats = shape.empty(chunks.slots, heads, channels), shape.scratch(edges.num_dst, 4, heads)
    grad_s = shape.empty(chunks.slots, heads) if scored else None
    grad_d = shape.empty(edges.num_dst, heads) if scored else None
    per_edge = shape.empty(edges.num_edges, heads) if scored and (edge_grad or not speed) else None
    grad_w = shape.empty(edges.num_edges, heads) if needs[1] else None
    outputs = (shape.flat(t) if speed else None for t in (out, out_plus, mass_plus))
    job = shape.job(np.arange(edges.num_dst + 1), 1, edges)
    run(_dense, shape.dtype, job, sizes, slope, layout, shape.narrow, g, d, shape.flat(lse), stats, *outputs, grad_d)
    drop, ids = shape.drop(seed, dropout, lambda: edges.dropout_ids_by_src), None
    if u is not None or edge_weight is not None:
        ids = edges.ids_by_src
    ends = drop, dst, place, ids
    operands = g, shape.features(x), s, u, shape.flat(edge_weight), stats
    results = grad_x, grad_s if speed else None, per_edge, grad_w, True if scored or grad_w is not None else None
    shape.run(_backward, chunks, edges, slope, layout, shape.narrow, *ends, *operands, *results)
    if scored and not speed:
        job = shape.job(elements(edges.rowptr), 1, edges)
        terms = edges.rowptr, edges.src, edges.perm, s, u, stats, per_edge, grad_d
        run(_normalise, shape.dtype, job, sizes, slope, layout, *terms)
        if score_src is not None:
            job = shape.job(elements(colptr), 1, edges)
            run(_collect, shape.dtype, job, sizes, layout, colptr, place, per_edge, grad_s)
    merge_sums(shape.models, chunks, heads * channels, grad_x)
    if grad_s is not None and speed:
        merge_sums(shape.models, chunks, heads, grad_s)
    axis = len(shape.batch)
    return {
        "x": shape.first(grad_x, edges.num_src),
        "edge_weight": None if grad_w is None else edges.ungroup(grad_w, axis),
        "score_src": None if score_src is None or grad_s is None else shape.first(grad_s, edges.num_src),
        "score_dst": None if score_dst is None or grad_d is None else shape.first(grad_d, edges.num_dst),
        "score_edge": edges.ungroup(per_edge, axis) if edge_grad and per_edge is not None else None,
    }
