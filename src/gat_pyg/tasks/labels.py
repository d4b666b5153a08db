"""Single and multiple labels per row, of nodes or graphs: losses, sufficient statistics and scores."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from .checks import NOTHING_KNOWN
from .losses import Binary, CrossEntropy, Weights, balanced_classes, balanced_labels, checked, class_loss
from .metrics import ACCURACY, MANY_LABELS, MICRO_F1, ONE_LABEL, Metric
from .objective import RARE, Objective, any_known

LISTED = 20  # labels up to which each has a score


@dataclass(frozen=True)
class _Labels(Objective):
    """The common base of single and multiple labels."""

    goal = "classification"
    by_class = True
    calibrates = True

    @classmethod
    def for_labels(cls, y: Sequence[Tensor], where: str) -> Objective:
        """Return the objective for the classes or labels in y."""
        K = y[0].size(1) if y[0].dim() == 2 else max((int(labels.max()) + 1 for labels in y if len(labels)), default=0)
        if K < 1 or not any(bool(any_known(labels).any()) for labels in y):
            raise ValueError(f"{where}{NOTHING_KNOWN}")
        return cls(K)

    def _check_form(self, y: Tensor, shape: tuple[int, ...], dtype: torch.dtype, form: str, where: str) -> None:
        if tuple(y.shape) != shape or y.dtype != dtype:
            raise ValueError(
                f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected {dtype} of shape {shape}: {form}."
            )


@dataclass(frozen=True)
class OneLabel(_Labels, CrossEntropy):
    r"""One of K classes in each row: y `[n]` int64 in 0..K-1, -1 if it is unknown.

    The loss is the cross-entropy, the score the accuracy in percent. With w = `class_weight`, ε = `label_smoothing` and
    γ = `focal`, the loss of n known labels with the probabilities p = softmax(logits) is

    .. math::
        \mathcal{L} = \frac{1}{n} \sum_i (1 - \epsilon) \, \ell_{i y_i} + \frac{\epsilon}{K} \sum_k \ell_{ik}, \qquad
        \ell_{ik} = -w_k (1 - p_{ik})^\gamma \log p_{ik}

    Args:
        class_weight: w, a number for each class, at least 0. Unlike `torch.nn.CrossEntropyLoss`, the loss is divided by
            n and not by the sum of the weights; for "balanced", both are the same over all training labels. It gives
            all classes the same influence: w_k = n / (C n_k) for n_k labels of class k and C classes that occur, as in
            scikit-learn. None: 1 for each class.

    Example:
        >>> from gat_pyg.tasks.nodes import NodeLabels
        >>> NodeLabels(2, class_weight="balanced").fitted(torch.tensor([0, 0, 0, 1])).class_weight
        (0.666..., 2.0)
    """

    metric: Metric = field(default=ACCURACY, repr=False)
    class_weight: Weights | None = field(default=None, repr=False, kw_only=True)

    column = "class"
    measures = ONE_LABEL
    loss_options = ("class_weight", "label_smoothing", "focal")

    also = ("roc_auc", "average_precision", "balanced_accuracy", "macro_f1")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "class_weight", checked("class_weight", self.class_weight, self.out_channels, "class"))

    @classmethod
    def recognises(cls, y: Sequence[Tensor]) -> bool:
        """Return True: labels are classes unless they have a more specific form."""
        return True

    @classmethod
    def convert(cls, y: Sequence[Tensor], where: str) -> list[Tensor]:
        """Return whole numbers `[n]` or `[n, 1]`, NaN where they are unknown, as `[n]` int64 with -1."""
        return [cls._converted(labels, where) for labels in y]

    @classmethod
    def _converted(cls, y: Tensor, where: str) -> Tensor:
        y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
        if y.dim() != 1:
            raise ValueError(
                f"{where}: y has shape {tuple(y.shape)}, expected (N,), or (N, K) for many labels per {cls.item}."
            )
        if not y.is_floating_point():
            return y.long()
        y = y.double()
        wrong = y[(y != y.round()) & ~y.isnan() | (y.abs() >= 2**53)]
        if wrong.numel():
            raise ValueError(
                f"{where}: y holds {float(wrong[0])}..., expected whole numbers: classes. For a regression choose "
                f"task={cls.item}_regression."
            )
        return y.masked_fill(y.isnan(), -1).long()

    @classmethod
    def for_labels(cls, y: Sequence[Tensor], where: str) -> Objective:
        """Return the objective for the classes from 0 to the largest in y, and warn if they are not numbered from 0.

        Raises:
            ValueError: if there is nothing to learn, one class and -1 are all there is, or there are more classes than
                rows.
        """
        objective, labels = super().for_labels(y, where), torch.cat(list(y))
        K, count, known = objective.out_channels, len(labels), labels[labels >= 0]
        first = int(known.min())
        if count < K:
            raise ValueError(
                f"{where}: y holds the label {K - 1}, but there are {count} {cls.item}s. Number the classes from 0, or "
                f"choose task={cls.item}_regression if they are numbers to predict."
            )
        if first == K - 1 > 0 and len(known) < count:
            raise ValueError(
                f"{where}: y holds {first} and -1 alone, and -1 means that a label is unknown. Number the classes from "
                "0: turn -1 and 1 into 0 and 1."
            )
        if 0 < first < K - 1:
            warnings.warn(
                f"{where}: y holds no class 0, but classes are numbered from 0, so the model has {K} of them. Give "
                f"numpy.unique(y, return_inverse=True)[1], or choose task={cls.item}_regression to predict numbers.",
                stacklevel=3,
            )
        return objective

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless y is `[n]` int64 in -1..K-1."""
        y, K = data.y, self.out_channels
        self._check_form(y, (self.size(data),), torch.int64, f"one label per {self.item}", where)
        if y.numel() and (int(y.min()) < -1 or int(y.max()) >= K):
            bad = int(y.min()) if int(y.min()) < -1 else int(y.max())
            raise ValueError(f"{where}: y holds the label {bad}, expected 0 to {K - 1}, or -1 where it is unknown.")

    def fitted(self, y: Tensor) -> Objective:
        """Return the same objective with balanced weights computed from these training labels."""
        is_balanced = isinstance(self.class_weight, str)
        return replace(self, class_weight=balanced_classes(y, self.out_channels)) if is_balanced else self

    def rare(self, y: Tensor) -> dict[int, float]:
        """Return the classes with less than 5 % of the labels, and than half of an equal share, with their shares.

        It is empty with `class_weight` or `focal`. Classes without labels, which no weight can help, are left out.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(2).rare(torch.tensor([0] * 49 + [1]))
            {1: 0.02}
        """
        shares = y[y >= 0].bincount(minlength=self.out_channels).double() / self.known(y).sum()
        return self._below(shares, min(RARE, 0.5 / self.out_channels), self.class_weight)

    def summed_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return class_loss(out, y, self.class_weight, self.label_smoothing, self.focal)

    def counts(self, out: Tensor, y: Tensor) -> list[Tensor]:
        """Return the number of correct predictions."""
        return [(out.argmax(-1) == y).sum()]

    def score_of_counts(self, size: float, *counts: float) -> float:
        """Return the accuracy in percent."""
        (correct,) = counts
        return 100.0 * correct / max(size, 1.0)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits `[n, K]` and the labels `[n]`."""
        out, y = super().unpack(rows)
        return out, y[:, 0].long()

    def constant_score(self, y: Tensor) -> float:
        """Return the share of the majority class in percent, or another metric of predicting this class.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(2).constant_score(torch.tensor([0, 1, 1, -1, 1]))
            75.0
        """
        counts = y[self.known(y)].bincount()
        if self.by_rows:
            return self.measure(F.one_hot(counts.argmax(), self.out_channels).double().expand(len(y), -1), y)
        return 100.0 * int(counts.max()) / int(counts.sum())

    def constant_error(self, y: Tensor) -> float:
        """Return the standard error of the share of the majority class; by the bootstrap for other metrics."""
        if self.by_rows:
            return super().constant_error(y)
        share = self.constant_score(y) / 100.0
        error: float = 100.0 * (share * (1 - share) / int(self.known(y).sum())) ** 0.5
        return error

    def predictions(self, out: Tensor) -> Tensor:
        """Return the softmax."""
        return out.softmax(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the logarithm."""
        return predictions.log()


@dataclass(frozen=True)
class ManyLabels(_Labels, Binary):
    """K labels in each row: y `[n, K]` float32 of 0 and 1, NaN if it is unknown.

    The loss is the sigmoid cross-entropy, averaged over all known labels. The score is micro-F1,
    2 TP / (2 TP + FP + FN), where a label is predicted if its logit is above 0.

    Args:
        pos_weight: for "balanced", the number of 0 over that of 1 among the training labels, for each of the K.
    """

    metric: Metric = field(default=MICRO_F1, repr=False)

    column = "label"
    measures = MANY_LABELS

    also = ("roc_auc", "average_precision", "macro_f1")

    @classmethod
    def recognises(cls, y: Sequence[Tensor]) -> bool:
        """Return True for `[n, K]` with K other than 1."""
        return y[0].dim() == 2 and y[0].size(1) != 1

    @classmethod
    def convert(cls, y: Sequence[Tensor], where: str) -> list[Tensor]:
        """Return the labels as float32."""
        return [labels.float() for labels in y]

    @classmethod
    def for_labels(cls, y: Sequence[Tensor], where: str) -> Objective:
        """Return the objective for K labels, and warn if they are one-hot: exactly one of each row is 1."""
        objective = super().for_labels(y, where)
        rows = torch.cat([labels[any_known(labels)] for labels in y])
        if bool((rows.sum(1) == 1).all()) and int(rows.sum(0).count_nonzero()) > 1:  # not the same one in all rows
            warnings.warn(
                f"{where}: exactly one of the {objective.out_channels} labels in each row of y is 1. Each is predicted "
                "by itself, as labels that do not exclude each other. If they are classes, give y.argmax(1).",
                stacklevel=3,
            )
        return objective

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless y is `[n, K]` float32 of 0, 1 and NaN."""
        y, form = data.y, f"a 0, 1 or NaN for each {self.item} and label"
        self._check_form(y, (self.size(data), self.out_channels), torch.float32, form, where)
        if not ((y == 0) | (y == 1) | y.isnan()).all():
            raise ValueError(
                f"{where}: y holds other values than 0, 1 and NaN (unknown). Turn the labels into 0 and 1."
            )

    def fitted(self, y: Tensor) -> Objective:
        """Return the same objective with balanced weights computed from these training labels."""
        return replace(self, pos_weight=balanced_labels(y)) if isinstance(self.pos_weight, str) else self

    def rare(self, y: Tensor) -> dict[int, float]:
        """Return the labels that are 1 in less than 5 % of the rows, with their shares.

        It is empty with `pos_weight` or `focal`. Labels that are never 1, which no weight can help, are left out.
        """
        return self._below((y == 1).sum(0).double() / self.known(y).sum(0), RARE, self.pos_weight)

    def metrics(self, statistics: Mapping[str, Sequence[float] | Tensor]) -> dict[str, float]:
        """Return the loss and the score of each split; of up to `LISTED` labels the test score of each if `by_rows`.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeMultiLabels
            >>> rows = torch.tensor([[0.0, 2.0, 0.0, 1.0], [1.0, 3.0, 1.0, 0.0]])  # logits, then y
            >>> scores = NodeMultiLabels(2).scored_by("roc_auc").metrics({"test": rows})
            >>> scores["test_roc_auc"], scores["test_roc_auc_0"], scores["test_roc_auc_1"]
            (0.5, 1.0, 0.0)
        """
        metrics = super().metrics(statistics)
        if self.by_rows and "test" in statistics and self.out_channels <= LISTED:
            out, y = self.unpack(torch.as_tensor(statistics["test"]))
            each = enumerate(zip(out.split(1, 1), y.split(1, 1), strict=True))
            metrics |= {f"test_{self.metric.name}_{k}": round(self.measure(*column), 7) for k, column in each}
        return metrics

    def counts(self, out: Tensor, y: Tensor) -> list[Tensor]:
        """Return TP, FP and FN."""
        positive, true = out > 0, y == 1
        return [(positive & true).sum(), (positive & (y == 0)).sum(), (~positive & true).sum()]

    def score_of_counts(self, size: float, *counts: float) -> float:
        """Return micro-F1."""
        TP, FP, FN = counts
        return 2 * TP / max(2 * TP + FP + FN, 1.0)

    def constant_score(self, y: Tensor) -> float:
        """Return the best micro-F1 of predicting the m most frequent labels in every row, over all m.

        For another metric, return that of predicting all labels in every row.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeMultiLabels
            >>> NodeMultiLabels(2).constant_score(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))  # both: TP = 3, FP = 1
            0.8571428571428571
        """
        if self.by_rows:
            return self.measure(torch.ones_like(y, dtype=torch.float64), y)
        positive, size = (y == 1).sum(0).double(), self.known(y).sum(0).double()
        order = (positive / size.clamp(min=1)).argsort(descending=True)
        scores = 2 * positive[order].cumsum(0) / (size[order].cumsum(0) + positive.sum()).clamp(min=1)
        return float(scores.max())
