"""The layer exactly as the paper's authors wrote it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..attention.additive import Additive
from ..attention.operation import attend
from ..conv.checks import check_layer
from ..conv.mechanisms import build_mechanism
from ..features.dropout import dropout
from ..features.linear import linear
from ..features.sparse import SparseFeatures, is_sparse_features
from ..graph.adjacency import neighbourhoods, with_self_loops
from ..philox import drops

AUTHORS = ("input_dropout", "value_dropout", "score_bias", "init", "skip")  # details of their code alone


class AuthorsConv(nn.Module):
    r"""The layer of the authors' code, head by head; `GAT` with `reproduction=True` is made of it.

    For each head, with its own draw of dropout D in training:

    .. math::
        z = \mathbf{W} D(h), \qquad
        e_{ij} = \mathrm{LeakyReLU}(\vec{a}_{dst}^T z_i + b_{dst} + \vec{a}_{src}^T z_j + b_{src}), \qquad
        h'_i = \sum_j D(\alpha_{ij})\, D(z_j) + b + \mathrm{skip}(D(h_i))

    Arguments as in `GATConv`; `of_authors` lists the details that follow the authors' code, and the others are as in
    `GATConv`. In training every head has its own copy of the dropped input, `[H, N, F]`, or of its non-zeros if x is
    sparse.

    Example:
        >>> AuthorsConv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    accepts_size = True  # `size` may declare fewer dst than x has rows

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        residual: bool = False,
        mechanism: str = "additive",
        of_authors: Sequence[str] = AUTHORS,
    ) -> None:
        super().__init__()
        check_layer(heads, out_channels, dropout)
        if unknown := [name for name in of_authors if name not in AUTHORS]:
            raise ValueError(f"reproduction names {', '.join(unknown)}, expected some of {', '.join(AUTHORS)}.")
        self.of_authors = tuple(of_authors)
        self.in_channels = in_channels
        self.heads = heads
        self.out_channels = out_channels
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.residual = residual
        self.weight = Parameter(torch.empty(heads, in_channels, out_channels))
        self.bias = Parameter(torch.empty(heads, out_channels))
        _, vectors = build_mechanism(mechanism, heads, out_channels, None, negative_slope)
        self.att_src = Parameter(torch.empty(heads, out_channels)) if vectors else None
        self.att_dst = Parameter(torch.empty(heads, out_channels)) if vectors else None
        biased = vectors and "score_bias" in of_authors
        self.bias_src = Parameter(torch.empty(heads)) if biased else None
        self.bias_dst = Parameter(torch.empty(heads)) if biased else None
        project = residual and (in_channels != out_channels or "skip" not in of_authors)
        self.res_weight = Parameter(torch.empty(heads, in_channels, out_channels)) if project else None
        self.res_bias = Parameter(torch.empty(heads, out_channels)) if project and "skip" in of_authors else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter again: Glorot uniform, for each head or over all of them, biases zero."""
        for weight in (self.weight, self.res_weight, self.att_src, self.att_dst):
            if weight is not None:
                if "init" in self.of_authors:
                    fans = weight.size(1) + (weight.size(2) if weight.dim() == 3 else 1)
                else:  # weights W [H C, F] and a [H, C]
                    fans = weight.size(1) + weight.size(0) * (weight.size(2) if weight.dim() == 3 else 1)
                bound = math.sqrt(6 / fans)
                nn.init.uniform_(weight, -bound, bound)
        for bias in (self.bias, self.res_bias, self.bias_src, self.bias_dst):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """`[N, F]` to `[N, H C]`, or `[N, C]` where the heads are averaged; size and attention as of `GATConv`."""
        num_dst = x.size(0) if size is None else size[1]
        edges = neighbourhoods(edge_index, x.size(0), num_dst, add_self_loops=True)
        dropped = self._drop_for_each_head(x)  # [H, N, F]
        z = self._project(dropped, self._of_heads(self.weight))  # [N, H, C]
        score_src = self._score(z, self.att_src, self.bias_src)
        score_dst = self._score(z[:num_dst], self.att_dst, self.bias_dst)
        result = attend(
            self._drop(z.flatten(1)).view_as(z) if "value_dropout" in self.of_authors else z,
            Additive(score_src, score_dst, negative_slope=self.negative_slope),
            edges,
            dropout=self.dropout if self.training else 0.0,
            return_attention_weights=bool(return_attention_weights),
        )
        out, alpha = result if isinstance(result, tuple) else (result, None)
        out = out + self._of_heads(self.bias)
        if self.res_weight is not None:
            out = out + self._project(dropped, self._of_heads(self.res_weight))[:num_dst]
            out = out if self.res_bias is None else out + self._of_heads(self.res_bias)
        elif self.residual:
            out = out + self._dense(dropped)[:num_dst]
        out = out.flatten(1) if self.concat else out.mean(1)
        if alpha is None:
            return out
        looped = with_self_loops(edge_index, x.size(0), num_dst)
        alpha = alpha if edges.rows is None else alpha.index_select(0, edges.rows)
        return out, (looped, alpha.expand(-1, self.heads))

    def _of_heads(self, parameter: Tensor) -> Tensor:
        """`[H, ...]`; the mean `[1, ...]` where averaged heads attend alike: they are one head of their means."""
        alike = self.att_src is None and not (self.training and drops(self.dropout))
        return parameter.mean(0, keepdim=True) if alike and not self.concat else parameter

    def _score(self, z: Tensor, att: Tensor | None, bias: Tensor | None) -> Tensor | None:
        if att is None:
            return None
        score = (z * att).sum(-1)  # [N, H]
        return score if bias is None else score + bias

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def _drop_for_each_head(self, x: Tensor) -> Tensor:
        """The dropped input `[H, N, F]`, or `[1, N, F]` where all heads have the same."""
        dropping = self.training and drops(self.dropout)
        each = dropping and "input_dropout" in self.of_authors
        if not is_sparse_features(x):
            return self._drop(x.expand(self.heads, *x.shape)) if each else self._drop(x)[None]
        x = SparseFeatures(x)
        heads = (self.heads,) if each else ()
        return x.dropped(self.dropout, *heads) if dropping else x

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Every head's features by its own weights: `[H or 1, N, F]` and `[H, F, C]` to `[N, H, C]`."""
        if (not x.several) if isinstance(x, SparseFeatures) else (x.size(0) == 1):  # all heads have the same
            wide = weight.transpose(0, 1).flatten(1)  # [F, H C]
            out = linear(x, wide) if isinstance(x, SparseFeatures) else torch.mm(x.squeeze(0), wide)
            return out.view(-1, *weight.shape[::2])
        return (linear(x, weight) if isinstance(x, SparseFeatures) else torch.bmm(x, weight)).transpose(0, 1)

    def _dense(self, x: Tensor) -> Tensor:
        """Every head's features as they are, `[N, H or 1, F]`; of a sparse x, if that is no larger than the output."""
        if not isinstance(x, SparseFeatures):
            return x.transpose(0, 1)
        one = torch.eye(x.size(1), dtype=x.dtype, device=x.device)
        return self._project(x, one.expand(self.heads, -1, -1))
