"""Ranks: printing on the first one, a store that all share, and heartbeats that end a wait for a dead rank."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..terminal import print_message

BEAT = 0.5  # seconds between two heartbeats
SILENT = 40.0  # seconds without a heartbeat, after which a process counts as lost


def is_first() -> bool:
    """Return True on the first rank, or in a single process."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def rank_zero_print(text: str) -> None:
    """Print to stderr on the first rank only."""
    if is_first():
        print_message(text)


@functools.cache
def print_once(text: str) -> None:
    """Print as `rank_zero_print`, but the same text only once in a process, which may train on its data many times."""
    rank_zero_print(text)


def shared_store() -> Store | None:
    """Return a store shared by the processes that torchrun or SLURM started, or None if there are no such processes."""
    launchers = (TorchElasticEnvironment, SLURMEnvironment)
    cluster = next((launcher() for launcher in launchers if launcher.detect()), None)
    if cluster is None or cluster.world_size() == 1:
        return None
    is_host = cluster.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port, world = cluster.main_address, cluster.main_port, cluster.world_size()
    store = TCPStore(address, port, world, is_host, timedelta(seconds=60), False, multi_tenant=True)
    return PrefixStore(f"gat_pyg/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Beats:
    """Heartbeats: threads that report this process as alive, and end it if another one has been silent for too long.

    When a process is killed, the others get a network error that does not name it, or wait for ever, as in NCCL's
    kernels or after a power failure. The heartbeats go through a store in the first process, so if that one ends, all
    others appear silent.

    Args:
        host, port: the address of the first process's store; with port 0 it uses a free port, see `port`.
        rank, world: the rank of this process, and the number of processes.
        silent: the seconds without a heartbeat after which a process counts as lost.
        end: ends this process after the message about a lost one.
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
        for work in (self._beat, self._watch):  # two threads, since the store may block the first
            threading.Thread(target=work, name="heartbeats", daemon=True).start()

    def lost(self, within: float) -> list[int]:
        """Return the ranks without a heartbeat in the last `within` seconds."""
        now = time.monotonic()
        silent = [rank for rank, (_, when) in self._heard.items() if now - when > within and rank != self.rank]
        return [0] if 0 in silent else silent  # without the store in rank 0, all appear silent

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
            except RuntimeError:  # rank 0 or the network is down, which `_watch` will notice
                continue

    def _watch(self) -> None:
        while not self._done.wait(BEAT):
            if lost := self.lost(self.silent):
                print_message(missing(lost, self.world))
                self.stop()
                self.end(1)


def missing(lost: list[int], world: int) -> str:
    """Return the message about lost ranks."""
    which = f"Rank {lost[0]}" if len(lost) == 1 else f"Ranks {', '.join(map(str, lost))}"
    return (
        f"{which} of {world} ended or cannot be reached, so the others stop. Its own output may show why. The same "
        "command with ckpt_path=last continues from the last checkpoint."
    )
