"""Edge labels, one or many per edge."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor
from torch_geometric.data import Data

from ..graph.subgraph import mask_to_index
from .checks import _check_edge_index, _check_edge_index_shape
from .labels import ManyLabels, OneLabel
from .nodes import _OfNodes
from .objective import MASKS, Split

PAIRS = ("edge", "link")  # the items of objectives whose rows are pairs of nodes


@dataclass(frozen=True)
class _OfEdges(_OfNodes):
    """An objective with an output row for each pair of nodes in `edge_label_index` `[2, L]`, as from `LinkScores`.

    The masks `[L]` select the pairs of each split; `edge_index` are the message-passing edges.
    """

    item = "edge"

    def size(self, data: Data) -> int:
        """Return the number of labelled pairs."""
        return int(data.edge_label_index.size(1))

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless the pairs are nodes of the graph, with labels of the right form."""
        check_pairs(data, where)
        super().check(data, where)  # type: ignore[safe-super]  # of the labels

    def example(self, data: Data, split: Split) -> Data:
        """Return the graph with the pairs of a split only.

        With `input_id` `[B]`, these of the split's pairs; with `share`, a rank and the number of processes, those of
        this process. A graph without masks is returned as it is.
        """
        if f"{split}_mask" not in data:
            return data
        chosen = copy.copy(data)
        for key in MASKS:
            del chosen[key]
        chosen.edge_label_index, chosen.y = self._pairs(data, split)
        if "share" in data:
            rank, world = data.share
            chosen.edge_label_index, chosen.y = chosen.edge_label_index[:, rank::world], chosen.y[rank::world]
        return chosen

    def _pairs(self, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return the pairs of a split `[2, L]`, or those of them with an `input_id`, and their labels."""
        index = mask_to_index(data[f"{split}_mask"])
        index = index[data.input_id] if "input_id" in data else index
        return data.edge_label_index.index_select(1, index), data.y.index_select(0, index)

    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels in the split's mask, or all that `example` selected."""
        return super().labels(data, split if f"{split}_mask" in data else None)

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows in the split's mask, or all that `example` selected.

        Raises:
            ValueError: if the number of rows differs from the number of pairs.
        """
        if out.dim() < 2 or out.size(-2) != self.size(data):
            raise ValueError(
                f"The model returns {tuple(out.shape)} for {self.size(data)} edges, expected a row for each. Decode "
                f'nodes: gat_pyg.models.LinkScores(model, channels, "mlp", out_channels={self.out_channels}).'
            )
        return super().rows(out, data, split if f"{split}_mask" in data else None)


@dataclass(frozen=True)
class EdgeLabels(_OfEdges, OneLabel):
    """One of K classes for each edge: y `[L]` int64, -1 if it is unknown. Cross-entropy, accuracy in percent.

    The edges are `edge_label_index` `[2, L]` (src, dst), which need not be message-passing edges.

    Example:
        >>> import torch
        >>> data = Data(edge_label_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([1, -1]))
        >>> EdgeLabels(2).loss(*EdgeLabels(2).rows(torch.zeros(2, 2), data, None))  # log 2
        tensor(0.6931)
    """


@dataclass(frozen=True)
class EdgeMultiLabels(_OfEdges, ManyLabels):
    """K labels for each edge: y `[L, K]` float32 of 0 and 1, NaN if it is unknown. Sigmoid cross-entropy, micro-F1.

    Example:
        >>> EdgeMultiLabels(2).metric.text(0.9731)
        'micro-F1 0.973'
    """


def check_pairs(data: Data, where: str) -> None:
    """Raise ValueError unless `edge_label_index` is `[2, L]` of nodes of the graph."""
    pairs = data.get("edge_label_index")
    if pairs is None:
        raise ValueError(f"{where}: edge_label_index is missing. Give it, or draw it: gat_pyg.data.links(data).")
    _check_edge_index_shape(pairs, f"{where}, edge_label_index")
    _check_edge_index(pairs, data.x.size(0), f"{where}, edge_label_index")
