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
    rows: Any = _Rows(edges, x.size(0)) if by_scatter else _sorted(edges, x.size(0))
    e = rows.masked(score.per_edge(x, rows)) if by_scatter else score.per_edge_exported(x, rows)
    exp = (e - rows.max(e.detach()).index_select(0, rows.wide[1])).exp()
    total = rows.sum(exp).clamp(min=1.0)  # at least exp(0), or 0 where all scores are -inf
    alpha = exp / total.index_select(0, rows.wide[1])
    alpha = alpha if edge_weight is None else alpha * rows.group(edge_weight)
    out: Tensor = rows.weighted_sum(alpha, widened(x), rows.wide[0])
    if (values := score.edge_values) is None:
        return out
    u, weight = map(widened, values)
    return out + torch.einsum("nhd,hcd->nhc", rows.weighted_sum(alpha, u, rows.order), weight)


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
        self.num_dst = edges.num_dst
        index, is_edge = _with_loops(edges, num_src, is_edge)
        self.no_edge = None if is_edge is None else ~is_edge.unsqueeze(1)  # [R, 1]
        src, dst = index.long()
        self.wide: tuple[Tensor, Tensor] = src, dst

    @property
    def num_edges(self) -> int:
        return self.wide[0].size(0)

    @property
    def order(self) -> Tensor:
        """The row of each edge."""
        return torch.arange(self.num_edges, device=self.wide[0].device)

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


class _Sorted:
    """The same, grouped by dst.

    Rows without an edge repeat the added loop of node 0 behind all neighbourhoods, where no sum includes them.
    """

    def __init__(self, edges: EdgeList, num_src: int) -> None:
        self.num_dst = edges.num_dst
        index = edges.edge_index if edges.edge_index.dtype == torch.int64 else edges.edge_index.long()
        src, dst = index if edges.flow == "source_to_target" else index.flip(0)
        if edges.add_self_loops:
            loops = torch.arange(torch.sym_min(num_src, edges.num_dst), device=index.device)
            src, dst = torch.cat([src, loops]), torch.cat([dst.masked_fill(src == dst, _NONE), loops])
        dst, perm = torch.sort(dst, stable=True)
        self.ptr = torch.searchsorted(dst, torch.arange(edges.num_dst + 1, device=dst.device))  # then those without
        if edges.add_self_loops:
            no_edge = dst == _NONE
            dst, perm = dst.masked_fill(no_edge, 0), perm.masked_fill(no_edge, index.size(1))
        self.wide, self.order, self.num_edges = (src.index_select(0, perm), dst), perm, perm.size(0)
        self.bags: dict[Any, Any] = {}  # what all layers share: by the number of heads, indices and offsets of bags

    def group(self, per_edge: Tensor) -> Tensor:
        return per_edge.index_select(0, self.order)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The indices and offsets of bags that add both ends of each edge: rows of x of all dst, then of all src."""
        if "pairs" not in self.bags:
            src, dst = self.wide
            index = torch.stack([dst, src + self.num_dst], 1).flatten()
            self.bags["pairs"] = index, torch.arange(0, index.size(0), 2, device=index.device)
        pairs: tuple[Tensor, Tensor] = self.bags["pairs"]
        return pairs

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
        if H > 1 and H not in self.bags:  # those of the first head, then those of the second, ...
            head = torch.arange(H, device=src.device).unsqueeze(1)
            offsets = (self.ptr + head * self.num_edges).flatten()
            self.bags[H] = (self.wide[0] * H + head).flatten(), offsets
        index, offsets = (src, self.ptr) if H == 1 else self.bags[H]
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


_NONE = torch.iinfo(torch.int64).max  # the dst of rows without an edge, until they are sorted
_SORTED = WeakTensorKeyDictionary()  # of edge lists that are being exported: all layers share one sort


def _sorted(edges: EdgeList, num_src: int) -> _Sorted:
    index = edges.edge_index
    if torch.compiler.is_dynamo_compiling() or not is_fake(index):
        return _Sorted(edges, num_src)
    call = f"{index._version} {num_src} {edges.num_dst} {edges.add_self_loops} {edges.flow}"  # symbols have no hash
    results = _SORTED.setdefault(index, {})
    if call not in results:
        results[call] = _Sorted(edges, num_src)
    result: _Sorted = results[call]
    return result
