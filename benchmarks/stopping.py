"""Which stopping rule to train GAT by, chosen on validation nodes alone: both, accuracy or loss (`training.criterion`).

    python benchmarks/stopping.py                      # the authors' form on Cora, Citeseer and Pubmed, ten seeds each
    python benchmarks/stopping.py --datasets cora --seeds 2 --max-epochs 5

Each rule keeps the weights that do best by its own measure on the validation nodes, so their scores there say nothing
about which rule is better. Here a rule sees one half of them and the weights that it keeps are scored on the other, and
the other way round; no test node is looked at. The rule with the best mean over all data sets is taken, for all alike.
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
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from training import NUMBERS

from gat_pyg import data, seeds
from gat_pyg.models import GAT
from gat_pyg.results import versions
from gat_pyg.run import keep_memory

RULES = ("both", "accuracy", "loss")


def halves(task: data.Task) -> Iterator[data.Task]:
    """The task with one half of its validation nodes to stop by and the other in place of the test nodes; both ways."""
    (graph,) = task.train
    nodes = graph.val_mask.nonzero().view(-1)
    nodes = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(0))]
    first = torch.zeros_like(graph.val_mask).index_fill(0, nodes[: nodes.numel() // 2], True)
    second = graph.val_mask & ~first
    for val, test in ((first, second), (second, first)):
        half = copy.copy(graph)
        half.val_mask, half.test_mask = val, test
        yield data.Task(task.name, [half], [half], [half], task.num_features, task.num_classes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", choices=list(NUMBERS), nargs="+", default=list(NUMBERS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-epochs", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    keep_memory()
    rows: list[dict[str, Any]] = []
    print("| data set | rule | on the half that it saw | **on the other half** | epochs |\n|---|---|---|---|---|")
    for name in options.datasets:
        make = partial(GAT.preset, name, reproduction=True)
        lr, weight_decay = NUMBERS[name]
        numbers = {"lr": lr, "weight_decay": weight_decay, "max_epochs": options.max_epochs, "progress": False}
        for rule in RULES:
            tasks = halves(data.planetoid(name))
            found = [
                run
                for half in tasks
                for run in seeds.train(make, half, range(options.seeds), criterion=rule, **numbers)[0]
            ]
            scores, seen = [run.value for run in found], [run.val for run in found]
            epochs = statistics.fmean(run.epochs for run in found)
            rows.append({"dataset": name, "rule": rule, "scores": scores, "seen": seen, "epochs": epochs})
            means = f"{statistics.fmean(seen):.2f} | **{statistics.fmean(scores):.2f}**"
            print(f"| {name} | {rule} | {means} | {epochs:.0f} |", flush=True)
    for rule in RULES:
        means = [statistics.fmean(row["scores"]) for row in rows if row["rule"] == rule]
        print(f"| all | {rule} | | **{statistics.fmean(means):.2f}** | |")
    record = {
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
