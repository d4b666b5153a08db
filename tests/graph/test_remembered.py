"""What is remembered of a graph: shared while nothing changes, freed with it, and never served stale."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import add_self_loops

import gat_pyg.graph.edges
import gat_pyg.graph.memory
from gat_pyg import GATConv
from gat_pyg.features.pattern import Pattern
from gat_pyg.graph.adjacency import neighbourhoods, with_self_loops
from gat_pyg.graph.edges import Edges
from gat_pyg.graph.remembered import _RESULTS, _lasting, remembered
from gat_pyg.graph.subgraph import first_edges, mask_to_index
from gat_pyg.models.baselines import normalised
from gat_pyg.paper.methods.chebyshev import scaled_laplacian
from gat_pyg.paper.methods.monet import coordinates
from gat_pyg.tasks.negatives import _non_links
from tests.graph.test_edges import LAYOUTS, adjacency
from tests.graphs import LOOPS, RANDOM, random


def test_neighbourhoods_are_cached_by_graph_and_options() -> None:
    index = RANDOM.index.clone()
    first = neighbourhoods(index, 40, 40, add_self_loops=True)
    assert neighbourhoods(index, 40, 40, add_self_loops=True) is first
    assert neighbourhoods(index, 40, 40) is not first
    assert neighbourhoods(index, 41, 41, add_self_loops=True) is not first
    assert neighbourhoods(index.clone(), 40, 40, add_self_loops=True) is not first


@pytest.mark.parametrize("layout", ["dense", *LAYOUTS])
def test_the_cache_is_freed_with_the_graph(layout: str) -> None:
    index = RANDOM.index.int() if layout == "dense" else adjacency(RANDOM, layout)  # int32: no copy on the way
    gc.collect()
    before = len(_RESULTS)
    edges = [weakref.ref(neighbourhoods(index, 40, 40, add_self_loops=loops)) for loops in (False, True)]
    assert len(_RESULTS) == before + 1 and all(ref() is not None for ref in edges)
    del index
    gc.collect()
    assert len(_RESULTS) == before and all(ref() is None for ref in edges)


def changes(
    old: torch.Tensor, new: torch.Tensor, folder: Path
) -> Iterator[tuple[str, torch.Tensor, Callable[[], Any]]]:
    """Edge lists that hold `old`, each with a function that writes `new` into it; torch counts the first three."""
    ids, map_of = new.numpy(), partial(np.memmap, folder / "ids", np.int64, shape=tuple(new.shape))
    buffer, written = bytearray(old.numpy()), map_of(mode="w+")
    written[:] = old.numpy()
    lists = iter([old.clone() for _ in range(20)])

    yield "in place", (index := next(lists)), partial(index.copy_, new)
    yield "a view", (index := next(lists)), partial(index.t().copy_, new.t())
    yield "resize_", (index := old.repeat(1, 2)), lambda: index.resize_(new.shape).copy_(new)
    yield "NumPy", (index := next(lists)), partial(np.copyto, index.numpy(), ids)
    yield "data", (index := next(lists)), partial(index.data.copy_, new)
    yield "another data", (index := next(lists)), partial(setattr, index, "data", new.clone())
    yield "set_", (index := next(lists)), partial(index.set_, new.clone())
    yield "its storage", (index := next(lists)), partial(index.untyped_storage().copy_, new.untyped_storage())
    yield "DLPack", (index := next(lists)), partial(torch.from_dlpack(index).copy_, new)
    index = torch.frombuffer(buffer, dtype=torch.int64).view(new.shape)
    yield "a buffer", index, partial(np.copyto, np.frombuffer(buffer, np.int64), ids.reshape(-1))
    yield "a memory map", torch.from_numpy(written), partial(np.copyto, written, ids)
    index = torch.from_file(str(folder / "ids"), True, new.numel(), dtype=torch.int64).view(new.shape).copy_(old)
    yield "a map of the same file", index, partial(np.copyto, map_of(mode="r+"), ids)
    yield (
        "another process",
        (index := next(lists).share_memory_()),
        partial(forked, partial(np.copyto, index.numpy(), ids)),
    )
    yield "foreign code", (index := next(lists)), partial(ctypes.memmove, index.data_ptr(), new.data_ptr(), new.nbytes)
    yield "scatter", (index := next(lists)), partial(dist.scatter, index, [new.clone()])
    yield "all_gather", (index := next(lists)), partial(dist.all_gather, [index], new.clone())


def forked(call: Callable[[], Any]) -> None:
    """Run a function in a fork of this process."""
    if (pid := os.fork()) == 0:
        call()
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("one_process")
def test_a_change_is_seen_whoever_makes_it(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:  # as without Numba
        monkeypatch.setattr(gat_pyg.graph.memory, "load_cpu_kernels", lambda: None)
        monkeypatch.setattr(gat_pyg.graph.edges, "load_cpu_kernels", lambda: None)
    conv, x = GATConv(3, 2, backend="segment"), torch.randn(40, 3)
    for new in (RANDOM.index.flip(1), random(40, 40, 300, seed=1).index):  # the same ids elsewhere; other ids
        for way, index, change in changes(RANDOM.index, new, tmp_path):
            edges, before = neighbourhoods(index, 40, 40), conv(x, index)
            assert neighbourhoods(index, 40, 40) is edges
            change()
            assert torch.equal(index, new)
            assert torch.equal(neighbourhoods(index, 40, 40).index.long(), new), way
            assert torch.equal(conv(x, index), conv(x, new.clone())) and not torch.equal(conv(x, index), before), way


def swap_two_ids(key: Any) -> None:
    """Swap two ids in the memory of a graph or a mask by NumPy."""
    ids = key
    if isinstance(key, SparseTensor):
        ids = key.storage.col()
    elif isinstance(key, EdgeIndex):
        ids = key.as_tensor()
    elif key.layout != torch.strided:
        ids = {torch.sparse_coo: key._indices, torch.sparse_csr: key.col_indices, torch.sparse_csc: key.row_indices}[
            key.layout
        ]()
    memory = (ids[-1] if ids.dim() == 2 else ids).numpy()
    other = int((memory != memory[0]).argmax())
    memory[[0, other]] = memory[[other, 0]]


@pytest.mark.sparse
def test_every_cached_result_follows_a_change_by_numpy() -> None:
    """Of every form of a graph, every layout of its memory and every function with a cache."""
    lists: dict[str, Any] = {
        "int64": RANDOM.index.clone(),
        "int32, an odd number": RANDOM.index[:, 1:].int(),
        "int8": RANDOM.index[:, 3:].to(torch.int8),
        "transposed": RANDOM.index.t().contiguous().t(),
        "columns of a longer list": RANDOM.index.clone()[:, 3:],
        "every other column": RANDOM.index.clone()[:, ::2],
        "EdgeIndex": EdgeIndex(RANDOM.index.clone(), sparse_size=(40, 40)),
    }
    with torch.inference_mode():
        lists["inference"] = RANDOM.index.clone()
    matrices = {layout: adjacency(RANDOM, layout) for layout in LAYOUTS}
    if WITH_TORCH_SPARSE:
        matrices["SparseTensor"] = SparseTensor.from_edge_index(RANDOM.index, sparse_sizes=(40, 40))
    mask, pairs, train = torch.arange(300) % 3 == 0, RANDOM.index.clone(), torch.arange(300) % 2 == 0
    links = pairs, torch.ones(300), train, 40
    cases: list[tuple[str, Callable[[], Any], Any]] = [
        (f"{function.__name__} of {form}", partial(function, graph, 40, 40), graph)
        for function in (neighbourhoods, with_self_loops)
        for form, graph in (lists | matrices).items()
    ]
    cases += [
        (f"{function.__name__} of {form}", partial(function, lists[form], 40, torch.float32), lists[form])
        for function in (normalised, coordinates, scaled_laplacian)
        for form in ("int64", "transposed")
    ]
    cases += [
        ("first_edges", lambda: first_edges(lists["int64"], None, 20)[0], lists["int64"]),
        ("Pattern.of", partial(Pattern.of, matrices["csr"]), matrices["csr"]),
        ("mask_to_index", partial(mask_to_index, mask), mask),
        ("_non_links", partial(_non_links, lists["int64"], *links), lists["int64"]),
        ("_non_links, pairs", partial(_non_links, lists["int64"], *links), pairs),
        ("_non_links, mask", partial(_non_links, lists["int64"], *links), train),
    ]
    for case, function, key in cases:
        first = function()
        assert function() is first, case
        swap_two_ids(key)
        assert function() is not first, case


def test_other_strides_are_seen() -> None:
    """Of a 2 x 2 edge list: the transpose has the same memory, version and shape."""
    index = torch.tensor([[0, 1], [2, 0]])
    neighbourhoods(index, 3, 3)
    index.data = index.data.t()
    assert torch.equal(neighbourhoods(index, 3, 3).index.long(), index)


def test_a_result_is_computed_once_per_graph_and_freed_with_it() -> None:
    @remembered
    def loops(edge_index: torch.Tensor, num_nodes: int, scale: float = 1.0) -> list[torch.Tensor]:
        return [scale * add_self_loops(edge_index, num_nodes=num_nodes)[0]]

    index = RANDOM.index.clone()
    with torch.inference_mode():
        first = loops(index, 40)
    assert loops(index, 40) is first and not first[0].is_inference()
    assert loops(index, 41) is not first and loops(index, 40, scale=2.0) is not first
    assert loops(index, 40) is first and loops(index.clone(), 40) is not first
    index[0, 0] = 7
    assert loops(index, 40) is not first and loops(index, 40)[0][0, 0] == 7
    result = weakref.ref(loops(index, 40)[0])
    del index, first
    gc.collect()
    assert result() is None
    with torch.inference_mode():
        index = RANDOM.index.clone()
        assert loops(index, 40)[0].shape == (2, 340) and loops(index, 40) is loops(index, 40)


def test_nothing_is_cached_while_a_cuda_graph_is_captured_and_what_is_cached_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the streams of the graph's device, which need not be the current one; a graph on a CPU has none."""
    names = "rows", "wide", "transpose", "ids_by_src", "dropout_ids_by_dst", "dropout_ids_by_src", "_inverse"
    monkeypatch.setattr("gat_pyg.graph.edges._FEW", 0)
    edges = Edges.with_loops(LOOPS.index, LOOPS.num_src, LOOPS.num_dst)
    pattern = Pattern(edges.rowptr, edges.src, edges.num_src)
    sizes = remembered(lambda graph: [streams[-1], graph.num_edges])
    makers: list[Callable[[], Any]] = [partial(sizes, edges), *(partial(getattr, edges, name) for name in names)]
    makers += [partial(getattr, pattern, "row"), partial(getattr, pattern, "transpose")]
    devices, streams, events = [0], ["side of 0"], list[str]()

    def stream(name: str) -> Any:
        methods = {
            of: lambda *other, of=of: events.append(f"{name} {of} {other}") for of in ("wait_stream", "synchronize")
        }
        return SimpleNamespace(name=name, **methods)

    @contextmanager
    def entered(values: list[Any], value: Any) -> Iterator[None]:
        values.append(getattr(value, "name", value))
        yield
        values.pop()

    default = stream("default of 1")
    for name, replaced in {
        "device": lambda device: entered(devices, device.index),
        "stream": lambda stream: entered(streams, stream),
        "current_stream": lambda device: default if streams[-1] == default.name else f"side of {device.index}",
        "default_stream": lambda device: {1: default}[device.index],
        "is_current_stream_capturing": lambda: captured[devices[-1]],
    }.items():
        monkeypatch.setattr(torch.cuda, name, replaced)
    captured = [True, True]
    assert [sizes(Edges.from_index(RANDOM.index, 40, 40))[0], devices, events] == ["side of 0", [0], []]  # on a CPU
    monkeypatch.setattr(
        _lasting, "__init__", lambda self, _: vars(self).update(device=torch.device("cuda", 1), default=None)
    )
    for make in makers:
        with pytest.raises(RuntimeError, match="Run the whole step, forward and backward, once before the capture"):
            make()
    captured[1] = False
    known = [make() for make in makers]
    assert known[0][0] == "default of 1" and streams == ["side of 0"]
    waits = ["default of 1 wait_stream ('side of 1',)", "default of 1 synchronize ()"]
    assert events == waits * (len(events) // 2) and len(events) >= 2 * len(makers)
    captured[1] = True
    assert all(make() is result for make, result in zip(makers, known, strict=True))


def test_another_tensor_that_changes_makes_a_new_result() -> None:
    scaled = remembered(lambda edge_index, weight: [weight.sum() * edge_index.size(1)])
    index, weight = RANDOM.index.clone(), torch.ones(3)
    first = scaled(index, weight)
    assert scaled(index, weight) is first and scaled(index, weight.clone()) is not first
    weight += 1
    assert scaled(index, weight)[0] == 2 * first[0]
    with torch.inference_mode():
        assert scaled(index, torch.ones(3))[0] == first[0]
