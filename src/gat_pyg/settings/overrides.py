"""Overrides: the settings of a command line, as NAME=VALUE."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from .conf import CHOICES
from .errors import no_setting

REPLACES = ("dataset._target_", "dataset.name", "model._target_")


def without_recipes(arguments: Sequence[str]) -> list[str]:
    """Remove the recipes of a model or a data set whose class is replaced by an override.

    Hydra selects `recipe/method` by the recipe's and the model's name, and `recipe/on` and `recipe/family` also by the
    name of the data set or its family. An override such as `dataset._target_` changes no name. The model's `method` and
    `form` are removed for the same reason.

    >>> without_recipes(["model=gcn", "dataset._target_=mine.Graph"])
    ['model=gcn', '~recipe/family', '~recipe/on', '~recipe/method', 'dataset._target_=mine.Graph']
    """
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    replaced = [index for index, key in enumerate(keys) if key in REPLACES]
    if not replaced:
        return list(arguments)
    first = replaced[0]
    removals = [f"~recipe/{kind}" for kind in ("family", "on", "method") if f"recipe/{kind}" not in keys]
    if "model._target_" in keys:
        removals += [f"++model.{label}=null" for label in ("method", "form") if f"model.{label}" not in keys]
    return [*arguments[:first], *removals, *arguments[first:]]


def check_recipe(choices: Mapping[str, Any]) -> None:
    """Raise ValueError if the chosen recipe has settings for pairs of a model and a data set, but not for this one.

    `choices` are those of Hydra, by the names of the groups.
    """
    recipe, model, dataset = (str(choices[group]) for group in ("recipe", "model", "dataset"))
    of_data, of_methods = (
        any(name.startswith(f"{recipe}-") for name in CHOICES[group]) for group in ("recipe/on", "recipe/method")
    )
    if of_methods or not of_data:
        return
    options = GlobalHydra.instance().config_loader().get_group_options("recipe/on")
    if "recipe/on" in choices and f"{recipe}-{model}-{dataset}" in options:
        return
    pairs = [option.split("-", 2)[1:] for option in sorted(options) if option.startswith(f"{recipe}-")]
    same = ", ".join(data for method, data in pairs if method == model)
    known = f"dataset={same}" if same else f"model={' or '.join(sorted({method for method, _ in pairs}))}"
    search = f" To find some: gat-pyg -m search=node dataset={dataset}, or search=graph or link." if same else ""
    raise ValueError(
        f"recipe={recipe} has no settings of model={model} for dataset={dataset}, only for {known}.{search}"
    )


SWITCHES = ("-m", "--multirun", "-r", "--run", "--resolve")  # Hydra's options without a value


ADDED = ("model.", "dataset.", "encoding.", "optimizer.", "scheduler.")  # beginnings of the settings of a class


def translated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: without recipes that do not apply, and with settings of a class as additions.

    A setting of the model, for example, may be there already, by its file or a recipe, or not. `++` works for both;
    `Settings.parse` checks that the class or function has such an argument. Switches may stand between settings, where
    Hydra does not read them.

    >>> translated(["dataset=cora", "model.norm=batch", "-m", "+model.encoder=32,64"])
    ['-m', 'dataset=cora', '++model.norm=batch', '++model.encoder=32,64']
    """
    arguments = sorted(arguments, key=lambda text: text not in SWITCHES)
    return [
        f"++{text.lstrip('+')}" if text.lstrip("+").startswith(ADDED) and "=" in text else text
        for text in without_recipes(arguments)
    ]


def typed(overrides: Sequence[str], recipe: str) -> list[str]:
    """Return translated arguments as a user writes them, with the recipe of a search in place of its name.

    >>> typed(["search=node", "++model.norm=batch"], "strong/node")
    ['recipe=strong/node', 'model.norm=batch']
    """
    added = tuple(f"++{group}" for group in ADDED)
    words = [text.removeprefix("++") if text.startswith(added) else text for text in overrides]
    words = [f"recipe={recipe}" if text.startswith("search=") else text for text in words]
    others = [text for text in words if not text.startswith("~recipe")]
    return words if without_recipes(others) == others else others  # the first: the user removed the recipes


def names_of(overrides: Iterable[str]) -> frozenset[str]:
    """Return the names of the settings in overrides.

    >>> sorted(names_of(["dataset=cora", "++model.norm=batch", "~split.val"]))
    ['dataset', 'model.norm', 'split.val']
    """
    return frozenset(text.lstrip("+~").partition("=")[0] for text in overrides)


def value_text(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides.

    >>> value_text({"mode": None, "sizes": [1, 2]})
    '{mode:null,sizes:[1,2]}'
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{value_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./@+-]+", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def misused_group(overrides: Iterable[str]) -> str | None:
    """Return a message about the first override that has no name, or whose value for a group is not a name; or None."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        if not override.key_or_group:
            return no_setting(text)
        names = ", ".join(sorted(CHOICES.get(override.key_or_group, ())))
        required = not override.key_or_group.startswith("recipe/")  # these may be removed: see `without_recipes`
        if names and required and (override.is_delete() or not isinstance(override.value(), str)):
            return f"{text} is no choice, expected {override.key_or_group}=NAME with one of {names}."
    return None


def quoted(argument: str) -> str:
    """Return an argument for the shell, in double quotes if they suffice."""
    if shlex.quote(argument) == argument:
        return argument
    return shlex.quote(argument) if set(argument) & {*'"$`\\!'} else f'"{argument}"'
