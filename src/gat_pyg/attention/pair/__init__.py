"""`GATv2` and `Dot`: scores of the features of both ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...graph.edges import Edges
from ..score import Score, ends, widened


@dataclass(frozen=True, eq=False)
class GATv2(Score):
    r"""The score of GATv2 (Brody et al., ICLR 2022).

    .. math::
        e_{ij} = \vec{\mathbf{a}}^T \mathrm{LeakyReLU}(x_i + x_j)

    Args:
        x_dst: x_i, `[N_dst, H, C]`.
        att: a, `[H, C]`.
        negative_slope: of the LeakyReLU.
    """

    shapes: ClassVar = {"x_dst": ("N_dst", "H", "C"), "att": ("H", "C")}
    options: ClassVar = ("negative_slope",)
    kernels: ClassVar = "pair"

    x_dst: Tensor
    att: Tensor
    negative_slope: float = 0.2

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst; makes a few `[E, H, C]`."""
        x_i, x_j = ends(self.x_dst, x, edges)
        return edges.group(widened((F.leaky_relu(x_i + x_j, self.negative_slope) * self.att).sum(-1)))


@dataclass(frozen=True, eq=False)
class Dot(Score):
    r"""The scaled dot product (Vaswani et al., NeurIPS 2017).

    .. math::
        e_{ij} = \langle x_i, x_j \rangle / \sqrt{C}

    Args:
        x_dst: x_i, `[N_dst, H, C]`.
    """

    shapes: ClassVar = {"x_dst": ("N_dst", "H", "C")}
    kernels: ClassVar = "pair"
    att: ClassVar = None  # for the kernels, which compute both scores of this file
    negative_slope: ClassVar = 1.0

    x_dst: Tensor

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst; makes a few `[E, H, C]`."""
        x_i, x_j = ends(self.x_dst, x, edges)
        return edges.group((x_i * x_j).sum(-1) / math.sqrt(x.size(-1)))
