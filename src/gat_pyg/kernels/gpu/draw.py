"""Dropout masks on CUDA: Philox4x32-10, as `gat_pyg.philox` has it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import FP_FUSION
from .rows import all_models, edge_id, offset, stack_arguments


@triton.jit
def draw(p_seed, i_edge, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H):
    """Attention dropout k `[edges, heads]`: 0 where word h % 4 of Philox(seed; edge, h // 4) is below the threshold.

    In a stack, h counts the heads of one model, and the seed is that model's, as are threshold and scale where they are
    pointers.
    """
    i_edge = i_edge.to(tl.int64)
    low, high = (i_edge & 0xFFFFFFFF).to(tl.uint32)[:, None], (i_edge >> 32).to(tl.uint32)[:, None]
    i_head = tl.program_id(1) * BLOCK_H
    if BLOCK_H % 4 == 0 and (models is None or EACH % 4 == 0):  # a draw serves four heads
        b_seed, i_four = _of_model(p_seed, i_head // 4 + tl.arange(0, BLOCK_H // 4), models, EACH // 4)
        zero = tl.zeros([BLOCK_E, BLOCK_H // 4], tl.uint32)
        w0, w1, w2, w3 = tl.philox(b_seed, zero + low, zero + high, zero + i_four.to(tl.uint32)[None, :], zero)
        b_word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_E, BLOCK_H])
    else:
        b_seed, i_h = _of_model(p_seed, i_head + tl.arange(0, BLOCK_H), models, EACH)
        i_h = i_h[None, :]
        zero = tl.zeros([BLOCK_E, BLOCK_H], tl.uint32)
        w0, w1, w2, w3 = tl.philox(b_seed, zero + low, zero + high, zero + (i_h // 4).to(tl.uint32), zero)
        b_word = tl.where(i_h % 4 < 2, tl.where(i_h % 4 == 0, w0, w1), tl.where(i_h % 4 == 2, w2, w3))
    i_model = 0 if models is None else tl.minimum((i_head + tl.arange(0, BLOCK_H)) // EACH, models - 1)[None, :]
    b_threshold, b_scale = limits(threshold, keep_scale, i_model)
    return tl.where(b_word >= b_threshold, b_scale, 0.0)


@triton.jit
def limits(threshold, keep_scale, i_model):
    """The threshold and the scale: numbers, or of each model where they are pointers."""
    if threshold.dtype.is_ptr():
        return tl.load(threshold + i_model), tl.load(keep_scale + i_model)
    else:
        return threshold, keep_scale


@triton.jit
def keep(p_seed, p_dropout_ids, i_place, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H):
    """Attention dropout k of the edges at `i_place` in the order grouped by dst; 1 if there is none."""
    if p_seed is None:
        return 1.0
    else:
        i_edge = edge_id(p_dropout_ids, i_place, m_e)
        return draw(p_seed, i_edge, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)


@triton.jit
def _of_model(p_seed, i_all, models, EACH: tl.constexpr):
    """The seed of the model that each of `i_all` belongs to, `EACH` to a model, and its number within that model."""
    if models is None:
        return tl.load(p_seed), i_all
    else:
        i_model = tl.minimum(i_all // EACH, models - 1)  # the last slab may go beyond the last head
        return tl.load(p_seed + i_model)[None, :], i_all - i_model * EACH


def drop_arguments(dropout: float | Tensor, seed: Tensor | None, ids: Tensor | None = None) -> dict[str, Any]:
    """Return the dropout arguments of a kernel; an edge is kept if its random word is at least the threshold.

    The threshold is a number of 32 bits without a sign, or, like the scale, a pointer to one for each seed.
    """
    if seed is None:
        return {"p_seed": None, "p_dropout_ids": None, "threshold": 0, "keep_scale": 1.0}
    shared = {"p_seed": seed.contiguous(), "p_dropout_ids": ids}
    if isinstance(dropout, Tensor):
        p = dropout.double().expand(seed.shape).reshape(-1)
        return {**shared, "threshold": (p * 2**32).long(), "keep_scale": (1.0 - p).reciprocal().float()}
    if dropout == 1.0:
        return {**shared, "threshold": 0, "keep_scale": 0.0}
    least = int(dropout * 2**32)
    return {**shared, "threshold": least - (least >> 31 << 32), "keep_scale": 1.0 / (1.0 - dropout)}


@triton.jit(do_not_specialize=["num_edges", "threshold", "models"])
def _kept_kernel(
    p_seed,
    p_dropout_ids,
    p_kept,
    num_edges,
    threshold,
    keep_scale,
    models,
    EACH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Store which coefficients of a block of edges are kept, by heads."""
    H = all_models(EACH, models)
    i_edge = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    i_h, m_e = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), i_edge < num_edges
    b_keep = keep(p_seed, p_dropout_ids, i_edge, m_e, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
    p_block = p_kept + offset(i_edge, H)[:, None] + i_h[None, :]
    tl.store(p_block, b_keep > 0.0, mask=m_e[:, None] & (i_h < H)[None, :])


def kept(seed: Tensor, edges: int | Tensor, heads: int, p: float | Tensor) -> Tensor:
    """Return whether coefficients are kept, `[E, H]`; arguments as of `philox.draw_kept`."""
    ids = None if isinstance(edges, int) else edges.contiguous()
    num_edges = edges if isinstance(edges, int) else edges.numel()
    result, block_h = torch.empty(num_edges, heads, dtype=torch.bool, device=seed.device), min(8, heads)
    if result.numel():
        block_h = triton.next_power_of_2(block_h)
        with torch.cuda.device_of(seed):
            _kept_kernel[(triton.cdiv(num_edges, 512 // block_h), triton.cdiv(heads, block_h))](
                p_kept=result,
                num_edges=num_edges,
                **drop_arguments(p, seed, ids),
                **stack_arguments(seed.numel(), heads),
                BLOCK_E=512 // block_h,
                BLOCK_H=block_h,
                enable_fp_fusion=FP_FUSION,
            )
    return result
