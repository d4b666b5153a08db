"""The paper's numbers, from the fact sheet `published.csv`."""

from __future__ import annotations

import csv
import functools
from importlib import resources
from typing import NamedTuple


class Printed(NamedTuple):
    """A number in the paper; NaN if it has none."""

    mean: float
    std: float
    runs: str
    source: str


@functools.cache
def published() -> dict[tuple[str, str, str], Printed]:
    """Return the paper's numbers by (table, row, data set), in the paper's order.

    >>> published()["2", "GAT", "cora"].mean
    83.0
    """
    with resources.files("gat_pyg.experiments").joinpath("published.csv").open(encoding="utf-8") as file:
        return {
            (row["table"], row["row"], row["dataset"]): Printed(
                float(row["mean"] or "nan"), float(row["std"] or "nan"), row["runs"], row["source"]
            )
            for row in csv.DictReader(file)
        }
