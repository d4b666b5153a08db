"""The LightningModules of a stack of models: on one graph, and on batches of graphs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch_geometric.data import Data

from ..philox import seeds_from
from ..tasks.objective import Objective
from ..training.averaging import Average
from ..training.epoch_seeds import generator_of, key_of
from ..training.modules import Inductive, Supervised, Transductive
from .stack import Stack

# The stack as Lightning sees it -------------------------------------------------------------------------------------


class StackOfSeeds(Supervised):
    """The base of both setups: S models at once, with the sum of their losses, so each gets its own gradients.

    Adam is elementwise, so each model takes the same steps as when it is trained alone. This includes the dropout of
    gat_pyg's layers, which depends on the model's seed and the epoch. `F.dropout` in other layers draws the masks of
    all models at once from the first seed: they differ from model to model, and depend on its row in the stack.

    `seeds` are the seeds of the rows; `metrics` are the results of the last validation or test, one entry per row. The
    arguments after `objective` are those of `Transductive` or `Inductive`.
    """

    model: Stack

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], objective: Objective, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(Stack(models), objective, *args, **kwargs)
        self._inspect_model(models[0])
        self.seeds = list(seeds)
        self.metrics: list[dict[str, float]] = []

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and each model's summed loss and number of known labels, [S, 2]."""
        data = self._field_of(data, "train")
        out = self(data)
        loss, sums = vmap(self.objective.train_statistics, (0, None))(*self.labelled(out, data, "train"))
        if self._penalty is not None:
            loss = loss + self.model.each(lambda model, out: model.penalty(out, data), out)
        return loss.sum(), sums

    def _counts(self, data: Data, split: Any) -> Tensor:
        data = self._field_of(data, split)
        sums: Tensor = vmap(self.objective.statistics, (0, None))(*self.labelled(self(data), data, split))
        return sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the mean of the models' metrics, for the log, and set `self.metrics` to those of each model."""
        pooled = self._pooled(*splits)
        rows = [dict(zip(pooled, values, strict=True)) for values in zip(*pooled.values(), strict=True)]
        self.metrics = [self.objective.metrics(sums) for sums in rows]
        return {name: statistics.fmean(metrics[name] for metrics in self.metrics) for name in self.metrics[0]}

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip the gradient of each model by its own norm."""
        if (largest := self.optimisation.gradient_clip_val) is None:
            return
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norms = torch.stack([value.reshape(len(value), -1).norm(dim=1) for value in gradients]).norm(dim=0)  # [S]
        factors = (largest / (norms + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for value in gradients:
            value *= factors.view(-1, *[1] * (value.dim() - 1))

    def select(self, seeds: Sequence[int]) -> None:
        """Remove the models of all other seeds, with their state in the optimizer."""
        rows = [self.seeds.index(seed) for seed in seeds]
        index = torch.tensor(rows, device=self.device)
        self.model.select(index)
        for callback in self.trainer.callbacks if self._trainer else ():  # type: ignore[attr-defined]
            if isinstance(callback, Average):
                callback.select(index)
        for optimizer in self.trainer.optimizers if self._trainer else ():
            for state in optimizer.state.values():
                state |= {key: value.index_select(0, index) for key, value in state.items() if value.dim() > 0}
        self.seeds = list(seeds)
        self.metrics = [self.metrics[row] for row in rows] if self.metrics else []

    def fill(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all models by those of these seeds, with these weights."""
        self.model.fill(list(weights.values()))
        self.seeds = list(weights)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the seeds of the rows."""
        checkpoint["seeds"] = list(self.seeds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the seeds that had stopped; raise ValueError if the checkpoint has other seeds or shapes."""
        seeds = checkpoint.get("seeds", [])
        if not seeds or not set(seeds) <= set(self.seeds):
            raise ValueError(
                f"The checkpoint is of the seeds {seeds or 'of no stack'}, this stack of {self.seeds}. Resume with the "
                "settings that the run was started with, or start anew without ckpt_path."
            )
        self.select(seeds)
        super().on_load_checkpoint(checkpoint)


class Stacked(StackOfSeeds, Transductive):
    """`Transductive` for S models at once: every epoch of each is that of the model alone."""

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Make each model's dropout depend only on its own seed and the epoch; `seed` is ignored."""
        self._set_key(torch.tensor([key_of(each, epoch) for each in self.seeds]))

    def forward(self, data: Data) -> Tensor:
        """Return the logits [S, N, K] of a graph's nodes."""
        out: Tensor
        if self._key is None or not self.training:
            out = self.model.each(lambda model: self._call_model(model, data))
        else:
            out = self.model.each(lambda model, key: self._call_keyed(model, data, key), self._key)
        return out

    def select(self, seeds: Sequence[int]) -> None:
        """Remove the models of all other seeds, with their state in the optimizer."""
        super().select(seeds)
        self._key = None
        self.cuda_graphs.reset()


class StackedInductive(StackOfSeeds, Inductive):
    """`Inductive` for S models at once, on the same batches of graphs.

    Every epoch of each is that of the model alone on batches in the same order: with `TaskData(seed=...)` of the same
    seed. A model alone usually takes the order from its own seed, since a stack has one set of edges in each step.
    """

    _generators: Mapping[int, torch.Generator] | None = None  # in an epoch: that of each seed

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Give each model the dropout of its own seed and the epoch; `seed` is ignored."""
        self._generators = {each: generator_of(each, epoch, self.device) for each in self.seeds}

    def forward(self, data: Data) -> Tensor:
        """Return the logits [S, G, K] of the graphs, or [S, N, K] of the nodes."""
        out: Tensor
        if self._generators is None or not self.training:
            out = self.model.each(lambda model: self._call_model(model, data))
            return out
        generators = [self._generators[seed] for seed in self.seeds]

        def call(model: Any, row: Tensor) -> Tensor:
            with seeds_from(generators, row):
                return self._call_model(model, data)

        out = self.model.each(call, torch.arange(len(generators), device=self.device))
        return out

    def on_train_end(self) -> None:
        """Forget the last epoch's generators."""
        self._generators = None


def _stacked(module: LightningModule) -> StackOfSeeds:
    if not isinstance(module, StackOfSeeds):
        raise TypeError(f"{type(module).__name__} is no stack of seeds, expected gat_pyg.seeds.Stacked.")
    return module
