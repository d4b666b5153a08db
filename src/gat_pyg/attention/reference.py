"""The truth: equations (1) to (6) of the paper in plain torch, in the paper's order, slow and obvious.

Letters: `x` is W h, `[N_src, H, C]`; `score_src` and `score_dst` are a_src . W h_j `[N_src, H]` and a_dst . W h_i
`[N_dst, H]`, the two halves of a^T [W h_i || W h_j]; `score_edge` `[E, H]` is what an edge adds of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.edges import Edges


def attend(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    edges: Edges,
    score_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One neighbourhood at a time: the output `[N_dst, H, C]` and alpha `[E, H]` in the caller's order."""
    src, dst = edges.index.long()
    alpha = x.new_zeros(edges.num_edges, x.size(1))  # [E, H]
    out = []
    for i in range(edges.num_dst):
        j = (dst == i).nonzero().squeeze(1)  # the edges into i
        e_i = x.new_zeros(j.numel(), x.size(1))  # [|N_i|, H]
        if score_src is not None:
            e_i = e_i + score_src[src[j]]  # (1)
        if score_dst is not None:
            e_i = e_i + score_dst[i]
        if score_edge is not None:
            e_i = e_i + score_edge[j]
        e_i = F.leaky_relu(e_i, negative_slope)  # (3)
        alpha_i = torch.softmax(e_i, dim=0)  # (2)
        if keep is not None:
            alpha_i = alpha_i * keep[j]
        out.append((alpha_i[:, :, None] * x[src[j]]).sum(0))  # (4)
        alpha = alpha.index_put((j,), alpha_i)
    return torch.stack(out) if out else x[:0], alpha


def pair_score(x: Tensor, x_dst: Tensor, att: Tensor | None, edges: Edges, negative_slope: float = 0.2) -> Tensor:
    """GATv2's score att . LeakyReLU(x_i + x_j) of every edge, or without att <x_i, x_j> / sqrt(C): `[E, H]`."""
    x_i, x_j = x_dst[edges.index[1].long()], x[edges.index[0].long()]
    if att is None:
        return (x_i * x_j).sum(-1) / math.sqrt(x.size(-1))
    return (att * F.leaky_relu(x_i + x_j, negative_slope)).sum(-1)


def concat_heads(out: Tensor) -> Tensor:
    """Equation (5): `[N, H, C]` to `[N, H C]`."""
    return out.flatten(1)


def mean_heads(out: Tensor) -> Tensor:
    """Equation (6): `[N, H, C]` to `[N, C]`."""
    return out.mean(1)


def attend_dense(
    x: Tensor, score_src: Tensor, score_dst: Tensor, count: Tensor, negative_slope: float = 0.2
) -> tuple[Tensor, Tensor]:
    """The N x N form, as the authors' code has it: every pair is scored, and pairs without an edge are masked.

    Args:
        x: `[N_src, H, C]`.
        score_src: `[N_src, H]`.
        score_dst: `[N_dst, H]`.
        count: `[N_dst, N_src]`, how many edges run from src to dst.
        negative_slope: of the LeakyReLU.

    Returns:
        The output `[N_dst, H, C]` and alpha `[N_dst, N_src, H]`, repeated edges together.
    """
    e = F.leaky_relu(score_dst[:, None] + score_src[None, :], negative_slope)  # [N_dst, N_src, H]
    alpha = torch.softmax(e + count.to(e).log()[:, :, None], dim=1).nan_to_num()  # an empty row is all -inf
    return torch.einsum("ijh,jhc->ihc", alpha, x), alpha
