"""The graphs of a task as batches: whole graphs, clusters or seed nodes, and each process's share of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader as Loader
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader, LinkLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NeighborSampler
from torch_geometric.typing import WITH_PYG_LIB

from ..distributed.halo import HaloStrategy, divided
from ..distributed.ranks import rank_zero_print
from ..graph.partition import partition
from ..graph.subgraph import is_sampled
from ..tasks.model import takes_sparse
from ..tasks.objective import MASKS, Split
from ..tasks.task import Task
from .clusters import Clusters
from .neighbours import TorchSampler
from .pairs import PairLoader, PairSampler, with_labels
from .shares import Batches, Cut, Drawn, Shares, _padding_graph, _without


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

    With `num_parts`, a single graph is divided into that many parts (`part` is the part of each node), and a training
    step is the subgraph induced by `batch_size` of them, drawn in each epoch (Cluster-GCN, Chiang et al., KDD 2019).
    Each of several processes takes the subgraph of its share of these parts, without edges to the other shares.
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
        self._has_pairs = task.objective.has_pairs
        if num_parts is not None and self._has_pairs:
            raise ValueError(
                f"num_parts is {num_parts}, but {task.name} predicts {task.objective.item}s, whose ends may be in two "
                "parts. Use num_neighbors (loader=neighbor) or num_links."
            )
        self.num_neighbors = num_neighbors
        self.num_parts = num_parts
        self.num_links = num_links
        self.num_workers = num_workers
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self._drawer: TorchSampler | None = None
        self._whole: Batches | None = None
        self._own: Batches | None = None
        if task.shared_graph is not None:
            data = copy.copy(task.shared_graph)
            data.x = data.x.to_sparse_csr() if sparse else data.x
            self._whole = Batches([data])

    def train_dataloader(self) -> DataLoader | Batches | NodeLoader | LinkLoader | Loader[Any]:
        """Return the one graph, batches of its seed nodes, its parts or its pairs, or of shuffled graphs."""
        if self.num_neighbors is not None:
            return self._sampled_pairs(self.num_neighbors) if self._has_pairs else self._seeds("train")
        if self.num_parts is not None:
            return self._clusters(self.num_parts)
        if self.num_links is not None:
            return self._pairs(self.num_links)
        if self._whole is not None:
            return self._single()
        sampler = self._shares("graph", self.task.train)
        graphs = [*self.task.train, _padding_graph(self.task.train[0], self.task.objective)]
        # its own generator: the loader's draws must not change the epoch's dropout
        return DataLoader(graphs, sampler.each, sampler=sampler, generator=torch.Generator())

    def val_dataloader(self) -> Batches | NodeLoader:
        """Return the one graph, batches of seed nodes or of all nodes, or this process's validation graphs."""
        if self.num_neighbors is not None and not self._has_pairs:
            return self._seeds("val")
        return self._whole_or_share(self.task.val)

    def test_dataloader(self) -> Batches:
        """Return the one graph, a loader of all its nodes as the only batch, or this process's test graphs."""
        return self._whole_or_share(self.task.test)

    def _whole_or_share(self, graphs: list[Data]) -> Batches:
        is_whole = self.num_neighbors is None and self.num_parts is None
        return self._share(graphs) if is_whole else self._all_nodes()

    @cached_property
    def part(self) -> Tensor:
        """The part of each node, [N] int64, if `num_parts` is given."""
        if self.num_parts is None:
            raise ValueError(f"{self.task.name} is not divided into parts. Give num_parts.")
        data = self.task.train[0]
        return partition(data.edge_index, data.x.size(0), self.num_parts)

    def transfer_batch_to_device(self, batch: Data, device: torch.device, dataloader_idx: int) -> Data:
        """Move a batch to the device; a graph on the device stays the same object, so that cached results stay valid.

        Floating-point tensors are converted to the trainer's precision if it is not float32, as in "64-true".
        """
        if isinstance(batch, NodeLoader):
            return batch
        with torch.inference_mode(False):  # training uses the same tensors after a test or validation
            if self.trainer and self.trainer.precision in ("64-true", "16-true", "bf16-true"):
                dtype = self.trainer.precision_plugin.convert_input(torch.empty(0)).dtype
                if batch.x.dtype != dtype:
                    batch = batch.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
            return batch if batch.x.device == device else batch.to(device)

    def _share(self, graphs: list[Data]) -> Batches:
        if self._whole is not None:
            return self._single()
        rank, world = self._place()
        share = graphs[rank::world]
        if len(share) < -(-len(graphs) // world):  # all need the same number of batches: a forward may communicate
            share = [*share, _padding_graph(graphs[0], self.task.objective)]
        size = -(-self.batch_size // world)
        return Batches([Batch.from_data_list(share[start : start + size]) for start in range(0, len(share), size)])

    def _single(self) -> Batches:
        """Return the one graph, or this process's part of it."""
        assert self._whole is not None
        if self.trainer is None or not is_divided(self.trainer):
            return self._whole
        if self._own is None:
            (rank, world), N = self._place(), self.task.train[0].x.size(0)
            part, fetched = divided(self._graph, rank, world, self.trainer.strategy.root_device)
            self._own = Batches([part])
            rank_zero_print(
                f"{self.task.name}: {N:,} nodes in {world} parts; {fetched:,} rows, {100 * fetched / N:.1f} % of them, "
                "are fetched from other processes before each layer"
            )
        return self._own

    @property
    def _graph(self) -> Data:
        """The graph from which batches are sampled, with the keys of `Task` only."""
        graph: Data = self.task.train[0]
        data = Data(graph.x, graph.edge_index, graph.edge_attr, graph.y)
        of_pairs = [key for key in ("edge_label_index", "edge_label_attr") if key in graph]
        for key in (*MASKS, *(of_pairs if self._has_pairs else [])):
            data[key] = graph[key]
        return data

    def _sampler(self, num_neighbors: Sequence[int]) -> BaseSampler:
        data = self._graph
        if WITH_PYG_LIB:
            return NeighborSampler(data, list(num_neighbors))
        self._drawer = self._drawer or TorchSampler(data.edge_index, data.x.size(0), num_neighbors)
        return self._drawer.of(num_neighbors)  # shares the sorted edges

    def _all_nodes(self) -> Batches:
        """Return a loader of all nodes with all neighbours, in batches of about as many nodes as a training step."""
        size = self.batch_size
        if self.num_parts is not None:
            size = -(-self.part.numel() * min(size, self.num_parts) // self.num_parts)
        return Batches([NodeLoader(self._graph, self._sampler([-1]), batch_size=size)])

    def _clusters(self, num_parts: int) -> Cut:
        """Return batches of this process's parts, in an order determined by seed and epoch."""
        share, clusters = self._shares("part", range(num_parts)), Clusters(self._graph, self.part)
        return Cut(
            list(range(num_parts + 1)),  # type: ignore[arg-type]  # the last part is empty, for padding
            batch_size=share.each,
            sampler=share,
            collate_fn=clusters,
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )

    def _pairs(self, num_links: int) -> Loader[Any]:
        """Return the whole graph with the labelled pairs of each step as `input_id`, and this process's `share`."""
        (graph,) = self._single()
        if self.trainer is not None:  # once, not in each step
            graph = self.transfer_batch_to_device(graph, self.trainer.strategy.root_device, 0)

        def batch(ids: list[int]) -> Data:
            data = copy.copy(graph)
            data.input_id = torch.tensor(ids, device=graph.x.device)
            data.share = self._place()
            return data

        steps = self._steps(num_links)
        return Loader(
            range(steps.num_graphs),  # type: ignore[arg-type]
            batch_size=num_links,
            sampler=steps,
            collate_fn=batch,
            generator=torch.Generator(),
        )

    def _sampled_pairs(self, num_neighbors: Sequence[int]) -> LinkLoader:
        """Return this process's labelled pairs of each step with neighbours of their nodes."""
        graph, steps = self.task.train[0], self._steps(self.batch_size)
        return PairLoader(
            Data(graph.x, graph.edge_index, graph.edge_attr),
            PairSampler(self._sampler(num_neighbors), graph, self.task.objective, steps, self._place()),
            graph.edge_label_index[:, graph.train_mask],
            batch_size=self.batch_size,
            sampler=steps,
            transform=partial(with_labels, features=self._pair_features),
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )

    @property
    def _pair_features(self) -> Tensor | None:
        """The features of the training pairs, if they have some."""
        graph = self.task.train[0]
        return graph.edge_label_attr[graph.train_mask] if "edge_label_attr" in graph else None

    def _steps(self, num_pairs: int) -> Shares:
        """Return the training pairs of each step, of all processes: a share is taken when negative pairs are drawn."""
        return Shares(range(int(self.task.train[0].train_mask.sum())), num_pairs, 0, 1, self._order_seed)

    def _shares(self, kind: str, items: Sequence[Any]) -> Shares:
        """Return this process's share of the graphs or parts of each step."""
        rank, world = self._place()
        if self.batch_size < world:
            raise ValueError(
                f"batch_size is {self.batch_size} {kind}s in a step over all processes, but there are {world} "
                f"processes, and each needs one. Use batch_size={world} or more, or start fewer processes."
            )
        return Shares(items, self.batch_size, rank, world, self._order_seed)

    @property
    def _order_seed(self) -> int:
        return int(np.random.SeedSequence(self.seed).generate_state(1)[0])  # spread out: the sampler adds the epoch

    def _seeds(self, split: Split) -> NodeLoader:
        """Return batches of this process's seed nodes, in an order determined by seed and epoch."""
        assert self.num_neighbors is not None
        rank, world = self._place()
        if self.batch_size % world:
            raise ValueError(
                f"batch_size is {self.batch_size} seed nodes in a step over all {world} processes, expected a multiple "
                f"of {world}, such as {-(-self.batch_size // world) * world}."
            )
        nodes = self._graph[f"{split}_mask"].nonzero().view(-1)
        share = Shares(nodes, self.batch_size, rank, world, self._order_seed)
        return Drawn(
            self._graph,
            self._sampler(self.num_neighbors),
            torch.cat([nodes, nodes[:1]]),  # the last entry pads the share of a rank without a seed node
            batch_size=share.each,
            sampler=share,
            transform_sampler_output=partial(_without, nodes.numel()),
            num_workers=self.num_workers,
            generator=share.generator,
        )

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


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


def is_divided(trainer: Trainer) -> bool:
    """Return True if the trainer's processes divide one graph."""
    return isinstance(getattr(trainer, "strategy", None), HaloStrategy)


def is_drawn(data: Data) -> bool:
    """Return True for one of many batches of a graph: seed nodes with neighbours, some of its parts or its links."""
    return is_sampled(data) or "parts" in data or "input_id" in data
