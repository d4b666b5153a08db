"""Self-loops: the edge list with one for each node, and the features and weights of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, degree, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr

from ..graph.edges import Edges, is_remote
from ..graph.memory import load_cpu_kernels
from ..graph.remembered import remembered
from ..kernels.models import in_forward_mode
from .checks import check_weight


def replace_loops(edge_index: Tensor, num_loops: int) -> tuple[Tensor, Tensor]:
    """Replace self-loops by one for each of the first nodes, as PyG's layers do.

    Returns:
        The edge list, and the rows of its edges among all edges, loops included, followed by the added loops.
    """
    rows = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
    loops = torch.arange(num_loops, device=edge_index.device)  # int64, as PyG adds them
    if isinstance(edge_index, EdgeIndex):
        looped, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_loops)
    else:
        looped = torch.cat([edge_index.index_select(1, rows), loops.expand(2, -1)], 1)
    return looped, torch.cat([rows, loops + edge_index.size(1)])


def weights_with_loops(layer: Any, edge_weight: Tensor, num_edges: int, num_loops: int) -> Tensor:
    """Return the weights `[R, H]` of the edges, then 1 for each added loop; ValueError if their shape does not fit."""
    check_weight(edge_weight, num_edges, layer.heads)
    if layer.add_self_loops:
        edge_weight = torch.cat([edge_weight, edge_weight.new_ones(num_loops, *edge_weight.shape[1:])])
    return (edge_weight if edge_weight.dim() == 2 else edge_weight.unsqueeze(1)).expand(-1, layer.heads)


def features_with_loops(
    layer: Any,
    edge_index: Tensor,
    edge_attr: Tensor,
    num_src: int,
    num_dst: int,
    edges: Edges | None = None,
    has_loops: bool = True,
) -> Tensor:
    """The features `[R, D]` of the edges, any for the graph's own loops, then of added loops: those of the edges that
    point to a node, reduced by `fill_value`.

    No size depends on an id, so that a compiler can trace it.

    Args:
        layer: has the options `fill_value` and `flow`.
        edge_index, edge_attr, num_src, num_dst: the graph.
        edges: its neighbourhoods, which are read if it has no loops.
        has_loops: whether the graph may have loops.
    """
    num_loops = min(num_src, num_dst)
    if not has_loops and layer.flow == "source_to_target" and _is_summed_by_kernel(edge_attr, layer.fill_value):
        loops = load_cpu_kernels().loop_features(edges, edge_attr, num_loops, layer.fill_value == "mean")
        return torch.cat([edge_attr, loops])
    graph = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    edge_index = graph.long()  # torch's scatter has a wrong gradient for int32, and refuses narrower ids
    rows = max(num_src, num_dst)  # PyG reduces over the edges to all nodes, so that it needs a row for each
    if has_loops:
        is_loop = edge_index[0] == edge_index[1]
        is_mul = isinstance(layer.fill_value, str) and layer.fill_value == "mul"  # torch 2.11 fails at a Tensor
        one = 1 if is_mul else 0  # torch has no second derivative of a product with two zeros
        edge_attr = edge_attr.masked_fill(is_loop.view(-1, *[1] * (edge_attr.dim() - 1)), one)  # even if inf
        if isinstance(layer.fill_value, str):
            edge_index, rows = edge_index.masked_fill(is_loop, rows), rows + 1  # the last is of no node
    fill = _loop_features(edge_index, edge_attr, rows, layer.fill_value, graph, has_loops)
    return torch.cat([edge_attr, fill[:num_loops]])


def _is_summed_by_kernel(edge_attr: Tensor, fill_value: float | Tensor | str) -> bool:
    """Return True if a compiled kernel can reduce the features of edges: on a CPU, and without a gradient."""
    return (
        isinstance(fill_value, str)
        and fill_value in ("mean", "add", "sum")
        and type(edge_attr) is Tensor
        and edge_attr.is_cpu
        and edge_attr.dtype in (torch.float32, torch.float64)
        and edge_attr.is_contiguous()
        and not (edge_attr.requires_grad or edge_attr.is_neg() or in_forward_mode())
        and not torch._C._are_functorch_transforms_active()
        and load_cpu_kernels() is not None
    )


def _loop_features(
    edge_index: Tensor,
    edge_attr: Tensor,
    num_nodes: int,
    fill_value: float | Tensor | str,
    graph: Tensor,
    has_loops: bool,
) -> Tensor:
    """PyG's features of added loops; on a GPU, where PyG's scatter adds atomically, sums have the same bits every time.

    Compiled code may add in any order. `graph` is the caller's `edge_index`; with `has_loops`, both ends of its loops
    are the last node in `edge_index`.
    """
    if not (is_remote(edge_attr) and isinstance(fill_value, str) and fill_value in ("add", "sum", "mean")):
        return compute_loop_attr(edge_index, edge_attr, num_nodes, False, fill_value)
    dst, none = edge_index[1], edge_attr.new_zeros(num_nodes, *edge_attr.shape[1:])
    total = none.index_put((dst,), edge_attr, accumulate=True)  # on CUDA by a stable sort
    if fill_value != "mean":
        return total
    return total / _count_edges(graph, num_nodes, has_loops).view(-1, *[1] * (edge_attr.dim() - 1))


@remembered
def _count_edges(edge_index: Tensor, num_nodes: int, has_loops: bool) -> Tensor:
    """Return the number of edges of each dst `[N]`, at least 1; with `has_loops`, loops count for the last."""
    src, dst = edge_index.long()
    dst = dst.masked_fill(src == dst, num_nodes - 1) if has_loops else dst
    return degree(dst, num_nodes, torch.long).clamp(min=1)
