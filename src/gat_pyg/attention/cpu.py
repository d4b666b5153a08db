"""The fused operation on a CPU, compiled by Numba: one gather of the features forward, one of the gradient backward.

Every kernel works through rows: the neighbourhood of a dst forward, the edges out of a src backward; and through a few
heads at a time, which are the lanes of a vector. The scores, softmax and dropout of a row are made edge by edge for all
these heads at once, in buffers that a core's cache holds. Then the features are summed in vector registers, narrow
heads together and of wide ones a tile at a time, while the rows of the edges to come are prefetched. A row of more than
`SPLIT` edges is several pieces, merged in a fixed order. Several models on one graph lie one behind the other, and each
is computed as if it were alone: in a kernel `x_` is the array of all and `x` the numbers of the one that it is called
for. No result depends on the number of threads.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model
from torch import Tensor

from ..graph.edges import Edges
from .compiling import compiled, inline

SPLIT = 1024  # edges of a piece: its buffers stay in a core's L2
AHEAD = 16  # edges between the one that is summed and the one that is prefetched
SMALL = 1 << 21  # numbers gathered, about a millisecond, below which one thread is as fast as several
NARROW = 16  # features of a head below which the heads of a vector are summed together
LANES = 16  # numbers of a buffer that are computed at once
BLOCK = 512  # rows that are summed one after the other
DRAWN = 16  # calls of the random generator that are made at once


# --- Vectors of floats as values of Numba, with + - * between them, held in registers. ---


class Vector(types.Type):  # type: ignore[misc]
    """`width` numbers of type `dtype`."""

    def __init__(self, dtype: types.Type, width: int) -> None:
        self.dtype, self.width = dtype, width
        super().__init__(name=f"Vector({dtype}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.width))


_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _arithmetic(function: Any, instruction: str) -> None:
    """`function` of two vectors, or of a number and a vector; a product and a sum may be rounded as one."""

    @infer_global(function)
    class _Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kwargs: Any) -> Any:
            x, y = args
            if isinstance(y, Vector) and (x == y or x == y.dtype):
                return signature(y, x, y)
            return None

    @lower_builtin(function, types.Float, Vector)
    @lower_builtin(function, Vector, Vector)
    def _lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y = args
        if not isinstance(signature.args[0], Vector):
            x = _splat_value(builder, x, signature.args[1].width)
        return getattr(builder, instruction)(x, y, flags=("contract",))


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")


def _indices(values: Any) -> ir.Constant:
    values = list(values)
    return ir.Constant(ir.VectorType(_I32, len(values)), values)


def _splat_value(builder: Any, value: Any, width: int) -> Any:
    one = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.Constant(_I32, 0)
    )
    return builder.shuffle_vector(one, one, _indices([0] * width))


def _at(builder: Any, pointer: Any, offset: Any, target: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [offset]), target.as_pointer())


def _width(width: Any) -> int:
    """A literal; a tuple with as many items as its binary logarithm; or a pair of tuples, the second its second factor.

    So a kernel is compiled for each width in use. (A literal asked of the caller, `numba.literally`, would be looked
    for anew at every call, for 0.1 s.)
    """
    if isinstance(width, types.IntegerLiteral):
        return int(width.literal_value)
    if len(width) == 2 and isinstance(width[0], types.BaseTuple):
        return (1 << len(width[0])) * len(width[1])
    return 1 << len(width)


@intrinsic
def _given(context: Any, flag: Any, value: Any) -> Any:
    """The value, or None where the flag is None: known when compiled."""
    if flag is types.none:
        return types.none(flag, value), lambda context, *_: context.get_dummy_value()
    return value(flag, value), lambda context, builder, signature, args: args[1]


@intrinsic
def _data(context: Any, array: Any, offset: Any) -> Any:
    """The numbers of an array from `offset` on, without the array: an index asks for no sign, and a call counts no
    references. None of None."""
    if array is types.none:
        return array(array, offset), lambda context, *_: context.get_dummy_value()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), codegen


def _llvm(builder: Any, name: str, vector: Vector, kind: Any) -> Any:
    """LLVM's intrinsic function on vectors in memory."""
    name = f"llvm.{name}.v{vector.width}f{vector.dtype.bitwidth}.p0"
    known = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if known is None else known


def _mask(builder: Any, count: Any, width: int) -> Any:
    """The first `count` lanes."""
    return builder.icmp_signed("<", _indices(range(width)), _splat_value(builder, builder.trunc(count, _I32), width))


@intrinsic(prefer_literal=True)
def _splat(context: Any, array: Any, value: Any, width: Any) -> Any:
    """A vector of one number, of the dtype of `array`."""
    vector = Vector(array.dtype, _width(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat_value(builder, args[1], vector.width)

    return vector(array, array.dtype, width), codegen


@intrinsic(prefer_literal=True)
def _load(context: Any, array: Any, offset: Any, width: Any, count: Any) -> Any:
    """`array[offset : offset + width]`; with a `count`, zeros after so many."""
    vector = Vector(array.dtype, _width(width))

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
def _larger(context: Any, x: Any, y: Any) -> Any:
    """The larger of two vectors, lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), codegen


@intrinsic
def _leaky(context: Any, x: Any, at: Any, slope: Any) -> Any:
    """`x * (1 if at > 0 else slope)`: LeakyReLU(x) where `at` is x, its derivative where x is 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        positive = builder.fcmp_ordered(">", args[1], ir.Constant(args[1].type, None))
        return builder.select(positive, args[0], builder.fmul(args[0], _splat_value(builder, args[2], x.width)))

    return x(x, at, x.dtype), codegen


@intrinsic(prefer_literal=True)
def _replaced(context: Any, x: Any, old: Any, new: Any) -> Any:
    """`x`, with one number in place of another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new = (_splat_value(builder, number, x.width) for number in args[1:])
        return builder.select(builder.fcmp_ordered("==", args[0], old), new, args[0])

    return x(x, x.dtype, x.dtype), codegen


@intrinsic
def _inverse(context: Any, x: Any) -> Any:
    """1 / x, and 0 of 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero, one = ir.Constant(args[0].type, None), ir.Constant(args[0].type, [1.0] * x.width)
        return builder.select(builder.fcmp_ordered("==", args[0], zero), zero, builder.fdiv(one, args[0]))

    return x(x), codegen


@intrinsic
def _sum(context: Any, vector: Any) -> Any:
    """The sum of a vector: halves are added until one lane is left."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_halved(builder, args[0], 1), ir.Constant(_I32, 0))

    return vector.dtype(vector), codegen


def _halved(builder: Any, x: Any, width: int) -> Any:
    while x.type.count > width:
        half = x.type.count // 2
        low, high = (_indices(range(start, start + half)) for start in (0, half))
        x = builder.fadd(builder.shuffle_vector(x, x, low), builder.shuffle_vector(x, x, high))
    return x


@intrinsic(prefer_literal=True)
def _folded(context: Any, vector: Any, width: Any) -> Any:
    """The sums of the lanes that are `width` lanes apart."""
    target = Vector(vector.dtype, _width(width))
    return target(vector, width), lambda context, builder, signature, args: _halved(builder, args[0], target.width)


@intrinsic(prefer_literal=True)
def _repeated(context: Any, vector: Any, width: Any) -> Any:
    """The vector again and again, up to a width."""
    target = Vector(vector.dtype, _width(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], args[0], _indices(lane % vector.width for lane in range(target.width)))

    return target(vector, width), codegen


@intrinsic(prefer_literal=True)
def _per_feature(context: Any, vector: Any, width: Any) -> Any:
    """A number for each head to one for each of its features: each lane as often as fills a width."""
    target = Vector(vector.dtype, _width(width))
    each = target.width // vector.width

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], args[0], _indices(lane // each for lane in range(target.width)))

    return target(vector, width), codegen


@intrinsic(prefer_literal=True)
def _per_head(context: Any, vector: Any, width: Any) -> Any:
    """A number for each feature to one for each head: the sums of neighbouring lanes."""
    target = Vector(vector.dtype, _width(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, each = args[0], vector.width // target.width
        while each > 1:
            half, zero = (each + 1) // 2, ir.Constant(x.type, None)
            lanes = [(head * each, lane) for head in range(target.width) for lane in range(half)]
            low = _indices(start + lane for start, lane in lanes)
            high = _indices(start + half + lane if half + lane < each else x.type.count for start, lane in lanes)
            x = builder.fadd(builder.shuffle_vector(x, zero, low), builder.shuffle_vector(x, zero, high))
            each = half
        return x

    return target(vector, width), codegen


@intrinsic
def _zipped(context: Any, x: Any, y: Any) -> Any:
    """The lanes of two vectors in turns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(*args, _indices(lane // 2 + lane % 2 * x.width for lane in range(2 * x.width)))

    return Vector(x.dtype, 2 * x.width)(x, y), codegen


@intrinsic(prefer_literal=True)
def _prefetch(context: Any, array: Any, offset: Any, width: Any) -> Any:
    """Ask for the cache lines of a vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        for byte in range(0, _width(width) * array.dtype.bitwidth // 8, 64):
            line = builder.gep(pointer, [ir.Constant(_I32, byte)])
            builder.call(ask, [line, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(array, offset, width), codegen


@intrinsic(prefer_literal=True)
def _turn(context: Any, vector: Any, which: Any) -> Any:
    """One of the two vectors that `_zipped` has put together."""
    target, first = Vector(vector.dtype, vector.width // 2), which.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], args[0], _indices(range(first, vector.width, 2)))

    return target(vector, which), codegen


@intrinsic(prefer_literal=True)
def _number(context: Any, pointer: Any, value: Any) -> Any:
    """An integer as a number of the pointer's type."""
    dtype = pointer.dtype
    return dtype(pointer, value), lambda context, *_: ir.Constant(
        context.get_value_type(dtype), float(value.literal_value)
    )


@intrinsic
def _part(context: Any, array: Any, model: Any, models: Any) -> Any:
    """The numbers of one of several models, which share an array evenly, as `_data` gives them."""
    if array is types.none:
        return array(array, model, models), lambda context, *_: context.get_dummy_value()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        size = builder.sdiv(struct.nitems, args[2])
        return builder.gep(struct.data, [builder.mul(size, args[1])])

    return types.CPointer(array.dtype)(array, types.int64, types.int64), codegen


@intrinsic
def _exp(context: Any, vector: Any) -> Any:
    """exp of a vector, to 2 units in the last place of a float32; 0 below -87."""

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
    most: int  # edges of a piece

    @property
    def slots(self) -> int:
        """How many places the sums need: the rows, and the pieces of long rows."""
        return int(self.first[-1])


def _divide(pointer: np.ndarray) -> _Pieces:
    num_rows = pointer.size - 1
    degree = np.diff(pointer)
    pieces = np.maximum(1, -(-degree // SPLIT))
    most = min(int(degree.max(initial=0)), SPLIT)
    rows = np.arange(num_rows, dtype=np.int32 if pointer.size < 2**31 else np.int64)
    long = np.flatnonzero(pieces > 1)
    first = num_rows + np.concatenate([[0], np.cumsum(pieces[long])])
    if not long.size:
        return _Pieces(pointer, rows, rows, long, first, most)
    row = np.repeat(rows, pieces)
    start = np.concatenate([[0], np.cumsum(pieces)[:-1]])
    bounds = np.append(pointer[row] + SPLIT * (np.arange(row.size) - start[row]), pointer[-1])
    slot = row.copy()
    slot[pieces[row] > 1] = np.arange(num_rows, first[-1])
    return _Pieces(bounds, row, slot, long, first, most)


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


class _Job(NamedTuple):
    """What there is to do: the pieces of `bounds` for each of some models, and room for the buffers of one piece."""

    bounds: np.ndarray
    models: int
    room: int  # numbers of a buffer
    gathers: int  # numbers that are read or made in all, about


def _run(kernel: Any, dtype: np.dtype[Any], job: _Job, *args: Any) -> None:
    """Call `kernel(first, last, buffers, names, model, models, *args)` for ranges of pieces, on torch's many threads.

    The kernels give up the GIL and the threads are Python's: Numba's own would be one more pool beside torch's, and
    not each kind of it survives a fork or two callers at once, as autograd's threads may be. A piece is summed by one
    thread, so its bits do not depend on their number.
    """
    bounds, models, threads = job.bounds, job.models, torch.get_num_threads()
    pieces = bounds.size - 1
    if threads == 1 or job.gathers < SMALL:
        buffers, names = _buffers(job, dtype)
        for model in range(models):
            kernel(0, pieces, buffers, names, model, models, *args)
        return
    cost = bounds + np.arange(bounds.size)  # an edge and a piece cost about the same to begin with
    cuts = np.searchsorted(cost, np.linspace(cost[0], cost[-1], -(-4 * threads // models) + 1)[1:-1]).tolist()
    ranges = list(itertools.product(range(models), itertools.pairwise([0, *cuts, pieces])))
    turn = itertools.count()

    def share() -> None:
        buffers, names = _buffers(job, dtype)
        while (at := next(turn)) < len(ranges):
            model, part = ranges[at]
            kernel(*part, buffers, names, model, models, *args)

    with _POOL_LOCK:
        if not _POOL:
            _POOL.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gat_pyg"))
    helpers = [_POOL[0].submit(share) for _ in range(threads - 1)]
    share()
    for helper in helpers:
        helper.result()


def _buffers(job: _Job, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Room for a piece: seven numbers for each edge and lane, and the edges' names."""
    return np.empty((7, job.room), dtype), np.empty(job.room, np.int64)


# --- Dropout: Philox4x32-10 (Salmon et al., SC 2011), as attention/dropout.py has it. ---


@intrinsic(prefer_literal=True)
def _draw(context: Any, keep: Any, at: Any, names: Any, k: Any, drop: Any, model: Any, quad: Any, lanes: Any) -> Any:
    """k_ij, 0 or 1 / (1 - p), of `DRAWN` fours of (edge, head) from edge `names[k]` on, to `keep[at:]`.

    A four holds the heads 4 q to 4 q + 3 of an edge: they are the words that Philox makes of the model's key and of the
    counter (edge, q). Where there are less than four heads, the other words are left out.
    """
    heads = _width(lanes)
    fours, words = max(1, heads // 4), min(4, heads)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keep, at, names, k, drop, model, quad, _ = args
        wide = ir.VectorType(_I64, DRAWN)

        def const(value: int) -> ir.Constant:
            return ir.Constant(wide, [value] * DRAWN)

        def splat(value: Any) -> Any:
            return _splat_value(builder, value, DRAWN)

        low, half = const(0xFFFFFFFF), const(32)
        keys, threshold, scale = (builder.extract_value(drop, item) for item in range(3))
        keys = context.make_array(signature.args[4][0])(context, builder, keys).data
        key = splat(builder.load(builder.gep(keys, [model])))
        found = ir.VectorType(_I64, DRAWN // fours)
        edge = builder.load(_at(builder, names, k, found), align=8)
        edge = builder.shuffle_vector(edge, edge, _indices(lane // fours for lane in range(DRAWN)))
        c0, c1, c3 = builder.and_(edge, low), builder.lshr(edge, half), const(0)
        c2 = builder.add(splat(quad), ir.Constant(wide, [lane % fours for lane in range(DRAWN)]))
        k0, k1 = builder.and_(key, low), builder.lshr(key, half)
        for _ in range(10):
            p0 = builder.mul(builder.and_(c0, low), const(0xD2511F53))
            p1 = builder.mul(builder.and_(c2, low), const(0xCD9E8D57))
            c0, c1 = builder.xor(builder.xor(builder.lshr(p1, half), c1), k0), p1
            c2, c3 = builder.xor(builder.xor(builder.lshr(p0, half), c3), k1), p0
            k0, k1 = builder.add(k0, const(0x9E3779B9)), builder.add(k1, const(0xBB67AE85))
        narrow = ir.VectorType(_I32, DRAWN)
        drawn = [builder.trunc(word, narrow) for word in (c0, c1, c2, c3)[:words]]
        while len(drawn) > 1:  # words 0 and 2, and 1 and 3, then both
            half_of = len(drawn) // 2
            count = drawn[0].type.count
            turns = _indices(lane // 2 + lane % 2 * count for lane in range(2 * count))
            drawn = [builder.shuffle_vector(drawn[w], drawn[w + half_of], turns) for w in range(half_of)]
        total = drawn[0].type.count
        every = _splat_value(builder, builder.trunc(threshold, _I32), total)
        tile = ir.VectorType(scale.type, total)
        kept = builder.icmp_unsigned(">=", drawn[0], every)
        value = builder.select(kept, _splat_value(builder, scale, total), ir.Constant(tile, None))
        builder.store(value, _at(builder, keep, at, tile), align=scale.type.get_abi_alignment(context.target_data))
        return context.get_dummy_value()

    return types.void(keep, types.int64, names, types.int64, drop, types.int64, types.int64, lanes), codegen


@inline
def _draw_row(
    keep: Any, at: int, chosen: Any, begin: int, n: int, names: Any, drop: Any, model: int, head: int, lanes: Any
) -> None:
    """k_ij of n edges for the heads of a vector, `head` the first of them, to `keep[at:]`."""
    for k in range(n):
        chosen[k] = np.int64(begin + k) if names is None else np.int64(names[begin + k])
    heads = 1 << len(lanes)
    step = DRAWN // max(1, heads // 4)
    for k in range(0, n, step):
        _draw(keep, at + k * heads, chosen, k, drop, model, head // 4, lanes)


@compiled
def _keep(first: int, last: int, buffers: Any, names: Any, model: int, models: int, drop: Any, keep_: Any,
          four: Any) -> None:  # fmt: skip
    """k of four heads for the edges `DRAWN` times `first` to `last`."""
    keep, chosen = _part(keep_, model, models), _data(names, 0)
    for tile in range(first, last):
        _draw_row(keep, tile * DRAWN * 4, chosen, tile * DRAWN, DRAWN, _data(drop[3], 0), drop, model, 0, four)


# --- Steps that the kernels share. A buffer holds a number for each edge of a piece and each head of a vector. ---


@inline
def _close(buffer: Any, n: int, value: Any) -> None:
    """What comes after n numbers, up to the next multiple of `LANES`, is `value`."""
    _store(buffer, n // LANES * LANES, _splat(buffer, value, LANES), None)


@inline
def _softmax(weight: Any, positive: Any, keep: Any, n: int, tops: Any, lanes: Any) -> Any:
    """The scores of a piece to k_ij exp(e_ij - max e), of which `positive` keeps those it has a 1 for.

    Returns the inverse of the denominator of equation (2), and the share of it that `positive` has.
    """
    high = _repeated(_replaced(tops, -np.inf, 0.0), LANES)
    total, mass = _splat(weight, 0.0, LANES), _splat(weight, 0.0, LANES)
    for f in range(0, n << len(lanes), LANES):
        alpha = _exp(_load(weight, f, LANES, None) - high)
        total = total + alpha
        kept = alpha
        if keep is not None:
            kept = alpha * _load(keep, f, LANES, None)
        _store(weight, f, kept, None)
        if positive is not None:
            ones = _load(positive, f, LANES, None)
            mass = mass + alpha * ones
            _store(positive, f, kept * ones, None)
    share = _inverse(_folded(total, lanes))
    return share, _folded(mass, lanes) * share


@inline
def _remember(norm: Any, at: int, tops: Any, share: Any, whole: bool, twice: Any) -> None:
    """What normalises a softmax: (max, 1 / denominator), (0, 0) where nothing has a weight; of a piece (-inf, 0)."""
    tops = tops + (share - share)  # a NaN in the scores is in the share alone
    if whole:
        tops = _replaced(tops, -np.inf, 0.0)
    _store(norm, 2 * at, _zipped(tops, share), twice)


@inline
def _weigh(x: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, positive: Any, h: int,
           heads: int, share: Any, out: Any, out_plus: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """Equation (4) for a tile of a head: the sum of `weight` times the rows `ids` of x, and that of `positive` times
    them, both times `share`."""
    total, plus = _splat(x, 0.0, tile), _splat(x, 0.0, tile)
    for k in range(n):
        _prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        total = total + weight[k * heads + h] * values
        if out_plus is not None:
            plus = plus + positive[k * heads + h] * values
    _store(out, o, share * total, count)
    if out_plus is not None:
        _store(out_plus, o, share * plus, count)


# --- Additive and constant attention. ---


@compiled
def _forward(first: int, last: int, buffers: Any, names: Any, model: int, models: int, bounds: Any, row: Any, slot: Any,
             src_: Any, ids_: Any, x_: Any, s_: Any, d_: Any, u_: Any, heads: int, channels: int, slope: Any, drop: Any,
             out_: Any, norm_: Any, out_plus_: Any, mass_plus_: Any,
             lanes: Any, narrow: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """Equations (1) to (4) for some pieces, with O+ and A+ where `out_plus` is given."""
    G, width, end = 1 << len(lanes), 1 << len(tile), src_.size - 1
    src, ids = _data(src_, 0), _data(ids_, 0)
    x, s, d, u = _part(x_, model, models), _part(s_, model, models), _part(d_, model, models), _part(u_, model, models)
    out, norm = _part(out_, model, models), _part(norm_, model, models)
    out_plus, mass_plus = _part(out_plus_, model, models), _part(mass_plus_, model, models)
    keep, weight, shares = _given(drop, _data(buffers[0], 0)), _data(buffers[1], 0), _data(buffers[2], 0)
    positive, chosen = _given(out_plus_, _data(buffers[3], 0)), _data(names, 0)
    one = _splat(x, 1.0, lanes)
    for head in range(0, heads, G):
        count, many = _given(ragged, heads - head), _given(ragged, (heads - head) * channels)
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                _draw_row(keep, 0, chosen, begin, n, _data(drop[3], 0), drop, model, head, lanes)
            own, tops = _splat(x, 0.0, lanes), _splat(x, -np.inf, lanes)
            if d_ is not None:
                own = _load(d, i * heads + head, lanes, count)
            _close(weight, n * G, -np.inf)
            if out_plus_ is not None:
                _close(positive, n * G, 0.0)
            for k in range(n):
                z = own
                if s_ is not None:
                    z = z + _load(s, np.int64(src[begin + k]) * heads + head, lanes, count)
                if u_ is not None:
                    edge = np.int64(begin + k) if ids_ is None else np.int64(ids[begin + k])
                    z = z + _load(u, edge * heads + head, lanes, count)
                e = _leaky(z, z, slope)  # (3)
                tops = _larger(tops, e)
                _store(weight, k * G, e, None)
                if out_plus_ is not None:
                    _store(positive, k * G, _leaky(one, z, _number(x, 0)), None)
            share, mass = _softmax(weight, positive, keep, n, tops, lanes)  # (2)
            _remember(norm, o * heads + head, tops, share, o == i, _given(ragged, 2 * (heads - head)))
            if out_plus_ is not None:
                _store(mass_plus, o * heads + head, mass, count)
            at, to = head * channels, (o * heads + head) * channels
            if narrow is not None:
                total, plus = _splat(x, 0.0, narrow), _splat(x, 0.0, narrow)
                for k in range(n):
                    _prefetch(x, np.int64(src[min(begin + k + AHEAD, end)]) * heads * channels + at, narrow)
                    values = _load(x, np.int64(src[begin + k]) * heads * channels + at, narrow, many)
                    total = total + _per_feature(_load(weight, k * G, lanes, None), narrow) * values
                    if out_plus_ is not None:
                        plus = plus + _per_feature(_load(positive, k * G, lanes, None), narrow) * values
                scale = _per_feature(share, narrow)
                _store(out, to, scale * total, many)
                if out_plus_ is not None:
                    _store(out_plus, to, scale * plus, many)
            else:
                _store(shares, 0, share, None)
                whole = channels // width * width
                for h in range(min(G, heads - head)):
                    for c in range(h * channels, h * channels + whole, width):
                        _weigh(x, heads * channels, at + c, src, begin, n, end, weight, positive, h, G, shares[h],
                               out, out_plus, to + c, tile, None)  # fmt: skip
                    if whole < channels:
                        c = h * channels + whole
                        _weigh(x, heads * channels, at + c, src, begin, n, end, weight, positive, h, G, shares[h],
                               out, out_plus, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _dense(first: int, last: int, buffers: Any, names: Any, model: int, models: int, grad_: Any, d_: Any, norm_: Any,
           out_: Any, out_plus_: Any, mass_plus_: Any, heads: int, channels: int, slope: Any, stats_: Any, grad_d_: Any,
           lanes: Any, narrow: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """For some dst (d, max, 1 / sum, D) as their `stats`, D = <dO, O>; and grad d = (1 - slope)(<dO, O+> - D A+)."""
    G, width = 1 << len(lanes), 1 << len(tile)
    grad, d, norm = _part(grad_, model, models), _part(d_, model, models), _part(norm_, model, models)
    out, out_plus = _part(out_, model, models), _part(out_plus_, model, models)
    mass_plus, stats, grad_d = (
        _part(mass_plus_, model, models), _part(stats_, model, models), _part(grad_d_, model, models))  # fmt: skip
    products, pluses = _data(buffers[0], 0), _data(buffers[1], 0)
    zero = _splat(grad, 0.0, lanes)
    pair = (lanes, (0, 0))
    for i in range(first, last):
        for head in range(0, heads, G):
            count, many = _given(ragged, heads - head), _given(ragged, (heads - head) * channels)
            here, q = i * heads + head, 4 * i * heads + head
            both = _load(norm, 2 * here, pair, _given(ragged, 2 * (heads - head)))
            own = zero
            if d_ is not None:
                own = _load(d, here, lanes, count)
            product = zero
            if out_ is not None:
                plus = zero
                at = here * channels
                if narrow is not None:
                    values = _load(grad, at, narrow, many)
                    product = _per_head(values * _load(out, at, narrow, many), lanes)
                    plus = _per_head(values * _load(out_plus, at, narrow, many), lanes)
                else:
                    whole = channels // width * width
                    for h in range(min(G, heads - head)):
                        c = at + h * channels
                        sums, more = _splat(grad, 0.0, tile), _splat(grad, 0.0, tile)
                        for b in range(c, c + whole, width):
                            wide = _load(grad, b, tile, None)
                            sums = sums + wide * _load(out, b, tile, None)
                            more = more + wide * _load(out_plus, b, tile, None)
                        if whole < channels:
                            b = c + whole
                            wide = _load(grad, b, tile, channels - whole)
                            sums = sums + wide * _load(out, b, tile, channels - whole)
                            more = more + wide * _load(out_plus, b, tile, channels - whole)
                        products[h] = _sum(sums)
                        pluses[h] = _sum(more)
                    product, plus = _load(products, 0, lanes, None), _load(pluses, 0, lanes, None)
                change = (_number(grad, 1) - slope) * (plus - product * _load(mass_plus, here, lanes, count))
                _store(grad_d, here, change, count)
            _store(stats, q, own, count)
            _store(stats, q + heads, _turn(both, 0), count)
            _store(stats, q + 2 * heads, _turn(both, 1), count)
            _store(stats, q + 3 * heads, product, count)


@inline
def _weigh_back(grad: Any, row: int, at: int, ids: Any, begin: int, n: int, end: int, weight: Any, product: Any, h: int,
                heads: int, x: Any, own: int, out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """grad x_j = sum_i k_ij alpha_ij dO_i for a tile of a head, and the tile's share of <dO_i, x_j>."""
    total = _splat(grad, 0.0, tile)
    mine = _load(x, own, tile, count)
    for k in range(n):
        _prefetch(grad, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(grad, np.int64(ids[begin + k]) * row + at, tile, count)
        total = total + weight[k * heads + h] * values
        if product is not None:
            product[k * heads + h] += _sum(mine * values)
    _store(out, o, total, count)


@compiled
def _backward(first: int, last: int, buffers: Any, names: Any, model: int, models: int, bounds: Any, row: Any,
              slot: Any, dst_: Any, place_: Any, ids_: Any, grad_: Any, x_: Any, s_: Any, u_: Any, stats_: Any,
              heads: int, channels: int, slope: Any, drop: Any, grad_x_: Any, grad_s_: Any, per_edge_: Any,
              scored: Any, lanes: Any, narrow: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """grad x and grad s of some pieces of src rows, in one gather of dO; `stats` has (d, max, 1 / sum, D) of each dst.

    With `grad_s`, `per_edge` is given dz_ij LeakyReLU'(z_ij), grouped by dst, where it is wanted. Without, D is not
    known yet, and `per_edge` is given g_ij = k_ij <dO_i, x_j>. `scored` is None for constant attention: then grad x is
    all there is.
    """
    G, width, end = 1 << len(lanes), 1 << len(tile), dst_.size - 1
    dst, place, ids = _data(dst_, 0), _data(place_, 0), _data(ids_, 0)
    grad, x, stats = _part(grad_, model, models), _part(x_, model, models), _part(stats_, model, models)
    s, u, grad_x = _part(s_, model, models), _part(u_, model, models), _part(grad_x_, model, models)
    grad_s, per_edge = _part(grad_s_, model, models), _part(per_edge_, model, models)
    keep, alpha, weight = _given(drop, _data(buffers[0], 0)), _data(buffers[1], 0), _data(buffers[2], 0)
    factor, delta, share = _data(buffers[3], 0), _data(buffers[4], 0), _data(buffers[5], 0)
    product, chosen = _given(scored, _data(buffers[6], 0)), _data(names, 0)
    one = _splat(x, 1.0, lanes)
    for head in range(0, heads, G):
        count, many = _given(ragged, heads - head), _given(ragged, (heads - head) * channels)
        for v in range(first, last):
            begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                _draw_row(keep, 0, chosen, begin, n, _data(drop[3], 0), drop, model, head, lanes)
            own = _splat(x, 0.0, lanes)
            if s_ is not None:
                own = _load(s, j * heads + head, lanes, count)
            for k in range(n):
                q = np.int64(dst[begin + k]) * 4 * heads + head
                z = own + _load(stats, q, lanes, count)
                if u_ is not None:
                    edge = np.int64(begin + k) if ids_ is None else np.int64(ids[begin + k])
                    z = z + _load(u, edge * heads + head, lanes, count)
                # rounded as in the forward pass, so that no score is above the largest
                _store(alpha, k * G, _leaky(z, z, slope) - _load(stats, q + heads, lanes, count), None)
                _store(factor, k * G, _leaky(one, z, slope), None)
                _store(share, k * G, _load(stats, q + 2 * heads, lanes, count), None)
                _store(delta, k * G, _load(stats, q + 3 * heads, lanes, count), None)
            for f in range(0, n * G, LANES):
                values = _exp(_load(alpha, f, LANES, None)) * _load(share, f, LANES, None)
                _store(alpha, f, values, None)
                if drop is not None:
                    values = values * _load(keep, f, LANES, None)
                _store(weight, f, values, None)
            at, to, mine = head * channels, (o * heads + head) * channels, (j * heads + head) * channels
            if narrow is not None:
                total, inner = _splat(x, 0.0, narrow), _load(x, mine, narrow, many)
                for k in range(n):
                    _prefetch(grad, np.int64(dst[min(begin + k + AHEAD, end)]) * heads * channels + at, narrow)
                    outer = _load(grad, np.int64(dst[begin + k]) * heads * channels + at, narrow, many)
                    total = total + _per_feature(_load(weight, k * G, lanes, None), narrow) * outer
                    if scored is not None:
                        _store(product, k * G, _per_head(inner * outer, lanes), None)
                _store(grad_x, to, total, many)
            else:
                if scored is not None:
                    for f in range(0, n * G, LANES):
                        _store(product, f, _splat(x, 0.0, LANES), None)
                whole = channels // width * width
                for h in range(min(G, heads - head)):
                    for c in range(h * channels, h * channels + whole, width):
                        _weigh_back(grad, heads * channels, at + c, dst, begin, n, end, weight, product, h, G,
                                    x, mine + c, grad_x, to + c, tile, None)  # fmt: skip
                    if whole < channels:
                        c = h * channels + whole
                        _weigh_back(grad, heads * channels, at + c, dst, begin, n, end, weight, product, h, G,
                                    x, mine + c, grad_x, to + c, tile, channels - whole)  # fmt: skip
            if scored is not None:
                sums = _splat(x, 0.0, lanes)
                for k in range(n):
                    change = _load(product, k * G, lanes, None)
                    if drop is not None:
                        change = change * _load(keep, k * G, lanes, None)
                    if grad_s_ is not None:  # de = alpha (g - D) LeakyReLU'(z)
                        change = _load(alpha, k * G, lanes, None) * (change - _load(delta, k * G, lanes, None))
                        change = change * _load(factor, k * G, lanes, None)
                        sums = sums + change
                    if per_edge_ is not None:
                        _store(per_edge, np.int64(place[begin + k]) * heads + head, change, count)
                if grad_s_ is not None:
                    _store(grad_s, o * heads + head, sums, count)


# --- Sums of rows over the non-zeros of a sparse matrix, some of which are dropped out. ---


@inline
def _block(rowptr: Any, row: int, last: int) -> int:
    """The end of the rows from this one on that have no more than `SPLIT` non-zeros, or are one."""
    stop = row + 1
    while stop < last and rowptr[stop + 1] - rowptr[row] <= SPLIT:
        stop += 1
    return stop


@inline
def _draw_numbers(keep: Any, names: Any, begin: int, end: int, drop: Any, model: int, four: Any) -> int:
    """k of the numbers from `begin` to `end`, as `_keep` has them, from one a little before on, which is returned."""
    first = begin // (4 * DRAWN)
    for tile in range(first, -(-end // (4 * DRAWN))):
        for k in range(DRAWN):
            names[k] = tile * DRAWN + k
        _draw(keep, (tile - first) * 4 * DRAWN, names, 0, drop, model, 0, four)
    return first * 4 * DRAWN


@compiled
def _gather_rows(first: int, last: int, buffers: Any, names: Any, model: int, models: int, rowptr: Any, col_: Any,
                 values_: Any, own_values: int, weight_: Any, own_weight: int, channels: int, drop: Any, out_: Any,
                 tile: Any, four: Any) -> None:  # fmt: skip
    """out_i = sum_k v_k W_col(k) for some rows; so many models have values and weights of their own."""
    col, width = _data(col_, 0), 1 << len(tile)
    values = _part(values_, min(model, own_values - 1), own_values)
    weight, out = _part(weight_, min(model, own_weight - 1), own_weight), _part(out_, model, models)
    keep, chosen, base = _given(drop, _data(buffers[0], 0)), _data(names, 0), 0
    whole = channels // width * width
    while first < last:
        stop = _block(rowptr, first, last)
        if drop is not None:
            base = _draw_numbers(keep, chosen, np.int64(rowptr[first]), np.int64(rowptr[stop]), drop, model, four)
        for i in range(first, stop):
            to = np.int64(i) * channels
            for c in range(0, whole, width):
                total = _splat(weight, 0.0, tile)
                for k in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
                    value = values[k]
                    if drop is not None:
                        value = value * keep[k - base]
                    total = total + value * _load(weight, np.int64(col[k]) * channels + c, tile, None)
                _store(out, to + c, total, None)
            if whole < channels:
                total, count = _splat(weight, 0.0, tile), channels - whole
                for k in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
                    value = values[k]
                    if drop is not None:
                        value = value * keep[k - base]
                    total = total + value * _load(weight, np.int64(col[k]) * channels + whole, tile, count)
                _store(out, to + whole, total, count)
        first = stop


@inline
def _scatter(row: Any, values: Any, keep: Any, base: int, drop: Any, col: Any, begin: int, end: int, channels: int,
             out: Any, c: int, tile: Any, count: Any) -> None:  # fmt: skip
    """out_col(k) += v_k R for a tile of a row R."""
    for k in range(begin, end):
        value, at = values[k], np.int64(col[k]) * channels + c
        if drop is not None:
            value = value * keep[k - base]
        _store(out, at, _load(out, at, tile, count) + value * row, count)


@compiled
def _scatter_rows(first: int, last: int, buffers: Any, names: Any, model: int, models: int, rowptr: Any, col_: Any,
                  values_: Any, own_values: int, rows_: Any, own_rows: int, channels: int, drop: Any, out_: Any,
                  tile: Any, four: Any) -> None:  # fmt: skip
    """out_col(k) += v_k R_i for all rows and some tiles of the features, into zeros that a core's cache holds."""
    col, width, size = _data(col_, 0), 1 << len(tile), rowptr.size - 1
    values = _part(values_, min(model, own_values - 1), own_values)
    rows, out = _part(rows_, min(model, own_rows - 1), own_rows), _part(out_, model, models)
    keep, chosen, base = _given(drop, _data(buffers[0], 0)), _data(names, 0), 0
    for c in range(first * width, min(last * width, channels), width):
        start, count = 0, channels - c
        while start < size:
            stop = _block(rowptr, start, size)
            if drop is not None:
                base = _draw_numbers(keep, chosen, np.int64(rowptr[start]), np.int64(rowptr[stop]), drop, model, four)
            for i in range(start, stop):
                begin, end, at = np.int64(rowptr[i]), np.int64(rowptr[i + 1]), np.int64(i) * channels + c
                if count >= width:
                    row = _load(rows, at, tile, None)
                    _scatter(row, values, keep, base, drop, col, begin, end, channels, out, c, tile, None)
                else:
                    row = _load(rows, at, tile, count)
                    _scatter(row, values, keep, base, drop, col, begin, end, channels, out, c, tile, count)
            start = stop


# --- Attention whose score needs the features of both ends: GATv2's, and the scaled dot product. ---


@inline
def _score(x: Any, own: Any, mine: int, att: Any, a: int, row: int, at: int, ids: Any, begin: int, n: int, end: int,
           e: Any, h: int, heads: int, slope: Any, grad: Any, product: Any, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile's share of att . LeakyReLU(x_j + x_i), or of <x_i, x_j>; and with `product` of <dO_i, x_j>."""
    tile_i = _load(own, mine, tile, count)
    if att is not None:
        weights = _load(att, a, tile, count)
    if product is not None:
        change = _load(grad, mine, tile, count)
    for k in range(n):
        _prefetch(x, np.int64(ids[min(begin + k + AHEAD, end)]) * row + at, tile)
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if product is not None:
            product[k * heads + h] += _sum(change * values)
        if att is not None:
            values = values + tile_i
            e[k * heads + h] += _sum(weights * _leaky(values, values, slope))
        else:
            e[k * heads + h] += _sum(tile_i * values)


@inline
def _spread(x: Any, own: Any, mine: int, att: Any, row: int, at: int, ids: Any, begin: int, n: int, de: Any, h: int,
            heads: int, slope: Any, out: Any, o: int, tile: Any, count: Any) -> None:  # fmt: skip
    """A tile of sum de_ij LeakyReLU'(x_j + x_i), or of sum de_ij x_j, over the other ends of a row's edges."""
    tile_i = _load(own, mine, tile, count)
    one, total = _splat(x, 1.0, tile), _splat(x, 0.0, tile)
    for k in range(n):
        values = _load(x, np.int64(ids[begin + k]) * row + at, tile, count)
        if att is not None:
            values = _leaky(one, values + tile_i, slope)
        total = total + de[k * heads + h] * values
    _store(out, o, total, count)


@compiled
def _forward_pair(first: int, last: int, buffers: Any, names: Any, model: int, models: int, bounds: Any, row: Any,
                  slot: Any, src_: Any, x_: Any, x_dst_: Any, att_: Any, heads: int, channels: int,
                  slope: Any, scale: Any, drop: Any, out_: Any, norm_: Any,
                  lanes: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """The scores of some pieces, `scale` times, then equations (2) and (4)."""
    G, width, end = 1 << len(lanes), 1 << len(tile), src_.size - 1
    src = _data(src_, 0)
    x, x_dst, att = _part(x_, model, models), _part(x_dst_, model, models), _part(att_, model, models)
    out, norm = _part(out_, model, models), _part(norm_, model, models)
    keep, weight, shares = _given(drop, _data(buffers[0], 0)), _data(buffers[1], 0), _data(buffers[2], 0)
    chosen, whole = _data(names, 0), channels // width * width
    for head in range(0, heads, G):
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                _draw_row(keep, 0, chosen, begin, n, _data(drop[3], 0), drop, model, head, lanes)
            at, to, mine = head * channels, (o * heads + head) * channels, (i * heads + head) * channels
            for f in range(0, n * G, LANES):
                _store(weight, f, _splat(x, 0.0, LANES), None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           weight, h, G, slope, None, None, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           weight, h, G, slope, None, None, tile, channels - whole)  # fmt: skip
            tops = _splat(x, -np.inf, lanes)
            for k in range(n):
                e = scale * _load(weight, k * G, lanes, None)
                tops = _larger(tops, e)
                _store(weight, k * G, e, None)
            for f in range(n * G, (n * G + LANES - 1) // LANES * LANES):
                weight[f] = -np.inf
            share, _ = _softmax(weight, None, keep, n, tops, lanes)  # (2)
            _remember(norm, o * heads + head, tops, share, o == i, _given(ragged, 2 * (heads - head)))
            _store(shares, 0, share, None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _weigh(x, heads * channels, at + c, src, begin, n, end, weight, None, h, G, shares[h],
                           out, None, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _weigh(x, heads * channels, at + c, src, begin, n, end, weight, None, h, G, shares[h],
                           out, None, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _backward_pair_dst(first: int, last: int, buffers: Any, names: Any, model: int, models: int, bounds: Any, row: Any,
                       slot: Any, src_: Any, grad_: Any, x_: Any, x_dst_: Any, att_: Any, norm_: Any,
                       delta_: Any, heads: int, channels: int, slope: Any, scale: Any, drop: Any,
                       weights_: Any, changes_: Any, grad_dst_: Any,
                       lanes: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """k_ij alpha_ij and de_ij = alpha_ij (g_ij - D_i) of some pieces, grouped by dst, and the `_spread` of each dst."""
    G, width, end = 1 << len(lanes), 1 << len(tile), src_.size - 1
    src, grad = _data(src_, 0), _part(grad_, model, models)
    x, x_dst, att = _part(x_, model, models), _part(x_dst_, model, models), _part(att_, model, models)
    norm, deltas, grad_dst = (
        _part(norm_, model, models), _part(delta_, model, models), _part(grad_dst_, model, models))  # fmt: skip
    weights, changes = _part(weights_, model, models), _part(changes_, model, models)
    keep, alpha, product = _given(drop, _data(buffers[0], 0)), _data(buffers[1], 0), _data(buffers[2], 0)
    chosen, whole, pair = _data(names, 0), channels // width * width, (lanes, (0, 0))
    for head in range(0, heads, G):
        count, twice = _given(ragged, heads - head), _given(ragged, 2 * (heads - head))
        for v in range(first, last):
            begin, n, i, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            if drop is not None:
                _draw_row(keep, 0, chosen, begin, n, _data(drop[3], 0), drop, model, head, lanes)
            at, to, mine = head * channels, (o * heads + head) * channels, (i * heads + head) * channels
            for f in range(0, n * G, LANES):
                _store(alpha, f, _splat(x, 0.0, LANES), None)
                _store(product, f, _splat(x, 0.0, LANES), None)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           alpha, h, G, slope, grad, product, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _score(x, x_dst, mine + c, att, at + c, heads * channels, at + c, src, begin, n, end,
                           alpha, h, G, slope, grad, product, tile, channels - whole)  # fmt: skip
            both, delta = (
                _load(norm, 2 * (i * heads + head), pair, twice),
                _load(deltas, i * heads + head, lanes, count),
            )
            top, share = _turn(both, 0), _turn(both, 1)
            for k in range(n):
                value = share * _exp(scale * _load(alpha, k * G, lanes, None) - top)
                change = _load(product, k * G, lanes, None)
                kept = value
                if drop is not None:
                    mask = _load(keep, k * G, lanes, None)
                    kept = value * mask
                    change = change * mask
                change = scale * (value * (change - delta))
                _store(product, k * G, change, None)
                _store(weights, (begin + k) * heads + head, kept, count)
                _store(changes, (begin + k) * heads + head, change, count)
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _spread(x, x_dst, mine + c, att, heads * channels, at + c, src, begin, n, product, h, G, slope,
                            grad_dst, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _spread(x, x_dst, mine + c, att, heads * channels, at + c, src, begin, n, product, h, G, slope,
                            grad_dst, to + c, tile, channels - whole)  # fmt: skip


@compiled
def _backward_pair_src(first: int, last: int, buffers: Any, names: Any, model: int, models: int, bounds: Any, row: Any,
                       slot: Any, dst_: Any, place_: Any, grad_: Any, x_: Any, x_dst_: Any, att_: Any, weights_: Any,
                       changes_: Any, heads: int, channels: int, slope: Any, grad_x_: Any, grad_src_: Any,
                       lanes: Any, tile: Any, ragged: Any) -> None:  # fmt: skip
    """sum k_ij alpha_ij dO_i of some pieces of src rows, and the `_spread` of each src."""
    G, width, end = 1 << len(lanes), 1 << len(tile), dst_.size - 1
    dst, place, grad = _data(dst_, 0), _data(place_, 0), _part(grad_, model, models)
    x, x_dst, att = _part(x_, model, models), _part(x_dst_, model, models), _part(att_, model, models)
    weights, changes = _part(weights_, model, models), _part(changes_, model, models)
    grad_x, grad_src = _part(grad_x_, model, models), _part(grad_src_, model, models)
    weight, change, whole = _data(buffers[0], 0), _data(buffers[1], 0), channels // width * width
    for head in range(0, heads, G):
        count = _given(ragged, heads - head)
        for v in range(first, last):
            begin, n, j, o = bounds[v], bounds[v + 1] - bounds[v], np.int64(row[v]), np.int64(slot[v])
            for k in range(n):
                edge = np.int64(place[begin + k]) * heads + head
                _store(weight, k * G, _load(weights, edge, lanes, count), None)
                _store(change, k * G, _load(changes, edge, lanes, count), None)
            at, to, mine = head * channels, (o * heads + head) * channels, (j * heads + head) * channels
            for h in range(min(G, heads - head)):
                for c in range(h * channels, h * channels + whole, width):
                    _weigh(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G, _number(x, 1),
                           grad_x, None, to + c, tile, None)  # fmt: skip
                    _spread(x_dst, x, mine + c, att, heads * channels, at + c, dst, begin, n, change, h, G, slope,
                            grad_src, to + c, tile, None)  # fmt: skip
                if whole < channels:
                    c = h * channels + whole
                    _weigh(grad, heads * channels, at + c, dst, begin, n, end, weight, None, h, G, _number(x, 1),
                           grad_x, None, to + c, tile, channels - whole)  # fmt: skip
                    _spread(x_dst, x, mine + c, att, heads * channels, at + c, dst, begin, n, change, h, G, slope,
                            grad_src, to + c, tile, channels - whole)  # fmt: skip


# --- The sums of long rows from those of their pieces. ---


@compiled
def _merge(model: int, models: int, long: Any, first: Any, out_: Any, norm_: Any, out_plus_: Any, mass_plus_: Any,
           heads: int, channels: int) -> None:  # fmt: skip
    """The outputs of long rows from those of their pieces, each weighted by its share of the softmax's denominator."""
    out, norm = _part(out_, model, models), _part(norm_, model, models)
    out_plus, mass_plus = _part(out_plus_, model, models), _part(mass_plus_, model, models)
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


@compiled
def _merge_sums(model: int, models: int, long: Any, first: Any, sums_: Any, row: int) -> None:
    """The sums of long rows from those of their pieces, in order."""
    sums = _part(sums_, model, models)
    for q in range(long.size):
        for c in range(row):
            total = sums[first[q] * row + c]
            for p in range(first[q] + 1, first[q + 1]):
                total += sums[p * row + c]
            sums[long[q] * row + c] = total


@compiled
def _multiply_blocks(first: int, last: int, buffers: Any, names: Any, model: int, models: int, a_: Any, b_: Any,
                     rows: int, row: int, blocks_: Any) -> None:  # fmt: skip
    """sum_n a_n b_n, element by element, over each block of `BLOCK` rows."""
    a, b, blocks = _part(a_, model, models), _part(b_, model, models), _part(blocks_, model, models)
    for block in range(first, last):
        for c in range(row):
            blocks[block * row + c] = 0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
            for c in range(row):
                blocks[block * row + c] += a[n * row + c] * b[n * row + c]


@compiled
def _normalise(first: int, last: int, buffers: Any, names: Any, model: int, models: int, rowptr: Any, src_: Any,
               ids_: Any, s_: Any, u_: Any, stats_: Any, heads: int, slope: Any, per_edge_: Any, grad_d_: Any,
               lanes: Any, ragged: Any) -> None:  # fmt: skip
    """g_ij in `per_edge` to dz_ij LeakyReLU'(z_ij), by D_i = sum_j alpha_ij g_ij; and its sum, grad d."""
    src, ids, stats = _data(src_, 0), _data(ids_, 0), _part(stats_, model, models)
    s, u = _part(s_, model, models), _part(u_, model, models)
    per_edge, grad_d = _part(per_edge_, model, models), _part(grad_d_, model, models)
    one, zero = _splat(stats, 1.0, lanes), _splat(stats, 0.0, lanes)
    for i in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, q = _given(ragged, heads - head), 4 * i * heads + head
            own, top = _load(stats, q, lanes, count), _load(stats, q + heads, lanes, count)
            share, delta, total = _load(stats, q + 2 * heads, lanes, count), zero, zero
            for turn in range(2):  # D is known after the first
                for p in range(rowptr[i], rowptr[i + 1]):
                    z = own
                    if s_ is not None:
                        z = z + _load(s, np.int64(src[p]) * heads + head, lanes, count)
                    if u_ is not None:
                        edge = np.int64(p) if ids_ is None else np.int64(ids[p])
                        z = z + _load(u, edge * heads + head, lanes, count)
                    alpha = share * _exp(_leaky(z, z, slope) - top)
                    g = _load(per_edge, p * heads + head, lanes, count)
                    if turn == 0:
                        delta = delta + alpha * g
                    else:
                        change = alpha * (g - delta) * _leaky(one, z, slope)
                        total = total + change
                        _store(per_edge, p * heads + head, change, count)
            _store(grad_d, i * heads + head, total, count)


@compiled
def _collect(first: int, last: int, buffers: Any, names: Any, model: int, models: int, colptr: Any, place_: Any,
             per_edge_: Any, heads: int, grad_s_: Any, lanes: Any, ragged: Any) -> None:  # fmt: skip
    """grad s_j = sum_i dz_ij LeakyReLU'(z_ij)."""
    place, per_edge, grad_s = _data(place_, 0), _part(per_edge_, model, models), _part(grad_s_, model, models)
    for j in range(first, last):
        for head in range(0, heads, 1 << len(lanes)):
            count, total = _given(ragged, heads - head), _splat(per_edge, 0.0, lanes)
            for t in range(colptr[j], colptr[j + 1]):
                total = total + _load(per_edge, np.int64(place[t]) * heads + head, lanes, count)
            _store(grad_s, j * heads + head, total, count)


# --- The functions that attention/fused.py calls. Each operand may have an axis of models in front. ---


class _Shape(NamedTuple):
    """The sizes of a call, and what the kernels are compiled for."""

    dtype: np.dtype[Any]
    batch: tuple[int, ...]  # (models,), or none
    heads: int
    channels: int
    lanes: tuple[int, ...]  # heads of a vector, as `_width` reads it: those that are computed at once
    narrow: Any  # the features of all these heads, where they are summed together, else None
    tile: tuple[int, ...]  # features of a head that are summed at once, where they are not
    ragged: bool | None  # True where the last vector of heads is not full, else None

    @classmethod
    def of(cls, x: Tensor, *others: Tensor | None, narrow: bool = True) -> _Shape:
        *batch, _, heads, channels = x.shape
        narrow = narrow and 0 < channels < NARROW
        most = 16 if narrow and channels <= 8 else 8
        lanes = (0,) * math.ceil(math.log2(max(1, min(heads, most))))
        return cls(
            _dtype(x, *others),
            tuple(batch),
            heads,
            channels,
            lanes,
            (lanes, (0,) * channels) if narrow else None,
            (0,) * next((power for power in (3, 4, 5) if channels <= 1 << power), 6),
            True if heads % (1 << len(lanes)) else None,
        )

    @property
    def models(self) -> int:
        return math.prod(self.batch)

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.lanes, self.narrow, self.tile, self.ragged

    def job(self, bounds: np.ndarray, most: int, edges: Edges) -> _Job:
        work = self.models * edges.num_edges * self.heads * self.channels
        return _Job(bounds, self.models, (most << len(self.lanes)) + 4 * DRAWN, work)

    def flat(self, tensor: Tensor | None) -> Any:
        """The numbers of a tensor as a vector; None of None."""
        if tensor is None:
            return None
        wide = torch.float64 if self.dtype == np.float64 else torch.float32
        return tensor.detach().to(wide).contiguous().view(-1).numpy()

    def empty(self, rows: int, *row: int) -> np.ndarray:
        """Room for results, by NumPy: it asks for huge pages where that is large, and the first write costs less."""
        return np.empty((self.models, rows, *row), self.dtype).reshape(-1)

    def tensor(self, values: Any, rows: int, *row: int) -> Tensor:
        each = self.models * math.prod(row)
        shaped = values.reshape(*self.batch, values.size // each if each else rows, *row)
        return torch.from_numpy(shaped[:, :rows] if self.batch else shaped[:rows])  # no view of a tensor

    def drop(self, seed: Tensor | None, dropout: float, names: Tensor | None = None) -> Any:
        """Keys of the models, threshold, scale, names: an edge is kept if its random word reaches the threshold."""
        if seed is None or dropout == 0.0:
            return None
        scale = self.dtype.type(1 / (1 - dropout)) if dropout < 1 else self.dtype.type(0)
        keys, least = seed.contiguous().view(-1).numpy(), np.int64(min(math.floor(dropout * 2**32), 2**32 - 1))
        return keys, least, scale, None if names is None else names.numpy()


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
    """Return O `[N_dst, H, C]` in `dtype`, the softmax's (max, 1 / denominator) `[N_dst, H, 2]`, and O+, A+ or None."""
    shape = _Shape.of(x, score_src, score_dst, score_edge)
    heads, channels = shape.heads, shape.channels
    pieces = _pieces(edges, "dst")
    out, norm = shape.empty(pieces.slots, heads, channels), shape.empty(pieces.slots, heads, 2)
    out_plus = shape.empty(pieces.slots, heads, channels) if plus else None
    mass_plus = shape.empty(pieces.slots, heads) if plus else None
    _run(
        _forward,
        shape.dtype,
        shape.job(pieces.bounds, pieces.most, edges),
        pieces.bounds,
        pieces.row,
        pieces.slot,
        edges.src.numpy(),
        _ids(edges),
        *(shape.flat(t) for t in (x, score_src, score_dst, score_edge)),
        heads,
        channels,
        shape.dtype.type(negative_slope),
        shape.drop(seed, dropout, edges.names_by_dst),
        out,
        norm,
        out_plus,
        mass_plus,
        *shape.layout,
    )
    if pieces.long.size:
        for model in range(shape.models):
            _merge(model, shape.models, pieces.long, pieces.first, out, norm, out_plus, mass_plus, heads, channels)
    rows = edges.num_dst
    return (
        shape.tensor(out, rows, heads, channels).to(dtype),
        shape.tensor(norm, rows, heads, 2),
        None if out_plus is None else shape.tensor(out_plus, rows, heads, channels),
        None if mass_plus is None else shape.tensor(mass_plus, rows, heads),
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
    shape = _Shape.of(x, score_src, score_dst, score_edge)
    heads, channels = shape.heads, shape.channels
    colptr, dst, place = edges.transpose
    pieces = _pieces(edges, "src")
    scored = not (score_src is None and score_dst is None and score_edge is None)
    speed = scored and out is not None
    slope, drop = shape.dtype.type(negative_slope), shape.drop(seed, dropout, edges.names_by_src)
    flat_grad, flat_x, flat_norm = shape.flat(grad), shape.flat(x), shape.flat(norm)
    s, d, u = (shape.flat(t) for t in (score_src, score_dst, score_edge))
    rows = np.arange(edges.num_dst + 1)

    grad_x, stats = shape.empty(pieces.slots, heads, channels), shape.empty(edges.num_dst, 4, heads)
    grad_s = shape.empty(pieces.slots, heads) if scored else None
    grad_d = shape.empty(edges.num_dst, heads) if scored else None
    per_edge = shape.empty(edges.num_edges, heads) if scored and (edge_grad or not speed) else None
    kept = (shape.flat(t) if speed else None for t in (out, out_plus, mass_plus))
    _run(
        _dense,
        shape.dtype,
        shape.job(rows, 1, edges),
        flat_grad,
        d,
        flat_norm,
        *kept,
        heads,
        channels,
        slope,
        stats,
        grad_d,
        *shape.layout,
    )
    _run(
        _backward,
        shape.dtype,
        shape.job(pieces.bounds, pieces.most, edges),
        pieces.bounds,
        pieces.row,
        pieces.slot,
        dst.numpy(),
        place.numpy(),
        None if u is None else edges.ids_by_src.numpy(),
        flat_grad,
        flat_x,
        s,
        u,
        stats,
        heads,
        channels,
        slope,
        drop,
        grad_x,
        grad_s if speed else None,
        per_edge,
        True if scored else None,
        *shape.layout,
    )
    if scored and not speed:
        rowptr = edges.rowptr.numpy()
        _run(
            _normalise,
            shape.dtype,
            shape.job(rowptr, 1, edges),
            rowptr,
            edges.src.numpy(),
            _ids(edges),
            s,
            u,
            stats,
            heads,
            slope,
            per_edge,
            grad_d,
            shape.lanes,
            shape.ragged,
        )
        if score_src is not None:
            by_src = colptr.numpy()
            job, layout = shape.job(by_src, 1, edges), (shape.lanes, shape.ragged)
            _run(_collect, shape.dtype, job, by_src, place.numpy(), per_edge, heads, grad_s, *layout)
    if pieces.long.size:
        for model in range(shape.models):
            _merge_sums(model, shape.models, pieces.long, pieces.first, grad_x, heads * channels)
            if speed:
                _merge_sums(model, shape.models, pieces.long, pieces.first, grad_s, heads)
    axis = len(shape.batch)
    return (
        shape.tensor(grad_x, edges.num_src, heads, channels),
        None if score_src is None else shape.tensor(grad_s, edges.num_src, heads),
        None if score_dst is None else shape.tensor(grad_d, edges.num_dst, heads),
        edges.ungroup(shape.tensor(per_edge, edges.num_edges, heads), axis) if edge_grad else None,
    )


def keep(seed: Tensor, size: int, dropout: float, dtype: torch.dtype, names: Tensor | None = None) -> Tensor:
    """`[size]`, or `[S, size]` for seeds `[S]`: 0, or 1 / (1 - p), by the words of the counters (0, 0), (1, 0), ...;
    with `names` `[size / 4]` by those of (names[0], 0), (names[1], 0), ...
    """
    shape = _Shape.of(torch.empty(*seed.shape, size, 4, 0, dtype=dtype))
    tiles = -(-size // (4 * DRAWN))
    made = shape.empty(tiles, 4 * DRAWN)
    job = _Job(np.arange(tiles + 1), shape.models, DRAWN, 8 * made.size)
    names = names if names is None else F.pad(names, (0, tiles * DRAWN - names.numel()))
    _run(_keep, shape.dtype, job, shape.drop(seed, dropout, names), made, (0, 0))
    return torch.from_numpy(made).view(*seed.shape, -1).narrow(-1, 0, size)


def weighted_rows(
    values: Tensor, weight: Tensor, seed: Tensor | None, dropout: float, pattern: Any, back: bool
) -> Tensor:
    """X W `[rows, D]`, or X^T W `[columns, D]` if `back`, of a pattern and values; with an axis in front of any but the
    pattern of as many matrices. Dropout of the values is that of `keep`.
    """
    rowptr, col, columns = pattern.rowptr, pattern.col, pattern.num_cols
    batch = next(
        (t.shape[:-own] for t, own in ((values, 1), (weight, 2)) if t.dim() > own), () if seed is None else seed.shape
    )
    channels, rows = weight.size(-1), columns if back else rowptr.numel() - 1
    shape = _Shape.of(torch.empty(*batch, 0, 1, channels, dtype=weight.dtype), values, narrow=False)
    bounds = np.arange(-(-channels >> len(shape.tile)) + 1) if back else rowptr.numpy()
    longest = int(np.diff(rowptr.numpy()).max(initial=0)) if seed is not None else 0
    seed = seed if seed is None else seed.expand(batch)
    out = np.zeros(shape.models * rows * channels, shape.dtype) if back else shape.empty(rows, channels)
    _run(
        _scatter_rows if back else _gather_rows,
        shape.dtype,
        _Job(bounds, shape.models, max(SPLIT, longest) + 8 * DRAWN, shape.models * col.numel() * channels),
        rowptr.numpy(),
        col.numpy(),
        shape.flat(values),
        math.prod(values.shape[:-1]),
        shape.flat(weight),
        math.prod(weight.shape[:-2]),
        channels,
        shape.drop(seed, dropout),
        out,
        shape.tile,
        (0, 0),
    )
    return shape.tensor(out, rows, channels)


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
    """Return O in `dtype` and (max, 1 / denominator) for e_ij = att . LeakyReLU(x_j + x_i).

    Without `att`, e_ij = <x_i, x_j> / sqrt(C).
    """
    shape = _Shape.of(x, x_dst, att, narrow=False)
    heads, channels = shape.heads, shape.channels
    pieces = _pieces(edges, "dst")
    out, norm = shape.empty(pieces.slots, heads, channels), shape.empty(pieces.slots, heads, 2)
    _run(
        _forward_pair,
        shape.dtype,
        shape.job(pieces.bounds, pieces.most, edges),
        pieces.bounds,
        pieces.row,
        pieces.slot,
        edges.src.numpy(),
        *(shape.flat(t) for t in (x, x_dst, att)),
        heads,
        channels,
        shape.dtype.type(negative_slope),
        shape.dtype.type(1.0 if att is not None else max(channels, 1) ** -0.5),
        shape.drop(seed, dropout, edges.names_by_dst),
        out,
        norm,
        shape.lanes,
        shape.tile,
        shape.ragged,
    )
    if pieces.long.size:
        for model in range(shape.models):
            _merge(model, shape.models, pieces.long, pieces.first, out, norm, None, None, heads, channels)
    return shape.tensor(out, edges.num_dst, heads, channels).to(dtype), shape.tensor(norm, edges.num_dst, heads, 2)


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
    shape = _Shape.of(x, x_dst, att, narrow=False)
    heads, channels = shape.heads, shape.channels
    _, dst, place = edges.transpose
    by_dst, by_src = _pieces(edges, "dst"), _pieces(edges, "src")
    slope = shape.dtype.type(negative_slope)
    g, flat_x, flat_x_dst, flat_att = (shape.flat(t) for t in (grad, x, x_dst, att))
    delta = shape.flat((grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1))
    weights, changes = shape.empty(edges.num_edges, heads), shape.empty(edges.num_edges, heads)
    flat_dst = shape.empty(by_dst.slots, heads, channels)
    _run(
        _backward_pair_dst,
        shape.dtype,
        shape.job(by_dst.bounds, by_dst.most, edges),
        by_dst.bounds,
        by_dst.row,
        by_dst.slot,
        edges.src.numpy(),
        g,
        flat_x,
        flat_x_dst,
        flat_att,
        shape.flat(norm),
        delta,
        heads,
        channels,
        slope,
        shape.dtype.type(1.0 if att is not None else max(channels, 1) ** -0.5),
        shape.drop(seed, dropout, edges.names_by_dst),
        weights,
        changes,
        flat_dst,
        shape.lanes,
        shape.tile,
        shape.ragged,
    )
    flat_grad, flat_src = (shape.empty(by_src.slots, heads, channels) for _ in range(2))
    _run(
        _backward_pair_src,
        shape.dtype,
        shape.job(by_src.bounds, by_src.most, edges),
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
        shape.lanes,
        shape.tile,
        shape.ragged,
    )
    for pieces, sums in ((by_dst, (flat_dst,)), (by_src, (flat_grad, flat_src))):
        for model, each in itertools.product(range(shape.models if pieces.long.size else 0), sums):
            _merge_sums(model, shape.models, pieces.long, pieces.first, each, heads * channels)
    grad_x = shape.tensor(flat_grad, edges.num_src, heads, channels)
    spread_src = shape.tensor(flat_src, edges.num_src, heads, channels)
    spread_dst = shape.tensor(flat_dst, edges.num_dst, heads, channels)
    if att is None:
        return grad_x.add_(spread_src), spread_dst, None
    grad_att = _column_dots(shape, flat_x, flat_src, edges.num_src) + _column_dots(
        shape, flat_x_dst, flat_dst, edges.num_dst
    )
    wide = att.to(grad_x.dtype).unsqueeze(-3)
    return grad_x.addcmul_(spread_src, wide), spread_dst.mul_(wide), grad_att


def _column_dots(shape: _Shape, a: np.ndarray, b: np.ndarray, rows: int) -> Tensor:
    """Return sum_n a_n b_n `[..., H, C]` of two `[..., N, H, C]`, added up in the same order by any number of threads.

    A product of torch's would not be: MKL divides a long sum among its threads.
    """
    count, row = -(-rows // BLOCK), shape.heads * shape.channels
    blocks = shape.empty(count, shape.heads, shape.channels)
    job = _Job(np.arange(count + 1), shape.models, 0, 2 * shape.models * rows * row)
    # slots of long rows may follow the rows of b
    _run(_multiply_blocks, shape.dtype, job, a, b, rows, row, blocks)
    sums = blocks.reshape(shape.models, count, row).sum(1)
    return shape.tensor(sums.reshape(-1), 1, shape.heads, shape.channels).squeeze(-3)


def _dtype(*tensors: Tensor | None) -> np.dtype[Any]:
    """float64 if any of them is, else float32."""
    return np.dtype(np.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else np.float32)


def _ids(edges: Edges) -> Any:
    """The place in the caller's order of each edge; None where that is its own."""
    return None if edges.perm is None else edges.perm.numpy()
