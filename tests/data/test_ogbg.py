"""OGB's sets of molecules, small ones in its layout: the split, the labels, and a model of embedded categories."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch
from torchmetrics.functional.classification import binary_auroc

from gat_pyg.data import ogbg
from gat_pyg.trained.predict import predict
from tests.commands import result_of
from tests.data.test_ogbn import table

needs_ogb = pytest.mark.skipif(find_spec("ogb") is None, reason="ogb is not installed")
MOLECULES, N = 30, 5
SPLIT = {"train": np.arange(0, 20), "valid": np.arange(20, 25), "test": np.arange(25, 30)}


def stored(name: str, root: Path) -> np.ndarray:
    """The raw files of 30 rings of 5 atoms, as ogb's archive has them; returns the labels."""
    generator = np.random.default_rng(0)
    folder = root / "ogb" / name.replace("-", "_")
    raw, split = folder / "raw", folder / "split" / "scaffold"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    atoms = generator.integers(0, 4, (MOLECULES * N, 9))
    ring = np.stack([np.arange(N), np.arange(1, N + 1) % N], axis=1)  # ogb stores each bond once
    y = np.arange(MOLECULES)[:, None] % 2.0
    if name == "ogbg-moltox21":
        y = np.concatenate([y, np.where(y == 0, np.nan, 1 - atoms[:MOLECULES, :1] % 2)], 1)
    table(raw / "edge.csv.gz", np.tile(ring, (MOLECULES, 1)))
    table(raw / "edge-feat.csv.gz", generator.integers(0, 3, (MOLECULES * N, 3)))
    table(raw / "node-feat.csv.gz", atoms)
    table(raw / "graph-label.csv.gz", y)
    for kind in ("node", "edge"):
        table(raw / f"num-{kind}-list.csv.gz", np.full((MOLECULES, 1), N))
    for part, molecules in SPLIT.items():
        table(split / f"{part}.csv.gz", molecules[:, None])
    return y


@needs_ogb
def test_the_command_trains_on_molecules(tmp_path: Path):
    y = stored("ogbg-molbace", tmp_path)
    task = ogbg("ogbg-molbace", tmp_path)
    assert [len(task.graphs(part)) for part in ("train", "val", "test")] == [20, 5, 5]
    assert torch.equal(task.labels("test").squeeze().float(), torch.tensor(y[25:, 0]).float())
    few = ["training.max_epochs=2", "model.hidden_channels=4", "model.heads=2", "model.num_layers=3", "model.encoder=8"]
    result = result_of(tmp_path / "o", "dataset=molbace", f"data_root={tmp_path}", *few)
    assert result.metric == "roc_auc"
    again = predict(result.run_dir, Batch.from_data_list(task.test))
    y = task.labels("test")
    assert result.value == pytest.approx(float(binary_auroc(again[:, 1], y)), abs=1e-4)


def test_without_ogb_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "ogb.graphproppred", None)
    with pytest.raises(ImportError, match=r"This needs ogb.*pip install 'gat_pyg\[ogb\]'"):
        ogbg("ogbg-molesol", tmp_path)
