"""Cross-entropies with weights, label smoothing and focusing: of classes, and of labels that are 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .objective import Objective

Number: TypeAlias = float | Tensor  # a tensor without dimensions may be a row of a batch of `torch.func.vmap`
Weights: TypeAlias = Literal["balanced"] | Sequence[float] | Tensor


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """The base of objectives whose loss is a cross-entropy.

    The loss is the mean over the known labels, whatever their weights: it is not divided by the sum of the weights. So
    a label counts in a batch, and in the share of a process, as it counts in the whole split. Validation and test have
    the loss of the training, since a rule that stops by another loss would stop against the training: weights raise
    the probabilities of rare labels, which a loss without them penalises.

    Args:
        label_smoothing: ε, from 0 to below 1: the share of a label that is spread evenly over all its possible values.
        focal: γ of the focal loss (Lin et al., ICCV 2017), at least 0: each term of the loss is multiplied by
            (1 - p)^γ, where p is the probability of the label, so that labels which are predicted well count less.

    Raises:
        ValueError: if a number is out of its range.
    """

    label_smoothing: Number = field(default=0.0, repr=False, kw_only=True)
    focal: Number = field(default=0.0, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.label_smoothing, Tensor) and not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, expected a number from 0 to below 1.")
        if not isinstance(self.focal, Tensor) and not 0 <= self.focal < float("inf"):
            raise ValueError(f"focal is {self.focal}, expected a finite number, at least 0.")

    def _below(self, shares: Tensor, limit: float, weights: object) -> dict[int, float]:
        """Return the columns with a share below the limit; none if the loss has weights or focusing."""
        if weights is not None or _is_set(self.focal):
            return {}
        return {column: share for column, share in enumerate(shares.tolist()) if 0 < share < limit}


@dataclass(frozen=True)
class Binary(CrossEntropy):
    r"""The base of objectives with labels that are 0 or 1, and a logit z for each: p = sigmoid(z).

    With the options of the loss, w = `pos_weight`, ε and γ, it is

    .. math::
        \mathcal{L} = \frac{1}{|\text{known}|} \sum_{ik \text{ known}}
        \tilde y_{ik} \, w_k (1 - p_{ik})^\gamma \, (-\log p_{ik})
        + (1 - \tilde y_{ik}) \, p_{ik}^\gamma \, (-\log(1 - p_{ik})),
        \qquad \tilde y = (1 - \epsilon) \, y + \frac{\epsilon}{2}

    Args:
        pos_weight: w, the weight of a label 1: a number, or one for each label; None for 1.
    """

    pos_weight: Number | Weights | None = field(default=None, repr=False, kw_only=True)

    loss_options = ("pos_weight", "label_smoothing", "focal")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pos_weight, (int, float)):
            if not 0 < self.pos_weight < float("inf"):
                raise ValueError(f"pos_weight is {self.pos_weight}, expected a finite number above 0.")
        else:
            object.__setattr__(self, "pos_weight", checked("pos_weight", self.pos_weight, self.out_channels, "label"))

    def summed_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the sigmoid cross-entropy.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeMultiLabels
            >>> NodeMultiLabels(2).loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, float("nan")]]))
            tensor(0.6931)
            >>> NodeMultiLabels(2, pos_weight=3.0).loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, float("nan")]]))
            tensor(2.0794)
        """
        known = self.known(y)
        true = y.nan_to_num().to(torch.promote_types(out.dtype, y.dtype))  # float64 logits stay float64
        if self.pos_weight is None and not _is_set(self.label_smoothing, self.focal):
            return F.binary_cross_entropy_with_logits(out, true, weight=known.to(out.dtype), reduction="sum")
        z = _wide(out)
        positive, negative = -F.logsigmoid(z), -F.logsigmoid(-z)  # the losses of the labels 1 and 0
        if _is_set(self.focal):
            gamma = constant(self.focal, z)
            positive, negative = positive * (-gamma * negative).exp(), negative * (-gamma * positive).exp()
        if self.pos_weight is not None:
            positive = positive * constant(self.pos_weight, z)
        if _is_set(self.label_smoothing):
            smoothing = constant(self.label_smoothing, z)
            true = (1 - smoothing) * true + smoothing / 2
        return torch.where(known, true * positive + (1 - true) * negative, 0.0).sum()

    def predictions(self, out: Tensor) -> Tensor:
        """Return the sigmoid."""
        return out.sigmoid()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the log-odds."""
        return predictions.logit()


def class_loss(out: Tensor, y: Tensor, class_weight: Weights | None, label_smoothing: Number, focal: Number) -> Tensor:
    r"""Return the sum over the known labels y `[n]` of the cross-entropy of logits `[n, K]`.

    .. math::
        (1 - \epsilon) \, \ell_{i y_i} + \frac{\epsilon}{K} \sum_k \ell_{ik}, \qquad
        \ell_{ik} = -w_k (1 - p_{ik})^\gamma \log p_{ik}

    Without focusing it is `torch.nn.CrossEntropyLoss(class_weight, label_smoothing=..., reduction="sum")`.

    Example:
        >>> class_loss(torch.zeros(2, 2), torch.tensor([1, -1]), (1.0, 3.0), 0.0, 1.0)  # 3 (1 - 1 / 2) log 2
        tensor(1.0397)
    """
    if class_weight is None and not _is_set(label_smoothing, focal):
        return F.cross_entropy(out, y, ignore_index=-1, reduction="sum")
    log_p = _wide(out).log_softmax(-1)
    losses = -log_p  # [n, K]
    if _is_set(focal):  # at p = 1, the derivative of a power below 1 is infinite
        losses = losses * (-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny) ** constant(focal, log_p)
    if class_weight is not None:
        losses = losses * constant(class_weight, losses)
    loss = losses.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    if _is_set(label_smoothing):
        smoothing = constant(label_smoothing, losses)
        loss = (1 - smoothing) * loss + smoothing * losses.mean(-1)
    return torch.where(y >= 0, loss, 0.0).sum()


def balanced_classes(y: Tensor, K: int) -> tuple[float, ...]:
    """Return n / (C n_k) for each class with n_k of n known labels, as scikit-learn does, if C classes occur; else 1.

    Their mean over the labels is 1.

    Example:
        >>> balanced_classes(torch.tensor([0, 0, 0, 1, -1]), 3)
        (0.666..., 2.0, 1.0)
    """
    counts = y[y >= 0].bincount(minlength=K).double()
    weights = counts.sum() / (counts.count_nonzero() * counts)
    return tuple(torch.where(counts > 0, weights, 1.0).tolist())


def balanced_labels(y: Tensor) -> tuple[float, ...]:
    """Return for each label the number of 0 over that of 1; 1 if it lacks one of the two.

    Example:
        >>> balanced_labels(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, float("nan")]]))
        (2.0, 1.0)
    """
    ones, zeros = ((y == value).sum(0).double() for value in (1, 0))
    return tuple(torch.where((ones > 0) & (zeros > 0), zeros / ones, 1.0).tolist())


def checked(name: str, weights: object, size: int, column: str) -> object:
    """Return weights as a tuple of numbers if they are a sequence.

    Raises:
        ValueError: if they are not "balanced", None, a tensor or `size` numbers, at least 0.
    """
    if weights is None or isinstance(weights, Tensor) or weights == "balanced":
        return weights
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != size:
        raise ValueError(f"{name} is {weights!r}, expected balanced or {size} numbers, one for each {column}.")
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"{name} is {weights!r}, expected finite numbers, at least 0, that are not all 0.")
    return tuple(map(float, weights))


def constant(values: Number | Weights, like: Tensor, default: float = 1.0) -> Tensor | float:
    """Return numbers as a tensor of the same device and dtype, copied there once; without numbers the default."""
    if isinstance(values, Tensor):
        return values.to(like.device, like.dtype)
    if isinstance(values, (int, float)):
        return float(values)
    if isinstance(values, str):
        raise ValueError(
            f"A weight of the loss is {values}, which follows from the training labels. Use the objective of a task, "
            "task.objective, or objective.fitted(y)."
        )
    if not len(values):
        return default
    is_plain = type(like) is Tensor and not torch.compiler.is_compiling()  # a fake tensor must not outlive an export
    return (_copied if is_plain else _copy)(tuple(values), like.device, like.dtype)


def _copy(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a later step may need its gradient
        return torch.tensor(values, device=device, dtype=dtype)


_copied = lru_cache(256)(_copy)


def _is_set(*options: Number) -> bool:
    """Return False if each option is the number 0. The value of a tensor is not read."""
    return any(isinstance(option, Tensor) or bool(option) for option in options)


def _wide(out: Tensor) -> Tensor:
    return out.to(torch.promote_types(out.dtype, torch.float32))
