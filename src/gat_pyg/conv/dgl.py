"""State dicts of DGL's attention layers, for ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .gat import GATConv
from .gatv2 import GATv2Conv

# DGL's name -> ours
NAMES: dict[type, dict[str, str]] = {
    GATConv: {
        "fc.weight": "lin.weight",
        "fc_src.weight": "lin_src.weight",
        "fc_dst.weight": "lin_dst.weight",
        "attn_l": "att_src",
        "attn_r": "att_dst",
    },
    GATv2Conv: {
        "fc_src.weight": "lin_l.weight",
        "fc_src.bias": "lin_l.bias",
        "fc_dst.weight": "lin_r.weight",
        "fc_dst.bias": "lin_r.bias",
        "attn": "att",
    },
}


def from_dgl(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    r"""Translate the state dict of a network of DGL's `GATConv` and `GATv2Conv` for the same network of our layers.

    DGL's layer returns `[N, H, C]`, for each head

    .. math::
        z_i = \sum_{j \in \mathcal{N}_i} \alpha_{ij} \mathbf{W} h_j + \mathbf{R} h_i + b.

    Ours concatenates the heads or averages them, `concat=False`, and then R and b are averaged too. Where R has no
    weights in DGL, since the skip connection is the identity, it becomes the identity matrix, which can be trained. A
    bias that DGL's layer lacks becomes zero.

    Args:
        state_dict: state dict of DGL's network. Weights of other modules keep their names.
        model: the network of our layers, whose modules have the same names, with `add_self_loops=False`.

    Returns:
        A state dict for `model.load_state_dict`.

    Raises:
        ValueError: if the model has no layer of ours, or `state_dict` no weights of one of them.

    Source: `python/dgl/nn/pytorch/conv/gatconv.py` and `gatv2conv.py` of DGL 2.5.

    Example:
        >>> of_dgl = {
        ...     "fc.weight": torch.randn(8, 16),
        ...     "attn_l": torch.randn(1, 2, 4),
        ...     "attn_r": torch.randn(1, 2, 4),
        ...     "bias": torch.zeros(8),
        ... }
        >>> conv = GATConv(16, 4, heads=2, add_self_loops=False)
        >>> conv.load_state_dict(from_dgl(of_dgl, conv))
        <All keys matched successfully>
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) in NAMES}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no GATConv or GATv2Conv of gat_pyg. Build the network with them, "
            "or call gat_pyg.accelerate(model) if its layers are PyG's."
        )
    result = dict(state_dict)
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        names = (*NAMES[type(layer)], "bias", "res_fc.weight", "res_fc.bias")
        weights = {key: result.pop(prefix + key) for key in names if prefix + key in result}
        if not weights:
            raise ValueError(
                f"state_dict has no weights of a DGL layer {name!r}, expected {prefix + names[0]} or the like. "
                "Give the layer the name that it has in DGL's network."
            )
        result |= {prefix + key: value for key, value in _translated(layer, weights).items()}
    return result


def _translated(layer: GATConv | GATv2Conv, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one layer's weights under our names."""
    result = {ours: weights[key] for key, ours in NAMES[type(layer)].items() if key in weights}
    width = layer.heads * layer.out_channels
    like = next(iter(weights.values()))
    of_outputs = {"bias": weights.get("bias", weights.get("res_fc.bias")), "res.weight": weights.get("res_fc.weight")}
    if of_outputs["bias"] is None and layer.bias is not None:
        of_outputs["bias"] = like.new_zeros(width)
    if of_outputs["res.weight"] is None and layer.res is not None:
        of_outputs["res.weight"] = torch.eye(width, dtype=like.dtype, device=like.device)
    for name, value in of_outputs.items():
        if value is not None:
            result[name] = value if layer.concat else value.unflatten(0, (layer.heads, -1)).mean(0)
    return result
