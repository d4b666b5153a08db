"""Lines of results gathered into the runs of one setting, and a permutation test between two of them."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..experiments.result import Result, read

RESAMPLES = 9_999  # of a permutation test; with as many ways or fewer, every one is taken


class Line(NamedTuple):
    """A Result and where it stands."""

    result: Result
    file: str
    number: int  # from 1


class Key(NamedTuple):
    """The fields of a Result by which a table finds it."""

    row: str
    dataset: str
    metric: str
    form: str = ""
    study: str = ""


ABLATION, AS_GAT = "ablation", "trained as GAT"  # studies
EARLIER = {  # the method in lines of earlier versions, which have no other fields -> row, form, study
    **{f"Chebyshev (K = {order})": ("Chebyshev", f"K = {order}", "") for order in (2, 3)},
    **{f"GCN-64* ({act})": ("GCN-64*", act, "") for act in ("ReLU", "ELU")},
    **{
        f"GAT: {form}": ("GAT", form, ABLATION)
        for form in (
            "text",
            *(
                f"text, {switch}"
                for switch in (
                    "input dropout for each head",
                    "dropout of W h once more",
                    "biases in the scores",
                    "Glorot for each head",
                    "stop on accuracy",
                    "stop on loss",
                )
            ),
            "code",
            "code, stop on accuracy",
            "code of the authors",
            "skip on every layer",
        )
    },
    **{
        f"{row}, trained as GAT": (row, "", AS_GAT)
        for row in ("MLP", *(f"GraphSAGE-{aggr}" for aggr in ("GCN", "mean", "LSTM", "pool")))
    },
    "GraphSAGE*, trained as GAT (cut off at epoch 2152)": ("GraphSAGE*", "cut off at epoch 2152", AS_GAT),
}


def key_of(result: Result) -> Key:
    """The key of a Result.

    >>> key_of(Result("GAT: text", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373))
    Key(row='GAT', dataset='cora', metric='accuracy', form='text', study='ablation')
    """
    labels = result.row, result.form, result.study
    row, form, study = labels if result.row else EARLIER.get(result.method, (result.method, "", ""))
    return Key(row, result.dataset, result.metric, form, study)


@dataclass(frozen=True)
class Runs:
    """The runs of one method on one data set with one setting: a line for each seed, in the order of the seeds."""

    lines: tuple[Line, ...]

    @property
    def setting(self) -> str:
        """The hash of the settings that the runs share."""
        return self.lines[0].result.config_hash

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.lines[0].result.method

    @property
    def newest(self) -> str:
        """When the last of the runs ended."""
        return max(line.result.timestamp for line in self.lines)

    @property
    def values(self) -> list[float]:
        """The test scores."""
        return [line.result.value for line in self.lines]

    @property
    def mean(self) -> float:
        """The mean test score."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Its sample standard deviation over the seeds; NaN of a single one."""
        return float(np.std(self.values, ddof=1)) if len(self.lines) > 1 else math.nan

    @property
    def val(self) -> float:
        """The mean validation score, by which one of several forms is chosen."""
        return statistics.fmean(line.result.val for line in self.lines)

    @property
    def seconds(self) -> float:
        """The mean seconds of a training."""
        return statistics.fmean(line.result.seconds for line in self.lines)


def lines_of(path: str | Path) -> list[Line]:
    """The lines of one file of results, as a run appends them.

    Raises FileNotFoundError where there is none, and ValueError where a line is torn or there is no line.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{path} {what}. Give the results.jsonl that a run appended to, or train first: gat-pyg dataset=cora."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a table must hold every run or report that it does not
            results = read(path)
    except UserWarning as torn:
        message = str(torn).replace(" and was left out", "")
        raise ValueError(f"{message} Delete that line, or train that seed again and then delete it.") from torn
    if not results:
        raise ValueError(f"{path} holds no line of results. Train first: gat-pyg dataset=cora results={path}.")
    numbers = [number for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line.strip()]
    return [Line(result, str(path), number) for result, number in zip(results, numbers, strict=True)]


def gathered(lines: Iterable[Line]) -> dict[Key, list[Runs]]:
    """The runs of every method, data set and metric: those of each setting together, the newest setting first.

    The newest setting is the one whose last run ended last. Of several lines of one seed with one setting, the newest
    counts.

    >>> result = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373)
    >>> gathered([Line(result, "results.jsonl", 1)])[Key("GAT", "cora", "accuracy")][0].mean
    83.1
    """
    newest: dict[tuple[Key, str, int], Line] = {}
    for line in sorted(lines, key=lambda line: line.result.timestamp):  # stable: where times tie, the later line
        result = line.result
        newest[key_of(result), result.config_hash, result.seed] = line
    together: dict[tuple[Key, str], list[Line]] = {}
    for (key, setting, _), line in sorted(newest.items(), key=lambda item: item[0][2]):
        together.setdefault((key, setting), []).append(line)
    found: dict[Key, list[Runs]] = {}
    for (key, _), its in together.items():
        found.setdefault(key, []).append(Runs(tuple(its)))
    order = sorted(found, key=lambda key: (key.row, key.study, key.form, key.dataset, key.metric))
    return {key: sorted(found[key], key=lambda runs: runs.newest, reverse=True) for key in order}


def forms(runs: Mapping[Key, Sequence[Runs]], key: Key) -> list[Runs]:
    """The newest setting of each form of a row, the best mean validation score first."""
    newest = [its[0] for other, its in runs.items() if other._replace(form="") == key]
    return sorted(newest, key=lambda each: each.val, reverse=True)


def shown(runs: Mapping[Key, Sequence[Runs]], key: Key) -> Runs | None:
    """The runs that stand in a row: the form with the best mean validation score."""
    return next(iter(forms(runs, key)), None)


# Significance -------------------------------------------------------------------------------------------------------


def permutation_test(first: Sequence[float], second: Sequence[float], resamples: int = RESAMPLES) -> float:
    r"""The two-sided p-value of the difference between two groups of independent runs, by a permutation test.

    The statistic is Welch's,

    .. math::
        t = (\bar x - \bar y) / \sqrt{s_x^2 / n_x + s_y^2 / n_y},

    and its distribution is that over the ways of sharing out all the scores into groups of these sizes: every way where
    there are at most `resamples`, else the given one and so many drawn ones, always the same. Without an assumption
    on the scores' distribution this is exact where both methods have the same, and by the studentised statistic right
    for many runs where only their means are the same and their deviations differ. NaN where a group has under two runs
    or a score is NaN.

    >>> permutation_test([83.0, 83.4, 82.9], [81.0, 81.3, 80.8])
    0.1
    """
    n, N = len(first), len(first) + len(second)
    scores = np.array([*first, *second], dtype=np.float64)
    if min(n, N - n) < 2 or np.isnan(scores).any():
        return math.nan
    scores -= scores.mean()
    observed = abs(_welch(scores[None], n)[0]) * (1 - 1e-9)  # what is equal but for rounding is as far apart
    if math.comb(N, n) <= resamples:
        return float((abs(_welch(scores[_every_way(n, N)], n)) >= observed).mean())
    generator = np.random.default_rng(0)
    further = sum(int((abs(_welch(some, n)) >= observed).sum()) for some in _drawn(scores, resamples, generator))
    return (1 + further) / (1 + resamples)


def _welch(scores: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Welch's t of the first n columns against the others, a row each; 0 or infinite where nothing varies."""
    x, y = scores[:, :n], scores[:, n:]
    error = np.sqrt(x.var(1, ddof=1) / n + y.var(1, ddof=1) / y.shape[1])
    difference = x.mean(1) - y.mean(1)
    same = abs(difference) <= 1e-12 * max(1.0, float(abs(scores).max()))
    with np.errstate(divide="ignore", invalid="ignore"):
        t: NDArray[np.float64] = np.where(same, 0.0, difference / error)
    return t


def _every_way(n: int, N: int) -> NDArray[np.int64]:
    """[ways, N]: the numbers 0..N-1 with each choice of n in front."""
    front = np.array(list(itertools.combinations(range(N), n)))
    behind = np.array([sorted(set(range(N)) - set(some)) for some in front.tolist()])
    return np.concatenate([front, behind], axis=1)


def _drawn(scores: NDArray[np.float64], times: int, generator: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """The scores in so many drawn orders, a thousand at a time."""
    for start in range(0, times, 1000):
        yield generator.permuted(np.tile(scores, (min(1000, times - start), 1)), axis=1)
