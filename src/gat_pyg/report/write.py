"""Writing the report from lines of results, in each format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from ..files import write_whole
from ..paper.tables.scores import fits_paper, paper_tables
from ..paper.tables.strong import strong_table
from ..runs.groups import Line, gathered, lines_of
from .tables.cells import Table
from .tables.comparison import comparison_table
from .tables.formats import csv_table, latex, latex_table, markdown
from .tables.general import general_table, rows_of
from .tables.sources import source_tables

DOCUMENTS: dict[str, Callable[[Sequence[Table]], str]] = {"md": markdown, "tex": latex}
FILES = {"input": ("tex", latex_table), "csv": ("csv", csv_table)}  # format -> suffix and text of one table's file


class Report(NamedTuple):
    """A written report."""

    lines: int  # number of lines of results
    tables: list[Table]
    files: list[Path]


def write_report(
    *results: str | Path,
    out: str | Path = "outputs/report",
    format: Sequence[str] = ("md", "tex"),
    preset: Literal["paper", "general", "strong"] | None = None,
    against: str | None = None,
) -> Report:
    """Write tables of lines of results: the paper's beside its published numbers, or methods by data sets.

    Args:
        results: files of results, by default outputs/results.jsonl.
        out: the folder of the report.
        format: md, tex: one document, report.FORMAT; input, csv: a file for each table, for `\\input` in LaTeX
            or as CSV.
        preset: the paper's tables, methods by data sets, or experiment=strong beside published numbers. By default the
            paper's if they have a row for one of the lines, and the general one of the others; for several settings of
            one method the general one.
        against: compare the other rows of the general table with this one, by t-tests.

    Returns:
        The number of lines, the tables, and the files written.

    Raises:
        OSError, ValueError: if a file of results cannot be read, the report cannot be written, or an argument does not
            fit the lines.
        ImportError: if a package for t-tests is missing.
    """
    out, unknown = Path(out), {*format} - {*DOCUMENTS, *FILES}
    if unknown:
        raise ValueError(f"format is {', '.join(unknown)}, expected some of {', '.join([*DOCUMENTS, *FILES])}.")
    lines = [line for path in dict.fromkeys(results or ["outputs/results.jsonl"]) for line in lines_of(Path(path))]
    if against is not None and preset not in (None, "general"):
        raise ValueError(f"--against compares rows of the general table. Leave out --preset {preset}.")
    if preset == "strong":
        content = [strong_table(gathered(lines)), *source_tables(gathered(lines), lines)]
    elif preset == "general" or against is not None or (preset is None and not fits_paper(lines)):
        content = general_tables(lines, against)
    else:
        content = paper_tables(lines, others=preset is None)
    return Report(len(lines), content, write_tables(content, out, format))


def general_tables(lines: Sequence[Line], against: str | None = None) -> list[Table]:
    """Return the tables of any lines: methods by data sets, the differences from a row, the sources of all numbers."""
    runs = gathered(lines)
    rows = rows_of(runs)
    compared = [] if against is None else [comparison_table(rows, against)]
    return [general_table(rows), *compared, *source_tables(runs, lines)]


def write_tables(results: Sequence[Table], folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write the tables in these formats, and return the files: one document, or a file for each table."""
    texts: dict[str, str] = {}
    for name in formats:
        if name in DOCUMENTS:
            texts[f"report.{name}"] = DOCUMENTS[name](results)
        else:
            suffix, form = FILES[name]
            texts |= {f"{table.name}.{suffix}": form(table).rstrip("\n") + "\n" for table in results}
    paths = []
    for file, text in texts.items():
        try:
            write_whole(folder / file, partial(Path.write_bytes, data=text.encode()))
        except OSError as error:
            raise OSError(f"{folder} cannot be written: {error.strerror}. Choose another: --out FOLDER.") from error
        paths.append(folder / file)
    return paths
