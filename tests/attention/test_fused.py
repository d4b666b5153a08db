"""The fused operation: every way through its kernels and what is around them, against the plain backends.

Tests with a `place` run on the CPU kernels and on those of Triton: `-k triton` with TRITON_INTERPRET=1, or on a GPU.
"""

from __future__ import annotations

import inspect
import io
import itertools
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg import GATConv, GATv2Conv, philox
from gat_pyg.attention import Additive, Dot, attend, fused
from gat_pyg.attention.additive import cpu as additive
from gat_pyg.attention.additive import prefers_speed
from gat_pyg.attention.pair import cpu as pair
from gat_pyg.attention.pair import cpu_edges
from gat_pyg.attention.steps import cpu as steps
from gat_pyg.conv.mechanisms import MECHANISMS
from gat_pyg.graph import adjacency
from gat_pyg.graph.adjacency import EdgeList, neighbourhoods
from gat_pyg.graph.edges import Edges
from gat_pyg.graph.memory import elements
from gat_pyg.kernels import device
from gat_pyg.kernels.cpu import rows
from gat_pyg.philox import keep_mask
from tests.attention.comparisons import (
    NUMBA,
    Place,
    answer,
    assert_same,
    check,
    compare,
    direction_of,
    spy,
    stairs,
    turned,
    wide,
)
from tests.graphs import BATCH, BIPARTITE, COMPLETE, EMPTY, ISOLATED, LOOPS, RANDOM, STAR_IN, ZOO, Graph, random
from tests.laws import SIZES, assert_close, edges_of, moved
from tests.scores import (
    ADDITIVE,
    CONSTANT,
    DOT_EDGES,
    GATV2,
    GATV2_EDGES,
    SCORES,
    SHAPES,
    Tensors,
    call,
    leaves_of,
    score_of,
)

PAIRS = [names for names in SCORES if "x_dst" in names]
FOLDERS = [ADDITIVE, GATV2_EDGES, DOT_EDGES]  # a score of each kind of kernels, with all its operands
TERMS = ["x score_src score_dst", "x score_edge", "x score_src", "x score_dst"]  # of the additive score: some of them
WEIGHTED = [f"{names} edge_weight" for names in FOLDERS]
LAYERS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv}
LAYERS |= {name: partial(GATConv, mechanism=name) for name in MECHANISMS if name != "additive"}
every_layer = pytest.mark.parametrize("name", [*(pytest.param(name, marks=[pytest.mark.weekly] * (name == "cosine"))
                                                 for name in LAYERS)])  # fmt: skip
MEMORY = pytest.mark.parametrize("speed", [True, False], ids=["speed", "memory"])
EVERYWHERE = pytest.mark.parametrize("place", ["numba", "triton", "segment"], indirect=True)
weekly = pytest.mark.weekly


def in_mode(monkeypatch: pytest.MonkeyPatch, speed: bool) -> None:
    """Let the additive score save O and O+ for the backward pass, or not."""
    monkeypatch.setattr("gat_pyg.attention.additive.prefers_speed", lambda *_: speed)


def modes_of(names: str) -> tuple[bool, ...]:
    return (True, False) if names.startswith("x score_") else (True,)


# --- The kernels are the reference. ---

# The paper's hidden layers and, in tiles of a head, its last one; of DOT_EDGES: test_any_number_of_features_of_an_edge
LARGER = {ADDITIVE: [(8, 8), (1, 121)], GATV2_EDGES: [(1, 121)]}
MANY = 17  # features of an edge, more than are summed for all heads together
FEW = [EMPTY, ISOLATED, LOOPS, BIPARTITE]  # for Triton's interpreter, which takes long


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=weekly)], ids=["", "all sizes"])
@pytest.mark.parametrize("names", [CONSTANT, *TERMS[:2], *(pytest.param(names, marks=weekly) for names in TERMS[2:]),
                                   *SCORES, *WEIGHTED])  # fmt: skip
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


SMALL = random(7, 6, 25)


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


# --- Dropout. ---


class Counter:
    """The first two words of a counter, as `_philox` reads them from an edge."""

    def __init__(self, word: int) -> None:
        self.word = word

    def __and__(self, low: int) -> Tensor:
        return torch.tensor(self.word & low)

    def __rshift__(self, bits: int) -> Tensor:
        return torch.tensor(self.word)


@pytest.mark.parametrize(
    ("word", "known"),  # of Random123's kat_vectors, philox4x32 with 10 rounds
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_gives_the_known_answers(word: int, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # In use the last word of a counter is always zero, and no edge's number is negative.
    monkeypatch.setattr(torch, "zeros_like", lambda group: torch.full_like(group, word))
    key: Any = torch.tensor(-1 if word else 0)
    edge: Any = Counter(word)
    words = philox._philox(key, edge, torch.tensor(word))
    assert " ".join(f"{int(w):08x}" for w in words) == known


P = 0.3
SEEDS = [torch.tensor(s) for s in (0, 1, 2**62 + 12345)]


def test_one_minus_p_is_kept() -> None:
    for seed in SEEDS:
        for p in (0.001, P, 0.6, 0.999):
            selected = keep_mask(seed, 20_000, 7, p, torch.float64) != 0
            assert abs(selected.double().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / selected.numel()), (seed, p)
    mask = keep_mask(SEEDS[0], 500, 3, P, torch.float64)
    assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 1 / (1 - P)))
    assert (keep_mask(SEEDS[0], 500, 3, 0.0) == 1).all() and not keep_mask(SEEDS[0], 500, 3, 1.0).any()


def test_coefficients_are_dropped_independently() -> None:
    one = keep_mask(SEEDS[0], 40_000, 8, P) != 0
    other = keep_mask(SEEDS[1], 40_000, 8, P) != 0
    pairs = {
        "heads": (one[:, 0], one[:, 1]),
        "edges": (one[:-1].flatten(), one[1:].flatten()),
        "seeds": (one.flatten(), other.flatten()),
        "groups of four": (one[:, :4].flatten(), one[:, 4:].flatten()),
    }
    for between, (first, second) in pairs.items():
        counts = torch.bincount(first.long() * 2 + second.long(), minlength=4).double()
        expected = torch.tensor([P * P, P * (1 - P), P * (1 - P), (1 - P) ** 2]) * counts.sum()
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # of 3 degrees of freedom, at 4 standard deviations (two sides: 6.3e-5, here 2.2e-5)
        assert chi_square < 24.3, between


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
def test_masks_of_many_seeds_are_each_one_alone(heads: int) -> None:
    """Side by side in the heads, and under vmap, nested and of any dimension too: the same bits."""
    seeds = torch.stack(SEEDS)
    alone = torch.stack([keep_mask(seed, 50, heads, P) for seed in SEEDS])  # [S, E, H]
    assert torch.equal(keep_mask(seeds, 50, 3 * heads, P), alone.transpose(0, 1).flatten(1))
    assert torch.equal(keep_mask(seeds[:1], 50, heads, P), alone[0])

    def mapped(seed: Tensor) -> Tensor:
        return keep_mask(seed, 50, heads, P)

    assert torch.equal(torch.vmap(mapped)(seeds), alone)
    grid = torch.stack([seeds, seeds + 7])
    again = torch.stack([torch.stack([mapped(seed) for seed in row]) for row in grid])
    assert torch.equal(torch.vmap(torch.vmap(mapped))(grid), again)
    assert torch.equal(torch.vmap(torch.vmap(mapped), in_dims=1)(grid), again.transpose(0, 1))
    beside = torch.vmap(lambda row: keep_mask(row, 50, 3 * heads, P), in_dims=1)(grid.T)
    assert torch.equal(beside, again.transpose(1, 2).flatten(2))
    assert keep_mask(seeds, 0, 3 * heads, P).shape == (0, 3 * heads)


def ordered(order: str, num_src: int) -> tuple[Graph, Edges]:
    """Each src to each of 5 dst, by edges in an order that needs ids for the places they are put in, or none."""
    num_edges = 5 * num_src
    index = torch.stack([torch.arange(num_edges) % num_src, torch.arange(num_edges) // num_src])
    if order == "grouped":
        edges = Edges.from_csr(torch.arange(0, num_edges + 1, num_src), index[0], num_src)
        assert edges.perm is None
        return Graph(order, index, num_src, 5), edges
    if order == "shuffled":
        index = index[:, torch.randperm(num_edges, generator=torch.Generator().manual_seed(0))]
    return Graph(order, index, num_src, 5), Edges.from_index(index, num_src, 5)


ORDER = pytest.mark.parametrize("order", ["shuffled", "sorted", "grouped"])


@ORDER
def test_the_kernels_mask_is_keep_mask(order: str) -> None:
    """Constant attention over one-hot features shows each edge's coefficient. Four heads are drawn at once."""
    torch.manual_seed(0)
    seed = philox.draw_seed(torch.device("cpu"))
    for dtype, (heads, channels) in [*SIZES.items()][: 1 if order == "grouped" else 2]:
        graph, edges = ordered(order, channels)
        x = torch.eye(channels, dtype=dtype)[:, None].expand(channels, heads, channels)
        for p in (1e-9, 0.5, 1 - 1e-9, 1.0):
            out = call({"x": x}, edges, dropout=p)
            masks = channels * out[graph.index[1], :, graph.index[0]]
            expected = keep_mask(seed, graph.index.size(1), heads, p, torch.float64).to(dtype)
            assert_close(masks, expected, f"{order} {heads} {p}")


@ORDER
@pytest.mark.parametrize("names", [ADDITIVE, *(pytest.param(names, marks=weekly) for names in PAIRS)])
def test_gradients_have_the_mask_of_the_output(names: str, order: str) -> None:
    graph, edges = ordered(order, 8)
    compare(NUMBA, edges, leaves_of(graph, 3, 5, names), direction_of(graph, 3, 5), dropout=0.5)


def test_the_mask_is_of_the_callers_order() -> None:
    """Renamed dst move edges in memory, and no coefficient changes."""
    x = leaves_of(RANDOM, 3, 5, "x")["x"]
    src, dst = RANDOM.index
    new = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    one, renamed = edges_of(RANDOM), Edges.from_index(torch.stack([src, new[dst]]), 40, 40)
    assert one.perm is not None and renamed.perm is not None and not torch.equal(one.perm, renamed.perm)
    assert torch.equal(call({"x": x}, renamed, dropout=0.5)[new], call({"x": x}, one, dropout=0.5))


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


@pytest.mark.parametrize(
    ("names", "speed"),
    [
        (ADDITIVE, True),
        *(pytest.param(*case, marks=weekly) for case in ((ADDITIVE, False), ("x x_dst edge_weight", 1))),
    ],
)
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


def split_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of edges above which a row is several chunks; 8 in Triton's interpreter, which takes long."""
    if not place.is_triton:
        return rows.SPLIT
    from gat_pyg.kernels.gpu import rows as gpu_rows

    if place.device == "cpu":
        monkeypatch.setattr(gpu_rows, "SPLIT", 8)
    return gpu_rows.SPLIT


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
    merges = [] if place.is_triton else [spy(monkeypatch, steps, "_merge"), spy(monkeypatch, rows, "_merge_sums")]
    leaves, direction = place.to(leaves_of(graph, 3, 5, names)), direction_of(graph, 3, 5)
    for speed in modes_of(names):
        in_mode(monkeypatch, speed)
        for p in (0.0, 0.3) if names in FOLDERS and side == "dst" and not place.is_triton else (0.3,):
            compare(place, graph, leaves, direction, "segment", dropout=p)
    assert all(merge.calls for merge in merges)


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


# --- Numbers. ---


@EVERYWHERE
@MEMORY
def test_minus_infinity_masks_an_edge(speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, speed)
    leaves, direction = place.to(leaves_of(STAR_IN, 3, 5, ADDITIVE)), direction_of(STAR_IN, 3, 5)
    leaves["score_edge"][2:] = -torch.inf
    alpha = compare(place, STAR_IN, leaves, direction, return_attention_weights=True)["alpha"]
    assert (alpha[:2] > 0).all() and not alpha[2:].any()
    leaves["score_edge"].fill_(-torch.inf)
    results = answer(leaves, place.edges(STAR_IN), direction.to(place.device), place.backend, dropout=0.3)
    assert not any(value.any() for value in results.values())


@EVERYWHERE
@MEMORY
def test_no_score_overflows(speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, speed)
    sizes = SIZES if speed and not place.is_triton else {place.dtype: (3, 5)}
    for (dtype, (heads, channels)), offset in product(sizes.items(), (1e4, -1e4, 1e30, -1e30)):
        leaves = leaves_of(SMALL, heads, channels, ADDITIVE, dtype)
        leaves["score_src"] += offset
        leaves = {name: leaf.to(place.device) for name, leaf in leaves.items()}
        direction = torch.ones(6, heads, channels, device=place.device, dtype=dtype)
        results = answer(leaves, place.edges(SMALL), direction, place.backend, dropout=0.3)
        assert all(value.isfinite().all() for value in results.values()), (dtype, offset)


@MEMORY
@pytest.mark.parametrize("names", SCORES)
def test_nan_reaches_every_gradient(names: str, speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if speed not in modes_of(names):
        pytest.skip("has one mode")
    in_mode(monkeypatch, speed)
    split = split_at(place, monkeypatch) if place.is_triton else 5
    degrees = torch.tensor([1, 3, 0, 2 * split + 1, 5, split + 1])  # NaN in the first two and the first long row
    num_edges = int(degrees.sum())
    index = torch.stack([torch.arange(num_edges), torch.arange(6).repeat_interleave(degrees)])
    graph = Graph("stars", index, num_edges, 6)
    leaves, direction = place.to(leaves_of(graph, 3, 5, names)), direction_of(graph, 3, 5).to(place.device)
    leaves["score_src" if "score_src" in leaves else "x"][[0, 2, 10]] = torch.nan
    results, truth = (answer(each, place.edges(graph), direction, by, dropout=1e-9) for each, by in
                      ((leaves, "fused"), (wide(leaves), "reference")))  # fmt: skip
    assert truth["out"].isnan().flatten(1).any(1).tolist() == [True, True, False, True, False, False]
    for name, expected in truth.items():
        assert torch.equal(results[name].isnan(), expected.isnan()), name
        assert_close(results[name].nan_to_num(), expected.nan_to_num().to(results[name].dtype), name)


@pytest.mark.parametrize("degree", [2, 12, 40, rows.SPLIT + 1])  # within half a tile, a tile, several, several chunks
def test_a_score_that_is_no_number_is_not_lost(degree: int) -> None:
    edges = Edges.from_index(torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.long)]), degree, 2)
    x, bad = torch.randn(degree, 3, 5).double(), torch.zeros(degree, 3).double()
    others = torch.zeros(2, 3).double(), torch.zeros(degree, 3).double()
    for at in {0, 1, degree // 2, degree - 1}:
        score = bad.clone()
        score[at] = torch.nan
        for fill in (0.0, -torch.inf):  # among numbers, and alone
            scores = torch.full_like(bad, fill) + score
            out = attend(x, Additive(scores, *others), edges, backend="fused")
            assert out[0].isnan().all() and not out[1].any(), (degree, at, fill)
        node = x.clone()
        node[at] = torch.nan
        assert attend(node, Dot(torch.ones(2, 3, 5).double()), edges, backend="fused", dropout=1e-9)[0].isnan().all()


@pytest.mark.parametrize("names", [ADDITIVE, pytest.param(GATV2, marks=weekly)])
def test_no_heads_and_no_channels(names: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, speed=True)
    for heads, channels in ((0, 121), (1, 0)):
        check(place, BIPARTITE, names, heads, channels, torch.float32, dropout=0.3)


HALVES = [
    pytest.param(
        place, names, dtype, marks=[weekly] * (dtype == torch.float16 or (place == "numba" and names != ADDITIVE))
    )
    for place, names, dtype in product(("numba", "triton", "segment"), SCORES, (torch.bfloat16, torch.float16))
]


@pytest.mark.parametrize(("place", "names", "dtype"), HALVES, indirect=["place"], ids=str)
def test_half_precision_is_summed_in_float32(
    names: str, dtype: torch.dtype, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the kernels read bfloat16 as it is."""
    read, graph = set(), stairs(40, 3, 1025)
    monkeypatch.setattr(rows, "elements", lambda tensor: read.add((tensor.dtype, tensor.numel())) or elements(tensor))
    leaves = place._replace(dtype=dtype).to(leaves_of(graph, 8, 8, names))
    direction = direction_of(graph, 8, 8).to(place.device, dtype)
    results = answer(leaves, place.edges(graph), direction, place.backend, dropout=0.3)
    truth = answer(wide(leaves), place.edges(graph), direction, "segment", dropout=0.3)
    for name, expected in truth.items():
        assert results[name].dtype == dtype
        error = (results[name].double() - expected).norm() / expected.norm()
        assert error < torch.finfo(dtype).eps / 2, f"{name}: {error:.2e}"  # rounded once, at the end
    if place.backend == "fused" and not place.is_triton:
        assert ((dtype, leaves["x"].numel()) in read) is (dtype == torch.bfloat16)


DOUBLE = [(torch.float32, torch.float64, torch.float64), (torch.float64, torch.float32, torch.float64)]
SINGLE = [(torch.bfloat16, torch.float32, torch.float32), (torch.bfloat16, torch.float16, torch.float32)]  # autocast


@pytest.mark.parametrize("names", SCORES)
@pytest.mark.parametrize(
    ("place", "dtypes"),
    [("numba", DOUBLE), pytest.param("numba", SINGLE, marks=weekly), ("triton", SINGLE)],
    indirect=["place"],
)
def test_mixed_dtypes(names: str, dtypes: list[tuple[torch.dtype, ...]], place: Place) -> None:
    for of_x, of_others, of_out in dtypes:
        sizes = SIZES[of_out]
        leaves = leaves_of(BIPARTITE, *sizes, names)
        leaves = {name: leaf.to(place.device, of_x if name == "x" else of_others) for name, leaf in leaves.items()}
        direction = direction_of(BIPARTITE, *sizes).to(of_out)
        results = compare(place, BIPARTITE, leaves, direction, dropout=0.3)
        assert results["out"].dtype == of_out
        assert all(results[name].dtype == leaf.dtype for name, leaf in leaves.items())


@pytest.mark.parametrize("names", [ADDITIVE, pytest.param(GATV2, marks=weekly)])  # each is compiled for these ids alone
def test_wide_ids(names: str, place: Place) -> None:
    narrow = place.edges(RANDOM)
    ids = {name: getattr(narrow, name).long() for name in ("index", "src", "dst", "perm")}
    with_wide = replace(narrow, **ids)
    assert narrow.src.dtype == torch.int32 and with_wide.transpose[2].dtype == torch.int64
    leaves, direction = place.to(leaves_of(RANDOM, 3, 5, names)), direction_of(RANDOM, 3, 5).to(place.device)
    first, *others = (answer(leaves, edges, direction, dropout=0.3) for edges in (narrow, narrow, with_wide))
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())


# --- Offsets beyond 2^31. ---

BY_NODE = {"x", "a", "scores", "s", "d", "x_dst", "grad", "out", "out_plus", "lse", "mass_plus", "stats", "delta"}
BY_NODE |= {
    "grad_key",
    "key",
    "p",
    "out_u",
    "grad_out_u",
    "grad_p",
    "grad_x",
    "grad_s",
    "grad_d",
    "grad_dst",
    "sums",
}
BY_ID = {"src", "dst", "row", "slot"}


def arrays_of(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays in an argument of a kernel, by name."""
    if isinstance(value, np.ndarray):
        yield name.rstrip("_"), value
    elif name == "chunks":
        yield from zip(("bounds", "row", "slot"), value, strict=True)


def replaced(value: Any, name: str, arrays: Iterator[np.ndarray]) -> Any:
    """The argument with other arrays in it, in the order of `arrays_of`."""
    if name == "chunks":
        return tuple(itertools.islice(arrays, len(value)))
    return next(arrays) if isinstance(value, np.ndarray) else value


def far(values: np.ndarray, rows: int, first: int) -> np.ndarray:
    """The same rows, from `first` on, of an array whose other rows are never touched and cost no memory."""
    width = values.size // rows
    size = (first + rows) * width
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        whole = np.frombuffer(mmap.mmap(-1, size * values.itemsize, flags=flags), values.dtype, size)
    except OSError as error:
        pytest.skip(f"no room for addresses: {error}")
    whole[first * width :] = values
    return whole


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE") or sys.maxsize < 2**33, reason="needs mmap of 64 bits")
@pytest.mark.parametrize(
    ("names", "speed"),
    [
        *((names, True) for names in FOLDERS),
        *(pytest.param(*case, marks=weekly) for case in ((ADDITIVE, False), (GATV2, True), ("x x_dst", True))),
    ],
)
def test_offsets_pass_2_to_the_31(names: str, speed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel again with the nodes renamed to a place where row times width needs more than 31 bits."""
    graph, channels, first = COMPLETE, (1 << 16) + 5, 1 << 15  # whole tiles, and a part of one
    assert first * channels > 2**31
    in_mode(monkeypatch, speed)
    run, seen = rows.run, []

    def run_twice(kernel: Any, dtype: Any, job: Any, *passed: Any) -> None:
        args = [elements(value) if isinstance(value, torch.Tensor) else value for value in passed]
        named = list(inspect.signature(kernel.py_func).parameters)[1:]
        near = [array for name, value in zip(named, args, strict=True) for array in arrays_of(value, name)]
        start = {additive._dense: first, steps._head_dots: first, pair._finish: first // pair.BLOCK}.get(kernel, 0)
        there = [
            far(value, graph.num_src, first)
            if name in BY_NODE and value.size
            else far(value, 1, start)
            if name == "blocks"
            else value + value.dtype.type(first)
            if name in BY_ID
            else value
            for name, value in near
        ]
        arrays = iter(there)
        moved = [replaced(value, name, arrays) for name, value in zip(named, args, strict=True)]
        if "rows" in named:
            moved[named.index("rows")] += first
        run(kernel, dtype, job, *args)
        kernel((start, start + job.bounds.size - 1, 0, 1, rows._buffers(job, dtype)), *moved)
        for (name, here), far_away in zip(near, there, strict=True):
            if name not in BY_ID:
                assert np.array_equal(far_away[far_away.size - here.size :], here, equal_nan=True), (
                    f"{kernel.__name__} {name}"
                )
        assert any(array.size > 2**31 for array in there)
        seen.append(kernel.__name__)

    def run_near(kernel: Any, *rest: Any) -> None:
        # Their arrays are [N, H] and [E, H], and they index by NumPy's own int64.
        near = additive._normalise, additive._collect, cpu_edges._backward_edges, cpu_edges._backward_lin
        (run if kernel in near else run_twice)(kernel, *rest)

    for module in (rows, additive, pair, cpu_edges, steps):
        monkeypatch.setattr(module, "run", run_near)
    leaves = leaves_of(graph, 1, channels, names, torch.float32)
    edges = edges_of(graph)
    assert edges.src.dtype == torch.int32  # the ids themselves are short
    answer(leaves, edges, torch.ones(5, 1, channels), dropout=0.3)
    if names == ADDITIVE:
        assert seen == ["_forward", "_dense", "_backward"]
    else:
        blocks = ["_finish"] * 2 * ("att" in names.split())
        assert seen == ["_forward", "_head_dots", "_backward_dst", "_backward_src", *blocks]


# --- Scores of the features of both ends. ---


@pytest.mark.parametrize("names", [GATV2_EDGES, DOT_EDGES])
def test_pairs_of_one_x(names: str) -> None:
    edges, leaves = edges_of(RANDOM), leaves_of(RANDOM, 3, 5, names)
    grads = []
    for backend in ("fused", "reference"):
        own = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        out = call({**own, "x_dst": own["x"]}, edges, backend)
        out.square().sum().backward()
        grads.append({"out": out.detach()} | {name: leaf.grad for name, leaf in own.items() if name != "x_dst"})
    assert_same(*grads, names)


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


# --- torch.func. ---


@pytest.mark.parametrize("backend", ["fused", "segment"])
@pytest.mark.parametrize("names", FOLDERS)
def test_vmap_and_grad(names: str, backend: str, place: Place) -> None:
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    batch = [{k: v + n / 2 for k, v in place.to(leaves_of(BIPARTITE, 3, 5, names)).items()} for n in range(3)]
    stacked = {name: torch.stack([leaves[name] for leaves in batch]) for name in batch[0]}

    def loss(leaves: Tensors) -> Tensor:
        out = call(leaves, edges, backend)
        return (out * direction).sum()

    truths = [answer(leaves, edges, direction, "segment") for leaves in batch]
    out = torch.vmap(lambda leaves: call(leaves, edges, backend), randomness="different")(stacked)
    *_, last = stacked
    in_dims = {name: 0 if name == last else None for name in stacked}
    shared = {name: stacked[name] if name == last else leaf for name, leaf in batch[0].items()}
    mapped = torch.vmap(lambda leaves: call(leaves, edges, backend), (in_dims,), randomness="different")(shared)
    assert_close(mapped[2], call({**batch[0], last: batch[2][last]}, edges, backend), f"{names} {last} alone")
    grads = torch.vmap(torch.func.grad(loss), randomness="different")(stacked)
    for n, truth in enumerate(truths):
        alone = torch.func.grad(loss)(batch[n])
        assert_close(out[n], truth["out"], f"{names} {n}")
        for name, grad in alone.items():
            assert_close(grad, truth[name], f"{names} {n} {name} alone")
            assert_close(grads[name][n], truth[name], f"{names} {n} {name}")


@pytest.mark.parametrize("names", [CONSTANT, *SCORES])
@MEMORY
@EVERYWHERE
def test_a_stack_is_each_of_its_models_alone(
    names: str, speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and every gradient, with the dropout that follows from each model's own key and probability."""
    in_mode(monkeypatch, speed)
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    leaves = place.to(leaves_of(BIPARTITE, 3, 5, names))
    stack = {k: torch.stack([v, v.flip(0), 2 * v]).requires_grad_() for k, v in leaves.items()}
    keys = torch.tensor([3, 2**40, -5], device=place.device)
    p = torch.tensor([0.5, 0.0, 0.6], dtype=torch.float64, device=place.device)

    def run(leaves: Tensors, key: Tensor, p: float | Tensor) -> Tensor:
        with philox.keyed(key):
            return call(leaves, edges, place.backend, dropout=p)

    together = torch.vmap(run)(stack, keys, p)
    together.backward(direction.expand_as(together))
    for m, key in enumerate(keys):
        own = {name: leaf.detach()[m].clone().requires_grad_() for name, leaf in stack.items()}
        alone = run(own, key, p[m])
        alone.backward(direction)
        assert_close(together[m], alone, f"{names} {m}")
        for name, leaf in own.items():
            assert leaf.grad is not None and stack[name].grad is not None
            assert_close(stack[name].grad[m], leaf.grad, f"{names} {m} {name}")


@pytest.mark.parametrize("names", FOLDERS)
def test_stacks_of_stacks(names: str, place: Place) -> None:
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    leaves = place.to(leaves_of(BIPARTITE, 3, 5, names))
    grid = {k: torch.stack([v, v.flip(0), 2 * v, 3 * v, -v, v + 1]) for k, v in leaves.items()}

    def grads(leaves: Tensors) -> Tensors:
        def loss(leaves: Tensors) -> Tensor:
            out = call(leaves, edges)
            return (out * direction).sum()

        return torch.func.grad(loss)(leaves)

    flat = torch.vmap(grads)(grid)
    nested = torch.vmap(torch.vmap(grads), in_dims=1)({k: v.unflatten(0, (3, 2)) for k, v in grid.items()})
    for name, value in flat.items():
        assert_close(nested[name].transpose(0, 1).flatten(0, 1), value, f"{names} {name}")


def test_vmap_gives_each_its_own_mask(place: Place) -> None:
    edges, exact = place.edges(COMPLETE), {"device": place.device, "dtype": place.dtype}
    x = torch.eye(5, **exact)[:, None].repeat(1, 3, 1)  # shows each edge's coefficient
    weight = torch.randn(4, 5, 3, 5, **exact)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(x, Additive(), edges, dropout=0.5, backend="fused")
        return (out * weight).sum(), out

    torch.manual_seed(0)
    grads, outs = torch.vmap(torch.func.grad(run, has_aux=True), randomness="different")(x.expand(4, 5, 3, 5), weight)
    masks = 5 * outs != 0
    n = masks[0].numel()
    assert all(abs(mask.double().mean() - 0.5) < 4 * math.sqrt(0.25 / n) for mask in masks)
    for one in range(4):
        for other in range(one):
            agree = (masks[one] == masks[other]).double().mean()
            assert abs(agree - 0.5) < 4 * math.sqrt(0.25 / n), (one, other)
    # the backward pass has the masks of the forward pass: the output is linear in x
    assert_close((grads * x).sum((1, 2, 3)), (outs * weight).sum((1, 2, 3)))
    _, same = torch.vmap(run, randomness="same")(x.expand(4, 5, 3, 5), weight)
    assert (same == same[0]).all() and (same == 0).any()  # one seed, one mask
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(run)(x.expand(4, 5, 3, 5), weight)


def test_the_second_derivative_has_the_same_masks_under_vmap() -> None:
    edges, leaves = edges_of(BIPARTITE), leaves_of(BIPARTITE, 3, 5, ADDITIVE)
    direction = direction_of(BIPARTITE, 3, 5)
    edges.wide, edges.transpose  # noqa: B018  # known before, see test_nothing_of_a_transform_is_remembered
    scores = torch.stack([leaves["score_src"], -leaves["score_src"], 2 * leaves["score_src"]])
    step = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def slope(s: Tensor) -> Tensor:
        def loss(s: Tensor) -> Tensor:
            score = Additive(s, leaves["score_dst"], leaves["score_edge"])
            return (attend(leaves["x"], score, edges, dropout=0.5, backend="fused") * direction).sum()

        return torch.func.grad(loss)(s)

    def slopes(s: Tensor) -> Tensor:
        torch.manual_seed(0)
        return torch.vmap(slope, randomness="different")(s)

    torch.manual_seed(0)
    second = torch.vmap(lambda s, v: torch.func.grad(lambda s: (slope(s) * v).sum())(s), randomness="different")(
        scores, step
    )  # the Hessian is symmetric: this is H v
    eps = 1e-6
    expected = (slopes(scores + eps * step) - slopes(scores - eps * step)) / (2 * eps)
    # a central difference is exact to eps^2 and to rounding over eps: seven figures
    assert torch.allclose(second, expected, rtol=1e-6, atol=1e-7), (second - expected).abs().max()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("names", FOLDERS)
def test_second_derivatives_of_a_stack_are_those_of_segment(names: str, dropout_p: float, place: Place) -> None:
    edges, leaves = place.edges(BIPARTITE), place.to(leaves_of(BIPARTITE, 3, 5, names))
    edges.wide, edges.transpose  # noqa: B018  # known before, see test_nothing_of_a_transform_is_remembered
    stack = {k: torch.stack([v, v.flip(0), v / 2]) for k, v in leaves.items()}

    def slope(backend: str) -> Callable[[Tensors], Tensor]:
        def loss(leaves: Tensors) -> Tensor:
            return call(leaves, edges, backend, dropout=dropout_p).square().sum()

        def size(leaves: Tensors) -> Tensor:
            return sum(grad.square().sum() for grad in torch.func.grad(loss)(leaves).values())

        return torch.func.grad(size)

    measured, truth = (torch.vmap(slope(b), randomness="different")(stack) for b in ("fused", "segment"))
    for name, value in measured.items():
        scale = truth[name].abs().max()  # of many products
        assert_close(value / scale, truth[name] / scale, f"{names} {name}")


@pytest.mark.parametrize("names", [ADDITIVE, GATV2])
def test_a_jacobian_is_of_one_forward_pass(names: str, place: Place) -> None:
    """Only the gradient of the output is a batch: there is one mask, of the one forward pass."""
    leaves, edges = place.to(leaves_of(BIPARTITE, 3, 5, names)), place.edges(BIPARTITE)
    fused_one, truth = (
        torch.func.jacrev(lambda x, b=b: call({**leaves, "x": x}, edges, b, dropout=0.5))(leaves["x"])
        for b in ("fused", "segment")
    )
    assert_close(fused_one, truth, names)


@pytest.mark.parametrize("backend", ["fused", "segment"])
@pytest.mark.parametrize("names", [ADDITIVE, GATV2_EDGES])
def test_nothing_of_a_transform_is_remembered(names: str, backend: str) -> None:
    """The caches of Edges are filled on first use, which may be within a derivative of a derivative."""
    leaves, direction = leaves_of(BIPARTITE, 3, 5, names), direction_of(BIPARTITE, 3, 5)

    def by_autograd(edges: Edges) -> Tensor:
        x = leaves["x"].clone().requires_grad_()
        out = call({**leaves, "x": x}, edges, backend)
        (grad,) = torch.autograd.grad((out * direction).sum() + out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    def by_func(edges: Edges) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            out = call({**leaves, "x": x}, edges, backend)
            return (out * direction).sum() + out.square().sum()

        return torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(leaves["x"])

    answers = []
    for twice in (by_autograd, by_func):
        edges = edges_of(BIPARTITE)
        answers += [twice(edges), twice(edges)]
    for measured in answers[1:]:
        assert_close(measured, answers[0])


@every_layer
def test_nothing_of_a_transform_is_remembered_of_a_graph(name: str) -> None:
    layer, x = LAYERS[name](5, 5, heads=3).double(), torch.randn(40, 5).double()
    index = RANDOM.index.clone()

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x, index).square().sum())(x)

    first, again = (torch.func.grad(lambda x: slope(x).square().sum())(x) for _ in range(2))
    assert torch.equal(first, again)


def test_vmap_over_layers(place: Place) -> None:
    layers = [GATConv(5, 5, heads=3).to(place.device, place.dtype) for _ in range(3)]
    x, index = torch.randn(BATCH.num_src, 5).to(place.device, place.dtype), BATCH.index.to(place.device)
    params, buffers = torch.func.stack_module_state(layers)
    base = GATConv(5, 5, heads=3).to(place.device, place.dtype)

    def run(params: Tensors, buffers: Tensors) -> Tensor:
        return torch.func.functional_call(base, (params, buffers), (x, index))

    outs = torch.vmap(run)(params, buffers)
    grads = torch.vmap(torch.func.grad(lambda p, b: run(p, b).square().sum()))(params, buffers)
    for n, layer in enumerate(layers):
        out = layer(x, index)
        assert_close(outs[n], out, f"layer {n}")
        out.square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            scale = parameter.grad.abs().max()  # of sums over all nodes
            assert_close(grads[name][n] / scale, parameter.grad / scale, f"layer {n} {name}")


# --- Where the kernels are not available. ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"x": torch.complex64},
            "an operand has dtype torch.complex64, the kernels support torch.float32, torch.float64",
        ),
        ({"x": torch.int64}, "an operand has dtype torch.int64"),
        ({"score_src": torch.complex128}, "dtype torch.complex128"),
        ({"score_edge": torch.int32}, "dtype torch.int32"),
    ],
)
def test_what_the_kernels_do_not_know(changes: dict[str, torch.dtype], reason: str) -> None:
    leaves = leaves_of(BIPARTITE, 3, 4, ADDITIVE)
    leaves |= {name: leaves[name].to(dtype) for name, dtype in changes.items()}
    assert reason in str(device.unsupported_reason(*leaves.values()))
    with pytest.raises(ValueError, match=f"backend='fused' is not available here: .*{reason}.*backend='auto'"):
        call(leaves, edges_of(BIPARTITE))


def test_a_device_without_kernels() -> None:
    x = torch.empty(5, 3, 4, device="meta")
    reason = str(device.unsupported_reason(x))
    assert "x is on meta" in reason and "there are kernels for cpu and cuda" in reason
    with pytest.raises(ValueError, match=f"backend='fused' is not available here: {reason}"):
        attend(x, Additive(), moved(edges_of(BIPARTITE), "meta"), backend="fused")


@pytest.mark.parametrize("names", SCORES)
def test_without_numba(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, leaves, direction = edges_of(BIPARTITE), leaves_of(BIPARTITE, 3, 5, names), direction_of(BIPARTITE, 3, 5)
    truth = answer(leaves, edges, direction, "auto", dropout=0.3)
    monkeypatch.setitem(sys.modules, "numba", None)  # as where it is not installed
    for module in ("rows", "cache"):
        monkeypatch.delitem(sys.modules, f"gat_pyg.kernels.cpu.{module}")
    monkeypatch.setattr(device, "REASONS", {})
    monkeypatch.setattr(fused, "_forward", None)  # would fail
    assert_same(answer(leaves, edges, direction, "auto", dropout=0.3), truth, names)
    with pytest.raises(ValueError, match="is not available here: .*numba"):
        call(leaves, edges)


# --- Graphs that change, processes and threads. ---


@every_layer
def test_a_graph_changed_in_place(name: str) -> None:
    layer, x = LAYERS[name](5, 5, heads=3, backend="fused").double(), torch.randn(40, 5).double()
    index = RANDOM.index.clone()
    before = layer(x, index)
    index[0] = index[0].flip(0)
    after = layer(x, index)
    assert not torch.equal(after, before)
    assert torch.equal(after, layer(x, index.clone()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(rows, "SMALL", 1)
    leaves, edges = leaves_of(RANDOM, 8, 8, ADDITIVE, torch.float32), edges_of(RANDOM)
    direction = direction_of(RANDOM, 8, 8)
    truth = answer(leaves, edges, direction, dropout=0.3)
    assert rows._POOL  # the parent's threads, of which the child has none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process of several threads is forked
        child = os.fork()
    if child == 0:
        status = 1
        try:
            measured = answer(leaves, edges, direction, dropout=0.3)
            status = 0 if rows._POOL and all(torch.equal(measured[k], truth[k]) for k in truth) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(answer(leaves, edges, direction, dropout=0.3)["x"], truth["x"])  # the parent goes on


def test_two_callers_at_once(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(rows, "SMALL", 1)
    graph = random(300, 300, 3000)
    cases = [(leaves_of(graph, 3, 5, names), names) for names in (ADDITIVE, GATV2_EDGES)]
    direction = direction_of(graph, 3, 5)
    truths = [answer(leaves, edges_of(graph), direction, "segment") for leaves, _ in cases]
    shared, measured, start = edges_of(graph), [[], []], threading.Barrier(2)

    def caller(n: int) -> None:
        start.wait()
        for _ in range(10):
            measured[n].append(answer(cases[n][0], shared, direction))

    callers = [threading.Thread(target=caller, args=(n,)) for n in range(2)]
    for one in callers:
        one.start()
    for one in callers:
        one.join(60)
        assert not one.is_alive()
    for n in range(2):
        assert len(measured[n]) == 10
        for again in measured[n]:
            assert_same(again, truths[n], cases[n][1])


# --- Compilers. ---


class Net(nn.Module):
    def __init__(self, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = LAYERS[name](5, 5, heads=3, dropout=dropout)
        self.second = LAYERS[name](15, 5, heads=3, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def operators(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if str(node.target).startswith("gat_pyg")]


def results(model: Callable[..., Tensor], net: nn.Module, x: Tensor, index: Tensor) -> Tensors:
    torch.manual_seed(0)
    net.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x, index)
    out.sin().sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in net.named_parameters()}


@every_layer
def test_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(operators(module))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    net, x, index = Net(name, dropout=0.5).double(), torch.randn(40, 5).double(), RANDOM.index.clone()
    compiled = torch.compile(net, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    measured = results(compiled, net, x, index)
    assert seen == [["gat_pyg.attend.default"] * 2, ["gat_pyg.attend_backward.default"] * 2]
    assert_same(measured, results(net, net, x, index), name)
    built = spy(monkeypatch, adjacency, "get_result")  # called as a structure is built
    for _ in range(3):
        assert torch.equal(results(compiled, net, x, index)["x"], measured["x"])
    assert not built.calls
    new = index.clone()
    for _ in range(3):
        results(compiled, net, x, new)
    assert len(built.calls) == 2  # with loops and without
    new[0] = new[0].flip(0)
    assert_same(results(compiled, net, x, new), results(net, net, x, new.clone()), "changed in place")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.10 as it loads
@every_layer
def test_exported(name: str) -> None:
    net, x, index = Net(name).eval().double(), torch.randn(40, 5).double(), RANDOM.index
    net.first.backend = net.second.backend = "fused"
    program = torch.export.export(net, (x, index))
    assert operators(program.graph_module) == ["gat_pyg.attend.default"] * 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_close(torch.export.load(file).module()(x, index), net(x, index))


def test_the_kernels_for_gpus_refuse_float64() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 2, 4, device="cuda")
        assert device.unsupported_reason(x, x.double()) == (
            "the CUDA kernels accumulate in float32 and do not support float64"
        )


def test_the_mode_on_a_gpu_follows_the_edges_per_row() -> None:
    """O and O+ are read where N H C elements have less than 6.7 bytes for each edge: 268 for 40. They are float32."""
    edges = Edges.from_index(torch.zeros(2, 40, dtype=torch.int64), 1, 1)
    for dtype in (torch.float32, torch.bfloat16):
        for channels, speed in ((64, True), (68, False)):
            assert prefers_speed(torch.empty(1, 1, channels, dtype=dtype, device="meta"), edges) is speed


def test_a_cuda_graph_does_not_hold_the_operators() -> None:
    for operator in (torch.ops.gat_pyg.attend, torch.ops.gat_pyg.attend_backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, in torch 2.14
@pytest.mark.parametrize(("names", "p"), [*((names, 0.5) for names in (CONSTANT, *FOLDERS)), (DOT_EDGES, 0.0)])
def test_the_operators_are_what_torch_expects(names: str, p: float) -> None:
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(BIPARTITE, 3, 5, names).items()}
    score, tensors = score_of(leaves), [*leaves.values()]
    present = [True, False, *(operand is not None for operand in score.operands)]
    draw = (torch.tensor(7), torch.tensor(p) if names == CONSTANT else None) if p else (None, None)
    rest = (present, *draw, BIPARTITE.index, 3, False, "source_to_target", type(score).__name__, [p, *score.values])
    for speed in (True, False) if score.saved else (True,):
        dropping = (torch.tensor(8), 0.5) if p else (None, 0.0)
        args = (tensors, *rest, speed, *dropping, p > 0)
        measured = torch.library.opcheck(torch.ops.gat_pyg.attend.default, args)
        assert set(measured.values()) == {"SUCCESS"}, measured
        results = [t.detach() for t in torch.ops.gat_pyg.attend(*args)]
        saved = results[0 if speed else 1 : len(results) - (p > 0)]  # as `_save_for_backward`
        detached = [t.detach() for t in tensors]
        for needs in {(True,) * len(tensors), (True,) * (len(tensors) - 1) + (False,)}:
            torch.library.opcheck(
                torch.ops.gat_pyg.attend_backward.default,
                (torch.ones_like(results[0]), detached, saved, list(needs), *rest, speed, *dropping),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", pytest.param("dot", marks=pytest.mark.weekly)])
def test_derivatives_in_batches(name: str) -> None:
    """Of every argument, first and second, by the older vmap of `torch.autograd`."""
    net, x, index = Net(name).double(), torch.randn(40, 5).double(), RANDOM.index
    names = [each for each, _ in net.named_parameters()]

    def loss(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x, index)).sin().sum(0)

    leaves = x, *(each.detach() for each in net.parameters())
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for measured, exact in zip(jacobian(loss, leaves, vectorize=True), jacobian(loss, leaves), strict=True):
        torch.testing.assert_close(measured, exact)
    bias = leaves[-1]

    def of_last(value: Tensor) -> Tensor:
        return loss(*leaves[:-1], value).square().sum()

    torch.testing.assert_close(hessian(of_last, bias, vectorize=True), hessian(of_last, bias))
