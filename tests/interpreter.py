"""CPU kernels run uncompiled, as Python on NumPy, so that a debugger steps through them and every access is checked.

    python -m tests.interpreter SCRIPT.py

runs a script so, about a thousand times slower. The code of a kernel stays as it is; only its calls are replaced: steps
by their Python functions, and the operations of `vector.py` and `draw.py`, which are instructions for LLVM, by the
functions of the same names below. A load or store outside of an array raises IndexError with the names of kernel and
array and the index; so does one outside of the model that the kernel is called for.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import runpy
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from gat_pyg.graph.memory import _FIRST
from gat_pyg.kernels.cpu import cache


class Memory:
    """The elements that a kernel may reach through an array or a pointer, and its names for messages.

    Element i is `values[start + i]`; the elements allowed are `values[low:high]`.
    """

    def __init__(self, values: Any, name: str, start: int = 0, low: int = 0, high: Any = None) -> None:
        self.values, self.name, self.start, self.low = values, name, start, low
        self.high = len(values) if high is None else high
        self.dtype, self.size = values.dtype, values.size

    def place(self, index: int, width: int = 1) -> int:
        """Return where the elements `index : index + width` are, or raise IndexError if any of them is outside."""
        at = self.start + int(index)
        if width and not (self.low <= at and at + width <= self.high):
            which = f"{index}" if width == 1 else f"{index}:{index + width}"
            valid = f"{self.low - self.start} to {self.high - self.start - 1}" if self.high > self.low else "none"
            raise IndexError(f"{self.name}[{which}] is out of bounds, its indices are {valid}")
        return at

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Memory(self.values[self.start : self.high][index], self.name)
        element = self.values[self.place(index)]
        return Memory(element, f"{self.name}[{index}]") if isinstance(element, np.ndarray) else element

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            self.values[self.start : self.high][index] = value.values if isinstance(value, Memory) else value
        else:
            self.values[self.place(index)] = value


def interpreted(kernel: Any) -> Callable[..., Any]:
    """Return a kernel, compiled or not, as a function that runs in Python and checks every access."""
    function: FunctionType = getattr(kernel, "py_func", kernel)
    names = [name.rstrip("_") for name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        operands = [_checked(arg, f"{function.__name__}: {name}") for name, arg in zip(names, args, strict=True)]
        with np.errstate(all="ignore"):
            return _in_python(function)(*operands)

    return run


def _checked(argument: Any, name: str) -> Any:
    """Return an argument with `Memory` in place of every array in it."""
    if isinstance(argument, np.ndarray):
        return Memory(argument, name)
    if isinstance(argument, tuple):
        return tuple(_checked(item, f"{name}[{at}]") for at, item in enumerate(argument))
    return argument


def _in_python(function: FunctionType) -> FunctionType:
    """Return a function with the steps and operations among its globals replaced by Python functions."""
    replaced = dict(function.__globals__)
    for name in function.__code__.co_names:
        value: Any = replaced.get(name)
        if hasattr(value, "py_func"):  # a step
            replaced[name] = _in_python(value.py_func)
        elif hasattr(value, "_defn"):  # an operation for LLVM
            replaced[name] = OPERATIONS[value._defn.__name__]
    copy = FunctionType(function.__code__, replaced, function.__name__, function.__defaults__, function.__closure__)
    copy.__doc__ = function.__doc__
    return copy


OPERATIONS: dict[str, Callable[..., Any]] = {}  # by the name of the operation for LLVM that each stands for


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    OPERATIONS[function.__name__] = function
    return function


def _width(width: Any) -> int:
    """As `vector.width_of` reads it."""
    if isinstance(width, int):
        return width
    if len(width) == 2 and isinstance(width[0], tuple):
        return (1 << len(width[0])) * len(width[1])
    return 1 << len(width)


# --- The operations of vector.py. A vector is an array of its lanes. ---


def _number(array: Memory) -> Any:
    """As in `vector.py`."""
    return np.dtype(np.float32) if array.dtype == np.uint16 else array.dtype


@_operation
def only_if(flag: Any, value: Any) -> Any:
    return None if flag is None else value


@_operation
def only_if_any(flags: tuple[Any, ...], value: Any) -> Any:
    return None if all(flag is None for flag in flags) else value


@_operation
def pointer(array: Memory | np.ndarray | None, offset: int) -> Memory | None:
    if array is None:
        return None
    if isinstance(array, np.ndarray):  # a kernel's own
        array = Memory(array, "a buffer")
    return Memory(array.values, array.name, array.start + offset, array.low, array.high)


@_operation
def all_elements_at(memory: Memory, addresses: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Memory, ...]:
    return tuple(_at(memory, at, count if at else 0) for at, count in zip(addresses, counts, strict=True))


@_operation
def split_at(memory: Memory, address: int, counts: tuple[int, ...]) -> tuple[Memory, ...]:
    places = itertools.accumulate((memory.dtype.itemsize * count for count in counts), initial=address)
    return tuple(_at(memory, at, count) for at, count in zip(places, counts, strict=False))


def _at(memory: Memory, address: int, count: int) -> Memory:
    start = (address - _FIRST) // memory.dtype.itemsize if count else 0
    return Memory(memory.values[start : start + count], f"{memory.name} at an address")


@_operation
def of_model(arrays: tuple[Memory | None, ...], model: int, models: int) -> tuple[Memory | None, ...]:
    return tuple(None if array is None else _of_model(array, model, models) for array in arrays)


def _of_model(array: Memory, model: int, models: int) -> Memory:
    size = array.size // models
    name = array.name if models == 1 else f"{array.name} of model {model}"
    return Memory(array.values, name, model * size, model * size, min((model + 1) * size, array.size))


@_operation
def splat(array: Memory, value: Any, width: Any) -> Any:
    return np.full(_width(width), value, _number(array))


@_operation
def load(array: Memory, offset: int, width: Any, count: int | None) -> Any:
    lanes = _width(width)
    loaded = lanes if count is None else max(0, min(lanes, int(count)))
    at = array.place(offset, loaded)
    vector = np.zeros(lanes, array.dtype)
    vector[:loaded] = array.values[at : at + loaded]
    return vector if array.dtype == _number(array) else (vector.astype(np.uint32) << 16).view(np.float32)


@_operation
def store(array: Memory, offset: int, vector: np.ndarray, count: int | None) -> None:
    if vector.dtype != array.dtype:
        raise TypeError(f"{array.name} has dtype {array.dtype}, the vector stored to it {vector.dtype}")
    stored = len(vector) if count is None else max(0, min(len(vector), int(count)))
    at = array.place(offset, stored)
    array.values[at : at + stored] = vector[:stored]


@_operation
def prefetch(array: Memory, offset: int, width: Any) -> None:
    """Nothing: a prefetch reads no value, and may go beyond an array."""


@_operation
def larger(x: np.ndarray, y: np.ndarray) -> Any:
    return np.where(x > y, x, y)


@_operation
def leaky(x: np.ndarray, at: np.ndarray, slope: Any) -> Any:
    return np.where(at > 0, x, x * slope)


@_operation
def store_signs(signs: Memory, offset: int, vector: np.ndarray) -> None:
    store(signs, offset, np.packbits(vector > 0, bitorder="little"), None)


@_operation
def leaky_by(x: np.ndarray, signs: Memory, offset: int, slope: Any) -> Any:
    at = signs.place(offset, len(x) // 8)
    return np.where(np.unpackbits(signs.values[at : at + len(x) // 8], bitorder="little"), x, x * slope)


@_operation
def replace(x: np.ndarray, old: Any, new: Any) -> Any:
    return np.where(x == old, x.dtype.type(new), x)


@_operation
def inverse(x: np.ndarray) -> Any:
    return np.where(x == 0, x, 1 / x)


@_operation
def lane_sum(x: np.ndarray) -> Any:
    return fold(x, 1)[0]


@_operation
def fold(x: np.ndarray, width: Any) -> Any:
    while len(x) > _width(width):
        low, high = np.split(x, 2)
        x = low + high
    return x


@_operation
def repeat(x: np.ndarray, width: Any) -> Any:
    return np.resize(x, _width(width))


@_operation
def per_feature(x: np.ndarray, width: Any) -> Any:
    return np.repeat(x, _width(width) // len(x))


@_operation
def per_head(x: np.ndarray, width: Any) -> Any:
    heads = x.reshape(_width(width), -1)
    while heads.shape[1] > 1:
        half = (heads.shape[1] + 1) // 2
        low, high = heads[:, :half].copy(), heads[:, half:]
        low[:, : high.shape[1]] += high
        heads = low
    return heads[:, 0].copy()


@_operation
def constant(array: Memory, value: int) -> Any:
    return _number(array).type(value)


@_operation
def exp(x: np.ndarray) -> Any:
    return np.exp(x) if x.dtype == np.float64 else np.where(x < -87, x.dtype.type(0), np.exp(x))


# --- The operation of draw.py. ---


@_operation
def draw(
    keep: Memory, at: int, ids: Memory | None, edge: int, count: int, drop: Any, model: int, quad: int, lanes: Any
) -> None:
    key, (threshold, scale) = drop[0][model], drop[1][model].values
    heads, drawn = _width(lanes), 16
    fours, words = max(1, heads // 4), min(4, heads)
    width = drawn // fours
    edges = edge + np.arange(width) if ids is None else load(ids, edge, width, count)
    edges = np.repeat(edges.astype(np.uint64), fours)
    low, half, key = np.uint64(0xFFFFFFFF), np.uint64(32), key.astype(np.uint64)
    c0, c1, c3 = edges & low, edges >> half, np.zeros(drawn, np.uint64)
    c2 = np.tile(np.arange(fours, dtype=np.uint64), drawn // fours) + np.uint64(quad)
    k0, k1 = key & low, key >> half
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> half) ^ c1 ^ k0, p1 & low
        c2, c3 = (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    word = np.stack([c0, c1, c2, c3][:words], 1).reshape(-1)
    store(keep, at, np.where(word >= np.uint64(threshold), keep.dtype.type(scale), keep.dtype.type(0)), None)


if __name__ == "__main__":
    cache.INTERPRETED = interpreted  # before the modules with kernels are imported
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
