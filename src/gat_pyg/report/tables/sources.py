"""Where every number comes from: the tables of the runs and of the files of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...runs.groups import Gathered, Key, Line, Runs
from ...runs.result import PACKAGES, SOURCE
from .cells import NAMES, NONE, Row, Table, places, ranges, spread


def source_tables(
    runs: Gathered, lines: Sequence[Line], is_shown: Callable[[Key, Runs], bool] = lambda key, one: True
) -> list[Table]:
    """Return the table of all groups of runs with their lines, and that of the files that were read.

    Args:
        runs: the groups of runs.
        lines: all lines.
        is_shown: returns True if another table shows a group of runs.
    """
    files = {file: n for n, file in enumerate(dict.fromkeys(line.file for line in lines), start=1)}
    rows: list[Row] = []
    for key, one in _groups(runs):
        results = [line.result for line in one.lines]
        rows.append(
            {
                "Method": one.method,
                "data set": NAMES.get(key.dataset, key.dataset),
                "config_hash": one.setting or NONE,
                "shown": "yes" if is_shown(key, one) else "no",
                "validation": spread(one.val, math.nan, key.metric),
                "test": spread(one.mean, one.std, key.metric),
                "seeds": ranges([result.seed for result in results]),
                "epochs": f"{statistics.fmean(result.epochs for result in results):.0f}",
                "best": f"{statistics.fmean(result.best_epoch for result in results):.0f}",
                "seconds a run": f"{one.seconds:.1f}",
                "device": ", ".join(dict.fromkeys(result.device for result in results)),
                "lines": "; ".join(f"[{files[file]}] {ranges(numbers)}" for file, numbers in places(one).items()),
            }
        )
    of_runs = Table.of(
        "runs",
        "The runs: where every number comes from.",
        rows,
        (
            "config_hash is that of the settings that decide what is learnt. Of several lines of one seed with one "
            "setting the newest counts. Epochs, the best of them (whose weights were tested) and seconds are means; a "
            "method without epochs has 0. Seconds are of the training alone, on a machine that others may have used; "
            "a seed that was trained together with others has its share.",
            *_warnings(runs),
            *_version_notes(runs),
        ),
    )
    count = {file: f"{sum(line.file == file for line in lines)}" for file in files}
    of_files = [{"number": f"[{n}]", "file": file, "lines": count[file]} for file, n in files.items()]
    return [of_runs, Table.of("files", "The files of results.", of_files)]


def _groups(runs: Gathered) -> Iterator[tuple[Key, Runs]]:
    return ((key, one) for key, its in runs.items() for one in its)


def _named(key: Key, one: Runs) -> str:
    return f"{one.method} on {NAMES.get(key.dataset, key.dataset)} ({one.setting or 'none'})"


def _warnings(runs: Gathered) -> Iterable[str]:
    """Yield notes on runs whose test score is no better than that of a constant prediction."""
    for key, one in _groups(runs):
        warnings = [line.result.warning for line in one.lines if line.result.warning]
        if warnings:
            yield f"{_named(key, one)}: {len(warnings)} of {len(one.lines)} runs are {warnings[0]}."


def _version_notes(runs: Gathered) -> Iterable[str]:
    """Yield notes on runs with the same settings whose seeds were trained by different versions of a package."""
    for key, one in _groups(runs):
        texts = []
        for package in (SOURCE, *PACKAGES):
            seeds: dict[str, list[int]] = {}
            for result in (line.result for line in one.lines):
                version = (result.versions or {}).get(package, "unknown") or "none"
                seeds.setdefault(version, []).append(result.seed)
            if len(seeds) > 1:
                texts.append(f"{package} {', '.join(f'{v} (seeds {ranges(n)})' for v, n in seeds.items())}")
        if texts:
            yield f"{_named(key, one)}: the mean is over runs of different versions: {'; '.join(texts)}."
