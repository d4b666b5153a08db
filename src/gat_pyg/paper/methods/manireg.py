"""ManiReg: a linear classifier whose outputs vary little along the edges (Belkin et al., JMLR 2006)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch_geometric.data import Data

from ...features.linear import Linear


class ManiReg(nn.Module):
    r"""Manifold regularisation, with a linear kernel: logits f = W x + b, and to the loss on labelled nodes is added

    .. math::
        \gamma_A \lVert \mathbf{W} \rVert^2 + \frac{\gamma_I}{|E|} \sum_{(i, j) \in E} \lVert f_i - f_j \rVert^2

    The first term is the weight decay of the training; the sum is twice the trace of F^T L F, with L the Laplacian of
    the graph. The original has a squared or hinge loss, an arbitrary kernel and one output per class against the rest.
    Here the loss is the cross-entropy and the kernel is linear. The paper does not state gamma: the default was
    selected from 0.1, 1 and 10 on the validation nodes of Cora, Citeseer and Pubmed, with one value for all three.

    Args:
        in_channels: F, the number of input features.
        out_channels: K, the number of classes.
        gamma: the intrinsic weight, of the outputs' differences along edges.

    Example:
        >>> import torch
        >>> model, data = ManiReg(3, 2, gamma=0.5), Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> float(model.penalty(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), data))
        2.5
    """

    supports_sparse_features = True

    def __init__(self, in_channels: int, out_channels: int, gamma: float = 10.0) -> None:
        super().__init__()
        self.gamma = gamma
        self.lin = Linear(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR."""
        out: Tensor = self.lin(x)
        return out

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the weights without the bias, which is not part of a kernel machine's norm."""
        return [self.lin.weight]

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        """Return gamma times the mean squared distance between the outputs at the ends of an edge; 0 without edges."""
        src, dst = data.edge_index
        difference: Tensor = out.index_select(0, src) - out.index_select(0, dst)  # [E, K]
        return self.gamma * difference.square().sum() / max(int(src.numel()), 1)
