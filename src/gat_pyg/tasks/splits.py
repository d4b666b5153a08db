"""Several splits of one graph as the masks `[N, B]` of one task, for a stack whose models learn different splits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from ..graph.remembered import remembered
from .objective import MASKS
from .task import Task


def on_graph_of(first: Task, task: Task) -> Task | None:
    """Return `task` on the graph of `first` with its own masks, so that both share all other tensors.

    None if either is no task of the nodes of one graph, or if their graphs differ in more than the masks.

    >>> from gat_pyg.data import planted
    >>> on_graph_of(planted(), planted(seed=1)) is None
    True
    """
    shared, graph = first.shared_graph, task.shared_graph
    if shared is None or graph is None or task.objective.item != "node" or {*shared.keys()} != {*graph.keys()}:
        return None
    others = {key: value for key, value in shared if key not in MASKS}
    if not all(_are_same(value, graph[key]) for key, value in others.items()):
        return None
    return _with_graph(task, graph, others)


def _are_same(left: object, right: object) -> bool:
    if left is right or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return left is right or left == right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_floating_point():
        return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(left, right)


def _with_graph(task: Task, graph: Data, values: Mapping[str, Any]) -> Task:
    """Return `task` on a copy of the graph with other values of some attributes."""
    graph = copy.copy(graph)
    for key, value in values.items():
        graph[key] = value
    return task._with(train=[graph], val=[graph], test=[graph])


def joined(tasks: Sequence[Task]) -> tuple[Task, list[int]]:
    """Return the task of a stack whose models learn these tasks of one graph, and each one's column of the masks.

    The graph has masks `[N, B]`, a column for each of B splits; those of the first task if all have its split.

    Raises:
        ValueError: if the tasks are not of nodes of one graph.
    """
    distinct = list({id(task.train): task for task in tasks}.values())  # which stays the same with another loss
    columns = {id(task.train): column for column, task in enumerate(distinct)}
    if len(distinct) > 1:
        for number, task in enumerate(distinct):
            if on_graph_of(distinct[0], task) is None:
                raise ValueError(
                    f"task {number}, {task.name}, has another graph than the first, expected tasks of the nodes of one "
                    "graph that differ only in their masks. Train them one by one."
                )
        masks = {key: torch.stack([task.train[0][key] for task in distinct], 1) for key in MASKS}
        return _with_graph(distinct[0], distinct[0].train[0], masks), [columns[id(task.train)] for task in tasks]
    return tasks[0], [0] * len(tasks)


def has_columns(data: Data) -> bool:
    """Return True if the masks of a graph are of several splits, `[N, B]`."""
    mask = data.get("train_mask")
    return mask is not None and mask.dim() == 2


def by_column(data: Data) -> list[Data]:
    """Return a graph with masks `[N, B]` as B graphs with masks `[N]`, which share all other tensors."""
    if not has_columns(data):
        return [data]
    graphs = [copy.copy(data) for _ in range(data.train_mask.size(1))]
    for column, graph in enumerate(graphs):
        for key in MASKS:
            graph[key] = data[key][:, column].contiguous()
    return graphs


class Rows(NamedTuple):
    """The nodes `[S, n]` of several splits, and where they only fill up a shorter one; None if nowhere."""

    nodes: Tensor
    filled: Tensor | None

    def of(self, out: Tensor) -> Tensor:
        """Return the rows `[S, n, K]` of outputs `[S, N, K]`."""
        S, N, K = out.shape
        first = N * torch.arange(S, device=out.device)[:, None]
        return out.reshape(S * N, K).index_select(0, (first + self.nodes).flatten()).view(S, -1, K)


@remembered
def rows_of(mask: Tensor, columns: tuple[int, ...]) -> Rows:
    """Return the nodes in these columns of a mask `[N, B]`.

    >>> rows_of(torch.tensor([[True, False], [True, True]]), (1, 0))
    Rows(nodes=tensor([[1, 0],
            [0, 1]]), filled=tensor([[False,  True],
            [False, False]]))
    """
    nodes = [column.nonzero().squeeze(1) for column in mask.unbind(1)]
    n = max(map(len, nodes))
    index = torch.tensor(columns, device=mask.device)
    filled = torch.stack([torch.arange(n, device=mask.device) >= len(column) for column in nodes])
    return Rows(
        torch.stack([F.pad(column, (0, n - len(column))) for column in nodes]).index_select(0, index),
        filled.index_select(0, index) if any(len(column) < n for column in nodes) else None,
    )
