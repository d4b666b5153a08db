"""Compilation of the kernels before they are needed, into the cache on disk."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..conv.gat import GATConv
from ..conv.gatv2 import GATv2Conv
from ..conv.transformer import TransformerConv
from ..features.dropout import dropout
from ..kernels.device import missing_reason
from .export import Prepared
from .predictions import predictor_of

SIZES = ((8, 8), (4, 32))  # heads and channels of each
CONVS: tuple[Any, ...] = (GATConv, GATv2Conv, TransformerConv)
EDGE_DIMS = (None, 4)
NODES, EDGES = 20, 60
KERNELS = ("graph", "kernels.cpu.rows", "attention.additive", "attention.pair", "features")  # files with CPU kernels


class Warmed(NamedTuple):
    """The kernels that a process has compiled and read from the disk."""

    seconds: float
    compiled: int  # kernels, one for each kind of arguments
    read: int
    folder: Path | None  # around all folders of the cache; None if no folder can be written to or read from
    devices: tuple[str, ...]

    def __str__(self) -> str:
        where = f"in {self.folder}" if self.folder is not None else "kept nowhere: set NUMBA_CACHE_DIR to a folder"
        kinds = f"{self.compiled} kernels compiled, {self.read} were compiled before, {where}"
        return f"{kinds}\n{self.seconds:.1f} s on {' and '.join(self.devices) or 'no device with kernels'}"


def warm(*runs: str | Path, heads: int | None = None, channels: int | None = None) -> Warmed:
    """Compile the kernels of the layers, forward and backward, so that first calls take no seconds for it.

    Without arguments, these are the kernels of all three layers in the usual sizes, with and without edge features. A
    kernel is compiled for a class of sizes: the number of heads up to 8, rounded up to a power of two, and the channels
    of a head, rounded up to 8, 16, 32 or 64 (below 16, each number is its own class).

    Args:
        runs: folders of trained runs, whose predictions are to be fast, in place of the usual sizes.
        heads: number of heads of layers of another size.
        channels: number of channels of each head.

    Raises:
        FileNotFoundError, ValueError: as `predict`, or if one of heads and channels is missing or below 1.
    """
    sizes: tuple[tuple[int, int], ...] = () if runs else SIZES
    if heads is not None and channels is not None and min(heads, channels) > 0:
        sizes = ((heads, channels),)
    elif (heads, channels) != (None, None):
        raise ValueError(f"heads is {heads} and channels is {channels}, expected both, at least 1, or none.")
    start, (compiled, read, _) = time.perf_counter(), counts()
    devices = [device for device in ("cpu", "cuda") if device == "cpu" or torch.cuda.is_available()]
    devices = [device for device in devices if missing_reason(device) is None]
    for device in devices:
        for H, C in sizes:
            for layer in _layers(H, C):
                _step(layer, device)
        for run in runs:
            _predict(Path(run), device)
    all_compiled, all_read, folder = counts()
    return Warmed(time.perf_counter() - start, all_compiled - compiled, all_read - read, folder, (*devices,))


def counts() -> tuple[int, int, Path | None]:
    """Return the CPU kernels that this process has compiled and has read, and the folder around their caches."""
    if missing_reason("cpu") is not None:
        return 0, 0, None
    cache = importlib.import_module("gat_pyg.kernels.cpu.cache")
    for name in KERNELS:
        importlib.import_module(f"gat_pyg.{name}" if "cpu" in name else f"gat_pyg.{name}.cpu")
    stats = [kernel.stats for kernel in cache._LISTENER.kernels]
    folders = [each.cache_path for each in stats if each.cache_path is not None]
    compiled = sum(sum(each.cache_misses.values()) for each in stats)
    read = sum(sum(each.cache_hits.values()) for each in stats)
    return compiled, read, Path(os.path.commonpath(folders)) if folders else None


def _layers(H: int, C: int) -> Iterator[nn.Module]:
    for conv in CONVS:
        for edge_dim in EDGE_DIMS:
            yield conv(16, C, heads=H, edge_dim=edge_dim, dropout=0.5)


def _step(layer: Any, device: str) -> None:
    """Compute predictions and gradients, with and without dropout."""
    layer = layer.to(device)
    x = torch.randn(NODES, 16, device=device, requires_grad=True)
    edge_index = torch.randint(NODES, (2, EDGES), device=device)
    edge_attr = None if layer.edge_dim is None else torch.randn(EDGES, layer.edge_dim, device=device)
    for training in (True, False):
        layer.train(training)(dropout(x, 0.5, training), edge_index, edge_attr).sum().backward()
    with torch.no_grad():
        layer(x, edge_index, edge_attr)


@torch.no_grad()
def _predict(run: Path, device: str) -> None:
    """Predict for a random graph."""
    network = Prepared(predictor_of(run)).to(device)
    inputs = network.example(NODES, EDGES, 2, 5, torch.Generator().manual_seed(0))
    network(**{key: value.to(device) for key, value in inputs.items()})
