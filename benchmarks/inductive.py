"""Seconds and peak memory of an epoch of PPI in the Lightning loop: our layer beside PyG's in the same network.

    python benchmarks/inductive.py --epochs 3

An epoch is training on 20 graphs, two a step, and the validation of 2; the first one is left out of the median. Each
way runs in a process of its own and prints the peak of its memory, resident or on the GPU. Before, both layers must
give the same loss and gradients on one batch. The third row is the same network without attention, what its matrix
products take by themselves: no layer can be faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch_geometric.data import Batch

import machine
from gat_pyg.conv import GATConv
from gat_pyg.data.named import proteins
from gat_pyg.models import GAT
from gat_pyg.training import Inductive
from gat_pyg.training.loading import TaskData

LAYERS = ("pyg", "ours")
WAYS = (*LAYERS, "no attention")


class NoAttention(nn.Module):
    """The parts of a layer around its attention: the projection and the skip connection."""

    def __init__(self, conv: GATConv) -> None:
        super().__init__()
        self.lin, self.res, self.bias = conv.lin, conv.res, conv.bias
        self.average = None if conv.concat else conv.heads

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Any = None, size: Any = None) -> Tensor:
        x = x if size is None else x[: size[1]]
        out: Tensor = self.lin(x)
        out = out if self.average is None else out.unflatten(1, (self.average, -1)).mean(1)
        return (out if self.res is None else out + self.res(x)) + self.bias


def network(way: str) -> GAT:
    """The paper's network for PPI, on PyG's layer, on ours or on none; the same weights any way."""
    torch.manual_seed(0)
    model = GAT.preset("ppi")
    for at, conv in enumerate(model.convs):
        if way == "no attention":
            model.convs[at] = NoAttention(conv)
        elif way == "pyg":
            options = {"heads": conv.heads, "concat": conv.concat, "residual": conv.residual}
            theirs = pyg.GATConv(conv.in_channels, conv.out_channels, **options)
            theirs.load_state_dict(conv.state_dict())
            model.convs[at] = theirs
    return model


class Clock(Callback):
    """When each epoch ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ends.append(machine.now(self.device))


def train(way: str, epochs: int, device: torch.device) -> dict[str, float]:
    clock, task = Clock(device), proteins.ppi()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    where = {"accelerator": machine.accelerator(device), "devices": 1}
    trainer = Trainer(max_epochs=epochs + 1, callbacks=[clock], enable_model_summary=False, **where, **quiet)
    trainer.fit(Inductive(network(way), task.objective), datamodule=TaskData(task, batch_size=2))
    seconds = [stop - start for start, stop in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"seconds": statistics.median(seconds), "peak_mib": machine.process_peak()}


def check(device: torch.device) -> None:
    batch = Batch.from_data_list(proteins.ppi().train[:2]).to(device)
    answers = []
    for way in LAYERS:
        model = network(way).to(device)
        loss = F.binary_cross_entropy_with_logits(model(batch.x, batch.edge_index), batch.y)
        answers.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, theirs in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default=machine.DEFAULT, type=machine.device)
    parser.add_argument("--way", choices=WAYS, help="one way, in this process")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.way:
        print(json.dumps(train(options.way, options.epochs, options.device)))
        return
    check(options.device)
    path = machine.results("inductive-ppi", options.device)
    record: dict[str, Any] = {**machine.about(options.device), "epochs": options.epochs, "rows": {}}
    print("| layer | s an epoch | peak MiB | times PyG's speed |\n|---|---|---|---|")
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--epochs", str(options.epochs)]
        command += ["--device", str(options.device)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        record["rows"][way] = row = json.loads(ran.stdout.split("\n")[-2])
        row["ratio"] = record["rows"]["pyg"]["seconds"] / row["seconds"]
        machine.write(path, record)
        print(f"| {way} | {row['seconds']:.2f} | {row['peak_mib']:.0f} | {row['ratio']:.1f} |", flush=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
