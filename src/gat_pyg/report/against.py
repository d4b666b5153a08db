"""The significance of the differences from one row of the general table, by scipy's t-tests."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .attended import EXTRA
from .cells import NONE, Cell, Table, difference_cell, ours_cell
from .general import Rows, columns_of
from .runs import Runs


class Test(NamedTuple):
    """A p-value, and the test with its number of runs; NaN and the reason if there is no p-value."""

    p: float
    name: str


def t_test(first: Runs, second: Runs) -> Test:
    """Return the two-sided t-test of the difference of two means.

    It is paired by split and seed if the runs share at least two, over these alone; else it is Welch's.

    Raises:
        ImportError: if scipy is missing.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError(f"t-tests need scipy: {EXTRA}") from error
    x, y = first.scores, second.scores
    pairs = sorted(x.keys() & y.keys())
    if len(pairs) > 1:
        splits, seeds = map(set, zip(*pairs, strict=True))
        kind = "seeds" if len(splits) == 1 else "splits" if seeds == {None} else "splits and seeds"
        name, samples = f"paired, {len(pairs)} {kind}", [np.array([x[pair] - y[pair] for pair in pairs])]
    elif min(len(x), len(y)) > 1:
        name, samples = f"Welch, {len(x)} and {len(y)} runs", [np.array(first.values), np.array(second.values)]
    else:
        return Test(math.nan, "needs two runs of both")
    if not all(np.isfinite(sample).all() for sample in samples):
        return Test(math.nan, f"{name}: a score is NaN")
    if not any(map(_varies, samples)):
        return Test(math.nan, f"{name}: nothing varies")
    test = stats.ttest_1samp(samples[0], 0.0) if len(samples) == 1 else stats.ttest_ind(*samples, equal_var=False)
    return Test(float(test.pvalue), name)


def _varies(values: NDArray[np.float64]) -> bool:
    return bool(np.ptp(values) > 1e-9 * max(1.0, float(abs(values).max())))


def row_named(rows: Rows, name: str) -> str:
    """Return the row of this name, or the only row of the method of this name.

    Raises:
        ValueError: if there is none, or several; the message lists the rows.
    """
    its = [label for label in rows if label == name] or [label for label in rows if label.startswith(f"{name} (")]
    if len(its) == 1:
        return its[0]
    what = f"fits {len(its)} rows" if its else "is no row"
    raise ValueError(f"--against {name!r} {what}, expected one of: {'; '.join(its or rows)}.")


def against_table(rows: Rows, name: str) -> Table:
    """Return the table of every row's difference from one row on each data set, with its p-value."""
    base = row_named(rows, name)
    cells = []
    for column in columns_of(rows):
        first = rows[base].get(column)
        for label, its in rows.items():
            one = its.get(column)
            if label == base or one is None or first is None:
                continue
            test = t_test(one, first)
            cells.append(
                (
                    Cell(" ".join(column.heads)),
                    Cell(label),
                    ours_cell(one, column.metric),
                    ours_cell(first, column.metric),
                    difference_cell(one.mean, first.mean, column.metric),
                    Cell(NONE if math.isnan(test.p) else "< 0.0001" if test.p < 1e-4 else f"{test.p:.4f}"),
                    Cell(test.name),
                )
            )
    if not cells:
        raise ValueError(f"--against {name!r}: no other row has a data set and metric in common with {base}.")
    heads = ("Data set", "method", "score", base, "difference", "p", "test")
    return Table(
        name="against",
        caption=f"Every row against {base}.",
        columns=tuple(("", head) for head in heads),
        rows=tuple(cells),
        notes=(
            "p is two-sided, by a t-test: paired by split and seed over those that both have, or Welch's if they share "
            "fewer than two. It is of each row alone, not corrected for the number of rows. The difference is that of "
            "the means of all runs, also where a paired test has fewer.",
        ),
    )
