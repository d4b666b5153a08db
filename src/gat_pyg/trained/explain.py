"""The explanation of one prediction of a trained run: its edges and features by name, and its faithfulness."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, ExplainerAlgorithm, Explanation, GNNExplainer
from torch_geometric.explain.config import ModelConfig
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import is_undirected

from ..data.rows import column_name, reader_of
from ..data.tables.features import text_of, width
from ..data.tables.graph import DEGREES
from ..files import needs
from ..graph.subgraph import receptive_field
from ..models.attention import attention_layers
from ..models.explainers import (
    FlowExplainer,
    GradientExplainer,
    OcclusionExplainer,
    by_relation,
    relations,
    removal,
    value,
)
from ..tasks.edges import complete_pairs
from ..tasks.model import members
from ..tasks.node_ids import num_nodes
from ..tasks.objective import Objective
from ..tasks.preparation import Preparation, check_now
from .load import Predictor, encoders_of
from .predict import writer
from .trained import Seed, Trained, without_labels

MOST = 200  # rows of features; of more, those with the largest gradients
EPOCHS = 200  # of GNNExplainer, as in PyG's examples
PRINTED = 10  # rows of a table
ALL, OTHERS = "all nodes", "other nodes"  # names of several nodes in the table of features


@dataclass(frozen=True, eq=False)
class Explained:
    """The explanation of one prediction, on the part of the graph that it depends on.

    Attributes:
        item: the node, pair or graph, such as "node A17".
        prediction: the prediction in words.
        edges: a frame with a row for each two connected nodes, the largest effect first, and a column for each kind of
            explanation.
        features: a frame with a row for each feature of the explained nodes, and of all other nodes together; 200 rows
            at most.
        faithfulness: a frame with the prediction without the `k` strongest edges, and with these alone, for each kind,
            and the mean and the standard deviation over 20 draws of k random edges.
        k: the number of edges that are removed.
        graph: the part of the graph, prepared as the run's data.
        names: those of its nodes.
        nodes: the explained nodes; none of a graph.
        ends: `[2, R]`, the nodes of each row of `edges`.
    """

    item: str
    prediction: str
    edges: Any
    features: Any
    faithfulness: Any
    k: int
    graph: Data
    names: Sequence[str]
    nodes: Sequence[int]
    ends: Tensor

    @property
    def kinds(self) -> list[str]:
        """The kinds of explanations of edges."""
        return [kind for kind in self.faithfulness["kind"] if kind != "random"]

    @property
    def measured(self) -> str:
        """The edges of the columns `removed` and `alone` of `faithfulness`, in words."""
        strongest, those = ("edge", "it") if self.k == 1 else (f"{self.k} edges", "these")
        return f"without the strongest {strongest}, and with {those} alone"

    def write(self, path: str | Path) -> list[Path]:
        """Write the three frames beside `path`, as `NAME-edges.csv`, and return the files."""
        files = []
        for name in ("edges", "features", "faithfulness"):
            files.append(Path(path).with_name(f"{Path(path).stem}-{name}.csv"))
            writer(files[-1])(getattr(self, name))
        return files

    def __str__(self) -> str:
        parts = [f"{self.item}: {self.prediction}"]
        for name in ("edges", "features"):
            table = getattr(self, name)
            title = f"{name}, the {PRINTED} strongest of {len(table):,}" if len(table) > PRINTED else name
            if len(table):
                parts.append(f"{title}\n{_text(table.head(PRINTED))}")
        if self.k:
            parts.append(f"prediction {self.measured}, of {len(self.edges):,}\n{_text(self.faithfulness)}")
        return "\n\n".join(parts)


def _text(table: Any) -> str:
    return str(table.to_string(index=False, float_format="{:.3g}".format, na_rep=""))


def explain(
    run_dir: str | Path,
    data: Any = None,
    *,
    node: Any = None,
    graph: Any = None,
    link: Sequence[Any] | None = None,
    output: str | None = None,
    k: int | None = None,
    seed: Seed = None,
    trust: bool = False,
) -> Explained:
    """Explain a prediction of a trained run: the edges and features that it depends on, and how faithful that is.

    All edges between two nodes are one row, in both directions if the graph is undirected. A row has the sums of four
    masks, which PyG's `Explainer` computes on the fused path:

    - `attention`: the share of what the explained node receives that passes over the edge (`FlowExplainer`);
    - `gradient`: the derivative of the prediction by the weight of the edge's messages (`GradientExplainer`);
    - `gnn_explainer`: the mask that PyG's `GNNExplainer` learns in 200 epochs;
    - `occlusion`: what the prediction loses if the edge is removed (`OcclusionExplainer`). Of more than 1,000 rows,
      those with the largest gradients are removed, and the others have 0.

    A row of features has input times gradient, the mask of `GNNExplainer`, and as `occlusion` what the prediction loses
    if the feature is replaced: by 0, which in a table is the mean of the training or no category, or for a model with
    an encoder by the mean or an unknown category. The rows are those of the explained node, and of all other nodes
    together, without features that have these values anyway; of more than 200, those with the largest gradients.
    Features that are computed from edges, such as encodings, do not change if edges are removed.

    A prediction is the probability of a class, of a label or its absence, of a link or no link, or a target in its
    own unit; of several seeds the mean. A model without attention has no `attention`, one without PyG's message passing
    has only `occlusion`.

    Args:
        run_dir: the folder of a run, or of the runs of several seeds.
        data: as in `gat_pyg.predict`; by default the run's own data.
        node: the id of a node in the table, else its number.
        graph: the number of a graph, or the SMILES or the name of a molecule.
        link: both ends of a pair, as in u7,i12, if the run predicts links or edge labels.
        output: the class, label or target to explain; by default the most probable one, or the first target.
        k: the number of edges that are removed to measure how faithful the masks are; by default 5, at most half.
        seed: seed of the model, if the run has several; by default the mean over all.
        trust: as in `gat_pyg.predict`.

    Raises:
        FileNotFoundError, ValueError: as `gat_pyg.predict`, or if there is no such item or output.
        ImportError: if pandas is missing.

    >>> explain("nowhere", node=0)
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    pd = needs("pandas", "tables")
    run = Trained.open(run_dir, seed, trust=trust)
    trained = run.predictor.requires_grad_(False)
    item = _item(run, data, node, graph, link)
    goal = _goal(run, item, output)
    relation = relations(item.graph.edge_index, item.undirected)
    numbers, first = np.unique(relation.numpy(), return_index=True)
    ends = item.graph.edge_index[:, torch.from_numpy(first[numbers >= 0])]  # of the first edge: src is farther away
    R = ends.size(1)
    if k is not None and not 0 < k <= R:
        raise ValueError(f"k is {k}, expected 1 to {R}: {item.name} depends on {R} edges.")
    k = min(5, -(-R // 2)) if k is None else k
    explainer, explanations = _explanations(trained, item, goal, R)
    names = _end_names(cast(Preparation, trained.preparation))
    edges: dict[str, Any] = {
        name: [item.names[end] for end in row] for name, row in zip(names, ends.tolist(), strict=True)
    }
    edges |= {kind: by_relation(each.edge_mask, relation).numpy() for kind, each in explanations.items() if R}
    order = np.argsort(-np.abs(edges["occlusion"]), kind="stable") if R else np.arange(0)
    rows = [*_features(trained, item, goal, explanations)]
    features = pd.DataFrame(rows, columns=None if rows else _FEATURES)
    return Explained(
        item.name,
        goal.text,
        pd.DataFrame(edges).iloc[order].reset_index(drop=True),
        features.sort_values("occlusion", key=abs, ascending=False, ignore_index=True),
        pd.DataFrame(_faithfulness(explainer, explanations, k, item.undirected) if R else [], columns=_FAITHFULNESS),
        k,
        item.graph,
        item.names,
        item.nodes,
        ends[:, torch.from_numpy(order)],
    )


_FAITHFULNESS = ("kind", "removed", "alone", "removed_std", "alone_std")


def _faithfulness(
    explainer: Explainer, explanations: Mapping[str, Explanation], k: int, undirected: bool
) -> list[dict[str, Any]]:
    """Return a row for each kind of explanation, and one for random edges."""
    last = [*explanations][-1]  # only for this kind, random edges are drawn too
    rows: list[dict[str, Any]] = []
    for kind, each in explanations.items():
        measured = removal(explainer, each, k, 20 if kind == last else 0, undirected)
        rows.append({"kind": kind, "removed": measured.removed, "alone": measured.alone})
    (removed, removed_std), (alone, alone_std) = measured.random_removed, measured.random_alone
    random = {"kind": "random", "removed": removed, "alone": alone}
    return [*rows, random | {"removed_std": removed_std, "alone_std": alone_std}]


# Item and prediction --------------------------------------------------------------------------------------------------


class _Item(NamedTuple):
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
        keys = ("edge_attr", "edge_label_index", "edge_label_attr")
        return {key: self.graph[key] for key in keys if self.graph.get(key) is not None}

    def call(self, model: nn.Module, x: Tensor | None = None) -> Tensor:
        """Return the output of a model for this graph, or for other features of its nodes."""
        out: Tensor = model(self.graph.x if x is None else x, self.graph.edge_index, **self.options)
        return out


def _item(run: Trained, data: Any, node: Any, graph: Any, link: Any) -> _Item:
    """Read the data of a run, and return a node, pair or graph with its receptive field."""
    preparation, objective, trained = run.preparation, run.objective, run.predictor
    wanted = link if objective.has_pairs else graph if objective.item == "graph" else node
    if wanted is None:
        flag = "link, both ends" if objective.has_pairs else f"{objective.item}, its id or number"
        raise ValueError(f"The run predicts {objective.predicts}: give {flag}.")
    if data is None and objective.draws_pairs:  # on the graph of the test
        graphs, ids = run.task.test, dict[str, Any]()
    else:
        graphs, ids = run.read(data)[:2]
    if objective.draws_pairs and run.node_ids is not None:
        ids = {"node": run.node_ids}  # those of `data` are of its pairs
    number = 0
    if objective.item == "graph" or len(graphs) > 1:
        if graph is None:
            raise ValueError(f"The data are {len(graphs):,} graphs: give the number of one, graph=0 or --graph 0.")
        number = _position(graph, ids.values() if objective.item == "graph" else (), len(graphs), "graph")
    chosen = copy.copy(graphs[number])
    N = num_nodes(chosen)
    names = _names(preparation, objective, chosen, ids, N)
    row, nodes, name = 0, [], f"graph {graph}"
    if objective.has_pairs:
        if len(link) != 2:
            raise ValueError(f"link is {link}, expected both ends of a pair.")
        nodes = [_position(link[0], [names], N, "node"), _position(link[1], [names], N, "node", last=True)]
        name = f"{objective.item} {names[nodes[0]]}, {names[nodes[1]]}"
        _set_pair(chosen, nodes, name, objective)
    elif objective.item == "node":
        nodes = [_position(node, [names], N, "node")]
        row, name = nodes[0], f"node {names[nodes[0]]}"
    whole = run.prepare(without_labels(chosen), is_read=True)
    check_now(trained, whole.x)
    undirected, hops = bool(is_undirected(whole.edge_index, num_nodes=N)), members(trained.models[0]).num_hops
    if hops is None or not nodes:
        return _Item(name, whole, row, nodes, names, undirected)
    pair = {key: whole.pop(key) for key in ("edge_label_index", "edge_label_attr") if key in whole}
    field = receptive_field(whole, torch.tensor(sorted({*nodes})), hops)
    place = {old: new for new, old in enumerate(field.n_id.tolist())}
    nodes = [place[each] for each in nodes]
    if pair:
        field.update(pair | {"edge_label_index": torch.tensor(nodes).view(2, 1)})
    return _Item(name, field, 0 if pair else nodes[0], nodes, [names[old] for old in place], undirected)


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


def _names(preparation: Preparation, objective: Objective, graph: Data, ids: Mapping[str, Any], N: int) -> list[str]:
    """Return the names of the nodes of a graph: ids of the user's tables, symbols of atoms with numbers, or numbers."""
    node_names = reader_of(preparation.source).node_names
    if objective.item == "edge" and len(ids) == 2:
        texts = [str(name) for column in ids.values() for name in column]
        names = dict(zip(graph.edge_label_index.flatten().tolist(), texts, strict=True))
        return [names.get(node, str(node)) for node in range(N)]
    if objective.item in ("node", "link") and ids:
        return [*map(str, next(iter(ids.values())))]
    return [*map(str, range(N))] if node_names is None else node_names(graph)


def _position(wanted: Any, columns: Any, count: int, what: str, last: bool = False) -> int:
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
    known = [str(name) for column in columns for name in column] or ["0", str(count - 1)]
    close = [] if str(wanted).isdecimal() else get_close_matches(str(wanted), known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"There is no {what} {wanted} among {count:,}, such as {known[0]} and {known[-1]}.{hint}")


def _end_names(preparation: Preparation) -> tuple[str, str]:
    """Return the names of the columns with the ends of an edge."""
    source = preparation.source or {}
    return source.get("src") or "src", source.get("dst") or "dst"


class _Goal(NamedTuple):
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
def _goal(run: Trained, item: _Item, output: str | None) -> _Goal:
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
    return _Goal(model.eval(), config, target, text if S == 1 else f"{text}, the mean of {S} seeds")


# Explanations ---------------------------------------------------------------------------------------------------------


def _explanations(
    trained: Predictor, item: _Item, goal: _Goal, num_relations: int
) -> tuple[Explainer, dict[str, Explanation]]:
    """Return an explainer of the prediction, and the explanations by their kinds."""
    passes = any(isinstance(module, MessagePassing) for module in trained.modules())
    are_masked = cast(Preparation, trained.preparation).num_nodes is None and "x" not in encoders_of(trained)
    mask = "attributes" if are_masked else None
    algorithms: dict[str, ExplainerAlgorithm] = {}
    if num_relations and all(map(attention_layers, trained.models)):
        algorithms["attention"] = FlowExplainer()
    if passes:
        algorithms["gradient"] = GradientExplainer()
    if passes and num_relations:
        algorithms["gnn_explainer"] = GNNExplainer(EPOCHS)
    algorithms["occlusion"] = OcclusionExplainer(undirected=item.undirected)
    options = {"target": goal.target, "index": item.row, **item.options}

    def explained(model: nn.Module, kind: str) -> tuple[Explainer, Explanation]:
        node_mask = mask if kind in ("gradient", "gnn_explainer") else None
        explainer = Explainer(model, algorithms[kind], "phenomenon", goal.config, node_mask, "object")
        return explainer, explainer(item.graph.x, item.graph.edge_index, **options)

    explanations = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for kind in algorithms:
            models = trained.models if kind == "attention" else [goal.model]
            each = [explained(model, kind) for model in models]
            explainer, explanations[kind] = each[0]
            explanations[kind].edge_mask = torch.stack([explanation.edge_mask for _, explanation in each]).mean(0)
    return explainer, explanations


# Features -------------------------------------------------------------------------------------------------------------

_FEATURES = ("node", "feature", "value", "occlusion")  # without the kinds that not every model has


class _Feature(NamedTuple):
    """A column of the user's table, or of x."""

    name: str
    columns: slice  # of x
    encoding: Mapping[str, Any] | None = None

    def text(self, x: Tensor) -> str:
        """Return the value in one row of x as text."""
        if self.encoding is None:
            return f"{float(x[self.columns]):.4g}"
        is_count = self.name in DEGREES  # whose logarithms are features
        return text_of({**self.encoding, "log": is_count or self.encoding.get("log")}, x[self.columns].numpy())


def _named(preparation: Preparation) -> Iterator[_Feature]:
    """Yield the features of a node by the user's names."""
    source, begin = preparation.source or {}, 0
    if preparation.num_nodes is not None:
        return
    for name, encoding in source.get("columns", {}).get("node", {}).items():
        yield _Feature(name, slice(begin, begin + width(encoding)), encoding)
        begin += width(encoding)
    for column in range(begin, preparation.in_channels):
        name = column_name(source, "x", column).removesuffix(" of x")
        if column >= preparation.num_features:
            name = f"encoding {column - preparation.num_features}"
        yield _Feature(name, slice(column, column + 1))


def _features(
    trained: Predictor, item: _Item, goal: _Goal, explanations: Mapping[str, Explanation]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table of features."""
    x = item.graph.x
    rows = {item.names[node]: torch.tensor([node]) for node in item.nodes}
    rest = torch.ones(len(x), dtype=torch.bool)
    rest[item.nodes] = False
    if rest.any():
        rows[OTHERS if item.nodes else ALL] = rest.nonzero().view(-1)
    masks = {kind: mask for kind, each in explanations.items() if (mask := each.get("node_mask")) is not None}
    slope = masks.get("gradient", torch.zeros_like(x))
    baseline = _baseline(trained, x)
    tried = [
        (float(slope[at, feature.columns].sum()), name, at, feature)
        for name, at in rows.items()
        for feature in _named(cast(Preparation, trained.preparation))
        if bool((x[at, feature.columns] != baseline[feature.columns]).any())
    ]
    tried = sorted(tried, key=lambda each: -abs(each[0]))[:MOST]
    with torch.no_grad():
        before = _predicted(item, goal, x)
        for gradient, name, at, feature in tried:
            without = x.clone()
            without[at, feature.columns] = baseline[feature.columns]
            row: dict[str, Any] = {
                "node": name,
                "feature": feature.name,
                "value": feature.text(x[at[0]]) if len(at) == 1 else "",
            }
            if "gradient" in masks:
                row["gradient"] = gradient
            if "gnn_explainer" in masks:
                row["gnn_explainer"] = float(masks["gnn_explainer"][at, feature.columns].max())
            yield row | {"occlusion": before - _predicted(item, goal, without)}


def _predicted(item: _Item, goal: _Goal, x: Tensor) -> float:
    return float(value(ModelConfig(**goal.config), item.call(goal.model, x), goal.target, item.row))


def _baseline(trained: Predictor, x: Tensor) -> Tensor:
    """Return the features `[F]` that have no information: of a table 0, behind an encoder means and no category."""
    baseline, encoder = x.new_zeros(x.size(1)), encoders_of(trained).get("x")
    if encoder is not None and "columns" not in (cast(Preparation, trained.preparation).source or {}):
        baseline[encoder._discrete.long()] = -1
        baseline[encoder._continuous.long()] = encoder._mean
    return baseline
