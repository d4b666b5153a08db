"""Table 1: the sizes of the data sets, counted in the data, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...data.named.citation import planetoid
from ...data.named.proteins import ppi
from ...report.tables.cells import NAMES, NONE, Cell, Table
from ...tasks.objective import SPLITS, any_known
from ...tasks.task import Task
from ..published import published


@dataclass(frozen=True)
class Counts:
    """The numbers of the paper's Table 1 for one data set; `edges` counts each pair of two different nodes once.

    >>> from gat_pyg.data import digits
    >>> counted(digits()).numbers["nodes"]
    1797
    """

    dataset: str
    numbers: dict[str, int]  # by the rows of Table 1 in `published.csv`
    unknown: dict[str, int]  # nodes without any known label, in "train", "val" and "test"


def counted(task: Task) -> Counts:
    """Count a task's graphs."""
    shared = task.shared_graph
    graphs = [data for split in SPLITS for data in task.graphs(split)] if shared is None else [shared]
    known = {split: any_known(task.labels(split)) for split in SPLITS}
    numbers = {
        "nodes": sum(data.x.size(0) for data in graphs),
        "graphs": len(graphs),
        "edges": sum(_pairs(data.edge_index) for data in graphs),
        "features": task.num_features,
        "classes": task.num_classes,
    }
    return Counts(
        dataset=task.name,
        numbers=numbers
        | {f"{split} nodes": known[split].numel() for split in SPLITS}
        | {f"{split} graphs": len(task.graphs(split)) for split in SPLITS},
        unknown={split: int((~known[split]).sum()) for split in SPLITS},
    )


def data_counts(name: str, root: Path | None) -> Counts | str:
    """Return the counts of a data set, or the reason why it cannot be counted."""
    try:
        return counted(ppi(root) if name == "ppi" else planetoid(name, root))
    except (OSError, ValueError) as error:
        return str(error)


def _pairs(edge_index: Tensor) -> int:
    """Return the number of pairs of two different nodes with an edge in either direction."""
    low, high = edge_index.long().aminmax(dim=0)
    N = int(high.max()) + 1 if high.numel() else 0
    return int((low * N + high)[low != high].unique().numel())


# The table ----------------------------------------------------------------------------------------------------------


def data_table(counts: Mapping[str, Counts | str]) -> Table:
    """Return Table 1: our counts beside the paper's; `counts` has a text with the reason if a data set has none."""
    rows = []
    for row, head in _HEADS.items():
        cells = [Cell(head)]
        for dataset in NAMES:
            one = counts.get(dataset, "not read")
            here = Cell(NONE if isinstance(one, str) else _in_words(dataset, one.numbers)[row])
            cells += [here, Cell(_in_words(dataset, _printed(dataset))[row])]
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


def _printed(dataset: str) -> dict[str, int]:
    return {row: int(paper.mean) for (table, row, its), paper in published().items() if (table, its) == ("1", dataset)}


def _in_words(dataset: str, numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the cells of a column of Table 1 by row, in the paper's wording."""
    shared = numbers["graphs"] == 1
    words = {row: f"{numbers[row]}" for row in ("edges", "features", "classes")}
    for split in _WORDS:
        graphs = "" if shared else f" ({numbers[f'{split} graphs']} graphs)"
        words[f"{split} nodes"] = f"{numbers[f'{split} nodes']}{graphs}"
    words["task"] = "Transductive" if shared else "Inductive"
    words["nodes"] = f"{numbers['nodes']} ({numbers['graphs']} graph{'' if shared else 's'})"
    words["classes"] += " (multilabel)" if dataset == "ppi" else ""
    return words


def data_notes(dataset: str, one: Counts | str) -> list[str]:
    """Return the notes that explain the differences from the paper's Table 1."""
    name = NAMES[dataset]
    if isinstance(one, str):
        return [f"{name} was not counted: {one}"]
    here, paper = _in_words(dataset, one.numbers), _in_words(dataset, _printed(dataset))
    more = int(paper["edges"]) - one.numbers["edges"]
    notes = [f"{name}: the paper has {more:+d} edges. Loops and repeated links are not counted here."] * (more != 0)
    other = [_HEADS[row] for row in here if row != "edges" and here[row] != paper[row]]
    if other:
        notes.append(f"{name}: {', '.join(other)} differ from the paper's: these are not the files that it used.")
    for split, n in one.unknown.items():
        if n:
            notes.append(f"{name}: {n} of the {_WORDS[split]} nodes have no known label in these files.")
    return notes


_WORDS = {"train": "training", "val": "validation", "test": "test"}
