"""The report: the sources of its numbers, its formats against each other, its errors."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gat_pyg.paper.tables.scores import paper_tables
from gat_pyg.report.tables.cells import NONE, Cell, Table, ranges
from gat_pyg.report.tables.formats import latex, latex_table, markdown
from gat_pyg.runs.groups import Key, gathered, lines_of
from tests.report.samples import at, by_hand, named, one, report, row_of, write_lines

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


@given(st.permutations(range(8)))
def test_the_order_of_lines_does_not_matter(order: list[int]):
    results = [
        one(seed=number % 2, config_hash="ab"[number // 4], timestamp=f"2026-01-0{number + 1}T00:00:00+00:00")
        for number in range(8)
    ]
    (runs,) = gathered(at([results[number] for number in order])).values()
    assert [one.setting for one in runs] == ["b", "a"]
    assert [[line.result for line in one.lines] for one in runs] == [results[6:], results[2:4]]


def test_a_score_that_is_nan_is_shown_and_not_compared():
    lines = at([one(value=value, seed=seed) for seed, value in enumerate((83.0, math.nan))])
    assert row_of(named(lines, "table2"), "GAT")[1:4] == ["NaN (2)", "83.0 ± 0.7 (100)", NONE]


# Sources --------------------------------------------------------------------------------------------------------------


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


def test_every_number_of_ours_names_its_lines():
    lines = by_hand()
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


# The formats --------------------------------------------------------------------------------------------------------


def awkward() -> Table:
    text = r"a_b & 50% of $x$ #1 {y} ~ ^ \z <td> | `c` *d* [e] “f” ± − – — ≤ × \"g\""
    row = (Cell(text), Cell("[1] 2"))
    return Table("awkward", text, (("", text), ("group", "b")), (row, row[::-1]), (text,))


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
    text = latex([*paper_tables(by_hand()), awkward()])
    bare = re.sub(r"\\[&%$#_{}]", "", text)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert re.findall(r"\\begin{(\w+)}", text).count("table") == 5
    assert text.count(r"\begin") == text.count(r"\end{")
    assert text.isascii()
    for kind, body in re.findall(r"\\begin{tabular}{((?:l|p{[^}]*})+)}(.*?)\\end{tabular}", text, re.DOTALL):
        width = len(re.findall(r"l|p{", kind))
        for row in body.splitlines():
            if row.endswith(r"\\") and "multicolumn" not in row:
                assert re.sub(r"\\&", "", row).count("&") == width - 1


def test_the_formats_hold_the_same_cells():
    content = [*paper_tables(by_hand()), awkward()]
    expected = [cell.text for table in content for row in table.rows for cell in row]
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


def test_the_command_writes_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_lines(tmp_path / "results.jsonl", by_hand())
    assert report([str(path), str(path), "--out", str(tmp_path / "new" / "out")]) == 0
    output = capsys.readouterr().out
    assert "13 lines of results are in " in output and max(map(len, output.splitlines()[:-1])) < 80
    assert re.search(r"^method +Cora here +", output, re.MULTILINE | re.IGNORECASE), output
    files = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "new" / "out").iterdir()}
    assert sorted(files) == ["report.md", "report.tex"]
    assert all("83.0" in text for text in files.values())


def test_line_numbers_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n" + one().to_json() + "\n\n" + one(seed=1).to_json() + "\n")
    assert [line.number for line in lines_of(path)] == [2, 4]


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
        assert report([str(whole), str(path), "--out", str(tmp_path / "out")]) == 1
        assert re.search(f"^gat-pyg: .*{message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert report([str(whole), "--out", str(whole)]) == 1
    assert "Choose another: --out FOLDER." in capsys.readouterr().err
