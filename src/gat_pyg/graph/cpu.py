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
def _read(src: Any, dst: Any, num_loops: int, rows_src: Any, rows_dst: Any, facts: Any) -> None:
    """Copy the rows of an edge list, append loops, and collect the facts of the edges; `num_loops` -1: none replaced.

    The facts are the number of edges of the list, the lowest and the highest id of their src, and the same of dst.
    """
    size, count = src.size, 0
    low_src, high_src, low_dst, high_dst = facts[1], facts[2], facts[3], facts[4]
    for e in range(size):
        j, i = src[e], dst[e]
        if num_loops >= 0 and i == j:
            j = max(min(j, num_loops - 1), 0)  # the ids of replaced loops may be any
            i = j
        else:
            count += 1
            low_src, high_src = min(low_src, j), max(high_src, j)
            low_dst, high_dst = min(low_dst, i), max(high_dst, i)
        rows_src[e], rows_dst[e] = j, i
    for i in range(num_loops):
        rows_src[size + i], rows_dst[size + i] = i, i
    facts[0], facts[1], facts[2], facts[3], facts[4] = count, low_src, high_src, low_dst, high_dst


@compiled
def _sort(key: Any, other: Any, replaced: int, pointer: Any, keys: Any, others: Any, perm: Any) -> None:
    """Group rows by their key, in order; `pointer` is zeros. Of the rows before `replaced`, loops are left out."""
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


def read_edges(index: Tensor, num_loops: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, int]]:
    """Return the rows `[2, R]` of an edge list with loops (-1: it keeps its own), and the facts to check it by."""
    if index.dtype not in (torch.int32, torch.int64) or dtype == torch.int64:
        index = index.long()
    index = index.contiguous()
    rows = empty(2, index.size(1) + max(num_loops, 0), dtype=dtype)
    facts = np.array([0, NARROW, -1, NARROW, -1])
    src, dst, rows_src, rows_dst = *map(elements, index), *map(elements, rows)
    _read(src, dst, num_loops, rows_src, rows_dst, facts)
    names = "edges", "lowest src", "highest src", "lowest dst", "highest dst"
    return rows, dict(zip(names, facts.tolist(), strict=True))


def sort_edges(key: Tensor, other: Tensor, num_keys: int, replaced: int, count: int) -> tuple[Tensor, ...]:
    """Return the `[num_keys + 1]` pointer of `count` rows grouped by key, and of each its key, other end and row."""
    pointer = empty(num_keys + 1, dtype=torch.int64).zero_()
    keys, others, perm = (empty(count, dtype=key.dtype) for _ in range(3))
    grouped = map(elements, (pointer, keys, others, perm))
    _sort(elements(key), elements(other), replaced, *grouped)
    return pointer, keys, others, perm
