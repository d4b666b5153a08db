"""Lines of results grouped into runs with the same settings."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from .result import Result, read, scores_of


class Line(NamedTuple):
    """A Result with its file and line number."""

    result: Result
    file: str
    number: int  # from 1


class Key(NamedTuple):
    """The fields of a Result by which tables select it."""

    row: str
    dataset: str
    metric: str
    form: str = ""
    study: str = ""


def key_of(result: Result) -> Key:
    """Return the key of a Result.

    >>> key_of(Result("GAT: text", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373, row="GAT"))
    Key(row='GAT', dataset='cora', metric='accuracy', form='', study='')
    """
    return Key(result.row or result.method, result.dataset, result.metric, result.form, result.study)


@dataclass(frozen=True)
class Runs:
    """The runs of one method on one data set with the same settings: a line for each split and seed, sorted by both."""

    lines: tuple[Line, ...]

    @property
    def setting(self) -> str:
        """The hash of the common settings."""
        return self.lines[0].result.config_hash

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.lines[0].result.method

    @property
    def newest(self) -> str:
        """The time at which the last run ended."""
        return max(line.result.timestamp for line in self.lines)

    @property
    def scores(self) -> dict[tuple[int, int | None], float]:
        """The test scores by split and seed, or by split alone: see `scores_of`."""
        return scores_of(line.result for line in self.lines)

    @property
    def values(self) -> list[float]:
        """The test scores."""
        return [*self.scores.values()]

    @property
    def vals(self) -> dict[tuple[int, int | None], float]:
        """The validation scores, likewise."""
        return scores_of((line.result for line in self.lines), "val")

    @property
    def mean(self) -> float:
        """The mean test score."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """The sample standard deviation of the test scores; NaN for a single run."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def val(self) -> float:
        """The mean validation score."""
        return statistics.fmean(line.result.val for line in self.lines)

    @property
    def quality(self) -> float:
        """The mean `Result.quality`, which selects one of several forms or configurations."""
        return statistics.fmean(line.result.quality for line in self.lines)

    @property
    def seconds(self) -> float:
        """The mean seconds of a training."""
        return statistics.fmean(line.result.seconds for line in self.lines)


Gathered: TypeAlias = Mapping[Key, Sequence[Runs]]


def lines_of(path: str | Path) -> list[Line]:
    """Return the lines of a file of results.

    Raises FileNotFoundError if there is no such file, and ValueError if a line is incomplete or there is no line.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{path} {what}. Give the results.jsonl that a run appended to, or train first: gat-pyg dataset=digits, "
            "which needs no download."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a table must not omit runs silently
            results = read(path)
    except UserWarning as torn:
        message = str(torn).replace(" and was left out", "")
        raise ValueError(f"{message} Delete that line, or train that seed again and then delete it.") from torn
    if not results:
        raise ValueError(f"{path} holds no line of results. Train first: gat-pyg dataset=digits results={path}.")
    numbers = [number for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line.strip()]
    return [Line(result, str(path), number) for result, number in zip(results, numbers, strict=True)]


def gathered(lines: Iterable[Line]) -> dict[Key, list[Runs]]:
    """Return the runs of each method, data set and metric, grouped by settings, the newest group first.

    The newest group is the one whose last run ended last. If a seed has several lines with the same settings and split,
    the newest counts.

    >>> result = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373)
    >>> gathered([Line(result, "results.jsonl", 1)])[Key("GAT", "cora", "accuracy")][0].mean
    83.1
    """
    newest: dict[tuple[Key, str, int, int], Line] = {}
    for line in sorted(lines, key=lambda line: line.result.timestamp):  # stable: on ties, the later line counts
        result = line.result
        newest[key_of(result), result.config_hash, result.split, result.seed] = line
    groups: dict[tuple[Key, str], list[Line]] = {}
    for (key, setting, *_), line in sorted(newest.items(), key=lambda item: item[0][2:]):
        groups.setdefault((key, setting), []).append(line)
    groups_of: dict[Key, list[Runs]] = {}
    for (key, _), group in groups.items():
        groups_of.setdefault(key, []).append(Runs(tuple(group)))
    order = sorted(groups_of, key=lambda key: (key.row, key.study, key.form, key.dataset, key.metric))
    return {key: sorted(groups_of[key], key=lambda runs: runs.newest, reverse=True) for key in order}


def ranked(groups: Iterable[Runs]) -> list[Runs]:
    """Return groups of runs by their mean validation score, never by the test: the best first."""
    return sorted(groups, key=lambda runs: runs.quality, reverse=True)
