"""Planetoid: embeddings that predict a node's class and its context on random walks (Yang et al., ICML 2016)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from ...features.dropout import dropout
from ...features.linear import Linear
from ...features.sparse import is_sparse_features
from ._walks import Walks, skip_gram_loss


class Planetoid(nn.Module):
    r"""Both variants of "Revisiting Semi-Supervised Learning with Graph Embeddings"; the GAT paper quotes the better.

    Features x and an embedding e predict the class, and e predicts the contexts c, the nodes nearby on walks:

    .. math::
        p(y \mid x, e) = \mathrm{softmax}(\mathbf{W}_x x + \mathbf{W}_e e), \qquad
        L = - \frac{1}{|V_L|} \sum_{i \in V_L} \log p(y_i \mid x_i, e_i)
            + \mathrm{E} [ - \log \sigma(e_i^T c_j) - n \log \sigma(-e_i^T c_r) ]

    The transductive variant (Planetoid-T) has a free vector e for each node, the inductive one (Planetoid-I) e = W x.
    Training first minimises the second term only, then both.

    The original has hidden layers on x and e, also samples nodes with the same label as contexts, and alternates
    stochastic gradient steps on the two terms. Here the classifier is linear, each step of Adam uses both terms, and
    contexts come only from walks: contexts by labels lowered Cora's validation accuracy. Settings that the paper does
    not state were selected on validation nodes: L2, learning rates and numbers of steps on Cora, the variant on each
    data set. The final weights are those of the step with the best validation accuracy.

    Args:
        in_channels: F, the number of input features.
        out_channels: K, the number of classes.
        num_nodes: N, needed only to load a state dict; `fit` sets it otherwise.
        inductive: if true, the embedding is computed from the features.
        embedding_dim: the width of e.
        dropout: p, of x and e before the classifier.
        walk_length: the number of nodes in a walk.
        context_size: the largest distance of two nodes on a walk.
        num_negative_samples: n, the weight of a pair that is not on a walk.
        batch_size: the number of walks in a step.
        pretrain_steps: the number of steps for the contexts alone.
        steps: the number of steps for both.
        lr: the initial learning rate of the embedding, which decreases to zero.
        weight_decay: the L2 of W_x and of W_e.

    Example:
        >>> data = Data(torch.eye(4), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), y=torch.tensor([0, 0, 1, 1]))
        >>> data.train_mask, data.val_mask = torch.tensor([[True, False, True, False], [False, True, False, True]])
        >>> model = Planetoid(4, 2, embedding_dim=8, pretrain_steps=20, steps=10)
        >>> model.fit(data)
        >>> model(data.x).shape
        torch.Size([4, 2])
    """

    supports_sparse_features = True
    e: nn.Parameter  # [N, D], of the transductive variant

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_nodes: int = 0,
        inductive: bool = False,
        embedding_dim: int = 64,
        dropout: float = 0.5,
        walk_length: int = 40,
        context_size: int = 10,
        num_negative_samples: int = 5,
        batch_size: int = 128,
        pretrain_steps: int = 200,
        steps: int = 100,
        lr: float = 0.01,
        weight_decay: tuple[float, float] = (0.0005, 0.05),
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.walk_length = walk_length
        self.context_size = context_size
        self.num_negative_samples = num_negative_samples
        self.batch_size = batch_size
        self.pretrain_steps = pretrain_steps
        self.steps = steps
        self.lr = lr
        self.weight_decay = weight_decay
        self.embed = Linear(in_channels, embedding_dim, bias=False) if inductive else None
        self.register_parameter("e", None if inductive else nn.Parameter(torch.zeros(num_nodes, embedding_dim)))
        self.of_features = Linear(in_channels, out_channels)
        self.of_embedding = nn.Linear(embedding_dim, out_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, F]`, dense or torch.sparse CSR, to logits `[N, K]`; the transductive variant knows the fitted nodes."""
        return self._classified(x, self._embedded(x))

    def fit(self, data: Data) -> None:
        """Embed the nodes, then embed and classify them.

        Raises:
            ValueError: if nodes have many labels.
        """
        if data.y.dim() != 1:
            raise ValueError(f"y has shape {tuple(data.y.shape)}, expected (N,): Planetoid gives each node one class.")
        with torch.inference_mode(False), torch.enable_grad():
            self._fit(data, data.x if is_sparse_features(data.x) else data.x.to_sparse_csr())
        self.eval()

    def _fit(self, data: Data, x: Tensor) -> None:
        N, D = x.size(0), self.of_embedding.in_features
        made = torch.empty(2, N, D, device=x.device).uniform_(-0.5, 0.5) / D**0.5
        if self.embed is None:
            self.e = nn.Parameter(made[0])
        c = nn.Parameter(made[1])
        embedding = self.e if self.embed is None else self.embed.weight
        decay_x, decay_e = self.weight_decay
        groups = [
            {"params": [embedding, c]},
            {"params": self.of_features.parameters(), "lr": 10 * self.lr, "weight_decay": decay_x},
            {"params": self.of_embedding.parameters(), "weight_decay": decay_e},
        ]
        optimizer = torch.optim.Adam(groups, lr=self.lr)
        walk, train = Walks(data.edge_index, N), data.train_mask.nonzero()[:, 0]
        best, state = -1, self.state_dict()
        for step in range(total := self.pretrain_steps + self.steps):
            optimizer.param_groups[0]["lr"] = self.lr * (1 - step / total)
            self.train()
            e = self._embedded(x)
            walks = walk(torch.randint(N, (self.batch_size,), device=x.device), self.walk_length)
            loss = skip_gram_loss(e, c, walks, self.context_size, self.num_negative_samples)
            if step >= self.pretrain_steps:
                out = self._classified(x, e).index_select(0, train)
                loss = loss + F.cross_entropy(out, data.y.index_select(0, train))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= self.pretrain_steps and (right := self._right(data, x)) >= best:
                best, state = right, copy.deepcopy(self.state_dict())
        self.load_state_dict(state)

    def _embedded(self, x: Tensor) -> Tensor:
        e: Tensor = self.e if self.embed is None else self.embed(x)
        return e  # [N, D]

    def _classified(self, x: Tensor, e: Tensor) -> Tensor:
        x, e = (dropout(of, self.dropout, self.training) for of in (x, e))
        out: Tensor = self.of_features(x) + self.of_embedding(e)
        return out

    @torch.no_grad()
    def _right(self, data: Data, x: Tensor) -> int:
        """Return the number of validation nodes that are classified correctly."""
        self.eval()
        return int((self(x).argmax(1) == data.y)[data.val_mask].sum())
