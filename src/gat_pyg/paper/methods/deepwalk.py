"""DeepWalk: node embeddings by co-occurrence on random walks, then classification (Perozzi et al., KDD 2014)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ._regression import fit_logistic
from ._walks import Walks, skip_gram_loss


class DeepWalk(nn.Module):
    r"""Skip-gram on uniform random walks, and logistic regression on the embeddings z.

    The loss for nodes v and u at most `context_size` apart on a walk, and uniformly drawn nodes r, is

    .. math::
        - \log \sigma(z_v^T c_u) - n \log \sigma(-z_v^T c_r)

    with separate vectors c for the contexts. The original has a hierarchical softmax in place of the n negative
    samples, and stochastic gradients. Here, each step of Adam takes the walks from `batch_size` nodes, which share 200
    nodes r, and the learning rate decreases to zero. The length of walks, the context size and the width are the
    original's; there are fewer than its 80 walks per node. The paper does not state the strength of the regression's
    L2: here, the one with the best validation accuracy is selected.

    PyG's `Node2Vec` is the same with biased walks, and needs pyg-lib to walk.

    Args:
        out_channels: K, the number of classes.
        num_nodes: N, needed only to load a state dict; `fit` sets it otherwise.
        embedding_dim: the width of z.
        walk_length: the number of nodes in a walk.
        context_size: the largest distance of two nodes on a walk.
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
        """Return the logits `[N, K]` of the embedded nodes; x is ignored."""
        out: Tensor = self.lin(self.z)
        return out

    def _embed(self, edge_index: Tensor, N: int) -> None:
        start = torch.empty(2, N, self.z.size(1), device=edge_index.device).uniform_(-0.5, 0.5)
        z, c = (nn.Parameter(vectors / self.z.size(1) ** 0.5) for vectors in start)
        optimizer = torch.optim.Adam([z, c], lr=self.lr)
        batches = [b for _ in range(self.walks_per_node) for b in torch.randperm(N).split(self.batch_size)]
        walk = Walks(edge_index, N)
        for step, nodes in enumerate(batches):
            optimizer.param_groups[0]["lr"] = self.lr * (1 - step / len(batches))
            walks = walk(nodes.to(z.device), self.walk_length)
            optimizer.zero_grad()
            skip_gram_loss(z, c, walks, self.context_size, self.num_negative_samples).backward()
            optimizer.step()
        self.z = nn.Parameter(z.detach())

    @torch.no_grad()
    def _classify(self, data: Data) -> None:
        best, state = -1, self.lin.state_dict()
        for strength in self.strengths:
            fit_logistic(self.lin, self.z[data.train_mask], data.y[data.train_mask], strength)
            right = int((self(None).argmax(1) == data.y)[data.val_mask].sum())
            if right > best:
                best, state = right, copy.deepcopy(self.lin.state_dict())
        self.lin.load_state_dict(state)
