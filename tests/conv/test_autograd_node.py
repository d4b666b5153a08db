"""A layer as one autograd node has PyG's output and gradients, first and second."""

import copy
from collections import namedtuple
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import gat_pyg
from gat_pyg.conv import base, few
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


def changed(package: Any, case: str) -> torch.nn.Module:
    """A layer whose options differ from the arguments that it was built with."""
    torch.manual_seed(0)
    if case == "no root weight":
        layer = package.TransformerConv(6, 5, heads=3, beta=True).double()
        layer.root_weight = False
    elif case == "weights no longer shared":
        layer = package.GATv2Conv((6, 6), 5, heads=3, share_weights=True, add_self_loops=False).double()
        layer.lin_l = copy.deepcopy(layer.lin_l)
        torch.nn.init.normal_(layer.lin_l.weight)
    else:
        slope = property(lambda self: 0.7, lambda self, value: None)
        layer = type("Steeper", (package.GATConv,), {"negative_slope": slope})(6, 5, heads=3).double()
    return layer


@pytest.mark.parametrize("most", [few.FEW, 0])
@pytest.mark.parametrize("case", ["no root weight", "weights no longer shared", "a class's own slope"])
def test_options_are_those_at_the_time_of_the_call(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "FEW", most)
    x, edge_index = torch.randn(N, 6, dtype=torch.double, requires_grad=True), torch.randint(0, N, (2, E))
    for both in (False, True) if case == "weights no longer shared" else (False,):
        results = []
        layers = [changed(package, case) for package in (torch_geometric.nn, gat_pyg)]
        layers[1].load_state_dict(layers[0].state_dict())
        for layer in layers:
            out = layer((x, 2 * x) if both else x, edge_index)
            inputs = [x, *layer.parameters()]
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs, materialize_grads=True)])
        assert_close(*results)


def first_map(layer: Any) -> Any:
    return layer.get_submodule(layer._PARAMETERS[0].removesuffix(".weight"))


def in_dtype(dtype: torch.dtype, layer: Any, call: dict[str, Any]) -> None:
    layer.to(dtype)
    call.update(x=call["x"].to(dtype), edge_attr=call["edge_attr"].to(dtype))


def without_features(layer: Any, call: dict[str, Any]) -> None:
    layer.in_channels, call["x"] = 0, call["x"][:, :0]
    for parameter in layer.parameters():
        if parameter.shape[1:] == (6,):
            parameter.data = parameter.data[:, :0]


def with_attribute(lin: Any) -> None:
    del lin.bias
    lin.bias = torch.ones(15).double()


# A change of a layer or of the arguments of a call, and whether one node for few edges still computes it
CALLS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], bool]] = {
    "none": (lambda layer, call: None, True),
    "a list of both ends": (lambda layer, call: call.update(x=[call["x"], call["x"].sin()]), True),
    "frozen parameters": (lambda layer, call: first_map(layer).requires_grad_(False), True),
    "another weight": (lambda layer, call: setattr(first_map(layer).weight, "data", torch.ones(15, 6).double()), True),
    "hook": (lambda layer, call: first_map(layer).register_forward_hook(lambda lin, x, out: 2 * out), False),
    "weight norm": (lambda layer, call: parametrizations.weight_norm(first_map(layer)), False),
    "bias": (lambda layer, call: setattr(layer.lin_edge, "bias", torch.nn.Parameter(torch.ones(15).double())), False),
    "transposed weight": (lambda layer, call: setattr(first_map(layer).weight, "data", torch.ones(6, 15)), False),
    "src alone": (lambda layer, call: call.update(x=(call["x"], None)), False),
    "one feature": (lambda layer, call: call.update(x=call["x"][:, :1].expand(-1, 6)), True),
    "negated": (lambda layer, call: call.update(x=torch._neg_view(call["x"])), True),
    "another width of dst": (lambda layer, call: call.update(x=[call["x"], call["x"][:, :3]]), False),
    "no features": (lambda layer, call: without_features(layer, call), False),
    "NumPy's numbers": (lambda layer, call: vars(layer).update(heads=np.int32(3), concat=np.bool_(True)), True),
    "a tensor": (lambda layer, call: vars(layer).update(negative_slope=torch.tensor(0.1)), True),
    "bias as an attribute": (lambda layer, call: with_attribute(first_map(layer)), False),
    "no vector": (lambda layer, call: [setattr(layer, name, None) for name in ("att", "att_dst", "lin_query")], False),
    "features of three axes": (lambda layer, call: call.update(edge_attr=call["edge_attr"].unsqueeze(2)), False),
    "one number": (lambda layer, call: call.update(edge_attr=torch.tensor(1.0)), False),
    "no tensor": (lambda layer, call: call.update(edge_attr=[1.0] * E), False),
    "int32": (lambda layer, call: call.update(edge_index=call["edge_index"].int()), False),
    "id out of range": (lambda layer, call: call.update(edge_index=call["edge_index"] + 1), False),
    "float32": (lambda layer, call: in_dtype(torch.float32, layer, call), True),
    "float16": (lambda layer, call: in_dtype(torch.float16, layer, call), False),
    "bfloat16": (lambda layer, call: in_dtype(torch.bfloat16, layer, call), False),
}
ROUNDED: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], bool]] = {  # the same under autocast to bfloat16
    "float32": (lambda layer, call: in_dtype(torch.float32, layer, call), True),
    "bfloat16": (lambda layer, call: (in_dtype(torch.float32, layer, call), call.update(x=call["x"].bfloat16())), True),
    "float64": (lambda layer, call: None, True),
    "mixed": (lambda layer, call: layer.float(), False),
    "integers": (lambda layer, call: (layer.float(), call.update(x=call["x"].long())), False),
}


@every_layer
def test_calls_on_few_edges_are_those_on_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results, dtypes and errors are the same, and the kernels for few edges run in the marked cases alone.

    On many edges, a layer that is not float64 has the segment backend, since no other test compiles kernels for it.
    """
    by_few: list[bool] = []

    def run_few(layer: Any, *call: Any) -> Tensor | None:
        out = few.run_few(layer, *call)
        by_few.append(out is not None)
        if out is None and any(parameter.dtype != torch.float64 for parameter in layer.parameters()):
            layer.backend = "segment"
        return out

    def results(change: Callable[[Any, dict[str, Any]], Any], rounded: bool, bias: bool) -> Any:
        torch.manual_seed(0)
        layer, x = getattr(gat_pyg, name)(6, 5, heads=3, edge_dim=3, bias=bias).double(), torch.randn(N, 6).double()
        call = {"x": x, "edge_index": torch.randint(0, N, (2, E)), "edge_attr": torch.randn(E, 3).double()}
        change(layer, call)
        inputs = [t.requires_grad_() for t in (call["edge_attr"],) if isinstance(t, Tensor)] + [*layer.parameters()]
        inputs = [t for t in inputs if t.requires_grad]
        try:
            with torch.autocast("cpu", torch.bfloat16, rounded):
                out = layer(**call)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return str(error)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs, materialize_grads=True)]

    few_edges = few.FEW
    monkeypatch.setattr(base, "run_few", run_few)
    for rounded, bias in ((False, True), (True, True), (True, False)):
        for case, (change, expected) in (ROUNDED if rounded else CALLS).items():
            by_few.clear()
            monkeypatch.setattr(few, "FEW", few_edges)
            here = results(change, rounded, bias)
            monkeypatch.setattr(few, "FEW", 0)
            there = results(change, rounded, bias)
            assert by_few == [expected, False], case
            if isinstance(there, str):
                assert here == there, case
            elif rounded:
                assert [t.dtype for t in here] == [t.dtype for t in there], case
                one, other = (torch.cat([t.double().flatten() for t in each]) for each in (here, there))
                assert (one - other).norm() < 0.05 * other.norm(), case  # bfloat16 has eight bits
            else:
                assert_close(here, there, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*case, marks=[pytest.mark.weekly] * ("edge_dim" not in case[1])) for case in FORMS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_in_the_node_what_it_rounds_outside(
    name: str, form: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output has the same bits, and so have gradients, computed under autocast or not."""
    monkeypatch.setattr(few, "FEW", 0)
    torch.manual_seed(0)
    layer, edge_index = getattr(gat_pyg, name)(6, 5, heads=3, **form), torch.randint(0, N, (2, E))
    edge_attr = torch.randn(E, 3).to(dtype) if "edge_dim" in form else None
    inputs = [torch.randn(N, 6).to(dtype).requires_grad_(), *layer.parameters()]
    inputs = [t for key, t in zip(["x", *dict(layer.named_parameters())], inputs, strict=True) if key != "lin_key.bias"]

    def run(forward: bool, backward: bool) -> tuple[str, Tensor, list[Tensor], list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, forward):
            out = layer(inputs[0] if forward else inputs[0].float(), edge_index, edge_attr)
        total = out.float().sin().sum()
        with torch.autocast("cpu", torch.bfloat16, backward):
            plain = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
        first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
        return type(out.grad_fn).__name__, out, plain, first

    def as_one(tensors: Any) -> Tensor:
        return torch.cat([t.double().flatten() for t in tensors])

    if dtype == torch.float32:
        assert_close(run(False, True)[2], run(False, False)[2], rtol=0, atol=0)
    node, out, plain, first = run(True, False)
    assert node == "LayerNodeBackward"
    assert_close(run(True, True)[2], plain, rtol=0, atol=0)
    monkeypatch.setattr(type(layer), "_tensors", lambda *_: None)
    _, other_out, other_plain, _ = run(True, False)
    assert_close(out, other_out, rtol=0, atol=0)
    for each in (plain, first):
        assert [t.dtype for t in each] == [t.dtype for t in other_plain]
        assert (as_one(each) - as_one(other_plain)).norm() < 0.01 * as_one(other_plain).norm()


@every_layer
def test_gradients_read_no_memory_of_another_layout(name: str) -> None:
    """Of what hooks return for the tensors that are saved, of a gradient that another process computes, and of features
    that are changed after the call."""
    torch.manual_seed(0)
    layer, edge_index = getattr(gat_pyg, name)(6, 5, heads=3, edge_dim=3).double(), torch.randint(0, N, (2, E))
    x, grad = torch.randn(N, 6, dtype=torch.double, requires_grad=True), torch.randn(N, 15).double()
    inputs, edge_attr = [x, *layer.parameters()], torch.randn(E, 3).double()
    out = layer(x, edge_index, edge_attr)
    plain = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    assert_close(torch.autograd.grad(out, inputs, AsyncCollectiveTensor(grad)), plain)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        out = layer(x, edge_index, edge_attr)
    assert_close(torch.autograd.grad(out, inputs, grad), plain)
    out = layer(x, edge_index, edge_attr)
    edge_attr.mul_(2)
    if layer.add_self_loops:  # to a copy
        assert_close(torch.autograd.grad(out, inputs, grad), plain)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, inputs, grad)


@every_layer
def test_a_gradient_with_a_graph_counts_each_path_once(name: str) -> None:
    """With features that depend on the layer's own parameters, and that are those of both ends."""
    torch.manual_seed(0)
    edge_index = torch.randint(0, N, (2, E))
    layer = getattr(gat_pyg, name)((15, 15), 5, heads=3).double()
    x = torch.randn(N, 15, dtype=torch.double, requires_grad=True)
    hidden = layer((x, x), edge_index).tanh()
    total, inputs = layer((hidden, hidden), edge_index).square().sum(), [x, *layer.parameters()]
    plain = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
    assert_close(torch.autograd.grad(total, inputs, create_graph=True), plain)


@every_layer
def test_transforms_of_a_recorded_gradient(name: str) -> None:
    """`torch.func.vmap` and forward mode over a gradient whose forward pass ran before."""
    torch.manual_seed(0)
    edge_dim = 3 if name == "TransformerConv" else None  # for each, other tests compile the kernels for many edges
    layer = getattr(gat_pyg, name)(6, 5, heads=3, dropout=0.5, edge_dim=edge_dim).double()
    x = torch.randn(N, 6, dtype=torch.double, requires_grad=True)
    edge_attr = None if edge_dim is None else torch.randn(E, edge_dim, dtype=torch.double, requires_grad=True)
    out = layer(x, torch.randint(0, N, (2, E)), edge_attr)

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
