"""Average precision on a generated graph where 2 % of the nodes are positive, by the weights of the loss.

    python benchmarks/unbalanced.py                    # five graphs of 20,000 nodes, three seeds of GAT each
    python benchmarks/unbalanced.py --graphs 1 --seeds 1 --nodes 2000 --max-epochs 5

The probability of each node is known: a logistic function of its own features and of the mean of its neighbours'. No
ranking of the test nodes has a higher expected average precision than that by this probability, the best score here.
Beside GAT with each loss are logistic regression and gradient boosting of scikit-learn, which see the features of a
node alone. GAT has a hidden layer of 4 × 16, skip connections and no dropout; it stops by validation score and loss. F1
and balanced accuracy are those of the nodes with a predicted probability above 1/2. A quarter of the nodes each is for
validation and test. Scores are means over the seeds, then mean ± standard deviation over the graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import scatter, to_undirected

import machine
from gat_pyg.models import GAT
from gat_pyg.runs.process import keep_memory
from gat_pyg.seeds import fitting
from gat_pyg.tasks.metrics import AVERAGE_PRECISION
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS
from gat_pyg.tasks.task import Task
from gat_pyg.training import Optimisation

F, DEGREE, SHARE = 8, 6, 0.02
OWN, NEIGHBOURS = 1.5, 5.0  # of the log-odds, for features and means of features with a standard deviation of 1
BY_THRESHOLD = {"f1": f1_score, "balanced_accuracy": balanced_accuracy_score}
LOSSES: dict[str, dict[str, Any]] = {
    "cross-entropy": {},
    "pos_weight=7": {"pos_weight": 7.0},
    "pos_weight=balanced": {"pos_weight": "balanced"},
    "focal=2": {"focal": 2.0},
    "pos_weight=balanced, focal=2": {"pos_weight": "balanced", "focal": 2.0},
    "label_smoothing=0.05": {"label_smoothing": 0.05},
    "two classes, class_weight=balanced": {"class_weight": "balanced"},
}
REGRESSIONS: dict[str, Callable[[], Any]] = {
    "logistic regression": lambda: LogisticRegression(max_iter=1000),
    "logistic regression, balanced": lambda: LogisticRegression(max_iter=1000, class_weight="balanced"),
    "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    "gradient boosting, balanced": lambda: HistGradientBoostingClassifier(random_state=0, class_weight="balanced"),
}


def generated(nodes: int, seed: int) -> tuple[Data, Tensor]:
    """A graph with labels `[N]` of 0 and 1 and masks, and the probability of each node's 1."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, F, generator=draw)
    edge_index = to_undirected(torch.randint(nodes, (2, nodes * DEGREE // 2), generator=draw), num_nodes=nodes)
    own, of_neighbours = torch.nn.functional.normalize(torch.randn(2, F, generator=draw)) @ x.t()
    mean = scatter(of_neighbours[edge_index[0]], edge_index[1], dim_size=nodes, reduce="mean")
    log_odds = (OWN * own + NEIGHBOURS * mean).double()
    low, high = -50.0, 50.0
    for _ in range(60):  # the intercept with this mean probability
        bias = (low + high) / 2
        low, high = (bias, high) if (log_odds + bias).sigmoid().mean() < SHARE else (low, bias)
    p = (log_odds + bias).sigmoid()
    split = torch.randperm(nodes, generator=draw) * 4 // nodes
    masks = dict(zip(MASKS, (split < 2, split == 2, split == 3), strict=True))
    return Data(x, edge_index, y=torch.bernoulli(p, generator=draw).long(), **masks), p


def scores(data: Data, p: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """Scores of probabilities or other values `[N]` on the test nodes."""
    y, p = data.y[data.test_mask].numpy(), p[data.test_mask].numpy()
    by_threshold = {name: float(score(y, p > threshold)) for name, score in BY_THRESHOLD.items()}
    return {"average_precision": float(average_precision_score(y, p)), **by_threshold}


def rows(data: Data, p: Tensor, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the scores of the generating probability, and of each method on one graph."""
    yield "the generating probability", scores(data, p)
    train = data.train_mask.numpy()
    for name, make in REGRESSIONS.items():
        model = make().fit(data.x.numpy()[train], data.y.numpy()[train])
        yield name, scores(data, torch.from_numpy(model.predict_proba(data.x.numpy())[:, 1]))
    for name, loss in LOSSES.items():
        graph, K = data.clone(), 2 if "class_weight" in loss else 1
        graph.y = data.y if K == 2 else data.y[:, None].float()
        objective = NodeLabels(2, AVERAGE_PRECISION) if K == 2 else NodeMultiLabels(1, AVERAGE_PRECISION)
        task = Task("unbalanced", [graph], [graph], [graph], F, objective).with_loss(**loss)
        outcomes, stack = fitting.train(
            lambda K=K: GAT(F, [16], K, heads=[4, 1], residual=[True, True]),
            task,
            range(options.seeds),
            optimisation=Optimisation(lr=0.01),
            patience=options.patience,
            max_epochs=options.max_epochs,
            progress=False,
        )
        with torch.no_grad():
            outs = stack(graph.x, graph.edge_index)  # [S, N, K]
        each = [scores(data, out[:, -1] - (out[:, 0] if K == 2 else 0.0), 0.0) for out in outs]
        means = {key: statistics.fmean(score[key] for score in each) for key in each[0]}
        yield f"GAT, {name}", means | {"epochs": statistics.fmean(outcome.epochs for outcome in outcomes)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--patience", type=int, default=30)
    parser.add_argument("--max-epochs", type=int, default=300)
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in $OUT or results")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    keep_memory()
    device = torch.device("cpu")
    path = options.out or machine.results("unbalanced", device)
    used = {name: value for name, value in vars(options).items() if name != "out"}
    record: dict[str, Any] = {**machine.about(device), "options": used, "rows": {}}
    for number in range(options.graphs):
        data, p = generated(options.nodes, number)
        for name, values in rows(data, p, options):
            record["rows"].setdefault(name, []).append(values)
            machine.write(path, record)
    keys = ("average_precision", *BY_THRESHOLD)
    print(f"| | {' | '.join(keys)} | epochs |\n|{'---|' * (len(keys) + 2)}")
    for name, values in record["rows"].items():
        cells = []
        for key in keys:
            each = [value[key] for value in values]
            spread = f" ± {statistics.stdev(each):.3f}" if len(each) > 1 else ""
            cells.append(f"{statistics.fmean(each):.3f}{spread}")
        epochs = f"{statistics.fmean(value['epochs'] for value in values):.0f}" if "epochs" in values[0] else ""
        print(f"| {name} | {' | '.join(cells)} | {epochs} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
