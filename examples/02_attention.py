"""
What does your model attend to?
===============================

The attention of a model whose layers return it, ours or PyG's, as numbers and as pictures. In the data set
`planted`, a node's labels are the bits of the most salient node within two hops: attention can find it, a mean
cannot.
"""

import logging

import lightning
from lightning.pytorch import Trainer
from torch_geometric.utils import scatter

import gat_pyg
from gat_pyg.data import planted

logging.getLogger("lightning.pytorch").setLevel("WARNING")  # without its tips
lightning.seed_everything(0, verbose=False)
task = planted()
model = gat_pyg.GAT(17, [64], 16, heads=[4, 1])
quiet = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
trainer = Trainer(max_epochs=60, **quiet)
module = gat_pyg.Inductive(model, task.objective)
trainer.fit(module, datamodule=gat_pyg.TaskData(task, batch_size=2))
data = gat_pyg.TaskData(task)
print(trainer.validate(module, datamodule=data, verbose=False))

# %%
# For each layer, the edges and their coefficients `[E, H]`. The largest share that a single neighbour gets:

data = task.test[0]
model.eval()
for edge_index, alpha in gat_pyg.attention_of(model, data):
    top = scatter(alpha, edge_index[1], dim=0, reduce="max")
    print(f"heads {alpha.size(1)}, mean of the largest {top.mean():.2f}")

# %%
# The coefficients of a few neighbourhoods, in times uniform: 1 is what a mean would give.

gat_pyg.report.neighbourhood_figure(model, data, label=0)

# %%
# The graph by t-SNE of the first layer's output; an edge is as thick as its attention.

gat_pyg.report.attention_figure(model, data, label=0)
