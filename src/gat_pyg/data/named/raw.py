"""Raw files: their folder, their download, and errors on reading them."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from pickle import UnpicklingError
from urllib.error import URLError
from zipfile import BadZipFile

import numpy as np
from torch import Tensor

from ..arrays.formats import as_tensor


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of raw files: `root`, else `$GAT_PYG_DATA`, else `~/.cache/gat_pyg`.

    >>> data_root("somewhere").name
    'somewhere'
    """
    return Path(root or os.environ.get("GAT_PYG_DATA") or "~/.cache/gat_pyg").expanduser()


def raw_folder(folder: Path, files: Sequence[str], fetch: Callable[[str, Sequence[str]], None], title: str) -> Path:
    """Download the missing ones of `files`, and return `folder`.

    `fetch` writes to a temporary folder beside `folder`, from which each file is moved atomically. So an interrupted
    download leaves no incomplete file.

    Raises:
        FileNotFoundError: if the download fails.
    """
    missing = [file for file in files if not (folder / file).exists()]
    if not missing:
        return folder
    absent = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as fresh:
            fetch(fresh, missing)
            for file in missing:
                try:
                    os.replace(Path(fresh) / file, folder / file)
                except OSError:  # if it is a folder that another process has moved there meanwhile
                    if not (folder / file).exists():
                        raise
    except Exception as error:  # any error of the network, the disk or the archive
        with suppress(OSError):  # non-empty folders stay
            for parent in absent:
                parent.rmdir()
        raise not_downloaded(f"{title}: {', '.join(missing)} not found in {folder}, and", folder, error) from error
    return folder


@contextmanager
def downloading(name: str, folder: Path) -> Iterator[None]:
    """Context manager for a class of PyG or OGB that reads `folder`, or downloads to it.

    Raises:
        FileNotFoundError: if the download fails.
    """
    start = time.time()
    try:
        yield
    except Exception as error:
        if not is_of_network(error):
            raise
        raise not_downloaded(f"{name} was", folder_of_download(folder, start), error) from error


def folder_of_download(folder: Path, start: float) -> Path:
    """Return the folder for the raw files of a class of PyG or OGB whose download to `folder` failed.

    It is the newest empty one that the class has created since `start`, in seconds since 1970, and is removed again.
    """
    empty = [path for path in (folder, *folder.rglob("*")) if path.is_dir() and not any(path.iterdir())]
    times = {path: path.stat().st_mtime for path in empty}
    newest = max(times, key=times.__getitem__, default=None)
    if newest is None or times[newest] < start - 1:  # clocks of file systems are coarse
        return folder
    with suppress(OSError):  # non-empty folders stay
        for path in (newest, *newest.parents):
            if path.is_relative_to(folder):
                path.rmdir()
    return newest if newest.name == "raw" else newest / "raw"


def not_downloaded(what: str, folder: Path, error: BaseException) -> FileNotFoundError:
    """Return the error for data that are not in a folder and could not be downloaded."""
    return FileNotFoundError(
        f"{what} not downloaded: {_cause(error)}. Put the raw files in {folder}, or point data_root or $GAT_PYG_DATA "
        "at a folder that has them, or use dataset=digits, which needs no network."
    )


def is_of_network(error: BaseException | None) -> bool:
    """Return True for an error of a connection, by urllib, requests or aiohttp: an OSError that names no file."""
    named = isinstance(error, FileNotFoundError) or getattr(error, "filename", None) is not None
    return isinstance(error, (URLError, HTTPException)) or (isinstance(error, OSError) and not named)


def _cause(error: BaseException) -> str:
    """Return the reason for a failed download without the wrapper of urllib or aiohttp."""
    inner = getattr(error, "reason", None)
    inner = inner if isinstance(inner, OSError) else error
    if isinstance(inner, OSError) and inner.strerror and inner.filename is None:
        return inner.strerror
    return str(inner) or type(inner).__name__


class _UnreadableError(ValueError):
    """An error on reading a file, with the file's name in its message."""


# errors that a truncated file causes; others may be a bug in the reader
_OF_FILES = (ValueError, EOFError, LookupError, UnpicklingError, BadZipFile, struct.error, zlib.error)
_HINT = " It is truncated or of another kind. Delete it to have it downloaded again, or put a whole copy in its place."


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager: turn any error of a reader into a ValueError that names the file."""
    try:
        yield
    except _UnreadableError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
            raise  # an error of the system, whose message names the file
        hint = _HINT if isinstance(error, _OF_FILES) else ""
        raise _UnreadableError(f"{path} cannot be read: {type(error).__name__}: {error}.{hint}") from error


def read_npy(path: Path) -> Tensor:
    """Return the array in a `.npy` file."""
    with reading(path), path.open("rb") as file:
        return as_tensor(np.lib.format.read_array(file, allow_pickle=False), path.stem)
