"""The formats of users' files: .pt, .npz and folders of .npy, read without running code in them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from ..tasks.checks import KEYS

READ = (*KEYS, "edge_label", "edge_label_index", "batch", "ptr")  # keys of a file; others are ignored


def read(path: str | Path) -> tuple[Path, Any]:
    """Return the path of a file or folder, and its content: mappings of arrays or tensors, alone or in lists.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is of another kind, is truncated or would run code.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"The path is {path!r}, expected that of a .pt or .npz file, or of a folder of .npy files.")
    path = Path(os.path.expanduser(path))
    if path.suffix not in (".pt", ".npz") and not path.is_dir():
        raise ValueError(
            f"{path} ends in {path.suffix!r}, expected .pt (torch.save), .npz (numpy.savez), or a folder of .npy files."
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a .pt or .npz file, or of a folder.")
    for file in path.glob("*.npy") if path.is_dir() else [path]:
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is no regular file, expected arrays or tensors.")  # reading a pipe may block
    try:
        content = load_folder(path) if path.is_dir() else _load_pt(path) if path.suffix == ".pt" else _load_npz(path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise type(error)(f"{error.filename} cannot be read: {error.strerror}.") from error
        reason = _refused(error) if path.suffix == ".pt" else str(error).split("\n")[0]
        raise ValueError(
            f"{path} cannot be read: {reason} It is truncated, or holds more than tensors and would run code. "
            "Save a Data or a dict of tensors by torch.save, or arrays of numbers by numpy.savez."
        ) from error
    return path, content


def graph_in(content: Any, path: Path, labelled: bool = True) -> Data:
    """Return a graph with the keys of `READ` in a mapping of arrays or tensors; it needs labels if it is `labelled`.

    Raises:
        ValueError: if the edges or the labels are missing.
    """
    if not isinstance(content, Mapping):
        return cast(Data, content)  # from_dataset raises an error
    label = ["y" if content.get("edge_label") is None else "edge_label"] if labelled else []
    missing = [key for key in ("edge_index", *label) if content.get(key) is None]
    if missing:
        keys = ", ".join(key for key in list(content)[:8] if isinstance(key, str))
        raise ValueError(
            f"{path.stem} has no {' and no '.join(missing)}; its keys are {keys}. Expected edge_index and y or "
            "edge_label, and x for graphs with features. To predict links, choose task=link_prediction, which needs "
            "no labels."
        )
    return Data(**{key: as_tensor(content[key], f"{path.stem}: {key}") for key in READ if content.get(key) is not None})


def as_tensor(values: Any, where: str) -> Tensor:
    """Return an array or a tensor as a tensor with a byte order and width that torch supports.

    Raises ValueError for other values, and for an expanded tensor: its size is not bounded by that of the file.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        kind = values.dtype.kind
        wide = "f8" if values.dtype.itemsize > 8 else "i8" if kind == "u" and values.dtype.itemsize > 1 else None
        if values.dtype == np.uint64 and (values > np.iinfo(np.int64).max).any():
            raise ValueError(f"{where} holds {values.max()}, expected numbers below 2^63. Convert it to int64.")
        values = values.astype(wide or values.dtype.newbyteorder("="), copy=False)
    elif not isinstance(values, Tensor):
        kind = getattr(values, "dtype", type(values).__name__)
        hint = " Give each class a number: numpy.unique(y, return_inverse=True)[1]." if where.endswith("y") else ""
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
        raise ValueError("it is no archive of numpy.savez.")
    # not numpy.load, which takes other files for pickles and explains how to load them
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return {key: arrays[key] if key in READ else None for key in arrays.files}


def load_folder(path: Path) -> dict[str, Any]:
    """Return the arrays of a folder of `.npy` files by name, memory-mapped; None for those that are not read."""
    return {
        file.stem: np.lib.format.open_memmap(file, mode="r") if file.stem in READ else None
        for file in sorted(path.glob("*.npy"))
    }


def _load_pt(path: Path) -> Any:
    kinds = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    # only those that are not listed yet: on exit, torch removes all of these from its list
    with torch.serialization.safe_globals(list(kinds.difference(torch.serialization.get_safe_globals()))):
        content = torch.load(path, map_location="cpu", weights_only=True)
    return _mappings(content)


def _mappings(content: Any, depth: int = 2) -> Any:
    """Replace each Data in nested lists by a mapping."""
    if isinstance(content, Data):
        return content.to_dict()
    if isinstance(content, (list, tuple)) and depth:
        return [_mappings(item, depth - 1) for item in content]
    return content


def _refused(error: Exception) -> str:
    """Return the name that torch.load rejected, without torch's advice to trust the file."""
    name = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it needs {name[1]}." if name else f"{type(error).__name__}."
