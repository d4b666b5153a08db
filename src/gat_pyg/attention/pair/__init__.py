"""`GATv2`: a score of the sum of the features of both ends and of the edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...graph.edges import Edges
from ..score import Score, ends, widened


@dataclass(frozen=True, eq=False)
class GATv2(Score):
    r"""The score of GATv2 (Brody et al., ICLR 2022).

    .. math::
        e_{ij} = \vec{\mathbf{a}}^T \mathrm{LeakyReLU}(x_i + x_j + \mathbf{W}_e u_{ij})

    Args:
        x_dst: x_i, `[N_dst, H, C]`.
        att: a, `[H, C]`.
        negative_slope: of the LeakyReLU.
        edge_attr: u, `[E, D]` in the caller's edge order.
        lin_edge: W_e, `[H, C, D]`; together with `edge_attr`, or neither.
    """

    shapes: ClassVar = {
        "x_dst": ("N_dst", "H", "C"),
        "att": ("H", "C"),
        "edge_attr": ("E", "D"),
        "lin_edge": ("H", "C", "D"),
    }
    options: ClassVar = ("negative_slope",)
    kernels: ClassVar = "pair"

    x_dst: Tensor
    att: Tensor
    negative_slope: float = 0.2
    edge_attr: Tensor | None = None
    lin_edge: Tensor | None = None

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst; makes a few `[E, H, C]`."""
        x_i, x_j = ends(self.x_dst, x, edges)
        z = x_i + x_j
        if self.edge_attr is not None and self.lin_edge is not None:
            z = z + torch.einsum("ed,hcd->ehc", widened(self.edge_attr), widened(self.lin_edge))
        return edges.group(widened((F.leaky_relu(z, self.negative_slope) * self.att).sum(-1)))
