"""Tables from CSV, TSV and Parquet files as pandas frames, and errors that name the file, the row and the column."""

from __future__ import annotations

import csv
import mmap
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..files import needs

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "Null", "null", "None", "none")
SEPARATORS = ",;\t|"
TEXT = {".csv": "", ".tsv": "\t", ".tab": "\t", ".txt": ""}
PARQUET = (".parquet", ".pq")
_FIRST = 2  # the first row of values, where the header is row 1, as in a spreadsheet


def read_table(path: str | Path | Sequence[str | Path], ids: Collection[str] = ()) -> Any:
    """Return a table as a pandas frame, whose index has the numbers of its rows; that of several files in one.

    The header of a CSV or TSV file is row 1, as in a spreadsheet; a Parquet file starts with row 1. The separator of a
    CSV file is the one of comma, semicolon, tab and bar that divides its rows; its encoding is UTF-8, or UTF-16 with a
    byte order mark. A column is numeric if every value is a number; whole numbers with leading zeros, such as 007, and
    true and false are text. Empty fields, NA, NaN, null and None are missing; among `ids`, only empty fields are.

    Args:
        path: a file that ends in .csv, .tsv, .txt or .parquet, or several with the same columns.
        ids: the columns that hold ids; names that the table lacks are ignored.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is no table: empty, truncated, of another kind or encoding; if it has no header, a row of
            fewer or more fields, or two columns of one name; if a value is a formula, infinite, or no number in a
            column of numbers. The message names the file, the row and the column.
        ImportError: if pandas, or pyarrow for Parquet, is not installed.
    """
    pd = needs("pandas", "tables")
    if isinstance(path, (str, Path)):
        return _checked(_read(_found(path), ids), ids)
    if not path:
        raise ValueError("The list of tables is empty, expected the path of one or more.")
    files = [_found(file) for file in path]
    frames = [_read(file, ids) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if set(frame.columns) != set(frames[0].columns):
            missing = set(frames[0].columns) - set(frame.columns)
            name, only = (file, files[0]) if missing else (files[0], file)
            column = min(missing or set(frame.columns) - set(frames[0].columns))
            raise ValueError(
                f"{name.name} has no column {column!r}, which {only.name} has. Give them the same columns."
            )
    text = {name for name in frames[0] if len({_is_text(frame[name]) for frame in frames}) > 1}
    if text:
        frames = [_read(file, ids, text) for file in files]
    offsets = np.cumsum([0, *(frame.index[-1] + 1 if len(frame) else 0 for frame in frames)]).tolist()
    for frame, offset in zip(frames, offsets, strict=False):
        frame.index = frame.index + offset
        frame.attrs = {}
    table = pd.concat(frames)
    table.attrs["files"] = [(file.name, offset) for file, offset in zip(files, offsets, strict=False)]
    return _checked(table, ids)


def named(frame: Any, name: str) -> Any:
    """Return a user's frame with the name that it has in messages."""
    frame = frame.copy(deep=False)
    frame.attrs = {**frame.attrs, "files": [(name, 0)]}
    return frame


def where(frame: Any, label: Any) -> str:
    """Return the file and row of a row of a table by its label in the index, such as `edges.csv, row 412`."""
    files = frame.attrs.get("files", [("the table", 0)])
    if len(files) == 1:
        return f"{files[0][0]}, row {label}"
    name, offset = next((name, offset) for name, offset in reversed(files) if label >= offset)
    return f"{name}, row {label - offset}"


def file_of(frame: Any) -> str:
    """Return the name of a table's file, or of its files, in messages."""
    return " and ".join(name for name, _ in frame.attrs.get("files", [("the table", 0)]))


def refuse(frame: Any, rows: Any, message: str) -> None:
    """Raise a ValueError that names the first of some rows, a mask over the table, and counts the others.

    `message` may hold `{column}` for the value of a column there.
    """
    rows = np.asarray(rows)
    if rows.any():
        first = int(rows.argmax())
        more = int(rows.sum()) - 1
        text = message.format_map({name: _shown(frame[name].iloc[first]) for name in frame.columns})
        also = f" (and {more:,} more {'rows' if more > 1 else 'row'})" if more else ""
        place = where(frame, frame.index[first])
        head, _, tail = text.partition(". ")
        raise ValueError(f"{place}: {head}{also}. {tail}".rstrip())


def _shown(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return repr(value)


# Ids ------------------------------------------------------------------------------------------------------------------


def node_ids(nodes: Any, column: str) -> Any:
    """Return the ids of a table of nodes as a pandas Index; each row needs one of its own."""
    pd = needs("pandas", "tables")
    refuse(nodes, nodes[column].isna(), f"{column} is empty. Each node needs an id.")
    ids = pd.Index(_plain(nodes[column]))
    again = ids.duplicated()
    if again.any():
        first = nodes.index[int((ids == ids[again][0]).argmax())]
        refuse(
            nodes, again, f"{column} {{{column}}} stands twice, first in {where(nodes, first)}. Give each node one row."
        )
    return ids


def positions(edges: Any, column: str, ids: Any, nodes: str) -> Any:
    """Return the position among `ids` of each edge's end in `column`, int64 [E]; `nodes` is the name of their table.

    Ids are compared as they are written: 7 is 7.0 and '7', but not '007'.
    """
    pd = needs("pandas", "tables")
    refuse(edges, edges[column].isna(), f"{column} is empty. Each edge needs both ends.")
    ends = pd.Index(_plain(edges[column]))
    if ends.dtype != ids.dtype:
        ends, ids = ends.astype(str), ids.astype(str)
    found = ids.get_indexer(ends)
    refuse(edges, found < 0, f"{column} {{{column}}} is not in {nodes}. Add its row there, or leave the edge out.")
    return found.astype(np.int64, copy=False)


def _plain(column: Any) -> Any:
    """Return a column of ids without categories, whole numbers as int64."""
    if getattr(column.dtype, "categories", None) is not None:
        column = column.astype(column.dtype.categories.dtype)
    if column.dtype.kind == "f" and (column == column.round()).all() and (column.abs() < 2**53).all():
        column = column.astype(np.int64)
    return column


# Files ----------------------------------------------------------------------------------------------------------------


def _found(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"The path is {path!r}, expected that of a .csv, .tsv or .parquet file.")
    path = Path(os.path.expanduser(path))
    suffix = path.suffix.lower()
    if suffix in (".xlsx", ".xls", ".ods"):
        raise ValueError(
            f"{path.name} is a workbook. Save the sheet as CSV UTF-8, or write it by DataFrame.to_parquet."
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a .csv, .tsv or .parquet file.")
    if suffix not in TEXT and suffix not in PARQUET:
        raise ValueError(f"{path.name} ends in {path.suffix!r}, expected .csv, .tsv, .txt or .parquet.")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file, expected a table.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty, expected a header and rows.")
    return path


def _read(path: Path, ids: Collection[str], text: Collection[str] = ()) -> Any:
    frame = _read_parquet(path, text) if path.suffix.lower() in PARQUET else _read_text(path, ids, text)
    if not len(frame):
        raise ValueError(f"{path.name} has the columns {', '.join(map(str, frame.columns))} and no rows.")
    frame.attrs = {"files": [(path.name, 0)]}
    return frame


@contextmanager
def _open(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _read_parquet(path: Path, text: Collection[str]) -> Any:
    pd, parquet = needs("pandas", "tables"), needs("pyarrow.parquet", "tables")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ValueError(f"{path.name} is no whole Parquet file: {str(error).splitlines()[0]}") from error
    _check_names(path, table.column_names)
    frame = table.to_pandas()
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index()
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    frame.columns = frame.columns.map(str)
    return frame.astype(dict.fromkeys(text, str))


def _read_text(path: Path, ids: Collection[str], text: Collection[str]) -> Any:
    pd = needs("pandas", "tables")
    with _open(path) as content:
        encoding = _encoding(path, content)
        try:
            with path.open(encoding=encoding, newline="") as file:
                separator = _separator(path, file)
                rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
                names = _header(path, next(rows, []))
                widths = np.fromiter(map(len, rows), np.int32)
        except UnicodeDecodeError as error:
            raise _undecodable(path, content) from error
        except csv.Error as error:
            raise _unquoted(path, encoding, separator, error) from error
        _check_widths(path, widths, names, content)
        several = len(names) > 1
        options: dict[str, Any] = {
            "sep": separator,
            "encoding": encoding,
            "names": names,
            "header": 0,
            "index_col": False,
            "skipinitialspace": True,
            "skip_blank_lines": several,
            "keep_default_na": False,
            "na_values": {name: [""] if name in ids else [*MISSING] for name in names},
            "low_memory": False,
        }
        frame = pd.read_csv(path, dtype=dict.fromkeys(text, str), **options)
        zeros = re.compile(rb"[\s\"%s]0[0-9]" % separator.encode())
        suspects = "iuf" if encoding == "utf-16" or zeros.search(content) else ""
        truth = [name for name in names if pd.api.types.infer_dtype(frame[name]) == "boolean"]
        numeric = [name for name in names if frame[name].dtype.kind in suspects]
        if truth or numeric:
            written = pd.read_csv(path, dtype=str, usecols=truth + numeric, **options)
            for name in written:
                if name in truth or written[name].str.fullmatch("0[0-9]+").any():
                    frame[name] = written[name]
    frame.index = pd.RangeIndex(_FIRST, len(frame) + _FIRST)
    if several and not widths.all():
        frame.index = np.flatnonzero(widths) + _FIRST
    frame = frame.dropna(how="all")
    unnamed = [name for name in names if name.startswith("Unnamed: ")]
    frame = frame.drop(columns=[name for name in unnamed if frame[name].isna().all()])
    if separator == ";":
        for name in frame.columns:
            if _is_text(frame[name]) and (numbers := _decimal_commas(frame[name])) is not None:
                frame[name] = numbers
    return frame


def _encoding(path: Path, content: mmap.mmap) -> str:
    start = content[:4]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    for kind, sign in {
        "an Excel workbook or archive": b"PK\x03\x04",
        "a gzip archive": b"\x1f\x8b",
        "Parquet": b"PAR1",
    }.items():
        if start.startswith(sign):
            raise ValueError(f"{path.name} is {kind}, expected text. Save the table as CSV UTF-8, or name it .parquet.")
    if (zero := content.find(b"\0")) >= 0:
        row = content[:zero].count(b"\n") + 1
        raise ValueError(f"{path.name}, row {row}: a zero byte, expected text. The file is damaged: copy it again.")
    return "utf-8-sig"


def _separator(path: Path, file: Any) -> str:
    """Return the character that divides both the header and the first row."""
    lines = [file.readline() for _ in range(2)]
    file.seek(0)
    lines = lines if lines[1].strip() else lines[:1]
    return TEXT[path.suffix.lower()] or max(SEPARATORS, key=lambda mark: min(line.count(mark) for line in lines))


def _header(path: Path, header: Sequence[str]) -> list[str]:
    """Return the names of the columns, also of those without a name."""
    names = [name.strip() or f"Unnamed: {position}" for position, name in enumerate(header)]
    if not any(name.strip() for name in header):
        raise ValueError(f"{path.name}, row 1 is empty, expected the names of the columns.")
    if all(re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", name) for name in names):
        raise ValueError(
            f"{path.name} has no header: row 1 is {', '.join(names)}. Add a first row with the names of the columns."
        )
    _check_names(path, names)
    return names


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            first, second, *_ = (position + 1 for position, other in enumerate(names) if other == name)
            raise ValueError(f"{path.name}, row 1: columns {first} and {second} are both called {name!r}. Rename one.")


def _check_widths(path: Path, widths: Any, names: Sequence[str], content: mmap.mmap) -> None:
    wrong = (widths != len(names)) & (widths > 0)
    if not wrong.any():
        return
    first, count = int(wrong.argmax()), int(wrong.sum())
    fields, expected = int(widths[first]), len(names)
    if first == len(widths) - 1 and fields < expected and content[-1:] not in b"\r\n":
        raise ValueError(
            f"{path.name}, row {first + _FIRST}: the file ends after {fields} of {expected} fields. It is cut off: "
            "copy it again."
        )
    more = f" (and {count - 1:,} more rows)" if count > 1 else ""
    hint = (
        "Put quotes around values that contain the separator."
        if fields > expected
        else f"Column {names[fields]!r} is missing: leave a field empty, but keep its separator."
    )
    raise ValueError(
        f"{path.name}, row {first + _FIRST}: {fields} fields, expected {expected} as in the header{more}. {hint}"
    )


def _undecodable(path: Path, content: mmap.mmap) -> ValueError:
    try:
        content[:].decode()
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        wrong = content[error.start]
        return ValueError(
            f"{path.name}, row {row}: the byte 0x{wrong:02x} is not UTF-8. Save the table as UTF-8 (in Excel: CSV "
            f"UTF-8), or convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name}"
        )
    return ValueError(f"{path.name} starts with the byte order mark of UTF-16 and is not UTF-16. Save it as UTF-8.")


def _unquoted(path: Path, encoding: str, separator: str, error: csv.Error) -> ValueError:
    row = 1
    with path.open(encoding=encoding, newline="") as file:
        try:
            for row, _ in enumerate(csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True), 2):  # noqa: B007
                pass
        except csv.Error:
            pass
    if "unexpected end" in str(error):
        return ValueError(
            f"{path.name}, row {row}: a quote is opened and never closed. Close it, or copy the file again."
        )
    return ValueError(f"{path.name}, row {row}: {error}. Write a quote inside quotes twice.")


# Values ---------------------------------------------------------------------------------------------------------------


def _is_text(column: Any) -> bool:
    pd = needs("pandas", "tables")
    return bool(pd.api.types.is_string_dtype(column) or column.dtype == object)


def _decimal_commas(column: Any) -> Any:
    """Return the numbers of a column that writes them with a comma, as spreadsheets of many countries do, else None."""
    if not column.str.fullmatch(r"[-+]?[0-9]+(,[0-9]+)?", na=True).all():
        return None
    return column.str.replace(",", ".").astype(float)


def _checked(frame: Any, ids: Collection[str]) -> Any:
    """Return a table whose values are plain: no formulas, no infinite numbers, no text among numbers."""
    pd = needs("pandas", "tables")
    for name in frame.columns:
        column = frame[name]
        if column.dtype.kind == "f":
            refuse(frame, np.isinf(column.to_numpy()), f"{name} is {{{name}}}. Leave the field empty if it is unknown.")
        elif _is_text(column):
            formula = column.str.match(r"=[^=]*[A-Za-z]+[$(0-9]|#(REF|DIV/0|VALUE|NAME|NUM|NULL)[!?]", na=False)
            refuse(
                frame, formula, f"{name} is the formula {{{name}}}. Save the table with values in place of formulas."
            )
            if name not in ids:
                values = column.dropna()
                few = values.iloc[:: max(1, len(values) // 100)]
                if pd.to_numeric(few, errors="coerce").notna().mean() > 0.9:
                    wrong = column.notna() & pd.to_numeric(column, errors="coerce").isna()
                    if 0 < wrong.sum() <= max(1, len(values) // 100):
                        refuse(
                            frame,
                            wrong,
                            f"{name} is {{{name}}}, expected a number. Leave the field empty if it is unknown.",
                        )
    return frame
