"""The citation networks Cora, Citeseer and Pubmed in the Planetoid split."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch_geometric.datasets import Planetoid
from torch_geometric.io import fs, read_planetoid_data

from ...tasks.nodes import NodeLabels
from ...tasks.preparation import NORMALIZE, build_transform
from ...tasks.task import Task
from ..arrays.from_pyg import first_names
from .raw import data_root, raw_folder, reading

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
    source. Nothing else is written. The files are pickles, which PyG's reader runs: only have files there that you
    trust.

    Raises ValueError for an unknown name or a broken file, FileNotFoundError if a download fails.

    >>> planetoid("karate")
    Traceback (most recent call last):
    ValueError: 'karate' is not a Planetoid data set: expected cora, citeseer or pubmed.
    """
    if name.lower() not in PLANETOID:
        raise ValueError(f"{name!r} is not a Planetoid data set: expected cora, citeseer or pubmed.")
    name = name.lower()
    folder = planetoid_folder(name, root)
    with reading(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SciPy, about the names in old pickles
        data = read_planetoid_data(str(folder), name)
        data.x = data.x.to(torch.get_default_dtype())
        data = build_transform(NORMALIZE)(data)
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
