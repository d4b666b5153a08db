"""The fixtures of the command."""

from tests.commands import command, passes, place

__all__ = ["command", "passes", "place"]
