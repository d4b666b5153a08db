"""Node labels, one or many per node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..graph.subgraph import is_sampled, mask_to_index
from .labels import ManyLabels, OneLabel
from .objective import MASKS, Objective, Split, any_known


@dataclass(frozen=True)
class OfNodes(Objective):
    """An objective with an output row for each node; in a shared graph, masks select the nodes of each split."""

    item = "node"

    def size(self, data: Data) -> int:
        """Return the number of nodes."""
        return int(data.x.size(0))

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows in the split's mask, or those of the seed nodes in a sampled batch."""
        if split is None:
            return out, data.y
        if is_sampled(data):
            return out[: data.batch_size], data.y[: data.batch_size]
        return out.index_select(-2, mask_to_index(data[f"{split}_mask"])), self.labels(data, split)

    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels in the split's mask."""
        y: Tensor = data.y
        return y if split is None else y.index_select(0, mask_to_index(data[f"{split}_mask"]))

    def check_splits(self, data: Data, where: str) -> None:
        """Raise ValueError unless the three masks are disjoint, not empty and select only known labels."""
        N, known = self.size(data), any_known(data.y)
        for key in MASKS:
            mask = data.get(key)
            if mask is None:
                raise ValueError(
                    f"{where}: {key} is missing. Give it, or split at random: from_dataset(data, val=500)."
                )
            if mask.dtype != torch.bool or tuple(mask.shape) != (N,):
                raise ValueError(f"{where}: {key} is {mask.dtype} {tuple(mask.shape)}, expected torch.bool ({N},).")
            if not mask.any():
                raise ValueError(f"{where}: {key} is empty, expected at least one {self.item} with a known label.")
            if (mask & ~known).any():
                raise ValueError(f"{where}: {key} holds {self.item}s with unknown labels. Use {key} & (y >= 0).")
        for first, second in (MASKS[:2], MASKS[1:], MASKS[::2]):
            common = int((data[first] & data[second]).sum())
            if common:
                raise ValueError(
                    f"{where}: {first} and {second} overlap in {common} {self.item}s, expected none in common."
                )


@dataclass(frozen=True)
class NodeLabels(OneLabel, OfNodes):
    """One of K classes for each node: y `[N]` int64, -1 if it is unknown. Cross-entropy, accuracy in percent.

    Example:
        >>> NodeLabels(7).loss(torch.zeros(2, 7), torch.tensor([3, -1]))  # log 7
        tensor(1.9459)
    """


@dataclass(frozen=True)
class NodeMultiLabels(ManyLabels, OfNodes):
    """K labels for each node: y `[N, K]` float32 of 0 and 1, NaN if it is unknown. Sigmoid cross-entropy, micro-F1.

    Example:
        >>> NodeMultiLabels(121).metric.text(0.9731)
        'micro-F1 0.973'
    """
