"""Random files of known truth, written as people write them: wrong joins, classes and features, and refusals.

    python benchmarks/files.py                          # 72 files of each kind
    python benchmarks/files.py --kind ids --files 200 --seed 7 --show

The truth is drawn first: nodes with ids, typed columns, a target, edges. It is written in a form of its kind
(spellings, separators, encodings, types) and read by `gat_pyg.data`. What was read is compared with the truth; it may
instead be refused by an error. A difference counts as `warned` if a warning names the column, or a note that it is left
out. The exit status is 1 if a file is wrong without a warning, or raises an error that is not of gat_pyg.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import math
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pandas as pd
import scipy.io
import scipy.sparse
import torch

from drawn_tables import KINDS, Case, Column, M, N, Rng, dates, labels, pick, write
from gat_pyg.data import from_file, smiles, tables
from gat_pyg.data.rows import read_rows
from gat_pyg.data.tables.graph import DEGREES
from gat_pyg.tasks.preparation import Preparation

ASPECTS = ("joins", "classes", "features")

# Comparison -----------------------------------------------------------------------------------------------------------


def same_id(a: Any, b: Any) -> bool:
    """Return True for the same id: 7.0 is 7 where both are whole numbers below 2^53."""
    a, b = str(a), str(b)
    if a == b or a.strip() == b.strip():
        return True
    whole = re.compile(r"-?(0|[1-9][0-9]*)(\.0)?")
    return all(whole.fullmatch(x) for x in (a, b)) and float(a) == float(b) and abs(float(a)) < 2**53 and ".0" in a + b


def same_class(a: Any, b: Any) -> bool:
    """Return True for the same class or category: equal as numbers, otherwise as text without spaces at the ends."""
    a, b = str(a).strip(), str(b).strip()
    b = b.replace(",", ".") if is_number(b.replace(",", ".")) else b  # decimal commas
    if a == b or a.lower() == b.lower() in ("true", "false"):
        return True
    if {a, b} <= {"True", "true", "1", "1.0"} or {a, b} <= {"False", "false", "0", "0.0"}:
        return True
    number = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?")
    return all(number.fullmatch(x) for x in (a, b)) and float(a) == float(b)


def decoded(encoding: Mapping[str, Any], x: np.ndarray[Any, Any]) -> list[Any]:
    """Return the values of a column from its features: numbers, days, categories, None where missing."""
    if encoding["kind"] == "category":
        names = [*encoding["values"]]
        found = [names[int(row.argmax())] if row.any() else "(none)" for row in x]
        return [None if name == "" else name for name in found]
    values = x[:, 0] * encoding["std"] + encoding["mean"]
    if encoding.get("log"):
        values = np.sign(values) * np.expm1(np.abs(values))
    missing = x[:, 1].astype(bool) if x.shape[1] > 1 else np.zeros(len(x), bool)
    return [None if gone else float(value) for gone, value in zip(missing, values, strict=True)]


def wrong_values(column: Column, encoding: Mapping[str, Any], x: np.ndarray[Any, Any]) -> str:
    """Return the first difference of a column's features from the truth; "" if there is none."""
    values = decoded(encoding, x)
    if column.kind == "unchecked":
        return ""
    if column.kind in ("text", "split"):
        return f"is a feature ({encoding['kind']})"
    is_category = encoding["kind"] == "category"
    is_code = column.kind == "category" and not is_category and all(is_number(v) for v in column.truth if v is not None)
    is_bool = column.kind == "category" and {*column.truth} <= {"True", "False", "true", "false", "TRUE", "FALSE", None}
    if is_category != (column.kind == "category") and not (is_bool and not is_category):
        return f"is a {encoding['kind']}, in truth a {column.kind}"
    assert not is_code or is_bool
    for row, (value, truth) in enumerate(zip(values, column.truth, strict=True)):
        if truth is None and encoding["kind"] != "category" and x.shape[1] == 1 and encoding.get("flag") is False:
            continue  # no training row lacks it: the median stands in
        if truth is None and value == "(none)":
            continue  # no training row lacks it
        if (value is None) != (truth is None):
            return f"row {row} is {value!r}, in truth {truth!r}"
        if truth is None:
            continue
        if isinstance(truth, datetime.datetime):
            truth = (truth - datetime.datetime(1970, 1, 1)) / datetime.timedelta(1)
            if abs(value - truth) > 1.01 + 1e-4 * encoding["std"]:  # days; time zones within one
                return f"row {row} is day {value!r}, in truth {truth!r}"
        elif is_category:
            if not same_class(value, truth):
                return f"row {row} is {value!r}, in truth {truth!r}"
        else:
            truth = float(str(truth).lower() == "true") if is_bool else truth
            if not math.isclose(value, truth, rel_tol=1e-3, abs_tol=1e-4 * encoding["std"] + 1e-6):
                return f"row {row} is {value!r}, in truth {truth!r}"
    return ""


def is_number(text: Any) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def joins(case: Case, task: Any) -> str:
    """Return the first wrong join of an edge with its nodes; "" if there is none."""
    data = task.train[0]
    src, dst = (next(c.truth for c in case.edges.values() if c.kind == end) for end in ("src", "dst"))
    truth = [*zip(src, dst, strict=True)]
    if case.nodes is not None:
        names = next(c.truth for c in case.nodes.values() if c.kind == "id")
        if data.num_nodes != len(names):
            return f"{data.num_nodes} nodes, in truth {len(names)}"
    else:
        names = [name for side in task.source["ids"] for name in side]
        different = len({*src} | {*dst})
        if len(names) != different:
            return f"{len(names)} nodes, in truth {different}"
    is_link = any(c.kind in ("class", "target") for c in [*(case.nodes or {}).values(), *case.edges.values()]) is False
    if is_link:
        links = [data.edge_index[:, :], data.edge_label_index[:, data.y.flatten() == 1]]
        for other in (task.val[0], task.test[0]):
            links += [other.edge_index, other.edge_label_index[:, other.y.flatten() == 1]]
        read = {frozenset((str(names[a]), str(names[b]))) for part in links for a, b in part.t().tolist()}
        other = {pair for pair in read ^ {*map(frozenset, truth)} if len(pair) > 1}  # loops are no links
        return f"links {[*map(sorted, [*other][:2])]}" if other else ""
    ends = data.edge_index if case.nodes is not None else data.edge_label_index
    if ends.size(1) != len(truth):
        return f"{ends.size(1)} edges, in truth {len(truth)}"
    for row, ((a, b), pair) in enumerate(zip(ends.t().tolist(), truth, strict=True)):
        if not (same_id(names[a], pair[0]) and same_id(names[b], pair[1])):
            return f"edge {row} is {names[a]} to {names[b]}, in truth {pair[0]} to {pair[1]}"
    return ""


def wrong_labels(case: Case, task: Any) -> str:
    """Return the first wrong class or target; "" if there is none."""
    columns = [*(case.nodes or {}).values(), *case.edges.values()]
    target = next((c for c in columns if c.kind in ("class", "target")), None)
    if target is None:
        return ""
    y = task.train[0].y
    if target.kind == "target":
        if task.class_names is not None and y.dim() == 1:
            return f"classes {task.class_names[:4]}, in truth numbers"
        for row, (value, truth) in enumerate(zip(y.flatten().tolist(), target.truth, strict=True)):
            if (truth is None) != math.isnan(value) or (
                truth is not None and not math.isclose(value, truth, rel_tol=1e-5)
            ):
                return f"target of row {row} is {value}, in truth {truth}"
        return ""
    names = task.class_names or ("0", "1")
    if y.is_floating_point():
        y = y.nan_to_num(-1).long()
    for row, (value, truth) in enumerate(zip(y.flatten().tolist(), target.truth, strict=True)):
        name = names[value] if value >= 0 else None
        if (truth is None) != (name is None) or (truth is not None and not same_class(name, truth)):
            return f"class of row {row} is {name!r}, in truth {truth!r}"
    return ""


def wrong_features(case: Case, task: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each column whose features are wrong, and the difference."""
    data, notes = task.train[0], " ".join(task.notes)
    targets = ("class", "target", "id", "src", "dst", "used split")
    arrays = {"node": data.x, "edge": data.get("edge_label_attr", data.edge_attr)}
    for item, columns in (("node", case.nodes), ("edge", case.edges)):
        if columns is None or (arrays[item] is None and item == "node"):
            continue
        encodings, begin = task.source["columns"].get(item, {}), 0
        blocks = {}
        for name, encoding in encodings.items():
            wide = len(encoding["values"]) if encoding["kind"] == "category" else 1 + bool(encoding["flag"])
            blocks[name] = begin, begin + wide
            begin += wide
        for name, column in columns.items():
            if column.kind in targets:
                if name in encodings:
                    yield name, f"{column.kind} is a feature"
            elif name in encodings:
                array = arrays[item]
                is_link = item == "edge" and array is not None and len(array) != len(column.truth)
                start, stop = blocks[name]
                if not is_link and (text := wrong_values(column, encodings[name], array[:, start:stop].numpy())):
                    yield name, text
            elif column.kind not in ("text", "split", "unchecked"):
                reason = re.search(re.escape(name) + r" \(([^)]*)\)", notes)
                reason_text = reason[1] if reason else "without a note"
                if "the same in all" not in reason_text:
                    yield name, f"is left out: {reason_text}"
        for name in encodings.keys() - columns.keys() - {*DEGREES}:
            if name.split(".")[0] not in columns:  # a list in each cell
                yield name, "is a feature of no column"


class Outcome(NamedTuple):
    """What became of a file: a refusal, or the wrong aspects, those with a warning apart."""

    refusal: str = ""
    crash: str = ""
    wrong: Mapping[str, str] = {}
    warned: Mapping[str, str] = {}
    unsaid: str = ""  # a spelling of missing values that no note names


def failed(error: Exception) -> Outcome:
    """Return the outcome of an error: a refusal if gat_pyg raised it for the file's sake, else a crash."""
    *_, last = traceback.extract_tb(error.__traceback__)
    is_ours = isinstance(error, (ValueError, FileNotFoundError)) and "gat_pyg" in last.filename
    return Outcome(refusal=str(error)) if is_ours else Outcome(crash=f"{type(error).__name__}: {error}")


def outcome(case: Case, folder: Path) -> Outcome:
    """Read a case and compare it with its truth."""
    nodes, edges = write(case.nodes, folder / "nodes", case), write(case.edges, folder / "edges", case)
    columns = {**(case.nodes or {}), **case.edges}
    target = next((name for name, c in columns.items() if c.kind in ("class", "target")), None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            options = {key: value for key, value in case.options.items() if key in inspect.signature(tables).parameters}
            task = tables(nodes, edges, target, **{"undirected": False, **options})
        except Exception as error:
            return failed(error)
    said = " ".join(str(warning.message) for warning in caught)
    wrong: dict[str, str] = {}
    if text := joins(case, task):
        wrong["joins"] = text
    if text := wrong_labels(case, task):
        wrong["classes"] = text
    features = [*wrong_features(case, task)]
    strict = case.spelling or "decimal commas" in case.label  # numbers that must not be left out

    def is_said(name: str, text: str) -> bool:
        return name in said or (not strict and re.search(r"is left out: .*(texts|form|dates)", text) is not None)

    silent = [f"{name} {text}" for name, text in features if not is_said(name, text)]
    loud = [f"{name} {text}" for name, text in features if is_said(name, text)]
    if silent:
        wrong["features"] = "; ".join(silent)
    warned = {"features": "; ".join(loud)} if loud and not silent else {}
    if said and target and target in said and "classes" in wrong:
        warned["classes"] = wrong.pop("classes")
    ends = [name for name, c in columns.items() if c.kind in ("id", "src", "dst")]
    is_named = all(re.search(rf"\b{re.escape(name)}\b", said) for name in ends)
    if "joins" in wrong and (is_named or (not case.form.header and "header" in said)):
        warned["joins"] = wrong.pop("joins")
    unsaid = ""
    if case.spelling and case.spelling not in said + " ".join(task.notes):
        unsaid = case.spelling
    return Outcome(wrong=wrong, warned=warned, unsaid=unsaid)


# Later tables ---------------------------------------------------------------------------------------------------------


EDGES = "edge_classification"


def later_columns(r: Rng, n: int) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return columns with the options under which they are read; the last with `target` are what is predicted."""
    gone = r.random(n) < 0.2
    gone[:2] = True, False
    ints, floats = r.integers(0, 40, n), r.normal(5, 2, n).round(2)
    when = pd.Series(dates(r, n)).astype("datetime64[us]")
    named = {"categories": ["v"]}

    def words(*values: str) -> list[str]:
        return r.permutation([*values] * (n // len(values) + 1))[:n].tolist()

    def gaps(values: Any) -> list[Any]:
        return [None if lost else value for lost, value in zip(gone, values, strict=True)]

    return [
        ("ints", ints, {}),
        ("floats", floats, {}),
        ("ints with gaps", pd.array(gaps(ints.tolist()), "Int64"), {}),
        ("floats with gaps", np.where(gone, np.nan, ints), {}),
        ("numbers with ?", [("?" if lost else str(value)) for lost, value in zip(gone, ints, strict=True)], {}),
        ("float32", floats.astype("float32"), {}),
        ("categories 1, 1.5, 2 as floats", np.array(words("1", "1.5", "2")).astype(float), named),
        ("categories 1, 1.5, 2 as text", words("1", "1.5", "2"), named),
        ("categories as ints", ints % 4, named),
        ("categories with gaps", np.where(gone, np.nan, ints % 4), named),
        ("A, 1.50, 2.25", words("A", "1.50", "2.25"), {}),
        ("A, 1e3, 2e3", words("A", "1e3", "2e3"), {}),
        ("A, +5, -5", words("A", "+5", "-5"), {}),
        ("A, 1, 2", words("A", "1", "2"), {}),
        ("codes 007, 012", words("007", "012", "100"), {}),
        ("words", words("u", "v", "w"), {}),
        ("words with gaps", gaps(words("u", "v", "w")), {}),
        ("none, NA, x", words("none", "NA", "x"), {}),
        ("true, x", words("true", "False", "x"), {}),
        ("dates and x", words("2021-01-01", "2021-02-01", "x"), {}),
        ("bools", ints > 20, {}),
        ("bools with gaps", pd.array(gaps((ints > 20).tolist()), "boolean"), {}),
        ("bools as words", words("yes", "no"), {}),
        ("true and false as text", words("true", "false"), {}),
        ("dates", when, {}),
        ("dates with gaps", when.where(~gone), {}),
        ("dates with a zone", when.dt.tz_localize("UTC"), {}),
        ("dates as text", [f"{day:%d.%m.%Y}" for day in when.dt.to_pydatetime()], {}),
        ("categorical", pd.Categorical(words("u", "v", "w")), {}),
        ("spaces", words("a", "b ", " c"), {}),
        ("big ints", ints + 2**54, {}),
        ("target 1, 1.5, 2", np.array(words("1", "1.5", "2")).astype(float), {"target": 1, "task": EDGES}),
        ("target ints", ints % 3, {"target": 1}),
        ("target floats of ints, gaps", np.where(gone, np.nan, ints % 3), {"target": 1}),
        ("target bools", ints > 20, {"target": 1}),
        ("target 1, 2, x", words("1", "2", "x"), {"target": 1}),
        ("target words, none", words("none", "NA", "x"), {"target": 1}),
        ("target 01, 02", words("01", "02"), {"target": 1}),
        ("target numbers", floats, {"target": 1}),
        ("target dates as words", words("2021-01-01", "2022-01-01", "x"), {"target": 1}),
    ]  # fmt: skip


FORMS = ("csv", "parquet", "frame")


def saved(frame: pd.DataFrame, form: str, path: Path) -> Any:
    if form == "frame":
        return frame
    path = path.with_suffix(f".{form}")
    frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path, index=False)
    return path


def later(r: Rng, k: int, folder: Path, form: str, later_form: str) -> Iterator[tuple[str, str, Outcome]]:
    """Yield the outcomes of later tables: whole, in another form, and row by row."""
    columns = later_columns(r, M)
    label, values, options = columns[k % len(columns)]
    options = dict(options)
    is_target = bool(options.pop("target", 0))
    ids = pick(r, ([f"A{i}" for i in range(N)], [*range(N)], [f"{i:03}" for i in range(N)]))
    nodes = pd.DataFrame({"id": ids, "age": r.normal(size=N)})
    src, dst = ([ids[i] for i in r.integers(N, size=M)] for _ in range(2))
    edges = pd.DataFrame({"src": src, "dst": dst, "v": values})
    edges["y" if not is_target else "w"] = r.normal(size=M)
    target = "v" if is_target else "y"

    def attempt(function: Callable[[], Any]) -> tuple[Any, Outcome]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = function()
            except Exception as error:
                return None, failed(error)
        return result, Outcome(warned={"": str(caught[0].message)} if caught else {})

    are_alone = r.random() < 0.25  # embeddings of the ids are learnt
    first = None if are_alone else saved(nodes, form, folder / "nodes")
    task, result = attempt(
        lambda: tables(first, saved(edges, form, folder / "edges"), target, undirected=False, **options)
    )
    if task is None:
        yield label, "pairs", result
        return
    preparation = Preparation(task.num_features, task.edge_dim, source=task.source)

    def read(rows: Any, name: str) -> tuple[Any, Outcome]:
        table = edges.iloc[rows].reset_index(drop=True)
        later = {"edges": saved(table, later_form, folder / name)}
        if not are_alone:
            later["nodes"] = saved(nodes, later_form, folder / f"{name}n")
        found, result = attempt(lambda: read_rows(preparation, later))
        return (None if found is None else found.graphs[0]), result

    def compared(graph: Any, other: Any, rows: Any, result: Outcome) -> Outcome:
        for key, aspect in (
            ("edge_label_attr", "features"),
            ("y", "classes"),
            ("x", "features"),
            ("edge_label_index", "joins"),
        ):
            a, b = graph.get(key), other.get(key)
            if a is None or b is None:
                if (a is None) != (b is None):
                    return result._replace(wrong={aspect: f"{key} is not read"})
                continue
            a, b = a.double(), b.double()
            b = b if key == "x" else b[:, rows] if key == "edge_label_index" else b[rows]
            if a.shape != b.shape or not np.allclose(a.numpy(), b.numpy(), atol=1e-5, equal_nan=True):
                text = f"{key} differs"
                return (
                    Outcome(warned={aspect: f"{text}: {result.warned['']}"})
                    if result.warned
                    else Outcome(wrong={aspect: text})
                )
        return Outcome()

    whole, result = read([*range(M)], "whole")
    if whole is None:
        yield label, "pairs", result
        return
    yield label, "pairs", compared(whole, task.train[0], slice(None), result)
    for row in r.integers(M, size=6).tolist():
        single, result = read([row], "row")
        if single is None:
            yield label, "rows", result
            return
        if (result := compared(single, whole, [row], result)).wrong or result.warned:
            yield label, "rows", result
            return
    yield label, "rows", Outcome()


def changed(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read later tables that differ from those of training in a column, which a warning or an error should name."""
    ints, words = r.integers(10, 50, M), r.choice(["u", "v", "w"], M)
    when = pd.Series(dates(r, M)).astype("datetime64[us]")
    bases: dict[str, Any] = {"number": ints * 1.0, "int": ints, "date": when, "category": words, "bool": ints > 30}
    changes: list[tuple[str, str, Callable[[Any], Any]]] = [
        *((f"{base} that is empty", base, lambda _: [None] * M) for base in bases),
        *((f"{base} that is text", base, lambda _: [f"t{i % 3}" for i in range(M)]) for base in bases),
        *((f"{base} that lacks", base, lambda _: None) for base in bases),
        ("number that is half empty", "number", lambda values: np.where(np.arange(M) % 2, values, np.nan)),
        ("number that is half ?", "number", lambda values: ["?" if i % 2 else str(v) for i, v in enumerate(values)]),
        ("number that is bool", "number", lambda values: values > 0),
        ("number a million times as large", "number", lambda values: values * 1e6),
        ("number that is infinite", "number", lambda values: values * np.inf),
        ("number of 1e300", "number", lambda values: values * 0 + 1e300),
        ("number that is dates", "number", lambda _: when),
        ("number with units", "number", lambda values: [f"{v} km" for v in values]),
        ("number with thousands", "int", lambda values: [f"{v * 100:,}" for v in values]),
        ("dates of other years", "date", lambda values: values + pd.Timedelta(days=9000)),
        ("dates that are numbers", "date", lambda _: ints),
        ("dates of another form", "date", lambda values: [f"{day:%d.%m.%Y}" for day in values.dt.to_pydatetime()]),
        ("categories in upper case", "category", lambda values: [v.upper() for v in values]),
        ("categories that are numbers", "category", lambda _: ints % 3),
        ("bools that are numbers", "bool", lambda _: ints * 1.0),
    ]
    label, base, change = changes[k % len(changes)]
    form = ("csv", "parquet", "frame")[k // len(changes) % 3]
    nodes = pd.DataFrame({"id": [f"A{i}" for i in range(N)], "age": r.normal(size=N)})
    src, dst = ([f"A{i}" for i in r.integers(N, size=M)] for _ in range(2))
    edges = pd.DataFrame({"src": src, "dst": dst, "v": bases[base], "y": r.normal(size=M)})
    later = edges.drop(columns="v") if (values := change(edges.v)) is None else edges.assign(v=values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            task = tables(*(saved(frame, form, folder / name) for frame, name in ((nodes, "n"), (edges, "e"))), "y")
            caught.clear()
            preparation = Preparation(task.num_features, task.edge_dim, source=task.source)
            read_rows(preparation, {"nodes": nodes, "edges": saved(later, form, folder / "later")})
        except Exception as error:
            result = failed(error)
            return f"{label}, {form}", result if re.search(r"\bv\b", result.refusal + result.crash) else Outcome(
                wrong={"features": f"an error that names no v: {result.refusal or result.crash}"}
            )  # fmt: skip
    said = " ".join(str(warning.message) for warning in caught)
    if re.search(r"\bv\b", said):
        return f"{label}, {form}", Outcome(warned={"features": said[:100]})
    is_same = label in ("dates of another form",)  # may be read as they are
    return f"{label}, {form}", Outcome() if is_same else Outcome(wrong={"features": "without a word"})


def two_kinds(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read users and items with tables of their own, whose ids may be the same."""
    U, V = 25, 30
    users = [
        [f"{i}" for i in r.permutation(U)],
        [f"u{i}" for i in r.permutation(U)],
        [f"{i:03}" for i in r.permutation(U)],
    ][k % 3]
    items = [
        [f"{i}" for i in r.permutation(V)],
        [f"i{i}" for i in r.permutation(V)],
        [f"{i}.10" for i in r.permutation(V)],
    ][k // 3 % 3]
    names = (("user", "item"), ("user_id", "item_id"), ("userId", "movieId"), ("customer", "product"))[k // 9 % 4]
    ids = ("id", "id") if k % 2 else names
    a, b = r.integers(U, size=M), r.integers(V, size=M)
    ages, prices = r.permutation(U) + 20, r.permutation(V) + 5
    tables_ = [pd.DataFrame({"age": ages, ids[0]: users}), pd.DataFrame({ids[1]: items, "price": prices})]
    edges = pd.DataFrame(
        {"rating": r.integers(1, 6, M) + 0.5, names[0]: [users[i] for i in a], names[1]: [items[i] for i in b]}
    )
    form = FORMS[k // 36 % 3]
    label = f"{users[0]} and {items[0]} in {names[0]}, {names[1]}, {form}"
    paths = [saved(frame, form, folder / name) for frame, name in zip([*tables_, edges], "uvw", strict=True)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            task = tables(paths[:2], paths[2], "rating", bipartite=True, undirected=False)
    except Exception as error:
        return label, failed(error)
    data, wrong = task.train[0], {}
    ends = data.edge_label_index
    if not (np.array_equal(ends[0], a) and np.array_equal(ends[1], b + U)):
        wrong["joins"] = f"edges {ends[:, :3].tolist()}, in truth {a[:3].tolist()} and {(b[:3] + U).tolist()}"
    begin, read = 0, {}
    for name, encoding in task.source["columns"]["node"].items():
        wide = len(encoding["values"]) if encoding["kind"] == "category" else 1 + bool(encoding["flag"])
        read[name] = decoded(encoding, data.x[:, begin : begin + wide].numpy())
        begin += wide
    for name, truth in ((f"{names[0]}.age", [*ages, *[None] * V]), (f"{names[1]}.price", [*[None] * U, *prices])):
        values = read.get(name, [])
        if len(values) != U + V or any(
            t is not None and (v is None or abs(v - t) > 0.01) for v, t in zip(values, truth, strict=True)
        ):
            wrong["features"] = f"{name} is {values[:3]}, in truth {truth[:3]}"
    return label, Outcome(wrong=wrong)


# Graphs of programs ---------------------------------------------------------------------------------------------------


def graph_of(r: Rng) -> tuple[list[float], list[str], np.ndarray[Any, Any]]:
    """Return the truth of a graph: an age of its own and a class for each node, and different edges without loops."""
    ages = (r.permutation(N) + 20.0).tolist()
    pairs = {tuple(sorted(pair)) for pair in r.integers(N, size=(M, 2)).tolist() if pair[0] != pair[1]}
    return ages, labels(r).truth, np.array(sorted(pairs))  # type: ignore[return-value]


def checked_graph(
    ages: Sequence[float], y: Sequence[str], edges: Any, label: str, read: Callable[[], Any]
) -> tuple[str, Outcome]:
    """Compare a graph with its truth; the ages tell the nodes apart."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            task = read()
        except Exception as error:
            return label, failed(error)
    data, wrong = task.train[0], {}
    said = " ".join([*task.notes, *(str(warning.message) for warning in caught)])
    encodings, begin = task.source["columns"]["node"], 0
    names = [name for name in encodings if name.split(".")[-1] in ("age", "d0", "age0") or name in ("x", "X.0", "x.0")]
    if len(names) != 1:
        return label, Outcome(wrong={"features": f"columns {[*encodings][:8]}, expected age"})
    for name, encoding in encodings.items():
        wide = len(encoding["values"]) if encoding["kind"] == "category" else 1 + bool(encoding["flag"])
        if name == names[0]:
            if encoding["kind"] == "category":
                return label, Outcome(wrong={"features": f"{name} is a category"})
            read_ages = [
                round(value) if value is not None else None
                for value in decoded(encoding, data.x[:, begin : begin + wide].numpy())
            ]
        begin += wide
    if sorted(map(float, read_ages)) != sorted(ages):
        return label, Outcome(wrong={"features": f"ages {read_ages[:5]}, in truth {ages[:5]}"})
    of_age = {age: number for number, age in enumerate(ages)}
    nodes = [of_age[float(age)] for age in read_ages]
    found = {tuple(sorted((nodes[a], nodes[b]))) for a, b in data.edge_index.t().tolist()}
    if other := found ^ {tuple(pair) for pair in edges.tolist()}:
        wrong["joins"] = f"{len(other)} edges differ, such as {next(iter(other))}"
    if task.class_names is None or data.y.dim() > 1:
        return label, Outcome(wrong={**wrong, "classes": f"y of shape {tuple(data.y.shape)}, in truth 2 classes"})
    classes = [task.class_names[value] if value >= 0 else None for value in data.y.tolist()]
    bad = next((row for row, name in enumerate(classes) if not same_class(name, y[nodes[row]])), None)
    if bad is not None:
        wrong["classes"] = f"node {bad} is {classes[bad]!r}, in truth {y[nodes[bad]]!r}"
    others = [name for name in encodings if name not in (*names, *DEGREES) and name not in said]
    if others:
        wrong["features"] = f"{others[:6]} are features"
    return label, Outcome(wrong=wrong)


def programs(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read a graph as a program writes it."""
    ages, y, edges = graph_of(r)
    name_of = pick(r, ("{}", "n{}", "n {}", "Müller {}"))
    ids = [name_of.format(i) for i in range(N)]
    graph = nx.Graph()
    for i in r.permutation(N).tolist():
        graph.add_node(ids[i], age=ages[i], y=y[i])
    graph.add_edges_from((ids[a], ids[b]) for a, b in edges.tolist())
    links = [{"source": ids[a], "target": ids[b]} for a, b in edges.tolist()]
    nodes = [{"id": ids[i], "age": ages[i], "y": y[i]} for i in range(N)]
    kind = k % 19
    path = folder / ("g.graphml" if kind < 7 else "g.gml" if kind < 9 else "g.json")
    label = "?"
    if kind < 7:
        nx.write_graphml(graph, path)
        text = path.read_text(encoding="utf-8")
        match kind:
            case 0:
                label = "GraphML of networkx"
            case 1:
                label, text = "GraphML without xmlns (Cytoscape)", re.sub(r"<graphml[^>]*>", "<graphml>", text)
            case 2:
                label, text = "GraphML with vector_float (graph-tool)", text.replace(
                    "<graph ", '<key id="d9" for="node" attr.name="pos" attr.type="vector_float" /><graph ').replace(
                    '<node id="', '<node id="').replace("</node>", '<data key="d9">0.1, 0.2</data></node>')  # fmt: skip
            case 3:
                label, text = (
                    "GraphML with short (graph-tool)",
                    text.replace('attr.type="double"', 'attr.type="short"').replace(".0<", "<"),
                )
            case 4:
                label, text = (
                    "GraphML, a directed edge in an undirected graph",
                    text.replace("<edge ", '<edge directed="true" ', 1),
                )
            case 5:
                second = re.search(r"<graph .*</graph>", text, re.DOTALL)
                label, text = (
                    "GraphML of two graphs",
                    text.replace("</graphml>", f"{second[0] if second else ''}</graphml>"),
                )
            case 6:
                label, text = "GraphML with ids of edges, weights", text.replace("<edge ", '<edge id="e1" ', 1)
        path.write_text(text, encoding="utf-8")
    elif kind < 9:
        nx.write_gml(graph, path)
        label = "GML of networkx"
        if kind == 8:
            lines = ["graph ["] + [
                f'  node [\n    id {i}\n    label "{ids[i]}"\n    age {ages[i]}\n    y "{y[i]}"\n  ]' for i in range(N)
            ]
            lines += [f"  edge [\n    source {a}\n    target {b}\n  ]" for a, b in edges.tolist()] + ["]"]
            path.write_text("\n".join(lines), encoding="utf-8")
            label = "GML by hand"
    else:
        of_rows = [{"source": a, "target": b} for a, b in edges.tolist()]
        without = [{key: value for key, value in node.items() if key != "id"} for node in nodes]
        from_to = [{"from": link["source"], "to": link["target"]} for link in links]
        named = [{"name": node["id"], **rest} for node, rest in zip(nodes, without, strict=True)]
        numbered = [{**node, "id": i} for i, node in enumerate(nodes)]
        as_text = [{"source": str(a), "target": str(b)} for a, b in edges.tolist()]
        elements = {"nodes": [{"data": node} for node in nodes], "edges": [{"data": link} for link in links]}
        label, content = [
            ("JSON, links", {"nodes": nodes, "links": links}),
            ("JSON, edges", {"directed": False, "multigraph": False, "nodes": nodes, "edges": links}),
            ("JSON of D3, positions", {"nodes": without, "links": of_rows}),
            ("JSON of vis.js", {"nodes": nodes, "edges": from_to}),
            ("JSON, directed as text", {"directed": "false", "nodes": nodes, "links": links}),
            ("JSON of networkx 1, positions and text ids", {"directed": False, "nodes": nodes, "links": of_rows}),
            ("JSON of Cytoscape", {"elements": elements}),
            ("JSON, names", {"nodes": named, "links": links}),
            ("JSON, ids as numbers, ends as text", {"nodes": numbered, "links": as_text}),
            ("JSON, a list", [nodes, links]),
        ][kind - 9]
        path.write_text(json.dumps(content), encoding="utf-8")
    return checked_graph(ages, y, edges, label, lambda: tables(graph=path, target="y"))


def matlab(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read matrices of MATLAB."""
    ages, y, edges = graph_of(r)
    dense = np.zeros((N, N))
    dense[edges[:, 0], edges[:, 1]] = dense[edges[:, 1], edges[:, 0]] = 1
    sparse = scipy.sparse.csc_matrix(dense)
    code = np.array([1 + (name == "yes") for name in y])[:, None]
    truth = [str(value) for value in code[:, 0]]
    other = scipy.sparse.random(N, N, 0.05, "csc", random_state=0)
    plain = {"x": np.array(ages)[:, None], "group": code}
    nan = np.where(dense == 1, 1, np.nan)
    options: dict[str, Any] = {"target": "group"}
    forms: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("A", {"A": dense, **plain}, {}),
        ("network, sparse", {"network": sparse, **plain}, {}),
        ("homo beside net_rur", {"homo": sparse, "net_rur": other, "net_rtr": other, **plain}, {"matrix": "homo"}),
        ("two matrices", {"homo": sparse, "net_rur": other, **plain}, {}),
        ("NaN as no edge", {"A": nan, **plain}, {}),
        ("A beside a square matrix", {"A": dense, "distance": r.random((N, N)), **plain}, {}),
        ("labels as a row", {"A": sparse, "x": plain["x"], "group": code.T}, {}),
        ("labels as int8", {"A": sparse, "x": plain["x"], "group": code.astype("int8")}, {}),
        (
            "labels as cells",
            {"A": sparse, "x": plain["x"], "group": np.array([[f"{int(c)}"] for c in code[:, 0]], object)},
            {},
        ),
        ("labels as bool", {"A": sparse, "x": plain["x"], "group": code == 2}, {}),
        ("scalars and names", {"A": sparse, **plain, "n": N, "about": "a graph"}, {}),
        (
            "anomaly label beside",
            {"Network": sparse, **plain, "str_anomaly_label": np.where(r.random((N, 1)) < 0.5, code, 0)},
            {},
        ),
        ("directed", {"A": np.triu(dense), **plain}, {}),
        ("a list of edges", {"edges": edges + 1, **plain}, {}),
        ("A of bool", {"A": dense == 1, **plain}, {}),
        ("A with infinities", {"A": np.where(dense == 1, 1, np.inf), **plain}, {}),
        ("a struct", {"data": {"A": sparse, **plain}}, {}),
    ]
    label, arrays, more = forms[k % len(forms)]
    scipy.io.savemat(folder / "g.mat", arrays)
    truth = [str(value == "2") for value in truth] if label == "labels as bool" else truth
    return checked_graph(ages, truth, edges, label, lambda: tables(graph=folder / "g.mat", **options, **more))


def arrays(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read arrays of numpy in `.npz` files, and in a folder."""
    ages, y, edges = graph_of(r)
    code = np.array([name == "yes" for name in y]).astype(int)
    lost = r.random(N) < 0.2
    x = np.stack([np.array(ages), r.normal(size=N)], 1)
    both = np.concatenate([edges, edges[:, ::-1]]).T
    unknown, gaps = np.where(lost, -1, code), np.where(lost, None, code.astype(str))
    forms: list[tuple[str, dict[str, Any], Any]] = [
        ("plain", {}, code),
        ("labels as text", {"y": np.array(y)}, code),
        ("labels as objects", {"y": np.array(y, object)}, code),
        ("labels as bool", {"y": code == 1}, code),
        ("labels as floats", {"y": code.astype("float32")}, code),
        ("labels as uint8", {"y": code.astype("uint8")}, code),
        ("labels as a column", {"y": code[:, None]}, code),
        ("labels of 1 and 2", {"y": code + 1}, code),
        ("-1 is unknown", {"y": unknown}, unknown),
        ("NaN is unknown", {"y": np.where(lost, np.nan, code)}, unknown),
        ("labels as text with -1", {"y": np.where(lost, "-1", code.astype(str))}, unknown),
        ("labels as text, empty", {"y": np.where(lost, "", np.array(y))}, unknown),
        ("objects with None", {"y": gaps}, unknown),
        ("edges as columns", {"edge_index": both.T}, code),
        ("edges from 1", {"edge_index": both + 1}, code),
        ("edges as floats", {"edge_index": both.astype(float)}, code),
        ("edges as uint64", {"edge_index": both.astype("uint64")}, code),
        ("x as ints", {"x": x.round().astype("int16")}, code),
        ("x as bool", {"x": x > 0}, code),
        ("x with NaN", {"x": np.where(lost[:, None], np.nan, x)}, code),
        ("x transposed", {"x": x.T}, code),
        ("big endian", {"x": x.astype(">f8"), "edge_index": both.astype(">i4")}, code),
    ]
    label, changed_, truth = forms[k % len(forms)]
    content = {"x": x, "edge_index": both, "y": code, **changed_}
    path = folder / "graph.npz" if k // len(forms) % 2 == 0 else folder / "graph"
    if path.suffix:
        np.savez(path, **content)
    else:
        path.mkdir()
        for key, value in content.items():
            np.save(path / f"{key}.npy", value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            task = from_file(path, task="node_classification" if "floats" in label or "NaN is" in label else None)
        except Exception as error:
            return label, failed(error)
    data, wrong = task.train[0], {}
    if not np.array_equal(data.edge_index, both):
        wrong["joins"] = "edge_index differs"
    read = data.y.numpy() if data.y.dim() == 1 else data.y[:, 0].nan_to_num(-1).numpy()
    if label == "labels of 1 and 2":
        read = read - (2 in read)
    if not np.array_equal(read, truth):
        wrong["classes"] = f"y is {read[:5].tolist()}, in truth {truth[:5].tolist()}"
    if not np.allclose(data.x.numpy(), np.asarray(content["x"], float), atol=1e-4):
        wrong["features"] = "x differs"
    return label, Outcome(wrong=wrong)


def molecules(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
    """Read a table of SMILES, its labels, and its rows again."""
    texts = [f"{'C' * n}{end}" for n in range(1, 11) for end in ("O", "N", "Br", "Cl")]
    order = r.permutation(len(texts)).tolist()
    texts, n = [texts[i] for i in order], len(texts)
    numbers_ = r.normal(size=n).round(3)
    frame = pd.DataFrame({"smiles": texts, "y": numbers_})
    kind, options, label = k % 16, {}, ""
    names: dict[str, list[str]] = {}  # the columns of names that predictions need
    if kind in (0, 1, 2, 3, 4):
        values = {0: [*range(101, 101 + n)], 1: [f"M{i}" for i in range(n)], 2: [f"{i:03}" for i in range(n)],
                  3: ["NA", "None", *map(str, range(n - 2))], 4: [f"{i}.10" for i in range(n)]}[kind]  # fmt: skip
        frame.insert(int(r.integers(3)), "ID", values)
        names, label = {"ID": [*map(str, values)]}, f"ids such as {values[0]}"
    lost: list[int] = []
    if kind == 5:
        lost = [3, 17]
        frame.loc[lost, "smiles"] = ["C(C", "notamolecule"]
        frame["ID"] = range(n)
        names, options, label = (
            {"ID": [str(i) for i in range(n) if i not in lost]},
            {"invalid": "skip"},
            "invalid ones, skipped",
        )
    if kind == 6:
        frame.loc[[3], "smiles"], label = "C1CC", "an invalid one"
    if kind in (7, 8):
        parts = r.choice(["train", "val", "test"], n, p=[0.6, 0.2, 0.2])
        frame["split"], label = parts, "a column split"
        options = {"column": "split"} if kind == 8 else {}
    classes: list[str | None] | None = None
    if kind in (9, 10, 11, 12):
        values = {9: ("active", "inactive"), 10: ("0", "1"), 11: ("none", "weak", "NA"), 12: ("1", "1.5", "2")}[kind]
        classes = labels(r, values, n).truth  # type: ignore[assignment]
        frame["y"], label = classes, f"classes {', '.join(values)}"
        options = {"task": "graph_classification"} if kind == 12 else {}
    if kind == 13:
        frame["y"], label = [("?" if i % 9 == 4 else value) for i, value in enumerate(numbers_)], "target with ?"
    if kind == 14:
        frame["y"], label = [("" if i % 9 == 4 else value) for i, value in enumerate(numbers_)], "target with gaps"
    if kind == 15:
        frame["smiles"] = [text if i % 4 else f" {text} " for i, text in enumerate(texts)]
        label = "spaces around"
    path: Any = folder / "m.csv"
    if k // 16 % 2:
        path, label = folder / "m.parquet", f"{label}, parquet"
        if kind in (13, 14):
            frame["y"] = frame["y"].astype(str)
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            task = smiles(path, "y", **options)
            rows = read_rows(Preparation(task.num_features, task.edge_dim, source=task.source), path)
        except Exception as error:
            return label, failed(error)
    said, wrong = " ".join(str(warning.message) for warning in caught) + " ".join(task.notes), {}
    truth = dict(zip(texts, [*frame["y"]], strict=True))
    for graph in [*task.train, *task.val, *task.test]:
        value = truth.get(graph.smiles)
        if classes is not None:
            read = (task.class_names or ("0", "1"))[int(graph.y)]
            if not same_class(read, value):
                wrong["classes"] = f"{graph.smiles} is {read!r}, in truth {value!r}"
        elif task.class_names is not None and len(task.class_names) > 1:
            wrong["classes"] = f"classes {task.class_names[:4]}, in truth numbers"
        elif not math.isclose(float(graph.y), float(value), rel_tol=1e-4, abs_tol=1e-6):  # type: ignore[arg-type]
            wrong["classes"] = f"{graph.smiles} is {float(graph.y)}, in truth {value}"
    for name, expected in names.items():
        read_names = [*map(str, rows.ids.get(name, []))]
        if len(read_names) > len(expected):  # with the rows that are left out
            read_names = [value for i, value in enumerate(read_names) if i not in lost]
        if not read_names and getattr(rows, "table", None) is not None and name in rows.table:
            read_names = [str(rows.table[name].iloc[i]) for i in (range(n) if rows.numbers is None else rows.numbers)]
        if len(read_names) != len(expected) or not all(map(same_id, read_names, expected)):
            wrong["joins"] = f"{name} is {read_names[:3]} in the names of rows, in truth {expected[:3]}"
    if kind == 7 and "split" not in said:
        wrong["features"] = "the column split is passed over without a word"
    for row in r.integers(len(rows.graphs), size=3).tolist():
        alone = frame[frame["smiles"] == rows.graphs[row].smiles].reset_index(drop=True)
        if len(alone) == 1:
            (graph,) = read_rows(Preparation(task.num_features, task.edge_dim, source=task.source), alone).graphs
            pairs = [(graph[key].double(), rows.graphs[row][key].double()) for key in ("x", "edge_attr", "y")]
            if not all(torch.allclose(one, other, equal_nan=True) for one, other in pairs):
                wrong["features"] = f"{graph.smiles} alone differs"
    return label, Outcome(wrong=wrong)


# Command --------------------------------------------------------------------------------------------------------------


def of_tables(kind: str) -> Callable[[Rng, int, Path], tuple[str, Outcome]]:
    def run(r: Rng, k: int, folder: Path) -> tuple[str, Outcome]:
        case = KINDS[kind](r, k)
        return case.label, outcome(case, folder)

    return run


RUNNERS: dict[str, Callable[[Rng, int, Path], tuple[str, Outcome]]] = {
    **{kind: of_tables(kind) for kind in KINDS},
    **{
        "changed later": changed,
        "two kinds": two_kinds,
        "arrays": arrays,
        "programs": programs,
        "matrices": matlab,
        "molecules": molecules,
    },
}


def outcomes(kind: str, numbers: Iterable[int], seed: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the label and the outcome of some files of a kind; each number is another form."""
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            yield RUNNERS[kind](np.random.default_rng([seed, number, *kind.encode()]), number, Path(folder))


def later_outcomes(numbers: Iterable[int], seed: int) -> Iterator[tuple[str, str, Outcome]]:
    """Yield the law, the label and the outcome of later tables; each number is another column or pair of formats."""
    for number in numbers:
        form, other = [*product(FORMS, FORMS)][number % 9]
        with tempfile.TemporaryDirectory() as folder:
            r = np.random.default_rng([seed, number // 9])
            for label, law, result in later(r, number // 9, Path(folder), form, other):
                yield f"{law}: {form}, {other}", label, result


def summary(results: Sequence[tuple[str, str, Outcome]]) -> list[str]:
    """Return a table with a row for each kind."""
    lines = ["| kind | files | right | wrong joins | wrong classes | wrong features | warned | refused | crashes |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for kind in dict.fromkeys(kind for kind, _, _ in results):
        own = [result for other, _, result in results if other == kind]
        wrong = [sum(aspect in result.wrong for result in own) for aspect in ASPECTS]
        refused, crashed = sum(bool(result.refusal) for result in own), sum(bool(result.crash) for result in own)
        warned = sum(bool(result.warned) and not result.wrong for result in own)
        right = sum(not (result.refusal or result.crash or result.wrong or result.warned) for result in own)
        lines.append(f"| {kind} | {' | '.join(map(str, [len(own), right, *wrong, warned, refused, crashed]))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=72, help="files of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first file: others are other forms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", nargs="*", help=f"some of {', '.join(RUNNERS)}, later")
    parser.add_argument("--show", action="store_true", help="also list each file that is not right")
    arguments = parser.parse_args()
    kinds = arguments.kind or [*RUNNERS, "later"]
    results: list[tuple[str, str, Outcome]] = []
    numbers = range(arguments.first, arguments.first + arguments.files)
    for kind in kinds:
        if kind == "later":
            every = range(9 * len(later_columns(np.random.default_rng(0), M)))
            results += later_outcomes(every, arguments.seed)
        else:
            results += [(kind, *pair) for pair in outcomes(kind, numbers, arguments.seed)]
    order = [*dict.fromkeys(kind for kind, _, _ in results)]
    results.sort(key=lambda result: order.index(result[0]))
    print("\n".join(summary(results)))
    for title, field in (
        ("Wrong", "wrong"),
        ("Warned", "warned"),
        ("Crashes", "crash"),
        ("Refused", "refusal"),
        ("Spellings that no note names", "unsaid"),
    ):
        texts: Counter[str] = Counter()
        for kind, label, result in results:
            if value := getattr(result, field):
                text = (
                    "; ".join(f"{aspect}: {text}" for aspect, text in value.items())
                    if isinstance(value, Mapping)
                    else value
                )
                texts[
                    f"{kind} ({label}): {text}"
                    if arguments.show or field != "refusal"
                    else re.sub(r"[0-9]+", "#", text)[:160]
                ] += 1
        print(
            f"\n{title} ({sum(texts.values())}):", *(f"- {count} x {text}" for text, count in texts.items()), sep="\n"
        )
    return int(any(result.wrong or result.crash for _, _, result in results))


if __name__ == "__main__":
    sys.exit(main())
