"""A table of the uncertainty of averaged predictions: calibration errors, coverage and size of sets and intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...runs.groups import Runs
from ...trained.uncertainty import Calibration
from .cells import NONE, Cell, Row, Table
from .general import Rows

LEVEL = 0.9


def uncertainty_tables(rows: Rows) -> list[Table]:
    """Return a list with the table of runs of several seeds, or an empty list if none has its folder.

    Each number is the mean ± standard deviation over the splits.
    """
    lines: list[Row] = []
    notes: list[str] = []
    for label, its in rows.items():
        for column, runs in its.items():
            if not (calibrations := [*_calibrations(runs)]):
                continue
            errors = [each.errors for each in calibrations if each.errors]
            covered = [each for each in calibrations if each.coverage]
            lines.append(
                {
                    "Method": label,
                    "data set": column.heads[0],
                    "calibration error (%)": number_cell([before for before, _ in errors], 1),
                    "after temperature": number_cell([after for _, after in errors], 1),
                    "coverage (%)": number_cell(
                        [statistics.fmean(each.at(LEVEL, each.coverage)) for each in covered], 1
                    ),
                    "size": number_cell([_size(each) for each in covered], 2),
                }
            )
            caveats = dict.fromkeys(each.caveat for each in calibrations if each.caveat)
            notes += [f"{label} on {column.heads[0]}: {text}." for text in caveats]
    if not lines:
        return []
    return [
        Table.of(
            "uncertainty",
            "Uncertainty of the prediction averaged over the seeds of a split.",
            lines,
            (
                "The calibration error is the expected one over 15 bins, on the test. Coverage is the share of test "
                "labels in 90 % prediction sets or intervals, size the mean number of classes in a set, or half the "
                "width of an interval of a single target. Temperature and quantiles are those of the validation.",
                *notes,
            ),
        )
    ]


def _calibrations(runs: Runs) -> Iterator[Calibration]:
    """Yield the calibrations in the folders of runs of several seeds."""
    folders = [Path(line.result.run_dir) for line in runs.lines]
    for folder in dict.fromkeys(each.parent for each in folders if each.name.startswith("seed-")):
        if (calibration := Calibration.read(folder)) is not None:
            yield calibration


def _size(calibration: Calibration) -> float:
    """Return the mean number of classes, or half the width of an interval of a single target; else NaN."""
    if calibration.sizes:
        return float(calibration.at(LEVEL, calibration.sizes))
    quantile = calibration.at(LEVEL, calibration.quantiles)
    return float(quantile[0]) if len(quantile) == 1 else math.nan


def number_cell(values: Sequence[float], digits: int) -> Cell:
    """Return the mean ± standard deviation of several values, a single value alone, and a dash for none or NaN."""
    if not values or any(math.isnan(value) for value in values):
        return Cell(NONE)
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return Cell(f"{statistics.fmean(values):.{digits}f}{std}")
