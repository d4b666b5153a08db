"""The protein-protein interaction graphs, PPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, download_url, extract_zip
from torch_geometric.datasets import PPI
from torch_geometric.utils import coalesce, remove_self_loops

from ...tasks.checks import check_edge_index, check_edge_index_shape
from ...tasks.nodes import NodeMultiLabels
from ...tasks.preparation import Standardize
from ...tasks.scaling import scale
from ...tasks.task import Task
from ..arrays.batched_graphs import graphs_of
from .raw import data_root, raw_folder, read_npy, reading

PPI_SPLITS = ("train", "valid", "test")  # names in its files

# PPI ----------------------------------------------------------------------------------------------------------------


def ppi(root: str | Path | None = None) -> Task:
    """Load the protein-protein interaction graphs (Section 3.1): 20 for training, 2 for validation, 2 for test.

    `x` [N, 50] is standardised on the training nodes, as by scikit-learn's `StandardScaler` and in the paper's code.
    The published features are standardised already, so this changes them only by rounding. `y` is [N, 121] float32,
    NaN for unknown labels. Loops and repeated links are removed: there remain 1226368, 198920 and 161976 directed
    edges, sorted by dst.

    Reads `<root>/PPI/raw/{train,valid,test}_{feats.npy,labels.npy,graph_id.npy,graph.json}` (see `data_root`) and
    downloads missing files from PyG's source. Nothing else is written, and no pickle is read.

    Raises ValueError for a broken file, FileNotFoundError if a download fails. Takes 2 to 6 seconds and 0.6 GB.

    >>> task = ppi()  # doctest: +SKIP
    >>> len(task.train), task.num_classes  # doctest: +SKIP
    (20, 121)
    """
    folder = _ppi_folder(root)
    with reading(folder):
        features = {split: read_npy(folder / f"{split}_feats.npy").double() for split in PPI_SPLITS}
        mean, std = features["train"].mean(0), features["train"].std(0, correction=0)
        std = scale(std, mean)
        standardize = Standardize(mean, std.where(std > 0, 1.0))
        scaled = {split: standardize(Data(x=x)).x for split, x in features.items()}
        train, val, test = (_read_ppi(folder, split, scaled[split]) for split in PPI_SPLITS)
        F, K = train[0].x.size(1), train[0].y.size(1)
        return Task("ppi", train, val, test, F, NodeMultiLabels(K), transforms=(standardize.describe(),))


def _ppi_folder(root: str | Path | None) -> Path:
    parts = ("feats.npy", "graph_id.npy", "graph.json", "labels.npy")

    def fetch(folder: str, missing: Sequence[str]) -> None:
        extract_zip(download_url(PPI.url, folder), folder)

    files = [f"{split}_{part}" for split in PPI_SPLITS for part in parts]
    return raw_folder(data_root(root) / "PPI" / "raw", files, fetch, "PPI")


def _read_ppi(folder: Path, split: str, x: Tensor) -> list[Data]:
    """Return the graphs of one split, which are one union in its files."""
    y, graph = read_npy(folder / f"{split}_labels.npy").float(), read_npy(folder / f"{split}_graph_id.npy")
    edge_index = _ppi_links(folder / f"{split}_graph.json")
    if not len(x) == len(y) == len(graph) or graph.dim() != 1:
        raise ValueError(f"{split}: {len(x)} features, {len(y)} labels, graph ids of shape {tuple(graph.shape)}")
    check_edge_index(edge_index, len(x), f"{split}_graph.json")
    edge_index, _ = remove_self_loops(edge_index)
    edge_index = coalesce(edge_index, num_nodes=len(x), sort_by_row=False)
    edge_index = edge_index[:, graph[edge_index[0]] == graph[edge_index[1]]]
    return graphs_of(Data(x, edge_index, y=y, batch=graph - graph[0]), "node_classification", split)


def _ppi_links(path: Path) -> Tensor:
    with reading(path), path.open() as file:
        stored = json.load(file)
        ends = [[link[end] for link in stored["links"]] for end in ("source", "target")]
        src, dst = ends if stored.get("directed") else (ends[0] + ends[1], ends[1] + ends[0])
        links = torch.tensor([src, dst]) if src else torch.empty(2, 0, dtype=torch.long)
        check_edge_index_shape(links, "graph")
        return links
