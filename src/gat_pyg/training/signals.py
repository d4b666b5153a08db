"""Signals during a training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def _interruptible() -> Iterator[None]:
    """Interrupt what is within it, and at its end once more: a compiler's callbacks may lose what is raised in them."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    try:
        with handled(interrupt):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` have SIGINT and SIGTERM, but for what is ignored; a thread other than the first cannot."""
    first = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if first}
    before = {number: own for number, own in before.items() if own not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
