"""The settings of a run: which are hashed, which change speed alone."""

from __future__ import annotations

import difflib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from ..tasks.task import Task
from ..training.stopping import Criterion
from .build import check_gpus, in_batches

NUMBERS = ("dataset", "model", "training", "split")  # the groups of settings that decide what is learnt
HOW = {  # the settings of ``training`` that decide how fast it is learnt, and their values
    "sparse": ("auto", True, False),
    "compile": (True, False),
    "cuda_graphs": ("auto", True, False),
}
SAME = ("_target_", "accelerator", "strategy", "deterministic")  # of ``trainer``: what is learnt is the same
VECTORIZE = {"auto": "auto", "on": True, True: True, "off": False, False: False}

# How it runs --------------------------------------------------------------------------------------------------------


def numbers_of(config: DictConfig) -> dict[str, Any]:
    """What decides what is learnt, which makes the hash; of ``trainer`` also what is only given by hand."""
    given = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    given["dataset"].pop("root", None)  # where the files lie changes nothing
    given["training"] = {key: value for key, value in given["training"].items() if key not in HOW}
    shared = {key: value for key, value in given["trainer"].items() if key not in SAME}  # gradient_clip_val, max_time
    shared |= {key: shared.get(key) for key in ("devices", "num_nodes", "precision")}  # the batch, the bits
    given["training"]["max_epochs"] = shared.pop("max_epochs", None)  # which the trainer obeys
    if given["split"]["folds"] is None:  # as in all lines of earlier versions
        given["split"] = {key: value for key, value in given["split"].items() if key not in ("folds", "fold")}
    loader = {key: value for key, value in given["loader"].items() if key != "num_workers"}
    drawn = {"loader": loader} if in_batches(config) else {}
    return {**{key: given[key] for key in NUMBERS}, "trainer": shared, **drawn}


def elements(config: DictConfig, task: Task, models: Sequence[nn.Module]) -> int:
    """Estimate how many numbers a step computes: for each node and edge, the parameters per input feature."""
    graphs = 1 if task.shared_graph is not None else config.training.batch_size
    size = sum(sorted((graph.num_nodes + graph.num_edges for graph in task.train), reverse=True)[:graphs])
    parameters = sum(parameter.numel() for model in models for parameter in model.parameters())
    return int(size * parameters // max(task.num_features, 1))


class Rule(NamedTuple):
    """The values that a setting may have."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(least: int, *others: Any) -> Rule:
    words = "".join(f"{_word(other)} or " for other in others)
    return Rule(
        f"{words}a whole number, at least {least}",
        lambda value: (type(value) is int and value >= least) or _is_one_of(value, others),
    )


def _number(expected: str, fits: Callable[[float], bool]) -> Rule:
    return Rule(expected, lambda value: type(value) in (int, float) and fits(value))


def _choice(*values: Any) -> Rule:
    *first, last = map(_word, values)
    return Rule(f"{', '.join(first)} or {last}" if first else last, lambda value: _is_one_of(value, values))


def _text(expected: str, *others: Any) -> Rule:
    return Rule(expected, lambda value: (isinstance(value, str) and value != "") or _is_one_of(value, others))


def _list(expected: str, fits: Callable[[Any], bool], *others: Any) -> Rule:
    def fits_all(value: Any) -> bool:
        return isinstance(value, ListConfig) and len(value) > 0 and all(map(fits, value))

    return Rule(expected, lambda value: fits_all(value) or _is_one_of(value, others))


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)  # 1 == True


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_method(value: Any) -> bool:
    return _is_name(value) or (isinstance(value, ListConfig) and len(value) > 0 and all(map(_is_name, value)))


_POSITIVE = _number("a number above 0", lambda value: value > 0)
_FINITE = _number("a finite number, at least 0", lambda value: 0 <= value < math.inf)
_SECONDS = _number("a number of seconds, at least 0", lambda value: value >= 0)
GROUPS = ("dataset", "model", "loader", "trainer", "logger", "training", "split")
RULES = {  # every setting outside of the groups whose keys are the arguments of a class or function
    "seed": _whole(0),
    "runs": _whole(1),
    "vectorize": Rule("auto, on or off", lambda value: _is_one_of(value, VECTORIZE)),
    "seeds_per_pass": _whole(1, "auto"),
    "methods": Rule(
        "null or a list such as [gat,gcn], where a method with settings is a list too",
        lambda value: value is None or _is_name(value) or _list("", _is_method).fits(value),
    ),
    "datasets": Rule(
        "null or a list such as [cora,citeseer]",
        lambda value: value is None or _is_name(value) or _list("", _is_name).fits(value),
    ),
    "ckpt_path": _text("null, last or the path of a checkpoint", None),
    "checkpoint_every": _SECONDS,
    "data_root": _text("null or the path of a folder, such as data or ./1", None),
    "outputs": _text("the path of a folder, such as outputs or ./1"),
    "results": _text("the path of a file, such as results.jsonl or ./1"),
    "training.lr": _FINITE,
    "training.weight_decay": _FINITE,
    "training.batch_size": _whole(1),
    "training.patience": _whole(1),
    "training.criterion": Rule(
        "both, accuracy (or micro-F1) or loss", lambda value: _is_one_of(value, get_args(Criterion))
    ),
    "training.max_epochs": _whole(1),
    **{f"training.{key}": _choice(*values) for key, values in HOW.items()},
    "split.per_class": _whole(0),
    "split.val": _whole(0),
    "split.test": _whole(0),
    "split.seed": _whole(0),
    "split.split": _whole(0),
    "split.folds": _whole(3, None),
    "split.fold": _whole(0),
    "trainer.max_epochs": _whole(1),
}
OPTIONAL_RULES = {  # of those that are there
    "loader.num_neighbors": _list(
        "null or a list of whole numbers, one for each hop: at least 1, or -1 for all neighbours",
        lambda value: type(value) is int and (value >= 1 or value == -1),
        None,
    ),
    "loader.num_parts": _whole(1),
    "loader.batch_size": _whole(1),
    "loader.num_workers": _whole(0),
    "trainer.devices": Rule(
        "auto, a number of devices, at least 1, or a list of their indices",
        lambda value: (
            (_is_name(value) or value == -1 or _whole(1).fits(value))
            or _list("", lambda index: type(index) is int and index >= 0).fits(value)
        ),
    ),
    "trainer.deterministic": _choice(None, True, False, "warn"),
    "trainer.limit_train_batches": _POSITIVE,
    "trainer.limit_val_batches": _POSITIVE,
    "trainer.limit_test_batches": _POSITIVE,
    "trainer.fast_dev_run": _choice(False),
}


def config_folder() -> Path:
    """The folder of the settings: inside the installed package, else the repository's own."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml in {package} or in its repository. Install gat_pyg anew.")


def _similar(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A sentence on the names that are close to ``name``, else on those beside it, else on all."""
    last = {one: one.rpartition(".")[2].lower() for one in known}
    group, _, key = name.lower().rpartition(".")
    close = difflib.get_close_matches(name.lower(), [*map(str.lower, last)], 1, 0.8)
    close = [one for one in last if one.lower() in close]
    close = close or [one for one in last if last[one] in difflib.get_close_matches(key, last.values(), 1, 0.7)]
    if close:
        return f" Did you mean {prefix}{close[0]}?"
    beside = [one for one in last if one.rpartition(".")[0] == group]
    return f" Known are: {', '.join(beside or last)}."


def _misused_group(overrides: Iterable[str]) -> str | None:
    """A message on the first override that sets a group of settings to something that is no name, or on none."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        if not override.key_or_group:
            return f"{text} cannot be read as a setting, expected name=value, as in dataset=cora."
        folder = config_folder() / override.key_or_group
        if folder.is_dir() and (override.is_delete() or not isinstance(override.value(), str)):
            names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            return f"{text} is no choice, expected {override.key_or_group}=NAME with one of {names}."
    return None


def _check(config: DictConfig) -> None:
    """Raise ValueError for settings that cannot work, before anything is written."""
    for group in GROUPS:
        if not isinstance(OmegaConf.select(config, group), DictConfig):
            raise ValueError(f"{group} has no settings. Choose one of conf/{group}, or leave {group} out.")
    for name in _names(config):
        if name not in RULES and name not in OPTIONAL_RULES:
            raise ValueError(f"{name} is unknown.{_similar(name, [*RULES, *OPTIONAL_RULES])}")
    for name, rule in {**RULES, **OPTIONAL_RULES}.items():
        group, _, key = name.rpartition(".")
        if name in OPTIONAL_RULES and key not in config[group]:
            continue
        if not rule.fits(value := OmegaConf.select(config, name)):
            raise ValueError(f"{name} is {value!r}, expected {rule.expected}.")
    if config.seed > 2**32 - config.runs:
        raise ValueError(f"seed is {config.seed} with runs={config.runs}, expected seeds from 0 to 2^32 - 1.")
    if config.ckpt_path not in (None, "last") and config.runs > 1:
        raise ValueError(f"ckpt_path={config.ckpt_path} is one checkpoint, but runs={config.runs}. Use runs=1.")
    mode = HydraConfig.get().mode
    if config.trainer.get("strategy") is not None and mode == RunMode.MULTIRUN:
        raise ValueError("Several processes cannot go with --multirun: start the runs one by one, without -m.")
    where = "sweep" if mode == RunMode.MULTIRUN else "run"
    if OmegaConf.to_container(HydraConfig.get()[where], resolve=False)["dir"] == "":  # type: ignore[index, call-overload]
        raise ValueError(f"hydra.{where}.dir is empty, expected the path of a folder.")
    check_gpus(config.trainer)
    _check_appendable(Path(config.results))


def _names(config: DictConfig) -> Iterator[str]:
    """The dotted names of all settings that no class or function gets."""
    for key in map(str, config):
        if key in ("training", "split", "loader"):
            yield from (f"{key}.{inner}" for inner in config[key])
        elif key not in GROUPS:
            yield key


def _check_appendable(path: Path) -> None:
    """Raise OSError or ValueError if lines cannot be added to the file, which need not exist; nothing is created."""
    if path.exists():
        if not path.is_file():
            raise ValueError(f"results is {path}, which is no regular file. Choose another results=...")
        os.close(os.open(path, os.O_RDWR))
        return
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise ValueError(f"results is {path}, but {folder} is no folder. Choose another results=...")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
