"""Tables as Markdown, LaTeX and CSV, with the same numbers."""

from __future__ import annotations

import csv
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from ...terminal import BOLD, styled
from .cells import NONE, Cell, Table

_RANKS = {  # format -> the text of an ordinary cell, of the best of a column and of the second best
    "markdown": ("{}", "**{}**", "<u>{}</u>"),
    "latex": ("{}", r"\textbf{{{}}}", r"\underline{{{}}}"),
}
PAPER_TITLE, TITLE = "Graph Attention Networks: results beside the paper's", "Results"


def _ranked(form: str, cell: Cell, escaped: Callable[[str], str]) -> str:
    return _RANKS[form][cell.rank].format(escaped(cell.text))


def _groups(table: Table) -> list[tuple[str, int]]:
    """Return the groups of columns, each with its number of columns; an empty list if no column is in a group."""
    groups = [(group, len(list(its))) for group, its in itertools.groupby(group for group, _ in table.columns)]
    return groups if any(group for group, _ in groups) else []


def title_of(tables: Sequence[Table]) -> str:
    """Return the title of a document, which depends on whether it has the paper's tables."""
    return PAPER_TITLE if any(table.name == "table2" for table in tables) else TITLE


# The terminal -------------------------------------------------------------------------------------------------------


def plain(table: Table, width: int) -> str:
    """Return the rows with results of one table as aligned text, in blocks of columns that fit into a width.

    Rows and data sets without results, such as those with the paper's numbers alone, are left out.

    >>> print(plain(Table("t", "A table.", (("", "method"), ("Cora", "here")), ((Cell("GCN"), Cell("81 ± 1")),)), 80))
    A table.
    method  Cora here
    GCN     81 ± 1
    """
    rows = [row for row in table.rows if not any(cell.is_ours for cell in row) or _has_results(row)]
    if not rows:
        return ""
    heads = _heads(table)
    groups = [group for group, _ in table.columns]
    ours = {group for group, *cells in zip(groups, *rows, strict=True) if _has_results(cells)} or {*groups}
    kept = [n for n, group in enumerate(groups) if not group or group in ours]
    filled = [n for n in kept if any(row[n].text not in ("", NONE) for row in rows)]
    size = {n: max(len(heads[n]), *(len(row[n].text) for row in rows)) for n in filled}
    blocks: list[list[int]] = []
    for n in filled[1:]:
        if not blocks or sum(size[each] + 2 for each in (*blocks[-1], n)) > width:
            blocks.append([filled[0]])
        blocks[-1].append(n)
    lines = textwrap.wrap(table.caption, width)
    for block in blocks:
        lines += ["  ".join(f"{heads[n]:<{size[n]}}" for n in block).rstrip()]
        shown = [row for row in rows if any(row[n].text not in ("", NONE) for n in block[1:])]
        lines += ["  ".join(_plain_cell(row[n], size[n]) for n in block).rstrip() for row in shown]
        lines.append("")
    return "\n".join(lines[:-1])


def _has_results(row: Iterable[Cell]) -> bool:
    return any(cell.is_ours and cell.text != NONE for cell in row)


def _plain_cell(cell: Cell, width: int) -> str:
    padded = f"{cell.text:<{width}}"
    return styled(padded, BOLD) if cell.rank == 1 else padded


# Markdown -----------------------------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table]) -> str:
    """Return a Markdown document, whose last tables list the sources of the numbers."""
    return "\n\n".join([f"# {title_of(tables)}", *map(markdown_table, tables)]) + "\n"


def markdown_table(table: Table) -> str:
    """Return one table with its caption as a heading and its notes as a list.

    >>> print(markdown_table(Table("t", "A table.", (("", "method"), ("Cora", "here")), ((Cell("GCN*"), Cell("81")),))))
    ## A table.
    <BLANKLINE>
    | method | Cora here |
    |---|---|
    | GCN\\* | 81 |
    """
    heads = [_markdown(head) for head in _heads(table)]
    rows = [[_ranked("markdown", cell, _markdown) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    notes = [f"- {_markdown(note)}" for note in table.notes]
    return "\n\n".join(part for part in (f"## {_markdown(table.caption)}", "\n".join(lines), "\n".join(notes)) if part)


def _heads(table: Table) -> list[str]:
    return [f"{group} {name}".strip() for group, name in table.columns]


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


# LaTeX --------------------------------------------------------------------------------------------------------------


def latex(tables: Sequence[Table]) -> str:
    """Return a LaTeX document in the style of booktabs, from which each table can be copied."""
    begin = [r"\documentclass{article}", *(rf"\usepackage{name}" for name in _PACKAGES), r"\begin{document}"]
    section = [rf"\section*{{{_latex(title_of(tables))}}}"]
    return "\n\n".join(["\n".join(begin), *section, *map(latex_table, tables), r"\end{document}"]) + "\n"


_PACKAGES = ("[T1]{fontenc}", "{booktabs}", "{adjustbox}")


def latex_table(table: Table) -> str:
    r"""Return one table with its caption above and its notes below; needs `\usepackage{booktabs,adjustbox}`.

    >>> print(latex_table(Table("t", "A table.", (("", "method"), ("Cora", "here")), ((Cell("a_b"), Cell("−0.2")),))))
    \begin{table}[htbp]
    \centering
    \caption{A table.}
    \label{tab:t}
    \begin{adjustbox}{max width=\textwidth}
    \begin{tabular}{ll}
    \toprule
     & Cora \\
    \cmidrule(lr){2-2}
    method & here \\
    \midrule
    a\_b & $-$0.2 \\
    \bottomrule
    \end{tabular}
    \end{adjustbox}
    \end{table}
    """
    head = [*_latex_groups(table), _latex_row(_latex(name) for _, name in table.columns)]
    notes = [rf"\par\smallskip\footnotesize\raggedright {_latex(note)}" for note in table.notes]
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            r"\centering",
            rf"\caption{{{_latex(table.caption)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\begin{adjustbox}{max width=\textwidth}",
            rf"\begin{{tabular}}{{{_latex_columns(table)}}}",
            r"\toprule",
            *head,
            r"\midrule",
            *(_latex_row(_ranked("latex", cell, _latex) for cell in row) for row in table.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{adjustbox}",
            *notes,
            r"\end{table}",
        ]
    )


def _latex_columns(table: Table) -> str:
    """Return the type of each column: a single line, or a paragraph if one of its cells is long."""
    long = (any(len(row[n].text) > 60 for row in table.rows) for n in range(len(table.columns)))
    return "".join(r"p{0.6\textwidth}" if one else "l" for one in long)


def _latex_groups(table: Table) -> list[str]:
    cells, rules, start = [], "", 1
    for group, width in _groups(table):
        if group:
            cells.append(_latex(group) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{_latex(group)}}}")
            rules += rf"\cmidrule(lr){{{start}-{start + width - 1}}}"
        else:
            cells += [""] * width
        start += width
    return [" & ".join(cells) + r" \\", rules] if cells else []


def _latex_row(texts: Iterable[str]) -> str:
    row = " & ".join(texts)
    return (r"\relax" if row.startswith("[") else "") + row + r" \\"  # after \\, a [ would start an option


_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "±": r"$\pm$",
    "−": r"$-$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "–": "--",
    "—": "---",
    "“": "``",
    "”": "''",
    '"': r"\textquotedbl{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "²": r"$^2$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


# CSV ----------------------------------------------------------------------------------------------------------------


def csv_table(table: Table) -> str:
    """Return one table as CSV, without caption and notes.

    >>> print(csv_table(Table("t", "A table.", (("", "method"), ("Cora", "here")), ((Cell("a, b"), Cell("81")),))))
    method,Cora here
    "a, b",81
    <BLANKLINE>
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [_heads(table), *([cell.text for cell in row] for row in table.rows)]
    )
    return text.getvalue()
