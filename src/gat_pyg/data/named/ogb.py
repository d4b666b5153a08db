"""The data sets of OGB: labels of nodes and of graphs, and links."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from ...files import needs
from ...tasks.links import LinkLabels
from ...tasks.node_ids import node_ids
from ...tasks.preparation import UNDIRECTED, build_transform
from ...tasks.task import Task
from ..arrays.from_pyg import from_dataset
from ..links import task_of_pairs
from ..splits import OGB_PARTS, masks_of
from .raw import data_root, downloading

OGBN = {"ogbn-arxiv": True, "ogbn-products": False, "ogbn-papers100M": True}  # name -> True if its edges are citations

# OGB: arxiv, products, papers100M -----------------------------------------------------------------------------------


def ogbn(name: str, root: str | Path | None = None) -> Task:
    """Load a graph of the Open Graph Benchmark (Hu et al., NeurIPS 2020) with its own split.

    ====================  ===========  ===  ===  =====================================
    `name`                          N    F    K  nodes, edges
    ====================  ===========  ===  ===  =====================================
    `"ogbn-arxiv"`            169,343  128   40  papers, cited or citing
    `"ogbn-products"`       2,449,029  100   47  products, bought together
    `"ogbn-papers100M"`   111,059,956  128  172  papers, cited or citing; few have a y
    ====================  ===========  ===  ===  =====================================

    Citations are made undirected, as in OGB's own examples; the edges of products are undirected already. A node
    without a label has y = -1.

    Needs the extra `ogb`, whose class reads `<root>/ogb/ogbn_arxiv` (see `data_root`), or downloads 0.1, 1.4 or 57 GB.
    Before it downloads more than 1 GB, it asks a question on the terminal.

    Cost: the features and edges of papers100M are in memory, some 200 GB (estimated). With less, write its arrays into
    a folder, which `from_file` maps into memory.

    Raises ValueError for an unknown name, FileNotFoundError if a download fails, ImportError if ogb is not installed.

    >>> ogbn("ogbn-mag")
    Traceback (most recent call last):
    ValueError: 'ogbn-mag' is unknown: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.
    """
    if name not in OGBN:
        raise ValueError(f"{name!r} is unknown: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.")
    dataset, parts = _of_ogb(name, "nodeproppred.PygNodePropPredDataset", "ogbn-arxiv", "node labels", root)
    data, transforms = dataset[0], (UNDIRECTED,) if OGBN[name] else ()
    data = Data(data.x, data.edge_index, y=data.y.flatten())
    for transform in transforms:
        data = build_transform(transform)(data)
    data.update(masks_of([parts[part] for part in OGB_PARTS], len(data.y)))
    return from_dataset(data, name, transforms=transforms)


def ogbg(name: str, root: str | Path | None = None) -> Task:
    """Read a data set of OGB with graph labels, such as `"ogbg-molbace"`, with its scaffold split.

    The features of atoms and bonds are categories: `+model.encoder=64` embeds them, as `gat_pyg.models.Encoder`. Labels
    are as in `from_dataset`: the two classes of molbace and the target of molesol have one column.

    The first call needs the extra `ogb`. It reads `<root>/ogb` (see `data_root`), or downloads with OGB's code.

    Raises ValueError if OGB does not know the name, ImportError if ogb is not installed, FileNotFoundError if the
    download fails.

    >>> ogbg("ogbn-arxiv")
    Traceback (most recent call last):
    ValueError: 'ogbn-arxiv' is unknown: expected the name of a data set with graph labels, such as ogbg-molbace.
    """
    dataset, _ = _of_ogb(name, "graphproppred.PygGraphPropPredDataset", "ogbg-molbace", "graph labels", root)
    return from_dataset(dataset, name)


def ogbl(name: str, root: str | Path | None = None, channels: int = 64) -> Task:
    """Read a data set of OGB with links to predict, such as `"ogbl-ddi"`, with its split, negative pairs and metric.

    Messages pass over the training links only. `channels` is the width of the embeddings that a decoder scores.
    The 4,267 drugs of ddi have no features; x `[N, 1]` is their ids, which `+model.encoder=256` embeds.

    The first call needs the extra `ogb`. It reads `<root>/ogb` (see `data_root`), or downloads with OGB's code.

    Raises ValueError if OGB does not know the name or has separate negative pairs for each link, ImportError if ogb
    is not installed, FileNotFoundError if the download fails.

    >>> ogbl("ogbn-arxiv")
    Traceback (most recent call last):
    ValueError: 'ogbn-arxiv' is unknown: expected the name of a data set with links, such as ogbl-ddi.
    """
    dataset, parts = _of_ogb(name, "linkproppred.PygLinkPropPredDataset", "ogbl-ddi", "links", root)
    if not all("edge_neg" in parts[part] for part in ("valid", "test")):
        raise ValueError(
            f"{name} has separate negative pairs for each link, expected the same for all, as in ogbl-ddi."
        )
    pairs, labels = [], []
    for part in (parts[key] for key in ("train", "valid", "test")):
        both = [part["edge"], *([part["edge_neg"]] if part is not parts["train"] else [])]
        pairs.append(torch.cat(both).t())
        labels.append(torch.cat([torch.full((len(edges),), 1 - number) for number, edges in enumerate(both)]))
    data = dataset[0]
    data = Data(node_ids(data.num_nodes) if data.x is None else data.x.to(torch.get_default_dtype()), data.edge_index)
    return task_of_pairs(name, data, pairs, labels, LinkLabels(channels, dataset.meta_info["eval metric"]))


def _of_ogb(name: str, kind: str, example: str, items: str, root: str | Path | None) -> tuple[Any, Any]:
    """Return a data set of one of OGB's classes, and its split."""
    if not name.startswith(example[:5]):
        raise ValueError(f"{name!r} is unknown: expected the name of a data set with {items}, such as {example}.")
    module, _, kind = kind.partition(".")
    ogb, folder = needs(f"ogb.{module}", "ogb"), data_root(root) / "ogb"
    with downloading(name, folder), _allowed(), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # ogb's labels, which it only reads
        dataset = getattr(ogb, kind)(name, root=str(folder))
        return dataset, dataset.get_edge_split() if items == "links" else dataset.get_idx_split()


def _allowed() -> Any:
    """Return a context manager in which torch.load reads the classes of OGB's files with `weights_only=True`."""
    functions: list[Any] = [value.__reduce__()[0] for value in (np.empty(0), np.int64())]
    names = [(each, f"numpy.{core}.multiarray.{each.__name__}") for each in functions for core in ("core", "_core")]
    arrays: list[Any] = [*names, np.ndarray, np.dtype, np.dtypes.Int64DType]
    return torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage, *arrays])
