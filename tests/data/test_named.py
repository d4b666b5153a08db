"""The named data sets against scikit-learn's and PyG's own readings; broken files are named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import PPI, Planetoid
from torch_geometric.io import fs
from torch_geometric.nn import MLP
from torch_geometric.transforms import NormalizeFeatures

from gat_pyg.data import digits, planetoid, planted, ppi
from gat_pyg.data.named import generated
from gat_pyg.data.named.raw import data_root, reading
from gat_pyg.models import GAT
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS
from gat_pyg.tasks.targets import NodeTargets

NAMES = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}

real = pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA names no folder with the real data")


def edges_of(edge_index: Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, edge_index.t().tolist()))


# Digits -------------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn_split_into_20_per_class_500_and_1000():
    data, bunch = digits().train[0], load_digits()
    assert torch.equal(data.x * 16, torch.tensor(bunch.data, dtype=torch.float))
    assert torch.equal(data.y, torch.tensor(bunch.target))
    assert data.y[data.train_mask].bincount().tolist() == [20] * 10
    assert [int(data[key].sum()) for key in MASKS] == [200, 500, 1000]
    assert data.train_mask.nonzero()[:5].flatten().tolist() == [10, 21, 26, 27, 34]  # on every machine


def test_digits_graph_is_that_of_the_nearest_neighbours():
    k = 5
    pixels, edges = load_digits().data, edges_of(digits(k).train[0].edge_index)
    near, _ = NearestNeighbors(n_neighbors=k).fit(pixels).kneighbors()  # [N, k], without the node itself
    square = euclidean_distances(pixels, squared=True).round()
    reach = (near[:, -1] ** 2).round()  # squared distance of the k-th neighbour
    np.fill_diagonal(square, np.inf)
    must = {(int(i), int(j)) for i, j in np.argwhere(square < reach[:, None])}
    may = {(int(i), int(j)) for i, j in np.argwhere(square <= np.maximum(reach[:, None], reach[None]))}
    assert must <= edges <= may  # the two differ in ties only
    assert edges == {(dst, src) for src, dst in edges}


def test_ties_go_to_the_lower_number():
    corners = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    assert edges_of(generated._nearest(corners, 1)) == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 3), (3, 1)}


# Planted ------------------------------------------------------------------------------------------------------------


PLANTED = {
    "attention": lambda F, K: GAT(F, [16], K, heads=[4, 4], dropout=0.0, backend="segment"),
    "constant": lambda F, K: GAT(F, [16], K, heads=[4, 4], dropout=0.0, mechanism="constant", backend="segment"),
    "no edges": lambda F, K: MLP([F, 64, K], norm=None, act="elu"),
}


def micro_f1(name: str) -> float:
    torch.manual_seed(0)
    task = planted(nodes=50, labels=4)
    model, objective = PLANTED[name](task.num_features, task.num_classes), task.objective
    *steps, test = (Batch.from_data_list(graphs) for graphs in (*batched(task.train, 4), task.test))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for batch in steps * 12:
        optimizer.zero_grad()
        objective.loss(model(batch.x, *([batch.edge_index] * (name != "no edges"))), batch.y).backward()
        optimizer.step()
    with torch.no_grad():
        out = model(test.x, *([test.edge_index] * (name != "no edges")))
    return objective.score(objective.statistics(out, test.y))


def batched(graphs: list[Data], size: int) -> list[list[Data]]:
    return [graphs[first : first + size] for first in range(0, len(graphs), size)]


def test_planted_tells_gat_from_const_gat_from_mlp():
    gat, const, mlp = map(micro_f1, PLANTED)
    assert gat > const + 0.3 > mlp + 0.4, (gat, const, mlp)
    assert gat > 0.9


@pytest.mark.parametrize(("regression", "objective"), [(False, NodeMultiLabels), (True, NodeTargets)])
def test_planted_labels_are_those_of_the_most_salient_node_within_two_steps(regression: bool, objective: type):
    task = planted(graphs=3, nodes=40, seed=7, regression=regression)
    assert isinstance(task.objective, objective)
    for data in task.train:
        near = torch.eye(40)
        near[data.edge_index[1], data.edge_index[0]] = 1
        near = near @ near > 0  # within two steps
        leader = data.x[:, 0].expand(40, 40).where(near, -torch.ones(1)).argmax(1)
        assert torch.equal(data.y, data.x[leader, 1:])
        assert edges_of(data.edge_index) == edges_of(data.edge_index.flip(0))


def test_planted_is_determined_by_its_seed():
    one, same, other = planted(seed=3), planted(seed=3), planted(seed=4)
    assert [len(graphs) for graphs in (one.train, one.val, one.test)] == [20, 5, 5]
    for key in ("x", "edge_index", "y"):
        assert all(torch.equal(a[key], b[key]) for a, b in zip(one.test, same.test, strict=True))
    assert not torch.equal(one.test[0].x, other.test[0].x)
    with pytest.raises(ValueError, match=r"planted: graphs=0, .*expected at least 1"):
        planted(graphs=0)


# Planetoid ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_citeseer(tmp_path: Path) -> Path:
    """The root of small files of Citeseer."""
    citeseer_files(tmp_path)
    return tmp_path


def citeseer_files(root: Path) -> None:
    """Write a data set in Planetoid's form, 560 nodes of which two have no line in test.index."""
    rng = np.random.default_rng(0)
    folder = root / "Planetoid" / "CiteSeer" / "raw"
    folder.mkdir(parents=True)
    test = np.setdiff1d(np.arange(540, 560), [545, 551])
    rng.shuffle(test)
    allx = scipy.sparse.random(540, 7, 0.4, "csr", np.float32, rng)
    ally = np.eye(3, dtype=np.int32)[rng.integers(3, size=540)]
    graph: defaultdict[int, list[int]] = defaultdict(list)
    for src, dst in rng.integers(560, size=(900, 2)).tolist():
        graph[src].append(dst)
    parts = {
        "x": allx[:9],
        "y": ally[:9],
        "allx": allx,
        "ally": ally,
        "tx": scipy.sparse.random(18, 7, 0.4, "csr", np.float32, rng),
        "ty": np.asfortranarray(np.eye(3, dtype=np.int32)[rng.integers(3, size=18)]),
        "graph": graph,
    }
    for part, content in parts.items():
        (folder / f"ind.citeseer.{part}").write_bytes(pickle.dumps(content, protocol=4))
    (folder / "ind.citeseer.test.index").write_text("".join(f"{node}\n" for node in test))


def raw_file(root: Path, part: str) -> Path:
    return root / "Planetoid" / "CiteSeer" / "raw" / f"ind.citeseer.{part}"


@pytest.mark.parametrize("name", ["tiny", *(pytest.param(name, marks=real) for name in NAMES)])
def test_planetoid_equals_pygs_reading(name: str, tiny_citeseer: Path, tmp_path: Path):
    name, root = ("citeseer", tiny_citeseer) if name == "tiny" else (name, tmp_path / "real")
    raw = Path("Planetoid", NAMES[name], "raw")
    if root != tiny_citeseer:
        shutil.copytree(data_root() / raw, root / raw)
    task = planetoid(name, root)
    assert os.listdir(root / raw.parent) == ["raw"]  # nothing else was written
    expected = Planetoid(str(root / "Planetoid"), NAMES[name], transform=NormalizeFeatures())
    for key in ("x", "y", "edge_index", *MASKS):
        assert torch.equal(task.train[0][key], expected[0][key]), key
    assert task.shared_graph is task.test[0]
    assert task.objective == NodeLabels(expected.num_classes)
    if root == tiny_citeseer:
        torch.set_default_dtype(torch.float64)
        try:
            wide = planetoid(name, root).train[0]
        finally:
            torch.set_default_dtype(torch.float32)
        assert wide.x.dtype == torch.float64 and torch.equal(wide.y, expected[0].y)
        torch.testing.assert_close(wide.x.float(), expected[0].x)


def test_a_bug_in_a_reader_is_no_reason_to_delete_a_file(tmp_path: Path):
    for error, advice in ((RuntimeError("wrong dtype"), ""), (EOFError("no more"), r" It is truncated .*Delete it .*")):
        message = rf"x cannot be read: {type(error).__name__}: {error}\.{advice}$"
        with pytest.raises(ValueError, match=message), reading(tmp_path / "x"):
            raise error


def graph_of(neighbours: dict[int, list[Any]]) -> bytes:
    return pickle.dumps(defaultdict(list, neighbours))


# part of Planetoid's files, content (or a function of the valid content), message
BROKEN_PLANETOID: list[tuple[str, bytes | Callable[[bytes], bytes], str]] = [
    *(
        (part, lambda whole, size=size: whole[: int(size * len(whole))], r"raw cannot be read.*truncated.*Delete it")
        for part, size in (("x", 0), ("tx", 0.5), ("graph", 0.97))
    ),
    ("graph", graph_of({0: [1, 560], 1: [0]}), "edge_index holds 560, but x has 560"),
    ("graph", graph_of({0: [1.5], 1: [0]}), r"edge_index is torch\.float32, expected int64"),
]


@pytest.mark.parametrize(("part", "content", "message"), BROKEN_PLANETOID)
def test_a_broken_file_of_planetoid_is_named(part: str, content: Any, message: str, tiny_citeseer: Path):
    path = raw_file(tiny_citeseer, part)
    path.write_bytes(content(path.read_bytes()) if callable(content) else content)
    with pytest.raises(ValueError, match=message) as caught:
        planetoid("citeseer", tiny_citeseer)
    assert str(path.parent) in str(caught.value)


# Where raw files come from ------------------------------------------------------------------------------------------


def test_the_root_is_the_argument_then_the_variable_then_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GAT_PYG_DATA", "/somewhere")
    assert data_root("/here") == Path("/here")
    assert data_root() == Path("/somewhere")
    monkeypatch.delenv("GAT_PYG_DATA")
    assert data_root() == Path("~/.cache/gat_pyg").expanduser()


def test_planetoid_is_fetched_where_pyg_fetches_it(tiny_citeseer: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(Planetoid, "url", str(raw_file(tiny_citeseer, "x").parent))
    fresh = tmp_path / "fresh"
    assert torch.equal(planetoid("citeseer", fresh).train[0].x, planetoid("citeseer", tiny_citeseer).train[0].x)
    assert len(list((fresh / "Planetoid" / "CiteSeer").rglob("*"))) == 1 + 8  # raw/ and its files
    raw_file(fresh, "graph").unlink()
    before = raw_file(fresh, "x").stat().st_mtime_ns
    planetoid("citeseer", fresh)  # fetches only what is missing
    assert raw_file(fresh, "x").stat().st_mtime_ns == before


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cut(source: str, folder: str) -> None:
        Path(folder, source.rpartition("/")[2]).write_bytes(b"half a fi")
        if source.endswith("allx"):
            raise TimeoutError("the line went dead")

    monkeypatch.setattr(fs, "cp", cut)
    with pytest.raises(FileNotFoundError, match="the line went dead"):
        planetoid("cora", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cora", "ppi"])
def test_without_a_network_the_error_says_where_the_files_go(name: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(Planetoid, "url", "http://127.0.0.1:9/data")
    monkeypatch.setattr(PPI, "url", "http://127.0.0.1:9/ppi.zip")
    folder = tmp_path / ("Planetoid/Cora/raw" if name == "cora" else "PPI/raw")
    with pytest.raises(FileNotFoundError, match="use dataset=digits, which needs no network") as caught:
        ppi(tmp_path) if name == "ppi" else planetoid(name, tmp_path)
    assert f"Put the raw files in {folder}" in str(caught.value)
    assert ("ind.cora.allx" if name == "cora" else "valid_graph.json") in str(caught.value)
    assert re.search(r"and not downloaded: Connect[^:]*\. Put", str(caught.value))  # the cause alone
    assert not list(tmp_path.iterdir())
    (tmp_path / "PPI" / "raw" / "mine").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="Put the raw files in .*PPI/raw, or point"):
        ppi(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["PPI", "raw", "mine"]  # which were there before


# PPI ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_ppi(tmp_path: Path) -> Path:
    """Six small graphs in PPI's form, with a constant feature and an unknown label; their root."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "PPI" / "raw"
    folder.mkdir(parents=True)
    for split, sizes in {"train": (9, 5), "valid": (4, 3), "test": (6,)}.items():
        N, graph = sum(sizes), np.repeat(np.arange(len(sizes)) + 3, sizes)
        links = [(int(i), int(j)) for i, j in rng.integers(N, size=(60, 2)) if graph[i] == graph[j]]
        links += [(i, i) for i in range(N)] + links[:3]
        both = [{"source": i, "target": j} for i, j in links + [(j, i) for i, j in links]]
        stored = {"directed": True, "multigraph": False, "graph": {}, "links": both}
        (folder / f"{split}_graph.json").write_text(json.dumps({**stored, "nodes": [{"id": i} for i in range(N)]}))
        x = rng.normal(3.0, 2.0, size=(N, 4))
        x[:, 2] = 0.1
        y = rng.integers(2, size=(N, 6)).astype(np.float32)
        y[0, :] = np.nan if split == "valid" else 1
        for part, content in {"feats": x, "labels": y, "graph_id": graph}.items():
            np.save(folder / f"{split}_{part}.npy", content)
    return tmp_path


def test_ppi_is_read_as_pyg_reads_it_and_standardised_on_the_training_nodes(tiny_ppi: Path):
    task = ppi(tiny_ppi)
    assert os.listdir(tiny_ppi / "PPI") == ["raw"]  # nothing else was written
    raw = {split: np.load(tiny_ppi / "PPI" / "raw" / f"{split}_feats.npy") for split in ("train", "valid", "test")}
    scaler = StandardScaler().fit(raw["train"])
    for split, file in {"train": "train", "val": "valid", "test": "test"}.items():
        graphs, expected = task.graphs(split), PPI(str(tiny_ppi / "PPI"), split)
        x = torch.cat([data.x for data in graphs])
        torch.testing.assert_close(x, torch.tensor(scaler.transform(raw[file]), dtype=torch.float))
        for data, other in zip(graphs, expected, strict=True):
            assert torch.equal(data.y.nan_to_num(7), other.y.nan_to_num(7))
            assert edges_of(data.edge_index) == edges_of(other.edge_index)
            assert data.num_edges == other.num_edges
    assert (task.num_features, task.objective, task.shared_graph) == (4, NodeMultiLabels(6), None)
    assert task.val[0].y[0].isnan().all()


def test_ppi_reads_links_given_once_or_twice(tiny_ppi: Path):
    twice = ppi(tiny_ppi)
    for path in (tiny_ppi / "PPI" / "raw").glob("*.json"):
        stored = json.loads(path.read_text())
        once = [link for link in stored["links"] if link["source"] <= link["target"]]
        path.write_text(json.dumps({**stored, "directed": False, "links": once}))
    for one, other in zip(ppi(tiny_ppi).train, twice.train, strict=True):
        assert torch.equal(one.edge_index, other.edge_index)


def test_ppi_is_fetched_where_pyg_fetches_it(tiny_ppi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "ppi.zip", "w") as archive:
        for path in (tiny_ppi / "PPI" / "raw").iterdir():
            archive.write(path, path.name)
    monkeypatch.setattr(PPI, "url", (tmp_path / "ppi.zip").as_uri())
    assert torch.equal(ppi(tmp_path / "fresh").test[0].x, ppi(tiny_ppi).test[0].x)
    assert len(list((tmp_path / "fresh" / "PPI").rglob("*"))) == 1 + 12


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def linked(node: float) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "links": [*stored["links"], {"source": 0, "target": node}]}))

    return write


def array(content: np.ndarray) -> Callable[[Path], Any]:
    return lambda path: np.save(path, content)


ANY_OF_PPI = "PPI/raw.* cannot be read"
BROKEN_PPI: list[tuple[str, Callable[[Path], Any], str]] = [
    *((file, cut, f"{file} cannot be read.*truncated") for file in ("train_feats.npy", "test_graph.json")),
    ("train_graph.json", linked(-5), "edge_index holds -5"),
    ("train_graph.json", linked(14), "edge_index holds 14, but x has 14"),
    ("train_graph.json", linked(0.5), "train_graph.json cannot be read: .*edge_index is torch.float"),
    ("train_feats.npy", array(np.zeros(14)), ANY_OF_PPI),
    ("valid_feats.npy", array(np.zeros((7, 3))), ANY_OF_PPI),
    ("valid_labels.npy", array(np.zeros((7, 6), complex)), ANY_OF_PPI),
    ("test_graph_id.npy", array(np.array(["a"] * 6)), ANY_OF_PPI),
    ("test_labels.npy", array(np.array([{}], object)), "test_labels.npy cannot be read.*allow_pickle=False"),
    ("test_graph.json", lambda path: path.write_text("[" * 200_000), "json cannot be read: RecursionError"),
]


@pytest.mark.parametrize(("file", "write", "message"), BROKEN_PPI)
def test_a_broken_file_of_ppi_is_named(file: str, write: Callable[[Path], Any], message: str, tiny_ppi: Path):
    write(tiny_ppi / "PPI" / "raw" / file)
    with pytest.raises(ValueError, match=message):
        ppi(tiny_ppi)


@real
def test_ppi_has_the_published_sizes():
    task = ppi()
    sizes = [
        (len(g), sum(d.num_nodes for d in g), sum(d.num_edges for d in g)) for g in (task.train, task.val, task.test)
    ]
    assert sizes == [(20, 44906, 1226368), (2, 6514, 198920), (2, 5524, 161976)]
    assert (task.num_features, task.objective) == (50, NodeMultiLabels(121))
