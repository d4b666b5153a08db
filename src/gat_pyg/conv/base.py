"""The base of all layers: their options, the way that a call takes, and the end of a forward."""

# PyG's templates read the source of this module and import all its names: no `__all__`.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import Adj, OptTensor, Size, SparseTensor
from torch_geometric.utils import is_sparse, is_torch_sparse_tensor
from torch_geometric.utils.sparse import set_sparse_value

from ..attention.additive import Additive
from ..attention.fused import drop_edges, is_spent
from ..attention.operation import Backend, attend, has_operator
from ..attention.score import Score
from ..features.linear import autocast_dtype
from ..graph.adjacency import EdgeList, neighbourhoods, with_self_loops
from ..graph.edges import Edges
from ..graph.remembered import _outside, is_traced
from ..kernels.device import unsupported_reason
from ..kernels.models import in_forward_mode
from ..philox import draw_seed, drops
from .autograd_node import KINDS, Grads, LayerNode, Plan, finished, parameters_of, rounded
from .checks import check_call, check_features, check_names, check_options, full_size, graph_size, refuse_matrix
from .few import run_few
from .loops import features_with_loops, replace_loops, weights_with_loops
from .mechanisms import ONE_END
from .messages import Ends, MessageConv


class AttentionConv(MessageConv):
    """The base of all layers, each of which defines its equations and their transposes.

    - `_project(x, size)` returns the projected features, and the term of the skip connection.
    - `_score(x, ends, edge_attr)` returns the `Score`; None if it needs the features of each edge.
    - `_finish(out, res, spent)` maps the operation's output to the layer's.
    - `_after_back` and `_before_back` add their gradients, see `autograd_node`.
    - `_messages` computes the same from each edge's message, see `MessageConv`.
    """

    _PARAMETERS: tuple[str, ...] = ()  # names in the order of the kernels for few edges, "" for those it has not
    _scores_both_ends = True  # x needs a dst, and edge_attr a projection

    def __init__(self, **kwargs: Any) -> None:
        check_names(kwargs, type(self), MessagePassing)
        super().__init__(node_dim=0, **kwargs)
        self.mechanism: Any = None  # a module that scores the edges

    def _set_options(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        edge_dropout: float,
        backend: Backend,
    ) -> None:
        """Check the options that all layers have, and set them."""
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.dropout, self.edge_dim, self.edge_dropout, self.backend = dropout, edge_dim, edge_dropout, backend
        check_options(self)

    def reset_parameters(self) -> None:
        """Initialise every parameter again: weights as their linear map does, vectors Glorot uniform, biases zero."""
        super().reset_parameters()
        names = {name.partition(".")[0] for name in self._PARAMETERS}
        values = [each for each in (*self._modules.items(), *self._parameters.items()) if each[0] in names]
        for name, value in (*values, ("mechanism", self.mechanism)):
            if hasattr(value, "reset_parameters"):
                value.reset_parameters()
            elif isinstance(value, Tensor):
                (zeros if name == "bias" else glorot)(value)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
        edge_weight: OptTensor = None,
    ) -> Any:
        """Attend over every neighbourhood; arguments, result and errors as in `GATConv.forward`, for both ends' x."""
        return self._run(x, edge_index, edge_attr, edge_weight, self._returns_alpha(return_attention_weights))

    def _returns_alpha(self, flag: bool | None) -> bool:
        return bool(flag)

    def _run(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: OptTensor,
        edge_weight: OptTensor,
        weights: bool,
        size: Size = None,
    ) -> Any:
        """Compute a forward: as one autograd node, by the operation, or by PyG's messages.

        Args:
            x, edge_index, edge_attr, edge_weight, size: as in `GATConv.forward`.
            weights: whether to return alpha.
        """
        if edge_weight is None and size is None and not weights:
            out = run_few(self, x, edge_index, edge_attr)
            if out is not None:
                return out
        if is_batch(x):
            graph = {"edge_index": edge_index, "edge_attr": edge_attr, "edge_weight": edge_weight}
            return each_graph(self, x, weights, graph if size is None else {**graph, "size": size})
        check_call(self, x, edge_index, edge_attr, edge_weight)
        size = None if size is None else full_size(size, x)
        traced, by_messages = is_traced(edge_index), self._needs_messages(x, edge_index, edge_attr, weights)
        tensors = None if weights or traced or by_messages else self._tensors(x, edge_attr)
        if tensors is not None:
            edges, tensors[2], edge_weight = self._rows(x, edge_index, edge_attr, edge_weight, size, traced)
            dropout, edges = self.dropout if self.training else 0.0, self._drop_edges(edges)
            seed = draw_seed(edges.src.device, dropout) if drops(dropout) else None
            dtype = autocast_dtype(tensors[0])
            if dtype is not None and not self._folds(x):  # once for all linear maps, which alone read x
                tensors[:2] = [rounded(end, dtype) for end in tensors[:2]]
            return LayerNode.apply(Plan(self, edges, dropout, dtype), seed, edge_weight, *tensors)

        ends, res = self._project(x, size)
        if by_messages or (traced and not self._compiles(x, ends, edge_index, edge_attr)):
            out, edge_index, alpha = self._by_messages(ends, edge_index, edge_attr, edge_weight, size)
            if weights and alpha is None:
                raise ValueError(
                    "there is no alpha to return: `message` has to set self._alpha, as TransformerConv's does."
                )
            if self.flow == "target_to_source" and res is not None and res.size(0) != out.size(0):
                raise ValueError(
                    f"the skip connection has {res.size(0)} rows, one for each dst, but with flow='target_to_source' "
                    f"the output has {out.size(0)}, one for each src. Pass edge_index.flip(0) and the default flow."
                )
            out = self._finish(out, res)
        else:
            edges, edge_attr, edge_weight = self._rows(x, edge_index, edge_attr, edge_weight, size, traced)
            score = self._score(x, ends, edge_attr)
            if score is None:
                score = edge_scores(self.mechanism, ends[0], ends[1], edge_attr, edges)
            result: Any = attend(
                ends[0],
                score,
                self._drop_edges(edges),
                edge_weight=edge_weight,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
                return_attention_weights=weights,
            )
            out, alpha = result if weights else (result, None)
            out = finished(self, out, ends[0], score, res, not is_compiling() and is_spent(out))
            if score.edge_values is not None and alpha is not None:
                alpha = alpha.to(ends[0].dtype)
            if weights:
                edge_index, alpha = self._without_replaced(edge_index, edges, alpha)
        return (out, self._attention(edge_index, alpha)) if weights else out

    def _tensors(self, x: Any, edge_attr: OptTensor) -> list[Any] | None:
        """Return the inputs and parameters; None if the layer cannot be one autograd node of them."""
        src, dst = (x, None) if isinstance(x, Tensor) else x
        if (
            unsupported_reason(src) is not None
            or (src is not x and dst is None)
            or (parameters := parameters_of(self)) is None
        ):
            return None
        dtype, dtypes = src.dtype, [src.dtype]
        if autocast_dtype(src) is not None:
            dtype, dtypes = torch.float32, [torch.float32, torch.bfloat16, torch.float16]
        tensors = [src, dst, edge_attr, *parameters]
        present = [t for t in tensors if t is not None]
        known = all(type(t) in KINDS and t.dtype in dtypes and t.layout == torch.strided for t in present)
        wide = dtype in (torch.float32, torch.float64) and all(t is None or t.dtype == dtype for t in parameters)
        return tensors if known and wide else None

    def _compiles(self, x: Any, ends: Ends, edge_index: Any, edge_attr: OptTensor) -> bool:
        """Return True if a traced call gets the whole operation, rather than PyG's message passing.

        A meta or fake tensor outside of a compiler gets messages, as with PyG, unless their number depends on the ids.
        """
        drops = self.training and (self.dropout > 0.0 or self.edge_dropout > 0.0)
        if not is_compiling() and not (self.add_self_loops or (self.training and self.edge_dropout > 0.0)):
            return False
        if (
            in_forward_mode()
            or not isinstance(edge_index, Tensor)
            or isinstance(edge_index, EdgeIndex)
            or edge_index.layout != torch.strided
        ):
            return False
        exporting = torch.compiler._is_exporting_flag
        if exporting and not drops and self.backend != "fused" and self.mechanism is None:
            return True  # a score that is computed here would be part of the program
        score = self._score(x, ends, edge_attr)
        return score is not None and (has_operator(self.backend, score, ends[0]) or (exporting and not drops))

    def _rows(
        self, x: Any, edge_index: Any, edge_attr: OptTensor, edge_weight: OptTensor, size: Size, traced: bool
    ) -> tuple[Any, OptTensor, OptTensor]:
        """Return the neighbourhoods, and the features and weights of their rows; arguments as of `_run`."""
        src, dst = (x, x) if isinstance(x, Tensor) else x
        num_src, num_dst = src.size(0), None if dst is None else dst.size(0)
        if src is x and size is not None:
            num_dst = min(num_src, size[1])
        num_src, num_dst = graph_size(num_src, num_dst, edge_index, size)
        edges: Any = EdgeList(edge_index, num_dst, self.add_self_loops, self.flow)
        if not traced:
            edges = neighbourhoods(edge_index, num_src, num_dst, add_self_loops=self.add_self_loops, flow=self.flow)
        if edge_attr is not None:
            check_features(edge_attr, edge_index.size(1), self.edge_dim)
            if self.add_self_loops:
                grouped = None if traced else edges
                edge_attr = features_with_loops(self, edge_index, edge_attr, num_src, num_dst, grouped)
            edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        if self.explain is True:
            mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
            edge_weight = mask if edge_weight is None else (edge_weight.t() * mask).t()
        if edge_weight is not None:
            num_loops, num_edges = min(num_src, num_dst), edges.num_edges if traced else edges.num_rows
            if self.add_self_loops and is_sparse(edge_index):  # its loops are among the other edges
                refuse_matrix()
            if self.add_self_loops and not traced:
                num_edges -= num_loops
            edge_weight = weights_with_loops(self, edge_weight, num_edges, num_loops)
        return edges, edge_attr, edge_weight

    def _drop_edges(self, edges: Any) -> Any:
        """Return the edges without those that `edge_dropout` drops, which are never self-loops; the rows stay."""
        if not self.training or self.edge_dropout == 0.0:
            return edges
        if isinstance(edges, EdgeList):
            return edges._replace(drop_seed=draw_seed(edges.edge_index.device), drop=self.edge_dropout)
        with _outside():  # one draw for all that torch.func.vmap maps over
            return drop_edges(edges, draw_seed(edges.src.device), self.edge_dropout)

    def _without_replaced(self, edge_index: Any, edges: Any, alpha: Any) -> tuple[Any, Tensor]:
        """Return the adjacency with loops, and alpha in its order, without the rows of the graph's own loops."""
        if isinstance(edges, EdgeList):
            if self.add_self_loops:
                edge_index, rows = replace_loops(edge_index, alpha.size(0) - edge_index.size(1))
                alpha = alpha.index_select(0, rows)
            return edge_index, alpha
        if self.add_self_loops:
            edge_index = with_self_loops(edge_index, edges.num_src, edges.num_dst, self.flow)
        return edge_index, alpha if edges.rows is None else alpha.index_select(0, edges.rows)

    def _both_ends(self, x: Any, size: Size, lin_src: Any, lin_dst: Any, shared: bool) -> tuple[Ends, OptTensor]:
        """Return W h `[N, H, C]` of src and of dst, the same if W is shared, and the term of the skip connection."""
        H, C = self.heads, self.out_channels
        src, dst = (x, x) if isinstance(x, Tensor) else x
        res = None if self.res is None or dst is None else self.res(dst)
        z_src = lin_src(src).view(-1, H, C)
        z_dst: Any = z_src if shared and dst is x else None if dst is None else lin_dst(dst).view(-1, H, C)
        if dst is x and size is not None and size[1] < z_src.size(0):
            z_dst, res = z_dst[: size[1]], None if res is None else res[: size[1]]
        return (z_src, z_dst, z_src), res

    def _folds(self, x: Any) -> bool:
        """Return True if the scores are linear maps of x itself."""
        return False

    def _finish(self, out: Tensor, res: OptTensor, spent: bool = False) -> Tensor:
        """Map the operation's output to the layer's; `spent`: whether `out` may be overwritten."""
        return self._combine(out, res, self.bias, spent)

    def _combine(self, out: Tensor, res: OptTensor, bias: OptTensor, spent: bool) -> Tensor:
        """Equation (5) or (6), then the skip connection and the bias; in place where nobody else needs the values."""
        if not self.concat:
            out = out.mean(dim=1)
        elif spent:
            out = torch.ops.aten._unsafe_view(out, [out.size(0), self.heads * self.out_channels])  # FSDP warns of views
        else:
            out = out.flatten(1)
        if res is not None:
            out = out.add_(res) if spent and out.dtype == res.dtype else out + res
        if bias is not None:
            out = out.add_(bias) if spent and out.dtype == bias.dtype else out + bias
        elif self.concat and res is None and not spent:
            out = out.clone()  # the backward pass needs the operation's own output: what is returned may be written to
        return out

    def _after_back(self, out: Tensor, grad: Tensor, grads: Grads) -> Tensor:
        """Add the gradients of what `_finish` reads, and return that of the operation's output."""
        if grads.needs.get("bias"):
            grads["bias"] = grad.sum(0)
        if self.res is not None:
            grads.of_linear(grad, grads.end, "res")
        H, C = self.heads, self.out_channels
        return grad.view(-1, H, C) if self.concat else (grad / H).unsqueeze(1).expand(-1, H, C)

    def _attention(self, adjacency: Any, alpha: Tensor) -> Any:
        """Return the attention weights in the form that PyG's layer returns."""
        if isinstance(adjacency, SparseTensor):
            return adjacency.set_value(alpha, layout="coo")
        if is_torch_sparse_tensor(adjacency):
            return set_sparse_value(adjacency, alpha), alpha
        return adjacency, alpha

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def edge_scores(function: Any, x_src: Tensor, x_dst: OptTensor, edge_attr: OptTensor, edges: Edges) -> Score:
    """Score every edge by a function of the features of both ends, `[E, H, C]` each, and its own, `[E, D]`."""
    index = edges.index.long()  # int64: backward adds by these indices, see Edges.wide
    if edges.rows is not None:  # the graph's own loops, which are replaced, are not scored
        index, edge_attr = index[:, edges.rows], None if edge_attr is None else edge_attr[edges.rows]
    src, dst = index
    if x_dst is None:
        raise ValueError(ONE_END)
    score = function(x_dst.index_select(0, dst), x_src.index_select(0, src), edge_attr)
    if edges.rows is not None:
        score = score.new_zeros(edges.num_rows, score.size(1)).index_copy(0, edges.rows.long(), score)
    return Additive(score_edge=score, negative_slope=1.0)


def is_batch(x: Any) -> bool:
    """Return True for features `[B, N, F]` of B graphs with the same edges, or a pair of them."""
    part = x[0] if isinstance(x, (tuple, list)) else x
    return isinstance(part, Tensor) and part.dim() == 3


def each_graph(layer: Any, x: Any, weights: bool, graph: Any) -> Any:
    """Call a layer on features `[B, N, F]` of B graphs with the same edges, as one call of the operation.

    `graph` has the other arguments by name.
    """
    adjacency: Any = None

    def alone(x: Any) -> Any:
        nonlocal adjacency
        if not weights:
            return layer(x, **graph)
        out, (adjacency, alpha) = layer(x, **graph, return_attention_weights=True)
        return out, alpha

    x = tuple(x) if isinstance(x, list) else x
    dims = tuple(None if part is None else 0 for part in x) if isinstance(x, tuple) else 0
    empty = (x if isinstance(x, Tensor) else x[0]).size(0) == 0
    if empty:  # torch.func.vmap maps over one graph at least
        x = tree_map_only(Tensor, lambda part: F.pad(part, (0, 0, 0, 0, 0, 1)), x)
    result = torch.func.vmap(alone, in_dims=(dims,), randomness="different")(x)
    if empty:
        result = tree_map_only(Tensor, lambda part: part[:0], result)
    return (result[0], (adjacency, result[1])) if weights else result
