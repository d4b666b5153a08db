"""The graph convolutional network of Kipf & Welling (ICLR 2017), with 64 hidden features also the paper's GCN-64*.

As in their code there are no biases, and weight decay acts on the first layer alone. That code stops when the
validation loss, L2 included, is above its mean over the last ten epochs, and tests the last weights; here it is as
their text says, after ten epochs without a lower validation loss, and the best weights are tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from ..features.linear import Linear, linear
from ..features.sparse import SparseFeatures, adjacency
from ..graph.remembered import remembered
from ._layers import Layers, widths


class GCN(Layers):
    r"""Graph convolutions: each node sums over its neighbours and itself by weights that their degrees give.

    .. math::
        \mathbf{X}^{(l+1)} = \sigma\left(\hat{\mathbf{A}} \mathbf{X}^{(l)} \mathbf{W}^{(l)}\right), \qquad
        \hat{\mathbf{A}} = \tilde{\mathbf{D}}^{-1/2} (\mathbf{A} + \mathbf{I}) \tilde{\mathbf{D}}^{-1/2}

    Each layer is PyG's `GCNConv` without bias.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: the width of each layer but the last.
        out_channels: K, the number of classes or labels.
        num_layers: the number of layers.
        dropout: p, for the inputs of the layers.
        act: the name of the activation between layers; the last one has none.
        decayed_layers: weight decay acts on so many layers, from the first on; on all if None.

    Example:
        >>> GCN(16, 8, 7)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
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
        decayed_layers: int | None = 1,
    ) -> None:
        super().__init__(dropout, act)
        sizes = widths(in_channels, hidden_channels, out_channels, num_layers)
        self.lins = nn.ModuleList(Linear(F, C, bias=False, weight_initializer="glorot") for F, C in sizes)
        self.decayed_layers = decayed_layers

    def decayed_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the first `decayed_layers`."""
        return self.lins[: self.decayed_layers].parameters()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the sparse products are kernels already
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR, and edges `[2, E]`."""
        matrix = normalised(edge_index, x.size(0), x.dtype)
        return self._through(self.lins, x, lambda lin, x: linear(matrix, lin(x)))


@remembered
def normalised(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> SparseFeatures:
    r"""The matrix :math:`\hat{\mathbf{A}}` `[N, N]` of a graph, rows by dst; of repeated edges the weights add up."""
    looped, weight = gcn_norm(edge_index, None, num_nodes, dtype=dtype)
    return adjacency(looped, weight, num_nodes)
