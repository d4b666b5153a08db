"""The layers of a model: their arguments, and the layers that read more than the neighbours of a node."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn.norm import LayerNorm


def arguments(module: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a module's forward."""
    return frozenset(inspect.signature(module.forward).parameters)


def accepts_size(layer: nn.Module) -> bool:
    """Return True if a layer's `size` may declare fewer dst than x has rows, as in `GATConv`."""
    return bool(getattr(layer, "accepts_size", False))


def is_reversed(layer: nn.Module) -> bool:
    """Return True if a layer sends messages from dst to src."""
    return getattr(layer, "flow", "source_to_target") == "target_to_source"


def graph_norms(model: nn.Module) -> list[str]:
    """Return the classes of the norms over all nodes of a graph, such as `GraphNorm` and PyG's default `LayerNorm`.

    Subclasses of PyG's norms count too, and so do other classes in `model.norms` whose forward takes `batch`, the graph
    of each node.

    >>> from torch_geometric.nn import BatchNorm, GraphNorm
    >>> graph_norms(nn.ModuleList([GraphNorm(8), LayerNorm(8), LayerNorm(8, mode="node"), BatchNorm(8)]))
    ['GraphNorm', 'LayerNorm']
    """
    listed, of_pyg = {*getattr(model, "norms", ())}, "torch_geometric.nn.norm."
    norms = [m for m in model.modules() if m in listed or any(c.__module__.startswith(of_pyg) for c in type(m).__mro__)]
    over_graphs = [m for m in norms if "batch" in arguments(m)]
    return [type(m).__name__ for m in over_graphs if not (isinstance(m, LayerNorm) and m.mode == "node")]


def mixes_nodes(model: nn.Module) -> bool:
    """Return True if a norm may read more than one node, as batch norms do in training.

    So may every class in `model.norms` that is neither torch's nor PyG's.
    """
    parts = [m for norm in getattr(model, "norms", ()) for m in norm.modules()]
    unknown = any(not type(m).__module__.startswith(("torch.", "torch_geometric.")) for m in parts)
    return unknown or bool(graph_norms(model)) or any(isinstance(m, _BatchNorm) for m in model.modules())
