"""Tables of accounts and payments that are broken in one place each, with a part of the message that is due."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet

Rows = list[list[str]]


class Broken(NamedTuple):
    """Files by name, of which the first two are the tables of nodes and edges, and a part of the message."""

    files: Mapping[str, bytes]
    message: str


def accounts(rows: int) -> Rows:
    """Return a sound table of nodes with its header."""
    cells = ([f"A{i}", str(20 + i % 50), ("Oslo", "Rome")[i % 2], f"2024-01-{1 + i % 28:02}"] for i in range(rows))
    return [
        ["id", "age", "city", "since", "fraud"],
        *([*row, ("no", "yes")[i % 3 == 0]] for i, row in enumerate(cells)),
    ]


def payments(rows: int) -> Rows:
    """Return a sound table of edges among as many nodes, with its header."""
    return [["src", "dst", "amount"], *([f"A{i}", f"A{(7 * i + 1) % rows}", f"{i % 90}.5"] for i in range(rows))]


def as_text(rows: Rows, separator: str = ",") -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def as_parquet(rows: Rows) -> bytes:
    file = io.BytesIO()
    columns = [pa.array(column) for column in zip(*rows[1:], strict=True)]
    parquet.write_table(pa.Table.from_arrays(columns, rows[0]), file)
    return file.getvalue()


def cell(row: int, column: int, value: str) -> Callable[[Rows], bytes]:
    """Return a change of a table: another value in one row, as a spreadsheet counts them, and column."""

    def changed(rows: Rows) -> bytes:
        rows[row - 1][column] = value
        return as_text(rows)

    return changed


def line(row: int, text: str | bytes) -> Callable[[Rows], bytes]:
    """Return a change of a table: another line in place of one row."""

    def changed(rows: Rows) -> bytes:
        lines = as_text(rows).split(b"\n")
        lines[row - 1] = text if isinstance(text, bytes) else text.encode()
        return b"\n".join(lines)

    return changed


def with_columns(names: list[str], write: Callable[[Rows], bytes] = as_text) -> Callable[[Rows], bytes]:
    return lambda rows: write([names, *rows[1:]])


NODES: dict[str, tuple[Callable[[Rows], bytes], str]] = {
    "UTF-8 with a row of Latin-1": (
        lambda rows: (
            (as_text(rows) + "A98,22,Tromsø,2024-01-04,yes\n".encode())
            + "A99,23,Tromsø,2024-01-04,yes\n".encode("latin-1")
        ),
        "nodes.csv, row 43: the byte 0xf8 is not UTF-8. Other rows are",
    ),
    "a space after an id": (cell(5, 0, "A3 "), "nodes.csv, row 5: id 'A3 ' has a space at an end"),
    "a comment": (line(1, "# accounts"), "nodes.csv: row 1 is a comment, '# accounts', expected the names"),
    "UTF-16 without a mark": (lambda rows: as_text(rows).decode().encode("utf-16-le"), "nodes.csv, row 1: a zero byte"),
    "UTF-16, cut off": (lambda rows: as_text(rows).decode().encode("utf-16")[:-1], "nodes.csv begins as UTF-16"),
    "UTF-8, cut off within a letter": (
        lambda rows: as_text(rows) + "A99,23,Tromsø".encode()[:-1],
        "nodes.csv, row 42: the byte 0xc3 is not UTF-8. It is cut off",
    ),
    "commas below a header of semicolons": (
        line(1, "id;age;city;since;fraud"),
        "nodes.csv, row 2: 5 fields divided by ',', the header has 1 (and 39 more rows)",
    ),
    "a row of semicolons": (line(7, "A5;25;Rome;2024-01-06;no"), "nodes.csv, row 7: 1 field divided by ','"),
    "a comma within a value": (
        line(6, "A4,24,Oslo, Norway,2024-01-05,no"),
        "nodes.csv, row 6: 6 fields divided by ','",
    ),
    "thousands by commas": (line(6, "A4,1,024,Oslo,2024-01-05,no"), "nodes.csv, row 6: 6 fields"),
    "Excel's sep=": (lambda rows: b"sep=;\n" + as_text(rows, ";"), "nodes.csv: row 1 is 'sep='"),
    "a row too short": (
        line(9, "A7,27,Rome"),
        "nodes.csv, row 9: 3 fields divided by ',', the header has 5. since",
    ),
    "all rows too long": (
        lambda rows: as_text([rows[0], *([*row, ""] for row in rows[1:])]),
        "nodes.csv, row 2: 6 fields divided by ',', the header has 5 (and 39 more rows)",
    ),
    "cut off in a row": (
        lambda rows: as_text(rows)[:-18],
        "nodes.csv, row 41: the file ends after 3 of 5 fields, in city. It is cut off",
    ),
    "cut off within quotes": (
        lambda rows: as_text(rows) + b'A99,30,"New Yo',
        "nodes.csv, row 42: a quote is not closed",
    ),
    "ends in zero bytes": (lambda rows: as_text(rows) + bytes(512), "nodes.csv, row 42: a zero byte"),
    "a quote that is never closed": (line(4, 'A2,22,"Oslo,2024-01-03,no'), "nodes.csv, row 4: a quote is not closed"),
    "quotes within quotes": (line(4, 'A2,22,"the "old" town",2024-01-03,no'), "nodes.csv, row 4: ',' expected after"),
    "an id twice": (cell(12, 0, "A3"), "nodes.csv, row 12: id 'A3' stands twice, first in nodes.csv, row 5"),
    "no id": (cell(12, 0, ""), "nodes.csv, row 12: id is empty"),
    "a column twice": (
        with_columns(["id", "age", "city", "age", "fraud"]),
        "nodes.csv: columns 2 and 4 are both called 'age'",
    ),
    "no bytes": (lambda rows: b"", "nodes.csv is empty"),
    "a header alone": (
        lambda rows: as_text(rows[:1]),
        "nodes.csv has the columns id, age, city, since, fraud and no",
    ),
    "line ends alone": (lambda rows: b"\n\n\n", "nodes.csv: row 1 is empty"),
    "no header": (lambda rows: b"1,20,0\n2,30,1\n", "nodes.csv: row 1 is 1, 20, 0, expected the names of the columns"),
    "two files in one": (
        lambda rows: as_text(rows) + as_text([rows[0], ["B1", "20", "Oslo", "2024-01-01", "no"]]),
        "nodes.csv, row 42: fraud is 'fraud', as in the header",
    ),
    "a formula": (cell(8, 1, "=B7+1"), "nodes.csv, row 8: age is '=B7+1', a formula"),
    "a formula in the target": (cell(8, 4, "=IF(B8>1)"), "nodes.csv, row 8: fraud is '=IF(B8>1)', a formula"),
    "a failed formula": (cell(8, 2, "#REF!"), "nodes.csv, row 8: city is '#REF!', a formula"),
    "an infinite number": (cell(8, 1, "inf"), "nodes.csv, row 8: age is 'inf', expected a finite number"),
    "a word among numbers": (cell(8, 1, "twenty"), "nodes.csv, row 8: age is 'twenty', expected a number"),
    "a unit": (cell(8, 1, "26 years"), "nodes.csv, row 8: age is '26 years', expected a number"),
    "a day that no month has": (cell(8, 3, "2024-02-30"), "nodes.csv, row 8: since is '2024-02-30', expected a date"),
    "a workbook under another name": (lambda rows: b"PK\x03\x04" + bytes(60), "nodes.csv is an Excel workbook"),
    "a page of a login": (lambda rows: b"<!doctype html><title>Login</title>", "nodes.csv is a page of HTML"),
    "no target": (with_columns(["id", "age", "city", "since", "frod"]), "Did you mean frod?"),
    "an empty target": (
        lambda rows: as_text([rows[0], *([*row[:4], ""] for row in rows[1:])]),
        "nodes.csv: fraud is empty in all rows",
    ),
}
EDGES: dict[str, tuple[Callable[[Rows], bytes], str]] = {
    "an unknown end": (cell(12, 0, "A77"), "edges.csv, row 12: src 'A77' is not in nodes.csv"),
    "unknown ends": (
        lambda rows: as_text([rows[0], *([row[0], "B" + row[1], row[2]] for row in rows[1:])]),
        "edges.csv, row 2: dst 'BA1' is not in nodes.csv (and 39 more rows)",
    ),
    "a space after an id": (cell(12, 1, "A31 "), "row 12: dst 'A31 ' has a space at an end. Delete it"),
    "an id in small letters": (
        cell(12, 1, "a31"),
        "row 12: dst 'a31' is not in nodes.csv. Did you mean 'A31'?",
    ),
    "ids with leading zeros": (
        cell(12, 1, "00A31"),
        "row 12: dst '00A31' is not in nodes.csv. Did you mean 'A31'?",
    ),
    "an edge without an end": (cell(12, 1, ""), "edges.csv, row 12: dst is empty"),
    "no rows": (lambda rows: as_text(rows[:1]), "edges.csv has the columns src, dst, amount and no rows"),
    "a byte order mark within": (cell(12, 0, "\ufeffA10"), "edges.csv, row 12: src '\\ufeffA10' is not in nodes.csv"),
    "an amount that is a word": (cell(12, 2, "ten"), "edges.csv, row 12: amount is 'ten', expected a number"),
    "an amount with a comma": (
        line(12, "A10,A31,10,5"),
        "edges.csv, row 12: 4 fields divided by ','",
    ),
}
PARQUET: dict[str, tuple[Callable[[Rows], bytes], str]] = {
    "Parquet, cut off": (lambda rows: as_parquet(rows)[:-100], "nodes.parquet is not a whole Parquet file"),
    "Parquet with a column twice": (
        with_columns(["id", "age", "city", "age", "fraud"], as_parquet),
        "nodes.parquet: columns 2 and 4 are both called 'age'",
    ),
    "Parquet with an id twice": (
        lambda rows: as_parquet([*rows, rows[4]]),
        "nodes.parquet, row 41: id 'A3' stands twice, first in nodes.parquet, row 4",
    ),
    "CSV called Parquet": (as_text, "nodes.parquet is not a whole Parquet file"),
}


def broken_tables() -> dict[str, Broken]:
    """Return the broken tables by name, of 40 rows."""
    rows = 40
    nodes, edges = as_text(accounts(rows)), as_text(payments(rows))
    tables = {}
    for name, (change, message) in NODES.items():
        tables[name] = Broken({"nodes.csv": change(accounts(rows)), "edges.csv": edges}, message)
    for name, (change, message) in EDGES.items():
        tables[name] = Broken({"nodes.csv": nodes, "edges.csv": change(payments(rows))}, message)
    for name, (change, message) in PARQUET.items():
        tables[name] = Broken({"nodes.parquet": change(accounts(rows)), "edges.csv": edges}, message)
    return tables


def large_tables(rows: int = 1_000_000) -> dict[str, Broken]:
    """Return tables of `rows` rows of which the last one is bad."""
    nodes, edges = as_text(accounts(rows)), as_text(payments(rows))

    def ends_in(table: bytes, row: str | bytes) -> bytes:
        return table[: table.rindex(b"\n", 0, -1) + 1] + (row if isinstance(row, bytes) else row.encode()) + b"\n"

    row = rows + 1
    bad: dict[str, tuple[str | bytes, str]] = {
        "a row too short": ("A1,A2", "2 fields divided by ',', the header has 3"),
        "an unknown end": ("A1,B2,3.5", "dst 'B2' is not in nodes.csv"),
        "a word among numbers": ("A1,A2,ten", "amount is 'ten', expected a number"),
        "an infinite number": ("A1,A2,inf", "amount is 'inf', expected a finite number"),
        "a formula": ("A1,A2,=C1*2", "amount is '=C1*2', a formula"),
        "a quote that is never closed": ('A1,A2,"3.5', "a quote is not closed"),
        "Latin-1": ("A1,Aø,3.5".encode("latin-1"), "dst 'Aø' is not in nodes.csv"),
    }
    tables = {
        name: Broken({"nodes.csv": nodes, "edges.csv": ends_in(edges, text)}, f"edges.csv, row {row}: {message}")
        for name, (text, message) in bad.items()
    }
    twice = ends_in(nodes, "A0,20,Oslo,2024-01-01,no")
    message = f"nodes.csv, row {row}: id 'A0' stands twice, first in nodes.csv, row 2"
    return tables | {"an id twice": Broken({"nodes.csv": twice, "edges.csv": edges}, message)}
