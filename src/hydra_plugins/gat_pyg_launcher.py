"""The Hydra launcher `stacked`: the jobs of a multirun that differ only in numbers are trained as one model.

Every command of Hydra imports this file as it starts, so it imports neither torch nor gat_pyg.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus


class StackedLauncher(BasicLauncher):
    """Hydra's basic launcher, which composes and checks all jobs of a batch before it trains them together.

    It is for the command `gat-pyg -m`. Each job's value, folder and result lines are those of its own run. A job that
    fails does not stop the others.
    """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Train the jobs of a batch, and return the score or the error of each."""
        from gat_pyg.sweeps.job import execute_all, request

        train, self.task_function = self.task_function, request
        try:
            jobs = super().launch(job_overrides, initial_job_idx)
        finally:
            self.task_function = train
        checked = [job for job in jobs if job.status == JobStatus.COMPLETED]
        for job, value in zip(checked, execute_all([job.return_value for job in checked]), strict=True):
            job.return_value = value
            job.status = JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED
        return jobs


ConfigStore.instance().store(
    group="hydra/launcher",
    name="stacked",
    node={"_target_": f"{StackedLauncher.__module__}.{StackedLauncher.__qualname__}"},
    provider="gat_pyg",
)
