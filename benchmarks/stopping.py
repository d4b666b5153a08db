"""The choice of a stopping rule for GAT, on validation nodes alone: both, accuracy or loss (`training.criterion`).

    python benchmarks/stopping.py                      # the authors' form on Cora, Citeseer and Pubmed, ten seeds each
    python benchmarks/stopping.py --datasets cora --seeds 2 --max-epochs 5
    python benchmarks/stopping.py --datasets ppi --seeds 1 --precision bf16-mixed

Each rule keeps the weights that do best by its own measure on the validation nodes, so their scores there say nothing
about which rule is better. Here a rule sees one half of them and the weights that it keeps are scored on the other, and
the other way round; no test node is looked at. The rule with the best mean over the data sets asked for is taken, for
all of them alike: one for the citation graphs, and one for PPI, which is trained otherwise.
The halves of PPI are its two validation graphs. Rules do not change what is learnt, so there one training serves all.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch_geometric.data import Data

from gat_pyg.data.named import citation, proteins
from gat_pyg.models import GAT
from gat_pyg.runs.process import keep_memory
from gat_pyg.runs.result import versions
from gat_pyg.seeds import fitting
from gat_pyg.tasks.task import Task
from gat_pyg.training import Inductive, Optimisation, PaperStopping
from gat_pyg.training.loading import TaskData
from training import NUMBERS

RULES = ("both", "accuracy", "loss")


@dataclass
class Run:
    """The result of a rule."""

    value: float  # on the half that it did not see, in percent
    val: float  # on the one that it saw
    epochs: int


def halves(task: Task) -> Iterator[Task]:
    """The task with one half of its validation nodes to stop by and the other in place of the test nodes; both ways."""
    (graph,) = task.train
    nodes = graph.val_mask.nonzero().view(-1)
    nodes = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(0))]
    first = torch.zeros_like(graph.val_mask).index_fill(0, nodes[: nodes.numel() // 2], True)
    second = graph.val_mask & ~first
    for val, test in ((first, second), (second, first)):
        half = copy.copy(graph)
        half.val_mask, half.test_mask = val, test
        yield Task(task.name, [half], [half], [half], task.num_features, task.objective)


class EachRule(Callback):
    """Every rule, by each of two validation graphs and scored on the other; the training ends with the last of them."""

    def __init__(self, graphs: Sequence[Data]) -> None:
        self.graphs = graphs
        self.rules = {(rule, by): PaperStopping(criterion=rule) for rule, by in product(RULES, range(2))}
        self.value = dict.fromkeys(self.rules, float("nan"))

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.eval()
        sums = [module.objective.statistics(module(graph), graph.y).tolist() for graph in self.graphs]
        output = [(loss / max(size, 1.0), module.objective.score([loss, size, *rest])) for loss, size, *rest in sums]
        module.train()
        for (rule, by), stopping in self.rules.items():
            (loss, score), (_, other) = output[by], output[1 - by]
            if stopping.left > 0 and stopping.update(score, loss):
                self.value[rule, by] = other
        trainer.should_stop = all(stopping.left <= 0 for stopping in self.rules.values())

    def runs(self, rule: str) -> list[Run]:
        ways = [(self.value[rule, by], self.rules[rule, by]) for by in range(2)]
        return [Run(100 * value, 100 * stopping.kept_score, stopping.epoch) for value, stopping in ways]


def on_graphs(task: Task, seed: int, max_epochs: int, precision: Any) -> EachRule:
    """Train the authors' form on whole graphs, as on PPI, until every rule has stopped."""
    seed_everything(seed, verbose=False)
    rules = EachRule(task.val)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        precision=precision,
        callbacks=[rules],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(
        Inductive(GAT.preset("ppi", reproduction=True), task.objective),
        datamodule=TaskData(task, batch_size=2),
    )
    return rules


def on_nodes(name: str, rule: Any, options: argparse.Namespace) -> list[Run]:
    """Train the authors' form on a citation graph by a rule, with each seed and both ways."""
    lr, weight_decay = NUMBERS[name]
    make = partial(GAT.preset, name, reproduction=True)
    numbers = {"optimisation": Optimisation(lr, weight_decay), "max_epochs": options.max_epochs, "progress": False}
    results = [
        run
        for half in halves(citation.planetoid(name))
        for run in fitting.train(make, half, range(options.seeds), criterion=rule, **numbers)[0]
    ]
    return [Run(run.value, run.val, run.epochs) for run in results]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", choices=[*NUMBERS, "ppi"], nargs="+", default=list(NUMBERS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-epochs", type=int, default=100_000)
    parser.add_argument("--precision", default="32-true", help="Lightning's, for PPI")
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    keep_memory()
    rows: list[dict[str, Any]] = []
    print("| data set | rule | on the half that it saw | **on the other half** | epochs |\n|---|---|---|---|---|")
    for name in options.datasets:
        if name == "ppi":
            task = proteins.ppi()
            trained = [on_graphs(task, seed, options.max_epochs, options.precision) for seed in range(options.seeds)]
        for rule in RULES:
            if name == "ppi":
                results = [run for rules in trained for run in rules.runs(rule)]
            else:
                results = on_nodes(name, rule, options)
            scores, seen = [run.value for run in results], [run.val for run in results]
            epochs = statistics.fmean(run.epochs for run in results)
            rows.append({"dataset": name, "rule": rule, "scores": scores, "seen": seen, "epochs": epochs})
            means = f"{statistics.fmean(seen):.2f} | **{statistics.fmean(scores):.2f}**"
            print(f"| {name} | {rule} | {means} | {epochs:.0f} |", flush=True)
    for rule in RULES:
        means = [statistics.fmean(row["scores"]) for row in rows if row["rule"] == rule]
        print(f"| all | {rule} | | **{statistics.fmean(means):.2f}** | |")
    record = {
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "precision": options.precision,
        "versions": versions(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
