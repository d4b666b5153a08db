"""The table of kinds: small files of each kind that the command reads, over which its verbs are tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import numpy as np
import pandas as pd
import scipy.io
import torch
from torch_geometric.data import Data

N, M = 40, 120  # nodes and edges
FILE, TABLES = ("dataset=file", "dataset.path={}"), "dataset=tables"


class Kind(NamedTuple):
    """Files, the settings of a training on them, and files for later predictions with the same rows.

    `write` writes the files into a folder and returns their paths, which fill the `{}` of the settings. `later` writes
    a copy with rows and columns in another order, for tables with new ids that begin with "new", and rows of its own,
    of which there is a warning.
    """

    name: str
    settings: tuple[str, ...]
    write: Callable[[Path], list[Path]]
    later: tuple[Callable[[Path], list[Path]], str] | None = None  # and the warning
    ids: tuple[str, ...] = ()  # the columns of predictions that name a row
    columns: tuple[str, ...] = ()  # the others, of one seed

    @property
    def probabilities(self) -> tuple[str, ...]:
        """The columns of numbers."""
        return self.columns[len(self.columns) > 2 or self.columns[0] == "class" :]


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def graph(**arrays: Any) -> dict[str, Any]:
    r = draw()
    return {"x": r.normal(size=(N, 3)), "edge_index": r.integers(N, size=(2, M)), **arrays}


def molecules(y: Callable[[int], Any]) -> list[Data]:
    torch.manual_seed(0)
    rings = [(torch.arange(n), (torch.arange(n) + 1) % n) for n in range(3, 23)]
    return [
        Data(torch.randn(len(a), 3), torch.stack([torch.cat([a, b]), torch.cat([b, a])]), y=torch.as_tensor(y(len(a))))
        for a, b in rings
    ]


def saved(name: str, content: Any) -> Callable[[Path], list[Path]]:
    """Return the function that writes a content by torch.save, numpy.savez or, into a folder, numpy.save."""

    def write(folder: Path) -> list[Path]:
        path = folder / name
        if path.suffix == ".pt":
            torch.save(content, path)
        elif path.suffix == ".npz":
            np.savez(path, **content)
        else:
            path.mkdir()
            for key, values in content.items():
                np.save(path / key, values)
        return [path]

    return write


def rings(folder: Path) -> list[Path]:
    """Write graphs with names of nodes and a column of their own as a JSON list."""
    graphs = [networkx.cycle_graph(n) for n in range(3, 33)]
    for n, each in enumerate(graphs):
        each.graph.update(size="abc"[n % 3], acid=float(n % 7))
        for node in each:
            each.nodes[node]["atom"] = "CNO"[(n + node) % 3]
    path = folder / "rings.json"
    path.write_text(json.dumps([networkx.node_link_data(each, edges="links") for each in graphs]))
    return [path]


def accounts() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of nodes and edges: ids, numbers with a gap, categories, dates and labels of both."""
    r = draw()
    ids = np.array([f"A{i:02}" for i in range(N)])
    nodes = pd.DataFrame({"account": ids, "age": r.normal(40, 10, N), "city": r.choice(["Oslo", "Rome", "Bonn"], N)})
    nodes["since"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(r.integers(300, size=N), "D")
    nodes["fraud"] = np.where(np.arange(N) < 8, None, r.choice(["no", "yes"], N))  # type: ignore[call-overload]
    nodes.loc[[3, 20], "age"] = np.nan
    edges = pd.DataFrame({"src": r.choice(ids, M), "dst": r.choice(ids, M), "amount": r.random(M).round(3)})
    edges["risk"] = r.normal(size=M).round(3)
    return nodes, edges


def written(folder: Path, nodes: pd.DataFrame | None, edges: pd.DataFrame, begin: str = "") -> list[Path]:
    paths = []
    for name, frame in (("nodes", nodes), ("edges", edges)):
        if frame is not None:
            frame.to_csv(folder / f"{begin}{name}.csv", index=False)
            paths.append(folder / f"{begin}{name}.csv")
    return paths


def tables(folder: Path) -> list[Path]:
    return written(folder, *accounts())


def later_tables(folder: Path) -> list[Path]:
    """Write the tables with new ids, in another order, and with an account without edges in an unknown city."""
    nodes, edges = accounts()
    extra = nodes.head(1).assign(account="A99", city="Lima", since=nodes.since[0])
    nodes = pd.concat([nodes, extra]).sample(frac=1, random_state=0)[["fraud", "city", "age", "account", "since"]]
    edges = edges.sample(frac=1, random_state=1)[["risk", "dst", "amount", "src"]]
    nodes["account"] = "new" + nodes.account
    return written(folder, nodes, edges.assign(src="new" + edges.src, dst="new" + edges.dst), "later_")


def pairs(folder: Path) -> list[Path]:
    """Write a table of users and items."""
    r = draw()
    users, items = r.integers(12, size=M), r.integers(15, size=M)
    frame = pd.DataFrame({"user": [f"u{i}" for i in users], "item": [f"i{i}" for i in items]}).drop_duplicates()
    return written(folder, None, frame)


def of_networkx(suffix: str, write: Callable[[Any, Path], Any]) -> Callable[[Path], list[Path]]:
    def written(folder: Path) -> list[Path]:
        club = networkx.karate_club_graph()
        for node, values in club.nodes.items():
            values.update(age=float(node % 7), name=f"m{node}")
        write(club, folder / f"club{suffix}")
        return [folder / f"club{suffix}"]

    return written


def of_matlab(folder: Path) -> list[Path]:
    r, adjacency = draw(), np.zeros((N, N))
    adjacency[tuple(r.integers(N, size=(2, M)))] = 1
    scipy.io.savemat(folder / "net.mat", {"A": adjacency, "group": np.arange(N) % 2 + 1, "x": r.normal(size=(N, 3))})
    return [folder / "net.mat"]


def smiles(folder: Path) -> list[Path]:
    """Write a table of molecules, of which some have no target."""
    names = ["C" * n + end for n in range(2, 10) for end in ("O", "Br", "C(=O)C")]
    frame = pd.DataFrame({"SMILES": names, "logS": draw().normal(size=len(names))})
    frame.loc[::6, "logS"] = np.nan
    frame.to_csv(folder / "molecules.csv", index=False)
    return [folder / "molecules.csv"]


def later_smiles(folder: Path) -> list[Path]:
    (path,) = smiles(folder)
    frame = pd.concat([pd.read_csv(path), pd.DataFrame({"SMILES": ["C[Se]C"]})]).sample(frac=1, random_state=0)
    frame[["logS", "SMILES"]].to_csv(folder / "later.csv", index=False)
    return [folder / "later.csv"]


LIMA = "city has 1 values that are not a category of .*'Lima'"
r = draw()
KINDS = [
    Kind(
        "nodes.npz",
        (*FILE, "runs=2"),
        saved("nodes.npz", graph(y=np.where(np.arange(N) < 6, -1, np.arange(N) % 3))),
        None,
        ("node",),
        ("class", "p_0", "p_1", "p_2"),
    ),
    Kind("folder", FILE, saved("folder", graph(y=r.normal(size=N))), None, ("node",), ("prediction",)),
    Kind(
        "edges.pt",
        FILE,
        saved("edges.pt", {key: torch.as_tensor(value) for key, value in graph(edge_label=np.arange(M) % 2).items()}),
        None,
        ("src", "dst"),
        ("class", "p_0", "p_1"),
    ),
    Kind(
        "links.npz",
        (*FILE, "task=link_prediction"),
        saved("links.npz", graph()),
        None,
        ("src", "dst"),
        ("probability",),
    ),
    Kind(
        "graphs.pt",
        (*FILE, "runs=2", "training.batch_size=4"),
        saved("graphs.pt", molecules(lambda n: [n % 2])),
        None,
        ("graph",),
        ("class", "p_0", "p_1"),
    ),
    Kind(
        "targets.pt",
        (*FILE, "training.batch_size=4"),
        saved("targets.pt", molecules(lambda n: [[0.1 * n, float(n % 3)]])),
        None,
        ("graph",),
        ("prediction_0", "prediction_1"),
    ),
    Kind(
        "rings.json",
        (TABLES, "dataset.graph={}", "dataset.target=size", "training.batch_size=8"),
        rings,
        None,
        ("graph",),
        ("size", "p_a", "p_b", "p_c"),
    ),
    Kind(
        "labels.pt",
        (*FILE, "training.batch_size=4"),
        saved("labels.pt", molecules(lambda n: (torch.rand(n, 2) > 0.5).float())),
        None,
        ("graph", "node"),
        ("p_0", "p_1"),
    ),
    Kind(
        "nodes.csv",
        (TABLES, "dataset.nodes={}", "dataset.edges={}", "dataset.target=fraud", "runs=2"),
        tables,
        (later_tables, LIMA),
        ("account",),
        ("fraud", "p_no", "p_yes"),
    ),
    Kind(
        "edges.csv",
        (TABLES, "dataset.nodes={}", "dataset.edges={}", "dataset.target=risk"),
        tables,
        (later_tables, LIMA),
        ("src", "dst"),
        ("risk",),
    ),
    Kind("pairs.csv", (TABLES, "dataset.edges={}", "model.encoder=4"), pairs, None, ("user", "item"), ("probability",)),
    Kind(
        "molecules.csv",
        ("dataset=smiles", "dataset.path={}", "dataset.target=logS", "model.num_layers=null", "model.residual=false"),
        smiles,
        (later_smiles, r"no training molecule has Se in 'C\[Se\]C'"),
        ("SMILES",),
        ("logS",),
    ),
    Kind(
        "club.graphml",
        (TABLES, "dataset.graph={}", "dataset.target=club"),
        of_networkx(".graphml", networkx.write_graphml),
        None,
        ("id",),
        ("club", "p_Mr. Hi", "p_Officer"),
    ),
    Kind(
        "net.mat",
        (TABLES, "dataset.graph={}", "dataset.target=group"),
        of_matlab,
        None,
        ("id",),
        ("group", "p_1", "p_2"),
    ),
    Kind(
        "series.npz",
        FILE,
        saved("series.npz", graph(x=r.normal(size=(10, N, 2)), y=r.normal(size=(10, N)))),
        None,
        ("step", "node"),
        ("prediction",),
    ),
]
