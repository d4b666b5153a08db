"""The module, batches, trainer and logger of a run, by its settings."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.errors import HydraException
from lightning import Trainer
from torch import nn

from ..distributed.halo import layers_of
from ..distributed.ranks import print_once, rank_zero_print
from ..graph.layers import graph_norms
from ..graph.partition import WITH_METIS, edge_cut
from ..settings.conf import instantiate
from ..settings.factory import Factory
from ..settings.options import Loader, Training
from ..settings.settings import FIXED, Settings
from ..tasks.model import members, takes_sparse
from ..tasks.task import Task
from ..training.batching import Parts, is_divided
from ..training.checkpoint import SafeCheckpoints
from ..training.loading import TaskData, sparse_pays
from ..training.modules import Inductive, Transductive


def build_module(settings: Settings, task: Task, model: nn.Module) -> Transductive | Inductive:
    """Build the module for the task's setup, and compile the model if `training.compile` is true."""
    training, optimisation = settings.training, settings.optimisation
    if task.objective.has_pairs and members(model).has_loss:
        raise ValueError(
            f"{type(model).__name__} trains with a loss on node labels, and {task.name} has labels of pairs. "
            "Choose a model without a loss of its own."
        )
    if training.compile:
        model.compile()
    if not task.has_many_graphs:
        return Transductive(model, task.objective, optimisation, training.cuda_graphs)
    if training.cuda_graphs is True:
        raise ValueError(
            f"training.cuda_graphs is true, but {task.name} has many graphs. Use training.cuda_graphs=auto."
        )
    return Inductive(model, task.objective, optimisation)


def build_data(
    loader: Loader, training: Training, task: Task, model: nn.Module, trainer: Trainer, seed: int
) -> TaskData:
    """Build the batches that `loader` describes."""
    if task.objective.has_pairs and is_divided(trainer):
        raise ValueError(
            f"trainer.strategy is halo, which divides the nodes, but {task.name} predicts {task.objective.item}s with "
            "ends in two parts. Use trainer.strategy=ddp with loader=neighbor or +loader.num_links=1024."
        )
    if is_divided(trainer) and (loader.in_batches or training.compile or task.has_many_graphs):
        raise ValueError(
            "trainer.strategy is halo, which divides a single graph and needs loader=full and training.compile=false. "
            f"For other loaders, compiled models or many graphs, use trainer.strategy=ddp. The data set is {task.name}."
        )
    if task.objective.label_rate and (is_divided(trainer) or loader.in_batches):
        raise ValueError(
            f"training.label_rate is {task.objective.label_rate}, which needs the whole graph: known labels spread "
            "over its edges. Use loader=full without trainer.strategy=halo, or leave it out."
        )
    if is_divided(trainer):
        layers_of(model)
    if not loader.in_batches:
        sparse = wants_sparse(training, task, model, trainer)
        return TaskData(task, training.batch_size, seed, sparse, num_links=loader.num_links)
    if names := graph_norms(model):
        raise ValueError(
            f"the model has {names[0]}, which is over all nodes of a graph, and the loader gives batches of nodes. "
            "Use loader=full, norm=batch, or norm=layer with norm_kwargs.mode=node."
        )
    if training.sparse is True:
        raise ValueError("training.sparse is true, but batches of nodes have dense features. Use loader=full.")
    hops, batch_size = loader.num_neighbors, loader.batch_size or 1
    data = TaskData(task, batch_size, seed, False, hops, loader.num_workers or 0, loader.num_parts, loader.num_links)
    if isinstance(parts := data.loading, Parts):
        cut = 100 * edge_cut(task.train[0].edge_index, parts.part)  # before the fit, in which other ranks would wait
        how = "by METIS" if WITH_METIS else "of node ids in a row (by METIS with 'gat_pyg[metis]')"
        rank_zero_print(f"{task.name}: {parts.num_parts} parts {how}, {cut:.1f} % of the edges between them")
        return data
    expected = members(model).num_hops
    if expected not in (None, 0, len(hops or ())):
        raise ValueError(f"loader.num_neighbors is {hops}, expected {expected} numbers: one for each hop of the model.")
    return data


def wants_sparse(training: Training, task: Task, model: nn.Module, trainer: Trainer, stacked: bool = False) -> bool:
    """Return True if `training.sparse` makes the features a sparse matrix."""
    sparse = training.sparse
    if task.objective.label_rate:
        if sparse is True:
            raise ValueError("training.sparse is true, but known labels (training.label_rate) are dense. Use auto.")
        return False
    if is_divided(trainer) and sparse == "auto":
        return False  # halo fetches dense rows
    if sparse is True and is_divided(trainer):
        raise ValueError("training.sparse is true, but trainer.strategy=halo fetches dense rows. Use auto or false.")
    if sparse is True and (task.has_many_graphs or not takes_sparse(model)):
        raise ValueError(
            f"training.sparse is true, which {task.name} with {type(model).__name__} does not support: it needs a "
            "single graph and a model that takes sparse features, such as gat_pyg.models.GAT, and is not compiled. "
            "Use training.sparse=auto."
        )
    device = trainer.strategy.root_device.type
    use_sparse = sparse_pays(task, model, device, stacked) if sparse == "auto" else sparse
    if use_sparse:
        x = task.train[0].x
        share = 100 * int(x.count_nonzero()) / max(x.numel(), 1)
        print_once(f"{task.name}: only {share:.1f} % of the features are nonzero; using a sparse matrix")
    return use_sparse


def build_trainer(
    trainer: Factory, logger: Factory, folder: Path, callbacks: Sequence[Any] = (), **changes: Any
) -> Trainer:
    """Build Lightning's trainer and its logger, without options that slow down each epoch."""
    fixed = {
        "plugins": [SafeCheckpoints()],
        "callbacks": list(callbacks),
        "logger": build_logger(logger, folder),
        "default_root_dir": str(folder),
    }
    return cast(Trainer, trainer(**changes, **fixed, **FIXED))


def build_logger(factory: Factory, folder: Path) -> Any:
    """Build a Lightning logger that writes into `folder`; return False if no logger besides metrics.csv is set."""
    if factory.target is None:
        return False
    parameters = inspect.signature(factory.locate()).parameters
    key = next((key for key in ("save_dir", "log_dir") if key in parameters and factory.get(key) is None), None)
    try:
        return instantiate(factory.values, **({key: str(folder)} if key else {}))
    except (HydraException, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        packages = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
        package = packages.get(factory.target.rpartition(".")[2], "tensorboard")
        raise ValueError(
            f"{factory.target} needs a package that is not installed. Run: python -m pip install {package}. "
            "Or use logger=csv, which needs none."
        ) from error
