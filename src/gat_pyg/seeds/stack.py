"""Models of one class and shape as one module: stacked weights, one vectorised call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..tasks.model import members


class Stack(nn.Module):
    """S models that differ only in their weights, called as one: the output is `[S, N, K]` if each returns `[N, K]`.

    All models get the same arguments. Every parameter and buffer has a leading dimension S, over which
    `torch.func.vmap` maps. `stack[s]` is a copy of one model, and `len(stack)` is S. Random numbers are drawn for all
    models at once, except in gat_pyg's layers, where `gat_pyg.philox.keyed` may have a key for each model.

    The averaged prediction of an ensemble is `stack(x, edge_index).softmax(-1).mean(0)`.

    Raises:
        ValueError: if there is no model, or parameters or buffers differ in name or shape from the first model's.

    Example:
        >>> stack = Stack([nn.Linear(5, 2) for _ in range(3)])
        >>> stack(torch.ones(4, 5)).shape, stack[2](torch.ones(4, 5)).shape
        (torch.Size([3, 4, 2]), torch.Size([4, 2]))
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        if not models:
            raise ValueError("there is no model to stack, expected at least one.")
        first = {name: value.shape for name, value in _tensors(models[0]).items()}
        for index, model in enumerate(models):
            if (shapes := {name: value.shape for name, value in _tensors(model).items()}) != first:
                name = next(name for name in {**first, **shapes} if first.get(name) != shapes.get(name))
                actual, expected = (f"{name} {tuple(a[name])}" if name in a else f"no {name}" for a in (shapes, first))
                raise ValueError(
                    f"model {index} of the stack has {actual}, expected {expected} as in the first: models of one "
                    "class with the same arguments."
                )
        self.models = copy.deepcopy(models[0])  # called with each model's weights in turn
        self.fill([_tensors(model) for model in models])

    def __len__(self) -> int:
        return next(iter(_tensors(self.models).values())).size(0)

    def __getitem__(self, index: int) -> nn.Module:
        memo: dict[int, Any] = {}  # deepcopy takes these instead of copying the weights of all S models
        for value in _tensors(self.models).values():
            row = value.detach()[index].clone()
            memo[id(value)] = nn.Parameter(row, value.requires_grad) if isinstance(value, nn.Parameter) else row
        return copy.deepcopy(self.models, memo)

    @property
    def supports_sparse_features(self) -> bool:
        """True if the models accept x as a torch.sparse CSR matrix."""
        return members(self.models).supports_sparse_features

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters with weight decay: the models' `decayed_parameters()`, by default all."""
        return (members(self.models).decayed_parameters or self.models.parameters)()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of each model for the same arguments."""
        out: Tensor = self.each(lambda model: model(*args, **kwargs))
        return out

    def each(self, call: Callable[..., Any], *mapped: Tensor) -> Any:
        """Return `call(model, *rows)` for each model, stacked; `rows` are the model's rows of the tensors in `mapped`.

        In `call`, `model(...)` is the forward and `model.penalty(...)` the method `penalty`.
        """

        def call_one(weights: dict[str, Tensor], *rows: Tensor) -> Any:
            return call(_Weighted(self.models, weights), *rows)

        return vmap(call_one, randomness="different")(_tensors(self.models), *mapped)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers `[S, ...]` by their names in a single model."""
        return _tensors(self.models)

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Remove all models but those of these rows."""
        for value in _tensors(self.models).values():
            value.grad = None
            value.data = value.data.index_select(0, rows)

    @torch.no_grad()
    def fill(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace all models: there is one for each entry of `weights`."""
        for name, value in _tensors(self.models).items():
            value.grad = None
            value.data = torch.stack([each[name] for each in weights]).to(value.device)


class _Weighted:
    """A model that is called with the given weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.weights, args, kwargs)

    def penalty(self, *args: Any) -> Any:
        weights = {f"model.{key}": value for key, value in self.weights.items()}
        return functional_call(_Penalty(self.model), weights, args)


class _Penalty(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model.penalty(*args)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
