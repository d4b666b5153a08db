"""All passes of the operation on few edges, as one call each way by one thread; the arguments are addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.rows import DOUBLE, SINGLE, Few, Shape, addresses, places, plain, whole
from ...kernels.cpu.vector import elements_at, only_if
from ..score import Operation
from ..steps.cpu import _head_dots, ungroup_to
from . import Dot, GATv2
from .cpu import _backward_dst, _backward_src, _features, _forward, _narrow, _options, _padded
from .cpu_edges import _backward_lin


@compiled
def _forward_all(
    memory: Any, counts: Any, sizes: Any, slope: Any, scale: Any, layout: Any, narrow: Any, apart: int, wide: Any,
    pad: Any, width: int, drop: Any, rowptr_: int, src_: int, ids_: Any, x_: int, key_: Any, x_dst_: int, att_: Any,
    u_: Any, lin_: Any, back_: Any, w_: Any, out_: int, lse_: int,
) -> None:  # fmt: skip
    """`_forward` of all rows."""
    pointers, ids, floats = memory
    num_src, num_dst, num_edges, num_rows = counts
    row, nodes = sizes[0] * sizes[1], max((num_src - 1) * apart + sizes[0], 0) * sizes[1]
    rowptr = elements_at(pointers, rowptr_, num_dst + 1)
    chunks, work = whole(rowptr, num_dst, width + 255 >> 8 << 8, layout[0], floats)
    _forward(
        work, chunks, sizes, slope, scale, layout, narrow, apart, wide, pad, width, drop,
        elements_at(ids, src_, num_edges), elements_at(ids, ids_, num_edges), elements_at(floats, x_, nodes),
        elements_at(floats, key_, nodes), elements_at(floats, x_dst_, num_dst * row), elements_at(floats, att_, row),
        elements_at(floats, u_, num_rows * width), elements_at(floats, lin_, width * row),
        elements_at(floats, back_, width * row), elements_at(floats, w_, num_rows * sizes[0]),
        elements_at(floats, out_, num_dst * row), elements_at(floats, lse_, num_dst * sizes[0] * 2),
    )  # fmt: skip


@inline
def _add_att(x: Any, att: Any, sums: Any, grad_x: Any, grad_att: Any) -> None:
    """Add the terms of z = x + ..., from the sums of f_ij over the edges of each row, to the gradients of x and att."""
    for row in range(0, sums.size, att.size):
        for c in range(att.size):
            grad_att[c] += x[row + c] * sums[row + c]
            grad_x[row + c] += att[c] * sums[row + c]


@inline
def _add_lin(sizes: Any, slope: Any, tile: Any, ids: Any, u: Any, lin: Any, att: Any, changes: Any, signs: Any,
             grad_lin: Any, grad_att: Any) -> None:  # fmt: skip
    """The gradient of W_e `[H, C, D]`, and its term of that of att; `lin` is `[D, H, C]`."""
    row = att.size
    width, features = lin.size // row, grad_lin.size // row
    block = np.empty(lin.size, lin.dtype)
    cuts = np.array([0, changes.size // sizes[0]])
    _backward_lin((0, 1, 0, 1, None), sizes, slope, tile, cuts, ids, u, width, changes, signs, block)
    for d in range(features):
        for c in range(row):
            grad_lin[c * features + d] = att[c] * block[d * row + c]
            grad_att[c] += lin[d * row + c] * block[d * row + c]


@compiled
def _backward_all(
    memory: Any, counts: Any, sizes: Any, slope: Any, scale: Any, layout: Any, narrow: Any, apart: int, wide: Any,
    pad: Any, width: int, drop: Any, rowptr_: int, src_: int, colptr_: int, dst_: int, place_: int, ids_: Any, x_: int,
    key_: Any, x_dst_: int, att_: Any, u_: Any, lin_: Any, back_: Any, w_: Any, grad_: int, out_: int, lse_: int,
    grad_x_: int, grad_key_: int, grad_dst_: int, grad_att_: int, grad_u_: Any, grad_lin_: int, features: int,
    grad_w_: Any,
) -> None:  # fmt: skip
    """The passes of `backward`, and its sums. For GATv2, gradients of x and x_dst, which may be one, are added."""
    pointers, ids, floats = memory
    num_src, num_dst, num_edges, num_rows = counts
    heads, row, nodes = sizes[0], sizes[0] * sizes[1], max((num_src - 1) * apart + sizes[0], 0) * sizes[1]
    rowptr, colptr = elements_at(pointers, rowptr_, num_dst + 1), elements_at(pointers, colptr_, num_src + 1)
    src, perm = elements_at(ids, src_, num_edges), elements_at(ids, ids_, num_edges)
    dst, place = elements_at(ids, dst_, num_edges), elements_at(ids, place_, num_edges)
    x, key = elements_at(floats, x_, nodes), elements_at(floats, key_, nodes)
    x_dst, att = elements_at(floats, x_dst_, num_dst * row), elements_at(floats, att_, row)
    u, w = elements_at(floats, u_, num_rows * width), elements_at(floats, w_, num_rows * heads)
    lin, back = elements_at(floats, lin_, width * row), elements_at(floats, back_, width * row)
    grad, out = elements_at(floats, grad_, num_dst * row), elements_at(floats, out_, num_dst * row)
    lse, grad_dst = elements_at(floats, lse_, num_dst * heads * 2), elements_at(floats, grad_dst_, num_dst * row)
    grad_x, grad_lin = elements_at(floats, grad_x_, nodes), elements_at(floats, grad_lin_, features * row)
    delta, weights = np.empty(num_dst * heads, floats.dtype), np.empty(num_edges * heads, floats.dtype)
    changes, of_weight = np.empty_like(weights), only_if(w_, np.empty_like(weights))
    tile = 1 << len(layout[1])
    signs = only_if(att_, np.empty(num_edges * heads * ((sizes[1] + tile - 1) // tile) * tile // 8, np.uint8))
    _head_dots((0, num_dst), sizes, layout, narrow, grad, out, row, delta)
    chunks, work = whole(rowptr, num_dst, width + 255 >> 8 << 8, layout[0], floats)
    by_src, work_src = whole(colptr, num_src, 1, layout[0], floats)
    if att_ is not None:
        sums_dst, sums = np.empty(num_dst * row, floats.dtype), np.empty(nodes, floats.dtype)
        _backward_dst(
            work, chunks, sizes, slope, scale, layout, narrow, apart, wide, pad, width, drop, src, perm, x,
            key, x_dst, att, u, lin, back, w, grad, lse, delta,
            weights, changes, signs, of_weight, None, sums_dst, 1, None,
        )  # fmt: skip
        _backward_src(
            work_src, by_src, sizes, slope, layout, narrow, apart, dst, place, grad, None, weights, changes, signs,
            grad_x, sums,
        )  # fmt: skip
        grad_att = elements_at(floats, grad_att_, row)
        _add_att(x, att, sums, grad_x, grad_att)
        _add_att(x_dst, att, sums_dst, grad_dst, grad_att)
        if u_ is not None:
            _add_lin(sizes, slope, layout[1], perm, u, lin, att, changes, signs, grad_lin, grad_att)
    else:
        _backward_dst(
            work, chunks, sizes, slope, scale, layout, narrow, apart, wide, pad, width, drop, src, perm, x,
            key, x_dst, att, u, lin, back, w, grad, lse, delta,
            weights, changes, None, of_weight, elements_at(floats, grad_u_, num_rows * width), grad_dst,
            max(num_dst, 1), only_if(back_, grad_lin),
        )  # fmt: skip
        _backward_src(
            work_src, by_src, sizes, slope, layout, narrow, apart, dst, place, grad, x_dst, weights, changes, None,
            grad_x, elements_at(floats, grad_key_, nodes),
        )  # fmt: skip
    if w_ is not None:
        ungroup_to(elements_at(floats, grad_w_, num_rows * heads), of_weight, perm, heads)


def _arguments(call: Operation) -> tuple[Shape, list[Any], tuple[Any, ...]]:
    """Return the sizes, the first arguments of a kernel for few edges, and its operands; x and key lie as they do."""
    x, score, edges, edge_weight, seed, dropout = call
    is_dot, dtype = isinstance(score, Dot), DOUBLE if x.dtype == torch.float64 else SINGLE
    shape = Shape._of(dtype, (), x.size(1), x.size(2), _narrow(is_dot, x.size(2)))
    slope, scale, wide, pad, width = _options(shape, None if is_dot else score.negative_slope, _features(score))
    u, lin = _padded(score.edge_attr, score.lin_edge, width)
    few, apart = Few(edges, shape, seed, dropout), x.stride(0) // max(shape.channels, 1)
    key, att, back = (score.key, None, score.lin_edge) if is_dot else (None, score.att, None)
    ids = None if u is None and edge_weight is None else edges.perm
    first = [*few.sizes, slope, scale, shape.layout, shape.narrow, apart, wide, pad, width, few.drop("dst")]
    return shape, first, (ids, x, key, *map(plain, (score.x_dst, att, u, lin, back, edge_weight)))


def forward(call: Operation, *_: Any) -> list[Tensor]:
    """Return O and (max, 1 / denominator)."""
    edges, (shape, first, operands) = call.edges, _arguments(call)
    out, lse = (call.x.new_empty(edges.num_dst, shape.heads, width) for width in (shape.channels, 2))
    _forward_all(*first, *addresses(edges.rowptr, edges.src, *operands, out, lse))
    return [out, lse]


def backward(call: Operation, grad: Tensor, out: Any, saved: Any, wanted: list[bool]) -> dict[str, Tensor | None]:
    """Return the gradients; those of x and x_dst are one where these are."""
    x, score, edges, *_ = call
    shape, first, operands = _arguments(call)
    (apart, wide), features = first[7:9], _features(score)
    of: dict[str, Any] = {}
    if isinstance(score, GATv2):
        of["x"] = torch.empty_like(x)
        of["x_dst"] = of["x"] if score.x_dst.data_ptr() == x.data_ptr() else torch.zeros_like(score.x_dst)
        of["att"], stride = torch.zeros_like(score.att), features
    else:
        of["x_dst"], stride = torch.empty_like(score.x_dst), -(-features >> len(wide)) << len(wide)
        beside = apart > shape.heads
        both = x.new_empty(x.size(0), 2, *shape.sizes) if beside else x.new_empty(2, *x.shape)
        of["key"], of["x"] = both.unbind(1 if beside else 0)
        of["edge_attr"] = x.new_zeros(edges.num_rows, features) if wanted[4] and features else None
    if features:
        of["lin_edge"] = x.new_zeros(*shape.sizes, stride)
    of["edge_weight"] = None if operands[-1] is None else x.new_zeros(operands[-1].shape)
    of_key, of_att, of_x, of_dst, of_lin = places(*map(of.get, ("key", "att", "x", "x_dst", "lin_edge")))
    graph, direction = (edges.rowptr, edges.src, *edges.transpose), plain(grad)
    _backward_all(
        *first, *addresses(*graph, *operands, direction, out, *saved), of_x, of_key, of_dst, of_att,
        *addresses(of.get("edge_attr")), of_lin, stride, *addresses(of["edge_weight"]),
    )  # fmt: skip
    if stride > features:
        of["lin_edge"] = of["lin_edge"][..., :features].contiguous()
    if isinstance(score, Dot) and score.key is None:
        of["x"].add_(of.pop("key"))
    return of
