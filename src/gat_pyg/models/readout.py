"""Readout: a model with one output per graph, from a model with one output per node."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.resolver import aggregation_resolver


class Readout(nn.Module):
    """A model whose outputs `[N, K]` are pooled over the nodes of each graph to `[G, K]`.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`. `edge_attr`, `batch` and `batch_size` are passed
            if its forward takes them.
        aggr: the name of an aggregation of `torch_geometric.nn`, such as "mean", "sum" or "max".

    Raises:
        ValueError: if there is no such aggregation, or the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> import torch
        >>> graphs = Readout(nn.Identity())  # two nodes in graph 0, one in graph 2
        >>> graphs(torch.tensor([[1.0], [3.0], [5.0]]), batch=torch.tensor([0, 0, 2]), batch_size=3)
        tensor([[2.],
                [0.],
                [5.]])
    """

    def __init__(self, model: nn.Module, aggr: str = "mean") -> None:
        super().__init__()
        if hasattr(model, "penalty") or hasattr(model, "fit"):
            raise ValueError(
                f"{type(model).__name__} has its own loss over nodes, which needs node labels. Use another model for "
                "graph labels."
            )
        self.model = model
        self.aggr: nn.Module = aggregation_resolver(aggr)
        self._takes = frozenset(inspect.signature(model.forward).parameters)  # a view of the keys has no deep copy

    @property
    def supports_edge_attr(self) -> bool:
        """True if the model takes edge features."""
        return "edge_attr" in self._takes and bool(getattr(self.model, "supports_edge_attr", True))

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters with weight decay: the model's `decayed_parameters()`, by default all."""
        parameters: Iterable[nn.Parameter] = getattr(self.model, "decayed_parameters", self.model.parameters)()
        return parameters

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return `[G, K]`.

        Args:
            x: `[N, F]`.
            edge_index: as the model takes it.
            edge_attr: `[E, D]`.
            batch: `[N]`, the graph of each node; None for a single graph.
            batch_size: G, needed if the last graphs may have no nodes.
        """
        options = {"edge_attr": edge_attr, "batch": batch, "batch_size": batch_size}
        options = {key: value for key, value in options.items() if value is not None and key in self._takes}
        edges = [edge_index] if "edge_index" in self._takes else []
        out: Tensor = self.aggr(self.model(x, *edges, **options), batch, dim_size=batch_size)
        return out
