"""Attention edge by edge, on segment operations over the neighbourhoods: differentiable any number of times.

Scores and softmax are `[E, H]`. The messages of equation (4) would be `[E, H, C]`; they are made a block of edges at a
time, forward and backward, so that nothing of that size is ever held, except in forward mode. The segment operations
are PyG's `segment`: torch_scatter's segment_csr, or torch's segment_reduce where that is missing. Both read the edges
of a neighbourhood in their order, so the sums have the same bits every time, on a GPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import segment

from ..graph.edges import Edges
from ..graph.remembered import NOT_OVER_THE_GRAPH
from ..kernels.models import each_cotangent, in_forward_mode
from ..philox import keep_mask
from .score import Score, widened


def attend(x: Tensor, score: Score, edges: Edges, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend over all neighbourhoods at once; arguments and results as in `reference.attend`."""
    alpha = weights(x, score, edges, factor)
    src, dst = edges.wide
    dtype = torch.promote_types(x.dtype, alpha.dtype)
    out = _weighted_sum(alpha.to(dtype), x.to(dtype), src, dst, edges.num_dst)
    if (values := score.edge_values) is not None:
        u, weight = (value.to(dtype) for value in values)
        each = torch.arange(edges.num_edges, device=x.device)
        per_head = edges.group(u).unsqueeze(1).expand(-1, x.size(1), -1)
        sums = _weighted_sum(alpha.to(dtype), per_head, each, dst, edges.num_dst)
        out = out + torch.einsum("nhd,hcd->nhc", sums, weight)
    return out, edges.ungroup(alpha)


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


# Two sums over the edges, each the derivative of the other:
#   out_i = sum_ij a_ij x_j     and     p_ij = <left_i, right_j>.
# In forward mode plain torch computes both, and holds `[E, H, C]`: torch returns wrong second derivatives for the `jvp`
# of an autograd function within another forward mode.


def _weighted_sum(alpha: Tensor, x: Tensor, src: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    if in_forward_mode():
        messages = alpha.unsqueeze(-1) * x.index_select(0, src)
        return messages.new_zeros(num_dst, *x.shape[1:]).index_add(0, dst, messages)
    out: Tensor = _WeightedSum.apply(alpha, x, src, dst, num_dst)
    return out


def _products(left: Tensor, right: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if in_forward_mode():
        return (left.index_select(0, i) * right.index_select(0, j)).sum(-1)
    out: Tensor = _Products.apply(left, right, i, j)
    return out


class _WeightedSum(torch.autograd.Function):
    """Equation (4): weights `[E, H]` and features `[N, H, C]`, summed over the edges from `src` to `dst`."""

    @staticmethod
    def forward(alpha: Tensor, x: Tensor, src: Tensor, dst: Tensor, num_dst: int) -> Tensor:
        out = x.new_zeros(num_dst, *x.shape[1:])
        for block, (message,) in _blocks(x, src.numel(), buffers=1):
            torch.index_select(x, 0, src[block], out=message)
            message.mul_(alpha[block].unsqueeze(-1))
            if out.is_cpu:
                out.index_add_(0, dst[block], message)
            else:  # by a stable sort: index_add_ adds atomically, in any order
                out.index_put_((dst[block],), message, accumulate=True)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, x, src, dst = ctx.saved_tensors
        grad_alpha = _products(grad, x, dst, src) if ctx.needs_input_grad[0] else None
        grad_x = _weighted_sum(alpha, grad, dst, src, x.size(0)) if ctx.needs_input_grad[1] else None
        return grad_alpha, grad_x, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], alpha: Tensor, x: Tensor, *graph: Any) -> tuple[Tensor, int]:
        alpha, x = _into_heads(info.batch_size, in_dims, alpha, x)
        out: Tensor = _WeightedSum.apply(alpha, x, *graph)
        return out.unflatten(1, (info.batch_size, -1)), 1


class _Products(torch.autograd.Function):
    """The inner product of the features at both ends of each edge: twice `[N, H, C]` to `[E, H]`."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, i: Tensor, j: Tensor) -> Tensor:
        out = left.new_empty(i.numel(), left.size(1))
        for block, (one, other) in _blocks(left, i.numel(), buffers=2):
            torch.index_select(left, 0, i[block], out=one)
            torch.index_select(right, 0, j[block], out=other)
            torch.sum(one.mul_(other), -1, out=out[block])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, i, j = ctx.saved_tensors
        grad_left = _weighted_sum(grad, right, j, i, left.size(0)) if ctx.needs_input_grad[0] else None
        grad_right = _weighted_sum(grad, left, i, j, right.size(0)) if ctx.needs_input_grad[1] else None
        return grad_left, grad_right, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], left: Tensor, right: Tensor, *graph: Any
    ) -> tuple[Tensor, int]:
        left, right = _into_heads(info.batch_size, in_dims, left, right)
        out: Tensor = _Products.apply(left, right, *graph)
        return out.unflatten(1, (info.batch_size, -1)), 1


def _blocks(x: Tensor, num_edges: int, buffers: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of edges, with buffers `[edges, H, C]` of a size that a core's cache holds; on a GPU few blocks do."""
    size = (2 << 20) if x.device.type == "cpu" else (256 << 20)  # bytes
    step = max(1, min(num_edges, size // (x.element_size() * max(1, x.size(1) * x.size(2)))))
    held = [x.new_empty(step, *x.shape[1:]) for _ in range(buffers)]
    for start in range(0, num_edges, step):
        stop = min(start + step, num_edges)
        yield slice(start, stop), [buffer[: stop - start] for buffer in held]


def _into_heads(batch_size: int, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Fold the mapped axis of `[rows, H, ...]` into H: to the graph, a batch of features is more heads."""
    if any(dim is not None for dim in in_dims[2:]):
        raise NotImplementedError(NOT_OVER_THE_GRAPH)
    return tuple(
        (t.unsqueeze(1).expand(-1, batch_size, *[-1] * (t.dim() - 1)) if dim is None else t.movedim(dim, 1)).flatten(
            1, 2
        )
        for t, dim in zip(tensors, in_dims, strict=False)
    )
