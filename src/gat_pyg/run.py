"""The command: compose the settings, then one job in a folder of its own, or all those of a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

# Threads that wait for others leave their cores to those that work, rather than spin: beside other busy processes an
# epoch is several times faster, and torch's threads no longer take cores from the kernels'. OpenMP reads this when
# torch is imported; what the user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import sys
import traceback

from .data.own import name_of
from .distributed import ray
from .experiments.build import RAY, dataset_name
from .experiments.errors import _message
from .experiments.folder import drop_empty, run_folder
from .experiments.job import all_runs
from .experiments.process import end, keep_memory
from .experiments.settings import _check, _misused_group, config_folder
from .experiments.table import for_what_runs, table
from .training.signals import handled

FULL_ERROR = "GAT_PYG_FULL_ERROR"  # and what HYDRA_FULL_ERROR was before it was set here


def main() -> None:
    """The console script ``gat-pyg``: errors are printed as a message, and the exit status is 1.

    SIGINT (Ctrl-C) and SIGTERM end it with 128 + their number, in a training after the epoch and its checkpoint.
    """
    if "--version" in sys.argv[1:]:
        print(f"gat_pyg {get_object('gat_pyg.__version__')}")
        return
    sys.argv[1:] = for_what_runs(sys.argv[1:])
    given = os.environ.get("HYDRA_FULL_ERROR")
    os.environ.setdefault(FULL_ERROR, given or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on; here they are told in our own way
    keep_memory()
    try:
        with handled(end):
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)()
    except Exception as error:
        _exit(error, _misused_group(sys.argv[1:]) or _message(error))
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.pop("HYDRA_FULL_ERROR")
        if given is not None:
            os.environ["HYDRA_FULL_ERROR"] = given


def _job(config: DictConfig) -> float:
    """``job``, but an error of a single run exits here: Hydra would print the command's arguments before it."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job(config)
    try:
        return job(config)
    except Exception as error:
        _exit(error, _message(error))


def _exit(error: Exception, message: str | None) -> NoReturn:
    """Print the message, or the traceback where there is none or ``HYDRA_FULL_ERROR=1`` asks for it."""
    if message is None or os.environ[FULL_ERROR] == "1":
        traceback.print_exception(error)
    else:
        print(f"gat-pyg: {message}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
    sys.exit(1)


def run_name(_root_: DictConfig) -> str:
    """Return the part of a run folder's name that follows the time: the model, the data set, and how it attends.

    ``_root_`` is the composed configuration, with Hydra's own. The model is named as in ``conf/model``, or after its
    class where ``model._target_`` is replaced.
    """
    choices = _root_.hydra.runtime.choices
    overrides = (override.lstrip("+").partition("=") for override in _root_.hydra.overrides.task)
    values: dict[str, str] = {key: value for key, _, value in overrides}
    model = choices.model
    if target := values.get("model._target_"):
        package, *_, kind = target.split(".")
        model = name_of("pyg" if package == "torch_geometric" else "", kind)
    mechanism = values.get("model.mechanism._target_", values.get("model.mechanism", ""))
    words = [
        model,
        dataset_name(_root_.dataset),
        choices.loader if choices.loader != "full" else "",
        name_of(mechanism.rpartition(".")[2]),
        "reproduction" if values.get("model.reproduction", "false") != "false" else "",
    ]
    return "_".join(word for word in words if word)


OmegaConf.register_new_resolver("run_name", run_name, replace=True)  # of hydra.run.dir


def job(config: DictConfig) -> float:
    """All methods of a table, or one with the seeds ``seed``, ``seed + 1``, ...; its mean validation score."""
    own_folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        _check(config)
    except Exception:
        drop_empty(own_folder)
        if config.outputs is None:
            drop_empty(Path(str(config.outputs)))  # which Hydra made
        raise
    if config.methods is not None or config.datasets is not None:
        drop_empty(own_folder)
        return table(config)
    with run_folder(config) as folder:
        return by_ray(config, folder) if config.trainer.get("strategy") == RAY else all_runs(config, folder)


def by_ray(config: DictConfig, folder: Path) -> float:
    """The same in processes that Ray starts."""
    devices = config.trainer.devices
    if type(devices) is not int or devices < 1:
        raise ValueError(f"trainer.devices is {devices}, expected how many processes Ray is to start, at least 1.")
    given = {"config": OmegaConf.to_container(config, resolve=True), "folder": str(folder), "place": os.getcwd()}
    work = get_object("gat_pyg.run.ray_process")  # by a name that they can import, whatever this file is called here
    return float(ray.train(work, given, devices, config.trainer.accelerator == "gpu", folder))


def ray_process(given: Mapping[str, Any]) -> float:
    """One of the processes that Ray starts; an error that is told in words is a ValueError of these."""
    os.chdir(given["place"])
    keep_memory()
    cast(Any, rank_zero_only).rank = int(os.environ["RANK"])
    try:
        return all_runs(cast(DictConfig, OmegaConf.create(given["config"])), Path(given["folder"]))
    except Exception as error:
        if message := _message(error):
            raise ValueError(message) from None
        raise


if __name__ == "__main__":
    main()
