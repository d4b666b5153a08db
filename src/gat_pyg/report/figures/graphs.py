"""The attention of a whole graph, such as a molecule, in a figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.data import Data

from .attended import check_graph, describe, layer_of, pairs, run, times_uniform
from .canvas import ORANGE, Canvas, Panels, ink
from .molecules import molecule_of, picture
from .positions import checked, graph_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

Scale = Literal["uniform", "alpha"]
_SCALES = {"uniform": "attention of layer {} in times uniform", "alpha": "attention coefficients of layer {}"}
BOND = 40.0  # the largest length of an edge, in points
_DPI = 300  # dots per inch in the picture of a molecule
MARGIN = 0.6  # around a graph, in lengths of an edge
PALE, BELOW = "#eeeeee", "#66a6d9"  # colours on which black lines can be seen, as on orange
_TICKS = (
    (0.25, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 4),
    (0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4),
)  # of a wide scale, and a narrow one
_LONGEST = 28  # characters of a name in a title


def graph_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    layer: int = 0,
    head: int | None = None,
    scale: Scale = "uniform",
    labels: Sequence[str] | None = None,
    layout: Tensor | None = None,
    caption: bool = True,
    width: float | None = None,
    axes: Panels = None,
) -> Figure:
    r"""Draw a graph, such as a molecule, with the attention of a layer as the colours of its edges.

    The number on an edge is its coefficient, averaged over both directions and over the heads. The self-loops that
    a layer adds, by which a node attends to itself, are not drawn, so that the numbers around a node have another mean
    than 1.

    A molecule, with the categorical features of OGB or of PyG's `from_smiles`, is drawn by RDKit as a structural
    formula, as pixels even in an SVG. Without RDKit it is drawn by NetworkX, like any other graph.

    Args:
        model: any module whose layers take `return_attention_weights`, ours or PyG's.
        data: a single graph, as the model takes it.
        path: the file to write, if any.
        layer: the attention layer to show, counted from 0.
        head: the head to show, counted from 0; by default the mean of all.
        scale: "uniform" draws coefficients in times uniform, :math:`|\mathcal{N}_i| \alpha_{ij}`, "alpha" draws
            :math:`\alpha_{ij}`, which is larger in small neighbourhoods, such as those of a molecule's ends.
        labels: the names of the N nodes; by default the atoms' symbols, or the nodes' ids if the graph is no molecule.
        layout: `[N, 2]`, the positions of the nodes.
        caption: if false, there is no text below the figure.
        width: the width of the figure in inches, such as 3.3 for a column of a paper; the height follows.
        axes: Matplotlib axes of another figure to draw into, in place of a new figure.

    Raises:
        ImportError: if Matplotlib is missing, or SciPy for a graph that is not a molecule.
        ValueError: if an argument does not fit the model or the graph.

    Example:
        >>> import torch
        >>> from gat_pyg.models import GAT, Readout
        >>> ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
        >>> data = Data(x=torch.randn(6, 16), edge_index=torch.cat([ring, ring.flip(0)], 1))
        >>> figure = graph_figure(Readout(GAT(16, [8], 1, heads=[2, 1])), data, head=0)
        >>> figure.axes[1].get_xlabel()
        'attention of layer 1 in times uniform, head 1'
    """
    shown = Shown.of(model, data, layer, head, scale, layout)
    if labels is not None and len(labels) != shown.num_nodes:
        raise ValueError(f"labels has {len(labels)} names, expected {shown.num_nodes}: one for each node.")
    names = [str(node) for node in range(shown.num_nodes)] if labels is None and shown.molecule is None else labels
    wide, high = ((BOND * (shown.span + 2 * MARGIN)) / 72).clip(1.2, 9.0).tolist()
    canvas = Canvas(1, (max(4.0, wide), high + 0.8), axes, width)
    panel = canvas.panels[0]
    wide, high = canvas.inches(panel)
    colours = _colours(shown.values, scale)
    draw(panel, shown, names, colours, (wide, high - 0.8 * canvas.new), numbers=True)
    if "smiles" in data:
        panel.set_title(shortened(data.smiles, _LONGEST), fontsize="medium")
    _colour_bar(canvas, colours, layer, head, scale)
    described = describe(*shown.attention, shown.num_nodes, layer)
    return canvas.finished(path, f"{_caption(scale)}\n{described}", caption)


# Drawing --------------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A graph with the attention of one layer: lengths are in those of an edge.

    Attributes:
        position: `[N, 2]`, around the origin.
        ends, values: `[2, M]` and `[M]`, the pairs i < j and what is drawn on their edges.
        attention: `(edge_index [2, E], alpha [E, H])` of the layer, with the chosen head only.
        molecule: the RDKit molecule, or None.
    """

    position: NDArray[np.float64]
    ends: Tensor
    values: Tensor
    attention: tuple[Tensor, Tensor]
    molecule: Any

    @classmethod
    def of(
        cls, model: nn.Module, data: Data, layer: int, head: int | None, scale: Scale, layout: Tensor | None = None
    ) -> Shown:
        """Return a graph with the attention of a model's layer, of one head or the mean of all."""
        if scale not in _SCALES:
            raise ValueError(f"scale is {scale!r}, expected 'uniform' or 'alpha'.")
        check_graph(data)
        N = int(data.num_nodes or 0)
        edge_index, alpha = layer_of(run(model, data)[2], layer)
        if head is not None:
            if not 0 <= head < alpha.size(1):
                raise ValueError(f"head is {head}, expected 0 to {alpha.size(1) - 1}: the heads of layer {layer}.")
            alpha = alpha[:, head : head + 1]
        values = times_uniform(edge_index, alpha, N) if scale == "uniform" else alpha
        ends, values = pairs(edge_index, values, "mean")
        molecule = molecule_of(data)
        position = graph_layout(data, molecule) if layout is None else checked(layout, N).double().clone().numpy()
        return cls(centred(position, ends), ends, values, (edge_index, alpha), molecule)

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.position)

    @property
    def span(self) -> NDArray[np.float64]:
        """Width and height."""
        span: NDArray[np.float64] = np.ptp(self.position, axis=0)
        return span


def shortened(text: str, longest: int) -> str:
    """Return the beginning of a text that has more characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def centred(position: NDArray[np.float64], ends: Tensor) -> NDArray[np.float64]:
    """Return positions `[N, 2]` around the origin, in median lengths of the edges `[2, M]`."""
    src, dst = ends.numpy()
    length = np.linalg.norm(position[src] - position[dst], axis=1)
    unit = float(np.median(length)) if len(length) else float(np.ptp(position, axis=0).max())
    centred: NDArray[np.float64] = (position - (position.max(0) + position.min(0)) / 2) / (unit or 1.0)
    return centred


def _colours(values: Tensor, scale: Scale) -> ScalarMappable:
    """Return the colour scale of all values: around 1 in both directions, or from 0."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    largest, smallest = (float(values.max()), float(values.min())) if len(values) else (1.0, 1.0)
    if scale == "alpha":
        return ScalarMappable(Normalize(0, largest), LinearSegmentedColormap.from_list("", [PALE, ORANGE]))
    furthest = min(max(largest, 1 / max(smallest, 0.01), 1.25), 4.0)  # nearly uniform attention stays pale
    colours = LinearSegmentedColormap.from_list("", [BELOW, PALE, ORANGE])
    cast(Any, colours).colorbar_extend = "both" if largest > furthest or smallest < 1 / furthest else "neither"
    return ScalarMappable(LogNorm(1 / furthest, furthest), colours)


def _colour_bar(canvas: Canvas, colours: ScalarMappable, layer: int, head: int | None, scale: Scale) -> None:
    """Add the colour scale below the panel."""
    bar = canvas.figure.colorbar(colours, ax=canvas.panels, location="bottom", fraction=0.04, aspect=50, pad=0.02)
    low, high = colours.get_clim()
    if scale == "uniform":
        ticks = [tick for tick in _TICKS[high < 2] if low <= tick <= high]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
    heads = "mean of heads" if head is None else f"head {head + 1}"
    bar.set_label(f"{_SCALES[scale].format(layer + 1)}, {heads}")


def _caption(scale: Scale) -> str:
    uniform = " (1 is a mean over the neighbourhood)" if scale == "uniform" else ""
    return (
        f"An edge's colour is its attention{uniform}, averaged over both directions; the attention of a node to itself "
        "is not drawn."
    )


def draw(
    axes: Axes,
    shown: Shown,
    names: Sequence[str] | None,
    colours: ScalarMappable,
    inches: tuple[float, float],
    numbers: bool = False,
) -> None:
    """Draw a graph into axes of this size; without names, atoms have their symbols."""
    size = 72 * np.asarray(inches)  # points
    length = min(BOND, *(size / (shown.span + 2 * MARGIN)))  # length of an edge in points
    edges = [(i, j) for i, j in shown.ends.t().tolist()]
    shades = [tuple(shade) for shade in colours.to_rgba(shown.values.numpy()).tolist()]
    texts = [f"{value:.2f}" for value in shown.values.tolist()] if numbers and length > 20 else []
    notes = dict(zip(edges, texts, strict=False))
    axes.set_axis_off()
    if shown.molecule is not None:
        from matplotlib.image import imread

        width, height = (round(_DPI * side) for side in inches)
        shade_of = {pair: shade[:3] for pair, shade in zip(edges, shades, strict=True)}
        png = picture(shown.molecule, shown.position, (width, height), _DPI * BOND / 72, shade_of, notes, names)
        axes.imshow(imread(io.BytesIO(png)))
        return
    import networkx as nx

    graph, place = nx.Graph(), dict(enumerate(shown.position))
    graph.add_nodes_from(range(shown.num_nodes))
    graph.add_edges_from(edges)
    nx.draw_networkx_edges(graph, place, edges, width=0.34 * length, edge_color=shades, ax=axes)
    nx.draw_networkx_edges(graph, place, edges, width=max(0.03 * length, 0.4), edge_color=ink(), ax=axes)
    font, circle = min(max(0.3 * length, 3.5), 10), {"node_color": "white", "edgecolors": ink(), "linewidths": 0.5}
    nx.draw_networkx_nodes(graph, place, node_size=(0.36 * length) ** 2, ax=axes, **circle)
    nx.draw_networkx_labels(graph, place, dict(enumerate(names or ())), font_size=font, ax=axes)
    nx.draw_networkx_edge_labels(graph, place, notes, font_size=0.18 * length, rotate=False, font_color=ink(), ax=axes)
    axes.set_aspect("equal")
    axes.set(xlim=size[0] / length / 2 * np.array([-1, 1]), ylim=size[1] / length / 2 * np.array([-1, 1]))
