"""Validation of a graph, its features and its edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from .objective import MASKS, Objective

KEYS = ("x", "edge_index", "edge_attr", "graph_attr", "y", *MASKS)
NOTHING_KNOWN = ": no node has a known label, so there is nothing to learn."


def check_graph(data: Data, num_features: int, edge_dim: int | None, objective: Objective, where: str) -> None:
    """Raise ValueError unless x, edge_index, edge_attr and y have the form that `Task` requires."""
    check_present(data, where)
    x, edge_index, edge_attr = data.x, data.edge_index, data.edge_attr
    check_shapes(num_features, edge_dim, x, edge_index, edge_attr, where)
    objective.check(data, where)  # before the values of x, which take longer
    check_finite(x, edge_attr, where)
    check_edge_index(edge_index, x.size(0), where)


_NOT_FINITE = "is not of finite floats. Use edge_attr.float(), replace NaN and infinity."


def check_present(data: Data, where: str) -> None:
    """Raise ValueError if x, edge_index or y is missing, or a key is not a dense tensor of real numbers."""
    for key in KEYS:
        value, hint = data.get(key), _HINTS.get(key)
        if not isinstance(value, Tensor):
            if hint is not None:
                raise ValueError(f"{where}: {key} is missing. {hint}")
            if key == "edge_attr" and value is not None:
                raise ValueError(f"{where}: edge_attr is a {type(value).__name__}, expected a tensor (E,) or (E, D).")
            continue
        if value.layout != torch.strided:
            dense = hint if key == "edge_index" else f"Use {key}.to_dense()."
            raise ValueError(f"{where}: {key} is {value.layout}, expected a dense tensor. {dense}")
        kinds = {
            "complex": value.is_complex(),
            "quantized": value.is_quantized,
            "nested": value.is_nested,
            "on the meta device": value.is_meta,
        }
        for kind, is_kind in kinds.items():
            if is_kind:
                raise ValueError(f"{where}: {key} is {kind}, expected a tensor of real numbers.")


_HINTS = {
    "x": "Give the nodes features [N, F], for instance by torch_geometric.transforms.OneHotDegree or Constant.",
    "edge_index": "Give the edges as [2, E], src in row 0, dst in row 1; leave out transforms such as ToSparseTensor.",
    "y": "Give every node a label, -1 or NaN where it is unknown.",
}
CHECKED = 2**24  # elements that are checked at a time


def check_shapes(
    num_features: int, edge_dim: int | None, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, where: str
) -> None:
    """Raise ValueError if a shape or dtype is not that of `Task`; no element is read."""
    if x.dim() != 2:
        hint = " With one feature per node, give x[:, None]." if x.dim() == 1 else ""
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, F), a row for each node.{hint}")
    if x.size(1) != num_features:
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, {num_features}).")
    if not x.size(0):
        raise ValueError(f"{where}: the graph has no nodes, expected at least one. Leave it out.")
    if not x.is_floating_point():
        raise ValueError(f"{where}: x is {x.dtype}, expected floats. Use x.float().")
    check_edge_index_shape(edge_index, where)
    if (edge_attr is None) != (edge_dim is None):
        raise ValueError(f"{where}: some graphs have edge_attr and others have none. Give it to all or to none.")
    E = edge_index.size(1)
    if edge_attr is not None and tuple(edge_attr.shape) != (E, edge_dim):
        raise ValueError(
            f"{where}: edge_attr has shape {tuple(edge_attr.shape)}, expected ({E}, {edge_dim}), a row for each "
            "edge. If loops or doubled edges were removed, remove their rows too."
        )
    if edge_attr is not None and not edge_attr.is_floating_point():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")


def check_finite(x: Tensor, edge_attr: Tensor | None, where: str, batch: Tensor | None = None) -> None:
    """Raise ValueError if a feature of a node or an edge is NaN or infinite; `batch` is the graph of each node."""
    rows = max(1, CHECKED // max(1, x.size(1)))
    for start, chunk in zip(range(0, max(1, x.size(0)), rows), x.split(rows), strict=True):  # x may not fit in memory
        if chunk.isfinite().all():
            continue
        row, column = (~chunk.isfinite()).nonzero()[0].tolist()
        graph = "" if batch is None else f" (graph {int(batch[start + row])})"
        raise ValueError(
            f"{where}: x is NaN or infinite at node {start + row}{graph} as {x.dtype}, in column {column}. Replace "
            "such values, for instance by the mean of their column, and mark them by another column of 0 and 1."
        )
    if edge_attr is not None and not edge_attr.isfinite().all():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")


def check_edge_index_shape(edge_index: Tensor, where: str) -> None:
    """Raise ValueError unless edge_index is `[2, E]` of whole numbers."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"{where}: edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: edge_index is {edge_index.dtype}, expected int64. Did you mean edge_index.long()?")


def check_edge_index(edge_index: Tensor, N: int, where: str) -> None:
    """Raise ValueError unless all ids in edge_index are from 0 to N - 1."""
    if edge_index.numel() == 0:
        return
    low, high = (int(bound) for bound in edge_index.aminmax())
    if low < 0:
        raise ValueError(f"{where}: edge_index holds {low}, expected nodes from 0 to {N - 1}. Leave out padded edges.")
    if high >= N:
        hint = "Number the nodes from 0, or give x a row for each node."
        raise ValueError(f"{where}: edge_index holds {high}, but x has {N} rows (nodes 0 to {N - 1}). {hint}")
