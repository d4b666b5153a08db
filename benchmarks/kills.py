"""Kill runs at random moments and between any two writes at their end, resume them, and compare what they leave.

Each trial starts a job, kills it (SIGKILL, SIGTERM or SIGINT; the job, one of its two ranks, or a loader's worker), and
repeats the command with ckpt_path=last, which may be killed again, until it ends. Then it has to have left what an
undisturbed one leaves: the weights bit by bit, the metrics, each line of results once, the summary, status 0, no other
file. An empty folder, which Hydra makes before the command begins, is counted apart.

Processes are forked from one that has everything imported, so that a trial takes seconds (POSIX only).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file

import gat_pyg.run
import gat_pyg.sweeps.job  # imports all that the processes need, before they are forked
from gat_pyg.runs.result import read

MLP = ("model=mlp", "model.hidden_channels=8", "training.lr=0.02", "checkpoint_every=0.1")
DIGITS = (*MLP, "training.max_epochs=150", "training.patience=60")
HALO = ("model.heads=[2,1]", "training.max_epochs=25", "training.lr=0.02", "checkpoint_every=0.05")
TABLE = ("methods=[mlp,'mlp model.hidden_channels=9']", "training.lr=0.02", "checkpoint_every=0.1")
PLANTED = ("dataset=planted", "dataset.graphs=8", "training.batch_size=4")
WORKER = ("model=sage", "model.hidden_channels=[8,8]", "loader=neighbor", "loader.num_neighbors=[3,3]")
AVERAGED = ("optimizer=adamw", "scheduler=cosine", "training.warmup=5", "training.ema=0.9")
ON_PLATEAU = ("optimizer=rmsprop", "scheduler=plateau", "scheduler.patience=3", "training.gradient_clip_val=1")
ACCUMULATED = ("optimizer=sgd", "scheduler=step", "scheduler.step_size=5", "+trainer.accumulate_grad_batches=2")
KINDS: dict[str, tuple[str, ...]] = {
    "a run": (*DIGITS, *ON_PLATEAU, "training.ema=0.9"),
    "runs=5": (*DIGITS, *AVERAGED, "runs=5"),
    "runs=5, one by one": (*MLP, *ON_PLATEAU, "training.max_epochs=40", "runs=5", "vectorize=off"),
    "a table, two writers": (*TABLE, "datasets=digits", "runs=2", "vectorize=off", "training.max_epochs=60"),
    "ddp_cpu": (*PLANTED, *MLP, *ACCUMULATED, "training.max_epochs=25", "trainer=ddp_cpu"),
    "halo": (*HALO, "trainer=ddp_cpu", "trainer.strategy=halo"),
    "a loader's worker": (*WORKER, "loader.num_workers=1", "training.max_epochs=8", "checkpoint_every=0.1"),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
RANKS = ("ddp_cpu", "halo")


# Processes ----------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], object], log: Path) -> int:
    """Call `work` in a process of its own, whose output goes to `log`; the process's id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def command(arguments: Sequence[str], changes: int | None = None) -> None:
    """The command in this process, which is killed before its n-th change of a file since the first trained model."""
    if changes is not None:
        die_before(changes)
    torch.set_num_threads(1)
    start = torch.multiprocessing.start_processes
    gat_pyg.runs.stacked.spawn = lambda work, arguments, nprocs: start(work, arguments, nprocs, start_method="fork")  # type: ignore
    sys.argv = ["gat-pyg", *arguments]
    gat_pyg.run.main()


def rank(number: int, port: int, arguments: Sequence[str], changes: int | None = None) -> None:
    """One of two processes that were started from outside."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": str(number), "NODE_RANK": "0"}
    rank_zero_only.rank = number  # type: ignore[attr-defined]
    assert LightningEnvironment().creates_processes_externally
    command(arguments, changes if number == 0 else None)


def die_before(changes: int) -> None:
    left, begun = changes, False

    def counted(name: str, change: Callable[..., object]) -> Callable[..., object]:
        def counting(*passed: Any) -> object:
            nonlocal left, begun
            begun |= name == "replace" and Path(passed[1]).name == "model.safetensors"
            if begun and (name not in ("unlink", "rmdir") or os.path.lexists(passed[0])):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            return change(*passed)

        return counting

    for name in ("replace", "write", "unlink", "rmdir"):
        setattr(os, name, counted(name, getattr(os, name)))


def children(process: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("localhost", 0))
        return int(place.getsockname()[1])


# A trial ------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A command in a folder of its own, started again until it ends."""

    kind: str
    place: Path
    seconds: float = 0.0  # of an undisturbed one
    statuses: list[int] = field(default_factory=list)
    hung: bool = False  # whether both ranks stayed after one got a signal

    @property
    def outputs(self) -> Path:
        return self.place / "outputs"

    @property
    def log(self) -> Path:
        return self.place / "log"

    def start(self, resume: bool, changes: int | None = None) -> list[int]:
        """Start all its processes; the one whose end counts comes first."""
        os.chdir(self.place)
        with self.log.open("a") as log:
            log.write(f"--- {'resumed' if resume else 'begun'}\n")
        arguments = [*KINDS[self.kind], f"outputs={self.outputs}", *(["ckpt_path=last"] if resume else [])]
        if self.kind in RANKS:
            arguments.append(f"hydra.run.dir={self.outputs}/run")
            port = free_port()
            return [forked(lambda n=n: rank(n, port, arguments, changes), self.log) for n in (0, 1)]  # type: ignore
        writers = 2 if "writers" in self.kind else 1
        return [forked(lambda: command(arguments, changes), self.log) for _ in range(writers)]

    def begun(self) -> bool:
        """True if there is something to resume; a table is always resumed, by the same command."""
        return "table" not in self.kind and any(self.outputs.glob("*/config.yaml"))

    def wait(self, processes: list[int], limit: float = 150.0) -> list[int]:
        """The statuses of all, as a shell tells them; what is still there after `limit` seconds is killed."""
        end, statuses = time.monotonic() + limit, []
        for process in processes:
            while True:
                results, status = os.waitpid(process, os.WNOHANG)
                if results:
                    code = os.waitstatus_to_exitcode(status)
                    statuses.append(128 - code if code < 0 else code)
                    break
                if time.monotonic() > end:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    statuses.append(-1)
                    break
                time.sleep(0.01)
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # workers that it left
        return statuses

    def kill(self, chance: random.Random, number: signal.Signals) -> bool:
        """Start it, kill it at a random moment and wait for its end; whether it was alive."""
        processes = self.start(self.begun())
        alive = self._strike(processes, chance, number)
        self.statuses += self._wait_for_both(processes) if self.kind in RANKS else self.wait(processes)
        return alive

    def _wait_for_both(self, processes: list[int]) -> list[int]:
        """End the other process soon after one has ended, as a launcher does: it may wait in a collective."""
        end = time.monotonic() + 150
        while not any(map(ended, processes)) and time.monotonic() < end:
            time.sleep(0.01)
        self.hung |= not any(map(ended, processes))
        return self.wait(processes, 15.0)

    def _strike(self, processes: list[int], chance: random.Random, number: signal.Signals) -> bool:
        moment = time.monotonic() + chance.random() * self.seconds
        victim = chance.choice(processes) if self.kind in RANKS else processes[0]
        if self.kind == "a loader's worker":
            while not children(victim) and not ended(victim):
                time.sleep(0.01)
        time.sleep(max(0.0, moment - time.monotonic()))
        if self.kind == "a loader's worker":
            victim = chance.choice(children(victim) or [victim])
        victims = processes if "writers" in self.kind and chance.random() < 0.5 else [victim]
        alive = False
        for each in victims:
            with suppress(ProcessLookupError):
                alive |= not ended(each)
                os.kill(each, number)
        return alive

    def finish(self) -> list[int]:
        """Start it once more and let it end."""
        self.log.with_name("last").write_text("")
        size = self.log.stat().st_size if self.log.is_file() else 0
        statuses = self.wait(self.start(self.begun()))
        self.log.with_name("last").write_bytes(self.log.read_bytes()[size:])
        self.statuses += statuses
        return statuses

    def left(self) -> dict[str, Any]:
        """All that it leaves, but for times and the names of folders."""
        lines = read(self.outputs / "results.jsonl") if (self.outputs / "results.jsonl").is_file() else []
        runs = sorted(self.outputs.rglob("model.safetensors"))
        files = [path for path in self.outputs.rglob("*") if path.is_file()]
        empty = [path for path in self.outputs.rglob("*") if path.is_dir() and not any(path.iterdir())]
        output = self.log.with_name("last").read_text()
        scores = [re.sub(r", in .*|, [\d.]+ seconds.*", "", line) for line in output.splitlines()]
        summary = [line for line in scores if re.search(r"runs: test|^test   |cells are done", line)]
        return {
            "lines": sorted((one.method, one.seed, one.epochs, one.best_epoch, one.val, one.value) for one in lines),
            "weights": sorted(
                [{key: value.tolist() for key, value in load_file(run).items()} for run in runs], key=str
            ),
            "metrics": sorted((path.parent / "metrics.csv").read_text() for path in runs),
            "files": sorted(re.sub(r"^\d{4}-[^/]*", "job", str(path.relative_to(self.outputs))) for path in files),
            "summary": summary[-1:] or [output],
            "empty folder": len(empty),
            "traceback": "Traceback" in output,
            "hung": self.hung,
        }


def trial(kind: str, place: Path, whole: Job, chance: random.Random, placed: bool) -> tuple[Counter[str], list[str]]:
    """Kill a job one to three times and let it end; the kills by their kind, and how it differs from a whole one."""
    place.mkdir(parents=True)
    job, kills = Job(kind, place, whole.seconds), Counter[str]()
    for _ in range(1 if placed else chance.randint(1, 2)):
        if placed:
            processes = job.start(job.begun(), chance.randrange(PLACES[kind]))
            job.statuses += job._wait_for_both(processes) if kind in RANKS else job.wait(processes)
            kills["placed"] += 128 + signal.SIGKILL in job.statuses
        else:
            number = chance.choice(SIGNALS)
            kills[number.name] += job.kill(chance, number)
    statuses = job.finish()
    wrong = [f"status {statuses}"] if any(statuses) else []
    expected, results = whole.left(), job.left()
    wrong += [key for key in expected if results[key] != expected[key]]
    return kills, wrong


PLACES = {"a run": 6, "runs=5": 19, "runs=5, one by one": 19, "a table, two writers": 16, "ddp_cpu": 6, "halo": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="at random moments, over all kinds")
    parser.add_argument("--placed", type=int, default=20, help="between two writes at the end, over all kinds")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what the trials leave that failed")
    requested = parser.parse_args()
    chance, place = random.Random(requested.seed), Path(tempfile.mkdtemp(prefix="kills-"))
    rows = {}
    for kind in requested.kinds:
        whole = Job(kind, place / f"{requested.kinds.index(kind)}-whole")
        for _ in range(2):  # kernels are compiled at first
            shutil.rmtree(whole.place, ignore_errors=True)
            whole.place.mkdir()
            start = time.monotonic()
            if any(whole.finish()):
                raise SystemExit(f"{kind} fails undisturbed:\n{whole.log.read_text()}")
            whole.seconds = time.monotonic() - start
        rows[kind] = (whole, Counter[str](), Counter[str]())

    def table() -> str:
        names = [*(number.name for number in SIGNALS), "placed"]
        lines = [f"| job | trials | {' | '.join(names)} | defects |", "|" + "---|" * (len(names) + 3)]
        for kind, (_, kills, wrong) in rows.items():
            counts = " | ".join(str(kills[name]) for name in names)
            lines.append(
                f"| {kind} | {kills['trials']} | {counts} | {', '.join(f'{n} {k}' for k, n in wrong.items()) or 0} |"
            )
        total = sum(kills[name] for _, kills, _ in rows.values() for name in names)
        return "\n".join([*lines, f"{total} kills"])

    todo = {False: requested.kills, True: requested.placed}
    for number in range(100_000):
        placed = [key for key, left in todo.items() if left > 0]
        if not placed:
            break
        kind = requested.kinds[number % len(requested.kinds)]
        at_end = number // len(requested.kinds) % 4 == 3 and kind in PLACES if len(placed) == 2 else placed[0]
        if at_end and kind not in PLACES:
            continue
        whole, kills, wrong = rows[kind]
        here = place / str(number)
        counted, differences = trial(kind, here, whole, chance, at_end)
        kills += counted  # type: ignore[misc]
        kills["trials"] += 1
        todo[at_end] -= sum(counted.values())
        wrong.update(differences)
        print(json.dumps({"trial": number, "kind": kind, "kills": counted, "wrong": differences}), flush=True)
        if differences and requested.keep:
            shutil.copytree(here, requested.keep / str(number), dirs_exist_ok=True)
        shutil.rmtree(here, ignore_errors=True)
    print(table())
    os.chdir("/")
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
