"""Cluster-GCN batches: subgraphs of some parts of a partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import index2ptr

from .neighbours import draw


class Clusters:
    """The subgraphs that parts of a graph induce: the batches of Cluster-GCN (Chiang et al., KDD 2019).

    Called with some parts, it gives their nodes, part after part, and all edges among them, those from one part to
    another too: all parts are the whole graph. Beside `x`, `edge_index`, `y`, `train_mask` and, where there is one,
    `edge_attr`, a batch has the nodes' numbers `n_id` and the `parts` in ascending order; its edges are grouped by dst.
    The part after the last is empty, for a process that has none: alone it gives one node that is not for training.

    Args:
        data: the graph, with `x`, `edge_index`, `y` and `train_mask`; its features are read row by row.
        part: `[N]` int64, the part of each node, as of `gat_pyg.graph.partition.partition`.

    Cost: O(E log E) once, and 24 bytes an edge; a batch costs O(nodes and in-edges of its parts).

    Example:
        >>> path = Data(torch.eye(4), torch.tensor([[0, 1, 2], [1, 2, 3]]), y=torch.arange(4))
        >>> path.train_mask = path.y > 1
        >>> clusters = Clusters(path, torch.tensor([2, 0, 0, 1]))
        >>> clusters([0, 1]).n_id.tolist(), clusters([0, 1]).edge_index.tolist()
        ([1, 2, 3], [[0, 1], [1, 2]])
    """

    def __init__(self, data: Data, part: Tensor) -> None:
        self.data = data
        self.n_id = part.argsort(stable=True)  # [N]: the nodes, part after part, as they are numbered from here on
        self._part = part[self.n_id]
        number = torch.empty_like(self.n_id)
        number[self.n_id] = torch.arange(part.numel())
        src, dst = number[data.edge_index.long()]
        self._e_id = dst.argsort(stable=True)  # [E]: the edges, by dst
        self._src, self._dst = src[self._e_id], dst[self._e_id]
        size = int(part.max()) + 2  # with a part after the last, which is empty
        self._nodes = index2ptr(self._part, size)  # [size + 1]: where the nodes of each part begin,
        self._edges = index2ptr(self._part[self._dst], size)  # and where its in-edges do

    def __call__(self, parts: Sequence[int]) -> Data:
        """The subgraph of the nodes of some parts."""
        own = torch.tensor(sorted(parts), dtype=torch.long)
        nodes, _ = draw(self._nodes, own, -1)
        edges, _ = draw(self._edges, own, -1)
        chosen = torch.zeros_like(self._nodes, dtype=torch.bool).index_fill_(0, own, True)
        edges = edges[chosen[self._part[self._src[edges]]]]
        size = self._nodes.diff()[own]
        shift = torch.zeros_like(self._nodes)  # from a node's place among all to that in the batch
        shift[own] = size.cumsum(0) - size - self._nodes[own]
        ends = torch.stack([self._src[edges], self._dst[edges]])
        data, n_id = self.data, self.n_id[nodes] if nodes.numel() else self.n_id[:1]
        batch = Data(data.x[n_id], ends + shift[self._part[ends]], y=data.y[n_id], n_id=n_id, parts=own.tolist())
        batch.train_mask = data.train_mask[n_id] & (nodes.numel() > 0)
        if data.edge_attr is not None:
            batch.edge_attr = data.edge_attr[self._e_id[edges]]
        return batch
