"""The layers: PyG's arguments, call, parameter names and results around the operation of `gat_pyg.attention`."""

# PyG compiles this module's source into templates and TorchScript. So: no `__all__`, no postponed annotations, typing's
# Optional, Tuple and Union instead of `X | None`, and the `# propagate_type` and `# edge_updater_type` comments.

import math
import numbers
import typing
from typing import Any, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import Adj, NoneType, OptPairTensor, OptTensor, PairTensor, Size, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, is_sparse, is_torch_sparse_tensor, remove_self_loops, softmax
from torch_geometric.utils.sparse import set_sparse_value

from .attention import BACKENDS, Backend, attend, attend_edge_index, attend_pairs, check_devices, fuses
from .attention.fused import is_spent
from .attention.segment import in_forward_mode
from .edges import Edges, neighbourhoods, places_of
from .features import Linear, SparseFeatures, is_sparse_features, linear

if typing.TYPE_CHECKING:
    from typing import overload
else:
    from torch.jit import _overload_method as overload


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


def check_layer(heads: int, out_channels: int, dropout: Any) -> None:
    """Raise ValueError where a layer's size or dropout is out of range."""
    value: Any
    for name, value in (("heads", heads), ("out_channels", out_channels)):
        if not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1.")
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1.")
    if not isinstance(dropout, numbers.Real) or not 0.0 <= float(dropout) <= 1.0:
        raise ValueError(f"dropout is {dropout!r}, expected a probability in [0, 1].")


def _check_widths(in_channels: Any, edge_dim: Any) -> None:
    both = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,)
    for name, width in [("in_channels", width) for width in both] + [("edge_dim", edge_dim)]:
        if name == "edge_dim" and width is None:
            continue
        if not isinstance(width, numbers.Integral):
            raise ValueError(f"{name} is {width!r}, expected a whole number.")
        if width < -1:
            raise ValueError(f"{name} is {width}, expected at least 0, or -1: as in the first call.")


class _AttentionConv(MessagePassing):
    """What the layers share: options, the choice of the way a call takes, self-loops, and the end of a forward."""

    def _set_options(
        self,
        in_channels: Union[int, Tuple[int, int]],
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
        edge_dim: Optional[int],
        fill_value: Union[float, Tensor, str],
        residual: bool,
        backend: Backend,
    ) -> None:
        check_layer(heads, out_channels, dropout)
        _check_widths(in_channels, edge_dim)
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.edge_dim = edge_dim
        self.fill_value = fill_value
        self.residual = residual
        self.backend = backend

    def _needs_messages(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: Optional[bool]) -> bool:
        """Whether a compiler, an explainer, a hook, a subclass or another aggregation needs each message by itself."""
        return (
            (is_compiling() and not self._compiles(x, edge_index, edge_attr, weights))
            or torch.jit.is_tracing()
            or self.explain is True
            or self.decomposed_layers > 1
            or self.aggr not in ("add", "sum")
            or (self.flow == "target_to_source" and not isinstance(x, Tensor))
            or any(getattr(self, hooks) for hooks in _HOOKS)
            or any(getattr(self, step).__module__ != module for step, module in _STEPS.items())
            or (is_sparse(edge_index) and (self.edge_dim is not None or edge_attr is not None))
        )

    def _compiles(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: Optional[bool]) -> bool:
        """Return whether a compiler gets the operation as one operator, rather than as messages.

        An exported program has plain operators, to run where this package is not, unless `backend` is "fused".
        """
        if torch.compiler.is_exporting() and (self.backend != "fused" or torch.onnx.is_in_onnx_export()):
            return False
        return (
            not in_forward_mode()
            and fuses(self.backend, x if isinstance(x, Tensor) else x[0])
            and isinstance(edge_index, Tensor)
            and not isinstance(edge_index, EdgeIndex)
            and edge_index.layout == torch.strided
            and edge_attr is None
            and not weights
            and self._scores_by_kernel()
        )

    def _attend(
        self,
        x: OptPairTensor,
        score: OptPairTensor,
        edge_index: Any,
        edge_attr: OptTensor,
        size: Size,
        negative_slope: float,
        weights: Optional[bool],
    ) -> Tuple[Tensor, Any, Any]:
        """The whole operation: output `[N_dst, H, C]`, the adjacency with loops, and alpha `[E, H]` in its order."""
        num_src, num_dst = _graph_size(x, edge_index, size)
        dropout = self.dropout if self.training else 0.0
        pair = self._pair(x, edge_attr)
        if is_compiling():
            graph = (num_dst, self.add_self_loops, self.flow)
            if pair is None:
                out = attend_edge_index("additive", (x[0], *score), edge_index, graph, negative_slope, dropout)
            else:
                out = attend_edge_index("pair", (x[0], x[1], pair[0]), edge_index, graph, pair[1], dropout)
            return out, None, None
        adjacency, edges = neighbourhoods(
            edge_index, num_src, num_dst, add_self_loops=self.add_self_loops, flow=self.flow
        )
        options: Any = {
            "dropout": dropout,
            "backend": self.backend,
            "return_attention_weights": bool(weights),
        }
        if pair is not None:
            result = attend_pairs(x[0], x[1], pair[0], edges, negative_slope=pair[1], **options)
        else:
            if edge_attr is not None:
                edge_attr = self._features_with_loops(edge_index, edge_attr, edges)
            edge_score = self._edge_score(x, edges, edge_attr)
            result = attend(
                x[0], score[0], score[1], edges, score_edge=edge_score, negative_slope=negative_slope, **options
            )
        out, alpha = result if isinstance(result, tuple) else (result, None)
        return out, adjacency, alpha

    def _scores_by_kernel(self) -> bool:
        """Whether, without edge features, the operation knows the scores."""
        return True

    def _pair(self, x: OptPairTensor, edge_attr: OptTensor) -> Optional[Tuple[OptTensor, float]]:
        """`attend_pairs`'s att `[H, C]` and slope, where that is how edges are scored."""
        return None

    def _edge_score(self, x: OptPairTensor, edges: Edges, edge_attr: OptTensor) -> OptTensor:
        raise NotImplementedError

    def _features_with_loops(self, edge_index: Tensor, edge_attr: Tensor, edges: Edges) -> Tensor:
        """The features `[E, D]` of the edges attended over: without the graph's own loops, with the added ones."""
        if edge_attr.size(0) != edge_index.size(1):
            raise ValueError(
                f"edge_attr has {edge_attr.size(0)} rows, expected one per edge, E = {edge_index.size(1)}."
            )
        width = 1 if edge_attr.dim() == 1 else edge_attr.size(1)
        if self.edge_dim is not None and self.edge_dim != -1 and self.edge_dim != width:
            raise ValueError(f"edge_attr has {width} features, expected edge_dim = {self.edge_dim}.")
        if self.add_self_loops:
            edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
            edge_index = edge_index.long()  # torch's scatter has a wrong gradient for int32, and refuses narrower ids
            num_kept = edges.num_edges - min(edges.num_src, edges.num_dst)
            if num_kept < edge_index.size(1):  # the count is known: PyG's remove_self_loops would wait for the device
                kept = places_of(edge_index[0] != edge_index[1], num_kept)
                edge_index, edge_attr = edge_index.index_select(1, kept), edge_attr.index_select(0, kept)
            _, edge_attr = self._append_loops(edge_index, edge_attr, edges.num_src, edges.num_dst)
            assert edge_attr is not None
        return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr

    def _as_pyg_takes_it(self, edge_index: Tensor) -> Tensor:
        """PyG's message passing has no CSC, and a wrong gradient for int32 ids (PyG 2.8.1 with torch 2.13)."""
        if not torch.jit.is_scripting():
            if edge_index.layout == torch.sparse_csc:
                return edge_index.to_sparse_csr()
            if edge_index.layout != torch.strided:
                return edge_index
        return edge_index.long()

    def _append_loops(
        self, edge_index: Tensor, edge_attr: OptTensor, num_src: int, num_dst: int
    ) -> Tuple[Tensor, OptTensor]:
        """A loop for each of the first min(N_src, N_dst) nodes; its features are of the edges that point to it."""
        num_loops, num_nodes = min(num_src, num_dst), max(num_src, num_dst)
        if edge_attr is None or is_compiling() or num_loops == num_nodes:
            return add_self_loops(edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_loops)
        # PyG reduces over the edges to all nodes, so that it needs a place for each
        edge_index, edge_attr = add_self_loops(edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_nodes)
        num_edges = edge_index.size(1) - num_nodes + num_loops
        assert edge_attr is not None
        return edge_index[:, :num_edges], edge_attr[:num_edges]

    def _replace_loops(
        self, edge_index: Tensor, edge_attr: OptTensor, num_src: int, num_dst: int
    ) -> Tuple[Tensor, OptTensor]:
        """Self-loops for PyG's message passing on a tensor, dense or sparse."""
        if not torch.jit.is_scripting():
            if edge_attr is not None and is_torch_sparse_tensor(edge_index):
                raise NotImplementedError(
                    "edge_attr with add_self_loops needs an edge list, and edge_index is a sparse matrix. "
                    "Pass edge_index of shape (2, E), or add_self_loops=False."
                )
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        return self._append_loops(edge_index, edge_attr, num_src, num_dst)

    def _set_diag(self, adjacency: SparseTensor) -> SparseTensor:
        """Self-loops for PyG's message passing on a `SparseTensor`."""
        if self.edge_dim is not None:
            raise NotImplementedError(
                "edge_dim with add_self_loops needs an edge list, and edge_index is a SparseTensor. "
                "Pass edge_index of shape (2, E), or add_self_loops=False."
            )
        return torch_sparse.set_diag(adjacency)

    def _finish(self, out: Tensor, res: OptTensor, spent: bool = False) -> Tensor:
        """Equation (5) or (6), then the skip connection and the bias; in place where nobody else needs the values."""
        if not self.concat:
            out = out.mean(dim=1)
        shape = out.size()
        if res is not None:
            res = res.view(shape)
            out = out.add_(res) if spent and out.dtype == res.dtype else out + res
        if self.bias is not None:
            bias = self.bias.view(shape[1:])
            out = out.add_(bias) if spent and out.dtype == bias.dtype else out + bias
        elif self.concat and res is None and not spent and not torch.jit.is_scripting():
            out = out.clone()  # the backward pass needs the operation's own output: what is returned may be written to
        return out.flatten(1)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """A term of equation (4): `[E, H, C]` of each edge's src, weighted by `[E, H]`."""
        return alpha.unsqueeze(-1) * x_j

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


_STEPS = {
    "edge_update": __name__,
    "message": __name__,
    "aggregate": MessagePassing.__module__,
    "update": MessagePassing.__module__,
}
_HOOKS = [
    f"_{step}_forward_{when}"
    for step in ("propagate", "edge_update", "message", "aggregate")
    for when in ("pre_hooks", "hooks")
]


def _graph_size(x: OptPairTensor, edge_index: Any, size: Size) -> Tuple[int, int]:
    """N_src and N_dst, from the rows of x and, where there is none for dst, from the size that the graph declares."""
    num_src = x[0].size(0)
    if is_sparse(edge_index):
        size = (edge_index.size(1), edge_index.size(0))
    elif isinstance(edge_index, EdgeIndex):
        size = edge_index.sparse_size()
    declared = (None, None) if size is None else tuple(size)
    num_dst = x[1].size(0) if x[1] is not None else num_src if declared[1] is None else declared[1]
    if any(n is not None and n != rows for n, rows in zip(declared, (num_src, num_dst), strict=True)):
        raise ValueError(f"x has {num_src} src and {num_dst} dst rows, but the graph's size is {declared}.")
    return num_src, num_dst


def _whole_size(size: Any, x: Any) -> Any:
    """Return the size with the numbers of rows of x where it is None."""
    if size is None or all(n is not None for n in size):
        return size
    src, dst = (x, x) if isinstance(x, Tensor) else x
    rows = src.size(0), (src if dst is None else dst).size(0)
    return tuple(row if n is None else n for n, row in zip(size, rows, strict=True))


def _check_call(x: Any, edge_index: Any, edge_attr: Any, in_channels: Union[int, Tuple[int, int]]) -> None:
    if not isinstance(edge_index, (Tensor, SparseTensor)):
        hint = "" if edge_index is None else " Did you mean torch.as_tensor(edge_index)?"
        raise ValueError(
            f"edge_index is of type {type(edge_index).__name__}, "
            f"expected an integer tensor of shape (2, E), an EdgeIndex, a SparseTensor or a sparse matrix.{hint}"
        )
    if edge_attr is not None and not isinstance(edge_attr, Tensor):
        raise ValueError(f"edge_attr is of type {type(edge_attr).__name__}, expected a tensor of shape (E, D) or (E,).")
    both = x if isinstance(x, (tuple, list)) else (x, x)
    widths = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels, in_channels)
    for side, part, width in zip(("src", "dst"), both, widths, strict=True):
        if part is None and side == "dst":
            continue
        if not isinstance(part, Tensor):
            raise ValueError(f"x ({side}) is of type {type(part).__name__}, expected a tensor of shape (N, F).")
        if part.dim() != 2:
            raise ValueError(
                f"x ({side}) has shape {tuple(part.shape)}, expected (N, F): static graphs are not supported."
            )
        if width != -1 and width != part.size(1):  # dynamo misreads `in` for a symbolic size
            raise ValueError(f"x ({side}) has {part.size(1)} features, expected in_channels = {width}.")
    graph = edge_index if isinstance(edge_index, Tensor) else None  # the operation checks a SparseTensor's
    check_devices(both[0], x_dst=both[1], edge_index=graph, edge_attr=edge_attr)


class GATConv(_AttentionConv):
    r"""The graph attentional layer of Veličković et al. (ICLR 2018), a drop-in for `torch_geometric.nn.GATConv`.

    .. math::
        h'_i = \Big\Vert_{k=1}^{H} \sum_{j \in \mathcal{N}_i} \alpha_{ij}^k \mathbf{W}^k h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathrm{LeakyReLU}(\vec{\mathbf{a}}^T
        [\mathbf{W} h_i \Vert \mathbf{W} h_j])\big)

    equations (3) to (5); with `concat=False` the heads are averaged, equation (6). Arguments, call, state dict, initial
    weights for a seed, edge order and returned attention are those of PyG's layer.

    Args:
        in_channels: F, or (F_src, F_dst) for a bipartite graph with two weight matrices; -1: as in the first x.
        out_channels: C.
        heads: H, the paper's K.
        concat: whether to concatenate the heads or to average them.
        negative_slope: of the LeakyReLU.
        dropout: the probability that an attention coefficient is dropped in training.
        add_self_loops: whether every node attends to itself. Loops that the graph has give way to the added ones.
        edge_dim: the number of edge features; their score is added inside the LeakyReLU.
        fill_value: the edge features of added loops: a number, a tensor, or how to reduce those of the edges that point
            to the node ("mean", "add", "min", "max", "mul").
        bias: whether to add a learnable bias.
        residual: whether to add a learnable linear skip connection.
        mechanism: how an edge is scored: "additive", the paper's; "constant", 1 / |N_i| without parameters (Const-GAT);
            "dot" for `DotProduct`, "gatv2" for `DynamicAttention`; or a module that maps
            `(x_dst [E, H, C], x_src [E, H, C], edge_attr)` to scores `[E, H]`.
        backend: of `gat_pyg.attention.attend`.
        **kwargs: of `torch_geometric.nn.conv.MessagePassing`.

    Raises:
        ValueError: if an argument is out of range.

    Cost: O(N F H C + E H C) time; memory for a few `[N, H C]`, and for a few `[E, H]` where attention is returned.
    Neighbourhoods are built once per graph and shared by all layers and epochs. Under torch.compile the operation is
    one operator; under torch.export it is one with `backend="fused"` alone, so that other exports run anywhere. Under
    TorchScript and ONNX, with an explainer, a message passing hook or an overridden step, and for a compiler where edge
    features, returned attention or a mechanism of one's own ask for it, the layer runs PyG's message passing instead,
    whatever the backend: the same results, but dropout is drawn as PyG draws it.

    Example:
        >>> conv = GATConv(16, 8, heads=2)
        >>> x, edge_index = torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])
        >>> conv(x, edge_index).shape
        torch.Size([3, 16])
        >>> out, (edge_index, alpha) = conv(x, edge_index, return_attention_weights=True)
        >>> edge_index.tolist(), alpha.shape
        ([[0, 1, 0, 1, 2], [1, 2, 0, 1, 2]], torch.Size([5, 2]))
    """

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
        residual: bool = False,
        *,
        mechanism: Union[str, nn.Module] = "additive",
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(node_dim=0, **kwargs)
        self._set_options(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            residual,
            backend,
        )
        if mechanism == "dot":
            mechanism = DotProduct()
        elif mechanism == "gatv2":
            mechanism = DynamicAttention(heads, out_channels, edge_dim, negative_slope)
        elif not isinstance(mechanism, nn.Module) and mechanism not in ("additive", "constant"):
            raise ValueError(
                f"mechanism is {mechanism!r}, expected 'additive', 'constant', 'dot', 'gatv2' or a module."
            )
        if mechanism == "constant" and edge_dim is not None:
            raise ValueError(
                f"edge_dim is {edge_dim}, but constant attention has no score for edge features to act on."
            )
        self.mechanism = mechanism if isinstance(mechanism, nn.Module) else None

        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, int):
            self.lin = _glorot_linear(in_channels, heads * out_channels)
        else:
            self.lin_src = _glorot_linear(in_channels[0], heads * out_channels)
            self.lin_dst = _glorot_linear(in_channels[1], heads * out_channels)

        additive = mechanism == "additive"
        self.register_parameter("att_src", Parameter(torch.empty(1, heads, out_channels)) if additive else None)
        self.register_parameter("att_dst", Parameter(torch.empty(1, heads, out_channels)) if additive else None)
        additive = additive and edge_dim is not None
        self.lin_edge = _glorot_linear(edge_dim, heads * out_channels) if additive and edge_dim is not None else None
        self.register_parameter("att_edge", Parameter(torch.empty(1, heads, out_channels)) if additive else None)

        total_channels = out_channels * (heads if concat else 1)
        dst_channels = in_channels if isinstance(in_channels, int) else in_channels[1]
        self.res = _glorot_linear(dst_channels, total_channels) if residual else None
        self.register_parameter("bias", Parameter(torch.empty(total_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter anew: Glorot uniform, biases zero."""
        super().reset_parameters()
        for lin in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if lin is not None:
                lin.reset_parameters()
        glorot(self.att_src)
        glorot(self.att_dst)
        glorot(self.att_edge)
        zeros(self.bias)
        reset_mechanism = getattr(self.mechanism, "reset_parameters", None)
        if reset_mechanism is not None:
            reset_mechanism()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # PyG up to 2.4 stored the one W of a layer for one node type twice, as lin_src and lin_dst.
        old = [f"{prefix}{name}.weight" for name in ("lin_src", "lin_dst")]
        if self.lin is not None and old[0] in state_dict and f"{prefix}lin.weight" not in state_dict:
            weight = state_dict.pop(old[0])
            if not torch.equal(weight, state_dict.pop(old[1], weight)):
                raise ValueError(
                    f"{old[0]} and {old[1]} differ, so the checkpoint is of a layer with two weight matrices, and "
                    f"in_channels={self.in_channels} has one. Use in_channels=({self.in_channels}, {self.in_channels})."
                )
            state_dict[f"{prefix}lin.weight"] = weight
        super()._load_from_state_dict(state_dict, prefix, *args)

    @overload
    def forward(
        self,
        x: Union[Tensor, OptPairTensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: NoneType = None,
    ) -> Tensor:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, OptPairTensor],
        edge_index: Tensor,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool = None,
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, OptPairTensor],
        edge_index: SparseTensor,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool = None,
    ) -> Tuple[Tensor, SparseTensor]:
        pass

    def forward(  # noqa: F811
        self,
        x: Union[Tensor, OptPairTensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: Optional[bool] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tuple[Tensor, Tensor]], Tuple[Tensor, SparseTensor]]:
        """Attend over every neighbourhood.

        Args:
            x: `[N, F]`, or `(x_src [N_src, F_src], x_dst [N_dst, F_dst] or None)` for a bipartite graph; each dense, or
                torch.sparse CSR where few features are not zero.
            edge_index: `[2, E]`, `EdgeIndex`, or the transposed adjacency `[N_dst, N_src]` as `SparseTensor` or
                torch.sparse COO, CSR or CSC.
            edge_attr: `[E, D]` or `[E]`.
            size: (N_src, N_dst), where x does not tell; None is as many as x has. Of one x for both, the first N_dst
                rows are those of dst.
            return_attention_weights: whether to return alpha too, as `(out, (edge_index, alpha [E, H]))`, and after
                dropout in training. A `SparseTensor` comes back with alpha as its values.

        Returns:
            `[N_dst, H C]`, or `[N_dst, C]` with `concat=False`.

        Raises:
            ValueError: if a shape or dtype does not fit.
            IndexError: if an id in `edge_index` has no row in x.
            NotImplementedError: for edge features and self-loops on a sparse adjacency.
        """
        H, C = self.heads, self.out_channels
        if not torch.jit.is_scripting():
            _check_call(x, edge_index, edge_attr, self.in_channels)
            size = _whole_size(size, x)

        res: OptTensor = None
        if isinstance(x, Tensor):
            if self.res is not None:
                res = self.res(x)
            if self.lin is not None:
                x_src = x_dst = self.lin(x).view(-1, H, C)
            else:
                assert self.lin_src is not None and self.lin_dst is not None
                x_src = self.lin_src(x).view(-1, H, C)
                x_dst = self.lin_dst(x).view(-1, H, C)
            if size is not None and size[1] < x_src.size(0):
                x_dst = x_dst[: size[1]]
                res = None if res is None else res[: size[1]]
        else:
            x_src, x_dst = x
            if x_dst is not None and self.res is not None:
                res = self.res(x_dst)
            if self.lin is not None:
                x_src = self.lin(x_src).view(-1, H, C)
                if x_dst is not None:
                    x_dst = self.lin(x_dst).view(-1, H, C)
            else:
                assert self.lin_src is not None and self.lin_dst is not None
                x_src = self.lin_src(x_src).view(-1, H, C)
                if x_dst is not None:
                    x_dst = self.lin_dst(x_dst).view(-1, H, C)

        if not torch.jit.is_scripting():
            if not self._needs_messages(x, edge_index, edge_attr, return_attention_weights):
                ends = self._end_scores(x, x_src, x_dst)
                slope = self.negative_slope if self.mechanism is None else 1.0
                out, adjacency, alpha = self._attend(
                    (x_src, x_dst), ends, edge_index, edge_attr, size, slope, return_attention_weights
                )
                out = self._finish(out, res, not is_compiling() and is_spent(out))
                return (out, _attention(adjacency, alpha)) if return_attention_weights else out

        # a^T [W h_i || W h_j] = a_dst . W h_i + a_src . W h_j; constant attention scores 0.
        if self.att_src is not None and self.att_dst is not None:
            alpha_src = (x_src * self.att_src).sum(dim=-1)
            alpha_dst = None if x_dst is None else (x_dst * self.att_dst).sum(dim=-1)
        else:
            alpha_src = x_src.new_zeros(x_src.size(0), H)
            alpha_dst = None

        if isinstance(edge_index, Tensor):
            edge_index = self._as_pyg_takes_it(edge_index)
        if self.add_self_loops:
            num_src, num_dst = x_src.size(0), x_src.size(0) if x_dst is None else x_dst.size(0)
            if size is not None:
                num_src, num_dst = size
            if isinstance(edge_index, Tensor):
                edge_index, edge_attr = self._replace_loops(edge_index, edge_attr, num_src, num_dst)
            elif isinstance(edge_index, SparseTensor):
                edge_index = self._set_diag(edge_index)

        score: OptTensor = None
        if self.mechanism is not None:
            assert x_dst is not None
            if edge_attr is not None and edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            i, j = (1, 0) if self.flow == "source_to_target" else (0, 1)
            score = self.mechanism(self._lift(x_dst, edge_index, i), self._lift(x_src, edge_index, j), edge_attr)

        # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor, score: OptTensor)
        alpha = self.edge_updater(edge_index, alpha=(alpha_src, alpha_dst), edge_attr=edge_attr, score=score, size=size)

        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        out = self._finish(self.propagate(edge_index, x=(x_src, x_dst), alpha=alpha, size=size), res)

        if not torch.jit.is_scripting():
            return (out, _attention(edge_index, alpha)) if return_attention_weights else out
        if isinstance(return_attention_weights, bool):
            if isinstance(edge_index, Tensor):
                return out, (edge_index, alpha)
            elif isinstance(edge_index, SparseTensor):
                return out, edge_index.set_value(alpha, layout="coo")
        return out

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        score: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: Optional[int],
    ) -> Tensor:
        """Equations (1) to (3): the scores of each edge's ends, `[E, H]`, to alpha `[E, H]`."""
        alpha = alpha_j if alpha_i is None else alpha_j + alpha_i
        if not is_compiling() and index.numel() == 0:
            return alpha
        if score is not None:
            alpha = alpha + score
        else:
            if edge_attr is not None and self.lin_edge is not None:
                alpha = alpha + self._edge_term(edge_attr)
            alpha = F.leaky_relu(alpha, self.negative_slope)
        alpha = softmax(alpha, index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def _end_scores(self, x: Any, x_src: Tensor, x_dst: OptTensor) -> OptPairTensor:
        """a_src . W h_j and a_dst . W h_i, `[N, H]` each: the two halves of a^T [W h_i || W h_j]."""
        if self.att_src is None or self.att_dst is None:
            return None, None
        lin, width = self.lin, self.heads * self.out_channels
        if (
            isinstance(x, Tensor)
            and lin is not None
            and _plain(lin)
            and (is_sparse_features(x) or x.size(1) <= 4 * width)
        ):
            # a . (W h) = (a W) . h: two columns a head more in the product, instead of several passes over [N, H, C]
            both = torch.cat([self.att_src, self.att_dst])  # [2, H, C]
            weight = lin.weight.view(self.heads, self.out_channels, -1)
            folded = torch.einsum("ehc,hcf->ehf", both, weight).flatten(0, 1)
            scores = linear(SparseFeatures(x), folded.t()) if is_sparse_features(x) else F.linear(x, folded)
            return scores[:, : self.heads], scores[: None if x_dst is None else x_dst.size(0), self.heads :]
        return (
            (x_src * self.att_src).sum(dim=-1),
            None if x_dst is None else (x_dst * self.att_dst).sum(dim=-1),
        )

    def _scores_by_kernel(self) -> bool:
        return self.mechanism is None or _known(self.mechanism)

    def _pair(self, x: OptPairTensor, edge_attr: OptTensor) -> Optional[Tuple[OptTensor, float]]:
        if self.mechanism is None or not _known(self.mechanism):
            return None
        if x[1] is None:
            raise ValueError(_ONE_END)
        if isinstance(self.mechanism, DotProduct):
            return None, 1.0
        assert isinstance(self.mechanism, DynamicAttention)
        if edge_attr is not None and self.mechanism.lin_edge is not None:
            return None
        return self.mechanism.att[0], self.mechanism.negative_slope

    def _edge_score(self, x: OptPairTensor, edges: Edges, edge_attr: OptTensor) -> OptTensor:
        if self.mechanism is not None:
            return _score_ends(self.mechanism, x, edges, edge_attr)
        return None if edge_attr is None or self.lin_edge is None else self._edge_term(edge_attr)

    def _edge_term(self, edge_attr: Tensor) -> Tensor:
        """a_edge . W_edge e_ij: `[E, D]` or `[E]` to `[E, H]`."""
        assert self.lin_edge is not None
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        return (self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels) * self.att_edge).sum(dim=-1)


def _plain(lin: Any) -> bool:
    """Whether a layer's Linear does x W^T and nothing more."""
    hooked = lin._forward_hooks or lin._forward_pre_hooks or lin._backward_hooks or lin._backward_pre_hooks
    return (
        "forward" not in vars(lin)
        and type(lin) is Linear
        and lin.bias is None
        and not hooked
        and not torch.is_autocast_enabled(lin.weight.device.type)
    )


_ONE_END = "x is (x_src, None), but this mechanism scores both ends of an edge. Pass (x_src, x_dst)."


def _known(mechanism: nn.Module) -> bool:
    """Whether a mechanism is one of this file's as it stands, which the operation knows without calling it."""
    hooked = mechanism._forward_hooks or mechanism._forward_pre_hooks
    return type(mechanism) in (DotProduct, DynamicAttention) and not hooked


def _score_ends(score: Any, x: OptPairTensor, edges: Edges, edge_attr: OptTensor) -> Tensor:
    """The score of every edge in the caller's order from the features of both ends: `[E, H]`."""
    src, dst = edges.index.long()  # gradients add up by these, see Edges.wide
    if x[1] is None:
        raise ValueError(_ONE_END)
    return score(x[1].index_select(0, dst), x[0].index_select(0, src), edge_attr)


def _attention(adjacency: Any, alpha: Tensor) -> Any:
    """What PyG's layers return for `return_attention_weights`."""
    if isinstance(adjacency, SparseTensor):
        return adjacency.set_value(alpha, layout="coo")
    if is_torch_sparse_tensor(adjacency):
        return set_sparse_value(adjacency, alpha), alpha
    return adjacency, alpha


class GATv2Conv(_AttentionConv):
    r"""The GATv2 layer of Brody et al. (ICLR 2022), a drop-in for `torch_geometric.nn.GATv2Conv`.

    .. math::
        h'_i = \Big\Vert_{k=1}^{H} \sum_{j \in \mathcal{N}_i} \alpha_{ij}^k \mathbf{W}_l^k h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\vec{\mathbf{a}}^T
        \mathrm{LeakyReLU}(\mathbf{W}_r h_i + \mathbf{W}_l h_j)\big)

    Args:
        share_weights: whether W_l and W_r are one matrix.
        in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops, edge_dim, fill_value, bias,
            residual, backend, **kwargs: as in `GATConv`; `bias` is of both matrices too.

    Raises:
        ValueError: if an argument is out of range.

    Cost: as `GATConv`; with edge features or returned attention also a few `[E, H, C]` for the scores.

    Example:
        >>> GATv2Conv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

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
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(node_dim=0, **kwargs)
        self._set_options(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            residual,
            backend,
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
        """Draw every parameter anew: Glorot uniform, biases zero."""
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
    ) -> Tensor:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: Tensor,
        edge_attr: OptTensor = None,
        return_attention_weights: bool = None,
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
        pass

    @overload
    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: SparseTensor,
        edge_attr: OptTensor = None,
        return_attention_weights: bool = None,
    ) -> Tuple[Tensor, SparseTensor]:
        pass

    def forward(  # noqa: F811
        self,
        x: Union[Tensor, PairTensor],
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: Optional[bool] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tuple[Tensor, Tensor]], Tuple[Tensor, SparseTensor]]:
        """Attend over every neighbourhood; arguments, result and errors as in `GATConv.forward`, for both ends' x."""
        H, C = self.heads, self.out_channels
        if not torch.jit.is_scripting():
            _check_call(x, edge_index, edge_attr, self.in_channels)
            if not isinstance(x, Tensor) and x[1] is None:
                raise ValueError("x is (x_src, None), but GATv2 scores both ends of an edge. Pass (x_src, x_dst).")
            if edge_attr is not None and self.lin_edge is None:
                raise ValueError("edge_attr was given to a layer without edge features. Pass edge_dim to GATv2Conv.")

        res: OptTensor = None
        if isinstance(x, Tensor):
            if self.res is not None:
                res = self.res(x)
            x_l = self.lin_l(x).view(-1, H, C)
            x_r = x_l if self.share_weights else self.lin_r(x).view(-1, H, C)
        else:
            if self.res is not None:
                res = self.res(x[1])
            x_l = self.lin_l(x[0]).view(-1, H, C)
            x_r = self.lin_r(x[1]).view(-1, H, C)

        if not torch.jit.is_scripting():
            if not self._needs_messages(x, edge_index, edge_attr, return_attention_weights):
                ends = (None, None)
                out, adjacency, alpha = self._attend(
                    (x_l, x_r), ends, edge_index, edge_attr, None, 1.0, return_attention_weights
                )
                out = self._finish(out, res, not is_compiling() and is_spent(out))
                return (out, _attention(adjacency, alpha)) if return_attention_weights else out

        if isinstance(edge_index, Tensor):
            edge_index = self._as_pyg_takes_it(edge_index)
        if self.add_self_loops:
            if isinstance(edge_index, Tensor):
                edge_index, edge_attr = self._replace_loops(edge_index, edge_attr, x_l.size(0), x_r.size(0))
            elif isinstance(edge_index, SparseTensor):
                edge_index = self._set_diag(edge_index)

        # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
        alpha = self.edge_updater(edge_index, x=(x_l, x_r), edge_attr=edge_attr)

        # propagate_type: (x: PairTensor, alpha: Tensor)
        out = self._finish(self.propagate(edge_index, x=(x_l, x_r), alpha=alpha), res)

        if not torch.jit.is_scripting():
            return (out, _attention(edge_index, alpha)) if return_attention_weights else out
        if isinstance(return_attention_weights, bool):
            if isinstance(edge_index, Tensor):
                return out, (edge_index, alpha)
            elif isinstance(edge_index, SparseTensor):
                return out, edge_index.set_value(alpha, layout="coo")
        return out

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
        alpha = softmax(self._score(x_i, x_j, edge_attr), index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def _pair(self, x: OptPairTensor, edge_attr: OptTensor) -> Optional[Tuple[OptTensor, float]]:
        if edge_attr is not None and self.lin_edge is not None:
            return None
        return self.att[0], self.negative_slope

    def _edge_score(self, x: OptPairTensor, edges: Edges, edge_attr: OptTensor) -> OptTensor:
        return _score_ends(self._score, x, edges, edge_attr)

    def _score(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor) -> Tensor:
        x_edge: OptTensor = None
        if edge_attr is not None and self.lin_edge is not None:
            if edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            x_edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        return _dynamic_score(x_dst, x_src, x_edge, self.att, self.negative_slope)
