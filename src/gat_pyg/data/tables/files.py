"""Tables from CSV, TSV and Parquet files as pandas frames, and errors that name the file, the row and the column."""

from __future__ import annotations

import csv
import io
import mmap
import os
import re
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...files import needs

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "Null", "null", "None", "none")
TEXT, PARQUET = (".csv", ".tsv", ".tab", ".txt"), (".parquet", ".pq")
OTHERS = {  # first bytes of files that are no text
    b"PK\x03\x04": "an Excel workbook or an archive",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
    b"<": "a page of HTML or XML",
}
_NUMBER = r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?"
_FORMULA = r"=[^=]*[A-Za-z]+[$(0-9]|#(REF|DIV/0|VALUE|NAME|NUM|NULL)[!?]"
_FIRST = 2  # the first row of values, where the header is row 1, as in a spreadsheet


def read_table(path: str | Path | Sequence[str | Path], ids: Collection[str] = ()) -> Any:
    """Return a table as a pandas frame, whose index has the numbers of its rows; that of several files in one.

    The header of a CSV or TSV file is row 1, as in a spreadsheet; a Parquet file starts with row 1. The separator is
    the one of comma, semicolon, tab, bar and space that divides both the header and the next row. The encoding is
    UTF-8, or UTF-16 with a byte order mark. A column is numeric if every value is a number; whole numbers with leading
    zeros, such as 007, and true and false are text. Empty fields, NA, NaN, null and None are missing; among ids, only
    empty fields are.

    Args:
        path: a file that ends in .csv, .tsv, .txt or .parquet, or several with the same columns.
        ids: the columns that hold ids; names that the table lacks are ignored.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is no table: empty, truncated, of another kind or encoding; if it has no header, a row of
            fewer or more fields, or two columns of one name. The message names the file, the row and the column.
        ImportError: if pandas, or pyarrow for Parquet, is not installed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "edges.csv"
        >>> _ = path.write_text("src;dst;km\\nA;007;2,5\\nB;007;\\n")
        >>> read_table(path)
          src  dst   km
        2   A  007  2.5
        3   B  007  NaN
    """
    pd = needs("pandas", "tables")
    if isinstance(path, (str, Path)):
        return _read(_found(path), ids)
    if not path:
        raise ValueError("The list of tables is empty, expected the path of one or more.")
    files = [_found(file) for file in path]
    frames = [_read(file, ids) for file in files]
    for file, frame in zip(files, frames, strict=True):
        for lacking, other in ((file, files[0]), (files[0], file)):
            columns = (set(frames[0]), set(frame))[:: 1 if lacking == file else -1]
            if missing := columns[0] - columns[1]:
                raise ValueError(f"{lacking.name} has no column {min(missing)!r}, which {other.name} has.")
    differing = {name for name in frames[0] if len({_is_text(frame[name]) for frame in frames}) > 1}
    if differing:  # 7 of one file is 7 of another file that has 007 too
        frames = [_read(file, ids, differing) for file in files]
    offsets = np.cumsum([0, *(frame.index[-1] + 1 for frame in frames[:-1])]).tolist()
    for frame, offset in zip(frames, offsets, strict=True):
        frame.index = frame.index + offset
    table = pd.concat(frames)
    table.attrs = {"files": [(file.name, offset) for file, offset in zip(files, offsets, strict=True)]}
    return table


def named(frame: Any, name: str) -> Any:
    """Return a user's frame with a name for messages."""
    _check_names([str(column) for column in frame.columns], name)
    frame = frame.copy(deep=False)
    frame.attrs = {"files": [(name, 0)]}
    return frame


# Messages -------------------------------------------------------------------------------------------------------------


def file_of(frame: Any) -> str:
    """Return the name of a table's file, or of its files, in messages."""
    return " and ".join(name for name, _ in frame.attrs.get("files", [("the table", 0)]))


def where(frame: Any, label: Any) -> str:
    """Return the file and row of a row of a table by its label in the index, such as `edges.csv, row 412`."""
    files = frame.attrs.get("files", [("the table", 0)])
    name, offset = next((file for file in reversed(files[1:]) if label >= file[1]), files[0])
    return f"{name}, row {label - offset if len(files) > 1 else label}"


def refuse(frame: Any, rows: Any, message: str) -> None:
    """Raise a ValueError that names the first of some rows, a mask over the table, and counts the others.

    `{column}` in the message becomes the value of this column there.
    """
    rows = np.asarray(rows)
    if rows.any():
        first, more = int(rows.argmax()), int(rows.sum()) - 1
        values = {str(name): _shown(value) for name, value in zip(frame.columns, frame.iloc[first], strict=True)}
        problem, _, remedy = message.partition(". ")
        also = f" (and {more:,} more {'rows' if more > 1 else 'row'})" if more else ""
        text = f"{problem.removesuffix('.')}{also}. {remedy}".strip()
        text = re.sub(r"\{([^}]*)\}", lambda match: values.get(match[1], match[0]), text)
        raise ValueError(f"{where(frame, frame.index[first])}: {text}")


def _shown(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:56]}..."


# Ids ------------------------------------------------------------------------------------------------------------------


def node_ids(nodes: Any, column: str) -> Any:
    """Return the ids of a table of nodes as a pandas Index; each row needs one of its own."""
    pd = needs("pandas", "tables")
    refuse(nodes, nodes[column].isna(), f"{column} is empty. Each node needs an id.")
    ids = pd.Index(plain_ids(nodes[column]))
    again = ids.duplicated()
    if again.any():
        first = where(nodes, nodes.index[int((ids == ids[again][0]).argmax())])
        refuse(nodes, again, f"{column} {{{column}}} stands twice, first in {first}. Give each node one row.")
    return ids


def positions(edges: Any, column: str, ids: Any, nodes: str) -> Any:
    """Return the position among `ids` of each edge's end in `column`, int64 [E]; `nodes` is the name of their table.

    Ids are compared as they are written: 7 is 7.0 and '7', but not '007'.
    """
    pd = needs("pandas", "tables")
    refuse(edges, edges[column].isna(), f"{column} is empty. Each edge needs both ends.")
    ends = pd.Index(plain_ids(edges[column]))
    if ends.dtype != ids.dtype:
        ends, ids = ends.astype("str"), ids.astype("str")
    found = pd.factorize(ids.append(ends))[0][len(ids) :].astype(np.int64, copy=False)  # ids come first
    unknown = found >= len(ids)
    if unknown.any():
        alike = [key.map(lambda end: str(end).strip().casefold().lstrip("0")) for key in (ids, ends[unknown][:1])]
        similar = ids[alike[0] == alike[1][0]]
        hint = f"Did you mean {_shown(similar[0])}?" if len(similar) else "Add its row there, or leave the edge out."
        refuse(edges, unknown, f"{column} {{{column}}} is not in {nodes}. {hint}")
    return found


def plain_ids(column: Any) -> Any:
    """Return a column of ids without categories; whole numbers as int64, mixed ones as text."""
    if getattr(column.dtype, "categories", None) is not None:
        column = column.astype(column.dtype.categories.dtype)
    if column.dtype.kind == "f" and (column == column.round()).all() and (column.abs() < 2**53).all():
        return column.astype(np.int64)
    return column.astype("str") if column.dtype == object else column


# Values ---------------------------------------------------------------------------------------------------------------


def unnamed(column: str) -> bool:
    """Return True for a column without a name, such as the numbers of the rows that pandas and R write."""
    return column.startswith("Unnamed: ")


def check_values(frame: Any, names: Sequence[str]) -> None:
    """Raise a ValueError for values of some columns that cannot be meant.

    These are formulas, infinite numbers, the header again, and less than 1 % of text among numbers or dates.
    """
    pd = needs("pandas", "tables")
    readers: dict[str, Callable[[Any], Any]] = {
        "number": lambda values: pd.to_numeric(values, errors="coerce"),
        "date": lambda values: pd.to_datetime(values, format="ISO8601", errors="coerce", utc=True),
    }
    unknown = "Leave the field empty if it is unknown"
    for name in names:
        column, shown = frame[name], f"{name} is {{{name}}}"
        if column.dtype.kind == "f":
            refuse(
                frame,
                np.isinf(column.to_numpy(float, na_value=np.nan)),
                f"{shown}, expected a finite number. {unknown}.",
            )
        if not _is_text(column):
            continue
        repeated = (column == name).fillna(False).to_numpy(bool, copy=True)
        if repeated.any():
            same = frame[repeated].astype("str") == [*map(str, frame.columns)]
            repeated[repeated] = same.sum(axis=1) >= min(2, len(frame.columns))
            refuse(frame, repeated, f"{shown}, as in the header. Delete this row: the file seems to be two in one.")
        signs = column.str.startswith(("=", "#"), na=False).to_numpy(bool, copy=True)
        if signs.any():
            signs[signs] = column[signs].str.match(_FORMULA)
            refuse(frame, signs, f"{shown}, a formula. Save the table with its values.")
        known = column.dropna()
        for kind, reader in readers.items() if len(known) else ():
            if reader(known.iloc[:: max(1, len(known) // 100)]).notna().mean() > 0.9:
                wrong = column.notna() & reader(column).isna()
                if wrong.sum() <= max(1, len(known) // 100):
                    refuse(frame, wrong, f"{shown}, expected a {kind}. {unknown}, or name the column in categories.")
                break


def _is_text(column: Any) -> bool:
    kind = needs("pandas", "tables").api.types.infer_dtype(column, skipna=True)
    return kind in ("string", "mixed", "mixed-integer") and not hasattr(column.dtype, "categories")


# Files ----------------------------------------------------------------------------------------------------------------


def _found(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"The path is {path!r}, expected that of a .csv, .tsv or .parquet file.")
    path = Path(os.path.expanduser(path))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a .csv, .tsv or .parquet file.")
    if path.suffix.lower() not in TEXT + PARQUET:
        raise ValueError(
            f"{path.name} ends in {path.suffix!r}, expected .csv, .tsv, .txt or .parquet. Save a workbook as CSV UTF-8."
        )
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file, expected a table.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty, expected a header and rows.")
    return path


def _read(path: Path, ids: Collection[str], text: Collection[str] = ()) -> Any:
    frame = _read_parquet(path, text) if path.suffix.lower() in PARQUET else _read_text(path, ids, text)
    if not len(frame):
        raise ValueError(f"{path.name} has the columns {', '.join(frame.columns)} and no rows.")
    frame.attrs = {"files": [(path.name, 0)]}
    return frame


def _read_parquet(path: Path, text: Collection[str]) -> Any:
    pd, pyarrow, parquet = (needs(package, "tables") for package in ("pandas", "pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(path)
        _check_names(file.schema_arrow.names, path.name)
        table = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{path.name} is not a whole Parquet file. It is cut off or of another kind: copy it again."
        ) from error
    frame = table.to_pandas()
    frame = frame.reset_index(drop=frame.index.names == [None])
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return frame.astype({name: "str" for name in text if name in frame.columns})


def _read_text(path: Path, ids: Collection[str], text: Collection[str]) -> Any:
    pd = needs("pandas", "tables")
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as content:
        encoding = _encoding(path, content)
        separator, names, widths = _divided(path, encoding, content)
        options: dict[str, Any] = {
            "sep": separator,
            "encoding": encoding,
            "names": names,
            "header": 0,
            "index_col": False,
            "skipinitialspace": True,
            "skip_blank_lines": len(names) > 1,
            "keep_default_na": False,
            "na_values": {name: [""] if name in ids else [*MISSING] for name in names},
            "low_memory": False,
        }
        frame = pd.read_csv(path, dtype=dict.fromkeys(text, "str"), **options)
        zeros = re.compile(rb"0(?<=[\s\"%s]0)[0-9]" % separator.encode())
        suspects = "iuf" if encoding == "utf-16" or zeros.search(content) else ""
    again = [name for name in names if _is_misread(frame[name])]
    numeric = [name for name in names if frame[name].dtype.kind in suspects]
    if again or numeric:
        written = pd.read_csv(path, dtype="str", usecols=again + numeric, **options)
        for name in written:
            if name in again or written[name].str.fullmatch("0[0-9]+").any():
                frame[name] = written[name]
    filled = widths > 0 if len(names) > 1 else widths >= 0  # pandas skips the other rows
    frame.index = pd.RangeIndex(_FIRST, len(widths) + _FIRST) if filled.all() else np.flatnonzero(filled) + _FIRST
    empty = frame.isna().all(axis=1)
    frame = frame[~empty] if empty.any() else frame
    frame = frame.drop(columns=[name for name in names if unnamed(name) and frame[name].isna().all()])
    for name in frame.columns if separator == ";" else ():
        if name not in text and _is_text(frame[name]) and (numbers := _decimal_commas(frame[name])) is not None:
            frame[name] = numbers
    return frame


def _is_misread(column: Any) -> bool:
    """Return True for true and false, and for integers of 64 bits, among which pandas takes empty fields for text."""
    kind = needs("pandas", "tables").api.types.infer_dtype(column)
    return kind == "boolean" or (kind == "string" and bool((column == "").any()))


def _encoding(path: Path, content: mmap.mmap) -> str:
    start = content[:4]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") and start[2:] != b"\0\0":
        return "utf-16"
    for sign, kind in OTHERS.items():
        if start.startswith(sign):
            raise ValueError(f"{path.name} is {kind}, expected text. Save the table as CSV UTF-8.")
    if (zero := content.find(b"\0")) >= 0:
        cause = "It may be UTF-16: save it as UTF-8." if zero < 4 else "The file is damaged: copy it again."
        row = content[:zero].count(b"\n") + 1
        raise ValueError(f"{path.name}, row {row}: a zero byte, expected text. {cause}")
    return "utf-8-sig"


def _divided(path: Path, encoding: str, content: mmap.mmap) -> tuple[str, list[str], Any]:
    """Return the separator, the names of the columns and the number of fields in each row, which is theirs or 0."""
    count = 0
    try:
        with path.open(encoding=encoding, newline="") as file:
            separator = _separator(file)
            file.seek(0)
            rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
            names = _names(next(rows, []), path.name)
            widths = np.fromiter(map(len, rows), np.int32)
    except UnicodeDecodeError as error:
        raise _undecodable(path, encoding, content) from error
    except csv.Error as error:
        with path.open(encoding=encoding, newline="") as file:  # again, to count the rows
            rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
            try:
                for count, _ in enumerate(rows, 1):  # noqa: B007
                    pass
            except csv.Error:
                pass
        is_open = "unexpected end" in str(error) or "field larger" in str(error)
        problem = "a quote is not closed" if is_open else str(error)
        raise ValueError(
            f"{path.name}, row {count + 1}: {problem}. Write a quote within quotes twice, or copy the file again."
        ) from error
    wrong = (widths != len(names)) & (widths > 0)
    if wrong.any():
        first, more, expected = int(wrong.argmax()), int(wrong.sum()) - 1, len(names)
        fields, place = int(widths[first]), f"{path.name}, row {first + _FIRST}"
        if first == len(widths) - 1 and fields < expected and content[-1:] not in b"\r\n":
            raise ValueError(
                f"{place}: the file ends after {fields} of {expected} fields, in {names[fields - 1]}. It is cut off: "
                "copy it again."
            )
        also = f" (and {more:,} more rows)" if more else ""
        remedy = (
            "Put quotes around values that contain the separator"
            if fields > expected
            else f"{names[fields]} is missing; leave a field empty, but keep its separator"
        )
        raise ValueError(
            f"{place}: {fields} {'field' if fields == 1 else 'fields'} divided by {separator!r}, the header has "
            f"{expected}{also}. {remedy}."
        )
    return separator, names, widths


def _separator(file: Any) -> str:
    """Return the character that divides both the header and the next row."""
    widths = {}
    for mark in ",;\t| ":
        file.seek(0)
        rows = filter(None, csv.reader(file, delimiter=mark, skipinitialspace=True))
        widths[mark] = min(map(len, islice(rows, 2)), default=1)
    has_spaces = widths.pop(" ") > 1
    return " " if has_spaces and max(widths.values()) == 1 else max(widths, key=widths.__getitem__)


def _names(header: Sequence[str], file: str) -> list[str]:
    """Return the names of the columns; those without one are `Unnamed: 0` and so on, as pandas calls them."""
    names = [name.strip().strip("\ufeff") for name in header]
    if not any(names):
        raise ValueError(f"{file}: row 1 is empty, expected the names of the columns.")
    if names[0].startswith("sep="):
        raise ValueError(f"{file}: row 1 is {names[0]!r}, expected the names of the columns. Delete this row.")
    if all(re.fullmatch(_NUMBER, name) for name in names):
        shown = ", ".join(names)
        raise ValueError(f"{file}: row 1 is {shown}, expected the names of the columns. Add a first row with them.")
    names = [name or f"Unnamed: {position}" for position, name in enumerate(names)]
    _check_names(names, file)
    return names


def _check_names(names: Sequence[str], file: str) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            first = names.index(name) + 1
            raise ValueError(f"{file}: columns {first} and {position + 1} are both called {name!r}. Rename one.")


def _undecodable(path: Path, encoding: str, content: mmap.mmap) -> ValueError:
    if encoding == "utf-16":
        return ValueError(f"{path.name} begins as UTF-16 and is not UTF-16 to its end. Save it as CSV UTF-8.")
    data = content[:]
    try:
        data.decode()
    except UnicodeDecodeError as error:
        lines = io.StringIO(data.decode("utf-8-sig", errors="replace"))
        separator = _separator(lines)
        line = data[data.rfind(b"\n", 0, error.start) + 1 : error.start].decode()
        header = lines.getvalue().splitlines()[0]
        names, fields = (next(csv.reader([text], delimiter=separator), [""]) for text in (header, line))
        row, column = data.count(b"\n", 0, error.start) + 1, names[min(len(fields), len(names)) - 1]
        remedy = (
            "It is cut off: copy it again."
            if error.end == len(data) and error.reason == "unexpected end of data"
            else f"Save it as CSV UTF-8, or convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name}"
        )
        return ValueError(
            f"{path.name}, row {row}: {column} has the byte 0x{data[error.start]:02x}, which is not UTF-8. {remedy}"
        )
    return ValueError(f"{path.name} changed while it was read.")


def _decimal_commas(column: Any) -> Any:
    """Return the numbers of a column that writes them with a comma, as spreadsheets of many countries do, else None."""
    known = column.dropna()
    if not (known.str.fullmatch(r"[-+]?[0-9]+(,[0-9]+)?").all() and known.str.contains(",").any()):
        return None
    return column.str.replace(",", ".").astype(float)
