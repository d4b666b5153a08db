"""Feature dropout with counter-based random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.remembered import is_traced
from ..philox import drops
from .mask import drop
from .sparse import SparseFeatures, is_sparse_features


def dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Feature dropout on a dense `[N, F]` or, on the non-zeros alone, a sparse one: a zero stays zero either way.

    What is dropped follows from a seed, as in `attention.dropout`; in compiled code, and for meta and fake tensors,
    torch draws it. p is a number or a tensor of one, whose value is not checked; `torch.func.vmap` may map over it.

    Raises:
        ValueError: if p is outside [0, 1], or a tensor of another shape or dtype.

    Example:
        >>> x = dropout(torch.eye(3).to_sparse_csr(), p=0.5)
        >>> set(x.content.tolist()) <= {0.0, 2.0}
        True
    """
    if not drops(p) or not training:
        return x
    if is_sparse_features(x):
        return SparseFeatures(x).dropped(p)
    if not is_traced(x):
        return drop(x, p)
    return dropout_of_torch(x, p) if isinstance(p, Tensor) else F.dropout(x, p)


def dropout_of_torch(x: Tensor, p: Tensor) -> Tensor:
    """Return x with dropout drawn by torch's generator, whose own function takes no tensor p."""
    kept = torch.rand_like(x, dtype=p.dtype) >= p
    return x * (kept / (1.0 - p).clamp(min=torch.finfo(p.dtype).tiny)).to(x.dtype)
