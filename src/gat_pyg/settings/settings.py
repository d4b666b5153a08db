"""The settings of a run: parsed and checked once, then frozen."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..tasks.metrics import ALIASES, METRICS
from .factory import Factory, ModelFactory
from .hashing import config_hash, content_of_run, data_settings, flattened, hashed, source_hash
from .options import GROUPS, Loader, Loss, Mark, Split, Training, hints, marked
from .rules import (
    POSITIVE,
    SECONDS,
    Rule,
    choice,
    is_list,
    is_name,
    is_one_of,
    sequence,
    similar,
    text,
    whole,
)

if TYPE_CHECKING:
    from ..training.optimisation import Optimisation

INTERNAL = ("candidates", "content", "code", "start", "cell")  # settings that the command sets itself
VECTORIZE: dict[Any, bool | Literal["auto"]] = {"auto": "auto", "on": True, True: True, "off": False, False: False}
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
VECTORIZED = Rule("auto, on or off", lambda value: is_one_of(value, VECTORIZE))


def _is_entries(value: Any) -> bool:
    return value is None or is_name(value) or is_list(value, lambda entry: is_name(entry) or is_list(entry, is_name))


METHODS = Rule("null or a list such as [gat,gcn], where a method with settings is a list too", _is_entries)
DATASETS = Rule("null or a list such as [cora,citeseer], where a data set with settings is a list too", _is_entries)
CANDIDATES = sequence("null: protocol=errica sets the hashes of the candidates", is_name, None)
METRIC = Rule(
    f"null or one of {', '.join(METRICS)}",
    lambda value: value is None or is_one_of(value, (*METRICS, *ALIASES)),
)


def _is_task(value: Any) -> bool:
    from ..tasks.objectives import TASKS  # imports torch

    return is_one_of(value, TASKS)


TASK = Rule(
    "null or a task, such as node_classification, edge_regression, graph_classification or link_prediction",
    lambda value: value is None or _is_task(value),
)


# All settings -------------------------------------------------------------------------------------------------------

FACTORIES = {
    **{"dataset": Factory, "model": ModelFactory, "trainer": Factory, "logger": Factory},
    **{"encoding": Factory, "optimizer": Factory, "scheduler": Factory},
}
OPTIONAL = ("encoding", "logger", "scheduler")  # groups that may be empty


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
    runs: Annotated[int, whole(1), Mark.UNUSED]
    vectorize: Annotated[bool | Literal["auto"], VECTORIZED, Mark.RESUMES]
    seeds_per_pass: Annotated[int | Literal["auto"], whole(1, "auto"), Mark.RESUMES]
    methods: Annotated[str | list[str | list[str]] | None, METHODS]
    datasets: Annotated[str | list[str | list[str]] | None, DATASETS]
    protocol: Annotated[str | None, choice(None, "errica")]
    ckpt_path: Annotated[str | None, text("null, last or the path of a checkpoint", None), Mark.RESUMES, Mark.UNUSED]
    from_: Annotated[str | None, text("null or the folder of a run", None)]  # the setting `from`
    checkpoint_every: Annotated[float, SECONDS, Mark.RESUMES]
    data_root: Annotated[str | None, text("null or the path of a folder, such as data or ./1", None)]
    outputs: Annotated[str, text("the path of a folder, such as outputs or ./1"), Mark.UNUSED]
    results: Annotated[str, text("the path of a file, such as results.jsonl or ./1"), Mark.UNUSED]
    baselines: Annotated[bool | Literal["auto"], choice("auto", True, False), Mark.RESUMES, Mark.UNUSED]
    # See `INTERNAL`: hashes of the candidates of protocol=errica, of the data files, and of users' source
    candidates: Annotated[list[str] | None, CANDIDATES, Mark.UNUSED] = None
    content: Annotated[str | None, text("null or a hash", None)] = None
    code: Annotated[str | None, text("null or a hash", None)] = None
    start: Annotated[str | None, text("null or a hash", None)] = None  # of the content of `from`
    # The method, in a cell of a table
    cell: Annotated[str | None, text("null or a name in methods", None), Mark.UNUSED] = None
    passed: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # names on the command line
    suited: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # NAME=VALUE of those chosen by the data
    tried: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # that validation has compared

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
        others = {field.name: getattr(self, field.name) for field in fields(self) if not field.compare}
        return Settings.parse(OmegaConf.create(plain)).replace(**others)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in a run's `config.yaml`, from which `parse` builds the same settings."""
        values: dict[str, Any] = {}
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self) if field.compare):
            if name == "loader":  # only the settings of the chosen loader
                present = {key: inner for key, inner in dataclasses.asdict(value).items() if inner is not None}
                values[name] = present if value.is_drawn else {"num_neighbors": None}
            elif name in INTERNAL and value is None:
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
    annotations = {
        f"{prefix}{key}".rstrip("_"): hint for prefix, kind in kinds.items() for key, hint in hints(kind).items()
    }
    return {name: hint.__metadata__[0] for name, hint in annotations.items() if hasattr(hint, "__metadata__")} | TRAINER


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


# Settings that may change on resume
RESUMES = frozenset(
    {
        *marked(Mark.RESUMES, "", Settings),
        *marked(Mark.RESUMES, "loader.", Loader),
        *("model.form", "model.study"),
        *(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "deterministic")),
    }
)

# Runs on disk -------------------------------------------------------------------------------------------------------


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the differing settings that rule out a resume, with both values, or "".

    >>> differences({"training.lr": 0.1, "vectorize": True}, {"training.lr": 0.2, "vectorize": False})
    'training.lr was 0.1, is 0.2'
    """
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    names = [name for name in names if name not in RESUMES]
    if "training.max_epochs" in names and "trainer.max_epochs" in names:  # by default the same
        names.remove("trainer.max_epochs")
    titles = {"content": "the content of the data files", "code": "the source of your own classes"}
    titles["start"] = "the content of from"
    return ", ".join(f"{titles.get(name, name)} was {old.get(name)}, is {new.get(name)}" for name in names[:5])
