"""What explanations of GAT are worth: edges that are known to matter, and predictions without the strongest edges.

    python benchmarks/explanations.py --data MORE          # MORE has Planetoid, Amazon and TUDataset
    python benchmarks/explanations.py --cases house --items 4 --epochs 20

- `house`: PyG's `ExplainerDataset`, a Barabási-Albert graph of 300 nodes with 80 houses; the classes are the places in
  a house, the features the one-hot degree. The true edges of a node are the six of its house;
- `infection`: PyG's `InfectionDataset`, Erdős-Rényi graphs of 500 nodes, the classes are the number of steps to the
  nearest of 50 infected nodes, up to 3. The true edges are those on the shortest paths;
- `cora`: test nodes of Planetoid's split; `photo`: four nodes of Amazon Photo, whose receptive fields are large;
  `mutag`: molecules of a drawn test set. No true edges are known.
- `table`: the command on tables of 600 accounts, a tenth of them shell companies, and 1,500 transfers. A fraud has
  dealt with a shell company; the true edge is that to it. `gat_pyg.explain` with k = 1 explains frauds of the test that
  have dealt with one shell company and at least two others. The first explanation is printed and drawn.

Explained are items that the model predicts right. The kinds are PyG's `AttentionExplainer`, the four of
`gat_pyg.explain`, and random masks. `auroc` orders the edges of a receptive field by the mask against the true ones
(PyG's `groundtruth_metrics`). `removed` and `alone` are the mean probability without the k strongest edges and with
these alone (`gat_pyg.models.explainers.removal`), of random masks the mean of 20. `fidelity` and `unfaithfulness` are
PyG's, of the mask that is 1 at the k strongest edges. Seconds are those of one of the first five items, with our layers
and with PyG's of the same weights, whose masks differ by `difference` at most.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import Amazon, ExplainerDataset, InfectionDataset, Planetoid, TUDataset
from torch_geometric.datasets.graph_generator import BAGraph, ERGraph
from torch_geometric.explain import AttentionExplainer, Explainer, ExplainerAlgorithm, GNNExplainer
from torch_geometric.explain.algorithm import DummyExplainer
from torch_geometric.explain.metric import fidelity, groundtruth_metrics, unfaithfulness
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import degree, k_hop_subgraph

import gat_pyg
import machine
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.models import GAT, Readout
from gat_pyg.models.explainers import (
    FlowExplainer,
    GradientExplainer,
    OcclusionExplainer,
    by_relation,
    relations,
    removal,
)

KINDS: dict[str, Callable[[int], ExplainerAlgorithm]] = {
    "attention, PyG's maximum": lambda _: AttentionExplainer(),
    "attention": lambda _: FlowExplainer(),
    "gradient": lambda _: GradientExplainer(),
    "gnn_explainer": GNNExplainer,
    "occlusion": lambda _: OcclusionExplainer(undirected=True),
    "random": lambda _: DummyExplainer(),
}


class Case(NamedTuple):
    """A trained model, and what is explained."""

    model: nn.Module
    graphs: list[Data]  # receptive fields, or graphs; `truth` is a mask of their edges
    level: str
    k: int
    accuracy: float


# Cases ----------------------------------------------------------------------------------------------------------------


def trained(
    model: nn.Module, data: Data, rows: Tensor, epochs: int, lr: float = 0.01, decay: float = 5e-4
) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr, weight_decay=decay)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(called(model, data)[rows], data.y[rows]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def called(model: nn.Module, data: Data) -> Tensor:
    if isinstance(model, Readout):
        return model(data.x, data.edge_index, batch=data.batch, batch_size=data.num_graphs)
    return model(data.x, data.edge_index)


def of_nodes(model: nn.Module, data: Data, nodes: Tensor, items: int, truth: Callable[[int], Tensor], k: int) -> Case:
    """Return nodes that are predicted right, at most `items`, evenly spaced."""
    right = (called(model, data).argmax(1) == data.y)[nodes]
    chosen = nodes[right][:: max(1, int(right.sum()) // items)][:items]
    graphs = []
    for node in chosen.tolist():
        field = receptive_field(data, torch.tensor([node]), model.num_hops)  # type: ignore[arg-type]
        graphs.append(Data(field.x, field.edge_index, truth=truth(node)[field.e_id].float()))
    return Case(model, graphs, "node", k, 100 * float(right.float().mean()))


def house(folder: Path, items: int, epochs: int) -> Case:
    data = ExplainerDataset(BAGraph(300, 5), "house", 80)[0]
    data.x = torch.nn.functional.one_hot(degree(data.edge_index[0], data.num_nodes).clamp(max=9).long(), 10).float()
    of_house = torch.arange(data.num_nodes).sub(300).div(5, rounding_mode="floor")
    nodes = torch.randperm(data.num_nodes)
    model = trained(GAT(10, 16, 4, num_layers=3, heads=4, residual=True, dropout=0.0), data, nodes[:500], epochs)
    test = nodes[500:]

    def truth(node: int) -> Tensor:
        return (of_house[data.edge_index] == of_house[node]).all(0)

    return of_nodes(model, data, test[test >= 300], items, truth, 6)


def infection(folder: Path, items: int, epochs: int) -> Case:
    graphs = [*InfectionDataset(ERGraph(500, 0.004), 50, 3, num_graphs=6)]
    N, data = 500, Batch.from_data_list([Data(g.x, g.edge_index, y=g.y) for g in graphs])
    is_train = torch.arange(6 * N) < 5 * N
    model = trained(GAT(2, 16, 5, num_layers=4, heads=4, residual=True, dropout=0.0), data, is_train, epochs)
    test, infected = Data(graphs[5].x, graphs[5].edge_index, y=graphs[5].y), graphs[5].x[:, 1] > 0

    def truth(node: int) -> Tensor:
        src, dst = test.edge_index
        steps = torch.full((N,), 99)
        for hop in range(4, -1, -1):
            steps[k_hop_subgraph(node, hop, test.edge_index, num_nodes=N)[0]] = hop
        nearest = infected & (steps == int(test.y[node]))
        back = torch.full((N,), 99)
        for hop in range(4, -1, -1):
            back[k_hop_subgraph(nearest.nonzero().view(-1), hop, test.edge_index, num_nodes=N)[0]] = hop
        return (steps[dst] + 1 + back[src] == int(test.y[node])) | (steps[src] + 1 + back[dst] == int(test.y[node]))

    return of_nodes(model, test, ((test.y >= 1) & (test.y <= 3)).nonzero().view(-1), items, truth, 3)


def cora(folder: Path, items: int, epochs: int) -> Case:
    data = Planetoid(str(folder / "Planetoid"), "Cora", transform=NormalizeFeatures())[0]
    model = trained(GAT.preset("cora"), data, data.train_mask, epochs, 0.005)
    unknown = torch.full((data.num_edges,), -1.0)
    return of_nodes(model, data, data.test_mask.nonzero().view(-1), items, lambda node: unknown, 5)


def photo(folder: Path, items: int, epochs: int) -> Case:
    data = Amazon(str(folder / "Amazon"), "Photo")[0]
    nodes = torch.randperm(data.num_nodes)
    model = trained(GAT(745, 8, 8, num_layers=2, heads=8, dropout=0.5), data, nodes[:800], epochs)
    unknown = torch.full((data.num_edges,), -1.0)
    return of_nodes(model, data, nodes[800:], min(items, 4), lambda node: unknown, 5)


def mutag(folder: Path, items: int, epochs: int) -> Case:
    graphs = [*TUDataset(str(folder / "TUDataset"), "MUTAG")]
    order = torch.randperm(len(graphs)).tolist()
    test = [graphs[number] for number in order[:60]]
    model = Readout(GAT(7, 16, 32, num_layers=3, heads=4, residual=True, dropout=0.0, edge_dim=None), "sum", 2)
    batch = Batch.from_data_list([graphs[number] for number in order[60:]])
    model = trained(model, batch, torch.ones(128, dtype=torch.bool), epochs)
    right = [graph for graph in test if int(model(graph.x, graph.edge_index).argmax()) == int(graph.y)]
    chosen = [Data(graph.x, graph.edge_index, truth=torch.full((graph.num_edges,), -1.0)) for graph in right[:items]]
    return Case(model, chosen, "graph", 5, 100 * len(right) / len(test))


def accounts(folder: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Write tables of accounts and transfers, and return the neighbours of each, and the shell companies among them."""
    draw, ids = np.random.default_rng(0), [f"A{number:03}" for number in range(600)]
    kinds = draw.choice(["person", "shop", "charity", "shell"], 600, p=[0.6, 0.2, 0.1, 0.1])
    ends = [(ids[a], ids[b]) for a, b in draw.integers(600, size=(1500, 2)) if a != b]
    neighbours: dict[str, set[str]] = {name: set() for name in ids}
    for a, b in ends:
        neighbours[a].add(b)
        neighbours[b].add(a)
    all_shells = {name for name, kind in zip(ids, kinds, strict=True) if kind == "shell"}
    shells = {name: its & all_shells for name, its in neighbours.items()}
    nodes = pd.DataFrame({"account": ids, "kind": kinds, "age": draw.normal(40, 12, 600).round()})
    nodes["since"] = draw.integers(2000, 2025, 600)
    nodes["fraud"] = ["yes" if shells[name] else "no" for name in ids]
    nodes.to_csv(folder / "accounts.csv", index=False)
    edges = pd.DataFrame(ends, columns=["src", "dst"])
    edges.assign(amount=draw.lognormal(4, 1, len(ends)).round(2)).to_csv(folder / "transfers.csv", index=False)
    return neighbours, shells


def table(items: int, epochs: int, picture: Path) -> list[dict[str, Any]]:
    """Train the command on tables, explain frauds, and return a row for each kind; draw the first explanation."""
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        neighbours, shells = accounts(folder)
        settings = f"dataset=tables dataset.nodes={folder}/accounts.csv dataset.edges={folder}/transfers.csv"
        settings += f" dataset.target=fraud hydra.run.dir={folder}/run outputs={folder} training.max_epochs={epochs}"
        subprocess.run([sys.executable, "-m", "gat_pyg.run", *settings.split()], check=True, stdout=subprocess.DEVNULL)
        p_yes = gat_pyg.predict(folder / "run").set_index("account").p_yes
        accuracy = next(iter(gat_pyg.evaluate(folder / "run").averaged.values()))
        chosen = [
            name for name in p_yes.index if p_yes[name] > 0.5 and len(shells[name]) == 1 < len(neighbours[name]) - 1
        ]
        for name in chosen[:items]:
            begin = time.perf_counter()
            explained = gat_pyg.explain(folder / "run", node=name, k=1)
            seconds = time.perf_counter() - begin
            if not rows:
                print(f"{explained}\n")
                gat_pyg.report.explanation_figure(explained, picture)
            pairs = [{*ends} for ends in explained.edges[["src", "dst"]].to_numpy().tolist()]
            truth = torch.tensor([pair == {name, *shells[name]} for pair in pairs])
            measured = explained.faithfulness.set_index("kind")
            for kind in explained.kinds:
                ranks = torch.from_numpy(explained.edges[kind].rank().to_numpy(copy=True)).float() / len(truth)
                rows.setdefault(kind, []).append(
                    {
                        "auroc": float(groundtruth_metrics(ranks, truth.float(), "auroc")),
                        "first": float(truth[int(ranks.argmax())]),
                        "before": float(p_yes[name]),
                        **{key: float(measured[key][kind]) for key in ("removed", "alone")},
                        **{f"random_{key}": float(measured[key]["random"]) for key in ("removed", "alone")},
                        "edges": len(truth),
                        "seconds_of_all": seconds,
                    }
                )
    return [
        {"case": "table", "kind": kind, "accuracy": accuracy, "k": 1, "items": len(of_kind)}
        | {key: statistics.fmean(row[key] for row in of_kind) for key in of_kind[0]}
        for kind, of_kind in rows.items()
    ]


CASES = {"house": house, "infection": infection, "cora": cora, "photo": photo, "mutag": mutag}


def with_pygs_layers(model: nn.Module) -> nn.Module:
    """Return the model with PyG's layers and the same weights."""
    theirs = copy.deepcopy(model)
    for module in theirs.modules():
        for name, layer in module.named_children():
            if isinstance(layer, gat_pyg.GATConv):
                sizes = {key: getattr(layer, key) for key in ("in_channels", "out_channels", "heads", "concat")}
                other = pyg.GATConv(**sizes, dropout=layer.dropout, residual=layer.residual)
                other.load_state_dict(layer.state_dict())
                setattr(module, name, other.eval().requires_grad_(False))
    return theirs


# Measures -------------------------------------------------------------------------------------------------------------


def measured(case: Case, kind: str, epochs: int) -> dict[str, Any]:
    """Return the row of a kind of explanation: means over the explained items."""
    config = {"mode": "multiclass_classification", "task_level": case.level, "return_type": "raw"}
    index = 0 if case.level == "node" else None
    rows: dict[str, list[float]] = {}
    theirs = with_pygs_layers(case.model)

    def explained(model: nn.Module, graph: Data, draw: int = 0) -> tuple[Explainer, Any, float]:
        torch.manual_seed(draw)
        explainer = Explainer(model, KINDS[kind](epochs), "model", config, edge_mask_type="object")
        begin = time.perf_counter()
        explanation = explainer(graph.x, graph.edge_index, index=index)
        return explainer, explanation, time.perf_counter() - begin

    explained(case.model, case.graphs[0])  # compiles kernels
    explained(theirs, case.graphs[0])
    for number, graph in enumerate(case.graphs):
        explainer, explanation, seconds = explained(case.model, graph, number)
        of_item: dict[str, float] = {}
        if number < 5 and kind != "random":
            _, other, of_item["seconds_pyg"] = explained(theirs, graph, number)
            of_item["seconds"] = seconds
            of_item["difference"] = float((other.edge_mask - explanation.edge_mask).abs().max())
        relation = relations(graph.edge_index, True)
        if kind == "random":  # each pair of nodes alike, however many edges it has
            explanation.edge_mask = (torch.rand(int(relation.max()) + 1) / relation[relation >= 0].bincount())[relation]
        sums, truth = by_relation(explanation.edge_mask, relation), by_relation(graph.truth, relation) > 0
        k = min(case.k, -(-len(sums) // 2))
        if (graph.truth >= 0).all() and 0 < int(truth.sum()) < len(truth):
            ranks = torch.from_numpy(pd.Series(sums).rank().to_numpy(copy=True)).float() / len(sums)
            of_item["auroc"] = groundtruth_metrics(ranks, truth.float(), "auroc")
        without = removal(explainer, explanation, case.k if k > case.k else k, 20 * (kind == "random"), True)
        of_item |= {"before": without.before, "removed": without.removed, "alone": without.alone}
        if kind == "random":
            of_item |= {"removed": without.random_removed[0], "alone": without.random_alone[0]}
        hard = copy.copy(explanation)
        hard.edge_mask = torch.isin(relation, sums.topk(k).indices).float()
        of_item["fidelity_plus"], of_item["fidelity_minus"] = fidelity(explainer, hard)
        of_item["unfaithfulness"] = unfaithfulness(explainer, hard)
        for key, number_of in of_item.items():
            rows.setdefault(key, []).append(number_of)
    means = {key: max(values) if key == "difference" else statistics.fmean(values) for key, values in rows.items()}
    drops = [a - b for a, b in zip(rows["before"], rows["removed"], strict=True)]
    return {**means, "removed_std": statistics.stdev(drops) if len(drops) > 1 else 0.0, "items": len(case.graphs)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "table"], default=[*CASES, "table"])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--items", type=int, default=50, help="explained nodes or graphs of each case")
    parser.add_argument("--epochs", type=int, default=500, help="of the training")
    parser.add_argument("--learnt", type=int, default=200, help="epochs of GNNExplainer")
    parser.add_argument("--out", type=Path, help="file of results")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "The .* attribute", UserWarning)
    device = machine.device("cpu")
    record: dict[str, Any] = {**machine.about(device), "options": {**vars(options), "data": "", "out": ""}, "rows": []}
    path = options.out or machine.results("explanations", device)
    for name in options.cases:
        torch.manual_seed(0)
        if name == "table":
            for row in table(options.items, options.epochs, path.with_suffix(".svg")):
                record["rows"].append(row)
                print(" ".join(f"{key} {v:.3f}" if isinstance(v, float) else f"{key} {v}" for key, v in row.items()))
            machine.write(path, record)
            continue
        case = CASES[name](options.data, options.items, options.epochs)
        edges = statistics.fmean(float(relations(graph.edge_index, True).max()) + 1 for graph in case.graphs)
        print(f"{name}: accuracy {case.accuracy:.1f} %, {len(case.graphs)} items, k = {case.k} of {edges:.0f} edges")
        for kind in KINDS:
            row: Mapping[str, Any] = measured(case, kind, options.learnt)
            about = {"case": name, "kind": kind, "accuracy": case.accuracy, "k": case.k, "edges": edges}
            record["rows"].append({**about, **row})
            machine.write(path, record)
            auroc = f"{row['auroc']:.3f}" if "auroc" in row else "     "
            seconds = [row.get(key, float("nan")) for key in ("seconds", "seconds_pyg")]
            print(
                f"  {kind:<25} auroc {auroc}  {row['before']:.3f} -> {row['removed']:.3f} without, {row['alone']:.3f} "
                f"alone; fidelity {row['fidelity_plus']:.2f} {row['fidelity_minus']:.2f}; unfaithfulness "
                f"{row['unfaithfulness']:.3f}; {seconds[0]:.3f} s, PyG {seconds[1]:.3f} s"
                f", difference {row.get('difference', float('nan')):.1e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
