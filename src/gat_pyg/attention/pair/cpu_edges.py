"""Features of edges on a CPU: steps of the passes over dst for the scaled product, and kernels over edges for GATv2.

The scaled product applies W_e to a dst, not to its edges: p_i = W_e^T x_i, with <x_i, W_e u_ij> = <p_i, u_ij>, and W_e
times a sum of u_ij. Buffers have p_i and these sums for the heads of a vector, `[H, D]`, D padded to whole vectors;
with `pad`, one vector has all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.rows import Job, Shape, run, tile_of
from ...kernels.cpu.vector import (
    fold,
    lane_sum,
    leaky_by,
    load,
    of_model,
    only_if,
    per_feature,
    per_head,
    pointer,
    repeat,
    splat,
    store,
)
from ..steps.cpu import Row, prefetch_edge, row_of_edge
from . import GATv2

BLOCK = 512  # rows that are summed one after the other
BLOCKS = 64  # blocks of edges at most; each has its share of grad W_e in memory


@inline
def _stride(width: int, wide: Any) -> int:
    """Elements from one head to the next in buffers `[H, D]`: whole vectors."""
    return (width + (1 << len(wide)) - 1) >> len(wide) << len(wide)


@inline
def project(to: Any, x: Any, row: Row, lin: Any, width: int, wide: Any) -> None:
    """Fill a buffer with W_e^T x_i of each head of a dst; zeros for heads that do not exist. `lin` is `[H, C, D]`."""
    for h in range(row.lanes):
        for d in range(0, width, 1 << len(wide)):
            total = splat(x, 0.0, wide)
            if h < row.width:
                for c in range(row.channels):
                    at = ((row.head + h) * row.channels + c) * width + d
                    total = total + x[(row.own + h) * row.channels + c] * load(lin, at, wide, width - d)
            store(to, h * _stride(width, wide) + d, total, None)


@inline
def dot_edges(row: Row, u: Any, ids: Any, width: int, lanes: Any, wide: Any, pad: Any, p_i: Any, e: Any, grad_i: Any,
              product: Any) -> None:  # fmt: skip
    """Add <p_i, u_ij> to e and <grad_i, u_ij> to `product`, if present, for all edges of a dst."""
    for k in range(row.size):
        prefetch_edge(u, ids, row, k, width)
        at = row_of_edge(ids, row.begin + k) * width
        if pad is not None:
            values, to = repeat(load(u, at, wide, width), pad), k * row.lanes
            store(e, to, load(e, to, lanes, None) + per_head(load(p_i, 0, pad, None) * values, lanes), None)
            if product is not None:
                total = load(product, to, lanes, None) + per_head(load(grad_i, 0, pad, None) * values, lanes)
                store(product, to, total, None)
        else:
            for h in range(row.width):
                part, other = splat(u, 0.0, wide), splat(u, 0.0, wide)
                for d in range(0, width, 1 << len(wide)):
                    u_ij, of_head = load(u, at + d, wide, width - d), h * _stride(width, wide) + d
                    part = part + u_ij * load(p_i, of_head, wide, None)
                    if product is not None:
                        other = other + u_ij * load(grad_i, of_head, wide, None)
                e[k * row.lanes + h] += lane_sum(part)
                if product is not None:
                    product[k * row.lanes + h] += lane_sum(other)


@inline
def sum_edges(sums: Any, row: Row, u: Any, ids: Any, width: int, lanes: Any, wide: Any, pad: Any, weight: Any,
              shares: Any) -> None:  # fmt: skip
    """Store the sum of u_ij over the edges of a dst, times `weight` and, if present, the `shares` of the heads."""
    if pad is not None:
        total = splat(u, 0.0, pad)
        for k in range(row.size):
            values = repeat(load(u, row_of_edge(ids, row.begin + k) * width, wide, width), pad)
            total = total + per_feature(load(weight, k * row.lanes, lanes, None), pad) * values
        if shares is not None:
            total = per_feature(load(shares, 0, lanes, None), pad) * total
        store(sums, 0, total, None)
    else:
        for h in range(row.width):
            for d in range(0, width, 1 << len(wide)):
                part = splat(u, 0.0, wide)
                for k in range(row.size):
                    u_ij = load(u, row_of_edge(ids, row.begin + k) * width + d, wide, width - d)
                    part = part + weight[k * row.lanes + h] * u_ij
                if shares is not None:
                    part = shares[h] * part
                store(sums, h * _stride(width, wide) + d, part, None)


@inline
def embed(row: Row, h: int, c: int, tile: Any, count: Any, sums: Any, lin: Any, width: int, wide: Any,
          out: Any) -> None:  # fmt: skip
    """Add W_e times the sums of a dst to a tile of its result; `lin` is `[D, H, C]`."""
    total = load(out, row.to * row.channels + c, tile, count)
    for d in range(width):
        value = sums[h * _stride(width, wide) + d]
        total = total + value * load(lin, (d * row.heads + row.head) * row.channels + c, tile, count)
    store(out, row.to * row.channels + c, total, count)


@inline
def embed_four(of_edges: Any, row: Row, k: int, h: int, c: int, tile: Any, count: Any, u: Any, ids: Any, width: int,
               lin: Any) -> None:  # fmt: skip
    """Store a tile of W_e u_ij of four edges from k on, of the last one where there are fewer; W_e is `[D, H, C]`.

    Four edges share what is read of W_e, 16 features at once: AVX2 has registers for their sums.
    """
    part, last = tile[:4], row.begin + row.size - 1
    at, at1 = row_of_edge(ids, row.begin + k) * width, row_of_edge(ids, min(row.begin + k + 1, last)) * width
    at2 = row_of_edge(ids, min(row.begin + k + 2, last)) * width
    at3 = row_of_edge(ids, min(row.begin + k + 3, last)) * width
    for s in range(0, 1 << len(tile), 1 << len(part)):
        left = only_if(count, (h + 1) * row.channels - c - s)
        total = splat(lin, 0.0, part)
        total1, total2, total3 = total, total, total
        for d in range(width):
            values = load(lin, (d * row.heads + row.head) * row.channels + c + s, part, left)
            total, total1 = total + u[at + d] * values, total1 + u[at1 + d] * values
            total2, total3 = total2 + u[at2 + d] * values, total3 + u[at3 + d] * values
        _store_four(of_edges, s, 1 << len(tile), total, total1, total2, total3, None)


@inline
def add_outer(blocks: Any, block: int, row: Row, x: Any, sums: Any, grad: Any, shares: Any, width: int,
              wide: Any) -> None:  # fmt: skip
    """Add x_i times its sums of features of edges, and dO_i times its own, to a block of grad W_e, `[H, C, D]`."""
    stride = _stride(width, wide)
    for h in range(row.width):
        for d in range(0, width, 1 << len(wide)):
            of_x, of_grad = load(sums, h * stride + d, wide, None), load(shares, h * stride + d, wide, None)
            for c in range(row.channels):
                at = (row.own + h) * row.channels + c
                to = ((np.int64(block) * row.heads + row.head + h) * row.channels + c) * stride + d
                store(blocks, to, load(blocks, to, wide, None) + x[at] * of_x + grad[at] * of_grad, None)


@inline
def add_edges(grad_u: Any, row: Row, ids: Any, width: int, lanes: Any, wide: Any, pad: Any, p_i: Any, change: Any,
              grad_i: Any, weight: Any) -> None:  # fmt: skip
    """The gradient of each u_ij, the sum over the heads of `change` p_i + `weight` grad_i."""
    for k in range(row.size):
        to = row_of_edge(ids, row.begin + k) * width
        if pad is not None:
            values = per_feature(load(change, k * row.lanes, lanes, None), pad) * load(p_i, 0, pad, None)
            values = values + per_feature(load(weight, k * row.lanes, lanes, None), pad) * load(grad_i, 0, pad, None)
            total = fold(values, wide)
            if row.head > 0:
                total = total + load(grad_u, to, wide, width)
            store(grad_u, to, total, width)
        else:
            for d in range(0, width, 1 << len(wide)):
                part = splat(grad_u, 0.0, wide)
                if row.head > 0:
                    part = load(grad_u, to + d, wide, width - d)
                for h in range(row.width):
                    at = h * _stride(width, wide) + d
                    part = part + change[k * row.lanes + h] * load(p_i, at, wide, None)
                    part = part + weight[k * row.lanes + h] * load(grad_i, at, wide, None)
                store(grad_u, to + d, part, width - d)


@compiled
def _backward_lin(
    work: Any, sizes: Any, slope: Any, tile: Any, cuts: Any, ids_: Any, u_: Any, width: Any, changes_: Any, signs_: Any,
    blocks_: Any,
) -> None:  # fmt: skip
    """sum_ij de_ij LeakyReLU'(z_ij) u_ij of some blocks of edges, `[D, H, C]` each: grad W_e but for its factor att."""
    first, last, model, models, _ = work
    heads, channels = sizes
    ids = pointer(ids_, 0)
    u, changes, signs, blocks = of_model((u_, changes_, signs_, blocks_), model, models)
    one, size = splat(changes, 1.0, tile), 1 << len(tile)
    tiles = (channels + size - 1) >> len(tile)
    for block in range(first, last):
        for h in range(heads):
            for t in range(tiles):
                for d in range(0, width, 4):
                    total = splat(changes, 0.0, tile)
                    total1, total2, total3 = total, total, total
                    for edge in range(cuts[block], cuts[block + 1]):
                        at = row_of_edge(ids, edge) * width + d
                        z = leaky_by(one, signs, ((edge * heads + h) * tiles + t) << len(tile) >> 3, slope)
                        z = changes[edge * heads + h] * z
                        total, total1 = total + u[at] * z, total1 + u[at + 1] * z
                        total2, total3 = total2 + u[at + 2] * z, total3 + u[at + 3] * z
                    to, row = ((block * width + d) * heads + h) * channels + t * size, heads * channels
                    _store_four(blocks, to, row, total, total1, total2, total3, channels - t * size)


@inline
def _store_four(blocks: Any, to: Any, row: Any, total: Any, total1: Any, total2: Any, total3: Any, left: Any) -> None:
    """Store the first `left` of each of four sums, `row` apart."""
    store(blocks, to, total, left)
    store(blocks, to + row, total1, left)
    store(blocks, to + 2 * row, total2, left)
    store(blocks, to + 3 * row, total3, left)


@compiled
def _backward_edges(
    work: Any, sizes: Any, slope: Any, tile: Any, wide: Any, ids_: Any, att_: Any, lin_: Any, width: Any, changes_: Any,
    signs_: Any, grad_u_: Any,
) -> None:  # fmt: skip
    """grad u_ij = W_e^T (de_ij att LeakyReLU'(z_ij)) of some edges; W_e is `[H, C, D]`."""
    first, last, model, models, buffers = work
    heads, channels = sizes
    ids, dz = pointer(ids_, 0), pointer(buffers[0], 0)
    att, lin, changes, signs, grad_u = of_model((att_, lin_, changes_, signs_, grad_u_), model, models)
    size = 1 << len(tile)
    tiles = (channels + size - 1) >> len(tile)
    for begin in range(first, last, 4):  # edges that share what is read of W_e; the last one may be computed again
        last1, last2, last3 = min(begin + 1, last - 1), min(begin + 2, last - 1), min(begin + 3, last - 1)
        for d in range(0, width, 1 << len(wide)):
            total = splat(changes, 0.0, wide)
            total1, total2, total3 = total, total, total
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
                        total, total1 = total + dz[c] * values, total1 + dz[size + c] * values
                        total2, total3 = total2 + dz[2 * size + c] * values, total3 + dz[3 * size + c] * values
            store(grad_u, row_of_edge(ids, begin) * width + d, total, width - d)
            store(grad_u, row_of_edge(ids, last1) * width + d, total1, width - d)
            store(grad_u, row_of_edge(ids, last2) * width + d, total2, width - d)
            store(grad_u, row_of_edge(ids, last3) * width + d, total3, width - d)


def spread_edges(
    shape: Shape, slope: Any, u: Any, width: int, num_edges: int, ids: Any, changes: Any, signs: Any
) -> Tensor:
    """F = sum_ij f_ij u_ij, `[..., H, C, D]`, added up in the same order by any number of threads."""
    cuts = np.linspace(0, num_edges, min(BLOCKS, -(-num_edges // BLOCK)) + 1).astype(np.int64)
    count = cuts.size - 1
    blocks = shape.empty(count, width, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, shape.models * num_edges * width * shape.heads)
    operands = cuts, ids, u, width, changes, signs, blocks
    run(_backward_lin, shape.dtype, job, shape.sizes, slope, shape.tile, *operands)
    return shape.sum(blocks).movedim(-3, -1)


def attr_gradient(shape: Shape, score: GATv2, slope: Any, num_edges: int, ids: Any, changes: Any, signs: Any) -> Tensor:
    """The gradient of the features of the edges, `[..., R, D]`."""
    assert score.edge_attr is not None
    rows, width = score.edge_attr.shape[-2:]
    grad = shape.empty(rows, width).zero_()
    job = Job(np.arange(num_edges + 1), shape.models, 256, shape.models * num_edges * width * shape.heads)
    att, lin = shape.flat(score.att), shape.flat(score.lin_edge)
    operands = tile_of(min(width, 16)), ids, att, lin, width, changes, signs, grad
    run(_backward_edges, shape.dtype, job, shape.sizes, slope, shape.tile, *operands)
    return grad
