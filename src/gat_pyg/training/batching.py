"""The ways of dividing a task's graphs into batches: one `Loading` for each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader as Loader
from torch_geometric.data import Batch, Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NeighborSampler, SamplerOutput
from torch_geometric.typing import WITH_PYG_LIB

from ..data.collate import Collate
from ..distributed.halo import HaloStrategy, divided
from ..distributed.ranks import rank_zero_print
from ..graph.partition import partition
from ..graph.subgraph import is_sampled
from ..tasks.objective import MASKS, Objective, Split
from ..tasks.task import Task
from .clusters import Clusters
from .neighbours import TorchSampler
from .pairs import PairLoader, PairSampler, with_labels
from .shares import Batches, Cut, Drawn, Shares

SHARED = ("edge_index", "edge_attr", "edge_label_index", "edge_label_attr")  # keys that the steps of a series share
UNREAD = ["smiles"]  # keys that a step does not read


class Loading:
    """The batches of a task's splits; each process of the trainer gets its share.

    The arguments of a class are the options of `TaskData` that it reads.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return the batches of a split; there is no trainer outside of a fit."""
        raise NotImplementedError


class ManyGraphs(Loading):
    """`batch_size` shuffled graphs in a training step, over all processes."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        super().__init__(task)
        self.batch_size, self.seed = batch_size, seed
        self._batches: dict[tuple[Any, ...], Batch] = {}  # batches of graphs that share edges, by size

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return this process's share of the graphs; in training, in an order determined by seed and epoch."""
        if split != "train":
            return self._in_order(self.task.val if split == "val" else self.task.test, trainer)
        sampler = _shares("graph", self.task.train, self.batch_size, trainer, self.seed)
        graphs = [*self.task.train, _padding_graph(self.task.train[0], self.task.objective)]
        # its own generator: the loader's draws must not change the epoch's dropout
        return Loader(
            range(len(graphs)),  # type: ignore[arg-type]
            sampler.each,
            sampler=sampler,
            collate_fn=partial(self._joined, _device(trainer), Collate(graphs, UNREAD)),
            generator=torch.Generator(),
        )

    def _in_order(self, graphs: list[Data], trainer: Trainer | None) -> Batches:
        rank, world = _place(trainer)
        share = graphs[rank::world]
        if len(share) < -(-len(graphs) // world):  # all need the same number of batches: a forward may communicate
            share = [*share, _padding_graph(graphs[0], self.task.objective)]
        size = -(-self.batch_size // world)
        collate = Collate(share, UNREAD)
        parts = (range(len(share))[start : start + size] for start in range(0, len(share), size))
        return Batches([self._joined(_device(trainer), collate, part) for part in parts])

    def _joined(self, device: torch.device | None, collate: Collate, indices: Sequence[int]) -> Batch:
        """Return graphs as a batch; batches of one size share the edges if all graphs do, as the steps of a series.

        Then what is cached with a batch's edges stays valid, on the device too.
        """
        graphs = [collate.graphs[index] for index in indices]
        first = self.task.train[0]
        shared = [key for key in SHARED if key in first and all(data.get(key) is first[key] for data in graphs)]
        same_nodes = all(len(data.x) == len(first.x) for data in graphs)
        if not (same_nodes and {"edge_index", "edge_label_index"} & {*first.keys()} <= {*shared}):
            return collate(indices)
        key = (len(graphs), *shared)
        if key not in self._batches:
            batch = Batch.from_data_list(graphs, exclude_keys=UNREAD)
            self._batches[key] = batch if device is None else batch.to(device)
        batch = copy.copy(self._batches[key])
        for name in {*first.keys()}.difference(shared, UNREAD):
            batch[name] = torch.cat([data[name] for data in graphs])
        return batch


class WholeGraph(Loading):
    """One graph as the only batch, or this process's part of it by the strategy "halo"."""

    def __init__(self, task: Task, sparse: bool) -> None:
        super().__init__(task)
        data = copy.copy(task.train[0])
        data.x = data.x.to_sparse_csr() if sparse else data.x
        self._whole = Batches([data])
        self._part: Batches | None = None

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return the graph, or this process's part of it."""
        if trainer is None or not is_divided(trainer):
            return self._whole
        if self._part is None:
            (rank, world), N = _place(trainer), self.task.train[0].x.size(0)
            part, fetched = divided(_graph_of(self.task), rank, world, trainer.strategy.root_device)
            self._part = Batches([part])
            rank_zero_print(
                f"{self.task.name}: {N:,} nodes in {world} parts; {fetched:,} rows, {100 * fetched / N:.1f} % of them, "
                "are fetched from other processes before each layer"
            )
        return self._part


class LabelledPairs(WholeGraph):
    """One graph with `num_links` of its labelled pairs of nodes in each training step."""

    def __init__(self, task: Task, sparse: bool, num_links: int, seed: int) -> None:
        super().__init__(task, sparse)
        self.num_links, self.seed = num_links, seed

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return the graph; in training, with the labelled pairs of a step as `input_id` and the process's `share`."""
        whole = super().batches(split, trainer)
        if split != "train":
            return whole
        (graph,) = whole
        if trainer is not None:  # once, not in each step
            graph = moved(graph, trainer, trainer.strategy.root_device)

        def batch(ids: list[int]) -> Data:
            data = copy.copy(graph)
            data.input_id = torch.tensor(ids, device=graph.x.device)
            data.share = _place(trainer)
            return data

        steps = _steps(self.task, self.num_links, self.seed)
        return Loader(
            range(steps.num_graphs),  # type: ignore[arg-type]
            batch_size=self.num_links,
            sampler=steps,
            collate_fn=batch,
            generator=torch.Generator(),
        )


class Subgraphs(Loading):
    """One graph in batches of `batch_size` nodes, parts or pairs; the base of the three."""

    def __init__(self, task: Task, batch_size: int, seed: int, num_workers: int) -> None:
        super().__init__(task)
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers
        self._drawer: TorchSampler | None = None

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return a loader of all nodes with all neighbours, in batches of about as many nodes as a training step."""
        return Batches([NodeLoader(_graph_of(self.task), self._sampler([-1]), batch_size=self._nodes_per_step())])

    def _nodes_per_step(self) -> int:
        return self.batch_size

    def _sampler(self, num_neighbors: Sequence[int]) -> BaseSampler:
        data = _graph_of(self.task)
        if WITH_PYG_LIB:
            return NeighborSampler(data, list(num_neighbors))
        self._drawer = self._drawer or TorchSampler(data.edge_index, data.x.size(0), num_neighbors)
        return self._drawer.of(num_neighbors)  # shares the sorted edges


class SeedNodes(Subgraphs):
    """`batch_size` seed nodes in a step of training or validation, with neighbours drawn for them."""

    def __init__(self, task: Task, batch_size: int, seed: int, num_workers: int, num_neighbors: Sequence[int]) -> None:
        super().__init__(task, batch_size, seed, num_workers)
        self.num_neighbors = num_neighbors

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return batches of this process's seed nodes, in an order set by seed and epoch; for the test, all nodes."""
        if split == "test":
            return super().batches(split, trainer)
        rank, world = _place(trainer)
        if self.batch_size % world:
            raise ValueError(
                f"batch_size is {self.batch_size} seed nodes in a step over all {world} processes, expected a multiple "
                f"of {world}, such as {-(-self.batch_size // world) * world}."
            )
        graph = _graph_of(self.task)
        nodes = graph[f"{split}_mask"].nonzero().view(-1)
        share = Shares(nodes, self.batch_size, rank, world, _order_seed(self.seed))
        return Drawn(
            graph,
            self._sampler(self.num_neighbors),
            torch.cat([nodes, nodes[:1]]),  # the last entry pads the share of a rank without a seed node
            batch_size=share.each,
            sampler=share,
            transform_sampler_output=partial(_without, nodes.numel()),
            num_workers=self.num_workers,
            generator=share.generator,
        )


class SeedPairs(SeedNodes):
    """`batch_size` labelled pairs of nodes in a training step, with neighbours drawn for their nodes.

    The validation uses the whole graph: the score of links needs all pairs of a split.
    """

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return this process's labelled pairs with neighbours of their nodes; outside of training, all nodes."""
        if split != "train":
            return super().batches("test", trainer)
        graph, steps = self.task.train[0], _steps(self.task, self.batch_size, self.seed)
        features = graph.edge_label_attr[graph.train_mask] if "edge_label_attr" in graph else None
        return PairLoader(
            Data(graph.x, graph.edge_index, graph.edge_attr),
            PairSampler(self._sampler(self.num_neighbors), graph, self.task.objective, steps, _place(trainer)),
            graph.edge_label_index[:, graph.train_mask],
            batch_size=self.batch_size,
            sampler=steps,
            transform=partial(with_labels, features=features),
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )


class Parts(Subgraphs):
    """The subgraph induced by `batch_size` of `num_parts` parts of the graph in a training step: Cluster-GCN."""

    def __init__(self, task: Task, batch_size: int, seed: int, num_workers: int, num_parts: int) -> None:
        super().__init__(task, batch_size, seed, num_workers)
        self.num_parts = num_parts

    @cached_property
    def part(self) -> Tensor:
        """The part of each node, [N] int64."""
        data = self.task.train[0]
        return partition(data.edge_index, data.x.size(0), self.num_parts)

    def batches(self, split: Split, trainer: Trainer | None) -> Any:
        """Return batches of this process's parts, in an order set by seed and epoch; outside of training, all nodes."""
        if split != "train":
            return super().batches(split, trainer)
        share = _shares("part", range(self.num_parts), self.batch_size, trainer, self.seed)
        return Cut(
            list(range(self.num_parts + 1)),  # the last part is empty, for padding
            batch_size=share.each,
            sampler=share,
            collate_fn=Clusters(_graph_of(self.task), self.part),
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )

    def _nodes_per_step(self) -> int:
        return -(-self.part.numel() * min(self.batch_size, self.num_parts) // self.num_parts)


def moved(batch: Data | NodeLoader, trainer: Trainer | None, device: torch.device) -> Any:
    """Move a batch to the device, in the trainer's precision if it is not float32, as in "64-true".

    A graph that needs no change stays the same object, so that cached results stay valid.
    """
    if isinstance(batch, NodeLoader):
        return batch
    with torch.inference_mode(False):  # training uses the same tensors after a test or validation
        if trainer and trainer.precision in ("64-true", "16-true", "bf16-true"):
            dtype = trainer.precision_plugin.convert_input(torch.empty(0)).dtype
            if batch.x.dtype != dtype:
                batch = batch.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
        return batch if batch.x.device == device else batch.to(device)


def is_divided(trainer: Trainer) -> bool:
    """Return True if the trainer's processes divide one graph."""
    return isinstance(getattr(trainer, "strategy", None), HaloStrategy)


def is_drawn(data: Data) -> bool:
    """Return True for one of many batches of a graph: seed nodes with neighbours, some of its parts or its links."""
    return is_sampled(data) or "parts" in data or "input_id" in data


def _graph_of(task: Task) -> Data:
    """Return the graph from which batches are sampled, with the keys of `Task` only."""
    graph: Data = task.train[0]
    data = Data(graph.x, graph.edge_index, graph.edge_attr, graph.y)
    of_pairs = [key for key in ("edge_label_index", "edge_label_attr") if key in graph]
    for key in (*MASKS, *(of_pairs if task.objective.has_pairs else [])):
        data[key] = graph[key]
    return data


def _steps(task: Task, num_pairs: int, seed: int) -> Shares:
    """Return the training pairs of each step, of all processes: a share is taken when negative pairs are drawn."""
    return Shares(range(int(task.train[0].train_mask.sum())), num_pairs, 0, 1, _order_seed(seed))


def _shares(kind: str, items: Sequence[Any], batch_size: int, trainer: Trainer | None, seed: int) -> Shares:
    """Return this process's share of the graphs or parts of each step."""
    rank, world = _place(trainer)
    if batch_size < world:
        raise ValueError(
            f"batch_size is {batch_size} {kind}s in a step over all processes, but there are {world} "
            f"processes, and each needs one. Use batch_size={world} or more, or start fewer processes."
        )
    return Shares(items, batch_size, rank, world, _order_seed(seed))


def _order_seed(seed: int) -> int:
    return int(np.random.SeedSequence(seed).generate_state(1)[0])  # spread out: the sampler adds the epoch


def _device(trainer: Trainer | None) -> torch.device | None:
    return trainer.strategy.root_device if trainer else None


def _place(trainer: Trainer | None) -> tuple[int, int]:
    return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)


def _without(number: int, out: SamplerOutput) -> SamplerOutput:
    """Remove the only seed node of a batch if it is the padding entry, which has this number."""
    seeds, time = out.metadata
    if seeds.tolist() == [number]:
        out.metadata = seeds[:0], time
    return out


def _padding_graph(data: Data, objective: Objective) -> Data:
    """Return a one-node graph with unknown labels, or without labelled pairs, that pads a rank's share."""
    of_pairs = ("y", "edge_label_attr", *MASKS) if "edge_label_index" in data else ()
    padding = copy.copy(data)
    for key in ("edge_label_index", *of_pairs):
        padding.pop(key, None)
    padding = padding.subgraph(torch.tensor([0]))
    for key in of_pairs:
        if key in data:
            padding[key] = data[key][:0]
    if of_pairs:
        padding.edge_label_index = data.edge_label_index[:, :0]
    else:
        padding.y = objective.unknown(data.y[:1])  # label of the node or the graph
    return padding
