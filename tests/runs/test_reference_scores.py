"""Baselines without a network: scikit-learn, linear systems and dense products by hand, on every kind of task."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import accuracy_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_dense_adj, to_undirected

from gat_pyg.data import Task, from_dataset, links, smiles, tables
from gat_pyg.data.molecules.descriptors import descriptors, fingerprints
from gat_pyg.runs import reference_scores as baselines
from gat_pyg.runs.reference_scores import simple_baselines, standard_error
from gat_pyg.runs.result import Result
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps.messages import advice, baselines_line
from gat_pyg.tasks.encodings import GraphColumns
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.targets import EdgeTargets, NodeTargets
from tests.objectives import OBJECTIVES, quantities_of_edges_of_graphs

TREES = 20


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "TREES", TREES)


def accounts(N: int = 300) -> Data:
    """Nodes with two quantities and a category, one of three classes that follows from them, and random edges."""
    draw = torch.Generator().manual_seed(0)
    category = torch.randint(5, (N,), generator=draw)
    x = torch.cat([torch.randn(N, 2, generator=draw), category[:, None].float()], 1)
    y = ((x[:, 0] + x[:, 1]) > 0).long() + (category % 2)
    data = Data(x, torch.randint(N, (2, 4 * N), generator=draw), y=y)
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(N) % 3 == i
    return data


def task_of(data: Data) -> Task:
    return Task("accounts", [data], [data], [data], data.x.size(1), NodeLabels(3))


def test_the_standard_error_of_a_perfect_score_is_that_of_one_wrong_row() -> None:
    y = torch.arange(36) % 3
    assert standard_error(task_of(accounts()), y, torch.eye(3)[y]) == pytest.approx(100 / 36)


def test_the_standard_error_of_a_difference_counts_the_rows_on_which_two_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(baselines, "SAMPLES", 200)  # the estimate is within 20 % of the limit
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (2000,), generator=draw)
    outs = [torch.eye(3)[torch.where(torch.rand(2000, generator=draw) < 0.1, 0, y)] for _ in range(2)]
    right = [(out.argmax(1) == y).double() for out in outs]
    error = partial(standard_error, task_of(accounts()), y)
    assert error(outs[0]) == pytest.approx(100 * float(right[0].std()) / 2000**0.5, rel=0.2)
    assert error(*outs) == pytest.approx(100 * float((right[0] - right[1]).std()) / 2000**0.5, rel=0.2)


def columns_of(x: Tensor, edge_index: Tensor) -> np.ndarray:
    """Return the columns of nodes, twice those that GraphLand adds."""
    return GraphColumns()(GraphColumns()(Data(x, edge_index))).x.double().numpy()


def test_models_are_scikit_learns_on_the_columns_of_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = accounts()
    x, y = data.x, data.y.numpy()
    train, test = data.train_mask.numpy(), data.test_mask.numpy()
    columns = columns_of(torch.cat([x, x[:, [2]] == torch.arange(5)], 1), data.edge_index)
    scaled = StandardScaler().fit(columns[train]).transform(columns)
    models = {
        "linear model": (LogisticRegression(max_iter=200), scaled, 1e-3),
        "random forest": (RandomForestClassifier(TREES, random_state=0), columns, 5),
        "boosting": (HistGradientBoostingClassifier(max_iter=10, early_stopping=False, random_state=0), columns, 1e-3),
    }
    scores, error = simple_baselines(task_of(data))
    monkeypatch.setattr(baselines, "SUFFICIENT", 50)
    monkeypatch.setattr(baselines, "MOST", 10)
    monkeypatch.setattr(baselines, "FEWEST", 10)
    scores |= simple_baselines(task_of(data)).scores
    for name, (model, its, tolerance) in models.items():
        predicted = model.fit(its[train], y[train]).predict(its[test])
        assert scores[name] == pytest.approx(100 * accuracy_score(y[test], predicted), abs=tolerance)
    assert scores["neighbours' labels"] < min(scores[name] for name in models)
    share = max(scores.values()) / 100
    assert error == pytest.approx(100 * (share * (1 - share) / test.sum()) ** 0.5, rel=0.5)  # 20 bootstrap samples


def test_pairs_have_the_columns_of_both_ends_and_their_own() -> None:
    task = quantities_of_edges_of_graphs().scored_by("rmse")

    union = Batch.from_data_list([Data(data.x, data.edge_index) for data in (*task.train, *task.test) if len(data.y)])
    columns = iter(torch.from_numpy(columns_of(union.x, union.edge_index)).split(union.ptr.diff().tolist()))

    def rows(graphs: list[Data]) -> list[np.ndarray]:
        parts = [
            torch.cat([next(columns)[d.edge_label_index.t()].flatten(1), d.edge_label_attr], 1)
            for d in graphs
            if len(d.y)
        ]
        return [torch.cat(parts).numpy(), torch.cat([data.y for data in graphs]).double().numpy()]

    (x, y), (x_test, y_test) = rows(task.train), rows(task.test)
    errors = []
    for column, true in zip(y.T, y_test.T, strict=True):
        known, scored = ~np.isnan(column), ~np.isnan(true)
        model = RidgeCV(np.logspace(0, 4, 5)).fit(StandardScaler().fit_transform(x[known]), column[known])
        predicted = model.predict(StandardScaler().fit(x[known]).transform(x_test[scored]))
        errors.append(root_mean_squared_error(true[scored], predicted))
    assert simple_baselines(task).scores["linear model"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_molecules_have_descriptors_and_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{end}{'C' * n}{other}" for n in range(1, 6) for end, other in ("CO", "NC", "CC", "OC(C)N"[::5])]
    frame = pd.DataFrame({"smiles": texts, "y": np.arange(len(texts)) % 7 + 0.5})
    task = smiles(frame, "y", val=4, test=6)
    x, x_test = (
        np.hstack([descriptors(its), fingerprints(its)]).astype(float)
        for its in ([data.smiles for data in graphs] for graphs in (task.train, task.test))
    )
    scaler, (y, y_test) = StandardScaler().fit(x), (task.labels(split)[:, 0].numpy() for split in ("train", "test"))
    model = RidgeCV(np.logspace(0, 4, 5)).fit(scaler.transform(x), y)
    expected = root_mean_squared_error(y_test, model.predict(scaler.transform(x_test)))
    scores = simple_baselines(task).scores
    assert scores["linear model of descriptors"] == pytest.approx(expected, rel=1e-3)
    assert scores.keys() == {"linear model of descriptors", "random forest of descriptors"}
    monkeypatch.setattr(baselines, "is_missing", lambda package: True)
    assert simple_baselines(task).scores.keys() == {"linear model", "random forest"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_kind_of_task_has_baselines(name: str) -> None:
    task = OBJECTIVES[name]()
    scores, error = simple_baselines(task)
    expected = {"linear model", "random forest"} | ({"neighbours' labels"} if task.shared_graph else set())
    of_links = {"popularity", "popularity of dst", "Adamic-Adar"}
    assert scores.keys() == (of_links if task.objective.draws_pairs else expected)
    assert all(map(math.isfinite, (*scores.values(), error))) and (error > 0 or not any(scores.values()))


def regression(y: Tensor, edge_index: Tensor, train: list[int], of_edges: bool = False) -> Task:
    data = Data(torch.ones(int(edge_index.max()) + 2, 1), edge_index, y=y)
    if of_edges:
        data.edge_label_index = edge_index
    data.train_mask = torch.zeros(len(y), dtype=torch.bool).index_fill_(0, torch.tensor(train), True)
    data.val_mask = torch.zeros_like(data.train_mask).index_fill_(0, (~data.train_mask).nonzero()[0], True)
    data.test_mask = ~data.train_mask & ~data.val_mask
    return Task("harmonic", [data], [data], [data], 1, (EdgeTargets if of_edges else NodeTargets)(y.size(1)))


def test_labels_of_neighbours_are_the_harmonic_function() -> None:
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(12, (2, 40), generator=draw)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    y = torch.randn(13, 2, generator=draw)  # the last node has no neighbour
    y[3, 1] = math.nan
    task = regression(y, edge_index, [1, 3, 4, 8])
    graph = task.train[0]
    predicted = baselines._of_neighbours(task, graph, torch.arange(13))["neighbours' labels"]
    A = to_dense_adj(to_undirected(edge_index), max_num_nodes=13)[0].double()
    laplacian = A.sum(1).diag() - A
    for k in range(2):
        known = graph.train_mask & ~y[:, k].isnan()
        others = ~known & (A.sum(1) > 0)
        f = y[:, k].double().clone()
        f[others] = torch.linalg.solve(laplacian[others][:, others], A[others][:, known] @ f[known])
        f[12] = f[known].mean()
        torch.testing.assert_close(torch.from_numpy(predicted[:, k]), f, rtol=1e-5, atol=1e-5)
    graph.y[graph.train_mask] = 3.0
    assert baselines._of_neighbours(task, graph, torch.arange(13))["neighbours' labels"] == pytest.approx(3)


def test_neighbours_of_an_edge_begin_or_end_at_the_same_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ratings = torch.tensor([[0, 0, 1, 1, 2], [3, 4, 3, 4, 4]])  # of users and films
    y = torch.tensor([[1.0], [3.0], [5.0], [0.0], [0.0]])
    task = regression(y, ratings, [0, 1, 2], of_edges=True)
    monkeypatch.setattr(baselines, "ROUNDS", 1)
    predicted = baselines._of_neighbours(task, task.train[0], torch.tensor([0]))["neighbours' labels"]
    # of user 2 and film 4, whose unknown ratings begin as the mean 3: (3 + (3 + 3 + 3) / 3) / 2
    assert predicted.tolist() == [[3.0]]
    monkeypatch.setattr(baselines, "ROUNDS", 200)
    predicted = baselines._of_neighbours(task, task.train[0], torch.tensor([0]))["neighbours' labels"]
    a, b = np.linalg.solve([[1 - 5 / 12, -1 / 6], [-1 / 6, 1 - 2 / 3]], [5 / 4 + 1 / 2, 1 / 2])  # of ratings 3 and 4
    assert predicted == pytest.approx(b, rel=1e-5) and a > b


@pytest.mark.parametrize("season", [None, 4])
def test_an_earlier_value_of_a_series_is_the_last_or_the_seasonal_one(season: int | None) -> None:
    T, N, window = 60, 4, 9
    values = torch.rand(T, N, generator=torch.Generator().manual_seed(0)).cumsum(0)
    if season is not None:
        values = values / 20 + 10 * torch.sin(torch.arange(T)[:, None] * 2 * math.pi / season + torch.arange(N))
    x = torch.stack([values[step : T - window + step] for step in range(window)], 2)  # [T - window, N, window]
    series = Data(x, torch.tensor([[0, 1, 2], [1, 2, 3]]), y=values[window:])
    task = from_dataset(series, "series", val=10, test=10, task="node_regression")
    y = torch.cat([data.y[:, 0] for data in task.test])
    expected = root_mean_squared_error(y, torch.cat([data.x[:, window - (season or 1)] for data in task.test]))
    assert simple_baselines(task).scores["earlier value"] == pytest.approx(expected, rel=1e-5) and expected < 1


@pytest.mark.parametrize("name", ["nodes of one graph", "quantities of nodes", "edges", "edges of many graphs"])
def test_no_test_target_is_read(name: str) -> None:
    before, after = OBJECTIVES[name](), OBJECTIVES[name]()
    for data in after.test:
        mask = data.test_mask if "test_mask" in data else slice(None)
        data.y[mask] = data.y[mask].flip(0)
    for first, second in zip(*map(baselines._of_rows, (before, after)), strict=True):
        assert torch.equal(first[1], second[1]) and not torch.equal(first[2], second[2])


def test_work_is_limited_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in {"EDGES": 100, "READS": 900, "PASSED": 1000, "ELEMENTS": 1200, "TEST_ROWS": 40}.items():
        monkeypatch.setattr(baselines, limit, value)
    task = task_of(accounts())
    scores = simple_baselines(task)
    assert scores.scores.keys() == {"linear model", "random forest"} and scores == simple_baselines(task)


def dense_scores(data: Data, src: Tensor, dst: Tensor) -> dict[str, Tensor]:
    one_way = to_dense_adj(data.edge_index, max_num_nodes=len(data.x))[0].double()
    A = ((one_way + one_way.t()) > 0).double()
    k = A.sum(1)
    weight, root = torch.where(k > 1, 1 / k.log(), 0.0), torch.where(k > 0, k**-0.5, 0.0)
    values = {
        "popularity": one_way.sum(1)[:, None] * one_way.sum(0),
        "popularity of dst": one_way.sum(0).expand(len(A), -1),
        "Adamic-Adar": A @ weight.diag() @ A,
        "paths of length 3": A @ root.diag() @ A @ root.diag() @ A,
    }
    return {name: value[src, dst] for name, value in values.items()}


@pytest.mark.parametrize("bipartite", [False, True])
def test_heuristics_of_links_are_dense_products(monkeypatch: pytest.MonkeyPatch, bipartite: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    high = torch.tensor([[20], [20]])
    edges = torch.randint(20, (2, 90), generator=draw) + high * (torch.arange(2)[:, None] if bipartite else 0)
    edges = edges[:, edges[0] != edges[1]]
    task = links(Data(torch.ones(40 if bipartite else 20, 1), edges), val=5, test=10, channels=3)
    data = task.objective.example(task.test[0], "test")
    expected = dense_scores(data, *data.edge_label_index)
    monkeypatch.setattr(baselines, "CHUNK", 20)  # several
    names = []
    for name, scores, y in baselines._of_links(task):
        torch.testing.assert_close(scores, expected[name])
        assert torch.equal(y, data.y)
        names.append(name)
    other = "paths of length 3" if bipartite else "Adamic-Adar"
    assert names == ["popularity", "popularity of dst", other]
    monkeypatch.setattr(baselines, "NEIGHBOURS", 20)
    assert [name for name, *_ in baselines._of_links(task)] == ["popularity", "popularity of dst"]


def test_recent_popularity_counts_the_latest_links_of_training() -> None:
    rows = [(f"u{n % 13}", f"film{n * n % 11}", 2000 + n) for n in range(40)]
    frame = pd.DataFrame([*rows[::2], *rows[1::2]], columns=["user", "film", "year"])
    task = tables(None, frame, time="year", val=6, test=8)
    data = task.objective.example(task.test[0], "test")
    names = task.source["ids"][1]
    first: dict[tuple[str, str], int] = {}
    for user, film, year in rows:
        first.setdefault((user, film), year)
    latest = sorted((year, film) for (_, film), year in first.items() if year < 2026)[-int(data.y.sum()) :]
    expected = [sum(film == names[dst - 13] for _, film in latest) for dst in data.edge_label_index[1].tolist()]
    (scores,) = (scores for name, scores, _ in baselines._of_links(task) if name == "recent popularity")
    assert scores.tolist() == expected and len({*expected}) > 1


# In results ---------------------------------------------------------------------------------------------------------


def settings_of(*overrides: str) -> Settings:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return Settings.parse(compose("config", list(overrides)))


def result_of(task: Task, best: str = "popularity", epochs: int = 60, best_epoch: int = 40) -> Result:
    name, worst = task.objective.metric.name, -task.objective.metric.better(1e6)
    scores = {"linear model": worst / 2, best: 0.0}
    return Result(
        "GAT", "own", name, worst, 0, epochs, best_epoch, 0.0, 1.0, 0.1, 9, baselines=scores, item=task.objective.item
    )


def test_baselines_are_computed_once_for_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Task] = []

    def scored(task: Task) -> baselines.Baselines:
        calls.append(task)
        if task.name != "accounts":
            raise ValueError("singular")
        return baselines.Baselines({"linear model": 60.0}, 1.0)

    monkeypatch.setattr(baselines, "simple_baselines", scored)
    monkeypatch.setattr(baselines, "COMPUTED", {})
    own, task = ("dataset._target_=torch_geometric.datasets.KarateClub",), task_of(accounts())
    settings = settings_of(*own)
    scores = [baselines.baselines_of(each, task) for each in (settings, settings_of(*own, "seed=3", "model=mlp"))]
    assert scores[0] is scores[1] and scores[0] == ({"linear model": 60.0}, 1.0) and len(calls) == 1
    for others in (("dataset=cora",), (*own, "baselines=false")):
        assert baselines.baselines_of(settings_of(*others), task) is None
    with pytest.warns(UserWarning, match=r"one: the baselines failed \(ValueError: singular\)\."):
        assert baselines.baselines_of(settings_of("baselines=true"), OBJECTIVES["nodes of one graph"]()) == ({}, 0.0)
    monkeypatch.setattr(baselines, "is_missing", lambda: True)
    monkeypatch.setattr("gat_pyg.sweeps.messages.is_missing", lambda: True)
    assert baselines.baselines_of(settings, task) is None
    assert "python -m pip install 'gat_pyg[baselines]'" in baselines_line(None, "accuracy", settings)


@pytest.mark.parametrize(
    ("kind", "overrides", "fields", "expected"),
    [
        (
            "nodes of one graph",
            (),
            {},
            "edges in both directions (messages follow the edges, which have one)",
        ),
        ("nodes of one graph", (), {"best_epoch": 2}, "training.lr=0.007 (the best epoch was 2), edges in both"),
        (
            "nodes of one graph",
            ("training.max_epochs=60",),
            {"best_epoch": 59},
            "training.max_epochs=120 (the last epochs",
        ),
        ("graphs", ("model=gin",), {"best": "random forest"}, "edges in both directions"),
        ("graphs", (), {"best": "random forest"}, "encoding=rwse, model=gin"),
        ("links", (), {}, "model.decoder={decoder:mlp,popularity:true}, "),
        ("nodes of one graph", (), {"best": "boosting"}, "encoding=columns, "),
        ("nodes of one graph", (), {"best": "neighbours' labels"}, "training.label_rate=0.8, "),
        ("quantities of nodes", (), {"best": "earlier value"}, "model.change=true, "),
        (
            "graphs",
            ("dataset=smiles", "dataset.path=m.csv", "dataset.descriptors=false"),
            {"best": "boosting of descriptors"},
            "dataset.descriptors=true, ",
        ),
    ],
)
def test_what_to_try_is_left_open_by_data_and_settings(kind, overrides, fields, expected) -> None:
    task = OBJECTIVES[kind]()
    text = advice(result_of(task, **fields), task, settings_of(*overrides))
    assert expected in text


def test_a_search_is_tried_where_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.sweeps.messages._is_directed", lambda task: False)
    task = OBJECTIVES["links"]()
    text = advice(result_of(task), task, settings_of("+model.decoder={decoder:mlp,popularity:true}"))
    search = "a search of 96 settings by gat-pyg -m search=link with the settings of the data"
    assert text == f"training.lr=0.007, training.lr=0.06, {search}"
