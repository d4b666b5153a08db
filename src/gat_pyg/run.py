"""The command `gat-pyg`: compose the settings, then train, test and record one job or a table of them."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig

from .experiments.command import config_folder, errors_as_messages, exit_with, message, without_recipes

# Threads that wait give up their cores instead of spinning: beside other busy processes an epoch is several times
# faster. OpenMP reads this when torch is imported, which `job` does first; a value that the user set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Run the console script `gat-pyg`: an error is printed as a message, and the exit status is 1.

    SIGINT (Ctrl-C) and SIGTERM end it with 128 + their number, in a training after the epoch and its checkpoint.
    """
    if "--version" in sys.argv[1:]:
        print(f"gat_pyg {get_object('gat_pyg.__version__')}")
        return
    sys.argv[1:] = without_recipes(sys.argv[1:])
    with errors_as_messages(sys.argv[1:]):
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)()


def job(config: DictConfig) -> float:
    """Train with the seeds `seed`, `seed + 1`, ..., or fill a table; return the mean validation score."""
    from .experiments.job import execute  # imports torch

    return execute(config)


def _job(config: DictConfig) -> float:
    """Run `job`, but exit here for an error of a single run: Hydra would print the command's arguments before it."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job(config)
    try:
        return job(config)
    except Exception as error:
        exit_with(error, message(error))


if __name__ == "__main__":
    main()
