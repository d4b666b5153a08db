"""The kernels for a type of device, or the reason why there are none."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FILES = {"cpu": "cpu", "cuda": "gpu"}  # type of device -> the file of its kernels, in each folder that has kernels
REASONS: dict[str, str | None] = {}  # type of device -> the reason why it has no kernels
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@functools.cache
def load_kernels(folder: str, device: str) -> Any:
    """Import the kernels in a folder of the package, as "attention.additive" or "features", for a type of device."""
    return importlib.import_module(f"gat_pyg.{folder}.{FILES[device]}")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing_reason(device: str) -> str | None:
    """Return why a type of device has no kernels, or None if it has; looked up once."""
    if device not in REASONS:
        try:
            if device in FILES:
                importlib.import_module(f"gat_pyg.kernels.{FILES[device]}.rows")
                REASONS[device] = None
            else:
                REASONS[device] = f"there are kernels for {' and '.join(FILES)}, and x is on {device}"
        except ImportError as error:  # not installed, or not with this NumPy
            REASONS[device] = str(error)
            log.warning("backend='auto' is 'segment' on %s: %s", device, error)
    return REASONS[device]


def unsupported_reason(x: Tensor | None, *others: Tensor | None) -> str | None:
    """Return why the kernels do not support these operands, or None if they do."""
    assert x is not None
    dtypes = [x.dtype, *[operand.dtype for operand in others if operand is not None]]
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"an operand has dtype {dtype}, the kernels support {', '.join(map(str, DTYPES))}"
    if x.device.type == "cuda" and torch.float64 in dtypes:
        return "the CUDA kernels accumulate in float32 and do not support float64"
    reason: str | None = missing_reason(x.device.type)
    return reason


def has_gpu_kernels(tensor: Tensor) -> bool:
    """Return True if the kernels for a tensor's device are those for a GPU."""
    return FILES.get(tensor.device.type) == "gpu"


def result_dtype(*operands: Tensor | None) -> torch.dtype:
    """Return the widest dtype of the operands."""
    dtypes = dict.fromkeys(operand.dtype for operand in operands if operand is not None)
    return functools.reduce(torch.promote_types, dtypes)
