"""Regression: targets of nodes, edges or graphs, standardised by the training split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from .edges import OfEdges
from .graphs import OfGraphs
from .losses import constant
from .metrics import MAE, METRICS, QUANTITIES, RMSE, STD_RMSE, Metric
from .nodes import OfNodes
from .objective import Objective, widest
from .scaling import ROUNDED, rounded_columns, scale

_T = TypeVar("_T", bound="Targets")
_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mse": Tensor.square,
    "mae": Tensor.abs,
    "huber": lambda error: F.huber_loss(error, torch.zeros_like(error), reduction="none"),
}


@dataclass(frozen=True)
class Targets(Objective):
    r"""K targets in each row: y `[n, K]` float32 or float64 in their own unit, NaN if it is unknown.

    The model predicts standardised targets. The loss is by default their squared error, or their absolute error with a
    metric of absolute errors, averaged over all known ones:

    .. math::
        \mathcal{L} = \frac{1}{|\text{known}|} \sum_{ik \text{ known}}
        \Bigl(h_{ik} - \frac{y_{ik} - \mu_k}{\sigma_k}\Bigr)^2

    Predictions are in the unit of y, and so are RMSE and MAE, averaged over the targets. Several targets may have
    different units, and this average would follow the largest. So their default is the RMSE of the standardised
    targets, and the score of each in its own unit is logged too. Targets with a large mean and a small standard
    deviation, such as times, are standardised in float64, and their predictions are float64.

    Args:
        out_channels: K, the number of targets.
        metric: by default the RMSE of one target, the standardised RMSE of several.
        mean: μ of each target; those of the training split, which `Task` computes, if it is empty.
        std: σ of each target, likewise; 1 for a target that is the same in every row.
        error: the loss whatever the metric: "mse", the squared error; "mae", the absolute error; "huber", half the
            squared error up to one standard deviation and linear beyond (Huber, 1964), for targets with outliers.

    Raises:
        ValueError: if `error` is none of these.
    """

    metric: Metric = field(default=cast(Metric, None), repr=False)
    mean: tuple[float, ...] = field(default=(), repr=False)
    std: tuple[float, ...] = field(default=(), repr=False)
    error: Literal["mse", "mae", "huber"] | None = field(default=None, repr=False)

    goal = "regression"
    column = "target"
    calibrates = True
    measures = QUANTITIES
    loss_options = ("error",)

    @property
    def also(self) -> tuple[str, ...]:
        """The other metrics of the test: of a single target, since several may have different units."""
        return ("mae", "rmse", "r2") if self.out_channels == 1 else ()

    def __post_init__(self) -> None:
        if self.error not in (None, *_LOSSES):
            raise ValueError(f"error is {self.error!r}, expected one of {', '.join(_LOSSES)}.")
        if cast("Metric | None", self.metric) is None:
            object.__setattr__(self, "metric", RMSE if self.out_channels == 1 else STD_RMSE)

    @classmethod
    def recognises(cls, y: Sequence[Tensor]) -> bool:
        """Return True for floats that are not labels: fractions, or other values than 0 and 1 in `[n, K]`."""
        for labels in y:
            if not labels.is_floating_point() or not labels.dim():
                continue
            known = labels[~labels.isnan()].double()
            many = labels.dim() == 2 and labels.size(1) > 1
            if (((known != 0) & (known != 1)) if many else (known != known.round()) | (known < -1)).any():
                return True
        return False

    @classmethod
    def convert(cls, y: Sequence[Tensor], where: str) -> list[Tensor]:
        """Return targets `[n]` or `[n, K]` as `[n, K]` float32; float64 if float32 would round away differences."""
        for labels in y:
            if labels.dim() not in (1, 2) or 0 in labels.shape[1:]:
                shape = tuple(labels.shape)
                raise ValueError(f"{where}: y has shape {shape}, expected (N,) or (N, K), K targets per row.")
        columns = [labels if labels.dim() == 2 else labels[:, None] for labels in y]
        same = len({labels.size(1) for labels in columns}) == 1  # if not, the check of each graph refuses them
        dtype = torch.float64 if same and rounded_columns(columns) else torch.float32
        return [labels.to(dtype) for labels in columns]

    def fitted(self: _T, y: Tensor) -> _T:
        """Return the same objective with the mean and the standard deviation of the training split's targets."""
        if self.mean:
            return self
        wide = y.double()
        mean = wide.nanmean(0).nan_to_num()  # a target may be unknown in the whole split
        std = (wide - mean).square().nanmean(0).sqrt().nan_to_num()
        return replace(self, mean=tuple(mean.tolist()), std=tuple(each or 1.0 for each in scale(std, mean).tolist()))

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless y is `[n, K]` float32 or float64, finite as float32 or NaN."""
        y, shape = data.y, (self.size(data), self.out_channels)
        if tuple(y.shape) != shape or y.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected torch.float32 of shape {shape}: a number "
                f"for each {self.item} and target."
            )
        if count := int(y.float().isinf().sum()):
            raise ValueError(f"{where}: y is infinite as float32 in {count} places. Give NaN where it is unknown.")

    def summed_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the error of the standardised targets.

        Example:
            >>> objective = NodeTargets(1, mean=(5.0,), std=(2.0,))
            >>> objective.loss(torch.zeros(2, 1), torch.tensor([[9.0], [float("nan")]]))  # (0 - (9 - 5) / 2)^2
            tensor(4.)
        """
        known = self.known(y)
        wide = torch.promote_types(out.dtype, y.dtype)  # or float64 outputs would meet rounded targets
        standard = self.outputs(y.to(wide)).to(torch.promote_types(out.dtype, torch.float32))
        error = torch.where(known, out - standard, 0.0)
        return _LOSSES[self.error or ("mae" if self.metric.name.endswith("mae") else "mse")](error).sum()

    def measure(self, out: Tensor, y: Tensor) -> float:
        """Return the score, RMSE and MAE in the unit of y."""
        return self._score(self.predictions(out), y)

    def metrics(self, statistics: Mapping[str, Sequence[float] | Tensor]) -> dict[str, float]:
        """Return the loss and the score of each split, and of several targets the score of each in its own unit.

        Example:
            >>> objective = NodeTargets(2, mean=(0.0, 0.0), std=(1.0, 100.0))
            >>> rows = torch.tensor([[0.0, 0.0, 1.0, 100.0], [0.0, 0.0, -1.0, -100.0]])  # predicted, then y
            >>> objective.metrics({"val": rows})
            {'val_loss': 1.0, 'val_std_rmse': 1.0, 'val_rmse_0': 1.0, 'val_rmse_1': 100.0}
        """
        metrics = super().metrics(statistics)
        if self.out_channels == 1:
            return metrics
        metric = METRICS[self.metric.name.removeprefix("std_")]
        for split in (split for split in statistics if split != "train"):
            out, y = self.unpack(torch.as_tensor(statistics[split]))
            for k, column in enumerate(zip(out.split(1, 1), y.split(1, 1), strict=True)):
                single = replace(
                    self, out_channels=1, metric=metric, mean=self.mean[k : k + 1], std=self.std[k : k + 1]
                )
                metrics[f"{split}_{metric.name}_{k}"] = float(np.float32(single.measure(*column)))
        return metrics

    def constant_score(self, y: Tensor) -> float:
        """Return the score of predicting each target's mean in every row, or its median for absolute errors.

        Example:
            >>> NodeTargets(1).constant_score(torch.tensor([[1.0], [3.0]]))
            1.0
        """
        wide = y.double()
        best = wide.nanmedian(0).values if self.metric.name.endswith("mae") else wide.nanmean(0)
        return self._score(best.expand_as(wide), wide)

    def predictions(self, out: Tensor) -> Tensor:
        """Return the targets in their own unit; as float64 if float32 would round away their differences."""
        out = out.to(self._dtype(out))
        return out * constant(self.std, out) + constant(self.mean, out, 0.0)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the standardised targets."""
        predictions = predictions.to(self._dtype(predictions))
        return (predictions - constant(self.mean, predictions, 0.0)) / constant(self.std, predictions)

    def _score(self, predictions: Tensor, y: Tensor) -> float:
        """Return the score of predictions in the unit of y."""
        if self.metric.name not in (RMSE.name, MAE.name):
            predictions, y = self.outputs(predictions), self.outputs(y)
        return super().measure(predictions, y)

    def _dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype in which targets are standardised."""
        eps = torch.finfo(torch.float32).eps / 2
        is_rounded = any(eps * abs(mean) > ROUNDED * std for mean, std in zip(self.mean, self.std, strict=True))
        return torch.promote_types(like.dtype, widest(like)) if is_rounded else like.dtype


@dataclass(frozen=True)
class NodeTargets(Targets, OfNodes):
    """K targets for each node: y `[N, K]` float32 or float64, NaN if it is unknown. Squared error, RMSE.

    Example:
        >>> NodeTargets(1).metric.text(0.58)
        'RMSE 0.580'
    """


@dataclass(frozen=True)
class EdgeTargets(OfEdges, Targets):
    """K targets for each edge of `edge_label_index` `[2, L]`: y `[L, K]` float32, NaN if it is unknown.

    Example:
        >>> data = Data(edge_label_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([[1.0], [3.0]]))
        >>> EdgeTargets(1).loss(*EdgeTargets(1).rows(torch.zeros(2, 1), data, None))
        tensor(5.)
    """


@dataclass(frozen=True)
class GraphTargets(OfGraphs, Targets):
    """K targets for each graph: y `[1, K]` float32, `[G, K]` in a batch, NaN if it is unknown.

    Example:
        >>> objective, batch = GraphTargets(1), Data(y=torch.tensor([[1.0], [3.0]]))
        >>> objective.loss(*objective.rows(torch.zeros(2, 1), batch, None))
        tensor(5.)
    """
