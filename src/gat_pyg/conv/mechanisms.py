"""Attention mechanisms as modules."""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot
from torch_geometric.typing import OptTensor

from ..features.linear import Linear


class DotProduct(nn.Module):
    r"""Scaled dot-product scores (Vaswani et al., NeurIPS 2017), a mechanism for `GATConv` without parameters.

    .. math::
        e_{ij} = \langle \mathbf{W} h_i, \mathbf{W} h_j \rangle / \sqrt{C}

    Example:
        >>> DotProduct()(torch.ones(5, 2, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 2])
    """

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
        """`[E, H, C]` of each edge's dst and src to scores `[E, H]`; edge features play no part."""
        return (x_dst * x_src).sum(dim=-1) / math.sqrt(x_src.size(-1))


class DynamicAttention(nn.Module):
    r"""GATv2's scores (Brody et al., ICLR 2022), a mechanism for `GATConv`; it has one W where `GATv2Conv` has two.

    .. math::
        e_{ij} = \vec{\mathbf{a}}^T \mathrm{LeakyReLU}(\mathbf{W} h_i + \mathbf{W} h_j + \mathbf{W}_e u_{ij})

    Args:
        heads: H.
        out_channels: C.
        edge_dim: the number of edge features, if any.
        negative_slope: of the LeakyReLU.

    Example:
        >>> DynamicAttention(heads=2, out_channels=4)(torch.ones(5, 2, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self, heads: int, out_channels: int, edge_dim: Optional[int] = None, negative_slope: float = 0.2
    ) -> None:
        super().__init__()
        self.heads = heads
        self.out_channels = out_channels
        self.negative_slope = negative_slope
        self.att = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else _glorot_linear(edge_dim, heads * out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, Glorot uniform."""
        glorot(self.att)
        if self.lin_edge is not None:
            self.lin_edge.reset_parameters()

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
        """`[E, H, C]` of each edge's dst and src, and its features `[E, D]`, to scores `[E, H]`."""
        x_edge: OptTensor = None
        if edge_attr is not None and self.lin_edge is not None:
            x_edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        return _dynamic_score(x_dst, x_src, x_edge, self.att, self.negative_slope)


def _glorot_linear(in_channels: int, out_channels: int, bias: bool = False) -> Linear:
    return Linear(in_channels, out_channels, bias=bias, weight_initializer="glorot")


def _dynamic_score(x_dst: Tensor, x_src: Tensor, x_edge: OptTensor, att: Tensor, negative_slope: float) -> Tensor:
    x = x_dst + x_src if x_edge is None else x_dst + x_src + x_edge
    return (F.leaky_relu(x, negative_slope) * att).sum(dim=-1)
