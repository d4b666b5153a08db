"""Scores of the features of both ends: `GATv2`, of their sum, and `Dot`, their scaled product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

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
        negative_slope: slope of the LeakyReLU.
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
            z = z + torch.einsum("ed,hcd->ehc", edges.group(widened(self.edge_attr)), widened(self.lin_edge))
        return widened((F.leaky_relu(z, self.negative_slope) * self.att).sum(-1))

    def per_edge_exported(self, x: Tensor, edges: Any) -> Tensor:
        """Return `per_edge` with one `[E, H C]`: a bag of embeddings adds both ends, one product multiplies by a."""
        both = torch.cat([widened(self.x_dst), widened(x)]).flatten(1)
        index, offsets = edges.pairs
        z = F.embedding_bag(index, both, offsets, mode="sum")
        if self.edge_attr is not None and self.lin_edge is not None:
            weight = widened(self.lin_edge).flatten(0, 1)
            z = torch.addmm(z, edges.group(widened(self.edge_attr)), weight.t())
        heads = torch.eye(self.att.size(0), dtype=z.dtype, device=z.device)
        att = (heads.unsqueeze(2) * self.att).flatten(1)  # [H, H C], 0 for the other heads
        return F.leaky_relu(z, self.negative_slope, inplace=self.negative_slope >= 0) @ att.t()


@dataclass(frozen=True, eq=False)
class Dot(Score):
    r"""The scaled dot product (Vaswani et al., NeurIPS 2017), of edges with features too (Shi et al., IJCAI 2021).

    .. math::
        e_{ij} = \langle x_i, k_j + \mathbf{W}_e u_{ij} \rangle / \sqrt{C}

    With edge features, x_j + W_e u_ij is attended to instead of x_j. No backend allocates `[E, H, C]` for that: the
    product is <W_e^T x_i, u_ij>, and W_e is applied to sum_j alpha_ij u_ij.

    Args:
        x_dst: x_i, the queries, `[N_dst, H, C]`.
        key: k_j, `[N_src, H, C]`; None for x_j, the features that are attended to.
        edge_attr: u, `[E, D]` in the caller's edge order.
        lin_edge: W_e, `[H, C, D]`; together with `edge_attr`, or neither.
    """

    shapes: ClassVar = {
        "x_dst": ("N_dst", "H", "C"),
        "key": ("N_src", "H", "C"),
        "edge_attr": ("E", "D"),
        "lin_edge": ("H", "C", "D"),
    }
    kernels: ClassVar = "pair"

    x_dst: Tensor
    key: Tensor | None = None
    edge_attr: Tensor | None = None
    lin_edge: Tensor | None = None

    @property
    def edge_values(self) -> tuple[Tensor, Tensor] | None:
        """The features of the edges, and W_e."""
        return None if self.edge_attr is None or self.lin_edge is None else (self.edge_attr, self.lin_edge)

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst; allocates a few tensors `[E, H, C]`."""
        x_i, k_j = ends(self.x_dst, x if self.key is None else self.key, edges)
        return self._with_features((x_i * k_j).sum(-1), edges) / math.sqrt(x.size(-1))

    def per_edge_exported(self, x: Tensor, edges: Any) -> Tensor:
        """Return `per_edge` with two `[E, H, C]`; a product sums few channels twice as fast as `sum` does."""
        x_i, k_j = ends(self.x_dst, x if self.key is None else self.key, edges)
        e = x_i.mul_(k_j) @ x_i.new_ones(x.size(-1))
        return self._with_features(e, edges) / math.sqrt(x.size(-1))

    def _with_features(self, e: Tensor, edges: Any) -> Tensor:
        if self.edge_attr is None or self.lin_edge is None:
            return e
        p = torch.einsum("nhc,hcd->nhd", widened(self.x_dst), widened(self.lin_edge))
        u = edges.group(widened(self.edge_attr))
        return e + torch.einsum("ehd,ed->eh", p.index_select(0, edges.wide[1]), u)
