"""Features, weights and dropout of edges: laws, matrices and explainers, for every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, PGExplainer

import gat_pyg
from gat_pyg import TransformerConv
from tests.conv.test_compiled import inputs, layer
from tests.conv.test_draws import LAYERS, C, D, F, H, normal
from tests.graph.test_edges import adjacency
from tests.graphs import LOOPS, RANDOM, Graph
from tests.laws import assert_close

every_layer = pytest.mark.parametrize("name", LAYERS)


def test_transformer_returns_alpha_before_dropout() -> None:
    x, index, edge_attr = inputs(RANDOM)
    conv = layer("TransformerConv", dropout=0.4)
    _, (_, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    assert_close(torch.zeros(40, H).double().index_add(0, index[1], alpha), torch.ones(40, H).double())
    assert TransformerConv(-1, C, H, edge_dim=-1)(x.float(), index, edge_attr.float()).shape == (40, H * C)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_transformer_returns_a_matrix_as_it_is(layout: str) -> None:
    matrix, x = adjacency(RANDOM, layout).double(), normal(40, F)
    conv = TransformerConv(F, C, H).double()
    theirs = pyg.TransformerConv(F, C, H).double()
    theirs.load_state_dict(conv.state_dict())
    for messages in (False, True):
        if messages:
            conv.register_message_forward_hook(lambda *_: None)
        _, (same, alpha) = conv(x, matrix, return_attention_weights=True)
        _, (expected, weights) = theirs(x, matrix, return_attention_weights=True)
        assert same is expected is matrix
        assert_close(alpha, weights)


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
@pytest.mark.parametrize("layout", ["csr", pytest.param("SparseTensor", marks=pytest.mark.sparse)])
def test_weights_and_dropout_on_a_matrix(name: str, layout: str) -> None:
    """Its edges have the order of its rows; added loops are among them, for which there is no weight."""
    index = RANDOM.index[:, RANDOM.index[0] != RANDOM.index[1]].unique(dim=1)
    index = index[:, (40 * index[1] + index[0]).argsort()]
    x, weight, matrix = normal(40, F), normal(index.size(1)), adjacency(Graph("", index, 40, 40), "csr")
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
    outs = []
    for graph in (matrix, index):
        torch.manual_seed(1)
        outs.append(conv(x, graph, edge_weight=weight))
    assert_close(*outs, name)
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
    x, edge_attr = normal(40, F), normal(num_edges, D)
    assert_close(conv(x, matrix, edge_attr), conv(x, index, edge_attr), f"{name} features")
    with pytest.raises(ValueError, match=f"edge_attr has 7 rows, but the sparse matrix has {num_edges} edges"):
        conv(x, matrix, edge_attr[:7])
    conv = LAYERS[name](F, C, H, **({} if name == "TransformerConv" else {"add_self_loops": False})).double()
    weight = normal(num_edges)
    assert_close(conv(x, matrix, edge_weight=weight), conv(x, index, edge_weight=weight), f"{name} weights")
    unordered = torch.sparse_coo_tensor(index.flip(0, 1), torch.ones(num_edges), (40, 40))
    assert_close(conv(x, unordered), conv(x, index), f"{name} not coalesced")
    if name == "TransformerConv" and layout == "csr":  # the others' alpha is the values
        result, alpha = conv(x, unordered, return_attention_weights=True)[1]
        assert torch.equal(result.indices(), index.flip(0))
        assert_close(alpha, conv(x, index, return_attention_weights=True)[1][1], name)
    with pytest.raises(ValueError, match=r"COO matrix that is not coalesced, so the order of edge_weight is ambiguous"):
        conv(x, unordered, edge_weight=weight)


@pytest.mark.sparse
def test_the_values_of_a_matrix_are_edge_features() -> None:
    """PyG's layer takes them so, and ours on a `SparseTensor` too."""
    torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
    index = RANDOM.index.unique(dim=1)
    values = normal(index.size(1), D)
    matrix = torch_sparse.SparseTensor(row=index[1], col=index[0], value=values, sparse_sizes=(40, 40))
    for name in LAYERS:
        conv = layer(name, **({} if name == "TransformerConv" else {"add_self_loops": False}))
        assert_close(conv(normal(40, F), matrix), conv(normal(40, F), index, values), name)


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


def masks_by(algorithm: Any, explained: Any, x: Tensor, index: Tensor, edge_attr: Tensor, level: str) -> list[Tensor]:
    """The masks that an algorithm of PyG gives for a node or the graph."""
    is_trained = isinstance(algorithm, PGExplainer)
    explainer = Explainer(
        explained,
        algorithm,
        explanation_type="phenomenon" if is_trained else "model",
        node_mask_type="attributes" if isinstance(algorithm, GNNExplainer) else None,
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": level, "return_type": "raw"},
    )
    options: dict[str, Any] = {"edge_attr": edge_attr} | ({"index": 3} if level == "node" else {})
    if is_trained:
        options["target"] = torch.zeros(len(x) if level == "node" else 1, dtype=torch.long)
        for epoch in range(3):
            algorithm.train(epoch, explained, x, index, **options)
    explanation = explainer(x, index, **options)
    return [explanation[key] for key in ("edge_mask", "node_mask") if explanation.get(key) is not None]


EXPLAINERS: dict[str, tuple[Callable[[], Any], str]] = {
    "attention": (AttentionExplainer, "node"),
    "GNNExplainer": (lambda: GNNExplainer(epochs=5), "node"),
    "PGExplainer": (lambda: PGExplainer(epochs=3).double(), "graph"),
}


@every_layer
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # of PyG's PGExplainer
@pytest.mark.parametrize("explainer", EXPLAINERS)
def test_explanations_are_those_of_pygs_layers(name: str, explainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the edges is an edge weight, so the layers run the operation and not PyG's message passing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the layer ran PyG's message passing")

    if explainer != "attention":  # which reads what the messages are weighted by
        monkeypatch.setattr(LAYERS[name], "_by_messages", refuse)
    x, index, edge_attr = inputs(RANDOM)
    index = torch.cat([index, torch.arange(3).expand(2, -1)], 1)  # with loops, which are replaced
    edge_attr = torch.cat([edge_attr, normal(3, D)])
    (algorithm, level), masks = EXPLAINERS[explainer], []
    for layers in (pyg, gat_pyg):
        torch.manual_seed(0)
        explained = Explained(getattr(layers, name), level).double()
        torch.manual_seed(1)
        masks.append(masks_by(algorithm(), explained, x, index, edge_attr, level))
    for ours, theirs in zip(masks[1], masks[0], strict=True):
        assert theirs.std() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
