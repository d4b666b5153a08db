"""The layers: PyG's own layers are the oracle, for results, gradients and everything that people do with a layer."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops

import gat_pyg.attention.fused
import gat_pyg.conv.base
import gat_pyg.conv.gat
import gat_pyg.conv.gatv2
import gat_pyg.conv.loops
import gat_pyg.conv.transformer
import gat_pyg.graph.edges
from gat_pyg import GATConv, GATv2Conv
from gat_pyg.attention.fused import is_spent
from gat_pyg.conv import DotProduct, few
from gat_pyg.conv.mechanisms import MECHANISMS
from gat_pyg.features.linear import Linear
from gat_pyg.graph.adjacency import neighbourhoods
from gat_pyg.models import GAT
from tests.conv.test_draws import FILLS, LAYERS
from tests.graph.test_edges import adjacency
from tests.graphs import BATCH, BIPARTITE, LOOPS, RANDOM, WIDE, Graph
from tests.laws import assert_close
from tests.syncs import syncs

pytestmark = pytest.mark.usefixtures("float64")

both_layers = pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])


@pytest.fixture
def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that does not take the operation as a whole."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the layer ran PyG's message passing")

    for module in (gat_pyg.conv.gat, gat_pyg.conv.gatv2, gat_pyg.conv.transformer):
        monkeypatch.setattr(module, "softmax", refuse)


def pair(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """PyG's layer and ours, made with the same seed and so with the same weights."""
    layers = []
    for cls in (getattr(pyg, name), LAYERS[name]):
        torch.manual_seed(0)
        layers.append(cls(*args, **kwargs))
    return layers


def x_of(graph: Graph, channels: int = 5, side: str = "src") -> Tensor:
    generator = torch.Generator().manual_seed(int(side == "dst"))
    return torch.randn(graph.num_src if side == "src" else graph.num_dst, channels, generator=generator)


def run(layer: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
    """The output, attention, its order, and the gradients of inputs and parameters, by name."""
    inputs = {"x": x} if isinstance(x, Tensor) else dict(zip(("x_src", "x_dst"), x, strict=True))
    inputs["edge_attr"] = edge_attr
    inputs = {k: v.detach().clone().requires_grad_() for k, v in inputs.items() if v is not None}
    args = inputs["x"] if "x" in inputs else (inputs["x_src"], inputs.get("x_dst"))
    if "edge_attr" in inputs:
        kwargs["edge_attr"] = inputs["edge_attr"]
    layer.zero_grad()
    torch.manual_seed(1)
    out, attention = layer(args, edge_index, return_attention_weights=True, **kwargs)
    torch.manual_seed(1)
    plain = layer(args, edge_index, return_attention_weights=False, **kwargs)
    if isinstance(plain, tuple) and type(layer).__module__.startswith("torch_geometric"):
        plain = plain[0]  # PyG before 2.8 takes False for True
    assert torch.equal(plain, out)
    result: dict[str, Any] = {"out": out}
    if isinstance(attention, tuple):
        result["order"], result["alpha"] = attention
    else:
        row, col, result["alpha"] = attention.coo()
        result["order"] = torch.stack([row, col])
    weight = torch.arange(1.0, out.numel() + 1).view_as(out).sin()
    ((out * weight).sum() + result["alpha"].square().sum()).backward()
    leaves = {**inputs, **dict(layer.named_parameters())}
    return result | {f"grad {k}": torch.zeros_like(v) if v.grad is None else v.grad.clone() for k, v in leaves.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], case: str) -> None:
    assert ours.keys() == theirs.keys(), case
    for key, value in theirs.items():
        if key == "order":
            assert type(ours[key]) is type(value), case
            assert ours[key].layout == value.layout and ours[key].dtype == value.dtype, case
            order, truth = ours[key].to_dense(), value.to_dense()  # ids, or a matrix with alpha in it
            assert_close(order.double(), truth.double(), f"{case} {key}")
        else:
            assert_close(ours[key], value, f"{case} {key}")


# Against PyG --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_messages")
@pytest.mark.parametrize("width", [5, (5, 5)], ids=["one W", "two"])
@pytest.mark.parametrize("options", [{"residual": True}, {"mechanism": "dot", "concat": False}], ids=str)
def test_the_first_rows_of_one_x_may_be_those_of_dst(width: Any, options: dict[str, Any]) -> None:
    conv, x = GATConv(width, 4, heads=2, **options).double(), x_of(WIDE).repeat(3, 1)
    few, size = (RANDOM.index % 6)[:, RANDOM.index[1] % 6 < 2], (6, 2)
    assert_close(conv(x, few, size=size), conv((x, x[:2]), few))
    with pytest.raises(ValueError, match=r"6 src and 6 dst rows, but the graph's size is \(6, 7\)"):
        conv(x, few, size=(6, 7))


def test_src_alone() -> None:
    for loops, in_channels in itertools.product((True, False), (5, (5, 6))):
        theirs, ours = pair("GATConv", in_channels, 5, heads=3, add_self_loops=loops)
        x = x_of(BIPARTITE), None
        for size in ((5, 3), (5, 5), None, *(() if loops else ((5, 0), (None, 0)))):  # some without a dst
            index = BIPARTITE.index if size else RANDOM.index % 5
            index = index[:, :0] if size and size[1] == 0 else index
            assert_same(run(ours, x, index, size=size), run(theirs, x, index, size=size), f"{loops} {size}")


@pytest.mark.parametrize(
    "layout", ["coo", "csr", pytest.param("SparseTensor", marks=pytest.mark.sparse), "EdgeIndex", "sorted EdgeIndex"]
)
@pytest.mark.parametrize("graph", [LOOPS, BIPARTITE], ids=str)
@both_layers
@pytest.mark.usefixtures("no_messages")
def test_every_adjacency_type(name: str, graph: Graph, layout: str) -> None:
    index = torch.unique(graph.index, dim=1).contiguous()
    if layout in ("coo", "csr"):
        edges: Any = adjacency(graph, layout).double()
    elif layout == "SparseTensor":
        torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
        edges = torch_sparse.SparseTensor.from_edge_index(index, sparse_sizes=(graph.num_src, graph.num_dst)).t()
    else:
        edges = EdgeIndex(index, sparse_size=(graph.num_src, graph.num_dst), sort_order="row")
        edges = edges.sort_by("col").values if layout.startswith("sorted") else edges
    x: Any = x_of(graph) if graph is not BIPARTITE else (x_of(graph), x_of(graph, 6, "dst"))
    for loops in (True, False):
        theirs, ours = pair(name, 5 if graph is not BIPARTITE else (5, 6), 5, heads=3, add_self_loops=loops)
        if graph is BIPARTITE and loops and layout in ("coo", "csr"):
            continue  # PyG builds a square matrix there and fails
        assert_same(run(ours, x, edges), run(theirs, x, edges), f"{graph} {layout} {loops}")


@pytest.mark.sparse
@both_layers
def test_a_sparse_tensor_by_messages(name: str) -> None:
    torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
    matrix = torch_sparse.SparseTensor.from_edge_index(LOOPS.index.unique(dim=1), sparse_sizes=(LOOPS.num_src,) * 2).t()
    conv, x = pair(name, 5, 5, heads=3)[1], x_of(LOOPS)
    expected = conv(x, matrix)
    with conv.register_message_forward_hook(lambda *_: None):
        assert_close(conv(x, matrix), expected)
        with pytest.raises(
            NotImplementedError, match=r"edge_index is a SparseTensor\. Pass edge_index of shape \(2, E\)"
        ):
            pair(name, 5, 5, edge_dim=2)[1](x, matrix)


@both_layers
@pytest.mark.parametrize("loops", [True, False])
def test_csc_which_pyg_refuses(name: str, loops: bool) -> None:
    theirs, ours = pair(name, 5, 5, heads=3, add_self_loops=loops)
    x = x_of(RANDOM)
    expected = theirs(x, adjacency(RANDOM, "csr").double(), return_attention_weights=True)
    out, (attention, alpha) = ours(x, adjacency(RANDOM, "csc").double(), return_attention_weights=True)
    assert_close(out, expected[0])
    assert attention.layout == torch.sparse_csc
    assert_close(attention.to_dense(), expected[1][0].to_dense())
    assert torch.equal(attention.values(), alpha)
    with ours.register_message_forward_hook(lambda *_: None):
        assert_close(ours(x, adjacency(RANDOM, "csc").double()), expected[0])


@both_layers
def test_lazy_sizes(name: str) -> None:
    x, edge_attr = (x_of(BIPARTITE), x_of(BIPARTITE, 6, "dst")), torch.randn(5, 3)
    layers = pair(name, (-1, -1), 4, heads=2, edge_dim=-1, residual=True)
    for layer in layers:
        torch.manual_seed(2)
        layer(x, BIPARTITE.index, edge_attr=edge_attr)
    theirs, ours = layers
    assert_same(run(ours, x, BIPARTITE.index, edge_attr), run(theirs, x, BIPARTITE.index, edge_attr), "lazy")


def test_checkpoint_of_an_old_pyg() -> None:
    model = nn.Sequential(GATConv(5, 4, heads=2))
    new = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    old = {k: v for k, v in new.items() if k != "0.lin.weight"}
    old |= {"0.lin_src.weight": new["0.lin.weight"], "0.lin_dst.weight": new["0.lin.weight"]}
    model.load_state_dict(old)
    assert all(torch.equal(v, new[k]) for k, v in model.state_dict().items())
    old["0.lin_dst.weight"] = old["0.lin_dst.weight"] + 1
    with pytest.raises(ValueError, match=r"two weight matrices.*Use in_channels=\(5, 5\)"):
        model.load_state_dict(old)


@pytest.mark.parametrize(
    ("name", "bipartite", "residual"),
    [("GATConv", False, True), ("GATConv", True, False), ("GATv2Conv", True, True)],
)
@pytest.mark.usefixtures("no_messages")
def test_sparse_features_give_what_dense_ones_do(
    name: str, bipartite: bool, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, channels = (WIDE, (5, 6)) if bipartite else (RANDOM, 5)
    layer = LAYERS[name](channels, 4, heads=3, residual=residual, add_self_loops=not bipartite)
    both = [x_of(graph).relu(), x_of(graph, 6, "dst").relu()]
    sparse = [x.to_sparse_csr() for x in both]
    dense = run(layer, tuple(both) if bipartite else both[0], graph.index)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to_dense", None)  # nothing is made dense
        ours = run(layer, tuple(sparse) if bipartite else sparse[0], graph.index)
    for key in ("grad x", "grad x_src", "grad x_dst"):
        if key in dense:
            dense[key] = dense[key] * (ours[key].to_dense() != 0)
            ours[key] = ours[key].to_dense()
            assert ours[key].any(), key
    assert_same(ours, dense, f"{name} {bipartite=}")
    lazy = LAYERS[name]((-1, -1) if bipartite else -1, 4, add_self_loops=not bipartite)
    assert lazy(tuple(sparse) if bipartite else sparse[0], graph.index).shape == (graph.num_dst, 4)
    with pytest.raises(ValueError, match=r"has 5 features, expected in_channels = 9"):
        LAYERS[name](9, 4)(sparse[0], graph.index)


# Mechanisms ---------------------------------------------------------------------------------------------------------


def test_constant_attention_is_the_mean() -> None:
    conv = GATConv(5, 4, heads=2, mechanism="constant", bias=False)
    assert [name for name, _ in conv.named_parameters()] == ["lin.weight"]
    mean = pyg.SimpleConv(aggr="mean", combine_root="self_loop")
    index = RANDOM.index[:, RANDOM.index[0] != RANDOM.index[1]]
    assert_close(conv(x_of(RANDOM), index), mean(conv.lin(x_of(RANDOM)), index))


def test_dynamic_attention_is_gatv2_with_shared_weights() -> None:
    v2 = pyg.GATv2Conv(5, 4, heads=2, edge_dim=3, share_weights=True, bias=False)
    conv = GATConv(5, 4, heads=2, mechanism="gatv2", edge_dim=3, bias=False)
    conv.lin.weight.data = v2.lin_l.weight.data
    conv.mechanism.load_state_dict({"att": v2.att.data, "lin_edge.weight": v2.lin_edge.weight.data})
    edge_attr = torch.randn(RANDOM.index.size(1), 3)
    assert_close(conv(x_of(RANDOM), RANDOM.index, edge_attr), v2(x_of(RANDOM), RANDOM.index, edge_attr))


def test_cosine_is_pygs_agnn() -> None:
    """AGNN has no weight matrix and one head, and adds self-loops as `GATConv` does."""
    conv = GATConv(5, 5, mechanism="cosine", bias=False)
    theirs = pyg.AGNNConv()
    conv.lin.weight.data = torch.eye(5)
    conv.mechanism.beta.data.fill_(-1.7)
    theirs.beta.data.fill_(-1.7)
    results = []
    for layer, beta in ((conv, conv.mechanism.beta), (theirs, theirs.beta)):
        x = x_of(RANDOM).requires_grad_()
        out = layer(x, RANDOM.index)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (x, beta))])
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected)


def test_dot_product_is_torchs_attention() -> None:
    conv = GATConv(5, 4, heads=2, mechanism=DotProduct(), bias=False)
    index = torch.cartesian_prod(torch.arange(6), torch.arange(6)).t()
    z = conv.lin(torch.randn(6, 5)).view(6, 2, 4).transpose(0, 1)
    expected = nn.functional.scaled_dot_product_attention(z, z, z).transpose(0, 1).flatten(1)
    conv.lin = nn.Identity()
    conv.in_channels = 8
    assert_close(conv(z.transpose(0, 1).flatten(1), index), expected)


# What people do with a layer ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, as users write them."""

    def __init__(self, layer: Any, first: Any = 5, second: Any = 15) -> None:
        super().__init__()
        self.first = layer(first, 5, heads=3)
        self.second = layer(second, 5, heads=3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@both_layers
def test_the_fast_template_is_compiled(name: str) -> None:
    conv = LAYERS[name](5, 4)
    for step in ("propagate", "edge_updater"):
        assert getattr(conv, step).__module__.startswith(f"{type(conv).__module__}_{name}_{step}")
    assert not conv.fuse  # message_and_aggregate is not defined: the operation lives in forward


@both_layers
@pytest.mark.usefixtures("no_messages")
def test_to_hetero(name: str) -> None:
    metadata = (
        ["paper", "author"],
        [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")],
    )
    x = {"paper": torch.randn(6, 5), "author": torch.randn(4, 5)}
    index = {
        edge: torch.randint(4, (2, 9), generator=torch.Generator().manual_seed(i)) for i, edge in enumerate(metadata[1])
    }

    def layer(module: Any) -> Any:
        return lambda channels, out, heads=1: module(channels, out, heads=heads, add_self_loops=False)

    torch.manual_seed(0)
    theirs = pyg.to_hetero(Net(layer(getattr(pyg, name)), (-1, -1), (-1, -1)), metadata)
    ours = pyg.to_hetero(Net(layer(LAYERS[name]), (-1, -1), (-1, -1)), metadata)
    ours(x, index)
    theirs(x, index)
    theirs.load_state_dict(ours.state_dict())
    for kind, out in ours(x, index).items():
        assert_close(out, theirs(x, index)[kind])
    with pytest.raises(NotImplementedError, match=r"to_hetero cannot trace. Use PyG's models.GAT with layers of"):
        pyg.to_hetero(GAT(5, [4], 2, [2, 1]), metadata)


@both_layers
def test_copies_and_pickles(name: str) -> None:
    conv = LAYERS[name](5, 4, heads=2, edge_dim=3)
    x, edge_attr = x_of(RANDOM), torch.randn(RANDOM.index.size(1), 3)
    expected = conv(x, RANDOM.index, edge_attr)
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(twin(x, RANDOM.index, edge_attr), expected)


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("no_messages")
def test_autocast_and_half_precision(name: str, edge_dim: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (layer.float() for layer in pair(name, 5, 4, heads=2, edge_dim=edge_dim))
    x, edge_attr = x_of(RANDOM).float(), None if edge_dim is None else torch.randn(300, 3, dtype=torch.float32)
    forward, rows = Linear.forward, set()

    def recorded(lin: Linear, x: Tensor) -> Tensor:
        rows.add(x.size(0))
        return forward(lin, x)

    monkeypatch.setattr(Linear, "forward", recorded)
    for input_dtype in (torch.float32, torch.bfloat16):  # the input, and what another layer returns under autocast
        x = x.to(input_dtype).float()
        exact = ours(x, RANDOM.index, edge_attr).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            out = ours(x.to(input_dtype), RANDOM.index, edge_attr)
            assert out.dtype == theirs(x.to(input_dtype), RANDOM.index, edge_attr).dtype
            assert_close(out.bfloat16(), exact)
    theirs, ours = theirs.bfloat16(), ours.bfloat16()
    inputs = x.bfloat16(), RANDOM.index, None if edge_attr is None else edge_attr.bfloat16()
    out = ours(*inputs)
    assert out.dtype == theirs(*inputs).dtype == torch.bfloat16
    assert_close(out, exact)
    assert rows == {40}  # no edge is projected: that is `[E, H, C]`


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_gives_an_empty_batch(name: str) -> None:
    for options, side in itertools.product([{}, {"mechanism": "gatv2"}] if name == "GATConv" else [{}], (1, 2)):
        conv, parts = LAYERS[name](5, 4, heads=2, edge_dim=3, **options), [torch.randn(0, 40, 5) for _ in range(side)]
        x, edge_attr = parts[0].requires_grad_() if side == 1 else tuple(parts), torch.randn(300, 3)
        out, (looped, alpha) = conv(x, RANDOM.index, edge_attr, return_attention_weights=True)
        assert out.shape == (0, 40, 8) and alpha.shape == (0, looped.size(1), 2)
        conv(x, RANDOM.index, edge_attr).sum().backward()
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in conv.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_meta_and_fake_tensors_have_the_shapes_that_pyg_gives(name: str) -> None:
    def described(layer: Any, weights: bool, **arguments: Tensor) -> list[Any]:
        x = torch.randn(9, 5, requires_grad=True)
        options = {"return_attention_weights": True} if weights else {}
        result = layer(x, torch.zeros(2, 20, dtype=torch.long), **arguments, **options)
        (result[0] if weights else result).sum().backward()
        tensors = [*tree_leaves(result), x.grad, *(p.grad for _, p in sorted(layer.named_parameters()))]
        return [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]

    dropped = {"heads": 2, "dropout": 0.5}
    for mode, size, edge_dim, loops, weights in itertools.product(
        ("meta", "fake"), ({}, dropped), (None, 3), (True, False), (True, False)
    ):
        if loops and (name == "TransformerConv" or weights):  # the edges with loops have a size that depends on ids
            continue
        options = {**size, "edge_dim": edge_dim} | ({} if name == "TransformerConv" else {"add_self_loops": loops})
        edge_attr = None if edge_dim is None else torch.randn(20, edge_dim)
        expected = described(getattr(pyg, name)(5, 4, **options), weights, edge_attr=edge_attr)
        with torch.device("meta") if mode == "meta" else FakeTensorMode():
            layer, edge_attr = LAYERS[name](5, 4, **options), None if edge_dim is None else torch.randn(20, edge_dim)
            found = described(layer, weights, edge_attr=edge_attr)
            more = described(layer, weights, edge_attr=edge_attr, edge_weight=torch.rand(20))
        device = "meta" if mode == "meta" else "cpu"
        assert found == more == [each and (*each[:2], device) for each in expected], f"{mode} {options}"


# Bad input ----------------------------------------------------------------------------------------------------------

OPTIONS_OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"heads": 0}, "heads is 0, expected at least 1"),
    ({"out_channels": -3}, "out_channels is -3, expected at least 1"),
    ({"dropout": 1.2}, "dropout is 1.2, expected a probability in [0, 1]"),
    ({"dropout": -0.1}, "dropout is -0.1"),
    ({"dropout": "0.5"}, "dropout is '0.5', expected a probability in [0, 1]"),
    ({"dropout": float("nan")}, "dropout is nan, expected a probability in [0, 1]"),
    ({"edge_dropout": 1.5}, "edge_dropout is 1.5, expected a probability in [0, 1]"),
    ({"backend": "dense"}, "backend is 'dense', expected one of 'auto'"),
    ({"heads": 1.5}, "heads is 1.5, expected a whole number, at least 1"),
    ({"heads": "8"}, "heads is '8', expected a whole number, at least 1"),
    ({"heads": None}, "heads is None, expected a whole number"),
    ({"out_channels": 4.0}, "out_channels is 4.0, expected a whole number"),
    ({"in_channels": 5.0}, "in_channels is 5.0, expected a whole number"),
    ({"in_channels": (5, "6")}, "in_channels is '6', expected a whole number"),
    ({"in_channels": -2}, "in_channels is -2, expected at least 0, or -1: as in the first call"),
    ({"edge_dim": 2.5}, "edge_dim is 2.5, expected a whole number"),
]
KNOWN = f"expected {', '.join(map(repr, MECHANISMS))} or a module"
MECHANISMS_OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": "sum"}, f"mechanism is 'sum', {KNOWN}"),
    ({"mechanism": {"_target_": "x"}}, KNOWN),
    ({"mechanism": 3}, KNOWN),
    ({"mechanism": "constant", "edge_dim": 3}, "edge_dim is 3, but constant attention has no score"),
]


@pytest.mark.parametrize("name", LAYERS)
def test_an_option_out_of_range_is_an_error(name: str) -> None:
    for options, message in OPTIONS_OUT_OF_RANGE + (MECHANISMS_OUT_OF_RANGE if name == "GATConv" else []):
        with pytest.raises(ValueError, match=re.escape(message)):
            LAYERS[name](**{"in_channels": 5, "out_channels": 4, **options})
    assert LAYERS[name](np.int64(5), 4).state_dict().keys() == LAYERS[name](5, 4).state_dict().keys()
    for wrong, message in (("head", " Did you mean heads?"), ("vertices", "")):
        with pytest.raises(TypeError, match=re.escape(f"{name} has no argument {wrong}.{message}") + "$"):
            LAYERS[name](5, 4, **{wrong: 4})


X, INDEX = torch.zeros(40, 5, dtype=torch.float64), RANDOM.index
ON = "expected cpu, the device of x. Did you mean {0}.to('cpu')?"
WRONG_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(40, 6)}, ValueError, "x (src) has 6 features, expected in_channels = 5"),
    ({"x": torch.zeros(40)}, ValueError, "x (src) has shape (40,), expected (N, F)"),
    ({"x": X.numpy()}, ValueError, "x (src) is of type ndarray, expected a tensor"),
    ({"x": (X, [[0.0] * 5] * 40)}, ValueError, "x (dst) is of type list, expected"),
    ({"x": (X,)}, ValueError, "x has length 1, expected a tensor (N, F) or a pair (x_src, x_dst or None)"),
    ({"x": (None, X)}, ValueError, "x (src) is of type NoneType, expected"),
    ({"x": (X, X.to("meta"))}, ValueError, f"x_dst is on meta, {ON.format('x_dst')}"),
    ({"edge_index": INDEX.t()}, ValueError, "shape (300, 2), expected (2, E). Did you mean edge_index.t()"),
    ({"edge_index": INDEX.float()}, ValueError, "dtype torch.float32, expected integers"),
    ({"edge_index": INDEX.to(torch.uint32)}, ValueError, "Did you mean edge_index.long"),
    ({"edge_index": [[0, 1], [1, 0]]}, ValueError, "edge_index is of type list, expected"),
    ({"edge_index": INDEX.numpy()}, ValueError, "edge_index is of type ndarray, expected an integer tensor"),
    ({"edge_index": None}, ValueError, "edge_index is of type NoneType, expected an integer tensor"),
    ({"edge_index": INDEX.to("meta")}, ValueError, f"edge_index is on meta, {ON.format('edge_index')}"),
    ({"edge_index": INDEX - 1}, IndexError, "the src id -1, expected ids of at least 0"),
    ({"edge_index": INDEX + 5}, IndexError, "the src id 44, but there are 40 src nodes"),
    ({"edge_attr": torch.zeros(300, 3).numpy()}, ValueError, "edge_attr is of type ndarray, expected a tensor"),
    ({"edge_attr": X.new_zeros(300, 3).to("meta")}, ValueError, f"edge_attr is on meta, {ON.format('edge_attr')}"),
    ({"edge_attr": torch.zeros(300, 3)}, ValueError, "edge_attr has dtype torch.float32, expected torch.float64"),
    ({"edge_attr": torch.zeros(300, 3).long()}, ValueError, "Did you mean edge_attr.to(torch.float64)?"),
    ({"edge_attr": X.new_zeros(7, 3)}, ValueError, "edge_attr has 7 rows, expected one per edge, E = 300"),
    ({"edge_attr": X.new_zeros(300, 2)}, ValueError, "edge_attr has 2 features, expected edge_dim = 3"),
    ({"edge_attr": X.new_zeros(300)}, ValueError, "edge_attr has 1 features, expected edge_dim = 3"),
    ({"edge_weight": torch.ones(7)}, ValueError, "edge_weight has shape [7], expected (E,) or (E, H) with E = 300"),
]


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_that_do_not_fit_are_an_error(name: str) -> None:
    conv = LAYERS[name](5, 4, edge_dim=3)
    for arguments, error, message in WRONG_CALLS:
        with pytest.raises(error, match=re.escape(message)):
            conv(**{"x": X, "edge_index": INDEX, "edge_attr": torch.zeros(300, 3), **arguments})


def test_arguments_that_one_layer_refuses() -> None:
    x, both = x_of(RANDOM), (x_of(BIPARTITE), x_of(BIPARTITE, 5, "dst"))
    for layer in (GATv2Conv(5, 4), LAYERS["TransformerConv"](5, 4), GATConv(5, 4, mechanism=DotProduct())):
        with pytest.raises(ValueError, match=r"x is \(x_src, None\), but both ends of an edge are scored"):
            layer((x, None), INDEX)
        if not isinstance(layer, GATConv):
            with pytest.raises(ValueError, match="edge_attr was passed to a layer without edge features"):
                layer(x, INDEX, torch.zeros(300, 3))
    with pytest.raises(ValueError, match=r"edge_attr has dtype torch\.float32, expected torch\.float64"):
        GATConv(5, 4, edge_dim=3, mechanism="gatv2")(x, INDEX, torch.zeros(300, 3, dtype=torch.float32))
    for layer in (GATConv, GATv2Conv):
        conv = layer((5, 5), 4, residual=True, add_self_loops=False, flow="target_to_source")
        with pytest.raises(ValueError, match=r"the skip connection has 3 rows, one for each dst, but .* output has 5"):
            conv(both, BIPARTITE.index.flip(0))
    with pytest.raises(ValueError, match="the layer has edge_dim, but edge_attr is None"):
        LAYERS["TransformerConv"](5, 4, edge_dim=3)(x, INDEX)
    with pytest.raises(ValueError, match=r"x has 5 src and 3 dst rows, but the graph's size is \(5, 4\)"):
        GATConv(5, 4)(both, BIPARTITE.index, size=(5, 4))
    with pytest.raises(ValueError, match=r"x has 5 src and 3 dst rows, but the graph's size is \(4, 3\)"):
        GATConv(5, 4)(both, EdgeIndex(BIPARTITE.index % 3, sparse_size=(4, 3)))
    with pytest.raises(NotImplementedError, match=r"edge_index is a sparse matrix\. Pass edge_index of shape \(2, E\)"):
        GATConv(5, 4, edge_dim=3)(
            x, adjacency(RANDOM, "csr").double(), torch.randn(RANDOM.index.unique(dim=1).size(1), 3)
        )


@pytest.mark.kernels
@pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True)])
def test_output_is_finished_in_place_where_nobody_needs_it(
    bias: bool, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to the last bit, and what comes out may be written to either way; as one node, too."""
    torch.manual_seed(0)
    layer = GATConv(3, 5, heads=3, bias=bias, residual=residual)  # 40 N bytes of a head, more than 32 for an edge
    x, index, direction = torch.randn(40, 3), torch.tensor([[0, 1, 2], [1, 2, 2]]), torch.randn(40, 15)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = layer(leaf, index)
        result = out.detach().clone()
        with torch.no_grad():
            assert torch.equal(layer(x, index), result)
        out.mul_(2.0)
        return [result, *torch.autograd.grad((out * direction).sum(), [leaf, *layer.parameters()])]

    monkeypatch.setattr(few, "FEW", 0)
    node = run()
    monkeypatch.setattr(GATConv, "_tensors", lambda *_: None)
    results = []
    for allowed in (True, False):
        spent = []

        def recorded(out: Tensor, allowed: bool = allowed, spent: list[bool] = spent) -> bool:
            spent.append(is_spent(out))
            return allowed and spent[-1]

        monkeypatch.setattr(gat_pyg.conv.base, "is_spent", recorded)
        results.append(run())
        assert spent == [True, True]
    for whole, here, elsewhere in zip(node, *results, strict=True):
        assert torch.equal(here, elsewhere)
        assert_close(whole, here)


@pytest.mark.kernels
def test_bias_alone_may_be_mapped_over() -> None:
    """Nothing is written in place into what is not mapped over."""
    layer, x, biases = GATConv(3, 5, heads=3), torch.randn(40, 3), torch.randn(5, 15)
    index = torch.tensor([[0, 1, 2], [1, 2, 2]])
    mapped = torch.func.vmap(lambda bias: torch.func.functional_call(layer, {"bias": bias}, (x, index)))(biases)
    expected = layer(x, index) - layer.bias + biases[:, None]
    assert_close(mapped, expected)


def derivatives(features: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
    (first,) = torch.autograd.grad(features.sin().sum(), edge_attr, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), edge_attr, retain_graph=True)
    return first, second


@pytest.mark.parametrize("fill_value", FILLS, ids=str)
@pytest.mark.parametrize("graph", [LOOPS, WIDE, BATCH], ids=str)
def test_features_of_loops_are_pygs_without_sizes_that_depend_on_ids(
    graph: Graph, fill_value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced for any N and E; whatever the features of replaced loops are, they are not read.

    Edges that are grouped already are summed without PyG's scatter, whose order on a GPU is any.
    """
    layer = GATConv(6, 4, edge_dim=3, fill_value=fill_value)
    is_edge, num_loops = graph.index[0] != graph.index[1], min(graph.num_src, graph.num_dst)
    edge_attr = torch.randn(graph.index.size(1), 3).masked_fill_(~is_edge[:, None], torch.inf).requires_grad_()
    _, pygs = add_self_loops(
        graph.index[:, is_edge], edge_attr[is_edge], fill_value, num_nodes=max(graph.num_src, graph.num_dst)
    )
    expected = torch.zeros(graph.index.size(1) + num_loops, 3)
    expected[:] = 1.0 if fill_value == "mul" else 0.0
    rows = torch.cat([is_edge, torch.ones(num_loops, dtype=torch.bool)])
    expected[rows] = pygs[: int(rows.sum())]
    loops = gat_pyg.conv.loops
    traced = torch.compile(loops.features_with_loops, fullgraph=True, dynamic=True, backend="eager")
    for function in (loops.features_with_loops, traced):
        features = function(layer, graph.index, edge_attr, graph.num_src, graph.num_dst)
        assert torch.equal(features, expected)
        for one, two in zip(*(derivatives(each, edge_attr) for each in (features, expected)), strict=True):
            assert torch.equal(one, two)
    if fill_value in ("add", "mean"):
        monkeypatch.setattr(loops, "compute_loop_attr", None)
        edges = neighbourhoods(graph.index, graph.num_src, graph.num_dst, add_self_loops=True)
        call = partial(loops.features_with_loops, layer, graph.index, num_src=graph.num_src, num_dst=graph.num_dst)
        grouped, plain = (call(values, edges=edges) for values in (edge_attr, edge_attr.detach()))
        assert torch.equal(grouped[rows], expected[rows]) and torch.equal(plain[rows], expected[rows])
        for one, two in zip(*(derivatives(each[rows], edge_attr) for each in (grouped, expected)), strict=True):
            assert_close(one, two)


@pytest.mark.parametrize("fill_value", ["mean", 1.0])
def test_a_training_step_on_a_new_graph_costs_one_sync(fill_value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of edges, of which some are loops, included. In the layer, in the operation and in what both prepare."""
    monkeypatch.setattr(gat_pyg.graph.edges, "is_remote", lambda _: True)
    layer = GATConv(6, 4, heads=2, edge_dim=3, dropout=0.5, fill_value=fill_value, backend="segment")
    index, x, edge_attr = LOOPS.index.clone(), torch.randn(3, 6), torch.randn(5, 3, requires_grad=True)
    with syncs() as syncs_of_steps:
        layer(x, index, edge_attr).sum().backward()
        layer(x, index, edge_attr).sum().backward()  # the second step has nothing to wait for
    assert syncs_of_steps == ["tolist"]
    assert edge_attr.grad is not None and not edge_attr.grad[[0, 2, 3]].any() and edge_attr.grad[[1, 4]].any()
