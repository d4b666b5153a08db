"""What a data set holds, counted in the data itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.checks import SPLITS, Split, any_known
from ..tasks.task import Task


@dataclass(frozen=True)
class Counts:
    """The numbers of the paper's Table 1 for one data set, and what explains them.

    ``listed`` and ``loops`` are of the files' lists, where a link stands once for each direction and as often as it is
    repeated; ``edges`` are pairs of two different nodes, each once.

    >>> from gat_pyg.data import digits
    >>> counted(digits(), []).nodes
    1797
    """

    dataset: str
    transductive: bool
    multilabel: bool
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
    """Count a task, and the ``links`` [2, L] that its files list."""
    graphs = task.graphs("train") if task.transductive else [data for split in SPLITS for data in task.graphs(split)]
    sizes: dict[str, int] = {split: len(task.graphs(split)) for split in SPLITS}
    masks = {split: torch.cat([_of(task, data, split) for data in task.graphs(split)]) for split in SPLITS}
    known = {split: torch.cat([any_known(data.y) for data in task.graphs(split)]) for split in SPLITS}
    loops = [src[src == dst] for src, dst in links]
    return Counts(
        dataset=task.name,
        transductive=task.transductive,
        multilabel=task.multilabel,
        graphs={"all": len(graphs), **sizes},
        nodes=sum(data.x.size(0) for data in graphs),
        edges=sum(_pairs(data.edge_index) for data in graphs),
        features=task.num_features,
        classes=task.num_classes,
        split={split: int(masks[split].sum()) for split in SPLITS},
        unknown={split: int((masks[split] & ~known[split]).sum()) for split in SPLITS},
        listed=sum(one.size(1) for one in links),
        loops=sum(one.numel() for one in loops),
        looped=sum(one.unique().numel() for one in loops),
    )


def _of(task: Task, data: Data, split: Split) -> Tensor:
    mask: Tensor = data[f"{split}_mask"] if task.transductive else torch.ones(data.x.size(0), dtype=torch.bool)
    return mask


def _pairs(edge_index: Tensor) -> int:
    """How many pairs of two different nodes have an edge, in whichever direction."""
    low, high = edge_index.long().aminmax(dim=0)
    N = int(high.max()) + 1 if high.numel() else 0
    return int((low * N + high)[low != high].unique().numel())
