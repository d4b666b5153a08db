"""Several stacked models as one call: the rule by which `torch.func.vmap` maps over kernels.

A batch of features or of models is an axis in front of every operand, and of the seed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from ..graph.remembered import NOT_OVER_THE_GRAPH


def in_forward_mode() -> bool:
    """Return whether a forward-mode derivative is being computed: `torch.func.jvp`, `jacfwd`, `forward_ad`."""
    return forward_ad._current_level >= 0


def each_model(
    function: Any, batch_size: int, in_dims: Any, args: Any, x: int, edge_index: int
) -> tuple[tuple[Tensor, ...], int]:
    """`function` of every model with its own seed, or all with the one there is; `x`, `edge_index`: which argument.

    Where x has an axis of models already, the two become one.
    """
    if in_dims[edge_index] is not None:
        raise NotImplementedError(NOT_OVER_THE_GRAPH)
    nested = args[x].dim() - (in_dims[x] is not None) == 4
    given = []
    for at, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and at != edge_index:
            arg = arg.expand(batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
            arg = arg.flatten(0, 1) if nested else arg
        given.append(arg)
    found = function.apply(*given)
    return tuple(t.unflatten(0, (batch_size, -1)) if nested else t for t in found), 0


def to_heads(tensor: Tensor | None, axis: int) -> Tensor | None:
    """The models as more heads: `[S, ..., H, ...]` to `[..., S H, ...]`."""
    return None if tensor is None else tensor.movedim(0, axis).flatten(axis, axis + 1)


def to_models(tensor: Tensor | None, axis: int, models: int) -> Tensor | None:
    """The inverse of `to_heads`."""
    return None if tensor is None else tensor.unflatten(axis, (models, -1)).movedim(axis, 0)
