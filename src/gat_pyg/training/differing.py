"""The first difference between two state dicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


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
