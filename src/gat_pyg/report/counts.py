"""The sizes of a data set, counted in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..tasks.objective import SPLITS, any_known
from ..tasks.task import Task


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
    columns: str  # what is predicted: "classes", "labels"
    graphs: dict[str, int]  # of "all", "train", "val", "test"
    nodes: int
    edges: int
    features: int
    classes: int
    split: dict[str, int]  # nodes of "train", "val", "test"
    unknown: dict[str, int]  # of them, those without any known label
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
        listed=sum(one.size(1) for one in links),
        loops=sum(one.numel() for one in loops),
        looped=sum(one.unique().numel() for one in loops),
    )


def _pairs(edge_index: Tensor) -> int:
    """Return the number of pairs of two different nodes with an edge in either direction."""
    low, high = edge_index.long().aminmax(dim=0)
    N = int(high.max()) + 1 if high.numel() else 0
    return int((low * N + high)[low != high].unique().numel())
