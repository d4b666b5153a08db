"""The fused operation on a CPU, compiled by Numba: one gather of the features forward, one of the gradient backward.

Every kernel works through rows: the neighbourhood of a dst forward, the edges out of a src backward. Scores, softmax
and dropout of a row are made in buffers that a core's cache holds; then each head's features are summed, a tile of them
at a time in vector registers, while the rows of the edges to come are prefetched. A row of more than `SPLIT` edges is
several pieces, merged in a fixed order. No result depends on the number of threads.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model
from torch import Tensor

from ..edges import Edges

SPLIT = 1024  # edges of a piece: its buffers stay in a core's L2
AHEAD = 16  # edges between the one that is summed and the one that is prefetched
SMALL = 1 << 21  # numbers gathered, about a millisecond, below which one thread is as fast as several

log = logging.getLogger(__name__)


# --- Vectors of floats as values of Numba: a tile of a row, held in registers. ---


class Vector(types.Type):  # type: ignore[misc]
    """`width` numbers of type `dtype`."""

    def __init__(self, dtype: types.Type, width: int) -> None:
        self.dtype, self.width = dtype, width
        super().__init__(name=f"Vector({dtype}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.width))


_I32 = ir.IntType(32)


def _lanes(values: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(values)), values)


def _at(builder: Any, pointer: Any, offset: Any, target: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [offset]), target.as_pointer())


@intrinsic
def _given(context: Any, flag: Any, pointer: Any) -> Any:
    """The pointer, or None where the flag is None: known when compiled."""
    if flag is types.none:
        return types.none(flag, pointer), lambda context, *_: context.get_dummy_value()
    return pointer(flag, pointer), lambda context, builder, signature, args: args[1]


@intrinsic(prefer_literal=True)
def _number(context: Any, pointer: Any, value: Any) -> Any:
    """An integer as a number of the pointer's type."""
    dtype = pointer.dtype
    return dtype(pointer, value), lambda context, *_: ir.Constant(
        context.get_value_type(dtype), float(value.literal_value)
    )


@intrinsic
def _shift(context: Any, pointer: Any, offset: Any) -> Any:
    """A pointer some numbers further on."""
    return pointer(pointer, offset), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def _data(context: Any, array: Any) -> Any:
    """The numbers of an array without the array: an index asks for no sign, and a call counts no references."""
    if array is types.none:
        return array(array), lambda context, *_: context.get_dummy_value()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


def _llvm(builder: Any, name: str, vector: Vector, kind: Any) -> Any:
    """LLVM's intrinsic function on tiles in memory."""
    name = f"llvm.{name}.v{vector.width}f{vector.dtype.bitwidth}.p0"
    known = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if known is None else known


def _mask(builder: Any, count: Any, width: int) -> Any:
    """The first `count` lanes."""
    every = _splat_value(builder, builder.trunc(count, _I32), width)
    return builder.icmp_signed("<", _lanes(list(range(width))), every)


def _splat_value(builder: Any, value: Any, width: int) -> Any:
    one = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.Constant(_I32, 0)
    )
    return builder.shuffle_vector(one, one, _lanes([0] * width))


def _width_of(width: Any) -> int:
    """A literal; or a tuple with as many items as its binary logarithm: a kernel is compiled for each width in use.

    (A literal asked of the caller, `numba.literally`, would be looked for anew at every call, for 0.1 s.)
    """
    return width.literal_value if isinstance(width, types.IntegerLiteral) else 1 << len(width)


@intrinsic(prefer_literal=True)
def _splat(context: Any, array: Any, value: Any, width: Any) -> Any:
    """A tile of one number, of the dtype of `array`."""
    vector = Vector(array.dtype, _width_of(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat_value(builder, args[1], vector.width)

    return vector(array, array.dtype, width), codegen


@intrinsic(prefer_literal=True)
def _load(context: Any, array: Any, offset: Any, width: Any, count: Any) -> Any:
    """`array[offset : offset + width]`; with a `count`, zeros after so many."""
    vector = Vector(array.dtype, _width_of(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = context.get_value_type(vector)
        pointer = _at(builder, args[0], args[1], tile)
        align = vector.dtype.bitwidth // 8
        if count is types.none:
            return builder.load(pointer, align=align)
        mask = _mask(builder, args[3], vector.width)
        kind = ir.FunctionType(tile, [pointer.type, _I32, mask.type, tile])
        masked = _llvm(builder, "masked.load", vector, kind)
        return builder.call(masked, [pointer, ir.Constant(_I32, align), mask, ir.Constant(tile, None)])

    return vector(array, offset, width, count), codegen


@intrinsic(prefer_literal=True)
def _store(context: Any, array: Any, offset: Any, vector: Any, count: Any) -> Any:
    """`array[offset : offset + width] = vector`, or only the first `count` of it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = args[2].type
        pointer = _at(builder, args[0], args[1], tile)
        align = vector.dtype.bitwidth // 8
        if count is types.none:
            builder.store(args[2], pointer, align=align)
            return context.get_dummy_value()
        mask = _mask(builder, args[3], vector.width)
        kind = ir.FunctionType(ir.VoidType(), [tile, pointer.type, _I32, mask.type])
        masked = _llvm(builder, "masked.store", vector, kind)
        builder.call(masked, [args[2], pointer, ir.Constant(_I32, align), mask])
        return context.get_dummy_value()

    return types.void(array, offset, vector, count), codegen


@intrinsic
def _scaled(context: Any, weight: Any, x: Any, total: Any) -> Any:
    """`total + weight * x` for a number and two tiles."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight = _splat_value(builder, args[0], x.width)
        return builder.fadd(builder.fmul(weight, args[1], flags=("contract",)), args[2], flags=("contract",))

    return total(x.dtype, x, total), codegen


@intrinsic
def _product(context: Any, x: Any, y: Any, total: Any) -> Any:
    """`total + x * y` for tiles."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(builder.fmul(args[0], args[1], flags=("contract",)), args[2], flags=("contract",))

    return total(x, y, total), codegen


@intrinsic
def _larger(context: Any, x: Any, y: Any) -> Any:
    """The larger of two tiles, lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), codegen


@intrinsic
def _leaky(context: Any, x: Any, at: Any, slope: Any) -> Any:
    """`x * (1 if at > 0 else slope)` for tiles: LeakyReLU(x) where `at` is x, its derivative where x is 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        positive = builder.fcmp_ordered(">", args[1], ir.Constant(args[1].type, None))
        return builder.select(positive, args[0], builder.fmul(args[0], _splat_value(builder, args[2], x.width)))

    return x(x, at, x.dtype), codegen


def _halves(builder: Any, tile: Any, join: Callable[[Any, Any], Any]) -> Any:
    """A tile to one number: its halves are joined until one lane is left."""
    width = tile.type.count
    while width > 1:
        width //= 2
        low, high = _lanes(list(range(width))), _lanes(list(range(width, 2 * width)))
        tile = join(builder.shuffle_vector(tile, tile, low), builder.shuffle_vector(tile, tile, high))
    return builder.extract_element(tile, ir.Constant(_I32, 0))


@intrinsic
def _sum(context: Any, vector: Any) -> Any:
    """The sum of a tile."""
    return vector.dtype(vector), lambda context, builder, signature, args: _halves(builder, args[0], builder.fadd)


@intrinsic
def _max(context: Any, vector: Any) -> Any:
    """The largest number of a tile."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _halves(builder, args[0], lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return vector.dtype(vector), codegen


@intrinsic(prefer_literal=True)
def _prefetch(context: Any, array: Any, offset: Any, width: Any) -> Any:
    """Ask for the cache lines of a tile."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        for byte in range(0, _width_of(width) * array.dtype.bitwidth // 8, 64):
            line = builder.gep(pointer, [ir.Constant(_I32, byte)])
            builder.call(ask, [line, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(array, offset, width), codegen


@intrinsic
def _exp(context: Any, vector: Any) -> Any:
    """exp of a tile, to 2 units in the last place of a float32; 0 below -87."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = args[0].type
        if vector.dtype is types.float64:
            exp = builder.module.declare_intrinsic("llvm.exp", [ir.DoubleType()])
            for lane in range(vector.width):
                at = ir.Constant(_I32, lane)
                args = [builder.insert_element(args[0], builder.call(exp, [builder.extract_element(args[0], at)]), at)]
            return args[0]

        def const(value: float) -> ir.Constant:
            return ir.Constant(tile, [value] * vector.width)

        def fma(x: Any, y: Any, z: Any) -> Any:
            return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

        low = builder.fcmp_ordered("<", args[0], const(-87.0))
        x = builder.select(low, const(-87.0), args[0])
        # exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2
        shift = const(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, found in the low bits
        shifted = builder.fadd(builder.fmul(x, const(1.0 / math.log(2.0))), shift)
        n = builder.fsub(shifted, shift)
        r = fma(n, const(-0.693359375), x)
        r = fma(n, const(2.12194440e-4), r)
        p = const(1.9875691500e-4)  # Cephes' expf
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, const(coefficient))
        p = fma(p, builder.fmul(r, r), builder.fadd(r, const(1.0)))
        integers = ir.VectorType(_I32, vector.width)
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * vector.width))
        result = builder.bitcast(builder.add(builder.bitcast(p, integers), exponent), tile)
        result = builder.select(low, const(0.0), result)
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[0], result)

    return vector(vector), codegen


# --- How work is divided: rows into pieces, pieces among threads. ---


class _Pieces(NamedTuple):
    """The rows of a CSR or CSC form, those of more than `SPLIT` edges in several pieces.

    Piece v holds the edges `bounds[v] : bounds[v + 1]` of row `row[v]`, and its sums go to `slot[v]`: the row, or,
    for a piece of a long row, a place after the last row. `long[q]` has its pieces at `first[q] : first[q + 1]`.
    """

    bounds: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    long: np.ndarray
    first: np.ndarray

    @property
    def slots(self) -> int:
        """How many places the sums need: the rows, and the pieces of long rows."""
        return int(self.first[-1])


def _divide(pointer: np.ndarray) -> _Pieces:
    num_rows = pointer.size - 1
    pieces = np.maximum(1, -(-np.diff(pointer) // SPLIT))
    rows = np.arange(num_rows, dtype=np.int32 if pointer.size < 2**31 else np.int64)
    long = np.flatnonzero(pieces > 1)
    first = num_rows + np.concatenate([[0], np.cumsum(pieces[long])])
    if not long.size:
        return _Pieces(pointer, rows, rows, long, first)
    row = np.repeat(rows, pieces)
    start = np.concatenate([[0], np.cumsum(pieces)[:-1]])
    bounds = np.append(pointer[row] + SPLIT * (np.arange(row.size) - start[row]), pointer[-1])
    slot = row.copy()
    slot[pieces[row] > 1] = np.arange(num_rows, first[-1])
    return _Pieces(bounds, row, slot, long, first)


_DIVIDED: WeakKeyDictionary[Edges, dict[str, _Pieces]] = WeakKeyDictionary()


def _pieces(edges: Edges, by: str) -> _Pieces:
    known = _DIVIDED.setdefault(edges, {})
    if by not in known:
        known[by] = _divide((edges.rowptr if by == "dst" else edges.transpose[0]).numpy())
    return known[by]


_POOL: list[ThreadPoolExecutor] = []
_POOL_LOCK = threading.Lock()


def _forget() -> None:
    _POOL.clear()
    _POOL_LOCK.release()


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(before=_POOL_LOCK.acquire, after_in_parent=_POOL_LOCK.release, after_in_child=_forget)


def _run(kernel: Any, dtype: np.dtype[Any], bounds: np.ndarray, work: int, *args: Any) -> None:
    """Call `kernel(first, last, buffers, *args)` for ranges of pieces, on as many threads as torch has.

    `work` is how many numbers there are to gather. The kernels give up the GIL and the threads are Python's: Numba's
    own would be one more pool beside torch's, and not each kind of it survives a fork or two callers at once, as
    autograd's threads may be. A piece is summed by one thread, so its bits do not depend on their number.
    """
    misses, start = _misses(kernel), time.perf_counter()
    _share_out(kernel, dtype, bounds, work, *args)
    if _misses(kernel) > misses:
        seconds, folder = time.perf_counter() - start, kernel.stats.cache_path or "memory alone"
        log.info("compiled %s for %s in %.1f s, kept in %s", kernel.__name__, dtype, seconds, folder)


def _misses(kernel: Any) -> int:
    """How often the kernel was compiled in this process."""
    return sum(kernel.stats.cache_misses.values())


def _share_out(kernel: Any, dtype: np.dtype[Any], bounds: np.ndarray, work: int, *args: Any) -> None:
    pieces, threads = bounds.size - 1, torch.get_num_threads()
    if threads == 1 or work < SMALL:
        kernel(0, pieces, np.zeros((10, SPLIT), dtype), *args)
        return
    cost = bounds + np.arange(bounds.size)  # an edge and a piece cost about the same to begin with
    cuts = np.searchsorted(cost, np.linspace(cost[0], cost[-1], 4 * threads + 1)[1:-1]).tolist()
    ranges, turn = list(itertools.pairwise([0, *cuts, pieces])), itertools.count()

    def share() -> None:
        buffers = np.zeros((10, SPLIT), dtype)
        while (at := next(turn)) < len(ranges):
            kernel(*ranges[at], buffers, *args)

    with _POOL_LOCK:
        if not _POOL:
            _POOL.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gat_pyg"))
    helpers = [_POOL[0].submit(share) for _ in range(threads - 1)]
    share()
    for helper in helpers:
        helper.result()


def _inline(function: Callable[..., Any]) -> Any:
    """A step of a kernel, inlined: a call would count references to each of its arrays."""
    return njit(nogil=True, error_model="numpy", forceinline=True)(function)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of a call when first called, and keep the code on disk where there is a folder for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:  # no folder to write to
        log.info("%s: the kernels are compiled anew in every process", error)
        return njit(**options)(function)


# --- Dropout: Philox4x32-10 (Salmon et al., SC 2011), as attention/dropout.py has it. ---


@_inline
def _philox(key: Any, edge: Any, group: Any) -> Any:
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = np.uint64(edge) & low, np.uint64(edge) >> half, np.uint64(group), np.uint64(0)
    k0, k1 = key & low, key >> half
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@_inline
def _draw(keep: Any, group: int, begin: int, n: int, ids: Any, named: bool, drop: Any) -> None:
    """k_ij, 0 or 1 / (1 - p), of n edges for the four heads of a group: `[4, SPLIT]`."""
    key, threshold, scale = drop
    for k in range(n):
        r0, r1, r2, r3 = _philox(key, np.int64(ids[begin + k]) if named else np.int64(begin + k), group)
        keep[k] = scale if r0 >= threshold else 0.0
        keep[SPLIT + k] = scale if r1 >= threshold else 0.0
        keep[2 * SPLIT + k] = scale if r2 >= threshold else 0.0
        keep[3 * SPLIT + k] = scale if r3 >= threshold else 0.0


# --- Steps that the kernels share, on the buffers of a piece: one number for each of its edges. ---

LANES = 16  # scores of a tile


@_inline
def _times(x: Any, y: Any, n: int) -> None:
    """x *= y."""
    for k in range(0, n, LANES):
        product = _product(_load(x, k, LANES, None), _load(y, k, LANES, None), _splat(x, 0.0, LANES))
        _store(x, k, product, None)


@_inline
def _dot(x: Any, y: Any, n: int) -> Any:
    """<x, y>."""
    total = _splat(x, 0.0, LANES)
    for k in range(0, n, LANES):
        total = _product(_load(x, k, LANES, None), _load(y, k, LANES, None), total)
    return _sum(total)


@_inline
def _exponentials(x: Any, n: int) -> None:
    """x = exp(x), and 0 from there to the end of the tile."""
    for k in range(n, (n + LANES - 1) // LANES * LANES):
        x[k] = -np.inf
    for k in range(0, n, LANES):
        _store(x, k, _exp(_load(x, k, LANES, None)), None)


@_inline
def _softmax(x: Any, n: int) -> Any:
    """Equation (2): x to its softmax, and 0 to the end of the tile; returns m = max x and log sum exp(x - m)."""
    for k in range(n, (n + LANES - 1) // LANES * LANES):
        x[k] = -np.inf
    tops = _splat(x, -np.inf, LANES)
    for k in range(0, n, LANES):
        tops = _larger(tops, _load(x, k, LANES, None))
    top = _max(tops)
    if top == -np.inf:  # all are -inf; or a NaN was lost on the way to the largest
        total = _number(x, 0)
        for k in range((n + LANES - 1) // LANES * LANES):
            x[k] = 0.0 if x[k] == -np.inf else np.nan
            total += x[k]
        return top + total, total
    one = _splat(x, 1.0, LANES)
    total = _splat(x, 0.0, LANES)
    for k in range(0, n, LANES):
        exp = _exp(_scaled(-top, one, _load(x, k, LANES, None)))
        _store(x, k, exp, None)
        total = _product(exp, one, total)
    share = 1 / _sum(total)
    for k in range(0, n, LANES):
        _store(x, k, _scaled(share, _load(x, k, LANES, None), _splat(x, 0.0, LANES)), None)
    return top, np.log(_sum(total))


@_inline
def _weigh(x: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, positive: Any,
           out: Any, out_plus: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """Equation (4) for a tile: the sum of `weight` times the rows `ids` of x, and that of `positive` times them."""
    total = _splat(x, 0.0, tile)
    plus = _splat(x, 0.0, tile)
    for k in range(n):
        _prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        total = _scaled(weight[k], values, total)
        if out_plus is not None:
            plus = _scaled(positive[k], values, plus)
    _store(out, o, total, count)
    if out_plus is not None:
        _store(out_plus, o, plus, count)


# --- Additive and constant attention. ---


@_compiled
def _forward(first: int, last: int, buffers: Any, bounds: Any, row: Any, slot: Any, src_: Any, ids_: Any,
             x_: Any, s_: Any, d_: Any, u_: Any, heads: int, channels: int, slope: Any, drop: Any,
             out_: Any, norm: Any, out_plus_: Any, mass_plus: Any, tile: Any) -> None:  # fmt: skip
    """Equations (1) to (4) for some pieces, with O+ and A+ where `out_plus` is given."""
    width = 1 << len(tile)
    by_src, by_dst, by_edge, named, dropping = s_.size > 0, d_.size > 0, u_.size > 0, ids_.size > 0, drop[1] > 0
    src, ids, x, s, d, u, out = _data(src_), _data(ids_), _data(x_), _data(s_), _data(d_), _data(u_), _data(out_)
    out_plus = _data(out_plus_)
    keeps, weight, positive = _data(buffers[:4]), _data(buffers[4]), _data(buffers[5])
    end = src_.size - 1
    for v in range(first, last):
        begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
        for h in range(heads):
            if dropping and h % 4 == 0:
                _draw(keeps, h // 4, begin, n, ids, named, drop)
            for k in range(n):
                z = _number(x, 0)
                if by_src:
                    z += s[np.int64(src[begin + k]) * heads + h]
                if by_dst:
                    z += d[i * heads + h]
                if by_edge:
                    z += u[(np.int64(ids[begin + k]) if named else np.int64(begin + k)) * heads + h]
                weight[k] = z
            for k in range(0, n, LANES):  # (3), without a branch on the sign, which nobody can predict
                values = _load(weight, k, LANES, None)
                _store(weight, k, _leaky(values, values, slope), None)
                if out_plus_ is not None:
                    _store(positive, k, _leaky(_splat(x, 1.0, LANES), values, _number(x, 0)), None)
            top, log_sum = _softmax(weight, n)  # (2)
            norm[2 * (o * heads + h)] = 0.0 if top == -np.inf and o == i else top
            norm[2 * (o * heads + h) + 1] = log_sum
            if out_plus_ is not None:
                mass_plus[o * heads + h] = _dot(weight, positive, n)
            if dropping:
                _times(weight, _shift(keeps, h % 4 * SPLIT), n)
            if out_plus_ is not None:
                _times(positive, weight, n)
            at, to, whole = h * channels, o * heads * channels, channels // width * width
            for c in range(at, at + whole, width):
                _weigh(x, heads * channels, c, src, begin, n, end, weight, positive, out, out_plus, to + c, tile, None)
            if whole < channels:
                _weigh(x, heads * channels, at + whole, src, begin, n, end, weight, positive,
                       out, out_plus, to + at + whole, tile, channels - whole)  # fmt: skip


@_compiled
def _dense(first: int, last: int, buffers: Any, grad_: Any, out_: Any, out_plus_: Any, mass_plus: Any,
           heads: int, channels: int, slope: Any, stats: Any, grad_d: Any, tile: Any) -> None:  # fmt: skip
    """For some dst, D = <dO, O> as the fourth of their `stats`, and grad d = (1 - slope)(<dO, O+> - D A+)."""
    width = 1 << len(tile)
    grad, out, out_plus = _data(grad_), _data(out_), _data(out_plus_)
    for i in range(first, last):
        for h in range(heads):
            product, plus = _splat(grad, 0.0, tile), _splat(grad, 0.0, tile)
            at, whole = (i * heads + h) * channels, channels // width * width
            for c in range(at, at + whole, width):
                values = _load(grad, c, tile, None)
                product = _product(values, _load(out, c, tile, None), product)
                plus = _product(values, _load(out_plus, c, tile, None), plus)
            if whole < channels:
                values = _load(grad, at + whole, tile, channels - whole)
                product = _product(values, _load(out, at + whole, tile, channels - whole), product)
                plus = _product(values, _load(out_plus, at + whole, tile, channels - whole), plus)
            delta = _sum(product)
            stats[(4 * i + 3) * heads + h] = delta
            grad_d[i * heads + h] = (1 - slope) * (_sum(plus) - delta * mass_plus[i * heads + h])


@_inline
def _gather(grad: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, product: Any,
            x: Any, own: int, out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """grad x_j = sum_i k_ij alpha_ij dO_i for a tile, and the tile's share of <dO_i, x_j>."""
    total = _splat(grad, 0.0, tile)
    mine = _load(x, own, tile, count)
    for k in range(n):
        _prefetch(grad, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(grad, np.int64(ids[begin + k]) * row + at, tile, count)
        total = _scaled(weight[k], values, total)
        if product is not None:
            product[k] += _sum(_product(mine, values, _splat(grad, 0.0, tile)))
    _store(out, o, total, count)


@_compiled
def _backward(first: int, last: int, buffers: Any, bounds: Any, row: Any, slot: Any, dst_: Any, place_: Any, ids_: Any,
              grad_: Any, x_: Any, s_: Any, u_: Any, stats_: Any, heads: int, channels: int, slope: Any, drop: Any,
              grad_x_: Any, grad_s: Any, per_edge_: Any, scored: Any, tile: Any) -> None:  # fmt: skip
    """grad x and grad s of some pieces of src rows, in one gather of dO; `stats` holds (d, m, log sum, D) of every dst.

    With `grad_s`, `per_edge` is given dz_ij LeakyReLU'(z_ij), grouped by dst, where it is wanted. Without, D is not
    known yet, and `per_edge` is given g_ij = k_ij <dO_i, x_j>. `scored` is None for constant attention: then grad x is
    all there is.
    """
    width = 1 << len(tile)
    by_src, by_edge, named, dropping = s_.size > 0, u_.size > 0, ids_.size > 0, drop[1] > 0
    summed, kept = grad_s.size > 0, per_edge_.size > 0
    dst, place, ids, grad, x, s, u = (
        _data(dst_), _data(place_), _data(ids_), _data(grad_), _data(x_), _data(s_), _data(u_))  # fmt: skip
    stats, grad_x, per_edge = _data(stats_), _data(grad_x_), _data(per_edge_)
    keeps, weight, alpha = _data(buffers[:4]), _data(buffers[4]), _data(buffers[5])
    factor, delta, top = _data(buffers[6]), _data(buffers[7]), _data(buffers[8])
    product = _given(scored, _data(buffers[9]))
    end = dst_.size - 1
    for v in range(first, last):
        begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
        for h in range(heads):
            if dropping and h % 4 == 0:
                _draw(keeps, h // 4, begin, n, ids, named, drop)
            keep = _shift(keeps, h % 4 * SPLIT)
            for k in range(n):
                q = np.int64(dst[begin + k]) * 4 * heads + h
                z = stats[q]
                if by_src:
                    z += s[j * heads + h]
                if by_edge:
                    z += u[(np.int64(ids[begin + k]) if named else np.int64(begin + k)) * heads + h]
                alpha[k] = z
                top[k] = -stats[q + heads]
                factor[k] = -stats[q + 2 * heads]
                delta[k] = -stats[q + 3 * heads]
            for k in range(0, n, LANES):
                values, one = _load(alpha, k, LANES, None), _number(x, 1)
                # rounded as in the forward pass, so that no score is above the largest
                below = _scaled(one, _leaky(values, values, slope), _load(top, k, LANES, None))
                _store(alpha, k, _scaled(one, below, _load(factor, k, LANES, None)), None)
                _store(factor, k, _leaky(_splat(x, 1.0, LANES), values, slope), None)
            _exponentials(alpha, n)
            for k in range(0, n, LANES):
                _store(weight, k, _load(alpha, k, LANES, None), None)
                if scored is not None:
                    _store(product, k, _splat(alpha, 0.0, LANES), None)
            if dropping:
                _times(weight, keep, n)
            at, to, own, whole = h * channels, o * heads * channels, j * heads * channels, channels // width * width
            for c in range(at, at + whole, width):
                _gather(grad, heads * channels, c, dst, begin, n, end, weight, product,
                        x, own + c, grad_x, to + c, tile, None)  # fmt: skip
            if whole < channels:
                _gather(grad, heads * channels, at + whole, dst, begin, n, end, weight, product,
                        x, own + at + whole, grad_x, to + at + whole, tile, channels - whole)  # fmt: skip
            if scored is not None:
                if dropping:
                    _times(product, keep, n)
                if summed:
                    _times(alpha, factor, n)
                    for k in range(0, n, LANES):  # de = alpha (g - D) LeakyReLU'(z)
                        g = _scaled(_number(x, 1), _load(product, k, LANES, None), _load(delta, k, LANES, None))
                        _store(product, k, _product(g, _load(alpha, k, LANES, None), _splat(alpha, 0.0, LANES)), None)
                    total = _number(x, 0)
                    for k in range(n):
                        total += product[k]
                    grad_s[o * heads + h] = total
                if kept:
                    for k in range(n):
                        per_edge[np.int64(place[begin + k]) * heads + h] = product[k]


# --- Attention whose score needs the features of both ends: GATv2's, and the scaled dot product. ---


@_inline
def _score(x: Any, own: Any, mine: int, att: Any, a: int, row: int, at: int, ids: Any, begin: int, n: int, end: int,
           e: Any, slope: Any, grad: Any, product: Any, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile's share of att . LeakyReLU(x_j + x_i), or of <x_i, x_j>; and with `product` of <dO_i, x_j>."""
    tile_i = _load(own, mine, tile, count)
    if att is not None:
        weights = _load(att, a, tile, count)
    if product is not None:
        change = _load(grad, mine, tile, count)
    zero = _splat(x, 0.0, tile)
    for k in range(n):
        _prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if product is not None:
            product[k] += _sum(_product(change, values, zero))
        if att is not None:
            values = _scaled(_number(x, 1), values, tile_i)
            e[k] += _sum(_product(weights, _leaky(values, values, slope), zero))
        else:
            e[k] += _sum(_product(tile_i, values, zero))


@_inline
def _spread(x: Any, own: Any, mine: int, att: Any, row: int, at: int, ids: Any, begin: int, n: int, de: Any, slope: Any,
            out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile of sum de_ij LeakyReLU'(x_j + x_i), or of sum de_ij x_j, over the other ends of a row's edges."""
    tile_i = _load(own, mine, tile, count)
    one = _splat(x, 1.0, tile)
    total = _splat(x, 0.0, tile)
    for k in range(n):
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if att is not None:
            values = _leaky(one, _scaled(_number(x, 1), values, tile_i), slope)
        total = _scaled(de[k], values, total)
    _store(out, o, total, count)


@_compiled
def _forward_pair(first: int, last: int, buffers: Any, bounds: Any, row: Any, slot: Any, src_: Any, ids_: Any,
                  x_: Any, x_dst_: Any, att_: Any, heads: int, channels: int, slope: Any, scale: Any, drop: Any,
                  out_: Any, norm: Any, tile: Any) -> None:  # fmt: skip
    """The scores of some pieces, `scale` times, then equations (2) and (4)."""
    width = 1 << len(tile)
    named, dropping = ids_.size > 0, drop[1] > 0
    src, ids, x, x_dst, att, out = _data(src_), _data(ids_), _data(x_), _data(x_dst_), _data(att_), _data(out_)
    keeps, weight = _data(buffers[:4]), _data(buffers[4])
    end = src_.size - 1
    for v in range(first, last):
        begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
        for h in range(heads):
            if dropping and h % 4 == 0:
                _draw(keeps, h // 4, begin, n, ids, named, drop)
            at, to, mine, whole = h * channels, o * heads * channels, i * heads * channels, channels // width * width
            for k in range(n):
                weight[k] = 0.0
            for c in range(at, at + whole, width):
                _score(x, x_dst, mine + c, att, c, heads * channels, c, src, begin, n, end, weight, slope,
                       None, None, tile, None)  # fmt: skip
            if whole < channels:
                c = at + whole
                _score(x, x_dst, mine + c, att, c, heads * channels, c, src, begin, n, end, weight, slope,
                       None, None, tile, channels - whole)  # fmt: skip
            for k in range(n):
                weight[k] *= scale
            top, log_sum = _softmax(weight, n)  # (2)
            norm[2 * (o * heads + h)] = 0.0 if top == -np.inf and o == i else top
            norm[2 * (o * heads + h) + 1] = log_sum
            if dropping:
                _times(weight, _shift(keeps, h % 4 * SPLIT), n)
            for c in range(at, at + whole, width):
                _weigh(x, heads * channels, c, src, begin, n, end, weight, None, out, None, to + c, tile, None)
            if whole < channels:
                c = at + whole
                _weigh(x, heads * channels, c, src, begin, n, end, weight, None,
                       out, None, to + c, tile, channels - whole)  # fmt: skip


@_compiled
def _backward_pair_dst(first: int, last: int, buffers: Any, bounds: Any, row: Any, slot: Any, src_: Any, ids_: Any,
                       grad_: Any, x_: Any, x_dst_: Any, att_: Any, norm: Any, delta: Any,
                       heads: int, channels: int, slope: Any, scale: Any, drop: Any,
                       weights: Any, changes: Any, grad_dst_: Any, tile: Any) -> None:  # fmt: skip
    """k_ij alpha_ij and de_ij = alpha_ij (g_ij - D_i) of some pieces, grouped by dst, and the `_spread` of each dst."""
    width = 1 << len(tile)
    named, dropping = ids_.size > 0, drop[1] > 0
    src, ids, grad, x, x_dst, att, grad_dst = (
        _data(src_), _data(ids_), _data(grad_), _data(x_), _data(x_dst_), _data(att_), _data(grad_dst_))  # fmt: skip
    keeps, alpha, product = _data(buffers[:4]), _data(buffers[4]), _data(buffers[5])
    end = src_.size - 1
    for v in range(first, last):
        begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
        for h in range(heads):
            if dropping and h % 4 == 0:
                _draw(keeps, h // 4, begin, n, ids, named, drop)
            keep = _shift(keeps, h % 4 * SPLIT)
            at, to, mine, whole = h * channels, o * heads * channels, i * heads * channels, channels // width * width
            for k in range(n):
                alpha[k] = 0.0
                product[k] = 0.0
            for c in range(at, at + whole, width):
                _score(x, x_dst, mine + c, att, c, heads * channels, c, src, begin, n, end, alpha, slope,
                       grad, product, tile, None)  # fmt: skip
            if whole < channels:
                c = at + whole
                _score(x, x_dst, mine + c, att, c, heads * channels, c, src, begin, n, end, alpha, slope,
                       grad, product, tile, channels - whole)  # fmt: skip
            for k in range(n):
                alpha[k] = alpha[k] * scale - norm[2 * (i * heads + h)] - norm[2 * (i * heads + h) + 1]
            _exponentials(alpha, n)
            if dropping:
                _times(product, keep, n)
            for k in range(n):
                weights[(begin + k) * heads + h] = alpha[k] * keep[k] if dropping else alpha[k]
                product[k] = alpha[k] * (product[k] - delta[i * heads + h]) * scale
                changes[(begin + k) * heads + h] = product[k]
            for c in range(at, at + whole, width):
                _spread(x, x_dst, mine + c, att, heads * channels, c, src, begin, n, product, slope,
                        grad_dst, to + c, tile, None)  # fmt: skip
            if whole < channels:
                c = at + whole
                _spread(x, x_dst, mine + c, att, heads * channels, c, src, begin, n, product, slope,
                        grad_dst, to + c, tile, channels - whole)  # fmt: skip


@_compiled
def _backward_pair_src(first: int, last: int, buffers: Any, bounds: Any, row: Any, slot: Any, dst_: Any, place: Any,
                       grad_: Any, x_: Any, x_dst_: Any, att_: Any, weights: Any, changes: Any,
                       heads: int, channels: int, slope: Any, grad_x_: Any, grad_src_: Any,
                       tile: Any) -> None:  # fmt: skip
    """sum k_ij alpha_ij dO_i of some pieces of src rows, and the `_spread` of each src."""
    width = 1 << len(tile)
    dst, grad, x, x_dst, att = _data(dst_), _data(grad_), _data(x_), _data(x_dst_), _data(att_)
    grad_x, grad_src = _data(grad_x_), _data(grad_src_)
    weight, change = _data(buffers[4]), _data(buffers[5])
    end = dst_.size - 1
    for v in range(first, last):
        begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
        for h in range(heads):
            for k in range(n):
                edge = np.int64(place[begin + k]) * heads + h
                weight[k] = weights[edge]
                change[k] = changes[edge]
            at, to, mine, whole = h * channels, o * heads * channels, j * heads * channels, channels // width * width
            for c in range(at, at + whole, width):
                _weigh(grad, heads * channels, c, dst, begin, n, end, weight, None, grad_x, None, to + c, tile, None)
                _spread(x_dst, x, mine + c, att, heads * channels, c, dst, begin, n, change, slope,
                        grad_src, to + c, tile, None)  # fmt: skip
            if whole < channels:
                c = at + whole
                _weigh(grad, heads * channels, c, dst, begin, n, end, weight, None,
                       grad_x, None, to + c, tile, channels - whole)  # fmt: skip
                _spread(x_dst, x, mine + c, att, heads * channels, c, dst, begin, n, change, slope,
                        grad_src, to + c, tile, channels - whole)  # fmt: skip


# --- The sums of long rows from those of their pieces. ---


@_compiled
def _merge(
    long: Any, first: Any, out: Any, norm: Any, out_plus: Any, mass_plus: Any, heads: int, channels: int
) -> None:
    """The outputs of long rows from those of their pieces, each weighted by its share of the softmax's denominator."""
    for q in range(long.size):
        for h in range(heads):
            top = norm.dtype.type(-np.inf)
            for p in range(first[q], first[q + 1]):
                top = max(top, norm[2 * (p * heads + h)])
            total = norm.dtype.type(0)
            for p in range(first[q], first[q + 1]):
                if norm[2 * (p * heads + h)] != -np.inf:  # a NaN is not, and goes on
                    total += np.exp(norm[2 * (p * heads + h)] - top + norm[2 * (p * heads + h) + 1])
            at = long[q] * heads + h
            log_sum = np.log(total) if total != 0 else total
            norm[2 * at] = top if total != 0 else total
            norm[2 * at + 1] = log_sum
            for c in range(at * channels, (at + 1) * channels):
                out[c] = 0.0
                if out_plus.size:
                    out_plus[c] = 0.0
            if out_plus.size:
                mass_plus[at] = 0.0
            for p in range(first[q], first[q + 1]):
                if norm[2 * (p * heads + h)] == -np.inf:
                    continue
                share = np.exp(norm[2 * (p * heads + h)] - top + norm[2 * (p * heads + h) + 1] - log_sum)
                for c in range(channels):
                    out[at * channels + c] += share * out[(p * heads + h) * channels + c]
                    if out_plus.size:
                        out_plus[at * channels + c] += share * out_plus[(p * heads + h) * channels + c]
                if out_plus.size:
                    mass_plus[at] += share * mass_plus[p * heads + h]


@_compiled
def _merge_sums(long: Any, first: Any, sums: Any, row: int) -> None:
    """The sums of long rows from those of their pieces, in order."""
    for q in range(long.size):
        for c in range(row):
            total = sums[first[q] * row + c]
            for p in range(first[q] + 1, first[q + 1]):
                total += sums[p * row + c]
            sums[long[q] * row + c] = total


@_compiled
def _normalise(first: int, last: int, buffers: Any, rowptr: Any, src: Any, ids: Any, s: Any, d: Any, u: Any, norm: Any,
               heads: int, slope: Any, per_edge: Any, grad_d: Any) -> None:  # fmt: skip
    """g_ij in `per_edge` to dz_ij LeakyReLU'(z_ij), by D_i = sum_j alpha_ij g_ij; and its sum, grad d."""
    longest = 0
    for i in range(first, last):
        longest = max(longest, rowptr[i + 1] - rowptr[i])
    alpha = np.empty((longest + LANES - 1) // LANES * LANES, norm.dtype)
    factor = np.empty(longest, norm.dtype)
    for i in range(first, last):
        begin, n = rowptr[i], rowptr[i + 1] - rowptr[i]
        for h in range(heads):
            for k in range(n):
                z = norm.dtype.type(0)
                if s.size:
                    z += s[np.int64(src[begin + k]) * heads + h]
                if d.size:
                    z += d[i * heads + h]
                if u.size:
                    z += u[(np.int64(ids[begin + k]) if ids.size else np.int64(begin + k)) * heads + h]
                factor[k] = 1.0 if z > 0 else slope
                alpha[k] = z * factor[k] - norm[2 * (i * heads + h)] - norm[2 * (i * heads + h) + 1]
            _exponentials(_data(alpha), n)
            delta = norm.dtype.type(0)
            for k in range(n):
                delta += alpha[k] * per_edge[(begin + k) * heads + h]
            total = norm.dtype.type(0)
            for k in range(n):
                de = alpha[k] * (per_edge[(begin + k) * heads + h] - delta) * factor[k]
                per_edge[(begin + k) * heads + h] = de
                total += de
            grad_d[i * heads + h] = total


@_compiled
def _collect(
    first: int, last: int, buffers: Any, colptr: Any, place: Any, per_edge: Any, heads: int, grad_s: Any
) -> None:
    """grad s_j = sum_i dz_ij LeakyReLU'(z_ij)."""
    for j in range(first, last):
        for h in range(heads):
            total = grad_s.dtype.type(0)
            for t in range(colptr[j], colptr[j + 1]):
                total += per_edge[np.int64(place[t]) * heads + h]
            grad_s[j * heads + h] = total


# --- The functions that attention/fused.py calls. ---


def forward(
    x: Tensor,
    score_src: Tensor | None,
    score_dst: Tensor | None,
    score_edge: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    plus: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """O `[N_dst, H, C]`, the softmax's (max, log-sum) `[N_dst, H, 2]`, and O+ and A+ where `plus` asks for them."""
    dtype = _dtype(x, score_src, score_dst, score_edge)
    heads, channels = x.shape[1:]
    pieces = _pieces(edges, "dst")
    out = _empty(pieces.slots, heads * channels, dtype=dtype)
    norm = _empty(pieces.slots, heads * 2, dtype=dtype)
    out_plus = _empty(pieces.slots if plus else 0, heads * channels, dtype=dtype)
    mass_plus = _empty(pieces.slots if plus else 0, heads, dtype=dtype)
    _run(
        _forward,
        dtype,
        pieces.bounds,
        edges.num_edges * heads * channels,
        pieces.bounds,
        pieces.row,
        pieces.slot,
        edges.src.numpy(),
        _ids(edges),
        *(_flat(t, dtype) for t in (x, score_src, score_dst, score_edge)),
        heads,
        channels,
        dtype.type(negative_slope),
        _drop(seed, dropout, dtype),
        out,
        norm,
        out_plus if plus else None,
        mass_plus,
        _tile(channels),
    )
    if pieces.long.size:
        _merge(pieces.long, pieces.first, out, norm, out_plus, mass_plus, heads, channels)
    rows = edges.num_dst
    return (
        _tensor(out, rows, heads, channels),
        _tensor(norm, rows, heads, 2),
        _tensor(out_plus, rows, heads, channels) if plus else None,
        _tensor(mass_plus, rows, heads) if plus else None,
    )


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
    norm: Tensor,
    out_plus: Tensor | None,
    mass_plus: Tensor | None,
    edge_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x and the scores; by D and grad d in one dense pass where O and O+ were kept."""
    dtype = _dtype(x, score_src, score_dst, score_edge)
    heads, channels = x.shape[1:]
    colptr, dst, place = edges.transpose
    pieces = _pieces(edges, "src")
    scored = not (score_src is None and score_dst is None and score_edge is None)
    speed = scored and out is not None
    slope, drop, width = dtype.type(negative_slope), _drop(seed, dropout, dtype), _tile(channels)
    flat_grad, flat_x, flat_norm = _flat(grad, dtype), _flat(x, dtype), _flat(norm, dtype)
    s, d, u = (_flat(t, dtype) for t in (score_src, score_dst, score_edge))
    names = dropout > 0 or score_edge is not None
    rows = np.arange(edges.num_dst + 1)
    work = edges.num_edges * heads * channels

    grad_x = _empty(pieces.slots, heads * channels, dtype=dtype)
    grad_s = _empty(pieces.slots if scored else 0, heads, dtype=dtype)
    grad_d = _empty(edges.num_dst if scored else 0, heads, dtype=dtype)
    per_edge = _empty(edges.num_edges if scored and (edge_grad or not speed) else 0, heads, dtype=dtype)
    stats = torch.zeros(edges.num_dst, 4, heads, dtype=norm.dtype)
    if score_dst is not None:
        stats[:, 0] = score_dst
    stats[:, 1:3] = norm.transpose(1, 2)
    flat_stats = _flat(stats, dtype)
    if speed:
        flat = (_flat(t, dtype) for t in (out, out_plus, mass_plus))
        _run(_dense, dtype, rows, edges.num_dst * heads * channels,
             flat_grad, *flat, heads, channels, slope, flat_stats, grad_d, width)  # fmt: skip
    _run(
        _backward,
        dtype,
        pieces.bounds,
        work,
        pieces.bounds,
        pieces.row,
        pieces.slot,
        dst.numpy(),
        place.numpy(),
        edges.ids_by_src.numpy() if names else place[:0].numpy(),
        flat_grad,
        flat_x,
        s,
        u,
        flat_stats,
        heads,
        channels,
        slope,
        drop,
        grad_x,
        grad_s if speed else grad_s[:0],
        per_edge,
        True if scored else None,
        width,
    )
    if scored and not speed:
        rowptr = edges.rowptr.numpy()
        _run(
            _normalise,
            dtype,
            rowptr,
            work,
            rowptr,
            edges.src.numpy(),
            _ids(edges),
            s,
            d,
            u,
            flat_norm,
            heads,
            slope,
            per_edge,
            grad_d,
        )
        if score_src is not None:
            _run(_collect, dtype, colptr.numpy(), work, colptr.numpy(), place.numpy(), per_edge, heads, grad_s)
    if pieces.long.size:
        _merge_sums(pieces.long, pieces.first, grad_x, heads * channels)
        if speed:
            _merge_sums(pieces.long, pieces.first, grad_s, heads)
    return (
        _tensor(grad_x, edges.num_src, heads, channels),
        None if score_src is None else _tensor(grad_s, edges.num_src, heads),
        None if score_dst is None else _tensor(grad_d, edges.num_dst, heads),
        edges.ungroup(_tensor(per_edge, edges.num_edges, heads)) if edge_grad else None,
    )


def forward_pair(
    x: Tensor,
    x_dst: Tensor,
    att: Tensor | None,
    edges: Edges,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """O and (max, log-sum) for e_ij = att . LeakyReLU(x_j + x_i) or, without `att`, <x_i, x_j> / sqrt(C)."""
    dtype = _dtype(x, x_dst, att)
    heads, channels = x.shape[1:]
    pieces = _pieces(edges, "dst")
    out = _empty(pieces.slots, heads * channels, dtype=dtype)
    norm = _empty(pieces.slots, heads * 2, dtype=dtype)
    none = np.empty(0, dtype)
    _run(
        _forward_pair,
        dtype,
        pieces.bounds,
        edges.num_edges * heads * channels,
        pieces.bounds,
        pieces.row,
        pieces.slot,
        edges.src.numpy(),
        _ids(edges),
        _flat(x, dtype),
        _flat(x_dst, dtype),
        None if att is None else _flat(att, dtype),
        heads,
        channels,
        dtype.type(negative_slope),
        dtype.type(1.0 if att is not None else max(channels, 1) ** -0.5),
        _drop(seed, dropout, dtype),
        out,
        norm,
        _tile(channels),
    )
    if pieces.long.size:
        _merge(pieces.long, pieces.first, out, norm, none, none, heads, channels)
    return _tensor(out, edges.num_dst, heads, channels), _tensor(norm, edges.num_dst, heads, 2)


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
    norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, x_dst and att.

    Of att . LeakyReLU(v), v = x_j + x_i, they are de att LeakyReLU'(v) for both ends and de LeakyReLU(v) for att,
    which is de v LeakyReLU'(v). So with B_i = sum_j de LeakyReLU'(v) and A_j the same sum over i, grad x_i = att B_i,
    grad x_j = att A_j + sum_i k alpha dO_i and grad att = sum_i x_i B_i + sum_j x_j A_j: nothing is kept of an edge
    but two numbers a head.
    """
    dtype = _dtype(x, x_dst, att)
    heads, channels = x.shape[1:]
    _, dst, place = edges.transpose
    by_dst, by_src = _pieces(edges, "dst"), _pieces(edges, "src")
    slope, width, work = dtype.type(negative_slope), _tile(channels), edges.num_edges * heads * channels
    g, flat_x, flat_x_dst = _flat(grad, dtype), _flat(x, dtype), _flat(x_dst, dtype)
    flat_att = None if att is None else _flat(att, dtype)
    delta = _flat((grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1), dtype)
    weights, changes = _empty(edges.num_edges, heads, dtype=dtype), _empty(edges.num_edges, heads, dtype=dtype)
    flat_dst = _empty(by_dst.slots, heads * channels, dtype=dtype)
    _run(
        _backward_pair_dst,
        dtype,
        by_dst.bounds,
        work,
        by_dst.bounds,
        by_dst.row,
        by_dst.slot,
        edges.src.numpy(),
        _ids(edges),
        g,
        flat_x,
        flat_x_dst,
        flat_att,
        _flat(norm, dtype),
        delta,
        heads,
        channels,
        slope,
        dtype.type(1.0 if att is not None else max(channels, 1) ** -0.5),
        _drop(seed, dropout, dtype),
        weights,
        changes,
        flat_dst,
        width,
    )
    flat_grad, flat_src = (_empty(by_src.slots, heads * channels, dtype=dtype) for _ in range(2))
    _run(
        _backward_pair_src,
        dtype,
        by_src.bounds,
        work,
        by_src.bounds,
        by_src.row,
        by_src.slot,
        dst.numpy(),
        place.numpy(),
        g,
        flat_x,
        flat_x_dst,
        flat_att,
        weights,
        changes,
        heads,
        channels,
        slope,
        flat_grad,
        flat_src,
        width,
    )
    if by_dst.long.size:
        _merge_sums(by_dst.long, by_dst.first, flat_dst, heads * channels)
    if by_src.long.size:
        _merge_sums(by_src.long, by_src.first, flat_grad, heads * channels)
        _merge_sums(by_src.long, by_src.first, flat_src, heads * channels)
    grad_x = _tensor(flat_grad, edges.num_src, heads, channels)
    spread_src = _tensor(flat_src, edges.num_src, heads, channels)
    spread_dst = _tensor(flat_dst, edges.num_dst, heads, channels)
    if att is None:
        return grad_x.add_(spread_src), spread_dst, None
    wide = att.to(grad_x.dtype)
    grad_att = torch.einsum("nhc,nhc->hc", x.to(wide.dtype), spread_src)
    grad_att += torch.einsum("nhc,nhc->hc", x_dst.to(wide.dtype), spread_dst)
    return grad_x.addcmul_(spread_src, wide), spread_dst.mul_(wide), grad_att


def _dtype(*tensors: Tensor | None) -> np.dtype[Any]:
    """float64 if any of them is, else float32."""
    return np.dtype(np.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else np.float32)


def _flat(tensor: Tensor | None, dtype: np.dtype[Any]) -> np.ndarray:
    """The numbers of a tensor as a vector; none of None."""
    if tensor is None:
        return np.empty(0, dtype)
    wide = torch.float64 if dtype == np.float64 else torch.float32
    flat: np.ndarray = tensor.detach().to(wide).contiguous().view(-1).numpy()
    return flat


def _ids(edges: Edges) -> np.ndarray:
    """The place in the caller's order of each edge; nothing where that is its own."""
    ids: np.ndarray = (edges.src[:0] if edges.perm is None else edges.perm).numpy()
    return ids


def _empty(rows: int, row: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Room for results, by NumPy: it asks for huge pages where that is large, and first writing there costs less."""
    return np.empty(rows * row, dtype)


def _tensor(values: np.ndarray, rows: int, *shape: int) -> Tensor:
    return torch.from_numpy(values)[: rows * math.prod(shape)].view(rows, *shape)


def _drop(seed: Tensor | None, dropout: float, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Key, threshold and scale: an edge is kept if its random word reaches the threshold."""
    scale = dtype.type(1 / (1 - dropout)) if dropout < 1 else dtype.type(0)
    return np.uint64(0 if seed is None else int(seed.numpy()) % 2**64), np.uint64(math.floor(dropout * 2**32)), scale


def _tile(channels: int) -> tuple[int, ...]:
    """The width of a tile as `_width_of` reads it: 8 to 64 floats, a head's, or what the registers hold twice."""
    return (0,) * next((power for power in (3, 4, 5) if channels <= 1 << power), 6)
