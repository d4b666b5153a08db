"""The operation: softmax attention over the neighbourhoods of a graph, behind one function and several backends."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..graph.adjacency import EdgeList
from ..graph.edges import Edges
from ..graph.remembered import is_traced
from ..kernels.device import result_dtype, unsupported_reason
from ..philox import draw_seed, drops
from . import fused, reference, segment, traced
from .score import Operation, Score
from .segment import factors

Backend: TypeAlias = Literal["auto", "fused", "segment", "reference"]
BACKENDS = ("auto", "fused", "segment", "reference")


def attend(
    x: Tensor,
    score: Score,
    edges: Edges | EdgeList,
    *,
    edge_weight: Tensor | None = None,
    dropout: float | Tensor = 0.0,
    backend: Backend = "auto",
    return_attention_weights: bool = False,
) -> Any:
    r"""Attend over every neighbourhood: equations (2) and (4) of Veličković et al. (ICLR 2018), for any score e_ij.

    .. math::
        \alpha_{ij} = \mathrm{softmax}_j(e_{ij}), \quad
        O_i = \sum_{j \in \mathcal{N}_i} k_{ij}\, w_{ij}\, \alpha_{ij}\, x_j

    k_ij is attention dropout: 0 with probability p, else 1 / (1 - p). Its seed is drawn from torch's generator; one
    seed gives the same mask in all backends and on all devices. w_ij is the weight of an edge, 1 without
    `edge_weight`. A dst without neighbours gets zeros.

    Sums are in float32 or wider whatever the dtype of `x`; "fused", and any backend on a CPU, gives the same bits every
    time. Differentiable any number of times, in reverse and in forward mode (`torch.func.jvp`, `jacfwd`, `hessian`,
    `torch.autograd.forward_ad`). Memory: "fused" needs one or two more `[N, H, C]`, "segment" a few `[E, H]` besides
    those of the score's `per_edge`. Forward mode runs in plain torch and needs `[E, H, C]`.

    Args:
        x: `[N_src, H, C]`, the transformed features W h.
        score: the mechanism: `Additive`, the paper's; `Additive()`, constant attention; `GATv2`; `Dot`; or
            another subclass of `gat_pyg.attention.score.Score`.
        edges: the neighbourhoods; or an `EdgeList`, which a compiler can trace, and which may be meta or fake.
        edge_weight: w, `[E, H]` in the caller's edge order; it multiplies alpha after the softmax.
        dropout: p, the probability that an attention coefficient is dropped; 0 outside training. A number, or a tensor
            of one, whose value is not checked, and which is read again when a CUDA graph is replayed. Where
            `torch.func.vmap` maps over it, each model has its own p.
        backend: "fused" (kernels for CPU and CUDA), "segment", "reference" (slow: one neighbourhood at a time), or
            "auto": "fused" if it supports the call, else "segment".
        return_attention_weights: also return alpha, an `[E, H]` that "fused" does not compute otherwise.

    Returns:
        O `[N_dst, H, C]`; with the weights `(O, alpha)`, alpha `[E, H]` after dropout and times w, in the caller's edge
        order (0 where `edges` has a row without an edge).

    Raises:
        ValueError: if a shape or a device does not fit the others, `dropout` is outside [0, 1], the backend is
            unknown, or it is "fused" and does not support the call.

    Example:
        >>> from gat_pyg import Additive, Dot
        >>> edges = Edges.from_index(torch.tensor([[1, 2], [0, 0]]), num_src=3, num_dst=1)
        >>> x = torch.tensor([[[0.0]], [[2.0]], [[4.0]]])
        >>> attend(x, Additive(), edges).tolist()
        [[[3.0]]]
        >>> attend(x, Dot(x_dst=torch.zeros(1, 1, 1)), edges).tolist()
        [[[3.0]]]
    """
    if isinstance(edges, EdgeList):
        check_devices(x, edge_index=edges.edge_index)
        if is_traced(edges.edge_index):
            if not has_operator(backend, score, x, edge_weight):
                if drops(dropout) or edges.drop_seed is not None:
                    raise ValueError("a compiled call on an EdgeList with dropout needs the kernels.")
                keep, out = None, traced.attend(x, score, edges, edge_weight)
                dtype = result_dtype(x, edge_weight, *score.operands)
                out = out if out.dtype == dtype else out.to(dtype)
            else:
                seed = draw_seed(x.device, dropout) if drops(dropout) else None
                operation = Operation(x, score, edges, edge_weight, seed, dropout)
                out, *_, keep = fused.attend_for_compiler(operation, return_attention_weights)
            if not return_attention_weights:
                return out
            return out, traced.weights(x, score, edges, edge_weight, keep).to(out.dtype)
        edges = fused.group(edges, x.size(0))
    _check(x, edges, edge_weight, backend)
    operands = dict(zip(score.shapes, score.operands, strict=True))
    check_devices(x, edges=edges.index, edge_weight=edge_weight, **operands)
    score.check(x, edges)
    seed = draw_seed(x.device, dropout) if drops(dropout) else None
    kernels = uses_kernels(backend, score, x, edge_weight)
    if kernels and not return_attention_weights:
        return fused.attend(Operation(x, score, edges, edge_weight, seed, dropout))
    dtype = result_dtype(x, edge_weight, *score.operands)
    factor = factors(edges, edge_weight, seed, x.size(1), dropout, dtype)
    if kernels:
        out = fused.attend(Operation(x, score, edges, edge_weight, seed, dropout))
        alpha = edges.ungroup(segment.weights(x, score, edges, factor))
    else:
        by_torch = reference if backend == "reference" else segment
        out, alpha = by_torch.attend(x, score, edges, factor)
    return (out.to(dtype), alpha.to(dtype)) if return_attention_weights else out.to(dtype)


def uses_kernels(backend: Backend, score: Score, x: Tensor, edge_weight: Tensor | None = None) -> bool:
    """Return True if the kernels compute this call.

    Raises:
        ValueError: if the backend is "fused" and there are no kernels for it.
    """
    if backend not in ("auto", "fused"):
        return False
    reason = unsupported_reason(x, edge_weight, *score.operands)
    if not score.kernels:
        reason = f"{type(score).__name__} has no kernels"
    if reason is not None and backend == "fused":
        fallback = "backend='auto' falls back to another backend."
        raise ValueError(f"backend='fused' is not available here: {reason}. {fallback}")
    return reason is None


def has_operator(backend: Backend, score: Score, x: Tensor, edge_weight: Tensor | None = None) -> bool:
    """Return True if the operator on an `EdgeList` can be traced for this call; outside of a compiler nothing runs it.

    An exported program has plain operators, to run where this package is not, unless the backend is "fused".

    Raises:
        ValueError: as `uses_kernels`.
    """
    exporting = torch.compiler._is_exporting_flag  # torch 2.10 compiles is_exporting() to True, whatever it is
    if exporting and (backend != "fused" or torch.onnx.is_in_onnx_export()):
        return False
    if not torch.compiler.is_compiling():
        return bool(score.kernels)
    return uses_kernels(backend, score, x, edge_weight)


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise a ValueError that names both devices unless every tensor is on the device of x."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            moved = f"Did you mean {name}.to({str(x.device)!r})?"
            if name == "edges":
                moved = f"Build them from edge_index.to({str(x.device)!r})."
            raise ValueError(f"{name} is on {other.device}, expected {x.device}, the device of x. {moved}")


def _check(x: Tensor, edges: Edges, edge_weight: Tensor | None, backend: str) -> None:
    if x.dim() != 3 or x.size(0) != edges.num_src:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (N_src, H, C) with N_src = {edges.num_src}.")
    expected = edges.num_rows, x.size(1)
    if edge_weight is not None and edge_weight.shape != expected:
        raise ValueError(f"edge_weight has shape {tuple(edge_weight.shape)}, expected (E, H) = {expected}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
