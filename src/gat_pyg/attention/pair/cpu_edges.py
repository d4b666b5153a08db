"""Features of edges on a CPU: steps of the passes over dst for the scaled product, and kernels over edges for GATv2.

The scaled product applies W_e to a dst, not to its edges: p_i = W_e^T x_i, with <x_i, W_e u_ij> = <p_i, u_ij>, and W_e
times a sum of u_ij. Buffers have p_i and these sums for the heads of a vector, `[H, D]`, D padded to whole vectors.
`features` are the types of these vectors, `wide`, of those that are computed at once, `pad`, and of their `heads`: one
vector has all heads where that is short enough, else one head, `()`, and part of its features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.rows import Job, Shape, run, tile_of
from ...kernels.cpu.vector import fold, leaky_by, load, of_model, only_if, per_feature, pointer, repeat, splat, store
from ..steps.cpu import Row, add_sums, prefetch_edge, row_of_edge
from . import GATv2

BLOCK = 512  # rows that are summed one after the other
BLOCKS = 64  # blocks of edges at most; each has its share of grad W_e in memory


@inline
def _stride(width: int, wide: Any) -> int:
    """Elements from one head to the next in buffers `[H, D]`: whole vectors."""
    return (width + (1 << len(wide)) - 1) >> len(wide) << len(wide)


@inline
def project(to: Any, x: Any, row: Row, lin: Any, width: int, features: Any) -> None:
    """Fill a buffer with W_e^T x_i of each head of a dst; zeros for heads that do not exist. `lin` is `[H, C, D]`."""
    wide = features[0]
    for h in range(row.lanes):
        for d in range(0, width, 1 << len(wide)):
            total = splat(x, 0.0, wide)
            if h < row.width:
                for c in range(row.channels):
                    at = ((row.head + h) * row.channels + c) * width + d
                    total = total + x[(row.own + h) * row.channels + c] * load(lin, at, wide, width - d)
            store(to, h * _stride(width, wide) + d, total, None)


@inline
def dot_edges(row: Row, u: Any, ids: Any, width: int, features: Any, p_i: Any, e: Any, grad_i: Any,
              product: Any) -> None:  # fmt: skip
    """Add <p_i, u_ij> to e and <grad_i, u_ij> to `product`, if present, for all edges of a dst."""
    wide, pad, heads = features
    for k in range(row.size):
        prefetch_edge(u, ids, row, k, width)
        at = row_of_edge(ids, row.begin + k) * width
        for h in range(0, row.width, 1 << len(heads)):
            part, other = splat(u, 0.0, pad), splat(u, 0.0, pad)
            for d in range(0, width, 1 << len(wide)):
                u_ij, of_head = repeat(load(u, at + d, wide, width - d), pad), h * _stride(width, wide) + d
                part = part + u_ij * load(p_i, of_head, pad, None)
                other = other + u_ij * load(grad_i, of_head, pad, None)
            add_sums(e, k * row.lanes + h, part, heads)
            add_sums(product, k * row.lanes + h, other, heads)


@inline
def sum_edges(sums: Any, row: Row, u: Any, ids: Any, width: int, features: Any, weight: Any, shares: Any) -> None:
    """Store the sum of u_ij over the edges of a dst, times `weight` and, if present, the `shares` of the heads."""
    wide, pad, heads = features
    for h in range(0, row.width, 1 << len(heads)):
        for d in range(0, width, 1 << len(wide)):
            part = splat(u, 0.0, pad)
            for k in range(row.size):
                u_ij = repeat(load(u, row_of_edge(ids, row.begin + k) * width + d, wide, width - d), pad)
                part = part + per_feature(load(weight, k * row.lanes + h, heads, None), pad) * u_ij
            part = per_feature(load(shares, h, heads, None), pad) * part
            store(sums, h * _stride(width, wide) + d, part, None)


@inline
def embed(row: Row, h: int, c: int, tile: Any, count: Any, sums: Any, lin: Any, width: int, features: Any,
          out: Any) -> None:  # fmt: skip
    """Add W_e times the sums of a dst to a tile of its result; `lin` is `[D, H, C]`."""
    total = load(out, row.to * row.channels + c, tile, count)
    for d in range(width):
        value = sums[h * _stride(width, features[0]) + d]
        total = total + value * load(lin, (d * row.heads + row.head) * row.channels + c, tile, count)
    store(out, row.to * row.channels + c, total, count)


@inline
def _rows_of_four(ids: Any, edge: Any, last: Any, width: int) -> Any:
    """Where the features of four edges begin; those of the last one again where there are fewer."""
    first, second = row_of_edge(ids, edge) * width, row_of_edge(ids, min(edge + 1, last)) * width
    return first, second, row_of_edge(ids, min(edge + 2, last)) * width, row_of_edge(ids, min(edge + 3, last)) * width


@inline
def _add_four(totals: Any, factors: Any, at: Any, places: Any, values: Any) -> Any:
    """Four sums, plus `factors[at + place]` of each times the same values."""
    (one, two, three, four), (a, b, c, d) = totals, places
    one, two = one + factors[at + a] * values, two + factors[at + b] * values
    return one, two, three + factors[at + c] * values, four + factors[at + d] * values


@inline
def _store_four(array: Any, at: Any, places: Any, totals: Any, left: Any) -> None:
    """Store the first `left` of each of four sums at its place from `at` on."""
    (one, two, three, four), (a, b, c, d) = totals, places
    store(array, at + a, one, left)
    store(array, at + b, two, left)
    store(array, at + c, three, left)
    store(array, at + d, four, left)


@inline
def embed_four(of_edges: Any, row: Row, k: int, h: int, c: int, tile: Any, count: Any, u: Any, ids: Any, width: int,
               lin: Any) -> None:  # fmt: skip
    """Store a tile of W_e u_ij of four edges from k on, of the last one where there are fewer; W_e is `[D, H, C]`.

    Four edges share what is read of W_e, 16 features at once: AVX2 has registers for their sums.
    """
    part, size = tile[:4], 1 << len(tile)
    rows = _rows_of_four(ids, row.begin + k, row.begin + row.size - 1, width)
    for s in range(0, size, 1 << len(part)):
        left, zero = only_if(count, (h + 1) * row.channels - c - s), splat(lin, 0.0, part)
        totals = zero, zero, zero, zero
        for d in range(width):
            values = load(lin, (d * row.heads + row.head) * row.channels + c + s, part, left)
            totals = _add_four(totals, u, d, rows, values)
        _store_four(of_edges, s, (0, size, 2 * size, 3 * size), totals, None)


@inline
def add_outer(blocks: Any, block: int, row: Row, x: Any, sums: Any, grad: Any, shares: Any, width: int,
              features: Any) -> None:  # fmt: skip
    """Add x_i times its sums of features of edges, and dO_i times its own, to a block of grad W_e, `[H, C, D]`."""
    wide, stride = features[0], _stride(width, features[0])
    for h in range(row.width):
        for d in range(0, width, 1 << len(wide)):
            of_x, of_grad = load(sums, h * stride + d, wide, None), load(shares, h * stride + d, wide, None)
            for c in range(row.channels):
                at = (row.own + h) * row.channels + c
                to = ((np.int64(block) * row.heads + row.head + h) * row.channels + c) * stride + d
                store(blocks, to, load(blocks, to, wide, None) + x[at] * of_x + grad[at] * of_grad, None)


@inline
def add_edges(grad_u: Any, row: Row, ids: Any, width: int, features: Any, p_i: Any, change: Any, grad_i: Any,
              weight: Any) -> None:  # fmt: skip
    """The gradient of each u_ij, the sum over the heads of `change` p_i + `weight` grad_i."""
    wide, pad, heads = features
    for k in range(row.size):
        to = row_of_edge(ids, row.begin + k) * width
        for d in range(0, width, 1 << len(wide)):
            part = splat(p_i, 0.0, pad)
            for h in range(0, row.width, 1 << len(heads)):
                at, of_head = k * row.lanes + h, h * _stride(width, wide) + d
                part = part + per_feature(load(weight, at, heads, None), pad) * load(grad_i, of_head, pad, None)
                part = part + per_feature(load(change, at, heads, None), pad) * load(p_i, of_head, pad, None)
            total = fold(part, wide)
            if row.head > 0:
                total = total + load(grad_u, to + d, wide, width - d)
            store(grad_u, to + d, total, width - d)


@compiled
def _backward_lin(
    work: Any, sizes: Any, layout: Any, slope: Any, cuts: Any, width: Any, ids_: Any, operands: Any, blocks_: Any
) -> None:
    """sum_ij de_ij LeakyReLU'(z_ij) u_ij of some blocks of edges, `[D, H, C]` each: grad W_e but for its factor att."""
    (first, last, model, models, _), (heads, channels), tile = work, sizes, layout[2]
    (u, changes, signs), (blocks,) = of_model(operands, model, models), of_model((blocks_,), model, models)
    ids = pointer(ids_, 0)
    one, zero, size = splat(changes, 1.0, tile), splat(changes, 0.0, tile), 1 << len(tile)
    tiles, row = (channels + size - 1) >> len(tile), heads * channels
    for block in range(first, last):
        for h in range(heads):
            for t in range(tiles):
                for d in range(0, width, 4):
                    totals = zero, zero, zero, zero
                    for edge in range(cuts[block], cuts[block + 1]):
                        z = leaky_by(one, signs, ((edge * heads + h) * tiles + t) << len(tile) >> 3, slope)
                        z = changes[edge * heads + h] * z
                        totals = _add_four(totals, u, row_of_edge(ids, edge) * width + d, (0, 1, 2, 3), z)
                    to = ((block * width + d) * heads + h) * channels + t * size
                    _store_four(blocks, to, (0, row, 2 * row, 3 * row), totals, channels - t * size)


@compiled
def _backward_edges(
    work: Any, sizes: Any, layout: Any, slope: Any, wide: Any, width: Any, ids_: Any, operands: Any, grad_u_: Any
) -> None:
    """grad u_ij = W_e^T (de_ij att LeakyReLU'(z_ij)) of some edges; W_e is `[H, C, D]`."""
    (first, last, model, models, buffers), (heads, channels), tile = work, sizes, layout[2]
    (att, lin, changes, signs), (grad_u,) = of_model(operands, model, models), of_model((grad_u_,), model, models)
    ids, dz = pointer(ids_, 0), pointer(buffers[0], 0)
    size, zero = 1 << len(tile), splat(changes, 0.0, wide)
    tiles = (channels + size - 1) >> len(tile)
    for begin in range(first, last, 4):  # edges that share what is read of W_e; the last one may be computed again
        for d in range(0, width, 1 << len(wide)):
            totals = zero, zero, zero, zero
            for h in range(heads):
                for t in range(tiles):
                    left = channels - t * size
                    att_h = load(att, h * channels + t * size, tile, left)
                    for k in range(4):
                        edge = min(begin + k, last - 1)
                        z = leaky_by(att_h, signs, ((edge * heads + h) * tiles + t) << len(tile) >> 3, slope)
                        store(dz, k << len(tile), changes[edge * heads + h] * z, None)
                    for c in range(min(size, left)):
                        values = load(lin, (h * channels + t * size + c) * width + d, wide, width - d)
                        totals = _add_four(totals, dz, c, (0, size, 2 * size, 3 * size), values)
            _store_four(grad_u, d, _rows_of_four(ids, begin, last - 1, width), totals, width - d)


def spread_edges(
    shape: Shape, slope: Any, u: Any, width: int, num_edges: int, ids: Any, changes: Any, signs: Any
) -> Tensor:
    """F = sum_ij f_ij u_ij, `[..., H, C, D]`, added up in the same order by any number of threads."""
    cuts = np.linspace(0, num_edges, min(BLOCKS, -(-num_edges // BLOCK)) + 1).astype(np.int64)
    blocks = shape.empty(cuts.size - 1, width, shape.heads, shape.channels)
    job = Job(np.arange(cuts.size), 0, shape.models * num_edges * width * shape.heads)
    run(_backward_lin, shape, job, slope, cuts, width, ids, (u, changes, signs), blocks)
    return shape.sum(blocks).movedim(-3, -1)


def attr_gradient(shape: Shape, score: GATv2, slope: Any, num_edges: int, ids: Any, changes: Any, signs: Any) -> Tensor:
    """The gradient of the features of the edges, `[..., R, D]`."""
    assert score.edge_attr is not None
    rows, width = score.edge_attr.shape[-2:]
    grad = shape.empty(rows, width).zero_()
    job = Job(np.arange(num_edges + 1), 256, shape.models * num_edges * width * shape.heads)
    operands = shape.flat(score.att), shape.flat(score.lin_edge), changes, signs
    run(_backward_edges, shape, job, slope, tile_of(min(width, 16)), width, ids, operands, grad)
    return grad
