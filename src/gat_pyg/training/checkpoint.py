"""Checkpoints that are written atomically and checked on load."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

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
            raise ValueError(f"{path} {_BROKEN}") from error
        if not isinstance(checkpoint, dict) or not {"state_dict", "loops", "optimizer_states"} <= checkpoint.keys():
            raise ValueError(f"{path} is not a checkpoint of a training: expected the last.ckpt of a run.")
        return checkpoint


_BROKEN = "cannot be read: it is truncated or not a checkpoint. Use an older copy, or start again without ckpt_path."
