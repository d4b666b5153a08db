"""Seconds and peak memory of predictions for a graph of ogbn-arxiv's size, as the command makes them.

    python benchmarks/predictions.py             # 169,343 nodes, 2.3 million edges in both directions, 128 features
    python benchmarks/predictions.py --nodes 20000 --width 64

The graph is random, in a folder of .npy files, which are mapped into memory; the network has random weights. Each row
is a process of its own. The peak is that of the resident memory beyond the imports, with the features that were read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from gat_pyg import GAT, predict
from gat_pyg.runs.model_file import save_model
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.preparation import Preparation

F, K, DEGREE = 128, 40, 6.9  # features, classes, undirected edges of a node


def written(folder: Path, N: int) -> Path:
    draw = np.random.default_rng(0)
    ends = draw.integers(N, size=(2, int(DEGREE * N)))
    (folder / "graph").mkdir()
    np.save(folder / "graph" / "x.npy", draw.normal(size=(N, F)).astype("float32"))
    np.save(folder / "graph" / "edge_index.npy", np.concatenate([ends, ends[::-1]], 1))
    return folder / "graph"


def run(folder: Path, width: int, seeds: int) -> Path:
    arguments = {"in_channels": F, "hidden_channels": [width // 4] * 2, "out_channels": K, "heads": [4, 4, 1]}
    arguments |= {"norm": "batch", "residual": True}
    preparation = Preparation(F, None, source={"_target_": "gat_pyg.data.from_file", "path": str(folder / "graph")})
    about = {"objective": NodeLabels(K).to_dict(), "preparation": preparation.to_dict()}
    for seed in range(seeds):
        torch.manual_seed(seed)
        path = folder / f"run-{width}-{seeds}" / f"seed-{seed}" / "model.safetensors"
        save_model(path, GAT(**arguments), "gat_pyg.models.GAT", arguments, **about)
    return folder / f"run-{width}-{seeds}"


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measured(folder: Path, graph: Path, results: Any) -> None:
    before = resident()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    frame = predict(folder, graph, folder / "predictions.csv")
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    results.put((len(frame), seconds, peak - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=169_343)
    parser.add_argument("--width", type=int, nargs="*", default=[32, 64, 128, 256])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print(f"torch {torch.__version__}, pandas {pd.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)
    print("| width | seeds | rows | seconds | features MiB | peak MiB beside them |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph, features = written(folder, options.nodes), options.nodes * F * 4 / 2**20
        for width in options.width:
            results: Any = spawn.SimpleQueue()
            child = spawn.Process(target=measured, args=(run(folder, width, options.seeds), graph, results))
            child.start()
            rows, seconds, peak = results.get()
            child.join()
            print(
                f"| {width} | {options.seeds} | {rows:,} | {seconds:.1f} | {features:.0f} | {peak - features:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
