"""Attention whose score needs the features of both ends on a CPU: GATv2, and the scaled dot product."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import Job, Shape, chunks_of, merge_sums, run
from ...kernels.cpu.vector import (
    lane_sum,
    larger,
    leaky,
    load,
    of_model,
    only_if,
    pointer,
    splat,
    store,
)
from ..steps.cpu import (
    Row,
    attend,
    clear,
    dot,
    each_tile,
    load_edges,
    load_end,
    load_lse,
    merge,
    prefetch_end,
    row_of,
    softmax_back,
    weighted_sum,
)
from . import Dot, GATv2

BLOCK = 512  # rows that are summed one after the other


@inline
def _score(row: Row, h: int, c: int, tile: Any, count: Any, x_dst: Any, x: Any, e: Any, grad: Any, product: Any,
           att: Any, slope: Any) -> None:  # fmt: skip
    """Add one tile's part of att . LeakyReLU(x_j + x_i) for all edges of a dst; with `product`, also of <dO_i, x_j>."""
    x_i = load(x_dst, row.own * row.channels + c, tile, count)
    att_h = load(att, row.head * row.channels + c, tile, count)
    if product is not None:
        grad_i = load(grad, row.own * row.channels + c, tile, count)
    for k in range(row.size):
        prefetch_end(x, row, k, c, tile)
        values = load_end(x, row, k, c, tile, count)
        if product is not None:
            product[k * row.lanes + h] += lane_sum(grad_i * values)
        values = values + x_i
        e[k * row.lanes + h] += lane_sum(att_h * leaky(values, values, slope))


@inline
def _scores(tile: Any, row: Row, x_dst: Any, x: Any, e: Any, grad: Any, product: Any, att: Any, slope: Any) -> None:
    """Both scores: GATv2's with `att`, the dot product without."""
    clear(e, row)
    if product is not None:
        clear(product, row)
    if att is not None:
        each_tile(_score, tile, row, x_dst, x, e, grad, product, att, slope)
    else:
        each_tile(dot, tile, row, x_dst, x, e, grad, product)


@inline
def _spread(row: Row, h: int, c: int, tile: Any, count: Any, x: Any, x_end: Any, de: Any, att: Any, slope: Any,
            out: Any) -> None:  # fmt: skip
    """A tile of sum de_ij LeakyReLU'(x_j + x_i), or of sum de_ij x_j, over the other ends of a row's edges."""
    end = load(x_end, row.own * row.channels + c, tile, count)
    one, total = splat(x, 1.0, tile), splat(x, 0.0, tile)
    for k in range(row.size):
        values = load_end(x, row, k, c, tile, count)
        if att is not None:
            values = leaky(one, values + end, slope)
        total = total + de[k * row.lanes + h] * values
    store(out, row.to * row.channels + c, total, count)


@compiled
def _forward(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    scale: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    x_: Any,
    x_dst_: Any,
    att_: Any,
    out_: Any,
    lse_: Any,
) -> None:
    """The scores of some chunks, `scale` times, then equations (2) and (4)."""
    first, last, model, models, buffers = work
    lanes, tile, _ = layout
    src = pointer(src_, 0)
    x, x_dst, att, out, lse = of_model((x_, x_dst_, att_, out_, lse_), model, models)
    keep, weight, shares = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            _scores(tile, row, x_dst, x, weight, None, None, att, slope)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                e = scale * load(weight, k * row.lanes, lanes, None)
                tops = larger(tops, e)
                store(weight, k * row.lanes, e, None)
            attend(row, weight, keep, shares, tops, x, out, lse, layout)


@compiled
def _backward_dst(
    work: Any,
    chunks: Any,
    sizes: Any,
    slope: Any,
    scale: Any,
    layout: Any,
    drop: Any,
    src_: Any,
    grad_: Any,
    x_: Any,
    x_dst_: Any,
    att_: Any,
    lse_: Any,
    delta_: Any,
    weights_: Any,
    changes_: Any,
    grad_dst_: Any,
) -> None:
    """k_ij alpha_ij and de_ij = alpha_ij (g_ij - D_i) of some chunks, grouped by dst, and the `_spread` of each dst."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src = pointer(src_, 0)
    grad, x, x_dst, att, lse, delta = of_model((grad_, x_, x_dst_, att_, lse_, delta_), model, models)
    weights, changes, grad_dst = of_model((weights_, changes_, grad_dst_), model, models)
    keep, e, product = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes)
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            _scores(tile, row, x_dst, x, e, grad, product, att, slope)
            top, share, mean = load_lse(lse, delta, row, lanes, ragged)
            for k in range(row.size):
                softmax_back(row, k, scale, e, product, keep, top, share, mean, weights, changes, lanes, ragged)
            each_tile(_spread, tile, row, x, x_dst, product, att, slope, grad_dst)


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
    x_: Any,
    x_dst_: Any,
    att_: Any,
    weights_: Any,
    changes_: Any,
    grad_x_: Any,
    grad_src_: Any,
) -> None:
    """sum k_ij alpha_ij dO_i of some chunks of src rows, and the `_spread` of each src."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    dst, place = pointer(dst_, 0), pointer(place_, 0)
    grad, x, x_dst, att, weights, changes = of_model((grad_, x_, x_dst_, att_, weights_, changes_), model, models)
    grad_x, grad_src = of_model((grad_x_, grad_src_), model, models)
    weight, change = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes)
            load_edges(weight, weights, row, place, lanes, ragged)
            load_edges(change, changes, row, place, lanes, ragged)
            each_tile(weighted_sum, tile, row, grad, weight, None, None, grad_x, None)
            each_tile(_spread, tile, row, x_dst, x, change, att, slope, grad_src)


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
    score: GATv2 | Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    saves_output: bool,
) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator) for e_ij = att . LeakyReLU(x_j + x_i).

    Without `att`, e_ij = <x_i, x_j> / sqrt(C).
    """
    x_dst, att = score.x_dst, score.att
    shape, chunks = Shape.of(x, x_dst, att, narrow=False), chunks_of(edges, "dst")
    heads, channels, rows = shape.heads, shape.channels, edges.num_dst
    out, lse = shape.empty(chunks.slots, heads, channels), shape.empty(chunks.slots, heads, 2)
    run(
        _forward,
        shape.dtype,
        shape.job(chunks.bounds, chunks.most, edges),
        chunks.arrays,
        shape.sizes,
        *_constants(score, shape),
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        shape.flat(x),
        shape.flat(x_dst),
        shape.flat(att),
        out,
        lse,
    )
    merge(shape, chunks, out, lse)
    return shape.tensor(out, rows, heads, channels).to(dtype), shape.tensor(lse, rows, heads, 2)


def _constants(score: GATv2 | Dot, shape: Shape) -> tuple[Any, Any]:
    """The negative slope and the factor of the scores."""
    scale = 1.0 if score.att is not None else max(shape.channels, 1) ** -0.5
    return shape.dtype.type(score.negative_slope), shape.dtype.type(scale)


def backward(
    grad: Tensor,
    x: Tensor,
    score: GATv2 | Dot,
    edges: Edges,
    edge_weight: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> dict[str, Tensor | None]:
    """The gradients of x, x_dst and att.

    Of att . LeakyReLU(v), v = x_j + x_i, they are de att LeakyReLU'(v) for both ends and de LeakyReLU(v) for att,
    which is de v LeakyReLU'(v). So with B_i = sum_j de LeakyReLU'(v) and A_j the same sum over i, grad x_i = att B_i,
    grad x_j = att A_j + sum_i k alpha dO_i and grad att = sum_i x_i B_i + sum_j x_j A_j: nothing is kept of an edge
    but two numbers a head.
    """
    x_dst, att, (lse,) = score.x_dst, score.att, saved
    shape = Shape.of(x, x_dst, att, narrow=False)
    heads, channels = shape.heads, shape.channels
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    slope, scale = _constants(score, shape)
    g, flat_x, flat_x_dst, flat_att = (shape.flat(t) for t in (grad, x, x_dst, att))
    delta = shape.flat((grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    flat_dst = shape.empty(by_dst.slots, heads, channels)
    run(
        _backward_dst,
        shape.dtype,
        shape.job(by_dst.bounds, by_dst.most, edges),
        by_dst.arrays,
        shape.sizes,
        slope,
        scale,
        shape.layout,
        shape.drop(seed, dropout, edges.dropout_ids_by_dst),
        edges.src.numpy(),
        g,
        flat_x,
        flat_x_dst,
        flat_att,
        shape.flat(lse),
        delta,
        weights,
        changes,
        flat_dst,
    )
    flat_grad, flat_src = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    run(
        _backward_src,
        shape.dtype,
        shape.job(by_src.bounds, by_src.most, edges),
        by_src.arrays,
        shape.sizes,
        slope,
        shape.layout,
        dst.numpy(),
        place.numpy(),
        g,
        flat_x,
        flat_x_dst,
        flat_att,
        weights,
        changes,
        flat_grad,
        flat_src,
    )
    merge_sums(shape.models, by_dst, heads * channels, flat_dst)
    merge_sums(shape.models, by_src, heads * channels, flat_grad, flat_src)
    grad_x = shape.tensor(flat_grad, edges.num_src, heads, channels)
    spread_src = shape.tensor(flat_src, edges.num_src, heads, channels)
    spread_dst = shape.tensor(flat_dst, edges.num_dst, heads, channels)
    if att is None:
        return {"x": grad_x.add_(spread_src), "x_dst": spread_dst}
    grad_att = _column_dots(shape, flat_x, flat_src, edges.num_src) + _column_dots(
        shape, flat_x_dst, flat_dst, edges.num_dst
    )
    wide = att.to(grad_x.dtype).unsqueeze(-3)
    return {"x": grad_x.addcmul_(spread_src, wide), "x_dst": spread_dst.mul_(wide), "att": grad_att}


def _column_dots(shape: Shape, a: np.ndarray, b: np.ndarray, rows: int) -> Tensor:
    """Return sum_n a_n b_n `[..., H, C]` of two `[..., N, H, C]`, added up in the same order by any number of threads.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    count, row = -(-rows // BLOCK), shape.heads * shape.channels
    blocks = shape.empty(count, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, 2 * shape.models * rows * row)
    # slots of long rows may follow the rows of b
    run(_multiply_blocks, shape.dtype, job, a, b, rows, row, blocks)
    sums = blocks.reshape(shape.models, count, row).sum(1)
    return shape.tensor(sums.reshape(-1), 1, shape.heads, shape.channels).squeeze(-3)
