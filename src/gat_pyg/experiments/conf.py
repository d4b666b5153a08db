"""The folder of configurations. Importing this file registers its recipes with Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf


def config_folder() -> Path:
    """Return the folder of configurations: in the installed package, else in the repository."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml in {package} or in its repository. Reinstall gat_pyg.")


def store_recipes() -> None:
    """Register each section of the recipe files with Hydra as a config of its own, for each model in its name.

    The section `gat, gcn64` of conf/recipe/on/citeseer.yaml becomes recipe/on/gat/citeseer and
    recipe/on/gcn64/citeseer, and `gcn` of conf/recipe/papers.yaml becomes recipe/gcn.
    """
    recipes, store = config_folder() / "recipe", ConfigStore.instance().store
    for path in (recipes / "papers.yaml", *recipes.glob("on/*.yaml"), *recipes.glob("family/*.yaml")):
        for models, values in cast(DictConfig, OmegaConf.load(path)).items():
            for model in str(models).split(", "):
                if path.stem == "papers":
                    store(model, values, "recipe", "_global_")
                else:
                    store(path.stem, values, f"recipe/{path.parent.name}/{model}", "_global_")


store_recipes()
