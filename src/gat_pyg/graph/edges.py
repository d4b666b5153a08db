"""The neighbourhoods of a graph: its edges grouped by dst, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric.index import index2ptr, ptr2index

from .remembered import _beneath, _outside

Flow: TypeAlias = Literal["source_to_target", "target_to_source"]
Side: TypeAlias = Literal["dst", "src"]  # rows by dst (CSR) or by src (CSC)
_INT32_MAX = torch.iinfo(torch.int32).max
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SPLIT = 256  # edges; the CUDA kernels split longer rows into chunks


class Long(NamedTuple):
    """The number of rows with more than `SPLIT` edges, and of their chunks of at most `SPLIT` edges."""

    rows: int
    parts: int


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of a graph in CSR form by dst: row i holds the neighbourhood that dst i attends over.

    Ids are int32 where N and E allow, else int64, on the device of the graph. Edges of one neighbourhood keep the
    caller's order, so the structure is the same every time.

    Attributes:
        index: `[2, E]`, src and dst of every edge in the caller's order.
        rowptr: `[N_dst + 1]`, int64; the neighbourhood of dst i is at `rowptr[i]:rowptr[i + 1]`.
        src: `[E]`, grouped by dst.
        dst: `[E]`, ascending.
        perm: `[E]`, the index in the caller's order of each grouped edge; None if both orders are the same.
        num_src: N_src.
        num_dst: N_dst.
        dropout_ids: `[E]`, the counter that identifies each edge to the dropout generator, in the caller's order; None
            if it is the edge's index.
        long: the numbers of long rows and of their chunks, by side; None on a CPU.

    Example:
        >>> edges = Edges.from_index(torch.tensor([[0, 1, 2], [1, 0, 1]]), num_src=3, num_dst=3)
        >>> edges.rowptr.tolist(), edges.src.tolist(), edges.perm.tolist()
        ([0, 1, 3, 3], [1, 0, 2], [1, 0, 2])
    """

    index: Tensor
    rowptr: Tensor
    src: Tensor
    dst: Tensor
    perm: Tensor | None
    num_src: int
    num_dst: int
    dropout_ids: Tensor | None = None
    long: dict[Side, Long] | None = None

    @classmethod
    def from_index(cls, index: Tensor, num_src: int, num_dst: int) -> Edges:
        """Group an edge list `[2, E]` of (src, dst) by dst.

        Costs a stable radix sort, O(E), and one device sync.

        Raises:
            ValueError: if the ids are not integers or the shape is not `(2, E)`.
            IndexError: if an id is outside `[0, N)`.
        """
        index = _beneath(index)
        check_edge_index(index)
        facts = _facts(index[0], index[1], num_src, num_dst)
        _check_ids(facts, "src", num_src)
        _check_ids(facts, "dst", num_dst)
        return cls._sorted(index, num_src, num_dst, facts)

    @classmethod
    def _sorted(cls, index: Tensor, num_src: int, num_dst: int, facts: dict[str, int]) -> Edges:
        """Group an edge list whose ids have been checked."""
        index = index.detach().to(_id_dtype(num_src, num_dst, index.size(1)))
        dst, perm = torch.sort(index[1], stable=True)
        perm = perm.to(index.dtype)
        rowptr, src = index2ptr(dst.long(), num_dst), index[0].index_select(0, perm)
        return cls(index, rowptr, src, dst, perm, num_src, num_dst, long=_long(facts))

    @classmethod
    def from_csr(cls, rowptr: Tensor, src: Tensor, num_src: int) -> Edges:
        """Build from edges that are already grouped by dst, as in a sparse matrix, without sorting.

        Raises:
            ValueError: if rowptr does not rise from 0 to E.
            IndexError: if a src is outside `[0, num_src)`.
        """
        rowptr, src = _beneath(rowptr), _beneath(src)
        facts = _facts(src, None, num_src, rowptr.numel() - 1, rowptr=rowptr)
        _check_rowptr(facts, src.numel())
        _check_ids(facts, "src", num_src)
        return cls._by_rows(rowptr, src, num_src, facts)

    @classmethod
    def _by_rows(cls, rowptr: Tensor, src: Tensor, num_src: int, facts: dict[str, int]) -> Edges:
        """Build from CSR whose rowptr and ids have been checked."""
        num_dst = rowptr.numel() - 1
        src = src.detach().to(_id_dtype(num_src, num_dst, src.numel()))
        dst = ptr2index(rowptr, output_size=src.numel()).to(src.dtype)
        return cls(torch.stack([src, dst]), rowptr.detach().long(), src, dst, None, num_src, num_dst, long=_long(facts))

    @property
    def num_edges(self) -> int:
        """E, with added self-loops."""
        return self.src.numel()

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """src and dst, grouped by dst, as int64, by which torch adds rows up to four times faster on a CPU."""
        with _outside():
            return self.src.long(), self.dst.long()

    @cached_property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """The CSC form, grouped by src: `(colptr [N_src + 1], dst [E], index of each edge in the CSR form [E])`.

        Built on first use. On a CPU, an undirected graph shares colptr and dst with rowptr and src; on other devices
        the comparison would cost a sync, and sharing would save only 4 bytes per edge.
        """
        with _outside():
            src, place = torch.sort(self.src, stable=True)
            colptr, dst = index2ptr(src.long(), self.num_src), self.dst.index_select(0, place)
            if not is_remote(src) and torch.equal(colptr, self.rowptr) and torch.equal(dst, self.src):
                colptr, dst = self.rowptr, self.src
            return colptr, dst, place.to(src.dtype)

    @cached_property
    def ids_by_src(self) -> Tensor:
        """`[E]`, the index in the caller's order of each edge of the CSC form."""
        place = self.transpose[2]
        with _outside():
            return place if self.perm is None else self.perm.index_select(0, place)

    @property
    def dropout_edges(self) -> int | Tensor:
        """The edges to draw a dropout mask for, in the caller's order: a count, or explicit ids."""
        return self.num_edges if self.dropout_ids is None else self.dropout_ids

    @cached_property
    def dropout_ids_by_dst(self) -> Tensor | None:
        """`[E]`, the dropout ids grouped by dst; None if each is the edge's index."""
        with _outside():
            return self.perm if self.dropout_ids is None else self.group(self.dropout_ids)

    @cached_property
    def dropout_ids_by_src(self) -> Tensor:
        """`[E]`, the dropout ids in the order of the CSC form."""
        with _outside():
            return self.ids_by_src if self.dropout_ids is None else self.dropout_ids.index_select(0, self.ids_by_src)

    def group(self, per_edge: Tensor) -> Tensor:
        """Reorder `[E, ...]` from the caller's order to the order grouped by dst."""
        return per_edge if self.perm is None else per_edge.index_select(0, self.perm)

    def ungroup(self, per_edge: Tensor, axis: int = 0) -> Tensor:
        """Reorder from the order grouped by dst to the caller's order; `axis` is that of the edges."""
        return per_edge if self.perm is None else per_edge.index_select(axis, self._inverse)

    @cached_property
    def _inverse(self) -> Tensor:
        assert self.perm is not None
        with _outside():
            return torch.argsort(self.perm)


def _id_dtype(num_src: int, num_dst: int, num_edges: int) -> torch.dtype:
    return torch.int32 if max(num_src, num_dst, num_edges) <= _INT32_MAX else torch.int64


def check_edge_index(edge_index: Tensor) -> None:
    """Check the dtype and shape of an edge list; no id is read, so there is no device sync.

    Raises:
        ValueError: if the ids are not integers or the shape is not `(2, E)`.
    """
    if edge_index.dtype not in _ID_DTYPES:  # torch has few operations for uint16, uint32 and uint64
        raise ValueError(
            f"edge_index has dtype {edge_index.dtype}, expected integers, signed or uint8. "
            f"Did you mean edge_index.long()?"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")


def is_remote(tensor: Tensor) -> bool:
    """Return True if the tensor is not on a CPU, so that reading a value synchronises with its device."""
    return tensor.device.type != "cpu"


def read(scalars: dict[str, Tensor]) -> dict[str, int]:
    """Return the integers in tensors `[]`, with one device sync."""
    values = torch.stack([scalar.long() for scalar in scalars.values()]).tolist() if scalars else []
    return dict(zip(scalars, values, strict=True))


def indices_of(mask: Tensor, count: int) -> Tensor:
    """Return the indices `[count]` at which the mask is true, on CUDA without a device sync."""
    # torch 2.10 has nonzero_static only on CUDA, and on CPUs, where it is slower
    static = is_remote(mask) and mask.device.type in ("cpu", "cuda")
    indices = mask.nonzero_static(size=count) if static else mask.nonzero()
    return indices.squeeze(1)


def count_long(degree: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Return the number of rows of more than `split` edges and the number of their chunks, `[]` each."""
    chunks = torch.where(degree > split, (degree + (split - 1)) // split, 0)
    return (chunks > 0).sum(), chunks.sum()


def _degree(ids: Tensor, num_nodes: int, is_edge: Tensor | None, num_loops: int) -> Tensor:
    """Return the number of edges of each node, with added loops; ids outside of `[0, N)` are clamped."""
    last = max(num_nodes - 1, 0)
    ones = ids.new_ones((), dtype=torch.int64).expand(ids.size(0)) if is_edge is None else is_edge.long()
    degree = ones.new_zeros(last + 1).scatter_add_(0, ids.long().clamp(0, last), ones)
    degree[:num_loops] += 1
    return degree


def _facts(
    src: Tensor,
    dst: Tensor | None,
    num_src: int,
    num_dst: int,
    *,
    is_edge: Tensor | None = None,
    rowptr: Tensor | None = None,
    ascending: Tensor | None = None,
) -> dict[str, int]:
    """Return the values by which a new graph is checked and, except on a CPU, its long rows, with one device sync.

    The edges are (src, dst) or, grouped by dst, (src, rowptr). Edges outside of the mask `is_edge` `[E]` are
    self-loops, which are replaced by one for each of the first min(N_src, N_dst) nodes.
    """
    ids: dict[Side, Tensor] = {"src": src} if dst is None else {"src": src, "dst": dst}
    scalars = {}
    if is_edge is not None:
        scalars["edges"] = is_edge.sum()
        ids = {side: torch.where(is_edge, each, 0) for side, each in ids.items()}  # ids of loops need no check
    for side, each in ids.items():
        if each.numel():
            scalars[f"lowest {side}"], scalars[f"highest {side}"] = torch.aminmax(each)
    if rowptr is not None:
        scalars |= _ends(rowptr)
    if ascending is not None:
        scalars["falls"] = _falls(ascending)
    if is_remote(src):
        num_loops = 0 if is_edge is None else min(num_src, num_dst)
        by_dst = rowptr.diff() if rowptr is not None else _degree(ids["dst"], num_dst, is_edge, num_loops)
        scalars["long dst"], scalars["parts dst"] = count_long(by_dst, SPLIT)
        by_src = _degree(ids["src"], num_src, is_edge, num_loops)
        scalars["long src"], scalars["parts src"] = count_long(by_src, SPLIT)
    return {"edges": src.numel(), **read(scalars)}


def _falls(values: Tensor) -> Tensor:
    return (values[1:] < values[:-1]).any()


def _ends(rowptr: Tensor) -> dict[str, Tensor]:
    return {"first": rowptr[0], "last": rowptr[-1], "falls": _falls(rowptr)}


def _check_ids(facts: dict[str, int], side: Side, num_nodes: int) -> None:
    if not facts["edges"]:
        return
    low, high = facts[f"lowest {side}"], facts[f"highest {side}"]
    if low < 0:
        raise IndexError(f"edge_index holds the {side} id {low}, expected ids of at least 0. Was it padded with -1?")
    if high >= num_nodes:
        raise IndexError(
            f"edge_index holds the {side} id {high}, but there are {num_nodes} {side} nodes (0 to {num_nodes - 1}). "
            f"Give x one row for every node, or pass size=(num_src, num_dst)."
        )


def _check_rowptr(facts: dict[str, int], num_edges: int) -> None:
    falls, first, last = facts["falls"], facts["first"], facts["last"]
    if falls or first != 0 or last != num_edges:
        fault = "falls" if falls else f"begins at {first}" if first else f"ends at {last}"
        raise ValueError(f"the adjacency's rowptr {fault}, expected 0 to {num_edges} without a fall.")


def _long(facts: dict[str, int]) -> dict[Side, Long] | None:
    if "long dst" not in facts:
        return None
    return {"dst": Long(facts["long dst"], facts["parts dst"]), "src": Long(facts["long src"], facts["parts src"])}
