"""Train a small task of every objective over graphs, in float64, and save the weights: `python FILE PATH WORLD`."""

from __future__ import annotations

import os
import sys

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from gat_pyg.training.loading import TaskData
from objectives import OBJECTIVES, WITH_GRAPHS, setup


def trained(name: str, world: int) -> dict[str, Tensor]:
    """The weights after four epochs of batches of four graphs, and the scores of the validation and the test."""
    task = OBJECTIVES[name]()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="gloo") if world > 1 else "auto",
        precision="64-true",
        max_epochs=4,
        use_distributed_sampler=False,  # TaskData shares the graphs
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = setup(task, dropout=0.0), TaskData(task, batch_size=4, seed=1)
    trainer.fit(module, datamodule=data)
    weights = {name: value.clone() for name, value in module.model.state_dict().items()}
    trainer.test(module, datamodule=data, verbose=False)
    return weights | {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    results = {name: trained(name, int(sys.argv[2])) for name in WITH_GRAPHS}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(results, sys.argv[1])
