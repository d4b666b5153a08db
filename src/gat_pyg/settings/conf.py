"""The settings in `conf`, and Hydra 1.3 or 1.4. Importing this file registers all choices and resolvers with Hydra."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import hydra.utils
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from .names import RESOLVERS

# Hydra 1.4 checks the names of classes, unless it gets this, and warns of the arguments and functions that 1.3 needs.
_UNCHECKED = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
VERSION_BASE = {"version_base": "1.3"} if _UNCHECKED is None else {}
TRUSTED: dict[str, Any] = {} if _UNCHECKED is None else {"execution_whitelist": _UNCHECKED}  # of `hydra.main`


def instantiate(values: Mapping[str, Any], **others: Any) -> Any:
    """Build an object by Hydra from settings, which are the user's own: any class may be named."""
    trusted = {} if _UNCHECKED is None else {"_execution_whitelist_": _UNCHECKED}
    return hydra.utils.instantiate(dict(values), **trusted, **others)


def config_folder() -> Path:
    """Return the folder of configurations: in the installed package, else in the repository."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml in {package} or in its repository. Reinstall gat_pyg.")


class Choice(ConfigNode):
    """A choice of a group, such as `dataset=cora`: its file, and the text of its settings, parsed when read."""

    def __init__(self, group: str, name: str, package: str | None, comment: str, text: str, file: str) -> None:
        self.group, self.name, self.package, self.provider = group, name, package, "gat_pyg"
        self.comment, self.text, self.file = comment, text, file

    @functools.cached_property
    def node(self) -> DictConfig:  # type: ignore[override]  # Hydra sets it in its copy
        """The settings."""
        return _parsed(self.text)


@functools.cache
def _parsed(text: str) -> DictConfig:
    return cast(DictConfig, OmegaConf.create(text or "{}"))


CHOICES: dict[str, dict[str, Choice]] = {}  # [group][name]
_SECTION = re.compile(r"((?:^#.*\n)*)^([^\s#].*)=(.+?)(?: @(\w+))?:\n((?:^ .*\n|^\n)*)", re.MULTILINE)


def store_choices() -> None:
    """Register each section of the files in `conf/groups` with Hydra as a choice of a group.

    The section `dataset=cora` is the choice that this setting selects. `recipe/on=papers-gat-ppi, papers-const_gat-ppi
    @_global_` are two with the same settings, each in the package `_global_`. The comment above describes the choice.
    """
    for path in sorted((config_folder() / "groups").rglob("*.yaml")):
        for comment, group, names, package, body in _SECTION.findall(path.read_text(encoding="utf-8")):
            nodes = ConfigStore.instance().repo
            for folder in group.split("/"):
                nodes = nodes.setdefault(folder, {})
            for name in names.split(", "):
                about = re.sub("^# ?", "", comment, flags=re.M)
                choice = Choice(group, name, package or None, about, dedent(body), path.stem)
                CHOICES.setdefault(group, {})[name] = nodes[f"{name}.yaml"] = choice


def check_names(folder: Path) -> None:
    """Raise ValueError if a user's folder has a file with the name of a choice in `conf/groups`.

    Results of both would have the same name, and versions of Hydra differ in which one they use.
    """
    for group, choices in CHOICES.items():
        for name in choices:
            if (file := folder / group / f"{name}.yaml").is_file():
                raise ValueError(
                    f"{file} has the name of a choice of gat_pyg, {group}={name}. Rename the file, for example to "
                    f"my-{name}.yaml, and select it by {group}=my-{name}."
                )


store_choices()
_register: Any = OmegaConf.register_new_resolver if _UNCHECKED is None else OmegaConf.register_resolver
for _resolver in RESOLVERS:
    _register(_resolver.__name__, _resolver, replace=True)
