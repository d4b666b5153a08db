"""Detection of the task from the labels, and conversion of the labels to its form."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ...tasks.checks import check_present
from ...tasks.edges import complete_pairs
from ...tasks.node_ids import node_ids, num_nodes
from ...tasks.objective import MASKS, SPLITS, Objective, any_known
from ...tasks.objectives import objective_for
from ...tasks.scaling import rounded_columns
from ..splits import chosen_mask
from .formats import as_tensor
from .keys import READ


def graph_names(sizes: Sequence[int], name: str) -> list[str]:
    """Return the names of graphs for messages: the number in the data set, or in each of the splits of these sizes."""
    if [*sizes] == [1]:
        return [name]
    splits = [f"{split} " for split in SPLITS] if len(sizes) == len(SPLITS) else [""]
    return [
        f"{name}, {split}graph {number}" for split, size in zip(splits, sizes, strict=True) for number in range(size)
    ]


def labelled(graphs: Sequence[Any], names: Sequence[str], task: str | None) -> list[Data]:
    """Return copies of the graphs with tensors, and with the labels of their edges as y if these are to be predicted.

    A graph on its own without features gets the ids of its nodes as x.

    Args:
        graphs: the graphs.
        names: the name of each graph in messages.
        task: the task, or None.

    Raises:
        ValueError: if one is no `Data`, x, edge_index or y is missing, or the edge labels do not fit.
    """
    is_single = len(graphs) == 1
    every = [plain(data, place, not is_single) for data, place in zip(graphs, names, strict=True)]
    of_edges = _are_of_edges(every) if task is None else task.startswith("edge_")
    for key in ("edge_label", "edge_label_attr"):
        if of_edges and len({key in data for data in every}) > 1:
            number = next(number for number, data in enumerate(every) if key not in data)
            raise ValueError(f"{names[number]} has no {key}, but others have. Give it to all of them.")
    for data, place in zip(every, names, strict=True):
        _take_edge_labels(data, of_edges, place)
    if is_single and _has_edges(every[0]) and every[0].x is None:
        add_ids(every[0], names[0])
    for data, place in zip(every, names, strict=True):
        check_present(data, place)
    if not is_single and not of_edges and (task is None or task.startswith("graph_")):
        _check_rows(every, names)
    return every


def plain(data: Any, where: str, is_one_of_many: bool = False) -> Data:
    """Return a copy of a graph with a tensor for each array and number, and without features of width 0."""
    check_kind(data, where)
    data = copy.copy(data)
    for key in [key for key in data.keys() if key in READ]:  # noqa: SIM118 (iterating over a Data yields pairs)
        value = data[key]
        if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
            data[key] = value = as_tensor(value, f"{where}: {key}")
        if not isinstance(value, Tensor):
            continue
        if is_one_of_many and not value.dim():
            data[key] = value[None]  # as in PyG's batches
        elif key in ("x", "edge_attr", "edge_label_attr") and value.dim() == 2 and not value.size(1):
            del data[key]
    return data


def _check_rows(graphs: Sequence[Data], names: Sequence[str]) -> None:
    """Raise ValueError if y `[K]` of each graph has neither a row for each node, nor for each edge, nor one row."""
    rows = {data.y.shape for data in graphs}
    if len(rows) > 1 or graphs[0].y.dim() != 1 or graphs[0].y.numel() < 2:
        return
    (K,) = graphs[0].y.shape
    for data, place in zip(graphs, names, strict=True):
        if _has_edges(data) and K not in (num_nodes(data), data.edge_index.size(1)):
            raise ValueError(
                f"{place}: y has shape ({K},), but there are {num_nodes(data)} nodes and {data.edge_index.size(1)} "
                f"edges. For {K} labels of each graph give y[None], (1, {K})."
            )


def _are_of_edges(graphs: list[Data]) -> bool:
    """Return True if the labels of these graphs are of edges: `edge_label` without y, or y if it fits nothing else."""
    if any("edge_label" in data for data in graphs):
        return all(data.y is None for data in graphs)
    if not all(isinstance(data.y, Tensor) and data.y.dim() and _has_edges(data) for data in graphs):
        return False
    rows = [len(data.y) for data in graphs]
    of_graphs = len(graphs) > 1 and all(row == 1 for row in rows)
    of_nodes = all(row == num_nodes(data) for row, data in zip(rows, graphs, strict=True))
    return not of_graphs and not of_nodes and rows == [data.edge_index.size(1) for data in graphs]


def _has_edges(data: Data) -> bool:
    return isinstance(data.edge_index, Tensor) and data.edge_index.dim() == 2


def _take_edge_labels(data: Data, of_edges: bool, where: str) -> None:
    """Make the edge labels y if these are to be predicted, and remove them otherwise."""
    label, pairs = data.pop("edge_label", None), data.pop("edge_label_index", None)
    features = data.pop("edge_label_attr", None)
    if label is None:  # y is of the edges
        label, pairs, features = data.y, None, None
    if of_edges and label is not None:
        pairs = data.edge_index if pairs is None else pairs
        check_edge_label(label, pairs, where)
        data.y, data.edge_label_index, data.edge_label_attr = label, pairs, features


MANY = 1000  # nodes per id in edge_index above which the ids cannot be those of nodes numbered from 0


def add_ids(data: Data, name: str) -> None:
    """Add the ids of the nodes as x."""
    y = data.y
    of_nodes = "num_nodes" not in data and "edge_label_index" not in data and isinstance(y, Tensor) and y.dim()
    N = len(y) if of_nodes else num_nodes(data)
    if data.edge_index.numel() < N // MANY:
        raise ValueError(
            f"{name}: x is missing, and edge_index or num_nodes shows {N} nodes, but there are only "
            f"{data.edge_index.size(1)} edges. Number the nodes from 0."
        )
    data.x = node_ids(N)


def check_edge_label(label: Any, pairs: Any, name: str) -> None:
    """Raise ValueError unless there is a row of labels for each pair of nodes."""
    is_dense = isinstance(pairs, Tensor) and pairs.layout == torch.strided and pairs.dim() == 2
    size = pairs.size(1) if is_dense else None
    if not isinstance(label, Tensor) or label.dim() not in (1, 2) or len(label) != size:
        form = f"of shape {tuple(label.shape)}" if isinstance(label, Tensor) else f"a {type(label).__name__}"
        raise ValueError(
            f"{name}: edge_label is {form}, expected ({size},) or ({size}, K), labels for each of the edges. For other "
            "pairs of nodes than those of edge_index, give edge_label_index (2, M)."
        )


def check_kind(data: Any, name: str) -> None:
    """Raise ValueError unless `data` is a `Data`."""
    if not isinstance(data, Data):
        hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
        raise ValueError(f"{name} holds a {type(data).__name__}, expected torch_geometric.data.Data.{hint}")


def objective_class(graphs: list[Data], task: str | None) -> type[Objective]:
    """Return the class of the objective: that of the task, else the one that recognises the labels of the graphs."""
    y = [data.y for data in graphs]
    item, _, goal = (task or "").partition("_")
    if "edge_label_index" in graphs[0]:
        item = "edge"
    elif not item:
        is_single = len(graphs) > 1 and all(labels.shape[:1] == (1,) for labels in y)
        item = "graph" if is_single and any(data.x.shape[:1] != (1,) for data in graphs) else "node"
    return objective_for(y, item, goal or None)


def warn_if_rounded(graphs: list[Any], name: str) -> None:
    """Warn of 64-bit features whose differences are lost in float32, such as times."""
    for key in ("x", "edge_attr"):
        values = [data.get(key) for data in graphs if isinstance(data, Data)]
        values = [rows[:, None] if rows.dim() == 1 else rows for rows in values if _is_wide(rows)]
        if not any(bool((rows.abs() >= 2**24).any()) for rows in values):
            continue
        if len({rows.size(1) for rows in values}) == 1 and (columns := rounded_columns(values)):
            warnings.warn(
                f"{name}: in column {columns[0]} of {key}, different values are equal in float32, the dtype of "
                "features. Subtract the mean before, or number categories from 0.",
                stacklevel=3,
            )


def _is_wide(rows: Any) -> bool:
    is_dense = isinstance(rows, Tensor) and rows.layout == torch.strided and rows.dim() in (1, 2)
    return is_dense and rows.dtype in (torch.float64, torch.int64)


def tidy(data: Data, y: Tensor, split: int | None, name: str) -> Data:
    """Return a new graph with only the keys of `Task`, in the types of `Task`; its masks if there is a `split`."""
    dtype = torch.get_default_dtype()  # that of models
    graph = Data(data.x.to(dtype), data.edge_index, y=y)
    for key in ("edge_attr", "edge_label_attr"):
        if data.get(key) is not None:
            features = data[key].to(dtype)
            graph[key] = features[:, None] if features.dim() == 1 else features  # [E, 1]
    if data.get("graph_attr") is not None:
        graph.graph_attr = data.graph_attr.to(dtype).view(1, -1)
    if isinstance(data.get("smiles"), str):
        graph.smiles = data.smiles  # the name of a molecule in figures and predictions
    if "edge_label_index" in data:
        graph.edge_label_index = data.edge_label_index
        complete_pairs(graph)
    known, items = any_known(graph.y), "edges" if "edge_label_index" in data else "nodes"
    for key in MASKS:
        if split is not None and data.get(key) is not None:
            graph[key] = chosen_mask(data[key], split, len(known), items, key, name) & known
    return graph
