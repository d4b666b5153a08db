"""A stand-in for a GPU in a rehearsal: all code for a GPU runs without one, on tiny graphs, in minutes.

CPU tensors go through the CUDA kernels, in Triton's interpreter. The clocks, the memory and the graphs of torch.cuda
are stand-ins: a CUDA graph computes anew, and writes the results to the same memory. Data sets are read as ever and cut
to a few nodes. No figure of a rehearsal means anything.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch_geometric.data import Data

SIZE = NODES, EDGES, LARGEST = 12, 60, 20  # of a graph: its nodes, its edges, the largest degree


class Event:
    """A moment of the CPU's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.moment - self.moment)


class Graph:
    """A CUDA graph, whose replay computes anew in the modes that the capture was in."""

    replay: Callable[[], None]

    def remember(self, compute: Callable[[], tuple[Any, ...]], results: tuple[Any, ...]) -> None:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def replay() -> None:
            with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):
                computed = compute()
            with torch.inference_mode(modes[0]), torch.no_grad():
                for held, new in zip(results, computed, strict=True):
                    if held is not None:
                        held.copy_(new)

        self.replay = replay


STREAM = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
CUDA: dict[str, Any] = {
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": lambda *_, **__: nullcontext(),
    "graph_pool_handle": lambda: (0, 0),
    "Stream": lambda *_: STREAM,
    "current_stream": lambda *_: STREAM,
    "stream": lambda stream: nullcontext(),
    "synchronize": lambda *_: None,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "get_sync_debug_mode": lambda: 0,
    "set_sync_debug_mode": lambda mode: None,
    "reset_peak_memory_stats": lambda *_: None,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 2**20,
}


def begin() -> None:
    """Replace the GPU in this process."""
    from gat_pyg import data
    from gat_pyg.conv import few, loops
    from gat_pyg.data.named import citation, proteins
    from gat_pyg.features import gpu as features
    from gat_pyg.graph import edges
    from gat_pyg.kernels import device
    from gat_pyg.kernels.gpu import rows
    from gat_pyg.training import cuda_graphs, loading
    from gat_pyg.training.cuda_graphs import Captured

    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    splat, int1 = builder.create_splat, importlib.import_module("triton.language").int1

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        """Keep a block of Booleans one: Triton's makes integers of them, which 3.9 refuses as a mask."""
        block = splat(self, kind, value)
        block.data = block.data.astype(bool) if kind.scalar == int1 else block.data
        return block

    builder.create_splat = create_splat
    edges.SPLIT = rows.SPLIT = 8  # so that rows are split in graphs of this size, too
    edges.is_remote = lambda tensor: True  # type: ignore[assignment]
    device.FILES["cpu"] = "gpu"
    few.FEW = 0  # a layer in one call is for a CPU alone, as is this sum
    features.with_loops = lambda x, *rest: torch.cat([x, loops._sums_of_edges(rest[0], x, *rest[1:])])
    assert hasattr(cuda_graphs.CudaGraphs, "_obstacle")
    cuda_graphs.CudaGraphs._obstacle = lambda self, module: None  # type: ignore[method-assign,assignment]
    cuda_graphs._no_draws = nullcontext  # type: ignore[attr-defined]  # a step draws on the CPU here

    class Captured(Captured):
        def __init__(self, compute: Callable[[], tuple[Any, ...]], *rest: Any) -> None:
            super().__init__(compute, *rest)
            self.graph.remember(compute, self.results)  # type: ignore[attr-defined]

    cuda_graphs.Captured = Captured  # type: ignore[misc]
    pays = loading.sparse_pays
    loading.sparse_pays = lambda task, model, device="cpu", *rest, **named: pays(task, model, "cuda", *rest, **named)
    for name, stand_in in CUDA.items():
        setattr(torch.cuda, name, stand_in)
    citation.planetoid = data.planetoid = cut(citation.planetoid)
    proteins.ppi = data.ppi = cut(proteins.ppi)


def cut(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same data set, of at most four graphs with `NODES` nodes."""

    @functools.wraps(read)
    def small(*arguments: Any, **options: Any) -> Any:
        task = read(*arguments, **options)
        if not task.has_many_graphs:
            one = [few(task.train[0])]
            return replace(task, train=one, val=one, test=one)
        train, val, test = ([few(graph) for graph in graphs[:4]] for graphs in (task.train, task.val, task.test))
        return replace(task, train=train, val=val, test=test)

    return small


def few(graph: Data) -> Data:
    """The first nodes of each mask, or of the graph."""
    masks = [graph[key] for key in ("train_mask", "val_mask", "test_mask") if key in graph]
    chosen = [mask.nonzero().squeeze(1)[: NODES // 3] for mask in masks] or [torch.arange(NODES)]
    return graph.subgraph(torch.cat(chosen).sort().values)
