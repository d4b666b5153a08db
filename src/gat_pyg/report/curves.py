"""Learning curves of lines of results, from the `metrics.csv` in the folders of the runs, whose range is a band."""

from __future__ import annotations

import csv
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..experiments.result import METRICS
from .figures import _despine, _figure, _written
from .general import Column, Rows, columns_of
from .runs import Line, Runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STYLES = ("-", "--", ":", "-.")  # line styles: ten rows each, one for each colour
LEGEND_LINE = 0.15  # inches


class Band(NamedTuple):
    """A score by epoch: its mean over the runs, and the smallest and largest."""

    epochs: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    runs: int


def curves_figure(rows: Rows, path: str | Path | None = None) -> Figure:
    """Draw the validation score by epoch: a panel for each data set and metric, a line for each row.

    Args:
        rows: the rows of the general table, `rows_of(gathered(lines))`.
        path: the file to write, if any, as PNG, SVG or PDF by its suffix.

    Raises:
        ImportError: if Matplotlib is missing.
        ValueError: if no run has kept its curve, or a file cannot be read.
    """
    bands: dict[Column, dict[str, Band]] = {}
    for column in columns_of(rows):
        for label, its in rows.items():
            if column in its and (band := band_of(its[column], column.metric)) is not None:
                bands.setdefault(column, {})[label] = band
    if not bands:
        raise ValueError(
            f"No folder of a run (run_dir in the lines) has a {METRICS} with the validation score, so there are no "
            "learning curves. Leave out --curves, or keep the folders in outputs."
        )
    columns, order = min(len(bands), 3), list(rows)
    legend = LEGEND_LINE * max(map(len, bands.values()))  # below each panel, whose size does not depend on it
    figure = _figure(0.6 + 4.4 * columns, (3.6 + legend) * math.ceil(len(bands) / columns))
    panels = figure.subplots(math.ceil(len(bands) / columns), columns, squeeze=False).flatten()
    for axes in panels[len(bands) :]:
        axes.set_visible(False)
    for axes, (column, drawn) in zip(panels, bands.items(), strict=False):
        dataset, metric = column.heads
        for label, band in drawn.items():
            runs = f"{band.runs} run{'s' * (band.runs > 1)}"
            lap, index = divmod(order.index(label), 10)  # the same colour and style in all panels
            colour, style = f"C{index}", STYLES[lap % len(STYLES)]
            text = "\n".join(textwrap.wrap(f"{label}, {runs}", 68))
            axes.plot(band.epochs, band.mean, color=colour, ls=style, lw=1.4, label=text)
            axes.fill_between(band.epochs, band.low, band.high, color=colour, alpha=0.2, lw=0)
        axes.set_title(dataset, fontsize=10)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"validation {metric[:-2]}")
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), handlelength=3)
        _despine(axes)
    caption = "The mean over the runs; the band is from the smallest to the largest. It ends where the first run stops."
    return _written(figure, path, caption)


def band_of(runs: Runs, metric: str) -> Band | None:
    """Return the mean and range over the runs that kept their curves, up to the last epoch of all, or None."""
    curves = [curve for line in runs.lines if (curve := curve_of(line, metric))]
    epochs = sorted(set.intersection(*map(set, curves))) if curves else []
    if not epochs:
        return None
    values = np.array([[curve[epoch] for epoch in epochs] for curve in curves])
    return Band(np.array(epochs), values.mean(0), values.min(0), values.max(0), len(curves))


def curve_of(line: Line, metric: str) -> dict[int, float]:
    """Return the validation score by epoch of one run; empty if it has not kept it.

    Raises:
        ValueError: if the file cannot be read.
    """
    path = Path(line.result.run_dir) / METRICS
    if not line.result.run_dir or not path.is_file():
        return {}
    name = f"val_{metric}"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {int(row["epoch"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, expected an epoch and its scores in each line: {error}.") from error
