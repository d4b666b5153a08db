"""A monitor of ranks: it reports a dead rank and ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from .ranks import BEAT, Beats


class RankMonitor(Callback):
    """Detects a dead rank, reports it, and stops the others: see `gat_pyg.distributed.ranks`.

    It is active from the setup to the teardown of each training, validation and test, if there are several processes.
    After an error, `lost` holds the ranks that sent no heartbeat. Put it before callbacks that handle signals.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._beats: Beats | None = None
        self._started: list[subprocess.Popen[bytes]] = []  # by Lightning, in the first process of a machine

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the heartbeats, and watch the processes that Lightning started in its place.

        Lightning's own observer ends if its list of processes is empty. Otherwise it would kill this process before the
        lost rank is reported.
        """
        if trainer.world_size > 1:
            first, host = trainer.global_rank == 0, os.environ.get("MASTER_ADDR", "localhost")
            beats = Beats(host, 0, 0, trainer.world_size) if first else None
            port = trainer.strategy.broadcast(beats.port if beats else 0)
            self._beats = beats or Beats(host, port, trainer.global_rank, trainer.world_size)
            processes = getattr(trainer.strategy.launcher, "procs", [])
            self._started += processes
            processes.clear()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handler of SIGTERM until teardown: it calls a collective, which would hang."""
        if self._beats is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)

    on_train_start = on_test_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handler in a validation outside of a training too."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.on_test_start(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the heartbeats: all processes have finished."""
        if self._beats is not None:
            self._beats.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Set `lost` if a dead rank may be the cause of the error."""
        if self._beats is not None:
            if isinstance(exception, RuntimeError):  # the type of torch.distributed's errors
                time.sleep(4 * BEAT)
                self.lost = self._beats.lost(3 * BEAT)
            self._beats.stop()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        for process in self._started:
            process.send_signal(number)
        raise SystemExit(128 + number)
