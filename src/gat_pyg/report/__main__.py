"""The command ``python -m gat_pyg.report``: lines of results in, report.md, report.tex and report.html out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..data.citation import planetoid
from ..data.proteins import listed_links, ppi
from ..files import write_whole
from .counts import Counts, counted
from .formats import html, latex, markdown
from .runs import lines_of
from .tables import NAMES, Table, tables

FORMATS = {"report.md": markdown, "report.tex": latex, "report.html": html}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; the exit status, 1 where it cannot be written, which a message tells."""
    options = parser().parse_args(arguments)
    try:
        lines = [line for path in dict.fromkeys(options.results) for line in lines_of(path)]
        counts = {name: data_counts(name, options.data_root) for name in NAMES} if options.data else None
        paths = write(tables(lines, counts), options.out)
    except (OSError, ValueError) as error:
        print(f"gat_pyg.report: {error}", file=sys.stderr)
        return 1
    print(f"{len(lines)} lines of results are in {', '.join(map(str, paths))}")
    return 0


def write(found: Sequence[Table], folder: Path) -> list[Path]:
    """Write the tables in every format; where they are."""
    paths = []
    for file, form in FORMATS.items():
        try:
            write_whole(folder / file, partial(Path.write_bytes, data=form(found).encode()))
        except OSError as error:
            raise OSError(f"{folder} cannot be written: {error.strerror}. Choose another: --out FOLDER.") from error
        paths.append(folder / file)
    return paths


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    asked = argparse.ArgumentParser(
        prog="python -m gat_pyg.report",
        description="Set lines of results beside the paper's numbers: report.md, report.tex and report.html.",
    )
    asked.add_argument(
        "results",
        nargs="*",
        type=Path,
        default=[Path("outputs/results.jsonl")],
        metavar="RESULTS.jsonl",
        help="files of results (default: outputs/results.jsonl)",
    )
    asked.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/report"),
        metavar="FOLDER",
        help="where to write (default: outputs/report)",
    )
    asked.add_argument(
        "--data-root",
        type=Path,
        metavar="FOLDER",
        help="the folder of raw files that Table 1 is counted in; else $GAT_PYG_DATA, else ~/.cache/gat_pyg",
    )
    asked.add_argument("--no-data", dest="data", action="store_false", help="leave out Table 1 and read no data")
    return asked


def data_counts(name: str, root: Path | None) -> Counts | str:
    """What the data set holds, or why it cannot be told."""
    try:
        task = ppi(root) if name == "ppi" else planetoid(name, root)
        return counted(task, listed_links(name, root))
    except (OSError, ValueError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
