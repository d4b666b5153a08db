"""Stand-ins for the objects in pickles, and the pickles of known data sets, read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST = 2**27  # elements of a matrix; Citeseer's allx has 2312 * 3703


class Stub:
    """A stand-in for an object in a pickle: it stores the arguments and the state, and calls nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Array(Stub):
    """An array of NumPy's."""

    def read(self) -> np.ndarray[Any, Any]:
        """Return the array; raise UnpicklingError unless it is of numbers."""
        _, shape, dtype, fortran, content = self.state
        return np.reshape(_numbers(dtype, content), shape, order="F" if fortran else "C")


class Scalar(Stub):
    """A number of NumPy's."""

    def read(self) -> np.ndarray[Any, Any]:
        """Return the number as an array without axes; raise UnpicklingError if it is not a number."""
        return _numbers(*self.args).reshape(())


def _numbers(dtype: Any, content: Any) -> np.ndarray[Any, Any]:
    code, order = dtype.args[0], dtype.state[1]
    if code not in _NUMBERS or order not in ("<", ">", "|"):
        raise pickle.UnpicklingError(f"it holds an array of {order}{code}, expected numbers")
    content = content.encode("latin1") if isinstance(content, str) else content
    array: np.ndarray[Any, Any] = np.frombuffer(content, order + code)
    return array


def _native(array: Array) -> Tensor:
    """Return an array as float32 or int64."""
    values = array.read()
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64))


class _Csr(Stub):
    def read(self) -> Tensor:
        shape = tuple(self.state.get("_shape") or self.state["shape"])
        start, col, value = (_native(self.state[key]) for key in ("indptr", "indices", "data"))
        if len(start) != shape[0] + 1 or int(start[-1]) != len(col) or (start.diff() < 0).any():
            raise pickle.UnpicklingError(f"its indptr does not fit {shape[0]} rows with {len(col)} entries")
        if shape[0] * shape[1] > LARGEST:
            raise pickle.UnpicklingError(f"it claims the shape {shape}, larger than a matrix of any Planetoid file")
        row = torch.arange(shape[0]).repeat_interleave(start.diff())
        return torch.sparse_coo_tensor(torch.stack([row, col]), value.float(), shape, check_invariants=True).to_dense()


class _Graph(Stub, dict): ...  # type: ignore[type-arg]


_NUMBERS = {"b1", *(kind + size for kind in "iu" for size in "1248"), "f2", "f4", "f8"}
NUMPY: dict[str, type[Stub]] = {  # the names of NumPy's objects in its versions
    **{f"numpy.{core}.multiarray._reconstruct": Array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": Scalar for core in ("core", "_core")},
    "numpy.ndarray": Stub,
    "numpy.dtype": Stub,
}
_STUBS: dict[str, type[Stub]] = {  # the names in Planetoid's files and in those of today's numpy and scipy
    **NUMPY,
    "scipy.sparse.csr.csr_matrix": _Csr,
    "scipy.sparse._csr.csr_matrix": _Csr,
    "collections.defaultdict": _Graph,
    "__builtin__.list": Stub,
    "builtins.list": Stub,
}


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes 2^35 bytes for a memo's index of 2^32
    def find_class(self, module: str, name: str) -> type[Stub]:
        if f"{module}.{name}" not in _STUBS:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which no Planetoid file holds; nothing was run")
        return _STUBS[f"{module}.{name}"]


def unpickle(path: Path) -> Tensor | dict[int, list[int]]:
    """Return the matrix [rows, columns], float32, or the graph in one of Planetoid's pickles.

    Raises:
        pickle.UnpicklingError: if it holds anything else.
    """
    with path.open("rb") as file:
        content = _Unpickler(file, encoding="latin1").load()
    if isinstance(content, _Csr):
        return content.read()
    if isinstance(content, Array):
        return _native(content).float()
    if isinstance(content, dict):
        if (links := sum(map(len, content.values()))) > path.stat().st_size:  # a list may be referenced many times
            raise pickle.UnpicklingError(f"it claims {links} links, more than it has bytes")
        return content
    raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, expected a matrix or a graph")
