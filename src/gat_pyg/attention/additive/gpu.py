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

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu import rows
from ...kernels.gpu.draw import drop_arguments, keep
from ...kernels.gpu.rows import (
    Tile,
    all_models,
    apart,
    beside,
    block_of_edges,
    chunks_of,
    edge_id,
    gather,
    gather_features,
    load_row,
    offset,
    row_width,
    slab,
    stacked,
    store_row,
    tile_for,
    walk_of,
    work_item,
)
from ..score import Operation
from ..steps.gpu import Pair, alpha, forward_pass, of_rows
from . import Additive

# Backward, additive. With g_ij = k_ij w_ij <dO_i, x_j> and D_i = sum_j alpha_ij g_ij = <dO_i, O_i>:
#   grad z_ij = alpha_ij (g_ij - D_i) LeakyReLU'(z_ij), grad s_j = sum_i grad z_ij, grad d_i = sum_j grad z_ij,
#   grad x_j = sum_i k_ij w_ij alpha_ij dO_i, grad w_ij = k_ij alpha_ij <dO_i, x_j>.
# d_i, lse_i and D_i lie beside each other in `p_dst_terms` `[N_dst, 3, H]`, of which an edge reads one row.


@triton.jit(do_not_specialize=["num_dst", "models"])
def _mean_kernel(p_grad, p_out, p_out_plus, p_mass_plus, p_dst_terms, p_grad_dst, num_dst, slope, models, SIZES):
    """For a block of dst, from what the forward saved: D_i, grad d_i = (1 - slope) (<dO_i, O+_i> - D_i A+_i)."""
    H = all_models(SIZES.EACH, models)
    i_row = tl.program_id(0).to(tl.int64) * SIZES.BLOCK_E + tl.arange(0, SIZES.BLOCK_E)
    i_h = tl.program_id(1) * SIZES.BLOCK_H + tl.arange(0, SIZES.BLOCK_H)
    o_c = tl.arange(0, SIZES.BLOCK_C)
    m_eh = (i_row < num_dst)[:, None] & (i_h < H)[None, :]
    m_ehc = m_eh[:, :, None] & (o_c < SIZES.C)[None, None, :]
    o_row = offset(i_row, H * SIZES.C)[:, None, None] + (i_h[:, None] * SIZES.C + o_c[None, :])[None, :, :]
    o_row_h = offset(i_row, H)[:, None] + i_h[None, :]
    b_grad = tl.load(p_grad + o_row, mask=m_ehc, other=0.0).to(tl.float32)
    b_mean = tl.sum(b_grad * tl.load(p_out + o_row, mask=m_ehc, other=0.0).to(tl.float32), 2)
    tl.store(p_dst_terms + offset(i_row, 3 * H)[:, None] + (2 * H + i_h)[None, :], b_mean, mask=m_eh)
    if p_grad_dst is not None:
        b_plus = tl.sum(b_grad * tl.load(p_out_plus + o_row, mask=m_ehc, other=0.0).to(tl.float32), 2)
        b_mass_plus = tl.load(p_mass_plus + o_row_h, mask=m_eh, other=0.0)
        tl.store(p_grad_dst + o_row_h, (1.0 - slope) * (b_plus - b_mean * b_mass_plus), mask=m_eh)


@triton.jit(do_not_specialize=["models"])
def _segment_mean_kernel(p_g, p_score_src, p_score_edge, p_dst_terms, p_rows, p_grad_dst, slope, csr, models, SIZES):
    """For one dst, from g `[E, H]`: D_i, grad d_i = (1 - slope) sum_(z > 0) alpha_ij (g_ij - D_i).

    One program for each row of `p_rows`; without it for each row of no more than `SPLIT` edges.
    """
    H = all_models(SIZES.EACH, models)
    i_row = tl.program_id(0).to(tl.int64)
    if p_rows is not None:
        i_row = tl.load(p_rows + i_row)
    start = tl.load(csr.p_ptr + i_row)
    count = tl.load(csr.p_ptr + i_row + 1) - start
    is_ours = count >= 0
    if p_rows is None:
        is_ours = count <= SIZES.SPLIT
    count = tl.where(is_ours, count, 0)
    i_h = tl.program_id(1) * SIZES.BLOCK_H + tl.arange(0, SIZES.BLOCK_H)
    m_h = i_h < H
    p_row = p_dst_terms + offset(i_row, 3 * H) + i_h
    b_d, b_lse = load_row(p_row, 0, m_h), load_row(p_row, H, m_h)

    b_mean = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)  # summed over edges at the end
    b_mean_plus = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)
    b_mass_plus = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)
    for o_first in tl.range(0, count, SIZES.BLOCK_E, num_stages=SIZES.STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, SIZES.BLOCK_E)
        i_src = tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)
        b_g = gather(p_g, start + o_e, i_h, m_eh, H)
        b_z = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32) + b_d
        b_z += gather(p_score_src, i_src, i_h, m_eh, row_width(H, SIZES.STRIDE))
        b_z += gather(p_score_edge, edge_id(csr.p_ids, start + o_e, m_e), i_h, m_eh, H)
        b_alpha = alpha(b_z, b_lse, slope, m_eh)
        b_alpha_plus = tl.where(b_z > 0.0, b_alpha, 0.0)
        b_mean += b_alpha * b_g
        b_mean_plus += b_alpha_plus * b_g
        b_mass_plus += b_alpha_plus

    b_mean, b_mean_plus, b_mass_plus = tl.sum(b_mean, 0), tl.sum(b_mean_plus, 0), tl.sum(b_mass_plus, 0)
    tl.store(p_row + 2 * H, b_mean, mask=m_h & is_ours)
    if p_grad_dst is not None:
        b_grad_dst = (1.0 - slope) * (b_mean_plus - b_mean * b_mass_plus)
        tl.store(p_grad_dst + offset(i_row, H) + i_h, b_grad_dst, mask=m_h & is_ours)


@triton.jit(do_not_specialize=["threshold", "num_chunks", "models"])
def _backward_kernel(operands, results, slope, drop, threshold, csr, num_chunks, models, SIZES):
    """For one src j: grad x_j, grad w_ij, grad u_ij = grad z_ij and grad s_j = sum_i grad z_ij.

    `p_edge_ids` are the caller's ids of the edges, in the order of the rows. In one pass where D is known. Else g
    (`p_g`) is written on a first pass, which has `p_grad_x`, and read on a second, which has the rest. A chunk leaves
    grad x, grad s in its row of `p_chunks`.
    """
    p_grad, p_x, p_edge_weight, p_score_src, p_score_edge, p_dst_terms, p_edge_ids = operands
    p_grad_x, p_grad_weight, p_grad_src, p_grad_edge, p_g, p_chunks = results
    H, i_item = all_models(SIZES.EACH, models), tl.program_id(0)
    i_row, start, count, is_whole, is_chunk = work_item(i_item, csr, num_chunks, SIZES.SPLIT)
    i_h, o_hc, m_h, m_hc = slab(H, SIZES.C, SIZES.BLOCK_H, SIZES.BLOCK_C)
    o_row, o_row_h = offset(i_row, H * SIZES.C) + o_hc, offset(i_row, H) + i_h
    b_s = load_row(p_score_src, offset(i_row, row_width(H, SIZES.STRIDE)) + i_h, m_h)
    b_x = load_row(p_x, o_row, m_hc)

    b_grad_src = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32)  # summed over edges at the end
    b_grad_x = tl.zeros([SIZES.BLOCK_H, SIZES.BLOCK_C], tl.float32)
    for o_first in tl.range(0, count, SIZES.BLOCK_E, num_stages=SIZES.STAGES):
        o_e, m_e, m_eh = block_of_edges(o_first, count, m_h, SIZES.BLOCK_E)
        i_dst = tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)
        i_place = 0 if p_g is None else tl.load(csr.p_ids + start + o_e, mask=m_e, other=0)
        i_edge = edge_id(p_edge_ids, start + o_e, m_e)
        b_z = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_H], tl.float32) + b_s
        b_z += gather(p_dst_terms, i_dst, i_h, m_eh, 3 * H)
        b_z += gather(p_score_edge, i_edge, i_h, m_eh, H)
        b_alpha = alpha(b_z, gather(p_dst_terms + H, i_dst, i_h, m_eh, 3 * H), slope, m_eh)
        if p_grad_x is not None:
            b_grad = gather_features(p_grad, i_dst, o_hc, m_e, m_hc, H * SIZES.C)
            b_keep = keep(drop, threshold, start + o_e, m_e, models, SIZES)
            b_factor = b_keep * gather(p_edge_weight, i_edge, i_h, m_eh, H, 1.0)
            b_grad_x += tl.sum((b_alpha * b_factor)[:, :, None] * b_grad, 0)
            b_g = tl.sum(b_grad * b_x, 2)
            if p_grad_weight is not None:
                b_grad_weight = b_alpha * b_keep * b_g
                tl.store(p_grad_weight + offset(i_edge, H)[:, None] + i_h[None, :], b_grad_weight, mask=m_eh)
            b_g *= b_factor
            if p_g is not None:
                tl.store(p_g + offset(i_place, H)[:, None] + i_h[None, :], b_g, mask=m_eh)
        else:
            b_g = gather(p_g, i_place, i_h, m_eh, H)
        if p_grad_src is not None or p_grad_edge is not None:
            b_mean = gather(p_dst_terms + 2 * H, i_dst, i_h, m_eh, 3 * H)
            b_grad_z = b_alpha * (b_g - b_mean) * tl.where(b_z > 0.0, 1.0, slope)
            b_grad_src += b_grad_z
            if p_grad_edge is not None:
                tl.store(p_grad_edge + offset(i_edge, H)[:, None] + i_h[None, :], b_grad_z, mask=m_eh)

    o_chunk = offset(i_item, H * SIZES.C + H)
    if p_grad_x is not None:
        store_row(p_grad_x, p_chunks, o_row, o_chunk + o_hc, b_grad_x, m_hc, is_whole, is_chunk)
    if p_grad_src is not None:
        o_chunk_h = o_chunk + H * SIZES.C + i_h
        store_row(p_grad_src, p_chunks, o_row_h, o_chunk_h, tl.sum(b_grad_src, 0), m_h, is_whole, is_chunk)


def _terms(models: torch.Size, score: Additive) -> tuple[list[Any], int | None]:
    """Return the terms of the score of src, dst and edges as the kernels take them, and the width of rows of slices.

    A layer computes both ends' scores as one tensor, whose slices need no copies. They are copied if they are large:
    what is gathered should fill the L2 cache alone.
    """
    src, dst, stride = score.score_src, score.score_dst, None
    if not models and src is not None and dst is not None:
        width, *inner = src.stride()
        size = 2 * max(src.numel(), dst.numel()) * src.element_size()
        if dst.stride() == src.stride() and inner == [1] and src.size(1) < width and size <= rows.STRIDED:
            stride = width
    if stride is None:
        src, dst = beside(models, src, dst)
    return [src, dst, *beside(models, score.score_edge)], stride


def forward(call: Operation, dtype: torch.dtype, saves_output: bool) -> tuple[Tensor, ...]:
    """Return the output `[N_dst, H, C]` in `dtype` and the log-sum-exp `[N_dst, H]` in float32.

    If the output is saved for the backward pass, also the share of output and mass with z > 0, in the same dtypes.
    """
    models, score = call.x.shape[:-3], call.score
    (x,), (terms, stride) = beside(models, call.x), _terms(models, score)
    out = x.new_empty(call.edges.num_dst, *x.shape[1:], dtype=dtype)
    plus = (torch.empty_like(out), x.new_empty(out.shape[:2], dtype=torch.float32)) if saves_output else ()
    numbers, results = (0, float(score.negative_slope), 1.0), (out, *(plus or (None, None)), None)
    lse = forward_pass(call, x, terms, Pair(), results, *numbers, D=0, BLOCK_D=1, STRIDE=stride)
    return apart(models, out, lse, *plus)


def backward(
    call: Operation, grad: Tensor, out: Tensor | None, saved: tuple[Tensor, ...], needs: tuple[bool, ...]
) -> dict[str, Tensor | None]:
    """The gradients of x, of the scores of src and dst, and of edges in the caller's order.

    From O, O+ and A+, in one pass over the features; without them in one such pass and two over `[E, H]`.
    """
    x, score, edges, edge_weight, seed, dropout = call
    lse, out_plus, mass_plus = (*saved, None, None)[:3]
    models, edge_grad = x.shape[:-3], needs[4]
    grad, x, weight = beside(models, grad, x, edge_weight)
    out, lse, out_plus, mass_plus = beside(models, out, lse, out_plus, mass_plus)
    (score_src, score_dst, score_edge), stride = _terms(models, score)
    num_edges, (_, heads, channels) = edges.num_edges, x.shape

    def new(rows: int, wanted: bool) -> Tensor | None:
        return x.new_empty(rows, heads, dtype=torch.float32) if wanted else None

    grad_x = torch.empty_like(x)
    grad_edge, grad_weight = (
        of_rows(edges, wanted, edges.num_rows, heads, device=x.device)
        for wanted in (edge_grad, weight is not None and needs[1])
    )
    grad_src, grad_dst = new(edges.num_src, score_src is not None), new(edges.num_dst, score_dst is not None)
    grads = grad_x, grad_weight, grad_src, grad_dst, grad_edge
    names = "x", "edge_weight", *score.shapes
    if num_edges == 0 or x.numel() == 0:
        for result in grads:
            if result is not None:
                result.zero_()
        return dict(zip(names, apart(models, *grads), strict=True))

    zero_or_d = torch.zeros_like(lse) if score_dst is None else score_dst.float()
    terms = score_src, score_edge, torch.stack([zero_or_d, lse, lse], 1)  # D replaces the last
    launch = _Backward(edges, terms, float(score.negative_slope), models.numel(), heads, stride)
    scored = score_src is not None or score_dst is not None or edge_grad
    features = grad, x if scored or grad_weight is not None else None, weight
    drop = drop_arguments(dropout, seed, None if seed is None else edges.dropout_ids_by_src)
    with torch.cuda.device_of(x):
        if not scored:
            launch.over_src(channels, features, (grad_x, grad_weight, None, None, None), drop)
        elif out is not None and (out_plus is not None or score_dst is None):
            launch.mean(grad, out, out_plus, mass_plus, terms[2], grad_dst)
            launch.over_src(channels, features, (grad_x, grad_weight, grad_src, grad_edge, None), drop)
        else:
            g = x.new_empty(num_edges, heads, dtype=torch.float32)
            launch.over_src(channels, features, (grad_x, grad_weight, None, None, g), drop)
            launch.segment_mean(g, grad_dst)
            if score_src is not None or edge_grad:
                rest = None, None, grad_src, grad_edge, g
                launch.over_src(0, (None, None, None), rest, drop_arguments(0.0, None))
    return dict(zip(names, apart(models, *grads), strict=True))


class _Backward(NamedTuple):
    """The launches of a backward pass."""

    edges: Edges
    terms: tuple[Tensor | None, Tensor | None, Tensor]  # of src and edges; d, the log-sum-exp and D of dst
    slope: float
    models: int
    heads: int
    stride: int | None

    def over_src(
        self, channels: int, features: tuple[Any, ...], results: tuple[Any, ...], drop: dict[str, Any]
    ) -> None:
        """Launch the pass over the rows of src, and the sum of their chunks."""
        edges, (grad_x, grad_weight, grad_src, grad_edge, _) = self.edges, results
        by_edge = features[2], self.terms[1], grad_weight, grad_edge
        ids = None if all(each is None for each in by_edge) else edges.ids_by_src
        walk = walk_of(edges, "src", self.models, self.heads, channels)
        held, sizes = walk.hold(self.heads * (channels + 1)), walk.arguments(STRIDE=self.stride)
        kernel = _backward_kernel[(walk.items, walk.slabs)]
        kernel((*features, *self.terms, ids), (*results, held), self.slope, **drop, **sizes)
        walk.sum(held, grad_x, grad_src)

    def mean(self, grad: Tensor, *operands: Tensor | None) -> None:
        """Launch the pass over O and O+."""
        (num_dst, channels), heads = grad.shape[::2], self.heads
        tile = tile_for(self.models, heads, channels, num_dst)
        sizes = stacked(self.models, heads, C=channels, **tile.blocks)
        _mean_kernel[(-(-num_dst // tile.edges), -(-heads // tile.heads))](
            grad, *operands, num_dst, self.slope, **sizes
        )

    def segment_mean(self, g: Tensor, grad_dst: Tensor | None) -> None:
        """Launch the pass over `[E, H]` by dst; long rows by a launch of their own, in wide programs, not in chunks."""
        edges, cut, heads = self.edges, chunks_of(self.edges, "dst"), self.heads
        tile = tile_for(self.models, heads, 1, edges.num_edges / edges.num_dst)
        launches: list[tuple[Tensor | None, int, Tile]] = [(None, edges.num_dst, tile)]
        if cut is not None:
            wide = tile._replace(edges=4096 // tile.heads, warps=8, stages=3)
            launches.append((cut.rows, cut.rows.numel(), wide))
        csr = rows.CSR(edges.rowptr, None, None, edges.src, edges.perm)
        for long, number, tile in launches:
            sizes = {"SPLIT": rows.SPLIT, "STAGES": tile.stages, "STRIDE": self.stride, **tile.blocks}
            arguments = g, *self.terms, long, grad_dst, self.slope, csr
            grid = number, -(-heads // tile.heads)
            _segment_mean_kernel[grid](*arguments, **stacked(self.models, heads, **sizes))
