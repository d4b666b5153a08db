"""Seconds and scores of a search by Optuna: stacked, one trial at a time, and killed at random moments (POSIX only).

    GAT_PYG_DATA=data python benchmarks/search.py           # 96 trials on Amazon Photo, 32 at a time, three kills
    python benchmarks/search.py --dataset digits --trials 8 --at-once 4 --kills 1 --longest-wait 8 --alone 2

Each way is the command in processes of its own. `alone` trains the first trials one after the other; its seconds are
for `--alone` trials, not for all. A study has to end with all its trials, none of them still in training.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import machine

SPACE = (
    "training.lr=tag(log,interval(0.001,0.1))",
    "training.weight_decay=tag(log,interval(0.00001,0.01))",
    "model.dropout=interval(0.0,0.8)",
)
STACKED = ("hydra/launcher=stacked", "hydra.sweeper.pruner._target_=optuna.pruners.MedianPruner")


def search(folder: Path, trials: int, *arguments: str, waits: Sequence[float] = ()) -> dict[str, Any]:
    """Search, with a kill after each of the `waits`; return the seconds of each process, the states and the scores."""
    settings = ("-m", "hydra/sweeper=study", f"hydra.sweeper.n_trials={trials}", f"outputs={folder}")
    command = [sys.executable, "-m", "gat_pyg.run", *settings, *SPACE, *arguments]
    seconds = []
    for wait in (*waits, None):
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        seconds.append(round(time.perf_counter() - begin, 1))
    (log,) = folder.glob("study-*/trials.log")
    storage: Any = JournalStorage(JournalFileBackend(str(log)))
    study = optuna.load_study(study_name=log.parent.name, storage=storage)
    states = dict(collections.Counter(trial.state.name for trial in study.trials))
    if process.returncode or sum(states.values()) != trials or "RUNNING" in states:
        raise SystemExit(
            f"The study in {folder} is wrong: {states}, and the last process returned {process.returncode}."
        )
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    best = max(lines, key=lambda line: line["val"])
    return {
        "trials": trials,
        "seconds": seconds,
        "states": states,
        "training_seconds": round(sum(line["seconds"] for line in lines), 1),
        "epochs": sum(line["epochs"] for line in lines),
        "best_val": best["val"],
        "its_test": best["value"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="photo")
    parser.add_argument("--trials", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--alone", type=int, default=6)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--longest-wait", type=float, default=260.0, help="seconds before a kill")
    parser.add_argument("--max-epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=30)
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in $OUT or results")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    path = options.out or machine.results(f"search-{options.dataset}", device)
    training = (f"training.max_epochs={options.max_epochs}", f"training.patience={options.patience}")
    common = (f"dataset={options.dataset}", *training)
    warm_up = "+hydra.sweeper.pruner.n_warmup_steps=20"
    stacked = (*common, *STACKED, warm_up, f"hydra.sweeper.n_jobs={options.at_once}")
    draw = random.Random(0)
    waits = [draw.uniform(options.longest_wait / 4, options.longest_wait) for _ in range(options.kills)]
    record: dict[str, Any] = {**machine.about(device), "load": os.getloadavg(), "ways": {}}
    with tempfile.TemporaryDirectory() as folder:
        for way, row in {
            "stacked": lambda: search(Path(folder, "stacked"), options.trials, *stacked),
            "killed": lambda: search(Path(folder, "killed"), options.trials, *stacked, waits=waits),
            "alone": lambda: search(Path(folder, "alone"), options.alone, *common),
        }.items():
            record["ways"][way] = row()
            machine.write(path, record)
            print(f"{way:<8} {json.dumps(record['ways'][way])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
