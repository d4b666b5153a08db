"""Stand-ins for the objects in pickles: they store numbers and call nothing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np


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


_NUMBERS = {"b1", *(kind + size for kind in "iu" for size in "1248"), "f2", "f4", "f8"}
NUMPY: dict[str, type[Stub]] = {  # the names of NumPy's objects in its versions
    **{f"numpy.{core}.multiarray._reconstruct": Array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": Scalar for core in ("core", "_core")},
    "numpy.ndarray": Stub,
    "numpy.dtype": Stub,
}
