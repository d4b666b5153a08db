"""The paper's tables with our numbers beside the printed ones, the ablation, and where each number comes from."""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple, TypeAlias

from ..tasks.objective import ACCURACY, MICRO_F1, metric_named
from .counts import Counts
from .runs import Key, Line, Runs, forms, gathered, permutation_test, row_of, shown

NAMES = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed", "ppi": "PPI"}
ABLATION = "GAT: "  # how the method of a run of the ablation begins
TEXT = ABLATION + "text"  # what its other rows are compared with
AS_GAT = ", trained as GAT"  # how the method of a run of Table 3's second column ends
NONE = "—"
Gathered: TypeAlias = Mapping[Key, Sequence[Runs]]


class Cell(NamedTuple):
    """What stands in a table, and where it comes from."""

    text: str
    source: str = ""


@dataclass(frozen=True)
class Table:
    """What every format writes: a caption, a head of groups and names of columns, rows of cells, and notes below.

    A row has a cell for each column; neighbouring columns of one group share its head. ``name`` is short and unique.
    """

    name: str
    caption: str
    columns: tuple[tuple[str, str], ...]  # (group or "", name)
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


class Scores(NamedTuple):
    """One of the paper's tables of test scores."""

    number: str
    caption: str
    datasets: tuple[str, ...]
    metric: str
    rival: str  # the method that shows what attention gives
    training: str  # how `experiment=table<number>` trains GAT and its rival
    as_gat: bool = False  # whether it has a column of methods that were trained as GAT is


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


class Printed(NamedTuple):
    """A number that the paper printed; NaN where it has none."""

    mean: float
    std: float
    runs: str
    source: str


@functools.cache
def published() -> dict[tuple[str, str, str], Printed]:
    """The paper's numbers by (table, row, data set), in its order; a fact sheet that is part of the package.

    >>> published()["2", "GAT", "cora"].mean
    83.0
    """
    with resources.files("gat_pyg.report").joinpath("published.csv").open(encoding="utf-8") as file:
        return {
            (row["table"], row["row"], row["dataset"]): Printed(
                float(row["mean"] or "nan"), float(row["std"] or "nan"), row["runs"], row["source"]
            )
            for row in csv.DictReader(file)
        }


def tables(lines: Sequence[Line], counts: Mapping[str, Counts | str] | None = None) -> list[Table]:
    """Every table of the report, from lines of results and what was counted in the data, or why it could not be."""
    runs = gathered(lines)
    first = [] if counts is None else [data_table(counts)]
    ppi = (counts or {}).get("ppi")
    return [
        *first,
        score_table(TABLE2, runs),
        score_table(TABLE3, runs, [unknown_note(ppi if isinstance(ppi, Counts) else None)]),
        significance_table(runs),
        ablation_table(runs),
        runs_table(runs, lines),
        files_table(lines),
    ]


# Tables 2 and 3: test scores ----------------------------------------------------------------------------------------


def score_table(scores: Scores, runs: Gathered, notes: Iterable[str] = ()) -> Table:
    """Table 2 or 3: for each method our mean ± std (runs), the printed number and the difference."""
    methods = [row for table, row, _ in published() if table == scores.number]
    ours = [row_of(key.method) for key in runs if key.dataset in scores.datasets and key.metric == scores.metric]
    methods += [method for method in ours if not method.startswith(ABLATION) and not method.endswith(AS_GAT)]
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
                row.append(ours_cell(shown(runs, Key(method + AS_GAT, dataset, scores.metric)), scores.metric))
        rows.append(tuple(row))
    names = ["here", "paper", "difference"] + [AS_GAT.removeprefix(", ")] * scores.as_gat
    columns = [(NAMES[dataset], name) for dataset in scores.datasets for name in names]
    return Table(
        name=f"table{scores.number}",
        caption=f"Table {scores.number} of the paper. {scores.caption}, mean ± standard deviation (runs).",
        columns=(("", "Method"), *columns),
        rows=tuple(rows),
        notes=(
            *notes,
            f"As experiment=table{scores.number} has them, {scores.training}. What a method does otherwise than its "
            "original is told in its file of gat_pyg/baselines.",
            *_forms_notes(scores, runs),
            *_settings_notes(scores, runs),
            *_precision_notes(scores, runs),
        ),
    )


def _forms_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    """Which of a row's forms stands in it, and by how much it did better on the validation nodes."""
    rows = {key._replace(method=row_of(key.method)): None for key in runs if key.metric == scores.metric}
    for key in rows:
        its = forms(runs, key) if key.dataset in scores.datasets else []
        if len(its) > 1:
            told = ", ".join(f"{one.method} {one.val:.{_digits(key.metric) + 1}f}" for one in its)
            yield f"{key.method} on {NAMES[key.dataset]} is {its[0].method}, by the mean validation scores: {told}."


def ours_cell(runs: Runs | None, metric: str) -> Cell:
    """Our mean ± std (runs), with its lines."""
    if runs is None:
        return Cell(NONE, "no lines")
    return Cell(f"{spread(runs.mean, runs.std, metric)} ({len(runs.lines)})", source_of(runs))


def paper_cell(paper: Printed | None, metric: str) -> Cell:
    """The printed number, with its source."""
    if paper is None or math.isnan(paper.mean):
        return Cell(NONE, paper.source if paper else "not in the paper")
    return Cell(spread(paper.mean, paper.std, metric) + (f" ({paper.runs})" if paper.runs else ""), paper.source)


def difference_cell(first: float, second: float, metric: str) -> Cell:
    """The first minus the second."""
    return Cell(signed(first - second, metric), "" if math.isnan(first - second) else "the first less the second")


def _settings_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    for key, its in runs.items():
        if key.dataset in scores.datasets and key.metric == scores.metric and len(its) > 1:
            others = ", ".join(f"{one.setting or 'none'} ({len(one.lines)} runs)" for one in its[1:])
            yield (
                f"{key.method} on {NAMES[key.dataset]} has lines of several settings. The newest one's are shown, "
                f"config_hash {its[0].setting or 'none'}; the others are {others}, see the runs below."
            )


def _precision_notes(scores: Scores, runs: Gathered) -> Iterable[str]:
    """Which rows were not trained in float32, as the command adds to the device."""
    rows: dict[str, list[str]] = {}
    for key, its in runs.items():
        if key.dataset in scores.datasets and key.metric == scores.metric:
            for precision in sorted({line.result.device.rpartition(", ")[2] for line in its[0].lines}):
                if precision.endswith(("-mixed", "-true")):
                    rows.setdefault(precision, []).append(f"{key.method} on {NAMES[key.dataset]}")
    for precision, methods in rows.items():
        yield f"In {precision} precision, not in float32: {'; '.join(methods)}."


def unknown_note(ppi: Counts | None) -> str:
    """What validation on PPI leaves out."""
    if ppi is None:
        return "Nodes of PPI whose labels are all unknown are left out of training and validation."
    if not any(ppi.unknown.values()):
        return "Every node of PPI has known labels here."
    parts = [f"{ppi.unknown[split]} of the {ppi.split[split]} {word} nodes" for split, word in _WORDS.items()]
    some = [part for part in parts if not part.startswith("0 ")]
    scores = "test scores are of all test nodes" if not ppi.unknown["test"] else "so are they out of test scores"
    return f"The labels of {' and '.join(some)} of PPI are unknown here and left out; {scores}."


_WORDS = {"train": "training", "val": "validation", "test": "test"}


# Significance -------------------------------------------------------------------------------------------------------


def significance_table(runs: Gathered) -> Table:
    """GAT against the same network without attention: difference, and p by a permutation test."""
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
            "for all. So p tells about the chance of training alone, not about other splits or graphs.",
        ),
    )


def p_cell(first: Runs | None, second: Runs | None) -> Cell:
    """The p of a permutation test between the scores of two methods."""
    p = math.nan if first is None or second is None else permutation_test(first.values, second.values)
    if math.isnan(p):
        return Cell(NONE, "needs two runs of both")
    return Cell("≤ 0.0001" if p <= 1e-4 else f"{p:.4f}", "permutation test")


# The ablation -------------------------------------------------------------------------------------------------------


def ablation_table(runs: Gathered) -> Table:
    """From the paper's text to the authors' code, one switch at a time: score, difference from the text, p, seconds."""
    rows = []
    for scores in (TABLE2, TABLE3):
        for dataset in scores.datasets:
            keys = [key for key in runs if (key.dataset, key.metric) == (dataset, scores.metric)]
            switched = [key for key in keys if key.method.startswith(ABLATION)]
            if not switched:
                continue
            gat, base = (Key(method, dataset, scores.metric) for method in ("GAT", TEXT))
            for key in sorted((*switched, *[gat] * (gat in runs)), key=lambda key: key != base):  # base first
                one, first = runs[key][0], runs[base][0] if base in runs and key != base else None
                rows.append(
                    (
                        Cell(NAMES[dataset]),
                        Cell(f"GAT in Table {scores.number}" if key == gat else key.method.removeprefix(ABLATION)),
                        ours_cell(one, scores.metric),
                        difference_cell(one.mean, first.mean if first else math.nan, scores.metric),
                        p_cell(one, first),
                        _cost(one),
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
            *([] if rows else [f"There are no lines of it: their method is “{ABLATION}<switch>”."]),
        ),
    )


def _cost(runs: Runs) -> Cell:
    devices = ", ".join(dict.fromkeys(line.result.device for line in runs.lines))
    return Cell(f"{runs.seconds:.1f}", f"training alone, {devices}")


# Table 1: the data --------------------------------------------------------------------------------------------------


def data_table(counts: Mapping[str, Counts | str]) -> Table:
    """Table 1, counted in the data beside the printed one; in place of counts, why there are none."""
    rows = []
    for row, head in _HEADS.items():
        cells = [Cell(head)]
        for dataset in NAMES:
            one = counts.get(dataset, "not read")
            here = Cell(NONE, one) if isinstance(one, str) else Cell(_counts_of(one)[row], "counted in the data")
            cells += [here, Cell(_printed_counts(dataset)[row], "GAT paper")]
        rows.append(tuple(cells))
    notes = [note for dataset, one in counts.items() for note in data_notes(dataset, one)]
    return Table(
        name="table1",
        caption="Table 1 of the paper. The data sets; an edge is a pair of two different nodes.",
        columns=(("", ""), *((NAMES[dataset], name) for dataset in NAMES for name in ("here", "paper"))),
        rows=tuple(rows),
        notes=tuple(notes),
    )


_HEADS = {
    "task": "Task",
    "nodes": "# Nodes",
    "edges": "# Edges",
    "features": "# Features/Node",
    "classes": "# Classes",
    "train nodes": "# Training Nodes",
    "val nodes": "# Validation Nodes",
    "test nodes": "# Test Nodes",
}


def _counts_of(one: Counts) -> dict[str, str]:
    numbers = {"nodes": one.nodes, "edges": one.edges, "features": one.features, "classes": one.classes}
    numbers |= {f"{split} nodes": n for split, n in one.split.items()}
    numbers |= {f"{split} graphs": n for split, n in one.graphs.items()} | {"graphs": one.graphs["all"]}
    return _in_words(numbers, one.shared, one.columns == "labels")


def _printed_counts(dataset: str) -> dict[str, str]:
    rows = {row: paper for (table, row, its), paper in published().items() if (table, its) == ("1", dataset)}
    return _in_words({row: int(paper.mean) for row, paper in rows.items()}, dataset != "ppi", dataset == "ppi")


def _in_words(numbers: Mapping[str, int], shared: bool, many: bool) -> dict[str, str]:
    """The cells of a column of Table 1, by row, in the paper's words."""
    words = {row: f"{numbers[row]}" for row in ("edges", "features", "classes")}
    for split in _WORDS:
        graphs = "" if shared else f" ({numbers[f'{split} graphs']} graphs)"
        words[f"{split} nodes"] = f"{numbers[f'{split} nodes']}{graphs}"
    words["task"] = "Transductive" if shared else "Inductive"
    words["nodes"] = f"{numbers['nodes']} ({numbers['graphs']} graph{'s' if numbers['graphs'] > 1 else ''})"
    words["classes"] += " (multilabel)" if many else ""
    return words


def data_notes(dataset: str, one: Counts | str) -> list[str]:
    """The reason for each difference from the printed Table 1."""
    name = NAMES[dataset]
    if isinstance(one, str):
        return [f"{name} was not counted: {one}"]
    here, paper = _counts_of(one), _printed_counts(dataset)
    notes = [edges_note(one, int(paper["edges"]))] if here["edges"] != paper["edges"] else []
    other = [_HEADS[row] for row in here if row != "edges" and here[row] != paper[row]]
    if other:
        notes.append(f"{name}: {', '.join(other)} differ from the paper's: these are not the files that it used.")
    for split, n in one.unknown.items():
        if n:
            notes.append(f"{name}: {n} of the {_WORDS[split]} nodes have no known label in these files.")
    return notes


def edges_note(one: Counts, printed: int) -> str:
    """Why the paper's number of edges is another one."""
    name = NAMES[one.dataset]
    if one.listed == 2 * printed:
        loops = one.loops // 2
        repeated = printed - loops - one.edges
        which = [f"{repeated} links that are listed more than once"] * (repeated > 0)
        which += [f"{loops} loops of a node with itself"] * (loops > 0)
        return (
            f"{name}: the files list {one.listed} links, each in both directions, and the paper's {printed} is half of "
            f"that. It counts {' and '.join(which)}; without them {one.edges} edges are left, 2 × {one.edges} = "
            f"{2 * one.edges} directed ones."
        )
    both = f"{name}: the files list {one.listed} links: {one.edges} edges in both directions"
    if one.listed == 2 * one.edges + one.loops:
        both += f", and a loop at {one.looped} of the {one.nodes} nodes"
    if printed <= one.edges:
        return f"{both}. The paper's {printed} is no count of these files, and what makes the difference is not known."
    return (
        f"{both}. The paper's {printed} is no count of these files: it is {printed - one.edges} more than their edges, "
        f"as it would be with loops at {printed - one.edges} of the nodes. Its own files are not at hand to tell."
    )


# Where every number comes from --------------------------------------------------------------------------------------


def runs_table(runs: Gathered, lines: Sequence[Line]) -> Table:
    """Every setting of every method and data set, those that stand in no table too, with its lines."""
    files = _numbered(lines)
    rows = []
    for key, its in runs.items():
        for one in its:
            results = [line.result for line in one.lines]
            rows.append(
                (
                    Cell(key.method),
                    Cell(NAMES.get(key.dataset, key.dataset)),
                    Cell(one.setting or NONE),
                    Cell("yes" if _stands(one, key, runs) else "no"),
                    Cell(spread(one.mean, one.std, key.metric), source_of(one)),
                    Cell(ranges([result.seed for result in results])),
                    Cell(f"{statistics.fmean(result.epochs for result in results):.0f}"),
                    Cell(f"{statistics.fmean(result.best_epoch for result in results):.0f}"),
                    _cost(one),
                    Cell(", ".join(dict.fromkeys(result.device for result in results))),
                    Cell("; ".join(f"[{files[file]}] {ranges(numbers)}" for file, numbers in _places(one).items())),
                )
            )
    names = (
        "Method",
        "data set",
        "config_hash",
        "shown",
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
        ),
    )


def _warnings(runs: Gathered) -> Iterable[str]:
    """The runs whose test score a prediction has that is the same for every node."""
    for key, its in runs.items():
        for one in its:
            warnings = [line.result.warning for line in one.lines if line.result.warning]
            if warnings:
                setting = f"{key.method} on {NAMES.get(key.dataset, key.dataset)} ({one.setting or 'none'})"
                yield f"{setting}: {len(warnings)} of {len(one.lines)} runs are {warnings[0]}."


def _stands(one: Runs, key: Key, runs: Gathered) -> bool:
    """Whether runs have a place in the tables above."""
    if not any(key.dataset in scores.datasets and key.metric == scores.metric for scores in (TABLE2, TABLE3)):
        return False
    return one is (
        runs[key][0] if key.method.startswith(ABLATION) else shown(runs, key._replace(method=row_of(key.method)))
    )


def files_table(lines: Sequence[Line]) -> Table:
    """The files that were read, by the numbers that stand for them."""
    files = _numbered(lines)
    rows = [
        (Cell(f"[{n}]"), Cell(file), Cell(f"{sum(line.file == file for line in lines)}")) for file, n in files.items()
    ]
    return Table("files", "The files of results.", (("", "number"), ("", "file"), ("", "lines")), tuple(rows))


def _numbered(lines: Sequence[Line]) -> dict[str, int]:
    return {file: n for n, file in enumerate(dict.fromkeys(line.file for line in lines), start=1)}


def _places(runs: Runs) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for line in runs.lines:
        places.setdefault(line.file, []).append(line.number)
    return places


def source_of(runs: Runs) -> str:
    """The lines that a number comes from, in words."""
    places = "; ".join(f"{file}, lines {ranges(numbers)}" for file, numbers in _places(runs).items())
    return f"{places}; config_hash {runs.setting or 'none'}"


# Numbers in words ---------------------------------------------------------------------------------------------------


def spread(mean: float, std: float, metric: str) -> str:
    """Mean ± std with the digits of the metric.

    >>> spread(83.04, 0.71, ACCURACY.name), spread(0.9731, float("nan"), MICRO_F1.name)
    ('83.0 ± 0.7', '0.973')
    """
    if math.isnan(mean):
        return "NaN"
    digits = _digits(metric)
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def signed(difference: float, metric: str) -> str:
    """A difference with its sign, or a dash.

    >>> signed(0.26, ACCURACY.name), signed(-0.0031, MICRO_F1.name), signed(-0.01, ACCURACY.name)
    ('+0.3', '−0.003', '0.0')
    """
    if math.isnan(difference):
        return NONE
    text = f"{abs(difference):.{_digits(metric)}f}"
    return text if float(text) == 0 else ("+" if difference > 0 else "−") + text


def _digits(metric: str) -> int:
    return metric_named(metric).digits


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in their order, neighbours joined.

    >>> ranges([3, 1, 2, 7])
    '1–3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in parts)
