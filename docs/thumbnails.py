"""Draw the thumbnails of the examples that end without a figure into `docs/thumbnails`.

python docs/thumbnails.py
"""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY, INK = "#0077bb", "#ee7733", "#009988", "#bbbbbb", "#333333"


def graph(nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions `[N, 2]` between 0 and 1, and the pairs `[E, 2]` of nodes that are close to each other."""
    place = np.random.default_rng(seed).random((4 * nodes, 2))
    kept: list[np.ndarray] = []
    for point in place:  # apart from each other
        if len(kept) < nodes and all(np.hypot(*(point - other)) > 0.6 / nodes**0.5 for other in kept):
            kept.append(point)
    place = np.array(kept)
    far = np.hypot(*(place[:, None] - place).transpose(2, 0, 1))
    return place, np.argwhere(np.triu(far < 1.35 / nodes**0.5, 1))


def net(axes: Axes, place: np.ndarray, edges: np.ndarray, colours: object, size: float = 60) -> None:
    """Draw a graph."""
    axes.add_collection(LineCollection(list(place[edges]), colors=GREY, linewidths=1.5, zorder=1))
    axes.scatter(*place.T, s=size, c=colours, linewidths=0, zorder=2)


def box(axes: Axes, x: float, y: float, text: str, colour: str = INK, size: float = 15) -> None:
    """Draw a text in a box."""
    style = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=colour, family="monospace", bbox=style)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.6})


def swap(axes: Axes) -> None:
    """The time of a layer on two graphs of PPI, from the newest recorded file."""
    file = max((DOCS.parent / "benchmarks" / "results").glob("*-2cores-layers.json"))
    rows = {row["way"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if row["case"] == "ppi-1"}
    values = [1000 * statistics.median(rows[way]["step"]) for way in ("pyg", "auto")]
    axes.barh([1, 0], values, color=[GREY, ORANGE], height=0.6)
    for y, name, value in zip((1, 0), ("PyG", "gat_pyg"), values, strict=True):
        axes.text(20, y + 0.42, f"{name}: {value:.0f} ms", va="center", fontsize=16, color=INK)
    axes.set(ylim=(-0.6, 1.7))


def seeds(axes: Axes) -> None:
    """Ten copies of one network."""
    layers = [[(0.2, y) for y in (0.2, 0.4, 0.6)], [(0.45, y) for y in (0.1, 0.3, 0.5, 0.7)], [(0.7, 0.3), (0.7, 0.5)]]
    for copy in reversed(range(10)):
        shift, colour = 0.035 * copy, plt.get_cmap("viridis")(copy / 10)
        for left, right in pairwise(layers):
            for a in left:
                for b in right:
                    line = np.array([a, b]) + shift
                    axes.plot(*line.T, color=colour, lw=0.7, zorder=20 - 2 * copy)
        nodes = np.array([node for layer in layers for node in layer]) + shift
        axes.scatter(*nodes.T, s=70, color=colour, edgecolors="white", linewidths=0.5, zorder=21 - 2 * copy)
    axes.set(xlim=(0.1, 1.1), ylim=(0, 1.1))


def inductive(axes: Axes) -> None:
    """Graphs for training, validation and test."""
    for column, (name, colour) in enumerate({"train": BLUE, "validate": ORANGE, "test": GREEN}.items()):
        for row in range(3 if column == 0 else 1):
            place, edges = graph(8, 10 * column + row)
            net(axes, place * 0.8 + [1.2 * column, row + 0.5 if column == 0 else 1.5], edges, colour, 35)
        axes.text(1.2 * column + 0.4, 0.1, name, ha="center", fontsize=15, color=colour)


def sampled(axes: Axes) -> None:
    """A few nodes of a graph, and sampled neighbours of each."""
    place, edges = graph(70, 1)
    both = np.concatenate([edges, edges[:, ::-1]])
    rng, level = np.random.default_rng(0), np.full(len(place), 2)
    batch = [int(np.argmin(np.hypot(*(place - at).T))) for at in ([0.3, 0.35], [0.75, 0.65])]
    level[batch], lines = 0, []
    for node in batch:
        around = both[both[:, 0] == node, 1]
        chosen = rng.permutation(around)[:3]
        level[chosen] = np.minimum(level[chosen], 1)
        lines += [place[[node, other]] for other in chosen]
    net(axes, place, edges, np.array([ORANGE, BLUE, GREY])[level], 60)
    axes.add_collection(LineCollection(lines, colors=BLUE, linewidths=3, zorder=1.5))


def processes(axes: Axes) -> None:
    """A graph of which each of two processes has one half."""
    place, edges = graph(50, 3)
    net(axes, place, edges, [BLUE if x < 0.5 else ORANGE for x, _ in place])
    axes.axvline(0.5, color=INK, ls="--", lw=1.5)


def export(axes: Axes) -> None:
    """One model as two files."""
    box(axes, 0.2, 0.5, "GAT", BLUE, 20)
    for y, name in ((0.75, "model.pt2"), (0.25, "model.onnx")):
        box(axes, 0.78, y, name)
        arrow(axes, (0.36, 0.5), (0.55, y))
    axes.set(xlim=(0, 1.05), ylim=(0, 1))


def typed(axes: Axes) -> None:
    """Authors, papers and venues."""
    columns = {"author": (0.1, BLUE, "o", 5), "paper": (0.5, ORANGE, "s", 7), "venue": (0.9, GREEN, "^", 3)}
    rng = np.random.default_rng(1)
    places = {name: [(x, y) for y in np.linspace(0.05, 0.85, count)] for name, (x, _, _, count) in columns.items()}
    for paper in places["paper"]:
        for other in ("author", "venue"):
            for index in rng.permutation(len(places[other]))[: 2 if other == "author" else 1]:
                axes.plot(*zip(paper, places[other][index], strict=True), color=GREY, lw=1.5, zorder=1)
    for name, (x, colour, marker, _) in columns.items():
        axes.scatter(*zip(*places[name], strict=True), s=130, c=colour, marker=marker, zorder=2)
        axes.text(x, 1.0, name, ha="center", fontsize=15, color=colour)


def serve(axes: Axes) -> None:
    """A request and its answer."""
    box(axes, 0.5, 0.75, "POST /predict", BLUE, 17)
    box(axes, 0.2, 0.25, "graph", INK)
    box(axes, 0.76, 0.25, "[[0.1, 0.9], …]", INK, 13)
    arrow(axes, (0.2, 0.36), (0.36, 0.63))
    arrow(axes, (0.62, 0.63), (0.74, 0.36))
    axes.set(xlim=(0, 1.05), ylim=(0.05, 0.95))


def line(axes: Axes) -> None:
    """The layers of a model, before and after."""
    for y, names, colour in ((0.72, "GATConv\nGATConv", GREY), (0.22, "gat_pyg.GATConv\ngat_pyg.GATConv", ORANGE)):
        axes.add_patch(
            FancyBboxPatch((0.08, y - 0.13), 0.84, 0.26, boxstyle="round,pad=0.04", fc="none", ec=colour, lw=2)
        )
        axes.text(0.5, y, names, ha="center", va="center", fontsize=15, color=INK, family="monospace")
    axes.annotate("", (0.3, 0.41), (0.3, 0.54), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.6})
    axes.text(0.36, 0.475, "accelerate(model)", va="center", fontsize=14, color=INK, family="monospace")
    axes.set(xlim=(0, 1), ylim=(0, 1))


THUMBNAILS = {
    "swap_the_layer": swap,
    "many_seeds": seeds,
    "inductive": inductive,
    "sampled_training": sampled,
    "two_processes": processes,
    "export": export,
    "heterogeneous": typed,
    "serve": serve,
    "accelerate": line,
}


def main() -> None:
    """Write every thumbnail."""
    (DOCS / "thumbnails").mkdir(exist_ok=True)
    for name, draw in THUMBNAILS.items():
        figure = plt.figure(figsize=(4, 2.8), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.set_axis_off()
        draw(axes)
        figure.savefig(DOCS / "thumbnails" / f"{name}.png", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
