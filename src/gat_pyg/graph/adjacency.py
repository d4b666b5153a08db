"""Any form of adjacency as `Edges`, cached for all layers and epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.index import index2ptr
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops as append_self_loops
from torch_geometric.utils import is_torch_sparse_tensor, remove_self_loops, to_edge_index

from .checks import check_matrix, check_rowptr
from .edges import Edges, Flow, _ends, _id_dtype, read
from .remembered import get_result, remembered, set_result


def neighbourhoods(
    adjacency: Tensor | SparseTensor,
    num_src: int,
    num_dst: int,
    *,
    add_self_loops: bool = False,
    flow: Flow = "source_to_target",
) -> Edges:
    """Return the neighbourhoods of a graph, with self-loops if requested.

    With `add_self_loops`, the graph's own loops are replaced by one for each of the first min(N_src, N_dst) nodes, as
    in PyG: the neighbourhood of i includes i. In an edge list the replaced loops keep their rows, and the added ones
    have the rows after those of the list; in a matrix, every edge and loop is stored by row. The result is cached with
    the graph, so all layers and epochs share it. A change of the graph in place invalidates it: on a CPU whoever makes
    it; on CUDA a change that torch's version counter counts, for others see `remembered`.

    Args:
        adjacency: an edge list `[2, E]`, `EdgeIndex`, or the transposed adjacency matrix `[N_dst, N_src]` as
            `SparseTensor` or torch.sparse COO, CSR or CSC.
        num_src: N_src.
        num_dst: N_dst.
        add_self_loops: if true, each node attends to itself.
        flow: the row of an edge list that is src: "source_to_target" the first, "target_to_source" the second.

    Raises:
        ValueError: if the ids are not integers, the shape is not `(2, E)`, a matrix is not `[N_dst, N_src]`, or
            the flow of a matrix is "target_to_source".
        IndexError: if an id is outside `[0, N)`.
    """
    return _build(adjacency, num_src, num_dst, add_self_loops, flow)


def with_self_loops(
    adjacency: Tensor | SparseTensor, num_src: int, num_dst: int, flow: Flow = "source_to_target"
) -> Tensor | SparseTensor:
    """Return the adjacency with self-loops, as PyG's layers return it; arguments as of `neighbourhoods`.

    The own loops of an edge list are left out and the added ones appended, so its edges are those of `Edges.rows`.
    """
    return _looped(adjacency, num_src, num_dst, flow)


class EdgeList(NamedTuple):
    """An edge list with the arguments of `neighbourhoods`: the graph as it is passed to a compiled operator.

    Attributes:
        edge_index: `[2, E]`.
        num_dst, add_self_loops, flow: as in `neighbourhoods`.
        drop_seed, drop: the seed and the probability p of edge dropout, which never drops a self-loop; None for none.
    """

    edge_index: Tensor
    num_dst: int
    add_self_loops: bool = False
    flow: Flow = "source_to_target"
    drop_seed: Tensor | None = None
    drop: float = 0.0

    @property
    def num_edges(self) -> int:
        """E, without added self-loops."""
        return self.edge_index.size(1)

    def group(self, num_src: int) -> Edges:
        """Return the `neighbourhoods` of this edge list, with all edges."""
        edge_index, num_dst, add_self_loops, flow, *_ = self
        return neighbourhoods(edge_index, num_src, num_dst, add_self_loops=add_self_loops, flow=flow)


@remembered
def _build(adjacency: Any, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow) -> Edges:
    if not isinstance(adjacency, Tensor):
        return _from_sparse_tensor(adjacency, num_src, num_dst, add_self_loops, flow)
    if adjacency.layout != torch.strided:
        return _from_torch_sparse(adjacency, num_src, num_dst, add_self_loops, flow)
    index = adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency
    group = Edges.with_loops if add_self_loops else Edges.from_index
    edges = group(index if flow == "source_to_target" else index.flip(0), num_src, num_dst)
    if (known := get_result(_dropout_ids, adjacency)) is not None:
        ids, at = known[1 + add_self_loops], edges.dropout_ids
        edges = replace(edges, dropout_ids=ids if at is None or not edges.num_edges else ids.index_select(0, at))
    return edges


@remembered
def _looped(adjacency: Any, num_src: int, num_dst: int, flow: Flow) -> Tensor | SparseTensor:
    if isinstance(adjacency, SparseTensor):
        return torch_sparse.set_diag(adjacency)
    if is_torch_sparse_tensor(adjacency):
        if adjacency.layout == torch.sparse_csc:
            return _with_loops(adjacency.t(), True).t()
        return _with_loops(adjacency, True)
    edges = neighbourhoods(adjacency, num_src, num_dst, add_self_loops=True, flow=flow)
    num_loops, looped = min(num_src, num_dst), adjacency
    if edges.rows is not None:
        looped = adjacency.index_select(1, edges.rows[: edges.num_edges - num_loops])
        if isinstance(adjacency, EdgeIndex) and isinstance(looped, EdgeIndex):
            looped._is_undirected = adjacency.is_undirected  # as PyG's remove_self_loops
    return append_self_loops(looped, num_nodes=num_loops)[0]


@remembered
def _dropout_ids(edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The ids that `set_dropout_ids` set: as passed, then in the narrowest dtype, without and with added self-loops."""
    return None


def set_dropout_ids(edge_index: Tensor, ids: Tensor, looped: Tensor) -> None:
    """Give the edges of a subgraph their ids in the full graph, so that both draw the same dropout mask.

    Args:
        edge_index: `[2, E]`, of the subgraph.
        ids: `[E]`, the index of each edge in the full graph.
        looped: the ids when self-loops are added: those of the edges that are not loops, then those of the added loops.

    Example:
        >>> edge_index = torch.tensor([[0, 1], [1, 0]])
        >>> set_dropout_ids(edge_index, torch.tensor([7, 5]), torch.tensor([7, 5, 9, 10]))
        >>> neighbourhoods(edge_index, 2, 2).dropout_ids_by_dst.tolist()
        [5, 7]
    """
    known = _dropout_ids(edge_index)
    if known is None or known[0] is not ids:
        largest = max(int(values.max()) if values.numel() else 0 for values in (ids, looped))
        narrow = (values.to(_id_dtype(0, 0, largest)) for values in (ids, looped))
        set_result(_dropout_ids, edge_index, (ids, *narrow))


def _from_sparse_tensor(adjacency: SparseTensor, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow) -> Edges:
    check_matrix(tuple(adjacency.sparse_sizes()), num_src, num_dst, flow)
    if add_self_loops:
        if (rowptr := adjacency.storage._rowptr) is not None:  # torch_sparse writes out of bounds if it is wrong
            check_rowptr(read(_ends(rowptr)), adjacency.storage.col().numel())
        adjacency = torch_sparse.set_diag(adjacency)
    rowptr, col, _ = adjacency.csr()
    return Edges.from_csr(rowptr, col, num_src)


def _from_torch_sparse(adjacency: Tensor, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow) -> Edges:
    check_matrix(tuple(adjacency.shape[:2]), num_src, num_dst, flow)
    if adjacency.layout == torch.sparse_csc:  # the CSR of the transpose has the same edges, order and loops
        (src, dst), _ = to_edge_index(_with_loops(adjacency.t(), add_self_loops))
        return Edges.from_index(torch.stack([src, dst]), num_src, num_dst)
    adjacency = _with_loops(adjacency, add_self_loops)
    (dst, src), _ = to_edge_index(adjacency)
    return Edges.from_csr(index2ptr(dst, num_dst), src, num_src)


def _with_loops(adjacency: Tensor, add_self_loops: bool) -> Tensor:
    """A sparse matrix, coalesced if it is COO, with self-loops if requested."""
    if adjacency.layout == torch.sparse_coo:
        adjacency = adjacency.coalesce()
    if not add_self_loops:
        return adjacency
    adjacency, _ = remove_self_loops(adjacency)
    adjacency, _ = append_self_loops(adjacency)
    return adjacency
