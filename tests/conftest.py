"""The limits and the summary of a test run; pytest-xdist's first process, which runs no test, imports no library."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from multiprocessing import forkserver
from operator import itemgetter
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C do what it does in a terminal, and import the fixtures where tests run."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's way with what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


MAX_KERNELS = 155  # that the suite may compile on CI, without the tests marked weekly; each takes about a second
WORKERS = pytest.StashKey[list[dict[str, Any]]]()  # what each worker of pytest-xdist reports at its end


def _used() -> dict[str, Any]:
    """Return the optional libraries of this process, and the CPU-seconds of it and of those that it has waited for."""
    with suppress(AttributeError):  # as private as it is, without it the forked processes are not counted
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    libraries = ", ".join(_version(package) for package in ("torch_scatter", "torch_sparse", "numba"))
    return {"libraries": libraries, "cpu_seconds": sum(os.times()[:4])}


def _compiled(config: pytest.Config) -> list[tuple[str, float]]:
    """Return the CPU kernels that the tests of all workers compiled, and the seconds that each took."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.getreports("passed") + reporter.getreports("failed") if reporter else []
    return [tuple(value) for report in reports for name, value in report.user_properties if name == "kernel"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what a worker reports; one that crashed has nothing."""
    node.config.stash.setdefault(WORKERS, []).extend(getattr(node, "workeroutput", {}).get("used", []))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what a worker used; on CI, fail if the suite compiled too many kernels."""
    config = session.config
    is_suite = config.args_source is config.ArgsSource.TESTPATHS and config.option.markexpr == "not weekly"
    if hasattr(config, "workeroutput"):
        config.workeroutput["used"] = [_used()]
    elif "CI" in os.environ and is_suite and len(_compiled(config)) > MAX_KERNELS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _version(package: str) -> str:
    try:
        return f"{package} {import_module(package).__version__}"
    except ImportError:
        return f"{package} missing"
    except OSError:
        return f"{package} unusable (built for another torch)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write which of the optional libraries the tests ran with, what was compiled, and the CPU-seconds."""
    workers = config.stash.get(WORKERS, [])
    used = workers or [_used()]
    terminalreporter.write_line(used[0]["libraries"])
    kernels = _compiled(config)
    seconds, again = sum(seconds for _, seconds in kernels), len(kernels) - len({name for name, _ in kernels})
    line = f"CPU kernels compiled: {len(kernels)} in {seconds:.0f} s, {again} of them again; CI allows {MAX_KERNELS}"
    terminalreporter.write_line(line, red=len(kernels) > MAX_KERNELS)
    cpu_seconds = sum(each["cpu_seconds"] for each in used) + sum(os.times()[:2]) * bool(workers)
    terminalreporter.write_line(f"CPU-seconds of all processes: {cpu_seconds:.0f}")
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    compiled = {tuple(use) for report in reports for name, use in report.user_properties if name == "compiled"}
    for sm, kernels in groupby(sorted(compiled), key=itemgetter(0)):
        _, _, registers, spills, shared = zip(*kernels, strict=True)
        terminalreporter.write_line(
            f"Triton {version('triton')}, sm_{sm}: kernels {len(registers)}, registers up to {max(registers)}, "
            f"spilling instructions up to {max(spills)}, shared memory up to {max(shared) / 1024:.1f} KiB"
        )
