"""Seconds per epoch of a network of GATv2 layers on 100,000 molecules, with our layers and with PyG's.

    python benchmarks/molecules.py                                  # 1,000 batches of 100
    python benchmarks/molecules.py --batches 100 --conv TransformerConv

The molecules are drawn, with repetition, from OGB's molbace, molesol and molfreesolv in $GAT_PYG_DATA/ogb. Every batch
is new in every epoch, as a shuffling loader makes it: nothing of its graph is remembered. A step is forward, backward
and Adam on the squared error of a sum over the atoms. Batches are made and timed before it: ours by `Collate`, PyG's by
`Batch`. `seconds_per_epoch` has the steps alone, `with_batches` both. The networks have the same weights, take turns
batch by batch, and must agree on the first batch, in the output and every gradient, to 1e-4 of its norm in float32 and
1e-10 in float64.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import gat_pyg
import machine
from gat_pyg.data import Collate
from gat_pyg.graph.adjacency import neighbourhoods

SETS = ("ogbg_molbace", "ogbg_molesol", "ogbg_molfreesolv")


class Network(nn.Module):
    """Layers of one width, with edge features, then the sum over the atoms of each molecule."""

    def __init__(self, package: object, conv: str, layers: int, heads: int, channels: int) -> None:
        super().__init__()
        width = heads * channels
        self.lin_in, self.lin_out = nn.Linear(9, width), nn.Linear(width, 1)
        make = getattr(package, conv)
        self.convs = nn.ModuleList(make(width, channels, heads, edge_dim=3) for _ in range(layers))

    def forward(self, batch: Data) -> Tensor:
        x = self.lin_in(batch.x)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.edge_attr).relu()
        return self.lin_out(pyg.global_add_pool(x, batch.batch, batch.num_graphs)).squeeze(-1)


def molecules(root: Path) -> list[Data]:
    """All molecules of OGB's csv files, with every bond in both directions."""
    graphs = []
    for name in SETS:
        raw = root / "ogb" / name / "raw"
        read = lambda what, raw=raw: torch.tensor(pd.read_csv(raw / f"{what}.csv.gz", header=None).to_numpy())  # noqa: E731
        nodes, edges = read("num-node-list").flatten().tolist(), read("num-edge-list").flatten().tolist()
        x, index, attr = read("node-feat").split(nodes), read("edge").split(edges), read("edge-feat").split(edges)
        for x_, index_, attr_ in zip(x, index, attr, strict=True):
            both, features = torch.cat([index_.t(), index_.t().flip(0)], 1), torch.cat([attr_, attr_])
            graphs.append(Data(x=x_.float(), edge_index=both, edge_attr=features.float()))
    return graphs


def drawn(graphs: list[Data], size: int, generator: np.random.Generator) -> Batch:
    return Batch.from_data_list([graphs[at] for at in generator.integers(0, len(graphs), size)])


def structured(batch: Batch) -> None:
    """Group the edges as a layer and its backward pass do."""
    neighbourhoods(batch.edge_index, batch.x.size(0), batch.x.size(0), add_self_loops=True).transpose  # noqa: B018


def gradients(network: Network, batch: Data, target: Tensor) -> dict[str, Tensor]:
    out = network(batch)
    torch.nn.functional.mse_loss(out, target).backward()
    results = {"output": out.detach()} | {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    return results


def check(networks: dict[str, Network], batch: Data, target: Tensor) -> float:
    """The largest difference between the networks, relative to its norm or a thousandth of the largest norm."""
    worst = 0.0
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        cast = batch.clone().apply(lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t)
        ours, theirs = (gradients(copy.deepcopy(n).to(dtype), cast, target.to(dtype)) for n in networks.values())
        least = 1e-3 * max(part.norm() for part in theirs.values())
        off = {name: (part - theirs[name]).norm() / max(theirs[name].norm(), least) for name, part in ours.items()}
        worst = float(max(off.values()))
        if not worst <= tolerance:
            raise SystemExit(f"the networks differ by {worst:.1e} in {dtype}, allowed {tolerance:.0e}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conv", default="GATv2Conv", choices=("GATConv", "GATv2Conv", "TransformerConv"))
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100, help="molecules of a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="", help="ending of the file of results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, generator = machine.device(options.device), np.random.default_rng(0)
    graphs = molecules(Path(os.environ["GAT_PYG_DATA"]))
    sizes = options.conv, options.layers, options.heads, options.channels
    networks = {"ours": Network(gat_pyg, *sizes).to(device), "pyg": Network(pyg, *sizes).to(device)}
    networks["pyg"].load_state_dict(networks["ours"].state_dict())
    optimizers = {name: torch.optim.Adam(network.parameters(), lr=1e-3) for name, network in networks.items()}
    target = torch.from_numpy(generator.normal(size=options.size)).float().to(device)
    error = check(networks, drawn(graphs, options.size, generator).to(device), target)

    collate = Collate(graphs)
    makers = {"ours": collate, "pyg": lambda ids: Batch.from_data_list([graphs[at] for at in ids])}
    steps, batches = {name: [] for name in networks}, {name: [] for name in networks}
    structures: list[float] = []
    nodes = edges = 0
    for number in range(-20, options.batches):
        ids = generator.integers(0, len(graphs), options.size).tolist()
        for name, network in networks.items():
            begin = time.perf_counter()
            batch = makers[name](ids)
            made, batch = time.perf_counter() - begin, batch.to(device)

            def step(name: str = name, network: Network = network, batch: Data = batch) -> None:
                optimizers[name].zero_grad()
                torch.nn.functional.mse_loss(network(batch), target).backward()
                optimizers[name].step()

            taken = machine.seconds(step, device)
            if number >= 0:
                steps[name].append(taken)
                batches[name].append(made)
        if number >= 0:
            nodes, edges = nodes + batch.num_nodes, edges + batch.num_edges
            structures.append(machine.seconds(lambda batch=batch: structured(batch), device))
    ratio = lambda times: statistics.median(times["pyg"]) / statistics.median(times["ours"])  # noqa: E731
    both = {name: [sum(pair) for pair in zip(steps[name], batches[name], strict=True)] for name in networks}
    record = vars(options) | {
        "nodes": nodes,
        "edges": edges,
        "seconds_per_epoch": {name: sum(taken) for name, taken in steps.items()},
        "median_ms": {name: 1e3 * statistics.median(taken) for name, taken in steps.items()},
        "times_faster": ratio(steps),
        "with_batches": {name: sum(taken) for name, taken in both.items()},
        "batch_ms": {name: 1e3 * statistics.median(taken) for name, taken in batches.items()},
        "times_faster_with_batches": ratio(both),
        "structure_ms": 1e3 * statistics.median(structures),
        "error": error,
    }
    print(record)
    machine.write(machine.results(f"molecules-{options.conv}{options.name}", device), machine.about(device) | record)


if __name__ == "__main__":
    main()
