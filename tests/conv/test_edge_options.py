"""Features, weights and dropout of edges, batches of features, and `TransformerConv`: PyG's layers, and laws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import Explainer, GNNExplainer

from gat_pyg import GATConv, GATv2Conv, TransformerConv
from gat_pyg.conv import transformer
from graphs import BIPARTITE, LOOPS, RANDOM, Graph
from laws import assert_close

LAYERS: dict[str, Any] = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}
F, H, C, D = 5, 3, 4, 2
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
def test_an_edge_weight_multiplies_alpha(name: str) -> None:
    for graph, weight in itertools.product((RANDOM, LOOPS), (draw(300, H), draw(300))):
        x, index, edge_attr = inputs(graph)
        weight = weight[: index.size(1)]
        conv = layer(name)
        _, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
        found, weighted = [], None
        for backend in ("fused", "segment", "reference", "messages"):
            conv.backend = "auto" if backend == "messages" else backend
            if backend == "messages":
                conv.register_propagate_forward_pre_hook(lambda *_: None)
            own = weight.clone().requires_grad_()
            out, (_, weighted) = conv(x, index, edge_attr, edge_weight=own, return_attention_weights=True)
            found.append([out, weighted, *torch.autograd.grad(out, own, draw(*out.shape))])
        for results in found[1:]:
            for one, other in zip(results, found[0], strict=True):
                assert_close(one, other, f"{name} {graph}")
        loops = conv.add_self_loops
        kept = weight[index[0] != index[1]] if loops else weight
        kept = kept.view(kept.size(0), -1).expand(-1, H)
        factor = torch.cat([kept, torch.ones(alpha.size(0) - kept.size(0), H, dtype=alpha.dtype)])
        assert weighted is not None and looped.size(1) == alpha.size(0)
        assert_close(weighted, alpha * factor, name)


@every_layer
def test_a_batch_is_each_of_its_graphs(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    batch, conv = torch.stack([x, x.flip(0), 2 * x]), layer(name)
    out, (looped, alpha) = conv(batch, index, edge_attr, return_attention_weights=True)
    assert_close(conv(batch, index, edge_attr), out)
    for b, each in enumerate(batch):
        alone, (same, weights) = conv(each, index, edge_attr, return_attention_weights=True)
        assert_close(out[b], alone, f"{name} {b}")
        assert_close(alpha[b], weights, f"{name} {b}")
        assert torch.equal(looped, same)


@every_layer
def test_dropped_edges_are_left_out_before_the_softmax(name: str) -> None:
    x, index, edge_attr = inputs(LOOPS)
    x, index, edge_attr = (t.repeat(*r) for t, r in ((x, (1, 1)), (index, (1, 40)), (edge_attr, (40, 1))))
    conv = layer(name, edge_dropout=0.5)
    torch.manual_seed(1)
    out, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True)
    gone = (alpha == 0).all(1)
    assert torch.equal(gone, (alpha == 0).any(1)) and 0.3 < gone[looped[0] != looped[1]].double().mean() < 0.7
    assert not gone[looped[0] == looped[1]].any()
    assert conv.state_dict().keys() == layer(name).state_dict().keys()
    if name == "TransformerConv":  # which adds no loops: the same as the layer on the edges that are left
        assert_close(conv.eval()(x, index[:, ~gone], edge_attr[~gone]), out)
    torch.manual_seed(1)
    assert torch.equal(conv.train()(x, index, edge_attr), out)
    assert not torch.equal(conv(x, index, edge_attr), out)


@every_layer
def test_an_explainers_mask_is_an_edge_weight(name: str) -> None:
    theirs: dict[str, Any] = {cls: getattr(pyg, cls) for cls in LAYERS}
    x, index, _ = inputs(RANDOM)
    masks = []
    for cls in (LAYERS[name], theirs[name]):
        torch.manual_seed(0)
        conv = cls(F, C, H).double()
        explainer = Explainer(
            conv,
            GNNExplainer(epochs=5),
            explanation_type="model",
            edge_mask_type="object",
            model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
        )
        torch.manual_seed(0)
        masks.append(explainer(x, index).edge_mask)
    torch.testing.assert_close(*masks, rtol=0.0, atol=1e-6)


@every_layer
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_compiled_with_edge_features_and_weights(name: str, dropout: float) -> None:
    conv = layer(name, dropout=dropout)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend="aot_eager")
    for graph in (RANDOM, LOOPS):
        x, index, edge_attr = inputs(graph)
        weight = draw(index.size(1), seed=4)
        results = []
        for run in (compiled, conv):
            own = edge_attr.clone().requires_grad_()
            torch.manual_seed(3)
            out = run(x, index, own, edge_weight=weight)
            results.append([out, *torch.autograd.grad(out, own, draw(*out.shape))])
        for one, other in zip(*results, strict=True):
            assert_close(one, other, f"{name} {graph}")


@every_layer
def test_weights_and_probabilities_that_do_not_fit(name: str) -> None:
    x, index, edge_attr = inputs(RANDOM)
    with pytest.raises(ValueError, match=r"edge_weight has shape \[7\], expected \(E,\) or \(E, H\) with E = 300"):
        layer(name)(x, index, edge_attr, edge_weight=torch.ones(7))
    with pytest.raises(ValueError, match=r"edge_dropout is 1\.5, expected a probability in \[0, 1\]"):
        layer(name, edge_dropout=1.5)
