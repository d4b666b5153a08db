from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from gat_pyg.runs.result import Result, append, read
from gat_pyg.sweeps.ranking import Setting, best_settings
from gat_pyg.sweeps.search import Worker
from tests.commands import Command
from tests.processes import python

# A search whose trials train nothing. Its process is killed in the trial after `left` others; with -2 it first waits
# until another process has trials too.
SEARCH = """
import os, re, signal, sys, time
from types import SimpleNamespace
from hydra.errors import HydraException
from omegaconf import OmegaConf
from gat_pyg.sweeps import search

folder, total, left = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
shares = left == -2

class Launcher:
    def launch(self, jobs, initial_job_idx):
        return [self.job(dict(text.split("=") for text in job)) for job in jobs]

    def job(self, values):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while shares and len({*re.findall('"worker":"([^"]*)"', open(folder + "/trials.log").read())}) < 2:
            time.sleep(0.01)
        left -= 1
        fails = float(values["b"]) < 0.1
        value = HydraException("no luck") if fails else -abs(float(values["a"]) - 0.01) - float(values["b"])
        return SimpleNamespace(_return_value=value, status=search.JobStatus.FAILED if fails else None)

search.Setting = SimpleNamespace(of=lambda job: None)
config = OmegaConf.create({"hydra": {"sweep": {"dir": folder + "/sweep"}}})
context = SimpleNamespace(config_loader=None, callbacks=SimpleNamespace(callbacks=[]))
sampler, pruner = ({"_target_": "optuna." + name} for name in ("samplers.TPESampler", "pruners.NopPruner"))
found = search.Search(total, 4, sampler, pruner, 10, folder, {"b": "interval(0.0,0.9)"})
found.run(["a=tag(log,interval(0.001,0.1))"], config, context, Launcher())
"""


def trials(folder: Path) -> Sequence[optuna.trial.FrozenTrial]:
    storage: Any = JournalStorage(JournalFileBackend(str(folder / "trials.log")))
    return optuna.load_study(study_name=folder.name, storage=storage).trials


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_a_search_that_is_killed_three_times_is_one_that_is_not(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = python("-c", SEARCH, str(whole), "13", "-1")
    for left in (0, 2, 9):  # in the first trial, within a batch, in a later one
        process = python("-c", SEARCH, str(killed), "13", str(left))
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    storage: Any = JournalStorage(JournalFileBackend(str(killed / "trials.log")))
    optuna.load_study(study_name="killed", storage=storage).ask()  # killed before it had the settings of a trial,
    with (killed / "trials.log").open("ab") as file:
        file.write(b'{"op_code"')  # and as it wrote a line
    out, error = python("-c", SEARCH, str(killed), "13", "-1").communicate()
    took = [line for line in out.splitlines() if not line.endswith(" failed: no luck")]
    assert took == [f"Trial{text}, of a process that was killed" for text in ("s 9 to 12 of 13", " 13 of 13")], error
    out, error = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, error
    expected = [(trial.params, trial.value, trial.state) for trial in trials(whole)]
    failed = [trial.number + 1 for trial in trials(whole) if trial.state.name == "FAIL"]
    assert [line for line in out.splitlines() if "fail" in line] == [f"Trial {n} failed: no luck" for n in failed] != []
    assert [(trial.params, trial.value, trial.state) for trial in trials(killed)] == expected
    assert {trial.user_attrs.get("error") for trial in trials(killed)} == {None, "no luck"}
    out, _ = python("-c", SEARCH, str(killed), "13", "0").communicate()  # has nothing left to train
    assert out == "" and len(expected) == 13


def test_two_processes_share_a_study(tmp_path: Path):
    both = [python("-c", SEARCH, str(tmp_path), "20", "-2") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].communicate()
    assert len(trials(tmp_path)) == len({trial.params["a"] for trial in trials(tmp_path)}) == 20
    assert len({trial.user_attrs["worker"] for trial in trials(tmp_path)}) == 2
    assert all(trial.state.is_finished() for trial in trials(tmp_path))


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"", b"{}", b"5", b"<<<<<<< HEAD", b'{"op_code":'])
def test_a_damaged_line_of_a_study_is_named_with_what_to_do(damage: bytes, tmp_path: Path):
    path, pruner = tmp_path / "trials.log", optuna.pruners.NopPruner()
    with Worker.in_folder(tmp_path, pruner) as worker:
        for number in range(3):
            worker.study.tell(worker.study.ask(), float(number))
    whole = path.read_bytes()
    for number in (1, 4, whole.count(b"\n")):
        lines = whole.splitlines()
        lines[number - 1] = damage
        path.write_bytes(b"\n".join([*lines, b""]))
        text = rf"trials\.log is damaged in line {number}: .* `head -n {number - 1}`"
        with pytest.raises(ValueError, match=text), Worker.in_folder(tmp_path, pruner):
            pass
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[: number - 1]))  # as the message says
        with Worker.in_folder(tmp_path, pruner) as worker:
            assert len(worker.study.trials) == (number - 1) // 2


RATES = "0.1,0.01,0.003,0.001,0.0003"


def test_the_end_of_a_search_has_the_best_settings_and_their_command(command: Command):
    fixed = ("model.num_layers=1", "model.norm=layer", "model.dropout=0.3", "training.weight_decay=0")
    small = ("model.hidden_channels=8", "training.max_epochs=4", "runs=2", *fixed)
    every = ("hydra.sweeper.n_jobs=2", "hydra.sweeper.report_every=1", "hydra.sweeper.pruner.n_warmup_steps=0")
    search = ("-m", "search=node", *every, "hydra.sweeper.pruner.n_startup_trials=1", *small, f"training.lr={RATES}")
    out, results = command(*search), read("outputs/results.jsonl")
    (folder,) = Path("outputs").glob("study-*")
    states = [trial.state.name for trial in trials(folder)]
    assert [trial.params["training.lr"] for trial in trials(folder)] == RATES.split(",")
    assert 2 * states.count("COMPLETE") == len(results) and set(states) == {"COMPLETE", "PRUNED"} and len(states) == 5
    best = max(
        (trial for trial in trials(folder) if trial.state.name == "COMPLETE"), key=lambda trial: trial.value or 0
    )
    *_, title, command_of_best = out.splitlines()
    assert "recipe=strong/node" in command_of_best and "search" not in command_of_best
    assert title.startswith("The best has test accuracy ") and f"={best.params['training.lr']}" in command_of_best
    command(*shlex.split(command_of_best)[1:], "outputs=again")
    again = read("again/results.jsonl")
    assert [result.val for result in again] == [r.val for r in results if r.config_hash == again[0].config_hash]
    assert sum(result.val for result in again) / 2 == pytest.approx(best.value)
    assert "search=node trains many settings, each in its own job. Write" in command("search=node", fails=True)
    assert command(*search) == out[out.index(f"\n{states.count('COMPLETE')} settings of digits") :]  # trains nothing


def test_the_end_of_a_sweep_shows_whether_seeds_distinguish_the_best(tmp_path: Path):
    path = tmp_path / "results.jsonl"

    def sweep(runs: int, metric: str, *means: float) -> str:
        path.unlink(missing_ok=True)
        settings = []
        for index, mean in enumerate(means):
            overrides = ["dataset=cora", f"training.lr={index}", "model.heads=[4,1]", f"runs={runs}"]
            settings.append(Setting(overrides, "gat", "cora", str(index), "", str(path)))
            for seed in range(runs):
                val = mean + seed - (runs - 1) / 2 + 0.8 * (index * seed % 3)
                append(Result("GAT", "cora", metric, 50.0, seed, 9, 8, val, 1.0, 0.1, 9, config_hash=str(index)), path)
        return best_settings([*settings, settings[0]])

    assert sweep(1, "accuracy", 80.0) == "" == best_settings([])
    assert sweep(4, "accuracy", 80.0, 82.0, 81.5, 70.0) == (
        "\n4 settings of cora, the best first by validation accuracy, mean ± std over 4 runs:\n"
        "  82.6 ± 1.6 %  training.lr=1\n"
        "  82.1 ± 1.4 %  training.lr=2\n"
        "  80.0 ± 1.3 %  training.lr=0\n"
        "  70.0 ± 1.3 %  training.lr=3\n"
        "Significantly worse: 2 of the other 3 (p < 0.05, t-tests of the validation scores).\n"
        "To compare 2 of them by other seeds:\n"
        "  gat-pyg \"methods=['gat training.lr=1','gat training.lr=2']\" \"datasets=[cora]\" "
        '"model.heads=[4,1]" seed=4 runs=10\n'
        "The best has test accuracy 50.0 ± 0.0 %. To train it:\n"
        '  gat-pyg dataset=cora training.lr=1 "model.heads=[4,1]" runs=4\n'
    )
    text = sweep(1, "rmse", 0.9, 0.7, 0.8)
    assert "  0.700         training.lr=1\n  0.800         training.lr=2\n" in text
    assert "One run of each does not show" in text
    assert "Significantly worse: 1 of the other 1" in sweep(4, "accuracy", 80.0, 70.0)
