"""Seed nodes a second of each neighbour sampler, in one process: ours in plain torch, torch_sparse's and pyg-lib's.

    python benchmarks/sampling.py                      # a random graph of ogbn-arxiv's size, three sets of fan-outs
    python benchmarks/sampling.py --nodes 10000 --edges 50000 --rounds 1

Both draw without replacement; a way counts where it gives as many edges as there have to be: of every node of a hop,
the fan-out or its degree. "loader" makes whole batches, with their features. Times are medians, ratios of one round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NeighborSampler, NodeSamplerInput
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import degree

from gat_pyg.runs.result import versions
from gat_pyg.training.neighbours import TorchSampler

FAN_OUTS = ([10, 10], [25, 10], [15, 10, 5])
BATCH = 1024


def right(sampler: BaseSampler, data: Data, fan_outs: Sequence[int]) -> bool:
    """Return True if a batch has the required number of edges at each node, each once."""
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(BATCH)))
    drawn = degree(out.col, out.node.numel(), torch.long)[:BATCH]
    all_of_them = degree(data.edge_index[1], data.num_nodes, torch.long)[:BATCH]
    return torch.equal(drawn, all_of_them.clamp(max=fan_outs[0])) and out.edge.unique().numel() == out.edge.numel()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--edges", type=int, default=2_315_598, help="directed; as many as ogbn-arxiv has both ways")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    edge_index = torch.randint(options.nodes, (2, options.edges // 2))
    data = Data(torch.randn(options.nodes, 128), torch.cat([edge_index, edge_index.flip(0)], 1))
    seeds = torch.arange(min(options.batches * BATCH, options.nodes))
    theirs = "pyg-lib" if WITH_PYG_LIB else "torch_sparse" if WITH_TORCH_SPARSE else None
    rows: list[dict[str, Any]] = []
    wrong = []
    print(
        "| fan-outs | sampler | sampling alone, seeds/s | times | loader, seeds/s | times |\n|---|---|---|---|---|---|"
    )
    for fan_outs in FAN_OUTS:
        samplers: dict[str, BaseSampler] = {"ours": TorchSampler(data.edge_index, options.nodes, fan_outs)}
        if theirs is not None:
            samplers[theirs] = NeighborSampler(data, fan_outs)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in samplers}
        for name in [name for name, sampler in samplers.items() if not right(sampler, data, fan_outs)]:
            wrong.append(f"{name}, {fan_outs}")
            del samplers[name], took[name]
        for _ in range(options.rounds):
            for name, sampler in samplers.items():
                loader = NodeLoader(data, sampler, seeds, batch_size=BATCH)
                alone = seconds(
                    lambda its=sampler: [
                        its.sample_from_nodes(NodeSamplerInput(None, some)) for some in seeds.split(BATCH)
                    ]
                )
                took[name].append((alone, seconds(lambda its=loader: [None for _ in its])))
        for name, rounds in took.items():
            rate = [seeds.numel() / statistics.median(times) for times in zip(*rounds, strict=True)]
            ratios = [
                statistics.median(a[i] / b[i] for a, b in zip(took.get(theirs or name, rounds), rounds, strict=True))
                for i in (0, 1)
            ]
            rows.append({"fan_outs": fan_outs, "sampler": name, "seeds_per_second": rate, "times": ratios})
            print(
                f"| {fan_outs} | {name} | {rate[0]:.0f} | {ratios[0]:.1f} | {rate[1]:.0f} | {ratios[1]:.1f} |",
                flush=True,
            )
    for message in wrong:
        print(f"not as it has to be, and left out: {message}")
    if options.out:
        record = {"nodes": options.nodes, "edges": options.edges, "threads": torch.get_num_threads(), "rows": rows}
        record |= {"machine": platform.machine(), "versions": versions(), "wrong": wrong}
        record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
