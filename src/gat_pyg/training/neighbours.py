"""Neighbour sampling in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample

from ..graph.edges import Edges


class TorchSampler(BaseSampler):  # type: ignore[misc]
    """Uniform neighbour sampling (Hamilton et al., 2017) that needs neither pyg-lib nor torch_sparse.

    For each node of a hop, up to `num_neighbors[hop]` of its in-edges are drawn without replacement, each set with the
    same probability; -1 takes all. PyG's `NodeLoader(data, node_sampler=...)` turns the samples into batches like
    those of `NeighborLoader`: the seed nodes first, then the nodes of each hop, with `num_sampled_nodes` and
    `num_sampled_edges`. `LinkLoader(data, link_sampler=...)` does so for pairs of nodes, like `LinkNeighborLoader`.
    Random numbers come from torch's generator; every worker of a loader has its own.

    Args:
        edge_index: `[2, E]`, src and dst.
        num_nodes: number of nodes N.
        num_neighbors: number of in-edges to sample in each hop.

    Raises:
        ValueError: if there is no hop, or a number is below -1.

    Cost: O(E) once for sorting by dst, and 8 bytes per node; a batch costs O(edges drawn).

    Example:
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.loader import NodeLoader
        >>> data = Data(torch.eye(4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = NodeLoader(data, TorchSampler(data.edge_index, 4, [-1, -1]), torch.tensor([2]), batch_size=1)
        >>> next(iter(loader)).n_id.tolist()
        [2, 1, 0]
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, num_neighbors: Sequence[int]) -> None:
        self.num_neighbors = _numbers(num_neighbors)
        edges = Edges.from_index(edge_index, num_nodes, num_nodes)
        self.rowptr, self.src, self.perm = edges.rowptr, edges.src, edges.perm
        self._local = torch.full((num_nodes,), -1)  # the index of each node in the current batch, -1 outside

    def of(self, num_neighbors: Sequence[int]) -> TorchSampler:
        """Return a sampler with other numbers that shares the sorted graph."""
        other = copy.copy(self)
        other.num_neighbors = _numbers(num_neighbors)
        return other

    @property
    def edge_permutation(self) -> Tensor | None:
        """The index in the caller's edge order of each sorted edge."""
        return self.perm

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """Draw edges for the seed nodes, and return the nodes reached and the edges; see `TorchSampler`."""
        frontier = index.node.long()
        nodes, sources, targets, edges = [frontier], [], [], []
        self._local[frontier] = torch.arange(frontier.numel())
        first, count = 0, frontier.numel()  # the index of the frontier's first node, and the number of nodes so far
        try:
            for num in self.num_neighbors:
                edge, target = draw(self.rowptr, frontier, num)
                source = self.src[edge].long()
                frontier = source[self._local[source] < 0].unique()
                self._local[frontier] = torch.arange(count, count + frontier.numel())
                sources.append(source)
                targets.append(target + first)
                edges.append(edge)
                nodes.append(frontier)
                first, count = count, count + frontier.numel()
            node = torch.cat(nodes)
            row = self._local[torch.cat(sources)]
        finally:
            for hop in nodes:
                self._local[hop] = -1
        return SamplerOutput(
            node=node,
            row=row,
            col=torch.cat(targets),
            edge=torch.cat(edges),
            num_sampled_nodes=[hop.numel() for hop in nodes],
            num_sampled_edges=[hop.numel() for hop in edges],
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> SamplerOutput:
        """Draw edges for the ends of the seed pairs, as PyG's `LinkLoader` needs it; see `TorchSampler`."""

        def sample(seed: Tensor, seed_time: Tensor | None) -> SamplerOutput:
            return self.sample_from_nodes(NodeSamplerInput(None, seed))

        return edge_sample(index, sample, self._local.numel(), disjoint=False, neg_sampling=neg_sampling)


def _numbers(num_neighbors: Sequence[int]) -> list[int]:
    if not num_neighbors or min(num_neighbors) < -1:
        raise ValueError(
            f"num_neighbors is {list(num_neighbors)}, expected a number for each hop, or -1 for all neighbours."
        )
    return list(num_neighbors)


def draw(rowptr: Tensor, nodes: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Draw up to `num` in-edges of each node, or take all for -1.

    Floyd's algorithm (Bentley and Floyd, CACM 1987), for all nodes at once: the t-th of n draws among d edges is one
    of the first d - n + t, or, if that one was drawn before, the last of them.

    Args:
        rowptr: `[N + 1]`, the first in-edge of each node, with edges sorted by dst.
        nodes: `[M]`.
        num: number of edges to sample.

    Returns:
        The indices of the edges, sorted by dst, and for each the index of its dst in `nodes`.

    Example:
        >>> edge, target = draw(torch.tensor([0, 3, 4]), torch.tensor([1, 0]), 2)
        >>> target.tolist(), edge[0].item(), len(set(edge.tolist()))
        ([0, 1, 1], 3, 3)
    """
    begin = rowptr[nodes]
    degree = rowptr[nodes + 1] - begin
    size = degree if num < 0 else degree.clamp(max=num)
    target = torch.repeat_interleave(size)
    offset = torch.arange(target.numel()) - (size.cumsum(0) - size)[target]  # position among the edges of its node
    if num >= 0:
        many = (degree > num).nonzero().view(-1)
        sample = torch.empty(many.numel(), num, dtype=torch.long)
        for t in range(num):
            last = degree[many] - num + t
            candidate = (torch.rand(many.numel(), dtype=torch.float64) * (last + 1)).long()
            sample[:, t] = torch.where((sample[:, :t] == candidate[:, None]).any(1), last, candidate)
        offset[(degree > num)[target]] = sample.view(-1)
    return begin[target] + offset, target
