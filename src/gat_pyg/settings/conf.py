"""The folder of configurations, with Hydra 1.3 or 1.4. Importing this file registers recipes and resolvers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import hydra.utils
from hydra.core.config_store import ConfigStore
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


def store_recipes() -> None:
    """Register each section of the files of recipes with Hydra as a config of its own, for each model in its name.

    The section `gat, gcn64` of conf/recipe/papers/on/citeseer.yaml becomes recipe/on/papers-gat-citeseer and
    recipe/on/papers-gcn64-citeseer, and `gcn` of conf/recipe/papers/methods.yaml becomes recipe/method/papers-gcn.
    """
    recipes, store = config_folder() / "recipe", ConfigStore.instance().store
    for path in (path for files in ("methods", "on/*", "family/*") for path in recipes.glob(f"*/{files}.yaml")):
        recipe, *folders, _ = path.relative_to(recipes).parts
        group, suffix = (folders[0], f"-{path.stem}") if folders else ("method", "")
        for models, values in cast(DictConfig, OmegaConf.load(path)).items():
            for model in str(models).split(", "):
                store(f"{recipe}-{model}{suffix}", values, f"recipe/{group}", "_global_")


store_recipes()
_register: Any = OmegaConf.register_new_resolver if _UNCHECKED is None else OmegaConf.register_resolver
for _resolver in RESOLVERS:
    _register(_resolver.__name__, _resolver, replace=True)
