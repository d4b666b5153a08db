"""`TransformerConv`: scaled dot-product attention with separate queries, keys and values, as PyG's."""

# PyG's templates read the source of this module and import all its names: no `__all__`.

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, Size, SparseTensor
from torch_geometric.utils import softmax

from ..attention.operation import Backend
from ..attention.pair import Dot
from ..attention.score import Score
from ..features.linear import Linear
from ..philox import drops
from .autograd_node import Grads, side_by_side
from .base import AttentionConv
from .checks import of_both_ends
from .mechanisms import per_head
from .messages import Ends


class TransformerConv(AttentionConv):
    r"""The layer of Shi et al. (IJCAI 2021), a drop-in for `torch_geometric.nn.TransformerConv`.

    .. math::
        h'_i = \mathbf{W}_1 h_i + \Big\Vert_{k=1}^{H} \sum_{j \in \mathcal{N}_i} \alpha_{ij}^k
        (\mathbf{W}_2^k h_j + \mathbf{W}_6^k u_{ij}), \qquad
        \alpha_{ij} = \mathrm{softmax}_j \Big( \frac{(\mathbf{W}_3 h_i)^T (\mathbf{W}_4 h_j + \mathbf{W}_6 u_{ij})}
        {\sqrt{C}} \Big)

    Args:
        beta: learn a gate that weighs the two terms of h', beta W_1 h_i + (1 - beta) m_i, where m_i is the sum.
        dropout: probability of dropping an attention coefficient in training.
        edge_dim: number of edge features u; their part of keys and values is W_6 u.
        bias: add a learnable bias to the projections of nodes.
        root_weight: add W_1 h_i.

    All other arguments are those of `GATConv`. As in PyG's layer, any value of `return_attention_weights` but None
    returns alpha, before dropout.

    Raises:
        ValueError: if an argument is out of range.

    Cost: as `GATConv`, with three projections. No edge is projected: q . (W_6 u) = (W_6^T q) . u, and W_6 can be taken
    out of the sum over the edges.

    Example:
        >>> TransformerConv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    _PARAMETERS = (
        *("lin_value.weight", "lin_value.bias", "lin_key.weight", "lin_key.bias", "lin_query.weight", "lin_query.bias"),
        *("lin_edge.weight", "lin_skip.weight", "lin_skip.bias", "lin_beta.weight", "", ""),
    )
    _alpha: OptTensor
    _edge_weight: OptTensor

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        edge_dropout: float = 0.0,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(**kwargs)
        self._set_options(in_channels, out_channels, heads, concat, dropout, edge_dim, edge_dropout, backend)
        self.add_self_loops, self.fill_value = False, "mean"
        self.root_weight = root_weight
        self.beta = beta and root_weight
        self._alpha = None  # set by `message`, read by the call that runs it, as in PyG's layer
        self._edge_weight = None  # set by a call, read by `message`
        src_channels, dst_channels = of_both_ends(in_channels)
        width, total = heads * out_channels, out_channels * (heads if concat else 1)
        self.lin_key = Linear(src_channels, width, bias=bias)
        self.lin_query = Linear(dst_channels, width, bias=bias)
        self.lin_value = Linear(src_channels, width, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, width, bias=False)
        self.lin_skip = Linear(dst_channels, total, bias=bias)
        self.lin_beta = Linear(3 * total, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def _run(self, x: Any, edge_index: Any, edge_attr: OptTensor, *others: Any) -> Any:
        has_values = isinstance(edge_index, SparseTensor) and edge_index.has_value()
        if edge_attr is None and self.lin_edge is not None and not has_values:
            raise ValueError("the layer has edge_dim, but edge_attr is None. Pass edge_attr of shape (E, D).")
        return super()._run(x, edge_index, edge_attr, *others)

    def _returns_alpha(self, flag: bool | None) -> bool:
        return flag is not None

    def _needs_messages(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: bool) -> bool:
        dropped = weights and self.training and drops(self.dropout)  # alpha is returned before dropout
        return dropped or super()._needs_messages(x, edge_index, edge_attr, weights)

    def _project(self, x: Any, size: Size) -> tuple[Ends, OptTensor]:
        """Return value, query and key, `[N, H, C]`, and the features of dst for the skip connection."""
        src, dst = (x, x) if isinstance(x, Tensor) else x
        shape = [-1, self.heads, self.out_channels]
        query = self.lin_query(dst).view(shape)
        key, value = side_by_side(src, self.lin_key, self.lin_value)
        return (value.view(shape), query, key.view(shape)), dst if self.root_weight else None

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> tuple[Tensor, OptTensor]:
        value, query, key = ends

        self._edge_weight = edge_weight
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)

        # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)
        out = self.propagate(edge_index, query=query, key=key, value=value, edge_attr=edge_attr)
        alpha = self._alpha
        self._alpha = None
        if self._edge_weight is not None:
            self._edge_weight = None
            raise NotImplementedError(
                "edge_weight multiplies alpha in TransformerConv.message, which this layer overrides without a call of "
                "super().message(). Multiply the messages there, and pass no edge_weight."
            )
        return out, alpha

    def _finish(self, out: Tensor, res: OptTensor, spent: bool = False) -> Tensor:
        """The heads side by side, or their mean, and W_1 h_i; `res` is h_i."""
        skip = None if res is None else self.lin_skip(res)
        if self.lin_beta is None or skip is None:
            return self._combine(out, skip, None, spent)
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _attention(self, adjacency: Any, alpha: Tensor) -> Any:
        # PyG's other layers write alpha into a torch.sparse matrix, this one returns it in the order of the values
        if not isinstance(adjacency, Tensor):
            return super()._attention(adjacency, alpha)
        return adjacency.coalesce() if adjacency.layout == torch.sparse_coo else adjacency, alpha

    def message(  # type: ignore[override]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int | None,
    ) -> Tensor:
        """A term of the sum, `[E, H, C]`, of the query, key and value of each edge; `_alpha` has the coefficients."""
        if edge_attr is not None and self.lin_edge is not None:
            of_edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            key_j, value_j = key_j + of_edge, value_j + of_edge
        alpha = softmax((query_i * key_j).sum(dim=-1) / math.sqrt(self.out_channels), index, ptr, size_i)
        edge_weight = self._edge_weight
        if edge_weight is not None:
            alpha = alpha * edge_weight
            self._edge_weight = None
        self._alpha = alpha
        return F.dropout(alpha, p=self.dropout, training=self.training).unsqueeze(-1) * value_j

    def _few_options(self, lin_beta: OptTensor, *_: None) -> tuple[Any, ...] | None:
        return None if lin_beta is not None or not self.root_weight else (self.out_channels**-0.5, None, None, True)

    def _score(self, x: Any, ends: Ends, edge_attr: OptTensor) -> Score | None:
        _, query, key = ends
        if edge_attr is None or self.lin_edge is None:
            return Dot(query, key)
        return Dot(query, key, edge_attr, per_head(self.lin_edge, self.heads))

    def _after_back(self: Any, out: Tensor, grad: Tensor, grads: Grads) -> Tensor:
        """Add the gradients of what `_finish` reads, and return that of the operation's output."""
        H, C, of_skip = self.heads, self.out_channels, grad
        if self.lin_beta is not None and self.root_weight:
            sums, skip = out.flatten(1) if self.concat else out.mean(1), self.lin_skip(grads.tensors[grads.end])
            terms, (w_out, w_skip, w_both) = torch.cat([sums, skip, sums - skip], -1), self.lin_beta.weight.chunk(3, 1)
            beta = self.lin_beta(terms).sigmoid()
            of_gate = (grad * (skip - sums)).sum(1, keepdim=True) * beta * (1 - beta)
            grads["lin_beta.weight"] = of_gate.t().mm(terms)
            of_skip = beta * grad + of_gate * (w_skip - w_both)
            grad = (1 - beta) * grad + of_gate * (w_out + w_both)
        if self.root_weight:
            grads.of_linear(of_skip, grads.end, "lin_skip")
        return grad.view(-1, H, C) if self.concat else (grad / H).unsqueeze(1).expand(-1, H, C)

    def _before_back(self: Any, value: Tensor, of: dict[str, Any], grads: Grads) -> None:
        """Add the gradients of what `_project` and `_score` read, from those of their results."""
        grads.of_linear(of.pop("x_dst").flatten(1), grads.end, "lin_query")  # freed before the next product
        of_key, of_value = of["key"].flatten(1), of["x"].flatten(1)
        width = of_key.size(1)
        if of_key.stride(0) == 2 * width:  # side by side, as keys and values are
            both = of_key.as_strided((of_key.size(0), 2 * width), (2 * width, 1))
            grads.of_linear(both, "x", "lin_key lin_value")
        else:
            grads.of_linear(of_key, "x", "lin_key")
            grads.of_linear(of_value, "x", "lin_value")
