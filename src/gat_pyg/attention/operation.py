"""The operation: softmax attention over the neighbourhoods of a graph, behind one function and several backends."""

from __future__ import annotations

from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from ..graph.edges import Edges, Flow
from ..kernels.device import result_dtype, unsupported_reason
from ..philox import draw_seed, keep_mask
from . import fused, reference, segment

Backend: TypeAlias = Literal["auto", "fused", "segment", "reference"]
BACKENDS = ("auto", "fused", "segment", "reference")


@overload
def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    *,
    score_edge: Tensor | None = ...,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    *,
    score_edge: Tensor | None = ...,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    *,
    score_edge: Tensor | None = ...,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    *,
    score_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    backend: Backend = "auto",
    return_attention_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend over every neighbourhood: equations (1) to (4) of Veličković et al. (ICLR 2018).

    .. math::
        e_{ij} = \mathrm{LeakyReLU}(s_j + d_i + u_{ij}), \quad
        \alpha_{ij} = \mathrm{softmax}_j(e_{ij}), \quad
        O_i = \sum_{j \in \mathcal{N}_i} k_{ij}\, \alpha_{ij}\, x_j

    with s_j = a_src . W h_j and d_i = a_dst . W h_i for the paper's mechanism, and k_ij the attention dropout: 0, or
    1 / (1 - p) with probability 1 - p, by a seed drawn from torch's generator; the same for all backends and devices
    where the seed is. A term that is None is zero; with none of them attention is constant, 1 / |N_i|. Any other
    mechanism hands in its scores as `score_edge` with `negative_slope=1`. A dst without neighbours gets zeros.

    Sums are in float32 or wider whatever the dtype of `x`, and with "fused", or on a CPU, the same bits every time.
    Differentiable any number of times, in reverse and in forward mode (`torch.func.jvp`, `jacfwd`, `hessian`,
    `torch.autograd.forward_ad`). Memory: with "fused" `[N, H, C]` once or twice more, with "segment" a few `[E, H]`;
    never `[E, H, C]`, except in forward mode, which plain torch computes whatever the backend.

    Args:
        x: `[N_src, H, C]`, the transformed features W h.
        score_src: `[N_src, H]` or None.
        score_dst: `[N_dst, H]` or None.
        edges: the neighbourhoods.
        score_edge: `[E, H]` in the caller's edge order, or None.
        negative_slope: of the LeakyReLU; 1 leaves the scores as they are.
        dropout: p, the probability that an attention coefficient is dropped; 0 outside training.
        backend: "fused" (kernels for CPU and CUDA), "segment", "reference" (slow: one neighbourhood at a time), or
            "auto": "fused" where it can serve, else "segment".
        return_attention_weights: whether to return alpha too, which is `[E, H]` that "fused" does not make by itself.

    Returns:
        O `[N_dst, H, C]`; with the weights `(O, alpha)`, alpha `[E, H]` after dropout in the caller's edge order.

    Raises:
        ValueError: if a shape or a device does not fit the others, `dropout` is outside [0, 1], or the backend is
            unknown, or "fused" and cannot serve.

    Example:
        >>> edges = Edges.from_index(torch.tensor([[1, 2], [0, 0]]), num_src=3, num_dst=1)
        >>> x = torch.tensor([[[0.0]], [[2.0]], [[4.0]]])
        >>> attend(x, None, None, edges).tolist()
        [[[3.0]]]
    """
    _check(x, edges, dropout, backend)
    check_devices(x, edges=edges.index, score_src=score_src, score_dst=score_dst, score_edge=score_edge)
    heads = x.size(1)
    for name, score, rows in (
        ("score_src", score_src, edges.num_src),
        ("score_dst", score_dst, edges.num_dst),
        ("score_edge", score_edge, edges.num_edges),
    ):
        if score is not None and score.shape != (rows, heads):
            raise ValueError(f"{name} has shape {tuple(score.shape)}, expected {(rows, heads)}.")
    seed = draw_seed(x.device) if dropout > 0.0 else None
    operands = (x, score_src, score_dst, score_edge)
    kernel = fuses(backend, *operands)
    if kernel and not return_attention_weights:
        return fused.attend("additive", operands, seed, edges, None, negative_slope, dropout)
    dtype = result_dtype(*operands)
    keep = None if seed is None else keep_mask(seed, edges.drawn, heads, dropout, _wide(dtype))
    if kernel:
        out = fused.attend("additive", operands, seed, edges, None, negative_slope, dropout)
        alpha = edges.ungroup(segment.weights(x, score_src, score_dst, edges, score_edge, negative_slope, keep))
    else:
        plain = reference.attend if backend == "reference" else segment.attend
        out, alpha = plain(x, score_src, score_dst, edges, score_edge, negative_slope, keep)
    return (out.to(dtype), alpha.to(dtype)) if return_attention_weights else out.to(dtype)


@overload
def attend_pairs(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    *,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def attend_pairs(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    *,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attend_pairs(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    *,
    negative_slope: float = ...,
    dropout: float = ...,
    backend: Backend = ...,
    return_attention_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attend_pairs(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    backend: Backend = "auto",
    return_attention_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend with scores that take the features of both ends: GATv2's (Brody et al., ICLR 2022), or the dot product's.

    .. math::
        e_{ij} = \vec{\mathbf{a}}^T \mathrm{LeakyReLU}(x_i + x_j) \quad \text{or, without a,} \quad
        e_{ij} = \langle x_i, x_j \rangle / \sqrt{C}

    then as `attend`. With "fused" score, softmax and sum are one pass over each neighbourhood, two numbers an edge and
    head are all that is kept, in the backward pass; the other backends make a few `[E, H, C]`.

    Args:
        x: `[N_src, H, C]`.
        x_dst: `[N_dst, H, C]`.
        att: `[H, C]`, GATv2's a, or None for the scaled dot product.
        edges: the neighbourhoods.
        negative_slope: of the LeakyReLU.
        dropout, backend, return_attention_weights: as of `attend`.

    Returns:
        As `attend`.

    Raises:
        ValueError: as `attend`.

    Example:
        >>> edges = Edges.from_index(torch.tensor([[1, 2], [0, 0]]), num_src=3, num_dst=1)
        >>> x = torch.tensor([[[0.0]], [[2.0]], [[4.0]]])
        >>> attend_pairs(x, torch.zeros(1, 1, 1), None, edges).tolist()
        [[[3.0]]]
    """
    _check(x, edges, dropout, backend)
    check_devices(x, edges=edges.index, x_dst=x_dst, att=att)
    if x_dst.shape != (edges.num_dst, *x.shape[1:]):
        raise ValueError(f"x_dst has shape {tuple(x_dst.shape)}, expected {(edges.num_dst, *x.shape[1:])}.")
    if att is not None and att.shape != x.shape[1:]:
        raise ValueError(f"att has shape {tuple(att.shape)}, expected {tuple(x.shape[1:])}.")
    seed = draw_seed(x.device) if dropout > 0.0 else None
    operands = (x, x_dst, att, None)
    kernel = fuses(backend, *operands)
    if kernel and not return_attention_weights:
        return fused.attend("pair", operands, seed, edges, None, negative_slope, dropout)
    dtype = result_dtype(*operands)
    keep = None if seed is None else keep_mask(seed, edges.drawn, x.size(1), dropout, _wide(dtype))
    plain = reference if backend == "reference" else segment
    score = plain.pair_score(x, x_dst, att, edges, negative_slope)
    if kernel:
        out = fused.attend("pair", operands, seed, edges, None, negative_slope, dropout)
        alpha = edges.ungroup(segment.weights(x, None, None, edges, score, 1.0, keep))
    else:
        out, alpha = plain.attend(x, None, None, edges, score, 1.0, keep)
    return (out.to(dtype), alpha.to(dtype)) if return_attention_weights else out.to(dtype)


def attend_edge_index(
    kind: fused.Kind,
    operands: tuple[Tensor | None, ...],
    edge_index: Tensor,
    graph: tuple[int, bool, Flow],
    negative_slope: float,
    dropout: float,
) -> Tensor:
    """`attend` or `attend_pairs` for a compiler: of an edge list, which is grouped where the operator runs.

    Args:
        kind: "additive" or "pair".
        operands: x and both scores, or x, x_dst and att.
        edge_index: `[2, E]`.
        graph: (num_dst, add_self_loops, flow) of `gat_pyg.graph.adjacency.neighbourhoods`.
        negative_slope: of the LeakyReLU.
        dropout: as of `attend`.
    """
    x, first, second = operands
    assert x is not None
    check_devices(x, edge_index=edge_index)
    seed = draw_seed(x.device) if dropout > 0.0 else None
    return fused.attend(kind, (x, first, second, None), seed, graph, edge_index, negative_slope, dropout)


def fuses(backend: Backend, *operands: Tensor | None) -> bool:
    """Whether the kernels serve these operands, x first, for a backend; ValueError where "fused" has to and cannot."""
    if backend not in ("auto", "fused"):
        return False
    reason = unsupported_reason(*operands)
    if reason is not None and backend == "fused":
        raise ValueError(f"backend='fused' cannot serve: {reason}. backend='auto' takes another one where it must.")
    return reason is None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise a ValueError that names both devices unless every tensor is on the device of x."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            moved = f"Did you mean {name}.to({str(x.device)!r})?"
            if name == "edges":
                moved = f"Build them from edge_index.to({str(x.device)!r})."
            raise ValueError(f"{name} is on {other.device}, expected {x.device}, the device of x. {moved}")


def _check(x: Tensor, edges: Edges, dropout: float, backend: str) -> None:
    if x.dim() != 3 or x.size(0) != edges.num_src:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (N_src, H, C) with N_src = {edges.num_src}.")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}, expected a probability in [0, 1].")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
