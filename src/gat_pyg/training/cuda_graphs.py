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
    """A step on a graph: the state of its inputs, and its CUDA graph once it has been captured."""

    data: Data
    state: list[Any]
    held: list[Any]  # references, so that no id is reused and a replay reads no freed memory
    captured: Captured | None = None


def _plain_tensors(data: Data) -> list[Tensor] | None:
    """Return the tensors of a graph, or None if torch does not count the changes of one of them."""
    values = [value for _, value in data if isinstance(value, (Tensor, SparseTensor))]
    counted = (type(value) is Tensor and value.layout in _LAYOUTS and not value.is_inference() for value in values)
    return values if all(counted) else None


_LAYOUTS = (torch.strided, torch.sparse_csr)


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that store a dense or CSR tensor."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _reason(error: Exception) -> str:
    """Return the first line of an error and where it was raised."""
    first = error.__context__ or error  # ending a failed capture raises another error
    message, *_ = f"{type(first).__name__}: {first}".splitlines()
    *_, frame = traceback.extract_tb(first.__traceback__)
    return f"{message} (in {frame.name}, {frame.filename}:{frame.lineno})"


SMALL = 1_000_000  # edges; in larger graphs launches take little of the time, and a CUDA graph too much memory


class Captured:
    """A computation as a CUDA graph: captured once, then replayed by a single launch.

    `compute` reads all inputs from the same memory every time and returns tensors; `results` are those of the last
    replay. Random numbers come from the device's default generator, as without a CUDA graph: after the same seed they
    are the same. The capture restores the generator and the `buffers`, the tensors that `compute` changes beside its
    results.

    Raises the errors of the driver and of operations that cannot be captured, such as those that make the host wait for
    the GPU, and RuntimeError if `compute` draws random numbers on the CPU. The device remains usable afterwards.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, copies = torch.cuda.get_rng_state(), [buffer.clone() for buffer in buffers]
        try:
            self._warm_up(compute)
            with torch.cuda.stream(torch.cuda.current_stream()):  # torch.cuda.graph restores it only on success
                self.results = self._capture(compute)
        finally:
            torch.cuda.set_rng_state(before)
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)

    def _warm_up(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        """Call `compute` twice to compile everything, and once more to raise if the host waits for the GPU."""
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
            with suppress(RuntimeError):  # since torch 2.13 the allocator has already left it
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
    """Context manager: restore the CPU's generators, and raise RuntimeError if one was used: a replay does not."""
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
    """Context manager: operations that make the host wait for the GPU raise RuntimeError, if torch detects them."""
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
