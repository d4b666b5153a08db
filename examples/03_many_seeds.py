"""
Many seeds as one model
=======================

Ten networks that differ only in their seed train as one batched model: each has the weights, dropout and stopping rule
of its own seed, and the result of a training alone up to rounding.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/many_seeds.png"

import statistics

from gat_pyg import GAT, Optimisation, seeds
from gat_pyg.data import digits

task = digits()


def make() -> GAT:
    return GAT(64, [8], 10, heads=[8, 1], dropout=0.6)


adam = Optimisation(lr=0.02, weight_decay=5e-4)
results, stack = seeds.train(
    make, task, seeds=range(10), optimisation=adam, max_epochs=200
)

for seed, result in enumerate(results):
    print(f"seed {seed}: {result.value:.1f} %, {result.epochs} epochs")
values = [result.value for result in results]
print(
    f"mean {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %"
)

# %%
# The trained stack computes all models at once, `[S, N, K]`: the averaged prediction is an ensemble.

data = task.test[0]
mean = stack(data.x, data.edge_index).softmax(-1).mean(0)
correct = mean[data.test_mask].argmax(-1) == data.y[data.test_mask]
print(f"ensemble {100 * correct.float().mean():.1f} %")
