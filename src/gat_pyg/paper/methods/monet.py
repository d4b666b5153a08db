"""The mixture model network MoNet (Monti et al., CVPR 2017) with the nodes' degrees as pseudo-coordinates.

As they had it for citation graphs: a tanh layer transforms the two coordinates of an edge, and kernels are Gaussians
with a diagonal covariance, here of unit width at first. Without biases, and with weight decay on the first layer's
projection alone, as in the GCN of Kipf & Welling (ICLR 2017), whose setup they follow; a node is its own neighbour, as
it is there. Messages are averaged: with sums, training overfits within twenty epochs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot
from torch_geometric.utils import add_remaining_self_loops, degree

from ...features.linear import Linear, linear
from ...features.sparse import SparseFeatures, adjacency
from ...graph.remembered import remembered
from ...models.baselines import Layers, widths


class MoNet(Layers):
    r"""Layers that weight neighbours by learnt Gaussian kernels of coordinates, which are computed from degrees.

    .. math::
        \mathbf{x}'_i = \sigma\Big(\frac{1}{d_i} \sum_{k=1}^{K} \sum_{j \in \mathcal{N}_i} w_k(\mathbf{u}_{ij})
        \mathbf{W}_k \mathbf{x}_j\Big), \qquad
        w_k(\mathbf{u}) = \exp\Big(-\frac{1}{2} \sum_d \frac{(u_d - \mu_{kd})^2}{\sigma_{kd}^2}\Big), \qquad
        \mathbf{u}_{ij} = \tanh\Big(\mathbf{A} \Big[\frac{1}{\sqrt{d_i}}, \frac{1}{\sqrt{d_j}}\Big]^T + \mathbf{b}\Big)

    with d the in-degree. Each layer is PyG's `GMMConv`, a mean over the neighbourhood, without root weight and bias.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: the width of each layer but the last.
        out_channels: the number of classes or labels.
        num_layers: the number of layers.
        dropout: p, for the inputs of the layers.
        act: the name of the activation between layers; the last one has none.
        dim: D, the number of coordinates after their transformation.
        kernel_size: K, the number of kernels.

    Example:
        >>> MoNet(16, 8, 7)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 7])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.0,
        act: str = "relu",
        dim: int = 2,
        kernel_size: int = 2,
    ) -> None:
        super().__init__(dropout, act)
        sizes = widths(in_channels, hidden_channels, out_channels, num_layers)
        self.convs = nn.ModuleList(GaussianMixture(F, C, dim, kernel_size) for F, C in sizes)

    def decayed_parameters(self) -> Iterator[nn.Parameter]:
        """The first layer's projection."""
        return self.convs[0].get_submodule("lin").parameters()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sparse products are kernels already
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR, and edges `[2, E]`."""
        mean, degrees = coordinates(edge_index, x.size(0), x.dtype)
        return self._through(self.convs, x, lambda conv, x: conv(x, mean, degrees))


class GaussianMixture(nn.Module):
    """One layer of `MoNet`; the matrix of the mean and the two coordinates of each edge come with the graph."""

    def __init__(self, in_channels: int, out_channels: int, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.lin = Linear(in_channels, kernel_size * out_channels, bias=False, weight_initializer="glorot")
        self.transform = Linear(2, dim, weight_initializer="glorot", bias_initializer="zeros")
        self.mu = nn.Parameter(torch.empty(kernel_size, dim))
        self.sigma = nn.Parameter(torch.ones(kernel_size, dim))
        glorot(self.mu)

    def forward(self, x: Tensor, mean: SparseFeatures, degrees: Tensor) -> Tensor:
        """`[N, F]`, a matrix `[N, N]` with E non-zeros and their coordinates `[E, 2]` to `[N, C]`."""
        kernel_size, _ = self.mu.shape
        z = self.lin(x).unflatten(-1, (kernel_size, -1)).movedim(-2, 0)  # [K, N, C]
        u = self.transform(degrees).tanh()  # [E, D]
        gaussian = ((u - self.mu[:, None]) / self.sigma[:, None]).square().sum(-1).mul(-0.5).exp()  # [K, E]
        return linear(SparseFeatures(mean, mean.content * gaussian), z).sum(0)


@remembered
def coordinates(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> tuple[SparseFeatures, Tensor]:
    """The matrix `[N, N]` of the mean over a neighbourhood with its node, and 1/√d of dst and src per edge `[E, 2]`."""
    looped, _ = add_remaining_self_loops(edge_index, num_nodes=num_nodes)
    d = degree(looped[1], num_nodes, dtype)
    mean = adjacency(looped, 1 / d[looped[1]], num_nodes)
    return mean, d.rsqrt()[torch.stack([mean.pattern.row, mean.pattern.col], 1).long()]
