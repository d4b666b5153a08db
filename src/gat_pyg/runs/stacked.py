"""Several runs trained as one model, with one share of the runs per device."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import Callback
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ..distributed.halo import HaloStrategy
from ..distributed.ranks import missing, rank_zero_print
from ..seeds.callbacks import EachStopping
from ..seeds.fitting import fit_stack
from ..seeds.member import Member, grouped
from ..seeds.planning import StackPlan, in_passes, most_different, plan_stack, trainer_obstacle
from ..settings.factory import LABELS
from ..settings.hashing import flattened
from ..settings.options import Mark, Training, marked
from ..settings.settings import Settings
from ..tasks.task import Task
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData
from ..training.progress import quiet
from ..training.resume import Resumable
from ..training.signals import handled
from ..training.stopping import PaperStopping
from .build import build_trainer, wants_sparse
from .folder import Job, Run
from .network import Built, initial_model
from .process import deterministic, device_name, elements, exit_on_signal, keep_memory, reset_peak, suited_threads
from .pruning import Pruning
from .result import CHECKPOINT, METRICS
from .sequential import save_run_settings, write_outputs
from .task import read_task, with_loss

LARGE = 100_000_000  # elements of a step of many graphs: above, the little that members share saves no time


# Settings in which the members of a stack may differ, or groups of them
VARYING = marked(Mark.VARIES, "training.", Training) | {"seed", "optimizer", "model"}
UNUSED = marked(Mark.UNUSED, "", Settings) | {f"model.{label}" for label in LABELS}  # settings that no training reads


def stack_key(settings: Settings, varying: AbstractSet[str] = VARYING) -> str:
    """Return a text that is equal for settings whose models may be trained as one: of all but those in `varying`.

    Of a model, these are the numbers that are not whole, and those of dropout; of other groups, all but the class.
    """
    values = flattened(settings.to_dict())

    def varies(name: str, value: Any) -> bool:
        group = name.partition(".")[0]
        if group == "model" and group in varying:
            return (isinstance(value, float) or "dropout" in name) and not isinstance(value, (bool, list, str))
        return name in varying or (group in varying and not name.endswith("._target_"))

    same = {name: value for name, value in values.items() if name not in UNUSED and not varies(name, value)}
    return json.dumps(same, sort_keys=True, default=str)


def all_at_once(jobs: Sequence[Job], task: Task) -> list[Job]:
    """Train the unfinished runs of all jobs as one if `vectorize` allows it, and return the jobs so trained.

    The jobs have equal `stack_key`. Each run's folder gets the same files as if it were trained alone. The members of a
    stack have the order of their settings, so that the order of a sweep's values does not change how sums are rounded.
    """
    jobs = sorted(jobs, key=lambda job: (job.settings.seed, stack_key(job.settings, frozenset())))
    runs = [run for job in jobs for run in job.runs]
    left = [run for run in runs if not run.is_finished]
    if len(runs) < 2 or not left or jobs[0].settings.vectorize is False or any(job.started_from for job in jobs):
        return []
    settings = jobs[0].settings
    reset_peak()
    with deterministic():
        trainer, plan = _planned(jobs[0], len(runs), left, task)
        if isinstance(plan, str):
            parts = grouped(jobs, lambda job: stack_key(job.settings, VARYING - {"model"}))
            if 1 < len(parts) < len(runs) and not isinstance(_planned(parts[0][0], 2, parts[0][0].runs, task)[1], str):
                rank_zero_print(f"{task.name}: {len(runs)} runs in {len(parts)} trainings, since {plan}")
                return [job for part in parts for job in all_at_once(part, task)]
            if settings.vectorize is True:
                raise ValueError(f"vectorize is on, but {plan}. Use vectorize=auto or off.")
            rank_zero_print(f"{task.name}: {len(runs)} runs one by one, since {plan}")
            return []
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    devices = devices[: len(runs)]
    if task.has_many_graphs:
        rank_zero_print(
            f"{task.name}: {len(runs)} runs as one, on the same batches of graphs, in the order of seed {settings.seed}"
        )
    places = [Place(rank, len(devices), device) for rank, device in enumerate(devices)]
    if len(places) == 1:
        one_share(places[0], jobs, task, plan)
    else:  # the shares exchange nothing, so each has a process of its own
        torch.cuda.empty_cache()  # the trial's memory, which the processes need
        try:
            plain = [job._replace(pruner=None) for job in jobs]
            spawn(_share, (places, plain, plan, os.getpid()), nprocs=len(places))
        except ProcessExitedException as error:
            raise ValueError(missing([error.error_index], len(places))) from error
    return list(jobs)


def _planned(job: Job, count: int, left: Sequence[Run], task: Task) -> tuple[Trainer, StackPlan | str]:
    """Return a trainer and the plan for training `count` runs as one, or the reason to train them one by one."""
    settings, task = job.settings, with_loss(task, job.settings)
    trainer = build_trainer(settings.trainer, settings.logger, job.folder)
    kinds = {_member(run, task).stack_key for run in left}
    obstacles = [
        _settings_obstacle(settings, task),
        _devices_obstacle(trainer),
        trainer_obstacle(trainer),
        *(run.settings.optimisation.stack_obstacle for run in left),
        "their scheduler may depend on all settings of the optimizer" if len(kinds) > 1 else None,
    ]
    obstacle = next(filter(None, obstacles), None)
    if obstacle is not None:
        return trainer, obstacle
    values = [flattened(run.settings.to_dict()) for run in left]
    used = [{name: value for name, value in each.items() if name not in UNUSED} for each in values]
    different = [left[number] for number in most_different(used)]
    models = [_built(run, task).model for run in different]
    if settings.vectorize == "auto" and task.has_many_graphs:
        if trainer.world_size > 1:
            return trainer, f"{trainer.world_size} processes divide the graphs of each step"
        if (size := elements(task, settings.training.batch_size, models[:1])) > LARGE:
            return trainer, f"a step has {size / 1e6:.0f} million elements, and so large ones are not faster as one"
    sparse = wants_sparse(settings.training, task, models[0], trainer, stacked=True)
    device = trainer.strategy.root_device
    plan = plan_stack(models, task, settings.training.batch_size, sparse, device)
    if isinstance(plan, str):
        return trainer, plan
    if settings.vectorize == settings.seeds_per_pass == "auto" and plan.size(device, count) == 1:
        return trainer, f"a run takes {plan.bytes_per_model >> 20} MiB, and several are not faster as one"
    return trainer, plan


def _built(run: Run, task: Task) -> Built:
    return initial_model(run.settings, task, run.seed)


class Place(NamedTuple):
    """The process and device that train one share of the runs; there are `world` shares."""

    rank: int
    world: int
    device: torch.device

    def checkpoint(self, job: Job) -> Path:
        """Return the path of the share's checkpoint of a pass that begins with a run of this job."""
        return job.folder / f"{self.rank}.{CHECKPOINT}"


def _share(rank: int, places: list[Place], jobs: Sequence[Job], plan: StackPlan, parent: int) -> None:
    """Train one share of the runs in a process of its own; on a CPU, with a share of the cores."""
    place = places[rank]
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world))
    else:
        torch.cuda.set_device(place.device)
    keep_memory()
    with jobs[0].child(rank, parent), handled(exit_on_signal), quiet():
        one_share(place, jobs, read_task(jobs[0].settings), plan)


def one_share(place: Place, jobs: Sequence[Job], task: Task, plan: StackPlan) -> None:
    """Train every `world`-th run, as many at once as fit in memory; first those of interrupted passes."""
    settings = jobs[0].settings
    runs = [run for job in jobs for run in job.runs][place.rank :: place.world]
    trained: set[Path] = set()  # diverged runs included, which have no result

    def left() -> list[Run]:
        return [run for run in runs if not run.is_finished and run.folder not in trained]

    size = plan.size(place.device, len(runs)) if settings.seeds_per_pass == "auto" else settings.seeds_per_pass
    interrupted = _interrupted(place, jobs, runs) if settings.ckpt_path == "last" else []

    def some_or_interrupted(some: list[Run]) -> None:
        checkpoint, some, order = interrupted.pop(0) if interrupted else (None, some, settings.seed)
        path = place.checkpoint(some[0].job)
        one_pass(some, task, plan, place, path, checkpoint, order)
        trained.update(run.folder for run in some)
        path.unlink(missing_ok=True)

    with deterministic():
        in_passes(left, size, some_or_interrupted)


def _interrupted(place: Place, jobs: Sequence[Job], runs: Sequence[Run]) -> list[tuple[Path, list[Run], int]]:
    """Return the checkpoints of passes without all results, each with the pass's runs and the order of its batches.

    A pass is resumed only with all its runs, since a smaller stack rounds differently.
    """
    passes, limit = [], jobs[0].settings.seeds_per_pass
    by_folder = {run.folder: run for run in runs}
    for path in (place.checkpoint(job) for job in jobs):
        if not path.is_file():
            continue
        folders, order = Pass.recorded(path)
        its = [by_folder[folder] for folder in folders if folder in by_folder]
        is_whole = len(its) == len(folders) and (limit == "auto" or len(its) <= limit)
        if is_whole and not all(run.is_finished for run in its):
            passes.append((path, its, order))
    return passes


class Pass(Callback):
    """The runs of a pass and the seed `order` of its batches, which its checkpoint records.

    The last checkpoint is written before the results of the runs, which are written one after the other.
    """

    def __init__(self, runs: Sequence[Run], checkpoint: Path, order: int) -> None:
        self.runs, self.checkpoint, self.order = runs, checkpoint, order

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last checkpoint."""
        trainer.save_checkpoint(self.checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the folders of the runs, relative to that of the checkpoint, and the order of the batches."""
        folders = [os.path.relpath(run.folder, self.checkpoint.parent) for run in self.runs]
        return {"folders": folders, "order": self.order}

    @classmethod
    def recorded(cls, checkpoint: Path) -> tuple[list[Path], int]:
        """Return the folders of the runs of the pass that wrote a checkpoint, and the order of its batches."""
        state = SafeCheckpoints().load_checkpoint(checkpoint)["callbacks"][cls.__name__]
        return [Path(os.path.normpath(checkpoint.parent / folder)) for folder in state["folders"]], state["order"]


def one_pass(
    runs: Sequence[Run],
    task: Task,
    plan: StackPlan,
    place: Place,
    path: Path,
    checkpoint: Path | None = None,
    order: int = 0,
) -> None:
    """Train these runs as one, test the best weights of each, and write the outputs into their folders.

    The checkpoint at `path` is replaced as the training goes on; `checkpoint` is that to resume from. Batches of graphs
    have the order of the seed `order`.
    """
    settings = runs[0].settings
    task = with_loss(task, settings)
    built = [_built(run, task) for run in runs]
    for run in runs:
        save_run_settings(Job(run.settings, run.folder), run.seed)
    training, models = settings.training, [each.model for each in built]
    stopping = EachStopping([_member(run, task) for run in runs])
    last = [_pruning(runs, list(stopping.rules.values())), Pass(runs, path, order)]
    single = {"strategy": "auto", "devices": [place.device.index] if place.device.index else 1}
    changes = single if place.world > 1 else {}
    with suited_threads(elements(task, training.batch_size, models)):
        trainer, results = fit_stack(
            models,
            TaskData(task, training.batch_size, order, plan.sparse),
            lambda callbacks: build_trainer(
                settings.trainer, settings.logger, path.parent, [*callbacks, *last], **changes
            ),
            stopping,
            Resumable(path, settings.seed, settings.checkpoint_every),
            cuda_graphs=training.cuda_graphs,
            metrics=[run.folder / METRICS for run in runs],
            resume_from=checkpoint,
            progress=place.rank == 0,
        )
        device = device_name(trainer)
    for run, fitted, (outcome, model) in zip(runs, built, results, strict=True):
        is_pruned = run.job.pruner is not None and run.job.pruner.ended > 0
        if outcome.best_epoch and not run.is_finished and not is_pruned:
            of_other = order if task.has_many_graphs and outcome.seed != order else None
            fitted = fitted._replace(model=model.cpu())
            write_outputs(run.settings, task, outcome, fitted, device, run.folder, of_other)


def _member(run: Run, task: Task) -> Member:
    settings, training = run.settings, run.settings.training
    named = {"run": run.job.title} if run.job.title else {}
    return Member(run.seed, task.objective, settings.optimisation, training.patience, training.criterion, named)


def _pruning(runs: Sequence[Run], rules: Sequence[PaperStopping]) -> Pruning:
    """Return the callback for the pruners of all jobs whose runs are in one pass."""
    jobs = {run.job.folder: run.job for run in runs}
    its = {folder: [rule for run, rule in zip(runs, rules, strict=True) if run.job.folder == folder] for folder in jobs}
    is_whole = {folder: len(its[folder]) == job.settings.runs for folder, job in jobs.items()}
    return Pruning([(job.pruner if is_whole[folder] else None, its[folder]) for folder, job in jobs.items()])


def _settings_obstacle(settings: Settings, task: Task) -> str | None:
    """Return the setting that prevents training runs as one, or None."""
    if task.has_many_graphs and settings.training.cuda_graphs is True:
        return f"training.cuda_graphs is true, and {task.name} has many graphs"
    if settings.training.compile:
        return "training.compile is true"
    if settings.loader.is_drawn:
        return "each draws its own batches"
    if settings.trainer.get("strategy") == HaloStrategy.strategy_name:
        return "the processes divide one graph"
    if settings.logger.target is not None:
        return f"{settings.logger.target} logs one run at a time"
    return None


def _devices_obstacle(trainer: Trainer) -> str | None:
    """Return the reason that the trainer's devices cannot share the runs, or None."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 or (cluster is not None and cluster.creates_processes_externally):
        return "its processes were started from outside, and runs are divided among those of one machine"
    return None
