"""Pickles of known data sets, read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .raw import LARGEST


class _Stub:
    """A stand-in for an object in a pickle: it stores the arguments and the state, and calls nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Stub):
    def read(self) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, content = self.state
        code, order = dtype.args[0], dtype.state[1]
        if code not in _NUMBERS or order not in ("<", ">", "|"):
            raise pickle.UnpicklingError(f"it holds an array of {order}{code}, which no Planetoid file holds")
        content = content.encode("latin1") if isinstance(content, str) else content
        array: np.ndarray[Any, Any] = np.frombuffer(content, order + code).reshape(shape, order="F" if fortran else "C")
        return array.astype(np.float32 if code[0] == "f" else np.int64)


class _Csr(_Stub):
    def read(self) -> Tensor:
        shape = tuple(self.state.get("_shape") or self.state["shape"])
        start, col, value = (torch.from_numpy(self.state[key].read()) for key in ("indptr", "indices", "data"))
        if len(start) != shape[0] + 1 or int(start[-1]) != len(col) or (start.diff() < 0).any():
            raise pickle.UnpicklingError(f"its indptr does not fit {shape[0]} rows with {len(col)} entries")
        if shape[0] * shape[1] > LARGEST:
            raise pickle.UnpicklingError(f"it claims the shape {shape}, larger than a matrix of any Planetoid file")
        row = torch.arange(shape[0]).repeat_interleave(start.diff())
        return torch.sparse_coo_tensor(torch.stack([row, col]), value.float(), shape, check_invariants=True).to_dense()


class _Dtype(_Stub): ...


class _Graph(_Stub, dict): ...  # type: ignore[type-arg]


_NUMBERS = {"b1", *(kind + size for kind in "iu" for size in "1248"), "f4", "f8"}
_STUBS: dict[str, type[_Stub]] = {  # the names in Planetoid's files and in those of today's numpy and scipy
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Stub,
    "numpy.dtype": _Dtype,
    "scipy.sparse.csr.csr_matrix": _Csr,
    "scipy.sparse._csr.csr_matrix": _Csr,
    "collections.defaultdict": _Graph,
    "__builtin__.list": _Stub,
    "builtins.list": _Stub,
}


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes 2^35 bytes for a memo's index of 2^32
    def find_class(self, module: str, name: str) -> type[_Stub]:
        if f"{module}.{name}" not in _STUBS:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which no Planetoid file holds; nothing was run")
        return _STUBS[f"{module}.{name}"]


def unpickle(path: Path) -> Tensor | dict[int, list[int]]:
    """Return the matrix [rows, columns] float32 or the graph in one of Planetoid's pickles.

    Raises:
        pickle.UnpicklingError: if it holds anything else.
    """
    with path.open("rb") as file:
        content = _Unpickler(file, encoding="latin1").load()
    if isinstance(content, _Csr):
        return content.read()
    if isinstance(content, _Array):
        return torch.from_numpy(content.read()).float()
    if isinstance(content, dict):
        if (links := sum(map(len, content.values()))) > path.stat().st_size:  # a list may be referenced many times
            raise pickle.UnpicklingError(f"it claims {links} links, more than it has bytes")
        return content
    raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, expected a matrix or a graph")
