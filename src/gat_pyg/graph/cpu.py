"""The structure of an edge list on a CPU, compiled by Numba: a check of the ids, a stable counting sort, a checksum."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.cache import compiled
from .memory import elements

NARROW = torch.iinfo(torch.int32).max


@compiled
def sum_words(words: Any, first: int) -> Any:
    """Sum a hash of each word and its index, from `first` on, modulo 2^64: SplitMix64's function, cut short."""
    total = np.uint64(0)
    for i in range(words.size):
        z = np.uint64(words[i]) + np.uint64(first + i) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        total += z ^ (z >> np.uint64(29))
    return total


@compiled
def _read(src: Any, dst: Any, num_loops: int, rows_src: Any, rows_dst: Any, ids: Any, facts: Any) -> None:
    """Copy the rows of an edge list, append loops, and collect the facts of the edges; `num_loops` -1: none replaced.

    The facts are the number of edges of the list, the lowest and the highest id of their src, and the same of dst. If
    loops are replaced, `ids` has the index of each row in the list without its own loops, then those of the added ones.
    """
    size, count = src.size, 0
    low_src, high_src, low_dst, high_dst = NARROW, -1, NARROW, -1
    for e in range(size):
        j, i = src[e], dst[e]
        if num_loops >= 0 and i == j:
            j = max(min(j, num_loops - 1), 0)  # a replaced loop may have any id
            i = j
        else:
            count += 1
            low_src, high_src = min(low_src, j), max(high_src, j)
            low_dst, high_dst = min(low_dst, i), max(high_dst, i)
        rows_src[e], rows_dst[e] = j, i
        if num_loops >= 0:
            ids[e] = max(count - 1, 0)
    for i in range(num_loops):
        rows_src[size + i], rows_dst[size + i] = i, i
        ids[size + i] = count + i
    facts[0], facts[1], facts[2], facts[3], facts[4] = count, low_src, high_src, low_dst, high_dst


@compiled
def _sort(key: Any, other: Any, replaced: int, pointer: Any, keys: Any, others: Any, perm: Any) -> None:
    """Group rows by their key, in order; `pointer` is zeros. Of the rows before `replaced`, loops are left out.

    `keys` (optional) and `others` have the ends of each edge, `perm` its row.
    """
    for e in range(key.size):
        if e >= replaced or key[e] != other[e]:
            pointer[key[e] + 1] += 1
    for node in range(1, pointer.size):
        pointer[node] += pointer[node - 1]
    for e in range(key.size):
        if e >= replaced or key[e] != other[e]:
            at = pointer[key[e]]  # the end of the edges so far
            others[at], perm[at] = other[e], e
            if keys is not None:
                keys[at] = key[e]
            pointer[key[e]] = at + 1
    for node in range(pointer.size - 1, 0, -1):  # each has moved to where the next began
        pointer[node] = pointer[node - 1]
    pointer[0] = 0


@compiled
def _group(src: Any, dst: Any, num_loops: int, rows: Any, ids: Any, by_dst: Any, by_src: Any, facts: Any) -> Any:
    """`_read`, then `_sort` by dst if each id is that of a node, and by src if there is room for it.

    Returns the number of edges with loops, or -1 for an id that is not that of a node.
    """
    rowptr, dsts, srcs, perm = by_dst
    colptr, dst_by_src, place = by_src
    _read(src, dst, num_loops, rows[0], rows[1], ids, facts)
    count = facts[0]
    if count > 0 and not (
        facts[1] >= 0 and facts[2] < colptr.size - 1 and facts[3] >= 0 and facts[4] < rowptr.size - 1
    ):
        return -1
    edges = count + max(num_loops, 0)
    _sort(rows[1], rows[0], src.size if count < src.size else 0, rowptr, dsts, srcs, perm)
    if place.size >= edges:
        _sort(srcs[:edges], dsts[:edges], 0, colptr, None, dst_by_src, place)
    return edges


def group_edges(index: Tensor, num_loops: int, num_src: int, num_dst: int, dtype: torch.dtype, both: bool) -> Any:
    """Return the rows `[2, R]` of an edge list with loops (-1: it keeps its own), grouped by dst, if `both` by src too.

    Returns:
        The rows; the dropout ids, or None; the pointer of the rows grouped by dst, and of each edge its dst, src and
        row; the pointer of these edges grouped by src, and of each its dst and place, or None. If an id is not that of
        a node, instead the facts to check the ids by.
    """
    if index.dtype not in (torch.int32, torch.int64) or dtype == torch.int64:
        index = index.long()
    index = index.contiguous()
    size, kind = index.size(1), np.int32 if dtype == torch.int32 else np.int64
    total = size + max(num_loops, 0)
    rows, ids, facts = np.empty((2, total), kind), np.empty(total if num_loops >= 0 else 0, kind), np.empty(5, np.int64)
    by_dst = np.zeros(num_dst + 1, np.int64), np.empty(total, kind), np.empty(total, kind), np.empty(total, kind)
    room = total if both else 0
    by_src = np.zeros(num_src + 1, np.int64), np.empty(room, kind), np.empty(room, kind)
    ends = elements(index)
    edges = _group(ends[:size], ends[size:], num_loops, rows, ids, by_dst, by_src, facts)
    if edges < 0:
        names = "edges", "lowest src", "highest src", "lowest dst", "highest dst"
        return dict(zip(names, facts.tolist(), strict=True))

    def tensors(pointer: Any, *per_edge: Any) -> tuple[Tensor, ...]:
        return torch.from_numpy(pointer), *[torch.from_numpy(each[:edges]) for each in per_edge]

    tensor = torch.from_numpy
    return tensor(rows), tensor(ids) if edges < total else None, tensors(*by_dst), tensors(*by_src) if both else None


def sort_edges(key: Tensor, other: Tensor, num_keys: int) -> tuple[Tensor, ...]:
    """Return the `[num_keys + 1]` pointer of rows grouped by key, and of each its other end and row."""
    ends, pointer = elements(key), np.zeros(num_keys + 1, np.int64)
    others, perm = np.empty_like(ends), np.empty_like(ends)
    _sort(ends, elements(other), 0, pointer, None, others, perm)
    return torch.from_numpy(pointer), torch.from_numpy(others), torch.from_numpy(perm)
