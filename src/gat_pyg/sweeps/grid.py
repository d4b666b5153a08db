"""A table of methods, data sets and splits: it can be resumed, and several processes can share it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from ..data.arrays.from_pyg import name_of
from ..distributed.ranks import rank_zero_print
from ..files import try_lock
from ..runs.defaults_by_data import suited
from ..runs.folder import (
    AT_ONCE,
    LOCK,
    Invocation,
    Job,
    finished,
    has_progress,
    relative_path,
    remove_checkpoints,
)
from ..runs.process import check_gpus
from ..runs.result import CONFIG, ERRICA, Result, settings_in
from ..runs.stacked import stack_key
from ..runs.task import build_task
from ..seeds.member import grouped
from ..settings.conf import VERSION_BASE, config_folder
from ..settings.errors import message
from ..settings.factory import ModelFactory
from ..settings.hashing import flattened
from ..settings.names import dataset_name
from ..settings.overrides import check_recipe, misused_group, names_of, translated
from ..settings.settings import Settings, differences
from .messages import summary_of_splits

Train = Callable[[Sequence[Job]], list[float | Exception]]
PAUSE = 5.0  # seconds before the next search for a free cell
SHOWN = 10  # names of cells that begin
# Overrides of the table, not of a cell
TABLE = ("experiment=", "+experiment=", "methods=", "datasets=", "protocol=", "ckpt_path=")
TABLES = {"methods": "gat,gcn", "datasets": "cora,citeseer"}


def fill_tables(jobs: Sequence[tuple[Settings, Invocation]], train: Train) -> list[float | Exception]:
    """Call `train` for every method on every data set or split of several jobs; return the score of each, or its error.

    The score is the mean `Result.quality` on a single data set. The seeds and settings of all jobs on a split are
    trained as one.

    Each cell of the table has its own folder, locked by the process that trains it, so several processes can fill one
    table. Cells that differ only in numbers are trained together. Finished cells are not repeated, interrupted ones are
    resumed, and a failed one does not stop the others.

    With `protocol=errica` (Errica et al., ICLR 2020), methods of one name are candidates. On each fold, each of them is
    trained once. The one with the best validation score is then trained with other seeds, whose results are reported.
    """
    tables: list[tuple[Path, dict[str, Job]] | Exception] = []
    for settings, invocation in jobs:
        try:
            folder, cells = _cells(settings, invocation)
            if settings.protocol is not None:
                _check_failures(_fill(cells, train), cells)
                cells = _chosen(settings, cells, folder)
            for cell in cells.values():
                _check_settings(cell)
            several = f"{folder.name}_" if len(jobs) > 1 else ""
            tables.append((folder, {f"{several}{name}": cell for name, cell in cells.items()}))
        except Exception as error:
            tables.append(error)
    parts = [table for table in tables if not isinstance(table, Exception)]
    failed = _fill({name: cell for _, cells in parts for name, cell in cells.items()}, train) if parts else {}
    scores: list[float | Exception] = []
    for (settings, _), table in zip(jobs, tables, strict=True):
        try:
            if isinstance(table, Exception):
                raise table
            folder, cells = table
            _check_failures([name for name in failed if name in cells], cells)
            scores.append(_summarised(settings, folder, cells))
        except Exception as error:
            scores.append(error)
    return scores


def _summarised(settings: Settings, folder: Path, cells: Mapping[str, Job]) -> float:
    """Print the summary of a finished table; return its score."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for cell in cells.values():
        for result in _results(cell):
            groups.setdefault((result.dataset, result.method, result.config_hash), []).append(result)
    for results in groups.values():
        if len({result.split for result in results}) > 1:
            print(summary_of_splits(results))
    path = relative_path(Path(settings.results))
    print(f"All {len(cells)} cells are done, in {relative_path(folder)}; their lines are in {path}")
    return float("nan") if settings.is_table else fmean(result.quality for its in groups.values() for result in its)


def _fill(cells: Mapping[str, Job], train: Train) -> list[str]:
    """Train the unfinished cells, and wait for those that other processes train; return the names of failed ones."""
    for cell in cells.values():
        _check_settings(cell)
    names = {cell.folder: name for name, cell in cells.items()}
    failed: dict[str, str] = {}  # the reason of each
    start, done_before = time.perf_counter(), _runs_done(cells)

    def progress() -> str:
        return _progress(cells, done_before, time.perf_counter() - start)

    while todo := [cell for name, cell in cells.items() if name not in failed and not cell.is_finished]:
        has_lock = False
        for group in grouped(todo, lambda cell: stack_key(cell.settings)):
            with ExitStack() as every:
                contexts = {}
                for cell in group[:AT_ONCE]:
                    cell.folder.mkdir(parents=True, exist_ok=True)
                    if (lock := try_lock(cell.folder / LOCK)) is not None:
                        contexts[cell.folder] = every.enter_context(ExitStack())
                        contexts[cell.folder].enter_context(cell.held(lock))
                locked = [cell for cell in group if cell.folder in contexts]
                begun = [cell for cell in locked if cell.unfinished]  # another process may have finished it
                if begun:
                    titles = [names[cell.folder] for cell in begun]
                    several = ", ".join(titles[:SHOWN]) + f" and {len(titles) - SHOWN} others" * (len(titles) > SHOWN)
                    rank_zero_print(f"{progress()}; {several} {'begins' if len(begun) == 1 else 'begin'}")
                    if len(begun) > 1:
                        begun = [cell._replace(title=title) for cell, title in zip(begun, titles, strict=True)]
                errors = dict(zip((cell.folder for cell in begun), _train(begun, train), strict=True))
                for cell in locked:
                    name = names[cell.folder]
                    try:
                        with contexts[cell.folder]:
                            if isinstance(error := errors.get(cell.folder), Exception):
                                raise error
                            _results(cell)
                    except Exception as error:
                        reason = message(error) or traceback.format_exc()
                        rank_zero_print(f"{name} failed: {'as above' if reason in failed.values() else reason}")
                        failed[name] = reason
                has_lock = has_lock or bool(locked)
        if not has_lock:  # other processes train all remaining cells
            time.sleep(PAUSE)
    rank_zero_print(progress())
    for name, cell in cells.items():  # also cells of earlier calls, whose lines may have been removed
        if name not in failed:
            _results(cell)
    return list(failed)


def _check_failures(failed: Sequence[str], cells: Mapping[str, Job]) -> None:
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. The same command tries again."
        )


def _train(cells: Sequence[Job], train: Train) -> list[float | Exception]:
    """Train cells; after an error before the first checkpoint, the same cell may have other settings."""
    for cell in cells:
        cell.save_settings()
    scores = train(cells)
    for cell, score in zip(cells, scores, strict=True):
        if isinstance(score, Exception) and not has_progress(cell.folder):
            (cell.folder / CONFIG).unlink()
    return scores


# Cells --------------------------------------------------------------------------------------------------------------


def _cells(settings: Settings, invocation: Invocation) -> tuple[Path, dict[str, Job]]:
    """Return the table's folder, the same in every call, and its cells by their names."""
    outputs = Path(settings.outputs).absolute()
    if settings.is_table:
        folder, cells = (
            outputs / (invocation.experiment or settings.protocol or "table"),
            _methods_by_datasets(settings, invocation),
        )
    elif settings.protocol is None:
        dataset = dataset_name(settings.dataset.values)
        folder = outputs / f"{dataset}_{name_of(settings.model.method)}_{settings.hash}"
        cells = {"": settings.replace(ckpt_path="last", cell=settings.model.method)}
    else:
        raise ValueError("protocol=errica is for tables. Add methods=[...] and datasets=[...].")
    for cell in cells.values():
        if cell.trainer.get("strategy") is not None:
            raise ValueError("The runs of a table use one process each. Leave out trainer=ddp or ddp_cpu.")
        check_gpus(cell.trainer)
    if settings.protocol is not None:  # the candidates, whose lines have a file of their own
        results = str(folder / "candidates.jsonl")
        cells = {f"candidates/{name}": cell.replace(runs=1, results=results) for name, cell in cells.items()}
    by_split: dict[str, Settings] = {}
    counts: dict[str, int] = {}
    for name, cell in cells.items():
        if not cell.on_all_splits:
            by_split[name] = cell
            continue
        key = json.dumps([cell.dataset.values, dataclasses.asdict(cell.split)], sort_keys=True, default=str)
        counts[key] = counts[key] if key in counts else _count_splits(cell)
        for number in range(counts[key]):
            by_split[f"{name}_{cell.split_kind}-{number}".removeprefix("_")] = cell.on_split(number)
    return folder, {name: Job(cell, folder / name) for name, cell in by_split.items()}


def _count_splits(cell: Settings) -> int:
    """Return the number of given splits or folds of the data set, which is read once.

    Raises:
        ValueError: if there is only one.
    """
    task = build_task(cell.on_split(0))
    if task.num_splits < 2:
        raise ValueError(
            f"{task.name} has one split, expected several for split.split=all, split.fold=all or protocol=errica. "
            "Draw several by split.draws=10, give masks [N, S], or split.folds=... for graphs with one label each."
        )
    return task.num_splits


def _chosen(settings: Settings, candidates: Mapping[str, Job], folder: Path) -> dict[str, Job]:
    """Return a cell for each method, data set and fold: the candidate with the best validation score, with new seeds.

    Of equal candidates, it is the first in the order of `methods`.
    """
    groups: dict[str, list[tuple[Settings, Result]]] = {}
    for candidate in candidates.values():
        (result,) = _results(candidate)
        cell = candidate.settings
        fold = f"{cell.split_kind}-{cell.split_number}"
        groups.setdefault(f"{result.dataset}_{name_of(cell.model.name)}_{fold}", []).append((cell, result))
    cells = {}
    for name, group in groups.items():
        best, _ = max(group, key=lambda pair: pair[1].quality)
        chosen = best.replace(
            seed=settings.seed + 1,
            runs=settings.runs,
            results=settings.results,
            model=ModelFactory("model", {**best.model.values, "study": ERRICA}),
            candidates=sorted(result.config_hash for _, result in group),
        )
        cells[name] = Job(chosen, folder / name)
    return cells


def cells_of(experiment: str, *overrides: str) -> list[Settings]:
    """Return the settings of the cells of an experiment, each for all of its splits."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = Settings.parse(compose("config", [f"experiment={experiment}", *overrides]))
        return [*_methods_by_datasets(settings, Invocation(Path(), False, experiment, ())).values()]


def _methods_by_datasets(settings: Settings, invocation: Invocation) -> dict[str, Settings]:
    """Return the settings of each cell by its name: of model and data set, then of the method, then the user's."""
    if settings.from_ is not None:
        raise ValueError(
            f"from={settings.from_} keeps the network of that run, but methods=[...] are networks of their own. Leave "
            "out one of them; to compare settings of a warm start, list their values after -m."
        )
    overrides = [override for override in invocation.overrides if not override.startswith(TABLE)]
    if clash := [override for override in overrides if override.startswith(("model=", "dataset="))]:
        raise ValueError(f"{clash[0]} is for a single run. In a table, use methods=[...] and datasets=[...].")
    in_file = _experiment(invocation)
    methods, datasets = (
        _entries(_listed(name, getattr(settings, name)), in_file.get(name) or ()) for name in ("methods", "datasets")
    )
    cells: dict[str, Settings] = {}
    for dataset, *of_data in datasets:
        for model, *of_model in methods:
            changes = [*of_data, *of_model]
            selected = [f"dataset={dataset}", f"model={model}", f"runs={settings.runs}", *changes, *overrides]
            cell = _composed(translated([*selected, "ckpt_path=last"]))
            cell = suited(cell.replace(cell=model, protocol=settings.protocol), selected)
            if len(datasets) == 1:  # a setting for one of several data sets may have no effect on the others
                cell = cell.replace(passed=names_of([*changes, *overrides]))
            values = [setting.rpartition("=")[2] for setting in changes if not setting.startswith("runs=")]
            words = [re.sub(r"[^\w.]+", "-", value).strip("-") for value in values]
            name = "_".join([dataset_name(cell.dataset.values), model, *words])
            if name in cells:
                raise ValueError(
                    f"Two methods have the same cell {name}. Distinguish them by model.method=..., and list each data "
                    "set once, or with other settings."
                )
            cells[name] = cell
    return cells


def _experiment(invocation: Invocation) -> dict[str, Any]:
    """Return the settings of the experiment, of gat_pyg or the user's, if the table is one.

    Raises:
        ValueError: if it has settings of single runs, which would apply to no cell.
    """
    name = f"experiment/{invocation.experiment}"
    sources = (source for source in GlobalHydra.instance().config_loader().get_sources() if source.is_config(name))
    source = next(sources, None)
    values: Any = OmegaConf.to_container(source.load_config(name).config) if source else {}
    if others := {*values} - {"methods", "datasets", "runs", "protocol"}:
        raise ValueError(
            f"experiment={invocation.experiment} has {', '.join(sorted(map(str, others)))}, which would apply to no "
            "cell. Add them to each method, or to the command line."
        )
    return dict(values)


def _listed(name: str, value: Any) -> list[Any]:
    names = [value] if isinstance(value, str) else value
    if not names:
        raise ValueError(f"{name} is {value}, expected a list such as {name}=[{TABLES[name]}].")
    return list(names)


def _composed(overrides: list[str]) -> Settings:
    try:
        config = compose("config", overrides=overrides, return_hydra_config=True)
    except Exception as error:
        if text := misused_group(overrides):
            raise ValueError(text) from error
        raise
    check_recipe(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return Settings.parse(config)


def _entries(requested: Iterable[Any], in_file: Iterable[Any]) -> list[tuple[str, ...]]:
    """Return the requested methods or data sets, each a name and settings; a name alone means all its entries in_file.

    >>> _entries(["gat", "gcn runs=1"], ["gat", "gat model.heads=8"])
    [('gat',), ('gat', 'model.heads=8'), ('gcn', 'runs=1')]
    """

    def parsed(entries: Iterable[Any]) -> list[tuple[str, ...]]:
        return [tuple(entry.split() if isinstance(entry, str) else entry) for entry in entries]

    every: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in parsed(in_file):
        every.setdefault(entry[:1], []).append(entry)
    return [*dict.fromkeys(entry for name in parsed(requested) for entry in every.get(name, [name]))]


def _check_settings(cell: Job) -> None:
    """Raise ValueError if an earlier call started the cell with other settings."""
    if (cell.folder / CONFIG).is_file():
        old, new = flattened(settings_in(cell.folder)), flattened(cell.settings.to_dict())
        if changed := differences({**old, "runs": 0, "seed": 0}, {**new, "runs": 0, "seed": 0}):
            raise ValueError(
                f"{cell.folder} was started with other settings: {changed}. Choose other outputs=..., or remove the "
                "folder."
            )


def _results(cell: Job) -> list[Result]:
    """Return the results of a complete cell, append their missing lines, and remove its checkpoints."""
    results = [finished(cell.run_folder(seed), cell.settings.results) for seed in cell.settings.seeds]
    remove_checkpoints(cell.folder)
    return [result for result in results if result is not None]


def _runs_done(cells: Mapping[str, Job]) -> int:
    return sum(len(cell.settings.seeds) - len(cell.unfinished) for cell in cells.values())


def _progress(cells: Mapping[str, Job], before: int, seconds: float) -> str:
    """Return the progress in runs and cells, and the time left if other runs take as long as those so far."""
    done, runs = _runs_done(cells), sum(cell.settings.runs for cell in cells.values())
    finished_cells = sum(not cell.unfinished for cell in cells.values())
    left = f", about {_minutes(seconds * (runs - done) / (done - before))} left" if done > before else ""
    filled = 20 * done // runs
    bar = "#" * filled + "." * (20 - filled)
    return f"[{bar}] {done} of {runs} runs, {finished_cells} of {len(cells)} cells, {_minutes(seconds)}{left}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
