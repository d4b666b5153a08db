"""
Sampled training on a large graph
=================================

A step computes a batch of nodes and some neighbours of each, drawn at random; the test uses the whole graph,
layer by layer.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/sampled_training.png"

import logging

import lightning
from lightning.pytorch import Trainer

import gat_pyg
from gat_pyg.data import digits

logging.getLogger("lightning.pytorch").setLevel("WARNING")  # without its tips
lightning.seed_everything(0, verbose=False)
task = digits()
model = gat_pyg.GAT(64, [8], 10, heads=[8, 1], dropout=0.2)
module = gat_pyg.Transductive(
    model, task.objective, gat_pyg.Optimisation(lr=0.02)
)

# %%
# 32 nodes a step, with 10 neighbours at the first hop and 5 at the second. For a graph that is larger than memory,
# pass a folder of `x.npy`, `edge_index.npy` and `y.npy` to `gat_pyg.data.from_file`: each step reads only the rows
# it needs.

data = gat_pyg.TaskData(task, batch_size=32, num_neighbors=[10, 5])
quiet = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
trainer = Trainer(max_epochs=30, **quiet)
trainer.fit(module, datamodule=data)
print(trainer.test(module, datamodule=data, verbose=False))

# %%
# By the command: `gat-pyg dataset=digits loader=neighbor loader.batch_size=32 "loader.num_neighbors=[10,5]"`.
