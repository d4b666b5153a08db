"""Self-loops: the edge list with one for each node, and the features and weights of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.index import ptr2index
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr

from ..features.pattern import Pattern
from ..features.products import sums
from ..graph.edges import Edges
from ..graph.remembered import remembered
from ..kernels.device import load_kernels, missing_reason
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
) -> Tensor:
    """The features `[R, D]` of the edges, any for the graph's own loops, then of added loops: those of the edges that
    point to a node, reduced by `fill_value`.

    No size depends on an id, so that a compiler can trace it.

    Args:
        layer: has the options `fill_value` and `flow`.
        edge_index, edge_attr, num_src, num_dst: the graph.
        edges: its neighbourhoods with added loops; None in compiled code.
    """
    num_loops = min(num_src, num_dst)
    summed = is_sum(layer.fill_value) and edge_attr.dtype in (torch.float32, torch.float64)
    if edges is not None and layer.flow == "source_to_target" and summed:
        constant = not (edge_attr.requires_grad or in_forward_mode() or torch._C._are_functorch_transforms_active())
        if constant and edge_attr.is_cpu and missing_reason("cpu") is None:
            return load_kernels("features", "cpu").with_loops(edge_attr, edges, num_loops, layer.fill_value == "mean")
        loops = _sums_of_edges(edges, edge_attr, num_loops, layer.fill_value == "mean")
        return torch.cat([edge_attr, loops])
    graph = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    edge_index = graph.long()  # torch's scatter has a wrong gradient for int32, and refuses narrower ids
    rows = max(num_src, num_dst)  # PyG reduces over the edges to all nodes, so that it needs a row for each
    is_loop = edge_index[0] == edge_index[1]
    is_mul = isinstance(layer.fill_value, str) and layer.fill_value == "mul"  # torch 2.11 fails at a Tensor
    one = 1 if is_mul else 0  # torch has no second derivative of a product with two zeros
    edge_attr = edge_attr.masked_fill(is_loop.view(-1, *[1] * (edge_attr.dim() - 1)), one)  # even if inf
    if isinstance(layer.fill_value, str):
        edge_index, rows = edge_index.masked_fill(is_loop, rows), rows + 1  # the last is of no node
    fill = compute_loop_attr(edge_index, edge_attr, rows, False, layer.fill_value)
    return torch.cat([edge_attr, fill[:num_loops]])


def is_sum(fill_value: float | Tensor | str) -> bool:
    """Return True for the sum or mean of the features of the edges that point to a node."""
    return isinstance(fill_value, str) and fill_value in ("mean", "add", "sum")


def _sums_of_edges(edges: Edges, edge_attr: Tensor, num_loops: int, mean: bool) -> Tensor:
    """Return the sum or mean of the features of each node's edges, `[E, D]` or `[E]`, for the loops that are added.

    The edges are grouped by dst already; sums have the same bits every time, on a GPU too.
    """
    pattern, count = _incoming(edges, num_loops)
    x = edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr
    total = sums(x.new_ones(pattern.col.numel()), x, None, 0.0, pattern, False)
    total = total / count if mean else total
    return total[:num_loops].view(-1, *edge_attr.shape[1:])


@remembered
def _incoming(edges: Edges, num_loops: int) -> tuple[Pattern, Tensor]:
    """Return the rows of the edges to each node without the added loop, the last of its edges, and their number."""
    assert edges.perm is not None
    rowptr = edges.rowptr - torch.arange(edges.num_dst + 1, device=edges.rowptr.device).clamp(max=num_loops)
    count = edges.num_edges - num_loops
    dst = ptr2index(rowptr, output_size=count)
    col = edges.perm.index_select(0, torch.arange(count, device=dst.device) + dst.clamp(max=num_loops))
    return Pattern(rowptr.to(col.dtype), col, edges.num_rows - num_loops), rowptr.diff().clamp(min=1).unsqueeze(1)
