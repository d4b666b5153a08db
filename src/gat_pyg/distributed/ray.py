"""Ray as what starts the processes, on one machine or on many, and what Lightning has to know of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def train(work: Callable[[dict[str, Any]], Any], given: dict[str, Any], processes: int, gpu: bool, folder: Path) -> Any:
    """Call `work(given)` in processes that Ray starts, each with a CPU or a GPU; what the first of them gives.

    Ray keeps its own notes in `folder` meanwhile, which all machines have to see under that name.

    Raises ValueError where Ray is not installed, or with the words of one that `work` raised.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # else everything is printed twice
    try:
        from ray.train import RunConfig, ScalingConfig, WorkerGroupError
        from ray.train.torch import TorchTrainer
    except ModuleNotFoundError as error:
        raise ValueError(
            'trainer=ray needs a package that is not installed. Run: python -m pip install "ray[default,train]". '
            "Or use trainer=ddp, which needs none."
        ) from error
    notes = folder / ".ray"
    try:
        return (
            TorchTrainer(
                work,
                train_loop_config=given,
                scaling_config=ScalingConfig(num_workers=processes, use_gpu=gpu),
                run_config=RunConfig(storage_path=str(notes), name="train"),
            )
            .fit()
            .return_value
        )
    except WorkerGroupError as error:
        ours = next((one for _, one in sorted(error.worker_failures.items()) if isinstance(one, ValueError)), None)
        if ours is None:
            raise
        raise ValueError(str(ours)) from error
    finally:
        shutil.rmtree(notes, ignore_errors=True)


def ray_strategy() -> tuple[Any, list[Any]]:
    """The strategy and the plugins of a Lightning trainer in such a process."""
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    return RayDDPStrategy(), [RayLightningEnvironment()]
