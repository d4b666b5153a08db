"""Coverage and size of 90 % prediction sets and intervals, and calibration error before and after the temperature.

    python benchmarks/uncertainty.py                   # Cora, Photo and molesol, 20 random splits, three seeds each
    python benchmarks/uncertainty.py --cases "molesol, scaffold" --draws 2 --seeds 2

The command trains each case, and writes the numbers into `calibration.json` of each split. Beside the random splits are
four of one split: Cora's public one; Cora with validation nodes next to the training nodes and test nodes farther away;
molesol with other scaffolds, and with longer molecules in the test. Data are in $GAT_PYG_DATA.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Planetoid

import machine

DATA = Path(os.environ.get("GAT_PYG_DATA", "data"))
DRAWN = ("split.split=all", "split.draws={draws}")
MOLESOL = (
    "dataset=smiles",
    "dataset.path={folder}/molesol.csv",
    "dataset.target=logS",
    "training.max_epochs=15",
    "training.batch_size=64",
)
CASES: dict[str, tuple[str, ...]] = {
    "Cora, random": ("dataset=file", "dataset.path={folder}/cora.npz", *DRAWN, "training.max_epochs=100"),
    "Photo, random": (
        "dataset=file",
        "dataset.path={folder}/photo.npz",
        *DRAWN,
        "training.max_epochs=20",
        "model.num_layers=2",
        "model.hidden_channels=8",
    ),
    "molesol, random": (*MOLESOL, *DRAWN),
    "Cora, public": ("dataset=cora",),
    "Cora, near": ("dataset=file", "dataset.path={folder}/near.npz", "training.max_epochs=100"),
    "molesol, scaffold": (*MOLESOL, "split.scaffold=true"),
    "molesol, length": (*MOLESOL, "split.time=length"),
}
LEVEL = 90


def graph(data: Data, masks: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None) -> dict[str, Any]:
    """A graph with masks of the nodes in place of its own."""
    arrays = {"x": data.x / data.x.sum(1, keepdim=True).clamp(min=1), "edge_index": data.edge_index, "y": data.y}
    arrays |= {} if masks is None else masks(data.edge_index, data.y)
    return {key: value.numpy() for key, value in arrays.items()}


def near_and_far(edge_index: Tensor, y: Tensor) -> dict[str, Tensor]:
    """20 training nodes of each class; 500 of their neighbours for validation, 1000 other nodes for the test."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train = torch.zeros(len(y), dtype=torch.bool)
    train[torch.cat([order[y[order] == label][:20] for label in range(int(y.max()) + 1)])] = True
    src, dst = edge_index
    near = torch.zeros_like(train).index_fill(0, dst[train[src]], True) & ~train
    val, test = torch.zeros_like(train), torch.zeros_like(train)
    val[order[near[order]][:500]] = True
    test[order[~near[order] & ~train[order]][:1000]] = True
    return {"train_mask": train, "val_mask": val, "test_mask": test}


def write_data(folder: Path) -> None:
    cora = Planetoid(DATA / "Planetoid", "Cora")[0]
    np.savez(folder / "cora.npz", **graph(cora))
    np.savez(folder / "near.npz", **graph(cora, near_and_far))
    np.savez(folder / "photo.npz", **graph(Amazon(DATA / "Amazon", "Photo")[0]))
    packed = gzip.decompress((DATA / "ogb" / "ogbg_molesol" / "mapping" / "mol.csv.gz").read_bytes()).decode()
    _, *lines = packed.splitlines()
    rows = [f"{logs},{smiles},{len(smiles.strip())}" for logs, smiles, _ in (line.split(",", 2) for line in lines)]
    (folder / "molesol.csv").write_text("\n".join(["logS,smiles,length", *rows]) + "\n")


def trained(name: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the calibration of each split of a case."""
    outputs = folder / name.replace(", ", "-")
    settings = [text.format(folder=folder, draws=options.draws) for text in CASES[name]]
    settings += [f"runs={options.seeds}", f"outputs={outputs}"]
    command = [sys.executable, "-m", "gat_pyg.run", *settings, "baselines=false", f"data_root={DATA}"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {ran.returncode}: {ran.stdout[-2000:]}")
    for path in sorted(outputs.rglob("calibration.json")):
        values = json.loads(path.read_text())
        scores = [json.loads(each.read_text())["value"] for each in path.parent.glob("seed-*/result.json")]
        yield {
            "score": statistics.fmean(scores),
            "rows": values["rows"],
            "temperature": values["temperature"],
            "errors": values["errors"],
            "coverage": values["coverage"][LEVEL - 1][0],
            "size": values["sizes"][LEVEL - 1] if values["sizes"] else values["quantiles"][LEVEL - 1][0],
            "caveat": values["caveat"],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in $OUT or results")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    path = options.out or machine.results("uncertainty", device)
    used = {name: value for name, value in vars(options).items() if name not in ("out", "cases")}
    record: dict[str, Any] = {**machine.about(device), "options": used, "rows": {}}
    if path.is_file():  # cases of an earlier call with the same options
        earlier = json.loads(path.read_text())
        record["rows"] = earlier["rows"] if earlier["options"] == used else {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in options.cases:
            record["rows"][name] = [*trained(name, Path(folder), options)]
            machine.write(path, record)
    for name, splits in record["rows"].items():
        before, after = zip(*(one["errors"] or (math.nan, math.nan) for one in splits), strict=True)
        values = {key: [one[key] for one in splits] for key in ("score", "coverage", "size")}
        values |= {"calibration error": before, "with temperature": after}
        texts = ", ".join(f"{key} {statistics.fmean(its):.2f}" for key, its in values.items())
        print(f"{name}, {len(splits)} splits: {texts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
