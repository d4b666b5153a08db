"""OGB's graphs, small ones in its layout: against what ogb reads, and the errors if something is missing."""

from __future__ import annotations

import gzip
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch_geometric.utils import contains_isolated_nodes, is_undirected, to_undirected

from gat_pyg.data import ogbn
from gat_pyg.data.named.ogb import OGBN
from gat_pyg.tasks.objective import MASKS
from tests.commands import result_of

needs_ogb = pytest.mark.skipif(find_spec("ogb") is None, reason="ogb is not installed")
N = 30
SPLIT = {"train": np.arange(0, N, 3), "valid": np.arange(1, N, 3), "test": np.arange(2, N, 3)}


def stored(name: str, root: Path) -> Path:
    """The raw files of a graph of 30 nodes, as ogb's archive has them."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((N, 5)).astype(np.float32)
    edge_index = np.stack([np.arange(N), np.arange(1, N + 1) % N])  # a ring, and some chords
    edge_index = np.concatenate([edge_index, [[0, 0, 9], [7, 15, 21]]], axis=1)
    y, year = np.arange(N)[:, None] % 4, np.full((N, 1), 2015)
    folder = root / "ogb" / name.replace("-", "_")
    raw, split = folder / "raw", folder / "split" / ("sales_ranking" if name == "ogbn-products" else "time")
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    if name == "ogbn-papers100M":
        y = y.astype(np.float32)
        y[3:9] = np.nan
        sizes = {"num_nodes_list": np.array([N]), "num_edges_list": np.array([edge_index.shape[1]])}
        np.savez_compressed(raw / "data.npz", node_feat=x, edge_index=edge_index, node_year=year, **sizes)
        np.savez_compressed(raw / "node-label.npz", node_label=y)
    else:
        table(raw / "edge.csv.gz", edge_index.T)
        table(raw / "node-feat.csv.gz", x)
        table(raw / "node-label.csv.gz", y)
        table(raw / "node_year.csv.gz", year)
        table(raw / "num-node-list.csv.gz", np.array([[N]]))
        table(raw / "num-edge-list.csv.gz", np.array([[edge_index.shape[1]]]))
    for part, nodes in SPLIT.items():
        table(split / f"{part}.csv.gz", nodes[:, None])
    return folder


def table(path: Path, rows: np.ndarray) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows.tolist())


@pytest.fixture(autouse=True)
def without_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(question: str = "") -> str:
        raise AssertionError(f"prompt: {question}")

    monkeypatch.setattr("builtins.input", prompt)


@needs_ogb
@pytest.mark.parametrize("name", OGBN)
def test_it_is_what_ogb_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from ogb.nodeproppred import PygNodePropPredDataset

    stored(name, tmp_path)
    task = ogbn(name, tmp_path)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(torch, "load", partial(torch.load, weights_only=False))  # as ogb's own pickles need
    dataset = PygNodePropPredDataset(name, str(tmp_path / "ogb"))
    theirs, ours = dataset[0], task.train[0]
    assert (task.name, task.num_features, task.num_classes, task.has_many_graphs) == (name, 5, 4, False)
    assert torch.equal(ours.x, theirs.x) and ours.x.dtype == torch.float32
    assert torch.equal(ours.y, theirs.y.squeeze(1).nan_to_num(-1).long())
    assert is_undirected(ours.edge_index) and not contains_isolated_nodes(ours.edge_index, N)
    made = to_undirected(theirs.edge_index) if OGBN[name] else theirs.edge_index
    assert torch.equal(ours.edge_index, made)
    prepared = task.preparation(theirs)
    assert torch.equal(prepared.edge_index, made) and torch.equal(prepared.x, ours.x)
    for key, part in zip(MASKS, dataset.get_idx_split().values(), strict=True):
        assert ours[key].nonzero().flatten().tolist() == [node for node in part.tolist() if ours.y[node] >= 0]
    assert (ours.y < 0).sum() == (6 if name == "ogbn-papers100M" else 0)


@needs_ogb
def test_without_a_network_the_error_says_where_the_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ogb.nodeproppred.dataset_pyg.decide_download", lambda url: urlopen("http://127.0.0.1:9"))
    with pytest.raises(FileNotFoundError, match=r"ogbn-arxiv was not downloaded: .*Put the raw files in .*ogbn_arxiv"):
        ogbn("ogbn-arxiv", tmp_path)


def test_without_ogb_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    for module in [name for name in sys.modules if name.split(".")[0] == "ogb"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(ImportError, match=r"This needs ogb.*pip install 'gat_pyg\[ogb\]'"):
        ogbn("ogbn-products", tmp_path)
    with pytest.raises(SystemExit):
        result_of(tmp_path / "o", "dataset=ogbn-products", f"data_root={tmp_path}")
    assert "gat-pyg: This needs ogb" in capsys.readouterr().err


@needs_ogb
def test_the_command_trains_on_it(tmp_path: Path):
    stored("ogbn-papers100M", tmp_path)
    parts = ["loader=cluster", "loader.num_parts=3", "loader.batch_size=2"]
    settings = ["dataset=ogbn-papers100M", f"data_root={tmp_path}", *parts, "training.max_epochs=2"]
    result = result_of(tmp_path / "outputs", *settings)
    assert result.dataset == "ogbn-papers100M" and result.epochs == 2
