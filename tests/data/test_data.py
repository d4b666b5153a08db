"""The data sets against scikit-learn's and PyG's own readings; bad input against the error it must give."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.datasets import PPI, KarateClub, Planetoid
from torch_geometric.io import fs
from torch_geometric.nn import MLP
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import k_hop_subgraph

from gat_pyg.data import Task, digits, from_dataset, from_file, planetoid, planted, ppi
from gat_pyg.data.named import generated, proteins
from gat_pyg.data.named.raw import data_root, reading
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.models import GAT
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS, SPLITS
from gat_pyg.tasks.targets import NodeTargets
from tests.graphs import CHAIN, SQUARE, Graph

NAMES = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}

real = pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA names no folder with the real data")


def edges_of(edge_index: Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, edge_index.t().tolist()))


def ring(N: int = 12, K: int = 3, **others: Any) -> Data:
    """A small, valid, labelled graph."""
    nodes = torch.arange(N)
    return Data(x=torch.eye(N), edge_index=torch.stack([nodes, nodes.roll(1)]), y=nodes % K).update(others)


def nodes(N: int, *chosen: int) -> Tensor:
    return torch.zeros(N, dtype=torch.bool).index_fill_(0, torch.tensor(chosen, dtype=torch.long), True)


def masks(N: int = 12) -> dict[str, Tensor]:
    return {"train_mask": nodes(N, 0, 1, 2), "val_mask": nodes(N, 3, 4), "test_mask": nodes(N, 5, 6, 7)}


# Digits -------------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn_split_into_20_per_class_500_and_1000():
    data, bunch = digits().train[0], load_digits()
    assert torch.equal(data.x * 16, torch.tensor(bunch.data, dtype=torch.float))
    assert torch.equal(data.y, torch.tensor(bunch.target))
    assert data.y[data.train_mask].bincount().tolist() == [20] * 10
    assert [int(data[key].sum()) for key in MASKS] == [200, 500, 1000]
    assert data.train_mask.nonzero()[:5].flatten().tolist() == [10, 21, 26, 27, 34]  # on every machine


@pytest.mark.parametrize("k", [1, 5])
def test_digits_graph_is_that_of_the_nearest_neighbours(k: int):
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


def test_a_gat_on_digits_beats_an_mlp():
    def accuracy(model: torch.nn.Module, *edge_index: Tensor) -> float:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=5e-4)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x, *edge_index)[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
        is_right = model(data.x, *edge_index).argmax(1) == data.y
        return float(is_right[data.test_mask].float().mean())

    torch.manual_seed(0)
    data = digits().train[0]
    gat = accuracy(GAT(64, [16], 10, heads=[2, 1], dropout=0.0, backend="segment"), data.edge_index)
    mlp = accuracy(MLP([64, 64, 10], norm=None))
    assert gat > 0.95 and gat > mlp + 0.02, (gat, mlp)


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


def test_listed_links_without_loops_and_repetitions_are_the_edges(tiny_citeseer: Path, tiny_ppi: Path):
    listed = proteins.listed_links("citeseer", tiny_citeseer)
    assert [links.shape for links in listed] == [(2, 900)]
    tasks = {"citeseer": planetoid("citeseer", tiny_citeseer), "ppi": ppi(tiny_ppi)}
    listed += proteins.listed_links("ppi", tiny_ppi)
    first = {"citeseer": [listed[0]], "ppi": listed[1:]}
    for name, task in tasks.items():
        graphs = task.train + task.val + task.test if task.has_many_graphs else task.train
        left = sum(len({(i, j) for i, j in edges_of(links) if i != j}) for links in first[name])
        assert left == sum(data.num_edges for data in graphs)
    raw = json.loads((tiny_ppi / "PPI" / "raw" / "valid_graph.json").read_text())["links"]
    assert listed[2].t().tolist() == [[link["source"], link["target"]] for link in raw]


class Gadget:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *args: Any):
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


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


# Graphs in users' files ---------------------------------------------------------------------------------------------


def saved(form: str, folder: Path, values: dict[str, Any]) -> Path:
    """A file or folder with arrays of the keys; their tensors in a .pt file."""
    path = folder / (form if form == "folder" else f"mine.{form}")
    if form == "folder":
        path.mkdir()
        for key, value in values.items():
            np.save(path / f"{key}.npy", value)
    elif form == "npz":
        np.savez(path, **values)
    else:
        torch.save({key: torch.as_tensor(value) for key, value in values.items()}, path)
    return path


def arrays(**changes: Any) -> dict[str, Any]:
    return {key: np.asarray(changes.get(key, ring()[key])) for key in ("x", "edge_index", "y")}


@pytest.mark.parametrize(
    ("key", "dtype"),
    [("x", ">f4"), ("x", ">f8"), ("x", np.longdouble), ("x", np.uint64), ("edge_index", ">i8"), ("edge_index", ">i4")]
    + [("y", dtype) for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, ">i2", ">f8", np.longdouble, bool)],
)
def test_arrays_of_every_width_and_order_are_read(key: str, dtype: Any, tmp_path: Path):
    values = arrays(y=np.arange(12) % 2)
    values[key] = values[key].astype(dtype)
    data = from_file(saved("npz", tmp_path, values), per_class=1, val=2, test=2).train[0]
    for name in values:
        assert data[name].tolist() == values[name].tolist(), name


class Command(Gadget):
    """Creates the file `it_ran` of the working directory if it is unpickled."""

    def __init__(self) -> None:
        super().__init__(os.system, "touch it_ran")


def bytes_of(path: str, content: bytes) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)

    return write


def torch_saved(content: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(content, folder / "mine.pt")


def numpy_saved(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: np.savez(folder / "mine.npz", **values)


def store_of(value: Any) -> Data:
    data = ring()
    data.__dict__["_store"] = value
    return data


def truncated(suffix: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        path = folder / f"mine.{suffix}"
        torch.save(ring(), path) if suffix == "pt" else np.savez(path, x=np.eye(3))
        path.write_bytes(path.read_bytes()[:-20])

    return write


def dangling(folder: Path) -> None:
    saved("folder", folder, arrays())
    (folder / "folder" / "x.npy").unlink()
    (folder / "folder" / "x.npy").symlink_to(folder / "gone")


def looped(folder: Path) -> None:
    saved("folder", folder, arrays())
    (folder / "folder" / "y.npy").unlink()
    (folder / "folder" / "y.npy").symlink_to(folder / "folder" / "y.npy")


NO_EDGES = np.zeros((2, 0), int)
TEXTS = np.array(["a", "b"] * 6, object)  # as of pandas
OBJECTS = np.array([Command()], dtype=object)
NO_ARCHIVE = (b"", pickle.dumps({"x": 1}))
# path, its writer, error and message
BROKEN_FILES: list[tuple[Any, Callable[[Path], Any] | None, type[Exception], str]] = [
    *(
        ("mine.pt", torch_saved(content), ValueError, "cannot be read: it needs posix.system.*would run code")
        for content in (Command(), ring(extra=Command()))
    ),
    ("mine.pt", bytes_of("mine.pt", pickle.dumps(Command())), ValueError, "cannot be read"),
    (
        "mine.npz",
        numpy_saved(x=OBJECTS, edge_index=NO_EDGES, y=np.zeros(1, int)),
        ValueError,
        "mine.npz: x is of object, expected real numbers. Give categories columns of 0 and 1, for instance by pandas",
    ),
    *(
        (f"mine.{suffix}", truncated(suffix), ValueError, rf"mine\.{suffix} cannot be read: .*truncated")
        for suffix in ("pt", "npz")
    ),
    ("mine.pt", torch_saved(store_of("abc")), ValueError, r"mine\.pt cannot be read"),
    *(
        (
            "mine.npz",
            bytes_of("mine.npz", c),
            ValueError,
            r"^(?!.*pickle).*npz cannot be read: it is not a valid .npz file",
        )
        for c in NO_ARCHIVE
    ),
    *(("folder", bytes_of("folder/x.npy", c), ValueError, "^(?!.*pickle).*folder cannot be read") for c in NO_ARCHIVE),
    ("folder", dangling, FileNotFoundError, r"x\.npy cannot be read: No such file or directory\."),
    ("folder", looped, ValueError, r"y\.npy cannot be read: Too many levels of symbolic links\."),
    ("none.pt", None, FileNotFoundError, "none.pt does not exist"),
    ("none", None, FileNotFoundError, "none does not exist"),
    *(
        (path, write, ValueError, r"mine\S*: y is of object, expected real numbers\. Give each class a number: numpy.u")
        for path, write in (
            ("mine.npz", lambda folder: np.savez(folder / "mine.npz", **arrays(y=TEXTS))),
            ("mine", lambda folder: saved("folder", folder, arrays(y=TEXTS)).rename(folder / "mine")),
            ("mine.pt", lambda folder: torch.save(arrays(y=TEXTS), folder / "mine.pt")),
        )
    ),
    ("mine.csv", None, ValueError, "ends in '.csv', expected .pt"),
    ("mine.npz", numpy_saved(x=np.eye(3), edges=NO_EDGES), ValueError, "has no edge_index and no y; its keys are x, e"),
    (
        "mine.npz",
        numpy_saved(x=np.eye(3), edge_index=NO_EDGES, y=["a", "b", "a"]),
        ValueError,
        r"mine\.npz: y is of <U1, expected real numbers\. Give each class a number: ",
    ),
    (
        "mine.npz",
        numpy_saved(**arrays(y=np.full(12, 2**64 - 1, np.uint64))),
        ValueError,
        "y holds 18446744073709551615, expected numbers below",
    ),
    ("mine.pt", torch_saved(torch.eye(3)), ValueError, r"mine\.pt is a Tensor, expected a PyG Dataset"),
    ("mine.pt", torch_saved([ring(N) for N in (5, 6, 7, 8)]), ValueError, r"x has shape .*, expected"),
    *((path, None, ValueError, f"The path is {path!r}, expected that of a") for path in ("", None, 5)),
    ("~nobody-of-this-name/mine.csv", None, ValueError, "~nobody-of-this-name"),
]
if hasattr(os, "mkfifo"):
    BROKEN_FILES += [
        ("mine.pt", lambda folder: os.mkfifo(folder / "mine.pt"), ValueError, "is not a regular file"),
        (
            "folder",
            lambda folder: ((folder / "folder").mkdir(), os.mkfifo(folder / "folder" / "x.npy")),
            ValueError,
            "is not a regular file",
        ),
    ]


@pytest.mark.parametrize(("path", "write", "error", "message"), BROKEN_FILES)
def test_a_broken_file_is_named_and_runs_nothing(
    path: Any, write: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    if write is not None:
        write(tmp_path)
    with pytest.raises(error, match=message) as caught:
        from_file(tmp_path / path if write is not None else path, val=1, test=1)
    assert not (tmp_path / "it_ran").exists()
    assert "weights_only" not in str(caught.value)  # torch's advice to trust the file is not passed on


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.full(12, -1)}, "no node has a known label, so there is nothing to learn"),
        ({"y": np.full(12, np.nan)}, "no node has a known label"),
        ({"y": np.full((12, 3), np.nan)}, "no node has a known label"),
        ({"y": np.where(np.arange(12) == 3, np.inf, 0)}, r"y holds inf\.\.\., expected whole numbers"),
        ({"y": np.where(np.arange(12) == 3, -1e300, 0)}, r"y is infinite as float32"),
        ({"y": np.arange(12) % 3 + 1j}, "y is .*complex"),
        ({"x": np.eye(12) + 1j}, "x is .*complex"),
        ({"x": np.full((12, 2), 1e300)}, "x is NaN or infinite at node 0 as torch.float32"),
        ({"x": np.zeros((0, 3)), "edge_index": NO_EDGES, "y": np.zeros(0, int)}, "no node has a known label, so"),
    ],
)
def test_numbers_that_are_no_labels_or_features_are_named(changes: dict[str, Any], message: str, tmp_path: Path):
    path = saved("npz", tmp_path, arrays(**changes))
    with pytest.raises(ValueError, match=message) as caught:
        from_file(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("x", torch.ones(12, 2, device="meta"), "x is on the meta device, expected a tensor of real numbers"),
        ("x", lambda: torch.quantize_per_tensor(torch.ones(12, 2), 0.1, 0, torch.quint8), "x is quantized, expected"),
        (
            "x",
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
            "x is a nested tensor, expect|cannot be read: it needs torch._utils._rebuild_nested",  # torch 2.15
        ),
        ("x", [[0.0]] * 12, "x is of list, expected a tensor"),
        ("y", torch.ones(12, device="meta"), "y is on the meta device"),
        ("y", torch.arange(12).to_sparse(), r"y is torch.sparse_coo, expected a dense tensor. Use y.to_dense\(\)"),
        ("edge_index", torch.eye(12).to_sparse(), r"edge_index is torch.sparse_coo, .* Give the edges as \[2, E\]"),
        ("edge_attr", torch.ones(12, dtype=torch.cfloat), "edge_attr is complex"),
        ("edge_attr", "abc", "edge_attr is of str, expected a tensor"),
        ("train_mask", torch.ones(12, device="meta"), "train_mask is on the meta device"),
        *(
            (
                key,
                torch.zeros(1, dtype=torch.long).expand(10**11),
                f"{key} claims the shape .100000000000,.* stores few",
            )
            for key in ("x", "edge_index", "y", "edge_attr", "train_mask")
        ),
    ],
)
@pytest.mark.parametrize("form", [dict, list])
def test_tensors_of_another_kind_are_named(form: Any, key: str, content: Any, message: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls quantized tensors deprecated and nested ones a prototype
        values = {**ring().to_dict(), **masks(), key: content() if callable(content) else content}
        data = values if form is dict else Data(**values)
        torch.save([ring(), data] if form is list else data, tmp_path / "mine.pt")
        assert (tmp_path / "mine.pt").stat().st_size < 10_000
        with pytest.raises(ValueError, match=rf"mine\.pt(, graph 1)?:? (?:{message})"):
            from_file(tmp_path / "mine.pt")


class Untouched(Tensor):
    """A tensor whose elements must not be read."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (Tensor.isfinite, Tensor.aminmax, Tensor.split), f"{function} before all shapes"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("wrong", ["edge_index", "edge_attr", "y"])
def test_shapes_are_checked_before_elements(wrong: str):
    data = ring(edge_attr=torch.ones(12, 1), **masks())
    data[wrong] = data[wrong][:1] if wrong == "edge_index" else data[wrong][:5]
    data.x = data.x.as_subclass(Untouched)
    with pytest.raises(ValueError, match=f"{wrong} .*shape"):
        Task("mine", [data], [data], [data], num_features=12, objective=NodeLabels(3), edge_dim=1)


# Any data set of PyG's ----------------------------------------------------------------------------------------------


def test_missing_masks_are_drawn_with_the_seed_and_given_ones_kept():
    club = KarateClub()  # has a train_mask with one node per class
    task = from_dataset(club, val=10, test=15)
    data = task.train[0]
    assert task.name == "karateclub"
    assert torch.equal(data.train_mask, club[0].train_mask)
    assert [int(data[key].sum()) for key in MASKS] == [4, 10, 15]
    assert "val_mask" not in club[0]  # the caller's graph stays as it was
    again, other = from_dataset(club, val=10, test=15), from_dataset(club, val=10, test=15, seed=1)
    assert torch.equal(data.test_mask, again.train[0].test_mask)
    assert not torch.equal(data.test_mask, other.train[0].test_mask)


def test_own_data_are_divided_by_shares_unless_numbers_are_given():
    data = ring(100, 4)
    data.y[::5] = -1  # 80 labelled nodes are left
    links = Data(data.x, data.edge_index, edge_label=torch.arange(100) % 3)
    graphs = [Data(torch.ones(2, 1), torch.tensor([[0], [1]]), y=torch.tensor([i % 2])) for i in range(40)]
    some = {"train_mask": nodes(100, *range(1, 12)), "val_mask": nodes(100, *range(12, 16))}  # 9 and 3 labelled ones
    cases: list[tuple[Any, dict[str, Any], list[int]]] = [
        (data, {}, [48, 16, 16]),
        (data, {"per_class": 3}, [12, 16, 16]),
        (data, {"val": 5}, [59, 5, 16]),
        (data, {"val": 5, "test": 6}, [69, 5, 6]),
        (Data(data.x, data.edge_index, y=data.y / 7 + 0.01), {}, [60, 20, 20]),
        (ring(100, 4).update({"y": data.y, "train_mask": some["train_mask"]}), {}, [9, 35, 35]),
        (ring(100, 4).update({"y": data.y, **some}), {}, [9, 3, 68]),
        (links, {}, [60, 20, 20]),
        (graphs, {}, [24, 8, 8]),
        (graphs[:3], {}, [1, 1, 1]),
        (ring(60).update({"y": torch.eye(60)[:, :5]}), {"per_class": 4, "val": 10, "test": 20}, [20, 10, 20]),
        (data, {"task": "link_prediction"}, [85, 10, 20]),  # 5 % and 10 % of the links, and as many other pairs
    ]
    for dataset, options, expected in cases:
        task = from_dataset(dataset, "own", **options)
        assert [len(task.labels(split)) for split in SPLITS] == expected, (expected, options)


def test_a_drawn_split_has_every_class():
    """Also a rare one, which a random order may leave out; otherwise the split is that of the random order."""
    y = torch.where(torch.arange(100) < 5, 1, torch.where(torch.arange(100) < 10, -1, 0))
    edges = torch.stack([torch.arange(100), (torch.arange(100) + 1) % 100])
    graphs = [Data(torch.ones(1, 1), torch.tensor([[0], [0]]), y=label[None]) for label in y[y >= 0]]
    own: list[Any] = [Data(torch.ones(100, 1), edges, y=y), Data(torch.ones(100, 1), edges, edge_label=y), graphs]
    for dataset in own:
        for seed in range(4):
            task = from_dataset(dataset, "own", seed=seed)
            counts = [task.labels(split).bincount(minlength=2).tolist() for split in SPLITS]
            assert [sum(count) for count in counts] == [57, 19, 19]
            assert min(rare for _, rare in counts) >= 1, counts
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    data = from_dataset(Data(torch.ones(100, 1), edges, y=torch.arange(100) % 2), "own", seed=3).train[0]
    assert [int(data[key][part].sum()) for key, part in zip(MASKS, order.split([60, 20, 20]), strict=True)] == [
        60,
        20,
        20,
    ]


def test_a_split_takes_so_many_of_each_class_and_labelled_nodes_only():
    data = ring(60, 4)
    data.y[::7] = -1
    split = from_dataset(data, per_class=3, val=10, test=20).train[0]
    assert split.y[split.train_mask].bincount().tolist() == [3, 3, 3, 3]
    assert [int(split[key].sum()) for key in MASKS] == [12, 10, 20]
    assert not any((split[key] & (data.y < 0)).any() for key in MASKS)
    assert not (split.train_mask & split.val_mask | split.test_mask & (split.train_mask | split.val_mask)).any()
    with pytest.raises(ValueError, match="ring: val_mask needs -1 nodes"):
        from_dataset(data, "ring", per_class=2, val=-1, test=5)
    with pytest.raises(ValueError, match="ring: per_class=-1 needs"):
        from_dataset(data, "ring", per_class=-1, val=5, test=5)


def test_a_column_of_the_masks_is_a_split():
    several = {key: torch.stack([mask, mask.roll(1), mask.roll(2)], 1) for key, mask in masks().items()}
    several["test_mask"] = nodes(12, 11)  # one for all splits
    for split in (0, 2):
        task = from_dataset(ring(**several), "ring", split=split)
        assert torch.equal(task.train[0].train_mask, several["train_mask"][:, split]) and task.num_splits == 3
        assert torch.equal(task.train[0].test_mask, several["test_mask"])
    with pytest.raises(ValueError, match=r"ring: train_mask has 3 columns, split=3 is none of them"):
        from_dataset(ring(**several), "ring", split=3)
    several["val_mask"] = several["val_mask"][:, :2]
    with pytest.raises(ValueError, match="different numbers of columns: 3 in train_mask, 2 in val_mask"):
        from_dataset(ring(**several), "ring")


def test_features_labels_and_edges_become_those_of_a_task():
    data = ring(edge_attr=torch.arange(12), y=ring().y[:, None].float(), **masks())  # y [N, 1]
    data.x, data.edge_index = data.x.long(), EdgeIndex(data.edge_index, sparse_size=(12, 12))
    task = from_dataset(data)
    graph = task.train[0]
    assert task.edge_dim == 1 and graph.x.dtype == torch.float32
    assert torch.equal(graph.edge_attr, torch.arange(12.0)[:, None])
    assert torch.equal(graph.edge_index, ring().edge_index) and torch.equal(graph.y, ring().y)
    floats = ring().y.double()
    floats[[0, 9]] = float("nan")
    unknown = from_dataset(ring(**masks(), y=floats)).train[0]
    assert unknown.y.tolist() == [-1, 1, 2, 0, 1, 2, 0, 1, 2, -1, 1, 2]
    assert unknown.train_mask.nonzero().flatten().tolist() == [1, 2]  # node 0 has no label
    many = torch.eye(12)[:, :5]
    many[3, 1] = float("nan")
    task = from_dataset(ring(**masks(), y=many))
    assert (task.objective, task.train[0].y.dtype) == (NodeMultiLabels(5), torch.float32)
    assert task.train[0].y[3, 1].isnan()


@pytest.mark.parametrize("key", ["x", "edge_attr"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_features_that_float32_makes_equal_are_named(key: str, dtype: torch.dtype):
    times = 1_700_000_000 + torch.arange(12)[:, None] * torch.tensor([0, 7])  # in float32 one of 128 seconds
    values = torch.cat([torch.arange(12)[:, None], times], 1).to(dtype)
    task = None if key == "x" else "link_prediction"
    with pytest.warns(UserWarning, match=f"own: in column 2 of {key}, different values are equal in float32"):
        from_dataset(ring(**masks(), **{key: values}), "own", task=task, val=2, test=2)
    from_dataset(ring(**masks(), **{key: values - values[:1]}), "own", task=task, val=2, test=2)


def test_the_split_of_an_ogb_data_set_is_kept():
    class Ogb(list):  # type: ignore[type-arg]
        def get_idx_split(self) -> dict[str, Tensor]:
            return {"train": torch.tensor([4, 0]), "valid": torch.tensor([1]), "test": torch.tensor([2, 3])}

    data = from_dataset(Ogb([ring()])).train[0]
    assert [data[key].nonzero().flatten().tolist() for key in MASKS] == [[0, 4], [1], [2, 3]]


# Bad input ----------------------------------------------------------------------------------------------------------


def with_value(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[5] = value
    return tensor


EDGES, X, Y = ring().edge_index, ring().x, ring().y

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "transposed": (
        {"edge_index": EDGES[:, :7].t()},
        r"edge_index has shape \(7, 2\), expected \(2, E\). Did you mean edge_",
    ),
    "one row": ({"edge_index": EDGES[0]}, r"edge_index has shape \(12,\), expected \(2, E\)\.$"),
    "float edges": ({"edge_index": EDGES.float()}, r"edge_index is torch.float32, expected int64. Did you mean .*long"),
    "negative": ({"edge_index": with_value(EDGES, -1)}, "edge_index holds -1, expected nodes from 0 to 11"),
    "beyond N": ({"edge_index": with_value(EDGES, 12)}, r"edge_index holds 12, but x has 12 rows \(nodes 0 to 11\)"),
    "no edges": ({"edge_index": None}, "edge_index is missing. Give the edges"),
    "no y": ({"y": None}, "y is missing. Give every node a label"),
    "NaN": (
        {"x": with_value(X, float("nan"))},
        r"x is NaN or infinite at node 0 as .*, in column 5\. Replace such values",
    ),
    "infinite": ({"x": with_value(X, float("inf"))}, "x is NaN or infinite at node 0"),
    "x of one axis": ({"x": X[0]}, r"x has shape \(12,\), expected \(N, F\), a row for each node\. .*x\[:, None\]"),
    "sparse x": ({"x": X.to_sparse()}, r"x is torch.sparse_coo, expected a dense tensor. Use x.to_dense\(\)"),
    "edge_attr short": ({"edge_attr": torch.ones(11, 2)}, r"edge_attr has shape \(11, 2\), expected \(12, 2\)"),
    "edge_attr 1-D short": ({"edge_attr": torch.ones(11)}, r"edge_attr has shape \(11, 1\), expected \(12, 1\)"),
    "edge_attr NaN": ({"edge_attr": torch.full((12, 1), torch.nan)}, "edge_attr is not of finite floats"),
    "y short": (
        {"y": Y[:11], **{key: mask[:11] for key, mask in masks().items()}},
        r"y is torch.int64 of shape \(11,\), ex",
    ),
    "label below": ({"y": with_value(Y, -7)}, "y holds the label -7, expected 0 to 2, or -1 where it is unknown"),
    "label beyond": ({"y": with_value(Y, 10**9)}, "y holds the label 1000000000, but there are 12 nodes"),
    "y of one number": ({"y": torch.tensor(1)}, r"y has shape \(\), expected \(N,\), or \(N, K\)"),
    "no labels": ({"y": torch.full((12,), -1)}, "no node has a known label"),
    "counts": ({"y": torch.full((12, 4), 2)}, "y holds other values than 0, 1 and NaN"),
    "overlap": ({"val_mask": nodes(12, 2, 3)}, "train_mask and val_mask overlap in 1 nodes"),
    "overlap of test": ({"test_mask": nodes(12, 0, 1, 9)}, "train_mask and test_mask overlap in 2 nodes"),
    "empty": ({"val_mask": nodes(12)}, "val_mask is empty, expected at least one node"),
    "mask short": ({"val_mask": nodes(11, 3)}, r"val_mask is torch.bool of shape \(11,\), expected a bool, 0 or 1"),
    "numbers": ({"val_mask": torch.arange(12)}, "val_mask is torch.int64 .*Are these node numbers"),
    "too few of a class": (
        {"train_mask": None, "per_class": 20},
        r"per_class=20 .* in class 0 \(\d\), 1 \(\d\), 2 \(\d\). Choose a smaller per_class \(split\.per_class",
    ),
    "edge_attr of one number": ({"edge_attr": torch.tensor(1.0)}, r"edge_attr has shape \(\), expected \(12, 1\)"),
    "too few": (
        {"test_mask": None, "test": 1000},
        r"test_mask needs 1000 nodes, but only 7 labelled ones are left. Choose smaller test \(split\.\* in",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_graph_is_named_with_what_was_expected(case: str):
    values, message = BAD[case]
    options = {key: value for key, value in values.items() if key in ("per_class", "test")}
    with pytest.raises(ValueError, match=message) as caught:
        from_dataset(ring(**{**masks(), **values}), "mine", **options)
    assert str(caught.value).startswith("mine")
    graph = {"transposed", "float edges", "negative", "beyond N", "NaN", "edge_attr short", "label below"}
    if case in graph:  # an error in the graph comes before one in its split
        with pytest.raises(ValueError, match=message):
            from_dataset(ring(**values, **dict.fromkeys(masks())), "mine")


ATTRIBUTED, UNKNOWN = ring(edge_attr=torch.ones(12, 1)), ring(y=torch.full((12,), -1))
NO_TASKS: list[tuple[Any, str]] = [
    (
        ([ring(), ring(x=torch.ones(12, 5))], [ring()], [ring()]),
        r"mine, train graph 1: x has shape \(12, 5\), expected",
    ),
    (([ATTRIBUTED], [ring()], [ATTRIBUTED]), "mine, val graph 0: some graphs have edge_attr and others have none"),
    (([ring()], [ring()], [UNKNOWN]), "mine: all labels of the test graphs are unknown"),
    (([ring()], [], []), "mine: there is no graph in val"),
    (([ring()], [ring()], []), "mine: there is no graph in test"),
    ([HeteroData()], r"mine holds a HeteroData, expected .*to_homogeneous"),
    ("cora", "mine is a str, expected a PyG Dataset"),
    ({"train": [], "valid": []}, "mine is a mapping of train, valid, expected train, val and test"),
    ([], "mine has no graph"),
    (([ring()] * 8), "mine: val=500 and test=1000 must .* the number of graphs, which is 8"),
]


@pytest.mark.parametrize(("dataset", "message"), NO_TASKS)
def test_graphs_that_differ_or_are_none_are_errors(dataset: Any, message: str):
    with pytest.raises(ValueError, match=message):
        from_dataset(dataset, "mine", val=500, test=1000)


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="mine: task is 'nodes', expected None or one of node_regression, "):
        from_dataset(ring(), "mine", task="nodes")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"val_mask": None}, "val_mask is missing. Give it, or split at random"),
        ({"val_mask": nodes(12, 3).long()}, r"val_mask is torch.int64 \(12,\), expected torch.bool \(12,\)"),
        ({"y": with_value(ring().y, -1)}, "test_mask holds nodes with unknown labels"),
        ({"y": ring().y.float()}, r"y is torch.float32 of shape \(12,\), expected torch.int64 of shape \(12,\)"),
        ({"y": with_value(ring().y, 3)}, "y holds the label 3, expected 0 to 2"),
        ({"x": ring().x.long()}, r"x is torch.int64, expected floats. Use x.float\(\)"),
    ],
)
def test_a_task_from_its_constructor_is_checked_too(values: dict[str, Any], message: str):
    data = [ring(**{**masks(), **values})]
    with pytest.raises(ValueError, match=message):
        Task("mine", data, data, data, num_features=12, objective=NodeLabels(3))


@pytest.mark.parametrize("graph", [g for g in SQUARE if g.num_src > 1], ids=str)
@pytest.mark.parametrize("num_hops", [0, 1, 3])
def test_a_receptive_field_is_what_pyg_reaches_from_its_nodes(graph: Graph, num_hops: int):
    N, E = graph.num_src, graph.index.size(1)
    data = Data(x=torch.arange(N).float().view(-1, 1), edge_index=graph.index, edge_attr=torch.arange(E).float())
    nodes = torch.tensor([N - 1, 0])
    part = receptive_field(data, nodes, num_hops)
    assert set(part.n_id[: part.num_sampled_nodes[0]].tolist()) == set(nodes.tolist())
    for hop in range(num_hops + 1):
        reached = k_hop_subgraph(nodes, hop, graph.index, num_nodes=N)[0]
        assert set(part.n_id[: sum(part.num_sampled_nodes[: hop + 1])].tolist()) == set(reached.tolist())
        into = torch.isin(graph.index[1], reached).nonzero().flatten() if hop < num_hops else part.e_id
        assert set(part.e_id[: sum(part.num_sampled_edges[: hop + 1])].tolist()) == set(into.tolist())
    assert part.n_id[part.edge_index].equal(graph.index[:, part.e_id])
    assert part.x.flatten().equal(part.n_id.float()) and part.edge_attr.equal(part.e_id.float())


def test_a_receptive_field_has_its_rows_of_sparse_features():
    x = torch.eye(7)[:, [3, 1, 4, 0]]
    data, sparse = (Data(x=x, edge_index=CHAIN.index) for x in (x, x.to_sparse_csr()))
    nodes = torch.tensor([4, 2])
    assert receptive_field(sparse, nodes, 2).x.to_dense().equal(receptive_field(data, nodes, 2).x)
