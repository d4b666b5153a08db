"""Tables for all formats, and their cells: scores, differences and p-values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ...runs.groups import Runs
from ...tasks.metrics import metric_named

NAMES = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed", "ppi": "PPI"}
NONE = "—"


class Cell(NamedTuple):
    """The text of a cell, and its rank in its column if that is the best or the second best."""

    text: str
    rank: int = 0  # 1: bold, 2: underlined
    is_ours: bool = False  # a score of runs, or its place without any


@dataclass(frozen=True)
class Table:
    """A table for all formats: caption, groups and names of columns, rows of cells, and notes below.

    A row has a cell for each column. Adjacent columns of one group share the group's heading. `name` is short and
    unique.
    """

    name: str
    caption: str
    columns: tuple[tuple[str, str], ...]  # (group or "", name)
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        caption: str,
        rows: Sequence[Row],
        notes: Iterable[str] = (),
        columns: Iterable[str] = (),
    ) -> Table:
        """Return a table of rows, cells by the names of columns; `columns` are other names, or those without rows.

        >>> Table.of("t", "A table.", [{"method": "GCN"}]).columns
        (('', 'method'),)
        """
        names = [*columns] or [*next(iter(rows), ())]
        cells = (tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row.values()) for row in rows)
        return cls(name, caption, tuple(("", each) for each in names), tuple(cells), tuple(notes))


Row: TypeAlias = "Mapping[str, Cell | str]"  # by the name of the column


class HasMean(Protocol):
    """Runs, or a published number."""

    @property
    def mean(self) -> float:
        """The mean score."""
        ...


# Cells --------------------------------------------------------------------------------------------------------------


def ours_cell(runs: Runs | None, metric: str) -> Cell:
    """Return the cell of our mean ± std (runs), a dash without any."""
    if runs is None:
        return Cell(NONE, is_ours=True)
    return Cell(f"{spread(runs.mean, runs.std, metric)} ({len(runs.values)})", is_ours=True)


def difference_cell(first: HasMean | None, second: HasMean | None, metric: str) -> Cell:
    """Return the cell of the first mean score minus the second."""
    difference = first.mean - second.mean if first and second else math.nan
    return Cell(signed(difference, metric))


def p_cell(p: float) -> Cell:
    """Return the cell of the p-value of a t-test."""
    return Cell(NONE if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}")


# Text ---------------------------------------------------------------------------------------------------------------


def places(runs: Runs) -> dict[str, list[int]]:
    """Return the line numbers of runs by file."""
    numbers: dict[str, list[int]] = {}
    for line in runs.lines:
        numbers.setdefault(line.file, []).append(line.number)
    return numbers


def spread(mean: float, std: float, metric: str) -> str:
    """Return mean ± std with the digits of the metric.

    >>> from gat_pyg.tasks.metrics import ACCURACY, MICRO_F1
    >>> spread(83.04, 0.71, ACCURACY.name), spread(0.9731, float("nan"), MICRO_F1.name)
    ('83.0 ± 0.7', '0.973')
    """
    if math.isnan(mean):
        return "NaN"
    digits = _digits(metric)
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def signed(difference: float, metric: str) -> str:
    """Return a difference with its sign, or a dash for NaN.

    >>> from gat_pyg.tasks.metrics import ACCURACY, MICRO_F1
    >>> signed(0.26, ACCURACY.name), signed(-0.0031, MICRO_F1.name), signed(-0.01, ACCURACY.name)
    ('+0.3', '−0.003', '0.0')
    """
    if math.isnan(difference):
        return NONE
    text = f"{abs(difference):.{_digits(metric)}f}"
    return text if float(text) == 0 else ("+" if difference > 0 else "−") + text


def _digits(metric: str) -> int:
    return metric_named(metric).digits


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in ascending order, with consecutive ones as ranges.

    >>> ranges([3, 1, 2, 7])
    '1–3, 7'
    """
    bounds: list[list[int]] = []
    for number in sorted(set(numbers)):
        if bounds and bounds[-1][1] == number - 1:
            bounds[-1][1] = number
        else:
            bounds.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in bounds)
