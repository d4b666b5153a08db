"""Scores of a ranking of links: ROC-AUC, average precision, Hits@K and MRR, as OGB defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision


def roc_auc(pos: Tensor, neg: Tensor) -> float:
    """Return the probability that a positive link `[P]` is above a negative one `[M]`; a tie counts half.

    Example:
        >>> roc_auc(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))
        0.875
    """
    return float(binary_auroc(*_graded(pos, neg)))


def average_precision(pos: Tensor, neg: Tensor) -> float:
    """Return the mean precision at the positive links `[P]` in the ranking with the negative ones `[M]`.

    Example:
        >>> average_precision(torch.tensor([2.0, 0.0]), torch.tensor([1.0]))  # (1 / 1 + 2 / 3) / 2
        0.8333333730697632
    """
    return float(binary_average_precision(*_graded(pos, neg)))


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


def _graded(pos: Tensor, neg: Tensor) -> tuple[Tensor, Tensor]:
    """Return the links' grades in 0..1, in the order of their scores, and their labels.

    torchmetrics would turn scores outside 0..1 into probabilities, and the largest would be equal.
    """
    grades = torch.cat([pos, neg]).unique(return_inverse=True)[1].double()
    labels = torch.cat([torch.ones_like(pos, dtype=torch.long), torch.zeros_like(neg, dtype=torch.long)])
    return grades / grades.max().clamp(min=1), labels
