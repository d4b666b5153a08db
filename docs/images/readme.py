"""The README's picture, light and dark, from two trained runs.

gat-pyg dataset=cora hydra.run.dir=cora
gat-pyg dataset=planted hydra.run.dir=planted
python docs/images/readme.py cora planted
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import gat_pyg
from gat_pyg.data import planetoid, planted
from gat_pyg.report.figures.attended import Attended, pairs, times_uniform
from gat_pyg.report.figures.positions import tsne

SALIENCE = planted().test[0].x[:, 0]
THEMES = {"light": ("#ffffff", "#24292f"), "dark": ("#0d1117", "#c9d1d9")}  # GitHub's background and ink


def figure2(axes: Axes, seen: Attended, ink: str) -> None:
    """Figure 2 of the paper: t-SNE of the first layer, classes as colours, attention as thickness."""
    edge_index, alpha = seen.layer(0)
    ends, weight = pairs(edge_index, alpha)  # the sum over heads and both directions, as in the paper
    place = tsne(seen.features)
    lines = list(place[ends.t()].numpy())
    axes.add_collection(LineCollection(lines, linewidths=2 * (weight / weight.max()).numpy(), colors=ink, alpha=0.2))
    axes.scatter(*place.t(), s=5, c=[seen.colours[k] for k in seen.shown.tolist()], linewidths=0, zorder=2)
    axes.autoscale_view()
    axes.set_title("Cora: Figure 2 of the paper", color=ink)


def neighbourhood(axes: Axes, seen: Attended, ink: str) -> None:
    """One node (blue) and its neighbours: an edge is as thick as its coefficient in times uniform, a dot as salient."""
    edge_index, alpha = seen.layer(0)
    times = times_uniform(edge_index, alpha, seen.num_nodes).mean(-1)
    node = int(edge_index[1].bincount().argmax())  # the largest neighbourhood
    edges = (edge_index[1] == node).nonzero().view(-1)
    angle = torch.arange(len(edges)) * (2 * torch.pi / len(edges)) + 0.3
    place = torch.stack([angle.cos(), angle.sin()], -1)
    widths = (0.8 * times[edges]).clamp(min=0.5)
    axes.add_collection(
        LineCollection([[xy, (0, 0)] for xy in place.tolist()], linewidths=widths.numpy(), colors="#ee7733")
    )
    src = edge_index[0, edges]
    dots = 40 + 240 * SALIENCE[src]
    axes.scatter(*place.t(), s=dots, c=["#0077bb" if j == node else ink for j in src.tolist()], zorder=2, linewidths=0)
    axes.scatter(0, 0, s=float(40 + 240 * SALIENCE[node]), c="#0077bb", zorder=3, linewidths=0)
    for xy, value in zip((1.28 * place).tolist(), times[edges].tolist(), strict=True):
        axes.text(*xy, f"{value:.1f}", color=ink, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    axes.set_title("planted: one neighbourhood's attention, times uniform", color=ink)


def main(cora: str, generated: str) -> None:
    """Draw both panels from the models in two run folders."""
    drawn = [
        (figure2, Attended.of(gat_pyg.load(cora), planetoid("cora").test[0])),
        (neighbourhood, Attended.of(gat_pyg.load(generated), planted().test[0], label=0)),
    ]
    for theme, (background, ink) in THEMES.items():
        figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained", facecolor=background)
        for axes, (draw, seen) in zip(figure.subplots(1, 2), drawn, strict=True):
            axes.set_axis_off()
            axes.set_aspect("equal")
            draw(axes, seen, ink)
        figure.savefig(Path(__file__).with_name(f"readme-{theme}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
