"""The settings of a run: parsed and checked once, then frozen."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..tasks.metrics import ALIASES, METRICS, TASKS
from .hashing import config_hash, content_of_run, data_settings, flattened, hashed, source_hash
from .rules import (
    FINITE,
    POSITIVE,
    SECONDS,
    Rule,
    check_arguments,
    choice,
    is_finite,
    is_list,
    is_name,
    is_one_of,
    number,
    sequence,
    similar,
    text,
    whole,
)

if TYPE_CHECKING:
    from ..training.optimisation import Optimisation

INTERNAL = ("candidates", "content", "code", "start", "cell")  # settings that the command sets itself
MAY_CHANGE_ON_RESUME = frozenset(
    {
        *("ckpt_path", "checkpoint_every", "vectorize", "seeds_per_pass", "processes", "loader.num_workers"),
        *("model.form", "model.study", "baselines"),
        *(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "deterministic")),
    }
)
VECTORIZE: dict[Any, bool | Literal["auto"]] = {"auto": "auto", "on": True, True: True, "off": False, False: False}
LABELS = {  # settings of `model` that name it in results, not arguments of its class
    "method": "the name of the method in results and tables; by default that of its class",
    "form": "the name of a variant, if a method has several",
    "study": "the name of a study, whose runs are not those of the paper's tables",
}
AROUND = {  # settings of `model` for what is put around the network
    "encoder": "the width of an encoder of the features, or {channels: 64, init: orthogonal}: gat_pyg.models.Encoder",
    "readout": "the aggregation over the nodes of a graph, such as mean, sum or attentional: gat_pyg.models.Readout",
    "decoder": "the score of a pair of nodes: dot, bilinear or mlp: gat_pyg.models.link_decoder",
}
NAMESAKES = ("GAT",)  # our classes that have the name of a PyG class
FIXED = {  # arguments of the trainer that the command sets
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}
TRAINER = {
    "trainer.max_epochs": whole(1),
    "trainer.devices": Rule(
        "auto, a number of devices, at least 1, or a list of their indices",
        lambda value: (
            is_name(value)
            or value == -1
            or whole(1).fits(value)
            or is_list(value, lambda index: type(index) is int and index >= 0)
        ),
    ),
    "trainer.deterministic": choice(None, True, False, "warn"),
    "trainer.limit_train_batches": POSITIVE,
    "trainer.limit_val_batches": POSITIVE,
    "trainer.limit_test_batches": POSITIVE,
    "trainer.fast_dev_run": choice(False),
}


UNLIMITED = 100_000  # epochs: the default of training.max_epochs, which stands for no limit
CRITERION = Rule("both, accuracy (or micro-F1) or loss", lambda value: is_one_of(value, ("both", "accuracy", "loss")))
VECTORIZED = Rule("auto, on or off", lambda value: is_one_of(value, VECTORIZE))
HOPS = sequence(
    "null or a list of whole numbers, one for each hop: at least 1, or -1 for all neighbours",
    lambda value: type(value) is int and (value >= 1 or value == -1),
    None,
)


def _is_entries(value: Any) -> bool:
    return value is None or is_name(value) or is_list(value, lambda entry: is_name(entry) or is_list(entry, is_name))


METHODS = Rule("null or a list such as [gat,gcn], where a method with settings is a list too", _is_entries)
DATASETS = Rule("null or a list such as [cora,citeseer], where a data set with settings is a list too", _is_entries)
CANDIDATES = sequence("null: protocol=errica sets the hashes of the candidates", is_name, None)
METRIC = Rule(
    f"null or one of {', '.join(METRICS)}",
    lambda value: value is None or is_one_of(value, (*METRICS, *ALIASES)),
)
TASK = Rule(
    f"null or one of {', '.join(TASKS)}",
    lambda value: value is None or is_one_of(value, TASKS),
)
FOLDS = Rule(
    f"{whole(3, None).expected}, or the path of a file of folds",
    lambda value: whole(3, None).fits(value) or is_name(value),
)
CLASS_WEIGHT = Rule(
    "null, balanced or a list of finite numbers, at least 0, one for each class",
    lambda value: is_one_of(value, (None, "balanced")) or is_list(value, is_finite),
)
POS_WEIGHT = Rule(
    "null, balanced, a finite number above 0, or a list of one for each label",
    lambda value: is_one_of(value, (None, "balanced")) or (is_finite(value) and value > 0) or is_list(value, is_finite),
)
SMOOTHING = number("a number from 0 to below 1", lambda value: 0 <= value < 1)

# The groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The settings `training.*`."""

    lr: Annotated[float, FINITE]
    weight_decay: Annotated[float, FINITE]
    batch_size: Annotated[int, whole(1)]
    patience: Annotated[int | None, whole(1, None)]
    criterion: Annotated[Literal["both", "accuracy", "loss"], CRITERION]
    max_epochs: Annotated[int, whole(1)]
    sparse: Annotated[bool | Literal["auto"], choice("auto", True, False)]
    compile: Annotated[bool, choice(True, False)]
    cuda_graphs: Annotated[bool | Literal["auto"], choice("auto", True, False)]
    warmup: Annotated[int, whole(0)]
    gradient_clip_val: Annotated[float | None, number("null or a number above 0", lambda value: value > 0, None)]
    ema: Annotated[float | None, number("null or a number between 0 and 1", lambda value: 0 < value < 1, None)]


@dataclass(frozen=True)
class Loss:
    """The settings `loss.*`: arguments of the task's objective."""

    class_weight: Annotated[list[float] | Literal["balanced"] | None, CLASS_WEIGHT]
    pos_weight: Annotated[float | list[float] | Literal["balanced"] | None, POS_WEIGHT]
    label_smoothing: Annotated[float, SMOOTHING]
    focal: Annotated[float, FINITE]
    error: Annotated[Literal["mse", "mae", "huber"] | None, choice(None, "mse", "mae", "huber")]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that differ from the defaults, null and 0."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class Split:
    """The settings `split.*`: how data without masks is split, and which of several splits is used."""

    per_class: Annotated[int | None, whole(0, None)]
    val: Annotated[int | None, whole(0, None)]
    test: Annotated[int | None, whole(0, None)]
    seed: Annotated[int, whole(0)]
    split: Annotated[int | Literal["all"], whole(0, "all")]
    folds: Annotated[int | str | None, FOLDS]
    fold: Annotated[int | Literal["all"], whole(0, "all")]
    column: Annotated[str | None, text("null or the name of a column", None)]
    time: Annotated[str | None, text("null or the name of a column", None)]
    scaffold: Annotated[bool, choice(False, True)]
    file: Annotated[str | None, text("null or the path of an .npz file", None)]
    draws: Annotated[int | None, whole(2, None)]

    @property
    def drawn_seed(self) -> int:
        """The seed of the split: that of number `split` if several are drawn."""
        return self.seed if self.draws is None else self.seed + int(self.split)


@dataclass(frozen=True)
class Loader:
    """The settings `loader.*`: whole graphs, or batches of one graph's nodes or links."""

    num_neighbors: Annotated[list[int] | None, HOPS] = None
    num_parts: Annotated[int | None, whole(1, None)] = None
    num_links: Annotated[int | None, whole(1, None)] = None
    batch_size: Annotated[int | None, whole(1)] = None
    num_workers: Annotated[int | None, whole(0)] = None

    @property
    def in_batches(self) -> bool:
        """Return True if a step is a batch of a graph's nodes."""
        return self.num_neighbors is not None or self.num_parts is not None

    @property
    def is_drawn(self) -> bool:
        """Return True if a step is a batch of a graph's nodes or links, drawn at random."""
        return self.in_batches or self.num_links is not None


@dataclass(frozen=True)
class Factory:
    """A group of settings for a class or function: its name as `_target_`, and its arguments.

    >>> Factory("model", {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 1})()
    Linear(in_features=2, out_features=1, bias=True)
    """

    group: str
    values: Mapping[str, Any]

    @property
    def target(self) -> str | None:
        """The dotted name of the class or function."""
        return self.values.get("_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        """A copy of the arguments."""
        return {key: copy.deepcopy(value) for key, value in self.values.items() if key != "_target_"}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the argument of this name, or `default` if it is not set."""
        return self.values.get(key, default)

    def locate(self) -> Any:
        """Import the class or function.

        Raises:
            ValueError: if it cannot be found or called.
        """
        from hydra.utils import get_object

        name = f"{self.group}._target_={self.target}"
        try:
            target = get_object(self.target or "")
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(
                f"{name} cannot be imported ({type(cause).__name__}: {cause}). Give the dotted name of a class or a "
                "function in an installed package or in a file of the working folder, such as mine.Net for mine.py."
            ) from error
        if not callable(target):
            raise ValueError(f"{name} cannot be called, expected a class or a function.")
        return target

    def check(self) -> None:
        """Raise ValueError for arguments that the class or function does not take."""
        check_arguments(self.group, self.locate(), self.arguments)

    def __call__(self, **others: Any) -> Any:
        """Instantiate the class or call the function; `others` extend or replace the arguments.

        Raises:
            ValueError: if it rejects the arguments; the message includes its error.
        """
        from hydra.errors import HydraException
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from .conf import instantiate

        try:
            return instantiate(self.values, _convert_="all", **others)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, HydraException) else error  # as Hydra 1.4 raises it
            if not isinstance(cause, (TypeError, ValueError, RuntimeError, MisconfigurationException)):
                raise
            hint = " On this machine, trainer=cpu may work." if _NO_DEVICE.search(str(cause)) else ""
            text = " ".join(str(cause).split())
            if str(self.target).startswith("gat_pyg."):  # its message is complete
                raise ValueError(text) from error
            settings = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
            message = f"{self.group}._target_={self.target}: {text}{hint} Its settings: {settings}."
            raise ValueError(message) from error


_NO_DEVICE = re.compile(r"accelerator is not available")  # part of Lightning's message


@dataclass(frozen=True)
class ModelFactory(Factory):
    """The settings `model.*`: the model's arguments, and the names by which the report finds the results.

    The names are the `method` (by default the class's name), its `form` if a method has several, and the `study` that
    the run is part of if it is not for the paper's tables.

    >>> ModelFactory("model", {"_target_": "gat_pyg.models.GAT", "form": "text", "study": "ablation"}).name
    'GAT: text'
    """

    @property
    def method(self) -> str:
        """The method, a row of a table."""
        kind = str(self.target).rpartition(".")[2]
        namesake = kind in NAMESAKES and not str(self.target).startswith("gat_pyg.")
        return str(self.get("method") or (f"PyG's {kind}" if namesake else kind))

    @property
    def name(self) -> str:
        """The method with its form and study, as results show it."""
        form, study = self.get("form"), self.get("study")
        if study == "ablation":
            return f"{self.method}: {form}"
        return self.method + (f" ({form})" if form else "") + (f", {study}" if study else "")

    @property
    def arguments(self) -> dict[str, Any]:
        """A copy of the arguments."""
        return {key: value for key, value in super().arguments.items() if key not in {*LABELS, *AROUND}}

    @property
    def encoder(self) -> dict[str, Any] | None:
        """The `channels` of an encoder of the features, and its `init` if it is set; None without an encoder."""
        encoder = self.get("encoder")
        return encoder if encoder is None or isinstance(encoder, dict) else {"channels": encoder}

    def check(self) -> None:
        """Raise ValueError if the class is not a model, or does not take the arguments."""
        from torch import nn

        target = self.locate()
        if not inspect.isclass(target) or not issubclass(target, nn.Module):
            raise ValueError(f"model._target_={self.target} is not a torch.nn.Module, expected the class of one.")
        for label in LABELS:
            if not isinstance(self.get(label), (str, type(None))):
                raise ValueError(f"model.{label} is {self.get(label)!r}, expected text: a name in the results.")
        if (encoder := self.encoder) is not None:
            channels = encoder.get("channels")
            if type(channels) is not int or channels < 1 or encoder.keys() - {"channels", "init"}:
                raise ValueError(
                    f"model.encoder is {self.get('encoder')!r}, expected a width, at least 1, or a mapping such as "
                    "{channels: 64, init: orthogonal}."
                )
        arguments = self.arguments
        if self.get("readout") is not None and "head_layers" not in inspect.signature(target).parameters:
            arguments.pop("head_layers", None)  # of the readout
        check_arguments(self.group, target, arguments, AROUND)


# All settings -------------------------------------------------------------------------------------------------------

FACTORIES = {
    **{"dataset": Factory, "model": ModelFactory, "trainer": Factory, "logger": Factory},
    **{"encoding": Factory, "optimizer": Factory, "scheduler": Factory},
}
OPTIONAL = ("encoding", "logger", "scheduler")  # groups that may be empty
GROUPS = {"training": Training, "loss": Loss, "split": Split, "loader": Loader}


@dataclass(frozen=True)
class Settings:
    """All settings of a job, as described in `conf/config.yaml`. Create them with `parse`, which checks them."""

    dataset: Factory
    model: ModelFactory
    loader: Loader
    trainer: Factory
    logger: Factory
    encoding: Factory
    optimizer: Factory
    scheduler: Factory
    training: Training
    loss: Loss
    split: Split
    task: Annotated[str | None, TASK]
    metric: Annotated[str | None, METRIC]
    seed: Annotated[int, whole(0)]
    runs: Annotated[int, whole(1)]
    vectorize: Annotated[bool | Literal["auto"], VECTORIZED]
    seeds_per_pass: Annotated[int | Literal["auto"], whole(1, "auto")]
    processes: Annotated[int, whole(1)]
    methods: Annotated[str | list[str | list[str]] | None, METHODS]
    datasets: Annotated[str | list[str | list[str]] | None, DATASETS]
    protocol: Annotated[str | None, choice(None, "errica")]
    ckpt_path: Annotated[str | None, text("null, last or the path of a checkpoint", None)]
    from_: Annotated[str | None, text("null or the folder of a run", None)]  # the setting `from`
    checkpoint_every: Annotated[float, SECONDS]
    data_root: Annotated[str | None, text("null or the path of a folder, such as data or ./1", None)]
    outputs: Annotated[str, text("the path of a folder, such as outputs or ./1")]
    results: Annotated[str, text("the path of a file, such as results.jsonl or ./1")]
    baselines: Annotated[bool | Literal["auto"], choice("auto", True, False)]
    # See `INTERNAL`: hashes of the candidates of protocol=errica, of the data files, and of users' source
    candidates: Annotated[list[str] | None, CANDIDATES] = None
    content: Annotated[str | None, text("null or a hash", None)] = None
    code: Annotated[str | None, text("null or a hash", None)] = None
    start: Annotated[str | None, text("null or a hash", None)] = None  # of the content of `from`
    cell: Annotated[str | None, text("null or a name in methods", None)] = None  # the method, in a cell of a table
    passed: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # names on the command line
    suited: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # NAME=VALUE of those chosen by the data

    @classmethod
    def parse(cls, config: DictConfig) -> Settings:
        """Check a composed configuration, resolve its references, and compute the hashes of the user's files, if any.

        Raises:
            ValueError: if a setting is unknown or has an invalid value; the message names the setting, and suggests
                the closest known name.
        """
        for group in (*FACTORIES, *GROUPS):
            if not isinstance(OmegaConf.select(config, group), DictConfig):
                raise ValueError(f"{group} has no settings. Choose one of conf/{group}, or leave {group} out.")
        for name in _names(config):
            if name not in rules():
                raise ValueError(f"{name} is unknown.{similar(name, rules())}")
        _check_values(config)
        values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
        values |= {group: kind(**values[group]) for group, kind in GROUPS.items()}
        values |= {group: kind(group, values[group]) for group, kind in FACTORIES.items()}
        values["from_"] = values.pop("from")  # a keyword of Python
        values["vectorize"] = VECTORIZE[values["vectorize"]]
        values["metric"] = ALIASES.get(values["metric"], values["metric"])
        settings = cls(**values)
        settings._check()
        content, code = settings.content, settings.code
        return settings.replace(
            content=settings.content_now() if content is None else content,
            code=source_hash(settings.to_dict()) if code is None else code,
            start=settings.start_now() if settings.start is None else settings.start,
        )

    def start_now(self) -> str | None:
        """Return the hash of the content of `from` as it is now, or None without such a run."""
        return None if self.from_ is None else content_of_run(self.from_)

    def content_now(self) -> str | None:
        """Return the hash of the content of the data files as it is now, or None without any."""
        from ..data.content_hash import content_of  # imports torch

        return content_of(self.dataset.values)

    def _check(self) -> None:
        """Raise ValueError if settings contradict each other, or a class does not take its arguments."""
        if self.seed > 2**32 - self.runs:
            raise ValueError(f"seed is {self.seed} with runs={self.runs}, expected seeds from 0 to 2^32 - 1.")
        if self.ckpt_path not in (None, "last") and self.runs > 1:
            raise ValueError(f"ckpt_path={self.ckpt_path} is one checkpoint, but runs={self.runs}. Use runs=1.")
        if self.processes > 1 and (strategy := self.trainer.get("strategy")) is not None:
            raise ValueError(
                f"processes is {self.processes}, which train one seed each, but trainer.strategy is {strategy}, which "
                "trains a seed in several processes. Use one of the two."
            )
        if clash := sorted({*FIXED, "plugins", "callbacks", "logger", "default_root_dir"} & {*self.trainer.values}):
            raise ValueError(f"trainer.{clash[0]} is set by the command. Leave it out.")
        if (loader := self.loader).in_batches and loader.batch_size is None:
            name = "num_parts" if loader.num_neighbors is None else "num_neighbors"
            choice = "cluster" if name == "num_parts" else "neighbor"
            raise ValueError(
                f"loader.{name} is {getattr(loader, name)}, but loader=full takes whole graphs. Choose loader={choice}."
            )
        for name in ("folds", "file"):
            if self.split.draws is not None and (value := getattr(self.split, name)) is not None:
                raise ValueError(
                    f"split.draws is {self.split.draws}, but split.{name} is {value}. Leave out one of them, by "
                    f"split.draws=null or split.{name}=null."
                )
        dataset = self.on_split(0).dataset if self.on_all_splits else self.dataset
        used = [] if self.is_table else [dataset, self.model]  # each cell of a table has its own
        for factory in (*used, self.trainer, self.logger, self.encoding, self.optimizer, self.scheduler):
            if factory.target is not None or factory.group not in OPTIONAL:
                factory.check()
        if self.encoding.target is not None:
            self.encoding()  # for a value that the class refuses
        self._check_optimisation()

    def _check_optimisation(self) -> None:
        """Raise ValueError if the optimizer or the scheduler cannot be built."""
        from torch import nn, zeros

        for factory, keys in ((self.optimizer, ("lr", "weight_decay", "params")), (self.scheduler, ("optimizer",))):
            if clash := [key for key in keys if key in factory.values]:
                name = f"{factory.group}.{clash[0]}"
                advice = f"Write training.{clash[0]}=..." if clash[0] in ("lr", "weight_decay") else "Leave it out."
                raise ValueError(f"{name} is set by the command. {advice}")
        if self.training.gradient_clip_val is not None and self.trainer.get("gradient_clip_val") is not None:
            raise ValueError("trainer.gradient_clip_val clips too. Leave it out, and use training.gradient_clip_val.")
        weights = [nn.Parameter(zeros(1, 1))]
        self.optimisation.configure(weights, weights, self.max_epochs)

    def check_end(self) -> None:
        """Raise ValueError if a training would not end: of a job, whose limit may be one that suits its data."""
        if self.max_epochs >= UNLIMITED and (self.training.patience is None or self.scheduler.target is not None):
            reason = "training.patience is null"
            if self.scheduler.target is not None:  # each tiny step lowers the validation loss a little, or ties
                reason = "with a scheduler, steps become so small that patience may never run out"
            raise ValueError(
                f"{reason}, so training ends after training.max_epochs={self.max_epochs}. Set training.max_epochs to "
                "the last epoch."
            )

    @property
    def max_epochs(self) -> int:
        """The largest number of epochs: `training.max_epochs`, unless the trainer has its own."""
        return int(self.trainer.get("max_epochs"))

    @property
    def optimisation(self) -> Optimisation:
        """The optimizer, with the settings of `training` that have the name of a field of `Optimisation`."""
        from ..training.optimisation import Optimisation  # imports torch

        values: dict[str, Any] = {
            field.name: getattr(self.training, field.name, None) for field in fields(Optimisation)
        }
        chosen = {factory.group: factory for factory in (self.optimizer, self.scheduler) if factory.target is not None}
        return Optimisation(**values | {name: factory(_partial_=True) for name, factory in chosen.items()})

    def check_results(self) -> None:
        """Raise OSError or ValueError if lines cannot be appended to `results`; nothing is created."""
        path = Path(self.results)
        if path.exists():
            if not path.is_file():
                raise ValueError(f"results is {path}, which is not a regular file. Choose another results=...")
            os.close(os.open(path, os.O_RDWR))
            return
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        if not folder.is_dir():
            raise ValueError(f"results is {path}, but {folder} is not a folder. Choose another results=...")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    @property
    def is_table(self) -> bool:
        """Return True for a table of methods and data sets."""
        return self.methods is not None or self.datasets is not None

    @property
    def on_all_splits(self) -> bool:
        """Return True for a job on every given split or fold."""
        return self.protocol is not None or "all" in (self.split.split, self.split.fold)

    @property
    def split_kind(self) -> Literal["split", "fold"]:
        """The setting of `split` that is the number of the split: that of a fold if there are folds."""
        return "split" if self.split.folds is None else "fold"

    @property
    def split_number(self) -> int:
        """The number of the split or fold."""
        return int(getattr(self.split, self.split_kind))

    def on_split(self, number: int) -> Settings:
        """Return the settings for one split or fold."""
        numbers: dict[str, Any] = {"split": 0, "fold": 0, self.split_kind: number}
        split, dataset = dataclasses.replace(self.split, **numbers), self.dataset
        if "folds" in dataset.values:  # an argument of `from_file` or `smiles`
            numbers = {key: value for key, value in numbers.items() if key in dataset.values}
            dataset = Factory("dataset", {**dataset.values, **numbers})
        return self.replace(split=split, dataset=dataset)

    @property
    def seeds(self) -> range:
        """The seeds of the job."""
        return range(self.seed, self.seed + self.runs)

    def replace(self, **changes: Any) -> Settings:
        """Return a copy with some settings replaced."""
        return dataclasses.replace(self, **changes)

    def updated(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy with other values of settings, by their dotted names, checked again."""
        plain = self.to_dict()
        for name, value in values.items():
            group, _, key = name.rpartition(".")
            (plain[group] if group else plain)[key] = value
        return Settings.parse(OmegaConf.create(plain)).replace(passed=self.passed, suited=self.suited)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in a run's `config.yaml`, from which `parse` builds the same settings."""
        values: dict[str, Any] = {}
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if name == "loader":  # only the settings of the chosen loader
                present = {key: inner for key, inner in dataclasses.asdict(value).items() if inner is not None}
                values[name] = present if value.is_drawn else {"num_neighbors": None}
            elif name in ("passed", "suited") or (name in INTERNAL and value is None):
                continue
            elif name in FACTORIES:
                values[name] = copy.deepcopy(dict(value.values))
            else:
                values[name.rstrip("_")] = dataclasses.asdict(value) if name in GROUPS else copy.deepcopy(value)
        return values

    def hashed(self) -> dict[str, Any]:
        """Return the settings that `hash` covers.

        By the protocol of Errica et al., these are the candidates, since each fold selects its own.
        """
        if self.candidates is not None:
            return {"protocol": self.protocol, "candidates": self.candidates}
        return hashed(flattened(self.to_dict()))

    @property
    def hash(self) -> str:
        """The `config_hash` of results."""
        return config_hash(self.hashed())

    @property
    def data_hash(self) -> str:
        """The hash of what distinguishes data sets of one name: see `data_settings`."""
        return config_hash(data_settings(flattened(self.to_dict())))


@functools.cache
def rules() -> dict[str, Rule]:
    """Return the rules of all settings by their dotted names, those of the trainer last."""
    kinds = {"": Settings, **{f"{group}.": kind for group, kind in GROUPS.items()}}
    hints = {f"{prefix}{key}".rstrip("_"): hint for prefix, kind in kinds.items() for key, hint in _hints(kind).items()}
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")} | TRAINER


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _names(config: DictConfig) -> Iterator[str]:
    """Return the dotted names of the settings outside the groups of classes and functions."""
    for key in map(str, config):
        if key in GROUPS:
            yield from (f"{key}.{inner}" for inner in config[key])
        elif key not in FACTORIES:
            yield key


def _check_values(config: DictConfig) -> None:
    """Raise ValueError for the first setting that breaks its rule."""
    for name, rule in rules().items():
        group, _, key = name.rpartition(".")
        required = group not in ("loader", "trainer") or key == "max_epochs"
        if required or key in config[group]:
            value = _resolved(config, name)
            if not rule.fits(value):
                near = [metric for metric in METRICS if name == "metric" and str(value).lower() in metric]
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"{name} is {value!r}, expected {rule.expected}.{hint}")


def _resolved(config: DictConfig, name: str) -> Any:
    value = OmegaConf.select(config, name)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, (DictConfig, ListConfig)) else value


# Runs on disk -------------------------------------------------------------------------------------------------------


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the differing settings that rule out a resume, with both values, or "".

    >>> differences({"training.lr": 0.1, "vectorize": True}, {"training.lr": 0.2, "vectorize": False})
    'training.lr was 0.1, is 0.2'
    """
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    names = [name for name in names if name not in MAY_CHANGE_ON_RESUME]
    if "training.max_epochs" in names and "trainer.max_epochs" in names:  # by default the same
        names.remove("trainer.max_epochs")
    titles = {"content": "the content of the data files", "code": "the source of your own classes"}
    titles["start"] = "the content of from"
    return ", ".join(f"{titles.get(name, name)} was {old.get(name)}, is {new.get(name)}" for name in names[:5])
