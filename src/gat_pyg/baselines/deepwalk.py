"""DeepWalk: nodes embedded by the company they keep on random walks, then classified (Perozzi et al., KDD 2014)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.utils import sort_edge_index


class DeepWalk(nn.Module):
    r"""Skip-gram on uniform random walks, and logistic regression on the embeddings z.

    For the nodes v and u at places of one walk that are at most `context_size` apart, and nodes r drawn uniformly,

    .. math::
        - \log \sigma(z_v^T c_u) - n \log \sigma(-z_v^T c_r)

    is made small on average, with vectors c of their own for the contexts. The original has a tree of classes
    (hierarchical softmax) in place of the n negative samples, and stochastic gradients; here Adam takes the walks that
    start at `batch_size` nodes at a time, with a learning rate that falls to zero, and 200 nodes r are shared among
    them. Length of walks, contexts and width are the original's; its 80 walks from each node are fewer. The strength of
    the regression's L2 is left open there: here, the one that does best on the validation nodes is taken.

    PyG's `Node2Vec` is the same with biased walks, and needs pyg-lib to walk.

    Args:
        out_channels: K, the number of classes.
        num_nodes: N, of the graph that `fit` will see; only loading a state dict asks for it.
        embedding_dim: the width of z.
        walk_length: the number of nodes in a walk.
        context_size: how far apart two nodes of a walk may be.
        walks_per_node: the number of walks that start at each node.
        num_negative_samples: n, the weight of a pair that is not on a walk.
        batch_size: the number of walks in a step.
        lr: the learning rate of the first step.
        strengths: the inverse strengths of L2 to choose from.

    Example:
        >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]]))
        >>> ring.y, ring.num_nodes = torch.tensor([0, 0, 1, 1]), 4
        >>> ring.train_mask, ring.val_mask = torch.tensor([[True, False, True, False], [False, True, False, True]])
        >>> model = DeepWalk(out_channels=2, embedding_dim=8)
        >>> model.fit(ring)
        >>> model(None).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        out_channels: int,
        num_nodes: int = 0,
        embedding_dim: int = 128,
        walk_length: int = 40,
        context_size: int = 10,
        walks_per_node: int = 10,
        num_negative_samples: int = 5,
        batch_size: int = 128,
        lr: float = 0.01,
        strengths: Sequence[float] = (0.01, 0.1, 1.0, 10.0),
    ) -> None:
        super().__init__()
        self.walk_length = walk_length
        self.context_size = context_size
        self.walks_per_node = walks_per_node
        self.num_negative_samples = num_negative_samples
        self.batch_size = batch_size
        self.lr = lr
        self.strengths = strengths
        self.z = nn.Parameter(torch.zeros(num_nodes, embedding_dim))
        self.lin = nn.Linear(embedding_dim, out_channels)

    def fit(self, data: Data) -> None:
        """Embed the nodes, then classify them by the training nodes.

        Raises:
            ValueError: if nodes have many labels.
            ImportError: if scikit-learn is not installed.
        """
        if data.y.dim() != 1:
            raise ValueError(f"y has shape {tuple(data.y.shape)}, expected (N,): DeepWalk gives each node one class.")
        with torch.inference_mode(False), torch.enable_grad():
            self._embed(data.edge_index, int(data.num_nodes or 0))
        self._classify(data)

    def forward(self, x: Tensor | None) -> Tensor:
        """The logits `[N, K]` of the nodes that were embedded; x is not looked at."""
        out: Tensor = self.lin(self.z)
        return out

    def _embed(self, edge_index: Tensor, N: int) -> None:
        start = torch.empty(2, N, self.z.size(1), device=edge_index.device)
        z, c = (nn.Parameter(vectors.uniform_(-0.5, 0.5) / len(vectors[0]) ** 0.5) for vectors in start)
        optimizer = torch.optim.Adam([z, c], lr=self.lr)
        batches = [b for _ in range(self.walks_per_node) for b in torch.randperm(N).split(self.batch_size)]
        place = torch.arange(self.walk_length)
        apart = (place - place[:, None]).abs()
        near = ((apart > 0) & (apart <= self.context_size)).to(z.device)  # [T, T]
        walk = Walks(edge_index, N)
        for step, nodes in enumerate(batches):
            optimizer.param_groups[0]["lr"] = self.lr * (1 - step / len(batches))
            walks = walk(nodes.to(z.device), self.walk_length)  # [B, T]
            ends, others = z[walks], c[torch.randint(N, (_SHARED,), device=z.device)]
            on = F.logsigmoid(ends @ c[walks].mT)[:, near].mean()
            off = F.logsigmoid(-ends @ others.t()).mean()
            optimizer.zero_grad()
            (-on - self.num_negative_samples * off).backward()
            optimizer.step()
        self.z = nn.Parameter(z.detach())

    @torch.no_grad()
    def _classify(self, data: Data) -> None:
        try:
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise ImportError(
                "DeepWalk classifies by scikit-learn's logistic regression. pip install 'gat_pyg[baselines]'."
            ) from error
        z, y = self.z.cpu().numpy(), data.y.cpu().numpy()
        train, val = data.train_mask.cpu().numpy(), data.val_mask.cpu().numpy()
        tried = [LogisticRegression(C=C, max_iter=1000).fit(z[train], y[train]) for C in self.strengths]
        best = max(tried, key=lambda found: float(found.score(z[val], y[val])))
        weight, bias = (torch.from_numpy(value).to(self.z) for value in (best.coef_, best.intercept_))
        if len(bias) == 1:  # of two classes, the second's
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        self.lin.weight.zero_()[best.classes_] = weight
        self.lin.bias.fill_(-1e9)[best.classes_] = bias  # a class without training nodes is never told


class Walks:
    """Uniform random walks on a graph with N nodes; a walk that cannot go on stays where it is.

    Example:
        >>> walk = Walks(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> walk(torch.tensor([0, 2]), 4)
        tensor([[0, 1, 2, 2],
                [2, 2, 2, 2]])
    """

    def __init__(self, edge_index: Tensor, N: int) -> None:
        src, dst = sort_edge_index(edge_index, num_nodes=N)
        stay = src.new_zeros(1)  # where there is no edge at all
        self.rowptr, self.col = index2ptr(src, N), torch.cat([dst, stay])

    def __call__(self, nodes: Tensor, walk_length: int) -> Tensor:
        """The walks `[B, walk_length]` that start at nodes `[B]`; torch's generator draws the steps."""
        walk = [nodes]
        for _ in range(walk_length - 1):
            first, degree = self.rowptr[walk[-1]], self.rowptr.diff()[walk[-1]]
            step = self.col[first + (torch.rand(nodes.shape, device=nodes.device) * degree).long()]
            walk.append(torch.where(degree > 0, step, walk[-1]))
        return torch.stack(walk, 1)


_SHARED = 200  # negative samples in a step
