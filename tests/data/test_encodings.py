"""Encodings of nodes: their numbers, their columns in a task and its preparation, and the files that keep them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddRandomWalkPE, BaseTransform, LocalDegreeProfile
from torch_geometric.utils import to_dense_adj

from gat_pyg import load, predict
from gat_pyg.data import Task, digits, encoded, from_dataset, links
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.network import build_model
from gat_pyg.runs.task import build_task
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.settings.settings import Settings
from gat_pyg.tasks.encodings import Encoding, GraphColumns, LaplacianPE, RandomWalkPE
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.preparation import NORMALIZE, Preparation
from tests.graphs import SQUARE, Graph, graph, random
from tests.laws import assert_close

RWSE = {"_target_": "gat_pyg.tasks.encodings.RandomWalkPE", "walk_length": 5}
LAPLACIAN = {"_target_": "gat_pyg.tasks.encodings.LaplacianPE", "k": 3}
COLUMNS = {"_target_": "gat_pyg.tasks.encodings.GraphColumns"}
DEGREE = {"_target_": "torch_geometric.transforms.LocalDegreeProfile"}
BOTH = {"_target_": "torch_geometric.transforms.Compose", "transforms": [RWSE, DEGREE]}


def columns(transform: BaseTransform, of: Graph) -> Tensor:
    return Encoding(transform).columns(Data(torch.zeros(of.num_src, 2), of.index))


# The numbers --------------------------------------------------------------------------------------------------------

LARGE = random(510, 510, 2500)  # for SciPy's iteration, and several blocks of walks
PAIRS = graph("pairs", [(node, node + 1) for node in range(0, 120, 2)], 120)  # only two eigenvalues, 60 times each
GRAPHS = [*(each for each in SQUARE if each.num_src), LARGE, PAIRS]


@pytest.mark.parametrize("each", GRAPHS, ids=str)
def test_random_walks_are_the_diagonals_of_dense_powers(each: Graph, float64: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gat_pyg.tasks.encodings.BLOCK", 0)  # blocks of 16 nodes
    A = to_dense_adj(each.index, max_num_nodes=each.num_src)[0].double()  # a repeated edge counts each time
    P = (A / A.sum(1, keepdim=True).clamp(min=1)).numpy()
    powers = [np.linalg.matrix_power(P, k).diagonal() for k in range(1, 6)]
    assert_close(columns(RandomWalkPE(5), each), torch.from_numpy(np.stack(powers, 1)))
    if len(each.index.unique(dim=1).T) == each.index.size(1):
        pygs = AddRandomWalkPE(5, None)(Data(edge_index=each.index, num_nodes=each.num_src)).x
        torch.testing.assert_close(columns(RandomWalkPE(5), each), pygs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("each", GRAPHS, ids=str)
def test_laplacian_encodings_are_eigenvectors_of_the_least_eigenvalues(each: Graph, float64: None):
    N, k, state = each.num_src, min(4, each.num_src - 1), torch.get_rng_state()
    A = to_dense_adj(each.index, max_num_nodes=N)[0]
    A = ((A + A.T) > 0).double().fill_diagonal_(0.0)
    scale = torch.where(A.sum(1) > 0, A.sum(1).rsqrt(), 0.0)
    L = torch.eye(N) - scale[:, None] * A * scale
    values, vectors = (torch.from_numpy(each) for each in np.linalg.eigh(L.numpy()))
    encoding = columns(LaplacianPE(4), each)
    assert not encoding[:, k:].any()  # padded where there are fewer eigenvectors
    V, kept = encoding[:, :k], values[1 : k + 1]
    torch.testing.assert_close(V.T @ V, torch.eye(k), rtol=0, atol=1e-10)
    torch.testing.assert_close(L @ V, V * kept, rtol=0, atol=1e-10)
    gaps = values.diff().abs() > 1e-6
    for column in range(k):
        if gaps[column] and (column + 2 == N or gaps[column + 1]):  # a simple eigenvalue: numpy's vector up to sign
            torch.testing.assert_close((V[:, column] @ vectors[:, column + 1]).abs(), torch.tensor(1.0))
    assert torch.equal(columns(LaplacianPE(4), each), encoding)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("each", GRAPHS, ids=str)
def test_graph_columns_are_statistics_of_a_dense_matrix_and_networkx_ranks(
    each: Graph, float64: None, monkeypatch: Any
):
    N, data = each.num_src, Data(torch.randn(each.num_src, 2), each.index)
    A = to_dense_adj(each.index, max_num_nodes=N)[0]
    near = ((A + A.T) > 0) | (torch.eye(N) > (A + A.T).sum(1, keepdim=True))  # a node alone: itself
    x = data.x[None].expand(N, N, 2)
    rows = [torch.where(near[..., None], x, value) for value in (0.0, torch.inf, -torch.inf)]
    expected = [rows[0].sum(1) / near.sum(1, keepdim=True), rows[1].amin(1), rows[2].amax(1)]
    graph = networkx.MultiDiGraph([*map(tuple, each.index.T.tolist())])
    graph.add_nodes_from(range(N))
    ranks = networkx.pagerank(graph, max_iter=1000)
    expected += [A.sum(0).log1p()[:, None], A.sum(1).log1p()[:, None]]
    expected += [torch.tensor([[N * ranks[node]] for node in range(N)]).log()]
    got = Encoding(GraphColumns()).columns(data)
    torch.testing.assert_close(got, torch.cat(expected, 1), rtol=0, atol=1e-3)
    monkeypatch.setattr("gat_pyg.tasks.encodings.AT_ONCE", 1)  # the order does not depend on the number of edges
    assert torch.equal(Encoding(GraphColumns()).columns(data), got)
    assert torch.equal(Encoding(GraphColumns(most=1)).columns(data), got[:, 6:])
    if N > 1:
        assert torch.equal(Encoding(GraphColumns(k=2)).columns(data)[:, 9:], columns(LaplacianPE(2), each))


def test_other_ids_of_the_nodes_rename_the_encodings(float64: None):
    order = torch.randperm(LARGE.num_src, generator=torch.Generator().manual_seed(0))
    renamed = Graph("renamed", order[LARGE.index], LARGE.num_src, LARGE.num_dst)
    for transform in (RandomWalkPE(5), LaplacianPE(4), LocalDegreeProfile(), GraphColumns()):
        torch.testing.assert_close(columns(transform, renamed)[order], columns(transform, LARGE), rtol=0, atol=1e-8)


def test_walks_that_take_minutes_are_announced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gat_pyg.tasks.encodings.LONG", 1000)
    with pytest.warns(UserWarning, match=r"walks on 40 nodes and 300 edges take about 0 minutes\. A smaller walk_len"):
        columns(RandomWalkPE(2), random(40, 40, 300))


# In a task and its preparation --------------------------------------------------------------------------------------


def molecule(N: int, F: int = 2) -> Data:
    """A graph with categories, a category of each edge, and a class."""
    draw = torch.Generator().manual_seed(N)
    x, edge_index = torch.randint(4, (N, F), generator=draw).float(), torch.randint(N, (2, 2 * N), generator=draw)
    return Data(x, edge_index, torch.randint(3, (2 * N, 1), generator=draw).float(), y=torch.tensor([N % 2]))


def molecules() -> Task:
    return from_dataset([molecule(N) for N in range(3, 13)], "m", val=2, test=2)


def grid(**keys: Any) -> Data:
    """A ladder of 30 nodes."""
    src = torch.arange(28)
    edges = torch.cat([torch.stack([src, src + 2]), torch.stack([src[::2], src[1::2]])], 1)
    return Data(edge_index=torch.cat([edges, edges.flip(0)], 1), **keys)


def without_features() -> Task:
    return from_dataset(grid(y=torch.arange(30) % 3), "ladder", 3, 5, 5)


TASKS = {
    "nodes": (digits, DEGREE),
    "graphs": (molecules, BOTH),
    "edges": (lambda: from_dataset(grid(x=torch.randn(30, 2), edge_label=torch.arange(84) % 2), "edges"), RWSE),
    "links": (lambda: links(grid(x=torch.randn(30, 2)), "links"), LAPLACIAN),
    "ids": (without_features, RWSE),
    "features": (lambda: from_dataset(grid(x=torch.randn(30, 2), y=torch.arange(30) % 3), "ladder", 3, 5, 5), COLUMNS),
    "features of graphs": (molecules, COLUMNS),
}


@pytest.mark.parametrize("case", TASKS)
def test_encodings_are_standardised_columns_that_the_preparation_appends(case: str, tmp_path: Path):
    make, transform = TASKS[case]
    task = make()
    out = encoded(task, transform, tmp_path)
    F, P = task.num_features, out.num_encodings
    assert out.num_features == F + P and out.has_many_graphs == task.has_many_graphs
    rows = out.train[0].train_mask if case == "features" else slice(None)  # what depends on features: training nodes
    train = torch.cat([data.x for data in out.train])[rows, F:]
    constant = (train == 0).all(0)
    assert not constant.all()
    torch.testing.assert_close(train.mean(0), torch.zeros(P), rtol=0, atol=1e-5)
    torch.testing.assert_close(train.std(0, correction=0), 1.0 - constant.float(), rtol=1e-4, atol=1e-5)
    preparation = Preparation.from_dict(json.loads(json.dumps(out.preparation.to_dict())))
    assert replace(preparation, encoding=None, in_channels=F) == task.preparation
    for split in SPLITS:
        for raw, data in zip(task.graphs(split), out.graphs(split), strict=True):
            assert torch.equal(data.x[:, :F], raw.x)
            assert torch.equal(preparation(raw).x, data.x)  # of the edges that pass messages, as in training
            assert torch.equal(preparation(data).x, data.x)
            assert preparation.fits(raw.x) and preparation.fits(data.x.to_sparse_csr())
    with pytest.raises(ValueError, match="has encodings already"):
        encoded(out, RWSE, tmp_path)


def test_links_of_validation_and_test_are_not_encoded(tmp_path: Path):
    graph = grid(x=torch.ones(30, 1))
    task = encoded(links(graph, "links", 12, 9), DEGREE, tmp_path)
    degree = torch.bincount(task.train[0].edge_index[0], minlength=30).double()
    assert degree.sum() == graph.num_edges - 2 * (12 + 9)
    expected = (degree - degree.mean()) / degree.std(correction=0)
    torch.testing.assert_close(task.train[0].x[:, 1].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="twice: encodings of the nodes show the links"):
        links(task, "twice")


def saved(folder: Path, task: Task, **settings: Any) -> Any:
    values = {"_target_": "gat_pyg.GAT", "hidden_channels": 4, "heads": 2, "num_layers": 2, **settings}
    model, target, arguments = build_model(ModelFactory("model", values), task)
    about = {"preparation": task.preparation.to_dict(), "objective": task.objective.to_dict()}
    save_model(folder / "model.safetensors", model, target, arguments, **about)
    return model


def test_predictions_encode_each_graph_on_its_own_and_categories_stay_categories(tmp_path: Path):
    task = encoded(molecules(), LAPLACIAN, tmp_path)
    model = saved(tmp_path, task, encoder=8)
    assert [*model.model.encoder.categories] == [4, 4, 0, 0, 0]
    graphs = [molecule(N) for N in (20, 1, 14)]
    alone = torch.cat([predict(tmp_path, data) for data in graphs])
    torch.testing.assert_close(predict(tmp_path, graphs), alone)
    prepared = load(tmp_path).preparation(Batch.from_data_list(graphs))
    torch.testing.assert_close(predict(tmp_path, prepared), alone)
    assert not prepared[1].x[:, 2:].isnan().any()
    with pytest.raises(ValueError, match=r"x has shape \(20, 2\), expected \(N, 5\), with 3 columns of the run's"):
        load(tmp_path)(graphs[0].x, graphs[0].edge_index)
    for wrong, text in (
        (molecule(9, 3), r"x has shape \(9, 3\), expected \(N, 2\) as in the data"),
        (Data(graphs[0].x, edge_attr=graphs[0].edge_attr), r"edge_index is missing, expected \[2, E\], from which the"),
        (Data(graphs[0].x[:5], graphs[0].edge_index, graphs[0].edge_attr), r"edge_index holds \d+, but x has 5 rows"),
    ):
        with pytest.raises(ValueError, match=text):
            predict(tmp_path, wrong)


def test_nodes_without_features_are_embedded_beside_their_encodings(tmp_path: Path):
    task = encoded(without_features(), RWSE, tmp_path)
    with pytest.raises(ValueError, match=r"no features but the ids of its nodes.* model\.encoder=64"):
        saved(tmp_path, task)
    assert [*saved(tmp_path, task, encoder=8).encoder.categories] == [30, 0, 0, 0, 0, 0]
    assert predict(tmp_path, grid()).shape == (30, 3)


def parsed(*overrides: str) -> Settings:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return Settings.parse(compose("config", list(overrides)))


def test_the_command_encodes_the_data(tmp_path: Path):
    task = build_task(parsed("dataset=planted", "encoding=rwse", f"data_root={tmp_path}"))
    assert task.num_encodings == 20
    for wrong, text in (
        ("walk_length=0", "walk_length is 0, expected a whole number, at least 1"),
        ("steps=3", r"RandomWalkPE has no argument encoding\.steps"),
    ):
        with pytest.raises(ValueError, match=text):
            parsed("encoding=rwse", f"++encoding.{wrong}")
    with pytest.raises(ValueError, match="NormalizeFeatures appends no columns to x"):
        encoded(molecules(), NORMALIZE, tmp_path)


# On disk ------------------------------------------------------------------------------------------------------------


def test_encodings_are_computed_once_and_a_damaged_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graphs, computed = [molecule(N) for N in range(3, 13)], []
    of_graph = Encoding.columns

    def counted(self: Encoding, data: Data) -> Tensor:
        computed.append(data)
        return of_graph(self, data)

    monkeypatch.setattr(Encoding, "columns", counted)

    def xs(transform: Any = RWSE, seed: int = 0) -> dict[int, Tensor]:
        task = encoded(from_dataset([*graphs, graphs[0].clone()], "m", val=2, test=2, seed=seed), transform, tmp_path)
        return {len(data.x): data.x[:, :2] for split in SPLITS for data in task.graphs(split)}

    threads = [threading.Thread(target=xs) for _ in range(3)]  # each of them reads, or waits for the one that computes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    xs(seed=1)  # the same graphs in another order
    assert len(computed) == 10  # equal graphs once
    (path,) = (tmp_path / "encodings").iterdir()  # and no lock
    whole, before = path.read_bytes(), xs()
    middle = len(whole) // 2
    for broken in (b"", whole[:-30], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        path.write_bytes(broken)
        after = xs()
        assert all(torch.equal(before[N], after[N]) for N in before) and path.read_bytes() == whole
    assert len(computed) == 40
    xs({**RWSE, "walk_length": 4})
    assert len(list((tmp_path / "encodings").iterdir())) == 2


def test_constant_encodings_are_warned_of(tmp_path: Path):
    ring = Data(torch.randn(30, 2), torch.stack([torch.arange(30), torch.arange(1, 31) % 30]), y=torch.arange(30) % 3)
    with pytest.warns(UserWarning, match="ring: all columns of the encoding are constant over the training nodes"):
        assert not encoded(from_dataset(ring, "ring", 3, 5, 5), DEGREE, tmp_path).train[0].x[:, 2:].any()


def test_without_a_writable_folder_each_run_computes_them(tmp_path: Path):
    (tmp_path / "encodings").write_text("a file")
    with pytest.warns(UserWarning, match=r"is not kept, so each run computes the encodings again: .*encodings"):
        assert encoded(digits(), DEGREE, tmp_path).num_encodings == 5
