"""A job: a table, or one method on one data set with one or more seeds."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig

from ..distributed.ranks import is_first, rank_zero_print
from ..runs.defaults_by_data import LARGE, suited
from ..runs.folder import (
    AT_ONCE,
    Invocation,
    Job,
    drop_empty,
    finished,
    has_progress,
    relative_path,
    remove_checkpoints,
    started_job,
)
from ..runs.network import initial_model
from ..runs.process import check_gpus, compiling_reported, exit_on_signal, keep_memory
from ..runs.pruning import PrunedError, Pruner
from ..runs.reference_scores import baselines_of
from ..runs.sequential import one_run
from ..runs.stacked import all_at_once, stack_key
from ..runs.task import data_key, read_task, with_loss
from ..runs.unused import check_effects
from ..runs.warm_start import warn_of_overlap, with_earlier_model
from ..seeds.member import grouped
from ..settings.overrides import check_recipe, names_of
from ..settings.settings import INTERNAL, Settings
from ..tasks.task import Task
from ..trained.load import load
from ..trained.uncertainty import Calibration, averaged, can_calibrate, of_task
from ..training.progress import quiet
from ..training.signals import handled
from .candidates import chosen
from .grid import fill_tables
from .messages import baselines_line, line, rare_line, split_line, summary, summary_of_all, titles

T = TypeVar("T")


class DivergedError(ValueError):
    """No epoch of a run ended with a finite validation loss and score."""


class Request(NamedTuple):
    """The checked settings of a job, and Hydra's part of it."""

    settings: Settings
    invocation: Invocation
    pruner: Pruner | None


def request(config: DictConfig) -> Request:
    """Check a composed configuration, before anything is written.

    Raises:
        ValueError: if a setting is wrong.
    """
    invocation = Invocation.current()
    try:
        invocation.check()
        if internal := [name for name in INTERNAL if name in config]:
            raise ValueError(f"{internal[0]} is set by the command. Leave it out.")
        settings = Settings.parse(config)
        if not settings.is_table:
            check_recipe(HydraConfig.get().runtime.choices)
        if not invocation.multirun:  # whose settings may be for other jobs
            settings = settings.replace(passed=names_of(invocation.overrides))
        if settings.trainer.get("strategy") is not None and invocation.multirun:
            raise ValueError("--multirun runs in a single process. Start runs of several processes without -m.")
        check_gpus(settings.trainer)
        settings.check_results()
        warn_of_overlap(settings)
        settings = suited(settings, invocation.overrides)
        if not invocation.multirun:
            settings = chosen(settings, invocation.overrides)
        settings = with_earlier_model(settings, names_of(invocation.overrides))
    except Exception:
        invocation.drop_folder()
        raise
    return Request(settings, invocation, Pruner.of(HydraConfig.get().job.num) if invocation.multirun else None)


def execute(config: DictConfig) -> float:
    """Execute the job of a composed configuration, and return the score for a sweeper, or nan for several data sets.

    The score is the mean `Result.quality`: the validation score, negated if lower is better.

    On SIGINT or SIGTERM the process exits with status 128 + number.
    """
    with handled(exit_on_signal):
        (score,) = execute_all([request(config)])
    return _raised(score)


def execute_all(requests: Sequence[Request]) -> list[float | Exception]:
    """Execute several jobs, in one training where `train` can; return the score of each as `execute`, or its error."""
    keep_memory()
    scores: dict[int, float | Exception] = {}
    with handled(exit_on_signal):
        todo, of_splits = [], {}
        for index, (settings, invocation, _) in enumerate(requests):
            if not settings.is_table and not settings.on_all_splits:
                todo.append(index)
                continue
            drop_empty(invocation.folder)
            if settings.is_table or settings.protocol is not None or settings.hash in of_splits:  # with other seeds
                (scores[index],) = fill_tables([(settings, invocation)], train)
            else:
                of_splits[settings.hash] = index
        jobs = [requests[index][:2] for index in of_splits.values()]
        scores |= zip(of_splits.values(), fill_tables(jobs, train), strict=True)
        while todo:
            batch = _distinct(todo, requests)
            scores |= zip(batch, _execute_batch([requests[index] for index in batch]), strict=True)
            todo = [index for index in todo if index not in scores]
    return [scores[index] for index in range(len(requests))]


def _distinct(indices: Sequence[int], requests: Sequence[Request]) -> list[int]:
    """Return the first `AT_ONCE` jobs; of those that resume one run, since they have the same settings, the first."""
    batch: dict[Any, int] = {}
    for index in indices:
        settings = requests[index].settings
        same = json.dumps(settings.to_dict(), default=str) if settings.ckpt_path == "last" else index
        batch.setdefault(same, index)
    return list(batch.values())[:AT_ONCE]


def _execute_batch(requests: Sequence[Request]) -> list[float | Exception]:
    """Execute jobs whose folders are locked at the same time."""
    with ExitStack() as every:
        contexts = [every.enter_context(ExitStack()) for _ in requests]
        started = [
            _caught(context.enter_context, started_job(settings, invocation))
            for context, (settings, invocation, _) in zip(contexts, requests, strict=True)
        ]
        overrides = [invocation.overrides for _, invocation, _ in requests]
        if len(requests) == 1 and requests[0].invocation.multirun:  # without those of all jobs
            overrides.append(tuple(text for text in overrides[0] if text in sys.argv))
        names = titles(overrides)[: len(requests)]
        jobs = [
            job._replace(title=name, pruner=pruner)
            for job, name, (*_, pruner) in zip(started, names, requests, strict=True)
            if isinstance(job, Job)
        ]
        trained = iter(train(jobs))
        scores = [next(trained) if isinstance(job, Job) else job for job in started]
        for context, score in zip(contexts, scores, strict=True):
            with suppress(Exception), context:  # which removes the folder of a job that did nothing
                _raised(score)
    return scores


def _caught(call: Callable[..., T], *arguments: Any) -> T | Exception:
    """Return what a call returns or raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def _raised(score: float | Exception) -> float:
    """Raise an error, or return a score."""
    if isinstance(score, Exception):
        raise score
    return score


def train(jobs: Sequence[Job]) -> list[float | Exception]:
    """Train and test every seed of each job, and print the results.

    Data are read once for all jobs on them. Of these, the jobs that differ only in `VARYING` are trained as one, if
    `all_at_once` can. An error of one job does not stop the others.

    Returns:
        For each job the mean `Result.quality`, or its error: a ValueError after all seeds, if one of them had no epoch
        with a finite validation loss and score.
    """
    scores: dict[Path, float | Exception] = {}
    with quiet(), compiling_reported():
        for on_data in grouped(jobs, lambda job: data_key(job.settings)):
            with _resumable(on_data):
                data = _caught(read_task, on_data[0].settings)
            for group in grouped(on_data, lambda job: stack_key(job.settings)):
                scores |= _train_group(group, data) if isinstance(data, Task) else {job.folder: data for job in group}
    return [scores[job.folder] for job in jobs]


def _train_group(jobs: Sequence[Job], data: Task) -> dict[Path, float | Exception]:
    """Train jobs of one shape; return their scores by their folders."""
    tasks = {job.folder: _caught(_task_of, job, data) for job in jobs}
    scores: dict[Path, float | Exception] = {
        folder: error for folder, error in tasks.items() if isinstance(error, Exception)
    }
    jobs = [job for job in jobs if job.folder not in scores]
    if jobs and jobs[0].settings.cell is None:
        alone = len(jobs) == jobs[0].settings.runs == 1  # the summary has them
        chosen = "" if alone else " ".join(jobs[0].settings.suited)
        for text in (*data.notes, split_line(data, jobs[0].settings.split), chosen and f"{data.name}: suited {chosen}"):
            if text:
                rank_zero_print(text)
        is_long = data.has_many_graphs and sum(graph.x.size(0) for graph in data.train) > LARGE
        if is_long and (computed := baselines_of(jobs[0].settings, data)) is not None:  # now, not only at the end
            text = baselines_line(computed.scores, data.objective.metric.name, jobs[0].settings)
            rank_zero_print(f"{data.name}: baselines {text}")
        if text := rare_line(with_loss(data, jobs[0].settings)):
            rank_zero_warn(text)
    with _resumable(jobs):
        together = _caught(all_at_once, jobs, data)
    for job in jobs:
        with _resumable([job]):
            if isinstance(together, Exception):
                scores[job.folder] = together
            else:
                scores[job.folder] = _caught(_end, job, tasks[job.folder], job in together)
    return scores


def _task_of(job: Job, data: Task) -> Task:
    """Return the task of a job; raise ValueError for settings without effect."""
    task = with_loss(data, job.settings)
    check_effects(job.settings, task)
    return task


def _end(job: Job, task: Task, together: bool) -> float:
    """Train the seeds one by one unless that was done together, print the results, and return the mean quality."""
    settings, folder = job.settings, job.folder
    pruner = [job.pruner] if job.pruner is not None and settings.runs == 1 else []
    results, diverged = [], []
    for seed in settings.seeds:
        run_dir = job.run_folder(seed)
        result = finished(run_dir, settings.results)
        result = result or (None if together else one_run(settings, task, seed, run_dir, *pruner))
        if result is None:
            diverged.append(seed)
            continue
        results.append(result)
        if is_first():
            short = together or job.title or settings.cell is not None
            print(line(result, task, job.title) if short else summary(result, task, settings), flush=True)
    if is_first() and len(results) > 1:
        score, calibration = _averaged(job, task, [result.seed for result in results])
        val = statistics.fmean(result.val for result in results)
        whole = replace(results[0], value=round(score, 5), val=val, scores=None, run_dir=str(folder))
        whole.save(folder)
        named = f"{job.title}: " if job.title else ""
        text = summary_of_all(results, whole, task, settings, calibration)
        print(f"{named}{text}", end="", flush=True)
    if job.pruner is not None and job.pruner.ended:
        raise PrunedError(f"The sweeper ended the training after epoch {job.pruner.ended}.")
    if diverged:
        others = f" The results of the others are in {relative_path(Path(settings.results))}." if results else ""
        seeds = ", ".join(map(str, diverged))
        raise DivergedError(
            f"{len(diverged)} of {settings.runs} runs diverged (seed {seeds}): no epoch ended with a finite "
            f"validation loss and score. A smaller training.lr may help.{others}"
        )
    if is_first():
        remove_checkpoints(folder)
    return statistics.fmean(result.quality for result in results)


def _averaged(job: Job, task: Task, seeds: Sequence[int]) -> tuple[float, Calibration | None]:
    """Return the test score of the prediction averaged over the models of `seeds`, and write its calibration."""
    model, objective = initial_model(job.settings, task, seeds[0]).model, task.objective
    models = (load(job.run_folder(seed), model) for seed in seeds)  # one at a time
    rows = averaged(models, task, job.settings.training.batch_size)
    predictions, labels = rows["test"]
    score = objective.score(objective.pool([objective.statistics(objective.outputs(predictions), labels)]))
    if not can_calibrate(objective):
        return score, None
    calibration = of_task(rows, task, job.settings)
    calibration.save(job.folder)
    return score, calibration


@contextmanager
def _resumable(jobs: Sequence[Job]) -> Iterator[None]:
    """Context manager: if the jobs are interrupted, print how to resume them."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Lightning raises the second for the first
        children = active_children()  # processes of other devices, which write their checkpoints before they exit
        for process in children:
            process.terminate()
        for process in children:
            process.join()
        folder, it = Path(os.path.commonpath([job.folder for job in jobs])), "it" if len(jobs) == 1 else "them"
        saved = any(has_progress(job.folder) for job in jobs)
        effect = f"finishes {it}" if saved else f"starts {it} again, since no epoch was finished"
        rank_zero_print(f"Stopped in {relative_path(folder)}. The same command with ckpt_path=last {effect}.")
        raise
