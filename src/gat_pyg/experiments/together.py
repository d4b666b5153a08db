"""Several seeds trained as one model, with one share of the seeds per device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning import Trainer
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ..distributed.halo import HaloStrategy
from ..distributed.ranks import missing, rank_zero_print
from ..seeds.callbacks import EachStopping
from ..seeds.fitting import fit_stack, seeded
from ..seeds.memory import free_memory
from ..seeds.planning import StackPlan, in_passes, plan_stack, trainer_obstacle
from ..tasks.task import Task
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData
from ..training.progress import quiet
from ..training.resume import Resumable
from ..training.signals import handled
from .alone import save_run_settings, write_outputs
from .build import build_model, build_task, build_trainer, wants_sparse
from .folder import Job
from .process import deterministic, device_name, elements, exit_on_signal, keep_memory, suited_threads
from .result import CHECKPOINT, CONFIG, METRICS, RESULT
from .settings import Settings

LARGE = 12_000_000  # elements of a step of many graphs: up to this size, ten seeds as one were 2 to 4 times as fast


def all_at_once(job: Job, task: Task) -> bool:
    """Train the unfinished seeds as one if `vectorize` allows it, and return True; else return False.

    Each seed's folder gets the same files as after a single run.
    """
    seeds, settings = job.unfinished, job.settings
    if settings.vectorize is False or settings.runs == 1 or not seeds:
        return False
    with deterministic():
        trainer, plan = _planned(job, task)
        if isinstance(plan, str):
            if settings.vectorize is True:
                raise ValueError(f"vectorize is on, but {plan}. Use vectorize=auto or off.")
            rank_zero_print(f"{task.name}: {settings.runs} runs one by one, since {plan}")
            return False
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    devices = devices[: settings.runs]
    if task.has_many_graphs:
        rank_zero_print(
            f"{task.name}: {settings.runs} runs as one, on the same batches of graphs, in the order of seed "
            f"{settings.seed}"
        )
    places = [Place(rank, len(devices), device) for rank, device in enumerate(devices)]
    if len(places) == 1:
        one_share(places[0], job, task, plan)
    else:  # the shares exchange nothing, so each has a process of its own
        torch.cuda.empty_cache()  # the trial's memory: each process plans its passes by the free memory
        try:
            spawn(_share, (places, job, plan, os.getpid()), nprocs=len(places))
        except ProcessExitedException as error:
            raise ValueError(missing([error.error_index], len(places))) from error
    return True


def _planned(job: Job, task: Task) -> tuple[Trainer, StackPlan | str]:
    """Return a trainer and the plan for training the seeds as one, or the reason to train them one by one."""
    settings, seeds = job.settings, job.unfinished
    trainer = build_trainer(settings.trainer, settings.logger, job.folder)
    obstacle = _settings_obstacle(settings, task) or _devices_obstacle(trainer) or trainer_obstacle(trainer)
    if obstacle is not None:
        return trainer, obstacle
    models = [seeded(seed, lambda: build_model(settings.model, task)).model for seed in (*seeds, *seeds)[:2]]
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
    if settings.vectorize == settings.seeds_per_pass == "auto" and plan.memory.seeds(device, settings.runs) == 1:
        return trainer, f"a seed takes {plan.memory.bytes_per_seed >> 20} MiB, and only one fits in memory at a time"
    return trainer, plan


class Place(NamedTuple):
    """The process and device that train one share of the seeds; there are `world` shares."""

    rank: int
    world: int
    device: torch.device

    @property
    def checkpoint(self) -> str:
        """The file name of the share's checkpoint in the job's folder."""
        return CHECKPOINT if self.rank == 0 else f"{self.rank}.{CHECKPOINT}"


def _share(rank: int, places: list[Place], job: Job, plan: StackPlan, parent: int) -> None:
    """Train one share of the seeds in a process of its own; on a CPU, with a share of the cores."""
    place = places[rank]
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world))
    else:
        torch.cuda.set_device(place.device)
    keep_memory()
    with job.child(rank, parent), handled(exit_on_signal), quiet():
        one_share(place, job, build_task(job.settings), plan)


def one_share(place: Place, job: Job, task: Task, plan: StackPlan) -> None:
    """Train every `world`-th unfinished seed, as many at once as fit in memory."""
    settings = job.settings
    seeds = settings.seeds[place.rank :: place.world]
    path = job.folder / place.checkpoint
    trained: set[int] = set()  # diverged seeds included, which have no result

    def left() -> list[int]:
        return [seed for seed in job.unfinished if seed in seeds and seed not in trained]

    resumed = path if settings.ckpt_path == "last" and path.is_file() else None
    if resumed is not None:
        saved, limit = set(_seeds_of(resumed)), settings.seeds_per_pass
        too_many = limit != "auto" and len(saved) > limit
        if too_many or not saved <= set(seeds) or saved.isdisjoint(left()):  # divided differently, or a finished pass
            resumed = None

    size = settings.seeds_per_pass
    if size == "auto":
        free = free_memory(place.device)
        shared = free if free is None or place.device.type != "cpu" else free // place.world
        size = plan.memory.seeds(place.device, len(seeds), shared)
    again = _seeds_of(resumed) if resumed is not None else _interrupted_pass(seeds, size, left(), job)

    def some_or_resumed(some: list[int]) -> None:
        nonlocal again, resumed
        selected, checkpoint = again or some, resumed
        again, resumed = [], None
        one_pass(job, task, selected, plan, place, checkpoint)
        trained.update(selected)

    with deterministic():
        in_passes(left, size, some_or_resumed)
    path.unlink(missing_ok=True)


def _interrupted_pass(seeds: range, size: int, left: Sequence[int], job: Job) -> list[int]:
    """Return all seeds of the pass in which a process died: a smaller stack would round differently."""
    started = [seed for seed in seeds if (job.run_folder(seed) / CONFIG).is_file()]
    if not left or left[0] not in started:
        return []
    start = seeds.index(left[0]) // size * size
    return [seed for seed in seeds[start : start + size] if seed in started]


def one_pass(
    job: Job,
    task: Task,
    seeds: Sequence[int],
    plan: StackPlan,
    place: Place,
    checkpoint: Path | None = None,
) -> None:
    """Train these seeds as one, test the best weights of each, and write the outputs into their folders."""
    settings, folder = job
    built = {seed: seeded(seed, lambda: build_model(settings.model, task)) for seed in seeds}
    folders = {seed: job.run_folder(seed) for seed in seeds}
    for seed in seeds:
        save_run_settings(Job(settings, folders[seed]), seed)
    training, models = settings.training, [built[seed].model for seed in seeds]
    single = {"strategy": "auto", "devices": [place.device.index] if place.device.index else 1}
    changes = single if place.world > 1 else {}
    with suited_threads(elements(task, training.batch_size, models)):
        trainer, results = fit_stack(
            models,
            TaskData(task, training.batch_size, settings.seed, plan.sparse),
            lambda callbacks: build_trainer(settings.trainer, settings.logger, folder, callbacks, **changes),
            EachStopping(seeds, training.patience, training.criterion),
            Resumable(folder / place.checkpoint, seeds[0], settings.checkpoint_every),
            optimisation=training.optimisation,
            cuda_graphs=training.cuda_graphs,
            metrics={seed: folders[seed] / METRICS for seed in seeds},
            resume_from=checkpoint,
            progress=place.rank == 0,
        )
        device = device_name(trainer)
    for outcome, model in results:
        inner = folders[outcome.seed]
        if outcome.best_epoch and not (inner / RESULT).is_file():
            order = settings.seed if task.has_many_graphs and outcome.seed != settings.seed else None
            fitted = built[outcome.seed]._replace(model=model.cpu())
            write_outputs(settings, task, outcome, fitted, device, inner, order)


def _seeds_of(checkpoint: Path) -> list[int]:
    """Return the seeds of the pass that wrote a checkpoint."""
    state = SafeCheckpoints().load_checkpoint(checkpoint)
    rules = (state.get("callbacks") or {}).get("EachStopping", {}).get("rules")
    if rules is None:
        raise ValueError(f"{checkpoint} is a checkpoint of one run, expected one of many seeds.")
    return list(rules)


def _settings_obstacle(settings: Settings, task: Task) -> str | None:
    """Return the setting that prevents training seeds as one, or None."""
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
    """Return the reason that the trainer's devices cannot share the seeds, or None."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 or (cluster is not None and cluster.creates_processes_externally):
        return "its processes were started from outside, and seeds are divided among those of one machine"
    return None
