"""The command: compose the settings, train, test, leave a run folder and append one Result."""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from multiprocessing import active_children
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, cast

import hydra
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn
from torch_geometric.data import Data

from . import models, on_ray
from .batches import TaskData, is_divided, sparse_pays, takes_sparse
from .data import Task, data_root, from_dataset
from .halo import HaloStrategy, layers_of
from .partition import WITH_METIS, edge_cut
from .ranks import missing
from .results import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    RESULT,
    Result,
    append,
    config_hash,
    is_full,
    load,
    save_model,
    try_lock,
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
    say,
    seeded,
    trial,
    why_not_by,
)
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
    node_sums,
    score_of,
    told,
)

RUN_DIR = "GAT_PYG_RUN_DIR"  # tells the processes that Lightning starts which folder the first one took
FULL_ERROR = "GAT_PYG_FULL_ERROR"  # and what HYDRA_FULL_ERROR was before it was set here
LOCK = ".lock"
NUMBERS = ("dataset", "model", "training", "split")  # the settings that decide what is learnt: they make the hash
FREE = ("ckpt_path", "checkpoint_every", "vectorize", "seeds_per_pass")  # what a resumed run may have otherwise
WHERE = ("accelerator", "devices", "num_nodes", "strategy", "deterministic")  # and those of ``trainer``
HOW = {  # the settings of ``training`` that decide how fast it is learnt, and their values
    "sparse": ("auto", True, False),
    "compile": (True, False),
    "cuda_graphs": ("auto", True, False),
}
LEAST = {  # the least value of each number among the settings, which is whole where this one is
    "runs": 1,
    "seed": 0,
    "checkpoint_every": 0.0,
    "training.lr": 0.0,
    "training.weight_decay": 0.0,
    "training.batch_size": 1,
    "training.patience": 1,
    "training.max_epochs": 1,
    "trainer.max_epochs": 1,
    "loader.num_parts": 1,
    "loader.batch_size": 1,
    "loader.num_workers": 0,
    "split.per_class": 0,
    "split.val": 0,
    "split.test": 0,
    "split.seed": 0,
    "split.split": 0,
}
VECTORIZE = {"auto": "auto", "on": True, True: True, "off": False, False: False}
Built: TypeAlias = tuple[nn.Module, str, dict[str, Any], str]  # a model, its class's name, its arguments, the method


def main() -> None:
    """The console script ``gat-pyg``: what can go wrong is told in a message, and the exit status is 1.

    SIGINT (Ctrl-C) and SIGTERM end it with 128 + their number, in a training after the epoch and its checkpoint.
    """
    given = os.environ.get("HYDRA_FULL_ERROR")
    asked = os.environ.setdefault(FULL_ERROR, given or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on; here they are told in our own way
    keep_memory()
    try:
        with handled(_end):
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()
    except Exception as error:
        message = None if asked == "1" else _message(error)
        if message is None:
            traceback.print_exc()
        else:
            print(f"gat-pyg: {message}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
        sys.exit(1)
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.pop("HYDRA_FULL_ERROR")
        if given is not None:
            os.environ["HYDRA_FULL_ERROR"] = given


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def keep_memory() -> None:
    """Let glibc keep memory that is freed for what is asked next.

    It gives large pieces back, and the pages of the next one are made anew.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def config_folder() -> Path:
    """The folder of the settings: inside the installed package, else the repository's own."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "conf", here.parents[2] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml beside {here} or in its repository. Install gat_pyg anew.")


def job(config: DictConfig) -> float:
    """All methods of a table, or one with the seeds ``seed``, ``seed + 1``, ...; its mean validation score."""
    if config.methods is not None or config.datasets is not None:
        return table(config)
    with run_folder(config) as folder:
        _check(config)
        return by_ray(config, folder) if config.trainer.get("strategy") == RAY else all_runs(config, folder)


def all_runs(config: DictConfig, folder: Path) -> float:
    """Train and test with each seed, and tell what came out; the mean validation score."""
    with _resumable(folder), quiet(), _compiling_told():
        task = build_task(config)
        together = all_at_once(config, task, folder)
        results = []
        for seed in range(config.seed, config.seed + config.runs):
            inner = seed_folder(folder, config, seed)
            result = finished(inner, config.results) or one_run(config, task, seed, inner)
            results.append(result)
            if _rank() == 0:
                print(line(result) if together else summary(result, config), flush=True)
        if _rank() == 0 and len(results) > 1:
            print(summary_of_all(results, folder, averaged(config, task, folder)))
        return statistics.fmean(result.val for result in results)


def by_ray(config: DictConfig, folder: Path) -> float:
    """The same in processes that Ray starts."""
    devices = config.trainer.devices
    if type(devices) is not int or devices < 1:
        raise ValueError(f"trainer.devices is {devices}, expected how many processes Ray is to start, at least 1.")
    given = {"config": OmegaConf.to_container(config, resolve=True), "folder": str(folder), "place": os.getcwd()}
    work = get_object("gat_pyg.run.ray_process")  # by a name that they can import, whatever this file is called here
    return float(on_ray.train(work, given, devices, config.trainer.accelerator == "gpu", folder))


def ray_process(given: Mapping[str, Any]) -> float:
    """One of the processes that Ray starts; an error that is told in words is a ValueError of these."""
    os.chdir(given["place"])
    keep_memory()
    cast(Any, rank_zero_only).rank = int(os.environ["RANK"])
    try:
        return all_runs(cast(DictConfig, OmegaConf.create(given["config"])), Path(given["folder"]))
    except Exception as error:
        if message := _message(error):
            raise ValueError(message) from None
        raise


RAY = "ray"  # the strategy's name


# A table ------------------------------------------------------------------------------------------------------------


def table(config: DictConfig) -> float:
    """Every method on every data set, each with its seeds; nan, since scores of several data sets have no mean.

    A cell of the table is a folder of its own, which one process at a time works on: several may fill one table. What
    is finished is not done again, what was interrupted goes on, and a cell that fails leaves the others alone.
    """
    cells = _cells(config)
    runtime = HydraConfig.get().runtime
    folder = Path(config.outputs).absolute() / (runtime.choices.get("experiment") or "table")  # the same each time
    _drop(Path(runtime.output_dir))
    for name, own in cells.items():
        _check_begun(own, folder / name)
    failed: dict[str, Exception] = {}
    start, done_before = time.perf_counter(), _runs_done(cells, folder)
    while todo := [name for name in cells if name not in failed and not _complete(folder / name, cells[name])]:
        mine = False
        for name in todo:
            (folder / name).mkdir(parents=True, exist_ok=True)
            lock = try_lock(folder / name / LOCK)
            if lock is None:
                continue
            mine = True
            try:
                if not _complete(folder / name, cells[name]):  # by another process meanwhile
                    _begin(cells[name], folder / name)
                    all_runs(cells[name], folder / name)
            except Exception as error:
                failed[name] = error
                say(f"{name} failed: {_message(error) or traceback.format_exc()}")
            finally:
                os.close(lock)
            say(_so_far(cells, folder, done_before, time.perf_counter() - start))
        if not mine:  # other processes have all that is left
            time.sleep(PAUSE)
    for name, own in cells.items():  # a process that was killed between its file and the shared one
        if name not in failed:
            for seed in range(own.seed, own.seed + own.runs):
                finished(seed_folder(folder / name, own, seed), own.results)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. The same command tries again."
        )
    print(f"All {len(cells)} cells are done, in {_told(folder)}; their lines are in {_told(Path(config.results))}")
    return float("nan")


def _cells(config: DictConfig) -> dict[str, DictConfig]:
    """The settings of each cell, by its name: those of the model on the data set, then the table's own, then yours."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith(TABLE)]
    if clash := [override for override in given if override.startswith(("model=", "dataset="))]:
        raise ValueError(f"{clash[0]} is for a single run. In a table, use methods=[...] and datasets=[...].")
    file = config_folder() / "experiment" / f"{HydraConfig.get().runtime.choices.get('experiment')}.yaml"
    if file.is_file() and (more := {*OmegaConf.load(file)} - {"methods", "datasets", "runs"}):
        raise ValueError(
            f"{file} has {', '.join(sorted(map(str, more)))}, which no cell would get. Name such settings with each "
            "method, or on the command line."
        )
    lists = {}
    for name in ("methods", "datasets"):
        lists[name] = [config[name]] if isinstance(config[name], str) else list(config[name] or ())
        if not lists[name]:
            raise ValueError(f"{name} is {config[name]}, expected a list such as {name}=[{TABLES[name]}].")
    cells = {}
    for dataset in lists["datasets"]:
        for method in lists["methods"]:
            model, *own = method.split() if isinstance(method, str) else method
            settings = [f"dataset={dataset}", f"model={model}", f"runs={config.runs}", *own, *given, "ckpt_path=last"]
            made = compose("config", overrides=settings)
            if made.trainer.get("strategy") is not None:
                raise ValueError("A table is of runs in one process each. Leave out trainer=ddp or ddp_cpu.")
            made.methods = model  # it is a cell
            said = [part.rpartition("=")[2] for part in own if not part.startswith("runs=")]
            name = "_".join([dataset, model, *(re.sub(r"[^\w.]+", "-", word).strip("-") for word in said)])
            if name in cells:
                raise ValueError(f"Two methods make the cell {name}. Tell them apart by +model.method=...")
            cells[name] = made
            _check(made)
    return cells


def _check_begun(config: DictConfig, folder: Path) -> None:
    """Raise ValueError where a cell was begun with other settings than these."""
    if (folder / CONFIG).is_file():
        old, new = (_settings(each) for each in (OmegaConf.load(folder / CONFIG), _plain(config)))
        if changed := _changes({**old, "runs": 0}, {**new, "runs": 0}):
            raise ValueError(
                f"{folder} was begun with other settings: {changed}. Choose other outputs=..., or remove the folder."
            )


def _begin(config: DictConfig, folder: Path) -> None:
    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(_plain(config), beside))


def _runs_done(cells: Mapping[str, DictConfig], folder: Path) -> int:
    def seeds(name: str, own: DictConfig) -> Iterator[Path]:
        return (seed_folder(folder / name, own, seed) for seed in range(own.seed, own.seed + own.runs))

    return sum((inner / RESULT).is_file() for name, own in cells.items() for inner in seeds(name, own))


def _so_far(cells: Mapping[str, DictConfig], folder: Path, before: int, seconds: float) -> str:
    """How far the table is, in runs, and when it will be done if the rest takes as long as what was done."""
    done, runs = _runs_done(cells, folder), sum(own.runs for own in cells.values())
    whole = sum(_complete(folder / name, own) for name, own in cells.items())
    left = f", about {_minutes(seconds * (runs - done) / (done - before))} left" if done > before else ""
    return f"[{whole} of {len(cells)} cells, {done} of {runs} runs, {_minutes(seconds)}{left}]"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


PAUSE = 5.0  # seconds between looks at what others work on
TABLE = ("experiment=", "+experiment=", "methods=", "datasets=", "ckpt_path=")  # what is asked of a table, not a cell
TABLES = {"methods": "gat,gcn", "datasets": "cora,citeseer"}


# One run ------------------------------------------------------------------------------------------------------------


def one_run(config: DictConfig, task: Task, seed: int, folder: Path) -> Result:
    """Train with one seed, test the weights kept last, and leave everything in ``folder``."""
    if _rank() == 0:
        save_config(config, seed, folder)
    built = seeded(seed, lambda: build_model(config.model, task))
    model = built[0]
    stopping = PaperStopping(config.training.patience, config.training.criterion)
    resumable = Resumable(folder / CHECKPOINT, seed, config.checkpoint_every)
    watch = Watch()
    callbacks = [stopping, MetricsFile(folder / METRICS), resumable, Progress(f"{task.name}, seed {seed}"), watch]
    module = build_module(config, task, model)
    with _deterministic():
        trainer = build_trainer(config, folder, callbacks)
        data = _data(config, task, model, trainer, seed)
        if task.transductive and trainer.world_size > 1 and not _in_batches(config) and not is_divided(trainer):
            raise ValueError(
                f"{task.name} is one graph, which {trainer.world_size} processes do not share out among them by "
                "themselves. Use trainer.strategy=halo for a part each, or loader=neighbor or loader=cluster."
            )
        name = "micro_f1" if task.multilabel else "accuracy"
        fit: Callable[[Data], None] | None = getattr(model, "fit", None)
        try:
            if fit is not None:  # a method of its own, without epochs
                if not task.transductive:
                    raise ValueError(f"{type(model).__name__} fits itself on one graph, and {task.name} has many.")
                device = trainer.strategy.root_device
                model.to(device)
                start = time.perf_counter()
                fit(task.train[0].clone().to(device))
                seconds = time.perf_counter() - start
                val = trainer.validate(module, datamodule=data, verbose=False)[0][f"val_{name}"]
            else:
                trainer.fit(module, datamodule=data, ckpt_path=_checkpoint(config, folder))
                seconds, val = resumable.seconds, stopping.kept_score
            score = trainer.test(module, datamodule=data, verbose=False)[0][f"test_{name}"]
        except RuntimeError as error:
            if watch.lost:
                raise ValueError(missing(watch.lost, trainer.world_size)) from error
            raise
    outcome = Outcome(seed, name, score, val, stopping.epoch, stopping.best_epoch, seconds)
    return leave(config, task, outcome, built, _device(trainer), folder)


def save_config(config: DictConfig, seed: int, folder: Path) -> None:
    """Write the settings of one seed's run."""
    own = OmegaConf.merge(config, {"seed": seed, "runs": 1, "ckpt_path": None})
    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(own, beside, resolve=True))


def leave(config: DictConfig, task: Task, outcome: Outcome, built: Built, device: str, folder: Path) -> Result:
    """Leave the trained model and the Result of one seed's run."""
    model, target, arguments, method = built
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
        config_hash=config_hash(_numbers(config)),
        run_dir=str(folder),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if _rank() == 0:
        facts = {"method": method, "dataset": task.name, "metric": outcome.metric, "multilabel": task.multilabel}
        save_model(folder / MODEL, model, target, arguments, **facts)
        write_whole(folder / RESULT, lambda beside: beside.write_text(result.to_json() + "\n", encoding="utf-8"))
        try:
            append(result, config.results)
        except OSError:
            (folder / RESULT).unlink()  # its line is a part of a run, which is to be finished
            raise
        (folder / CHECKPOINT).unlink(missing_ok=True)
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
        if _rank() == 0:
            how = "finishes it" if _begun(folder) else "begins it anew, since no epoch was done"
            say(f"\nStopped in {_told(folder)}. The same command with ckpt_path=last {how}.")
        raise


def _begun(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a seed that is finished."""
    return any(True for name in (f"*{CHECKPOINT}", RESULT) for _ in folder.rglob(name))


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
            sparse = _sparse(config, task, built[0][0], trainer)
            (graph,) = TaskData(task, sparse=sparse).train_dataloader()
            fit = trial([model for model, *_ in built], graph, trainer.strategy.root_device)
            why_not = fit.why_not and f"{type(built[0][0]).__name__} cannot be stacked: {fit.why_not}"
            choice = why_not is None and asked == config.seeds_per_pass == "auto"
            if choice and fit.seeds(trainer.strategy.root_device, config.runs) == 1:
                why_not = f"a seed takes {fit.each >> 20} MiB, and there is room for one at a time"
        if why_not is not None and asked is True:
            raise ValueError(f"vectorize is on, but {why_not}. Use vectorize=auto or off.")
        if why_not is not None or fit is None:
            if task.transductive and _rank() == 0:
                say(f"{task.name}: {config.runs} runs one by one, since {why_not}")
            return False
        devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    devices = devices[: len(seeds)]
    places = [Place(rank, len(devices), device) for rank, device in enumerate(devices)]
    if len(places) == 1:
        one_share(places[0], config, task, folder, sparse, fit)
    else:  # nothing is told between them, so each is a process of its own
        spawn(_share, (places, _plain(config), folder, sparse, fit), nprocs=len(places))
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
    with handled(_end), quiet():
        one_share(place, config, build_task(config), folder, sparse, fit)


def one_share(place: Place, config: DictConfig, task: Task, folder: Path, sparse: bool, fit: Fit) -> None:
    """Train every n-th seed that is not finished, as many at once as fit the memory."""
    seeds = range(config.seed + place.rank, config.seed + config.runs, place.world)
    path = folder / place.checkpoint

    def left() -> list[int]:
        return [seed for seed in seeds if not (seed_folder(folder, config, seed) / RESULT).is_file()]

    resumed = path if config.ckpt_path == "last" and path.is_file() else None
    if resumed is not None:
        its = set(_seeds_of(resumed))
        too_many = config.seeds_per_pass != "auto" and len(its) > config.seeds_per_pass
        if too_many or not its <= set(seeds) or its.isdisjoint(left()):  # divided otherwise, or this pass is done
            resumed = None

    def some_or_resumed(some: list[int]) -> None:
        nonlocal resumed
        checkpoint, resumed = resumed, None
        one_pass(config, task, some if checkpoint is None else _seeds_of(checkpoint), folder, sparse, place, checkpoint)

    size = config.seeds_per_pass
    if size == "auto":
        free = free_memory(place.device)
        shared = free if free is None or place.device.type != "cpu" else free // place.world
        size = fit.seeds(place.device, max(len(left()), 1), shared)
    with _deterministic():
        in_passes(left, int(size), some_or_resumed)
    path.unlink(missing_ok=True)


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
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    trainer.test(module, datamodule=data, verbose=False)
    for row, outcome in enumerate(outcomes(module, stopping)):
        if not (folders[outcome.seed] / RESULT).is_file():
            model = module.model[row].cpu()
            leave(config, task, outcome, (model, *built[outcome.seed][1:]), _device(trainer), folders[outcome.seed])


def _seeds_of(checkpoint: Path) -> list[int]:
    """The seeds of the pass that a checkpoint is of."""
    found = SafeCheckpoints().load_checkpoint(checkpoint)
    rules = found["callbacks"].get("EachStopping", {}).get("rules")
    if rules is None:
        raise ValueError(f"{checkpoint} is a checkpoint of one run, expected one of many seeds.")
    return list(rules)


def _why_one_by_one(config: DictConfig, task: Task) -> str | None:
    """Why the settings do not let seeds be trained as one, or None."""
    if not task.transductive:
        return f"{task.name} has many graphs"
    if config.training.compile:
        return "training.compile is true"
    if _in_batches(config):
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
def averaged(config: DictConfig, task: Task, folder: Path) -> float:
    """The test score of the averaged prediction: the mean of the probabilities that all trained models give."""
    seeds = range(config.seed, config.seed + config.runs)
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


def _data(config: DictConfig, task: Task, model: nn.Module, trainer: Trainer, seed: int) -> TaskData:
    """The graphs as ``loader`` says."""
    loader = config.loader
    if is_divided(trainer) and (_in_batches(config) or config.training.compile or not task.transductive):
        raise ValueError(
            "trainer.strategy is halo, which divides a single graph: it takes loader=full, training.compile=false and "
            f"no data set of many graphs, as {task.name} may be. For those, use trainer.strategy=ddp."
        )
    if is_divided(trainer):
        layers_of(model)
    if not _in_batches(config):
        return TaskData(task, config.training.batch_size, seed, _sparse(config, task, model, trainer))
    if config.training.sparse is True:
        raise ValueError("training.sparse is true, but batches of nodes have dense features. Use loader=full.")
    hops = loader.get("num_neighbors") and list(loader.num_neighbors)
    data = TaskData(task, loader.batch_size, seed, False, hops, loader.num_workers, loader.get("num_parts"))
    if (num_parts := data.num_parts) is not None:
        cut = 100 * edge_cut(task.train[0].edge_index, data.part)  # before the fit, where others wait for this process
        if _rank() == 0:
            how = "by METIS" if WITH_METIS else "of node ids in a row (by METIS with 'gat_pyg[metis]')"
            say(f"{task.name}: {num_parts} parts {how}, {cut:.1f} % of the edges between them")
        return data
    wanted = getattr(model, "num_hops", None)
    if wanted not in (None, 0, len(hops)):
        raise ValueError(
            f"loader.num_neighbors is {loader.num_neighbors}, expected {wanted} numbers: one for each hop of the model."
        )
    return data


def _in_batches(config: DictConfig) -> bool:
    """Whether a step is a batch of a graph's nodes."""
    return any(config.loader.get(key) is not None for key in ("num_neighbors", "num_parts"))


def _sparse(config: DictConfig, task: Task, model: nn.Module, trainer: Trainer) -> bool:
    """Whether the features are to be a sparse matrix, as ``training.sparse`` says."""
    asked = config.training.sparse
    if is_divided(trainer) and asked == "auto":
        return False  # rows of the features are fetched
    if asked is True and is_divided(trainer):
        raise ValueError("training.sparse is true, but trainer.strategy=halo fetches dense rows. Use auto or false.")
    if asked is True and not (task.transductive and takes_sparse(model)):
        raise ValueError(
            f"training.sparse is true, but {task.name} with {type(model).__name__} cannot do that: it needs a single "
            "graph and a model that takes sparse features, such as gat_pyg.models.GAT, and is not compiled. "
            "Use training.sparse=auto."
        )
    sparse = sparse_pays(task, model, trainer.strategy.root_device.type) if asked == "auto" else bool(asked)
    if sparse and _rank() == 0:
        x = task.train[0].x
        share = 100 * int(x.count_nonzero()) / max(x.numel(), 1)
        print(f"{task.name}: {share:.1f} % of the features are not 0, so they are a sparse matrix", file=sys.stderr)
    return sparse


def build_task(config: DictConfig) -> Task:
    """The task that ``dataset`` names: one of this package's, or any PyG data set by its ``_target_``.

    A class that comes in parts (``split="train"`` by default) is made three times; ``root`` is by default a folder of
    the class's name in ``data_root``.
    """
    settings = config.dataset
    target = _located("dataset", settings._target_)
    given: dict[str, Any] = {}
    takes = inspect.signature(target).parameters
    if inspect.isclass(target) and "root" in takes and settings.get("root") is None:
        given["root"] = str(data_root(config.data_root) / target.__name__)
    if "split" in takes and takes["split"].default == "train" and "split" not in settings:
        parts = [instantiate(settings, split=split, _convert_="all", **given) for split in ("train", "val", "test")]
        return from_dataset(parts, target.__name__.lower(), **config.split)
    found = instantiate(settings, _convert_="all", **given)
    return found if isinstance(found, Task) else from_dataset(found, target.__name__.lower(), **config.split)


def build_model(settings: DictConfig, task: Task) -> Built:
    """A fresh model for the task, the name of its class, its arguments, and the method's name."""
    arguments = cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True))
    target = str(arguments.pop("_target_"))
    made = _located("model", target)
    if not inspect.isclass(made) or not issubclass(made, nn.Module):
        raise ValueError(f"model._target_={target} is no torch.nn.Module, expected the class of one.")
    namesake = hasattr(models, made.__name__) and not made.__module__.startswith("gat_pyg.")
    method = str(arguments.pop("method", f"PyG's {made.__name__}" if namesake else made.__name__))
    takes = inspect.signature(made).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    sizes = {"in_channels": task.num_features, "out_channels": task.num_classes}
    if task.transductive and "num_nodes" in takes:  # what is kept for each node
        sizes["num_nodes"] = task.train[0].num_nodes
    if task.edge_dim is not None and ("edge_dim" in takes or (anything and getattr(made, "supports_edge_attr", False))):
        sizes["edge_dim"] = task.edge_dim
    arguments = {key: value for key, value in sizes.items() if key in takes or anything} | arguments
    try:
        model = instantiate({"_target_": target, **arguments}, _convert_="all")
    except HydraException as error:
        if not isinstance(error.__cause__, (TypeError, ValueError)):
            raise
        raise ValueError(f"model._target_={target}: {error.__cause__} Its settings: {arguments}.") from error
    return model, target, arguments, method


def build_module(config: DictConfig, task: Task, model: nn.Module) -> Transductive | Inductive:
    """The setup that the task asks for, with the model compiled where ``training.compile`` says so."""
    training = config.training
    if training.compile:
        model.compile()
    if task.transductive:
        return Transductive(model, training.lr, training.weight_decay, training.cuda_graphs)
    if training.cuda_graphs is True:
        raise ValueError(
            f"training.cuda_graphs is true, but {task.name} has many graphs. Use training.cuda_graphs=auto."
        )
    return Inductive(model, training.lr, training.weight_decay)


def _located(group: str, target: str) -> Any:
    try:
        return get_object(target)
    except Exception as error:
        message = f"{group}._target_={target} cannot be found. Give the dotted name of something that can be imported."
        raise ValueError(message) from error


def build_trainer(config: DictConfig, folder: Path, callbacks: Sequence[Any], **changes: Any) -> Trainer:
    """Lightning's trainer as ``trainer`` and ``logger`` say; what would cost time in each epoch is off."""
    others: list[Any] = []
    if config.trainer.get("strategy") == RAY:
        changes["strategy"], others = on_ray.among_others()
        changes["devices"] = "auto"
    trainer = instantiate(
        config.trainer,
        **changes,
        plugins=[SafeCheckpoints(), *others],
        callbacks=list(callbacks),
        logger=build_logger(config.logger, folder),
        default_root_dir=str(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        _convert_="all",
    )
    return cast(Trainer, trainer)


def build_logger(settings: DictConfig, folder: Path) -> Any:
    """A Lightning logger that writes into ``folder``, or False where metrics.csv is enough."""
    target = settings.get("_target_")
    if target is None:
        return False
    takes = inspect.signature(_located("logger", target)).parameters
    place = next((key for key in ("save_dir", "log_dir") if key in takes and key not in settings), None)
    try:
        return instantiate(settings, **({place: str(folder)} if place else {}))
    except (HydraException, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        package = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}.get(target.rpartition(".")[2], "tensorboard")
        raise ValueError(
            f"{target} needs a package that is not installed. Run: python -m pip install {package}. "
            "Or use logger=csv, which needs none."
        ) from error


# Where a run lives --------------------------------------------------------------------------------------------------


@contextmanager
def run_folder(config: DictConfig) -> Iterator[Path]:
    """The folder of this job, which no other process takes meanwhile; one that holds nothing afterwards goes.

    It is Hydra's (``hydra.run.dir``), which must not hold a run yet. With ``ckpt_path=last`` it is that folder if it
    holds a run, else the newest folder in ``outputs`` with an unfinished run of the same settings. In a multirun, where
    there is no such one, it is the newest with a finished run, which is not done again, else Hydra's.
    """
    given = Path(HydraConfig.get().runtime.output_dir)
    store = _store()
    if _rank() > 0:
        folder = Path(os.environ.get(RUN_DIR) or (store.get(RUN_DIR).decode() if store else given))
        if folder != given:
            _drop(given)
        yield folder
        return
    folder = given
    try:
        folder, lock = _resumed(config, given) if config.ckpt_path == "last" else _fresh(given)
        if folder != given:
            _drop(given)
        os.environ[RUN_DIR] = str(folder)
        if store is not None:
            store.set(RUN_DIR, str(folder))
        if not (folder / CONFIG).is_file():
            write_whole(folder / CONFIG, lambda beside: OmegaConf.save(_plain(config), beside))
        try:
            yield folder
        except Exception:
            if {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
                (folder / CONFIG).unlink()  # it failed before anything was done: the settings alone are no run
            raise
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(lock)
            os.environ.pop(RUN_DIR)
    finally:
        _drop(given)
        _drop(folder)


def _store() -> Store | None:
    """Where processes that torchrun or SLURM started can tell one another something, before they train together."""
    launchers = (TorchElasticEnvironment, SLURMEnvironment)
    place = next((launcher() for launcher in launchers if launcher.detect()), None)
    if place is None or place.world_size() == 1:
        return None
    hosts = place.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=60)
    store = TCPStore(place.main_address, place.main_port, place.world_size(), hosts, wait, False, multi_tenant=True)
    return PrefixStore(f"gat_pyg/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _drop(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()  # refused unless it is empty


def _fresh(folder: Path) -> tuple[Path, int]:
    if (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds a run already, which would be lost. Choose another hydra.run.dir, "
            "or finish that run by ckpt_path=last."
        )
    lock = try_lock(folder / LOCK)
    if lock is None:
        raise ValueError(f"{folder} is in use by another process. Choose another hydra.run.dir.")
    return folder, lock


def _resumed(config: DictConfig, given: Path) -> tuple[Path, int]:
    wanted = _settings(_plain(config))
    if (given / CONFIG).is_file():
        if changed := _changes(_settings(OmegaConf.load(given / CONFIG)), wanted):
            raise ValueError(
                f"The run in {given} was started with other settings: {changed}. Resume it with its own, "
                "or start anew in another folder."
            )
        candidates = [given]
    else:
        every = [path.parent for pattern in ("*", "*/*") for path in Path(config.outputs).glob(f"{pattern}/{CONFIG}")]
        every.sort(key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)
        same = [folder for folder in every if not _changes(_settings(OmegaConf.load(folder / CONFIG)), wanted)]
        candidates = [folder.absolute() for folder in same if not _complete(folder, config)]
        if not candidates and HydraConfig.get().mode == RunMode.MULTIRUN:
            if not same:
                return _fresh(given)
            candidates = [same[0].absolute()]
    for folder in candidates:
        lock = try_lock(folder / LOCK)
        if lock is not None:
            if _complete(folder, config):
                say(f"The run in {_told(folder)} is finished")
            else:
                say(f"Resuming the run in {_told(folder)}{'' if _begun(folder) else ' from its start'}")
            return folder, lock
    if candidates:
        raise ValueError(f"The run in {candidates[0]} is still going on in another process. Let it end, or stop it.")
    raise ValueError(
        f"There is no unfinished run with these settings in {config.outputs}. Name its folder by hydra.run.dir=..., "
        "or start anew without ckpt_path."
    )


def seed_folder(folder: Path, config: DictConfig, seed: int) -> Path:
    """The folder of one seed: the job's own, or one inside it when there may be several."""
    return folder if config.runs == 1 and config.methods is None else folder / f"seed-{seed}"


def finished(folder: Path, results: str) -> Result | None:
    """The Result of a run that has come to its end, or None; if it did not reach the shared file, it is added there."""
    if not (folder / RESULT).is_file():
        return None
    text = (folder / RESULT).read_text(encoding="utf-8").strip()
    result = Result.from_json(text)
    if _rank() == 0:
        if not Path(results).is_file() or text not in Path(results).read_text(encoding="utf-8").splitlines():
            append(result, results)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def _complete(folder: Path, config: DictConfig) -> bool:
    seeds = range(config.seed, config.seed + config.runs)
    return all((seed_folder(folder, config, seed) / RESULT).is_file() for seed in seeds)


def _checkpoint(config: DictConfig, folder: Path) -> str | None:
    if config.ckpt_path in (None, "last"):
        return str(folder / CHECKPOINT) if config.ckpt_path and (folder / CHECKPOINT).is_file() else None
    return str(config.ckpt_path)


def _plain(config: DictConfig) -> DictConfig:
    """The settings with all references resolved."""
    return cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def _settings(config: Any) -> dict[str, Any]:
    """Each setting that a resumed run must share, by its dotted name."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    walk(OmegaConf.to_container(config), "")
    free = {*FREE, *(f"trainer.{key}" for key in WHERE)}
    return {key: value for key, value in flat.items() if key not in free}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys[:5])


def _numbers(config: DictConfig) -> dict[str, Any]:
    plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    plain["dataset"].pop("root", None)  # where the files lie changes nothing
    plain["training"] = {key: value for key, value in plain["training"].items() if key not in HOW}
    shared = {key: plain["trainer"].get(key) for key in ("devices", "num_nodes", "precision")}  # the batch, the bits
    loader = {key: value for key, value in plain["loader"].items() if key != "num_workers"}
    drawn = {"loader": loader} if _in_batches(config) else {}
    return {**{key: plain[key] for key in NUMBERS}, "trainer": shared, **drawn}


# What is told -------------------------------------------------------------------------------------------------------


def summary(result: Result, config: DictConfig) -> str:
    """A few lines that say what came out and where it is."""
    lines = {
        "data set": result.dataset,
        "model": f"{result.method}, {result.parameters:,} parameters, seed {result.seed}",
        "epochs": f"{result.epochs}, best {result.best_epoch}",
        "validation": told(result.metric, result.val),
        "test": told(result.metric, result.value),
        "seconds": f"{result.seconds:.1f} ({_per_epoch(result)} per epoch, {result.device})",
        "files": _told(Path(result.run_dir)),
        "results": _told(Path(config.results)),
    }
    return "\n".join(f"{key:<12}{value}" for key, value in lines.items()) + "\n"


def line(result: Result) -> str:
    """What came out of one seed of many, in one line."""
    val, test = told(result.metric, result.val), told(result.metric, result.value)
    return f"seed {result.seed}: {result.epochs} epochs, best {result.best_epoch}, validation {val}, test {test}"


def summary_of_all(results: Sequence[Result], folder: Path, together: float) -> str:
    """Mean ± std over the seeds, and the score of their averaged prediction."""
    name, n = results[0].metric, len(results)
    scores = [result.value for result in results]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    spread = f"accuracy {mean:.1f} ± {std:.1f} %" if name == "accuracy" else f"micro-F1 {mean:.3f} ± {std:.3f}"
    seconds = statistics.fmean(result.seconds for result in results)
    spread += f" (averaged prediction {told(name, together).split(' ', 1)[1]})"
    return f"{results[0].dataset}, {n} runs: test {spread}, {seconds:.1f} seconds a run, in {_told(folder)}"


def _per_epoch(result: Result) -> str:
    seconds = result.seconds_per_epoch
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _told(path: Path) -> str:
    """The path as one would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _device(trainer: Trainer) -> str:
    device, precision = trainer.strategy.root_device, "" if trainer.precision == "32-true" else f", {trainer.precision}"
    processes = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        return f"{processes}{torch.cuda.get_device_name(device)}{precision}"
    threads = torch.get_num_threads()
    return f"{processes}{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}{precision}"


def _message(error: Exception) -> str | None:
    """The error in words where its own words are enough: ours, Hydra's, the disk's. None where they are not."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown. Known are: {', '.join(error.options)}."
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return _message(error.__cause__) or str(error)
    if isinstance(error, MisconfigurationException):
        return f"{error} On this machine trainer=cpu may be what works."
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and is_full(error):
        return (
            f"{error.filename} could not be written: the disk is full. What was there before is whole. Free some "
            "space; then the same command with ckpt_path=last goes on from the last checkpoint."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parent)
    return str(error) if ours and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None


def _rank() -> int:
    """This process's number among those that train together."""
    return int(getattr(rank_zero_only, "rank", 0))


def _check(config: DictConfig) -> None:
    """Raise ValueError for settings that cannot work, before anything is written."""
    for name, least in LEAST.items():
        value = OmegaConf.select(config, name)
        if name.startswith("loader.") and (
            not _in_batches(config) or name.removeprefix("loader.") not in config.loader
        ):
            continue
        whole = isinstance(least, int)
        if type(value) not in ((int,) if whole else (int, float)) or not value >= least:
            raise ValueError(f"{name} is {value!r}, expected a {'whole ' if whole else ''}number, at least {least:g}.")
    if config.seed > 2**32 - config.runs:
        raise ValueError(f"seed is {config.seed} with runs={config.runs}, expected seeds from 0 to 2^32 - 1.")
    if config.vectorize not in VECTORIZE:
        raise ValueError(f"vectorize is {config.vectorize!r}, expected auto, on or off.")
    size = config.seeds_per_pass
    if size != "auto" and (not isinstance(size, int) or size < 1):
        raise ValueError(f"seeds_per_pass is {size!r}, expected auto or a number of seeds, at least 1.")
    for key, known in HOW.items():
        if (value := config.training[key]) not in known:
            raise ValueError(f"training.{key} is {value!r}, expected {', '.join(map(str, known)).lower()}.")
    if config.ckpt_path not in (None, "last") and config.runs > 1:
        raise ValueError(f"ckpt_path={config.ckpt_path} is one checkpoint, but runs={config.runs}. Use runs=1.")
    several = config.trainer.get("strategy") is not None
    if several and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError("Several processes cannot go with --multirun: start the runs one by one, without -m.")


@contextmanager
def _compiling_told() -> Iterator[None]:
    """Say once that kernels are compiled, since that takes seconds."""
    log = logging.getLogger("gat_pyg.attention.compiling")
    level = log.level

    def first(record: logging.LogRecord) -> bool:
        log.removeFilter(first)
        if _rank() == 0:
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


if __name__ == "__main__":
    main()
