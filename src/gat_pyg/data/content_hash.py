"""A hash of the content of users' files: files of one name may hold different data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .arrays.keys import READ
from .rows import READERS
from .tables.programs import SEVERAL


def content_of(dataset: Mapping[str, Any]) -> str | None:
    """Return the hash of the user's files that a data set's settings read, or None if there are no such files.

    It is the SHA-256 of the bytes, as twelve hex digits; for a folder, of the name, size and bytes of each `.npy` file
    that is read. The bytes of such a file begin with the array's dtype and shape. The files are read once, in blocks of
    256 KiB, so that arrays may exceed the memory: a few seconds per GiB. The name of a file does not count.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "graph.npz"
    >>> path.write_bytes(b"content")
    7
    >>> content_of({"_target_": "gat_pyg.data.from_file", "path": str(path)})
    'ed7002b439e9'
    """
    inner = (content_of(value) for value in dataset.values() if isinstance(value, Mapping))  # as for `links`
    reader = READERS.get(str(dataset.get("_target_")))
    values = [dataset.get(key) for key in reader.paths] if reader else []
    paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
    if not any(isinstance(path, str) for path in paths):
        return next((content for content in inner if content is not None), None)
    files = tuple(
        (file, _version(file)) for path in paths if isinstance(path, str) for file in files_of(Path(path).expanduser())
    )
    return _digest(files) if files else None


def files_of(path: Path) -> list[Path]:
    """Return the regular files that are read at a path; [] if there are none."""
    files = [path.joinpath(f"{key}.npy") for key in sorted(READ)] if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    return files or [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SEVERAL and file.is_file()]


def _version(file: Path) -> tuple[int, ...]:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """Return the hash of files, which is computed once for each of their versions."""
    digest = hashlib.sha256()
    for path, (_, size, *_) in files:
        if path.suffix == ".npy":  # a file of a folder
            digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 18):
                digest.update(block)
    return digest.hexdigest()[:12]
