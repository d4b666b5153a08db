"""Time, peak memory and bytes per second of the attention layers beside PyG's, DGL's and cuDNN's.

    python benchmarks/attention.py                              # the whole table, on the GPU where there is one
    python benchmarks/attention.py --cases 'ppi*' --threads 2
    python benchmarks/attention.py --scale 0.01 --rounds 3      # generated graphs of a hundredth of the size
    python benchmarks/attention.py --cases 'products-alone-8x8*' --variants SPLIT=128 SPLIT=512
    python benchmarks/attention.py --cases 'arxiv-alone-4x256*' --ways auto --variants    # all that are open

A case is a layer with its Linear, or "attention alone": the operation on given features and scores. No row before its
output and every gradient agree with float64 on the same weights, and ours also give the same bits ten times; a way that
is wrong gets no row, and where it is ours the exit status is 1. Medians are printed. On a CPU all ways of a case run in
turns, so that a busy machine slows all alike; on a GPU one after the other, each with the memory to itself. The file of
results is written anew after every row. Forward is timed without autograd; a step is forward and backward as in
training, and makes the gradient of x where the layer is not a network's first. CUDA graphs are replayed 20 times in a
row, so their caches are warm. Memory is the peak of a step beyond inputs, output and gradients; GB/s are
2 E H C s / time, the features gathered once each way, whatever a way truly moves.

With dropout, ours are compared with float64 under the same mask, and all others without dropout: they draw their own.

Cora, Citeseer, Pubmed and PPI are read from $GAT_PYG_DATA. Where they are not there, and for the large graphs, a graph
of the same N and E is drawn by a power law of degrees; its ids tell nothing of who is near whom, so caches serve it
worse than the real one.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch

import gat_pyg
import machine
from gat_pyg.attention import Additive, segment
from gat_pyg.attention.operation import BACKENDS
from gat_pyg.data.named import citation, proteins
from gat_pyg.graph.adjacency import neighbourhoods
from gat_pyg.graph.edges import Edges
from gat_pyg.philox import draw_seed, keep_mask
from machine import on_gpu, seconds
from ways import WAYS, Case, Problem, Way, variant, variants, way

# Of the norm and of the largest entry. In float32 some scores lie on the other side of the LeakyReLU than in float64:
# gradients are off by 1e-3 then on the generated graphs, with PyG's layer as with ours.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
ROUNDED = 0.1  # for layers under autocast: many more scores lie on the other side
REPEATS = 2 if machine.REHEARSED else 10  # that must give the same bits
SEED = 0  # of torch's generator, before every step whose result is looked at
FIRST = 200.0  # seconds that the first step may take where it compiles
SIZES = {  # N, E in both directions without loops, the largest degree
    "cora": (2_708, 10_556, 168),
    "citeseer": (3_327, 9_104, 99),
    "pubmed": (19_717, 88_648, 171),
    "ppi": (4_602, 125_074, 398),  # two graphs, as in a training step
    "molecules": (600, 1_300, 4),  # a batch of 32
    "20 nodes": (20, 60, 8),
    "200 nodes": (200, 800, 20),
    "edges": (20_000, 200_000, 100),
    "arxiv": (169_343, 2_315_598, 13_161),
    "reddit": (232_965, 114_615_892, 21_657),
    "products": (2_449_029, 123_718_280, 17_481),
}
LARGE = ("reddit", "products")


CASES = [
    Case("cora", "cora", 1433, 8, 8, x_grad=False, special=True),
    Case("cora-gatv2", "cora", 1433, 8, 8, x_grad=False, kind="GATv2Conv"),
    Case("cora-sparse", "cora", 1433, 8, 8, x_grad=False, sparse=True),
    Case("cora-trained", "cora", 1433, 8, 8, x_grad=False, sparse=True, dropout=0.6),
    Case("cora-alone-8x8", "cora", 0, 8, 8, special=True),
    Case("citeseer", "citeseer", 3703, 8, 8, x_grad=False),
    Case("pubmed", "pubmed", 500, 8, 8, x_grad=False),
    Case("ppi-1", "ppi", 50, 4, 256, x_grad=False, special=True),
    Case("ppi-2", "ppi", 1024, 4, 256),
    Case("ppi-1-gatv2", "ppi", 50, 4, 256, x_grad=False, kind="GATv2Conv"),
    Case("ppi-alone-4x256", "ppi", 0, 4, 256),
    Case("molecules", "molecules", 64, 4, 16, fresh=True, special=True),
    *(
        Case(
            f"molecules-{kind}-{edge_dim}" + f"-{layers}" * (layers > 1),
            "molecules",
            64,
            4,
            16,
            kind=f"{kind}Conv",
            edge_dim=edge_dim,
            fresh=True,
            layers=layers,
            special=True,
        )
        for kind in ("GAT", "GATv2", "Transformer")
        for edge_dim in (0, 8)
        for layers in (1, 4)
        if (kind, edge_dim, layers) != ("GAT", 0, 1)  # the case before
    ),
    *(
        Case(f"{size}-nodes-{kind}", f"{size} nodes", 64, 4, 16, kind=f"{kind}Conv", fresh=True)
        for size in (20, 200)
        for kind in ("GAT", "GATv2", "Transformer")
    ),
    *(
        Case(f"edges-{kind}-{edge_dim}", "edges", 128, 8, 16, kind=f"{kind}Conv", edge_dim=edge_dim, special=True)
        for kind in ("GAT", "GATv2", "Transformer")
        for edge_dim in (0, 16)
    ),
    *(
        Case(f"edges-{kind}-{fill}", "edges", 128, 8, 16, kind=f"{kind}Conv", edge_dim=16, fill=fill)
        for kind in ("GAT", "GATv2")
        for fill in ("add", "min", "max", "mul")
    ),
    Case("edges-hetero", "edges", 128, 8, 16, kind="HeteroConv", special=True),
    Case("arxiv", "arxiv", 128, 3, 32, x_grad=False, special=True),
    Case("arxiv-gatv2", "arxiv", 128, 3, 32, x_grad=False, kind="GATv2Conv"),
    *(Case(f"arxiv-alone-{H}x{C}", "arxiv", 0, H, C) for H, C in ((3, 32), (8, 8), (4, 64), (4, 256))),
    Case("reddit", "reddit", 602, 8, 8, x_grad=False),
    *(Case(f"reddit-alone-{H}x{C}", "reddit", 0, H, C) for H, C in ((8, 8), (4, 64), (4, 256))),
    Case("products", "products", 100, 8, 8, x_grad=False),
    *(Case(f"products-alone-{H}x{C}", "products", 0, H, C) for H, C in ((8, 8), (4, 64), (4, 256))),
]
HEADLINES = [  # attention alone, as the layers of these graphs have it, in both dtypes with and without dropout
    replace(case, name=f"{case.name}{'-bf16' * half}{'-dropout' * drops}", dropout=0.6 * drops, dtype=dtype)
    for case in CASES
    if case.name in ("products-alone-8x8", "reddit-alone-8x8", "arxiv-alone-4x256", "cora-alone-8x8")
    for half, dtype in enumerate((torch.float32, torch.bfloat16))
    for drops in (False, True)
    if half or drops
]

AUTOCAST = [  # layers on few and on many edges, under autocast to bfloat16
    replace(case, name=f"{case.name}-bf16", special=False, dtype=torch.bfloat16)
    for case in CASES
    if case.name.startswith(("200-nodes-", "edges-")) and not case.edge_dim and case.kind != "HeteroConv"
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
    if scale == 1 and name in ("cora", "citeseer", "pubmed", "ppi") and "GAT_PYG_DATA" in os.environ:
        try:
            graphs = proteins.ppi().train[2:4] if name == "ppi" else citation.planetoid(name).train
        except (OSError, ValueError) as error:
            print_once(f"{name} is not there, a graph of its size stands in. {str(error).splitlines()[0]}")
        else:
            both = Batch.from_data_list(graphs).to(device)
            return both.edge_index, both.x.float(), both.num_nodes, name
    sizes = machine.rehearsal.SIZE if machine.REHEARSED else SIZES[name]
    N, E, largest = (max(1, round(size * scale)) for size in sizes)
    return power_law(N, E, max(largest, 4 * E // N), device), None, N, f"{name}-sized"


# Right or wrong -------------------------------------------------------------------------------------------------------


class Wrong(Exception):  # noqa: N818
    """An output or a gradient is not what it should be; the message says which and by how much."""


def trusted(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients in float64 on the segment backend, one head at a time so that large graphs fit."""
    case = problem.case
    leaves = {name: value.detach().double().requires_grad_() for name, value in problem.weights.items()}
    if case.kind != "GATConv" or case.edge_dim or case.layers > 1:
        layer = case.layer(gat_pyg, backend="segment").double().to(problem.grad.device)
        layer.load_state_dict(problem.weights)
        x, *features = (value.detach().double() for value in problem.given.values())
        leaves = dict(layer.named_parameters())
        return way(lambda: layer(x, problem.index, *features), leaves, problem.grad.double()).step()
    if case.F:
        leaves["x"] = problem.given["x"].detach().double().requires_grad_(case.x_grad)
        x = F.linear(leaves["x"], leaves["lin.weight"]).view(-1, case.H, case.C)
        of_nodes = [x, *((x * leaves[name]).sum(-1) for name in ("att_src", "att_dst"))]
    else:
        of_nodes = [*problem.given.values()]
    mask = None
    if problem.p:
        torch.manual_seed(SEED)
        mask = keep_mask(draw_seed(problem.grad.device), problem.edges.dropout_edges, case.H, problem.p)
    heads = []
    for h in range(case.H):
        head = [part[:, h : h + 1].detach().double().requires_grad_() for part in of_nodes]
        keep = None if mask is None else mask[:, h : h + 1].double()
        out = segment.attend(head[0], Additive(*head[1:]), problem.edges, keep)[0]
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


def norm(part: Tensor, order: float) -> float:
    return float(torch.linalg.vector_norm(part, order)) if part.numel() else 0.0


def check(results: dict[str, Tensor], right: dict[str, Tensor], case: Case) -> float:
    """The largest error, relative to the norm or to the largest entry of what it should be; NaN is wrong.

    A gradient that is below a thousandth of the largest, or three hundredths under autocast, is compared with that: the
    one of the keys' bias is zero but for rounding.
    """
    rounds = case.F > 0 and case.dtype != torch.float32
    worst, tolerance, least = 0.0, ROUNDED if rounds else TOLERANCE[case.dtype], 3e-2 if rounds else 1e-3
    largest = {order: max(norm(part, order) for part in right.values()) for order in (2, float("inf"))}
    for name, expected in right.items():
        got, what = results.get(name), "output" if name == "output" else f"gradient of {name}"
        if got is None or got.numel() != expected.numel():
            raise Wrong(f"{what} is {'missing' if got is None else f'of shape {tuple(got.shape)}'}")
        expected = expected.to(got.device)
        off, expected = (got.reshape(expected.shape) - expected).flatten(), expected.flatten()
        for order, most in largest.items():
            error = norm(off, order) / max(norm(expected, order), least * most, 1e-30)
            if not error <= tolerance:
                raise Wrong(f"{what} is off by {error:.1e} of its size, allowed {tolerance:.0e}")
            worst = max(worst, error)
    return worst


def again(run: Callable[[], Any]) -> Any:
    """Run it with the same dropout every time."""
    torch.manual_seed(SEED)
    return run()


def check_bits(made: Way) -> None:
    first = {name: result.clone() for name, result in again(made.step).items()}  # a CUDA graph writes over its results
    for _ in range(REPEATS - 1):
        for name, result in again(made.step).items():
            if not torch.equal(first[name], result):
                raise Wrong(f"{name} does not have the same bits in {REPEATS} steps")


# Measures -------------------------------------------------------------------------------------------------------------


def structure(problem: Problem, device: torch.device) -> tuple[float, int]:
    """Seconds and bytes of the neighbourhoods and their transpose, built once per graph."""
    times = []
    for _ in range(3):
        graph, built = problem.index.clone(), []

        def build(graph: Tensor = graph, built: list[Edges] = built) -> None:
            built.append(neighbourhoods(graph, problem.N, problem.N, add_self_loops=problem.case.F > 0))
            _ = built[0].transpose

        times.append(seconds(build, device))
    held = [part for value in vars(built[0]).values() for part in (value if isinstance(value, tuple) else (value,))]
    return statistics.median(times), sum({t.data_ptr(): t.nbytes for t in held if isinstance(t, Tensor)}.values())


def out_of_time(*_: object) -> None:
    raise TimeoutError("the time for it is over")


def is_ours(name: str) -> bool:
    return name in BACKENDS or name.startswith("auto")


def prepare(
    name: str, problem: Problem, right: dict[float, dict[str, Tensor]], limit: float
) -> tuple[Way, dict[str, Any]] | None:
    """A way warmed up and checked, with and without autograd, and what was found; None where it has no such case."""
    case, device, results = problem.case, problem.grad.device, {}
    compiles = is_ours(name) or name == "pyg compiled"
    first, later = max(FIRST, limit) if compiles else limit, limit if name == "pyg" else limit / 3
    for p in sorted({0.0, case.dropout}):
        problem.p = p
        if (made := WAYS[name](problem)) is None:
            return None
        for most in (first, later):  # the first step may compile
            taken = seconds(made.step, device)
            if taken > most:
                raise TimeoutError(f"a step takes {taken:.1f} s")
        if name == "Linear alone" or p not in right or (p and not is_ours(name)):
            continue
        error = check(again(made.step), right[p], case)
        with torch.no_grad():
            check({"output": again(made.forward)}, {"output": right[p]["output"]}, case)
        results["error"] = max(error, results.get("error", 0.0))
        if name.startswith("auto") and "fused" in BACKENDS:
            check_bits(made)
            results["same_bits"] = True
    return made, results


def attempt(
    name: str, problem: Problem, right: dict[float, dict[str, Tensor]], options: argparse.Namespace
) -> tuple[Way, dict[str, Any]] | str | None:
    """Return what `prepare` does, what is wrong with the way if it raises, or None if it may raise.

    Others may be not installed, or have no time or memory left, but ours must run.
    """
    case = problem.case
    try:
        signal.setitimer(signal.ITIMER_REAL, options.compile if name == "pyg compiled" else 0, 5)
        return prepare(name, problem, right, options.seconds)
    except Wrong as error:
        return f"{case.name}: {name} is wrong, its {error}"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if is_ours(name) and not case.sparse and not isinstance(error, torch.OutOfMemoryError | TimeoutError):
            return f"{case.name}: {name} does not run. {reason}"
        print_once(f"{name} left out{'' if isinstance(error, ImportError) else f' of {case.name}'}. {reason}")
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure(problem: Problem, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Every way that is there, with its row or with what is wrong with it."""
    case, device, right = problem.case, problem.grad.device, {}
    for p in {0.0, 0.0 if case.F else case.dropout}:
        problem.p = p
        right[p] = {name: value.cpu() for name, value in trusted(problem).items()}  # up to 20 GB
    names = [name for name in options.ways if name != "pyg compiled" or options.compile]
    structures, theirs = None, None
    for turns in [[name] for name in names] if on_gpu(device) else [names]:
        ready: dict[str, Way] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in turns:
            results = attempt(name, problem, right, options)
            if isinstance(results, str):
                yield name, results
            elif results is not None:
                ready[name], rows[name] = results[0], {"case": case.name, "way": name, **results[1]}
            results = None
            clear()
        problem.p = case.dropout
        run_in_turns(ready, rows, device, options)
        ready.clear()
        clear()
        theirs = rows["pyg"]["step"] if "pyg" in rows else theirs
        for name, row in rows.items():
            if theirs:
                row["times_pyg"] = statistics.median(pyg / own for pyg, own in zip(theirs, row["step"], strict=False))
            if name != "Linear alone":
                row["gather_gb_s"] = problem.gathered / statistics.median(row["step"]) / 1e9
            if name in BACKENDS:
                structures = structures or structure(problem, device)
                row["structure_seconds"], row["structure_bytes"] = structures
            yield name, row


def run_in_turns(
    ready: dict[str, Way], rows: dict[str, dict[str, Any]], device: torch.device, options: argparse.Namespace
) -> None:
    for name, made in ready.items():
        peak = None if made.times > 1 else machine.step_peak(made.step, device)
        rows[name] |= {"forward": [], "step": [], "peak_bytes": peak}
    end, done = time.perf_counter() + options.seconds, 0
    while done < min(3, options.rounds) or (done < options.rounds and time.perf_counter() < end):
        for name, made in ready.items():
            with torch.no_grad():
                rows[name]["forward"].append(seconds(made.forward, device, made.times))
            rows[name]["step"].append(seconds(made.step, device, made.times))
        done += 1


def clear() -> None:
    """Free the memory that nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()


# The table ------------------------------------------------------------------------------------------------------------


def print_once(line: str, printed: set[str] = set()) -> None:  # noqa: B006
    """Print a line to stderr, unless it has been printed before."""
    if line not in printed:
        print(line, file=sys.stderr, flush=True)
        printed.add(line)


def table_row(title: str, row: dict[str, Any]) -> str:
    def number(value: float | None, unit: float = 1.0) -> str:
        return "" if value is None else f"{value * unit:,.0f}" if value * unit >= 100 else f"{value * unit:.3g}"

    cells = [title, row["way"], *(number(statistics.median(row[what]), 1e3) for what in ("forward", "step"))]
    cells += [number(row.get("times_pyg")), number(row["peak_bytes"], 2**-20), number(row.get("gather_gb_s"))]
    cells += [number(row.get("structure_seconds"), 1e3), "same" if row.get("same_bits") else ""]
    return f"| {' | '.join(cells)} |"


def selected_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases in the order of the patterns."""
    matches = (
        c for pattern in options.cases for c in (*CASES, *AUTOCAST, *HEADLINES) if fnmatch.fnmatch(c.name, pattern)
    )
    for case in dict.fromkeys(matches):
        large = case.graph in LARGE or case in HEADLINES
        if large and not on_gpu(options.device) and options.scale == 1 and options.cases == ["*"]:
            print_once(f"{case.name} left out on a CPU. Name the case, or scale it down.")
        else:
            yield case


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(case.name for case in (*CASES, *AUTOCAST, *HEADLINES))
    parser.add_argument("--cases", nargs="*", default=["*"], help=f"patterns of {names}, in this order")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="what to compare")
    parser.add_argument("--device", default=machine.DEFAULT, type=machine.device)
    parser.add_argument("--threads", type=int, help="of torch and of the kernels")
    parser.add_argument("--rounds", type=int, default=50, help="at most; at least 3 of them whatever the time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="for a case's rounds; a way whose step takes a third is left out, PyG's not",
    )
    parser.add_argument(
        "--variants",
        nargs="*",
        help="more ways: ours with constants of the CUDA kernels, as SPLIT=64; alone: all open ones",
    )
    parser.add_argument("--compile", type=float, default=0.0, help="seconds that torch.compile gets for PyG's layer")
    parser.add_argument("--scale", type=float, default=1.0, help="of N and E; other than 1, every graph is generated")
    parser.add_argument("--name", default="attention", help="of the JSON file: <date>-<machine>-<name>.json")
    parser.add_argument("--out", type=Path, help="the JSON file, else in $OUT or benchmarks/results")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    signal.signal(signal.SIGALRM, out_of_time)
    warnings.filterwarnings("ignore", "Sparse CS[RC] tensor support is in beta")
    graph = lru_cache(maxsize=1)(load)
    record: dict[str, Any] = {**machine.about(options.device), "copy_gb_s": machine.bandwidth(options.device)}
    record |= {"scale": options.scale, "graphs": {}, "cases": [], "rows": [], "wrong": []}
    out = options.out or machine.results(options.name, options.device)
    for setting in [] if options.variants is None else options.variants or variants():
        WAYS[f"auto, {setting}"] = variant(setting)
        options.ways = [*options.ways, f"auto, {setting}"]
    status = 0
    print("| case | way | forward ms | forward + backward ms | times PyG's speed | peak MiB | GB/s | build ms | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in selected_cases(options):
        problem, label = None, case.graph
        try:
            index, x, N, label = graph(case.graph, options.scale, options.device)
            problem = Problem(case, index, x, N)
            degree = problem.looped[1].bincount(minlength=N).double()
            degrees = {f"{how}_degree": float(getattr(degree, how)()) for how in ("mean", "median", "max")}
            record["graphs"][label] = {"nodes": N, "edges": problem.looped.size(1), **degrees}
            record["cases"].append(
                {
                    **asdict(case),
                    "dtype": str(case.dtype),
                    "gathered_bytes": problem.gathered,
                    "least_bytes": problem.least,
                }
            )
            for name, results in measure(problem, options):
                if isinstance(results, str):
                    record["wrong"].append(results)
                    status |= is_ours(name)
                else:
                    record["rows"].append(results)
                    print(table_row(f"{label}, {case}", results), flush=True)
                machine.write(out, record)
        except Exception as error:  # of what the ways have in common; the next case may do
            record["wrong"].append(f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            status = 1
            machine.write(out, record)
        del problem
        clear()
    print()
    for label, facts in record["graphs"].items():
        print(f"- {label}, with loops: " + ", ".join(f"{value:,.10g} {key}" for key, value in facts.items()))
    print("\n".join([f"\nWritten to {out}", *(f"WRONG {entry}" for entry in record["wrong"])]))
    return status


if __name__ == "__main__":
    sys.exit(main())
