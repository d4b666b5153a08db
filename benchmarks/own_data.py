"""The first command on users' own data, without any setting of the training, beside trivial baselines.

    python benchmarks/own_data.py --data MORE                     # all kinds; MORE has ogb/ogbg_molesol and TUDataset
    python benchmarks/own_data.py --kinds fraud links --seeds 1

Each kind of data is written as a user's file, the command is run on it, and the baselines see the same split:

- `molecules`: 600 of the 1,128 molecules of ESOL (Delaney, 2004) with their solubility in log mol/l;
- `fraud`: 5,000 accounts and 25,000 transfers, 2 % frauds. A fraud receives from many accounts and sends to few; its
  own columns show little. The oldest accounts are for training, the newest for the test;
- `links`: 6,344 pairs of 400 users and 293 items by latent tastes and popularity;
- `traffic`: the speeds in km/h of 40 sensors along roads, 1,200 steps; the next step is predicted from the last six;
- `proteins`, `enzymes`: graphs with classes (Borgwardt et al., 2005) by PyG's class.

The settings that suit data were chosen with a look at the test scores of `--draw 0`. Other draws have other molecules,
generated data and splits.

`commands` in the result are exactly what was run; seconds are those of the whole command on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import gat_pyg
import machine
from gat_pyg.runs.result import read
from gat_pyg.runs.task import task_of
from gat_pyg.tasks.metrics import METRICS
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.task import Task

Scores = Mapping[str, float]

# The files ----------------------------------------------------------------------------------------------------------


def molecules(folder: Path, data: Path, draw: int) -> list[str]:
    """Write 600 molecules, and return the settings of the command that reads them."""
    with gzip.open(data / "ogb/ogbg_molesol/mapping/mol.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    random.Random(draw).shuffle(rows)
    with (folder / "molecules.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["smiles", "solubility"])
        writer.writerows(
            [row["smiles"].strip(), row["measured log solubility in mols per litre"]] for row in rows[:600]
        )
    return ["dataset=smiles", "dataset.path=molecules.csv", "dataset.target=solubility"]


def fraud(folder: Path, data: Path, draw: int) -> list[str]:
    """Write accounts and their transfers."""
    rng = np.random.default_rng(draw)
    N = 5000
    y = rng.permutation(N) < N // 50
    received, sent = (
        np.where(y, rng.poisson(18, N), rng.poisson(5, N)),
        np.where(y, rng.poisson(0.7, N), rng.poisson(5, N)),
    )
    src, dst = rng.permutation(np.repeat(np.arange(N), sent)), rng.permutation(np.repeat(np.arange(N), received))
    E = min(len(src), len(dst))
    opened = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 700, N), "D")
    accounts = pd.DataFrame(
        {
            "account": [f"A{number:05d}" for number in range(N)],
            "age": np.where(rng.random(N) < 0.05, np.nan, rng.integers(18, 80, N) - 6 * y),
            "balance": (rng.lognormal(7, 1, N) * np.where(y, 0.6, 1)).round(2),
            "country": rng.choice(["NO", "SE", "DK", "FI", "IS", "DE", "FR", "IT", "ES", "PT"], N),
            "kind": np.where(rng.random(N) < 0.3 + 0.2 * y, "business", rng.choice(["private", "joint", "youth"], N)),
            "opened": opened.strftime("%Y-%m-%d"),
            "fraud": np.where(y, "yes", "no"),
        }
    )
    names = accounts["account"].to_numpy()
    transfers = {
        "from_account": names[src[:E]],
        "to_account": names[dst[:E]],
        "amount": rng.lognormal(4, 1.5, E).round(2),
    }
    accounts.to_csv(folder / "nodes.csv", index=False)
    pd.DataFrame(transfers).to_csv(folder / "edges.csv", index=False)
    tables = ["dataset=tables", "dataset.nodes=nodes.csv", "dataset.edges=edges.csv", "dataset.target=fraud"]
    return [*tables, "split.time=opened"]


def links(folder: Path, data: Path, draw: int) -> list[str]:
    """Write pairs of users and items."""
    rng = np.random.default_rng(draw)
    users, items, K = 400, 293, 8
    tastes, kinds = rng.normal(size=(users, K)), rng.normal(size=(items, K))
    popular = rng.normal(size=(1, items)) * 0.8 + rng.normal(size=(users, 1)) * 0.5
    score = 1.6 * tastes @ kinds.T / np.sqrt(K) * 1.5 + popular + rng.gumbel(size=(users, items))
    chosen = np.argsort(-score, axis=None)[:6344]
    pairs = {"user": [f"u{pair // items}" for pair in chosen], "item": [f"i{pair % items}" for pair in chosen]}
    pd.DataFrame(pairs).to_csv(folder / "pairs.csv", index=False)
    return ["dataset=tables", "dataset.edges=pairs.csv"]


def traffic(folder: Path, data: Path, draw: int) -> list[str]:
    """Write steps of speeds."""
    rng = np.random.default_rng(draw)
    T, N, history = 1200, 40, 6
    base, noise = rng.uniform(50, 100, N), np.zeros(N)
    speeds, jam = np.zeros((T, N)), np.zeros(N)
    edges = np.array([(i, j) for i in range(N) for j in (i - 1, i + 1, i + 7) if 0 <= j < N]).T
    A = np.zeros((N, N))
    A[edges[1], edges[0]] = 1
    A /= A.sum(1, keepdims=True)
    for t in range(T):
        day = np.sin(2 * np.pi * t / 288)
        jam = 0.55 * jam + 0.4 * A @ jam + rng.normal(size=N) * 2 + (rng.random(N) < 0.01) * 15
        noise = 0.5 * noise + rng.normal(size=N)
        speeds[t] = base + 8 * day - jam + noise
    x = np.stack([speeds[step : T - history + step] for step in range(history)], -1)  # [T - 6, N, 6]
    np.savez(folder / "traffic.npz", x=x.astype("float32"), edge_index=edges, y=speeds[history:].astype("float32"))
    return ["dataset=file", "dataset.path=traffic.npz"]


def _of_tu(name: str) -> Callable[[Path, Path, int], list[str]]:
    def settings(folder: Path, data: Path, draw: int) -> list[str]:
        target = "dataset._target_=torch_geometric.datasets.TUDataset"
        return [target, f"+dataset.name={name}", "+dataset.use_node_attr=true", f"+dataset.root={data}/TUDataset"]

    return settings


KINDS = {
    **{"molecules": molecules, "fraud": fraud, "links": links, "traffic": traffic},
    **{"proteins": _of_tu("PROTEINS"), "enzymes": _of_tu("ENZYMES")},
}

# The baselines ------------------------------------------------------------------------------------------------------


def baselines(task: Task, kind: str) -> dict[str, float]:
    """Return the test scores of trivial baselines, by their names."""
    if task.objective.item == "link":
        return _of_links(task)
    if kind == "traffic":
        last = torch.cat([data.x[:, -1] for data in task.test])[:, None]
        extra = {"the last value": _score(task, last)}
    elif kind == "fraud":
        graph = task.test[0]
        degrees = graph.x[:, -2:]
        extra = _fitted(task, {split: degrees[graph[f"{split}_mask"]] for split in SPLITS}, " of two degrees")
    else:
        extra = {}
    features = {split: _rows(task, split) for split in SPLITS}
    return {"constant": task.constant[0], **extra, **_fitted(task, features, "")}


def _rows(task: Task, split: Any) -> Tensor:
    """Return the features of the labelled items: of nodes their own, of graphs sums and means over the nodes."""
    graphs = task.graphs(split)
    if task.objective.item == "node":
        rows = [data.x if task.has_many_graphs else data.x[data[f"{split}_mask"]] for data in graphs]
        return torch.cat(rows)
    categories = [int(max(data.x[:, column].max() for data in task.train)) + 1 for column in range(task.num_features)]
    whole = all(torch.equal(data.x, data.x.round()) for data in task.train)
    pooled = []
    for data in graphs:
        x = data.x
        if whole:
            columns = enumerate(categories)
            x = torch.cat([torch.nn.functional.one_hot(x[:, c].long().clamp(0, K - 1), K) for c, K in columns], 1)
        size = [float(len(x)), float(data.edge_index.size(1))]
        pooled.append(torch.cat([x.float().sum(0), x.float().mean(0), torch.tensor(size)]))
    return torch.stack(pooled)


def _fitted(task: Task, features: Mapping[str, Tensor], suffix: str) -> dict[str, float]:
    classes = task.objective.columns == "classes"
    y = task.labels("train").squeeze(-1).numpy()
    models: dict[str, Any] = {
        "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000) if classes else Ridge(1.0)),
        "forest": (RandomForestClassifier if classes else RandomForestRegressor)(300, random_state=0, n_jobs=1),
    }
    if len(y) > 20_000:
        models["forest"].set_params(n_estimators=20)
    scores = {}
    for name, model in models.items():
        model.fit(features["train"].numpy(), y)
        if classes:
            p = np.zeros((len(features["test"]), task.num_classes))
            p[:, model.classes_ if name == "forest" else model[-1].classes_] = model.predict_proba(
                features["test"].numpy()
            )
            out = torch.tensor(p).clamp(1e-9).log()
        else:
            out = torch.tensor(model.predict(features["test"].numpy()))[:, None]
        scores[f"{name}{suffix}"] = _score(task, out)
    return scores


def _score(task: Task, out: Tensor) -> float:
    """Return the score of predictions of the test items: log-probabilities, or quantities in their unit."""
    objective, y = task.objective, task.labels("test")
    if objective.columns != "classes":
        return float((out - y).square().mean().sqrt())
    if objective.metric.name == "accuracy":
        return 100 * float((out.argmax(1) == y).double().mean())
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(y, out[:, 1] - out[:, 0]))


def _of_links(task: Task) -> dict[str, float]:
    from sklearn.metrics import roc_auc_score

    graph = task.test[0]
    N = len(graph.x)
    A = torch.zeros(N, N, dtype=torch.float64)
    A[graph.edge_index[0], graph.edge_index[1]] = 1
    degree = A.sum(1)
    (src, dst), y = graph.edge_label_index[:, graph.test_mask], graph.y[graph.test_mask]
    B = A / degree.clamp(min=1).sqrt()[:, None] / degree.clamp(min=1).sqrt()
    scores = {"degree product": torch.outer(degree, degree), "paths of length 3": A @ A @ A}
    scores["normalised paths of length 3"] = B @ B @ B
    return {name: float(roc_auc_score(y, score[src, dst])) for name, score in scores.items()}


# ----------------------------------------------------------------------------------------------------------------------


def measure(kind: str, data: Path, folder: Path, draw: int, seeds: int, others: list[str]) -> dict[str, Any]:
    """Run the command on one kind of data, and return its scores and those of the baselines."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = KINDS[kind](folder, data.absolute(), draw)
    settings += [f"split.seed={draw}"] if kind not in ("fraud", "traffic") and draw else []  # which are split in time
    several = [f"runs={seeds}", *["vectorize=off"] * (seeds > 1)]
    command = [sys.executable, "-m", "gat_pyg.run", *settings, *several, *others]
    start = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(gat_pyg.__file__).parents[1])}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    print(run.stdout + run.stderr[-2000:], flush=True)
    if run.returncode:
        raise SystemExit(f"{kind} failed")
    results = read(folder / "outputs/results.jsonl")[-seeds:]
    metric = METRICS[results[0].metric]
    with contextlib.chdir(folder):
        task = task_of(results[0].run_dir)
    scores = baselines(task, kind)
    test = [result.value for result in results]
    best = max(scores.values(), key=metric.better)
    row = {
        "kind": kind,
        "command": " ".join(["gat-pyg", *settings, *others]),
        "metric": metric.name,
        "test": test,
        "mean": statistics.fmean(test),
        "baselines": scores,
        "reaches_best": metric.better(statistics.fmean(test)) >= metric.better(best),
        "seconds": [result.seconds for result in results],
        "command_seconds": seconds / seeds,
        "epochs": [result.epochs for result in results],
    }
    print(f"{kind}: {metric.title} {row['mean']:.3f} {[round(s, 3) for s in test]}, {seconds / seeds:.0f} s a run")
    print("   " + ", ".join(f"{name} {score:.3f}" for name, score in scores.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GAT_PYG_DATA", "data")))
    parser.add_argument("--folder", type=Path, default=Path("own_data"))
    parser.add_argument("--draw", type=int, default=1, help="seed of the data and of their split")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of the command")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [
        measure(kind, options.data, options.folder / kind, options.draw, options.seeds, options.settings)
        for kind in options.kinds
    ]
    if options.out:
        machine.write(options.out, {"draw": options.draw, "rows": rows})


if __name__ == "__main__":
    main()
