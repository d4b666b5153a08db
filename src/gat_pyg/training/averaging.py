"""An exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average(Callback):
    r"""Validate, keep and test an exponential moving average of the weights; training steps do not see it.

    .. math::
        m_1 = w_1, \qquad m_t = \beta \, m_{t-1} + (1 - \beta) \, w_t

    for the weights :math:`w_t` after optimizer step t. Floating-point buffers, such as the running statistics of batch
    normalisation, are averaged like parameters; other buffers are those of the last step. It takes as much memory as
    the weights, and is part of Lightning's checkpoints. At the end of the fit, the module has the average.

    `Supervised` adds it behind the trainer's callbacks if its `Optimisation` has `ema`, so `PaperStopping` saves the
    average, as it was validated. Lightning's `WeightAveraging` restores the weights too early for that. Every element
    is averaged alone: in a stack, this is the average of each model.

    Args:
        decay: :math:`\beta`.

    Raises:
        ValueError: if the decay is not above 0 and below 1.
    """

    def __init__(self, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ema is {decay}, expected a number above 0 and below 1.")
        self.decay = decay
        self.values: list[Tensor] = []  # averages of parameters and buffers; none before the first step
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the average of a checkpoint to the device."""
        self.values = [value.to(pl_module.device) for value in self.values]
        self._steps = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Add the weights after a step."""
        if trainer.global_step == self._steps:  # gradients are accumulated
            return
        self._steps, weights = trainer.global_step, _weights(pl_module)
        if not self.values:
            self.values = [weight.clone() for weight in weights]
            return
        pairs = list(zip(self.values, weights, strict=True))
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        get_ema_multi_avg_fn(self.decay)(*map(list, zip(*floats, strict=True)), 1)
        for value, weight in pairs:
            if not value.is_floating_point():
                value.copy_(weight)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module."""
        self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights of the last step back."""
        self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with the average."""
        self._swap(pl_module)
        self.values = []

    @torch.no_grad()
    def _swap(self, module: LightningModule) -> None:
        """Exchange weights and average in place, as a CUDA graph reads the same memory."""
        for value, weight in zip(self.values, _weights(module) if self.values else [], strict=True):
            before = weight.clone()
            weight.copy_(value)
            value.copy_(before)

    def select(self, rows: Tensor) -> None:
        """Remove all models of a stack but those of these rows."""
        self.values = [value.index_select(0, rows) for value in self.values]

    def state_dict(self) -> dict[str, Any]:
        """Return the average, for the checkpoint."""
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's average."""
        self.values = list(state_dict["values"])


def _weights(module: LightningModule) -> list[Tensor]:
    model: Any = module.model
    return [*model.parameters(), *model.buffers()]
