"""Processes of one machine that share the seeds which are trained one by one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, spawn

from ..settings.errors import message
from ..terminal import print_message
from ..training.progress import quiet
from ..training.signals import handled
from .build import build_trainer
from .folder import Job, drop_empty
from .process import exit_on_signal, keep_memory
from .result import RESULT
from .sequential import one_run
from .task import build_task

PAUSE = 0.2  # seconds between two looks at the results


class Processes:
    """The processes that train the unfinished seeds of a job, each the next one that no other process has."""

    def __init__(self, context: ProcessContext, indices: Any, seeds: Sequence[int]) -> None:
        self.context, self.indices, self.seeds = context, indices, seeds

    def wait(self, folder: Path) -> None:
        """Wait until the result in a seed's folder is written, or all processes have ended.

        Raises:
            ValueError: if one of them failed or was killed; the others then write their checkpoints and end.
        """
        try:
            while not (folder / RESULT).is_file() and not self.context.join(timeout=PAUSE):
                pass
        except ProcessExitedException as error:
            seed = self.seeds[min(max(self.indices[error.error_index], 0), len(self.seeds) - 1)]
            how = f"was killed by {error.signal_name}" if error.signal_name else "failed, as printed above"
            raise ValueError(
                f"The process that trained seed {seed} {how}. The same command with ckpt_path=last continues all seeds "
                "from their last checkpoints."
            ) from error


@contextmanager
def seed_processes(job: Job) -> Iterator[Processes | None]:
    """Context manager: start `processes` processes that train the unfinished seeds; None if one process trains all.

    Each has its share of the threads. The block ends when they have ended; after an error they are stopped before.

    Raises:
        ValueError: if the trainer has several processes, which train one seed together.
    """
    seeds, settings = job.unfinished, job.settings
    size = min(settings.processes, len(seeds))
    if size < 2:
        yield None
        return
    if (world := build_trainer(settings.trainer, settings.logger, job.folder).world_size) > 1:
        raise ValueError(
            f"processes is {settings.processes}, which train one seed each, but the trainer has {world} devices, which "
            "train a seed together. Use processes=1 or trainer.devices=1."
        )
    indices = get_context("spawn").Array("q", [-1] * size)  # the index of each process's seed, in ascending order
    context = spawn(_process, (indices, seeds, job._replace(pruner=None), os.getpid()), nprocs=size, join=False)
    try:
        yield Processes(context, indices, seeds)
        while not context.join():
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
        for process in context.processes:  # which may still write a checkpoint, while this process has the lock
            process.join()


def _process(rank: int, indices: Any, seeds: Sequence[int], job: Job, parent: int) -> None:
    """Train one seed after the other; on an error, print it and exit with status 1."""
    torch.set_num_threads(max(1, torch.get_num_threads() // len(indices)))
    keep_memory()
    with job.child(rank, parent), handled(exit_on_signal), quiet():
        task = build_task(job.settings)
        while (index := _next(rank, indices)) < len(seeds):
            run_dir = job.run_folder(seeds[index])
            try:
                if not (run_dir / RESULT).is_file():
                    one_run(job.settings, task, seeds[index], run_dir)
            except Exception as error:
                reason = message(error) or traceback.format_exc()
                print_message(f"seed {seeds[index]} failed: {reason}")
                sys.exit(1)
            finally:
                drop_empty(run_dir)


def _next(rank: int, indices: Any) -> int:
    """Take the next seed."""
    with indices.get_lock():
        indices[rank] = max(indices) + 1
        return int(indices[rank])
