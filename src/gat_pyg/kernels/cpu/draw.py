"""Dropout masks in vector registers: Philox4x32-10 (Salmon et al., SC 2011), as `gat_pyg.philox` has it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import inline
from .vector import I32, I64, address, indices, masked_load, pointer, splat_value, width_of

DRAWN = 16  # calls of the random generator that are made at once


@intrinsic(prefer_literal=True)
def draw(
    context: Any, keep: Any, at: Any, ids: Any, edge: Any, count: Any, drop: Any, model: Any, quad: Any, lanes: Any
) -> Any:
    """k_ij, 0 or 1 / (1 - p), of `DRAWN` fours of (edge, head), to `keep[at:]`.

    The ids of the edges are `ids[edge : edge + count]`, padded with 0. If ids is None, they are edge, edge + 1, ...

    A Philox block has four words, which the model's key and the counter (edge, q) determine: those of the heads 4 q to
    4 q + 3 of the edge. Words beyond the last head are not used.
    """
    heads = width_of(lanes)
    fours, words = max(1, heads // 4), min(4, heads)
    has_ids = ids is not types.none

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keep, at, ids, edge, count, drop, model, quad, _ = args
        wide = ir.VectorType(I64, DRAWN)

        def const(value: int) -> ir.Constant:
            return ir.Constant(wide, [value] * DRAWN)

        def splat(value: Any) -> Any:
            return splat_value(builder, value, DRAWN)

        low, half = const(0xFFFFFFFF), const(32)
        keys, limits = (
            context.make_array(signature.args[5][item])(context, builder, builder.extract_value(drop, item)).data
            for item in range(2)
        )
        key = splat(builder.load(builder.gep(keys, [model])))
        threshold, scale = (
            builder.load(builder.gep(limits, [builder.add(builder.add(model, model), I64(item))])) for item in range(2)
        )
        if keep.type.pointee != scale.type:
            scale = builder.fptrunc(scale, keep.type.pointee)
        edge = _edges(builder, ids if has_ids else None, edge, count, DRAWN // fours)
        edge = builder.shuffle_vector(edge, edge, indices(lane // fours for lane in range(DRAWN)))
        c0, c1, c3 = builder.and_(edge, low), builder.lshr(edge, half), const(0)
        c2 = builder.add(splat(quad), ir.Constant(wide, [lane % fours for lane in range(DRAWN)]))
        k0, k1 = builder.and_(key, low), builder.lshr(key, half)
        for _ in range(10):
            p0 = builder.mul(builder.and_(c0, low), const(0xD2511F53))
            p1 = builder.mul(builder.and_(c2, low), const(0xCD9E8D57))
            c0, c1 = builder.xor(builder.xor(builder.lshr(p1, half), c1), k0), p1
            c2, c3 = builder.xor(builder.xor(builder.lshr(p0, half), c3), k1), p0
            k0, k1 = builder.add(k0, const(0x9E3779B9)), builder.add(k1, const(0xBB67AE85))
        narrow = ir.VectorType(I32, DRAWN)
        drawn = [builder.trunc(word, narrow) for word in (c0, c1, c2, c3)[:words]]
        while len(drawn) > 1:  # words 0 and 2, and 1 and 3, then both
            half_of = len(drawn) // 2
            count = drawn[0].type.count
            turns = indices(lane // 2 + lane % 2 * count for lane in range(2 * count))
            drawn = [builder.shuffle_vector(drawn[w], drawn[w + half_of], turns) for w in range(half_of)]
        total = drawn[0].type.count
        every = splat_value(builder, builder.fptoui(threshold, I32), total)
        tile = ir.VectorType(scale.type, total)
        kept = builder.icmp_unsigned(">=", drawn[0], every)
        value = builder.select(kept, splat_value(builder, scale, total), ir.Constant(tile, None))
        builder.store(value, address(builder, keep, at, tile), align=scale.type.get_abi_alignment(context.target_data))
        return context.get_dummy_value()

    integers = types.int64, types.int64
    return types.void(keep, types.int64, ids, *integers, drop, *integers, lanes), codegen


def _edges(builder: Any, ids: Any, edge: Any, count: Any, width: int) -> Any:
    """`ids[edge : edge + count]`, then zeros; or `edge` and those after it where ids is None."""
    wide = ir.VectorType(I64, width)
    if ids is None:
        return builder.add(splat_value(builder, edge, width), ir.Constant(wide, list(range(width))))
    loaded = masked_load(builder, ids, edge, count, ir.VectorType(ids.type.pointee, width))
    return loaded if loaded.type == wide else builder.sext(loaded, wide)


@inline
def draw_row(keep: Any, drop: Any, model: int, begin: int, n: int, head: int, lanes: Any) -> None:
    """k_ij of the n edges from `begin` on, for the heads of a vector, `head` the first of them."""
    heads, ids = 1 << len(lanes), pointer(drop[2], 0)
    for k in range(0, n, DRAWN // max(1, heads // 4)):
        draw(keep, k * heads, ids, np.int64(begin + k), n - k, drop, model, head // 4, lanes)
