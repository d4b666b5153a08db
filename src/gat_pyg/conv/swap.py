"""Swap the attention layers of a built model for ours, in place, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gat_conv import GATConv as PygGATConv
from torch_geometric.nn.conv.gatv2_conv import GATv2Conv as PygGATv2Conv
from torch_geometric.nn.conv.transformer_conv import TransformerConv as PygTransformerConv
from torch_geometric.nn.dense.linear import Linear as PygLinear

from ..features.linear import Linear
from .base import AttentionConv
from .gat import GATConv
from .gatv2 import GATv2Conv
from .transformer import TransformerConv

LAYERS: dict[type, type] = {
    PygGATConv: GATConv,
    PygGATv2Conv: GATv2Conv,
    PygTransformerConv: TransformerConv,
}
# Attributes that depend on the class: from these PyG collects the arguments of `message` and of the other steps
OF_THE_CLASS = ("inspector", "fuse", "_user_args", "_fused_user_args", "_edge_user_args")


class Swapped(NamedTuple):
    """The layers of a model that were swapped, and those that were left alone, with the reason."""

    swapped: dict[str, str]  # class by the name of the layer in the model
    left: dict[str, str]  # reason by name

    def __repr__(self) -> str:
        layers = ", ".join(f"{name or 'the model'} ({kind})" for name, kind in self.swapped.items())
        lines = [f"{len(self.swapped)} swapped: {layers or 'there is no layer to swap'}"]
        for reason in dict.fromkeys(self.left.values()):
            names = ", ".join(name or "the model" for name, other in self.left.items() if other == reason)
            lines.append(f"left {names}: {reason}")
        return "\n".join(lines)


def accelerate(model: nn.Module) -> Swapped:
    """Swap every `GATConv`, `GATv2Conv` and `TransformerConv` of PyG in a model for ours, in place.

    The layers stay the same objects, only their class changes: parameters, buffers, hooks, names, device, dtype, mode
    and the optimizer's state stay. Outputs and gradients are equal up to rounding; attention dropout draws a different
    mask for the same seed. A compiled model is compiled again at its next call.

    Left alone are layers of other kinds, subclasses, and layers with a replaced method, with `decomposed_layers` above
    1, or with an aggregation other than the sum. Layers in a plain list or dictionary of
    Python are not part of the model, since PyTorch does not register them.

    Args:
        model: a module, or one layer.

    Returns:
        The names of the swapped layers with their class, and the names of the others with the reason.

    Raises:
        TypeError: if `model` is not a module.

    Cost: about a millisecond a layer.

    Example:
        >>> import torch_geometric.nn as pyg
        >>> model = pyg.GAT(16, 32, num_layers=2, out_channels=3, heads=4)
        >>> accelerate(model)
        2 swapped: convs.0 (GATConv), convs.1 (GATConv)
        >>> restore(model)
        2 swapped: convs.0 (GATConv), convs.1 (GATConv)
    """
    return _swapped(model, LAYERS)


def restore(model: nn.Module) -> Swapped:
    """Undo `accelerate`: the layers that it swapped are PyG's again, with the weights that they have now.

    A layer that uses an option that PyG's layer does not have, such as `edge_dropout`, is left alone.

    Args:
        model: a module, or one layer.

    Returns:
        The swapped layers and the others, as in `accelerate`.

    Raises:
        TypeError: if `model` is not a module.
    """
    return _swapped(model, {ours: theirs for theirs, ours in LAYERS.items()})


def _swapped(model: nn.Module, classes: dict[type, type]) -> Swapped:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}, expected a torch.nn.Module.")
    result = Swapped({}, {})
    for name, layer in model.named_modules():
        kind = next((cls for cls in classes if isinstance(layer, cls)), None)
        if kind is not None and (kind in LAYERS or "_added" in vars(layer)):
            reason = _reason(layer, kind)
            if reason is None:
                _become(layer, classes[kind])
                result.swapped[name] = kind.__name__
            else:
                result.left[name] = reason
        elif classes is LAYERS and isinstance(layer, MessagePassing) and not isinstance(layer, AttentionConv):
            result.left[name] = f"gat_pyg has no {type(layer).__name__}."
    return result


def _reason(layer: Any, cls: Any) -> str | None:
    """Return the reason to leave a layer alone, or None."""
    if type(layer) is not cls:
        return f"{type(layer).__name__} is a subclass of {cls.__name__}."
    of_pyg = [vars(cls).get(name) for name in ("_orig_propagate", "_jinja_propagate")]
    for name, value in vars(layer).items():
        if callable(getattr(cls, name, None)) and getattr(value, "__func__", value) not in of_pyg:
            return f"its {name} was replaced."
    if type(layer.aggr_module) is not SumAggregation:
        return f"it aggregates by {layer.aggr}, and the fused operation computes sums."
    if layer.decomposed_layers > 1:
        return f"decomposed_layers is {layer.decomposed_layers}, and the fused operation is not decomposed."
    if getattr(layer, "mechanism", None) is not None or getattr(layer, "edge_dropout", 0.0) > 0.0:
        return "it has a mechanism or edge_dropout, which PyG's layer does not have."
    return None


def _become(layer: Any, cls: type) -> None:
    """Change the class of a layer; attributes that its new class has in addition get their defaults."""
    with torch.device("meta"):  # allocates nothing, and draws no random numbers
        fresh = vars(cls(1, 1))
    state, explain = vars(layer), layer.explain
    for name in state.pop("_added", ()):
        state.pop(name, None)
    layer.__class__ = cls
    added = [name for name in fresh if not hasattr(layer, name)]
    state.update({name: fresh[name] for name in (*added, *OF_THE_CLASS)})
    if added:
        layer._added = added
    state.pop("propagate", None)  # the former class's, set by `explain`
    layer._explain = None
    layer.explain = explain
    former, new = (PygLinear, Linear) if isinstance(layer, AttentionConv) else (Linear, PygLinear)
    for child in layer.children():
        if type(child) is former:
            child.__class__ = new
