"""A warm start: a training that begins with the weights of an earlier run, and keeps its data preparation."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from ..settings.factory import Factory, ModelFactory
from ..settings.hashing import content_of_run
from ..settings.settings import Settings
from ..tasks.objective import Objective
from ..tasks.preparation import Preparation, attach
from ..tasks.targets import Targets
from ..tasks.task import Task
from .model_file import arguments_of, described, fill_with, model_file, read, seeds_of
from .result import CONFIG, settings_in

# Arguments of a model that are computed from its training data
FITTED = ("columns", "categories", "edge_categories", "edge_dim", "learn_edges", "deg")


class Earlier(NamedTuple):
    """The run that a training starts from, of one of its seeds."""

    run: Path
    arguments: Mapping[str, Any]  # of the model
    preparation: Preparation
    objective: Objective

    @classmethod
    def of(cls, settings: Settings) -> Earlier | None:
        """Return the earlier run that settings name by `from`, or None.

        Raises:
            FileNotFoundError: if it is no run.
            ValueError: if it has no preparation, or is not the run that the training began with.
        """
        if settings.from_ is None:
            return None
        run = Path(settings.from_).expanduser()
        file = _file_of(run, settings.seed)
        if (now := content_of_run(run)) != settings.start:
            raise ValueError(
                f"The content of from={run} was {settings.start} when the run began, is {now}. Restore it, or train "
                "anew."
            )
        preparation, objective = described(file)
        if preparation is None or objective is None:
            raise ValueError(f"from={run} was saved without its data preparation or objective. Choose another run.")
        return cls(run, arguments_of(file), preparation, objective)

    def applied(self, task: Task) -> Task:
        """Return a task whose outputs mean what those of the earlier run do: with its mean and scale of targets.

        Raises:
            ValueError: if the task is of another kind, or has other classes, features or preparation.
        """
        old, new = self.preparation, task.preparation
        pairs: dict[str, tuple[Any, Any]] = {
            "a task": (self.objective.predicts, task.objective.predicts),
            "the classes": (_names(old, self.objective), _names(new, task.objective)),
            "the number of features": (old.in_channels, new.in_channels),
            "the number of edge features": (old.edge_dim, new.edge_dim),
            "the transforms": ([*old.transforms], [*new.transforms]),
            "the encoding": (old.encoding, new.encoding),  # fitted to the training graphs
        }
        for name, (before, now) in pairs.items():
            if before != now:
                raise ValueError(
                    f"from={self.run}: {name} of that run: {before}; of {task.name}: {now}. Data of the same form are "
                    "needed, or a training without from."
                )
        return task.scaled_as(self.objective.mean, self.objective.std) if isinstance(self.objective, Targets) else task

    def fitted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of a model with what the earlier run computed from its training data."""
        return _with_fitted(arguments, self.arguments)


def _with_fitted(arguments: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: earlier[key] for key in FITTED if key in arguments and key in earlier}
    if isinstance(arguments.get("model"), dict) and isinstance(earlier.get("model"), dict):
        kept["model"] = _with_fitted(arguments["model"], earlier["model"])
    return {**arguments, **kept}


def _names(preparation: Preparation, objective: Objective) -> list[str]:
    names = preparation.class_names or map(str, range(objective.out_channels))
    return [*names]


def fill(model: nn.Module, settings: Settings, seed: int) -> None:
    """Set the weights of a fresh model to those of the earlier run: of the same seed, if it has several.

    Raises:
        ValueError: if they do not fit.
    """
    run = Path(settings.from_ or "").expanduser()
    path = _file_of(run, seed)
    try:
        fill_with(model, read(path)[1], path)
    except ValueError as error:
        reason = str(error).partition(". Give the model")[0]
        raise ValueError(
            f"from={run}: {reason}. A warm start keeps the network: leave out settings of model, or train without from."
        ) from error
    attach(model, None)
    model.train()


def with_earlier_model(settings: Settings, passed: Collection[str]) -> Settings:
    """Return settings with the network of the earlier run, apart from the settings of the model among those `passed`.

    The encoding is that of the earlier run too, unless it is passed. A model that is passed as a whole, by `model=NAME`
    or `model._target_`, is that of the settings.

    Raises:
        FileNotFoundError: if there is no such run.
    """
    if settings.from_ is None or not {"model", "model._target_"}.isdisjoint(passed):
        return settings
    if not (saved := _earlier(settings.from_, settings.seed)):
        return settings
    changed = {name.split(".")[1] for name in passed if name.startswith("model.")}
    values = {key: value for key, value in saved["model"].items() if key not in changed}
    values |= {key: value for key, value in settings.model.values.items() if key in changed}
    chosen = tuple(text for text in settings.suited if not text.startswith("model."))
    settings = settings.replace(model=ModelFactory("model", values), suited=chosen)
    keeps = not any(name.partition(".")[0] == "encoding" for name in passed)
    return settings.replace(encoding=Factory("encoding", saved["encoding"])) if keeps else settings


def warn_of_overlap(settings: Settings) -> None:
    """Warn if the earlier run was trained on the same files with another split."""
    if settings.from_ is None or settings.content is None:
        return
    saved = _earlier(settings.from_, settings.seed)
    if saved.get("content") == settings.content and saved.get("split") != dataclasses.asdict(settings.split):
        rank_zero_warn(
            f"from={settings.from_} was trained on the same files with another split, so rows of this test may have "
            "trained it, and the score would be too good. Choose its split, or other files."
        )


def _earlier(run: str, seed: int) -> dict[str, Any]:
    """Return the settings of the run from which a seed starts; none of a model alone."""
    folder = _file_of(Path(run).expanduser(), seed).parent
    return settings_in(folder) if (folder / CONFIG).is_file() else {}


def _file_of(run: Path, seed: int) -> Path:
    """Return the file of the model from which a seed starts."""
    seeds = seeds_of(run)
    if seeds and seed not in seeds:
        raise FileNotFoundError(
            f"from={run} has the seeds {', '.join(map(str, seeds))}, but not {seed}. Choose seed and runs among them, "
            f"or one of them for all: from={run / f'seed-{seeds[0]}'}."
        )
    return model_file(run / f"seed-{seed}" if seeds else run)
