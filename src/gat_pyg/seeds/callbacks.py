"""Stopping, metrics and progress for each member of a stack."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..training.progress import MetricsFile, Progress
from ..training.stopping import PaperStopping
from .member import Member
from .module import StackOfSeeds, _stacked

COMPACT_AT = 0.1  # the share of stopped members that triggers a compaction, which copies the stack


class EachStopping(Callback):
    """`PaperStopping` for each member of a stack: its rule, its best weights and its seconds.

    Stopped members are removed from the stack as soon as their share of it reaches `compact_at`. After the fit, the
    module holds all members again, each with its best weights.

    The seconds of an epoch are divided equally among the members still running, so the seconds of all members add up
    to the elapsed time. Raises ValueError as `PaperStopping` does.

    Args:
        members: in the order of the module's; all else is by their numbers 0, 1, ...
        compact_at: a share.
    """

    def __init__(self, members: Sequence[Member], compact_at: float = COMPACT_AT) -> None:
        self.members = list(members)
        self.rules = {
            number: PaperStopping(member.patience, member.criterion) for number, member in enumerate(self.members)
        }
        self.compact_at = compact_at
        self.seconds = dict.fromkeys(self.rules, 0.0)
        self.best_weights: dict[str, Tensor] = {}  # of the members in the stack, [S, ...]
        self.stopped_weights: dict[int, dict[str, Tensor]] = {}  # best weights of removed members, on the CPU
        self._clock = 0.0

    def running(self) -> list[int]:
        """Return the numbers of the members that have not stopped."""
        return [number for number, rule in self.rules.items() if rule.left > 0]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and stop at once if all members of a resumed training have stopped."""
        self.best_weights = {key: value.to(pl_module.device) for key, value in self.best_weights.items()}
        self._clock = time.perf_counter()
        trainer.should_stop = trainer.should_stop or not self.running()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply each member's rule to its validation metrics."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        module = _stacked(pl_module)
        now = time.perf_counter()
        running = set(self.running())
        better = []
        metric = module.objective.metric
        for row, (number, metrics) in enumerate(zip(module.rows, module.metrics, strict=True)):
            if number not in running:
                continue
            rule = self.rules[number]
            score = metrics[f"val_{metric.name}"]
            if (
                rule.update(score, metrics["val_loss"], metric.lower) or not rule.best_epoch
            ):  # before the first best: the latest
                better.append(row)
            if not math.isfinite(metrics["val_loss"]):
                parameters = (value[row] for value in module.parameters() if value.requires_grad)
                rule.stop_diverged(parameters, f"The run of {self.members[number]}")
            self.seconds[number] += (now - self._clock) / len(running)
        self._update_best(module, better)
        self._clock = now
        trainer.should_stop = trainer.should_stop or not self.running()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove stopped members from the stack if their share is at least `compact_at`."""
        module = _stacked(pl_module)
        running = [number for number in module.rows if self.rules[number].left > 0]
        stopped = len(module.rows) - len(running)
        if running and stopped and stopped >= self.compact_at * len(module.rows):
            self._set_aside(module, [number for number in module.rows if number not in running])
            rows = torch.tensor([module.rows.index(number) for number in running], device=module.device)
            self.best_weights = {key: value.index_select(0, rows) for key, value in self.best_weights.items()}
            module.select(running)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the best weights of every member into the module, in the order of the members."""
        module = _stacked(pl_module)
        if self.best_weights:
            self._set_aside(module, module.rows)
            module.fill({number: self.stopped_weights[number] for number in self.rules})
            self.best_weights = {}
        if never := [number for number, rule in self.rules.items() if rule.epoch and not rule.best_epoch]:
            rank_zero_warn(
                f"{'; '.join(str(self.members[number]) for number in never)}: the validation loss or score was not "
                "finite in any epoch, so the weights are those of the last epoch. A smaller lr may help."
            )

    @torch.no_grad()
    def _update_best(self, module: StackOfSeeds, rows: list[int]) -> None:
        """Save the current weights of these rows as the best ones of their members."""
        weights = module.model.weights()
        if not self.best_weights:
            self.best_weights = {key: value.clone() for key, value in weights.items()}
        elif rows:
            copy_rows = _copy_each_row if module.device.type == "cpu" else _copy_all_rows
            copy_rows(self.best_weights, weights, rows)

    def _set_aside(self, module: StackOfSeeds, numbers: Sequence[int]) -> None:
        """Copy the best weights of some members to the CPU."""
        index = torch.tensor([module.rows.index(number) for number in numbers], device=module.device)
        weights = {key: value.index_select(0, index).cpu() for key, value in self.best_weights.items()}
        for row, number in enumerate(numbers):
            self.stopped_weights[number] = {key: value[row].clone() for key, value in weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for the checkpoint."""
        rules = {number: rule.state_dict() for number, rule in self.rules.items()}
        return {"rules": rules, "seconds": dict(self.seconds), "kept": self.best_weights, "left": self.stopped_weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        for number, state in state_dict["rules"].items():
            self.rules[number].load_state_dict(state)
        self.seconds = dict(state_dict["seconds"])
        self.best_weights, self.stopped_weights = dict(state_dict["kept"]), dict(state_dict["left"])


def _copy_each_row(to: Mapping[str, Tensor], source: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Copy some rows one by one: on a CPU this takes a sixth of the time of `index_select`."""
    for row, (key, value) in itertools.product(rows, source.items()):
        to[key][row].copy_(value[row])


def _copy_all_rows(to: Mapping[str, Tensor], source: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Copy some rows with one kernel per tensor: on a GPU this is faster than one launch per row."""
    first = next(iter(to.values()))
    mask = torch.zeros(first.size(0), dtype=torch.bool).index_fill_(0, torch.tensor(rows), True).to(first.device)
    for key, value in to.items():
        torch.where(mask.view(-1, *[1] * (value.dim() - 1)), source[key], value, out=value)


class EachMetrics(MetricsFile):
    """A `MetricsFile` for each member, with the epochs until it stopped.

    Its place in the list of callbacks is before `EachStopping`.
    """

    def __init__(self, paths: Sequence[str | Path], stopping: EachStopping) -> None:
        super().__init__(*paths)
        self.stopping = stopping

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch's line for each member that was running."""
        module, epoch = _stacked(pl_module), trainer.current_epoch + 1
        for number, metrics in zip(module.rows, module.metrics, strict=True):
            if self.stopping.rules[number].epoch == epoch:
                self.files[number].add(epoch, metrics)


class EachProgress(Progress):
    """One line of progress: epoch, running and stopped members, range of their validation scores, time left."""

    def __init__(self, title: str, stopping: EachStopping, every: float = 10.0) -> None:
        super().__init__(title, every)
        self.stopping = stopping

    def parts(self, trainer: Trainer, batch: str) -> list[str]:
        """Return the fields of the line."""
        module, rules = _stacked(trainer.lightning_module), self.stopping.rules
        latest = module.metrics or [{} for _ in module.rows]  # none before the first validation
        running = [(rules[number], metrics) for number, metrics in zip(module.rows, latest, strict=True)]
        running = [(rule, metrics) for rule, metrics in running if rule.left > 0]
        parts = [self.title, f"epoch {trainer.current_epoch + 1}{batch}", f"{len(running)}/{len(rules)} running"]
        metric = module.objective.metric
        if scores := [metrics[name] for _, metrics in running if (name := f"val_{metric.name}") in metrics]:
            parts.append(f"val {metric.range(min(scores), max(scores))}")
        if running and (seconds := self.seconds_per_epoch(trainer)):
            epochs = max(rule.left for rule, _ in running)  # each improvement adds to it
            epochs = min(epochs, trainer.max_epochs - trainer.current_epoch - 1) if trainer.max_epochs else epochs
            parts.append(f"at least {_duration(seconds * epochs)} left")
        return parts


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
