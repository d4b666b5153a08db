"""The places where the operation runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gat_pyg.kernels import device
from tests.attention.comparisons import NUMBA, Place
from tests.sanitizer import Sanitizer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def sanitizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sanitizer:
    """Check every access of an interpreted kernel."""
    sanitizer = Sanitizer()
    if INTERPRETED:
        sanitizer.install(monkeypatch)
        request.node.user_properties.append(("sanitized", sanitizer.counts))
    return sanitizer


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what the sanitizer has checked."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    every = [value for report in reports for name, value in report.user_properties if name == "sanitized"]
    if counts := [each for each in every if any(each)]:
        launches, programs, lanes = map(sum, zip(*counts, strict=True))
        terminalreporter.write_line(
            f"Sanitized: {len(counts)} tests, {launches} launches, {programs} programs, {lanes / 1e6:.1f} million lanes"
        )


@pytest.fixture(params=["numba", "triton"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The kernels of Numba, and those of Triton: on a GPU, or on a CPU in Triton's interpreter.

    With Triton, what torch.empty gives is NaN, so that nothing passes that was not written.
    """
    if request.param == "segment":
        yield Place("cpu", torch.float64, "segment")
        return
    if request.param == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
        yield NUMBA
        return
    pytest.importorskip("triton", reason="Triton is not installed")
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    if INTERPRETED:
        monkeypatch.setitem(device.FILES, "cpu", "gpu")
        nan_as_on_a_gpu(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield Place("cpu" if INTERPRETED else "cuda", torch.float32, is_triton=True)
    torch.use_deterministic_algorithms(False)


def nan_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tl.minimum and tl.maximum drop NaN in the interpreter too, unless an argument propagates it."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    monkeypatch.setattr(builder, "create_minnumf", lambda self, x, y: self.binary_op(x, y, np.fmin))
    monkeypatch.setattr(builder, "create_maxnumf", lambda self, x, y: self.binary_op(x, y, np.fmax))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
