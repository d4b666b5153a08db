"""The optimizer of a training, and the learning rate of each epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

# The optimizers of torch in which the step of an element depends on this element, its gradients and the time alone.
ELEMENTWISE = (
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)


@dataclass(frozen=True)
class Optimisation:
    r"""How a training changes the weights: the optimizer, its learning rate, clipping, and averaging.

    A step takes the gradient :math:`g` of the loss and makes it at most as long as :math:`c`, the clipping:
    :math:`g \min(1, c / \lVert g \rVert)`. Then the optimizer steps, with the learning rate of the epoch, which is that
    of the scheduler times the warm-up (see `Schedule`). With an `ema` of :math:`\beta`, the weights that are validated,
    kept and tested are the average :math:`m \leftarrow \beta m + (1 - \beta) w` over the steps (see `Average`).

    Args:
        lr: the learning rate.
        weight_decay: the optimizer's own argument: with Adam, the paper's L2 on all variables, including biases; with
            AdamW, decay that is independent of the gradient. If the model has a method `decayed_parameters()`, only on
            those.
        optimizer: a class of `torch.optim`, or any function called as `optimizer(groups, lr=..., weight_decay=...)`.
            Further arguments by `functools.partial`. One without the argument `weight_decay`, as LBFGS, is called
            without it, and with the parameters instead of groups.
        scheduler: a class of `torch.optim.lr_scheduler`, or any function of an optimizer that returns such an object;
            its arguments by `functools.partial`. It steps after each epoch. `T_max`, the end of a cosine, is by default
            the trainer's `max_epochs`. A `ReduceLROnPlateau` steps after each validation: it gets `val_loss`, or with
            `mode="max"` the score, negated if lower scores are better.
        warmup: the number of epochs over which the learning rate rises linearly.
        gradient_clip_val: the largest norm of the gradient over all parameters; None does not clip.
        ema: the decay of an exponential moving average of the weights, above 0 and below 1; None averages nothing.

    Example:
        >>> import torch
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR
        >>> cosine = Optimisation(0.1, optimizer=optim.AdamW, scheduler=CosineAnnealingLR)
        >>> weights = [nn.Parameter(torch.zeros(1))]
        >>> optimizer, schedule = cosine.configure(weights, weights, max_epochs=2)
        >>> optimizer.step(); schedule.step()
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """

    lr: float = 0.005
    weight_decay: float = 0.0
    optimizer: Callable[..., Optimizer] = optim.Adam
    scheduler: Callable[[Optimizer], Any] | None = None
    warmup: int = 0
    gradient_clip_val: float | None = None
    ema: float | None = None

    def configure(
        self,
        parameters: Iterable[nn.Parameter],
        decayed: Iterable[nn.Parameter],
        max_epochs: int | None = None,
    ) -> tuple[Optimizer, Schedule | None]:
        """Return the optimizer of some parameters, with weight decay on the `decayed` ones, and its schedule if any.

        Raises:
            ValueError: if the optimizer or the scheduler refuses its arguments, or a cosine has no end.
        """
        groups: list[dict[str, Any]] = [{"params": list(decayed)}]
        ids = {id(parameter) for parameter in groups[0]["params"]}
        if others := [parameter for parameter in parameters if id(parameter) not in ids]:
            groups.append({"params": others, "weight_decay": 0.0})
        if _takes(self.optimizer, "weight_decay"):
            optimizer = _built(self.optimizer, groups, lr=self.lr, weight_decay=self.weight_decay)
        elif self.weight_decay:
            raise ValueError(
                f"{_name(self.optimizer)} has no argument weight_decay, but weight_decay is {self.weight_decay}. Set "
                "weight_decay to 0, or choose another optimizer."
            )
        else:
            optimizer = _built(self.optimizer, [value for group in groups for value in group["params"]], lr=self.lr)
        return optimizer, self.schedule(optimizer, max_epochs)

    def schedule(self, optimizer: Optimizer, max_epochs: int | None = None) -> Schedule | None:
        """Return the schedule of an optimizer's learning rates, if there is any; raise ValueError as `configure`."""
        if self.scheduler is None:
            return Schedule(optimizer, None, self.warmup) if self.warmup else None
        options = {}
        if self.lasts_until_the_end:
            if max_epochs is None or max_epochs < 1:
                raise ValueError(
                    f"max_epochs is {max_epochs}, expected at least 1: {_name(self.scheduler)} ends there. Give the "
                    "trainer max_epochs, or the scheduler T_max."
                )
            options["T_max"] = max_epochs
        return Schedule(optimizer, _built(self.scheduler, optimizer, **options), self.warmup)

    @property
    def lasts_until_the_end(self) -> bool:
        """Return True if the scheduler takes the number of epochs as its `T_max`."""
        make = self.scheduler
        return make is not None and "T_max" in inspect.signature(make).parameters and not _sets(make, "T_max")

    @property
    def stack_obstacle(self) -> str | None:
        """The reason that models with the sum of their losses would take other steps than each alone, or None."""
        if _called(self.optimizer) not in ELEMENTWISE:
            return f"{_name(self.optimizer)} is not known to act on each element of the weights alone"
        if self.on_plateau:
            return f"{_name(self.scheduler)} follows the validation of each model"
        return None

    @property
    def on_plateau(self) -> bool:
        """Return True if the learning rate depends on the validation."""
        scheduler = _called(self.scheduler)
        return inspect.isclass(scheduler) and issubclass(scheduler, ReduceLROnPlateau)


class Schedule(LRScheduler):
    r"""The learning rate of each epoch: that of a scheduler of torch, times a linear warm-up.

    .. math::
        \eta_t = \min\Big(1, \frac{t + 1}{w}\Big) \, \eta^\text{scheduler}_t, \qquad t = 0, 1, \dots

    The scheduler steps during the warm-up too, and does not see it. Each group of the optimizer has a rate of its own.

    Args:
        optimizer: optimizer with the learning rate of the scheduler's first epoch.
        scheduler: scheduler of this optimizer; None keeps the learning rate after the warm-up.
        warmup: w, the number of epochs of the warm-up; 0 for none.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        >>> schedule, rates = Schedule(sgd, None, warmup=4), []
        >>> for epoch in range(5):
        ...     rates.append(round(sgd.param_groups[0]["lr"], 3))
        ...     schedule.step()
        >>> rates
        [0.1, 0.2, 0.3, 0.4, 0.4]
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any = None, warmup: int = 0) -> None:
        self.optimizer, self.scheduler, self.warmup = optimizer, scheduler, warmup
        self.epoch = 0
        self.rates = self._rates()  # rate of each group, without the warm-up
        self._warm_up()

    @property
    def on_plateau(self) -> bool:
        """Return True if the learning rates depend on the validation."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next epoch."""
        self.epoch += 1
        if self.scheduler is not None and not self.on_plateau:
            self._step()
        self._warm_up()

    def validated(self, loss: float, score: float) -> None:
        """Adapt the learning rates to a validation if they depend on it; higher scores are better."""
        if self.on_plateau:
            self._step(loss if self.scheduler.mode == "min" else score)
            self._warm_up()

    def _step(self, *arguments: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        self.scheduler.step(*arguments)
        self.rates = self._rates()

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _warm_up(self) -> None:
        factor = min(1.0, (self.epoch + 1) / self.warmup) if self.warmup else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self._last_lr = self._rates()  # read by `get_last_lr`

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for the checkpoint; the optimizer's own state has the current learning rates."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"epoch": self.epoch, "rates": self.rates, "scheduler": scheduler}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.epoch, self.rates = state_dict["epoch"], list(state_dict["rates"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])


def _built(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, **kwargs)
    except Exception as error:  # a user may name any class
        raise ValueError(f"{_name(make)} cannot be used: {' '.join(str(error).split())}") from error


def _called(make: Any) -> Any:
    """Return the class or function of nested `functools.partial`."""
    return _called(make.func) if isinstance(make, partial) else make


def _sets(make: Any, name: str) -> bool:
    """Return True if a `functools.partial` has an argument of this name."""
    return isinstance(make, partial) and (name in make.keywords or _sets(make.func, name))


def _name(make: Any) -> str:
    return str(getattr(_called(make), "__name__", make))


def _takes(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters
    return name in parameters or any(value.kind is value.VAR_KEYWORD for value in parameters.values())
