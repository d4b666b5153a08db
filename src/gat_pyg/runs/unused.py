"""Errors for settings that a user passed and that have no effect on the task, and warnings of those without a use."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch.utilities import rank_zero_warn

from ..settings.hashing import DATA, flattened
from ..settings.settings import Settings
from ..tasks.task import Task
from .network import with_output_layer


def check_effects(settings: Settings, task: Task) -> None:
    """Raise ValueError for a setting of the command line without effect; recipes and data sets may contain them.

    Warn of a training that cannot learn: a learning rate of 0, or a dropout of 1.

    Example:
        >>> from gat_pyg.data import digits
        >>> from hydra import compose, initialize_config_dir
        >>> from gat_pyg.settings.conf import VERSION_BASE, config_folder
        >>> with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        ...     settings = Settings.parse(compose("config", ["++model.readout=sum"]))
        >>> check_effects(settings.replace(passed=frozenset({"model.readout"})), digits())
        Traceback (most recent call last):
        ValueError: model.readout has no effect: digits predicts 10 node classes, and a readout is for graphs...
    """
    for name, reason in _unused(settings, task):
        if any(passed == name or passed.startswith(f"{name}.") for passed in settings.passed):
            raise ValueError(f"{name} has no effect: {reason}")
    if settings.training.lr == 0:
        rank_zero_warn("training.lr is 0, so the weights keep their initial values.")
    for name, value in flattened(settings.to_dict()["model"]).items():
        if "dropout" in name and value == 1:
            rank_zero_warn(f"model.{name} is 1, so training drops everything that it acts on.")


def _unused(settings: Settings, task: Task) -> Iterator[tuple[str, str]]:
    """Yield the settings without effect, each with the reason and what to do."""
    predicts = f"{task.name} predicts {task.objective.predicts}"
    if task.objective.item != "graph":
        yield "model.readout", f"{predicts}, and a readout is for graphs. Leave it out."
    for key, values in with_output_layer(settings.model).items():
        reason = f"the last entry, {values[-1]}, is for an output layer, which a network with jk, head_layers or this"
        yield f"model.{key}", f"{reason} readout lacks. Leave the entry out."
    for factory in (settings.encoding, settings.scheduler):
        reason = f"there is no {factory.group}. Choose one of conf/{factory.group}, as in {factory.group}=NAME."
        yield from ((f"{factory.group}.{key}", reason) for key in factory.arguments if factory.target is None)
    if hasattr(settings.model.locate(), "fit"):
        yield "loss", f"{settings.model.method} has a loss of its own. Leave it out."
    if not task.objective.has_pairs:
        yield "model.decoder", f"{predicts}, and a decoder is for pairs of nodes. Leave it out."
    if not settings.loader.in_batches:
        if task.has_many_graphs:
            reason = f"{task.name} has many graphs, and a step takes training.batch_size of them. Leave it out."
        elif settings.loader.num_links is not None:
            reason = "a step takes loader.num_links pairs of nodes. Leave it out."
        else:
            choices = "loader=neighbor" if task.objective.has_pairs else "loader=neighbor or loader=cluster"
            reason = f"loader=full takes whole graphs. Choose {choices}."
        yield from ((f"loader.{key}", reason) for key in ("batch_size", "num_workers"))
    if not task.has_many_graphs:
        reason = f"{task.name} is one graph, and a step takes all of it or what the loader gives."
        yield "training.batch_size", f"{reason} Leave it out, or choose loader=neighbor loader.batch_size=..."
    drawn, unused = task.split_arguments, {*DATA, "fold"}
    off = ("folds", "column", "time", "scaffold", "file", "draws")
    unused -= {key for key in off if getattr(settings.split, key) in (None, False)}  # which is a choice too
    if drawn is None:  # the data set is a function that returns a task; its arguments may have other names
        dataset = settings.to_dict()["dataset"]
        drawn = tuple(key for key in (*DATA, "fold") if dataset.get(key, ...) == getattr(settings.split, key))
        unused = {key for key in unused if getattr(settings.split, key) not in flattened(dataset).values()}
    by = f"is split by {', '.join(f'split.{key}' for key in drawn)} alone" if drawn else "has a split of its own"
    advice = "Leave it out, or choose split.folds=null." if "folds" in drawn else "Leave it out."
    yield from ((f"split.{key}", f"{task.name} {by}. {advice}") for key in sorted(unused.difference(drawn)))
