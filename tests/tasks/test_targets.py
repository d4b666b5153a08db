"""Quantities of nodes and graphs: losses against torch's, standardisation, and scores in the unit of y."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset

from gat_pyg.data.from_pyg import from_dataset, from_file
from gat_pyg.tasks.metrics import MAE, RMSE
from gat_pyg.tasks.objectives import objective_from
from gat_pyg.tasks.targets import GraphTargets, NodeTargets
from tests.objectives import OBJECTIVES, quantities_of_graphs, quantities_of_nodes


def drawn(n: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n, K, generator=draw), 50 + 9 * torch.randn(n, K, generator=draw)


def regression_graph(N: int = 60) -> Data:
    draw = torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(N, 3, generator=draw), torch.randint(N, (2, 4 * N), generator=draw)
    return Data(x, edge_index, y=20 + 5 * torch.randn(N, generator=draw))


@pytest.mark.parametrize(("metric", "loss"), [(RMSE, F.mse_loss), (MAE, F.l1_loss)])
def test_the_loss_is_that_of_the_standardised_targets(metric, loss):
    out, y = drawn(40, 2)
    objective = NodeTargets(2, metric).fitted(y)
    standard = (y - y.mean(0)) / y.std(0, correction=0)
    torch.testing.assert_close(objective.loss(out, y), loss(out, standard))
    torch.testing.assert_close(objective.outputs(objective.predictions(out)), out)
    y[::3] = math.nan
    known = torch.arange(40) % 3 != 0
    torch.testing.assert_close(objective.loss(out, y), loss(out[known], standard[known]))
    assert objective.loss(out, torch.full_like(y, math.nan)) == 0


@pytest.mark.parametrize("name", ["rmse", "mae", "r2"])
def test_scores_are_those_of_scikit_learn_in_the_unit_of_y(name):
    task = quantities_of_graphs().scored_by(name)
    y, out = task.labels("test"), torch.randn(len(task.test), 3, generator=torch.Generator().manual_seed(1))
    oracle = {"rmse": root_mean_squared_error, "mae": mean_absolute_error, "r2": r2_score}[name]
    train = task.labels("train")[[0, 1, 2, 4]]
    mean, std = train.mean(0), train.std(0, correction=0)
    score = task.objective.score(task.objective.statistics(out, y))
    assert score == pytest.approx(oracle(y, mean + std * out), rel=1e-6)


@pytest.mark.parametrize("make", [quantities_of_nodes, quantities_of_graphs])
def test_shift_and_scale_of_the_targets_change_no_loss(make):
    task = make()
    out = torch.randn(task.labels("val").shape, generator=torch.Generator().manual_seed(2))
    for graph in {id(data): data for data in task.train + task.val + task.test}.values():
        graph.y = graph.y * 1000 - 7
    other = from_parts(task)
    expected = task.objective.loss(out, (task.labels("val") + 7) / 1000)
    torch.testing.assert_close(other.objective.loss(out, other.labels("val")), expected, rtol=1e-4, atol=1e-5)


def from_parts(task):
    kind = type(task.objective)
    return type(task)("other", task.train, task.val, task.test, 6, kind(task.num_classes))


def test_a_target_that_is_constant_or_unknown_is_not_divided_by_zero():
    y = torch.tensor([[3.0, math.nan], [3.0, math.nan]])
    objective = NodeTargets(2).fitted(y)
    assert objective.mean == (3.0, 0.0) and objective.std == (1.0, 1.0)


def test_the_best_constant_is_the_mean_or_the_median():
    y = torch.tensor([[0.0], [0.0], [3.0]])
    assert NodeTargets(1).constant_score(y) == pytest.approx(math.sqrt(2))
    assert NodeTargets(1, MAE).constant_score(y) == pytest.approx(1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_comes_back_from_json(name):
    objective = OBJECTIVES[name]().objective
    assert objective_from(json.loads(json.dumps(objective.to_dict()))) == objective
    assert objective_from({**objective.to_dict(), "objective": "Other"}) is None


def test_fractions_are_quantities_and_the_other_nodes_are_for_training():
    task = from_dataset(regression_graph(), "own", val=10, test=20)
    assert isinstance(task.objective, NodeTargets) and len(task.labels("train")) == 30
    assert task.objective.mean == pytest.approx([float(task.labels("train").mean())])


def test_a_quantity_of_a_graph_may_be_a_whole_number():
    graphs = [Data(torch.ones(3, 2), torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([[i / 2]])) for i in range(9)]
    assert isinstance(from_dataset(graphs, "own", val=2, test=2).objective, GraphTargets)


@pytest.mark.parametrize(
    ("task_name", "columns"), [("graph_regression", "targets"), ("graph_classification", "classes")]
)
def test_the_task_overrides_what_the_labels_show(task_name, columns):
    torch.manual_seed(0)
    graphs = list(FakeDataset(num_graphs=30, avg_num_nodes=8, num_channels=4, num_classes=2))
    objective = from_dataset(graphs, "fake", val=6, test=6, task=task_name).objective
    assert (objective.item, objective.columns) == ("graph", columns)


def test_labels_that_are_no_quantities_or_no_classes_are_refused():
    graphs = [Data(torch.ones(2 * (i != 4), 2), torch.empty(2, 0).long(), y=torch.tensor([i % 2])) for i in range(9)]
    infinite = regression_graph()
    infinite.y[3] = math.inf
    for data, options, message in (
        (regression_graph(), {"task": "node_classification"}, "expected whole numbers: classes. For quantities choose"),
        (infinite, {}, "y is infinite as float32 in 1 places"),
        (graphs, {"val": 2, "test": 2}, "the graph has no nodes"),
    ):
        with pytest.raises(ValueError, match=message):
            from_dataset(data, "own", **{"val": 10, "test": 20, **options})


def test_a_class_without_training_labels_is_refused(tmp_path):
    data = regression_graph()
    data.y = torch.arange(60) % 3
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = (torch.arange(60) // 20 == i) & ((data.y != 2) | (i > 0))
    torch.save(data, tmp_path / "own.pt")
    with pytest.raises(ValueError, match="nodes of class 2, the training has none"):
        from_file(tmp_path / "own.pt")
