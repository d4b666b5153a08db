"""Export runs of every kind of task and layer by `gat_pyg.export`, and compare the files with `predict`.

Each file is loaded where neither this package nor PyG can be imported, and computes graphs of sizes that the export did
not see. Prints one row per run and format:

    python benchmarks/exports.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import gat_pyg
import machine
from gat_pyg.experiments.model_file import save_model
from gat_pyg.experiments.settings import Factory
from gat_pyg.tasks.edges import EdgeLabels
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import Objective
from gat_pyg.tasks.preparation import NORMALIZE, Preparation, Standardize
from gat_pyg.tasks.targets import GraphTargets

CONVS = ("gat", "gatv2", "transformer")
TASKS = ("node", "edge", "graph", "link")
LARGEST = (200, 2000, 10)  # nodes, edges, graphs
ATOMS, BONDS = (5, 0, 3), (3, 0)  # categories of the columns of graphs, 0 for numbers
SCALE = Standardize([1.0, -20.0, 300.0], [2.0, 5.0, 100.0]).describe()


def settings(task: str, conv: str) -> tuple[dict[str, Any], Objective, Preparation]:
    """The model, objective and preparation of a run: classes of nodes, edges and links, quantities of molecules."""
    network: dict[str, Any] = {"_target_": "gat_pyg.models.GAT", "conv": conv, "in_channels": 3, "hidden_channels": [8]}
    network |= {"heads": [4, 1], "out_channels": 4, "residual": [True, True], "norm": "layer"}
    if task == "node":
        return network, NodeLabels(4), Preparation(3, None, transforms=(NORMALIZE,))
    if task == "link":
        return network, LinkLabels(4), Preparation(3, None, transforms=(SCALE,))
    if task == "edge":
        model = {"_target_": "gat_pyg.models.LinkScores", "model": {**network, "edge_dim": 2}, "channels": 4}
        model |= {"out_channels": 3, "combine": "concat", "edge_dim": 2}
        return model, EdgeLabels(3), Preparation(3, 2, transforms=(SCALE,))
    inner = {**network, "in_channels": 8, "edge_dim": 8, "norm": "batch"}
    encoded = {"_target_": "gat_pyg.models.Encoded", "model": inner, "channels": 8, "categories": [*ATOMS]}
    encoded["edge_categories"] = [*BONDS]
    readout = {"_target_": "gat_pyg.models.Readout", "model": encoded, "aggr": "mean"}
    return readout, GraphTargets(4, mean=(5.0,) * 4, std=(2.0,) * 4), Preparation(3, 2)


def save(folder: Path, task: str, conv: str) -> Path:
    """A run's folder with random weights, larger than initial ones, so that predictions vary."""
    torch.manual_seed(0)
    values, objective, preparation = settings(task, conv)
    factory = Factory("model", values)
    model: nn.Module = factory()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.4)
    metadata = {"preparation": preparation.to_dict(), "objective": objective.to_dict()}
    save_model(folder / "model.safetensors", model, str(factory.target), factory.arguments, **metadata)
    return folder


def graphs(task: str, count: int) -> list[Any]:
    """Graphs with loops, repeated edges and isolated nodes; of molecules, batches."""
    draw = torch.Generator().manual_seed(1)

    def columns(rows: int, categories: tuple[int, ...]) -> Tensor:
        values = torch.randn(rows, len(categories), generator=draw)
        for column, size in enumerate(categories):
            if size:
                values[:, column] = torch.randint(size, (rows,), generator=draw).float()
        return values

    def graph(largest: tuple[int, ...]) -> Data:
        N, E = (int(torch.randint(1, most + 1, (), generator=draw)) for most in largest[:2])
        data = Data(columns(N, ATOMS), torch.randint(N, (2, E), generator=draw))
        if task in ("edge", "graph"):
            data.edge_attr = columns(E, BONDS)
        if task in ("edge", "link"):
            data.edge_label_index = torch.randint(N, (2, 20), generator=draw)
        if task == "edge":
            data.edge_label_attr = columns(20, BONDS)
        return data

    if task != "graph":
        return [graph(LARGEST) for _ in range(count)]
    sizes = torch.randint(1, LARGEST[2] + 1, (count,), generator=draw).tolist()
    return [Batch.from_data_list([graph((30, 90)) for _ in range(size)]) for size in sizes]


ELSEWHERE = """
import sys
for name in ("gat_pyg", "torch_geometric", "torch_scatter", "torch_sparse", "numba"):
    sys.modules[name] = None  # to import it is an error
import torch
path, asked = sys.argv[1], torch.load(sys.argv[2])
if path.endswith(".pt2"):
    model = torch.export.load(path).module()
    results = [model(**inputs).detach() for inputs in asked]
else:
    import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results = [session.run(None, {key: value.numpy() for key, value in inputs.items()})[0] for inputs in asked]
    results = [torch.from_numpy(result) for result in results]
torch.save(results, sys.argv[3])
"""


def compared(folder: Path, task: str, conv: str, suffix: str, count: int) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """The file's predictions and those of `predict` for each graph, and what `export` returned."""
    run = save(folder, task, conv)
    exported = gat_pyg.export(run, folder / f"model{suffix}")
    names = json.loads(exported.description.read_text())["inputs"]
    its = graphs(task, count)
    torch.save([{name: data[name].detach() for name in names} for data in its], folder / "inputs.pt")
    files = [str(exported.path), str(folder / "inputs.pt"), str(folder / "results.pt")]
    command = [sys.executable, "-c", ELSEWHERE, *files]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    results = torch.load(folder / "results.pt")
    return [(result, gat_pyg.predict(run, data)) for result, data in zip(results, its, strict=True)], exported


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=50)
    options = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    print(
        f"| task | layer | format | largest difference, {options.graphs} graphs | largest prediction | ms | eager ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for task in TASKS:
        for conv in CONVS:
            for suffix in (".onnx", ".pt2"):
                with tempfile.TemporaryDirectory() as folder:
                    pairs, exported = compared(Path(folder), task, conv, suffix, options.graphs)
                row = {
                    **{"task": task, "conv": conv, "format": suffix, "graphs": len(pairs)},
                    "difference": max(float((file - eager).abs().max()) for file, eager in pairs),
                    "largest": max(float(eager.abs().max()) for _, eager in pairs),
                    "ms": round(exported.milliseconds, 3),
                    "eager_ms": round(exported.eager_milliseconds, 3),
                }
                rows.append(row)
                machine.write(machine.results("exports", cpu), {**machine.about(cpu), "rows": rows})
                numbers = f"{row['difference']:.1e} | {row['largest']:.3g} | {row['ms']:.2f} | {row['eager_ms']:.2f}"
                print(f"| {task} | {conv} | {suffix} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
