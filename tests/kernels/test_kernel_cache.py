"""The compiled CPU kernels on disk: read only when undamaged, and only from where no other user can write."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

import numba
import torch
from torch import nn

import gat_pyg
from gat_pyg.command import warm as warming
from gat_pyg.conv.gat import GATConv
from gat_pyg.kernels import device
from gat_pyg.kernels.cpu import cache
from gat_pyg.kernels.cpu.cache import compiled
from tests.processes import python

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="has no owner ids and modes")


LOCATORS = cache._Implementation._locator_classes


def double(x: Any) -> Any:  # the cheapest kernel
    return 2 * x


def call() -> tuple[float, bool]:
    """The kernel's result in a fresh dispatcher, and whether its code came from the disk."""
    kernel = compiled(double)
    result = kernel(1.5)
    return result, sum(kernel.stats.cache_hits.values()) == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, with one kernel in it; where it cannot be used, there is no other."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    only = [locator for locator in LOCATORS if locator.__name__ == "UserProvidedCacheLocator"]
    monkeypatch.setattr(cache._Implementation, "_locator_classes", only)
    cache._WARNED.clear()
    assert call() == (3.0, False) and call() == (3.0, True)
    (file,) = tmp_path.rglob("*.*")
    assert file.suffix == ".nbc"
    return file.parent


def test_a_damaged_file_is_compiled_again(folder: Path) -> None:
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    generator = np.random.default_rng(0)
    flips = [*range(0, 8 * 40, 79), *generator.integers(8 * len(whole), size=6)]  # the digest's bits, and any
    script = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import numba, pathlib
        numba.config.CACHE_DIR = {str(folder.parent)!r}
        from tests.kernels import test_kernel_cache
        file = pathlib.Path({str(file)!r})
        whole = file.read_bytes()
        for bit in {[int(bit) for bit in flips]}:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            assert test_kernel_cache.call() == (3.0, False), bit
            assert test_kernel_cache.call() == (3.0, True), bit
    """
    process = python("-c", textwrap.dedent(script))
    _, error = process.communicate()
    assert process.returncode == 0, error  # a negative number: machine code with another bit was run


@pytest.mark.parametrize("content", [b"", b"\0" * 31, os.urandom(1000)], ids=["empty", "short", "random"])
def test_a_file_of_anything_else_is_compiled_again(folder: Path, content: bytes) -> None:
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert call() == (3.0, False) and call() == (3.0, True)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


def test_nothing_is_unpickled_without_its_digest(folder: Path) -> None:
    (file,) = folder.iterdir()
    bomb = pickle.dumps(Bomb())
    file.with_name(f"{file.name.rsplit('.', 2)[0]}.nbi").write_bytes(bomb)  # Numba's index, which is not read
    for content in (bomb, file.read_bytes()[:32] + bomb):
        file.write_bytes(content)
        assert call() == (3.0, False) and call() == (3.0, True)


def test_code_for_something_else_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An undamaged file under another signature's name, and those that other versions or another processor wrote."""
    (file,) = folder.iterdir()
    kernel = compiled(double)
    assert kernel(2) == 4
    (other,) = set(folder.iterdir()) - {file}
    other.write_bytes(file.read_bytes())
    again = compiled(double)
    assert again(2) == 4 and not again.stats.cache_hits
    caplog.clear()
    monkeypatch.setattr(cache, "VERSIONS", ("another",))
    assert call() == (3.0, False) and call() == (3.0, True)
    (warning,) = caplog.messages
    assert warning.startswith(f"compiled kernels in {folder} are for another processor or other versions, so they are")
    monkeypatch.setattr(cache, "VERSIONS", ("a third",))
    monkeypatch.setattr(cache._Files, "_name", lambda *_: file.name)
    assert call() == (3.0, False) and call() == (3.0, True)


def as_another_user(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    mine = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1000)
    if mine == 0:  # root is trusted
        for path in (folder, file):
            os.chown(path, 2000, -1)
    return folder


def writable(which: str, mode: int) -> Callable[..., Path]:
    def change(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = {"folder": folder, "file": file}[which]
        path.chmod(mode)
        return path

    return change


CHANGES = {
    "another user's": (as_another_user, r"it belongs to user \d+\. Set NUMBA_CACHE_DIR"),
    "group-writable folder": (writable("folder", 0o775), r"other users can write to it \(mode 775\)\. Run `chmod go-w"),
    "world-writable folder": (writable("folder", 0o777), r"\(mode 777\)"),
    "sticky world-writable folder": (writable("folder", 0o1777), r"\(mode 1777\)"),
    "group-writable file": (writable("file", 0o664), r"\(mode 664\)"),
    "world-writable file": (writable("file", 0o646), r"\(mode 646\)"),
}


@POSIX
@pytest.mark.parametrize("linked", [False, True], ids=["", "through a link"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_others_can_write_to_is_not_used(
    folder: Path, change: str, linked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = CHANGES[change]
    (file,) = folder.iterdir()
    if linked:  # the permissions that count are those of the target
        folder = folder.rename(folder.with_name("target"))
        (folder.parent / "link").symlink_to(folder)
        (folder.parent / "link").rename(file.parent)
        (folder / file.name).rename(folder.parent / "code")
        file.symlink_to(folder.parent / "code")
    changed = make(file.parent, file, monkeypatch)
    before = file.read_bytes()
    assert call() == (3.0, False)
    assert call() == (3.0, changed == file)  # a bad file is replaced by a good one, a bad folder is not written to
    assert changed == file or (file.read_bytes() == before and len([*folder.iterdir()]) == 1)
    warning, *others = caplog.messages  # of both calls
    assert len(others) == (changed != file)  # that no folder is left
    assert warning.startswith(f"{changed} is not used for compiled kernels because") and re.search(reason, warning)


@POSIX
def test_the_next_folder_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache._Implementation, "_locator_classes", LOCATORS)
    for variable in ("HOME", "XDG_CACHE_HOME", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    tree = Path(__file__).with_name("__pycache__")
    for unsafe in (folder, tree):
        monkeypatch.setattr(
            cache, "_check_private", lambda p, s, of=cache._check_private, no=unsafe: refuse(p, s, of, no)
        )
    assert call() == (3.0, False) and call() == (3.0, True)
    assert [*(tmp_path / "home").rglob("*.nbc")] and len([*folder.iterdir()]) == 1
    assert len(caplog.messages) == 2 and str(folder) in caplog.messages[0] and str(tree) in caplog.messages[1]


def refuse(path: str, status: os.stat_result, otherwise: Callable[..., None], unsafe: Path) -> None:
    if path == str(unsafe):
        raise PermissionError(f"{path} is not for you")
    otherwise(path, status)


@POSIX
def test_a_folder_of_our_own_is_private_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for everyone, as /tmp is, and where all new files are for the group."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o1777)
    before = os.umask(0o002)
    try:
        assert call() == (3.0, False) and call() == (3.0, True)
    finally:
        os.umask(before)
    (file,) = tmp_path.rglob("*.nbc")
    assert file.stat().st_mode & 0o777 == 0o644 and file.parent.stat().st_mode & 0o777 == 0o755


@POSIX
def test_what_root_has_compiled_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder that this user cannot write to, with and without one of their own."""
    monkeypatch.setattr(cache._Implementation, "_locator_classes", LOCATORS)
    for variable in ("HOME", "XDG_CACHE_HOME", "IPYTHONDIR", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    written = tempfile.TemporaryFile

    def refuse_others(dir: str) -> Any:
        if not str(dir).startswith(str(tmp_path / "home")):
            raise PermissionError(errno.EACCES, "Permission denied")
        return written(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse_others)
    kernel = compiled(double)
    assert kernel(1.5) == 3.0 and kernel.stats.cache_hits and kernel(2) == 4  # int64 is compiled and kept
    assert compiled(double).stats.cache_path.startswith(str(tmp_path / "home")) and not caplog.messages
    (tmp_path / "home").rename(tmp_path / "other")
    (tmp_path / "home").write_text("a file, no folder")
    assert call() == (3.0, True) and not caplog.messages
    assert len([*folder.iterdir()]) == 1


@POSIX
@pytest.mark.parametrize("problem", ["mode 777", "cannot be read", "damaged"])
def test_kernels_that_are_there_and_not_used_have_a_warning(
    folder: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder that we cannot write to; another warning is of the compilation in each process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (file,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        if problem == "mode 777":
            folder.chmod(0o777)
        elif problem == "damaged":
            file.write_bytes(file.read_bytes()[:-1])
        else:
            patch.setattr(os, "fstat", refuse)
        assert call() == (3.0, False)
    reason, consequence = caplog.messages
    assert str(folder) in reason and problem in reason
    assert consequence == f"every process compiles its kernels again, since no folder can be written. {cache.REMEDY}"


@POSIX
def test_root_is_trusted() -> None:
    for owner, mode, private in ((0, 0o755, True), (0, 0o775, False), (os.geteuid(), 0o700, True)):
        status = os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
        with contextlib.nullcontext() if private else pytest.raises(PermissionError, match="mode 775"):
            cache._check_private("folder", status)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No folder can be written to, neither beside the code nor the user's."""
    (tmp_path / "alone.py").write_text(textwrap.dedent(FILES["beside"]))
    (tmp_path / "__pycache__").write_text("a file, where root could write to a folder without permission")
    nowhere = str(tmp_path / "__pycache__" / "nowhere")
    for variable in ("HOME", "XDG_CACHE_HOME", "IPYTHONDIR", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, nowhere)
    monkeypatch.setattr(numba.config, "CACHE_DIR", nowhere)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level("INFO"):
        alone = importlib.import_module("alone")
        monkeypatch.delitem(sys.modules, "alone")
        assert alone.beside(3.0) == -3.0
    assert "every process compiles its kernels again, since no folder can be written" in caplog.text
    assert re.search(r"compiled beside in \d+\.\d s, kept in memory alone", caplog.text)


def test_caches_of_processes_that_never_met_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: str, *values: Any) -> list[bool]:
        """Return for each value whether a fresh dispatcher loads its code from the disk."""
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / folder))
        kernel = compiled(double)
        hits = []
        for value in values:
            before = sum(kernel.stats.cache_hits.values())
            assert kernel(value) == 2 * value
            hits.append(sum(kernel.stats.cache_hits.values()) > before)
        return hits

    assert run("one", 1.5) == [False] and run("other", 2) == [False]
    shutil.copytree(tmp_path / "other", tmp_path / "one", dirs_exist_ok=True)
    assert run("one", 1.5, 2) == [True, True]
    for file in (tmp_path / "other").rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])  # as after a power cut
    assert run("other", 2) == [False] and run("other", 2) == [True]


# --- A kernel is built from several files. ---

FILES = {
    "steps": """
        from gat_pyg.kernels.cpu.cache import inline

        @inline
        def step(x):
            return 2 * x
        """,
    "sizes": """
        SIZE = 3
        OTHER = 0
        """,
    "kernel": """
        from gat_pyg.kernels.cpu.cache import compiled
        from built.sizes import SIZE
        from built.steps import step

        @compiled
        def kernel(x):
            return step(x) + SIZE
        """,
    "beside": """
        from gat_pyg.kernels.cpu.cache import compiled

        @compiled
        def beside(x):
            return -x
        """,
}


@pytest.mark.parametrize(
    ("edited", "old", "new", "results"),
    [
        ("kernel", "+", "-", {"kernel": -1}),
        ("steps", "2 * x", "5 * x", {"kernel": 8}),
        ("sizes", "SIZE = 3", "SIZE = 4", {"kernel": 6}),
        ("sizes", "OTHER = 0", "OTHER = 1", {}),
        ("beside", "-x", "7 * x", {"beside": 7}),
    ],
)
def test_an_edit_recompiles_the_kernels_built_from_that_file(
    edited: str, old: str, new: str, results: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba itself looks at the kernel's own file alone."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "built").mkdir()
    for name, code in FILES.items():
        (tmp_path / "built" / f"{name}.py").write_text(textwrap.dedent(code))

    def run() -> tuple[dict[str, int], set[str]]:
        """The result of each kernel in newly imported modules, and the kernels that were compiled."""
        for module in [name for name in sys.modules if name.partition(".")[0] == "built"]:
            monkeypatch.delitem(sys.modules, module)
        kernels = {name: getattr(importlib.import_module(f"built.{name}"), name) for name in ("kernel", "beside")}
        values = {name: kernel(1) for name, kernel in kernels.items()}
        return values, {name for name, kernel in kernels.items() if not kernel.stats.cache_hits}

    before = {"kernel": 5, "beside": -1}
    assert run() == (before, {"kernel", "beside"})
    assert run() == (before, set())
    file = tmp_path / "built" / f"{edited}.py"
    file.write_text(file.read_text().replace(old, new))
    assert run() == (before | results, set(results))
    assert run() == (before | results, set())


def test_the_files_of_each_kernel() -> None:
    """A kernel depends on its own folder, the steps of all scores and the building blocks, not on another score."""
    for name in ("attention.additive", "attention.pair", "features"):
        own = importlib.import_module(f"gat_pyg.{name}.cpu").__name__
        for kernel in cache._LISTENER.kernels:
            if kernel.__module__ == own:
                modules, constants = cache.sources(kernel.py_func)
                blocks = {f"gat_pyg.kernels.cpu.{block}" for block in ("draw", "vector")}
                assert own in modules and set(modules) <= {own, f"{own}_edges", "gat_pyg.attention.steps.cpu", *blocks}
                assert "gat_pyg.kernels.cpu.vector" in modules
    forward = importlib.import_module("gat_pyg.attention.additive.cpu")._forward
    modules, constants = cache.sources(forward.py_func)
    assert "gat_pyg.attention.steps.cpu" in modules and "gat_pyg.kernels.cpu.draw" in modules
    assert constants["gat_pyg.attention.steps.cpu.AHEAD"] == "16"


def test_warm_up_compiles_what_a_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any graph; the model, its hooks and gradients and torch's random numbers are not touched."""
    lazy = GATConv(-1, 8, heads=8, dropout=0.5)
    lazy.register_forward_hook(threading.Event().wait)  # a method of what cannot be copied
    lazy.register_full_backward_hook(lambda *_: pytest.fail("a hook was called"))
    before = torch.get_rng_state()
    warmed = gat_pyg.warm_up(nn.Sequential(lazy))
    assert warmed.devices == ("cpu",) and warmed.folder is not None
    assert torch.equal(torch.get_rng_state(), before) and lazy.lin.in_channels == -1 and lazy.training
    names = {kernel.__name__ for kernel in cache._LISTENER.kernels if kernel.signatures}
    assert names >= {"_group", "_sort", "_forward", "_dense", "_backward", "_keep", "_merge_sums"}
    signatures = {kernel: [*kernel.signatures] for kernel in cache._LISTENER.kernels}
    lazy._forward_hooks.clear()
    lazy._backward_hooks.clear()
    for edges in (torch.arange(2)[:, None], torch.randint(50, (2, 80)), torch.randint(2, (2, 6000))):
        out = lazy.train()(torch.randn(50, 4), edges.long())
        out.sum().backward()
        with torch.no_grad():
            lazy.eval()(torch.randn(50, 4), edges.long())
    assert {kernel: [*kernel.signatures] for kernel in cache._LISTENER.kernels} == signatures
    monkeypatch.setattr(warming, "CONVS", (GATConv,))
    monkeypatch.setattr(warming, "OPTIONS", ({"dropout": 0.5},))
    assert gat_pyg.warm_up(heads=8, channels=8)[1:3] == (0, 0)
    with pytest.raises(ValueError, match="heads is 8 and channels is None, expected both"):
        gat_pyg.warm_up(heads=8)
    with pytest.raises(ValueError, match=r"Linear has no layer of gat_pyg, .* gat_pyg.accelerate\(model\) swaps"):
        gat_pyg.warm_up(nn.Linear(1, 1))


def test_without_numbas_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)  # as NUMBA_DISABLE_JIT=1
    monkeypatch.setattr(device, "REASONS", {})
    for name in ("cache", "rows"):
        monkeypatch.delitem(sys.modules, f"gat_pyg.kernels.cpu.{name}", raising=False)
    assert str(device.missing_reason("cpu")).startswith("NUMBA_DISABLE_JIT is set")
