"""The command in a test: in a folder of its own, in this process or in another one."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_geometric.data import Data

import gat_pyg.run
import gat_pyg.runs.stacked
from gat_pyg.runs.folder import Run
from gat_pyg.runs.result import Result, read
from tests.processes import python

Command = Callable[..., str]


def run_command(*arguments: str) -> None:
    """Run the command in this process and its current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gat-pyg", *arguments])
        gat_pyg.run.main()


def result_of(outputs: Path, *settings: str) -> Result:
    """Train with the command, and return the last line of its results."""
    run_command(*settings, f"outputs={outputs}")
    return read(outputs / "results.jsonl")[-1]


SMALL = ("model=mlp", "model.hidden_channels=8", "training.lr=0.05")

NORM = ("model._target_=torch_geometric.nn.MLP", "+model.norm=batch_norm", "+model.norm_kwargs.momentum=null")

LEFT_BY_A_SEED = {"config.yaml", "metrics.csv", "model.safetensors", "result.json"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, one thread, and nothing left behind in the environment."""
    monkeypatch.chdir(tmp_path)
    before = os.environ.copy()
    torch.use_deterministic_algorithms(False)  # whatever an earlier test left
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process; returns its stdout, or its stderr if it `fails`."""

    def run(*arguments: str, fails: bool = False) -> str:
        if not fails:
            run_command(*arguments)
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            run_command(*arguments)
        assert stopped.value.code == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run


def outside(*arguments: str) -> Any:
    """The command in a process of its own."""
    return python("-m", "gat_pyg.run", *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})


def runs(folder: str = "outputs") -> list[Path]:
    return sorted(path.parent for path in Path(folder).rglob("model.safetensors"))


def graph_of(y: np.ndarray[Any, Any] | None = None, N: int = 60, **arrays: Any) -> dict[str, Any]:
    """The arrays of a random graph, whose edges have one direction each."""
    draw = np.random.default_rng(0)
    return {
        "x": draw.random((N, 4)),
        "edge_index": np.sort(draw.integers(0, N, (2, 4 * N)), axis=0),
        **({} if y is None else {"y": y}),
    } | arrays


def assert_close(a: Path, b: Path) -> None:
    """The runs in two folders have the same weights and metrics up to rounding."""
    for key, value in weights(a).items():
        torch.testing.assert_close(weights(b)[key], value, rtol=1e-3, atol=1e-4)
    rows = [csv.DictReader((folder / "metrics.csv").read_text().splitlines()) for folder in (a, b)]
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        assert [float(other[key]) for key in one] == pytest.approx([float(one[key]) for key in one], rel=1e-3)


SETS = "torch_geometric.datasets"

KARATE = ("split.val=5", "split.test=10")  # of its 34 nodes; those for training are given

QUANTITIES = (  # of which training takes what the others leave
    *("dataset._target_=torch_geometric.datasets.KarateClub", "task=node_regression"),
    *("split.val=5", "split.test=5"),
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


STACKED = "hydra/launcher=stacked"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of each pass, in the order of the passes."""
    every: list[list[int]] = []
    one_pass = gat_pyg.runs.stacked.one_pass

    def noted(runs: list[Run], *others: Any) -> None:
        every.append([run.seed for run in runs])
        one_pass(runs, *others)

    monkeypatch.setattr(gat_pyg.runs.stacked, "one_pass", noted)
    return every


def kill(process: Any) -> None:
    """The process and those that it started."""
    assert process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def many_graphs() -> tuple[str, ...]:
    draw = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    torch.save([Data(torch.rand(3, 4, generator=draw), edges, y=torch.tensor([i % 2])) for i in range(30)], "many.pt")
    return "dataset.path=many.pt", "split.folds=3", "training.max_epochs=3", "training.batch_size=8"
