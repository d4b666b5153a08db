"""Seconds and peak memory of an epoch of PPI in the Lightning loop: our layer beside PyG's in the same network.

    python benchmarks/inductive.py --epochs 3

An epoch is training on 20 graphs, two a step, and the validation of 2; the first one is left out of the median. Each
way runs in a process of its own and tells the peak of its resident memory. Before, both layers must give the same loss
and gradients on one batch. The third row is the same network without attention, what its matrix products take by
themselves: no layer can be faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch_geometric.data import Batch

from gat_pyg import data
from gat_pyg.batches import TaskData
from gat_pyg.conv import GATConv
from gat_pyg.models import GAT
from gat_pyg.results import versions
from gat_pyg.training import Inductive

LAYERS = ("pyg", "ours")
WAYS = (*LAYERS, "no attention")


class NoAttention(nn.Module):
    """What a layer has around its attention: the projection and the skip connection."""

    def __init__(self, conv: GATConv) -> None:
        super().__init__()
        self.lin, self.res, self.bias = conv.lin, conv.res, conv.bias
        self.average = None if conv.concat else conv.heads

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
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

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ends.append(time.perf_counter())


def train(way: str, epochs: int) -> dict[str, float]:
    clock = Clock()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    trainer = Trainer(accelerator="cpu", max_epochs=epochs + 1, callbacks=[clock], enable_model_summary=False, **quiet)
    trainer.fit(Inductive(network(way), lr=0.005), datamodule=TaskData(data.ppi(), batch_size=2))
    seconds = [stop - start for start, stop in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"seconds": statistics.median(seconds), "peak_mib": peak()}


def peak() -> float:
    """MiB that were resident at most; `ru_maxrss` would count in the process that started this one, at its start."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def check() -> None:
    batch = Batch.from_data_list(data.ppi().train[:2])
    answers = []
    for way in LAYERS:
        model = network(way)
        loss = F.binary_cross_entropy_with_logits(model(batch.x, batch.edge_index), batch.y)
        answers.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, theirs in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="one way, in this process")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.way:
        print(json.dumps(train(options.way, options.epochs)))
        return
    check()
    rows = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--epochs", str(options.epochs)]
        rows[way] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[-2]
        )
    print("| layer | s an epoch | peak MiB | times PyG's speed |\n|---|---|---|---|")
    for way, row in rows.items():
        row["ratio"] = rows["pyg"]["seconds"] / row["seconds"]
        print(f"| {way} | {row['seconds']:.2f} | {row['peak_mib']:.0f} | {row['ratio']:.1f} |")
    now = datetime.now(timezone.utc)
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores".lower()
    path = Path(__file__).parent / "results" / f"{now:%Y-%m-%d}-{machine}-inductive-ppi.json"
    record = {"date": now.isoformat(timespec="seconds"), "epochs": options.epochs, "rows": rows, "versions": versions()}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
