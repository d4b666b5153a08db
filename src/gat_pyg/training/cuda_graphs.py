"""A training step captured as a CUDA graph."""

from __future__ import annotations

import pickle
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.typing import SparseTensor


@dataclass
class _Repeated:
    """A step on a graph, what it reads, and its CUDA graph once it has been captured."""

    data: Data
    state: list[Any]
    held: list[Any]  # so that ids stay those of these tensors, and a replay reads no freed memory
    captured: Captured | None = None


def _plain_tensors(data: Data) -> list[Tensor] | None:
    """Return the tensors of a graph, or None if it holds any whose changes torch does not count."""
    values = [value for _, value in data if isinstance(value, (Tensor, SparseTensor))]
    seen = (type(value) is Tensor and value.layout in _LAYOUTS and not value.is_inference() for value in values)
    return values if all(seen) else None


_LAYOUTS = (torch.strided, torch.sparse_csr)


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in whose memory a tensor is."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _reason(error: Exception) -> str:
    """Return the first line of an error and where it was raised."""
    first = error.__context__ or error  # the end of a failed capture raises an error of its own
    message, *_ = f"{type(first).__name__}: {first}".splitlines()
    *_, frame = traceback.extract_tb(first.__traceback__)
    return f"{message} (in {frame.name}, {frame.filename}:{frame.lineno})"


SMALL = 1_000_000  # edges; with more, launching kernels takes little of the time, and the memory is worth more


class Captured:
    """A computation as a CUDA graph: captured once, then replayed by a single launch.

    `compute` takes all its inputs from the same memory every time and gives tensors; `results` hold what the last
    replay gave. Chance comes from the device's default generator as it does without a graph, so that seeding it before
    a replay gives the numbers that it would give there. The generator is left as it was, and so is what `compute`
    changes beside its results, the `buffers`.

    Raises what the driver or an operation that cannot be captured raises, such as one that makes the host wait for the
    GPU, and RuntimeError where `compute` draws random numbers on the CPU. The device is then usable as before.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, held = torch.cuda.get_rng_state(), [buffer.clone() for buffer in buffers]
        try:
            self._warm_up(compute)
            with torch.cuda.stream(torch.cuda.current_stream()):  # torch.cuda.graph restores it only where it succeeds
                self.results = self._capture(compute)
        finally:
            torch.cuda.set_rng_state(before)
            for buffer, was in zip(buffers, held, strict=True):
                buffer.copy_(was)

    def _warm_up(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        """Call it twice to build and compile everything, then once more, raising if the host waits for the GPU."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), _no_draws():
                compute()
                compute()
                with _no_sync():
                    compute()
        finally:
            current.wait_stream(stream)

    def _capture(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                return compute()
        except BaseException:
            # Before torch 2.13, the allocator and the default generator stay in the failed capture: empty_cache() and
            # the next random numbers would raise. The generator leaves it when another capture succeeds.
            with suppress(RuntimeError):  # from torch 2.13 on: the allocator has left it
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise

    def __call__(self) -> tuple[Tensor, ...]:
        """Replay it."""
        self.graph.replay()
        return self.results


@contextmanager
def _no_draws() -> Iterator[None]:
    """Restore the CPU's generators. Raise RuntimeError where one was used, since a replay would not use it again."""
    before = _generators()
    try:
        yield
        if pickle.dumps(_generators()) != pickle.dumps(before):
            raise RuntimeError(
                "the step draws random numbers on the CPU, which a replay would not repeat; draw them on the GPU "
                "(device=x.device)"
            )
    finally:
        words, python, numpy = before
        torch.set_rng_state(torch.from_numpy(words))
        random.setstate(python)
        np.random.set_state(numpy)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()


@contextmanager
def _no_sync() -> Iterator[None]:
    """Raise RuntimeError from operations that make the host wait for the GPU. torch recognises most of them."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
