"""The gate of run folders: what the settings in a folder may build, since it may come from somebody else."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torch_geometric.transforms import BaseTransform

from .. import data
from ..data.named.raw import data_root
from ..data.rows import READERS

BASES = {  # packages whose classes with this base may be built
    "gat_pyg.": (nn.Module, BaseTransform),
    "torch_geometric.datasets.": (Dataset,),
    "torch_geometric.transforms.": (BaseTransform,),
    "torch_geometric.nn.models.": (nn.Module,),
    "torch_geometric.nn.conv.": (nn.Module,),
    "ogb.": (Dataset,),
    "torch.optim.": (Optimizer, LRScheduler),
    "lightning.pytorch.": (lightning.Trainer, Logger),
}
IMPORTED = ("gat_pyg.", "torch_geometric.", "ogb.", "torch.optim.", "lightning.")  # targets that are looked up at all
ALLOWED = "the data sets, models and transforms of gat_pyg, PyG and OGB, and the optimizers of torch"


def check_settings(values: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if settings from a run's folder build or write something that only its owner may ask for.

    They may name classes and functions that gat_pyg's own settings name. Folders into which data are downloaded must
    lie in the user's own data folder (`gat_pyg.data.named.raw.data_root`).

    Args:
        values: the settings, without references.
        file: the file that they are from, for the message.
    """
    allow = (
        "If you trust its sender, pass trust=True (--trust in the command). For predictions and scores of a finished "
        "run, giving the data is enough."
    )
    if "${" in json.dumps(values, default=str):  # would be resolved once more
        raise ValueError(f"{file} has a reference within a text, expected values. {allow}")
    root = data_root().resolve()
    for name, holder, key, value in _entries(values):
        if key == "_target_" and value is not None and not _may_be_built(value):
            raise ValueError(f"{file}: {name} is {value}, expected one of {ALLOWED}. {allow}")
        is_written = name == "data_root" or (name.startswith("dataset.") and _may_be_written(holder, key, value))
        if is_written and value is not None and not Path(value).expanduser().resolve().is_relative_to(root):
            raise ValueError(f"{file}: {name} is {value}, expected a path in your data folder, {root}. {allow}")


def _entries(values: Any, name: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each entry of nested settings: its name, what holds it, its key and its value."""
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        inner = f"{name}.{key}" if name else str(key)
        yield inner, values, key, value
        yield from _entries(value, inner)


def _may_be_built(target: Any) -> bool:
    """Return True for the public functions of gat_pyg.data, and for the classes in `BASES`."""
    home, _, name = str(target).rpartition(".")
    if home == data.__name__:
        return inspect.isfunction(getattr(data, name, None))
    if not f"{home}.".startswith(IMPORTED):
        return False
    try:
        kind: object = getattr(importlib.import_module(home), name, None)
    except (ImportError, ValueError):
        return False
    return inspect.isclass(kind) and any(
        kind.__module__.startswith(package) and issubclass(kind, bases) for package, bases in BASES.items()
    )


def _may_be_written(holder: Any, key: Any, value: Any) -> bool:
    """Return True for a text of a data set's settings that may be a folder to download to; not for the user's files."""
    reader = READERS.get(str(holder.get("_target_"))) if isinstance(holder, Mapping) else None
    if not isinstance(value, str) or isinstance(holder, list) or (reader is not None and key in reader.paths):
        return False
    path = Path(value)
    return key == "root" or bool({"..", "~"} & {*path.parts}) or path.is_absolute() or "://" in value
