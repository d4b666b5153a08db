"""Fixtures of trainings: one thread, and CUDA graphs on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.training.fakes import FakeCuda, faked


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Graphs this small are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return faked(monkeypatch, False)
