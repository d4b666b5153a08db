"""The LightningModules of a stack of models: on one graph, and on batches of graphs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.func import vmap
from torch.optim import Optimizer
from torch_geometric.data import Data

from ..philox import seeds_from
from ..training.averaging import Average
from ..training.epoch_seeds import generator_of, key_of
from ..training.modules import Inductive, Supervised, Transductive
from ..training.optimisation import _called, _sets
from .member import Member, grouped, spelled
from .stack import Stack

FUSED = (optim.Adam, optim.AdamW, optim.SGD)  # on a CPU and on CUDA, in all supported versions of torch
IN_TURN = 2_000_000  # elements of a step of many graphs: above, one model after the other is faster than vmap

# The stack as Lightning sees it -------------------------------------------------------------------------------------


class StackOfSeeds(Supervised):
    """The base of both setups: S models at once, with the sum of their losses, so each gets its own gradients.

    Each model has a `Member`, with its seed, and settings that may differ from those of the others. The optimizer is
    elementwise, so each model takes the same steps as when it is trained alone. This includes the dropout of gat_pyg's
    layers, which depends on the member's seed and the epoch. `F.dropout` in other layers draws the masks of all models
    at once from the first seed: the masks differ from model to model, and depend on the row of the model.

    Members with the same settings of the optimizer are neighbours in the stack, and a group of the optimizer. `rows`
    are the numbers of the members in the rows; `metrics` are the results of the last validation or test, one entry per
    row.

    Raises:
        ValueError: if the models cannot be stacked, or the members need different objectives, schedules, averages or
            classes of optimizers.
    """

    model: Stack

    def __init__(self, models: Sequence[nn.Module], all_members: Sequence[Member], *args: Any) -> None:
        first = all_members[0]
        if other := next((member for member in all_members if member.stack_key != first.stack_key), None):
            raise ValueError(
                f"a member of the stack has {other.text}, expected the loss, the scheduler, the warm-up, the average "
                f"and the class of the optimizer of the first, {first.text}."
            )
        self._alike = grouped(range(len(models)), lambda number: spelled(all_members[number].optimisation))
        self._set_rows(range(len(models)))
        models = [models[number] for number in self.rows]
        super().__init__(Stack(models), first.objective, first.optimisation, *args)
        self._inspect_model(models[0])
        self.members = list(all_members)
        self._numbers = dict(zip(self.rows, self.model.numbers, strict=True))
        self.metrics: list[dict[str, float]] = []
        self._views: list[list[nn.Parameter]] = []  # of the rows of each group, if there are several

    def _set_rows(self, numbers: Container[int]) -> None:
        """Set the members in the rows: `_groups` are the rows of those that share settings of the optimizer."""
        present = [[number for number in its if number in numbers] for its in self._alike]
        self.rows = [number for its in present for number in its]
        ends = itertools.accumulate(map(len, present))
        self._groups = [slice(end - len(its), end) for its, end in zip(present, ends, strict=True)]

    @property
    def present(self) -> list[Member]:
        """The members in the rows of the stack."""
        return [self.members[number] for number in self.rows]

    def _each(self, statistics: str, out: Tensor, y: Tensor) -> Any:
        return vmap(lambda out: getattr(self.objective, statistics)(out, y))(out)

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

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the mean of the models' metrics, for the log, and set `self.metrics` to those of each model."""
        pooled = self._pooled(*splits)
        rows = [dict(zip(pooled, values, strict=True)) for values in zip(*pooled.values(), strict=True)]
        self.metrics = [self.objective.metrics(sums) for sums in rows]
        return {name: statistics.fmean(metrics[name] for metrics in self.metrics) for name in self.metrics[0]}

    def configure_optimizers(self) -> Any:
        """Return one optimizer, with groups for each group of members, and its schedule if there is one.

        A parameter of a group is a view of its rows of a stacked parameter, or the parameter itself if all members
        share their settings.
        """
        self._views = []
        if len(self._groups) == 1:
            return super().configure_optimizers()
        parameters, optimizers = list(self.parameters()), []
        decayed = {id(value) for value in self.model.decayed_parameters()}
        for rows, numbers in zip(self._groups, self._alike, strict=True):
            views = [nn.Parameter(value.data[rows], value.requires_grad) for value in parameters]
            its = self.members[numbers[0]].optimisation
            its = replace(its, optimizer=_fused(its.optimizer, parameters), scheduler=None, warmup=0)
            of_decay = [view for view, value in zip(views, parameters, strict=True) if id(value) in decayed]
            optimizers.append(its.configure(views, of_decay)[0])
            self._views.append(views)
        optimizer, *others = optimizers
        for group in (group for other in others for group in other.param_groups):
            optimizer.add_param_group(group)
        schedule = self.optimisation.schedule(optimizer, None if self._trainer is None else self.trainer.max_epochs)
        return optimizer if schedule is None else ([optimizer], [schedule])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Give each group the gradients of its rows, in which those of each model are clipped next."""
        super().on_before_optimizer_step(optimizer)
        if not self._views:
            return
        for value, *views in zip(self.parameters(), *self._views, strict=True):
            value.grad = _like(value)
            for rows, view in zip(self._groups, views, strict=True):
                view.grad = None if value.grad is None or rows.start == rows.stop else value.grad[rows]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Remove the gradients of the parameters, and those of their views if the optimizer has these."""
        optimizer.zero_grad()
        if self._views:
            self.zero_grad()

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
        before = self._groups
        self._set_rows(numbers)
        for optimizer in self.trainer.optimizers if self._trainer else ():
            self._select_steps(optimizer, before, index)
        self.metrics = [self.metrics[row] for row in rows] if self.metrics else []

    def _select_steps(self, optimizer: Optimizer, before: Sequence[slice], index: Tensor) -> None:
        """Remove the state of all rows but these from an optimizer, whose groups had the rows in `before`."""
        parameters = list(self.parameters())
        for old, new, views in zip(before, self._groups, self._views or [parameters], strict=True):
            kept = index[new] - old.start
            for view, value in zip(views, parameters, strict=True):
                for key, each in optimizer.state.get(view, {}).items():
                    if isinstance(each, Tensor) and each.dim() > 0:
                        optimizer.state[view][key] = each.index_select(0, kept)
                if view is not value:
                    view.data, view.grad = value.data[new], None

    def fill(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all models by those of these members, with these weights."""
        self._set_rows(weights)
        self.model.fill([weights[number] for number in self.rows], [self._numbers[number] for number in self.rows])

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


def _fused(make: Callable[..., Optimizer], parameters: Sequence[nn.Parameter]) -> Callable[..., Optimizer]:
    """Return the optimizer with one kernel for each parameter, which takes a third of the time, if torch has it.

    Many groups of few rows otherwise wait for Python. A stack whose rows share their settings keeps torch's default, as
    a model alone has it.
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


class Stacked(StackOfSeeds, Transductive):
    """`Transductive` for S models at once: every epoch of each is that of the model alone."""

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Make each model's dropout depend only on its own seed and the epoch; `seed` is ignored."""
        self._set_key(torch.tensor([key_of(member.seed, epoch) for member in self.present]))
        self._seed_draws(seed, epoch)

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
