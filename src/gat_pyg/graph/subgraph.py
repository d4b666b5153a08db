"""Subgraphs: the receptive field of some nodes, and the edges that each layer of it reads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_torch_sparse_tensor

from .remembered import remembered


def receptive_field(data: Data, nodes: Tensor, num_hops: int) -> Data:
    """The part of a graph that some nodes see from so many hops: what `NeighborLoader` gives with all neighbours.

    The nodes come first, then those of hop 1, 2, ..., each in their order, and the edges into each hop in the same way.
    Their numbers are in ``num_sampled_nodes`` and ``num_sampled_edges``, where they were in ``n_id`` and ``e_id``; the
    features are copied.

    >>> path = Data(x=torch.arange(5.0).view(-1, 1), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    >>> part = receptive_field(path, torch.tensor([3]), num_hops=2)
    >>> part.n_id.tolist(), part.edge_index.tolist(), part.num_sampled_nodes, part.num_sampled_edges
    ([3, 2, 1], [[1, 2], [0, 1]], [1, 1, 1], [1, 1])
    """
    src, dst = data.edge_index
    hop = torch.full((data.num_nodes or 0,), num_hops + 1, device=dst.device)
    hop[nodes] = 0
    for k in range(num_hops):
        seen = src[hop[dst] <= k]
        hop[seen] = hop[seen].clamp(max=k + 1)
    n_id, e_id = _by_hop(hop, num_hops), _by_hop(hop[dst], num_hops - 1)
    place = torch.empty_like(hop)
    place[n_id] = torch.arange(n_id.numel(), device=hop.device)
    part = copy.copy(data)
    for key, value in data:
        if key == "edge_index":
            part[key] = place[value[:, e_id]]
        elif isinstance(value, Tensor) and data.is_node_attr(key):
            part[key] = _rows(value, n_id)
        elif isinstance(value, Tensor) and data.is_edge_attr(key):
            part[key] = value[e_id]
    if "num_nodes" in data:
        part.num_nodes = n_id.numel()
    part.n_id, part.e_id = n_id, e_id
    part.num_sampled_nodes = hop[n_id].bincount(minlength=num_hops + 1).tolist()
    part.num_sampled_edges = hop[dst[e_id]].bincount(minlength=num_hops).tolist()
    return part


def _rows(value: Tensor, index: Tensor) -> Tensor:
    if value.layout == torch.sparse_csr:
        value = value.to_sparse_coo().index_select(0, index).coalesce()
        return value.to_sparse_csr()
    return value.index_select(0, index)


def _by_hop(hop: Tensor, last: int) -> Tensor:
    """Return the positions of the entries up to hop `last`, sorted by hop."""
    hop, order = hop.sort(stable=True)
    return order[: int((hop <= last).sum())]


def first_edges(edge_index: Tensor, edge_attr: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """The first of a graph's edges and their features, the very same tensor of ids each time.

    Raises:
        ValueError: if the graph is no edge list `[2, E]`.

    >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    >>> first_edges(edge_index, None, 2)[0] is first_edges(edge_index, None, 2)[0]
    True
    """
    if not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index):
        raise ValueError("edge_index is a sparse matrix, but edges are numbered per hop: pass an edge list (2, E).")
    if count == edge_index.size(1):
        return edge_index, edge_attr
    return _first(edge_index, count), None if edge_attr is None else edge_attr[:count]


@remembered
def _first(edge_index: Tensor, count: int) -> Tensor:
    return edge_index[:, :count].clone()  # a view would hold the key


@remembered
def mask_to_index(mask: Tensor) -> Tensor:
    """The rows under a mask, remembered with it: `out[mask]` makes a GPU wait in each step.

    >>> mask_to_index(torch.tensor([True, False, True]))
    tensor([0, 2])
    """
    return mask.nonzero().squeeze(1)


def is_sampled(data: Data) -> bool:
    """Return True if these are seed nodes with neighbours drawn for them, as PyG's loaders give them."""
    return "batch_size" in data and "n_id" in data
