"""The operations that would make the host wait for a GPU, counted without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
BY_VALUES = {  # operators whose result, or its shape, the host has to know
    aten._local_scalar_dense,
    aten._unique,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
READS = {"tolist", "numpy", "cpu"}  # methods, which on a CPU call no operator


@contextmanager
def syncs() -> Iterator[list[str]]:
    """Collect the names of the calls that would synchronise with a GPU."""
    results: list[str] = []
    with _Reads(results), _Operators(results):
        yield results


class _Reads(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        unsized = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        masked = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in BY_VALUES or unsized or masked:
            self.found.append(str(func))
        return func(*args, **kwargs)
