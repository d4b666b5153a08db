"""All that a `GATConv` computes between its products of matrices on few edges, as one call each way by one thread.

The arguments of the kernels are addresses, and their passes those of `cpu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.cache import compiled
from ...kernels.cpu.rows import DOUBLE, NARROW, SINGLE, Few, Shape, addresses, places, plain, whole
from ...kernels.cpu.vector import elements_at, only_if, only_if_any
from ..steps.cpu import _head_dots, _head_dots_back, finish, grad_of_heads, heads_of, rows_of_edges, ungroup_to
from .cpu import _backward, _collect, _dense, _forward, _normalise


@compiled
def _forward_all(
    memory: Any, counts: Any, sizes: Any, slope: Any, layout: Any, narrow: Any, drop: Any, concat: bool, rowptr_: int,
    src_: int, perm_: Any, out_: int, res_: int, bias_: int, saved_: int, x_: int, x_dst_: int, att_src_: Any,
    att_dst_: Any, u_: Any, w_: Any,
) -> None:  # fmt: skip
    """The scores <a, x> of both ends, which are saved with (max, 1 / denominator), `_forward` and the layer's end."""
    pointers, ids, floats = memory
    num_src, num_dst, num_edges, num_rows = counts
    heads, width = sizes[0], sizes[0] * sizes[1]
    rowptr, src = elements_at(pointers, rowptr_, num_dst + 1), elements_at(ids, src_, num_edges)
    perm, x = elements_at(ids, perm_, num_edges), elements_at(floats, x_, num_src * width)
    u, w = elements_at(floats, u_, num_rows * heads), elements_at(floats, w_, num_rows * heads)
    saved = elements_at(floats, saved_, (3 * num_dst + num_src) * heads)
    cut = 2 * num_dst * heads
    s, d = only_if(att_src_, saved[cut : cut + num_src * heads]), only_if(att_src_, saved[cut + num_src * heads :])
    if att_src_ is not None:
        x_dst = elements_at(floats, x_dst_, num_dst * width)
        _head_dots((0, num_src), sizes, layout, narrow, x, elements_at(floats, att_src_, width), 0, s)
        _head_dots((0, num_dst), sizes, layout, narrow, x_dst, elements_at(floats, att_dst_, width), 0, d)
    chunks, work = whole(rowptr, num_dst, 1, layout[0], floats)
    out = heads_of(floats, out_, num_dst * width, concat)
    _forward(work, chunks, sizes, slope, layout, narrow, drop, src, perm, x, s, d, u, w, out, saved[:cut], None, None)
    finish(floats, out_, out, num_dst, sizes, concat, res_, bias_)


@compiled
def _backward_all(
    memory: Any, counts: Any, sizes: Any, slope: Any, layout: Any, narrow: Any, drop: Any, concat: bool, rowptr_: int,
    src_: int, perm_: Any, colptr_: int, dst_: int, place_: int, grad_: int, grad_bias_: int, saved_: int, x_: int,
    x_dst_: int, att_src_: Any, att_dst_: Any, u_: Any, w_: Any, grad_x_: int, grad_x_dst_: int, grad_att_src_: int,
    grad_att_dst_: int, grad_u_: int, grad_w_: int,
) -> None:  # fmt: skip
    """All gradients; to that of x_dst, which may be that of x, a term is added. D is summed over `[E, H]`."""
    pointers, ids, floats = memory
    num_src, num_dst, num_edges, num_rows = counts
    heads, width = sizes[0], sizes[0] * sizes[1]
    rowptr, colptr = elements_at(pointers, rowptr_, num_dst + 1), elements_at(pointers, colptr_, num_src + 1)
    src, perm = elements_at(ids, src_, num_edges), elements_at(ids, perm_, num_edges)
    dst, place = elements_at(ids, dst_, num_edges), elements_at(ids, place_, num_edges)
    x, grad_x = elements_at(floats, x_, num_src * width), elements_at(floats, grad_x_, num_src * width)
    u, w = elements_at(floats, u_, num_rows * heads), elements_at(floats, w_, num_rows * heads)
    saved = elements_at(floats, saved_, (3 * num_dst + num_src) * heads)
    cut = 2 * num_dst * heads
    s, d = only_if(att_src_, saved[cut : cut + num_src * heads]), only_if(att_src_, saved[cut + num_src * heads :])
    stats, grad_d = np.empty(num_dst * heads * 4, floats.dtype), np.empty(num_dst * heads, floats.dtype)
    scored = only_if_any((att_src_, u_), True)
    per_edge = only_if(scored, np.empty(num_edges * heads, floats.dtype))
    of_weight = only_if(w_, np.empty(num_edges * heads, floats.dtype))
    grad = grad_of_heads(floats, grad_, num_dst, sizes, concat, grad_bias_)
    chunks, work = whole(colptr, num_src, 1, layout[0], floats)
    by_dst, ids_by_src = (0, num_dst, 0, 1, work[4]), only_if_any((u_, w_), rows_of_edges(perm, place))
    _dense(by_dst, sizes, slope, layout, narrow, grad, d, saved[:cut], stats, None, None, None, grad_d)
    _backward(
        work, chunks, sizes, slope, layout, narrow, drop, dst, place, ids_by_src, grad, x, s, u, w, stats, grad_x, None,
        per_edge, of_weight, only_if_any((scored, w_), True),
    )  # fmt: skip
    if w_ is not None:
        ungroup_to(elements_at(floats, grad_w_, num_rows * heads), of_weight, perm, heads)
    if att_src_ is not None or u_ is not None:
        _normalise(by_dst, sizes, slope, layout, rowptr, src, perm, s, u, stats, per_edge, grad_d)
    if u_ is not None:
        ungroup_to(elements_at(floats, grad_u_, num_rows * heads), per_edge, perm, heads)
    if att_src_ is not None:
        grad_s = np.empty(num_src * heads, floats.dtype)
        _collect(work, sizes, layout, colptr, place, per_edge, grad_s)
        a, of = elements_at(floats, att_src_, width), elements_at(floats, grad_att_src_, width)
        _head_dots_back(sizes, layout, narrow, x, a, grad_s, grad_x, of)
        x_dst, of_dst = elements_at(floats, x_dst_, num_dst * width), elements_at(floats, grad_x_dst_, num_dst * width)
        a, of = elements_at(floats, att_dst_, width), elements_at(floats, grad_att_dst_, width)
        _head_dots_back(sizes, layout, narrow, x_dst, a, grad_d, of_dst, of)


def shape_of(dtype: torch.dtype, heads: int, channels: int) -> Shape:
    """Return the sizes of a layer on few edges."""
    return Shape._of(DOUBLE if dtype == torch.float64 else SINGLE, (), heads, channels, NARROW)


def forward(few: Few, slope: float, res: Any, bias: Any, x: Tensor, *operands: Any) -> tuple[Any, ...]:
    """Return the layer's output, and what `backward` reads of it.

    Args:
        res, bias: are added to the output.
        operands: x `[N_src, H C]` and x_dst, a_src, a_dst, u and the weights of the edges, without the x.
    """
    edges, shape, bias, ends = few.edges, few.shape, plain(bias), [*map(plain, operands)]
    out, saved = few.output(x), x.new_empty((3 * edges.num_dst + edges.num_src) * shape.heads)
    graph = addresses(edges.rowptr, edges.src, edges.perm)
    first = shape.dtype.type(slope), shape.layout, shape.narrow, few.drop("dst"), few.concat
    _forward_all(*few.sizes, *first, *graph, *places(out, res, bias, saved), *addresses(x, *ends))
    return out, saved


def backward(few: Few, slope: float, grad: Tensor, saved: Tensor, operands: Any, of: list[Any]) -> None:
    """Store the gradients `of` the bias and of the operands: to that of x_dst, which may be that of x, it is added."""
    edges, shape, direction, operands = few.edges, few.shape, plain(grad), [*map(plain, operands)]
    graph = addresses(edges.rowptr, edges.src, edges.perm, *edges.transpose)
    first = shape.dtype.type(slope), shape.layout, shape.narrow, few.drop("src"), few.concat
    of_bias, *of = places(*of)
    _backward_all(*few.sizes, *first, *graph, *places(direction), of_bias, *places(saved), *addresses(*operands), *of)
