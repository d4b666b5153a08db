"""A layer as one autograd node has PyG's output and gradients, first and second."""

from collections import namedtuple
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import gat_pyg
from gat_pyg.conv import few
from gat_pyg.conv.autograd_node import Grads
from gat_pyg.features import linear

pytestmark = pytest.mark.kernels

every_layer = pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("GATConv", {"bias": False}),
    ("GATConv", {"concat": False, "residual": True, "edge_dim": 3}),
    ("GATv2Conv", {"share_weights": True, "concat": False}),
    ("GATv2Conv", {"residual": True, "edge_dim": 3}),
    ("TransformerConv", {"root_weight": False, "concat": False}),
    ("TransformerConv", {"root_weight": False, "edge_dim": 3}),
    ("TransformerConv", {"beta": True, "edge_dim": 3}),
    ("TransformerConv", {"beta": True, "concat": False, "edge_dim": 3}),
]
N, N_DST, E = 9, 7, 30


def derivatives(layer: torch.nn.Module, x: Any, edge_index: Tensor, edge_attr: Tensor | None) -> list[Tensor]:
    """The output, its gradients along a direction, and those of the sum of their squares."""
    inputs = [t for t in (*(x if isinstance(x, tuple) else (x,)), edge_attr) if t is not None and t.requires_grad]
    inputs += layer.parameters()
    out = layer(x, edge_index, edge_attr)
    if type(layer).__module__.startswith("gat_pyg"):
        one_call = few.FEW > 0 and not getattr(layer, "beta", False) and getattr(layer, "root_weight", True)
        assert type(out.grad_fn).__name__ == ("FewNodeBackward" if one_call else "LayerNodeBackward")
    total = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
    plain = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
    first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs, materialize_grads=True)
    return [out, *chain.from_iterable(zip(plain, first, strict=True)), *second]


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("most", [few.FEW, 0])
def test_the_node_of_a_layer_has_the_derivatives_of_pygs(
    name: str, form: dict[str, Any], bipartite: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few, "FEW", most)
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
    edge_attr = torch.randn(E, 3, dtype=torch.double, requires_grad=bipartite) if "edge_dim" in form else None
    for here, there in zip(*(derivatives(each, x, edge_index, edge_attr) for each in (layer, pygs)), strict=True):
        assert_close(here, there)


@every_layer
def test_a_gradient_with_a_graph_counts_each_path_once(name: str) -> None:
    """With features that depend on the layer's own parameters, and that are those of both ends."""
    torch.manual_seed(0)
    edge_index = torch.randint(0, N, (2, E))
    layer = getattr(gat_pyg, name)((15, 15), 5, heads=3).double()
    x = torch.randn(N, 15, dtype=torch.double, requires_grad=True)
    hidden = layer((x, x), edge_index).tanh()
    total, inputs = layer((hidden, hidden), edge_index).square().sum(), [x, *layer.parameters()]
    plain = torch.autograd.grad(total, inputs, retain_graph=True)
    assert_close(torch.autograd.grad(total, inputs, create_graph=True), plain)


@every_layer
def test_transforms_of_a_recorded_gradient(name: str) -> None:
    """`torch.func.vmap` and forward mode over a gradient whose forward pass ran before."""
    torch.manual_seed(0)
    layer = getattr(gat_pyg, name)(6, 5, heads=3, dropout=0.5).double()
    x = torch.randn(N, 6, dtype=torch.double, requires_grad=True)
    out = layer(x, torch.randint(0, N, (2, E)))

    def pull(cotangent: Tensor) -> Tensor:
        return torch.autograd.grad(out, x, cotangent, retain_graph=True)[0]

    cotangents = torch.randn(3, *out.shape, dtype=torch.double)
    expected = [pull(cotangent) for cotangent in cotangents]
    assert_close(torch.func.vmap(pull)(cotangents), torch.stack(expected))
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(pull(forward_ad.make_dual(cotangents[0], cotangents[1])))
    assert_close([primal, tangent], expected[:2])


@every_layer
def test_sparse_features_of_one_end(name: str) -> None:
    torch.manual_seed(0)
    layer, edge_index = getattr(gat_pyg, name)((6, 6), 5, heads=3).double(), torch.randint(0, N, (2, E))
    x = torch.randn(N, 6, dtype=torch.double)
    results = []
    for ends in ((x, x), (x, x.to_sparse_csr()), (x.to_sparse_csr(), x)):
        out = layer(ends, edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize(
    ("name", "linear_map"),
    [("GATConv", "lin"), ("GATv2Conv", "res"), *(("TransformerConv", f"lin_{of}") for of in ("beta", "key", "value"))],
)
def test_a_bias_that_is_added_to_a_linear_map_or_taken_away_counts(name: str, linear_map: str) -> None:
    options = {"beta": True} if name == "TransformerConv" else {"residual": True}
    layer = getattr(gat_pyg, name)(6, 5, heads=3, **options).double()
    lin = getattr(layer, linear_map)
    lin.bias = torch.nn.Parameter(lin.weight.new_ones(lin.weight.size(0))) if lin.bias is None else None
    x, edge_index = torch.randn(N, 6, dtype=torch.double), torch.randint(0, N, (2, E))
    results = []
    for backend in ("fused", "segment"):
        layer.backend = backend
        out = layer(x, edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    assert_close(*results)


@pytest.mark.parametrize("large", [False, True])
def test_the_gradient_of_linear_maps_is_autograds(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small products and of large ones, which are oneDNN's; of several weights, and of the first rows of x."""
    sizes: list[torch.Size] = []
    monkeypatch.setattr(linear, "_LARGE", 1 if large else 1 << 40)
    onednn = linear._onednn()
    monkeypatch.setattr(
        linear, "_onednn", lambda: onednn and (lambda x, *rest: sizes.append(x.shape) or onednn(x, *rest))
    )
    Inputs = namedtuple("Inputs", "x w v b")
    for width, rows in ((3, 9), (20, 9), (20, 7)):  # narrower and wider than the output
        inputs = Inputs(torch.randn(9, width), torch.randn(5, width), torch.randn(5, width), torch.randn(5))
        inputs = Inputs(*(t.requires_grad_() for t in inputs))
        both, one = torch.randn(rows, 10), torch.randn(rows, 10)[:, ::2]
        w, v = F.linear(inputs.x[:rows], inputs.w, inputs.b), F.linear(inputs.x[:rows], inputs.v)
        total = (w * both[:, :5]).sum() + (v * both[:, 5:]).sum() + (w * one).sum()
        tensors = {"x": inputs.x, "w.weight": inputs.w, "v.weight": inputs.v, "w.bias": inputs.b, "v.bias": None}
        grads = Grads([*tensors], [*tensors.values()], [tensor is not None for tensor in tensors.values()])
        with torch.no_grad():
            grads.of_linear(both, "x", "w v")
            grads.of_linear(one, "x", "w")
            assert_close(linear.product(inputs.x, inputs.w, inputs.b), F.linear(inputs.x, inputs.w, inputs.b))
        expected = torch.autograd.grad(total, inputs)
        assert_close([grads[name] for name in ("x", "w.weight", "v.weight", "w.bias")], list(expected))
    assert len(sizes) == (15 if large and onednn else 0)
