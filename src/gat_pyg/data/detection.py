"""Detection of the task from the labels of graphs, and conversion of the labels to its form."""

from __future__ import annotations

import copy
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.checks import _NOTHING_KNOWN, _check_present
from ..tasks.edges import EdgeLabels, EdgeMultiLabels, complete_pairs
from ..tasks.graphs import GraphLabels, GraphMultiLabels
from ..tasks.ids import node_ids, num_nodes
from ..tasks.labels import ManyLabels, OneLabel
from ..tasks.nodes import NodeLabels, NodeMultiLabels
from ..tasks.objective import MASKS, Objective, any_known
from ..tasks.targets import EdgeTargets, GraphTargets, NodeTargets, Targets
from .splits import chosen_mask

OBJECTIVES: dict[str, tuple[type[OneLabel], type[ManyLabels], type[Targets]]] = {
    "node": (NodeLabels, NodeMultiLabels, NodeTargets),
    "edge": (EdgeLabels, EdgeMultiLabels, EdgeTargets),
    "graph": (GraphLabels, GraphMultiLabels, GraphTargets),
}


def _labelled(raw: list[list[Any]], task: str | None, name: str) -> list[list[Any]]:
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


def _check_is_graph(data: Any, name: str) -> None:
    _check_kind(data, name)
    _check_present(data, name)


def _check_kind(data: Any, name: str) -> None:
    if not isinstance(data, Data):
        hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
        raise ValueError(f"{name} holds a {type(data).__name__}, expected torch_geometric.data.Data.{hint}")


def _columns(data: Data) -> int:
    """Return the number of splits of a graph: the columns of its masks."""
    return max((data[key].size(1) for key in MASKS if getattr(data.get(key), "ndim", 0) == 2), default=1)


def _are_quantities(y: list[Tensor]) -> bool:
    """Return True if floats are neither classes nor binary labels: fractions, or in [N, K] any but 0 and 1."""
    for labels in y:
        if not labels.is_floating_point() or not labels.dim():
            continue
        known = labels[~labels.isnan()].double()
        many = labels.dim() == 2 and labels.size(1) > 1
        if (((known != 0) & (known != 1)) if many else (known != known.round()) | (known < -1)).any():
            return True
    return False


def _objective_of(graphs: list[Data], quantities: bool, item: str | None, name: str) -> Objective:
    """Return the objective that fits the labels of these graphs; `item` is None if their number decides."""
    y = [data.y for data in graphs]
    if "edge_label_index" in graphs[0]:
        item = "edge"
    if item is None:
        is_single = len(graphs) > 1 and all(len(labels) == 1 for labels in y)
        item = "graph" if is_single and any(data.x.shape[:1] != (1,) for data in graphs) else "node"
    one, many, targets = OBJECTIVES[item]
    if quantities:
        return targets(y[0].size(1))
    K = y[0].size(1) if y[0].dim() == 2 else max((int(labels.max()) + 1 for labels in y if len(labels)), default=0)
    if K < 1 or not any(bool(any_known(labels).any()) for labels in y):
        raise ValueError(f"{name}{_NOTHING_KNOWN}")
    objective: Objective = many(K) if y[0].dim() == 2 else one(K)
    if y[0].dim() == 2:
        _suggest_classes(y, name)
    count = sum(map(len, y))
    if y[0].dim() == 1 and count < K:
        items = f"{count} {objective.item}s"
        raise ValueError(
            f"{name}: y holds the label {K - 1}, but there are {items}. Number the classes from 0, "
            f"or choose task={objective.item}_regression for quantities."
        )
    return objective


def _suggest_classes(y: list[Tensor], name: str) -> None:
    """Warn if binary labels are one-hot: exactly one of each row with a known label is 1, and not always the same."""
    rows = torch.cat([labels[any_known(labels)] for labels in y])
    if bool((rows.sum(1) == 1).all()) and int(rows.sum(0).count_nonzero()) > 1:
        warnings.warn(
            f"{name}: exactly one of the {y[0].size(1)} labels in each row of y is 1. Each is predicted by itself, as "
            "labels that do not exclude each other. If they are classes, give y.argmax(1).",
            stacklevel=4,
        )


def _tidy(data: Data, split: int | None, quantities: bool, name: str) -> Data:
    """Return a new graph with only the keys of `Task`, in the types of `Task`; its masks if there is a `split`."""
    tidy = Data(data.x.float(), data.edge_index, y=_targets(data.y, name) if quantities else _labels(data.y, name))
    if data.edge_attr is not None:
        tidy.edge_attr = data.edge_attr.float()
        if tidy.edge_attr.dim() == 1:
            tidy.edge_attr = tidy.edge_attr[:, None]  # [E, 1]
    if "edge_label_index" in data:
        tidy.edge_label_index = data.edge_label_index
        complete_pairs(tidy)
    known, items = any_known(tidy.y), "edges" if "edge_label_index" in data else "nodes"
    for key in MASKS:
        if split is not None and data.get(key) is not None:
            tidy[key] = chosen_mask(data[key], split, len(known), items, key, name) & known
    return tidy


def _targets(y: Tensor, name: str) -> Tensor:
    """Return quantities as [N, K] float32."""
    if y.dim() not in (1, 2) or 0 in y.shape[1:]:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, expected (N,) or (N, K), K quantities per row.")
    return y.float() if y.dim() == 2 else y.float()[:, None]


def _labels(y: Tensor, name: str) -> Tensor:
    """Return labels as [N, K] float32 with NaN for unknown ones, or as [N] int64 with -1."""
    y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
    if y.dim() == 2:
        return y.float()
    if y.dim() != 1:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, expected (N,), or (N, K) for many labels per node.")
    if not y.is_floating_point():
        return y.long()
    y = y.double()
    wrong = y[(y != y.round()) & ~y.isnan() | (y.abs() >= 2**53)]
    if wrong.numel():
        raise ValueError(
            f"{name}: y holds {float(wrong[0])}..., expected whole numbers: classes. For quantities choose "
            "task=node_regression, edge_regression or graph_regression."
        )
    return y.masked_fill(y.isnan(), -1).long()
