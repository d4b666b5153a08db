"""Batches of labelled pairs of nodes with sampled neighbours, in which no edge is a link to be predicted."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, SamplerOutput
from torch_geometric.utils import is_undirected

from ..data.links import seeded_draws
from ..tasks.negatives import non_links
from ..tasks.objective import Objective
from .shares import Late, Shares


class PairSampler(BaseSampler):  # type: ignore[misc]
    """The labelled pairs of a training step with neighbours of their nodes, for PyG's `LinkLoader`.

    In link prediction, as many negative pairs join the links of a step. The links of a step, of all processes, are no
    message-passing edges in its subgraphs, and in an undirected graph neither are their reverse edges: the model would
    see what it is to predict. They are removed after neighbours were drawn, so a node can have fewer neighbours.

    The negative pairs depend only on the seed, the epoch and the links of the step, and so are the same in all
    processes, and each takes its share. The neighbours depend also on the rank. Worker processes change neither.

    Args:
        sampler: draws the neighbours of the nodes of pairs.
        data: the graph, with labelled pairs.
        objective: selects the pairs of a step, by `example`.
        steps: the order of the training pairs.
        place: the rank and the number of processes.
    """

    def __init__(
        self, sampler: BaseSampler, data: Data, objective: Objective, steps: Shares, place: tuple[int, int]
    ) -> None:
        self.sampler, self.objective, self.steps = sampler, objective, steps
        self.data = copy.copy(data)
        self.data.share = place
        self.hides = objective.draws_pairs
        if self.hides:
            non_links(data)  # sorts the known links before a worker process starts
            order = self.edge_permutation
            edges = data.edge_index if order is None else data.edge_index.index_select(1, order)
            links = data.edge_label_index[:, data.train_mask]
            self._of_edges, self._of_pairs, self._num_links = _link_ids(edges, links, data.x.size(0))

    @property
    def edge_permutation(self) -> Tensor | None:
        """The index in the caller's edge order of each edge of the sampler."""
        permutation: Tensor | None = self.sampler.edge_permutation
        return permutation

    def sample_from_nodes(self, index: Any, **kwargs: Any) -> SamplerOutput:
        """Draw neighbours of nodes."""
        return self.sampler.sample_from_nodes(index, **kwargs)

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: None = None) -> SamplerOutput:
        """Draw neighbours of the nodes of this process's share of the step with these training pairs."""
        step = copy.copy(self.data)
        step.input_id = index.input_id
        rank, world = self.data.share
        words = [self.steps.seed, self.steps.epoch, int(index.input_id[0])]
        of_python, of_rank = np.random.SeedSequence(words), np.random.SeedSequence([*words, rank])
        with seeded_draws(int(of_rank.generate_state(2)[1]), int(of_python.generate_state(1)[0])):
            step = self.objective.example(step, "train")
            pairs, y = step.edge_label_index, step.y
            src, dst = pairs if y.numel() else (index.row[:1], index.col[:1])  # no process has a graph without nodes
            out = self.sampler.sample_from_edges(EdgeSamplerInput(index.input_id, src, dst))
        ends = out.metadata[1][:, : y.size(0)]
        ids = index.input_id if self.hides else index.input_id[rank::world]
        out.metadata = ids, ends, y, None
        return self._without_links(out, index.input_id) if self.hides else out

    def _without_links(self, out: SamplerOutput, ids: Tensor) -> SamplerOutput:
        """Remove the edges that are one of the training pairs with these ids."""
        hidden = torch.zeros(self._num_links, dtype=torch.bool).index_fill_(0, self._of_pairs[ids], True)
        visible = ~hidden[self._of_edges[out.edge]]
        if out.num_sampled_edges is not None:
            out.num_sampled_edges = [int(hop.sum()) for hop in visible.split(out.num_sampled_edges)]
        out.row, out.col, out.edge = out.row[visible], out.col[visible], out.edge[visible]
        return out


def _link_ids(edge_index: Tensor, pairs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, int]:
    """Return an id of each edge `[2, E]` and each pair `[2, L]`, and the number of ids.

    Those with the same ends have the same id, in an undirected graph in either direction.

    >>> _link_ids(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.tensor([[0, 2], [1, 1]]), 3)
    (tensor([0, 0, 1, 1]), tensor([0, 1]), 2)
    """
    ends = torch.cat([edge_index, pairs], 1)
    src, dst = ends.sort(0).values if is_undirected(edge_index, num_nodes=num_nodes) else ends
    keys, ids = (src * num_nodes + dst).unique(return_inverse=True)
    of_edges, of_pairs = ids.split([edge_index.size(1), pairs.size(1)])
    return of_edges, of_pairs, keys.numel()


class PairLoader(Late, LinkLoader):  # type: ignore[misc]
    """Labelled pairs of nodes with neighbours drawn for them."""


def with_labels(batch: Data, features: Tensor | None = None) -> Data:
    """Return a batch of `LinkLoader` with the labels of its pairs as y, and their rows of `features`."""
    batch.y = batch.edge_label
    del batch.edge_label
    if features is not None:
        batch.edge_label_attr = features[batch.input_id]
    return batch
