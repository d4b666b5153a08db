"""Time, peak memory and bytes per second of the attention layers beside PyG's, DGL's and cuDNN's.

    python benchmarks/attention.py                              # the whole table, on the GPU where there is one
    python benchmarks/attention.py --cases 'ppi*' --threads 2
    python benchmarks/attention.py --scale 0.01 --rounds 3      # generated graphs of a hundredth of the size

A case is a layer with its Linear, or "attention alone": the operation on given features and scores. No row before its
output and every gradient agree with float64 on the same weights, and ours also give the same bits ten times; a way that
is wrong gets no row, and the exit status is 1. Then all ways run in turns, so that a busy machine slows all alike, and
medians are told. Forward is timed without autograd; a step is forward and backward as in training, and makes the
gradient of x where the layer is not a network's first. Memory is the peak of a step beyond inputs, output and
gradients; GB/s are 2 E H C s / time, the features gathered once each way, whatever a way truly moves.

Cora, Citeseer, Pubmed and PPI are read from $GAT_PYG_DATA. Where they are not there, and for the large graphs, a graph
of the same N and E is drawn by a power law of degrees; its ids tell nothing of who is near whom, so caches serve it
worse than the real one.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gc
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch
from ways import WAYS, Case, Problem, Way, way

from gat_pyg import conv, data
from gat_pyg.attention import BACKENDS, segment
from gat_pyg.edges import Edges, neighbourhoods
from gat_pyg.results import versions

TOLERANCE = 1e-4  # of the norm and of the largest entry, in float32
REPEATS = 10  # that must give the same bits
SIZES = {  # N, E in both directions without loops, the largest degree
    "cora": (2_708, 10_556, 168),
    "citeseer": (3_327, 9_104, 99),
    "pubmed": (19_717, 88_648, 171),
    "ppi": (4_602, 125_074, 398),  # two graphs, as in a training step
    "arxiv": (169_343, 2_315_598, 13_161),
    "reddit": (232_965, 114_615_892, 21_657),
    "products": (2_449_029, 123_718_280, 17_481),
}
LARGE = ("reddit", "products")


CASES = [
    Case("cora", "cora", 1433, 8, 8, x_grad=False, special=True),
    Case("cora-sparse", "cora", 1433, 8, 8, x_grad=False, sparse=True),
    Case("cora-trained", "cora", 1433, 8, 8, x_grad=False, sparse=True, dropout=0.6),
    Case("cora-alone-8x8", "cora", 0, 8, 8),
    Case("citeseer", "citeseer", 3703, 8, 8, x_grad=False),
    Case("pubmed", "pubmed", 500, 8, 8, x_grad=False),
    Case("ppi-1", "ppi", 50, 4, 256, x_grad=False, special=True),
    Case("ppi-2", "ppi", 1024, 4, 256),
    Case("ppi-1-gatv2", "ppi", 50, 4, 256, x_grad=False, kind="GATv2Conv"),
    Case("ppi-alone-4x256", "ppi", 0, 4, 256),
    Case("arxiv", "arxiv", 128, 3, 32, x_grad=False, special=True),
    *(Case(f"arxiv-alone-{H}x{C}", "arxiv", 0, H, C) for H, C in ((3, 32), (8, 8), (4, 64))),
    Case("reddit", "reddit", 602, 8, 8, x_grad=False),
    *(Case(f"reddit-alone-{H}x{C}", "reddit", 0, H, C) for H, C in ((8, 8), (4, 64), (4, 256))),
    Case("products", "products", 100, 8, 8, x_grad=False),
    *(Case(f"products-alone-{H}x{C}", "products", 0, H, C) for H, C in ((8, 8), (4, 64), (4, 256))),
]


# Graphs ---------------------------------------------------------------------------------------------------------------


def power_law(N: int, E: int, largest: int, device: torch.device) -> Tensor:
    """An undirected graph, sorted, without loops: the expected degree of the r-th node falls as r^-0.7."""
    generator = torch.Generator(device).manual_seed(N)
    weight = torch.arange(1, N + 1, device=device, dtype=torch.float64) ** -0.7
    for _ in range(8):
        weight = weight.clamp(max=largest / E * weight.sum())
    ends = torch.cumsum(weight[torch.randperm(N, generator=generator, device=device)], 0)
    drawn = torch.rand(2, E // 2, generator=generator, device=device, dtype=torch.float64) * ends[-1]
    a, b = torch.searchsorted(ends, drawn).clamp(max=N - 1)
    b = torch.where(a == b, (b + 1) % N, b)
    key = torch.cat([a * N + b, b * N + a]).sort().values
    return torch.stack([key // N, key % N])


def load(name: str, scale: float, device: torch.device) -> tuple[Tensor, Tensor | None, int, str]:
    """edge_index, x, N and a name that tells where they are from."""
    if scale == 1 and name not in ("arxiv", *LARGE) and "GAT_PYG_DATA" in os.environ:
        try:
            graphs = data.ppi().train[2:4] if name == "ppi" else data.planetoid(name).train
        except (OSError, ValueError) as error:
            say(f"{name} is not there, a graph of its size stands in. {str(error).splitlines()[0]}")
        else:
            both = Batch.from_data_list(graphs).to(device)
            return both.edge_index, both.x.float(), both.num_nodes, name
    N, E, largest = (max(1, round(size * scale)) for size in SIZES[name])
    return power_law(N, E, max(largest, 4 * E // N), device), None, N, f"{name}-sized"


# Right or wrong -------------------------------------------------------------------------------------------------------


class Wrong(Exception):  # noqa: N818
    """An output or a gradient is not what it should be; the message says which and by how much."""


def trusted(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients in float64 on the segment backend, one head at a time so that large graphs fit."""
    case = problem.case
    leaves = {name: value.detach().double().requires_grad_() for name, value in problem.weights.items()}
    if case.kind == "GATv2Conv":
        layer = conv.GATv2Conv(case.F, case.C, case.H, backend="segment").double().to(problem.grad.device)
        layer.load_state_dict(problem.weights)
        x = problem.given["x"].double()
        return way(lambda: layer(x, problem.index), dict(layer.named_parameters()), problem.grad.double()).step()
    if case.F:
        leaves["x"] = problem.given["x"].detach().double().requires_grad_(case.x_grad)
        x = F.linear(leaves["x"], leaves["lin.weight"]).view(-1, case.H, case.C)
        of_nodes = [x, *((x * leaves[name]).sum(-1) for name in ("att_src", "att_dst"))]
    else:
        of_nodes = [*problem.given.values()]
    heads = []
    for h in range(case.H):
        head = [part[:, h : h + 1].detach().double().requires_grad_() for part in of_nodes]
        out = segment.attend(*head, problem.edges)[0]
        grad = problem.grad.view(-1, case.H, case.C)[:, h : h + 1].double()
        heads.append([part.detach().float() for part in (out, *torch.autograd.grad(out, head, grad))])
    out, *grads = (torch.cat(part, 1) for part in zip(*heads, strict=True))
    if not case.F:
        return {"output": out, **dict(zip(problem.given, grads, strict=True))}
    bias = leaves.pop("bias").detach()
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    back = torch.autograd.grad(of_nodes, [*leaves.values()], [part.double() for part in grads])
    return {
        "output": out.flatten(1) + bias,
        "bias": problem.grad.double().sum(0),
        **dict(zip(leaves, back, strict=True)),
    }


def check(results: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest error, relative to the norm or to the largest entry of what it should be; NaN is wrong."""
    worst = 0.0
    for name, expected in right.items():
        got, what = results.get(name), "output" if name == "output" else f"gradient of {name}"
        if got is None or got.numel() != expected.numel():
            raise Wrong(f"{what} is {'missing' if got is None else f'of shape {tuple(got.shape)}'}")
        off, expected = (got.reshape(expected.shape) - expected).flatten(), expected.flatten()
        for order in (2, float("inf")):
            size = torch.linalg.vector_norm(expected, order).clamp(min=1e-30)
            error = float(torch.linalg.vector_norm(off, order) / size)
            if not error <= TOLERANCE:
                raise Wrong(f"{what} is off by {error:.1e} of its size, allowed {TOLERANCE:.0e}")
            worst = max(worst, error)
    return worst


def check_bits(made: Way) -> None:
    first = made.step()
    for _ in range(REPEATS - 1):
        for name, again in made.step().items():
            if not torch.equal(first[name], again):
                raise Wrong(f"{name} does not have the same bits in {REPEATS} steps")


# Measures -------------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def resident(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def peak(run: Callable[[], dict[str, Tensor]], device: torch.device) -> int | None:
    """Bytes at the peak of a step beyond what was there before and what comes out."""
    gc.collect()
    if device.type == "cuda":
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


def structure(problem: Problem, device: torch.device) -> tuple[float, int]:
    """Seconds and bytes of the neighbourhoods and their transpose, built once per graph."""
    times = []
    for _ in range(3):
        graph, built = problem.index.clone(), []

        def build(graph: Tensor = graph, built: list[Edges] = built) -> None:
            built.append(neighbourhoods(graph, problem.N, problem.N, add_self_loops=problem.case.F > 0)[1])
            _ = built[0].transpose

        times.append(seconds(build, device))
    held = [part for value in vars(built[0]).values() for part in (value if isinstance(value, tuple) else (value,))]
    return statistics.median(times), sum({t.data_ptr(): t.nbytes for t in held if isinstance(t, Tensor)}.values())


def bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, bytes read and written."""
    source = torch.randn(1 << 30 if device.type == "cuda" else 1 << 25, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(7)]
    return 2 * source.nbytes / statistics.median(times) / 1e9


def out_of_time(*_: object) -> None:
    raise TimeoutError("the time for it is over")


def prepare(name: str, problem: Problem, right: dict[str, Tensor], limit: float) -> tuple[Way, dict[str, Any]] | None:
    """A way warmed up and checked, with and without autograd, and what was found; None where it has no such case."""
    made = WAYS[name](problem)
    if made is None:
        return None
    for most in (limit, limit if name == "pyg" else limit / 3):  # the first step may compile
        taken = seconds(made.step, problem.grad.device)
        if taken > most:
            raise TimeoutError(f"a step takes {taken:.1f} s")
    if name == "Linear alone":
        return made, {}
    error = check(made.step(), right)
    with torch.no_grad():
        check({"output": made.forward()}, {"output": right["output"]})
    if name.startswith("auto") and "fused" in BACKENDS:
        check_bits(made)
        return made, {"error": error, "same_bits": True}
    return made, {"error": error}


def measure(problem: Problem, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for every way that is there and right, and what is wrong with the others."""
    case, device, right = problem.case, problem.grad.device, trusted(problem)
    ready: dict[str, Way] = {}
    rows: dict[str, dict[str, Any]] = {}
    wrong = []
    for name in options.ways:
        compiles = name == "pyg compiled"
        if compiles and not options.compile:
            continue
        try:
            signal.setitimer(signal.ITIMER_REAL, options.compile if compiles else 0, 5)
            found = prepare(name, problem, right, options.seconds)
        except Wrong as error:
            wrong.append(f"{case.name}: {name} is wrong, its {error}")
        except Exception as error:  # a way may be not installed or have no memory left, but ours must run
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if name in BACKENDS and not case.sparse and not isinstance(error, torch.OutOfMemoryError | TimeoutError):
                wrong.append(f"{case.name}: {name} does not run. {reason}")
            else:
                say(f"{name} left out{'' if isinstance(error, ImportError) else f' of {case.name}'}. {reason}")
        else:
            if found is not None:
                ready[name], rows[name] = found[0], {"case": case.name, "way": name, **found[1]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    del right
    problem.p = case.dropout
    for name, made in ready.items():
        rows[name] |= {"forward": [], "step": []}
        rows[name]["peak_bytes"] = None if "CUDA graph" in name else peak(made.step, device)
    end, done = time.perf_counter() + options.seconds, 0
    while done < min(3, options.rounds) or (done < options.rounds and time.perf_counter() < end):
        for name, made in ready.items():
            with torch.no_grad():
                rows[name]["forward"].append(seconds(made.forward, device))
            rows[name]["step"].append(seconds(made.step, device))
        done += 1
    built, held = structure(problem, device)
    for name, row in rows.items():
        if "pyg" in rows:
            pairs = zip(rows["pyg"]["step"], row["step"], strict=True)
            row["times_pyg"] = statistics.median(theirs / own for theirs, own in pairs)
        if name != "Linear alone":
            row["gather_gb_s"] = problem.gathered / statistics.median(row["step"]) / 1e9
        if name in BACKENDS:
            row |= {"structure_seconds": built, "structure_bytes": held}
    return [*rows.values()], wrong


# The table ------------------------------------------------------------------------------------------------------------


def say(line: str, told: set[str] = set()) -> None:  # noqa: B006
    """Once, beside the table."""
    if line not in told:
        print(line, file=sys.stderr, flush=True)
        told.add(line)


def told(title: str, row: dict[str, Any]) -> str:
    def number(value: float | None, unit: float = 1.0) -> str:
        return "" if value is None else f"{value * unit:,.0f}" if value * unit >= 100 else f"{value * unit:.3g}"

    cells = [title, row["way"], *(number(statistics.median(row[what]), 1e3) for what in ("forward", "step"))]
    cells += [number(row.get("times_pyg")), number(row["peak_bytes"], 2**-20), number(row.get("gather_gb_s"))]
    cells += [number(row.get("structure_seconds"), 1e3), "same" if row.get("same_bits") else ""]
    return f"| {' | '.join(cells)} |"


def about(device: torch.device) -> dict[str, Any]:
    """The machine and what is installed."""
    found: dict[str, Any] = {"machine": f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores".lower()}
    if device.type == "cuda":
        found = {"machine": re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).lower(), "cuda": torch.version.cuda}
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found["processor"] = next(line for line in lines if line.startswith("model name")).split(": ")[1]
    found |= {"threads": torch.get_num_threads(), "copy_gb_s": bandwidth(device), "versions": versions()}
    for package in ("numba", "triton", "dgl", "nvidia-cudnn-frontend"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found["versions"][package] = importlib.metadata.version(package)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["*"], help=f"patterns of {', '.join(c.name for c in CASES)}")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="what to compare")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--threads", type=int, help="of torch and of the kernels")
    parser.add_argument("--rounds", type=int, default=50, help="at most; at least 3 of them whatever the time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="for a case's rounds; a way whose step takes a third is left out, PyG's not",
    )
    parser.add_argument("--compile", type=float, default=0.0, help="seconds that torch.compile gets for PyG's layer")
    parser.add_argument("--scale", type=float, default=1.0, help="of N and E; other than 1, every graph is generated")
    parser.add_argument(
        "--out", type=Path, help="the JSON file, else benchmarks/results/<date>-<machine>-attention.json"
    )
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    signal.signal(signal.SIGALRM, out_of_time)
    warnings.filterwarnings("ignore", "Sparse CS[RC] tensor support is in beta")
    graph = lru_cache(maxsize=1)(load)
    record: dict[str, Any] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **about(options.device)}
    record |= {"scale": options.scale, "graphs": {}, "cases": [], "rows": [], "wrong": []}
    out = options.out
    if out is None:
        out = Path(__file__).parent / "results" / f"{record['date'][:10]}-{record['machine']}-attention.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    print("| case | way | forward ms | forward + backward ms | times PyG's speed | peak MiB | GB/s | build ms | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if not any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases):
            continue
        if case.graph in LARGE and options.device.type == "cpu" and options.scale == 1 and options.cases == ["*"]:
            say(f"{case.graph} left out on a CPU. Name its cases, or scale it down.")
            continue
        index, x, N, label = graph(case.graph, options.scale, options.device)
        problem = Problem(case, index, x, N)
        degree = problem.looped[1].bincount(minlength=N).double()
        degrees = {f"{how}_degree": float(getattr(degree, how)()) for how in ("mean", "median", "max")}
        record["graphs"][label] = {"nodes": N, "edges": problem.looped.size(1), **degrees}
        record["cases"].append({**asdict(case), "gathered_bytes": problem.gathered, "least_bytes": problem.least})
        rows, wrong = measure(problem, options)
        record["rows"] += rows
        record["wrong"] += wrong
        print("".join(told(f"{label}, {case}", row) + "\n" for row in rows), end="", flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
        del problem
    print()
    for label, facts in record["graphs"].items():
        print(f"- {label}, with loops: " + ", ".join(f"{value:,.10g} {key}" for key, value in facts.items()))
    print("\n".join([f"\nWritten to {out}", *(f"WRONG {entry}" for entry in record["wrong"])]))
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
