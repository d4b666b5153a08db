"""Graphs and splits of published benchmarks that no class of PyG has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, download_url
from torch_geometric.datasets import WikiCS
from torch_geometric.utils import to_undirected

from ...tasks.objective import MASKS
from .raw import data_root, downloading, raw_folder, reading

FILTERED_URL = "https://raw.githubusercontent.com/yandex-research/heterophilous-graphs/a431395582e929d88271309716bea4fe24ce6318/data"
FILTERED = {  # name -> SHA-256 of its file
    "chameleon": "bf46f07e1fb5249280447e5fe3100f3e82fc4b93ad1e13ffcfdec924b6ac0bb5",
    "squirrel": "f06370ffb3116c5de8b7a600005400b2293c025e0ce2f6916d8201a825505ac7",
}
SPLITS_URL = (
    "https://raw.githubusercontent.com/LUOyk1999/tunedGNN/23f9604e8b13a9a6d3faa2f691cd844006979153/medium_graph/data"
)
SPLIT_FILES = {  # path in `data_root` -> SHA-256
    "Amazon/Computers/splits/amazon-computer_split.npz": (
        "dff698aba1dd30b8bd7d1dca65c60b1f8d9027d950e07a23e86dcbf16c539f24"
    ),
    "Amazon/Photo/splits/amazon-photo_split.npz": "0609f6ab15ddabfe33a34f10d960d09499e634472f72104abb1f3be858127432",
    "Coauthor/CS/splits/coauthor-cs_split.npz": "b8c46a38d93b1f9d6b8b8ab944d870e8d44ccdde0639188681e0d38212480ec5",
    "Coauthor/Physics/splits/coauthor-physics_split.npz": (
        "2034eb90f5ff80eee0e371cc05b20690a16786fb085924b9166c83361fbbcb39"
    ),
}


def filtered(name: str, root: str | Path | None = None) -> Data:
    """Load Chameleon or Squirrel without duplicate nodes, with ten splits (Platonov et al., ICLR 2023).

    Pages of Wikipedia are joined by links in both directions; PyG's `WikipediaNetwork` has the graphs with duplicates.

    ===============  =====  ======  =====  ===
    `name`               N       E      F    K
    ===============  =====  ======  =====  ===
    `"chameleon"`      890  17,708  2,325    5
    `"squirrel"`     2,223  93,996  2,089    5
    ===============  =====  ======  =====  ===

    Reads `<root>/heterophilous/<name>_filtered.npz` (see `data_root`), or downloads it from the authors' repository.

    Returns:
        A graph with `x` [N, F], `edge_index`, `y` [N] and the masks [N, 10].

    Raises:
        ValueError: for an unknown name or a broken file.
        FileNotFoundError: if a download fails, or has other content than the authors'.

    Example:
        >>> filtered("texas")
        Traceback (most recent call last):
        ValueError: 'texas' is unknown: expected chameleon or squirrel.
    """
    if name not in FILTERED:
        raise ValueError(f"{name!r} is unknown: expected {' or '.join(FILTERED)}.")
    path = _downloaded(data_root(root) / "heterophilous" / f"{name}_filtered.npz", FILTERED_URL, FILTERED[name])
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        x, y, links = (torch.from_numpy(arrays[key]) for key in ("node_features", "node_labels", "edges"))
        data = Data(x, to_undirected(links.t(), num_nodes=len(x)), y=y)
        for key in MASKS:
            data[key] = torch.from_numpy(arrays[f"{key}s"]).t()
    return data


def wikics(root: str | Path | None = None) -> Data:
    """Load the articles of Wikipedia on computer science of Mernyei and Cangea (2020), with twenty splits, one test.

    The validation has both sets of nodes that are neither for training nor for the test: those to choose settings by,
    and those to stop by, as in Luo et al. (NeurIPS 2024).

    Reads `<root>/WikiCS` (see `data_root`), or downloads it from PyG's source.

    Returns:
        A graph with `x` [N, 300], `edge_index`, `y` [N] in 10 classes, `train_mask` and `val_mask` [N, 20] and
        `test_mask` [N], for N = 11,701.

    Raises:
        FileNotFoundError: if the download fails.
    """
    folder = data_root(root) / "WikiCS"
    with downloading("WikiCS", folder):
        data = WikiCS(str(folder), is_undirected=True)[0]
    data.val_mask |= data.pop("stopping_mask")
    return data


def split_file(file: str | Path, root: str | Path | None = None) -> Path:
    """Return the path of a file of a split, which may be relative to `data_root`; download one of `SPLIT_FILES`.

    Raises:
        FileNotFoundError: if there is no such file, or a download fails.
    """
    path = Path(file).expanduser()
    if path.is_file():
        return path
    path = data_root(root) / path
    if str(file) in SPLIT_FILES:
        return _downloaded(path, SPLITS_URL, SPLIT_FILES[str(file)])
    if not path.is_file():
        raise FileNotFoundError(
            f"split.file={file} is not a file, expected an .npz file with arrays train, val (or valid) and test of "
            f"node ids: its path, also relative to data_root, or one of {', '.join(SPLIT_FILES)}, which are downloaded."
        )
    return path


def _downloaded(path: Path, url: str, sha256: str) -> Path:
    """Return the path of a file, which is downloaded from the folder `url` if it is missing."""
    return raw_folder(path.parent, [path.name], partial(_fetch, url, sha256), path.stem) / path.name


def _fetch(url: str, sha256: str, folder: str, files: Sequence[str]) -> None:
    for file in files:
        content = Path(download_url(f"{url}/{file}", folder, log=False)).read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != sha256:
            raise ValueError(f"the SHA-256 of {url}/{file} is {digest}, expected {sha256}")
