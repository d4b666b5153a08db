"""Peak memory and seconds of a trained network on a whole graph: layer by layer, and all at once.

    python benchmarks/inference.py                     # a graph of ogbn-arxiv's size, one to four layers, 2 minutes
    python benchmarks/inference.py --nodes 10000 --edges 50000 --layers 1 2

Every layer is as wide as the features, 2 x 64 and the last 1 x 128, so that a further one is like the others. Each way
runs in a process of its own and tells the memory that it took beside the graph, its features and what comes out; the
order of the edges, which either way makes, is in it. Only where both ways then agree is a row printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from attention import power_law
from gat_pyg.models import GAT
from gat_pyg.runs.result import versions
from gat_pyg.training.neighbours import TorchSampler
from machine import step_peak

WAYS = ("layer by layer", "all at once")
NEAR = 1e-6  # of the largest logit


@torch.no_grad()
def answer(way: str, model: GAT, data: Data, batch_size: int) -> Tensor:
    if way == "all at once":
        out: Tensor = model(data.x, data.edge_index)
        return out
    sampler = TorchSampler(data.edge_index, data.num_nodes, [-1])
    return model.inference(NodeLoader(data, sampler, batch_size=batch_size))


def measured(way: str, layers: int, nodes: int, edges: int, batch_size: int) -> dict[str, float]:
    """The time and memory of one way, and its difference from the other."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    data = Data(torch.randn(nodes, 128), power_law(nodes, edges, max(nodes // 13, 4 * edges // nodes), cpu))
    model = GAT(128, [64] * (layers - 1), 128, [*[2] * (layers - 1), 1]).eval()
    few = Data(data.x[:100], torch.randint(100, (2, 500)))
    for kind in WAYS:  # what is compiled, or read from disk, is so before
        answer(kind, model, few, 50)
    results: dict[str, Tensor] = {}

    def run() -> dict[str, Tensor]:
        results[way] = answer(way, model, data, batch_size)
        return results

    start = time.perf_counter()
    took = step_peak(run, cpu)
    seconds = time.perf_counter() - start
    results |= {other: answer(other, model, data, batch_size) for other in WAYS if other != way}
    ours, theirs = (results[kind].double() for kind in WAYS)
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    return {"peak_mib": (took or 0) / 2**20, "seconds": seconds, "off": off}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--edges", type=int, default=2_315_598, help="directed; as many as ogbn-arxiv has both ways")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--way", choices=WAYS, help="one way, in this process")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    size = (options.nodes, options.edges, options.batch_size)
    if options.way:
        print(json.dumps(measured(options.way, options.layers[0], *size)))
        return 0
    rows, wrong = [], []
    print("| layers | way | peak MiB | s | off by |\n|---|---|---|---|---|")
    for layers in options.layers:
        for way in WAYS:
            one = [
                "--way",
                way,
                "--layers",
                layers,
                *(f"--{name}={getattr(options, name)}" for name in ("nodes", "edges")),
            ]
            command = [sys.executable, __file__, *map(str, one), f"--batch-size={options.batch_size}"]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = {"layers": layers, "way": way, **json.loads(output.splitlines()[-1])}
            if not row["off"] <= NEAR:
                wrong.append(f"{way}, {layers} layers: off by {row['off']:.1e} of the largest logit")
                continue
            rows.append(row)
            print(f"| {layers} | {way} | {row['peak_mib']:.0f} | {row['seconds']:.1f} | {row['off']:.0e} |", flush=True)
    for message in wrong:
        print(f"WRONG {message}")
    if options.out:
        record = {"nodes": size[0], "edges": size[1], "batch_size": size[2], "threads": torch.get_num_threads()}
        record |= {"machine": platform.machine(), "rows": rows, "wrong": wrong, "versions": versions()}
        record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
