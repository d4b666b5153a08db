"""Features of edges on a CPU: steps of the passes over dst for the scaled product, and kernels over edges for GATv2."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.rows import Job, Shape, run, tile_of
from ...kernels.cpu.vector import lane_sum, leaky_by, load, of_model, only_if, pointer, splat, store
from ..steps.cpu import Row, prefetch_edge, row_of_edge
from . import GATv2

BLOCK = 512  # rows that are summed one after the other
BLOCKS = 64  # blocks of edges at most; each has its share of grad W_e in memory


@inline
def dot_edges(row: Row, u: Any, ids: Any, width: int, lanes: Any, ragged: Any, p: Any, e: Any, grad: Any,
               product: Any) -> None:  # fmt: skip
    """Add <p_i, u_ij> to e for all edges of a dst; with `product`, also <dS_i, u_ij>.

    Both p and dS are `[N, D, H]`: a vector has all heads, so it is not summed.
    """
    own, step, count = (row.own - row.head) * width + row.head, row.heads, only_if(ragged, row.width)
    for k in range(row.size):
        prefetch_edge(u, ids, row, k, width)
        at, total = row_of_edge(ids, row.begin + k) * width, load(e, k * row.lanes, lanes, None)
        if product is not None:
            other = load(product, k * row.lanes, lanes, None)
        for d in range(width):
            total = total + u[at + d] * load(p, own + d * step, lanes, count)
            if product is not None:
                other = other + u[at + d] * load(grad, own + d * step, lanes, count)
        store(e, k * row.lanes, total, None)
        if product is not None:
            store(product, k * row.lanes, other, None)


@inline
def sum_edges(out: Any, row: Row, u: Any, ids: Any, width: int, wide: Any, weight: Any, shares: Any) -> None:
    """Store the sum of u_ij over the edges of a dst, times `weight` and, if present, the `shares` of the heads."""
    for h in range(row.width):
        for d in range(0, width, 1 << len(wide)):
            total = splat(u, 0.0, wide)
            for k in range(row.size):
                u_ij = load(u, row_of_edge(ids, row.begin + k) * width + d, wide, width - d)
                total = total + weight[k * row.lanes + h] * u_ij
            if shares is not None:
                total = shares[h] * total
            store(out, (row.to + h) * width + d, total, width - d)


@inline
def add_edges(grad_u: Any, row: Row, ids: Any, width: int, lanes: Any, ragged: Any, p: Any, change: Any, grad: Any,
               weight: Any) -> None:  # fmt: skip
    """Add the sum over the heads of `change` p_i + `weight` dS_i to the gradient of each u_ij; both are `[N, D, H]`."""
    own, count = (row.own - row.head) * width + row.head, only_if(ragged, row.width)
    for k in range(row.size):
        to = row_of_edge(ids, row.begin + k) * width
        changes, weights = load(change, k * row.lanes, lanes, count), load(weight, k * row.lanes, lanes, count)
        for d in range(width):
            at = own + d * row.heads
            grad_u[to + d] += lane_sum(changes * load(p, at, lanes, count) + weights * load(grad, at, lanes, count))


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
    for edge in range(first, last):
        at = row_of_edge(ids, edge) * width
        for d in range(0, width, 1 << len(wide)):
            total = splat(changes, 0.0, wide)
            for h in range(heads):
                for t in range(tiles):
                    left = channels - t * size
                    z = load(att, h * channels + t * size, tile, left)
                    z = leaky_by(z, signs, ((edge * heads + h) * tiles + t) << len(tile) >> 3, slope)
                    store(dz, 0, changes[edge * heads + h] * z, None)
                    for c in range(min(size, left)):
                        total = total + dz[c] * load(lin, (h * channels + t * size + c) * width + d, wide, width - d)
            store(grad_u, at + d, total, width - d)


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
    job = Job(np.arange(num_edges + 1), shape.models, 64, shape.models * num_edges * width * shape.heads)
    att, lin = shape.flat(score.att), shape.flat(score.lin_edge)
    operands = tile_of(width), ids, att, lin, width, changes, signs, grad
    run(_backward_edges, shape.dtype, job, shape.sizes, slope, shape.tile, *operands)
    return grad
