"""Scores of the features of both ends on a CPU: `att` selects GATv2 in a kernel, `scale` the scaled product.

GATv2: e_ij = att . LeakyReLU(z_ij) with z_ij = x_i + x_j + W_e u_ij. W_e u_ij is computed in registers, a tile at a
time, whenever z_ij is needed. The backward pass over dst stores one bit per z: its sign. With these, the pass over src
and that over the edges need no z.

The scaled product: e_ij = <x_i, k_j + W_e u_ij> / sqrt(C), with messages x_j + W_e u_ij. It sums features of edges
alone: <x_i, W_e u_ij> is <W_e^T x_i, u_ij>, and W_e is applied to a sum.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.draw import draw_row
from ...kernels.cpu.rows import NARROW, Chunks, Job, Shape, chunks_of, merge_sums, run, tile_of
from ...kernels.cpu.vector import (
    exp,
    larger,
    leaky,
    leaky_by,
    load,
    of_model,
    only_if,
    splat,
    store,
    store_signs,
)
from ..score import Operation
from ..steps.cpu import (
    Row,
    add_sums,
    attend,
    clear,
    dots,
    each_tile,
    forward_pass,
    load_edge,
    load_end,
    load_factors,
    load_stats,
    prefetch_edge,
    prefetch_end,
    product_back,
    row_of,
    row_of_edge,
    summarise,
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
    own = row.own * row.channels + c
    x_i, grad_i = load(x_dst, own, tile, count), load(grad, own, tile, count)
    att_h = load(att, row.head * row.channels + c, tile, count)
    for k in range(row.size):
        prefetch_end(x, row, k, c, tile)
        values = load_end(x, row, k, c, tile, count)
        add_sums(product, k * row.lanes + h, grad_i * values, ())
        z = values + x_i
        if u is not None:
            if c == 0:  # once for all tiles
                prefetch_edge(u, ids, row, k, width)
            if k & 3 == 0:
                embed_four(of_edges, row, k, h, c, tile, count, u, ids, width, lin)
            z = z + load(of_edges, (k & 3) << len(tile), tile, None)
        if signs is not None:
            store_signs(signs, _sign(row, np.int64(row.begin + k), h, c, tile), z)
        add_sums(e, k * row.lanes + h, att_h * leaky(z, z, slope), ())


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
        edge = row_of_edge(place, row.begin + k)
        total = total + de[k * row.lanes + h] * leaky_by(one, signs, _sign(row, edge, h, c, tile), slope)
    store(out, row.to * row.channels + c, total, count)


@compiled
def _forward(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, scale: Any, apart: int, width: Any, features: Any,
    drop: Any, ends: Any, operands: Any, results: Any,
) -> None:  # fmt: skip
    """Compute the scores of some chunks, then equations (2) and (4)."""
    (first, last, model, models, buffers), (lanes, narrow, _, _) = work, layout
    (src, ids), (out, lse, _, _) = of_model(ends, 0, 1), of_model(results, model, models)
    x, key, x_dst, att, u, lin, back, w = of_model(operands, model, models)
    keep, weight, shares, sums = of_model(buffers[:4], 0, 1)
    keep = only_if((drop, w), keep)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, sizes, layout, head, apart, sizes[0])
            load_factors(keep, drop, w, ids, row, model)
            if slope is not None:
                clear(weight, row)
                each_tile(_scores, row, x_dst, x, u, lin, ids, width, sums, weight, None, None, None, att, slope)
            if scale is not None:
                dots(row, narrow, x_dst, key, weight, None, None)
            if features is not None:
                project(sums, x_dst, row, back, width, features)
                dot_edges(row, u, ids, width, features, sums, weight, None, None)
            tops = splat(x, -np.inf, lanes)
            for k in range(row.size):
                e = scale * load(weight, k * row.lanes, lanes, None)
                store(weight, k * row.lanes, e, None)
                tops = larger(tops, e)
            attend(row, narrow, weight, None, keep, shares, tops, x, out, lse, None, None)
            if features is not None:
                sum_edges(sums, row, u, ids, width, features, weight, shares)
                each_tile(embed, row, sums, lin, width, features, out)


@compiled
def _backward_dst(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, scale: Any, apart: int, width: Any, features: Any,
    drop: Any, keyed: Any, step: int, ends: Any, operands: Any, more: Any, results: Any,
) -> None:  # fmt: skip
    """For each chunk, compute k_ij w_ij alpha_ij, f_ij = alpha_ij (g_ij - D_i), and the sums over j.

    For GATv2, also the signs of z_ij; the sum is the `_spread` of a dst. For the product, f_ij is divided by sqrt(C);
    the sums are the gradients of x_i and u_ij and, of `step` chunks together, of W_e. `keyed` is None where the keys
    are x, which are read once then.
    """
    (first, last, model, models, buffers), (lanes, narrow, _, _) = work, layout
    (src, ids), (grad, stats) = of_model(ends, 0, 1), of_model(more, model, models)
    x, key, x_dst, att, u, lin, back, w = of_model(operands, model, models)
    weights, changes, signs, grad_w, grad_u, grad_dst, blocks = of_model(results, model, models)
    keep, e, product, p_i, grad_i, sums, shares, _ = of_model(buffers, 0, 1)
    keep = only_if(drop, keep)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, src, sizes, layout, head, apart, sizes[0])
            draw_row(keep, drop, model, row.begin, row.size, head, lanes)
            if slope is not None:
                clear(e, row)
                clear(product, row)
                each_tile(_scores, row, x_dst, x, u, lin, ids, width, p_i, e, grad, product, signs, att, slope)
            if scale is not None:
                if keyed is None:
                    dots(row, narrow, x_dst, x, e, grad, product)
                else:
                    dots(row, narrow, x_dst, key, e, None, None)
                    dots(row, narrow, grad, x, product, None, None)
            if features is not None:
                project(p_i, x_dst, row, back, width, features)
                project(grad_i, grad, row, back, width, features)
                dot_edges(row, u, ids, width, features, p_i, e, grad_i, product)
            _, top, share, mean = load_stats(stats, 4 * row.own - 3 * head, row)
            for k in range(row.size):
                f, at, w_ij = k * row.lanes, np.int64(row.begin + k) * row.heads + head, load_edge(w, ids, row, k)
                alpha = share * exp(scale * load(e, f, lanes, None) - top)
                change = product_back(product, row, k, at, alpha, keep, w_ij, grad_w)
                dropped, change = alpha * load(keep, f, lanes, None) * w_ij, scale * (alpha * (change - mean))
                store(e, f, dropped, None)
                store(product, f, change, None)
                store(weights, at, dropped, row.count)
                store(changes, at, change, row.count)
            if slope is not None:
                each_tile(_spread, row, signs, None, product, slope, grad_dst)
            if scale is not None:
                weigh(row, narrow, key, product, grad_dst)
            if features is not None:
                sum_edges(sums, row, u, ids, width, features, product, None)
                sum_edges(shares, row, u, ids, width, features, e, None)
                each_tile(embed, row, sums, lin, width, features, grad_dst)
                add_outer(blocks, v // step, row, x_dst, sums, grad, shares, width, features)
                add_edges(grad_u, row, ids, width, features, p_i, product, grad_i, e)


@compiled
def _backward_src(
    work: Any, sizes: Any, layout: Any, chunks: Any, slope: Any, scale: Any, apart: int, ends: Any, operands: Any,
    results: Any,
) -> None:  # fmt: skip
    """sum_i k_ij w_ij alpha_ij dO_i of some chunks of src rows; and sum_i f_ij x_i, or, by signs, the `_spread`."""
    (first, last, model, models, buffers), (lanes, narrow, _, _) = work, layout
    (dst, place), (grad_x, sums) = of_model(ends, 0, 1), of_model(results, model, models)
    grad, x_dst, weights, changes, signs = of_model(operands, model, models)
    weight, change = of_model(buffers[:2], 0, 1)
    for head in range(0, sizes[0], 1 << len(lanes)):
        for v in range(first, last):
            row = row_of(chunks, v, dst, sizes, layout, head, sizes[0], apart)
            for k in range(row.size):
                store(weight, k * row.lanes, load_edge(weights, place, row, k), None)
                store(change, k * row.lanes, load_edge(changes, place, row, k), None)
            weigh(row, narrow, grad, weight, grad_x)
            if slope is not None:
                each_tile(_spread, row, signs, place, change, slope, sums)
            if scale is not None:
                weigh(row, narrow, x_dst, change, sums)


@compiled
def _finish(work: Any, sizes: Any, layout: Any, rows: Any, operands: Any, grad_x_: Any) -> None:
    """For each block of `BLOCK` rows, sum_n x_n A_n, element by element, and att A_n: added to grad x, or as A."""
    (first, last, model, models, _), row = work, sizes[0] * sizes[1]
    (x, att, sums, blocks), (grad_x,) = of_model(operands, model, models), of_model((grad_x_,), model, models)
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


def _operands(shape: Shape, call: Operation) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return what the passes over dst take of a score; for GATv2, D is padded to a multiple of 4 with zeros.

    The slope of GATv2, or None for the product; the scale of the product, or None; the heads from one row of x and of
    the keys to the next; D; and for features of edges and the product the types of vectors of these, see `cpu_edges`.
    The row of each edge among what belongs to single edges. The operands: x, the keys, x_dst, att, the features of the
    edges, W_e as `[D, H, C]`, for the product also as `[H, C, D]`, and the weights of the edges; None for what the
    score does not have.
    """
    x, score, edges, edge_weight, *_ = call
    u, lin = score.edge_attr, score.lin_edge
    ids = None if u is None and edge_weight is None else edges.perm
    slope, scale, width, features = _options(
        shape, getattr(score, "negative_slope", None), 0 if u is None else u.size(-1)
    )
    back = lin if features is not None else None
    (values, key), apart = _side_by_side(shape, x, getattr(score, "key", None))
    read = shape.flat if back is not None else shape.features  # W_e of a dst reads its features one by one
    u, lin = _padded(u, lin, width)
    tensors = read(score.x_dst), *map(shape.flat, (getattr(score, "att", None), u, lin, back, edge_weight))
    key = values if key is None and scale is not None else key
    return (slope, scale, apart, width, features), ids, (values, key, *tensors)


@functools.cache
def _options(shape: Shape, slope: float | None, width: int) -> tuple[Any, ...]:
    """The slope of GATv2, or None for the product; its scale; the number of features, padded; and their types."""
    number = shape.dtype.type
    if slope is not None:
        return number(slope), None, width + -width % 4, None
    wide = tile_of(width)
    features: Any = (wide, wide, ()) if width else None
    if 0 < width <= 16 and len(wide) + len(shape.lanes) <= 7:  # at most 128 numbers
        features = wide, (shape.lanes, (0,) * (1 << len(wide))), shape.lanes
    return None, number(max(shape.channels, 1) ** -0.5), width, features


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


def _with_room(chunks: Chunks, width: int, step: int = 1) -> Chunks:
    """The chunks, with buffers that hold the features of an edge for each head, in whole vectors, and four tiles."""
    return chunks._replace(most=max(chunks.most, -(-width // 256) * 256), step=step)


def _shape(call: Operation) -> Shape:
    x, score, _, edge_weight, *_ = call
    channels = x.size(-1)  # heads that are summed together add up their features in the order of `lane_sum`
    narrow = NARROW + 1 if isinstance(score, Dot) and channels & (channels - 1) == 0 else 0
    return Shape.of(x, edge_weight, *score.operands, narrow=narrow)


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return O in `dtype` and (max, 1 / denominator)."""
    shape = _shape(call)
    options, ids, operands = _operands(shape, call)
    chunks = _with_room(chunks_of(call.edges, "dst"), options[3])
    return forward_pass(_forward, call, shape, chunks, options, ids, operands, dtype)


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
    shape, (lse,), (_, dst, place) = _shape(call), saved, edges.transpose
    heads, channels, num_edges = shape.heads, shape.channels, edges.num_edges
    by_dst, by_src = chunks_of(edges, "dst"), chunks_of(edges, "src")
    options, ids, operands = _operands(shape, call)
    slope, scale, apart, width, features = options
    x, _, x_dst, att, u, *_ = operands
    stats = summarise(Shape.of(out, grad), edges, grad, lse, (out, None, None))
    sums_dst = shape.empty(by_dst.slots, heads, channels)  # first: the memory of what is freed on return lies together
    g = shape.features(grad) if features is None else shape.flat(grad)
    weights, changes = shape.scratch(num_edges, heads), shape.scratch(num_edges, heads)
    grad_w, signs, grad_u, blocks = shape.empty(num_edges, heads) if needs[1] else None, None, None, None
    step = 1
    if isinstance(score, GATv2):
        tile = 1 << len(shape.tile)
        signs = np.empty(shape.models * num_edges * heads * -(-channels // tile) * tile // 8, np.uint8)
    elif features is not None:
        grad_u = shape.empty(edges.num_rows, width) if needs[4] else None
        if grad_u is not None and edges.num_rows > num_edges:
            grad_u.zero_()
        size, step = 1 << len(features[0]), max(ROWS, -(-by_dst.row.size // BLOCKS))
        blocks = shape.empty(-(-by_dst.row.size // step), heads, channels, -(-width // size) * size).zero_()
    drop = shape.drop(seed, dropout, lambda: edges.dropout_ids_by_dst)
    keyed = None if getattr(score, "key", None) is None else True
    results = weights, changes, signs, grad_w, grad_u, sums_dst, blocks
    arguments = *options, drop, keyed, step, (edges.src, ids), operands, (g, stats), results
    shape.run(_backward_dst, _with_room(by_dst, width, step), edges, *arguments)
    beside = apart > heads  # the gradients of key and x too
    sums = [shape.empty(by_src.slots, *(2,) * beside, heads, channels) for _ in range(2 - beside)]
    sums_src, values = sums[0].unbind(1) if beside else sums
    size = (2 * by_src.slots - 1) * heads * channels
    of_src = tuple([t.as_strided((size,), (1,)) if beside else t for t in (values, sums_src)])
    arguments = slope, scale, 2 * heads if beside else heads, (dst, place), (g, x_dst, weights, changes, signs), of_src
    shape.run(_backward_src, by_src, edges, *arguments)
    merge_sums(shape.models, by_dst, heads * channels, sums_dst)
    merge_sums(shape.models, by_src, (1 + beside) * heads * channels, *sums)
    grad_x, grad_key = (shape.first(sums, edges.num_src) for sums in (values, sums_src))
    grad_x_dst = shape.first(sums_dst, edges.num_dst)
    grads: dict[str, Tensor | None] = {"x": grad_x, "x_dst": grad_x_dst}
    if grad_w is not None:
        grads["edge_weight"] = edges.ungroup(grad_w, len(shape.batch))
    if isinstance(score, Dot):
        if blocks is not None:
            grads |= {"edge_attr": grad_u, "lin_edge": shape.sum(blocks)[..., :width].contiguous()}
        return grads | ({"x": grad_x.add_(grad_key)} if keyed is None else {"key": grad_key})
    # slots of long rows may follow the rows of the sums
    grad_att = _att_gradient(shape, x, att, edges.num_src, sums_src, values)
    grad_att += _att_gradient(shape, x_dst, att, edges.num_dst, sums_dst, None)
    if score.edge_attr is not None and score.lin_edge is not None:
        each = num_edges, ids, changes, signs
        if needs[4]:
            grads["edge_attr"] = attr_gradient(shape, score, slope, *each)
        spread = spread_edges(shape, slope, u, width, *each)[..., : score.lin_edge.size(-1)]
        grad_att += (score.lin_edge.to(spread.dtype) * spread).sum(-1)
        grads["lin_edge"] = (score.att.to(spread.dtype).unsqueeze(-1) * spread).contiguous()
    return grads | {"att": grad_att}


def _att_gradient(shape: Shape, x: Any, att: Any, rows: int, sums: Tensor, grad_x: Any) -> Tensor:
    """Return sum_n x_n A_n `[..., H, C]`, added up in the same order by any number of threads, with `_finish`.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    blocks = shape.empty(-(-rows // BLOCK), shape.heads, shape.channels)
    job = Job(np.arange(blocks.size(-3) + 1), 0, 2 * shape.models * rows * shape.heads * shape.channels)
    run(_finish, shape, job, rows, (shape.flat(x), att, sums, blocks), grad_x)
    return shape.sum(blocks)
