"""Tables of known truth, drawn at random and written as people write them, for `files.py`."""

from __future__ import annotations

import datetime
import decimal
import math
import unicodedata
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Rng = np.random.Generator
N, M = 60, 150  # nodes and edges
MISSING = ("?", "-", "\\N", "NAN", "na", "N.A.", "(null)", ".", "n/a", "", "NA", "NaN", "null", "None")


class Column(NamedTuple):
    """Values of a column and how they are written.

    `kind` is id, src, dst, number, category, date, class or target; text or split, which are no features; or unchecked.
    `truth` has strings for ids and classes, floats for numbers and targets, datetimes for dates, None where missing.
    """

    kind: str
    truth: Sequence[Any]
    cells: Sequence[Any]


class Form(NamedTuple):
    """The form of a text file."""

    separator: str = ","
    encoding: str = "utf-8"
    end: str = "\n"
    quotes: bool = False  # around every field
    trailing: bool = False  # a separator at the end of each row
    comment: str = ""  # the first lines
    blank: bool = False  # blank lines among the rows
    header: bool = True


class Case(NamedTuple):
    """Tables of known truth; `files` is csv, parquet or frame."""

    nodes: Mapping[str, Column] | None
    edges: Mapping[str, Column]
    label: str  # what is special about it
    options: Mapping[str, Any] = {}
    form: Form = Form()
    files: str = "csv"
    spelling: str = ""  # of missing numbers, which a note should name
    parts: str = ""  # the type of a second file with half of the rows, csv or parquet
    change: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame  # of a frame


# Truth ----------------------------------------------------------------------------------------------------------------


def column(kind: str, truth: Sequence[Any], write: Callable[[Any], Any] = str) -> Column:
    return Column(kind, truth, ["" if value is None else write(value) for value in truth])


def numbers(r: Rng, n: int = N) -> Column:
    return column("number", r.normal(40, 10, n).round(2).tolist())


def categories(r: Rng, n: int = N, values: Sequence[str] = ("Oslo", "Rome", "Lima")) -> Column:
    return column("category", r.choice(values, n).tolist())


def labels(r: Rng, values: Sequence[str] = ("no", "yes"), n: int = N) -> Column:
    """Return a class for each row; each value is there often enough for a split."""
    return column("class", r.permutation([*values] * (n // len(values) + 1))[:n].tolist())


def target(r: Rng, n: int = M) -> Column:
    return column("target", r.normal(10, 3, n).round(2).tolist())


def case(
    r: Rng, label: str, ids: Sequence[str] | None = None, ends: Sequence[str] | None = None, **fields: Any
) -> Case:
    """Return a case of plain tables; `ends` are the ids as the table of edges writes them."""
    ids = [f"A{i}" for i in r.permutation(N)] if ids is None else ids
    ends = ids if ends is None else ends
    nodes = {"id": column("id", ids), "age": numbers(r), "city": categories(r), "y": labels(r)}
    src, dst = r.integers(len(ids), size=(2, M)).tolist()
    edges = {
        "src": Column("src", [ids[i] for i in src], [ends[i] for i in src]),
        "dst": Column("dst", [ids[i] for i in dst], [ends[i] for i in dst]),
        "amount": numbers(r, M),
    }
    return Case(nodes, edges, label)._replace(**fields)


def with_node(case: Case, **columns: Column) -> Case:
    """Return the case with other or further columns of nodes."""
    return case._replace(nodes={**(case.nodes or {}), **columns})


def pick(r: Rng, values: Sequence[Any]) -> Any:
    return values[int(r.integers(len(values)))]


# Kinds ----------------------------------------------------------------------------------------------------------------


def ids(r: Rng, k: int) -> Case:
    big = 2**53 + int(r.integers(10**6))
    near = [int(i) for i in r.permutation(N)]
    forms: list[tuple[str, Sequence[str], Sequence[str] | None]] = [
        ("ints from 1", [str(i + 1) for i in near], None),
        ("ints with gaps", [str(7 * i + 3) for i in near], None),
        ("zero-padded", [f"{i:03}" for i in near], None),
        ("zero-padded, not in edges", [f"{i:03}" for i in near], [str(i) for i in near]),
        ("padded beside plain", [f"{i // 2:03}" if i % 2 else str(i // 2) for i in near], None),
        ("versions 1.1 and 1.10", [f"{i // 6}.{('1', '10', '2', '20', '3', '30')[i % 6]}" for i in near], None),
        ("ints of 2^53", [str(big + i) for i in near], None),
        ("ints of 20 digits", [str(10**19 + i) for i in near], None),
        ("ints of 2^53 as floats", [f"{big + i}.0" for i in near], None),
        ("ints, floats in edges", [str(i + 1) for i in near], [f"{i + 1}.0" for i in near]),
        ("2^53, floats in edges", [str(big + i) for i in near], [f"{big + i}.0" for i in near]),
        ("text", [f"user{i}" for i in near], None),
        ("text, case differs", [f"{'aA'[i % 2]}{i // 2}" for i in near], None),
        ("spaces at the ends", [f" A{i} " for i in near], None),
        ("spaces in edges alone", [f"A{i}" for i in near], [f"A{i} " for i in near]),
        (
            "missing words",
            ["NA", "None", "null", "nan", "NaN", "N/A", "n/a", "NULL", "none", "Null", "<NA>", "#N/A"]
            + [f"C{i}" for i in range(N - 12)],
            None,
        ),
        ("countries", [*("NA", "NO", "NE", "DE", "IT"), *(f"{a}{b}" for a in "PQRST" for b in "ABCDEFGHIJK")], None),
        ("UUIDs", [str(uuid.UUID(int=int(r.integers(2**62)) << 60)) for _ in near], None),
        ("exponents", [f"{i % 10 + 1}e{i // 10 + 1}" for i in near], None),
        (
            "exponents, equal values",
            [("1e1", "10", "1E1", "1e01")[i % 4] + "" * i if i < 4 else f"x{i}" for i in near],
            None,
        ),
        ("signs", [f"{'+-'[i % 2]}{i // 2 + 1}" for i in near], None),
        ("hex", [hex(i * 1000) for i in near], None),
        ("dates", [str(datetime.date(2020, 1, 1) + datetime.timedelta(i)) for i in near], None),
        ("decimal commas", [f"{i // 6},{i % 6}" for i in near], None),
        ("umlauts and commas", [f"Müller, {i}" for i in near], None),
        ("true and false", ["True", "False", "true", "false", *(f"t{i}" for i in range(N - 4))], None),
        ("underscores", [f"1_{i // 2:02}" if i % 2 else f"1{i // 2:02}" for i in near], None),
        ("ints as floats", [f"{i}.0" for i in near], None),
        ("ints beside floats", [f"{i}.0" if i % 2 else f"{i}" for i in near], None),
        ("negative", [f"-{i + 1}" for i in near], None),
        ("composed in nodes alone", [f"Zoë{i}" for i in near], [unicodedata.normalize("NFD", f"Zoë{i}") for i in near]),
        ("no-break spaces in edges", [f"A{i}" for i in near], [f"A{i}\u00a0" for i in near]),
        ("quotes", [f'the "{i}"' for i in near], None),
        ("thousands", [f"{1000 + i:,}" for i in near], None),
        ("thousands in nodes alone", [f"{1000 + i:,}" for i in near], [str(1000 + i) for i in near]),
        ("long", [f"{'x' * 300}{i}" for i in near], None),
        ("hashes", [f"#{i}" for i in near], None),
        ("infinite words", ["inf", "-inf", "Infinity", "NaT", *(f"{i}" for i in range(N - 4))], None),
        ("decimals", [f"{i / 8:g}" for i in near], None),
        ("decimals, trailing zeros in edges", [f"{i}.5" for i in near], [f"{i}.50" for i in near]),
    ]
    own = len(forms)
    kind = k % (own + 7)
    if kind < own:
        label, names, ends = forms[kind]
        names = names[:N]
        edited = case(r, label, names, None if ends is None else ends[:N])
        if k // (own + 7) % 2:  # the edges alone
            alone = {name: c._replace(truth=c.cells) for name, c in edited.edges.items() if c.kind != "number"}
            return edited._replace(nodes=None, edges={**alone, "amount": target(r)}, label=f"{label}; edges alone")
        return edited
    plain = case(r, "", [str(i) for i in r.permutation(N)])
    rows = column("text", [*range(N)])
    if kind in (own, own + 1, own + 2):  # row numbers of to_csv or write.csv before the ids
        name = ("", "", "Unnamed: 0")[kind - own]
        nodes = dict(plain.nodes or {})
        account = nodes.pop("id")
        index = column("text", [*range(1, N + 1)]) if kind == own + 1 else rows
        nodes = {name: index, ("account", "id", "customer")[kind - own]: account, **nodes}
        edges = {"": column("text", [*range(M)]), **plain.edges} if kind == own else plain.edges
        return plain._replace(nodes=nodes, edges=edges, label="row numbers before the ids")
    if kind == own + 3:  # a column of row numbers with a name, beside the ids
        return plain._replace(
            nodes={"row": rows._replace(kind="unchecked"), **(plain.nodes or {})}, label="named row numbers before id"
        )
    if kind == own + 4:
        return case(r, "no header", form=Form(header=False))
    if kind == own + 5:
        ends_only = case(r, "no header, edges alone", [f"u{i}" for i in range(N)], form=Form(header=False))
        edges = {key: value for key, value in ends_only.edges.items() if key != "amount"}
        return ends_only._replace(nodes=None, edges=edges, options={"bipartite": False})
    nodes = dict(plain.nodes or {})
    nodes["country" if k % 2 else "ISO Code"] = nodes.pop("id")._replace(truth=forms[16][1][:N], cells=forms[16][1][:N])
    src, dst = (pick_ids(r, forms[16][1][:N]) for _ in range(2))
    order = [next(reversed(nodes)), *list(nodes)[:-1]]
    return Case(
        {key: nodes[key] for key in order},
        {"Source": src._replace(kind="src"), "Target": dst._replace(kind="dst")},
        "countries in a column of another name",
    )


def pick_ids(r: Rng, names: Sequence[str]) -> Column:
    return column("", r.choice(names, M).tolist())


def ends(r: Rng, k: int) -> Case:
    pairs = [
        *(("src", "dst"), ("source", "target"), ("from", "to"), ("Source", "Target"), ("from_account", "to_account")),
        *(("sender_id", "receiver_id"), ("nameOrig", "nameDest"), ("payer", "payee"), ("head", "tail"), ("u", "v")),
        *(("protein1", "protein2"), ("follower", "followee"), ("buyer", "seller"), ("origin", "destination")),
        *(
            ("caller", "callee"),
            ("user", "item"),
            ("userId", "movieId"),
            ("user_id", "product_id"),
            ("author", "paper"),
        ),
        *(
            ("customer", "article"),
            ("FromNodeId", "ToNodeId"),
            ("id_1", "id_2"),
            ("from_node", "to_node"),
            ("id1", "id2"),
        ),
    ]
    pair = pairs[k % len(pairs)]
    two = k % len(pairs) in (*range(15, 20), 12)
    names = [f"{'ab'[i % 2] if two else 'n'}{i}" for i in range(N)]
    src, dst = pick_ids(r, names[:: 2 if two else 1]), pick_ids(r, names[1::2] if two else names)
    others = {
        "tx_id": column("text", [f"t{i}" for i in r.permutation(M)]),
        "date": column("date", dates(r, M), lambda day: f"{day:%Y-%m-%d}"),
        "rating": column("number", r.integers(1, 6, M).astype(float).tolist(), lambda value: str(int(value))),
        "kind": categories(r, M, ("x", "y")),
        "order": column("unchecked", [str(10**6 + i) for i in r.permutation(M)]),
    }
    chosen = [name for name in others if r.random() < 0.5]
    columns = {pair[0]: src._replace(kind="src"), pair[1]: dst._replace(kind="dst")}
    columns |= {name: others[name] for name in chosen}
    order = list(columns)
    if k % 4:  # the ends are not first
        order = [order[i] for i in r.permutation(len(order))]
        if order.index(pair[0]) > order.index(pair[1]):
            order = order[::-1]
    columns = {name: columns[name] for name in order}
    if k % 3 != 2:  # else links
        columns["fraud"] = target(r)
    return Case(None, columns, f"{pair[0]}, {pair[1]} in {', '.join(columns)}")


def classes(r: Rng, k: int) -> Case:
    sets: list[tuple[str, Sequence[str], str | None]] = [
        ("none, mild, severe", ("none", "mild", "severe"), None),
        ("None and others", ("None", "layering", "smurfing"), None),
        ("NA among regions", ("NA", "EU", "APAC"), None),
        ("null among types", ("null", "int", "float"), None),
        ("nan among words", ("nan", "bread", "salt"), None),
        ("0, 1, 2", ("0", "1", "2"), None),
        ("1, 1.5, 2", ("1", "1.5", "2"), None),
        ("1.0, 2.0", ("1.0", "2.0"), None),
        ("True, False", ("True", "False"), None),
        ("yes, no", ("yes", "no"), None),
        ("007, 7", ("007", "7", "x"), None),
        ("+, -", ("+", "-"), None),
        ("umlauts", ("süß", "saß", "sass"), None),
        ("0, 1, empty", ("0", "1"), ""),
        ("words, empty", ("low", "high"), ""),
        ("0, 1, 2, ?", ("0", "1", "2"), "?"),
        ("a, b, ?", ("a", "b"), "?"),
        ("0, 1, -1", ("0", "1"), "-1"),
        ("1, 2, unknown", ("1", "2"), "unknown"),
        ("licit, unknown", ("licit", "illicit"), "unknown"),
        ("0, 1, NA", ("0", "1"), "NA"),
        ("0, 1, NaN", ("0", "1"), "NaN"),
        ("1, 2, >10", ("1", "2", ">10"), None),
        ("spaces at the ends", ("good ", "bad", " ugly"), None),
        ("case differs", ("Good", "good", "bad"), None),
        ("1 and 1.0", ("1", "1.0", "2"), None),
        ("TRUE, True, false", ("TRUE", "True", "false"), None),
        ("dates", ("2021-01-01", "2022-01-01"), None),
        ("words, spaces alone", ("low", "high"), " "),
        ("0, 1, low", ("0", "1", "low"), None),
        ("inf, 1, 2", ("inf", "1", "2"), None),
        ("decimal commas", ("0,5", "1", "1,5"), None),
        ("percent", ("5%", "10%"), None),
        ("0, 1, ?, listed", ("0", "1"), "?"),
        ("none, mild, none listed", ("mild", "severe"), "none"),
        ("+, -, named", ("+", "-"), None),
        ("regression, empty", (), ""),
        ("regression, ?", (), "?"),
        ("regression, NA", (), "NA"),
        ("regression, >20", (), ">20"),
    ]
    label, values, missing = sets[k % len(sets)]
    options: dict[str, Any] = {"task": "node_classification"} if values[:2] in (("1", "1.5"), ("0,5", "1")) else {}
    options |= {"missing": [missing]} if "listed" in label else {"categories": ["y"]} if "named" in label else {}
    y = labels(r, values) if values else column("target", r.normal(10, 3, N).round(2).tolist())
    if missing is not None:
        share = pick(r, (0.03, 0.1, 0.3))
        lost = r.random(N) < share
        lost[0] = True
        truth = [None if gone else value for gone, value in zip(lost, y.truth, strict=True)]
        y = Column(
            y.kind, truth, [missing if value is None else cell for value, cell in zip(truth, y.cells, strict=True)]
        )
    return with_node(case(r, label, options=options), y=y)


def missing(r: Rng, k: int) -> Case:
    spelling, share = (
        MISSING[k % len(MISSING)],
        (0.001, 0.01, 0.03, 0.1, 0.3)[k // len(MISSING) % 5 if k % 3 else k % 5],
    )
    n = 1000 if share < 0.01 else 400
    names = [f"A{i}" for i in range(n)]
    base = case(r, f"{spelling!r} in {share:.1%}", names, spelling=spelling)
    kind = k % 4
    values = [r.normal(40, 10, n).round(2), r.integers(0, 90, n), r.integers(0, 5, n), r.lognormal(3, 1, n).round(1)][
        kind
    ]
    lost = r.random(n) < share
    lost[int(r.integers(n))] = True
    truth = [None if gone else float(value) for gone, value in zip(lost, values, strict=True)]
    cells = [spelling if gone else str(value) for gone, value in zip(lost, values.tolist(), strict=True)]
    nodes = {"id": column("id", names), "age": Column("number", truth, cells), "y": labels(r, n=n)}
    return base._replace(nodes=nodes)


def separators(r: Rng, k: int) -> Case:
    separator = ",;\t| "[k % 5]
    edited = case(r, f"separator {separator!r}", form=Form(separator, quotes=bool(k % 2)))
    if k % 3 == 0:
        edited = with_node(edited, note=categories(r, values=("a, b", "c; d", "e | f", "g\th")))
    return edited


def decimal_commas(r: Rng, k: int) -> Case:
    def write(value: float) -> str:
        return f"{value:.2f}".replace(".", ",")

    separator = ";\t|, "[k % 5]
    truth = r.normal(40, 10, N).round(2).tolist()
    column_, label = Column("number", truth, [write(value) for value in truth]), "decimal commas"
    match k // 5 % 5:
        case 1:
            lost = r.random(N) < 0.15
            spelling = pick(r, ("-", "", "?", "k.A.", "NA"))
            truth = [None if gone else value for gone, value in zip(lost, truth, strict=True)]
            column_ = Column("number", truth, [spelling if value is None else write(value) for value in truth])
            label += f" and {spelling!r}"
        case 2:
            column_ = Column("number", truth, [f"{value:.4E}".replace(".", ",") for value in truth])
            label += ", exponents"
        case 3:
            truth = (1000 * r.random(N).round(4) * 10).round(2).tolist()
            cells = [f"{value:,.2f}".replace(",", "_").replace(".", ",").replace("_", ".") for value in truth]
            column_, label = Column("number", truth, cells), "thousands 1.234,50"
        case 4:
            column_ = Column("target", truth, [write(value) for value in truth])
    edited = case(r, f"{label}, {separator!r}", form=Form(separator, quotes=separator in ", "))
    edges = {**edited.edges, "amount": column("number", edited.edges["amount"].truth, write)}
    nodes = (
        {**(edited.nodes or {}), "y": column_} if column_.kind == "target" else {**(edited.nodes or {}), "age": column_}
    )
    if column_.kind == "target":
        nodes["age"] = column("number", nodes["age"].truth, write)
    return edited._replace(nodes=nodes, edges=edges)


def encodings(r: Rng, k: int) -> Case:
    encoding = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252", "utf-16-be", "utf-32")[k % 8]
    names = [f"Müller{i}" if i % 3 else f"Sørås{i}" for i in r.permutation(N)]
    edited = case(r, encoding, names, form=Form(pick(r, ",;\t"), encoding))
    euro = "€" if encoding != "latin-1" else "ß"
    return with_node(
        edited, y=labels(r, ("süß", "sauer", f"5{euro}")), city=categories(r, values=("Tromsø", "Zürich", "Ulm"))
    )


def dialects(r: Rng, k: int) -> Case:
    forms = [
        ("CRLF", Form(end="\r\n")),
        ("CR", Form(end="\r")),
        ("quotes", Form(quotes=True)),
        ("trailing separators", Form(trailing=True)),
        ("comment lines", Form(comment="# exported 2024\n# two tables\n")),
        ("a comment of two fields", Form(comment="# src, dst\n")),
        ("blank lines", Form(blank=True)),
        ("blank first line", Form(comment="\n")),
        ("sep=;", Form(";", comment="sep=;\n")),
        ("a title above", Form(comment="Accounts of 2024\n")),
        ("CRLF, quotes, semicolons", Form(";", end="\r\n", quotes=True)),
        ("tabs, CRLF, BOM", Form("\t", "utf-8-sig", "\r\n")),
    ]
    label, form = forms[k % len(forms)]
    edited = case(r, label, form=form)
    if k >= len(forms):
        note = categories(r, values=('a "b" c', "it's", "x\ny"))
        return with_node(edited, note=note)
    return edited


def dates(r: Rng, n: int = N) -> list[datetime.datetime]:
    return [datetime.datetime(2019, 1, 1) + datetime.timedelta(int(day)) for day in r.integers(0, 2000, n)]


DATES = (
    *("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%d.%m.%Y %H:%M"),
    *(
        "%Y%m%d",
        "%d-%m-%Y",
        "%d.%m.%y",
        "%b %d, %Y",
        "%d %b %Y",
        "%Y/%m/%d",
        "%Y.%m.%d",
        "%m/%d/%Y %I:%M %p",
        "%d %B %Y",
    ),
    *("%Y-%m", "%d-%b-%y", "epoch", "%Y-%m-%dT%H:%M:%S.%f", "%m-%d-%Y", "%Y-%m-%d %H:%M:%S+02:00", "%a %b %d %Y", "%Y"),
)


def days(r: Rng, k: int) -> Case:
    form = DATES[k % len(DATES)]
    truth: list[datetime.datetime | None] = [*dates(r)]
    if form == "%Y":
        truth = [day and day.replace(month=1, day=1) for day in truth]
    if form == "%Y-%m":
        truth = [day and day.replace(day=1) for day in truth]
    if k // len(DATES) % 2:
        truth = [None if r.random() < 0.1 else day for day in truth]
    if form == "%Y%m%d" or form == "%Y":  # is a number
        column_ = Column(
            "number",
            [day and float(day.strftime(form)) for day in truth],
            [day.strftime(form) if day else "" for day in truth],
        )
    elif form == "epoch":
        column_ = Column(
            "number",
            [day and day.timestamp() for day in truth],
            [str(int(day.timestamp())) if day else "" for day in truth],
        )
    else:
        column_ = column("date", truth, lambda day: day.strftime(form))
    return with_node(case(r, form), since=column_)


def bools(r: Rng, k: int) -> Case:
    spellings = [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("yes", "no"), ("1", "0"), ("t", "f"),
                 ("Y", "N"), ("on", "off"), ("wahr", "falsch"), ("1.0", "0.0"), ("x", ""), ("T", "F")]  # fmt: skip
    yes, no = spellings[k % len(spellings)]
    truth: list[bool | None] = [bool(value) for value in r.random(N) < 0.5]
    if k >= len(spellings) and no:
        truth = [None if r.random() < 0.1 else value for value in truth]
    cells = ["" if value is None else (yes if value else no) for value in truth]
    if k % 24 >= 12 and k % 2:  # as the target
        return with_node(case(r, f"target {yes}, {no}"), y=Column("class", [cell or None for cell in cells], cells))
    is_number = yes in ("1", "1.0")
    kept = [
        (None if value is None else float(value)) if is_number else cell or None
        for value, cell in zip(truth, cells, strict=True)
    ]
    return with_node(case(r, f"{yes}, {no}"), paid=Column("number" if is_number else "category", kept, cells))


def typed(r: Rng, k: int) -> Case:
    """Return frames and Parquet files with a column of each type."""
    truth = r.integers(0, 50, N).astype(float)
    lost = r.random(N) < 0.15
    gaps = [None if gone else value for gone, value in zip(lost, truth.tolist(), strict=True)]
    text = r.choice(["u", "v", "w"], N).tolist()
    when = dates(r)
    kinds: list[tuple[str, Column]] = [
        ("Int64 with gaps", Column("number", gaps, pd.array([None if v is None else int(v) for v in gaps], "Int64"))),
        ("float32", Column("number", truth.tolist(), truth.astype("float32"))),
        ("Float64 with gaps", Column("number", gaps, pd.array(gaps, "Float64"))),
        ("int8", Column("number", truth.tolist(), truth.astype("int8"))),
        ("uint64", Column("number", truth.tolist(), truth.astype("uint64"))),
        ("Decimal", Column("number", truth.tolist(), [decimal.Decimal(int(v)) for v in truth])),
        ("Decimal with gaps", Column("number", gaps, [None if v is None else decimal.Decimal(int(v)) for v in gaps])),
        (
            "objects of int and None",
            Column("number", gaps, pd.Series([None if v is None else int(v) for v in gaps], dtype=object)),
        ),
        ("categorical text", Column("category", text, pd.Categorical(text))),
        ("categorical ints", Column("unchecked", text, pd.Categorical(truth.astype(int) % 4))),
        (
            "string with gaps",
            Column(
                "category",
                [None if g else t for g, t in zip(lost, text, strict=True)],
                pd.array([None if g else t for g, t in zip(lost, text, strict=True)], "string"),
            ),
        ),
        ("datetimes", Column("date", when, pd.Series(when).astype("datetime64[us]"))),
        (
            "datetimes with a zone",
            Column("date", when, pd.Series(when).dt.tz_localize("UTC").dt.tz_convert("Europe/Oslo")),
        ),
        ("dates", Column("date", when, [day.date() for day in when])),
        (
            "datetimes with gaps",
            Column(
                "date",
                [None if g else d for g, d in zip(lost, when, strict=True)],
                pd.Series([None if g else d for g, d in zip(lost, when, strict=True)]).astype("datetime64[us]"),
            ),
        ),
        ("bool", Column("category", [str(v > 25) for v in truth], truth > 25)),
        (
            "boolean with gaps",
            Column(
                "category",
                [None if v is None else str(v > 25) for v in gaps],
                pd.array([None if v is None else v > 25 for v in gaps], "boolean"),
            ),
        ),
        ("lists", Column("text", text, [[float(v), 1.0] for v in truth])),
        ("arrays", Column("text", text, [np.array([v, 2.0]) for v in truth])),
        ("numbers as text", Column("number", truth.tolist(), [str(v) for v in truth])),
        (
            "text with None spelled",
            Column(
                "category",
                [("None", "u", "w")[int(v) % 3] for v in truth],
                [("None", "u", "w")[int(v) % 3] for v in truth],
            ),
        ),
        ("timedeltas", Column("number", truth.tolist(), pd.to_timedelta(truth, "D"))),
        ("dicts", Column("text", text, [{"a": v} for v in truth])),
        (
            "infinite",
            Column("number", [math.inf if v > 45 else v for v in truth], [math.inf if v > 45 else v for v in truth]),
        ),
    ]
    label, added = kinds[k % len(kinds)]
    files = ("frame", "parquet")[(k + k // len(kinds)) % 2]
    names: Sequence[Any] = [f"A{i}" for i in r.permutation(N)]
    edited = case(r, f"{label}, {files}", [str(name) for name in names], files=files)
    nodes = {**(edited.nodes or {}), "v": added}
    nodes["age"] = nodes["age"]._replace(cells=nodes["age"].truth)
    edges = {**edited.edges, "amount": edited.edges["amount"]._replace(cells=edited.edges["amount"].truth)}
    return edited._replace(nodes=nodes, edges=edges)


def typed_ids(r: Rng, k: int) -> Case:
    """Return frames and Parquet files with ids of two types."""
    near = r.permutation(N)
    big = 2**53 + near
    uuids = [uuid.UUID(int=int(i)) for i in near]
    days_ = [datetime.date(2020, 1, 1) + datetime.timedelta(int(i)) for i in near]
    kinds: list[tuple[str, Sequence[str], Any, Callable[[Any], Any]]] = [
        ("int64 and float64", [str(i) for i in near], near, lambda values: np.asarray(values, float)),
        ("int64 and text", [str(i) for i in near], near, lambda values: [str(value) for value in values]),
        ("int64 and Int64", [str(i) for i in near], near, lambda values: pd.array(values, "Int64")),
        ("int64 and float text", [str(i) for i in near], near, lambda values: [f"{value}.0" for value in values]),
        ("big and float64", [str(i) for i in big], big, lambda values: np.asarray(values, float)),
        ("big and big", [str(i) for i in big], big, lambda values: values),
        ("uint64", [str(2**63 + int(i)) for i in near], 2**63 + near.astype("uint64"), np.array),
        ("categorical", [f"A{i}" for i in near], [f"A{i}" for i in near], lambda values: pd.Categorical(values)),
        ("float64 both", [f"{i / 4:g}" for i in near], near / 4, lambda values: np.asarray(values, float)),
        ("float64 near 2^53", [str(i) for i in big], big.astype(float), lambda values: np.asarray(values, float)),
        ("UUID objects", [*map(str, uuids)], uuids, lambda values: [str(value) for value in values]),
        ("dates", [*map(str, days_)], days_, lambda values: values),
    ]
    label, names, cells, convert = kinds[k % len(kinds)]
    files = ("frame", "parquet")[k // len(kinds) % 2]
    edited = case(r, f"{label}, {files}", names, [*range(N)], files=files)
    edges = {
        key: value._replace(cells=convert([cells[i] for i in value.cells]))
        for key, value in edited.edges.items()
        if key != "amount"
    }
    nodes = dict(edited.nodes or {})
    nodes |= {"id": nodes["id"]._replace(cells=cells), "age": nodes["age"]._replace(cells=nodes["age"].truth)}
    return edited._replace(nodes=nodes, edges=edges)


def splits(r: Rng, k: int) -> Case:
    """Return tables with the user's split among the columns, which is no feature, and a use of it."""
    words = pick(
        r,
        (
            ("train", "val", "test"),
            ("Train", "Valid", "Test"),
            ("training", "validation", "testing"),
            ("train", "dev", "test"),
        ),
    )
    parts = r.choice(3, N, p=[0.6, 0.2, 0.2])
    name = ("split", "Split", "set", "partition", "subset", "fold")[k % 6]
    edited = case(r, f"{name} of {words[0]}")
    if k % 4 == 3:
        masks = {}
        for i, key in enumerate(("train", "val", "test")):
            truth = [bool(part == i) for part in parts]
            masks[f"{key}_mask"] = Column("split", truth, [*map(str, truth)])
        return with_node(edited, **masks)._replace(label="masks")
    split = Column("split", parts.tolist(), [words[part] for part in parts])
    if k % 4 == 2:
        return with_node(edited, **{name: split._replace(kind="used split")})._replace(
            options={"column": name}, label=f"column={name}"
        )
    return with_node(edited, **{name: split})


def whole(r: Rng, low: int, high: int, lost: float = 0.0) -> list[float | None]:
    return [None if r.random() < lost else float(value) for value in r.integers(low, high, N)]


def lossy(values: Sequence[Any], r: Rng) -> list[Any]:
    return [None if r.random() < 0.2 else value for value in values]


def rare(r: Rng, k: int) -> Case:
    """Return columns of numbers, codes and names that are easily taken for another kind."""

    def number(truth: Sequence[float | None], write: Callable[[float], str], missing: Sequence[str] = ("",)) -> Column:
        return Column("number", truth, [pick(r, missing) if value is None else write(value) for value in truth])

    def day(
        truth: Sequence[datetime.datetime | None], write: Callable[[datetime.datetime], str], missing: str
    ) -> Column:
        return Column("date", truth, [missing if value is None else write(value) for value in truth])

    def category(*values: str, write: Callable[[str], str] = str, lost: float = 0.0) -> Column:
        return column("category", [None if r.random() < lost else str(value) for value in r.choice(values, N)], write)

    def zero(text: str) -> str:
        return text + pick(r, ("", ".0")) * (text != "A")

    def grouped(mark: str) -> Callable[[float], str]:
        return lambda value: f"{value:,.0f}".replace(",", mark)

    iso, named = "%Y-%m-%d", {"categories": ["v"]}
    words = [pick(r, ("low", "high")) if r.random() < 0.2 else str(value) for value in r.integers(0, 50, N)]
    kinds: list[tuple[str, Callable[[], Column], dict[str, Any]]] = [
        ("codes with zeros", lambda: category(*(f"{i:03}" for i in range(8))), {}),
        ("codes that are named", lambda: category(*map(str, range(8))), named),
        ("numbers that are named", lambda: category("1", "1.5", "2"), named),
        ("names", lambda: column("text", [f"Person {i}" for i in range(N)]), {}),
        ("percent", lambda: number(whole(r, 0, 100), lambda x: f"{x:.0f}%"), {}),
        ("euros", lambda: number(whole(r, 0, 100), lambda x: f"€{x:.2f}"), {}),
        ("thousands", lambda: number(whole(r, 1000, 10**6), grouped(",")), {}),
        ("1,234 quoted", lambda: number(whole(r, 100, 9999), grouped(",")), {}),
        ("1,234 alone", lambda: number(whole(r, 1000, 9999), grouped(",")), {}),
        ("1'234", lambda: number(whole(r, 100, 9999), grouped("'")), {}),
        ("1_234", lambda: number(whole(r, 100, 9999), grouped("_")), {}),
        ("1 234", lambda: number(whole(r, 100, 9999), grouped("\u202f")), {}),
        ("units", lambda: number(whole(r, 0, 100), lambda x: f"{x:.0f} km"), {}),
        ("signs", lambda: number(whole(r, -9, 9), lambda x: f"{x:+.0f}"), {}),
        ("exponents", lambda: number(r.normal(size=N).round(6).tolist(), lambda x: f"{x:.9e}"), {}),
        ("Unicode minus", lambda: number(whole(r, -9, 9), lambda x: f"{x:.0f}".replace("-", "\u2212")), {}),
        ("hidden spaces", lambda: number(r.normal(size=N).round(3).tolist(), lambda x: f"{x}\u00a0"), {}),
        ("large", lambda: number((r.random(N) * 1e12).round().tolist(), lambda x: f"{x:.0f}"), {}),
        ("long integers", lambda: number([2.0**60 + x for x in r.integers(0, 2**50, N)], lambda x: f"{x:.0f}"), {}),
        ("heavy tail", lambda: number(np.exp(r.normal(3, 4, N)).round(3).tolist(), str), {}),
        ("times of day", lambda: number(whole(r, 0, 1440), lambda x: f"{int(x) // 60:02}:{int(x) % 60:02}"), {}),
        ("Inf", lambda: number([math.inf, *whole(r, 0, 9)[1:]], lambda x: str(x).title()), {}),
        ("three spellings", lambda: number(whole(r, 0, 50, 0.2), str, ("?", "-", "n/a")), {}),
        ("'about 5'", lambda: number(whole(r, 0, 50), lambda x: pick(r, ("", "", "", "about ")) + str(x)), {}),
        ("numbers and words", lambda: Column("unchecked", words, words), {}),
        ("names of digits", lambda: column("unchecked", [str(10**15 + x) for x in r.permutation(N)]), {}),
        ("constant", lambda: column("text", ["7"] * N), {}),
        ("empty", lambda: column("text", [None] * N), {}),
        ("spaces alone", lambda: Column("text", [None] * N, [" "] * N), {}),
        ("formulas", lambda: column("text", [f"=A{i}+1" for i in range(N)]), {}),
        ("category with gaps", lambda: category("a", "b", lost=0.2), {}),
        ("category none", lambda: category("none", "some", "NA"), {}),
        ("category, spaces", lambda: category("a", "b", write=lambda text: text + " " * int(r.integers(3))), {}),
        ("category 1 and 1.0", lambda: category("1", "2", write=zero), named),
        ("category A, 1, 1.0", lambda: category("1", "2", "A", write=zero), {}),
        ("True, TRUE, true", lambda: category("True", "False", write=lambda x: pick(r, (x, x.upper(), x.lower()))), {}),
        ("dates, 0000-00-00", lambda: day(lossy(dates(r), r), lambda x: x.strftime(iso), "0000-00-00"), {}),
        ("dates, NULL", lambda: day(lossy(dates(r), r), lambda x: x.strftime(iso), "NULL"), {}),
        ("dates, ?", lambda: day(lossy(dates(r), r), lambda x: x.strftime("%d.%m.%Y"), "?"), {}),
        ("dates beside times", lambda: day(dates(r), lambda x: x.strftime(iso + " %H:%M:%S" * (x.day % 2)), ""), {}),
        ("dates, no zeros", lambda: day(dates(r), lambda x: f"{x.year}-{x.month}-{x.day}", ""), {}),
        (
            "days of 12 at most",
            lambda: day([x.replace(day=1 + x.day % 12) for x in dates(r)], lambda x: f"{x:%d/%m/%Y}", ""),
            {},
        ),
    ]
    label, added, options = kinds[k % len(kinds)]
    spelling = "low" if label == "numbers and words" else ""
    return with_node(case(r, label, options=options, spelling=spelling), v=added())


def parts(r: Rng, k: int) -> Case:
    """Return tables in two files each, the second with the columns in another order."""
    near = [int(i) for i in r.permutation(N)]
    half = N // 2
    names = [
        [str(i) for i in near],
        [f"A{i}" for i in near],
        [str(i) if row < half else f"x{i}" for row, i in enumerate(near)],
        [str(i) if row < half else f"{i:04}" for row, i in enumerate(near)],
        [f"{i}.0" if row < half else str(i) for row, i in enumerate(near)],
        [("NA" if i == 7 else "None" if i == 9 else f"{i}") for i in near],
    ][k % 6]
    edited = case(r, f"ids {names[0]} and {names[-1]}", names)
    ints = r.integers(1, 4, N)
    gaps = [None if row >= half and r.random() < 0.3 else float(value) for row, value in enumerate(ints)]
    edited = with_node(
        edited,
        age=Column(
            "number", ints.astype(float).tolist(), [str(i) if row < half else f"{i}.0" for row, i in enumerate(ints)]
        ),
        code=Column("category", (c := [str(i) if row < half or i < 3 else "x" for row, i in enumerate(ints)]), c),
        score=Column("number", gaps, ["?" if value is None else f"{value:.0f}" for value in gaps]),
    )
    y = [f"{i}" if row < half else f"{i}.0" for row, i in enumerate(r.integers(1, 4, N))]
    edited, form = with_node(edited, y=Column("class", y, y)) if k % 2 else edited, ("csv", "parquet")[k // 6 % 2]
    return edited._replace(parts=form, label=f"{edited.label}, {form}", options={"categories": ["code"]})


def indexed(r: Rng, k: int) -> Case:
    """Return frames with indexes of their own."""
    names = [str(i) for i in r.permutation(N)]
    changes: list[tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
        ("ids in the index", lambda frame: frame.set_index("id") if "id" in frame else frame),
        ("rows of a longer frame", lambda frame: frame.set_axis(range(100, 100 + 3 * len(frame), 3))),
        ("index in another order", lambda frame: frame.set_axis([*reversed(range(len(frame)))])),
        ("index of equal labels", lambda frame: frame.set_axis([0] * len(frame))),
        ("index of text", lambda frame: frame.set_axis([f"row {i}" for i in range(len(frame))])),
        ("column names of numbers", lambda frame: frame.rename(columns={"age": 1, "city": 2.5, "amount": 1})),
        ("objects", lambda frame: frame.astype(object)),
        ("strings", lambda frame: frame.astype({name: "string" for name in frame if name in ("id", "src", "dst")})),
        ("a named index of rows", lambda frame: frame.rename_axis("row")),
        ("columns with a name", lambda frame: frame.rename_axis("columns", axis=1)),
    ]
    label, change = changes[k % len(changes)]
    files = ("frame", "parquet")[k // len(changes) % 2]
    edited = case(r, f"{label}, {files}", names, files=files, change=change)
    nodes = {key: value._replace(cells=value.truth) for key, value in (edited.nodes or {}).items()}
    edges = {key: value._replace(cells=value.truth) for key, value in edited.edges.items()}
    if label == "column names of numbers":
        nodes = {{"age": "1", "city": "2.5"}.get(key, key): value for key, value in nodes.items()}
        edges = {{"amount": "1"}.get(key, key): value for key, value in edges.items()}
        back: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame.rename(columns={"1": 1, "2.5": 2.5})  # noqa: E731
        edited = edited._replace(change=back)
    if label == "a named index of rows":
        row = {"row": Column("unchecked", [None] * N, [])}
        nodes = {**nodes, **row}
        edges = {**edges, "row": Column("unchecked", [None] * M, [])}
    return edited._replace(nodes=nodes, edges=edges)


KINDS: dict[str, Callable[[Rng, int], Case]] = {
    **{"ids": ids, "ids by type": typed_ids, "ends": ends, "classes": classes, "missing": missing},
    **{"separators": separators, "decimal commas": decimal_commas, "encodings": encodings, "dialects": dialects},
    **{"dates": days, "bools": bools, "types": typed, "splits": splits, "odd columns": rare},
    **{"several files": parts, "indexes": indexed},
}


# Files ----------------------------------------------------------------------------------------------------------------


def text_of(columns: Mapping[str, Column], form: Form) -> bytes:
    """Return a table as a text file."""
    special = (form.separator, '"', "\n", "\r")

    def field(cell: Any) -> str:
        text = str(cell)
        return '"' + text.replace('"', '""') + '"' if form.quotes or any(mark in text for mark in special) else text

    rows = [[*columns]] if form.header else []
    rows += map(list, zip(*(column.cells for column in columns.values()), strict=True))
    lines = [form.separator.join(map(field, row)) + form.separator * form.trailing for row in rows]
    if form.blank:
        lines[3:3] = [""]
        lines.append("")
    return (form.comment.replace("\n", form.end) + form.end.join(lines) + form.end).encode(form.encoding)


def frame_of(columns: Mapping[str, Column]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(column.cells) for name, column in columns.items()})


def write(columns: Mapping[str, Column] | None, path: Path, case: Case) -> Any:
    """Return a table as a frame, or the path of its file, or of two."""
    if columns is None:
        return None
    if case.parts:
        half = len(next(iter(columns.values())).cells) // 2
        first, second = ({name: c._replace(cells=c.cells[rows]) for name, c in columns.items()}
                         for rows in (slice(half), slice(half, None)))  # fmt: skip
        second = dict(reversed(second.items()))
        others = case._replace(parts="", files=case.parts)
        return [write(first, path, case._replace(parts="")), write(second, path.with_name(f"{path.name}2"), others)]
    columns = {name: c for name, c in columns.items() if len(c.cells)}
    if case.files == "frame":
        return case.change(frame_of(columns))
    path = path.with_suffix(
        ".parquet" if case.files == "parquet" else ".tsv" if case.form.separator == "\t" else ".csv"
    )
    if case.files == "parquet":
        frame = case.change(frame_of(columns))
        frame.columns = frame.columns.map(str)
        frame.to_parquet(path)
    else:
        path.write_bytes(text_of(columns, case.form))
    return path
