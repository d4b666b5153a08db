"""The node, pair or graph whose prediction is explained, and this prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from ..data.rows import reader_of
from ..graph.subgraph import receptive_field
from ..tasks.edges import complete_pairs
from ..tasks.model import FIELDS, members
from ..tasks.node_ids import num_nodes
from ..tasks.objective import Objective
from ..tasks.preparation import check_now
from .trained import Trained, without_labels


class Item(NamedTuple):
    """A row of a model's output, and the graph that it depends on."""

    name: str
    graph: Data  # prepared
    row: int
    nodes: list[int]  # whose row, or whose pair, it is; none of a graph
    names: Sequence[str]  # of all nodes
    undirected: bool

    @property
    def options(self) -> dict[str, Tensor]:
        """The arguments of the model beside x and edge_index."""
        return {key: self.graph[key] for key in FIELDS if self.graph.get(key) is not None}

    def call(self, model: nn.Module, x: Tensor | None = None) -> Tensor:
        """Return the output of a model for this graph, or for other features of its nodes."""
        out: Tensor = model(self.graph.x if x is None else x, self.graph.edge_index, **self.options)
        return out


def item_of(run: Trained, data: Any, node: Any, graph: Any, link: Sequence[Any] | None) -> Item:
    """Read the data of a run, and return a node, pair or graph with its receptive field."""
    objective = run.objective
    wanted = link if objective.has_pairs else graph if objective.item == "graph" else node
    if wanted is None:
        one = "both ends, link=(A, B) or --link A,B" if objective.has_pairs else "one, {0}=ID or --{0} ID"
        raise ValueError(f"The run predicts {objective.predicts}: give {one.format(objective.item)}.")
    if data is None and objective.draws_pairs:  # on the graph of the test
        graphs, ids = run.task.test, dict[str, Any]()
    else:
        rows = run.read(data)
        graphs, ids = run.without_labels(rows, data) if objective.label_rate else rows.graphs, rows.ids
    if objective.draws_pairs and run.node_ids is not None:
        ids = {"node": run.node_ids}  # those of `data` are of its pairs
    number = 0
    if objective.item == "graph" or len(graphs) > 1:
        if graph is None:
            raise ValueError(f"The data are {len(graphs):,} graphs: give the number of one, graph=0 or --graph 0.")
        number = _position(graph, ids.values() if objective.item == "graph" else (), len(graphs), "graph")
    chosen = copy.copy(graphs[number])
    N = num_nodes(chosen)
    names = _names(run, chosen, ids)
    row, nodes, name = 0, [], f"graph {graph}"
    if objective.has_pairs:
        if link is None or len(link) != 2:
            raise ValueError(f"link is {link}, expected both ends of a pair.")
        nodes = [_position(link[0], [names], N, "node"), _position(link[1], [names], N, "node", last=True)]
        name = f"{objective.item} {names[nodes[0]]}, {names[nodes[1]]}"
        _set_pair(chosen, nodes, name, objective)
    elif objective.item == "node":
        nodes = [_position(node, [names], N, "node")]
        row, name = nodes[0], f"node {names[nodes[0]]}"
    if objective.label_rate:
        chosen.y = chosen.y.clone()
        chosen.y[nodes] = objective.unknown(chosen.y[nodes])
    else:
        chosen = without_labels(chosen)
    whole = run.prepare(chosen, is_read=True)
    check_now(run.predictor, whole.x)
    undirected, hops = bool(is_undirected(whole.edge_index, num_nodes=N)), members(run.models[0]).num_hops
    if hops is None or not nodes:
        return Item(name, whole, row, nodes, names, undirected)
    pair = {key: whole.pop(key) for key in ("edge_label_index", "edge_label_attr") if key in whole}
    field = receptive_field(whole, torch.tensor(sorted({*nodes})), hops)
    place = {old: new for new, old in enumerate(field.n_id.tolist())}
    nodes = [place[each] for each in nodes]
    if pair:
        field.update(pair | {"edge_label_index": torch.tensor(nodes).view(2, 1)})
    return Item(name, field, 0 if pair else nodes[0], nodes, [names[old] for old in place], undirected)


def _set_pair(graph: Data, nodes: Sequence[int], name: str, objective: Objective) -> None:
    """Make a pair the only one of a graph, with its features if it has some.

    Raises:
        ValueError: if it is no row of the data, but the run predicts labels of rows.
    """
    pair = torch.tensor(nodes).view(2, 1)
    if objective.item == "edge":
        complete_pairs(graph)
        (rows,) = (graph.edge_label_index == pair).all(0).nonzero(as_tuple=True)
        if not len(rows):
            raise ValueError(f"{name} is no pair of the data, expected both ends of one, in their order.")
        if graph.get("edge_label_attr") is not None:
            graph.edge_label_attr = graph.edge_label_attr[rows[:1]]
    graph.edge_label_index = pair


def _names(run: Trained, graph: Data, ids: Mapping[str, Any]) -> list[str]:
    """Return the names of the nodes of a graph: ids of the user's tables, symbols of atoms with numbers, or numbers."""
    node_names, item, N = reader_of(run.source).node_names, run.objective.item, num_nodes(graph)
    if item == "edge" and len(ids) == 2:
        texts = [str(name) for column in ids.values() for name in column]
        names = dict(zip(graph.edge_label_index.flatten().tolist(), texts, strict=True))
        return [names.get(node, str(node)) for node in range(N)]
    if item in ("node", "link") and ids:
        return [*map(str, next(iter(ids.values())))]
    return [*map(str, range(N))] if node_names is None else node_names(graph)


def _position(wanted: Any, columns: Iterable[Sequence[Any]], count: int, what: str, last: bool = False) -> int:
    """Return the position of a name in one of the columns, or the number of a graph.

    Of a name that occurs twice, it is the first position, or the last one.

    Raises:
        ValueError: if no column has the name.
    """
    for column in columns:
        texts = [*map(str, column)]
        if str(wanted) in texts:
            return len(texts) - 1 - texts[::-1].index(str(wanted)) if last else texts.index(str(wanted))
    if what == "graph" and str(wanted).isdecimal() and int(wanted) < count:
        return int(wanted)
    known = [str(name) for column in columns for name in column]
    close = [] if str(wanted).isdecimal() else get_close_matches(str(wanted), known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    named = known and known != [*map(str, range(count))]
    expected = f"such as {known[0]} and {known[-1]}" if named else f"expected 0 to {count - 1}"
    raise ValueError(f"There is no {what} {wanted} among {count:,}, {expected}.{hint}")


class Goal(NamedTuple):
    """The prediction to explain."""

    model: nn.Module
    config: dict[str, str]  # of PyG's Explainer
    target: Tensor  # [n]: a class, 0 or 1, or regression targets
    text: str


class _Column(nn.Module):
    """A column of a model's predictions, `[n]`."""

    def __init__(self, model: nn.Module, column: int) -> None:
        super().__init__()
        self.model, self.column = model, column

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the column."""
        out: Tensor = self.model(*args, **kwargs)
        return out[:, self.column]


@torch.no_grad()
def goal_of(run: Trained, item: Item, output: str | None) -> Goal:
    """Return the prediction to explain: `output`, or the most probable class or label, or the first target."""
    preparation, objective, trained = run.preparation, run.objective, run.predictor
    out, model = item.call(trained), cast(nn.Module, trained)
    values, is_link = out[item.row], not objective.has_columns
    names = [] if is_link else [*map(str, preparation.class_names or range(objective.out_channels))]
    if objective.column == "target":
        names = run.columns
    if output is not None and str(output) not in names:
        expected = f"one of {', '.join(names[:20])}" if names else "none: the run predicts links"
        raise ValueError(f"output is {output}, expected {expected}.")
    most = 0 if is_link or objective.column == "target" else int(values.argmax())
    column = most if output is None else names.index(str(output))
    level = {"node": "node", "graph": "graph"}.get(objective.item, "edge")
    config = {"mode": "binary_classification", "task_level": level, "return_type": "probs"}
    if objective.column == "class":
        config["mode"] = "multiclass_classification"
        name = f"{run.targets[0]} = {names[column]}" if run.targets else f"class {names[column]}"
        target, text = torch.full((len(out),), column), f"{name} with probability {values[column]:.3f}"
    elif objective.column == "target":
        model, config["mode"], config["return_type"] = _Column(trained, column), "regression", "raw"
        target, text = out[:, column], f"{names[column]} = {values[column]:.4g}"
    else:
        model = trained if is_link else _Column(trained, column)
        p = float(values if is_link else values[column])
        name = "link" if is_link else names[column]
        target = torch.full((len(out),), int(p > 0.5))
        text = f"{name if p > 0.5 else f'no {name}'} with probability {max(p, 1 - p):.3f}"
    S = len(trained.models)
    return Goal(model.eval(), config, target, text if S == 1 else f"{text}, the mean of {S} seeds")
