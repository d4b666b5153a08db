"""A layer as one autograd node has PyG's output and gradients, first and second."""

from itertools import chain
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import Tensor
from torch.testing import assert_close

import gat_pyg

pytestmark = pytest.mark.kernels

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("GATConv", {"bias": False}),
    ("GATConv", {"concat": False, "residual": True, "edge_dim": 5}),
    ("GATv2Conv", {"share_weights": True, "concat": False}),
    ("GATv2Conv", {"residual": True, "edge_dim": 5}),
    ("TransformerConv", {"root_weight": False, "concat": False}),
    ("TransformerConv", {"root_weight": False}),
    ("TransformerConv", {"beta": True, "edge_dim": 5}),
    ("TransformerConv", {"beta": True, "concat": False}),
]
N, N_DST, E = 9, 7, 30


def derivatives(layer: torch.nn.Module, x: Any, edge_index: Tensor, edge_attr: Tensor | None) -> list[Tensor]:
    """The output, its gradients along a direction, and those of the sum of their squares."""
    inputs = [t for t in (*(x if isinstance(x, tuple) else (x,)), edge_attr) if t is not None]
    inputs += layer.parameters()
    out = layer(x, edge_index, edge_attr)
    assert (type(out.grad_fn).__name__ == "WholeBackward") == type(layer).__module__.startswith("gat_pyg")
    total = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
    plain = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
    first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs, materialize_grads=True)
    return [out, *chain.from_iterable(zip(plain, first, strict=True)), *second]


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("bipartite", [False, True])
def test_the_node_of_a_layer_has_the_derivatives_of_pygs(name: str, form: dict[str, Any], bipartite: bool) -> None:
    if bipartite and "share_weights" in form:
        form = {**form, "share_weights": False}
    torch.manual_seed(0)
    edge_index = torch.stack([torch.randint(0, n, (E,)) for n in (N, N_DST if bipartite else N)])
    in_channels = (6, 4) if bipartite else 6
    loops = {} if name == "TransformerConv" else {"add_self_loops": not bipartite}
    layer = getattr(gat_pyg, name)(in_channels, 5, heads=3, **form, **loops).double()
    pygs = getattr(torch_geometric.nn, name)(in_channels, 5, heads=3, **form, **loops).double()
    pygs.load_state_dict(layer.state_dict())
    x: Any = torch.randn(N, 6, dtype=torch.double, requires_grad=True)
    if bipartite:
        x = x, torch.randn(N_DST, 4, dtype=torch.double, requires_grad=True)
    edge_attr = torch.randn(E, 5, dtype=torch.double, requires_grad=True) if "edge_dim" in form else None
    for here, there in zip(*(derivatives(each, x, edge_index, edge_attr) for each in (layer, pygs)), strict=True):
        assert_close(here, there)
