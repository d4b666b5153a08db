"""CPU-seconds of an epoch of PyG's own examples, as they are and with one line added, `gat_pyg.accelerate(model)`.

    git clone --depth 1 https://github.com/pyg-team/pytorch_geometric
    python benchmarks/accelerate.py --examples pytorch_geometric/examples --data FOLDER

FOLDER has what the examples download: `Planetoid`, `PPI` and `ogb/ogbg_molesol`, whose molecules are those of ESOL. The
examples run from their source: all up to the loop over epochs, then its body, epoch by epoch, both models in turn in
one process of one thread. Before, both models must give the same outputs in float64. `graph_gps` has no layer to swap,
so it runs a second time with GATv2Conv in place of its GINEConv; its molecules are generated, in the sizes of ZINC,
1,000 instead of 10,000.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import csv
import gzip
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch_geometric.datasets
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv

import gat_pyg
import machine

GATV2 = {"GINEConv(nn)": "GATv2Conv(channels, channels // 4, heads=4, edge_dim=channels)"}
CASES = {  # example, what is replaced in it, epochs
    "gat": ("gat", {}, 20),
    "ppi": ("ppi", {}, 2),
    "attentive_fp": ("attentive_fp", {}, 4),
    "graph_gps": ("graph_gps", {}, 3),
    "graph_gps, GATv2Conv": ("graph_gps", GATV2, 3),
}
FORWARD = {
    "gat": "model(data.x, data.edge_index)",
    "ppi": "model(data.x, data.edge_index)",
    "attentive_fp": "model(data.x, data.edge_index, data.edge_attr, data.batch)",
    "graph_gps": "model(data.x, data.pe, data.edge_index, data.edge_attr, data.batch)",
}


class Molecules(list[Data]):
    """Generated graphs in the sizes of ZINC: rings and chains of 23 atoms with 25 bonds on average."""

    def __init__(self, root: str, subset: bool, split: str, pre_transform: T.BaseTransform) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(1000 if split == "train" else 100):
            n = int(torch.randint(15, 32, (), generator=generator))
            atoms = torch.arange(n)
            more = torch.randint(n, (2, 3), generator=generator)
            bonds = torch.cat([torch.stack([atoms[:-1], atoms[1:]]), more], 1)
            kinds = torch.randint(1, 4, (bonds.size(1),), generator=generator)
            data = Data(
                x=torch.randint(28, (n, 1), generator=generator),
                edge_index=torch.cat([bonds, bonds.flip(0)], 1),
                edge_attr=kinds.repeat(2),
                y=torch.randn(1, generator=generator),
            )
            self.append(pre_transform(data))


class Example:
    """An example of PyG up to its loop over epochs, and the body of the loop."""

    def __init__(self, path: Path, replaced: dict[str, str], data: Path, swap: bool) -> None:
        source = path.read_text(encoding="utf-8")
        for old, new in replaced.items():
            assert old in source, f"{path} has no {old!r}"
            source = source.replace(old, new)
        body = ast.parse(source).body
        loop = next(at for at, part in enumerate(body) if isinstance(part, ast.For))
        model = next(at for at, part in enumerate(body) if ast.unparse(part).startswith("model = "))
        # the examples read ../data, beside their folder
        self.names: dict[str, Any] = {"__name__": "__main__", "__file__": str(data.parent / "examples" / path.name)}
        self.names["GATv2Conv"] = GATv2Conv
        torch.manual_seed(0)
        with patch.object(sys, "argv", [path.name]), patch.object(torch_geometric.datasets, "ZINC", Molecules):
            self._run(body[: model + 1])
            self.result = gat_pyg.accelerate(self.names["model"]) if swap else None
            self._run(body[model + 1 : loop])
        self.epoch = body[loop].body  # type: ignore[attr-defined]
        self.seconds: list[float] = []

    def _run(self, body: list[ast.stmt]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(ast.Module(body, []), self.names["__file__"], "exec"), self.names)

    def run_epoch(self, epoch: int) -> None:
        self.names["epoch"] = epoch
        start = time.process_time()
        self._run(self.epoch)
        self.seconds.append(time.process_time() - start)

    def output(self, forward: str) -> torch.Tensor:
        """The model's output in float64."""
        data = next(iter(self.names["val_loader"])) if "val_loader" in self.names else self.names["data"]
        names = {
            "model": copy.deepcopy(self.names["model"]).double().eval(),
            "data": data.clone().apply(lambda value: value.double() if value.is_floating_point() else value),
        }
        with torch.no_grad():
            out: torch.Tensor = eval(forward, names)
        return out


def esol(folder: Path, raw: Path) -> None:
    """Write ESOL's file from OGB's copy of its molecules: MoleculeNet reads the last two columns."""
    raw.mkdir(parents=True)
    with gzip.open(folder / "mapping" / "mol.csv.gz", "rt") as source, (raw / "delaney-processed.csv").open("w") as out:
        writer = csv.writer(out)
        rows = csv.reader(source)
        for value, smiles, *_ in rows:
            writer.writerow([""] * 8 + [value, smiles])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    path, rows = machine.results("accelerate", device), []
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        data.mkdir()
        for name in ("Planetoid", "PPI"):
            if (options.data / name).exists():
                (data / name).symlink_to((options.data / name).resolve())
        if (options.data / "ogb" / "ogbg_molesol").exists():
            esol(options.data / "ogb" / "ogbg_molesol", data / "AFP_Mol" / "esol" / "raw")
        for case in options.only:
            name, replaced, epochs = CASES[case]
            both = [Example(options.examples / f"{name}.py", replaced, data, swap) for swap in (False, True)]
            theirs, ours = (example.output(FORWARD[name]) for example in both)
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            if not error <= 1e-10:
                raise SystemExit(f"{case}: the outputs differ by {error:.1e} of the largest in float64, allowed 1e-10")
            for epoch in range(1, epochs + 1):
                for example in both:
                    example.run_epoch(epoch)
            # the first epoch compiles kernels
            before, after = (statistics.median(example.seconds[1:]) for example in both)
            result = both[1].result
            row = {"example": case, "epochs": epochs, "pyg_cpu_seconds": before, "gat_pyg_cpu_seconds": after}
            rows.append(row | {"times_faster": before / after, "error": error, **(result._asdict() if result else {})})
            print(json.dumps(rows[-1]), flush=True)
            machine.write(path, machine.about(device) | {"threads": 1, "rows": rows})


if __name__ == "__main__":
    main()
