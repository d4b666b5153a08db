"""The CUDA kernels against the reference, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU, and as compiled.

The compiled code is looked at without a GPU, but not in the interpreter's process.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from gat_pyg import philox as generator  # noqa: E402
from gat_pyg.attention import Additive, fused  # noqa: E402
from gat_pyg.attention.additive import gpu as additive  # noqa: E402
from gat_pyg.attention.pair import gpu as pair  # noqa: E402
from gat_pyg.attention.pair import gpu_edges as pair_edges  # noqa: E402
from gat_pyg.attention.score import Operation, Score  # noqa: E402
from gat_pyg.attention.steps import gpu as steps  # noqa: E402
from gat_pyg.conv import GATConv, GATv2Conv, TransformerConv  # noqa: E402
from gat_pyg.features import SparseFeatures  # noqa: E402
from gat_pyg.features import gpu as features  # noqa: E402
from gat_pyg.features.dropout import dropout as feature_dropout  # noqa: E402
from gat_pyg.features.linear import linear  # noqa: E402
from gat_pyg.features.pattern import Pattern  # noqa: E402
from gat_pyg.graph import edges as edges_module  # noqa: E402
from gat_pyg.graph.adjacency import EdgeList  # noqa: E402
from gat_pyg.graph.edges import Edges  # noqa: E402
from gat_pyg.kernels import device  # noqa: E402
from gat_pyg.kernels.gpu import FP_FUSION, draw, rows  # noqa: E402
from gat_pyg.philox import keyed  # noqa: E402
from gat_pyg.tasks.nodes import NodeLabels  # noqa: E402
from tests.attention.comparisons import (  # noqa: E402
    Place,
    Spy,
    assert_same,
    check,
    direction_of,
    spy,
    stairs,
    turned,
)
from tests.attention.conftest import nan_as_on_a_gpu  # noqa: E402
from tests.features.test_features import SIZES, bag_of_words  # noqa: E402
from tests.graphs import BIPARTITE, RANDOM, Graph, random, union  # noqa: E402
from tests.laws import assert_close, edges_of, moved  # noqa: E402
from tests.scores import ADDITIVE, DOT_EDGES, GATV2, GATV2_EDGES, SCORES, SHAPES, Tensors, leaves_of, score_of  # noqa: E402
from tests.syncs import syncs  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_CUDA else "cpu"
PLACE = Place(DEVICE, torch.float32, is_triton=True)

MODULES = (additive, pair, pair_edges, features, steps, rows, draw)

weekly = pytest.mark.weekly
runs = pytest.mark.skipif(not (INTERPRETED or ON_CUDA), reason="needs TRITON_INTERPRET=1 or a GPU")
on_cuda = pytest.mark.skipif(not ON_CUDA, reason="needs a GPU, and not the interpreter")


def compiles(test: Any) -> Any:
    """Mark a test of what the kernels compile to, which needs no GPU: -m "not compiles" leaves these tests out."""
    return pytest.mark.compiles(pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")(test))


HALF = [torch.float16, torch.bfloat16]
SEED = 0x9E3779B97F4A7C15 - 2**64  # both words of the key are in use
SEEDS = [SEED, 1, 2**62 + 12345]


@pytest.fixture(autouse=True)
def _unwritten_is_nan() -> Iterator[None]:
    """Let torch.empty return NaN, so that an element that no kernel writes fails the comparison."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all() and torch.ones(8).new_empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _nan_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        nan_as_on_a_gpu(monkeypatch)


def keep_mask(num_edges: int, heads: int, p: float, first: int = 0, seed: int = SEED) -> Tensor:
    """k `[E, H]` in the caller's order, of edges with ids from `first` on; its words are those of Random123."""
    ids = torch.arange(first, first + num_edges)
    return generator.keep_mask(torch.tensor(seed), ids, heads, p, torch.float64)


# Against the reference.


def on_device(edges: Edges) -> Edges:
    """The same edges where the kernels run."""
    return moved(edges, DEVICE)


@pytest.fixture
def these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fused operation run these kernels, on a CPU in the interpreter."""
    monkeypatch.setitem(device.FILES, "cpu", "gpu")


def by_kernels(
    edges: Edges,
    leaves: Tensors,
    direction: Tensor,
    dropout: float = 0.0,
    saved: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int | list[int] = SEED,
) -> Tensors:
    """The same by the kernels: `saved` is the mode that saves the output for the backward pass."""
    wide = torch.float32
    own = {k: v.to(DEVICE, dtype if {"C", "D"} & {*SHAPES[k]} else wide) for k, v in leaves.items()}
    key = torch.tensor(seed, device=DEVICE) if dropout else None
    lse, out, grads = by_hand(own, edges, direction.to(DEVICE, dtype), dropout, key, saved, dtype)
    assert (lse.isfinite() | out.isnan().any(-1)).all() and lse.dtype == wide
    assert grads.keys() == own.keys()
    return {"out": out.cpu()} | {name: grad.cpu() for name, grad in grads.items()}


def by_hand(
    leaves: Tensors,
    edges: Edges,
    direction: Tensor,
    dropout: float,
    seed: Tensor | None,
    saved: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensors]:
    """Log-sum-exp, output and gradients, by the functions that the fused operation calls."""
    score = score_of(leaves)
    kernels, weight = kernels_of(score), leaves.get("edge_weight")
    call = Operation(leaves["x"], score, edges, weight, seed, dropout)
    out, lse, *others = kernels.forward(call, dtype, saved)
    assert len(others) == (len(score.saved) if saved else 0)
    needs = tuple(operand is not None for operand in (leaves["x"], weight, *score.operands))
    grads = kernels.backward(call, direction, out if saved else None, (lse, *others), needs)
    return lse, out, {name: grad for name, grad in grads.items() if grad is not None}


def kernels_of(score: Score) -> Any:
    """The module of a score's kernels for a GPU."""
    return importlib.import_module(f"gat_pyg.attention.{score.kernels}.gpu")


def modes_of(names: str) -> tuple[bool, ...]:
    """The ways in which a score can save what its backward pass needs."""
    return (True, False) if SCORES.get(names.removesuffix(" edge_weight"), SCORES[ADDITIVE]).score.saved else (True,)


WEIGHTED = [f"{names} edge_weight" for names in (ADDITIVE, GATV2_EDGES, DOT_EDGES)]
CASES = [*SCORES, *WEIGHTED]


SMALL = random(7, 6, 25)


@runs
@pytest.mark.parametrize("blocks", [1, pytest.param(3, marks=weekly)])
@pytest.mark.usefixtures("these_kernels")
def test_programs_that_share_a_sum_of_parameters(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pair, pair_edges):
        monkeypatch.setattr(module, "BLOCKS", blocks)
    check(PLACE, RANDOM, GATV2)
    check(PLACE, RANDOM, GATV2_EDGES)


# Stacks of models.


def assert_each_is_alone(graph: Graph, models: int, each: int, channels: int, names: str) -> None:
    edges, one = on_device(edges_of(graph)), leaves_of(graph, each, channels, names)
    assert edges.perm is not None
    leaves = [{name: leaf.roll(m, 0) for name, leaf in one.items()} for m in range(models)]
    directions = torch.randn(models, graph.num_dst, each, channels, generator=torch.Generator().manual_seed(3))
    stack = {name: torch.stack([leaves[m][name] for m in range(models)]) for name in one}
    for saved in modes_of(names):
        together = by_kernels(edges, stack, directions, 0.3, saved, seed=SEEDS[:models])
        for m in range(models):
            alone = by_kernels(edges, leaves[m], directions[m], 0.3, saved, seed=SEEDS[m])
            measured = {name: value[m] for name, value in together.items()}
            assert_same(measured, alone, f"{graph} {names} {models}x{each}x{channels} model {m} saved {saved}")


@runs
@pytest.mark.parametrize("names", CASES)
def test_a_stack_of_several_slabs(names: str) -> None:
    """Of two heads each: slabs that end within a model, and one that goes beyond the last."""
    assert rows.tile_for(3, 9, 100, 4).heads == 2
    assert_each_is_alone(SMALL, 3, 3, 100, names)


@runs
def test_seeds_may_be_strided() -> None:
    edges, x = on_device(edges_of(SMALL)), torch.randn(2, 7, 2, 3, device=DEVICE)
    seeds = torch.tensor(SEEDS[:2], device=DEVICE)
    for strided in (torch.stack([seeds, seeds + 1], 1)[:, 0], seeds[0].expand(2)):
        assert not strided.is_contiguous()
        one, other = (
            additive.forward(Operation(x, Additive(), edges, None, s, 0.5), torch.float32, False)[0]
            for s in (strided, strided.contiguous())
        )
        assert torch.equal(one, other)


# Rows that are split.


@runs
@pytest.mark.parametrize("names", CASES)
def test_long_rows_of_a_stack_are_split(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split = 8 if INTERPRETED else rows.SPLIT
    monkeypatch.setattr(rows, "SPLIT", split)
    long = stairs(3, split + 1)
    graph = union(long, turned(long))
    edges = edges_of(graph)
    assert all(rows.chunks_of(edges, side) is not None for side in ("dst", "src"))
    assert_each_is_alone(graph, 2, 5, 7, names)


def vary(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a constant of the launches, as `benchmarks/attention.py --variants` does."""
    name, value = setting.split("=")
    for module in (rows, edges_module):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, int(value))


@runs
@pytest.mark.parametrize("setting", ["SPLIT=32", *(pytest.param(each, marks=weekly) for each in rows.VARIANTS)])
@pytest.mark.usefixtures("these_kernels")
def test_variants_of_the_launches_compute_the_same(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows of 1 to 300 edges, with many narrow heads and with wide ones."""
    default = rows.tile_for(1, 4, 256, 14), rows.tile_for(1, 8, 8, 50), rows.SPLIT
    vary(setting, monkeypatch)
    assert (rows.tile_for(1, 4, 256, 14), rows.tile_for(1, 8, 8, 50), rows.SPLIT) != default
    graph = stairs(1, 4, 0, 17, 33, 129, 300)
    for names in (ADDITIVE, "x score_src score_dst", GATV2):
        check(PLACE, graph, names, 5, 8, dropout=0.3)
    check(PLACE, SMALL, ADDITIVE, 4, 256)


@runs
def test_launches_live_as_long_as_their_edges() -> None:
    """What a launch needs of the edges and sizes is computed once, the chunks of long rows too."""
    edges = on_device(edges_of(stairs(rows.SPLIT + 1)))
    walk = rows.walk_of(edges, "dst", 1, 8, 8)
    assert walk is rows.walk_of(edges, "dst", 1, 8, 8) is not rows.walk_of(edges, "dst", 1, 8, 4)
    assert walk.chunks is not None and walk.chunks is rows.chunks_of(edges, "dst")
    start = weakref.ref(walk.chunks.start)
    del edges, walk
    gc.collect()
    assert start() is None


# Sparse features of several models.


def pattern_of(size: tuple[int, int, float]) -> tuple[Tensor, Pattern]:
    """A dense matrix, and the pattern of its non-zeros where the kernels run."""
    dense = bag_of_words(*size)
    return dense, Pattern.of(dense.to_sparse_csr().to(DEVICE))


def mask_of(pattern: Pattern, seed: int, p: float) -> Tensor:
    """k `[nnz]` of one model."""
    nnz = pattern.col.numel()
    return keep_mask(-(-nnz // 4), 4, p, seed=seed).flatten()[:nnz]


def matrix_of(pattern: Pattern, values: Tensor) -> Tensor:
    """The dense matrix `[rows, columns]` in float64."""
    matrix = torch.zeros(pattern.num_rows, pattern.num_cols, dtype=torch.float64)
    matrix[pattern.row.cpu().long(), pattern.col.cpu().long()] = values.double()
    return matrix


OF_SUMS = [  # columns of the weights, dropout, what the models share; slabs of one block, of a masked one, of several
    (7, 0.6, ""),
    (1, 0.0, "weight"),
    (64, 0.3, "values"),
    (300, 0.6, "seed"),
    (5, 1.0, "values seed"),
]


@runs
@pytest.mark.parametrize(
    "size", [SIZES[2], (2, 40, 0.9), *(pytest.param(size, marks=weekly) for size in (*SIZES, (9, 14, 0.3)))], ids=str
)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=weekly)], ids=str)
def test_sums_over_non_zeros(size: tuple[int, int, float], back: bool, dtype: torch.dtype) -> None:
    """Of three models, each with the bits that it has alone. Of two rows with 36 non-zeros each has several blocks."""
    size = (size[1], size[0], size[2]) if back and size[0] else size
    _, pattern = pattern_of(size)
    nnz, generator = pattern.col.numel(), torch.Generator().manual_seed(1)
    for channels, p, shared in OF_SUMS:
        values = torch.randn(3, nnz, generator=generator).to(DEVICE, dtype)
        weight = torch.randn(3, size[0 if back else 1], channels, generator=generator).to(DEVICE, dtype)
        seeds = torch.tensor(SEEDS, device=DEVICE)
        values = values[:1].expand_as(values) if "values" in shared else values
        weight = weight[:1].expand_as(weight) if "weight" in shared else weight
        seeds = seeds[:1].expand_as(seeds) if "seed" in shared else seeds
        v, w, s = (
            t[0] if name in shared else t for name, t in (("values", values), ("weight", weight), ("seed", seeds))
        )
        out = features.weighted_rows(v, w, s if p else None, p, pattern, back)
        assert out is not None and out.dtype == dtype and out.shape == (3, size[1 if back else 0], channels)
        for model in range(3):
            keep = torch.ones(nnz) if p == 0 else torch.zeros(nnz) if p == 1 else mask_of(pattern, int(seeds[model]), p)
            matrix = matrix_of(pattern, values[model].cpu().double() * keep)
            expected = (matrix.t() if back else matrix) @ weight[model].cpu().double()
            assert_close(out[model].cpu(), expected.to(dtype), f"{size} {channels} dropout {p} {shared} model {model}")
        one = slice(1, 2)
        alone = features.weighted_rows(values[one], weight[one], seeds[one] if p else None, p, pattern, back)
        assert alone is not None and torch.equal(alone, out[one])


@runs
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("p", [0.6, (0.3, 0.6, 1.0)])  # of all models, of each: thresholds of 31 bits and more
def test_the_mask_of_sparse_features_bit_by_bit(back: bool, p: Any) -> None:
    """Times the identity every non-zero is a number of the result; the same bits come from the kernel for CPUs."""
    each = p if isinstance(p, tuple) else (p,) * 3
    p = torch.tensor(p, dtype=torch.float64, device=DEVICE) if isinstance(p, tuple) else p
    _, pattern = pattern_of((33, 129, 0.05))
    values = torch.ones(pattern.col.numel(), device=DEVICE)
    seeds = torch.tensor(SEEDS, device=DEVICE)
    one = torch.eye(33 if back else 129, device=DEVICE)
    out = features.weighted_rows(values, one, seeds, p, pattern, back)
    assert out is not None
    masks = [matrix_of(pattern, mask_of(pattern, *drawn)).float() for drawn in zip(SEEDS, each, strict=True)]
    assert torch.equal(out.cpu(), torch.stack([mask.t() if back else mask for mask in masks]))
    cpu = pytest.importorskip("gat_pyg.features.cpu")
    on_cpu = Pattern(pattern.rowptr.cpu(), pattern.col.cpu(), pattern.num_cols)
    p = p.cpu() if isinstance(p, Tensor) else p
    assert torch.equal(out.cpu(), cpu.weighted_rows(values.cpu(), one.cpu(), seeds.cpu(), p, on_cpu, back))


@runs
def test_sums_of_wide_ids_and_strided_operands_and_none_of_float64() -> None:
    _, pattern = pattern_of((33, 129, 0.05))
    wide = Pattern(pattern.rowptr.long(), pattern.col.long(), pattern.num_cols)
    values, seeds = torch.randn(pattern.col.numel(), device=DEVICE), torch.tensor(SEEDS, device=DEVICE)
    weight = torch.randn(3, 8, 129, device=DEVICE).transpose(1, 2)
    expected = features.weighted_rows(values, weight.contiguous(), seeds, 0.3, pattern, False)
    assert expected is not None and not weight.is_contiguous()
    for passed in (pattern, wide):
        strided = torch.stack([seeds, seeds + 1], 1)[:, 0]
        again = features.weighted_rows(values, weight, strided, 0.3, passed, False)
        assert again is not None and torch.equal(again, expected)
    assert features.weighted_rows(values.double(), weight, seeds, 0.3, pattern, False) is None
    assert features.weighted_rows(values, weight.double(), seeds, 0.3, pattern, True) is None


@pytest.fixture
def kernels_for_all(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The CUDA kernels serve every device, so that the interpreter runs what calls them; a count of the sums."""
    spy = Spy(features._weighted_rows_kernel)
    monkeypatch.setitem(device.FILES, "cpu", "gpu")
    monkeypatch.setattr(device, "REASONS", {})
    monkeypatch.setattr(features, "_weighted_rows_kernel", spy)
    return spy


@runs
@pytest.mark.parametrize("models", [1, 3])
def test_stacked_layers_take_sparse_features(models: int, kernels_for_all: Spy) -> None:
    """Results and gradients of a dense x with the same mask, for models of a stack, each with a mask of its own."""
    dense = bag_of_words(33, 129, 0.05, dtype=torch.float32).to(DEVICE)
    x, p = SparseFeatures(dense.to_sparse_csr()), torch.tensor([0.6, 0.3, 0.0][:models], device=DEVICE)
    keys = torch.tensor(SEEDS[:models], device=DEVICE)
    weight = torch.randn(models, 8, 129, device=DEVICE, requires_grad=True)

    def layer(weight: Tensor, key: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        with keyed(key):
            dropped = feature_dropout(x, p)
        assert isinstance(dropped, SparseFeatures) and dropped.seed is not None
        return linear(dropped, weight.t()), dropped.content

    out, content = torch.func.vmap(layer, randomness="different")(weight, keys, p)
    direction = torch.randn(models, 33, 8, device=DEVICE)
    (grad,) = torch.autograd.grad((out * direction).sum(), weight)
    assert kernels_for_all.launches == 2
    zeros = (content == 0).double().mean(1)
    assert all(abs(share - float(each)) < 0.15 for share, each in zip(zeros, p, strict=True)), zeros
    for model in range(models):
        matrix = matrix_of(x.pattern, content[model].cpu())
        assert_close(out[model].cpu(), (matrix @ weight[model].detach().cpu().double().t()).float())
        assert_close(grad[model].cpu(), (direction[model].cpu().double().t() @ matrix).float())


# Numbers and memory.


@triton.jit
def _offset_kernel(p_ids, p_offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    o_i = tl.arange(0, BLOCK)
    tl.store(p_offsets + o_i, rows.offset(tl.load(p_ids + o_i), WIDTH))


@runs
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_pass_2_to_the_31(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 1, 2_449_028, 2**31 - 1], dtype=dtype)  # the third is ogbn-products' last node
    offsets = torch.empty(4, dtype=torch.int64, device=DEVICE)
    _offset_kernel[(1,)](ids.to(DEVICE), offsets, WIDTH=1024, BLOCK=4)
    assert offsets.tolist() == [int(i) * 1024 for i in ids]


@runs
@pytest.mark.parametrize("block", [2, 4, 8, *(pytest.param(block, marks=weekly) for block in (1, 16))])
@pytest.mark.parametrize("first", [2**32 - 2, pytest.param(0, marks=weekly)])
def test_dropout_is_philox(block: int, first: int) -> None:
    """However many heads a slab has, beyond the last one too, and of how many models; an edge's id has 64 bits."""
    ids = torch.arange(first, first + 4, device=DEVICE)
    for models, each in ((1, 8), (1, 6), *((m, e) for m in (2, 3) for e in (1, 2, 3, 4, 8))):
        heads, seeds = models * each, SEEDS[:models]
        kept = torch.empty(4, heads, dtype=torch.bool, device=DEVICE)
        grid, key, stack = (1, triton.cdiv(heads, block)), torch.tensor(seeds), rows.stack_arguments(models, heads)
        draw._kept_kernel[grid](key.to(DEVICE), ids, kept, 4, -1 << 31, 2.0, **stack, BLOCK_E=4, BLOCK_H=block)
        expected = torch.cat([keep_mask(4, each, 0.5, first, seed) for seed in seeds], 1) > 0
        assert torch.equal(kept.cpu(), expected), f"{models}x{each}"


@runs
@pytest.mark.parametrize("p", [0.3, 0.6, 1.0, torch.tensor(0.6)], ids=str)
def test_a_mask_is_drawn_by_one_kernel(p: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of edge dropout among others, with the bits of plain torch; of edges by their ids, and of a stack."""
    p = p.to(DEVICE) if isinstance(p, Tensor) else p
    ids = torch.randperm(1300, dtype=torch.int32, device=DEVICE)
    cases = [
        (torch.tensor(seeds, device=DEVICE), edges, heads)
        for seeds in (SEED, SEEDS)
        for edges in (0, 1300, ids, ids[::2])
        for heads in (3, 15)
    ]
    calls = spy(monkeypatch, draw, "_kept_kernel")
    with monkeypatch.context() as patch:
        patch.setitem(device.FILES, DEVICE, "gpu")
        patch.setattr(generator, "_philox", None)
        drawn = [generator.draw_kept(*case, p) for case in cases]
    assert calls.launches == 12  # none for no edges
    monkeypatch.setattr(generator, "has_gpu_kernels", lambda _: False)
    assert all(torch.equal(one, generator.draw_kept(*case, p)) for one, case in zip(drawn, cases, strict=True))


@runs
@pytest.mark.parametrize("size", [1, 63, 4100])
def test_dropout_of_features_is_that_of_four_heads(size: int) -> None:
    seeds = torch.tensor(SEEDS[:3], device=DEVICE)
    each = torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64, device=DEVICE)
    for seed, p in ((seeds, each), (seeds, 0.6), (seeds[0], 0.3)):
        selected = features.keep(seed, size, p, torch.float32)
        names = torch.arange(-(-size // 4), device=DEVICE).flip(0)
        turned = features.keep(seed, 4 * len(names), p, torch.float32, names).view(*seed.shape, -1, 4).flip(-2)
        assert torch.equal(turned.flatten(-2)[..., :size], selected)
        drawn = zip(seed.view(-1), p.tolist() if isinstance(p, Tensor) else [p] * seed.numel(), strict=True)
        expected = [generator.keep_mask(one, -(-size // 4), 4, q).flatten()[:size] for one, q in drawn]
        assert torch.equal(selected.view(-1, size), torch.stack(expected))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(half, marks=weekly) for half in HALF)], ids=str)
@pytest.mark.usefixtures("kernels_for_all")
def test_dropout_of_dense_features_draws_its_mask_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without storing it; x k, its gradient and its tangent are those by the stored mask, in a stack too."""
    stored = Spy(features._keep_kernel)
    monkeypatch.setattr(features, "_keep_kernel", stored)
    keys, p = torch.tensor(SEEDS, device=DEVICE), 0.6
    of_each = torch.full((3,), p, dtype=torch.float64, device=DEVICE)
    x, tangent = torch.randn(2, 3, 6, 7, dtype=dtype, device=DEVICE)

    def drop(x: Tensor, key: Tensor, p: float | Tensor = p) -> Tensor:
        with keyed(key):
            return feature_dropout(x, p)

    def check(answer: Tensor, x: Tensor, model: int) -> None:
        seed = generator.first_seeds(torch.tensor(SEEDS[model]))[1]
        keep = generator.keep_mask(seed, -(-x.numel() // 4), 4, p).flatten()[: x.numel()].view(x.shape)
        assert torch.equal(answer.cpu() == 0, (x.cpu().float() * keep) == 0)
        assert_close(answer.cpu(), (x.cpu().float() * keep).to(dtype))

    for passed in (x[0], x.mT[0], x[0][:0]):
        leaf = passed.clone().requires_grad_()
        out = drop(leaf, keys[0])
        (grad,) = torch.autograd.grad(out, leaf, tangent[0].reshape_as(passed) if len(passed) else passed, True)
        check(out, passed, 0)
        check(grad, tangent[0].reshape_as(passed) if len(passed) else passed, 0)
        assert grad.requires_grad is False
    check(torch.func.jvp(lambda x: drop(x, keys[0]), (x[0],), (tangent[0],))[1], tangent[0], 0)

    for mapped, of in ((0, x), (None, x[0]), (1, x.movedim(0, 1))):
        each = torch.func.vmap(drop, in_dims=(mapped, 0, 0))
        out, pull = torch.func.vjp(lambda x: each(x, keys, of_each), of)  # noqa: B023
        (grad,) = pull(tangent)
        for model in range(3):
            check(out[model], x[model] if mapped is not None else x[0], model)
            if mapped is not None:
                check(grad.select(mapped, model), tangent[model], model)
        if mapped is None:
            assert_close(grad, torch.stack([drop(tangent[model], keys[model]) for model in range(3)]).sum(0))
    twice = torch.func.vmap(torch.func.vmap(drop, in_dims=(0, 0, None)))(
        x[:2, None].expand(2, 2, 6, 7), keys[[0, 1, 1, 0]].view(2, 2), of_each[:2]
    )
    for row, column, model in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        check(twice[row, column], x[row], model)
    assert stored.launches > 10 and not torch.equal(twice[0, 0], twice[0, 1])


@runs
@pytest.mark.parametrize("limit", [rows.STRIDED, 0])
def test_scores_of_both_ends_as_slices_of_one_tensor(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers compute them as one tensor; small ones are read without copies, in every pass and in both modes."""
    monkeypatch.setattr(rows, "STRIDED", limit)
    graph = union(SMALL, stairs(3, rows.SPLIT + 1))
    edges = on_device(edges_of(graph))
    for heads in (1, 3):
        leaves = leaves_of(graph, heads, 5, ADDITIVE)
        direction = torch.randn(graph.num_dst, heads, 5, generator=torch.Generator().manual_seed(3))
        apart = {name: leaf.to(DEVICE, torch.float32) for name, leaf in leaves.items()}
        both = torch.full((max(graph.num_src, graph.num_dst), 2 * heads), torch.nan, device=DEVICE)
        src, dst = (half[:size] for half, size in zip(both.chunk(2, 1), (graph.num_src, graph.num_dst), strict=True))
        src.copy_(apart["score_src"])
        dst.copy_(apart["score_dst"])
        sliced = {**apart, "score_src": src, "score_dst": dst}
        arguments = additive._scores(torch.Size(), score_of(sliced))
        assert arguments["STRIDE"] == (2 * heads if limit else None)
        assert (arguments["p_score_src"] is src) == (arguments["p_score_dst"] is dst) == bool(limit)
        key = torch.tensor(SEED, device=DEVICE)
        for saved in (True, False):
            one, other = (
                by_hand(each, edges, direction.to(DEVICE), 0.3, key, saved, torch.float32) for each in (apart, sliced)
            )
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
            for name, grad in one[2].items():
                assert torch.equal(grad, other[2][name]), name


@runs
@pytest.mark.usefixtures("these_kernels")
def test_keys_and_values_of_one_product_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are written side by side too, but not as results of an operator, which share no memory."""
    monkeypatch.setattr(rows, "SPLIT", 8)
    graph = union(SMALL, turned(stairs(3, 9)))
    edges, leaves = on_device(edges_of(graph)), PLACE.to(leaves_of(graph, 3, 5, DOT_EDGES))
    both = torch.stack([leaves["key"], leaves["x"]], 1)
    beside = {**leaves, "key": both[:, 0], "x": both[:, 1]}
    direction, seed = direction_of(graph, 3, 5).to(DEVICE), torch.tensor(SEED, device=DEVICE)
    one, other = (by_hand(each, edges, direction, 0.3, seed, True, torch.float32) for each in (leaves, beside))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert all(torch.equal(grad, other[2][name]) for name, grad in one[2].items())
    assert other[2]["x"].data_ptr() - other[2]["key"].data_ptr() == both.stride(1) * both.element_size()
    ends = [beside[name].requires_grad_() for name in ("x", "key")]
    out = fused.attend(Operation(ends[0], score_of(beside), EdgeList(graph.index.to(DEVICE), graph.num_dst)))
    assert all(grad.is_contiguous() for grad in torch.autograd.grad(out, ends, direction.to(out)))


# As torch sees them: through the fused operation.


MIXED = pytest.mark.parametrize(
    ("of_x", "of_others", "of_out"),
    [
        (torch.bfloat16, torch.float32, torch.float32),  # autocast
        pytest.param(torch.float32, torch.bfloat16, torch.float32, marks=weekly),
        pytest.param(torch.bfloat16, torch.float16, torch.float32, marks=weekly),
    ],
    ids=str,
)
SPEED = pytest.mark.parametrize("speed", [True, False], ids=["speed", "memory"])


@runs
@MIXED
@SPEED
@pytest.mark.parametrize("names", ["x score_src score_dst", "x", *CASES])
@pytest.mark.usefixtures("these_kernels")
def test_fake_operators_return_what_the_kernels_do(
    names: str, of_x: torch.dtype, of_others: torch.dtype, of_out: torch.dtype, speed: bool
) -> None:
    """Shapes, dtypes and strides of the operators on fake CUDA tensors are those of the kernels' results.

    Of one model, of a stack, and without edges.
    """
    unconnected = replace(BIPARTITE, index=BIPARTITE.index[:, :0])
    for graph, models in itertools.product((BIPARTITE, unconnected), ((), (2,))):
        leaves = leaves_of(graph, 3, 5, names)
        leaves = {
            name: leaf.to(DEVICE, of_x if name == "x" else of_others).expand(*models, *leaf.shape)
            for name, leaf in leaves.items()
        }
        score, saves_output = score_of(leaves), speed or len(modes_of(names)) == 1
        operands = leaves["x"], leaves.get("edge_weight"), *score.operands
        present = [operand is not None for operand in operands]
        rest = (3, False, "source_to_target", type(score).__name__, [0.3, *score.values], saves_output, None, 0.0)

        def layouts(seed: Tensor, index: Tensor, *operands: Tensor) -> list[Any]:
            tensors = [*operands]
            results = torch.ops.gat_pyg.attend(tensors, present, seed, None, index, *rest, False)  # noqa: B023
            saved, ones = [*results] if saves_output else results[1:], torch.ones_like(results[0])  # noqa: B023
            for last in (False, True):
                needs = [True] * (len(tensors) - 1) + [last]
                args = (ones, tensors, saved, needs, present, seed, None, index, *rest)  # noqa: B023
                results += torch.ops.gat_pyg.attend_backward(*args)
            return [(tuple(t.shape), t.dtype, t.stride()) for t in results]

        real = [torch.full(models, SEED, device=DEVICE), graph.index.to(DEVICE)]
        real += [operand for operand in operands if operand is not None]
        with torch._subclasses.FakeTensorMode():
            fake = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in real]
            expected = layouts(*fake)
        assert layouts(*real) == expected, (graph, models)


@runs
@pytest.mark.parametrize("layer", [GATv2Conv, *(pytest.param(of, marks=weekly) for of in (GATConv, TransformerConv))])
@pytest.mark.usefixtures("these_kernels")
def test_a_batch_of_features_is_compiled(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features `[B, N, F]` are a stack to the kernels; the compiler reads its strides."""
    monkeypatch.setattr(device, "REASONS", {})
    conv, index = layer(6, 5, heads=3, edge_dim=2).to(DEVICE), torch.randint(7, (2, 20), device=DEVICE)
    x, edge_attr = torch.randn(2, 7, 6, device=DEVICE), torch.randn(20, 2, device=DEVICE)
    leaves = [x.requires_grad_(), edge_attr.requires_grad_(), *conv.parameters()]
    outs = [run(x, index, edge_attr) for run in (conv, torch.compile(conv, backend="aot_eager", fullgraph=True))]
    results, expected = ([out, *torch.autograd.grad(out.square().sum(), leaves)] for out in outs)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_without_triton_the_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    file = Path(rows.__file__).with_name("__init__.py")
    spec = importlib.util.spec_from_file_location("gat_pyg.kernels.gpu_alone", file)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="need Triton.*backend='segment'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# On a GPU alone.


@on_cuda
@pytest.mark.parametrize("names", CASES)
def test_captured_in_a_graph(names: str) -> None:
    graph = stairs(40, 3, rows.SPLIT + 1)
    leaves = {k: v.float().cuda() for k, v in leaves_of(graph, 8, 8, names).items()}
    direction, seed = torch.randn(3, 8, 8, device="cuda"), torch.tensor(SEED, device="cuda")
    edges = on_device(edges_of(graph))

    def step() -> list[Tensor]:
        _, out, grads = by_hand(leaves, edges, direction, 0.3, seed, True, torch.float32)
        return [out, *grads.values()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and finds the long rows
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    seed.add_(1)  # another mask on replay
    leaves["x"].neg_()
    captured.replay()
    for result, expected in zip(results, step(), strict=True):
        assert torch.equal(result, expected)


@on_cuda
def test_on_the_current_stream() -> None:
    leaves, direction = leaves_of(RANDOM, 8, 8, ADDITIVE), torch.randn(40, 8, 8)
    edges = on_device(edges_of(RANDOM))
    expected = by_kernels(edges, leaves, direction)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what runs on another stream would not wait for this
        answer = by_kernels(edges, leaves, direction)
    for name, value in answer.items():
        assert torch.equal(value, expected[name]), name


# Which kernels are compiled.


@pytest.fixture
def specialisations(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The kernels that Triton would compile for sm_90, by name and key; none is compiled or launched."""
    from triton.backends.compiler import GPUTarget

    seen: set[tuple[str, str]] = set()

    def instead_of_compiling(key: str, fn: Any, **_: Any) -> bool:
        seen.add((fn.name.rpartition(".")[2], key))
        return True

    driver = SimpleNamespace(
        get_current_device=lambda: "no device",
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", instead_of_compiling)
    return seen


@compiles
@pytest.mark.parametrize("each", [6, pytest.param(1, marks=weekly), pytest.param(8, marks=weekly)])
@pytest.mark.parametrize("names", CASES)
def test_stacks_of_all_sizes_share_their_kernels(names: str, each: int, specialisations: set[tuple[str, str]]) -> None:
    long = stairs(3, rows.SPLIT + 1)
    graph = union(long, turned(long))
    edges = edges_of(graph)

    def launched(models: int) -> set[tuple[str, str]]:
        specialisations.clear()
        leaves = {
            name: leaf.float().expand(models, *leaf.shape) for name, leaf in leaves_of(graph, each, 8, names).items()
        }
        direction, seeds = torch.ones(models, graph.num_dst, each, 8), torch.arange(models)
        for p, key in ((0.3, seeds), (0.0, None)):
            for saved in modes_of(names):
                by_hand(leaves, edges, direction, p, key, saved, torch.float32)
        return set(specialisations)

    expected = {"_forward_kernel", "_merge_kernel", "_sum_kernel"}
    expected |= (
        {"_backward_dst_kernel", "_backward_src_kernel"}
        if "x_dst" in names
        else {"_mean_kernel", "_segment_mean_kernel", "_backward_kernel"}
    )
    if "lin_edge" in names:
        expected.add("_parameters_kernel" if "att" in names.split() else "_attr_kernel")
    two = launched(2)
    assert {name for name, _ in two} == expected
    for models in (3, 16, 17, 100):
        assert launched(models) == two, models


@compiles
@pytest.mark.parametrize(
    ("layer", "edge_dim", "kernels"),
    [
        (GATConv, None, "_forward _mean _backward _merge _sum"),
        (GATConv, 3, "_forward _mean _backward _merge _sum"),
        (GATv2Conv, 3, "_forward _backward_dst _backward_src _parameters _merge _sum"),
        (TransformerConv, 3, "_forward _backward_dst _backward_src _attr _merge _sum"),
    ],
)
def test_a_training_step_on_a_new_batch_costs_one_sync(
    layer: type[torch.nn.Module],
    edge_dim: int | None,
    kernels: str,
    specialisations: set[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Self-loops, long rows, dropout, features of edges and the launches of all kernels included."""
    monkeypatch.setitem(device.FILES, "cpu", "gpu")
    monkeypatch.setattr(device, "REASONS", {})
    monkeypatch.setattr("gat_pyg.graph.edges.is_remote", lambda _: True)
    loops = {} if layer is TransformerConv else {"add_self_loops": True}
    conv = layer(6, 8, heads=2, dropout=0.5, edge_dim=edge_dim, **loops)
    index = torch.cat([torch.randint(40, (2, 400)), torch.stack([torch.arange(300) % 40, torch.full((300,), 3)])], 1)
    index = torch.cat([index, index.flip(0)], 1)  # long rows by src too
    x = torch.randn(40, 6, requires_grad=True)
    edge_attr = None if edge_dim is None else torch.randn(1400, edge_dim, requires_grad=True)
    with syncs() as measured:
        conv(x, index, edge_attr).sum().backward()
        assert measured == ["tolist"]
        conv(x, index, edge_attr).sum().backward()
    assert measured == ["tolist"]
    assert {name for name, _ in specialisations} == {f"{kernel}_kernel" for kernel in kernels.split()}


@compiles
def test_seeds_that_leave_a_stack_compile_no_new_kernels(
    specialisations: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 seeds of Cora's network, on a graph of Cora's degrees, through every size that the stack can shrink to."""
    from torch_geometric.data import Data
    from torch_geometric.utils import to_undirected

    from gat_pyg.models import GAT
    from gat_pyg.seeds import Member, Stacked
    from gat_pyg.seeds.callbacks import COMPACT_AT

    monkeypatch.setitem(device.FILES, "cpu", "gpu")
    monkeypatch.setattr(device, "REASONS", {})
    index = torch.randint(270, (2, 528), generator=torch.Generator().manual_seed(0))
    words = bag_of_words(270, 40, 0.05).float().to_sparse_csr()
    data = Data(words, to_undirected(index), y=torch.arange(270) % 7)
    for split, part in {"train": slice(0, 14), "val": slice(14, 64), "test": slice(64, 164)}.items():
        data[f"{split}_mask"] = torch.zeros(270, dtype=torch.bool)
        data[f"{split}_mask"][part] = True
    members = [Member(seed, NodeLabels(7)) for seed in range(100)]
    module = Stacked([GAT.preset("cora", in_channels=40) for _ in members], members)
    for size in (100, *range(100 - math.ceil(100 * COMPACT_AT), 0, -1)):
        module.select(range(size))
        module.begin_epoch(0, 0)
        module.train()
        module._loss(data)[0].backward()
        module.zero_grad()
        module.eval()
        with torch.no_grad():
            for split in ("val", "test"):
                module._counts(data, split)
    used = {"_keep_kernel", "_weighted_rows_kernel", "_forward_kernel", "_mean_kernel", "_backward_kernel"}
    assert {name for name, _ in specialisations} == used and len(specialisations) <= 24


@compiles
def test_sums_over_the_non_zeros_of_all_stacks_share_their_kernels(specialisations: set[tuple[str, str]]) -> None:
    """One for each way of summing: X W, X^T W, and X W without dropout."""
    for size in ((33, 129, 0.05), (16, 16, 0.5), (64, 32, 0.1)):
        pattern = Pattern.of(bag_of_words(*size).to_sparse_csr())
        values = torch.randn(pattern.col.numel())
        for models in (100, 50, 17, 16, 2, 1):
            for back, p in ((False, 0.6), (True, 0.6), (False, 0.0)):
                weight = torch.randn(models, size[0 if back else 1], 64)
                features.weighted_rows(values, weight, torch.arange(models) if p else None, p, pattern, back)
    assert {name for name, _ in specialisations} == {"_weighted_rows_kernel"} and len(specialisations) == 3


# As compiled for each architecture, without a GPU.

# KiB of shared memory that a program may take: A100, RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
OTHERS = [80, 100, 120]  # for which the cases are compiled that take most
ARCHITECTURES = pytest.mark.parametrize("sm", [90, *(pytest.param(sm, marks=weekly) for sm in OTHERS)])

FORWARD = "x score_src score_dst ptr src perm out lse out_plus mass_plus"
CHUNKS = "chunk_row chunk_start chunks"
KERNELS = {
    "forward": ("_forward_kernel", FORWARD),
    "forward, dropout and long rows": ("_forward_kernel", f"{FORWARD} seed dropout_ids {CHUNKS} chunks_h"),
    "forward, GATv2": ("_forward_kernel", "x x_dst att ptr src out lse"),
    "forward, product": ("_forward_kernel", "x x_dst ptr src out lse"),
    "forward, weights": ("_forward_kernel", f"{FORWARD} edge_weight"),
    "forward, GATv2 with features": ("_forward_kernel", "x x_dst att lin edge_attr ptr src perm out lse"),
    "forward, product with keys and features": (
        "_forward_kernel",
        "x x_dst key query_edge edge_attr ptr src perm out out_edge lse",
    ),
    "backward": (
        "_backward_kernel",
        "grad x score_src score_dst lse mean ptr dst grad_x grad_src",
    ),
    "backward, dropout and long rows": (
        "_backward_kernel",
        f"grad x score_src score_dst lse g ptr dst place seed dropout_ids grad_x {CHUNKS}",
    ),
    "backward of dst, GATv2": (
        "_backward_dst_kernel",
        "grad x x_dst att out lse weights signs ptr src grad_x_dst grad_att",
    ),
    "backward of dst, product": ("_backward_dst_kernel", "grad x x_dst out lse weights ptr src grad_x_dst"),
    "backward of src, GATv2": ("_backward_src_kernel", "grad att weights signs ptr dst place grad_x"),
    "backward, weights": (
        "_backward_kernel",
        "grad x score_src score_dst edge_weight lse mean ptr dst edge_ids grad_x grad_src grad_weight",
    ),
    "backward of dst, GATv2 with features": (
        "_backward_dst_kernel",
        "grad x x_dst att lin edge_attr out lse weights signs ptr src perm grad_x_dst grad_att",
    ),
    "backward of dst, product with keys and features": (
        "_backward_dst_kernel",
        "grad grad_out_edge x x_dst key query_edge edge_attr out lse weights ptr src perm grad_x_dst sums_edge",
    ),
    "backward of src, product with keys": (
        "_backward_src_kernel",
        "grad x_dst weights ptr dst place grad_x grad_key",
    ),
    "backward of src, product": ("_backward_src_kernel", "grad x_dst weights ptr dst place grad_x"),
}
DROPS = {kernel: KERNELS[kernel] for kernel in KERNELS if "dropout" in kernel} | {
    # not in KERNELS: with dropout one register is spilled at 256 channels of float32, for one model or many
    "backward of dst, GATv2 with dropout": (
        "_backward_dst_kernel",
        "grad x x_dst att out lse weights signs ptr src seed dropout_ids grad_x_dst grad_att",
    ),
}
OF_X = {"x", "x_dst", "key", "att", "lin", "edge_attr", "grad", "out", "out_plus", "grad_x", "grad_x_dst", "grad_key"}
OF_X |= {"values", "weight"}
IDS = {"src", "dst", "place", "perm", "edge_ids", "dropout_ids", "col"}
INTEGERS = dict.fromkeys(("num_chunks", "num_dst", "size", "models", "num_rows"), "i32")
INTEGERS |= dict.fromkeys(("num_items", "num_edges", "attr_stride", "grad_stride"), "i32")
INTEGERS |= dict.fromkeys(("values_stride", "weight_rows", "seed_stride", "x_stride"), "i32")
WIDE_IDS = {"ptr", "chunk_row", "chunk_start", "seed", "rows", "first"}


class Compiled(NamedTuple):
    """A kernel as compiled for one architecture."""

    ptx: str
    sass: str
    registers: int
    local: int  # loads from and stores to local memory: of spilled registers
    shared: int  # bytes


Compile = Callable[..., Compiled]


@pytest.fixture
def compile_kernel(tmp_path: Path, request: pytest.FixtureRequest) -> Compile:
    """Compile a kernel with some of its pointers; the summary of all tests reports what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compile_kernel(
        name: str,
        passed: str,
        dtype: str,
        *,
        sm: int = 90,
        num_warps: int,
        p: str = "number",
        divisible: tuple[str, ...] = (),
        **constants: int | str | None,
    ) -> Compiled:
        kernels = [getattr(module, name) for module in MODULES if hasattr(module, name)]
        kernel = next(
            kernel for kernel in kernels if {f"p_{pointer}" for pointer in passed.split()} <= {*kernel.arg_names}
        )
        signature, values, aligned = {}, {}, {}
        constants = {"STRIDE": None} | constants
        numbers = INTEGERS | ({"threshold": "i32"} if p == "number" else {"threshold": "*i64", "keep_scale": "*fp32"})
        for place, argument in enumerate(kernel.arg_names):
            pointer = argument.removeprefix("p_")
            if argument in constants or (argument.startswith("p_") and pointer not in passed.split()):
                signature[argument], values[(place,)] = "constexpr", constants.get(argument)
            elif argument.startswith("p_"):
                others = dict.fromkeys(IDS, "i32") | dict.fromkeys(WIDE_IDS, "i64") | {"kept": "i1", "signs": "u8"}
                element = dtype if pointer in OF_X else others.get(pointer, "fp32")
                signature[argument], aligned[(place,)] = f"*{element}", [["tt.divisibility", 16]]
            else:
                signature[argument] = numbers.get(argument, "fp32")
                if argument in divisible:
                    aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, values, aligned)
        options = {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        dump = [tool, "-sass", "-res-usage", cubin]
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        assert "EXIT" in sass
        registers, local = int(re.findall(r"\bREG:(\d+)", sass)[0]), len(re.findall(r"\b(?:STL|LDL)\b", sass))
        use = (registers, local, compiled.metadata.shared)
        request.node.user_properties.append(("compiled", [sm, compiled.hash, *use]))
        return Compiled(compiled.asm["ptx"], sass, *use)

    return compile_kernel


def test_edges_whose_loop_would_pass_int32_are_refused() -> None:
    operands, edges = SimpleNamespace(lin=0, x=torch.empty(1, 1, 1), size=1), SimpleNamespace(num_edges=2**31 - 1)
    with pytest.raises(ValueError, match=r"2147483647 edges, expected fewer than 2147450880 or at least 2\^31"):
        pair_edges.parameter_gradients(operands, *(torch.empty(1) for _ in range(3)), edges, 1, False)


# Loads and stores of spilled registers by Triton's version, then kernel, sm, heads, channels and dtype. GATv2's
# backward pass by dst takes at most 244 of the 255 registers with Triton 3.7.1, or 168 and a few more in local memory,
# for which more programs fit; 3.6.0 takes all and needs a few more, as it does for stacks of 32 channels with dropout.
SPILLS = {
    "3.9.0": {
        ("backward of dst, GATv2 with features", 90, 4, 256, "fp32"): 6,
    },
    "3.8.0": {
        ("backward of dst, GATv2 with dropout", 90, 12, 32, "fp32"): 4,
    },
    "3.7.1": {
        ("backward of dst, GATv2", 90, 3, 32, "bf16"): 4,
        ("backward of dst, GATv2 with dropout", 90, 8, 8, "fp32"): 6,
    },
    "3.6.0": {
        ("backward of dst, GATv2", 80, 8, 8, "bf16"): 11,
        ("backward of dst, GATv2", 90, 8, 8, "bf16"): 13,
        ("backward of dst, GATv2", 90, 3, 32, "bf16"): 4,
        ("backward of dst, GATv2 with features", 80, 8, 8, "bf16"): 3,
        ("backward of dst, GATv2 with features", 90, 3, 32, "bf16"): 2,
        ("backward of dst, GATv2 with features", 100, 8, 8, "bf16"): 2,
        ("backward of dst, product with keys and features", 90, 4, 256, "fp32"): 2,
        ("backward of dst, product with keys and features", 100, 4, 256, "fp32"): 2,
        ("backward of dst, GATv2 with dropout", 90, 8, 8, "bf16"): 135,
        ("backward of dst, GATv2 with dropout", 90, 16, 8, "fp32"): 74,
        ("backward of dst, GATv2 with dropout", 90, 80, 8, "fp32"): 85,
        ("backward of dst, GATv2 with dropout", 80, 12, 32, "fp32"): 61,
        ("backward of dst, GATv2 with dropout", 90, 12, 32, "fp32"): 80,
        ("backward of dst, GATv2 with dropout", 100, 12, 32, "fp32"): 46,
        ("backward, dropout and long rows", 80, 8, 8, "bf16"): 2,
        ("backward, dropout and long rows", 80, 12, 32, "fp32"): 4,
        ("backward, weights", 80, 8, 8, "bf16"): 4,
        ("backward, weights", 90, 8, 8, "bf16"): 2,
        ("forward, dropout and long rows", 90, 12, 32, "fp32"): 2,
    },
}


def assert_fits(code: Compiled, sm: int, spills: int = 0) -> None:
    """Registers are not spilled to local memory, and a program finds the shared memory that it needs."""
    assert code.local <= spills, f"{code.local} loads and stores of spilled registers"
    assert code.shared <= SHARED[sm] * 1024, f"{code.shared} bytes of shared memory, of {SHARED[sm]} KiB"


PIPELINED, WIDE = (8, 8, 490, "bf16", 2), (4, 256, 28, "fp32", 4)  # the most shared memory, the most registers


@compiles
@pytest.mark.parametrize(
    ("sm", "heads", "channels", "degree", "dtype", "size"),
    [
        (90, *WIDE),
        *(
            pytest.param(90, *sizes, marks=weekly)
            for sizes in ((8, 8, 15, "fp32", 4), PIPELINED, (3, 32, 14, "bf16", 2))
        ),
        *(pytest.param(sm, *sizes, marks=weekly) for sm in OTHERS for sizes in (PIPELINED, WIDE)),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills_and_wide_loads(
    kernel: str, sm: int, heads: int, channels: int, degree: int, dtype: str, size: int, compile_kernel: Compile
) -> None:
    assert_compiled_well(kernel, sm, heads, channels, degree, dtype, size, compile_kernel)


@compiles
@pytest.mark.parametrize(
    ("sm", "models", "heads", "channels", "degree", "dtype", "size"),
    [
        (90, 2, 12, 32, 28, "fp32", 4),
        pytest.param(90, 1, 8, 8, 15, "fp32", 4, marks=weekly),
        pytest.param(90, 2, 16, 8, 15, "fp32", 4, marks=weekly),
        pytest.param(90, 8, 8, 8, 490, "bf16", 2, marks=weekly),
        pytest.param(90, 10, 80, 8, 4, "fp32", 4, marks=weekly),
        *(pytest.param(sm, 2, 12, 32, 28, "fp32", 4, marks=weekly) for sm in OTHERS),
    ],
)
@pytest.mark.parametrize("p", ["number", "tensor"])
@pytest.mark.parametrize("kernel", DROPS)
def test_no_spills_and_wide_loads_with_dropout_of_many_models(
    kernel: str,
    p: str,
    sm: int,
    models: int,
    heads: int,
    channels: int,
    degree: int,
    dtype: str,
    size: int,
    compile_kernel: Compile,
) -> None:
    assert_compiled_well(kernel, sm, heads, channels, degree, dtype, size, compile_kernel, models, p)


def assert_compiled_well(
    kernel: str,
    sm: int,
    heads: int,
    channels: int,
    degree: int,
    dtype: str,
    size: int,
    compile_kernel: Compile,
    models: int = 1,
    p: str = "number",
) -> None:
    """No spills, and loads of 16 bytes wherever features are gathered."""
    name, passed = (KERNELS | DROPS)[kernel]
    size_of_edges, features = (16 if "edge_attr" in passed else 0), (16 if "query_edge" in passed else 0)
    tile = rows.tile_for(models, heads, channels, degree, features)
    sizes = {"EACH": heads // models, "C": channels, "D": size_of_edges, "BLOCK_D": max(1, features)}
    sizes |= {"models": None} if models == 1 else {}
    constants = {**sizes, "SPLIT": rows.SPLIT, "STAGES": tile.stages, **tile.blocks}
    code = compile_kernel(name, passed, dtype, sm=sm, p=p, **constants)
    assert_fits(code, sm, SPILLS.get(triton.__version__, {}).get((kernel, sm, heads, channels, dtype), 0))
    loads = re.findall(r"\b(?:LDG\.E|LDGSTS\.E\.BYPASS)(?:\.\w+)*?\.128\b", code.sass)
    gathers = 2 if name == "_backward_src_kernel" and "x_dst" in passed else 1
    slab = min(heads, tile.heads) if models == 1 else tile.heads
    at_least = gathers * tile.edges * slab * tile.channels * size // (16 * 32 * tile.warps)
    assert len(loads) >= at_least, f"{len(loads)} loads of 16 bytes, of {at_least} a thread"


TERMS = "score_src score_dst score_edge lse"
MEMORY = f"{TERMS} mean g ptr dst place edge_ids grad_src grad_edge {CHUNKS}"
TILE = {"BLOCK_E": 16, "BLOCK_H": 8, "BLOCK_C": 8, "num_warps": 1}
REST = {
    "merge": ("_merge_kernel", "chunks chunks_h rows first out lse out_plus mass_plus", TILE),
    "sum": (
        "_sum_kernel",
        "chunks rows first wide narrow",
        {"EACH_WIDE": 64, "EACH_NARROW": 8, "BLOCK_E": 8, "BLOCK_W": 256},
    ),
    "mean": ("_mean_kernel", "grad out out_plus mass_plus mean grad_dst", TILE),
    "mean of g": ("_segment_mean_kernel", f"g {TERMS} ptr src perm mean grad_dst", TILE),
    "mean of g, long rows": (
        "_segment_mean_kernel",
        f"g {TERMS} ptr src perm rows mean grad_dst",
        {**TILE, "BLOCK_E": 512, "num_warps": 8},
    ),
    "backward, second pass": ("_backward_kernel", MEMORY, {**TILE, "C": 0, "BLOCK_C": 1}),
    "gradient of features": (
        "_attr_kernel",
        "grad_out_edge query_edge weights dst perm grad_attr",
        {"D": 16, "BLOCK_E": 64, "BLOCK_D": 16},
    ),
    "dropout of features": ("_keep_kernel", "seed dropout_ids out", {"BLOCK": 256}),
    "edges dropped out": ("_kept_kernel", "seed dropout_ids kept", {"BLOCK_E": 512, "BLOCK_H": 1}),
    "features dropped out": ("_keep_kernel", "seed x out", {"BLOCK": 256}),
}


@compiles
@pytest.mark.parametrize(
    ("sm", "stages"), [(90, 3), *(pytest.param(*of, marks=weekly) for of in ((90, 1), (80, 3), (100, 3)))]
)
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=weekly)], ids=["alone", "stack"])
@pytest.mark.parametrize("kernel", REST)
def test_no_spills_in_the_rest(kernel: str, alone: bool, sm: int, stages: int, compile_kernel: Compile) -> None:
    name, passed, constants = REST[kernel]
    constants = {"EACH": 8, "C": 8, "SPLIT": rows.SPLIT, "STAGES": stages, "num_warps": 4} | constants
    constants |= {"models": None} if alone else {}
    assert_fits(compile_kernel(name, passed, "bf16", sm=sm, **constants), sm)


PARAMETERS = "att lin edge_attr weights signs perm grad_lin grad_attr"


@compiles
@pytest.mark.parametrize(
    ("sm", "each", "channels", "size"),
    [
        (90, 8, 8, 32),
        (90, 4, 64, 64),
        *(pytest.param(90, *sizes, marks=weekly) for sizes in ((8, 8, 16), (4, 64, 16), (4, 64, 32), (8, 8, 64))),
        *(pytest.param(sm, 4, 64, 64, marks=weekly) for sm in OTHERS),
    ],
)
def test_no_spills_in_the_gradient_of_parameters(
    sm: int, each: int, channels: int, size: int, compile_kernel: Compile
) -> None:
    """Of float32, the widest, for any number of features of an edge."""
    constants = {"models": None, "EACH": each, "C": channels, "D": size, "BLOCK_E": 32, "BLOCK_W": 64}
    constants |= {"BLOCK_D": pair_edges.BLOCK_D, "num_warps": pair_edges.WARPS}
    assert_fits(compile_kernel("_parameters_kernel", PARAMETERS, "fp32", sm=sm, **constants), sm)


@compiles
@pytest.mark.parametrize("sm", [86, *(pytest.param(sm, marks=weekly) for sm in SHARED if sm != 86)])
def test_a_wide_head_fits_in_shared_memory(sm: int, compile_kernel: Compile) -> None:
    passed = "grad x_dst weights ptr dst place grad_x"  # of all kernels the one with most to hold
    for channels in (1024, 2048, 4096):
        tile = rows.tile_for(1, 1, channels, 1000)
        constants = {
            "models": None,
            "EACH": 1,
            "C": channels,
            "SPLIT": rows.SPLIT,
            "STAGES": tile.stages,
            **tile.blocks,
        }
        assert_fits(compile_kernel("_backward_src_kernel", passed, "fp32", sm=sm, **constants), sm)


@compiles
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if "lse" in KERNELS[kernel][1] and "grad" in KERNELS[kernel][1]]
)
def test_a_minimum_of_scores_propagates_nan(kernel: str, compile_kernel: Compile) -> None:
    tile = rows.tile_for(1, 8, 8, 15)
    constants = {"models": None, "EACH": 8, "C": 8, "D": 16, "BLOCK_D": 16, "SPLIT": rows.SPLIT}
    constants |= {"STAGES": tile.stages, **tile.blocks}
    ptx = compile_kernel(*KERNELS[kernel], "fp32", **constants).ptx
    assert re.search(r"\bmin\.NaN\.f32\b", ptx) and not re.search(r"\bmin\.f32\b", ptx)


@compiles
def test_random_words_are_compared_without_a_sign(compile_kernel: Compile) -> None:
    ptx = compile_kernel("_keep_kernel", "seed dropout_ids out", "fp32", num_warps=4, BLOCK=256).ptx
    assert re.search(r"\bsetp\.\w+\.u32\b", ptx) and not re.search(r"\bsetp\.\w+\.s32\b", ptx)


@compiles
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dropout_of_features_reads_and_writes_four_at_once(dtype: str, compile_kernel: Compile) -> None:
    wide = {"fp32": "128", "bf16": "64"}[dtype]
    sizes = ("size", "x_stride")
    code = compile_kernel("_keep_kernel", "seed x out", dtype, num_warps=4, BLOCK=256, divisible=sizes)
    for access in ("LDG", "STG"):
        assert len(re.findall(rf"\b{access}\.E(?:\.\w+)*?\.{wide}\b", code.sass)) >= 2
    assert_fits(code, 90)


SUMS = "values weight ptr col out"


@compiles
@ARCHITECTURES
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=weekly)])
@pytest.mark.parametrize("given", [SUMS, f"{SUMS} seed", f"{SUMS} seed place"])
def test_sums_over_non_zeros_are_compiled_well(given: str, dtype: str, sm: int, compile_kernel: Compile) -> None:
    for channels, block_k in ((1, 32), (16, 32), (64, 16), (500, 4)):
        blocks = {"D": channels, "BLOCK_K": block_k, "BLOCK_D": min(256, triton.next_power_of_2(channels))}
        code = compile_kernel("_weighted_rows_kernel", given, dtype, sm=sm, num_warps=1, **blocks)
        assert_fits(code, sm)
        assert channels != 64 or re.search(r"\bLDG\.E(?:\.\w+)*?\.128\b", code.sass)
