"""The objects of a run, built from its settings: task, model, module, batches, trainer and logger."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from hydra.errors import HydraException
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, PNAConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ..data.arrays.from_pyg import from_dataset
from ..data.arrays.series import the_graph
from ..data.encodings import encoded
from ..data.named.published import split_file
from ..data.named.raw import data_root, folder_of_download, is_of_network, not_downloaded
from ..data.rows import column_name
from ..data.splits import TEST, VAL, check_classes, read_split
from ..distributed import ray
from ..distributed.halo import layers_of
from ..distributed.ranks import rank_zero_print
from ..graph.layers import graph_norms
from ..graph.partition import WITH_METIS, edge_cut
from ..models.baselines import MLP
from ..models.encoders import Column, Encoder, columns_of, num_categories, num_unknown
from ..models.gat import GAT
from ..seeds.fitting import seeded
from ..settings.conf import instantiate
from ..settings.errors import message
from ..settings.factory import Factory, ModelFactory
from ..settings.groups import Loader, Training
from ..settings.hashing import MODEL, content_of_run
from ..settings.names import dataset_name
from ..settings.rules import similar
from ..settings.settings import FIXED, Settings
from ..tasks.metrics import LINKS
from ..tasks.model import members, takes_sparse
from ..tasks.node_ids import num_nodes
from ..tasks.objective import SPLITS
from ..tasks.task import Task
from ..training.batching import Parts, is_divided
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData, sparse_pays
from ..training.modules import Inductive, Transductive
from .gate import check_settings
from .model_file import check_dtypes
from .result import CONFIG, settings_in
from .warm_start import Earlier, fill

LINEAR = ("mean", "sum", "add", "max")  # readouts of the model's outputs; others are of embeddings
WIDTH = 64  # of the nodes' embeddings from which a decoder predicts edge labels


class Built(NamedTuple):
    """A fresh model, the dotted name of its class, and the class's arguments."""

    model: nn.Module
    target: str
    arguments: dict[str, Any]


NOT_OF_THE_DATA = frozenset(  # groups and settings that `read_task` does not read
    {
        *("model", "training", "loss", "optimizer", "scheduler", "loader", "trainer", "logger"),
        *("seed", "runs", "vectorize", "seeds_per_pass", "processes", "ckpt_path", "checkpoint_every"),
        *("methods", "datasets", "protocol", "outputs", "results", "baselines", "candidates", "cell", "code"),
    }
)


def data_key(settings: Settings) -> str:
    """Return a text that is equal for settings with the same data, split and metric."""
    values = settings.to_dict()
    names = sorted(values.keys() - NOT_OF_THE_DATA)
    return json.dumps([{name: values[name] for name in names}, settings.model.get("encoder")], default=str)


def build_task(settings: Settings) -> Task:
    """Build the task of a run: its data, split and metric, and its loss."""
    return with_loss(read_task(settings), settings)


def with_loss(task: Task, settings: Settings) -> Task:
    """Return a task of `read_task` with the loss of the settings."""
    return task.with_loss(**settings.loss.options) if settings.loss.options else task


def read_task(settings: Settings) -> Task:
    """Read the data of the settings `dataset`, and apply the settings `encoding` and `metric`."""
    if (task := READ.get(data_key(settings))) is not None:
        return task
    return prepared(read_data(settings)[0], settings)


READ: dict[str, Task] = {}  # the task that `suited` has read last, by its `data_key`


def read_data(settings: Settings, in_shares: bool = False) -> tuple[Task, Settings]:
    """Read the data of the settings `dataset`: of this package's task, or any PyG data set by its `_target_`.

    A class with an argument `split="train"` is instantiated once for each split. `root` is by default the folder with
    the class's name in `data_root`. Returns the settings too: with `in_shares`, the sizes of the splits are shares if
    those of the settings do not fit.
    """
    dataset, target = settings.dataset, settings.dataset.locate()
    if settings.content is not None and (now := settings.content_now()) not in (None, settings.content):
        raise ValueError(
            f"The content of the data files was {settings.content} when the run began, is {now}. Restore the file, or "
            "train again."
        )
    others: dict[str, Any] = {}
    parameters = inspect.signature(target).parameters
    if inspect.isclass(target) and "root" in parameters and dataset.get("root") is None:
        others["root"] = str(data_root(settings.data_root) / target.__name__)
    reads_task = "task" in parameters and str(dataset.target).startswith("gat_pyg.")
    if reads_task:
        others["task"] = settings.task
    if settings.split.draws is not None and {"seed", *SIZES} <= dataset.values.keys():  # the seed of a split
        others["seed"] = settings.split.drawn_seed
    earlier = Earlier.of(settings)
    if earlier is not None and "like" in parameters:
        others["like"] = MappingProxyType(dict(earlier.preparation.source or {}))  # which Hydra passes as it is
    for key in ("pre_transform", "transform"):
        if isinstance(transform := dataset.get(key), str):
            name = transform if "." in transform else f"torch_geometric.transforms.{transform}"
            raise ValueError(
                f"dataset.{key} is {transform!r}, expected a class with its arguments: +dataset.{key}._target_={name}, "
                f"and each argument as in +dataset.{key}.max_degree=10."
            )
    start = time.time()
    try:
        if "split" in parameters and parameters["split"].default == "train" and dataset.get("split") is None:
            result: Any = [dataset(split=split, **others) for split in ("train", "val", "test")]
        else:
            result = dataset(**others)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, HydraException) else error  # as Hydra 1.4 raises it
        if cause is None or not is_of_network(cause):
            raise
        folder = Path(others.get("root") or data_root(dataset.get("root")))
        name = dataset_name(dataset.values)
        raise not_downloaded(f"{name} was", folder_of_download(folder, start), cause) from error
    if not isinstance(result, Task):
        try:
            return _drawn(_converted(result, settings), settings), settings
        except ValueError:
            if not in_shares:
                raise
            settings = settings.updated(SHARES)
            return _drawn(_converted(result, settings), settings), settings
    if settings.task is not None and not reads_task:
        raise ValueError(
            f"task={settings.task}, but {result.name} is a task already: it predicts {result.objective.predicts}. "
            "Leave out task."
        )
    return _drawn(result, settings), settings


SHARES: dict[str, None] = dict.fromkeys(("split.per_class", "split.val", "split.test"))
SIZES = ("val", "test")  # arguments of functions that draw a split


def _converted(dataset: Any, settings: Settings) -> Task:
    """Return the task of a data set of PyG."""
    keys = ("pre_transform", "transform")  # in the order in which PyG applies them
    transforms = [transform for key in keys if isinstance(transform := settings.dataset.get(key), dict)]
    name, split = dataset_name(settings.dataset.values), dataclasses.asdict(settings.split)
    del split["column"], split["time"], split["scaffold"]  # of tables and molecules
    split["seed"], draws, file = settings.split.drawn_seed, split.pop("draws"), split.pop("file")
    if draws is not None:
        split["split"] = 0
    if file is not None:
        dataset = _with_split(dataset, split_file(file, settings.data_root), name)
    if isinstance(folds := settings.split.folds, str) and not Path(folds).expanduser().exists():
        split["folds"] = data_root(settings.data_root) / folds
    if settings.task == LINKS and (settings.split.val, settings.split.test) == (VAL, TEST):
        split["val"] = split["test"] = None  # these defaults are numbers of nodes
    task = from_dataset(dataset, name, **split, transforms=transforms, task=settings.task)
    if not hasattr(dataset, "get_idx_split"):  # a benchmark keeps its own split
        check_classes(task)
    return task if file is None else task.split_by(["file"], 1)


def _with_split(dataset: Any, path: Path, name: str) -> Data:
    """Return the only graph of a data set, with the split of a file in place of its own."""
    graph = the_graph(dataset)
    if not isinstance(graph, Data):
        raise ValueError(f"{name}: split.file has nodes of a single graph, but there are several. Leave it out.")
    masks = read_split(path, num_nodes(graph), name)
    return copy.copy(graph).update(masks)


def _drawn(task: Task, settings: Settings) -> Task:
    """Return a task with the number of splits that are drawn by `split.draws`."""
    draws, number = settings.split.draws, settings.split.split
    if draws is None:
        return task
    arguments = task.split_arguments
    if arguments is None and {"seed", *SIZES} <= settings.dataset.values.keys():
        arguments = ("seed",)
    if arguments is None or "seed" not in arguments:
        raise ValueError(f"split.draws is {draws}, but {task.name} has a split of its own. Leave out split.draws.")
    if settings.split_number >= draws:
        raise ValueError(f"split.split is {number}, but split.draws is {draws}: expected a number below it, or all.")
    return task.split_by([*arguments, "draws"], draws)


def prepared(task: Task, settings: Settings) -> Task:
    """Return a task of `read_data` with the encoding and the metric of the settings."""
    if settings.model.get("encoder") is not None and task.has_many_graphs:
        warn_of_unknown_categories(task)
    if settings.split.split not in (0, "all") and task.num_splits < 2:
        raise ValueError(
            f"split.split is {settings.split.split}, but {task.name} has one split. Leave out split.split."
        )
    if settings.encoding.target is not None:
        task = encoded(task, settings.encoding.values, settings.data_root)
    task = task if settings.metric is None else task.scored_by(settings.metric)
    earlier = Earlier.of(settings)
    return task if earlier is None else earlier.applied(task)


def warn_of_unknown_categories(task: Task) -> None:
    """Warn once for each of validation and test whose features have categories that training does not have."""
    for split in SPLITS[1:]:
        texts = []
        for key in ("x", "edge_attr") if task.edge_dim is not None else ("x",):
            categories = num_categories(data[key] for data in task.train)
            unknown = num_unknown((data[key] for data in task.graphs(split)), categories)
            texts += [f"{column_name(task.source, key, column)} has {count}" for column, count in unknown.items()]
        if texts:
            rank_zero_warn(
                f"{task.name}: {split} has values that are not a category of training; the encoder adds nothing to them"
                f": {', '.join(texts)}."
            )


def task_of(run_dir: str | Path, trust: bool = False) -> Task:
    """Build the task that a run was trained on, from the settings in its folder.

    Args:
        run_dir: the folder of the run.
        trust: as in `settings_of`.

    Raises:
        FileNotFoundError: if the folder has no settings.
        ValueError: as `settings_of`, or if the data cannot be read.
    """
    settings = settings_of(run_dir, trust)
    if settings.from_ is not None and (Path(run_dir) / MODEL).is_file():  # has what it kept of the earlier run
        settings = settings.replace(from_=str(run_dir), start=content_of_run(run_dir))
    return build_task(settings)


def settings_of(run_dir: str | Path, trust: bool = False) -> Settings:
    """Return the settings of a run. Nothing that they name is imported or built before they passed the gate.

    Args:
        run_dir: the folder of the run.
        trust: whether the settings may name any class and any folder, as those of one's own runs.

    Raises:
        FileNotFoundError: if the folder has no settings.
        ValueError: if the settings are not of this version, or as `gat_pyg.runs.gate.check_settings`.
    """
    values, path = settings_in(Path(run_dir)), Path(run_dir) / CONFIG
    if not trust:
        check_settings(values, path)
    try:
        return Settings.parse(OmegaConf.create(values))
    except (ValueError, KeyError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: {message(error) or f'{error} is missing'}") from error


def initial_model(settings: Settings, task: Task, seed: int) -> Built:
    """Build the model with which the run of a seed begins: a fresh one, or with the weights of an earlier run."""
    built = seeded(seed, lambda: build_model(settings.model, task, Earlier.of(settings)))
    if settings.from_ is not None:
        fill(built.model, settings, seed)
    return built


def build_model(factory: ModelFactory, task: Task, earlier: Earlier | None = None) -> Built:
    """Build a fresh model for the task, with what an earlier run computed from its data, such as categories.

    Raises:
        ValueError: if an argument clashes with the data set, or the trained model could not be saved.
    """
    kind, arguments = factory.locate(), factory.arguments
    parameters = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    embeddings = dict(factory.encoder or {})
    encoder: int | None = embeddings.pop("channels", None)
    if encoder is None and task.preparation.num_nodes is not None:
        raise ValueError(
            f"{task.name} has no features but the ids of its nodes, for learnt embeddings. Give their width: "
            "model.encoder=64."
        )
    decoder = _decoder(factory, task, encoder)
    out_channels = task.num_classes if decoder is None else decoder["channels"]
    sizes: dict[str, Any] = {"in_channels": encoder or task.num_features, "out_channels": out_channels}
    if task.shared_graph is not None and "num_nodes" in parameters:  # for parameters or labels of each node
        sizes["num_nodes"] = task.shared_graph.num_nodes
    takes_edges = "edge_dim" in parameters or (takes_any and getattr(kind, "supports_edge_attr", False))
    of_edges: dict[str, Any] = {}
    if task.edge_dim is not None and takes_edges:
        sizes["edge_dim"] = task.edge_dim
        if encoder is not None:
            of_edges, sizes["edge_dim"] = _encoder_of_edges(task, encoder)
    if "deg" in parameters:
        sizes["deg"] = [float(count) for count in PNAConv.get_degree_histogram(task.train).tolist()]
    if clash := sorted(sizes.keys() & arguments.keys()):
        raise ValueError(f"model.{clash[0]} follows from the data set, which has {sizes[clash[0]]}. Leave it out.")
    arguments = {key: value for key, value in sizes.items() if key in parameters or takes_any} | arguments
    target = str(factory.target)
    readout = factory.get("readout", "mean") if task.objective.item == "graph" else None  # null: the model's own
    pooling: dict[str, Any] = {"aggr": readout}
    if readout is not None and _needs_embeddings(factory):
        if not issubclass(kind, (GAT, BasicGNN, MLP)):
            raise ValueError(
                f"model.readout is {readout}, which needs a model that can return embeddings, as GAT or PyG's GIN. "
                f"With {kind.__name__} use one of {', '.join(LINEAR)}."
            )
        pooling["out_channels"], arguments["out_channels"] = task.num_classes, None
        if (layers := arguments.pop("head_layers", None)) is not None:  # after the readout
            pooling |= {key: arguments[key] for key in ("dropout", "act") if key in arguments}
            pooling["head_layers"] = layers
    if issubclass(kind, GAT):
        arguments |= {key: values[:-1] for key, values in with_output_layer(factory).items()}
    if encoder is not None:
        arguments = {"model": {"_target_": target, **arguments}, "channels": encoder, **embeddings}
        arguments["categories"] = [*_columns(task, "x"), *[0] * task.num_encodings]  # which are standardised
        arguments |= of_edges
        target = "gat_pyg.models.Encoded"
    if readout is not None:  # the model returns a row for each node
        arguments = {"model": {"_target_": target, **arguments}, **pooling}
        target = "gat_pyg.models.Readout"
    if decoder is not None:
        arguments = {"model": {"_target_": target, **arguments}, **decoder}
        target = "gat_pyg.models.LinkScores"
    arguments = arguments if earlier is None else earlier.fitted(arguments)
    try:
        model = Factory("model", {"_target_": target, **arguments})()
    except ValueError as error:  # raised by a layer that refuses the `**kwargs` of its model
        unknown = re.search(r"(?:unexpected keyword argument '|has no argument )(\w+)", str(error))
        if unknown is None or unknown[1] not in factory.arguments:
            raise
        name, known = f"model.{unknown[1]}", [f"model.{parameter}" for parameter in parameters]
        raise ValueError(f"{kind.__qualname__} has no argument {name}.{similar(name, known)}") from error
    for norm in model.modules():
        if isinstance(norm, BatchNorm) and norm.module.track_running_stats:
            norm.allow_single_element = True  # a batch of graphs may be a single atom, which torch refuses in training
    check_dtypes(model)
    return Built(model, target, arguments)


def _columns(task: Task, key: str) -> list[Column]:
    """Return the argument `categories` of an encoder: of nodes x, of edges edge_attr, or of pairs edge_label_attr.

    In one graph, means are of the training rows alone: of nodes or of edges, whichever have the labels.
    """
    values = [task.features(data) if key == "x" else data[key] for data in task.train if key in data]
    graph, known = task.shared_graph, None
    row = {"node": "x", "edge": "edge_label_attr"}.get(task.objective.item)
    if graph is not None and row in graph and (key == "x") == (row == "x"):
        known = [(task.features(graph) if row == "x" else graph[row])[graph.train_mask]]
    return columns_of(values, known)


def _encoder_of_edges(task: Task, channels: int) -> tuple[dict[str, Any], int]:
    """Return the arguments of `Encoded` for edge features, and their width.

    The edges of one graph, which are in memory together, have no learnt encoding if they have fewer columns: since
    every layer has a linear map of them, it would add nothing but a gradient `[E, C]`.
    """
    columns = _columns(task, "edge_attr")
    width = Encoder(columns, None).out_channels
    if task.has_many_graphs or width > channels:
        return {"edge_categories": columns}, channels
    return {"edge_categories": columns, "learn_edges": False}, width


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


def _decoder(factory: ModelFactory, task: Task, encoder: int | None) -> dict[str, Any] | None:
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
        options.setdefault("combine", "concat")  # an edge has a direction
        features = [data.edge_label_attr for data in task.train if "edge_label_attr" in data]
        if features and "edge_dim" not in options and encoder is None:
            options["edge_dim"] = features[0].size(1)
        elif features and "edge_dim" not in options:
            options["edge_categories"] = _columns(task, "edge_label_attr")
    return {"channels": WIDTH, "out_channels": K, **options}


def build_module(settings: Settings, task: Task, model: nn.Module) -> Transductive | Inductive:
    """Build the module for the task's setup, and compile the model if `training.compile` is true."""
    training, optimisation = settings.training, settings.optimisation
    if task.objective.has_pairs and members(model).has_loss:
        raise ValueError(
            f"{type(model).__name__} trains with a loss on node labels, and {task.name} has labels of pairs. "
            "Choose a model without a loss of its own."
        )
    if training.compile:
        model.compile()
    if not task.has_many_graphs:
        return Transductive(model, task.objective, optimisation, training.cuda_graphs)
    if training.cuda_graphs is True:
        raise ValueError(
            f"training.cuda_graphs is true, but {task.name} has many graphs. Use training.cuda_graphs=auto."
        )
    return Inductive(model, task.objective, optimisation)


def build_data(
    loader: Loader, training: Training, task: Task, model: nn.Module, trainer: Trainer, seed: int
) -> TaskData:
    """Build the batches that `loader` describes."""
    if task.objective.has_pairs and is_divided(trainer):
        raise ValueError(
            f"trainer.strategy is halo, which divides the nodes, but {task.name} predicts {task.objective.item}s with "
            "ends in two parts. Use trainer.strategy=ddp with loader=neighbor or +loader.num_links=1024."
        )
    if is_divided(trainer) and (loader.in_batches or training.compile or task.has_many_graphs):
        raise ValueError(
            "trainer.strategy is halo, which divides a single graph and needs loader=full and training.compile=false. "
            f"For other loaders, compiled models or many graphs, use trainer.strategy=ddp. The data set is {task.name}."
        )
    if is_divided(trainer):
        layers_of(model)
    if not loader.in_batches:
        sparse = wants_sparse(training, task, model, trainer)
        return TaskData(task, training.batch_size, seed, sparse, num_links=loader.num_links)
    if names := graph_norms(model):
        raise ValueError(
            f"the model has {names[0]}, which is over all nodes of a graph, and the loader gives batches of nodes. "
            "Use loader=full, norm=batch, or norm=layer with norm_kwargs.mode=node."
        )
    if training.sparse is True:
        raise ValueError("training.sparse is true, but batches of nodes have dense features. Use loader=full.")
    hops, batch_size = loader.num_neighbors, loader.batch_size or 1
    data = TaskData(task, batch_size, seed, False, hops, loader.num_workers or 0, loader.num_parts, loader.num_links)
    if isinstance(parts := data.loading, Parts):
        cut = 100 * edge_cut(task.train[0].edge_index, parts.part)  # before the fit, in which other ranks would wait
        how = "by METIS" if WITH_METIS else "of node ids in a row (by METIS with 'gat_pyg[metis]')"
        rank_zero_print(f"{task.name}: {parts.num_parts} parts {how}, {cut:.1f} % of the edges between them")
        return data
    expected = members(model).num_hops
    if expected not in (None, 0, len(hops or ())):
        raise ValueError(f"loader.num_neighbors is {hops}, expected {expected} numbers: one for each hop of the model.")
    return data


def wants_sparse(training: Training, task: Task, model: nn.Module, trainer: Trainer, stacked: bool = False) -> bool:
    """Return True if `training.sparse` makes the features a sparse matrix."""
    sparse = training.sparse
    if is_divided(trainer) and sparse == "auto":
        return False  # halo fetches dense rows
    if sparse is True and is_divided(trainer):
        raise ValueError("training.sparse is true, but trainer.strategy=halo fetches dense rows. Use auto or false.")
    if sparse is True and (task.has_many_graphs or not takes_sparse(model)):
        raise ValueError(
            f"training.sparse is true, which {task.name} with {type(model).__name__} does not support: it needs a "
            "single graph and a model that takes sparse features, such as gat_pyg.models.GAT, and is not compiled. "
            "Use training.sparse=auto."
        )
    device = trainer.strategy.root_device.type
    use_sparse = sparse_pays(task, model, device, stacked) if sparse == "auto" else sparse
    if use_sparse:
        x = task.train[0].x
        share = 100 * int(x.count_nonzero()) / max(x.numel(), 1)
        rank_zero_print(f"{task.name}: only {share:.1f} % of the features are nonzero; using a sparse matrix")
    return use_sparse


def build_trainer(
    trainer: Factory, logger: Factory, folder: Path, callbacks: Sequence[Any] = (), **changes: Any
) -> Trainer:
    """Build Lightning's trainer and its logger, without options that slow down each epoch."""
    plugins: list[Any] = []
    if trainer.get("strategy") == ray.STRATEGY:
        changes["strategy"], plugins = ray.ray_strategy()
        changes["devices"] = "auto"
    fixed = {
        "plugins": [SafeCheckpoints(), *plugins],
        "callbacks": list(callbacks),
        "logger": build_logger(logger, folder),
        "default_root_dir": str(folder),
    }
    return cast(Trainer, trainer(**changes, **fixed, **FIXED))


def build_logger(factory: Factory, folder: Path) -> Any:
    """Build a Lightning logger that writes into `folder`; return False if no logger besides metrics.csv is set."""
    if factory.target is None:
        return False
    parameters = inspect.signature(factory.locate()).parameters
    key = next((key for key in ("save_dir", "log_dir") if key in parameters and factory.get(key) is None), None)
    try:
        return instantiate(factory.values, **({key: str(folder)} if key else {}))
    except (HydraException, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        packages = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
        package = packages.get(factory.target.rpartition(".")[2], "tensorboard")
        raise ValueError(
            f"{factory.target} needs a package that is not installed. Run: python -m pip install {package}. "
            "Or use logger=csv, which needs none."
        ) from error
