"""Negative pairs for link prediction: two nodes without a known link, drawn at random."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils._negative_sampling import edge_index_to_vector, sample, vector_to_edge_index

from ..graph.remembered import remembered
from ..graph.subgraph import mask_to_index

DENSE = 10_000  # nodes up to which a mask of all pairs finds the negative ones, faster than searching the known ones
TRIES = 3  # PyG's number
NEGATIVES = ("auto", "source", "any")
ROUNDS = 20  # of the pairs of a source, most of whose pairs may be links


class NonLinks:
    """The pairs of two different nodes that are no known link, in a bipartite graph only those of two sides.

    `draw` returns what PyG's `negative_sampling` returns in the same state of Python's generator, but the known links
    are sorted once, not in each draw. PyG counts a repeated link each time; if that gives as many as there are pairs,
    it draws none, and each link is counted once here.

    Args:
        known: the known links `[2, E]`.
        num_nodes: number of nodes N.
        sides: sides of a bipartite graph, as from `two_sides`; the pairs are then from side 0 to side 1.

    `beside` draws for each of some links a pair with the same source, such as a user and another item. A score over
    such pairs ranks the items of each user, and does not depend on which users are active.

    Cost: N^2 bytes up to `DENSE` nodes, else 8 E bytes; a draw of n pairs takes O(n log E) time.

    Example:
        >>> others = NonLinks(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
        >>> others.draw(9)  # the other direction of each
        tensor([[0, 1, 2],
                [2, 0, 1]])
        >>> others.beside(torch.tensor([[2], [0]]), "source")[0]
        tensor([[2],
                [1]])
    """

    def __init__(self, known: Tensor, num_nodes: int, sides: Tensor | None = None) -> None:
        self.size, self.device, self.sides = (num_nodes, num_nodes), known.device, None
        if sides is not None:
            self.sides = src, dst = (sides == 0).nonzero()[:, 0], (sides == 1).nonzero()[:, 0]
            self.size = src.numel(), dst.numel()
            number = torch.empty_like(sides)  # numbers of the nodes within their side
            number[src], number[dst] = (torch.arange(size, device=sides.device) for size in self.size)
            self.side, self.number = sides, number
            known = self._numbered(known)
        ids, self.population = edge_index_to_vector(known.long(), self.size, bipartite=sides is not None)
        distinct = ids.unique()
        self.num_known = distinct.numel()
        if sides is None and ids.numel() < self.population:
            self.num_known = ids.numel()  # each repeated link counts, as in PyG
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
            device = "cpu" if self.free is None else self.device
            if self.sides is not None and size >= self.population:  # PyG would draw all in their order
                ids = torch.tensor(random.sample(range(self.population), self.population), device=device)
            else:
                ids = sample(self.population, size, device)
            ids = ids[self._is_free(ids)].to(self.device)
            drawn = torch.cat([drawn, ids[~torch.isin(ids, drawn)]])[:num]
            if drawn.numel() == num:
                break
        return self._pairs(drawn)

    def beside(self, links: Tensor, negatives: str = "auto") -> tuple[Tensor, Tensor]:
        """Return as many pairs as `links` [2, L], each at most once, and the indices of their links; fewer as `draw`.

        Args:
            links: the links beside which they stand.
            negatives: "source": each has the source of its link, in a bipartite graph the end of side 0; "any": as
                `draw`; "auto": "source" in a bipartite graph.
        """
        if negatives == "any" or (negatives == "auto" and self.sides is None):
            pairs = self.draw(links.size(1))
            return pairs, torch.arange(pairs.size(1)) * links.size(1) // max(pairs.size(1), 1)
        device, width = "cpu" if self.free is None else self.device, self.size[1] - (self.sides is None)
        src = (links if self.sides is None else self._numbered(links))[0]
        first, draw = src.to(device) * width, torch.Generator().manual_seed(random.getrandbits(63))
        ids, todo = first.clone(), torch.arange(len(first), device=device)
        for _ in range(ROUNDS):
            ids[todo] = first[todo] + torch.randint(width, (len(todo),), generator=draw).to(device)
            order = ids.argsort(stable=True)
            is_wrong = ~self._is_free(ids)
            is_wrong[order[1:]] |= ids[order].diff() == 0
            todo = is_wrong.nonzero()[:, 0]
            if not len(todo):
                break
        kept = (~is_wrong).nonzero()[:, 0]
        return self._pairs(ids[kept].to(self.device)), kept.cpu()

    def _numbered(self, links: Tensor) -> Tensor:
        """Return the numbers of the ends of links within their sides, that of side 0 first."""
        return self.number[torch.where(self.side[links[0]] == 0, links, links.flip(0))]

    def _pairs(self, ids: Tensor) -> Tensor:
        pairs: Tensor = vector_to_edge_index(ids, self.size, bipartite=self.sides is not None)
        return pairs if self.sides is None else torch.stack([self.sides[0][pairs[0]], self.sides[1][pairs[1]]])

    def _is_free(self, ids: Tensor) -> Tensor:
        if self.free is not None:
            return self.free[ids]
        return self.known[torch.searchsorted(self.known, ids)] != ids


def non_links(data: Data) -> NonLinks:
    """Return the pairs that are neither message-passing edges nor training links in either direction, cached."""
    return _non_links(data.edge_index, data.edge_label_index, data.y, data.train_mask, data.x.size(0))


@remembered
def _non_links(edge_index: Tensor, pairs: Tensor, y: Tensor, train_mask: Tensor, num_nodes: int) -> NonLinks:
    links = pairs.index_select(1, mask_to_index(train_mask))
    sides = _sides(edge_index, pairs, y, num_nodes)
    return NonLinks(torch.cat([edge_index, links, links.flip(0)], 1), num_nodes, directed(sides, links))


def sides_of(data: Data) -> Tensor | None:
    """Return the sides of a graph's nodes by `two_sides` of its edges and the links of all splits, cached."""
    sides: Tensor | None = _sides(data.edge_index, data.edge_label_index, data.y, data.x.size(0))
    return sides


@remembered
def _sides(edge_index: Tensor, pairs: Tensor, y: Tensor, num_nodes: int) -> Tensor | None:
    sides = two_sides(torch.cat([edge_index, pairs[:, y == 1]], 1).cpu(), num_nodes)  # once, in many small steps
    return None if sides is None else sides.to(edge_index.device)


def directed(sides: Tensor | None, links: Tensor) -> Tensor | None:
    """Return the sides, swapped if most of the links `[2, E]` begin at side 1, so that they begin at side 0."""
    is_swapped = sides is not None and int((sides[links[0]] == 1).sum()) * 2 > links.size(1)
    return torch.where(sides < 0, sides, 1 - sides) if is_swapped and sides is not None else sides


def two_sides(links: Tensor, num_nodes: int) -> Tensor | None:
    """Return the side of each node `[N]` of a bipartite graph, 0 or 1, or -1 without a link; None for another graph.

    Every link joins the two sides, such as users and items. Trees and grids have two such sides too, although their
    nodes are of one kind. So a graph is bipartite here only if, in addition, all ids of side 0 are below those of
    side 1, or there are twice as many links as nodes. A graph with all links between its sides is not.

    Args:
        links: `[2, E]`, in one direction or both.
        num_nodes: number of nodes N.

    Example:
        >>> two_sides(torch.tensor([[0, 0, 1], [2, 3, 3]]), 5)
        tensor([ 0,  0,  1,  1, -1])
    """
    N, (src, dst) = num_nodes, links.long()
    if not links.numel():
        return None
    linked = torch.zeros(N, dtype=torch.bool, device=links.device).index_fill_(0, torch.cat([src, dst]), True)
    # Connected components of the graph in which each node is there twice, once on each side, and links change the side
    ends = torch.cat([src, src + N]), torch.cat([dst + N, dst])
    component = torch.arange(2 * N, device=links.device)  # the least id in it, found by hooking and pointer jumping
    while True:
        roots = [component[end] for end in ends]
        least, before = torch.minimum(*roots), component
        for index in (*ends, *roots):
            component = component.scatter_reduce(0, index, least, "amin")
        component = component[component]
        first, second = component.view(2, N)
        if (first == second)[linked].any():
            return None  # a node is on both sides
        if torch.equal(component, before):
            break
    sides = torch.where(linked, (first > second).long(), -1)  # the side with the least id in each component is 0
    ids = [(sides == side).nonzero()[:, 0] for side in (0, 1)]
    num_links = (torch.minimum(src, dst) * N + torch.maximum(src, dst)).unique().numel()
    in_order, many = bool(ids[0].max() < ids[1].min()), num_links >= 2 * int(linked.sum())
    return sides if (in_order or many) and num_links < len(ids[0]) * len(ids[1]) else None
