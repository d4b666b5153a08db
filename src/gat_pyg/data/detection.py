"""Detection of the task that the labels of graphs show, and the labels in its form."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.checks import _NOTHING_KNOWN
from ..tasks.edges import EdgeLabels, EdgeMultiLabels
from ..tasks.graphs import GraphLabels, GraphMultiLabels
from ..tasks.ids import node_ids, num_nodes
from ..tasks.labels import ManyLabels, OneLabel
from ..tasks.nodes import NodeLabels, NodeMultiLabels
from ..tasks.objective import MASKS, Objective, any_known
from ..tasks.targets import EdgeTargets, GraphTargets, NodeTargets, Targets

OBJECTIVES: dict[str, tuple[type[OneLabel], type[ManyLabels], type[Targets]]] = {
    "node": (NodeLabels, NodeMultiLabels, NodeTargets),
    "edge": (EdgeLabels, EdgeMultiLabels, EdgeTargets),
    "graph": (GraphLabels, GraphMultiLabels, GraphTargets),
}


def _completed(data: Data, task: str | None, name: str) -> Data:
    """Return a graph with its edge labels as y, if these are to be predicted, and node ids as x, if it has none."""
    edges, y = data.edge_index, data.y
    if not isinstance(edges, Tensor) or edges.dim() != 2:
        return data
    data, N, rows = copy.copy(data), num_nodes(data), len(y) if isinstance(y, Tensor) and y.dim() else None
    label, pairs = data.get("edge_label"), data.get("edge_label_index", edges)
    for key in ("edge_label", "edge_label_index"):
        data.pop(key, None)
    if label is None:  # y [E] is of edges if it cannot be of nodes
        label, pairs, of_edges = y, edges, rows == edges.size(1) != N
    else:
        of_edges = y is None
    if label is not None and (of_edges if task is None else task.startswith("edge_")):
        _check_edge_label(label, pairs, name)
        data.y, data.edge_label_index = label, pairs
    elif rows is not None and "num_nodes" not in data:
        N = rows
    data.x = node_ids(N) if data.x is None else data.x
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
    count = sum(map(len, y))
    if y[0].dim() == 1 and count < K:
        items = f"{count} {objective.item}s"
        raise ValueError(
            f"{name}: y holds the label {K - 1}, but there are {items}. Number the classes from 0, "
            f"or choose task={objective.item}_regression for quantities."
        )
    return objective


def _tidy(data: Data, split: int, quantities: bool, name: str) -> Data:
    """Return a new graph with only the keys of `Task`, in the types of `Task`."""
    tidy = Data(data.x.float(), data.edge_index, y=_targets(data.y, name) if quantities else _labels(data.y, name))
    if "edge_label_index" in data:
        tidy.edge_label_index = data.edge_label_index
    if data.edge_attr is not None:
        tidy.edge_attr = data.edge_attr.float()
        if tidy.edge_attr.dim() == 1:
            tidy.edge_attr = tidy.edge_attr[:, None]  # [E, 1]
    known, items = any_known(tidy.y), "edges" if "edge_label_index" in data else "nodes"
    for key in MASKS:
        if data.get(key) is None:
            continue
        mask = torch.as_tensor(data[key])
        if mask.dim() == 2:
            if not 0 <= split < mask.size(1):
                raise ValueError(f"{name}: {key} has {mask.size(1)} columns, split={split} is none of them.")
            mask = mask[:, split]
        if mask.shape != known.shape or not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"{name}: {key} is {mask.dtype} of shape {tuple(mask.shape)}, expected a bool, 0 or 1 for each of the "
                f"{len(known)} {items}. Are these {items[:-1]} numbers? Use torch_geometric.utils.index_to_mask."
            )
        tidy[key] = mask.bool() & known
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
