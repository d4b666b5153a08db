"""The data sets of OGB: labels of nodes and of graphs, and links."""

from __future__ import annotations

import csv
import importlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from ...tasks.links import LinkLabels
from ...tasks.node_ids import node_ids
from ...tasks.objective import MASKS
from ...tasks.preparation import UNDIRECTED
from ...tasks.task import Task
from ..arrays.formats import graph_in, load_folder
from ..arrays.from_pyg import from_dataset
from ..links import task_of_pairs
from .raw import data_root, downloading, raw_folder, reading

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

    The first call needs the extra `ogb`. It reads `<root>/ogbn_arxiv/{raw,split}` (see `data_root`), in the format of
    the ogb package, or downloads 0.1, 1.4 or 57 GB with its code, without confirmation. The data are then stored in
    `<root>/ogbn_arxiv/npy`, a folder as in `from_file`, which is memory-mapped: x [N, F] is never copied, and processes
    on one machine share it.

    Cost: once, some 20 s for arxiv on one core, and more for the larger graphs. papers100M needs 230 GB of free disk
    space for its features, and 80 GB of memory for its edges.

    Raises ValueError for an unknown name or a broken file, FileNotFoundError if a download fails, ImportError if ogb is
    not installed.

    >>> ogbn("ogbn-mag")
    Traceback (most recent call last):
    ValueError: 'ogbn-mag' is unknown: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.
    """
    if name not in OGBN:
        raise ValueError(f"{name!r} is unknown: expected ogbn-arxiv, ogbn-products or ogbn-papers100M.")
    folder = data_root(root) / name.replace("-", "_")
    if not (folder / "npy").is_dir():
        with redirect_stdout(sys.stderr):  # ogb prints its progress
            _write_ogbn(name, folder)
    transforms = (UNDIRECTED,) if OGBN[name] else ()
    with reading(folder / "npy"):
        return from_dataset(graph_in(load_folder(folder / "npy"), folder / "npy"), name, transforms=transforms)


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
    """Return a data set of one of OGB's classes, and the split of its links if it has them."""
    if not name.startswith(example[:5]):
        raise ValueError(f"{name!r} is unknown: expected the name of a data set with {items}, such as {example}.")
    module, _, kind = kind.partition(".")
    ogb, folder = _imported(f"ogb.{module}", name), data_root(root) / "ogb"
    with downloading(name, folder), _allowed(), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # ogb's labels, which it only reads
        dataset = getattr(ogb, kind)(name, root=str(folder))
        return dataset, dataset.get_edge_split() if items == "links" else None


def _allowed() -> Any:
    """Return a context manager in which torch.load reads the classes of OGB's files with `weights_only=True`."""
    reconstruct = np.empty(0).__reduce__()[0]
    functions = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    arrays: list[Any] = [*functions, np.ndarray, np.dtype, np.dtypes.Int64DType]
    return torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage, *arrays])


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{name} needs ogb. Run: python -m pip install 'gat_pyg[ogb]'.") from error


def _write_ogbn(name: str, folder: Path) -> None:
    """Convert the raw files, downloaded if necessary, into the folder `npy`, atomically."""
    url = _imported("ogb.utils.url", name)
    metadata = _ogb_metadata(name)

    def fetch(fresh: str, missing: Sequence[str]) -> None:
        url.extract_zip(url.download_url(metadata["url"], fresh), fresh)
        for part in missing:
            (Path(fresh) / metadata["download_name"] / part).rename(Path(fresh) / part)

    raw_folder(folder, ["raw", "split", f"RELEASE_v{metadata['version']}.txt"], fetch, name)
    with tempfile.TemporaryDirectory(prefix=".npy-", dir=folder) as fresh:
        npy = Path(fresh) / "npy"
        npy.mkdir()
        try:
            with reading(folder / "raw"):
                _convert_ogbn(name, metadata, folder, npy)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is missing. Delete {folder} to have all of it downloaded again."
            ) from error
        try:
            npy.rename(folder / "npy")
        except OSError:
            if not (folder / "npy").is_dir():  # unless another process was first
                raise


def _convert_ogbn(name: str, metadata: Mapping[str, str], folder: Path, npy: Path) -> None:
    from ogb.io.read_graph_raw import read_csv_graph_raw

    raw, split = folder / "raw", folder / "split" / metadata["split"]
    if metadata["binary"] == "True":
        with ZipFile(raw / "data.npz") as arrays:  # features that may exceed the memory
            for key, stored in (("x", "node_feat.npy"), ("edge_index", "edge_index.npy")):
                with arrays.open(stored) as source, (npy / f"{key}.npy").open("wb") as target:
                    shutil.copyfileobj(source, target, 2**24)
        y = np.load(raw / "node-label.npz")["node_label"]
    else:
        (graph,) = read_csv_graph_raw(str(raw), add_inverse_edge=metadata["add_inverse_edge"] == "True")
        np.save(npy / "x.npy", graph["node_feat"], allow_pickle=False)  # fails on None, for a missing file
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
    """Return each edge once in each direction, sorted by src: PyG's `to_undirected` in a third of the memory."""
    src, dst = edge_index
    key = np.concatenate([src * N + dst, dst * N + src])
    key.sort()
    key = key[np.diff(key, prepend=-1) != 0]
    both = np.empty((2, len(key)), dtype=np.int64)
    np.divmod(key, N, out=(both[0], both[1]))
    return both


def _ogb_metadata(name: str) -> dict[str, str]:
    """Return OGB's metadata of a data set: URL, version, storage format."""
    with resources.files("ogb").joinpath("nodeproppred").joinpath("master.csv").open() as file:
        return {row[""]: row[name] for row in csv.DictReader(file)}
