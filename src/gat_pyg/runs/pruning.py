"""Pruning: a sweeper ends the trainings of jobs that do not look promising."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch import Callback

from ..training.stopping import PaperStopping

Judge = Callable[[int, int, float], bool]
_judge: ContextVar[Judge | None] = ContextVar("judge", default=None)


class PrunedError(ValueError):
    """The sweeper ended the training of a job."""


@contextmanager
def pruned_by(judge: Judge) -> Iterator[None]:
    """Context manager around `Launcher.launch`: end the training of a job if `judge` returns True.

    After each epoch of a job that is trained as one, be it of one seed or of several, `judge` is called with the number
    of the job (`hydra.job.num`), the epoch, counted from 1, and the mean over the seeds of the best validation score so
    far, negated if lower is better. A pruned job has no result, and its error is a `PrunedError`.
    """
    token = _judge.set(judge)
    try:
        yield
    finally:
        _judge.reset(token)


@dataclass
class Pruner:
    """The judge of one job."""

    judge: Judge
    number: int
    ended: int = 0  # the epoch after which it ended the job's training

    @classmethod
    def of(cls, number: int) -> Pruner | None:
        """Return the pruner of the job with this number, or None outside of `pruned_by`."""
        judge = _judge.get()
        return None if judge is None else cls(judge, number)


class Pruning(Callback):
    """Calls the pruners after the stopping rules of their jobs have seen an epoch, and ends the runs of these jobs.

    It has all jobs of a training with all their rules, in the same order after a resume. Its place in the list of
    callbacks is behind the rules.
    """

    def __init__(self, jobs: Sequence[tuple[Pruner | None, Sequence[PaperStopping]]]) -> None:
        self.jobs = jobs

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the pruners to an epoch."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        for pruner, rules in self.jobs:
            running = [rule for rule in rules if rule.left > 0]
            if pruner is None or not running:
                continue
            epoch, quality = trainer.current_epoch + 1, statistics.fmean(rule.best_score for rule in rules)
            if pruner.judge(pruner.number, epoch, quality):
                pruner.ended = epoch
                for rule in running:
                    rule.wait = rule.patience
        trainer.should_stop = trainer.should_stop or not any(rule.left > 0 for _, rules in self.jobs for rule in rules)

    def state_dict(self) -> dict[str, Any]:
        """Return the last epochs of pruned jobs, for the checkpoint."""
        return {"ended": [0 if pruner is None else pruner.ended for pruner, _ in self.jobs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        for (pruner, _), ended in zip(self.jobs, state_dict["ended"], strict=True):
            if pruner is not None:
                pruner.ended = ended
