"""The differences from one row of the general table, with their significance."""

from __future__ import annotations

import math

from ..runs.significance import t_test
from .cells import NONE, Cell, Table, difference_cell, ours_cell
from .general import Rows, columns_of


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


def comparison_table(rows: Rows, name: str) -> Table:
    """Return the table of every row's difference from one row on each data set, with its p-value.

    Raises:
        ValueError: if `name` is not the label of exactly one row, or there is nothing to compare.
    """
    base = row_named(rows, name)
    cells = []
    for column in columns_of(rows):
        first = rows[base].get(column)
        for label, its in rows.items():
            one = its.get(column)
            if label == base or one is None or first is None:
                continue
            test = t_test(one.scores, first.scores)
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
