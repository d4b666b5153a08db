"""The paper's stopping rule as a Lightning callback."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..tasks.objective import Objective

Criterion = Literal["both", "accuracy", "strict", "loss"]


class PaperStopping(Callback):
    """The stopping rule of the paper's code: patience on the validation score and loss, where a tie is an improvement.

    After each validation, with `criterion="both"`::

        if score >= best_score or loss <= best_loss:
            if both: save these weights
            update best_score and best_loss; wait = 0
        else:
            wait += 1; stop at wait == patience

    With `"accuracy"` (the score, whatever the metric) or `"loss"`, only that one counts, and a new best or a tie saves
    the weights. With `"strict"` the score counts, and a tie only with a lower loss than that of the best epoch: the
    scores of a model that predicts the majority class are all equal. At the end of the fit, the module gets the weights
    saved last, those of `best_epoch` (counted from 1).

    The rule reads `val_loss` and `score` from the module's logs; by default, `score` is `val_` with the name of the
    objective's metric. The saved weights stay in the device's memory. They and the rest of the state are part of
    Lightning's checkpoints. An epoch whose loss or score is not finite is no improvement. If the parameters are not
    finite either, no later step can repair them, and training stops at once.

    With `patience=None`, training does not stop early, and ends with the best epoch. Of epochs that tie, this is the
    last one, as with a patience; code that compares by `>` keeps the first.

    Raises ValueError for a patience below 1 or an unknown criterion.

    >>> rule = PaperStopping(patience=2)
    >>> [rule.update(score, loss) for score, loss in [(70.0, 1.0), (71.0, 1.1), (70.0, 0.9)]]
    [True, False, False]
    >>> rule.best_score, rule.best_loss, rule.wait
    (71.0, 0.9, 0)
    """

    def __init__(self, patience: int | None = 100, criterion: Criterion = "both", score: str | None = None) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"patience is {patience}, expected at least 1 epoch, or None.")
        if criterion not in get_args(Criterion):
            raise ValueError(f"criterion is {criterion!r}, expected one of {', '.join(get_args(Criterion))}.")
        self.patience = math.inf if patience is None else patience
        self.criterion = criterion
        self.score = score
        self.epoch = 0  # validations so far
        self.wait: float = 0  # epochs without improvement; the patience if training diverged
        self.best_score = float("-inf")
        self.best_loss = float("inf")
        self.best_epoch = 0  # the epoch of the saved weights; 0: none yet
        self.kept_score = float("nan")
        self.kept_loss = float("nan")
        self.weights: dict[str, Tensor] = {}

    def update(self, score: float, loss: float, lower: bool = False) -> bool:
        """Record one epoch; return True if its weights are the new best.

        With `lower=True` lower scores are better, and `best_score` is negated.
        """
        self.epoch += 1
        rank = -score if lower else score
        finite = math.isfinite(score) and math.isfinite(loss)
        by_score, by_loss = finite and rank >= self.best_score, finite and loss <= self.best_loss
        is_higher = finite and rank > self.best_score
        strict = is_higher or (by_score and loss < self.best_loss)
        better = {"both": by_score or by_loss, "accuracy": by_score, "strict": strict, "loss": by_loss}[self.criterion]
        is_best = by_score and by_loss if self.criterion == "both" else better
        if better:
            self.best_score = max(self.best_score, rank)
            self.best_loss = loss if is_higher and self.criterion == "strict" else min(self.best_loss, loss)
            self.wait = 0
        else:
            self.wait += 1
        if is_best:
            self.best_epoch, self.kept_score, self.kept_loss = self.epoch, score, loss
        return is_best

    def stop_diverged(self, parameters: Iterable[Tensor], run: str = "Training") -> None:
        """Stop if the last epoch's parameters are not finite."""
        if all(bool(value.isfinite().all()) for value in parameters):
            return
        self.wait = self.patience
        if self.best_epoch:
            rank_zero_warn(
                f"{run} diverged: its weights are not finite after epoch {self.epoch}. It stops with the weights of "
                f"epoch {self.best_epoch}. A smaller lr may help."
            )

    @property
    def left(self) -> float:
        """The patience left: the number of further epochs without improvement until the stop."""
        return self.patience - self.wait if self.wait < self.patience else 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the rule to the logged validation metrics."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        objective = getattr(pl_module, "objective", None)
        name = self.score or (f"val_{objective.metric.name}" if isinstance(objective, Objective) else "a score=...")
        if name not in metrics or "val_loss" not in metrics:
            logged = ", ".join(metrics) or "nothing"
            raise ValueError(f"PaperStopping needs val_loss and {name}, but the module logged {logged}.")
        score, loss = float(metrics[name]), float(metrics["val_loss"])
        lower = isinstance(objective, Objective) and objective.metric.lower
        if self.update(score, loss, lower):
            self._save_weights(pl_module)
        elif not math.isfinite(loss):
            self.stop_diverged(parameter for parameter in pl_module.parameters() if parameter.requires_grad)
        if self.left <= 0:
            trainer.should_stop = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the saved weights to the device, and stop at once if a resumed run has no patience left."""
        self.weights = {key: value.to(pl_module.device) for key, value in self.weights.items()}
        if self.left <= 0:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the weights saved last into the module."""
        if self.weights:
            pl_module.load_state_dict(self.weights, strict=False)
        elif self.epoch:
            rank_zero_warn(
                f"The validation loss or score was not finite in any of {self.epoch} epochs, so the weights are those "
                "of the last epoch. A smaller lr may help."
            )

    @torch.no_grad()
    def _save_weights(self, module: LightningModule) -> None:
        state = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
        if self.weights.keys() != state.keys():
            self.weights = {key: value.clone() for key, value in state.items()}
        else:
            for key, value in state.items():
                self.weights[key].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state, for the checkpoint."""
        return {key: getattr(self, key) for key in _RULE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        for key in _RULE:
            setattr(self, key, state_dict[key])


_RULE = ("epoch", "wait", "best_score", "best_loss", "best_epoch", "kept_score", "kept_loss", "weights")
