"""Seconds of an epoch on an idle machine and beside busy processes, for each way of choosing threads.

    python benchmarks/threads.py                  # digits, 20 seeds of Cora and PPI, beside 0, 2 and 4 processes
    python benchmarks/threads.py --cases digits --busy 0 2 --rounds 1

Each way is a process of its own, since torch reads how threads wait once; within it each case runs beside each number
of busy processes. "chosen" is what the command does by itself; the others set the environment, which it respects.
`--src` names the source of another version to measure in the same rounds, as "before".
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

CASES = {
    "digits": ["dataset=digits", "training.max_epochs=100"],
    "cora": ["dataset=cora", "training.max_epochs=100"],
    "cora, 20 seeds": ["dataset=cora", "runs=20", "training.max_epochs=20"],
    "pubmed": ["dataset=pubmed", "training.max_epochs=40"],
    "ppi": ["dataset=ppi", "training.max_epochs=1"],
}
WAYS = {
    "chosen": {},
    "passive": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(os.cpu_count())},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SPIN = "while True: pass"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def epoch(case: str, *more: str) -> float:
    """Return the milliseconds of an epoch of the command, for all seeds together."""
    from gat_pyg.run import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["gat-pyg", *CASES[case], *more, f"outputs={folder}", f"results={folder}/results.jsonl"]
        main()
        lines = [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]
    return 1e3 * sum(line["seconds_per_epoch"] for line in lines)


def measure(cases: Sequence[str], loads: Sequence[int]) -> None:
    """Print a JSON line for each case and load."""
    for case in cases:
        epoch(case, "training.max_epochs=1")  # compiles, reads files
        for load in loads:
            with busy(load):
                milliseconds = epoch(case)
            print(json.dumps({"case": case, "busy": load, "ms": round(milliseconds, 2)}), flush=True)


def main() -> None:
    """Measure every way in turn, round by round, and print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["digits", "cora, 20 seeds", "ppi"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2, 4], help="how many busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--src", help="source folder of an earlier version, measured as 'before'")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.cases, options.busy)
        return
    ways = WAYS | ({"before": {"PYTHONPATH": options.src}} if options.src else {})
    figures: dict[tuple[str, int, str], list[float]] = {}
    command = [sys.executable, __file__, "--measure", "--cases", *options.cases, "--busy", *map(str, options.busy)]
    for _ in range(options.rounds):
        for way, environment in ways.items():
            done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                row = json.loads(line)
                figures.setdefault((row["case"], row["busy"], way), []).append(row["ms"])
    rows = []
    for case in options.cases:
        for load in options.busy:
            rows.append(
                {"case": case, "busy": load} | {way: statistics.median(figures[case, load, way]) for way in ways}
            )
            cells = ", ".join(f"{way} {rows[-1][way]:.1f} ms" for way in ways)
            print(f"{case}, beside {load} busy processes: {cells}", flush=True)
    if options.out:
        about = {
            "machine": f"{platform.system()}-{platform.machine()}, {os.cpu_count()} cores",
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "rounds": options.rounds,
        }
        record = about | {"rows": rows, "all": [[*key, values] for key, values in figures.items()]}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
