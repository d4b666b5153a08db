"""Differences from one row: t-tests against their formulas, the choice of the test, the errors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.special import stdtr

from gat_pyg.experiments.result import ERRICA, Result, append
from gat_pyg.report.__main__ import main
from gat_pyg.report.comparison import comparison_table, row_named
from gat_pyg.report.general import rows_of
from gat_pyg.report.runs import Line, Runs, gathered
from gat_pyg.report.significance import t_test


def runs(values: list[float], start: int = 0, method: str = "A", setting: str = "aa") -> Runs:
    results = [
        Result(method, "digits", "accuracy", value, seed, 9, 8, value, 1.0, 0.1, 10, config_hash=setting)
        for seed, value in enumerate(values, start)
    ]
    return Runs(tuple(Line(result, "r.jsonl", n) for n, result in enumerate(results, start=1)))


X, Y = [80.0, 82.0, 81.0, 84.5], [79.0, 80.5, 81.5, 82.0]


def two_sided(t: float, freedom: float) -> float:
    return float(2 * stdtr(freedom, -abs(t)))


def test_shared_seeds_are_paired_by_their_number_and_not_by_their_order() -> None:
    d = np.array(X[1:]) - np.array(Y[:3])  # seeds 1, 2, 3 of both
    p = two_sided(d.mean() / (d.std(ddof=1) / math.sqrt(3)), 2)
    shifted = runs(Y, start=1)
    for second in (shifted, Runs(shifted.lines[::-1])):
        found = t_test(runs(X), second)
        assert found.name == "paired, 3 seeds" and found.p == pytest.approx(p, rel=1e-9)


def test_splits_and_seeds_are_paired_by_both() -> None:
    def on_splits(values: list[float], study: str = "") -> Runs:
        keys = [(split, seed) for split in range(2) for seed in range(2)]
        its = [
            replace(line.result, split=split, seed=seed, study=study)
            for line, (split, seed) in zip(runs(values).lines, keys, strict=True)
        ]
        return Runs(tuple(Line(result, "r", 1) for result in its))

    found = t_test(on_splits(X), on_splits(Y))
    p = stats.ttest_rel(X, Y).pvalue
    assert found.name == "paired, 4 splits and seeds" and found.p == pytest.approx(p, rel=1e-9)
    found = t_test(on_splits(X, ERRICA), on_splits(Y, ERRICA))
    p = stats.ttest_rel(np.reshape(X, (2, 2)).mean(1), np.reshape(Y, (2, 2)).mean(1)).pvalue
    assert found.name == "paired, 2 splits" and found.p == pytest.approx(p, rel=1e-9)


def test_other_seeds_are_compared_by_welch() -> None:
    x, y = np.array(X), np.array(Y[:3])
    a, b = x.var(ddof=1) / 4, y.var(ddof=1) / 3
    p = two_sided((x.mean() - y.mean()) / math.sqrt(a + b), (a + b) ** 2 / (a**2 / 3 + b**2 / 2))
    for start in (4, 3):  # no seed, one seed in common
        found = t_test(runs(X), runs(Y[:3], start))
        assert found.name == "Welch, 4 and 3 runs" and found.p == pytest.approx(p, rel=1e-9)


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
    found = t_test(runs(X), second)
    assert math.isnan(found.p) and found.name == reason


def test_the_table_by_hand() -> None:
    lines = [*runs(X).lines, *runs(Y, method="B").lines, *runs([1.0], method="C").lines]
    table = comparison_table(rows_of(gathered(lines)), "B")
    first, second = [[cell.text for cell in row] for row in table.rows]
    p = t_test(runs(X), runs(Y)).p
    assert first == [
        "digits accuracy (%) ↑", "A", "81.9 ± 1.9 (4)", "80.8 ± 1.3 (4)", "+1.1", f"{p:.4f}", "paired, 4 seeds"
    ]  # fmt: skip
    assert second[1:] == ["C", "1.0 (1)", "80.8 ± 1.3 (4)", "−79.8", "—", "needs two runs of both"]


def test_a_row_is_named_in_full_or_by_its_method() -> None:
    lines = [*runs(X).lines, *runs(Y, method="B").lines, *runs(Y, method="B", setting="bb").lines]
    rows = rows_of(gathered(lines))
    assert row_named(rows, "A") == "A"
    assert row_named(rows, "B (config_hash bb)") == "B (config_hash bb)"
    with pytest.raises(ValueError, match=r"--against 'B' fits 2 rows, expected one of: B \(config_hash .*; B \("):
        row_named(rows, "B")
    with pytest.raises(ValueError, match=r"--against 'D' is no row, expected one of: A; B \("):
        row_named(rows, "D")


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out"
    for line in (*runs(X).lines, *runs(Y, method="B").lines):
        append(line.result, path)
    arguments = [str(path), "--out", str(out)]
    assert main([*arguments, "--against", "B"]) == 0
    assert "## Every row against B." in (out / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    for wrong, message in {("B", "--preset", "paper"): "Leave out --preset paper", ("D",): "is no row"}.items():
        assert main([*arguments, "--against", *wrong]) == 1
        assert message in capsys.readouterr().err
