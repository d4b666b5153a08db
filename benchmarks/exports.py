"""Export runs of every kind of task and layer by `gat_pyg.export`, and compare the files with `predict`.

Each file is loaded where neither this package nor PyG can be imported, and computes graphs of sizes that the export did
not see. Prints one row per run and format. Then networks of three layers, in CPU-milliseconds of one thread, beside the
same network of PyG's layers, in eager mode, as `.pt2`, compiled by AOTInductor and by ONNX Runtime:

    python benchmarks/exports.py [--only runs | networks]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import gat_pyg
import machine
from gat_pyg.runs.model_file import save_model
from gat_pyg.settings.factory import Factory
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


# Networks of three layers --------------------------------------------------------------------------------------------

GRAPHS = ((2_000, 20_000), (300, 900))  # nodes, edges
WIDTHS = (64, 64, 64, 7)  # features, of 8 heads each but the last
ANY = torch.export.Dim.DYNAMIC
ROUNDS = 25

Call = Callable[[Tensor, Tensor], Tensor]


class Network(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        sizes = itertools.pairwise(WIDTHS)
        self.convs = nn.ModuleList(
            layer(before, after // heads, heads=heads, **options)
            for (before, after), heads in zip(sizes, (8, 8, 1), strict=True)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second, last = self.convs
        out: Tensor = last(second(first(x, edge_index).relu(), edge_index).relu(), edge_index)
        return out


def by_onnx(network: nn.Module, inputs: tuple[Tensor, Tensor]) -> Call:
    import onnxruntime

    names = {"input_names": ["x", "edge_index"], "dynamic_shapes": ({0: ANY}, {1: ANY})}
    file = io.BytesIO()
    torch.onnx.export(network, inputs, dynamo=True, verbose=False, **names).save(file)  # type: ignore[union-attr]
    threads = onnxruntime.SessionOptions()
    threads.intra_op_num_threads, threads.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(file.getvalue(), threads, providers=["CPUExecutionProvider"])

    def call(x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"x": x.numpy(), "edge_index": edge_index.numpy()})[0])

    return call


def forms(network: nn.Module, inputs: tuple[Tensor, Tensor], onnx: bool) -> dict[str, Call]:
    """A network in each form in which it can be run, by name."""
    program = torch.export.export(network, inputs, dynamic_shapes=({0: ANY}, {1: ANY}))
    calls: dict[str, Call] = {"eager": network, ".pt2": program.module()}
    if shutil.which("g++"):
        calls["AOTInductor"] = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    if onnx:
        try:
            calls["ONNX Runtime"] = by_onnx(network, inputs)
        except Exception as error:  # PyG's layers cannot be exported
            print(f"ONNX: {type(error).__name__}", file=sys.stderr)
    return calls


def measured(conv: str) -> list[dict[str, Any]]:
    """Rows of a network of these layers, by form and graph."""
    torch.manual_seed(0)
    ours = Network(getattr(gat_pyg, conv)).eval()
    fused = Network(getattr(gat_pyg, conv), backend="fused").eval()
    theirs = Network(getattr(torch_geometric.nn, conv)).eval()
    for network in (fused, theirs):
        network.load_state_dict(ours.state_dict())
    rows: list[dict[str, Any]] = []
    times: dict[tuple[str, str], list[float]]
    with torch.no_grad():
        graphs = [(torch.randn(N, WIDTHS[0]), torch.randint(N, (2, E))) for N, E in GRAPHS]
        networks = {"ours": (ours, True), "fused": (fused, False), "PyG": (theirs, True)}
        calls = {name: forms(network, graphs[0], onnx) for name, (network, onnx) in networks.items()}
        for inputs in graphs:
            expected, times = ours(*inputs), {}
            for by_form in calls.values():
                for call in by_form.values():
                    call(*inputs)
            for _ in range(ROUNDS):  # all forms in turn
                for name, by_form in calls.items():
                    for form, call in by_form.items():
                        start = time.process_time()
                        call(*inputs)
                        times.setdefault((form, name), []).append(1e3 * (time.process_time() - start))
            for form in calls["ours"]:
                row: dict[str, Any] = {"conv": conv, "form": form, "nodes": inputs[0].size(0)}
                row["edges"] = inputs[1].size(1)
                for name, by_form in calls.items():
                    if form in by_form:
                        row[f"{name}_ms"] = round(statistics.median(times[form, name]), 3)
                        row[f"{name}_difference"] = float((by_form[form](*inputs) - expected).abs().max())
                rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=50)
    parser.add_argument("--only", choices=["runs", "networks"])
    options = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    if options.only != "runs":
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # the exporters' own
        print("| layers | form | nodes | edges | ms | fused ms | PyG's ms |\n|---|---|---|---|---|---|---|")
        for conv in ("GATConv", "GATv2Conv", "TransformerConv"):
            for row in measured(conv):
                networks.append(row)
                numbers = " | ".join(
                    f"{row[key]:.2f}" if key in row else "-" for key in ("ours_ms", "fused_ms", "PyG_ms")
                )
                print(f"| {conv} | {row['form']} | {row['nodes']} | {row['edges']} | {numbers} |", flush=True)
        machine.write(machine.results("exports-networks", cpu), {**machine.about(cpu), "networks": networks})
    if options.only == "networks":
        return
    print(f"| task | layer | format | largest difference, {options.graphs} graphs | largest prediction |")
    print("|---|---|---|---|---|")
    for task in TASKS:
        for conv in CONVS:
            for suffix in (".onnx", ".pt2"):
                with tempfile.TemporaryDirectory() as folder:
                    pairs, _ = compared(Path(folder), task, conv, suffix, options.graphs)
                row = {
                    **{"task": task, "conv": conv, "format": suffix, "graphs": len(pairs)},
                    "difference": max(float((file - eager).abs().max()) for file, eager in pairs),
                    "largest": max(float(eager.abs().max()) for _, eager in pairs),
                }
                rows.append(row)
                machine.write(
                    machine.results("exports", cpu), {**machine.about(cpu), "networks": networks, "rows": rows}
                )
                numbers = f"{row['difference']:.1e} | {row['largest']:.3g}"
                print(f"| {task} | {conv} | {suffix} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
