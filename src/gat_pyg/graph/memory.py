"""The memory of tensors on a CPU: as arrays that leave no mark on it, and its checksum."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CPU = torch.device("cpu")
_FIRST = 8  # an address below all tensors' and a multiple of every size: NumPy has no array at address 0
_HUGE = 1 << 22  # bytes from which NumPy requests huge pages
_LARGE = 1 << 22  # words, about 2 ms, below which one thread computes a checksum


@functools.cache
def load_cpu_kernels() -> Any:
    """Import the compiled kernels of this folder; None without Numba, or if it is not for this NumPy."""
    try:
        return importlib.import_module(f"{__package__}.cpu")
    except ImportError:
        return None


class _Addresses:
    def __init__(self, dtype: np.dtype[Any]) -> None:
        size = 2**62 // dtype.itemsize
        self.__array_interface__ = {"data": (_FIRST, False), "shape": (size,), "typestr": dtype.str, "version": 3}


@functools.cache
def _memory(dtype: torch.dtype) -> tuple[np.ndarray[Any, Any], int]:
    """Return all addresses of the process as one array, whose slices are arrays of valid memory, and its item size."""
    kind = np.dtype("uint16" if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))
    return np.asarray(_Addresses(kind)), kind.itemsize


def elements(tensor: Tensor, dtype: torch.dtype | None = None) -> np.ndarray[Any, Any]:
    """Return the elements of a contiguous tensor on a CPU as a vector, valid as long as the tensor.

    `Tensor.numpy` would mark the storage for good as one that cannot be resized, which FSDP does to parameters.

    Args:
        tensor: of a dtype that NumPy has, or of bfloat16, whose elements are returned as uint16.
        dtype: if present, the memory as elements of this dtype, without the bytes that are left.

    >>> x = torch.ones(2, 2)
    >>> elements(x)[1] = 5.0
    >>> x.tolist(), x.untyped_storage().resizable()
    ([[1.0, 5.0], [1.0, 1.0]], True)
    """
    memory, size = _memory(dtype or tensor.dtype)
    count = tensor.numel() if dtype is None else tensor.nbytes // size
    first, rest = divmod(tensor.data_ptr() - _FIRST, size)
    if first < 0 or rest:  # no memory, or not aligned
        bits = tensor.detach().view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor.detach()
        copy = bits.clone().numpy().reshape(-1).view(np.uint8)
        return copy[: count * size].view(memory.dtype)
    return memory[first : first + count]


def memory(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return all addresses of the process as one array: for kernels that get addresses."""
    return _memory(dtype)[0]


def empty(*size: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on a CPU.

    The memory of large ones is NumPy's, which requests huge pages: they are written and gathered from faster. Their
    storage cannot be resized.
    """
    memory, item = _memory(dtype)
    if math.prod(size) * item < _HUGE:
        return torch.empty(*size, dtype=dtype, device=_CPU)
    return torch.from_numpy(np.empty(size, memory.dtype)).view(dtype)


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, as `Tensor.to` does; on a CPU, `empty` allocates the copy of a contiguous one."""
    if tensor.dtype == dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.to(dtype)
    return empty(*tensor.shape, dtype=dtype).copy_(tensor)


def checksum(tensor: Tensor) -> Hashable:
    """Return a checksum of the elements of a tensor on a CPU and of their order.

    It takes one pass over the memory. Different elements have the same with a probability of 2^-64.

    >>> ids = torch.tensor([[0, 1], [1, 2]])
    >>> before = checksum(ids)
    >>> ids.numpy()[0] = [1, 0]  # torch does not count this change
    >>> checksum(ids) == before
    False
    """
    if not tensor.is_contiguous():
        with torch._C._DisableFuncTorch():  # within a transform, a view of a tensor has no memory
            if tensor.dim() == 2 and tensor.size(0) == 2 and tensor.stride(1) == 1:
                return tuple(checksum(row) for row in tensor)
            transpose = tensor.mT if tensor.dim() == 2 else tensor
            tensor = transpose if transpose.is_contiguous() else tensor.contiguous()
    if (kernels := load_cpu_kernels()) is None:
        return hash(elements(tensor, torch.uint8).tobytes())
    words = elements(tensor, torch.int64)
    rest = elements(tensor, torch.uint8)[8 * words.size :].tobytes() if tensor.nbytes % 8 else b""
    if words.size < _LARGE:
        return kernels.sum_words(words, 0), rest
    parts = np.linspace(0, words.size, 4 * torch.get_num_threads() + 1).astype(np.int64).tolist()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = pool.map(lambda first, last: kernels.sum_words(words[first:last], first), parts[:-1], parts[1:])
        return sum(sums) % 2**64, rest
