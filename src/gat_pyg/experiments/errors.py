"""Errors as one-line messages."""

from __future__ import annotations

import traceback
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ..files import FULL, full
from .settings import RULES, _similar

# What can go wrong --------------------------------------------------------------------------------------------------


def _message(error: Exception) -> str | None:
    """The error in words where its own words are enough: ours, Hydra's, the disk's. None where they are not."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown.{_similar(name, error.options, f'{group}=')}"
    if isinstance(error, OverrideParseException):
        given = error.override
        if "=" not in given:
            return f"{given} cannot be read as a setting, expected name=value, as in dataset=cora."
        why = str(error).removeprefix(f"Error parsing override '{given}'\n").splitlines()[0]
        return (
            f"{given} cannot be read as a setting: {why}. Quote a value that holds signs such as = or (, and inside a "
            "list each setting that does: methods=\"[[gat,'training.lr=0.01']]\"."
        )
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return _message(error.__cause__) or str(error)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and error.full_key:
        name, siblings = str(error.full_key), error.parent_node
        group = name.rpartition(".")[0]
        known = [f"{group}.{key!s}".removeprefix(".") for key in (siblings if isinstance(siblings, DictConfig) else ())]
        more = (
            f" To pass it all the same, write +{name}=..." if group in ("dataset", "model", "trainer", "logger") else ""
        )
        return f"{name} is unknown.{_similar(name, [*known, *RULES])}{more}"
    if isinstance(error, MisconfigurationException):
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return ": ".join([str(error.full_key), str(error).splitlines()[0]])
    if isinstance(error, HydraException):
        return " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, OSError) and error.filename is not None and (number := full(error)) is not None:
        return (
            f"{error.filename} could not be written: {FULL[number]}. What was there before is whole. Free some "
            "space; then the same command with ckpt_path=last goes on from the last checkpoint."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parents[1])
    return str(error) if ours and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None
