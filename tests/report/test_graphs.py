"""Figures of whole graphs: their numbers by the layer itself, their order by hand, their atoms by RDKit."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from matplotlib.colors import to_hex
from torch import Tensor, nn
from torch_geometric.data import Data

import gat_pyg.run
from gat_pyg import GAT
from gat_pyg.data import digits, from_dataset
from gat_pyg.experiments.result import Result, append
from gat_pyg.models import Encoded, Readout
from gat_pyg.report.__main__ import main
from gat_pyg.report.graphs import graph_figure, sheet_figure
from gat_pyg.report.molecules import Molecule, _by_distances, positions
from tests.graphs import ISOLATED, LOOPS, NO_EDGES, ONE_NODE, SQUARE, Graph

# Acetamide with a charged nitrogen, CH3-C(=O)-NH3+: atoms C, C, O, N as OGB has them.
ATOMS = torch.tensor([[5, 4, 5, 3], [5, 3, 5, 0], [7, 1, 5, 0], [6, 4, 6, 3]])
BONDS = torch.tensor([[0, 1], [1, 2], [1, 3]])


def acetamide(pyg_style: bool = False) -> Data:
    x = torch.zeros(4, 9)
    x[:, [0, 2, 3, 4]] = ATOMS.float()
    edge_attr = torch.zeros(6, 3)
    edge_attr[2:4, 0] = 1
    x[:, 0] += pyg_style
    edge_attr[:, 0] += pyg_style
    edges = torch.stack([BONDS, BONDS.flip(1)], 1).view(-1, 2).t()  # both directions of each bond in a row
    return Data(x=x, edge_index=edges, edge_attr=edge_attr, y=torch.zeros(1, 1))


def model(K: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Readout(Encoded(GAT(8, [4], K, heads=[2, 1], edge_dim=8), 8, [10] * 9, [4] * 3)).eval()


def numbers(figure: Any) -> list[float]:
    """The numbers beside the edges, in the order of the pairs i < j."""
    return [float(text.get_text()) for text in figure.axes[0].texts if "." in text.get_text()]


# The numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("scale", ["uniform", "alpha"])
def test_the_numbers_are_those_of_pygs_layer(scale: Any, head: int | None) -> None:
    data, net = acetamide(), model()
    ours = net.model.model.convs[0]
    theirs = pyg.GATConv(8, 4, heads=2, edge_dim=8)
    theirs.load_state_dict(ours.state_dict())
    x, edge_attr = net.model.encoder(data.x), net.model.edge_encoder(data.edge_attr)
    edge_index, alpha = theirs(x, data.edge_index, edge_attr, return_attention_weights=True)[1]
    dense = torch.zeros(4, 4, 2).index_put((edge_index[0], edge_index[1]), alpha.detach())  # [src, dst, H]
    if scale == "uniform":
        dense = dense * torch.tensor([2, 4, 2, 2])[None, :, None]  # the neighbours of dst and itself
    dense = dense.mean(-1) if head is None else dense[:, :, head]
    expected = [float(dense[i, j] + dense[j, i]) / 2 for i, j in BONDS.tolist()]
    figure = graph_figure(net, data, scale=scale, head=head)
    assert numbers(figure) == pytest.approx(expected, abs=0.0051)
    drawn = next(each for each in figure.axes[0].collections if len(each.get_linewidths()) == 1)
    bar = figure.axes[1].collections[-1] if figure.axes[1].collections else None
    assert bar is not None
    assert [to_hex(shade) for shade in drawn.get_colors()] == [to_hex(bar.cmap(bar.norm(value))) for value in expected]


@pytest.mark.parametrize("net", [GAT(16, [4], 3, [2, 1]), pyg.TransformerConv(16, 3)], ids=["loops", "no loops"])
@pytest.mark.parametrize("graph", [NO_EDGES, ONE_NODE, ISOLATED, LOOPS], ids=str)
def test_every_graph_is_drawn(graph: Graph, net: nn.Module) -> None:
    N = graph.num_src
    figure = graph_figure(net, Data(x=torch.randn(N, 16), edge_index=graph.index))
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].texts][:N] == [str(node) for node in range(N)]
    edges = {frozenset(pair) for pair in graph.index.t().tolist() if pair[0] != pair[1]}
    assert len(figure.axes[0].collections[0].get_segments()) == len(edges)


def test_uniform_attention_is_one_on_every_edge() -> None:
    data = acetamide()
    constant = Readout(GAT(9, [4], 1, heads=[2, 1], mechanism="constant"))
    assert set(numbers(graph_figure(constant, Data(x=data.x, edge_index=data.edge_index)))) == {1.0}


# Molecules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pyg_style", [False, True], ids=["OGB", "PyG"])
def test_a_molecule_is_read_back(pyg_style: bool) -> None:
    molecule = Molecule.of(acetamide(pyg_style))
    assert molecule is not None
    assert molecule.atomic_numbers == [6, 6, 8, 7]
    assert molecule.bonds.t().tolist() == BONDS.tolist() and molecule.orders == [1, 2, 1]
    names = [molecule.label(atom) for atom in range(4)]
    assert names == [r"$\mathregular{CH_{3}}$", "C", "O", r"$\mathregular{NH_{3}^{+}}$"]


def test_rdkit_reads_the_same_molecule() -> None:
    chem = pytest.importorskip("rdkit.Chem")
    from torch_geometric.utils import from_smiles

    for smiles in ("CC(=O)[NH3+]", "c1ccncc1C#N", "C1CC1Cl", "OS(=O)(=O)c1ccccc1", "C", "[Na+].CC(=O)[O-]"):
        molecule, mol = Molecule.of(from_smiles(smiles)), chem.MolFromSmiles(smiles)
        assert molecule is not None, smiles
        assert molecule.atomic_numbers == [atom.GetAtomicNum() for atom in mol.GetAtoms()]
        assert molecule.charges == [atom.GetFormalCharge() for atom in mol.GetAtoms()]
        assert molecule.hydrogens == [atom.GetTotalNumHs() for atom in mol.GetAtoms()]
        orders = {(b.GetBeginAtomIdx(), b.GetEndAtomIdx()): b.GetBondTypeAsDouble() for b in mol.GetBonds()}
        expected = {tuple(sorted(ends)): order for ends, order in orders.items()}
        assert dict(zip(map(tuple, molecule.bonds.t().tolist()), molecule.orders, strict=True)) == expected
        assert np.isfinite(positions(from_smiles(smiles), molecule)).all()


def test_rdkit_draws_a_regular_hexagon() -> None:
    pytest.importorskip("rdkit")
    ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
    x, edge_attr = torch.zeros(6, 9), torch.zeros(12, 3)
    x[:, 0], x[:, 2], x[:, 3], x[:, 4], edge_attr[:, 0] = 5, 3, 5, 1, 3  # benzene
    data = Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], 1), edge_attr=edge_attr)
    place = positions(data, Molecule.of(data))
    length = np.linalg.norm(place[ring[0].numpy()] - place[ring[1].numpy()], axis=1)
    assert np.linalg.norm(place, axis=1) == pytest.approx(length)  # of a hexagon, the radius is the side


@pytest.mark.parametrize("change", ["hydrogens", "fraction", "bond", "carbon", "columns"])
def test_another_graph_is_no_molecule(change: str) -> None:
    data = acetamide()
    if change == "columns":
        data.x = data.x[:, :8]
    elif change == "bond":
        data.edge_attr[0, 0] = 4
    else:
        column, value = {"hydrogens": (4, 7.0), "fraction": (1, 0.5), "carbon": (0, 20.0)}[change]
        data.x[:2, column] = value
    assert Molecule.of(data) is None


def test_ammonia_of_ogb_is_no_carbon_of_pyg() -> None:
    x = torch.tensor([[6, 0, 3, 5, 3, 0, 2, 0, 0]])
    assert Molecule.of(Data(x=x, edge_index=torch.empty(2, 0).long(), edge_attr=torch.empty(0, 3))) is None
    x[0, 2] = x[0, 4] = 4
    methane = Molecule.of(Data(x=x, edge_index=torch.empty(2, 0).long(), edge_attr=torch.empty(0, 3)))
    assert methane is not None and methane.label(0) == r"$\mathregular{CH_{4}}$"


def test_carbon_is_a_corner_and_other_atoms_have_symbols() -> None:
    shown = [text.get_text() for text in graph_figure(model(), acetamide()).axes[0].texts]
    nitrogen = {r"$\mathregular{NH_{3}^{+}}$", r"$\mathregular{H_{3}N^{+}}$"}  # by the side of its bond
    assert shown[0] == "O" and shown[1] in nitrogen
    named = graph_figure(model(), acetamide(), labels=["a", "b", "c", "d"], layout=torch.randn(4, 2))
    assert [text.get_text() for text in named.axes[0].texts][:4] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_positions_are_finite_and_apart(graph: Graph) -> None:
    N = graph.num_src
    if not N:
        return
    data = Data(edge_index=graph.index, num_nodes=N)
    place = positions(data, None)
    assert place.shape == (N, 2) and np.isfinite(place).all()
    apart = np.linalg.norm(place[:, None] - place, axis=2)[~np.eye(N, dtype=bool)]
    assert N == 1 or apart.min() > 1e-3
    assert np.array_equal(place, positions(data, None))


def test_large_graphs_are_placed_by_springs() -> None:
    chain = torch.stack([torch.arange(499), torch.arange(1, 500)])
    assert np.isfinite(_by_distances(Data(edge_index=chain, num_nodes=500))).all()


# The best and the worst -----------------------------------------------------------------------------------------------


def task(kind: str) -> Any:
    """Molecules that differ in a column, with labels drawn at random; the first test graph has none."""
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(24):
        data = acetamide()
        data.x[:, 1] = torch.randint(0, 5, (4,), generator=generator).float()
        y = torch.randn(1, 1, generator=generator)
        data.y = {"quantity": y, "one": (y[0] > 0).long(), "many": torch.cat([y > 0, y > 1], 1).float()}[kind]
        graphs.append(data)
    graphs[12].y = torch.full_like(graphs[12].y, -1 if kind == "one" else math.nan)
    return from_dataset([graphs[:6], graphs[6:12], graphs[12:]], "acetamides")


@torch.no_grad()
def losses(kind: str, net: nn.Module, its: Any) -> dict[int, Tensor]:
    result = {}
    for index, data in enumerate(its.test[1:], start=1):
        out, y = net(data.x, data.edge_index, data.edge_attr), data.y
        if kind == "quantity":
            value = (its.objective.predictions(out) - y).abs()
        elif kind == "one":
            value = -out.softmax(1)[0, y].log()
        else:
            value = -torch.where(y == 1, out.sigmoid(), 1 - out.sigmoid()).log().mean()
        result[index] = value
    return result


@pytest.mark.parametrize(("kind", "K"), [("quantity", 1), ("one", 2), ("many", 2)])
def test_the_best_and_the_worst_in_their_order(kind: str, K: int) -> None:
    its, net = task(kind), model(K).train()
    figure = sheet_figure(net, its, number=4)
    assert net.training
    expected = losses(kind, net.eval(), its)
    order = sorted(expected, key=lambda index: float(expected[index]))
    titles = [axes.get_title().split("\n")[0] for axes in figure.axes[:-1] if axes.get_visible()]
    best = [f"best {rank}: test graph {index}" for rank, index in enumerate(order[:4], start=1)]
    worst = [f"worst {rank}: test graph {index}" for rank, index in enumerate(order[:-5:-1], start=1)]
    assert titles == best + worst
    assert "The 4 graphs with the smallest loss and the 4 with the largest of 11." in " ".join(
        figure.get_supxlabel().split()
    )


def test_titles_have_the_label_and_the_prediction() -> None:
    for kind, K in (("quantity", 1), ("one", 2), ("many", 2)):
        its, net = task(kind), model(K)
        text = sheet_figure(net, its, number=1).axes[0].get_title()
        index = int(text.split("\n")[0].rpartition(" ")[2])
        data = its.test[index]
        prediction = its.objective.predictions(net(data.x, data.edge_index, data.edge_attr))[0].tolist()
        said = text.replace("−", "-").split("\n")[1:]
        if kind == "quantity":
            assert said == [f"y = {float(data.y):#.3g}, predicted {prediction[0]:#.3g}"]
        elif kind == "one":
            top = int(np.argmax(prediction))
            assert said == [f"y = {int(data.y)}, predicted {top} ({100 * prediction[top]:.0f} %)"]
        else:
            true = data.y[0].tolist()
            assert said == [f"{k}: {true[k]:.0f}, predicted {prediction[k]:.2f}" for k in range(2)]


def test_few_graphs_are_drawn_once() -> None:
    its = task("quantity")
    panels = [axes.get_title().split(":")[0] for axes in sheet_figure(model(), its, split="val").axes[:-1]]
    assert panels == [*(f"best {k}" for k in (1, 2, 3)), *(f"worst {k}" for k in (1, 2, 3))]


def test_the_command_draws_the_graphs_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = [data for split in ("train", "val", "test") for data in task("quantity").graphs(split)]
    file, out = tmp_path / "acetamides.pt", tmp_path / "out"
    torch.save([graphs[:8], graphs[8:12], graphs[12:]], file)
    settings = ["dataset=file", f"dataset.path={file}", "+model.encoder=8", "training.max_epochs=1"]
    small = ["model.hidden_channels=[4]", "model.heads=[2,1]", f"outputs={out}"]
    for metric in ("rmse", "mae"):
        monkeypatch.setattr(sys, "argv", ["gat-pyg", *settings, *small, f"metric={metric}"])
        gat_pyg.run.main()
    assert main([str(out / "results.jsonl"), "--out", str(out), "--graphs"]) == 0
    paths, printed = sorted(out.glob("graphs-*.svg")), capsys.readouterr().out
    assert [path.name for path in paths] == ["graphs-GAT-acetamides-rmse.svg", "graphs-GAT-acetamides.svg"]
    assert all(path.name in printed and ElementTree.parse(path).getroot().tag.endswith("svg") for path in paths)


def test_without_a_model_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(Result("A", "digits", "accuracy", 80.0, 0, 9, 8, 80.0, 1.0, 0.1, 10, item="graph"), tmp_path / "r.jsonl")
    assert main([str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "none"), "--graphs"]) == 1
    assert "with attention on labels of graphs" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_bad_input() -> None:
    data, net, its = acetamide(), model(), task("quantity")
    for message, call in {
        "scale is 'sum', expected 'uniform' or 'alpha'": lambda: graph_figure(net, data, scale="sum"),
        "layer is 2, expected 0 to 1": lambda: graph_figure(net, data, layer=2),
        "head is 2, expected 0 to 1: the heads of layer 0": lambda: graph_figure(net, data, head=2),
        "labels has 1 names, expected 4": lambda: graph_figure(net, data, labels=["a"]),
        r"layout has shape \(3, 2\), expected finite": lambda: graph_figure(net, data, layout=torch.zeros(3, 2)),
        "the graph has no nodes": lambda: graph_figure(net, Data(x=data.x[:0], edge_index=data.edge_index[:, :0])),
        "no layer of Linear takes return_attention": lambda: graph_figure(nn.Linear(9, 1), data),
        "number is 0, expected at least 1": lambda: sheet_figure(net, its, number=0),
        "digits has labels of nodes, expected labels of graphs": lambda: sheet_figure(net, digits()),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_figure_is_written(tmp_path: Path) -> None:
    graph_figure(model(), acetamide(), tmp_path / "made" / "graph.svg")
    assert ElementTree.parse(tmp_path / "made" / "graph.svg").getroot().tag.endswith("svg")
