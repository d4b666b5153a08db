"""Scores of a ranking of links: Hits@K and MRR, as OGB defines them."""

from __future__ import annotations

import torch
from torch import Tensor


def hits(pos: Tensor, neg: Tensor, k: int) -> float:
    """Return the share of the positive links `[P]` above the k-th of the negative ones `[M]`; 1 if M < k.

    Example:
        >>> hits(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0, 0.0]), k=2)  # a tie is no hit
        0.5
    """
    if neg.numel() < k:
        return 1.0
    return float((pos > neg.topk(k).values[-1]).double().mean())


def mrr(pos: Tensor, neg: Tensor) -> float:
    """Return the mean of 1 / rank of the positive links `[P]`, each among all negative ones `[M]`, or its own `[P, M]`.

    A tie counts half: the rank is the mean of the best and the worst possible.

    Example:
        >>> mrr(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0]))  # ranks 1 and 2.5
        0.7
    """
    neg = neg.sort().values
    links = pos[:, None] if neg.dim() == 2 else pos
    above, at_least = (neg.size(-1) - torch.searchsorted(neg, links, right=right) for right in (True, False))
    return float((1 / (1 + (above + at_least).double() / 2)).mean())
