"""Exact resume: the state of every generator and of stopping in the checkpoint."""

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
from .epoch_seeds import seed_epoch
from .signals import handled
from .stopping import PaperStopping


def _check_states(callbacks: Sequence[Callback], states: Any) -> None:
    """Raise ValueError where a checkpoint lacks what a fit goes on from: Lightning would begin such a callback anew."""
    for callback in callbacks:
        if not isinstance(callback, (PaperStopping, Resumable)):
            continue
        name, keys = callback.state_key, callback.state_dict().keys()
        state = states.get(name) if isinstance(states, dict) else None
        if not isinstance(state, dict) or not keys <= state.keys():
            raise ValueError(
                f"The checkpoint has no state of {name}, expected {', '.join(keys)} under callbacks.{name}, as this "
                "package's runs write them. Resume from the last.ckpt of a run, or start anew without ckpt_path."
            )


# Resume -------------------------------------------------------------------------------------------------------------


class Resumable(Callback):
    """Exact resume: a run that was killed at any moment ends like one that was not: `trainer.fit(..., ckpt_path=path)`.

    Before each epoch all sources of chance (torch on all devices, numpy, Python) are seeded from `seed`, the
    process's rank and the epoch's number, so that an epoch's dropout does not depend on how one came to it. After
    an epoch the checkpoint at `path` is replaced in one step if `every` seconds have gone by since the last one; a
    write that takes long is made less often, so that writing stays below a twentieth of the time. What a kill costs is
    the epochs since then, which are redone. `every=0` writes after each epoch, `path=None` never.

    SIGINT (Ctrl-C) and SIGTERM wait for the end of the epoch: its checkpoint is written, and SystemExit(128 + signal)
    raised. A second SIGINT does not wait. With `path=None`, or in another thread than the first, they are left alone.

    Needs data whose order does not come from the global generator: `TaskData`, or a graph as a whole.
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
        self._status: int | None = None  # to exit with after this epoch, on a signal
        self._signals = ExitStack()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        now = time.perf_counter() if self._end is None else self._end
        return self._before + max(now - self._start, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and handle the signals."""
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
        """Write the checkpoint if it is due, and exit if any of the processes got a signal."""
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
        if status := self._agreed(trainer)[1]:  # it came after the last epoch
            raise SystemExit(status)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers."""
        self._signals.close()

    def _agreed(self, trainer: Trainer, due: bool = False) -> tuple[bool, int]:
        """Return whether a checkpoint is due, and the status to exit with or 0: the same in all processes."""
        request = int(due), self._status or 0
        if trainer.world_size > 1:
            ours = torch.tensor(request, device=trainer.strategy.root_device)
            request = cast(tuple[int, int], trainer.strategy.reduce(ours, reduce_op="max").tolist())
        return bool(request[0]), request[1]

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._status is not None:
            raise SystemExit(128 + number)
        self._status = 128 + number
        if number == signal.SIGINT:
            with suppress(RuntimeError):  # in the middle of another line
                rank_zero_print("\nEnding after this epoch; Ctrl-C again does not wait.")

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds so far, for the checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's seconds."""
        self._before = state_dict["seconds"]
