"""Baselines without a network: scikit-learn and dense products by hand, on every kind of task."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_adj

from gat_pyg.data import Task, links
from gat_pyg.runs import reference_scores as baselines
from gat_pyg.runs.reference_scores import simple_baselines
from gat_pyg.runs.result import Result
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps.messages import advice, baselines_line
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.targets import Targets
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


def test_models_are_scikit_learns_on_the_columns_of_training_rows() -> None:
    data = accounts()
    x, y = data.x.numpy(), data.y.numpy()
    train, test = data.train_mask.numpy(), data.test_mask.numpy()
    columns = np.concatenate([x, x[:, [2]] == np.arange(5)], 1)
    forest = RandomForestClassifier(TREES, random_state=0).fit(columns[train], y[train])
    columns = StandardScaler().fit(columns[train]).transform(columns)
    linear = LogisticRegression(max_iter=200).fit(columns[train], y[train])
    scores, error = simple_baselines(task_of(data))
    assert scores["linear model"] == pytest.approx(100 * accuracy_score(y[test], linear.predict(columns[test])))
    columns = np.concatenate([x, x[:, [2]] == np.arange(5)], 1)
    assert scores["random forest"] == pytest.approx(100 * accuracy_score(y[test], forest.predict(columns[test])), abs=5)
    assert scores["degrees"] < 60 < min(scores["linear model"], scores["random forest"])
    share = max(scores.values()) / 100
    assert error == pytest.approx(100 * (share * (1 - share) / test.sum()) ** 0.5, rel=0.5)  # 20 bootstrap samples


def test_pairs_have_the_features_of_both_ends_and_their_own() -> None:
    task = quantities_of_edges_of_graphs().scored_by("rmse")

    def rows(graphs: list[Data]) -> list[np.ndarray]:
        ends = [data.edge_label_index for data in graphs]
        parts = [torch.cat([d.x[i], d.x[j], d.edge_label_attr], 1) for d, (i, j) in zip(graphs, ends, strict=True)]
        return [torch.cat(values).double().numpy() for values in (parts, [data.y for data in graphs])]

    (x, y), (x_test, y_test) = rows(task.train), rows(task.test)
    errors = []
    for column, true in zip(y.T, y_test.T, strict=True):
        known, scored = ~np.isnan(column), ~np.isnan(true)
        model = Ridge().fit(StandardScaler().fit_transform(x[known]), column[known])
        predicted = model.predict(StandardScaler().fit(x[known]).transform(x_test[scored]))
        errors.append(root_mean_squared_error(true[scored], predicted))
    assert simple_baselines(task).scores["linear model"] == pytest.approx(np.mean(errors), rel=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_kind_of_task_has_baselines(name: str) -> None:
    task = OBJECTIVES[name]()
    scores, error = simple_baselines(task)
    expected = {"node": {"degrees"}, "edge": {"degrees"}, "graph": set()}.get(task.objective.item)
    of_links = {"popularity", "common neighbours", "Adamic-Adar"}
    if isinstance(task.objective, Targets) and task.objective.item != "graph":
        expected = {*expected, "one feature"}
    assert scores.keys() == (of_links if expected is None else {"linear model", "random forest", *expected})
    assert all(map(math.isfinite, (*scores.values(), error))) and error > 0


def test_one_feature_is_the_nearest_or_none_is_nearer_than_the_mean() -> None:
    x = np.array([[0.0, 5.0], [1.0, 5.0], [3.0, 5.0]])
    y = np.array([[0.0, 50.0], [1.0, 70.0], [2.0, np.nan]])
    predicted = baselines._one_feature(OBJECTIVES["quantities of nodes"](), x, y)(x + 1)
    assert predicted.tolist() == [[1, 60], [2, 60], [4, 60]]


def test_test_rows_change_no_model() -> None:
    data = accounts()
    changed = data.clone()
    others = data.test_mask.nonzero()[1:, 0]
    changed.x[others] += 7
    changed.y[others] = 0
    for before, after in zip(*(baselines._of_rows(task_of(each)) for each in (data, changed)), strict=True):
        torch.testing.assert_close(before[1][0], after[1][0], rtol=0, atol=0)


def dense_scores(data: Data, src: Tensor, dst: Tensor) -> dict[str, Tensor]:
    one_way = to_dense_adj(data.edge_index, max_num_nodes=len(data.x))[0].double()
    A = ((one_way + one_way.t()) > 0).double()
    k = A.sum(1)
    weight, root = torch.where(k > 1, 1 / k.log(), 0.0), torch.where(k > 0, k**-0.5, 0.0)
    values = {
        "popularity": one_way.sum(1)[:, None] * one_way.sum(0),
        "popularity of dst": one_way.sum(0).expand(len(A), -1),
        "common neighbours": A @ A,
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
    others = ["popularity of dst", "paths of length 3"] if bipartite else ["common neighbours", "Adamic-Adar"]
    assert names == ["popularity", *others]
    monkeypatch.setattr(baselines, "NEIGHBOURS", 20)
    assert [name for name, *_ in baselines._of_links(task)] == ["popularity", "popularity of dst"][: 1 + bipartite]


# In results ---------------------------------------------------------------------------------------------------------


def settings_of(*overrides: str) -> Settings:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return Settings.parse(compose("config", list(overrides)))


def result_of(task: Task, best: str = "degrees", epochs: int = 60, best_epoch: int = 40) -> Result:
    name, worst = task.objective.metric.name, -task.objective.metric.better(1e6)
    scores = {"linear model": worst / 2, best: 0.0}
    return Result("GAT", "own", name, worst, 0, epochs, best_epoch, 0.0, 1.0, 0.1, 9, baselines=scores)


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
            "edges in both directions (messages follow the edges, which have one), encoding=degree",
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
        ("links", ("encoding=degree",), {}, "+model.decoder=mlp"),
    ],
)
def test_what_to_try_is_left_open_by_data_and_settings(kind, overrides, fields, expected) -> None:
    task = OBJECTIVES[kind]()
    text = advice(result_of(task, **fields), task, settings_of(*overrides))
    assert expected in text


def test_a_search_is_tried_where_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.sweeps.messages._is_directed", lambda task: False)
    task = OBJECTIVES["links"]()
    text = advice(result_of(task), task, settings_of("encoding=degree", "+model.decoder=mlp"))
    search = "a search of 96 settings by gat-pyg -m search=link with the settings of the data"
    assert text == f"training.lr=0.007, training.lr=0.06, {search}"
