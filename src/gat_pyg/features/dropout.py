"""Feature dropout with counter-based random numbers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..graph.remembered import is_traced
from .mask import drop
from .sparse import SparseFeatures, is_sparse_features


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Feature dropout on a dense `[N, F]` or, on the non-zeros alone, a sparse one: a zero stays zero either way.

    What is dropped follows from a seed, as in `attention.dropout`; in compiled code, and for meta and fake tensors,
    torch draws it.

    Raises:
        ValueError: if p is outside [0, 1].

    Example:
        >>> import torch
        >>> x = dropout(torch.eye(3).to_sparse_csr(), p=0.5)
        >>> set(x.content.tolist()) <= {0.0, 2.0}
        True
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout is {p}, expected a probability in [0, 1].")
    if not training or p == 0.0:
        return x
    if is_sparse_features(x):
        return SparseFeatures(x).dropped(p)
    return F.dropout(x, p) if is_traced(x) else drop(x, p)
