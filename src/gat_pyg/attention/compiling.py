"""How a function becomes machine code: by Numba when it is first called, and kept on disk for the processes to come."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile

log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def inline(function: Callable[..., Any]) -> Any:
    """A step of a kernel, inlined: a call would count references to each of its arrays."""
    return njit(forceinline=True, **OPTIONS)(function)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of a call when first called, and keep the code on disk where there is a folder for it."""
    kernel = njit(**OPTIONS)(function)
    try:
        kernel._cache = _Cache(function)  # as cache=True has it
    except RuntimeError as error:  # no folder to write to
        log.info("%s: the kernels are compiled anew in every process", error)
    _TOLD.kernels.add(kernel)
    return kernel


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """A file for each of the types that a function is compiled for, named by them.

    Numba numbers the files and keeps an index of the numbers. Two processes that compile at once, as ranks of a
    training do, may take the same number for different types, and one's code may then answer for the other's.
    """

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        try:
            stamp, kept, data = self._load_data(self._name(key))
        except Exception:  # not there, cut short, or of classes that are gone: the next to save has it right
            return None
        return data if (stamp, kept) == (self._source_stamp, key) else None

    def _name(self, key: Any) -> str:
        types, machine, _ = key
        name = hashlib.sha256(repr((self._version, OPTIONS, types, machine)).encode()).hexdigest()
        return str(self._data_name(int(name[:16], 16)))


class _Cache(FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file: Any = _Files(self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())


class _Told(event.Listener):  # type: ignore[misc]
    """Logs when a kernel is compiled, and not read from the disk."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()
        self.start = 0.0

    def on_start(self, made: Any) -> None:
        if (kernel := made.data["dispatcher"]) in self.kernels:
            self.start = time.perf_counter()
            log.info("compiling %s", kernel.__name__)

    def on_end(self, made: Any) -> None:
        if (kernel := made.data["dispatcher"]) in self.kernels:
            seconds, folder = time.perf_counter() - self.start, kernel.stats.cache_path or "memory alone"
            log.info("compiled %s in %.1f s, kept in %s", kernel.__name__, seconds, folder)


_TOLD = _Told()
event.register("numba:compile", _TOLD)
