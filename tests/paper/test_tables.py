"""The paper's tables and that of the strongest networks: hand-made runs, published numbers."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from gat_pyg.paper.published import published
from gat_pyg.paper.tables.scores import fits_paper, paper_tables
from gat_pyg.paper.tables.strong import split_of
from gat_pyg.report.tables.cells import NONE
from gat_pyg.report.write import general_tables
from gat_pyg.runs.significance import t_test_of
from gat_pyg.settings.names import dataset_name
from gat_pyg.sweeps.grid import cells_of
from tests.report.samples import at, by_hand, named, one, report, row_of, seeds, switched, write_lines


def test_a_table_of_hand_made_runs():
    table = named(by_hand(), "table2")
    assert row_of(table, "GAT")[1:5] == ["83.0 ± 1.0 (3)", "83.0 ± 0.7 (100)", "0.0", NONE]
    assert row_of(table, "GCN-64*")[1:4] == ["81.0 ± 0.5 (3)", "81.4 ± 0.5 (100)", "−0.4"]
    assert row_of(named(by_hand(), "table3"), "GAT")[1:] == ["0.975 ± 0.007 (2)", "0.973 ± 0.002 (10)", "+0.002", NONE]


def test_a_row_shows_the_form_with_the_best_validation_score():
    low, high = (
        one(f"Chebyshev (K = {K})", value=84.0 - K, val=77.0 + K, row="Chebyshev", form=f"K = {K}") for K in (2, 3)
    )
    for both in ([low, high], [high, low]):
        lines = at(both)
        table = named(lines, "table2")
        assert row_of(table, "Chebyshev")[1] == "81.0 (1)" and len(table.rows) == 12
        assert table.notes[1:] == (
            "Chebyshev on Cora is Chebyshev (K = 3), by the mean validation scores: Chebyshev (K = 3) 80.00, "
            "Chebyshev (K = 2) 79.00.",
        )
        assert [row_of(named(lines, "runs"), each.method)[3] for each in (low, high)] == ["no", "yes"]


def test_the_study_trained_as_gat_has_a_column_of_table_3():
    as_gat = one("mine", "ppi", 0.9, row="GraphSAGE-mean", study="trained as GAT")
    lines = at([one("GraphSAGE-mean", "ppi", 0.6), as_gat])
    table = named(lines, "table3")
    assert table.columns[-1] == ("PPI", "trained as GAT") and len(table.rows) == 9
    assert row_of(table, "GraphSAGE-mean")[1:] == ["0.600 (1)", "0.598", "+0.002", "0.900 (1)"]
    assert named(lines, "table2").columns[-1] == ("Pubmed", "difference")


def test_every_method_of_the_paper_has_its_row_in_the_papers_order():
    table2, table3 = named([], "table2"), named([], "table3")
    assert " ".join(row[0].text for row in table2.rows) == (
        "MLP ManiReg SemiEmb LP DeepWalk ICA Planetoid Chebyshev GCN MoNet GCN-64* GAT"
    )
    assert [row[0].text for row in table3.rows[-3:]] == ["GraphSAGE*", "Const-GAT", "GAT"]
    assert row_of(table2, "MoNet") == ["MoNet", NONE, "81.7 ± 0.5", NONE, NONE, NONE, NONE, NONE, "78.8 ± 0.3", NONE]
    assert sum(table != "strong" for table, *_ in published()) == 12 * 3 + 9


def test_methods_that_the_paper_lacks_follow_and_other_data_sets_are_among_the_runs():
    lines = at([one("GATv2"), one("MLP", "digits"), switched("loops")])
    assert [row[0].text for row in named(lines, "table2").rows][-2:] == ["GAT", "GATv2"]
    assert row_of(named(lines, "table2"), "GATv2")[1:4] == ["83.0 (1)", NONE, NONE]
    assert row_of(named(lines, "runs"), "MLP")[1:4] == ["digits", "aa", "no"]
    assert row_of(named(lines, "runs"), "MLP")[7:9] == ["500", "400"]


def test_the_ablation_is_a_study_of_rows_and_no_row_of_table_2():
    texts = [switched("text", line.result.value, line.result.seed) for line in by_hand()[:3]]
    lines = at([*(line.result for line in by_hand()), *texts])
    general = next(table for table in paper_tables(lines, others=True) if table.name == "general")
    assert [row[0].text for row in general.rows] == ["GAT: score bias", "GAT: text"]
    assert row_of(named(lines, "table2"), "GAT")[1] == "83.0 ± 1.0 (3)"
    studied = [line for line in lines if line.result.study == "ablation"]
    _, against, *_ = general_tables(studied, "GAT: text")
    assert row_of(against, "Cora accuracy (%) ↑")[1:5] == [
        "GAT: score bias",
        "83.5 ± 0.5 (3)",
        "83.0 ± 1.0 (3)",
        "+0.5",
    ]
    assert not fits_paper(studied) and fits_paper(lines)


def test_the_strongest_networks_stand_beside_published_numbers_of_the_same_kind_of_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cells_of("strong", "datasets=[cora,minesweeper]")
    monkeypatch.setattr("gat_pyg.paper.tables.strong.cells_of", lambda experiment: cells)
    hashes = {dataset_name(cell.dataset.values): cell.hash for cell in cells if split_of(cell) == "given"}
    scores = [0.98, 0.99, 0.97]
    mines = [replace(one("GAT", "minesweeper", value, 0, "roc_auc"), split=n) for n, value in enumerate(scores)]
    lines = at(
        [replace(result, config_hash=hashes["minesweeper"], peak_mib=100.0 + result.split) for result in mines],
        seeds("GAT", "cora", [83.0, 84.0], config_hash=hashes["cora"]),
        seeds("GAT", "cora", [99.0, 99.0], config_hash="other"),
    )
    path, out = write_lines(tmp_path / "r.jsonl", lines), tmp_path / "out"
    assert report([str(path), "--out", str(out), "--preset", "strong", "--format", "csv"]) == 0
    with (out / "strong.csv").open(encoding="utf-8") as file:
        _, cora, mine = csv.reader(file)
    assert cora[1:7] == ["given", "1 × 2", "82.0", "83.5 ± 0.7 (2)", "83.7 ± 0.7 (100)", "−0.2"]
    assert mine[2:7] == ["3 × 1", "82.000", "0.980 ± 0.010 (3)", "0.977 ± 0.007 (3)", "+0.003"]
    assert mine[9] == "102" and mine[10].startswith("num_layers 15, hidden_channels 64, heads 1, norm batch, dropout")
    test = stats.ttest_ind_from_stats(0.98, 0.01, 3, 0.9773, 0.0073, 3, equal_var=False)
    assert float(mine[7]) == pytest.approx(test.pvalue, abs=1e-4)
    assert float(cora[7]) == pytest.approx(t_test_of([83.0, 84.0], 83.72, 0.74, 100), abs=1e-4)
    others = write_lines(tmp_path / "others.jsonl", lines[-1:])
    assert report([str(others), "--out", str(out), "--preset", "strong"]) == 1
    assert "No line has the settings of a row of experiment=strong." in capsys.readouterr().err
