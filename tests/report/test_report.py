"""The report: its numbers against hand-made runs and scipy, its formats against each other, its errors."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from gat_pyg.data import Task
from gat_pyg.paper.published import published
from gat_pyg.paper.tables.data import Counts, counted, data_counts, data_notes, data_table, edges_note
from gat_pyg.paper.tables.scores import paper_tables
from gat_pyg.report.__main__ import main
from gat_pyg.report.tables.cells import NAMES, NONE, Cell, Table, ranges
from gat_pyg.report.tables.formats import html, latex, latex_table, markdown
from gat_pyg.runs.groups import Key, Line, gathered, lines_of
from gat_pyg.runs.result import Result
from gat_pyg.runs.significance import permutation_test
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from tests.report.samples import at, one, seeds, write_lines

real = pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA names no folder with the real data")


def switched(form: str, value: float = 83.0, seed: int = 0) -> Result:
    """A run of the ablation."""
    return one(f"GAT: {form}", value=value, seed=seed, row="GAT", form=form, study="ablation")


def by_hand() -> list[Line]:
    """GAT and GCN-64* on Cora with three seeds, Const-GAT and GAT on PPI with two, a form of the ablation."""
    scores = {"GAT": (83.0, 84.0, 82.0), "GCN-64*": (81.0, 81.5, 80.5)}
    results = [each for method, values in scores.items() for each in seeds(method, "cora", values)]
    results += [switched("score bias", value, seed) for seed, value in enumerate((83.0, 83.5, 84.0))]
    return at(results, seeds("GAT", "ppi", (0.97, 0.98)), seeds("Const-GAT", "ppi", (0.93, 0.94)))


def named(lines: list[Line], name: str, counts: dict[str, Counts | str] | None = None) -> Table:
    (table,) = (table for table in paper_tables(lines, counts) if table.name == name)
    return table


def row_of(table: Table, first: str) -> list[str]:
    (row,) = (row for row in table.rows if row[0].text == first)
    return [cell.text for cell in row]


# The runs -----------------------------------------------------------------------------------------------------------


def test_mean_and_deviation_are_of_the_newest_setting_and_the_newest_line_of_each_seed():
    early, late, last = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3))
    lines = at(
        [
            one(value=10.0, seed=0, config_hash="old", timestamp=early),
            one(value=80.0, seed=0, config_hash="new", timestamp=early),
            one(value=20.0, seed=1, config_hash="old", timestamp=late),
            one(value=84.0, seed=1, config_hash="new", timestamp=last),
            one(value=82.0, seed=0, config_hash="new", timestamp=late),  # instead of the second line
        ]
    )
    new, old = gathered(lines)[Key("GAT", "cora", "accuracy")]
    assert (new.setting, new.values, [line.number for line in new.lines]) == ("new", [82.0, 84.0], [5, 4])
    assert (new.mean, new.std) == (83.0, statistics.stdev([82.0, 84.0]))
    assert (old.setting, old.values) == ("old", [10.0, 20.0])
    table = named(lines, "table2")
    assert row_of(table, "GAT")[1:4] == ["83.0 ± 1.4 (2)", "83.0 ± 0.7 (100)", "0.0"]
    assert any("config_hash new" in note and "old (2 runs)" in note for note in table.notes)


@given(st.permutations(range(8)))
def test_the_order_of_lines_does_not_matter(order: list[int]):
    results = [
        one(seed=number % 2, config_hash="ab"[number // 4], timestamp=f"2026-01-0{number + 1}T00:00:00+00:00")
        for number in range(8)
    ]
    (runs,) = gathered(at([results[number] for number in order])).values()
    assert [one.setting for one in runs] == ["b", "a"]
    assert [[line.result for line in one.lines] for one in runs] == [results[6:], results[2:4]]


# Significance -------------------------------------------------------------------------------------------------------

scores = st.lists(st.integers(790, 850).map(lambda tenths: tenths / 10), min_size=2, max_size=5)


def absolute_t(x: list[float], y: list[float]) -> float:
    """Welch's t of two groups, infinite if only the means differ."""
    error = math.sqrt(statistics.variance(x) / len(x) + statistics.variance(y) / len(y))
    difference = abs(statistics.fmean(x) - statistics.fmean(y))
    return 0.0 if difference < 1e-12 else difference / error if error else math.inf


@settings(deadline=None, max_examples=30)
@given(scores, scores)
@example([84.1, 84.8, 82.2, 82.4], [83.0, 84.9, 81.7, 84.0])  # has ties that differ by rounding
def test_p_of_few_runs_is_the_share_of_permutations_with_a_larger_t(first: list[float], second: list[float]):
    both, observed = [*first, *second], absolute_t(first, second) * (1 - 1e-9)  # equal up to rounding counts
    ways = list(itertools.combinations(range(len(both)), len(first)))
    groups = [([both[i] for i in way], [both[i] for i in range(len(both)) if i not in way]) for way in ways]
    expected = statistics.fmean(absolute_t(*each) >= observed for each in groups)
    assert permutation_test(first, second) == pytest.approx(expected)


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.2])
def test_p_of_many_runs_is_that_of_welchs_t_test(gap: float):
    rng = np.random.default_rng(0)
    first, second = rng.normal(83, 0.7, 100).round(1), rng.normal(83 - gap, 0.5, 100).round(1)
    expected = scipy.stats.ttest_ind(first, second, equal_var=False).pvalue
    error = 4 * math.sqrt(expected * (1 - expected) / 9999) + 0.005  # of drawing, and of the t distribution
    assert abs(permutation_test(first.tolist(), second.tolist()) - expected) < error


def test_p_where_nothing_varies_or_too_little_was_run():
    assert permutation_test([83.0] * 4, [83.0] * 4) == 1
    assert permutation_test([0.1 + 0.2] * 4, [0.3] * 4) == 1  # equal but for rounding
    assert permutation_test([83.0] * 4, [82.0] * 4) == 2 / 70
    assert math.isnan(permutation_test([83.0], [82.0, 81.0]))
    assert math.isnan(permutation_test([83.0, math.nan], [82.0, 81.0]))


def test_a_score_that_is_nan_is_shown_and_not_compared():
    lines = at([one(value=value, seed=seed) for seed, value in enumerate((83.0, math.nan))])
    assert row_of(named(lines, "table2"), "GAT")[1:4] == ["NaN (2)", "83.0 ± 0.7 (100)", NONE]


def test_significance_stands_beside_both_scores():
    table = named(by_hand(), "significance")
    assert row_of(table, "Cora") == ["Cora", "83.0 ± 1.0 (3)", "GCN-64*", "81.0 ± 0.5 (3)", "+2.0", "0.1000"]
    assert row_of(table, "PPI")[4:] == ["+0.040", "0.3333"]
    assert row_of(table, "Pubmed")[3:] == [NONE] * 3


# The tables ---------------------------------------------------------------------------------------------------------


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


def test_rows_that_were_not_trained_in_float32_are_noted():
    fast = "cpu x86_64, 1 thread, bf16-mixed"
    lines = at([one(seed=0, device=fast), one(seed=1, device=fast), one("GCN", device="cpu x86_64, 2 threads")])
    assert "In bf16-mixed precision, not in float32: GAT on Cora." in named(lines, "table2").notes


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
    assert sum(table != "strong" for table, *_ in published()) == 11 * 4 + 12 * 3 + 9


def test_methods_that_the_paper_lacks_follow_and_other_data_sets_are_among_the_runs():
    lines = at([one("GATv2"), one("MLP", "digits"), switched("loops")])
    assert [row[0].text for row in named(lines, "table2").rows][-2:] == ["GAT", "GATv2"]
    assert row_of(named(lines, "table2"), "GATv2")[1:4] == ["83.0 (1)", NONE, NONE]
    assert row_of(named(lines, "runs"), "MLP")[1:4] == ["digits", "aa", "no"]
    assert row_of(named(lines, "runs"), "MLP")[7:9] == ["500", "400"]


def test_seeds_of_different_versions_are_noted():
    versions = ({"torch": "2.13", "gat_pyg source": "a"}, {"torch": "2.13", "gat_pyg source": "b"})
    its = [one(seed=seed, versions=versions[seed // 2]) for seed in range(3)]
    (note,) = (note for note in named(at(its), "runs").notes if "versions" in note)
    assert note == (
        "GAT on Cora (aa): the mean is over runs of different versions: gat_pyg source a (seeds 0–1), b (seeds 2)."
    )
    assert not any("versions" in note for note in named(at(its[:2]), "runs").notes)


def test_runs_that_are_no_better_than_the_majority_class_are_noted():
    low = [one("GAT", "photo", 25.0 + seed, seed, majority=26.0) for seed in range(3)]
    fine, old = one("MLP", "photo", 26.1, majority=26.0), one("GCN", "photo", 1.0)  # recorded without it
    (note,) = (note for note in named(at([*low, fine, old]), "runs").notes if "majority" in note)
    assert note.startswith("GAT on photo (aa): 2 of 3 runs are no better than")
    assert "(26.0 %)" in note


def test_the_ablation_stands_beside_gat_with_its_seconds():
    texts = [switched("text", line.result.value, line.result.seed) for line in by_hand()[:3]]
    table = named(at([*(line.result for line in by_hand()), *texts]), "ablation")
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["Cora", "text", "83.0 ± 1.0 (3)", NONE, NONE, "9.0"],
        ["Cora", "score bias", "83.5 ± 0.5 (3)", "+0.5", "0.7000", "9.0"],
        ["Cora", "GAT in Table 2", "83.0 ± 1.0 (3)", "0.0", "1.0000", "9.0"],
    ]
    text = named(at([switched("skip"), switched("text", 80.0), one("GAT", value=82.0)]), "ablation")
    assert [[cell.text for cell in row][1:4] for row in text.rows] == [
        ["text", "80.0 (1)", NONE],
        ["skip", "83.0 (1)", "+3.0"],
        ["GAT in Table 2", "82.0 (1)", "+2.0"],
    ]
    without = named(at([switched("score bias")]), "ablation")
    assert [cell.text for cell in without.rows[0]] == ["Cora", "score bias", "83.0 (1)", NONE, NONE, "9.0"]
    empty = named(at([one()]), "ablation")
    assert not empty.rows and empty.notes[-1].endswith("their study is “ablation”.")


def test_every_number_of_ours_names_its_lines():
    lines = by_hand()
    sources = [row[1].source for row in named(lines, "table2").rows]
    assert sources.count("no lines") == 10
    assert "results.jsonl, lines 1–3; config_hash aa" in sources
    places = [cell.text for row in named(lines, "runs").rows for cell in row[-1:]]
    listed = [
        range(int(low), int(high or low) + 1)
        for low, high in re.findall(r"(\d+)(?:–(\d+))?", "; ".join(places).replace("[1]", ""))
    ]
    assert sorted(number for numbers in listed for number in numbers) == [line.number for line in lines]
    assert [[cell.text for cell in row] for row in named(lines, "files").rows] == [["[1]", "results.jsonl", "13"]]


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_each_number_once(numbers: set[int]):
    parts = [part.split("–") for part in ranges(numbers).split(", ")] if numbers else []
    assert [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)] == sorted(numbers)


# Table 1 ------------------------------------------------------------------------------------------------------------


def test_counts_by_hand():
    # 0 - 1 listed twice over, 1 - 2, a loop at 2; node 3 has no neighbours
    links = torch.tensor([[0, 1, 0, 1, 1, 2, 2, 2], [1, 0, 1, 0, 2, 1, 2, 2]])
    edge_index = torch.tensor([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]])
    masks = {f"{split}_mask": torch.arange(4) == node for node, split in enumerate(("train", "val", "test"))}
    data = Data(torch.eye(4), edge_index, y=torch.tensor([0, 1, 1, 0]), **masks)
    counts = counted(Task("cora", [data], [data], [data], 4, NodeLabels(2)), [links])
    each = {f"{split} {noun}": 1 for split in ("train", "val", "test") for noun in ("nodes", "graphs")}
    assert counts.numbers == {"nodes": 4, "graphs": 1, "edges": 2, "features": 4, "classes": 2, **each}
    assert (counts.listed, counts.loops, counts.looped, set(counts.unknown.values())) == (8, 2, 1, {0})
    note = edges_note(counts, printed=4)
    assert "the paper's 4 is half" in note
    assert "1 links that are listed more than once and 1 loops" in note
    assert "2 edges are left, 2 × 2 = 4 directed" in note


def test_unknown_labels_of_graphs_are_counted_and_noted():
    known, unknown = torch.tensor([[0.0, 1.0]]), torch.full((1, 2), math.nan)
    nothing = torch.empty(2, 0, dtype=torch.long)

    def graph(*y: torch.Tensor) -> Data:
        return Data(torch.ones(len(y), 3), nothing, y=torch.cat(y))

    task = Task("ppi", [graph(known)], [graph(known, unknown)], [graph(known)], 3, NodeMultiLabels(2))
    counts = counted(task, [nothing] * 3)
    assert counts.unknown == {"train": 0, "val": 1, "test": 0}
    assert [counts.numbers[name] for name in ("nodes", "edges", "graphs")] == [4, 0, 3]
    note, training = named([], "table3", {"ppi": counts}).notes
    assert training.startswith("As experiment=table3 has them, GAT and Const-GAT are the authors' code and stop on")
    assert note == (
        "The labels of 1 of the 2 validation nodes of PPI are unknown here and left out; "
        "test scores are of all test nodes."
    )
    assert "not the files that it used" in " ".join(data_notes("ppi", counts))


def test_data_that_cannot_be_counted_has_the_reason_in_its_place():
    table = data_table({"cora": "no files"})
    assert table.notes == ("Cora was not counted: no files",)
    assert {row[1] for row in table.rows} == {Cell(NONE, "no files")}
    assert [row[2].text for row in table.rows[:3]] == ["Transductive", "2708 (1 graph)", "5429"]


@real
def test_table_1_of_the_real_citation_networks():
    counts = {name: data_counts(name, None) for name in ("cora", "citeseer", "pubmed")}
    table = data_table(counts)
    different = [row[0].text for row in table.rows if any(row[n].text != row[n + 1].text for n in (1, 3, 5))]
    assert different == ["# Edges"]
    for name, (repeated, loops) in {"cora": (151, 0), "citeseer": (56, 124), "pubmed": (11, 3)}.items():
        one = counts[name]
        assert isinstance(one, Counts)
        assert one.loops == 2 * loops
        assert one.numbers["edges"] + loops + repeated == published()["1", "edges", name].mean == one.listed / 2


@real
def test_table_1_of_the_real_proteins():
    one = data_counts("ppi", None)
    assert isinstance(one, Counts)
    nodes, edges = one.numbers["nodes"], one.numbers["edges"]
    assert (nodes, edges, one.numbers["train nodes"], one.numbers["test nodes"]) == (56944, 793632, 44906, 5524)
    assert (one.listed, one.looped) == (2 * edges + nodes, nodes)
    assert "25084 more" in data_notes("ppi", one)[0]


# The formats --------------------------------------------------------------------------------------------------------


def page_of(text: str) -> ElementTree.Element:
    """A page as XML, which it is but for its doctype and the open `<meta>`: an error if it is not well formed."""
    return ElementTree.fromstring(re.sub(r"<!DOCTYPE html>|<meta [^>]*>", "", text))


def cells_of(page: ElementTree.Element) -> list[str]:
    return ["".join(cell.itertext()) for cell in page.iter("td")]


def awkward() -> Table:
    text = r"a_b & 50% of $x$ #1 {y} ~ ^ \z <td> | `c` *d* [e] “f” ± − – — ≤ × \"g\""
    row = (Cell(text, source="<\"'&>"), Cell("[1] 2"))
    return Table("awkward", text, (("", text), ("group", "b")), (row, row[::-1]), (text,))


def test_html_is_well_formed_and_loads_nothing():
    text = html([*paper_tables(by_hand(), {"cora": "<no files>"}), awkward()])
    page = page_of(text)
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert {each.tag for each in page.iter()}.isdisjoint({"script", "link", "img", "iframe", "a"})
    assert awkward().rows[0][0].text in cells_of(page)
    assert "<\"'&>" in [each.get("title") for each in page.iter()]
    ids = [each.get("id") for each in page.iter() if each.get("id")]
    assert len(ids) == len(set(ids)) == 8


def test_latex_escapes_special_characters():
    text = latex_table(awkward())
    row = text.split(r"\midrule" + "\n")[1].splitlines()
    assert row[0].startswith(
        r"a\_b \& 50\% of \$x\$ \#1 \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}z $<$td$>$ $|$ `c`"
    )
    assert r"``f'' $\pm$ $-$ -- --- $\leq$ $\times$ \textbackslash{}\textquotedbl{}g" in row[0]
    assert row[1].startswith(r"\relax[1] 2 & ")
    assert r"\cmidrule(lr){2-2}" in text


def test_latex_is_balanced_and_each_row_has_a_cell_for_each_column():
    text = latex([*paper_tables(by_hand(), {}), awkward()])
    bare = re.sub(r"\\[&%$#_{}]", "", text)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert re.findall(r"\\begin{(\w+)}", text).count("table") == 8
    assert text.count(r"\begin") == text.count(r"\end{")
    assert text.isascii()
    for kind, body in re.findall(r"\\begin{tabular}{((?:l|p{[^}]*})+)}(.*?)\\end{tabular}", text, re.DOTALL):
        width = len(re.findall(r"l|p{", kind))
        for row in body.splitlines():
            if row.endswith(r"\\") and "multicolumn" not in row:
                assert re.sub(r"\\&", "", row).count("&") == width - 1


def test_the_three_formats_hold_the_same_cells():
    content = [*paper_tables(by_hand(), dict.fromkeys(NAMES, "none")), awkward()]
    expected = [cell.text for table in content for row in table.rows for cell in row]
    assert cells_of(page_of(html(content))) == expected
    rows = [line for line in markdown(content).splitlines() if line.startswith("| ")]
    heads = [row for row in rows if "---" not in row]
    cells = [re.sub(r"\\(.)", r"\1", cell) for row in heads for cell in re.split(r" ?(?<!\\)\| ?", row)[1:-1]]
    count = 0
    for table in content:
        head = [f"{group} {name}".strip() for group, name in table.columns]
        body = [cell.text for row in table.rows for cell in row]
        assert cells[count : count + len(head) + len(body)] == head + body
        count += len(head) + len(body)
    numbers = re.compile(r"\d+(?:\.\d+)?")
    bodies = re.findall(r"\\midrule\n(.*?)\\bottomrule", latex(content), re.DOTALL)
    assert numbers.findall(" ".join(bodies)) == numbers.findall(" ".join(expected))


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_writes_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_lines(tmp_path / "results.jsonl", by_hand())
    assert main([str(path), str(path), "--out", str(tmp_path / "new" / "out"), "--no-data"]) == 0
    output = capsys.readouterr().out
    assert "13 lines of results are in " in output and max(map(len, output.splitlines()[:-1])) < 80
    assert re.search(r"^method +Cora here +", output, re.MULTILINE | re.IGNORECASE), output
    files = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "new" / "out").iterdir()}
    assert sorted(files) == ["report.html", "report.md", "report.tex"]
    assert all("83.0" in text for text in files.values())
    assert "Table 1" not in files["report.md"]
    titles = [each.get("title", "") for each in page_of(files["report.html"]).iter("td")]
    assert any(f"{path}, lines 1–3; config_hash aa" in title for title in titles)


def test_line_numbers_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n" + one().to_json() + "\n\n" + one(seed=1).to_json() + "\n")
    assert [line.number for line in lines_of(path)] == [2, 4]


def test_data_that_cannot_be_read_leaves_the_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(name: str, root: Path) -> Task:
        raise FileNotFoundError(f"{name}: x not found in {root}")

    monkeypatch.setattr("gat_pyg.paper.tables.data.planetoid", no_network)
    monkeypatch.setattr("gat_pyg.paper.tables.data.ppi", functools.partial(no_network, "ppi"))
    path = write_lines(tmp_path / "results.jsonl", by_hand())
    assert main([str(path), "--out", str(tmp_path), "--data-root", "there"]) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Cora was not counted: cora: x not found in there" in text
    assert "83.0 ± 1.0 (3)" in text


def test_unreadable_files_are_errors_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = write_lines(tmp_path / "whole.jsonl", by_hand())
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole.read_bytes()[:-40])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    wrong = {
        tmp_path / "none.jsonl": "none.jsonl does not exist. Give the results.jsonl",
        tmp_path: "is a folder. Give the results.jsonl",
        torn: r"torn.jsonl, line 13 is torn or not a Result: .*Delete that line, or train that seed again",
        empty: "empty.jsonl holds no line of results. Train first: gat-pyg",
    }
    for path, message in wrong.items():
        assert main([str(whole), str(path), "--out", str(tmp_path / "out"), "--no-data"]) == 1
        assert re.search(f"^gat_pyg.report: .*{message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert main([str(whole), "--out", str(whole), "--no-data"]) == 1
    assert "Choose another: --out FOLDER." in capsys.readouterr().err
