"""Cluster-GCN batches: subgraphs induced by some parts of a partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import index2ptr

from .neighbours import draw


class Clusters:
    """The subgraphs that parts of a graph induce: the batches of Cluster-GCN (Chiang et al., KDD 2019).

    A call with some parts returns their nodes, part after part, and all edges among these nodes, including edges
    between two of the parts; all parts together return the whole graph. A batch has `x`, `edge_index` (grouped by dst),
    `y`, `train_mask` and, if the graph has it, `edge_attr`; also the ids of its nodes, `n_id`, and its `parts` in
    ascending order. One more part after the last is empty. It pads the share of a process: alone, it returns one node
    that is not a training node.

    Args:
        data: the graph, with `x`, `edge_index`, `y` and `train_mask`; its features are read row by row.
        part: `[N]` int64, the part of each node, as from `gat_pyg.graph.partition.partition`.

    Cost: O(E log E) once, and 24 bytes per edge; a batch costs O(nodes and in-edges of its parts).

    Example:
        >>> path = Data(torch.eye(4), torch.tensor([[0, 1, 2], [1, 2, 3]]), y=torch.arange(4))
        >>> path.train_mask = path.y > 1
        >>> clusters = Clusters(path, torch.tensor([2, 0, 0, 1]))
        >>> clusters([0, 1]).n_id.tolist(), clusters([0, 1]).edge_index.tolist()
        ([1, 2, 3], [[0, 1], [1, 2]])
    """

    def __init__(self, data: Data, part: Tensor) -> None:
        self.data = data
        self.n_id = part.argsort(stable=True)  # [N], node ids sorted by part; below, nodes are positions in this list
        self._part = part[self.n_id]
        position = torch.empty_like(self.n_id)
        position[self.n_id] = torch.arange(part.numel())
        src, dst = position[data.edge_index.long()]
        self._e_id = dst.argsort(stable=True)  # [E], edge ids sorted by dst
        self._src, self._dst = src[self._e_id], dst[self._e_id]
        size = int(part.max()) + 2  # + 1 for the empty part
        self._nodes = index2ptr(self._part, size)  # [size + 1], the first node of each part
        self._edges = index2ptr(self._part[self._dst], size)  # [size + 1], the first in-edge of each part

    def __call__(self, parts: Sequence[int]) -> Data:
        """Return the subgraph of the nodes of some parts."""
        part = torch.tensor(sorted(parts), dtype=torch.long)
        nodes, _ = draw(self._nodes, part, -1)
        edges, _ = draw(self._edges, part, -1)
        is_selected = torch.zeros_like(self._nodes, dtype=torch.bool).index_fill_(0, part, True)
        edges = edges[is_selected[self._part[self._src[edges]]]]
        size = self._nodes.diff()[part]
        shift = torch.zeros_like(self._nodes)  # per part, from positions in the graph to positions in the batch
        shift[part] = size.cumsum(0) - size - self._nodes[part]
        ends = torch.stack([self._src[edges], self._dst[edges]])
        data, n_id = self.data, self.n_id[nodes] if nodes.numel() else self.n_id[:1]
        batch = Data(data.x[n_id], ends + shift[self._part[ends]], y=data.y[n_id], n_id=n_id, parts=part.tolist())
        batch.train_mask = data.train_mask[n_id] & (nodes.numel() > 0)
        if data.edge_attr is not None:
            batch.edge_attr = data.edge_attr[self._e_id[edges]]
        return batch
