"""Subgraphs: the receptive field of some nodes, and the edges that each layer reads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_torch_sparse_tensor

from .remembered import remembered


def receptive_field(data: Data, nodes: Tensor, num_hops: int) -> Data:
    """Return the subgraph that a model of `num_hops` layers reads to compute these nodes.

    It equals the batch of `NeighborLoader` with all neighbours. The nodes come first, then those of hop 1, 2, ..., in
    the graph's order within a hop; the edges are sorted in the same way by the hop of their dst. The numbers per hop
    are `num_sampled_nodes` and `num_sampled_edges`, the ids in the graph `n_id` and `e_id`. Features are copied.

    >>> path = Data(x=torch.arange(5.0).view(-1, 1), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    >>> field = receptive_field(path, torch.tensor([3]), num_hops=2)
    >>> field.n_id.tolist(), field.edge_index.tolist(), field.num_sampled_nodes, field.num_sampled_edges
    ([3, 2, 1], [[1, 2], [0, 1]], [1, 1, 1], [1, 1])
    """
    src, dst = data.edge_index
    hop = torch.full((data.num_nodes or 0,), num_hops + 1, device=dst.device)
    hop[nodes] = 0
    for k in range(num_hops):
        neighbours = src[hop[dst] <= k]
        hop[neighbours] = hop[neighbours].clamp(max=k + 1)
    n_id, e_id = _by_hop(hop, num_hops), _by_hop(hop[dst], num_hops - 1)
    position = torch.empty_like(hop)
    position[n_id] = torch.arange(n_id.numel(), device=hop.device)
    field = copy.copy(data)
    for key, value in data:
        if key == "edge_index":
            field[key] = position[value[:, e_id]]
        elif isinstance(value, Tensor) and data.is_node_attr(key):
            field[key] = _rows(value, n_id)
        elif isinstance(value, Tensor) and data.is_edge_attr(key):
            field[key] = value[e_id]
    if "num_nodes" in data:
        field.num_nodes = n_id.numel()
    field.n_id, field.e_id = n_id, e_id
    field.num_sampled_nodes = hop[n_id].bincount(minlength=num_hops + 1).tolist()
    field.num_sampled_edges = hop[dst[e_id]].bincount(minlength=num_hops).tolist()
    return field


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
    """Return the first `count` edges of a graph and their features; the tensor of ids is the same object every time.

    Raises:
        ValueError: if the graph is not an edge list `[2, E]`.

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
    return edge_index[:, :count].clone()  # a view would refer to the key of the cache


@remembered
def mask_to_index(mask: Tensor) -> Tensor:
    """Return the indices at which a mask is true, cached: `out[mask]` would synchronise with a GPU in each step.

    >>> mask_to_index(torch.tensor([True, False, True]))
    tensor([0, 2])
    """
    return mask.nonzero().squeeze(1)


def is_sampled(data: Data) -> bool:
    """Return True for a batch of seed nodes with sampled neighbours, as from PyG's loaders."""
    return "batch_size" in data and "n_id" in data
