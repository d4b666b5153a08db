"""Graph labels, one or many per graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch_geometric.data import Data

from .labels import ManyLabels, OneLabel
from .objective import Objective, Split


class OfGraphs(Objective):
    """An objective with an output row for each graph of a batch, as from `gat_pyg.models.Readout`."""

    item = "graph"

    def size(self, data: Data) -> int:
        """Return 1: a graph has one row of labels."""
        return 1

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return all rows.

        Raises:
            ValueError: unless the output is `[..., G, K]`.
        """
        self.check_output(out, [data.y.size(0)], "Pool its nodes: gat_pyg.models.Readout(model).")
        return out, data.y

    def check_splits(self, data: Data, where: str) -> None:
        """Raise ValueError: one graph with one label cannot be split."""
        raise ValueError(
            f"{where}: the single graph has only one label, but is used in all three splits. Give each split its own "
            "graphs."
        )


@dataclass(frozen=True)
class GraphLabels(OfGraphs, OneLabel):
    """One of K classes for each graph: y `[1]` int64, `[G]` in a batch, -1 if it is unknown.

    Example:
        >>> import torch
        >>> objective, batch = GraphLabels(2), Data(y=torch.tensor([0, 1, -1]))
        >>> objective.loss(*objective.rows(torch.zeros(3, 2), batch, None))  # log 2
        tensor(0.6931)
    """


@dataclass(frozen=True)
class GraphMultiLabels(OfGraphs, ManyLabels):
    """K labels for each graph: y `[1, K]` float32 of 0 and 1, `[G, K]` in a batch, NaN if it is unknown.

    Example:
        >>> import torch
        >>> objective, batch = GraphMultiLabels(2), Data(y=torch.tensor([[0.0, 1.0], [1.0, float("nan")]]))
        >>> objective.loss(*objective.rows(torch.zeros(2, 2), batch, None))  # log 2
        tensor(0.6931)
    """
