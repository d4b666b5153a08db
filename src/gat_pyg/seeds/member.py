"""A member of a stack: one of the trainings that are computed as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..tasks.objective import Objective
from ..training.optimisation import Optimisation
from ..training.stopping import Criterion


@dataclass(frozen=True)
class Member:
    """The seed and the settings of one training of a stack, beside its model.

    Args:
        seed: random seed of the model's initial weights and dropout masks.
        objective: its loss; the metric and the labels are those of all members.
        optimisation: as in `Transductive`.
        patience, criterion: as in `PaperStopping`.
        settings: the names and values by which its `Outcome` shows it, beside the seed.
    """

    seed: int
    objective: Objective
    optimisation: Optimisation = Optimisation()
    patience: int | None = 100
    criterion: Criterion = "both"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([*(f"{name}={value}" for name, value in self.settings.items()), f"seed {self.seed}"])

    @property
    def text(self) -> str:
        """All that determines its training, beside the model: equal for equal members, also in another process."""
        values = [f"{item.name}={spelled(getattr(self, item.name))}" for item in dataclasses.fields(self)[1:-1]]
        return ", ".join([f"seed {self.seed}", *values])


def spelled(value: Any) -> str:
    """Return the text of a setting: for a class, a function or a `functools.partial` of it, its name and arguments.

    >>> spelled(partial(torch.optim.Adam, betas=(0.9, 0.95)))
    'Adam(betas=(0.9, 0.95))'
    """
    if isinstance(value, partial):
        arguments = [*map(repr, value.args), *(f"{key}={spelled(each)}" for key, each in value.keywords.items())]
        return f"{spelled(value.func)}({', '.join(arguments)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(f'{name}={spelled(each)}' for name, each in named)})"
    return getattr(value, "__qualname__", None) or repr(value)


def runs_of(keys: Sequence[Any]) -> list[slice]:
    """Return the runs of equal neighbours.

    >>> runs_of(["a", "a", "b"])
    [slice(0, 2, None), slice(2, 3, None)]
    """
    starts = [row for row, key in enumerate(keys) if not row or key != keys[row - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)]


@dataclass(frozen=True)
class SharedObjective:
    """The objective of neighbouring rows that differ only in numbers of the loss, which are tensors with a row each."""

    rows: slice
    objective: Objective
    numbers: dict[str, Tensor]

    @classmethod
    def of(cls, objectives: Sequence[Objective], device: torch.device) -> list[SharedObjective]:
        """Return the shared objectives of all rows of a stack, in their order."""
        shared, dtype = [], torch.float32 if device.type == "mps" else torch.float64
        for rows in runs_of([shape_of(objective) for objective in objectives]):
            first, *others = objectives[rows]
            names = [item.name for item in dataclasses.fields(first)]
            names = [name for name in names if any(getattr(each, name) != getattr(first, name) for each in others)]
            numbers = {
                name: torch.tensor([getattr(each, name) for each in objectives[rows]], dtype=dtype, device=device)
                for name in names
            }
            shared.append(cls(rows, first, numbers))
        return shared

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Objective:
        """Return the objective of one row, with its numbers."""
        changes: dict[str, Any] = dict(numbers)
        return dataclasses.replace(self.objective, **changes) if changes else self.objective


def shape_of(objective: Objective) -> tuple[Any, ...]:
    """Return a key that is equal for objectives that differ only in fractional numbers of the loss."""

    def shape(name: str, value: Any) -> Any:
        if name not in objective.loss_options or isinstance(value, (str, bool)):
            return value
        if isinstance(value, (tuple, list)):
            return len(value)
        return "a number" if isinstance(value, (int, float)) else value

    values = [(item.name, shape(item.name, getattr(objective, item.name))) for item in dataclasses.fields(objective)]
    return type(objective), *values
