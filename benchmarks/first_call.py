"""Seconds of the first call of a layer: kernels compiled, read from the disk, read by another user (Linux, as root).

Every row is a process of its own, of one thread, with an empty or a filled folder of compiled kernels; importing the
libraries is not counted. "image" is a folder that root has filled by calls of the layer and that another user may
only read, as in the container of an image; "two containers" begin at once on one empty folder that both may write to.

    python benchmarks/first_call.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import gat_pyg
import machine
from gat_pyg.settings.conf import config_folder

LAYERS = ("GATConv", "GATv2Conv", "TransformerConv")
USER = 2000  # any other than root
CALL = """
import json, sys, time
import torch
import gat_pyg
from gat_pyg.attention.additive import cpu as additive
from gat_pyg.attention.pair import cpu as pair
from gat_pyg.features import cpu as features
from gat_pyg.kernels.cpu.cache import _LISTENER

torch.set_num_threads(1)
layer = getattr(gat_pyg, sys.argv[1])(64, 32, heads=8, dropout=0.5)
x, edge_index = torch.randn(1000, 64), torch.randint(1000, (2, 5000))
if sys.argv[2:] == ["warm"]:
    layer(x, edge_index).sum().backward()
stats = [kernel.stats for kernel in _LISTENER.kernels]
start = time.perf_counter()
out = layer(x, edge_index)
forward = time.perf_counter() - start
out.sum().backward()
both = time.perf_counter() - start
out = layer(x, edge_index)
out.sum().backward()
compiled = sum(sum(each.cache_misses.values()) for each in stats)
read = sum(sum(each.cache_hits.values()) for each in stats)
print(json.dumps({"forward": forward, "backward": both - forward, "compiled": compiled, "read": read}))
"""


def start(layer: str, folder: Path, *arguments: str, user: int | None = None) -> subprocess.Popen[str]:
    """Begin a process that calls a layer; `collect` has its figures."""
    paths = {"PYTHONPATH": folder.parent / "code", "NUMBA_CACHE_DIR": folder, "HOME": folder / "home"}
    environment = {**os.environ, **{name: str(path) for name, path in paths.items()}, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CALL, layer, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, user=user, cwd="/"
    )


def collect(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors)
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    warnings = [
        re.sub(r"/\S*/(image|shared|cold)\S*", r"\1", line) for line in errors.splitlines() if "kernels" in line
    ]
    return {**figures, "warnings": warnings}


def rows_of(layer: str) -> dict[str, dict[str, Any]]:
    """Return the figures of each situation."""
    rows = {}
    with tempfile.TemporaryDirectory(prefix="first") as name:
        folder = Path(name)
        folder.chmod(0o755)
        package = Path(str(gat_pyg.__file__)).parent
        copied = folder / "code" / "gat_pyg"
        shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(config_folder(), copied / "conf", dirs_exist_ok=True)
        cold = folder / "cold"
        rows["cold"] = collect(start(layer, cold))
        rows["warm"] = collect(start(layer, cold))
        image = folder / "image"
        rows["image, built by root"] = collect(start(layer, image, "warm"))
        rows["image, another user"] = collect(start(layer, image, user=USER))
        image.chmod(0o700)
        rows["image that root alone may read"] = collect(start(layer, image, user=USER))
        shared = folder / "shared"
        pair = [start(layer, shared) for _ in range(2)]
        rows |= {f"two containers, {which}": collect(each) for which, each in zip(("one", "other"), pair, strict=True)}
        rows["a third container"] = collect(start(layer, shared))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    device = torch.device("cpu")
    record: dict[str, Any] = {**machine.about(device), "rows": []}
    for layer in LAYERS:
        for situation, figures in rows_of(layer).items():
            record["rows"].append({"layer": layer, "situation": situation, **figures})
            machine.write(machine.results("first-call", device), record)
            seconds = f"{figures['forward']:6.2f} s forward {figures['backward']:6.2f} s backward"
            kernels = f"{figures['compiled']:4} compiled{figures['read']:4} read"
            print(f"{layer:16}{situation:32}{seconds}{kernels}", *figures["warnings"], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
