"""The folder of the settings, from which every test composes."""

from tests.settings.compositions import folder

__all__ = ["folder"]
