"""A monitor of ranks: a dead rank is reported and the others are ended."""

from __future__ import annotations

import os
import threading
import time
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from .ranks import BEAT, Beats


class RankMonitor(Callback):
    """Detects a dead rank, reports it, and stops the others: see `gat_pyg.distributed.ranks`.

    Training, validation and test are each watched from their setup to their teardown. `lost` are the ranks that were
    silent as an error ended one of them. With one process it does nothing.
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

            # Lightning's own calls a collective inside the handler, and hangs unless all processes do so at one moment
            trainer._signal_connector._sigterm_notifier_fn = forward  # type: ignore[assignment]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the heartbeats: all processes have come to the end."""
        if self._beats is not None:
            self._beats.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Find the ranks that are lost, if that may be the cause."""
        if self._beats is not None:
            if isinstance(exception, RuntimeError):  # as those of torch.distributed are
                time.sleep(4 * BEAT)
                self.lost = self._beats.lost(3 * BEAT)
            self._beats.stop()
