"""Runs of two processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gat_pyg.runs.result import read
from tests.commands import SMALL, Command, kill, outside, runs
from tests.processes import python

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

AVERAGED = ("config.yaml", "calibration.json", "result.json")  # files of several seeds


@pytest.mark.parametrize("new", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["forked", "interpreters"])
def test_two_processes_train_one_model_and_leave_one_run(new: bool, place: Path):
    small = ("dataset=planted", "dataset.graphs=6", "model=mlp", "runs=2", "training.max_epochs=3")
    command = ["-m", "gat_pyg.run", *small, "trainer=ddp_cpu", "trainer.devices=2"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = partial(subprocess.Popen, [sys.executable, *command], **pipes) if new else partial(python, *command)
    process = started(env=environment)
    output, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "planted: 2 runs one by one, since 2 processes divide the graphs of each step" in stderr
    assert "2 runs: test micro-F1" in output
    assert output.count("data set    planted") == 2
    assert "Warning" not in stderr, stderr
    first, second = read("outputs/results.jsonl")
    assert (first.seed, second.seed, first.epochs) == (0, 1, 3)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if cores == 1 else cores // 2  # they share the cores
    assert re.fullmatch(rf"2 x cpu \S+, {threads} threads?", first.device)
    assert len(list(Path("outputs").iterdir())) == 2
    (job,) = (path for path in Path("outputs").iterdir() if path.is_dir())
    assert {path.name for path in job.iterdir()} == {*AVERAGED, "seed-0", "seed-1"}


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_two_processes_share_the_seeds_of_one_graph(command: Command):
    seeds = (*SMALL, "model.dropout=0.0", "runs=5", "training.max_epochs=50", "checkpoint_every=0")
    command(*seeds, "outputs=one")
    two = (*seeds, "trainer=ddp_cpu", "trainer.devices=2", "outputs=two")
    process = outside(*two)
    while process.poll() is None and not list(Path("two").rglob("*last.ckpt")):
        time.sleep(0.005)
    kill(process)
    for folder in Path("two").glob("*/seed-0"):
        assert not (folder / "result.json").is_file()  # it was killed in the middle
    process = outside(*two, "ckpt_path=last")
    output, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "Warning" not in stderr, stderr
    assert output.startswith("seed 0: 50 epochs") and "5 runs: test accuracy" in output
    values_ = [{result.seed: result.value for result in read(f"{place}/results.jsonl")} for place in ("one", "two")]
    assert values_[0] == values_[1] and len(values_[0]) == 5
    (folder,) = {path.parent for path in runs("two")}
    expected = {*AVERAGED, *(f"seed-{seed}" for seed in range(5))}
    assert {path.name for path in folder.iterdir()} == expected


def test_processes_from_outside_do_not_share_seeds(command: Command, monkeypatch: pytest.MonkeyPatch):
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (
        launched | {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ).items():
        monkeypatch.setenv(name, value)
    two = ("trainer=ddp_cpu", "trainer.devices=2", "runs=2", "vectorize=on")
    assert "vectorize is on, but its processes were started from outside" in command(*SMALL, *two, fails=True)


def test_command_prints_only_the_summary(place: Path):
    output, stderr = outside(*SMALL, "training.max_epochs=3").communicate(timeout=100)
    stderr = re.sub(r"Compil(ing|ed) the kernels .*\n", "", stderr)  # where no run was before
    assert re.fullmatch(r"digits  epoch 1  loss [\d.]+  val .*  ends at 3\n", stderr)
    assert [line.split("  ")[0] for line in output.splitlines() if line] == [
        "data set",
        "model",
        "epochs",
        "validation",
        "test",
        "seconds",
        "files",
        "results",
    ]
    assert json.loads((Path("outputs") / "results.jsonl").read_text())["epochs"] == 3
