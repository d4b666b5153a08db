"""`GATv2Conv`: attention with dynamic scores, with PyG's arguments, call and parameter names."""

# PyG's templates read the source of this module and import all its names: no `__all__`.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.typing import Adj, OptTensor, PairTensor, Size
from torch_geometric.utils import softmax

from ..attention.operation import Backend
from ..attention.score import Score
from .autograd_node import Grads
from .base import AttentionConv
from .checks import of_both_ends
from .mechanisms import dynamic_score, gatv2_score, glorot_linear
from .messages import Ends


class GATv2Conv(AttentionConv):
    r"""The GATv2 layer of Brody et al. (ICLR 2022), a drop-in for `torch_geometric.nn.GATv2Conv`.

    .. math::
        h'_i = \Big\Vert_{k=1}^{H} \sum_{j \in \mathcal{N}_i} \alpha_{ij}^k \mathbf{W}_l^k h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\vec{\mathbf{a}}^T
        \mathrm{LeakyReLU}(\mathbf{W}_r h_i + \mathbf{W}_l h_j)\big)

    Args:
        share_weights: use the same matrix for W_l and W_r.
        bias: add a learnable bias to the output and to both products with W_l and W_r.

    All other arguments are those of `GATConv`.

    Raises:
        ValueError: if an argument is out of range.

    Cost: as `GATConv`; with edge features or returned attention also a few `[E, H, C]` for the scores.

    Example:
        >>> GATv2Conv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    _PARAMETERS = (
        *("lin_l.weight", "lin_l.bias", "", "", "lin_r.weight", "lin_r.bias", "lin_edge.weight", "res.weight", "bias"),
        *("att", "", ""),
    )

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        edge_dropout: float = 0.0,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_options(in_channels, out_channels, heads, concat, dropout, edge_dim, edge_dropout, backend)
        self.negative_slope, self.residual = negative_slope, residual
        self.add_self_loops, self.fill_value = add_self_loops, fill_value
        self.share_weights = share_weights

        src_channels, dst_channels = of_both_ends(in_channels)
        self.lin_l = glorot_linear(src_channels, heads * out_channels, bias)
        self.lin_r = self.lin_l if share_weights else glorot_linear(dst_channels, heads * out_channels, bias)
        self.att = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else glorot_linear(edge_dim, heads * out_channels)
        total_channels = out_channels * (heads if concat else 1)
        self.res = glorot_linear(dst_channels, total_channels) if residual else None
        self.register_parameter("bias", Parameter(torch.empty(total_channels)) if bias else None)
        self.reset_parameters()

    def _project(self, x: Tensor | PairTensor, size: Size) -> tuple[Ends, OptTensor]:
        """Return W_l h of src and W_r h of dst, `[N, H, C]`, and the skip connection's term."""
        return self._both_ends(x, None, self.lin_l, self.lin_r, self.share_weights)

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> tuple[Tensor, Tensor]:
        x_l, x_r, _ = ends

        # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
        alpha = self.edge_updater(edge_index, x=(x_l, x_r), edge_attr=edge_attr)
        alpha = alpha if edge_weight is None else alpha * edge_weight

        # propagate_type: (x: PairTensor, alpha: Tensor)
        return self.propagate(edge_index, x=(x_l, x_r), alpha=alpha), alpha

    def edge_update(
        self,
        x_j: Tensor,
        x_i: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int | None,
    ) -> Tensor:
        """The features of each edge's ends, `[E, H, C]`, to alpha `[E, H]`."""
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        alpha = softmax(dynamic_score(self, x_i, x_j, edge_attr), index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def _few_options(self, att: OptTensor, *_: None) -> tuple[Any, ...] | None:
        return None if att is None else (self.negative_slope, None, True, None)

    def _score(self, x: Any, ends: Ends, edge_attr: OptTensor) -> Score | None:
        return gatv2_score(self, ends[1], edge_attr)

    def _before_back(self: Any, x_l: Tensor, of: dict[str, Any], grads: Grads) -> None:
        """Add the gradients of what `_project` and `_score` read, from those of their results."""
        of_dst = None if of["x_dst"] is of["x"] else of.pop("x_dst")  # one where the features are
        grads.of_linear(of.pop("x").flatten(1), "x", "lin_l")  # freed before the next
        if of_dst is not None:
            grads.of_linear(of_dst.flatten(1), grads.end, "lin_l" if self.share_weights else "lin_r")
        grads["att"] = of["att"].view_as(self.att)
