"""The command that trains with the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..settings.conf import CHOICES, VERSION_BASE, config_folder
from ..settings.hashing import flattened
from ..settings.overrides import quoted, translated, value_text
from ..settings.settings import INTERNAL, Settings
from .defaults_by_data import by_data
from .result import settings_in

GROUPS = ("dataset", "model", "loader", "encoding", "optimizer", "scheduler")  # in the order of a command
DEFAULT = ("loader=full", "encoding=none", "optimizer=adam", "scheduler=none")  # unless a recipe has others
OF_A_PLACE = {*INTERNAL, "seed", "runs", "ckpt_path", "outputs", "results", "data_root", "dataset.root"}


def command_of(folder: str | Path, runs: int = 1) -> str | None:
    """Return the command that trains with the settings in a run's folder; None if there are none or they cannot be one.

    Composing the command gives the settings with the `config_hash` of the run.
    """
    try:
        values = settings_in(Path(folder))
        wanted = Settings.parse(OmegaConf.create(values))
    except (OSError, ValueError):
        return None
    chosen = [f"{group}={name}" for group in GROUPS if (name := _choice(group, values.get(group) or {}))]
    content = {name: getattr(wanted, name) for name in INTERNAL}  # of files, which may have changed
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        for recipe in ((), ("recipe=none",)):  # the second: what suits the data is among the settings
            base: Any = OmegaConf.to_container(compose("config", translated([*recipe, *chosen])), resolve=True)
            changes = _changes(flattened(base), flattened(values))
            overrides = [*recipe, *(text for text in chosen if text not in DEFAULT), *changes]
            try:
                settings = Settings.parse(compose("config", translated(overrides)))
            except (HydraException, OmegaConfBaseException, ValueError):  # no override can express it
                continue
            if settings.replace(**content).hash == wanted.hash and not by_data(settings, overrides):
                return " ".join(["gat-pyg", *map(quoted, overrides), *([f"runs={runs}"] if runs > 1 else [])])
    return None


def _choice(group: str, values: Mapping[str, Any]) -> str | None:
    """Return the choice of a group with fewest other values; None if none has the same class."""
    scores: dict[str, tuple[int, int]] = {}
    for name in sorted(CHOICES[group]):
        inner = _values(group, name)
        if inner.get("_target_") == values.get("_target_"):
            equal = sum(values.get(key) == value for key, value in inner.items())
            scores[name] = equal - len(inner), equal
    return max(scores, key=lambda name: scores[name], default=None)


def _values(group: str, name: str) -> dict[str, Any]:
    """Return the settings of a choice and of those that it is based on."""
    section: Any = OmegaConf.to_container(CHOICES[group][name].node)
    bases = (base for base in section.pop("defaults", []) if isinstance(base, str) and base != "_self_")
    inner = section.get(group)
    values: dict[str, Any] = inner if isinstance(inner, dict) else section
    for base in bases:
        values = {**_values(group, base), **values}
    return values


def _changes(base: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the overrides that turn the composed settings into others."""

    def counts(name: str) -> bool:
        group, _, key = name.partition(".")
        if group in ("trainer", "logger", "hydra", "family", "experiment", *OF_A_PLACE) or name in OF_A_PLACE:
            return False
        follows = f"split.{key}" if group == "dataset" else ""  # as dataset.val does split.val
        return follows not in values or values.get(name) != values[follows]

    new = [name for name in values if counts(name) and (name not in base or base[name] != values[name])]
    old = [name for name in base if counts(name) and name not in values and base[name] is not None]
    missing = dict.fromkeys(_missing(name, values) for name in old)
    return [f"{name}={value_text(values[name])}" for name in new] + [f"~{name}" for name in missing]


def _missing(name: str, values: Mapping[str, Any]) -> str:
    """Return the shortest beginning of a dotted name with which no other name begins."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next(text for text in beginnings if not any(f"{other}.".startswith(f"{text}.") for other in values))
