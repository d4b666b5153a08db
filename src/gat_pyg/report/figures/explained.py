"""The explanation of a prediction as a figure: a panel for each kind of explanation and for the features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ...trained.explain import Explained
from .canvas import BLUE, ORANGE, Canvas, Panels, despine, ink, new_figure, written
from .graphs import BELOW, BOND, MARGIN, PALE, Shown, centred, draw, shortened
from .molecules import molecule_of
from .positions import graph_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EDGES = 10  # of each kind that are drawn, unless there are few
_FEW = 60  # edges that are all drawn
_FEATURES = 8
_LONGEST = 14  # characters of a name
_WIDTH = 9.0  # inches
_LARGEST = (4.3, 3.2)  # inches of a panel
_RING = 320  # points squared


def explanation_figure(
    explained: Explained,
    path: str | Path | None = None,
    *,
    caption: bool = True,
    width: float | None = None,
    axes: Panels = None,
) -> Figure:
    """Draw an explanation: the strongest edges of each kind, and the features with the largest `occlusion`.

    The panels have the same nodes and edges, at the same positions: all of a small graph, or else the ten strongest of
    each kind. An orange edge is evidence for the prediction, a blue one against it. The explained nodes have a ring. A
    title has the prediction without the k strongest edges, and with these alone. A molecule is drawn as in
    `graph_figure`.

    Args:
        explained: the result of `gat_pyg.explain`.
        path: the file to write, if any.
        caption: if false, there is no text below the figure.
        width: the width of a new figure in inches, by default 9; the height follows.
        axes: Matplotlib axes of another figure to draw into, in place of a new figure: for each kind of explanation in
            the order of `explained.kinds`, then for the features if there are any.

    Raises:
        ImportError: if Matplotlib is missing, or SciPy for a graph that is not a molecule.
        ValueError: if there are more or fewer axes than panels, or both `axes` and `width`.
    """
    kinds, edges = explained.kinds, explained.edges
    features = explained.features.head(_FEATURES)
    shown = _strongest(explained)
    nodes, position, molecule = _placed(explained, shown)
    ends = torch.searchsorted(nodes, explained.ends[:, shown])
    position = centred(position, ends)
    inches = (BOND * (np.ptp(position, axis=0) + 2 * MARGIN) / 72).clip(1.0, _LARGEST)
    if axes is None:
        inches = inches * (width or _WIDTH) / _WIDTH
        figure, panels = _panels(kinds, len(features), width or _WIDTH, float(inches[1]))
        figure.suptitle(f"{explained.item}: {explained.prediction}", fontsize="large")
    else:
        names = [*kinds, "features"] if len(features) or not kinds else kinds
        canvas = Canvas(len(names), _LARGEST, axes, width, each="kind of explanation, then for the features")
        figure, panels = canvas.figure, dict(zip(names, canvas.panels, strict=True))
    texts = [shortened(explained.names[node], _LONGEST) for node in nodes.tolist()]
    for kind in kinds:
        values = torch.from_numpy(edges[kind].to_numpy(copy=True))[shown].float()
        graph = Shown(position, *_ordered(ends, values), (ends, values[:, None]), molecule)
        panel = panels[kind]
        size = (float(inches[0]), float(inches[1])) if axes is None else canvas.inches(panel)
        draw(panel, graph, texts, _colours(values), size)
        if molecule is None:
            at = [int(torch.searchsorted(nodes, node)) for node in sorted({*explained.nodes})]
            at_x, at_y = position[at].T
            panel.scatter(at_x, at_y, s=_RING, color=ink(), linewidths=0, zorder=1.5)  # behind the nodes
        row = explained.faithfulness.set_index("kind").loc[kind]
        panel.set_title(f"{kind}: {row.removed:.3g} without, {row.alone:.3g} alone", fontsize="medium")
    if len(features):
        panel = panels["features"]
        values = features.occlusion.to_numpy()
        panel.barh(range(len(values)), values, color=[ORANGE if value > 0 else BLUE for value in values])
        nodes_of = features.node.map(lambda name: shortened(name, _LONGEST))
        labels = (nodes_of + ": " + features.feature + features.value.map(_valued)).tolist()
        panel.set_yticks(range(len(values)), labels)
        panel.invert_yaxis()
        panel.axvline(0, color=ink(), lw=0.8)
        panel.set_xlabel("decrease of the prediction without the feature")
        despine(panel)
    return written(figure, path, _caption(explained, len(shown)) if caption and axes is None else "")


def _panels(kinds: Sequence[str], features: int, width: float, height: float) -> tuple[Figure, dict[str, Axes]]:
    """Return a new figure with two panels of this height in a row, and below them one for the features."""
    rows = -(-len(kinds) // 2)
    names: list[Any] = [[*kinds[2 * row : 2 * row + 2]] for row in range(rows)]
    names = [row if len(row) == 2 or len(kinds) == 1 else [*row, "."] for row in names]
    heights = [height + 0.3] * rows
    if features:
        names.append(["features"] * len(names[0]) if names else ["features"])
        heights.append(0.5 + 0.25 * features)
    figure = new_figure(width, sum(heights) + 0.8)
    return figure, figure.subplot_mosaic(names or [["features"]], height_ratios=heights or None)


def _valued(value: str) -> str:
    return f" = {shortened(value, _LONGEST)}" if value else ""


def _strongest(explained: Explained) -> Tensor:
    """Return the rows of the edges that are drawn."""
    R = len(explained.edges)
    if R <= _FEW:
        return torch.arange(R)
    order = [np.argsort(-np.abs(explained.edges[kind].to_numpy()), kind="stable")[:_EDGES] for kind in explained.kinds]
    rows: Tensor = torch.from_numpy(np.concatenate(order)).unique()
    return rows


def _placed(explained: Explained, shown: Tensor) -> tuple[Tensor, Any, Any]:
    """Return the nodes that are drawn, sorted, their positions `[n, 2]`, and the molecule.

    The molecule is None for another graph, and if only some of its bonds are drawn.
    """
    nodes = torch.cat([explained.ends[:, shown].flatten(), torch.tensor([*explained.nodes], dtype=torch.long)]).unique()
    molecule = molecule_of(explained.graph) if len(shown) == len(explained.edges) else None
    if molecule is not None:
        nodes, position = torch.arange(int(explained.graph.num_nodes or 0)), graph_layout(explained.graph, molecule)
    elif len(nodes):
        ends = torch.searchsorted(nodes, explained.ends[:, shown])
        position = graph_layout(Data(edge_index=ends, num_nodes=len(nodes)), None)
    else:  # a graph without edges
        position = np.zeros((1, 2))
    return nodes, position, molecule


def _ordered(ends: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs i < j and their values, the strongest last, which is drawn on top."""
    order = values.abs().argsort()
    return ends[:, order].sort(0).values, values[order]


def _colours(values: Tensor) -> Any:
    """Return the colour scale of a panel: from blue below 0 to orange."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    largest = float(values.abs().max()) if len(values) else 1.0
    colours = LinearSegmentedColormap.from_list("", [BELOW, PALE, ORANGE])
    return ScalarMappable(Normalize(-(largest or 1.0), largest or 1.0), colours)


def _caption(explained: Explained, count: int) -> str:
    R, table = len(explained.edges), explained.faithfulness
    if not R:
        return "The prediction depends on no edge."
    random = table.set_index("kind").loc["random"]
    drawn = f"The {count} strongest of {R:,} edges" if count < R else f"The {R} edges that the prediction depends on"
    return (
        f"{drawn}: orange for the prediction, blue against it, on a scale of each panel. Titles: the prediction "
        f"{explained.measured}. Of as many random edges: {random.removed:.3g} ± {random.removed_std:.2g} without, "
        f"{random.alone:.3g} ± {random.alone_std:.2g} alone."
    )
