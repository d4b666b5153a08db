"""Attention fused on CUDA, by Triton: nothing of size E x C is kept, no atomics, the same bits every run.

A program takes one work item: the edges of a row, that is of one dst (CSR) or of one src (CSC), for a slab of heads.
A row of more than `SPLIT` edges is several items, whose partial results a second launch merges in their order.

A stack of S models is one call: every operand, the seed and every result have one more axis `[S, ...]` in front, and
each model drops what it would drop alone with its seed. To the kernels these are H heads side by side, `EACH` of a
model. `models`, the size of the stack, is a run-time argument: one compiled kernel serves stacks of every size. It is
None for a model alone.

In the kernels `p_` is a pointer, `i_` an id, `o_` an offset, `m_` a mask and `b_` a value that the program holds; tiles
are `[edges, heads, channels]`. What is None has no code in the compiled kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..graph.edges import SPLIT, Edges, Side, count_long, places_of

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which torch's CUDA builds bring along, and there is none. "
        "Install torch for CUDA, or take backend='segment'."
    ) from error

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# What the kernels share.


@triton.jit
def _offset(i_row, WIDTH):
    """The offset of a row of `WIDTH` elements, in int64: N x H x C passes 2^31 long before N does."""
    return i_row.to(tl.int64) * WIDTH


@triton.jit
def _all(EACH: tl.constexpr, models):
    """The heads, or the elements, of all models: a product, so that the compiler knows it is divisible by `EACH`."""
    if models is None:
        return EACH
    else:
        return models * EACH


@triton.jit
def _item(p_ptr, p_part_row, p_part_start, num_parts, SPLIT: tl.constexpr):
    """The program's row, its first edge, how many, and whether they are the whole row or a part of it.

    The first `num_parts` programs, the longest, take parts; then comes one for each row, idle where the row is split.
    """
    i_item = tl.program_id(0)
    is_part = i_item < num_parts
    i_row = (i_item - num_parts).to(tl.int64)
    if p_part_row is not None:
        i_row = tl.where(is_part, tl.load(p_part_row + i_item, mask=is_part, other=0), i_row)
    start = tl.load(p_ptr + i_row)
    stop = tl.load(p_ptr + i_row + 1)
    is_whole = stop - start <= SPLIT
    if p_part_row is not None:
        start = tl.where(is_part, tl.load(p_part_start + i_item, mask=is_part, other=0), start)
    count = tl.minimum(stop - start, SPLIT).to(tl.int32)
    return i_row, start, tl.where(is_whole | is_part, count, 0), is_whole, is_part


@triton.jit
def _gather(p_score, i_row, i_h, m_eh, H):
    """`[edges, heads]`: a term of the score in float32, 0 where there is none."""
    if p_score is None:
        return 0.0
    else:
        return tl.load(p_score + _offset(i_row, H)[:, None] + i_h[None, :], mask=m_eh, other=0.0).to(tl.float32)


@triton.jit
def _row(p_rows, o_row, m_row):
    """What belongs to one row, in float32, 0 where there is none."""
    if p_rows is None:
        return 0.0
    else:
        return tl.load(p_rows + o_row, mask=m_row, other=0.0).to(tl.float32)


@triton.jit
def _edge(p_ids, i_place, m_e):
    """The caller's ids of edges that stand at `i_place` in the order grouped by dst, or what dropout calls them."""
    if p_ids is None:
        return i_place
    else:
        return tl.load(p_ids + i_place, mask=m_e, other=0)


@triton.jit
def _finite(b_e):
    """A score, or 0 for that of no edge."""
    return tl.where(b_e == float("-inf"), 0.0, b_e)


@triton.jit
def _alpha(b_z, b_lse, slope, m_eh):
    """The attention coefficient exp(e - lse), at most 1 however e and lse were rounded; NaN where either is NaN."""
    b_log = tl.minimum(_leaky(b_z, slope) - b_lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(m_eh, tl.exp2(b_log * LOG2E), 0.0)


@triton.jit
def _leaky(b_z, slope):
    return tl.where(b_z > 0.0, b_z, slope * b_z)


@triton.jit
def _keep(
    p_seed,
    i_edge,
    threshold,
    keep_scale,
    models,
    EACH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Attention dropout k `[edges, heads]`: 0 where word h % 4 of Philox(seed; edge, h // 4) is below the threshold.

    In a stack, h counts the heads of one model, and the seed is that model's.
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
    return tl.where(b_word >= threshold, keep_scale, 0.0)


@triton.jit
def _of_model(p_seed, i_all, models, EACH: tl.constexpr):
    """The seed of the model that each of `i_all` belongs to, `EACH` to a model, and its number within that model."""
    if models is None:
        return tl.load(p_seed), i_all
    else:
        i_model = tl.minimum(i_all // EACH, models - 1)  # the last slab may go beyond the last head
        return tl.load(p_seed + i_model)[None, :], i_all - i_model * EACH


@triton.jit(do_not_specialize=["size", "threshold"])
def _keep_kernel(p_seed, p_names, p_keep, size, threshold, keep_scale, BLOCK: tl.constexpr):
    """k of `size` numbers of each model, as of four heads and size / 4 edges."""
    i_model = tl.program_id(2).to(tl.int64)
    i_four = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_name = _edge(p_names, i_four, i_four * 4 < size)
    b_keep = _keep(p_seed + i_model, i_name, threshold, keep_scale, None, 4, BLOCK, 4)
    o_keep = i_four[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(p_keep + i_model * size + o_keep, b_keep, o_keep < size)


# Forward.


@triton.jit(do_not_specialize=["num_parts", "threshold", "models"])
def _forward_kernel(
    p_x,
    p_x_dst,
    p_att,
    p_score_src,
    p_score_dst,
    p_score_edge,
    p_ptr,
    p_src,
    p_perm,
    p_part_row,
    p_part_start,
    p_seed,
    p_names,
    p_out,
    p_lse,
    p_out_plus,
    p_mass_plus,
    p_parts,
    p_parts_h,
    num_parts,
    models,
    slope,
    scale,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one dst i: O_i = sum_j k_ij alpha_ij x_j, alpha_ij = exp(e_ij - lse_i), lse_i = log sum_j exp e_ij.

    e_ij is LeakyReLU(s_j + d_i + u_ij); with `p_x_dst`, att . LeakyReLU(x_j + x_i), or scale <x_i, x_j> without att.
    O+ and A+ are what the edges with z > 0 give of O and of the attention mass. The softmax is online: what was summed
    is scaled down when a larger score comes. A part leaves O, O+ in `p_parts` and lse, A+ in `p_parts_h`.
    """
    H = _all(EACH, models)
    i_row, start, count, is_whole, is_part = _item(p_ptr, p_part_row, p_part_start, num_parts, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_row_h = _offset(i_row, H * C) + o_hc, _offset(i_row, H) + i_h
    b_d = _row(p_score_dst, o_row_h, m_h)
    b_x_dst = _row(p_x_dst, o_row, m_hc)
    b_att = _row(p_att, o_hc, m_hc)

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_mass_plus = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        m_ehc = m_e[:, None, None] & m_hc[None, :, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        i_edge = _edge(p_perm, start + o_e, m_e)
        o_x = _offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_ehc, other=0.0).to(tl.float32)
        b_z = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
        if p_att is not None:
            b_e = tl.sum(b_att[None, :, :] * _leaky(b_x + b_x_dst[None, :, :], slope), 2)
        elif p_x_dst is not None:
            b_e = tl.sum(b_x * b_x_dst[None, :, :], 2) * scale
        else:
            b_z += b_d
            b_z += _gather(p_score_src, i_src, i_h, m_eh, H)
            b_z += _gather(p_score_edge, i_edge, i_h, m_eh, H)
            b_e = _leaky(b_z, slope)
        b_e = tl.where(m_eh, b_e, float("-inf"))

        b_top_new = tl.maximum(b_top, tl.max(b_e, 0))
        b_base = _finite(b_top_new)
        b_shrink = tl.exp2((b_top - b_base) * LOG2E)
        b_exp = tl.exp2((b_e - b_base[None, :]) * LOG2E)
        b_top = b_top_new
        b_mass = b_mass * b_shrink[None, :] + b_exp
        b_w = b_exp
        if p_seed is not None:
            i_name = _edge(p_names, start + o_e, m_e)
            b_w *= _keep(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)
        if p_out_plus is not None:
            b_mass_plus = b_mass_plus * b_shrink[None, :] + tl.where(b_z > 0.0, b_exp, 0.0)
            b_w = tl.where(b_z > 0.0, b_w, 0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_w[:, :, None] * b_x, 0)

    b_mass, b_mass_plus = tl.sum(b_mass, 0), tl.sum(b_mass_plus, 0)
    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    b_lse = b_top + tl.log2(b_mass) * LN2
    b_out /= b_mass[:, None]
    b_out_plus /= b_mass[:, None]
    b_mass_plus /= b_mass
    if p_parts is not None:
        o_part, o_part_h = _offset(tl.program_id(0), 2 * H * C) + o_hc, _offset(tl.program_id(0), 2 * H) + i_h
        tl.store(p_parts + o_part, b_out, mask=m_hc & is_part)
        tl.store(p_parts_h + o_part_h, b_lse, mask=m_h & is_part)
        if p_out_plus is not None:
            tl.store(p_parts + o_part + H * C, b_out_plus, mask=m_hc & is_part)
            tl.store(p_parts_h + o_part_h + H, b_mass_plus, mask=m_h & is_part)
    tl.store(p_out + o_row, b_out, mask=m_hc & is_whole)
    tl.store(p_lse + o_row_h, _finite(b_lse), mask=m_h & is_whole)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus, mask=m_hc & is_whole)
        tl.store(p_mass_plus + o_row_h, b_mass_plus, mask=m_h & is_whole)


@triton.jit(do_not_specialize=["models"])
def _merge_kernel(
    p_parts,
    p_parts_h,
    p_rows,
    p_first,
    p_out,
    p_lse,
    p_out_plus,
    p_mass_plus,
    models,
    EACH: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """For one split row of parts q, in their order: O = sum_q softmax(lse_q) O_q, lse = log sum_q exp lse_q."""
    H = _all(EACH, models)
    i_row = tl.load(p_rows + tl.program_id(0))
    first, stop = tl.load(p_first + tl.program_id(0)), tl.load(p_first + tl.program_id(0) + 1)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]

    b_top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_mass = tl.zeros([BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([BLOCK_H], tl.float32)
    b_out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_out_plus = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for i_first in tl.range(first, stop, BLOCK_E):
        i_part = i_first + tl.arange(0, BLOCK_E)
        m_eh = (i_part < stop)[:, None] & m_h[None, :]
        m_ehc = (i_part < stop)[:, None, None] & m_hc[None, :, :]
        p_part = p_parts + _offset(i_part, 2 * H * C)[:, None, None] + o_hc[None, :, :]
        p_part_h = p_parts_h + _offset(i_part, 2 * H)[:, None] + i_h[None, :]
        b_e = tl.load(p_part_h, mask=m_eh, other=float("-inf"))
        b_top_new = tl.maximum(b_top, tl.max(b_e, 0))
        b_base = _finite(b_top_new)
        b_shrink = tl.exp2((b_top - b_base) * LOG2E)
        b_exp = tl.exp2((b_e - b_base[None, :]) * LOG2E)
        b_top = b_top_new
        b_mass = b_mass * b_shrink + tl.sum(b_exp, 0)
        b_out = b_out * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * tl.load(p_part, mask=m_ehc, other=0.0), 0)
        if p_out_plus is not None:
            b_part = tl.load(p_part + H * C, mask=m_ehc, other=0.0)
            b_out_plus = b_out_plus * b_shrink[:, None] + tl.sum(b_exp[:, :, None] * b_part, 0)
            b_part = tl.load(p_part_h + H, mask=m_eh, other=0.0)
            b_mass_plus = b_mass_plus * b_shrink + tl.sum(b_exp * b_part, 0)

    b_mass = tl.where(b_mass == 0.0, 1.0, b_mass)
    o_row, o_row_h = _offset(i_row, H * C) + o_hc, _offset(i_row, H) + i_h
    tl.store(p_out + o_row, b_out / b_mass[:, None], mask=m_hc)
    tl.store(p_lse + o_row_h, _finite(b_top + tl.log2(b_mass) * LN2), mask=m_h)
    if p_out_plus is not None:
        tl.store(p_out_plus + o_row, b_out_plus / b_mass[:, None], mask=m_hc)
        tl.store(p_mass_plus + o_row_h, b_mass_plus / b_mass, mask=m_h)


# Backward, additive. With g_ij = k_ij <dO_i, x_j> and D_i = sum_j alpha_ij g_ij = <dO_i, O_i>:
#   grad z_ij = alpha_ij (g_ij - D_i) LeakyReLU'(z_ij), grad s_j = sum_i grad z_ij, grad d_i = sum_j grad z_ij,
#   grad x_j = sum_i k_ij alpha_ij dO_i.


@triton.jit(do_not_specialize=["num_dst", "models"])
def _mean_kernel(
    p_grad,
    p_out,
    p_out_plus,
    p_mass_plus,
    p_mean,
    p_grad_dst,
    num_dst,
    slope,
    models,
    EACH: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """For a block of dst, from what the forward saved: D_i, grad d_i = (1 - slope) (<dO_i, O+_i> - D_i A+_i)."""
    H = _all(EACH, models)
    i_row = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    m_eh = (i_row < num_dst)[:, None] & (i_h < H)[None, :]
    m_ehc = m_eh[:, :, None] & (o_c < C)[None, None, :]
    o_row = _offset(i_row, H * C)[:, None, None] + (i_h[:, None] * C + o_c[None, :])[None, :, :]
    o_row_h = _offset(i_row, H)[:, None] + i_h[None, :]
    b_grad = tl.load(p_grad + o_row, mask=m_ehc, other=0.0).to(tl.float32)
    b_mean = tl.sum(b_grad * tl.load(p_out + o_row, mask=m_ehc, other=0.0).to(tl.float32), 2)
    tl.store(p_mean + o_row_h, b_mean, mask=m_eh)
    if p_grad_dst is not None:
        b_plus = tl.sum(b_grad * tl.load(p_out_plus + o_row, mask=m_ehc, other=0.0).to(tl.float32), 2)
        b_mass_plus = tl.load(p_mass_plus + o_row_h, mask=m_eh, other=0.0)
        tl.store(p_grad_dst + o_row_h, (1.0 - slope) * (b_plus - b_mean * b_mass_plus), mask=m_eh)


@triton.jit(do_not_specialize=["models"])
def _segment_mean_kernel(
    p_g,
    p_score_src,
    p_score_dst,
    p_score_edge,
    p_lse,
    p_ptr,
    p_src,
    p_perm,
    p_rows,
    p_mean,
    p_grad_dst,
    models,
    slope,
    EACH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one dst, from g `[E, H]`: D_i, grad d_i = (1 - slope) sum_(z > 0) alpha_ij (g_ij - D_i).

    One program for each row of `p_rows`; without it for each row of no more than `SPLIT` edges.
    """
    H = _all(EACH, models)
    i_row = tl.program_id(0).to(tl.int64)
    if p_rows is not None:
        i_row = tl.load(p_rows + i_row)
    start = tl.load(p_ptr + i_row)
    count = tl.load(p_ptr + i_row + 1) - start
    is_ours = count >= 0
    if p_rows is None:
        is_ours = count <= SPLIT
    count = tl.where(is_ours, count, 0)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = i_h < H
    o_row_h = _offset(i_row, H) + i_h
    b_d, b_lse = _row(p_score_dst, o_row_h, m_h), _row(p_lse, o_row_h, m_h)

    b_mean = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_mean_plus = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        b_g = _gather(p_g, start + o_e, i_h, m_eh, H)
        b_z = tl.zeros([BLOCK_E, BLOCK_H], tl.float32) + b_d
        b_z += _gather(p_score_src, i_src, i_h, m_eh, H)
        b_z += _gather(p_score_edge, _edge(p_perm, start + o_e, m_e), i_h, m_eh, H)
        b_alpha = _alpha(b_z, b_lse, slope, m_eh)
        b_alpha_plus = tl.where(b_z > 0.0, b_alpha, 0.0)
        b_mean += b_alpha * b_g
        b_mean_plus += b_alpha_plus * b_g
        b_mass_plus += b_alpha_plus

    b_mean, b_mean_plus, b_mass_plus = tl.sum(b_mean, 0), tl.sum(b_mean_plus, 0), tl.sum(b_mass_plus, 0)
    tl.store(p_mean + o_row_h, b_mean, mask=m_h & is_ours)
    if p_grad_dst is not None:
        tl.store(p_grad_dst + o_row_h, (1.0 - slope) * (b_mean_plus - b_mean * b_mass_plus), mask=m_h & is_ours)


@triton.jit(do_not_specialize=["num_parts", "threshold", "models"])
def _backward_kernel(
    p_grad,
    p_x,
    p_score_src,
    p_score_dst,
    p_score_edge,
    p_lse,
    p_mean,
    p_g,
    p_ptr,
    p_dst,
    p_place,
    p_perm,
    p_part_row,
    p_part_start,
    p_seed,
    p_names,
    p_grad_x,
    p_grad_src,
    p_grad_edge,
    p_parts,
    num_parts,
    models,
    slope,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one src j: grad x_j = sum_i k_ij alpha_ij dO_i, grad u_ij = grad z_ij, grad s_j = sum_i grad z_ij.

    In one pass where D (`p_mean`) is known. Else g (`p_g`) is written on a first pass, which has `p_grad_x`, and read
    on a second, which has `p_mean`. A part leaves grad x, grad s in its row of `p_parts`.
    """
    H = _all(EACH, models)
    i_row, start, count, is_whole, is_part = _item(p_ptr, p_part_row, p_part_start, num_parts, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_row_h = _offset(i_row, H * C) + o_hc, _offset(i_row, H) + i_h
    b_s = _row(p_score_src, o_row_h, m_h)
    b_x = _row(p_x, o_row, m_hc)

    b_grad_src = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)  # summed over edges at the end
    b_grad_x = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        i_edge = _edge(p_perm, i_place, m_e)
        b_z = tl.zeros([BLOCK_E, BLOCK_H], tl.float32) + b_s
        b_z += _gather(p_score_dst, i_dst, i_h, m_eh, H)
        b_z += _gather(p_score_edge, i_edge, i_h, m_eh, H)
        b_alpha = _alpha(b_z, _gather(p_lse, i_dst, i_h, m_eh, H), slope, m_eh)
        if p_grad_x is not None:
            o_grad = _offset(i_dst, H * C)[:, None, None] + o_hc[None, :, :]
            m_ehc = m_e[:, None, None] & m_hc[None, :, :]
            b_grad = tl.load(p_grad + o_grad, mask=m_ehc, other=0.0).to(tl.float32)
            b_keep = tl.full([BLOCK_E, BLOCK_H], 1.0, tl.float32)
            if p_seed is not None:
                i_name = _edge(p_names, i_place, m_e)
                b_keep = _keep(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
            b_grad_x += tl.sum((b_alpha * b_keep)[:, :, None] * b_grad, 0)
            b_g = b_keep * tl.sum(b_grad * b_x, 2)
            if p_g is not None:
                tl.store(p_g + _offset(i_place, H)[:, None] + i_h[None, :], b_g, mask=m_eh)
        else:
            b_g = _gather(p_g, i_place, i_h, m_eh, H)
        if p_mean is not None:
            b_grad_z = b_alpha * (b_g - _gather(p_mean, i_dst, i_h, m_eh, H)) * tl.where(b_z > 0.0, 1.0, slope)
            b_grad_src += b_grad_z
            if p_grad_edge is not None:
                tl.store(p_grad_edge + _offset(i_edge, H)[:, None] + i_h[None, :], b_grad_z, mask=m_eh)

    if p_grad_x is not None:
        tl.store(p_grad_x + o_row, b_grad_x, mask=m_hc & is_whole)
        if p_parts is not None:
            tl.store(p_parts + _offset(tl.program_id(0), H * C + H) + o_hc, b_grad_x, mask=m_hc & is_part)
    if p_grad_src is not None:
        b_grad_src = tl.sum(b_grad_src, 0)
        tl.store(p_grad_src + o_row_h, b_grad_src, mask=m_h & is_whole)
        if p_parts is not None:
            tl.store(p_parts + _offset(tl.program_id(0), H * C + H) + H * C + i_h, b_grad_src, mask=m_h & is_part)


@triton.jit(do_not_specialize=["models"])
def _sum_kernel(
    p_parts,
    p_rows,
    p_first,
    p_wide,
    p_narrow,
    models,
    EACH_WIDE: tl.constexpr,
    EACH_NARROW: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """For one split row: the sum of its parts in their order, `WIDE` numbers to one result, `NARROW` to another."""
    WIDE, NARROW = _all(EACH_WIDE, models), _all(EACH_NARROW, models)
    i_row = tl.load(p_rows + tl.program_id(0))
    first, stop = tl.load(p_first + tl.program_id(0)), tl.load(p_first + tl.program_id(0) + 1)
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    b_sum = tl.zeros([BLOCK_W], tl.float32)
    for i_first in tl.range(first, stop, BLOCK_E):
        i_part = i_first + tl.arange(0, BLOCK_E)
        m_part = (i_part < stop)[:, None] & (o_w < WIDE + NARROW)[None, :]
        b_sum += tl.sum(tl.load(p_parts + _offset(i_part, WIDE + NARROW)[:, None] + o_w, mask=m_part, other=0.0), 0)
    if p_wide is not None:
        tl.store(p_wide + _offset(i_row, WIDE) + o_w, b_sum, mask=o_w < WIDE)
    if p_narrow is not None:
        tl.store(p_narrow + _offset(i_row, NARROW) + o_w - WIDE, b_sum, mask=(o_w >= WIDE) & (o_w < WIDE + NARROW))


# Backward, pair. D as above and grad e_ij = alpha_ij (g_ij - D_i); grad z_ij = att grad e_ij LeakyReLU'(z_ij) with
# z_ij = x_j + x_i, or for the scaled product scale grad e_ij times the other end's features.


@triton.jit(do_not_specialize=["num_parts", "threshold", "models"])
def _backward_pair_dst_kernel(
    p_grad,
    p_x,
    p_x_dst,
    p_att,
    p_out,
    p_lse,
    p_weights,
    p_ptr,
    p_src,
    p_part_row,
    p_part_start,
    p_seed,
    p_names,
    p_grad_x_dst,
    p_grad_att,
    p_parts,
    num_parts,
    models,
    slope,
    scale,
    threshold,
    keep_scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one dst i: grad x_i = sum_j grad z_ij, and its share of grad att = sum_ij grad e_ij LeakyReLU(z_ij).

    Every edge leaves k_ij alpha_ij and grad e_ij in `p_weights` `[E, 2, H]`, for the pass over src.
    """
    H = _all(EACH, models)
    i_row, start, count, is_whole, is_part = _item(p_ptr, p_part_row, p_part_start, num_parts, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = _offset(i_row, H * C) + o_hc, _offset(tl.program_id(0), H * C) + o_hc
    b_x_dst, b_att = _row(p_x_dst, o_row, m_hc), _row(p_att, o_hc, m_hc)
    b_grad, b_lse = _row(p_grad, o_row, m_hc), _row(p_lse, _offset(i_row, H) + i_h, m_h)
    b_mean = tl.sum(b_grad * _row(p_out, o_row, m_hc), 1)

    b_grad_x_dst = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    b_grad_att = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        i_src = tl.load(p_src + start + o_e, mask=m_e, other=0)
        o_x = _offset(i_src, H * C)[:, None, None] + o_hc[None, :, :]
        b_x = tl.load(p_x + o_x, mask=m_e[:, None, None] & m_hc[None, :, :], other=0.0).to(tl.float32)
        b_z = b_x + b_x_dst[None, :, :]
        b_g = tl.sum(b_x * b_grad[None, :, :], 2)
        if p_att is not None:
            b_e = tl.sum(b_att[None, :, :] * _leaky(b_z, slope), 2)
        else:
            b_e = tl.sum(b_x * b_x_dst[None, :, :], 2) * scale
        b_alpha = _alpha(b_e, b_lse, 1.0, m_eh)
        b_w = b_alpha
        if p_seed is not None:
            i_name = _edge(p_names, start + o_e, m_e)
            b_keep = _keep(p_seed, i_name, threshold, keep_scale, models, EACH, BLOCK_E, BLOCK_H)
            b_w *= b_keep
            b_g *= b_keep
        b_grad_e = b_alpha * (b_g - b_mean)
        p_edge = p_weights + _offset(start + o_e, 2 * H)[:, None] + i_h[None, :]
        tl.store(p_edge, b_w, mask=m_eh)
        tl.store(p_edge + H, b_grad_e, mask=m_eh)
        if p_att is not None:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * tl.where(b_z > 0.0, 1.0, slope), 0)
            b_grad_att += tl.sum(b_grad_e[:, :, None] * _leaky(b_z, slope), 0)
        else:
            b_grad_x_dst += tl.sum(b_grad_e[:, :, None] * b_x, 0)

    b_grad_x_dst *= b_att if p_att is not None else scale
    tl.store(p_grad_x_dst + o_row, b_grad_x_dst, mask=m_hc & is_whole)
    if p_parts is not None:
        tl.store(p_parts + o_item, b_grad_x_dst, mask=m_hc & is_part)
    if p_grad_att is not None:
        tl.store(p_grad_att + o_item, b_grad_att, mask=m_hc)


@triton.jit(do_not_specialize=["num_parts", "models"])
def _backward_pair_src_kernel(
    p_grad,
    p_x,
    p_x_dst,
    p_att,
    p_weights,
    p_ptr,
    p_dst,
    p_place,
    p_part_row,
    p_part_start,
    p_grad_x,
    p_parts,
    num_parts,
    models,
    slope,
    scale,
    EACH: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For one src j: grad x_j = sum_i k_ij alpha_ij dO_i + grad z_ij, from what the pass over dst left."""
    H = _all(EACH, models)
    i_row, start, count, is_whole, is_part = _item(p_ptr, p_part_row, p_part_start, num_parts, SPLIT)
    i_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_hc = i_h[:, None] * C + o_c[None, :]
    m_h = i_h < H
    m_hc = m_h[:, None] & (o_c < C)[None, :]
    o_row, o_item = _offset(i_row, H * C) + o_hc, _offset(tl.program_id(0), H * C) + o_hc
    b_x, b_att = _row(p_x, o_row, m_hc), _row(p_att, o_hc, m_hc)

    b_sum = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of k alpha dO
    b_sum_z = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)  # of grad z, less its constant factor
    for o_first in tl.range(0, count, BLOCK_E, num_stages=STAGES):
        o_e = o_first + tl.arange(0, BLOCK_E)
        m_e = o_e < count
        m_eh = m_e[:, None] & m_h[None, :]
        m_ehc = m_e[:, None, None] & m_hc[None, :, :]
        i_dst = tl.load(p_dst + start + o_e, mask=m_e, other=0)
        i_place = tl.load(p_place + start + o_e, mask=m_e, other=0)
        o_dst = _offset(i_dst, H * C)[:, None, None] + o_hc[None, :, :]
        p_edge = p_weights + _offset(i_place, 2 * H)[:, None] + i_h[None, :]
        b_w = tl.load(p_edge, mask=m_eh, other=0.0)
        b_grad_e = tl.load(p_edge + H, mask=m_eh, other=0.0)
        b_grad = tl.load(p_grad + o_dst, mask=m_ehc, other=0.0).to(tl.float32)
        b_x_dst = tl.load(p_x_dst + o_dst, mask=m_ehc, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_w[:, :, None] * b_grad, 0)
        if p_att is not None:
            b_x_dst = tl.where(b_x + b_x_dst > 0.0, 1.0, slope)
        b_sum_z += tl.sum(b_grad_e[:, :, None] * b_x_dst, 0)

    b_sum += b_sum_z * (b_att if p_att is not None else scale)
    tl.store(p_grad_x + o_row, b_sum, mask=m_hc & is_whole)
    if p_parts is not None:
        tl.store(p_parts + o_item, b_sum, mask=m_hc & is_part)


# On the host.


class _Parts(NamedTuple):
    """The parts of the rows of more than `SPLIT` edges."""

    row: Tensor  # [P], of each part
    start: Tensor  # [P], its first edge
    rows: Tensor  # [S], the rows that are split
    first: Tensor  # [S + 1], the parts of rows[k] are first[k]:first[k + 1]


_PARTS: WeakKeyDictionary[Edges, dict[Side, _Parts | None]] = WeakKeyDictionary()


def parts(edges: Edges, side: Side) -> _Parts | None:
    """Return the parts of long rows by "dst" or by "src", remembered with the edges, or None if no row is long.

    Without a device sync: `Edges` counted the long rows when it was built.
    """
    known = _PARTS.setdefault(edges, {})
    if side not in known:
        with torch.inference_mode(False):
            ptr = edges.rowptr if side == "dst" else edges.transpose[0]
            long = count_long(ptr.diff(), SPLIT) if edges.long is None else edges.long[side]
            known[side] = _cut(ptr, *map(int, long))
    return known[side]


def _cut(ptr: Tensor, num_rows: int, num_parts: int) -> _Parts | None:
    """Cut the `num_rows` long rows of `ptr` into `num_parts` parts."""
    if num_rows == 0:
        return None
    degree = ptr.diff()
    rows = places_of(degree > SPLIT, num_rows)
    number = (degree.index_select(0, rows) + SPLIT - 1) // SPLIT
    first = torch.cat([number.new_zeros(1), number.cumsum(0)])
    row = rows.repeat_interleave(number, output_size=num_parts)
    place = torch.arange(num_parts, device=ptr.device) - first[:-1].repeat_interleave(number, output_size=num_parts)
    return _Parts(row, ptr.index_select(0, row) + place * SPLIT, rows, first)


class _Tile(NamedTuple):
    """How a program walks over its edges: `edges x heads x channels` at a time."""

    edges: int
    heads: int
    channels: int
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        return {
            "BLOCK_E": self.edges,
            "BLOCK_H": self.heads,
            "BLOCK_C": self.channels,
            "num_warps": self.warps,
        }


def _tile(models: int, heads: int, channels: int, degree: float) -> _Tile:
    """A slab of heads of up to 256 numbers, or one wider head; 1024 numbers a warp, less for short rows.

    Stacks of all sizes use the same tile, since every further tile is one more kernel to compile.
    Loads run ahead, through shared memory, where rows are long enough to gain by it and the tiles fit.
    """
    block_c = triton.next_power_of_2(max(1, channels))
    block_h = max(1, 256 // block_c)
    if models == 1:
        block_h = min(triton.next_power_of_2(heads), block_h)
    warps = min(16, max(1, block_c // 256))
    block_e = max(1, 1024 * warps // (block_h * block_c))
    block_e = min(block_e, max(4, triton.next_power_of_2(round(degree))))
    return _Tile(block_e, block_h, block_c, warps, 3 if degree > 4 * block_e and warps <= 8 else 1)


def _stack(models: int, heads: int) -> dict[str, Any]:
    """The kernels' arguments for the heads of all models."""
    return {"models": None if models == 1 else models, "EACH": heads // models}


class _Walk:
    """A launch over the rows of one side, and over the parts of its long rows."""

    def __init__(self, edges: Edges, side: Side, models: int, heads: int, channels: int) -> None:
        self.ptr = edges.rowptr if side == "dst" else edges.transpose[0]
        self.parts = parts(edges, side)
        self.models, self.heads, self.channels = models, heads, channels
        self.num_rows = self.ptr.numel() - 1
        self.num_parts = 0 if self.parts is None else self.parts.row.numel()
        mostly_parts = 4 * SPLIT * self.num_parts > edges.num_edges
        self.tile = _tile(models, heads, channels, SPLIT if mostly_parts else edges.num_edges / self.num_rows)

    @property
    def items(self) -> int:
        return self.num_parts + self.num_rows

    @property
    def slabs(self) -> int:
        return int(triton.cdiv(self.heads, self.tile.heads))

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "p_ptr": self.ptr,
            "p_part_row": None if self.parts is None else self.parts.row,
            "p_part_start": None if self.parts is None else self.parts.start,
            "num_parts": self.num_parts,
            **_stack(self.models, self.heads),
            "C": self.channels,
            "SPLIT": SPLIT,
            "STAGES": self.tile.stages,
            **self.tile.blocks,
        }

    def hold(self, *widths: int) -> Tensor | None:
        """Room for a result of each part."""
        if self.parts is None:
            return None
        return torch.empty(self.num_parts, *widths, dtype=torch.float32, device=self.ptr.device)

    def sum(self, held: Tensor | None, wide: Tensor | None, narrow: Tensor | None = None) -> None:
        """Sum the parts' results, `[P, H C]` or `[P, H C + H]`, into those of their rows."""
        if self.parts is None or held is None:
            return
        width = self.heads * self.channels
        _sum_kernel[(self.parts.rows.numel(), triton.cdiv(held.size(1), 256))](
            held,
            self.parts.rows,
            self.parts.first,
            wide,
            narrow,
            None if self.models == 1 else self.models,
            EACH_WIDE=width // self.models,
            EACH_NARROW=(held.size(1) - width) // self.models,
            BLOCK_E=8,
            BLOCK_W=256,
        )


def _drop(dropout: float, seed: Tensor | None, names: Tensor | None = None) -> dict[str, Any]:
    """What the kernels need for dropout: a coefficient is kept where its random word is at least the threshold."""
    if dropout == 0.0 or seed is None:
        return {"p_seed": None, "p_names": None, "threshold": 0, "keep_scale": 1.0}
    shared = {"p_seed": seed.contiguous(), "p_names": names}
    if dropout == 1.0:
        return {**shared, "threshold": 0, "keep_scale": 0.0}
    return {**shared, "threshold": int(dropout * 2**32), "keep_scale": 1.0 / (1.0 - dropout)}


def _beside(models: torch.Size, *tensors: Tensor | None) -> list[Any]:
    """The tensors, contiguous; with models `[S, rows, H, ...]` as `[rows, S H, ...]`, their heads side by side."""
    if models:
        tensors = tuple(None if tensor is None else tensor.movedim(0, 1).flatten(1, 2) for tensor in tensors)
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _apart(models: torch.Size, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The inverse of `_beside`."""
    if not models:
        return tensors
    return tuple(None if tensor is None else tensor.unflatten(1, (*models, -1)).movedim(1, 0) for tensor in tensors)


def forward(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    score_edge: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    plus: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the output `[N_dst, H, C]` in `dtype` and the log-sum-exp `[N_dst, H]` in float32.

    Where `plus`, also the part of output and mass with z > 0, in the same dtypes.
    """
    return _forward(x, None, None, score_src, score_dst, score_edge, edges, negative_slope, dropout, seed, dtype, plus)


def _forward(
    x: Tensor,
    x_dst: Tensor | None,
    att: Tensor | None,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    score_edge: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
    plus: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    models = x.shape[:-3]
    x, x_dst, score_src, score_dst, score_edge = _beside(models, x, x_dst, score_src, score_dst, score_edge)
    num_dst, (_, heads, channels) = edges.num_dst, x.shape
    out = x.new_empty(num_dst, heads, channels, dtype=dtype)
    lse = x.new_empty(num_dst, heads, dtype=torch.float32)
    out_plus, mass_plus = (torch.empty_like(out), torch.empty_like(lse)) if plus else (None, None)
    if out.numel() == 0:
        return _apart(models, out, lse.zero_(), out_plus, mass_plus.zero_() if mass_plus is not None else None)
    walk = _Walk(edges, "dst", models.numel(), heads, channels)
    held, held_h = walk.hold(2, heads, channels), walk.hold(2, heads)
    with torch.cuda.device_of(x):
        _forward_kernel[(walk.items, walk.slabs)](
            p_x=x,
            p_x_dst=x_dst,
            p_att=None if att is None else att.contiguous(),
            p_score_src=score_src,
            p_score_dst=score_dst,
            p_score_edge=score_edge,
            p_src=edges.src,
            p_perm=edges.perm,
            p_out=out,
            p_lse=lse,
            p_out_plus=out_plus,
            p_mass_plus=mass_plus,
            p_parts=held,
            p_parts_h=held_h,
            slope=float(negative_slope),
            scale=channels**-0.5,
            **_drop(dropout, seed, edges.names_by_dst),
            **walk.arguments,
        )
        if walk.parts is not None:
            _merge_kernel[(walk.parts.rows.numel(), walk.slabs)](
                held,
                held_h,
                walk.parts.rows,
                walk.parts.first,
                out,
                lse,
                out_plus,
                mass_plus,
                **_stack(walk.models, heads),
                C=channels,
                **walk.tile.blocks,
            )
    return _apart(models, out, lse, out_plus, mass_plus)


def backward(
    grad: Tensor,
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    score_edge: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    out_plus: Tensor | None,
    mass_plus: Tensor | None,
    edge_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the scores of src and dst, and of edges in the caller's order.

    From `out` and what `plus` gave, in one pass over the features; without them in one such pass and two over `[E, H]`.
    """
    models = x.shape[:-3]
    grad, x, score_src, score_dst, score_edge = _beside(models, grad, x, score_src, score_dst, score_edge)
    out, lse, out_plus, mass_plus = _beside(models, out, lse, out_plus, mass_plus)
    terms = {"p_score_src": score_src, "p_score_dst": score_dst, "p_score_edge": score_edge, "p_lse": lse}
    num_src, num_dst, num_edges, (_, heads, channels) = edges.num_src, edges.num_dst, edges.num_edges, x.shape

    def new(rows: int, wanted: bool) -> Tensor | None:
        return x.new_empty(rows, heads, dtype=torch.float32) if wanted else None

    grad_x, grad_edge = torch.empty_like(x), new(num_edges, edge_grad)
    grad_src, grad_dst = new(num_src, score_src is not None), new(num_dst, score_dst is not None)
    if num_edges == 0 or x.numel() == 0:
        for result in (grad_x, grad_src, grad_dst, grad_edge):
            if result is not None:
                result.zero_()
        return _apart(models, grad_x, grad_src, grad_dst, grad_edge)

    drop = _drop(dropout, seed, edges.names_by_dst)
    by_src = {"p_grad_src": grad_src, "p_grad_edge": grad_edge}
    scored = score_src is not None or score_dst is not None or edge_grad
    saved = out is not None and (out_plus is not None or score_dst is None)
    mean = new(num_dst, scored)
    size = models.numel()
    with torch.cuda.device_of(x):
        if not scored:
            _over_src(edges, terms, negative_slope, size, heads, channels, p_grad=grad, p_grad_x=grad_x, **drop)
        elif saved:
            tile = _tile(size, heads, channels, num_dst)
            _mean_kernel[(triton.cdiv(num_dst, tile.edges), triton.cdiv(heads, tile.heads))](
                grad,
                out,
                out_plus,
                mass_plus,
                mean,
                grad_dst,
                num_dst,
                float(negative_slope),
                **_stack(size, heads),
                C=channels,
                **tile.blocks,
            )
            features = {"p_grad": grad, "p_x": x, "p_grad_x": grad_x}
            _over_src(edges, terms, negative_slope, size, heads, channels, **features, p_mean=mean, **by_src, **drop)
        else:
            g = x.new_empty(num_edges, heads, dtype=torch.float32)
            features = {"p_grad": grad, "p_x": x, "p_grad_x": grad_x}
            _over_src(edges, terms, negative_slope, size, heads, channels, **features, p_g=g, **drop)
            _segment_mean(edges, terms, negative_slope, size, heads, g, mean, grad_dst)
            if score_src is not None or edge_grad:
                _over_src(
                    edges, terms, negative_slope, size, heads, 0, p_g=g, p_mean=mean, **by_src, **_drop(0.0, None)
                )
    return _apart(models, grad_x, grad_src, grad_dst, grad_edge)


def _over_src(
    edges: Edges,
    terms: dict[str, Any],
    negative_slope: float,
    models: int,
    heads: int,
    channels: int,
    *,
    p_grad: Tensor | None = None,
    p_x: Tensor | None = None,
    p_mean: Tensor | None = None,
    p_g: Tensor | None = None,
    p_grad_x: Tensor | None = None,
    p_grad_src: Tensor | None = None,
    p_grad_edge: Tensor | None = None,
    **drop: Any,
) -> None:
    """Launch the pass over the rows of src, and the sum of their parts."""
    _, dst, place = edges.transpose
    walk = _Walk(edges, "src", models, heads, channels)
    held = walk.hold(heads * channels + heads)
    _backward_kernel[(walk.items, walk.slabs)](
        p_grad=p_grad,
        p_x=p_x,
        **terms,
        p_mean=p_mean,
        p_g=p_g,
        p_dst=dst,
        p_place=place,
        p_perm=edges.perm,
        p_grad_x=p_grad_x,
        p_grad_src=p_grad_src,
        p_grad_edge=p_grad_edge,
        p_parts=held,
        slope=float(negative_slope),
        **drop,
        **walk.arguments,
    )
    walk.sum(held, p_grad_x, p_grad_src)


def _segment_mean(
    edges: Edges,
    terms: dict[str, Any],
    negative_slope: float,
    models: int,
    heads: int,
    g: Tensor,
    mean: Tensor | None,
    grad_dst: Tensor | None,
) -> None:
    """Launch the pass over `[E, H]` by dst; long rows by a launch of their own, in wide programs and not in parts."""
    cut = parts(edges, "dst")
    tile = _tile(models, heads, 1, edges.num_edges / edges.num_dst)
    launches: list[tuple[Tensor | None, int, int, int, int]] = [(None, edges.num_dst, tile.edges, tile.stages, 1)]
    if cut is not None:
        launches.append((cut.rows, cut.rows.numel(), 4096 // tile.heads, 3, 8))
    for rows, number, block_e, stages, warps in launches:
        _segment_mean_kernel[(number, triton.cdiv(heads, tile.heads))](
            p_g=g,
            **terms,
            p_ptr=edges.rowptr,
            p_src=edges.src,
            p_perm=edges.perm,
            p_rows=rows,
            p_mean=mean,
            p_grad_dst=grad_dst,
            slope=float(negative_slope),
            **_stack(models, heads),
            SPLIT=SPLIT,
            BLOCK_E=block_e,
            BLOCK_H=tile.heads,
            STAGES=stages,
            num_warps=warps,
        )


def keep(seed: Tensor, size: int, dropout: float, dtype: torch.dtype, names: Tensor | None = None) -> Tensor:
    """`[size]`, or `[S, size]` for seeds `[S]`: 0, or 1 / (1 - p), by the words of the counters (0, 0), (1, 0), ...;
    with `names` `[size / 4]` by those of (names[0], 0), (names[1], 0), ...
    """
    made = torch.empty(*seed.shape, size, dtype=dtype, device=seed.device)
    if made.numel():
        drop = _drop(dropout, seed, names)
        with torch.cuda.device_of(seed):
            _keep_kernel[(triton.cdiv(size, 1024), 1, seed.numel())](p_keep=made, size=size, BLOCK=256, **drop)
    return made


def forward_pair(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the output `[N_dst, H, C]` in `dtype` and log-sum-exp `[N_dst, H]` of a score by both ends' features."""
    out, lse, _, _ = _forward(x, x_dst, att, None, None, None, edges, negative_slope, dropout, seed, dtype, False)
    return out, lse


def backward_pair(
    grad: Tensor,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, x_dst and att, in one pass over dst and one over src; holds two numbers an edge and head."""
    models = x.shape[:-3]
    grad, x, x_dst, out, lse = _beside(models, grad, x, x_dst, out, lse)
    (_, heads, channels), num_edges = x.shape, edges.num_edges
    grad_x, grad_x_dst = torch.empty_like(x), torch.empty_like(x_dst)
    if num_edges == 0 or x.numel() == 0:
        grad_att = None if att is None else torch.zeros_like(att)
        return *_apart(models, grad_x.zero_(), grad_x_dst.zero_()), grad_att

    weights = x.new_empty(num_edges, 2, heads, dtype=torch.float32)
    by_dst, by_src = (_Walk(edges, side, models.numel(), heads, channels) for side in ("dst", "src"))
    held_dst, held_src = by_dst.hold(heads * channels), by_src.hold(heads * channels)
    held_att = None if att is None else x.new_empty(by_dst.items, heads, channels, dtype=torch.float32)
    shared: dict[str, Any] = {"p_grad": grad, "p_x": x, "p_x_dst": x_dst, "p_weights": weights}
    shared |= {"p_att": None if att is None else att.contiguous()}
    shared |= {"slope": float(negative_slope), "scale": channels**-0.5}
    _, dst, place = edges.transpose
    with torch.cuda.device_of(x):
        _backward_pair_dst_kernel[(by_dst.items, by_dst.slabs)](
            p_out=out,
            p_lse=lse,
            p_src=edges.src,
            p_grad_x_dst=grad_x_dst,
            p_grad_att=held_att,
            p_parts=held_dst,
            **shared,
            **_drop(dropout, seed, edges.names_by_dst),
            **by_dst.arguments,
        )
        by_dst.sum(held_dst, grad_x_dst)
        _backward_pair_src_kernel[(by_src.items, by_src.slabs)](
            p_dst=dst,
            p_place=place,
            p_grad_x=grad_x,
            p_parts=held_src,
            **shared,
            **by_src.arguments,
        )
        by_src.sum(held_src, grad_x)
        grad_att = None if att is None or held_att is None else held_att.sum(0).view_as(att)
    return *_apart(models, grad_x, grad_x_dst), grad_att


# Sums over the non-zeros of sparse matrices that share one pattern.


@triton.jit(do_not_specialize=["values_stride", "weight_rows", "seed_stride", "num_rows", "threshold"])
def _weighted_rows_kernel(
    p_values,
    p_weight,
    p_seed,
    p_ptr,
    p_col,
    p_place,
    p_out,
    values_stride,
    weight_rows,
    seed_stride,
    num_rows,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """For one row and one model: out_i = sum_k keep_k v_k W_col(k), `D` numbers, in the order of the non-zeros.

    A stride is the distance from one model to the next, of weights in rows; 0 where all share one. Non-zero k has word
    k % 4 of Philox(seed; k // 4); with `p_place`, k is its place in the order that the values have. The weights of what
    is dropped are not read.
    """
    i_model, i_row = tl.program_id(0) // num_rows, tl.program_id(0) % num_rows
    i_model = i_model.to(tl.int64)
    p_values += i_model * values_stride
    p_weight += _offset(i_model * weight_rows, D)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    start, stop = tl.load(p_ptr + i_row), tl.load(p_ptr + i_row + 1)
    if p_seed is not None:
        b_seed = tl.load(p_seed + i_model * seed_stride)

    b_out = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)  # summed over the non-zeros at the end
    for o_first in tl.range(start, stop, BLOCK_K):
        o_k = o_first + tl.arange(0, BLOCK_K)
        m_k = o_k < stop
        i_col = tl.load(p_col + o_k, mask=m_k, other=0)
        i_k = _edge(p_place, o_k, m_k)
        b_v = tl.load(p_values + i_k, mask=m_k, other=0.0).to(tl.float32)
        if p_seed is not None:
            i_four = (i_k // 4).to(tl.int64)
            zero = tl.zeros([BLOCK_K], tl.uint32)
            low, high = (i_four & 0xFFFFFFFF).to(tl.uint32), (i_four >> 32).to(tl.uint32)
            w0, w1, w2, w3 = tl.philox(b_seed, low, high, zero, zero)
            b_word = tl.where(i_k % 4 < 2, tl.where(i_k % 4 == 0, w0, w1), tl.where(i_k % 4 == 2, w2, w3))
            b_keep = tl.where(b_word >= threshold, keep_scale, 0.0)
            m_k &= b_keep > 0.0
            b_v *= b_keep
        p_row = p_weight + _offset(i_col, D)[:, None] + o_d[None, :]
        b_out += b_v[:, None] * tl.load(p_row, mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    tl.store(p_out + _offset(i_model * num_rows + i_row, D) + o_d, tl.sum(b_out, 0), mask=m_d)


def weighted_rows(
    values: Tensor, weight: Tensor, seed: Tensor | None, dropout: float, pattern: Any, back: bool
) -> Tensor | None:
    """Return X W `[rows, D]`, or X^T W `[columns, D]` if `back`; values, weight and seed may have an axis of models.

    The values are dropped out as by `keep`. Returns None for float64, which these kernels do not support.
    """
    if torch.float64 in (values.dtype, weight.dtype):
        return None
    batch = torch.broadcast_shapes(values.shape[:-1], weight.shape[:-2], () if seed is None else seed.shape)
    pattern, place = pattern.transpose if back else (pattern, None)
    num_rows, channels = pattern.num_rows, weight.size(-1)
    dtype = torch.promote_types(values.dtype, weight.dtype)
    out = torch.empty(*batch, num_rows, channels, dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    values, weight, drop = values.contiguous(), weight.contiguous(), _drop(dropout, seed)
    block_d = min(256, triton.next_power_of_2(channels))
    with torch.cuda.device_of(weight):
        _weighted_rows_kernel[(batch.numel() * num_rows, triton.cdiv(channels, block_d))](
            values,
            weight,
            drop["p_seed"],
            pattern.rowptr,
            pattern.col,
            place,
            out,
            values_stride=values.size(-1) if values.dim() > 1 else 0,
            weight_rows=weight.size(-2) if weight.dim() > 2 else 0,
            seed_stride=0 if seed is None or seed.dim() == 0 else 1,
            num_rows=num_rows,
            threshold=drop["threshold"],
            keep_scale=drop["keep_scale"],
            D=channels,
            BLOCK_K=min(32, 1024 // block_d),
            BLOCK_D=block_d,
            num_warps=1,
        )
    return out
