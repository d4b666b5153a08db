"""Validation of a graph and its labels and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

if TYPE_CHECKING:
    from .task import Task

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)
KEYS = ("x", "edge_index", "edge_attr", "y", *MASKS)
_NOTHING_KNOWN = ": no node has a known label, so there is nothing to learn."


class _Form(NamedTuple):
    """What the graphs of a task have in common, before there is the task."""

    num_features: int
    num_classes: int
    multilabel: bool
    edge_dim: int | None


def _check_graph(task: Task | _Form, data: Data, where: str) -> None:
    """Raise ValueError unless x, edge_index, edge_attr and y are what ``Task`` promises."""
    _check_present(data, where)
    x, edge_index, edge_attr, y = data.x, data.edge_index, data.edge_attr, data.y
    _check_shapes(task, x, edge_index, edge_attr, y, where)  # of all keys, before any values: those may be many
    _check_x(x, where)
    _check_edge_index(edge_index, x.size(0), where)
    if edge_attr is not None and not edge_attr.isfinite().all():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")
    _check_y(task, y, where)


_NOT_FINITE = "is not of finite floats. Use edge_attr.float(), replace NaN and infinity."


def _check_present(data: Data, where: str) -> None:
    """Raise ValueError unless x, edge_index and y are there, and all keys are dense tensors of real numbers."""
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
        for kind, found in kinds.items():
            if found:
                raise ValueError(f"{where}: {key} is {kind}, expected a tensor of real numbers.")


_HINTS = {
    "x": "Give the nodes features [N, F], for instance by torch_geometric.transforms.OneHotDegree or Constant.",
    "edge_index": "Give the edges as [2, E], src above dst; leave out transforms such as ToSparseTensor.",
    "y": "Give every node a label, -1 or NaN where it is unknown.",
}
CHECKED = 2**24  # numbers at a time


def _check_shapes(
    task: Task | _Form, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, y: Tensor, where: str
) -> None:
    """Raise ValueError where a shape or a dtype is not what `Task` promises; no element is read."""
    if x.dim() != 2:
        hint = " Of one feature a node, give x[:, None]." if x.dim() == 1 else ""
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, F), a row for each node.{hint}")
    if x.size(1) != task.num_features:
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, {task.num_features}).")
    if not x.is_floating_point():
        raise ValueError(f"{where}: x is {x.dtype}, expected floats. Use x.float().")
    _check_edge_index_shape(edge_index, where)
    if (edge_attr is None) != (task.edge_dim is None):
        raise ValueError(f"{where}: some graphs have edge_attr and others have none. Give it to all or to none.")
    E = edge_index.size(1)
    if edge_attr is not None and tuple(edge_attr.shape) != (E, task.edge_dim):
        raise ValueError(
            f"{where}: edge_attr has shape {tuple(edge_attr.shape)}, expected ({E}, {task.edge_dim}), a row for each "
            "edge. If loops or doubled edges were removed, remove their rows too."
        )
    if edge_attr is not None and not edge_attr.is_floating_point():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")
    N, K, multilabel = x.size(0), task.num_classes, task.multilabel
    shape, dtype = ((N, K), torch.float32) if multilabel else ((N,), torch.int64)
    if tuple(y.shape) != shape or y.dtype != dtype:
        raise ValueError(
            f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected {dtype} of shape {shape}: "
            + ("a 0, 1 or NaN for each node and label." if multilabel else "one label per node.")
        )


def _check_x(x: Tensor, where: str) -> None:
    rows = max(1, CHECKED // max(1, x.size(1)))
    for start, part in zip(range(0, x.size(0), rows), x.split(rows), strict=True):  # of what may not fit into memory
        if part.isfinite().all():
            continue
        row = start + int((~part.isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"{where}: x is NaN or infinite at node {row} as {x.dtype}. Replace such values, for instance by 0."
        )


def _check_edge_index_shape(edge_index: Tensor, where: str) -> None:
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"{where}: edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: edge_index is {edge_index.dtype}, expected int64. Did you mean edge_index.long()?")


def _check_edge_index(edge_index: Tensor, N: int, where: str) -> None:
    if edge_index.numel() == 0:
        return
    low, high = (int(bound) for bound in edge_index.aminmax())
    if low < 0:
        raise ValueError(f"{where}: edge_index holds {low}, expected nodes from 0 to {N - 1}. Leave out padded edges.")
    if high >= N:
        hint = "Number the nodes from 0, or give x a row for each node."
        raise ValueError(f"{where}: edge_index holds {high}, but x has {N} rows (nodes 0 to {N - 1}). {hint}")


def _check_y(task: Task | _Form, y: Tensor, where: str) -> None:
    K, multilabel, N = task.num_classes, task.multilabel, y.size(0)
    if multilabel and not ((y == 0) | (y == 1) | y.isnan()).all():
        raise ValueError(f"{where}: y holds other values than 0, 1 and NaN (unknown). Turn the labels into 0 and 1.")
    if not multilabel and N and (int(y.min()) < -1 or int(y.max()) >= K):
        bad = int(y.min()) if int(y.min()) < -1 else int(y.max())
        raise ValueError(f"{where}: y holds the label {bad}, expected 0 to {K - 1}, or -1 where it is unknown.")


def _check_masks(task: Task, data: Data) -> None:
    """Raise ValueError unless the three masks are disjoint, not empty and hold known labels only."""
    N, known = data.x.size(0), any_known(data.y)
    for key in MASKS:
        mask = data.get(key)
        if mask is None:
            raise ValueError(f"{task.name}: {key} is missing. Give it, or have it drawn: from_dataset(data, val=500).")
        if mask.dtype != torch.bool or tuple(mask.shape) != (N,):
            raise ValueError(f"{task.name}: {key} is {mask.dtype} {tuple(mask.shape)}, expected torch.bool ({N},).")
        if not mask.any():
            raise ValueError(f"{task.name}: {key} is empty, expected at least one node with a known label.")
        if (mask & ~known).any():
            raise ValueError(f"{task.name}: {key} holds nodes with unknown labels. Use {key} & (y >= 0).")
    for first, second in (MASKS[:2], MASKS[1:], MASKS[::2]):
        common = int((data[first] & data[second]).sum())
        if common:
            raise ValueError(f"{task.name}: {first} and {second} overlap in {common} nodes, expected none in common.")


def any_known(y: Tensor) -> Tensor:
    """Which nodes have a label, or at least one: [N] bool."""
    return ~y.isnan().all(1) if y.dim() == 2 else y >= 0
