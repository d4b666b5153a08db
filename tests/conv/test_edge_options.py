"""Features, weights and dropout of edges, batches of features, and `TransformerConv`: PyG's layers, and laws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.explain import Explainer, GNNExplainer, PGExplainer

import gat_pyg
from gat_pyg import GATConv, GATv2Conv, TransformerConv
from gat_pyg.conv import transformer
from tests.graph.test_edges import adjacency
from tests.graphs import BATCH, BIPARTITE, LOOPS, RANDOM, Graph
from tests.laws import assert_close

LAYERS: dict[str, Any] = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}
F, H, C, D = 5, 3, 5, 3  # sizes for which other tests compile kernels
every_layer = pytest.mark.parametrize("name", LAYERS)


class Calls(torch.nn.Module):
    """A model with the one call that TorchScript compiles."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_attr)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return LAYERS[name](F, C, H, edge_dim=D, **options).double()


def inputs(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    return draw(graph.num_src, F), graph.index, draw(graph.index.size(1), D, seed=1)


def answer(conv: Any, x: Any, index: Tensor, edge_attr: Tensor | None) -> list[Tensor]:
    """The output, alpha, and the gradients of x, of the edges' features and of every parameter."""
    ends = [part.clone().requires_grad_() for part in (x if isinstance(x, tuple) else (x,))]
    features = [] if edge_attr is None else [edge_attr.clone().requires_grad_()]
    out, (looped, alpha) = conv(
        tuple(ends) if isinstance(x, tuple) else ends[0], index, *features, return_attention_weights=True
    )
    leaves = [*ends, *features, *conv.parameters()]
    grads = torch.autograd.grad(out, leaves, draw(*out.shape, seed=2), allow_unused=True)
    zeros = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True))
    return [out, looped.double(), alpha, *zeros]


@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_transformer_is_pygs(edge_dim: int | None, bipartite: bool) -> None:
    graph = BIPARTITE if bipartite else RANDOM
    x: Any = draw(graph.num_src, F)
    x = (x, draw(graph.num_dst, F, seed=3)) if bipartite else x
    edge_attr = None if edge_dim is None else draw(graph.index.size(1), D, seed=1)
    for concat, beta, bias, root_weight in itertools.product((True, False), repeat=4):
        options = {"concat": concat, "beta": beta, "edge_dim": edge_dim, "bias": bias, "root_weight": root_weight}
        torch.manual_seed(0)
        theirs = pyg.TransformerConv(F, C, H, **options)
        torch.manual_seed(0)
        ours = TransformerConv(F, C, H, **options)
        assert [*ours.state_dict()] == [*theirs.state_dict()]
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
        found, expected = (answer(conv.double(), x, graph.index, edge_attr) for conv in (ours, theirs))
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{options} {at}")


def test_transformer_in_training_and_as_messages() -> None:
    x, index, edge_attr = inputs(RANDOM)
    conv = layer("TransformerConv", dropout=0.4)
    _, (_, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    assert_close(torch.zeros(40, H).double().index_add(0, index[1], alpha), torch.ones(40, H).double(), "not dropped")
    conv.eval()
    fused = conv(x, index, edge_attr)
    scripted = torch.jit.script(Calls(conv))
    assert_close(scripted(x, index, edge_attr), fused)
    conv.register_message_forward_pre_hook(lambda *_: None)
    assert_close(conv(x, index, edge_attr), fused)
    assert transformer.TransformerConv(-1, C, H, edge_dim=-1)(x.float(), index, edge_attr.float()).shape == (40, H * C)


@every_layer
def test_a_weight_scales_a_message_and_not_its_share(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    conv, ones = layer(name), torch.ones(300).double()
    plain, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    for weight in (ones, ones[:, None], ones[:, None].expand(-1, H)):
        assert_close(conv(x, index, edge_attr, edge_weight=weight), plain, f"{name} ones")
    edge = int((index[0] != index[1]).nonzero()[7])
    row, dst = int((index[0] != index[1])[:edge].sum()) if looped.size(1) != 300 else edge, int(index[1, edge])
    without = conv(x, index, edge_attr, edge_weight=ones.index_fill(0, torch.tensor(edge), 0.0))
    twice, (_, doubled) = conv(
        x, index, edge_attr, edge_weight=ones.index_fill(0, torch.tensor(edge), 2.0), return_attention_weights=True
    )
    assert_close(twice - plain, plain - without, f"{name} the message, added and taken away")
    assert (twice - plain)[dst].abs().min() > 1e-6
    assert ((twice - plain).abs().sum(1) > 0).nonzero().tolist() == [[dst]]
    assert_close(doubled[row], 2 * alpha[row], name)  # and no other changes
    assert_close(doubled.index_fill(0, torch.tensor(row), 0.0), alpha.index_fill(0, torch.tensor(row), 0.0), name)


@every_layer
def test_dropped_edges_are_drawn_by_the_seed_and_on_average_a_share_p(name: str) -> None:
    x, index, edge_attr = inputs(LOOPS)
    index, edge_attr = index.repeat(1, 400), edge_attr.repeat(400, 1)
    conv = layer(name, edge_dropout=0.3)
    torch.manual_seed(1)
    out, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    edges = looped[0] != looped[1]
    share = (alpha[edges] == 0).all(1).double()
    assert abs(share.mean() - 0.3) < 4 * (0.3 * 0.7 / share.numel()) ** 0.5  # of 800 edges: four standard deviations
    torch.manual_seed(1)
    assert torch.equal(conv(x, index, edge_attr), out)
    assert not torch.equal(conv(x, index, edge_attr), out)
    assert conv.state_dict().keys() == layer(name).state_dict().keys()
    everything, nothing = layer(name, edge_dropout=1.0), layer(name)
    alone = nothing(x, index[:, index[0] == index[1]], edge_attr[index[0] == index[1]])
    assert_close(nothing.eval()(x, index, edge_attr), conv.eval()(x, index, edge_attr), f"{name} eval")
    if name == "TransformerConv":  # others draw the features of added loops from all edges
        assert_close(everything(x, index, edge_attr), alone, f"{name} loops alone")


@every_layer
def test_a_hook_sees_the_edges_that_are_not_dropped(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    conv, seen = layer(name, edge_dropout=0.5), []
    conv.register_message_forward_hook(lambda _, __, message: seen.append(message.size(0)))
    _, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    assert seen == [int((alpha != 0).all(1).sum())] and seen[0] < looped.size(1) == alpha.size(0)


@every_layer
def test_edge_dropout_in_torchscript(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    conv = layer(name, edge_dropout=0.5)
    scripted = torch.jit.script(Calls(conv))
    outs = [scripted(x, index, edge_attr) for _ in range(2)]
    assert not torch.equal(*outs)
    assert_close(scripted.eval()(x, index, edge_attr), conv.eval()(x, index, edge_attr))


@every_layer
@pytest.mark.parametrize("layout", ["csr", "SparseTensor"])
def test_weights_and_dropout_on_a_matrix(name: str, layout: str) -> None:
    """Its edges have the order of its rows; added loops are among them, for which there is no weight."""
    index = RANDOM.index[:, RANDOM.index[0] != RANDOM.index[1]].unique(dim=1)
    index = index[:, (40 * index[1] + index[0]).argsort()]
    x, weight, matrix = draw(40, F), draw(index.size(1)), adjacency(Graph("", index, 40, 40), "csr")
    if layout == "SparseTensor":
        matrix = pytest.importorskip("torch_sparse", reason="it is torch_sparse's").SparseTensor.from_dense(
            matrix.to_dense()
        )
    torch.manual_seed(0)
    conv = LAYERS[name](F, C, H, edge_dropout=0.5).double()
    torch.manual_seed(1)
    assert conv(x, matrix).shape == (40, H * C)
    if name != "TransformerConv":
        with pytest.raises(NotImplementedError, match=r"edge_weight and edge_dropout need an edge list here"):
            conv(x, matrix, edge_weight=weight)
        conv.add_self_loops = False
    found = []
    for graph in (matrix, index):
        torch.manual_seed(1)
        found.append(conv(x, graph, edge_weight=weight))
    assert_close(*found, name)
    conv.register_message_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"edge_weight and edge_dropout need an edge list here"):
        conv(x, matrix)


@every_layer
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_features_and_weights_of_a_matrix_have_the_order_of_its_values(name: str, layout: str) -> None:
    index = RANDOM.index.unique(dim=1)  # by src, as the values of CSC are
    index = index if layout == "csc" else index[:, (40 * index[1] + index[0]).argsort()]
    matrix, num_edges = adjacency(Graph("", index, 40, 40), layout), index.size(1)
    conv = layer(name, **({} if name == "TransformerConv" else {"add_self_loops": False}))
    x, edge_attr = draw(40, F), draw(num_edges, D)
    assert_close(conv(x, matrix, edge_attr), conv(x, index, edge_attr), f"{name} features")
    with pytest.raises(ValueError, match=f"edge_attr has 7 rows, but the sparse matrix has {num_edges} edges"):
        conv(x, matrix, edge_attr[:7])
    conv = LAYERS[name](F, C, H, **({} if name == "TransformerConv" else {"add_self_loops": False})).double()
    weight = draw(num_edges)
    assert_close(conv(x, matrix, edge_weight=weight), conv(x, index, edge_weight=weight), f"{name} weights")


def test_the_values_of_a_matrix_are_edge_features() -> None:
    """PyG's layer takes them so, and ours on a `SparseTensor` too."""
    torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
    index = RANDOM.index.unique(dim=1)
    values = draw(index.size(1), D)
    matrix = torch_sparse.SparseTensor(row=index[1], col=index[0], value=values, sparse_sizes=(40, 40))
    for name in LAYERS:
        conv = layer(name, **({} if name == "TransformerConv" else {"add_self_loops": False}))
        assert_close(conv(draw(40, F), matrix), conv(draw(40, F), index, values), name)


class Explained(torch.nn.Module):
    """Two layers and scores of classes, of the nodes or, summed, of the graph."""

    def __init__(self, conv: Any, level: str) -> None:
        super().__init__()
        self.first = conv(F, C, H, edge_dim=D)
        self.second = conv(H * C, C, H, concat=False, edge_dim=D)
        self.level = level

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)
        return out if self.level == "node" else out.mean(0, keepdim=True)


def gnn_explainer(explained: Any, x: Tensor, index: Tensor, edge_attr: Tensor, level: str) -> list[Tensor]:
    explainer = Explainer(
        explained,
        GNNExplainer(epochs=20),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": level, "return_type": "raw"},
    )
    target = {"index": 3} if level == "node" else {}
    explanation = explainer(x, index, edge_attr=edge_attr, **target)
    return [explanation.edge_mask, explanation.node_mask]


def pg_explainer(explained: Any, x: Tensor, index: Tensor, edge_attr: Tensor, level: str) -> list[Tensor]:
    algorithm = PGExplainer(epochs=3).double()
    explainer = Explainer(
        explained,
        algorithm,
        explanation_type="phenomenon",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": level, "return_type": "raw"},
    )
    options: dict[str, Any] = {"target": torch.zeros(len(x) if level == "node" else 1, dtype=torch.long)}
    options |= {"edge_attr": edge_attr} | ({"index": 3} if level == "node" else {})
    for epoch in range(3):
        algorithm.train(epoch, explained, x, index, **options)
    return [explainer(x, index, **options).edge_mask]


@every_layer
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # of PyG's PGExplainer
@pytest.mark.parametrize("level", ["node", "graph"])
@pytest.mark.parametrize("explain", [gnn_explainer, pg_explainer])
def test_explanations_are_those_of_pygs_layers(
    name: str, level: str, explain: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of the edges is an edge weight, so that the layers run the operation, and no message is seen."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the layer ran PyG's message passing")

    monkeypatch.setattr(LAYERS[name], "_message_edges", refuse)
    x, index, edge_attr = inputs(RANDOM)
    index = torch.cat([index, torch.arange(3).expand(2, -1)], 1)  # with loops, which are replaced
    edge_attr = torch.cat([edge_attr, draw(3, D)])
    found = []
    for layers in (pyg, gat_pyg):
        torch.manual_seed(0)
        explained = Explained(getattr(layers, name), level).double()
        torch.manual_seed(1)
        found.append(explain(explained, x, index, edge_attr, level))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert theirs.std() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)


KINDS = [*LAYERS, "constant", "dot", "gatv2", "cosine"]  # layers, and mechanisms of GATConv


def kind_of(kind: str, **options: Any) -> Any:
    """A layer, or `GATConv` with a mechanism."""
    if kind in LAYERS:
        return layer(kind, **options)
    torch.manual_seed(0)
    return GATConv(F, C, H, mechanism=kind, edge_dim=None if kind == "constant" else D, **options).double()


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """The names of this package's operators in a graph."""
    names = (str(node.target) for node in graph.graph.nodes)
    return [name for name in names if name.startswith("gat_pyg.")]


class All(torch.nn.Module):
    """A call with every argument; `weights`: with alpha."""

    def __init__(self, conv: Any, weights: bool) -> None:
        super().__init__()
        self.conv = conv
        self.weights = weights

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_weight: Tensor) -> Any:
        options = {"return_attention_weights": True} if self.weights else {}
        return self.conv(x, edge_index, edge_attr, edge_weight=edge_weight, **options)


def results(model: Any, graph: Graph) -> list[Tensor]:
    """Outputs and the gradients of features, edge features and weights."""
    x, index, edge_attr = inputs(graph)
    leaves = [leaf.requires_grad_() for leaf in (x, edge_attr, draw(index.size(1), H, seed=4))]
    torch.manual_seed(3)
    out = model(leaves[0], index, *leaves[1:])
    out, (looped, alpha) = out if isinstance(out, tuple) else (out, (index, torch.zeros(1).double()))
    total = (out * draw(*out.shape, seed=5)).sum() + (alpha * draw(*alpha.shape, seed=6)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out, looped.double(), alpha, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("weights", [False, True], ids=["out", "alpha"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_as_one_operator_for_any_size(kind: str, weights: bool) -> None:
    dropout = 0.0 if kind == "TransformerConv" and weights else 0.4  # it returns alpha before dropout, by messages
    model = All(kind_of(kind, dropout=dropout, edge_dropout=0.3, backend="fused"), weights)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for graph in (RANDOM, LOOPS, BATCH):
        for one, other in zip(results(compiled, graph), results(model, graph), strict=True):
            assert_close(one, other, f"{kind} {graph}")
        counts.append(counter.frame_count)
    assert counts[1:] == counts[:1] * 2, "compiled again for another size"
    assert [name for graph in counter.graphs for name in operators(graph)] == ["gat_pyg.attend.default"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_compiled_as_one_operator(kind: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    leaves = [leaf.requires_grad_() for leaf in (torch.stack([x, 2 * x]), edge_attr, draw(300, seed=4))]
    model = All(kind_of(kind, edge_dropout=0.4, backend="fused"), True).eval()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    found = []
    for run in (compiled, model):
        out, (looped, alpha) = run(leaves[0], index, *leaves[1:])
        grads = torch.autograd.grad((out * alpha.sum()).sum(), leaves, allow_unused=True)
        found.append([out, looped.double(), alpha, *(grad for grad in grads if grad is not None)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, kind)
    assert [name for graph in counter.graphs for name in operators(graph)] == ["gat_pyg.attend.default"]
    if kind == "GATConv":
        model.train().conv.dropout = 0.5
        _, (looped, alpha) = compiled(leaves[0], index, *leaves[1:])
        dropped = (alpha == 0).all(2).all(0) & (looped[0] != looped[1])
        assert 0.3 < dropped.double().mean() < 0.52 and not torch.equal(alpha[0] == 0, alpha[1] == 0)


@pytest.mark.parametrize("weights", [False, True], ids=["out", "alpha"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_exported_for_any_size(kind: str, weights: bool, backend: str) -> None:
    """As one operator with backend "fused", else as plain ones."""
    model = All(kind_of(kind, backend=backend), weights).eval()
    N, E = torch.export.Dim("N", min=2), torch.export.Dim("E", min=2)
    x, index, edge_attr = inputs(RANDOM)
    arguments = x, index, edge_attr, draw(index.size(1), H, seed=4)
    program = torch.export.export(model, arguments, dynamic_shapes=({0: N}, {1: E}, {0: E}, {0: E}))
    assert operators(program.graph_module) == (["gat_pyg.attend.default"] if backend == "fused" else [])
    for graph in (RANDOM, LOOPS, BATCH):
        for one, other in zip(results(program.module(), graph), results(model, graph), strict=True):
            assert_close(one, other, f"{kind} {graph}")


@every_layer
def test_weights_and_probabilities_that_do_not_fit(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    with pytest.raises(ValueError, match=r"edge_weight has shape \[7\], expected \(E,\) or \(E, H\) with E = 300"):
        layer(name)(x, index, edge_attr, edge_weight=torch.ones(7))
    with pytest.raises(ValueError, match=r"edge_dropout is 1\.5, expected a probability in \[0, 1\]"):
        layer(name, edge_dropout=1.5)
