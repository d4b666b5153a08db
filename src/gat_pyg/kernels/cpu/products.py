"""Products of matrices within a kernel: of few rows, for which a call of torch takes longer than the product."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .cache import inline, step
from .vector import LANES, load, pointer, splat, store

ROWS = 6  # of a product that are computed at once: with two vectors of AVX2 each, their sums fill its registers


@inline
def _add(c: Any, at: int, values: Any, count: Any) -> None:
    """Add a vector, or its first `count` numbers, to C."""
    store(c, at, load(c, at, LANES, count) + values, count)


@inline
def _six_rows(a: Any, b: Any, c: Any, i: int, j: int, depth: int, down: int, across: int, width: int,
         count: Any) -> None:  # fmt: skip
    """`ROWS` rows of a product from row i on, `LANES` columns from j on, the last `count` of them if not None."""
    one = splat(b, 0.0, LANES)
    two, three, four, five, six = one, one, one, one, one
    at = i * down
    for k in range(depth):
        row = load(b, k * width + j, LANES, count)
        one, two, three = one + a[at] * row, two + a[at + down] * row, three + a[at + 2 * down] * row
        four, five = four + a[at + 3 * down] * row, five + a[at + 4 * down] * row
        six = six + a[at + 5 * down] * row
        at += across
    to = i * width + j
    _add(c, to, one, count)
    _add(c, to + width, two, count)
    _add(c, to + 2 * width, three, count)
    _add(c, to + 3 * width, four, count)
    _add(c, to + 4 * width, five, count)
    _add(c, to + 5 * width, six, count)


@step
def multiply(a_: Any, transposed: bool, b_: Any, c_: Any, rows: int, depth: int) -> None:
    """Add A B to C `[rows, width]`: A is `[rows, depth]`, or `[depth, rows]` if `transposed`, B `[depth, width]`."""
    width, (down, across) = c_.size // max(rows, 1), (1, rows) if transposed else (depth, 1)
    a, b, c = pointer(a_, 0), pointer(b_, 0), pointer(c_, 0)
    sixes = rows // ROWS * ROWS
    for j in range(0, width, LANES):
        count = width - j
        for i in range(0, sixes, ROWS):
            if count >= LANES:
                _six_rows(a, b, c, i, j, depth, down, across, width, None)
            else:
                _six_rows(a, b, c, i, j, depth, down, across, width, count)
        for i in range(sixes, rows):
            total = splat(b, 0.0, LANES)
            for k in range(depth):
                total = total + a[i * down + k * across] * load(b, k * width + j, LANES, count)
            _add(c, i * width + j, total, count)


@functools.partial(step, allocates=True)
def linear(x: Any, weight: Any, bias: Any, out: Any, rows: int) -> None:
    """x W^T + b; an empty W or b has no term."""
    width = out.size // max(rows, 1)
    depth = weight.size // max(width, 1)
    for n in range(rows):
        for c in range(width):
            out[n * width + c] = bias[c] if bias.size else 0
    if weight.size:
        columns = np.empty(weight.size, weight.dtype)
        for c in range(width):
            for k in range(depth):
                columns[k * width + c] = weight[c * depth + k]
        multiply(x, rows < 0, columns, out, rows, depth)  # a literal would be compiled for


@step
def linear_back(grad: Any, x: Any, weight: Any, rows: int, grad_x: Any, grad_weight: Any, grad_bias: Any) -> None:
    """Add the gradients of `linear`, each unless it is empty."""
    width, no = grad.size // max(rows, 1), rows < 0  # a literal would be compiled for
    if grad_x.size:
        multiply(grad, no, weight, grad_x, rows, width)
    if grad_weight.size:
        multiply(grad, not no, x, grad_weight, width, rows)
    if grad_bias.size:
        for n in range(rows):
            for c in range(width):
                grad_bias[c] += grad[n * width + c]
