"""What every test shares."""

from __future__ import annotations

from importlib import import_module

import pytest


def _found(package: str) -> str:
    try:
        return f"{package} {import_module(package).__version__}"
    except ImportError:
        return f"{package} missing"
    except OSError:
        return f"{package} unusable (built for another torch)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which of the two optional libraries the tests ran with."""
    terminalreporter.write_line(", ".join(_found(package) for package in ("torch_scatter", "torch_sparse")))
