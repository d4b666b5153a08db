"""The attention of a trained model in figures: Figure 2 of the paper, and how far from uniform the attention is.

Every function takes a model and a graph, returns a Matplotlib figure, and writes it to `path` if one is given, as PNG,
SVG or PDF by the file's suffix. Edges and dots, which may be tens of thousands, are pixels even in an SVG.

Coefficients are in times uniform, |N_i| alpha_ij: 1 corresponds to a mean over the neighbourhood. The caption below
each figure, `figure.get_supxlabel()`, states how far from uniform the attention is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from .attended import EXTRA, UNKNOWN, Attended, entropies, pairs, sizes, times_uniform
from .positions import checked, tsne

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _BLUE, _ORANGE = "#333333", "#0077bb", "#ee7733"
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
    figure = _figure(8.6, 7.2)
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    if scale not in _THICKNESS:
        raise ValueError(f"scale is {scale!r}, expected 'uniform' or 'sum'.")
    attended = Attended.of(model, data, class_names, label)
    edge_index, alpha = attended.layer(layer)
    if scale == "uniform":
        ends, weight = pairs(edge_index, times_uniform(edge_index, alpha, attended.num_nodes), "mean")
    else:
        ends, weight = pairs(edge_index, alpha)
    position = tsne(attended.features, seed) if layout is None else checked(layout, attended.num_nodes)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="datalim")

    weight, order = weight.sort()  # the thickest on top
    density = max(len(weight), 1) ** 0.5
    widest, opacity = min(max(150 / density, 0.8), 2.5), min(max(25 / density, 0.05), 0.5)  # points; from 0 to 1
    largest = float(weight[-1]) or 1.0 if len(weight) else 1.0
    full = max(largest, 4.0) if scale == "uniform" else largest  # drawn widest; nearly uniform edges stay thin
    lines = list(position[ends.t()[order]].numpy())
    widths = (widest * weight / full).numpy()
    axes.add_collection(LineCollection(lines, linewidths=widths, colors=_INK, alpha=opacity, rasterized=True, zorder=1))
    colour = attended.colours
    size = min(max(30_000 / attended.num_nodes, 2.5), 60.0)  # points squared
    shades = [UNKNOWN if k < 0 else colour[k] for k in attended.shown.tolist()]
    is_large = attended.num_nodes > 5000
    axes.scatter(position[:, 0], position[:, 1], s=size, c=shades, linewidths=0, rasterized=is_large, zorder=2)
    axes.autoscale_view()
    _class_legend(figure, attended)
    title, thickness = _THICKNESS[scale]
    smaller = (1.0, 0.5) if scale == "uniform" else (largest / 2, largest / 5)
    levels = [largest, *(level for level in smaller if level < largest)]
    handles = [
        Line2D([], [], color=_INK, alpha=0.7, lw=max(2 * widest * level / full, 0.3), label=f"{level:.3g}")
        for level in levels
    ]
    if len(weight):
        figure.legend(handles=handles, loc="outside right lower", title=title, frameon=False)
    source = "" if layout is not None else "Nodes are placed by t-SNE of the first attention layer's output. "
    return _written(figure, path, f"{source}An edge is as thick as {thickness}.\n{attended.describe(layer)}")


def _class_legend(figure: Figure, attended: Attended) -> None:
    """Add the legend of the classes that occur, unknown ones last."""
    from matplotlib.lines import Line2D

    occurring = sorted(set(attended.shown.tolist()), key=lambda k: (k < 0, k))
    entries = [("unknown", UNKNOWN) if k < 0 else (attended.class_names[k], attended.colours[k]) for k in occurring]
    dots = [Line2D([], [], marker="o", ls="", ms=8, mew=0, color=colour, label=name) for name, colour in entries]
    title = "class" if attended.shown is attended.y else "predicted class"
    columns = 1 + len(dots) // 24
    figure.legend(handles=dots, loc="outside right upper", title=title, ncols=columns, frameon=False)


def entropy_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
) -> Figure:
    """Draw histograms of the entropy of each node's attention, by layer and head, relative to uniform attention.

    At 1 a node takes the mean of its neighbours, at 0 it attends to only one of them. Nodes with fewer than two
    neighbours (including themselves, if the layer adds self-loops) are left out. Arguments and errors as in
    `attention_figure`.
    """
    attended = Attended.of(model, data, class_names, label)
    relative = []
    for edge_index, alpha in attended.layers:
        size = sizes(edge_index, attended.num_nodes)
        relative.append((entropies(edge_index, alpha, attended.num_nodes) / size.log()[:, None])[size > 1])
    columns = min(max(entropy.size(1) for entropy in relative), 4)
    lines = [  # of panels; each layer starts a new line
        [(number, head) for head in range(first, min(first + columns, entropy.size(1)))]
        for number, entropy in enumerate(relative)
        for first in range(0, entropy.size(1), columns)
    ]
    figure = _figure(2.0 + 2.2 * columns, 0.9 + 1.7 * len(lines))
    grid = figure.subplots(len(lines), columns, sharex=True, sharey=True, squeeze=False)
    bins = torch.linspace(0, 1.0001, 41).numpy()  # the last bin includes 1, also if rounded up
    for line, axes_of_line in zip(lines, grid, strict=True):
        for axes in axes_of_line[len(line) :]:
            axes.set_visible(False)
        for (number, head), axes in zip(line, axes_of_line, strict=False):
            entropy = relative[number][:, head]
            axes.hist(entropy.numpy(), bins, color=_BLUE, label="the head's attention")
            axes.axvline(1, color=_INK, ls="--", lw=1.2, label="uniform attention")
            note = f"median {float(entropy.median()):.3f}" if len(entropy) else "no neighbourhoods"
            axes.text(0.5, 0.95, note, transform=axes.transAxes, ha="center", va="top", fontsize=8, color=_BLUE)
            axes.set_title(f"layer {number + 1}, head {head + 1}", fontsize=9)
            axes.set_xlabel("normalised entropy", fontsize=8)
            axes.tick_params(labelbottom=True)
            _despine(axes)
    figure.supylabel("nodes", fontsize=10)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    relation = (
        "Entropy of each node's attention, divided by that of uniform attention: 1 is a mean, 0 is a single neighbour."
    )
    return _written(figure, path, "\n".join([relation, *map(attended.describe, range(len(attended.layers)))]))


def degree_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
) -> Figure:
    """Draw each node's largest coefficient, in times uniform and averaged over heads, by its number of neighbours.

    Uniform attention lies at 1, attention to a single neighbour on the diagonal. Arguments and errors as in
    `attention_figure`.
    """
    attended = Attended.of(model, data, class_names, label)
    figure = _figure(1.5 + 4.0 * len(attended.layers), 4.0)
    panels = figure.subplots(1, len(attended.layers), sharex=True, sharey=True, squeeze=False)[0]
    most = max(2.0, *(float(sizes(edge_index, attended.num_nodes).max()) for edge_index, _ in attended.layers))
    for number, ((edge_index, alpha), axes) in enumerate(zip(attended.layers, panels, strict=True)):
        size = sizes(edge_index, attended.num_nodes)
        times = times_uniform(edge_index, alpha, attended.num_nodes)
        top = scatter(times, edge_index[1], dim=0, dim_size=attended.num_nodes, reduce="max").mean(-1)
        among, values = size[size > 0], top[size > 0]
        axes.scatter(among, values, s=6, c=_BLUE, alpha=0.25, linewidths=0, rasterized=True, label="a node")
        distinct = among.unique()
        middle = [float(values[among == count].median()) for count in distinct]
        axes.plot(distinct, middle, color=_ORANGE, lw=1.6, label="median")
        axes.axhline(1, color=_INK, ls="--", lw=1.2, label="uniform")
        axes.plot([1, most], [1, most], color=_INK, ls=":", lw=1.2, label="all on one neighbour")
        axes.set(xscale="log", yscale="log", xlim=(0.9, 1.1 * most), ylim=(0.9, 1.1 * most))
        axes.set(xlabel="neighbours attended over", title=f"layer {number + 1}")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        _despine(axes)
    panels[0].set_ylabel("largest coefficient, times uniform")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _written(figure, path, "\n".join(map(attended.describe, range(len(attended.layers)))))


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
) -> Figure:
    """Draw the largest coefficients in the neighbourhoods of a few nodes, in times uniform, averaged over heads.

    Args:
        model, data, path, layer, class_names, label: as in `attention_figure`.
        nodes: the nodes to show; by default the six whose attention is furthest from uniform, by how far their entropy
            is below that of uniform attention. The caption states this difference, also for the median node.
        largest: the number of neighbours to show for each node.

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
    colour = [*attended.colours, UNKNOWN]  # an unknown class is -1
    columns, mean = min(len(nodes), 3), times_uniform(edge_index, alpha, attended.num_nodes).mean(-1)
    lines, most = -(-len(nodes) // columns), min(largest, int(size[nodes].max()))  # bars alike in all panels
    figure = _figure(0.6 + 3.6 * columns, 0.9 + 3.0 * lines)
    panels = figure.subplots(lines, columns, sharex=True, squeeze=False).flatten()
    for axes in panels[len(nodes) :]:
        axes.set_visible(False)
    occurring: set[int] = set()
    for node, axes in zip(nodes, panels, strict=False):
        edges = (edge_index[1] == node).nonzero().view(-1)
        edges = edges[mean[edges].argsort(descending=True)][:largest]
        src = edge_index[0, edges].tolist()
        rows, classes = range(len(src)), attended.shown[src].tolist()
        occurring.update(classes)
        axes.barh(rows, mean[edges].numpy(), color=[colour[k] for k in classes])
        axes.set_yticks(rows, [f"{j} (itself)" if j == node else str(j) for j in src])
        axes.set_ylim(most - 0.4, -0.6)
        axes.axvline(1, color=_INK, ls="--", lw=1.2)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("times uniform", fontsize=8)
        title = "unknown class" if attended.shown[node] < 0 else attended.class_names[attended.shown[node]]
        among = f"the largest {len(src)} of {int(size[node])} neighbours" if len(src) < size[node] else "all neighbours"
        axes.set_title(f"node {node}, {title}\n{among}", fontsize=9)
        _despine(axes)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [*attended.class_names, "unknown"]
    handles: list[Any] = [Patch(color=colour[k], label=names[k]) for k in sorted(occurring)]
    handles.append(Line2D([], [], color=_INK, ls="--", lw=1.2, label="uniform"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 2 * columns), frameon=False)
    return _written(
        figure, path, f"Coefficients in times uniform, mean of heads.{selection}\n{attended.describe(layer)}"
    )


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


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure, with sizes in inches, outside of pyplot: no global state, no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need Matplotlib: {EXTRA}") from error
    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def _despine(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _written(figure: Figure, path: str | Path | None, caption: str) -> Figure:
    """Add the caption below the figure, which grows by its height, and write the figure if a path is given."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    lines = [line for paragraph in caption.split("\n") for line in textwrap.wrap(paragraph, int(14 * width))]
    figure.set_size_inches(width, height + 0.15 + 0.16 * len(lines))
    figure.supxlabel("\n".join(lines), x=0.1 / width, ha="left", fontsize=9, color=_INK)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure
