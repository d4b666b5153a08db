"""`GATConv`: the graph attention layer, with PyG's arguments, call and parameter names."""

# PyG's templates read the source of this module and import all its names: no `__all__`.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch_geometric import is_compiling
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size
from torch_geometric.utils import softmax

from ..attention.additive import Additive
from ..attention.operation import Backend
from ..attention.score import Score, widened
from ..features.linear import linear
from ..features.sparse import SparseFeatures, is_sparse_features
from .autograd_node import Grads
from .base import AttentionConv
from .checks import of_both_ends
from .mechanisms import build_mechanism, glorot_linear, is_plain, own_score, unrounded
from .messages import Ends


class GATConv(AttentionConv):
    r"""The graph attentional layer of Veličković et al. (ICLR 2018), a drop-in for `torch_geometric.nn.GATConv`.

    .. math::
        h'_i = \Big\Vert_{k=1}^{H} \sum_{j \in \mathcal{N}_i} \alpha_{ij}^k \mathbf{W}^k h_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathrm{LeakyReLU}(\vec{\mathbf{a}}^T
        [\mathbf{W} h_i \Vert \mathbf{W} h_j])\big)

    equations (3) to (5); with `concat=False` the heads are averaged, equation (6). Arguments, call, state dict, initial
    weights for a seed, edge order and returned attention are those of PyG's layer.

    Args:
        in_channels: number of input features F, or (F_src, F_dst) for a bipartite graph with two weight matrices;
            -1: the width of the first x.
        out_channels: number of output features C per head.
        heads: number of attention heads H, the paper's K.
        concat: concatenate the heads if True, else average them.
        negative_slope: slope of the LeakyReLU for negative scores.
        dropout: probability of dropping an attention coefficient in training.
        add_self_loops: add an edge from each node to itself. Existing self-loops are replaced.
        edge_dim: number of edge features D; their score is added inside the LeakyReLU.
        fill_value: edge features of added self-loops: a number, a tensor, or the reduction over a node's incoming
            edges ("mean", "add", "min", "max", "mul").
        bias: add a learnable bias.
        residual: add a learnable linear skip connection.
        mechanism: attention mechanism: "additive", the paper's; "constant", 1 / |N_i| without parameters (Const-GAT);
            "dot" for `DotProduct`, "gatv2" for `DynamicAttention`, "cosine" for `CosineSimilarity`; or a module that
            maps `(x_dst [E, H, C], x_src [E, H, C], edge_attr)` to scores `[E, H]`; or a class or function of such a
            module, which gets `heads`, `out_channels`, `edge_dim` and `negative_slope` if it takes them.
        edge_dropout: probability of dropping an edge in training, before the softmax and for all heads. Self-loops are
            kept.
        backend: backend of `gat_pyg.attention.attend`.
        **kwargs: arguments of `torch_geometric.nn.conv.MessagePassing`.

    Raises:
        ValueError: if an argument is out of range.

    Cost: O(N F H C + E H C) time; memory for a few `[N, H C]`, and for a few `[E, H]` where attention is returned.
    Neighbourhoods are built once per graph and shared by all layers and epochs. Under torch.compile the operation is
    one operator; under torch.export it is one with `backend="fused"` alone, so that other exports run anywhere. Under
    torch.jit.trace and ONNX, with a message passing hook or an overridden step, with a global hook of torch, another
    aggregation or another `lin_edge`, and under torch.compile with a custom mechanism, an `EdgeIndex` or a sparse
    adjacency, the layer runs PyG's message passing instead, whatever the backend: the same results, but attention
    dropout is drawn as PyG draws it. Its steps have the arguments of PyG's.

    Example:
        >>> conv = GATConv(16, 8, heads=2)
        >>> x, edge_index = torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])
        >>> conv(x, edge_index).shape
        torch.Size([3, 16])
        >>> out, (edge_index, alpha) = conv(x, edge_index, return_attention_weights=True)
        >>> edge_index.tolist(), alpha.shape
        ([[0, 1, 0, 1, 2], [1, 2, 0, 1, 2]], torch.Size([5, 2]))
    """

    _scores_both_ends = False
    accepts_size = True  # `size` may declare fewer dst than x has rows

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
        residual: bool = False,
        *,
        mechanism: str | nn.Module | Callable[..., nn.Module] = "additive",
        edge_dropout: float = 0.0,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(**kwargs)
        self._set_options(in_channels, out_channels, heads, concat, dropout, edge_dim, edge_dropout, backend)
        self.negative_slope, self.residual = negative_slope, residual
        self.add_self_loops, self.fill_value = add_self_loops, fill_value
        self.mechanism, vectors = build_mechanism(mechanism, heads, out_channels, edge_dim, negative_slope)

        self.lin = self.lin_src = self.lin_dst = None
        src_channels, dst_channels = of_both_ends(in_channels)
        if isinstance(in_channels, (tuple, list)):
            self.lin_src = glorot_linear(src_channels, heads * out_channels)
            self.lin_dst = glorot_linear(dst_channels, heads * out_channels)
        else:
            self.lin = glorot_linear(in_channels, heads * out_channels)

        self.register_parameter("att_src", Parameter(torch.empty(1, heads, out_channels)) if vectors else None)
        self.register_parameter("att_dst", Parameter(torch.empty(1, heads, out_channels)) if vectors else None)
        self.lin_edge = glorot_linear(edge_dim, heads * out_channels) if vectors and edge_dim is not None else None
        of_edges = None if self.lin_edge is None else Parameter(torch.empty(1, heads, out_channels))
        self.register_parameter("att_edge", of_edges)

        total_channels = out_channels * (heads if concat else 1)
        self.res = glorot_linear(dst_channels, total_channels) if residual else None
        self.register_parameter("bias", Parameter(torch.empty(total_channels)) if bias else None)
        self.reset_parameters()

    @property
    def _PARAMETERS(self) -> tuple[str, ...]:  # type: ignore[override]  # noqa: N802
        return _ONE_MAP if "lin" in self._modules else _TWO_MAPS

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

    def forward(  # type: ignore[override]  # PyG's `size` comes before the flag
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
        edge_weight: OptTensor = None,
    ) -> Any:
        """Attend over every neighbourhood.

        Args:
            x: `[N, F]`, or `(x_src [N_src, F_src], x_dst [N_dst, F_dst] or None)` for a bipartite graph; each dense, or
                torch.sparse CSR where few features are not zero. `[B, N, F]` is a batch on one graph: every result
                has B in front.
            edge_index: `[2, E]`, `EdgeIndex`, or the transposed adjacency `[N_dst, N_src]` as `SparseTensor` or
                torch.sparse COO, CSR or CSC.
            edge_attr: `[E, D]` or `[E]`.
            size: (N_src, N_dst) if they cannot be read from x; None: the numbers of rows of x. With a single x, dst are
                its first N_dst rows.
            return_attention_weights: also return alpha, as `(out, (edge_index, alpha [E, H]))`, after
                dropout in training and times `edge_weight`. A `SparseTensor` comes back with alpha as its values.
            edge_weight: `[E]` or `[E, H]`, which multiply alpha after the softmax; 1 for added loops. On a matrix, they
                are in the order of its values.

        Returns:
            `[N_dst, H C]`, or `[N_dst, C]` with `concat=False`.

        Raises:
            ValueError: if a shape or dtype does not fit, or a COO matrix with features or weights is not coalesced.
            IndexError: if an id in `edge_index` has no row in x.
            NotImplementedError: for edge features or weights, and self-loops, on a sparse adjacency.
        """
        return self._run(x, edge_index, edge_attr, edge_weight, bool(return_attention_weights), size)

    def _messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> tuple[Tensor, Tensor]:
        x_src, x_dst, _ = ends
        scored = self._halves(x_src, x_dst) if self.mechanism is None else (x_src, x_dst)

        # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor)
        alpha = self.edge_updater(edge_index, alpha=scored, edge_attr=edge_attr, size=size)
        alpha = alpha if edge_weight is None else alpha * edge_weight

        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        return self.propagate(edge_index, x=(x_src, x_dst), alpha=alpha, size=size), alpha

    def _project(self: Any, x: Any, size: Size) -> tuple[Ends, OptTensor]:
        """Return W h of both ends, `[N, H, C]`, and the skip connection's term."""
        if self.lin is None:
            return self._both_ends(x, size, self.lin_src, self.lin_dst, False)
        return self._both_ends(x, size, self.lin, self.lin, True)

    def _halves(self, x_src: Tensor, x_dst: OptTensor) -> OptPairTensor:
        """a_src . W h_j and a_dst . W h_i, `[N, H]` each, whose sum is a^T [W h_i || W h_j]; zeros without a."""
        if self.att_src is not None:
            alpha_src = (x_src * self.att_src).sum(dim=-1)
            alpha_dst = None if x_dst is None else (x_dst * self.att_dst).sum(dim=-1)
        else:
            alpha_src = x_src.new_zeros(x_src.size(0), self.heads)
            alpha_dst = None if x_dst is None else x_dst.new_zeros(x_dst.size(0), self.heads)
        return alpha_src, alpha_dst

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int | None,
    ) -> Tensor:
        """Equations (1) to (3): the scores of each edge's ends, `[E, H]`, to alpha `[E, H]`.

        With a `mechanism`, the features of the ends, `[E, H, C]`, are in the place of their scores.
        """
        if self.mechanism is not None:
            if edge_attr is not None and edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            score = self.mechanism(alpha_i, alpha_j, edge_attr)
        else:
            score = alpha_j if alpha_i is None else alpha_j + alpha_i
            if edge_attr is not None and self.lin_edge is not None and (is_compiling() or index.numel() > 0):
                score = score + self._edge_term(edge_attr)
            score = F.leaky_relu(score, self.negative_slope)
        alpha = softmax(score, index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def _score(self: Any, x: Any, ends: Ends, edge_attr: OptTensor) -> Score | None:
        x_src, x_dst, _ = ends
        if self.mechanism is not None:
            return own_score(self.mechanism, x_dst, x_src, edge_attr)
        score_edge = None if edge_attr is None or self.lin_edge is None else self._edge_term(edge_attr)
        score_src = score_dst = None
        if self.att_src is None:
            pass
        elif self._folds(x):
            folded = unrounded(_folded, torch.cat([self.att_src, self.att_dst]), self.lin.weight)
            if is_sparse_features(x):
                scores = unrounded(linear, SparseFeatures(x), folded.t())
            else:
                scores = unrounded(F.linear, x, folded)
            score_src, score_dst = scores.chunk(2, 1)
            if x_dst is not x_src:
                score_dst = score_dst[: x_dst.size(0)]
        else:
            score_src, score_dst = self._halves(x_src, x_dst)
        return Additive(score_src, score_dst, score_edge, self.negative_slope)

    def _folds(self, x: Any) -> bool:
        """Return True if a . (W h) = (a W) . h is cheaper: two columns a head more in the product, instead of several
        passes over `[N, H, C]`."""
        lin, width = self.lin, self.heads * self.out_channels
        if lin is None or not isinstance(x, Tensor):
            return False
        return is_plain(lin) and (is_sparse_features(x) or x.size(1) <= 4 * width)

    def _edge_term(self: Any, edge_attr: Tensor) -> Tensor:
        """a_edge . W_edge e_ij: `[E, D]` or `[E]` to `[E, H]`."""
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        if is_plain(self.lin_edge):  # (a W) . e instead of a . (W e)
            folded = unrounded(_folded, self.att_edge, self.lin_edge.weight)
            return unrounded(F.linear, edge_attr, folded)
        return (self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels) * self.att_edge).sum(dim=-1)

    def _before_back(self: Any, z: Tensor, of: dict[str, Any], grads: Grads) -> None:
        """Add the gradients of what `_project` and `_score` read, from those of their results."""
        H, C, x = self.heads, self.out_channels, grads.tensors["x"]
        grad, of_src, of_dst, of_edge = of["x"], of["score_src"], of["score_dst"], of["score_edge"]
        src, dst = ("lin_src", "lin_dst") if self.lin is None else ("lin", "lin")
        folded = of_src is not None and grads.end == "x" and self._folds(x)
        if of_src is not None and not folded:
            rows, shared = of_dst.size(0), grads.end == "x" and src == dst
            z_dst = (z if shared else getattr(self, dst)(grads.tensors[grads.end]).view(-1, H, C))[:rows]
            of_z_dst = grad[:rows] if shared else torch.zeros_like(z_dst)
            grads["att_src"] = _dots_back(z, self.att_src, of_src, grad)
            grads["att_dst"] = _dots_back(z_dst, self.att_dst, of_dst, of_z_dst)
            if not shared:
                grads.of_linear(of_z_dst.flatten(1), grads.end, dst)
        grads.of_linear(grad.flatten(1), "x", src)
        if folded:
            both, weight = torch.cat([self.att_src, self.att_dst]), self.lin.weight
            if of_dst.size(0) < of_src.size(0):
                of_dst = F.pad(of_dst, (0, 0, 0, of_src.size(0) - of_dst.size(0)))
            scores = torch.cat([of_src, of_dst], 1)
            if grads.needs["x"]:
                grads["x"].addmm_(scores, _folded(both, weight))
            of_folded = scores.t().mm(widened(x)).view(2, H, -1).transpose(0, 1)  # [H, 2, F]
            if grads.needs["lin.weight"]:
                grads["lin.weight"].view(H, C, -1).baddbmm_(both.permute(1, 2, 0), of_folded)
            of_both = torch.bmm(of_folded, weight.view(H, C, -1).transpose(1, 2)).transpose(0, 1)  # [2, H, C]
            grads["att_src"], grads["att_dst"] = of_both[:1], of_both[1:]
        _edge_term_back(of_edge, H, grads)

    def _few_options(self, att_src: OptTensor, att_dst: OptTensor, att_edge: OptTensor) -> tuple[Any, ...] | None:
        if att_src is None or att_dst is None or (att_edge is None and self.lin_edge is not None):
            return None
        return self.negative_slope, True, None, None


_TWO_MAPS = (
    *("lin_src.weight", "", "", "", "lin_dst.weight", "", "lin_edge.weight", "res.weight", "bias"),
    *("att_src", "att_dst", "att_edge"),
)
_ONE_MAP = "lin.weight", "", "", "", "", "", *_TWO_MAPS[6:]


def _folded(att: Tensor, weight: Tensor) -> Tensor:
    """a W, `[K H, F]`, of K vectors a of each head, `[K, H, C]`."""
    per_head = weight.view(att.size(1), att.size(2), weight.size(1))
    return torch.bmm(att.transpose(0, 1), per_head).transpose(0, 1).flatten(0, 1)


def _dots_back(z: Tensor, a: Tensor, of_score: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient of <a, z_i> of each head to that of z `[N, H, C]`, and return that of a."""
    grad.addcmul_(of_score.unsqueeze(2), a)
    return torch.bmm(of_score.t().unsqueeze(1), widened(z).transpose(0, 1)).transpose(0, 1)


def _edge_term_back(of_edge: OptTensor, heads: int, grads: Grads) -> None:
    """Add the gradients of what `_edge_term` reads."""
    if of_edge is None:
        return
    att, weight = grads.tensors["att_edge"], grads.tensors["lin_edge.weight"]
    of_folded = of_edge.t().mm(widened(grads.tensors["edge_attr"]))  # [H, D]
    grads["lin_edge.weight"] = (att[0].unsqueeze(2) * of_folded.unsqueeze(1)).view_as(weight)
    grads["att_edge"] = torch.bmm(weight.view(heads, -1, weight.size(1)), of_folded.unsqueeze(2)).view_as(att)
    if grads.needs["edge_attr"]:
        grads["edge_attr"] = of_edge.mm(_folded(att, weight))
