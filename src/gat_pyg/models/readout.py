"""Readout: a model with one output per graph, from a model with one output per node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MultiAggregation
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.utils import scatter

from ..tasks.model import members
from .encoders import Column, Encoder
from .mlp import head
from .wrapper import Wrapper

LIMIT = 5.0  # standard deviations, to which columns of graphs are cut


class GraphFeatures(nn.Module):
    r"""Columns of each graph: how many nodes and edges it has of each category, and those of `graph_attr`.

    .. math::
        z_G = \left[\log(1 + N_G), \log(1 + E_G), \log\Bigl(1 + \sum_{i \in G} \mathbb{1}[x_{ic} = k]\Bigr),
        \log\Bigl(1 + \sum_{e \in G} \mathbb{1}[e_{ec} = k]\Bigr), u_G \right]

    standardised over the training graphs and cut to 5 standard deviations. Attention averages over neighbours, so that
    it cannot count; the output layer can with these.

    Args:
        categories, edge_categories: as in `gat_pyg.models.encoders.Encoder`, for x and edge_attr; continuous columns
            are not counted. None: no features of edges. Without both, the only columns are those of `graph_attr`.
        mean, std: `[D]`, those of each column over the training graphs; columns with a deviation of 0 become 0. Without
            them, nothing is standardised.

    Example:
        >>> columns = GraphFeatures([3], mean=[0.0] * 5, std=[1.0] * 5)
        >>> x, edge_index = torch.tensor([[2.0], [2.0], [0.0]]), torch.tensor([[0], [1]])
        >>> columns(x, edge_index, batch=torch.tensor([0, 0, 1]), batch_size=2).exp()
        tensor([[3., 2., 1., 1., 3.],
                [2., 1., 2., 1., 1.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        categories: Sequence[Column] | None,
        edge_categories: Sequence[Column] | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.node = None if categories is None else Encoder(categories, None)
        self.edge = None if edge_categories is None else Encoder(edge_categories, None)
        widths = [one.out_channels - one.categories.count(0) for one in (self.node, self.edge) if one is not None]
        self.graph_dim = len(mean) - (2 + sum(widths)) * (self.node is not None)  # columns of graph_attr
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        graph_attr: Tensor | None = None,
    ) -> Tensor:
        """Return `[G, D]`, standardised if the mean is known."""
        width = 0 if graph_attr is None else graph_attr.size(1)
        if len(self.mean) and width != self.graph_dim:
            raise ValueError(
                f"graph_attr has {width} columns for each graph, expected (G, {self.graph_dim}) as in training: the "
                "descriptors of a molecule, or the columns of a table of graphs. Predict from a file of the same form."
            )
        columns = []
        batch = x.new_zeros(x.size(0), dtype=torch.long) if batch is None else batch
        if self.node is not None:
            of_edges = batch[edge_index[0]]
            rows = [(torch.ones_like(x[:, :1]), batch), (x.new_ones(of_edges.size(0), 1), of_edges)]
            rows.append((self.node(x)[:, self.node.categories.count(0) :], batch))
            if self.edge is not None and edge_attr is not None:
                rows.append((self.edge(edge_attr)[:, self.edge.categories.count(0) :], of_edges))
            columns = [scatter(ones, graph, 0, batch_size, "sum").log1p() for ones, graph in rows]
        result = torch.cat(columns if graph_attr is None else [*columns, graph_attr], 1)
        if not len(self.mean):
            return result
        return ((result - self.mean) / torch.where(self.std > 0, self.std, torch.inf)).clamp(-LIMIT, LIMIT)


class Readout(Wrapper):
    """A model whose outputs `[N, K]` are pooled over the nodes of each graph to `[G, K]`.

    With `out_channels`, the model's outputs are embeddings `[N, C]`, and a linear map of the pooled ones is `[G, K]`:
    for aggregations that learn, such as "attentional" and "set2set", and for several at once.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`. `edge_attr`, `batch` and `batch_size` are passed
            if its forward takes them.
        aggr: the name of an aggregation of `torch_geometric.nn`, such as "mean", "sum" or "max", or an aggregation;
            with `out_channels` also a list, whose results are concatenated. "attentional" has a linear gate, "set2set"
            three steps.
        out_channels: K, if the model returns embeddings of width C = `model.out_channels`.
        head_layers: the number of linear maps of the pooled embeddings.
        dropout, act: between them, as in `MLP`.
        columns: arguments of `GraphFeatures`, whose columns stand beside the pooled embeddings.

    Raises:
        ValueError: if there is no such aggregation, it needs further arguments, the model has no `out_channels`, or it
            has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> import torch
        >>> graphs = Readout(nn.Identity())  # two nodes in graph 0, one in graph 2
        >>> graphs(torch.tensor([[1.0], [3.0], [5.0]]), batch=torch.tensor([0, 0, 2]), batch_size=3)
        tensor([[2.],
                [0.],
                [5.]])
    """

    num_hops = None  # the output depends on all nodes of a graph

    def __init__(
        self,
        model: nn.Module,
        aggr: str | Sequence[str] | nn.Module = "mean",
        out_channels: int | None = None,
        head_layers: int = 1,
        dropout: float = 0.0,
        act: str | Callable[[Tensor], Tensor] = "relu",
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, "Use another model for graph labels.")
        self.model = model
        self.aggr: nn.Module
        self.lin: nn.Module | None = None
        self.columns = None if columns is None else GraphFeatures(**columns)
        if out_channels is None:
            self.aggr = aggregation_resolver(aggr)
        else:
            C = members(model).out_channels
            if not isinstance(C, int):
                raise ValueError(f"{type(model).__name__} has no out_channels, expected the width of its embeddings.")
            self.aggr = _aggregation(aggr, C)
            with torch.no_grad():
                width = self.aggr(torch.zeros(2, C), torch.zeros(2, dtype=torch.long)).size(1)
            width += 0 if self.columns is None else len(self.columns.mean)
            self.lin = head(width, out_channels, head_layers, dropout, act)

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        graph_attr: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return `[G, K]`.

        Args:
            x: `[N, F]`.
            edge_index: as the model takes it.
            edge_attr: `[E, D]`.
            batch: `[N]`, the graph of each node; None for a single graph.
            batch_size: G, needed if the last graphs may have no nodes.
            graph_attr: `[G, D]`, columns of each graph, if the model was built for some.
            **options: other arguments of the model's forward.
        """
        out = self._called(x, edge_index, edge_attr=edge_attr, batch=batch, batch_size=batch_size, **options)
        if batch is None:  # PyG would count the graphs, which torch.func.vmap cannot
            batch, batch_size = torch.zeros(out.size(-2), dtype=torch.long, device=out.device), 1
        pooled: Tensor = self.aggr(out, batch, dim_size=batch_size)
        if self.columns is not None:
            columns = self.columns(x, edge_index, edge_attr, batch, batch_size, graph_attr)
            pooled = torch.cat([pooled, columns.to(pooled.dtype)], -1)
        return pooled if self.lin is None else self.lin(pooled)


def _aggregation(aggr: str | Sequence[str] | nn.Module, C: int) -> nn.Module:
    """Return an aggregation of embeddings of C features."""
    try:
        if isinstance(aggr, str | nn.Module):
            one: nn.Module = aggregation_resolver(aggr, **_options(aggr, C) if isinstance(aggr, str) else {})
            return one
        several: nn.Module = MultiAggregation([*aggr], [_options(each, C) for each in aggr])
        return several
    except TypeError as error:
        raise ValueError(f"aggr is {aggr}, which needs arguments: {error}. Pass an aggregation instead.") from error


def _options(aggr: str, C: int) -> dict[str, Any]:
    """Return the arguments of an aggregation of embeddings of C features, without which it learns nothing."""
    learn = {"learn": True, "channels": C}
    known: dict[str, dict[str, Any]] = {
        "attentional": {"gate_nn": nn.Linear(C, 1)},
        "set2set": {"in_channels": C, "processing_steps": 3},
        "softmax": learn,
        "powermean": learn,
    }
    return known.get(aggr.lower().replace("_", "").removesuffix("aggregation"), {})
