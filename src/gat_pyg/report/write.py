"""Writing the report from lines of results: report.md, report.tex and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..data.citation import planetoid
from ..data.proteins import listed_links, ppi
from ..files import write_whole
from .cells import NAMES, Table
from .counts import Counts, counted
from .formats import html, latex, markdown
from .runs import lines_of
from .tables import tables

FORMATS = {"report.md": markdown, "report.tex": latex, "report.html": html}


def write_report(results: Sequence[Path], folder: Path, data_root: Path | None, data: bool) -> tuple[int, list[Path]]:
    """Write the report on these files of results, with Table 1 if `data` is true.

    Returns:
        The number of lines, and the files written.

    Raises:
        OSError, ValueError: if a file of results cannot be read, or the report cannot be written.
    """
    lines = [line for path in dict.fromkeys(results) for line in lines_of(path)]
    counts = {name: data_counts(name, data_root) for name in NAMES} if data else None
    return len(lines), write_tables(tables(lines, counts), folder)


def write_tables(results: Sequence[Table], folder: Path) -> list[Path]:
    """Write the tables in every format, and return the files."""
    paths = []
    for file, form in FORMATS.items():
        try:
            write_whole(folder / file, partial(Path.write_bytes, data=form(results).encode()))
        except OSError as error:
            raise OSError(f"{folder} cannot be written: {error.strerror}. Choose another: --out FOLDER.") from error
        paths.append(folder / file)
    return paths


def data_counts(name: str, root: Path | None) -> Counts | str:
    """Return the counts of a data set, or the reason why it cannot be counted."""
    try:
        task = ppi(root) if name == "ppi" else planetoid(name, root)
        return counted(task, listed_links(name, root))
    except (OSError, ValueError) as error:
        return str(error)
