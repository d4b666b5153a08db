"""The process of a run: memory, threads, signals, log messages."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from lightning import Trainer

from ..distributed.ranks import say

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _device(trainer: Trainer) -> str:
    device, precision = trainer.strategy.root_device, "" if trainer.precision == "32-true" else f", {trainer.precision}"
    processes = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        return f"{processes}{torch.cuda.get_device_name(device)}{precision}"
    threads = torch.get_num_threads()
    return f"{processes}{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}{precision}"


def keep_memory() -> None:
    """Let glibc keep memory that is freed for what is asked next.

    It gives large pieces back, and the pages of the next one are made anew.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def end(number: int, frame: FrameType | None) -> None:
    """End the process by a signal, with the status that shells give it."""
    raise SystemExit(128 + number)


@contextmanager
def _compiling_told() -> Iterator[None]:
    """Say once that kernels are compiled, since that takes seconds."""
    log = logging.getLogger("gat_pyg.kernels.cpu.cache")
    level = log.level

    def first(record: logging.LogRecord) -> bool:
        log.removeFilter(first)
        say("Compiling the kernels for their first use")
        return True

    log.addFilter(first)
    log.setLevel(logging.INFO)
    log.disabled = False  # Hydra disables all that there are
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(first)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Undo what ``trainer.deterministic`` sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
