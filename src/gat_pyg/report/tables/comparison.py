"""The differences from one row of the general table, with their significance."""

from __future__ import annotations

from ...runs.significance import t_test
from .cells import Row, Table, difference_cell, ours_cell, p_cell
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
    cells: list[Row] = []
    for column in columns_of(rows):
        first = rows[base].get(column)
        for label, its in rows.items():
            one = its.get(column)
            if label == base or one is None or first is None:
                continue
            test = t_test(one.scores, first.scores)
            cells.append(
                {
                    "Data set": " ".join(column.heads),
                    "method": label,
                    "score": ours_cell(one, column.metric),
                    "base": ours_cell(first, column.metric),
                    "difference": difference_cell(one, first, column.metric),
                    "p": p_cell(test.p),
                    "test": test.name,
                }
            )
    if not cells:
        raise ValueError(f"--against {name!r}: no other row has a data set and metric in common with {base}.")
    return Table.of(
        "against",
        f"Every row against {base}.",
        cells,
        (
            "p is two-sided, by a t-test: paired by split and seed over those that both have, or Welch's if they share "
            "fewer than two. It is of each row alone, not corrected for the number of rows. The difference is that of "
            "the means of all runs, also where a paired test has fewer.",
        ),
        columns=("Data set", "method", "score", base, "difference", "p", "test"),
    )
