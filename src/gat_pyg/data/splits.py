"""Splits of nodes and graphs into training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.objective import MASKS, SPLITS, any_known
from ..tasks.task import Task


def _draw_masks(data: Data, train: int | None, val: int, test: int, seed: int, name: str, items: str = "nodes") -> None:
    """Draw the missing masks among the labelled nodes that are in no other mask.

    For training, `train` nodes are drawn, the same number of each class; if None, all that are left for it.
    """
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    free, per_class = any_known(data.y), train is not None
    for key in MASKS:
        if key in data:
            free &= ~data[key]
    if train is None:
        others = sum(size for key, size in zip(MASKS[1:], (val, test), strict=True) if key not in data)
        train = max(int(free.sum()) - others, 1)
    for key, size in zip(MASKS, (train, val, test), strict=True):
        if key in data:
            continue
        order = order[free[order]]
        if key == "train_mask" and data.y.dim() == 1 and per_class:
            K = int(data.y.max()) + 1
            size = train // K
            labels = [order[data.y[order] == label][:size] for label in range(K)]
            few = [f"{label} ({len(members)})" for label, members in enumerate(labels) if len(members) != size]
            if few:
                raise ValueError(
                    f"{name}: per_class={size} needs more labelled nodes than there are in class "
                    f"{', '.join(few[:5])}. Choose a smaller per_class (split.per_class in the command), or give "
                    "train_mask."
                )
            nodes = torch.cat(labels)
        else:
            nodes = order[:size]
            if len(nodes) != size:
                raise ValueError(
                    f"{name}: {key} needs {size} {items}, but only {len(nodes)} labelled ones are left. "
                    f"Choose smaller per_class, val and test (split.* in the command), or give {key}."
                )
        data[key] = torch.zeros_like(free)
        data[key][nodes] = True
        free[nodes] = False


def _draw_links(data: Data, val: int, test: int, seed: int, name: str) -> None:
    """Draw the missing masks of labelled edges; both directions of a link are in the same split.

    The numbers `val` and `test` are of links; all others are for training.
    """
    low, high = data.edge_label_index.aminmax(dim=0)
    _, link = torch.stack([low, high]).unique(dim=1, return_inverse=True)
    size = int(link.max()) + 1 if link.numel() else 0
    links = Data(y=torch.full((size,), -1).index_fill_(0, link[any_known(data.y)], 0))
    for key in MASKS:
        if key in data:
            links[key] = torch.zeros(size, dtype=torch.bool).index_fill_(0, link[data[key]], True)
    _draw_masks(links, None, val, test, seed, name, "links")
    for key in MASKS:
        if key not in data:
            data[key] = links[key][link] & any_known(data.y)


def _draw_graphs(graphs: list[Data], val: int, test: int, seed: int, name: str) -> list[list[Data]]:
    """Draw graphs for validation and test; the others, in their order, are for training."""
    if val + test >= len(graphs) or min(val, test) < 1:
        raise ValueError(
            f"{name} has {len(graphs)} graphs, of which val={val} and test={test} are to be drawn and at least one be "
            "left for training. Choose val and test (split.* in the command) as numbers of graphs, or give three sets."
        )
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    splits = order[val + test :], order[:val], order[val : val + test]
    return [[graphs[i] for i in sorted(split)] for split in splits]


def _fold_graphs(graphs: list[Data], folds: int, fold: int, seed: int, name: str) -> list[list[Data]]:
    """Divide graphs into stratified folds: `fold` is the test, the next one the validation, the others the training."""
    y = torch.cat([data.y.flatten() for data in graphs])
    if any(data.y.shape != (1,) for data in graphs) or not 3 <= folds <= len(graphs) or not 0 <= fold < folds:
        raise ValueError(
            f"{name}: folds={folds} and fold={fold} (split.* in the command), expected from 3 folds to as many as the "
            f"{len(graphs)} graphs, a fold from 0 to one less, and one label per graph."
        )
    try:
        from sklearn.model_selection import StratifiedKFold
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name}: stratified folds need scikit-learn, which is not installed. Run: python -m pip install "
            "scikit-learn. Or choose split.folds=null, and split.val and split.test as numbers of graphs."
        ) from error
    parts = [test for _, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(y, y)]
    offset = torch.empty(len(graphs), dtype=torch.long)  # from `fold` to the fold of each graph
    for number, index in enumerate(parts):
        offset[index] = (number - fold) % folds
    split = offset.clamp(max=2).tolist()  # 2 training, 1 validation, 0 test
    return [[data for data, its in zip(graphs, split, strict=True) if its == number] for number in (2, 1, 0)]


def _ogb_graphs(graphs: list[Data], index: Mapping[str, Tensor]) -> list[list[Data]]:
    """Return the graphs of each split of a data set of OGB."""
    return [[graphs[i] for i in index[part].tolist()] for part in ("train", "valid", "test")]


def check_classes(task: Task) -> None:
    """Raise ValueError if a class of the validation or the test has no training label: it cannot be learnt."""
    if task.objective.columns != "classes":
        return
    train, *asked = (task.labels(split) for split in SPLITS)
    known = torch.cat(asked).unique()
    absent = known[(known >= 0) & ~torch.isin(known, train)].tolist()
    if absent:
        raise ValueError(
            f"{task.name}: the validation or the test has {task.objective.item}s of class "
            f"{', '.join(map(str, absent[:5]))}, the training has none. Choose another split (split.* in the "
            "command), or set their labels to -1."
        )


def _ogb_masks(data: Data, index: Mapping[str, Tensor]) -> None:
    """Add the split of a data set of OGB as masks."""
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        data[key] = torch.zeros(len(data.y), dtype=torch.bool).index_fill_(0, index[part], True) & any_known(data.y)
