"""Lines and summaries that the command prints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch_geometric.utils import is_undirected

from ..runs.folder import relative_path
from ..runs.reference_scores import OneHot, has_baselines, is_missing
from ..runs.result import ERRICA, Result, scores_of
from ..settings.hashing import flattened
from ..settings.options import Split
from ..settings.settings import Settings
from ..tasks.metrics import AVERAGE_PRECISION, ROC_AUC, Metric, metric_named
from ..tasks.negatives import sides_of
from ..tasks.objective import SPLITS
from ..tasks.task import Task
from ..terminal import BOLD, RED, styled
from ..trained.uncertainty import Calibration

STOPPED = {  # by training.criterion
    "both": "neither score nor loss improved",
    **dict.fromkeys(("accuracy", "strict"), "the score did not improve"),
    "loss": "the loss did not improve",
}
ENDS = ("src", "dst")
FEW = 30  # test rows below which a message calls their score uncertain
LARGE = 10_000_000  # edges, of more it takes seconds to find the directions


def summary(result: Result, task: Task, settings: Settings) -> str:
    """Return the result of a run in a few lines, with the paths of its files."""
    metric, peak = _metric(result.metric, task), ""
    if result.peak_mib is not None:
        peak = f", {result.peak_mib:,.0f} MiB"
    lines = {
        "data set": f"{result.dataset}: {sizes(task)}",
        "model": f"{result.method}, {result.parameters:,} parameters, seed {result.seed}",
        "suited": " ".join(settings.suited),
        "epochs": epochs(result, settings),
        "validation": metric.text(result.val),
        "test": f"{styled(metric.text(result.value), BOLD)}{_beside(result)}",
        "also": ", ".join(_metric(name, task).text(score) for name, score in (result.scores or {}).items()),
        "baselines": baselines_line(result.baselines, result.metric, settings),
        "warning": result.warning and styled(result.warning, RED),
        "try": advice(result, task, settings),
        "seconds": f"{result.seconds:.1f} ({_per_epoch(result)} per epoch, {result.device}{peak})",
        "files": relative_path(Path(result.run_dir)),
        "results": relative_path(Path(settings.results)),
    }
    return rows(lines)


def _metric(name: str, task: Task) -> Metric:
    return metric_named(name, task.class_names, task.objective.column)


def rows(lines: Mapping[str, str]) -> str:
    """Return a row for each text that is not empty, after its title."""
    return "".join(f"{key:<12}{value}\n" for key, value in lines.items() if value)


def baselines_line(scores: Mapping[str, float] | None, metric: str, settings: Settings) -> str:
    """Return the scores of the baselines, or how to install what computes them; "" if none is asked for."""
    if not has_baselines(settings):
        return ""
    if scores is None and is_missing():
        return "need scikit-learn: python -m pip install 'gat_pyg[baselines]'; or baselines=false"
    return ", ".join(f"{name} {metric_named(metric).value(score)}" for name, score in (scores or {}).items())


def advice(result: Result, task: Task, settings: Settings) -> str:
    """Return changes to try if a baseline is better than the run, else "".

    They are those that the data and the settings leave open, without those that validation has compared already.
    """
    if not result.below_baseline:
        return ""
    item, model, training = task.objective.item, settings.model, settings.training
    kind = str(model.target).rpartition(".")[2]
    x = task.features(task.train[0])
    early = 0 < result.best_epoch <= 5 < result.epochs - result.best_epoch
    late = result.epochs >= settings.max_epochs and result.best_epoch > 0.9 * result.epochs
    hints = {
        result.remedy: result.lacks_remedy(flattened(settings.to_dict())) and result.remedy not in settings.tried,
        f"training.lr={training.lr / 3:.1g} (the best epoch was {result.best_epoch})": early,
        f"training.max_epochs={2 * settings.max_epochs} (the last epochs were the best)": late,
        "training.batch_size=32": task.has_many_graphs and training.batch_size < 16 < len(task.train),
        "+model.encoder=64 (it embeds categories)": model.get("encoder") is None and bool(OneHot([x]).sizes),
        "edges in both directions (messages follow the edges, which have one)": _is_directed(task),
        "encoding=rwse": item == "graph" and settings.encoding.target is None,
        "+model.decoder=mlp": item == "link" and model.get("decoder") is None,
        "model=gin": item == "graph" and kind not in ("GIN", "GINE"),
    }
    fitting = [hint for hint, fits in hints.items() if fits]
    group = "node" if item == "edge" else item
    search = f"a search of 96 settings by gat-pyg -m search={group} with the settings of the data"
    return ", ".join(fitting or [f"training.lr={training.lr / 3:.1g}", f"training.lr={training.lr * 3:.1g}", search])


def _is_directed(task: Task) -> bool:
    """Return True if an edge of the first training graph has no reverse one."""
    edge_index = task.train[0].edge_index
    return edge_index.size(1) <= LARGE and not is_undirected(edge_index, num_nodes=task.train[0].x.size(0))


def epochs(result: Result, settings: Settings) -> str:
    """Return the number of epochs, the best one, and why it was the last; "" for a method without epochs."""
    return f"{result.epochs} (best {result.best_epoch}; {end_of(result, settings)})" if result.epochs else ""


def end_of(result: Result, settings: Settings) -> str:
    """Return the reason why a training ended."""
    training, limit = settings.training, settings.trainer.get("max_epochs")
    if limit not in (None, -1) and result.epochs >= limit:
        return f"reached max_epochs={limit}"
    if training.patience is None or result.epochs - result.best_epoch < training.patience:
        return "stopped: diverged"
    return f"stopped: {STOPPED[training.criterion]} for {training.patience}"


def sizes(task: Task) -> str:
    """Return the numbers of nodes and edges, what is predicted, and the sizes of the three splits."""
    splits = [task.graphs(split) for split in SPLITS]
    shared = task.shared_graph
    graphs = [data for split in splits for data in split] if shared is None else [shared]
    counts = [len(split) for split in splits] if shared is None else [len(task.labels(split)) for split in SPLITS]
    items, predicts = f"{'graph' if shared is None else task.objective.item}s", task.objective.predicts
    if len(graphs) > 1 and all(data.edge_index is graphs[0].edge_index for data in graphs):  # of a series
        items, predicts, graphs = "steps", f"{predicts} in {len(graphs):,} steps", graphs[:1]
    nodes, edges = sum(data.x.size(0) for data in graphs), sum(data.edge_index.size(1) for data in graphs)
    without = ""
    if task.objective.draws_pairs:  # half of the labelled pairs of validation and test are none
        others = [int((task.labels(split) == 0).sum()) for split in SPLITS]
        counts = [count - other for count, other in zip(counts, others, strict=True)]
        without = f" ({others[1]:,} / {others[2]:,} pairs without one){cold_ends(task)}"
    split = " / ".join(f"{count:,}" for count in counts)
    if task.objective.draws_pairs and shared is not None and (sides := sides_of(shared)) is not None:
        counts = [int((sides == side).sum()) for side in (0, 1)]
        predicts += f" between the {counts[0]:,} and {counts[1]:,} nodes of a bipartite graph"
    return f"{nodes:,} nodes, {edges:,} edges, {predicts}; {split} {items}{without}"


def cold_ends(task: Task) -> str:
    """Return a clause on the test's links that have an end without a training link, else ""."""
    data = task.test[0]
    known = torch.zeros(data.x.size(0), dtype=torch.bool)
    known[torch.cat([data.edge_index, data.edge_label_index[:, data.train_mask]], 1).flatten()] = True
    is_cold = ~known[data.edge_label_index[:, data.test_mask & (data.y == 1)]]  # [2, L]
    counts = zip(ENDS, is_cold.sum(1).tolist(), strict=True)
    ends = [f"{n:,} {(task.source or {}).get(end) or end}" for end, n in counts]
    share = is_cold.any(0).double().mean()
    text = f", {100 * share:.2g} % of the test's links with an end that has no training link ({' and '.join(ends)})"
    return text if share else ""


def split_line(task: Task, split: Split) -> str:
    """Return a line about a split that was drawn by default shares, else ""."""
    values = {key: getattr(split, key) for key in task.split_arguments or () if key != "seed"}
    unset = [key for key, value in values.items() if value is None or value is False]
    if not unset:
        return ""
    *_, counts = sizes(task).rpartition("; ")
    choices = ", ".join(f"split.{key}" for key in unset)
    by = "scaffolds" if split.scaffold else split.time or "their order"
    how = "at random with split.seed" if "seed" in (task.split_arguments or ()) else f"by {by}"
    tested = len(task.labels("test"))
    few = f". A score of {tested} test rows is very uncertain" if tested < FEW else ""
    return f"{task.name}: {counts} for training, validation and test, {how}; or choose {choices}{few}"


def titles(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each of several jobs the overrides that not all of them have.

    >>> titles([["dataset=cora", "training.lr=0.01"], ["dataset=cora", "++model.dropout=0.3"]])
    ['training.lr=0.01', 'model.dropout=0.3']
    """
    shared = set(overrides[0]).intersection(*overrides[1:])
    return [" ".join(text.lstrip("+") for text in own if text not in shared) for own in overrides]


def rare_line(task: Task) -> str:
    """Return advice for a loss without weights if some classes are rare among the training labels, else "".

    There is none with a score of the order of the predictions: weights raise the predictions of a rare class, but
    hardly change their order (`benchmarks/unbalanced.py`).
    """
    objective = task.objective
    rare = {} if objective.metric in (ROC_AUC, AVERAGE_PRECISION) else objective.rare(task.labels("train"))
    if not rare:
        return ""
    rarest, option = min(rare, key=lambda column: rare[column]), objective.loss_options[0]
    name = rarest if task.class_names is None else task.class_names[rarest]
    several = f"{len(rare)} of {objective.out_channels} {objective.columns} are rare: " if len(rare) > 1 else ""
    share = f"{several}{objective.column} {name} has {100 * rare[rarest]:.2g} % of the training {objective.item}s"
    return (
        f"{task.name}: {share}. loss.{option}=balanced, smaller weights or loss.focal=2 give rare {objective.columns} "
        f"more influence. Compare them by metric=macro_f1, which counts all {objective.columns} alike."
    )


def line(result: Result, task: Task, title: str = "") -> str:
    """Return the result of one seed of many in one line, after the title of its job."""
    metric = _metric(result.metric, task)
    val, test = metric.text(result.val), metric.text(result.value)
    warning = f"; {result.warning}" if result.warning else ""
    return (
        f"{title}{', ' * bool(title)}seed {result.seed}: {result.epochs} epochs, best {result.best_epoch}, "
        f"validation {val}, test {test}{warning}"
    )


def summary_of_all(
    results: Sequence[Result],
    whole: Result,
    task: Task,
    settings: Settings,
    calibration: Calibration | None = None,
) -> str:
    """Return a line with the mean ± std over the seeds and the score of their averaged prediction, and rows below.

    Args:
        results: the result of each seed.
        whole: that of their averaged prediction, which `gat_pyg.predict` returns, with the folder of them all.
        task, settings: of the runs.
        calibration: the calibration of the averaged prediction, if it can be calibrated.
    """
    metric, n = _metric(results[0].metric, task), len(results)
    scores = [result.value for result in results]
    averaged = f"averaged prediction {metric.value(whole.value)}"
    spread = f"{styled(metric.text(*scores), BOLD)}{_beside(results[0], averaged)}"
    seconds = statistics.fmean(result.seconds for result in results)
    last = sorted(result.epochs for result in results)
    span = f"{last[0]}" if last[0] == last[-1] else f"{last[0]} to {last[-1]}"
    ends = sorted({end_of(result, settings) for result in results})
    lines = {
        "epochs": f"{span} ({'; or '.join(ends)})" if last[-1] else "",
        "validation": metric.text(*(result.val for result in results)),
        "uncertainty": "" if calibration is None else calibration.text(),
        "baselines": baselines_line(results[0].baselines, results[0].metric, settings),
        "warning": whole.warning and styled(f"the averaged prediction is {whole.warning}", RED),
        "try": advice(whole, task, settings),
        "seconds": f"{seconds:.1f} a run" if seconds >= 0.05 else "less than 0.1 a run",
        "files": relative_path(Path(whole.run_dir)),
        "results": relative_path(Path(settings.results)),
    }
    return f"{results[0].dataset}, {n} runs: test {spread}\n{rows(lines)}"


def summary_of_splits(results: Sequence[Result]) -> str:
    """Return a line with the mean ± std of one configuration over splits and seeds, as the report shows it."""
    first, scores = results[0], [*scores_of(results).values()]
    spread = metric_named(first.metric).text(*scores)
    splits, seeds = ({getattr(result, key) for result in results} for key in ("split", "seed"))
    each = f"{', the mean of' if first.study == ERRICA else ' and'} {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    return f"{first.dataset}, {first.method}: test {spread} over {len(splits)} splits{each}"


def _beside(result: Result, *scores: str) -> str:
    """Return in brackets what a test score is to be compared with: other scores, and a constant prediction."""
    metric = metric_named(result.metric)
    is_empty = result.majority == 0 and result.item == "link"  # as every Hits@K of equal predictions
    if result.majority is not None and not result.near_constant and not is_empty:
        scores = (*scores, f"constant prediction {metric.value(result.majority)}")
    return f" ({', '.join(scores)})" if scores else ""


def _per_epoch(result: Result) -> str:
    seconds = result.seconds_per_epoch
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
