"""Compilation of kernels by Numba when they are first called, and the cache of their machine code on disk.

Numba's own cache does not do for three kinds of first calls. It numbers the files of a kernel, and two processes that
compile at once, as ranks of a training do, may take one number for two signatures: the code of one then answers for
the other. It reads only a folder that it can write to, so other users compile again what root has compiled for an
image. And it compares the kernel's own file with the source, not those of the steps that the kernel is built from.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
import numba
import numpy
from numba import njit
from numba._dynfunc import make_function  # type: ignore[import-not-found]
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

log = logging.getLogger(__name__)

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and the CPU kernels need Numba's compiler. Unset it.")

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
INTERPRETED: Callable[[Callable[..., Any]], Any] | None = None  # in place of Numba's compiler, as the tests have one
REMEDY = "Set NUMBA_CACHE_DIR to a folder of your own, or let who installed gat_pyg call the layer once."
REASONS = {  # why compiled kernels on disk are not used -> the remedy
    "cannot be read": "Let the owner of the folder run `chmod -R go+rX` on it.",
    "are for another processor or other versions": "Let the owner of the folder call the layer on this machine; "
    "NUMBA_CPU_NAME can name a processor whose code runs on several.",
    "are damaged or compiled from other source code": "Let the owner of the folder call the layer once.",
}
VERSIONS = (numba.__version__, llvmlite.__version__, numpy.__version__)
FILES = sorted([*Path(__file__).parents[2].rglob("cpu*.py"), *Path(__file__).parent.glob("*.py")])  # of all kernels
SOURCES = hashlib.sha256(b"\0".join(file.read_bytes() for file in FILES)).hexdigest()


class _Linked(JITCodeLibrary):  # type: ignore[misc]
    """The code of a step, which only the kernels that link it optimise and turn into machine code."""

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _Step(Compiler):  # type: ignore[misc]
    """Numba's compiler, without machine code."""

    def __init__(self, typing: Any, target: Any, library: Any, *arguments: Any) -> None:
        super().__init__(typing, target, _Linked(target.codegen(), "step"), *arguments)
        self.state.targetctx.get_executable = lambda library, description, environment: make_function(
            description.lookup_module(), description.qualname, "", 0, environment, (library,)
        )


def step(function: Callable[..., Any], allocates: bool = False) -> Any:
    """A step of kernels, which have one copy of it each. Only kernels can call it."""
    return njit(pipeline_class=_Step, no_cpython_wrapper=True, _nrt=allocates, **OPTIONS)(function)


def inline(function: Callable[..., Any]) -> Any:
    """A step of a kernel, inlined: a call would count references to each of its arrays. Only kernels can call it.

    It is optimised before it is inlined: kernels of large graphs are faster so.
    """
    return njit(forceinline=True, no_cpython_wrapper=True, **OPTIONS)(function)


def compiled(function: Callable[..., Any], allocates: bool = True) -> Any:
    """Compile for the types of a call when first called, and keep the code on disk where there is a folder for it.

    A kernel or step that allocates no arrays need not count references to any, which takes a fifth of the compilation.
    """
    if INTERPRETED is not None:
        return INTERPRETED(function)
    kernel = njit(_nrt=allocates, **OPTIONS)(function)
    try:
        kernel._cache = _Cache(function)  # the attribute that cache=True sets
    except RuntimeError as error:  # no folder to write to or to read from
        log.info("%s", error)
    _LISTENER.kernels.add(kernel)
    return kernel


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """One file per signature and machine, named after both: a SHA-256 digest, then the pickled machine code.

    The digest covers the sources of all kernels, the versions, the signature and the machine too, so code that is
    damaged or for anything else is never unpickled: it would crash the process or compute wrong numbers. It does not
    protect against another user, who can write a digest as well; the permissions of the folder have to.
    """

    folders: list[str]  # to read from
    writable: bool  # the first of them

    def save(self, key: Any, data: Any) -> None:
        code = self._dump(data)
        with self._open_for_write(self._data_path(self._name(key))) as file:
            file.write(self._digest(key, code) + code)

    def load(self, key: Any) -> Any:
        unused = []
        for folder in self.folders:
            path = os.path.join(folder, self._name(key))
            try:
                with open(path, "rb") as file:
                    digest, code = file.read(32), file.read()
            except FileNotFoundError:
                if glob.glob(f"{glob.escape(os.path.join(folder, self._stem(key)))}*.nbc"):
                    unused.append((folder, "are for another processor or other versions"))
            except OSError:
                unused.append((folder, "cannot be read"))
            else:
                if digest == self._digest(key, code):
                    return pickle.loads(code)
                if folder != self._cache_path or not self.writable:  # else the file is replaced
                    unused.append((folder, "are damaged or compiled from other source code"))
        for folder, reason in unused:
            _warn(f"compiled kernels in {folder} {reason}, so they are compiled again. {REASONS[reason]}", reason)
        return None

    def _digest(self, key: Any, code: bytes) -> bytes:
        return hashlib.sha256(repr((VERSIONS, OPTIONS, self._source_stamp, key)).encode() + code).digest()

    def _name(self, key: Any) -> str:
        return f"{self._stem(key)}{_short_hash(VERSIONS, OPTIONS, key[1])}.nbc"

    def _stem(self, key: Any) -> str:
        """Return the beginning of a file's name, the same for every machine."""
        return f"{self._data_name(0).removesuffix('0.nbc')}{_short_hash(key[0])}."


def _short_hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


_WARNED: set[str] = set()


def _warn(message: str, subject: str = "") -> None:
    """Log a warning once for its subject, by default the message, however many kernels it concerns."""
    if (subject or message) not in _WARNED:
        _WARNED.add(subject or message)
        log.warning(message)


@functools.cache
def _is_private(folder: str) -> bool:
    """Return False, with a warning, if a user other than this one and root may have written to a folder."""
    try:
        status = os.stat(folder)
    except OSError as error:
        return isinstance(error, PermissionError) and bool(numba.config.CACHE_DIR)  # a named folder: `load` warns
    if sys.platform == "win32":  # has access control lists in place of owner ids and modes
        return True
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022:
        return True
    _warn(
        f"{folder} is not used for compiled kernels because other users can write to it (owner {status.st_uid}, mode "
        f"{status.st_mode & 0o7777:o}). Run `chmod go-w {folder}`, or set NUMBA_CACHE_DIR to a folder of your own."
    )
    return False


@functools.cache
def _is_writable(folder: str) -> bool:
    """Return True if compiled kernels may be written to a folder, which is made if need be."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return _is_private(folder)


class _AnyFolder:
    """A mixin for Numba's locators: find a folder, whether it can be written to or not."""

    def ensure_cache_path(self) -> None:
        """Leave the checks to `_is_writable` and `_is_private`."""


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar[list[Any]] = [
        type(locator.__name__, (_AnyFolder, locator), {}) for locator in CompileResultCacheImpl._locator_classes
    ]


class _Cache(FunctionCache):  # type: ignore[misc]
    """Write to the first folder of Numba's that is writable and private, and read from all that are private."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file = function.__code__.co_filename
        locators = [kind.from_function(function, file) for kind in self._impl_class._locator_classes]
        folders = [locator.get_cache_path() for locator in locators if locator is not None]
        writable = next(filter(_is_writable, folders), None)
        readable = list(filter(_is_private, folders))
        if not readable:
            raise RuntimeError(f"there is no folder for compiled kernels, neither of {', '.join(folders)}")
        self.writable = writable is not None
        path = self._cache_path = writable or readable[0]
        self._cache_file: Any = _Files(path, self._impl.filename_base, SOURCES)
        self._cache_file.folders = [path, *(folder for folder in readable if folder != path)]
        self._cache_file.writable = self.writable

    def save_overload(self, signature: Any, data: Any) -> None:
        if not self.writable:
            return
        try:
            super().save_overload(signature, data)
        except OSError as error:  # the compiled kernel works all the same
            _warn(f"a compiled kernel is not kept on disk: {error}. {REMEDY}")


class _Listener(event.Listener):  # type: ignore[misc]
    """A log of the kernels that are compiled, and not read from the disk."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()
        self.start = 0.0

    def on_start(self, compilation: Any) -> None:
        if (kernel := compilation.data["dispatcher"]) in self.kernels:
            self.start = time.perf_counter()
            log.info("compiling %s", kernel.__name__)

    def on_end(self, compilation: Any) -> None:
        if (kernel := compilation.data["dispatcher"]) in self.kernels:
            seconds, kept = time.perf_counter() - self.start, getattr(kernel._cache, "writable", False)
            where = kernel._cache.cache_path if kept else "memory alone"
            log.info("compiled %s in %.1f s, kept in %s", kernel.__name__, seconds, where)
            if not kept:
                _warn(f"every process compiles its kernels again, since no folder can be written. {REMEDY}")


_LISTENER = _Listener()
event.register("numba:compile", _LISTENER)
