"""The scores of a trained run: those of its test again, and those on other data with labels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data.content_hash import content_of
from ..data.links import with_other_pairs
from ..runs.build import build_data, build_module, build_trainer
from ..runs.process import deterministic, elements, suited_threads
from ..runs.result import CHECKPOINT, result_in
from ..runs.task import settings_of
from ..settings.factory import Factory
from ..settings.settings import Settings
from ..tasks.links import LinkLabels
from ..tasks.metrics import metric_named
from ..tasks.objective import Objective, Split, any_known
from ..tasks.task import Task
from ..training.progress import quiet
from .load import Predictor
from .top_links import check_top_k, recall
from .trained import Seed, Trained, labels_of
from .uncertainty import Rows, calibration_of

ONE_PROCESS: dict[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto"}


class Evaluation(NamedTuple):
    """The scores of a run, or of the runs of several seeds, by the names of their metrics."""

    scores: Mapping[int, dict[str, float]]  # of each seed; the first score is the run's metric
    averaged: dict[str, float]  # of the prediction averaged over the seeds
    recorded: Mapping[int, float]  # the recorded test score of each seed, if it is repeated
    names: Sequence[str] | None = None  # of the classes, labels or targets
    column: str = "target"  # "class" or "label" if the names are of these
    uncertainty: str = ""  # calibration error, and coverage and size of prediction sets or intervals

    def __str__(self) -> str:
        lines = {f"seed {seed}": self._text(scores, self.recorded.get(seed)) for seed, scores in self.scores.items()}
        if len(lines) > 1:
            name = next(iter(self.averaged))
            values = [scores[name] for scores in self.scores.values()]
            lines["mean"] = metric_named(name, self.names, self.column).text(*values)
            lines["averaged"] = self._text(self.averaged)
        if self.uncertainty:
            lines["uncertainty"] = self.uncertainty
        return "\n".join(f"{line:<12}{text}" for line, text in lines.items())

    def _text(self, scores: Mapping[str, float], recorded: float | None = None) -> str:
        first, *others = (metric_named(name, self.names, self.column).text(score) for name, score in scores.items())
        value = next(iter(scores.values()))
        beside = "as recorded" if value == recorded else f"{value}, but {recorded} was recorded"
        return ", ".join([f"{first} ({beside})" if recorded is not None else first, *others])


def evaluate(
    run_dir: str | Path,
    data: Any = None,
    *,
    seed: Seed = None,
    top_k: int | None = None,
    level: float | None = None,
    trust: bool = False,
) -> Evaluation:
    """Return the scores of a trained run on its test again, or on other data with labels.

    Without `data`, they are computed as at the end of the training: the first score of each seed is the recorded one,
    to the digit. Otherwise they are those of all rows of the data with a label. The first score is that of the run's
    metric; the other metrics that fit the labels follow, where they are defined.

    Files with the content of those that the run was trained on are warned of: most of their rows trained it.

    Links in `data` may come without labels, as later purchases in a table. Then as many pairs that are not links are
    drawn, the same in every call, and links that the run's own data have are left out.

    Args:
        run_dir: the folder of a run, or of the runs of several seeds.
        data: data with labels, in a form that `gat_pyg.predict` takes.
        seed: seed of the model to evaluate, if the run has several.
        top_k: of links, add recall@k to the scores: the share of a node's links that are among its `top_k` most
            probable ones, the mean over the nodes with a link. Left out are links of the training and the validation,
            or with `data` all of the run's own data.
        level: add the coverage of prediction sets or intervals of this level, 0.01, 0.02, ... or 0.99, on the same
            rows, and the calibration error; those of `calibration`.
        trust: as in `gat_pyg.predict`.

    Raises:
        FileNotFoundError, ValueError: as `gat_pyg.predict`, or if no label of the data is known.

    >>> evaluate("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    trained = Trained.open(run_dir, seed, trust=trust)
    objective = trained.objective
    if top_k is not None:
        check_top_k(trained, top_k)
    folders = {
        _seed_of(trained, place) if number is None else number: place for number, place in trained.folders.items()
    }
    if data is None:
        task = trained.task
        objective, graphs = task.objective, task.test
        tested = [
            outputs_of(settings_of(place, trust), task, model, number, place)
            for (number, place), model in zip(folders.items(), trained.models, strict=True)
        ]
        results = {number: result_in(place) for number, place in folders.items()}
        recorded = {number: result.value for number, result in results.items() if result is not None}
    else:
        _warn_of_training_rows(trained, data)
        graphs, recorded = _read(trained, data), {}
        tested = _labelled(trained, graphs)
    scores = {number: _scores(objective, *rows) for number, rows in zip(folders, tested, strict=True)}
    predictions = torch.stack([objective.predictions(out.double()) for out, _ in tested]).mean(0)
    averaged = _scores(objective, objective.outputs(predictions), tested[0][1])
    if top_k is not None:
        name = f"recall@{top_k}"
        for model, its in zip(trained.models, scores.values(), strict=True):
            alone = replace(trained, predictor=Predictor([model], objective))
            its[name] = averaged[name] = _recall(alone, graphs[0], top_k)
        if len(scores) > 1:
            averaged[name] = _recall(trained, graphs[0], top_k)
    text = ""
    if level is not None:
        run = calibration_of(trained)
        rows = Rows(predictions, tested[0][1])
        text = run.text(level) if data is None else replace(run, caveat="").measured_on(rows).text(level, "labels")
    return Evaluation(scores, averaged, recorded, trained.preparation.class_names, objective.column, text)


def _seed_of(trained: Trained, folder: Path) -> int:
    """Return the seed of a run, which may not be finished; 0 of a model alone."""
    if (result := result_in(folder)) is not None:
        return result.seed
    return trained.settings.seed if (folder / CHECKPOINT).is_file() else 0


def outputs_of(
    settings: Settings, task: Task, model: nn.Module, seed: int, folder: Path, split: Split = "test"
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the rows of the test or the validation, computed as by the run, and their labels."""
    module, training, rows = build_module(settings, task, model), settings.training, []
    labelled = module.labelled

    def kept(*arguments: Any) -> tuple[Tensor, Tensor]:
        rows.append(labelled(*arguments))
        return rows[-1]

    vars(module)["labelled"] = kept
    with quiet(), deterministic(), suited_threads(elements(task, training.batch_size, [model])):
        trainer = build_trainer(settings.trainer, Factory("logger", {}), folder, **ONE_PROCESS)
        data = build_data(settings.loader, training, task, model, trainer, seed)
        (trainer.test if split == "test" else trainer.validate)(module, datamodule=data, verbose=False)
    outs, labels = zip(*rows, strict=True)
    return torch.cat(outs).cpu(), torch.cat(labels).cpu()


def _warn_of_training_rows(trained: Trained, data: Any) -> None:
    """Warn if the files have the content of those that the run was trained on."""
    own, passed = (
        {content_of({"_target_": "gat_pyg.data.from_file", "path": str(path)}) for path in _paths(tables)}
        for tables in ([trained.source.get(key) for key in ("nodes", "edges", "path")], data)
    )
    if passed and passed <= own - {None}:
        warnings.warn(
            "The data are the files that the run was trained on, so most of these rows trained it, and the scores are "
            f"too good. Those of its test alone: gat-pyg evaluate {trained.folder}",
            stacklevel=3,
        )


def _paths(tables: Any) -> Iterator[str | Path]:
    """Yield the paths in nested tables."""
    if isinstance(tables, (str, Path)):
        yield tables
    elif isinstance(tables, (list, tuple)):
        for table in tables:
            yield from _paths(table)


def _read(trained: Trained, data: Any) -> list[Data]:
    """Return the graphs of data, of links with other pairs if there are none."""
    graphs, objective = trained.read(data).graphs, trained.objective
    if isinstance(objective, LinkLabels):
        are_links = [graph.get("edge_label_index") is not None and _labels(graph) is None for graph in graphs]
        graphs = [
            with_other_pairs(graph, "data", objective.negatives) if is_of_links else graph
            for graph, is_of_links in zip(graphs, are_links, strict=True)
        ]
    return graphs


def _labels(graph: Data) -> Any:
    return graph.get("edge_label", graph.get("y"))


def _recall(trained: Trained, graph: Data, k: int) -> float:
    """Return recall@k of the links of a graph: those of the test if it has one, else all among its pairs."""
    pairs, known = graph.edge_label_index, _labels(graph) == 1
    is_searched = graph.get("test_mask", torch.ones_like(known)) & known
    left_out = torch.cat([graph.edge_index, pairs[:, known & ~is_searched]], 1)
    return round(recall(trained, graph, left_out, pairs[:, is_searched], k), 5)


def _labelled(trained: Trained, graphs: Sequence[Data]) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of each model for the rows with a label, and these."""
    objective = trained.objective
    labels = [labels_of(graph, objective) for graph in graphs]
    if not any(y is not None and bool(any_known(y).any()) for y in labels):
        raise ValueError(f"No label of the {objective.item}s is known, expected some to compare the predictions with.")
    known = [(graph, y) for graph, y in zip(graphs, labels, strict=True) if y is not None]
    y = torch.cat([y for _, y in known])
    with torch.no_grad():
        out = trained.outputs([graph for graph, _ in known] if len(known) > 1 else known[0][0], is_read=True)
    return [(each[any_known(y)], y[any_known(y)]) for each in out]


def _scores(objective: Objective, out: Tensor, y: Tensor) -> dict[str, float]:
    """Return the score of the objective's metric, then all others that are defined."""
    scores: dict[str, float] = {}
    is_of_labels, ranked = objective.column == "label", objective.metric.name if objective.by_rows else "roc_auc"
    same = {"micro_f1"} if "accuracy" in objective.measures else set()
    same |= {name for name in objective.measures if name.startswith("std_") and objective.out_channels == 1}
    for name in (objective.metric.name, *objective.measures):
        if name in scores or (scores and name in same):  # has been computed, or differs by a factor only
            continue
        scored = objective.scored_by(name)
        metrics = scored.metrics({"test": scored.pool([scored.statistics(out, y)])})
        scores[name] = metrics[f"test_{name}"]
        if not is_of_labels or name == ranked:  # which each label has
            scores |= {key.removeprefix("test_"): score for key, score in metrics.items() if key != "test_loss"}
    return {name: round(score, 5) for name, score in scores.items() if not math.isnan(score)}
