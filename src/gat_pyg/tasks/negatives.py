"""Negative pairs for link prediction: two nodes without a known link, drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils._negative_sampling import edge_index_to_vector, sample, vector_to_edge_index

from ..graph.remembered import remembered
from ..graph.subgraph import mask_to_index

DENSE = 10_000  # nodes up to which a mask of all pairs finds the negative ones, faster than searching the known ones
TRIES = 3  # as in PyG


class NonLinks:
    """The pairs of two different nodes that are no known link.

    `draw` returns what PyG's `negative_sampling` returns in the same state of Python's generator, but the known links
    are sorted once, not in each draw. PyG counts a repeated link each time; if that gives as many as there are pairs,
    it draws none, and each link is counted once here.

    Args:
        known: the known links `[2, E]`.
        num_nodes: N.

    Cost: N^2 bytes up to `DENSE` nodes, else 8 E bytes; a draw of n pairs takes O(n log E) time.

    Example:
        >>> NonLinks(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3).draw(9)  # the other direction of each
        tensor([[0, 1, 2],
                [2, 0, 1]])
    """

    def __init__(self, known: Tensor, num_nodes: int) -> None:
        self.size, self.device = (num_nodes, num_nodes), known.device
        ids, self.population = edge_index_to_vector(known.long(), self.size, bipartite=False)
        distinct = ids.unique()
        self.num_known = ids.numel() if ids.numel() < self.population else distinct.numel()
        self.free: Tensor | None = None  # a mask of all pairs
        if num_nodes <= DENSE:
            self.free = distinct.new_ones(self.population, dtype=torch.bool).index_fill_(0, distinct, False)
        else:
            self.known = torch.cat([distinct.cpu(), torch.tensor([self.population])])

    def draw(self, num: int) -> Tensor:
        """Return up to `num` of the pairs, each at most once, `[2, n]`; fewer only if there are hardly more."""
        if num == 0 or self.num_known >= self.population:
            return torch.empty(2, 0, dtype=torch.long, device=self.device)
        drawn = torch.empty(0, dtype=torch.long, device=self.device)
        size = int(1.1 * num / (1.0 - self.num_known / self.population))
        for _ in range(TRIES):
            ids = sample(self.population, size, "cpu" if self.free is None else self.device)
            ids = ids[self._is_free(ids)].to(self.device)
            drawn = torch.cat([drawn, ids[~torch.isin(ids, drawn)]])[:num]
            if drawn.numel() == num:
                break
        pairs: Tensor = vector_to_edge_index(drawn, self.size, bipartite=False)
        return pairs

    def _is_free(self, ids: Tensor) -> Tensor:
        if self.free is not None:
            return self.free[ids]
        return self.known[torch.searchsorted(self.known, ids)] != ids


def non_links(data: Data) -> NonLinks:
    """Return the pairs that are neither message-passing edges nor training links in either direction, cached."""
    return _non_links(data.edge_index, data.edge_label_index, data.train_mask, data.x.size(0))


@remembered
def _non_links(edge_index: Tensor, pairs: Tensor, train_mask: Tensor, num_nodes: int) -> NonLinks:
    links = pairs.index_select(1, mask_to_index(train_mask))
    return NonLinks(torch.cat([edge_index, links, links.flip(0)], 1), num_nodes)
