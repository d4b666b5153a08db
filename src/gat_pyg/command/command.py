"""The command line: its overrides, the names of run folders, and error messages.

This file does not import torch, so that help, completion and `--cfg` are fast.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from ..files import FULL, full
from ..settings.conf import config_folder, register_resolver
from ..settings.rules import similar
from ..settings.settings import FACTORIES, rules
from ..terminal import print_message
from .verbs import TRAIN, VERBS

FULL_ERROR = "GAT_PYG_FULL_ERROR"  # saves the user's HYDRA_FULL_ERROR, which the command sets to 1 for Hydra


# Overrides ----------------------------------------------------------------------------------------------------------

REPLACES = ("dataset._target_", "dataset.name", "model._target_")
OWN = ("dataset=file", "dataset=tables", "dataset=smiles")  # data without settings of their own


def without_recipes(arguments: Sequence[str]) -> list[str]:
    """Remove the recipes of a model or a data set whose class is replaced by an override, or that are the user's own.

    Hydra selects `recipe/method` by the recipe's and the model's name, and `recipe/on` and `recipe/family` also by the
    name of the data set or its family. An override such as `dataset._target_` changes no name. The model's `method` and
    `form` are removed for the same reason. On one's own data, all methods have the settings that suit these (`suited`),
    not those of the papers' data.

    >>> without_recipes(["model=gcn", "dataset=file"])
    ['model=gcn', '~recipe/family', '~recipe/on', '~recipe/method', 'dataset=file']
    """
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    replaced = [index for index, key in enumerate(keys) if key in REPLACES or arguments[index] in OWN]
    if not replaced:
        return list(arguments)
    first = replaced[0]
    has_recipe = keys[first] == "dataset.name"  # of another data set of a class with settings
    recipes = ["recipe/family", "recipe/on", *["recipe/method"] * (len(replaced) > 1 or not has_recipe)]
    removals = [f"~{recipe}" for recipe in recipes if recipe not in keys]
    if "model._target_" in keys:
        removals += [f"++model.{label}=null" for label in ("method", "form") if f"model.{label}" not in keys]
    return [*arguments[:first], *removals, *arguments[first:]]


def check_recipe(choices: Mapping[str, Any]) -> None:
    """Raise ValueError if the chosen recipe has settings for pairs of a model and a data set, but not for this one.

    `choices` are those of Hydra, by the names of the groups.
    """
    recipe, model, dataset = (str(choices[group]) for group in ("recipe", "model", "dataset"))
    folder = config_folder() / "recipe" / recipe
    if not (folder / "on").is_dir() or (folder / "methods.yaml").is_file():
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
            return _no_setting(text)
        folder = config_folder() / override.key_or_group
        required = not override.key_or_group.startswith("recipe/")  # these may be removed: see `without_recipes`
        if folder.is_dir() and required and (override.is_delete() or not isinstance(override.value(), str)):
            names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            return f"{text} is no choice, expected {override.key_or_group}=NAME with one of {names}."
    return None


# Names --------------------------------------------------------------------------------------------------------------


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
        from ..data.arrays.from_pyg import name_of_file  # imports torch

        return name or name_of_file(files)
    return Path(name or path).stem or kind if home == "gat_pyg.data" else _name_of(kind, name)


def run_name(_root_: DictConfig) -> str:
    """Return the part of a run folder's name after the time: model, data set, loader, mechanism.

    `_root_` is the composed configuration, including Hydra's own. The model has its name in `conf/model`, or that of
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


register_resolver("run_name", run_name, replace=True)  # for hydra.run.dir
register_resolver("outputs_folder", outputs_folder, replace=True)
register_resolver("pick", pick, replace=True)


# Errors -------------------------------------------------------------------------------------------------------------


EXAMPLES = {"dataset.path": "graph.npz"}  # values of settings that have no default


@contextmanager
def errors_as_messages(overrides: Sequence[str]) -> Iterator[None]:
    """Context manager: print an error as a message, and exit with status 1; explain settings after a wrong option."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ.setdefault(FULL_ERROR, before or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except Exception as error:
        exit_with(error, misused_group(overrides) or message(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code == 2:  # argparse, after its usage
            print(
                "gat-pyg: settings are NAME=VALUE without dashes, as in training.lr=0.01, and stand together: Hydra's "
                "options come before or after them.",
                file=sys.stderr,
            )
        raise
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def exit_with(error: Exception, text: str | None) -> NoReturn:
    """Print the message, or the traceback if there is none or the user set `HYDRA_FULL_ERROR=1`, and exit."""
    if text is None or os.environ[FULL_ERROR] == "1":
        traceback.print_exception(error)
    else:
        print_message(f"gat-pyg: {text}")
    sys.exit(1)


def message(error: Exception) -> str | None:
    """Return a message for an error of the user, the disk or Hydra; None for errors that need their traceback."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown.{similar(name, error.options, f'{group}=')}"
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return message(error.__cause__) or str(error)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and error.full_key:
        return _unknown(error)
    if type(error).__name__ == "MisconfigurationException":  # Lightning's; the import would take a second
        return str(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value. Pass {error.full_key}={EXAMPLES.get(str(error.full_key), '...')}"
    if isinstance(error, OmegaConfBaseException):
        return ": ".join([str(error.full_key), str(error).splitlines()[0]])
    if isinstance(error, HydraException):
        return " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, OSError) and error.filename is None and _is_of_stdout():
        return f"standard output could not be written: {error.strerror}. Results that were written to files are kept."
    if isinstance(error, OSError) and error.filename is not None:
        return _unwritten(error)
    frames = traceback.extract_tb(error.__traceback__)
    in_package = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parents[1])
    return str(error) if in_package and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None


def _unreadable(error: OverrideParseException) -> str:
    text = error.override
    if "=" not in text:
        return _no_setting(text)
    reason = str(error).removeprefix(f"Error parsing override '{text}'\n").splitlines()[0]
    return (
        f"{text} cannot be read as a setting: {reason}. Quote values with characters such as = or (, also inside a "
        "list: methods=\"[[gat,'training.lr=0.01']]\"."
    )


def _no_setting(text: str) -> str:
    verbs = ", ".join([TRAIN, *VERBS])
    return (
        f"{text} cannot be read as a setting, expected name=value, as in dataset=cora. Before settings there may be a "
        f"verb: {verbs}."
    )


def _unknown(error: OmegaConfBaseException) -> str:
    name, siblings = str(error.full_key), error.parent_node
    group = name.rpartition(".")[0]
    known = [f"{group}.{key!s}".removeprefix(".") for key in (siblings if isinstance(siblings, DictConfig) else ())]
    hint = f" To pass it anyway, write +{name}=..." if group in FACTORIES else ""
    return f"{name} is unknown.{similar(name, [*known, *rules()])}{hint}"


def _is_of_stdout() -> bool:
    """Return True if standard output cannot be written; then send the rest of it nowhere."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python exits with a second error
        return True
    return False


def _unwritten(error: OSError) -> str:
    if (number := full(error)) is None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    return (
        f"{error.filename} could not be written: {FULL[number]}. Its previous content is intact. Free some space; then "
        "the same command with ckpt_path=last continues from the last checkpoint."
    )
