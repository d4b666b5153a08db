"""Figures of a model's attention: their numbers by hand, their files by other readers."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter, to_torch_csr_tensor

import gat_pyg.report
from gat_pyg import GAT, attention_of
from gat_pyg.report.figures.attended import UNKNOWN, Attended, colours, entropies, pairs, sizes, times_uniform
from gat_pyg.report.figures.nodes import attention_figure, neighbourhood_figure
from gat_pyg.report.figures.positions import _tsne, tsne
from tests.graphs import ISOLATED, NO_EDGES, ONE_NODE, RANDOM, REPEATED, SQUARE, Graph
from tests.laws import assert_close
from tests.report.samples import data_of, layout, model

FIGURES = [attention_figure, neighbourhood_figure]


def options_of(draw: Any, data: Data) -> dict[str, Tensor]:
    """Positions in place of t-SNE, which takes long."""
    return {"layout": layout(data)} if draw is attention_figure else {}


# The numbers ----------------------------------------------------------------------------------------------------------


def test_thickness_by_hand() -> None:
    index = torch.tensor([[0, 1, 2, 1, 0, 2], [1, 0, 1, 1, 0, 1]])  # 0 <-> 1, 2 -> 1 twice, two self-loops
    alpha = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.2, 0.1], [0.5, 0.6], [0.7, 0.6], [0.2, 0.1]])
    ends, weight = pairs(index, alpha)
    assert ends.tolist() == [[0, 1], [1, 2]]
    assert_close(weight, torch.tensor([0.1 + 0.2 + 0.3 + 0.4, 0.2 + 0.1 + 0.2 + 0.1]))


def test_thickness_is_the_same_in_both_directions() -> None:
    for graph in SQUARE:
        alpha = torch.rand(graph.index.size(1), 3)
        ends, weight = pairs(graph.index, alpha)
        assert all(map(torch.equal, (ends, weight), pairs(graph.index.flip(0), alpha)))
        assert (ends[0] < ends[1]).all()
        assert_close(weight.sum(), alpha[graph.index[0] != graph.index[1]].sum(), str(graph))


NETS = [
    model(),
    GAT(16, [4], 3, [2, 1], reproduction=True),
    pyg.GATConv(16, 3),
    pyg.GATv2Conv(16, 3),
    pyg.TransformerConv(16, 3),
    pyg.GAT(16, 8, 2, 3, heads=2),
]


@pytest.mark.parametrize("net", NETS, ids=lambda net: f"{type(net).__module__}-{type(net).__name__}")
def test_times_uniform_has_mean_one_over_each_neighbourhood(net: nn.Module) -> None:
    for graph in SQUARE:
        N = graph.num_src
        for edge_index, alpha in Attended.of(net, data_of(graph)).layers if N else ():
            times, size = times_uniform(edge_index, alpha, N), sizes(edge_index, N)
            mean = scatter(times, edge_index[1], dim=0, dim_size=N, reduce="mean")[size > 0]
            assert_close(mean, torch.ones_like(mean), str(graph))
            assert (times <= size[edge_index[1], None] + 1e-4).all()


def test_uniform_attention_is_one_time_uniform_and_has_the_entropy_of_its_neighbourhoods_size() -> None:
    for graph in SQUARE:
        N = graph.num_src
        for edge_index, alpha in Attended.of(model("constant"), data_of(graph)).layers if N else ():
            assert_close(times_uniform(edge_index, alpha, N), torch.ones_like(alpha), str(graph))
            entropy = entropies(edge_index, alpha, N)
            assert_close(entropy, sizes(edge_index, N).log()[:, None].expand_as(entropy), str(graph))


def test_entropy_by_hand() -> None:
    alpha = torch.tensor([[0.25], [0.75], [1.0]])
    entropy = entropies(torch.tensor([[0, 1, 1], [0, 0, 1]]), alpha, 3)
    assert_close(entropy, torch.tensor([[-0.25 * math.log(0.25) - 0.75 * math.log(0.75)], [0.0], [0.0]]))


def test_attended_has_the_output_and_the_attention_of_the_model_in_eval_mode() -> None:
    data, net = data_of(RANDOM), model().train()
    attended = Attended.of(net, data)
    assert net.training and not net._forward_hooks and not net.convs[0]._forward_hooks
    net.eval()
    assert_close(attended.features, net.convs[0](data.x, data.edge_index).detach())
    assert torch.equal(attended.prediction, net(data.x, data.edge_index).argmax(-1))
    for (index, alpha), (expected_index, expected) in zip(attended.layers, attention_of(net, data), strict=True):
        assert torch.equal(index, expected_index) and torch.equal(alpha, expected)


class Turned(nn.Module):
    """Edges from target to source, by PyG's layer or by ours."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = layer(16, 3, heads=2, concat=False, flow="target_to_source")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


@pytest.mark.parametrize("layer", [pyg.GATConv, gat_pyg.GATConv])
def test_dst_is_the_node_that_attends(layer: type[nn.Module]) -> None:
    (edge_index, alpha) = Attended.of(Turned(layer), data_of(RANDOM)).layers[0]
    mass = torch.zeros(40, 2).index_add(0, edge_index[1], alpha)
    assert_close(mass, torch.ones(40, 2))


def test_places_are_the_same_for_the_same_seed() -> None:
    features = torch.randn(60, 60)  # more than are taken
    first = tsne(features)
    _tsne.cache_clear()
    assert torch.equal(tsne(features), first) and first.shape == (60, 2)
    assert tsne(torch.zeros(4, 1)).isfinite().all()


def test_figures_of_a_model_share_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(TSNE, "fit_transform", lambda self, x: calls.append(1) or x[:, :2].copy())
    _tsne.cache_clear()
    net, data = model(), data_of(RANDOM)
    attention_figure(net, data)
    attention_figure(net, data, layer=1)
    assert len(calls) == 1
    attention_figure(net, data, seed=1)
    assert len(calls) == 2
    features = Attended.of(net, data).features
    tsne(features).zero_()
    assert tsne(features).any()  # a changed result does not change the next


def test_colours_differ() -> None:
    for K in (1, 7, 40, 121):
        assert len({*colours(K), UNKNOWN}) == K + 1


def test_two_of_many_classes_have_the_colours_of_two() -> None:
    net, data = GAT(16, [4], 17, heads=[2, 1]), data_of(RANDOM)
    data.y = 3 + 8 * (torch.arange(40) % 2)
    attended = Attended.of(net, data)
    attended = replace(attended, prediction=attended.y)
    assert [attended.colours[3], attended.colours[11]] == colours(2)
    assert {colour for k, colour in enumerate(attended.colours) if k not in (3, 11)} == {UNKNOWN}


def test_names_stored_with_the_model_are_used() -> None:
    net, data = model(), data_of(RANDOM)
    net.preparation = SimpleNamespace(class_names=("a", "b", "c"))
    assert Attended.of(net, data).class_names == ["a", "b", "c"]
    assert Attended.of(net, data, ["x", "y", "z"]).class_names == ["x", "y", "z"]
    net.preparation = SimpleNamespace(class_names=None)
    assert Attended.of(net, data).class_names == ["class 0", "class 1", "class 2"]


def test_one_label_of_several() -> None:
    net, data = model(), data_of(RANDOM)
    data.y = torch.stack([torch.arange(40) % 2, torch.ones(40), torch.full((40,), math.nan)], 1)
    logits = net.eval()(data.x, data.edge_index)
    for label in range(3):
        attended = Attended.of(net, data, label=label)
        assert torch.equal(attended.y, data.y[:, label].nan_to_num(-1).long())
        assert torch.equal(attended.prediction, (logits[:, label] > 0).long())
        assert attended.class_names == [f"without label {label}", f"with label {label}"]
    assert Attended.of(net, data, ["a", "b", "c"], label=1).class_names == ["without b", "with b"]
    for draw in FIGURES:
        draw(net, data, label=0, **options_of(draw, data))


# The figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["uniform", "sum"])
def test_edges_are_as_thick_as_their_attention(scale: Any) -> None:
    data = data_of(RANDOM)
    figure = attention_figure(model(), data, scale=scale, layout=layout(data))
    (lines,) = [each for each in figure.axes[0].collections if isinstance(each, LineCollection)]
    edge_index, alpha = Attended.of(model(), data).layers[0]
    pair, weight = pairs(edge_index, alpha)
    if scale == "uniform":
        pair, weight = pairs(edge_index, times_uniform(edge_index, alpha, 40), "mean")
    assert len(lines.get_segments()) == pair.size(1)
    widths = torch.tensor(np.asarray(lines.get_linewidths()), dtype=torch.float32)
    assert_close(widths / widths.max(), weight.sort().values / weight.max())
    order = weight.sort().indices
    ends = torch.tensor(np.stack(lines.get_segments()), dtype=torch.float32)
    assert_close(ends, layout(data)[pair.t()[order]])


def caption(figure: Any) -> str:
    return " ".join(figure.get_supxlabel().split())


def test_captions_state_how_far_from_uniform_the_attention_is() -> None:
    data = data_of(RANDOM)
    uniform = "are 1.00/1.00/1.00 times uniform, the largest 1.00: attention is nearly a mean."
    described = Attended.of(model("constant"), data).describe(0)
    assert described == f"Layer 1: the 5/50/95 % quantiles of the coefficients {uniform}"
    sharp = model()
    with torch.no_grad():
        sharp.convs[0].att_src.mul_(1e4)
    attended = Attended.of(sharp, data)
    edge_index, alpha = attended.layers[0]
    size = sizes(edge_index, 40)
    times = (alpha * size[edge_index[1], None])[size[edge_index[1]] > 1]
    low, median, high = times.flatten().quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    spread = entropies(edge_index, alpha, 40)[size > 1].exp().mean().item()
    text = attended.describe(0)
    assert f"{low:.2f}/{median:.2f}/{high:.2f} times uniform, the largest {times.max():.2f}: on average" in text
    assert f"spread over {spread:.1f} of the {size[size > 1].mean().item():.1f} nodes of a neighbourhood." in text


@pytest.mark.parametrize("width", [pytest.param(None, marks=pytest.mark.weekly), 3.3])
def test_captions_lie_below_what_they_describe(width: float | None) -> None:
    data = data_of(RANDOM)
    for draw in FIGURES:
        figure = draw(model(), data, width=width, **options_of(draw, data))
        assert Attended.of(model(), data).describe(0) in caption(figure)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        (text,) = [text for text in figure.texts if text.get_text() == figure.get_supxlabel()]
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1, draw
        panels = [axes.get_tightbbox(renderer) for axes in figure.axes if axes.get_visible()]
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        assert not any(box.overlaps(other) for other in [*panels, *legends]), draw
        assert not any(panel.overlaps(legend) for panel in panels for legend in legends), draw
        assert width is None or figure.get_size_inches()[0] == width


def test_figures_for_papers() -> None:
    data = data_of(RANDOM)
    with rc_context({"font.size": 7, "text.color": "red"}):
        yours = Figure((9, 6), layout="constrained")
        panels = yours.subplots(2, 4)
        for draw, axes in zip(FIGURES, (panels[0, 0], panels[1, 0]), strict=True):
            options = options_of(draw, data) | ({"nodes": [3]} if draw is neighbourhood_figure else {})
            assert draw(model(), data, **options, axes=axes) is yours
            assert draw(model(), data, **options, caption=False).get_supxlabel() == ""
            expected = np.size(axes)
            with pytest.raises(ValueError, match=rf"axes has 5 entries, expected {expected} Matplotlib axes: one for"):
                draw(model(), data, **options, axes=panels.flat[:5])
    assert yours.get_supxlabel() == "" and yours.get_size_inches().tolist() == [9, 6]
    assert panels[1, 0].get_xaxis().label.get_size() == 7
    legend = panels[0, 0].get_legend()
    assert {text.get_color() for text in legend.get_texts()} == {"red"}
    yours.draw_without_rendering()
    for width, axes, message in (
        (0.5, None, "width is 0.5, expected at least 1"),
        (3, panels[0, 0], "width is the width"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_figure(model(), data, layout=layout(data), width=width, axes=axes)


def test_figures_are_written(tmp_path: Path) -> None:
    path, data = tmp_path / "new" / "figure.svg", data_of(RANDOM)
    attention_figure(model(), data, path, layout=layout(data))
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}image"))) == 1  # the edges


@pytest.mark.parametrize(
    ("graph", "net"),
    [
        pytest.param(NO_EDGES, model(), marks=pytest.mark.weekly),
        (ONE_NODE, pyg.TransformerConv(16, 3)),
        (ISOLATED, pyg.TransformerConv(16, 3)),
    ],
    ids=["no edges", "one node", "isolated"],
)
def test_every_graph_is_drawn(graph: Graph, net: nn.Module) -> None:
    data = data_of(graph)
    for draw in FIGURES:
        draw(net, data, **options_of(draw, data)).draw_without_rendering()


def test_legends_name_the_classes_that_occur() -> None:
    data = data_of(RANDOM, classes=2)
    data.y[5] = -1
    figure = attention_figure(model(), data, class_names=["one", "two", "three"], layout=layout(data))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two", "unknown"]
    data.y = None
    assert attention_figure(model(), data, layout=layout(data)).legends[0].get_title().get_text() == "predicted class"


def test_chosen_neighbourhoods() -> None:
    data = data_of(REPEATED)
    data.y[2] = -1
    axes = neighbourhood_figure(model("constant"), data, nodes=[0, 2], largest=2).axes
    assert axes[0].get_title() == "node 0 (class: class 0)\nthe largest 2 of 5 neighbours"
    assert axes[1].get_title() == "node 2 (class: unknown)\nall neighbours"
    assert sorted(text.get_text() for text in axes[1].get_yticklabels()) == ["0", "2 (itself)"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([0, 0], abs=1e-6)
    assert "nodes whose attention is furthest" not in caption(neighbourhood_figure(model(), data, nodes=[0]))


def test_the_caption_explains_the_nodes_shown_by_default() -> None:
    data, net = data_of(RANDOM), model()
    edge_index, alpha = Attended.of(net, data).layers[0]
    below = sizes(edge_index, 40).log() - entropies(edge_index, alpha, 40).mean(-1)
    nodes = below.topk(6).indices.tolist()
    figure = neighbourhood_figure(net, data)
    assert [axes.get_title().split(" (")[0] for axes in figure.axes] == [f"node {node}" for node in nodes]
    reason = "These are the 6 of 40 nodes whose attention is furthest from uniform: their entropy is "
    values = f"{below[nodes].min().item():.2g} to {below[nodes].max().item():.2g} nats below that of uniform attention"
    assert f"{reason}{values}, the median node's {below.median().item():.2g}." in caption(figure)


def test_bad_input() -> None:
    data, net = data_of(RANDOM), model()
    several = data.clone()
    several.y = torch.zeros(40, 2)
    matrix = Data(x=data.x, edge_index=to_torch_csr_tensor(data.edge_index, size=(40, 40)))

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GATConv(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index).mean(0)

    for message, call in {
        r"y has shape \(40, 2\), expected \(40,\).*to show: label=0": lambda: neighbourhood_figure(net, several),
        r"label is 1 and y has shape \(40,\), expected \(40, K\)": lambda: neighbourhood_figure(net, data, label=1),
        "label is 3, expected 0 to 2": lambda: neighbourhood_figure(net, several, label=3),
        "scale is 'alpha', expected 'uniform' or 'sum'": lambda: attention_figure(net, data, scale="alpha"),
        "edge_index is a torch.sparse_csr, expected a dense tensor": lambda: neighbourhood_figure(net, matrix),
        "the graph has no nodes": lambda: neighbourhood_figure(
            net, Data(x=data.x[:0], edge_index=data.edge_index[:, :0])
        ),
        r"Pooled gives shape \(3,\), expected \(40, K\)": lambda: neighbourhood_figure(Pooled(), data),
        "no layer of Linear takes return_attention_weights": lambda: neighbourhood_figure(nn.Linear(16, 3), data),
        "class_names has 2 names, expected 3": lambda: neighbourhood_figure(net, data, class_names=["one", "two"]),
        "layer is 2, expected 0 to 1": lambda: attention_figure(net, data, layer=2, layout=layout(data)),
        r"layout has shape \(3, 2\), expected finite numbers \[40, 2\]": lambda: attention_figure(
            net, data, layout=torch.zeros(3, 2)
        ),
        r"nodes is \[40\], expected one or more of 0 to 39": lambda: neighbourhood_figure(net, data, nodes=[40]),
        r"nodes is \[\], expected": lambda: neighbourhood_figure(net, data, nodes=[]),
        "largest is 0, expected at least 1": lambda: neighbourhood_figure(net, data, largest=0),
        "the graph has 3 nodes, expected at least 4": lambda: attention_figure(net, data_of(REPEATED)),
        "output is not finite": lambda: tsne(torch.full((5, 2), math.nan)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("missing", "message", "call"),
    [
        ("matplotlib", "This needs matplotlib", lambda: attention_figure(model(), data_of(RANDOM))),
        ("sklearn", "This needs sklearn", lambda: attention_figure(model(), data_of(RANDOM))),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    missing: str, message: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    _tsne.cache_clear()
    with pytest.raises(ImportError, match=rf"{message}.*pip install 'gat_pyg\[report\]'"):
        call()


def test_importing_the_package_imports_no_drawing_library() -> None:
    code = "import sys, gat_pyg.report; assert not {'matplotlib', 'sklearn', 'lightning'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
