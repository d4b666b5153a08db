"""Scores of the features of both ends on a CPU: `att` selects GATv2 in a kernel, `scale` the scaled product.

GATv2: e_ij = att . LeakyReLU(z_ij) with z_ij = x_i + x_j + W_e u_ij. W_e u_ij is computed in registers, a tile at a
time, whenever z_ij is needed. The backward pass over dst stores one bit per z: its sign. With these, the pass over src
and that over the edges need no z.

The scaled product: e_ij = <x_i, k_j + W_e u_ij> / sqrt(C), with messages x_j + W_e u_ij. It sums features of edges
alone: <x_i, W_e u_ij> is <W_e^T x_i, u_ij>, and W_e is applied to a sum.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import (
    NARROW,
    Chunks,
    Job,
    Shape,
    chunks_of,
    merge_sums,
    run,
    tile_of,
)
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
from ..score import Operation
from ..steps.cpu import (
    Operands,
    Row,
    attend,
    clear,
    dots,
    each_tile,
    forward_pass,
    head_dots,
    load_edges,
    load_end,
    load_factors,
    load_lse,
    prefetch_edge,
    prefetch_end,
    row_of,
    softmax_back,
    weigh,
)
from . import Dot, GATv2
from .cpu_edges import (
    BLOCK,
    BLOCKS,
    add_edges,
    add_outer,
    attr_gradient,
    dot_edges,
    embed,
    embed_four,
    project,
    spread_edges,
    sum_edges,
)

ROWS = 64  # of dst, at least, whose shares of grad W_e are summed one after the other


@inline
def _scores(row: Row, h: int, c: int, tile: Any, count: Any, x_dst: Any, x: Any, u: Any, lin: Any, ids: Any, width: int,
            of_edges: Any, e: Any, grad: Any, product: Any, signs: Any, att: Any, slope: Any) -> None:  # fmt: skip
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
            if c == 0:  # once for all tiles
                prefetch_edge(u, ids, row, k, width)
            if k & 3 == 0:
                embed_four(of_edges, row, k, h, c, tile, count, u, ids, width, lin)
            z = z + load(of_edges, (k & 3) << len(tile), tile, None)
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
    work: Any, chunks: Any, sizes: Any, slope: Any, scale: Any, layout: Any, narrow: Any, apart: int, wide: Any,
    pad: Any, width: Any, drop: Any, src_: Any, ids_: Any, x_: Any, key_: Any, x_dst_: Any, att_: Any, u_: Any,
    lin_: Any, back_: Any, w_: Any, out_: Any, lse_: Any,
) -> None:  # fmt: skip
    """Compute the scores of some chunks, then equations (2) and (4); `key` is None if it is x."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, key, x_dst, att, u = of_model((x_, key_, x_dst_, att_, u_), model, models)
    lin, back, w, out, lse = of_model((lin_, back_, w_, out_, lse_), model, models)
    keep = only_if_any((drop, w_), pointer(buffers[0], 0))
    weight, shares, sums = pointer(buffers[1], 0), pointer(buffers[2], 0), pointer(buffers[3], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes, apart, sizes[0])
            load_factors(keep, drop, w, ids, row, model, lanes, ragged)
            clear(weight, row)
            if att_ is not None:
                each_tile(_scores, tile, row, x_dst, x, u, lin, ids, width, sums, weight, None, None, None, att,
                          slope)  # fmt: skip
            if scale is not None:
                dots(row, narrow, layout, x_dst, x if key_ is None else key, weight, None, None)
            if back_ is not None:
                project(sums, x_dst, row, back, width, wide)
                dot_edges(row, u, ids, width, lanes, wide, pad, sums, weight, None, None)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                e = load(weight, k * row.lanes, lanes, None)
                if scale is not None:
                    e = scale * e
                    store(weight, k * row.lanes, e, None)
                tops = larger(tops, e)
            attend(row, narrow, layout, weight, None, keep, shares, tops, x, out, None, None, lse)
            if back_ is not None:
                sum_edges(sums, row, u, ids, width, lanes, wide, pad, weight, shares)
                each_tile(embed, tile, row, sums, lin, width, wide, out)


@compiled
def _backward_dst(
    work: Any, chunks: Any, sizes: Any, slope: Any, scale: Any, layout: Any, narrow: Any, apart: int, wide: Any,
    pad: Any, width: Any, drop: Any, src_: Any, ids_: Any, x_: Any, key_: Any, x_dst_: Any, att_: Any, u_: Any,
    lin_: Any, back_: Any, w_: Any, grad_: Any, lse_: Any, delta_: Any, weights_: Any, changes_: Any, signs_: Any,
    grad_w_: Any, grad_u_: Any, grad_dst_: Any, step: int, blocks_: Any,
) -> None:  # fmt: skip
    """For each chunk, compute k_ij w_ij alpha_ij, f_ij = alpha_ij (g_ij - D_i), and the sums over j.

    For GATv2, also the signs of z_ij; the sum is the `_spread` of a dst. For the product, f_ij is divided by sqrt(C);
    the sums are the gradients of x_i and u_ij and, of `step` chunks together, of W_e.
    """
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    src, ids = pointer(src_, 0), pointer(ids_, 0)
    x, key, x_dst, att, u = of_model((x_, key_, x_dst_, att_, u_), model, models)
    lin, back, w, grad, lse = of_model((lin_, back_, w_, grad_, lse_), model, models)
    delta, weights, changes, signs = of_model((delta_, weights_, changes_, signs_), model, models)
    grad_w, grad_u, grad_dst, blocks = of_model((grad_w_, grad_u_, grad_dst_, blocks_), model, models)
    keep, e, product = only_if(drop, pointer(buffers[0], 0)), pointer(buffers[1], 0), pointer(buffers[2], 0)
    p_i, grad_i = pointer(buffers[3], 0), pointer(buffers[4], 0)
    sums, shares = pointer(buffers[5], 0), pointer(buffers[6], 0)
    factor = lse_.dtype.type(1) if scale is None else scale
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, src_.size - 1, sizes, head, lanes, apart, sizes[0])
            if drop is not None:
                draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            clear(e, row)
            clear(product, row)
            if att_ is not None:
                each_tile(_scores, tile, row, x_dst, x, u, lin, ids, width, p_i, e, grad, product, signs, att,
                          slope)  # fmt: skip
            if scale is not None:
                if key_ is None:
                    dots(row, narrow, layout, x_dst, x, e, grad, product)
                else:
                    dots(row, narrow, layout, x_dst, key, e, None, None)
                    dots(row, narrow, layout, grad, x, product, None, None)
            if back_ is not None:
                project(p_i, x_dst, row, back, width, wide)
                project(grad_i, grad, row, back, width, wide)
                dot_edges(row, u, ids, width, lanes, wide, pad, p_i, e, grad_i, product)
            top, share, mean = load_lse(lse, delta, row, lanes, ragged)
            for k in range(row.size):
                softmax_back(row, k, factor, e, product, keep, w, ids, top, share, mean, weights, changes, grad_w,
                             lanes, ragged)  # fmt: skip
            if att_ is not None:
                each_tile(_spread, tile, row, signs, None, product, slope, grad_dst)
            if scale is not None:
                weigh(row, narrow, layout, x if key_ is None else key, product, grad_dst)
            if back_ is not None:
                sum_edges(sums, row, u, ids, width, lanes, wide, pad, product, None)
                sum_edges(shares, row, u, ids, width, lanes, wide, pad, e, None)
                each_tile(embed, tile, row, sums, lin, width, wide, grad_dst)
                add_outer(blocks, v // step, row, x_dst, sums, grad, shares, width, wide)
            if grad_u_ is not None:
                add_edges(grad_u, row, ids, width, lanes, wide, pad, p_i, product, grad_i, e)


@compiled
def _backward_src(
    work: Any, chunks: Any, sizes: Any, slope: Any, layout: Any, narrow: Any, apart: int, dst_: Any, place_: Any,
    grad_: Any, x_dst_: Any, weights_: Any, changes_: Any, signs_: Any, grad_x_: Any, sums_: Any,
) -> None:  # fmt: skip
    """sum_i k_ij w_ij alpha_ij dO_i of some chunks of src rows; and sum_i f_ij x_i, or, by signs, the `_spread`."""
    first, last, model, models, buffers = work
    lanes, tile, ragged = layout
    dst, place = pointer(dst_, 0), pointer(place_, 0)
    grad, x_dst, weights, changes = of_model((grad_, x_dst_, weights_, changes_), model, models)
    signs, grad_x, sums = of_model((signs_, grad_x_, sums_), model, models)
    weight, change = pointer(buffers[0], 0), pointer(buffers[1], 0)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, dst_.size - 1, sizes, head, lanes, sizes[0], apart)
            load_edges(weight, weights, row, place, lanes, ragged)
            load_edges(change, changes, row, place, lanes, ragged)
            weigh(row, narrow, layout, grad, weight, grad_x)
            if signs_ is not None:
                each_tile(_spread, tile, row, signs, place, change, slope, sums)
            if x_dst_ is not None:
                weigh(row, narrow, layout, x_dst, change, sums)


@compiled
def _finish(work: Any, x_: Any, att_: Any, rows: Any, row: Any, sums_: Any, grad_x_: Any, blocks_: Any) -> None:
    """For each block of `BLOCK` rows, sum_n x_n A_n, element by element, and att A_n: added to grad x, or as A."""
    first, last, model, models, _ = work
    x, att, sums, grad_x, blocks = of_model((x_, att_, sums_, grad_x_, blocks_), model, models)
    for block in range(first, last):
        for c in range(row):
            blocks[block * row + c] = 0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            for c in range(row):
                at = n * row + c
                blocks[block * row + c] += x[at] * sums[at]
                if grad_x_ is not None:
                    grad_x[at] += att[c] * sums[at]
                else:
                    sums[at] *= att[c]


class _Operands(NamedTuple):
    """The operands as the passes over dst take them; None for what the score does not have."""

    slope: Any
    scale: Any
    layout: Any
    narrow: Any
    apart: int  # heads from one row of x and key to the next
    wide: Any  # features of an edge that are summed at once
    pad: Any  # the same of all heads of a vector, where they are summed together
    width: int  # D, the number of features of an edge
    ids: Any
    x: Any
    key: Any
    x_dst: Any
    att: Any
    u: Any
    lin: Any  # W_e, `[D, H, C]`
    back: Any  # for the product also `[H, C, D]`
    w: Any

    @classmethod
    def of(cls, shape: Shape, call: Operation) -> _Operands:
        """The operands of a score; for GATv2, D is padded to a multiple of 4 with zeros."""
        x, score, edges, edge_weight, *_ = call
        u, lin = score.edge_attr, score.lin_edge
        ids = None if u is None and edge_weight is None else edges.perm
        slope, scale, wide, pad, width = _options(shape, getattr(score, "negative_slope", None), _features(score))
        back = lin if scale is not None else None
        (values, key), apart = _side_by_side(shape, x, getattr(score, "key", None))
        read = shape.flat if back is not None else shape.features  # W_e of a dst reads its features one by one
        u, lin = _padded(u, lin, width)
        tensors = read(score.x_dst), *map(shape.flat, (getattr(score, "att", None), u, lin, back, edge_weight))
        return cls(slope, scale, shape.layout, shape.narrow, apart, wide, pad, width, ids, values, key, *tensors)

    @property
    def passed(self) -> Operands:
        """The operands as arguments of the kernels."""
        return Operands(self[:8], self.ids, self[9:])


def _features(score: Any) -> int:
    return 0 if score.edge_attr is None else score.edge_attr.size(-1)


@functools.cache
def _options(shape: Shape, slope: float | None, features: int) -> tuple[Any, ...]:
    """The slope of GATv2, or None for the product; its scale, `wide` and `pad`; and the number of features, padded."""
    number = shape.dtype.type
    if slope is not None:
        return number(slope), None, None, None, features + -features % 4
    wide, pad = tile_of(features), None
    if 0 < features <= 16 and len(wide) + len(shape.lanes) <= 7:  # at most 128 numbers
        pad = shape.lanes, (0,) * (1 << len(wide))
    return None, number(max(shape.channels, 1) ** -0.5), wide, pad, features


def _padded(u: Tensor | None, lin: Tensor | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the features of the edges and W_e as `[..., D, H, C]`, with zeros up to a width."""
    if u is None or lin is None:
        return None, None
    if width > u.size(-1):
        u, lin = (F.pad(t.detach(), (0, width - t.size(-1))) for t in (u, lin))
    return u, lin.movedim(-1, -3)


def _side_by_side(shape: Shape, x: Tensor, key: Tensor | None) -> tuple[tuple[Tensor | None, Tensor | None], int]:
    """Return x and the keys as the kernels read them, and the heads from one row of theirs to the next.

    Where one product has computed both, a row of one lies beside that of the other, and they are not copied.
    """
    apart = x.stride(-3) // max(shape.channels, 1)
    strides = apart * shape.channels, shape.channels, 1
    if key is None or key.stride() != strides or x.stride() != strides or not x.numel() or x.is_neg() or key.is_neg():
        return (shape.features(x), shape.features(key)), shape.heads
    if any(type(t) is not Tensor or t.dtype != shape.loaded(t) for t in (x, key)):
        return (shape.features(x), shape.features(key)), shape.heads
    size = ((x.size(0) - 1) * apart + shape.heads) * shape.channels
    return (x.as_strided((size,), (1,)), key.as_strided((size,), (1,))), apart


def _with_room(chunks: Chunks, operands: _Operands, step: int = 1) -> Chunks:
    """The chunks, with buffers that hold the features of an edge for each head, in whole vectors, and four tiles."""
    return chunks._replace(most=max(chunks.most, -(-operands.width // 256) * 256), step=step)


def _shape(call: Operation) -> Shape:
    x, score, _, edge_weight, *_ = call
    channels = x.size(-1)  # heads that are summed together add up their features in the order of `lane_sum`
    narrow = NARROW + 1 if isinstance(score, Dot) and channels & (channels - 1) == 0 else 0
    return Shape.of(x, edge_weight, *score.operands, narrow=narrow)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator)."""
    shape, chunks = _shape(call), chunks_of(call.edges, "dst")
    operands = _Operands.of(shape, call)
    return forward_pass(_forward, call, shape, _with_room(chunks, operands), operands.passed, dtype)


def backward(
    call: Operation, grad: Tensor, out: Tensor, saved: tuple[Tensor, ...], needs: tuple[bool, ...]
) -> dict[str, Tensor | None]:
    """Return the gradients, by f_ij = de_ij LeakyReLU'(z_ij), or de_ij / sqrt(C). Stores two numbers per edge and head.

    GATv2: of att . LeakyReLU(z) they are de att LeakyReLU'(z) for z and de LeakyReLU(z) = f z for att. So with the sums
    B_i = sum_j f_ij, A_j = sum_i f_ij and F = sum_ij f_ij u_ij, grad x_i = att B_i, grad x_j = att A_j + sum_i k w
    alpha dO_i, grad W_e = att F, and grad att = sum_i x_i B_i + sum_j x_j A_j + W_e F. It also
    stores one bit per feature of an edge.

    The product: grad x_i = sum_j f_ij (k_j + W_e u_ij), grad k_j = sum_i f_ij x_i, grad x_j = sum_i k w alpha dO_i,
    grad u_ij = W_e^T (f_ij x_i + k w alpha dO_i), summed over the heads, and grad W_e = sum_i x_i (sum_j f_ij u_ij)^T +
    dO_i (sum_j k w alpha u_ij)^T, by the same blocks of rows for any number of threads.
    """
    _, score, edges, _, seed, dropout = call
    shape, (lse,) = _shape(call), saved
    heads, channels, num_edges = shape.heads, shape.channels, edges.num_edges
    _, dst, place = edges.transpose
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    operands = _Operands.of(shape, call)
    delta = head_dots(Shape.of(out, grad), grad, out)
    sums_dst = shape.empty(by_dst.slots, heads, channels)  # first: the memory of what is freed on return lies together
    g = shape.flat(grad) if operands.back is not None else shape.features(grad)
    weights, changes = shape.scratch(num_edges, heads), shape.scratch(num_edges, heads)
    grad_w, signs, grad_u, blocks = shape.empty(num_edges, heads) if needs[1] else None, None, None, None
    step = 1
    if isinstance(score, GATv2):
        tile = 1 << len(shape.tile)
        signs = np.empty(shape.models * num_edges * heads * -(-channels // tile) * tile // 8, np.uint8)
    elif operands.back is not None:
        grad_u = shape.empty(edges.num_rows, operands.width) if needs[4] else None
        if grad_u is not None and edges.num_rows > num_edges:
            grad_u.zero_()
        count, size = by_dst.row.size, 1 << len(operands.wide)
        step = max(ROWS, -(-count // BLOCKS))
        blocks = shape.empty(-(-count // step), heads, channels, -(-operands.width // size) * size).zero_()
    (constants, ids, arrays), drop = operands.passed, shape.drop(seed, dropout, lambda: edges.dropout_ids_by_dst)
    results = weights, changes, signs, grad_w, grad_u, sums_dst, step, blocks
    of_dst = *constants, drop, edges.src, ids, *arrays, g, shape.flat(lse), delta, *results
    shape.run(_backward_dst, _with_room(by_dst, operands, step), edges, *of_dst)
    beside = operands.apart > heads  # the gradients of key and x too
    sums = [shape.empty(by_src.slots, *(2,) * beside, heads, channels) for _ in range(2 - beside)]
    sums_src, values = sums[0].unbind(1) if beside else sums
    x_dst = operands.x_dst if signs is None else None
    ends = dst, place, g, x_dst, weights, changes, signs
    ways = operands.slope, shape.layout, shape.narrow, 2 * heads if beside else heads
    size = (2 * by_src.slots - 1) * heads * channels
    of_src = (t.as_strided((size,), (1,)) if beside else t for t in (values, sums_src))
    shape.run(_backward_src, by_src, edges, *ways, *ends, *of_src)
    merge_sums(shape.models, by_dst, heads * channels, sums_dst)
    merge_sums(shape.models, by_src, (1 + beside) * heads * channels, *sums)
    grad_x, grad_key = (shape.first(sums, edges.num_src) for sums in (values, sums_src))
    grad_x_dst = shape.first(sums_dst, edges.num_dst)
    grads: dict[str, Tensor | None] = {"x": grad_x, "x_dst": grad_x_dst}
    if grad_w is not None:
        grads["edge_weight"] = edges.ungroup(grad_w, len(shape.batch))
    if isinstance(score, Dot):
        if blocks is not None:
            grads |= {"edge_attr": grad_u, "lin_edge": shape.sum(blocks)[..., : operands.width].contiguous()}
        return grads | ({"x": grad_x.add_(grad_key)} if score.key is None else {"key": grad_key})
    # slots of long rows may follow the rows of the sums
    grad_att = _att_gradient(shape, operands, operands.x, edges.num_src, sums_src, values)
    grad_att += _att_gradient(shape, operands, operands.x_dst, edges.num_dst, sums_dst, None)
    if score.edge_attr is not None and score.lin_edge is not None:
        each = num_edges, operands.ids, changes, signs
        if needs[4]:
            grads["edge_attr"] = attr_gradient(shape, score, operands.slope, *each)
        spread = spread_edges(shape, operands.slope, operands.u, operands.width, *each)[..., : score.lin_edge.size(-1)]
        grad_att += (score.lin_edge.to(spread.dtype) * spread).sum(-1)
        grads["lin_edge"] = (score.att.to(spread.dtype).unsqueeze(-1) * spread).contiguous()
    return grads | {"att": grad_att}


def _att_gradient(shape: Shape, operands: _Operands, x: Any, rows: int, sums: Tensor, grad_x: Any) -> Tensor:
    """Return sum_n x_n A_n `[..., H, C]`, added up in the same order by any number of threads, with `_finish`.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    count, row = -(-rows // BLOCK), shape.heads * shape.channels
    blocks = shape.empty(count, shape.heads, shape.channels)
    job = Job(np.arange(count + 1), shape.models, 0, 2 * shape.models * rows * row)
    run(_finish, shape.dtype, job, shape.flat(x), operands.att, rows, row, sums, grad_x, blocks)
    return shape.sum(blocks)
