"""Hydra's composition of settings in less time: most of what a command costs that trains for an epoch or is refused."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import astuple
from functools import cache
from types import SimpleNamespace
from typing import Any

import omegaconf._utils
import omegaconf.base
import omegaconf.omegaconf
import yaml
from hydra._internal import config_repository, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from yaml import load

from gat_pyg.settings.conf import config_folder


def compose_once() -> None:
    """Let this process compose the settings of a command once, and parse each file and each interpolation once.

    Hydra composes them before to learn `hydra.mode`, which our settings leave open. Forked processes do what users' do.
    """
    Hydra.get_mode = lambda self, config_name, overrides: None
    omegaconf.base.parse = omegaconf._utils.parse = cache(omegaconf._utils.parse)
    for module in (omegaconf._utils, omegaconf.omegaconf):  # its home until 2.3, and where 2.4 looks it up
        if hasattr(module, "get_yaml_loader"):
            module.get_yaml_loader = cache(module.get_yaml_loader)
    config_repository.copy = SimpleNamespace(deepcopy=copy)  # for its list of sources is replaced, not changed
    parsed = cache(load)
    omegaconf.omegaconf.yaml = SimpleNamespace(
        **{**vars(yaml), "load": lambda file, Loader: parsed(_text(file), Loader)}
    )
    choices = defaults_list._create_interpolation_map  # built for each file, though few of them have an interpolation

    def choices_to_resolve(overrides: Any, listed: list[Any], self_added: bool) -> Any:
        if any(not each.is_self() and each.is_interpolation() for each in listed):
            return choices(overrides, listed, self_added)
        return None

    defaults_list._create_interpolation_map = choices_to_resolve
    merge_once()


def merge_once() -> None:
    """Load each of the package's choices once, and merge each list of choices once, where there is no other folder."""
    loaded: dict[str, Any] = {}
    merged: dict[Any, Any] = {}
    load_config = CachingConfigRepository.load_config
    compose = ConfigLoaderImpl._compose_config_from_defaults_list
    folders = [("hydra", "hydra.conf"), ("main", str(config_folder())), ("schema", "")]

    def is_own(repo: Any) -> bool:
        return [(source.provider, source.path) for source in repo.get_sources()] == folders

    def load_once(self: Any, config_path: str) -> Any:
        if not is_own(self):
            return load_config(self, config_path)
        if config_path not in loaded:
            loaded[config_path] = load_config(self, config_path)
        return loaded[config_path]

    def compose_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not is_own(repo):
            return compose(self, defaults, repo)
        choices = tuple(map(astuple, defaults))
        if choices not in merged:
            merged[choices] = compose(self, defaults, repo.delegate)  # which loads again: merging moves its nodes
        return deepcopy(merged[choices])

    CachingConfigRepository.load_config = load_once
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_once


def _text(file: Any) -> str:
    return file if isinstance(file, str) else file.read()
