"""Tables 2 and 3 with our numbers beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...report.tables.cells import NAMES, NONE, Cell, Table, difference_cell, ours_cell, spread
from ...report.tables.general import general_table, rows_of
from ...report.tables.sources import source_tables
from ...runs.groups import Gathered, Key, Line, Runs, gathered, ranked
from ...tasks.metrics import ACCURACY, MICRO_F1, metric_named
from ..published import Printed, published

ABLATION, AS_GAT = "ablation", "trained as GAT"  # studies


class Scores(NamedTuple):
    """One of the paper's tables of test scores."""

    number: str
    caption: str
    datasets: tuple[str, ...]
    metric: str
    training: str  # how `experiment=table<number>` trains GAT and the same network without attention
    as_gat: bool = False  # if true, it has a column of the study `AS_GAT`

    def has(self, key: Key) -> bool:
        """Return True if runs with this key have the table's data sets and metric, and are no ablation."""
        return key.dataset in self.datasets and key.metric == self.metric and key.study != ABLATION


TABLE2 = Scores(
    "2",
    "Test accuracy in percent",
    ("cora", "citeseer", "pubmed"),
    ACCURACY.name,
    "GAT is the authors' code, and it and GCN-64* stop on the validation loss",
)
TABLE3 = Scores(
    "3",
    "Test micro-F1",
    ("ppi",),
    MICRO_F1.name,
    "GAT and Const-GAT are the authors' code and stop on the validation score; unlabelled nodes are left out",
    as_gat=True,
)


def fits_paper(lines: Sequence[Line]) -> bool:
    """Return True if a line belongs into a table of the paper, and they are no study of the settings of one method."""
    runs = [(key, its) for key, its in gathered(lines).items() if any(scores.has(key) for scores in (TABLE2, TABLE3))]
    is_study = len({key.row for key, _ in runs}) == 1 and any(len(its) > 1 for _, its in runs)
    return bool(runs) and not is_study


def paper_tables(lines: Sequence[Line], *, others: bool = False) -> list[Table]:
    """Return the paper's tables; `others` adds a general one of the lines that fit none of them."""
    runs = gathered(lines)
    unfit = {key: its for key, its in runs.items() if not any(scores.has(key) for scores in (TABLE2, TABLE3))}
    general = unfit if others else {}
    return [
        score_table(TABLE2, runs),
        score_table(TABLE3, runs),
        *([general_table(rows_of(general))] if general else []),
        *source_tables(runs, lines, lambda key, one: key in general or _stands(one, key, runs)),
    ]


def _stands(one: Runs, key: Key, runs: Gathered) -> bool:
    """Return True if one of the paper's tables shows these runs."""
    return any(scores.has(key) for scores in (TABLE2, TABLE3)) and one is shown(runs, key._replace(form=""))


def forms(runs: Gathered, key: Key) -> list[Runs]:
    """Return the newest group of each form of a row, the best mean validation score first."""
    return ranked(groups[0] for other, groups in runs.items() if other._replace(form="") == key)


def shown(runs: Gathered, key: Key) -> Runs | None:
    """Return the runs shown in a row: the form with the best mean validation score."""
    return next(iter(forms(runs, key)), None)


# Tables 2 and 3: test scores ----------------------------------------------------------------------------------------


def score_table(scores: Scores, runs: Gathered) -> Table:
    """Return Table 2 or 3: for each method our mean ± std (runs), the paper's number and the difference."""
    methods = [row for table, row, _ in published() if table == scores.number]
    methods += [key.row for key in runs if scores.has(key) and not key.study]
    rows = []
    for method in dict.fromkeys(methods):
        row = [Cell(method)]
        for dataset in scores.datasets:
            here = shown(runs, Key(method, dataset, scores.metric))
            paper = published().get((scores.number, method, dataset))
            row += [
                ours_cell(here, scores.metric),
                paper_cell(paper, scores.metric),
                difference_cell(here, paper, scores.metric),
            ]
            if scores.as_gat:
                as_gat = shown(runs, Key(method, dataset, scores.metric, study=AS_GAT))
                row.append(ours_cell(as_gat, scores.metric))
        rows.append(tuple(row))
    names = ["here", "paper", "difference"] + [AS_GAT] * scores.as_gat
    columns = [(NAMES[dataset], name) for dataset in scores.datasets for name in names]
    return Table(
        name=f"table{scores.number}",
        caption=f"Table {scores.number} of the paper. {scores.caption}, mean ± standard deviation (runs).",
        columns=(("", "Method"), *columns),
        rows=tuple(rows),
        notes=(
            f"As experiment=table{scores.number} has them, {scores.training}. What a method does otherwise than its "
            "original is described in its file of gat_pyg/paper/methods.",
            *_forms_notes(scores, runs),
        ),
    )


def _forms_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    """Yield notes on the form that a row shows, with the mean validation scores of all its forms."""
    for key in dict.fromkeys(key._replace(form="") for key in runs if scores.has(key)):
        its = forms(runs, key)
        if len(its) > 1:
            digits = metric_named(key.metric).digits + 1
            values = ", ".join(f"{one.method} {one.val:.{digits}f}" for one in its)
            yield f"{key.row} on {NAMES[key.dataset]} is {its[0].method}, by the mean validation scores: {values}."


def paper_cell(paper: Printed | None, metric: str) -> Cell:
    """Return the cell of a published number."""
    if paper is None or math.isnan(paper.mean):
        return Cell(NONE)
    return Cell(spread(paper.mean, paper.std, metric) + (f" ({paper.runs})" if paper.runs else ""))
