"""Neighbour sampling in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from ..graph.edges import Edges


class TorchSampler(BaseSampler):  # type: ignore[misc]
    """Uniform neighbour sampling (Hamilton et al., 2017) that needs neither pyg-lib nor torch_sparse.

    From each node of a hop, up to `num_neighbors[hop]` of its in-edges are drawn without replacement, each set with the
    same probability; -1 takes all. PyG's `NodeLoader(data, node_sampler=...)` makes batches of it, with what
    `NeighborLoader` gives: seeds first, then the nodes of each hop, and `num_sampled_nodes` and `num_sampled_edges`.
    Draws come from torch's generator, so that a loader's worker has its own.

    Args:
        edge_index: `[2, E]`, src and dst.
        num_nodes: N.
        num_neighbors: how many in-edges to draw in each hop.

    Raises:
        ValueError: if there is no hop, or a number is below -1.

    Cost: O(E) once for the order by dst and 8 bytes a node; a batch costs O(edges drawn).

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
        self._local = torch.full((num_nodes,), -1)  # the place in a batch of each node that is in it

    def of(self, num_neighbors: Sequence[int]) -> TorchSampler:
        """Other numbers on the same graph, whose order by dst is shared."""
        other = copy.copy(self)
        other.num_neighbors = _numbers(num_neighbors)
        return other

    @property
    def edge_permutation(self) -> Tensor | None:
        """The place in the caller's order of each edge that is drawn from."""
        return self.perm

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """The nodes that the seeds reach by edges drawn anew, and those edges; see `TorchSampler`."""
        frontier = index.node.long()
        nodes, sources, targets, drawn = [frontier], [], [], []
        self._local[frontier] = torch.arange(frontier.numel())
        first, count = 0, frontier.numel()  # the place of the frontier's first node, and how many nodes there are
        try:
            for num in self.num_neighbors:
                place, target = draw(self.rowptr, frontier, num)
                source = self.src[place].long()
                frontier = source[self._local[source] < 0].unique()
                self._local[frontier] = torch.arange(count, count + frontier.numel())
                sources.append(source)
                targets.append(target + first)
                drawn.append(place)
                nodes.append(frontier)
                first, count = count, count + frontier.numel()
            node = torch.cat(nodes)
            row = self._local[torch.cat(sources)]
        finally:
            for some in nodes:
                self._local[some] = -1
        return SamplerOutput(
            node=node,
            row=row,
            col=torch.cat(targets),
            edge=torch.cat(drawn),
            num_sampled_nodes=[some.numel() for some in nodes],
            num_sampled_edges=[some.numel() for some in drawn],
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> SamplerOutput:
        """Not there: raises NotImplementedError."""
        raise NotImplementedError("Edges are not sampled: use PyG's NeighborSampler, with pyg-lib or torch_sparse.")


def _numbers(num_neighbors: Sequence[int]) -> list[int]:
    if not num_neighbors or min(num_neighbors) < -1:
        raise ValueError(
            f"num_neighbors is {list(num_neighbors)}, expected a number for each hop, or -1 for all neighbours."
        )
    return list(num_neighbors)


def draw(rowptr: Tensor, nodes: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Up to `num` in-edges of each node, or all for -1: their places in the order by dst, and whose they are.

    Floyd's algorithm (Bentley and Floyd, CACM 1987), for all nodes at once: of d edges, the t-th of n draws is one of
    the first d - n + t, or the last of them where that one was drawn before.

    Example:
        >>> place, whose = draw(torch.tensor([0, 3, 4]), torch.tensor([1, 0]), 2)
        >>> whose.tolist(), place[0].item(), len(set(place.tolist()))
        ([0, 1, 1], 3, 3)
    """
    begin = rowptr[nodes]
    degree = rowptr[nodes + 1] - begin
    size = degree if num < 0 else degree.clamp(max=num)
    whose = torch.repeat_interleave(size)
    number = torch.arange(whose.numel()) - (size.cumsum(0) - size)[whose]  # of an edge among its node's
    if num >= 0:
        many = (degree > num).nonzero().view(-1)
        chosen = torch.empty(many.numel(), num, dtype=torch.long)
        for t in range(num):
            last = degree[many] - num + t
            one = (torch.rand(many.numel(), dtype=torch.float64) * (last + 1)).long()
            chosen[:, t] = torch.where((chosen[:, :t] == one[:, None]).any(1), last, one)
        number[(degree > num)[whose]] = chosen.view(-1)
    return begin[whose] + number, whose
