"""The significance of the difference between two groups of runs: t-tests, by SciPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy  # which imports its parts when they are used
from numpy.typing import NDArray


class Significance(NamedTuple):
    """A p-value, and the test with its number of runs; NaN and the reason if there is no p-value."""

    p: float
    name: str


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
    """Return the two-sided p-value of Welch's t-test between scores and the mean of `count` others, such as published.

    Runs are not paired. The result is NaN with fewer than two of either, an unknown deviation, or if nothing varies.

    >>> round(t_test_of([83.0, 83.4, 82.9], 81.0, 0.3, 10), 5)
    0.00046
    """
    x = np.array(values)
    if min(len(x), count) < 2 or not np.isfinite([*x, mean, std]).all() or not (_varies(x) or std):
        return math.nan
    test = scipy.stats.ttest_ind_from_stats(x.mean(), x.std(ddof=1), len(x), mean, std, count, equal_var=False)
    return float(test.pvalue)


def _varies(values: NDArray[np.float64]) -> bool:
    return bool(np.ptp(values) > 1e-9 * max(1.0, float(abs(values).max())))
