"""`Cosine`: the cosine of the features of both ends, at a learnable temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.device import result_dtype
from ..score import Score, ends

EPS = 1e-12  # of the norms, as in torch.nn.functional.normalize


@dataclass(frozen=True, eq=False)
class Cosine(Score):
    r"""The score of AGNN (Thekumparampil et al., 2018).

    .. math::
        e_{ij} = \beta \cos(x_i, x_j)

    The cosine with a zero vector is 0.

    Args:
        x_dst: x_i, `[N_dst, H, C]`.
        beta: the inverse temperature of each head, `[H]`.
    """

    shapes: ClassVar = {"x_dst": ("N_dst", "H", "C"), "beta": ("H",)}
    kernels: ClassVar = "cosine"

    x_dst: Tensor
    beta: Tensor

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]`, grouped by dst; makes a few `[E, H, C]`."""
        dtype = torch.promote_types(torch.float32, result_dtype(x, *self.operands))
        x_i, x_j = (F.normalize(end.to(dtype), dim=-1, eps=EPS) for end in (self.x_dst, x))
        x_i, x_j = ends(x_i, x_j, edges)
        return edges.group(self.beta * (x_i * x_j).sum(-1))

    # For the kernels, e_ij = r_j <q_i, x_j> with the queries q_i = beta x_i / |x_i| and r_j = 1 / |x_j|.

    def queries(self, dtype: torch.dtype) -> Tensor:
        """Return q, `[N_dst, H, C]`."""
        x_dst = self.x_dst.to(dtype)
        return self.beta[..., None, :, None] * (inverse_norm(x_dst)[..., None] * x_dst)

    def query_gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of x_dst from that of q, and what each dst adds to that of beta, `[N_dst, H]`."""
        x_dst = self.x_dst.to(grad.dtype)
        inverse = inverse_norm(x_dst)[..., None]
        unit = inverse * x_dst
        along = (unit * grad).sum(-1, keepdim=True)
        across = grad - _longer(inverse) * along * unit
        return self.beta[..., None, :, None] * (inverse * across), along.squeeze(-1)


def inverse_norm(x: Tensor) -> Tensor:
    """Return 1 / |x| over the last axis, at most 1 / `EPS`."""
    norm: Tensor = x.norm(dim=-1)
    return norm.clamp(min=EPS).reciprocal()


def along_itself(x: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x through its norm, from that of the product <q, x> / |x| in x as if |x| were constant."""
    return -_longer(inverse) * inverse**2 * (x * grad).sum(-1, keepdim=True) * x


def _longer(inverse: Tensor) -> Tensor:
    """Return 1 for norms above `EPS`, 0 for those that are constant because they are clamped."""
    return (inverse * EPS < 1).to(inverse.dtype)
