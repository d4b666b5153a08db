"""`python ARGUMENTS` in a process of its own, forked from one that has imported the libraries, which takes seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

IMPORTED = [
    "pytest",
    "hydra.main",
    "lightning.pytorch",
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "sklearn.datasets",
    "torch_geometric.nn",
    "torch_geometric.loader",
    "gat_pyg.attention.additive.cpu",
    "gat_pyg.models.baselines",
    "gat_pyg.data",
    "gat_pyg.distributed.halo",
    "gat_pyg.sweeps.search",
    "gat_pyg.graph.partition",
    "gat_pyg.models.gat",
    "gat_pyg.seeds",
    "gat_pyg.training",
]


def python(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Start Python in a new session; use the result as a `subprocess.Popen` with pipes for text."""
    environment = dict(os.environ if env is None else env)
    if sys.platform != "linux":  # elsewhere a forked process cannot use every imported library
        command, pipe = [sys.executable, *arguments], subprocess.PIPE
        return subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=environment, start_new_session=True
        )
    return Forked(arguments, Path.cwd() if cwd is None else cwd, environment)


WITHOUT_KERNELS = "GAT_PYG_TESTS_WITHOUT_KERNELS"  # environment variable: the reason to compile nothing


def without_kernels(reason: str) -> None:
    """Make backend="auto" use the segment backend in this process."""
    from gat_pyg.kernels import device

    device.REASONS["cpu"] = reason


def start_server() -> None:
    """Start the process from which the others are forked; only its first list of imports is used."""
    forkserver.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()


def fork_server() -> None:
    """Fork it from this process, before a test changes anything: the libraries are imported once for both."""
    if sys.platform != "linux":
        return
    resource_tracker.ensure_running()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.resetwarnings()  # to those of Python, as it starts
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        for name in IMPORTED:
            importlib.import_module(name)
        patch.setattr(forkserver, "util", SimpleNamespace(**{**vars(forkserver.util), "spawnv_passfds": _forked}))
        forkserver.ensure_running()


def _forked(program: str, arguments: list[str], passed: list[int]) -> int:
    """Fork a process that runs `python ... -c CODE`, and ends when the other end of the last file is closed."""
    if pid := os.fork():
        return pid
    try:
        for end in range(3, 1024):  # all others stay open: what is garbage later would close new files of their numbers
            with suppress(OSError):
                if end != passed[-1] and os.path.sameopenfile(end, passed[-1]):
                    os.close(end)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
        exec(arguments[-1], {"__name__": "__main__"})
    finally:
        os._exit(0)


class Forked:
    """A process whose output goes to files."""

    def __init__(self, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
        start_server()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        weakref.finalize(self, self.folder.cleanup)
        self.files = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        start = (arguments, str(cwd), environment, [str(file) for file in self.files])
        self.process = multiprocessing.get_context("forkserver").Process(target=_session, args=start, daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> list[str]:
        self.wait(timeout)
        return [file.read_text(encoding="utf-8") for file in self.files]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _session(arguments: tuple[str, ...], cwd: str, environment: dict[str, str], outputs: list[str]) -> None:
    """Run Python's arguments in a new session, with a folder, an environment and files for the output."""
    os.setsid()
    for descriptor, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    multiprocessing.set_start_method("fork", force=True)  # that of a command
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start others
    _main(arguments, cwd, environment)


def _main(arguments: tuple[str, ...], cwd: str, environment: dict[str, str]) -> None:
    """Run a module, a command or a file, as Python does by its arguments."""
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
    from lightning.pytorch.strategies.launchers import subprocess_script

    import gat_pyg.runs.stacked as together

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if reason := environment.get(WITHOUT_KERNELS):
        without_kernels(reason)
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    rank_zero_only.rank = _get_rank() or 0  # Lightning reads the environment when it is imported
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": _Rank})  # for Lightning alone: torchrun has other ranks
    subprocess_script.subprocess = replaced  # type: ignore[assignment]
    forked = partial(torch.multiprocessing.start_processes, start_method="fork")
    together.spawn = forked  # type: ignore[assignment]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv, sys.path[:0] = rest, [cwd]
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:0] = [*arguments], [str(Path(cwd, kind).parent)]
        runpy.run_path(kind, run_name="__main__")


class _Rank:
    """A process that Lightning starts beside the first, forked from it."""

    def __init__(self, command: Sequence[str], env: dict[str, str], cwd: str | None = None) -> None:
        from hydra.core.global_hydra import GlobalHydra

        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status: Any = 1
        try:
            os.closerange(3, 1024)  # as those of a new program
            GlobalHydra.instance().clear()
            _main(tuple(command[1:]), cwd or os.getcwd(), env)
            status = 0
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
