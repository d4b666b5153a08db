"""Networks without attention to compare with: MLP, GCN, and PyG's GIN with edge features and PNA.

MLP and GCN are also rows of the paper's tables. Kipf & Welling (ICLR 2017), from whom the paper's Table 2 quotes their
numbers, train both alike, without biases, and decay the weights of the first layer alone. Their code includes L2 in the
validation loss, stops when it is above its mean over the last ten epochs, and tests the last weights. Here the rule is
that of their text: after ten epochs without a lower validation loss, the best weights are tested. By the rule of the
code, half of the runs of the MLP on Citeseer stop within sixty epochs: their 46.5 % is the mean of runs at 26 to 47 %
and others at 54 to 57 %. By the rule of the text, all runs reach 49 to 58 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.nn.resolver import activation_resolver

from ..features.dropout import dropout
from ..features.linear import Linear, linear
from ..features.sparse import SparseFeatures, adjacency
from ..graph.remembered import remembered


class Layers(nn.Module):
    """A model whose layers take dense or sparse features."""

    supports_sparse_features = True

    def __init__(self, dropout: float, act: str) -> None:
        super().__init__()
        self.act = activation_resolver(act)
        self.dropout = dropout

    def _through(self, layers: nn.ModuleList, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Return the output of the last layer; `call(layer, x)` returns the output of one layer."""
        for index, layer in enumerate(layers):
            x = self.act(x) if index > 0 else x
            x = call(layer, dropout(x, self.dropout, self.training))
        return x


def widths(in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of input and output features of each layer."""
    return pairwise([in_channels, *[hidden_channels] * (num_layers - 1), out_channels])


class MLP(Layers):
    r"""Layers that see no edge, with dropout before each.

    .. math::
        \mathbf{X}^{(l+1)} = \sigma\left(\mathbf{X}^{(l)} \mathbf{W}^{(l)} + \mathbf{b}^{(l)}\right)

    Args:
        in_channels: F, the number of input features.
        hidden_channels: the width of each layer but the last.
        out_channels: K, the number of classes or labels. If None, the output is the last hidden layer's activations.
        num_layers: the number of layers.
        dropout: p, for the inputs of the layers.
        act: the name of the activation between layers; the last one has none.
        bias: if true, layers have a bias; Kipf & Welling's have none.

    Example:
        >>> MLP(16, 8, 7)(torch.randn(3, 16)).shape
        torch.Size([3, 7])
    """

    num_hops = 0

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int | None,
        num_layers: int = 2,
        dropout: float = 0.0,
        act: str = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__(dropout, act)
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.is_hidden = out_channels is None
        self.lins = nn.ModuleList(
            Linear(F, C, bias, weight_initializer="glorot", bias_initializer="zeros")
            for F, C in widths(in_channels, hidden_channels, self.out_channels, num_layers)
        )

    def decayed_parameters(self) -> Iterator[nn.Parameter]:
        """Return the first layer's parameters, as in Kipf & Welling's code."""
        return self.lins[0].parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR."""
        out = self._through(self.lins, x, lambda lin, x: lin(x))
        return self.act(out) if self.is_hidden else out


class GCN(Layers):
    r"""Graph convolutions: each node sums over its neighbours and itself by weights that their degrees give.

    .. math::
        \mathbf{X}^{(l+1)} = \sigma\left(\hat{\mathbf{A}} \mathbf{X}^{(l)} \mathbf{W}^{(l)}\right), \qquad
        \hat{\mathbf{A}} = \tilde{\mathbf{D}}^{-1/2} (\mathbf{A} + \mathbf{I}) \tilde{\mathbf{D}}^{-1/2}

    Each layer is PyG's `GCNConv` without bias. With 64 hidden features it is also the paper's GCN-64*.

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


class GINE(BasicGNN):  # type: ignore[misc]  # PyG has no types
    r"""GIN with edge features (Hu et al., ICLR 2020): :math:`h'_i = f(h_i + \sum_j \mathrm{ReLU}(h_j + W u_{ij}))`.

    f is a perceptron of two layers. Without edge features it is `torch_geometric.nn.GIN`, whose arguments it takes.

    Args:
        edge_dim: the number of edge features, if any.

    Example:
        >>> model = GINE(16, 32, num_layers=2, out_channels=3, edge_dim=4)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), edge_attr=torch.randn(2, 4)).shape
        torch.Size([3, 3])
    """

    supports_edge_weight = False
    supports_edge_attr = True

    def __init__(self, *args: Any, edge_dim: int | None = None, **kwargs: Any) -> None:
        self.supports_edge_attr = edge_dim is not None
        super().__init__(*args, edge_dim=edge_dim, **kwargs)

    def init_conv(
        self, in_channels: int, out_channels: int, edge_dim: int | None = None, **kwargs: Any
    ) -> pyg.GINConv | pyg.GINEConv:
        """Return a layer."""
        mlp = pyg.MLP(
            [in_channels, out_channels, out_channels],
            act=self.act,
            act_first=self.act_first,
            norm=self.norm,
            norm_kwargs=self.norm_kwargs,
        )
        return pyg.GINConv(mlp, **kwargs) if edge_dim is None else pyg.GINEConv(mlp, edge_dim=edge_dim, **kwargs)


class PNA(pyg.PNA):  # type: ignore[misc]
    """Principal Neighbourhood Aggregation (Corso et al., NeurIPS 2020): PyG's, with the degrees as a list.

    Args:
        deg: the number of training nodes of each in-degree 0, 1, 2, ...
        aggregators: the names of the aggregations of the neighbours.
        scalers: the names of the functions of a node's degree that multiply the results.
        *args: those of `torch_geometric.nn.PNA`.
        **kwargs: those of `torch_geometric.nn.PNA`.

    Example:
        >>> model = PNA(16, 32, num_layers=2, out_channels=3, deg=[0, 10, 20])
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        *args: Any,
        deg: Sequence[float],
        aggregators: Sequence[str] = ("mean", "min", "max", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
        **kwargs: Any,
    ) -> None:
        degrees = torch.tensor([*deg], dtype=torch.float)
        super().__init__(*args, deg=degrees, aggregators=[*aggregators], scalers=[*scalers], **kwargs)
