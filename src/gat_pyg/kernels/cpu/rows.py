"""Rows of edges, cut into chunks and divided among threads; the sizes and buffers of a call."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...graph.edges import Edges, Side
from ...graph.memory import converted, elements, empty
from ...graph.remembered import remembered
from . import cache
from .draw import DRAWN

SPLIT = 1024  # edges of a chunk: its buffers stay in a core's L2
SMALL = 1 << 21  # numbers gathered, about a millisecond, below which one thread is as fast as several
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
NARROW = 16  # features of a head below which the heads of a vector are summed together


class Chunks(NamedTuple):
    """The rows of a CSR or CSC form, those of more than `SPLIT` edges in several chunks.

    Chunk v holds the edges `bounds[v] : bounds[v + 1]` of row `row[v]`, and its sums go to `slot[v]`: the row, or,
    for a chunk of a long row, a place after the last row. `long[q]` has its chunks at `first[q] : first[q + 1]`.
    """

    bounds: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    long: np.ndarray
    first: np.ndarray
    most: int  # edges of a chunk
    step: int = 1  # chunks that one thread takes together, from a multiple of it on

    @property
    def slots(self) -> int:
        """The number of sums: one for each row, and one for each chunk of a long row."""
        return int(self.first[-1])

    @property
    def long_rows(self) -> tuple[int, Tensor, Tensor]:
        """The number of rows, the long ones of them, and for each of their chunks which of these it belongs to."""
        return (
            int(self.first[0]),
            torch.from_numpy(self.long),
            torch.repeat_interleave(torch.from_numpy(np.diff(self.first))),
        )

    def reduced(self, of_chunks: Tensor, reduce: str = "sum") -> Tensor:
        """Return the sum or the largest of the values of each long row's chunks, in their order."""
        offsets = torch.from_numpy(self.first - self.first[0])
        return torch.segment_reduce(of_chunks.contiguous(), reduce, offsets=offsets, axis=0, unsafe=True)


def _divide(pointer: np.ndarray) -> Chunks:
    num_rows, most = pointer.size - 1, int(pointer[-1])
    if most > SPLIT:
        most = int(np.diff(pointer).max())
    rows = np.arange(num_rows, dtype=np.int32 if pointer.size < 2**31 else np.int64)
    if most <= SPLIT:
        return Chunks(pointer, rows, rows, np.empty(0, np.int64), np.array([num_rows]), most)
    chunks = np.maximum(1, -(-np.diff(pointer) // SPLIT))
    long = np.flatnonzero(chunks > 1)
    first = num_rows + np.concatenate([[0], np.cumsum(chunks[long])])
    row = np.repeat(rows, chunks)
    start = np.concatenate([[0], np.cumsum(chunks)[:-1]])
    bounds = np.append(pointer[row] + SPLIT * (np.arange(row.size) - start[row]), pointer[-1])
    slot = row.copy()
    slot[chunks[row] > 1] = np.arange(num_rows, first[-1])
    return Chunks(bounds, row, slot, long, first, SPLIT)


@remembered
def chunks_of(edges: Edges, side: Side) -> Chunks:
    """Return the chunks of rows by "dst" or by "src", remembered with the edges."""
    return _divide((edges.rowptr if side == "dst" else edges.transpose[0]).numpy())  # which keeps its memory


_POOL: list[ThreadPoolExecutor] = []
_POOL_LOCK = threading.Lock()


def _forget() -> None:
    _POOL.clear()
    _POOL_LOCK.release()


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(before=_POOL_LOCK.acquire, after_in_parent=_POOL_LOCK.release, after_in_child=_forget)


class Job(NamedTuple):
    """The work of a launch: the chunks of `bounds` for each of some models, and the buffer size per chunk."""

    bounds: np.ndarray
    models: int
    room: int  # numbers of a buffer
    gathers: int  # numbers that are read or made in all, about
    step: int = 1  # of `Chunks`


def run(kernel: Any, dtype: np.dtype[Any], job: Job, *args: Any) -> None:
    """Call `kernel(work, *args)` for ranges of chunks and for every model, on as many threads as torch has.

    A kernel gets the elements of each contiguous tensor in `args` as a vector.

    `work` is a tuple: the first chunk, the one after the last, the model, how many models there are, and the buffers of
    a chunk, eight with an element for each edge and lane.

    The kernels give up the GIL and the threads are Python's: Numba's own would be one more pool beside torch's, and
    not each kind of it survives a fork or two callers at once, as autograd's threads may be. A chunk is summed by one
    thread, so its bits do not depend on their number.
    """
    bounds, models, threads = job.bounds, job.models, torch.get_num_threads()
    arrays = [elements(arg) if type(arg) is Tensor else arg for arg in args]  # valid as long as `args`
    chunks = bounds.size - 1
    if threads == 1 or job.gathers < SMALL or cache.INTERPRETED is not None:
        buffers = _buffers(job, dtype)
        for model in range(models):
            kernel((0, chunks, model, models, buffers), *arrays)
        return
    cost = bounds + np.arange(bounds.size)  # an edge and a chunk cost about the same to begin with
    cuts = np.searchsorted(cost, np.linspace(cost[0], cost[-1], -(-4 * threads // models) + 1)[1:-1])
    cuts = (cuts // job.step * job.step).tolist()
    ranges = list(itertools.product(range(models), itertools.pairwise([0, *cuts, chunks])))
    turn = itertools.count()

    def share() -> None:
        buffers = _buffers(job, dtype)
        while (at := next(turn)) < len(ranges):
            model, (first, last) = ranges[at]
            kernel((first, last, model, models, buffers), *arrays)

    with _POOL_LOCK:
        if not _POOL:
            _POOL.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gat_pyg"))
    helpers = [_POOL[0].submit(share) for _ in range(threads - 1)]
    share()
    for helper in helpers:
        helper.result()


def _buffers(job: Job, dtype: np.dtype[Any]) -> np.ndarray:
    """Room for a chunk: eight elements for each edge and lane."""
    buffers = np.empty((8, job.room), dtype)
    if cache.INTERPRETED is not None:  # an element that is read before it is written
        buffers.fill(np.nan)
    return buffers


def merge_sums(models: int, chunks: Chunks, row: int, *sums: Tensor) -> None:
    """Add up the sums of the chunks of long rows, `row` elements each."""
    if chunks.long.size:
        rows, long, _ = chunks.long_rows
        for each in sums:
            for model in each.view(models, chunks.slots, row):
                model[long] = chunks.reduced(model[rows:])


def tile_of(channels: int) -> tuple[int, ...]:
    """The features that are summed at once, as `width_of` reads it."""
    return (0,) * next((power for power in (3, 4, 5) if 0 < channels <= 1 << power), 6)


class Shape(NamedTuple):
    """The sizes of a call, and what the kernels are compiled for."""

    dtype: np.dtype[Any]
    wide: torch.dtype  # the same, as torch has it
    batch: tuple[int, ...]  # (models,), or none
    models: int
    heads: int
    channels: int
    lanes: tuple[int, ...]  # heads of a vector, as `width_of` reads it: those that are computed at once
    narrow: Any  # the features of all these heads, where they are summed together, else None
    tile: tuple[int, ...]  # features of a head that are summed at once, where they are not
    ragged: bool | None  # True where the last vector of heads is not full, else None

    @classmethod
    def of(cls, x: Tensor, *others: Tensor | None, narrow: int = NARROW) -> Shape:
        """The sizes of x `[..., N, H, C]`, in the widest dtype; heads below `narrow` features are summed together."""
        *batch, _, heads, channels = x.shape
        wide = torch.float64 in [t.dtype for t in (x, *others) if t is not None]
        return cls._of(DOUBLE if wide else SINGLE, tuple(batch), heads, channels, narrow)

    @classmethod
    @functools.cache
    def _of(cls, dtype: np.dtype[Any], batch: tuple[int, ...], heads: int, channels: int, narrow: int) -> Shape:
        together = 0 < channels < narrow
        most = 16 if together and channels <= 8 else 8
        lanes = (0,) * math.ceil(math.log2(max(1, min(heads, most))))
        return cls(
            dtype,
            torch.float64 if dtype == DOUBLE else torch.float32,
            batch,
            math.prod(batch),
            heads,
            channels,
            lanes,
            (lanes, (0,) * channels) if together else None,
            tile_of(channels),
            True if heads % (1 << len(lanes)) else None,
        )

    @property
    def layout(self) -> tuple[Any, ...]:
        """`lanes`, `tile` and `ragged`, the types that a kernel is compiled for.

        Numba removes branches on None for arguments alone, not for items: `narrow` stays an argument.
        """
        return self.lanes, self.tile, self.ragged

    @property
    def sizes(self) -> tuple[int, int]:
        """The heads, and the channels of each."""
        return self.heads, self.channels

    def job(self, bounds: np.ndarray, most: int, edges: Edges) -> Job:
        """The work of a kernel over chunks of at most `most` edges."""
        work = self.models * edges.num_edges * self.heads * self.channels
        return Job(bounds, self.models, (most << len(self.lanes)) + 4 * DRAWN, work)

    def run(self, kernel: Any, chunks: Chunks, edges: Edges, *args: Any) -> None:
        """Run a kernel over chunks of rows: call `kernel(work, chunks, sizes, *args)`."""
        job = self.job(chunks.bounds, chunks.most, edges)._replace(step=chunks.step)
        run(kernel, self.dtype, job, chunks[:3], self.sizes, *args)

    def flat(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a tensor in a dtype, by default the call's, and with its elements in order; None stays None."""
        dtype = dtype or self.wide
        if tensor is None or (
            type(tensor) is Tensor and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_neg()
        ):
            return tensor
        tensor = converted(tensor.detach(), dtype)
        tensor = (tensor.resolve_neg() if tensor.is_neg() else tensor).contiguous()
        return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)

    def features(self, tensor: Tensor | None) -> Tensor | None:
        """Return `flat` of a tensor that a kernel reads by `load` alone: bfloat16 is not converted to float32."""
        return None if tensor is None else self.flat(tensor, self.loaded(tensor))

    def loaded(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype from which `load` reads a tensor."""
        half = tensor.dtype == torch.bfloat16 and self.wide == torch.float32
        return tensor.dtype if half else self.wide

    def empty(self, rows: int, *row: int) -> Tensor:
        """Allocate results `[rows, ...]`, with the axis of models in front, where there is one."""
        return empty(*self.batch, rows, *row, dtype=self.wide)

    def scratch(self, *size: int) -> np.ndarray:
        """Allocate a buffer that only kernels read, for each model."""
        return np.empty(self.models * math.prod(size), self.dtype)

    def first(self, values: Tensor, rows: int) -> Tensor:
        """Return the first `rows` rows of results: the sums of chunks may follow them."""
        axis = len(self.batch)
        return values if values.size(axis) == rows else values.narrow(axis, 0, rows)

    def sum(self, blocks: Tensor) -> Tensor:
        """Return the sum over the rows, added up in their order."""
        axis = len(self.batch)
        if blocks.size(axis) == 1:
            return blocks.squeeze(axis)
        total = empty(*self.batch, *blocks.shape[axis + 1 :], dtype=self.wide)
        row = math.prod(blocks.shape[axis + 1 :])
        shaped = elements(blocks).reshape(self.models, blocks.size(axis), row)
        np.sum(shaped, 1, out=elements(total).reshape(self.models, row))
        return total

    def drop(
        self, seed: Tensor | None, dropout: float | Tensor, ids: Callable[[], Tensor | None] = lambda: None
    ) -> Any:
        """Keys of the models, the `_limits` of each, ids; valid as long as the result of `ids`; without seed None."""
        if seed is None:
            return None
        edges = ids()
        keys = np.array(seed.tolist(), np.int64).reshape(-1)
        if isinstance(dropout, Tensor):
            each = tuple(dropout.expand(seed.shape).reshape(-1).tolist())
        else:
            each = (dropout,) * keys.size
        return keys, limits(each), None if edges is None else elements(edges)


@functools.lru_cache
def limits(each: tuple[float, ...]) -> np.ndarray:
    """Threshold and scale of each p, `[S, 2]`: an edge is kept if its random word reaches the threshold."""
    return np.array([(min(int(p * 2**32), 2**32 - 1), 1 / (1 - p) if p < 1 else 0) for p in each], np.float64)
