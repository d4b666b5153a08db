"""Handling of SIGINT and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Context manager: a signal interrupts the block and is raised again at its end.

    A compiler's callbacks may swallow the exception of the first.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    try:
        with handled(interrupt):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager: install a handler of SIGINT and SIGTERM, unless they are ignored; only in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def keep_working(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker process of a loader, unless its parent sends them.

    A signal to all processes of a job ends the parent after its epoch, which needs the batches of the workers.
    """
    if hasattr(signal, "sigwaitinfo"):  # Linux: elsewhere the sender is unknown
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_by_parent, daemon=True).start()


def _end_by_parent() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)
