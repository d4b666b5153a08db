"""`GATv2Conv`: attention with dynamic scores, with PyG's arguments, call and parameter names."""

# PyG compiles this module's source into templates and TorchScript. So: no `__all__`, no postponed annotations, typing's
# Optional, Tuple and Union instead of `X | None`, and the `# propagate_type` and `# edge_updater_type` comments.

from typing import Any, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import Adj, OptTensor, PairTensor, Size, SparseTensor
from torch_geometric.utils import softmax

from ..attention.operation import Backend
from ..attention.score import Score
from .base import Ends, NoneType, _AttentionConv, _check_call, check_ends, each_graph, is_batch, overload
from .mechanisms import _dynamic_score, _glorot_linear, gatv2_score


class GATv2Conv(_AttentionConv):
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

    _NAMES = "lin_l", "lin_r", "lin_edge", "res", "att", "bias"

    def __init__(
        self,
        in_channels: Union[int, Tuple[int, int]],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: Optional[int] = None,
        fill_value: Union[float, Tensor, str] = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        edge_dropout: float = 0.0,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_options(
            in_channels=in_channels,
            out_channels=out_channels,
            heads=heads,
            concat=concat,
            negative_slope=negative_slope,
            dropout=dropout,
            add_self_loops=add_self_loops,
            edge_dim=edge_dim,
            fill_value=fill_value,
            residual=residual,
            edge_dropout=edge_dropout,
            backend=backend,
        )
        self.share_weights = share_weights

        src_channels, dst_channels = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        self.lin_l = _glorot_linear(src_channels, heads * out_channels, bias)
        self.lin_r = self.lin_l if share_weights else _glorot_linear(dst_channels, heads * out_channels, bias)
        self.att = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else _glorot_linear(edge_dim, heads * out_channels)
        total_channels = out_channels * (heads if concat else 1)
        self.res = _glorot_linear(dst_channels, total_channels) if residual else None
        self.register_parameter("bias", Parameter(torch.empty(total_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter again: Glorot uniform, biases zero."""
        super().reset_parameters()
        for lin in (self.lin_l, self.lin_r, self.lin_edge, self.res):
            if lin is not None:
                lin.reset_parameters()
        glorot(self.att)
        zeros(self.bias)

    @overload
    def forward(
        self,
        x: Union[Tensor, PairTensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: NoneType = None,
        edge_weight: OptTensor = None,
    ) -> Tensor:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: Tensor,
        edge_attr: OptTensor = None,
        return_attention_weights: bool = None,
        edge_weight: OptTensor = None,
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: SparseTensor,
        edge_attr: OptTensor = None,
        return_attention_weights: bool = None,
        edge_weight: OptTensor = None,
    ) -> Tuple[Tensor, SparseTensor]:
        pass

    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: Optional[bool] = None,
        edge_weight: OptTensor = None,
    ) -> Union[Tensor, Tuple[Tensor, Tuple[Tensor, Tensor]], Tuple[Tensor, SparseTensor]]:
        """Attend over every neighbourhood; arguments, result and errors as in `GATConv.forward`, for both ends' x."""
        if not torch.jit.is_scripting():
            if is_batch(x):
                graph = {"edge_index": edge_index, "edge_attr": edge_attr, "edge_weight": edge_weight}
                return each_graph(self, x, return_attention_weights, graph)
            _check_call(x, edge_index, edge_attr, edge_weight, self.in_channels, self.lin_edge)
            check_ends(x, edge_attr, self.lin_edge)
            return self._run(x, edge_index, edge_attr, edge_weight, bool(return_attention_weights))

        ends, res = self._project(x, None)
        out, with_loops, alpha = self._by_messages(ends, edge_index, edge_attr, edge_weight, None)
        out = self._finish(out, res)
        if isinstance(return_attention_weights, bool):
            assert alpha is not None
            if isinstance(edge_index, Tensor):
                assert isinstance(with_loops, Tensor)
                return out, (with_loops, alpha)
            elif isinstance(edge_index, SparseTensor):
                assert isinstance(with_loops, SparseTensor)
                return out, with_loops.set_value(alpha, layout="coo")
        return out

    def _project(self, x: Union[Tensor, PairTensor], size: Size) -> Tuple[Ends, OptTensor]:
        """W_l h and W_r h, `[N, H, C]`, and what the skip connection adds."""
        H, C = self.heads, self.out_channels
        if isinstance(x, Tensor):
            src, dst = x, x
        else:
            src, dst = x[0], x[1]
        res: OptTensor = None
        if self.res is not None:
            res = self.res(dst)
        x_l = self.lin_l(src).view(-1, H, C)
        x_r = x_l if self.share_weights and isinstance(x, Tensor) else self.lin_r(dst).view(-1, H, C)
        return (x_l, x_r, x_l), res

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> Tuple[Tensor, Tensor]:
        x_l, x_r, _ = ends
        assert x_r is not None

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
        dim_size: Optional[int],
    ) -> Tensor:
        """The features of each edge's ends, `[E, H, C]`, to alpha `[E, H]`."""
        x_edge: OptTensor = None
        if edge_attr is not None and self.lin_edge is not None:
            if edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            x_edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        score = _dynamic_score(x_i, x_j, x_edge, self.att, self.negative_slope)
        alpha = softmax(score, index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def _score(self, x: Any, ends: Ends, edge_attr: OptTensor) -> Optional[Score]:
        return gatv2_score(self, ends[1], edge_attr)

    def _before_back(self: Any, x_l: Tensor, score: Any, of: Any, grads: Any) -> None:
        """Add the gradients of what `_project` and `_score` read, from those of their results."""
        grads.of_linear(of.pop("x").flatten(1), "x", "lin_l")  # freed before the next
        grads.of_linear(of.pop("x_dst").flatten(1), grads.end, "lin_l" if self.share_weights else "lin_r")
        grads["att"] = of["att"].view_as(self.att)
        if score.edge_attr is not None:
            grads["lin_edge.weight"] = of["lin_edge"].view_as(self.lin_edge.weight)
            if grads.needs["edge_attr"]:
                grads["edge_attr"] = of["edge_attr"]
