"""`Additive`: the paper's score LeakyReLU(s_j + d_i + u_ij), and constant attention where there is no term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...graph.adjacency import EdgeList
from ...graph.edges import Edges
from ..score import Score, widened


@dataclass(frozen=True, eq=False)
class Additive(Score):
    r"""The score of Veličković et al. (ICLR 2018), equations (1) and (3).

    .. math::
        e_{ij} = \mathrm{LeakyReLU}(s_j + d_i + u_{ij})

    with s_j = a_src . W h_j and d_i = a_dst . W h_i, the two halves of a^T [W h_i || W h_j]. A term that is None is
    zero; with none of them attention is constant, 1 / |N_i|. A mechanism without a class of its own passes its scores
    as `score_edge`, with `negative_slope=1`.

    Args:
        score_src: s, `[N_src, H]`.
        score_dst: d, `[N_dst, H]`.
        score_edge: u, `[E, H]` in the caller's edge order, a row for each of `Edges.num_rows`.
        negative_slope: slope of the LeakyReLU; 1 keeps the scores unchanged.
    """

    shapes: ClassVar = {"score_src": ("N_src", "H"), "score_dst": ("N_dst", "H"), "score_edge": ("E", "H")}
    options: ClassVar = ("negative_slope",)
    kernels: ClassVar = "additive"
    saved: ClassVar = (("N_dst", "H", "C"), ("N_dst", "H"))  # O+ and A+

    score_src: Tensor | None = None
    score_dst: Tensor | None = None
    score_edge: Tensor | None = None
    negative_slope: float = 0.2

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst."""
        src, dst = edges.wide
        terms = [] if self.score_src is None else [widened(self.score_src).index_select(0, src)]
        terms += [] if self.score_dst is None else [widened(self.score_dst).index_select(0, dst)]
        terms += [] if self.score_edge is None else [edges.group(widened(self.score_edge))]
        if not terms:
            return x.new_zeros(edges.num_edges, x.size(1), dtype=torch.promote_types(x.dtype, torch.float32))
        return F.leaky_relu(sum(terms[1:], start=terms[0]), self.negative_slope)

    def saves_output(self, x: Tensor, edges: Edges | EdgeList, scored: bool) -> bool:
        """Return True if a score needs a gradient, and D and grad d come cheaper from O and O+ than from `[E, H]`."""
        return scored and any(operand is not None for operand in self.operands) and prefers_speed(x, edges)


def prefers_speed(x: Tensor, edges: Edges | EdgeList) -> bool:
    """Return True if the backward pass should read O and O+ ("speed"), False for a scratch of `[E, H]` ("memory").

    "speed" writes and reads N H C elements twice, in float32 or wider; "memory" E H elements and, on a CPU, their
    exponentials. So the mean number of edges per row decides. When compiling for a CPU it is always "speed", since N
    and E are not known.
    """
    if x.device.type == "cpu":
        return isinstance(edges, EdgeList) or x.size(2) * max(x.element_size(), 4) * x.size(0) < 32 * edges.num_edges
    return x.size(2) * max(x.element_size(), 4) * x.size(0) < 6.7 * edges.num_edges
