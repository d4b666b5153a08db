"""The operation: softmax attention over the neighbourhoods of a graph, behind one function and several backends."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..edges import Edges
from . import reference, segment

Backend: TypeAlias = Literal["auto", "segment", "reference"]

BACKENDS = {"auto": segment.attend, "segment": segment.attend, "reference": reference.attend}


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
) -> tuple[Tensor, Tensor]:
    r"""Attend over every neighbourhood: equations (1) to (4) of Veličković et al. (ICLR 2018).

    .. math::
        e_{ij} = \mathrm{LeakyReLU}(s_j + d_i + u_{ij}), \quad
        \alpha_{ij} = \mathrm{softmax}_j(e_{ij}), \quad
        O_i = \sum_{j \in \mathcal{N}_i} k_{ij}\, \alpha_{ij}\, x_j

    with s_j = a_src . W h_j and d_i = a_dst . W h_i for the paper's mechanism, and k_ij the attention dropout: 0, or
    1 / (1 - p) with probability 1 - p, drawn from torch's generator in the caller's edge order. A term that is None
    is zero; with none of them attention is constant, 1 / |N_i|. Any other mechanism hands in its scores as
    `score_edge` with `negative_slope=1`. A dst without neighbours gets zeros.

    Sums are in float32 or wider whatever the dtype of `x`, and the same bits every time on a CPU. Differentiable any
    number of times. Memory: a few `[E, H]` and no `[E, H, C]`, forward and backward.

    Args:
        x: `[N_src, H, C]`, the transformed features W h.
        score_src: `[N_src, H]` or None.
        score_dst: `[N_dst, H]` or None.
        edges: the neighbourhoods.
        score_edge: `[E, H]` in the caller's edge order, or None.
        negative_slope: of the LeakyReLU; 1 leaves the scores as they are.
        dropout: p, the probability that an attention coefficient is dropped; 0 outside training.
        backend: "segment", "reference" (slow: one neighbourhood at a time), or "auto", the fastest that can serve.

    Returns:
        O `[N_dst, H, C]`, and alpha `[E, H]` after dropout in the caller's edge order.

    Raises:
        ValueError: if a shape does not fit the others, `dropout` is outside [0, 1], or the backend is unknown.

    Example:
        >>> edges = Edges.from_index(torch.tensor([[1, 2], [0, 0]]), num_src=3, num_dst=1)
        >>> out, alpha = attend(torch.tensor([[[0.0]], [[2.0]], [[4.0]]]), None, None, edges)
        >>> out.tolist(), alpha.tolist()
        ([[[3.0]]], [[0.5], [0.5]])
    """
    _check(x, score_src, score_dst, edges, score_edge, dropout, backend)
    keep = None
    if dropout > 0.0:
        keep = F.dropout(x.new_ones(edges.num_edges, x.size(1), dtype=_wide(x.dtype)), p=dropout)
    out, alpha = BACKENDS[backend](x, score_src, score_dst, edges, score_edge, negative_slope, keep)
    dtype = x.dtype
    for score in (score_src, score_dst, score_edge):
        dtype = dtype if score is None else torch.promote_types(dtype, score.dtype)
    return out.to(dtype), alpha.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    score_edge: Tensor | None,
    dropout: float,
    backend: str,
) -> None:
    if x.dim() != 3 or x.size(0) != edges.num_src:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (N_src, H, C) with N_src = {edges.num_src}.")
    heads = x.size(1)
    for name, score, rows in (
        ("score_src", score_src, edges.num_src),
        ("score_dst", score_dst, edges.num_dst),
        ("score_edge", score_edge, edges.num_edges),
    ):
        if score is not None and score.shape != (rows, heads):
            raise ValueError(f"{name} has shape {tuple(score.shape)}, expected {(rows, heads)}.")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}, expected a probability in [0, 1].")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
