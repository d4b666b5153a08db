"""The neighbourhoods of a graph: its edges grouped by dst, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.index import ptr2index

from .checks import check_edge_index, check_ids, check_rowptr
from .memory import load_cpu_kernels
from .remembered import _beneath, _lasting, _outside

Flow: TypeAlias = Literal["source_to_target", "target_to_source"]
Side: TypeAlias = Literal["dst", "src"]  # rows by dst (CSR) or by src (CSC)
_INT32_MAX = torch.iinfo(torch.int32).max
_FEW = 1 << 16  # edges that are grouped by src too at once: a second call would take longer
SPLIT = 256  # edges; the CUDA kernels split longer rows into chunks


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of a graph in CSR form by dst: row i holds the neighbourhood that dst i attends over.

    Whatever belongs to single edges, as their features, has R rows in the caller's order: one for each edge of the list
    as it was passed, then one for each added self-loop. The E edges refer to some or all of these rows: the graph's own
    loops, which the added ones replace, keep their rows but are no edges here.

    Ids are int32 where N and R allow, else int64, on the device of the graph. Edges of one neighbourhood keep the
    caller's order, so the structure is the same every time.

    Attributes:
        index: `[2, R]`, src and dst of every row.
        rowptr: `[N_dst + 1]`, int64; the neighbourhood of dst i is at `rowptr[i]:rowptr[i + 1]`.
        src: `[E]`, grouped by dst.
        dst: `[E]`, ascending.
        perm: `[E]`, the row of each grouped edge; None if each is the edge's index.
        num_src: N_src.
        num_dst: N_dst.
        dropout_ids: `[R]`, the counter that identifies each row's edge to the dropout generator; None if it is the
            row's index.
        long: the number of rows of more than `SPLIT` edges, and that of their chunks, by side; None on a CPU.

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
    long: dict[Side, tuple[int, int]] | None = None

    @classmethod
    def from_index(cls, index: Tensor, num_src: int, num_dst: int) -> Edges:
        """Group an edge list `[2, E]` of (src, dst) by dst.

        Costs a stable sort, O(N + E), or two of them and one sync on other devices than a CPU.

        Raises:
            ValueError: if the ids are not integers or the shape is not `(2, E)`.
            IndexError: if an id is outside `[0, N)`.
        """
        return cls._group(index, num_src, num_dst, None)

    @classmethod
    def with_loops(cls, index: Tensor, num_src: int, num_dst: int) -> Edges:
        """Group an edge list `[2, E]` with one self-loop for each of the first min(N_src, N_dst) nodes.

        They have the rows after those of the list, and replace its own loops. Cost and errors as of `from_index`.
        """
        return cls._group(index, num_src, num_dst, min(num_src, num_dst))

    @classmethod
    def _group(cls, index: Tensor, num_src: int, num_dst: int, num_loops: int | None) -> Edges:
        """Group an edge list; `num_loops`: the number of loops that replace its own, or None to keep its own."""
        index = _beneath(index)
        check_edge_index(index)
        if (cpu := _cpu_kernels(index)) is not None:
            num_loops = -1 if num_loops is None else num_loops
            both = index.size(1) < _FEW
            with _outside():
                return cls._counted(cpu, index.detach(), num_src, num_dst, num_loops, both)
        size, added = index.size(1), num_loops or 0
        dtype = _id_dtype(num_src, num_dst, size + added)
        if num_loops is None:
            scalars = _bounds(index, "src", "dst")
            index = index.to(dtype, copy=True).contiguous()
        else:
            is_loop = index[0] == index[1]
            inside = index.masked_fill(is_loop, 0)  # a replaced loop may have any id
            scalars = {"loops": is_loop.sum(), **_bounds(inside, "src", "dst")}
            loops = torch.arange(num_loops, dtype=dtype, device=index.device)
            narrow, last = index.to(dtype), max(num_src, num_dst)  # own loops come last, and are then left out
            index = torch.cat([narrow.masked_fill(is_loop, last), loops.expand(2, -1)], 1)
        dst, perm = torch.sort(index[1], stable=True)
        src, rowptr = index[0].index_select(0, perm), _pointer(dst, num_dst)
        facts, columns = _read_facts(rowptr, src, num_src, scalars)
        replaced = facts.get("loops", 0)
        facts["edges"] = size - replaced
        check_ids(facts, "src", num_src)
        check_ids(facts, "dst", num_dst)
        ids = None
        if replaced:
            inside = torch.where(is_loop, narrow.clamp(0, max(added - 1, 0)), narrow)
            index = torch.cat([inside, loops.expand(2, -1)], 1)
            before = ((~is_loop).cumsum(0) - 1).clamp(min=0)  # the index of each row in the list without its loops
            ids = torch.cat([before.to(dtype), loops + facts["edges"]])
        count = size - replaced + added
        src, dst, perm = src[:count], dst[:count], perm[:count].to(dtype)
        edges = cls(index, rowptr, src, dst, perm, num_src, num_dst, ids, _long(facts))
        return edges._with_columns(columns)

    @classmethod
    def _counted(cls, cpu: Any, index: Tensor, num_src: int, num_dst: int, num_loops: int, both: bool) -> Edges:
        """Group an edge list on a CPU, if `both` by src too; `num_loops`: the loops that replace its own, or -1."""
        dtype = _id_dtype(num_src, num_dst, index.size(1) + max(num_loops, 0))
        grouped = cpu.group_edges(index, num_loops, num_src, num_dst, dtype, both)
        if isinstance(grouped, dict):
            check_ids(grouped, "src", num_src)
            check_ids(grouped, "dst", num_dst)
        rows, ids, (rowptr, dst, src, perm), by_src = grouped
        edges = cls(rows, rowptr, src, dst, perm, num_src, num_dst, ids)
        if by_src is not None:
            vars(edges)["transpose"] = by_src
        return edges

    @classmethod
    def from_csr(cls, rowptr: Tensor, src: Tensor, num_src: int) -> Edges:
        """Build from edges that are already grouped by dst, as in a sparse matrix, without sorting them by dst.

        Raises:
            ValueError: if rowptr does not rise from 0 to E.
            IndexError: if a src is outside `[0, num_src)`.
        """
        rowptr, src, num_dst, count = _beneath(rowptr), _beneath(src), rowptr.numel() - 1, src.numel()
        with _outside():
            scalars = _bounds(src[None], "src") | _ends(rowptr)
            src = src.detach().to(_id_dtype(num_src, num_dst, count))
            facts, columns = _read_facts(rowptr, src, num_src, scalars)
            check_rowptr(facts, count)
            check_ids(facts, "src", num_src)
            rowptr = rowptr.detach().to(torch.int64, copy=True).contiguous()
            index = torch.stack([src, ptr2index(rowptr, output_size=count).to(src.dtype)])
            edges = cls(index, rowptr, index[0], index[1], None, num_src, num_dst, long=_long(facts))
            return edges._with_columns(columns)

    def _with_columns(self, columns: tuple[Tensor, Tensor] | None) -> Edges:
        """Return these edges, with their CSC form where its `_columns` are known."""
        if columns is not None:
            colptr, place = columns[0], columns[1][: self.num_edges]
            vars(self)["transpose"] = colptr, self.dst.index_select(0, place), place.to(self.dst.dtype)
        return self

    @property
    def num_edges(self) -> int:
        """E, with added self-loops."""
        return self.src.numel()

    @property
    def num_rows(self) -> int:
        """R, at least E."""
        return self.index.size(1)

    @cached_property
    def rows(self) -> Tensor | None:
        """`[E]`, the rows that have an edge, ascending; None if all have."""
        if self.perm is None or self.num_rows == self.num_edges:
            return None
        with _lasting(self):
            return self.perm.sort().values

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """src and dst, grouped by dst, as int64, by which torch adds rows up to four times faster on a CPU."""
        with _lasting(self):
            return self.src.long(), self.dst.long()

    @cached_property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """The CSC form, grouped by src: `(colptr [N_src + 1], dst [E], index of each edge in the CSR form [E])`.

        Built on a CPU on first use, where a large undirected graph shares colptr and dst with rowptr and src; of few
        edges, and on other devices, with the edges. There the comparison would cost a sync, and sharing would save
        only 4 bytes per edge.
        """
        with _lasting(self):
            if (cpu := _cpu_kernels(self.src)) is not None:
                colptr, dst, place = cpu.sort_edges(self.src, self.dst, self.num_src)
            else:
                colptr, place = _columns(self.src, self.num_src)
                dst = self.dst.index_select(0, place)
            if not is_remote(dst) and torch.equal(colptr, self.rowptr) and torch.equal(dst, self.src):
                colptr, dst = self.rowptr, self.src
            return colptr, dst, place.to(dst.dtype)

    @cached_property
    def ids_by_src(self) -> Tensor:
        """`[E]`, the row of each edge of the CSC form."""
        place = self.transpose[2]
        with _lasting(self):
            return place if self.perm is None else self.perm.index_select(0, place)

    @property
    def dropout_edges(self) -> int | Tensor:
        """The rows to draw a dropout mask for: a count, or explicit ids."""
        return self.num_rows if self.dropout_ids is None else self.dropout_ids

    @cached_property
    def dropout_ids_by_dst(self) -> Tensor | None:
        """`[E]`, the dropout ids grouped by dst; None if each is the edge's index."""
        with _lasting(self):
            return self.perm if self.dropout_ids is None else self.group(self.dropout_ids)

    @cached_property
    def dropout_ids_by_src(self) -> Tensor:
        """`[E]`, the dropout ids in the order of the CSC form."""
        with _lasting(self):
            return self.ids_by_src if self.dropout_ids is None else self.dropout_ids.index_select(0, self.ids_by_src)

    def group(self, per_edge: Tensor) -> Tensor:
        """Reorder `[R, ...]` to `[E, ...]` grouped by dst."""
        return per_edge if self.perm is None else per_edge.index_select(0, self.perm)

    def ungroup(self, per_edge: Tensor, axis: int = 0) -> Tensor:
        """Reorder E edges grouped by dst to R rows, zero where a row has no edge; `axis` is that of the edges."""
        if self.perm is None:
            return per_edge
        if self.num_rows == self.num_edges:
            return per_edge.index_select(axis, self._inverse)
        shape = list(per_edge.shape)
        shape[axis] = self.num_rows
        return per_edge.new_zeros(shape).index_copy(axis, self._inverse, per_edge)

    @cached_property
    def _inverse(self) -> Tensor:
        """`[R]`, the edge of each row; where some rows have none `[E]`, the row of each edge, as int64."""
        assert self.perm is not None
        with _lasting(self):
            perm = self.perm.long()
            if self.num_rows > self.num_edges:
                return perm
            return torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.numel(), device=perm.device))

    def subset(self, keep: Tensor) -> Edges:
        """The edges whose rows are true in a mask `[R]`, on the same rows and with the same dropout ids.

        Costs one device sync and no sort.

        Example:
            >>> edges = Edges.from_index(torch.tensor([[0, 1, 2], [1, 0, 1]]), num_src=3, num_dst=3)
            >>> some = edges.subset(torch.tensor([True, False, True]))
            >>> some.rowptr.tolist(), some.src.tolist(), some.perm.tolist(), some.num_rows
            ([0, 0, 2, 2], [0, 2], [0, 2], 3)
        """
        keep = _beneath(keep)
        with _outside():
            kept, (colptr, dst, place) = self.group(keep), self.transpose
            kept_by_src = kept.index_select(0, place)
            before, before_by_src = (F.pad(mask.cumsum(0), (1, 0)) for mask in (kept, kept_by_src))
            rowptr, colptr = before.index_select(0, self.rowptr), before_by_src.index_select(0, colptr)
            scalars = {"edges": before[-1]}
            if is_remote(keep):
                scalars |= _long_counts(rowptr, colptr)
            facts = read(scalars)
            at, at_by_src = (indices_of(mask, facts["edges"]) for mask in (kept, kept_by_src))
            perm = at.to(self.src.dtype) if self.perm is None else self.perm.index_select(0, at)
            src, dst_of_row = self.src.index_select(0, at), self.dst.index_select(0, at)
            edges = replace(self, rowptr=rowptr, src=src, dst=dst_of_row, perm=perm, long=_long(facts))
            place = before.index_select(0, place.index_select(0, at_by_src)).to(place.dtype)
            vars(edges)["transpose"] = colptr, dst.index_select(0, at_by_src), place
        return edges


def _id_dtype(num_src: int, num_dst: int, num_edges: int) -> torch.dtype:
    return torch.int32 if max(num_src, num_dst, num_edges) <= _INT32_MAX else torch.int64


def is_remote(tensor: Tensor) -> bool:
    """Return True if the tensor is not on a CPU, so that reading a value synchronises with its device."""
    return tensor.device.type != "cpu"


def _cpu_kernels(tensor: Tensor) -> Any:
    """Return the compiled kernels of this folder if they can serve a tensor, else None."""
    return None if is_remote(tensor) else load_cpu_kernels()


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


def count_long(ptr: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Return the number of rows of more than `split` edges and the number of their chunks, `[]` each."""
    more = torch.div(ptr.diff() - 1, split, rounding_mode="trunc")  # chunks but the first
    rows = (more > 0).sum()
    return rows, rows + more.sum()


def _pointer(ids: Tensor, num_nodes: int) -> Tensor:
    """Return the CSR pointer `[N + 1]` of sorted ids; it never fails for other ids."""
    return torch.searchsorted(ids, torch.arange(num_nodes + 1, dtype=ids.dtype, device=ids.device))


def _columns(src: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    """Return the pointer `[N_src + 1]` of edges grouped by src, and the index `[E]` of each edge in `src`, as int64."""
    ids, place = torch.sort(src, stable=True)
    return _pointer(ids, num_src), place


def _bounds(ids: Tensor, *sides: Side) -> dict[str, Tensor]:
    """Return the lowest and the highest id of each side, the rows of `ids`; nothing if there is no edge."""
    if ids.size(1) == 0:
        return {}
    scalars: dict[str, Tensor] = {}
    for side, lowest, highest in zip(sides, *torch.aminmax(ids, dim=1), strict=True):
        scalars |= {f"lowest {side}": lowest, f"highest {side}": highest}
    return scalars


def _read_facts(
    rowptr: Tensor, src: Tensor, num_src: int, scalars: dict[str, Tensor]
) -> tuple[dict[str, int], tuple[Tensor, Tensor] | None]:
    """Return the values by which a new graph is checked, with one device sync, and, except on a CPU, its `_columns`.

    Except on a CPU they include the numbers of long rows. The edges are (src, rowptr); it never fails for wrong ones.
    """
    columns = _columns(src, num_src) if is_remote(src) else None
    if columns is not None:
        scalars |= _long_counts(rowptr, columns[0])
    return {"edges": src.numel(), **read(scalars)}, columns


def _ends(rowptr: Tensor) -> dict[str, Tensor]:
    return {"first": rowptr[0], "last": rowptr[-1], "falls": (rowptr[1:] < rowptr[:-1]).any()}


def _long_counts(rowptr: Tensor, colptr: Tensor) -> dict[str, Tensor]:
    (rows, parts), (rows_src, parts_src) = count_long(rowptr, SPLIT), count_long(colptr, SPLIT)
    return {"long dst": rows, "parts dst": parts, "long src": rows_src, "parts src": parts_src}


def _long(facts: dict[str, int]) -> dict[Side, tuple[int, int]] | None:
    sides: tuple[Side, ...] = "dst", "src"
    return {side: (facts[f"long {side}"], facts[f"parts {side}"]) for side in sides} if "long dst" in facts else None
