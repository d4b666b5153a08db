"""The LightningModule of a stack of models."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import vmap
from torch_geometric.data import Data

from ..tasks.objective import Objective
from ..training.epoch_seeds import key_of
from ..training.modules import Transductive
from .stack import Stack

# The stack as Lightning sees it -------------------------------------------------------------------------------------


class Stacked(Transductive):
    """`Transductive` for S models at once: the loss is the sum of their losses, so that each gets its own gradients.

    Adam acts on each number alone, so each model takes the steps that it would take by itself. With dropout of
    gat_pyg's layers too: it follows from the model's seed and the epoch. That of `F.dropout` in other layers is drawn
    for all at once, from the seed of the first: each model has masks of its own, which depend on its place.

    `seeds` names the rows of the stack, `metrics` holds what the last validation or test gave for each.
    """

    model: Stack

    def __init__(
        self,
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        objective: Objective,
        lr: float = 0.005,
        weight_decay: float = 0.0,
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(Stack(models), objective, lr, weight_decay, cuda_graphs)
        self._look_at(models[0])
        self.seeds = list(seeds)
        self.metrics: list[dict[str, float]] = []

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Let each model's dropout depend on its own seed and the epoch alone, whatever `seed` is."""
        self._hold(torch.tensor([key_of(own, epoch) for own in self.seeds]))

    def forward(self, data: Data) -> Tensor:
        """Return the logits [S, N, K] of a graph's nodes."""
        out: Tensor
        if self._key is None or not self.training:
            out = self.model.each(lambda model: self._given(model, data))
        else:
            out = self.model.each(lambda model, key: self._drawn(model, data, key), self._key)
        return out

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and the summands of each epoch mean: (loss, known) [S, 2]."""
        data = self._seen(data, "train")
        out = self(data)
        loss, sums = vmap(self.objective.train_statistics, (0, None))(*self.labelled(out, data, "train"))
        if self._penalty is not None:
            loss = loss + self.model.each(lambda model, out: model.method("penalty", out, data), out)
        return loss.sum(), sums

    def _counts(self, data: Data, split: Any) -> Tensor:
        data = self._seen(data, split)
        sums: Tensor = vmap(self.objective.statistics, (0, None))(*self.labelled(self(data), data, split))
        return sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the mean of the models' metrics, which is logged; `self.metrics` has those of each model."""
        sums = self._pooled(*splits)
        each = [dict(zip(sums, own, strict=True)) for own in zip(*sums.values(), strict=True)]
        self.metrics = [self.objective.metrics(own) for own in each]
        return {name: statistics.fmean(own[name] for own in self.metrics) for name in self.metrics[0]}

    def keep(self, seeds: Sequence[int]) -> None:
        """Remove the models of all other seeds, with their state in the optimizer."""
        places = [self.seeds.index(seed) for seed in seeds]
        rows = torch.tensor(places, device=self.device)
        self.model.select(rows)
        for optimizer in self.trainer.optimizers if self._trainer else ():
            for state in optimizer.state.values():
                state |= {key: value.index_select(0, rows) for key, value in state.items() if value.dim() > 0}
        self.seeds = list(seeds)
        self.metrics = [self.metrics[place] for place in places] if self.metrics else []
        self._key = None
        self._captured.clear()

    def fill(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Become the models of these seeds, with these weights."""
        self.model.fill(list(weights.values()))
        self.seeds = list(weights)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the seeds of the rows."""
        checkpoint["seeds"] = list(self.seeds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the seeds that had stopped; raise ValueError if the checkpoint is of other seeds or shapes."""
        there = checkpoint.get("seeds", [])
        if not there or not set(there) <= set(self.seeds):
            raise ValueError(
                f"The checkpoint is of the seeds {there or 'of no stack'}, this stack of {self.seeds}. Resume with the "
                "settings that the run was started with, or start anew without ckpt_path."
            )
        self.keep(there)
        super().on_load_checkpoint(checkpoint)


def _stacked(module: LightningModule) -> Stacked:
    if not isinstance(module, Stacked):
        raise TypeError(f"{type(module).__name__} is no stack of seeds, expected gat_pyg.seeds.Stacked.")
    return module
