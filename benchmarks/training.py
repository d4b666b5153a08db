"""Seconds per epoch of the command beside a bare PyG loop with the same stopping rule, and what lies between.

    python benchmarks/training.py                      # Cora, the paper's setup
    python benchmarks/training.py --dataset pubmed --epochs 50

One epoch is a full-graph training step, a validation and the stopping rule. All ways run in turns, `--rounds` times,
and medians are told, so that a busy machine slows all alike; the command runs in a process of its own and tells its
Result's seconds. Before anything is timed, PyG's layer and ours, on dense and on sparse features, must reach the same
losses from the same seed without dropout.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from lightning import Trainer
from torch import Tensor, nn

from gat_pyg import data
from gat_pyg.batches import TaskData, sparse_pays
from gat_pyg.models import GAT, PRESETS
from gat_pyg.results import versions
from gat_pyg.training import PaperStopping, Transductive

NUMBERS = {"cora": (0.005, 5e-4), "citeseer": (0.005, 5e-4), "pubmed": (0.01, 1e-3)}  # lr, L2


class PyGNet(nn.Module):
    """The paper's network on PyG's layer, as its users write it."""

    def __init__(self, task: data.Task, p: float | None = None) -> None:
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


def bare_loop(model: nn.Module, task: data.Task, epochs: int, sparse: bool = False) -> list[float]:
    """Train as a script does, by the paper's stopping rule (with patience for all epochs); the validation losses."""
    (graph,) = TaskData(task, sparse=sparse).train_dataloader()
    lr, weight_decay = NUMBERS[task.name]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    best_acc, best_loss, wait, kept, losses = 0.0, float("inf"), 0, {}, []
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
                kept = {key: value.clone() for key, value in model.state_dict().items()}
            best_acc, best_loss, wait = max(acc, best_acc), min(loss, best_loss), 0
        else:
            wait += 1
        if wait == epochs:
            break
    model.load_state_dict(kept)
    return losses


def lightning_loop(task: data.Task, epochs: int, callbacks: list[Any]) -> None:
    """Train by a plain Lightning trainer."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = GAT.preset(task.name)
    datamodule = TaskData(task, sparse=sparse_pays(task, model))
    trainer.fit(Transductive(model, *NUMBERS[task.name]), datamodule=datamodule)


def command(name: str, epochs: int) -> float:
    """Seconds per epoch that the command's Result tells."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"dataset={name}", f"outputs={folder}", f"training.max_epochs={epochs}"]
        arguments += [f"training.patience={epochs}"]
        subprocess.run([sys.executable, "-m", "gat_pyg.run", *arguments], check=True, capture_output=True)
        result = json.loads((Path(folder) / "results.jsonl").read_text())
        assert result["epochs"] == epochs, result
        return float(result["seconds_per_epoch"])


def timed(run: Callable[[], object], epochs: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / epochs


def check(task: data.Task) -> None:
    """PyG's layer and ours must take the same steps from the same seed."""
    losses = []
    for make, sparse in ((PyGNet, False), (ours, False), (ours, True)):
        torch.manual_seed(0)
        losses.append(torch.tensor(bare_loop(make(task, 0.0), task, 10, sparse)))
    torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-4, atol=1e-4)


def ours(task: data.Task, p: float) -> GAT:
    return GAT.preset(task.name, dropout=p)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=list(NUMBERS), default="cora")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    task = data.planetoid(options.dataset)
    check(task)
    epochs = options.epochs
    ways: dict[str, Callable[[], float]] = {
        "bare loop, PyG's layer": lambda: timed(lambda: bare_loop(PyGNet(task), task, epochs), epochs),
        "bare loop, our layer": lambda: timed(lambda: bare_loop(GAT.preset(task.name), task, epochs), epochs),
        "bare loop, our layer, sparse features": lambda: timed(
            lambda: bare_loop(GAT.preset(task.name), task, epochs, sparse=True), epochs
        ),
        "Lightning alone": lambda: timed(lambda: lightning_loop(task, epochs, []), epochs),
        "Lightning, stopping rule": lambda: timed(
            lambda: lightning_loop(task, epochs, [PaperStopping(epochs)]), epochs
        ),
        "the command": lambda: command(task.name, epochs),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, run in ways.items():
            seconds[way].append(run())
    base = seconds["bare loop, PyG's layer"]
    print(f"{task.name}, ms per epoch (training step and validation), median of {options.rounds} x {epochs} epochs")
    print("| way | ms | ratio to PyG's bare loop |\n|---|---|---|")
    rows = []
    for way, values in seconds.items():
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        rows.append({"way": way, "seconds": statistics.median(values), "ratio": ratio, "all": values})
        print(f"| {way} | {statistics.median(values) * 1e3:.2f} | {ratio:.2f} |")
    machine = f"{platform.system()}-{platform.machine()}-{torch.get_num_threads()}cores".lower()
    now = datetime.now(timezone.utc)
    path = Path(__file__).parent / "results" / f"{now:%Y-%m-%d}-{machine}-training-{task.name}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"date": now.isoformat(timespec="seconds"), "dataset": task.name, "epochs": epochs, "rows": rows}
    path.write_text(json.dumps({**record, "versions": versions(), "processor": platform.processor()}, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
