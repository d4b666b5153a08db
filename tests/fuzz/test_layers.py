"""Random graphs, options and id dtypes: the kernels against the reference in float64, the layers against PyG's.

An ordinary run checks a few cases, the same every time; `nox -s fuzz -- CASES SEED` checks as many as requested. The
simplest failing case is printed: `check_operation(CASE, Errors())` or `check(CASE)` runs it again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg.attention import attend
from gat_pyg.conv import autograd_node, few
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels.cpu import rows
from gat_pyg.kernels.device import load_kernels
from tests.conv.test_draws import LAYERS, Draw, check
from tests.graphs import Graph
from tests.laws import TOLERANCE
from tests.scores import CONSTANT, SCORES, SHAPES, score_of

LONG = "FUZZ_CASES" in os.environ
FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "20")),
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# Kernels are compiled for each (H, C, dtype): those of the other tests, and in an ordinary run one.
SIZES = [
    (3, 5, torch.float64),
    (3, 5, torch.float32),
    (8, 8, torch.float32),
    (1, 121, torch.float32),
    (3, 5, torch.bfloat16),
    (3, 5, torch.float16),
][: None if LONG else 1]
KINDS = ["any", "into one", "out of one", "hubs", "few pairs", "loops"]
IDS = [torch.int64, torch.int32, torch.int16, torch.uint8]
MOST = [rows.SPLIT + more for more in (-1, 0, 1, rows.SPLIT + 1)] + [3100]  # edges of rows in one chunk and in several


@dataclass(frozen=True)
class RandomGraph:
    kind: str
    num_src: int
    num_dst: int
    num_edges: int
    ids: torch.dtype
    view: bool  # the edge list is a transposed view
    seed: int

    def index(self) -> Tensor:
        """`[2, E]`, src and dst."""
        generator = np.random.default_rng(self.seed)
        edges = self.num_edges if self.num_src and self.num_dst else 0
        src, dst = (generator.integers(max(n, 1), size=edges) for n in (self.num_src, self.num_dst))
        if self.kind == "into one":
            dst[:] = dst[:1]
        elif self.kind == "out of one":
            src[:] = src[:1]
        elif self.kind == "hubs":
            dst = (self.num_dst * generator.random(edges) ** 4).astype(int)
        elif self.kind == "few pairs":
            src, dst = (ids[generator.integers(3, size=edges) % max(edges, 1)] for ids in (src, dst))
        elif self.kind == "loops":
            dst = np.where(generator.random(edges) < 0.5, src % max(self.num_dst, 1), dst)
        index = torch.from_numpy(np.stack([src, dst])).to(self.ids)
        return index.t().contiguous().t() if self.view else index


@st.composite
def graphs(draw: Any, ids: list[torch.dtype] = IDS) -> RandomGraph:
    num_src = draw(st.integers(0, 40))
    return RandomGraph(
        kind=draw(st.sampled_from(KINDS)),
        num_src=num_src,
        num_dst=num_src if draw(st.booleans()) else draw(st.integers(0, 40)),
        num_edges=draw(st.one_of(st.integers(0, 10), st.integers(0, 200), st.sampled_from(MOST))),
        ids=draw(st.sampled_from(ids)),
        view=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@dataclass
class Errors:
    """Compares answers, and remembers the largest error per dtype, relative to each tensor's largest number."""

    cases: int = 0
    largest: dict[torch.dtype, tuple[float, str]] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)  # errors beyond the tolerance, but not beyond plain torch's

    def compare(
        self,
        found: dict[str, Tensor],
        truth: dict[str, Tensor],
        size: tuple[int, int, torch.dtype],
        plain: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Compare with the truth: an error beyond the tolerance may be at most twice that of `plain` in the same dtype.

        The error is relative to the terms of a score's gradient where they are larger than the gradient. Those are
        alpha <dO, x>, which cancel in a sum over the edges. With C numbers of dO and of x between -1 and 1, the root
        mean square of <dO, x> is sqrt(C) / 3.

        `plain` is the segment backend: plain torch, which adds the edges in the same order. It is beyond the tolerance,
        too, where a number is added hundreds of times, and where a product of a thousand edge features, zero in
        float32, moves scores across LeakyReLU's kink.
        """
        _, channels, dtype = size
        self.cases += 1
        assert found.keys() == truth.keys()
        for name, expected in truth.items():
            actual, least = found[name], math.sqrt(channels) / 3
            assert actual.shape == expected.shape and actual.dtype in (dtype, torch.int64), name
            error = relative(actual, expected, least)
            if not error <= TOLERANCE[dtype]:  # NaN too
                rounding = relative(plain()[name], expected, least)
                message = f"{name} differs by {error:.1e}, plain torch by {rounding:.1e}"
                assert error <= 2 * rounding < math.inf, message
                self.rounded.append(message)
            self.largest[dtype] = max(self.largest.get(dtype, (0.0, "")), (error, name))

    def __str__(self) -> str:
        worst = ", ".join(f"{str(d)[6:]} {error:.1e} ({name})" for d, (error, name) in self.largest.items())
        return "; ".join([f"{self.cases} cases, largest relative error: {worst}", *self.rounded])


def relative(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the largest difference, relative to the largest number that is expected, to `least` or to 1."""
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp(min=max(least, 1.0))
    return float((actual.double() - expected.double()).abs().max() / scale)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share even the smallest graph among threads, where a case uses two."""
    monkeypatch.setattr(rows, "SMALL", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(generator: np.random.Generator, *shape: int, step: int = 32, shift: float = 0.0) -> Tensor:
    """Random multiples of 1 / step in [-1, 1], plus a shift.

    Sums and products of them are exact, in float32 too, so that both sides agree on which side of LeakyReLU's kink a
    score lies.
    """
    return torch.from_numpy(generator.integers(-step, step + 1, size=shape) / step + shift)


# The operation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    graph: RandomGraph
    csr: bool  # edges that are grouped already
    operands: str
    frozen: str  # the operand that needs no gradient
    size: tuple[int, int, torch.dtype]
    negative_slope: float
    dropout: float
    offset: float  # of all scores
    weights: bool
    strided: bool
    threads: int


OPERANDS = ["x score_src score_dst", CONSTANT, *SCORES]


@st.composite
def operations(draw: Any) -> Operation:
    size = draw(st.sampled_from(SIZES))
    every = LONG and size == SIZES[0]  # what more kernels are compiled for
    operands = draw(st.sampled_from(OPERANDS + ["x score_src", "x score_dst", "x score_edge"] * every))
    offset = draw(st.sampled_from([0.0, 0.0, 1e4, -1e4])) if size[2] in (torch.float32, torch.float64) else 0.0
    return Operation(
        graph=draw(graphs()),
        csr=every and draw(st.booleans()),
        operands=operands,
        frozen=draw(st.sampled_from(["", "", *operands.split()])) if every else "",
        size=size,
        negative_slope=draw(st.sampled_from([0.25, 0.0, 1.0, 2.0, -0.5] + [0.2] * (offset == 0))),
        dropout=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
        offset=offset,
        weights=draw(st.booleans()),
        strided=draw(st.booleans()),
        threads=draw(st.sampled_from([1, 2])),
    )


def answer_operation(case: Operation, edges: Edges, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """The output, the attention and every gradient by name."""
    heads, channels, _ = case.size
    generator = np.random.default_rng(case.graph.seed + 1)
    sizes = {"N_src": edges.num_src, "N_dst": edges.num_dst, "E": edges.num_edges, "H": heads, "C": channels, "D": 3}
    leaves: dict[str, Tensor] = {}
    for name in case.operands.split():
        shift = case.offset if name in ("score_src", "score_edge") else 0.0
        leaf = numbers(generator, *(sizes[letter] for letter in SHAPES[name]), shift=shift).to(dtype)
        leaf = leaf.transpose(0, 1).contiguous().transpose(0, 1) if case.strided and leaf.dim() > 1 else leaf
        leaves[name] = leaf.requires_grad_(name != case.frozen)
    options: Any = {"dropout": case.dropout, "backend": backend, "return_attention_weights": case.weights}
    score = score_of(leaves, negative_slope=case.negative_slope)
    torch.manual_seed(case.graph.seed)
    result = attend(leaves["x"], score, edges, **options)
    return differentiated(dict(zip(("out", "alpha"), result if case.weights else (result,), strict=False)), leaves)


def differentiated(results: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results and the gradient of each leaf; where nothing depends on a leaf, no gradient is a zero one."""
    generator = np.random.default_rng(0)
    loss = sum((value.double() * numbers(generator, *value.shape)).sum() for value in results.values())
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    grads = {f"grad {k}": v.grad for k, v in leaves.items() if v.requires_grad}
    zeros = {f"grad {k}": torch.zeros_like(v) for k, v in leaves.items()}
    return {k: v.detach() for k, v in results.items()} | {k: zeros[k] if v is None else v for k, v in grads.items()}


def check_operation(case: Operation, errors: Errors) -> None:
    torch.set_num_threads(case.threads)
    graph, dtype = case.graph, case.size[2]
    edges = Edges.from_index(graph.index(), graph.num_src, graph.num_dst)
    if case.csr:
        edges = Edges.from_csr(edges.rowptr, edges.src.to(graph.ids), graph.num_src)
    truth = answer_operation(case, edges, torch.float64, "reference")
    results = answer_operation(case, edges, dtype, "fused")
    errors.compare(results, truth, case.size, partial(answer_operation, case, edges, dtype, "segment"))


def test_operations() -> None:
    errors = Errors()

    @FUZZ
    @given(operations())
    def each(case: Operation) -> None:
        check_operation(case, errors)

    each()
    print(f"\n{errors}")


# The layers ----------------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: Any) -> Draw:
    graph = draw(graphs(ids=IDS[:1]))
    fixed = {"backend": "auto"} | ({} if LONG else {"batch": 0, "weight": None})  # these have kernels of their own
    seed, kind = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([*LAYERS]))
    return Draw(seed, kind, Graph(graph.kind, graph.index(), graph.num_src, graph.num_dst), **fixed)


@pytest.mark.usefixtures("one_mask")
def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: set[tuple[str, ...]] = set()
    most = few.FEW
    for module in (autograd_node, few):
        monkeypatch.setattr(module, "load_kernels", lambda *names: computed.add(names) or load_kernels(*names))

    @FUZZ
    @given(layers())
    def each(case: Draw) -> None:
        torch.set_num_threads(1 + case.seed % 2)
        monkeypatch.setattr(few, "FEW", most * (case.seed // 2 % 2))
        check(case)

    each()
    assert computed == {(f"attention.{folder}", "cpu") for folder in ("additive", "pair", "layer")}
