"""Files: atomic writes, appends, locks, errors of a full disk, and the packages that read."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import lock_descriptor
from packaging.requirements import Requirement

from .terminal import print_message

T = TypeVar("T")
PART = ".*.[0-9]*.part"  # pattern of incomplete files, whose names contain a process id: see `write_whole`
PATIENCE = 5.0  # seconds of waiting for a lock before a message
PAUSE = 0.01  # seconds between two attempts
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # packages that are imported by another name
FULL = {  # errors of a full disk
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would exceed the limit on the size of a file (ulimit -f, or a quota)",
}


def needs(package: str, extra: str) -> Any:
    """Import and return a package of one of gat_pyg's extras.

    >>> needs("json", "tables").loads("[1]")
    [1]

    Raises an ImportError with the install line if it is missing or too old.
    """
    name, install = package.partition(".")[0], f"Run: python -m pip install 'gat_pyg[{extra}]'"
    if (problem := unmet(extra).get(DISTRIBUTIONS.get(name, name))) is not None:
        raise ImportError(f"This needs {problem}. {install}")
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(f"This needs {error.name}, which is not installed. {install}") from error


@functools.cache
def unmet(extra: str) -> dict[str, str]:
    """Return the packages of an extra that are missing or too old, each with what is required and what is installed.

    There are none if gat_pyg itself is not installed, so that its requirements are unknown.
    """
    try:
        texts = importlib.metadata.requires("gat_pyg") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    problems = {}
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems[requirement.name] = f"{needed}, which is not installed"
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                problems[requirement.name] = f"{needed}, but {version} is installed"
    return problems


def add(descriptor: int, data: bytes, path: Path, sync: bool = False) -> None:
    """Write all of `data` at the end of the open file at `path`, or raise OSError and leave the file as it was."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    failed = _full(path)  # on a full disk, os.write writes only a part
    try:
        if os.write(descriptor, data) == len(data):
            if sync:
                os.fsync(descriptor)
            return
    except OSError as error:
        failed = OSError(error.errno, error.strerror, str(path))
    os.ftruncate(descriptor, end)
    raise failed


def _full(path: Path, number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def full(error: BaseException | None) -> int | None:
    """Return the number of an error or of its cause if it is in `FULL`, else None."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    return full(error.__cause__ or error.__context__)


def lock(descriptor: int, path: Path) -> None:
    """Wait for a lock on the open file at `path`, which is released when the file is closed or the process dies."""
    _wait_for(path, lambda: _takes(descriptor, path) or None)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager: hold the lock of the file at `path`, waiting while another process has it; then remove it."""
    descriptor = _wait_for(path, lambda: try_lock(path))
    try:
        yield
    finally:
        unlock(path, descriptor)


def _wait_for(path: Path, take: Callable[[], T | None]) -> T:
    """Return what `take` returns once it is not None; after `PATIENCE`, print which file is waited for."""
    start, reported = time.monotonic(), False
    while (taken := take()) is None:
        if not reported and time.monotonic() - start > PATIENCE:
            print_message(f"Waiting for {path}, which another process has locked")
            reported = True
        time.sleep(PAUSE)
    return taken


def _takes(descriptor: int, path: Path) -> bool:
    """Lock an open file, unless another process holds it; an error names the file."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def try_lock(path: Path) -> int | None:
    """Lock the file at `path` until this process ends, and return its descriptor; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _takes(descriptor, path):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # the last holder has removed the file meanwhile


def unlock(path: Path, descriptor: int) -> None:
    """Remove a file that `try_lock` locked, and release the lock."""
    if sys.platform == "win32":
        os.close(descriptor)
        with suppress(OSError):  # another process has it now
            path.unlink()
    else:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: `write` fills a temporary file, which is then renamed to `path`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_whole(path, lambda file: file.write_text("whole"))
    >>> path.read_text()
    'whole'

    Raises the errors of `write`, or an OSError that names `path` if the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except Exception as error:
        if (number := full(error)) is not None:
            raise _full(path, number) from error
        raise
    finally:
        beside.unlink(missing_ok=True)
