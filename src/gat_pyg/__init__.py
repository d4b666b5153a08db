"""Graph Attention Networks (Veličković et al., ICLR 2018) for PyTorch Geometric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .attention import attend as attend
from .conv import GATConv as GATConv
from .conv import GATv2Conv as GATv2Conv
from .models import GAT as GAT
from .models import attention_of as attention_of

if TYPE_CHECKING:
    from . import report as report
    from .results import load as load
    from .training import Inductive as Inductive
    from .training import PaperStopping as PaperStopping
    from .training import Transductive as Transductive

# Public name -> the file that defines it, read when the name is first used: Lightning alone takes seconds to import.
_LAZY = {
    "load": "results",
    "report": "report",
    "Inductive": "training",
    "PaperStopping": "training",
    "Transductive": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = import_module(f".{_LAZY[name]}", __name__)
    return file if name == _LAZY[name] else getattr(file, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
