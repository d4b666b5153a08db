"""The launches of CUDA kernels: which are compiled, without a GPU but not in the interpreter, and what they cost."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from gat_pyg.conv import GATConv, GATv2Conv, TransformerConv  # noqa: E402
from gat_pyg.features import gpu as features  # noqa: E402
from gat_pyg.features.pattern import Pattern  # noqa: E402
from gat_pyg.kernels import device  # noqa: E402
from gat_pyg.kernels.gpu import rows  # noqa: E402
from gat_pyg.tasks.nodes import NodeLabels  # noqa: E402
from tests.attention.comparisons import (  # noqa: E402
    stairs,
    turned,
)
from tests.attention.test_gpu import CASES, DEVICE, by_hand, compiles, modes_of, runs  # noqa: E402
from tests.features.test_features import bag_of_words  # noqa: E402
from tests.graphs import union  # noqa: E402
from tests.laws import edges_of, moved  # noqa: E402
from tests.scores import leaves_of  # noqa: E402
from tests.syncs import syncs  # noqa: E402

weekly = pytest.mark.weekly


@runs
def test_launches_live_as_long_as_their_edges() -> None:
    """What a launch needs of the edges and sizes is computed once, the chunks of long rows too."""
    edges = moved(edges_of(stairs(rows.SPLIT + 1)), DEVICE)
    walk = rows.walk_of(edges, "dst", 1, 8, 8)
    assert walk is rows.walk_of(edges, "dst", 1, 8, 8) is not rows.walk_of(edges, "dst", 1, 8, 4)
    assert walk.chunks is not None and walk.chunks is rows.chunks_of(edges, "dst")
    start = weakref.ref(walk.chunks.start)
    del edges, walk
    gc.collect()
    assert start() is None


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

    expected = {"_forward_kernel", "_merge_kernel"}
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
        (GATConv, None, "_forward _mean _backward _merge"),
        (GATConv, 3, "_forward _mean _backward _merge"),
        (GATv2Conv, 3, "_forward _backward_dst _backward_src _parameters _merge"),
        (TransformerConv, 3, "_forward _backward_dst _backward_src _attr _merge"),
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
