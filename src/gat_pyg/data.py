"""A data set's name turned into graphs that are ready to train on, prepared as the paper prepares them."""

from __future__ import annotations

import copy
import csv
import errno
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, download_url, extract_zip
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import PPI, Planetoid
from torch_geometric.io import fs
from torch_geometric.loader import DataLoader
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

from .preparation import NORMALIZE, UNDIRECTED, Preparation, Standardize, build_transform, row_ranges

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)
KEYS = ("x", "edge_index", "edge_attr", "y", *MASKS)
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")  # of each Planetoid set
PPI_SPLITS = ("train", "valid", "test")  # as its files name them
PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}  # name -> folder
CLASSES = {  # in the order of the files, where only the sizes of the classes tell them apart
    "cora": (
        "Theory",
        "Reinforcement Learning",
        "Genetic Algorithms",
        "Neural Networks",
        "Probabilistic Methods",
        "Case Based",
        "Rule Learning",
    ),
    "citeseer": ("AI", "ML", "IR", "DB", "Agents", "HCI"),
    "pubmed": ("Diabetes Mellitus, Experimental", "Diabetes Mellitus Type 1", "Diabetes Mellitus Type 2"),
}
OGBN = {"ogbn-arxiv": True, "ogbn-products": False, "ogbn-papers100M": True}  # name -> whether its edges are citations


# The task: what every source of data ends in ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be learnt: graphs for training, validation and test, checked once and for all.

    A transductive task is one graph with ``train_mask``, ``val_mask`` and ``test_mask`` [N] bool, which ``train``,
    ``val`` and ``test`` each hold. An inductive one has whole graphs in each.

    Every graph has ``x`` [N, F] float, ``edge_index`` [2, E] (src, dst) and, where ``edge_dim`` is a number,
    ``edge_attr`` [E, edge_dim] float. With one label per node ``y`` is [N] int64 in 0..K-1, -1 where it is unknown, and
    no mask holds such a node. With ``multilabel`` it is [N, K] float32 of 0 and 1, NaN where it is unknown.

    Raises ValueError, which says what came, what was expected and what to do, when a graph is not of that form. The
    checks read each tensor once, here and nowhere else.

    >>> task = digits()
    >>> task.num_features, task.num_classes, task.transductive
    (64, 10, True)
    """

    name: str
    train: list[Data] = field(repr=False)
    val: list[Data] = field(repr=False)
    test: list[Data] = field(repr=False)
    num_features: int  # F
    num_classes: int  # K; the number of labels when multilabel
    multilabel: bool = False
    edge_dim: int | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)  # of the K classes, where they are known
    transforms: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # as in Preparation

    @cached_property
    def preparation(self) -> Preparation:
        """The dimensions, class names, transforms and range of the features, which a run stores beside its model.

        >>> digits().preparation.class_names[:3]
        ('0', '1', '2')
        """
        return Preparation(
            self.num_features,
            self.edge_dim,
            "micro_f1" if self.multilabel else "accuracy",
            self.multilabel,
            self.class_names,
            self.transforms,
            *row_ranges([data.x for data in self.train]),
        )

    @property
    def transductive(self) -> bool:
        """Whether the three splits are masks of one graph rather than graphs of their own."""
        first = (self.train[:1] + self.val[:1] + self.test[:1])[0]
        return all(len(graphs) == 1 and graphs[0] is first for graphs in (self.train, self.val, self.test))

    def graphs(self, split: Split) -> list[Data]:
        """The graphs of ``"train"``, ``"val"`` or ``"test"``."""
        return cast(list[Data], getattr(self, split))

    def loader(self, split: Split, batch_size: int = 1) -> DataLoader | list[Data]:
        """Batches of ``split`` for one epoch: the one graph itself, or ``batch_size`` graphs at a time.

        Training graphs are shuffled by torch's global generator. A list is a loader too, so that a transductive epoch
        costs no collation.

        >>> digits().loader("train")
        [Data(x=[1797, 64], edge_index=[2, 12618], y=[1797], ...)]
        """
        if self.transductive:
            return self.graphs(split)
        return DataLoader(self.graphs(split), batch_size=batch_size, shuffle=split == "train")

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"{self.name}{_NOTHING_KNOWN}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{self.name}: class_names has {len(self.class_names)} names, expected one for each of the "
                f"{self.num_classes} classes."
            )
        for split in SPLITS:
            if not self.graphs(split):
                raise ValueError(f"{self.name}: there is no graph in {split}, expected at least one.")
        if self.transductive:
            _check_graph(self, self.train[0], self.name)
            _check_masks(self, self.train[0])
            return
        for split in SPLITS:
            known = False
            for number, data in enumerate(self.graphs(split)):
                _check_graph(self, data, f"{self.name}, {split} graph {number}")
                known = known or bool(any_known(data.y).any())
            if not known:
                raise ValueError(f"{self.name}: all labels of the {split} graphs are unknown, expected at least one.")


_NOTHING_KNOWN = ": no node has a known label, so there is nothing to learn."


class _Form(NamedTuple):
    """What the graphs of a task have in common, before there is the task."""

    num_features: int
    num_classes: int
    multilabel: bool
    edge_dim: int | None


def _check_graph(task: Task | _Form, data: Data, where: str) -> None:
    """Raise ValueError unless x, edge_index, edge_attr and y are what ``Task`` promises."""
    _check_present(data, where)
    x, edge_index, edge_attr, y = data.x, data.edge_index, data.edge_attr, data.y
    _check_shapes(task, x, edge_index, edge_attr, y, where)  # of all keys, before any values: those may be many
    _check_x(x, where)
    _check_edge_index(edge_index, x.size(0), where)
    if edge_attr is not None and not edge_attr.isfinite().all():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")
    _check_y(task, y, where)


_NOT_FINITE = "is not of finite floats. Use edge_attr.float(), replace NaN and infinity."


def _check_present(data: Data, where: str) -> None:
    """Raise ValueError unless x, edge_index and y are there, and all keys are dense tensors of real numbers."""
    for key in KEYS:
        value, hint = data.get(key), _HINTS.get(key)
        if not isinstance(value, Tensor):
            if hint is not None:
                raise ValueError(f"{where}: {key} is missing. {hint}")
            if key == "edge_attr" and value is not None:
                raise ValueError(f"{where}: edge_attr is a {type(value).__name__}, expected a tensor (E,) or (E, D).")
            continue
        if value.layout != torch.strided:
            dense = hint if key == "edge_index" else f"Use {key}.to_dense()."
            raise ValueError(f"{where}: {key} is {value.layout}, expected a dense tensor. {dense}")
        kinds = {
            "complex": value.is_complex(),
            "quantized": value.is_quantized,
            "nested": value.is_nested,
            "on the meta device": value.is_meta,
        }
        for kind, found in kinds.items():
            if found:
                raise ValueError(f"{where}: {key} is {kind}, expected a tensor of real numbers.")


_HINTS = {
    "x": "Give the nodes features [N, F], for instance by torch_geometric.transforms.OneHotDegree or Constant.",
    "edge_index": "Give the edges as [2, E], src above dst; leave out transforms such as ToSparseTensor.",
    "y": "Give every node a label, -1 or NaN where it is unknown.",
}


CHECKED = 2**24  # numbers at a time


def _check_shapes(
    task: Task | _Form, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, y: Tensor, where: str
) -> None:
    """Raise ValueError where a shape or a dtype is not what `Task` promises; no element is read."""
    if x.dim() != 2:
        hint = " Of one feature a node, give x[:, None]." if x.dim() == 1 else ""
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, F), a row for each node.{hint}")
    if x.size(1) != task.num_features:
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (N, {task.num_features}).")
    if not x.is_floating_point():
        raise ValueError(f"{where}: x is {x.dtype}, expected floats. Use x.float().")
    _check_edge_index_shape(edge_index, where)
    if (edge_attr is None) != (task.edge_dim is None):
        raise ValueError(f"{where}: some graphs have edge_attr and others have none. Give it to all or to none.")
    E = edge_index.size(1)
    if edge_attr is not None and tuple(edge_attr.shape) != (E, task.edge_dim):
        raise ValueError(
            f"{where}: edge_attr has shape {tuple(edge_attr.shape)}, expected ({E}, {task.edge_dim}), a row for each "
            "edge. If loops or doubled edges were removed, remove their rows too."
        )
    if edge_attr is not None and not edge_attr.is_floating_point():
        raise ValueError(f"{where}: edge_attr {_NOT_FINITE}")
    N, K, multilabel = x.size(0), task.num_classes, task.multilabel
    shape, dtype = ((N, K), torch.float32) if multilabel else ((N,), torch.int64)
    if tuple(y.shape) != shape or y.dtype != dtype:
        raise ValueError(
            f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected {dtype} of shape {shape}: "
            + ("a 0, 1 or NaN for each node and label." if multilabel else "one label per node.")
        )


def _check_x(x: Tensor, where: str) -> None:
    rows = max(1, CHECKED // max(1, x.size(1)))
    for start, part in zip(range(0, x.size(0), rows), x.split(rows), strict=True):  # of what may not fit into memory
        if part.isfinite().all():
            continue
        row = start + int((~part.isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"{where}: x is NaN or infinite at node {row} as {x.dtype}. Replace such values, for instance by 0."
        )


def _check_edge_index_shape(edge_index: Tensor, where: str) -> None:
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"{where}: edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: edge_index is {edge_index.dtype}, expected int64. Did you mean edge_index.long()?")


def _check_edge_index(edge_index: Tensor, N: int, where: str) -> None:
    if edge_index.numel() == 0:
        return
    low, high = (int(bound) for bound in edge_index.aminmax())
    if low < 0:
        raise ValueError(f"{where}: edge_index holds {low}, expected nodes from 0 to {N - 1}. Leave out padded edges.")
    if high >= N:
        hint = "Number the nodes from 0, or give x a row for each node."
        raise ValueError(f"{where}: edge_index holds {high}, but x has {N} rows (nodes 0 to {N - 1}). {hint}")


def _check_y(task: Task | _Form, y: Tensor, where: str) -> None:
    K, multilabel, N = task.num_classes, task.multilabel, y.size(0)
    if multilabel and not ((y == 0) | (y == 1) | y.isnan()).all():
        raise ValueError(f"{where}: y holds other values than 0, 1 and NaN (unknown). Turn the labels into 0 and 1.")
    if not multilabel and N and (int(y.min()) < -1 or int(y.max()) >= K):
        bad = int(y.min()) if int(y.min()) < -1 else int(y.max())
        raise ValueError(f"{where}: y holds the label {bad}, expected 0 to {K - 1}, or -1 where it is unknown.")


def _check_masks(task: Task, data: Data) -> None:
    """Raise ValueError unless the three masks are disjoint, not empty and hold known labels only."""
    N, known = data.x.size(0), any_known(data.y)
    for key in MASKS:
        mask = data.get(key)
        if mask is None:
            raise ValueError(f"{task.name}: {key} is missing. Give it, or have it drawn: from_dataset(data, val=500).")
        if mask.dtype != torch.bool or tuple(mask.shape) != (N,):
            raise ValueError(f"{task.name}: {key} is {mask.dtype} {tuple(mask.shape)}, expected torch.bool ({N},).")
        if not mask.any():
            raise ValueError(f"{task.name}: {key} is empty, expected at least one node with a known label.")
        if (mask & ~known).any():
            raise ValueError(f"{task.name}: {key} holds nodes with unknown labels. Use {key} & (y >= 0).")
    for first, second in (MASKS[:2], MASKS[1:], MASKS[::2]):
        common = int((data[first] & data[second]).sum())
        if common:
            raise ValueError(f"{task.name}: {first} and {second} overlap in {common} nodes, expected none in common.")


def near(data: Data, nodes: Tensor, num_hops: int) -> Data:
    """The part of a graph that some nodes see from so many hops: what `NeighborLoader` gives with all neighbours.

    The nodes come first, then those of hop 1, 2, ..., each in their order, and the edges into each hop in the same way.
    Their numbers are in ``num_sampled_nodes`` and ``num_sampled_edges``, where they were in ``n_id`` and ``e_id``; the
    features are copied.

    >>> path = Data(x=torch.arange(5.0).view(-1, 1), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    >>> part = near(path, torch.tensor([3]), num_hops=2)
    >>> part.n_id.tolist(), part.edge_index.tolist(), part.num_sampled_nodes, part.num_sampled_edges
    ([3, 2, 1], [[1, 2], [0, 1]], [1, 1, 1], [1, 1])
    """
    src, dst = data.edge_index
    hop = torch.full((data.num_nodes or 0,), num_hops + 1, device=dst.device)
    hop[nodes] = 0
    for k in range(num_hops):
        seen = src[hop[dst] <= k]
        hop[seen] = hop[seen].clamp(max=k + 1)
    n_id, e_id = _by_hop(hop, num_hops), _by_hop(hop[dst], num_hops - 1)
    place = torch.empty_like(hop)
    place[n_id] = torch.arange(n_id.numel(), device=hop.device)
    part = copy.copy(data)
    for key, value in data:
        if key == "edge_index":
            part[key] = place[value[:, e_id]]
        elif isinstance(value, Tensor) and data.is_node_attr(key):
            part[key] = _rows(value, n_id)
        elif isinstance(value, Tensor) and data.is_edge_attr(key):
            part[key] = value[e_id]
    if "num_nodes" in data:
        part.num_nodes = n_id.numel()
    part.n_id, part.e_id = n_id, e_id
    part.num_sampled_nodes = hop[n_id].bincount(minlength=num_hops + 1).tolist()
    part.num_sampled_edges = hop[dst[e_id]].bincount(minlength=num_hops).tolist()
    return part


def _rows(value: Tensor, index: Tensor) -> Tensor:
    if value.layout == torch.sparse_csr:
        value = value.to_sparse_coo().index_select(0, index).coalesce()
        return value.to_sparse_csr()
    return value.index_select(0, index)


def _by_hop(hop: Tensor, last: int) -> Tensor:
    """Which are of some hop, those of hop 0 first."""
    hop, order = hop.sort(stable=True)
    return order[: int((hop <= last).sum())]


def any_known(y: Tensor) -> Tensor:
    """Which nodes have a label, or at least one: [N] bool."""
    return ~y.isnan().all(1) if y.dim() == 2 else y >= 0


# Splits -------------------------------------------------------------------------------------------------------------


def _draw_masks(data: Data, K: int, per_class: int, val: int, test: int, seed: int, name: str) -> None:
    """Give ``data`` the masks it lacks, drawn among the labelled nodes that no mask of its own holds."""
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    free = any_known(data.y)
    for key in MASKS:
        if key in data:
            free &= ~data[key]
    for key, size in zip(MASKS, (per_class * K, val, test), strict=True):
        if key in data:
            continue
        order = order[free[order]]
        if key == "train_mask" and data.y.dim() == 1:
            labels = [order[data.y[order] == label][:per_class] for label in range(K)]
            few = [f"{label} ({len(nodes)})" for label, nodes in enumerate(labels) if len(nodes) != per_class]
            if few:
                raise ValueError(
                    f"{name}: per_class={per_class} asks for more labelled nodes than there are in class "
                    f"{', '.join(few[:5])}. Choose a smaller per_class (split.per_class in the command), or give "
                    "train_mask."
                )
            chosen = torch.cat(labels)
        else:
            chosen = order[:size]
            if len(chosen) != size:
                raise ValueError(
                    f"{name}: {key} asks for {size} nodes, but only {len(chosen)} labelled ones are left. "
                    f"Choose smaller per_class, val and test (split.* in the command), or give {key}."
                )
        data[key] = torch.zeros_like(free)
        data[key][chosen] = True
        free[chosen] = False


# Digits: embedded ---------------------------------------------------------------------------------------------------


def digits(k: int = 5) -> Task:
    """The default data set: 1797 images of handwritten digits, each linked with its ``k`` nearest neighbours.

    ``x`` [1797, 64] are the 8 x 8 pixels in 0..1. Two images are linked when either is among the other's ``k`` nearest
    by Euclidean distance, the lower number first where distances tie, so that the graph is the same on every machine.
    20 nodes per class are for training, 500 for validation and 1000 for test. A GAT classifies about 97 % of the test
    nodes, an MLP about 91 %.

    Needs no network: the pixels are part of the package (45 KB). They are those of scikit-learn's ``load_digits``, the
    test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998; CC BY 4.0).
    Costs a transient [N, N] matrix of int64 (26 MB).

    >>> digits().train[0].test_mask.sum()
    tensor(1000)
    """
    with resources.files("gat_pyg").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        pixels, y = torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"]).long()
    data = Data(x=pixels / 16.0, edge_index=_nearest(pixels.double(), k), y=y)
    _draw_masks(data, K=10, per_class=20, val=500, test=1000, seed=0, name="digits")
    names = tuple(str(digit) for digit in range(10))
    return Task("digits", [data], [data], [data], num_features=64, num_classes=10, class_names=names)


def _nearest(x: Tensor, k: int) -> Tensor:
    """The undirected k-nearest-neighbour graph of points with whole coordinates; ties go to the lower number."""
    N, square = x.size(0), x.square().sum(1)
    distance = square + square[:, None] - 2 * x @ x.t()  # [N, N], exact in float64
    rank = distance.round().long() * N + torch.arange(N)  # distance first, then number
    rank.fill_diagonal_(torch.iinfo(torch.int64).max)
    src = rank.topk(k, largest=False).values.remainder(N)  # [N, k]
    dst = torch.arange(N)[:, None].expand_as(src)
    return cast(Tensor, to_undirected(torch.stack([src.flatten(), dst.flatten()]), num_nodes=N))


# Planted: generated -------------------------------------------------------------------------------------------------


def planted(graphs: int = 20, nodes: int = 100, labels: int = 16, degree: int = 4, seed: int = 0) -> Task:
    """Graphs in which each node's labels are planted at one node nearby, told from the others by its salience.

    ``x`` [N, 1 + K] is a node's salience, drawn from the exponential distribution, and ``labels`` bits of its own; its
    labels ``y`` [N, K] are the bits of the most salient node within two steps, itself included. A mean over neighbours
    blurs those bits (how frequent each bit is differs from graph to graph, and that is what a mean still tells);
    attention finds them, since the score a_src . W h_j of equation (3) may grow with the salience of j. So with two
    layers GAT > Const-GAT > MLP in micro-F1, by at least 0.3 and 0.1, within 30 epochs: seconds on one core.

    Edges are undirected, drawn at random, ``degree`` to a node on average. ``graphs`` graphs are for training, a
    quarter as many for validation and for testing each (at least one). Everything is determined by ``seed``.

    Raises ValueError when a number is too small.

    >>> planted().train[0]
    Data(x=[100, 17], edge_index=[2, ...], y=[100, 16])
    """
    if min(graphs, nodes, labels) < 1 or degree < 0:
        raise ValueError(f"planted: {graphs=}, {nodes=}, {labels=}, {degree=}: expected at least 1, and a degree >= 0.")
    generator = torch.Generator().manual_seed(seed)
    held = max(1, graphs // 4)
    drawn = [_plant(nodes, labels, degree, generator) for _ in range(graphs + 2 * held)]
    train, val, test = drawn[:graphs], drawn[graphs:-held], drawn[-held:]
    return Task("planted", train, val, test, num_features=1 + labels, num_classes=labels, multilabel=True)


def _plant(N: int, K: int, degree: int, generator: torch.Generator) -> Data:
    pairs, _ = remove_self_loops(torch.randint(N, (2, N * degree // 2), generator=generator))
    edge_index = to_undirected(pairs, num_nodes=N)
    salience = -torch.log1p(-torch.rand(N, generator=generator))
    frequency = 0.7 * torch.rand(K, generator=generator)  # of each bit in this graph
    bits = (torch.rand(N, K, generator=generator) < frequency).float()
    by_salience = salience.argsort(stable=True)
    highest = by_salience.argsort()  # the rank of the most salient node seen so far: itself
    for _ in range(2):
        highest = highest.scatter_reduce(0, edge_index[1], highest[edge_index[0]], "amax")
    return Data(torch.cat([salience[:, None], bits], 1), edge_index, y=bits[by_salience[highest]])


# Raw files: where they are, how they come ---------------------------------------------------------------------------


def data_root(root: str | Path | None = None) -> Path:
    """The folder of raw files: ``root``, else ``$GAT_PYG_DATA``, else ``~/.cache/gat_pyg``.

    >>> data_root("somewhere").name
    'somewhere'
    """
    return Path(root or os.environ.get("GAT_PYG_DATA") or "~/.cache/gat_pyg").expanduser()


def _raw_folder(folder: Path, files: Sequence[str], fetch: Callable[[str, Sequence[str]], None], title: str) -> Path:
    """``folder`` itself, after those of ``files`` that are not there were fetched whole into it.

    ``fetch`` fills a folder of its own beside ``folder``; from there each file is moved in one step, so that a download
    which breaks off leaves nothing under a final name.
    """
    missing = [file for file in files if not (folder / file).exists()]
    if not missing:
        return folder
    absent = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as fresh:
            fetch(fresh, missing)
            for file in missing:
                try:
                    os.replace(Path(fresh) / file, folder / file)
                except OSError:  # a folder that another process has put there meanwhile
                    if not (folder / file).exists():
                        raise
    except Exception as error:  # whatever the network, the disk or the archive may raise
        with suppress(OSError):  # one that is not empty stays
            for parent in absent:
                parent.rmdir()
        raise FileNotFoundError(
            f"{title}: {', '.join(missing)} not found in {folder}, and not downloaded: {_cause(error)}. "
            f"Put the raw files in {folder}, or point data_root or $GAT_PYG_DATA at a folder that has them, "
            "or use dataset=digits, which needs no network."
        ) from error
    return folder


def _cause(error: Exception) -> str:
    """Return the reason for a failed download, without the wrapping of urllib or aiohttp."""
    inner = getattr(error, "reason", None)
    inner = inner if isinstance(inner, OSError) else error
    if isinstance(inner, OSError) and inner.strerror and inner.filename is None:
        return inner.strerror
    return str(inner) or type(inner).__name__


class _UnreadableError(ValueError):
    """A file's error, with the file's name in its message."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a broken file makes a reader raise into a ValueError that names the file."""
    try:
        yield
    except _UnreadableError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
            raise  # it is the system that refuses, and the message has the file's name
        raise _UnreadableError(
            f"{path} cannot be read: {type(error).__name__}: {error}. It is truncated or of another kind. "
            "Delete it to have it downloaded again, or put a whole copy in its place."
        ) from error


# Planetoid: Cora, Citeseer, Pubmed ----------------------------------------------------------------------------------


def planetoid(name: str, root: str | Path | None = None) -> Task:
    """A citation network (Section 3.1) with the split of Yang et al. (2016): 20 per class / 500 / 1000.

    ``name`` is ``"cora"``, ``"citeseer"`` or ``"pubmed"``. The result is that of PyG's
    ``Planetoid(root, name, split="public", transform=NormalizeFeatures())``: bag-of-words rows that sum to one, doubled
    links and loops dropped, Citeseer's 15 test nodes without features as rows of zeros that no mask holds.

    Reads ``<root>/Planetoid/<Cora|CiteSeer|PubMed>/raw/ind.*`` (see ``data_root``) and downloads what is missing there,
    from where PyG does. The files are pickles; nothing they name is ever called. Nothing else is written.

    Raises ValueError for an unknown name or a broken or hostile file, FileNotFoundError when there is no network.

    >>> planetoid("karate")
    Traceback (most recent call last):
    ValueError: 'karate' is not a Planetoid data set: expected cora, citeseer or pubmed.
    """
    if name.lower() not in PLANETOID:
        raise ValueError(f"{name!r} is not a Planetoid data set: expected cora, citeseer or pubmed.")
    name = name.lower()
    folder = _planetoid_folder(name, root)
    with _reading(folder):
        data = build_transform(NORMALIZE)(_read_planetoid(folder, name))
        F, K = data.x.size(1), int(data.y.max()) + 1
        names = _first_names(CLASSES[name], K)
        return Task(name, [data], [data], [data], F, K, class_names=names, transforms=(NORMALIZE,))


def _planetoid_folder(name: str, root: str | Path | None) -> Path:
    files = [f"ind.{name}.{part}" for part in PARTS]

    def fetch(folder: str, missing: Sequence[str]) -> None:
        for file in missing:
            fs.cp(f"{Planetoid.url}/{file}", folder)

    return _raw_folder(data_root(root) / "Planetoid" / PLANETOID[name] / "raw", files, fetch, PLANETOID[name])


def _read_planetoid(folder: Path, name: str) -> Data:
    raw: dict[str, Any] = {}
    for part in PARTS:
        path = folder / f"ind.{name}.{part}"
        with _reading(path):
            raw[part] = (
                _unpickle(path) if part != "test.index" else torch.tensor([int(i) for i in path.read_text().split()])
            )
    return _assemble(raw)


def _assemble(raw: Mapping[str, Any]) -> Data:
    """One graph from Planetoid's eight parts: allx and ally come first, tx and ty belong at the nodes of test.index."""
    test, first = raw["test.index"], raw["allx"].size(0)
    if len(test) != raw["tx"].size(0) or len(test.unique()) != len(test) or int(test.min()) != first:
        raise ValueError(
            f"test.index has {len(test)} nodes from {int(test.min())}, tx {raw['tx'].size(0)} from {first}"
        )
    N, rows = int(test.max()) + 1, first + len(test)
    if 2 * rows < N:  # Citeseer's test nodes have gaps between them, 15 in all
        raise ValueError(f"test.index holds {N - 1}, but allx and tx have {rows} rows together")
    links = _links(raw["graph"])
    _check_edge_index(links, N, "graph")  # before coalesce, whose keys take ids from 0 to N - 1 for granted
    x = torch.zeros(N, raw["allx"].size(1))
    y = torch.zeros(N, raw["ally"].size(1))
    x[:first], y[:first] = raw["allx"], raw["ally"]
    x[test], y[test] = raw["tx"], raw["ty"]

    edge_index, _ = remove_self_loops(links)
    data = Data(x, coalesce(edge_index, num_nodes=N, sort_by_row=False), y=y.argmax(1))
    train = raw["y"].size(0)
    for key, nodes in zip(MASKS, (torch.arange(train), torch.arange(train, train + 500), test), strict=True):
        data[key] = torch.zeros(N, dtype=torch.bool).index_fill_(0, nodes, True)
    return data


def _links(graph: Mapping[int, Sequence[int]]) -> Tensor:
    src = [node for node, neighbours in graph.items() for _ in neighbours]
    return _pairs(src, [node for neighbours in graph.values() for node in neighbours])


def _pairs(src: list[int], dst: list[int]) -> Tensor:
    """Return links [2, L] int64, of which there may be none; ids that are not whole numbers are refused."""
    links = torch.tensor([src, dst]) if src or dst else torch.empty(2, 0, dtype=torch.long)
    _check_edge_index_shape(links, "graph")
    return links


class _Made:
    """What a pickle asks to be made. Its arguments and its state are kept; nothing is called with them."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Made):
    def read(self) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, content = self.state
        code, order = dtype.args[0], dtype.state[1]
        if code not in _NUMBERS or order not in ("<", ">", "|"):
            raise pickle.UnpicklingError(f"it holds an array of {order}{code}, which no Planetoid file holds")
        content = content.encode("latin1") if isinstance(content, str) else content
        array: np.ndarray[Any, Any] = np.frombuffer(content, order + code).reshape(shape, order="F" if fortran else "C")
        return array.astype(np.float32 if code[0] == "f" else np.int64)


class _Csr(_Made):
    def read(self) -> Tensor:
        shape = tuple(self.state.get("_shape") or self.state["shape"])
        start, col, value = (torch.from_numpy(self.state[key].read()) for key in ("indptr", "indices", "data"))
        if len(start) != shape[0] + 1 or int(start[-1]) != len(col) or (start.diff() < 0).any():
            raise pickle.UnpicklingError(f"its indptr does not fit {shape[0]} rows with {len(col)} entries")
        if shape[0] * shape[1] > LARGEST:
            raise pickle.UnpicklingError(f"it claims the shape {shape}, larger than a matrix of any Planetoid file")
        row = torch.arange(shape[0]).repeat_interleave(start.diff())
        return torch.sparse_coo_tensor(torch.stack([row, col]), value.float(), shape, check_invariants=True).to_dense()


class _Dtype(_Made): ...


class _Graph(_Made, dict): ...  # type: ignore[type-arg]


LARGEST = 2**27  # elements of a matrix; Citeseer's allx has 2312 * 3703
_NUMBERS = {"b1", *(kind + size for kind in "iu" for size in "1248"), "f4", "f8"}
_PARTS_MADE: dict[str, type[_Made]] = {  # the names in Planetoid's files, and in those numpy and scipy write today
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Made,
    "numpy.dtype": _Dtype,
    "scipy.sparse.csr.csr_matrix": _Csr,
    "scipy.sparse._csr.csr_matrix": _Csr,
    "collections.defaultdict": _Graph,
    "__builtin__.list": _Made,
    "builtins.list": _Made,
}


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes 2^35 bytes for a memo's index of 2^32
    def find_class(self, module: str, name: str) -> type[_Made]:
        if f"{module}.{name}" not in _PARTS_MADE:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no Planetoid file holds; nothing was run")
        return _PARTS_MADE[f"{module}.{name}"]


def _unpickle(path: Path) -> Tensor | dict[int, list[int]]:
    """The matrix [rows, columns] float32 or the graph in one of Planetoid's pickles."""
    with path.open("rb") as file:
        made = _Unpickler(file, encoding="latin1").load()
    if isinstance(made, _Csr):
        return made.read()
    if isinstance(made, _Array):
        return torch.from_numpy(made.read()).float()
    if isinstance(made, dict):
        if (links := sum(map(len, made.values()))) > path.stat().st_size:  # one list may stand for many
            raise pickle.UnpicklingError(f"it claims {links} links, more than it has bytes")
        return made
    raise pickle.UnpicklingError(f"it holds a {type(made).__name__}, expected a matrix or a graph")


# PPI ----------------------------------------------------------------------------------------------------------------


def ppi(root: str | Path | None = None) -> Task:
    """The protein-protein interaction graphs (Section 3.1): 20 for training, 2 for validation, 2 for testing.

    ``x`` [N, 50] is standardised on the training nodes, as scikit-learn's ``StandardScaler`` does and the paper's code
    did; the published features already are, so that this changes them by rounding only. ``y`` is [N, 121] float32 with
    NaN where a label is unknown. Loops and doubled links are dropped: 1226368, 198920 and 161976 directed edges, sorted
    by dst, remain.

    Reads ``<root>/PPI/raw/{train,valid,test}_{feats.npy,labels.npy,graph_id.npy,graph.json}`` (see ``data_root``) and
    downloads what is missing there, from where PyG does. Nothing else is written, and no pickle is read.

    Raises ValueError for a broken file, FileNotFoundError when there is no network. Takes 2 to 6 seconds and 0.6 GB.

    >>> task = ppi()  # doctest: +SKIP
    >>> len(task.train), task.num_classes  # doctest: +SKIP
    (20, 121)
    """
    folder = _ppi_folder(root)
    with _reading(folder):
        features = {split: _npy(folder / f"{split}_feats.npy").double() for split in PPI_SPLITS}
        standardize = Standardize(*_standard(features["train"]))
        scaled = {split: standardize(Data(x=x)).x for split, x in features.items()}
        train, val, test = (list(_read_ppi(folder, split, scaled[split])) for split in PPI_SPLITS)
        F, K = train[0].x.size(1), train[0].y.size(1)
        return Task("ppi", train, val, test, F, K, multilabel=True, transforms=(standardize.describe(),))


def _ppi_folder(root: str | Path | None) -> Path:
    parts = ("feats.npy", "graph_id.npy", "graph.json", "labels.npy")

    def fetch(folder: str, missing: Sequence[str]) -> None:
        extract_zip(download_url(PPI.url, folder), folder)

    files = [f"{split}_{part}" for split in PPI_SPLITS for part in parts]
    return _raw_folder(data_root(root) / "PPI" / "raw", files, fetch, "PPI")


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column [F]; a constant column has deviation 1."""
    mean, variance = x.mean(0), x.var(0, correction=0)
    noise = x.size(0) * torch.finfo(x.dtype).eps
    constant = variance <= noise * variance + (noise * mean) ** 2  # what rounding may leave of zero
    return mean, variance.sqrt().masked_fill(constant, 1.0)


def _read_ppi(folder: Path, split: str, x: Tensor) -> Iterator[Data]:
    """The graphs of one split, cut from its one file along graph_id; each keeps its own nodes' order."""
    y, graph = _npy(folder / f"{split}_labels.npy").float(), _npy(folder / f"{split}_graph_id.npy")
    edge_index = _ppi_links(folder / f"{split}_graph.json")
    if not len(x) == len(y) == len(graph) or graph.dim() != 1 or (graph[1:] < graph[:-1]).any():
        raise ValueError(f"{split}: {len(x)} features, {len(y)} labels, {len(graph)} graph ids, or ids not in order")
    _check_edge_index(edge_index, len(x), f"{split}_graph.json")
    edge_index, _ = remove_self_loops(edge_index)
    edge_index = coalesce(edge_index, num_nodes=len(x), sort_by_row=False)
    edge_index = edge_index[:, graph[edge_index[0]] == graph[edge_index[1]]]
    sizes = torch.unique_consecutive(graph, return_counts=True)[1].tolist()
    last = torch.tensor(sizes).cumsum(0)  # one past the last node of each graph
    edges = torch.bincount(torch.bucketize(edge_index[1], last, right=True), minlength=len(sizes)).tolist()
    cut = (torch.split(x.float(), sizes), torch.split(y, sizes), torch.split(edge_index, edges, dim=1), last)
    for X, Y, own, end in zip(*cut, strict=True):
        yield Data(X.clone(), own - (end - len(X)), y=Y.clone())


def _ppi_links(path: Path) -> Tensor:
    with _reading(path), path.open() as file:
        stored = json.load(file)
        ends = [[link[end] for link in stored["links"]] for end in ("source", "target")]
        return _pairs(*(ends if stored.get("directed") else (ends[0] + ends[1], ends[1] + ends[0])))


def _npy(path: Path) -> Tensor:
    with _reading(path), path.open("rb") as file:
        return _numbers(np.lib.format.read_array(file, allow_pickle=False), path.stem)


def listed_links(name: str, root: str | Path | None = None) -> list[Tensor]:
    """The links [2, L] as the files of ``"cora"``, ``"citeseer"``, ``"pubmed"`` or ``"ppi"`` list them.

    In both directions, with loops, and with repeated ones as often as they come: what `planetoid` and `ppi` leave out.
    PPI's are of its three files, for training, validation and testing.
    """
    if name == "ppi":
        folder = _ppi_folder(root)
        return [_ppi_links(folder / f"{split}_graph.json") for split in PPI_SPLITS]
    path = _planetoid_folder(name, root) / f"ind.{name}.graph"
    with _reading(path):
        return [_links(cast(dict[int, list[int]], _unpickle(path)))]


# OGB: arxiv, products, papers100M -----------------------------------------------------------------------------------


def ogbn(name: str, root: str | Path | None = None) -> Task:
    """A graph of the Open Graph Benchmark (Hu et al., NeurIPS 2020) with its own split.

    ======================  ===========  ===  ===  =====================================
    ``name``                          N    F    K  nodes, edges
    ======================  ===========  ===  ===  =====================================
    ``"ogbn-arxiv"``            169,343  128   40  papers, cited or citing
    ``"ogbn-products"``       2,449,029  100   47  products, bought together
    ``"ogbn-papers100M"``   111,059,956  128  172  papers, cited or citing; few have a y
    ======================  ===========  ===  ===  =====================================

    Citations are made undirected, as OGB's own examples do before they train; products' edges are so already. A node
    without a label has y = -1.

    The first time it needs the extra ``ogb`` and reads ``<root>/ogbn_arxiv/{raw,split}`` (see ``data_root``) as the ogb
    package leaves them there, or downloads them by its code: 0.1, 1.4 or 57 GB, without asking, since nobody may be
    there to answer. What is needed of them is then in ``<root>/ogbn_arxiv/npy``, a folder as of ``from_file``, which is
    mapped into memory: x [N, F] is never copied, and processes on one machine share it.

    Cost: once, some 20 s for arxiv on one core, and more as the graphs grow. Papers100M's features go from the archive
    to the disk, of which 230 GB have to be free, but its edges take 80 GB of memory on their way.

    Raises ValueError for an unknown name or a broken file, FileNotFoundError when there is no network, ImportError when
    there is no ogb.

    >>> ogbn("ogbn-mag")
    Traceback (most recent call last):
    ValueError: 'ogbn-mag' is not here: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.
    """
    if name not in OGBN:
        raise ValueError(f"{name!r} is not here: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.")
    folder = data_root(root) / name.replace("-", "_")
    if not (folder / "npy").is_dir():
        with redirect_stdout(sys.stderr):  # where ogb tells what it does
            _write_ogbn(name, folder)
    transforms = (UNDIRECTED,) if OGBN[name] else ()
    with _reading(folder / "npy"):
        return from_dataset(_graph(_load_folder(folder / "npy"), folder / "npy"), name, transforms=transforms)


def _write_ogbn(name: str, folder: Path) -> None:
    """Turn raw files, which are downloaded where they are missing, into ``npy``: as a whole, or not at all."""
    try:
        from ogb.utils import url
    except ImportError as error:
        raise ImportError(f"{name} needs ogb. Run: python -m pip install 'gat_pyg[ogb]'.") from error
    told = _told_of_ogbn(name)

    def fetch(fresh: str, missing: Sequence[str]) -> None:
        url.extract_zip(url.download_url(told["url"], fresh), fresh)
        for part in missing:
            (Path(fresh) / told["download_name"] / part).rename(Path(fresh) / part)

    _raw_folder(folder, ["raw", "split", f"RELEASE_v{told['version']}.txt"], fetch, name)
    with tempfile.TemporaryDirectory(prefix=".npy-", dir=folder) as fresh:
        npy = Path(fresh) / "npy"
        npy.mkdir()
        try:
            with _reading(folder / "raw"):
                _convert_ogbn(name, told, folder, npy)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is missing. Delete {folder} to have all of it downloaded again."
            ) from error
        try:
            npy.rename(folder / "npy")
        except OSError:
            if not (folder / "npy").is_dir():  # of several processes another was first
                raise


def _convert_ogbn(name: str, told: Mapping[str, str], folder: Path, npy: Path) -> None:
    from ogb.io.read_graph_raw import read_csv_graph_raw

    raw, split = folder / "raw", folder / "split" / told["split"]
    if told["binary"] == "True":
        with ZipFile(raw / "data.npz") as arrays:  # features that may exceed the memory
            for key, stored in (("x", "node_feat.npy"), ("edge_index", "edge_index.npy")):
                with arrays.open(stored) as source, (npy / f"{key}.npy").open("wb") as target:
                    shutil.copyfileobj(source, target, 2**24)
        y = np.load(raw / "node-label.npz")["node_label"]
    else:
        (graph,) = read_csv_graph_raw(str(raw), add_inverse_edge=told["add_inverse_edge"] == "True")
        np.save(npy / "x.npy", graph["node_feat"], allow_pickle=False)  # None where its file is missing
        np.save(npy / "edge_index.npy", graph["edge_index"])
        y = np.loadtxt(raw / "node-label.csv.gz")
    np.save(npy / "y.npy", y)
    if OGBN[name]:
        np.save(npy / "edge_index.npy", _both_ways(np.load(npy / "edge_index.npy", mmap_mode="r"), len(y)))
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        mask = np.zeros(len(y), dtype=bool)
        mask[np.loadtxt(split / f"{part}.csv.gz", dtype=np.int64)] = True
        np.save(npy / f"{key}.npy", mask)


def _both_ways(edge_index: np.ndarray[Any, Any], N: int) -> np.ndarray[Any, Any]:
    """Each edge once in each direction, by src: PyG's ``to_undirected`` in a third of its memory."""
    src, dst = edge_index
    key = np.concatenate([src * N + dst, dst * N + src])
    key.sort()
    key = key[np.diff(key, prepend=-1) != 0]
    both = np.empty((2, len(key)), dtype=np.int64)
    np.divmod(key, N, out=(both[0], both[1]))
    return both


def _told_of_ogbn(name: str) -> dict[str, str]:
    """What ogb tells of a data set: where it is and how it is stored."""
    with resources.files("ogb").joinpath("nodeproppred").joinpath("master.csv").open() as file:
        return {row[""]: row[name] for row in csv.DictReader(file)}


# One's own graphs ---------------------------------------------------------------------------------------------------


def from_file(
    path: str | Path, per_class: int = 20, val: int = 500, test: int = 1000, seed: int = 0, split: int = 0
) -> Task:
    """A graph of one's own, from a ``.pt`` file (torch.save), a ``.npz`` file (numpy.savez) or a folder (numpy.save).

    ``.pt`` holds a PyG ``Data``, a list of them, or a dict of tensors; ``.npz`` holds arrays; a folder has a file for
    each, ``x.npy`` and so on. Those are mapped into memory and not read as a whole: with ``loader=neighbor`` a graph
    may have more features than memory, and processes on one machine share them. They must not be written to; x has to
    be float32, else it is converted in memory. Read are ``x`` [N, F],
    ``edge_index`` [2, E], ``y`` [N] or [N, K] and, where present, ``edge_attr`` [E] or [E, D] and ``train_mask``,
    ``val_mask``, ``test_mask`` [N]; other keys are left alone. The rest is as in ``from_dataset``.

    No code in the file is run: ``.pt`` is read with ``weights_only=True`` and PyG's ``Data`` allowed, ``.npz`` with
    ``allow_pickle=False``.

    Raises FileNotFoundError, and ValueError for a file that is truncated, would run code or lacks a key.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ring.npz"
    >>> np.savez(path, x=np.eye(6), y=[0, 1] * 3, edge_index=[[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> from_file(path, per_class=1, val=2, test=2)
    Task(name='ring', num_features=6, num_classes=2, multilabel=False, edge_dim=None)
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
            raise ValueError(f"{file} is no regular file, expected arrays or tensors.")  # of a pipe none may ever come
    try:
        found = _load_folder(path) if path.is_dir() else _load_pt(path) if path.suffix == ".pt" else _load_npz(path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise type(error)(f"{error.filename} cannot be read: {error.strerror}.") from error
        reason = _refused(error) if path.suffix == ".pt" else str(error).split("\n")[0]
        raise ValueError(
            f"{path} cannot be read: {reason} It is truncated, or holds more than tensors and would run code. "
            "Save a Data or a dict of tensors by torch.save, or arrays of numbers by numpy.savez."
        ) from error
    try:
        return from_dataset(_graphs(found, path), path.stem, per_class, val, test, seed, split)
    except ValueError as error:
        raise ValueError(f"{path}{str(error).removeprefix(path.stem)}") from error


def _graphs(found: Any, path: Path) -> Any:
    """Return the graphs of a file: one, a list, or three lists."""
    if isinstance(found, Mapping):
        return _graph(found, path)
    if not isinstance(found, (list, tuple)):
        return found
    several = len(found) == 3 and all(isinstance(part, (list, tuple)) for part in found)
    lists = [[_graph(each, path) for each in part] for part in (found if several else [found])]
    return lists if several else lists[0]


def _graph(found: Any, path: Path) -> Data:
    """Return a graph with the keys of `Task` that a mapping of arrays or tensors holds."""
    if not isinstance(found, Mapping):
        return cast(Data, found)  # which from_dataset refuses
    lacking = [key for key in ("x", "edge_index", "y") if found.get(key) is None]
    if lacking:
        keys = ", ".join(key for key in list(found)[:8] if isinstance(key, str))
        raise ValueError(
            f"{path.stem} has no {' and no '.join(lacking)}; its keys are {keys}. Expected x, edge_index and y."
        )
    return Data(**{key: _numbers(found[key], f"{path.stem}: {key}") for key in KEYS if found.get(key) is not None})


def _numbers(values: Any, where: str) -> Tensor:
    """Return an array or a tensor as a tensor, its numbers in an order and a width that torch computes with.

    Raises ValueError for what is neither, or a tensor with more elements than are stored: work that has no end.
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
        wanted = "real numbers" if isinstance(values, np.ndarray) else "a tensor"
        raise ValueError(f"{where} is of {kind}, expected {wanted}.{hint}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it to be
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
    # not numpy.load, which takes an archive that begins otherwise for a pickle, and says how to load that
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return {key: arrays[key] if key in KEYS else None for key in arrays.files}


def _load_folder(path: Path) -> dict[str, Any]:
    return {
        file.stem: np.lib.format.open_memmap(file, mode="r") if file.stem in KEYS else None
        for file in sorted(path.glob("*.npy"))
    }


def _load_pt(path: Path) -> Any:
    kinds = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    # only those that PyG does not list: torch removes from its list what it was given, whoever listed it before
    with torch.serialization.safe_globals(list(kinds.difference(torch.serialization.get_safe_globals()))):
        found = torch.load(path, map_location="cpu", weights_only=True)
    return _mappings(found)


def _mappings(found: Any, depth: int = 2) -> Any:
    """Return the mapping that each Data holds in its place, at most three lists deep."""
    if isinstance(found, Data):
        return found.to_dict()
    if isinstance(found, (list, tuple)) and depth:
        return [_mappings(part, depth - 1) for part in found]
    return found


def _refused(error: Exception) -> str:
    """The name torch.load refused, without its advice to trust the file."""
    name = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it asks for {name[1]}." if name else f"{type(error).__name__}."


def from_dataset(
    dataset: Any,
    name: str | None = None,
    per_class: int = 20,
    val: int = 500,
    test: int = 1000,
    seed: int = 0,
    split: int = 0,
    transforms: Sequence[Mapping[str, Any]] = (),
) -> Task:
    """Any PyG data set of node labels: one graph, several graphs, or three data sets.

    ``dataset`` is a ``Data``, a PyG ``Dataset``, a list of ``Data``, or three of them (a mapping of train, val, test,
    or three ``Dataset`` in a row). Where one graph has masks, they are kept; of masks [N, S] column ``split`` is taken.
    Masks that are missing are drawn with ``seed``: ``per_class`` nodes of each class for training, then ``val`` and
    ``test`` nodes, all labelled. (With many labels per node, ``per_class`` times K nodes are for training.) Of several
    graphs, ``val`` and ``test`` whole ones are drawn and the others are for training.

    ``x`` and ``edge_attr`` become float32, ``edge_attr`` [E] becomes [E, 1], ``y`` [N, 1] becomes [N]. ``y`` [N, K] is
    many labels per node. NaN is an unknown label; such nodes are taken out of the masks. Where ``dataset`` has an
    attribute ``class_names``, they become the task's. ``transforms`` describes those that were applied to ``dataset``,
    as ``Preparation`` has them; here they are not applied.

    Raises ValueError where ``Task`` does, and when there are too few labelled nodes or graphs for the split.

    >>> x, edge_index = torch.eye(4), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    >>> data = Data(x, edge_index, y=torch.tensor([0.0, 1.0, 0.0, float("nan")]))
    >>> from_dataset(data, "pairs", per_class=1, val=1, test=0)
    Traceback (most recent call last):
    ValueError: pairs: test_mask is empty, expected at least one node with a known label.
    """
    name = name or name_of(type(dataset).__name__, getattr(dataset, "name", None))
    parts = [[_tidy(data, split, name) for data in graphs] for graphs in _parts(dataset, name)]
    every = [data for graphs in parts for data in graphs]
    if not every:
        raise ValueError(f"{name} has no graph, expected at least one.")
    multilabel = every[0].y.dim() == 2
    K = every[0].y.size(1) if multilabel else max((int(data.y.max()) + 1 for data in every if len(data.y)), default=0)
    N = sum(len(data.y) for data in every)
    if K < 1 or not any(bool(any_known(data.y).any()) for data in every):
        raise ValueError(f"{name}{_NOTHING_KNOWN}")
    if not multilabel and N < K:
        raise ValueError(f"{name}: y holds the label {K - 1}, but there are {N} nodes. Number the classes from 0.")
    F, D = (
        tensor.size(-1) if tensor is not None and tensor.dim() else 1 for tensor in (every[0].x, every[0].edge_attr)
    )
    form = _Form(F, K, multilabel, D if every[0].edge_attr is not None else None)
    if len(parts) == 1 and len(every) == 1:
        _check_graph(form, every[0], name)  # before a split is drawn from what is wrong
        if (idx := getattr(dataset, "get_idx_split", None)) is not None:
            _ogb_masks(every[0], idx())
        _draw_masks(every[0], K, per_class, val, test, seed, name)
        parts = [every, every, every]
    elif len(parts) == 1:
        parts = _draw_graphs(every, val, test, seed, name)
    return Task(name, parts[0], parts[1], parts[2], *form, _class_names(dataset, K), tuple(transforms))


def _class_names(dataset: Any, K: int) -> tuple[str, ...] | None:
    """The names of the K classes, where the data set, or the first of several graphs or parts, has them."""
    first = dataset["train"] if isinstance(dataset, Mapping) and "train" in dataset else dataset
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return _first_names(getattr(first, "class_names", None), K)


def _first_names(names: Any, K: int) -> tuple[str, ...] | None:
    """The first K names; there are more where no node is of the last classes."""
    return tuple(map(str, names[:K])) if isinstance(names, (list, tuple)) and len(names) >= K else None


def name_of(kind: str, name: Any = None) -> str:
    """Return the name of a data set in results: its class and which of the class's data sets it is, in kebab case.

    >>> name_of("Amazon", "Photo"), name_of("KarateClub")
    ('amazon-photo', 'karateclub')
    """
    words = f"{kind} {name}" if isinstance(name, str) else kind
    return re.sub(r"[\W_]+", "-", words).strip("-").lower()


def _parts(dataset: Any, name: str) -> list[list[Any]]:
    """One list of graphs, or three where the data set comes split."""
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


def _tidy(data: Any, split: int, name: str) -> Data:
    """A graph of its own with the keys of ``Task`` only, in their types; the caller's graph stays as it was."""
    if not isinstance(data, Data):
        hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
        raise ValueError(f"{name} holds a {type(data).__name__}, expected torch_geometric.data.Data.{hint}")
    _check_present(data, name)
    tidy = Data(data.x.float(), data.edge_index, y=_labels(data.y, name))
    if data.edge_attr is not None:
        tidy.edge_attr = data.edge_attr.float()
        if tidy.edge_attr.dim() == 1:
            tidy.edge_attr = tidy.edge_attr[:, None]  # [E, 1]
    known = any_known(tidy.y)
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
                f"{len(known)} nodes. Are these node numbers? Use torch_geometric.utils.index_to_mask."
            )
        tidy[key] = mask.bool() & known
    return tidy


def _labels(y: Tensor, name: str) -> Tensor:
    """[N, K] float32 with NaN, or [N] int64 with -1, where a label is unknown."""
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
        raise ValueError(f"{name}: y holds {float(wrong[0])}..., expected whole numbers: classes, not quantities.")
    return y.masked_fill(y.isnan(), -1).long()


def _draw_graphs(graphs: list[Data], val: int, test: int, seed: int, name: str) -> list[list[Data]]:
    """Whole graphs for training, validation and test; those for training keep their order."""
    if val + test >= len(graphs) or min(val, test) < 1:
        raise ValueError(
            f"{name} has {len(graphs)} graphs, of which val={val} and test={test} are to be drawn and at least one be "
            "left for training. Choose val and test (split.* in the command) as numbers of graphs, or give three sets."
        )
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    held = [sorted(order[:val]), sorted(order[val : val + test])]
    return [[graphs[i] for i in part] for part in (sorted(order[val + test :]), *held)]


def _ogb_masks(data: Data, index: Mapping[str, Tensor]) -> None:
    """The split that comes with a data set of OGB, as masks."""
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        data[key] = torch.zeros(len(data.y), dtype=torch.bool).index_fill_(0, index[part], True) & any_known(data.y)
