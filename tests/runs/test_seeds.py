"""The seeds of a job: trained one by one, as one, and by several processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import gat_pyg.runs.folder
import gat_pyg.runs.stacked
import gat_pyg.seeds.planning
from gat_pyg import load
from gat_pyg.data import digits
from gat_pyg.files import try_lock, unlock
from gat_pyg.runs.result import read
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.trained.uncertainty import Rows, calibrated
from tests.commands import (
    NORM,
    SMALL,
    Command,
    assert_close,
    runs,
)
from tests.processes import python

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


def test_several_seeds_each_leave_their_line_and_a_mean(command: Command):
    small = (*SMALL, "training.max_epochs=5")
    output = command(*small, "runs=3", "seed=4")
    results = read("outputs/results.jsonl")
    assert [result.seed for result in results] == [4, 5, 6]
    assert [path.name for path in runs()] == ["seed-4", "seed-5", "seed-6"]
    assert len({result.config_hash for result in results}) == 1
    values = [result.value for result in results]
    assert f"3 runs: test accuracy {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} %" in output
    command(*small, "seed=5")
    again = read("outputs/results.jsonl")[-1]
    assert (again.value, again.config_hash) == (results[1].value, results[1].config_hash)  # the seed alone decides


@pytest.mark.parametrize("model", ["gat", pytest.param("mlp", marks=pytest.mark.weekly)])
def test_seeds_together_leave_what_they_leave_one_by_one(command: Command, model: str):
    arguments = (f"model={model}", "model.dropout=0.0", "runs=3", "training.max_epochs=8", "training.patience=5")
    output = {}
    for vectorize, size in (("off", "auto"), ("auto", "auto"), ("on", 2)):
        how = (f"vectorize={vectorize}", f"seeds_per_pass={size}", f"outputs={vectorize}")
        output[vectorize] = command(*arguments, *how)
    last = {
        how: re.search("^digits, 3 runs: .*(?:\n(?:epochs|validation) .*){2}", text, re.M)
        for how, text in output.items()
    }
    assert last["off"][0] == last["auto"][0] == last["on"][0]  # with the score of the averaged prediction
    assert re.fullmatch(
        r"seed 0: \d+ epochs, best \d+, validation accuracy \d+\.\d %, test accuracy \d+\.\d %",
        output["auto"].splitlines()[0],
    )
    single = read("off/results.jsonl")
    for place in ("auto", "on"):
        for one, other in zip(single, read(f"{place}/results.jsonl"), strict=True):
            assert other.seconds > 0 and (other.peak_mib is None or 100 < other.peak_mib < 10_000)
            differ = ("seconds", "seconds_per_epoch", "peak_mib", "run_dir", "timestamp")
            assert replace(other, **{key: getattr(one, key) for key in differ}) == one
        for a, b in zip(runs("off"), runs(place), strict=True):
            assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
            assert OmegaConf.load(a / "config.yaml").seed == OmegaConf.load(b / "config.yaml").seed
            assert_close(a, b)


def test_the_averaged_prediction_is_that_of_the_stack(command: Command):
    output = command("model=gat", "runs=3", "training.max_epochs=3")
    (folder,) = {path.parent for path in runs()}
    stack, data = load(folder, seed="all"), digits().test[0]
    with torch.no_grad():
        out = stack(data.x, data.edge_index)  # [S, N, K]
        for seed in range(3):
            torch.testing.assert_close(load(folder, seed=seed)(data.x, data.edge_index), out[seed])
    p = out.softmax(-1).double().mean(0)
    right = (p.argmax(-1) == data.y)[data.test_mask].double().mean().item()
    assert f"(averaged prediction {100 * right:.1f} %, " in output
    rows = [Rows(p[data[f"{split}_mask"]], data.y[data[f"{split}_mask"]]) for split in ("val", "test")]
    own = "the split is the data's own, and coverage holds if validation and test have the same distribution"
    assert f"uncertainty {calibrated(NodeLabels(10), *rows, own).text()}\n" in output


def test_seeds_of_many_graphs_together_name_the_seed_of_their_order(command: Command):
    many = ("dataset=planted", "dataset.graphs=8", *SMALL, "training.batch_size=2", "training.max_epochs=3")
    command(*many, "runs=3", "seed=5", "seeds_per_pass=2")
    command(*many, "seed=5", "outputs=alone")
    first, second, third = read("outputs/results.jsonl")
    assert (first.order, second.order, third.order) == (None, 5, 5)
    assert first.config_hash == second.config_hash
    (alone,) = read("alone/results.jsonl")
    assert alone.config_hash == first.config_hash and alone.value == pytest.approx(first.value, rel=1e-4)
    assert '"order"' not in Path("alone/results.jsonl").read_text()


ORPHANS = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from gat_pyg.run import main

def late(number, parent=os.getpid()):  # called first in each process: the job dies before
    with open("children", "a") as file:
        print(os.getpid(), file=file, flush=True)
    with suppress(ProcessLookupError):
        os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
    set_signal(number)

spawn = sys.modules["torch.multiprocessing.spawn"]
set_signal, spawn._prctl_pr_set_pdeathsig = spawn._prctl_pr_set_pdeathsig, late
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads states from /proc")
def test_processes_whose_job_died_while_they_started_train_nothing(place: Path):
    (place / "orphans.py").write_text(ORPHANS)
    process = python("orphans.py", *SMALL, "runs=2", "training.max_epochs=3", "vectorize=on", "trainer=ddp_cpu")
    process.communicate(timeout=60)
    children = (place / "children").read_text().split()
    assert process.returncode == -signal.SIGKILL and children

    def is_running(child: str) -> bool:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    while any(map(is_running, children)):
        time.sleep(0.01)
    assert not [*Path("outputs").rglob("metrics.csv"), *Path("outputs").rglob("result.json")]


def test_a_job_waits_for_the_processes_of_the_one_that_was_killed(place: Path, monkeypatch: pytest.MonkeyPatch):
    folder = gat_pyg.runs.folder
    child = try_lock(place / "1.lock")
    part = place / ".result.json.7.part"  # which it is writing
    part.touch()
    monkeypatch.setattr(gat_pyg.files.time, "sleep", lambda seconds: (part.unlink(), unlock(place / "1.lock", child)))
    with folder.Job(None, place).held(try_lock(place / ".lock")):
        assert not part.exists()
    assert not [*place.iterdir()]


def test_a_rank_whose_first_rank_died_while_it_started_ends(place: Path, monkeypatch: pytest.MonkeyPatch):
    folder = gat_pyg.runs.folder
    monkeypatch.setattr(folder, "is_first", lambda: False)
    monkeypatch.setenv(folder.RUN_DIR, str(place))
    monkeypatch.setenv(folder.PARENT, str(os.getppid()))
    with folder.started_job(None, folder.Invocation(place, False, None, ())) as job:
        assert job.folder == place
    monkeypatch.setenv(folder.PARENT, str(os.getpid()))  # as if another process were the parent now
    with pytest.raises(SystemExit, match="1"), folder.started_job(None, folder.Invocation(place, False, None, ())):
        pytest.fail("it goes on")


def test_reasons_for_sequential_training_are_printed(command: Command, monkeypatch: pytest.MonkeyPatch):
    def says(*arguments: str) -> str:
        output: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(gat_pyg.runs.stacked, "rank_zero_print", output.append)
            command(*SMALL, "runs=2", "training.max_epochs=1", *arguments)
        return "\n".join(output)

    assert says() == says("vectorize=off") == ""
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.planning, "CPU_BUDGET", 1)
        small = r"digits: 2 runs one by one, since a run takes \d+ MiB, and several are not faster as one"
        assert re.fullmatch(small, says())
    many = ("dataset=planted", "dataset.graphs=6")
    assert says(*many) == "planted: 2 runs as one, on the same batches of graphs, in the order of seed 0"
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.runs.stacked, "LARGE", 1000)
        large = r"planted: 2 runs one by one, since a step has \d+ million elements, and so .* not faster as one"
        assert re.fullmatch(large, says(*many))
    compiles = ("training.compile=true", "training.max_epochs=1")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    assert says(*compiles) == "digits: 2 runs one by one, since training.compile is true"
    reason = "torch.func.vmap fails (It looks like you're calling .item() on a Tensor)"
    assert says(*NORM) == f"digits: 2 runs one by one, since MLP cannot be stacked: {reason}"
    assert "since gradients would be clipped over all seeds" in says("+trainer.gradient_clip_val=1.0")
    assert "whose scale would be that of all seeds" in says("+trainer.precision=bf16-mixed")
    assert len(read("outputs/results.jsonl")) == 2 * 9
