"""A sanitizer of CUDA kernels: Triton's interpreter, with every access checked and programs in a random order.

A finding is an error at the line of the kernel where it happens:

- a load or store outside of the tensor that its pointer was passed with, between the rows of a strided one too, or by
  a pointer into several tensors. Each tensor has addresses of its own, far from those of all others, so that a stray
  pointer is found wherever it would lead;
- a race: a program reads or writes what another program of the launch writes, in whatever order they run;
- a program that reads or overwrites what it has stored itself without a barrier, which other threads may have done;
- two lanes of a store with different values for one address;
- a masked load without `other`, whose masked lanes are undefined on a GPU;
- an int32 that overflows, by Triton's own assertions, and a grid that is too large.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import random
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

RANGE = 48  # bits of the addresses of a tensor, which begins in their middle


class FindingError(AssertionError):
    """What a kernel must not do."""


def elements(kernel: Any) -> dict[str, list[str]]:
    """Return the names of the elements of each argument that a kernel takes apart: of `a, b = argument`."""
    names = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel)))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and isinstance(node.targets[0], ast.Tuple):
            names[node.value.id] = [ast.unparse(name) for name in node.targets[0].elts]
    return names


@dataclass(frozen=True, eq=False)
class Argument:
    """A tensor that a kernel is launched with, as the pointer that the kernel takes."""

    name: str
    first: int  # its address to the kernel
    move: int  # from there to its true address
    dtype: torch.dtype
    size: int  # of an element, in bytes
    span: int  # elements between the first and the last, both included
    is_element: Any  # [span], False between the rows of a strided tensor; None if it has no gaps
    record: Any  # [2, bytes], when a byte was last written and first read; None if this is not recorded
    start: int  # its first byte in the storage

    def data_ptr(self) -> int:
        """Return the address, as Triton asks for it."""
        return self.first


class Sanitizer:
    """The checks of all launches of a test.

    Args:
        last: only so many of the last programs of each launch run, so that tensors may be larger than the memory;
            races are not looked for then. 0 runs all.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.seed = int(os.environ.get("SANITIZER_SEED", "0"))
        self.random = random.Random(self.seed)
        self.counts = [0, 0, 0]  # launches, programs, lanes of accesses
        self.now = 0  # counts programs and barriers

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what the interpreter does at the beginning of a launch and of a program, and at every access."""
        interpreter = importlib.import_module("triton.runtime.interpreter")
        builder = interpreter.InterpreterBuilder
        masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
        set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
        handle, int1 = interpreter.TensorHandle, interpreter.tl.int1

        def load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
            addresses, lanes = self.checked(pointers.data, mask.data)
            if other is None and lanes.size > 1 and not lanes.all():  # Triton drops an `other` that is a scalar 0
                self.fail("a masked load without `other`")
            return masked_load(builder, handle(addresses, pointers.dtype), handle(lanes, int1), other, *rest, **named)

        def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            addresses, lanes = self.checked(pointers.data, mask.data, value.data)
            return masked_store(builder, handle(addresses, pointers.dtype), value, handle(lanes, int1), *rest, **named)

        def barrier(_: Any) -> None:
            self.now += 1

        def next_program(builder: Any, x: int, *_: int) -> None:
            self.now += 1
            self.begin = self.now
            self.where = tuple(map(int, np.unravel_index(self.order[x], self.grid)))
            set_grid_idx(builder, *self.where)

        options = replace(interpreter.interpreter_builder.options, debug=True)  # overflow is asserted
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda *arguments: self.launch(*arguments))
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # they are on the host
        monkeypatch.setattr(builder, "set_grid_dim", lambda builder, *_: set_grid_dim(builder, *self.grid))
        monkeypatch.setattr(builder, "set_grid_idx", next_program)
        monkeypatch.setattr(builder, "create_masked_load", load)
        monkeypatch.setattr(builder, "create_masked_store", store)
        monkeypatch.setattr(builder, "create_barrier", barrier)
        monkeypatch.delattr(builder, "create_atomic_rmw")  # takes an address as it is; no kernel has one

    def launch(self, executor: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """Begin a launch; return the arguments of its programs by name."""
        self.kernel, self.grid, self.where = executor.fn.__name__, (*executor.grid, 1, 1)[:3], ()
        size = int(np.prod(self.grid))
        every = range(max(0, size - self.last) if self.last else 0, size)
        self.order = self.random.sample(every, len(every))
        executor.grid = (len(every),)
        self.counts[:2] = self.counts[0] + 1, self.counts[1] + len(every)
        if max(self.grid[1:]) > 65535:
            self.fail("its grid is too large for a GPU")
        self.arguments: list[Argument] = []
        storages: dict[int, Any] = {}
        values, names = inspect.getcallargs(executor.fn, *args, **kwargs), elements(executor.fn)
        return (), {name: self.checked_argument(name, value, names, storages) for name, value in values.items()}

    def checked_argument(self, name: str, value: Any, names: dict[str, Any], storages: dict[int, Any]) -> Any:
        """Return an argument with addresses of its own for each tensor in it."""
        if isinstance(value, tuple):
            inner = getattr(value, "_fields", names.get(name))
            items = [self.checked_argument(*item, names, storages) for item in zip(inner, value, strict=True)]
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        return self.argument(name, value, storages) if isinstance(value, Tensor) else value

    def argument(self, name: str, tensor: Tensor, storages: dict[int, Any]) -> Argument:
        """Give a tensor its addresses; tensors that share a storage share the record of accesses."""
        first = (len(self.arguments) << RANGE) + (1 << RANGE - 1)
        size, storage = tensor.element_size(), tensor.untyped_storage()
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        is_element = None
        if span > tensor.numel():
            is_element = np.zeros(span, bool)
            np.lib.stride_tricks.as_strided(is_element, tensor.shape, tensor.stride())[...] = True
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = None if self.last else np.zeros((2, storage.nbytes()), np.int32)
        record, start = storages[storage.data_ptr()], tensor.storage_offset() * size
        move = tensor.data_ptr() - first
        self.arguments.append(Argument(name, first, move, tensor.dtype, size, span, is_element, record, start))
        return self.arguments[-1]

    def fail(self, finding: str) -> None:
        """Raise the error of a finding."""
        raise FindingError(f"{self.kernel}, program {self.where} of {self.grid}, order {self.seed}: {finding}")

    def checked(self, pointers: Any, mask: Any, value: Any = None) -> tuple[Any, Any]:
        """Check a load, or the store of a value; return the true addresses, and the lanes that take part."""
        pointers, mask = np.broadcast_arrays(pointers, mask.astype(bool))
        lanes = pointers[mask]
        if not lanes.size:
            return pointers, mask
        self.counts[2] += lanes.size
        of, verb = lanes >> np.uint64(RANGE), "loads" if value is None else "stores"
        if of[0] >= len(self.arguments) or (of != of[0]).any():
            self.fail(f"{verb} by a pointer into no tensor, or into several")
        argument = self.arguments[int(of[0])]
        offset = lanes.astype(np.int64) - argument.first
        element = offset // argument.size
        outside = (element < 0) | (element >= argument.span)
        if outside.any():
            self.fail(f"{verb} element {element[outside][0]} of {argument.name}, which has {argument.span}")
        if argument.is_element is not None and not argument.is_element[element].all():
            self.fail(f"{verb} between the rows of {argument.name}, which is strided")
        if value is not None:
            self.check_lanes(element, np.broadcast_to(value, mask.shape)[mask], argument)
        if argument.record is not None:
            self.check_order(argument, offset + argument.start, verb)
        return pointers + np.uint64(argument.move % 2**64), mask

    def check_lanes(self, element: Any, values: Any, argument: Argument) -> None:
        """Check that no two lanes of a store have different values for one address."""
        alone, first, lane = np.unique(element, return_index=True, return_inverse=True)
        if alone.size < element.size and (values != values[first][lane]).any():
            self.fail(f"two lanes store different values to one element of {argument.name}")

    def check_order(self, argument: Argument, byte: Any, verb: str) -> None:
        """Check an access against those before it, of this program and of others, and record it."""
        written, read = argument.record
        before = written[byte]
        if ((before > 0) & (before < self.begin)).any():
            self.fail(f"{verb} what another program has stored in {argument.name}")
        if (before == self.now).any():
            self.fail(f"{verb} what it has stored itself in {argument.name}, without a barrier")
        if verb == "stores":
            before = read[byte]
            if ((before > 0) & (before < self.begin)).any():
                self.fail(f"stores what another program has loaded from {argument.name}")
            written[byte] = self.now
        else:
            read[byte] = np.where(read[byte] == 0, self.now, read[byte])
