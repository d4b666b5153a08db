"""Settings chosen by validation: candidates train briefly, one after the other, and each stays if it is better."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from ..distributed.ranks import rank_zero_print
from ..files import write_whole
from ..models.encoders import num_categories
from ..runs.defaults_by_data import MANY, by_data
from ..runs.network import earlier_values
from ..runs.reference_scores import standard_error
from ..runs.result import Result
from ..runs.sequential import one_run
from ..runs.task import READ, data_key, prepared, read_task, with_loss
from ..settings.hashing import config_hash
from ..settings.overrides import names_of
from ..settings.settings import Settings
from ..tasks.encodings import GraphColumns
from ..tasks.metrics import metric_named
from ..tasks.task import Task
from ..trained.evaluate import outputs_of
from ..trained.load import load
from ..training.progress import quiet

NODES, EDGES = 20_000, 200_000  # of the training graphs in all, above which nothing is tried
LABELS = 100  # of the validation, below which scores say too little
EPOCHS = 100  # the longest training of a candidate
MOST = 3  # candidates
RUNS = 3  # seeds, whose averaged prediction is better than each


class Candidate(NamedTuple):
    """Settings that may be better than the default of the same names, and a condition."""

    values: Mapping[str, Any]
    fits: Callable[[Task, Settings], bool]


def _has_columns(task: Task, settings: Settings) -> bool:
    return task.objective.item in ("node", "edge") and GraphColumns().has_statistics(task.train[0].x)


def _has_earlier_values(task: Task, settings: Settings) -> bool:
    return bool(earlier_values(task)[0])


def _has_neighbours(task: Task, settings: Settings) -> bool:
    return task.shared_graph is not None and task.objective.item == "node" and not settings.loader.in_batches


def _has_quantities(task: Task, settings: Settings) -> bool:
    columns = [task.features(graph) for graph in task.train]
    of_pairs = [graph.edge_label_attr for graph in task.train if "edge_label_attr" in graph]
    quantities = max(num_categories(x).count(0) for x in (columns, of_pairs) if x)  # each has 100 embeddings
    return type(settings.model.get("encoder")) is int and 0 < quantities <= MANY


# The most promising candidates first, by their overrides -------------------------------------------------------------

CANDIDATES: Mapping[str, Candidate] = {
    "model.change=true": Candidate({"model.change": True}, _has_earlier_values),
    "encoding=columns": Candidate({"encoding": {"_target_": "gat_pyg.tasks.encodings.GraphColumns"}}, _has_columns),
    "training.label_rate=0.8": Candidate({"training.label_rate": 0.8}, _has_neighbours),
    "model.encoder={channels:64,scaling:quantile}": Candidate(
        {"model.encoder": {"channels": 64, "scaling": "quantile"}}, _has_quantities
    ),
}

# ---------------------------------------------------------------------------------------------------------------------


def chosen(settings: Settings, overrides: Sequence[str]) -> Settings:
    """Return settings that suit small data: several seeds, and the candidates that the validation score prefers.

    Each candidate is trained with the first seed for at most `EPOCHS` epochs, in a temporary folder. It is better if
    the difference is above its standard error, over bootstrap samples of the validation rows. Nothing is tried on large
    data, with few validation labels, on several splits or devices, in place of what `overrides` have, or from an
    earlier run. The choice is kept in `outputs`, for the same command again.
    """
    names = _open(settings, overrides)
    if names is None or not _is_small(task := read_task(settings)):
        return settings
    if "runs" not in names_of(overrides) and settings.ckpt_path in (None, "last"):
        settings = settings.replace(runs=RUNS)
    names = [name for name in names if CANDIDATES[name].fits(task, settings)][:MOST]
    if not names or len(task.labels("val")) < LABELS:
        return settings
    key = config_hash({**settings.hashed(), "seed": settings.seed, "split": settings.split_number, "names": names})
    file = Path(settings.outputs) / "chosen" / f"{key}.json"
    if not file.is_file():
        choice = json.dumps(_tried(settings, task, names))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda beside: beside.write_text(choice, encoding="utf-8"))
    selected, notes = json.loads(file.read_text(encoding="utf-8"))
    for note in notes:
        rank_zero_print(f"{task.name}: {note}")
    settings = settings.replace(tried=frozenset(names))
    for name in selected:
        settings = _with(settings, name)
    READ[data_key(settings)] = _task(task, settings)
    return settings


def _open(settings: Settings, overrides: Sequence[str]) -> list[str] | None:
    """Return the candidates for settings that nobody chose, in runs on one device, split and data; None in others."""
    if settings.is_table or settings.on_all_splits or settings.trainer.get("strategy") is not None:
        return None
    if settings.from_ is not None or by_data(settings, overrides) != "all":
        return None
    if hasattr(settings.model.locate(), "fit"):
        return None
    passed = names_of(overrides)
    passed |= {name.partition(".")[0] for name in passed}
    return [name for name, candidate in CANDIDATES.items() if passed.isdisjoint(candidate.values)]


def _is_small(task: Task) -> bool:
    """Return True if a training takes seconds to minutes."""
    nodes, edges = (sum(size) for size in zip(*((data.x.size(0), data.num_edges) for data in task.train), strict=True))
    return bool(nodes <= NODES and edges <= EDGES)


def _with(settings: Settings, name: str) -> Settings:
    values = CANDIDATES[name].values
    others = (text for text in settings.suited if text.partition("=")[0] not in values)
    return settings.updated(values).replace(suited=(*others, name))


def _task(task: Task, settings: Settings) -> Task:
    """Return the task of settings with another encoding, from the one without."""
    has_encoding = settings.encoding.target is None or task.encoding is not None
    return task if has_encoding else prepared(task, settings)


def _tried(settings: Settings, task: Task, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names of the candidates that were better, and a line on each."""
    selected: list[str] = []
    notes: list[str] = []
    best = _trained(settings, task)
    rank_zero_print(f"{task.name}: trying {', '.join(names)}, by the validation score")
    for name in names:
        trial = None
        with suppress(ValueError):  # the model or the loader refuses it
            trial = _trained(_with(settings, name), task)
        if trial is None or best is None:
            continue
        value, error = metric_named(trial[0].metric).value, standard_error(task, trial[2], trial[1], best[1])
        is_better = trial[0].quality > best[0].quality + error
        scores = f"{value(trial[0].val)}; without {value(best[0].val)}; standard error {value(error)}"
        notes.append(f"{'' if is_better else 'not '}chosen by validation: {name} ({scores})")
        if is_better:
            settings, best = _with(settings, name), trial
            selected.append(name)
    return selected, notes


def _trained(settings: Settings, task: Task) -> tuple[Result, Tensor, Tensor] | None:
    """Return the result of a short training, with the outputs and labels of the validation; None if it diverged.

    Raises:
        ValueError: if the settings are refused.
    """
    epochs = min(EPOCHS, settings.max_epochs)
    settings = settings.updated({"training.max_epochs": epochs, "trainer.max_epochs": epochs})
    with TemporaryDirectory() as folder, quiet():
        path, task = Path(folder), with_loss(_task(task, settings), settings)
        settings = settings.replace(runs=1, baselines=False, ckpt_path=None, results=str(path / "results.jsonl"))
        result = one_run(settings, task, settings.seed, path)
        if result is None:
            return None
        return result, *outputs_of(settings, task, load(path), settings.seed, path, "val")
