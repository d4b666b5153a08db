"""Published numbers, of the paper and of the strongest networks of others, from the fact sheet `published.csv`."""

from __future__ import annotations

import csv
import functools
from importlib import resources
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from ..settings.conf import CHOICES
from ..settings.names import dataset_name
from ..settings.settings import Settings

# Settings by which the methods of the paper's tables have several forms, and the stopping criterion
VARIANTS = ("model.reproduction", "model.aggr", "model.order", "model.act", "training.criterion")


STRONG = "strong"  # the table of the best results of others


class Printed(NamedTuple):
    """A number in the paper; NaN if it has none. Of the best results of others, `split` is as `split_of` returns it."""

    mean: float
    std: float
    runs: str
    source: str
    split: str = ""


@functools.cache
def published() -> dict[tuple[str, str, str], Printed]:
    """Return the published numbers by (table, row, data set), those of the paper in its order.

    >>> published()["2", "GAT", "cora"].mean
    83.0
    """
    with resources.files(__package__).joinpath("published.csv").open(encoding="utf-8") as file:
        return {
            (row["table"], row["row"], row["dataset"]): Printed(
                float(row["mean"] or "nan"), float(row["std"] or "nan"), row["runs"], row["source"], row["split"] or ""
            )
            for row in csv.DictReader(file)
        }


def as_published(settings: Settings) -> bool:
    """Return True if a run has the default settings of its method and data set, up to `VARIANTS` and the trainer.

    These are the settings whose results are comparable with the paper's. Return False outside of the command.
    """
    model = settings.cell
    if model is None and HydraConfig.initialized():
        model = HydraConfig.get().runtime.choices["model"]
    choices = {"model": model, "dataset": dataset_name(settings.dataset.values)}
    if choices["dataset"] not in {dataset for table, _, dataset in published() if table != STRONG}:
        return False
    if not all(name in CHOICES[group] for group, name in choices.items()):
        return False
    default = compose("config", [f"{group}={name}" for group, name in choices.items()])
    for name in VARIANTS:
        group, _, key = name.partition(".")
        values: dict[str, Any] = settings.to_dict()[group]
        if key in values:
            OmegaConf.update(default, name, values[key], force_add=True)
    own, papers = settings.hashed(), Settings.parse(default).hashed()
    differing = {name for name in {*own, *papers} if own.get(name) != papers.get(name)}
    return all(name.startswith("trainer.") for name in differing)
