"""LP: labels spread along the edges until each node has the mean of its neighbours' (Zhu et al., ICML 2003)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import LabelPropagation
from torch_geometric.utils import degree, to_torch_csr_tensor


class LP(nn.Module):
    r"""The harmonic function of "Semi-Supervised Learning Using Gaussian Fields and Harmonic Functions".

    Labelled nodes keep their labels, and every other node i has the mean of its neighbours:

    .. math::
        f_i = \frac{1}{|\mathcal{N}_i|} \sum_{j \in \mathcal{N}_i} f_j

    Class mass normalisation (Section 4 there) then scales each class k over the unlabelled nodes to its share of the
    labels, as few labels give little control over the classes' sizes:

    .. math::
        \hat{f}_{ik} = q_k \frac{f_{ik}}{\sum_i f_{ik}}

    The original solves the linear system, and weights edges by distances of features. Here all edges have weight 1, and
    the mean is applied `num_layers` times: on the citation networks the last step changes less than 2e-4. A node that
    no label reaches gets the shares of the classes. Nothing is random, and no setting is tuned.

    Args:
        out_channels: K, the number of classes.
        num_nodes: N, needed only to load a state dict; `fit` sets it otherwise.
        num_layers: the number of propagations.
        normalize: if true, normalise the class masses.

    Example:
        >>> path = Data(edge_index=torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), y=torch.tensor([0, 0, 1, 1]))
        >>> path.train_mask = torch.tensor([True, False, False, True])
        >>> model = LP(out_channels=2)
        >>> model.fit(path)
        >>> model(None, path.edge_index).exp()[1]
        tensor([0.6667, 0.3333])
    """

    labels: Tensor  # [N, K], one-hot where known, else zeros

    def __init__(self, out_channels: int, num_nodes: int = 0, num_layers: int = 1000, normalize: bool = True) -> None:
        super().__init__()
        self.propagate = LabelPropagation(num_layers, alpha=1.0)
        self.normalize = normalize
        self.register_buffer("labels", torch.zeros(num_nodes, out_channels))

    def fit(self, data: Data) -> None:
        """Store the labels of the training nodes.

        Raises:
            ValueError: if nodes have many labels.
        """
        if data.y.dim() != 1:
            raise ValueError(
                f"y has shape {tuple(data.y.shape)}, expected (N,): LP gives each node one class. A network reads "
                "known targets and several labels by training.label_rate=0.5."
            )
        known = torch.where(data.train_mask, data.y, self.labels.size(1))
        self.labels = F.one_hot(known, self.labels.size(1) + 1)[:, :-1].float()

    def forward(self, x: Tensor | None, edge_index: Tensor) -> Tensor:
        """Return log probabilities `[N, K]` for the edges of the fitted graph; x is ignored."""
        N, known = self.labels.size(0), self.labels.any(1, keepdim=True)
        mean = 1 / degree(edge_index[1], N).clamp(min=1)[edge_index[1]]  # [E]
        adj_t = to_torch_csr_tensor(edge_index.flip(0), mean, size=(N, N))
        f = self.propagate(self.labels, adj_t, None, adj_t.values(), lambda f: torch.where(known, self.labels, f))
        share = self.labels.mean(0) / self.labels.mean(0).sum()
        if self.normalize:
            f = f * torch.where(known, 1.0, share / f.masked_fill(known, 0.0).sum(0).clamp(min=_TINY))
        f = torch.where(f.any(1, keepdim=True), f, share)
        return (f / f.sum(1, keepdim=True)).clamp(min=_TINY).log()


_TINY = torch.finfo(torch.float).tiny
