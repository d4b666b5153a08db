"""Learning curves, from the `metrics.csv` in the folders of runs: of one run, and of the rows of a table."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runs.result import METRICS, result_in
from ..tables.general import Column, Rows, columns_of
from .canvas import Canvas, Panels, despine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STYLES = ("-", "--", ":", "-.")  # line styles: ten rows each, one for each colour
LEGEND_LINE = 0.2  # inches
BAND = (
    "The line is the mean over the runs, and the band is from the smallest to the largest. It ends where the first "
    "run stops."
)


class Band(NamedTuple):
    """A score by epoch: its mean over the runs, and the smallest and largest."""

    epochs: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    runs: int

    def draw(self, panel: Axes, colour: str, label: str, style: str = "-") -> None:
        """Draw the mean as a line and the range as a band."""
        panel.plot(self.epochs, self.mean, color=colour, ls=style, lw=1.4, label=label)
        if self.runs > 1:
            panel.fill_between(self.epochs, self.low, self.high, color=colour, alpha=0.3, lw=0)


def curves_figure(
    run: str | Path,
    path: str | Path | None = None,
    *,
    caption: bool = True,
    width: float | None = None,
    axes: Panels = None,
) -> Figure:
    """Draw the losses of a run by epoch in one panel, and each validation score in another.

    A dotted line is at the best epoch, whose weights are those of the saved model. For several random seeds, lines are
    means and bands are from the smallest to the largest. The run may still be training.

    Args:
        run: the folder of a run, `hydra.run.dir`.
        path: the file to write, if any, as PNG, SVG or PDF by its suffix.
        caption: if false, there is no text below the figure.
        width: the width of the figure in inches, such as 3.3 for a column of a paper; the height follows.
        axes: Matplotlib axes of another figure, for the losses and for each score, in place of a new figure.

    Raises:
        ImportError: if Matplotlib is missing.
        ValueError: if the folder has no metrics, a file cannot be read, or the axes are too few or too many.
    """
    folder = Path(run)
    files = [folder / METRICS] if (folder / METRICS).is_file() else sorted(folder.glob(f"*/{METRICS}"))
    curves = [curves for file in files if any((curves := curves_of(file)).values())]
    if not curves:
        raise ValueError(
            f"{folder} has no {METRICS} with an epoch, expected the folder of a run: hydra.run.dir=FOLDER."
        )
    bands = {name: band for name in curves[0] if (band := band_of([each.get(name, {}) for each in curves])) is not None}
    names = [name for name in bands if name.startswith("val_") and name != "val_loss"]
    canvas = Canvas(1 + len(names), (4.0, 3.0), axes, width, each="score, and one for the losses")
    for name, colour, label in (("train_loss", "C0", "training"), ("val_loss", "C1", "validation")):
        if name in bands:
            bands[name].draw(canvas.panels[0], colour, label)
    canvas.panels[0].set_ylabel("loss")
    canvas.panels[0].legend(frameon=False)
    for name, panel in zip(names, canvas.panels[1:], strict=True):
        bands[name].draw(panel, "C1", "validation")
        panel.set_ylabel(_axis(name.removeprefix("val_")))
    results = [result for each in files if (result := result_in(each.parent)) is not None]
    for panel in canvas.panels:
        for result in results:
            panel.axvline(result.best_epoch, color="C7", ls=":", lw=1.2)
        panel.set_xlabel("epoch")
        despine(panel)
    best = " Dotted: the best epoch." if results else ""
    return canvas.finished(path, f"{BAND * (len(curves) > 1)}{best}".strip(), caption and bool(best or len(curves) > 1))


def scores_figure(rows: Rows, path: str | Path | None = None) -> Figure:
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
            folders = [line.result.run_dir for line in its[column].lines] if column in its else []
            files = [file for folder in folders if folder and (file := Path(folder) / METRICS).is_file()]
            band = band_of([curves_of(file).get(f"val_{column.metric}", {}) for file in files])
            if band is not None:
                bands.setdefault(column, {})[label] = band
    if not bands:
        raise ValueError(
            f"No folder of a run (run_dir in the lines) has a {METRICS} with the validation score, so there are no "
            "learning curves. Leave out --curves, or keep the folders in outputs."
        )
    order = list(rows)
    legend = LEGEND_LINE * max(map(len, bands.values()))  # below each panel, whose size does not depend on it
    canvas = Canvas(len(bands), (4.4, 3.6 + legend), columns=3)
    for panel, (column, drawn) in zip(canvas.panels, bands.items(), strict=True):
        for label, band in drawn.items():
            lap, index = divmod(order.index(label), 10)  # the same colour and style in all panels
            text = "\n".join(textwrap.wrap(f"{label}, {band.runs} run{'s' * (band.runs > 1)}", 68))
            band.draw(panel, f"C{index}", text, STYLES[lap % len(STYLES)])
        panel.set(title=column.heads[0], xlabel="epoch", ylabel=_axis(column.metric))
        panel.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), handlelength=3)
        despine(panel)
    return canvas.finished(path, BAND, True)


def _axis(metric: str) -> str:
    """Return the label of an axis of validation scores, with the unit."""
    return f"validation {Column('', metric).heads[1][:-2]}"


def band_of(curves: Sequence[dict[int, float]]) -> Band | None:
    """Return the mean and range over the curves, up to the last epoch of all, or None without any."""
    curves = [curve for curve in curves if curve]
    epochs = sorted(set.intersection(*map(set, curves))) if curves else []
    if not epochs:
        return None
    values = np.array([[curve[epoch] for epoch in epochs] for curve in curves])
    return Band(np.array(epochs), values.mean(0), values.min(0), values.max(0), len(curves))


def curves_of(path: Path) -> dict[str, dict[int, float]]:
    """Return the values by epoch of each column of a `metrics.csv`.

    Raises:
        ValueError: if the file cannot be read.
    """
    curves: dict[str, dict[int, float]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                epoch = int(row.pop("epoch"))
                for name, value in row.items():
                    if value:
                        curves.setdefault(name, {})[epoch] = float(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, expected an epoch and its scores in each line: {error}.") from error
    return curves
