"""Ranks: printing on the first one, and heartbeats, so that a wait for a dead rank ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT = 0.5  # seconds between two
SILENT = 40.0  # seconds after which a process counts as lost


def is_first() -> bool:
    """Return True on the first rank, or in a single process."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def rank_zero_print(text: str) -> None:
    """Print to stderr on the first rank alone."""
    if is_first():
        print(text, file=sys.stderr)


class Beats:
    """Heartbeats: threads that report this process as alive, and end it if another has been silent for long.

    A process that is killed leaves the others with an error of the network that does not name it, or waiting for ever:
    NCCL's kernels, a machine without power. The beats go through a store of the first process, so that its end is seen
    as the silence of all.

    Args:
        host, port: where the first process listens; for 0 it takes any free port, `port`.
        rank, world: which process this is, and of how many.
        silent: the seconds after which a process counts as lost.
        end: what ends this one then, after a message.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world: int,
        silent: float = SILENT,
        end: Callable[[int], object] = os._exit,  # the first thread may wait in a kernel, where no exception comes
    ) -> None:
        self.rank, self.world, self.silent, self.end = rank, world, silent, end
        self._store = TCPStore(host, port, world, rank == 0, wait_for_workers=False)
        self.port: int = self._store.port
        self._heard = dict.fromkeys(range(world), (0, time.monotonic()))  # the last beat of each, and when
        self._done = threading.Event()
        for work in (self._beat, self._look):  # the one may wait for a store that does not answer
            threading.Thread(target=work, name="heartbeats", daemon=True).start()

    def lost(self, within: float) -> list[int]:
        """Return the ranks that have been silent for so many seconds."""
        now = time.monotonic()
        silent = [rank for rank, (_, when) in self._heard.items() if now - when > within and rank != self.rank]
        return [0] if 0 in silent else silent  # without the first nothing is heard of any

    def stop(self) -> None:
        """Stop the threads."""
        self._done.set()

    def _beat(self) -> None:
        while not self._done.wait(BEAT):
            try:
                self._store.add(str(self.rank), 1)
                for rank, (before, _) in self._heard.items():
                    beats = self._store.add(str(rank), 0)
                    if beats != before:
                        self._heard[rank] = beats, time.monotonic()
            except RuntimeError:  # the first has ended, or the network: it will be missed
                continue

    def _look(self) -> None:
        while not self._done.wait(BEAT):
            if lost := self.lost(self.silent):
                print(f"\n{missing(lost, self.world)}", file=sys.stderr, flush=True)
                self.stop()
                self.end(1)


def missing(lost: list[int], world: int) -> str:
    """Return the message about ranks that are lost."""
    which = f"Rank {lost[0]}" if len(lost) == 1 else f"Ranks {', '.join(map(str, lost))}"
    return (
        f"{which} of {world} ended or cannot be reached, so the others stop. Its own last words may say why; the same "
        "command with ckpt_path=last goes on from the last checkpoint."
    )
