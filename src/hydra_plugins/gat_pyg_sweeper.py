"""The Hydra sweeper `study`: see `gat_pyg.sweeps.search`.

Every command of Hydra imports this file as it starts, so it imports neither torch nor Optuna.
"""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class StudySweeper(Sweeper):
    """Hydra's interface to `Search`, which has the arguments; `conf/groups/search.yaml` describes them."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep Hydra's objects, and create the launcher."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials of a study."""
        from gat_pyg.files import needs

        needs("optuna", "search")
        from gat_pyg.sweeps.search import Search

        assert self.config is not None  # by `setup`
        Search(**self.settings).run(arguments, self.config, self.hydra_context, self.launcher)
