"""The command line: its configuration folder, the names of run folders, and errors as messages.

Nothing here imports torch, so that help, completion and `--cfg` are quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ..files import FULL, full
from .rules import similar
from .settings import FACTORIES, rules

FULL_ERROR = "GAT_PYG_FULL_ERROR"  # the user's HYDRA_FULL_ERROR, which is set to 1 so that Hydra raises its errors


def config_folder() -> Path:
    """The folder of configurations: inside the installed package, else the repository's."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml in {package} or in its repository. Install gat_pyg anew.")


# Overrides ----------------------------------------------------------------------------------------------------------

REPLACES = ("dataset._target_", "dataset.name", "model._target_")


def without_recipes(arguments: Sequence[str]) -> list[str]:
    """Drop what belongs to a named model or a named data set where another class replaces it.

    Hydra chooses a model's recipe by the name of the model, and what differs on a data set by both names, which an
    override such as `dataset._target_` does not change; and so it is with the model's `method`.

    >>> without_recipes(["model=gat", "dataset._target_=torch_geometric.datasets.KarateClub"])
    ['model=gat', '~recipe/on', 'dataset._target_=torch_geometric.datasets.KarateClub']
    """
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    first = next((at for at, key in enumerate(keys) if key in REPLACES), None)
    if first is None:
        return list(arguments)
    dropped = [] if "recipe/on" in keys else ["~recipe/on"]
    if "model._target_" in keys:
        dropped += [] if "recipe" in keys else ["~recipe"]
        dropped += [f"++model.{label}=null" for label in ("method", "form") if f"model.{label}" not in keys]
    return [*arguments[:first], *dropped, *arguments[first:]]


def misused_group(overrides: Iterable[str]) -> str | None:
    """A message on the first override that sets a group to something other than a name, or has no name; else None."""
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


# Names --------------------------------------------------------------------------------------------------------------


def dataset_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the data set in results and folders, before it is loaded.

    A data set of this package keeps its name, a file has its stem, and any other class is joined with its `name`.

    >>> dataset_name({"_target_": "torch_geometric.datasets.Amazon", "name": "Photo"})
    'amazon-photo'
    """
    target, name, path = (str(settings.get(key) or "") for key in ("_target_", "name", "path"))
    home, _, kind = target.rpartition(".")
    return Path(name or path).stem or kind if home == "gat_pyg.data" else _name_of(kind, name)


def run_name(_root_: DictConfig) -> str:
    """Return the part of a run folder's name that follows the time: the model, the data set, and how it attends.

    `_root_` is the composed configuration, with Hydra's own. The model is named as in `conf/model`, or after its
    class where `model._target_` is replaced.
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
        choices.loader if choices.loader != "full" else "",
        _name_of(mechanism.rpartition(".")[2]),
        "reproduction" if values.get("model.reproduction", "false") != "false" else "",
    ]
    return "_".join(word for word in words if word)


def _name_of(kind: str, name: str = "") -> str:
    from ..data.own import name_of  # imports torch

    return name_of(kind, name)


def pick(key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of `key`: `${pick:${.act},{relu:ReLU,elu:ELU}}` in a configuration.

    Raises:
        ValueError: if there is none.
    """
    if key not in values:
        raise ValueError(f"{key!r} is unknown.{similar(str(key), map(str, values))}")
    return values[key]


OmegaConf.register_new_resolver("run_name", run_name, replace=True)  # for hydra.run.dir
OmegaConf.register_new_resolver("pick", pick, replace=True)


# Errors -------------------------------------------------------------------------------------------------------------


@contextmanager
def errors_as_messages(overrides: Sequence[str]) -> Iterator[None]:
    """Print an error as a message, and exit with the status 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ.setdefault(FULL_ERROR, before or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except Exception as error:
        exit_with(error, misused_group(overrides) or message(error))
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
        print(f"gat-pyg: {text}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
    sys.exit(1)


def message(error: Exception) -> str | None:
    """A message for errors of the user, the disk or Hydra; None for others, which need their traceback."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown.{similar(name, error.options, f'{group}=')}"
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return message(error.__cause__) or str(error)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and error.full_key:
        return _unknown(error)
    if type(error).__name__ == "MisconfigurationException":  # Lightning's, which is not imported for it
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return ": ".join([str(error.full_key), str(error).splitlines()[0]])
    if isinstance(error, HydraException):
        return " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, OSError) and error.filename is not None:
        return _unwritten(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parents[1])
    return str(error) if ours and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None


def _unreadable(error: OverrideParseException) -> str:
    text = error.override
    if "=" not in text:
        return f"{text} cannot be read as a setting, expected name=value, as in dataset=cora."
    why = str(error).removeprefix(f"Error parsing override '{text}'\n").splitlines()[0]
    return (
        f"{text} cannot be read as a setting: {why}. Quote a value that holds signs such as = or (, and inside a "
        "list each setting that does: methods=\"[[gat,'training.lr=0.01']]\"."
    )


def _unknown(error: OmegaConfBaseException) -> str:
    name, siblings = str(error.full_key), error.parent_node
    group = name.rpartition(".")[0]
    known = [f"{group}.{key!s}".removeprefix(".") for key in (siblings if isinstance(siblings, DictConfig) else ())]
    more = f" To pass it all the same, write +{name}=..." if group in FACTORIES else ""
    return f"{name} is unknown.{similar(name, [*known, *rules()])}{more}"


def _unwritten(error: OSError) -> str:
    if (number := full(error)) is None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    return (
        f"{error.filename} could not be written: {FULL[number]}. What was there before is whole. Free some "
        "space; then the same command with ckpt_path=last goes on from the last checkpoint."
    )
