"""The panels, legends and caption of a figure, new or within the caller's; fonts and colours are Matplotlib's settings.

>>> from matplotlib.figure import Figure
>>> yours = Figure()
>>> canvas = Canvas(1, (4.0, 3.0), axes=yours.subplots())
>>> canvas.finished(None, "not drawn", True) is yours
True
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...files import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panels: TypeAlias = "Axes | Sequence[Axes] | np.ndarray[Any, Any] | None"
BLUE, ORANGE = "#0077bb", "#ee7733"
NARROW = 5.0  # inches: with less width, legends are above and below the panels


class Canvas:
    """Panels to draw into.

    Args:
        count: the number of panels.
        size: width and height of a panel in inches, at the default width of the figure.
        axes: the caller's axes, one for each panel; by default those of a new figure, outside of pyplot.
        width: the width of a new figure in inches. Panels keep their proportions, and move to further rows if they
            would be narrower than 60 % of their size.
        columns: the largest number of panels in a row.
        margin: inches on the right of the panels of a new figure, for legends.
        each: what a panel shows, for error messages, such as "layer".

    Attributes:
        figure: the figure that holds the panels.
        panels: the axes, as many as `count`.
        new: true if the figure is not the caller's.

    Raises:
        ImportError: if Matplotlib is missing.
        ValueError: if there are more or fewer axes than panels, or `width` fits no new figure.
    """

    def __init__(
        self,
        count: int,
        size: tuple[float, float],
        axes: Panels = None,
        width: float | None = None,
        columns: int = 4,
        margin: float = 0.0,
        each: str = "panel",
    ) -> None:
        self.new, self._margin = axes is None, 0.0
        if axes is not None:
            import matplotlib.axes

            self.panels: list[Axes] = [*np.ravel(np.asarray(axes, dtype=object))]
            if not all(isinstance(panel, matplotlib.axes.Axes) for panel in self.panels) or len(self.panels) != count:
                raise ValueError(
                    f"axes has {len(self.panels)} entries, expected {count} Matplotlib axes: one for each {each}."
                )
            if width is not None:
                raise ValueError("width is the width of a new figure, but axes is part of one. Leave out one of them.")
            self.figure: Figure = self.panels[0].figure.figure  # the whole, if this is a subfigure
            return
        if width is not None and not 1 <= width < math.inf:
            raise ValueError(f"width is {width}, expected at least 1 inch.")
        columns = min(count, columns)
        if width is None:
            width = columns * size[0] + margin
        self._margin = 0.0 if width < NARROW else margin  # free of captions too
        inner = width - self._margin
        columns = max(1, min(columns, int(inner / (0.6 * size[0]))))
        rows = -(-count // columns)
        self._cell = inner / columns, size[1] * inner / columns / size[0]
        self.figure = new_figure(width, rows * self._cell[1])
        grid = self.figure.subplots(rows, columns, squeeze=False)
        self.panels = list(grid.flat)[:count]
        for rest in grid.flat[count:]:
            rest.set_visible(False)

    def inches(self, panel: Axes) -> tuple[float, float]:
        """Return the width and height of a panel; in a new figure, with its texts."""
        if self.new:
            return self._cell
        box = panel.get_window_extent()
        return float(box.width) / self.figure.dpi, float(box.height) / self.figure.dpi

    def legend(self, handles: Sequence[Any], title: str = "", place: str = "upper") -> None:
        """Add a legend at the upper or lower end of the right side, in a narrow figure above or below the panels."""
        options: dict[str, Any] = {"handles": [*handles], "title": title or None, "frameon": False}
        narrow = self.new and float(self.figure.get_size_inches()[0]) < NARROW
        if place == "lower" and (narrow or not self.new):
            axes = self.panels[-1]
            previous = axes.get_legend()
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(handles), **options)
            if previous is not None:
                axes.add_artist(previous).set_clip_on(False)
        elif not self.new:
            self.panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), **options)
        elif narrow:
            em, (width, height) = points("medium") / 72, self.figure.get_size_inches()
            longest = max(len(str(handle.get_label())) for handle in handles)
            columns = max(1, min(int(width / (em * (0.55 * longest + 4.5))), len(handles)))
            self.figure.set_size_inches(width, height + 1.5 * em * (1 + len(handles) // columns))
            self.figure.legend(loc="outside upper center", ncols=columns, **options)
        else:
            options["loc"] = f"outside right {place}"
            self.figure.legend(ncols=1 + len(handles) // 24, **options)

    def finished(self, path: str | Path | None, text: str, caption: bool) -> Figure:
        """Add the caption below a new figure, which grows by its height, and write the figure if a path is given."""
        return written(self.figure, path, text if self.new and caption else "", self._margin)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with sizes in inches, outside of pyplot: no global state, no window.

    Raises:
        ImportError: if Matplotlib is missing.
    """
    figure: Figure = needs("matplotlib.figure", "report").Figure((width, height), 200, layout="constrained")
    return figure


def written(figure: Figure, path: str | Path | None, caption: str, margin: float = 0.0) -> Figure:
    """Add the caption below the figure, which grows by its height, and write the figure if a path is given."""
    if caption:
        size = points("small")
        width, height = (float(inches) for inches in figure.get_size_inches())
        wrapped = [textwrap.wrap(part, int(126 * (width - margin) / size)) for part in caption.split("\n")]
        lines = [line for part in wrapped for line in part]
        figure.set_size_inches(width, height + 0.15 + 0.018 * size * len(lines))
        figure.supxlabel("\n".join(lines), x=0.1 / width, ha="left", fontsize=size)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def points(size: str) -> float:
    """Return a size of Matplotlib's, such as "small", in points."""
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=size).get_size_in_points())


def ink() -> Any:
    """Return the colour of texts in Matplotlib's settings, which edges and lines have too."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def despine(axes: Axes) -> None:
    """Hide the upper and the right spine."""
    axes.spines[["top", "right"]].set_visible(False)
