"""Runs that are killed and resumed."""

from __future__ import annotations

import csv
import os
import pathlib
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from omegaconf import OmegaConf

import gat_pyg.runs.stacked
import gat_pyg.seeds.planning
import gat_pyg.sweeps.job
import gat_pyg.training.stopping
from gat_pyg.files import try_lock
from gat_pyg.runs.pruning import pruned_by
from gat_pyg.runs.result import Result, read
from tests.commands import LEFT_BY_A_SEED, SMALL, STACKED, Command, assert_close, outside, runs, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

GAT = ("model.hidden_channels=[4]", "model.heads=[2,1]", "training.lr=0.02", "training.max_epochs=60")
LONG = (*GAT, "training.patience=100", "checkpoint_every=0.1")


def assert_same_runs(one: str, other: str) -> None:
    """Two folders hold the same runs: metrics, weights and results are equal to the last bit."""
    for first, second in zip(runs(one), runs(other), strict=True):
        assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()
        assert weights(first).keys() == weights(second).keys()
        assert all(torch.equal(value, weights(second)[key]) for key, value in weights(first).items())
    lines = [
        sorted(
            (line.seed, line.epochs, line.best_epoch, line.val, line.value) for line in read(f"{name}/results.jsonl")
        )
        for name in (one, other)
    ]
    assert lines[0] == lines[1]


def kill_in_training(process: Any, folder: Path, chance: random.Random) -> bool:
    """Kill -9 at a random moment after the process wrote its own first checkpoint; False if it ended before."""

    def written() -> float:
        results = list(folder.rglob("*last.ckpt"))
        return max((path.stat().st_mtime for path in results), default=0.0)

    before = written()
    while process.poll() is None and written() == before:
        time.sleep(0.005)
    time.sleep(chance.random() * 0.1)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return not ended


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_killed_run_equals_an_uninterrupted_one(command: Command):
    command(*LONG, "outputs=whole")
    chance, kills = random.Random(os.getpid()), 0
    for _ in range(2):
        arguments = (*LONG, "outputs=killed", *(["ckpt_path=last"] if kills else []))
        kills += kill_in_training(outside(*arguments), Path("killed"), chance)
    assert kills
    if not runs("killed"):
        command(*LONG, "outputs=killed", "ckpt_path=last")
    assert len(list(Path("killed").iterdir())) == 2  # one folder, one file of results: none was left empty
    assert_same_runs("whole", "killed")


WORKERS = ("training.max_epochs=5", "loader=neighbor", "loader.num_workers=2")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_before_the_training_ends_it_with_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.sweeps.job, "read_task", lambda config: signal.raise_signal(number))
        with pytest.raises(SystemExit, match=str(128 + number)):
            command(*SMALL, "training.max_epochs=2")
    again = r"The same command with ckpt_path=last starts it again, since no epoch was finished\."
    assert re.fullmatch(rf"Stopped in outputs/\S+\. {again}\n", capsys.readouterr().err)
    assert signal.getsignal(number) is before
    command(*SMALL, "training.max_epochs=2", "ckpt_path=last")
    assert [result.epochs for result in read("outputs/results.jsonl")] == [2]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(signal.SIGTERM, ("runs=3",), id="SIGTERM"),
        pytest.param(signal.SIGTERM, WORKERS, id="SIGTERM, workers"),
        pytest.param(signal.SIGINT, WORKERS, id="SIGINT, workers", marks=pytest.mark.weekly),
    ],
)
def test_a_signal_to_all_processes_writes_a_checkpoint(
    command: Command, number: signal.Signals, settings: tuple[str, ...]
):
    many = (*GAT, *settings)  # over in less than checkpoint_every
    command(*many, "outputs=whole")
    process = outside(*many, "outputs=ended")
    while process.poll() is None and not list(Path("ended").rglob("metrics.csv")):
        time.sleep(0.005)
    os.killpg(process.pid, number)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert re.search(r"Stopped in ended/\S+\. The same command with ckpt_path=last finishes it\.\n$", output)
    assert "Traceback" not in output and not runs("ended") and len(list(Path("ended").rglob("*last.ckpt"))) == 1
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(process.pid, 0)
    command(*many, "outputs=ended", "ckpt_path=last")
    assert_same_runs("whole", "ended")


@contextmanager
def interrupted_before(last: int) -> Iterator[None]:
    """Context manager: the command is interrupted when it comes to this seed."""
    one_run = gat_pyg.sweeps.job.one_run

    def dies(settings: Any, task: Any, seed: int, folder: Path) -> Result | None:
        if seed == last:
            raise KeyboardInterrupt
        return one_run(settings, task, seed, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gat_pyg.sweeps.job, "one_run", dies)
        with pytest.raises(SystemExit, match="130"):
            yield


SWEEP = ("-m", *SMALL[:1], "model.hidden_channels=8,4", "training.lr=0.05,0.02")  # two jobs of each of two shapes

QUICK = ("model.dropout=0.0", "training.max_epochs=4", "checkpoint_every=0")


def jobs_in(place: str) -> dict[tuple[Any, ...], Path]:
    """The folders of the jobs of sweeps, by what differs."""
    jobs = {}
    for path in Path(place).glob("*_sweep/*/config.yaml"):
        config = OmegaConf.load(path)
        jobs[config.model.hidden_channels, config.training.lr] = path.parent
    return dict(sorted(jobs.items()))


def test_a_stacked_sweep_leaves_what_its_jobs_leave_alone_also_if_it_is_killed_and_extended(
    command: Command, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    command(*SWEEP, *QUICK, "outputs=alone")
    output = command(*SWEEP, *QUICK, "outputs=one", STACKED)
    assert passes == [[0, 0]] * 2
    assert "model.hidden_channels=4 training.lr=0.02, seed 0: 4 epochs, best" in output
    alone, one = jobs_in("alone"), jobs_in("one")
    assert alone.keys() == one.keys() and len(one) == 4
    for first, second in zip(alone.values(), one.values(), strict=True):
        assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()} == LEFT_BY_A_SEED
        assert_close(first, second)

    epochs, end = [], gat_pyg.seeds.EachStopping.on_train_epoch_end

    def dies(*arguments: Any) -> None:
        end(*arguments)
        epochs.append(None)
        if len(epochs) == 4 + 3:  # in the second stack
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.EachStopping, "on_train_epoch_end", dies)
        with suppress(Killed):
            command(*SWEEP, *QUICK, "outputs=killed", STACKED)
    del passes[:]
    more = (*SWEEP, *QUICK, "training.lr=0.01,0.02,0.05", "outputs=killed", "ckpt_path=last", STACKED)
    written: list[None] = []
    write = gat_pyg.runs.stacked.write_outputs

    def dies_between(*arguments: Any) -> None:
        written.append(None)
        if len(written) == 3:  # after the result of the first shape's new job and one of the resumed stack
            raise Killed
        write(*arguments)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(gat_pyg.runs.stacked, "write_outputs", dies_between)
        command(*more)
    output = command(*more)
    assert passes == [[0], [0, 0], [0, 0], [0]]  # the interrupted stack is first, in its own order
    assert output.count("seed 0: 4 epochs") == 2 + 3 + 6  # the first two commands printed those of the first shape
    killed = jobs_in("killed")
    for key, folder in one.items():
        assert (folder / "metrics.csv").read_text() == (killed[key] / "metrics.csv").read_text()
        assert all(torch.equal(value, weights(killed[key])[name]) for name, value in weights(folder).items())
    lines = read("killed/results.jsonl")
    assert len(lines) == len({line.run_dir for line in lines}) == len(killed) == 6


@pytest.mark.parametrize("vectorize", ["on", "off"])
def test_a_pruned_job_ends_without_a_result_and_the_others_go_on(command: Command, vectorize: str):
    judged: list[tuple[int, int, float]] = []

    def judge(number: int, epoch: int, quality: float) -> bool:
        judged.append((number, epoch, quality))
        return (number, epoch) == (1, 2)

    with pruned_by(judge):
        sweep = ("-m", STACKED, *SMALL, "seed=3,4,5", "training.max_epochs=3", f"vectorize={vectorize}")
        assert "gat-pyg: The sweeper ended the training after epoch 2" in command(*sweep, fails=True)
    assert sorted(one[:2] for one in judged) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]
    assert [result.seed for result in read("outputs/results.jsonl")] == [3, 5]
    for number, (job, epochs) in enumerate(zip(sorted(Path("outputs").glob("*_sweep/[0-9]")), (3, 2, 3), strict=True)):
        rows = [*csv.DictReader((job / "metrics.csv").read_text().splitlines())]
        assert len(rows) == epochs
        best = max(float(row["val_accuracy"]) for row in rows)
        assert (number, epochs) == max(one[:2] for one in judged if one[0] == number)
        assert max(one for one in judged if one[0] == number)[2] == pytest.approx(best)


def test_a_job_of_several_seeds_goes_on_with_the_first_unfinished(command: Command):
    arguments = (*SMALL, "training.max_epochs=4", "runs=3", "vectorize=off")
    with interrupted_before(1):
        command(*arguments)
    first = read("outputs/results.jsonl")
    output = command(*arguments, "ckpt_path=last")
    results = read("outputs/results.jsonl")
    assert [result.seed for result in results] == [0, 1, 2]
    assert results[:1] == first
    assert "3 runs: test" in output
    assert output.splitlines()[-1] == command(*arguments, "ckpt_path=last").splitlines()[-1]  # nothing is done again
    assert read("outputs/results.jsonl") == results
    assert "no run with these settings" in command(*arguments, "training.lr=0.3", "ckpt_path=last", fails=True)


def test_a_pass_that_was_too_large_is_done_in_smaller_ones(
    command: Command, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    many = (*SMALL, "model.dropout=0.0", "runs=3", "training.max_epochs=4", "checkpoint_every=0")
    command(*many, "outputs=whole")
    keep = gat_pyg.seeds.EachStopping.on_train_epoch_end

    def dies(self: gat_pyg.seeds.EachStopping, trainer: Trainer, module: LightningModule) -> None:
        keep(self, trainer, module)
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.EachStopping, "on_train_epoch_end", dies)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            command(*many, "outputs=killed")
    assert list(Path("killed").glob("*/0.last.ckpt"))
    command(*many, "outputs=killed", "ckpt_path=last", "seeds_per_pass=2")
    assert [len(seeds) for seeds in passes] == [3, 3, 2, 1]
    values_ = [
        {one.seed: (one.value, one.epochs) for one in read(f"{place}/results.jsonl")} for place in ("whole", "killed")
    ]
    assert values_[0] == values_[1] and len(values_[0]) == 3


def test_a_run_from_a_checkpoint_that_dies_at_once_starts_from_it_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    def dies(*arguments: object) -> None:
        raise Killed

    start = (*SMALL, "training.max_epochs=4", "checkpoint_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_fit_end", dies)
        with suppress(Killed):
            command(*start, "training.lr=0.5")
    (checkpoint,) = Path("outputs").glob("*/last.ckpt")
    checkpoint.rename("first.ckpt")
    more = (*SMALL, "training.max_epochs=8", "ckpt_path=first.ckpt")
    command(*more, "outputs=whole")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_validation_end", dies)
        for begin in ("ckpt_path=first.ckpt", "ckpt_path=last"):
            with suppress(Killed):
                command(*more[:-1], begin, "outputs=killed")
    command(*more[:-1], "outputs=killed", "ckpt_path=last")
    assert left_behind("killed")["models"] == left_behind("whole")["models"]
    assert left_behind("killed")["lines"] == left_behind("whole")["lines"]


def test_lost_loader_worker_is_reported(command: Command, monkeypatch: pytest.MonkeyPatch):
    def dies(*arguments: object) -> None:
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    run = (*SMALL, "training.max_epochs=2", "checkpoint_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_fit_end", dies)
        output = command(*run, fails=True)
    assert "A worker process (loader.num_workers) ended or was killed, perhaps for lack of memory." in output
    command(*run, "ckpt_path=last")
    assert len(read("outputs/results.jsonl")) == 1


BROKEN = [b"\xff{", b"a: !!python/object/apply:os.system ['true']", b"7", b"[" * 1500]


def test_settings_that_cannot_be_read_stop_no_other_run(command: Command):
    one = (*SMALL, "training.max_epochs=2")
    command(*one)
    for number, content in enumerate(BROKEN):
        for folder in (Path(f"outputs/other-{number}"), Path(f"outputs/table/cell-{number}")):
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_bytes(content)
    assert "digits" in command(*one, "ckpt_path=last")
    assert len(read("outputs/results.jsonl")) == 1
    output = command(*one, "hydra.run.dir=outputs/other-0", "ckpt_path=last", fails=True)
    assert "config.yaml cannot be read, expected the settings" in output
    assert Path("outputs/other-0/config.yaml").read_bytes() == BROKEN[0]


def test_what_a_dead_process_left_half_written_is_removed(command: Command):
    command(*SMALL, "training.max_epochs=2", "runs=2")
    (folder,) = {path.parent for path in runs()}
    before = set(Path("outputs").rglob("*"))
    halves = [folder / ".last.ckpt.7.part", folder / ".lock", folder / "seed-1/.model.safetensors.12345.part"]
    halves += [folder / "last.ckpt", folder / "1.last.ckpt", folder / "seed-0/last.ckpt"]
    unbegun = Path("outputs/unbegun")
    unbegun.mkdir()
    for path in (*halves, unbegun / ".lock", unbegun / ".config.yaml.9.part"):
        path.touch()
    used = Path("outputs/in-use")
    used.mkdir()
    lock = try_lock(used / ".lock")
    assert lock is not None
    command(*SMALL, "training.max_epochs=2", "runs=2", "ckpt_path=last")
    assert set(Path("outputs").rglob("*")) == before | {used, used / ".lock"}
    os.close(lock)


class Killed(BaseException):
    """Stands for a SIGKILL, after which a process changes no file."""


class Dying:
    """Kills the process before its n-th change of a file, counted from the write of the first trained model.

    With ``ends=True`` it is a SIGTERM, after which the process still tidies up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, changes: int, ends: bool) -> None:
        self.left, self.ends, self.begun, self.dead = changes, ends, False, False
        self.locks: list[tuple[int, str]] = []
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10's, with the functions as imported
        for name in ("replace", "write", "unlink", "rmdir"):
            changes_file = self.counted(name, getattr(os, name))
            monkeypatch.setattr(os, name, changes_file)
            if hasattr(accessor, name):
                monkeypatch.setattr(accessor, name, changes_file)
        real = os.open

        def opens(path: Any, *arguments: Any) -> int:
            descriptor = real(path, *arguments)
            self.locks.append((descriptor, path))
            return descriptor

        monkeypatch.setattr(os, "open", opens)

    def counted(self, name: str, change: Callable[..., object]) -> Callable[..., object]:
        def changes(*values: Any) -> object:
            self.begun |= name == "replace" and Path(values[1]).name == "model.safetensors"
            if name in ("unlink", "rmdir") and not os.path.lexists(values[0]):
                return change(*values)
            self.left -= self.begun
            if self.left < 0 and not (self.dead and self.ends):
                self.dead = True
                raise SystemExit(143) if self.ends else Killed
            return change(*values)

        return changes

    def release(self) -> None:
        """Do what the system does for a process that died."""
        for descriptor, path in self.locks:
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.close(descriptor)


def left_behind(place: str) -> dict[str, Any]:
    """All that a job leaves, but for times and the names of folders."""
    lines = sorted(
        (line.dataset, line.method, line.seed, line.value, line.val) for line in read(f"{place}/results.jsonl")
    )
    names = sorted(path.name for path in Path(place).rglob("*") if path.is_file())
    metrics = sorted(path.read_text() for path in Path(place).rglob("metrics.csv"))
    models = sorted(path.read_bytes() for path in Path(place).rglob("model.safetensors"))
    return {"lines": lines, "files": names, "metrics": metrics, "models": models}


@pytest.mark.parametrize(
    ("job", "ends"),
    [
        pytest.param((), False, marks=pytest.mark.weekly),
        pytest.param((), True, marks=pytest.mark.weekly),
        pytest.param(("runs=2",), False, marks=pytest.mark.weekly),
        (("methods=mlp", "datasets=digits", "runs=1"), False),
    ],
    ids=["a run, SIGKILL", "a run, SIGTERM", "seeds together, SIGKILL", "a table, SIGKILL"],
)
def test_job_killed_between_any_two_writes_is_finished(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: tuple[str, ...],
    ends: bool,
):
    settings = ("training.max_epochs=2", "checkpoint_every=0", *(SMALL[1:] if "methods=mlp" in job else SMALL), *job)
    whole = command(*settings, "outputs=whole").splitlines()[-1]
    for changes in range(30):
        outputs = f"outputs=killed-{changes}"
        with monkeypatch.context() as patch:
            dying = Dying(patch, changes, ends)
            with suppress(Killed, SystemExit):
                command(*settings, outputs)
        dying.release()
        capsys.readouterr()
        if not dying.dead:
            break
        output = command(*settings, outputs, "ckpt_path=last").splitlines()[-1]
        assert (
            re.sub(r"killed-\d+", "whole", re.split(r", [\d.]+ seconds", output)[0])
            == re.split(r", [\d.]+ seconds", whole)[0]
        )
        assert left_behind(f"killed-{changes}") == left_behind("whole"), f"killed before change {changes}"
    assert changes > 4  # a model, a result, a line, a checkpoint, a lock
