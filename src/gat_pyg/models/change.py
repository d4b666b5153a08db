"""Change: a model that predicts the change of a target from the last of its earlier values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tasks.model import members
from .wrapper import Wrapper

FLAT = 0.1  # the scale of values that do not change, as a share of the typical one


class Change(Wrapper):
    r"""A model of standardised targets whose output is a change, in units of the spread of a node's earlier values.

    With the earlier values :math:`w_i` in some columns of x, their last one :math:`l_i` and their standard deviation
    :math:`s_i`, the model reads :math:`(w_i - l_i) / s_i` instead of these columns, and the output is

    .. math::
        \Bigl(l_i + s_i \, h_i - \mu\Bigr) / \sigma

    as in reversible instance normalisation (Kim et al., ICLR 2022), from the last value as in NLinear (Zeng et al.,
    AAAI 2023). So a series may grow beyond all values of the training.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`, with outputs `[N, K]`.
        columns: the columns of x with earlier values of a target, in its unit.
        last: for each target the column with its last value.
        mean, std: :math:`\mu` and :math:`\sigma` of each target, those of the task's objective.
        scale: the typical :math:`s_i`, a tenth of it is added to each (as variances), since some do not change.

    Raises:
        ValueError: if the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> model = Change(nn.Linear(2, 1), [0, 1], [1], [0.0], [1.0])
        >>> _ = nn.init.zeros_(model.model.weight), nn.init.ones_(model.model.bias)
        >>> model(torch.tensor([[10.0, 12.0]])).detach()  # 12 and a standard deviation of 1
        tensor([[13.0050]])
    """

    def __init__(
        self,
        model: nn.Module,
        columns: Sequence[int],
        last: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        super().__init__(model, "It has no targets.")
        self.model, self.out_channels = model, members(model).out_channels
        self.columns, self.last, self.scale = [*columns], [*last], scale
        self.mean, self.std = [*mean], [*std]

    def forward(self, x: Tensor, edge_index: Any = None, **options: Any) -> Tensor:
        """Return the standardised targets `[N, K]` for x `[N, F]`; the other arguments are the model's."""
        parts = [*x.unbind(-1)]
        values = torch.stack([parts[column] for column in self.columns], -1)
        spread = (values.var(-1, correction=0) + (FLAT * self.scale) ** 2).sqrt()  # [N]
        targets = [*zip([parts[column] for column in self.last], self.mean, self.std, strict=True)]
        first, *_ = targets[0]
        for column in self.columns:
            parts[column] = (parts[column] - first) / spread
        change = self._called(torch.stack(parts, -1), edge_index, **options)
        each, N = zip(targets, change.unbind(-1), strict=True), len(change)  # the first rows, of a receptive field
        return torch.stack([(last[:N] - mean + spread[:N] * h) / std for (last, mean, std), h in each], -1)
