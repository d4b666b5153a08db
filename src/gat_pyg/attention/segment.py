"""Attention edge by edge, on segment operations over the neighbourhoods: differentiable any number of times.

Scores and softmax are `[E, H]`. The messages of equation (4) would be `[E, H, C]`; alpha is a sparse matrix for each
head instead, so that nothing of that size is ever held, except in forward mode. The largest scores are computed by
PyG's `segment`: torch_scatter's segment_csr, or torch's segment_reduce where that is missing. The sums are torch's bags
of embeddings, which add the edges of a neighbourhood in their order: the same bits every time, on a GPU too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import segment

from ..features.pattern import Pattern
from ..features.products import sums
from ..graph.edges import Edges
from ..graph.remembered import remembered
from ..kernels.models import in_forward_mode
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
    if torch.compiler.is_compiling() or in_forward_mode() or torch._C._are_functorch_transforms_active():
        index = edges.wide[1].unsqueeze(1).expand_as(per_edge)
        top = per_edge.new_full((edges.num_dst, per_edge.size(1)), -torch.inf)
        top = top.scatter_reduce(0, index, per_edge, "amax")
    else:
        top = segment(per_edge.contiguous(), edges.rowptr, "max")
    return top.masked_fill(top.isinf(), 0.0)


def segment_sum(per_edge: Tensor, edges: Edges) -> Tensor:
    """The sum over each neighbourhood, `[E, H]` grouped by dst to `[N_dst, H]`."""
    if torch.compiler.is_compiling():
        return per_edge.new_zeros(edges.num_dst, per_edge.size(1)).index_add(0, edges.wide[1], per_edge)
    return sums(per_edge.new_ones(edges.num_edges), per_edge, None, 0.0, _patterns(edges)[1], False)
