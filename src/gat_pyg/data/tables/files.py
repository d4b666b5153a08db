"""Tables from CSV, TSV and Parquet files and frames, and errors that name the file, the row and the column."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...files import needs

TEXT, PARQUET = (".csv", ".tsv", ".tab", ".txt"), (".parquet", ".pq")
OTHERS = {  # first bytes of files that are no text
    b"PK\x03\x04": "an Excel workbook or an archive",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
    b"<": "a page of HTML or XML",
}
_NUMBER = r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?"
_HEAD = 2**20  # characters that have the header and the next row
_FIRST = 2  # the first row of values, where the header is row 1, as in a spreadsheet


def frame_of(table: Any, name: str, missing: Sequence[str] = ()) -> Any:
    """Return a table as a frame with the names of its files, as `read_table` or `named`; None for None.

    Values of `missing` are missing in all columns but ids.
    """
    if table is None:
        return table
    if "files" not in getattr(table, "attrs", ()):  # neither of a graph nor already read
        is_frame = hasattr(table, "columns")
        paths = table if is_frame or isinstance(table, (str, Path)) else list(table)
        table = named(table.reset_index(drop=table.index.name is None), name) if is_frame else read_table(paths)
    table.attrs["missing"] = [*missing]
    return table


def are_several(tables: Any) -> bool:
    """Return True for a list of tables."""
    return isinstance(tables, Sequence) and not isinstance(tables, str)


def path_of(table: Any) -> Any:
    """Return the path or the paths of a table as plain data; None for a frame."""
    if isinstance(table, (str, Path)):
        return str(table)
    are_paths = are_several(table) and len(table) > 0 and all(isinstance(path, (str, Path)) for path in table)
    return [str(path) for path in table] if are_paths else None


def read_table(path: str | Path | Sequence[str | Path]) -> Any:
    """Return a table as a pandas frame, whose index has the numbers of its rows; that of several files in one.

    A CSV or TSV file is read once, and all of its cells are text; only empty fields are missing. The header is row 1,
    as in a spreadsheet; a Parquet file starts with row 1. The separator is the one of comma, semicolon, tab, bar and
    space that divides both the header and the next row. The encoding is UTF-8, UTF-16 with a byte order mark, or
    otherwise Windows-1252, of which there is a note in `frame.attrs["notes"]`. See `named` for the columns.

    Args:
        path: a file that ends in .csv, .tsv, .txt or .parquet, or several with the same columns.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is no table: empty, truncated, of another kind or encoding; if it has no header, a row of
            fewer or more fields, or two columns of one name. The message names the file, the row and the column.
        ImportError: if pandas or pyarrow is not installed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "edges.csv"
        >>> _ = path.write_text("src;dst;km\\nA;007;2,5\\nB;007;\\n")
        >>> read_table(path)
          src  dst   km
        2   A  007  2,5
        3   B  007  NaN
    """
    pd = needs("pandas", "tables")
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    if not paths:
        raise ValueError("The list of tables is empty, expected the path of one or more.")
    files = [_found(file) for file in paths]
    frames = [_read(file) for file in files]
    for file, frame in zip(files, frames, strict=True):
        for lacking, other in ((file, files[0]), (files[0], file)):
            columns = (set(frames[0]), set(frame))[:: 1 if lacking == file else -1]
            if missing := columns[0] - columns[1]:
                raise ValueError(
                    f"{lacking.name} has no column {min(missing)!r}, which {other.name} has. Tables of one kind need "
                    "the same columns; for nodes of two kinds, as users and items, choose dataset.bipartite=true."
                )
    offsets = np.cumsum([0, *(frame.index[-1] + 1 for frame in frames[:-1])]).tolist()
    for frame, offset in zip(frames, offsets, strict=True):
        frame.index = frame.index + offset
    attrs = {
        "files": [(file.name, offset) for file, offset in zip(files, offsets, strict=True)],
        "notes": [note for frame in frames for note in frame.attrs.get("notes", ())],
        "commas": all(frame.attrs.get("commas", False) for frame in frames),
        "is_text": all(file.suffix.lower() in TEXT for file in files),
    }
    return _plain(frames[0] if len(frames) == 1 else pd.concat(frames), attrs)


def named(frame: Any, name: str) -> Any:
    """Return a user's frame with a name for messages, and columns of three kinds: numbers, dates and text.

    Numbers are of NumPy, dates of UTC without a time zone, and everything else is text, such as `True`. Arrays of
    numbers in the cells of a column become columns of their own: `emb` becomes `emb.0`, `emb.1` and so on.

    Raises:
        ValueError: if two columns have the same name, or the arrays of a column differ in length or hold no numbers.
    """
    frame = frame.copy(deep=False)
    frame.columns = frame.columns.map(str)
    _check_names([*frame.columns], name)
    return _plain(frame, {"files": [(name, 0)]})


def _plain(frame: Any, attrs: dict[str, Any]) -> Any:
    """Return a frame with columns of three kinds; `attrs["categories"]` lists those that were categorical."""
    pd = needs("pandas", "tables")
    columns: dict[str, Any] = {}
    frame.attrs, categories = dict(attrs), []
    for name in frame.columns:
        column = frame[name]
        if hasattr(column.dtype, "categories"):
            categories.append(name)
            column = column.astype(column.dtype.categories.dtype if column.notna().all() else object)
        if str(column.dtype) not in ("int64", "float64", "uint64", "str"):
            kind = pd.api.types.infer_dtype(column, skipna=True)
            first = next(iter(column.dropna()), None)
            if isinstance(first, (list, np.ndarray)):
                columns |= _spread(frame, name, column)
                continue
            if kind in ("datetime64", "datetime", "date"):
                column = pd.to_datetime(column, utc=True).dt.tz_localize(None)
            elif kind == "floating":
                wide = column.astype("str") if column.dtype.itemsize < 8 else column  # 0.1 of float32 is 0.1
                column = wide.astype(object).where(column.notna(), np.nan).astype(float)
            elif kind == "integer" and column.notna().all() and (values := np.array(column.tolist())).dtype != object:
                column = values
            elif kind != "string":
                column = column.astype(object).map(str, na_action="ignore").where(column.notna(), None)
        columns[name] = column
    plain = pd.DataFrame(columns, index=frame.index)
    plain.attrs = {**attrs, "categories": categories}
    return plain


def _spread(frame: Any, name: str, column: Any) -> dict[str, Any]:
    """Return the columns of arrays in the cells of a column."""
    sizes = column.map(np.size, na_action="ignore").fillna(0).to_numpy(int)
    refuse(frame, sizes != sizes.max(), f"{name} is {{{name}}}, expected {sizes.max()} numbers as in other rows.")
    try:
        values = np.array([np.ravel(cell) for cell in column], float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file_of(frame)}: {name} holds lists, expected numbers in them. Leave it out.") from error
    return {f"{name}.{place}": values[:, place] for place in range(values.shape[1])}


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

    `{column}` in the message becomes the value of this column there; the id of the row is named if it is known.
    """
    rows = np.asarray(rows)
    if rows.any():
        first, more = int(rows.argmax()), int(rows.sum()) - 1
        values = {str(name): shown(value) for name, value in zip(frame.columns, frame.iloc[first], strict=True)}
        problem, _, remedy = message.partition(". ")
        id = frame.attrs.get("id")
        also = [f"{id} {values[id]}"] if id in values else []
        also += [f"and {more:,} more row{'s' * (more > 1)}"] if more else []
        note = f" ({', '.join(also)})" if also else ""
        text = f"{problem.removesuffix('.')}{note}. {remedy}".strip()
        text = re.sub(r"\{([^}]*)\}", lambda match: values.get(match[1], match[0]), text)
        raise ValueError(f"{where(frame, frame.index[first])}: {text}")


def shown(value: Any) -> str:
    """Return a value as it is shown in messages, at most 60 characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def unnamed(column: str) -> bool:
    """Return True for a column without a name, such as the numbers of the rows that pandas and R write."""
    return column.startswith("Unnamed: ")


def missing_column(frames: Sequence[Any], name: str) -> ValueError:
    """Return the error of tables without a column, with those that they have."""
    names = [column for frame in frames for column in frame.columns]
    similar = [other for other in names if other.casefold() == name.casefold()] or get_close_matches(name, names, 1)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    have = [f"{file_of(frame)} has {', '.join(frame.columns[:20])}" for frame in frames]
    if any(name in frame.attrs.get("of_graph", ()) for frame in frames):
        hint = " It is an attribute of the graph: give many graphs, as a folder or dataset.graph=[FILE,FILE]."
    return ValueError(f"There is no column {name}: {'; '.join(have)}.{hint}")


def check_columns(frames: Sequence[Any], names: Collection[Any]) -> None:
    """Raise ValueError if a name is a column of none of the tables."""
    frames = [frame for frame in frames if frame is not None]
    for name in names:
        if not any(name in frame.columns for frame in frames):
            raise missing_column(frames, name)


# Files ----------------------------------------------------------------------------------------------------------------


def _found(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"The path is {path!r}, expected that of a .csv, .tsv or .parquet file.")
    path = Path(os.path.expanduser(path))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a .csv, .tsv or .parquet file.")
    if path.suffix.lower() not in TEXT + PARQUET:
        raise ValueError(
            f"{path.name} ends in {path.suffix!r}, expected .csv, .tsv, .txt or .parquet. Unpack an archive, save a "
            "workbook as CSV UTF-8, and rename other text with columns, such as .inter, to .txt."
        )
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file, expected a table.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty, expected a header and rows.")
    return path


def _read(path: Path) -> Any:
    frame = _read_parquet(path) if path.suffix.lower() in PARQUET else _read_text(path)
    if not len(frame):
        raise ValueError(f"{path.name} has the columns {', '.join(frame.columns)} and no rows.")
    return frame


def _read_parquet(path: Path) -> Any:
    pd, pyarrow, parquet = (needs(package, "tables") for package in ("pandas", "pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(path)
        _check_names(file.schema_arrow.names, path.name)
        table = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{path.name} is not a whole Parquet file. It is cut off or of another kind: copy it again."
        ) from error
    frame = table.to_pandas(integer_object_nulls=True)  # of 64 bits, which a float would round
    frame = frame.reset_index(drop=frame.index.names == [None])
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return frame


def _read_text(path: Path) -> Any:
    """Return the cells of a CSV or TSV file as text, without empty rows and without empty columns that have no name."""
    pd, pyarrow, reader = (needs(package, "tables") for package in ("pandas", "pyarrow", "pyarrow.csv"))
    text, notes = _decoded(path)
    separator = _separator(text[:_HEAD])
    first = [*islice(csv.reader(io.StringIO(text[:_HEAD], newline=""), delimiter=separator), 2)]
    has_spaces = separator == " " or any(cell.startswith(" ") for row in first for cell in row[1:])
    suspect = re.compile(rf'(?<![{separator}"\r\n])"(?![{separator}"\r\n])')  # within a field
    if has_spaces or text.count('"') % 2 or suspect.search(text, 1):
        text = _checked(path, text, separator, has_spaces)
    header = next(csv.reader(io.StringIO(text[:_HEAD], newline=""), delimiter=separator), [])
    names = _names(header, path.name, separator)
    data, wrong = text.encode(), list[Any]()

    def skip(row: Any) -> str:
        wrong.append(row)
        return "skip"

    table = reader.read_csv(
        io.BytesIO(data),
        reader.ReadOptions(use_threads=False, column_names=names, block_size=min(len(data) + 1, 2**30)),
        reader.ParseOptions(
            delimiter=separator,
            newlines_in_values=True,
            ignore_empty_lines=False,  # which are rows of missing cells
            invalid_row_handler=skip,
        ),
        reader.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    )
    if wrong:
        is_last = wrong[0].number == len(table) + len(wrong) and text[-1] not in "\r\n"
        raise _of_other_width(path.name, wrong, names, separator, is_last)
    frame = table.slice(1).to_pandas()
    frame.index = pd.RangeIndex(_FIRST, len(frame) + _FIRST)
    empty = frame.isna().all(axis=1)
    frame = frame[~empty] if empty.any() else frame
    frame = frame.drop(columns=[name for name in names if unnamed(name) and frame[name].isna().all()])
    frame.attrs = {"notes": notes, "commas": separator != ","}
    return frame


def _decoded(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and notes on its encoding."""
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") and data[2:4] != b"\0\0":
        try:
            return data.decode("utf-16"), []
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path.name} begins as UTF-16 and is not UTF-16 to its end. Save it as CSV UTF-8."
            ) from error
    for sign, kind in OTHERS.items():
        if data.startswith(sign):
            raise ValueError(f"{path.name} is {kind}, expected text. Save the table as CSV UTF-8.")
    if (zero := data.find(b"\0")) >= 0:
        cause = "It may be UTF-16: save it as UTF-8." if zero < 4 else "The file is damaged: copy it again."
        row = data.count(b"\n", 0, zero) + 1
        raise ValueError(f"{path.name}, row {row}: a zero byte, expected text. {cause}")
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        is_cut = error.end == len(data) and error.reason == "unexpected end of data"
        if is_cut or not data.decode(errors="ignore").isascii():
            remedy = "It is cut off: copy it again." if is_cut else "Other rows are: save the whole as CSV UTF-8."
            row, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
            raise ValueError(f"{path.name}, row {row}: the byte 0x{byte:02x} is not UTF-8. {remedy}") from error
    try:
        return data.decode("cp1252"), [f"{path.name} is not UTF-8 and was read as Windows-1252"]
    except UnicodeDecodeError:
        return data.decode("latin-1"), [f"{path.name} is not UTF-8 and was read as Latin-1"]


def _separator(text: str) -> str:
    """Return the character that divides both the header and the next row."""
    widths = {}
    for mark in ",;\t| ":
        rows = filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True))
        widths[mark] = min(map(len, islice(rows, 2)), default=1)
    has_spaces = widths.pop(" ") > 1
    return " " if has_spaces and max(widths.values()) == 1 else max(widths, key=widths.__getitem__)


def _checked(path: Path, text: str, separator: str, has_spaces: bool) -> str:
    """Return a text whose quotes are right, with `has_spaces` without the spaces after separators.

    Raises:
        ValueError: for a quote that is not closed, or one within quotes that is not doubled.
    """
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, skipinitialspace=has_spaces)
    file, count = io.StringIO(newline=""), 0
    write = csv.writer(file, delimiter=separator, lineterminator="\n").writerow
    try:
        for row in rows:
            count += 1
            if has_spaces:
                write(row)
    except csv.Error as error:
        is_open = "unexpected end" in str(error) or "field larger" in str(error)
        problem = "a quote is not closed" if is_open else str(error)
        raise ValueError(
            f"{path.name}, row {count + 1}: {problem}. Write a quote within quotes twice, or copy the file again."
        ) from error
    return file.getvalue() if has_spaces else text


def _of_other_width(name: str, wrong: list[Any], names: list[str], separator: str, is_last: bool) -> ValueError:
    """Return the error of rows with fewer or more fields than the header; `is_last` if the file ends within one."""
    fields, expected, place = wrong[0].actual_columns, len(names), f"{name}, row {wrong[0].number}"
    if is_last and fields < expected:
        return ValueError(
            f"{place}: the file ends after {fields} of {expected} fields, in {names[fields - 1]}. It is cut off: "
            "copy it again."
        )
    also = f" (and {len(wrong) - 1:,} more rows)" if len(wrong) > 1 else ""
    remedy = (
        "Put quotes around values that contain the separator"
        if fields > expected
        else f"{names[fields]} is missing; leave a field empty, but keep its separator"
    )
    return ValueError(
        f"{place}: {fields} field{'s' * (fields != 1)} divided by {separator!r}, the header has {expected}{also}. "
        f"{remedy}."
    )


def _names(header: Sequence[str], file: str, separator: str) -> list[str]:
    """Return the names of the columns; those without one are `Unnamed: 0` and so on, as pandas calls them."""
    names, line = [name.strip().strip("\ufeff") for name in header], separator.join(header)
    if not any(names):
        raise ValueError(f"{file}: row 1 is empty, expected the names of the columns.")
    if names[0].startswith("sep="):
        raise ValueError(f"{file}: row 1 is {names[0]!r}, expected the names of the columns. Delete this row.")
    if names[0][:1] in ("#", "%") and (len(names[0]) > 1 or separator == " "):
        raise ValueError(
            f"{file}: row 1 is a comment, {line!r}, expected the names of the columns. Delete the comments, and write "
            "the names without a sign before them."
        )
    if all(re.fullmatch(_NUMBER, name) for name in names):
        line = ", ".join(header)
        raise ValueError(f"{file}: row 1 is {line}, expected the names of the columns. Add a first row with them.")
    names = [name or f"Unnamed: {position}" for position, name in enumerate(names)]
    _check_names(names, file)
    return names


def _check_names(names: Sequence[str], file: str) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            first = names.index(name) + 1
            raise ValueError(f"{file}: columns {first} and {position + 1} are both called {name!r}. Rename one.")
