"""Random walks on a graph, and the skip-gram loss of the nodes that meet on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.utils import sort_edge_index


class Walks:
    """Uniform random walks on a graph with N nodes; a walk stays at a node without out-edges.

    Unlike PyG's walks, these need neither pyg-lib nor torch_cluster. The steps come from torch's global generator.

    Example:
        >>> walk = Walks(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> walk(torch.tensor([0, 2]), walk_length=4)
        tensor([[0, 1, 2, 2],
                [2, 2, 2, 2]])
    """

    def __init__(self, edge_index: Tensor, N: int) -> None:
        src, dst = sort_edge_index(edge_index, num_nodes=N)
        none = src.new_zeros(1)  # padding that is read, but not used, at the end of the edges
        self.rowptr, self.col = index2ptr(src, N), torch.cat([dst, none])

    def __call__(self, nodes: Tensor, walk_length: int) -> Tensor:
        """Return walks `[B, walk_length]` that start at nodes `[B]`."""
        walk = [nodes]
        for _ in range(walk_length - 1):
            first, end = self.rowptr[walk[-1]], self.rowptr[walk[-1] + 1]
            step = self.col[first + (torch.rand(nodes.shape, device=nodes.device) * (end - first)).long()]
            walk.append(torch.where(end > first, step, walk[-1]))
        return torch.stack(walk, 1)


def skip_gram_loss(z: Tensor, c: Tensor, walks: Tensor, context_size: int, num_negative_samples: int) -> Tensor:
    r"""Return the skip-gram loss of embeddings z for nodes that co-occur on walks (Mikolov et al., NIPS 2013).

    .. math::
        - \log \sigma(z_v^T c_u) - n \, \mathrm{E}_r \log \sigma(-z_v^T c_r)

    averaged over all pairs of positions in one walk that are at most `context_size` apart, with the nodes v and u. E is
    the mean over 200 nodes r, drawn uniformly by torch's global generator and shared by all pairs.

    Args:
        z: embeddings `[N, D]`.
        c: vectors of the same nodes as contexts `[N, D]`.
        walks: nodes `[B, T]`.
        context_size: the largest distance of v and u on the walk; v may be u if the walk returns.
        num_negative_samples: n, the weight of the second term.

    Example:
        >>> zeros = torch.zeros(3, 8)
        >>> skip_gram_loss(zeros, zeros, torch.tensor([[0, 1, 2]]), context_size=1, num_negative_samples=1) / 2
        tensor(0.6931)
    """
    ends = F.embedding(walks, z)  # [B, T, D]
    place = torch.arange(walks.size(1), device=z.device)
    apart = (place - place[:, None]).abs()
    near = (apart > 0) & (apart <= context_size)  # [T, T]
    others = F.embedding(torch.randint(c.size(0), (_SHARED,), device=z.device), c)
    meet = F.logsigmoid(ends @ F.embedding(walks, c).mT)[:, near].mean()
    miss = F.logsigmoid(-ends @ others.t()).mean()
    return -meet - num_negative_samples * miss


_SHARED = 200  # negative samples of all pairs together
