"""Attention on an edge list in plain torch: what a compiler or an exported program runs where there are no kernels.

No size depends on an id, so that the graph has no data-dependent shapes: the graph's own loops, which are replaced, and
dropped edges keep their rows, with the score -inf.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakTensorKeyDictionary

from ..graph.adjacency import EdgeList
from .score import Score, widened
from .segment import segment_max, segment_softmax, segment_sum


def attend(x: Tensor, score: Score, edges: EdgeList, edge_weight: Tensor | None) -> Tensor:
    """Return O `[N_dst, H, C]` without dropout; arguments as in `gat_pyg.attention.attend`.

    The edges are sorted by dst, once for all layers, and torch's bags of embeddings sum the rows of x with the weights
    `[E, H]`: nothing of size `[E, H, C]` is allocated, except by a score. ONNX has no bags, and `torch.func` cannot map
    over them: there the messages of each head are added in the order of the edges.
    """
    by_scatter = torch.onnx.is_in_onnx_export() or torch._C._are_functorch_transforms_active()
    rows: Any = _Rows(edges, x.size(0)) if by_scatter else _Sorted(edges, x.size(0))
    e = rows.masked(score.per_edge(x, rows) if by_scatter else score.per_edge_exported(x, rows))
    exp = (e - rows.max(e.detach()).index_select(0, rows.wide[1])).exp()
    total = rows.sum(exp)
    weights = exp if edge_weight is None else exp * rows.group(edge_weight)
    out = rows.weighted_sum(weights, widened(x), rows.wide[0])
    if (values := score.edge_values) is not None:
        out = torch.cat([out, rows.weighted_sum(weights, widened(values), rows.order)], -1)
    result: Tensor = out / total.clamp(min=1.0).unsqueeze(-1)  # 0 without an edge, else at least exp(0)
    return result


def weights(x: Tensor, score: Score, edges: EdgeList, edge_weight: Tensor | None, keep: Tensor | None = None) -> Tensor:
    """Return k_ij w_ij alpha_ij `[R, H]` in the caller's order.

    Args:
        keep: k_ij `[R, H]`, negative for rows without an edge, which get 0; None without any dropout.
        x, score, edges, edge_weight: as in `gat_pyg.attention.attend`.
    """
    rows: Any = _Rows(edges, x.size(0), None if keep is None else (keep >= 0).any(1))
    alpha = segment_softmax(rows.masked(score.per_edge(x, rows)), rows)
    alpha = alpha if keep is None else alpha * keep.abs()
    return alpha if edge_weight is None else alpha * edge_weight


class _Rows:
    """The rows of an edge list in the caller's order, with the attributes of `Edges` that a score needs."""

    def __init__(self, edges: EdgeList, num_src: int, is_edge: Tensor | None = None) -> None:
        self.num_src, self.num_dst = num_src, edges.num_dst
        self.index, is_edge = _with_loops(edges, num_src, is_edge)
        self.no_edge = None if is_edge is None else ~is_edge.unsqueeze(1)  # [R, 1]
        src, dst = self.index.long()
        self.wide: tuple[Tensor, Tensor] = src, dst

    @property
    def num_edges(self) -> int:
        return self.wide[0].size(0)

    @property
    def order(self) -> Tensor:
        """The row of each edge."""
        return torch.arange(self.num_edges, device=self.index.device)

    def group(self, per_edge: Tensor) -> Tensor:
        return per_edge

    def masked(self, e: Tensor) -> Tensor:
        """Return grouped scores, -inf in rows without an edge."""
        return e if self.no_edge is None else e.masked_fill(self.no_edge, -torch.inf)

    def max(self, e: Tensor) -> Tensor:
        return segment_max(e, self)  # type: ignore[arg-type]

    def sum(self, per_edge: Tensor) -> Tensor:
        return segment_sum(per_edge, self)  # type: ignore[arg-type]

    def weighted_sum(self, weights: Tensor, x: Tensor, src: Tensor) -> Tensor:
        """Equation (4), `[N_dst, H, C]`, from x `[N, H, C]` or `[N, C]`, head by head.

        Edges are the last axis: so ONNX Runtime adds messages several times faster.
        """
        dst = self.wide[1].expand(x.size(-1), -1)
        heads = []
        for head in range(weights.size(1)):
            of_head = x if x.dim() == 2 else x[:, head]
            messages = weights[:, head, None] * of_head.index_select(0, src)
            heads.append(x.new_zeros(x.size(-1), self.num_dst).scatter_add(1, dst, messages.t()))
        return torch.stack(heads).permute(2, 0, 1)


class _Sorted(_Rows):
    """The same, grouped by dst, with the rows without an edge at the end."""

    perm: Tensor  # [R], the row of each edge
    ptr: Tensor  # [N_dst + 1], where the edges of each dst begin, then the rows without an edge
    bags: dict[Any, Any]  # the indices and offsets of bags, by the number of heads, 0 for the edges' own

    def __init__(self, edges: EdgeList, num_src: int) -> None:
        self.num_src, self.num_dst, self.edges = num_src, edges.num_dst, edges
        self.wide, self.no_edge, self.perm, self.ptr, self.bags = _sorted(edges, num_src)

    @property
    def index(self) -> Tensor:  # type: ignore[override]
        return _with_loops(self.edges, self.num_src)[0]

    @property
    def order(self) -> Tensor:
        return self.perm

    def group(self, per_edge: Tensor) -> Tensor:
        return per_edge.index_select(0, self.perm)

    def max(self, e: Tensor) -> Tensor:
        top: Tensor = torch.segment_reduce(e, "max", offsets=self.ptr, axis=0, unsafe=True)
        return top.clamp(min=torch.finfo(e.dtype).min)

    def sum(self, per_edge: Tensor) -> Tensor:
        if 0 not in self.bags:
            self.bags[0] = torch.arange(self.num_edges, device=per_edge.device)
        total: Tensor = F.embedding_bag(self.bags[0], per_edge, self.ptr, mode="sum")
        return total[: self.num_dst]

    def weighted_sum(self, weights: Tensor, x: Tensor, src: Tensor) -> Tensor:
        H = weights.size(1)
        if H not in self.bags:  # those of the first head, then those of the second, ...
            head = torch.arange(H, device=src.device).unsqueeze(1)
            offsets = (self.ptr + head * self.num_edges).flatten()
            self.bags[H] = (self.wide[0] * H + head).flatten(), offsets
        index, offsets = self.bags[H]
        index = index if x.dim() == 3 else src.repeat(H)
        per_edge = weights.t().flatten()
        bags = F.embedding_bag(index, x.view(-1, x.size(-1)), offsets, mode="sum", per_sample_weights=per_edge)
        return bags.view(H, -1, x.size(-1))[:, : self.num_dst].transpose(0, 1)


def _with_loops(edges: EdgeList, num_src: int, is_edge: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the index `[2, R]`, 0 for rows without an edge, and whether each row has one, None if all have."""
    index = edges.edge_index if edges.flow == "source_to_target" else edges.edge_index.flip(0)
    if edges.add_self_loops:
        num_loops = torch.sym_min(num_src, edges.num_dst)
        if is_edge is None:
            is_edge = torch.cat([index[0] != index[1], index.new_ones(num_loops, dtype=torch.bool)])
        loops = torch.arange(num_loops, dtype=index.dtype, device=index.device)
        index = torch.cat([index, loops.expand(2, -1)], 1)
    return index if is_edge is None else index.masked_fill(~is_edge, 0), is_edge  # a replaced loop may have any id


_SORTED = WeakTensorKeyDictionary()  # of edge lists that are being exported: all layers share one sort


_BITS = 31  # of an id
_NONE = (1 << _BITS) - 1  # the dst of rows without an edge


def _sorted(edges: EdgeList, num_src: int) -> tuple[Any, ...]:
    """Return `wide`, `no_edge`, `perm`, `ptr` and `bags` of `_Sorted`."""
    index = edges.edge_index
    if torch.compiler.is_dynamo_compiling() or not is_fake(index):
        return _sort(edges, num_src)
    call = f"{index._version} {num_src} {edges.num_dst} {edges.add_self_loops} {edges.flow}"  # symbols have no hash
    results = _SORTED.setdefault(index, {})
    if call not in results:
        results[call] = _sort(edges, num_src)
    result: tuple[Any, ...] = results[call]
    return result


def _sort(edges: EdgeList, num_src: int) -> tuple[Any, ...]:
    index, is_edge = _with_loops(edges, num_src)
    src, dst = index.long().clamp(-1, _NONE - 1)  # an id out of range stays so
    # one number for an edge, from which src and dst are read: fewer gathers, in an optimised program by each consumer
    key = (dst if is_edge is None else dst.masked_fill(~is_edge, _NONE)) << _BITS | src
    key, perm = torch.sort(key)
    src, dst = key & ((1 << _BITS) - 1), key >> _BITS
    ptr = torch.searchsorted(dst, torch.arange(edges.num_dst + 1, device=dst.device))
    no_edge = None
    if is_edge is not None:
        no_edge = dst == _NONE
        dst, no_edge = dst.masked_fill(no_edge, 0), no_edge.unsqueeze(1)
    return (src, dst), no_edge, perm, ptr, {}
