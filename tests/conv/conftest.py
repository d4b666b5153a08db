"""Layers are tested on the segment backend; the kernels have their own tests in `tests/attention`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def segment_unless_marked(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("kernels"):
        request.getfixturevalue("nothing_compiled")
