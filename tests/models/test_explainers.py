"""Masks of edges by paths, finite differences and loops over edges, on our layers and on PyG's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, ExplainerAlgorithm, Explanation

import gat_pyg
from gat_pyg import attention_of
from gat_pyg.models.explainers import FlowExplainer, GradientExplainer, OcclusionExplainer, relations, removal

# Directed, with an edge that is there twice and a self-loop; then undirected
GRAPHS = {
    "directed": torch.tensor([[0, 1, 1, 2, 3, 3, 4, 2, 5], [1, 2, 2, 3, 2, 4, 3, 2, 0]]),
    "undirected": torch.tensor([[0, 1, 1, 2, 1, 3, 3, 4], [1, 0, 2, 1, 3, 1, 4, 3]]),
}
NODE, F, K = 2, 5, 3


class Net(nn.Module):
    """Two layers, with the weights of each message as an argument beside PyG's masks."""

    def __init__(self, layers: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([layers.GATConv(F, 4, heads=2, **options), layers.GATConv(8, K, **options)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        for conv, act in zip(self.convs, (torch.tanh, nn.Identity()), strict=True):
            x = act(conv(x, edge_index) if edge_weight is None else conv(x, edge_index, edge_weight=edge_weight))
        return x


def features(N: int = 6) -> Tensor:
    return torch.randn(N, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def explained(
    model: nn.Module, algorithm: ExplainerAlgorithm, graph: str, **options: Any
) -> tuple[Explainer, Explanation]:
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(model, algorithm, "model", config, edge_mask_type="object", **options)
    return explainer, explainer(features(), GRAPHS[graph], index=NODE)


def probability(model: nn.Module, edge_index: Tensor, k: int, x: Tensor | None = None, **options: Any) -> Tensor:
    return model(features() if x is None else x, edge_index, **options).softmax(-1)[NODE, k]


@pytest.mark.parametrize("layers", [gat_pyg, pyg], ids=["ours", "pyg"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_masks_are_those_by_hand(graph: str, layers: Any) -> None:
    model, edge_index = Net(layers).double().requires_grad_(False), GRAPHS[graph]
    _, flow = explained(model, FlowExplainer(), graph)
    expected = torch.zeros(edge_index.size(1), dtype=torch.float64)
    (edges, first), (_, second) = attention_of(model, Data(features(), edge_index))
    into = second.mean(1)
    for number, (j, i) in enumerate(edges.t().tolist()):  # paths of one edge, and of two
        if j != i:
            own = ((edge_index == torch.tensor([[j], [i]])).all(0).nonzero().view(-1)).tolist()
            share = sum(
                float(into[e] * first[number].mean()) for e, end in enumerate(edges.t().tolist()) if end == [i, NODE]
            )
            share += float(into[number]) if i == NODE else 0.0
            expected[own] += share / len(own)
    torch.testing.assert_close(flow.edge_mask, expected)

    explainer, slope = explained(model, GradientExplainer(), graph, node_mask_type="attributes")
    k = int(slope.target[NODE])
    x = features().requires_grad_()
    (grad,) = torch.autograd.grad(probability(model, edge_index, k, x), x)
    torch.testing.assert_close(slope.node_mask, features() * grad)
    if layers is gat_pyg:
        weight = torch.ones(edge_index.size(1), dtype=torch.float64)
        steps = 1e-6 * torch.eye(len(weight), dtype=torch.float64)
        ends = [
            [probability(model, edge_index, k, edge_weight=weight + sign * step) for step in steps] for sign in (1, -1)
        ]
        difference = (torch.stack(ends[0]) - torch.stack(ends[1])) / 2e-6
        torch.testing.assert_close(slope.edge_mask, difference.detach(), atol=1e-8, rtol=1e-6)

    _, lost = explained(model, OcclusionExplainer(), graph)
    before, relation = float(probability(model, edge_index, k)), relations(edge_index)
    for number, (j, i) in enumerate(edge_index.t().tolist()):
        pairs = {(j, i), (i, j)} if graph == "undirected" else {(j, i)}
        kept = torch.tensor([tuple(pair) not in pairs for pair in edge_index.t().tolist()])
        effect = 0.0 if j == i else (before - float(probability(model, edge_index[:, kept], k))) / int((~kept).sum())
        assert float(lost.edge_mask[number]) == pytest.approx(effect, abs=1e-12)
        assert int((relation == relation[number]).sum()) == int((~kept).sum()) and (int(relation[number]) < 0) == (
            j == i
        )
    _, few = explained(model, OcclusionExplainer(most=1), graph)
    largest = int(
        torch.zeros(int(relation.max()) + 1, dtype=torch.float64)
        .index_add(0, relation.clamp(min=0), slope.edge_mask * (relation >= 0))
        .abs()
        .argmax()
    )
    torch.testing.assert_close(few.edge_mask, torch.where(relation == largest, lost.edge_mask, 0.0))

    measured = removal(explainer, slope, k=2, draws=3)
    strength = {int(r): float(slope.edge_mask[relation == r].sum()) for r in relation.unique() if r >= 0}
    chosen = torch.isin(relation, torch.tensor(sorted(strength, key=lambda r: -strength[r])[:2]))
    assert measured.before == pytest.approx(before)
    assert measured.removed == pytest.approx(float(probability(model, edge_index[:, ~chosen], k)))
    assert measured.alone == pytest.approx(float(probability(model, edge_index[:, chosen | (relation < 0)], k)))
    assert (measured.k, measured.num_relations) == (2, len(strength)) and measured.random_removed[1] > 0


@pytest.mark.parametrize("layers", [gat_pyg, pyg], ids=["ours", "pyg"])
def test_the_flow_against_the_direction_of_edges_is_that_on_the_reversed_graph(layers: Any) -> None:
    model, against = (Net(layers, **flow).double() for flow in ({}, {"flow": "target_to_source"}))
    _, flow = explained(model, FlowExplainer(), "directed")
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(against, FlowExplainer(), "model", config, edge_mask_type="object")
    reversed_flow = explainer(features(), GRAPHS["directed"].flip(0), index=NODE)
    torch.testing.assert_close(reversed_flow.edge_mask, flow.edge_mask)


class Sums(nn.Module):
    """The sum of the neighbours' features, without PyG's message passing and without parameters."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


@pytest.mark.parametrize("graph", GRAPHS)
def test_edges_without_gradients_have_zeros_and_are_occluded(graph: str) -> None:
    _, slope = explained(Sums(), GradientExplainer(), graph)
    assert slope.edge_mask.tolist() == [0.0] * GRAPHS[graph].size(1)
    _, every = explained(Sums(), OcclusionExplainer(), graph)
    _, some = explained(Sums(), OcclusionExplainer(most=2), graph)
    assert every.edge_mask.count_nonzero() > 0
    torch.testing.assert_close(some.edge_mask, torch.where(some.edge_mask == 0, 0.0, every.edge_mask))


def test_of_a_regression_the_relations_with_the_largest_absolute_sums_are_removed() -> None:
    config = {"mode": "regression", "task_level": "node"}
    explainer = Explainer(Sums(), GradientExplainer(), "model", config, edge_mask_type="object")
    explanation, edge_index = explainer(features(), GRAPHS["directed"], index=NODE), GRAPHS["directed"]
    explanation.edge_mask = torch.zeros(edge_index.size(1), dtype=torch.float64)
    explanation.edge_mask[[0, 4]] = torch.tensor([0.5, -3.0], dtype=torch.float64)  # 3 to 2 is evidence against it
    kept = torch.arange(edge_index.size(1)) != 4
    expected = Sums()(features(), edge_index[:, kept])[NODE].mean()
    assert removal(explainer, explanation, k=1, draws=0).removed == pytest.approx(float(expected))
