"""The terminal: its width, its colours, the characters that it lacks, and messages over the line of progress."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

CLEAR = "\r\x1b[K"  # clears the row of the cursor
BOLD, RED = "1", "31"


def print_any_text() -> None:
    """Let stdout replace characters that its encoding lacks, as ± in ASCII, instead of ending a finished run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def columns(stream: TextIO | None = None) -> int:
    """Return the width of the terminal of a stream, by default stdout, or 80 without one."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def message(text: str) -> str:
    """Return a message for stderr, which on a terminal replaces the line of progress."""
    return f"{CLEAR}{text}" if sys.stderr.isatty() else text


def print_message(text: str) -> None:
    """Print a message to stderr, on a terminal in place of the line of progress."""
    print(message(text), file=sys.stderr, flush=True)


def styled(text: str, style: str) -> str:
    """Return text in a style for stdout, unless that is not a terminal or the user set NO_COLOR.

    >>> styled("83.1 %", BOLD)
    '83.1 %'
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"
