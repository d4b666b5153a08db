"""The state of an installation: versions, devices, kernels, caches, data, and a check of a layer."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import platform
import time
from pathlib import Path

import torch
from torch import Tensor

from ..conv.gat import GATConv
from ..data.named.raw import data_root
from ..kernels.device import FILES, missing_reason
from ..runs.process import granted
from ..runs.result import versions

LIMIT = 1e-4  # of the largest difference between backends, in float32


def doctor() -> dict[str, str]:
    """Return the state of this installation, a few words for each subject: what `gat-pyg doctor` prints.

    The subjects are the versions, the devices, the kernels of each and a check of a layer on it, the cache of compiled
    kernels, and the folder of data. The check compares output and gradients of a layer with the reference; it takes two
    seconds, and more if kernels have to be compiled.

    Example:
        >>> doctor()["check on cpu"]
        '...differs from the reference by ...'
    """
    found = {name: version for name, version in versions().items() if version is not None}
    lines = {"versions": ", ".join(f"{name} {version}" for name, version in found.items())}
    threads = torch.get_num_threads()
    lines["devices"] = (
        f"{platform.machine()} CPU, {granted()} of {os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)}"
    )
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for device in devices[1:]:
        about = torch.cuda.get_device_properties(device)
        lines["devices"] += f"; {device} {about.name}, {about.total_memory / 2**30:.0f} GiB"
    for device in devices:
        kind = device.partition(":")[0]
        reason = missing_reason(kind)
        package = {"cpu": "numba", "gpu": "triton"}[FILES[kind]]
        lines[f"kernels on {device}"] = (
            f"by {package} {importlib.metadata.version(package)}" if reason is None else f"none, slower ways: {reason}"
        )
        lines[f"check on {device}"] = _check(device)
    lines["cache"] = _cache()
    root = data_root()
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    lines["data"] = (
        f"{root}: {', '.join(names) or 'empty' if root.is_dir() else 'not there yet'} (GAT_PYG_DATA names another)"
    )
    return lines


def _check(device: str) -> str:
    """Compare a layer's output and gradients with those of the reference."""
    start, draw = time.perf_counter(), torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(100, 16, generator=draw), torch.randint(100, (2, 400), generator=draw)
    layer = GATConv(16, 8, heads=8)
    values = []
    for backend in ("auto", "reference"):
        one = copy.deepcopy(layer).to(device)
        one.backend = backend
        leaf = x.to(device, copy=True).requires_grad_()
        out: Tensor = one(leaf, edge_index.to(device))
        out.square().sum().backward()
        values.append([out, leaf.grad, *(weight.grad for weight in one.parameters())])
    pairs = ((a, b) for a, b in zip(*values, strict=True) if a is not None and b is not None)
    worst = max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0)) for a, b in pairs)
    verdict = "right" if worst <= LIMIT else "WRONG, please report it"
    return (
        f"{verdict}: GATConv differs from the reference by {worst:.1e} (relative, {time.perf_counter() - start:.1f} s)"
    )


def _cache() -> str:
    """Describe the cache of compiled CPU kernels, after the check of a layer on the CPU."""
    if (reason := missing_reason("cpu")) is not None:
        return f"none: {reason}"
    from ..kernels.cpu.cache import _LISTENER  # imports Numba

    folders = [path for kernel in _LISTENER.kernels if (path := kernel.stats.cache_path) is not None]
    if not folders:
        return "none: every process compiles its kernels. Set NUMBA_CACHE_DIR to a folder that can be written"
    folder = Path(os.path.commonpath(folders))
    files = [*folder.rglob("*.nbc")]
    size = sum(file.stat().st_size for file in files) / 2**20
    state = "writable" if os.access(folder, os.W_OK) else "read only"
    return f"{folder}: {len(files)} kernels, {size:.1f} MiB, {state}"
