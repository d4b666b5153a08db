"""A job: one method on one data set, trained and tested with each of its seeds, one by one or all at once."""

from __future__ import annotations

import statistics
from pathlib import Path

from omegaconf import DictConfig

from ..distributed.ranks import is_first
from ..training.progress import quiet
from .alone import _resumable, one_run
from .build import build_task
from .folder import finished, from_here, remove_checkpoints, seed_folder
from .messages import averaged, line, summary, summary_of_all
from .process import _compiling_told
from .together import all_at_once


def all_runs(config: DictConfig, folder: Path) -> float:
    """Train and test with each seed, and tell what came out; the mean validation score.

    Raises ValueError if seeds diverged before any epoch could be kept, after the other seeds are done.
    """
    with _resumable(folder), quiet(), _compiling_told():
        task = build_task(config)
        together = all_at_once(config, task, folder)
        results, diverged = [], []
        for seed in range(config.seed, config.seed + config.runs):
            inner = seed_folder(folder, config, seed)
            result = finished(inner, config.results) or (None if together else one_run(config, task, seed, inner))
            if result is None:
                diverged.append(seed)
                continue
            results.append(result)
            if is_first():
                print(line(result) if together else summary(result, config, task), flush=True)
        if is_first() and len(results) > 1:
            mean = averaged(config, task, folder, [result.seed for result in results])
            print(summary_of_all(results, folder, mean), flush=True)
        if diverged:
            others = f" The results of the others are in {from_here(Path(config.results))}." if results else ""
            seeds = ", ".join(map(str, diverged))
            raise ValueError(
                f"{len(diverged)} of {config.runs} runs diverged (seed {seeds}): no epoch ended with a finite "
                f"validation loss and score. A smaller training.lr may help.{others}"
            )
        if is_first():
            remove_checkpoints(folder)
        return statistics.fmean(result.val for result in results)
