"""Published numbers, of the paper and of the strongest networks of others, from the fact sheet `published.csv`."""

from __future__ import annotations

import csv
import functools
from importlib import resources
from typing import NamedTuple

STRONG = "strong"  # the table of the best results of others


class Printed(NamedTuple):
    """A number in the paper; NaN if it has none. Of the best results of others, `split` is as `split_of` returns it."""

    mean: float
    std: float
    runs: str
    source: str
    split: str = ""


@functools.cache
def published() -> dict[tuple[str, str, str], Printed]:
    """Return the published numbers by (table, row, data set), those of the paper in its order.

    >>> published()["2", "GAT", "cora"].mean
    83.0
    """
    with resources.files(__package__).joinpath("published.csv").open(encoding="utf-8") as file:
        return {
            (row["table"], row["row"], row["dataset"]): Printed(
                float(row["mean"] or "nan"), float(row["std"] or "nan"), row["runs"], row["source"], row["split"] or ""
            )
            for row in csv.DictReader(file)
        }
