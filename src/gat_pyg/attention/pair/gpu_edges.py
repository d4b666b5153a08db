"""Operands and features of edges on CUDA, and the gradients that are sums over edges in any order.

Those run after the passes over dst and src, from k_ij w_ij alpha_ij and grad e_ij `[E, 2, H]`, and for GATv2 the signs
of z_ij `[E, H, C / 8]`, a bit for each channel. The number of programs that share a sum is fixed, and their shares are
added in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph.edges import Edges
from ...kernels.gpu.rows import all_models, beside, edge_id, offset, stacked
from ..steps.gpu import Pair, of_rows
from . import Dot, GATv2

BLOCK_E = 32  # edges of a step of such a program
BLOCKS = 1024  # programs that sum the gradient of W_e; a fixed number, whatever the GPU
BLOCK_D, WARPS = 16, 8  # of the same programs: with more features, or fewer warps, they spill thousands of registers


class Operands(NamedTuple):
    """The operands of a call, the heads of all models side by side."""

    x: Tensor
    pair: Pair
    weight: Tensor | None  # W_e of the scaled product, [H, C, D]
    stride: int | None  # from one row of x and key to the next, which lie beside each other; None: they lie apart
    numbers: tuple[int, float, float]  # from the features of edges of one model to the next's, negative slope, scale

    @classmethod
    def of(cls, x: Tensor, score: GATv2 | Dot) -> Operands:
        """The operands of a score."""
        models, scale, edge_attr = x.shape[:-3], max(x.size(-1), 1) ** -0.5, score.edge_attr
        att = key = weight = query_edge = None
        lin, slope, stride = score.lin_edge, 1.0, 0
        if edge_attr is None or edge_attr.size(-1) == 0:
            lin = edge_attr = None
        (x_dst,) = beside(models, score.x_dst)
        if isinstance(score, Dot):
            key, lin, weight = score.key, None, None if lin is None else lin.flatten(0, -3)
            query_edge = None if weight is None else multiply("nhc,hcd->nhd", x_dst, weight)
        else:
            att, slope = score.att.contiguous(), float(score.negative_slope)
            lin = None if lin is None else lin.movedim(-1, 0).contiguous()
        if edge_attr is not None:
            shared = edge_attr.dim() == 3 and edge_attr.stride(0) == 0
            edge_attr = (edge_attr[0] if shared else edge_attr).contiguous()
            stride = edge_attr[0].numel() if edge_attr.dim() == 3 else 0
        between = None if key is None or models or x.dtype != key.dtype or x.stride() != key.stride() else x.stride(0)
        if between is None or between <= x.size(1) * x.size(2) or not x[:1].is_contiguous():
            between, (x, key) = None, beside(models, x, key)
        pair = Pair(x_dst, att, key, lin, query_edge, edge_attr)
        return cls(x, pair, weight, between, (stride, slope, scale))

    @property
    def size(self) -> int:
        """D, the number of features of an edge."""
        return 0 if self.pair.p_edge_attr is None else self.pair.p_edge_attr.size(-1)

    @property
    def features(self) -> int:
        """D if the features are attended to, else 0."""
        return 0 if self.pair.p_query_edge is None else self.size

    @property
    def sizes(self) -> dict[str, int | None]:
        """What the kernels are compiled for by the operands."""
        block = triton.next_power_of_2(max(1, self.features))  # of all features that are attended to
        return {"D": self.size, "X_STRIDE": self.stride, "BLOCK_D": block}


def multiply(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Return a product by `torch.einsum` in float32, also under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.einsum(equation, a.float(), b.float()).contiguous()


@triton.jit
def store_signs(p_signs, b_z, i_place, i_h, m_eh, H, SIZES):
    """Store whether z > 0 of a block of edges, a bit for each channel, in bytes `[E, H, C / 8]`."""
    BITS: tl.constexpr = min(8, SIZES.BLOCK_C)
    b_positive = tl.reshape(b_z, [SIZES.BLOCK_E, SIZES.BLOCK_H, SIZES.BLOCK_C // BITS, BITS]) > 0.0
    b_byte = tl.sum(tl.where(b_positive, (1 << tl.arange(0, BITS))[None, None, None, :], 0), 3)
    p_byte, m_byte = _bytes(p_signs, i_place, i_h, m_eh, H, SIZES.C, SIZES.BLOCK_C // BITS)
    tl.store(p_byte, b_byte.to(tl.uint8), mask=m_byte)


@triton.jit
def load_slopes(p_signs, i_place, i_h, m_eh, slope, H, SIZES):
    """LeakyReLU'(z) of a block of edges, `[edges, heads, channels]`, by the signs that `store_signs` has stored."""
    BITS: tl.constexpr = min(8, SIZES.BLOCK_C)
    p_byte, m_byte = _bytes(p_signs, i_place, i_h, m_eh, H, SIZES.C, SIZES.BLOCK_C // BITS)
    b_byte = tl.load(p_byte, mask=m_byte, other=0).to(tl.int32)
    b_bit = (b_byte[:, :, :, None] >> tl.arange(0, BITS)[None, None, None, :]) & 1
    return tl.where(tl.reshape(b_bit, [SIZES.BLOCK_E, SIZES.BLOCK_H, SIZES.BLOCK_C]) == 1, 1.0, slope)


@triton.jit
def _bytes(p_signs, i_place, i_h, m_eh, H, C: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the bytes of the signs of a block of edges, `[edges, heads, bytes]`, and their mask."""
    BYTES: tl.constexpr = (C + 7) // 8
    o_byte = tl.arange(0, BLOCK)[None, None, :]
    p_byte = p_signs + offset(i_place, H * BYTES)[:, None, None] + (i_h * BYTES)[None, :, None] + o_byte
    return p_byte, m_eh[:, :, None] & (o_byte < BYTES)


@triton.jit
def _matrix(p_matrix, o_row, o_col, m_row, m_col):
    """A block of a matrix in float32, by the offsets of its rows and columns."""
    p_block = p_matrix + o_row[:, None] + o_col[None, :]
    return tl.load(p_block, mask=m_row[:, None] & m_col[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_edges", "attr_stride", "grad_stride", "models"])
def _parameters_kernel(
    pair, p_weights, p_signs, p_perm, p_grad_lin, p_grad_attr, num_edges, attr_stride, grad_stride, slope, models, SIZES
):
    """For one model, GATv2's grad W_e = sum_ij grad z_ij u_ij^T, a share, and grad u_ij = W_e^T grad z_ij.

    The columns are the channels of all heads, a block at a time. For grad u the program adds to what it stored for the
    blocks before, which a barrier lets all of its threads see.
    """
    H, WIDTH = all_models(SIZES.EACH, models), SIZES.EACH * SIZES.C
    BYTES: tl.constexpr = (SIZES.C + 7) // 8
    i_model = tl.program_id(1)
    p_edge_attr = pair.p_edge_attr + offset(i_model, attr_stride)
    o_own = tl.program_id(2) * SIZES.BLOCK_D + tl.arange(0, SIZES.BLOCK_D)
    for o_first in tl.range(0, WIDTH, SIZES.BLOCK_C, num_stages=1):
        o_w = o_first + tl.arange(0, SIZES.BLOCK_C)
        m_w = o_w < WIDTH
        o_hc = i_model * WIDTH + o_w
        i_h, i_c = o_hc // SIZES.C, o_hc % SIZES.C
        b_att = tl.load(pair.p_att + o_hc, mask=m_w, other=0.0).to(tl.float32)
        b_own = _matrix(pair.p_lin, o_own * H * SIZES.C, o_hc, o_own < SIZES.D, m_w)
        b_sum = tl.zeros([SIZES.BLOCK_C, SIZES.BLOCK_D], tl.float32)
        first = tl.program_id(0).to(tl.int64) * SIZES.BLOCK_E  # the last step may pass int32
        for i_first in tl.range(first, num_edges, tl.num_programs(0) * SIZES.BLOCK_E, num_stages=1):
            i_place = i_first + tl.arange(0, SIZES.BLOCK_E)
            m_e = i_place < num_edges
            i_edge = edge_id(p_perm, i_place, m_e)
            p_byte = p_signs + offset(i_place, H * BYTES)[:, None] + (i_h * BYTES + i_c // 8)[None, :]
            b_byte = tl.load(p_byte, mask=m_e[:, None] & m_w[None, :], other=0).to(tl.int32)
            b_grad_z = _matrix(p_weights + H, offset(i_place, 2 * H), i_h, m_e, m_w)
            b_grad_z *= tl.where((b_byte >> (i_c % 8)[None, :]) & 1 == 1, 1.0, slope)
            b_attr = _matrix(p_edge_attr, offset(i_edge, SIZES.D), o_own, m_e, o_own < SIZES.D)
            b_sum += tl.dot(tl.trans(b_grad_z), b_attr, input_precision="ieee")
            if p_grad_attr is not None:
                b_grad = tl.dot(b_grad_z * b_att[None, :], tl.trans(b_own), input_precision="ieee")
                o_attr = offset(i_model, grad_stride) + offset(i_edge, SIZES.D)
                tl.debug_barrier()
                b_grad += _matrix(p_grad_attr, o_attr, o_own, m_e & (o_first > 0), o_own < SIZES.D)
                p_grad = p_grad_attr + o_attr[:, None] + o_own[None, :]
                tl.store(p_grad, b_grad, mask=m_e[:, None] & (o_own < SIZES.D)[None, :])
        p_share = p_grad_lin + (offset(tl.program_id(0), H * SIZES.C) + o_hc)[:, None] * SIZES.D + o_own[None, :]
        tl.store(p_share, b_sum * b_att[:, None], mask=m_w[:, None] & (o_own < SIZES.D)[None, :])


@triton.jit(do_not_specialize=["num_edges", "grad_stride", "models"])
def _attr_kernel(
    p_grad_out_edge, p_query_edge, p_weights, p_dst, p_perm, p_grad_attr, num_edges, grad_stride, scale, models, SIZES
):
    """For edges of one model, the scaled product's grad u_ij = sum of k_ij w_ij alpha_ij dS_i + grad e_ij scale p_i.

    The sum is over the heads.
    """
    H, i_model = all_models(SIZES.EACH, models), tl.program_id(1)
    i_place = tl.program_id(0).to(tl.int64) * SIZES.BLOCK_E + tl.arange(0, SIZES.BLOCK_E)
    m_e = i_place < num_edges
    o_d = tl.program_id(2) * SIZES.BLOCK_D + tl.arange(0, SIZES.BLOCK_D)
    i_dst = tl.load(p_dst + i_place, mask=m_e, other=0)
    b_sum = tl.zeros([SIZES.BLOCK_E, SIZES.BLOCK_D], tl.float32)
    for i_head in tl.range(0, SIZES.EACH, num_stages=1):
        i_h = i_model * SIZES.EACH + i_head
        o_row = offset(i_dst, H * SIZES.D) + i_h * SIZES.D
        b_w = tl.load(p_weights + offset(i_place, 2 * H) + i_h, mask=m_e, other=0.0)
        b_grad_e = tl.load(p_weights + offset(i_place, 2 * H) + H + i_h, mask=m_e, other=0.0)
        b_sum += b_w[:, None] * _matrix(p_grad_out_edge, o_row, o_d, m_e, o_d < SIZES.D)
        b_sum += (scale * b_grad_e)[:, None] * _matrix(p_query_edge, o_row, o_d, m_e, o_d < SIZES.D)
    o_attr = offset(i_model, grad_stride) + offset(edge_id(p_perm, i_place, m_e), SIZES.D)
    p_grad = p_grad_attr + o_attr[:, None] + o_d[None, :]
    tl.store(p_grad, b_sum, mask=m_e[:, None] & (o_d < SIZES.D)[None, :])


def parameter_gradients(
    operands: Operands, lin_edge: Tensor, weights: Tensor, signs: Tensor | None, edges: Edges, wants_attr: bool
) -> dict[str, Tensor | None]:
    """Return the gradients of GATv2's `lin_edge` and, if it is wanted, `edge_attr`."""
    stack = lin_edge.shape[:-3]
    if operands.pair.p_lin is None:  # no features
        empty = lin_edge.new_zeros(*stack, edges.num_rows, 0)
        return {"lin_edge": torch.zeros_like(lin_edge), "edge_attr": empty}
    (_, heads, channels), size, num_edges, models = operands.x.shape, operands.size, edges.num_edges, stack.numel()
    block_w = min(64, max(16, triton.next_power_of_2(heads // models * channels)))
    blocks = min(BLOCKS, -(-num_edges // BLOCK_E))
    held = weights.new_empty(blocks, heads, channels, size)
    grad_attr = of_rows(edges, wants_attr, *stack, edges.num_rows, size, device=weights.device)
    tensors = operands.pair, weights, signs, edges.perm, held, grad_attr
    (attr_stride, slope, _), grad_stride = operands.numbers, edges.num_rows * size
    blocks_of = {"BLOCK_E": BLOCK_E, "BLOCK_C": block_w, "BLOCK_D": BLOCK_D, "num_warps": WARPS}
    sizes = stacked(models, heads, C=channels, D=size, **blocks_of)
    grid, numbers = (blocks, models, -(-size // BLOCK_D)), (num_edges, attr_stride, grad_stride, slope)
    _parameters_kernel[grid](*tensors, *numbers, **sizes)
    return {"lin_edge": held.sum(0).view_as(lin_edge), "edge_attr": grad_attr}


def attr_gradient(
    operands: Operands, grad_out_edge: Tensor | None, weights: Tensor, edges: Edges, stack: torch.Size
) -> Tensor | None:
    """Return the gradient of the scaled product's `edge_attr`, in float32."""
    size, num_edges, block_d = operands.size, edges.num_edges, min(64, triton.next_power_of_2(max(1, operands.size)))
    grad_attr = of_rows(edges, True, *stack, edges.num_rows, size, device=weights.device)
    if size:
        tensors = grad_out_edge, operands.pair.p_query_edge, weights, edges.dst, edges.perm, grad_attr
        models, scale = stack.numel(), operands.numbers[2]
        sizes = stacked(models, operands.x.size(1), D=size, BLOCK_E=1024 // block_d, BLOCK_D=block_d)
        grid = -(-num_edges * block_d // 1024), models, -(-size // block_d)
        _attr_kernel[grid](*tensors, num_edges, edges.num_rows * size, scale, **sizes)
    return grad_attr
