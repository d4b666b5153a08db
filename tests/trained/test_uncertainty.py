"""Uncertainty: temperature, prediction sets and intervals, beside loops and SciPy; what a run says about them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import Tensor
from torch_geometric.data import Data

from gat_pyg.data import from_dataset
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.targets import GraphTargets
from gat_pyg.trained.uncertainty import Calibration, Rows, calibrated, caveat

LEVELS = (0.01, 0.5, 0.9, 0.99)


def drawn(n: int, K: int, many: bool = False) -> Rows:
    """Predictions that are too sure, with labels from softer ones, and some unknown."""
    generator = torch.Generator().manual_seed(n)
    out = torch.randn(n, K, generator=generator, dtype=torch.float64)
    if many:
        y = torch.bernoulli(out.sigmoid(), generator=generator)
        return Rows((3 * out).sigmoid(), y.masked_fill(torch.rand(n, K, generator=generator) < 0.1, math.nan))
    y = out.softmax(1).multinomial(1, generator=generator)[:, 0]
    return Rows((3 * out).softmax(1), y.masked_fill(torch.rand(n, generator=generator) < 0.1, -1))


def quantile(scores: list[float], level: float) -> float:
    rank = math.ceil(round((len(scores) + 1) * level, 9))
    return sorted(scores)[rank - 1] if rank <= len(scores) else math.inf


def calibration_error(p: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """The sum over 15 bins of the share of rows times |accuracy - confidence|, in percent."""
    sure, right, total = p.max(1), p.argmax(1) == y, 0.0
    for low in range(15):
        of_bin = (sure > low / 15) & (sure <= (low + 1) / 15)
        total += abs(right[of_bin].sum() - sure[of_bin].sum())
    return 100 * total / len(y)


def test_sets_of_classes_are_those_of_a_loop() -> None:
    val, test = drawn(150, 4), drawn(200, 4)
    run = calibrated(NodeLabels(4, class_weight=(1.0, 2.0, 3.0, 4.0)), val, test)  # weights do not count
    known = val.labels >= 0
    logs, y = val.predictions[known].log().numpy(), val.labels[known].numpy()

    def likelihood(T: float) -> float:
        return -float(special.log_softmax(logs / T, 1)[range(len(y)), y].mean())

    T = optimize.minimize_scalar(likelihood, bounds=(0.1, 20), method="bounded", options={"xatol": 1e-9}).x
    assert run.temperature == pytest.approx(T, rel=1e-4) and pytest.approx(3, rel=0.3) == T
    p = special.softmax(np.log(test.predictions.numpy()) / run.temperature, 1)
    np.testing.assert_allclose(run.probabilities(test.predictions), p, rtol=1e-9)
    known = (test.labels >= 0).numpy()
    labels = test.labels.numpy()[known]
    errors = [calibration_error(each[known], labels) for each in (test.predictions.numpy(), p)]
    assert run.errors == pytest.approx(errors, abs=1e-3) and errors[1] < errors[0] / 2
    scores = [float(1 - special.softmax(row / run.temperature)[label]) for row, label in zip(logs, y, strict=True)]
    for level in LEVELS:
        q = quantile(scores, level)
        sets = [[k for k in range(4) if 1 - row[k] <= q] for row in p]
        assert [row.nonzero().flatten().tolist() for row in run.sets(test.predictions, level)] == sets
        its = [one for one, is_known in zip(sets, known, strict=True) if is_known]
        held = [label in one for one, label in zip(its, labels, strict=True)]
        assert run.at(level, run.coverage) == pytest.approx([100 * np.mean(held)])
        assert run.at(level, run.sizes) == pytest.approx(np.mean([len(one) for one in its]))
    with pytest.raises(ValueError, match=r"The run predicts 4 node classes\. Intervals are for regression"):
        run.interval(test.predictions)
    for level in (0, 0.905, 1, 90):
        with pytest.raises(ValueError, match=r"level is .*, expected 0\.01, 0\.02, \.\.\. or 0\.99"):
            run.sets(test.predictions, level)


def test_intervals_of_quantities_are_those_of_a_loop(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n in (15, 40):
        y = torch.randn(n, 2, generator=generator)
        predictions = y.double() + torch.randn(n, 2, generator=generator)
        rows.append(Rows(predictions, y.masked_fill(torch.rand(n, 2, generator=generator) < 0.2, math.nan)))
    val, test = rows
    calibrated(GraphTargets(2, mean=(0.0, 0.0), std=(1.0, 1.0)), val, test).save(tmp_path)
    run = Calibration.read(tmp_path)
    assert run is not None and run.temperature is None and run.rows == 13  # with a known label
    for level in LEVELS:
        low, high = run.interval(test.predictions, level)
        for k in range(2):
            known = ~val.labels[:, k].isnan()
            scores = (val.labels[known, k].double() - val.predictions[known, k]).abs().tolist()
            q, known = quantile(scores, level), ~test.labels[:, k].isnan()
            torch.testing.assert_close(low[:, k], test.predictions[:, k] - q)
            torch.testing.assert_close(high[:, k], test.predictions[:, k] + q)
            y = test.labels[known, k]
            held = (low[known, k] <= y) & (y <= high[known, k])
            assert run.at(level, run.coverage)[k] == pytest.approx(100 * float(held.double().mean()))
    assert run.at(0.99, run.quantiles) == [math.inf, math.inf]
    assert run.text(0.99) == "99 % intervals need 99 labels in the validation"
    with pytest.raises(ValueError, match=r"Sets are of classes: call interval\."):
        run.sets(test.predictions)
    (tmp_path / "calibration.json").write_text("{}")
    with pytest.raises(ValueError, match=r"calibration\.json cannot be read \('objective'\)\. Delete it"):
        Calibration.read(tmp_path)


def test_sets_of_exchangeable_rows_hold_the_level_on_average() -> None:
    """The coverage over draws of 19 validation rows is between level and level + 1 / 20, up to sampling error."""
    held, generator = dict.fromkeys(LEVELS, 0.0), torch.Generator().manual_seed(0)
    zeros = torch.zeros(40, 1, dtype=torch.float64)
    for _ in range(200):
        val, test = (Rows(zeros[:n], torch.randn(n, 1, generator=generator).double()) for n in (19, 40))
        run = calibrated(GraphTargets(1, mean=(0.0,), std=(1.0,)), val, test)
        held = {level: held[level] + run.at(level, run.coverage)[0] / 200 for level in LEVELS}
    for level, share in held.items():
        assert 100 * level - 2 < share < 100 * level + 7, (level, share)


def test_labels_have_a_temperature_and_no_sets() -> None:
    val, test = drawn(150, 3, many=True), drawn(200, 3, many=True)
    run = calibrated(NodeMultiLabels(3), val, test)
    assert run.temperature == pytest.approx(3, rel=0.3) and run.errors is not None and run.errors[1] < run.errors[0] / 2
    logits = test.predictions.logit() / run.temperature
    torch.testing.assert_close(run.probabilities(test.predictions), logits.sigmoid())
    with pytest.raises(ValueError, match="level fits classes and regression, but the run predicts 3 node labels"):
        run.sets(test.predictions)
    assert run.text().startswith("calibration error ") and "sets" not in run.text()


def settings_of(**split: Any) -> Any:
    values = {"scaffold": False, "time": None, "column": None, **split}
    return SimpleNamespace(split=SimpleNamespace(**values))


def test_the_text_says_where_validation_and_test_are_not_drawn_alike() -> None:
    """A star of training and validation nodes, and test nodes that only hang on the validation nodes."""
    n = 40
    star = torch.stack([torch.zeros(n, dtype=torch.long), torch.arange(1, n + 1)])
    chain = torch.stack([torch.arange(1, n + 1), torch.arange(n + 1, 2 * n + 1)])
    edge_index = torch.cat([star, chain], 1)
    graph = Data(torch.randn(2 * n + 1, 2), torch.cat([edge_index, edge_index.flip(0)], 1), y=torch.arange(81) % 2)

    def masked(train: Tensor, val: Tensor, test: Tensor) -> Data:
        masks = {f"{key}_mask": torch.zeros(81, dtype=torch.bool) for key in ("train", "val", "test")}
        for mask, nodes in zip(masks.values(), (train, val, test), strict=True):
            mask[nodes] = True
        return Data(graph.x, graph.edge_index, y=graph.y, **masks)

    nodes = torch.arange(81)
    near = from_dataset(masked(nodes[:2], nodes[2 : n + 1], nodes[n + 2 :]), "near")
    alike = from_dataset(masked(nodes[:2], nodes[2 : n + 1 : 2], nodes[3 : n + 1 : 2]), "alike")
    random = from_dataset(graph, "random", seed=0)
    text = "100 % of the validation nodes and 0 % of the test nodes have a training node as neighbour"
    assert caveat(near, settings_of()) == f"{text}, so coverage may differ"
    assert caveat(alike, settings_of()).startswith("the split is the data's own, and coverage holds if")
    assert caveat(random, settings_of()) == ""
    assert "is later than the validation" in caveat(random, settings_of(time="year"))
    assert "has other scaffolds" in caveat(random, settings_of(scaffold=True))
    series = replace(random, split_arguments=("val", "test"))
    assert "is later than the validation" in caveat(series, settings_of())


def test_without_an_error_on_the_validation_nothing_is_sharpened() -> None:
    y = torch.arange(12) % 2
    sure = torch.where(y[:, None] == torch.arange(2), 0.7, 0.3).double()
    right, wrong = Rows(sure, y), Rows(sure, torch.cat([1 - y[:1], y[1:]]))
    assert calibrated(NodeLabels(2), right, wrong).temperature == 1
    assert 0.01 < (calibrated(NodeLabels(2), wrong, wrong).temperature or 0) < 1  # 11 of 12 are right at 0.7
    many = Rows(sure, torch.nn.functional.one_hot(y).double())
    assert calibrated(NodeMultiLabels(2), many, many).temperature == 1
