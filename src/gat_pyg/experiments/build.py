"""What the settings name: the task, the model, how it is trained, the batches, the trainer and its logger."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

import torch
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ..data.own import from_dataset, name_of
from ..data.raw import data_root
from ..distributed import ray
from ..distributed.halo import layers_of
from ..distributed.ranks import say
from ..graph.partition import WITH_METIS, edge_cut
from ..tasks.task import Task
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData, is_divided, sparse_pays, takes_sparse
from ..training.modules import Inductive, Transductive

NAMESAKES = ("GAT",)  # classes that PyG has under the same name
RAY = "ray"  # the strategy's name
Built: TypeAlias = tuple[nn.Module, str, dict[str, Any], str]  # a model, its class's name, its arguments, the method


def build_task(config: DictConfig) -> Task:
    """The task that ``dataset`` names: one of this package's, or any PyG data set by its ``_target_``.

    A class that comes in parts (``split="train"`` by default) is made three times; ``root`` is by default a folder of
    the class's name in ``data_root``.
    """
    settings = config.dataset
    target = _located("dataset", settings.get("_target_"))
    _check_arguments("dataset", target, settings)
    given: dict[str, Any] = {}
    takes = inspect.signature(target).parameters
    if inspect.isclass(target) and "root" in takes and settings.get("root") is None:
        given["root"] = str(data_root(config.data_root) / target.__name__)
    described = [settings.get(key) for key in ("pre_transform", "transform")]  # in the order that PyG applies them
    transforms: list[Any] = [
        OmegaConf.to_container(each, resolve=True) for each in described if OmegaConf.is_dict(each)
    ]
    if "split" in takes and takes["split"].default == "train" and "split" not in settings:
        parts = [_made("dataset", settings, split=split, **given) for split in ("train", "val", "test")]
        return from_dataset(parts, dataset_name(settings), **config.split, transforms=transforms)
    found = _made("dataset", settings, **given)
    if isinstance(found, Task):
        return found
    return from_dataset(found, dataset_name(settings), **config.split, transforms=transforms)


def dataset_name(settings: DictConfig) -> str:
    """Return the name of the data set in results and folders, before it is loaded.

    This package's data sets keep their names, a file has its stem, and any other class is joined with its ``name``.

    >>> dataset_name(OmegaConf.create({"_target_": "torch_geometric.datasets.Amazon", "name": "Photo"}))
    'amazon-photo'
    """
    target, name, path = (str(OmegaConf.select(settings, key) or "") for key in ("_target_", "name", "path"))
    home, _, kind = target.rpartition(".")
    if home != "gat_pyg.data":
        return name_of(kind, name)
    return Path(name or path).stem or kind


def build_model(settings: DictConfig, task: Task) -> Built:
    """A fresh model for the task, the name of its class, its arguments, and the method's name."""
    arguments = cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True))
    target = str(arguments.pop("_target_", None))
    made = _located("model", target)
    _check_arguments("model", made, settings)
    if not inspect.isclass(made) or not issubclass(made, nn.Module):
        raise ValueError(f"model._target_={target} is no torch.nn.Module, expected the class of one.")
    namesake = made.__name__ in NAMESAKES and not made.__module__.startswith("gat_pyg.")
    method = str(arguments.pop("method", None) or (f"PyG's {made.__name__}" if namesake else made.__name__))
    readout = arguments.pop("readout", "mean")  # of a model that gives a row for each node, where labels are of graphs
    takes = inspect.signature(made).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    sizes = {"in_channels": task.num_features, "out_channels": task.num_classes}
    if task.shared_graph is not None and "num_nodes" in takes:  # what is kept for each node
        sizes["num_nodes"] = task.shared_graph.num_nodes
    if task.edge_dim is not None and ("edge_dim" in takes or (anything and getattr(made, "supports_edge_attr", False))):
        sizes["edge_dim"] = task.edge_dim
    if clash := sorted(sizes.keys() & arguments.keys()):
        raise ValueError(f"model.{clash[0]} follows from the data set, which has {sizes[clash[0]]}. Leave it out.")
    arguments = {key: value for key, value in sizes.items() if key in takes or anything} | arguments
    if task.objective.item == "graph" and readout is not None:
        arguments = {"model": {"_target_": target, **arguments}, "aggr": readout}
        target = "gat_pyg.models.Readout"
    model = _made("model", {"_target_": target, **arguments})
    return model, target, arguments, method


def build_module(config: DictConfig, task: Task, model: nn.Module) -> Transductive | Inductive:
    """The setup that the task asks for, with the model compiled where ``training.compile`` says so."""
    training = config.training
    if training.compile:
        model.compile()
    if task.shared_graph is not None:
        return Transductive(model, task.objective, training.lr, training.weight_decay, training.cuda_graphs)
    if training.cuda_graphs is True:
        raise ValueError(
            f"training.cuda_graphs is true, but {task.name} has many graphs. Use training.cuda_graphs=auto."
        )
    return Inductive(model, task.objective, training.lr, training.weight_decay)


def build_data(config: DictConfig, task: Task, model: nn.Module, trainer: Trainer, seed: int) -> TaskData:
    """The graphs as ``loader`` says."""
    loader = config.loader
    if is_divided(trainer) and (in_batches(config) or config.training.compile or task.shared_graph is None):
        raise ValueError(
            "trainer.strategy is halo, which divides a single graph: it takes loader=full, training.compile=false and "
            f"no data set of many graphs, as {task.name} may be. For those, use trainer.strategy=ddp."
        )
    if is_divided(trainer):
        layers_of(model)
    if not in_batches(config):
        return TaskData(task, config.training.batch_size, seed, wants_sparse(config, task, model, trainer))
    if config.training.sparse is True:
        raise ValueError("training.sparse is true, but batches of nodes have dense features. Use loader=full.")
    hops = loader.get("num_neighbors") and list(loader.num_neighbors)
    data = TaskData(task, loader.batch_size, seed, False, hops, loader.num_workers, loader.get("num_parts"))
    if (num_parts := data.num_parts) is not None:
        cut = 100 * edge_cut(task.train[0].edge_index, data.part)  # before the fit, where others wait for this process
        how = "by METIS" if WITH_METIS else "of node ids in a row (by METIS with 'gat_pyg[metis]')"
        say(f"{task.name}: {num_parts} parts {how}, {cut:.1f} % of the edges between them")
        return data
    wanted = getattr(model, "num_hops", None)
    if wanted not in (None, 0, len(hops)):
        raise ValueError(
            f"loader.num_neighbors is {loader.num_neighbors}, expected {wanted} numbers: one for each hop of the model."
        )
    return data


def in_batches(config: DictConfig) -> bool:
    """Whether a step is a batch of a graph's nodes."""
    return any(config.loader.get(key) is not None for key in ("num_neighbors", "num_parts"))


def wants_sparse(config: DictConfig, task: Task, model: nn.Module, trainer: Trainer, stacked: bool = False) -> bool:
    """Whether the features are to be a sparse matrix, as ``training.sparse`` says."""
    asked = config.training.sparse
    if is_divided(trainer) and asked == "auto":
        return False  # rows of the features are fetched
    if asked is True and is_divided(trainer):
        raise ValueError("training.sparse is true, but trainer.strategy=halo fetches dense rows. Use auto or false.")
    if asked is True and (task.shared_graph is None or not takes_sparse(model)):
        raise ValueError(
            f"training.sparse is true, but {task.name} with {type(model).__name__} cannot do that: it needs a single "
            "graph and a model that takes sparse features, such as gat_pyg.models.GAT, and is not compiled. "
            "Use training.sparse=auto."
        )
    device = trainer.strategy.root_device.type
    sparse = sparse_pays(task, model, device, stacked) if asked == "auto" else bool(asked)
    if sparse:
        x = task.train[0].x
        share = 100 * int(x.count_nonzero()) / max(x.numel(), 1)
        say(f"{task.name}: {share:.1f} % of the features are not 0, so they are a sparse matrix")
    return sparse


def check_gpus(trainer: DictConfig) -> None:
    """Check that this machine has the GPUs that the settings ask for; Ray finds them on its machines.

    Raises:
        ValueError: if it has fewer.
    """
    if trainer.get("accelerator") not in ("gpu", "cuda") or trainer.get("strategy") == RAY:
        return
    devices, gpus = trainer.get("devices", "auto"), torch.cuda.device_count()
    numbers = devices.split(",") if isinstance(devices, str) and "," in devices else devices  # "0,1" is Lightning's
    needed = 1
    if isinstance(numbers, Sequence) and not isinstance(numbers, str):
        needed = 1 + max((int(number) for number in numbers if number != ""), default=0)
    elif str(devices).isdecimal():  # not "auto", or -1, which is all
        needed = int(devices)
    if gpus >= max(needed, 1) or (gpus == 0 and torch.backends.mps.is_available()):
        return
    built = "" if torch.version.cuda or torch.version.hip else " (built without CUDA)"
    count = {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    among = "" if visible is None else f" among CUDA_VISIBLE_DEVICES={visible}"
    fewer = "" if gpus == 0 else f"trainer.devices={gpus}, or "
    cpu = "trainer=cpu" if trainer.get("strategy") is None else "trainer=ddp_cpu for processes on its CPUs"
    raise ValueError(
        f"trainer.accelerator is {trainer.accelerator} and trainer.devices is {devices}, but torch {torch.__version__}"
        f"{built} finds {count} on this machine{among}. Use {fewer}{cpu}."
    )


def build_trainer(config: DictConfig, folder: Path, callbacks: Sequence[Any], **changes: Any) -> Trainer:
    """Lightning's trainer as ``trainer`` and ``logger`` say; what would cost time in each epoch is off."""
    others: list[Any] = []
    if config.trainer.get("strategy") == RAY:
        changes["strategy"], others = ray.among_others()
        changes["devices"] = "auto"
    fixed = {
        "plugins": [SafeCheckpoints(), *others],
        "callbacks": list(callbacks),
        "logger": build_logger(config.logger, folder),
        "default_root_dir": str(folder),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    if clash := sorted(fixed.keys() & config.trainer.keys()):
        raise ValueError(f"trainer.{clash[0]} is set by the command. Leave it out.")
    return cast(Trainer, _made("trainer", config.trainer, **changes, **fixed))


def build_logger(settings: DictConfig, folder: Path) -> Any:
    """A Lightning logger that writes into ``folder``, or False where metrics.csv is enough."""
    target = settings.get("_target_")
    if target is None:
        return False
    takes = inspect.signature(_located("logger", target)).parameters
    place = next((key for key in ("save_dir", "log_dir") if key in takes and key not in settings), None)
    try:
        return instantiate(settings, **({place: str(folder)} if place else {}))
    except (HydraException, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        package = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}.get(target.rpartition(".")[2], "tensorboard")
        raise ValueError(
            f"{target} needs a package that is not installed. Run: python -m pip install {package}. "
            "Or use logger=csv, which needs none."
        ) from error


def _located(group: str, target: Any) -> Any:
    try:
        found = get_object(target)
    except Exception as error:
        message = f"{group}._target_={target} cannot be found. Give the dotted name of something that can be imported."
        raise ValueError(message) from error
    if not callable(found):
        raise ValueError(f"{group}._target_={target} cannot be called, expected a class or a function.")
    return found


def _made(group: str, settings: Any, **others: Any) -> Any:
    """Instantiate what ``settings._target_`` names; ValueError with the cause if its arguments do not suit it."""
    try:
        return instantiate(settings, _convert_="all", **others)
    except HydraException as error:
        cause = error.__cause__
        if not isinstance(cause, (TypeError, ValueError, RuntimeError, MisconfigurationException)):
            raise
        config = settings if isinstance(settings, DictConfig) else OmegaConf.create(settings)
        own = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
        target = own.pop("_target_")
        hint = " On this machine trainer=cpu may be what works." if _NO_DEVICE.search(str(cause)) else ""
        text = " ".join(str(cause).split())
        raise ValueError(f"{group}._target_={target}: {text}{hint} Its settings: {own}.") from error


_NO_DEVICE = re.compile(r"accelerator is not available")  # Lightning's words
_MAY_BE_ZERO = ("decayed_layers", "num_iterations", "num_negative_samples", "pretrain_steps", "steps")  # of a model


def _check_arguments(group: str, target: Any, settings: DictConfig) -> None:
    """Raise ValueError for settings that are not of the types that one of this package's signatures names."""
    if not target.__module__.startswith("gat_pyg."):  # others' annotations may be wrong
        return
    types = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True)).items():
        least = 0 if group == "dataset" or name in _MAY_BE_ZERO else 1
        if name in types and not _is_a(value, types[name], least):
            raise ValueError(f"{group}.{name} is {value!r}, expected {_in_words(types[name], least)}.")
    if "dropout" in types and not 0 <= settings.get("dropout", 0) <= 1:
        raise ValueError(f"{group}.dropout is {settings.dropout}, expected a number from 0 to 1.")
    if not isinstance(settings.get("method"), (str, type(None))):
        raise ValueError(f"{group}.method is {settings.method!r}, expected text: the method's name in the results.")


def _is_a(value: Any, kind: Any, least: int) -> bool:
    """Return whether a plain value has an annotated type; a mapping, which describes an object, fits every type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or isinstance(value, dict):
        return True
    if origin in (Union, UnionType):
        return any(_is_a(value, one, least) for one in inner)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_is_a, value, inner, repeat(least)))
    if origin is Sequence:
        return isinstance(value, list) and all(_is_a(each, inner[0], least) for each in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and value >= least
    return type(value) is (str if kind is Path else kind)


def _in_words(kind: Any, least: int) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_in_words(one, least) for one in inner))
    if origin in (tuple, Sequence):
        return f"a list of which each is {_in_words(inner[0], least)}"
    whole = f"a whole number, at least {least}"
    words = {int: whole, float: "a finite number", bool: "true or false", str: "text", Path: "text"}
    return words.get(kind, "null" if kind is type(None) else f"a {kind.__name__} by its _target_")
