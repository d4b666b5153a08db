"""Users' files of arrays: every width and order is read, a broken file is named and runs nothing."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gat_pyg.data import from_file
from tests.data.test_splits import masks, ring


class Gadget:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *args: Any):
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


# Graphs in users' files ---------------------------------------------------------------------------------------------


def saved(form: str, folder: Path, values: dict[str, Any]) -> Path:
    """A file or folder with arrays of the keys; their tensors in a .pt file."""
    path = folder / (form if form == "folder" else f"mine.{form}")
    if form == "folder":
        path.mkdir()
        for key, value in values.items():
            np.save(path / f"{key}.npy", value)
    elif form == "npz":
        np.savez(path, **values)
    else:
        torch.save({key: torch.as_tensor(value) for key, value in values.items()}, path)
    return path


def arrays(**changes: Any) -> dict[str, Any]:
    return {key: np.asarray(changes.get(key, ring()[key])) for key in ("x", "edge_index", "y")}


@pytest.mark.parametrize(
    ("key", "dtype"),
    [("x", ">f4"), ("x", ">f8"), ("x", np.longdouble), ("x", np.uint64), ("edge_index", ">i8"), ("edge_index", ">i4")]
    + [("y", dtype) for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, ">i2", ">f8", np.longdouble, bool)],
)
def test_arrays_of_every_width_and_order_are_read(key: str, dtype: Any, tmp_path: Path):
    values = arrays(y=np.arange(12) % 2)
    values[key] = values[key].astype(dtype)
    data = from_file(saved("npz", tmp_path, values), per_class=1, val=2, test=2).train[0]
    for name in values:
        assert data[name].tolist() == values[name].tolist(), name


class Command(Gadget):
    """Creates the file `it_ran` of the working directory if it is unpickled."""

    def __init__(self) -> None:
        super().__init__(os.system, "touch it_ran")


def bytes_of(path: str, content: bytes) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)

    return write


def torch_saved(content: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(content, folder / "mine.pt")


def numpy_saved(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: np.savez(folder / "mine.npz", **values)


def store_of(value: Any) -> Data:
    data = ring()
    data.__dict__["_store"] = value
    return data


def truncated(suffix: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        path = folder / f"mine.{suffix}"
        torch.save(ring(), path) if suffix == "pt" else np.savez(path, x=np.eye(3))
        path.write_bytes(path.read_bytes()[:-20])

    return write


def dangling(folder: Path) -> None:
    saved("folder", folder, arrays())
    (folder / "folder" / "x.npy").unlink()
    (folder / "folder" / "x.npy").symlink_to(folder / "gone")


def looped(folder: Path) -> None:
    saved("folder", folder, arrays())
    (folder / "folder" / "y.npy").unlink()
    (folder / "folder" / "y.npy").symlink_to(folder / "folder" / "y.npy")


NO_EDGES = np.zeros((2, 0), int)
TEXTS = np.array(["a", "b"] * 6, object)  # as of pandas
OBJECTS = np.array([Command()], dtype=object)
NO_ARCHIVE = (b"", pickle.dumps({"x": 1}))
# path, its writer, error and message
BROKEN_FILES: list[tuple[Any, Callable[[Path], Any] | None, type[Exception], str]] = [
    *(
        ("mine.pt", torch_saved(content), ValueError, "cannot be read: it needs posix.system.*would run code")
        for content in (Command(), ring(extra=Command()))
    ),
    ("mine.pt", bytes_of("mine.pt", pickle.dumps(Command())), ValueError, "cannot be read"),
    (
        "mine.npz",
        numpy_saved(x=OBJECTS, edge_index=NO_EDGES, y=np.zeros(1, int)),
        ValueError,
        "mine.npz: x is of object, expected real numbers. Give categories columns of 0 and 1, for instance by pandas",
    ),
    *(
        (f"mine.{suffix}", truncated(suffix), ValueError, rf"mine\.{suffix} cannot be read: .*truncated")
        for suffix in ("pt", "npz")
    ),
    ("mine.pt", torch_saved(store_of("abc")), ValueError, r"mine\.pt cannot be read"),
    *(
        (
            "mine.npz",
            bytes_of("mine.npz", c),
            ValueError,
            r"^(?!.*pickle).*npz cannot be read: it is not a valid .npz file",
        )
        for c in NO_ARCHIVE
    ),
    *(("folder", bytes_of("folder/x.npy", c), ValueError, "^(?!.*pickle).*folder cannot be read") for c in NO_ARCHIVE),
    ("folder", dangling, FileNotFoundError, r"x\.npy cannot be read: No such file or directory\."),
    ("folder", looped, ValueError, r"y\.npy cannot be read: Too many levels of symbolic links\."),
    ("none.pt", None, FileNotFoundError, "none.pt does not exist"),
    ("none", None, FileNotFoundError, "none does not exist"),
    *(
        (path, write, ValueError, r"mine\S*: y is of object, expected real numbers\. Give each class a number: numpy.u")
        for path, write in (
            ("mine.npz", lambda folder: np.savez(folder / "mine.npz", **arrays(y=TEXTS))),
            ("mine", lambda folder: saved("folder", folder, arrays(y=TEXTS)).rename(folder / "mine")),
            ("mine.pt", lambda folder: torch.save(arrays(y=TEXTS), folder / "mine.pt")),
        )
    ),
    ("mine.csv", None, FileNotFoundError, "mine.csv does not exist"),
    ("mine.npz", numpy_saved(x=np.eye(3), edges=NO_EDGES), ValueError, "has no edge_index and no y; its keys are x, e"),
    (
        "mine.npz",
        numpy_saved(x=np.eye(3), edge_index=NO_EDGES, y=["a", "b", "a"]),
        ValueError,
        r"mine\.npz: y is of <U1, expected real numbers\. Give each class a number: ",
    ),
    (
        "mine.npz",
        numpy_saved(**arrays(y=np.full(12, 2**64 - 1, np.uint64))),
        ValueError,
        "y holds 18446744073709551615, expected numbers below",
    ),
    ("mine.pt", torch_saved(torch.eye(3)), ValueError, r"mine\.pt is a Tensor, expected a PyG Dataset"),
    ("mine.pt", torch_saved([ring(N) for N in (5, 6, 7, 8)]), ValueError, r"x has shape .*, expected"),
    *((path, None, ValueError, f"The path is {path!r}, expected that of a") for path in ("", None, 5)),
    ("~nobody-of-this-name/mine.csv", None, FileNotFoundError, "~nobody-of-this-name"),
]
if hasattr(os, "mkfifo"):
    BROKEN_FILES += [
        ("mine.pt", lambda folder: os.mkfifo(folder / "mine.pt"), ValueError, "is not a regular file"),
        (
            "folder",
            lambda folder: ((folder / "folder").mkdir(), os.mkfifo(folder / "folder" / "x.npy")),
            ValueError,
            "is not a regular file",
        ),
    ]


@pytest.mark.parametrize(("path", "write", "error", "message"), BROKEN_FILES)
def test_a_broken_file_is_named_and_runs_nothing(
    path: Any, write: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    if write is not None:
        write(tmp_path)
    with pytest.raises(error, match=message) as caught:
        from_file(tmp_path / path if write is not None else path, val=1, test=1)
    assert not (tmp_path / "it_ran").exists()
    assert "weights_only" not in str(caught.value)  # torch's advice to trust the file is not passed on


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("x", torch.ones(12, 2, device="meta"), "x is on the meta device, expected a tensor of real numbers"),
        ("x", lambda: torch.quantize_per_tensor(torch.ones(12, 2), 0.1, 0, torch.quint8), "x is quantized, expected"),
        (
            "x",
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
            "x is a nested tensor, expect|cannot be read: it needs torch._utils._rebuild_nested",  # torch 2.15
        ),
        ("x", [[0.0]] * 12, "x is of list, expected a tensor"),
        ("y", torch.ones(12, device="meta"), "y is on the meta device"),
        ("y", torch.arange(12).to_sparse(), r"y is torch.sparse_coo, expected a dense tensor. Use y.to_dense\(\)"),
        ("edge_index", torch.eye(12).to_sparse(), r"edge_index is torch.sparse_coo, .* Give the edges as \[2, E\]"),
        ("edge_attr", torch.ones(12, dtype=torch.cfloat), "edge_attr is complex"),
        ("edge_attr", "abc", "edge_attr is of str, expected a tensor"),
        ("train_mask", torch.ones(12, device="meta"), "train_mask is on the meta device"),
        *(
            (
                key,
                torch.zeros(1, dtype=torch.long).expand(10**11),
                f"{key} claims the shape .100000000000,.* stores few",
            )
            for key in ("x", "edge_index", "y", "edge_attr", "train_mask")
        ),
    ],
)
@pytest.mark.parametrize("form", [dict, list])
def test_tensors_of_another_kind_are_named(form: Any, key: str, content: Any, message: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls quantized tensors deprecated and nested ones a prototype
        values = {**ring().to_dict(), **masks(), key: content() if callable(content) else content}
        data = values if form is dict else Data(**values)
        torch.save([ring(), data] if form is list else data, tmp_path / "mine.pt")
        assert (tmp_path / "mine.pt").stat().st_size < 10_000
        with pytest.raises(ValueError, match=rf"mine\.pt(, graph 1)?:? (?:{message})"):
            from_file(tmp_path / "mine.pt")
