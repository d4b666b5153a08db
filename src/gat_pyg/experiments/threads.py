"""The number of threads of a training: no more than its work keeps busy, and no more than the machine grants."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ELEMENTS = 1 << 21  # what a step computes for each thread; below it, threads wait for each other longer than they work
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables by which a user chooses the number
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's share of the CPU: microseconds in each period, or "max"


@contextmanager
def suited_threads(elements: int) -> Iterator[int]:
    """Limit torch and the CPU kernels to one thread for each `ELEMENTS` of `elements`, and undo it afterwards.

    The number never grows, and it stays as it is where the user set `OMP_NUM_THREADS` or `MKL_NUM_THREADS`. It depends
    on the work and the machine alone, not on how busy the machine is, so that a run's bits can be reproduced.

    Args:
        elements: About how many numbers one step computes.

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
    """Return the number of cores that this process may use: those it is bound to, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text(encoding="ascii").split()
        return cores if share == "max" else max(1, min(cores, math.ceil(int(share) / int(period))))
    except (OSError, ValueError):  # no such limit on this system
        return cores
