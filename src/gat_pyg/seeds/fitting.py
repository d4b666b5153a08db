"""Training of many seeds and settings as one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
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
from .member import Member, grouped
from .module import Stacked, StackedInductive, StackOfSeeds
from .planning import StackPlan, in_passes, most_different, plan_stack, trainer_obstacle
from .stack import Stack

T = TypeVar("T")

OPTIMISATION = frozenset(item.name for item in fields(Optimisation))
STOPPING = frozenset({"patience", "criterion"})

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
    """The result of one member: `value` and `val` are the test and the validation score of the best weights."""

    seed: int
    metric: str  # the name of the objective's metric
    value: float
    val: float
    epochs: int
    best_epoch: int  # counted from 1
    seconds: float
    scores: Mapping[str, float] = field(default_factory=dict)  # other test scores, by the names of their metrics
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of `train(settings=...)`


def outcomes(module: StackOfSeeds, stopping: EachStopping) -> list[Outcome]:
    """Return the result of each row, after the fit and the test of the stack."""
    results, metric = [], module.objective.metric.name
    for number, metrics in zip(module.rows, module.metrics, strict=True):
        rule, member = stopping.rules[number], module.members[number]
        tested = {key.removeprefix("test_"): score for key, score in metrics.items() if key.startswith("test_")}
        results.append(
            Outcome(
                seed=member.seed,
                metric=metric,
                value=tested[metric],
                val=rule.kept_score,
                epochs=rule.epoch,
                best_epoch=rule.best_epoch,
                seconds=stopping.seconds[number],
                scores={key: round(score, 5) for key, score in tested.items() if key not in ("loss", metric)},
                settings=member.settings,
            )
        )
    return results


def fit_stack(
    models: Sequence[nn.Module],
    data: TaskData,
    make_trainer: Callable[[list[Callback]], Trainer],
    stopping: EachStopping,
    resumable: Resumable,
    *,
    cuda_graphs: bool | Literal["auto"] = "auto",
    metrics: Sequence[Path] = (),
    resume_from: Path | None = None,
    progress: bool = True,
) -> tuple[Trainer, list[tuple[Outcome, nn.Module]]]:
    """Train the models of the members of `stopping` as one, and test the best weights of each.

    Args:
        models: a model for each member.
        data: the task's batches; if they are of many graphs, `data`'s seed determines their order for all models.
        make_trainer: returns a trainer with these callbacks.
        stopping: the members and their stopping rules.
        resumable: the callback that writes checkpoints, created with the first seed.
        cuda_graphs: as in `Transductive`.
        metrics: the file of each member's metrics.
        resume_from: the checkpoint of an interrupted training of these members.
        progress: if true, print a line of progress.

    Returns:
        The trainer, and the outcome and the model of each member; models are on the trainer's device.
    """
    members, many = stopping.members, data.task.has_many_graphs
    module = StackedInductive(models, members) if many else Stacked(models, members, cuda_graphs)
    callbacks = [
        *([EachMetrics(metrics, stopping)] if metrics else []),
        stopping,
        resumable,
        *([EachProgress(f"{data.task.name}, {_title(members)}", stopping)] if progress else []),
    ]
    trainer = make_trainer(callbacks)
    trainer.fit(module, datamodule=data, ckpt_path=resume_from)
    trainer.test(module, datamodule=data, verbose=False)
    results = zip(module.rows, outcomes(module, stopping), strict=True)
    pairs = {number: (outcome, module.model[row]) for row, (number, outcome) in enumerate(results)}
    return trainer, [pairs[number] for number in range(len(members))]


def _title(members: Sequence[Member]) -> str:
    seeds = [member.seed for member in members]
    if len(set(seeds)) < len(seeds):
        return f"{len(members)} runs"
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


@quiet()
def train(
    make_model: Callable[..., nn.Module],
    task: Task,
    seeds: Iterable[int] = range(10),
    *,
    settings: Iterable[Mapping[str, Any]] = ({},),
    optimisation: Optimisation = Optimisation(),
    batch_size: int = 1,
    patience: int | None = 100,
    criterion: Criterion = "both",
    max_epochs: int = 100_000,
    seeds_per_pass: int | Literal["auto"] = "auto",
    progress: bool = True,
    **trainer: Any,
) -> tuple[list[Outcome], Stack]:
    """Train the model with every seed, and with each of several settings, as many at once as fit in memory.

    `make_model()` is called after `seed_everything(s)`: seed s starts from the same weights as in a single run. If all
    dropout is that of gat_pyg's layers, it also takes the same steps, up to rounding. Each seed stops by the paper's
    rule and ends with its best weights.

    With many graphs, all seeds take the same batches, in the order of the first seed: seed s takes the steps of a
    single run with `TaskData(task, batch_size, seed=seeds[0])`.

    Settings may differ in learning rate, weight decay and other numbers of the optimizer, dropout, clipping and
    patience. Those that differ in the loss, the class of the optimizer, the scheduler, `warmup` or `ema` are trained
    one group after the other. They cannot differ in the shape of the model, `negative_slope` or `edge_dropout`. Each
    setting with each seed is trained as it would be alone, with its own optimizer state, dropout masks and stopping.

    Args:
        make_model: returns a fresh model, called as in `Transductive`.
        task: task on one graph or many.
        seeds: integers from 0 to 2^32 - 1.
        settings: each has values by their names: fields of `Optimisation`, arguments of the loss (`task.with_loss`),
            `patience` and `criterion`; all others are arguments of `make_model`. What a setting leaves out is as below.
        optimisation: as in `Transductive`.
        batch_size: the number of graphs in a step; a single graph is always one step.
        patience, criterion: as in `PaperStopping`.
        max_epochs: the number of epochs after which every seed ends.
        seeds_per_pass: number of seeds to train at once; "auto": as many as fit in a GPU's memory, and on a CPU as need
            about 1 GiB.
        progress: print the progress.
        **trainer: arguments of Lightning's Trainer, for a single device. Its callbacks come before those of the stack.

    Returns:
        The outcome of each seed with each setting, those of the first setting first, and the stack of the trained
        models.

    Raises:
        ValueError: if the models share weights, differ in shape or cannot be stacked, the trainer starts several
            processes or has an option that would act on all seeds at once, as the optimizer may, or a number is out of
            range.

    Example:
        >>> import gat_pyg.data, gat_pyg.models
        >>> make = lambda dropout=0.6: gat_pyg.models.GAT(64, [8], 10, heads=[8, 1], dropout=dropout)
        >>> options = {"max_epochs": 1, "progress": False}
        >>> outcomes, stack = train(make, gat_pyg.data.digits(), range(2), **options)
        >>> [outcome.seed for outcome in outcomes], len(stack)
        ([0, 1], 2)
        >>> grid = [{"lr": lr, "dropout": p} for lr in (0.01, 0.005) for p in (0.2, 0.6)]
        >>> outcomes, stack = train(make, gat_pyg.data.digits(), [0], settings=grid, **options)
        >>> best = max(outcomes, key=lambda outcome: outcome.val)
        >>> best.settings in grid, len(stack)
        (True, 4)
    """
    seeds, settings = list(seeds), [dict(setting) for setting in settings]
    _check_numbers(seeds, seeds_per_pass, batch_size)
    if not settings:
        raise ValueError("settings is empty, expected at least one. Leave it out to train with one setting.")
    default = Member(0, task.objective, optimisation, patience, criterion)
    members = [_member(default, task, setting, seed) for setting in settings for seed in seeds]
    options: dict[str, Any] = {**SINGLE, **trainer}
    callbacks = options.pop("callbacks", None) or []
    first: list[Callback] = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    device = _checked_device(Trainer(**options), members)
    plan = _planned(members, make_model, task, batch_size, device)
    results: dict[int, tuple[Outcome, nn.Module]] = {}

    def make_trainer(callbacks: list[Callback]) -> Trainer:
        return Trainer(max_epochs=max_epochs, callbacks=[*first, *callbacks], **options)

    def one_pass(numbers: list[int]) -> None:
        some = [members[number] for number in numbers]
        _, pairs = fit_stack(
            [_built(member, make_model) for member in some],
            TaskData(task, batch_size, seeds[0], plan.sparse),
            make_trainer,
            EachStopping(some),
            Resumable(None, some[0].seed),
            progress=progress,
        )
        results.update(
            {number: (outcome, model.cpu().eval()) for number, (outcome, model) in zip(numbers, pairs, strict=True)}
        )

    def left(numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if number not in results]

    for group in grouped(range(len(members)), lambda number: members[number].stack_key):
        size = plan.size(device, len(group)) if seeds_per_pass == "auto" else seeds_per_pass
        in_passes(partial(left, group), size, one_pass)
    outcomes, models = zip(*(results[number] for number in range(len(members))), strict=True)
    return list(outcomes), Stack(models).eval()


def _member(default: Member, task: Task, setting: Mapping[str, Any], seed: int) -> Member:
    """Return the member with some settings of the optimizer, the loss and the stopping rule replaced."""
    steps = {key: value for key, value in setting.items() if key in OPTIMISATION}
    loss = {key: value for key, value in setting.items() if key in task.objective.loss_options}
    return replace(
        default,
        seed=seed,
        objective=task.with_loss(**loss).objective if loss else task.objective,
        optimisation=replace(default.optimisation, **steps),
        settings=setting,
        **{key: value for key, value in setting.items() if key in STOPPING},
    )


def _built(member: Member, make_model: Callable[..., nn.Module]) -> nn.Module:
    """Return the fresh model of a member, made with the settings that are not of the training."""
    others = {*OPTIMISATION, *STOPPING, *member.objective.loss_options}
    arguments = {key: value for key, value in member.settings.items() if key not in others}
    return seeded(member.seed, lambda: make_model(**arguments))


def _check_numbers(seeds: Sequence[int], seeds_per_pass: int | Literal["auto"], batch_size: int) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds are {seeds}, expected at least one, from 0 to 2^32 - 1, and none twice.")
    if seeds_per_pass != "auto" and seeds_per_pass < 1:
        raise ValueError(f"seeds_per_pass is {seeds_per_pass}, expected 'auto' or a number of seeds, at least 1.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected a number of graphs, at least 1.")


def _checked_device(trainer: Trainer, members: Sequence[Member]) -> torch.device:
    """Return the trainer's device; raise ValueError if the trainer or an optimizer cannot train a stack."""
    if trainer.world_size > 1:
        raise ValueError(f"The trainer has {trainer.world_size} processes, expected one: each would train all seeds.")
    obstacles = [trainer_obstacle(trainer), *(member.optimisation.stack_obstacle for member in members)]
    if obstacle := next(filter(None, obstacles), None):
        raise ValueError(f"Seeds cannot be trained as one: {obstacle}. Train them one by one.")
    return trainer.strategy.root_device


def _planned(
    members: Sequence[Member], make_model: Callable[..., nn.Module], task: Task, batch_size: int, device: torch.device
) -> StackPlan:
    """Return the plan for the members; raise ValueError if their models share weights or cannot be stacked."""
    some = most_different([member.settings for member in members])
    chosen = [members[number] for number in some]
    models = [_built(member, make_model) for member in chosen]
    ids = [{id(weight) for weight in model.parameters()} for model in models]
    if any(ids[0] & others for others in ids[1:]):
        raise ValueError("make_model() returned the same weights again, expected a fresh model at each call.")
    sparse = sparse_pays(task, models[0], device.type, stacked=True)
    plan = plan_stack(models, task, batch_size, sparse, device)
    if isinstance(plan, str):
        advice = "Train its seeds one by one."
        if any(member.settings for member in chosen):
            advice = f"Tried with {'; '.join(map(str, chosen))}. Train settings of other shapes separately."
        raise ValueError(f"{plan}. {advice}")
    return plan


def seeded(seed: int, make_model: Callable[[], T]) -> T:
    """Call `make_model` after `seed_everything(seed)`, as at the start of a run with this seed.

    >>> import torch
    >>> seeded(3, lambda: torch.rand(2)).equal(seeded(3, lambda: torch.rand(2)))
    True
    """
    seed_everything(seed, workers=True, verbose=False)
    return make_model()
