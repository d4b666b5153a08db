"""The paper's tables with our numbers beside the paper's, the ablation, and the sources of all numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..paper.published import published
from ..runs.groups import ABLATION, AS_GAT, Key, Line, Runs, forms, gathered, shown
from ..runs.result import PACKAGES, SOURCE
from ..tasks.metrics import ACCURACY, MICRO_F1, metric_named
from .cells import (
    NAMES,
    NONE,
    Cell,
    Table,
    cost_cell,
    difference_cell,
    ours_cell,
    p_cell,
    paper_cell,
    places,
    ranges,
    source_of,
    spread,
)
from .comparison import comparison_table
from .data_table import Counts, data_table, unknown_note
from .general import general_table, rows_of
from .strong import strong_table
from .uncertainty import uncertainty_tables

Gathered: TypeAlias = Mapping[Key, Sequence[Runs]]


class Scores(NamedTuple):
    """One of the paper's tables of test scores."""

    number: str
    caption: str
    datasets: tuple[str, ...]
    metric: str
    rival: str  # the same network without attention
    training: str  # how `experiment=table<number>` trains GAT and its rival
    as_gat: bool = False  # if true, it has a column of the study `AS_GAT`

    def has(self, key: Key) -> bool:
        """Return True if runs with this key have the table's data sets and metric."""
        return key.dataset in self.datasets and key.metric == self.metric


TABLE2 = Scores(
    "2",
    "Test accuracy in percent",
    ("cora", "citeseer", "pubmed"),
    ACCURACY.name,
    "GCN-64*",
    "GAT is the authors' code, and it and GCN-64* stop on the validation loss",
)
TABLE3 = Scores(
    "3",
    "Test micro-F1",
    ("ppi",),
    MICRO_F1.name,
    "Const-GAT",
    "GAT and Const-GAT are the authors' code and stop on the validation score",
    as_gat=True,
)


def fits_paper(lines: Sequence[Line]) -> bool:
    """Return True if a line belongs into a table of the paper, and they are no study of the settings of one method."""
    runs = [(key, its) for key, its in gathered(lines).items() if any(scores.has(key) for scores in (TABLE2, TABLE3))]
    is_study = len({key.row for key, _ in runs}) == 1 and any(len(its) > 1 for _, its in runs)
    return bool(runs) and not is_study


def general_tables(lines: Sequence[Line], against: str | None = None) -> list[Table]:
    """Return the tables of any lines: methods by data sets, the differences from a row, the sources of all numbers."""
    runs = gathered(lines)
    rows = rows_of(runs)
    compared = [] if against is None else [comparison_table(rows, against)]
    return [
        general_table(rows),
        *compared,
        *uncertainty_tables(rows),
        runs_table(runs, lines, runs),
        files_table(lines),
    ]


def strong_tables(lines: Sequence[Line]) -> list[Table]:
    """Return the table of `experiment=strong`, and the sources of its numbers."""
    runs = gathered(lines)
    return [strong_table(runs), runs_table(runs, lines, runs), files_table(lines)]


def tables(
    lines: Sequence[Line], counts: Mapping[str, Counts | str] | None = None, *, others: bool = False
) -> list[Table]:
    """Return the paper's tables; `others` adds a general one of the lines that fit none of them.

    `counts` are those of the data sets, or the reasons why there are none.
    """
    runs = gathered(lines)
    unfit = {key: its for key, its in runs.items() if not any(scores.has(key) for scores in (TABLE2, TABLE3))}
    general = unfit if others else {}
    first = [] if counts is None else [data_table(counts)]
    ppi = (counts or {}).get("ppi")
    return [
        *first,
        score_table(TABLE2, runs),
        score_table(TABLE3, runs, [unknown_note(ppi if isinstance(ppi, Counts) else None)]),
        significance_table(runs),
        ablation_table(runs),
        *([general_table(rows_of(general))] if general else []),
        *uncertainty_tables(rows_of(runs)),
        runs_table(runs, lines, general),
        files_table(lines),
    ]


# Tables 2 and 3: test scores ----------------------------------------------------------------------------------------


def score_table(scores: Scores, runs: Gathered, notes: Iterable[str] = ()) -> Table:
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
                difference_cell(here.mean if here else math.nan, paper.mean if paper else math.nan, scores.metric),
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
            *notes,
            f"As experiment=table{scores.number} has them, {scores.training}. What a method does otherwise than its "
            "original is described in its file of gat_pyg/paper/methods.",
            *_forms_notes(scores, runs),
            *_settings_notes(scores, runs),
            *_precision_notes(scores, runs),
        ),
    )


def _forms_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    """Yield notes on the form that a row shows, with the mean validation scores of all its forms."""
    for key in dict.fromkeys(key._replace(form="") for key in runs if scores.has(key) and key.study != ABLATION):
        its = forms(runs, key)
        if len(its) > 1:
            digits = metric_named(key.metric).digits + 1
            values = ", ".join(f"{one.method} {one.val:.{digits}f}" for one in its)
            yield f"{key.row} on {NAMES[key.dataset]} is {its[0].method}, by the mean validation scores: {values}."


def _settings_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    for key, its in runs.items():
        if scores.has(key) and len(its) > 1:
            others = ", ".join(f"{one.setting or 'none'} ({len(one.lines)} runs)" for one in its[1:])
            yield (
                f"{its[0].method} on {NAMES[key.dataset]} has lines of several settings. The newest one's are shown, "
                f"config_hash {its[0].setting or 'none'}; the others are {others}, see the runs below."
            )


def _precision_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    """Yield notes on rows that were not trained in float32."""
    rows: dict[str, list[str]] = {}
    for key, its in runs.items():
        if scores.has(key):
            for precision in sorted({line.result.device.rpartition(", ")[2] for line in its[0].lines}):
                if precision.endswith(("-mixed", "-true")):
                    rows.setdefault(precision, []).append(f"{its[0].method} on {NAMES[key.dataset]}")
    for precision, methods in rows.items():
        yield f"In {precision} precision, not in float32: {'; '.join(methods)}."


# Significance -------------------------------------------------------------------------------------------------------


def significance_table(runs: Gathered) -> Table:
    """Return the table of GAT against the same network without attention: difference and p-value."""
    rows = []
    for scores in (TABLE2, TABLE3):
        for dataset in scores.datasets:
            gat = shown(runs, Key("GAT", dataset, scores.metric))
            rival = shown(runs, Key(scores.rival, dataset, scores.metric))
            rows.append(
                (
                    Cell(NAMES[dataset]),
                    ours_cell(gat, scores.metric),
                    Cell(scores.rival),
                    ours_cell(rival, scores.metric),
                    difference_cell(gat.mean if gat else math.nan, rival.mean if rival else math.nan, scores.metric),
                    p_cell(gat, rival),
                )
            )
    return Table(
        name="significance",
        caption="GAT against its rival without attention.",
        columns=tuple(("", name) for name in ("Data set", "GAT", "rival", "rival's score", "difference", "p")),
        rows=tuple(rows),
        notes=(
            "p is two-sided, by a permutation test of Welch's t, which assumes no distribution of the scores and no "
            "equal deviations. It needs at least two runs of both; with three of each it cannot be below 0.1.",
            "Runs are not paired: a seed draws other weights and masks for another network, and the split is the same "
            "for all. So p covers the randomness of training alone, not other splits or graphs.",
        ),
    )


# The ablation -------------------------------------------------------------------------------------------------------


def ablation_table(runs: Gathered) -> Table:
    """Return the table from the paper's text to the authors' code, one switch at a time."""
    rows = []
    for scores in (TABLE2, TABLE3):
        for dataset in scores.datasets:
            switched = [key for key in runs if key.study == ABLATION and key.dataset == dataset and scores.has(key)]
            if not switched:
                continue
            gat = Key("GAT", dataset, scores.metric)
            base = gat._replace(form="text", study=ABLATION)  # the others are compared with it
            for key in sorted((*switched, *[gat] * (gat in runs)), key=lambda key: key != base):  # base first
                one, first = runs[key][0], runs[base][0] if base in runs and key != base else None
                rows.append(
                    (
                        Cell(NAMES[dataset]),
                        Cell(f"GAT in Table {scores.number}" if key == gat else key.form),
                        ours_cell(one, scores.metric),
                        difference_cell(one.mean, first.mean if first else math.nan, scores.metric),
                        p_cell(one, first),
                        cost_cell(one),
                    )
                )
    return Table(
        name="ablation",
        caption="The paper's text against the authors' code, one switch at a time.",
        columns=tuple(("", name) for name in ("Data set", "form", "test", "difference", "p", "seconds a run")),
        rows=tuple(rows),
        notes=(
            "Difference and p (as above, of each row alone) are from the text; where there are no runs of it, there is "
            "none. A form of the residual is a switch only of networks that have one, on PPI.",
            *([] if rows else [f"There are no lines of it: their study is “{ABLATION}”."]),
        ),
    )


# Where every number comes from --------------------------------------------------------------------------------------


def runs_table(runs: Gathered, lines: Sequence[Line], general: Gathered) -> Table:
    """Return the table of all groups of runs with their lines; the general table shows all groups of `general`."""
    files = _numbered(lines)
    rows = []
    for key, its in runs.items():
        for one in its:
            results = [line.result for line in one.lines]
            rows.append(
                (
                    Cell(one.method),
                    Cell(NAMES.get(key.dataset, key.dataset)),
                    Cell(one.setting or NONE),
                    Cell("yes" if key in general or _stands(one, key, runs) else "no"),
                    Cell(spread(statistics.fmean(result.val for result in results), math.nan, key.metric)),
                    Cell(spread(one.mean, one.std, key.metric), source_of(one)),
                    Cell(ranges([result.seed for result in results])),
                    Cell(f"{statistics.fmean(result.epochs for result in results):.0f}"),
                    Cell(f"{statistics.fmean(result.best_epoch for result in results):.0f}"),
                    cost_cell(one),
                    Cell(", ".join(dict.fromkeys(result.device for result in results))),
                    Cell("; ".join(f"[{files[file]}] {ranges(numbers)}" for file, numbers in places(one).items())),
                )
            )
    names = (
        "Method",
        "data set",
        "config_hash",
        "shown",
        "validation",
        "test",
        "seeds",
        "epochs",
        "best",
        "seconds a run",
        "device",
        "lines",
    )
    return Table(
        name="runs",
        caption="The runs: where every number comes from.",
        columns=tuple(("", name) for name in names),
        rows=tuple(rows),
        notes=(
            "config_hash is that of the settings that decide what is learnt. Of several lines of one seed with one "
            "setting the newest counts. Epochs, the best of them (whose weights were tested) and seconds are means; a "
            "method without epochs has 0. Seconds are of the training alone, on a machine that others may have used; "
            "a seed that was trained together with others has its share.",
            *_warnings(runs),
            *_version_notes(runs),
        ),
    )


def _warnings(runs: Gathered) -> Iterable[str]:
    """Yield notes on runs whose test score is no better than that of a constant prediction."""
    for key, its in runs.items():
        for one in its:
            warnings = [line.result.warning for line in one.lines if line.result.warning]
            if warnings:
                setting = f"{one.method} on {NAMES.get(key.dataset, key.dataset)} ({one.setting or 'none'})"
                yield f"{setting}: {len(warnings)} of {len(one.lines)} runs are {warnings[0]}."


def _version_notes(runs: Gathered) -> Iterable[str]:
    """Yield notes on runs with the same settings whose seeds were trained by different versions of a package."""
    for key, its in runs.items():
        for one in its:
            texts = []
            for package in (SOURCE, *PACKAGES):
                seeds: dict[str, list[int]] = {}
                for result in (line.result for line in one.lines):
                    version = (result.versions or {}).get(package, "unknown") or "none"
                    seeds.setdefault(version, []).append(result.seed)
                if len(seeds) > 1:
                    texts.append(f"{package} {', '.join(f'{v} (seeds {ranges(n)})' for v, n in seeds.items())}")
            if texts:
                setting = f"{one.method} on {NAMES.get(key.dataset, key.dataset)} ({one.setting or 'none'})"
                yield f"{setting}: the mean is over runs of different versions: {'; '.join(texts)}."


def _stands(one: Runs, key: Key, runs: Gathered) -> bool:
    """Return True if one of the tables above shows these runs."""
    if not any(scores.has(key) for scores in (TABLE2, TABLE3)):
        return False
    return one is (runs[key][0] if key.study == ABLATION else shown(runs, key._replace(form="")))


def files_table(lines: Sequence[Line]) -> Table:
    """Return the table of the files that were read, with the number by which other tables refer to each."""
    files = _numbered(lines)
    rows = [
        (Cell(f"[{n}]"), Cell(file), Cell(f"{sum(line.file == file for line in lines)}")) for file, n in files.items()
    ]
    return Table("files", "The files of results.", (("", "number"), ("", "file"), ("", "lines")), tuple(rows))


def _numbered(lines: Sequence[Line]) -> dict[str, int]:
    return {file: n for n, file in enumerate(dict.fromkeys(line.file for line in lines), start=1)}
