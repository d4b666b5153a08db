"""Edge labels, one or many per edge."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..graph.subgraph import mask_to_index
from .checks import check_edge_index, check_edge_index_shape
from .labels import ManyLabels, OneLabel
from .nodes import OfNodes
from .objective import MASKS, Split


@dataclass(frozen=True)
class OfEdges(OfNodes):
    """An objective with an output row for each pair of nodes in `edge_label_index` `[2, L]`, as from `LinkScores`.

    In a shared graph, the masks `[L]` select the pairs of each split; `edge_index` are the message-passing edges. The
    pairs may have features `edge_label_attr` `[L, D]`, as those of labelled edges.
    """

    item = "edge"
    has_pairs = True
    by_class = False

    def size(self, data: Data) -> int:
        """Return the number of labelled pairs."""
        return int(data.edge_label_index.size(1))

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless the pairs are nodes of the graph, with labels of the right form."""
        check_pairs(data, where)
        features = data.get("edge_label_attr")
        if features is not None and (features.dim() != 2 or len(features) != self.size(data)):
            raise ValueError(
                f"{where}: edge_label_attr has shape {tuple(features.shape)}, expected ({self.size(data)}, D), a row "
                "for each pair of edge_label_index."
            )
        super().check(data, where)  # type: ignore[safe-super]  # checks the labels

    def complete(self, data: Data) -> None:
        """Make the edges the pairs, and their features those of the pairs, unless the graph has others."""
        complete_pairs(data)

    def example(self, data: Data, split: Split) -> Data:
        """Return the graph with the pairs of a split only.

        With `input_id` `[B]`, these of the split's pairs; with `share`, a rank and the number of processes, those of
        this process. A graph without masks, one of many, belongs to its split as a whole.
        """
        if f"{split}_mask" not in data:
            return data
        chosen = copy.copy(data)
        for key in MASKS:
            del chosen[key]
        rank, world = data.share if "share" in data else (0, 1)
        for key, values in self._pairs(data, split).items():
            chosen[key] = values[:, rank::world] if key == "edge_label_index" else values[rank::world]
        return chosen

    def _pairs(self, data: Data, split: Split) -> dict[str, Tensor]:
        """Return the pairs of a split, or those of them with an `input_id`, their labels, and their features if any."""
        index = mask_to_index(data[f"{split}_mask"])
        index = index[data.input_id] if "input_id" in data else index
        pairs = {"edge_label_index": data.edge_label_index.index_select(1, index)}
        return pairs | {key: data[key].index_select(0, index) for key in ("y", "edge_label_attr") if key in data}

    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels in the split's mask, or all that `example` selected."""
        return super().labels(data, split if f"{split}_mask" in data else None)

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows in the split's mask, or all that `example` selected.

        Raises:
            ValueError: unless the output is `[..., L, K]`.
        """
        decoder = f'gat_pyg.models.LinkScores(model, channels, "mlp", out_channels={self.out_channels})'
        self.check_output(out, [self.size(data)], f"Decode nodes: {decoder}.")
        return super().rows(out, data, split if f"{split}_mask" in data else None)


@dataclass(frozen=True)
class EdgeLabels(OfEdges, OneLabel):
    """One of K classes for each edge: y `[L]` int64, -1 if it is unknown. Cross-entropy, accuracy in percent.

    The edges are `edge_label_index` `[2, L]` (src, dst), which need not be message-passing edges.

    Example:
        >>> import torch
        >>> data = Data(edge_label_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([1, -1]))
        >>> EdgeLabels(2).loss(*EdgeLabels(2).rows(torch.zeros(2, 2), data, None))  # log 2
        tensor(0.6931)
    """


@dataclass(frozen=True)
class EdgeMultiLabels(OfEdges, ManyLabels):
    """K labels for each edge: y `[L, K]` float32 of 0 and 1, NaN if it is unknown. Sigmoid cross-entropy, micro-F1.

    Example:
        >>> EdgeMultiLabels(2).metric.text(0.9731)
        'micro-F1 0.973'
    """


def complete_pairs(data: Data) -> None:
    """Make the edges of a graph the labelled pairs, and their features those of the pairs, unless it has others."""
    if "edge_label_index" not in data:
        data.edge_label_index = data.edge_index
    if "edge_label_attr" in data or data.edge_attr is None:
        return
    if torch.equal(data.edge_label_index, data.edge_index):
        data.edge_label_attr = data.edge_attr


def check_pairs(data: Data, where: str) -> None:
    """Raise ValueError unless `edge_label_index` is `[2, L]` of nodes of the graph."""
    pairs = data.get("edge_label_index")
    if pairs is None:
        raise ValueError(f"{where}: edge_label_index is missing. Give it, or sample it: gat_pyg.data.links(data).")
    check_edge_index_shape(pairs, f"{where}, edge_label_index")
    check_edge_index(pairs, data.x.size(0), f"{where}, edge_label_index")
