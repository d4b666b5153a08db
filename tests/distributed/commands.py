"""Commands in processes of their own, and the outputs of a training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gat_pyg.runs.result import Result, read
from tests.processes import WITHOUT_KERNELS, python


def started(*arguments: str, cwd: Path | None = None, **variables: str) -> Any:
    """Start Python with these arguments, one thread and the segment backend."""
    quick = {"OMP_NUM_THREADS": "1", WITHOUT_KERNELS: "the kernels are not the subject"}
    return python(*arguments, cwd=cwd, env={**os.environ, **quick, **variables})


def finish(*processes: Any, status: int = 0) -> str:
    """Wait for the end of each process, check its exit status, and return what the last one wrote to stderr."""
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == status, stderr
        assert "Warning" not in stderr and "Traceback" not in stderr, stderr
    return str(stderr)


def wait_until(condition: Callable[[], bool], process: Any = None) -> None:
    """Wait for an event, at most two minutes, and as long as a process runs."""
    start = time.perf_counter()
    while not condition():
        assert time.perf_counter() - start < 120
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def trained(outputs: Path) -> tuple[Result, dict[str, Tensor]]:
    """Return the only result in a folder and its weights."""
    (result,) = read(outputs / "results.jsonl")
    return result, load_file(Path(result.run_dir) / "model.safetensors")


def assert_same_training(outputs: Path, reference: Path) -> None:
    """Check that two trainings took the same epochs to the same scores and, up to rounding in float64, weights."""
    (result, weights), (expected, expected_weights) = trained(outputs), trained(reference)
    for name in ("epochs", "best_epoch", "value", "val"):
        assert getattr(result, name) == getattr(expected, name), name
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=1e-10)
