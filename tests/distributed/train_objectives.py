"""Train a small task of every objective over graphs and pairs, in float64: `python FILE PATH_OF_WEIGHTS WORLD`."""

from __future__ import annotations

import os
import sys

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from gat_pyg.training.loading import TaskData
from gat_pyg.training.resume import Resumable
from tests.objectives import OBJECTIVES, WITH_GRAPHS, setup

NEIGHBOURS = {"num_neighbors": [-1, -1]}
IN_PAIRS = {  # the last step of 51 links, and of 30 edges, has one: a process has no edge
    f"{name}, {key}": (name, options)
    for name, size in (("links", 25), ("edges", 29))
    for key, options in (
        ("whole graph", {"num_links": size}),
        ("all neighbours", {"batch_size": size, **NEIGHBOURS}),
    )
}
IN_NODES = {"nodes of one graph": ("nodes of one graph", {"batch_size": 4, **NEIGHBOURS})}  # of 9 nodes, below
SETUPS = {**{name: (name, {"batch_size": 4}) for name in WITH_GRAPHS}, **IN_PAIRS, **IN_NODES}


def trained(case: str, world: int) -> dict[str, Tensor]:
    """Return the weights after two epochs of small batches, and the scores of validation and test."""
    name, options = SETUPS[case]
    task = OBJECTIVES[name]()
    if task.objective.item == "node" and task.shared_graph is not None:
        task.shared_graph.train_mask[0] = False  # the last step has one node, and a process none
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="gloo") if world > 1 else "auto",
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=1 + (case == "graphs, many labels"),
        callbacks=[Resumable(None, seed=1)],  # seeds the negative links
        use_distributed_sampler=False,  # TaskData shares the graphs
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = setup(task, dropout=0.0), TaskData(task, seed=1, **options)
    trainer.fit(module, datamodule=data)
    weights = {name: value.clone() for name, value in module.model.state_dict().items()}
    trainer.test(module, datamodule=data, verbose=False)
    return weights | {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    results = {name: trained(name, int(sys.argv[2])) for name in SETUPS}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(results, sys.argv[1])
