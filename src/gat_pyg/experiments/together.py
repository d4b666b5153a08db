"""Several seeds trained as one model, one share per device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning import Trainer
from omegaconf import DictConfig
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ..distributed.halo import HaloStrategy
from ..distributed.ranks import missing, say
from ..seeds.callbacks import EachMetrics, EachProgress, EachStopping
from ..seeds.fitting import outcomes, seeded
from ..seeds.memory import Fit, free_memory, in_passes, trial, why_not_by
from ..seeds.module import Stacked
from ..tasks.task import Task
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData
from ..training.progress import quiet
from ..training.resume import Resumable
from ..training.signals import handled
from .alone import leave, save_config
from .build import build_model, build_task, build_trainer, in_batches, wants_sparse
from .folder import plain, seed_folder
from .process import _deterministic, _device, end, keep_memory
from .result import CHECKPOINT, CONFIG, METRICS, RESULT
from .settings import VECTORIZE, elements
from .threads import suited_threads

# All runs at once ---------------------------------------------------------------------------------------------------


def all_at_once(config: DictConfig, task: Task, folder: Path) -> bool:
    """Train the seeds that are not finished as one, as ``vectorize`` says; whether that is so.

    Each leaves in its folder what a run of its own does.
    """
    seeds = range(config.seed, config.seed + config.runs)
    todo = [seed for seed in seeds if not (seed_folder(folder, config, seed) / RESULT).is_file()]
    asked = VECTORIZE[config.vectorize]
    if asked is False or config.runs == 1 or not todo:
        return False
    with _deterministic():
        why_not, fit, sparse = _why_one_by_one(config, task), None, False
        if why_not is None:
            trainer = build_trainer(config, folder, [])
            why_not = _why_not_here(trainer) or why_not_by(trainer)
        if why_not is None:
            built = [seeded(seed, lambda: build_model(config.model, task)) for seed in (todo * 2)[:2]]
            sparse = wants_sparse(config, task, built[0][0], trainer, stacked=True)
            (graph,) = TaskData(task, sparse=sparse).train_dataloader()
            fit = trial([model for model, *_ in built], task.objective, graph, trainer.strategy.root_device)
            why_not = fit.why_not and f"{type(built[0][0]).__name__} cannot be stacked: {fit.why_not}"
            choice = why_not is None and asked == config.seeds_per_pass == "auto"
            if choice and fit.seeds(trainer.strategy.root_device, config.runs) == 1:
                why_not = f"a seed takes {fit.each >> 20} MiB, and there is room for one at a time"
        if why_not is not None and asked is True:
            raise ValueError(f"vectorize is on, but {why_not}. Use vectorize=auto or off.")
        if why_not is not None or fit is None:
            say(f"{task.name}: {config.runs} runs one by one, since {why_not}")
            return False
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    devices = devices[: len(seeds)]
    places = [Place(rank, len(devices), device) for rank, device in enumerate(devices)]
    if len(places) == 1:
        one_share(places[0], config, task, folder, sparse, fit)
    else:  # nothing is told between them, so each is a process of its own
        torch.cuda.empty_cache()  # free the trial's cached memory: each process plans its passes by the free memory
        try:
            spawn(_share, (places, plain(config), folder, sparse, fit), nprocs=len(places))
        except ProcessExitedException as error:
            raise ValueError(missing([error.error_index], len(places))) from error
    return True


class Place(NamedTuple):
    """Where a share of the seeds is trained: on the n-th of some devices."""

    rank: int
    world: int
    device: torch.device

    @property
    def checkpoint(self) -> str:
        """The name of its checkpoint in the job's folder."""
        return CHECKPOINT if self.rank == 0 else f"{self.rank}.{CHECKPOINT}"


def _share(rank: int, places: list[Place], config: DictConfig, folder: Path, sparse: bool, fit: Fit) -> None:
    """A process of its own with its share of the seeds; on a CPU, with its share of the cores."""
    place = places[rank]
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world))
    else:
        torch.cuda.set_device(place.device)
    keep_memory()
    with handled(end), quiet():
        one_share(place, config, build_task(config), folder, sparse, fit)


def one_share(place: Place, config: DictConfig, task: Task, folder: Path, sparse: bool, fit: Fit) -> None:
    """Train every n-th seed that is not finished, as many at once as fit the memory."""
    seeds = range(config.seed + place.rank, config.seed + config.runs, place.world)
    path = folder / place.checkpoint
    trained: set[int] = set()  # those that diverged have no result

    def left() -> list[int]:
        unfinished = (seed for seed in seeds if not (seed_folder(folder, config, seed) / RESULT).is_file())
        return [seed for seed in unfinished if seed not in trained]

    resumed = path if config.ckpt_path == "last" and path.is_file() else None
    if resumed is not None:
        its = set(_seeds_of(resumed))
        too_many = config.seeds_per_pass != "auto" and len(its) > config.seeds_per_pass
        if too_many or not its <= set(seeds) or its.isdisjoint(left()):  # divided otherwise, or this pass is done
            resumed = None

    size = config.seeds_per_pass
    if size == "auto":
        free = free_memory(place.device)
        shared = free if free is None or place.device.type != "cpu" else free // place.world
        size = fit.seeds(place.device, len(seeds), shared)
    again = _seeds_of(resumed) if resumed is not None else _begun_pass(seeds, int(size), left(), config, folder)

    def some_or_resumed(some: list[int]) -> None:
        nonlocal again, resumed
        its, checkpoint = again or some, resumed
        again, resumed = [], None
        one_pass(config, task, its, folder, sparse, place, checkpoint)
        trained.update(its)

    with _deterministic():
        in_passes(left, int(size), some_or_resumed)
    path.unlink(missing_ok=True)


def _begun_pass(seeds: range, size: int, left: Sequence[int], config: DictConfig, folder: Path) -> list[int]:
    """The seeds of the pass in which a process died, finished ones too: a smaller stack would round otherwise."""
    begun = [seed for seed in seeds if (seed_folder(folder, config, seed) / CONFIG).is_file()]
    if not left or left[0] not in begun:
        return []
    start = seeds.index(left[0]) // size * size
    return [seed for seed in seeds[start : start + size] if seed in begun]


def one_pass(
    config: DictConfig,
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    sparse: bool,
    place: Place,
    checkpoint: Path | None = None,
) -> None:
    """Train these seeds as one, test the weights kept last of each, and leave everything in their folders."""
    built = {seed: seeded(seed, lambda: build_model(config.model, task)) for seed in seeds}
    folders = {seed: seed_folder(folder, config, seed) for seed in seeds}
    for seed in seeds:
        save_config(config, seed, folders[seed])
    training = config.training
    models = [model for model, *_ in built.values()]
    module = Stacked(models, seeds, task.objective, training.lr, training.weight_decay, training.cuda_graphs)
    stopping = EachStopping(seeds, training.patience, training.criterion)
    title = f"{task.name}, seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{task.name}, seed {seeds[0]}"
    callbacks = [
        EachMetrics({seed: folders[seed] / METRICS for seed in seeds}, stopping),
        stopping,
        Resumable(folder / place.checkpoint, seeds[0], config.checkpoint_every),
        *([EachProgress(title, stopping)] if place.rank == 0 else []),
    ]
    alone = (
        {} if place.world == 1 else {"strategy": "auto", "devices": [place.device.index] if place.device.index else 1}
    )
    trainer, data = build_trainer(config, folder, callbacks, **alone), TaskData(task, sparse=sparse)
    with suited_threads(elements(config, task, models)):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        trainer.test(module, datamodule=data, verbose=False)
        device = _device(trainer)
    for row, outcome in enumerate(outcomes(module, stopping)):
        if outcome.best_epoch and not (folders[outcome.seed] / RESULT).is_file():
            model = module.model[row].cpu()
            leave(config, task, outcome, (model, *built[outcome.seed][1:]), device, folders[outcome.seed])


def _seeds_of(checkpoint: Path) -> list[int]:
    """The seeds of the pass that a checkpoint is of."""
    found = SafeCheckpoints().load_checkpoint(checkpoint)
    rules = (found.get("callbacks") or {}).get("EachStopping", {}).get("rules")
    if rules is None:
        raise ValueError(f"{checkpoint} is a checkpoint of one run, expected one of many seeds.")
    return list(rules)


def _why_one_by_one(config: DictConfig, task: Task) -> str | None:
    """Why the settings do not let seeds be trained as one, or None."""
    if task.shared_graph is None:
        return f"{task.name} has many graphs"
    if config.training.compile:
        return "training.compile is true"
    if in_batches(config):
        return "each draws its own batches"
    if config.trainer.get("strategy") == HaloStrategy.strategy_name:
        return "the processes divide one graph"
    if config.logger.get("_target_") is not None:
        return f"{config.logger._target_} is told of one run at a time"
    return None


def _why_not_here(trainer: Trainer) -> str | None:
    """Why the trainer's devices cannot share out seeds, or None."""
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 or (cluster is not None and cluster.creates_processes_externally):
        return "its processes were started from outside, and seeds are divided among those of one machine"
    return None
