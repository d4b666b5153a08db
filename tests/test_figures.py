"""Figures of a model's attention: their numbers by hand, their files by other readers."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from matplotlib.collections import LineCollection
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor

import gat_pyg.report
from gat_pyg import GAT, attention_of
from gat_pyg.report.attended import UNKNOWN, Attended, colours, entropies, pairs, sizes, tsne
from gat_pyg.report.figures import attention_figure, degree_figure, entropy_figure, neighbourhood_figure
from graphs import ISOLATED, LOOPS, NO_EDGES, ONE_NODE, RANDOM, REPEATED, SQUARE, Graph
from laws import assert_close

FIGURES = [attention_figure, entropy_figure, degree_figure, neighbourhood_figure]


def data_of(graph: Graph, classes: int = 3) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(graph.num_src, 16, generator=generator)
    return Data(x=x, edge_index=graph.index, y=torch.arange(graph.num_src) % classes)


def model(mechanism: str = "additive") -> GAT:
    torch.manual_seed(0)
    return GAT(16, [4], 3, heads=[2, 1], mechanism=mechanism)


def layout(data: Data) -> Tensor:
    return torch.randn(data.num_nodes, 2, generator=torch.Generator().manual_seed(1))


# The numbers ----------------------------------------------------------------------------------------------------------


def test_thickness_by_hand() -> None:
    index = torch.tensor([[0, 1, 2, 1, 0, 2], [1, 0, 1, 1, 0, 1]])  # 0 <-> 1, 2 -> 1 twice, two self-loops
    alpha = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.2, 0.1], [0.5, 0.6], [0.7, 0.6], [0.2, 0.1]])
    found, weight = pairs(index, alpha)
    assert found.tolist() == [[0, 1], [1, 2]]
    assert_close(weight, torch.tensor([0.1 + 0.2 + 0.3 + 0.4, 0.2 + 0.1 + 0.2 + 0.1]))


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_thickness_does_not_know_directions(graph: Graph) -> None:
    alpha = torch.rand(graph.index.size(1), 3)
    found, weight = pairs(graph.index, alpha)
    turned, same = pairs(graph.index.flip(0), alpha)
    assert torch.equal(found, turned)
    assert_close(weight, same)
    assert (found[0] < found[1]).all()
    apart = graph.index[0] != graph.index[1]
    assert_close(weight.sum(), alpha[apart].sum())


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_uniform_attention_has_the_entropy_of_its_neighbourhoods_size(graph: Graph) -> None:
    if not graph.num_src:
        return
    for edge_index, alpha in Attended.of(model("constant"), data_of(graph)).layers:
        size = sizes(edge_index, graph.num_src)
        found = entropies(edge_index, alpha, graph.num_src)
        assert_close(found, size.log()[:, None].expand_as(found), str(graph))


def test_entropy_by_hand() -> None:
    alpha = torch.tensor([[0.25], [0.75], [1.0]])
    found = entropies(torch.tensor([[0, 1, 1], [0, 0, 1]]), alpha, 3)
    assert_close(found, torch.tensor([[-0.25 * math.log(0.25) - 0.75 * math.log(0.75)], [0.0], [0.0]]))


def test_what_is_seen_of_a_model() -> None:
    data, net = data_of(RANDOM), model().train()
    seen = Attended.of(net, data)
    assert net.training and not net._forward_hooks and not net.convs[0]._forward_hooks
    net.eval()
    assert_close(seen.features, net.convs[0](data.x, data.edge_index).detach())
    assert torch.equal(seen.prediction, net(data.x, data.edge_index).argmax(-1))
    for (index, alpha), (expected_index, expected) in zip(seen.layers, attention_of(net, data), strict=True):
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


@pytest.mark.parametrize(
    "net",
    [
        pyg.GATConv(16, 3),
        pyg.GATv2Conv(16, 3),
        pyg.TransformerConv(16, 3),
        pyg.GAT(16, 8, 2, 3, heads=2),
        GAT(16, [4], 3, [2, 1], reproduction=True),
    ],
    ids=lambda net: f"{type(net).__module__.partition('.')[0]}-{type(net).__name__}",
)
def test_any_model_that_returns_its_attention(net: nn.Module) -> None:
    data = data_of(RANDOM)
    for figure in FIGURES[1:]:
        figure(net, data)
    attention_figure(net, data, layout=layout(data))


def test_places_are_the_same_for_the_same_seed() -> None:
    features = torch.randn(40, 60)  # more than are taken
    assert torch.equal(tsne(features), tsne(features))
    assert tsne(features).shape == (40, 2)
    assert tsne(torch.zeros(4, 1)).isfinite().all()


def test_colours_differ() -> None:
    for K in (1, 7, 40, 121):
        assert len({*colours(K), UNKNOWN}) == K + 1


# The figures ----------------------------------------------------------------------------------------------------------


def test_edges_are_as_thick_as_their_attention() -> None:
    data = data_of(RANDOM)
    figure = attention_figure(model(), data, layout=layout(data))
    (lines,) = [found for found in figure.axes[0].collections if isinstance(found, LineCollection)]
    found, weight = pairs(*Attended.of(model(), data).layers[0])
    assert len(lines.get_segments()) == found.size(1)
    widths = torch.tensor(np.asarray(lines.get_linewidths()), dtype=torch.float32)
    assert_close(widths / widths.max(), weight.sort().values / weight.max())
    order = weight.sort().indices
    ends = torch.tensor(np.stack(lines.get_segments()), dtype=torch.float32)
    assert_close(ends, layout(data)[found.t()[order]])


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_written_files_can_be_read(figure: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / f"figure.{suffix}"
    figure(model(), data_of(RANDOM), path)
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    if figure is attention_figure:
        assert len(list(root.iter("{http://www.w3.org/2000/svg}image"))) == 1  # the edges


@pytest.mark.parametrize("net", [GAT(16, [4], 3, [2, 1]), pyg.TransformerConv(16, 3)], ids=["loops", "no loops"])
@pytest.mark.parametrize("graph", [NO_EDGES, ONE_NODE, ISOLATED, LOOPS], ids=str)
def test_every_graph_is_drawn(graph: Graph, net: nn.Module) -> None:
    data = data_of(graph)
    for figure in FIGURES:
        options = {"layout": layout(data)} if figure is attention_figure else {}
        figure(net, data, **options).draw_without_rendering()


def test_legends_name_what_is_there() -> None:
    data = data_of(RANDOM, classes=2)
    data.y[5] = -1
    figure = attention_figure(model(), data, classes=["one", "two", "three"], layout=layout(data))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two", "unknown"]
    data.y = None
    assert attention_figure(model(), data, layout=layout(data)).legends[0].get_title().get_text() == "predicted class"


def test_chosen_neighbourhoods() -> None:
    data = data_of(REPEATED)
    data.y[2] = -1
    axes = neighbourhood_figure(model("constant"), data, nodes=[0, 2], largest=2).axes
    assert axes[0].get_title() == "node 0, class 0\nthe largest 2 of 5 neighbours"
    assert axes[1].get_title() == "node 2, unknown class\nall neighbours"
    assert sorted(text.get_text() for text in axes[1].get_yticklabels()) == ["0", "2 (itself)"]
    assert [bar.get_width() for bar in axes[0].patches] == pytest.approx([0.2, 0.2])


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
        r"y has shape \(40, 2\), expected \(40,\)": lambda: entropy_figure(net, several),
        "edge_index is a torch.sparse_csr, expected a dense tensor": lambda: entropy_figure(net, matrix),
        "the graph has no nodes": lambda: entropy_figure(net, Data(x=data.x[:0], edge_index=data.edge_index[:, :0])),
        r"Pooled gives shape \(3,\), expected \(40, K\)": lambda: entropy_figure(Pooled(), data),
        "no layer of Linear takes return_attention_weights": lambda: entropy_figure(nn.Linear(16, 3), data),
        "classes has 2 names, expected 3": lambda: entropy_figure(net, data, classes=["one", "two"]),
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


@pytest.mark.parametrize(("missing", "message"), [("matplotlib", "figures need"), ("sklearn", "the places of")])
def test_what_to_install_is_told(missing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{message}.*pip install 'gat_pyg\[report\]'"):
        attention_figure(model(), data_of(RANDOM))


def test_the_package_stays_light() -> None:
    code = "import sys, gat_pyg.report; assert not {'matplotlib', 'sklearn', 'lightning'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
