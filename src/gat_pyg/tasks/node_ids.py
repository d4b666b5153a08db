"""Node ids as the only feature of a graph without features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data


def node_ids(N: int) -> Tensor:
    """Return the ids of N nodes as the only feature `[N, 1]`, for learnt embeddings of a graph without features.

    >>> node_ids(3)
    tensor([[0.],
            [1.],
            [2.]])
    """
    return torch.arange(N, dtype=torch.get_default_dtype())[:, None]


def num_nodes(data: Data) -> int:
    """Return the number of rows of x or, without x, `num_nodes` or as many nodes as `edge_index` shows."""
    if isinstance(data.x, Tensor) and data.x.dim():
        return int(data.x.size(0))
    if "num_nodes" in data:
        return int(data.num_nodes)
    return int(data.edge_index.max()) + 1 if data.edge_index.numel() else 0


def has_ids(x: Tensor) -> bool:
    """Return True if the only feature of a graph's nodes is their id."""
    return x.size(1) == 1 and torch.equal(x, node_ids(x.size(0)))
