"""Differences from one row: t-tests against their formulas, the choice of the test, the errors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.special import stdtr

from gat_pyg.report.__main__ import main
from gat_pyg.report.tables.comparison import comparison_table, row_named
from gat_pyg.report.tables.general import rows_of
from gat_pyg.runs.groups import Runs, gathered
from gat_pyg.runs.result import ERRICA
from gat_pyg.runs.significance import t_test
from tests.report.samples import at, one, seeds, write_lines


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

    p = pytest.approx(stats.ttest_rel(X, Y).pvalue, rel=1e-9)
    assert t_test(on_splits(X).scores, on_splits(Y).scores) == (p, "paired, 4 splits and seeds")
    folds = stats.ttest_rel(np.reshape(X, (2, 2)).mean(1), np.reshape(Y, (2, 2)).mean(1))
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


def test_the_table_by_hand() -> None:
    lines = at(seeds("A", "digits", X), seeds("B", "digits", Y), seeds("C", "digits", [1.0]))
    first, second = [[cell.text for cell in row] for row in comparison_table(rows_of(gathered(lines)), "B").rows]
    scores = ["81.9 ± 1.9 (4)", "80.8 ± 1.3 (4)", "+1.1", f"{t_test(runs(X).scores, runs(Y).scores).p:.4f}"]
    assert first == ["digits accuracy (%) ↑", "A", *scores, "paired, 4 seeds"]
    assert second[1:] == ["C", "1.0 (1)", "80.8 ± 1.3 (4)", "−79.8", "—", "needs two runs of both"]


def test_a_row_is_named_in_full_or_by_its_method() -> None:
    lines = at(seeds("A", "digits", X), seeds("B", "digits", Y), seeds("B", "digits", Y, config_hash="bb"))
    rows = rows_of(gathered(lines))
    assert row_named(rows, "A") == "A"
    assert row_named(rows, "B (config_hash bb)") == "B (config_hash bb)"
    with pytest.raises(ValueError, match=r"--against 'B' fits 2 rows, expected one of: B \(config_hash .*; B \("):
        row_named(rows, "B")
    with pytest.raises(ValueError, match=r"--against 'D' is no row, expected one of: A; B \("):
        row_named(rows, "D")


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out"
    write_lines(path, at(seeds("A", "digits", X), seeds("B", "digits", Y)))
    arguments = [str(path), "--out", str(out)]
    assert main([*arguments, "--against", "B"]) == 0
    assert "## Every row against B." in (out / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    for wrong, message in {("B", "--preset", "paper"): "Leave out --preset paper", ("D",): "is no row"}.items():
        assert main([*arguments, "--against", *wrong]) == 1
        assert message in capsys.readouterr().err
