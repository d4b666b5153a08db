"""Link prediction on any graph, with links drawn at random for validation and test, or given."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import coalesce, is_undirected, remove_self_loops

from ..tasks.ids import node_ids, num_nodes
from ..tasks.links import LinkLabels
from ..tasks.objective import MASKS
from ..tasks.task import Task


def links(
    dataset: Any,
    name: str | None = None,
    val: float = 0.05,
    test: float = 0.1,
    disjoint: float = 0.0,
    channels: int = 16,
    seed: int = 0,
    ranked_by: str = "roc_auc",
) -> Task:
    """Draw links of a graph for validation and test, by default 5 % and 10 % as in Kipf and Welling's GAE (2016).

    The other links are for training and, in both directions if the graph is undirected, the message-passing edges of
    all splits. Validation and test have as many pairs without a link as links, drawn once with `seed` (PyG's
    `RandomLinkSplit`). Repeated links and loops are removed before.

    Args:
        dataset: a `Data`, a PyG `Dataset` or a `Task` with one graph. Without x, the ids of the nodes are the features.
        name: the name of the task.
        val, test: shares of the links, or numbers of them.
        disjoint: the share of the training links that are supervised only, and no message-passing edges; the others are
            then message-passing edges only. At 0, all are both.
        channels: the width of the vectors whose inner product is the score of a pair.
        seed: determines the split.
        ranked_by: the score that is reported and decides when to stop, as in `LinkLabels`.

    Raises:
        ValueError: if there is not one graph with edges, or it has too few links.

    Example:
        >>> from gat_pyg.data import digits
        >>> links(digits(), "digits-links")
        Task(name='digits-links', num_features=64, objective=LinkLabels(out_channels=16, ranked_by='roc_auc'), ...)
    """
    graph = dataset.shared_graph if isinstance(dataset, Task) else dataset
    name = name or (f"{dataset.name}-links" if isinstance(dataset, Task) else "links")
    if not isinstance(graph, Data):
        if graph is None or len(graph) != 1:
            raise ValueError(f"{name}: links are drawn in one graph, but there are several.")
        graph = graph[0]
    if not isinstance(graph.edge_index, Tensor):
        raise ValueError(f"{name}: edge_index is {type(graph.edge_index).__name__}, expected a tensor [2, E] of links.")
    N, weights = num_nodes(graph), graph.edge_attr
    x = node_ids(N) if graph.x is None else graph.x.float()
    edges, weights = remove_self_loops(graph.edge_index, weights)
    if weights is None:
        edges = coalesce(edges, num_nodes=N)
    else:
        edges, weights = coalesce(edges, weights, num_nodes=N, reduce="mean")
    both_ways = is_undirected(edges, num_nodes=N)
    if both_ways and weights is not None and not is_undirected(edges, weights, num_nodes=N):
        raise ValueError(f"{name}: edge_attr differs between the two directions of a link. Leave edge_attr out.")
    split = RandomLinkSplit(
        val, test, is_undirected=both_ways, add_negative_train_samples=False, disjoint_train_ratio=disjoint
    )
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):  # permutations are torch's, negatives Python's
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        parts = split(Data(x, edges, weights, num_nodes=N))
    random.setstate(state)
    pairs = [part.edge_label_index for part in parts]
    labels = [part.edge_label.long() for part in parts]
    transforms = dataset.transforms if isinstance(dataset, Task) else ()
    data = Data(parts[0].x, parts[0].edge_index, parts[0].edge_attr)
    return _task(name, data, pairs, labels, LinkLabels(channels, ranked_by), transforms)


def _task(
    name: str, data: Data, pairs: list[Tensor], labels: list[Tensor], objective: LinkLabels, transforms: Any = ()
) -> Task:
    """Return the task of a graph with the pairs of nodes, and their labels, of the three splits."""
    data.edge_label_index, data.y = torch.cat(pairs, 1), torch.cat(labels)
    split = torch.cat([torch.full((len(y),), number) for number, y in enumerate(labels)])
    for number, key in enumerate(MASKS):
        data[key] = split == number
    edge_dim = None if data.edge_attr is None else data.edge_attr.size(1)
    return Task(name, [data], [data], [data], data.x.size(1), objective, edge_dim, transforms=transforms)
