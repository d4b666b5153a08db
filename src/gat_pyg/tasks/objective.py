"""Objectives: the meaning of a row of a model's output, its loss and its score."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from .metrics import ALIASES, METRICS, Measure, Metric

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)
RARE = 0.05  # the share of the training labels below which a class is rare
SAMPLES = 20  # bootstrap samples for a standard error


@dataclass(frozen=True)
class Objective(ABC):
    """A prediction goal: the meaning of a row of a model's output, its loss and its score.

    Training, validation and reports work with any objective. Unknown labels count neither in the loss nor in the score.

    Args:
        out_channels: K, the number of columns of the output.
        label_rate: the share of the training labels that a step reads (`OfNodes`); None reads none.
    """

    out_channels: int
    label_rate: float | None = field(default=None, repr=False, kw_only=True)

    item: ClassVar[str]  # what has a label, and a row in the output: "node", "edge", "graph", "link"
    goal: ClassVar[str]  # the second half of the task's name: "classification", "regression", "prediction"
    column: ClassVar[str]  # the noun for a column of the output: "class", "label", "target"
    measures: ClassVar[Mapping[str, Measure | None]]  # the metrics that fit, as in `gat_pyg.tasks.metrics`
    loss_options: ClassVar[tuple[str, ...]] = ()  # the arguments that change the loss
    has_pairs: ClassVar[bool] = False  # True if rows are pairs of nodes
    draws_pairs: ClassVar[bool] = False  # True if a training step draws negative pairs, which are rows too
    has_columns: ClassVar[bool] = True  # False if a row of the predictions is a single number, and K another width
    calibrates: ClassVar[bool] = False  # True if the predictions can be calibrated on the validation
    by_class: ClassVar[bool] = False  # True if training rows are drawn in equal numbers from each class

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The score that is reported, kept and stopped on; one of `gat_pyg.tasks.metrics`."""

    @property
    def also(self) -> tuple[str, ...]:
        """The names of other metrics whose test scores are computed too if the score is `by_rows`."""
        return ()

    @property
    def columns(self) -> str:
        """The plural of `column`."""
        return f"{self.column}es" if self.column.endswith("s") else f"{self.column}s"

    @property
    def predicts(self) -> str:
        """The predicted values in words, such as "7 node classes"."""
        return f"{self.out_channels} {self.item} {self.column if self.out_channels == 1 else self.columns}"

    def scored_by(self, metric: str) -> Objective:
        """Return the same objective with another metric, given by name or alias.

        Raises:
            ValueError: if it is unknown or does not fit; the message lists those that fit.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(7).scored_by("rmse")
            Traceback (most recent call last):
            ValueError: metric=rmse does not fit 7 node classes, expected accuracy, ...
        """
        return replace(self, metric=self.named(metric))  # type: ignore[call-arg]

    def named(self, metric: str) -> Metric:
        """Return the metric of this name or alias.

        Raises:
            ValueError: as in `scored_by`.
        """
        name = ALIASES.get(metric, metric)
        if name not in self.measures:
            reason = f"does not fit {self.predicts}" if name in METRICS else "is unknown"
            raise ValueError(f"metric={metric} {reason}, expected {', '.join(self.measures)}.")
        return METRICS[name]

    def with_loss(self, **options: Any) -> Objective:
        """Return the same objective with some of its `loss_options` replaced.

        Raises:
            ValueError: if one does not fit; the message lists those that fit.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(7).with_loss(pos_weight=3.0)
            Traceback (most recent call last):
            ValueError: pos_weight does not fit 7 node classes, expected class_weight, label_smoothing, focal.
        """
        if unfit := [key for key in options if key not in self.loss_options]:
            expected = ", ".join(self.loss_options) or "none"
            raise ValueError(f"{unfit[0]} does not fit {self.predicts}, expected {expected}.")
        return replace(self, **options)

    def rare(self, y: Tensor) -> dict[int, float]:
        """Return the columns that are rare among these training labels and have no more weight, with their shares."""
        return {}

    @classmethod
    def recognises(cls, y: Sequence[Tensor]) -> bool:
        """Return True if the raw labels of the graphs have this form and no more specific one."""
        return False

    @classmethod
    def convert(cls, y: Sequence[Tensor], where: str) -> list[Tensor]:
        """Return the raw labels of the graphs in the form that `check` requires.

        Raises:
            ValueError: if they cannot be converted; the message begins with `where`.
        """
        return list(y)

    @classmethod
    def for_labels(cls, y: Sequence[Tensor], where: str) -> Objective:
        """Return the objective for all labels, in the form of `convert`: with as many columns as they need.

        Raises:
            ValueError: if there is nothing to learn; the message begins with `where`.
        """
        return cls(y[0].size(1))

    def fitted(self, y: Tensor) -> Objective:
        """Return the objective for these training labels: with what it computes from them.

        That is the mean and the standard deviation of regression targets, and balanced weights of the loss.
        """
        return self

    def size(self, data: Data) -> int:
        """Return the number of rows in the labels of a graph."""
        raise NotImplementedError

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

    def check_output(self, out: Any, num_rows: Sequence[int], advice: str = "Keep the rows of x.") -> None:
        """Raise ValueError unless a model's output is `[..., n, K]`, where n is one of `num_rows`."""
        K, shape = self.out_channels, tuple(getattr(out, "shape", ()))
        if len(shape) < 2 or shape[-2] not in num_rows or shape[-1] != K:
            remedy = advice if shape[-1:] == (K,) else f"Build it with out_channels={K}."
            raise ValueError(
                f"The model returns {shape or type(out).__name__}, expected ({num_rows[0]}, {K}): a row for each "
                f"{self.item}, a column for each {self.column}. {remedy}"
            )

    @abstractmethod
    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the rows of the output `[..., n, K]` that belong to a split, and their labels.

        Args:
            out: the model's output for `data`, with a leading dimension for stacked models.
            data: a graph or a batch.
            split: the split of a graph that all splits share; None if all of `data` belongs to one split.
        """

    def labels(self, data: Data, split: Split | None) -> Tensor:
        """Return the labels that `rows` returns; by default all."""
        y: Tensor = data.y
        return y

    def example(self, data: Data, split: Split) -> Data:
        """Return the graph that a step of a split computes: `data`, unless the objective selects or draws rows."""
        return data

    @property
    def num_labels(self) -> int:
        """The number of columns that known labels append to x: 0, unless the objective reads some."""
        return 0

    def with_labels(self, data: Data, read: Tensor) -> Data:
        """Return a graph with features `[N, F + num_labels]`: with the known labels of the nodes in a mask `[N]`."""
        return data

    def complete(self, data: Data) -> None:  # noqa: B027 (most objectives need nothing)
        """Add the fields that the model needs for prediction to a graph without labels.

        Raises:
            ValueError: if a field is missing and has no default.
        """

    def known(self, y: Tensor) -> Tensor:
        """Return a mask of the known labels, with the shape of y: floats that are not NaN, or whole numbers from 0."""
        return ~y.isnan() if y.is_floating_point() else y >= 0

    def unknown(self, y: Tensor) -> Tensor:
        """Return unknown labels with the shape of y: NaN, or -1 for whole numbers."""
        return torch.full_like(y, float("nan") if y.is_floating_point() else -1)

    @abstractmethod
    def summed_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the loss over the known labels; 0 if none is known."""

    def loss(self, out: Tensor, y: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Return the mean or the sum of the loss over the known labels; 0 if none is known."""
        loss = self.summed_loss(out, y)
        return loss / self.known(y).sum().clamp(min=1) if reduction == "mean" else loss

    @property
    def by_rows(self) -> bool:
        """True if the score needs all predictions of a split; False if it follows from sums."""
        return self.measures[self.metric.name] is not None

    def counts(self, out: Tensor, y: Tensor) -> list[Tensor]:
        """Return the counts from which the score follows, unless it is `by_rows`."""
        raise NotImplementedError

    def score_of_counts(self, size: float, *counts: float) -> float:
        """Return the score from the number of known labels and the pooled `counts`, unless it is `by_rows`."""
        raise NotImplementedError

    def statistics(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the sufficient statistics of a batch, in float64 if the device has it.

        If `by_rows`, these are the rows `[n, K + labels]` of the predictions with their labels. Otherwise sums `[s]`:
        of the loss, the number of known labels, and the `counts`.
        """
        if self.by_rows:
            return torch.cat([out.to(widest(out)), (y[:, None] if y.dim() == 1 else y).to(widest(out))], -1)
        sums = [self.summed_loss(out, y), self.known(y).sum(), *self.counts(out, y)]
        return torch.stack([value.to(widest(out)) for value in sums])

    def pool(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the statistics of several batches together: all rows, or the sums."""
        return torch.cat(list(parts), -2) if self.by_rows else torch.stack(list(parts)).sum(0)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions and the labels of the rows that `statistics` packed."""
        return rows[:, : self.out_channels], rows[:, self.out_channels :]

    def score(self, statistics: Sequence[float] | Tensor) -> float:
        """Return the score from the pooled `statistics`.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
            >>> NodeLabels(7).score([1.0, 4.0, 3.0]), NodeMultiLabels(2).score([1.0, 4.0, 1.0, 1.0, 1.0])
            (75.0, 0.5)
        """
        if self.by_rows:
            return self.measure(*self.unpack(torch.as_tensor(statistics)))
        return self.score_of_counts(*(float(value) for value in statistics[1:]))

    def measure(self, out: Tensor, y: Tensor) -> float:
        """Return the score of predictions; the metric needs all of them."""
        return cast(Measure, self.measures[self.metric.name])(out, y)

    @abstractmethod
    def constant_score(self, y: Tensor) -> float:
        """Return the best score of a constant prediction, the same for all rows."""

    def constant_error(self, y: Tensor) -> float:
        """Return the standard error of `constant_score`, over bootstrap samples of the rows with a known label.

        If a constant has the same score in every sample, as in a ranking, it is the error of random predictions.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(2).constant_error(torch.tensor([0, 1, 1, 1]).repeat(25))  # 100 (0.75 * 0.25 / 100)^(1 / 2)
            4.33...
        """
        y, draw = y[any_known(y)], torch.Generator().manual_seed(0)
        rows = [torch.randint(len(y), (len(y),), generator=draw) for _ in range(SAMPLES)]
        error = _deviation([self.constant_score(y[index]) for index in rows])
        return error or _deviation([self.random_score(y, draw) for _ in rows])

    def random_score(self, y: Tensor, draw: torch.Generator) -> float:
        """Return the score of random predictions, or NaN unless it is `by_rows`."""
        if not self.by_rows:
            return float("nan")
        return self.measure(torch.randn(len(y), self.out_channels, generator=draw, dtype=torch.float64), y)

    @abstractmethod
    def predictions(self, out: Tensor) -> Tensor:
        """Return the probabilities of the output's columns, or regression targets in their own unit."""

    @abstractmethod
    def outputs(self, predictions: Tensor) -> Tensor:
        """Return outputs with these predictions."""

    def scores(self, out: Tensor, data: Data) -> Tensor:
        """Return one row of the output for each item of a graph; by default `out`, which has these rows already."""
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the class and its arguments as plain data; `objective_from` is the inverse."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {key: value.name for key, value in values.items() if isinstance(value, Metric)}
        return {"objective": type(self).__name__, **values}

    def train_statistics(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and its part of the epoch's sums: (summed loss, number of known labels)."""
        loss, size = self.loss(out, y), self.known(y).sum()
        wide = torch.promote_types(loss.dtype, torch.float32)  # bfloat16 counts only to 256
        return loss, torch.stack([loss.detach().to(wide) * size, size.to(wide)])

    def metrics(self, statistics: Mapping[str, Sequence[float] | Tensor]) -> dict[str, float]:
        """Return the loss and the score of each split, rounded to float32; only the loss for the training.

        If the score is `by_rows`, those of the test have the scores `also`.

        Example:
            >>> from gat_pyg.tasks.nodes import NodeLabels
            >>> NodeLabels(7).metrics({"train": [1.0, 4.0], "val": [1.0, 4.0, 3.0]})
            {'train_loss': 0.25, 'val_loss': 0.25, 'val_accuracy': 75.0}
        """
        metrics = {}
        for split, values in statistics.items():
            if self.by_rows and split != "train":
                metrics[f"{split}_loss"] = float(self.loss(*self.unpack(torch.as_tensor(values))))
            else:
                metrics[f"{split}_loss"] = float(values[0]) / max(float(values[1]), 1.0)
            if split != "train":
                metrics[f"{split}_{self.metric.name}"] = self.score(values)
            if split == "test" and self.by_rows:
                others = (self.scored_by(name) for name in self.also if name != self.metric.name)
                metrics |= {f"test_{other.metric.name}": other.score(values) for other in others}
        return {name: float(np.float32(value)) for name, value in metrics.items()}


def any_known(y: Tensor) -> Tensor:
    """Return a mask `[n]` of the rows of y with a known label."""
    return ~y.isnan().all(1) if y.dim() == 2 else y >= 0


def are_equal(y: Tensor) -> bool:
    """Return True if the known labels in y, `[n]` or each column of `[n, K]`, do not differ, in more than one row."""
    rows = y.double().masked_fill(y < 0, float("nan"))[:, None] if y.dim() == 1 else y.double()
    low = rows.nan_to_num(nan=float("inf")).amin(0)
    high = rows.nan_to_num(nan=float("-inf")).amax(0)
    return len(y) > 1 and bool((low >= high).all())


def _deviation(scores: Sequence[float]) -> float:
    """Return the standard deviation of the scores that are defined, 0 if it is only rounding."""
    defined = [score for score in scores if score == score]
    deviation = statistics.stdev(defined) if len(defined) > 1 else 0.0
    return deviation if deviation > 1e-6 else 0.0


def widest(out: Tensor) -> torch.dtype:
    """Return the widest float dtype of a tensor's device, for sums."""
    return torch.float32 if out.device.type == "mps" else torch.float64  # counts are exact up to 2^24 and 2^53
