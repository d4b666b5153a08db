"""Metrics: the kinds of score, those that fit each form of labels, and their computation by torchmetrics."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command's help and the report use the table without torch
    from torch import Tensor

Measure: TypeAlias = "Callable[[Tensor, Tensor], float]"  # arguments: all predictions [n, K] and their labels


@dataclass(frozen=True)
class Metric:
    """A kind of score: its name in logs and results, the format of its values and its computation.

    Example:
        >>> ACCURACY.text(83.14), MICRO_F1.text(0.9731), ACCURACY.value(82, 84)
        ('accuracy 83.1 %', 'micro-F1 0.973', '83.0 ± 1.4 %')
    """

    name: str
    title: str
    digits: int  # number of digits after the decimal point
    unit: str = ""
    constant: str = "the best constant prediction"  # description of the prediction behind `constant_score`
    lower: bool = False  # True if lower scores are better

    def better(self, score: float) -> float:
        """Return the score, negated if lower is better, so that the best is the highest."""
        return -score if self.lower else score

    def value(self, *scores: float) -> str:
        """Return a score, or the mean ± standard deviation of several, with the unit."""
        spread = f" ± {statistics.stdev(scores):.{self.digits}f}" if len(scores) > 1 else ""
        return f"{statistics.fmean(scores):.{self.digits}f}{spread}{self.unit}"

    def text(self, *scores: float) -> str:
        """Return the title and `value`."""
        return f"{self.title} {self.value(*scores)}"

    def range(self, low: float, high: float) -> str:
        """Return two scores, or one if both look the same, with the unit, or the title if there is none.

        Example:
            >>> ACCURACY.range(81.0, 83.5), MICRO_F1.range(0.9, 0.9)
            ('81.0 to 83.5 %', 'micro-F1 0.900')
        """
        title = "" if self.unit else f"{self.title} "
        first = "" if self.value(low) == self.value(high) else f"{low:.{self.digits}f} to "
        return f"{title}{first}{self.value(high)}"


# Computed from all predictions --------------------------------------------------------------------------------------


def _balanced_accuracy(out: Tensor, y: Tensor) -> float:
    """Return the mean recall of the classes that occur, in percent."""
    from torchmetrics.functional.classification import multiclass_recall

    out, y = out[y >= 0], y[y >= 0]
    recalls = multiclass_recall(out, y, out.size(1), average="none", validate_args=False)
    return 100.0 * float(recalls[y.unique()].double().mean())


def _f1(out: Tensor, y: Tensor, average: Literal["micro", "macro"]) -> float:
    from torchmetrics.functional.classification import multiclass_f1_score

    known = y >= 0
    return float(multiclass_f1_score(out[known], y[known], out.size(1), average=average, validate_args=False))


def _per_class(measure: Measure, out: Tensor, y: Tensor) -> float:
    """Return a ranking score of the second of two classes, or the mean over more classes, each against the rest."""
    from torch.nn.functional import one_hot

    known = y >= 0
    out, y = out[known], y[known]
    if out.size(1) == 2:
        return _per_column(measure, (out[:, 1] - out[:, 0])[:, None], (y == 1).to(out.dtype)[:, None])
    return _per_column(measure, out.log_softmax(1), one_hot(y, out.size(1)).to(out.dtype))


def _per_column(measure: Measure, out: Tensor, y: Tensor) -> float:
    """Return the mean of a score over the columns for which it is defined, each over its known labels; else NaN."""
    known = ~y.isnan()
    scores = [measure(out[rows, k], y[rows, k]) for k, rows in enumerate(known.unbind(1)) if rows.any()]
    defined = [score for score in scores if score == score]
    return sum(defined) / len(defined) if defined else float("nan")


def _ranked(function: str, out: Tensor, y: Tensor) -> float:
    """Return a score of the order of the predictions, or NaN if all labels are equal or a prediction is NaN."""
    from torchmetrics.functional import classification

    if y.min() == y.max() or out.isnan().any():
        return float("nan")
    _, ranks = out.unique(return_inverse=True)  # torchmetrics applies a sigmoid to logits, which may make them equal
    return float(getattr(classification, function)(ranks.double() / out.numel(), y.long(), validate_args=False))


def _binary_f1(out: Tensor, y: Tensor) -> float:
    from torchmetrics.functional.classification import binary_f1_score

    return float(binary_f1_score((out > 0).long(), y.long(), validate_args=False))


def _rmse(out: Tensor, y: Tensor) -> float:
    from torchmetrics.functional import mean_squared_error

    return float(mean_squared_error(out, y, squared=False))


def _mae(out: Tensor, y: Tensor) -> float:
    from torchmetrics.functional import mean_absolute_error

    return float(mean_absolute_error(out, y))


def _r2(out: Tensor, y: Tensor) -> float:
    from torchmetrics.functional import r2_score

    return float(r2_score(out, y)) if len(y) > 1 else float("nan")


# The metrics that fit each form of labels, by name; None if the score follows from sums that an objective adds up ----

RANKED: Mapping[str, Measure] = {  # of one column of labels, or of links
    "roc_auc": partial(_ranked, "binary_auroc"),
    "average_precision": partial(_ranked, "binary_average_precision"),
}
ONE_LABEL: Mapping[str, Measure | None] = {
    "accuracy": None,
    "balanced_accuracy": _balanced_accuracy,
    "micro_f1": partial(_f1, average="micro"),
    "macro_f1": partial(_f1, average="macro"),
    **{name: partial(_per_class, measure) for name, measure in RANKED.items()},
}
MANY_LABELS: Mapping[str, Measure | None] = {
    "micro_f1": None,
    "macro_f1": partial(_per_column, _binary_f1),
    **{name: partial(_per_column, measure) for name, measure in RANKED.items()},
}
QUANTITIES: Mapping[str, Measure | None] = {
    name: partial(_per_column, measure)
    for name, measure in (("mae", _mae), ("rmse", _rmse), ("r2", _r2), ("std_mae", _mae), ("std_rmse", _rmse))
}
RANKED_LINKS: Mapping[str, Measure | None] = dict.fromkeys(
    ("roc_auc", "average_precision", "mrr", "hits@20", "hits@50", "hits@100")
)

# The table ----------------------------------------------------------------------------------------------------------

_MAJORITY = "predicting the majority class for every {item}"
_SAME = "the best prediction that is the same for every {item}"
_ANY = "the same prediction for every {item}"
ACCURACY = Metric("accuracy", "accuracy", 1, " %", _MAJORITY)
BALANCED_ACCURACY = Metric("balanced_accuracy", "balanced accuracy", 1, " %", _MAJORITY)
MICRO_F1 = Metric("micro_f1", "micro-F1", 3, "", _SAME)
MACRO_F1 = Metric("macro_f1", "macro-F1", 3)
ROC_AUC = Metric("roc_auc", "ROC-AUC", 3, "", _ANY)
AVERAGE_PRECISION = Metric("average_precision", "average precision", 3, "", _ANY)
MAE = Metric("mae", "MAE", 3, lower=True)
RMSE = Metric("rmse", "RMSE", 3, lower=True)
R2 = Metric("r2", "R²", 3)
STD_MAE = Metric("std_mae", "standardised MAE", 3, lower=True)  # targets in units of their standard deviation
STD_RMSE = Metric("std_rmse", "standardised RMSE", 3, lower=True)
MRR = Metric("mrr", "MRR", 3, "", _ANY)
HITS = [Metric(f"hits@{k}", f"Hits@{k}", 3, "", _ANY) for k in (20, 50, 100)]
METRICS = {
    metric.name: metric
    for metric in (
        *(ACCURACY, BALANCED_ACCURACY, MICRO_F1, MACRO_F1, ROC_AUC, AVERAGE_PRECISION),
        *(MAE, RMSE, R2, STD_MAE, STD_RMSE, MRR, *HITS),
    )
}
ALIASES = {"ap": AVERAGE_PRECISION.name}  # other names, accepted and never printed


def metric_named(name: str, targets: Sequence[str] | None = None, column: str = "target") -> Metric:
    """Return the metric of this name or alias, or of one of some targets or labels; an unknown one has three digits.

    The average precision of two classes, whose `column` is "class", is titled by the second, the positive one.

    Example:
        >>> metric_named("rmse_2").text(0.58)
        'RMSE of target 2 0.580'
        >>> metric_named("mae_1", ["logS", "logP"]).title
        'MAE of logP'
        >>> metric_named("ap", ["on time", "late"], "class").title
        'average precision of late'
    """
    metric, (base, _, target) = METRICS.get(ALIASES.get(name, name)), name.rpartition("_")
    if metric is None and base in METRICS and target.isdecimal():
        title = f"{METRICS[base].title} of {f'{column} {target}' if targets is None else targets[int(target)]}"
        return replace(METRICS[base], name=name, title=title)
    if metric is AVERAGE_PRECISION and column == "class" and targets is not None and len(targets) == 2:
        return replace(metric, title=f"{metric.title} of {targets[1]}")
    return metric or Metric(name, name, 3)


LINKS = "link_prediction"
