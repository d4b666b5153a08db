"""Node labels, one or many per node."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import LabelPropagation
from torch_geometric.utils import degree

from ..graph.remembered import remembered
from ..graph.subgraph import is_sampled, mask_to_index
from .labels import ManyLabels, OneLabel
from .objective import MASKS, Objective, Split, any_known

STEPS = 50  # over which known labels spread


@dataclass(frozen=True)
class OfNodes(Objective):
    r"""An objective with an output row for each node; in a shared graph, masks select the nodes of each split.

    With a `label_rate`, the model reads labels, as UniMP does ("Masked Label Prediction", Shi et al., IJCAI 2021). A
    training step reads a random share of the training labels, drawn with Python's global generator, and its loss is
    that of the others. Validation and test read all training labels. So no label helps to predict itself. Read labels
    are columns of x behind the features: their values (one-hot classes, standardised targets; 0 if unknown), a mask,
    and the values after 50 steps of

    .. math::
        f_i \leftarrow \frac{1}{|\mathcal{N}_i|} \sum_{j \in \mathcal{N}_i} f_j

    over the edges in both directions, with the read ones fixed, as in `gat_pyg.models.LP`: these reach far beyond the
    layers of a network.
    """

    item = "node"

    @property
    def num_labels(self) -> int:
        """The number of columns that known labels append to x: K values, a mask for each or all, and K spread ones."""
        by_class = self.column == "class"
        return 0 if self.label_rate is None else 2 * self.out_channels + (1 if by_class else self.out_channels)

    def example(self, data: Data, split: Split) -> Data:
        """Return the graph, with the labels that a step of the split reads; the others of the training are its rows."""
        if self.label_rate is None:
            return data
        read = data.train_mask
        if split == "train":
            draw = torch.Generator().manual_seed(random.getrandbits(63))
            drawn = (torch.rand(len(read), generator=draw) < self.label_rate).to(read.device)
            data, read = copy.copy(data), read & drawn
            data.train_mask = data.train_mask & ~drawn
        return self.with_labels(data, read)

    def with_labels(self, data: Data, read: Tensor) -> Data:
        """Return a graph with features `[N, F + num_labels]`: with the known labels of the nodes in a mask `[N]`.

        Example:
            >>> path = Data(torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([1, -1, 0]))
            >>> NodeLabels(2, label_rate=0.5).with_labels(path, torch.tensor([True, True, False])).x
            tensor([[1., 0., 1., 1., 0., 1.],
                    [1., 0., 0., 0., 0., 1.],
                    [1., 0., 0., 0., 0., 1.]])
        """
        y, known = data.y, self.known(data.y).view(len(data.y), -1) & read[:, None]
        if self.column == "class":
            y = F.one_hot(y.clamp(min=0), self.out_channels)
        elif self.column == "target":
            y = self.outputs(y)
        values = torch.where(known, y, 0).to(data.x.dtype)
        spread = LabelPropagation(STEPS, alpha=1.0)
        means = _means(data.edge_index, len(values))
        reached = spread(values, means, None, means.values(), lambda each: torch.where(known, values, each))
        data = copy.copy(data)
        data.x = torch.cat([data.x, values, known.to(values.dtype), reached], 1)
        return data

    def size(self, data: Data) -> int:
        """Return the number of nodes."""
        return int(data.x.size(0))

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows in the split's mask, or those of the seed nodes in a sampled batch.

        Raises:
            ValueError: unless the output is `[..., N, K]`, or has the rows of the first hops.
        """
        self.check_output(out, [self.size(data), *itertools.accumulate(data.get("num_sampled_nodes", []))])
        if split is None:
            return out, data.y
        if is_sampled(data):
            return out[: data.batch_size], data.y[: data.batch_size]
        return out.index_select(-2, mask_to_index(data[f"{split}_mask"])), self.labels(data, split)

    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels in the split's mask."""
        y = super().labels(data, split)
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
        check_disjoint(data, f"{self.item}s", where)


def check_disjoint(masks: Any, items: str, where: str) -> None:
    """Raise ValueError if two of the masks of training, validation and test have items in common."""
    for first, second in (MASKS[:2], MASKS[1:], MASKS[::2]):
        if common := int((masks[first] & masks[second]).sum()):
            raise ValueError(f"{where}: {first} and {second} overlap in {common} {items}, expected none in common.")


@remembered
def _means(edge_index: Tensor, N: int) -> Tensor:
    """Return the sparse matrix `[N, N]` of means over neighbours, by edges in both directions."""
    src, dst = torch.cat([edge_index, edge_index.flip(0)], 1)
    mean = 1 / degree(dst, N).clamp(min=1)[dst]
    means = torch.sparse_coo_tensor(torch.stack([dst, src]), mean, (N, N), check_invariants=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return means.coalesce().to_sparse_csr()


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
