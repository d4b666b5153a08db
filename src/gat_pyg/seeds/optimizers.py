"""The optimizers of a stack, each of the neighbouring rows that share its settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..training.optimisation import Optimisation, Schedule, _called, _sets

FUSED = (optim.Adam, optim.AdamW, optim.SGD)  # on a CPU and on CUDA, in all supported versions of torch


class Optimizers:
    """One optimizer for each run of neighbouring rows, as a single one for Lightning.

    A parameter of such an optimizer is a view of some rows of a stacked parameter, or the parameter itself if all rows
    share their settings. The optimizers are elementwise, so each row takes the steps that its model takes alone.

    Args:
        parameters: the stacked parameters, `[S, ...]` each.
        decayed: those with weight decay.
        runs: the settings of each run of rows.
        max_epochs: the number of epochs, for schedules that need it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        decayed: Iterable[nn.Parameter],
        runs: Sequence[tuple[slice, Optimisation]],
        max_epochs: int | None,
    ) -> None:
        self.parameters = list(parameters)
        self.defaults: dict[str, Any] = {}
        of_decay = {id(parameter) for parameter in decayed}
        self.runs: list[_Run] = []
        for rows, optimisation in runs:
            views = [value if len(runs) == 1 else _view(value, rows) for value in self.parameters]
            pairs = list(zip(views, self.parameters, strict=True))
            if len(runs) > 1:
                optimisation = replace(optimisation, optimizer=_fused(optimisation.optimizer, self.parameters))
            optimizer, schedule = optimisation.configure(
                views, [view for view, value in pairs if id(value) in of_decay], max_epochs
            )
            self.runs.append(_Run(rows, views, optimizer, schedule))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for run in self.runs for group in run.optimizer.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter of the optimizers."""
        return defaultdict(dict, {key: state for run in self.runs for key, state in run.optimizer.state.items()})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of each optimizer."""
        loss = None if closure is None else closure()
        gradients = [_like(value) for value in self.parameters]
        for run in self.runs:
            for view, value, gradient in zip(run.views, self.parameters, gradients, strict=True):
                if view is not value:
                    view.grad = None if gradient is None else gradient[run.rows]
            run.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients."""
        for value in (*self.parameters, *(view for run in self.runs for view in run.views)):
            value.grad = None

    def select(self, rows: Sequence[int]) -> None:
        """Remove the state of all rows but these, which are those of the stack's parameters from now on."""
        remaining, start = [], 0
        for run in self.runs:
            kept = [row - run.rows.start for row in rows if run.rows.start <= row < run.rows.stop]
            if not kept:
                continue
            index = torch.tensor(kept, device=self.parameters[0].device)
            for state in run.optimizer.state.values():
                state |= {
                    key: value.index_select(0, index)
                    for key, value in state.items()
                    if isinstance(value, Tensor) and value.dim() > 0
                }
            run.rows = slice(start, start := start + len(kept))
            for view, value in zip(run.views, self.parameters, strict=True):
                if view is not value:
                    view.data, view.grad = value.data[run.rows], None
            remaining.append(run)
        self.runs[:] = remaining  # the schedules have the same list

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer."""
        return {"state": [run.optimizer.state_dict() for run in self.runs], "param_groups": []}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state of the same rows."""
        for run, state in zip(self.runs, state_dict["state"], strict=True):
            run.optimizer.load_state_dict(state)


class _Run:
    """Neighbouring rows of a stack, with their optimizer and schedule."""

    def __init__(self, rows: slice, views: list[nn.Parameter], optimizer: Optimizer, schedule: Schedule | None) -> None:
        self.rows, self.views, self.optimizer, self.schedule = rows, views, optimizer, schedule


class Schedules(LRScheduler):
    """The schedules of a stack's optimizers as a single one for Lightning."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizer = optimizers  # type: ignore[assignment]
        self.runs = optimizers.runs

    def _each(self) -> list[tuple[slice, Schedule]]:
        return [(run.rows, run.schedule) for run in self.runs if run.schedule is not None]

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next epoch."""
        for _, schedule in self._each():
            schedule.step()

    def validated(self, losses: Sequence[float], scores: Sequence[float]) -> None:
        """Adapt the learning rate of each row to its validation if it depends on it; higher scores are better."""
        for rows, schedule in self._each():
            schedule.validated(losses[rows.start], scores[rows.start])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each schedule."""
        return {"schedules": [schedule.state_dict() for _, schedule in self._each()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state of the same rows."""
        for (_, schedule), state in zip(self._each(), state_dict["schedules"], strict=True):
            schedule.load_state_dict(state)


def _fused(make: Callable[..., Optimizer], parameters: Sequence[nn.Parameter]) -> Callable[..., Optimizer]:
    """Return the optimizer with one kernel for each parameter, which takes a third of the time, if torch has it.

    Many optimizers of few rows otherwise wait for Python. A stack whose rows share an optimizer keeps torch's default,
    as a model alone has it.
    """
    fusible = _called(make) in FUSED and {value.device.type for value in parameters} <= {"cpu", "cuda"}
    chosen = any(_sets(make, name) for name in ("fused", "foreach", "capturable", "differentiable"))
    return partial(make, fused=True) if fusible and not chosen else make


def _like(value: nn.Parameter) -> Tensor | None:
    """Return the gradient in the layout of the parameter, as fused kernels read it without a check.

    That of a CUDA graph may have other strides.
    """
    gradient = value.grad
    if gradient is None or gradient.stride() == value.stride():
        return gradient
    return torch.empty_like(value, requires_grad=False).copy_(gradient)


def _view(value: nn.Parameter, rows: slice) -> nn.Parameter:
    return nn.Parameter(value.data[rows], value.requires_grad)
