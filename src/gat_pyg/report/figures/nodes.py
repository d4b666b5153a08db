"""The attention of a trained model in figures: Figure 2 of the paper, and how far from uniform the attention is.

Every function takes a model and a graph, returns a Matplotlib figure, and writes it to `path` if one is given, as PNG,
SVG or PDF by the file's suffix. Edges and dots, which may be tens of thousands, are pixels even in an SVG.

Coefficients are in times uniform, |N_i| alpha_ij: 1 corresponds to a mean over the neighbourhood. The caption below
each figure, `figure.get_supxlabel()`, states how far from uniform the attention is.

Fonts and the colours of texts and lines are those of Matplotlib's settings, such as `rcParams["font.size"]` or a style
sheet. With `axes=`, a figure is drawn into the axes of another one, which keeps its size and gets no caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from .attended import UNKNOWN, Attended, entropies, pairs, sizes, times_uniform
from .canvas import Canvas, Panels, despine, ink
from .positions import checked, tsne

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THICKNESS = {  # the scale -> the legend's title, and the meaning in the caption
    "uniform": ("times uniform", "its coefficients in times uniform, averaged over both directions and all heads"),
    "sum": (r"$\sum_k\ \alpha^k_{ij} + \alpha^k_{ji}$", "its coefficients, summed over both directions and all heads"),
}


def attention_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    layer: int = 0,
    scale: Literal["uniform", "sum"] = "uniform",
    class_names: Sequence[str] | None = None,
    label: int | None = None,
    layout: Tensor | None = None,
    seed: int = 0,
    caption: bool = True,
    width: float | None = None,
    axes: Panels = None,
) -> Figure:
    r"""Figure 2 of the paper: the first layer's features by t-SNE, the classes as colours, the attention as thickness.

    The graph's self-loops are not drawn.

    Args:
        model: any module whose layers take `return_attention_weights`, ours or PyG's.
        data: a graph with `x`, `edge_index` and `y` [N]; without y, the predicted classes are shown.
        path: the file to write, if any.
        layer: the attention layer to show, counted from 0.
        scale: the thickness of an edge. "uniform": its coefficients in times uniform, averaged over both directions
            and all heads. "sum": :math:`\sum_{k} \alpha^k_{ij} + \alpha^k_{ji}`, as in the paper, which is largest
            for the smallest neighbourhoods.
        class_names: the names of the K classes (or labels); by default those of `model.preparation` if the model has
            one, else "class 0", "class 1", ...
        label: for `y` [N, K] of several labels, the one to show.
        layout: `[N, 2]`, the positions of the nodes, in place of t-SNE, which takes nearly all of the time.
        seed: the random seed of t-SNE.
        caption: if false, there is no text below the figure.
        width: the width of the figure in inches, such as 3.3 for a column of a paper; the height follows.
        axes: Matplotlib axes of another figure to draw into, in place of a new figure.

    Raises:
        ImportError: if Matplotlib or scikit-learn is missing.
        ValueError: if an argument does not fit the model or the graph.

    Example:
        >>> from gat_pyg.models import GAT
        >>> ring = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8])
        >>> data = Data(x=torch.randn(8, 16), edge_index=ring, y=torch.arange(8) % 2)
        >>> figure = attention_figure(GAT(16, [8], 2, heads=[8, 1]), data)
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['class 0', 'class 1']
    """
    if scale not in _THICKNESS:
        raise ValueError(f"scale is {scale!r}, expected 'uniform' or 'sum'.")
    canvas = Canvas(1, (6.8, 6.4), axes, width, margin=1.8)
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    attended = Attended.of(model, data, class_names, label)
    edge_index, alpha = attended.layer(layer)
    if scale == "uniform":
        ends, weight = pairs(edge_index, times_uniform(edge_index, alpha, attended.num_nodes), "mean")
    else:
        ends, weight = pairs(edge_index, alpha)
    position = tsne(attended.features, seed) if layout is None else checked(layout, attended.num_nodes)
    panel, colour_of_lines = canvas.panels[0], ink()
    panel.set_axis_off()
    panel.set_aspect("equal", adjustable="datalim")

    weight, order = weight.sort()  # the thickest on top
    density, inches = max(len(weight), 1) ** 0.5, min(canvas.inches(panel))
    widest, opacity = min(max(20 * inches / density, 0.8), 2.5), min(max(13 / density, 0.05), 0.4)  # points; 0 to 1
    largest = float(weight[-1]) or 1.0 if len(weight) else 1.0
    full = max(largest, 4.0) if scale == "uniform" else largest  # drawn widest; nearly uniform edges stay thin
    lines = list(position[ends.t()[order]].numpy())
    widths = (widest * weight / full).numpy()
    edges = {"colors": colour_of_lines, "alpha": opacity, "rasterized": True, "zorder": 1}
    panel.add_collection(LineCollection(lines, linewidths=widths, **edges))
    colour = attended.colours
    size = min(max(700 * inches**2 / attended.num_nodes, 2.0), 60.0)  # points squared
    shades = [UNKNOWN if k < 0 else colour[k] for k in attended.shown.tolist()]
    is_large = attended.num_nodes > 5000
    panel.scatter(position[:, 0], position[:, 1], s=size, c=shades, linewidths=0, rasterized=is_large, zorder=2)
    panel.autoscale_view()
    _class_legend(canvas, attended, attended.shown, marker="o", ls="", ms=8, mew=0)
    title, thickness = _THICKNESS[scale]
    smaller = (1.0, 0.5) if scale == "uniform" else (largest / 2, largest / 5)
    levels = [largest, *(level for level in smaller if level < largest)]
    handles = [
        Line2D([], [], color=colour_of_lines, alpha=0.7, lw=max(2 * widest * level / full, 0.3), label=f"{level:.3g}")
        for level in levels
    ]
    if len(weight):
        canvas.legend(handles, title, "lower")
    source = "" if layout is not None else "Nodes are placed by t-SNE of the first attention layer's output. "
    text = f"{source}An edge is as thick as {thickness}.\n{attended.describe(layer)}"
    return canvas.finished(path, text, caption)


def _class_legend(canvas: Canvas, attended: Attended, classes: Tensor, **style: Any) -> None:
    """Add the legend of the classes that occur, unknown ones last."""
    from matplotlib.lines import Line2D

    occurring = sorted(set(classes.tolist()), key=lambda k: (k < 0, k))
    entries = [("unknown", UNKNOWN) if k < 0 else (attended.class_names[k], attended.colours[k]) for k in occurring]
    handles = [Line2D([], [], color=colour, label=name, **style) for name, colour in entries]
    canvas.legend(handles, "class" if attended.shown is attended.y else "predicted class")


def neighbourhood_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    nodes: Sequence[int] | None = None,
    layer: int = 0,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
    largest: int = 10,
    caption: bool = True,
    width: float | None = None,
    axes: Panels = None,
) -> Figure:
    """Draw the largest coefficients in the neighbourhoods of a few nodes, in times uniform, averaged over heads.

    A bar is the difference from uniform attention: it begins at 1.

    Args:
        model, data, path, layer, class_names, label, caption, width: as in `attention_figure`.
        nodes: the nodes to show; by default the six whose attention is furthest from uniform, by how far their entropy
            is below that of uniform attention. The caption states this difference, also for the median node.
        largest: the number of neighbours to show for each node.
        axes: Matplotlib axes of another figure for each node, in place of a new figure.

    Raises:
        ImportError: if Matplotlib is missing.
        ValueError: if an argument does not fit the model or the graph.
    """
    attended = Attended.of(model, data, class_names, label)
    edge_index, alpha = attended.layer(layer)
    size = sizes(edge_index, attended.num_nodes)
    nodes, selection = _least_uniform(attended, layer) if nodes is None else ([int(node) for node in nodes], "")
    if not nodes or not all(0 <= node < attended.num_nodes for node in nodes):
        raise ValueError(f"nodes is {nodes}, expected one or more of 0 to {attended.num_nodes - 1}.")
    if largest < 1:
        raise ValueError(f"largest is {largest}, expected at least 1 neighbour of each node.")
    colour, names = [*attended.colours, UNKNOWN], [*attended.class_names, "unknown"]  # an unknown class is -1
    mean = times_uniform(edge_index, alpha, attended.num_nodes).mean(-1)
    most = min(largest, int(size[nodes].max()))  # bars alike in all panels
    canvas = Canvas(len(nodes), (3.4, 1.2 + 0.2 * most), axes, width, columns=3, margin=1.4, each="node")
    word = "class" if attended.shown is attended.y else "predicted class"
    drawn: list[int] = []
    ends = [1.0, 1.0]  # of the shared horizontal axis
    for node, panel in zip(nodes, canvas.panels, strict=True):
        edges = (edge_index[1] == node).nonzero().view(-1)
        edges = edges[mean[edges].argsort(descending=True)][:largest]
        src = edge_index[0, edges].tolist()
        rows, classes = range(len(src)), attended.shown[src].tolist()
        drawn += classes
        ends = [min([ends[0], *mean[edges].tolist()]), max([ends[1], *mean[edges].tolist()])]
        panel.barh(rows, mean[edges].numpy() - 1, left=1, color=[colour[k] for k in classes])
        panel.set_yticks(rows, [f"{j} (itself)" if j == node else str(j) for j in src])
        panel.set_ylim(most - 0.4, -0.6)
        panel.axvline(1, color=ink(), ls="--", lw=1.2)
        panel.set_xlabel("times uniform")
        among = f"the largest {len(src)} of {int(size[node])} neighbours" if len(src) < size[node] else "all neighbours"
        panel.set_title(f"node {node} ({word}: {names[attended.shown[node]]})\n{among}", fontsize="medium")
        despine(panel)
    space = max(0.05 * (ends[1] - ends[0]), 0.01)
    for panel in canvas.panels:
        panel.set_xlim(ends[0] - space, ends[1] + space)
    _class_legend(canvas, attended, torch.tensor(drawn, dtype=torch.long), lw=6)
    text = f"Coefficients in times uniform, mean of heads; bars begin at 1.{selection}\n{attended.describe(layer)}"
    return canvas.finished(path, text, caption)


def _least_uniform(attended: Attended, layer: int) -> tuple[list[int], str]:
    """Return the six nodes whose attention is furthest from uniform, and a sentence about them for the caption."""
    edge_index, alpha = attended.layer(layer)
    N = attended.num_nodes
    below = sizes(edge_index, N).clamp(min=1).log() - entropies(edge_index, alpha, N).mean(-1)
    nodes = below.topk(min(6, N)).indices.tolist()
    return nodes, (
        f" These are the {len(nodes)} of {N:,} nodes whose attention is furthest from uniform: their "
        f"entropy is {float(below[nodes].min()):.2g} to {float(below[nodes].max()):.2g} nats below that of uniform "
        f"attention, the median node's {float(below.median()):.2g}."
    )
