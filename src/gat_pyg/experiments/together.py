"""Several seeds trained as one model, one share per device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning import Trainer
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ..distributed.halo import HaloStrategy
from ..distributed.ranks import missing, rank_zero_print
from ..seeds.fitting import fit_stack, seeded
from ..seeds.memory import MemoryEstimate, free_memory, in_passes, trial, why_not_by
from ..tasks.task import Task
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData
from ..training.progress import quiet
from ..training.signals import handled
from .alone import save_run_settings, write_outputs
from .build import build_model, build_task, build_trainer, wants_sparse
from .folder import seed_folder
from .process import deterministic, device_name, elements, exit_on_signal, keep_memory, suited_threads
from .result import CHECKPOINT, CONFIG, METRICS, RESULT
from .settings import Settings


def all_at_once(settings: Settings, task: Task, folder: Path) -> bool:
    """Train the unfinished seeds as one, by `vectorize`, and return True; False if they are to be trained one by one.

    Each seed's folder gets the files that a run of its own writes.
    """
    unfinished = [seed for seed in settings.seeds if not (seed_folder(folder, settings, seed) / RESULT).is_file()]
    if settings.vectorize is False or settings.runs == 1 or not unfinished:
        return False
    with deterministic():
        trainer, plan = _planned(settings, task, folder, unfinished)
        if isinstance(plan, str):
            if settings.vectorize is True:
                raise ValueError(f"vectorize is on, but {plan}. Use vectorize=auto or off.")
            rank_zero_print(f"{task.name}: {settings.runs} runs one by one, since {plan}")
            return False
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    devices = devices[: settings.runs]
    places = [Place(rank, len(devices), device) for rank, device in enumerate(devices)]
    if len(places) == 1:
        one_share(places[0], settings, task, folder, plan)
    else:  # they exchange nothing, so each is a process of its own
        torch.cuda.empty_cache()  # free the trial's cached memory: each process plans its passes by the free memory
        try:
            spawn(_share, (places, settings, folder, plan), nprocs=len(places))
        except ProcessExitedException as error:
            raise ValueError(missing([error.error_index], len(places))) from error
    return True


class Plan(NamedTuple):
    """A plan for training seeds as one: sparse features or not, and the memory of each."""

    sparse: bool
    fit: MemoryEstimate


def _planned(settings: Settings, task: Task, folder: Path, seeds: Sequence[int]) -> tuple[Trainer, Plan | str]:
    """Try two of the seeds as a stack; in place of a plan, why they have to be trained one by one."""
    trainer = build_trainer(settings, folder, [])
    why_not = _why_one_by_one(settings, task) or _why_not_here(trainer) or why_not_by(trainer)
    if why_not is not None:
        return trainer, why_not
    models = [seeded(seed, lambda: build_model(settings.model, task)).model for seed in (*seeds, *seeds)[:2]]
    sparse = wants_sparse(settings, task, models[0], trainer, stacked=True)
    (graph,) = TaskData(task, sparse=sparse).train_dataloader()
    device = trainer.strategy.root_device
    fit = trial(models, task.objective, graph, device)
    if fit.why_not:
        return trainer, f"{type(models[0]).__name__} cannot be stacked: {fit.why_not}"
    if settings.vectorize == settings.seeds_per_pass == "auto" and fit.seeds(device, settings.runs) == 1:
        return trainer, f"a seed takes {fit.each >> 20} MiB, and there is room for one at a time"
    return trainer, Plan(sparse, fit)


class Place(NamedTuple):
    """The device of a share of the seeds, the n-th of several."""

    rank: int
    world: int
    device: torch.device

    @property
    def checkpoint(self) -> str:
        """The name of its checkpoint in the job's folder."""
        return CHECKPOINT if self.rank == 0 else f"{self.rank}.{CHECKPOINT}"


def _share(rank: int, places: list[Place], settings: Settings, folder: Path, plan: Plan) -> None:
    """Train one share of the seeds in a process of its own; on a CPU, with its share of the cores."""
    place = places[rank]
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world))
    else:
        torch.cuda.set_device(place.device)
    keep_memory()
    with handled(exit_on_signal), quiet():
        one_share(place, settings, build_task(settings), folder, plan)


def one_share(place: Place, settings: Settings, task: Task, folder: Path, plan: Plan) -> None:
    """Train every n-th unfinished seed, as many at once as fit in memory."""
    seeds = settings.seeds[place.rank :: place.world]
    path = folder / place.checkpoint
    trained: set[int] = set()  # those that diverged have no result

    def left() -> list[int]:
        unfinished = (seed for seed in seeds if not (seed_folder(folder, settings, seed) / RESULT).is_file())
        return [seed for seed in unfinished if seed not in trained]

    resumed = path if settings.ckpt_path == "last" and path.is_file() else None
    if resumed is not None:
        its, most = set(_seeds_of(resumed)), settings.seeds_per_pass
        too_many = most != "auto" and len(its) > most
        if too_many or not its <= set(seeds) or its.isdisjoint(left()):  # divided otherwise, or this pass is done
            resumed = None

    size = settings.seeds_per_pass
    if size == "auto":
        free = free_memory(place.device)
        shared = free if free is None or place.device.type != "cpu" else free // place.world
        size = plan.fit.seeds(place.device, len(seeds), shared)
    again = _seeds_of(resumed) if resumed is not None else _begun_pass(seeds, size, left(), settings, folder)

    def some_or_resumed(some: list[int]) -> None:
        nonlocal again, resumed
        its, checkpoint = again or some, resumed
        again, resumed = [], None
        one_pass(settings, task, its, folder, plan, place, checkpoint)
        trained.update(its)

    with deterministic():
        in_passes(left, size, some_or_resumed)
    path.unlink(missing_ok=True)


def _begun_pass(seeds: range, size: int, left: Sequence[int], settings: Settings, folder: Path) -> list[int]:
    """The seeds of the pass in which a process died, finished ones too: a smaller stack would round otherwise."""
    begun = [seed for seed in seeds if (seed_folder(folder, settings, seed) / CONFIG).is_file()]
    if not left or left[0] not in begun:
        return []
    start = seeds.index(left[0]) // size * size
    return [seed for seed in seeds[start : start + size] if seed in begun]


def one_pass(
    settings: Settings,
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    plan: Plan,
    place: Place,
    checkpoint: Path | None = None,
) -> None:
    """Train these seeds as one, test the best weights of each, and write the outputs into their folders."""
    built = {seed: seeded(seed, lambda: build_model(settings.model, task)) for seed in seeds}
    folders = {seed: seed_folder(folder, settings, seed) for seed in seeds}
    for seed in seeds:
        save_run_settings(settings, seed, folders[seed])
    training, models = settings.training, [built[seed].model for seed in seeds]
    single = {"strategy": "auto", "devices": [place.device.index] if place.device.index else 1}
    with suited_threads(elements(task, training.batch_size, models)):
        trainer, results = fit_stack(
            models,
            seeds,
            TaskData(task, sparse=plan.sparse),
            lambda callbacks: build_trainer(settings, folder, callbacks, **(single if place.world > 1 else {})),
            lr=training.lr,
            weight_decay=training.weight_decay,
            cuda_graphs=training.cuda_graphs,
            patience=training.patience,
            criterion=training.criterion,
            metrics={seed: folders[seed] / METRICS for seed in seeds},
            checkpoint=folder / place.checkpoint,
            checkpoint_every=settings.checkpoint_every,
            resume_from=checkpoint,
            progress=place.rank == 0,
        )
        device = device_name(trainer)
    for outcome, model in results:
        inner = folders[outcome.seed]
        if outcome.best_epoch and not (inner / RESULT).is_file():
            write_outputs(settings, task, outcome, built[outcome.seed]._replace(model=model.cpu()), device, inner)


def _seeds_of(checkpoint: Path) -> list[int]:
    """The seeds of the pass that a checkpoint is of."""
    state = SafeCheckpoints().load_checkpoint(checkpoint)
    rules = (state.get("callbacks") or {}).get("EachStopping", {}).get("rules")
    if rules is None:
        raise ValueError(f"{checkpoint} is a checkpoint of one run, expected one of many seeds.")
    return list(rules)


def _why_one_by_one(settings: Settings, task: Task) -> str | None:
    """The setting that prevents training seeds as one, or None."""
    if task.shared_graph is None:
        return f"{task.name} has many graphs"
    if settings.training.compile:
        return "training.compile is true"
    if settings.loader.in_batches:
        return "each draws its own batches"
    if settings.trainer.get("strategy") == HaloStrategy.strategy_name:
        return "the processes divide one graph"
    if settings.logger.target is not None:
        return f"{settings.logger.target} logs one run at a time"
    return None


def _why_not_here(trainer: Trainer) -> str | None:
    """The reason why the trainer's devices cannot share the seeds, or None."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 or (cluster is not None and cluster.creates_processes_externally):
        return "its processes were started from outside, and seeds are divided among those of one machine"
    return None
