"""The LightningDataModule of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch_geometric.data import Data

from ..tasks.model import takes_sparse
from ..tasks.task import Task
from .batching import LabelledPairs, Loading, ManyGraphs, Parts, SeedNodes, SeedPairs, WholeGraph, moved


class TaskData(LightningDataModule):
    """The LightningDataModule of a task: `trainer.fit(module, datamodule=TaskData(task))`.

    Training graphs are shuffled. Their order depends only on `seed` and the epoch, so a resumed run has the same order.
    Validation and test batches are collated once. Each of several processes takes its share of the `batch_size` graphs
    of a step, so the steps are the same for any number of processes; no graph is repeated or counted twice. Raises
    ValueError if there are more processes than graphs in a step.

    `sparse` turns the features of a shared graph into a torch.sparse CSR matrix, for a model that accepts one;
    `sparse_pays` decides if that is faster.

    With the trainer's strategy "halo", each process has a part of the graph, and a step is the same as with the whole
    graph in one process: see `gat_pyg.distributed.halo`. Features are then dense.

    With `num_neighbors`, a step of training or validation on a single graph is a batch of `batch_size` seed nodes with
    neighbours drawn at random, as many as given for each hop (-1: all), by pyg-lib if it is installed, else by
    `TorchSampler`. The test uses the whole graph, layer by layer if the model has `inference`. With labels of pairs of
    nodes, a training step has `batch_size` of these pairs with neighbours of their nodes, see `PairSampler`, and the
    validation also uses the whole graph: the score of links needs all pairs of a split.

    With `num_parts`, a single graph is divided into that many parts (`loading.part` is the part of each node), and a
    training step is the subgraph induced by `batch_size` of them, drawn in each epoch (Cluster-GCN, Chiang et al., KDD
    2019). Each of several processes takes the subgraph of its share of these parts, without edges to the other shares.
    Validation and test use the whole graph, layer by layer.

    With `num_links`, a training step is the whole graph with that many of its labelled pairs of nodes, each once in an
    epoch; for link prediction, with as many negative pairs, drawn in each step. Each of several processes takes its
    share of these pairs, each on the whole graph. The links of a step stay message-passing edges.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int = 1,
        seed: int = 0,
        sparse: bool = False,
        num_neighbors: Sequence[int] | None = None,
        num_workers: int = 0,
        num_parts: int | None = None,
        num_links: int | None = None,
    ) -> None:
        super().__init__()
        _check(task, num_neighbors, num_parts, num_links)
        self.task = task
        self.loading: Loading
        if num_neighbors is not None:
            kind = SeedPairs if task.objective.has_pairs else SeedNodes
            self.loading = kind(task, batch_size, seed, num_workers, num_neighbors)
        elif num_parts is not None:
            self.loading = Parts(task, batch_size, seed, num_workers, num_parts)
        elif num_links is not None:
            self.loading = LabelledPairs(task, sparse, num_links, seed)
        elif task.has_many_graphs:
            self.loading = ManyGraphs(task, batch_size, seed)
        else:
            self.loading = WholeGraph(task, sparse)

    def train_dataloader(self) -> Any:
        """Return the one graph, batches of its seed nodes, its parts or its pairs, or of shuffled graphs."""
        return self.loading.batches("train", self.trainer)

    def val_dataloader(self) -> Any:
        """Return the one graph, batches of seed nodes or of all nodes, or this process's validation graphs."""
        return self.loading.batches("val", self.trainer)

    def test_dataloader(self) -> Any:
        """Return the one graph, a loader of all its nodes as the only batch, or this process's test graphs."""
        return self.loading.batches("test", self.trainer)

    def predict_dataloader(self) -> Any:
        """Return the batches of the test, for `trainer.predict`."""
        return self.loading.batches("test", self.trainer)

    def transfer_batch_to_device(self, batch: Data, device: torch.device, dataloader_idx: int) -> Data:
        """Move a batch to the device, in the trainer's precision if it is not float32, as in "64-true"."""
        batch = moved(batch, self.trainer, device)
        return batch


def _check(task: Task, num_neighbors: Sequence[int] | None, num_parts: int | None, num_links: int | None) -> None:
    """Raise ValueError for options that the task does not allow, or that exclude each other."""
    options = {
        "num_neighbors": None if num_neighbors is None else list(num_neighbors),
        "num_parts": num_parts,
        "num_links": num_links,
    }
    passed = [f"{key} is {value}" for key, value in options.items() if value is not None]
    if passed and task.has_many_graphs:
        raise ValueError(f"{passed[0]}, but {task.name} has many graphs, which are used whole. Leave it out.")
    if len(passed) > 1:
        raise ValueError(
            f"{' and '.join(passed)}, expected only one: batches of nodes, parts or links. Set the others to null."
        )
    if num_links is not None and "edge_label_index" not in task.train[0]:
        raise ValueError(f"num_links is {num_links}, but {task.name} has no labelled pairs of nodes. Leave it out.")
    if num_parts is not None and task.objective.has_pairs:
        raise ValueError(
            f"num_parts is {num_parts}, but {task.name} predicts {task.objective.item}s, whose ends may be in two "
            "parts. Use num_neighbors (loader=neighbor) or num_links."
        )


SPARSE = 0.2  # the density up to which sparse features were faster at every size measured, with and without dropout


def sparse_pays(task: Task, model: nn.Module, device: str = "cpu", stacked: bool = False) -> bool:
    """Return True if `TaskData(sparse=True)` is faster: on one graph with few non-zero features.

    On CUDA this holds only for stacks, where each model needs its own copy of x after dropout. For a single model,
    dense x and its product are small, and a sparse product takes as long as its longest column.

    >>> import gat_pyg.data, gat_pyg.models
    >>> task = gat_pyg.data.digits()  # about half of the pixels are dark
    >>> sparse_pays(task, gat_pyg.models.GAT(64, [8], 10, [8, 1]))
    False
    """
    is_supported = device == "cpu" or (device == "cuda" and stacked)
    if not is_supported or task.shared_graph is None or not takes_sparse(model):
        return False
    x: Tensor = task.shared_graph.x
    return x.count_nonzero().item() <= SPARSE * x.numel()
