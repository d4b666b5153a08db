"""The citation networks Cora, Citeseer and Pubmed in the Planetoid split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.io import fs
from torch_geometric.utils import coalesce, remove_self_loops

from ...tasks.checks import check_edge_index, check_edge_index_shape
from ...tasks.nodes import NodeLabels
from ...tasks.objective import MASKS
from ...tasks.preparation import NORMALIZE, build_transform
from ...tasks.task import Task
from ..arrays.from_pyg import first_names
from .raw import data_root, raw_folder, reading
from .unpickle import unpickle

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")  # files of each Planetoid set
PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}  # name -> folder

CLASSES = {  # in the order of the files, found by the sizes of the classes: the files have no names
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

# Planetoid: Cora, Citeseer, Pubmed ----------------------------------------------------------------------------------


def planetoid(name: str, root: str | Path | None = None) -> Task:
    """Load a citation network (Section 3.1) with the split of Yang et al. (2016): 20 per class / 500 / 1000.

    `name` is `"cora"`, `"citeseer"` or `"pubmed"`. The result is that of PyG's
    `Planetoid(root, name, split="public", transform=NormalizeFeatures())`: bag-of-words rows that sum to one, without
    repeated links and loops. Citeseer's 15 test nodes without features are rows of zeros, in none of the masks.

    Reads `<root>/Planetoid/<Cora|CiteSeer|PubMed>/raw/ind.*` (see `data_root`) and downloads missing files from PyG's
    source. The files are pickles, but no code in them is run. Nothing else is written.

    Raises ValueError for an unknown name or a broken or malicious file, FileNotFoundError if a download fails.

    >>> planetoid("karate")
    Traceback (most recent call last):
    ValueError: 'karate' is not a Planetoid data set: expected cora, citeseer or pubmed.
    """
    if name.lower() not in PLANETOID:
        raise ValueError(f"{name!r} is not a Planetoid data set: expected cora, citeseer or pubmed.")
    name = name.lower()
    folder = planetoid_folder(name, root)
    with reading(folder):
        data = build_transform(NORMALIZE)(_read_planetoid(folder, name))
        F, K = data.x.size(1), int(data.y.max()) + 1
        names = first_names(CLASSES[name], K)
        return Task(name, [data], [data], [data], F, NodeLabels(K), class_names=names, transforms=(NORMALIZE,))


def planetoid_folder(name: str, root: str | Path | None) -> Path:
    """Return the folder of the files of a citation network, downloaded if necessary."""
    files = [f"ind.{name}.{part}" for part in PARTS]

    def fetch(folder: str, missing: Sequence[str]) -> None:
        for file in missing:
            fs.cp(f"{Planetoid.url}/{file}", folder)

    return raw_folder(data_root(root) / "Planetoid" / PLANETOID[name] / "raw", files, fetch, PLANETOID[name])


def _read_planetoid(folder: Path, name: str) -> Data:
    raw: dict[str, Any] = {}
    for part in PARTS:
        path = folder / f"ind.{name}.{part}"
        with reading(path):
            raw[part] = (
                unpickle(path) if part != "test.index" else torch.tensor([int(i) for i in path.read_text().split()])
            )
    return _assemble(raw)


def _assemble(raw: Mapping[str, Any]) -> Data:
    """Build one graph from Planetoid's eight files: first allx and ally; tx and ty belong to nodes of test.index."""
    test, first = raw["test.index"], raw["allx"].size(0)
    if not test.numel():
        raise ValueError("test.index holds no nodes")
    if len(test) != raw["tx"].size(0) or len(test.unique()) != len(test) or int(test.min()) != first:
        raise ValueError(
            f"test.index has {len(test)} nodes from {int(test.min())}, tx {raw['tx'].size(0)} from {first}"
        )
    N, rows = int(test.max()) + 1, first + len(test)
    if 2 * rows < N:  # Citeseer's test nodes have gaps between them, 15 in all
        raise ValueError(f"test.index holds {N - 1}, but allx and tx have {rows} rows together")
    links = links_in(raw["graph"])
    check_edge_index(links, N, "graph")  # before coalesce, which assumes ids from 0 to N - 1
    x = torch.zeros(N, raw["allx"].size(1))
    y = torch.zeros(N, raw["ally"].size(1))
    for values, first_rows, test_rows in ((x, raw["allx"], raw["tx"]), (y, raw["ally"], raw["ty"])):
        values[:first], values[test] = first_rows.to(values), test_rows.to(values)

    edge_index, _ = remove_self_loops(links)
    data = Data(x, coalesce(edge_index, num_nodes=N, sort_by_row=False), y=y.argmax(1))
    train = raw["y"].size(0)
    for key, nodes in zip(MASKS, (torch.arange(train), torch.arange(train, train + 500), test), strict=True):
        data[key] = torch.zeros(N, dtype=torch.bool).index_fill_(0, nodes, True)
    return data


def links_in(graph: Mapping[int, Sequence[int]]) -> Tensor:
    """Return the links [2, L] in a mapping of nodes to their neighbours."""
    src = [node for node, neighbours in graph.items() for _ in neighbours]
    return as_pairs(src, [node for neighbours in graph.values() for node in neighbours])


def as_pairs(src: list[int], dst: list[int]) -> Tensor:
    """Return links [2, L] int64, possibly none; raise ValueError if ids are not whole numbers."""
    links = torch.tensor([src, dst]) if src or dst else torch.empty(2, 0, dtype=torch.long)
    check_edge_index_shape(links, "graph")
    return links
