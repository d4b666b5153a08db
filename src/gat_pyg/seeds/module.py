"""The LightningModules of a stack of models: on one graph, and on batches of graphs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch_geometric.data import Data

from ..philox import seeds_from
from ..tasks.model import members
from ..training.averaging import Average
from ..training.epoch_seeds import generator_of, key_of
from ..training.modules import Inductive, Supervised, Transductive
from ..training.optimisation import _called
from .member import Member, SharedObjective, runs_of, shape_of, spelled
from .optimizers import Optimizers, Schedules
from .stack import Stack

IN_TURN = 2_000_000  # elements of a step of many graphs: above, one model after the other is faster than vmap

# The stack as Lightning sees it -------------------------------------------------------------------------------------


class StackOfSeeds(Supervised):
    """The base of both setups: S models at once, with the sum of their losses, so each gets its own gradients.

    Each model has a `Member`, with its seed, and settings that may differ from those of the others. The optimizers are
    elementwise, so each model takes the same steps as when it is trained alone. This includes the dropout of gat_pyg's
    layers, which depends on the member's seed and the epoch. `F.dropout` in other layers draws the masks of all models
    at once from the first seed: the masks differ from model to model, and depend on the row of the model.

    Members with the same settings of the optimizer are neighbours in the stack, and share an optimizer. `rows` are the
    numbers of the members in the rows; `metrics` are the results of the last validation or test, one entry per row.
    """

    model: Stack

    def __init__(self, models: Sequence[nn.Module], all_members: Sequence[Member], *args: Any) -> None:
        self.rows = _sorted(all_members)
        models = [models[number] for number in self.rows]
        super().__init__(Stack(models), all_members[0].objective, all_members[0].optimisation, *args)
        self._inspect_model(models[0])
        self.members = list(all_members)
        self._numbers = dict(zip(self.rows, self.model.numbers, strict=True))
        self.metrics: list[dict[str, float]] = []
        self._objectives: list[SharedObjective] | None = None

    @property
    def present(self) -> list[Member]:
        """The members in the rows of the stack."""
        return [self.members[number] for number in self.rows]

    def _each(self, statistics: str, out: Tensor, y: Tensor) -> Any:
        """Return what the method `statistics` of each member's objective returns for its outputs, stacked."""
        if self._objectives is None:
            self._objectives = SharedObjective.of([member.objective for member in self.present], out.device)
        results = [
            vmap(lambda out, numbers, shared=shared: getattr(shared.with_numbers(numbers), statistics)(out, y))(
                out[shared.rows], shared.numbers
            )
            for shared in self._objectives
        ]
        if len(results) == 1:
            return results[0]
        return (
            torch.cat(results) if isinstance(results[0], Tensor) else tuple(map(torch.cat, zip(*results, strict=True)))
        )

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and each model's summed loss and number of known labels, [S, 2]."""
        data = self._field_of(data, "train")
        out = self(data)
        loss, sums = self._each("train_statistics", *self.labelled(out, data, "train"))
        if self._penalty is not None:
            loss = loss + self.model.each(lambda model, out: model.penalty(out, data), out)
        return loss.sum(), sums

    def _summed_over(self, loss: Tensor, size: Tensor) -> Tensor:
        """Multiply the sum of means over labels by their number, which is the same for all models."""
        return super()._summed_over(loss, size[0])

    def _counts(self, data: Data, split: Any) -> Tensor:
        data = self._field_of(data, split)
        sums: Tensor = self._each("statistics", *self.labelled(self(data), data, split))
        return sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the mean of the models' metrics, for the log, and set `self.metrics` to those of each model."""
        pooled = self._pooled(*splits)
        rows = [dict(zip(pooled, values, strict=True)) for values in zip(*pooled.values(), strict=True)]
        self.metrics = [member.objective.metrics(sums) for member, sums in zip(self.present, rows, strict=True)]
        return {name: statistics.fmean(metrics[name] for metrics in self.metrics) for name in self.metrics[0]}

    def _validated(self, schedule: Any, metrics: Mapping[str, float]) -> None:
        """Adapt the learning rate of each member to its own validation, if it depends on it."""
        if isinstance(schedule, Schedules):
            metric = self.objective.metric
            scores = [metric.better(each[f"val_{metric.name}"]) for each in self.metrics]
            schedule.validated([each["val_loss"] for each in self.metrics], scores)

    def configure_callbacks(self) -> list[Callback]:
        """Return the average of the weights, if any member has one."""
        decays = [member.optimisation.ema for member in self.present]
        if decays.count(decays[0]) == len(decays):
            return super().configure_callbacks()
        return [Average([decay or 0.0 for decay in decays])]

    def configure_optimizers(self) -> Any:
        """Return the optimizers of the members as one, and their schedules if there are any."""
        runs = [(rows, self.present[rows.start].optimisation) for rows in runs_of(_steps(self.present))]
        decayed = (members(self.model).decayed_parameters or self.parameters)()
        max_epochs = None if self._trainer is None else self.trainer.max_epochs
        optimizers = Optimizers(self.parameters(), decayed, runs, max_epochs)
        if all(run.schedule is None for run in optimizers.runs):
            return optimizers
        return [optimizers], [Schedules(optimizers)]

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip the gradient of each model by its own norm."""
        largest = [member.optimisation.gradient_clip_val or math.inf for member in self.present]
        if min(largest) == math.inf:
            return
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norms = torch.stack([value.reshape(len(value), -1).norm(dim=1) for value in gradients]).norm(dim=0)  # [S]
        limits = largest[0] if len(set(largest)) == 1 else torch.tensor(largest, dtype=norms.dtype, device=norms.device)
        factors = (limits / (norms + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for value in gradients:
            value *= factors.view(-1, *[1] * (value.dim() - 1))

    def select(self, numbers: Sequence[int]) -> None:
        """Remove the models of all other members, with their state in the optimizer."""
        rows = [row for row, number in enumerate(self.rows) if number in set(numbers)]
        index = torch.tensor(rows, device=self.device)
        self.model.select(index)
        for callback in self.trainer.callbacks if self._trainer else ():  # type: ignore[attr-defined]
            if isinstance(callback, Average):
                callback.select(index)
        for optimizer in self.trainer.optimizers if self._trainer else ():
            cast(Any, optimizer).select(rows)
        self._objectives = None
        self.rows = [self.rows[row] for row in rows]
        self.metrics = [self.metrics[row] for row in rows] if self.metrics else []

    def fill(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all models by those of these members, with these weights."""
        self.rows, self._objectives = list(weights), None
        self.model.fill(list(weights.values()), [self._numbers[number] for number in self.rows])

    def _texts(self) -> list[str]:
        """Return a text for each member of all that determines its training, beside its weights."""
        texts = []
        for number, member in enumerate(self.members):
            numbers = "".join(f", {'.'.join(name)}={value!r}" for name, value in self._numbers[number].items())
            texts.append(member.text + numbers)
        return texts

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the members, and those in the rows."""
        checkpoint["members"], checkpoint["rows"] = self._texts(), list(self.rows)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the members that had stopped; raise ValueError if the checkpoint has other members or shapes."""
        saved, actual = checkpoint.get("members", []), self._texts()
        if saved != actual:
            first = next((pair for pair in zip(saved, actual, strict=False) if pair[0] != pair[1]), None)
            of_saved, of_actual = (f"({len(texts)}) {texts}" for texts in (saved, actual)) if first is None else first
            raise ValueError(
                f"The checkpoint is of {of_saved if saved else 'no stack'}, this stack of {of_actual}. Resume with the "
                "settings that the run was started with, or start again without ckpt_path."
            )
        self.select(checkpoint["rows"])
        super().on_load_checkpoint(checkpoint)


def _steps(each: Sequence[Member]) -> list[Any]:
    """Return keys that are equal for members whose rows may have one optimizer."""
    keys: list[Any] = []
    for number, member in enumerate(each):
        optimisation = member.optimisation
        keys.append((spelled(optimisation), id(_called(optimisation.optimizer)), id(_called(optimisation.scheduler))))
        if optimisation.on_plateau:  # each follows its own validation
            keys[-1] += (number,)
    return keys


def _sorted(all_members: Sequence[Member]) -> list[int]:
    """Return the numbers of the members, those with equal settings beside each other."""
    first: dict[Any, int] = {}
    keys = [(shape_of(member.objective), step) for member, step in zip(all_members, _steps(all_members), strict=True)]
    for key in keys:
        first.setdefault(key, len(first))
    return sorted(range(len(keys)), key=lambda number: first[keys[number]])


class Stacked(StackOfSeeds, Transductive):
    """`Transductive` for S models at once: every epoch of each is that of the model alone."""

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Make each model's dropout depend only on its own seed and the epoch; `seed` is ignored."""
        self._set_key(torch.tensor([key_of(member.seed, epoch) for member in self.present]))

    def forward(self, data: Data) -> Tensor:
        """Return the logits [S, N, K] of a graph's nodes."""
        out: Tensor
        if self._key is None or not self.training:
            out = self.model.each(lambda model: self._call_model(model, data))
        else:
            out = self.model.each(lambda model, key: self._call_keyed(model, data, key), self._key)
        return out

    def select(self, numbers: Sequence[int]) -> None:
        """Remove the models of all other members, with their state in the optimizer."""
        super().select(numbers)
        self._key = None
        self.cuda_graphs.reset()


class StackedInductive(StackOfSeeds, Inductive):
    """`Inductive` for S models at once, on the same batches of graphs; on large ones, one model after the other.

    Every epoch of each is that of the model alone on batches in the same order: with `TaskData(seed=...)` of the same
    seed. A model alone usually takes the order from its own seed, since a stack has one set of edges in each step.
    """

    _generators: list[torch.Generator] | None = None  # in an epoch: that of each row

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Give each model the dropout of its own seed and the epoch; `seed` is ignored."""
        self._generators = [generator_of(member.seed, epoch, self.device) for member in self.present]

    def forward(self, data: Data) -> Tensor:
        """Return the logits [S, G, K] of the graphs, or [S, N, K] of the nodes."""
        out: Tensor
        in_turn = self._elements(data) > IN_TURN
        if (generators := self._generators) is None or not self.training:
            out = self.model.each(lambda model: self._call_model(model, data), in_turn=in_turn)
            return out

        def call(model: Any, row: Tensor) -> Tensor:
            with seeds_from(generators, row):
                return self._call_model(model, data)

        out = self.model.each(call, torch.arange(len(generators), device=self.device), in_turn=in_turn)
        return out

    def _elements(self, data: Data) -> int:
        """Estimate how many elements a step computes: for each node and edge, the parameters per input feature."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters()) // len(self.model)
        return int((data.num_nodes + data.num_edges) * parameters // max(data.x.size(-1), 1))

    def on_train_epoch_end(self) -> None:
        """Forget the epoch's generators: the next one may have fewer rows."""
        self._generators = None


def _stacked(module: LightningModule) -> StackOfSeeds:
    if not isinstance(module, StackOfSeeds):
        raise TypeError(f"{type(module).__name__} is not a stack of seeds, expected gat_pyg.seeds.Stacked.")
    return module
