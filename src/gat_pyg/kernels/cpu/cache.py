"""How a function becomes machine code: by Numba when it is first called, and kept on disk for the processes to come."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import llvmlite
import numba
import numpy
from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
VERSIONS = (numba.__version__, llvmlite.__version__, numpy.__version__)


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
    """One file per signature, named after it: a SHA-256 digest, then the pickled machine code.

    Numba numbers the files and keeps an index of the numbers. Two processes that compile at once, as ranks of a
    training do, may take the same number for different signatures, and the code of one may then answer for the other.

    Machine code from a damaged file would crash the process or compute wrong numbers, so nothing is unpickled unless
    the digest matches. The digest covers the source, the signature and the machine too: code for anything else is
    rejected in the same way. It does not protect against another user, who can write a digest as well; the permissions
    of the folder and of the file have to.
    """

    def save(self, key: Any, data: Any) -> None:
        _check_private(self._cache_path, os.stat(self._cache_path))
        path, code = self._path(key), self._dump(data)
        descriptor, temporary = tempfile.mkstemp(dir=self._cache_path, prefix=f"{os.path.basename(path)}.tmp.")
        try:
            with open(descriptor, "wb") as file:
                file.write(self._digest(key, code) + code)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def load(self, key: Any) -> Any:
        try:
            _check_private(self._cache_path, os.stat(self._cache_path))
            with open(path := self._path(key), "rb") as file:
                _check_private(path, os.fstat(file.fileno()))
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(str(error))
            return None
        digest, code = content[:32], content[32:]
        return pickle.loads(code) if digest == self._digest(key, code) else None

    def _digest(self, key: Any, code: bytes) -> bytes:
        return hashlib.sha256(repr((VERSIONS, OPTIONS, self._source_stamp, key)).encode() + code).digest()

    def _path(self, key: Any) -> str:
        types, machine, _ = key
        name = hashlib.sha256(repr((VERSIONS, OPTIONS, types, machine)).encode()).hexdigest()
        return str(self._data_path(self._data_name(int(name[:16], 16))))


def _check_private(path: str, status: os.stat_result) -> None:
    """Raise PermissionError if a user other than this one and root may have written to a file or folder."""
    if sys.platform == "win32":  # has access control lists in place of owner ids and modes
        return
    if status.st_uid not in (os.geteuid(), 0):
        reason, remedy = f"it belongs to user {status.st_uid}", "Set NUMBA_CACHE_DIR to a folder of your own."
    elif status.st_mode & 0o022:
        reason = f"other users can write to it (mode {status.st_mode & 0o7777:o})"
        remedy = f"Run `chmod go-w {path}`, or set NUMBA_CACHE_DIR to a folder of your own."
    else:
        return
    raise PermissionError(f"{path} is not used for compiled kernels because {reason}. {remedy}")


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once, however many kernels it concerns."""
    log.warning(message)


class _PrivateFolder:
    """A mixin for Numba's locators, which try one folder after the other: skip those that other users can write to."""

    get_cache_path: Callable[[], str]

    def ensure_cache_path(self) -> None:
        folder = self.get_cache_path()
        os.makedirs(folder, mode=0o755, exist_ok=True)
        super().ensure_cache_path()  # type: ignore[misc]  # raises, without a warning, where we cannot write
        try:
            _check_private(folder, os.stat(folder))
        except PermissionError as error:
            _warn(str(error))
            raise


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [
        type(locator.__name__, (_PrivateFolder, locator), {}) for locator in CompileResultCacheImpl._locator_classes
    ]


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file: Any = _Files(self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            super().save_overload(signature, data)
        except OSError as error:  # the compiled kernel works all the same
            _warn(f"a compiled kernel is not kept on disk: {error}")


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
