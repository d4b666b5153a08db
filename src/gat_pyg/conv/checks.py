"""Checks of a layer's options and of the arguments of a call."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_sparse

from ..attention.operation import BACKENDS, check_devices
from ..features.linear import Linear, hooked
from .mechanisms import ONE_END


def check_layer(heads: Any, out_channels: Any, dropout: Any) -> None:
    """Raise ValueError if a layer's size or dropout is out of range."""
    _check_integer("heads", heads, 1, "at least 1")
    _check_integer("out_channels", out_channels, 1, "at least 1")
    check_probability("dropout", dropout)


def check_options(layer: Any) -> None:
    """Raise ValueError if an option of a layer is out of range."""
    check_layer(layer.heads, layer.out_channels, layer.dropout)
    check_probability("edge_dropout", layer.edge_dropout)
    for width in layer.in_channels if isinstance(layer.in_channels, (tuple, list)) else (layer.in_channels,):
        _check_integer("in_channels", width, -1, "at least 0, or -1: as in the first call")
    if layer.edge_dim is not None:
        _check_integer("edge_dim", layer.edge_dim, -1, "at least 0, or -1: as in the first call")
    if layer.backend not in BACKENDS:
        raise ValueError(f"backend is {layer.backend!r}, expected one of {', '.join(map(repr, BACKENDS))}.")


def _check_integer(name: str, value: Any, least: int, expected: str) -> None:
    if not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} is {value!r}, expected a whole number, {expected}.")
    if value < least:
        raise ValueError(f"{name} is {value}, expected {expected}.")


def check_probability(name: str, value: Any) -> None:
    """Raise ValueError for a value that is no probability."""
    if not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} is {value!r}, expected a probability in [0, 1].")


def check_names(names: Iterable[str], *targets: Callable[..., Any]) -> None:
    """Raise TypeError for a name that is not an argument of one of these classes; it names the first class."""
    known = {name: None for target in targets for name in inspect.signature(target).parameters}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"{targets[0].__name__} has no argument {name}.{hint}")


def of_both_ends(in_channels: Any) -> Any:
    """Return the numbers of features of src and of dst."""
    return in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,) * 2


def check_call(layer: Any, x: Any, edge_index: Any, edge_attr: Any, edge_weight: Any) -> None:
    """Raise ValueError if an argument of a layer's call has a wrong type, shape or device."""
    if not isinstance(edge_index, (Tensor, SparseTensor)):
        hint = "" if edge_index is None else " Did you mean torch.as_tensor(edge_index)?"
        raise ValueError(
            f"edge_index is of type {type(edge_index).__name__}, "
            f"expected an integer tensor of shape (2, E), an EdgeIndex, a SparseTensor or a sparse matrix.{hint}"
        )
    is_coo = isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_coo
    for name, each, shape in (("edge_attr", edge_attr, "(E, D)"), ("edge_weight", edge_weight, "(E, H)")):
        if each is not None and not isinstance(each, Tensor):
            raise ValueError(f"{name} is of type {type(each).__name__}, expected a tensor of shape {shape} or (E,).")
        if each is not None and is_coo and not edge_index.is_coalesced():
            raise ValueError(
                f"edge_index is a COO matrix that is not coalesced, so the order of {name} is ambiguous. Pass "
                f"edge_index.coalesce(), and {name} in the order of its values."
            )
    both = x if isinstance(x, (tuple, list)) else (x, x)
    if len(both) != 2:
        raise ValueError(f"x has length {len(both)}, expected a tensor (N, F) or a pair (x_src, x_dst or None).")
    for side, part, width in zip(("src", "dst"), both, of_both_ends(layer.in_channels), strict=True):
        if part is None and side == "dst":
            continue
        if not isinstance(part, Tensor):
            raise ValueError(f"x ({side}) is of type {type(part).__name__}, expected a tensor of shape (N, F).")
        if part.dim() != 2:
            raise ValueError(
                f"x ({side}) has shape {tuple(part.shape)}, expected (N, F), or (B, N, F) for a batch on one graph."
            )
        if width != -1 and width != part.size(1):  # dynamo misreads `in` for a symbolic size
            raise ValueError(f"x ({side}) has {part.size(1)} features, expected in_channels = {width}.")
    graph = edge_index if isinstance(edge_index, Tensor) else None  # the operation checks a SparseTensor's
    check_devices(both[0], x_dst=both[1], edge_index=graph, edge_attr=edge_attr, edge_weight=edge_weight)
    lin_edge = getattr(layer.mechanism, "lin_edge", layer.lin_edge)
    if edge_attr is not None:
        check_edge_attr(edge_attr, lin_edge)
    if layer._scores_both_ends:
        if both[1] is None:
            raise ValueError(ONE_END)
        if edge_attr is not None and lin_edge is None:
            raise ValueError("edge_attr was passed to a layer without edge features. Pass edge_dim to the layer.")


def check_edge_attr(edge_attr: Tensor, lin_edge: Any) -> None:
    """Raise ValueError if the features of the edges have another dtype than the weight that they are multiplied by."""
    if type(lin_edge) is not Linear or hooked(lin_edge) or edge_attr.dtype == lin_edge.weight.dtype:
        return
    device, dtype = edge_attr.device.type, lin_edge.weight.dtype
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if casts and {edge_attr.dtype, dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return
    raise ValueError(
        f"edge_attr has dtype {edge_attr.dtype}, expected {dtype}, as lin_edge. Did you mean edge_attr.to({dtype})?"
    )


def check_features(edge_attr: Tensor, num_edges: int, edge_dim: int | None = None) -> None:
    """Raise ValueError unless the features of the edges are `[E, edge_dim]` or `[E]`."""
    if edge_attr.dim() not in (1, 2):
        raise ValueError(f"edge_attr has shape {list(edge_attr.shape)}, expected (E, D) or (E,).")
    if edge_attr.size(0) != num_edges:
        raise ValueError(f"edge_attr has {edge_attr.size(0)} rows, expected one per edge, E = {num_edges}.")
    width = 1 if edge_attr.dim() == 1 else edge_attr.size(1)
    if edge_dim is not None and edge_dim != -1 and edge_dim != width:
        raise ValueError(f"edge_attr has {width} features, expected edge_dim = {edge_dim}.")


def check_weight(edge_weight: Tensor, num_edges: int, heads: int) -> None:
    """Raise ValueError unless the weights of the edges are `[E]`, `[E, 1]` or `[E, H]`."""
    one_each = edge_weight.dim() == 1 or (edge_weight.dim() == 2 and edge_weight.size(1) in (1, heads))
    if not one_each or edge_weight.size(0) != num_edges:
        raise ValueError(
            f"edge_weight has shape {list(edge_weight.shape)}, "
            f"expected (E,) or (E, H) with E = {num_edges} and H = {heads}."
        )


def refuse_matrix() -> NoReturn:
    """Raise NotImplementedError for options that a sparse adjacency does not have."""
    raise NotImplementedError(
        "edge_weight and edge_dropout need an edge list here, and edge_index is a sparse matrix. "
        "Pass edge_index of shape (2, E)."
    )


def graph_size(num_src: int, num_dst: int | None, edge_index: Any, size: Any) -> tuple[int, int]:
    """Return N_src and N_dst, from the rows of x and, without a row for dst, from the size that the graph declares."""
    if type(edge_index) is Tensor and edge_index.layout == torch.strided:
        if size is None:
            return num_src, num_src if num_dst is None else num_dst
    elif is_sparse(edge_index):
        size = (edge_index.size(1), edge_index.size(0))
    elif isinstance(edge_index, EdgeIndex):
        size = edge_index.sparse_size()
    declared = (None, None) if size is None else tuple(size)
    if num_dst is None:
        num_dst = num_src if declared[1] is None else declared[1]
    if any(n is not None and n != rows for n, rows in zip(declared, (num_src, num_dst), strict=True)):
        raise ValueError(f"x has {num_src} src and {num_dst} dst rows, but the graph's size is {declared}.")
    return num_src, num_dst


def full_size(size: Any, x: Any) -> Any:
    """Return the size with the numbers of rows of x where it is None."""
    src, dst = (x, x) if isinstance(x, Tensor) else x
    rows = src.size(0), (src if dst is None else dst).size(0)
    return tuple(row if n is None else n for n, row in zip(size, rows, strict=True))
