"""Export models to ONNX, by both of torch's exporters, and to .pt2; compare them with eager on graphs of other sizes.

A .pt2 is loaded in a process that can import neither this package nor PyG. Prints one row per model and format:

    python benchmarks/export.py --graphs 20
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gat_pyg import GAT, GATConv, GATv2Conv

Graph = tuple[Tensor, ...]  # x [N, 5], edge_index [2, E] and, where the model takes it, edge_attr [E, 3]


class Net(nn.Module):
    """Two layers with all that a layer may have."""

    def __init__(self, layer: type, edge_dim: int | None = None) -> None:
        super().__init__()
        self.first = layer(5, 4, heads=2, residual=True, edge_dim=edge_dim)
        self.second = layer(8, 3, heads=2, concat=False, edge_dim=edge_dim)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index, edge_attr).relu()
        return self.second(x, edge_index, edge_attr)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GATConv": lambda: Net(GATConv),
    "GATConv, edge features": lambda: Net(GATConv, edge_dim=3),
    "GATv2Conv": lambda: Net(GATv2Conv),
    "GATv2Conv, edge features": lambda: Net(GATv2Conv, edge_dim=3),
    "GAT": lambda: GAT(5, [8], 3, heads=[4, 1], dropout=0.6),
}


def graphs(count: int, edge_features: bool) -> list[Graph]:
    """Graphs of 1 to 200 nodes and 1 to 2000 edges with loops, repeated edges and isolated nodes."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        n, e = (int(torch.randint(1, most, (), generator=generator)) for most in (201, 2001))
        x, edge_index = torch.randn(n, 5, generator=generator), torch.randint(n, (2, e), generator=generator)
        made.append((x, edge_index, torch.randn(e, 3, generator=generator))[: 3 if edge_features else 2])
    return made


def by_pt2(model: nn.Module, example: Graph, shapes: tuple[dict[int, str], ...], asked: list[Graph]) -> list[Tensor]:
    """Save with `torch.export`, run where only torch is."""
    dims = {name: torch.export.Dim(name, min=2) for name in ("N", "E")}
    dynamic = tuple({axis: dims[name] for axis, name in shape.items()} for shape in shapes)
    program = torch.export.export(model, example, dynamic_shapes=dynamic)
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, f"{folder}/model.pt2")
        torch.save(asked, f"{folder}/graphs.pt")
        env = {**os.environ, "PYTHONPATH": ""}
        subprocess.run([sys.executable, "-c", ELSEWHERE, folder], check=True, env=env)
        results: list[Tensor] = torch.load(f"{folder}/results.pt")
    return results


ELSEWHERE = """
import sys
for name in ("gat_pyg", "torch_geometric", "torch_scatter", "torch_sparse", "numba"):
    sys.modules[name] = None  # to import it is an error
import torch
model = torch.export.load(f"{sys.argv[1]}/model.pt2").module()
torch.save([model(*graph) for graph in torch.load(f"{sys.argv[1]}/graphs.pt")], f"{sys.argv[1]}/results.pt")
"""


def by_onnx(
    model: nn.Module, example: Graph, shapes: tuple[dict[int, str], ...], asked: list[Graph], dynamo: bool
) -> list[Tensor]:
    """Save by one of torch's two ONNX exporters, run by onnxruntime."""
    import onnxruntime

    names = ["x", "edge_index", "edge_attr"][: len(example)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")  # the exporters' own, on what they are built of
        with contextlib.redirect_stdout(nowhere):
            if dynamo:
                options = {"dynamic_shapes": tuple(dict.fromkeys(s, torch.export.Dim.DYNAMIC) for s in shapes)}
            else:
                options = {"dynamic_axes": dict(zip(names, shapes, strict=True))}
            torch.onnx.export(model, example, f"{folder}/model.onnx", dynamo=dynamo, input_names=names, **options)
        quiet = onnxruntime.SessionOptions()
        quiet.log_severity_level = 3  # the TorchScript exporter declares shapes of intermediate results that vary
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", quiet, providers=["CPUExecutionProvider"])
        results = []
        for graph in asked:
            inputs = {name: tensor.numpy() for name, tensor in zip(names, graph, strict=True)}
            results.append(torch.from_numpy(session.run(None, inputs)[0]))
    return results


FORMATS = {
    ".pt2 without gat_pyg": by_pt2,
    "ONNX, dynamo=True": lambda *args: by_onnx(*args, dynamo=True),
    "ONNX, dynamo=False": lambda *args: by_onnx(*args, dynamo=False),
}


def outputs(model: str, form: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """The exported model's and the eager one's output for each graph."""
    torch.manual_seed(0)
    net = MODELS[model]().eval()
    edge_features = "edge features" in model
    shapes = ({0: "N"}, {1: "E"}, {0: "E"})[: 3 if edge_features else 2]
    first, *others = graphs(count + 1, edge_features)
    measured = FORMATS[form](net, first, shapes, others)
    with torch.no_grad():
        return [(out, net(*graph)) for out, graph in zip(measured, others, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=20)
    count = parser.parse_args(arguments).graphs
    print(f"| model | format | largest difference to eager, {count} graphs | largest output |\n|---|---|---|---|")
    for model in MODELS:
        for form in FORMATS:
            pairs = outputs(model, form, count)
            worst = max(float((measured - eager).abs().max()) for measured, eager in pairs)
            largest = max(float(eager.abs().max()) for _, eager in pairs)
            print(f"| {model} | {form} | {worst:.1e} | {largest:.1f} |", flush=True)


if __name__ == "__main__":
    main()
