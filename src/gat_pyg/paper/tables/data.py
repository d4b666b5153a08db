"""Table 1: the sizes of the data sets, counted in the data, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...data.named.citation import planetoid
from ...data.named.proteins import listed_links, ppi
from ...report.tables.cells import NAMES, NONE, Cell, Table
from ...tasks.objective import SPLITS, any_known
from ...tasks.task import Task
from ..published import published


@dataclass(frozen=True)
class Counts:
    """The numbers of the paper's Table 1 for one data set, and further ones that explain differences.

    `listed` and `loops` count the entries in the files, where a link has an entry for each direction and repetition;
    `edges` counts each pair of two different nodes once.

    >>> from gat_pyg.data import digits
    >>> counted(digits(), []).nodes
    1797
    """

    dataset: str
    shared: bool  # if true, all splits share one graph
    columns: str  # the noun for the columns of the output: "classes", "labels"
    graphs: dict[str, int]  # in "all", "train", "val", "test"
    nodes: int
    edges: int
    features: int
    classes: int
    split: dict[str, int]  # nodes of "train", "val", "test"
    unknown: dict[str, int]  # nodes without any known label, by the same names
    listed: int
    loops: int
    looped: int  # nodes with a loop


def counted(task: Task, links: Sequence[Tensor]) -> Counts:
    """Count a task's graphs, and the `links` [2, L] in its files."""
    shared = task.shared_graph
    graphs = [data for split in SPLITS for data in task.graphs(split)] if shared is None else [shared]
    sizes: dict[str, int] = {split: len(task.graphs(split)) for split in SPLITS}
    known = {split: any_known(task.labels(split)) for split in SPLITS}
    loops = [src[src == dst] for src, dst in links]
    return Counts(
        dataset=task.name,
        shared=shared is not None,
        columns=task.objective.columns,
        graphs={"all": len(graphs), **sizes},
        nodes=sum(data.x.size(0) for data in graphs),
        edges=sum(_pairs(data.edge_index) for data in graphs),
        features=task.num_features,
        classes=task.num_classes,
        split={split: known[split].numel() for split in SPLITS},
        unknown={split: int((~known[split]).sum()) for split in SPLITS},
        listed=sum(pairs.size(1) for pairs in links),
        loops=sum(nodes.numel() for nodes in loops),
        looped=sum(nodes.unique().numel() for nodes in loops),
    )


def data_counts(name: str, root: Path | None) -> Counts | str:
    """Return the counts of a data set, or the reason why it cannot be counted."""
    try:
        task = ppi(root) if name == "ppi" else planetoid(name, root)
        return counted(task, listed_links(name, root))
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
    """Return the cells of a column of Table 1 by row, in the paper's wording."""
    words = {row: f"{numbers[row]}" for row in ("edges", "features", "classes")}
    for split in _WORDS:
        graphs = "" if shared else f" ({numbers[f'{split} graphs']} graphs)"
        words[f"{split} nodes"] = f"{numbers[f'{split} nodes']}{graphs}"
    words["task"] = "Transductive" if shared else "Inductive"
    words["nodes"] = f"{numbers['nodes']} ({numbers['graphs']} graph{'s' if numbers['graphs'] > 1 else ''})"
    words["classes"] += " (multilabel)" if many else ""
    return words


def data_notes(dataset: str, one: Counts | str) -> list[str]:
    """Return the notes that explain the differences from the paper's Table 1."""
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
    """Return the note that explains the paper's different number of edges."""
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
        f"as it would be with loops at {printed - one.edges} of the nodes. Its own files are not available for a check."
    )


def unknown_note(ppi: Counts | None) -> str:
    """Return the note on the nodes of PPI that have no known label."""
    if ppi is None:
        return "Nodes of PPI whose labels are all unknown are left out of training and validation."
    if not any(ppi.unknown.values()):
        return "Every node of PPI has known labels here."
    parts = [f"{ppi.unknown[split]} of the {ppi.split[split]} {word} nodes" for split, word in _WORDS.items()]
    some = [part for part in parts if not part.startswith("0 ")]
    scores = "test scores are of all test nodes" if not ppi.unknown["test"] else "so are they out of test scores"
    return f"The labels of {' and '.join(some)} of PPI are unknown here and left out; {scores}."


_WORDS = {"train": "training", "val": "validation", "test": "test"}
