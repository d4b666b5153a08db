"""Dropout masks on CUDA: Philox4x32-10, as `gat_pyg.philox` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import all_models, edge_id, offset, stacked


class Dropout(NamedTuple):
    """Dropout as the kernels take it, beside the threshold: an edge is kept if its random word is at least that.

    The threshold is a number of 32 bits without a sign. Both numbers may be pointers to one for each seed.
    """

    p_seed: Tensor | None = None
    p_dropout_ids: Tensor | None = None
    scale: float | Tensor = 1.0  # of what is kept


@triton.jit
def draw(p_seed, i_edge, threshold, scale, models, EACH, BLOCK_E, BLOCK_H):
    """Attention dropout k `[edges, heads]`: 0 where word h % 4 of Philox(seed; edge, h // 4) is below the threshold.

    In a stack, h counts the heads of one model, and the seed is that model's, as are threshold and scale where they are
    pointers.
    """
    i_head = tl.program_id(1) * BLOCK_H
    if BLOCK_H % 4 == 0 and (models is None or EACH % 4 == 0):  # a draw serves four heads
        b_seed, i_four = _of_model(p_seed, i_head // 4 + tl.arange(0, BLOCK_H // 4), models, EACH // 4)
        w0, w1, w2, w3 = words(b_seed, i_edge[:, None], i_four[None, :])
        b_word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_E, BLOCK_H])
    else:
        b_seed, i_h = _of_model(p_seed, i_head + tl.arange(0, BLOCK_H), models, EACH)
        b_word = word(b_seed, i_edge[:, None], i_h[None, :] // 4, i_h[None, :] % 4)
    i_model = 0 if models is None else tl.minimum((i_head + tl.arange(0, BLOCK_H)) // EACH, models - 1)[None, :]
    b_threshold, b_scale = limits(threshold, scale, i_model)
    return tl.where(b_word >= b_threshold, b_scale, 0.0)


@triton.jit
def keep(drop, threshold, i_place, m_e, models, SIZES):
    """Attention dropout k of the edges at `i_place` in the order of the rows; 1 if there is none."""
    if drop.p_seed is None:
        return 1.0
    else:
        i_edge = edge_id(drop.p_dropout_ids, i_place, m_e)
        return draw(drop.p_seed, i_edge, threshold, drop.scale, models, SIZES.EACH, SIZES.BLOCK_E, SIZES.BLOCK_H)


@triton.jit
def words(b_seed, i_edge, i_four):
    """The four words of Philox(seed; edge, i_four)."""
    i_edge = i_edge.to(tl.int64)
    zero = tl.zeros_like(i_edge + i_four).to(tl.uint32)
    low, high = (i_edge & 0xFFFFFFFF).to(tl.uint32), (i_edge >> 32).to(tl.uint32)
    return tl.philox(b_seed, zero + low, zero + high, zero + i_four.to(tl.uint32), zero)


@triton.jit
def word(b_seed, i_edge, i_four, i_word):
    """Word `i_word` of the four."""
    w0, w1, w2, w3 = words(b_seed, i_edge, i_four)
    return tl.where(i_word < 2, tl.where(i_word == 0, w0, w1), tl.where(i_word == 2, w2, w3))


@triton.jit
def limits(threshold, scale, i_model):
    """The threshold and the scale: numbers, or of each model where they are pointers."""
    if threshold.dtype.is_ptr():
        return tl.load(threshold + i_model), tl.load(scale + i_model)
    else:
        return threshold, scale


@triton.jit
def _of_model(p_seed, i_all, models, EACH: tl.constexpr):
    """The seed of the model that each of `i_all` belongs to, `EACH` to a model, and its number within that model."""
    if models is None:
        return tl.load(p_seed), i_all
    else:
        i_model = tl.minimum(i_all // EACH, models - 1)  # the last slab may go beyond the last head
        return tl.load(p_seed + i_model)[None, :], i_all - i_model * EACH


def drop_arguments(dropout: float | Tensor, seed: Tensor | None, ids: Tensor | None = None) -> dict[str, Any]:
    """Return the dropout arguments of a kernel."""
    if seed is None:
        return {"drop": Dropout(), "threshold": 0}
    seed = seed.contiguous()
    if isinstance(dropout, Tensor):
        p = dropout.double().expand(seed.shape).reshape(-1)
        return {"drop": Dropout(seed, ids, (1.0 - p).reciprocal().float()), "threshold": (p * 2**32).long()}
    if dropout == 1.0:
        return {"drop": Dropout(seed, ids, 0.0), "threshold": 0}
    least = int(dropout * 2**32)
    return {"drop": Dropout(seed, ids, 1.0 / (1.0 - dropout)), "threshold": least - (least >> 31 << 32)}


@triton.jit(do_not_specialize=["num_edges", "threshold", "models"])
def _kept_kernel(p_kept, num_edges, drop, threshold, models, SIZES):
    """Store which coefficients of a block of edges are kept, by heads."""
    H = all_models(SIZES.EACH, models)
    i_edge = tl.program_id(0).to(tl.int64) * SIZES.BLOCK_E + tl.arange(0, SIZES.BLOCK_E)
    i_h, m_e = tl.program_id(1) * SIZES.BLOCK_H + tl.arange(0, SIZES.BLOCK_H), i_edge < num_edges
    b_keep = keep(drop, threshold, i_edge, m_e, models, SIZES)
    p_block = p_kept + offset(i_edge, H)[:, None] + i_h[None, :]
    tl.store(p_block, b_keep > 0.0, mask=m_e[:, None] & (i_h < H)[None, :])


def kept(seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor) -> Tensor:
    """Return whether coefficients are kept, `[E, H]`; arguments as of `philox.draw_kept`."""
    ids = None if isinstance(edges, int) else edges.contiguous()
    num_edges = edges if isinstance(edges, int) else edges.numel()
    result, block_h = torch.empty(num_edges, heads, dtype=torch.bool, device=seed.device), min(8, heads)
    if result.numel():
        block_h = triton.next_power_of_2(block_h)
        block_e = 512 // block_h
        sizes = stacked(seed.numel(), heads, BLOCK_E=block_e, BLOCK_H=block_h)
        with torch.cuda.device_of(seed):
            grid = triton.cdiv(num_edges, block_e), triton.cdiv(heads, block_h)
            _kept_kernel[grid](result, num_edges, **drop_arguments(p, seed, ids), **sizes)
    return result
