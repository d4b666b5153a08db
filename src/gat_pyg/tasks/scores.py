"""Losses, sufficient statistics and scores of node labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = ("accuracy", "micro_f1")  # in percent, a fraction; a run has one of them


def train_sums(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and what the epoch adds up: (loss, known)."""
    loss, size = node_loss(out, y), known(y).sum()
    wide = torch.promote_types(loss.dtype, torch.float32)  # bfloat16 counts to 256
    return loss, torch.stack([loss.detach().to(wide) * size, size.to(wide)])


def node_loss(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy where ``y`` is [N] int64, sigmoid cross-entropy where it is [N, K] float; unknown labels left out.

    The mean is over the known labels, so that K labels of N nodes, all known, are averaged over labels, then nodes.
    A batch without any known label gives 0, not NaN.

    >>> node_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, float("nan")]]))
    tensor(0.6931)
    """
    if y.is_floating_point():
        weight = known(y).to(out.dtype)
        true = y.nan_to_num().to(torch.promote_types(out.dtype, y.dtype))  # else torch rounds float64 logits to float32
        loss = F.binary_cross_entropy_with_logits(out, true, weight=weight, reduction="sum")
    else:
        loss = F.cross_entropy(out, y, ignore_index=-1, reduction="sum")
    return loss / known(y).sum().clamp(min=1) if reduction == "mean" else loss


def known(y: Tensor) -> Tensor:
    """Which labels are known: [N, K] where ``y`` is float, [N] where it is whole-numbered."""
    return ~y.isnan() if y.is_floating_point() else y >= 0


def node_sums(out: Tensor, y: Tensor) -> Tensor:
    """What a pooled score needs: (loss, known, correct), or (loss, known, TP, FP, FN) with many labels per node."""
    wide = torch.float32 if out.device.type == "mps" else torch.float64  # counts are whole up to 2^24 and 2^53
    loss = node_loss(out, y, reduction="sum").to(wide)
    if y.is_floating_point():
        positive, true = out > 0, y == 1
        counts = [known(y).sum(), (positive & true).sum(), (positive & (y == 0)).sum(), (~positive & true).sum()]
    else:
        counts = [known(y).sum(), (out.argmax(-1) == y).sum()]
    return torch.stack([loss, *(count.to(wide) for count in counts)])


def score_of(sums: Sequence[float]) -> tuple[float, float, str]:
    """The loss, the score and the score's name from the sums of ``node_sums``.

    >>> score_of([1.0, 4.0, 3.0])
    (0.25, 75.0, 'accuracy')
    >>> score_of([1.0, 4.0, 1.0, 1.0, 1.0])
    (0.25, 0.5, 'micro_f1')
    """
    loss, size, right = sums[0], max(sums[1], 1.0), sums[2]
    if len(sums) == 3:
        return loss / size, 100.0 * right / size, "accuracy"
    return loss / size, 2 * right / max(2 * right + sums[3] + sums[4], 1.0), "micro_f1"


def majority_score(y: Tensor) -> float:
    """Return the best score of a prediction that is the same for all nodes: the majority class's share, in percent.

    With many labels per node it is the micro-F1 of predicting the most frequent labels, as many of them as score best.

    >>> majority_score(torch.tensor([0, 1, 1, -1, 1]))
    75.0
    >>> majority_score(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))  # both labels: TP = 3, FP = 1
    0.8571428571428571
    """
    if not y.is_floating_point():
        counts = y[known(y)].bincount()
        return 100.0 * int(counts.max()) / int(counts.sum())
    positive, size = (y == 1).sum(0).double(), known(y).sum(0).double()
    order = (positive / size.clamp(min=1)).argsort(descending=True)
    scores = 2 * positive[order].cumsum(0) / (size[order].cumsum(0) + positive.sum()).clamp(min=1)
    return float(scores.max())


def metrics_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What is told of an epoch, from the sums of each split; in float32, as Lightning keeps it.

    >>> metrics_of({"train": [1.0, 4.0], "val": [1.0, 4.0, 3.0]})
    {'train_loss': 0.25, 'val_loss': 0.25, 'val_accuracy': 75.0}
    """
    metrics = {}
    for split, values in sums.items():
        if split == "train":
            metrics["train_loss"] = values[0] / max(values[1], 1.0)
        else:
            metrics[f"{split}_loss"], score, name = score_of(values)
            metrics[f"{split}_{name}"] = score
    return {name: float(np.float32(value)) for name, value in metrics.items()}


def told(name: str, score: float) -> str:
    """A score in words.

    >>> told("accuracy", 83.14), told("micro_f1", 0.9731)
    ('accuracy 83.1 %', 'micro-F1 0.973')
    """
    return f"accuracy {score:.1f} %" if name == "accuracy" else f"{name.replace('_f1', '-F1')} {score:.3f}"
