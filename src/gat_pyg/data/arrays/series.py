"""Series: features of several steps in time on one graph, as one graph for each step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ...tasks.checks import check_edge_index_shape, check_present
from ...tasks.objective import MASKS


def is_series(data: Any) -> bool:
    """Return True for a `Data` with x `[T, N, F]`."""
    return isinstance(data, Data) and getattr(data.get("x"), "ndim", 0) == 3


def the_graph(dataset: Any) -> Any:
    """Return the graph of a data set that is a graph or holds a single one, else None."""
    if isinstance(dataset, Data):
        return dataset
    return dataset[0] if not isinstance(dataset, Mapping) and len(dataset) == 1 else None


def graphs_of_series(series: Data, task: str | None, name: str) -> list[Data]:
    """Return a graph for each of the T steps of x `[T, N, F]`; all share `edge_index` `[2, E]`.

    Its labels are the row of y: `[T, N]` or `[T, N, K]` of the nodes, `[T]` or `[T, K]` of the steps as a whole. So are
    those of edges, `edge_label` `[T, M]` or `[T, M, K]`, or y with E in place of N. `edge_attr` `[E]` or `[E, D]` is
    that of all steps, and of `[T, E, D]` each has its own; `edge_label_attr` likewise. The masks `[T]` or `[T, S]` are
    of the steps. The features of a step are a view, which takes no memory.

    Raises:
        ValueError: if a key has no row for each step.

    Example:
        >>> series = Data(torch.rand(5, 3, 2), torch.tensor([[0, 1], [1, 2]]), y=torch.rand(5, 3))
        >>> first, *_ = graphs_of_series(series, None, "mine")
        >>> first
        Data(x=[3, 2], edge_index=[2, 2], y=[3])
    """
    check_present(copy.copy(series).update({"y": series.get("y", series.x)}), name)  # predictions need no labels
    check_edge_index_shape(series.edge_index, name)
    (T, N), E = series.x.shape[:2], series.edge_index.size(1)
    rows: dict[str, Any] = {"x": series.x}
    shared: dict[str, Any] = {"edge_index": series.edge_index}
    for key in ("edge_attr", "edge_label_index", "edge_label_attr"):
        value = series.get(key)
        if isinstance(value, Tensor) and value.dim() == 3:
            rows[key] = value
        elif isinstance(value, Tensor):
            shared[key] = value
            if key != "edge_label_index":  # once, not in each step
                shared[key] = value.to(torch.get_default_dtype()).view(len(value), -1)
    rows |= {key: series[key] for key in ("y", "edge_label", *MASKS) if series.get(key) is not None}
    for key, values in rows.items():
        if not values.dim() or len(values) != T:
            advice = {
                "y": f"(T, N) = ({T}, {N}), (T, N, K), or (T,) for a label of each step, NaN of later ones. For one "
                "label of each node over all steps, give x as (N, T * F)",
                **dict.fromkeys(MASKS, f"(T,) = ({T},): a step as a whole is in one split"),
            }.get(key, f"a row for each of the {T} steps")
            raise ValueError(f"{name}: {key} has shape {tuple(values.shape)}, expected {advice}.")
        if key in MASKS and tuple(values.shape[1:]) == (N,):
            raise ValueError(
                f"{name}: {key} has shape {tuple(values.shape)}, expected (T,) = ({T},): a step as a whole is in one "
                "split. To leave out some nodes, make their y NaN, or -1 for classes."
            )
    y = rows.get("y")
    if y is not None and (str(task).startswith("graph") or (y.dim() == 2 and y.size(1) not in (N, E))):
        rows["y"] = y.unsqueeze(1)  # [T, 1, K], a row of labels for each graph
    return [Data(**{key: values[step] for key, values in rows.items()}, **shared) for step in range(T)]
