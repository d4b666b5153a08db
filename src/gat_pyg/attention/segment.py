"""Attention edge by edge, on segment operations over the neighbourhoods: differentiable any number of times.

Scores and softmax are `[E, H]`. The messages of equation (4) would be `[E, H, C]`; alpha is a sparse matrix for each
head instead, so that nothing of that size is ever held, except in forward mode. The segment operations of the softmax
are PyG's `segment`: torch_scatter's segment_csr, or torch's segment_reduce where that is missing. Both, and torch's
bags of embeddings, read the edges of a neighbourhood in their order: the sums have the same bits every time, on a GPU
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import segment

from ..features.pattern import Pattern
from ..features.products import sums
from ..graph.edges import Edges
from ..graph.remembered import NOT_OVER_THE_GRAPH, remembered
from ..kernels.models import each_cotangent, in_forward_mode
from ..philox import keep_mask
from .score import Score, widened


def attend(x: Tensor, score: Score, edges: Edges, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend over all neighbourhoods at once; arguments and results as in `reference.attend`."""
    alpha = weights(x, score, edges, factor)
    dtype = torch.promote_types(x.dtype, alpha.dtype)
    of_heads, (of_src, of_edge) = alpha.t().to(dtype), _patterns(edges)
    out = sums(of_heads, x.to(dtype).transpose(0, 1), None, 0.0, of_src, False)  # [H, N_dst, C]
    if (values := score.edge_values) is not None:
        u, weight = (value.to(dtype) for value in values)
        out = out + sums(of_heads, edges.group(u), None, 0.0, of_edge, False) @ weight.mT
    return out.transpose(0, 1).contiguous(), edges.ungroup(alpha)


@remembered
def _patterns(edges: Edges) -> tuple[Pattern, Pattern]:
    """Return the matrices `[N_dst, N_src]` and `[N_dst, E]` with a non-zero for each edge, grouped by dst."""
    src, each = edges.wide[0], torch.arange(edges.num_edges, device=edges.src.device)
    return Pattern(edges.rowptr, src, edges.num_src, True), Pattern(edges.rowptr, each, edges.num_edges, True)


def weights(x: Tensor, score: Score, edges: Edges, factor: Tensor | None) -> Tensor:
    """Return k_ij w_ij alpha_ij, equations (1) to (3): `[E, H]`, grouped by dst."""
    alpha = segment_softmax(score.per_edge(x, edges), edges)
    return alpha if factor is None else alpha * edges.group(factor)


def factors(
    edges: Edges,
    edge_weight: Tensor | None,
    seed: Tensor | None,
    heads: int,
    dropout: float | Tensor,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return k_ij w_ij `[E, H]` in the caller's order, in `dtype` or wider; None without dropout and weights."""
    if seed is None:
        return None if edge_weight is None else widened(edge_weight)
    keep = keep_mask(seed, edges.dropout_edges, heads, dropout, torch.promote_types(dtype, torch.float32))
    return keep if edge_weight is None else keep * edge_weight


def segment_softmax(e: Tensor, edges: Edges) -> Tensor:
    """Equation (2) over each neighbourhood, `[E, H]` grouped by dst.

    The largest score is taken off first, so that no score overflows. A neighbourhood whose scores are all -inf gives 0.
    """
    _, dst = edges.wide
    exp = (e - segment_max(e, edges).index_select(0, dst)).exp()
    total = segment_sum(exp, edges)
    total = total.masked_fill(total == 0.0, 1.0)  # all are -inf; else it is at least 1
    return exp / total.index_select(0, dst)


def segment_max(per_edge: Tensor, edges: Edges) -> Tensor:
    """The largest value of each neighbourhood, `[E, H]` to `[N_dst, H]`, 0 where none is finite; without a gradient."""
    per_edge = per_edge.detach()
    if _by_pointers():
        top: Tensor = _Segment.apply(per_edge, edges.rowptr, edges.wide[1], "max")
    else:
        index = edges.wide[1].unsqueeze(1).expand_as(per_edge)
        top = per_edge.new_full((edges.num_dst, per_edge.size(1)), -torch.inf)
        top = top.scatter_reduce(0, index, per_edge, "amax")
    return top.masked_fill(top.isinf(), 0.0)


def segment_sum(per_edge: Tensor, edges: Edges) -> Tensor:
    """The sum over each neighbourhood, `[E, H]` grouped by dst to `[N_dst, H]`."""
    dst = edges.wide[1]
    if _by_pointers():
        total: Tensor = _Segment.apply(per_edge, edges.rowptr, dst, "sum")
        return total
    return per_edge.new_zeros(edges.num_dst, per_edge.size(1)).index_add(0, dst, per_edge)


def _by_pointers() -> bool:
    return not in_forward_mode() and not torch.compiler.is_compiling()


class _Segment(torch.autograd.Function):
    """PyG's `segment`. Its own backward has no second derivative; a gather has derivatives of any order."""

    @staticmethod
    def forward(per_edge: Tensor, rowptr: Tensor, dst: Tensor, reduce: str) -> Tensor:
        reduced: Tensor = segment(per_edge.contiguous(), rowptr, reduce)
        return reduced

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (dst,) = ctx.saved_tensors
        return grad.index_select(0, dst), None, None, None  # gradient of the sum; callers of the max never need one

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], per_edge: Tensor, rowptr: Tensor, dst: Tensor, reduce: str
    ) -> tuple[Tensor, int]:
        batch = in_dims[0]
        if batch is None or any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(NOT_OVER_THE_GRAPH)
        return _Segment.apply(per_edge.movedim(batch, -1), rowptr, dst, reduce), -1
