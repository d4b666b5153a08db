"""A monitor of ranks: it reports a dead rank and ends the others."""

from __future__ import annotations

import os
import threading
import time
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from .ranks import BEAT, Beats


class RankMonitor(Callback):
    """Detects a dead rank, reports it, and stops the others: see `gat_pyg.distributed.ranks`.

    It is active from the setup to the teardown of each training, validation and test, if there are several processes.
    After an error, `lost` holds the ranks that sent no heartbeat.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._beats: Beats | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the heartbeats."""
        if trainer.world_size > 1:
            first, host = trainer.global_rank == 0, os.environ.get("MASTER_ADDR", "localhost")
            beats = Beats(host, 0, 0, trainer.world_size) if first else None
            port = trainer.strategy.broadcast(beats.port if beats else 0)
            for thread in threading.enumerate():  # Lightning's own kills the first process before it can report
                if thread.name == "child-process-observer":
                    thread._run = lambda: True  # type: ignore[attr-defined]
            self._beats = beats or Beats(host, port, trainer.global_rank, trainer.world_size)
            launcher = trainer.strategy.launcher

            def forward(number: int, frame: FrameType | None) -> None:
                if launcher is not None:
                    launcher.kill(number)

            # Lightning's own calls a collective in the handler, and hangs unless all processes do so at the same time
            trainer._signal_connector._sigterm_notifier_fn = forward  # type: ignore[assignment]

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
