"""Steps of a layer on few edges that the kernels of all scores share: softmax, sums over the edges, the layer's end.

The kernels of a layer go through its dst one after the other, and through the edges of each, by one thread. What is
saved is what the equations name: alpha and the factors k of dropout, `[E, H]`, grouped by dst.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline, step
from ...kernels.cpu.draw import DRAWN, draw_row
from ...kernels.cpu.rows import limits
from ...kernels.cpu.vector import LANES, exp, lane_sum, load, pointer, splat, split_at, store


@functools.partial(compiled, allocates=False)
def group(pointers: Any, index_: int, size: int, num_src: int, num_dst: int, loops: int, graph_: int) -> Any:
    """Group few edges by dst, in order, with `loops` added loops in place of the graph's own, which stay with -1.

    The arguments are addresses of int64: of an edge list `[2, E]`, and of the result, the pointer of the rows, and of
    each edge its src, then its row. Returns the number of edges, or -1 for an id that is not that of a node.
    """
    total = size + max(loops, 0)
    (index,) = split_at(pointers, index_, (2 * size,))
    rowptr, src, rows = split_at(pointers, graph_, (num_dst + 1, total, total))
    rowptr[:] = 0
    for i in range(loops):
        rowptr[i + 1] = 1
    for edge in range(size):
        j, i = index[edge], index[size + edge]
        if loops < 0 or i != j:
            if not (0 <= j < num_src and 0 <= i < num_dst):
                return -1
            rowptr[i + 1] += 1
    for i in range(num_dst):
        rowptr[i + 1] += rowptr[i]
    for edge in range(size):
        j, i = index[edge], index[size + edge]
        if loops < 0 or i != j:
            at = rowptr[i]
            src[at], rows[at], rowptr[i] = j, edge, at + 1
    for i in range(loops):
        at = rowptr[i]
        src[at], rows[at], rowptr[i] = i, size + i, at + 1
    for i in range(num_dst, 0, -1):
        rowptr[i] = rowptr[i - 1]
    rowptr[0] = 0
    return rowptr[num_dst]


@inline
def put(out: Any, at: int, values: Any, rest: int) -> None:
    """Store a vector, or the first `rest` of it: an AVX2 processor may take long for a part."""
    if rest >= LANES:
        store(out, at, values, None)
    else:
        store(out, at, values, rest)


@inline
def dot(x: Any, i: int, y: Any, j: int, size: int) -> Any:
    """<x, y> of some elements from i and from j on."""
    total = splat(x, 0.0, LANES)
    for c in range(0, size, LANES):
        total = total + load(x, i + c, LANES, size - c) * load(y, j + c, LANES, size - c)
    return lane_sum(total)


@inline
def add(out: Any, i: int, factor: Any, x: Any, j: int, size: int) -> None:
    """Add `factor` times the elements of x from j on to those from i on."""
    for c in range(0, size, LANES):
        rest = size - c
        put(out, i + c, load(out, i + c, LANES, rest) + factor * load(x, j + c, LANES, rest), rest)


def drop_of(seed: Tensor, dropout: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a seed and the limits of p, as `draw_factors` takes them."""
    return np.array([seed.item()]), limits((dropout,))


@functools.partial(step, allocates=True)
def draw_factors(drop: Any, rows: Any, heads: int, factors: Any) -> None:
    """k_ij, 0 or 1 / (1 - p), of each edge and head."""
    count = rows.size
    drawn = np.empty(4 * count + 4 * DRAWN, factors.dtype)
    for head in range(0, heads, 4):
        draw_row(pointer(drawn, 0), (drop[0], drop[1], rows), 0, 0, count, head, (0, 0))
        for edge in range(count):
            for h in range(min(4, heads - head)):
                factors[edge * heads + head + h] = drawn[4 * edge + h]


@step
def fill_loops(rowptr: Any, rows: Any, first: int, loops: int, mean: bool, values_: Any, back: bool) -> None:
    """Fill the values `[R, width]` of each added loop, the last edge of its node, with the sum or mean of the others';
    or, with `back`, add the gradient of what the loops have to that of the other edges."""
    width, values = values_.size // max(first + loops, 1), pointer(values_, 0)
    for i in range(loops):
        loop, last = (first + i) * width, rowptr[i + 1] - 1
        share = values_.dtype.type(1 / max(last - rowptr[i], 1) if mean else 1.0)
        if not back:
            values_[loop : loop + width] = 0
        for edge in range(rowptr[i], last):
            if back:
                add(values, rows[edge] * width, share, values, loop, width)
            else:
                add(values, loop, share, values, rows[edge] * width, width)


@step
def softmax(rowptr: Any, heads: int, scores: Any) -> None:
    """Equation (2): the scores of each row to alpha, in place; 0 where no edge of a row has a weight."""
    e, end = pointer(scores, 0), scores.size
    for i in range(rowptr.size - 1):
        for h in range(heads):
            top = scores.dtype.type(-np.inf)
            for edge in range(rowptr[i], rowptr[i + 1]):
                if e[edge * heads + h] > top:
                    top = e[edge * heads + h]
            if top == -np.inf:
                top = scores.dtype.type(0)
            for edge in range(rowptr[i], rowptr[i + 1]):
                e[edge * heads + h] -= top
    for f in range(0, end // LANES * LANES, LANES):
        store(e, f, exp(load(e, f, LANES, None)), None)
    if end % LANES:
        f, rest = end // LANES * LANES, end % LANES
        store(e, f, exp(load(e, f, LANES, rest)), rest)
    for i in range(rowptr.size - 1):
        for h in range(heads):
            total = scores.dtype.type(0)
            for edge in range(rowptr[i], rowptr[i + 1]):
                total += e[edge * heads + h]
            share = 1 / total if total != 0 else total
            for edge in range(rowptr[i], rowptr[i + 1]):
                e[edge * heads + h] *= share


@step
def weigh(rowptr: Any, ends: Any, sizes: Any, alpha: Any, factors: Any, values_: Any, of_edges_: Any,
          out_: Any) -> None:  # fmt: skip
    """Add equation (4): the sum of k alpha times the values of src, and of the edge if present, of each row."""
    (heads, channels), (src, rows) = sizes, ends
    values, of_edges, out = pointer(values_, 0), pointer(of_edges_, 0), pointer(out_, 0)
    for i in range(rowptr.size - 1):
        for h in range(heads):
            for c in range(0, channels, LANES):
                here, rest = (i * heads + h) * channels + c, channels - c
                total = load(out, here, LANES, rest)
                for edge in range(rowptr[i], rowptr[i + 1]):
                    weight = alpha[edge * heads + h]
                    term = load(values, (src[edge] * heads + h) * channels + c, LANES, rest)
                    if of_edges_ is not None:
                        term = term + load(of_edges, (rows[edge] * heads + h) * channels + c, LANES, rest)
                    if factors is not None:
                        weight = weight * factors[edge * heads + h]
                    total = total + weight * term
                put(out, here, total, rest)


@step
def softmax_back(rowptr: Any, ends: Any, sizes: Any, grad_: Any, alpha: Any, factors: Any, values_: Any,
                 of_edges_: Any, change: Any, grad_values_: Any, grad_edges_: Any) -> None:  # fmt: skip
    """The gradients of `weigh` and `softmax`: `change` is that of the scores, alpha (g - D) with D = sum_j alpha g.

    g = k <dO, values>. Added to the gradients of the values is k alpha dO.
    """
    (heads, channels), (src, rows) = sizes, ends
    grad, values, of_edges = pointer(grad_, 0), pointer(values_, 0), pointer(of_edges_, 0)
    grad_values, grad_edges = pointer(grad_values_, 0), pointer(grad_edges_, 0)
    for i in range(rowptr.size - 1):
        for h in range(heads):
            mean, of = alpha.dtype.type(0), (i * heads + h) * channels
            for edge in range(rowptr[i], rowptr[i + 1]):
                here, j = edge * heads + h, (src[edge] * heads + h) * channels
                weight, total = alpha[here], splat(grad, 0.0, LANES)
                if factors is not None:
                    weight = weight * factors[here]
                for c in range(0, channels, LANES):
                    rest, of_edge = channels - c, (rows[edge] * heads + h) * channels + c
                    direction, term = load(grad, of + c, LANES, rest), load(values, j + c, LANES, rest)
                    put(grad_values, j + c, load(grad_values, j + c, LANES, rest) + weight * direction, rest)
                    if of_edges_ is not None:
                        term = term + load(of_edges, of_edge, LANES, rest)
                        put(grad_edges, of_edge, load(grad_edges, of_edge, LANES, rest) + weight * direction, rest)
                    total = total + direction * term
                g = lane_sum(total)
                if factors is not None:
                    g = g * factors[here]
                mean += alpha[here] * g
                change[here] = g
            for edge in range(rowptr[i], rowptr[i + 1]):
                here = edge * heads + h
                change[here] = alpha[here] * (change[here] - mean)


@step
def mean_heads(of_heads: Any, sizes: Any, out: Any, back: bool) -> None:
    """Equation (6): add the mean of the heads; or, with `back`, pass the gradient of the output to each head."""
    heads, channels = sizes
    for n in range(out.size):
        for h in range(heads):
            here = (n // channels * heads + h) * channels + n % channels
            if back:
                of_heads[here] = out[n] / heads
            else:
                out[n] += of_heads[here] / heads
