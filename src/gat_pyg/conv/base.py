"""The base of all layers: checks, the fused and the message-passing way through a layer, self-loops."""

# PyG compiles this module's source into templates and TorchScript. So: no `__all__`, no postponed annotations, typing's
# Optional, Tuple and Union instead of `X | None`, and the `# propagate_type` and `# edge_updater_type` comments.

import difflib
import functools
import inspect
import numbers
import typing
from typing import Any, Callable, Dict, Iterable, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj, OptTensor, Size, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, degree, is_sparse, is_torch_sparse_tensor, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value

from ..attention.additive import Additive
from ..attention.fused import drop_edges, is_spent
from ..attention.operation import BACKENDS, attend, check_devices, has_operator
from ..attention.score import Score
from ..features.linear import Linear
from ..graph.adjacency import EdgeList, neighbourhoods, with_self_loops
from ..graph.edges import Edges, is_remote
from ..graph.memory import load_cpu_kernels
from ..graph.remembered import _outside, is_traced, remembered
from ..kernels.device import unsupported_reason
from ..kernels.models import in_forward_mode
from ..philox import draw_kept, draw_seed, drops
from .mechanisms import ONE_END, _computes_a_product, _plain, hooked
from .whole import Plan, Whole

if typing.TYPE_CHECKING:
    from typing import overload as overload

    NoneType: typing.TypeAlias = None
else:
    from torch_geometric.typing import NoneType as NoneType  # Optional[Tensor], which TorchScript needs

    try:  # TorchScript compiles each overload of `forward`
        from torch.jit import _overload_method as overload
    except ImportError:  # a torch without TorchScript
        from typing import overload as overload

# The projected features of src `[N_src, H, C]` and of dst `[N_dst, H, C]`, then those of src that are scored, its keys
Ends = Tuple[Tensor, OptTensor, Tensor]


def check_layer(heads: Any, out_channels: Any, dropout: Any) -> None:
    """Raise ValueError where a layer's size or dropout is out of range."""
    _check_whole("heads", heads, 1, "at least 1")
    _check_whole("out_channels", out_channels, 1, "at least 1")
    check_probability("dropout", dropout)


def _check_whole(name: str, value: Any, least: int, expected: str) -> None:
    if not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} is {value!r}, expected a whole number, {expected}.")
    if value < least:
        raise ValueError(f"{name} is {value}, expected {expected}.")


def check_probability(name: str, value: Any) -> None:
    """Raise ValueError for a value that is no probability."""
    if not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} is {value!r}, expected a probability in [0, 1].")


def _check_widths(in_channels: Any, edge_dim: Any) -> None:
    for width in in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,):
        _check_whole("in_channels", width, -1, "at least 0, or -1: as in the first call")
    if edge_dim is not None:
        _check_whole("edge_dim", edge_dim, -1, "at least 0, or -1: as in the first call")


def check_names(names: Iterable[str], *targets: Callable[..., Any]) -> None:
    """Raise TypeError for a name that is not an argument of one of these classes; it names the first class."""
    known = {name: None for target in targets for name in inspect.signature(target).parameters}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"{targets[0].__name__} has no argument {name}.{hint}")


class _AttentionConv(MessagePassing):
    """The base of all layers: options, the choice of the way a call takes, self-loops, and the end of a forward."""

    _NAMES: Any = ()  # of the parameters and linear maps
    _bound = False  # whether these are tensors of an autograd node, see `conv.whole`

    def __init__(self, **kwargs: Any) -> None:
        check_names(kwargs, type(self), MessagePassing)
        super().__init__(node_dim=0, **kwargs)

    def _set_options(self, **options: Any) -> None:
        """Check the options of a layer, by name, and set them as attributes."""
        for name, value in options.items():
            setattr(self, name, value)
        check_layer(self.heads, self.out_channels, self.dropout)
        check_probability("edge_dropout", self.edge_dropout)
        _check_widths(self.in_channels, self.edge_dim)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")

    def _run(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: OptTensor,
        edge_weight: OptTensor,
        weights: bool,
        size: Size = None,
    ) -> Any:
        """Compute a forward outside of TorchScript: as one autograd node, by the operation, or by PyG's messages.

        Args:
            x, edge_index, edge_attr, edge_weight, size: as in `GATConv.forward`.
            weights: whether to return alpha.
        """
        traced, by_messages = is_traced(edge_index), self._needs_messages(x, edge_index, edge_attr, weights)
        tensors = None if weights or traced or by_messages else self._tensors(x, edge_attr)
        if tensors is not None:
            rows = self._rows(x, edge_index, edge_attr, edge_weight, size, traced)
            edges, tensors["edge_attr"], edge_weight = rows
            dropout, edges = self.dropout if self.training else 0.0, self._drop_edges(edges)
            seed = draw_seed(edges.src.device, dropout) if drops(dropout) else None
            return Whole.apply(Plan(self, edges, dropout, tuple(tensors)), seed, edge_weight, *tensors.values())

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
                score = edge_scores(self.mechanism, *ends[:2], edge_attr, edges)
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
            out = self._finish(out, res, not is_compiling() and is_spent(out))
            if score.edge_values is not None:  # which autocast does not round
                out, alpha = out.to(ends[0].dtype), None if alpha is None else alpha.to(ends[0].dtype)
            if weights:
                edge_index, alpha = self._without_replaced(edge_index, edges, alpha)
        return (out, self._attention(edge_index, alpha)) if weights else out

    def _tensors(self, x: Any, edge_attr: OptTensor) -> Optional[Dict[str, OptTensor]]:
        """Return the inputs and parameters by name; None if the layer cannot be one autograd node of them."""
        src, dst = (x, None) if isinstance(x, Tensor) else x
        if (
            self.backend not in ("auto", "fused")
            or src.dtype not in (torch.float32, torch.float64)
            or torch._C._are_functorch_transforms_active()
            or in_forward_mode()
            or unsupported_reason(src) is not None
            or torch.is_autocast_enabled(src.device.type)
            or getattr(self, "mechanism", None) is not None
            or (src is not x and dst is None)
        ):
            return None
        tensors = {"x": src, "x_dst": dst, "edge_attr": edge_attr}
        parameters, modules = self._parameters, self._modules  # getattr looks there last
        for name in self._NAMES:
            value = parameters[name] if name in parameters else modules.get(name)
            value = getattr(self, name) if value is None else value
            if isinstance(value, Module):
                if not _computes_a_product(value):
                    return None
                tensors[f"{name}.weight"], tensors[f"{name}.bias"] = value.weight, value.bias
            elif value is not None:
                tensors[name] = value
        for tensor in tensors.values():
            if tensor is not None and (
                tensor.dtype != src.dtype or tensor.layout != torch.strided or type(tensor) not in _KINDS
            ):
                return None
        return tensors

    def _after_back(self, out: Tensor, grad: Tensor, grads: Any) -> Tensor:
        """Add the gradients of what `_finish` reads, and return that of the operation's output."""
        if grads.needs.get("bias"):
            grads["bias"] = grad.sum(0)
        if self.res is not None:
            grads.of_linear(grad, grads.end, "res")
        H, C = self.heads, self.out_channels
        return grad.view(-1, H, C) if self.concat else (grad / H).unsqueeze(1).expand(-1, H, C)

    def _needs_messages(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: bool) -> bool:
        """Return True if torch.jit.trace, an explainer, a hook, a subclass or another aggregation needs messages."""
        return (
            torch.jit.is_tracing()
            or (self.explain is True and self._edge_mask is None)
            or self.decomposed_layers > 1
            or type(self.aggr_module) is not SumAggregation
            or hooked(self.aggr_module)
            or (self.flow == "target_to_source" and not isinstance(x, Tensor))
            or any([getattr(self, hooks) for hooks in _HOOKS])  # noqa: C419 - a list is faster
            or self._overrides_a_step()
            or (edge_attr is not None and self.lin_edge is not None and not _plain(self.lin_edge))
            or (is_sparse(edge_index) and (self.edge_dim is not None or edge_attr is not None))
        )

    def _overrides_a_step(self) -> bool:
        """Return True if a step of message passing is neither this package's, nor PyG's or made from its template."""
        attributes, kind = self.__dict__, type(self)
        # torch 2.10 cannot compile `self.message.__module__`
        steps = tuple([attributes[step] if step in attributes else getattr(kind, step) for step in _STEPS])
        known = _are_known.__wrapped__ if is_compiling() else _are_known
        return not known(steps, f"{kind.__module__}_{kind.__name__}")

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
        if exporting and not drops and self.backend != "fused" and getattr(self, "mechanism", None) is None:
            return True  # a score that is computed here would be part of the program
        score = self._score(x, ends, edge_attr)
        return score is not None and (has_operator(self.backend, score, ends[0]) or (exporting and not drops))

    def _rows(
        self, x: Any, edge_index: Any, edge_attr: OptTensor, edge_weight: OptTensor, size: Size, traced: bool
    ) -> Tuple[Any, OptTensor, OptTensor]:
        """Return the neighbourhoods, and the features and weights of their rows; arguments as of `_run`."""
        src, dst = (x, x) if isinstance(x, Tensor) else x
        num_src, num_dst = src.size(0), None if dst is None else dst.size(0)
        if src is x and size is not None:
            num_dst = min(num_src, size[1])
        num_src, num_dst = _graph_size(num_src, num_dst, edge_index, size)
        edges: Any = EdgeList(edge_index, num_dst, self.add_self_loops, self.flow)
        if not traced:
            edges = neighbourhoods(edge_index, num_src, num_dst, add_self_loops=self.add_self_loops, flow=self.flow)
        if edge_attr is not None:
            has_loops = traced or edges.num_edges < edges.num_rows  # a compiler cannot know
            edge_attr = self._features_with_loops(edge_index, edge_attr, num_src, num_dst, edges, has_loops)
        return edges, edge_attr, self._weight_with_loops(edge_weight, num_src, num_dst, edges, is_sparse(edge_index))

    def _without_replaced(self, edge_index: Any, edges: Any, alpha: Any) -> Tuple[Any, Tensor]:
        """The adjacency with loops, and alpha in its order, without the rows of the graph's own loops."""
        if not isinstance(edges, EdgeList):
            if self.add_self_loops:
                edge_index = with_self_loops(edge_index, edges.num_src, edges.num_dst, self.flow)
            return edge_index, alpha if edges.rows is None else alpha.index_select(0, edges.rows)
        if not self.add_self_loops:
            return edge_index, alpha
        num_edges, device = edge_index.size(1), edge_index.device  # in plain torch for a compiler
        rows = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
        loops = torch.arange(alpha.size(0) - num_edges, device=device)  # int64, as PyG adds them
        edge_index = torch.cat([edge_index.index_select(1, rows), loops.expand(2, -1)], 1)
        return edge_index, alpha.index_select(0, torch.cat([rows, loops + num_edges]))

    def _drop_edges(self, edges: Any) -> Any:
        """The edges without those that `edge_dropout` drops, which are never self-loops; the rows stay."""
        if not self.training or self.edge_dropout == 0.0:
            return edges
        if isinstance(edges, EdgeList):
            return edges._replace(drop_seed=draw_seed(edges.edge_index.device), drop=self.edge_dropout)
        with _outside():  # one draw for all that torch.func.vmap maps over
            return drop_edges(edges, draw_seed(edges.src.device), self.edge_dropout)

    def _weight_with_loops(
        self, edge_weight: OptTensor, num_src: int, num_dst: int, edges: Any, is_matrix: bool
    ) -> OptTensor:
        """The weights `[R, H]` of the edges, and those of an explainer; 1 for added loops."""
        if self.explain is True:
            mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
            edge_weight = mask if edge_weight is None else (edge_weight.t() * mask).t()
        if edge_weight is None:
            return None
        num_edges = edges.num_edges if isinstance(edges, EdgeList) else edges.num_rows
        if self.add_self_loops and is_matrix:  # its loops are among the other edges
            _refuse_matrix()
        if self.add_self_loops and not isinstance(edges, EdgeList):
            num_edges -= min(num_src, num_dst)
        _check_weight(edge_weight, num_edges, self.heads)
        if self.add_self_loops:
            ones = edge_weight.new_ones(min(num_src, num_dst), *edge_weight.shape[1:])
            edge_weight = torch.cat([edge_weight, ones])
        return (edge_weight if edge_weight.dim() == 2 else edge_weight.unsqueeze(1)).expand(-1, self.heads)

    def _by_messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> Tuple[Tensor, Adj, OptTensor]:
        """Run PyG's message passing; arguments as of `_run`.

        Returns:
            The output `[N_dst, H, C]`, the adjacency with loops and alpha `[E, H]` in its order, 0 for dropped edges.
        """
        x_src, x_dst, _ = ends
        num_src, num_dst = x_src.size(0), x_src.size(0) if x_dst is None else x_dst.size(0)
        if size is not None:
            num_src, num_dst = size
        if isinstance(edge_index, SparseTensor):
            with_loops = self._loops_of_matrix(edge_index, edge_weight)
            out, alpha = self._messages(ends, with_loops, edge_attr, edge_weight, size)
            return out, with_loops, alpha
        with_loops, edge_attr, edge_weight = self._message_edges(edge_index, edge_attr, edge_weight, num_src, num_dst)
        rows = self._kept_rows(with_loops)
        if rows is None:
            out, alpha = self._messages(ends, with_loops, edge_attr, edge_weight, size)
            return out, with_loops, alpha
        edge_attr = None if edge_attr is None else edge_attr[rows]
        edge_weight = None if edge_weight is None else edge_weight[rows]
        out, alpha = self._messages(ends, with_loops[:, rows], edge_attr, edge_weight, size)
        if alpha is not None:
            alpha = alpha.new_zeros(with_loops.size(1), alpha.size(1)).index_copy(0, rows, alpha)
        return out, with_loops, alpha

    def _message_edges(
        self, edge_index: Tensor, edge_attr: OptTensor, edge_weight: OptTensor, num_src: int, num_dst: int
    ) -> Tuple[Tensor, OptTensor, OptTensor]:
        """Return the edges with loops, dense or sparse, their features, and weights `[E, 1 or H]`."""
        if not torch.jit.is_scripting():
            if edge_attr is not None and edge_index.layout in (torch.sparse_csr, torch.sparse_csc):
                edge_attr = _features_by_row(edge_index, edge_attr)
        edge_index = self._as_pyg_takes_it(edge_index)
        if edge_weight is not None:
            if edge_index.layout != torch.strided:
                _refuse_matrix()
            _check_weight(edge_weight, edge_index.size(1), self.heads)
            edge_weight = edge_weight if edge_weight.dim() == 2 else edge_weight.unsqueeze(1)
        if self.add_self_loops:
            is_edge = edge_index[0] != edge_index[1] if edge_weight is not None else None
            edge_index, edge_attr = self._replace_loops(edge_index, edge_attr, num_src, num_dst)
            if edge_weight is not None:
                ones = edge_weight.new_ones(min(num_src, num_dst), edge_weight.size(1))
                edge_weight = torch.cat([edge_weight[is_edge], ones])
        return edge_index, edge_attr, edge_weight

    def _kept_rows(self, edge_index: Tensor) -> OptTensor:
        """Return the rows of the edges that `edge_dropout` keeps; None if it keeps all."""
        if not self.training or self.edge_dropout == 0.0:
            return None
        if edge_index.layout != torch.strided:
            _refuse_matrix()
        if torch.jit.is_scripting():
            keep = torch.rand(edge_index.size(1), device=edge_index.device) >= self.edge_dropout
        else:
            with _outside():
                seed = draw_seed(edge_index.device)
                keep = draw_kept(seed, int(edge_index.size(1)), 1, self.edge_dropout).squeeze(1)
        return (keep | (edge_index[0] == edge_index[1])).nonzero().squeeze(1)

    def _loops_of_matrix(self, adjacency: SparseTensor, edge_weight: OptTensor) -> SparseTensor:
        """Return a `SparseTensor` with loops."""
        if edge_weight is not None or (self.training and self.edge_dropout > 0.0):
            _refuse_matrix()
        if not self.add_self_loops:
            return adjacency
        if self.edge_dim is not None:
            raise NotImplementedError(
                "edge_dim with add_self_loops needs an edge list, and edge_index is a SparseTensor. "
                "Pass edge_index of shape (2, E), or add_self_loops=False."
            )
        return torch_sparse.set_diag(adjacency)

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> Tuple[Tensor, OptTensor]:
        """Return the output `[N_dst, H, C]` and alpha `[E, H]` by PyG's `edge_updater` and `propagate`."""
        raise NotImplementedError

    def _project(self, x: Any, size: Size) -> Tuple[Ends, OptTensor]:
        """Return the projected features, and what `_finish` adds for the skip connection."""
        raise NotImplementedError

    def _score(self, x: Any, ends: Ends, edge_attr: OptTensor) -> Optional[Score]:
        """Return the scores of the input and its projections, or None if they need the features of each edge."""
        raise NotImplementedError

    def _features_with_loops(
        self,
        edge_index: Tensor,
        edge_attr: Tensor,
        num_src: int,
        num_dst: int,
        edges: Any = None,
        has_loops: bool = True,
    ) -> Tensor:
        """The features `[R, D]` of the edges, any for the graph's own loops if they are replaced, then of added loops.

        No size depends on an id, so that a compiler can trace it. `has_loops`: whether the graph may have loops.
        """
        if edge_attr.size(0) != edge_index.size(1):
            raise ValueError(
                f"edge_attr has {edge_attr.size(0)} rows, expected one per edge, E = {edge_index.size(1)}."
            )
        width = 1 if edge_attr.dim() == 1 else edge_attr.size(1)
        if self.edge_dim is not None and self.edge_dim != -1 and self.edge_dim != width:
            raise ValueError(f"edge_attr has {width} features, expected edge_dim = {self.edge_dim}.")
        if (
            self.add_self_loops
            and not has_loops
            and self.flow == "source_to_target"
            and _is_summed_by_kernel(edge_attr, self.fill_value)
        ):
            loops = load_cpu_kernels().loop_features(edges, edge_attr, min(num_src, num_dst), self.fill_value == "mean")
            edge_attr = torch.cat([edge_attr, loops])
        elif self.add_self_loops:
            graph = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
            edge_index = graph.long()  # torch's scatter has a wrong gradient for int32, and refuses narrower ids
            places = max(num_src, num_dst)  # PyG reduces over the edges to all nodes, so that it needs a place for each
            if has_loops:
                is_loop = edge_index[0] == edge_index[1]
                is_mul = isinstance(self.fill_value, str) and self.fill_value == "mul"  # torch 2.11 fails at a Tensor
                one = 1 if is_mul else 0  # torch has no second derivative of a product with two zeros
                edge_attr = edge_attr.masked_fill(is_loop.view(-1, *[1] * (edge_attr.dim() - 1)), one)  # even if inf
                if isinstance(self.fill_value, str):
                    edge_index, places = edge_index.masked_fill(is_loop, places), places + 1  # the last is of no node
            fill = _loop_features(edge_index, edge_attr, places, self.fill_value, graph, has_loops)
            edge_attr = torch.cat([edge_attr, fill[: min(num_src, num_dst)]])
        return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr

    def _as_pyg_takes_it(self, edge_index: Tensor) -> Tensor:
        """PyG's message passing has no CSC, and a wrong gradient for int32 ids (PyG 2.8.1 with torch 2.13)."""
        if not torch.jit.is_scripting():
            if edge_index.layout == torch.sparse_csc:
                return edge_index.to_sparse_csr()
            if edge_index.layout != torch.strided:
                return edge_index
        return edge_index.long()

    def _replace_loops(
        self, edge_index: Tensor, edge_attr: OptTensor, num_src: int, num_dst: int
    ) -> Tuple[Tensor, OptTensor]:
        """Replace self-loops by one for each of the first min(N_src, N_dst) nodes, as PyG's layers do.

        The features of a loop are those of the edges that point to its node, reduced by `fill_value`.
        """
        if not torch.jit.is_scripting():
            if edge_attr is not None and is_torch_sparse_tensor(edge_index):
                raise NotImplementedError(
                    "edge_attr with add_self_loops needs an edge list, and edge_index is a sparse matrix. "
                    "Pass edge_index of shape (2, E), or add_self_loops=False."
                )
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        num_loops, num_nodes = min(num_src, num_dst), max(num_src, num_dst)
        if edge_attr is None or is_compiling() or num_loops == num_nodes:
            return add_self_loops(edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_loops)
        # PyG reduces over the edges to all nodes, so it needs a row for each
        edge_index, edge_attr = add_self_loops(edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_nodes)
        num_edges = edge_index.size(1) - num_nodes + num_loops
        assert edge_attr is not None
        return edge_index[:, :num_edges], edge_attr[:num_edges]

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
        elif self.concat and res is None and not spent and not torch.jit.is_scripting():
            out = out.clone()  # the backward pass needs the operation's own output: what is returned may be written to
        return out

    def _attention(self, adjacency: Any, alpha: Tensor) -> Any:
        """Return the attention weights in the form that PyG's layer returns."""
        if isinstance(adjacency, SparseTensor):
            return adjacency.set_value(alpha, layout="coo")
        if is_torch_sparse_tensor(adjacency):
            return set_sparse_value(adjacency, alpha), alpha
        return adjacency, alpha

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """A term of equation (4): `[E, H, C]` of each edge's src, weighted by `[E, H]`."""
        return alpha.unsqueeze(-1) * x_j

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


_KINDS = (Tensor, Parameter)
_STEPS = [
    *("propagate", "message", "explain_message", "aggregate", "message_and_aggregate", "update"),
    *("edge_updater", "edge_update"),
]
_HOOKS = [
    f"_{step}_forward_{when}"
    for step in ("propagate", "edge_update", "message", "aggregate")
    for when in ("pre_hooks", "hooks")
]


@functools.lru_cache
def _are_known(steps: Tuple[Callable[..., Any], ...], template: str) -> bool:
    """Return True if all steps of message passing are this package's, PyG's, or from the module that PyG generated."""
    known = __package__, MessagePassing.__module__, template
    return not any(hasattr(step, "__wrapped__") or not (step.__module__ or "").startswith(known) for step in steps)


def _graph_size(num_src: int, num_dst: Optional[int], edge_index: Any, size: Size) -> Tuple[int, int]:
    """Return N_src and N_dst, from the rows of x and, without a row for dst, from the size that the graph declares."""
    if type(edge_index) is Tensor and edge_index.layout == torch.strided:
        if size is None:
            return num_src, num_src if num_dst is None else num_dst
    elif is_sparse(edge_index):
        size = (edge_index.size(1), edge_index.size(0))
    elif isinstance(edge_index, EdgeIndex):
        size = edge_index.sparse_size()
    declared = (None, None) if size is None else tuple(size)
    if num_dst is None:
        num_dst = num_src if declared[1] is None else declared[1]
    if any(n is not None and n != rows for n, rows in zip(declared, (num_src, num_dst), strict=True)):
        raise ValueError(f"x has {num_src} src and {num_dst} dst rows, but the graph's size is {declared}.")
    return num_src, num_dst


def _is_summed_by_kernel(edge_attr: Tensor, fill_value: Any) -> bool:
    """Return True if a compiled kernel can reduce the features of edges: on a CPU, and without a gradient."""
    return (
        isinstance(fill_value, str)
        and fill_value in ("mean", "add", "sum")
        and type(edge_attr) is Tensor
        and edge_attr.is_cpu
        and edge_attr.dtype in (torch.float32, torch.float64)
        and edge_attr.is_contiguous()
        and not (edge_attr.requires_grad or edge_attr.is_neg() or in_forward_mode())
        and not torch._C._are_functorch_transforms_active()
        and load_cpu_kernels() is not None
    )


def _loop_features(
    edge_index: Tensor, edge_attr: Tensor, num_nodes: int, fill_value: Any, graph: Tensor, has_loops: bool
) -> Tensor:
    """PyG's features of added loops; on a GPU, where PyG's scatter adds atomically, sums have the same bits every time.

    Compiled code may add in any order. `graph` is the caller's `edge_index`; with `has_loops`, both ends of its loops
    are the last node in `edge_index`.
    """
    if not (is_remote(edge_attr) and isinstance(fill_value, str) and fill_value in ("add", "sum", "mean")):
        return compute_loop_attr(edge_index, edge_attr, num_nodes, False, fill_value)
    dst, none = edge_index[1], edge_attr.new_zeros(num_nodes, *edge_attr.shape[1:])
    total = none.index_put((dst,), edge_attr, accumulate=True)  # on CUDA by a stable sort
    if fill_value != "mean":
        return total
    return total / _count_edges(graph, num_nodes, has_loops).view(-1, *[1] * (edge_attr.dim() - 1))


@remembered
def _count_edges(edge_index: Tensor, num_nodes: int, has_loops: bool) -> Tensor:
    """Return the number of edges of each dst `[N]`, at least 1; with `has_loops`, loops count for the last."""
    src, dst = edge_index.long()
    dst = dst.masked_fill(src == dst, num_nodes - 1) if has_loops else dst
    return degree(dst, num_nodes, torch.long).clamp(min=1)


def _features_by_row(matrix: Tensor, edge_attr: Tensor) -> Tensor:
    """The features of the edges of a CSR or CSC matrix, in the order of its values, by row."""
    num_edges = matrix.values().size(0)
    if edge_attr.size(0) != num_edges:
        raise ValueError(f"edge_attr has {edge_attr.size(0)} rows, but the sparse matrix has {num_edges} edges.")
    if matrix.layout == torch.sparse_csr:
        return edge_attr
    place, shape = torch.arange(num_edges, device=matrix.device), tuple(matrix.shape[:2])
    by_column = torch.sparse_csc_tensor(matrix.ccol_indices(), matrix.row_indices(), place, shape)
    return edge_attr.index_select(0, by_column.to_sparse_csr().values())


def _refuse_matrix() -> None:
    raise NotImplementedError(
        "edge_weight and edge_dropout need an edge list here, and edge_index is a sparse matrix. "
        "Pass edge_index of shape (2, E)."
    )


def _check_weight(edge_weight: Tensor, num_edges: int, heads: int) -> None:
    one_each = edge_weight.dim() == 1 or (edge_weight.dim() == 2 and edge_weight.size(1) in (1, heads))
    if not one_each or edge_weight.size(0) != num_edges:
        raise ValueError(
            f"edge_weight has shape {list(edge_weight.shape)}, "
            f"expected (E,) or (E, H) with E = {num_edges} and H = {heads}."
        )


def _whole_size(size: Any, x: Any) -> Any:
    """Return the size with the numbers of rows of x where it is None."""
    if size is None or all(n is not None for n in size):
        return size
    src, dst = (x, x) if isinstance(x, Tensor) else x
    rows = src.size(0), (src if dst is None else dst).size(0)
    return tuple(row if n is None else n for n, row in zip(size, rows, strict=True))


def check_ends(x: Any, edge_attr: Any, lin_edge: Any) -> None:
    """Raise ValueError if a layer that scores both ends of an edge has no dst, or no weight for the edge's features."""
    if not isinstance(x, Tensor) and x[1] is None:
        raise ValueError(ONE_END)
    if edge_attr is not None and lin_edge is None:
        raise ValueError("edge_attr was passed to a layer without edge features. Pass edge_dim to the layer.")


def check_edge_attr(edge_attr: Tensor, lin_edge: Any) -> None:
    """Raise ValueError if the features of the edges have another dtype than the weight that they are multiplied by."""
    if type(lin_edge) is not Linear or hooked(lin_edge) or edge_attr.dtype == lin_edge.weight.dtype:
        return
    device, dtype = edge_attr.device.type, lin_edge.weight.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        if {edge_attr.dtype, dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
            return
    raise ValueError(
        f"edge_attr has dtype {edge_attr.dtype}, expected {dtype}, as lin_edge. Did you mean edge_attr.to({dtype})?"
    )


def _check_call(
    x: Any,
    edge_index: Any,
    edge_attr: Any,
    edge_weight: Any,
    in_channels: Union[int, Tuple[int, int]],
    lin_edge: Any,
) -> None:
    if not isinstance(edge_index, (Tensor, SparseTensor)):
        hint = "" if edge_index is None else " Did you mean torch.as_tensor(edge_index)?"
        raise ValueError(
            f"edge_index is of type {type(edge_index).__name__}, "
            f"expected an integer tensor of shape (2, E), an EdgeIndex, a SparseTensor or a sparse matrix.{hint}"
        )
    for name, each, shape in (("edge_attr", edge_attr, "(E, D)"), ("edge_weight", edge_weight, "(E, H)")):
        if each is not None and not isinstance(each, Tensor):
            raise ValueError(f"{name} is of type {type(each).__name__}, expected a tensor of shape {shape} or (E,).")
    both = x if isinstance(x, (tuple, list)) else (x, x)
    widths = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels, in_channels)
    for side, part, width in zip(("src", "dst"), both, widths, strict=True):
        if part is None and side == "dst":
            continue
        if not isinstance(part, Tensor):
            raise ValueError(f"x ({side}) is of type {type(part).__name__}, expected a tensor of shape (N, F).")
        if part.dim() != 2:
            raise ValueError(
                f"x ({side}) has shape {tuple(part.shape)}, expected (N, F), or (B, N, F) for a batch on one graph."
            )
        if width != -1 and width != part.size(1):  # dynamo misreads `in` for a symbolic size
            raise ValueError(f"x ({side}) has {part.size(1)} features, expected in_channels = {width}.")
    graph = edge_index if isinstance(edge_index, Tensor) else None  # the operation checks a SparseTensor's
    check_devices(both[0], x_dst=both[1], edge_index=graph, edge_attr=edge_attr, edge_weight=edge_weight)
    if edge_attr is not None:
        check_edge_attr(edge_attr, lin_edge)


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


def each_graph(layer: Any, x: Any, weights: Optional[bool], graph: Any) -> Any:
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
