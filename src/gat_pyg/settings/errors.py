"""Messages for errors of the user, the disk or Hydra."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from ..files import FULL, full
from .rules import similar
from .settings import FACTORIES, INTERNAL, rules

EXAMPLES = {"dataset.path": "graph.npz"}  # values of settings that have no default


def message(error: Exception, training: bool = True) -> str | None:
    """Return a message for an error of the user, the disk or Hydra; None for errors that need their traceback.

    `training` is False for a verb, which has no settings to choose other folders or to continue.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown.{similar(name, error.options, f'{group}=')}"
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return message(error.__cause__, training) or str(error)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and error.full_key:
        return _unknown(error)
    if type(error).__name__ == "MisconfigurationException":  # Lightning's; the import would take a second
        return str(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value. Pass {error.full_key}={EXAMPLES.get(str(error.full_key), '...')}"
    if isinstance(error, OmegaConfBaseException):
        return ": ".join([str(error.full_key), str(error).splitlines()[0]])
    if isinstance(error, HydraException):
        if several := re.match(r"Ambiguous value for argument '\+*(.+?)=(.*)'", str(error)):
            name, values = several.groups()
            return f"{name}={values} has several values. A list is {name}=[{values}]; -m trains with each value."
        return " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, OSError) and error.filename is None and _is_of_stdout():
        return f"standard output could not be written: {error.strerror}. Results that were written to files are kept."
    if isinstance(error, OSError) and error.filename is not None:
        return _unwritten(error, training)
    frames = traceback.extract_tb(error.__traceback__)
    in_package = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parents[1])
    return str(error) if in_package and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None


def _unreadable(error: OverrideParseException) -> str:
    text = error.override
    if "=" not in text:
        return no_setting(text)
    reason = str(error).removeprefix(f"Error parsing override '{text}'\n").splitlines()[0]
    return (
        f"{text} cannot be read as a setting: {reason}. Quote values with characters such as = or (, also inside a "
        "list: methods=\"[[gat,'training.lr=0.01']]\"."
    )


def no_setting(text: str) -> str:
    """Return the message about an argument that is no setting."""
    return (
        f"{text} cannot be read as a setting, expected name=value, as in dataset=cora. Before settings there may be a "
        "verb: gat-pyg --help lists them."
    )


def _unknown(error: OmegaConfBaseException) -> str:
    name, siblings = str(error.full_key), error.parent_node
    group = name.rpartition(".")[0]
    known = [f"{group}.{key!s}".removeprefix(".") for key in (siblings if isinstance(siblings, DictConfig) else ())]
    hint = f" To pass it anyway, write +{name}=..." if group in FACTORIES else ""
    others = [each for each in rules() if each not in INTERNAL]
    return f"{name} is unknown.{similar(name, [*known, *others])}{hint}"


def _is_of_stdout() -> bool:
    """Return True if standard output cannot be written; then send the rest of it nowhere."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python exits with a second error
        return True
    return False


def _unwritten(error: OSError, training: bool) -> str:
    if (number := full(error)) is None:
        folders = ": hydra.run.dir=... outputs=..." if training else "."
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written{folders}"
    resume = "; with ckpt_path=last it continues from the last checkpoint" if training else ""
    return (
        f"{error.filename} could not be written: {FULL[number]}. Its previous content is intact. Free some space, then "
        f"repeat the command{resume}."
    )
