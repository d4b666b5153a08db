"""Settings that suit data without a recipe: chosen by the task, the size and the features once the data are read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import is_undirected

from ..data.rows import READERS
from ..models.encoders import num_categories
from ..models.gat import GAT
from ..settings.conf import CHOICES
from ..settings.hashing import defaults, flattened
from ..settings.names import recipe_of
from ..settings.overrides import names_of, value_text
from ..settings.settings import Settings
from ..tasks.metrics import AVERAGE_PRECISION, ROC_AUC
from ..tasks.negatives import sides_of
from ..tasks.objective import SPLITS
from ..tasks.task import Task
from .task import READ, SHARES, data_key, prepared, read_data

SHAPE = {f"model.{name}" for name in ("num_layers", "hidden_channels", "heads", "residual")}  # which fit each other

# The table ----------------------------------------------------------------------------------------------------------

# Of networks, by the choices of model with their class; other classes keep their own
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "gat": {  # also GATv2 and the transformer
        "model.num_layers": 3,
        "model.hidden_channels": 16,  # for each head: 64 in all
        "model.heads": 4,
        "model.pre_linear": True,  # the first layer has a skip connection too; not for graphs and links
        "model.residual": "identity",
        "model.norm": "batch",
        "model.dropout": 0.1,
        "model.head_layers": 1,  # after skip connections, so that a node's own features reach the output
    },
    "gcn": {"model.num_layers": 3, "model.hidden_channels": 64, "model.dropout": 0.1},
    "mlp": {"model.num_layers": 3, "model.dropout": 0.1},
}
# Of every method
ALL: Mapping[str, Any] = {
    "training.lr": 0.003,
    "training.weight_decay": 0.0,
    "training.patience": 50,
    "training.criterion": "strict",
    "training.max_epochs": 500,
}
BY_ITEM: Mapping[str, Mapping[str, Any]] = {
    "node": {},
    "edge": {},
    "graph": {"model.num_layers": 4, "model.head_layers": 2, "model.readout": ["mean", "sum", "max", "count"]},
    "link": {"model.decoder": "mlp"},
}
# Of labels of nodes and edges: in one graph, statistics of all nodes would depend on the features of the test
BY_ROWS: Mapping[str, Any] = {"model.norm": "layer", "model.norm_kwargs": {"mode": "node"}}
WIDTH = 64  # of the encoder
RANKED = {"decoder": "mlp", "popularity": True}  # of links between users and items, whose messages are not sampled
RARE = 0.3  # share of the rarer of two classes, or of the labels that are 1, below which their ranking is the score
BATCHES = 2000  # graphs of the training from which a step takes 64
# Of many graphs, such as the steps of a series, and of many with more than LARGE nodes in all
GRAPHS: Mapping[str, Any] = {"training.max_epochs": 200}
LITTLE = 1000  # graphs of the training up to which a batch norm costs a regression more than it helps
FEW = 300  # graphs of the training below which the validation is too small for its accuracy to choose an epoch
LARGE, LARGE_GRAPHS = 100_000, {"training.max_epochs": 50, "training.patience": 10}
MANY, MOSTLY = 100, 0.8  # columns, and the share of zeros, from which features are left sparse, without an encoder

# ---------------------------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """Facts about a task on which the settings depend."""

    item: str
    goal: str
    num_graphs: int | None  # of the training; None: one graph for all splits
    num_nodes: int  # of the training's graphs in all
    encodes: bool  # whether the features need an encoder
    metric: str | None  # of the ranking, if a class or labels are rare, or labels have gaps
    ranks: bool  # whether links join two sides, such as users and items
    in_shares: bool  # whether the sizes of the splits in the settings do not fit


FACTS: dict[tuple[str, bool], Facts] = {}  # about the data of settings, by their `data_key`


def by_data(settings: Settings, overrides: Sequence[str]) -> Literal["all", "facts", ""]:
    """Return whether settings of a job are to suit its data: all that nobody chose, or only those that `Facts` need.

    These are data that this package has no settings for: those of the user's files, any class by `dataset._target_`,
    and data sets by name for which `recipe=auto` is `suited`. A job whose overrides name a recipe keeps its settings;
    with a rule of a kind of task, or a search around it, these are all but those that depend on features and labels.
    """
    texts = [text.lstrip("+") for text in overrides if text.lstrip("+") != "recipe=auto"]
    has_rule = any(text.startswith(("search=", "recipe=strong/")) for text in texts)
    has_recipe = any(text.startswith(("recipe", "family", "experiment")) for text in texts) and not has_rule
    values = {"recipe": "auto", "model": "gat", "dataset": "digits"}
    values |= dict(text.split("=", 1) for text in texts if "=" in text)
    model = "own" if "model._target_" in values else values["model"]
    of_user = settings.dataset.target in READERS or names_of(overrides) & {"dataset._target_", "dataset.name"}
    if has_recipe or settings.is_table:
        return ""
    if not of_user and recipe_of(values["recipe"], model, values["dataset"]) != "suited":
        return ""
    return "facts" if has_rule else "all"


def suited(settings: Settings, overrides: Sequence[str]) -> Settings:
    """Return the settings of a job, with those that suit its data where neither user nor recipe chose a value.

    See `by_data`. The data are read here, once for all jobs on them.

    Raises:
        ValueError: if the data cannot be read, or a training would not end.
    """
    if kind := by_data(settings, overrides):
        settings = _suited(settings, names_of(overrides), kind == "facts")
    if not settings.is_table:  # whose cells have settings of their own
        settings.check_end()
    return settings


def _suited(settings: Settings, passed: frozenset[str], by_rule: bool) -> Settings:
    in_shares, before = not passed & {"split", *SHARES}, _of_one_split(settings)
    key, task = (data_key(before), in_shares), None
    if key not in FACTS:
        task, changed = read_data(before, in_shares)
        FACTS[key] = facts_of(task, changed is not before)
        if settings.dataset.target == "gat_pyg.data.from_file" and (note := _of_directed(task)):
            task = task.read_from(task.source or {}, [*task.notes, note])
    values = dict(_values(settings, passed, FACTS[key], by_rule))
    named = {name: value for name, value in values.items() if name != "trainer.max_epochs"}
    text = tuple(f"{name}={value_text(value)}" for name, value in named.items())
    settings = settings.updated(values).replace(suited=text)
    if task is not None:
        READ.clear()
        READ[data_key(_of_one_split(settings))] = prepared(task, _of_one_split(settings))
    return settings


def _of_directed(task: Task) -> str:
    """Return a note on the edges of a single graph that have no reverse edge, else ""."""
    graph = task.shared_graph
    if graph is None or task.objective.has_pairs or is_undirected(graph.edge_index, num_nodes=len(graph.x)):
        return ""
    return f"{task.name}: messages follow the edges, not all of which have a reverse one; or dataset.undirected=true"


def _of_one_split(settings: Settings) -> Settings:
    return settings.on_split(0) if settings.on_all_splits else settings


def facts_of(task: Task, in_shares: bool = False) -> Facts:
    """Return the facts about a task."""
    count = len(task.train) if task.has_many_graphs else None
    encodes = _needs_encoder([task.features(data) for data in task.train])
    size = sum(data.x.size(0) for data in task.train)
    ranks = task.objective.draws_pairs and sides_of(task.train[0]) is not None
    return Facts(task.objective.item, task.objective.goal, count, size, encodes, _ranked(task), ranks, in_shares)


def _ranked(task: Task) -> str | None:
    """Return the metric of the ranking if one of two classes or labels are rare, or labels have gaps."""
    kind = task.objective.column
    if kind not in ("class", "label") or (kind == "class" and task.num_classes != 2):
        return None
    labels = [task.labels(split).double() for split in SPLITS]
    labels = [torch.where(task.objective.known(y), y, float("nan")).view(len(y), -1) for y in labels]
    shares = [y.nanmean(0) for y in labels]
    is_scored = torch.stack([(share > 0) & (share < 1) for share in shares]).all(0).any()  # so that some ranking is
    share = float(labels[0].nanmean())
    if kind == "label":
        return ROC_AUC.name if is_scored and (share < RARE or bool(labels[0].isnan().any())) else None
    return (AVERAGE_PRECISION if share < 0.5 else ROC_AUC).name if is_scored and min(share, 1 - share) < RARE else None


def _needs_encoder(features: Sequence[Tensor]) -> bool:
    """Return True for categorical or continuous features; False for columns of 0 and 1, and for many zeros."""
    sizes = num_categories(features)
    if all(size in (1, 2) for size in sizes):
        return False
    zeros = 1 - sum(int(x.count_nonzero()) for x in features) / max(sum(x.numel() for x in features), 1)
    return len(sizes) < MANY or zeros < MOSTLY


def _values(settings: Settings, passed: frozenset[str], facts: Facts, by_rule: bool) -> Iterator[tuple[str, Any]]:
    """Yield the settings that suit the data, with their values: those that nobody chose."""
    kind, values = settings.model.locate(), flattened(settings.to_dict())
    network, before = _network(settings.model.target)
    table: dict[str, Any] = {}
    if not by_rule:  # which has a network and its training
        table |= {**network, **ALL, **BY_ITEM[facts.item]}
        if facts.item in ("node", "edge") and "model.norm" in network and "model.norm" not in passed:
            table |= BY_ROWS
        if facts.num_graphs is not None:
            table |= GRAPHS if facts.num_nodes <= LARGE else LARGE_GRAPHS
        if facts.item == "graph" and (facts.num_graphs or FEW) < FEW:
            table["training.criterion"] = "loss"
        if (facts.item, facts.goal) == ("graph", "regression") and (facts.num_graphs or 0) <= LITTLE:
            table |= {"model.norm": None} if "model.norm" in network else {}
    if facts.in_shares:
        table |= SHARES
    if facts.ranks and "model.decoder" in table and settings.loader.num_neighbors is None:
        table["model.decoder"] = RANKED
    if "model.dropout" in table and (facts.item, facts.goal) == ("node", "regression"):
        table["model.dropout"] = 0.0
    if "model.num_layers" in table and (hops := settings.loader.num_neighbors) is not None:
        table["model.num_layers"] = len(hops)
    if facts.num_graphs is not None:
        table["training.batch_size"] = 64 if facts.num_graphs > BATCHES else 32
    if facts.encodes and settings.training.sparse is not True:
        table["model.encoder"] = WIDTH
    if facts.metric is not None:
        table["metric"] = facts.metric
    left_out: set[str] = set()
    if any(isinstance(value := values.get(key), list) and (key in passed or value != before.get(key)) for key in SHAPE):
        # a list may have an entry for the output layer
        left_out |= {*SHAPE, "model.pre_linear", "model.head_layers", "model.readout"}
    if settings.model.get("reproduction"):
        left_out |= {*network}
    if facts.item in ("graph", "link"):
        left_out.add("model.pre_linear")
        if 1 in (values.get("model.num_layers"), table.get("model.num_layers")):  # skip connections need a second layer
            left_out.add("model.residual")
    if not (inspect.isclass(kind) and issubclass(kind, (GAT, BasicGNN))):
        left_out |= {"model.readout", "model.head_layers"}
    if hasattr(kind, "fit"):
        left_out.add("model.encoder")
    for name, value in table.items():
        group = name.partition(".")[0]
        is_passed = name in passed or group in passed - {"model"} or any(key.startswith(f"{name}.") for key in passed)
        if not is_passed and name not in left_out and values.get(name) == before.get(name):
            yield name, value
            if name == "training.max_epochs" and values["trainer.max_epochs"] == values[name]:
                yield "trainer.max_epochs", value


@functools.cache
def _network(target: str | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the entry of `NETWORKS` for a class, and the settings that nobody chose."""
    for name, network in NETWORKS.items():
        values: Any = OmegaConf.to_container(CHOICES["model"][name].node)
        if values["_target_"] == target:
            return network, {**defaults(), **flattened({"model": values})}
    return {}, defaults()
