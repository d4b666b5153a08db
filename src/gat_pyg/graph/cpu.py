"""The structure of an edge list on a CPU, compiled by Numba: a check of the ids, a stable counting sort, a checksum."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.cache import compiled
from .memory import elements, empty

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
def _sort(key: Any, other: Any, replaced: int, pointer: Any, keys: Any, grouped: Any) -> None:
    """Group rows by their key, in order; `pointer` is zeros. Of the rows before `replaced`, loops are left out.

    `grouped` has the other end of each edge, then the row of each.
    """
    count = keys.size
    others, perm = grouped[:count], grouped[count:]
    for e in range(key.size):
        if e >= replaced or key[e] != other[e]:
            pointer[key[e] + 1] += 1
    for node in range(1, pointer.size):
        pointer[node] += pointer[node - 1]
    for e in range(key.size):
        if e >= replaced or key[e] != other[e]:
            at = pointer[key[e]]  # the end of the edges so far
            keys[at], others[at], perm[at] = key[e], other[e], e
            pointer[key[e]] = at + 1
    for node in range(pointer.size - 1, 0, -1):  # each has moved to where the next began
        pointer[node] = pointer[node - 1]
    pointer[0] = 0


@compiled
def _group(
    src: Any, dst: Any, num_loops: int, num_src: int, rows: Any, ids: Any, pointer: Any, grouped: Any, facts: Any
) -> None:
    """`_read`, then `_sort` if each id is that of a node; `rows` has the src of all rows, then their dst."""
    size, added = src.size, max(num_loops, 0)
    rows_src, rows_dst = rows[: size + added], rows[size + added :]
    _read(src, dst, num_loops, rows_src, rows_dst, ids, facts)
    count = facts[0]
    if count == 0 or (facts[1] >= 0 and facts[2] < num_src and facts[3] >= 0 and facts[4] < pointer.size - 1):
        edges = count + added
        replaced = size if count < size else 0
        _sort(rows_dst, rows_src, replaced, pointer, grouped[:edges], grouped[edges : 3 * edges])


def group_edges(index: Tensor, num_loops: int, num_src: int, num_dst: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the rows `[2, R]` of an edge list with loops (-1: it keeps its own), grouped by dst.

    Returns:
        The rows; the dropout ids, or None; the pointer of the rows grouped by dst, and of each edge its dst, src and
        row; the facts to check the ids by. If an id is not that of a node, nothing but the rows and facts is set.
    """
    if index.dtype not in (torch.int32, torch.int64) or dtype == torch.int64:
        index = index.long()
    index = index.contiguous()
    size, replaces = index.size(1), num_loops >= 0
    total = size + max(num_loops, 0)
    rows, grouped = empty(2, total, dtype=dtype), empty(3 * total, dtype=dtype)
    ids = empty(total if replaces else 0, dtype=dtype)
    pointer = empty(num_dst + 1, dtype=torch.int64).zero_()
    values, ends = np.empty(5, np.int64), elements(index)
    results = map(elements, (rows, ids, pointer, grouped))
    _group(ends[:size], ends[size:], num_loops, num_src, *results, values)
    facts = dict(zip(("edges", "lowest src", "highest src", "lowest dst", "highest dst"), values.tolist(), strict=True))
    loops = size - facts["edges"] if replaces else 0
    by_dst = grouped[: 3 * (total - loops)].view(3, total - loops).unbind()
    return rows, ids if loops else None, (pointer, *by_dst), facts


def sort_edges(key: Tensor, other: Tensor, num_keys: int) -> tuple[Tensor, ...]:
    """Return the `[num_keys + 1]` pointer of rows grouped by key, and of each its other end and row."""
    pointer, grouped = empty(num_keys + 1, dtype=torch.int64).zero_(), empty(2, key.numel(), dtype=key.dtype)
    keys = np.empty(key.numel(), str(key.dtype).removeprefix("torch."))
    _sort(elements(key), elements(other), 0, elements(pointer), keys, elements(grouped))
    return pointer, *grouped.unbind()
