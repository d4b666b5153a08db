"""Readout: a model with one output per graph, from a model with one output per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MultiAggregation
from torch_geometric.nn.resolver import aggregation_resolver

from ..tasks.model import members
from .mlp import head
from .wrapper import Wrapper


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

    def __init__(
        self,
        model: nn.Module,
        aggr: str | Sequence[str] | nn.Module = "mean",
        out_channels: int | None = None,
        head_layers: int = 1,
        dropout: float = 0.0,
        act: str | Callable[[Tensor], Tensor] = "relu",
    ) -> None:
        super().__init__(model, "Use another model for graph labels.")
        self.model = model
        self.aggr: nn.Module
        self.lin: nn.Module | None = None
        if out_channels is None:
            self.aggr = aggregation_resolver(aggr)
        else:
            C = members(model).out_channels
            if not isinstance(C, int):
                raise ValueError(f"{type(model).__name__} has no out_channels, expected the width of its embeddings.")
            self.aggr = _aggregation(aggr, C)
            with torch.no_grad():
                width = self.aggr(torch.zeros(2, C), torch.zeros(2, dtype=torch.long)).size(1)
            self.lin = head(width, out_channels, head_layers, dropout, act)

    @property
    def num_hops(self) -> None:
        """None: the output depends on all nodes of a graph."""
        return None

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Return `[G, K]`.

        Args:
            x: `[N, F]`.
            edge_index: as the model takes it.
            edge_attr: `[E, D]`.
            batch: `[N]`, the graph of each node; None for a single graph.
            batch_size: G, needed if the last graphs may have no nodes.
            **options: other arguments of the model's forward.
        """
        out = self._called(x, edge_index, edge_attr=edge_attr, batch=batch, batch_size=batch_size, **options)
        if batch is None:  # PyG would count the graphs, which torch.func.vmap cannot
            batch, batch_size = torch.zeros(out.size(-2), dtype=torch.long, device=out.device), 1
        pooled: Tensor = self.aggr(out, batch, dim_size=batch_size)
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
