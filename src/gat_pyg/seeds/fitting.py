"""Training of many seeds as one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch import Callback
from torch import nn

from ..tasks.task import Task
from ..training.loading import TaskData, sparse_pays
from ..training.optimisation import Optimisation
from ..training.progress import quiet
from ..training.resume import Resumable
from ..training.stopping import Criterion
from .callbacks import EachMetrics, EachProgress, EachStopping
from .module import Stacked, StackedInductive, StackOfSeeds
from .planning import StackPlan, in_passes, plan_stack, trainer_obstacle
from .stack import Stack

T = TypeVar("T")

SINGLE = {  # arguments of a trainer that runs one stack on one device
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@dataclass(frozen=True)
class Outcome:
    """The result of one seed: `value` and `val` are the test and the validation score of the best weights."""

    seed: int
    metric: str  # the name of the objective's metric
    value: float
    val: float
    epochs: int
    best_epoch: int  # counted from 1
    seconds: float
    scores: Mapping[str, float] = field(default_factory=dict)  # other test scores, by the names of their metrics


def outcomes(module: StackOfSeeds, stopping: EachStopping) -> list[Outcome]:
    """Return the result of each seed, after the fit and the test of the stack."""
    results, metric = [], module.objective.metric.name
    for seed, metrics in zip(module.seeds, module.metrics, strict=True):
        rule = stopping.rules[seed]
        tested = {key.removeprefix("test_"): score for key, score in metrics.items() if key.startswith("test_")}
        scores = tested[metric], rule.kept_score
        others = {key: round(score, 5) for key, score in tested.items() if key not in ("loss", metric)}
        results.append(Outcome(seed, metric, *scores, rule.epoch, rule.best_epoch, stopping.seconds[seed], others))
    return results


def fit_stack(
    models: Sequence[nn.Module],
    data: TaskData,
    make_trainer: Callable[[list[Callback]], Trainer],
    stopping: EachStopping,
    resumable: Resumable,
    *,
    optimisation: Optimisation,
    cuda_graphs: bool | Literal["auto"] = "auto",
    metrics: Mapping[int, Path] | None = None,
    resume_from: Path | None = None,
    progress: bool = True,
) -> tuple[Trainer, list[tuple[Outcome, nn.Module]]]:
    """Train the models of the seeds of `stopping` as one, and test the best weights of each.

    Args:
        models: one for each seed.
        data: the task's batches; if they are of many graphs, `data`'s seed determines their order for all models.
        make_trainer: returns a trainer with these callbacks.
        stopping: the stopping rule of each seed.
        resumable: the callback that writes checkpoints, created with the first seed.
        optimisation, cuda_graphs: as in `Transductive`.
        metrics: the file of each seed's metrics.
        resume_from: the checkpoint of an interrupted training of these seeds.
        progress: if true, print a line of progress.

    Returns:
        The trainer, and the outcome and the model of each seed; models are on the trainer's device.
    """
    module: StackOfSeeds
    seeds, objective = list(stopping.rules), data.task.objective
    if data.task.has_many_graphs:
        module = StackedInductive(models, seeds, objective, optimisation)
    else:
        module = Stacked(models, seeds, objective, optimisation, cuda_graphs)
    title = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    callbacks = [
        *([EachMetrics(metrics, stopping)] if metrics else []),
        stopping,
        resumable,
        *([EachProgress(f"{data.task.name}, {title}", stopping)] if progress else []),
    ]
    trainer = make_trainer(callbacks)
    trainer.fit(module, datamodule=data, ckpt_path=resume_from)
    trainer.test(module, datamodule=data, verbose=False)
    return trainer, [(outcome, module.model[row]) for row, outcome in enumerate(outcomes(module, stopping))]


@quiet()
def train(
    make_model: Callable[[], nn.Module],
    task: Task,
    seeds: Iterable[int] = range(10),
    *,
    optimisation: Optimisation = Optimisation(),
    batch_size: int = 1,
    patience: int | None = 100,
    criterion: Criterion = "both",
    max_epochs: int = 100_000,
    seeds_per_pass: int | Literal["auto"] = "auto",
    progress: bool = True,
    **trainer: Any,
) -> tuple[list[Outcome], Stack]:
    """Train the model with every seed, as many at once as fit in memory.

    `make_model()` is called after `seed_everything(s)`: seed s starts from the same weights as in a single run. If all
    dropout is that of gat_pyg's layers, it also takes the same steps, up to rounding. Each seed stops by the paper's
    rule and ends with its best weights.

    With many graphs, all seeds take the same batches, in the order of the first seed: seed s takes the steps of a
    single run with `TaskData(task, batch_size, seed=seeds[0])`.

    Args:
        make_model: returns a fresh model, called as in `Transductive`.
        task: of one graph or many.
        seeds: integers from 0 to 2^32 - 1.
        optimisation: as in `Transductive`.
        batch_size: the number of graphs in a step; a single graph is always one step.
        patience, criterion: as in `PaperStopping`.
        max_epochs: the number of epochs after which every seed ends.
        seeds_per_pass: how many to train at once; "auto" fits them to the device's memory.
        progress: whether to print the progress.
        **trainer: arguments of Lightning's Trainer, for a single device. Its callbacks come before those of the stack.

    Returns:
        The outcome of each seed, and the stack of the trained models.

    Raises:
        ValueError: if the models share weights or cannot be stacked, the trainer starts several processes or has an
            option that would act on all seeds at once, as the optimizer may, or a number is out of range.

    Example:
        >>> import gat_pyg.data, gat_pyg.models
        >>> make = lambda: gat_pyg.models.GAT(64, [8], 10, heads=[8, 1], dropout=0.6)
        >>> outcomes, stack = train(make, gat_pyg.data.digits(), range(2), max_epochs=1, progress=False)
        >>> [outcome.seed for outcome in outcomes], len(stack)
        ([0, 1], 2)
    """
    seeds = list(seeds)
    _check_numbers(seeds, seeds_per_pass, batch_size)
    options: dict[str, Any] = {**SINGLE, **trainer}
    callbacks = options.pop("callbacks", None) or []
    first: list[Callback] = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    device = _checked_device(Trainer(**options), optimisation)
    plan = _planned([seeded(seed, make_model) for seed in (*seeds, *seeds)[:2]], task, batch_size, device)
    results: dict[int, tuple[Outcome, nn.Module]] = {}

    def make_trainer(callbacks: list[Callback]) -> Trainer:
        return Trainer(max_epochs=max_epochs, callbacks=[*first, *callbacks], **options)

    def one_pass(some: list[int]) -> None:
        _, pairs = fit_stack(
            [seeded(seed, make_model) for seed in some],
            TaskData(task, batch_size, seeds[0], plan.sparse),
            make_trainer,
            EachStopping(some, patience, criterion),
            Resumable(None, some[0]),
            optimisation=optimisation,
            progress=progress,
        )
        results.update({outcome.seed: (outcome, model.cpu().eval()) for outcome, model in pairs})

    size = plan.memory.seeds(device, len(seeds)) if seeds_per_pass == "auto" else seeds_per_pass
    in_passes(lambda: [seed for seed in seeds if seed not in results], size, one_pass)
    outcomes, models = zip(*(results[seed] for seed in seeds), strict=True)
    return list(outcomes), Stack(models).eval()


def _check_numbers(seeds: Sequence[int], seeds_per_pass: int | Literal["auto"], batch_size: int) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds are {seeds}, expected at least one, from 0 to 2^32 - 1, and none twice.")
    if seeds_per_pass != "auto" and seeds_per_pass < 1:
        raise ValueError(f"seeds_per_pass is {seeds_per_pass}, expected 'auto' or a number of seeds, at least 1.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected a number of graphs, at least 1.")


def _checked_device(trainer: Trainer, optimisation: Optimisation) -> torch.device:
    """Return the trainer's device; raise ValueError if the trainer cannot train a stack."""
    if trainer.world_size > 1:
        raise ValueError(f"The trainer has {trainer.world_size} processes, expected one: each would train all seeds.")
    if obstacle := trainer_obstacle(trainer) or optimisation.stack_obstacle:
        raise ValueError(f"Seeds cannot be trained as one: {obstacle}. Train them one by one.")
    return trainer.strategy.root_device


def _planned(models: Sequence[nn.Module], task: Task, batch_size: int, device: torch.device) -> StackPlan:
    """Return the plan for models like these two; raise ValueError if they share weights or cannot be stacked."""
    first, second = ({id(weight) for weight in model.parameters()} for model in models)
    if first & second:
        raise ValueError("make_model() returned the same weights again, expected a fresh model at each call.")
    sparse = sparse_pays(task, models[0], device.type, stacked=True)
    plan = plan_stack(models, task, batch_size, sparse, device)
    if isinstance(plan, str):
        raise ValueError(f"{plan}. Train its seeds one by one.")
    return plan


def seeded(seed: int, make_model: Callable[[], T]) -> T:
    """Call `make_model` after `seed_everything(seed)`, as at the start of a run with this seed.

    >>> import torch
    >>> seeded(3, lambda: torch.rand(2)).equal(seeded(3, lambda: torch.rand(2)))
    True
    """
    seed_everything(seed, workers=True, verbose=False)
    return make_model()
