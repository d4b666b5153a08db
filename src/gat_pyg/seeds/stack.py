"""Models of one class and shape as one module: stacked weights, one vectorised call."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from ..features.dropout import dropout_of_torch
from ..tasks.model import members

FIXED = ("negative_slope", "edge_dropout")  # kernels take the first as a plain number, and layers branch on the second


class Stack(nn.Module):
    """S models of one shape, called as one: the output is `[S, N, K]` if each returns `[N, K]`.

    All models get the same arguments. Every parameter and buffer has a leading dimension S, over which
    `torch.func.vmap` maps. `stack[s]` is a copy of one model, and `len(stack)` is S. Random numbers are drawn for all
    models at once, except in gat_pyg's layers, where `gat_pyg.philox.keyed` may have a key for each model.

    Attributes of the models and their modules may differ if they are fractional numbers, as those of dropout, but not
    `negative_slope` and `edge_dropout`. In a call, such an attribute is a tensor without dimensions, over which vmap
    maps as over the weights.

    The averaged prediction of an ensemble is `stack(x, edge_index).softmax(-1).mean(0)`.

    Raises:
        ValueError: if there is no model, parameters or buffers differ in name or shape from the first model's, or a
            plain attribute differs that is not a fractional number, or is one of `FIXED`.

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
        self.numbers = _differing(models)
        self._has_batch_norm = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self.models.modules())
        self.fill([_tensors(model) for model in models], self.numbers)

    def __len__(self) -> int:
        return next(iter(_tensors(self.models).values())).size(0)

    def __getitem__(self, index: int) -> nn.Module:
        memo: dict[int, Any] = {}  # deepcopy takes these instead of copying the weights of all S models
        for value in _tensors(self.models).values():
            row = value.detach()[index].clone()
            memo[id(value)] = nn.Parameter(row, value.requires_grad) if isinstance(value, nn.Parameter) else row
        model = copy.deepcopy(self.models, memo)
        for (name, key), number in self.numbers[index].items():
            setattr(model.get_submodule(name), key, number)
        return model

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

    def each(self, call: Callable[..., Any], *mapped: Tensor, in_turn: bool = False) -> Any:
        """Return `call(model, *rows)` for each model, stacked; `rows` are the model's rows of the tensors in `mapped`.

        In `call`, `model(...)` is the forward and `model.penalty(...)` the method `penalty`. With `in_turn`, one model
        is called after the other, without vmap, and `call` returns a tensor.
        """

        def call_one(weights: dict[str, Tensor], numbers: Numbers, *rows: Tensor) -> Any:
            with _set(self.models, numbers) if numbers else nullcontext():
                return call(_Weighted(self.models, weights), *rows)

        weights = _tensors(self.models)
        if in_turn:
            rows = {name: value.unbind() for name, value in weights.items()}
            return torch.stack(
                [
                    call_one({name: row[s] for name, row in rows.items()}, values, *(tensor[s] for tensor in mapped))
                    for s, values in enumerate(self.numbers)
                ]
            )
        with _InStack() if self._mapped or self._has_batch_norm else nullcontext():
            return vmap(call_one, randomness="different")(weights, self._mapped, *mapped)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers `[S, ...]` by their names in a single model."""
        return _tensors(self.models)

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Remove all models but those of these rows."""
        for value in _tensors(self.models).values():
            value.grad = None
            value.data = value.data.index_select(0, rows)
        self._set_numbers([self.numbers[row] for row in rows.tolist()])

    @torch.no_grad()
    def fill(self, weights: Sequence[Mapping[str, Tensor]], numbers: Sequence[Numbers]) -> None:
        """Replace all models: there is one for each entry of `weights` and `numbers`."""
        for name, value in _tensors(self.models).items():
            value.grad = None
            value.data = torch.stack([each[name] for each in weights]).to(value.device)
        self._set_numbers(numbers)

    def _set_numbers(self, numbers: Sequence[Numbers]) -> None:
        """Set the values of the attributes that differ: of each model, and as tensors `[S]`."""
        self.numbers, device = list(numbers), next(iter(_tensors(self.models).values())).device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # a dropout mask depends on all bits of p
        self._mapped = {
            name: torch.tensor([each[name] for each in numbers], dtype=dtype, device=device) for name in numbers[0]
        }

    def _apply(self, *args: Any, **kwargs: Any) -> Stack:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if {value.device for value in self._mapped.values()} - {value.device for value in self.weights().values()}:
            self._set_numbers(self.numbers)  # else they stay where a CUDA graph reads them
        return self


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


Numbers = dict[tuple[str, str], Any]  # of one model: by the names of the module and its attribute


def _differing(models: Sequence[nn.Module]) -> list[Numbers]:
    """Return the numbers of each model that are not the same in all of them."""
    plain = [_plain_attributes(model) for model in models]
    first, names = plain[0], list(dict.fromkeys(name for attributes in plain for name in attributes))
    differing = [name for name in names if any(each.get(name) != first.get(name) for each in plain)]
    for name in differing:
        values = [each.get(name) for each in plain]
        are_numbers = all(type(value) in (int, float) for value in values) and float in map(type, values)
        if name[1] in FIXED or not are_numbers:
            index, other = next((i, value) for i, value in enumerate(values) if value != values[0])
            where = ".".join(filter(None, name))
            raise ValueError(
                f"model {index} of the stack has {where}={other!r}, expected {values[0]!r} as in the first: models "
                "that differ only in fractional numbers, such as the probability of dropout, but not "
                f"{' or '.join(FIXED)}."
            )
    return [{name: each[name] for name in differing} for each in plain]


def _plain_attributes(model: nn.Module) -> Numbers:
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


@contextmanager
def _set(model: nn.Module, numbers: Numbers) -> Iterator[None]:
    """Context manager: the model with these numbers as attributes of its modules."""
    attributes = [(vars(model.get_submodule(name)), key, number) for (name, key), number in numbers.items()]
    before = [values[key] for values, key, _ in attributes]
    try:
        for values, key, number in attributes:
            values[key] = number
        yield
    finally:
        for (values, key, _), number in zip(attributes, before, strict=True):
            values[key] = number


class _InStack(TorchFunctionMode):
    """Let `F.dropout`, which PyG's layers call, accept a tensor as p, and compute `F.batch_norm` model by model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.batch_norm and args[0].device.type == "cpu" and torch._C._functorch.is_batchedtensor(args[0]):
            names = ("weight", "bias", "training", "momentum", "eps")
            return _BatchNorm.apply(*args, *map(options.get, names))  # type: ignore[no-untyped-call]
        if func is F.dropout and isinstance(p := options.get("p"), Tensor):
            (x,) = args
            return dropout_of_torch(x, p) if options.get("training", True) else x
        return func(*args, **options)


class _BatchNorm(torch.autograd.Function):
    """`F.batch_norm` that vmap computes for each model on its own.

    torch joins the channels of all models, and on a CPU reads each channel of these long rows with a stride: 61 ms
    backward for four models of 10,000 nodes and 64 channels, against 2 ms for one.
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        """Return the result for a single model."""
        return F.batch_norm(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: there is no gradient outside of vmap."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        """Return the results of all models."""
        each = [
            itertools.repeat(value, info.batch_size) if dim is None else value.unbind(dim)
            for value, dim in zip(args, in_dims, strict=True)
        ]
        return torch.stack([F.batch_norm(*row) for row in zip(*each, strict=True)]), 0


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
