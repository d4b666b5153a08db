"""Vectors of floats as values of Numba, with + - * between them, held in registers."""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import impl_ret_borrowed, lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import populate_array

LANES = 16  # numbers of a buffer that are computed at once


class Vector(types.Type):  # type: ignore[misc]
    """`width` numbers of type `dtype`."""

    def __init__(self, dtype: types.Type, width: int) -> None:
        self.dtype, self.width = dtype, width
        super().__init__(name=f"Vector({dtype}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.width))


I32, I64 = ir.IntType(32), ir.IntType(64)


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
            x = splat_value(builder, x, signature.args[1].width)
        return getattr(builder, instruction)(x, y, flags=("contract",))


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")


def indices(values: Any) -> ir.Constant:
    """A constant vector of lane numbers."""
    values = list(values)
    return ir.Constant(ir.VectorType(I32, len(values)), values)


def splat_value(builder: Any, value: Any, width: int) -> Any:
    """A vector of one value, in LLVM."""
    one = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.Constant(I32, 0)
    )
    return builder.shuffle_vector(one, one, indices([0] * width))


def address(builder: Any, pointer: Any, offset: Any, target: Any) -> Any:
    """The pointer to a value of another type, `offset` elements on."""
    return builder.bitcast(builder.gep(pointer, [offset]), target.as_pointer())


def width_of(width: Any) -> int:
    """A literal; a tuple with as many items as its binary logarithm; or a pair of tuples, the second its second factor.

    So a kernel is compiled for each width in use. (A literal asked of the caller, `numba.literally`, would be looked
    for anew at every call, for 0.1 s.)
    """
    if isinstance(width, types.IntegerLiteral):
        return int(width.literal_value)
    if len(width) == 2 and isinstance(width[0], types.BaseTuple):
        return (1 << len(width[0])) * len(width[1])
    return 1 << len(width)


def _second(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """The second argument; a new reference to it, if it is an array."""
    return impl_ret_borrowed(context, builder, signature.return_type, args[1])


@intrinsic
def only_if(context: Any, flag: Any, value: Any) -> Any:
    """The value, or None where the flag is None: known when compiled."""
    if flag is types.none:
        return types.none(flag, value), lambda context, *_: context.get_dummy_value()
    return value(flag, value), _second


@intrinsic
def only_if_any(context: Any, flags: Any, value: Any) -> Any:
    """The value, or None where all the flags are None: known when compiled."""
    if all(flag is types.none for flag in flags):
        return types.none(flags, value), lambda context, *_: context.get_dummy_value()
    return value(flags, value), _second


@intrinsic
def pointer(context: Any, array: Any, offset: Any) -> Any:
    """Pointer to array[offset:]: no check for negative indices, no reference counting. None stays None."""
    if array is types.none:
        return array(array, offset), lambda context, *_: context.get_dummy_value()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), codegen


def _array_at(context: Any, builder: Any, memory: Any, address: Any, count: Any) -> Any:
    array = context.make_array(memory)(context, builder)
    data = builder.inttoptr(address, array.data.type)
    size = context.get_constant(types.intp, memory.dtype.bitwidth // 8)
    shape, strides = (cgutils.pack_array(builder, [value]) for value in (count, size))
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


@intrinsic
def all_elements_at(context: Any, memory: Any, addresses: Any, counts: Any) -> Any:
    """The elements at each of several addresses as arrays, none at address 0; `memory` is an array of all of them."""
    result = types.UniTuple(memory, len(addresses))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays, zero = [], ir.Constant(I64, 0)
        for item in range(len(addresses)):
            at, count = (builder.extract_value(each, item) for each in args[1:])
            count = builder.select(builder.icmp_signed("==", at, zero), zero, count)
            arrays.append(_array_at(context, builder, memory, at, count))
        return context.make_tuple(builder, result, arrays)

    return result(memory, addresses, counts), codegen


@intrinsic
def split_at(context: Any, memory: Any, address: Any, counts: Any) -> Any:
    """Arrays of so many elements each, one behind the other from an address on."""
    result = types.UniTuple(memory, len(counts))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays, at = [], args[1]
        for item in range(len(counts)):
            count = builder.extract_value(args[2], item)
            arrays.append(_array_at(context, builder, memory, at, count))
            at = builder.add(at, builder.mul(count, I64(memory.dtype.bitwidth // 8)))
        return context.make_tuple(builder, result, arrays)

    return result(memory, types.int64, counts), codegen


_SIZES = {"float": 4, "double": 8, "i16": 2, "i32": 4, "i64": 8}  # bytes of an element, by its type in LLVM


def _llvm(builder: Any, name: str, tile: Any, kind: Any) -> Any:
    """LLVM's intrinsic function on vectors, those of the name "masked" in memory."""
    element = str(tile.element)
    name = f"llvm.{name}.v{tile.count}{element[0]}{8 * _SIZES[element]}{'.p0' if 'masked' in name else ''}"
    known = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if known is None else known


def _mask(builder: Any, count: Any, width: int) -> Any:
    """The first `count` lanes."""
    return builder.icmp_signed("<", indices(range(width)), splat_value(builder, builder.trunc(count, I32), width))


def _number(array: Any) -> Any:
    """The type of an array's numbers in registers: float32 for bfloat16, whose array is of uint16."""
    return types.float32 if array.dtype is types.uint16 else array.dtype


@intrinsic(prefer_literal=True)
def splat(context: Any, array: Any, value: Any, width: Any) -> Any:
    """A vector of one number, of the dtype of `array`."""
    vector = Vector(_number(array), width_of(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat_value(builder, args[1], vector.width)

    return vector(array, vector.dtype, width), codegen


@intrinsic(prefer_literal=True)
def load(context: Any, array: Any, offset: Any, width: Any, count: Any) -> Any:
    """`array[offset : offset + width]`; with a `count`, zeros after so many. bfloat16 is widened to float32."""
    vector = Vector(_number(array), width_of(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = ir.VectorType(context.get_value_type(array.dtype), vector.width)
        if count is types.none:
            values = builder.load(address(builder, args[0], args[1], tile), align=array.dtype.bitwidth // 8)
        else:
            values = masked_load(builder, args[0], args[1], args[3], tile)
        if array.dtype == vector.dtype:
            return values
        bits = ir.VectorType(I32, vector.width)
        bits = builder.shl(builder.zext(values, bits), ir.Constant(bits, [16] * vector.width))
        return builder.bitcast(bits, context.get_value_type(vector))

    return vector(array, offset, width, count), codegen


def masked_load(builder: Any, pointer: Any, offset: Any, count: Any, tile: Any) -> Any:
    """The first `count` elements of a vector in memory, zeros for the others, in LLVM."""
    pointer, mask = address(builder, pointer, offset, tile), _mask(builder, count, tile.count)
    align = ir.Constant(I32, _SIZES[str(tile.element)])
    kind = ir.FunctionType(tile, [pointer.type, I32, mask.type, tile])
    return builder.call(_llvm(builder, "masked.load", tile, kind), [pointer, align, mask, ir.Constant(tile, None)])


@intrinsic(prefer_literal=True)
def store(context: Any, array: Any, offset: Any, vector: Any, count: Any) -> Any:
    """`array[offset : offset + width] = vector`, or only the first `count` of it; both of one dtype."""
    if array.dtype != vector.dtype:
        raise TypingError(f"an array of {array.dtype} cannot store a vector of {vector.dtype}")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = args[2].type
        pointer = address(builder, args[0], args[1], tile)
        align = vector.dtype.bitwidth // 8
        if count is types.none:
            builder.store(args[2], pointer, align=align)
            return context.get_dummy_value()
        mask = _mask(builder, args[3], vector.width)
        kind = ir.FunctionType(ir.VoidType(), [tile, pointer.type, I32, mask.type])
        masked = _llvm(builder, "masked.store", tile, kind)
        builder.call(masked, [args[2], pointer, ir.Constant(I32, align), mask])
        return context.get_dummy_value()

    return types.void(array, offset, vector, count), codegen


@intrinsic
def larger(context: Any, x: Any, y: Any) -> Any:
    """The larger of two vectors, lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), codegen


@intrinsic
def leaky(context: Any, x: Any, at: Any, slope: Any) -> Any:
    """`x * (1 if at > 0 else slope)`: LeakyReLU(x) where `at` is x, its derivative where x is 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        positive = builder.fcmp_ordered(">", args[1], ir.Constant(args[1].type, None))
        return builder.select(positive, args[0], builder.fmul(args[0], splat_value(builder, args[2], x.width)))

    return x(x, at, x.dtype), codegen


@intrinsic
def store_signs(context: Any, signs: Any, offset: Any, vector: Any) -> Any:
    """A bit for each lane, 1 where it is positive, from byte `offset` on."""
    bits = ir.IntType(vector.width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        positive = builder.fcmp_ordered(">", args[2], ir.Constant(args[2].type, None))
        builder.store(builder.bitcast(positive, bits), address(builder, args[0], args[1], bits), align=1)
        return context.get_dummy_value()

    return types.void(signs, offset, vector), codegen


@intrinsic
def leaky_by(context: Any, x: Any, signs: Any, offset: Any, slope: Any) -> Any:
    """`x * (1 if positive else slope)`, lane by lane, by the bits of `store_signs`."""
    bits, mask = ir.IntType(x.width), ir.VectorType(ir.IntType(1), x.width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.load(address(builder, args[1], args[2], bits), align=1)
        scaled = builder.fmul(args[0], splat_value(builder, args[3], x.width))
        return builder.select(builder.bitcast(stored, mask), args[0], scaled)

    return x(x, signs, offset, x.dtype), codegen


@intrinsic(prefer_literal=True)
def replace(context: Any, x: Any, old: Any, new: Any) -> Any:
    """`x`, with one number in place of another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new = (splat_value(builder, number, x.width) for number in args[1:])
        return builder.select(builder.fcmp_ordered("==", args[0], old), new, args[0])

    return x(x, x.dtype, x.dtype), codegen


@intrinsic
def inverse(context: Any, x: Any) -> Any:
    """1 / x, and 0 of 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero, one = ir.Constant(args[0].type, None), ir.Constant(args[0].type, [1.0] * x.width)
        return builder.select(builder.fcmp_ordered("==", args[0], zero), zero, builder.fdiv(one, args[0]))

    return x(x), codegen


@intrinsic
def lane_sum(context: Any, vector: Any) -> Any:
    """The sum of a vector: halves are added until one lane is left."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_halved(builder, args[0], 1), ir.Constant(I32, 0))

    return vector.dtype(vector), codegen


def _halved(builder: Any, x: Any, width: int) -> Any:
    while x.type.count > width:
        half = x.type.count // 2
        low, high = (indices(range(start, start + half)) for start in (0, half))
        x = builder.fadd(builder.shuffle_vector(x, x, low), builder.shuffle_vector(x, x, high))
    return x


@intrinsic(prefer_literal=True)
def fold(context: Any, vector: Any, width: Any) -> Any:
    """The sums of the lanes that are `width` lanes apart."""
    target = Vector(vector.dtype, width_of(width))
    return target(vector, width), lambda context, builder, signature, args: _halved(builder, args[0], target.width)


def _shuffled(lanes: Any) -> Any:
    """Return the code for a vector of these lanes of another one."""
    picked = indices(lanes)
    return lambda context, builder, signature, args: builder.shuffle_vector(args[0], args[0], picked)


@intrinsic(prefer_literal=True)
def repeat(context: Any, vector: Any, width: Any) -> Any:
    """The vector again and again, up to a width."""
    target = Vector(vector.dtype, width_of(width))
    return target(vector, width), _shuffled(lane % vector.width for lane in range(target.width))


@intrinsic(prefer_literal=True)
def per_feature(context: Any, vector: Any, width: Any) -> Any:
    """A number for each head to one for each of its features: each lane as often as fills a width."""
    target = Vector(vector.dtype, width_of(width))
    each = target.width // vector.width
    return target(vector, width), _shuffled(lane // each for lane in range(target.width))


@intrinsic(prefer_literal=True)
def per_head(context: Any, vector: Any, width: Any) -> Any:
    """A number for each feature to one for each head: the sums of neighbouring lanes."""
    target = Vector(vector.dtype, width_of(width))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, each = args[0], vector.width // target.width
        while each > 1:
            half, zero = (each + 1) // 2, ir.Constant(x.type, None)
            lanes = [(head * each, lane) for head in range(target.width) for lane in range(half)]
            low = indices(start + lane for start, lane in lanes)
            high = indices(start + half + lane if half + lane < each else x.type.count for start, lane in lanes)
            x = builder.fadd(builder.shuffle_vector(x, zero, low), builder.shuffle_vector(x, zero, high))
            each = half
        return x

    return target(vector, width), codegen


@intrinsic(prefer_literal=True)
def prefetch(context: Any, array: Any, offset: Any, width: Any) -> Any:
    """Ask for the cache lines of a vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = address(builder, args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        for byte in range(0, width_of(width) * array.dtype.bitwidth // 8, 64):
            line = builder.gep(pointer, [ir.Constant(I32, byte)])
            builder.call(ask, [line, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(array, offset, width), codegen


@intrinsic(prefer_literal=True)
def constant(context: Any, pointer: Any, value: Any) -> Any:
    """An integer as a number of the pointer's type."""
    dtype = _number(pointer)
    return dtype(pointer, value), lambda context, *_: ir.Constant(
        context.get_value_type(dtype), float(value.literal_value)
    )


@intrinsic
def of_model(context: Any, arrays: Any, model: Any, models: Any) -> Any:
    """Pointers to the block of one model in each array, which has equal blocks, one per model. None stays None."""
    pointers = [array if array is types.none else types.CPointer(array.dtype) for array in arrays]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for at, array in enumerate(arrays):
            if array is types.none:
                values.append(context.get_dummy_value())
                continue
            struct = context.make_array(array)(context, builder, builder.extract_value(args[0], at))
            size = builder.sdiv(struct.nitems, args[2])
            values.append(builder.gep(struct.data, [builder.mul(size, args[1])]))
        return context.make_tuple(builder, signature.return_type, values)

    return types.Tuple(pointers)(arrays, types.int64, types.int64), codegen


@intrinsic
def exp(context: Any, vector: Any) -> Any:
    """exp of a vector, to 2 units in the last place of a float32; 0 below -87."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = args[0].type
        if vector.dtype is types.float64:
            return builder.call(_llvm(builder, "exp", tile, ir.FunctionType(tile, [tile])), args)

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
        integers = ir.VectorType(I32, vector.width)
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * vector.width))
        result = builder.bitcast(builder.add(builder.bitcast(p, integers), exponent), tile)
        result = builder.select(low, const(0.0), result)
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[0], result)

    return vector(vector), codegen
