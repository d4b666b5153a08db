"""Figures and pages of attention, and tables that compare results with the paper.

>>> import gat_pyg
>>> gat_pyg.report.attention_figure.__module__
'gat_pyg.report.figures'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .curves import curves_figure as curves_figure
    from .explained import explanation_figure as explanation_figure
    from .figures import attention_figure as attention_figure
    from .figures import degree_figure as degree_figure
    from .figures import entropy_figure as entropy_figure
    from .figures import neighbourhood_figure as neighbourhood_figure
    from .graphs import graph_figure as graph_figure
    from .graphs import sheet_figure as sheet_figure
    from .page import attention_page as attention_page

# Public name -> the module that defines it, imported on first use: it needs torch, the command's --help does not.
_LAZY = {
    "attention_figure": "figures",
    "attention_page": "page",
    "curves_figure": "curves",
    "degree_figure": "figures",
    "entropy_figure": "figures",
    "explanation_figure": "explained",
    "graph_figure": "graphs",
    "neighbourhood_figure": "figures",
    "sheet_figure": "graphs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_LAZY})
