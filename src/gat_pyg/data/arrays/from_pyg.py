"""Tasks from users' own data: graphs in files, and any PyG data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from ...tasks.checks import check_graph
from ...tasks.metrics import LINKS
from ...tasks.objective import MASKS, SPLITS, any_known
from ...tasks.objectives import TASKS
from ...tasks.preparation import UNDIRECTED
from ...tasks.task import Task
from ..links import link_task
from ..reader import Reader, Rows
from ..splits import (
    check_classes,
    draw_graphs,
    draw_masks,
    fold_graphs,
    masked_graphs,
    masks_of,
    num_splits,
    parts_of_ogb,
)
from ..tables.programs import as_coo
from .batched_graphs import graphs_of
from .detection import check_kind, graph_names, labelled, objective_class, plain, tidy, warn_if_rounded
from .formats import as_tensor, graphs_in, read
from .keys import UNION, warn_of_unread
from .series import graphs_of_series, is_series, the_graph

# One's own graphs ---------------------------------------------------------------------------------------------------


def from_file(
    path: str | Path,
    per_class: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    split: int = 0,
    folds: int | str | Path | None = None,
    fold: int = 0,
    task: str | None = None,
    disjoint: float = 0.0,
    negatives: str = "auto",
    undirected: bool = False,
) -> Task:
    """Read a graph, or several, from a `.pt` file (torch.save), a `.npz` file (numpy.savez) or a folder (numpy.save).

    A `.pt` file holds a PyG `Data`, a `Batch`, a dict of tensors, lists of these, a split as a mapping of train, val,
    test or as three lists, or the `processed/data.pt` of an `InMemoryDataset`; a `.npz` file holds arrays; a folder
    holds one `.npy` file per array, such as `x.npy`. The keys are `x` [N, F], `edge_index` [2, E], `y` [N] or [N, K],
    and optionally `edge_attr` [E] or [E, D] and `train_mask`, `val_mask`, `test_mask` [N]; for edge labels
    `edge_label`, `edge_label_index` and `edge_label_attr`. A warning lists other keys with numbers, which are not read.
    Splits are as in `from_dataset`.

    Arrays with `batch` [N], the graph of each node, or `ptr` [G + 1] are those of G graphs, as in a `Batch` of PyG:
    edges hold node ids of all graphs, `y` has a row for each graph, node or edge, and the masks [G] are of graphs
    (`gat_pyg.data.arrays.batched_graphs.graphs_of`).

    The files of a folder are memory-mapped. So with `loader=neighbor` the features may exceed the memory, and processes
    on one machine share them. The files must not change meanwhile. An x of another dtype than torch's default is
    converted in memory.

    No code in the file is run: `.pt` is read with `weights_only=True`, and beside PyG's `Data` only stand-ins are
    allowed, which store numbers and call nothing; `.npz` with `allow_pickle=False`.

    Args:
        path: the file or folder.
        per_class: training nodes of each class, if there are no masks.
        val: validation nodes, graphs or edges in all.
        test: test nodes, graphs or edges in all.
        seed: the random seed of the split.
        split: the column of masks with several.
        folds: the number of stratified folds of graphs, or a file of folds.
        fold: the fold for the test; the next one is for validation.
        task: such as "node_regression" or "link_prediction"; by default what the labels show.
        disjoint: of link prediction, the share of training links that are predicted and pass no messages.
        negatives: of link prediction, how pairs without a link are drawn, as in `LinkLabels`.
        undirected: if true, messages pass over each edge in both directions. Edges between the same nodes are merged,
            with the mean of their features, here and in later data.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that is truncated, would run code or lacks a key.

    >>> import tempfile
    >>> import numpy as np
    >>> path = Path(tempfile.mkdtemp()) / "ring.npz"
    >>> np.savez(path, x=np.eye(6), y=[0, 1] * 3, edge_index=[[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> from_file(path, per_class=1, val=2, test=2)
    Task(name='ring', num_features=6, objective=NodeLabels(out_channels=2), edge_dim=None)
    """
    path, content = read(path)
    try:
        graphs = graphs_in(content, path, task != LINKS)
        options: dict[str, Any] = {"task": task, "disjoint": disjoint, "negatives": negatives}
        result = from_dataset(graphs, path.stem, per_class, val, test, seed, split, folds, fold, **options)
        check_classes(result)
        if undirected and result.objective.has_pairs:
            raise ValueError(
                f"{path.stem}: undirected=True is for labels of nodes and graphs, not of {result.objective.item}s. "
                "Leave it out, and save each edge in both directions."
            )
        if undirected:
            result = result.transformed({**UNDIRECTED, "reduce": "mean"})
        return result.read_from({"_target_": "gat_pyg.data.from_file", "path": str(path)})
    except ValueError as error:
        raise ValueError(f"{path}{str(error).removeprefix(path.stem)}") from error


def from_dataset(
    dataset: Any,
    name: str | None = None,
    per_class: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    split: int = 0,
    folds: int | str | Path | None = None,
    fold: int = 0,
    transforms: Sequence[Mapping[str, Any]] = (),
    task: str | None = None,
    disjoint: float = 0.0,
    negatives: str = "auto",
) -> Task:
    """Convert any PyG data set with labels of nodes, edges or graphs: one graph, several graphs, or three data sets.

    `dataset` is a `Data`, a PyG `Dataset`, a list of `Data` or any data set with a length and items, or three of these,
    as a mapping of train, val, test or as a sequence. A `Batch`, or a `Data` with `batch` or `ptr`, is its graphs. The
    masks of a single graph are kept; of masks [N, S], column `split` is used. Missing masks are drawn with `seed` among
    the labelled nodes: `per_class` nodes of each class for training (`per_class` times K nodes if there are many labels
    per node), then `val` and `test` nodes. In a regression, all other nodes are for training.

    Several graphs are split by their masks [1] or [1, S], or by the data set's `get_idx_split` if it has one, as those
    of OGB. Else `val` and `test` graphs are drawn, and the others are for training. If every graph has one label, and
    some graph has several nodes, these are graph labels. With `folds`, such graphs are divided into stratified folds:
    number `fold` is for the test, the next one for validation, the others for training. Or `folds` is the path of a
    file of folds, in the format of Errica et al. (`gat_pyg.data.splits.read_folds`). Other data cannot be divided into
    folds.

    With x [T, N, F], the graph is a series of T steps with the same edges, each a graph (`graphs_of_series`): `y` is
    [T, N] or [T, N, K] for nodes, [T] or [T, K] for steps. The first steps are for training, the next `val` for
    validation and the last `test` for the test, 20 % each by default. Masks [T] of the steps are kept.

    Labels of edges are `edge_label` [M] or [M, K] of the pairs `edge_label_index` [2, M], by default `edge_index`, or
    `y` [E] if E is not N. They are read if there is no `y`, or by `task`. The features of labelled edges become
    `edge_label_attr` [M, D], for the decoder. Missing masks [M] of a single graph are drawn: `val` and `test` links,
    20 % each by default, both directions of a link together, and the others for training.

    A single graph without `x` gets the ids of its nodes as `x` [N, 1], which `gat_pyg.models.Encoded` embeds.

    With `task="link_prediction"`, a single graph needs no labels: links are drawn as by `gat_pyg.data.links`, 5 % for
    validation and 10 % for the test, or as many as `val` and `test`, and with its `disjoint` and `negatives`. Or the
    pairs are `edge_label_index` [2, M], with `edge_label` [M] 1 for links and 0 for others, and the masks [M]; or
    `dataset` is the three graphs of a `RandomLinkSplit`, and messages pass over the edges of the first.

    A warning lists the keys with numbers that are not read, such as `edge_weight`.

    `task` is also `node_`, `edge_` or `graph_`, with `classification` or `regression`; None if `y` shows it:
    integers, and floats that are whole numbers, are classes; `y` [N, K] of 0 and 1 means many labels per node; other
    floats are regression targets, whose mean and standard deviation in the training split the objective takes.

    `x` and `edge_attr` get torch's default dtype, `edge_attr` [E] becomes [E, 1], `y` [N, 1] becomes [N] for classes,
    and [N] becomes [N, 1] for a regression. NaN is an unknown label; nodes without a known label are removed from the
    masks. The attribute `class_names` of `dataset`, if any, becomes the task's. `transforms` describes the transforms
    that were applied to `dataset`, as in `Preparation`; they are not applied here.

    Raises ValueError as `Task` does, if there are too few labelled nodes or graphs for the split, or no such `task`.

    >>> import torch
    >>> x, edge_index = torch.eye(4), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    >>> data = Data(x, edge_index, y=torch.tensor([0.0, 1.0, 0.0, float("nan")]))
    >>> from_dataset(data, "pairs", per_class=1, val=1, test=0)
    Traceback (most recent call last):
    ValueError: pairs: test_mask is empty, expected at least one node with a known label.
    """
    name = name or name_of(type(dataset).__name__, getattr(dataset, "name", None))
    if task not in (None, *TASKS):
        raise ValueError(f"{name}: task is {task!r}, expected None or one of {', '.join(TASKS)}.")
    raw = split_graphs(dataset, task, name)
    if not any(raw):
        raise ValueError(f"{name} has no graph, expected at least one.")
    every, sizes = list(chain(*raw)), [*map(len, raw)]
    where, is_single, is_split = graph_names(sizes, name), sizes == [1], len(sizes) == len(SPLITS)
    warn_if_rounded(every, name)
    if task == LINKS:
        return link_task(raw, name, val, test, seed, split, transforms, disjoint, negatives)
    if disjoint:
        raise ValueError(f"{name}: disjoint={disjoint} is a share of links. Leave it out, or choose task={LINKS}.")
    if is_split and _are_of_links(raw) and not str(task).startswith("edge_"):
        raise ValueError(
            f"{name} has the three graphs of a RandomLinkSplit. Choose task={LINKS}, or task=edge_classification if "
            "edge_label has edge classes."
        )
    every, in_time = labelled(every, where, task), is_series(the_graph(dataset))
    masks = masked_graphs(every, split, name) if not is_split and not is_single else None
    count = masks[1] if masks is not None else num_splits(every[0], name) if is_single else 1
    kind = objective_class(every, task)
    column = split if is_single else None  # masks are of the nodes or edges of a single graph
    y = kind.convert([data.y for data in every], name)
    every = [tidy(data, labels, column, place) for data, labels, place in zip(every, y, where, strict=True)]
    if not all("edge_label_attr" in data for data in every):
        for data in every:
            data.pop("edge_label_attr", None)
    objective = kind.for_labels([data.y for data in every], name)
    F, D = (
        tensor.size(-1) if tensor is not None and tensor.dim() else 1 for tensor in (every[0].x, every[0].edge_attr)
    )
    edge_dim = D if every[0].edge_attr is not None else None
    if folds is not None and (is_split or is_single or in_time or masks is not None):
        reason = "is a single graph" if is_single else "is a series" if in_time else "is split already"
        raise ValueError(
            f"{name}: folds={folds} divides a list of graphs with one label each, but this {reason}. Leave out folds "
            "(split.folds in the command)."
        )
    drawn: tuple[str, ...] = ()
    published = masks[0] if masks is not None else parts_of_ogb(dataset)
    if is_split:
        rest = iter(every)
        parts = [list(islice(rest, size)) for size in sizes]
    elif is_single:
        check_graph(every[0], F, edge_dim, objective, name)  # before a split is drawn
        if published is not None:
            known = any_known(every[0].y)
            every[0].update({key: mask & known for key, mask in masks_of(published, len(known)).items()})
        drawn = draw_masks(every[0], objective, per_class, val, test, seed, name)
        parts = [every, every, every]
    elif folds is not None:
        parts, count = fold_graphs(every, folds, fold, seed, name)
        drawn = ("folds", "fold", "seed") if isinstance(folds, int) else ("folds", "fold")
    elif published is not None:
        parts = [[every[number] for number in part.tolist()] for part in published]
    else:
        parts = draw_graphs(every, val, test, None if in_time else seed, name)
        drawn = ("val", "test") if in_time else ("val", "test", "seed")
    names = _class_names(dataset, objective.out_channels)
    named = {id(data): place for data, place in zip(every, where, strict=True)}
    position = {id(data): number for number, data in enumerate(every)}
    numbers = {split: [position[id(data)] for data in graphs] for split, graphs in zip(SPLITS, parts, strict=True)}
    train, validation, tests = parts
    options: dict[str, Any] = {"graph_names": named, "numbers": None if is_single else numbers}
    return Task(
        name, train, validation, tests, F, objective, edge_dim, names, tuple(transforms), count, drawn, **options
    )


def from_scipy(adjacency: Any, x: Any = None, y: Any = None, name: str = "matrix", **options: Any) -> Task:
    """Convert a matrix of scipy.sparse, whose row is the src of an edge and whose column is its dst, to a task.

    Args:
        adjacency: [N, N]; values other than 0 and 1 are weights, NaN is no edge; weights become `edge_attr` [E, 1].
        x: the features [N, F] as an array, a tensor or another matrix of scipy.sparse; None for learnt embeddings.
        y: the labels of the nodes, as in `from_dataset`.
        name: the name of the task.
        **options: other arguments of `from_dataset`, such as `val`, `seed` or `task`.

    Raises:
        ValueError: if the matrix is not square, and as `from_dataset`.

    Example:
        >>> import scipy.sparse
        >>> ring = scipy.sparse.eye_array(6, k=1) + scipy.sparse.eye_array(6, k=-5)
        >>> from_scipy(ring, x=np.eye(6), y=[0, 1] * 3)
        Task(name='matrix', num_features=6, objective=NodeLabels(out_channels=2), edge_dim=None)
    """
    coo = as_coo(adjacency, name)
    data = Data(edge_index=as_tensor(np.stack([coo.row, coo.col]).astype(np.int64), name), num_nodes=coo.shape[0])
    if (coo.data != 1).any():
        data.edge_attr = as_tensor(coo.data, f"{name}: edge_attr")
    for key, value in (("x", x), ("y", y)):
        if value is not None:
            value = value.toarray() if hasattr(value, "toarray") else value
            data[key] = value if isinstance(value, Tensor) else as_tensor(np.asarray(value), f"{name}: {key}")
    return from_dataset(data, name, **options)


def _class_names(dataset: Any, K: int) -> tuple[str, ...] | None:
    """Return the names of the K classes from the data set or its first element, or None."""
    first = dataset["train"] if isinstance(dataset, Mapping) and "train" in dataset else dataset
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return first_names(getattr(first, "class_names", None), K)


def first_names(names: Any, K: int) -> tuple[str, ...] | None:
    """Return the first K names, or None; there may be more names if no node is in the last classes."""
    return tuple(map(str, names[:K])) if isinstance(names, (list, tuple)) and len(names) >= K else None


BY_NAME = ("Amazon", "Coauthor", "HeterophilousGraphDataset", "LRGBDataset", "TUDataset")


def name_of(kind: str, name: Any = None) -> str:
    """Return the name of a data set in results: its class and its name within the class, in kebab case.

    Sets of the classes in `BY_NAME` have their own name alone, by which they are known.

    >>> name_of("Amazon", "Photo"), name_of("KarateClub"), name_of("GNNBenchmarkDataset", "PATTERN")
    ('photo', 'karateclub', 'gnnbenchmarkdataset-pattern')
    """
    kind = kind.replace("GraphLandDataset", "GraphLand")  # as the command's choices
    text = kind if not isinstance(name, str) else name if kind in BY_NAME else f"{kind} {name}"
    return re.sub(r"[\W_]+", "-", text).strip("-").lower()


def split_graphs(dataset: Any, task: str | None, name: str) -> list[list[Any]]:
    """Return one list of graphs, or three if the data set is split; unions of graphs and series are divided."""
    if isinstance(dataset, Mapping) and set(dataset) != set(SPLITS):
        raise ValueError(f"{name} is a mapping of {', '.join(map(str, dataset))}, expected train, val and test.")
    if isinstance(dataset, Mapping):
        parts = [dataset[key] for key in SPLITS]
    else:
        parts = list(dataset) if _is_split(dataset) else [dataset]
    raw = [_graphs(part, name) for part in parts]
    without = ("edge_label_attr",) if task == LINKS else MASKS if len(raw) == 3 else ()
    warn_of_unread([data for data in chain(*raw) if isinstance(data, Data)], name, without)
    if len(raw) == 1 and len(raw[0]) > 1 and any(map(is_series, raw[0])):
        raise ValueError(
            f"{name} holds {len(raw[0])} graphs, and x of some is (T, N, F), a series. Expected one series, or a split "
            'with one or several in each: {"train": ..., "val": ..., "test": ...}.'
        )
    return [[graph for data in graphs for graph in _divided(data, task, name)] for graphs in raw]


def _is_split(dataset: Any) -> bool:
    """Return True for three data sets, or the three graphs of a RandomLinkSplit."""
    if not isinstance(dataset, Sequence) or isinstance(dataset, str) or len(dataset) != 3:
        return False
    graphs = [isinstance(part, BaseData) for part in dataset]
    return not any(graphs) or (all(graphs) and all("edge_label_index" in part for part in dataset))


def _are_of_links(raw: list[list[Any]]) -> bool:
    """Return True if each split is one graph with labelled pairs."""
    return all(
        len(graphs) == 1 and isinstance(graphs[0], Data) and {"edge_label", "edge_label_index"} <= {*graphs[0].keys()}
        for graphs in raw
    )


def _graphs(part: Any, name: str) -> list[Any]:
    """Return the graphs of a data set, a list or a single graph."""
    if isinstance(part, BaseData):
        return [part]
    is_sized = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    if not is_sized or isinstance(part, (str, Mapping, Tensor, np.ndarray, nn.Module, type)):
        raise ValueError(f"{name} is a {type(part).__name__}, expected a PyG Dataset, a Data, or a list of Data.")
    return [part[number] for number in range(len(part))]


def _divided(data: Any, task: str | None, name: str) -> list[Any]:
    """Return the graphs of a series or a union, or the graph itself."""
    if is_series(data):
        return graphs_of_series(plain(data, name), task, name)
    is_union = isinstance(data, Data) and any(key in data for key in UNION)
    return graphs_of(plain(data, name), task, name) if is_union else [data]


def _rows_of(source: Mapping[str, Any], data: Any) -> Rows:
    """Return the graphs of files, which need no labels; of one path, of several, or of the task's own file."""
    data = source.get("path") if data is None else data
    if data is None:
        raise ValueError("The run does not name files of its data. Give the data: a path, or graphs.")
    paths = list(data) if isinstance(data, (list, tuple)) else [data]
    return Rows([*chain(*map(_graphs_in, paths))], {})


def _graphs_in(path: str | Path) -> list[Data]:
    path, content = read(path)
    graphs = [*chain(*split_graphs(graphs_in(content, path, labelled=False), None, path.stem))]
    for graph in graphs:
        check_kind(graph, path.stem)
    return [plain(graph, path.stem, len(graphs) > 1) for graph in graphs]


FILES = Reader(("gat_pyg.data.from_file", f"{__name__}.from_file"), ("path",), _rows_of)
