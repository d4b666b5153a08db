"""Objectives: the meaning of a row of a model's output, its loss and its score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)


@dataclass(frozen=True)
class Metric:
    """A kind of score: its name in logs and results, and the format of its values.

    Example:
        >>> ACCURACY.text(83.14), MICRO_F1.text(0.9731)
        ('accuracy 83.1 %', 'micro-F1 0.973')
    """

    name: str
    title: str
    digits: int  # after the decimal point
    unit: str = ""
    constant: str = "the best constant prediction"  # description of the prediction behind `constant_score`

    def value(self, score: float) -> str:
        """Return a score with its unit."""
        return f"{score:.{self.digits}f}{self.unit}"

    def text(self, score: float) -> str:
        """Return a score with its title and unit."""
        return f"{self.title} {self.value(score)}"

    def spread(self, mean: float, std: float) -> str:
        """Return a mean ± standard deviation with title and unit."""
        return f"{self.title} {mean:.{self.digits}f} ± {self.value(std)}"

    def range(self, low: float, high: float) -> str:
        """Return two scores with title and unit, or one if both look the same.

        Example:
            >>> ACCURACY.range(81.0, 83.5)
            'accuracy 81.0 to 83.5 %'
        """
        if self.value(low) == self.value(high):
            return self.text(low)
        return f"{self.title} {low:.{self.digits}f} to {self.value(high)}"


ACCURACY = Metric("accuracy", "accuracy", 1, " %", "predicting the majority class for every {item}")
MICRO_F1 = Metric("micro_f1", "micro-F1", 3, "", "the best prediction that is the same for every {item}")
_SAME = "the same prediction for every {item}"
LINK_METRICS = {
    "roc_auc": Metric("roc_auc", "ROC-AUC", 3, "", _SAME),
    "ap": Metric("ap", "AP", 3, "", _SAME),
    "mrr": Metric("mrr", "MRR", 3, "", _SAME),
    **{f"hits@{k}": Metric(f"hits@{k}", f"Hits@{k}", 3, "", _SAME) for k in (20, 50, 100)},
}
_METRICS = {metric.name: metric for metric in (ACCURACY, MICRO_F1)} | LINK_METRICS


def metric_named(name: str) -> Metric:
    """Return the metric of this name; an unknown one has three digits."""
    return _METRICS.get(name) or Metric(name, name, 3)


@dataclass(frozen=True)
class Objective(ABC):
    """A prediction goal: the meaning of a row of a model's output, its loss and its score.

    Training, validation and reports work with any objective. Unknown labels count neither in the loss nor in the score.

    Args:
        out_channels: K, the number of columns of the output.
    """

    out_channels: int

    item: ClassVar[str]  # what has a label, and a row in the output: "node", "graph", "link"
    metric: ClassVar[Metric]
    columns: ClassVar[str]  # the plural noun for the columns of the output

    @abstractmethod
    def check(self, data: Data, where: str) -> None:
        """Check the labels of a graph, whose x is [N, F].

        Raises:
            ValueError: if `data.y` has another form; the message begins with `where`.
        """

    @abstractmethod
    def check_splits(self, data: Data, where: str) -> None:
        """Check the training, validation and test masks of a graph that all splits share.

        Raises:
            ValueError: if they are missing or invalid; the message begins with `where`.
        """

    @abstractmethod
    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows of the output `[..., n, K]` that belong to a split, and their labels.

        Args:
            out: the model's output for `data`, with a leading dimension for stacked models.
            data: a graph or a batch.
            split: the split of a graph that all splits share; None if all of `data` belongs to one split.
        """

    @abstractmethod
    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels that `rows` returns."""

    def example(self, data: Data, split: Split) -> Data:
        """Return the graph that a step of a split computes: `data`, unless the objective selects or draws rows."""
        return data

    @abstractmethod
    def known(self, y: Tensor) -> Tensor:
        """Return a mask of the known labels, with the shape of y."""

    @abstractmethod
    def unknown(self, y: Tensor) -> Tensor:
        """Return unknown labels with the shape of y."""

    @abstractmethod
    def loss(self, out: Tensor, y: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Return the mean or the sum of the loss over the known labels; 0 if none is known."""

    @abstractmethod
    def statistics(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the sufficient statistics of a batch: sums, first of the loss, then the number of known labels."""

    @abstractmethod
    def score(self, statistics: Sequence[float]) -> float:
        """Return the score from the sum of `statistics` over all batches."""

    @abstractmethod
    def constant_score(self, y: Tensor) -> float:
        """Return the best score of a constant prediction, the same for all rows."""

    @abstractmethod
    def probabilities(self, out: Tensor) -> Tensor:
        """Return the probabilities of the output's columns."""

    @abstractmethod
    def logits(self, probabilities: Tensor) -> Tensor:
        """Return logits with these probabilities."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the objective as plain data, for the file of a trained model."""

    def train_statistics(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and its part of the epoch's sums: (summed loss, number of known labels)."""
        loss, size = self.loss(out, y), self.known(y).sum()
        wide = torch.promote_types(loss.dtype, torch.float32)  # bfloat16 counts only to 256
        return loss, torch.stack([loss.detach().to(wide) * size, size.to(wide)])

    def metrics(self, statistics: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the loss and the score of each split, rounded to float32; only the loss for the training.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(7).metrics({"train": [1.0, 4.0], "val": [1.0, 4.0, 3.0]})
            {'train_loss': 0.25, 'val_loss': 0.25, 'val_accuracy': 75.0}
        """
        metrics = {}
        for split, values in statistics.items():
            metrics[f"{split}_loss"] = values[0] / max(values[1], 1.0)
            if split != "train":
                metrics[f"{split}_{self.metric.name}"] = self.score(values)
        return {name: float(np.float32(value)) for name, value in metrics.items()}


def any_known(y: Tensor) -> Tensor:
    """Return a mask `[n]` of the rows of y with a known label."""
    return ~y.isnan().all(1) if y.dim() == 2 else y >= 0
