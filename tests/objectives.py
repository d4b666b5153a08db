"""A small task of every objective: pooling, resume, processes and stopping are tested on each."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT

from gat_pyg.data import Task, links
from gat_pyg.models import LinkScores, Readout
from gat_pyg.tasks.edges import EdgeLabels, EdgeMultiLabels
from gat_pyg.tasks.graphs import GraphLabels, GraphMultiLabels
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import Objective
from gat_pyg.tasks.targets import EdgeTargets, GraphTargets, NodeTargets
from gat_pyg.training import Inductive, Optimisation, Transductive


def graph(N: int, K: int, seed: int, multilabel: bool = False, **others: Any) -> Data:
    draw = torch.Generator().manual_seed(seed)
    y = torch.rand(N, K, generator=draw).round() if multilabel else torch.randint(K, (N,), generator=draw)
    edge_index = torch.randint(N, (2, 3 * N), generator=draw)
    return Data(torch.randn(N, 6, generator=draw), edge_index, y=y, **others)


def objective(multilabel: bool) -> Objective:
    return NodeMultiLabels(3) if multilabel else NodeLabels(3)


def one_graph(multilabel: bool = False) -> Task:
    data = graph(30, 3, 0, multilabel)
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(30) % 3 == i
    return Task("one", [data], [data], [data], 6, objective(multilabel))


def many_graphs(multilabel: bool = True) -> Task:
    graphs = [graph(5 + i, 3, i, multilabel) for i in range(11)]
    return Task("many", graphs[:5], graphs[5:8], graphs[8:], 6, objective(multilabel))


def labelled_graphs() -> Task:
    """Graphs with one label each; that of one training graph is unknown, and one has a single edge."""
    graphs = [graph(5 + i, 3, i) for i in range(11)]
    for i, data in enumerate(graphs):
        data.y = torch.tensor([-1 if i == 3 else i % 3])
    graphs[0].edge_index = graphs[0].edge_index[:, :1]
    return Task("labelled", graphs[:5], graphs[5:8], graphs[8:], 6, GraphLabels(3))


def linked_graph() -> Task:
    return links(graph(30, 3, 0), val=0.2, test=0.2, channels=3)


def labelled_edges() -> Task:
    """A graph with one of three classes for each of its 90 edges."""
    data = graph(30, 3, 0)
    data.edge_label_index, data.y = data.edge_index, data.edge_index.sum(0) % 3
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(90) % 3 == i
    return Task("edges", [data], [data], [data], 6, EdgeLabels(3))


def multilabelled_edges() -> Task:
    """The same graph with three labels for each edge; every tenth edge lacks the second."""
    data = labelled_edges().train[0]
    data.y = (data.x[data.edge_index[0], :3] > 0).float()
    data.y[::10, 1] = math.nan
    return Task("multilabelled", [data], [data], [data], 6, EdgeMultiLabels(3))


def quantities_of_edges() -> Task:
    """The same graph with three quantities for each edge, of which each tenth edge lacks the second."""
    data = labelled_edges().train[0]
    src, dst = data.edge_index
    data.y = 100 + 10 * (data.x[src, :3] - data.x[dst, 3:])
    data.y[::10, 1] = math.nan
    return Task("quantities", [data], [data], [data], 6, EdgeTargets(3))


def labelled_edges_of_graphs() -> Task:
    """Graphs with one of three classes for each edge, and edge features; one graph has no edges.

    Some labels of the training graphs are unknown.
    """
    graphs = [graph(5 + i, 3, i) for i in range(11)]
    graphs[1].edge_index = graphs[1].edge_index[:, :0]
    for i, data in enumerate(graphs):
        data.edge_label_index, data.y = data.edge_index, data.x[data.edge_index[0], :3].argmax(1)
        data.y[i::5] = -1 if i < 5 else data.y[i::5]
        data.edge_label_attr = data.edge_attr = data.x[data.edge_index[0], :2] + data.x[data.edge_index[1], 3:5]
    return Task("edges", graphs[:5], graphs[5:8], graphs[8:], 6, EdgeLabels(3), 2)


def quantities_of_edges_of_graphs() -> Task:
    """The same graphs with three quantities for each edge, of which some edges lack the second."""
    task = labelled_edges_of_graphs()
    for data in (*task.train, *task.val, *task.test):
        src, dst = data.edge_index
        data.y = 100 + 10 * (data.x[src, :3] - data.x[dst, 3:])
        data.y[::5, 1] = math.nan
    return Task("quantities", task.train, task.val, task.test, 6, EdgeTargets(3), 2)


def multilabelled_graphs() -> Task:
    """Graphs with three labels each, some of them unknown; one graph has no edges."""
    task = labelled_graphs()
    for i, data in enumerate([*task.train, *task.val, *task.test]):
        data.y = torch.tensor([[i % 2, i % 3 == 0, math.nan if i == 1 else i % 3 == 1]]).float()
    task.train[1].edge_index = task.train[1].edge_index[:, :0]
    return Task("multilabelled", task.train, task.val, task.test, 6, GraphMultiLabels(3))


def quantities_of_nodes() -> Task:
    """A graph with three quantities for each node, of which each tenth node lacks the second."""
    data = one_graph().train[0]
    data.y = torch.stack([100 + 10 * data.x[:, 0], data.x[:, 1], data.x[:, 2] ** 2], 1)
    data.y[::10, 1] = math.nan
    return Task("quantities", [data], [data], [data], 6, NodeTargets(3))


def quantities_of_graphs() -> Task:
    """Graphs with three quantities each; those of one training graph are unknown."""
    task = labelled_graphs()
    for i, data in enumerate([*task.train, *task.val, *task.test]):
        data.y = 100 + 10 * data.x[:, :3].mean(0, keepdim=True) + (math.nan if i == 3 else 0)
    return Task("quantities", task.train, task.val, task.test, 6, GraphTargets(3))


OBJECTIVES: dict[str, Callable[[], Task]] = {
    "nodes of one graph": one_graph,
    "nodes of one graph, many labels": lambda: one_graph(True),
    "nodes of many graphs": lambda: many_graphs(False).with_loss(
        class_weight="balanced", label_smoothing=0.1, focal=2.0
    ),
    "nodes of many graphs, many labels": many_graphs,
    "graphs": labelled_graphs,
    "graphs, many labels": lambda: multilabelled_graphs().with_loss(
        pos_weight="balanced", label_smoothing=0.1, focal=0.5
    ),
    "quantities of nodes": quantities_of_nodes,
    "quantities of nodes, some read": lambda: quantities_of_nodes().reading_labels(0.5),
    "quantities of graphs, by MAE": lambda: quantities_of_graphs().scored_by("mae"),
    "edges": labelled_edges,
    "edges, many labels": multilabelled_edges,
    "quantities of edges": quantities_of_edges,
    "edges of many graphs": labelled_edges_of_graphs,
    "quantities of edges of many graphs": lambda: quantities_of_edges_of_graphs().with_loss(error="huber"),
    "links": lambda: linked_graph().with_loss(pos_weight=2.0, focal=1.0),
    "nodes of one graph, by ROC-AUC": lambda: one_graph().scored_by("roc_auc"),
    "nodes of many graphs, by average precision": lambda: many_graphs().scored_by("average_precision"),
}
DRAWN = ("links", "quantities of nodes, some read")  # which draw on the host in each step
LABELLED = [name for name in OBJECTIVES if name not in DRAWN]
WITH_GRAPHS = [name for name, make in OBJECTIVES.items() if make().has_many_graphs]


def setup(task: Task, dropout: float = 0.5) -> LightningModule:
    torch.manual_seed(0)
    model = GAT(6 + task.objective.num_labels, 4, 2, 3, heads=2, dropout=dropout)
    kind = Inductive if task.has_many_graphs else Transductive
    return kind(headed(model, task), task.objective, Optimisation(lr=0.01, weight_decay=5e-4))


def headed(model: nn.Module, task: Task) -> nn.Module:
    """Return a model of the task's rows from a model with three outputs for each node."""
    if task.objective.item == "edge":
        return LinkScores(model, 3, "mlp", out_channels=3, combine="concat", edge_dim=task.edge_dim)
    return Readout(model) if task.objective.item == "graph" else model
