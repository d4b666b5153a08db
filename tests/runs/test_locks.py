"""Locks of shared files, and files that are written as a whole."""

from __future__ import annotations

import errno
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import gat_pyg.files
from gat_pyg.files import try_lock, unlock, write_whole
from gat_pyg.runs.result import Result, append, read

RESULT = Result("GAT", "cora", "accuracy", 83.0, 0, 500, 400, 82.0, 9.0, 0.018, 92373)


def test_a_wait_for_the_shared_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "results.jsonl"
    held = try_lock(path)
    assert held is not None
    monkeypatch.setattr(gat_pyg.files, "PATIENCE", 0.1)
    writer = threading.Thread(target=append, args=(RESULT, path))
    writer.start()
    writer.join(0.5)
    assert writer.is_alive() and path.read_bytes() == b""
    os.close(held)
    writer.join(10)
    assert read(path) == [RESULT]
    assert capfd.readouterr().err == f"Waiting for {path}, which another process has locked\n"


def test_an_error_of_a_lock_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(gat_pyg.files, "lock_descriptor", fail)
    path = tmp_path / "file"
    for use in (try_lock, partial(append, RESULT)):
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)) as error:
            use(path)
        assert error.value.filename == str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="there an open file cannot be removed")
def test_a_lock_that_its_holder_removes_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / ".lock"
    first = try_lock(path)
    assert first is not None
    takes = gat_pyg.files._takes

    def late(descriptor: int, path: Path) -> bool:  # it opened the file before the holder removed it
        monkeypatch.setattr(gat_pyg.files, "_takes", takes)
        unlock(path, first)
        return takes(descriptor, path)

    monkeypatch.setattr(gat_pyg.files, "_takes", late)
    second = try_lock(path)
    assert second is not None and path.exists()
    assert try_lock(path) is None
    unlock(path, second)
    assert not path.exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(beside: Path) -> None:
        beside.write_text("ne")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_whole(path, fail)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
