"""Graph Attention Networks (Veličković et al., ICLR 2018) for PyTorch Geometric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import load as load

_LAZY = {"load": "results"}  # public name -> the file that defines it, read when the name is first used


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
