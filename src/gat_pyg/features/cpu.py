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
from ..kernels.cpu.rows import Job, Shape, run
from ..kernels.cpu.vector import load, of_model, only_if, pointer, splat, store


@compiled
def _keep(work: Any, drop: Any, keep_: Any, four: Any) -> None:
    """k of four heads for the edges `DRAWN` times `first` to `last`."""
    first, last, model, models, _ = work
    (keep,), ids = of_model((keep_,), model, models), pointer(drop[2], 0)
    for tile in range(first, last):
        draw(keep, tile * DRAWN * 4, ids, tile * DRAWN, DRAWN, drop, model, 0, four)


@inline
def _draw_numbers(keep: Any, begin: int, end: int, drop: Any, model: int, four: Any) -> int:
    """k of the numbers from `begin` to `end`, as `_keep` has them, from one a little before on, which is returned."""
    first = begin // (4 * DRAWN)
    for tile in range(first, -(-end // (4 * DRAWN))):
        draw(keep, (tile - first) * 4 * DRAWN, None, tile * DRAWN, DRAWN, drop, model, 0, four)
    return first * 4 * DRAWN


@inline
def _sum_tile(begin: int, end: int, col: Any, place: Any, values: Any, keep: Any, base: int, weight: Any, channels: int,
              c: int, tile: Any, count: Any, out: Any, to: int) -> None:  # fmt: skip
    """Store sum_k v_k W_col(k) over some non-zeros for a tile of the features from c on."""
    total = splat(weight, 0.0, tile)
    for k in range(begin, end):
        at = np.int64(k) if place is None else np.int64(place[k])
        value = values[at]
        if keep is not None:
            value = value * keep[at - base]
        total = total + value * load(weight, np.int64(col[k]) * channels + c, tile, count)
    store(out, to + c, total, count)


@compiled
def _gather_rows(
    work: Any,
    rowptr: Any,
    col_: Any,
    place_: Any,
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
    """out_i = sum_k v_k W_col(k) for some rows; so many models have values and weights of their own.

    With `place`, the value of non-zero k is at place[k].
    """
    first, last, model, models, buffers = work
    col, place, width = pointer(col_, 0), pointer(place_, 0), 1 << len(tile)
    (values,) = of_model((values_,), min(model, own_values - 1), own_values)
    (weight,) = of_model((weight_,), min(model, own_weight - 1), own_weight)
    (out,) = of_model((out_,), model, models)
    keep, base = only_if(drop, pointer(buffers[0], 0)), 0
    if drop is not None:
        if place_ is None:
            base = _draw_numbers(keep, np.int64(rowptr[first]), np.int64(rowptr[last]), drop, model, four)
        else:
            _draw_numbers(keep, 0, place_.size, drop, model, four)
    whole = channels // width * width
    for i in range(first, last):
        begin, end, to = np.int64(rowptr[i]), np.int64(rowptr[i + 1]), np.int64(i) * channels
        for c in range(0, whole, width):
            _sum_tile(begin, end, col, place, values, keep, base, weight, channels, c, tile, None, out, to)
        if whole < channels:
            rest = channels - whole
            _sum_tile(begin, end, col, place, values, keep, base, weight, channels, whole, tile, rest, out, to)


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
    pattern, place = pattern.transpose if back else (pattern, None)
    drawn = (t.shape for t in (seed, dropout) if isinstance(t, Tensor))
    batch = torch.broadcast_shapes(values.shape[:-1], weight.shape[:-2], *drawn)
    channels, size = weight.size(-1), pattern.col.numel()
    shape = Shape.of(torch.empty(*batch, 0, 1, channels, dtype=weight.dtype), values, narrow=0)
    seed = seed if seed is None else seed.expand(batch)
    out, room = shape.empty(pattern.num_rows, channels), 0 if seed is None else size + 8 * DRAWN
    run(
        _gather_rows,
        shape.dtype,
        Job(elements(pattern.rowptr), shape.models, room, shape.models * size * channels),
        pattern.rowptr,
        pattern.col,
        place,
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
