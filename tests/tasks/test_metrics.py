"""Metrics against scikit-learn and the definition of OGB's Evaluator, and the objectives' statistics over batches."""

import math
import runpy
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor
from torch_geometric.data import Data

import gat_pyg.tasks.objective
from gat_pyg.data import from_dataset
from gat_pyg.tasks.graphs import GraphLabels
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.targets import NodeTargets

CASES = range(24)


def of_columns(y: Tensor, out: Tensor, measure, both: bool = False) -> float:
    """The mean over columns of known labels, as in OGB's Evaluator; with `both`, only those with 0 and 1."""
    scores = []
    for true, predicted in zip(y.T.numpy(), out.T.numpy(), strict=True):
        known = ~np.isnan(true)
        if known.any() and (not both or len(np.unique(true[known])) == 2):
            scores.append(measure(true[known], predicted[known]))
    return float(np.mean(scores)) if scores else math.nan


def f1(y, out) -> float:
    return sk.f1_score(y, out > 0, zero_division=0)


def one_vs_rest(y: Tensor, out: Tensor, measure) -> float:
    """The mean over the classes that occur, each against the rest; of two classes, the score of the second."""
    if out.size(1) == 2:
        return of_columns((y == 1).double()[:, None], out.diff(dim=1), measure, both=True)
    return of_columns(torch.nn.functional.one_hot(y, out.size(1)).double(), out.softmax(1), measure, both=True)


ONE = {
    "accuracy": lambda y, out: 100 * sk.accuracy_score(y, out.argmax(1)),
    "balanced_accuracy": lambda y, out: 100 * sk.balanced_accuracy_score(y, out.argmax(1)),
    "micro_f1": lambda y, out: sk.f1_score(y, out.argmax(1), average="micro"),
    "macro_f1": lambda y, out: sk.f1_score(y, out.argmax(1), average="macro", zero_division=0),
    "roc_auc": lambda y, out: one_vs_rest(y, out, sk.roc_auc_score),
    "average_precision": lambda y, out: one_vs_rest(y, out, sk.average_precision_score),
}
MANY = {
    "micro_f1": lambda y, out: f1(y[~y.isnan()], out[~y.isnan()]),
    "macro_f1": lambda y, out: of_columns(y, out, f1),
    "roc_auc": lambda y, out: of_columns(y, out, sk.roc_auc_score, both=True),
    "average_precision": lambda y, out: of_columns(y, out, sk.average_precision_score, both=True),
}
QUANTITY = {
    "mae": lambda y, out: of_columns(y, out, sk.mean_absolute_error),
    "rmse": lambda y, out: of_columns(y, out, sk.root_mean_squared_error),
    "r2": lambda y, out: of_columns(y, out, sk.r2_score),
}


def drawn(case: int) -> tuple[int, int, torch.Generator]:
    generator = torch.Generator().manual_seed(case)
    return 2 + case % 4, 40 + 7 * case, generator


def in_batches(objective, out: Tensor, y: Tensor) -> float:
    """The score of statistics from three batches of different sizes, one of them empty."""
    parts = [objective.statistics(out[a:b], y[a:b]) for a, b in ((0, 7), (7, 7), (7, len(y)))]
    return objective.score(objective.pool(parts))


@pytest.mark.parametrize("name", ONE)
def test_a_metric_of_one_label_is_that_of_scikit_learn(name: str) -> None:
    for case in CASES:
        K, n, generator = drawn(case)
        out = 3 * torch.randn(n, K, generator=generator, dtype=torch.float64)
        out = out.round() if K == 2 else out  # ties; of more classes, the softmax rounds ties apart
        y = torch.randint(K, (n,), generator=generator)
        y[torch.rand(n, generator=generator) < 0.2] = -1
        known = y >= 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # balanced_accuracy_score warns of predicted classes that do not occur
            expected = ONE[name](y[known], out[known])
        objective = NodeLabels(K).scored_by(name)
        assert in_batches(objective, out, y) == pytest.approx(expected, abs=2e-6, rel=2e-6), case


@pytest.mark.parametrize("name", MANY)
def test_a_metric_of_many_labels_is_that_of_scikit_learn_over_known_labels(name: str) -> None:
    for case in CASES:
        K, n, generator = drawn(case)
        out = (50 * torch.randn(n, K, generator=generator, dtype=torch.float64)).round(decimals=case % 3)
        y = (torch.rand(n, K, generator=generator) < 0.3).float()
        y[torch.rand(n, K, generator=generator) < 0.2] = math.nan
        y[:, 0] = math.nan if case % 2 else 0.0  # a column without known labels, or with one value
        objective = NodeMultiLabels(K).scored_by(name)
        assert in_batches(objective, out, y) == pytest.approx(MANY[name](y, out), abs=2e-6), case


@pytest.mark.parametrize("name", QUANTITY)
def test_a_metric_of_quantities_is_that_of_scikit_learn_over_known_labels(name: str) -> None:
    for case in CASES:
        K, n, generator = drawn(case)
        y = 5 + torch.randn(n, K, generator=generator, dtype=torch.float64)
        out = y + torch.randn(n, K, generator=generator, dtype=torch.float64)
        y[torch.rand(n, K, generator=generator) < 0.2] = math.nan
        y[:, 0] = math.nan if case % 2 else y[:, 0]
        assert in_batches(NodeTargets(K).scored_by(name), out, y) == pytest.approx(QUANTITY[name](y, out), rel=1e-6), (
            case
        )


@pytest.mark.parametrize(
    ("kind", "task", "metric"),
    [
        (NodeMultiLabels, "ogbg-molbace", "roc_auc"),
        (NodeMultiLabels, "ogbg-molpcba", "average_precision"),
        (NodeTargets, "ogbg-molesol", "rmse"),
    ],
)
def test_a_metric_is_that_of_ogbs_evaluator(kind, task: str, metric: str) -> None:
    if (ogb := find_spec("ogb")) is None:
        pytest.skip("ogb is not installed")
    file = Path(str(ogb.origin)).parent / "graphproppred" / "evaluate.py"  # the package's import takes seconds
    evaluator = runpy.run_path(str(file))["Evaluator"](task)
    for case in CASES[::4]:  # 128 columns take a quarter of a second
        _, n, generator = drawn(case)
        out = torch.randn(n, evaluator.num_tasks, generator=generator, dtype=torch.float64)
        y = out.sign().clamp(min=0) if kind is NodeMultiLabels else out + 1
        y[torch.rand(y.shape, generator=generator) < 0.3] = 1.0
        if kind is NodeMultiLabels and evaluator.num_tasks > 1:  # the other Evaluators have no unknown labels
            y[torch.rand(y.shape, generator=generator) < 0.2] = math.nan
        expected = evaluator.eval({"y_true": y.numpy(), "y_pred": out.numpy()})[evaluator.eval_metric]
        assert in_batches(kind(out.size(1)).scored_by(metric), out, y) == pytest.approx(expected, rel=2e-6), case


def test_logits_that_a_sigmoid_cannot_tell_apart_keep_their_order() -> None:
    y, out = torch.tensor([[0.0], [1.0], [0.0], [1.0]]), torch.tensor([[60.0], [70.0], [80.0], [90.0]])
    assert NodeMultiLabels(1).scored_by("roc_auc").measure(out.double(), y) == 0.75


def test_a_score_that_is_undefined_or_diverged_is_nan() -> None:
    for name in ("roc_auc", "average_precision"):
        measure = NodeMultiLabels(1).scored_by(name).measure
        assert math.isnan(measure(torch.randn(4, 1), torch.ones(4, 1)))
        assert math.isnan(measure(torch.full((4, 1), math.nan), torch.tensor([[0.0], [1], [0], [1]])))


@pytest.mark.parametrize("name", NodeLabels.measures)
def test_the_constant_score_is_reached_by_a_constant_prediction(name: str) -> None:
    y = torch.tensor([0, 1, 1, -1, 1, 2])
    objective = GraphLabels(3).scored_by(name)
    constant = torch.tensor([0.0, 1.0, 0.0]).expand(6, 3)
    assert objective.constant_score(y) == pytest.approx(objective.score(objective.statistics(constant, y)))


def test_the_standard_error_of_a_constant_is_that_of_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gat_pyg.tasks.objective, "SAMPLES", 300)
    draw = torch.Generator().manual_seed(0)
    n, bits = 400, (torch.rand(400, 3, generator=draw) < 0.3).float()
    share, y = float(bits[:, 0].double().mean()), torch.randn(400, 1, generator=draw)
    P, N = int(bits[:, 0].sum()), n - int(bits[:, 0].sum())
    ranking = math.sqrt((P + N + 1) / (12 * P * N))  # of Mann and Whitney's statistic, without ties
    bits[::9, 0] = math.nan
    for objective, labels, expected in (
        (NodeLabels(2), y[:, 0].gt(0.5).long(), 100 * math.sqrt(0.3 * 0.7 / n)),
        (NodeLabels(2).scored_by("roc_auc"), (torch.arange(n) < P).long(), ranking),
        (LinkLabels(4), (torch.arange(n) < P).long(), ranking),
        (NodeLabels(2).scored_by("balanced_accuracy"), (torch.arange(n) < P).long(), 50 * math.sqrt(1 / P + 1 / N) / 2),
        (NodeTargets(1), y, float(y.std()) / math.sqrt(2 * n)),  # of a normal distribution
        (NodeTargets(1).scored_by("mae"), y, math.sqrt((1 - 2 / math.pi) / n)),
        (NodeMultiLabels(3), bits, None),
        (NodeTargets(1).scored_by("r2"), y, None),
    ):
        error = objective.constant_error(labels)
        assert error == pytest.approx(expected, rel=0.12) if expected else 0 < error < 0.3, (objective, share)


def test_the_loss_of_a_split_is_the_mean_over_known_labels_whatever_the_metric() -> None:
    out, y = torch.randn(6, 3), torch.tensor([0, 1, -1, 2, 1, 0])
    for name in ONE:
        objective = NodeLabels(3).scored_by(name)
        values = objective.metrics({"val": objective.statistics(out, y)})
        assert f"val_{name}" in values
        assert values["val_loss"] == pytest.approx(float(objective.loss(out, y)), rel=1e-6)


def test_a_test_by_all_predictions_has_the_other_metrics_too() -> None:
    out, y = torch.randn(9, 2), torch.arange(9) % 2
    for objective, labels, also in (
        (NodeLabels(2).scored_by("average_precision"), y, {"roc_auc", "balanced_accuracy", "macro_f1"}),
        (
            NodeMultiLabels(2).scored_by("macro_f1"),
            torch.stack([y, 1 - y], 1).float(),
            {"roc_auc", "average_precision"},
        ),
        (NodeTargets(1, mean=(3.0,), std=(2.0,)), torch.randn(9, 1), {"mae", "r2"}),
        (NodeLabels(2), y, set()),
    ):
        rows = objective.statistics(out[:, : objective.out_channels], labels)
        values = objective.metrics({"val": rows, "test": rows})
        name = objective.metric.name
        each = {f"test_{name}_{k}" for k in range(2) if objective.column == "label"}
        assert values.keys() == {f"{s}_{n}" for s in ("val", "test") for n in ("loss", name)} | each | {
            f"test_{name}" for name in also
        }
        if each:  # the score is the mean of those of the labels
            assert values[f"test_{name}"] == pytest.approx(sum(values[key] for key in each) / 2)
        for name in also:
            assert values[f"test_{name}"] == pytest.approx(objective.scored_by(name).score(rows))


@pytest.mark.parametrize(
    ("name", "objective", "message"),
    [
        ("rmse", NodeLabels(3), "metric=rmse does not fit 3 node classes, expected accuracy, balanced_accuracy"),
        ("accuracy", NodeMultiLabels(1), "metric=accuracy does not fit 1 node label, expected micro_f1, macro_f1"),
        (
            "roc_auc",
            NodeTargets(2),
            "roc_auc does not fit 2 node targets, expected mae, rmse, r2, std_mae, std_rmse.",
        ),
        ("rmse", LinkLabels(2), "metric=rmse does not fit links, expected roc_auc, average_precision, mrr, hits@20"),
        ("auc", GraphLabels(2), "metric=auc is unknown, expected accuracy"),
    ],
)
def test_a_metric_that_does_not_fit_is_an_error(name: str, objective, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective.scored_by(name)


def test_a_metric_that_is_undefined_for_a_split_is_an_error() -> None:
    train, val, test = torch.eye(3, dtype=torch.bool).repeat_interleave(2, 1)
    data = Data(torch.randn(6, 2), torch.tensor([[0], [1]]), y=torch.tensor([0, 1, 1, 1, 0, 1]))
    task = from_dataset(data.update({"train_mask": train, "val_mask": val, "test_mask": test}), "six")
    with pytest.raises(ValueError, match="six: ROC-AUC is undefined for the val labels: too few are known, or all are"):
        task.scored_by("roc_auc")
