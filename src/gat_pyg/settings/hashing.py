"""The hash of the settings that determine what is learnt and differ from the defaults in `conf/config.yaml`.

The source of classes and functions that are not of installed packages is part of it, as is the content of users' files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from .conf import config_folder
from .options import Loader, Mark, Training, marked

MODEL = "model.safetensors"  # the file of a trained model in the folder of a run
VERSION = 2  # part of every hash: increase it if a default in conf/config.yaml or the choice of hashed settings changes
# Groups that determine what is learnt
GROUPS = ("dataset", "encoding", "model", "training", "loss", "optimizer", "scheduler", "split", "trainer", "loader")
OTHERS = ("metric", "task", "content", "code", "start")  # further settings that determine it, outside of these groups
UNHASHED = frozenset(  # settings in these groups that do not determine it
    {
        *("dataset.root", "dataset.dataset.root"),  # the second: the data set whose links are drawn
        *marked(Mark.SPEED, "training.", Training),
        *marked(Mark.SPEED, "loader.", Loader),
        *(f"trainer.{key}" for key in ("_target_", "accelerator", "strategy", "deterministic")),
        "trainer.max_epochs",  # see `learnt`
    }
)
# Arguments that came later, which change no recorded hash
ADDED: dict[str, Any] = {"dataset.missing": [], "dataset.graphs": None, "dataset.descriptors": None}
OF_TABLES = {"dataset.folds": None}  # likewise
# Settings of the groups `split` and `dataset` that determine the data of each split
DATA = ("per_class", "val", "test", "seed", "folds", "column", "time", "scaffold", "file", "draws")


def flattened(values: Any) -> dict[str, Any]:
    """Return nested settings by their dotted names.

    >>> flattened({"seed": 0, "training": {"lr": 0.1}})
    {'seed': 0, 'training.lr': 0.1}
    """
    if not isinstance(values, dict):
        raise ValueError(f"it holds {values!r}, expected names and values")
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = flattened(value) if isinstance(value, dict) and value else {"": value}
        flat |= {f"{key}.{name}".removesuffix("."): leaf for name, leaf in inner.items()}
    return flat


def learnt(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine what is learnt, except for the number of the split or fold.

    Arguments and result have dotted names. `training.max_epochs` is replaced by the trainer's limit.

    >>> learnt({"seed": 0, "split.fold": 1, "split.folds": 10, "training.max_epochs": 9, "trainer.max_epochs": 5})
    {'split.folds': 10, 'training.max_epochs': 5}
    """
    numbers = {f"{group}.{key}" for group in ("split", "dataset") for key in ("split", "fold")}
    numbers = {name for name in numbers if f"{name.partition('.')[0]}.folds" in flat}
    names = (name for name in flat if name in OTHERS or name.partition(".")[0] in GROUPS)
    values = {name: flat[name] for name in names if name not in UNHASHED and name not in numbers}
    if "trainer.max_epochs" in flat:
        values["training.max_epochs"] = flat["trainer.max_epochs"]
    return values


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the settings in `conf/config.yaml`, and those in `ADDED`."""
    return flattened(OmegaConf.to_container(OmegaConf.load(config_folder() / "config.yaml"))) | ADDED


def hashed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `learnt` that differ from the defaults, so that a new setting changes no hash.

    Arguments of classes and functions have no default there, so all of them are hashed.
    """
    before = defaults() | (OF_TABLES if flat.get("dataset._target_") == "gat_pyg.data.tables" else {})
    return {name: value for name, value in learnt(flat).items() if name not in before or value != before[name]}


def config_hash(values: Mapping[str, Any]) -> str:
    """Return a hash of twelve hex digits that does not depend on the order of the values; equal numbers hash alike.

    >>> config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2.0], "a": 1.0})
    True
    """
    plain = json.loads(json.dumps({"version": VERSION, **values}, default=str), parse_int=float)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def source_hash(values: Any) -> str | None:
    """Return the hash of the source of the classes and functions that settings name by `_target_`, or None.

    It covers their modules and those that these import, as twelve hex digits, but no installed package and nothing of
    Python or gat_pyg. A module's source is read once, since the process has imported it.

    >>> source_hash({"model": {"_target_": "torch_geometric.nn.GCN"}}) is None
    True
    """
    todo = [module for target in _targets(values) for module in _modules_of(target)]
    sources: dict[str, bytes] = {}
    while todo:
        module = todo.pop()
        if module.__name__ in sources or (source := _own_source(module)) is None:
            continue
        sources[module.__name__] = source
        for value in (*vars(module).values(),):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            todo += [sys.modules[name]] if isinstance(name, str) and name in sys.modules else []
    if not sources:
        return None
    return hashlib.sha256(b"".join(name.encode() + sources[name] for name in sorted(sources))).hexdigest()[:12]


def content_of_run(run: str | Path) -> str | None:
    """Return the hash of the model of a run, or of those of all its seeds, as twelve hex digits; None without any."""
    folder = Path(run).expanduser()
    seeds = sorted(folder.glob(f"seed-*/{MODEL}"), key=lambda file: (len(file.parent.name), file))
    alone = folder if folder.name == MODEL else folder / MODEL
    files = seeds or [alone] * alone.is_file()
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12] if digests else None


def _targets(values: Any) -> Iterator[str]:
    """Yield the values of all `_target_` in nested settings."""
    if isinstance(values, dict):
        if isinstance(target := values.get("_target_"), str):
            yield target
        values = values.values()
    elif not isinstance(values, list):
        return
    for value in values:
        yield from _targets(value)


def _modules_of(target: str) -> list[ModuleType]:
    """Return the packages and the module in the dotted name of a class or function, as far as they can be imported."""
    modules, parts = [], target.split(".")
    for end in range(1, len(parts)):
        try:
            modules.append(importlib.import_module(".".join(parts[:end])))
        except Exception:  # the name of a class, or an error that `Factory.locate` raises again
            break
    return modules


@functools.cache
def _own_source(module: ModuleType) -> bytes | None:
    """Return the source of a module, or None if it is of an installed package, Python or gat_pyg, or has none."""
    name, file = module.__name__, Path(getattr(module, "__file__", None) or "")
    is_of_python = file.is_relative_to(sysconfig.get_path("stdlib"))
    if file.suffix != ".py" or is_of_python or name.partition(".")[0] == "gat_pyg":
        return None
    root = file.absolute().parents[name.count(".") + (file.stem == "__init__")]
    return None if any(root.glob("*.dist-info")) else file.read_bytes()  # these lie beside installed packages


def data_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by which data sets of one name differ: of the split, and the hash of the user's files.

    >>> data_settings({"split.val": 500, "dataset.val": 500, "dataset.path": "graph.npz", "training.lr": 0.1})
    {'split.val': 500}
    """
    names = [f"{group}.{key}" for group in ("split", "dataset") for key in DATA]
    values = {name: flat[name] for name in [*names, "content"] if flat.get(name) is not None}
    same = [f"dataset.{key}" for key in DATA if flat.get(f"dataset.{key}") == flat.get(f"split.{key}")]
    return {name: value for name, value in values.items() if name not in same}
