"""The fixtures of all tests. They import the libraries, so only the processes that run tests import this file."""

from __future__ import annotations

import gc
import os
import time
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import gat_pyg.conv.gat
import gat_pyg.conv.gatv2
import gat_pyg.data.named.generated
import gat_pyg.kernels.device
from gat_pyg.philox import draw_seed, keep_mask
from tests.composition import compose_once
from tests.processes import WITHOUT_KERNELS, fork_server

try:
    from numba.core.event import Event, Listener, register

except ImportError:  # as on a machine for the CUDA kernels
    Listener, register = object, lambda kind, listener: None


def pytest_configure(config: pytest.Config) -> None:
    """Divide the cores among the processes of pytest-xdist, and make the composition of settings fast."""
    if hasattr(config, "workerinput"):
        fork_server()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    compose_once()
    find_neighbours_once()


def find_neighbours_once() -> None:
    """Cache the graphs of digits: the search for neighbours takes a fifth of the time of a command of two epochs."""
    nearest, graphs = gat_pyg.data.named.generated._nearest, {}

    def remembered(x: Tensor, k: int) -> Tensor:
        key = x.numpy().tobytes(), k
        if key not in graphs:
            graphs[key] = nearest(x, k)
        return graphs[key].clone()

    gat_pyg.data.named.generated._nearest = remembered


def pytest_collection_finish() -> None:
    """Freeze the objects that stay: the garbage collector would scan them again and again while kernels compile."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Freeze the objects that a file leaves, such as kernels: each gc.collect() of later tests would take seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands try no settings by validation, which would train several times; `test_candidates` does."""
    monkeypatch.setattr("gat_pyg.sweeps.candidates.NODES", 0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors and layers are float64 by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's layers, and our way through its messages, drop the coefficients that the operation does."""

    def dropout(alpha: Tensor, p: float, training: bool) -> Tensor:
        drops = training and p > 0.0
        return alpha * keep_mask(draw_seed(alpha.device), *alpha.shape, p, alpha.dtype) if drops else alpha

    for module in (pyg.conv.gat_conv, pyg.conv.gatv2_conv, gat_pyg.conv.gat, gat_pyg.conv.gatv2):
        monkeypatch.setattr(module, "F", SimpleNamespace(**{**vars(F), "dropout": dropout}))


COMPILING = {"attention", "features", "fuzz", "kernels"}  # folders whose tests and docstrings are about the kernels


class Compilations(Listener):
    """The package's CPU kernels that this process compiled, each with its types and the seconds it took."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float]] = []
        self.starts: list[float] = []

    def on_start(self, started: Event) -> None:
        self.starts.append(time.perf_counter())

    def on_end(self, ended: Event) -> None:
        seconds = time.perf_counter() - self.starts.pop()
        kernel = ended.data["dispatcher"].py_func
        if not self.starts and kernel.__module__.startswith("gat_pyg."):  # else a step, which is compiled within one
            types = zlib.crc32(str(ended.data["args"]).encode())
            self.kernels.append((f"{kernel.__module__}.{kernel.__name__} {types:08x}", seconds))


COMPILATIONS = Compilations()
register("numba:compile", COMPILATIONS)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make backend="auto" select segment, for tests of many networks, each of which would compile kernels.

    It also does in the processes that `processes.python` starts.
    """
    reason = "what is tested is not the kernels"
    monkeypatch.setitem(gat_pyg.kernels.device.REASONS, "cpu", reason)
    monkeypatch.setenv(WITHOUT_KERNELS, reason)


@pytest.fixture(autouse=True)
def kernels_where_they_matter(request: pytest.FixtureRequest) -> None:
    """Use kernels only in the folders `COMPILING` and in tests with the mark `kernels`."""
    if request.path.parent.name not in COMPILING and not request.node.get_closest_marker("kernels"):
        request.getfixturevalue("nothing_compiled")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add the kernels that a test compiles to its report."""
    try:
        return (yield)
    finally:
        item.user_properties.extend(("kernel", kernel) for kernel in COMPILATIONS.kernels)
        COMPILATIONS.kernels.clear()
