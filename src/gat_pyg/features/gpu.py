"""Feature dropout, and products of sparse features, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.gpu import FP_FUSION
from ..kernels.gpu.draw import draw, drop_arguments, limits, word
from ..kernels.gpu.rows import compiled_for, edge_id, offset


@triton.jit(do_not_specialize=["threshold"])
def _keep_kernel(p_x, p_out, size, x_stride, drop, threshold, BLOCK: tl.constexpr):
    """k, or x k, of `size` numbers of each model, as of four heads and size / 4 edges; `x_stride` is 0 for one x."""
    i_model = tl.program_id(2).to(tl.int64)
    i_four = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_edge = edge_id(drop.p_dropout_ids, i_four, i_four * 4 < size)
    threshold, scale = limits(threshold, drop.scale, i_model)
    b_out = draw(drop.p_seed + i_model, i_edge, threshold, scale, None, 4, BLOCK, 4)
    o_out = i_four[:, None] * 4 + tl.arange(0, 4)[None, :]
    if p_x is not None:
        b_out *= tl.load(p_x + i_model * x_stride + o_out, mask=o_out < size, other=0.0).to(tl.float32)
    tl.store(p_out + i_model * size + o_out, b_out, o_out < size)


def keep(seed: Tensor, size: int, dropout: float | Tensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """`[size]`, or `[S, size]` for seeds `[S]`: 0, or 1 / (1 - p), by the words of the counters (0, 0), (1, 0), ...;
    with `ids` `[size / 4]` by those of (ids[0], 0), (ids[1], 0), ...
    """
    mask = torch.empty(*seed.shape, size, dtype=dtype, device=seed.device)
    _launch(mask, seed, size, drop_arguments(dropout, seed, ids), None, 0)
    return mask


def drop(x: Tensor, seed: Tensor, dropout: float | Tensor) -> Tensor:
    """Return x k for a seed, or for seeds `[S]` and x `[S, ...]`, with the k of `keep`, which is not stored."""
    shared = seed.dim() == 1 and x.stride(0) == 0
    given = x[0].contiguous() if shared and len(x) else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = out.numel() // max(seed.numel(), 1)
    _launch(out, seed, size, drop_arguments(dropout, seed), given, 0 if shared else size)
    return out


def _launch(out: Tensor, seed: Tensor, size: int, drop: dict[str, Any], x: Tensor | None, x_stride: int) -> None:
    if out.numel():
        grid, options = (triton.cdiv(size, 1024), 1, seed.numel()), {"BLOCK": 256, "enable_fp_fusion": FP_FUSION}
        with torch.cuda.device_of(seed):
            _keep_kernel[grid](x, out, size, x_stride, **drop, **options)


# Sums over the non-zeros of sparse matrices that share one pattern.


@triton.jit(do_not_specialize=["values_stride", "weight_rows", "seed_stride", "num_rows", "threshold"])
def _weighted_rows_kernel(
    p_values, p_weight, pattern, p_out, values_stride, weight_rows, seed_stride, num_rows, drop, threshold, SIZES
):
    """For one row and one model: out_i = sum_k keep_k v_k W_col(k), `D` numbers, in the order of the non-zeros.

    A stride is the distance from one model to the next, of weights in rows; 0 where all share one. Non-zero k has word
    k % 4 of Philox(seed; k // 4); with `p_place`, k is its place in the order that the values have. The weights of what
    is dropped are not read.
    """
    p_ptr, p_col, p_place = pattern
    i_model, i_row = tl.program_id(0) // num_rows, tl.program_id(0) % num_rows
    i_model = i_model.to(tl.int64)
    p_values += i_model * values_stride
    p_weight += offset(i_model * weight_rows, SIZES.C)
    o_c = tl.program_id(1) * SIZES.BLOCK_C + tl.arange(0, SIZES.BLOCK_C)
    m_c = o_c < SIZES.C
    start, stop = tl.load(p_ptr + i_row), tl.load(p_ptr + i_row + 1)
    if drop.p_seed is not None:
        b_seed = tl.load(drop.p_seed + i_model * seed_stride)
        threshold, scale = limits(threshold, drop.scale, i_model * seed_stride)

    b_out = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_C], tl.float32)  # summed over the non-zeros at the end
    for o_first in tl.range(start, stop, SIZES.BLOCK_E):
        o_k = o_first + tl.arange(0, SIZES.BLOCK_E)
        m_k = o_k < stop
        i_col = tl.load(p_col + o_k, mask=m_k, other=0)
        i_k = edge_id(p_place, o_k, m_k)
        b_v = tl.load(p_values + i_k, mask=m_k, other=0.0).to(tl.float32)
        if drop.p_seed is not None:
            b_word = word(b_seed, i_k // 4, tl.zeros_like(i_k), i_k % 4)
            b_keep = tl.where(b_word >= threshold, scale, 0.0)
            m_k &= b_keep > 0.0
            b_v *= b_keep
        p_row = p_weight + offset(i_col, SIZES.C)[:, None] + o_c[None, :]
        b_out += b_v[:, None] * tl.load(p_row, mask=m_k[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    tl.store(p_out + offset(i_model * num_rows + i_row, SIZES.C) + o_c, tl.sum(b_out, 0), mask=m_c)


def weighted_rows(
    values: Tensor, weight: Tensor, seed: Tensor | None, dropout: float | Tensor, pattern: Any, back: bool
) -> Tensor | None:
    """Return X W `[rows, D]`, or X^T W `[columns, D]` if `back`; values, weight and seed may have an axis of models.

    The values are dropped out as by `keep`. Returns None for float64, which these kernels do not support.
    """
    if torch.float64 in (values.dtype, weight.dtype):
        return None
    if seed is not None and isinstance(dropout, Tensor):
        seed = seed.expand(torch.broadcast_shapes(seed.shape, dropout.shape))
    batch = torch.broadcast_shapes(values.shape[:-1], weight.shape[:-2], () if seed is None else seed.shape)
    pattern, place = pattern.transpose if back else (pattern, None)
    num_rows, channels = pattern.num_rows, weight.size(-1)
    dtype = torch.promote_types(values.dtype, weight.dtype)
    out = torch.empty(*batch, num_rows, channels, dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    values, weight, block_c = values.contiguous(), weight.contiguous(), min(256, triton.next_power_of_2(channels))
    strides = values.size(-1) if values.dim() > 1 else 0, weight.size(-2) if weight.dim() > 2 else 0
    seed_stride, grid = int(seed is not None and seed.dim() > 0), (out[..., 0].numel(), triton.cdiv(channels, block_c))
    sizes = compiled_for(num_warps=1, C=channels, BLOCK_E=min(32, 1024 // block_c), BLOCK_C=block_c)
    arguments = sizes | drop_arguments(dropout, seed)
    with torch.cuda.device_of(weight):
        rows_of = pattern.rowptr, pattern.col, place
        _weighted_rows_kernel[grid](values, weight, rows_of, out, *strides, seed_stride, num_rows, **arguments)
    return out
