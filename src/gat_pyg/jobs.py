"""A job: one method on one data set, trained and tested with each of its seeds, one by one or all at once."""

from __future__ import annotations

import ctypes
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from multiprocessing import active_children
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from lightning import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from torch_geometric.data import Data

from .batches import TaskData, is_divided
from .build import Built, build_data, build_model, build_module, build_task, build_trainer, in_batches, wants_sparse
from .data import SPLITS, Task
from .folders import begun, checkpoint_of, finished, from_here, plain, remove_checkpoints, seed_folder, started_from
from .halo import HaloStrategy
from .ranks import is_first, missing, say
from .results import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    RESULT,
    Result,
    config_hash,
    load,
    save_model,
    versions,
    write_whole,
)
from .seeds import (
    EachMetrics,
    EachProgress,
    EachStopping,
    Fit,
    Outcome,
    Stacked,
    free_memory,
    in_passes,
    outcomes,
    quiet,
    seeded,
    trial,
    why_not_by,
)
from .threads import suited_threads
from .training import (
    Inductive,
    MetricsFile,
    PaperStopping,
    Progress,
    Resumable,
    SafeCheckpoints,
    Transductive,
    Watch,
    handled,
    majority_score,
    node_sums,
    score_of,
    told,
)

NUMBERS = ("dataset", "model", "training", "split")  # the groups of settings that decide what is learnt
HOW = {  # the settings of ``training`` that decide how fast it is learnt, and their values
    "sparse": ("auto", True, False),
    "compile": (True, False),
    "cuda_graphs": ("auto", True, False),
}
SAME = ("_target_", "accelerator", "strategy", "deterministic")  # of ``trainer``: what is learnt is the same
VECTORIZE = {"auto": "auto", "on": True, True: True, "off": False, False: False}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def all_runs(config: DictConfig, folder: Path) -> float:
    """Train and test with each seed, and tell what came out; the mean validation score.

    Raises ValueError if seeds diverged before any epoch could be kept, after the other seeds are done.
    """
    with _resumable(folder), quiet(), _compiling_told():
        task = build_task(config)
        together = all_at_once(config, task, folder)
        results, diverged = [], []
        for seed in range(config.seed, config.seed + config.runs):
            inner = seed_folder(folder, config, seed)
            result = finished(inner, config.results) or (None if together else one_run(config, task, seed, inner))
            if result is None:
                diverged.append(seed)
                continue
            results.append(result)
            if is_first():
                print(line(result) if together else summary(result, config, task), flush=True)
        if is_first() and len(results) > 1:
            mean = averaged(config, task, folder, [result.seed for result in results])
            print(summary_of_all(results, folder, mean), flush=True)
        if diverged:
            others = f" The results of the others are in {from_here(Path(config.results))}." if results else ""
            seeds = ", ".join(map(str, diverged))
            raise ValueError(
                f"{len(diverged)} of {config.runs} runs diverged (seed {seeds}): no epoch ended with a finite "
                f"validation loss and score. A smaller training.lr may help.{others}"
            )
        if is_first():
            remove_checkpoints(folder)
        return statistics.fmean(result.val for result in results)


def one_run(config: DictConfig, task: Task, seed: int, folder: Path) -> Result | None:
    """Train with one seed, test the weights kept last, and leave all in ``folder``; None if no epoch was kept."""
    built = seeded(seed, lambda: build_model(config.model, task))
    model = built[0]
    stopping = PaperStopping(config.training.patience, config.training.criterion)
    resumable = Resumable(folder / CHECKPOINT, seed, config.checkpoint_every)
    watch = Watch()
    callbacks = [stopping, MetricsFile(folder / METRICS), resumable, Progress(f"{task.name}, seed {seed}"), watch]
    module = build_module(config, task, model)
    with _deterministic(), suited_threads(elements(config, task, [model])):
        trainer = build_trainer(config, folder, callbacks)
        data = build_data(config, task, model, trainer, seed)
        if task.transductive and trainer.world_size > 1 and not in_batches(config) and not is_divided(trainer):
            raise ValueError(
                f"{task.name} is one graph, which {trainer.world_size} processes do not share out among them by "
                "themselves. Use trainer.strategy=halo for a part each, or loader=neighbor or loader=cluster."
            )
        name = "micro_f1" if task.multilabel else "accuracy"
        fit: Callable[[Data], None] | None = getattr(model, "fit", None)
        if is_first():
            save_config(config, seed, folder)
        try:
            if fit is not None:  # a method of its own, without epochs
                if not task.transductive:
                    raise ValueError(f"{type(model).__name__} fits itself on one graph, and {task.name} has many.")
                root = trainer.strategy.root_device
                model.to(root)
                start = time.perf_counter()
                fit(task.train[0].clone().to(root))
                seconds = time.perf_counter() - start
                val = trainer.validate(module, datamodule=data, verbose=False)[0][f"val_{name}"]
            else:
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint_of(config, folder))
                seconds, val = resumable.seconds, stopping.kept_score
                if not stopping.best_epoch:
                    return None
            score = trainer.test(module, datamodule=data, verbose=False)[0][f"test_{name}"]
        except RuntimeError as error:
            if watch.lost:
                raise ValueError(missing(watch.lost, trainer.world_size)) from error
            if str(error).startswith("DataLoader worker"):
                raise ValueError(
                    "A process of loader.num_workers ended or was killed, perhaps for lack of memory. The same command "
                    "with ckpt_path=last goes on from the last checkpoint; loader.num_workers may differ."
                ) from error
            raise
        device = _device(trainer)
    outcome = Outcome(seed, name, score, val, stopping.epoch, stopping.best_epoch, seconds)
    return leave(config, task, outcome, built, device, folder)


def save_config(config: DictConfig, seed: int, folder: Path) -> None:
    """Write the settings of one seed's run."""
    own = OmegaConf.merge(config, {"seed": seed, "runs": 1, "ckpt_path": started_from(config, folder)})
    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(own, beside, resolve=True))


def leave(config: DictConfig, task: Task, outcome: Outcome, built: Built, device: str, folder: Path) -> Result:
    """Leave the trained model and the Result of one seed's run."""
    model, target, arguments, method = built
    labels = [data.y[data.test_mask] if task.transductive else data.y for data in task.test]
    result = Result(
        method=method,
        dataset=task.name,
        metric=outcome.metric,
        value=round(outcome.value, 5),  # Lightning logs float32
        seed=outcome.seed,
        epochs=outcome.epochs,
        best_epoch=outcome.best_epoch,
        val=round(outcome.val, 5),
        seconds=round(outcome.seconds, 3),
        seconds_per_epoch=round(outcome.seconds / max(outcome.epochs, 1), 6),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        versions=versions(),
        device=device,
        config_hash=config_hash(numbers_of(config)),
        run_dir=str(folder),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        majority=round(majority_score(torch.cat(labels)), 5),
    )
    if is_first():
        facts = {"method": method, "dataset": task.name, "metric": outcome.metric, "multilabel": task.multilabel}
        save_model(folder / MODEL, model, target, arguments, **facts, preparation=task.preparation.to_dict())
        write_whole(folder / RESULT, lambda beside: beside.write_text(result.to_json() + "\n", encoding="utf-8"))
        finished(folder, config.results)
    return result


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say how to go on where a run is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the one into the other
        others = active_children()  # of other devices, whose checkpoints are to be written too
        for process in others:
            process.terminate()
        for process in others:
            process.join()
        how = "finishes it" if begun(folder) else "begins it anew, since no epoch was done"
        say(f"\nStopped in {from_here(folder)}. The same command with ckpt_path=last {how}.")
        raise


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
            fit = trial([model for model, *_ in built], graph, trainer.strategy.root_device)
            why_not = fit.why_not and f"{type(built[0][0]).__name__} cannot be stacked: {fit.why_not}"
            choice = why_not is None and asked == config.seeds_per_pass == "auto"
            if choice and fit.seeds(trainer.strategy.root_device, config.runs) == 1:
                why_not = f"a seed takes {fit.each >> 20} MiB, and there is room for one at a time"
        if why_not is not None and asked is True:
            raise ValueError(f"vectorize is on, but {why_not}. Use vectorize=auto or off.")
        if why_not is not None or fit is None:
            if task.transductive:
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
    module = Stacked(models, seeds, training.lr, training.weight_decay, training.cuda_graphs)
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
    if not task.transductive:
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


@torch.no_grad()
def averaged(config: DictConfig, task: Task, folder: Path, seeds: Sequence[int]) -> float:
    """The test score of the averaged prediction: the mean of the probabilities that the models of ``seeds`` give."""
    sums: Any = 0
    means: list[Any] = [0.0 for _ in task.test]
    setup = Transductive if task.transductive else Inductive
    module = setup(build_model(config.model, task)[0]).eval()
    for seed in seeds:
        load(seed_folder(folder, config, seed), module.model)
        for at, data in enumerate(task.test):
            out = module(data).double()
            means[at] = means[at] + (out.sigmoid() if task.multilabel else out.softmax(-1)) / len(seeds)
    for mean, data in zip(means, task.test, strict=True):
        sums = sums + node_sums(*module.labelled(mean.logit() if task.multilabel else mean.log(), data, "test"))
    return score_of(sums.tolist())[1]


# What is told -------------------------------------------------------------------------------------------------------


def summary(result: Result, config: DictConfig, task: Task) -> str:
    """A few lines that say what came out and where it is."""
    lines = {
        "data set": f"{result.dataset}: {sizes(task)}",
        "model": f"{result.method}, {result.parameters:,} parameters, seed {result.seed}",
        "epochs": f"{result.epochs}, best {result.best_epoch}",
        "validation": told(result.metric, result.val),
        "test": told(result.metric, result.value),
        "warning": result.warning,
        "seconds": f"{result.seconds:.1f} ({_per_epoch(result)} per epoch, {result.device})",
        "files": from_here(Path(result.run_dir)),
        "results": from_here(Path(config.results)),
    }
    return "\n".join(f"{key:<12}{value}" for key, value in lines.items() if value) + "\n"


def sizes(task: Task) -> str:
    """Return the numbers of nodes, edges and classes, and of what is for training, validation and test."""
    splits = [task.graphs(split) for split in SPLITS]
    graphs = task.train if task.transductive else [data for split in splits for data in split]
    parts = [int(task.train[0][f"{split}_mask"].sum()) for split in SPLITS] if task.transductive else map(len, splits)
    nodes, edges = sum(len(data.y) for data in graphs), sum(data.edge_index.size(1) for data in graphs)
    kinds = "labels" if task.multilabel else "classes"
    split = " / ".join(f"{part:,}" for part in parts) + (" nodes" if task.transductive else " graphs")
    return f"{nodes:,} nodes, {edges:,} edges, {task.num_classes} {kinds}; {split}"


def line(result: Result) -> str:
    """What came out of one seed of many, in one line."""
    val, test = told(result.metric, result.val), told(result.metric, result.value)
    warning = f"; {result.warning}" if result.warning else ""
    return (
        f"seed {result.seed}: {result.epochs} epochs, best {result.best_epoch}, validation {val}, test {test}{warning}"
    )


def summary_of_all(results: Sequence[Result], folder: Path, together: float) -> str:
    """Mean ± std over the seeds, and the score of their averaged prediction."""
    name, n = results[0].metric, len(results)
    scores = [result.value for result in results]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    spread = f"accuracy {mean:.1f} ± {std:.1f} %" if name == "accuracy" else f"micro-F1 {mean:.3f} ± {std:.3f}"
    seconds = statistics.fmean(result.seconds for result in results)
    spread += f" (averaged prediction {told(name, together).split(' ', 1)[1]})"
    warnings = [result.warning for result in results if result.warning]
    warning = f"\nwarning: {len(warnings)} of {n} runs are {warnings[0]}" if warnings else ""
    return (
        f"{results[0].dataset}, {n} runs: test {spread}, {seconds:.1f} seconds a run, in {from_here(folder)}{warning}"
    )


def _per_epoch(result: Result) -> str:
    seconds = result.seconds_per_epoch
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _device(trainer: Trainer) -> str:
    device, precision = trainer.strategy.root_device, "" if trainer.precision == "32-true" else f", {trainer.precision}"
    processes = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        return f"{processes}{torch.cuda.get_device_name(device)}{precision}"
    threads = torch.get_num_threads()
    return f"{processes}{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}{precision}"


# How it runs --------------------------------------------------------------------------------------------------------


def numbers_of(config: DictConfig) -> dict[str, Any]:
    """What decides what is learnt, which makes the hash; of ``trainer`` also what is only given by hand."""
    given = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    given["dataset"].pop("root", None)  # where the files lie changes nothing
    given["training"] = {key: value for key, value in given["training"].items() if key not in HOW}
    shared = {key: value for key, value in given["trainer"].items() if key not in SAME}  # gradient_clip_val, max_time
    shared |= {key: shared.get(key) for key in ("devices", "num_nodes", "precision")}  # the batch, the bits
    given["training"]["max_epochs"] = shared.pop("max_epochs", None)  # which the trainer obeys
    loader = {key: value for key, value in given["loader"].items() if key != "num_workers"}
    drawn = {"loader": loader} if in_batches(config) else {}
    return {**{key: given[key] for key in NUMBERS}, "trainer": shared, **drawn}


def elements(config: DictConfig, task: Task, models: Sequence[nn.Module]) -> int:
    """Estimate how many numbers a step computes: for each node and edge, the parameters per input feature."""
    graphs = 1 if task.transductive else config.training.batch_size
    size = sum(sorted((graph.num_nodes + graph.num_edges for graph in task.train), reverse=True)[:graphs])
    parameters = sum(parameter.numel() for model in models for parameter in model.parameters())
    return int(size * parameters // max(task.num_features, 1))


def keep_memory() -> None:
    """Let glibc keep memory that is freed for what is asked next.

    It gives large pieces back, and the pages of the next one are made anew.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def end(number: int, frame: FrameType | None) -> None:
    """End the process by a signal, with the status that shells give it."""
    raise SystemExit(128 + number)


@contextmanager
def _compiling_told() -> Iterator[None]:
    """Say once that kernels are compiled, since that takes seconds."""
    log = logging.getLogger("gat_pyg.attention.compiling")
    level = log.level

    def first(record: logging.LogRecord) -> bool:
        log.removeFilter(first)
        say("Compiling the kernels for their first use")
        return True

    log.addFilter(first)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables all that there are
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(first)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Undo what ``trainer.deterministic`` sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
