"""Compilation of kernels by Numba when they are first called, and the cache of their machine code on disk."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import linecache
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, ClassVar

import llvmlite
import numba
import numpy
from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator

log = logging.getLogger(__name__)

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and the CPU kernels need Numba's compiler. Unset it.")

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
INTERPRETED: Callable[[Callable[..., Any]], Any] | None = None  # in place of Numba's compiler, as the tests have one
REMEDY = "Set NUMBA_CACHE_DIR to a folder of your own, or let who installed gat_pyg run `gat-pyg warm`."
REASONS = {  # why compiled kernels on disk are not used -> the remedy
    "cannot be read": "Let the owner of the folder run `chmod -R go+rX` on it.",
    "are for another processor or other versions": "Run `gat-pyg warm` on this machine; NUMBA_CPU_NAME can name a "
    "processor whose code runs on several.",
    "are damaged or compiled from other source code": "Let the owner of the folder run `gat-pyg warm`.",
}
VERSIONS = (numba.__version__, llvmlite.__version__, numpy.__version__)


def inline(function: Callable[..., Any]) -> Any:
    """A step of a kernel, inlined: a call would count references to each of its arrays."""
    digest_file(function)
    return njit(forceinline=True, **OPTIONS)(function)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of a call when first called, and keep the code on disk where there is a folder for it."""
    digest_file(function)
    if INTERPRETED is not None:
        return INTERPRETED(function)
    kernel = njit(**OPTIONS)(function)
    try:
        kernel._cache = _Cache(function)  # the attribute that cache=True sets
    except RuntimeError as error:  # no folder to write to or to read from
        log.info("%s", error)
    _LISTENER.kernels.add(kernel)
    return kernel


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """One file per signature, named after it: a SHA-256 digest, then the pickled machine code.

    Numba numbers the files and keeps an index of the numbers. Two processes that compile at once, as ranks of a
    training do, may take the same number for different signatures, and the code of one may then answer for the other.

    Machine code from a damaged file would crash the process or compute wrong numbers, so nothing is unpickled unless
    the digest matches. The digest covers all sources of the kernel, the signature and the machine too: code for
    anything else is rejected in the same way. It does not protect against another user, who can write a digest as well;
    the permissions of the folder and of the file have to.

    Files are written into one folder and may be read from several: root may have compiled for all users of an image.
    Code that is there and cannot be used is compiled again, with a warning unless its file is replaced.
    """

    sources: Callable[[], Any]
    writable: bool
    others: Sequence[str] = ()  # further folders to read from

    def save(self, key: Any, data: Any) -> None:
        _check_private(self._cache_path, os.stat(self._cache_path))
        path, code = os.path.join(self._cache_path, self._name(key)), self._dump(data)
        descriptor, temporary = tempfile.mkstemp(dir=self._cache_path, prefix=f"{os.path.basename(path)}.tmp.")
        try:
            with open(descriptor, "wb") as file:
                file.write(self._digest(key, code) + code)
            os.chmod(temporary, 0o644)  # for other users of an image
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def load(self, key: Any) -> Any:
        unused: list[tuple[str, str]] = []  # warnings and their subjects
        for folder in (self._cache_path, *self.others):
            reason = ""
            try:
                with open(path := os.path.join(folder, self._name(key)), "rb") as file:
                    _check_private(folder, os.stat(folder))
                    _check_private(path, os.fstat(file.fileno()))
                    content = file.read()
            except FileNotFoundError:
                if glob.glob(f"{glob.escape(os.path.join(folder, self._stem(key)))}*.nbc"):
                    reason = "are for another processor or other versions"
            except OSError as error:
                if error.strerror is None:
                    unused.append((str(error), ""))
                else:
                    reason = "cannot be read"
            else:
                digest, code = content[:32], content[32:]
                if digest == self._digest(key, code):
                    return pickle.loads(code)
                if folder != self._cache_path or not self.writable:
                    reason = "are damaged or compiled from other source code"
            if reason:
                text = f"compiled kernels in {folder} {reason}, so they are compiled again. {REASONS[reason]}"
                unused.append((text, reason))
        for warning in unused:
            _warn(*warning)
        return None

    def _digest(self, key: Any, code: bytes) -> bytes:
        return hashlib.sha256(repr((VERSIONS, OPTIONS, self.sources(), key)).encode() + code).digest()

    def _name(self, key: Any) -> str:
        return f"{self._stem(key)}{_short_hash(VERSIONS, OPTIONS, key[1])}.nbc"

    def _stem(self, key: Any) -> str:
        """Return the beginning of a file's name, the same for every machine."""
        return f"{self._data_name(0).removesuffix('0.nbc')}{_short_hash(key[0])}."


def _short_hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def sources(kernel: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a kernel is built from: the digest of each file, and the value of each constant.

    The files are those of the kernel and of all functions that it calls, directly or not, in its own package. Numba
    would look at the kernel's file alone, and run old machine code after an edit of a step in another file.
    """
    package = kernel.__module__.partition(".")[0]
    functions, files, constants = [kernel], {}, {}
    for function in functions:
        files[function.__module__] = function.__globals__.get(_DIGEST) or digest_file(function)
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name)
            value = getattr(value, "py_func", getattr(value, "_defn", value))  # function of a step or intrinsic
            if isinstance(value, (int, float, str, bytes, tuple, numpy.generic)):
                constants[f"{function.__module__}.{name}"] = repr(value)
            elif isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
                functions += [value] * (value not in functions)
    return dict(sorted(files.items())), dict(sorted(constants.items()))


def _names(code: CodeType) -> set[str]:
    """The global names in a function and in those within it."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def digest_file(function: Any) -> str:
    """Return the digest of the file that defines a function, and keep it in the function's module.

    Called while the module is imported, so that an edit of the file while a process runs does not change it.
    """
    file = function.__code__.co_filename
    linecache.checkcache(file)
    source = "".join(linecache.getlines(file, function.__globals__))
    digest = hashlib.sha256(source.encode()).hexdigest()
    function.__globals__[_DIGEST] = digest
    return digest


_DIGEST = "__digest__"  # the name of the digest of a file among the globals of its module


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


_WARNED: set[str] = set()


def _warn(message: str, subject: str = "") -> None:
    """Log a warning once for its subject, by default the message, however many kernels it concerns."""
    if (subject or message) not in _WARNED:
        _WARNED.add(subject or message)
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


class _ReadableFolder:
    """A mixin for Numba's locators: find a folder that this user may only read, since root has written it."""

    get_cache_path: Callable[[], str]

    def ensure_cache_path(self) -> None:
        try:
            os.stat(os.path.join(self.get_cache_path(), ""))
        except PermissionError:
            if not isinstance(self, UserProvidedCacheLocator):  # a folder that someone has named: `load` warns
                raise


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [
        type(locator.__name__, (mixin, locator), {})
        for mixin in (_PrivateFolder, _ReadableFolder)
        for locator in CompileResultCacheImpl._locator_classes
    ]


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file: Any = _Files(self.cache_path, self._impl.filename_base, None)
        self._cache_file.sources = functools.cache(lambda: sources(function))
        self._cache_file.writable = self.writable
        kinds: Any = (kind for kind in self._impl_class._locator_classes if issubclass(kind, _ReadableFolder))
        locators = (kind.from_function(function, function.__code__.co_filename) for kind in kinds)
        folders = (locator.get_cache_path() for locator in locators if locator is not None)
        self._cache_file.others = [folder for folder in folders if folder != self.cache_path]

    @property
    def writable(self) -> bool:
        return isinstance(self._impl.locator, _PrivateFolder)

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
