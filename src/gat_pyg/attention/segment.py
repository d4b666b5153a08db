"""Attention edge by edge, on segment operations over the neighbourhoods: differentiable any number of times.

Scores and softmax are `[E, H]`; the messages are `[E, H, C]`, the memory that the fused kernels avoid. The segment
operations are torch_scatter's; where it is missing, plain torch does the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import WITH_TORCH_SCATTER, torch_scatter

from ..edges import Edges


def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    score_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equations (1) to (4) on all edges at once; arguments and results as in `reference.attend`."""
    e = score(x, score_src, score_dst, edges, score_edge, negative_slope)  # [E, H]
    alpha = segment_softmax(e, edges)
    if keep is not None:
        alpha = alpha * edges.group(keep)
    messages = alpha.unsqueeze(-1) * x.index_select(0, edges.wide[0])  # [E, H, C]
    return segment_sum(messages, edges), edges.ungroup(alpha)


def score(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    score_edge: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """e_ij = LeakyReLU(s_j + d_i + u_ij), equations (1) and (3): `[E, H]`, grouped by dst, in float32 or wider."""
    src, dst = edges.wide
    terms = [] if score_src is None else [score_src.index_select(0, src)]
    terms += [] if score_dst is None else [score_dst.index_select(0, dst)]
    terms += [] if score_edge is None else [edges.group(score_edge)]
    if not terms:
        return x.new_zeros(edges.num_edges, x.size(1), dtype=torch.promote_types(x.dtype, torch.float32))
    z = sum(terms[1:], start=terms[0])
    return F.leaky_relu(z.to(torch.promote_types(z.dtype, torch.float32)), negative_slope)


def segment_softmax(e: Tensor, edges: Edges) -> Tensor:
    """Equation (2) over each neighbourhood, `[E, H]` grouped by dst.

    The largest score is taken off first, so that no score overflows. A neighbourhood whose scores are all -inf gives 0.
    """
    _, dst = edges.wide
    exp = (e - segment_max(e, edges).index_select(0, dst)).exp()
    total = segment_sum(exp, edges).clamp(min=torch.finfo(e.dtype).tiny)  # at least 1 unless all are -inf
    return exp / total.index_select(0, dst)


def segment_max(per_edge: Tensor, edges: Edges) -> Tensor:
    """The largest value of each neighbourhood, `[E, H]` to `[N_dst, H]`, 0 where none is finite; without a gradient."""
    per_edge = per_edge.detach()
    if WITH_TORCH_SCATTER:
        top: Tensor = _Segment.apply(per_edge, edges.rowptr, edges.wide[1], "max")
    else:
        index = edges.wide[1].unsqueeze(1).expand_as(per_edge)
        top = per_edge.new_full((edges.num_dst, per_edge.size(1)), -torch.inf)
        top = top.scatter_reduce(0, index, per_edge, "amax")
    return top.masked_fill(top.isinf(), 0.0)


def segment_sum(per_edge: Tensor, edges: Edges) -> Tensor:
    """The sum over each neighbourhood, `[E, ...]` grouped by dst to `[N_dst, ...]`."""
    # On a CPU, torch adds wide rows three times faster than torch_scatter; on a GPU, torch_scatter needs no atomics.
    if WITH_TORCH_SCATTER and (per_edge.is_cuda or per_edge.dim() == 2):
        total: Tensor = _Segment.apply(per_edge, edges.rowptr, edges.wide[1], "sum")
        return total
    return per_edge.new_zeros(edges.num_dst, *per_edge.shape[1:]).index_add(0, edges.wide[1], per_edge)


class _Segment(torch.autograd.Function):
    """torch_scatter's segment_csr. Its own backward has no derivative; a gather of torch's has, of any order."""

    @staticmethod
    def forward(per_edge: Tensor, rowptr: Tensor, dst: Tensor, reduce: str) -> Tensor:
        reduced: Tensor = torch_scatter.segment_csr(per_edge.contiguous(), rowptr, reduce=reduce)
        return reduced

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (dst,) = ctx.saved_tensors
        return grad.index_select(0, dst), None, None, None  # of the sum; the max is asked for without a gradient

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], per_edge: Tensor, rowptr: Tensor, dst: Tensor, reduce: str
    ) -> tuple[Tensor, int]:
        batch = in_dims[0]
        if batch is None or any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError("vmap maps over features and parameters, not over the graph.")
        return _Segment.apply(per_edge.movedim(batch, -1), rowptr, dst, reduce), -1
