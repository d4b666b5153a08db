"""Code written for PyG's layers: subclasses, hooks and replaced modules give on ours what they give on PyG's."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter, softmax

import gat_pyg.conv.base
from tests.conv.test_draws import LAYERS, C, D, F, H, normal
from tests.graphs import LOOPS
from tests.laws import assert_close

every_layer = pytest.mark.parametrize("name", LAYERS)


def pair(name: str, of: Callable[[Any], Any] | None = None, **options: Any) -> list[Any]:
    """PyG's layer and ours, or a subclass of each, with the same weights."""
    layers = []
    for base in (getattr(pyg, name), LAYERS[name]):
        cls = base
        if of is not None:
            cls = of(base)
            cls.__name__ += f"Of{base.__module__.split('.')[0]}{name}"  # by which PyG keeps its templates
        torch.manual_seed(0)
        layers.append(cls(F, C, H, **options).double())
    return layers


def outcome(layer: Any, edge_attr: Tensor | None = None) -> list[Tensor]:
    """The output on a graph with loops, and the gradients of x, of the features of edges and of the parameters."""
    leaves = {"x": normal(3, F).requires_grad_()} | dict(layer.named_parameters())
    if edge_attr is not None:
        leaves["edge_attr"] = edge_attr = edge_attr.clone().requires_grad_()
    torch.manual_seed(1)
    out = layer(leaves["x"], LOOPS.index, edge_attr)
    grads = torch.autograd.grad((out * normal(*out.shape, seed=2)).sum(), [*leaves.values()], allow_unused=True)
    return [out, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.values(), strict=True))]


def assert_same(layers: list[Any], case: str, **arguments: Any) -> None:
    theirs, ours = (outcome(layer, **arguments) for layer in layers)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(one, other, f"{case} {number}")


# Names ----------------------------------------------------------------------------------------------------------------

MORE_ARGUMENTS = {  # behind PyG's and with defaults; the steps have none
    "__init__": {"mechanism", "edge_dropout", "backend"},
    "forward": {"edge_weight"},
}
MORE_ATTRIBUTES = {
    "mechanism": "an option",
    "edge_dropout": "an option",
    "backend": "an option",
    "accepts_size": "read by our networks",
    "add_self_loops": "what the base reads of every layer; of TransformerConv False",
    "fill_value": "the same",
    "residual": "the same; of TransformerConv root_weight",
}


def attributes(layer: Any) -> dict[str, Any]:
    """The attributes of a layer and of its class by name, without those that every module has."""
    stores = "_parameters", "_buffers", "_modules"
    names = {*dir(type(layer)), *vars(layer), *(name for store in stores for name in vars(layer)[store])}
    return {name: getattr(layer, name) for name in names - {*dir(nn.Module()), "__annotations__"}}


def signatures(inspector: Any) -> dict[str, Any]:
    """The types and defaults of each step's parameters, and the type that it returns."""
    return {
        step: ({each.name: (each.type, each.default) for each in params.values()}, returned)
        for step, (params, returned, _) in inspector._signature_dict.items()
    }


@every_layer
@pytest.mark.parametrize("edge_dim", [None, D])
def test_methods_and_attributes_are_pygs(name: str, edge_dim: int | None) -> None:
    """Names, parameters of methods, types and values, before and after a forward."""
    theirs, ours = layers = pair(name, edge_dim=edge_dim)
    for called in (False, True):
        if called:
            assert_same(layers, name, edge_attr=None if edge_dim is None else normal(5, D))
        own, expected = attributes(ours), attributes(theirs)
        assert {key for key in own.keys() - expected.keys() if key[0] != "_"} <= MORE_ATTRIBUTES.keys()
        for key, value in [*expected.items(), ("__init__", theirs.__init__), ("forward", theirs.forward)]:
            case, mine = f"{name}.{key} {called=}", own[key] if key in own else getattr(ours, key)
            if isinstance(value, (Tensor, nn.Module)):
                assert isinstance(mine, type(value)), case
            elif key == "inspector":
                assert signatures(mine) == signatures(value), case
            elif not callable(value):
                assert mine == value, case
            else:
                parameters = inspect.signature(mine).parameters
                more = MORE_ARGUMENTS.get(key, set()) & parameters.keys()
                assert all(parameters[each].default is not inspect.Parameter.empty for each in more), case
                ours_of_pygs = [
                    (each.name, each.kind, each.default) for each in parameters.values() if each.name not in more
                ]
                of_pyg = inspect.signature(value).parameters.values()
                assert ours_of_pygs == [(each.name, each.kind, each.default) for each in of_pyg], case


# Subclasses -----------------------------------------------------------------------------------------------------------


def calling_super(step: str) -> Callable[[Any], Any]:
    """A subclass that squares the result of a step, which has PyG's signature; as by a decorator with `wraps`."""

    def of(base: Any) -> Any:
        @functools.wraps(getattr(getattr(pyg, base.__name__), step))
        def squared(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            return getattr(super(cls, self), step)(*args, **kwargs).square()

        cls = type(f"Squared{step}", (base,), {step: squared})
        return cls

    return of


def own_message(base: Any) -> Any:
    class OwnMessage(base):  # type: ignore[misc]
        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return alpha.exp().unsqueeze(-1) * x_j

    class OwnTransformerMessage(base):  # type: ignore[misc]
        def message(
            self, query_i: Tensor, key_j: Tensor, value_j: Tensor, index: Tensor, ptr: OptTensor, size_i: int
        ) -> Tensor:
            alpha = softmax((query_i * key_j).sum(-1).tanh(), index, ptr, size_i)
            return value_j * alpha.view(-1, self.heads, 1)

    return OwnTransformerMessage if base.__name__ == "TransformerConv" else OwnMessage


def own_scores(base: Any) -> Any:
    class OwnScores(base):  # type: ignore[misc]
        def edge_update(self, alpha_j: Tensor, index: Tensor, dim_size: int) -> Tensor:
            return softmax(alpha_j, index, None, dim_size)

    class OwnScoresOfBoth(base):  # type: ignore[misc]
        def edge_update(self, x_j: Tensor, x_i: Tensor, edge_attr: OptTensor) -> Tensor:
            return (x_j * x_i).sum(-1).sigmoid()

    return OwnScores if base.__name__ == "GATConv" else OwnScoresOfBoth


def own_aggregation(base: Any) -> Any:
    class OwnAggregation(base):  # type: ignore[misc]
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
            return scatter(inputs, index, 0, dim_size, reduce="max")

    return OwnAggregation


def copied_forward(base: Any) -> Any:
    class CopiedForward(base):  # type: ignore[misc]
        forward = getattr(pyg, base.__name__).forward

    return CopiedForward


def one_more_argument(base: Any) -> Any:
    class OneMoreArgument(base):  # type: ignore[misc]
        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            lin = {"GATConv": "lin", "GATv2Conv": "lin_l", "TransformerConv": "lin_value"}[base.__name__]
            x = getattr(self, lin)(x).view(-1, self.heads, self.out_channels)
            # propagate_type: (x: Tensor, gate: Tensor)
            return self.propagate(edge_index, x=x, gate=edge_attr.sum(-1)).flatten(1)

        def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
            return gate.view(-1, 1, 1) * x_j

    return OneMoreArgument


STEPS = "message", "aggregate", "update", "propagate", "edge_update", "edge_updater"
SUBCLASSES: dict[str, Callable[[Any], Any]] = {step: calling_super(step) for step in STEPS}
SUBCLASSES |= {"own message": own_message, "own scores": own_scores, "own aggregation": own_aggregation}
SUBCLASSES |= {"forward": copied_forward, "one more": one_more_argument}


@pytest.fixture
def no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that does not take PyG's message passing."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the layer ran the operation")

    monkeypatch.setattr(gat_pyg.conv.base, "attend", refuse)


@every_layer
@pytest.mark.usefixtures("no_operation")
def test_a_subclass_of_pygs_layer_runs_unchanged(name: str) -> None:
    """Output and gradients, with PyG's dropout of the same seed."""
    edge_attr = normal(5, D)
    for kind, of in SUBCLASSES.items():
        if name == "TransformerConv" and kind in ("edge_update", "edge_updater", "own scores"):
            continue  # PyG's has none
        assert_same(pair(name, of, edge_dim=D, dropout=0.4), f"{name} {kind}", edge_attr=edge_attr)
    for layer in (layers := pair(name)):
        layer.update = create_autospec(layer.update, side_effect=torch.sin)  # of no module
    assert_same(layers, f"{name} mock")
    for aggr in ("max", "mean", pyg.aggr.MedianAggregation()):
        assert_same(pair(name, aggr=aggr), f"{name} {aggr}")


@every_layer
def test_edge_weight_of_a_subclass_is_used_or_refused(name: str) -> None:
    weight = normal(5).abs()
    for kind in ("message", "update", "own message"):
        conv = pair(name, SUBCLASSES[kind])[1]
        out = conv(normal(3, F), LOOPS.index)
        if name == "TransformerConv" and kind == "own message":
            with pytest.raises(NotImplementedError, match=r"edge_weight multiplies alpha in TransformerConv\.message"):
                conv(normal(3, F), LOOPS.index, edge_weight=weight)
            with pytest.raises(ValueError, match=r"no alpha to return: `message` has to set self\._alpha"):
                conv(normal(3, F), LOOPS.index, return_attention_weights=True)
        else:
            assert not torch.allclose(conv(normal(3, F), LOOPS.index, edge_weight=weight), out), kind
        assert_close(conv(normal(3, F), LOOPS.index), out)


# Hooks and modules ----------------------------------------------------------------------------------------------------


def doubled(value: Any) -> Any:
    """Twice a tensor or a tuple of tensors of floats; any other value."""
    if isinstance(value, tuple):
        return tuple(map(doubled, value))
    return 2 * value if isinstance(value, Tensor) and value.is_floating_point() else value


@every_layer
@pytest.mark.usefixtures("no_operation")
def test_hooks_get_what_pygs_give(name: str) -> None:
    """Hooks of each kind, one at a time: each is called with the same keys and tensors, and what it returns is used."""
    for step, when in itertools.product(("propagate", "message", "aggregate", "edge_update"), ("pre_hook", "hook")):
        layers, seen = pair(name, edge_dim=D, dropout=0.4), []
        if name == "TransformerConv" and step == "edge_update":
            continue  # PyG's has no such step

        def hook(layer: Any, inputs: Any, *out: Tensor, seen: Any = seen) -> Any:
            *graph, arguments = inputs
            seen.append((len(graph), dict(arguments), getattr(layer, "_alpha", None), *out))
            if out:
                return 2 * out[0]
            return *graph, {key: doubled(value) for key, value in arguments.items()}

        for layer in layers:
            getattr(layer, f"register_{step}_forward_{when}")(hook)
        assert_same(layers, f"{name} {step} {when}", edge_attr=normal(5, D))
        theirs, ours = seen
        assert list(ours[1]) == list(theirs[1]), f"{name} {step} {when}"
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Counted(nn.Module):
    """A projection of edges that depends on all rows that it gets, and draws a mask."""

    def __init__(self, lin: nn.Module) -> None:
        super().__init__()
        self.lin = lin
        self.norm = nn.BatchNorm1d(D).double()
        self.rows: list[int] = []

    def forward(self, edge_attr: Tensor) -> Tensor:
        self.rows.append(edge_attr.size(0))
        return self.lin(torch.dropout(self.norm(edge_attr), 0.5, train=True))


@every_layer
def test_a_projection_of_edges_is_called_once_and_on_the_edges_alone(name: str) -> None:
    layers = pair(name, edge_dim=D)
    for layer in layers:
        layer.lin_edge = Counted(layer.lin_edge)
    assert_same(layers, name, edge_attr=normal(5, D))
    assert layers[1].lin_edge.rows == layers[0].lin_edge.rows
    for layer in layers:
        layer.lin_edge = layer.lin_edge.lin
        layer.lin_edge.register_forward_hook(lambda _, __, out: out - out.mean(0))
    assert_same(layers, name, edge_attr=normal(5, D))


def test_a_mechanism_is_called_on_the_edges_alone() -> None:
    class Counting(nn.Module):
        def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
            assert edge_attr is not None and x_dst.size(0) == x_src.size(0) == edge_attr.size(0) == 4
            return x_dst.sum(-1) * x_src.sum(-1) + edge_attr.mean(0).sum()

    conv = LAYERS["GATConv"](F, C, H, edge_dim=D, mechanism=Counting()).double()
    index, edge_attr = torch.tensor([[0, 0, 1], [0, 1, 1]]), normal(3, D)
    x = normal(3, F)
    out = conv(x, index, edge_attr)
    with conv.register_message_forward_hook(lambda *_: None):
        assert_close(conv(x, index, edge_attr), out)


@every_layer
def test_another_aggregation_module_is_used(name: str) -> None:
    layers = pair(name)
    for layer in layers:
        layer.aggr_module.register_forward_hook(lambda _, __, out: out.sin())
    assert_same(layers, f"{name} hook")
    for layer in layers:
        layer.aggr_module = pyg.aggr.MaxAggregation()
    assert_same(layers, f"{name} max")


@every_layer
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_global_hooks_act_as_on_pygs_layers(name: str, kind: str) -> None:
    layers = pair(name, edge_dim=D)

    def hook(module: nn.Module, *values: Any) -> Any:
        if not isinstance(module, pyg.Linear):
            return None
        value = values[-1 if "forward" in kind else 0]
        return value.sin() if isinstance(value, Tensor) else tuple(None if v is None else v.sin() for v in value)

    with getattr(all_modules, f"register_module_{kind}")(hook):
        assert_same(layers, f"{name} {kind}", edge_attr=normal(5, D))
