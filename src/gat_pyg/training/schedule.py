"""Schedules of the learning rate."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

Schedule = Literal["cosine"]


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
