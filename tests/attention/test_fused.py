"""The kernels against the plain backends: graphs, scores, sizes, layouts, rows of several chunks, threads.

Tests with a `place` run on the CPU kernels and on those of Triton: `-k triton` with TRITON_INTERPRET=1, or on a GPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg.attention import Additive, attend
from gat_pyg.graph.adjacency import EdgeList, neighbourhoods
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels import device
from gat_pyg.kernels.cpu import rows
from tests.attention.comparisons import (
    FOLDERS,
    MANY,
    MEMORY,
    NUMBA,
    SMALL,
    TERMS,
    WEIGHTED,
    Place,
    answer,
    assert_same,
    check,
    compare,
    direction_of,
    in_mode,
    modes_of,
    split_at,
    spy,
    stairs,
    turned,
    wide,
)
from tests.graphs import BATCH, BIPARTITE, EMPTY, ISOLATED, LOOPS, RANDOM, ZOO, Graph, random
from tests.laws import assert_close, edges_of
from tests.scores import ADDITIVE, CONSTANT, DOT_EDGES, GATV2_EDGES, SCORES, SHAPES, call, leaves_of

weekly = pytest.mark.weekly


# --- The kernels are the reference. ---

# The paper's hidden layers and, in tiles of a head, its last one; of DOT_EDGES: test_any_number_of_features_of_an_edge
LARGER = {ADDITIVE: [(8, 8), (1, 121)], GATV2_EDGES: [(1, 121)]}
WEEKLY = [pytest.param(names, marks=weekly) for names in (*TERMS[2:], WEIGHTED[1])]
FEW = [EMPTY, ISOLATED, LOOPS, BIPARTITE]  # for Triton's interpreter, which takes long


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=weekly)], ids=["", "all sizes"])
@pytest.mark.parametrize("names", [CONSTANT, *SCORES, *TERMS[:2], WEIGHTED[0], WEIGHTED[2], *WEEKLY])
def test_the_kernels_are_the_reference(names: str, whole: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every graph: the output, the attention and every gradient; of some sizes on one graph, if not `whole`."""
    options = {"dropout": 0.3, "negative_slope": 0.1, "return_attention_weights": True}
    if not whole and names != ADDITIVE:
        in_mode(monkeypatch, speed=True)
    for graph in FEW if place.is_triton and not whole else ZOO:
        check(place, graph, names, **options)
        if whole and not place.is_triton:
            check(place, graph, names, 8, 8, torch.float32, **options)
    in_mode(monkeypatch, speed=True)
    for heads, channels in [] if place.is_triton else LARGER.get(names, []):
        check(place, RANDOM, names, heads, channels, torch.float32, **options)


@pytest.mark.parametrize(
    ("heads", "channels"),
    [
        (3, 100),  # more heads than one slab holds, and the last slab is masked
        (5, 7),  # heads and channels both masked, two draws of dropout for a row
        pytest.param(1, 1, marks=weekly),
        pytest.param(8, 8, marks=weekly),  # the paper's hidden layers
        pytest.param(1, 121, marks=weekly),  # PPI's labels
        pytest.param(2, 300, marks=weekly),  # a head wider than a slab: two warps
        pytest.param(70, 4, marks=weekly),
    ],
)
@pytest.mark.parametrize("place", ["triton"], indirect=True)
def test_odd_sizes(heads: int, channels: int, place: Place) -> None:
    for names in (ADDITIVE, GATV2_EDGES, DOT_EDGES):
        check(place, SMALL, names, heads, channels, dropout=0.3)


@pytest.mark.parametrize("names", [GATV2_EDGES, DOT_EDGES])
def test_any_number_of_features_of_an_edge(names: str, place: Place) -> None:
    """The sizes enter several blocks of features and channels in the passes over edges, and slabs of several heads."""
    sizes = [(0, 2, 3), (MANY, 3, 70)] if place.is_triton else [(MANY, 8, 8) if names == DOT_EDGES else (MANY, 3, 5)]
    for features, heads, channels in sizes:
        leaves = leaves_of(SMALL, heads, channels, names, features=features)
        leaves["edge_attr"] = leaves["edge_attr"] / max(features, 1) ** 0.5
        place = place._replace(dtype=torch.float32) if names == DOT_EDGES else place
        compare(place, SMALL, place.to(leaves), direction_of(SMALL, heads, channels), dropout=0.3)


@pytest.mark.parametrize("names", [*SCORES, *WEIGHTED[:1]])
def test_rows_without_an_edge(names: str, place: Place) -> None:
    """Rows of loops that added ones replace have zero gradients."""
    index = torch.cat([SMALL.index[:, SMALL.index[0] != SMALL.index[1]], torch.arange(4).expand(2, -1)], 1)
    index = index[:, torch.randperm(index.size(1), generator=torch.Generator().manual_seed(5))].to(place.device)
    edges = neighbourhoods(index, 7, 6, add_self_loops=True)
    assert edges.num_rows == edges.num_edges + 4
    leaves = place.to(leaves_of(Graph("rows", edges.index, 7, 6), 3, 5, names))
    compare(place, edges, leaves, direction_of(SMALL, 3, 5), dropout=0.3)


# --- Both ways to save what the backward pass needs. ---


@MEMORY
@pytest.mark.parametrize("names", [ADDITIVE, pytest.param(TERMS[0], marks=weekly)])
def test_both_memory_modes(names: str, speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, speed)
    kernels = device.load_kernels("attention.additive", place.device)
    backward = spy(monkeypatch, kernels, "backward")
    graphs = [BIPARTITE] if place.is_triton else [BIPARTITE, BATCH, RANDOM, random(30, 7, 200)]
    for graph in graphs:
        check(place, graph, names, dropout=0.3)
    if names == ADDITIVE:
        check(place, BIPARTITE, names)
    assert len(backward.calls) == len(graphs) + (names == ADDITIVE)
    saved = [args[2:4] for args in backward.calls]
    assert all((out is not None) == speed and len(others) == (3 if speed else 1) for out, others in saved)


@weekly
@pytest.mark.parametrize(("names", "speed"), [(ADDITIVE, True), (ADDITIVE, False), ("x x_dst edge_weight", True)])
def test_more_heads_than_a_vector_holds(names: str, speed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, speed)
    check(NUMBA, BIPARTITE, names, 18, 2)


def test_scores_without_a_gradient_and_a_gradient_of_one_alone(place: Place) -> None:
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    leaves = place.to(leaves_of(BIPARTITE, 3, 5, ADDITIVE))
    truth = answer(leaves, edges, direction, "segment", dropout=0.3)
    for wanted in leaves:
        alone = {name: leaf.clone().requires_grad_(name == wanted) for name, leaf in leaves.items()}
        call(alone, edges, dropout=0.3).backward(direction)
        assert_close(alone[wanted].grad, truth[wanted], wanted)
        assert all(leaf.grad is None for name, leaf in alone.items() if name != wanted)


# --- Rows of several chunks. ---


def star(points: int) -> Graph:
    """Edges from all other nodes to node 0, and back."""
    others = torch.arange(1, points + 1)
    index = torch.cat([torch.stack([others, 0 * others]), torch.stack([0 * others, others])], 1)
    return Graph("star", index, points + 1, points + 1)


def test_rows_are_cut_into_chunks() -> None:
    split = rows.SPLIT
    graph = stairs(split - 1, split, split + 1, 0, 2 * split + 1, 3)
    for side, other in (("dst", graph), ("src", turned(graph))):
        chunks: Any = rows.chunks_of(edges_of(other), side)  # type: ignore[arg-type]
        assert chunks.long.tolist() == [2, 4] and chunks.slots == 6 + 5
        assert np.diff(chunks.bounds).tolist() == [split - 1, split, split, 1, 0, split, split, 1, 3]
        assert chunks.row.tolist() == [0, 1, 2, 2, 3, 4, 4, 4, 5]


@pytest.mark.parametrize("side", ["dst", "src", "both"])
@pytest.mark.parametrize("names", [CONSTANT, *SCORES, *WEIGHTED[:1]])
def test_long_rows(names: str, side: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.is_triton and side == "both":
        pytest.skip("is as dst and src")
    split = split_at(place, monkeypatch)
    # just below, at and above one, two and, for Triton, many chunks; a row with no edges
    graph = stairs(split - 1, split, split + 1, 0, 2 * split, 2 * split + 1, 3, *([21 * split + 5] * place.is_triton))
    graph = {"dst": graph, "src": turned(graph), "both": star(split + 1)}[side]
    merges = spy(monkeypatch, torch, "segment_reduce")
    leaves, direction = place.to(leaves_of(graph, 3, 5, names)), direction_of(graph, 3, 5)
    for speed in modes_of(names):
        in_mode(monkeypatch, speed)
        for p in (0.0, 0.3) if names in FOLDERS and side == "dst" and not place.is_triton else (0.3,):
            compare(place, graph, leaves, direction, "segment", dropout=p)
    assert merges.calls or place.is_triton


def test_a_chunk_may_be_masked_as_a_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_at(place, monkeypatch)
    graph = stairs(2 * split + 1, 2 * split)
    edges, leaves, direction = place.edges(graph), leaves_of(graph, 3, 5, ADDITIVE), direction_of(graph, 3, 5)
    grouped = edges.group(leaves["score_edge"].to(place.device)).clone()
    grouped[:split] = -torch.inf  # the first chunk of row 0
    grouped[2 * split + 1 :] = -torch.inf  # row 1
    leaves = place.to({**leaves, "score_edge": edges.ungroup(grouped)})
    finite = leaves["score_edge"][:, 0].isfinite()
    without = Edges.from_index(graph.index.to(place.device)[:, finite], graph.num_src, graph.num_dst)
    others = wide({**leaves, "score_edge": leaves["score_edge"][finite]})
    truth = answer(others, without, direction.to(place.device), "segment")
    results = answer(leaves, edges, direction.to(place.device))
    assert not results["out"][1].any() and not results["score_edge"][~finite].any()
    assert_same({**results, "score_edge": results["score_edge"][finite]}, truth, "masked")


# --- Scores of the features of both ends. ---


@pytest.mark.parametrize("names", SCORES)
def test_twice_differentiable_with_dropout(names: str) -> None:
    graph = random(4, 3, 9)
    leaves, edges = leaves_of(graph, 3, 5, names), edges_of(graph)

    def run(*values: Tensor) -> Tensor:
        return call(dict(zip(leaves, values, strict=True)), edges, dropout=0.4)

    values = tuple(leaf.requires_grad_() for leaf in leaves.values())
    assert torch.autograd.gradcheck(run, values, fast_mode=True)  # along a random direction
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize("names", FOLDERS)
def test_the_same_bits_for_any_number_of_threads(
    names: str, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    graph = random(400, 300, 9000)
    row = Graph("row", torch.stack([torch.arange(rows.SPLIT + 9) % 400, torch.zeros(rows.SPLIT + 9).long()]), 400, 300)
    column = torch.stack([torch.zeros(rows.SPLIT + 9).long(), torch.arange(rows.SPLIT + 9) % 300])
    graph = Graph("random with a long row", torch.cat([graph.index, row.index, column], 1), 400, 300)
    edges = edges_of(graph)
    assert [rows.chunks_of(edges, side).long.tolist() for side in ("dst", "src")] == [[0], [0]]
    sizes = (1, 121) if names == GATV2_EDGES else (8, 8)
    leaves, direction = leaves_of(graph, *sizes, names, torch.float32, features=MANY), direction_of(graph, *sizes)
    monkeypatch.setattr(rows, "SMALL", 1)
    submits: list[Any] = []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *args: submits.append(args) or submit(*args))
    runs, started = [], []
    for threads in (2, 2, 1, 3):
        torch.set_num_threads(threads)
        submits.clear()
        runs.append(answer(leaves, edges, direction, dropout=0.3))
        started.append(len(submits))
    kernels = {ADDITIVE: 3, GATV2_EDGES: 8, DOT_EDGES: 4}[names]
    assert started == [kernels, kernels, 0, 2 * kernels]  # the caller is a thread too
    if "key" in leaves:  # of one product, which are read where they lie
        both = torch.stack([leaves["x"], leaves["key"]], 1)
        beside = leaves | {"x": both[:, 0], "key": both[:, 1]}
        beside = {name: leaf.detach().requires_grad_() for name, leaf in beside.items()}
        out = call(beside, edges, dropout=0.3)
        grads = torch.autograd.grad(out, [*beside.values()], direction)
        runs.append({"out": out, **dict(zip(beside, grads, strict=True))})
        assert runs[-1]["key"].stride(0) == both.stride(0)
    for again in runs[1:]:
        for name, value in again.items():
            assert torch.equal(value, runs[0][name]), name


def test_one_gpu_is_not_another() -> None:
    with torch._subclasses.FakeTensorMode():
        x, index = torch.empty(5, 3, 4, device="cuda:1"), torch.empty(2, 5, dtype=torch.long, device="cuda:0")
        with pytest.raises(ValueError, match="edge_index is on cuda:0, expected cuda:1, the device of x"):
            attend(x, Additive(), EdgeList(index, 3))


# --- What a tensor may look like. ---


def odd_layouts(leaf: Tensor) -> dict[str, Tensor]:
    """The same numbers, laid out in other ways."""
    double = leaf.new_full((*leaf.shape[:-1], 2 * leaf.size(-1)), torch.nan)
    double[..., ::2] = leaf
    offset = torch.cat([leaf.new_full((3,), torch.nan), leaf.flatten()])[3:].view_as(leaf)
    transposed = leaf.mT.contiguous().mT if leaf.dim() > 1 else leaf.clone()
    return {"strided": double[..., ::2], "transposed": transposed, "offset": offset}


@pytest.mark.parametrize("names", SCORES)
def test_odd_layouts(names: str, place: Place) -> None:
    edges, leaves = place.edges(BIPARTITE), place.to(leaves_of(BIPARTITE, 3, 5, names))
    direction = direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    truth = answer(wide(leaves), edges, direction, "reference", dropout=0.3)
    for layout in ("strided", "transposed", "offset"):
        odd = {name: odd_layouts(leaf)[layout].requires_grad_() for name, leaf in leaves.items()}
        out = call(odd, edges, dropout=0.3)
        out.backward(odd_layouts(direction)[layout])
        assert_same({"out": out.detach()} | {name: leaf.grad for name, leaf in odd.items()}, truth, f"{layout} {names}")


@pytest.mark.parametrize("names", SCORES)
def test_expanded_operands_and_gradients(names: str) -> None:
    edges = edges_of(BIPARTITE)
    leaves = {name: leaf[:1] for name, leaf in leaves_of(BIPARTITE, 3, 5, names).items()}
    rows = {"N_src": 5, "N_dst": 3, "E": 5, "H": 3}
    results = []
    for backend in ("fused", "reference"):
        own = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        expanded = {name: leaf.expand(rows[SHAPES[name][0]], *leaf.shape[1:]) for name, leaf in own.items()}
        out = call(expanded, edges, backend, dropout=0.3)
        out.sum().backward()  # the gradient is one number, expanded
        results.append({"out": out.detach()} | {name: leaf.grad for name, leaf in own.items()})
    assert_same(*results, names)
