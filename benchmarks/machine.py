"""The machine that a benchmark runs on: its device, clock, memory and name, and the files for its results.

    python benchmarks/machine.py        # prints the prefix of this machine's result files, <date>-<machine>

TRITON_INTERPRET=1 turns what is for a GPU into a rehearsal without one: `rehearsal.py` replaces the GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gat_pyg.runs.result import versions

FOLDER = Path(__file__).parent
REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"
# replays of a CUDA graph in a row for one measurement: a single one takes no longer than its launch
TRAIN = 2 if REHEARSED else 20

if REHEARSED:
    import rehearsal

    rehearsal.begin()

DEFAULT = "cuda" if REHEARSED or torch.cuda.is_available() else "cpu"


# The device -----------------------------------------------------------------------------------------------------------


def device(name: str) -> torch.device:
    """The device of an option --device; in a rehearsal the CPU."""
    return torch.device("cpu" if REHEARSED else name)


def on_gpu(device: torch.device) -> bool:
    """Return True on a GPU and in a rehearsal of one."""
    return REHEARSED or device.type == "cuda"


def accelerator(device: torch.device) -> str:
    """Lightning's name of the device; of the command too, as in `trainer=gpu`."""
    return "gpu" if device.type == "cuda" else "cpu"


def seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Seconds of a run, the mean of `times` in a row; on a GPU by its own clock."""
    if not on_gpu(device):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / times


def now(device: torch.device) -> float:
    """The CPU's clock in seconds, once the device has done all it was given."""
    if on_gpu(device):
        torch.cuda.synchronize()
    return time.perf_counter()


def bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, bytes read and written."""
    source = torch.randn(1 << 30 if device.type == "cuda" else 1 << 25, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(7)]
    return 2 * source.nbytes / statistics.median(times) / 1e9


# Memory ---------------------------------------------------------------------------------------------------------------


def resident(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def step_peak(run: Callable[[], dict[str, Tensor]], device: torch.device) -> int | None:
    """Bytes at the peak of a step beyond what was there before and what comes out."""
    gc.collect()
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats()
        before, results, top = torch.cuda.memory_allocated(), run(), torch.cuda.max_memory_allocated()
    else:
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory freed earlier is there already
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present
        except OSError:
            return None
        before, results, top = resident("VmRSS"), run(), resident("VmHWM")
    return max(0, top - before - sum(result.nbytes for result in results.values()))


def process_peak() -> float:
    """MiB at this process's peak: those allocated on the GPU where it has used one, else those resident.

    `ru_maxrss` would count in the process that started this one, at its start.
    """
    used = torch.cuda.max_memory_allocated() if REHEARSED or torch.cuda.is_initialized() else 0
    return (used or resident("VmHWM")) / 2**20


# The command ----------------------------------------------------------------------------------------------------------


def command(*settings: str, device: torch.device) -> tuple[list[dict[str, Any]], float, float]:
    """The Results of the command in a process of its own, its seconds from start to end, and MiB at its peak."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*settings, f"trainer={accelerator(device)}", f"outputs={folder}"]
        start = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, str(FOLDER / "peak.py"), *arguments], stdout=subprocess.PIPE, text=True, check=False
        )
        taken = time.perf_counter() - start
        if ran.returncode:
            raise RuntimeError(f"gat-pyg {' '.join(arguments)} exited with {ran.returncode}: {ran.stdout[-2000:]}")
        results = [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]
    return results, taken, float(ran.stdout.split()[-1])


# Results --------------------------------------------------------------------------------------------------------------


def name(device: torch.device) -> str:
    if REHEARSED:
        return "rehearsal"
    if device.type == "cuda":
        return re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).lower()
    return f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores".lower()


def about(device: torch.device) -> dict[str, Any]:
    """The date, the machine and what is installed: the head of a file of results."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    measured: dict[str, Any] = {"date": now, "machine": name(device), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        measured["cuda"] = torch.version.cuda
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        measured["processor"] = next(line for line in lines if line.startswith("model name")).split(": ")[1]
    measured["versions"] = versions()
    for package in ("numba", "triton", "dgl", "nvidia-cudnn-frontend"):
        with suppress(importlib.metadata.PackageNotFoundError):
            measured["versions"][package] = importlib.metadata.version(package)
    return measured


def prefix(device: torch.device) -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d}-{name(device)}"


def results(what: str, device: torch.device) -> Path:
    """The file of results in $OUT, else in benchmarks/results, where no rehearsal writes."""
    folder = os.environ.get("OUT") or (tempfile.mkdtemp() if REHEARSED else FOLDER / "results")
    return Path(folder) / f"{prefix(device)}-{what}.json"


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record so that whoever is killed meanwhile leaves the one before; it is called after every row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    print(prefix(device(DEFAULT)))
