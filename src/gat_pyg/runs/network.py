"""The model of a run: the network of its settings, and what its task puts around it: encoder, readout, decoder."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import BatchNorm, PNAConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ..data.collate import Collate
from ..models.baselines import MLP
from ..models.encoders import Column, Encoder, Scaling, columns_of
from ..models.gat import GAT
from ..models.readout import GraphFeatures
from ..seeds.fitting import seeded
from ..settings.factory import Factory, ModelFactory
from ..settings.rules import similar
from ..settings.settings import Settings
from ..tasks.model import FIELDS, Inputs
from ..tasks.scaling import scale
from ..tasks.targets import Targets
from ..tasks.task import Task
from .model_file import check_dtypes
from .warm_start import Earlier, fill

LINEAR = ("mean", "sum", "add", "max")  # readouts of the model's outputs; others are of embeddings
CHUNK = 4096  # graphs that are counted at a time
COUNT = "count"  # a readout: numbers of nodes and edges of each category
WIDTH = 64  # of the nodes' embeddings from which a decoder predicts edge labels
Options = dict[str, Any]  # arguments of a class
Around = Options | None  # of what is put around the network, if it is


class Built(NamedTuple):
    """A fresh model, the dotted name of its class, and the class's arguments."""

    model: nn.Module
    target: str
    arguments: dict[str, Any]


def initial_model(settings: Settings, task: Task, seed: int) -> Built:
    """Build the model with which the run of a seed begins: a fresh one, or with the weights of an earlier run."""
    built = seeded(seed, lambda: build_model(settings.model, task, Earlier.of(settings)))
    if settings.from_ is not None:
        fill(built.model, settings, seed)
    return built


def build_model(factory: ModelFactory, task: Task, earlier: Earlier | None = None) -> Built:
    """Build a fresh model for the task, with what an earlier run computed from its data, such as categories.

    The network takes the features, or what an encoder makes of them, and a readout or a decoder takes its rows.

    Raises:
        ValueError: if an argument clashes with the data set, or the trained model could not be saved.
    """
    kind, target = factory.locate(), str(factory.target)
    encoder, readout, decoder = (part(factory, task, kind) for part in (_encoder, _readout, _decoder))
    arguments = _network(factory, task, kind, encoder, readout, decoder)
    change = _change(factory, task)
    if change is not None and encoder is not None:  # whose columns are scaled already
        scaled = {*change["columns"]}
        encoder["categories"] = [0 if k in scaled else column for k, column in enumerate(encoder["categories"])]
    wrappers = ("Encoded", encoder), ("Readout", readout), ("LinkScores", decoder), ("Change", change)
    for wrapper, around in wrappers:
        if around is not None:
            arguments = {"model": {"_target_": target, **arguments}, **around}
            target = f"gat_pyg.models.{wrapper}"
    arguments = arguments if earlier is None else earlier.fitted(arguments)
    try:
        model = Factory("model", {"_target_": target, **arguments})()
    except ValueError as error:  # raised by a layer that refuses the `**kwargs` of its model
        unknown = re.search(r"(?:unexpected keyword argument '|has no argument )(\w+)", str(error))
        if unknown is None or unknown[1] not in factory.arguments:
            raise
        known = [f"model.{parameter}" for parameter in inspect.signature(kind).parameters]
        name = f"model.{unknown[1]}"
        raise ValueError(f"{kind.__qualname__} has no argument {name}.{similar(name, known)}") from error
    for norm in model.modules():
        if isinstance(norm, BatchNorm) and norm.module.track_running_stats:
            norm.allow_single_element = True  # a batch of graphs may be a single atom, which torch refuses in training
    check_dtypes(model)
    return Built(model, target, arguments)


def _network(
    factory: ModelFactory, task: Task, kind: type[nn.Module], encoder: Around, readout: Around, decoder: Around
) -> Options:
    """Return the arguments of the network: those of the settings, and the sizes that follow from the task."""
    arguments, parameters = factory.arguments, inspect.signature(kind).parameters
    sizes = {
        "in_channels": task.num_features + task.objective.num_labels if encoder is None else encoder["channels"],
        "out_channels": task.num_classes if decoder is None else decoder["channels"],
    }
    if task.shared_graph is not None and "num_nodes" in parameters:  # for parameters or labels of each node
        sizes["num_nodes"] = task.shared_graph.num_nodes
    if task.edge_dim is not None and _takes_edges(kind):
        sizes["edge_dim"] = task.edge_dim if encoder is None else _edge_width(encoder)
    if "deg" in parameters:
        sizes["deg"] = [float(count) for count in PNAConv.get_degree_histogram(task.train).tolist()]
    if clash := sorted(sizes.keys() & arguments.keys()):
        raise ValueError(f"model.{clash[0]} follows from the data set, which has {sizes[clash[0]]}. Leave it out.")
    takes_any = _takes_any(kind)
    arguments = {key: value for key, value in sizes.items() if key in parameters or takes_any} | arguments
    if readout is not None and "out_channels" in readout:  # of embeddings
        arguments["out_channels"] = None
        arguments.pop("head_layers", None)
    if issubclass(kind, GAT):
        arguments |= {key: values[:-1] for key, values in with_output_layer(factory).items()}
    return arguments


def _takes_any(kind: type[nn.Module]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(kind).parameters.values())


def _takes_edges(kind: type[nn.Module]) -> bool:
    """Return True if a network takes edge features."""
    by_layers = _takes_any(kind) and getattr(kind, "supports_edge_attr", False)
    return "edge_dim" in inspect.signature(kind).parameters or by_layers


def _encoder(factory: ModelFactory, task: Task, kind: type[nn.Module]) -> Around:
    """Return the arguments of `Encoded` other than the model, or None without an encoder.

    The edges of one graph, which are in memory together, have no learnt encoding if they have fewer columns: since
    every layer has a linear map of them, it would add nothing but a gradient `[E, C]`.
    """
    if factory.encoder is None:
        if task.preparation.num_nodes is not None:
            raise ValueError(
                f"{task.name} has no features but the ids of its nodes, for learnt embeddings. Give their width: "
                "model.encoder=64."
            )
        return None
    standardised = task.num_encodings + task.objective.num_labels
    options = {**factory.encoder}
    options["categories"] = [*_columns(task, "x", options.pop("scaling", "standard")), *[0] * standardised]
    if task.edge_dim is not None and _takes_edges(kind):
        options["edge_categories"] = columns = _columns(task, "edge_attr")
        if not task.has_many_graphs and Encoder(columns, None).out_channels <= options["channels"]:
            options["learn_edges"] = False
    return options


def _edge_width(encoder: Options) -> int:
    """Return the number of edge features that the encoder gives the network."""
    learnt: int = encoder["channels"]
    return learnt if encoder.get("learn_edges", True) else Encoder(encoder["edge_categories"], None).out_channels


def _readout(factory: ModelFactory, task: Task, kind: type[nn.Module]) -> Around:
    """Return the arguments of `Readout` other than the model, or None if it is not needed.

    It pools the network's outputs or, if layers of the readout follow, its embeddings.
    """
    aggr = factory.get("readout", "mean") if task.objective.item == "graph" else None  # null: the model's own
    if aggr is None:
        return None
    if not _needs_embeddings(factory):
        return {"aggr": aggr}
    if not issubclass(kind, (GAT, BasicGNN, MLP)):
        raise ValueError(
            f"model.readout is {aggr}, which needs a model that can return embeddings, as GAT or PyG's GIN. With "
            f"{kind.__name__} use one of {', '.join(LINEAR)}."
        )
    head = ("head_layers", "dropout", "act") if factory.get("head_layers") is not None else ()
    listed = [aggr] if isinstance(aggr, str) else [*aggr]
    pooled = [name for name in listed if name != COUNT] or "mean"
    options = {"aggr": pooled if COUNT in listed else aggr, "out_channels": task.num_classes}
    if columns := _graph_features(task, COUNT in listed):
        options["columns"] = columns
    return options | {key: factory.arguments[key] for key in head if key in factory.values}


def _graph_features(task: Task, counts: bool) -> Around:
    """Return the arguments of `GraphFeatures`, None without any columns: counts, and those of `graph_attr`."""
    if not counts and "graph_attr" not in task.train[0]:
        return None
    categories = [*_columns(task, "x"), *[0] * task.num_encodings] if counts else None
    of_edges = _columns(task, "edge_attr") if counts and task.edge_dim is not None else None
    options: Options = {"categories": categories, "edge_categories": of_edges}
    inputs, count = Inputs(frozenset({"edge_index", *FIELDS, "batch", "batch_size"})), GraphFeatures(**options)
    parts, collate = torch.arange(len(task.train)).split(CHUNK), Collate(task.train)
    rows = torch.cat([inputs.call(count, collate(part.tolist())) for part in parts]).double()
    std = scale(rows.std(0, correction=0), rows.mean(0), torch.float32)
    return options | {"mean": rows.mean(0).tolist(), "std": std.tolist()}


def _change(factory: ModelFactory, task: Task) -> Around:
    """Return the arguments of `Change` other than the model, or None if it is not asked for.

    Raises:
        ValueError: if no feature is nearer to a target than its mean.
    """
    if not factory.get("change"):
        return None
    columns, last, spread = earlier_values(task)
    if not columns:
        raise ValueError(
            f"model.change is true, but {task.name} has no two features that are earlier values of a target: nearer to "
            "it than its mean, in the training rows of nodes. Leave it out."
        )
    objective: Any = task.objective
    return {"columns": columns, "last": last, "mean": [*objective.mean], "std": [*objective.std], "scale": spread}


def earlier_values(task: Task) -> tuple[list[int], list[int], float]:
    """Return the features of nodes near to a target, the nearest to each, and their spread, as `nearest_features`."""
    if task.objective.item != "node" or not isinstance(task.objective, Targets):
        return [], [], 1.0
    masks = [slice(None) if task.has_many_graphs else data.train_mask for data in task.train]
    x = torch.cat([task.features(data)[mask] for data, mask in zip(task.train, masks, strict=True)]).double()
    return nearest_features(x, task.labels("train").double())


def nearest_features(x: Tensor, y: Tensor) -> tuple[list[int], list[int], float]:
    """Return the columns of x `[n, F]` near to a target, the nearest to each of y `[n, K]`, and their typical spread.

    There are none if one is not nearer than the mean to each target.
    """
    errors = torch.stack([(x - column[:, None]).square().nanmean(0) for column in y.unbind(1)])  # [K, F]
    variance = (y - y.nanmean(0)).square().nanmean(0)
    near = errors < torch.maximum(variance, y.square().nanmean(0) / 16)[:, None]  # within 25 % of a level
    columns = near.any(0).nonzero()[:, 0].tolist()
    if (errors.amin(1) >= variance).any() or len(columns) < 2:
        return [], [], 1.0
    spread = x[:, columns].var(1, correction=0).mean().sqrt()
    return columns, errors.argmin(1).tolist(), float(spread)


def _columns(task: Task, key: str, scaling: Scaling = "standard") -> list[Column]:
    """Return the argument `categories` of an encoder: of nodes x, of edges edge_attr, or of pairs edge_label_attr.

    In one graph, means are of the training rows alone: of nodes or of edges, whichever have the labels.
    """
    values = [task.features(data) if key == "x" else data[key] for data in task.train if key in data]
    graph, known = task.shared_graph, None
    row = {"node": "x", "edge": "edge_label_attr"}.get(task.objective.item)
    if graph is not None and row in graph and (key == "x") == (row == "x"):
        known = [(task.features(graph) if row == "x" else graph[row])[graph.train_mask]]
    return columns_of(values, known, scaling)


def _needs_embeddings(factory: ModelFactory) -> bool:
    """Return True if the readout of a model of graphs is of embeddings: it is not linear, or what follows is not."""
    return factory.get("readout", "mean") not in (None, *LINEAR) or factory.get("head_layers") is not None


def with_output_layer(factory: ModelFactory) -> dict[str, list[Any]]:
    """Return the lists with an entry for each layer of a `GAT` that also have one for the output layer that it lacks.

    It has none with `jk`, `head_layers` or a readout of embeddings. The choices of `model` have lists for networks
    with one.
    """
    hidden = factory.get("hidden_channels")
    if not isinstance(hidden, list) or (factory.get("jk") is None and not _needs_embeddings(factory)):
        return {}
    lists = {key: factory.get(key) for key in ("heads", "residual")}
    return {key: values for key, values in lists.items() if isinstance(values, list) and len(values) == len(hidden) + 1}


def _decoder(factory: ModelFactory, task: Task, kind: type[nn.Module]) -> Around:
    """Return the arguments of `LinkScores` other than the model, or None if the task needs no decoder.

    A perceptron also takes the features of labelled edges, encoded as those of the model if it has an encoder.
    """
    item, K = task.objective.item, task.num_classes
    decoder = factory.get("decoder", "mlp" if item == "edge" else None)
    if decoder is None or not task.objective.has_pairs:
        return None
    options = {"decoder": decoder} if isinstance(decoder, str) else dict(decoder)
    if not task.objective.has_columns:
        return {"channels": K, **options}
    if options.setdefault("decoder", "mlp") == "mlp":
        has_direction = not (task.source or {}).get("both", False)
        options.setdefault("combine", "concat" if has_direction else "product")
        features = [data.edge_label_attr for data in task.train if "edge_label_attr" in data]
        if features and "edge_dim" not in options:
            if factory.encoder is None:
                options["edge_dim"] = features[0].size(1)
            else:
                scaling = factory.encoder.get("scaling", "standard")
                options["edge_categories"] = _columns(task, "edge_label_attr", scaling)
    return {"channels": WIDTH, "out_channels": K, **options}
