"""The optimizer of a training, and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler


@dataclass(frozen=True)
class Optimisation:
    """Adam with L2, as in the paper, and a schedule of the learning rate.

    Args:
        lr: the learning rate.
        weight_decay: the paper's L2 on all variables, including biases: exactly `Adam(weight_decay=...)`. If the model
            has a method `decayed_parameters()`, only on those.
        schedule: "cosine" lowers the learning rate after each epoch, as in `cosine_schedule`; None keeps it.
    """

    lr: float = 0.005
    weight_decay: float = 0.0
    schedule: Literal["cosine"] | None = None

    def configure(
        self, parameters: Iterable[nn.Parameter], decayed: Iterable[nn.Parameter], max_epochs: int | None
    ) -> Any:
        """Return the optimizer of some parameters, with L2 on the `decayed` ones, and the schedule, for Lightning."""
        groups: list[dict[str, Any]] = [{"params": list(decayed)}]
        ids = {id(parameter) for parameter in groups[0]["params"]}
        if others := [parameter for parameter in parameters if id(parameter) not in ids]:
            groups.append({"params": others, "weight_decay": 0.0})
        adam = torch.optim.Adam(groups, lr=self.lr, weight_decay=self.weight_decay)
        return adam if self.schedule is None else ([adam], [cosine_schedule(adam, max_epochs)])


def cosine_schedule(optimizer: Optimizer, max_epochs: int | None) -> LRScheduler:
    r"""Lower the learning rate to zero along a half cosine (Loshchilov & Hutter, ICLR 2017), one step for each epoch.

    .. math::
        \eta_t = \frac{\eta_0}{2} \Big(1 + \cos \frac{\pi t}{T}\Big), \qquad t = 0, \dots, T - 1

    Args:
        optimizer: with the learning rate of the first epoch.
        max_epochs: T.

    Raises:
        ValueError: if the number of epochs has no limit.

    Example:
        >>> import torch
        >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> schedule = cosine_schedule(adam, 2)
        >>> adam.step(); schedule.step()
        >>> adam.param_groups[0]["lr"]
        0.05
    """
    if max_epochs is None or max_epochs < 1:
        raise ValueError(
            f"max_epochs is {max_epochs}, expected at least 1: the cosine ends there. Give the trainer max_epochs."
        )
    return CosineAnnealingLR(optimizer, max_epochs)
