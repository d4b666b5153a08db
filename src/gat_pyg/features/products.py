"""Products of sparse feature matrices and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.device import load_kernels, missing_reason, result_dtype
from ..kernels.models import each_cotangent, in_forward_mode, save_arguments, saved_arguments
from .pattern import Pattern
from .sparse import _dropped

# Two sums over the non-zeros, each the derivative of the other, of one matrix or of several with one pattern:
#   out_i = sum_k v_k W_col(k) over row i     and     p_k = <left_row(k), right_col(k)>.
# In forward mode plain torch computes both, and holds all terms: torch returns wrong second derivatives for the `jvp`
# of an autograd function within another forward mode.


def sums(values: Tensor, weight: Tensor, seed: Tensor | None, p: Any, pattern: Pattern, back: bool) -> Tensor:
    """Return X W `[rows, D]`, or X^T W `[columns, D]` if `back`, of values that are dropped out by the seed, if any.

    Differentiable any number of times in the values and in W; as of `_Sums`, an axis may be in front.
    """
    if not in_forward_mode():
        out: Tensor = _Sums.apply(values, weight, seed, p, pattern, back)
        return out
    values = values if seed is None else _dropped(values, seed, p)
    row, col, num_rows = pattern.row, pattern.col, pattern.num_rows
    if back:
        row, col, num_rows = col, row, pattern.num_cols
    terms = values.unsqueeze(-1) * weight.index_select(-2, col)
    return terms.new_zeros(*terms.shape[:-2], num_rows, terms.size(-1)).index_add(-2, row, terms)


def _products(left: Tensor, right: Tensor, pattern: Pattern) -> Tensor:
    if in_forward_mode():
        return (left.index_select(-2, pattern.row) * right.index_select(-2, pattern.col)).sum(-1)
    out: Tensor = _Products.apply(left, right, pattern)
    return out


class _Sums(torch.autograd.Function):
    """X W `[rows, D]`, or X^T W `[columns, D]` if `back`, of the matrix with these values, dropped out by the seed.

    Values, weight, seed and a tensor p may have an axis in front.
    """

    @staticmethod
    def forward(values: Tensor, weight: Tensor, seed: Tensor | None, p: Any, pattern: Pattern, back: bool) -> Tensor:
        out = _weighted_rows(values, weight, seed, p, pattern, back)
        if out is not None:
            return out
        if seed is not None:
            return _Sums.forward(_dropped(values, seed, p), weight, None, p, pattern, back)
        if batch := values.shape[:-1] or weight.shape[:-2]:
            each = zip(values.expand(*batch, -1), weight.expand(*batch, -1, -1), strict=True)
            return torch.stack([_Sums.forward(*operands, None, p, pattern, back) for operands in each])
        if back:
            pattern, place = pattern.transpose
            values = values.index_select(0, place)
        return F.embedding_bag(
            pattern.col,
            weight.contiguous(),
            pattern.rowptr,
            mode="sum",
            per_sample_weights=values.contiguous(),
            include_last_offset=True,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save_arguments(ctx, *inputs)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, seed, p, pattern, back = saved_arguments(ctx)
        grad_values = grad_weight = None
        if ctx.needs_input_grad[0]:
            left, right = (weight, grad) if back else (grad, weight)
            products = _products(left, right, pattern)
            products = products if seed is None else _dropped(products, seed, p)
            grad_values = products.sum_to_size(values.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = sums(values, grad, seed, p, pattern, not back).sum_to_size(weight.shape)
        return grad_values, grad_weight, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_Sums, info.batch_size, in_dims, args, (1, 2, 0, 0))


class _Products(torch.autograd.Function):
    """The inner products of rows `[rows, D]` and `[columns, D]` at the non-zeros: `[nnz]`; or with an axis in front."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, pattern: Pattern) -> Tensor:
        if batch := left.shape[:-2] or right.shape[:-2]:
            each = zip(left.expand(*batch, -1, -1), right.expand(*batch, -1, -1), strict=True)
            return torch.stack([_Products.forward(*operands, pattern) for operands in each])
        numbers = 1 << 19 if left.is_cpu else 1 << 26  # gathered at a time: on a CPU, what a core's cache holds
        step = max(1, numbers // max(1, left.size(1)))
        left, right = left.contiguous(), right.contiguous()
        ends = zip(pattern.row.split(step), pattern.col.split(step), strict=True)
        blocks = [(left.index_select(0, row) * right.index_select(0, col)).sum(1) for row, col in ends]
        return torch.cat(blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pattern], output: Tensor) -> None:
        left, right, ctx.pattern = inputs
        ctx.save_for_backward(left, right)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        grad_left = grad_right = None
        if ctx.needs_input_grad[0]:
            grad_left = sums(grad, right, None, 0.0, ctx.pattern, False).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            grad_right = sums(grad, left, None, 0.0, ctx.pattern, True).sum_to_size(right.shape)
        return grad_left, grad_right, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_Products, info.batch_size, in_dims, args, (2, 2))


def _weighted_rows(
    values: Tensor, weight: Tensor, seed: Tensor | None, p: float | Tensor, pattern: Pattern, back: bool
) -> Tensor | None:
    """Return X W, or X^T W if `back`, of several sparse matrices with one pattern.

    With a seed, the values are dropped out as by `keep`. `values` `[nnz]`, `weight` `[columns, D]`, or `[rows, D]`
    if `back`, `seed` and `p`: at least one of them has an axis in front. Returns None for a single matrix,
    for which torch is as fast, and if there is no kernel.
    """
    several = values.dim() > 1 or weight.dim() > 2 or any(isinstance(t, Tensor) and t.dim() > 0 for t in (seed, p))
    device = weight.device.type
    if not several or pattern.by_torch or torch.compiler.is_compiling() or missing_reason(device) is not None:
        return None
    out: Tensor | None = load_kernels("features", device).weighted_rows(values, weight, seed, p, pattern, back)
    return None if out is None else out.to(result_dtype(values, weight))


def _each(function: Any, n: int, in_dims: Any, args: Any, dims: tuple[int, ...]) -> tuple[Tensor, int]:
    """Apply `function` to all n, with the axis of vmap in front; an operand that has none is shared by all.

    The first arguments have so many `dims` each, and one more where they are several already: both axes become one.
    """
    operands, rest = args[: len(dims)], args[len(dims) :]
    front = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(operands, in_dims, strict=False)]
    several = [
        isinstance(t, Tensor) and t.dim() - ndim > (dim is not None)
        for t, dim, ndim in zip(operands, in_dims, dims, strict=False)
    ]
    if not any(several):
        return function.apply(*front, *rest), 0
    m = next(t.size(-ndim - 1) for t, ndim, nested in zip(front, dims, several, strict=True) if nested)
    for at, (t, dim, ndim, nested) in enumerate(zip(front, in_dims, dims, several, strict=False)):
        if dim is not None or nested:
            t = t if nested else t.unsqueeze(t.dim() - ndim)
            front[at] = t.expand(n, m, *t.shape[t.dim() - ndim :]).flatten(0, 1)
    out: Tensor = function.apply(*front, *rest)
    return out.unflatten(0, (n, m)), 0
