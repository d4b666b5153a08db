"""The task of a run, read from its settings: data, split, encoding, metric and loss."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.errors import HydraException
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from torch_geometric.data import Data

from ..data.arrays.from_pyg import from_dataset
from ..data.arrays.series import the_graph
from ..data.encodings import encoded
from ..data.molecules.smiles import unseen_atoms
from ..data.named.published import split_file
from ..data.named.raw import data_root, folder_of_download, is_of_network, not_downloaded
from ..data.rows import column_name
from ..data.splits import TEST, VAL, check_classes, read_split
from ..models.encoders import num_categories, num_unknown
from ..settings.errors import message
from ..settings.hashing import MODEL, content_of_run
from ..settings.names import dataset_name
from ..settings.settings import Settings
from ..tasks.metrics import LINKS
from ..tasks.node_ids import num_nodes
from ..tasks.objective import SPLITS
from ..tasks.task import Task
from .gate import check_settings
from .result import CONFIG, settings_in
from .warm_start import Earlier

NOT_OF_THE_DATA = frozenset(  # groups and settings that `read_task` does not read
    {
        *("model", "training", "loss", "optimizer", "scheduler", "loader", "trainer", "logger"),
        *("seed", "runs", "vectorize", "seeds_per_pass", "ckpt_path", "checkpoint_every"),
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
    """Return a task of `read_task` with the loss of the settings, and the share of the labels that a step reads."""
    task = task.with_loss(**settings.loss.options) if settings.loss.options else task
    return task if (rate := settings.training.label_rate) is None else task.reading_labels(rate)


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
        graphs, place, source = task.graphs(split), f"{task.name}, {split}", task.source or {}
        if "categories" in source:
            text = unseen_atoms(graphs, source["categories"], place)
        else:
            keys = ("x", "edge_attr") if task.edge_dim is not None else ("x",)
            sizes = {key: num_categories(data[key] for data in task.train) for key in keys}
            text = unknown_categories(place, source, {key: [data[key] for data in graphs] for key in keys}, sizes)
        if text:
            rank_zero_warn(text)


def unknown_categories(
    place: str, source: Mapping[str, Any], values: Mapping[str, Sequence[Tensor]], sizes: Mapping[str, Sequence[int]]
) -> str:
    """Return a warning of values of features that are not a category of training, to which an encoder adds nothing."""
    texts = [
        f"{column_name(source, key, column)} has {count}"
        for key, each in values.items()
        for column, count in num_unknown(each, sizes[key]).items()
    ]
    what = "values that are not a category of the training rows. The encoder adds nothing to them"
    return f"{place}: {', '.join(texts)} {what}." if texts else ""


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
