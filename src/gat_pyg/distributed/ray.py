"""Training in processes that Ray starts, on one machine or several, and the strategy for Lightning."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRATEGY = "ray"  # the value of trainer.strategy


def train(
    work: Callable[[dict[str, Any]], Any], arguments: dict[str, Any], processes: int, gpu: bool, folder: Path
) -> Any:
    """Call `work(arguments)` in processes that Ray starts, each with a CPU or a GPU, and return the first one's result.

    Meanwhile Ray stores its state in `folder`, which must have the same path on all machines.

    Raises ValueError if Ray is not installed, or if `work` raised one, with its message.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # otherwise everything is printed twice
    try:
        from ray.train import RunConfig, ScalingConfig, WorkerGroupError
        from ray.train.torch import TorchTrainer
    except ModuleNotFoundError as error:
        raise ValueError(
            'trainer=ray needs a package that is not installed. Run: python -m pip install "ray[default,train]". '
            "Or use trainer=ddp, which needs none."
        ) from error
    storage = folder / ".ray"
    try:
        return (
            TorchTrainer(
                work,
                train_loop_config=arguments,
                scaling_config=ScalingConfig(num_workers=processes, use_gpu=gpu),
                run_config=RunConfig(storage_path=str(storage), name="train"),
            )
            .fit()
            .return_value
        )
    except WorkerGroupError as error:
        failures = (failure for _, failure in sorted(error.worker_failures.items()))
        first = next((failure for failure in failures if isinstance(failure, ValueError)), None)
        if first is None:
            raise
        raise ValueError(str(first)) from error
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def ray_strategy() -> tuple[Any, list[Any]]:
    """Return the strategy and the plugins of a Lightning trainer in a process that Ray started."""
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    return RayDDPStrategy(), [RayLightningEnvironment()]
