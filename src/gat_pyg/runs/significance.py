"""The significance of the difference between two groups of runs: a permutation test and t-tests, by SciPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy  # which imports its parts when they are used
from numpy.typing import NDArray

RESAMPLES = 9_999  # of a permutation test; it is exact if there are no more permutations than these


class Significance(NamedTuple):
    """A p-value, and the test with its number of runs; NaN and the reason if there is no p-value."""

    p: float
    name: str


def permutation_test(first: Sequence[float], second: Sequence[float], resamples: int = RESAMPLES) -> float:
    r"""Return the two-sided p-value of the difference between two groups of independent runs, by a permutation test.

    The statistic is the absolute value of Welch's,

    .. math::
        t = (\bar x - \bar y) / \sqrt{s_x^2 / n_x + s_y^2 / n_y},

    and its distribution is taken over all permutations of the scores between the groups, or over `resamples` random
    ones (always the same) and the observed one if there are more. The test is exact if both methods have the same
    distribution, whatever it is. Since the statistic is studentised, it is also asymptotically valid if only the means
    are equal. The result is NaN if a group has fewer than two runs or a score is NaN.

    >>> permutation_test([83.0, 83.4, 82.9], [81.0, 81.3, 80.8])
    0.1
    """
    if min(len(first), len(second)) < 2 or np.isnan([*first, *second]).any():
        return math.nan
    center = np.mean([*first, *second])
    # SciPy's two-sided p-value is twice that of the smaller tail, hence |t| and "greater"
    options = {"vectorized": True, "alternative": "greater", "n_resamples": resamples, "batch": 1000, "rng": 0}
    result = scipy.stats.permutation_test((np.array(first) - center, np.array(second) - center), _welch, **options)
    return float(result.pvalue)


def _welch(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the absolute value of Welch's t, rounded so that SciPy counts values that differ by rounding as equal."""
    error = np.sqrt(x.var(axis, ddof=1) / x.shape[axis] + y.var(axis, ddof=1) / y.shape[axis])
    difference = abs(x.mean(axis) - y.mean(axis))
    same = difference <= 1e-12 * max(1.0, float(abs(x).max()), float(abs(y).max()))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(same, 0.0, difference / error)
    finite: NDArray[np.float64] = t.clip(max=1e9).round(9)  # infinite or NaN if nothing varies
    return finite


Scores: TypeAlias = Mapping[tuple[int, int | None], float]  # by split and seed, as `Runs.scores`


def t_test(x: Scores, y: Scores) -> Significance:
    """Return the two-sided t-test of the difference of the means of two groups of runs.

    It is paired by split and seed if the runs share at least two, over these alone; else it is Welch's.
    """
    pairs = sorted(x.keys() & y.keys())
    if len(pairs) > 1:
        splits, seeds = map(set, zip(*pairs, strict=True))
        kind = "seeds" if len(splits) == 1 else "splits" if seeds == {None} else "splits and seeds"
        name, samples = f"paired, {len(pairs)} {kind}", [np.array([x[pair] - y[pair] for pair in pairs])]
    elif min(len(x), len(y)) > 1:
        name, samples = f"Welch, {len(x)} and {len(y)} runs", [np.array([*x.values()]), np.array([*y.values()])]
    else:
        return Significance(math.nan, "needs two runs of both")
    if not all(np.isfinite(sample).all() for sample in samples):
        return Significance(math.nan, f"{name}: a score is NaN")
    if not any(map(_varies, samples)):
        return Significance(math.nan, f"{name}: nothing varies")
    test = (
        scipy.stats.ttest_1samp(samples[0], 0.0)
        if len(samples) == 1
        else scipy.stats.ttest_ind(*samples, equal_var=False)
    )
    return Significance(float(test.pvalue), name)


def t_test_of(values: Sequence[float], mean: float, std: float, count: int) -> float:
    """Return the two-sided p-value of Welch's t-test between scores and a published mean of `count` runs.

    The result is NaN with fewer than two of either, or an unknown deviation.

    >>> round(t_test_of([83.0, 83.4, 82.9], 81.0, 0.3, 10), 5)
    0.00046
    """
    if min(len(values), count) < 2 or not np.isfinite([*values, mean, std]).all():
        return math.nan
    x = np.array(values)
    test = scipy.stats.ttest_ind_from_stats(x.mean(), x.std(ddof=1), len(x), mean, std, count, equal_var=False)
    return float(test.pvalue)


def _varies(values: NDArray[np.float64]) -> bool:
    return bool(np.ptp(values) > 1e-9 * max(1.0, float(abs(values).max())))
