"""Splits of nodes and graphs into training, validation and test."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from ..files import needs
from ..tasks.nodes import check_disjoint
from ..tasks.objective import MASKS, SPLITS, Objective, any_known
from ..tasks.task import Task

VAL, TEST = 500, 1000  # nodes that the command draws by default from a data set of PyG, as in the paper
PARTS = {"train_mask": 3, "val_mask": 1, "test_mask": 1}  # fifths: the default split of one's own data
OGB_PARTS = ("train", "valid", "test")  # the splits' names in data sets of OGB


def chosen_mask(mask: Any, split: int, count: int, items: str, key: str, name: str) -> Tensor:
    """Return a mask `[n]` bool, column `split` of `[n, S]`.

    Raises:
        ValueError: if it has no such column, or is not a bool, 0 or 1 for each of the n = `count` items.
    """
    mask = torch.as_tensor(mask)
    if mask.dim() == 2:
        if not 0 <= split < mask.size(1):
            raise ValueError(f"{name}: {key} has {mask.size(1)} columns, split={split} is none of them.")
        mask = mask[:, split]
    if tuple(mask.shape) != (count,) or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{name}: {key} is {mask.dtype} of shape {tuple(mask.shape)}, expected a bool, 0 or 1 for each of the "
            f"{count} {items}. Are these {items[:-1]} numbers? Use torch_geometric.utils.index_to_mask."
        )
    chosen: Tensor = mask.bool()
    return chosen


def draw_masks(
    data: Data, objective: Objective, per_class: int | None, val: int | None, test: int | None, seed: int, name: str
) -> tuple[str, ...]:
    """Draw the missing masks of a graph, and return the names of the arguments that they depend on."""
    arguments = {"train_mask": ["per_class"] * objective.by_class, "val_mask": ["val"], "test_mask": ["test"]}
    missing = [key for key in MASKS if key not in data]
    if objective.item == "edge":
        _draw_links(data, val, test, seed, name)
    else:
        train = per_class * objective.out_channels if per_class is not None and objective.by_class else None
        _draw(data, train, val, test, seed, name)
    return (*chain(*(arguments[key] for key in missing)), "seed") if missing else ()


def _draw(
    data: Data, train: int | None, val: int | None, test: int | None, seed: int, name: str, items: str = "nodes"
) -> None:
    """Draw the missing masks among the labelled nodes that are in no other mask.

    For training, `train` nodes are drawn, the same number of each class; if None, all that are left for it. `val` and
    `test` are by default a fifth each, or as large a share of the missing masks.
    """
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    free, per_class = any_known(data.y), train is not None
    for key in MASKS:
        if key in data:
            free &= ~data[key]
    number, missing = int(free.sum()), [key for key in MASKS if key not in data]
    share = number // max(sum(PARTS[key] for key in missing), 1)
    val, test = (max(share, 1) if size is None else size for size in (val, test))
    if train is None:
        others = sum(size for key, size in zip(MASKS[1:], (val, test), strict=True) if key in missing)
        train = max(number - others, 1)
    parts = [size for key, size in zip(MASKS, (train, val, test), strict=True) if key in missing]
    if not per_class and sum(parts) == number:
        order = with_every_class(order[free[order]], data.y, parts)
    for key, size in zip(MASKS, (train, val, test), strict=True):
        if key not in missing:
            continue
        order = order[free[order]]
        if key == "train_mask" and data.y.dim() == 1 and per_class:
            K = int(data.y.max()) + 1
            size = train // K
            labels = [order[data.y[order] == label][:size] for label in range(K)]
            few = [f"{label} ({len(members)})" for label, members in enumerate(labels) if len(members) != size]
            if few:
                hint = "Number the classes from 0" if not len(labels[0]) else "Choose a smaller per_class"
                raise ValueError(
                    f"{name}: per_class={size} needs more labelled nodes than there are in class "
                    f"{', '.join(few[:5])}. {hint} (split.per_class in the command), or give train_mask. For "
                    "a regression choose task=node_regression."
                )
            nodes = torch.cat(labels)
        else:
            nodes = order[:size]
            if len(nodes) != size:
                sizes = [*["per_class"] * per_class, "val", "test"]
                sizes = [size for size in sizes if f"{size.replace('per_class', 'train')}_mask" in missing]
                raise ValueError(
                    f"{name}: {key} needs {size} {items}, but only {len(nodes)} labelled ones are left. "
                    f"Choose smaller {' and '.join(sizes)} (split.* in the command), or give {key}."
                )
        data[key] = torch.zeros_like(free)
        data[key][nodes] = True
        free[nodes] = False


def with_every_class(order: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a random order of rows in which the parts of these sizes have every class, as far as that is possible.

    It is `order` if all parts have all classes, or labels are no classes. Otherwise a rare class is missing by chance,
    and the parts are stratified: the members of each class, in their order, are at equal distances.

    Args:
        order: indices of rows [n].
        y: the labels of all rows.
        sizes: sizes of the parts, n in all.

    Example:
        >>> with_every_class(torch.arange(9), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1]), [3, 3, 3])
        tensor([0, 6, 1, 2, 7, 3, 4, 8, 5])
    """
    if y.dim() != 1 or y.is_floating_point():
        return order
    _, y, counts = y[order].unique(return_inverse=True, return_counts=True)
    if all(len(part.unique()) == len(counts) for part in y.split([*sizes])):
        return order
    by_class = y.argsort(stable=True)
    rank = torch.empty_like(order)  # of each row in its class
    rank[by_class] = torch.arange(len(y)) - (counts.cumsum(0) - counts)[y[by_class]]
    return order[((rank + 0.5) / counts[y]).argsort(stable=True)]


def _draw_links(data: Data, val: int | None, test: int | None, seed: int, name: str) -> None:
    """Draw the missing masks of labelled edges; both directions of a link are in the same split.

    The numbers `val` and `test` are of links, by default a fifth of them each; all others are for training.
    """
    low, high = data.edge_label_index.aminmax(dim=0)
    _, link = torch.stack([low, high]).unique(dim=1, return_inverse=True)
    size = int(link.max()) + 1 if link.numel() else 0
    known = any_known(data.y)
    labels = data.y[known] if data.y.dim() == 1 else torch.zeros_like(link[known])
    links = Data(y=torch.full((size,), -1).index_put_((link[known],), labels))
    for key in MASKS:
        if key in data:
            links[key] = torch.zeros(size, dtype=torch.bool).index_fill_(0, link[data[key]], True)
    _draw(links, None, val, test, seed, name, "links")
    for key in MASKS:
        if key not in data:
            data[key] = links[key][link] & any_known(data.y)


def draw_graphs(graphs: list[Data], val: int | None, test: int | None, seed: int | None, name: str) -> list[list[Data]]:
    """Draw graphs for validation and test, by default a fifth each; the others, in their order, are for training.

    If `seed` is None, the graphs are steps in time: the last ones are for the test, those before it for validation.

    Raises:
        ValueError: if a split would be empty.
    """
    val, test = (max(len(graphs) // sum(PARTS.values()), 1) if size is None else size for size in (val, test))
    if val + test >= len(graphs) or min(val, test) < 1:
        raise ValueError(
            f"{name}: val={val} and test={test} must be at least 1 and together less than the number of graphs, which "
            f"is {len(graphs)}: at least one graph is for training. Choose val and test (split.* in the command) as "
            "numbers of graphs, or give three sets."
        )
    if seed is None:
        train = len(graphs) - val - test
        return [graphs[:train], graphs[train : train + val], graphs[train + val :]]
    drawn = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed))
    labels = [data.y.flatten() for data in graphs]
    if all(y.shape == (1,) for y in labels):
        drawn = with_every_class(drawn, torch.cat(labels), [val, test, len(graphs) - val - test])
    order = drawn.tolist()
    splits = order[val + test :], order[:val], order[val : val + test]
    return [[graphs[i] for i in sorted(split)] for split in splits]


def fold_graphs(
    graphs: list[Data], folds: int | str | Path, fold: int, seed: int, name: str
) -> tuple[list[list[Data]], int]:
    """Return the graphs of each split of one fold, and the number of folds: stratified ones, or those of a file.

    Raises:
        ValueError: if there is no such fold, or the graphs cannot be divided into so many.
    """
    if isinstance(folds, int):
        index, number = _stratified(graphs, folds, fold, seed, name), folds
    else:
        in_file = read_folds(folds, len(graphs), name)
        if not 0 <= fold < len(in_file):
            raise ValueError(f"{name}: fold={fold} (split.fold), but {folds} has {len(in_file)} folds, from 0.")
        index, number = in_file[fold], len(in_file)
    return [[graphs[i] for i in sorted(part)] for part in index], number


def _stratified(graphs: list[Data], folds: int, fold: int, seed: int, name: str) -> list[list[int]]:
    """Divide graphs into stratified folds: `fold` is the test, the next one the validation, the others the training."""
    y = torch.cat([data.y.flatten() for data in graphs])
    if any(data.y.shape != (1,) for data in graphs) or not 3 <= folds <= len(graphs) or not 0 <= fold < folds:
        raise ValueError(
            f"{name}: folds={folds} and fold={fold} (split.* in the command), expected from 3 folds to as many as the "
            f"{len(graphs)} graphs, a fold from 0 to one less, and one label per graph."
        )
    stratified = needs("sklearn.model_selection", "baselines").StratifiedKFold(folds, shuffle=True, random_state=seed)
    parts = [test for _, test in stratified.split(y, y)]
    test, val, *train = (parts[(fold + offset) % folds].tolist() for offset in range(folds))
    return [list(chain(*train)), val, test]


def read_folds(path: str | Path, count: int, name: str) -> list[list[list[int]]]:
    """Read a file of folds, in the format of Errica et al. (2020): for each the indices of its three splits.

    The file is a JSON list with `{"test": [...], "model_selection": [{"train": [...], "validation": [...]}]}` for each
    fold, with indices of graphs. Only the first `model_selection` is read.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: unless the splits of each fold, and the test splits of all folds, partition the `count` graphs.
    """
    path = Path(path).expanduser()
    where = f"{name}: folds={path}"
    if not path.is_file():
        raise FileNotFoundError(
            f"{where} is not a file, expected one of folds. Those of Errica et al. (2020) are in data_splits of "
            "https://github.com/diningphil/gnn-comparison: copy them there. Or choose a number of stratified folds, as "
            "in split.folds=10."
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read, expected a JSON list of folds: {error}.") from error
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where} is not a list, expected a JSON list of folds.")
    folds = [_parts_of(fold, count, f"{where}, fold {number}") for number, fold in enumerate(content)]
    _check_partition([*chain(*(test for *_, test in folds))], count, f"{where}, all tests")
    return folds


def _parts_of(fold: Any, count: int, where: str) -> list[list[int]]:
    """Return the training, validation and test indices of a fold."""
    try:
        first = fold["model_selection"][0]
        parts = [[*first["train"]], [*first["validation"]], [*fold["test"]]]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{where}: expected test, and train and validation in model_selection[0].") from error
    _check_partition([*chain(*parts)], count, where)
    return parts


def _check_partition(indices: list[Any], count: int, where: str) -> None:
    """Raise ValueError unless each of `count` graphs is there once."""
    if wrong := [index for index in indices if type(index) is not int or not 0 <= index < count]:
        raise ValueError(f"{where} holds {wrong[0]!r}, expected indices of graphs from 0 to {count - 1}.")
    times = Counter(indices)
    if wrong := [index for index in range(count) if times[index] != 1]:
        raise ValueError(f"{where}: graph {wrong[0]} is there {times[wrong[0]]} times, expected once.")


def read_split(path: str | Path, count: int, name: str) -> dict[str, Tensor]:
    """Read a split of `count` nodes as masks: a `.npz` file with the ids in `train`, `val` (or `valid`) and `test`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has other content, or a node is in two splits or out of range.
    """
    where = f"{name}: split.file={path}"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            parts = {key: arrays["valid" if key == "val" and "val" not in arrays else key] for key in SPLITS}
    except (ValueError, LookupError, EOFError, AttributeError, BadZipFile) as error:
        raise ValueError(
            f"{where} cannot be read, expected an .npz file with arrays train, val (or valid) and test: {error}."
        ) from error
    for part, ids in parts.items():
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ((ids >= 0) & (ids < count)).all():
            raise ValueError(f"{where}: {part} is not an array of node ids, expected integers from 0 to {count - 1}.")
    ids, times = np.unique(np.concatenate([*parts.values()]), return_counts=True)
    if (times > 1).any():
        raise ValueError(f"{where}: node {ids[times > 1][0]} is listed twice, expected each node in one split at most.")
    return masks_of([torch.from_numpy(parts[split].astype(np.int64)) for split in SPLITS], count)


def masked_graphs(graphs: list[Data], split: int, name: str) -> tuple[list[Tensor], int] | None:
    """Return the indices of the graphs of each split by their masks `[1]` or `[1, S]`, and S; None without masks.

    Raises:
        ValueError: if a graph lacks a mask, a mask is of nodes, or a graph is in two splits.
    """
    present = {key: [key in data for data in graphs] for key in MASKS}
    if not any(map(any, present.values())):
        return None
    if missing := [key for key in MASKS if not all(present[key])]:
        graph = f"graph {present[missing[0]].index(False)}: " if any(present[missing[0]]) else ""
        raise ValueError(
            f"{name}: {graph}{missing[0]} is missing, expected all three masks of the graphs, or none in any graph."
        )
    masks = Data()
    for key in MASKS:
        rows = [torch.as_tensor(data[key]) for data in graphs]
        rows = [row if row.dim() else row[None] for row in rows]
        if wrong := [number for number, row in enumerate(rows) if len(row) != 1]:
            raise ValueError(
                f"{name}, graph {wrong[0]}: {key} has shape {tuple(rows[wrong[0]].shape)}, expected (1,): of "
                "several graphs, each is in one split. Leave out the masks for a random split."
            )
        if other := next((number for number, row in enumerate(rows) if row.shape != rows[0].shape), 0):
            raise ValueError(
                f"{name}: {key} has {rows[0].dim()} axes in graph 0 and {rows[other].dim()} in graph {other}, expected "
                f"the same shape: {tuple(rows[0].shape)}."
            )
        masks[key] = torch.cat(rows)
    count = num_splits(masks, name)
    parts = [chosen_mask(masks[key], split, len(graphs), "graphs", key, name) for key in MASKS]
    check_disjoint(dict(zip(MASKS, parts, strict=True)), "graphs", name)
    return [part.nonzero().flatten() for part in parts], count


def num_splits(data: Data, name: str) -> int:
    """Return the number of splits of a graph: the columns of its masks.

    Raises:
        ValueError: if the masks have different numbers of columns.
    """
    columns = {key: data[key].size(1) for key in MASKS if getattr(data.get(key), "ndim", 0) == 2}
    if len(set(columns.values())) > 1:
        listed = ", ".join(f"{count} in {key}" for key, count in columns.items())
        raise ValueError(f"{name}: the masks have different numbers of columns: {listed}. Give one for each split.")
    return next(iter(columns.values()), 1)


def parts_of_ogb(dataset: Any) -> list[Tensor] | None:
    """Return the numbers of the rows of each split of a data set of OGB, None for another one."""
    index = dataset.get_idx_split() if hasattr(dataset, "get_idx_split") else None
    return None if index is None else [index[part] for part in OGB_PARTS]


def check_classes(task: Task) -> None:
    """Raise ValueError if a class of the validation or the test has no training label: it cannot be learnt."""
    if task.objective.columns != "classes":
        return
    train, *asked = (task.labels(split) for split in SPLITS)
    known = torch.cat(asked).unique()
    absent = known[(known >= 0) & ~torch.isin(known, train)].tolist()
    if absent:
        names, item = task.class_names or range(task.num_classes), task.objective.item
        raise ValueError(
            f"{task.name}: the validation or the test has {item}s of class "
            f"{', '.join(str(names[label]) for label in absent[:5])}, the training has none. Choose another split "
            f"(split.* in the command), make their labels unknown, or choose task={item}_regression if these are "
            "numbers to predict."
        )


def masks_of(parts: Sequence[Tensor], count: int) -> dict[str, Tensor]:
    """Return the masks `[count]` of the training, validation and test rows, which are given by their numbers."""
    return {key: index_to_mask(rows.long(), count) for key, rows in zip(MASKS, parts, strict=True)}


def split_by_group(groups: Sequence[Hashable], val: int, test: int) -> list[list[int]]:
    """Return the rows of training, validation and test, of which no two have a row of the same group.

    The largest groups come first, of equal ones that with the later first row. A group is for training if it fits into
    all but `val` and `test` rows, else for validation if it fits into all but `test`, else for the test, as in DeepChem
    (Ramsundar et al., 2019) and OGB (Hu et al., 2020); but the largest group is always for training. So the sizes may
    differ from `val` and `test`.

    Example:
        >>> split_by_group(["a", "b", "a", "c", "a", "b"], val=2, test=1)
        [[0, 2, 4], [1, 5], [3]]
    """
    rows_of = defaultdict(list)
    for row, group in enumerate(groups):
        rows_of[group].append(row)
    train: list[int] = []
    others: list[list[int]] = [[], []]
    for rows in sorted(rows_of.values(), key=lambda rows: (len(rows), rows[0]), reverse=True):
        if not train or len(train) + len(rows) <= len(groups) - val - test:
            train += rows
        else:
            fits = len(train) + len(others[0]) + len(rows) <= len(groups) - test
            others[not fits] += rows
    return [sorted(part) for part in (train, *others)]


def masks_by_group(groups: Sequence[Hashable], val: int | None, test: int | None, name: str) -> dict[str, Tensor]:
    """Return the masks `[n]` of `split_by_group`; validation and test are by default a fifth each."""
    val, test = (len(groups) // 5 if size is None else size for size in (val, test))
    parts = split_by_group(groups, val, test)
    if not all(parts):
        sizes = " / ".join(str(len(part)) for part in parts)
        raise ValueError(
            f"{name}: split.scaffold gives {sizes} molecules for training, validation and test, since "
            f"{max(Counter(groups).values())} of {len(groups)} have the same scaffold. Choose other split.val and "
            "split.test, or split.scaffold=false."
        )
    return masks_of([torch.tensor(part) for part in parts], len(groups))
