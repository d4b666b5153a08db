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
from ...kernels.cpu.rows import Shape, chunks_of, merge_sums, run
from ...kernels.cpu.vector import LANES, exp, larger, leaky, load, of_model, only_if, pointer, splat, store
from ..score import Operation
from ..steps.cpu import (
    Row,
    attend,
    forward_pass,
    gather,
    load_edge,
    load_factors,
    load_stats,
    product_back,
    row_of,
    summarise,
)


@inline
def _add_terms(d_i: Any, s: Any, u: Any, ids: Any, row: Row, k: int) -> Any:
    """z_ij = d_i + s_j + u_ij of an edge of a dst, for the heads of the vector."""
    s_j = load(s, np.int64(row.ids[row.begin + k]) * row.heads + row.head, row.vector, row.count)
    return d_i + s_j + load_edge(u, ids, row, k)


@compiled
def _forward(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, drop: Any, ends: Any, operands: Any, results: Any
) -> None:
    """Equations (1) to (4) for some chunks, with O+ and A+ where they are saved."""
    (first, last, model, models, buffers), (lanes, narrow, _, _), heads = work, layout, sizes[0]
    (src, ids), (x, s, d, u, w) = of_model(ends, 0, 1), of_model(operands, model, models)
    out, lse, out_plus, mass_plus = of_model(results, model, models)
    keep, weight, shares, positive = of_model(buffers[:4], 0, 1)
    keep, positive = only_if((drop, w), keep), only_if(out_plus, positive)
    one, zero = splat(x, 1.0, lanes), results[0].dtype.type(0)
    for head in range(0, heads, 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, sizes, layout, head, heads, heads)
            load_factors(keep, drop, w, ids, row, model)
            d_i, tops = splat(x, 0.0, lanes) + load(d, row.own, lanes, row.count), splat(x, -np.inf, lanes)
            for k in range(row.size):
                z = _add_terms(d_i, s, u, ids, row, k)
                e = leaky(z, z, slope)  # (3)
                tops = larger(tops, e)
                store(weight, k * row.lanes, e, None)
                store(positive, k * row.lanes, leaky(one, z, zero), None)
            attend(row, narrow, weight, positive, keep, shares, tops, x, out, lse, out_plus, mass_plus)


@compiled
def _backward(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, drop: Any, scored: Any, summed: Any, ends: Any,
    operands: Any, results: Any,
) -> None:  # fmt: skip
    """grad x and grad s of some chunks of src rows, in one gather of dO; `stats` has (d, max, 1 / sum, D) of each dst.

    If `summed` is True, `per_edge` (optional) is grad z_ij LeakyReLU'(z_ij), grouped by dst. Otherwise D is not known
    yet, and `per_edge` is g_ij = k_ij w_ij <dO_i, x_j>. `grad_w` (optional) is grad w_ij, grouped by dst. `scored` is
    None where grad x is all there is.
    """
    (first, last, model, models, buffers), (lanes, narrow, _, _), heads = work, layout, sizes[0]
    (dst, place, ids), (grad, x, s, u, w, stats) = of_model(ends, 0, 1), of_model(operands, model, models)
    grad_x, grad_s, per_edge, grad_w = of_model(results, model, models)
    keep, alpha, weight, factor, delta, share, product, weigh = of_model(buffers, 0, 1)
    keep, product, weigh = only_if(drop, keep), only_if(scored, product), only_if(w, weigh)
    one = splat(x, 1.0, lanes)
    for head in range(0, heads, 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, sizes, layout, head, heads, heads)
            n, G = row.size, row.lanes
            draw_row(keep, drop, model, row.begin, n, head, lanes)
            s_j = load(s, row.own, lanes, row.count)
            for k in range(n):
                d_i, top, of_sum, mean = load_stats(stats, np.int64(dst[row.begin + k]) * 4 * heads + head, row)
                z = d_i + s_j + load_edge(u, ids, row, k)
                # rounded as in the forward pass, so that no score is above the largest
                store(alpha, k * G, leaky(z, z, slope) - top, None)
                store(factor, k * G, leaky(one, z, slope), None)
                store(share, k * G, of_sum, None)
                store(delta, k * G, mean, None)
                store(weigh, k * G, load_edge(w, ids, row, k), None)
            for f in range(0, n * G, LANES):
                values = exp(load(alpha, f, LANES, None)) * load(share, f, LANES, None)
                store(alpha, f, values, None)
                store(weight, f, values * load(keep, f, LANES, None) * load(weigh, f, LANES, None), None)
            gather(row, narrow, grad, weight, None, None, grad_x, None, None, None, x, product)
            if scored is not None:
                sums = splat(x, 0.0, lanes)
                for k in range(n):
                    at, alpha_ij = np.int64(place[row.begin + k]) * heads + head, load(alpha, k * G, lanes, None)
                    w_ij = load(weigh, k * G, lanes, None)
                    change = product_back(product, row, k, at, alpha_ij, keep, w_ij, grad_w)
                    if summed is not None:  # de = alpha (g - D) LeakyReLU'(z)
                        change = (
                            alpha_ij * (change - load(delta, k * G, lanes, None)) * load(factor, k * G, lanes, None)
                        )
                        sums = sums + change
                    store(per_edge, at, change, row.count)
                store(grad_s, row.to, sums, row.count)


@compiled
def _normalise(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, ends: Any, operands: Any, results: Any
) -> None:
    """g_ij in `per_edge` to dz_ij LeakyReLU'(z_ij), by D_i = sum_j alpha_ij g_ij; and its sum, grad d."""
    (first, last, model, models, _), (lanes, _, _, _), heads = work, layout, sizes[0]
    (src, ids), (s, u, stats) = of_model(ends, 0, 1), of_model(operands, model, models)
    per_edge, grad_d = of_model(results, model, models)
    one, zero = splat(stats, 1.0, lanes), splat(stats, 0.0, lanes)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            row = row_of(chunks, i, src, sizes, layout, head, heads, heads)
            d_i, top, share, _ = load_stats(stats, 4 * i * heads + head, row)
            delta, total = zero, zero
            for turn in range(2):  # D is known after the first
                for k in range(row.size):
                    z, at = _add_terms(d_i, s, u, ids, row, k), (row.begin + k) * heads + head
                    alpha, g = share * exp(leaky(z, z, slope) - top), load(per_edge, at, lanes, row.count)
                    if turn == 0:
                        delta = delta + alpha * g
                    else:
                        change = alpha * (g - delta) * leaky(one, z, slope)
                        total = total + change
                        store(per_edge, at, change, row.count)
            store(grad_d, row.to, total, row.count)


@compiled
def _collect(work: Any, sizes: Any, layout: Any, chunks: Any, place_: Any, per_edge_: Any, grad_s_: Any) -> None:
    """grad s_j = sum_i dz_ij LeakyReLU'(z_ij)."""
    (first, last, model, models, _), (lanes, _, _, _), heads = work, layout, sizes[0]
    (per_edge, grad_s), place = of_model((per_edge_, grad_s_), model, models), pointer(place_, 0)
    for j in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            row, total = row_of(chunks, j, None, sizes, layout, head, heads, heads), splat(per_edge, 0.0, lanes)
            for k in range(row.size):
                total = total + load_edge(per_edge, place, row, k)
            store(grad_s, row.to, total, row.count)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return O `[N_dst, H, C]` in `dtype`, (max, 1 / denominator) `[N_dst, 2, H]`, and, if saved, O+ and A+."""
    x, score, edges, edge_weight, *_ = call
    shape, chunks = Shape.of(x, edge_weight, *score.operands), chunks_of(edges, "dst")
    arrays = shape.features(x), *map(shape.flat, (*score.operands, edge_weight))
    plus = ((shape.heads, shape.channels), (shape.heads,)) if saves_output else (None, None)
    slope = shape.dtype.type(score.negative_slope)
    return forward_pass(_forward, call, shape, chunks, (slope,), edges.perm, arrays, dtype, plus)


def backward(
    call: Operation, grad: Tensor, out: Tensor | None, saved: tuple[Tensor, ...], needs: tuple[bool, ...]
) -> dict[str, Tensor | None]:
    """The gradients of x and the scores; by D and grad d in one dense pass where O and O+ were saved."""
    x, score, edges, edge_weight, seed, dropout = call
    lse, *plus = saved
    shape, chunks = Shape.of(x, edge_weight, *score.operands), chunks_of(edges, "src")
    heads, slope, (colptr, dst, place) = shape.heads, shape.dtype.type(score.negative_slope), edges.transpose
    g, s, d, u = shape.features(grad), *map(shape.flat, score.operands)
    scored = True if any(operand is not None for operand in score.operands) else None
    speed = scored if out is not None else None

    grad_x = shape.empty(chunks.slots, heads, shape.channels)
    grad_s, grad_d = (shape.empty(n, heads) if scored else None for n in (chunks.slots, edges.num_dst))
    per_edge = shape.empty(edges.num_edges, heads) if scored and (needs[4] or not speed) else None
    grad_w = shape.empty(edges.num_edges, heads) if needs[1] else None
    outputs, grad_d_now = ((out, *plus), grad_d) if speed else ((None, None, None), None)
    stats = summarise(shape, edges, grad, lse, outputs, d, shape.dtype.type(1) - slope, grad_d_now)
    drop = shape.drop(seed, dropout, lambda: edges.dropout_ids_by_src)
    ids = None if u is None and edge_weight is None else edges.ids_by_src
    operands = g, shape.features(x), s, u, shape.flat(edge_weight), stats
    results, back = (grad_x, grad_s if speed else None, per_edge, grad_w), True if scored or needs[1] else None
    shape.run(_backward, chunks, edges, slope, drop, back, speed, (dst, place, ids), operands, results)
    if scored and not speed:
        rowptr, colptr, rows = elements(edges.rowptr), elements(colptr), np.arange(max(edges.num_dst, edges.num_src))
        terms = slope, (edges.src, edges.perm), (s, u, stats), (per_edge, grad_d)
        run(_normalise, shape, shape.job(rowptr, 1, edges), (rowptr, rows, rows), *terms)
        if s is not None:
            run(_collect, shape, shape.job(colptr, 1, edges), (colptr, rows, rows), place, per_edge, grad_s)
    merge_sums(shape.models, chunks, heads * shape.channels, grad_x)
    if grad_s is not None and speed:
        merge_sums(shape.models, chunks, heads, grad_s)
    axis = len(shape.batch)
    return {
        "x": shape.first(grad_x, edges.num_src),
        "edge_weight": None if grad_w is None else edges.ungroup(grad_w, axis),
        "score_src": None if s is None or grad_s is None else shape.first(grad_s, edges.num_src),
        "score_dst": None if d is None else grad_d,
        "score_edge": edges.ungroup(per_edge, axis) if needs[4] and per_edge is not None else None,
    }
