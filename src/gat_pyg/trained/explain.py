"""The explanation of one prediction of a trained run: its edges and features by name, and its faithfulness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, ExplainerAlgorithm, Explanation, GNNExplainer
from torch_geometric.explain.config import ModelConfig
from torch_geometric.nn import MessagePassing

from ..data.rows import column_name
from ..data.tables.features import text_of, width
from ..data.tables.graph import DEGREES
from ..files import needs
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
from ..tasks.encodings import OF_NODES, STATISTICS, GraphColumns
from ..tasks.preparation import build_transform
from .item import Goal, Item, goal_of, item_of
from .load import encoders_of
from .predict import writer
from .trained import Seed, Trained

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
    - `gnn_explainer`: the mask that PyG's `GNNExplainer` learns in 200 epochs, 0 to 1 for each direction of an edge;
    - `occlusion`: what the prediction loses if the edge is removed (`OcclusionExplainer`). Of more than 1,000 rows,
      those with the largest gradients are removed, and the others have 0.

    A row of features has input times gradient, the mask of `GNNExplainer`, and as `occlusion` what the prediction loses
    if the feature is replaced: by 0, which in a table is the mean of the training or no category, or for a model with
    an encoder by the mean or an unknown category. The rows are those of the explained node, and of all other nodes
    together, without features that have these values anyway; of more than 200, those with the largest gradients.
    Features that are computed from edges, such as encodings, do not change if edges are removed. With
    `training.label_rate`, features are also the known label of a node, of no explained one, and what its neighbours'
    labels pass on: a number for each class, or of standardised targets.

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
    run.predictor.requires_grad_(False)
    item = item_of(run, data, node, graph, link)
    goal = goal_of(run, item, output)
    relation = relations(item.graph.edge_index, item.undirected)
    numbers, first = np.unique(relation.numpy(), return_index=True)
    ends = item.graph.edge_index[:, torch.from_numpy(first[numbers >= 0])]  # of the first edge: src is farther away
    R = ends.size(1)
    if k is not None and not 0 < k <= R:
        raise ValueError(f"k is {k}, expected 1 to {R}: {item.name} depends on {R} edges.")
    k = min(5, -(-R // 2)) if k is None else k
    explainer, explanations = _explanations(run, item, goal, R)
    edges: dict[str, Any] = {
        run.source.get(end) or end: [item.names[node] for node in nodes]
        for end, nodes in zip(("src", "dst"), ends.tolist(), strict=True)
    }
    edges |= {kind: by_relation(each.edge_mask, relation).numpy() for kind, each in explanations.items() if R}
    order = np.argsort(-np.abs(edges["occlusion"]), kind="stable") if R else np.arange(0)
    rows = [*_features(run, item, goal, explanations)]
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


# Explanations ---------------------------------------------------------------------------------------------------------


def _explanations(run: Trained, item: Item, goal: Goal, num_relations: int) -> tuple[Explainer, dict[str, Explanation]]:
    """Return an explainer of the prediction, and the explanations by their kinds."""
    passes = any(isinstance(module, MessagePassing) for module in run.predictor.modules())
    are_masked = run.preparation.num_nodes is None and "x" not in encoders_of(run.predictor)
    mask = "attributes" if are_masked else None
    algorithms: dict[str, ExplainerAlgorithm] = {}
    if num_relations and all(map(attention_layers, run.models)):
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
            models = run.models if kind == "attention" else [goal.model]
            each = [explained(model, kind) for model in models]
            explainer, explanations[kind] = each[0]
            explanations[kind].edge_mask = torch.stack([explanation.edge_mask for _, explanation in each]).mean(0)
    return explainer, explanations


# Features -------------------------------------------------------------------------------------------------------------

_FEATURES = ("node", "feature", "value", "occlusion")  # without the kinds that not every model has


class _Feature(NamedTuple):
    """A column of the user's table, or columns of x."""

    name: str
    columns: slice  # of x
    encoding: Mapping[str, Any] | None = None

    def text(self, x: Tensor) -> str:
        """Return the value in one row of x as text."""
        if self.encoding is None:
            return ", ".join(f"{value:.4g}" for value in x[self.columns].tolist())
        is_count = self.name in DEGREES  # whose logarithms are features
        return text_of({**self.encoding, "log": is_count or self.encoding.get("log")}, x[self.columns].numpy())


def _named(run: Trained) -> Iterator[_Feature]:
    """Yield the features of a node by the user's names, statistics of the neighbours' ones, and the known labels."""
    preparation, source, K, begin = run.preparation, run.source, run.objective.out_channels, 0
    F, P, has_ids = preparation.num_features, preparation.num_encodings, preparation.num_nodes is not None
    tables = source.get("columns", {}).get("node", {})
    named = [(name, width(encoding), encoding) for name, encoding in tables.items()]
    rest = range(sum(count for _, count, _ in named), F)
    named += [(column_name(source, "x", column).removesuffix(" of x"), 1, None) for column in rest]
    transform = build_transform(preparation.encoding).transform if preparation.encoding is not None else None
    names = [f"encoding {column}" for column in range(P)]
    if isinstance(transform, GraphColumns):
        is_wide = not has_ids and transform.most >= F
        own = [(name, count) for name, count, _ in named] * is_wide
        named += [(f"{reduce} of the neighbours' {name}", count, None) for reduce in STATISTICS for name, count in own]
        names = [f"encoding {name}" for name in OF_NODES] + names[3 * F * is_wide + len(OF_NODES) :]
    named += [(name, 1, None) for name in names]
    if preparation.num_labels:
        named += [("known label", preparation.num_labels - K, None), ("neighbours' labels", K, None)]
    for name, count, encoding in named:
        if begin or not has_ids:
            yield _Feature(name, slice(begin, begin + count), encoding)
        begin += count


def _features(
    run: Trained, item: Item, goal: Goal, explanations: Mapping[str, Explanation]
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
    baseline = _baseline(run, x)
    tried = [
        (float(slope[at, feature.columns].sum()), name, at, feature)
        for name, at in rows.items()
        for feature in _named(run)
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


def _predicted(item: Item, goal: Goal, x: Tensor) -> float:
    return float(value(ModelConfig(**goal.config), item.call(goal.model, x), goal.target, item.row))


def _baseline(run: Trained, x: Tensor) -> Tensor:
    """Return the features `[F]` that have no information: of a table 0, behind an encoder means and no category."""
    baseline, encoder = x.new_zeros(x.size(1)), encoders_of(run.predictor).get("x")
    if encoder is not None and "columns" not in run.source:
        baseline[encoder._discrete.long()] = -1
        baseline[encoder._continuous.long()] = encoder._mean
    return baseline
