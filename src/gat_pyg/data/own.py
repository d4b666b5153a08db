"""Tasks from users' own data: graphs in files, and any PyG data set."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from ..tasks.checks import _NOTHING_KNOWN, KEYS, _check_graph, _check_present
from ..tasks.edges import EdgeLabels, EdgeMultiLabels
from ..tasks.graphs import GraphLabels, GraphMultiLabels
from ..tasks.labels import ManyLabels, OneLabel
from ..tasks.metrics import TASKS
from ..tasks.nodes import NodeLabels, NodeMultiLabels
from ..tasks.objective import MASKS, SPLITS, Objective, any_known
from ..tasks.targets import EdgeTargets, GraphTargets, NodeTargets, Targets
from ..tasks.task import Task
from .splits import _draw_graphs, _draw_links, _draw_masks, _fold_graphs, _ogb_graphs, _ogb_masks, check_classes

READ = (*KEYS, "edge_label", "edge_label_index")  # keys of a file; others are ignored

# One's own graphs ---------------------------------------------------------------------------------------------------


def from_file(
    path: str | Path,
    per_class: int = 20,
    val: int = 500,
    test: int = 1000,
    seed: int = 0,
    split: int = 0,
    folds: int | str | Path | None = None,
    fold: int = 0,
    task: str | None = None,
) -> Task:
    """Read a graph, or several, from a `.pt` file (torch.save), a `.npz` file (numpy.savez) or a folder (numpy.save).

    A `.pt` file holds a PyG `Data`, a list of them, or a dict of tensors; a `.npz` file holds arrays; a folder holds
    one `.npy` file per array, such as `x.npy`. The keys are `x` [N, F], `edge_index` [2, E], `y` [N] or [N, K], and
    optionally `edge_attr` [E] or [E, D] and `train_mask`, `val_mask`, `test_mask` [N]; for labels of edges `edge_label`
    and `edge_label_index`. Other keys are ignored. Splits and the other arguments are as in `from_dataset`.

    The files of a folder are memory-mapped. So with `loader=neighbor` the features may exceed the memory, and processes
    on one machine share them. The files must not change meanwhile. An x that is not float32 is converted in memory.

    No code in the file is run: `.pt` is read with `weights_only=True` and only PyG's `Data` allowed, `.npz` with
    `allow_pickle=False`.

    Raises FileNotFoundError, and ValueError for a file that is truncated, would run code or lacks a key.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ring.npz"
    >>> np.savez(path, x=np.eye(6), y=[0, 1] * 3, edge_index=[[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> from_file(path, per_class=1, val=2, test=2)
    Task(name='ring', num_features=6, objective=NodeLabels(out_channels=2), edge_dim=None)
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
        content = _load_folder(path) if path.is_dir() else _load_pt(path) if path.suffix == ".pt" else _load_npz(path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise type(error)(f"{error.filename} cannot be read: {error.strerror}.") from error
        reason = _refused(error) if path.suffix == ".pt" else str(error).split("\n")[0]
        raise ValueError(
            f"{path} cannot be read: {reason} It is truncated, or holds more than tensors and would run code. "
            "Save a Data or a dict of tensors by torch.save, or arrays of numbers by numpy.savez."
        ) from error
    try:
        graphs = _graphs(content, path)
        result = from_dataset(graphs, path.stem, per_class, val, test, seed, split, folds, fold, task=task)
        check_classes(result)
        return result
    except ValueError as error:
        raise ValueError(f"{path}{str(error).removeprefix(path.stem)}") from error


def _graphs(content: Any, path: Path) -> Any:
    """Return the graphs of a file: one, a list, or three lists."""
    if isinstance(content, Mapping):
        return _graph(content, path)
    if not isinstance(content, (list, tuple)):
        return content
    is_split = len(content) == 3 and all(isinstance(split, (list, tuple)) for split in content)
    lists = [[_graph(item, path) for item in split] for split in (content if is_split else [content])]
    return lists if is_split else lists[0]


def _graph(content: Any, path: Path) -> Data:
    """Return a graph with the keys of `Task` in a mapping of arrays or tensors."""
    if not isinstance(content, Mapping):
        return cast(Data, content)  # from_dataset raises an error
    label = "y" if content.get("edge_label") is None else "edge_label"
    missing = [key for key in ("edge_index", label) if content.get(key) is None]
    if missing:
        keys = ", ".join(key for key in list(content)[:8] if isinstance(key, str))
        raise ValueError(
            f"{path.stem} has no {' and no '.join(missing)}; its keys are {keys}. Expected edge_index and y or "
            "edge_label, and x for graphs with features."
        )
    return Data(**{key: _numbers(content[key], f"{path.stem}: {key}") for key in READ if content.get(key) is not None})


def _numbers(values: Any, where: str) -> Tensor:
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


def _load_folder(path: Path) -> dict[str, Any]:
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


def from_dataset(
    dataset: Any,
    name: str | None = None,
    per_class: int = 20,
    val: int = 500,
    test: int = 1000,
    seed: int = 0,
    split: int = 0,
    folds: int | str | Path | None = None,
    fold: int = 0,
    transforms: Sequence[Mapping[str, Any]] = (),
    task: str | None = None,
) -> Task:
    """Convert any PyG data set with labels of nodes, edges or graphs: one graph, several graphs, or three data sets.

    `dataset` is a `Data`, a PyG `Dataset`, a list of `Data`, or three of these, as a mapping of train, val, test or as
    a sequence. The masks of a single graph are kept; of masks [N, S], column `split` is used. Missing masks are drawn
    with `seed` among the labelled nodes: `per_class` nodes of each class for training (`per_class` times K nodes if
    there are many labels per node), then `val` and `test` nodes. With quantities, all other nodes are for training.
    Several graphs are split by the data set's `get_idx_split` if it has one, as those of OGB. Else `val` and `test`
    graphs are drawn, and the others are for training. If every graph has one label, and some graph has several
    nodes, these are graph labels. With `folds`, such graphs are divided into stratified folds: number `fold` is for the
    test, the next one for validation, the others for training. Or `folds` is the path of a file of folds, in the format
    of Errica et al. (`gat_pyg.data.splits.read_folds`). Other data cannot be divided into folds.

    Labels of edges are `edge_label` [M] or [M, K] of the pairs `edge_label_index` [2, M], by default `edge_index`, or
    `y` [E] if E is not N; they need a single graph. They are read if there is no `y`, or by `task`. Missing
    masks [M] are drawn: `val` and `test` links, both directions of a link together, and the others for training.

    A single graph without `x` gets the ids of its nodes as `x` [N, 1], which `gat_pyg.models.Encoded` embeds.

    `task` is `node_`, `edge_` or `graph_`, with `classification` or `regression`; None if `y` shows it:
    integers, and floats that are whole numbers, are classes; `y` [N, K] of 0 and 1 means many labels per node; other
    floats are quantities, whose mean and standard deviation in the training split the objective takes.

    `x` and `edge_attr` become float32, `edge_attr` [E] becomes [E, 1], `y` [N, 1] becomes [N] for classes, and [N]
    becomes [N, 1] for quantities. NaN is an unknown label; nodes without a known label are removed from the masks. The
    attribute `class_names` of `dataset`, if any, becomes the task's. `transforms` describes the transforms that were
    applied to `dataset`, as in `Preparation`; they are not applied here.

    Raises ValueError as `Task` does, if there are too few labelled nodes or graphs for the split, or no such `task`.

    >>> x, edge_index = torch.eye(4), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    >>> data = Data(x, edge_index, y=torch.tensor([0.0, 1.0, 0.0, float("nan")]))
    >>> from_dataset(data, "pairs", per_class=1, val=1, test=0)
    Traceback (most recent call last):
    ValueError: pairs: test_mask is empty, expected at least one node with a known label.
    """
    name = name or name_of(type(dataset).__name__, getattr(dataset, "name", None))
    if task not in (None, *TASKS):
        raise ValueError(f"{name}: task is {task!r}, expected None or one of {', '.join(TASKS)}.")
    raw = _parts(dataset, name)
    if not any(raw):
        raise ValueError(f"{name} has no graph, expected at least one.")
    if len(raw) == 1 and len(raw[0]) == 1 and isinstance(raw[0][0], Data):
        raw = [[_completed(raw[0][0], task, name)]]
    elif str(task).startswith("edge_"):
        raise ValueError(f"{name}: task={task} needs a single graph, but there are several.")
    for graph in (graph for graphs in raw for graph in graphs):
        _check_is_graph(graph, name)
    num_splits = max(
        (raw[0][0][key].size(1) for key in MASKS if getattr(raw[0][0].get(key), "ndim", 0) == 2), default=1
    )
    if task is None:
        quantities = _are_quantities([graph.y for graphs in raw for graph in graphs])
    else:
        quantities = task.endswith("_regression")
    parts = [[_tidy(data, split, quantities, name) for data in graphs] for graphs in raw]
    every = [data for graphs in parts for data in graphs]
    objective = _objective_of(every, quantities, None if task is None else task.partition("_")[0], name)
    F, D = (
        tensor.size(-1) if tensor is not None and tensor.dim() else 1 for tensor in (every[0].x, every[0].edge_attr)
    )
    edge_dim = D if every[0].edge_attr is not None else None
    split_of_ogb = getattr(dataset, "get_idx_split", None)
    if folds is not None and (len(parts) == 3 or len(every) == 1):
        kind = "is split already" if len(parts) == 3 else "is a single graph"
        raise ValueError(
            f"{name}: folds={folds} divides a list of graphs with one label each, but this {kind}. Leave out folds "
            "(split.folds in the command)."
        )
    if len(parts) == 1 and len(every) == 1:
        _check_graph(every[0], F, edge_dim, objective, name)  # before a split is drawn
        if split_of_ogb is not None:
            _ogb_masks(every[0], split_of_ogb())
        if objective.item == "edge":
            _draw_links(every[0], val, test, seed, name)
        else:
            _draw_masks(every[0], None if quantities else per_class * objective.out_channels, val, test, seed, name)
        parts = [every, every, every]
    elif len(parts) == 1 and folds is not None:
        parts, num_splits = _fold_graphs(every, folds, fold, seed, name)
    elif len(parts) == 1 and split_of_ogb is not None:
        parts = _ogb_graphs(every, split_of_ogb())
    elif len(parts) == 1:
        parts = _draw_graphs(every, val, test, seed, name)
    names = _class_names(dataset, objective.out_channels)
    return Task(name, parts[0], parts[1], parts[2], F, objective, edge_dim, names, tuple(transforms), num_splits)


def node_ids(N: int) -> Tensor:
    """Return the ids of N nodes as the only feature `[N, 1]`, for learnt embeddings of a graph without features.

    >>> node_ids(3)
    tensor([[0.],
            [1.],
            [2.]])
    """
    return torch.arange(N).float()[:, None]


def num_nodes(data: Data) -> int:
    """Return the number of rows of x or, without x, `num_nodes` or as many nodes as `edge_index` shows."""
    if isinstance(data.x, Tensor) and data.x.dim():
        return int(data.x.size(0))
    if "num_nodes" in data:
        return int(data.num_nodes)
    return int(data.edge_index.max()) + 1 if data.edge_index.numel() else 0


def has_ids(task: Task) -> bool:
    """Return True if the only feature of a shared graph's nodes is their id."""
    graph = task.shared_graph
    return graph is not None and torch.equal(graph.x, node_ids(graph.x.size(0)))


def _are_quantities(y: list[Tensor]) -> bool:
    """Return True if floats are neither classes nor binary labels: fractions, or in [N, K] any but 0 and 1."""
    for labels in y:
        if not labels.is_floating_point() or not labels.dim():
            continue
        known = labels[~labels.isnan()].double()
        many = labels.dim() == 2 and labels.size(1) > 1
        if (((known != 0) & (known != 1)) if many else (known != known.round()) | (known < -1)).any():
            return True
    return False


OBJECTIVES: dict[str, tuple[type[OneLabel], type[ManyLabels], type[Targets]]] = {
    "node": (NodeLabels, NodeMultiLabels, NodeTargets),
    "edge": (EdgeLabels, EdgeMultiLabels, EdgeTargets),
    "graph": (GraphLabels, GraphMultiLabels, GraphTargets),
}


def _completed(data: Data, task: str | None, name: str) -> Data:
    """Return a graph with its edge labels as y, if these are to be predicted, and node ids as x, if it has none."""
    edges, y = data.edge_index, data.y
    if not isinstance(edges, Tensor) or edges.dim() != 2:
        return data
    data, N, rows = copy.copy(data), num_nodes(data), len(y) if isinstance(y, Tensor) and y.dim() else None
    label, pairs = data.get("edge_label"), data.get("edge_label_index", edges)
    for key in ("edge_label", "edge_label_index"):
        data.pop(key, None)
    if label is None:  # y [E] is of edges if it cannot be of nodes
        label, pairs, of_edges = y, edges, rows == edges.size(1) != N
    else:
        of_edges = y is None
    if label is not None and (of_edges if task is None else task.startswith("edge_")):
        _check_edge_label(label, pairs, name)
        data.y, data.edge_label_index = label, pairs
    elif rows is not None and "num_nodes" not in data:
        N = rows
    data.x = node_ids(N) if data.x is None else data.x
    return data


def _check_edge_label(label: Any, pairs: Any, name: str) -> None:
    """Raise ValueError unless there is a row of labels for each pair of nodes."""
    is_dense = isinstance(pairs, Tensor) and pairs.layout == torch.strided and pairs.dim() == 2
    size = pairs.size(1) if is_dense else None
    if not isinstance(label, Tensor) or label.dim() not in (1, 2) or len(label) != size:
        form = f"of shape {tuple(label.shape)}" if isinstance(label, Tensor) else f"a {type(label).__name__}"
        raise ValueError(
            f"{name}: edge_label is {form}, expected ({size},) or ({size}, K), labels for each of the edges. For other "
            "pairs of nodes than those of edge_index, give edge_label_index (2, M)."
        )


def _objective_of(graphs: list[Data], quantities: bool, item: str | None, name: str) -> Objective:
    """Return the objective that fits the labels of these graphs; `item` is None if their number decides."""
    y = [data.y for data in graphs]
    if "edge_label_index" in graphs[0]:
        item = "edge"
    if item is None:
        is_single = len(graphs) > 1 and all(len(labels) == 1 for labels in y)
        item = "graph" if is_single and any(data.x.shape[:1] != (1,) for data in graphs) else "node"
    one, many, targets = OBJECTIVES[item]
    if quantities:
        return targets(y[0].size(1))
    K = y[0].size(1) if y[0].dim() == 2 else max((int(labels.max()) + 1 for labels in y if len(labels)), default=0)
    if K < 1 or not any(bool(any_known(labels).any()) for labels in y):
        raise ValueError(f"{name}{_NOTHING_KNOWN}")
    objective: Objective = many(K) if y[0].dim() == 2 else one(K)
    count = sum(map(len, y))
    if y[0].dim() == 1 and count < K:
        items = f"{count} {objective.item}s"
        raise ValueError(
            f"{name}: y holds the label {K - 1}, but there are {items}. Number the classes from 0, "
            f"or choose task={objective.item}_regression for quantities."
        )
    return objective


def _class_names(dataset: Any, K: int) -> tuple[str, ...] | None:
    """Return the names of the K classes from the data set or its first element, or None."""
    first = dataset["train"] if isinstance(dataset, Mapping) and "train" in dataset else dataset
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return _first_names(getattr(first, "class_names", None), K)


def _first_names(names: Any, K: int) -> tuple[str, ...] | None:
    """Return the first K names, or None; there may be more names if no node is in the last classes."""
    return tuple(map(str, names[:K])) if isinstance(names, (list, tuple)) and len(names) >= K else None


def name_of(kind: str, name: Any = None) -> str:
    """Return the name of a data set in results: its class and its name within the class, in kebab case.

    A TUDataset has its own name alone, by which it is known.

    >>> name_of("Amazon", "Photo"), name_of("KarateClub"), name_of("TUDataset", "MUTAG")
    ('amazon-photo', 'karateclub', 'mutag')
    """
    text = kind if not isinstance(name, str) else name if kind == "TUDataset" else f"{kind} {name}"
    return re.sub(r"[\W_]+", "-", text).strip("-").lower()


def _parts(dataset: Any, name: str) -> list[list[Any]]:
    """Return one list of graphs, or three if the data set is split."""
    if isinstance(dataset, Data):
        return [[dataset]]
    if isinstance(dataset, Mapping):
        if set(dataset) != set(SPLITS):
            raise ValueError(f"{name} is a mapping of {', '.join(map(str, dataset))}, expected train, val and test.")
        return [_parts(dataset[key], name)[0] for key in SPLITS]
    if isinstance(dataset, Sequence) and len(dataset) == 3 and not any(isinstance(part, Data) for part in dataset):
        return [_parts(part, name)[0] for part in dataset]
    if isinstance(dataset, (Dataset, Sequence)) and not isinstance(dataset, str):
        return [list(dataset)]
    raise ValueError(f"{name} is a {type(dataset).__name__}, expected a PyG Dataset, a Data, or a list of Data.")


def _check_is_graph(data: Any, name: str) -> None:
    if not isinstance(data, Data):
        hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
        raise ValueError(f"{name} holds a {type(data).__name__}, expected torch_geometric.data.Data.{hint}")
    _check_present(data, name)


def _tidy(data: Data, split: int, quantities: bool, name: str) -> Data:
    """Return a new graph with only the keys of `Task`, in the types of `Task`."""
    tidy = Data(data.x.float(), data.edge_index, y=_targets(data.y, name) if quantities else _labels(data.y, name))
    if "edge_label_index" in data:
        tidy.edge_label_index = data.edge_label_index
    if data.edge_attr is not None:
        tidy.edge_attr = data.edge_attr.float()
        if tidy.edge_attr.dim() == 1:
            tidy.edge_attr = tidy.edge_attr[:, None]  # [E, 1]
    known, items = any_known(tidy.y), "edges" if "edge_label_index" in data else "nodes"
    for key in MASKS:
        if data.get(key) is None:
            continue
        mask = torch.as_tensor(data[key])
        if mask.dim() == 2:
            if not 0 <= split < mask.size(1):
                raise ValueError(f"{name}: {key} has {mask.size(1)} columns, split={split} is none of them.")
            mask = mask[:, split]
        if mask.shape != known.shape or not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"{name}: {key} is {mask.dtype} of shape {tuple(mask.shape)}, expected a bool, 0 or 1 for each of the "
                f"{len(known)} {items}. Are these {items[:-1]} numbers? Use torch_geometric.utils.index_to_mask."
            )
        tidy[key] = mask.bool() & known
    return tidy


def _targets(y: Tensor, name: str) -> Tensor:
    """Return quantities as [N, K] float32."""
    if y.dim() not in (1, 2) or 0 in y.shape[1:]:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, expected (N,) or (N, K), K quantities per row.")
    return y.float() if y.dim() == 2 else y.float()[:, None]


def _labels(y: Tensor, name: str) -> Tensor:
    """Return labels as [N, K] float32 with NaN for unknown ones, or as [N] int64 with -1."""
    y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
    if y.dim() == 2:
        return y.float()
    if y.dim() != 1:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, expected (N,), or (N, K) for many labels per node.")
    if not y.is_floating_point():
        return y.long()
    y = y.double()
    wrong = y[(y != y.round()) & ~y.isnan() | (y.abs() >= 2**53)]
    if wrong.numel():
        raise ValueError(
            f"{name}: y holds {float(wrong[0])}..., expected whole numbers: classes. For quantities choose "
            "task=node_regression, edge_regression or graph_regression."
        )
    return y.masked_fill(y.isnan(), -1).long()
