"""Checkpoints that are written atomically and checked on load, and the comparison of weights with a model's."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..files import write_whole


class SafeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are never half written and never run code: a plugin for `Trainer(plugins=[...])`.

    Raises ValueError if a file is truncated, is not a checkpoint of a training, or would run code on load.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a temporary file beside `path`, then rename it to `path`."""

        def write(beside: Path) -> None:
            with beside.open("wb") as file:  # given a path, torch does not report why it cannot write
                torch.save(checkpoint, file)

        write_whole(path, write)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read tensors and plain values only, on the CPU, even if the caller's arguments allow more."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no checkpoint {path}. Give the path of one, or leave out ckpt_path.")
        try:
            checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the bytes of a broken file lead to
            refused = re.search(r"GLOBAL ([\w.]+)", str(error))
            if refused is not None and isinstance(error, pickle.UnpicklingError):
                raise ValueError(
                    f"{path} would run code on load: it needs {refused[1]}. No code was run. Expected tensors and "
                    "plain values, as this package's runs write them. Do not trust the file."
                ) from error
            raise ValueError(
                f"{path} cannot be read: it is truncated or not a checkpoint. Use an older copy, or start again "
                "without ckpt_path."
            ) from error
        if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "optimizer_states"} <= checkpoint.keys():
            raise ValueError(f"{path} is not a checkpoint of a training: expected the last.ckpt of a run.")
        return checkpoint


def differing(model: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """Return a sentence on the first difference in name, shape or type between two state dicts, or "".

    Floating-point tensors may differ in precision, except for 8-bit types.

    >>> from torch import nn
    >>> differing(nn.Linear(2, 7).state_dict(), nn.Linear(2, 3).state_dict())
    'weight has shape (7, 2) in the model and (3, 2) in the file'
    """
    for key, value in model.items():
        if key not in saved:
            return f"{key} {tuple(value.shape)} of the model is not in the file"
        if is_lazy(value):  # will have the shape in the file
            continue
        if value.shape != saved[key].shape:
            return f"{key} has shape {tuple(value.shape)} in the model and {tuple(saved[key].shape)} in the file"
        if _kind(value) != _kind(saved[key]):
            return f"{key} is {value.dtype} in the model and {saved[key].dtype} in the file"
    for key in saved:
        if key not in model:
            return f"{key} {tuple(saved[key].shape)} of the file is not in the model"
    return ""


def _kind(value: Tensor) -> str:
    if value.is_floating_point() and value.element_size() > 1:
        return "float"
    odd = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return str(value.dtype) if odd else "integer"
