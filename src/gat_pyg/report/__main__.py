"""The command `python -m gat_pyg.report`: compare lines of results with the paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """examples:
  python -m gat_pyg.report                                 outputs/results.jsonl -> outputs/report
  python -m gat_pyg.report a.jsonl b.jsonl --out report    the lines of two files
  python -m gat_pyg.report --no-data                       without Table 1, which reads the data sets
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report, and return the exit status: 1, after a message, if it cannot be written."""
    options = parser().parse_args(arguments)
    from .write import write_report  # imports torch

    try:
        count, paths = write_report(options.results, options.out, options.data_root, options.data)
    except (OSError, ValueError) as error:
        print(f"gat_pyg.report: {error}", file=sys.stderr)
        return 1
    print(f"{count} lines of results are in {', '.join(map(str, paths))}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m gat_pyg.report",
        description="Compare lines of results with the paper's tables: report.md, report.tex and report.html.",
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
    result.add_argument("--no-data", dest="data", action="store_false", help="leave out Table 1 and read no data")
    return result


if __name__ == "__main__":
    sys.exit(main())
