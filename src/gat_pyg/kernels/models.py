"""Several stacked models as one call: the rules by which torch maps over kernels.

A batch of features or of models is an axis in front of every operand, of the seed and of a tensor p of dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def save_arguments(ctx: Any, *values: Any) -> None:
    """Store arguments of an autograd function for its backward pass: tensors and other values, in their order."""
    ctx.others = [None if isinstance(value, Tensor) else value for value in values]
    ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))


def saved_arguments(ctx: Any) -> list[Any]:
    """Return what `save_arguments` has stored."""
    return [other if value is None else value for value, other in zip(ctx.saved_tensors, ctx.others, strict=True)]


def in_front(value: Any, dim: int | None, size: int) -> Any:
    """Return a tensor with its mapped dimension in front, repeated if it has none; another value as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def in_forward_mode() -> bool:
    """Return whether a forward-mode derivative is being computed: `torch.func.jvp`, `jacfwd`, `forward_ad`."""
    return forward_ad._current_level >= 0


def each_model(function: Any, batch_size: int, in_dims: Any, args: Any, x: int) -> tuple[tuple[Tensor, ...], int]:
    """Apply `function` to every model with its own seed, or to all with one seed.

    If x, the argument at that position, has an axis of models already, the two become one.
    """
    nested = args[x].dim() - (in_dims[x] is not None) == 4
    operands = [in_front(arg, dim, batch_size) for arg, dim in zip(args, in_dims, strict=True)]
    if nested:
        operands = [arg.flatten(0, 1) if isinstance(arg, Tensor) else arg for arg in operands]
    results = function.apply(*operands)
    return tuple(t.unflatten(0, (batch_size, -1)) if nested else t for t in results), 0


def each_cotangent(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function: of a batch of cotangents, as `is_grads_batched=True` and
    `torch.autograd.functional.jacobian(vectorize=True)` pass, it runs once for each.

    They use a vmap older than `torch.func.vmap`, which has no rule for a function and for many of torch's operations.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        batched = [grad for grad in grads if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)]
        if not batched:  # a copy of a wrapper, as tensors of other processes have, is a tensor with memory
            return backward(ctx, *[g if g is None or type(g) is Tensor else g.clone() for g in grads])
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        size = torch._remove_batch_dim(batched[0], level, 1, 0).size(0)
        plain = [None if grad is None else torch._remove_batch_dim(grad, level, size, 0) for grad in grads]
        rows = [backward(ctx, *(None if grad is None else grad[at] for grad in plain)) for at in range(size)]
        columns = zip(*rows, strict=True)
        return tuple(None if each[0] is None else torch._add_batch_dim(torch.stack(each), 0, level) for each in columns)

    return run


def to_heads(tensor: Tensor, axis: int) -> Tensor:
    """The models as more heads: `[S, ..., H, ...]` to `[..., S H, ...]`."""
    return tensor.movedim(0, axis).flatten(axis, axis + 1)


def to_models(tensor: Tensor, axis: int, models: int) -> Tensor:
    """The inverse of `to_heads`."""
    stacked: Tensor = tensor.unflatten(axis, (models, -1))
    return stacked.movedim(axis, 0)
