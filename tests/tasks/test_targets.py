"""Quantities of nodes and graphs: losses against torch's, standardisation, and scores in the unit of y."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset

from gat_pyg.data.arrays.from_pyg import from_dataset, from_file
from gat_pyg.tasks.metrics import MAE, R2, RMSE
from gat_pyg.tasks.objective import MASKS
from gat_pyg.tasks.objectives import objective_from
from gat_pyg.tasks.targets import GraphTargets, NodeTargets
from tests.objectives import OBJECTIVES, quantities_of_graphs


def drawn(n: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n, K, generator=draw), 50 + 9 * torch.randn(n, K, generator=draw)


def regression_graph(N: int = 60) -> Data:
    draw = torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(N, 3, generator=draw), torch.randint(N, (2, 4 * N), generator=draw)
    return Data(x, edge_index, y=20 + 5 * torch.randn(N, generator=draw))


@pytest.mark.parametrize(
    ("metric", "error", "loss"),
    [
        *((RMSE, None, F.mse_loss), (MAE, None, F.l1_loss), (MAE, "mse", F.mse_loss), (RMSE, "mae", F.l1_loss)),
        (RMSE, "huber", F.huber_loss),
    ],
)
def test_the_loss_is_that_of_the_standardised_targets(metric, error, loss):
    out, y = drawn(40, 2)
    objective = NodeTargets(2, metric, error=error).fitted(y)
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


def far_away(item: str, shift: float, dtype: torch.dtype, columns: int) -> object:
    """Quantities of nodes, edges and graphs, around a mean that float32 stores with a spacing of 64."""
    data, draw = regression_graph(), torch.Generator().manual_seed(3)
    values = torch.randint(-9, 10, (60, columns), generator=draw).double()
    y = (values / (1 if dtype == torch.int64 else 7) + shift).to(dtype)
    if item == "node":
        return Data(data.x, data.edge_index, y=y)
    if item == "edge":
        return Data(data.x, data.edge_index[:, :60], edge_label=y)
    return [Data(data.x[:3], data.edge_index[:, :0], y=row[None]) for row in y]


@pytest.mark.parametrize("item", ["node", "edge", "graph"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_large_mean_changes_no_loss_score_or_prediction(item, dtype, columns):
    near, far = (
        from_dataset(far_away(item, shift, dtype, columns), "own", val=15, test=15, task=f"{item}_regression")
        for shift in (0.0, 1e9)
    )
    out = torch.randn(15, columns, generator=torch.Generator().manual_seed(1))
    for metric in near.objective.measures:
        one, other = near.scored_by(metric).objective, far.scored_by(metric).objective
        y = near.labels("test"), far.labels("test")
        torch.testing.assert_close(other.loss(out, y[1]), one.loss(out, y[0]), rtol=1e-5, atol=1e-6)
        scores, others = (
            task.metrics({"test": task.statistics(out, labels)}) for task, labels in zip((one, other), y, strict=True)
        )
        assert others == pytest.approx(scores, rel=1e-5, abs=1e-5), metric
        assert other.constant_score(y[1]) == pytest.approx(one.constant_score(y[0]), rel=1e-5, abs=1e-5)
        torch.testing.assert_close(
            other.predictions(out) - 1e9, one.predictions(out).double(), rtol=1e-5, atol=1e-5, msg=metric
        )
    assert far.labels("test").dtype == torch.float64 and near.labels("test").dtype == torch.float32


def test_the_score_of_several_targets_does_not_follow_the_largest_unit():
    y, out = drawn(40, 2)
    objective = NodeTargets(2).fitted(y)
    scaled = y * torch.tensor([1.0, 1000.0])
    other = NodeTargets(2).fitted(scaled)
    metrics, changed = (task.metrics({"val": task.statistics(out, y)}) for task, y in ((objective, y), (other, scaled)))
    assert list(metrics) == ["val_loss", "val_std_rmse", "val_rmse_0", "val_rmse_1"]
    assert changed["val_std_rmse"] == pytest.approx(metrics["val_std_rmse"], rel=1e-5)
    assert changed["val_rmse_0"] == pytest.approx(metrics["val_rmse_0"], rel=1e-5)
    assert changed["val_rmse_1"] == pytest.approx(1000 * metrics["val_rmse_1"], rel=1e-5)
    in_units = metrics["val_rmse_0"] / objective.std[0] + metrics["val_rmse_1"] / objective.std[1]
    assert metrics["val_std_rmse"] == pytest.approx(in_units / 2, rel=1e-5)
    assert "val_mae_1" in NodeTargets(2, MAE).metrics({"val": objective.statistics(out, y)})


def test_r2_of_a_small_unit_is_that_of_a_large_one():
    y, out = drawn(40, 1)
    scores = [NodeTargets(1, R2).fitted(scale * y).measure(out.double(), scale * y.double()) for scale in (1, 1e-6)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


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
        (
            regression_graph(),
            {"task": "node_classification"},
            "expected whole numbers: classes. For a regression choose",
        ),
        (infinite, {}, "y is infinite as float32 in 1 places"),
        (graphs, {"val": 2, "test": 2}, "the graph has no nodes"),
    ):
        with pytest.raises(ValueError, match=message):
            from_dataset(data, "own", **{"val": 10, "test": 20, **options})


def with_values(item: str, values: list[float]) -> object:
    """Nodes, edges or graphs with these values in turn; the masks of nodes and edges have the same of each."""
    data, y = regression_graph(), torch.tensor(values)[torch.arange(60) % len(values)]
    if item == "graph":
        return [Data(data.x[:3], data.edge_index[:, :0], y=label[None]) for label in y]
    masks = {key: torch.arange(60) // len(values) % 3 == i for i, key in enumerate(MASKS)}
    labels = {"y": y} if item == "node" else {"edge_label": y}
    return Data(data.x, data.edge_index[:, :60], **labels, **masks)


@pytest.mark.parametrize("item", ["node", "edge", "graph"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1, 1], "own: y holds 1 and -1 alone, .* turn -1 and 1 into 0 and 1"),
        ([-1.0, 1.0], "turn -1 and 1 into 0 and 1"),
        ([1, 2], "y holds no class 0, but classes are numbered from 0, so the model has 3 of them"),
        ([3, 7], "the model has 8 of them. Give numpy.unique.*, or choose task={item}_regression"),
        ([0, 0], "own: all known training labels are equal, so there is nothing to learn. Check y and the split"),
        ([0, -1], "all known training labels are equal"),
        ([0.5, 0.5], "all known training labels are equal"),
        ([[0.0, 1.0], [math.nan, 1.0]], "all known training labels are equal"),
    ],
)
def test_labels_that_are_not_numbered_from_0_or_do_not_differ_are_reported(item, values, message):
    with pytest.raises((ValueError, UserWarning), match=message.format(item=item)):  # warnings are errors
        from_dataset(with_values(item, values), "own", val=10, test=10)


def test_a_class_without_training_labels_is_refused(tmp_path):
    data = regression_graph()
    data.y = torch.arange(60) % 3
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = (torch.arange(60) // 20 == i) & ((data.y != 2) | (i > 0))
    torch.save(data, tmp_path / "own.pt")
    message = "nodes of class 2, the training has none.* or choose task=node_regression if these are numbers to predict"
    with pytest.raises(ValueError, match=message):
        from_file(tmp_path / "own.pt")
