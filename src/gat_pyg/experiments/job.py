"""A job: a table, or one method on one data set with one or more seeds."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from ..distributed import ray
from ..distributed.ranks import is_first, rank_zero_print
from ..tasks.objective import Split
from ..tasks.task import Task
from ..training.modules import Inductive, Transductive
from ..training.progress import quiet
from ..training.signals import handled
from .alone import one_run
from .build import build_model, build_task
from .command import message, names_of
from .folder import (
    Invocation,
    Job,
    drop_empty,
    finished,
    has_progress,
    relative_path,
    remove_checkpoints,
    started_job,
)
from .messages import line, split_line, summary, summary_of_all
from .model_file import load
from .process import check_gpus, compiling_reported, exit_on_signal, keep_memory
from .published import as_published
from .settings import INTERNAL, Settings
from .shared import seed_processes
from .table import table
from .together import all_at_once
from .unused import check_effects


def execute(config: DictConfig) -> float:
    """Execute the job of a composed configuration, and return the score for a sweeper, or nan for several data sets.

    The score is the mean `Result.quality`: the validation score, negated if lower is better.

    On SIGINT or SIGTERM the process exits with status 128 + number.
    """
    keep_memory()
    with handled(exit_on_signal):
        invocation = Invocation.current()
        try:
            invocation.check()
            if internal := [name for name in INTERNAL if name in config]:
                raise ValueError(f"{internal[0]} is set by the command. Leave it out.")
            settings = Settings.parse(config)
            if not invocation.multirun:  # whose settings may be for other jobs
                settings = settings.replace(passed=names_of(invocation.overrides))
            if settings.trainer.get("strategy") is not None and invocation.multirun:
                raise ValueError("--multirun runs in a single process. Start runs of several processes without -m.")
            check_gpus(settings.trainer)
            settings.check_results()
        except Exception:
            invocation.drop_folder()
            raise
        if settings.is_table or settings.on_all_splits:
            drop_empty(invocation.folder)
            return table(settings, invocation, all_seeds)
        with started_job(settings, invocation) as job:
            return _by_ray(job) if settings.trainer.get("strategy") == ray.STRATEGY else all_seeds(job)


def all_seeds(job: Job) -> float:
    """Train and test with each seed, print the results, and return the mean `Result.quality`.

    Raises:
        ValueError: after all seeds, if one of them had no epoch with a finite validation loss and score.
    """
    settings, folder = job
    with _resumable(folder), quiet(), compiling_reported():
        task = build_task(settings)
        check_effects(settings, task)
        if settings.cell is None and (text := split_line(task, settings.split)):
            rank_zero_print(text)
        together = all_at_once(job, task)
        results, diverged, paper = [], [], as_published(settings)
        with nullcontext() if together else seed_processes(job) as processes:
            for seed in settings.seeds:
                run_dir = job.run_folder(seed)
                if processes is not None:
                    processes.wait(run_dir)
                result = finished(run_dir, settings.results)
                result = result or (None if together or processes else one_run(settings, task, seed, run_dir))
                if result is None:
                    diverged.append(seed)
                    continue
                results.append(result)
                if is_first():
                    short = together or settings.cell is not None
                    print(line(result) if short else summary(result, task, settings, paper), flush=True)
        if is_first() and len(results) > 1:
            mean = averaged(job, task, [result.seed for result in results])
            print(summary_of_all(results, folder, mean, paper), flush=True)
        if diverged:
            others = f" The results of the others are in {relative_path(Path(settings.results))}." if results else ""
            seeds = ", ".join(map(str, diverged))
            raise ValueError(
                f"{len(diverged)} of {settings.runs} runs diverged (seed {seeds}): no epoch ended with a finite "
                f"validation loss and score. A smaller training.lr may help.{others}"
            )
        if is_first():
            remove_checkpoints(folder)
        return statistics.fmean(result.quality for result in results)


@torch.no_grad()
def averaged(job: Job, task: Task, seeds: Sequence[int]) -> float:
    """Return the test score of the averaged prediction: the mean of `predict` over the models of `seeds`."""
    setup, objective = Inductive if task.has_many_graphs else Transductive, task.objective
    module = setup(build_model(job.settings.model, task).model, objective).eval()
    graphs = [objective.example(data, "test") for data in task.test]
    means: list[Any] = [0.0 for _ in graphs]
    for seed in seeds:
        load(job.run_folder(seed), module.model)
        for index, data in enumerate(graphs):
            out, _ = module.labelled(module(data), data, "test")
            means[index] = means[index] + objective.predictions(out.double()) / len(seeds)
    split: Split | None = None if task.has_many_graphs else "test"
    parts = [
        objective.statistics(objective.outputs(mean), objective.labels(data, split))
        for mean, data in zip(means, graphs, strict=True)
    ]
    return objective.score(objective.pool(parts))


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Context manager: if the job is interrupted, print how to resume it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Lightning raises the second for the first
        children = active_children()  # processes of other devices, which write their checkpoints before they exit
        for process in children:
            process.terminate()
        for process in children:
            process.join()
        effect = "finishes it" if has_progress(folder) else "starts it again, since no epoch was finished"
        rank_zero_print(f"\nStopped in {relative_path(folder)}. The same command with ckpt_path=last {effect}.")
        raise


# Ray ----------------------------------------------------------------------------------------------------------------


def _by_ray(job: Job) -> float:
    """Train with each seed in processes that Ray starts."""
    trainer = job.settings.trainer
    devices = trainer.get("devices")
    if type(devices) is not int or devices < 1:
        raise ValueError(f"trainer.devices is {devices}, expected the number of processes for Ray, at least 1.")
    arguments = {"job": job, "directory": os.getcwd()}
    return float(ray.train(_ray_process, arguments, devices, trainer.get("accelerator") == "gpu", job.folder))


def _ray_process(arguments: Mapping[str, Any]) -> float:
    """Train in one of the processes that Ray starts; raise ValueError for every error that has a message."""
    os.chdir(arguments["directory"])
    sys.path.append(arguments["directory"])
    keep_memory()
    cast(Any, rank_zero_only).rank = int(os.environ["RANK"])
    try:
        return all_seeds(arguments["job"])
    except Exception as error:
        if text := message(error):
            raise ValueError(text) from None
        raise
