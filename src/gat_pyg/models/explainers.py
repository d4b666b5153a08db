"""Explanations of a prediction by its edges: algorithms for PyG's `Explainer`, and how faithful their masks are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, ExplainerAlgorithm, Explanation
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.explain.config import MaskType, ModelConfig, ModelMode, ModelReturnType, ModelTaskLevel
from torch_geometric.utils import is_undirected, scatter

from .attention import attention_of

OF_EDGES = ("edge_attr", "edge_weight")  # arguments of a model with a row for each edge


# Algorithms -----------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a model, and the rows of its output that are explained."""

    model: nn.Module
    x: Tensor
    edge_index: Tensor
    target: Tensor
    rows: int | Tensor | None  # those that count; None: all
    options: dict[str, Any]

    def value(self, config: ModelConfig, remaining: Tensor | None = None) -> Tensor:
        """Return the explained number, `value`, of the whole graph or with some of the edges."""
        edge_index, options = self.edge_index, self.options
        if remaining is not None:
            edge_index, options = edge_index[:, remaining], _rows(options, remaining)
        return value(config, self.model(self.x, edge_index, **options), self.target, self.rows)


class _Algorithm(ExplainerAlgorithm):  # type: ignore[misc]
    """An algorithm with a mask of the edges, which `_explain` computes."""

    mask_types: tuple[MaskType | None, ...] = (None,)  # masks of nodes that it computes

    def forward(
        self,
        model: nn.Module,
        x: Tensor,
        edge_index: Tensor,
        *,
        target: Tensor,
        index: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Return the explanation of the nodes, pairs or graphs at `index`; zeros for what has no gradient.

        Raises:
            ValueError: if attention is to be explained, and no layer takes `return_attention_weights`.
        """
        return self._explain(_Call(model, x, edge_index, target, index, kwargs))

    def _explain(self, call: _Call) -> Explanation:
        raise NotImplementedError

    def supports(self) -> bool:
        """Return True if the algorithm has the masks of nodes that the `Explainer` is configured with."""
        return self.explainer_config.node_mask_type in self.mask_types


class FlowExplainer(_Algorithm):
    r"""The share of what a node receives that passes over each edge, by the attention of all layers: no gradients.

    .. math::
        w^{(L)}_v = 1, \qquad
        w^{(l-1)}_j = \sum_i w^{(l)}_i \alpha^{(l)}_{ij}, \qquad
        m_{ij} = \sum_l w^{(l)}_i \alpha^{(l)}_{ij}

    with the mean of :math:`\alpha^{(l)}_{ij}` over heads for the edge from j to i in layer l. An edge counts once for
    each path over it to the explained node v; this is GAtt of Shin et al. (AAAI 2025, arXiv 2406.04612). PyG's
    `AttentionExplainer` has the maximum over layers and heads instead, which is the same for every v. For a pair, w
    starts with 1/2 at both ends, for a graph with 1/N at all nodes. Skip connections, feed-forward parts and the signs
    of the messages are not considered.

    Cost: one forward pass and O(L E H).

    Example:
        >>> from gat_pyg import GATConv
        >>> conv, x = GATConv(4, 2), torch.randn(3, 4)
        >>> explainer = Explainer(conv, FlowExplainer(), "model", {"mode": "regression", "task_level": "node"},
        ...     edge_mask_type="object")
        >>> mask = explainer(x, torch.tensor([[0, 1], [1, 2]]), index=2).edge_mask
        >>> bool(mask[0] == 0), bool(0 < mask[1] < 1)  # node 2 has no other neighbour
        (True, True)
    """

    def _explain(self, call: _Call) -> Explanation:
        x, edge_index = call.x, call.edge_index
        layers = attention_of(call.model, Data(x=x, edge_index=edge_index, **call.options))
        is_edge, mask = edge_index[0] != edge_index[1], x.new_zeros(edge_index.size(1))
        weight = self._begin(call)
        for its_edges, alpha in reversed(layers):
            src, dst = its_edges if self._flow(call.model) == "source_to_target" else its_edges.flip(0)
            part = weight[dst] * alpha.view(len(alpha), -1).mean(-1)
            if torch.equal(its_edges[:, : len(mask)], edge_index):  # else own loops were replaced
                mask += part[: len(mask)]
            else:
                mask[is_edge] += part[: int(is_edge.sum())]
            weight = torch.zeros_like(weight).index_add(0, src, part)
        return Explanation(edge_mask=mask)

    def _begin(self, call: _Call) -> Tensor:
        """Return the weights of the nodes in the output, `[N]`, with the sum 1."""
        x, nodes = call.x, torch.arange(call.x.size(0), device=call.x.device)
        rows = slice(None) if call.rows is None else call.rows
        if self.model_config.task_level == ModelTaskLevel.node:
            nodes = nodes[rows]
        elif self.model_config.task_level == ModelTaskLevel.edge:
            nodes = call.options.get("edge_label_index", call.edge_index)[:, rows]
        nodes = nodes.reshape(-1)
        return x.new_zeros(x.size(0)).index_add(0, nodes, x.new_full((len(nodes),), 1 / len(nodes)))


class GradientExplainer(_Algorithm):
    r"""The derivative of the prediction by the weight of each message, and input times gradient of each feature.

    .. math::
        m_{ij} = \left. \frac{\partial p}{\partial w_{ij}} \right|_{w = 1}, \qquad
        m_{ic} = x_{ic} \frac{\partial p}{\partial x_{ic}}

    p is the probability of the target, or the output of a regression; w multiplies the messages of all layers, as PyG's
    masks do. A negative value is evidence against the target. The features have the same values by Captum's
    `InputXGradient` in PyG's `CaptumExplainer`. With the logarithm of the odds of p in place of p, all values have the
    same factor, so the order of the edges is the same.

    Cost: one forward and one backward pass; nothing of size E x C on the fused path.

    Example:
        >>> from gat_pyg import GATConv
        >>> conv, x = GATConv(4, 2), torch.randn(3, 4)
        >>> explainer = Explainer(conv, GradientExplainer(), "model", {"mode": "multiclass_classification",
        ...     "task_level": "node", "return_type": "raw"}, edge_mask_type="object")
        >>> explainer(x, torch.tensor([[0, 1], [1, 2]]), index=2).edge_mask.shape
        torch.Size([2])
    """

    mask_types = (None, MaskType.attributes)

    @torch.enable_grad()
    def _explain(self, call: _Call) -> Explanation:
        masks = [nn.Parameter(call.x.new_ones(call.edge_index.size(1)))]
        set_masks(call.model, masks[0], call.edge_index, apply_sigmoid=False)
        try:
            if self.explainer_config.node_mask_type is not None:
                masks.append(nn.Parameter(torch.ones_like(call.x)))
                call = call._replace(x=call.x * masks[1])
            predicted = call.value(self.model_config)
            grads = (
                torch.autograd.grad(predicted, masks, allow_unused=True, materialize_grads=True)
                if predicted.requires_grad
                else [torch.zeros_like(mask) for mask in masks]
            )
        finally:
            clear_masks(call.model)
        return Explanation(**dict(zip(("edge_mask", "node_mask"), grads, strict=False)))


class OcclusionExplainer(_Algorithm):
    r"""The loss of the prediction if the edges between two nodes are removed, one pair of nodes after the other.

    .. math::
        m_{ij} = \frac{p(G) - p(G \setminus E_{ij})}{|E_{ij}|}

    p is the probability of the target, or the output of a regression, and :math:`E_{ij}` are the edges between i and j,
    in both directions if the graph is undirected (`relations`). The edges are removed, so that the softmax is over the
    other neighbours. Self-loops are not removed.

    Args:
        most: the largest number of pairs to try. Of more, those with the largest gradients are tried, and the others
            get 0.
        undirected: as in `relations`.

    Cost: a forward pass for each pair of nodes. Explain a node on its receptive field, not on a large graph.

    Example:
        >>> from gat_pyg import GATConv
        >>> conv, x = GATConv(4, 2), torch.randn(3, 4)
        >>> explainer = Explainer(conv, OcclusionExplainer(), "model", {"mode": "multiclass_classification",
        ...     "task_level": "node", "return_type": "raw"}, edge_mask_type="object")
        >>> bool(explainer(x, torch.tensor([[0, 1], [1, 2]]), index=2).edge_mask[0] == 0)
        True
    """

    def __init__(self, most: int = 1000, undirected: bool | None = None) -> None:
        super().__init__()
        self.most, self.undirected = most, undirected

    def _explain(self, call: _Call) -> Explanation:
        relation = relations(call.edge_index, self.undirected)
        size = relation[relation >= 0].bincount()
        tried = torch.arange(len(size), device=call.x.device)
        if len(size) > self.most:
            slope = GradientExplainer()
            slope.connect(self.explainer_config, self.model_config)
            tried = by_relation(slope._explain(call).edge_mask, relation).abs().topk(self.most).indices
        effect = call.x.new_zeros(len(size))
        with torch.no_grad():
            before = call.value(self.model_config)
            for each in tried:
                effect[each] = before - call.value(self.model_config, relation != each)
        return Explanation(edge_mask=torch.cat([effect / size, effect.new_zeros(1)])[relation])  # loops are the last


# Relations ------------------------------------------------------------------------------------------------------------


def relations(edge_index: Tensor, undirected: bool | None = None) -> Tensor:
    """Return the number of the pair of nodes that each edge connects, `[E]`, and -1 for self-loops.

    Args:
        edge_index: `[2, E]`.
        undirected: True if both directions are one relation; by default if each edge has its reverse.

    Example:
        >>> relations(torch.tensor([[0, 1, 1, 2], [1, 0, 1, 0]])), relations(torch.tensor([[0, 1], [1, 0]]))
        (tensor([ 0,  1, -1,  2]), tensor([0, 0]))
    """
    undirected = is_undirected(edge_index) if undirected is None else undirected
    pairs = edge_index.sort(0).values if undirected else edge_index
    is_edge = pairs[0] != pairs[1]
    numbers = torch.full_like(pairs[0], -1)
    numbers[is_edge] = pairs[:, is_edge].unique(dim=1, return_inverse=True)[1]
    return numbers


def by_relation(mask: Tensor, relation: Tensor) -> Tensor:
    """Return the sum of a mask of the edges `[E]` over each relation."""
    chosen = relation >= 0
    total: Tensor = scatter(mask[chosen], relation[chosen], reduce="sum")
    return total


def _rows(options: dict[str, Any], remaining: Tensor) -> dict[str, Any]:
    """Return the arguments of a model for some of the edges."""
    return {key: each[remaining] if key in OF_EDGES and each is not None else each for key, each in options.items()}


# Faithfulness ---------------------------------------------------------------------------------------------------------


class Removal(NamedTuple):
    """The prediction without the k strongest relations of an explanation, and with these alone.

    For a faithful explanation, `removed` is farther from `before` than with k random relations, and `alone` is nearer.
    Those have the mean and the standard deviation over the draws.
    """

    before: float
    removed: float
    alone: float
    random_removed: tuple[float, float]
    random_alone: tuple[float, float]
    k: int
    num_relations: int


def removal(
    explainer: Explainer,
    explanation: Explanation,
    k: int = 5,
    draws: int = 20,
    undirected: bool | None = None,
    seed: int = 0,
) -> Removal:
    """Measure how faithful an explanation is: remove the k relations with the largest sum of its `edge_mask`.

    PyG's `fidelity` counts whether the predicted class changes, and multiplies messages by 1 - mask. Here edges are
    removed, and the prediction is the probability of the target, or the output of a regression, the mean over the
    explained rows. Of a regression, the largest absolute sums count.

    Args:
        explainer, explanation: as in PyG's `fidelity`, of any algorithm with an `edge_mask`.
        k: the number of relations to remove; all if there are fewer.
        draws: the number of sets of k random relations.
        undirected: as in `relations`.
        seed: of the draws.

    Cost: 3 + 2 draws forward passes.
    """
    relation = relations(explanation.edge_index, undirected)
    R = int(relation.max()) + 1 if len(relation) else 0
    k = min(k, R)
    kwargs = {key: explanation[key] for key in explanation._model_args}
    strength = by_relation(explanation.edge_mask, relation)
    if explainer.model_config.mode == ModelMode.regression:
        strength = strength.abs()

    def predicted(remaining: Tensor) -> float:
        out = explainer.get_prediction(explanation.x, explanation.edge_index[:, remaining], **_rows(kwargs, remaining))
        return float(value(explainer.model_config, out, explanation.target, explanation.get("index")))

    def both(chosen: Tensor) -> tuple[float, float]:
        inside = torch.isin(relation, chosen)
        return predicted(~inside), predicted(inside | (relation < 0))

    generator = torch.Generator().manual_seed(seed)
    drawn = [both(torch.randperm(R, generator=generator)[:k].to(relation)) for _ in range(draws)]
    random = torch.tensor(drawn or [(float("nan"),) * 2], dtype=torch.float64)
    means, deviations = random.mean(0).tolist(), random.std(0, correction=0).tolist()
    before = predicted(torch.ones_like(relation, dtype=torch.bool))
    removed, alone = both(strength.topk(k).indices)
    return Removal(before, removed, alone, (means[0], deviations[0]), (means[1], deviations[1]), k, R)


def value(config: ModelConfig, out: Tensor, target: Tensor, index: int | Tensor | None) -> Tensor:
    """Return the mean probability of the targets in a model's output, or the mean output of a regression.

    Args:
        config: the meaning of the output, as in PyG's `Explainer`.
        out: the output of the model.
        target: the classes `[n]`, or 0 and 1 of a single label.
        index: the rows of both that count; all by default.
    """
    if index is not None:
        rows = torch.as_tensor(index, device=out.device).view(-1)
        out, target = out[rows], target[rows]
    if config.mode == ModelMode.regression:
        return out.mean()
    is_binary = config.mode == ModelMode.binary_classification
    if config.return_type == ModelReturnType.raw:
        out = out.sigmoid() if is_binary else out.softmax(-1)
    elif config.return_type == ModelReturnType.log_probs:
        out = out.exp()
    if is_binary:
        out = out.view_as(target)
        return torch.where(target > 0, out, 1 - out).mean()
    return out.gather(-1, target.view(-1, 1)).mean()
