"""The command `python -m gat_pyg.report`: tables of lines of results, beside the paper's where they fit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..terminal import columns, print_any_text

EXAMPLES = """examples:
  python -m gat_pyg.report                                 outputs/results.jsonl -> outputs/report
  python -m gat_pyg.report a.jsonl b.jsonl --out report    the lines of two files
  python -m gat_pyg.report --no-data                       without Table 1, which reads the data sets
  python -m gat_pyg.report --preset general --format input csv
                                                           methods by data sets, for \\input and as CSV
  python -m gat_pyg.report --against GCN                   p-values of every method's difference from GCN
  python -m gat_pyg.report FOLDER/result.json --graphs     the best and the worst test graphs of one run
"""


PRINTED = ("table2", "table3", "general", "against", "uncertainty", "strong")  # tables that the command prints


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report, print its tables of scores, and return the exit status: 1, after a message, if that fails."""
    print_any_text()
    options = vars(parser().parse_args(arguments))
    from .tables.formats import plain
    from .write import write_report  # imports torch

    try:
        count, tables, paths = write_report(**options)
    except (ImportError, OSError, ValueError) as error:
        print(f"gat_pyg.report: {error}", file=sys.stderr)
        return 1
    for table in tables:
        if table.name in PRINTED and (text := plain(table, columns())):
            print(f"{text}\n")
    number = "1 line of results is" if count == 1 else f"{count} lines of results are"
    print(f"{number} in {', '.join(map(str, paths))}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m gat_pyg.report",
        description="Write tables of lines of results: the paper's with its numbers beside, or methods by data sets.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "results",
        nargs="*",
        type=Path,
        default=[Path("outputs/results.jsonl")],
        metavar="RESULTS.jsonl",
        help="files of results (default: outputs/results.jsonl)",
    )
    result.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/report"),
        metavar="FOLDER",
        help="folder of the report (default: outputs/report)",
    )
    result.add_argument(
        "--data-root",
        type=Path,
        metavar="FOLDER",
        help="folder of the raw files for Table 1 (default: $GAT_PYG_DATA, else ~/.cache/gat_pyg)",
    )
    result.add_argument(
        "--format",
        nargs="+",
        choices=("md", "tex", "html", "input", "csv"),
        default=("md", "tex", "html"),
        help="md, tex, html: report.FORMAT; input, csv: a file for each table, for \\input in LaTeX or as CSV "
        "(default: md tex html)",
    )
    result.add_argument(
        "--preset",
        choices=("paper", "general", "strong"),
        help="the paper's tables, methods by data sets, or experiment=strong beside published numbers (default: the "
        "paper's if they have a row for a line, and the general one for the other lines; for several settings of one "
        "method the general one)",
    )
    result.add_argument(
        "--against",
        metavar="ROW",
        help="compare the other rows of the general table with this one, by t-tests; implies --preset general",
    )
    result.add_argument(
        "--curves", action="store_true", help="draw the learning curves of the runs whose folders exist: curves.svg"
    )
    result.add_argument(
        "--graphs",
        action="store_true",
        help="draw the attention of the test graphs with the best and the worst predictions, for each method and data "
        "set with graph labels whose folder exists: graphs-METHOD-DATASET.svg",
    )
    result.add_argument("--no-data", dest="data", action="store_false", help="leave out Table 1 and read no data")
    return result


if __name__ == "__main__":
    sys.exit(main())
