"""The truth: equations (1) to (4) of the paper in plain torch, in the paper's order, slow and obvious.

Letters: `x` is W h, `[N_src, H, C]`; e_ij, equations (1) and (3), is the score's own `per_edge`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph.edges import Edges
from .score import Score, widened


def attend(x: Tensor, score: Score, edges: Edges, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend over one neighbourhood at a time.

    Args:
        x: `[N_src, H, C]`.
        score: the mechanism.
        edges: the neighbourhoods.
        factor: k w, `[R, H]` in the order of the rows of the edges; None for neither dropout nor weights.

    Returns:
        The output `[N_dst, H, C]`, and alpha `[R, H]`, 0 in rows without an edge.
    """
    src, dst = edges.index.long()
    is_edge = edges.ungroup(torch.ones_like(edges.src)) == 1
    messages = x[src]
    if (values := score.edge_values) is not None:
        messages = messages + torch.einsum("ed,hcd->ehc", *map(widened, values))
    e = edges.ungroup(score.per_edge(x, edges))  # (1), (3): [E, H]
    alpha = torch.zeros_like(e)
    out = []
    for i in range(edges.num_dst):
        j = ((dst == i) & is_edge).nonzero().squeeze(1)  # the edges into i
        alpha_i = torch.softmax(e[j], dim=0)  # (2)
        if factor is not None:
            alpha_i = alpha_i * factor[j]
        out.append((alpha_i[:, :, None] * messages[j]).sum(0))  # (4)
        alpha = alpha.index_put((j,), alpha_i.to(alpha.dtype))
    return torch.stack(out) if out else messages[:0], alpha
