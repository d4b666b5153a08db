"""Seconds of a training step by 1 and 2 processes, and what follows from them for 8 to 1024: see README.md beside this.

    python benchmarks/scaling.py                       # everything, in some minutes on two idle cores
    python benchmarks/scaling.py --check               # only whether several processes give the numbers of one
    python benchmarks/scaling.py --scale 0.01 --rounds 1 --cut-edges 5000

A process has one thread, and they talk by gloo over the loopback. No second is told before outputs, loss and gradients
of 1, 2 and 3 processes, each with its part of a graph, are within 1e-10 of those of one with the whole, in float64.
Then one process and two take steps in turns, and medians are told. Predictions have all of a rank's costs measured
here, but for a network that is assumed. With a scale other than 1 all graphs are generated. Needs Linux.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data

import machine
from gat_pyg.data import Task, planetoid
from gat_pyg.distributed.halo import divided
from gat_pyg.graph.partition import WITH_METIS, Method, partition
from gat_pyg.models import GAT
from gat_pyg.philox import keyed
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training.loading import TaskData
from machine import resident

TOLERANCE = 1e-10
WORLDS = (1, 2, 3)  # processes that are checked
RANKS = (8, 64, 256, 1024)  # that are predicted
PARTS = (2, 4, 8, 16, 32, 64)  # that graphs are cut into
MESSAGES = [4**power for power in range(5, 13)]  # bytes, 1 KiB to 16 MiB
SEEDS, FAN_OUTS = 1024, [10, 10]  # of a rank's step


# Graphs and networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The size of a data set, with E directed edges; the seeds are its training nodes."""

    name: str
    nodes: int
    edges: int
    features: int
    classes: int
    seeds: int = 0

    def scaled(self, scale: float) -> Shape:
        return replace(self, nodes=max(100, round(self.nodes * scale)), edges=max(200, round(self.edges * scale)))

    @property
    def fetched(self) -> list[int]:
        """The width of each exchange of a step: of every layer's input, and of its gradient but the first one's."""
        widths = [conv.in_channels for conv in network(self).convs]
        return [*widths, *widths[1:]]


CORA = Shape("cora", 2_708, 10_556, 1_433, 7)
PPI = Shape("ppi", 2_245, 61_318, 50, 121)  # the mean training graph
ARXIV = Shape("arxiv", 169_343, 2_315_598, 128, 40)
PRODUCTS = Shape("ogbn-products", 2_449_029, 123_718_280, 100, 47, seeds=196_615)
PAPERS = Shape("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172, seeds=1_207_179)
MOST_EDGES = 3_000_000  # of a graph that stands in for a larger one where a rank is measured


def network(shape: Shape, hidden: int = 2) -> GAT:
    """Three heads of 32 in every hidden layer: two of them, or one where neighbours are sampled."""
    torch.manual_seed(0)
    if shape.name == "cora":
        return GAT.preset("cora")
    return GAT(shape.features, [32] * hidden, shape.classes, heads=[3] * hidden + [1], dropout=0.5)


def size_of(model: nn.Module) -> int:
    """Bytes of the parameters, which an all_reduce of the gradients sums."""
    return sum(parameter.nbytes for parameter in model.parameters())


def drawn(N: int, E: int, kind: str = "communities") -> Tensor:
    """An undirected graph, `[2, E]` sorted: expected degrees fall as rank^-1/2, and so their distribution as d^-3.

    The other end of a link is drawn from a block of ids around the first: of 1000 nodes for nine links of ten in
    "communities", of more than s nodes with probability (64 / s)^0.4 in "nested", of all nodes in "random". Ids are
    shuffled in the end.
    """
    generator = torch.Generator().manual_seed(N)
    weight = torch.arange(1, N + 1, dtype=torch.float64) ** -0.5
    ends = F.pad(weight[torch.randperm(N, generator=generator)].cumsum(0), (1, 0))
    one, other, near = torch.rand(3, E // 2, generator=generator, dtype=torch.float64)
    sizes = {"communities": torch.where(near < 0.9, 1000.0, N), "nested": 64 * near ** (-1 / 0.4)}
    block = sizes.get(kind, torch.full_like(near, N)).clamp(max=N).long()
    a = (torch.searchsorted(ends, one * ends[-1], right=True) - 1).clamp(max=N - 1)
    low = a // block * block
    high = (low + block).clamp(max=N)
    b = torch.searchsorted(ends, ends[low] + other * (ends[high] - ends[low]), right=True) - 1
    ids = torch.randperm(N, generator=generator)
    a, b = ids[a], ids[torch.minimum(b, high - 1)]
    key = torch.cat([a * N + b, b * N + a]).sort().values
    return torch.stack([key // N, key % N])


def generated(shape: Shape) -> Data:
    """A graph of a size with random features, labels and masks."""
    index = drawn(shape.nodes, shape.edges)
    torch.manual_seed(1)
    data = Data(torch.randn(shape.nodes, shape.features), index, y=torch.randint(shape.classes, (shape.nodes,)))
    split = torch.randint(4, (shape.nodes,))
    data.train_mask, data.val_mask, data.test_mask = split > 1, split == 1, split == 0
    return data


# A step ---------------------------------------------------------------------------------------------------------------


def answered(model: nn.Module, data: Data, labels: int) -> tuple[Tensor, Tensor]:
    """The output, and the mean loss over all labels or this part's share of it."""
    joined = data.part.joined(model, data.edge_index) if "part" in data else nullcontext()
    with joined, keyed(torch.tensor(7)):
        out = model(data.x, data.edge_index)
    return out, F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="sum") / labels


def stepping(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    """A training step: forward, backward, gradients summed where the model is DDP's, Adam."""
    adam = torch.optim.Adam(model.parameters(), lr=0.005)

    def step() -> None:
        adam.zero_grad()
        loss(model).backward()
        adam.step()

    return step


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Processes ------------------------------------------------------------------------------------------------------------


def over(world: int, job: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the first of `world` processes that run `job(rank, world, *arguments)`."""
    with TemporaryDirectory() as folder:
        mp.set_forkserver_preload(
            ["gat_pyg.training.loading", "gat_pyg.models", "gat_pyg.graph.partition"]
        )  # once for all of them
        mp.start_processes(process, (world, Path(folder), job, arguments), world, start_method="forkserver")
        return json.loads(Path(folder, "result.json").read_text())


def process(rank: int, world: int, folder: Path, job: Callable[..., Any], arguments: Sequence[Any]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    result = job(rank, world, *arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# Right or wrong -------------------------------------------------------------------------------------------------------


def checked(scale: float) -> dict[str, tuple[nn.Module, Data]]:
    """The networks and graphs of the check: the paper's network on Cora, and a large graph."""
    cora = planetoid("cora").train[0] if scale == 1 and "GAT_PYG_DATA" in os.environ else generated(CORA.scaled(scale))
    graphs = {CORA: cora, ARXIV: generated(ARXIV.scaled(scale))}
    return {shape.name: (network(shape).double(), data) for shape, data in graphs.items()}


def differences(rank: int, world: int, scale: float, folder: str) -> list[dict[str, Any]]:
    """Return the differences of outputs, loss and gradients from those of one process with the whole graph.

    The first process of all computes the latter once and leaves them in the folder.
    """
    rows = []
    for name, (model, data) in checked(scale).items():
        data.x, labels, selected = data.x.double(), int(data.train_mask.sum()), Path(folder, f"{name}.pt")

        def answers(data: Data, model: nn.Module = model, labels: int = labels) -> tuple[Tensor, Tensor, list[Tensor]]:
            out, loss = answered(model, data, labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            return out.detach(), loss.detach(), [one.contiguous() for one in gradients]  # as all_reduce needs them

        if rank == 0 and not selected.exists():
            torch.save(answers(data), selected)
        dist.barrier()
        whole, one, gradients = torch.load(selected, mmap=True)
        part, _ = divided(data, rank, world)
        out, loss, summed = answers(part)
        for value in (loss, *summed):
            dist.all_reduce(value)
        apart = max(largest_of(own - its) for own, its in zip(summed, gradients, strict=True))
        largest = torch.tensor([largest_of(out - whole[part.part.nodes]), largest_of(loss - one), apart])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        rows.append({"graph": name, "processes": world, "nodes": data.num_nodes, "edges": data.num_edges})
        rows[-1] |= dict(zip(("output", "loss", "gradient"), largest.tolist(), strict=True))
        rows[-1] |= {"outputs up to": largest_of(whole), "gradients up to": max(map(largest_of, gradients))}
    return rows


def largest_of(values: Tensor) -> float:
    return float(values.abs().max())


def check(scale: float) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        return [row for world in WORLDS for row in over(world, differences, scale, folder)]


# Measured -------------------------------------------------------------------------------------------------------------


def in_turns(alone: Callable[[], None], together: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Seconds of a step of the first process alone and of all, in turns, without the first of each."""
    took: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(rounds + 1):
        dist.barrier()
        took["alone"].append(seconds(alone if dist.get_rank() == 0 else lambda: None))
        dist.barrier()
        took["together"].append(seconds(together))
    return {way: statistics.median(times[1:]) for way, times in took.items()} | {"rounds": took}


def many_graphs(rank: int, world: int, scale: float, rounds: int) -> dict[str, Any]:
    """A graph a rank, against a step of as many graphs by one process."""
    torch.manual_seed(0)
    shape, model = PPI.scaled(scale), GAT.preset("ppi")
    graph = Data(torch.randn(shape.nodes, shape.features), drawn(shape.nodes, shape.edges))
    graph.y = torch.randint(2, (shape.nodes, shape.classes)).float()

    def step(model: nn.Module, graphs: int) -> Callable[[], None]:
        batch = Batch.from_data_list([graph] * graphs)
        return stepping(model, lambda net: F.binary_cross_entropy_with_logits(net(batch.x, batch.edge_index), batch.y))

    ddp = DistributedDataParallel(copy.deepcopy(model))
    return in_turns(step(model, world), step(ddp, 1), rounds) | {"all_reduce_bytes": size_of(model)}


def sampled(rank: int, world: int, scale: float, rounds: int) -> dict[str, Any]:
    """As many seeds a rank as one process takes, through `loader=neighbor`."""
    shape = ARXIV.scaled(scale)
    data, model = generated(shape), network(shape, hidden=1)
    task = Task(shape.name, [data], [data], [data], shape.features, NodeLabels(shape.classes))

    def step(model: nn.Module, place: Any) -> Callable[[], None]:
        loader = TaskData(task, batch_size=SEEDS * (place.world_size if place else 1), num_neighbors=FAN_OUTS)
        loader.trainer = place
        batches = itertools.chain.from_iterable(itertools.repeat(loader.train_dataloader()))

        def loss(net: nn.Module) -> Tensor:
            batch = next(batches)
            out = net(batch.x, batch.edge_index, None, batch.num_sampled_nodes, batch.num_sampled_edges)
            return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

        return stepping(model, loss)

    ddp = DistributedDataParallel(copy.deepcopy(model))
    place = SimpleNamespace(global_rank=rank, world_size=world)
    return in_turns(step(model, None), step(ddp, place), rounds) | {"all_reduce_bytes": size_of(model)}


@contextmanager
def watched(spent: dict[str, float]) -> Iterator[None]:
    """Within it: seconds that all_to_all waits for other processes, those that it takes then, and bytes it sends."""
    exchange = dist.all_to_all_single

    def timed(made: Tensor, rows: Tensor, *splits: list[int]) -> None:
        spent["waited"] += seconds(dist.barrier)
        spent["moved"] += seconds(lambda: exchange(made, rows, *splits))
        spent["bytes"] += rows.nbytes

    with patch.object(dist, "all_to_all_single", timed):
        yield


def one_graph(rank: int, world: int, scale: float, rounds: int) -> dict[str, Any]:
    """One graph whole in one process, against a part and the halo in each; where the time goes."""
    shape = ARXIV.scaled(scale)
    data, model = generated(shape), network(shape)
    (part, fetched), labels = divided(data, rank, world), int(data.train_mask.sum())
    ddp = DistributedDataParallel(copy.deepcopy(model))
    step = stepping(ddp, lambda net: answered(net, part, labels)[1] * world)  # whose mean over processes is the loss
    spent: list[dict[str, float]] = []

    def together() -> None:
        spent.append({"waited": 0.0, "moved": 0.0, "bytes": 0.0})
        with watched(spent[-1]):
            step()

    took = in_turns(stepping(model, lambda net: answered(net, data, labels)[1]), together, rounds)
    took |= {name: statistics.median(one[name] for one in spent[1:]) for name in spent[0]}
    most = torch.tensor([part.num_edges / data.num_edges, part.part.halo.numel() / max(fetched, 1)]) * world
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return took | {"all_reduce_bytes": size_of(model), "halo": fetched / shape.nodes, "skew": float(most.max())}


def messages(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of an exchange between two processes by the bytes that each sends, and the line through them."""
    results: dict[str, dict[str, Any]] = {}
    for name in ("all_to_all", "all_reduce"):
        times = []
        for size in MESSAGES:
            arguments, made = torch.zeros(2, size // 4)
            splits = [0, size // 4] if dist.get_rank() == 0 else [size // 4, 0]
            work = {
                "all_to_all": lambda arguments=arguments, made=made, n=splits: dist.all_to_all_single(
                    made, arguments, n, n
                ),
                "all_reduce": lambda arguments=arguments: dist.all_reduce(arguments),
            }[name]
            dist.barrier()
            times.append(statistics.median(seconds(work) for _ in range(5 * rounds + 5)))
        weight = 1 / np.array(times)  # relative errors count alike
        (latency, slowness), *_ = np.linalg.lstsq(np.stack([weight, weight * MESSAGES], 1), weight * times, rcond=None)
        results[name] = {"latency": max(latency, 0.0), "bandwidth": 1 / slowness, "bytes": MESSAGES, "seconds": times}
    return results


@dataclass(frozen=True)
class Rates:
    """The cost of a rank's step: seconds and bytes for each row, own or fetched, and for each edge into its own."""

    row: float
    edge: float
    row_bytes: float
    edge_bytes: float

    @classmethod
    def through(cls, nodes: int, few: Measured, many: Measured) -> Rates:
        """Those of two graphs with so many nodes."""
        left = [[nodes, few.edges], [nodes, many.edges]]
        right = [[few.seconds, few.bytes], [many.seconds, many.bytes]]
        (row, row_bytes), (edge, edge_bytes) = np.linalg.solve(left, right).tolist()
        return cls(row, edge, row_bytes, edge_bytes)


@dataclass(frozen=True)
class Measured:
    """A step of one process with a whole graph."""

    edges: int
    seconds: float
    bytes: float


def prepared(shape: Shape) -> tuple[Callable[[], None], int]:
    """A step with a whole graph, and the bytes at its peak, graph and features with it."""

    def trimmed() -> int:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory freed earlier is there already
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present
        return resident("VmRSS")

    before = trimmed()
    data = generated(shape)
    step = stepping(network(shape), lambda net: answered(net, data, shape.nodes)[1])
    step()
    trimmed()
    step()
    return step, resident("VmHWM") - before


def rates(scale: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each data set: a graph as large as it or as can be, with a quarter of its edges and with all, in turns."""
    results = {}
    for shape in (ARXIV, PRODUCTS, PAPERS):
        whole = shape.scaled(scale * min(1.0, MOST_EDGES / shape.edges))
        sizes = [whole.edges // 4, whole.edges]
        steps, peaks = zip(*(prepared(replace(whole, edges=edges)) for edges in sizes), strict=True)
        took = [[seconds(step) for step in steps] for _ in range(rounds)]
        times = np.median(took, axis=0).tolist()
        points = [Measured(*one) for one in zip(sizes, times, peaks, strict=True)]
        results[shape.name] = {"nodes": whole.nodes, "measured": [asdict(one) for one in points]}
        results[shape.name]["rates"] = asdict(Rates.through(whole.nodes, *points))
    return results


# Cut ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """W parts of a graph fetch h(W) N rows, h(W) = factor W^power; the slowest has `skew` times the mean."""

    factor: float
    power: float
    skew: float = 1.0

    @classmethod
    def through(cls, rows: Sequence[dict[str, float]]) -> Cut:
        """By the numbers of parts from 8 on: the curve bends down, so that what lies beyond is too high if anything."""
        last = [row for row in rows if row["parts"] >= 8]
        power, log = np.polyfit(np.log([row["parts"] for row in last]), np.log([row["halo"] for row in last]), 1)
        return cls(float(np.exp(log)), float(power), statistics.median(row["skew"] for row in last))

    def halo(self, shape: Shape, W: int) -> float:
        """h(W), which is W - 1 at most, where all fetch all, and a row an edge."""
        return min(self.factor * W**self.power, W - 1, shape.edges / shape.nodes)


def cut(index: Tensor, owner: Tensor, W: int) -> dict[str, float]:
    """The rows of all halos by the number of nodes, and the largest part's halo or edges by the mean."""
    (src, dst), N = index, owner.numel()
    halos = ((owner[dst] * N + src)[owner[src] != owner[dst]].unique() // N).bincount(minlength=W)
    edges = owner[dst].bincount(minlength=W)
    skew = max(float(count.max()) * W / max(float(count.sum()), 1) for count in (halos, edges))
    return {"parts": W, "halo": float(halos.sum()) / N, "skew": skew}


def cuts(rank: int, world: int, edges: Sequence[int]) -> list[dict[str, Any]]:
    """Graphs of the degrees of each data set: those with communities cut by METIS, the others by ranges of ids."""
    methods: dict[str, Method] = {"nested": "auto", "communities": "auto", "random": "ranges"}
    cases = itertools.product(sorted(edges, reverse=True), methods, (PRODUCTS, PAPERS))
    results = []
    for E, kind, shape in list(cases)[rank::world]:
        N = E * shape.nodes // shape.edges
        index = drawn(N, E, kind)
        rows = [cut(index, partition(index, N, W, methods[kind]), W) for W in PARTS]
        by = "METIS" if WITH_METIS and methods[kind] == "auto" else "ranges"
        results.append({"dataset": shape.name, "kind": f"{kind}, {by}", "nodes": N, "edges": E, "cuts": rows})
        results[-1]["fit"] = asdict(Cut.through(rows))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, results)
    return [row for rows in gathered for row in rows]


def measured(rank: int, world: int, scale: float, rounds: int, cut_edges: Sequence[int]) -> dict[str, Any]:
    """Everything, in the same two processes; while one has a turn alone, the other waits."""
    results: dict[str, Any] = {"messages": messages(rounds)}
    for way in (many_graphs, sampled, one_graph):
        results[way.__name__] = way(rank, world, scale, rounds)
    if rank == 0:
        results["rates"] = rates(scale, rounds)
    dist.barrier()
    return results | {"cuts": cuts(rank, world, cut_edges)}


# Predicted ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes latency + n / bandwidth; seconds, and bytes a second that a rank sends."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Net:
    """The time of the messages between ranks, one after the other."""

    exchange: Link
    reduce: Link

    @classmethod
    def of(cls, found: dict[str, dict[str, Any]]) -> Net:
        """From `messages`: an all_reduce of two sends two halves."""
        exchange, reduce = (Link(found[name]["latency"], found[name]["bandwidth"]) for name in found)
        return cls(exchange, replace(reduce, latency=reduce.latency / 2))

    def all_to_all(self, size: float, W: int) -> float:
        """Seconds, where a rank sends so many bytes, some to each other."""
        return (W - 1) * self.exchange.latency + size / self.exchange.bandwidth

    def all_reduce(self, size: float, W: int) -> float:
        """Seconds of a ring over tensors of so many bytes."""
        return 2 * (W - 1) * (self.reduce.latency + size / W / self.reduce.bandwidth)


ASSUMED = Net(Link(5e-6, 25e9), Link(5e-6, 25e9))  # 25 GB/s and 5 us, as fast clusters have it


def full_batch(shape: Shape, rates: Rates, cut: Cut, net: Net, W: int) -> dict[str, float]:
    """The slowest rank's step where W have parts of one graph; README.md has the formulas."""
    skew = cut.skew if W > 1 else 1.0
    fetched = min(skew * cut.halo(shape, W), W - 1) * shape.nodes / W
    rows, edges = shape.nodes / W + fetched, skew * shape.edges / W
    compute = rates.row * rows + rates.edge * edges
    sizes = [4 * width * fetched for width in shape.fetched]
    talk = sum(net.all_to_all(size, W) for size in sizes) + net.all_reduce(size_of(network(shape)), W)
    alone = rates.row * shape.nodes + rates.edge * shape.edges
    return {
        "ranks": W,
        "halo": cut.halo(shape, W),
        "seconds": compute + talk,
        "speed_up": alone / (compute + talk),
        "communication": talk / (compute + talk),
        "bytes": sum(sizes),
        "memory": rates.row_bytes * rows + rates.edge_bytes * edges,
    }


def ddp(seconds: float, size: float, net: Net, W: int) -> dict[str, float]:
    """A step where each of W ranks takes what one took, and gradients of so many bytes are summed."""
    talk = net.all_reduce(size, W)
    step = seconds + talk
    return {"ranks": W, "seconds": step, "speed_up": W * seconds / step, "communication": talk / step}


def at_two(found: dict[str, Any], net: Net, scale: float) -> list[dict[str, Any]]:
    """The predictions of the formulas for the measured steps of two processes."""
    graphs, seeds, whole = (found[way.__name__] for way in (many_graphs, sampled, one_graph))
    own = Rates(**found["rates"][ARXIV.name]["rates"])
    output = [
        ddp(graphs["alone"] / 2, graphs["all_reduce_bytes"], net, 2)["seconds"],
        ddp(seeds["alone"], seeds["all_reduce_bytes"], net, 2)["seconds"],
        full_batch(ARXIV.scaled(scale), own, Cut(whole["halo"], 0.0, whole["skew"]), net, 2)["seconds"],
    ]
    names = ("many graphs", "sampled", "full batch")
    rows = [{"step": name, **row} for name, row in zip(names, (graphs, seeds, whole), strict=True)]
    work = (1, 2, 1)  # of the two in a step, by that of one alone
    return [
        {"step": row["step"], "one, s": row["alone"], "two, s": row["together"]}
        | {"speed_up": times * row["alone"] / row["together"], "two predicted, s": predicted}
        for row, times, predicted in zip(rows, work, output, strict=True)
    ]


def predicted(found: dict[str, Any], net: Net) -> dict[str, list[dict[str, Any]]]:
    """Both data sets over such a network, with each cut of the largest graph, and sampled."""
    shapes = {shape.name: shape for shape in (PRODUCTS, PAPERS)}
    rates = {name: Rates(**own["rates"]) for name, own in found["rates"].items()}
    largest = max(row["edges"] for row in found["cuts"])
    full = [
        {"dataset": row["dataset"], "cut": row["kind"]}
        | full_batch(shapes[row["dataset"]], rates[row["dataset"]], Cut(**row["fit"]), net, W)
        for row, W in itertools.product(found["cuts"], RANKS)
        if row["edges"] == largest
    ]
    seeds = [
        {"dataset": shape.name} | ddp(found["sampled"]["alone"], size_of(network(shape, hidden=1)), net, W)
        for shape, W in itertools.product(shapes.values(), RANKS)
    ]
    for row in seeds:
        row["seeds_per_second"] = row["ranks"] * SEEDS / row["seconds"]
        row["epoch_seconds"] = -(-shapes[row["dataset"]].seeds // (row["ranks"] * SEEDS)) * row["seconds"]
    return {"full_batch": full, "sampled": seeds}


# The tables -----------------------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return f"{value:,}" if isinstance(value, int) else str(value)
        return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"

    columns = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    lines = [columns, ["---"] * len(columns), *([cell(row[name]) for name in columns] for row in rows)]
    print("\n".join([f"\n{title}\n", *(f"| {' | '.join(line)} |" for line in lines)]), flush=True)


def tell(record: dict[str, Any]) -> None:
    """The measurements and the predictions, as tables."""
    results, whole = record["measured"], record["measured"]["one_graph"]
    links = [{"by": name, **results["messages"][name]} for name in results["messages"]]
    table("Messages between two processes, s and bytes/s", links)
    table("A step of one process and of two", record["at_two"])
    moved, waited = (100 * whole[what] / whole["together"] for what in ("moved", "waited"))
    print(
        f"\nFull batch by two: {moved:.1f} % of a step moves {whole['bytes'] / 2**20:.1f} MiB from each to the other, "
        f"{waited:.1f} % waits for it.\nOverlapping the former with the local part would save {moved:.1f} % at most: "
        f"{'worth it' if moved > 10 else 'not worth it'}."
    )
    table(
        "What a rank takes, s and bytes", [{"dataset": name, **own["rates"]} for name, own in results["rates"].items()]
    )
    halos = [{f"W = {part['parts']}": part["halo"] for part in row["cuts"]} | row["fit"] for row in results["cuts"]]
    table("Rows fetched by all, h(W)", [{**row, **own} for row, own in zip(results["cuts"], halos, strict=True)])
    for what, rows in record["predicted"]["measured"].items():
        columns = ("seconds", "speed_up", "communication")
        both = zip(rows, record["predicted"]["assumed"][what], strict=True)
        beside = [row | {f"{name}, assumed": other[name] for name in columns} for row, other in both]
        table(f"Predicted for the network measured and the one assumed, {what.replace('_', ' ')}: s, bytes", beside)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only whether several processes give the numbers of one")
    parser.add_argument("--scale", type=float, default=1.0, help="of the nodes and edges that are checked and measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cut-edges", type=int, nargs="+", default=[1_000_000, 8_000_000], help="of cut graphs")
    parser.add_argument("--out", type=Path, help="the JSON file, else benchmarks/results/<date>-<machine>-scaling.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    record: dict[str, Any] = {**machine.about(cpu), "copy_gb_s": machine.bandwidth(cpu), "scale": options.scale}
    record["checks"] = check(options.scale)
    wrong = not all(row[what] <= TOLERANCE for row in record["checks"] for what in ("output", "loss", "gradient"))
    table("Largest differences from one process with the whole graph, float64", record["checks"])
    if not wrong and not options.check:
        record["measured"] = results = over(2, measured, options.scale, options.rounds, options.cut_edges)
        net = Net.of(results["messages"])
        record["at_two"] = at_two(results, net, options.scale)
        nets = {"measured": net, "assumed": ASSUMED}
        record["nets"] = {name: asdict(own) for name, own in nets.items()}
        record["predicted"] = {name: predicted(results, own) for name, own in nets.items()}
        tell(record)
    what = "scaling-check" if options.check else "scaling"
    out = options.out or Path(__file__).parent / "results" / f"{record['date'][:10]}-{record['machine']}-{what}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nWritten to {out}" if not wrong else f"\nWRONG: more than {TOLERANCE} apart. Written to {out}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
