"""A graph of 60 nodes, the batches of each process, and short trainings on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch import Callback, LightningModule
from torch_geometric.data import Data

from gat_pyg import GAT
from gat_pyg.data import Task
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Optimisation, PaperStopping, Resumable, SafeCheckpoints, TaskData, Transductive
from tests.graphs import random

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


class Place:
    """The trainer of one of several processes."""

    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world
        self.strategy = SimpleNamespace(root_device=torch.device("cpu"))


def trainer(*callbacks: Callback, epochs: int = 5, accelerator: str = "cpu", **options: Any) -> Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {**dict.fromkeys(quiet, False), "num_sanity_val_steps": 0, "plugins": [SafeCheckpoints()], **options}
    return Trainer(max_epochs=epochs, accelerator=accelerator, callbacks=list(callbacks), **options)


def one_graph(edge_dim: int | None = None) -> Task:
    graph, generator = random(60, 60, 400), torch.Generator().manual_seed(1)
    masks = {f"{split}_mask": torch.arange(60) % 3 == place for place, split in enumerate(("train", "val", "test"))}
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    data = Data(x, graph.index, y=torch.arange(60) % 7 % 3, **masks)
    if edge_dim is not None:
        data.edge_attr = torch.randn(400, edge_dim, generator=generator, dtype=torch.float64)
    return Task("one", [data], [data], [data], 6, NodeLabels(3), edge_dim=edge_dim)


def model(edge_dim: int | None = None, dropout: float = 0.0) -> GAT:
    torch.manual_seed(0)
    return GAT(6, [4], 3, [2, 1], edge_dim=edge_dim, dropout=dropout).double()


def steps_of(task: Task, world: int = 1, epoch: int = 0, **options: Any) -> list[tuple[Data, ...]]:
    """Each training step of an epoch: a batch of each process."""
    loaders = []
    for rank in range(world):
        data = TaskData(task, **options)
        data.trainer = Place(rank, world)
        loaders.append(data.train_dataloader())
        loaders[-1].sampler.set_epoch(epoch)
    return list(zip(*loaders, strict=True))


def fitted(
    module: LightningModule, data: TaskData, epochs: int = 6, path: Path | None = None, resume: Path | None = None
) -> PaperStopping:
    rule = PaperStopping(100, "accuracy" if data.task.objective.item == "link" else "both")
    fit = trainer(rule, Resumable(path, seed=3, every=0), epochs=epochs)
    fit.fit(module, datamodule=data, ckpt_path=resume)
    return rule


def node_module(**options: Any) -> Transductive:
    return Transductive(model(**options), NodeLabels(3), Optimisation(lr=0.05))


class Kill(Callback):
    """End the fit in the middle of an epoch, as a kill would: nothing is saved on the way out."""

    def __init__(self, epoch: int, hook: str) -> None:
        self.epoch, self.hook = epoch, hook

    def _die(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch:
            raise InterruptedError

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        self._die("start", trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._die("batch", trainer)

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        self._die("validation", trainer)
