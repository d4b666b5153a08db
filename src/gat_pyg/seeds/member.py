"""A member of a stack: one of the trainings that are computed as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..tasks.objective import Objective
from ..training.optimisation import Optimisation, _called
from ..training.stopping import Criterion

T = TypeVar("T")

TORCHS = "torch.optim.lr_scheduler"  # in these, the rate of a group depends on this group and the epoch alone


@dataclass(frozen=True)
class Member:
    """The seed and the settings of one training of a stack, beside its model.

    Args:
        seed: random seed of the model's initial weights and dropout masks.
        objective, optimisation: as in `Transductive`.
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

    @property
    def stack_key(self) -> tuple[Any, ...]:
        """A key that is equal for members that one stack may have: they have one loss, schedule and kind of optimizer.

        A scheduler that is not torch's may depend on any of the optimizer's settings, so these are the same too. Two
        functions are two schedules, also if they have one name.
        """
        its = self.optimisation
        optimizer, scheduler = _called(its.optimizer), _called(its.scheduler)
        others = "" if scheduler is None or scheduler.__module__ == TORCHS else repr(its)
        steps = id(optimizer), id(scheduler), repr(its.scheduler), its.warmup, its.ema, others
        return spelled(self.objective), *steps


def spelled(value: Any) -> str:
    """Return the text of a setting: for a class, a function or a `functools.partial` of it, its name and arguments.

    >>> from torch import optim
    >>> spelled(partial(optim.Adam, betas=(0.9, 0.95)))
    'Adam(betas=(0.9, 0.95))'
    """
    if isinstance(value, partial):
        arguments = [*map(repr, value.args), *(f"{key}={spelled(each)}" for key, each in value.keywords.items())]
        return f"{spelled(value.func)}({', '.join(arguments)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(f'{name}={spelled(each)}' for name, each in named)})"
    return getattr(value, "__qualname__", None) or repr(value)


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the items with equal keys, in the order of the first item of each group.

    >>> grouped([1, 2, 3], lambda number: number % 2)
    [[1, 3], [2]]
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
