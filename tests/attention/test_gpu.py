"""The CUDA kernels of attention against the reference, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from gat_pyg.features import gpu as features  # noqa: E402
from gat_pyg.graph.adjacency import EdgeList  # noqa: E402
from gat_pyg.graph.edges import Edges  # noqa: E402
from gat_pyg.kernels import device  # noqa: E402
from gat_pyg.kernels.gpu import draw, rows  # noqa: E402
from tests.attention.comparisons import (  # noqa: E402
    Place,
    assert_same,
    check,
    direction_of,
    spy,
    stairs,
    turned,
)
from tests.attention.conftest import nan_as_on_a_gpu  # noqa: E402
from tests.graphs import BIPARTITE, RANDOM, Graph, random, union  # noqa: E402
from tests.laws import edges_of, moved  # noqa: E402
from tests.scores import ADDITIVE, DOT_EDGES, GATV2, GATV2_EDGES, SCORES, SHAPES, Tensors, leaves_of, score_of  # noqa: E402

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
        grid, sizes = (1, triton.cdiv(heads, block)), rows.stacked(models, heads, BLOCK_E=4, BLOCK_H=block)
        drop = draw.Dropout(torch.tensor(seeds, device=DEVICE), ids, 2.0)
        draw._kept_kernel[grid](kept, 4, drop, -1 << 31, **sizes)
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
        (read_src, read_dst, _), stride = additive._terms(torch.Size(), score_of(sliced))
        assert stride == (2 * heads if limit else None)
        assert (read_src is src) == (read_dst is dst) == bool(limit)
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
    of_compiler = Operation(ends[0], score_of(beside), EdgeList(graph.index.to(DEVICE), graph.num_dst))
    out = fused.attend_for_compiler(of_compiler, keeps=False)[0]
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
