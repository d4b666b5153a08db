"""Regression: quantities of nodes, edges or graphs, standardised by the training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data

from .edges import OfEdges
from .graphs import OfGraphs
from .metrics import MAE, QUANTITIES, RMSE, Metric
from .nodes import OfNodes
from .objective import Objective

_T = TypeVar("_T", bound="Targets")


@dataclass(frozen=True)
class Targets(Objective):
    r"""K quantities in each row: y `[n, K]` float32 in their own unit, NaN if it is unknown.

    The model predicts standardised targets. The loss is their squared error, or their absolute error with the metric
    MAE, averaged over all known ones:

    .. math::
        \mathcal{L} = \frac{1}{|\text{known}|} \sum_{ik \text{ known}}
        \Bigl(h_{ik} - \frac{y_{ik} - \mu_k}{\sigma_k}\Bigr)^2

    Scores and predictions are in the unit of y.

    Args:
        out_channels: K, the number of targets.
        metric: by default the RMSE, averaged over the targets.
        mean: μ of each target; those of the training split, which `Task` computes, if it is empty.
        std: σ of each target, likewise; 1 for a target that is the same in every row.
    """

    metric: Metric = field(default=RMSE, repr=False)
    mean: tuple[float, ...] = field(default=(), repr=False)
    std: tuple[float, ...] = field(default=(), repr=False)

    goal = "regression"
    column = "target"
    measures = QUANTITIES

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
    def convert(cls, y: Tensor, where: str) -> Tensor:
        """Return quantities `[n]` or `[n, K]` as `[n, K]` float32."""
        if y.dim() not in (1, 2) or 0 in y.shape[1:]:
            raise ValueError(f"{where}: y has shape {tuple(y.shape)}, expected (N,) or (N, K), K quantities per row.")
        return y.float() if y.dim() == 2 else y.float()[:, None]

    def fitted(self: _T, y: Tensor) -> _T:
        """Return the same objective with the mean and the standard deviation of the training split's targets."""
        if self.mean:
            return self
        wide = y.double()
        mean = wide.nanmean(0).nan_to_num()  # a target may be unknown in the whole split
        std = (wide - mean).square().nanmean(0).sqrt().nan_to_num()
        std = torch.where(std > 1e-12 * mean.abs().clamp(min=1e-30), std, 1.0)
        return replace(self, mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless y is `[n, K]` float32, finite or NaN."""
        y, shape = data.y, (self.size(data), self.out_channels)
        if tuple(y.shape) != shape or y.dtype != torch.float32:
            raise ValueError(
                f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected torch.float32 of shape {shape}: a number "
                f"for each {self.item} and target."
            )
        if y.isinf().any():
            raise ValueError(
                f"{where}: y is infinite as float32 in {int(y.isinf().sum())} places. Give NaN where it is unknown."
            )

    def summed_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the squared or absolute error of the standardised targets.

        Example:
            >>> objective = NodeTargets(1, mean=(5.0,), std=(2.0,))
            >>> objective.loss(torch.zeros(2, 1), torch.tensor([[9.0], [float("nan")]]))  # (0 - (9 - 5) / 2)^2
            tensor(4.)
        """
        known = self.known(y)
        wide = torch.promote_types(out.dtype, y.dtype)  # else float64 outputs are compared with rounded targets
        error = torch.where(known, out - self.outputs(y.to(wide)), 0.0)
        return (error.abs() if self.metric.name == MAE.name else error.square()).sum()

    def measure(self, out: Tensor, y: Tensor) -> float:
        """Return the score in the unit of y."""
        return super().measure(self.predictions(out), y)

    def constant_score(self, y: Tensor) -> float:
        """Return the score of predicting each target's mean in every row, or its median for the MAE.

        Example:
            >>> NodeTargets(1).constant_score(torch.tensor([[1.0], [3.0]]))
            1.0
        """
        wide = y.double()
        best = wide.nanmedian(0).values if self.metric.name == MAE.name else wide.nanmean(0)
        return super().measure(best.expand_as(wide), wide)

    def predictions(self, out: Tensor) -> Tensor:
        """Return the targets in their own unit."""
        return out * _on(self.std, 1.0, out) + _on(self.mean, 0.0, out)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the standardised targets."""
        return (predictions - _on(self.mean, 0.0, predictions)) / _on(self.std, 1.0, predictions)


@dataclass(frozen=True)
class NodeTargets(Targets, OfNodes):
    """K quantities for each node: y `[N, K]` float32, NaN if it is unknown. Squared error, RMSE.

    Example:
        >>> NodeTargets(1).metric.text(0.58)
        'RMSE 0.580'
    """


@dataclass(frozen=True)
class EdgeTargets(OfEdges, Targets):
    """K quantities for each edge of `edge_label_index` `[2, L]`: y `[L, K]` float32, NaN if it is unknown.

    Example:
        >>> data = Data(edge_label_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([[1.0], [3.0]]))
        >>> EdgeTargets(1).loss(*EdgeTargets(1).rows(torch.zeros(2, 1), data, None))
        tensor(5.)
    """


@dataclass(frozen=True)
class GraphTargets(OfGraphs, Targets):
    """K quantities for each graph: y `[1, K]` float32, `[G, K]` in a batch, NaN if it is unknown.

    Example:
        >>> objective, batch = GraphTargets(1), Data(y=torch.tensor([[1.0], [3.0]]))
        >>> objective.loss(*objective.rows(torch.zeros(2, 1), batch, None))
        tensor(5.)
    """


def _on(values: Sequence[float], default: float, like: Tensor) -> Tensor | float:
    """Return numbers as a tensor of the same device and dtype, copied there once; without numbers the default."""
    return _copied(tuple(values), like.device, like.dtype) if len(values) else default


@lru_cache(256)
def _copied(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a later step may need its gradient
        return torch.tensor(values, device=device, dtype=dtype)
