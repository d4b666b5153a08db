"""The general table: its ranks and rows by hand, its formats, the choice between it and the paper's tables."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from gat_pyg.paper.tables.scores import fits_paper
from gat_pyg.report.tables.comparison import comparison_table, row_named
from gat_pyg.report.tables.formats import csv_table, latex_table, markdown_table
from gat_pyg.report.tables.general import columns_of, general_table, rows_of
from gat_pyg.report.write import general_tables
from gat_pyg.runs.groups import Line, gathered
from gat_pyg.runs.result import ERRICA, Result
from tests.report.samples import at, one, report, seeds, write_lines


def configured(folder: Path, setting: str, text: str, value: float = 80.0) -> Result:
    folder.mkdir()
    (folder / "config.yaml").write_text(text)
    return one("GAT", "digits", value, config_hash=setting, run_dir=str(folder))


def three() -> list[Line]:
    """Three methods on a data set whose scores are better if lower, two of them on one where higher is better."""
    return at(
        seeds("A", "zinc", [0.3, 0.5], metric="mae"),
        seeds("B", "zinc", [0.2, 0.2], metric="mae"),
        seeds("C", "zinc", [0.9], metric="mae"),
        seeds("A", "digits", [90.0, 92.0]),
        seeds("B", "digits", [80.0, 81.0]),
    )


def test_cells_and_ranks_by_hand() -> None:
    table = general_table(rows_of(gathered(three())))
    assert table.columns == (("", "Method"), ("digits", "accuracy (%) ↑"), ("zinc", "MAE ↓"))
    assert [[(cell.text, cell.rank) for cell in row] for row in table.rows] == [
        [("A", 0), ("91.0 ± 1.4 (2)", 1), ("0.400 ± 0.141 (2)", 2)],
        [("B", 0), ("80.5 ± 0.7 (2)", 2), ("0.200 ± 0.000 (2)", 1)],
        [("C", 0), ("—", 0), ("0.900 (1)", 0)],
    ]


def test_baselines_have_rows_with_their_mean_over_the_splits() -> None:
    values = [(0, {"linear model": 70.0, "random forest": 90.0}), (1, {"linear model": 72.0, "random forest": 80.0})]
    lines = [one("GAT", "own", 75.0, seed, split=split, baselines=b) for seed in (0, 1) for split, b in values]
    table = general_table(rows_of(gathered(at([*lines, one("GAT", "cora", 83.0)]))))
    assert [[cell.text for cell in row] for row in table.rows[1:]] == [
        ["baseline: linear model", "—", "71.0 ± 1.4"],
        ["baseline: random forest", "—", "85.0 ± 7.1"],
    ]
    assert {cell.rank for row in table.rows[1:] for cell in row} == {0}
    assert any("without a network" in note for note in table.notes)
    assert not any("without a network" in note for note in general_table(rows_of(gathered(three()))).notes)


def test_of_several_configurations_the_best_by_validation_is_ranked() -> None:
    metrics = {"accuracy": (82.0, 81.0, 80.0, 70.0), "mae": (0.3, 0.4, 0.5, 0.6)}  # validation scores, the best first
    for metric, val in metrics.items():
        tested = (80.0, 79.0, 90.0, 60.0) if metric == "accuracy" else (0.4, 0.5, 0.1, 0.7)
        names = (("A", "a"), ("B", "b"), ("A", "c"), ("C", "d"))
        its = zip(names, tested, val, strict=True)
        lines = at([one(name, "d", value, metric=metric, val=v, config_hash=c) for (name, c), value, v in its])
        table = general_table(rows_of(gathered(lines)))
        assert {row[0].text: row[1].rank for row in table.rows} == {
            **{"A (config_hash a)": 1, "A (config_hash c)": 0},  # the best of the test is not that of the validation
            **{"B": 2, "C": 0},
        }


def test_methods_trained_with_different_settings_are_noted(tmp_path: Path) -> None:
    text = "training: {lr: %s, patience: %d, batch_size: 1}\nmodel: {_target_: %s, %s: 4, num_layers: %d}\n"
    kinds = {
        "GAT": (0.01, 100, "GAT", "heads", 2),
        "GCN": (0.01, 10, "GCN", "act", 4),
        "GIN": (0.01, 10, "I", "act", 4),
    }
    results = [replace(configured(tmp_path / name, name, text % kinds[name]), method=name) for name in kinds]
    note = general_table(rows_of(gathered(at(results)))).notes[1]
    assert note == (
        "On digits, the methods were not trained with the same settings. "
        "GAT: num_layers 2, patience 100; GCN: num_layers 4, patience 10; GIN: num_layers 4, patience 10."
    )
    assert len(general_table(rows_of(gathered(at(results[1:])))).notes) == 1  # these two have the same
    grid = [replace(result, method="GAT") for result in results[:2]]
    assert len(general_table(rows_of(gathered(at(grid)))).notes) == 1  # their rows have them


def test_equal_and_missing_scores_have_the_ranks_they_deserve() -> None:
    tied = at(*(seeds(name, "d", [value]) for name, value in zip("ABCD", (2.0, 2.0, 1.0, float("nan")), strict=True)))
    assert [row[1].rank for row in general_table(rows_of(gathered(tied))).rows] == [1, 1, 2, 0]
    alone = general_table(rows_of(gathered(at(seeds("A", "d", [2.0])))))
    assert alone.rows[0][1].rank == 0


def test_configurations_differ_in_words(tmp_path: Path) -> None:
    same = "dataset: {root: %s}\nseed: %d\ntraining: {lr: 0.1}\nmodel: {heads: %d, norm: %s}\n"
    results = [
        configured(tmp_path / "a", "a", same % ("x", 0, 4, "batch")),
        configured(tmp_path / "b", "b", same % ("y", 1, 8, "null")),
    ]
    other = [replace(results[1], dataset="wine", config_hash="c")]  # of one configuration
    third = configured(tmp_path / "c", "d", same % ("z", 0, 2, "layer"))
    other.append(replace(third, dataset="iris"))  # of settings that no other has
    rows = rows_of(gathered(at(results, other)))
    assert {label: [column.dataset for column in its] for label, its in rows.items()} == {
        "GAT (heads 4, norm batch)": ["digits"],
        "GAT (heads 8)": ["digits", "wine"],
        "GAT": ["iris"],
    }


def test_configurations_without_differing_settings_keep_their_hash(tmp_path: Path) -> None:
    results = [configured(tmp_path / name, name, "model: {heads: 4}\n") for name in "ab"]
    lost = seeds("GAT", "digits", [70.0], config_hash="lost")
    assert set(rows_of(gathered(at(results, lost)))) == {f"GAT (config_hash {name})" for name in ("a", "b", "lost")}


def test_splits_count_together_and_by_erricas_protocol_as_folds() -> None:
    values = {(0, 0): 70.0, (0, 1): 74.0, (1, 0): 80.0, (1, 1): 88.0}
    its = [replace(seeds("GIN", "mutag", [v])[0], split=split, seed=seed) for (split, seed), v in values.items()]
    chosen = [replace(one, method="GIN, Errica's protocol", row="GIN", study=ERRICA) for one in its]
    table = general_table(rows_of(gathered(at(its, chosen))))
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["GIN", "78.0 ± 7.8 (4)"],
        ["GIN, Errica's protocol", "78.0 ± 8.5 (2)"],  # of 72 and 84
    ]


def test_the_number_of_the_split_is_no_configuration(tmp_path: Path) -> None:
    text = "model: {heads: %d}\nsplit: {split: %d, fold: 0, folds: null}\ndataset: {split: %d, fold: 0, folds: null}\n"
    results = [configured(tmp_path / name, name, text % (heads, heads, heads)) for name, heads in (("a", 4), ("b", 8))]
    assert set(rows_of(gathered(at(results)))) == {"GAT (heads 4)", "GAT (heads 8)"}


def test_data_sets_of_one_name_have_a_column_each(tmp_path: Path) -> None:
    text = "model: {heads: 4}\nsplit: {val: %d, seed: 0, split: 0}\ndataset: {val: %d, path: %s}\ncontent: %s\n"
    kinds = {"a": (50, 50, "p", "c"), "b": (10, 10, "p", "c"), "c": (50, 50, "q", "d")}
    results = [replace(configured(tmp_path / name, name, text % kind), data=name) for name, kind in kinds.items()]
    other = replace(results[0], method="GCN", config_hash="e")  # on the data of the first
    rows = rows_of(gathered(at(results, [other])))
    heads = [f"digits (content {content}, val {val})" for content, val in (("c", 10), ("c", 50), ("d", 50))]
    assert [column.heads[0] for column in columns_of(rows)] == heads
    assert {label: len(its) for label, its in rows.items()} == {"GAT": 3, "GCN": 1}
    assert [row[2].rank for row in general_table(rows).rows] == [0, 0]  # both 80
    gone = [replace(one, run_dir="", data=name) for name, one in zip("xyz", results, strict=True)]
    assert [c.data for c in columns_of(rows_of(gathered(at(gone))))] == ["data x", "data y", "data z"]


def test_every_format_shows_the_ranks() -> None:
    table = general_table(rows_of(gathered(three())))
    assert "| A | **91.0 ± 1.4 (2)** | <u>0.400 ± 0.141 (2)</u> |" in markdown_table(table)
    assert r"A & \textbf{91.0 $\pm$ 1.4 (2)} & \underline{0.400 $\pm$ 0.141 (2)} \\" in latex_table(table)
    assert latex_table(table).isascii()
    head, first, *_ = csv.reader(csv_table(table).splitlines())
    assert (head[1], first) == ("digits accuracy (%) ↑", ["A", "91.0 ± 1.4 (2)", "0.400 ± 0.141 (2)"])


def test_lines_choose_the_tables(tmp_path: Path) -> None:
    assert fits_paper(at(seeds("Mine", "cora", [80.0]))) and not fits_paper(three())
    study = [one("GAT", "cora", config_hash=setting) for setting in "ab"]
    assert not fits_paper(at(study)) and fits_paper(at([*study, one("GCN", "cora")]))
    assert all(row[3].text == "yes" for row in general_tables(three())[1].rows)
    path, out = write_lines(tmp_path / "r.jsonl", three()), tmp_path / "out"
    assert report([str(path), "--out", str(out)]) == 0
    assert "Table 2" not in (out / "report.md").read_text(encoding="utf-8")
    write_lines(path, at([one()]))
    assert report([str(path), "--out", str(out)]) == 0
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "Table 2" in text and "**91.0 ± 1.4 (2)**" in text
    assert report([str(path), "--out", str(out), "--preset", "paper"]) == 0
    assert "**" not in (out / "report.md").read_text(encoding="utf-8")
    assert report([str(path), "--out", str(out), "--preset", "general"]) == 0
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "Table 2" not in text and "Cora accuracy (%) ↑" in text


@pytest.mark.parametrize(("form", "start"), [("csv", "Method,"), ("input", "\\begin{table}")])
def test_a_file_for_each_table(tmp_path: Path, form: str, start: str) -> None:
    path = write_lines(tmp_path / "r.jsonl", three())
    assert report([str(path), "--out", str(tmp_path / "out"), "--format", form]) == 0
    suffix = {"csv": "csv", "input": "tex"}[form]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"{n}.{suffix}" for n in ("general", "runs", "files")
    }
    assert (tmp_path / "out" / f"general.{suffix}").read_text(encoding="utf-8").startswith(start)


# Differences from one row ---------------------------------------------------------------------------------------------


X, Y = [80.0, 82.0, 81.0, 84.5], [79.0, 80.5, 81.5, 82.0]


def test_the_table_by_hand() -> None:
    lines = at(seeds("A", "digits", X), seeds("B", "digits", Y), seeds("C", "digits", [1.0]))
    first, second = [[cell.text for cell in row] for row in comparison_table(rows_of(gathered(lines)), "B").rows]
    scores = ["81.9 ± 1.9 (4)", "80.8 ± 1.3 (4)", "+1.1", f"{stats.ttest_rel(X, Y).pvalue:.4f}"]
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
    assert report([*arguments, "--against", "B"]) == 0
    assert "## Every row against B." in (out / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    for wrong, message in {("B", "--preset", "paper"): "Leave out --preset paper", ("D",): "is no row"}.items():
        assert report([*arguments, "--against", *wrong]) == 1
        assert message in capsys.readouterr().err
