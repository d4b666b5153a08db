"""The run of a data set that validation prefers, and how sure that is."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

from ..runs.folder import relative_path
from ..runs.reproduce import command_of
from ..runs.result import scores_of
from ..settings.rules import similar
from ..tasks.metrics import metric_named
from .runs import Runs, gathered, lines_of
from .significance import Significance, t_test


class Best(NamedTuple):
    """The settings with the best mean validation score on a data set, and the second best."""

    runs: Runs
    second: Runs | None
    difference: Significance  # of the two validation scores
    num_settings: int
    left_out: int  # lines with another metric, split or content of the data
    command: str | None  # that trains with these settings; None if they are not on disk any more
    folder: Path

    def __str__(self) -> str:
        first = self.runs.lines[0].result
        title, n = metric_named(first.metric).title, self.num_settings
        which = "the only settings" if n == 1 else f"{n} settings, the best by validation {title}"
        lines = {"data set": f"{first.dataset}: {which}"}
        lines["best"] = f"{self.runs.method}, validation {_score(self.runs, 'val')}, test {_score(self.runs, 'value')}"
        if self.second is not None:
            lines["next"] = f"{self.second.method}, validation {_score(self.second, 'val')}; {self._sure()}"
        if self.left_out:
            lines["left out"] = f"{self.left_out} runs with another metric, split or content of the data"
        lines["command"] = self.command or f"unknown: the settings were in {relative_path(self.folder)}/config.yaml"
        lines["folder"] = relative_path(self.folder)
        return "\n".join(f"{key:<12}{value}" for key, value in lines.items())

    def _sure(self) -> str:
        p, name = self.difference
        if math.isnan(p):
            return f"{name}: train both with runs=5 to see whether they differ"
        text = "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"
        return f"{text} ({name})" + ("" if p < 0.05 else ": they may well be equal")


def best(dataset: str, results: str | Path = "outputs/results.jsonl", metric: str | None = None) -> Best:
    """Return the settings that validation prefers among the runs on a data set, never by their test scores.

    The best is the highest mean validation score over seeds and splits, or the lowest where lower is better. Compared
    are the runs with the metric, split and content of the data of the newest one. How sure the order of the two best is
    follows from a t-test of their validation scores (`gat_pyg.report.significance.t_test`); it does not correct for the
    number of settings that were tried.

    Args:
        dataset: its name in the results.
        results: the file of results.
        metric: metric of the runs to compare; by default the newest run's.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or no run on the data set or with the metric.
        ImportError: if SciPy is missing.

    >>> best("cora", "nowhere.jsonl")
    Traceback (most recent call last):
    FileNotFoundError: nowhere.jsonl does not exist. Give the results.jsonl that a run appended to, ...
    """
    lines = lines_of(results)
    its = [line for line in lines if line.result.dataset == dataset]
    if not its:
        names = sorted({line.result.dataset for line in lines})
        raise ValueError(f"{results} has no run on {dataset}.{similar(dataset, names)}")
    of_metric = [line for line in its if metric in (None, line.result.metric)]
    if not of_metric:
        names = sorted({line.result.metric for line in its})
        raise ValueError(f"{results} has no run on {dataset} with metric={metric}, expected {' or '.join(names)}.")
    newest = max(of_metric, key=lambda line: line.result.timestamp).result
    same = [line for line in of_metric if (line.result.metric, line.result.data) == (newest.metric, newest.data)]
    groups = [runs for groups in gathered(same).values() for runs in groups]
    first, *others = sorted(groups, key=lambda runs: runs.quality, reverse=True)
    second = others[0] if others else None
    difference = Significance(math.nan, "") if second is None else t_test(*map(_vals, (first, second)))
    folders = [Path(line.result.run_dir) for line in first.lines]
    command = command_of(folders[0], len({line.result.seed for line in first.lines}))
    folder = Path(os.path.commonpath([path.absolute() for path in folders]))
    return Best(first, second, difference, len(groups), len(its) - len(same), command, folder)


def _vals(runs: Runs) -> dict[tuple[int, int | None], float]:
    return scores_of((line.result for line in runs.lines), "val")


def _score(runs: Runs, key: Literal["value", "val"]) -> str:
    """Return the mean ± std of a score."""
    scores = scores_of((line.result for line in runs.lines), key).values()
    text = metric_named(runs.lines[0].result.metric).text(*scores)
    return text if len(scores) == 1 else f"{text} ({len(scores)} runs)"
