"""Training of many seeds as one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning import Trainer, seed_everything
from lightning.pytorch import Callback
from torch import nn

from ..tasks.task import Task
from ..training.loading import TaskData, sparse_pays
from ..training.progress import quiet
from ..training.resume import Resumable
from ..training.stopping import Criterion
from .callbacks import EachMetrics, EachProgress, EachStopping
from .memory import in_passes, trial, why_not_by
from .module import Stacked
from .stack import Stack

T = TypeVar("T")

# Without the command ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one seed: `value` and `val` are the test and the validation score of the weights kept."""

    seed: int
    metric: str  # the name of the objective's metric
    value: float
    val: float
    epochs: int
    best_epoch: int  # counted from 1
    seconds: float


def outcomes(module: Stacked, stopping: EachStopping) -> list[Outcome]:
    """Return the result of each seed, after the fit and the test of the stack."""
    found, metric = [], module.objective.metric.name
    for seed, metrics in zip(module.seeds, module.metrics, strict=True):
        rule = stopping.rules[seed]
        scores = metrics[f"test_{metric}"], rule.kept_score
        found.append(Outcome(seed, metric, *scores, rule.epoch, rule.best_epoch, stopping.seconds[seed]))
    return found


def fit_stack(
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    data: TaskData,
    make_trainer: Callable[[list[Callback]], Trainer],
    *,
    lr: float,
    weight_decay: float,
    cuda_graphs: bool | Literal["auto"] = "auto",
    patience: int,
    criterion: Criterion,
    metrics: Mapping[int, Path] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: float = 30.0,
    resume_from: Path | None = None,
    progress: bool = True,
) -> tuple[Trainer, list[tuple[Outcome, nn.Module]]]:
    """Train the models of these seeds as one, and test the best weights of each.

    Args:
        models: one for each seed.
        seeds: of the runs.
        data: a task of one graph.
        make_trainer: gives a trainer with these callbacks.
        lr, weight_decay, cuda_graphs: as of `Transductive`.
        patience, criterion: as of `PaperStopping`.
        metrics: a file for each seed's metrics.
        checkpoint, checkpoint_every: as `path` and `every` of `Resumable`.
        resume_from: the checkpoint of an interrupted training of these seeds.
        progress: if true, print a line of progress.

    Returns:
        The trainer, and for each seed its outcome and its model, on the trainer's device.
    """
    module = Stacked(models, seeds, data.task.objective, lr, weight_decay, cuda_graphs)
    stopping = EachStopping(seeds, patience, criterion)
    named = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    callbacks = [
        *([EachMetrics(metrics, stopping)] if metrics else []),
        stopping,
        Resumable(checkpoint, seeds[0], checkpoint_every),
        *([EachProgress(f"{data.task.name}, {named}", stopping)] if progress else []),
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
    lr: float = 0.005,
    weight_decay: float = 0.0,
    patience: int = 100,
    criterion: Criterion = "both",
    max_epochs: int = 100_000,
    seeds_per_pass: int | Literal["auto"] = "auto",
    progress: bool = True,
    **trainer: Any,
) -> tuple[list[Outcome], Stack]:
    """Train the model with every seed, as many at once as fit memory; the outcomes and the stack of trained models.

    `make_model()` is called after `seed_everything(s)`: seed s starts from the weights that it has in a single run,
    and takes the same steps but for rounding, where dropout is that of gat_pyg's layers. Each stops by the paper's
    rule, and the stack has the weights that were kept last.

    Args:
        make_model: gives a fresh model, called as `Transductive` calls one.
        task: a task of one graph.
        seeds: each a number from 0 to 2^32 - 1.
        lr, weight_decay: as of `Transductive`.
        patience, criterion: as of `PaperStopping`.
        max_epochs: where a seed ends that has not stopped.
        seeds_per_pass: how many to train at once; "auto" fits them to the device's memory.
        progress: whether to print the progress.
        **trainer: of Lightning's Trainer, for a single device; its callbacks come before those of the stack.

    Raises:
        ValueError: if the task has many graphs, the models are one and the same or cannot be stacked, the trainer would
            treat seeds as one or start processes, or a number is out of range.

    Example:
        >>> import gat_pyg.data, gat_pyg.models
        >>> make = lambda: gat_pyg.models.GAT(64, [8], 10, heads=[8, 1], dropout=0.6)
        >>> found, stack = train(make, gat_pyg.data.digits(), range(2), max_epochs=1, progress=False)
        >>> [one.seed for one in found], len(stack)
        ([0, 1], 2)
    """
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds are {seeds}, expected at least one, from 0 to 2^32 - 1, and none twice.")
    if seeds_per_pass != "auto" and seeds_per_pass < 1:
        raise ValueError(f"seeds_per_pass is {seeds_per_pass}, expected 'auto' or a number of seeds, at least 1.")
    if task.shared_graph is None:
        raise ValueError(f"{task.name} has many graphs, and seeds are stacked on one. Train them one by one.")

    def models(some: Sequence[int]) -> list[nn.Module]:
        return [seeded(seed, make_model) for seed in some]

    options: dict[str, Any] = {
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **trainer,
    }
    callbacks = options.pop("callbacks", None) or []
    own: list[Callback] = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    alone = Trainer(**options)
    if alone.world_size > 1:
        raise ValueError(f"The trainer has {alone.world_size} processes, expected one: each would train all seeds.")
    if why_not := why_not_by(alone):
        raise ValueError(f"Seeds cannot be trained as one: {why_not}. Train them one by one.")
    device = alone.strategy.root_device
    tried = models((seeds * 2)[:2])
    if {id(weight) for weight in tried[0].parameters()} & {id(weight) for weight in tried[1].parameters()}:
        raise ValueError("make_model() gave the weights that it had given before, expected a fresh model at each call.")
    sparse = sparse_pays(task, tried[0], device.type, stacked=True)
    fit = trial(tried, task.objective, next(iter(TaskData(task, sparse=sparse).train_dataloader())), device)
    if fit.why_not:
        raise ValueError(f"{type(tried[0]).__name__} cannot be stacked: {fit.why_not}. Train its seeds one by one.")
    found: dict[int, Outcome] = {}
    trained: dict[int, nn.Module] = {}

    def one_pass(some: list[int]) -> None:
        def make_trainer(callbacks: list[Callback]) -> Trainer:
            return Trainer(max_epochs=max_epochs, callbacks=[*own, *callbacks], **options)

        _, results = fit_stack(
            models(some),
            some,
            TaskData(task, sparse=sparse),
            make_trainer,
            lr=lr,
            weight_decay=weight_decay,
            patience=patience,
            criterion=criterion,
            progress=progress,
        )
        for outcome, model in results:
            found[outcome.seed], trained[outcome.seed] = outcome, model.cpu().eval()

    size = fit.seeds(device, len(seeds)) if seeds_per_pass == "auto" else seeds_per_pass
    in_passes(lambda: [seed for seed in seeds if seed not in found], size, one_pass)
    return [found[seed] for seed in seeds], Stack([trained[seed] for seed in seeds]).eval()


def seeded(seed: int, make_model: Callable[[], T]) -> T:
    """Call `make_model` after `seed_everything(seed)`, as at the start of a run with this seed.

    >>> import torch
    >>> seeded(3, lambda: torch.rand(2)).equal(seeded(3, lambda: torch.rand(2)))
    True
    """
    seed_everything(seed, workers=True, verbose=False)
    return make_model()
