"""Cells, types of columns, targets and ids: tables of cells with the values that are due, and laws over all types."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from gat_pyg.data import Task, from_pandas, tables
from gat_pyg.data.rows import read_rows
from gat_pyg.data.tables.columns import Column
from gat_pyg.data.tables.features import Features
from gat_pyg.data.tables.files import frame_of, read_table
from gat_pyg.data.tables.split_columns import warn_of_splits
from gat_pyg.data.tables.targets import Targets
from gat_pyg.tasks.preparation import Preparation

NAN = float("nan")
NUMBERS = [f"{number}.5" for number in range(30)]
MARKS = [
    "?",
    "-",
    "--",
    ".",
    "\\N",
    "NA",
    "Na",
    "N.A.",
    "n/a",
    "NaN",
    "NAN",
    "null",
    "(null)",
    "None",
    "unknown",
    "#N/A",
]
COMMAS = {  # cells of a file whose separator is a semicolon, and their numbers
    "2,5": 2.5,
    "-0,75": -0.75,
    "1,5E+02": 150,
    "1.234,56": 1234.56,
    "1,234.56": 1234.56,
    "1,234,567": 1234567,
    "1,250": 1.25,
    "-": NAN,
}


def column(*cells: Any, **attrs: Any) -> Any:
    frame = frame_of(pd.DataFrame({"v": cells}), "t")
    frame.attrs |= attrs
    return frame


def fitted(frame: Any, train: int | None = None, **options: Any) -> Features:
    return Features.fit(frame, ["v"], np.arange(len(frame)) < (train or len(frame)), **options)


@pytest.mark.parametrize("mark", MARKS)
def test_a_number_may_be_written_as_missing_but_a_target_not(mark: str):
    frame = column(*NUMBERS, *[mark] * 10)
    features = fitted(frame)
    assert features.columns["v"]["kind"] == "number" and features.spellings == {"v": {mark: 10}}
    assert features(frame)[:, 1].tolist() == [0.0] * 30 + [1.0] * 10
    assert fitted(column("a", "b", mark) if mark != "-" else column("a", "b", "c")).columns["v"]["kind"] == "category"
    for numbers in (NUMBERS, ["0", "1", "2"] * 10):
        with pytest.raises(
            ValueError, match=r"t, row 30: v is .* \(and 9 more rows\).* or list it: dataset.missing=\["
        ):
            Targets.fit(column(*numbers, *[mark] * 10), ["v"])
        frame = column(*numbers, *[mark] * 10, missing=[mark])
        targets = Targets.fit(frame, ["v"])
        y = targets(frame)[-10:]
        assert (y.isnan() if targets.classes is None else y == -1).all()
        classes = Targets.fit(column(*numbers, mark), ["v"], categories=["v"]).classes
        assert classes is not None and mark in classes


def test_decimal_commas_are_those_of_the_file_or_of_quoted_cells():
    values = Column(column(*COMMAS, commas=True), "v").numbers
    np.testing.assert_array_equal(values, [*COMMAS.values()])
    values = Column(column(*COMMAS), "v").numbers  # quoted in a file of commas
    np.testing.assert_array_equal(values, [NAN if cell == "1,250" else value for cell, value in COMMAS.items()])
    with pytest.raises(ValueError, match="v is '1,250', expected a number"):
        fitted(column(*["2,5", "3,5"] * 20, "1,250"))
    for fit in (fitted, lambda table: Targets.fit(table, ["v"])):
        with pytest.raises(ValueError, match="t, row 2: v is '1.300', whose point may divide thousands"):
            fit(column(*["1.250,50", "980,10", "1.300", ""] * 20, commas=True))
    assert fitted(column(*["1.300", "2.5"] * 9, commas=True)).columns["v"]["range"] == [1.3, 2.5]


KINDS: list[tuple[list[Any], Any]] = [  # cells, and the kind of the column, why it is left out, or the error
    (["1", "02", "3"], "category"),  # codes
    (["0111", "8001"], "category"),
    (["2020-01-01", "9999-12-31"], "date"),
    (["31.12.2021 10:00", "1.2.2020 11:30", "?"], "date"),
    (["31.12.21", "01.02.20"], "dates of an unknown form, such as 31.12.21"),
    (["31-12-2021", "01-02-2020"], "dates of an unknown form"),
    (["Feb 3, 2021", "3-Feb-21 10:00"], "dates of an unknown form"),
    (["192.168.0.1", "1.2.3"] * 4, "category"),
    (["Mon Jan 05 2021", "Tue Jan 13 2021"], "dates of an unknown form"),
    (["0", "1", "2", "3+"] * 5, "category"),
    (["A", "1.50", "2.25"] * 5, "category"),
    ([*NUMBERS, *["k.A."] * 20], ValueError("row 30: v is 'k.A.', expected a number .and 19 more rows.. Leave")),
    ([f"Person {i}" for i in range(12)], "12 different texts"),
    (["A", "B", "C"] * 4, "category"),
    (["none", "1", "2"], "number"),
    (["none", "some", "NA", ""], "category"),
    (["true", "false"], "category"),
    ([True, False, None], "category"),
    (["x", "x", "x"], "the same in all training rows"),
    ([None, ""], "empty in the training rows"),
    ([decimal.Decimal("1.10"), decimal.Decimal(2)], "number"),
    ([datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)], "date"),
    ([*NUMBERS, "twenty"], ValueError("t, row 30: v is 'twenty', expected a number. Leave the field empty")),
    ([*NUMBERS, *NUMBERS, ">90", ">90"], ValueError("row 60: v is '>90', expected a number .and 1 more row.")),
    (["2024-01-01"] * 30 + ["2024-02-30"], ValueError("row 30: v is '2024-02-30', expected a date")),
    (["1,250", "2,500", "3,750"], ValueError("row 0: v is '1,250', whose comma may divide thousands .and 2 more rows")),
    (["2024-01-01", "2024-01-03", "0000-00-00"], ValueError("row 2: v is '0000-00-00', expected a date")),
    (["\u22121.5", "2"], "number"),
    (["01/02/2020", "03/04/2021"], ValueError("may begin with the day or the month")),
    ([1.0, 2.0, float("inf")], ValueError("row 2: v is inf, expected a finite number")),
    (["1", "2", "=A1+B2"], ValueError("row 2: v is '=A1\\+B2', a formula")),
]


@pytest.mark.parametrize(("cells", "kind"), KINDS, ids=[str(cells[:3]) for cells, _ in KINDS])
def test_kinds_of_columns(cells: list[Any], kind: Any):
    if isinstance(kind, ValueError):
        with pytest.raises(ValueError, match=str(kind)):
            fitted(column(*cells))
        return
    features = fitted(column(*cells))
    assert features.columns["v"]["kind"] == kind if features.columns else kind in features.left_out["v"]


LATER: list[tuple[list[Any], list[Any], str]] = [  # cells of training, of a later table, and the message that is due
    (
        [1.0, 2.0, 3.0],
        [NAN, NAN, NAN],
        "data: v is missing in 3 of 3 rows, but in none of those of training; the median",
    ),
    ([1.0, 2.0, 3.0], [2.0, NAN], "v is missing in 1 of 2 rows, but in none of those of training; the median"),
    ([1.0, 2.0, 3.0, None], [NAN, NAN, NAN], "v is missing in 3 of 3 rows, but in 25% of those of training"),
    (["a", "b", "a"], [None, None, "a"], "v is missing in 2 of 3 rows, but in none of those of training; no category"),
    ([1.0, 2.0, 3.0], [100.0, 200.0, 2.0], "v has 2 of 3 numbers outside of 1 to 3, the range of the training rows"),
    (["2020-01-01", "2021-01-01"], ["2031-01-01"], "v has 1 of 1 dates before or after those of the training rows"),
    (["a", "b", "a"], ["c", "a", "c"], "v has 2 values that are not a category of the training rows, such as 'c'"),
    ([1.0, 2.0, 3.0], [1e300, 2.0, 3.0], r"data, row 0: v is 1e\+300, expected a number of the size .*\(id 'u3'"),
    ([1.0, 2.0, 3.0], [np.inf, 2.0, 3.0], r"data, row 0: v is inf, expected a finite number \(id 'u3'\)"),
    ([1.0, 2.0, 3.0], [True, True, True], "v is 'True', expected a number as in the training data"),
    ([1.0, 2.0, 3.0], pd.date_range("2020-01-01", periods=3).tolist(), "expected a number as in the training data"),
    (["2020-01-01", "2021-01-01"], [5, 6], "v is 5, expected a date as in the training data"),
    (["2020-01-01", "2021-01-01"], ["soon"], "v is 'soon', expected a date as in the training data"),
    ([1.0, 2.0, 3.0], ["007", "1", "2"], "v is '007', expected a number as in the training data"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("before", "after", "message"), LATER, ids=[message[:50] for *_, message in LATER])
def test_a_later_column_of_another_kind_is_reported_once(before: list[Any], after: list[Any], message: str):
    features = fitted(column(*before))
    later = frame_of(pd.DataFrame({"id": [f"u{row + 3}" for row in range(len(after))], "v": after}), "data")
    later.attrs["id"] = "id"
    with pytest.raises((ValueError, UserWarning), match=message):
        features(later)


TARGETS: list[tuple[list[Any], dict[str, Any], Any]] = [  # cells, options, and the classes, None or the message
    (["none", "mild", "severe"], {}, ["mild", "none", "severe"]),
    (["NA", "EU", "null", "None"], {}, ["EU", "NA", "None", "null"]),
    (["none", "mild", ""], {"missing": ["none"]}, ["mild"]),
    (["1.50", "1", "2", "1.5"], {"goal": "classification"}, ["1", "1.5", "2"]),
    ([1.0, 2.0, 10.0], {}, ["1", "2", "10"]),
    (["+5", "-5", "1e3"], {}, ["-5", "5", "1000"]),
    (["007", "7", "010"], {}, ["007", "010", "7"]),
    ([True, False], {}, ["False", "True"]),
    (["true", "false"], {}, ["false", "true"]),
    (["0,5", "0,7"], {}, None),
    (["1.5", "2", ""], {}, None),
    ([-1, 1], {}, ["-1", "1"]),
    ([-1, 0, 1], {}, "v has the class '-1' in 1 rows. If their labels are unknown, choose dataset.missing=.-1."),
    ([-1, 0, 1], {"missing": [-1]}, ["0", "1"]),
    (["-1", "0", "1"], {"categories": ["v"]}, ["-1", "0", "1"]),
    (["1", "2", "2", "unknown", "unknown", "unknown"], {}, "v is 'unknown', expected a number .and 2 more rows"),
    (["1", "2", "unknown"], {"missing": ["unknown"]}, ["1", "2"]),
    (["yes", "no", "unknown"], {}, "has the class 'unknown' in 1 rows. If their labels are unknown"),
    (["yes", "no", "?"], {}, "v is '[?]', which may be a missing value.*dataset.missing=.[?]."),
    (["+", "-"], {}, ["+", "-"]),
    (["5", "7", ">10"], {}, "v is '>10', expected a number"),
    (["5", "7", ">10"], {"goal": "classification"}, ["5", "7", ">10"]),
    (["a", "b"], {"goal": "regression"}, "v has values such as 'a', expected numbers[.]"),
    (["2020-01-01", "2021-01-01"], {}, "v has dates"),
    (["31.12.21", "01.02.20"], {}, "v has dates"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("cells", "options", "expected"), TARGETS, ids=[str(cells[:4]) for cells, *_ in TARGETS])
def test_classes_of_a_target(cells: list[Any], options: dict[str, Any], expected: Any):
    frame = column(*cells, commas=True, missing=options.pop("missing", ()))
    if isinstance(expected, str):
        with pytest.raises((ValueError, UserWarning), match=expected):
            Targets.fit(frame, ["v"], **options)
    else:
        targets = Targets.fit(frame, ["v"], **options)
        assert targets.classes == (sorted(expected) if expected and ">10" in expected else expected)


# Laws over all kinds of columns ---------------------------------------------------------------------------------------


def typed(N: int = 40) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Accounts with a column of each kind, and payments."""
    draw = np.random.default_rng(0)
    nodes = pd.DataFrame(
        {
            "account": np.arange(N) + 100,
            "whole": draw.integers(0, 50, N),
            "half": draw.integers(0, 9, N) / 2,
            "single": draw.random(N).astype(np.float32),
            "gaps": np.where(draw.random(N) < 0.3, np.nan, draw.normal(size=N)),
            "large": 2**60 + draw.integers(0, 3, N),
            "bool": draw.random(N) < 0.5,
            "text": draw.choice(["a", "none", "NA", "2.0", "x,y"], N),
            "size": draw.choice([1.0, 1.5, 2.0], N),
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 99, N), "D"),
            "money": [decimal.Decimal(int(value)) / 100 for value in draw.integers(0, 9999, N)],
            "nullable": pd.array([None if i % 5 == 0 else i for i in range(N)], "Int64"),
            "kind": pd.Categorical(draw.choice(["u", "v", "w"], N)),
            "y": draw.choice([1.0, 1.5, 2.0], N),
        }
    )
    edges = pd.DataFrame(nodes.account.to_numpy()[draw.integers(N, size=(3 * N, 2))], columns=["src", "dst"])
    return nodes, edges.assign(euros=draw.random(3 * N).round(3))


def written(folder: Path, form: str, nodes: pd.DataFrame, edges: pd.DataFrame) -> list[Any]:
    if form == "frame":
        return [nodes, edges]
    paths = [folder / f"{name}.{form}" for name in ("nodes", "edges")]
    for path, frame in zip(paths, (nodes, edges), strict=True):
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path, index=False)
    return paths


def stored(task: Task) -> Preparation:
    return Preparation.from_dict(json.loads(json.dumps(task.preparation.to_dict())))


FORMS = ("csv", "parquet", "frame")


@pytest.mark.parametrize("form", FORMS)
def test_a_table_and_a_later_one_are_equal_in_all_nine_pairs_and_row_by_row(form: str, tmp_path: Path):
    nodes, edges = typed()
    options = {"target": "y", "task": "node_classification", "categories": ["size", "large"], "val": 8, "test": 8}
    task = tables(*written(tmp_path, form, nodes, edges), **options)
    expected, preparation = from_pandas(nodes, edges, **options), stored(task)
    assert task.class_names == ("1", "1.5", "2") and {*task.source["columns"]["node"]} > {*nodes} - {"account", "y"}
    later = [read_rows(preparation, written(tmp_path, f, nodes, edges)).graphs[0] for f in FORMS]
    for data in (task.train[0], *later):
        assert torch.equal(data.x, expected.train[0].x) and torch.equal(data.edge_attr, expected.train[0].edge_attr)
        assert torch.equal(data.y, expected.train[0].y)
    for row in (0, 5):  # one node with a loop: a table of one row, with a gap or without
        alone = nodes[row : row + 1]
        ends = pd.DataFrame({"src": alone.account, "dst": alone.account, "euros": 0.5})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[Features.__module__], "_compare", lambda *_: None)  # one row is mostly missing
            for f in FORMS:
                (graph,) = read_rows(preparation, written(tmp_path, f, alone, ends)).graphs
                assert torch.equal(graph.x[0, :-2], expected.train[0].x[row, :-2])
                assert torch.equal(graph.y, expected.train[0].y[row : row + 1])


def test_arrays_in_cells_are_columns_of_numbers():
    assert frame_of(pd.DataFrame({"id": [(0, 1), (0, 2)]}), "t")["id"].tolist() == ["(0, 1)", "(0, 2)"]  # of a grid
    nodes, edges = typed(12)
    nodes = nodes[["account", "y"]].assign(emb=[np.array([row, 0.5 * row]) for row in range(12)])
    options = {"target": "y", "task": "node_classification", "val": 3, "test": 3}
    task = from_pandas(nodes, edges, **options)
    assert [*task.source["columns"]["node"]][:2] == ["emb.0", "emb.1"]
    assert "emb" not in str(from_pandas(nodes, edges, ignore=["emb"], **options).source["columns"])
    for cells, message in {
        "nodes, row 3: emb is .*, expected 2 numbers as in other rows": [[1, 2]] * 3 + [[1]] + [[1, 2]] * 8,
        "nodes: emb holds lists, expected numbers in them": [["a", "b"]] * 12,
    }.items():
        with pytest.raises(ValueError, match=cells):
            from_pandas(nodes.assign(emb=pd.Series(message)), edges, **options)


# Ids and the choice of columns ----------------------------------------------------------------------------------------


def learnt(folder: Path, text: str, **options: Any) -> list[list[str]]:
    (folder / "edges.csv").write_text(text)
    source = tables(None, folder / "edges.csv", **{"val": 2, "test": 2, **options}).source
    assert source is not None
    return source["ids"]


def test_ids_are_text(tmp_path: Path):
    ids = [f"{a}.{b}" for a in range(3) for b in (1, 10, 2, 20, 3, 30)]
    ring = "src,dst\n" + "".join(f"{ids[i]},{ids[(i + 7) % 18]}\n" for i in range(18))
    assert {*learnt(tmp_path, ring)[0]} == {*ids}
    whole = "src,dst\n" + "".join(f"{i}.0,{(i + 1) % 9}\n" for i in range(9))
    assert learnt(tmp_path, whole)[0] == [*map(str, range(9))]
    nodes = pd.DataFrame({"id": [1.5, 2.0, 3.0], "y": [0.5, 0.7, 0.9]})
    ends = pd.DataFrame({"src": ["1.5", "2.0"], "dst": ["2.0", "1.5"]})
    assert tables(nodes, ends, "y", val=1, test=1).train[0].edge_index.tolist() == [[0, 1], [1, 0]]
    assert {"1.0", "1"} < {*learnt(tmp_path, whole + "x,1\n")[0]}  # not all are numbers
    assert {"NA", "007", "7"} < {*learnt(tmp_path, whole + "NA,007\n7,NA\n")[0]}
    for end, message in {
        "90071992547409931.0": "was written as a float",
        "9.0071E+16": "was written as a float",
        "5 ": "has a space at an end",
    }.items():
        with pytest.raises(ValueError, match=f"edges.csv, row 11: src .*{message}"):
            learnt(tmp_path, whole + f"{end},1\n")
    assert "9007199254740993" in learnt(tmp_path, whole.replace(".0", "") + "9007199254740993,1\n")[0]


ENDS = {  # header, and the ends, or the message
    "from_account,to_account,tx,amount": ("from_account", "to_account"),
    "tx_id,from_account,to_account,amount": ("from_account", "to_account"),
    "date,user,item": ("user", "item"),
    "rating,userId,movieId": ("userId", "movieId"),
    "w,Source,Target": ("Source", "Target"),
    "step,nameOrig,nameDest,amount": ("nameOrig", "nameDest"),
    "protein1,protein2,score": ("protein1", "protein2"),
    "country,city": ("country", "city"),
    "Unnamed: 0,left,right": ("left", "right"),
    "start_time,end_time,x,y2": "no two columns are clearly the ends of edges. Choose dataset.src and dataset.dst from",
    "tx,who,whom": "no two columns are clearly the ends of edges",
    "src_ip,dst_ip,src_port,dst_port": "the ends of edges may be src_ip and dst_ip or src_port and dst_port. Choose",
}


@pytest.mark.parametrize("header", ENDS)
def test_ends_are_found_by_their_names_or_asked_for(header: str):
    names = header.split(",")
    frame = pd.DataFrame({name: [f"{name}{(row * 7 + k) % 9}" for row in range(20)] for k, name in enumerate(names)})
    if isinstance(ENDS[header], str):
        with pytest.raises(ValueError, match=f"edges: {ENDS[header]}"):
            tables(None, frame, bipartite=True, val=2, test=2)
    else:
        task = tables(None, frame, bipartite=True, val=2, test=2)
        assert (task.source["src"], task.source["dst"]) == ENDS[header]  # type: ignore[index]
        src, dst = ENDS[header]
        assert f"ends {src} of edges and {dst} of edges" in task.notes[0]


@pytest.mark.parametrize("first", ["", "index", "X", "rank"])
def test_the_numbers_of_rows_are_no_ids(first: str, tmp_path: Path):
    """The file of `to_csv` without `index=False`, whose numbers are ids of other nodes, in another order."""
    draw = np.random.default_rng(0)
    nodes = pd.DataFrame({"account": draw.permutation(30), "f": draw.random(30).round(2), "y": list("ab") * 15})
    edges = pd.DataFrame({"src": range(29), "dst": range(1, 30)})
    nodes.to_csv(tmp_path / "n.csv", index_label=first)
    edges.to_csv(tmp_path / "e.csv", index=False)
    if first == "rank":
        with pytest.raises(ValueError, match="rank and account each have the ids of all ends. Choose dataset.id"):
            tables(tmp_path / "n.csv", tmp_path / "e.csv", "y")
        return
    task, expected = tables(tmp_path / "n.csv", tmp_path / "e.csv", "y"), from_pandas(nodes, edges, "y")
    assert torch.equal(task.train[0].edge_index, expected.train[0].edge_index)
    assert (
        task.notes[0]
        .partition(": ")[2]
        .startswith("ids account of n.csv; ends src of e.csv and dst of e.csv; target y;")
    )
    if not first:
        assert torch.equal(task.train[0].x, expected.train[0].x)
        assert any("left out of n.csv: Unnamed: 0 (it has no name)" in note for note in task.notes)


def test_a_split_is_no_feature_without_a_word():
    frame = column(*["train", "val", "test"] * 4).rename(columns={"v": "part"})
    frame = frame.assign(train_mask=["True", "False"] * 6, isTest=[0, 1] * 6, fold=[0, 1, 2] * 4, spread=[0, 1] * 6)
    with pytest.warns(UserWarning, match="look") as warned:
        assert warn_of_splits(frame, frame.columns) == ["part", "train_mask", "isTest", "fold"]
    texts = " ".join(str(warning.message) for warning in warned)
    assert "part looks like a split: split.column=part" in texts and "train_mask, isTest look like a split" in texts
    assert "fold looks like the folds" in texts
    nodes, edges = typed(12)
    nodes = nodes[["account", "y", "half"]].assign(split=["train", "val", "test"] * 4)
    with pytest.warns(UserWarning, match="nodes: split looks like a split"):
        task = from_pandas(nodes, edges, "y", task="node_classification", val=3, test=3)
    assert "split" not in task.source["columns"]["node"] and "split (a split)" in " ".join(task.notes)
    kept = from_pandas(nodes, edges, "y", task="node_classification", val=3, test=3, categories=["split"])
    assert "split" in kept.source["columns"]["node"]


def test_a_missing_header_is_reported(tmp_path: Path):
    with pytest.warns(UserWarning, match="the name of the column ann is an id in it. If row 1 is no header, add one"):
        learnt(tmp_path, "ann,bob\n" + "".join(f"ann,p{i}\nbob,p{i}\n" for i in range(9)), bipartite=False)
    with pytest.warns(UserWarning, match="the name of the column n1 is an id in it"):  # among the other ends
        learnt(tmp_path, "n1,n2\n" + "".join(f"u{i},n{i % 19 + 1}\n" for i in range(2, 20)), bipartite=False)
    with pytest.warns(UserWarning, match="the name of the column u98 is like the ids in it"):
        learnt(tmp_path, "u98,u99\n" + "".join(f"u{i},u{i + 1}\n" for i in range(20)), bipartite=False)
    for text, message in {
        "# FromNodeId ToNodeId\n1 2\n": "row 1 is a comment, '# FromNodeId ToNodeId', expected the names",
        "# Nodes: 3 Edges: 2\n# From To\n1\t2\n": "row 1 is a comment",
        "1,2\n2,3\n": "row 1 is 1, 2, expected the names of the columns. Add a first row",
    }.items():
        with pytest.raises(ValueError, match=message):
            learnt(tmp_path, text)


def test_the_rows_of_predictions_can_be_joined_to_the_users_table(tmp_path: Path):
    nodes, edges = typed(12)
    options = {"target": "y", "task": "node_classification", "val": 3, "test": 3}
    task = from_pandas(nodes, edges, **options)
    rows = read_rows(stored(task), [edges, nodes])
    assert rows.ids == {"account": nodes.account.tolist()} and rows.table is nodes and rows.numbers is None
    paths = written(tmp_path, "csv", nodes, edges)
    rows = read_rows(stored(task), paths)
    assert rows.ids == {"account": nodes.account.tolist()} and rows.table["whole"].tolist() == [*map(str, nodes.whole)]
    links = tables(nodes[["account"]], edges, val=2, test=2)
    order = np.random.default_rng(0).permutation(12)
    rows = read_rows(stored(links), {"nodes": nodes[["account"]].iloc[order], "edges": edges})
    assert rows.ids == {"account": nodes.account.tolist()}
    assert rows.table["account"].iloc[rows.numbers].tolist() == nodes.account.tolist()
    pairs = edges[["src", "dst"]].head(3)
    rows = read_rows(stored(links), {"nodes": nodes[["account"]], "edges": edges, "pairs": pairs})
    assert rows.table is pairs and rows.ids == {name: pairs[name].tolist() for name in pairs}
    with pytest.raises(ValueError, match="There is no column account: data has konto"):
        read_rows(stored(task), [nodes.rename(columns={"account": "konto"}), edges])
    with pytest.raises(ValueError, match="There is no column src: data has from, dst"):
        read_rows(stored(task), [nodes, edges.rename(columns={"src": "from"})])
    assert read_table(paths[1]).attrs["commas"] is False
