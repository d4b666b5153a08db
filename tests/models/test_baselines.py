"""GIN with edge features against its equation, and PNA against PyG's network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gat_pyg.models.baselines import GINE, PNA
from tests.graphs import LOOPS, RANDOM, Graph
from tests.laws import assert_close

F, D, WIDTH, K = 5, 3, 8, 4  # input features, edge features, hidden channels, outputs: all different


def published(model: GINE, h: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    """`GINConv` of OGB's examples: an MLP of (1 + eps) h_i plus the sum of ReLU(h_j + W u_ij)."""
    src, dst = edge_index
    for layer, conv in enumerate(model.convs):
        messages = (h[src] + edge_attr @ conv.lin.weight.t() + conv.lin.bias).relu()
        h = (1 + conv.eps) * h + torch.zeros_like(h).index_add(0, dst, messages)
        inner, outer = conv.nn.lins
        h = outer(conv.nn.norms[0](inner(h)).relu())
        h = model.norms[layer](h).relu() if layer < 2 else h
    return h


def pygs(model: PNA, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    degrees = torch.bincount(torch.bincount(edge_index[1], minlength=len(x)))
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    theirs = pyg.PNA(
        F, WIDTH, 2, K, deg=degrees, edge_dim=D, norm="batch_norm", aggregators=aggregators, scalers=scalers
    ).double()
    theirs.load_state_dict(model.state_dict())
    out: Tensor = torch.func.functional_call(
        theirs, dict(model.named_parameters()), (x, edge_index), {"edge_attr": edge_attr}
    )
    return out


def gine(graph: Graph) -> GINE:
    return GINE(F, WIDTH, num_layers=3, out_channels=K, edge_dim=D, norm="batch_norm", train_eps=True)


def pna(graph: Graph) -> PNA:
    degrees = torch.bincount(torch.bincount(graph.index[1], minlength=graph.num_dst)).tolist()
    return PNA(F, WIDTH, num_layers=2, out_channels=K, edge_dim=D, norm="batch_norm", deg=degrees)


@pytest.mark.parametrize("graph", [LOOPS, RANDOM], ids=str)
@pytest.mark.parametrize(("make", "expected"), [(gine, published), (pna, pygs)], ids=["GINE", "PNA"])
def test_outputs_and_gradients_are_those_of_the_published_network(
    graph: Graph, make: Callable[..., torch.nn.Module], expected: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model = make(graph).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, edge_attr = torch.randn(graph.num_src, F).double(), torch.randn(graph.index.size(1), D).double()
    variables = [x.requires_grad_(), edge_attr.requires_grad_(), *model.parameters()]
    ours, theirs = model(x, graph.index, edge_attr=edge_attr), expected(model, x, graph.index, edge_attr)
    assert_close(ours, theirs)
    weights = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    gradients = [torch.autograd.grad((out * weights).sum(), variables) for out in (ours, theirs)]
    for own, other in zip(*gradients, strict=True):
        assert_close(own, other)
