"""Exact resume: seeded epochs, periodic checkpoints, and a checkpoint before exiting on a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ..distributed.ranks import rank_zero_print
from .averaging import Average
from .epoch_seeds import seed_epoch
from .signals import handled
from .stopping import PaperStopping


def check_states(callbacks: Sequence[Callback], states: Any) -> None:
    """Raise ValueError if a checkpoint lacks a callback's state: Lightning would reset the callback silently."""
    for callback in callbacks:
        if not isinstance(callback, (PaperStopping, Resumable, Average)):
            continue
        name, keys = callback.state_key, callback.state_dict().keys()
        state = states.get(name) if isinstance(states, dict) else None
        if not isinstance(state, dict) or not keys <= state.keys():
            raise ValueError(
                f"The checkpoint has no state of {name}, expected {', '.join(keys)} under callbacks.{name}, as this "
                "package's runs write them. Resume from the last.ckpt of a run, or start again without ckpt_path."
            )


class Resumable(Callback):
    """Exact resume: after a kill, `trainer.fit(..., ckpt_path=path)` gives the results of an uninterrupted run.

    Before each epoch all random generators (torch on all devices, numpy, Python) are seeded from `seed`, the rank and
    the number of the epoch, so its random numbers do not depend on earlier epochs. After an epoch, the checkpoint at
    `path` is replaced atomically if the last one is `every` seconds old. Slow writes happen less often, so that
    writing takes less than 5 % of the time. A kill costs the epochs since the last checkpoint, which are repeated.
    `every=0` writes after each epoch, `path=None` never.

    On SIGINT (Ctrl-C) or SIGTERM, the epoch is finished and its checkpoint written; then SystemExit(128 + signal) is
    raised. A second SIGINT raises it immediately. Signals are not handled with `path=None` or outside the main thread.

    The order of the data must not depend on the global generator: use `TaskData`, or a whole graph.
    """

    def __init__(self, path: str | Path | None, seed: int = 0, every: float = 30.0) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}, expected a number from 0 to 2^32 - 1.")
        self.path = path
        self.seed = seed
        self.every = every
        self._before = 0.0  # seconds of training before this process
        self._start = self._due = float("inf")
        self._end: float | None = None
        self._status: int | None = None  # after a signal: the status to exit with when the epoch ends
        self._signals = ExitStack()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including those before a resume."""
        now = time.perf_counter() if self._end is None else self._end
        return self._before + max(now - self._start, 0.0)

    @property
    def status(self) -> int | None:
        """The status to exit with after a signal, which a process of the training has too; None without one."""
        return self._status

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and install the signal handler."""
        self._start, self._end = time.perf_counter(), None
        self._due = self._start + self.every
        self._status = None
        if self.path is not None:
            self._signals.enter_context(handled(self._wait))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the epoch."""
        seed_epoch(self.seed, trainer.global_rank, trainer.current_epoch, pl_module.device.type)
        if begin := getattr(pl_module, "begin_epoch", None):
            begin(self.seed, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the checkpoint if it is due, and exit if any process received a signal."""
        due, status = self._agreed(trainer, time.perf_counter() >= self._due)
        if (due or status) and self.path is not None:
            start = time.perf_counter()
            trainer.save_checkpoint(self.path)
            now = time.perf_counter()
            self._due = now + (self.every and max(self.every, 20 * (now - start)))
        if status:
            raise SystemExit(status)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and restore the signal handlers."""
        self._end = time.perf_counter()
        self._signals.close()
        if status := self._agreed(trainer)[1]:  # a signal arrived after the last epoch
            raise SystemExit(status)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers."""
        self._signals.close()

    def _agreed(self, trainer: Trainer, due: bool = False) -> tuple[bool, int]:
        """Agree among all processes: return True if a checkpoint is due, and the status to exit with, 0 to continue."""
        request = int(due), self._status or 0
        if trainer.world_size > 1:
            local = torch.tensor(request, device=trainer.strategy.root_device)
            request = cast(tuple[int, int], trainer.strategy.reduce(local, reduce_op="max").tolist())
        return bool(request[0]), request[1]

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._status is not None:
            raise SystemExit(128 + number)
        self._status = 128 + number
        if number == signal.SIGINT:
            with suppress(RuntimeError):  # the signal interrupted another print
                rank_zero_print("Finishing this epoch; press Ctrl-C again to stop now.")

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of training so far, for the checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's seconds."""
        self._before = state_dict["seconds"]
