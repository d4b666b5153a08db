"""The process of a run: devices, memory, threads, signals and log messages."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from lightning import Trainer
from torch import nn

from ..distributed.ranks import rank_zero_print
from ..settings.factory import Factory
from ..settings.settings import FIXED
from ..tasks.task import Task
from ..training.progress import quiet

ELEMENTS = 1 << 21  # elements of a step per thread; with fewer, threads wait for each other longer than they work
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables by which a user sets the number of threads
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's CPU quota: microseconds and period, or "max"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def device_name(trainer: Trainer) -> str:
    """Return the devices and the precision of a training, for the results."""
    device, precision = trainer.strategy.root_device, "" if trainer.precision == "32-true" else f", {trainer.precision}"
    processes = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        return f"{processes}{torch.cuda.get_device_name(device)}{precision}"
    threads = torch.get_num_threads()
    return f"{processes}{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}{precision}"


def check_gpus(trainer: Factory) -> None:
    """Let Lightning check that this machine has the GPUs that the settings require, before anything is written.

    Raises:
        ValueError: if it has fewer.
    """
    if trainer.get("accelerator") in ("gpu", "cuda"):
        with quiet():
            trainer(logger=False, **FIXED)


def keep_memory() -> None:
    """Make glibc keep freed memory for the next allocation.

    By default it returns large blocks to the system, so the pages of the next block have to be mapped again.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@functools.cache
def _freeze_once() -> None:
    gc.freeze()


def reset_peak() -> None:
    """Free what an earlier run leaves, and let `peak_mib` count from now on.

    A trainer and its data refer to each other, so Python frees them only when it looks for such cycles. What the first
    call finds, such as imported modules, is left out of later searches, which then take milliseconds.
    """
    gc.collect()
    _freeze_once()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux alone has it
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float | None:
    """Return the largest memory since `reset_peak` in MiB, of the GPU if there is one in use, else of this process.

    None where the system does not count it.
    """
    if torch.cuda.is_initialized() and (used := torch.cuda.max_memory_allocated()):
        return used / 2**20
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:")), None)
    return None


def end_with(parent: int) -> None:
    """Exit with status 1 if the process that started this one, `parent`, has ended.

    Torch's signal and the heartbeats of ranks end a process with its parent only after its imports, which take seconds.
    """
    if os.getppid() != parent:
        raise SystemExit(1)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit on a signal with the status that shells use, 128 + number."""
    raise SystemExit(128 + number)


@contextmanager
def compiling_reported() -> Iterator[None]:
    """Context manager: print a message when the first kernel is compiled, and at the end how long all of them took."""
    log = logging.getLogger("gat_pyg.kernels.cpu.cache")
    level, starts, seconds = log.level, list[float](), list[float]()

    def timed(record: logging.LogRecord) -> bool:
        if record.msg.startswith("compiling"):
            if not starts and not seconds:
                rank_zero_print("Compiling the kernels for their first use")
            starts.append(time.perf_counter())
        elif record.msg.startswith("compiled") and starts:
            seconds.append((time.perf_counter() - starts.pop()) * (not starts))  # a kernel within another one counts 0
        return True

    log.addFilter(timed)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(timed)
        if seconds:
            rank_zero_print(f"Compiled the kernels in {sum(seconds):.0f} s of the run; later runs find them")


@contextmanager
def deterministic() -> Iterator[None]:
    """Context manager: undo on exit what `trainer.deterministic` sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Threads ------------------------------------------------------------------------------------------------------------


def elements(task: Task, batch_size: int, models: Sequence[nn.Module]) -> int:
    """Estimate how many elements a step computes: for each node and edge, the parameters per input feature."""
    graphs = batch_size if task.has_many_graphs else 1
    size = sum(sorted((graph.num_nodes + graph.num_edges for graph in task.train), reverse=True)[:graphs])
    parameters = sum(parameter.numel() for model in models for parameter in model.parameters())
    return int(size * parameters // max(task.num_features, 1))


@contextmanager
def suited_threads(elements: int) -> Iterator[int]:
    """Context manager: limit torch and the CPU kernels to `elements / ELEMENTS` threads.

    The number of threads never grows, and does not change if the user set `OMP_NUM_THREADS` or `MKL_NUM_THREADS`. It
    depends only on the work and the machine, not on the machine's load, so that a run is reproducible bit by bit.

    Args:
        elements: the approximate number of elements that a step computes.

    Example:
        >>> before = torch.get_num_threads()
        >>> with suited_threads(1000) as threads:
        ...     threads == torch.get_num_threads()
        True
        >>> torch.get_num_threads() == before
        True
    """
    before = torch.get_num_threads()
    threads = before
    if not any(os.environ.get(name) for name in CHOSEN):
        threads = max(1, min(before, granted(), elements // ELEMENTS))
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def granted(quota: Path = QUOTA) -> int:
    """Return the number of cores that this process may use, by its CPU affinity and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text(encoding="ascii").split()
        return cores if share == "max" else max(1, min(cores, math.ceil(int(share) / int(period))))
    except (OSError, ValueError):  # no such limit on this system
        return cores
