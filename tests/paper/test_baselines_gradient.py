"""The baselines that learn by gradient steps: their layers are PyG's, their settings those of their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops, degree

from gat_pyg.models.baselines import GCN, MLP, normalised
from gat_pyg.paper.methods.chebyshev import Chebyshev, scaled_laplacian
from gat_pyg.paper.methods.monet import MoNet, coordinates
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.tasks.model import Inputs
from tests.graphs import ISOLATED, LOOPS, NO_EDGES, RANDOM, REPEATED, Graph
from tests.laws import assert_close

MAKES: dict[str, Callable[..., nn.Module]] = {
    "MLP": MLP,
    "GCN": GCN,
    "GCN of one layer": lambda *sizes, **options: GCN(*sizes, num_layers=1, **options),
    "Chebyshev of order 1": lambda *sizes, **options: Chebyshev(*sizes, order=1, **options),
    "Chebyshev of order 3": lambda *sizes, **options: Chebyshev(*sizes, order=3, num_layers=3, **options),
    "MoNet": MoNet,
    "MoNet of 3 kernels": lambda *sizes, **options: MoNet(*sizes, dim=1, kernel_size=3, act="elu", **options),
}

every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def called(model: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    return Inputs.of(model).call(model, Data(x, edge_index))


def features(graph: Graph) -> Tensor:
    return torch.randn(graph.num_src, 5, dtype=torch.float64).relu()


def pygs_mlp(model: MLP, x: Tensor, edge_index: Tensor) -> Tensor:
    theirs = pyg.MLP([5, 4, 3], act=model.act, norm=None, dropout=0.0)
    return functional_call(theirs, dict(model.named_parameters()), x)


def pygs_gcn(model: GCN, x: Tensor, edge_index: Tensor) -> Tensor:
    for layer, lin in enumerate(model.lins):
        conv = pyg.GCNConv(lin.in_channels, lin.out_channels, bias=False)
        conv.lin.weight = lin.weight
        x = conv(model.act(x) if layer else x, edge_index)
    return x


def pygs_chebyshev(model: Chebyshev, x: Tensor, edge_index: Tensor) -> Tensor:
    for layer, lins in enumerate(model.convs):
        conv = pyg.ChebConv(lins[0].in_channels, lins[0].out_channels, K=len(lins), bias=False)
        for theirs, lin in zip(conv.lins, lins, strict=True):
            theirs.weight = lin.weight
        x = conv(model.act(x) if layer else x, edge_index, lambda_max=2.0)
    return x


def pygs_monet(model: MoNet, x: Tensor, edge_index: Tensor) -> Tensor:
    looped, _ = add_remaining_self_loops(edge_index, num_nodes=x.size(0))
    src, dst = looped
    scale = degree(dst, x.size(0), x.dtype) ** -0.5
    for layer, own in enumerate(model.convs):
        kernels, dim = own.mu.shape
        channels = own.lin.out_channels // kernels
        conv = pyg.GMMConv(x.size(1), channels, dim, kernels, bias=False).to(x.dtype)
        nn.init.zeros_(conv.root.weight)  # without one, PyG's forward cannot run
        conv.mu, conv.sigma = own.mu, own.sigma
        del conv.g
        conv.g = own.lin.weight.t()
        u = own.transform(torch.stack([scale[dst], scale[src]], 1)).tanh()
        x = conv(model.act(x) if layer else x, looped, u)
    return x


PYGS = {MLP: pygs_mlp, GCN: pygs_gcn, Chebyshev: pygs_chebyshev, MoNet: pygs_monet}


@every
@pytest.mark.parametrize("graph", [NO_EDGES, ISOLATED, LOOPS, REPEATED, RANDOM], ids=str)
def test_outputs_and_gradients_are_those_of_pygs_layers(graph: Graph, make: Callable[..., nn.Module]):
    torch.manual_seed(0)
    model, x = make(5, 4, 3).double(), features(graph)
    ours, theirs = called(model, x, graph.index), PYGS[type(model)](model, x, graph.index)
    assert_close(ours, theirs)
    weights = torch.arange(1.0, 1.0 + ours.numel(), dtype=x.dtype).view_as(ours).sin()
    gradients = (torch.autograd.grad(out, list(model.parameters()), weights) for out in (ours, theirs))
    for (name, _), own, other in zip(model.named_parameters(), *gradients, strict=True):
        assert_close(own, other, name)


MATRICES = {"GCN": normalised, "Chebyshev": scaled_laplacian, "MoNet": lambda *arguments: coordinates(*arguments)[0]}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_a_graphs_matrix_is_built_once(matrix: Callable[..., Any]):
    edge_index = RANDOM.index.clone()
    with torch.inference_mode():
        first = matrix(edge_index, 40, torch.float32)
    assert matrix(edge_index, 40, torch.float32) is first and not first.content.is_inference()
    assert matrix(edge_index, 41, torch.float32) is not first
    assert matrix(edge_index, 40, torch.float64).dtype == torch.float64
    assert matrix(edge_index.clone(), 40, torch.float32) is not first


DECAYED = {
    "MLP": (MLP, ["lins.0.weight", "lins.0.bias"]),
    "GCN": (GCN, ["lins.0.weight"]),
    "GCN-64*": (lambda *sizes: GCN(*sizes, decayed_layers=None), ["lins.0.weight", "lins.1.weight"]),
    "Chebyshev": (Chebyshev, ["convs.0.0.weight", "convs.0.1.weight", "convs.0.2.weight"]),
    "MoNet": (MoNet, ["convs.0.lin.weight"]),
}


@pytest.mark.parametrize(("make", "names"), DECAYED.values(), ids=DECAYED)
def test_weight_decay_acts_on_the_first_layer(make: Callable[..., nn.Module], names: list[str]):
    model = make(5, 4, 3)
    selected = {id(parameter) for parameter in model.decayed_parameters()}
    assert [name for name, parameter in model.named_parameters() if id(parameter) in selected] == names


def test_initial_weights_are_glorots():
    weights = {"MLP": MLP(300, 20, 7), "GCN": GCN(300, 20, 7), "Chebyshev": Chebyshev(300, 20, 7)}
    for name, model in weights.items():
        first = next(model.parameters())
        bound = (6 / (300 + 20)) ** 0.5
        assert 0.95 * bound < first.abs().max() <= bound, name
    assert not MLP(5, 4, 3).lins[0].bias.any()


@every
def test_full_dropout_in_training_removes_the_features(make: Callable[..., nn.Module]):
    model = make(5, 4, 3, dropout=1.0)
    assert not called(model, features(RANDOM).float(), RANDOM.index).any()


def test_errors():
    for model in (Chebyshev(5, 4, 3), MoNet(5, 4, 3), GCN(5, 4, 3)):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds|inconsistent with indices"):
            model(torch.ones(4, 5), torch.tensor([[0], [4]]))
    with pytest.raises(ValueError, match=r"order is 0, expected at least 1\. An MLP is what sees no neighbour\."):
        Chebyshev(5, 4, 3, order=0)


# The papers' settings -----------------------------------------------------------------------------------------------

KIPF_WELLING = (16, 0.5, 0.01, 5e-4, 10, "loss", 200)  # width, dropout, lr, L2, patience, criterion, epochs
GAT_PAPER = {
    "cora": (64, 0.6, 0.005, 5e-4, 100, "both", 100_000),
    "citeseer": (64, 0.6, 0.005, 5e-4, 100, "accuracy", 100_000),
    "pubmed": (64, 0.6, 0.01, 1e-3, 100, "both", 100_000),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.parametrize("dataset", GAT_PAPER)
@pytest.mark.parametrize("model", ["mlp", "gcn", "chebyshev", "gcn64"])
def test_the_commands_settings_are_those_of_the_papers(model: str, dataset: str):
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        config = compose("config", [f"model={model}", f"dataset={dataset}"])
    network, training = config.model, config.training
    settings = network.hidden_channels, network.dropout, training.lr, training.weight_decay
    settings += training.patience, training.criterion, training.max_epochs
    assert settings == (GAT_PAPER[dataset] if model == "gcn64" else KIPF_WELLING)
    assert network.act == "relu"
    assert network.get("order") == ({"cora": 2}.get(dataset, 3) if model == "chebyshev" else None)
    assert network.get("bias") == (False if model == "mlp" else None)
    assert network.get("decayed_layers") == (1 if model == "gcn" else None)
