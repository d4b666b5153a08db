"""The formats of users' files: .pt, .npz and folders of .npy, read without running code in them."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.separate import separate
from torch_geometric.data.storage import AttrType, GlobalStorage

from ...tasks.objective import SPLITS
from ..tables.files import PARQUET, TEXT
from ..tables.programs import READERS, SEVERAL
from .keys import READ

UNREAD = torch.empty(0)  # stands for an array that is not read


def read(path: str | Path) -> tuple[Path, Any]:
    """Return the path of a file or folder, and its content: mappings of arrays or tensors, alone or in lists.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is of another kind, is truncated or would run code.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"The path is {path!r}, expected that of a .pt or .npz file, or of a folder of .npy files.")
    path = Path(os.path.expanduser(path))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a .pt or .npz file, or of a folder.")
    endings = {file.suffix.lower() for file in path.iterdir()} if path.is_dir() else set()
    of_graphs = {*SEVERAL} & endings and ".npy" not in endings
    if (path.suffix not in (".pt", ".npz") and not path.is_dir()) or of_graphs:
        suffix = SEVERAL[0] if of_graphs else path.suffix.lower()
        way = f"edges={path.name}" if suffix in (*TEXT, *PARQUET) else f"graph={path.name} dataset.target=ATTRIBUTE"
        hint = f" Read it by dataset=tables dataset.{way}." if suffix in (*TEXT, *PARQUET, *READERS) else ""
        raise ValueError(
            f"{path} {'has graphs' if of_graphs else f'ends in {path.suffix!r}'}, expected .pt (torch.save), .npz "
            f"(numpy.savez), or a folder of .npy files.{hint}"
        )
    for file in path.glob("*.npy") if path.is_dir() else [path]:
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is not a regular file, expected arrays or tensors.")  # reading a pipe may block
    try:
        content = load_folder(path) if path.is_dir() else _load_pt(path) if path.suffix == ".pt" else _load_npz(path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            kind = type(error) if isinstance(error, (FileNotFoundError, PermissionError)) else ValueError
            raise kind(f"{error.filename} cannot be read: {error.strerror}.") from error
        raise ValueError(f"{path} cannot be read: {_reason(error, path.suffix)}") from error
    return path, content


def _reason(error: Exception, suffix: str) -> str:
    """Return the reason for an error on reading, without torch's advice to trust the file."""
    name = re.search(r"GLOBAL ([\w.]+)", str(error)) if suffix == ".pt" else None
    if name is not None:
        return (
            f"it needs {name[1]}, which is more than tensors and would run code. Save a graph as a dict of its "
            "tensors, a data set as list(dataset)."
        )
    text = f"{type(error).__name__}." if suffix == ".pt" else str(error).split("\n")[0]
    return f"{text} It is truncated or of another kind. Save graphs by torch.save, or arrays by numpy.savez."


def graphs_in(content: Any, path: Path, labelled: bool = True) -> Any:
    """Return the content of a file, with the graph by `graph_in` in place of each mapping of arrays or tensors.

    Lists stay lists, and a mapping of splits to graphs stays one.
    """
    if isinstance(content, Mapping) and not (set(content) == set(SPLITS) or _holds_graphs(content)):
        return graph_in(content, path, labelled)
    if isinstance(content, Mapping):
        return {key: graphs_in(value, path, labelled) for key, value in content.items()}
    if isinstance(content, list):
        return [graphs_in(item, path, labelled) for item in content]
    return content  # from_dataset raises an error


def _holds_graphs(content: Mapping[Any, Any]) -> bool:
    """Return True if a mapping holds graphs and no arrays."""
    return bool(content) and all(
        isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping))
        for value in content.values()
    )


def graph_in(content: Mapping[Any, Any], path: Path, labelled: bool = True) -> Data:
    """Return a graph with the keys of a mapping, those of `READ` as tensors; it needs labels if it is `labelled`.

    Raises:
        ValueError: if the edges or the labels are missing.
    """
    label = ["y" if content.get("edge_label") is None else "edge_label"] if labelled else []
    missing = [key for key in ("edge_index", *label) if content.get(key) is None]
    if missing:
        keys = ", ".join(key for key in list(content)[:8] if isinstance(key, str))
        sparse = missing[0] == "edge_index" and not {"adj", "adj_t"}.isdisjoint(content)
        hint = " Leave out transforms that replace the edges, such as ToSparseTensor and ToDense." * sparse
        hint += " For scipy.sparse.save_npz, choose dataset=tables dataset.graph=..." * ("indptr" in content)
        raise ValueError(
            f"{path.stem} has no {' and no '.join(missing)}; its keys are {keys}. Expected edge_index and y or "
            "edge_label, and x for graphs with features. To predict links, choose task=link_prediction, which needs "
            f"no labels.{hint}"
        )
    graph = Data()
    for key, value in content.items():
        if isinstance(key, str) and value is not None:
            graph[key] = as_tensor(value, f"{path.stem}: {key}") if key in READ else value
    return graph


_HINTS = {
    **dict.fromkeys(("y", "edge_label"), " Give each class a number: numpy.unique(y, return_inverse=True)[1]."),
    **dict.fromkeys(("x", "edge_attr"), " Give categories columns of 0 and 1, for instance by pandas.get_dummies."),
}


def as_tensor(values: Any, where: str) -> Tensor:
    """Return a number, an array or a tensor as a tensor with a byte order and width that torch supports.

    Raises ValueError for other values, and for an expanded tensor: its size is not bounded by that of the file.
    """
    if isinstance(values, (bool, int, float, np.generic)):
        values = np.asarray(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        kind = values.dtype.kind
        wide = "f8" if values.dtype.itemsize > 8 else "i8" if kind == "u" and values.dtype.itemsize > 1 else None
        if values.dtype == np.uint64 and (values > np.iinfo(np.int64).max).any():
            raise ValueError(f"{where} holds {values.max()}, expected numbers below 2^63. Convert it to int64.")
        values = values.astype(wide or values.dtype.newbyteorder("="), copy=False)
    elif not isinstance(values, Tensor):
        kind = getattr(values, "dtype", type(values).__name__)
        hint = _HINTS.get(where.rpartition(" ")[2], "")
        expected = "real numbers" if isinstance(values, np.ndarray) else "a tensor"
        raise ValueError(f"{where} is of {kind}, expected {expected}.{hint}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        tensor = torch.as_tensor(values).detach()
    if tensor.is_nested:
        raise ValueError(f"{where} is a nested tensor, expected one with a single shape. Save a list of graphs.")
    if tensor.layout == torch.strided and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"{where} claims the shape {tuple(tensor.shape)}, but the file stores fewer elements. Save a copy without "
            "expanded axes: tensor.clone(memory_format=torch.contiguous_format)."
        )
    return tensor


def _load_npz(path: Path) -> dict[str, Any]:
    if not is_zipfile(path):
        raise ValueError("it is not a valid .npz file of numpy.savez.")
    # not numpy.load, which takes other files for pickles and explains how to load them
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return {key: _numbers(arrays.__getitem__, key) if key in READ else UNREAD for key in arrays.files}


def load_folder(path: Path) -> dict[str, Any]:
    """Return the arrays of a folder of `.npy` files by name, memory-mapped; `UNREAD` for those that are not read."""
    return {
        file.stem: _numbers(lambda file: np.lib.format.open_memmap(file, mode="r"), file)
        if file.stem in READ
        else UNREAD
        for file in sorted(path.glob("*.npy"))
    }


def _numbers(load: Any, key: Any) -> Any:
    """Return an array, or an empty one of objects for those that would need pickle, such as strings of pandas."""
    try:
        return load(key)
    except ValueError as error:
        if "Object arrays" not in str(error) and "Python objects" not in str(error):
            raise
        return np.empty(0, object)


# Pickles --------------------------------------------------------------------------------------------------------------


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
        return np.reshape(_unpickled(dtype, content), shape, order="F" if fortran else "C")


class Scalar(Stub):
    """A number of NumPy's."""

    def read(self) -> np.ndarray[Any, Any]:
        """Return the number as an array without axes; raise UnpicklingError if it is not a number."""
        return _unpickled(*self.args).reshape(())


def _unpickled(dtype: Any, content: Any) -> np.ndarray[Any, Any]:
    code, order = dtype.args[0], dtype.state[1]
    if code not in _NUMBERS or order not in ("<", ">", "|"):
        raise UnpicklingError(f"it holds an array of {order}{code}, expected numbers")
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

_LOCK = threading.Lock()  # all threads share torch.load's list of allowed classes


class _Batch(Stub):
    """A stand-in for a `Batch`, and for the call by which PyG creates its class; it stores the state."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls) if args else cls


def _dict(*_: Any) -> dict[Any, Any]:
    return {}


STAND_INS: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in (Data, HeteroData, DataEdgeAttr, DataTensorAttr)},
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in (GlobalStorage, AttrType)},
    **{f"torch_geometric.data.storage.{kind}Storage": Stub for kind in ("Base", "Node", "Edge")},
    "torch_geometric.data.batch.DynamicInheritanceGetter": _Batch,
    "torch_geometric.data.batch.Batch": Stub,
    "torch_geometric.transforms.rooted_subgraph.RootedSubgraphData": Data,
    **NUMPY,
}


@contextmanager
def _allowed() -> Iterator[None]:
    """Context manager: let torch.load read PyG's graphs, NumPy's numbers, and the caches of PyG's transforms.

    Objects other than tensors and `Data` become stand-ins that call nothing.
    """
    with _LOCK:
        listed = torch.serialization.get_safe_globals()
        names = {kind[1] if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}" for kind in listed}
        with torch.serialization.safe_globals([defaultdict]):  # on exit, torch removes it from its list
            pass
        added = [(stand_in, name) for name, stand_in in STAND_INS.items() if name not in names]
        try:
            # torch fills no defaultdict, the form of a cache
            with torch.serialization.safe_globals([*added, (_dict, "collections.defaultdict")]):
                yield
        finally:
            if defaultdict in listed:
                torch.serialization.add_safe_globals([defaultdict])


def _load_pt(path: Path) -> Any:
    with _allowed():
        content = torch.load(path, map_location="cpu", weights_only=True)
    return _mappings(content)


def _mappings(content: Any, depth: int = 3) -> Any:
    """Replace each graph in nested lists and mappings by a mapping, and the content of an InMemoryDataset by a list."""
    if isinstance(content, Data):
        if "_store" not in vars(content):  # of PyG 1
            return _fields({key: value for key, value in vars(content).items() if not key.startswith("_")})
        return _fields(content.to_dict())
    if isinstance(content, _Batch):  # of HeteroData if it has no store: from_dataset raises an error
        return _fields(content.state["_store"].to_dict()) if "_store" in content.state else HeteroData()
    if isinstance(content, Mapping) and depth:
        is_graph = "edge_index" in content
        return _fields(content) if is_graph else {key: _mappings(item, depth - 1) for key, item in content.items()}
    if isinstance(content, (list, tuple)) and depth:
        if _is_collated(content):
            return _separated(content)
        return [_mappings(item, depth - 1) for item in content]
    return content


def _fields(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a graph, with arrays in place of their stand-ins."""
    return {key: _array(value) if isinstance(value, (Array, Scalar)) else value for key, value in content.items()}


def _array(value: Array | Scalar) -> np.ndarray[Any, Any]:
    try:
        return value.read()
    except UnpicklingError:
        return np.empty(0, object)  # `as_tensor` raises an error


def _is_collated(content: Any) -> bool:
    """Return True for the content of an InMemoryDataset: graphs in one `Data` or mapping, and where each begins."""
    if not 2 <= len(content) <= 4 or not isinstance(content[0], (Mapping, Data, HeteroData)):
        return False
    slices = content[1]
    edges = slices.get("edge_index") if isinstance(slices, Mapping) else None
    return slices is None or isinstance(content[-1], type) or (isinstance(edges, Tensor) and edges.dim() == 1)


def _separated(content: Any) -> Any:
    """Return the graph or the graphs in the content of an InMemoryDataset."""
    data, slices = content[:2]
    if HeteroData in (type(data), content[-1]):
        return HeteroData()  # from_dataset raises an error
    fields = _mappings(data)
    if slices is None:
        return fields
    keys = [key for key, value in fields.items() if isinstance(value, Tensor) and isinstance(slices.get(key), Tensor)]
    slices = {key: as_tensor(slices[key], f"slices of {key}") for key in keys}
    union = Data(**{key: as_tensor(fields[key], key) for key in keys})
    (end,) = {len(starts) for starts in slices.values()}
    return [separate(Data, union, number, slices, decrement=False).to_dict() for number in range(end - 1)]
