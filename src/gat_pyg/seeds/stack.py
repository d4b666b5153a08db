"""Models of one class and shape as one module: their weights stacked, their calls made at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class Stack(nn.Module):
    """S models that differ in their weights alone, called as one: `[S, N, K]` where each gives `[N, K]`.

    All get the same arguments. Every parameter and buffer is that of the models, with S in front, and `torch.func.vmap`
    maps over it. `stack[s]` is a model of its own again, and `len(stack)` is S. Chance is drawn for all at once, but
    for that of gat_pyg's layers where `gat_pyg.philox.keyed` has a key for each.

    The averaged prediction of an ensemble is `stack(x, edge_index).softmax(-1).mean(0)`.

    Raises:
        ValueError: if there is no model, or one has parameters or buffers of other names or shapes than the first.

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
        for place, model in enumerate(models):
            if (shapes := {name: value.shape for name, value in _tensors(model).items()}) != first:
                name = next(name for name in {**first, **shapes} if first.get(name) != shapes.get(name))
                found, expected = (f"{name} {tuple(a[name])}" if name in a else f"no {name}" for a in (shapes, first))
                raise ValueError(
                    f"model {place} of the stack has {found}, expected {expected} as in the first: models of one class "
                    "with the same arguments."
                )
        self.models = copy.deepcopy(models[0])  # called with the weights of each in place of its own
        self.fill([_tensors(model) for model in models])

    def __len__(self) -> int:
        return next(iter(_tensors(self.models).values())).size(0)

    def __getitem__(self, place: int) -> nn.Module:
        own: dict[int, Any] = {}  # in place of copies of all S
        for value in _tensors(self.models).values():
            row = value.detach()[place].clone()
            own[id(value)] = nn.Parameter(row, value.requires_grad) if isinstance(value, nn.Parameter) else row
        return copy.deepcopy(self.models, own)

    @property
    def supports_sparse_features(self) -> bool:
        """True if the models accept x as a torch.sparse CSR matrix."""
        return bool(getattr(self.models, "supports_sparse_features", False))

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Those of the models' parameters that they name as subject to weight decay: all, where they name none."""
        own: Iterable[nn.Parameter] = getattr(self.models, "decayed_parameters", self.models.parameters)()
        return own

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of each model for the same arguments."""
        out: Tensor = self.each(lambda model: model(*args, **kwargs))
        return out

    def each(self, call: Callable[..., Any], *mapped: Tensor) -> Any:
        """`call(model, *own)` for each of the models, own being its row of each tensor in `mapped`.

        `model.method(name, ...)` calls another method than its forward.
        """

        def one(weights: dict[str, Tensor], *own: Tensor) -> Any:
            return call(_Weighted(self.models, weights), *own)

        return vmap(one, randomness="different")(_tensors(self.models), *mapped)

    def weights(self) -> dict[str, Tensor]:
        """All parameters and buffers `[S, ...]` by the names that they have in one model."""
        return _tensors(self.models)

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Keep some of the models."""
        for value in _tensors(self.models).values():
            value.grad = None
            value.data = value.data.index_select(0, rows)

    @torch.no_grad()
    def fill(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Become as many models as there are, each with its own weights."""
        for name, value in _tensors(self.models).items():
            value.grad = None
            value.data = torch.stack([one[name] for one in weights]).to(value.device)


class _Weighted:
    """A model with other weights than its own."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.weights, args, kwargs)

    def method(self, name: str, *args: Any) -> Any:
        weights = {f"model.{key}": value for key, value in self.weights.items()}
        return functional_call(_Method(self.model, name), weights, args)


class _Method(nn.Module):
    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any) -> Any:
        return getattr(self.model, self.name)(*args)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
