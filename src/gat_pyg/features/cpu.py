"""Feature dropout, and products of sparse features, on a CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.edges import Edges
from ..graph.memory import elements
from ..kernels.cpu.cache import compiled, inline
from ..kernels.cpu.draw import DRAWN, draw
from ..kernels.cpu.rows import SPLIT, Job, Shape, run
from ..kernels.cpu.vector import load, of_model, only_if, pointer, splat, store


@compiled
def _keep(work: Any, drop: Any, keep_: Any, four: Any) -> None:
    """k of four heads for the edges `DRAWN` times `first` to `last`."""
    first, last, model, models, _ = work
    (keep,), ids = of_model((keep_,), model, models), pointer(drop[2], 0)
    for tile in range(first, last):
        draw(keep, tile * DRAWN * 4, ids, tile * DRAWN, DRAWN, drop, model, 0, four)


@inline
def _block(rowptr: Any, row: int, last: int) -> int:
    """The end of the rows from this one on that have no more than `SPLIT` non-zeros, or are one."""
    stop = row + 1
    while stop < last and rowptr[stop + 1] - rowptr[row] <= SPLIT:
        stop += 1
    return stop


@inline
def _draw_numbers(keep: Any, begin: int, end: int, drop: Any, model: int, four: Any) -> int:
    """k of the numbers from `begin` to `end`, as `_keep` has them, from one a little before on, which is returned."""
    first = begin // (4 * DRAWN)
    for tile in range(first, -(-end // (4 * DRAWN))):
        draw(keep, (tile - first) * 4 * DRAWN, None, tile * DRAWN, DRAWN, drop, model, 0, four)
    return first * 4 * DRAWN


@compiled
def _gather_rows(
    work: Any,
    rowptr: Any,
    col_: Any,
    values_: Any,
    own_values: Any,
    weight_: Any,
    own_weight: Any,
    channels: Any,
    drop: Any,
    out_: Any,
    tile: Any,
    four: Any,
) -> None:
    """out_i = sum_k v_k W_col(k) for some rows; so many models have values and weights of their own."""
    first, last, model, models, buffers = work
    col, width = pointer(col_, 0), 1 << len(tile)
    (values,) = of_model((values_,), min(model, own_values - 1), own_values)
    (weight,) = of_model((weight_,), min(model, own_weight - 1), own_weight)
    (out,) = of_model((out_,), model, models)
    keep, base = only_if(drop, pointer(buffers[0], 0)), 0
    whole = channels // width * width
    while first < last:
        stop = _block(rowptr, first, last)
        if drop is not None:
            base = _draw_numbers(keep, np.int64(rowptr[first]), np.int64(rowptr[stop]), drop, model, four)
        for i in range(first, stop):
            to = np.int64(i) * channels
            for c in range(0, whole, width):
                total = splat(weight, 0.0, tile)
                for k in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
                    value = values[k]
                    if drop is not None:
                        value = value * keep[k - base]
                    total = total + value * load(weight, np.int64(col[k]) * channels + c, tile, None)
                store(out, to + c, total, None)
            if whole < channels:
                total, count = splat(weight, 0.0, tile), channels - whole
                for k in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
                    value = values[k]
                    if drop is not None:
                        value = value * keep[k - base]
                    total = total + value * load(weight, np.int64(col[k]) * channels + whole, tile, count)
                store(out, to + whole, total, count)
        first = stop


@inline
def _scatter(row: Any, values: Any, keep: Any, base: int, drop: Any, col: Any, begin: int, end: int, channels: int,
             out: Any, c: int, tile: Any, count: Any) -> None:  # fmt: skip
    """out_col(k) += v_k R for a tile of a row R."""
    for k in range(begin, end):
        value, at = values[k], np.int64(col[k]) * channels + c
        if drop is not None:
            value = value * keep[k - base]
        store(out, at, load(out, at, tile, count) + value * row, count)


@compiled
def _scatter_rows(
    work: Any,
    rowptr: Any,
    col_: Any,
    values_: Any,
    own_values: Any,
    rows_: Any,
    own_rows: Any,
    channels: Any,
    drop: Any,
    out_: Any,
    tile: Any,
    four: Any,
) -> None:
    """out_col(k) += v_k R_i for all rows and some tiles of the features, into zeros that a core's cache holds."""
    first, last, model, models, buffers = work
    col, width, size = pointer(col_, 0), 1 << len(tile), rowptr.size - 1
    (values,) = of_model((values_,), min(model, own_values - 1), own_values)
    (rows,) = of_model((rows_,), min(model, own_rows - 1), own_rows)
    (out,) = of_model((out_,), model, models)
    keep, base = only_if(drop, pointer(buffers[0], 0)), 0
    for c in range(first * width, min(last * width, channels), width):
        start, count = 0, channels - c
        while start < size:
            stop = _block(rowptr, start, size)
            if drop is not None:
                base = _draw_numbers(keep, np.int64(rowptr[start]), np.int64(rowptr[stop]), drop, model, four)
            for i in range(start, stop):
                begin, end, at = np.int64(rowptr[i]), np.int64(rowptr[i + 1]), np.int64(i) * channels + c
                if count >= width:
                    row = load(rows, at, tile, None)
                    _scatter(row, values, keep, base, drop, col, begin, end, channels, out, c, tile, None)
                else:
                    row = load(rows, at, tile, count)
                    _scatter(row, values, keep, base, drop, col, begin, end, channels, out, c, tile, count)
            start = stop


def keep(seed: Tensor, size: int, dropout: float | Tensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """`[size]`, or `[S, size]` for seeds `[S]`: 0, or 1 / (1 - p), by the words of the counters (0, 0), (1, 0), ...;
    with `ids` `[size / 4]` by those of (ids[0], 0), (ids[1], 0), ...
    """
    shape = Shape.of(torch.empty(*seed.shape, size, 4, 0, dtype=dtype))
    tiles = -(-size // (4 * DRAWN))
    mask = shape.empty(tiles, 4 * DRAWN)
    job = Job(np.arange(tiles + 1), shape.models, DRAWN, 8 * mask.numel())
    ids = ids if ids is None else F.pad(ids, (0, tiles * DRAWN - ids.numel()))
    run(_keep, shape.dtype, job, shape.drop(seed, dropout, lambda: ids), mask, (0, 0))
    return mask.view(*seed.shape, -1).narrow(-1, 0, size)


def weighted_rows(
    values: Tensor, weight: Tensor, seed: Tensor | None, dropout: float | Tensor, pattern: Any, back: bool
) -> Tensor:
    """X W `[rows, D]`, or X^T W `[columns, D]` if `back`, of a pattern and values; with an axis in front of any but the
    pattern of as many matrices. Dropout of the values is that of `keep`.
    """
    rowptr, col, columns = pattern.rowptr, pattern.col, pattern.num_cols
    drawn = (t.shape for t in (seed, dropout) if isinstance(t, Tensor))
    batch = torch.broadcast_shapes(values.shape[:-1], weight.shape[:-2], *drawn)
    channels, rows = weight.size(-1), columns if back else rowptr.numel() - 1
    shape = Shape.of(torch.empty(*batch, 0, 1, channels, dtype=weight.dtype), values, narrow=0)
    bounds = np.arange(-(-channels >> len(shape.tile)) + 1) if back else elements(rowptr)
    longest = int(np.diff(elements(rowptr)).max(initial=0)) if seed is not None else 0
    seed = seed if seed is None else seed.expand(batch)
    out = shape.empty(rows, channels)
    out = out.zero_() if back else out
    run(
        _scatter_rows if back else _gather_rows,
        shape.dtype,
        Job(bounds, shape.models, max(SPLIT, longest) + 8 * DRAWN, shape.models * col.numel() * channels),
        rowptr,
        col,
        shape.flat(values),
        math.prod(values.shape[:-1]),
        shape.flat(weight),
        math.prod(weight.shape[:-2]),
        channels,
        shape.drop(seed, dropout),
        out,
        shape.tile,
        (0, 0),
    )
    return out


@compiled
def _append_loops(rowptr: Any, perm: Any, rows: Any, width: int, num_loops: int, mean: bool) -> None:
    """Store in `rows`, after the features of the edges, the sum or mean of each node's; its last edge is its loop."""
    for i in range(num_loops):
        first, last, to = rowptr[i], rowptr[i + 1] - 1, np.int64(perm[rowptr[i + 1] - 1]) * width
        for d in range(width):
            rows[to + d] = 0
        for edge in range(first, last):
            at = np.int64(perm[edge]) * width
            for d in range(width):
                rows[to + d] += rows[at + d]
        if mean:
            for d in range(width):
                rows[to + d] /= rows.dtype.type(max(last - first, 1))


def with_loops(edge_attr: Tensor, edges: Edges, num_loops: int, mean: bool) -> Tensor:
    """Return the features of the edges, then for each added loop the sum or mean of those of its node's edges."""
    rows = edge_attr.new_empty(edges.num_rows, *edge_attr.shape[1:])
    rows[: edge_attr.size(0)] = edge_attr
    width = rows.numel() // max(rows.size(0), 1)
    assert edges.perm is not None
    _append_loops(elements(edges.rowptr), elements(edges.perm), elements(rows), width, num_loops, mean)
    return rows
