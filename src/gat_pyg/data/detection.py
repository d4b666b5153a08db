"""Detection of the task from the labels of graphs, and conversion of the labels to its form."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.checks import check_present
from ..tasks.edges import complete_pairs
from ..tasks.node_ids import node_ids, num_nodes
from ..tasks.objective import MASKS, Objective, any_known
from ..tasks.objectives import objective_for
from .splits import chosen_mask


def labelled(raw: list[list[Any]], task: str | None, name: str) -> list[list[Any]]:
    """Return the graphs with the labels of their edges as y, if these are to be predicted.

    A graph on its own without features gets the ids of its nodes as x.
    """
    every = list(chain(*raw))
    if not all(isinstance(data, Data) and _has_edges(data) for data in every):
        return raw  # which the checks of each graph refuse
    of_edges = _are_of_edges(every) if task is None else task.startswith("edge_")
    if of_edges and len({"edge_label" in data for data in every}) > 1:
        number = next(number for number, data in enumerate(every) if "edge_label" not in data)
        raise ValueError(f"{name}: graph {number} has no edge_label, but others have. Give it to all of them.")
    if len(raw) == len(every) == 1:
        return [[_with_ids(_with_edge_labels(every[0], of_edges, name))]]
    return [
        [_with_edge_labels(data, of_edges, f"{name}, graph {number}") for number, data in enumerate(graphs)]
        for graphs in raw
    ]


def _are_of_edges(graphs: list[Data]) -> bool:
    """Return True if the labels of these graphs are of edges: `edge_label` without y, or y if it fits nothing else."""
    if any("edge_label" in data for data in graphs):
        return all(data.y is None for data in graphs)
    if not all(isinstance(data.y, Tensor) and data.y.dim() for data in graphs):
        return False
    rows = [len(data.y) for data in graphs]
    of_graphs = len(graphs) > 1 and all(row == 1 for row in rows)
    of_nodes = all(row == num_nodes(data) for row, data in zip(rows, graphs, strict=True))
    return not of_graphs and not of_nodes and rows == [data.edge_index.size(1) for data in graphs]


def _has_edges(data: Data) -> bool:
    return isinstance(data.edge_index, Tensor) and data.edge_index.dim() == 2


def _with_edge_labels(data: Data, of_edges: bool, where: str) -> Data:
    """Return a graph with the labels of its edges as y if these are to be predicted, else without them."""
    data = copy.copy(data)
    label, pairs = data.pop("edge_label", None), data.pop("edge_label_index", None)
    if label is None:  # y is of the edges
        label, pairs = data.y, None
    if of_edges and label is not None:
        pairs = data.edge_index if pairs is None else pairs
        _check_edge_label(label, pairs, where)
        data.y, data.edge_label_index = label, pairs
    return data


def _with_ids(data: Data) -> Data:
    """Return a graph with the ids of its nodes as x, if it has none."""
    if data.x is None:
        data, y = copy.copy(data), data.y
        of_nodes = "num_nodes" not in data and "edge_label_index" not in data and isinstance(y, Tensor) and y.dim()
        data.x = node_ids(len(y) if of_nodes else num_nodes(data))
    return data


def _check_edge_label(label: Any, pairs: Any, name: str) -> None:
    """Raise ValueError unless there is a row of labels for each pair of nodes."""
    is_dense = isinstance(pairs, Tensor) and pairs.layout == torch.strided and pairs.dim() == 2
    size = pairs.size(1) if is_dense else None
    if not isinstance(label, Tensor) or label.dim() not in (1, 2) or len(label) != size:
        form = f"of shape {tuple(label.shape)}" if isinstance(label, Tensor) else f"a {type(label).__name__}"
        raise ValueError(
            f"{name}: edge_label is {form}, expected ({size},) or ({size}, K), labels for each of the edges. For other "
            "pairs of nodes than those of edge_index, give edge_label_index (2, M)."
        )


def check_is_graph(data: Any, name: str) -> None:
    """Raise ValueError unless `data` is a `Data` with x, edge_index and y."""
    check_kind(data, name)
    check_present(data, name)


def check_kind(data: Any, name: str) -> None:
    """Raise ValueError unless `data` is a `Data`."""
    if not isinstance(data, Data):
        hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
        raise ValueError(f"{name} holds a {type(data).__name__}, expected torch_geometric.data.Data.{hint}")


def num_splits(data: Data) -> int:
    """Return the number of splits of a graph: the columns of its masks."""
    return max((data[key].size(1) for key in MASKS if getattr(data.get(key), "ndim", 0) == 2), default=1)


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


def tidy(data: Data, y: Tensor, split: int | None, name: str) -> Data:
    """Return a new graph with only the keys of `Task`, in the types of `Task`; its masks if there is a `split`."""
    graph = Data(data.x.float(), data.edge_index, y=y)
    if data.edge_attr is not None:
        graph.edge_attr = data.edge_attr.float()
        if graph.edge_attr.dim() == 1:
            graph.edge_attr = graph.edge_attr[:, None]  # [E, 1]
    if "edge_label_index" in data:
        graph.edge_label_index = data.edge_label_index
        complete_pairs(graph)
    known, items = any_known(graph.y), "edges" if "edge_label_index" in data else "nodes"
    for key in MASKS:
        if split is not None and data.get(key) is not None:
            graph[key] = chosen_mask(data[key], split, len(known), items, key, name) & known
    return graph
