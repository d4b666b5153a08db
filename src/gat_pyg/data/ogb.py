"""The node property data sets of OGB."""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from ..tasks.objective import MASKS
from ..tasks.preparation import UNDIRECTED
from ..tasks.task import Task
from .own import _graph, _load_folder, from_dataset
from .raw import _raw_folder, _reading, data_root

OGBN = {"ogbn-arxiv": True, "ogbn-products": False, "ogbn-papers100M": True}  # name -> whether its edges are citations

# OGB: arxiv, products, papers100M -----------------------------------------------------------------------------------


def ogbn(name: str, root: str | Path | None = None) -> Task:
    """A graph of the Open Graph Benchmark (Hu et al., NeurIPS 2020) with its own split.

    ====================  ===========  ===  ===  =====================================
    `name`                          N    F    K  nodes, edges
    ====================  ===========  ===  ===  =====================================
    `"ogbn-arxiv"`            169,343  128   40  papers, cited or citing
    `"ogbn-products"`       2,449,029  100   47  products, bought together
    `"ogbn-papers100M"`   111,059,956  128  172  papers, cited or citing; few have a y
    ====================  ===========  ===  ===  =====================================

    Citations are made undirected, as OGB's own examples do before they train; products' edges are so already. A node
    without a label has y = -1.

    The first time it needs the extra `ogb` and reads `<root>/ogbn_arxiv/{raw,split}` (see `data_root`) as the ogb
    package leaves them there, or downloads them by its code: 0.1, 1.4 or 57 GB, without asking, since nobody may be
    there to answer. What is needed of them is then in `<root>/ogbn_arxiv/npy`, a folder as of `from_file`, which is
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
        with redirect_stdout(sys.stderr):  # where ogb prints what it does
            _write_ogbn(name, folder)
    transforms = (UNDIRECTED,) if OGBN[name] else ()
    with _reading(folder / "npy"):
        return from_dataset(_graph(_load_folder(folder / "npy"), folder / "npy"), name, transforms=transforms)


def _write_ogbn(name: str, folder: Path) -> None:
    """Turn raw files, which are downloaded where they are missing, into `npy`: as a whole, or not at all."""
    try:
        from ogb.utils import url
    except ImportError as error:
        raise ImportError(f"{name} needs ogb. Run: python -m pip install 'gat_pyg[ogb]'.") from error
    metadata = _ogb_metadata(name)

    def fetch(fresh: str, missing: Sequence[str]) -> None:
        url.extract_zip(url.download_url(metadata["url"], fresh), fresh)
        for part in missing:
            (Path(fresh) / metadata["download_name"] / part).rename(Path(fresh) / part)

    _raw_folder(folder, ["raw", "split", f"RELEASE_v{metadata['version']}.txt"], fetch, name)
    with tempfile.TemporaryDirectory(prefix=".npy-", dir=folder) as fresh:
        npy = Path(fresh) / "npy"
        npy.mkdir()
        try:
            with _reading(folder / "raw"):
                _convert_ogbn(name, metadata, folder, npy)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is missing. Delete {folder} to have all of it downloaded again."
            ) from error
        try:
            npy.rename(folder / "npy")
        except OSError:
            if not (folder / "npy").is_dir():  # of several processes another was first
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
    """Each edge once in each direction, by src: PyG's `to_undirected` in a third of its memory."""
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
