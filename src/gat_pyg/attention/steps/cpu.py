"""Steps that the CPU kernels of all scores share: softmax of a row, weighted sum, merge of chunks.

A buffer holds a number for each edge of a chunk and each head of a vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.cpu.cache import compiled, inline
from ...kernels.cpu.vector import (
    LANES,
    exp,
    fold,
    interleave,
    inverse,
    load,
    of_model,
    prefetch,
    repeat,
    replace,
    splat,
    store,
)

AHEAD = 16  # edges between the one that is summed and the one that is prefetched


@inline
def close(buffer: Any, n: int, value: Any) -> None:
    """Fill the buffer with `value` from n up to the next multiple of `LANES`."""
    store(buffer, n // LANES * LANES, splat(buffer, value, LANES), None)


@inline
def softmax(weight: Any, positive: Any, keep: Any, n: int, tops: Any, lanes: Any) -> Any:
    """The scores of a chunk to k_ij exp(e_ij - max e), of which `positive` keeps those it has a 1 for.

    Returns the inverse of the denominator of equation (2), and the share of it that `positive` has.
    """
    high = repeat(replace(tops, -np.inf, 0.0), LANES)
    total, mass = splat(weight, 0.0, LANES), splat(weight, 0.0, LANES)
    for f in range(0, n << len(lanes), LANES):
        alpha = exp(load(weight, f, LANES, None) - high)
        total = total + alpha
        kept = alpha
        if keep is not None:
            kept = alpha * load(keep, f, LANES, None)
        store(weight, f, kept, None)
        if positive is not None:
            ones = load(positive, f, LANES, None)
            mass = mass + alpha * ones
            store(positive, f, kept * ones, None)
    share = inverse(fold(total, lanes))
    return share, fold(mass, lanes) * share


@inline
def store_norm(norm: Any, at: int, tops: Any, share: Any, whole: bool, twice: Any) -> None:
    """Return (max, 1 / denominator) of a softmax: (0, 0) if no edge has a weight; (-inf, 0) for such a chunk."""
    tops = tops + (share - share)  # a NaN in the scores is in the share alone
    if whole:
        tops = replace(tops, -np.inf, 0.0)
    store(norm, 2 * at, interleave(tops, share), twice)


@inline
def weighted_sum(x: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, positive: Any, h: int,
           heads: int, share: Any, out: Any, out_plus: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """Equation (4) for a tile of a head: the sum of `weight` times the rows `ids` of x, and that of `positive` times
    them, both times `share`."""
    total, plus = splat(x, 0.0, tile), splat(x, 0.0, tile)
    for k in range(n):
        prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        total = total + weight[k * heads + h] * values
        if out_plus is not None:
            plus = plus + positive[k * heads + h] * values
    store(out, o, share * total, count)
    if out_plus is not None:
        store(out_plus, o, share * plus, count)


@compiled
def merge(model: int, models: int, long: Any, first: Any, out_: Any, norm_: Any, out_plus_: Any, mass_plus_: Any,
           heads: int, channels: int) -> None:  # fmt: skip
    """The outputs of long rows from those of their chunks, each weighted by its share of the softmax's denominator."""
    out, norm = of_model(out_, model, models), of_model(norm_, model, models)
    out_plus, mass_plus = of_model(out_plus_, model, models), of_model(mass_plus_, model, models)
    for q in range(long.size):
        for h in range(heads):
            top = norm_.dtype.type(-np.inf)
            for p in range(first[q], first[q + 1]):
                top = max(top, norm[2 * (p * heads + h)])
            total = norm_.dtype.type(0)
            for p in range(first[q], first[q + 1]):
                if norm[2 * (p * heads + h)] != -np.inf:  # a NaN is not, and goes on
                    total += np.exp(norm[2 * (p * heads + h)] - top) / norm[2 * (p * heads + h) + 1]
            at = long[q] * heads + h
            norm[2 * at] = top if top != -np.inf else 0.0
            norm[2 * at + 1] = 1 / total if total != 0 else total
            for c in range(at * channels, (at + 1) * channels):
                out[c] = 0.0
                if out_plus_ is not None:
                    out_plus[c] = 0.0
            if out_plus_ is not None:
                mass_plus[at] = 0.0
            for p in range(first[q], first[q + 1]):
                if norm[2 * (p * heads + h)] == -np.inf:
                    continue
                share = np.exp(norm[2 * (p * heads + h)] - top) / (norm[2 * (p * heads + h) + 1] * total)
                for c in range(channels):
                    out[at * channels + c] += share * out[(p * heads + h) * channels + c]
                    if out_plus_ is not None:
                        out_plus[at * channels + c] += share * out_plus[(p * heads + h) * channels + c]
                if out_plus_ is not None:
                    mass_plus[at] += share * mass_plus[p * heads + h]
