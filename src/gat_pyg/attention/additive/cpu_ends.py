"""The scores a . z of few features on a CPU, and their gradients: one pass each, by one thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph.memory import elements
from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.rows import Shape
from ...kernels.cpu.vector import lane_sum, load, only_if, per_feature, per_head, pointer, splat, store


@compiled
def _dots(sizes: Any, layout: Any, narrow: Any, x_: Any, a_: Any, scores_: Any) -> None:
    """<a, x_n> of each head."""
    heads, channels = sizes
    lanes, tile, ragged = layout
    x, a, scores = pointer(x_, 0), pointer(a_, 0), pointer(scores_, 0)
    width = 1 << len(tile)
    whole = channels // width * width
    for head in range(0, heads, 1 << len(lanes)):
        count, many = only_if(ragged, heads - head), only_if(ragged, (heads - head) * channels)
        for n in range(head, scores_.size, heads):
            if narrow is not None:
                values = load(x, n * channels, narrow, many) * load(a, head * channels, narrow, many)
                store(scores, n, per_head(values, lanes), count)
            else:
                for h in range(min(1 << len(lanes), heads - head)):
                    at, to, total = (n + h) * channels, (head + h) * channels, splat(x, 0.0, tile)
                    for c in range(0, whole, width):
                        total = total + load(x, at + c, tile, None) * load(a, to + c, tile, None)
                    if whole < channels:
                        rest = channels - whole
                        total = total + load(x, at + whole, tile, rest) * load(a, to + whole, tile, rest)
                    scores[n + h] = lane_sum(total)


@inline
def _add_back(x: Any, a: Any, of: Any, at: Any, width: Any, count: Any, grad_x: Any, total: Any) -> Any:
    """Add the terms of grad x = s a for a vector of features, and return `total` plus those of grad a = s x."""
    store(grad_x, at, load(grad_x, at, width, count) + of * a, count)
    return total + of * load(x, at, width, count)


@compiled
def _dots_back(sizes: Any, layout: Any, narrow: Any, x_: Any, a_: Any, of_: Any, grad_x_: Any, grad_a_: Any) -> None:
    """Add the gradient of `_dots` to that of x, and store that of a."""
    heads, channels = sizes
    lanes, tile, ragged = layout
    x, a, of, grad_x, grad_a = pointer(x_, 0), pointer(a_, 0), pointer(of_, 0), pointer(grad_x_, 0), pointer(grad_a_, 0)
    if narrow is not None:
        for head in range(0, heads, 1 << len(lanes)):
            count, many = only_if(ragged, heads - head), only_if(ragged, (heads - head) * channels)
            total, a_h = splat(x, 0.0, narrow), load(a, head * channels, narrow, many)
            for n in range(head, of_.size, heads):
                each = per_feature(load(of, n, lanes, count), narrow)
                total = _add_back(x, a_h, each, n * channels, narrow, many, grad_x, total)
            store(grad_a, head * channels, total, many)
    else:
        width = 1 << len(tile)
        for h in range(heads):
            for c in range(0, channels, width):
                to = h * channels + c
                total = splat(x, 0.0, tile)
                if c + width <= channels:
                    a_h = load(a, to, tile, None)
                    for n in range(h, of_.size, heads):
                        total = _add_back(x, a_h, of[n], n * channels + c, tile, None, grad_x, total)
                    store(grad_a, to, total, None)
                else:
                    rest = channels - c
                    a_h = load(a, to, tile, rest)
                    for n in range(h, of_.size, heads):
                        total = _add_back(x, a_h, of[n], n * channels + c, tile, rest, grad_x, total)
                    store(grad_a, to, total, rest)


def dots(x: Tensor, a: Tensor) -> Tensor:
    """Return <a, x_n> of each head, `[N, H, C]` and `[1, H, C]` to `[N, H]`, by one thread."""
    shape = Shape.of(x, a)
    scores = shape.empty(x.size(0), shape.heads)
    arrays = map(elements, (x.contiguous(), a.contiguous(), scores))
    _dots(shape.sizes, shape.layout, shape.narrow, *arrays)
    return scores


def dots_back(x: Tensor, a: Tensor, of: Tensor, grad_x: Tensor) -> Tensor:
    """Add the gradient of `dots` to that of x, and return that of a."""
    shape, grad_a = Shape.of(x, a), torch.empty_like(a)
    arrays = map(elements, (x.contiguous(), a.contiguous(), of.contiguous(), grad_x, grad_a))
    _dots_back(shape.sizes, shape.layout, shape.narrow, *arrays)
    return grad_a
