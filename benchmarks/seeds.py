"""Seconds of many seeds trained as one, beside the same runs one by one and PyG's layer in a bare loop.

    python benchmarks/seeds.py                         # 100 seeds of Cora, ten runs one by one, three of PyG's loop
    python benchmarks/seeds.py --dataset pubmed --seeds 20 --single 3 --bare 1
    python benchmarks/seeds.py --dataset cora --stacks 1 4 16 --epochs 30     # ms of a seed's epoch by the stack's size
    python benchmarks/seeds.py --dataset photo --settings 200                 # 32 settings as one, for 200 epochs each
    python benchmarks/seeds.py --dataset cora --settings 200 --weights        # their weights beside those of their runs

All train to the end by the paper's numbers and stopping rule. The command runs in processes of its own, as
`dataset=cora` and the like have; seconds are those of the whole process and of its Results, which leave out the
start, reading data and the test. A way counts where its mean test accuracy is as it has to be: within `--within` points
of that of the seeds trained as one. Peak memory is that of the process, resident or on the GPU. The file of results is
written anew after every way.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import Trainer

import machine
from gat_pyg.data.named import citation
from gat_pyg.models import GAT
from gat_pyg.runs.process import keep_memory
from gat_pyg.seeds import Member, Stacked, train
from gat_pyg.seeds.fitting import SINGLE, seeded
from gat_pyg.tasks.task import Task
from gat_pyg.training import Optimisation, PaperStopping, Resumable, Transductive
from gat_pyg.training.loading import TaskData, sparse_pays
from training import NUMBERS, PyGNet

LOWEST = {"cora": 80.0, "citeseer": 68.0, "pubmed": 75.0}  # of a mean test accuracy that the paper's numbers give


def command(name: str, seeds: int, *arguments: str, device: torch.device) -> dict[str, Any]:
    """The time and memory of the command for these seeds, and its results."""
    results, seconds, peak = machine.command(f"dataset={name}", f"runs={seeds}", *arguments, device=device)
    assert len(results) == seeds, results
    return {
        "seeds": seeds,
        "seconds": seconds,
        "training_seconds": sum(result["seconds"] for result in results),
        "epochs": statistics.fmean(result["epochs"] for result in results),
        "accuracies": [result["value"] for result in results],
        "peak_mib": peak,
    }


def bare(task: Task, seeds: int, max_epochs: int, patience: int, device: torch.device) -> dict[str, Any]:
    """PyG's layer in a loop as a script has it, with the paper's stopping rule."""
    (graph,) = TaskData(task).train_dataloader()
    graph = graph.to(device)
    lr, weight_decay = NUMBERS[task.name]
    accuracies, epochs, start = [], [], machine.now(device)
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = PyGNet(task).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
        rule = PaperStopping(patience, "accuracy" if task.name == "citeseer" else "both")
        while rule.left > 0 and rule.epoch < max_epochs:
            model.train()
            optimizer.zero_grad()
            out = model(graph.x, graph.edge_index)
            F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask]).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                out, y = model(graph.x, graph.edge_index)[graph.val_mask], graph.y[graph.val_mask]
                loss, accuracy = F.cross_entropy(out, y).item(), 100 * (out.argmax(-1) == y).double().mean().item()
            if rule.update(accuracy, loss):
                selected = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(selected)
        with torch.no_grad():
            right = (model(graph.x, graph.edge_index).argmax(-1) == graph.y)[graph.test_mask]
        accuracies.append(100 * right.double().mean().item())
        epochs.append(rule.epoch)
    seconds = machine.now(device) - start
    return {
        "seeds": seeds,
        "seconds": seconds,
        "training_seconds": seconds,
        "epochs": statistics.fmean(epochs),
        "accuracies": accuracies,
        "peak_mib": machine.process_peak(),
    }


RATES, DECAYS, DROPOUTS = (0.002, 0.005, 0.01, 0.02), (0.0, 1e-4, 5e-4, 1e-3), (0.4, 0.6)


def settings_as_one(name: str, epochs: int, more: Sequence[str], device: torch.device) -> dict[str, dict[str, Any]]:
    """The time and memory of 32 settings as one, one after the other in a process, and of a single one."""
    grid = {"training.lr": RATES, "training.weight_decay": DECAYS, "model.dropout": DROPOUTS}
    every = [f"{key}={','.join(map(str, values))}" for key, values in grid.items()]
    single = [f"{key}={values[-1]}" for key, values in grid.items()]
    fixed = [f"dataset={name}", f"training.max_epochs={epochs}", *more]
    ways = {
        "one run": single,
        "32 settings as one": ["-m", "hydra/launcher=stacked", *every, "vectorize=on"],
        "32 settings one by one": ["-m", *every, "vectorize=off"],
    }
    record: dict[str, dict[str, Any]] = {}
    print(
        f"{name}, {epochs} epochs\n| way | seconds | of training | times | test | peak MiB |\n|---|---|---|---|---|---|"
    )
    for way, arguments in ways.items():
        results, seconds, peak = machine.command(*arguments, *fixed, device=device)
        assert len(results) == (1 if way == "one run" else 32), results
        values = {
            "seconds": seconds,
            "training_seconds": sum(result["seconds"] for result in results),
            "epochs": statistics.fmean(result["epochs"] for result in results),
            "scores": [result["value"] for result in results],
            "peak_mib": peak,
        }
        record[way] = values
        times = [values[key] / record["one run"][key] for key in ("seconds", "training_seconds")]
        print(
            f"| {way} | {seconds:.1f} | {values['training_seconds']:.1f} | {times[0]:.1f}, training {times[1]:.1f} | "
            f"{statistics.fmean(values['scores']):.1f} | {peak:.0f} |",
            flush=True,
        )
    return record


def weights_apart(name: str, epochs: int) -> float:
    """The largest difference of a member's weights from those of its own run, in float64, relative to the largest."""
    task, differences = citation.planetoid(name), []
    grid = [
        dict(zip(("lr", "weight_decay", "dropout"), each, strict=True)) for each in product(RATES, DECAYS, DROPOUTS)
    ]
    options = {"max_epochs": epochs, "precision": "64-true", "accelerator": "cpu", **SINGLE}
    make = partial(GAT.preset, name)
    _, stack = train(make, task, [0], settings=grid, patience=None, progress=False, **options)
    for row, each in enumerate(grid):
        optimisation = Optimisation(each["lr"], each["weight_decay"])
        module = Transductive(seeded(0, partial(make, dropout=each["dropout"])), task.objective, optimisation)
        trainer = Trainer(callbacks=[PaperStopping(None), Resumable(None, 0)], **options)
        trainer.fit(module, datamodule=TaskData(task, sparse=sparse_pays(task, module.model)))
        pairs = zip(stack[row].parameters(), module.model.parameters(), strict=True)
        differences += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return max(differences)


def by_size(task: Task, sizes: Sequence[int], epochs: int, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds of a seed's epoch, a training step and a validation, in stacks of several sizes."""
    rows = []
    for size in sizes:
        models = [seeded(seed, lambda: GAT.preset(task.name)) for seed in range(size)]
        (graph,) = TaskData(
            task, sparse=sparse_pays(task, models[0], "cuda" if machine.on_gpu(device) else "cpu", stacked=True)
        ).train_dataloader()
        graph = graph.to(device)
        optimisation = Optimisation(*NUMBERS[task.name])
        module = Stacked(models, [Member(seed, task.objective, optimisation) for seed in range(size)]).to(device)
        optimizer = module.configure_optimizers()
        seconds = []
        for epoch in range(epochs + 2):  # the first two compile and find what is remembered
            start = machine.now(device)
            module.train()
            module.begin_epoch(0, epoch)
            optimizer.zero_grad()
            module._loss(graph)[0].backward()
            optimizer.step()
            module.eval()
            with torch.inference_mode():
                module._counts(graph, "val").tolist()
            seconds.append((machine.now(device) - start) / size)
        rows.append({"stack": size, "ms": 1e3 * statistics.median(seconds[2:])})
        print(f"| {size} | {rows[-1]['ms']:.2f} |", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cora", help="of --settings any; else one of cora, citeseer, pubmed")
    parser.add_argument("--settings", dest="settings_epochs", type=int, help="train 32 settings for so many epochs")
    parser.add_argument("--weights", action="store_true", help="with --settings, compare the weights of citation data")
    parser.add_argument("--seeds", type=int, default=100, help="trained as one")
    parser.add_argument("--single", type=int, default=10, help="runs one by one")
    parser.add_argument("--bare", type=int, default=3, help="runs of PyG's layer in a bare loop")
    parser.add_argument("--max-epochs", type=int, default=100_000)
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--within", type=float, default=2.0, help="points that mean accuracies may differ")
    parser.add_argument("--stacks", type=int, nargs="*", help="measure an epoch in stacks of these sizes instead")
    parser.add_argument("--epochs", type=int, default=30, help="with --stacks")
    parser.add_argument("--device", default=machine.DEFAULT, type=machine.device)
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("settings", nargs="*", help="more settings for the command, such as seeds_per_pass=20")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    keep_memory()  # as the command does, for all ways alike
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    name, device = options.dataset, options.device
    record: dict[str, Any] = {**machine.about(device), "dataset": name, "settings": options.settings}
    path = options.out or machine.results(f"{'settings' if options.settings_epochs else 'seeds'}-{name}", device)
    if options.settings_epochs:
        if options.weights:
            record["weights_apart"] = weights_apart(name, options.settings_epochs)
            print(f"largest relative difference of a weight: {record['weights_apart']:.1e}")
        record["ways"] = settings_as_one(name, options.settings_epochs, options.settings, device)
        machine.write(path, record)
        print(f"written to {path}")
        return 0
    task, status = citation.planetoid(name), 0
    if options.stacks:
        print(f"{task.name}, ms of a seed's epoch, median of {options.epochs}\n| stack | ms |\n|---|---|")
        record["stacks"] = by_size(task, options.stacks, options.epochs, device)
        machine.write(path, record)
    else:
        status = compare(task, options, record, path)
    print(f"written to {path}")
    return status


def compare(task: Task, options: argparse.Namespace, record: dict[str, Any], path: Path) -> int:
    """All ways; 1 where one's accuracy is not as it has to be."""
    limits = [f"training.max_epochs={options.max_epochs}", f"training.patience={options.patience}", *options.settings]
    device = options.device
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "trained as one": lambda: command(task.name, options.seeds, *limits, "vectorize=on", device=device)
    }
    if options.single:
        ways["one by one"] = lambda: command(task.name, options.single, *limits, "vectorize=off", device=device)
    if options.bare:
        numbers = options.bare, options.max_epochs, options.patience
        ways["bare loop, PyG's layer"] = lambda: bare(task, *numbers, device)
    record |= {"ways": {}, "wrong": []}
    print(f"{task.name}, to the end by the paper's rule")
    print("| way | seeds | seconds | seconds a seed | times | epochs | test accuracy | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for way, run in ways.items():
        record["ways"][way] = results = run()
        first, accuracies = record["ways"]["trained as one"], results["accuracies"]
        mean = statistics.fmean(first["accuracies"])
        if abs(statistics.fmean(accuracies) - mean) > options.within or mean < LOWEST[task.name] - options.within:
            record["wrong"].append(f"{way}: {statistics.fmean(accuracies):.1f} %")
        else:
            each = results["seconds"] / results["seeds"]
            deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            spread = f"{statistics.fmean(accuracies):.1f} ± {deviation:.1f}"
            results["times"] = each / (first["seconds"] / first["seeds"])
            print(
                f"| {way} | {results['seeds']} | {results['seconds']:.1f} | {each:.2f} | {results['times']:.1f} | "
                f"{results['epochs']:.0f} | {spread} | {results['peak_mib']:.0f} |",
                flush=True,
            )
        machine.write(path, record)
    for message in record["wrong"]:
        print(f"not as it has to be, and left out: {message}")
    return bool(record["wrong"])


if __name__ == "__main__":
    sys.exit(main())
