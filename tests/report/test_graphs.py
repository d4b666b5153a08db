"""Figures of whole graphs: their numbers by the layer itself, their order by hand, their atoms by RDKit."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from matplotlib.colors import to_hex
from matplotlib.image import imread
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles

import gat_pyg.report.figures.graphs
from gat_pyg import GAT
from gat_pyg.models import Encoded, Readout
from gat_pyg.report.figures.graphs import graph_figure
from gat_pyg.report.figures.molecules import molecule_of, picture
from gat_pyg.report.figures.positions import graph_layout
from tests.graphs import ISOLATED, LOOPS, NO_EDGES, SQUARE, Graph

# Acetamide with a charged nitrogen, CH3-C(=O)-NH3+: atoms C, C, O, N as OGB has them.
ATOMS = torch.tensor([[5, 4, 5, 3], [5, 3, 5, 0], [7, 1, 5, 0], [6, 4, 6, 3]])
BONDS = torch.tensor([[0, 1], [1, 2], [1, 3]])


def acetamide() -> Data:
    x = torch.zeros(4, 9)
    x[:, [0, 2, 3, 4]] = ATOMS.float()
    edge_attr = torch.zeros(6, 3)
    edge_attr[2:4, 0] = 1
    edges = torch.stack([BONDS, BONDS.flip(1)], 1).view(-1, 2).t()  # both directions of each bond in a row
    return Data(x=x, edge_index=edges, edge_attr=edge_attr, y=torch.zeros(1, 1))


def model(K: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Readout(Encoded(GAT(8, [4], K, heads=[2, 1], edge_dim=8), 8, [10] * 9, [4] * 3)).eval()


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of molecules have few pixels, which are quickly drawn."""
    monkeypatch.setattr(gat_pyg.report.figures.graphs, "_DPI", 50)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each molecule that RDKit draws: molecule, position, size, bond, colours, notes, labels."""
    calls: list[Any] = []
    monkeypatch.setattr(gat_pyg.report.figures.graphs, "picture", lambda *args: calls.append(args) or picture(*args))
    return calls


# The numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "head"), [("uniform", None), ("alpha", 1)])
def test_numbers_and_colours_are_those_of_pygs_layer(scale: Any, head: int | None, drawn: list[Any]) -> None:
    data, net = acetamide(), model()
    theirs = pyg.GATConv(8, 4, heads=2, edge_dim=8)
    theirs.load_state_dict(net.model.model.convs[0].state_dict())
    x, edge_attr = net.model.encoder(data.x), net.model.edge_encoder(data.edge_attr)
    edge_index, alpha = theirs(x, data.edge_index, edge_attr, return_attention_weights=True)[1]
    dense = torch.zeros(4, 4, 2).index_put((edge_index[0], edge_index[1]), alpha.detach())  # [src, dst, H]
    if scale == "uniform":
        dense = dense * torch.tensor([2, 4, 2, 2])[None, :, None]  # the neighbours of dst and itself
    dense = dense.mean(-1) if head is None else dense[:, :, head]
    expected = {(i, j): float(dense[i, j] + dense[j, i]) / 2 for i, j in BONDS.tolist()}
    bar = graph_figure(net, data, scale=scale, head=head).axes[1].collections[-1]
    *_, colours, notes, labels = drawn[0]
    assert {pair: float(note) for pair, note in notes.items()} == pytest.approx(expected, abs=0.0051)
    shades = {pair: to_hex(bar.cmap(bar.norm(value))) for pair, value in expected.items()}
    assert {pair: to_hex(colour) for pair, colour in colours.items()} == shades
    assert labels is None


@pytest.mark.parametrize(
    ("graph", "net"),
    [(NO_EDGES, GAT(16, [4], 3, [2, 1])), (ISOLATED, pyg.TransformerConv(16, 3)), (LOOPS, GAT(16, [4], 3, [2, 1]))],
    ids=["no edges", "isolated", "loops"],
)
def test_every_graph_is_drawn(graph: Graph, net: nn.Module) -> None:
    N = graph.num_src
    figure = graph_figure(net, Data(x=torch.randn(N, 16), edge_index=graph.index))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    edges = {frozenset(pair) for pair in graph.index.t().tolist() if pair[0] != pair[1]}
    texts = [text.get_text() for text in axes.texts]
    assert texts[:N] == [str(node) for node in range(N)] and len(texts) == N + len(edges)
    assert not edges or len(axes.collections[0].get_segments()) == len(edges)


# Molecules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "smiles", ["CC(=O)[NH3+]", "c1ccncc1C#N", "C1CC1Cl", "OS(=O)(=O)c1ccccc1", "C", "[Na+].CC(=O)[O-]"]
)
def test_rdkit_reads_the_same_molecule(smiles: str) -> None:
    from rdkit import Chem

    data, expected = from_smiles(smiles), Chem.MolFromSmiles(smiles)
    molecule = molecule_of(data)
    atoms, expected_atoms = (
        [(a.GetAtomicNum(), a.GetFormalCharge(), a.GetTotalNumHs()) for a in each.GetAtoms()]
        for each in (molecule, expected)
    )
    assert atoms == expected_atoms
    orders, expected_orders = (
        {frozenset((b.GetBeginAtomIdx(), b.GetEndAtomIdx())): b.GetBondTypeAsDouble() for b in each.GetBonds()}
        for each in (molecule, expected)
    )
    assert orders == expected_orders
    assert np.isfinite(graph_layout(data, molecule)).all()


def test_a_molecule_of_ogb_is_read_back() -> None:
    data = acetamide()
    data.x = torch.cat([data.x, torch.rand(4, 3)], 1)  # with encodings
    molecule = molecule_of(data)
    atoms = [(a.GetSymbol(), a.GetFormalCharge(), a.GetNumExplicitHs()) for a in molecule.GetAtoms()]
    assert atoms == [("C", 0, 3), ("C", 0, 0), ("O", 0, 0), ("N", 1, 3)]
    bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), b.GetBondTypeAsDouble()) for b in molecule.GetBonds()]
    assert bonds == [(0, 1, 1), (1, 2, 2), (1, 3, 1)]


def test_every_bond_of_the_picture_has_its_colour() -> None:
    place = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 1.0]])
    colours = dict(zip([(0, 1), (1, 2), (1, 3)], map(tuple, np.eye(3).tolist()), strict=True))  # red, green, blue
    images = []
    for labels in (None, ["C", "C", "Q", "N"]):
        png = picture(molecule_of(acetamide()), place, (400, 300), 100, colours, {(0, 1): "1.23"}, labels)
        images.append(imread(io.BytesIO(png))[..., :3])
    image = images[0]
    assert image.shape == (300, 400, 3)
    red, green, blue = (np.argwhere(abs(image - colour).max(-1) < 0.01).mean(0) for colour in np.eye(3))  # row, column
    assert red[1] < blue[1] < green[1] and blue[0] < min(red[0], green[0])
    assert not np.array_equal(*images)
    *_, no_note = (imread(io.BytesIO(picture(molecule_of(acetamide()), place, (400, 300), 100, colours, {}))),)
    assert not np.array_equal(image, no_note[..., :3])


@pytest.mark.parametrize("change", ["hydrogens", "fraction", "bond", "carbon", "columns", "ammonia"])
def test_another_graph_is_no_molecule(change: str) -> None:
    data = acetamide()
    if change == "columns":
        data.x = data.x[:, :8]
    elif change == "bond":
        data.edge_attr[0, 0] = 4
    elif change == "ammonia":  # its category of OGB would be that of carbon in PyG
        x = torch.tensor([[6, 0, 3, 5, 3, 0, 2, 0, 0]])
        data = Data(x=x, edge_index=torch.empty(2, 0).long(), edge_attr=torch.empty(0, 3))
    else:
        column, value = {"hydrogens": (4, 7.0), "fraction": (1, 0.5), "carbon": (0, 20.0)}[change]
        data.x[:2, column] = value
    assert molecule_of(data) is None


def test_benzene_is_a_regular_hexagon() -> None:
    data = from_smiles("c1ccccc1")
    place = graph_layout(data, molecule_of(data))
    side = np.linalg.norm(place[data.edge_index[0]] - place[data.edge_index[1]], axis=1)
    assert np.linalg.norm(place, axis=1) == pytest.approx(side[:6])


def test_names_and_places_of_atoms_can_be_chosen(drawn: list[Any]) -> None:
    layout = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [2.0, 2.0]])
    graph_figure(model(), acetamide(), labels=["a", "b", "c", "d"], layout=layout)
    (_, position, *_, labels) = drawn[0]
    assert labels == ["a", "b", "c", "d"]
    assert position.tolist() == [[-1.0, -0.5], [0.0, -0.5], [1.0, -0.5], [0.0, 0.5]]


def test_without_rdkit_a_molecule_is_drawn_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    axes = graph_figure(model(), acetamide()).axes[0]
    assert [text.get_text() for text in axes.texts][:4] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_positions_are_finite_and_apart(graph: Graph) -> None:
    N = graph.num_src
    if not N:
        return
    data = Data(edge_index=graph.index, num_nodes=N)
    place = graph_layout(data, None)
    assert place.shape == (N, 2) and np.isfinite(place).all()
    apart = np.linalg.norm(place[:, None] - place, axis=2)[~np.eye(N, dtype=bool)]
    assert N == 1 or apart.min() > 1e-3
    assert np.array_equal(place, graph_layout(data, None))


def test_large_graphs_are_placed_by_springs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.report.figures.positions._LARGE", 20)
    monkeypatch.delattr("networkx.kamada_kawai_layout")
    chain = torch.stack([torch.arange(19), torch.arange(1, 20)])
    assert np.isfinite(graph_layout(Data(edge_index=chain, num_nodes=20), None)).all()


def test_bad_input() -> None:
    data, net = acetamide(), model()
    for message, call in {
        "scale is 'sum', expected 'uniform' or 'alpha'": lambda: graph_figure(net, data, scale="sum"),
        "layer is 2, expected 0 to 1": lambda: graph_figure(net, data, layer=2),
        "head is 2, expected 0 to 1: the heads of layer 0": lambda: graph_figure(net, data, head=2),
        "labels has 1 names, expected 4": lambda: graph_figure(net, data, labels=["a"]),
        r"layout has shape \(3, 2\), expected finite": lambda: graph_figure(net, data, layout=torch.zeros(3, 2)),
        "the graph has no nodes": lambda: graph_figure(net, Data(x=data.x[:0], edge_index=data.edge_index[:, :0])),
        "no layer of Linear takes return_attention": lambda: graph_figure(nn.Linear(9, 1), data),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
