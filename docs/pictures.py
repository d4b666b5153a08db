"""Draw the pictures of the tutorial and of the page on figures into `docs/pictures`, from three finished runs.

gat-pyg dataset=planted hydra.run.dir=outputs/planted
gat-pyg dataset=cora hydra.run.dir=outputs/cora
gat-pyg dataset=molesol training.max_epochs=30 hydra.run.dir=outputs/molesol
python docs/pictures.py outputs
"""

import sys
from pathlib import Path

import numpy as np
import recorded
import torch
from matplotlib.figure import Figure

import gat_pyg
from gat_pyg.data import ogbg, planetoid, planted
from gat_pyg.report.figures.attended import times_uniform

OUT = Path(__file__).parent / "pictures"


def main(runs: Path) -> None:
    """Draw the attention of two models side by side, then of each by itself, and that of six molecules."""
    draw_molecules(runs / "molesol")
    seen = {}
    for name, data in (("planted", planted().test[0]), ("cora", planetoid("cora").test[0])):
        model = gat_pyg.load(runs / name)
        edge_index, alpha = gat_pyg.attention_of(model, data)[0]
        seen[name] = times_uniform(edge_index, alpha, data.num_nodes).flatten().numpy()
        quantiles = np.quantile(seen[name], [0.05, 0.5, 0.95])
        print(f"{name}: 5, 50 and 95 % of the first layer's coefficients are below", *quantiles.round(2))
        options = {"label": 0} if name == "planted" else {}
        gat_pyg.report.neighbourhood_figure(model, data, OUT / f"{name}-nodes.svg", **options)
        if name == "cora":
            gat_pyg.report.attention_figure(model, data).savefig(OUT / "cora-figure2.png", dpi=100)

    def draw(axes: np.ndarray) -> None:
        for axis, (name, title) in zip(axes, (("planted", "planted"), ("cora", "Cora")), strict=True):
            values = seen[name].clip(max=6)
            weights = np.full(len(values), 100 / len(values))
            axis.hist(values, bins=np.linspace(0, 6, 31), color=recorded.BLUE, weights=weights)
            axis.axvline(1, color=recorded.ORANGE, lw=1)
            axis.set_title(title)
            axis.set_xlabel("times uniform (6: 6 and more)")
        axes[0].set_ylabel("coefficients, %")
        axes[1].annotate("a mean", (1, axes[1].get_ylim()[1] * 0.9), xytext=(8, 0), textcoords="offset points")

    recorded.OUT = OUT
    recorded.chart("uniform", draw, (8, 3), columns=2)


def draw_molecules(run: Path) -> None:
    """Draw the three test molecules whose target a model predicts best, and below them the three worst."""
    model, graphs = gat_pyg.load(run), ogbg("ogbg-molesol").test
    predictions, y = gat_pyg.predict(run, graphs)[:, 0], torch.cat([data.y[:, 0] for data in graphs])
    order = (predictions - y).abs().argsort().tolist()
    figure = Figure((13, 8), layout="constrained")
    for panel, index in zip(figure.subplots(2, 3).flat, (*order[:3], *order[:-4:-1]), strict=True):
        gat_pyg.report.graph_figure(model, graphs[index], axes=panel)
        panel.set_title(f"y = {y[index]:.3g}, predicted {predictions[index]:.3g}", fontsize="small")
    figure.savefig(OUT / "molesol-graphs.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
