"""The hash of the settings that determine what is learnt and differ from the defaults in `conf/config.yaml`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from .conf import config_folder

VERSION = 2  # part of every hash: increase it if a default in conf/config.yaml or the choice of hashed settings changes
GROUPS = ("dataset", "model", "training", "split", "trainer", "loader")  # groups that determine what is learnt
OTHERS = ("metric", "task", "content")  # further settings that determine it, outside of these groups
UNHASHED = frozenset(  # settings in these groups that do not determine it
    {
        *("dataset.root", "dataset.dataset.root"),  # the second: the data set whose links are drawn
        *(f"training.{key}" for key in ("sparse", "compile", "cuda_graphs")),  # speed only
        *(f"trainer.{key}" for key in ("_target_", "accelerator", "strategy", "deterministic")),
        "trainer.max_epochs",  # see `learnt`
        "loader.num_workers",
    }
)
# Settings of the groups `split` and `dataset` that determine the data of each split
DATA = ("per_class", "val", "test", "seed", "folds")


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
def _defaults() -> dict[str, Any]:
    return flattened(OmegaConf.to_container(OmegaConf.load(config_folder() / "config.yaml")))


def hashed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `learnt` that differ from the defaults, so that a new setting changes no hash.

    Arguments of classes and functions have no default there, so all of them are hashed.
    """
    defaults = _defaults()
    return {name: value for name, value in learnt(flat).items() if name not in defaults or value != defaults[name]}


def config_hash(values: Mapping[str, Any]) -> str:
    """Return a hash of twelve hex digits that does not depend on the order of the values; equal numbers hash alike.

    >>> config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2.0], "a": 1.0})
    True
    """
    plain = json.loads(json.dumps({"version": VERSION, **values}, default=str), parse_int=float)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def data_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by which data sets of one name differ: of the split, and the hash of the user's files.

    >>> data_settings({"split.val": 500, "dataset.val": 500, "dataset.path": "graph.npz", "training.lr": 0.1})
    {'split.val': 500}
    """
    names = [f"{group}.{key}" for group in ("split", "dataset") for key in DATA]
    values = {name: flat[name] for name in [*names, "content"] if flat.get(name) is not None}
    same = [f"dataset.{key}" for key in DATA if flat.get(f"dataset.{key}") == flat.get(f"split.{key}")]
    return {name: value for name, value in values.items() if name not in same}
