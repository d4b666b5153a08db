"""GATv2 on a CPU: e_ij = att . LeakyReLU(z_ij) with z_ij = x_i + x_j + W_e u_ij.

W_e u_ij is made in registers, a tile at a time, whenever z_ij is needed. The backward pass over dst leaves a bit for
each z: whether it is positive. With these, the pass over src and that over the edges need no z.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Job, Shape, chunks_of, edge_ids, merge_sums, run, tile_of
from ...kernels.cpu.vector import (
    lane_sum,
    larger,
    leaky,
    leaky_by,
    load,
    of_model,
    only_if,
    only_if_any,
    pointer,
    splat,
    store,
    store_signs,
)
from ..steps.cpu import (
    Row,
    attend,
    clear,
    each_tile,
    load_edges,
    load_end,
    load_factors,
    load_lse,
    merge,
    prefetch_edge,
    prefetch_end,
    row_of,
    row_of_edge,
    softmax_back,
    weighted_sum,
)
from . import GATv2

BLOCK = 512  # rows that are summed one after the other
BLOCKS = 64  # of edges, at most, whose shares of grad W_e are held


@inline
def _scores(row: Row, h: int, c: int, tile: Any, count: Any, x_dst: Any, x: Any, u: Any, lin: Any, ids: Any, width: int,
            e: Any, grad: Any, product: Any, signs: Any, att: Any, slope: Any) -> None:  # fmt: skip
    """Add one tile's part of e_ij for all edges of a dst; with `product`, also of <dO_i, x_j>, and the signs of z."""
    x_i = load(x_dst, row.own * row.channels + c, tile, count)
    att_h = load(att, row.head * row.channels + c, tile, count)
    if product is not None:
        grad_i = load(grad, row.own * row.channels + c, tile, count)
    for k in range(row.size):
        prefetch_end(x, row, k, c, tile)
        values = load_end(x, row, k, c, tile, count)
        if product is not None:
            product[k * row.lanes + h] += lane_sum(grad_i * values)
        z = values + x_i
        if u is not None:
            prefetch_edge(u, ids, row, k, width)
            at = row_of_edge(ids, row.begin + k) * width
            for d in range(width):
                z = z + u[at + d] * load(lin, (d * row.heads + row.head) * row.channels + c, tile, count)
        if signs is not None:
            store_signs(signs, _sign(row, np.int64(row.begin + k), h, c, tile), z)
        e[k * row.lanes + h] += lane_sum(att_h * leaky(z, z, slope))


@inline
def _sign(row: Row, edge: Any, h: int, c: int, tile: Any) -> Any:
    """The byte with the signs of a tile; c is its first feature, h included. An edge has whole bytes for each tile."""
    tiles = (row.channels + (1 << len(tile)) - 1) >> len(tile)
    return (((edge * row.heads + row.head + h) * tiles) << len(tile) >> 3) + ((c - h * row.channels) >> 3)


@inline
def _spread(row: Row, h: int, c: int, tile: Any, count: Any, signs: Any, place: Any, de: Any, slope: Any,
            out: Any) -> None:  # fmt: skip
    """A tile of sum de_ij LeakyReLU'(z_ij) over the edges of a row; `place` is their place grouped by dst."""
    total, one = splat(de, 0.0, tile), splat(de, 1.0, tile)
    for k in range(row.size):
        edge = np.int64(row.begin + k) if place is None else np.int64(place[row.begin + k])
        total = total + de[k * row.lanes + h] * leaky_by(one, signs, _sign(row, edge, h, c, tile), slope)
    store(out, row.to * row.channels + c, total, count)


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    x_: Any,
    x_dst_: Any,
    att_: Any,
    u_: Any,
    lin_: Any,
    width: Any,
    w_: Any,
    out_: Any,
    lse_: Any,
) -> None:
    """The scores of some chunks, then equations (2) and (4)."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, x_dst, att, out, lse = of_model((x_, x_dst_, att_, out_, lse_), model, models)
    u, lin, w = of_model((u_, lin_, w_), model, models)
    keep = only_if_any((drop, w_), pointer(buffers[0], 0))
    weight, shares = pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            load_factors(keep, drop, w, ids, row, model, lanes, ragged)
            clear(weight, row)
            each_tile(_scores, tile, row, x_dst, x, u, lin, ids, width, weight, None, None, None, att, slope)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                tops = larger(tops, load(weight, k * row.lanes, lanes, None))
            attend(row, weight, keep, shares, tops, x, out, lse, layout)


@compiled
def _backward_dst(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    ids_: Any,
    grad_: Any,
    x_: Any,
    x_dst_: Any,
    att_: Any,
    u_: Any,
    lin_: Any,
    width: Any,
    w_: Any,
    lse_: Any,
    delta_: Any,
    weights_: Any,
    changes_: Any,
    signs_: Any,
    grad_w_: Any,
    grad_dst_: Any,
) -> None:
    """Of some chunks, k_ij w_ij alpha_ij, de_ij = alpha_ij (g_ij - D_i), the signs of z_ij and the `_spread` of dst."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    grad, x, x_dst, att, lse, delta = of_model((grad_, x_, x_dst_, att_, lse_, delta_), model, models)
    u, lin, w, grad_w, grad_dst = of_model((u_, lin_, w_, grad_w_, grad_dst_), model, models)
    weights, changes, signs = of_model((weights_, changes_, signs_), model, models)
    keep, e, product = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    one = grad_.dtype.type(1)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            clear(e, row)
            clear(product, row)
            each_tile(_scores, tile, row, x_dst, x, u, lin, ids, width, e, grad, product, signs, att, slope)
            top, share, mean = load_lse(lse, delta, row, lanes, ragged)
            for k in range(row.size):
                softmax_back(row, k, one, e, product, keep, w, ids, top, share, mean, weights, changes, grad_w, lanes,
                             ragged)  # fmt: skip
            each_tile(_spread, tile, row, signs, None, product, slope, grad_dst)


@compiled
def _backward_src(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    layout: Any,
    dst_: Any,
    place_: Any,
    grad_: Any,
    weights_: Any,
    changes_: Any,
    signs_: Any,
    grad_x_: Any,
    grad_src_: Any,
) -> None:
    """sum k_ij w_ij alpha_ij dO_i of some chunks of src rows, and the `_spread` of each src."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    dst, place = pointer(dst_, 0), pointer(place_, 0)
    grad, weights, changes, signs = of_model((grad_, weights_, changes_, signs_), model, models)
    grad_x, grad_src = of_model((grad_x_, grad_src_), model, models)
    weight, change = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes)
            load_edges(weight, weights, row, place, lanes, ragged)
            load_edges(change, changes, row, place, lanes, ragged)
            each_tile(weighted_sum, tile, row, grad, weight, None, None, grad_x, None)
            each_tile(_spread, tile, row, signs, place, change, slope, grad_src)


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


@compiled
def _multiply_blocks(work: Any, a_: Any, b_: Any, rows: Any, row: Any, blocks_: Any) -> None:
    """sum_n a_n b_n, element by element, over each block of `BLOCK` rows."""
    first, last, model, models, _ = work
    a, b, blocks = of_model((a_, b_, blocks_), model, models)
    for block in range(first, last):
        for c in range(row):
            blocks[block * row + c] = 0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            for c in range(row):
                blocks[block * row + c] += a[n * row + c] * b[n * row + c]


def forward(
    x: Tensor,
    score: GATv2,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator)."""
    shape, chunks = Shape.of(x, edge_weight, *score.operands, narrow=False), chunks_of(edges, "dst")
    heads, channels, rows = shape.heads, shape.channels, edges.num_dst
    out, lse = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    run(
        _forward,
        shape.dtype,
        shape.job(chunks.bounds, chunks.most, edges),
        chunks.arrays,
        shape.sizes,
        shape.dtype.type(score.negative_slope),
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        _ids(edges, score, edge_weight),
        shape.flat(x),
        shape.flat(score.x_dst),
        shape.flat(score.att),
        *_edge_operands(shape, score),
        shape.flat(edge_weight),
        out,
        lse,
    )
    merge(shape, chunks, out, lse)
    return shape.tensor(out, rows, heads, channels).to(dtype), shape.tensor(lse, rows, heads, 2)


def _ids(edges: Edges, score: GATv2, edge_weight: Tensor | None) -> Any:
    """The rows of the edges, where something belongs to single edges."""
    return None if score.edge_attr is None and edge_weight is None else edge_ids(edges)


def _edge_operands(shape: Shape, score: GATv2) -> tuple[Any, Any, int]:
    """u `[R, D]`, W_e as `[D, H, C]`, and D, made a multiple of 4 with zeros."""
    if score.edge_attr is None or score.lin_edge is None:
        return None, None, 0
    width = score.edge_attr.size(-1)
    more = -width % 4
    u, lin = (F.pad(t.detach(), (0, more)) if more else t for t in (score.edge_attr, score.lin_edge))
    return shape.flat(u), shape.flat(lin.movedim(-1, -3)), width + more


def backward(
    grad: Tensor,
    x: Tensor,
    score: GATv2,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> dict[str, Tensor | None]:
    """The gradients, by f_ij = de_ij LeakyReLU'(z_ij).

    Of att . LeakyReLU(z) they are de att LeakyReLU'(z) for z and de LeakyReLU(z) = f z for att. So with the sums
    B_i = sum_j f_ij, A_j = sum_i f_ij and F = sum_ij f_ij u_ij, grad x_i = att B_i, grad x_j = att A_j + sum_i k w
    alpha dO_i, grad W_e = att F, and grad att = sum_i x_i B_i + sum_j x_j A_j + W_e F. Of an edge, two numbers a head
    and a bit a feature are held.
    """
    x_dst, att, (lse,) = score.x_dst, score.att, saved
    shape = Shape.of(x, edge_weight, *score.operands, narrow=False)
    heads, channels = shape.heads, shape.channels
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    slope, ids = shape.dtype.type(score.negative_slope), _ids(edges, score, edge_weight)
    g, flat_x, flat_x_dst = (shape.flat(t) for t in (grad, x, x_dst))
    u, lin, width = _edge_operands(shape, score)
    delta = shape.flat(torch.einsum("...c,...c->...", grad.to(lse.dtype), out.to(lse.dtype)))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    tile = 1 << len(shape.tile)
    signs = np.empty(shape.models * edges.num_edges * heads * -(-channels // tile) * tile // 8, np.uint8)
    grad_w = shape.empty(edges.num_edges, heads) if needs[1] else None
    flat_dst = shape.empty(by_dst.slots, heads, channels)
    run(
        _backward_dst,
        shape.dtype,
        shape.job(by_dst.bounds, by_dst.most, edges),
        by_dst.arrays,
        shape.sizes,
        slope,
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        ids,
        g,
        flat_x,
        flat_x_dst,
        shape.flat(att),
        u,
        lin,
        width,
        shape.flat(edge_weight),
        shape.flat(lse),
        delta,
        weights,
        changes,
        signs,
        grad_w,
        flat_dst,
    )
    flat_grad, flat_src = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    operands = dst.numpy(), place.numpy(), g, weights, changes, signs, flat_grad, flat_src
    job = shape.job(by_src.bounds, by_src.most, edges)
    run(_backward_src, shape.dtype, job, by_src.arrays, shape.sizes, slope, shape.layout, *operands)
    merge_sums(shape.models, by_dst, heads * channels, flat_dst)
    merge_sums(shape.models, by_src, heads * channels, flat_grad, flat_src)
    grad_x = shape.tensor(flat_grad, edges.num_src, heads, channels)
    spread_src = shape.tensor(flat_src, edges.num_src, heads, channels)
    spread_dst = shape.tensor(flat_dst, edges.num_dst, heads, channels)
    # slots of long rows may follow the rows of the sums
    grad_att = _column_dots(shape, flat_x, flat_src, edges.num_src)
    grad_att += _column_dots(shape, flat_x_dst, flat_dst, edges.num_dst)
    wide = att.to(grad_x.dtype).unsqueeze(-3)
    grads: dict[str, Tensor | None] = {}
    if score.edge_attr is not None and score.lin_edge is not None:
        each = edges.num_edges, ids, changes, signs
        if needs[4]:
            grads["edge_attr"] = _grad_edge_attr(shape, score, slope, *each)
        spread = _spread_edges(shape, slope, u, width, *each)[..., : score.lin_edge.size(-1)]
        grad_att += (score.lin_edge.to(spread.dtype) * spread).sum(-1)
        grads["lin_edge"] = (att.to(spread.dtype).unsqueeze(-1) * spread).contiguous()
    if grad_w is not None:
        grads["edge_weight"] = edges.ungroup(shape.tensor(grad_w, edges.num_edges, heads), len(shape.batch))
    return grads | {"x": grad_x.addcmul_(spread_src, wide), "x_dst": spread_dst.mul_(wide), "att": grad_att}


def _spread_edges(
    shape: Shape, slope: Any, u: Any, width: int, num_edges: int, ids: Any, changes: Any, signs: Any
) -> Tensor:
    """F = sum_ij f_ij u_ij, `[..., H, C, D]`, added up in the same order by any number of threads."""
    cuts = np.linspace(0, num_edges, min(BLOCKS, -(-num_edges // BLOCK)) + 1).astype(np.int64)
    count = cuts.size - 1
    blocks = shape.empty(count, width, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, shape.models * num_edges * width * shape.heads)
    operands = cuts, ids, u, width, changes, signs, blocks
    run(_backward_lin, shape.dtype, job, shape.sizes, slope, shape.tile, *operands)
    sums = blocks.reshape(shape.models, count, width * shape.heads * shape.channels).sum(1).reshape(-1)
    return shape.tensor(sums, width, shape.heads, shape.channels).movedim(-3, -1)


def _grad_edge_attr(
    shape: Shape, score: GATv2, slope: Any, num_edges: int, ids: Any, changes: Any, signs: Any
) -> Tensor:
    """The gradient of the features of the edges, `[..., R, D]`."""
    assert score.edge_attr is not None
    rows, width = score.edge_attr.shape[-2:]
    grad = np.zeros(shape.models * rows * width, shape.dtype)
    job = Job(np.arange(num_edges + 1), shape.models, 64, shape.models * num_edges * width * shape.heads)
    att, lin = shape.flat(score.att), shape.flat(score.lin_edge)
    operands = tile_of(width), ids, att, lin, width, changes, signs, grad
    run(_backward_edges, shape.dtype, job, shape.sizes, slope, shape.tile, *operands)
    return shape.tensor(grad, rows, width)


def _column_dots(shape: Shape, a: np.ndarray, b: np.ndarray, rows: int) -> Tensor:
    """Return sum_n a_n b_n `[..., H, C]` of two `[..., N, H, C]`, added up in the same order by any number of threads.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    count, row = -(-rows // BLOCK), shape.heads * shape.channels
    blocks = shape.empty(count, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, 2 * shape.models * rows * row)
    run(_multiply_blocks, shape.dtype, job, a, b, rows, row, blocks)
    sums = blocks.reshape(shape.models, count, row).sum(1)
    return shape.tensor(sums.reshape(-1), 1, shape.heads, shape.channels).squeeze(-3)
