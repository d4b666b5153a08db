"""Compilation of the kernels before they are needed, into the cache on disk."""

from __future__ import annotations

import copy
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..conv.base import AttentionConv
from ..conv.gat import GATConv
from ..conv.gatv2 import GATv2Conv
from ..conv.transformer import TransformerConv
from ..features.dropout import dropout
from ..kernels.device import FILES, missing_reason
from ..paper.authors import AuthorsConv
from ..trained.export import Prepared
from ..trained.trained import Trained

SIZES = ((8, 8), (4, 32))  # heads and channels of each
CONVS: tuple[Any, ...] = (GATConv, GATv2Conv, TransformerConv)
OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {"edge_dim": edge_dim, "dropout": p} for edge_dim in (None, 4) for p in (0.0, 0.5)
)
WIDTH = 4  # of features whose number a layer does not know yet
NODES = 8
EDGES = 1, 3300  # kernels differ for few and many edges a node, and for nodes with more than 1,024 edges
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


def warm_up(*models: nn.Module | str | Path, heads: int | None = None, channels: int | None = None) -> Warmed:
    """Compile the kernels that models need, forward and backward, so that their first calls need not compile them.

    A copy of each of our layers in a model is called on two small graphs, in training and for inference, on the model's
    device and in its dtype; under `torch.autocast`, in that dtype. The model, its hooks and gradients, and the state of
    torch's random number generators are not touched.

    Without arguments, these are the kernels of all three layers in the usual sizes, with and without edge features and
    dropout. A kernel is compiled for a class of sizes: the number of heads up to 8, rounded up to a power of two, and
    the channels of a head, rounded up to 8, 16, 32 or 64 (below 16, each number is its own class).

    Args:
        models: modules, or folders of trained runs, whose predictions are to be fast.
        heads: number of heads of layers of another size.
        channels: number of channels of each head.

    Raises:
        FileNotFoundError, ValueError: as `predict`; also if a module has none of our layers, or if one of heads and
            channels is missing or below 1.

    Cost: one to seven seconds for each kind of layer if its kernels are not on disk, some milliseconds if they are.

    Example:
        >>> from gat_pyg.models import GAT
        >>> warmed = warm_up(GAT(16, [8], 3, heads=[8, 1], backend="segment"))
        >>> warmed.compiled
        0
    """
    sizes: tuple[tuple[int, int], ...] = () if models else SIZES
    if heads is not None and channels is not None and min(heads, channels) > 0:
        sizes = ((heads, channels),)
    elif (heads, channels) != (None, None):
        raise ValueError(f"heads is {heads} and channels is {channels}, expected both, at least 1, or none.")
    layers = [layer for model in models if isinstance(model, nn.Module) for layer in _layers_of(model)]
    runs = [Path(model) for model in models if not isinstance(model, nn.Module)]
    start, (compiled, read, _) = time.perf_counter(), counts()
    present = [device for device in FILES if device == "cpu" or torch.cuda.is_available()]
    devices = [device for device in present if missing_reason(device) is None] if sizes or runs else []
    for layer in layers:
        _step(_copy_of(layer))
    for device in devices:
        for layer in _usual(sizes):
            _step(layer.to(device))
        for run in runs:
            _predict(run, device)
    types = [next(layer.parameters()).device.type for layer in layers]
    devices += [device for device in types if missing_reason(device) is None]
    all_compiled, all_read, folder = counts()
    return Warmed(time.perf_counter() - start, all_compiled - compiled, all_read - read, folder, (*sorted({*devices}),))


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


def _layers_of(model: nn.Module) -> list[Any]:
    layers = [layer for layer in model.modules() if isinstance(layer, (AttentionConv, AuthorsConv))]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer of gat_pyg, so it has no kernels. gat_pyg.accelerate(model) swaps "
            "PyG's attention layers for ours."
        )
    return layers


def _usual(sizes: tuple[tuple[int, int], ...]) -> Iterator[nn.Module]:
    for heads, channels in sizes:
        for conv in CONVS:
            for options in OPTIONS:
                yield conv(WIDTH, channels, heads=heads, **options)


def _copy_of(layer: nn.Module) -> nn.Module:
    """Return a copy without the layer's hooks, which may have effects and refer to objects that cannot be copied."""
    result = copy.copy(layer)
    vars(result).update({name: type(hooks)() for name, hooks in vars(layer).items() if name.endswith("_hooks")})
    return copy.deepcopy(result)


def _step(layer: Any) -> None:
    """Compute gradients and predictions on each kind of graph that has kernels of its own."""
    like = next(layer.parameters())
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        for num_edges in EDGES:
            inputs = _inputs(layer, num_edges, like)
            layer.train()
            with torch.enable_grad():
                layer(*inputs).sum().backward()
            layer.eval()
            with torch.no_grad():
                layer(*inputs)


def _inputs(layer: Any, num_edges: int, like: Tensor) -> tuple[Any, ...]:
    """Return x, edge_index and edge_attr; the first third of the edges has one src, the last third has one dst."""

    def features(rows: int, width: int) -> Tensor:
        return torch.randn(rows, WIDTH if width < 0 else width, device=like.device, dtype=like.dtype)

    ends = layer.in_channels if isinstance(layer.in_channels, (tuple, list)) else (layer.in_channels,)
    x = tuple(dropout(features(NODES, width).requires_grad_(), 0.5) for width in ends)
    edge_index = torch.randint(NODES, (2, num_edges), device=like.device)
    edge_index[0, : num_edges // 3] = 0
    edge_index[1, -num_edges // 3 :] = 0
    edge_dim = getattr(layer, "edge_dim", None)
    edge_attr = None if edge_dim is None else features(num_edges, edge_dim)
    return x if len(x) > 1 else x[0], edge_index, edge_attr


@torch.no_grad()
def _predict(run: Path, device: str) -> None:
    """Predict for a random graph."""
    network = Prepared(Trained.open(run).predictor).to(device)
    for num_edges in EDGES:
        inputs = network.example(NODES, num_edges, 2, 5, torch.Generator().manual_seed(0))
        network(**{key: value.to(device) for key, value in inputs.items()})
