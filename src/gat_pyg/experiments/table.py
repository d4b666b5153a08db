"""A table of methods and data sets: it can be resumed, and several processes can share it."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from ..distributed.ranks import rank_zero_print
from ..files import try_lock
from .build import check_gpus
from .command import config_folder, dataset_name, message, misused_group, without_recipes
from .folder import (
    LOCK,
    Invocation,
    complete,
    finished,
    held,
    over,
    relative_path,
    remove_checkpoints,
    save_settings,
    seed_folder,
    settings_in,
)
from .result import CONFIG, RESULT
from .settings import Settings, differences, flattened

PAUSE = 5.0  # seconds before the next search for a free cell
TABLE = ("experiment=", "+experiment=", "methods=", "datasets=", "ckpt_path=")  # overrides of the table, not of a cell
TABLES = {"methods": "gat,gcn", "datasets": "cora,citeseer"}


def table(settings: Settings, invocation: Invocation, train: Callable[[Settings, Path], object]) -> float:
    """Call `train` for every method on every data set; return nan, since scores of several data sets have no mean.

    Each cell of the table has its own folder, locked by the process that trains it, so several processes can fill one
    table. Finished cells are not repeated, interrupted ones are resumed, and a failed one does not stop the others.
    """
    cells = _cells(settings, invocation)
    folder = Path(settings.outputs).absolute() / (invocation.experiment or "table")  # the same in every call
    for name, cell in cells.items():
        _check_settings(cell, folder / name)
    failed: dict[str, Exception] = {}
    start, done_before = time.perf_counter(), _runs_done(cells, folder)

    def progress() -> str:
        return _progress(cells, folder, done_before, time.perf_counter() - start)

    while todo := [name for name in cells if name not in failed and not over(folder / name, cells[name])]:
        has_lock = False
        for name in todo:
            (folder / name).mkdir(parents=True, exist_ok=True)
            lock = try_lock(folder / name / LOCK)
            if lock is None:
                continue
            has_lock = True
            try:
                with held(folder / name, cells[name], lock):
                    if not complete(folder / name, cells[name]):  # another process may have finished it
                        save_settings(cells[name], folder / name)
                        rank_zero_print(f"{progress()}; {name} begins")
                        train(cells[name], folder / name)
                    _finish(cells[name], folder / name)
            except Exception as error:
                failed[name] = error
                rank_zero_print(f"{name} failed: {message(error) or traceback.format_exc()}")
        if not has_lock:  # other processes train all remaining cells
            time.sleep(PAUSE)
    rank_zero_print(progress())
    for name, cell in cells.items():  # also cells of earlier calls, whose lines may have been removed
        if name not in failed:
            _finish(cell, folder / name)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. The same command tries again."
        )
    results = relative_path(Path(settings.results))
    print(f"All {len(cells)} cells are done, in {relative_path(folder)}; their lines are in {results}")
    return float("nan")


def _cells(settings: Settings, invocation: Invocation) -> dict[str, Settings]:
    """Return the settings of each cell by its name: of model and data set, then of the method, then the user's."""
    overrides = [override for override in invocation.overrides if not override.startswith(TABLE)]
    if clash := [override for override in overrides if override.startswith(("model=", "dataset="))]:
        raise ValueError(f"{clash[0]} is for a single run. In a table, use methods=[...] and datasets=[...].")
    in_file = _experiment(invocation)
    methods, datasets = _listed("methods", settings.methods), _listed("datasets", settings.datasets)
    cells: dict[str, Settings] = {}
    for dataset in datasets:
        for model, *changes in _methods(methods, in_file.get("methods") or ()):
            selected = [f"dataset={dataset}", f"model={model}", f"runs={settings.runs}", *changes, *overrides]
            cell = _composed(without_recipes([*selected, "ckpt_path=last"])).replace(methods=model)  # marks a cell
            if cell.trainer.get("strategy") is not None:
                raise ValueError("The runs of a table use one process each. Leave out trainer=ddp or ddp_cpu.")
            values = [setting.rpartition("=")[2] for setting in changes if not setting.startswith("runs=")]
            words = [re.sub(r"[^\w.]+", "-", value).strip("-") for value in values]
            name = "_".join([dataset_name(cell.dataset.values), model, *words])
            if name in cells:
                raise ValueError(
                    f"Two methods have the same cell {name}. Distinguish them by +model.method=..., and list each data "
                    "set once."
                )
            cells[name] = cell
            check_gpus(cell.trainer)
    return cells


def _experiment(invocation: Invocation) -> dict[str, Any]:
    """Return the settings in the table's file, if it is one of conf/experiment.

    Raises:
        ValueError: if it has settings of single runs, which would apply to no cell.
    """
    file = config_folder() / "experiment" / f"{invocation.experiment}.yaml"
    values: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    if others := {*values} - {"methods", "datasets", "runs"}:
        raise ValueError(
            f"{file} has {', '.join(sorted(map(str, others)))}, which would apply to no cell. Add them to each "
            "method, or to the command line."
        )
    return dict(values)


def _listed(name: str, value: Any) -> list[Any]:
    names = [value] if isinstance(value, str) else value
    if not names:
        raise ValueError(f"{name} is {value}, expected a list such as {name}=[{TABLES[name]}].")
    return list(names)


def _composed(overrides: list[str]) -> Settings:
    try:
        config = compose("config", overrides=overrides)
    except Exception as error:
        if text := misused_group(overrides):
            raise ValueError(text) from error
        raise
    return Settings.parse(config)


def _methods(requested: Iterable[Any], in_file: Iterable[Any]) -> Iterable[tuple[str, ...]]:
    """Return the requested methods, each a model and its settings; a model alone means all its entries in_file."""

    def parsed(methods: Iterable[Any]) -> list[tuple[str, ...]]:
        return [tuple(method.split() if isinstance(method, str) else method) for method in methods]

    entries: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in parsed(in_file):
        entries.setdefault(entry[:1], []).append(entry)
    return dict.fromkeys(entry for method in parsed(requested) for entry in entries.get(method, [method]))


def _check_settings(cell: Settings, folder: Path) -> None:
    """Raise ValueError if an earlier call started the cell with other settings."""
    if (folder / CONFIG).is_file():
        old, new = settings_in(folder), flattened(cell.to_dict())
        if changed := differences({**old, "runs": 0}, {**new, "runs": 0}):
            raise ValueError(
                f"{folder} was started with other settings: {changed}. Choose other outputs=..., or remove the folder."
            )


def _finish(cell: Settings, folder: Path) -> None:
    """Append the missing lines of a complete cell, and remove its checkpoints."""
    for seed in cell.seeds:
        finished(seed_folder(folder, cell, seed), cell.results)
    remove_checkpoints(folder)


def _runs_done(cells: Mapping[str, Settings], folder: Path) -> int:
    return sum(
        (seed_folder(folder / name, cell, seed) / RESULT).is_file()
        for name, cell in cells.items()
        for seed in cell.seeds
    )


def _progress(cells: Mapping[str, Settings], folder: Path, before: int, seconds: float) -> str:
    """Return the progress in runs and cells, and the time left if other runs take as long as those so far."""
    done, runs = _runs_done(cells, folder), sum(cell.runs for cell in cells.values())
    finished_cells = sum(complete(folder / name, cell) for name, cell in cells.items())
    left = f", about {_minutes(seconds * (runs - done) / (done - before))} left" if done > before else ""
    filled = 20 * done // runs
    bar = "#" * filled + "." * (20 - filled)
    return f"[{bar}] {done} of {runs} runs, {finished_cells} of {len(cells)} cells, {_minutes(seconds)}{left}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
