"""A layer on few edges on a CPU, as one call each way: its linear maps, scores, softmax, weighted sum and output.

The kernels get addresses: of the graph that `group` makes, of the tensors in the order of `numbers`, and of what is
saved, `regions`. They are compiled for arguments that are True or None: with `halved` the scores are the paper's, with
`paired` GATv2's, with `scaled` the scaled product; `edged` is with features of edges. What is skipped for None is not
compiled, but the branch for True always is, so that no branch of these has an `else`.
"""

from __future__ import annotations

import functools
from typing import Any

from ...kernels.cpu.cache import compiled
from ...kernels.cpu.products import linear, linear_back
from ...kernels.cpu.vector import all_elements_at, only_if, split_at
from .cpu_scores import additive, additive_back, folded, folded_back, halves, halves_back, pair, pair_back
from .cpu_steps import draw_factors, drop_of, fill_loops, group, mean_heads, softmax, softmax_back, weigh

__all__ = ["backward", "drop_of", "forward", "group", "numbers", "regions"]


@functools.partial(compiled, allocates=False)
def forward(memory: Any, counts: Any, sizes: Any, slope: Any, concat: bool, mean: bool, halved: Any, paired: Any,
            scaled: Any, edged: Any, drop: Any, graph_: int, numbers: Any, places: Any, regions: Any, saved_: int,
            out_: int) -> None:  # fmt: skip
    """The output of the layer, and what `backward` reads."""
    (pointers, floats), (num_src, num_dst, size, loops, count, out_size) = memory, counts
    tensors, padding = all_elements_at(floats, places, numbers), size + max(loops, 0) - count
    x, x_dst, edge_attr, value_map, value_bias, key_map, key_bias, dst_map, dst_bias, edge_map = tensors[:10]
    skip_map, skip_bias, att, att_dst, att_edge = tensors[10:]
    value, key, dst, of_edges, s, d, folds, alpha, k, of_heads, _ = split_at(floats, saved_, regions)
    rowptr, src, _, rows = split_at(pointers, graph_, (num_dst + 1, count, padding, count))
    (out,) = split_at(floats, out_, (out_size,))
    x_dst, slope, ends = x_dst if x_dst.size else x, floats.dtype.type(slope), (src, rows)
    linear(x, value_map, value_bias, value, num_src)
    linear(x, key_map, key_bias, key, num_src)
    if dst.size:
        linear(x_dst, dst_map if dst_map.size else value_map, dst_bias, dst, num_dst)
    else:
        dst = value
    if edged is not None:
        if halved is not None:
            folded(att_edge, edge_map, sizes, folds)
        part = of_edges[: of_edges.size // (size + max(loops, 0)) * size]
        linear(edge_attr, folds if folds.size else edge_map, skip_bias[:0], part, size)
        fill_loops(rowptr, rows, size, loops, mean, of_edges, size < 0)
    if halved is not None:
        halves(value, att, sizes, s)
        halves(dst, att_dst, sizes, d)
        additive(rowptr, ends, sizes[0], slope, s, d, only_if(edged, of_edges), alpha)
    if paired is not None:
        pair(rowptr, ends, sizes, slope, dst, value, only_if(edged, of_edges), att, alpha)
    if scaled is not None:
        pair(rowptr, ends, sizes, slope, dst, key, only_if(edged, of_edges), None, alpha)
    softmax(rowptr, sizes[0], alpha)
    if drop is not None:
        draw_factors(drop, rows, sizes[0], k)
    linear(x_dst, skip_map, skip_bias, out, num_dst)
    of_heads[:] = 0
    total, of_edge = out if concat else of_heads, only_if(scaled, only_if(edged, of_edges))
    weigh(rowptr, ends, sizes, alpha, only_if(drop, k), value, of_edge, total)
    if not concat:
        mean_heads(of_heads, sizes, out, size < 0)  # a literal would be compiled for


@functools.partial(compiled, allocates=False)
def backward(memory: Any, counts: Any, sizes: Any, slope: Any, concat: bool, mean: bool, halved: Any, paired: Any,
             scaled: Any, edged: Any, drop: Any, graph_: int, numbers: Any, places: Any, regions: Any, saved_: int,
             grad_: int, work_: int, grads_: Any) -> None:  # fmt: skip
    """The gradients of all tensors that `grads_` has a place for; `work` is zeros, for the gradients of `regions`."""
    (pointers, floats), (num_src, num_dst, size, loops, count, out_size) = memory, counts
    tensors, of = all_elements_at(floats, places, numbers), all_elements_at(floats, grads_, numbers)
    for each in of:
        each[:] = 0
    x, x_dst, edge_attr, value_map, _, key_map, _, dst_map, _, edge_map = tensors[:10]
    skip_map, _, att, att_dst, att_edge = tensors[10:]
    of_x, of_x_dst, of_attr, of_value_map, of_value_bias, of_key_map, of_key_bias = of[:7]
    of_dst_map, of_dst_bias, of_edge_map = of[7:10]
    of_skip_map, of_skip_bias, of_att, of_att_dst, of_att_edge = of[10:]
    value, key, dst, of_edges, s, d, folds, alpha, k, _, _ = split_at(floats, saved_, regions)
    to_value, to_key, to_dst, to_edges, to_s, to_d, to_folds = split_at(floats, work_, regions)[:7]
    change, _, to_heads, to_att = split_at(floats, work_, regions)[7:]
    padding, (grad,) = size + max(loops, 0) - count, split_at(floats, grad_, (out_size,))
    rowptr, src, _, rows = split_at(pointers, graph_, (num_dst + 1, count, padding, count))
    slope, ends, has_dst = floats.dtype.type(slope), (src, rows), dst.size > 0
    if not x_dst.size:
        x_dst, of_x_dst = x, of_x
    if not has_dst:
        dst, to_dst = value, to_value
    if not concat:
        mean_heads(to_heads, sizes, grad, size >= 0)  # a literal would be compiled for
    of_edge, to_edge = only_if(edged, of_edges), only_if(edged, to_edges)
    softmax_back(rowptr, ends, sizes, grad if concat else to_heads, alpha, only_if(drop, k), value,
                 only_if(scaled, of_edge), change, to_value, only_if(scaled, to_edge))  # fmt: skip
    if halved is not None:
        additive_back(rowptr, ends, sizes[0], slope, s, d, of_edge, change, to_s, to_d, to_edge)
        halves_back(value, att, sizes, to_s, to_value, of_att)
        halves_back(dst, att_dst, sizes, to_d, to_dst, of_att_dst)
    if scaled is not None:
        pair_back(rowptr, ends, sizes, slope, dst, key, of_edge, None, change, to_dst, to_key, to_edge, None)
    if paired is not None:
        to_att = of_att if of_att.size else to_att
        pair_back(rowptr, ends, sizes, slope, dst, value, of_edge, att, change, to_dst, to_value, to_edge, to_att)
    linear_back(to_value, x, value_map, num_src, of_x, of_value_map, of_value_bias)
    linear_back(to_key, x, key_map, num_src, of_x if key.size else of_x[:0], of_key_map, of_key_bias)
    if has_dst:
        map_, of_map = (dst_map, of_dst_map) if dst_map.size else (value_map, of_value_map)
        linear_back(to_dst, x_dst, map_, num_dst, of_x_dst, of_map, of_dst_bias)
    linear_back(grad, x_dst, skip_map, num_dst, of_x_dst if skip_map.size else of_x_dst[:0], of_skip_map, of_skip_bias)
    if edged is not None:
        fill_loops(rowptr, rows, size, loops, mean, to_edges, size >= 0)
        part = to_edges[: to_edges.size // (size + max(loops, 0)) * size]
        map_, of_map = (folds, to_folds) if folds.size else (edge_map, of_edge_map)
        linear_back(part, edge_attr, map_, size, of_attr, of_map, grad[:0])
        if halved is not None:
            folded_back(att_edge, edge_map, sizes, to_folds, of_att_edge, of_edge_map)


def numbers(num_src: int, num_dst: int, size: int, row: int, out_size: int, features: Any) -> tuple[int, ...]:
    """Return the numbers of elements of the tensors: x, x_dst, edge_attr, W and b of values, of keys and of dst, W of
    the edges, W and b of the output, and the parts of a for src, dst and the edge."""
    in_src, in_dst, in_edge = features
    inputs, maps = (num_src * in_src, num_dst * in_dst, size * in_edge), (row * in_src, row) * 2
    return *inputs, *maps, row * in_dst, row, row * in_edge, out_size * in_dst, out_size, *(row,) * 3


def regions(counts: Any, sizes: Any, in_edge: int, has_dst: bool, concat: bool, options: Any) -> tuple[int, ...]:
    """Return the numbers of elements of what is saved: values, keys, features of dst where these have their own, what
    the features of edges are mapped to, s, d, a W_e, alpha, k, the output of each head where the layer's is their mean,
    and the gradient of a."""
    (num_src, num_dst, size, loops, count, _), heads, row = counts, sizes[0], sizes[0] * sizes[1]
    halved, _, scaled, edged, drop = options
    of_edges = (size + max(loops, 0)) * (heads if halved else row) if edged else 0
    score = (num_src * heads, num_dst * heads, heads * in_edge if edged else 0) if halved else (0, 0, 0)
    ends = num_src * row, num_src * row if scaled else 0, num_dst * row if has_dst else 0
    kept = count * heads if drop else 0
    return *ends, of_edges, *score, count * heads, kept, 0 if concat else num_dst * row, row
