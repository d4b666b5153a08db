"""The norms of a model that read more than one node, and so need all nodes of a graph."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn.norm import LayerNorm


def takes_batch(norm: nn.Module) -> bool:
    """Return True if the norm's forward takes `batch`, the graph of each node."""
    return "batch" in inspect.signature(norm.forward).parameters


def graph_norms(model: nn.Module) -> list[str]:
    """Return the classes of the norms over all nodes of a graph, such as `GraphNorm` and PyG's default `LayerNorm`.

    >>> from torch_geometric.nn import BatchNorm, GraphNorm
    >>> graph_norms(nn.ModuleList([GraphNorm(8), LayerNorm(8), LayerNorm(8, mode="node"), BatchNorm(8)]))
    ['GraphNorm', 'LayerNorm']
    """
    norms = [m for m in model.modules() if type(m).__module__.startswith("torch_geometric.nn.norm.") and takes_batch(m)]
    return [type(m).__name__ for m in norms if not (isinstance(m, LayerNorm) and m.mode == "node")]


def mixes_nodes(model: nn.Module) -> bool:
    """Return True if a norm of the model reads more than one node: in training, batch norms do too."""
    return bool(graph_norms(model)) or any(isinstance(m, _BatchNorm) for m in model.modules())
