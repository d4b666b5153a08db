"""`TransformerConv`: scaled dot-product attention with separate queries, keys and values, as PyG's."""

# PyG compiles this module's source into templates and TorchScript. So: no `__all__`, no postponed annotations, typing's
# Optional, Tuple and Union instead of `X | None`, and the `# propagate_type` and `# edge_updater_type` comments.

import math
from functools import partial
from typing import Any, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, PairTensor, Size, SparseTensor
from torch_geometric.utils import softmax

from ..attention.operation import Backend
from ..attention.pair import Dot
from ..attention.score import Score
from ..features.linear import Linear, product
from ..philox import drops
from .base import Ends, NoneType, _AttentionConv, _check_call, check_ends, each_graph, is_batch, overload
from .mechanisms import _per_head, unrounded


class _Inputs(NamedTuple):
    """The tensors of a call: x of src and of dst, edge features, then the parameters, each weight with its bias."""

    x: Tensor
    x_dst: OptTensor
    edge_attr: OptTensor
    weight_query: Tensor
    bias_query: OptTensor
    weight_key: Tensor
    bias_key: OptTensor
    weight_value: Tensor
    bias_value: OptTensor
    weight_skip: OptTensor
    bias_skip: OptTensor
    weight_edge: OptTensor
    weight_beta: OptTensor


class TransformerConv(_AttentionConv):
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

    All other arguments are those of `GATConv`.

    Raises:
        ValueError: if an argument is out of range.

    Cost: as `GATConv`, with three projections. Edge features take `[E, D]` and `[N, H, D]`: the query is projected by
    W_6 instead of every edge, since q . (W_6 u) = (W_6^T q) . u and W_6 can be taken out of the sum over the edges.

    Example:
        >>> TransformerConv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    _Inputs = _Inputs
    _alpha: OptTensor
    _edge_weight: OptTensor

    def __init__(
        self,
        in_channels: Union[int, Tuple[int, int]],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: Optional[int] = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        edge_dropout: float = 0.0,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(**kwargs)
        self._set_options(
            in_channels=in_channels,
            out_channels=out_channels,
            heads=heads,
            concat=concat,
            dropout=dropout,
            add_self_loops=False,
            fill_value="mean",
            edge_dim=edge_dim,
            edge_dropout=edge_dropout,
            backend=backend,
        )
        self.root_weight = root_weight
        self.beta = beta and root_weight
        self._alpha = None  # set by `message`, read by the call that runs it, as in PyG's layer
        self._edge_weight = None  # set by a call, read by `message`
        src_channels, dst_channels = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        width, total = heads * out_channels, out_channels * (heads if concat else 1)
        self.lin_key = Linear(src_channels, width, bias=bias)
        self.lin_query = Linear(dst_channels, width, bias=bias)
        self.lin_value = Linear(src_channels, width, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, width, bias=False)
        self.lin_skip = Linear(dst_channels, total, bias=bias)
        self.lin_beta = Linear(3 * total, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter again, as `torch.nn.Linear` does."""
        super().reset_parameters()
        lins = self.lin_key, self.lin_query, self.lin_value, self.lin_edge, self.lin_skip, self.lin_beta
        for lin in lins:
            if lin is not None:
                lin.reset_parameters()

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
        """Attend over every neighbourhood; arguments, result and errors as in `GATConv.forward`, for both ends' x.

        As in PyG's layer, any value of `return_attention_weights` but None returns alpha, before dropout.
        """
        H, C = self.heads, self.out_channels
        if not torch.jit.is_scripting():
            if is_batch(x):
                graph = {"edge_index": edge_index, "edge_attr": edge_attr, "edge_weight": edge_weight}
                return each_graph(self, x, return_attention_weights is not None, graph)
            _check_call(x, edge_index, edge_attr, edge_weight, self.in_channels, self.lin_edge)
            check_ends(x, edge_attr, self.lin_edge)
            has_values = isinstance(edge_index, SparseTensor) and edge_index.has_value()
            if edge_attr is None and self.lin_edge is not None and not has_values:
                raise ValueError("the layer has edge_dim, but edge_attr is None. Pass edge_attr of shape (E, D).")

            out = self._whole(x, edge_index, edge_attr, edge_weight, return_attention_weights is not None, None)
            if out is not None:
                return out

        if isinstance(x, Tensor):
            x_src, x_dst = x, x
        else:
            x_src, x_dst = x[0], x[1]
        query = self.lin_query(x_dst).view(-1, H, C)
        key = self.lin_key(x_src).view(-1, H, C)
        value = self.lin_value(x_src).view(-1, H, C)
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)

        ends = (value, query, key)
        if not torch.jit.is_scripting():
            res = x_dst if self.root_weight else None
            return self._run(x, ends, res, edge_index, edge_attr, edge_weight, return_attention_weights is not None)
        out, with_loops, alpha = self._by_messages(ends, edge_index, edge_attr, edge_weight, None)
        out = self._finish(out, x_dst)
        if isinstance(return_attention_weights, bool):
            assert alpha is not None
            if isinstance(edge_index, Tensor):
                assert isinstance(with_loops, Tensor)
                return out, (with_loops, alpha)
            elif isinstance(edge_index, SparseTensor):
                assert isinstance(with_loops, SparseTensor)
                return out, with_loops.set_value(alpha, layout="coo")
        return out

    def _needs_messages(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: bool) -> bool:
        dropped = weights and self.training and drops(self.dropout)  # alpha is returned before dropout
        return dropped or super()._needs_messages(x, edge_index, edge_attr, weights)

    def _attend(self, x: Any, ends: Ends, *args: Any) -> Tuple[Tensor, Any, Any]:
        out, adjacency, alpha = super()._attend(x, ends, *args)
        value = ends[0]
        if self.lin_edge is not None:
            out, of_edges = out.split([self.out_channels, self.lin_edge.in_channels], dim=-1)
            out = out + unrounded(partial(torch.einsum, "nhd,hcd->nhc"), of_edges, self._of_edges())
            out, alpha = out.to(value.dtype), None if alpha is None else alpha.to(value.dtype)
        elif not self.root_weight and self.concat:
            out = out.clone()  # the backward pass needs the operation's own output
        return out, adjacency, alpha

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> Tuple[Tensor, OptTensor]:
        value, query, key = ends
        assert query is not None

        self._edge_weight = edge_weight

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
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if not self.root_weight or res is None:
            return out
        skip = self.lin_skip(res)
        if self.lin_beta is None:
            return out + skip
        beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return beta * skip + (1 - beta) * out

    def _attention(self, adjacency: Any, alpha: Tensor) -> Any:
        # PyG's other layers write alpha into a torch.sparse matrix, this one does not
        return (adjacency, alpha) if isinstance(adjacency, Tensor) else super()._attention(adjacency, alpha)

    def message(  # type: ignore[override]
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: Optional[int],
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

    def _of_edges(self) -> Tensor:
        """W_6, `[H, C, D]`."""
        assert self.lin_edge is not None
        return _per_head(self.lin_edge, self.heads)

    def _score(self, x: Any, ends: Ends, edge_attr: OptTensor) -> Optional[Score]:
        _, x_dst, key = ends
        assert x_dst is not None
        if edge_attr is None:
            return Dot(x_dst, key)
        query_edge = unrounded(partial(torch.einsum, "nhc,hcd->nhd"), x_dst, self._of_edges())
        return Dot(x_dst, key, query_edge, edge_attr)

    def _inputs(self, x: Any, edge_attr: OptTensor, linears: Any) -> Any:
        x, x_dst = (x, None) if isinstance(x, Tensor) else x
        *of_nodes, lin_edge, lin_beta = linears
        both = [tensor for lin in of_nodes for tensor in ((None, None) if lin is None else (lin.weight, lin.bias))]
        ends = [None if lin is None else lin.weight for lin in (lin_edge, lin_beta)]
        return _Inputs._make((x, x_dst, edge_attr, *both, *ends))

    def _linears(self) -> Any:
        nodes = self.lin_query, self.lin_key, self.lin_value, self.lin_skip if self.root_weight else None
        return *nodes, self.lin_edge, self.lin_beta

    def _before(self, inputs: Any, num_dst: int) -> Any:
        H, C = self.heads, self.out_channels
        x, end = inputs.x, inputs.x if inputs.x_dst is None else inputs.x_dst
        query = product(end, inputs.weight_query, inputs.bias_query).view(-1, H, C)
        weights, biases = (inputs.weight_key, inputs.weight_value), (inputs.bias_key, inputs.bias_value)
        if (biases[0] is None) == (biases[1] is None):
            both = product(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))
            key, value = both.view(-1, 2, H, C).unbind(1)
        else:
            key, value = (product(x, *each).view(-1, H, C) for each in zip(weights, biases, strict=True))
        score = Dot(query, key)
        if inputs.edge_attr is not None:
            of_edges = _by_head(query, inputs.weight_edge.view(H, C, -1))
            score = Dot(query, key, of_edges, inputs.edge_attr)
        return value, score, end

    def _after(self, inputs: Any, out: Tensor, res: OptTensor, spent: bool) -> Tensor:
        out = self._with_edges(inputs, out)
        if inputs.weight_skip is None:
            return out.clone() if self.concat and inputs.edge_attr is None else out
        skip = product(res, inputs.weight_skip, inputs.bias_skip)
        if inputs.weight_beta is None:
            return skip.add_(out) if not torch.is_grad_enabled() else out + skip
        beta = F.linear(torch.cat([out, skip, out - skip], -1), inputs.weight_beta).sigmoid()
        return beta * skip + (1 - beta) * out

    def _with_edges(self, inputs: Any, out: Tensor) -> Tensor:
        """The heads side by side, or their mean, of the operation's output and of what it has summed of the edges."""
        C = self.out_channels
        if inputs.edge_attr is not None:
            weight = inputs.weight_edge.view(self.heads, C, -1)
            out = out[..., :C] + _by_head(out[..., C:], weight.transpose(1, 2))
        return out.flatten(1) if self.concat else out.mean(1)

    def _after_back(self, inputs: Any, out: Tensor, grad: Tensor, grads: Any) -> Tensor:
        H, C, end = self.heads, self.out_channels, "x" if inputs.x_dst is None else "x_dst"
        of_skip = grad
        if inputs.weight_beta is not None:
            sums = self._with_edges(inputs, out)
            skip = product(getattr(inputs, end), inputs.weight_skip, inputs.bias_skip)
            terms, (w_out, w_skip, w_both) = torch.cat([sums, skip, sums - skip], -1), inputs.weight_beta.chunk(3, 1)
            beta = F.linear(terms, inputs.weight_beta).sigmoid()
            of_gate = (grad * (skip - sums)).sum(1, keepdim=True) * beta * (1 - beta)
            grads["weight_beta"] = of_gate.t().mm(terms)
            of_skip = beta * grad + of_gate * (w_skip - w_both)
            grad = (1 - beta) * grad + of_gate * (w_out + w_both)
        if inputs.weight_skip is not None:
            grads.of_linear(of_skip, end, "weight_skip", "bias_skip")
        grad = grad.view(-1, H, C) if self.concat else (grad / H).unsqueeze(1).expand(-1, H, C)
        if inputs.edge_attr is None:
            return grad
        weight = inputs.weight_edge.view(H, C, -1)
        of_weight = torch.bmm(grad.permute(1, 2, 0), out[..., C:].transpose(0, 1))
        grads["weight_edge"] = of_weight.view_as(inputs.weight_edge)
        return torch.cat([grad, _by_head(grad, weight)], -1)

    def _before_back(self, inputs: Any, value: Tensor, score: Any, of: Any, grads: Any) -> None:
        of_query, end = of["x_dst"], "x" if inputs.x_dst is None else "x_dst"
        if inputs.edge_attr is not None:
            of_edges, weight = of["query_edge"], inputs.weight_edge.view(self.heads, self.out_channels, -1)
            of_query = of_query + _by_head(of_edges, weight.transpose(1, 2))
            product = torch.bmm(score.x_dst.permute(1, 2, 0), of_edges.transpose(0, 1))
            grads.add("weight_edge", product.view_as(inputs.weight_edge))
            if grads.needs["edge_attr"]:
                grads["edge_attr"] = of["edge_attr"]
        grads.of_linear(of_query.flatten(1), end, "weight_query", "bias_query")
        of_key, of_value = of["key"].flatten(1), of["x"].flatten(1)
        width = of_key.size(1)
        if of_key.stride(0) == 2 * width:  # side by side, as keys and values are
            both = of_key.as_strided((of_key.size(0), 2 * width), (2 * width, 1))
            grads.of_linear(both, "x", "weight_key weight_value", "bias_key bias_value")
        else:
            grads.of_linear(of_key, "x", "weight_key", "bias_key")
            grads.of_linear(of_value, "x", "weight_value", "bias_value")


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[N, H, C]` times each head's matrix `[H, C, D]`: `[N, H, D]`."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
