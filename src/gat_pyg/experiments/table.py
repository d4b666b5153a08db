"""A table: methods x data sets, restartable, shared by processes."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..distributed.ranks import say
from ..files import try_lock, write_whole
from .build import dataset_name
from .errors import _message
from .folder import (
    LOCK,
    changes,
    complete,
    finished,
    from_here,
    held,
    over,
    plain,
    remove_checkpoints,
    seed_folder,
    settings_in,
    settings_of,
)
from .job import all_runs
from .result import CONFIG, RESULT
from .settings import _check, _misused_group, config_folder


def for_what_runs(arguments: Sequence[str]) -> list[str]:
    """Drop what belongs to a named model and a named data set where another class takes the place of either.

    Those are the pair's numbers (``experiment/numbers``) and the model's ``method``: Hydra chooses them by the two
    names, which a setting such as ``dataset._target_`` leaves as they are.

    >>> for_what_runs(["model=gat", "dataset._target_=torch_geometric.datasets.KarateClub"])
    ['model=gat', '~experiment/numbers', 'dataset._target_=torch_geometric.datasets.KarateClub']
    """
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    first = next((at for at, key in enumerate(keys) if key in REPLACES), None)
    if first is None or "experiment/numbers" in keys:
        return list(arguments)
    method = ["++model.method=null"] if "model._target_" in keys and "model.method" not in keys else []
    return [*arguments[:first], "~experiment/numbers", *method, *arguments[first:]]


REPLACES = ("dataset._target_", "dataset.name", "model._target_")

# A table ------------------------------------------------------------------------------------------------------------


def table(config: DictConfig) -> float:
    """Every method on every data set, each with its seeds; nan, since scores of several data sets have no mean.

    A cell of the table is a folder of its own, which one process at a time works on: several may fill one table. What
    is finished is not done again, what was interrupted goes on, and a cell that fails leaves the others alone.
    """
    runtime = HydraConfig.get().runtime
    cells = _cells(config)
    folder = Path(config.outputs).absolute() / (runtime.choices.get("experiment") or "table")  # the same each time
    for name, own in cells.items():
        _check_begun(own, folder / name)
    failed: dict[str, Exception] = {}
    start, done_before = time.perf_counter(), _runs_done(cells, folder)

    def so_far() -> str:
        return _so_far(cells, folder, done_before, time.perf_counter() - start)

    while todo := [name for name in cells if name not in failed and not over(folder / name, cells[name])]:
        mine = False
        for name in todo:
            (folder / name).mkdir(parents=True, exist_ok=True)
            lock = try_lock(folder / name / LOCK)
            if lock is None:
                continue
            mine = True
            try:
                with held(folder / name, cells[name], lock):
                    if not complete(folder / name, cells[name]):  # by another process meanwhile
                        _begin(cells[name], folder / name)
                        say(f"{so_far()}; {name} begins")
                        all_runs(cells[name], folder / name)
                    _finish(cells[name], folder / name)
            except Exception as error:
                failed[name] = error
                say(f"{name} failed: {_message(error) or traceback.format_exc()}")
        if not mine:  # other processes have all that is left
            time.sleep(PAUSE)
    say(so_far())
    for name, own in cells.items():  # of cells that were finished before, whose lines may have been removed
        if name not in failed:
            _finish(own, folder / name)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. The same command tries again."
        )
    where, lines = from_here(folder), from_here(Path(config.results))
    print(f"All {len(cells)} cells are done, in {where}; their lines are in {lines}")
    return float("nan")


def _cells(config: DictConfig) -> dict[str, DictConfig]:
    """The settings of each cell, by its name: those of the model on the data set, then the method's own, then yours."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith(TABLE)]
    if clash := [override for override in given if override.startswith(("model=", "dataset="))]:
        raise ValueError(f"{clash[0]} is for a single run. In a table, use methods=[...] and datasets=[...].")
    file = config_folder() / "experiment" / f"{HydraConfig.get().runtime.choices.get('experiment')}.yaml"
    in_file: Any = OmegaConf.load(file) if file.is_file() else {}
    if more := {*in_file} - {"methods", "datasets", "runs"}:
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
        for model, *own in _methods(lists["methods"], in_file.get("methods") or ()):
            settings = [f"dataset={dataset}", f"model={model}", f"runs={config.runs}", *own, *given, "ckpt_path=last"]
            made = _composed(for_what_runs(settings))
            if made.trainer.get("strategy") is not None:
                raise ValueError("A table is of runs in one process each. Leave out trainer=ddp or ddp_cpu.")
            made.methods = model  # it is a cell
            said = [part.rpartition("=")[2] for part in own if not part.startswith("runs=")]
            name = "_".join(
                [dataset_name(made.dataset), model, *(re.sub(r"[^\w.]+", "-", word).strip("-") for word in said)]
            )
            if name in cells:
                raise ValueError(
                    f"Two methods make the cell {name}. Tell them apart by +model.method=..., and list a data set once."
                )
            cells[name] = made
            _check(made)
    return cells


def _composed(settings: list[str]) -> DictConfig:
    try:
        return compose("config", overrides=settings)
    except Exception as error:
        if message := _misused_group(settings):
            raise ValueError(message) from error
        raise


def _methods(asked: Iterable[Any], in_file: Iterable[Any]) -> Iterable[tuple[str, ...]]:
    """The methods asked for, each a model and its settings; a model alone is all that the file has of it, if any."""

    def parts(methods: Iterable[Any]) -> list[tuple[str, ...]]:
        return [tuple(method.split() if isinstance(method, str) else method) for method in methods]

    entries: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in parts(in_file):
        entries.setdefault(entry[:1], []).append(entry)
    return dict.fromkeys(each for method in parts(asked) for each in entries.get(method, [method]))


def _check_begun(config: DictConfig, folder: Path) -> None:
    """Raise ValueError where a cell was begun with other settings than these."""
    if (folder / CONFIG).is_file():
        old, new = settings_in(folder), settings_of(plain(config))
        if changed := changes({**old, "runs": 0}, {**new, "runs": 0}):
            raise ValueError(
                f"{folder} was begun with other settings: {changed}. Choose other outputs=..., or remove the folder."
            )


def _begin(config: DictConfig, folder: Path) -> None:
    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(plain(config), beside))


def _finish(config: DictConfig, folder: Path) -> None:
    """Add the lines of a complete cell where they lack, and remove its checkpoints."""
    for seed in range(config.seed, config.seed + config.runs):
        finished(seed_folder(folder, config, seed), config.results)
    remove_checkpoints(folder)


def _runs_done(cells: Mapping[str, DictConfig], folder: Path) -> int:
    def seeds(name: str, own: DictConfig) -> Iterator[Path]:
        return (seed_folder(folder / name, own, seed) for seed in range(own.seed, own.seed + own.runs))

    return sum((inner / RESULT).is_file() for name, own in cells.items() for inner in seeds(name, own))


def _so_far(cells: Mapping[str, DictConfig], folder: Path, before: int, seconds: float) -> str:
    """How far the table is, in runs, and when it will be done if the rest takes as long as what was done."""
    done, runs = _runs_done(cells, folder), sum(own.runs for own in cells.values())
    whole = sum(complete(folder / name, own) for name, own in cells.items())
    left = f", about {_minutes(seconds * (runs - done) / (done - before))} left" if done > before else ""
    full = 20 * done // runs
    bar = "#" * full + "." * (20 - full)
    return f"[{bar}] {done} of {runs} runs, {whole} of {len(cells)} cells, {_minutes(seconds)}{left}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


PAUSE = 5.0  # seconds between looks at what others work on
TABLE = ("experiment=", "+experiment=", "methods=", "datasets=", "ckpt_path=")  # what is asked of a table, not a cell
TABLES = {"methods": "gat,gcn", "datasets": "cora,citeseer"}
