"""The structure: grouped right, checked once, the same for every form and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, remove_self_loops

import gat_pyg.graph.edges
import gat_pyg.graph.memory
from gat_pyg.graph.adjacency import neighbourhoods, with_self_loops
from gat_pyg.graph.edges import SPLIT, Edges, count_long
from gat_pyg.graph.memory import load_cpu_kernels
from tests.graphs import BIPARTITE, LOOPS, RANDOM, SQUARE, ZOO, Graph, random
from tests.syncs import syncs

LAYOUTS = {"coo": torch.Tensor.coalesce, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


def adjacency(graph: Graph, layout: str) -> torch.Tensor:
    """The transposed adjacency [N_dst, N_src] without repeated edges."""
    size = (graph.num_dst, graph.num_src)
    ones = torch.ones(graph.index.size(1))
    matrix = torch.sparse_coo_tensor(graph.index.flip(0), ones, size).coalesce()
    return LAYOUTS[layout](
        torch.sparse_coo_tensor(matrix.indices(), torch.ones(matrix._nnz()), size, is_coalesced=True)
    )


@pytest.fixture(params=[False, True], ids=["cpu", "remote"])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test once as on a CPU and once as on a GPU, with CPU tensors."""
    if request.param:
        monkeypatch.setattr(gat_pyg.graph.edges, "is_remote", lambda _: True)
    return bool(request.param)


def pairs(index: torch.Tensor) -> list[tuple[int, int]]:
    return sorted(map(tuple, index.t().tolist()))


def test_by_hand() -> None:
    edges = Edges.from_index(torch.tensor([[2, 0, 1, 0], [0, 2, 0, 0]]), num_src=3, num_dst=4)
    assert edges.rowptr.tolist() == [0, 3, 3, 4, 4]  # 0 hears 2, 1, 0 in the caller's order; 1 and 3 hear nobody
    assert edges.src.tolist() == [2, 1, 0, 0]
    assert edges.dst.tolist() == [0, 0, 0, 2]
    assert edges.perm is not None and edges.perm.tolist() == [0, 2, 3, 1]
    colptr, dst, place = edges.transpose
    assert colptr.tolist() == [0, 2, 3, 4] and dst.tolist() == [0, 2, 0, 0] and place.tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_rows_are_scipys(graph: Graph) -> None:
    edges = Edges.from_index(graph.index, graph.num_src, graph.num_dst)
    src, dst = graph.index.numpy()
    ids = np.arange(1, src.size + 1)
    for matrix, ptr in (
        (scipy.sparse.coo_array((ids, (dst, src)), shape=(graph.num_dst, graph.num_src)), edges.rowptr),
        (scipy.sparse.coo_array((ids, (src, dst)), shape=(graph.num_src, graph.num_dst)), edges.transpose[0]),
    ):
        counts = np.bincount(matrix.coords[0], minlength=matrix.shape[0])
        assert ptr.tolist() == [0, *np.cumsum(counts).tolist()]
    assert edges.src.dtype == edges.dst.dtype == torch.int32
    assert torch.equal(edges.index[:, edges.perm.long()], torch.stack([edges.src, edges.dst]))
    assert torch.equal(edges.ungroup(edges.group(torch.arange(edges.num_edges))), torch.arange(edges.num_edges))
    _, dst_by_src, place = edges.transpose
    assert torch.equal(edges.dst[place.long()], dst_by_src)
    assert (edges.src[place.long()].diff() >= 0).all()


def test_undirected_graph_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.graph.edges._FEW", 0)
    both = torch.cat([RANDOM.index, RANDOM.index.flip(0)], 1)
    edges = Edges.from_index(torch.unique(both, dim=1), RANDOM.num_src, RANDOM.num_dst)
    assert edges.transpose[0] is edges.rowptr and edges.transpose[1] is edges.src


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_loops_are_pygs(graph: Graph, loops: bool) -> None:
    edges = neighbourhoods(graph.index, graph.num_src, graph.num_dst, add_self_loops=loops)
    expected = rows = graph.index
    if loops:
        expected, _ = add_self_loops(remove_self_loops(graph.index)[0], num_nodes=graph.num_src)
        rows, _ = add_self_loops(graph.index, num_nodes=graph.num_src)
        assert torch.equal(with_self_loops(graph.index, graph.num_src, graph.num_dst), expected)
    assert torch.equal(edges.index.long(), rows)
    assert torch.equal(rows if edges.rows is None else rows[:, edges.rows], expected)


@pytest.mark.parametrize("graph", ZOO, ids=str)
@pytest.mark.parametrize("loops", [False, True])
def test_rows_without_an_edge_change_nothing_else(graph: Graph, loops: bool, remote: bool) -> None:
    """Loops that are replaced and edges that are left out act as if they were not in the list."""
    edges = neighbourhoods(graph.index, graph.num_src, graph.num_dst, add_self_loops=loops)
    expected = graph.index
    if loops:
        is_edge = graph.index[0] != graph.index[1]
        expected, _ = add_self_loops(graph.index[:, is_edge], num_nodes=min(graph.num_src, graph.num_dst))
    whole = Edges.from_index(expected, graph.num_src, graph.num_dst)
    assert_same_subset(edges, whole)
    assert torch.equal(ids_of_edges(edges), ids_of_edges(whole))  # dropout is drawn as for the filtered list
    keep = torch.rand(edges.num_rows, generator=torch.Generator().manual_seed(0)) < 0.7
    selected = keep if edges.rows is None else keep[edges.rows]
    with syncs() as waits:
        some = edges.subset(keep)
    assert waits == ["tolist"] if remote else True
    again = some.subset(torch.ones(edges.num_rows, dtype=torch.bool))
    for subset in (some, again, edges.subset(keep).subset(keep)):
        assert_same_subset(subset, Edges.from_index(expected[:, selected], graph.num_src, graph.num_dst))
        assert torch.equal(ids_of_edges(subset), ids_of_edges(edges)[selected])
    if remote:
        pointers = {"dst": some.rowptr, "src": some.transpose[0]}
        assert some.long == {side: tuple(map(int, count_long(ptr, SPLIT))) for side, ptr in pointers.items()}


def ids_of_edges(edges: Edges) -> torch.Tensor:
    """The dropout ids of the edges in the caller's order, three times: from the rows, by dst and by src."""
    at = edges.perm if edges.perm is not None else torch.arange(edges.num_edges)
    ids = torch.arange(edges.num_rows) if edges.dropout_ids is None else edges.dropout_ids
    by_dst = at if edges.dropout_ids_by_dst is None else edges.dropout_ids_by_dst
    assert torch.equal(edges.dropout_ids_by_src, by_dst[edges.transpose[2]])
    assert torch.equal(ids[at].int(), by_dst.int())
    return ids[at.sort().values].long()


def assert_same_subset(edges: Edges, expected: Edges) -> None:
    """The same edges in the same order, whatever their rows, each between the ends of its row."""
    for one, other in zip(
        (edges.rowptr, edges.src, edges.dst, *edges.transpose),
        (expected.rowptr, expected.src, expected.dst, *expected.transpose),
        strict=True,
    ):
        assert one.dtype == other.dtype and torch.equal(one, other)
    at = edges.perm if edges.perm is not None else torch.arange(edges.num_edges)
    rows = at.sort().values if edges.rows is None else edges.rows
    assert torch.equal(edges.index[:, at], torch.stack([edges.src, edges.dst]))
    assert torch.equal(edges.index[:, rows], expected.index)
    values = torch.randn(edges.num_edges, 2, dtype=torch.double)
    apart = edges.ungroup(values)
    assert apart.size(0) == edges.num_rows and torch.equal(apart[rows], expected.ungroup(values))
    assert torch.equal(edges.group(apart), values) and torch.equal(edges.ungroup(values.t(), 1), apart.t())
    assert torch.equal(apart.count_nonzero(0), values.count_nonzero(0))
    assert torch.equal(edges.ids_by_src, at[edges.transpose[2]])


@pytest.mark.parametrize("loops", [False, True])
def test_ungroup_is_differentiable_twice_and_can_be_mapped(loops: bool) -> None:
    edges = neighbourhoods(LOOPS.index, 3, 3, add_self_loops=loops)
    values = torch.randn(edges.num_edges, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(edges.ungroup, values) and torch.autograd.gradgradcheck(edges.ungroup, values)
    assert torch.equal(torch.func.vmap(edges.ungroup, 1, 1)(values), edges.ungroup(values))


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        "EdgeIndex",
        "sorted EdgeIndex",
        "int32",
        pytest.param("SparseTensor", marks=pytest.mark.sparse),
        "reverse",
    ],
)
@pytest.mark.parametrize("graph", [LOOPS, RANDOM], ids=str)
@pytest.mark.parametrize("loops", [False, True])
def test_every_adjacency_type_means_the_same(graph: Graph, layout: str, loops: bool) -> None:
    sizes = (graph.num_src, graph.num_dst)
    index = torch.unique(graph.index, dim=1).contiguous()
    flow = "source_to_target"
    if layout in LAYOUTS:
        converted = adjacency(graph, layout)
    elif layout == "SparseTensor":
        torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
        converted = torch_sparse.SparseTensor.from_edge_index(index, sparse_sizes=sizes).t()
    elif layout.endswith("EdgeIndex"):
        converted = EdgeIndex(index, sparse_size=sizes, sort_order="row")
        converted = converted.sort_by("col").values if layout.startswith("sorted") else converted
    elif layout == "int32":
        converted = index.int()
    else:
        converted, flow = index.flip(0), "target_to_source"
    expected = neighbourhoods(index, *sizes, add_self_loops=loops)
    edges = neighbourhoods(converted, *sizes, add_self_loops=loops, flow=flow)
    assert torch.equal(edges.rowptr, expected.rowptr)
    assert pairs(torch.stack([edges.src, edges.dst])) == pairs(torch.stack([expected.src, expected.dst]))
    assert torch.equal(edges.index[:, rows_of(edges)], torch.stack([edges.src, edges.dst]))
    if layout in ("coo", "csr", "SparseTensor"):
        assert edges.perm is None  # what comes sorted is not sorted again


def rows_of(edges: Edges) -> torch.Tensor:
    return torch.arange(edges.num_edges) if edges.perm is None else edges.perm


COMPILED = load_cpu_kernels()


def sorted_by(side: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda index: EdgeIndex(index, sparse_size=(40, 40)).sort_by(side).values


HUBS = random(40, 40, 9000)  # some of its rows are long with a SPLIT of 224
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "edge list": (torch.clone, {}),
    "int32": (torch.Tensor.int, {}),
    "int8": (lambda index: index.to(torch.int8), {}),
    "uint8": (lambda index: index.to(torch.uint8), {}),
    "from target to source": (torch.clone, {"flow": "target_to_source"}),
    "EdgeIndex": (lambda index: EdgeIndex(index.clone(), sparse_size=(40, 40)), {}),
    "sorted EdgeIndex": (sorted_by("col"), {}),
    "EdgeIndex sorted by row": (sorted_by("row"), {"flow": "target_to_source"}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loops", [False, True])
def test_a_new_graph_costs_one_sync(form: str, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = FORMS[form]
    expected = neighbourhoods(make(HUBS.index), 40, 40, add_self_loops=loops, **options)
    monkeypatch.setattr(gat_pyg.graph.edges, "is_remote", lambda _: True)
    monkeypatch.setattr(gat_pyg.graph.edges, "SPLIT", 224)
    new = make(HUBS.index)
    with syncs() as waits:
        edges = neighbourhoods(new, 40, 40, add_self_loops=loops, **options)
        _ = edges.wide, edges.transpose, edges.ids_by_src, edges.dropout_ids_by_src, edges.ungroup(edges.src)
        looped = with_self_loops(new, 40, 40, **options)
    assert waits == ["tolist"] if loops else waits == ["tolist", "tolist"]  # with loops, another graph
    pygs, _ = add_self_loops(remove_self_loops(new)[0], num_nodes=40)
    assert type(looped) is type(pygs) and torch.equal(looped, pygs) and looped.dtype == pygs.dtype
    if isinstance(looped, EdgeIndex):
        assert looped.is_undirected == pygs.is_undirected and looped.sort_order == pygs.sort_order
    assert_same_edges(edges, expected)
    for side, ptr in (("dst", edges.rowptr), ("src", edges.transpose[0])):
        degree = np.diff(ptr.numpy())
        long = degree[degree > 224]
        assert edges.long is not None and edges.long[side] == (long.size, sum(-(-long // 224))) and 0 < long.size < 40


def assert_same_edges(edges: Edges, expected: Edges) -> None:
    for name in ("index", "rowptr", "src", "dst", "perm", "dropout_ids"):
        one, other = getattr(edges, name), getattr(expected, name)
        assert (one is other) if other is None else (one.dtype == other.dtype and torch.equal(one, other)), name
    for one, other in zip(edges.transpose, expected.transpose, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert (edges.num_src, edges.num_dst) == (expected.num_src, expected.num_dst)


@pytest.mark.parametrize("layout", ["edge list", *LAYOUTS])
def test_every_graph_is_the_same_on_every_device(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(graph, loops) for graph in ZOO for loops in (False, True)]
    for graph, loops in cases:
        if loops and layout != "edge list" and graph not in SQUARE:
            continue
        built = []
        for remote in (False, True):
            monkeypatch.setattr(gat_pyg.graph.edges, "is_remote", lambda _, remote=remote: remote)
            index = graph.index.clone() if layout == "edge list" else adjacency(graph, layout)
            built.append(neighbourhoods(index, graph.num_src, graph.num_dst, add_self_loops=loops))
        assert_same_edges(built[1], built[0])
        no_long_row = {"dst": (0, 0), "src": (0, 0)}  # none has more than SPLIT edges
        assert built[0].long is None and built[1].long == no_long_row, f"{graph} {loops}"


@pytest.mark.parametrize("largest", [2**31 - 1, 0], ids=["int32", "int64"])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_the_compiled_sort_is_torchs(flow: Any, loops: bool, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ids of both widths, graphs with and without loops, and edge lists that are not contiguous."""
    if COMPILED is None:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(gat_pyg.graph.edges, "_INT32_MAX", largest)
    for graph in (*ZOO, HUBS, random(300, 5, 4000), random(5, 300, 4000), random(1, 1, 7)):
        sizes = (graph.num_src, graph.num_dst)[:: 1 if flow == "source_to_target" else -1]
        for index in (graph.index, graph.index.t().contiguous().t(), graph.index.repeat(1, 2)[:, ::2].int()):
            built = []
            for kernels in (COMPILED, None):
                monkeypatch.setattr(gat_pyg.graph.edges, "_cpu_kernels", lambda _, kernels=kernels: kernels)
                built.append(neighbourhoods(index.view_as(index), *sizes, add_self_loops=loops, flow=flow))
                assert len(built[-1].transpose) == 3
            assert_same_edges(*built)
            assert built[0].src.dtype == (torch.int32 if largest or not any((*sizes, index.size(1))) else torch.int64)


def test_the_ids_of_replaced_loops_may_be_any(remote: bool) -> None:
    index = torch.tensor([[7, 0, -1], [7, 1, -1]])
    edges, looped = neighbourhoods(index, 2, 2, add_self_loops=True), with_self_loops(index, 2, 2)
    assert edges.index.tolist() == [[1, 0, 0, 0, 1], [1, 1, 0, 0, 1]]  # any id of a node
    assert looped.tolist() == [[0, 0, 1], [1, 0, 1]] and edges.rowptr.tolist() == [0, 1, 3]
    assert neighbourhoods(torch.tensor([[7], [7]]), 0, 0, add_self_loops=True).num_edges == 0
    assert remote == (edges.long is not None)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize(
    ("rowptr", "shown"),
    [
        ([0, 10**8, 10**8, 4], "falls"),
        ([0, 2, 1, 4], "falls"),
        ([0, 1, 2, 3], "ends at 3"),
        ([1, 1, 2, 4], "begins at 1"),
        ([0, -5, 2, 4], "falls"),
    ],
    ids=str,
)
@pytest.mark.sparse
def test_a_sparse_tensor_with_a_wrong_rowptr_is_an_error(
    rowptr: list[int], shown: str, loops: bool, remote: bool
) -> None:
    torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is torch_sparse's")
    col = torch.tensor([0, 1, 2, 1])
    adj = torch_sparse.SparseTensor(
        rowptr=torch.tensor(rowptr), col=col, sparse_sizes=(3, 3), is_sorted=True, trust_data=True
    )
    with pytest.raises(ValueError, match=f"rowptr {shown}, expected 0 to 4 without a fall"):
        neighbourhoods(adj, 3, 3, add_self_loops=loops)
    with pytest.raises(ValueError, match=f"rowptr {shown}"):
        Edges.from_csr(torch.tensor(rowptr), col, 3)


def test_a_graph_built_in_inference_mode_can_be_trained_on() -> None:
    index = RANDOM.index.clone()
    with torch.inference_mode():
        edges = neighbourhoods(index, 40, 40, add_self_loops=True)
        parts = [edges.src, edges.dst, edges.perm, *edges.wide, edges.transpose[1], edges.transpose[2]]
        edges.ungroup(edges.src)
    x = torch.randn(40, 3, requires_grad=True)
    for ids in parts:
        x.index_select(0, ids % 40).sum().backward()  # an inference tensor cannot be saved for this
        assert not ids.is_inference()
    assert not edges.ungroup(edges.src).is_inference()
    assert x.grad is not None
    with torch.inference_mode():
        own = RANDOM.index.clone()
        assert torch.equal(neighbourhoods(own, 40, 40).index.long(), own)


def test_edges_own_their_memory(remote: bool) -> None:
    """Strided ids are grouped, and what becomes of the caller's tensors later changes nothing."""
    rowptr, src = torch.tensor([[0, 9], [1, 9], [3, 9]]), torch.tensor([[2, 7], [0, 7], [1, 7]])
    for dtype in (torch.int32, torch.int64):
        ptr, ids = rowptr[:, 0].clone(), src[:, 0].to(dtype)
        strided = rowptr.clone()[:, 0], src.to(dtype)[:, 0]
        pairs = torch.stack([ids, torch.tensor([0, 1, 1], dtype=dtype)], 1).t()  # as a list of pairs
        for edges, tensors in (
            (Edges.from_csr(*strided, 3), strided),
            (Edges.from_csr(ptr, ids, 3), (ptr, ids)),
            (Edges.from_index(pairs, 3, 2), (pairs,)),
        ):
            for each in tensors:
                each.fill_(5)
            assert edges.index.tolist() == [[2, 0, 1], [0, 1, 1]] and edges.rowptr.tolist() == [0, 1, 3]
            assert edges.src.tolist() == [2, 0, 1] and edges.dst.tolist() == [0, 1, 1]
            assert all(t.is_contiguous() for t in (edges.index, edges.rowptr, edges.src, edges.dst))


def ids(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


WRONG_EDGE_LISTS: list[tuple[Any, type[Exception], str]] = [
    (ids(7, 2), ValueError, r"shape \(7, 2\), expected \(2, E\)\. Did you mean edge_index\.t\(\)\?"),
    (ids(3, 7), ValueError, r"shape \(3, 7\), expected \(2, E\)\.$"),
    (ids(2), ValueError, r"shape \(2,\), expected \(2, E\)"),
    (ids(2, 7, dtype=torch.float), ValueError, r"dtype torch\.float32, expected integers, .* Did you mean .*\.long"),
    (ids(2, 7, dtype=torch.bool), ValueError, r"dtype torch\.bool, expected integers"),
    (ids(2, 7, dtype=torch.uint16), ValueError, r"dtype torch\.uint16, expected integers, signed or uint8\. Did you"),
    (ids(2, 7, dtype=torch.uint32), ValueError, r"dtype torch\.uint32, expected integers"),
    (ids(2, 7, dtype=torch.uint64), ValueError, r"dtype torch\.uint64, expected integers"),
    (torch.tensor([[0, -1], [1, 1]]), IndexError, r"the src id -1, expected ids of at least 0"),
    (torch.tensor([[0, 1], [1, -2]]), IndexError, r"the dst id -2"),
    (torch.tensor([[0, 5], [1, 1]]), IndexError, r"the src id 5, but there are 5 src nodes \(0 to 4\)"),
    (torch.tensor([[0, 1], [1, 3]]), IndexError, r"the dst id 3, but there are 3 dst nodes"),
    (EdgeIndex(torch.tensor([[0, 9], [1, 2]]), sort_order="col"), IndexError, "the src id 9"),
    (EdgeIndex(torch.tensor([[0, 1], [1, 9]]), sort_order="col"), IndexError, "the dst id 9"),
    (EdgeIndex(torch.tensor([[0, 1], [-1, 1]]), sort_order="col"), IndexError, "the dst id -1"),
]


@pytest.mark.parametrize("loops", [False, True])
def test_a_wrong_edge_list_is_an_error(loops: bool, remote: bool) -> None:
    for index, error, message in WRONG_EDGE_LISTS:
        with pytest.raises(error, match=message):
            neighbourhoods(index, 5, 3, add_self_loops=loops)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix_of_another_shape(layout: str) -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 5\), expected \(N_dst, N_src\) = \(5, 3\)\. Did you mean adj"):
        neighbourhoods(adjacency(BIPARTITE, layout), 3, 5)
    with pytest.raises(ValueError, match="flow='target_to_source' is for edge lists"):
        neighbourhoods(adjacency(LOOPS, layout), 3, 3, flow="target_to_source")
