"""Seconds per epoch of the command beside a bare PyG loop with the same stopping rule, and what lies between.

    python benchmarks/training.py                      # Cora, the paper's setup
    python benchmarks/training.py --dataset pubmed --epochs 50
    python benchmarks/training.py --captured           # the CUDA graphs of an epoch, with their nodes counted

One epoch is a full-graph training step, a validation and the stopping rule. All ways run in turns, `--rounds` times,
and medians are printed, so that a busy machine slows all alike; the command runs in a process of its own, and its
Result has the seconds. The file of results is written anew after every run. Before anything is timed, PyG's layer and
ours, on dense and on sparse features, must reach the same losses from the same seed without dropout.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from lightning import Trainer
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import machine
from gat_pyg.data.named import citation
from gat_pyg.models import GAT, PRESETS
from gat_pyg.tasks.task import Task
from gat_pyg.training import Optimisation, PaperStopping, Resumable, Transductive, cuda_graphs
from gat_pyg.training.cuda_graphs import Captured
from gat_pyg.training.loading import TaskData, sparse_pays

NUMBERS = {"cora": (0.005, 5e-4), "citeseer": (0.005, 5e-4), "pubmed": (0.01, 1e-3)}  # lr, L2


class PyGNet(nn.Module):
    """The paper's network on PyG's layer, as its users write it."""

    def __init__(self, task: Task, p: float | None = None) -> None:
        super().__init__()
        preset = PRESETS[task.name]
        (channels,), (heads, out_heads) = preset["hidden_channels"], preset["heads"]
        p = preset["dropout"] if p is None else p
        self.first = pyg.GATConv(task.num_features, channels, heads, dropout=p)
        self.second = pyg.GATConv(channels * heads, task.num_classes, out_heads, concat=False, dropout=p)
        self.dropout = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.elu(self.first(F.dropout(x, self.dropout, self.training), edge_index))
        return self.second(F.dropout(x, self.dropout, self.training), edge_index)


def bare_loop(model: nn.Module, task: Task, epochs: int, device: torch.device, sparse: bool = False) -> list[float]:
    """Train as a script does, by the paper's stopping rule (with patience for all epochs); the validation losses."""
    (graph,) = TaskData(task, sparse=sparse).train_dataloader()
    graph, model = graph.to(device), model.to(device)
    lr, weight_decay = NUMBERS[task.name]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    best_acc, best_loss, wait, selected, losses = 0.0, float("inf"), 0, {}, []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        out = model(graph.x, graph.edge_index)
        F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(graph.x, graph.edge_index)[graph.val_mask]
            y = graph.y[graph.val_mask]
            loss, acc = F.cross_entropy(out, y).item(), (out.argmax(-1) == y).double().mean().item()
        losses.append(loss)
        if acc >= best_acc or loss <= best_loss:
            if acc >= best_acc and loss <= best_loss:
                selected = {key: value.clone() for key, value in model.state_dict().items()}
            best_acc, best_loss, wait = max(acc, best_acc), min(loss, best_loss), 0
        else:
            wait += 1
        if wait == epochs:
            break
    model.load_state_dict(selected)
    return losses


def pays(task: Task, device: torch.device) -> bool:
    """Return True if the command would use sparse features."""
    return sparse_pays(task, GAT.preset(task.name), "cuda" if machine.on_gpu(device) else "cpu")


def lightning_loop(task: Task, epochs: int, device: torch.device, callbacks: list[Any]) -> None:
    """Train by a plain Lightning trainer."""
    trainer = Trainer(
        accelerator=machine.accelerator(device),
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = GAT.preset(task.name)
    datamodule = TaskData(task, sparse=pays(task, device))
    trainer.fit(Transductive(model, task.objective, Optimisation(*NUMBERS[task.name])), datamodule=datamodule)


def command(name: str, epochs: int, device: torch.device) -> float:
    """Seconds per epoch that the command's Result tells."""
    limits = [f"training.max_epochs={epochs}", f"training.patience={epochs}"]
    (result,), _, _ = machine.command(f"dataset={name}", *limits, device=device)
    assert result["epochs"] == epochs, result
    return float(result["seconds_per_epoch"])


def captured(task: Task, device: torch.device) -> list[dict[str, Any]]:
    """The CUDA graphs of an epoch of the command: microseconds of a replay, and the nodes by their kernel's name."""
    results: list[Captured] = []

    class Noted(Captured):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            results.append(self)

    cuda_graphs.Captured = Noted  # type: ignore[misc]
    lightning_loop(task, 3, device, [Resumable(None, seed=0)])
    cuda_graphs.Captured = Noted.__base__  # type: ignore[assignment,misc]
    assert len(results) == 2, f"{len(results)} steps were captured, expected those of training and validation"
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    kind = getattr(DeviceType, activity.name)
    rows = []
    for step, replay in zip(("training", "validation"), results, strict=True):
        times = [machine.seconds(replay, device, machine.TRAIN) for _ in range(machine.TRAIN)]
        with profile(activities=[activity]) as profiler:
            replay()
            machine.now(device)
        kernels = Counter(event.name for event in profiler.events() if event.device_type == kind)
        assert kernels, f"the profiler saw no node of the {step} step"
        rows.append({"step": step, "us": 1e6 * statistics.median(times), "nodes": kernels.total(), "kernels": kernels})
    return rows


def check(task: Task, device: torch.device) -> None:
    """PyG's layer and ours must take the same steps from the same seed."""
    losses = []
    for make, sparse in ((PyGNet, False), (ours, False), (ours, True))[: 2 + pays(task, device)]:
        torch.manual_seed(0)
        losses.append(torch.tensor(bare_loop(make(task, 0.0), task, 10, device, sparse)))
    torch.testing.assert_close(losses[1:], losses[:1] * len(losses[1:]), rtol=1e-4, atol=1e-4)


def ours(task: Task, p: float) -> GAT:
    return GAT.preset(task.name, dropout=p)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=list(NUMBERS), default="cora")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--captured", action="store_true", help="measure the CUDA graphs of an epoch instead")
    parser.add_argument("--device", default=machine.DEFAULT, type=machine.device)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    task, device = citation.planetoid(options.dataset), options.device
    record: dict[str, Any] = {**machine.about(device), "dataset": task.name}
    path = machine.results(f"{'captured' if options.captured else 'training'}-{task.name}", device)
    if options.captured:
        record["rows"] = captured(task, device)
        machine.write(path, record)
        print(f"{task.name}, CUDA graphs of an epoch of the command\n| step | us | nodes |\n|---|---|---|")
        for row in record["rows"]:
            print(f"| {row['step']} | {row['us']:.0f} | {row['nodes']} |")
    else:
        check(task, device)
        compare(task, options, record, path)
    print(f"written to {path}")


def compare(task: Task, options: argparse.Namespace, record: dict[str, Any], path: Path) -> None:
    epochs, device = options.epochs, options.device

    def loop(make: Callable[..., nn.Module], sparse: bool = False) -> Callable[[], float]:
        return lambda: machine.seconds(lambda: bare_loop(make(), task, epochs, device, sparse), device) / epochs

    def fit(*rules: type[PaperStopping]) -> Callable[[], float]:
        run = lambda: lightning_loop(task, epochs, device, [rule(epochs) for rule in rules])  # noqa: E731
        return lambda: machine.seconds(run, device) / epochs

    ways = {
        "bare loop, PyG's layer": loop(lambda: PyGNet(task)),
        "bare loop, our layer": loop(lambda: GAT.preset(task.name)),
        "bare loop, our layer, sparse features": loop(lambda: GAT.preset(task.name), sparse=True),
        "Lightning alone": fit(),
        "Lightning, stopping rule": fit(PaperStopping),
        "the command": lambda: command(task.name, epochs, device),
    }
    if not pays(task, device):
        del ways["bare loop, our layer, sparse features"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    record["epochs"] = epochs
    base = seconds["bare loop, PyG's layer"]
    for _ in range(options.rounds):
        for way, run in ways.items():
            seconds[way].append(run())
            record["rows"] = [
                {
                    "way": way,
                    "seconds": statistics.median(values),
                    "ratio": statistics.median(value / other for value, other in zip(values, base, strict=False)),
                    "all": values,
                }
                for way, values in seconds.items()
                if values
            ]
            machine.write(path, record)
    print(f"{task.name}, ms per epoch (training step and validation), median of {options.rounds} x {epochs} epochs")
    print("| way | ms | ratio to PyG's bare loop |\n|---|---|---|")
    for row in record["rows"]:
        print(f"| {row['way']} | {row['seconds'] * 1e3:.2f} | {row['ratio']:.2f} |")


if __name__ == "__main__":
    main()
