"""
An inductive data set of your own
=================================

Train on some graphs, stop on others, test on graphs that were never seen, with Lightning.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/inductive.png"

import logging

import lightning
import torch
from lightning.pytorch import Trainer
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import gat_pyg
from gat_pyg.data import from_dataset

logging.getLogger("lightning.pytorch").setLevel("WARNING")  # without its tips
lightning.seed_everything(0, verbose=False)


def graph(nodes: int = 60) -> Data:
    """Return a random graph; a node's label is 1 if a neighbour's first feature is above 1."""
    x = torch.randn(nodes, 8)
    edge_index = to_undirected(torch.randint(nodes, (2, 2 * nodes)))
    src, dst = edge_index
    largest = torch.full((nodes,), -9.0).scatter_reduce(
        0, dst, x[src, 0], "amax"
    )
    return Data(x=x, edge_index=edge_index, y=(largest > 1).long())


# %%
# A list of graphs with node labels becomes a task: the objective (classes, loss, metric) follows from the labels.

task = from_dataset([graph() for _ in range(40)], val=8, test=8)
print(len(task.train), len(task.val), len(task.test), task.objective)

# %%
# The LightningModule of the inductive setup, with the paper's stopping rule. Any model called as `model(x,
# edge_index)` will do.

module = gat_pyg.Inductive(
    gat_pyg.GAT(8, [32], 2, heads=[4, 1]), task.objective
)
quiet = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
trainer = Trainer(
    max_epochs=100, callbacks=[gat_pyg.PaperStopping(patience=20)], **quiet
)
trainer.fit(module, datamodule=gat_pyg.TaskData(task, batch_size=4))
print(trainer.test(module, datamodule=gat_pyg.TaskData(task), verbose=False))
