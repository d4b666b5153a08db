"""The attention of a trained model in figures: Figure 2 of the paper, and how far from uniform the attention is.

Every function takes a model and a graph, gives a Matplotlib figure, and writes it where a `path` is given, as PNG, SVG
or PDF by the path's ending. What there is tens of thousands of, edges and dots, are pixels in an SVG too.

Coefficients are shown in times uniform, |N_i| alpha_ij: 1 is what a mean over the neighbourhood would give. The caption
under each figure, `figure.get_supxlabel()`, states how far from uniform the attention is.
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

from .attended import EXTRA, UNKNOWN, Attended, entropies, pairs, places, sizes, times_uniform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _BLUE, _ORANGE = "#333333", "#0077bb", "#ee7733"
_THICKNESS = {  # an edge's: the legend's title and the caption's words
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
        path: where to write it.
        layer: which attention layer's coefficients to show, counted from 0.
        scale: what an edge is as thick as. "uniform": the coefficients in times uniform, averaged over both directions
            and all heads. "sum": :math:`\sum_{k} \alpha^k_{ij} + \alpha^k_{ji}`, as in the paper, which is largest
            where neighbourhoods are smallest.
        class_names: the names of the K classes (or labels); by default those of `model.preparation`, where the model
            was loaded with one, else "class 0", "class 1", ...
        label: for `y` [N, K] of several labels, the one to show.
        layout: `[N, 2]`, where the nodes are, in place of t-SNE, which takes nearly all of the time.
        seed: of t-SNE.

    Raises:
        ImportError: where Matplotlib or scikit-learn is missing.
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
    seen = Attended.of(model, data, class_names, label)
    edge_index, alpha = seen.layer(layer)
    if scale == "uniform":
        ends, weight = pairs(edge_index, times_uniform(edge_index, alpha, seen.num_nodes), "mean")
    else:
        ends, weight = pairs(edge_index, alpha)
    place = places(seen, layout, seed)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="datalim")

    weight, order = weight.sort()  # the thickest above the others
    dense = max(len(weight), 1) ** 0.5
    widest, opaque = min(max(150 / dense, 0.8), 2.5), min(max(25 / dense, 0.05), 0.5)  # points, of 1
    most = float(weight[-1]) or 1.0 if len(weight) else 1.0
    full = max(most, 4.0) if scale == "uniform" else most  # what is drawn widest: nearly uniform edges must not be
    lines = list(place[ends.t()[order]].numpy())
    axes.add_collection(
        LineCollection(
            lines, linewidths=(widest * weight / full).numpy(), colors=_INK, alpha=opaque, rasterized=True, zorder=1
        )
    )
    colour = seen.colours
    dot = min(max(30_000 / seen.num_nodes, 2.5), 60.0)  # points squared
    shade = [UNKNOWN if k < 0 else colour[k] for k in seen.shown.tolist()]
    axes.scatter(place[:, 0], place[:, 1], s=dot, c=shade, linewidths=0, rasterized=seen.num_nodes > 5000, zorder=2)
    axes.autoscale_view()

    there = sorted(set(seen.shown.tolist()), key=lambda k: (k < 0, k))
    named = [("unknown", UNKNOWN) if k < 0 else (seen.class_names[k], colour[k]) for k in there]
    dots = [Line2D([], [], marker="o", ls="", ms=8, mew=0, color=shade, label=name) for name, shade in named]
    title = "class" if seen.shown is seen.y else "predicted class"
    columns = 1 + len(dots) // 24
    figure.legend(handles=dots, loc="outside right upper", title=title, ncols=columns, frameon=False)
    title, what = _THICKNESS[scale]
    levels = {most, *(level for level in ((1.0, 0.5) if scale == "uniform" else (most / 2, most / 5)) if level < most)}
    thick = [
        Line2D([], [], color=_INK, alpha=0.7, lw=max(2 * widest * level / full, 0.3), label=f"{level:.3g}")
        for level in sorted(levels, reverse=True)
    ]
    if len(weight):
        figure.legend(handles=thick, loc="outside right lower", title=title, frameon=False)
    where = "" if layout is not None else "Nodes are placed by t-SNE of the first attention layer's output. "
    return _written(figure, path, f"{where}An edge is as thick as {what}.\n{seen.describe(layer)}")


def entropy_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
) -> Figure:
    """Histograms of the entropy of each node's attention, by layer and head, relative to that of uniform attention.

    At 1 a node takes the mean of its neighbours, at 0 it attends to one of them alone. Nodes with fewer than two
    neighbours (themselves counted, where the layer adds self-loops) have nothing to weigh and are left out. Arguments
    and errors as of `attention_figure`.
    """
    seen = Attended.of(model, data, class_names, label)
    relative = []
    for edge_index, alpha in seen.layers:
        size = sizes(edge_index, seen.num_nodes)
        relative.append((entropies(edge_index, alpha, seen.num_nodes) / size.log()[:, None])[size > 1])
    columns = min(max(found.size(1) for found in relative), 4)
    lines = [  # of panels; a layer begins a line of its own
        [(number, head) for head in range(first, min(first + columns, found.size(1)))]
        for number, found in enumerate(relative)
        for first in range(0, found.size(1), columns)
    ]
    figure = _figure(2.0 + 2.2 * columns, 0.9 + 1.7 * len(lines))
    grid = figure.subplots(len(lines), columns, sharex=True, sharey=True, squeeze=False)
    bins = torch.linspace(0, 1.0001, 41).numpy()  # 1 itself is in the last, rounded up too
    for line, axes_of_line in zip(lines, grid, strict=True):
        for axes in axes_of_line[len(line) :]:
            axes.set_visible(False)
        for (number, head), axes in zip(line, axes_of_line, strict=False):
            found = relative[number][:, head]
            axes.hist(found.numpy(), bins, color=_BLUE, label="the head's attention")
            axes.axvline(1, color=_INK, ls="--", lw=1.2, label="uniform attention")
            note = f"median {float(found.median()):.3f}" if len(found) else "no neighbourhoods"
            axes.text(0.5, 0.95, note, transform=axes.transAxes, ha="center", va="top", fontsize=8, color=_BLUE)
            axes.set_title(f"layer {number + 1}, head {head + 1}", fontsize=9)
            axes.set_xlabel("relative entropy", fontsize=8)
            axes.tick_params(labelbottom=True)
            _plain(axes)
    figure.supylabel("nodes", fontsize=10)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    relation = "Entropy of each node's attention, relative to uniform attention: 1 is a mean, 0 is a single neighbour."
    return _written(figure, path, "\n".join([relation, *map(seen.describe, range(len(seen.layers)))]))


def degree_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
) -> Figure:
    """The largest coefficient of each node, in times uniform and averaged over heads, by the number of its neighbours.

    Uniform attention lies at 1, attention to a single neighbour on the diagonal. Arguments and errors as of
    `attention_figure`.
    """
    seen = Attended.of(model, data, class_names, label)
    figure = _figure(1.5 + 4.0 * len(seen.layers), 4.0)
    panels = figure.subplots(1, len(seen.layers), sharex=True, sharey=True, squeeze=False)[0]
    most = max(2.0, *(float(sizes(edge_index, seen.num_nodes).max()) for edge_index, _ in seen.layers))
    for number, ((edge_index, alpha), axes) in enumerate(zip(seen.layers, panels, strict=True)):
        size = sizes(edge_index, seen.num_nodes)
        times = times_uniform(edge_index, alpha, seen.num_nodes)
        top = scatter(times, edge_index[1], dim=0, dim_size=seen.num_nodes, reduce="max").mean(-1)
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
        _plain(axes)
    panels[0].set_ylabel("largest coefficient, times uniform")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _written(figure, path, "\n".join(map(seen.describe, range(len(seen.layers)))))


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
    """The largest coefficients of a few nodes' neighbourhoods, in times uniform, averaged over heads.

    Args:
        model, data, path, layer, class_names, label: as of `attention_figure`.
        nodes: which nodes. By default the six whose attention is furthest from uniform: those whose entropy is the most
            nats below the logarithm of the neighbourhood's size. The caption states it, and that of a median node.
        largest: how many neighbours to show of each.

    Raises:
        ImportError: where Matplotlib is missing.
        ValueError: if an argument does not fit the model or the graph.
    """
    seen = Attended.of(model, data, class_names, label)
    edge_index, alpha = seen.layer(layer)
    size = sizes(edge_index, seen.num_nodes)
    chosen = ""
    if nodes is None:
        below = size.clamp(min=1).log() - entropies(edge_index, alpha, seen.num_nodes).mean(-1)
        nodes = below.topk(min(6, seen.num_nodes)).indices.tolist()
        chosen = (
            f" These are the {len(nodes)} of {seen.num_nodes:,} nodes whose attention is furthest from uniform: their "
            f"entropy is {float(below[nodes].min()):.2g} to {float(below[nodes].max()):.2g} nats below that of uniform "
            f"attention, the median node's {float(below.median()):.2g}."
        )
    nodes = [int(node) for node in nodes]
    if not nodes or not all(0 <= node < seen.num_nodes for node in nodes):
        raise ValueError(f"nodes is {nodes}, expected one or more of 0 to {seen.num_nodes - 1}.")
    if largest < 1:
        raise ValueError(f"largest is {largest}, expected at least 1 neighbour of each node.")
    colour = [*seen.colours, UNKNOWN]  # an unknown class is -1
    columns, mean = min(len(nodes), 3), times_uniform(edge_index, alpha, seen.num_nodes).mean(-1)
    lines, most = -(-len(nodes) // columns), min(largest, int(size[nodes].max()))  # bars alike in all panels
    figure = _figure(0.6 + 3.6 * columns, 0.9 + 3.0 * lines)
    panels = figure.subplots(lines, columns, sharex=True, squeeze=False).flatten()
    for axes in panels[len(nodes) :]:
        axes.set_visible(False)
    there: set[int] = set()
    for node, axes in zip(nodes, panels, strict=False):
        mine = (edge_index[1] == node).nonzero().view(-1)
        mine = mine[mean[mine].argsort(descending=True)][:largest]
        src = edge_index[0, mine].tolist()
        rows, of = range(len(src)), seen.shown[src].tolist()
        there.update(of)
        axes.barh(rows, mean[mine].numpy(), color=[colour[k] for k in of])
        axes.set_yticks(rows, [f"{j} (itself)" if j == node else str(j) for j in src])
        axes.set_ylim(most - 0.4, -0.6)
        axes.axvline(1, color=_INK, ls="--", lw=1.2)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("times uniform", fontsize=8)
        title = "unknown class" if seen.shown[node] < 0 else seen.class_names[seen.shown[node]]
        among = f"the largest {len(src)} of {int(size[node])} neighbours" if len(src) < size[node] else "all neighbours"
        axes.set_title(f"node {node}, {title}\n{among}", fontsize=9)
        _plain(axes)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [*seen.class_names, "unknown"]
    handles: list[Any] = [Patch(color=colour[k], label=names[k]) for k in sorted(there)]
    handles.append(Line2D([], [], color=_INK, ls="--", lw=1.2, label="uniform"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 2 * columns), frameon=False)
    return _written(figure, path, f"Coefficients in times uniform, mean of heads.{chosen}\n{seen.describe(layer)}")


def _figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, outside pyplot: nothing global, no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need Matplotlib: {EXTRA}") from error
    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _written(figure: Figure, path: str | Path | None, caption: str) -> Figure:
    """Put the caption below the figure, which grows by its height, and write it where a path is given."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    lines = [line for part in caption.split("\n") for line in textwrap.wrap(part, int(14 * width))]
    figure.set_size_inches(width, height + 0.15 + 0.16 * len(lines))
    figure.supxlabel("\n".join(lines), x=0.1 / width, ha="left", fontsize=9, color=_INK)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure
