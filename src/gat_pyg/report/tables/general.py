"""A table of any lines of results: methods as rows, data sets as columns, each in its own metric."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ...runs.groups import Gathered, Runs
from ...runs.result import BASELINES, ERRICA, settings_in
from ...settings.factory import LABELS
from ...settings.hashing import data_settings, flattened, learnt
from ...tasks.metrics import metric_named
from .cells import NAMES, NONE, Cell, Table, ours_cell, spread


class Column(NamedTuple):
    """A data set and the metric of its scores, with the settings by which it differs from others of its name."""

    dataset: str
    metric: str
    data: str = ""

    @property
    def heads(self) -> tuple[str, str]:
        """The data set's name, and the metric with its unit and an arrow towards better scores."""
        metric = metric_named(self.metric)
        unit = f" ({metric.unit.strip()})" if metric.unit else ""
        name = NAMES.get(self.dataset, self.dataset)
        return f"{name} ({self.data})" if self.data else name, f"{metric.title}{unit} {'↓' if metric.lower else '↑'}"


NAMING = ("model._target_", *(f"model.{label}" for label in LABELS))  # settings that say which model it is

WITHOUT_NETWORK = (
    "Baselines are without a network, on the same splits: models of the features, neighbours' labels, or "
    "heuristics of links. They have no rank, and a standard deviation over several splits only."
)

Rows: TypeAlias = dict[str, dict[Column, Runs]]


def general_table(rows: Rows) -> Table:
    """Return the table of mean ± standard deviation (runs), the best of each column bold, the second underlined."""
    columns = columns_of(rows)
    ranks = {column: _ranks(rows, column) for column in columns}
    cells = [
        (
            Cell(label),
            *(
                ours_cell(its.get(column), column.metric)._replace(rank=ranks[column].get(label, 0))
                for column in columns
            ),
        )
        for label, its in rows.items()
    ]
    baselines = [*_baseline_rows(rows, columns)]
    return Table(
        name="general",
        caption="Test scores, mean ± standard deviation (runs).",
        columns=(("", "Method"), *(column.heads for column in columns)),
        rows=(*cells, *baselines),
        notes=(
            "↑: higher scores are better; ↓: lower scores are better. The best mean of a column is bold, the second "
            "best underlined. A method with several configurations on a data set has a row for each, with the settings "
            "that differ, and only the one with the best mean validation score can be bold or underlined. A "
            "configuration shares a row with equal settings on other data sets. Different splits or files of one data "
            "set have separate columns, with the settings that differ. Runs on several splits or folds count together. "
            "In Errica's protocol, which selects a configuration on each fold, a fold counts once, with the mean over "
            "its seeds.",
            *([WITHOUT_NETWORK] if baselines else []),
            *(note for column in columns for note in _training_notes(rows, column)),
        ),
    )


def _baseline_rows(rows: Rows, columns: Sequence[Column]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each baseline without a network: the mean over the splits, which have no seeds."""
    scores: dict[str, dict[Column, dict[int, float]]] = {}
    for its in rows.values():
        for column, one in its.items():
            for result in (line.result for line in one.lines):
                for name, score in (result.baselines or {}).items():
                    scores.setdefault(name, {}).setdefault(column, {})[result.split] = score
    for name in sorted(scores, key=[*BASELINES, *scores].index):
        cells = []
        for column in columns:
            values = [*scores[name].get(column, {}).values()]
            std = statistics.stdev(values) if len(values) > 1 else math.nan
            cells.append(Cell(spread(statistics.fmean(values), std, column.metric) if values else NONE))
        yield Cell(f"baseline: {name}"), *cells


def columns_of(rows: Rows) -> list[Column]:
    """Return the columns in alphabetical order."""
    return sorted({column for its in rows.values() for column in its})


def _training_notes(rows: Rows, column: Column) -> Iterator[str]:
    """Yield a note on a data set where methods differ in settings that all have: of the training, or of the models."""
    groups = {label: its[column] for label, its in rows.items() if column in its}
    settings = {label: values for label, one in groups.items() if (values := _settings(one))}
    if len({groups[label].method for label in settings}) < 2:
        return
    shared = set.intersection(*({*values} for values in settings.values()))
    names = [name for name in sorted(_differing(settings.values())) if name.partition(".")[0] in ("training", "model")]
    names = [name for name in names if name in shared and name not in NAMING]
    if any(name.startswith("training.") for name in names):
        texts = "; ".join(f"{label}: {text_of(names, values)}" for label, values in settings.items())
        yield f"On {column.heads[0]}, the methods were not trained with the same settings. {texts}."


def _ranks(rows: Rows, column: Column) -> dict[str, int]:
    """Return 1 for the rows with the best mean and 2 for those with the second best; none if there is nothing worse.

    Of several configurations of a method, only that with the best validation score has a rank.
    """
    metric = metric_named(column.metric)
    groups = {label: its[column] for label, its in rows.items() if column in its}
    best: dict[str, float] = {}
    for one in groups.values():
        best[one.method] = max(one.quality, best.get(one.method, -math.inf))
    means = {label: one.mean for label, one in groups.items() if one.quality == best[one.method]}
    scores = {label: metric.better(mean) for label, mean in means.items() if not math.isnan(mean)}
    order = sorted(set(scores.values()), reverse=True)[:2]
    return {label: order.index(score) + 1 for label, score in scores.items() if len(order) > 1 and score in order}


# Rows ---------------------------------------------------------------------------------------------------------------


def rows_of(runs: Gathered) -> Rows:
    """Return the runs by row and column: a row is a method, with the settings by which its configurations differ."""
    named: dict[Column, list[Runs]] = {}
    for key, its in runs.items():
        named.setdefault(Column(key.dataset, key.metric), []).extend(its)
    data = {column: iter(_data(groups)) for column, groups in named.items()}
    methods: dict[str, list[tuple[Column, Runs]]] = {}
    for key, its in runs.items():
        column = Column(key.dataset, key.metric)
        for one in its:
            methods.setdefault(one.method, []).append((column._replace(data=next(data[column])), one))
    rows: Rows = {}
    for method, groups in methods.items():
        for (column, one), words in zip(groups, _words(groups), strict=True):
            label = f"{method} ({words})" if words else method
            if column in rows.get(label, {}):  # two names of one method
                label = f"{method} ({words}{', ' * bool(words)}{_hash(one)})"
            rows.setdefault(label, {})[column] = one
    return rows


def _data(groups: Sequence[Runs]) -> list[str]:
    """Return for each group the settings by which its data differ from those of the others, or their hash."""
    settings = [data_settings(_settings(one)) for one in groups]
    hashes = [one.lines[0].result.data for one in groups]
    if len({*hashes}) < 2:
        return [""] * len(groups)
    names = sorted(_differing(settings))
    words = [text_of(names, values) for values in settings]
    hashes_of: dict[str, set[str]] = {}
    for text, data in zip(words, hashes, strict=True):
        hashes_of.setdefault(text, set()).add(data)
    unclear = {text for text, its in hashes_of.items() if len(its) > 1 or not text}
    return [
        text if text not in unclear else ", ".join(filter(None, (text, f"data {data}")))
        for text, data in zip(words, hashes, strict=True)
    ]


def _words(groups: Sequence[tuple[Column, Runs]]) -> list[str]:
    """Return for each configuration of one method the settings that differ on any data set, or its hash."""
    columns: dict[Column, list[int]] = {}
    for index, (column, _) in enumerate(groups):
        columns.setdefault(column, []).append(index)
    several = [its for its in columns.values() if len(its) > 1]
    if not several:
        return [""] * len(groups)
    settings = [_settings(one) for _, one in groups]
    of_data = {name for values in settings for name in data_settings(values)}  # in the heading of a column
    names = sorted({name for its in several for name in _differing([settings[index] for index in its])} - of_data)
    words = [text_of(names, values) if values else "" for values in settings]
    shared = {words[index] for its in several for index in its}
    words = [text if text in shared else "" for text in words]
    for its in several:
        for index in its:
            if not settings[index] or sum(words[index] == words[other] for other in its) > 1:
                words[index] = ", ".join(filter(None, (words[index], _hash(groups[index][1]))))
    return words


def _hash(runs: Runs) -> str:
    return f"config_hash {runs.setting or 'none'}"


def _settings(runs: Runs) -> dict[str, Any]:
    """Return the settings that determine what is learnt, from the folder of a run that still has them, or none."""
    for line in runs.lines:
        if line.result.study == ERRICA:  # each fold selects its own settings
            return {}
        try:
            saved = flattened(settings_in(Path(line.result.run_dir))) if line.result.run_dir else {}
        except (OSError, ValueError):
            continue
        if saved:
            return learnt(saved)
    return {}


def _differing(settings: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the settings that differ, where a missing one is null."""
    read = [values for values in settings if values]
    names = {name for values in read for name in values}
    return {name for name in names if len({_value(values.get(name)) for values in read}) > 1}


def text_of(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return settings in words but those that are null, by the last part of a name unless two names share it.

    >>> text_of(["model.heads", "training.lr"], {"model.heads": 4, "training.lr": 0.001331224061062424})
    'heads 4, lr 0.001331'
    """
    last = [name.rpartition(".")[2] for name in names]
    short = [part if last.count(part) == 1 else name for name, part in zip(names, last, strict=True)]
    pairs = [(part, values.get(name)) for name, part in zip(names, short, strict=True)]
    return ", ".join(f"{part} {_value(_rounded(value))}" for part, value in pairs if value is not None)


def _rounded(value: Any) -> Any:
    """Return a number with four significant digits, as it is if it is no fraction."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
