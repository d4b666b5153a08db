"""Tables of nodes and edges: messages of broken ones, seconds and memory of large ones, and no leak from the test rows.

    python benchmarks/tables.py broken                  # each broken table by the command: its message and seconds
    python benchmarks/tables.py speed                   # 10^6 edges and 10^5 nodes from CSV to the first epoch
    python benchmarks/tables.py leaks                   # scores with shuffled targets, bits of the trained weights

`broken` runs the command in a forked process for each table, so the seconds are those after the imports. It fails if a
message is not the one that is due, or if the run leaves a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

import machine
from broken_tables import Broken, broken_tables, large_tables

# Broken tables --------------------------------------------------------------------------------------------------------


def forked(run: Callable[[], Any], log: Path) -> tuple[int, float]:
    """Exit status and seconds of a call in a forked process that prints to a file."""

    def child() -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        run()

    process = multiprocessing.get_context("fork").Process(target=child)
    begin = time.perf_counter()
    process.start()
    process.join()
    return process.exitcode or 0, time.perf_counter() - begin


def command(*settings: str) -> None:
    from gat_pyg.run import main

    sys.argv = ["gat-pyg", *settings]
    main()


def broken(options: argparse.Namespace, record: dict[str, Any], save: Callable[[], None]) -> bool:
    """Print the message and the seconds of every broken table."""
    import gat_pyg.sweeps.job  # noqa: F401 (before the forks)

    record["rows"] = []
    tables = [(40, item) for item in broken_tables().items()]
    tables += [(options.rows, item) for item in large_tables(options.rows).items()] if options.rows else []
    for rows, (name, table) in tables:
        with tempfile.TemporaryDirectory() as folder:
            paths = write(table, Path(folder))
            arguments = [f"dataset.{key}={path}" for key, path in zip(("nodes", "edges"), paths, strict=True)]
            run = ("dataset=tables", *arguments, "dataset.target=fraud", f"outputs={folder}/outputs")
            status, seconds = forked(lambda run=run: command(*run), Path(folder, "log"))
            message = Path(folder, "log").read_text().strip().replace(f"{folder}/", "")
            left = [str(path) for path in Path(folder, "outputs").rglob("*")]
        is_right = status == 1 and table.message in message and "Traceback" not in message and not left
        row = {"name": name, "rows": rows, "message": message, "seconds": round(seconds, 2), "files": len(left)}
        record["rows"].append(row | {"is_right": is_right})
        save()
        print(f"{'' if is_right else 'WRONG '}{name}, {rows:,} rows, {seconds:.2f} s: {message}", flush=True)
    return all(row["is_right"] for row in record["rows"])


def write(table: Broken, folder: Path) -> list[Path]:
    for name, content in table.files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in table.files]


# Speed ----------------------------------------------------------------------------------------------------------------


def generated(nodes: int, edges: int, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Accounts with string ids, three categorical columns, missing values and dates, and payments between them."""
    draw = np.random.default_rng(seed)
    ids = np.char.add("A", draw.permutation(10 * nodes)[:nodes].astype(str))
    amounts = draw.lognormal(3, 1, (nodes, 3)).round(2)
    amounts[draw.random((nodes, 3)) < 0.05] = np.nan
    days = pd.Timestamp("2023-01-01") + pd.to_timedelta(draw.integers(0, 700, nodes), unit="D")
    frame = {
        "account": ids,
        **{f"amount{k}": amounts[:, k] for k in range(3)},
        "country": draw.choice(["NO", "IT", "FR", "DE", "ES"], nodes),
        "plan": draw.choice(["free", "pro", "team"], nodes),
        "channel": draw.choice(["web", "shop", "phone", None], nodes),
        "opened": days.strftime("%Y-%m-%d"),
        "fraud": draw.choice(["no", "yes"], nodes, p=[0.98, 0.02]),
    }
    ends = {"payer": draw.choice(ids, edges), "payee": draw.choice(ids, edges)}
    payments = ends | {"amount": draw.lognormal(3, 1, edges).round(2), "kind": draw.choice(["card", "cash"], edges)}
    return pd.DataFrame(frame), pd.DataFrame(payments)


def steps(begin: float, *settings: str) -> None:
    """Run the command, and print the seconds since `begin` and the MiB at the peak after each step as JSON."""
    import gat_pyg.runs.defaults_by_data as suited
    import gat_pyg.sweeps.job  # noqa: F401 (all imports)

    reader: Any = sys.modules["gat_pyg.data.tables.files"]
    seen: dict[str, Any] = {}

    def passed(name: str) -> None:
        seen[name] = {"seconds": round(time.perf_counter() - begin, 2), "MiB": round(machine.process_peak())}

    def noted(call: Callable[..., Any], end: str, start: str | None = None) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if start is not None:
                passed(start)
            result = call(*arguments, **options)
            passed(end)
            return result

        return run

    passed("imported")
    reader.read_table = noted(reader.read_table, "tables read")
    suited.read_data = noted(suited.read_data, "encoded")
    lightning.Trainer.fit = noted(lightning.Trainer.fit, "epoch ended", "epoch began")
    try:
        command(*settings)
    finally:
        passed("ended")
        print(json.dumps(seen))


def speed(options: argparse.Namespace, record: dict[str, Any], save: Callable[[], None]) -> bool:
    """Print the seconds and the memory of each step from the files to the end of the first epoch."""
    frames = generated(options.nodes, options.edges)
    record["rows"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in options.forms:
            paths = [Path(folder, f"{name}.{form}") for name in ("nodes", "edges")]
            for frame, path in zip(frames, paths, strict=True):
                frame.to_parquet(path) if form == "parquet" else frame.to_csv(path, index=False)
            record["MB"] = {path.name: round(path.stat().st_size / 1e6, 1) for path in paths} | record.get("MB", {})
            for number in range(options.rounds):
                run = [
                    sys.executable,
                    __file__,
                    "steps",
                    str(time.perf_counter()),
                    "dataset=tables",
                ]
                run += [f"dataset.{key}={path}" for key, path in zip(("nodes", "edges"), paths, strict=True)]
                run += ["dataset.target=fraud", "training.max_epochs=1", f"outputs={folder}/{form}{number}"]
                ran = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
                row = json.loads(ran.stdout.splitlines()[-1])
                record["rows"].setdefault(form, []).append(row)
                save()
                print(
                    form, *(f"{name} {at['seconds']:.1f} s {at['MiB']:,} MiB;" for name, at in row.items()), flush=True
                )
    return True


# Leaks ----------------------------------------------------------------------------------------------------------------

PARTS = ["train"] * 6 + ["val"] * 2 + ["test"] * 2  # of ten rows; no edge ends in the test and in another part
Files = dict[str, Any]  # frames by the names of their files, arrays by theirs


class Case(NamedTuple):
    """Generated files with a signal, the settings of the command, and the file and the column of the targets."""

    files: Callable[..., Files]  # of a generator of random numbers, and optionally a size
    settings: tuple[str, ...]
    file: str
    target: str

    def shuffle(self, files: Files, draw: np.random.Generator) -> None:
        """Permute the targets."""
        content = files[self.file]
        if isinstance(content, list):
            labels = draw.permutation([graph["graph"][self.target] for graph in content])
            for graph, label in zip(content, labels.tolist(), strict=True):
                graph["graph"][self.target] = label
            return
        y = np.asarray(content[self.target])
        content[self.target] = draw.permutation(y.ravel()).reshape(y.shape)

    def change(self, files: Files, draw: np.random.Generator, features: bool = True) -> None:
        """Replace the targets of the test rows; with `features`, also theirs, by what no other row has."""
        content = files[self.file]
        if isinstance(content, list):
            for graph in content:
                if graph["graph"]["part"] == "test":
                    graph["graph"][self.target] = {"yes": "no", "no": "yes"}[graph["graph"][self.target]]
                    for node in graph["nodes"] if features else ():
                        node.update(kind="unseen", size=1000 * node["size"])
                    graph["links"] = graph["links"][features:]
            return
        if isinstance(content, dict):
            test = content["test_mask"]
            content[self.target][test] *= -3
            if features:
                content["x"][test] = 1000 * draw.normal(size=content["x"][test].shape)
            return
        test = (content["part"] == "test").to_numpy()
        for name in content.columns.difference(["id", "src", "dst", "user", "item", "part"]):
            values = content.loc[test, name]
            if name == self.target:
                numeric = values.dtype.kind == "f"
                content.loc[test, name] = values * -300 if numeric else draw.permutation(values)
            elif features:
                content.loc[test, name] = unseen(name, values)


def unseen(name: str, values: pd.Series) -> Any:
    """Return values that no other row has: large numbers, later dates, new categories and atoms."""
    if name == "smiles":
        return "[Si]" + values
    if values.dtype.kind == "M":
        return pd.Timestamp("2099-12-31")
    return values * -300 if values.dtype.kind in "if" else "unseen"


def graph(draw: np.random.Generator, nodes: int = 1000) -> Files:
    """Nodes and edges with features, a class and a quantity each; the part of an edge is that of both its ends."""
    names, edges = np.char.add("A", np.arange(nodes).astype(str)), 4 * nodes
    x, part = draw.normal(size=nodes), np.resize(PARTS, nodes)
    is_test = part == "test"
    src = draw.integers(0, nodes, edges)
    dst = np.where(
        is_test[src], draw.choice(np.flatnonzero(is_test), edges), draw.choice(np.flatnonzero(~is_test), edges)
    )
    total = x + np.bincount(dst, x[src], nodes) / np.maximum(np.bincount(dst, minlength=nodes), 1)
    amount = draw.normal(size=edges)
    of_nodes = {
        "id": names,
        "amount": np.where(draw.random(nodes) < 0.05, np.nan, x),
        "sign": np.where(draw.random(nodes) < 0.1, None, np.where(x > 0, "plus", "minus")),
        "opened": pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 300, nodes), unit="D"),
        "kind": np.where(total > 0, "high", "low"),
        "total": total,
        "part": part,
    }
    of_edges = {
        **{"src": names[src], "dst": names[dst], "amount": amount},
        "disputed": np.where(amount + x[src] > 0, "yes", "no"),
        "part": np.where(is_test[src], "test", np.resize(["train", "train", "val"], edges)),
    }
    return {"nodes.csv": pd.DataFrame(of_nodes), "edges.csv": pd.DataFrame(of_edges)}


def ratings(draw: np.random.Generator, pairs: int = 4000) -> Files:
    """Pairs of users and items that like the same of four subjects, with stars."""
    user, item = draw.integers(0, 10 + pairs // 20, 8 * pairs), draw.integers(0, 10 + pairs // 40, 8 * pairs)
    likes = np.flatnonzero((user % 4 == item % 4) | (draw.random(8 * pairs) < 0.05))[:pairs]
    stars = draw.integers(1, 6, len(likes))
    frame = pd.DataFrame({"user": user[likes], "item": item[likes], "stars": stars}).drop_duplicates(["user", "item"])
    ids = {"user": "u" + frame["user"].astype(str), "item": "i" + frame["item"].astype(str)}
    return {"edges.csv": frame.assign(**ids, part=np.resize(PARTS, len(frame)))}


def molecules(draw: np.random.Generator, count: int = 500) -> Files:
    """Chains of atoms with branches, and a count of their atoms of each kind as a quantity."""
    parts = ["C", "N", "O", "S", "C(F)", "C(=O)", "C(C)C", "c1ccccc1"]
    chains = [draw.choice(len(parts), draw.integers(3, 9)) for _ in range(count)]
    worth = np.array([0.1, 1.0, 2.0, 0.5, -1.0, 1.5, -0.5, -2.0])
    table = {"smiles": ["C" + "".join(parts[k] for k in chain) for chain in chains]}
    return {
        "data.csv": pd.DataFrame(
            table | {"y": [worth[chain].sum() for chain in chains], "part": np.resize(PARTS, count)}
        )
    }


def series(draw: np.random.Generator, steps: int = 300, sensors: int = 20) -> Files:
    """Sensors on a ring whose next value is the mean of their neighbours' last ones, in three parts by time."""
    values = np.zeros((steps + 4, sensors))
    for step in range(1, steps + 4):
        last = values[step - 1]
        values[step] = 0.45 * (np.roll(last, 1) + np.roll(last, -1)) + draw.normal(size=sensors)
    ring = np.arange(sensors)
    edge_index = np.concatenate([np.stack([ring, (ring + 1) % sensors]), np.stack([(ring + 1) % sensors, ring])], 1)
    x = np.stack([values[lag : steps + lag] for lag in range(3)], 2).astype(np.float32)
    part = np.sort(np.resize([0] * 6 + [1] * 2 + [2] * 2, steps))
    masks = {f"{name}_mask": part == k for k, name in enumerate(("train", "val", "test"))}
    return {"series.npz": {"x": x, "y": values[3 : steps + 3].astype(np.float32), "edge_index": edge_index, **masks}}


def graphs(draw: np.random.Generator, count: int = 300) -> Files:
    """Rings of nodes with a number and a kind; the class of a graph is whether most nodes are of the first kind."""
    result = []
    for number in range(count):
        N = int(draw.integers(4, 9))
        kinds = draw.choice(["a", "b"], N)
        label = "yes" if (kinds == "a").sum() > N / 2 else "no"
        nodes = [{"id": i, "kind": str(kind), "size": float(draw.normal())} for i, kind in enumerate(kinds)]
        links = [{"source": i, "target": (i + 1) % N} for i in range(N)]
        result.append({"graph": {"label": label, "part": PARTS[number % len(PARTS)]}, "nodes": nodes, "links": links})
    return {"graphs.json": result}


# without batch norm, whose mean and variance are over all nodes of a graph, those of the test too
TABLES = ("dataset=tables", "split.column=part")
GRAPH = (*TABLES, "dataset.nodes=nodes.csv", "dataset.edges=edges.csv")
CASES = {
    "node classes": Case(graph, (*GRAPH, "dataset.target=kind", "dataset.ignore=[total]"), "nodes.csv", "kind"),
    "quantities of nodes": Case(graph, (*GRAPH, "dataset.target=total", "dataset.ignore=[kind]"), "nodes.csv", "total"),
    "edge classes": Case(
        graph, (*GRAPH, "dataset.target=disputed", "dataset.ignore=[kind,total]"), "edges.csv", "disputed"
    ),
    "links": Case(ratings, (*TABLES, "dataset.edges=edges.csv", "model.encoder=32"), "edges.csv", "item"),
    "molecules": Case(
        molecules, ("dataset=smiles", "dataset.path=data.csv", "dataset.target=y", "split.column=part"), "data.csv", "y"
    ),
    "graph classes": Case(
        graphs, (*TABLES, "dataset.graph=graphs.json", "dataset.target=label"), "graphs.json", "label"
    ),
    "series": Case(series, ("dataset=file", "dataset.path=series.npz"), "series.npz", "y"),
}


def save_files(files: Files, folder: Path) -> None:
    for file, content in files.items():
        if isinstance(content, list):
            (folder / file).write_text(json.dumps(content))
        elif isinstance(content, dict):
            np.savez(folder / file, **content)
        else:
            content.to_csv(folder / file, index=False)


def trained(case: Case, files: Files, *settings: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line of results and the weights of a training by the command, in a forked process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_files(files, folder)
        settings = (*case.settings, "outputs=outputs", "baselines=false", *settings)

        def run() -> None:
            os.chdir(folder)
            command(*settings)

        status, _ = forked(run, folder / "log")
        if status:
            raise RuntimeError(f"gat-pyg {' '.join(settings)}: {(folder / 'log').read_text()[-2000:]}")
        (line,) = (folder / "outputs/results.jsonl").read_text().splitlines()
        (model,) = (folder / "outputs").rglob("model.safetensors")
        return json.loads(line), load_file(model)


def leaks(options: argparse.Namespace, record: dict[str, Any], save: Callable[[], None]) -> bool:
    """Print the test score, with shuffled targets beside chance, and the weights that the test rows change."""
    import gat_pyg.sweeps.job  # noqa: F401 (before the forks)

    record["rows"] = {}
    print("| | score | shuffled | chance | weights changed by test rows |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        if name not in options.cases:
            continue
        same = {}
        for change in (None, case.shuffle, case.change):
            draw = np.random.default_rng(0)
            files = case.files(draw)
            if change is not None:
                change(files, draw)
            epochs = [f"training.max_epochs={options.max_epochs}"] if options.max_epochs else []
            same[change] = trained(case, files, *epochs)
        (plain, weights), (shuffled, _), (changed, others) = same.values()
        differing = sum(not torch.equal(weights[key], others[key]) for key in weights)
        row = {
            "metric": plain["metric"],
            "score": plain["value"],
            "shuffled": shuffled["value"],
            "chance": shuffled["majority"],
            "standard_error": shuffled["standard_error"],
            "score with other test rows": changed["value"],
            "weights": len(weights),
            "differing": differing,
        }
        record["rows"][name] = row
        save()
        chance = "" if row["chance"] is None else f"{row['chance']:.3f} ± {row['standard_error']:.3f}"
        print(
            f"| {name}, {row['metric']} | {row['score']:.3f} | {row['shuffled']:.3f} | {chance} "
            f"| {differing} of {len(weights)} |",
            flush=True,
        )
    return all(row["differing"] == 0 for row in record["rows"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = parser.add_subparsers(dest="what", required=True)
    of_broken, of_speed, of_leaks = (whats.add_parser(name) for name in ("broken", "speed", "leaks"))
    of_broken.add_argument("--rows", type=int, default=1_000_000, help="of the large tables; 0 for none")
    of_speed.add_argument("--nodes", type=int, default=100_000)
    of_speed.add_argument("--edges", type=int, default=1_000_000)
    of_speed.add_argument("--rounds", type=int, default=3)
    of_speed.add_argument("--forms", nargs="+", default=["csv", "parquet"])
    of_leaks.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    of_leaks.add_argument("--max-epochs", type=int, help="instead of the command's default")
    for each in (of_broken, of_speed, of_leaks):
        each.add_argument("--out", type=Path, help="the JSON file, instead of one in $OUT or results")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    path = options.out or machine.results(f"tables-{options.what}", device)
    used = {name: value for name, value in vars(options).items() if name not in ("out", "what")}
    record: dict[str, Any] = {**machine.about(device), "options": used}
    run = {"broken": broken, "speed": speed, "leaks": leaks}[options.what]
    return 0 if run(options, record, lambda: machine.write(path, record)) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["steps"]:
        steps(float(sys.argv[2]), *sys.argv[3:])
    else:
        sys.exit(main())
