"""The names of data sets and run folders, before the data are read; Hydra's resolvers for them.

This file does not import torch, so that help, completion and `--cfg` are fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from .rules import similar

# The data sets of the paper, and those of the first run and of tests, which have its settings
OF_THE_PAPER = ("cora", "citeseer", "pubmed", "ppi", "digits", "planted")


def dataset_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the data set in results and folders, before it is loaded.

    It is the name of a data set of this package, the stem of a file, and for a class that of `name_of`.

    >>> dataset_name({"_target_": "torch_geometric.datasets.Amazon", "name": "Photo"})
    'photo'
    >>> dataset_name({"_target_": "gat_pyg.data.planted", "nodes": 100})
    'planted'
    """
    target, name, path = (str(settings.get(key) or "") for key in ("_target_", "name", "path"))
    home, _, kind = target.rpartition(".")
    files: Any = settings.get("path") if kind == "smiles" else settings.get("nodes") or settings.get("edges")
    if files and kind in ("smiles", "tables"):
        from ..data.reader import name_of_file  # imports torch

        return name or name_of_file(files)
    return Path(name or path).stem or kind if home == "gat_pyg.data" else _name_of(kind, name)


def run_name(_root_: DictConfig) -> str:
    """Return the part of a run folder's name after the time: model, data set, loader, mechanism.

    `_root_` is the composed configuration, including Hydra's own. The model has the name of its choice, or that of
    its class if `model._target_` is overridden.
    """
    choices = _root_.hydra.runtime.choices
    overrides = (override.lstrip("+").partition("=") for override in _root_.hydra.overrides.task)
    values: dict[str, str] = {key: value for key, _, value in overrides}
    model = choices.model
    if target := values.get("model._target_"):
        package, *_, kind = target.split(".")
        model = _name_of("pyg" if package == "torch_geometric" else "", kind)
    mechanism = values.get("model.mechanism._target_", values.get("model.mechanism", ""))
    dataset: Any = OmegaConf.to_container(_root_.dataset, resolve=True)
    words = [
        model,
        dataset_name({key: value for key, value in dataset.items() if value != "???"}),
        choices.loader if choices.loader not in (None, "full") else "",
        _name_of(mechanism.rpartition(".")[2]),
        "reproduction" if values.get("model.reproduction", "false") != "false" else "",
    ]
    return "_".join(word for word in words if word)


def _name_of(kind: str, name: str = "") -> str:
    from ..data.arrays.from_pyg import name_of  # imports torch

    return name_of(kind, name)


CREATED: set[Path] = set()  # folders that did not exist before Hydra created them for this command


def outputs_folder(outputs: str | None) -> str:
    """Return the folder of all runs for Hydra, which creates it, and add it to `CREATED` if it does not exist.

    `null` is refused later, and must not become a folder called None.
    """
    folder = Path(str(outputs or ".")).absolute()
    CREATED.update(path for path in (folder, *folder.parents) if not path.exists())
    return outputs or "."


def pick(key: str, values: Mapping[str, Any], *default: Any) -> Any:
    """Return the value of `key` in a mapping: the resolver of `${pick:${.act},{relu:ReLU,elu:ELU}}`.

    Raises:
        ValueError: if there is neither such a key nor a default, as in `${pick:${.act},{relu:ReLU},null}`.
    """
    if key not in values and default:
        return default[0]
    if key not in values:
        raise ValueError(f"{key!r} is unknown.{similar(str(key), map(str, values))}")
    return values[key]


def recipe_of(recipe: str, model: str, dataset: str) -> str:
    """Return the recipe that `recipe=auto` stands for, `papers`, `strong` or `suited`, or any other recipe itself.

    The data sets of the paper have the settings of the methods' papers. Others have their strongest settings, if there
    are some for the method, else those of the papers for the method on them or their family, else those that suit
    their data: `gat_pyg.runs.defaults_by_data`.
    """
    from .conf import CHOICES

    if recipe != "auto" or dataset in OF_THE_PAPER:
        return "papers" if recipe == "auto" else recipe
    options = {group: {*CHOICES[f"recipe/{group}"]} for group in ("on", "family")}
    if GlobalHydra.instance().is_initialized():  # also the user's
        loader = GlobalHydra.instance().config_loader()
        options = {group: {*loader.get_group_options(f"recipe/{group}")} for group in options}
    if f"strong-{model}-{dataset}" in options["on"]:
        return "strong"
    choice = CHOICES["dataset"].get(dataset)
    family = re.search(r"override /family: (\w+)", choice.text if choice else "")
    of_family = family is not None and f"papers-{model}-{family[1]}" in options["family"]
    return "papers" if of_family or f"papers-{model}-{dataset}" in options["on"] else "suited"


RESOLVERS = run_name, outputs_folder, pick, recipe_of  # of the configurations
