"""A stand-in for CUDA graphs on the CPU."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gat_pyg.training import cuda_graphs
from gat_pyg.training.cuda_graphs import Captured, CudaGraphs


class FakeGraph:
    """A CUDA graph on a CPU: a replay computes again and leaves the results in the same memory."""

    replays = 0
    cuda: FakeCuda

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.pool, self.valid = pool or self.cuda.graph_pool_handle(), True
        self.cuda.recording = self
        self.cuda.pools.append(self.pool)
        self.cuda.generator_is_recorded = True

    def capture_end(self) -> None:
        self.cuda.recording = None
        if self.valid or self.cuda.ends_failures:
            self.cuda.pools.remove(self.pool)
            self.cuda.generator_is_recorded = False
        if not self.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        FakeGraph.replays += 1
        for held, new in zip(self.captured.results, self.captured.compute(), strict=True):
            if held is not None:
                held.copy_(new)


class FakeCaptured(Captured):
    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        super().__init__(compute, buffers)
        self.compute, self.graph.captured = compute, self


class FakeCuda:
    """The functions of torch.cuda that a capture uses, on the CPU, with torch's state after a failed capture.

    The Python code of `torch.cuda.graph` and `torch.cuda.stream` is torch's own.
    """

    def __init__(self, ends_failures: bool) -> None:
        self.ends_failures = ends_failures  # as torch 2.13 does; before, allocator and generator stay in the capture
        self.handles = 0
        self.pools: list[Any] = []  # memory pools of the allocator for a capture
        self.recording: FakeGraph | None = None
        self.generator_is_recorded = False
        self.default = self.stream = self.new_stream()
        self.sync_mode = 0
        self.events: list[Any] = []

    def new_stream(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(device=0, wait_stream=lambda other: None)

    def set_stream(self, stream: types.SimpleNamespace) -> None:
        self.stream = stream

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def empty_cache(self) -> None:
        assert not self.pools, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def set_sync_debug_mode(self, mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)
        self.sync_mode = {"error": 2}.get(mode, mode)

    def is_usable(self) -> bool:
        return self.stream is self.default and not (self.generator_is_recorded or self.pools or self.sync_mode)


def faked(monkeypatch: pytest.MonkeyPatch, ends_failures: bool) -> FakeCuda:
    fake, zeros = FakeCuda(ends_failures), torch.zeros
    own = {
        "CUDAGraph": FakeGraph,
        "Stream": fake.new_stream,
        "current_stream": lambda device=None: fake.stream,
        "set_stream": fake.set_stream,
        "current_device": lambda: 0,
        "_get_device_index": lambda *arguments: 0,
        "synchronize": lambda: None,
        "empty_cache": fake.empty_cache,
        "graph_pool_handle": fake.graph_pool_handle,
        "get_sync_debug_mode": lambda: fake.sync_mode,
        "set_sync_debug_mode": fake.set_sync_debug_mode,
        "get_rng_state": torch.get_rng_state,  # the CPU's generator is the device's,
        "set_rng_state": torch.set_rng_state,
    }
    for name, value in own.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.empty(0, dtype=torch.uint8))  # and there is no other
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    monkeypatch.setattr(cuda_graphs, "Captured", FakeCaptured)
    monkeypatch.setattr(CudaGraphs, "_obstacle", lambda self, module: None)
    monkeypatch.setattr(FakeGraph, "cuda", fake, raising=False)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    return fake
