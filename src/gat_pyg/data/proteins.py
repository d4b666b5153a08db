"""The protein-protein interaction graphs, PPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch_geometric.data import Data, download_url, extract_zip
from torch_geometric.datasets import PPI
from torch_geometric.utils import coalesce, remove_self_loops

from ..tasks.checks import _check_edge_index
from ..tasks.nodes import NodeMultiLabels
from ..tasks.preparation import Standardize
from ..tasks.task import Task
from .citation import _links, _pairs, _planetoid_folder
from .raw import _npy, _raw_folder, _reading, data_root
from .unpickle import _unpickle

PPI_SPLITS = ("train", "valid", "test")  # as its files name them

# PPI ----------------------------------------------------------------------------------------------------------------


def ppi(root: str | Path | None = None) -> Task:
    """The protein-protein interaction graphs (Section 3.1): 20 for training, 2 for validation, 2 for testing.

    `x` [N, 50] is standardised on the training nodes, as scikit-learn's `StandardScaler` does and the paper's code
    did; the published features already are, so that this changes them by rounding only. `y` is [N, 121] float32 with
    NaN where a label is unknown. Loops and doubled links are dropped: 1226368, 198920 and 161976 directed edges, sorted
    by dst, remain.

    Reads `<root>/PPI/raw/{train,valid,test}_{feats.npy,labels.npy,graph_id.npy,graph.json}` (see `data_root`) and
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
        return Task("ppi", train, val, test, F, NodeMultiLabels(K), transforms=(standardize.describe(),))


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


def listed_links(name: str, root: str | Path | None = None) -> list[Tensor]:
    """The links [2, L] as the files of `"cora"`, `"citeseer"`, `"pubmed"` or `"ppi"` list them.

    In both directions, with loops, and with repeated ones as often as they come: what `planetoid` and `ppi` leave out.
    PPI's are of its three files, for training, validation and testing.
    """
    if name == "ppi":
        folder = _ppi_folder(root)
        return [_ppi_links(folder / f"{split}_graph.json") for split in PPI_SPLITS]
    path = _planetoid_folder(name, root) / f"ind.{name}.graph"
    with _reading(path):
        return [_links(cast(dict[int, list[int]], _unpickle(path)))]
