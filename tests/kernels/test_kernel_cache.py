"""The compiled CPU kernels on disk: read only when undamaged, and only from where no other user can write."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="numba is not installed")

import numba

from gat_pyg.kernels import device
from gat_pyg.kernels.cpu import cache
from gat_pyg.kernels.cpu.cache import compiled, step

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="has no owner ids and modes")
EVERY_PROCESS = f"every process compiles its kernels again, since no folder can be written. {cache.REMEDY}"


@step
def twice(x: Any) -> Any:
    return 2 * x


def double(x: Any) -> Any:  # the cheapest kernel with a step
    return twice(x)


def call(value: float = 1.5) -> tuple[float, bool]:
    """The kernel's result in a fresh dispatcher as of another process, and whether its code came from the disk."""
    forget()
    kernel = compiled(double)
    result = kernel(value)
    return result, sum(kernel.stats.cache_hits.values()) == 1


def forget() -> None:
    """Forget what a process remembers of folders."""
    cache._is_private.cache_clear()
    cache._is_writable.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder, with one kernel in it; the user's own, and that beside the code, are others."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "named"))
    for variable in ("HOME", "XDG_CACHE_HOME", "IPYTHONDIR", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    in_tree = cache._Implementation._locator_classes[1]
    monkeypatch.setattr(in_tree, "get_cache_path", lambda _: str(tmp_path / "tree"))
    cache._WARNED.clear()
    assert call() == (3.0, False) and call() == (3.0, True)
    (file,) = tmp_path.rglob("*.*")
    assert file.suffix == ".nbc" and file.parent.parent == tmp_path / "named"
    yield file.parent
    forget()


def read_only(monkeypatch: pytest.MonkeyPatch, *writable: Path) -> None:
    """Let no file be created but in some folders; root could."""
    written = tempfile.TemporaryFile

    def refuse_others(dir: str) -> Any:
        if not any(Path(dir).is_relative_to(each) for each in writable):
            raise PermissionError(errno.EACCES, "Permission denied")
        return written(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse_others)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


def test_a_damaged_file_is_compiled_again(folder: Path) -> None:
    """Nothing is unpickled, and no code is run, without its digest."""
    (file,) = folder.iterdir()
    whole, bomb = file.read_bytes(), pickle.dumps(Bomb())
    flips = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 31, 32, len(whole) // 2, -1 % len(whole))
    ]
    for content in (*flips, b"", bytes(31), whole[:100], os.urandom(1000), bomb, whole[:32] + bomb):
        file.write_bytes(content)
        assert call() == (3.0, False) and call() == (3.0, True)


def test_code_for_something_else_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An undamaged file under another signature's name, and those that other versions or another processor wrote."""
    (file,) = folder.iterdir()
    assert call(2) == (4, False)
    (other,) = set(folder.iterdir()) - {file}
    other.write_bytes(file.read_bytes())
    assert call(2) == (4, False)
    caplog.clear()
    monkeypatch.setattr(cache, "VERSIONS", ("another",))
    assert call() == (3.0, False) and call() == (3.0, True)
    (warning,) = caplog.messages
    assert warning.startswith(f"compiled kernels in {folder} are for another processor or other versions, so they are")
    monkeypatch.setattr(cache, "VERSIONS", ("a third",))
    monkeypatch.setattr(cache._Files, "_name", lambda *_: file.name)
    assert call() == (3.0, False) and call() == (3.0, True)


@POSIX
@pytest.mark.parametrize("change", ["another user's", 0o775, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(
    folder: Path, change: str | int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither read nor written; the next one is."""
    (file,) = folder.iterdir()
    before = file.read_bytes()
    if isinstance(change, int):
        folder.chmod(change)
    else:
        mine = folder.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1000)
        if mine == 0:  # root is trusted
            os.chown(folder, 2000, -1)
            for next_one in ("tree", "home"):
                (folder.parents[1] / next_one).mkdir()
                os.chown(folder.parents[1] / next_one, 1000, -1)
    assert call() == (3.0, False) and call() == (3.0, True)
    assert file.read_bytes() == before and [*folder.iterdir()] == [file]
    (warning,) = caplog.messages
    reason = rf"\(owner \d+, mode {change:o}\)" if isinstance(change, int) else r"\(owner 2000, mode 755\)"
    assert warning.startswith(f"{folder} is not used for compiled kernels because other users can write to it")
    assert re.search(reason + r"\. Run `chmod go-w .*, or set NUMBA_CACHE_DIR to a folder of your own", warning)


@POSIX
def test_a_folder_of_our_own_is_private_wherever_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for everyone, as /tmp is, and where all new files are for the group."""
    shared = folder.parents[1] / "shared"
    shared.mkdir(mode=0o1777)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(shared))
    before = os.umask(0o002)
    try:
        assert call() == (3.0, False) and call() == (3.0, True)
    finally:
        os.umask(before)
    (file,) = shared.rglob("*.nbc")
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_what_root_has_compiled_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder that this user cannot write to, with and without one of their own."""
    home = folder.parents[1] / "home"
    read_only(monkeypatch, home)
    assert call() == (3.0, True) and call(2) == (4, False) and call(2) == (4, True)
    assert compiled(double).stats.cache_path.startswith(str(home)) and not caplog.messages
    shutil.rmtree(home)
    home.write_text("a file, no folder")
    assert call() == (3.0, True) and not caplog.messages
    assert len([*folder.iterdir()]) == 1


@POSIX
@pytest.mark.parametrize("problem", ["mode 777", "cannot be read", "damaged"])
def test_kernels_that_are_there_and_not_used_have_a_warning(
    folder: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder that we cannot write to; another warning is of the compilation in each process."""
    (file,) = folder.iterdir()
    read_only(monkeypatch)
    if problem == "mode 777":
        folder.chmod(0o777)
    elif problem == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
        file.mkdir()  # root could read a file without permission
    assert call() == (3.0, False)
    reason, consequence = caplog.messages
    assert str(folder) in reason and problem in reason and consequence == EVERY_PROCESS


def test_a_full_disk_does_not_stop_a_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = folder.iterdir()
    file.unlink()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(full))
        assert call() == (3.0, False)
    assert not [*folder.iterdir()]
    assert caplog.messages == [f"a compiled kernel is not kept on disk: {full}. {cache.REMEDY}"]
    assert call() == (3.0, False) and call() == (3.0, True)


def test_without_a_folder_a_kernel_is_compiled_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No folder can be written to, neither beside the code nor the user's."""
    shutil.rmtree(folder)
    read_only(monkeypatch)
    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
    with caplog.at_level("INFO"):
        assert call() == (3.0, False)
    assert EVERY_PROCESS in caplog.text and "there is no folder for compiled kernels, neither of " in caplog.text
    assert re.search(r"compiled double in \d+\.\d s, kept in memory alone", caplog.text)


def test_processes_that_compile_at_once_do_not_mix_their_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do: each begins before the other has written. Numba's own cache gives one number to both files."""
    (file,) = folder.iterdir()
    file.unlink()
    forget()
    one, other = compiled(double), compiled(double)
    save = cache._Files.save

    def save_both(self: Any, key: Any, data: Any) -> None:
        monkeypatch.setattr(cache._Files, "save", save)
        assert other(2) == 4
        save(self, key, data)

    monkeypatch.setattr(cache._Files, "save", save_both)
    assert one(1.5) == 3.0
    assert call() == (3.0, True) and call(2) == (4, True)


# --- A kernel is built from several files. ---


@pytest.mark.usefixtures("folder")
def test_an_edit_recompiles_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any file of our kernels: Numba itself looks at the kernel's own alone."""
    monkeypatch.setattr(cache, "SOURCES", "edited")
    assert call() == (3.0, False) and call() == (3.0, True)


def test_every_file_of_a_kernel_is_among_the_sources() -> None:
    """Those of the kernels, and of all steps and constants that their modules import from the package."""
    for name in ("attention.additive", "attention.layer", "attention.pair", "features", "graph"):
        importlib.import_module(f"gat_pyg.{name}.cpu")
    for kernel in cache._LISTENER.kernels:
        module = sys.modules[kernel.__module__]
        if module.__name__.startswith("gat_pyg."):
            steps = [value.py_func for value in vars(module).values() if hasattr(value, "py_func")]
            steps += [value._defn for value in vars(module).values() if hasattr(value, "_defn")]
            assert {Path(step.__code__.co_filename) for step in steps} <= {*cache.FILES}


def test_without_numbas_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)  # as NUMBA_DISABLE_JIT=1
    monkeypatch.setattr(device, "REASONS", {})
    for name in ("cache", "draw", "rows"):
        monkeypatch.delitem(sys.modules, f"gat_pyg.kernels.cpu.{name}", raising=False)
    assert str(device.missing_reason("cpu")).startswith("NUMBA_DISABLE_JIT is set")
