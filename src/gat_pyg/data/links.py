"""Link prediction on any graph, with links for validation and test drawn at random or read from the data."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import coalesce, is_undirected, remove_self_loops, scatter

from ..tasks.checks import check_edge_index, check_shapes
from ..tasks.edges import EdgeLabels
from ..tasks.links import LinkLabels
from ..tasks.metrics import LINKS
from ..tasks.negatives import NonLinks, directed, two_sides
from ..tasks.node_ids import num_nodes
from ..tasks.objective import MASKS, SPLITS
from ..tasks.task import Task
from .arrays.detection import add_ids, check_edge_label, check_kind, labelled, plain, tidy
from .arrays.keys import warn_of_unread
from .splits import num_splits

CHANNELS = 16  # the width of the vectors whose inner product is the score of a pair


def links(
    dataset: Any,
    name: str | None = None,
    val: float = 0.05,
    test: float = 0.1,
    disjoint: float = 0.0,
    channels: int = CHANNELS,
    seed: int = 0,
    ranked_by: str = "roc_auc",
    negatives: str = "auto",
) -> Task:
    """Draw links of a graph for validation and test, by default 5 % and 10 % as in Kipf and Welling's GAE (2016).

    The other links are for training and, in both directions if the graph is undirected, the message-passing edges of
    all splits. Validation and test have as many pairs without a link as links, drawn once with `seed` (PyG's
    `RandomLinkSplit`). In a bipartite graph, such as users and items, pairs without a link join its two sides
    (`gat_pyg.tasks.negatives.two_sides`) and keep the source of a link, also those of the training. Repeated links and
    loops are removed before.

    Args:
        dataset: a `Data`, a PyG `Dataset` or a `Task` with one graph. Without x, the ids of the nodes are the features.
        name: the name of the task.
        val, test: shares of the links, or numbers of them.
        disjoint: the share of the training links that are supervised only, and no message-passing edges; the others are
            then message-passing edges only. At 0, all are both.
        channels: the width of the vectors whose inner product is the score of a pair.
        seed: determines the split.
        ranked_by, negatives: the score that is reported and decides when to stop, and how pairs without a link are
            drawn, as in `LinkLabels`.

    Raises:
        ValueError: if there is not one graph with edges, it has too few links, or they are in encodings of the nodes.

    Example:
        >>> from gat_pyg.data import digits
        >>> links(digits(), "digits-links")
        Task(name='digits-links', num_features=64, objective=LinkLabels(out_channels=16, ranked_by='roc_auc'), ...)
    """
    graph = dataset.shared_graph if isinstance(dataset, Task) else dataset
    name = name or (f"{dataset.name}-links" if isinstance(dataset, Task) else "links")
    transforms = dataset.transforms if isinstance(dataset, Task) else ()
    if isinstance(dataset, Task) and dataset.encoding is not None:
        raise ValueError(f"{name}: encodings of the nodes show the links. Draw these first: encoded(links(task), ...).")
    if not isinstance(graph, Data):
        if graph is None or len(graph) != 1:
            raise ValueError(f"{name}: links are sampled from one graph, but there are several.")
        graph = graph[0]
    if not isinstance(dataset, Task):
        warn_of_unread([graph], name, ("edge_label_attr",))
    objective = LinkLabels(channels, ranked_by, negatives=negatives)
    return _drawn(graph, name, (val, test), disjoint, seed, objective, transforms)


def link_task(
    raw: list[list[Any]],
    name: str,
    val: int | None,
    test: int | None,
    seed: int,
    split: int,
    transforms: Sequence[Any],
    disjoint: float = 0.0,
    negatives: str = "auto",
) -> Task:
    """Return the task of predicting links of the only graph: the pairs in `edge_label_index`, or drawn links.

    The links are 5 % and 10 % where `val` and `test` are None. The three graphs of a `RandomLinkSplit` are one graph:
    the pairs of each are those of a split, and messages pass over the edges of the first.

    Raises:
        ValueError: if there are several graphs, or labels or masks of the pairs are missing.
    """
    graphs, objective = list(chain(*raw)), LinkLabels(CHANNELS, negatives=negatives)
    for graph in graphs:
        check_kind(graph, name)
    if len(raw) == len(graphs) == 3 and all(graph.get("edge_label") is not None for graph in graphs):
        graphs = [_joined(graphs, name)]
    if len(graphs) > 1:
        raise ValueError(f"{name}: task={LINKS} needs a single graph, but there are {len(graphs)}.")
    graph = graphs[0]
    if graph.get("edge_label_index") is None:
        shares = 0.05 if val is None else val, 0.1 if test is None else test
        return _drawn(graph, name, shares, disjoint, seed, objective, transforms, ("val", "test", "seed"))
    if disjoint:
        raise ValueError(f"{name}: disjoint={disjoint}, but the pairs are given by edge_label_index. Leave it out.")
    if missing := [key for key in ("edge_label", *MASKS) if graph.get(key) is None]:
        raise ValueError(
            f"{name}: {missing[0]} is missing, expected edge_label, train_mask, val_mask and test_mask of the pairs in "
            "edge_label_index: 1 for each link, 0 for each pair without one. Without edge_label_index, links are "
            "sampled."
        )
    (graph,) = labelled([graph], [name], "edge_classification")
    (y,) = EdgeLabels.convert([graph.y], name)
    data = tidy(graph, y, split, name)
    data.pop("edge_label_attr", None)
    F, D = data.x.size(-1), None if data.edge_attr is None else data.edge_attr.size(-1)
    splits = [data], [data], [data]
    count = num_splits(graph, name)
    return Task(name, *splits, F, objective, D, None, tuple(transforms), count, ())


def _joined(graphs: list[Data], name: str) -> Data:
    """Return the graph whose links a `RandomLinkSplit` divided, with masks; training draws its own negative pairs."""
    sizes = [num_nodes(graph) for graph in graphs]
    if len(set(sizes)) > 1 and graphs[0].x is not None:
        raise ValueError(f"{name}: the graphs of the three splits have {sizes} nodes, expected the same nodes.")
    for graph, split in zip(graphs, SPLITS, strict=True):
        check_edge_label(graph.edge_label, graph.edge_label_index, f"{name}, {split} graph 0")
    labels = [graph.edge_label for graph in graphs]
    chosen = [labels[0] != 0, *(torch.ones_like(label, dtype=torch.bool) for label in labels[1:])]
    data, kept = copy.copy(graphs[0]), torch.cat(chosen)
    data.edge_label_index = torch.cat([graph.edge_label_index for graph in graphs], 1)[:, kept]
    data.edge_label = torch.cat(labels)[kept]
    if data.x is None:
        data.num_nodes = max([*sizes, *(data.edge_label_index.flatten() + 1).tolist()])
    of = torch.arange(3).repeat_interleave(torch.tensor([len(label) for label in labels]))[kept]
    for number, key in enumerate(MASKS):
        data[key] = of == number
    return data


def _drawn(
    graph: Data,
    name: str,
    shares: tuple[float, float],
    disjoint: float,
    seed: int,
    objective: LinkLabels,
    transforms: Sequence[Any],
    split_arguments: tuple[str, ...] | None = None,
) -> Task:
    """Draw links of a graph; the other arguments are those of the task."""
    if not isinstance(graph.edge_index, Tensor):
        raise ValueError(f"{name}: edge_index is {type(graph.edge_index).__name__}, expected a tensor [2, E] of links.")
    graph, dtype = plain(graph, name), torch.get_default_dtype()
    if graph.x is None:
        add_ids(graph, name)
    N, x, weights = num_nodes(graph), graph.x.to(dtype), graph.edge_attr
    if weights is not None:
        weights = weights.to(dtype)
        weights = weights[:, None] if weights.dim() == 1 else weights
    D = None if weights is None else weights.size(-1)
    check_shapes(x.size(-1) if x.dim() else 1, D, x, graph.edge_index, weights, name)
    check_edge_index(graph.edge_index, N, name)
    edges, weights = remove_self_loops(graph.edge_index, weights)
    if weights is None:
        edges = coalesce(edges, num_nodes=N)
    else:
        edges, weights = coalesce(edges, weights, num_nodes=N, reduce="mean")
    both_ways = is_undirected(edges, num_nodes=N)
    if both_ways and weights is not None and not is_undirected(edges, weights, num_nodes=N):
        raise ValueError(f"{name}: edge_attr differs between the two directions of a link. Leave edge_attr out.")
    sides = two_sides(edges, N)
    is_ours = sides is not None or objective.negatives == "source"  # RandomLinkSplit would draw pairs of one side
    split = RandomLinkSplit(
        *shares,
        is_undirected=both_ways,
        neg_sampling_ratio=float(not is_ours),
        add_negative_train_samples=False,
        disjoint_train_ratio=disjoint,
    )
    try:
        with seeded_draws(seed, seed):
            parts = split(Data(x, edges, weights, num_nodes=N))
            if is_ours:
                others = NonLinks(edges, N, directed(sides, parts[0].edge_label_index))
                _add_negatives(parts[1:], others, objective.negatives)
    except ValueError as error:
        raise ValueError(
            f"{name} has {edges.size(1)} edges, too few to sample val={shares[0]} and test={shares[1]} of its links: "
            f"{error}."
        ) from error
    pairs = [part.edge_label_index for part in parts]
    labels = [part.edge_label.long() for part in parts]
    data = Data(parts[0].x, parts[0].edge_index, parts[0].edge_attr)
    return task_of_pairs(name, data, pairs, labels, objective, tuple(transforms), split_arguments)


def divided_links(
    graph: Data,
    masks: Mapping[str, Tensor],
    both_ways: bool,
    name: str,
    seed: int,
    split_arguments: tuple[str, ...],
    negatives: str = "auto",
) -> Task:
    """Return the task of predicting links that come divided, with as many other pairs drawn for validation and test.

    Messages pass over the training links. A repeated link belongs to the first split that has it, and has the mean of
    the features that it has there. Loops are left out. Links are in the order of their first rows, with a split by time
    that of the times, from which a baseline takes the latest.

    Args:
        graph: the graph with x, `edge_index` [2, M] and, if there are any, `edge_attr` [M, D].
        masks: masks of the links [M], `train_mask`, `val_mask` and `test_mask`.
        both_ways: links have no direction, and messages pass in both.
        name: name of the task.
        seed: random seed of the other pairs, which are in no row.
        split_arguments: the same as of a `Task`.
        negatives: how the other pairs are drawn, as in `LinkLabels`.

    Raises:
        ValueError: if a split has no link.
    """
    N, (src, dst) = num_nodes(graph), graph.edge_index
    rows = graph.edge_index.sort(0).values if both_ways else graph.edge_index
    numbers, link = (rows[0] * N + rows[1]).unique(return_inverse=True)
    order = scatter(torch.arange(len(link)), link, dim_size=len(numbers), reduce="min").argsort()  # of the first rows
    numbers, link = numbers[order], order.argsort()[link]
    pairs = torch.stack([numbers // N, numbers % N])
    split = torch.full((len(src),), len(MASKS))
    for number, key in enumerate(MASKS):
        split[masks[key] & (src != dst)] = number
    first = scatter(split, link, dim_size=len(numbers), reduce="min")
    parts = [Data(edge_label_index=pairs[:, first == number]) for number in range(len(MASKS))]
    for part, key in zip(parts, MASKS, strict=True):
        part.edge_label = torch.ones(part.edge_label_index.size(1), dtype=torch.long)
        if not part.edge_label.numel():
            raise ValueError(f"{name}: {key} has no link that is in no earlier split. Choose another split.")
    edges, features, is_train = parts[0].edge_label_index, graph.edge_attr, first == 0
    if features is not None:
        kept = split == 0
        features = scatter(features[kept], link[kept], dim_size=len(numbers), reduce="mean")[is_train]
    known = pairs
    if both_ways:
        edges, known = (torch.cat([links, links.flip(0)], 1) for links in (edges, known))
        features = None if features is None else features.repeat(2, 1)
    others = NonLinks(known, N, directed(two_sides(known, N), parts[0].edge_label_index))
    with seeded_draws(seed, seed):
        _add_negatives(parts[1:], others, negatives)
    labelled = [part.edge_label_index for part in parts], [part.edge_label for part in parts]
    objective = LinkLabels(CHANNELS, negatives=negatives)
    return task_of_pairs(name, Data(graph.x, edges, features), *labelled, objective, (), split_arguments)


def with_other_pairs(graph: Data, name: str, negatives: str = "auto") -> Data:
    """Return a graph whose pairs are its links, with label 1, and as many drawn pairs that are none, with label 0.

    A drawn pair is no edge, and no link in either direction; in a bipartite graph it joins the two sides. The pairs are
    the same in every call. Links that are edges of the graph, in either direction, are left out with a warning.

    Args:
        graph: the graph with `edge_index` and the links in `edge_label_index` [2, L].
        name: name of the graph in messages.
        negatives: how the others are drawn, as in `LinkLabels`.

    Raises:
        ValueError: if all links are edges of the graph.

    Example:
        >>> graph = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), edge_label_index=torch.tensor([[0], [2]]))
        >>> with_other_pairs(Data(**graph.to_dict(), num_nodes=5), "later").edge_label
        tensor([1, 0])
    """
    graph, N = copy.copy(graph), num_nodes(graph)
    links = graph.edge_label_index
    keys = [pairs.min(0).values * N + pairs.max(0).values for pairs in (links, graph.edge_index)]
    is_known = torch.isin(*keys)
    if bool(is_known.all()):
        raise ValueError(f"{name}: all links are edges of the graph, expected links that the model does not see.")
    if count := int(is_known.sum()):
        warnings.warn(
            f"{name}: {count:,} of {len(is_known):,} links are edges of the graph, which the model sees. They are left "
            "out.",
            stacklevel=3,
        )
    links = links[:, ~is_known]
    known = torch.cat([graph.edge_index, links, links.flip(0)], 1)
    part = Data(edge_label_index=links, edge_label=torch.ones(links.size(1), dtype=torch.long))
    with seeded_draws(0, 0):
        _add_negatives([part], NonLinks(known, N, directed(two_sides(known, N), links)), negatives)
    _check_others(part.edge_label, N, name)
    return graph.update(part)


def _check_others(y: Tensor, N: int, where: str) -> None:
    """Raise ValueError if all pairs of a split are links, since no other pairs were there to draw."""
    if y.numel() and bool(y.all()):
        raise ValueError(
            f"{where} has links alone: nearly all pairs of the {N} nodes are links, expected a graph in which most are "
            "none. To predict a value of each edge, choose its column as the target."
        )


@contextmanager
def seeded_draws(of_torch: int, of_python: int) -> Iterator[None]:
    """Context manager: seed torch's generator on the CPU and Python's, which draws negative pairs; restore both."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(of_torch)
        random.seed(of_python)
        try:
            yield
        finally:
            random.setstate(state)


def _add_negatives(parts: Sequence[Data], others: NonLinks, negatives: str) -> None:
    """Add as many negative pairs as links to the labelled pairs of each part, such as validation and test."""
    ends = [*accumulate(part.edge_label.numel() for part in parts)]
    drawn, of = others.beside(torch.cat([part.edge_label_index for part in parts], 1), negatives)
    splits = torch.searchsorted(of, torch.tensor(ends[:-1], dtype=torch.long))
    for part, pairs in zip(parts, drawn.tensor_split(splits, 1), strict=True):
        part.edge_label_index = torch.cat([part.edge_label_index, pairs], 1)
        part.edge_label = torch.cat([part.edge_label, part.edge_label.new_zeros(pairs.size(1))])


def task_of_pairs(
    name: str,
    data: Data,
    pairs: list[Tensor],
    labels: list[Tensor],
    objective: LinkLabels,
    transforms: Any = (),
    split_arguments: tuple[str, ...] | None = None,
) -> Task:
    """Return the task of a graph with the pairs of nodes, and their labels, of the three splits."""
    data.edge_label_index, data.y = torch.cat(pairs, 1), torch.cat(labels)
    for key, y in zip(MASKS[1:], labels[1:], strict=True):
        _check_others(y, num_nodes(data), f"{name}: {key}")
    split = torch.cat([torch.full((len(y),), number) for number, y in enumerate(labels)])
    for number, key in enumerate(MASKS):
        data[key] = split == number
    edge_dim = None if data.edge_attr is None else data.edge_attr.size(1)
    options: dict[str, Any] = {"transforms": transforms, "split_arguments": split_arguments}
    return Task(name, [data], [data], [data], data.x.size(1), objective, edge_dim, **options)
