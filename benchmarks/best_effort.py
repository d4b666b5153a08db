"""Best efforts with scikit-learn, RDKit and SciPy on the tasks of `public.py`, without a graph network.

Each function reads the files of a task and returns candidates: predictions of all rows by models that were fitted to
training rows only. `ensemble` averages those that do best on the validation rows.

Features of neighbours' labels are computed without the row's own label: of training rows by cross-fitting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import scipy.sparse as sp
from rdkit import Chem, RDLogger
from rdkit.Chem import Descriptors, rdFingerprintGenerator
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer, StandardScaler
from sklearn.svm import SVC, SVR

Array = np.ndarray
Candidates = dict[str, Array]
Known = Callable[[Array, Array], Array]  # labels and the mask of those that are known -> features of all rows

# Choice ---------------------------------------------------------------------------------------------------------------


def ensemble(candidates: Candidates, score: Callable[[Array], float], rounds: int = 12) -> tuple[str, Array]:
    """Return the names and the mean of candidates, chosen one by one with replacement by the validation score.

    Args:
        candidates: predictions of all rows.
        score: the validation score of predictions of all rows; larger is better.
        rounds: the largest number of predictions in the mean.
    """
    chosen: list[str] = []
    best, total = -np.inf, 0.0
    for count in range(1, rounds + 1):
        scores = {name: score((total + values) / count) for name, values in candidates.items()}
        name = max(scores, key=lambda name: scores[name])
        if scores[name] <= best:
            break
        chosen, best, total = [*chosen, name], scores[name], total + candidates[name]
    counts = Counter(chosen)
    text = " + ".join(f"{counts[name]} {name}" if counts[name] > 1 else name for name in counts)
    return text, total / len(chosen)


def fitted(X: Array, y: Array, train: Array, classes: bool, suffix: str = "") -> Candidates:
    """Return predictions of all rows by five models that are fitted to training rows; probabilities of class 1."""
    filled, dense = SimpleImputer(), make_pipeline(SimpleImputer(), StandardScaler())
    normal = make_pipeline(SimpleImputer(), QuantileTransformer(n_quantiles=100, output_distribution="normal"))
    if classes:
        models: dict[str, Any] = {
            "logistic": make_pipeline(dense, LogisticRegression(C=0.1, max_iter=2000)),
            "SVM": make_pipeline(normal, SVC(probability=False, random_state=0)),
            "forest": make_pipeline(filled, RandomForestClassifier(400, min_samples_leaf=2, random_state=0)),
            "extra trees": make_pipeline(
                SimpleImputer(), ExtraTreesClassifier(400, min_samples_leaf=2, random_state=0)
            ),
            "boosting": HistGradientBoostingClassifier(
                learning_rate=0.05, max_iter=150, max_leaf_nodes=15, l2_regularization=1.0, random_state=0
            ),
        }
    else:
        models = {
            "ridge": make_pipeline(dense, RidgeCV(np.logspace(-2, 4, 13))),
            "SVM": make_pipeline(normal, SVR(C=10)),
            "forest": make_pipeline(filled, RandomForestRegressor(300, max_features=0.4, random_state=0)),
            "extra trees": make_pipeline(filled, ExtraTreesRegressor(300, max_features=0.4, random_state=0)),
            "boosting": HistGradientBoostingRegressor(
                learning_rate=0.05, max_iter=300, max_leaf_nodes=15, random_state=0
            ),
        }
    mean, std = (0.0, 1.0) if classes else (y[train].mean(), y[train].std())
    result = {}
    for name, model in models.items():
        if name == "SVM" and train.sum() > 3000:
            continue
        model.fit(X[train], y[train] if classes else (y[train] - mean) / std)
        if not classes:
            result[f"{name}{suffix}"] = model.predict(X) * std + mean
        elif hasattr(model, "predict_proba"):
            result[f"{name}{suffix}"] = model.predict_proba(X)[:, 1]
        else:
            result[f"{name}{suffix}"] = 1 / (1 + np.exp(-2 * model.decision_function(X)))
    return result


# Features of neighbours ---------------------------------------------------------------------------------------------


def adjacency(src: Array, dst: Array, N: int, weight: Array | None = None) -> sp.csr_matrix:
    """Return the symmetric weights of the edges [N, N], without loops."""
    weight = np.ones(len(src)) if weight is None else weight
    keep = src != dst
    A = sp.coo_matrix((weight[keep], (src[keep], dst[keep])), (N, N)).tocsr()
    return A + A.T


def means(A: sp.csr_matrix) -> sp.csr_matrix:
    """Return the matrix that takes the mean over neighbours."""
    return sp.diags(1 / np.maximum(np.asarray(A.sum(1)).ravel(), 1e-12)) @ A


def propagated(A: sp.csr_matrix, y: Array, known: Array, rounds: int) -> Array:
    """Return the labels, of unknown rows the mean over neighbours, iterated."""
    M, value = means(A), np.where(known, y, y[known].mean())
    isolated = np.asarray(A.sum(1)).ravel() == 0
    for _ in range(rounds):
        value = np.where(known, y, np.where(isolated, y[known].mean(), M @ value))
    return value


def cross_fitted(features: Known, y: Array, train: Array, folds: int = 10) -> Array:
    """Return features of known labels; those of a training row are computed without the labels of its fold."""
    result = features(y, train)
    rows = np.flatnonzero(train)
    for _, hidden in KFold(folds, shuffle=True, random_state=0).split(rows):
        known = train.copy()
        known[rows[hidden]] = False
        result[rows[hidden]] = features(y, known)[rows[hidden]]
    return result


def neighbours(A: sp.csr_matrix, X: Array) -> Array:
    """Return features beside their means over neighbours and over two steps, and degrees."""
    M, degree = means(A), np.asarray((A != 0).sum(1))
    return np.column_stack([X, M @ X, M @ (M @ X), degree, M @ degree])


def labels_of_neighbours(matrices: Iterable[sp.csr_matrix], rounds: Iterable[int]) -> Known:
    """Return features of known labels: means over neighbours, their number, and propagated labels."""

    def features(y: Array, known: Array) -> Array:
        columns = []
        for A in matrices:
            count, total = A @ known.astype(float), A @ np.where(known, y, 0)
            columns += [np.where(count > 0, total / np.maximum(count, 1e-12), y[known].mean()), count]
            columns += [propagated(A, y, known, number) for number in rounds]
        return np.column_stack(columns)

    return features


def encoded(keys: dict[str, Array], smoothing: float = 10.0) -> Known:
    """Return the smoothed means of known labels over rows of one key, and their number."""

    def features(y: Array, known: Array) -> Array:
        columns, mean = [], y[known].mean()
        for key in keys.values():
            code = pd.factorize(key)[0]
            count = np.bincount(code[known], minlength=code.max() + 1)
            total = np.bincount(code[known], y[known], minlength=code.max() + 1)
            columns += [((total + smoothing * mean) / (count + smoothing))[code], count[code]]
        return np.column_stack(columns)

    return features


def numbers(frame: pd.DataFrame, most: int = 30) -> Array:
    """Return the columns as numbers; text as one column for each frequent value."""
    columns = []
    for name in frame:
        if pd.api.types.is_numeric_dtype(frame[name]):
            columns.append(frame[name].to_numpy(float))
        else:
            columns += [(frame[name] == value).to_numpy(float) for value in frame[name].value_counts().index[:most]]
    return np.column_stack(columns)


def positions(ids: pd.Series, nodes: pd.Series) -> Array:
    """Return the row of each id in the table of nodes."""
    return pd.Index(nodes).get_indexer(ids)


# Tasks ----------------------------------------------------------------------------------------------------------------


def grid(folder: Path) -> Candidates:
    buses, branches = pd.read_csv(folder / "buses.csv"), pd.read_csv(folder / "branches.csv")
    y, train = buses["angle_deg"].to_numpy(), (buses["part"] == "train").to_numpy()
    ends = [positions(branches[end], buses["bus"]) for end in ("from_bus", "to_bus")]
    A = adjacency(*ends, len(buses))
    conductance = adjacency(*ends, len(buses), 1 / branches["x_ohm"].abs().clip(lower=0.1).to_numpy())
    X = neighbours(A, numbers(buses.drop(columns=["bus", "angle_deg", "part"])))
    known = cross_fitted(labels_of_neighbours([A, conductance], (10, 50, 400)), y, train)
    result = {f"propagation, {rounds}": propagated(A, y, train, rounds) for rounds in (10, 50, 400)}
    result |= {f"by conductance, {rounds}": propagated(conductance, y, train, rounds) for rounds in (10, 50, 400)}
    result |= fitted(np.column_stack([X, known]), y, train, False)
    rest = fitted(np.column_stack([X, known]), y - known[:, -1], train, False, " of the rest")
    return result | {name: values + known[:, -1] for name, values in rest.items()}


def rooms(folder: Path) -> Candidates:
    table, near = pd.read_csv(folder / "rooms.csv"), pd.read_csv(folder / "near.csv")
    y, train = table["price"].to_numpy(), (table["part"] == "train").to_numpy()
    ends = [positions(near[end], table["room"]) for end in ("from_room", "to_room")]
    A = adjacency(*ends, len(table))
    own = table.drop(columns=["room", "price", "part"])
    own["per bed"], own["beds per room"] = (
        own["accommodat"] / own["beds"].clip(1),
        own["beds"] / own["bedrooms"].clip(1),
    )
    known = cross_fitted(labels_of_neighbours([A, (A @ A).tocsr()], (2, 10)), y, train)
    X = numbers(own)
    result = fitted(np.column_stack([neighbours(A, X), known]), y, train, False)
    result |= fitted(np.column_stack([X, known]), y, train, False, ", no neighbours' features")
    logs = fitted(np.column_stack([neighbours(A, X), known]), np.log1p(y), train, False, " of logs")
    return result | {name: np.expm1(values) for name, values in logs.items()}


def polblogs(folder: Path) -> Candidates:
    graph = nx.read_gml(folder / "polblogs.gml")
    table = pd.DataFrame([node for _, node in graph.nodes(data=True)])
    y, train = (table["value"] == "conservative").to_numpy(float), (table["part"] == "train").to_numpy()
    A = sp.csr_matrix(nx.to_scipy_sparse_array(graph)).astype(float)
    root = sp.diags(np.asarray(A.sum(1)).ravel() ** -0.5)
    latent = TruncatedSVD(16, random_state=0).fit_transform(root @ A @ root)
    own = table["source"].str.get_dummies(",").to_numpy(float)
    known = cross_fitted(labels_of_neighbours([A, A @ A], (5, 30)), y, train)
    result = {f"propagation, {rounds}": propagated(A, y, train, rounds) for rounds in (2, 10, 50)}
    for name, X in (
        ("", [own, latent, known, neighbours(A, own)]),
        (", latent", [own, latent]),
        (", labels", [own, known]),
    ):
        result |= fitted(np.column_stack(X), y, train, True, name)
    return result


def delays(folder: Path) -> Candidates:
    flights, airports = pd.read_csv(folder / "flights.csv"), pd.read_csv(folder / "airports.csv").set_index("faa")
    y, train = (flights["late"] == "late").to_numpy(float), (flights["part"] == "train").to_numpy()
    date = pd.to_datetime(flights["date"])
    hour = flights["sched_dep_time"] // 100
    text = {
        name: flights[name].astype(str).to_numpy()
        for name in ("origin", "dest", "carrier", "tailnum", "flight", "date")
    }
    both = {
        "date and origin": text["date"] + text["origin"],
        "date and part": text["date"] + (hour // 6).astype(str).to_numpy(),
        "date, origin, part": text["date"] + text["origin"] + (hour // 8).astype(str).to_numpy(),
        "date and dest": text["date"] + text["dest"],
        "hour": hour.astype(str).to_numpy(),
        "carrier and origin": text["carrier"] + text["origin"],
        "week": (date.dt.dayofyear // 3).astype(str).to_numpy(),
    }
    own = pd.DataFrame(
        {
            "day": date.dt.dayofyear,
            "month": date.dt.month,
            "weekday": date.dt.weekday,
            "hour": hour,
            "departure": hour * 60 + flights["sched_dep_time"] % 100,
            "arrival": flights["sched_arr_time"],
            "distance": flights["distance"],
            "carrier": flights["carrier"],
            "origin": flights["origin"],
            **{name: airports[name].reindex(flights["dest"]).to_numpy() for name in ("lat", "lon", "alt", "tz")},
        }
    )
    X = numbers(own)
    known = cross_fitted(encoded({**text, **both}, 5.0), y, train)
    return fitted(np.column_stack([X, known]), y, train, True) | fitted(X, y, train, True, ", no encodings")


def films(folder: Path) -> Candidates:
    """Return scores of all pairs [U, I] by popularity, of late and of like users, and by co-occurrence."""
    users, items = pd.read_csv(folder / "users.csv"), pd.read_csv(folder / "items.csv")
    ratings = pd.read_csv(folder / "ratings.csv")
    rows = ratings[ratings["part"] == "train"]
    user, item = positions(rows["user"], users["user"]), positions(rows["item"], items["item"])
    shape = (len(users), len(items))
    R = sp.coo_matrix((np.ones(len(rows)), (user, item)), shape).toarray()
    time = (rows["timestamp"] - rows["timestamp"].max()).to_numpy() / 86400  # in days, negative
    result = {"popularity": np.broadcast_to(np.log1p(R.sum(0)), shape)}
    for days in (7, 30, 90):
        result[f"popularity of {days} days"] = np.broadcast_to(
            np.log1p(np.bincount(item, np.exp(time / days), shape[1])), shape
        )
    age = pd.cut(users["age"], [0, 20, 27, 35, 45, 99]).astype(str)
    for name, group in (("gender", users["gender"]), ("age", age), ("occupation", users["occupation"])):
        onehot = pd.get_dummies(group).to_numpy(float)
        share = (onehot.T @ R + 20 * R.mean(0)) / (onehot.sum(0)[:, None] + 20)
        result[f"popularity by {name}"] = onehot @ np.log(share + 1e-3)
    genres = items["class"].fillna("").str.get_dummies(" ").to_numpy(float)
    taste = (R @ genres + 5 * (R.sum(0) @ genres) / R.sum()) / (R.sum(1, keepdims=True) + 5)
    result["genres"] = taste @ (genres / np.maximum(genres.sum(1, keepdims=True), 1)).T
    G = R.T @ R
    for strength in (30, 200, 1000):
        P = np.linalg.inv(G + strength * np.eye(shape[1]))
        B = -P / np.diag(P)
        np.fill_diagonal(B, 0)
        result[f"EASE {strength}"] = R @ B
    norm = np.maximum(np.sqrt(np.diag(G)), 1)
    result["items' cosine"] = R @ (G / norm[:, None] / norm)
    for rank in (8, 24):
        svd = TruncatedSVD(rank, random_state=0)
        result[f"SVD {rank}"] = svd.fit_transform(R / np.sqrt(np.maximum(R.sum(0), 1))) @ svd.components_
    scaled = {}
    for name, values in result.items():
        scaled[name] = (values - values.mean(1, keepdims=True)) / (values.std(1, keepdims=True) + 1e-9)
    return scaled


def of_molecules(smiles: Iterable[str]) -> Array:
    """Return RDKit's descriptors and the counts of Morgan's fragments within two bonds."""
    RDLogger.DisableLog("rdApp.*")
    fragments = rdFingerprintGenerator.GetMorganGenerator(2, fpSize=1024)
    molecules = [Chem.MolFromSmiles(text) for text in smiles]
    descriptors = np.array([[*Descriptors.CalcMolDescriptors(molecule).values()] for molecule in molecules], float)
    descriptors = np.clip(np.where(np.isfinite(descriptors), descriptors, np.nan), -1e6, 1e6)
    return np.column_stack([descriptors, [fragments.GetCountFingerprintAsNumPy(molecule) for molecule in molecules]])


def varying(X: Array, train: Array) -> Array:
    """Return the columns that are not constant in training rows."""
    return X[:, np.nanstd(X[train], 0) > 0]


def solubility(folder: Path) -> Candidates:
    table = pd.read_csv(folder / "molecules.csv")
    train, y = (table["part"] == "train").to_numpy(), table["logSolubility"].to_numpy()
    X = of_molecules(table["smiles"])
    descriptors = varying(X[:, :-1024], train)
    return fitted(varying(X, train), y, train, False) | fitted(descriptors, y, train, False, " of descriptors")


def tox21(folder: Path) -> Candidates:
    table = pd.read_csv(folder / "molecules.csv")
    train = (table["part"] == "train").to_numpy()
    X = of_molecules(table["smiles"])
    result: dict[str, list[Array]] = {}
    for label in table.columns.drop(["smiles", "part"]):
        y = table[label].to_numpy()
        rows = train & ~np.isnan(y)
        for name, columns in (("", varying(X, train)), (" of descriptors", varying(X[:, :-1024], train))):
            for model, values in fitted(columns, y, rows, True, name).items():
                result.setdefault(model, []).append(values)
    return {name: np.column_stack(columns) for name, columns in result.items()}


def mutag(folder: Path) -> Candidates:
    graphs = [nx.node_link_graph(graph, edges="links") for graph in json.loads((folder / "mutag.json").read_text())]
    y = np.array([graph.graph["mutagenic"] == "yes" for graph in graphs], float)
    train = np.array([graph.graph["part"] == "train" for graph in graphs])
    small, large = [], []
    for graph in graphs:
        colours = {node: data["atom"] for node, data in graph.nodes(data=True)}
        counts = Counter(colours.values()) | Counter(bond for *_, bond in graph.edges(data="bond"))
        counts |= Counter(f"{degree} neighbours" for _, degree in graph.degree)
        counts |= {"atoms": len(graph), "bonds": graph.size(), "rings": graph.size() - len(graph) + 1}
        small.append(dict(counts))
        for _ in range(2):
            shells = {node: sorted(data["bond"] + colours[end] for end, data in graph[node].items()) for node in graph}
            colours = {node: f"{colours[node]}({','.join(shell)})" for node, shell in shells.items()}
            counts |= Counter(colours.values())
        large.append(dict(counts))
    result = {}
    for name, rows in (("", small), (", with neighbourhoods", large)):
        X = pd.DataFrame(rows).fillna(0).to_numpy(float)
        result |= fitted(varying(X, train), y, train, True, name)
    return result


def incomes(folder: Path) -> Candidates:
    with np.load(folder / "incomes.npz") as file:
        x, y, edges = file["x"][..., :5].astype(float), file["y"].astype(float), file["edge_index"]
    T, N = y.shape
    M = means(adjacency(*edges, N))
    logs = np.log(x)
    growth = np.diff(logs)  # [T, N, 4]
    others = np.stack([M @ growth[t] for t in range(T)])
    whole = np.broadcast_to(growth.mean(1, keepdims=True), growth.shape)
    level = (logs[..., -1] - logs[..., -1].mean(1, keepdims=True))[..., None]
    X = np.concatenate([growth, others[..., -2:], whole, level], -1).reshape(T * N, -1)
    train = np.repeat(np.arange(T) < T - 2 * (T // 5), N)
    last, target = x[..., -1].ravel(), (np.log(y) - logs[..., -1]).ravel()
    result = {"last value": last, "last change": (2 * x[..., -1] - x[..., -2]).ravel()}
    result["last growth"] = last * np.exp(growth[..., -1].ravel())
    for rows, name in ((train, ""), (train & (np.arange(T * N) >= 20 * N), " after 1953")):
        for model, values in fitted(X, target, rows, False, f" of growth{name}").items():
            result[model] = last * np.exp(values)
        mean = np.exp(target[rows].mean())
        result[f"mean growth{name}"] = last * mean
    for years in (2, 4):
        result[f"growth of {years} years"] = last * np.exp(whole[..., -years:].mean(-1).ravel())
    return result
