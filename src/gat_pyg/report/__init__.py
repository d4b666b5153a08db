"""Figures of attention, and tables that compare results with the paper.

>>> import gat_pyg
>>> gat_pyg.report.attention_figure.__module__
'gat_pyg.report.figures.nodes'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .figures.explained import explanation_figure as explanation_figure
    from .figures.graphs import graph_figure as graph_figure
    from .figures.nodes import attention_figure as attention_figure
    from .figures.nodes import neighbourhood_figure as neighbourhood_figure

# Public name -> the module that defines it, imported on first use: it needs torch, the command's --help does not.
_LAZY = {
    "attention_figure": "figures.nodes",
    "explanation_figure": "figures.explained",
    "graph_figure": "figures.graphs",
    "neighbourhood_figure": "figures.nodes",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_LAZY})
