"""Graph Attention Networks (Veličković et al., ICLR 2018) for PyTorch Geometric."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data as data
    from . import report as report
    from . import seeds as seeds
    from .attention import Additive as Additive
    from .attention import Dot as Dot
    from .attention import GATv2 as GATv2
    from .attention import attend as attend
    from .command.doctor import doctor as doctor
    from .conv import GATConv as GATConv
    from .conv import GATv2Conv as GATv2Conv
    from .conv import TransformerConv as TransformerConv
    from .conv import accelerate as accelerate
    from .conv import from_dgl as from_dgl
    from .conv import restore as restore
    from .graph.edges import Edges as Edges
    from .models import GAT as GAT
    from .models import attention_of as attention_of
    from .report.write import write_report as write_report
    from .sweeps.ranking import best as best
    from .trained.evaluate import evaluate as evaluate
    from .trained.explain import explain as explain
    from .trained.export import export as export
    from .trained.load import load as load
    from .trained.predict import predict as predict
    from .trained.uncertainty import calibration as calibration
    from .training import Inductive as Inductive
    from .training import Optimisation as Optimisation
    from .training import PaperStopping as PaperStopping
    from .training import TaskData as TaskData
    from .training import Transductive as Transductive

    __version__: str

# Public name -> the module that defines it, imported on first use: importing torch takes a second, Lightning some more,
# and the command must set how torch's threads wait before torch is imported.
PUBLIC = {
    **dict.fromkeys(("Additive", "Dot", "GATv2", "attend"), "attention"),
    **dict.fromkeys(("GATConv", "GATv2Conv", "TransformerConv", "accelerate", "from_dgl", "restore"), "conv"),
    **dict.fromkeys(("GAT", "attention_of"), "models"),
    **dict.fromkeys(("Inductive", "Optimisation", "PaperStopping", "TaskData", "Transductive"), "training"),
    **{name: name for name in ("data", "report", "seeds")},
    **{name: f"trained.{name}" for name in ("evaluate", "explain", "export", "load", "predict")},
    "Edges": "graph.edges",
    "best": "sweeps.ranking",
    "calibration": "trained.uncertainty",
    "doctor": "command.doctor",
    "write_report": "report.write",
}
# Verb of the command -> the public function that it calls; `command/verbs.py` has what it prints, if not the result
VERBS = {
    **{name: name for name in ("predict", "evaluate", "explain", "export", "best", "doctor")},
    "report": "write_report",
}


def _imported(name: str) -> Any:
    if name == "__version__":
        try:
            return version("gat_pyg")
        except PackageNotFoundError as error:
            raise AttributeError("gat_pyg is not installed, so it has no version. Run `pip install .`") from error
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = import_module(f".{PUBLIC[name]}", __name__)
    return file if name == PUBLIC[name] else getattr(file, name)


if not TYPE_CHECKING:  # to a type checker, every wrong name would be one of this package
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *PUBLIC, "__version__"})
