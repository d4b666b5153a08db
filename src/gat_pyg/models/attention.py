"""The attention coefficients of any model."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..graph.layers import arguments
from ..tasks.model import Inputs, evaluating


@torch.no_grad()
def attention_of(model: nn.Module, data: Data) -> list[tuple[Any, Tensor]]:
    """Return the attention coefficients of every layer of a model, ours or PyG's, without dropout.

    Args:
        model: any module whose layers take `return_attention_weights`; it is called as in `Transductive`.
        data: a graph, or several as a `Batch`, with `x`, `edge_index` and, if the layers read them, `edge_attr`.

    Returns:
        For each attention layer in order of execution, `(edge_index [2, E], alpha [E, H])`: the graph's edges in their
        order without self-loops, then the loops that the layer adds.

    Models around another one, such as `Readout`, `Encoded` and `LinkScores`, return the layers of the inner model.
    Every module keeps its mode.

    Raises:
        ValueError: if no layer takes `return_attention_weights`, or `data` is not a graph.

    Example:
        >>> from gat_pyg import GAT
        >>> data = Data(x=torch.randn(3, 16), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> [alpha.shape for _, alpha in attention_of(GAT(16, [8], 7, heads=[8, 1]), data)]
        [torch.Size([5, 8]), torch.Size([5, 1])]
    """
    results: list[tuple[Any, Tensor]] = []
    if not isinstance(data, Data):
        raise ValueError(
            f"data is a {type(data).__name__}, expected a graph: torch_geometric.data.Data(x=x, edge_index=edge_index)."
        )

    requested: list[bool] = []  # stack of open calls: did the model ask for weights?

    def request(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = inspect.signature(module.forward).bind(*args, **kwargs)
        requested.append(bool(call.arguments.get("return_attention_weights")))
        call.arguments["return_attention_weights"] = True
        return call.args, call.kwargs

    def collect(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        out, attention = output
        results.append(attention)
        return output if requested.pop() else out

    layers = attention_layers(model)
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} takes return_attention_weights: there is no attention.")
    handles = [layer.register_forward_pre_hook(request, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(collect, with_kwargs=True) for layer in layers]
    try:
        inputs = Inputs.of(model)
        if "edge_label_index" in inputs.names:  # no pair is decoded
            data = copy.copy(data)
            data.edge_label_index = data.edge_index[:, :0]
            features = data.get("edge_label_attr", data.edge_attr)
            data.edge_label_attr = None if features is None else features[:0]
        with evaluating(model):
            inputs.call(model, data)
    finally:
        for handle in handles:
            handle.remove()
    return results


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that take `return_attention_weights`, in the order of their definition.

    A module that contains such layers does not count, even if it has an argument of this name.
    """
    takers = [m for m in model.modules() if "return_attention_weights" in arguments(m)]
    return [m for m in takers if not any(inner in takers for inner in m.modules() if inner is not m)]
