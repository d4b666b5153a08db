"""Numbers that are large, missing, narrow or many: infinities, NaN, half precision, ids and offsets beyond 2^31."""

from __future__ import annotations

import inspect
import itertools
import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg.attention import Additive, Dot, attend
from gat_pyg.attention.additive import cpu as additive
from gat_pyg.attention.pair import cpu as pair
from gat_pyg.attention.pair import cpu_edges
from gat_pyg.attention.steps import cpu as steps
from gat_pyg.graph.edges import Edges
from gat_pyg.graph.memory import elements
from gat_pyg.kernels.cpu import rows
from tests.attention.comparisons import (
    EVERYWHERE,
    MEMORY,
    SMALL,
    Place,
    answer,
    check,
    compare,
    direction_of,
    in_mode,
    modes_of,
    split_at,
    stairs,
    wide,
)
from tests.attention.conftest import INTERPRETED
from tests.graphs import BIPARTITE, COMPLETE, RANDOM, STAR_IN, Graph
from tests.laws import SIZES, assert_close, edges_of
from tests.scores import ADDITIVE, DOT_EDGES, GATV2, GATV2_EDGES, SCORES, leaves_of

weekly = pytest.mark.weekly


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


@pytest.mark.parametrize(("names", "speed"), [(names, speed) for names in SCORES for speed in modes_of(names)])
def test_nan_reaches_every_gradient(names: str, speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """On a CPU, the kernels read bfloat16 as it is; there are more heads than a vector holds."""
    read, graph = set(), stairs(40, 3, 257 if INTERPRETED else 1025)
    sizes = (18, 2) if place.backend == "fused" and not place.is_triton else (8, 8)
    monkeypatch.setattr(rows, "elements", lambda tensor: read.add((tensor.dtype, tensor.numel())) or elements(tensor))
    leaves = place._replace(dtype=dtype).to(leaves_of(graph, *sizes, names))
    direction = direction_of(graph, *sizes).to(place.device, dtype)
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
    graph = BIPARTITE if INTERPRETED else RANDOM
    narrow = place.edges(graph)
    ids = {name: getattr(narrow, name).long() for name in ("index", "src", "dst", "perm")}
    with_wide = replace(narrow, **ids)
    assert narrow.src.dtype == torch.int32 and with_wide.transpose[2].dtype == torch.int64
    leaves, direction = place.to(leaves_of(graph, 3, 5, names)), direction_of(graph, 3, 5).to(place.device)
    first, *others = (answer(leaves, edges, direction, dropout=0.3) for edges in (narrow, narrow, with_wide))
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())


# --- Offsets beyond 2^31. ---

BY_NODE = {"x", "a", "scores", "s", "d", "x_dst", "grad", "out", "out_plus", "lse", "mass_plus", "stats", "delta"}
BY_NODE |= {"grad_key", "key", "p", "out_u", "grad_out_u", "grad_p", "grad_x", "grad_s", "grad_d", "grad_dst", "sums"}
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
        *((names, True) for names in (ADDITIVE, GATV2_EDGES)),
        *(pytest.param(*case, marks=weekly) for case in ((ADDITIVE, False), (GATV2, True), (DOT_EDGES, True))),
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
