"""The significance of a difference: t-tests by their formulas, the choice of a test."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import scipy.stats
from scipy.special import stdtr

from gat_pyg.runs.groups import Runs
from gat_pyg.runs.result import ERRICA
from gat_pyg.runs.significance import t_test, t_test_of
from tests.report.samples import at, one, seeds


@pytest.mark.parametrize("count", [2, 100])
def test_p_from_a_mean_and_a_deviation_is_that_of_welchs_t_test(count: int):
    rng = np.random.default_rng(0)
    first, second = rng.normal(83, 0.7, 100).round(1).tolist(), rng.normal(82.8, 0.5, count).round(1).tolist()
    p = t_test_of(first, statistics.fmean(second), statistics.stdev(second), count)
    assert p == pytest.approx(scipy.stats.ttest_ind(first, second, equal_var=False).pvalue)


def test_there_is_no_p_where_nothing_varies_or_too_little_was_run():
    for first, *others in (([83.0] * 4, 82.0, 0.0, 4), ([83.0], 82.0, 1.0, 4), ([83.0, 82.0], math.nan, 1.0, 4)):
        assert math.isnan(t_test_of(first, *others))


def runs(values: list[float], start: int = 0) -> Runs:
    return Runs(tuple(at(seeds("A", "digits", values, start))))


X, Y = [80.0, 82.0, 81.0, 84.5], [79.0, 80.5, 81.5, 82.0]


def two_sided(t: float, freedom: float) -> float:
    return float(2 * stdtr(freedom, -abs(t)))


def test_shared_seeds_are_paired_by_number_and_not_by_order() -> None:
    d = np.array(X[1:]) - np.array(Y[:3])  # seeds 1, 2, 3 of both
    p = two_sided(d.mean() / (d.std(ddof=1) / math.sqrt(3)), 2)
    shifted = runs(Y, start=1)
    for second in (shifted, Runs(shifted.lines[::-1])):
        assert t_test(runs(X).scores, second.scores) == (pytest.approx(p, rel=1e-9), "paired, 3 seeds")


def test_splits_and_seeds_are_paired_by_both() -> None:
    def on_splits(values: list[float], study: str = "") -> Runs:
        results = [one(value=v, split=n // 2, seed=n % 2, study=study) for n, v in enumerate(values)]
        return Runs(tuple(at(results)))

    p = pytest.approx(scipy.stats.ttest_rel(X, Y).pvalue, rel=1e-9)
    assert t_test(on_splits(X).scores, on_splits(Y).scores) == (p, "paired, 4 splits and seeds")
    folds = scipy.stats.ttest_rel(np.reshape(X, (2, 2)).mean(1), np.reshape(Y, (2, 2)).mean(1))
    p = pytest.approx(folds.pvalue, rel=1e-9)
    assert t_test(on_splits(X, ERRICA).scores, on_splits(Y, ERRICA).scores) == (p, "paired, 2 splits")


@pytest.mark.parametrize("start", [4, 3], ids=["no seed in common", "one seed in common"])
def test_other_seeds_are_compared_by_welch(start: int) -> None:
    x, y = np.array(X), np.array(Y[:3])
    a, b = x.var(ddof=1) / 4, y.var(ddof=1) / 3
    p = two_sided((x.mean() - y.mean()) / math.sqrt(a + b), (a + b) ** 2 / (a**2 / 3 + b**2 / 2))
    assert t_test(runs(X).scores, runs(Y[:3], start).scores) == (pytest.approx(p, rel=1e-9), "Welch, 4 and 3 runs")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (runs([80.0]), "needs two runs of both"),
        (runs([79.9, 81.9, 80.9, 84.4]), "paired, 4 seeds: nothing varies"),
        (runs([80.0, math.nan]), "paired, 2 seeds: a score is NaN"),
    ],
    ids=["one run", "constant", "NaN"],
)
def test_a_test_without_an_answer_states_why(second: Runs, reason: str) -> None:
    assert t_test(runs(X).scores, second.scores) == (pytest.approx(math.nan, nan_ok=True), reason)
