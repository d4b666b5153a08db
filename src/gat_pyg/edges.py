"""The neighbourhoods of a graph: its edges grouped by dst, checked once and remembered for every layer and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.index import index2ptr, ptr2index
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops as append_self_loops
from torch_geometric.utils import is_torch_sparse_tensor, remove_self_loops, to_edge_index

P = ParamSpec("P")
T = TypeVar("T")
Flow: TypeAlias = Literal["source_to_target", "target_to_source"]
Side: TypeAlias = Literal["dst", "src"]  # whose rows: CSR or CSC

_INT32_MAX = torch.iinfo(torch.int32).max
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

SPLIT = 256  # edges; the CUDA kernels process a longer row in parts

NOT_OVER_THE_GRAPH = (
    "vmap maps over features and parameters, not over the graph. "
    "Loop over the graphs, or join them as torch_geometric.data.Batch does."
)


class Long(NamedTuple):
    """The number of rows with more than `SPLIT` edges, and the number of parts of at most `SPLIT` edges they have."""

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
        perm: `[E]`, the place in the caller's order of each grouped edge; None where the two orders are one.
        num_src: N_src.
        num_dst: N_dst.
        names: `[E]`, what dropout calls each edge in the caller's order; None where that is its place there.
        long: the numbers of long rows and of their parts, by side; None on a CPU.

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
    names: Tensor | None = None
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
        """Take edges that are grouped by dst already, as sparse matrices hold them: nothing is sorted.

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
        """E, with the self-loops that were added."""
        return self.src.numel()

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """src and dst, grouped by dst, as int64: on a CPU torch adds rows up to four times faster by those."""
        with _outside():
            return self.src.long(), self.dst.long()

    @cached_property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """The CSC form, by src: `(colptr [N_src + 1], dst [E], place of each edge in the order grouped by dst [E])`.

        Built when first asked for. On a CPU, an undirected graph shares colptr and dst with rowptr and src; on other
        devices the comparison would cost a sync, and sharing would save 4 bytes an edge.
        """
        with _outside():
            src, place = torch.sort(self.src, stable=True)
            colptr, dst = index2ptr(src.long(), self.num_src), self.dst.index_select(0, place)
            if not is_remote(src) and torch.equal(colptr, self.rowptr) and torch.equal(dst, self.src):
                colptr, dst = self.rowptr, self.src
            return colptr, dst, place.to(src.dtype)

    @cached_property
    def ids_by_src(self) -> Tensor:
        """`[E]`, the place in the caller's order of each edge of the CSC form."""
        place = self.transpose[2]
        with _outside():
            return place if self.perm is None else self.perm.index_select(0, place)

    @property
    def drawn(self) -> int | Tensor:
        """What a mask in the caller's order is drawn for: how many edges, or what dropout calls each."""
        return self.num_edges if self.names is None else self.names

    @cached_property
    def names_by_dst(self) -> Tensor | None:
        """`[E]`, what dropout calls each grouped edge; None where that is its place."""
        with _outside():
            return self.perm if self.names is None else self.group(self.names)

    @cached_property
    def names_by_src(self) -> Tensor:
        """`[E]`, what dropout calls each edge of the CSC form."""
        with _outside():
            return self.ids_by_src if self.names is None else self.names.index_select(0, self.ids_by_src)

    def group(self, per_edge: Tensor) -> Tensor:
        """`[E, ...]` from the caller's order to the order grouped by dst."""
        return per_edge if self.perm is None else per_edge.index_select(0, self.perm)

    def ungroup(self, per_edge: Tensor, axis: int = 0) -> Tensor:
        """`[E, ...]` from the order grouped by dst to the caller's order; the edges are along `axis`."""
        return per_edge if self.perm is None else per_edge.index_select(axis, self._inverse)

    @cached_property
    def _inverse(self) -> Tensor:
        assert self.perm is not None
        with _outside():
            return torch.argsort(self.perm)


@contextmanager
def _outside() -> Iterator[None]:
    """Out of inference mode and of torch.func's transforms: what is remembered has to serve everyone else too."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield


def _id_dtype(num_src: int, num_dst: int, num_edges: int) -> torch.dtype:
    return torch.int32 if max(num_src, num_dst, num_edges) <= _INT32_MAX else torch.int64


def check_edge_index(edge_index: Tensor) -> None:
    """Check what can be seen of an edge list without reading an id, so without a device sync.

    Raises:
        ValueError: if the ids are not integers or the shape is not `(2, E)`.
    """
    if edge_index.dtype not in _ID_DTYPES:  # torch hardly computes with uint16, uint32 and uint64
        raise ValueError(
            f"edge_index has dtype {edge_index.dtype}, expected integers, signed or uint8. "
            f"Did you mean edge_index.long()?"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")


def is_remote(tensor: Tensor) -> bool:
    """Return True if reading a value of the tensor synchronises with a device, that is unless it is on a CPU."""
    return tensor.device.type != "cpu"


def read(scalars: dict[str, Tensor]) -> dict[str, int]:
    """Return the integers that tensors `[]` hold, by one device sync."""
    values = torch.stack([scalar.long() for scalar in scalars.values()]).tolist() if scalars else []
    return dict(zip(scalars, values, strict=True))


def places_of(mask: Tensor, count: int) -> Tensor:
    """Return the places `[count]` at which the mask is true, on CUDA without a device sync."""
    # torch 2.10 has nonzero_static on CPUs, where it is slower, and CUDA alone
    static = is_remote(mask) and mask.device.type in ("cpu", "cuda")
    places = mask.nonzero_static(size=count) if static else mask.nonzero()
    return places.squeeze(1)


def count_long(degree: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Return the number of rows of more than `split` edges and the number of their parts, `[]` each."""
    parts = torch.where(degree > split, (degree + (split - 1)) // split, 0)
    return (parts > 0).sum(), parts.sum()


def _degree(ids: Tensor, num_nodes: int, is_edge: Tensor | None, num_loops: int) -> Tensor:
    """The number of edges of each node, with added loops; an id outside of `[0, N)` counts for a node inside."""
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
    """Return the values to check of a new graph and, except on a CPU, its counts of long rows, by one device sync.

    The edges are (src, dst) or, grouped by dst, (src, rowptr). Edges outside of the mask `is_edge` `[E]` are
    self-loops, which are replaced by one for each of the first min(N_src, N_dst) nodes.
    """
    ids: dict[Side, Tensor] = {"src": src} if dst is None else {"src": src, "dst": dst}
    wanted = {}
    if is_edge is not None:
        wanted["edges"] = is_edge.sum()
        ids = {side: torch.where(is_edge, each, 0) for side, each in ids.items()}  # 0 hides no wrong id
    for side, each in ids.items():
        if each.numel():
            wanted[f"lowest {side}"], wanted[f"highest {side}"] = torch.aminmax(each)
    if rowptr is not None:
        wanted |= _ends(rowptr)
    if ascending is not None:
        wanted["falls"] = _falls(ascending)
    if is_remote(src):
        num_loops = 0 if is_edge is None else min(num_src, num_dst)
        by_dst = rowptr.diff() if rowptr is not None else _degree(ids["dst"], num_dst, is_edge, num_loops)
        wanted["long dst"], wanted["parts dst"] = count_long(by_dst, SPLIT)
        by_src = _degree(ids["src"], num_src, is_edge, num_loops)
        wanted["long src"], wanted["parts src"] = count_long(by_src, SPLIT)
    return {"edges": src.numel(), **read(wanted)}


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
        shown = "falls" if falls else f"begins at {first}" if first else f"ends at {last}"
        raise ValueError(f"the adjacency's rowptr {shown}, expected 0 to {num_edges} without a fall.")


def _long(facts: dict[str, int]) -> dict[Side, Long] | None:
    if "long dst" not in facts:
        return None
    return {"dst": Long(facts["long dst"], facts["parts dst"]), "src": Long(facts["long src"], facts["parts src"])}


# The structures already built: graph -> (state of its ids, {how it was asked for -> (adjacency with loops, Edges)}).
# Nothing in a value may hold the key, or it would never be freed.
_REMEMBERED = WeakTensorKeyDictionary()


def neighbourhoods(
    adjacency: Tensor | SparseTensor,
    num_src: int,
    num_dst: int,
    *,
    add_self_loops: bool = False,
    flow: Flow = "source_to_target",
) -> tuple[Tensor | SparseTensor, Edges]:
    """The neighbourhoods of a graph, and the adjacency whose order they refer to: with loops, where asked for.

    With `add_self_loops`, the graph's own loops give way to one for each of the first min(N_src, N_dst) nodes, as in
    PyG: the neighbourhood of i includes i. The result is remembered for as long as the graph lives, by the identity
    and version of its index tensors, so every layer and epoch share one; an in-place change makes it anew. A write
    that torch cannot see, through NumPy's view of the memory or `.data`, needs a new tensor.

    Args:
        adjacency: an edge list `[2, E]`, `EdgeIndex`, or the transposed adjacency matrix `[N_dst, N_src]` as
            `SparseTensor` or torch.sparse COO, CSR or CSC.
        num_src: N_src.
        num_dst: N_dst.
        add_self_loops: whether each node attends to itself.
        flow: which row of an edge list is src: "source_to_target" the first, "target_to_source" the second.

    Raises:
        ValueError: if the ids are not integers, the shape is not `(2, E)`, a matrix is not `[N_dst, N_src]`, or
            a matrix is asked to flow from target to source.
        IndexError: if an id is outside `[0, N)`.
    """
    adjacency = _beneath(adjacency)
    owner = _owner(adjacency)
    if owner.is_inference():  # has no version to watch
        return _build(adjacency, num_src, num_dst, add_self_loops, flow)
    known, built = _REMEMBERED.get(owner, (None, {}))
    if known != _state(adjacency):
        built = {}
    asked = (type(adjacency), num_src, num_dst, add_self_loops, flow)
    if asked not in built:
        looped, edges = _build(adjacency, num_src, num_dst, add_self_loops, flow)
        if owner in _NAMES:
            edges = replace(edges, names=_NAMES[owner][1][add_self_loops])
        built[asked] = (looped if add_self_loops else None, edges)
        _REMEMBERED[owner] = (_state(adjacency), built)  # read again: PyG's tools touch the version of a COO matrix
    looped, edges = built[asked]
    return adjacency if looped is None else looped, edges


# What dropout calls the edges of a part of a graph: edge_index -> (as given, [without added loops, with them]).
_NAMES = WeakTensorKeyDictionary()


def name_edges(edge_index: Tensor, names: Tensor, looped: Tensor) -> None:
    """Let dropout call the edges of a part of a graph what it calls them in the whole graph: by their places there.

    Args:
        edge_index: `[2, E]`, of the part.
        names: `[E]`, the place of each in the whole.
        looped: the same where self-loops are added: of the edges that are no loops, then of those of each dst.

    Example:
        >>> edge_index = torch.tensor([[0, 1], [1, 0]])
        >>> name_edges(edge_index, torch.tensor([7, 5]), torch.tensor([7, 5, 9, 10]))
        >>> neighbourhoods(edge_index, 2, 2)[1].names_by_dst.tolist()
        [5, 7]
    """
    known, _ = _NAMES.get(edge_index, (None, ()))
    if known is not names:
        most = max(int(ids.max()) if ids.numel() else 0 for ids in (names, looped))
        _NAMES[edge_index] = names, [ids.to(_id_dtype(0, 0, most)) for ids in (names, looped)]
        _REMEMBERED.pop(edge_index, None)


def once_per_graph(make: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """`make(edge_index, ...)`, remembered for as long as the graph lives and is not changed, as `neighbourhoods` are.

    The other arguments are hashable, and nothing in what is made may hold the tensor `edge_index` itself.

    >>> num_edges = once_per_graph(lambda edge_index: [edge_index.size(1)])
    >>> edge_index = torch.tensor([[0, 1], [1, 2]])
    >>> num_edges(edge_index), num_edges(edge_index) is num_edges(edge_index)
    ([2], True)
    """
    remembered = WeakTensorKeyDictionary()

    @wraps(make)
    def made_once(edge_index: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return make(edge_index, *args, **kwargs)
        edge_index = _beneath(edge_index)
        if (owner := _owner(edge_index)).is_inference():  # has no version to watch
            return make(edge_index, *args, **kwargs)
        known, made = remembered.get(owner, (None, {}))
        if known != _state(edge_index):
            made = {}
        asked = (type(edge_index), args, *kwargs.items())
        if asked not in made:
            with _outside():
                made[asked] = make(edge_index, *args, **kwargs)
            remembered[owner] = _state(edge_index), made
        found: T = made[asked]
        return found

    return made_once


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


@once_per_graph
def _first(edge_index: Tensor, count: int) -> Tensor:
    return edge_index[:, :count].clone()  # a view would hold the key


def _owner(adjacency: Tensor | SparseTensor) -> Tensor:
    """The tensor that lives as long as the graph does."""
    if isinstance(adjacency, SparseTensor):
        col: Tensor = adjacency.storage.col()
        return col
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


def _beneath(adjacency: Any) -> Any:
    """Return the graph without the wrappers of torch.func's transforms: within one, every operation returns a wrapper.

    The wrapper has no memory to read and ends with its transform, while the neighbourhoods are remembered.

    Raises:
        NotImplementedError: if `torch.func.vmap` maps over it.
    """
    functorch = torch._C._functorch
    if isinstance(adjacency, SparseTensor):  # cannot be made within a transform
        return adjacency
    ids = adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency
    if not functorch.is_functorch_wrapped_tensor(ids):
        return adjacency
    while functorch.is_functorch_wrapped_tensor(ids):
        if functorch.is_batchedtensor(ids):
            raise NotImplementedError(NOT_OVER_THE_GRAPH)
        ids = functorch.get_unwrapped(ids)
    return ids


def ids_state(*ids: Tensor) -> list[tuple[Any, ...]]:
    """Return what changes when one of these tensors is written to or has its memory replaced."""
    return [(part._version, part.data_ptr(), part.shape, part.stride()) for part in ids]


def _state(adjacency: Tensor | SparseTensor) -> list[tuple[Any, ...]]:
    """What changes with the ids of a graph."""
    with torch._C._DisableFuncTorch():  # within a transform, a COO matrix of memory returns indices without
        if isinstance(adjacency, SparseTensor):
            return ids_state(adjacency.storage.rowptr(), adjacency.storage.col())
        if adjacency.layout == torch.sparse_coo:
            return ids_state(adjacency._indices())
        if adjacency.layout == torch.sparse_csr:
            return ids_state(adjacency.crow_indices(), adjacency.col_indices())
        if adjacency.layout == torch.sparse_csc:
            return ids_state(adjacency.ccol_indices(), adjacency.row_indices())
        return ids_state(_owner(adjacency))


def _build(adjacency: Any, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow) -> tuple[Any, Edges]:
    with _outside():
        if isinstance(adjacency, SparseTensor):
            return _from_sparse_tensor(adjacency, num_src, num_dst, add_self_loops, flow)
        if is_torch_sparse_tensor(adjacency):
            return _from_torch_sparse(adjacency, num_src, num_dst, add_self_loops, flow)
        return _from_edge_list(adjacency, num_src, num_dst, add_self_loops, flow)


def _from_edge_list(
    adjacency: Tensor, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow
) -> tuple[Tensor, Edges]:
    if not add_self_loops:
        return adjacency, _group(adjacency, num_src, num_dst, flow)
    check_edge_index(adjacency)
    num_loops = min(num_src, num_dst)
    if not is_remote(adjacency):
        adjacency, _ = remove_self_loops(adjacency)
        adjacency, _ = append_self_loops(adjacency, num_nodes=num_loops)
        return adjacency, _group(adjacency, num_src, num_dst, flow)
    src, dst = _as_index(adjacency, flow)
    is_edge = src != dst
    facts = _facts(src, dst, num_src, num_dst, is_edge=is_edge)
    _check_ids(facts, "src", num_src)
    _check_ids(facts, "dst", num_dst)
    looped = adjacency.index_select(1, places_of(is_edge, facts["edges"]))
    if isinstance(adjacency, EdgeIndex) and isinstance(looped, EdgeIndex):
        looped._is_undirected = adjacency.is_undirected  # as PyG's remove_self_loops
    looped, _ = append_self_loops(looped, num_nodes=num_loops)
    return looped, Edges._sorted(_as_index(looped, flow), num_src, num_dst, facts)


def _as_index(edge_list: Tensor, flow: Flow) -> Tensor:
    """The edges as a plain tensor `[2, E]` of (src, dst)."""
    index = edge_list.as_tensor() if isinstance(edge_list, EdgeIndex) else edge_list
    return index if flow == "source_to_target" else index.flip(0)


def _group(edge_list: Tensor, num_src: int, num_dst: int, flow: Flow) -> Edges:
    """Group an edge list by dst; nothing is sorted where it comes in that order."""
    index, side = _as_index(edge_list, flow), "col" if flow == "source_to_target" else "row"
    if not isinstance(edge_list, EdgeIndex) or edge_list.sort_order != side:
        return Edges.from_index(index, num_src, num_dst)
    src, dst = index
    facts = _facts(src, dst, num_src, num_dst, ascending=dst)
    _check_ids(facts, "dst", num_dst)
    if facts["falls"]:
        raise ValueError(
            f"edge_index is an EdgeIndex with sort_order='{side}', but its ids are not sorted. "
            f"Build the EdgeIndex without sort_order and pass edge_index.sort_by('{side}').values."
        )
    _check_ids(facts, "src", num_src)
    return Edges._by_rows(index2ptr(dst, num_dst), src, num_src, facts)


def _from_sparse_tensor(
    adjacency: SparseTensor, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow
) -> tuple[SparseTensor, Edges]:
    _check_matrix(tuple(adjacency.sparse_sizes()), num_src, num_dst, flow)
    if add_self_loops:
        if (rowptr := adjacency.storage._rowptr) is not None:  # torch_sparse writes out of bounds where it is wrong
            _check_rowptr(read(_ends(rowptr)), adjacency.storage.col().numel())
        adjacency = torch_sparse.set_diag(adjacency)
    rowptr, col, _ = adjacency.csr()
    return adjacency, Edges.from_csr(rowptr, col, num_src)


def _from_torch_sparse(
    adjacency: Tensor, num_src: int, num_dst: int, add_self_loops: bool, flow: Flow
) -> tuple[Tensor, Edges]:
    _check_matrix(tuple(adjacency.shape[:2]), num_src, num_dst, flow)
    if adjacency.layout == torch.sparse_csc:  # the CSR of the transpose: same edges, same order, loops stay loops
        adjacency = _with_loops(adjacency.t(), add_self_loops)
        (src, dst), _ = to_edge_index(adjacency)
        return adjacency.t(), Edges.from_index(torch.stack([src, dst]), num_src, num_dst)
    adjacency = _with_loops(adjacency.coalesce() if adjacency.layout == torch.sparse_coo else adjacency, add_self_loops)
    (dst, src), _ = to_edge_index(adjacency)
    return adjacency, Edges.from_csr(index2ptr(dst, num_dst), src, num_src)


def _with_loops(adjacency: Tensor, add_self_loops: bool) -> Tensor:
    if not add_self_loops:
        return adjacency
    adjacency, _ = remove_self_loops(adjacency)
    adjacency, _ = append_self_loops(adjacency)
    return adjacency


def _check_matrix(shape: tuple[int, ...], num_src: int, num_dst: int, flow: Flow) -> None:
    if flow == "target_to_source":
        raise ValueError(
            "a sparse adjacency holds dst by src, flow='target_to_source' is for edge lists. Pass adj.t()."
        )
    if shape != (num_dst, num_src):
        raise ValueError(
            f"the adjacency has shape {shape}, expected (N_dst, N_src) = {(num_dst, num_src)}. Did you mean adj.t()?"
        )
