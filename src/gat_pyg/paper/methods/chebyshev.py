"""Chebyshev filters of the graph Laplacian (Defferrard et al., NIPS 2016), as Kipf & Welling (ICLR 2017) trained them.

The paper's row is the better of the orders 2 and 3. Without biases, and with weight decay on the first layer alone, as
in Kipf & Welling's code, which computes the Laplacian's largest eigenvalue; here it is taken to be its bound, 2, which
a graph reaches as soon as one of its components is bipartite, as in Cora and Citeseer (Pubmed's is 1.99).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.utils import get_laplacian, remove_self_loops

from ...features.linear import Linear, linear
from ...features.sparse import SparseFeatures, adjacency
from ...graph.remembered import remembered
from ...models.baselines import Layers, widths


class Chebyshev(Layers):
    r"""Layers that sum Chebyshev polynomials of the scaled Laplacian, each with weights of its own.

    .. math::
        \mathbf{X}^{(l+1)} = \sigma\left(\sum_{k=0}^{K} T_k(\tilde{\mathbf{L}}) \mathbf{X}^{(l)} \mathbf{W}_k^{(l)}
        \right), \qquad \tilde{\mathbf{L}} = \frac{2}{\lambda_{max}} \mathbf{L} - \mathbf{I}
        = -\mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2}

    Each layer is PyG's `ChebConv` without bias, which counts the terms: its K is `order + 1`.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: the width of each layer but the last.
        out_channels: the number of classes or labels.
        order: K, the highest degree of the polynomials, which is how many hops a layer sees.
        num_layers: the number of layers.
        dropout: p, for the inputs of the layers.
        act: the name of the activation between layers; the last one has none.

    Raises:
        ValueError: if the order is not at least 1.

    Example:
        >>> Chebyshev(16, 8, 7, order=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 7])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        order: int = 2,
        num_layers: int = 2,
        dropout: float = 0.0,
        act: str = "relu",
    ) -> None:
        super().__init__(dropout, act)
        if order < 1:
            raise ValueError(f"order is {order}, expected at least 1. An MLP is what sees no neighbour.")
        self.convs = nn.ModuleList(
            nn.ModuleList(Linear(F, C, bias=False, weight_initializer="glorot") for _ in range(order + 1))
            for F, C in widths(in_channels, hidden_channels, out_channels, num_layers)
        )

    def decayed_parameters(self) -> Iterator[nn.Parameter]:
        """Return the first layer's parameters, as in Kipf & Welling's code."""
        return self.convs[0].parameters()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sparse products are kernels already
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR, and edges `[2, E]`."""
        laplacian = scaled_laplacian(edge_index, x.size(0), x.dtype)
        return self._through(self.convs, x, lambda lins, x: clenshaw(laplacian, [lin(x) for lin in lins]))


def clenshaw(laplacian: SparseFeatures, terms: Sequence[Tensor]) -> Tensor:
    r"""The sum of :math:`T_k(\tilde{\mathbf{L}}) \mathbf{Z}_k`, by K products of the width of one term (Clenshaw's)."""
    one, two = terms[-1], torch.zeros_like(terms[-1])
    for term in reversed(terms[1:-1]):
        one, two = term + 2 * linear(laplacian, one) - two, one
    return terms[0] + linear(laplacian, one) - two


@remembered
def scaled_laplacian(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> SparseFeatures:
    r"""The matrix :math:`\tilde{\mathbf{L}}` `[N, N]` of a graph without its loops, rows by dst."""
    index, weight = remove_self_loops(*get_laplacian(edge_index, None, "sym", dtype, num_nodes))
    return adjacency(index, weight, num_nodes)
