"""The attention of a trained model in figures: Figure 2 of the paper, and how far from uniform the attention is.

Every function takes a model and a graph, gives a Matplotlib figure, and writes it where a `path` is given, as PNG, SVG
or PDF by the path's ending. What there is tens of thousands of, edges and dots, are pixels in an SVG too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from .attended import EXTRA, UNKNOWN, Attended, colours, entropies, pairs, places, sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _BLUE, _ORANGE = "#333333", "#0077bb", "#ee7733"


def attention_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    layer: int = 0,
    classes: Sequence[str] | None = None,
    layout: Tensor | None = None,
    seed: int = 0,
) -> Figure:
    r"""Figure 2 of the paper: the first layer's features by t-SNE, the classes as colours, the attention as thickness.

    An edge is as thick as :math:`\sum_{k} \alpha^k_{ij} + \alpha^k_{ji}`; the graph's self-loops are not drawn.

    Args:
        model: any module whose layers take `return_attention_weights`, ours or PyG's.
        data: a graph with `x`, `edge_index` and `y` [N]; without y, the predicted classes are shown.
        path: where to write it.
        layer: which attention layer's coefficients to show, counted from 0.
        classes: the names of the K classes.
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

    seen = Attended.of(model, data, classes)
    ends, weight = pairs(*seen.layer(layer))
    place = places(seen, layout, seed)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="datalim")

    weight, order = weight.sort()  # the thickest above the others
    dense = max(len(weight), 1) ** 0.5
    widest, opaque = min(max(150 / dense, 0.8), 2.5), min(max(25 / dense, 0.05), 0.5)  # points, of 1
    most = float(weight[-1]) or 1.0 if len(weight) else 1.0
    lines = list(place[ends.t()[order]].numpy())
    axes.add_collection(
        LineCollection(
            lines, linewidths=(widest * weight / most).numpy(), colors=_INK, alpha=opaque, rasterized=True, zorder=1
        )
    )
    colour = colours(len(seen.classes))
    dot = min(max(30_000 / seen.num_nodes, 2.5), 60.0)  # points squared
    shade = [UNKNOWN if k < 0 else colour[k] for k in seen.shown.tolist()]
    axes.scatter(place[:, 0], place[:, 1], s=dot, c=shade, linewidths=0, rasterized=seen.num_nodes > 5000, zorder=2)
    axes.autoscale_view()

    there = sorted(set(seen.shown.tolist()), key=lambda k: (k < 0, k))
    named = [("unknown", UNKNOWN) if k < 0 else (seen.classes[k], colour[k]) for k in there]
    dots = [Line2D([], [], marker="o", ls="", ms=8, mew=0, color=shade, label=name) for name, shade in named]
    title = "class" if seen.shown is seen.y else "predicted class"
    columns = 1 + len(dots) // 24
    figure.legend(handles=dots, loc="outside right upper", title=title, ncols=columns, frameon=False)
    thick = [
        Line2D([], [], color=_INK, alpha=0.7, lw=max(2 * widest * part, 0.3), label=f"{most * part:.2g}")
        for part in (1.0, 0.5, 0.2)
    ]
    if len(weight):
        sum_of = r"$\sum_k\ \alpha^k_{ij} + \alpha^k_{ji}$"
        figure.legend(handles=thick, loc="outside right lower", title=sum_of, frameon=False)
    return _written(figure, path)


def entropy_figure(
    model: nn.Module, data: Data, path: str | Path | None = None, *, classes: Sequence[str] | None = None
) -> Figure:
    """Histograms of the entropy of each node's attention, by layer and head, against that of uniform attention.

    Nodes with fewer than two neighbours (themselves counted, where the layer adds self-loops) have nothing to weigh and
    are left out. The further a head is left of uniform, the more it chooses. Arguments and errors as of
    `attention_figure`.
    """
    seen = Attended.of(model, data, classes)
    layers = [(entropies(*pair, seen.num_nodes), sizes(pair[0], seen.num_nodes)) for pair in seen.layers]
    columns = min(max(found.size(1) for found, _ in layers), 4)
    lines = [  # of panels; a layer begins a line of its own
        [(number, head) for head in range(first, min(first + columns, found.size(1)))]
        for number, (found, _) in enumerate(layers)
        for first in range(0, found.size(1), columns)
    ]
    figure = _figure(2.0 + 2.2 * columns, 0.9 + 1.7 * len(lines))
    grid = figure.subplots(len(lines), columns, sharex=True, sharey=True, squeeze=False)
    largest = max(float(size.max()) for _, size in layers)
    bins = torch.linspace(0, 1.001 * math.log(max(largest, 2)), 41).numpy()  # log(largest) itself is in the last
    for line, axes_of_line in zip(lines, grid, strict=True):
        for axes in axes_of_line[len(line) :]:
            axes.set_visible(False)
        for (number, head), axes in zip(line, axes_of_line, strict=False):
            found, size = layers[number]
            several = size > 1
            axes.hist(size[several].log().numpy(), bins, color="#c8c8c8", label="uniform attention")
            axes.hist(
                found[several, head].numpy(), bins, histtype="step", lw=1.4, color=_BLUE, label="the head's attention"
            )
            below = float((size[several].log() - found[several, head]).mean()) if several.any() else 0.0
            note = f"mean {below:.4f} nats\nbelow uniform"
            axes.text(0.98, 0.95, note, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=_BLUE)
            axes.set_title(f"layer {number + 1}, head {head + 1}", fontsize=9)
            axes.tick_params(labelbottom=True)
            _plain(axes)
    figure.supxlabel("entropy of a node's attention (nats)", fontsize=10)
    figure.supylabel("nodes", fontsize=10)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return _written(figure, path)


def degree_figure(
    model: nn.Module, data: Data, path: str | Path | None = None, *, classes: Sequence[str] | None = None
) -> Figure:
    """The largest coefficient of each node, averaged over heads, by how many neighbours it attends over.

    Uniform attention lies on the line 1 / neighbours. Arguments and errors as of `attention_figure`.
    """
    seen = Attended.of(model, data, classes)
    figure = _figure(1.5 + 4.0 * len(seen.layers), 4.0)
    panels = figure.subplots(1, len(seen.layers), sharex=True, sharey=True, squeeze=False)[0]
    most = max(2.0, *(float(sizes(edge_index, seen.num_nodes).max()) for edge_index, _ in seen.layers))
    for number, ((edge_index, alpha), axes) in enumerate(zip(seen.layers, panels, strict=True)):
        size = sizes(edge_index, seen.num_nodes)
        top = scatter(alpha, edge_index[1], dim=0, dim_size=seen.num_nodes, reduce="max").mean(-1)
        among, values = size[size > 0], top[size > 0]
        axes.scatter(among, values, s=6, c=_BLUE, alpha=0.25, linewidths=0, rasterized=True, label="a node")
        distinct = among.unique()
        middle = [float(values[among == count].median()) for count in distinct]
        axes.plot(distinct, middle, color=_ORANGE, lw=1.6, label="median")
        axes.plot(distinct, 1 / distinct, color=_INK, ls="--", lw=1.2, label="uniform")
        axes.set(xscale="log", yscale="log", xlim=(0.9, 1.1 * most), ylim=(0.9 / most, 1.1))
        axes.set(xlabel="neighbours attended over", title=f"layer {number + 1}")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        _plain(axes)
    panels[0].set_ylabel("largest coefficient, mean of heads")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _written(figure, path)


def neighbourhood_figure(
    model: nn.Module,
    data: Data,
    path: str | Path | None = None,
    *,
    nodes: Sequence[int] | None = None,
    layer: int = 0,
    classes: Sequence[str] | None = None,
    largest: int = 10,
) -> Figure:
    """What chosen nodes attend to: the largest coefficients of each neighbourhood, averaged over heads.

    Args:
        model, data, path, layer, classes: as of `attention_figure`.
        nodes: which nodes; where not given, the six whose attention is furthest below uniform in entropy.
        largest: how many neighbours to show of each.

    Raises:
        ImportError: where Matplotlib is missing.
        ValueError: if an argument does not fit the model or the graph.
    """
    seen = Attended.of(model, data, classes)
    edge_index, alpha = seen.layer(layer)
    size = sizes(edge_index, seen.num_nodes)
    if nodes is None:
        below = size.clamp(min=1).log() - entropies(edge_index, alpha, seen.num_nodes).mean(-1)
        nodes = below.topk(min(6, seen.num_nodes)).indices.tolist()
    nodes = [int(node) for node in nodes]
    if not nodes or not all(0 <= node < seen.num_nodes for node in nodes):
        raise ValueError(f"nodes is {nodes}, expected one or more of 0 to {seen.num_nodes - 1}.")
    if largest < 1:
        raise ValueError(f"largest is {largest}, expected at least 1 neighbour of each node.")
    colour = [*colours(len(seen.classes)), UNKNOWN]  # an unknown class is -1
    columns, mean = min(len(nodes), 3), alpha.mean(-1)
    lines, most = -(-len(nodes) // columns), min(largest, int(size[nodes].max()))  # bars alike in all panels
    figure = _figure(0.6 + 3.6 * columns, 0.9 + 3.0 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
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
        if size[node]:
            axes.axvline(1 / float(size[node]), color=_INK, ls="--", lw=1.2)
        title = "unknown class" if seen.shown[node] < 0 else seen.classes[seen.shown[node]]
        among = f"the largest {len(src)} of {int(size[node])} neighbours" if len(src) < size[node] else "all neighbours"
        axes.set_title(f"node {node}, {title}\n{among}", fontsize=9)
        _plain(axes)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [*seen.classes, "unknown"]
    handles: list[Any] = [Patch(color=colour[k], label=names[k]) for k in sorted(there)]
    handles.append(Line2D([], [], color=_INK, ls="--", lw=1.2, label="uniform"))
    figure.supxlabel("coefficient, mean of heads", fontsize=10)
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 8), frameon=False)
    return _written(figure, path)


def _figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, outside pyplot: nothing global, no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need Matplotlib: {EXTRA}") from error
    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _written(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure
