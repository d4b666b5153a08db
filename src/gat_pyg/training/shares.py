"""Each rank's share of the graphs of a step, padded so that all ranks take the same number of steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as Loader
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from .signals import keep_working


class Batches:
    """The same batches in every epoch: moved to a device once, so that what is cached with their edges stays valid."""

    def __init__(self, batches: Sequence[Data | NodeLoader]) -> None:
        self._batches = [copy.copy(data) for data in batches]  # the tensors are shared until a batch is moved

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Shares(DistributedSampler[Data]):
    """One process's share of each step: every `world`-th of its graphs, in an order determined by seed and epoch.

    If a step has fewer graphs than ranks, index N (the padding graph) fills in, so that all ranks take the same number
    of steps.

    >>> [list(Shares(range(5), 2, rank, 2, seed=0)) for rank in (0, 1)]
    [[4, 1, 2], [0, 3, 5]]
    """

    def __init__(self, graphs: Sequence[Any], batch_size: int, rank: int, world: int, seed: int) -> None:
        super().__init__(graphs, world, rank, seed=seed)  # type: ignore[arg-type]
        self.num_graphs = len(graphs)
        self.batch_size = batch_size  # size of a step of all processes together
        self.each = -(-batch_size // world)
        self.generator = torch.Generator()  # draws the seeds of a loader's workers
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order and the seeds; Lightning calls this before each."""
        super().set_epoch(epoch)
        self.generator.manual_seed(int(np.random.SeedSequence([self.seed, self.rank, epoch]).generate_state(1)[0]))

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            self.num_graphs, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        ).tolist()
        for start in range(0, self.num_graphs, self.batch_size):
            share = order[start : start + self.batch_size][self.rank :: self.num_replicas]
            size = self.each if start + self.batch_size < self.num_graphs else 1
            yield from [*share, *[self.num_graphs] * (size - len(share))]

    def __len__(self) -> int:
        return self.each * -(-self.num_graphs // self.batch_size)


class Late:
    """A loader that starts its workers with the first batch, since a resumed run sets its epoch just before that."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"worker_init_fn": keep_working})

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()  # type: ignore[misc]


class Drawn(Late, NodeLoader):  # type: ignore[misc]
    """Seed nodes with neighbours drawn for them."""


class Cut(Late, Loader[Any]):  # type: ignore[misc]
    """Some parts of a graph with the edges among them."""
