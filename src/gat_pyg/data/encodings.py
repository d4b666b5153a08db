"""Tasks with encodings of nodes, which are computed once and kept on disk."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..files import locked, write_whole
from ..tasks.encodings import Encoding, GraphColumns
from ..tasks.objective import SPLITS
from ..tasks.preparation import build_transform
from ..tasks.scaling import scale
from ..tasks.task import Task
from .named.raw import data_root

VERSION = 2  # part of the names of files: increase it if a transform computes other numbers
_BROKEN = (OSError, ValueError, EOFError, KeyError, BadZipFile, zlib.error)  # errors that a damaged file causes


def encoded(task: Task, transform: Mapping[str, Any], root: str | Path | None = None) -> Task:
    """Return the task with encodings of the nodes as further columns of x, `[N, F + P]`.

    They are computed from the edges that pass messages, so held-out links are not in them, and standardised
    over the nodes of the training graphs (`gat_pyg.tasks.encodings.Encoding`); those that depend on features, over the
    training nodes if the nodes of one graph have labels. The task's preparation appends them to
    other graphs. The features become one tensor in memory, also those of a folder of arrays.

    The encodings are kept in `root/encodings`, in a file whose name has a hash of the transform and of what it reads.
    So all splits, folds and runs read the same file, also several processes at a time; one of them computes it.
    A damaged file is computed again.

    Args:
        task: the task, without encodings.
        transform: the name of the transform's class as `_target_`, and its arguments: see `Encoding`.
        root: the folder of raw files; by default `$GAT_PYG_DATA`, else `~/.cache/gat_pyg`.

    Raises:
        ValueError: if the task has encodings already, or the transform appends no columns.

    Example:
        >>> import tempfile
        >>> from gat_pyg.data import digits
        >>> transform = {"_target_": "gat_pyg.tasks.encodings.RandomWalkPE", "walk_length": 8}
        >>> encoded(digits(), transform, root=tempfile.mkdtemp()).num_features
        72
    """
    if task.encoding is not None:
        raise ValueError(f"{task.name} has encodings already. Choose one transform, or a Compose of several.")
    graphs = {id(data): data for split in SPLITS for data in task.graphs(split)}
    columns = dict(zip(graphs, _columns([*graphs.values()], transform, data_root(root) / "encodings"), strict=True))
    train = torch.cat([columns[id(data)] for data in task.train]).double()
    graph, built = task.shared_graph, build_transform(transform)
    if graph is not None and task.objective.item == "node" and Encoding(built).reads_features:
        train = train[graph.train_mask]
    mean, std = train.mean(0), train.std(0, correction=0)
    std = scale(std, mean, torch.float32, unit=1.0)
    if not std.any():
        warnings.warn(
            f"{task.name}: all columns of the encoding are constant over the training nodes, so it adds nothing. "
            "Choose another one.",
            stacklevel=2,
        )
    description = {"_target_": "gat_pyg.tasks.encodings.Encoding", "transform": dict(transform)}
    description |= {"mean": mean.tolist(), "std": std.tolist()}
    encoding: Any = build_transform(description)
    for key, data in graphs.items():
        graphs[key] = copy.copy(data)
        graphs[key].x = torch.cat([data.x, encoding.standardised(columns.pop(key)).to(data.x.dtype)], 1)
    is_wide = isinstance(built, GraphColumns) and not built.has_statistics(task.train[0].x)
    note = f"{task.name}: the encoding has no statistics of the neighbours' features: they are ids, none or too many"
    return task.encoded_by(description, graphs, [note] * is_wide)


def _columns(graphs: Sequence[Data], transform: Mapping[str, Any], folder: Path) -> list[Tensor]:
    """Return the columns of each graph, from the file in the folder if there is one."""
    encoding = Encoding(build_transform(transform))
    keys = [_digest(data, encoding.reads_features) for data in graphs]
    distinct = dict(sorted(zip(keys, graphs, strict=True), key=lambda pair: pair[0]))  # the order of splits varies
    sizes = [data.x.size(0) for data in distinct.values()]
    text = json.dumps([VERSION, str(torch.get_default_dtype()), transform, *distinct], sort_keys=True, default=str)
    name = f"{str(transform['_target_']).rpartition('.')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.npz"
    rows = _kept(folder / name, sum(sizes), [*distinct.values()], encoding)
    of = dict(zip(distinct, rows.split(sizes), strict=True))
    return [of[key] for key in keys]


def _digest(data: Data, reads_features: bool) -> str:
    """Return the hash of a graph's edges and its number of nodes, and of the features if they are read."""
    parts = [data.edge_index.long(), *[data.x] * reads_features]
    content = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(content + str(data.x.size(0)).encode()).hexdigest()


def _kept(path: Path, N: int, graphs: Sequence[Data], encoding: Encoding) -> Tensor:
    """Return the columns `[N, P]` of all graphs, one after the other: read from the file, or computed and written."""
    rows = _read(path, N)
    if rows is not None:
        return rows
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.stem}.lock")):
            rows = _read(path, N)  # another process may have written it
            if rows is None:
                rows = torch.cat([encoding.columns(data) for data in graphs])
                write_whole(path, partial(_write, rows))
    except OSError as error:  # a folder that cannot be written, or a full disk
        warnings.warn(f"{path} is not kept, so each run computes the encodings again: {error}.", stacklevel=4)
    return torch.cat([encoding.columns(data) for data in graphs]) if rows is None else rows


def _read(path: Path, N: int) -> Tensor | None:
    """Return the array in a file, whose checksum NumPy verifies, or None if there is no whole file of N finite rows."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            rows = torch.from_numpy(arrays["encoding"])
    except _BROKEN:
        return None
    fits = rows.dim() == 2 and len(rows) == N and rows.dtype == torch.get_default_dtype()
    return rows if fits and bool(rows.isfinite().all()) else None


def _write(rows: Tensor, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, encoding=rows.numpy())
