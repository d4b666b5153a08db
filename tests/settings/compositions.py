"""Settings composed once for all tests, and small tasks for the models that they build."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch_geometric.data import Batch, Data

from gat_pyg.data import Task
from gat_pyg.runs.network import build_model
from gat_pyg.settings.conf import CHOICES, VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings
from gat_pyg.tasks.graphs import GraphMultiLabels
from gat_pyg.tasks.nodes import NodeMultiLabels
from gat_pyg.training import Inductive


def names(group: str) -> list[str]:
    return sorted(CHOICES[group])


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        yield


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """The settings composed from these overrides; they cannot be changed, since other tests have the same."""
    config = compose("config", list(overrides))
    OmegaConf.set_readonly(config, True)
    return config


FILES = {  # a user's
    "file": ["dataset.path=x.npz"],
    "tables": ["dataset.edges=x.csv"],
    "smiles": ["dataset.path=x.csv"],
}


def composed_for(model: str, dataset: str, *others: str) -> DictConfig:
    """The settings of a model on a data set."""
    return composed(f"model={model}", f"dataset={dataset}", *FILES.get(dataset, []), *others)


def parsed(*overrides: str) -> Settings:
    return Settings.parse(composed(*overrides))


def task(edge_dim: int | None = None, categories: bool = False, graphs: bool = False) -> Task:
    x = torch.randint(4, (6, 5)).float() if categories else torch.randn(6, 5)
    data = Data(x, torch.randint(6, (2, 12)), y=torch.rand(6, 3).round())
    if edge_dim is not None:
        data.edge_attr = torch.randn(12, edge_dim)
    if graphs:
        each = [Data(x[i : i + 1], torch.zeros(2, 1, dtype=torch.long), y=data.y[i : i + 1]) for i in range(6)]
        return Task("tiny", each, each, each, 5, GraphMultiLabels(3))
    return Task("tiny", [data], [data.clone()], [data.clone()], 5, NodeMultiLabels(3), edge_dim=edge_dim)


def learns(config: DictConfig, task: Task) -> None:
    """The model of these settings is built for the task, and every parameter receives a gradient or is fitted."""
    settings = Settings.parse(config)
    model, *_ = build_model(settings.model, task)
    if hasattr(model, "fit"):
        return
    module = Inductive(model.train(), task.objective, settings.optimisation)
    out = module(Batch.from_data_list(task.train) if task.has_many_graphs else task.train[0])
    assert out.shape == (6, 3)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
