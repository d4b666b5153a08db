"""The layers of a network by its arguments: their class, widths, heads and skip connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from ..conv.gat import GATConv
from ..conv.gatv2 import GATv2Conv
from ..conv.mechanisms import scored_by_layer
from ..conv.transformer import TransformerConv
from ..paper.authors import AUTHORS, AuthorsConv

CONVS: dict[str, type[nn.Module]] = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


def check_is_of_one_layer(name: str, value: Any, count: int) -> None:
    """Raise ValueError for a module with parameters or buffers as the argument of several layers, which share it."""
    if count > 1 and isinstance(value, nn.Module) and [*value.parameters(), *value.buffers()]:
        advice = "Pass its class, or a function that builds one" if name in ("mechanism", "norm") else "Build one"
        raise ValueError(
            f"{name} is one {type(value).__name__} for {count} layers, which would share its parameters. {advice} for "
            f"each layer{' (in a config, _partial_: true beside _target_)' if name in ('mechanism', 'norm') else ''}."
        )


def builder(
    conv: str,
    mechanism: Any,
    edge_dim: int | None,
    reproduction: bool | Sequence[str],
    kwargs: Mapping[str, Any],
) -> Callable[..., nn.Module]:
    """Return a function that builds a layer of the network, called with its input and output widths and options.

    Raises:
        ValueError: if there is no such layer, or it lacks an option.
    """
    if reproduction:
        more = kwargs.keys() - {"negative_slope"}
        if edge_dim is not None or not scored_by_layer(mechanism) or more or conv != "gat":
            raise ValueError(
                f"reproduction={reproduction} uses the authors' layer, which has no edge features, no other mechanisms "
                "and no further options."
            )
        details = [reproduction] if isinstance(reproduction, str) else AUTHORS if reproduction is True else reproduction
        return partial(AuthorsConv, mechanism=mechanism, of_authors=details)
    if conv not in CONVS:
        raise ValueError(f"conv is {conv!r}, expected one of {', '.join(CONVS)}.")
    if conv == "gat":
        return partial(GATConv, mechanism=mechanism, edge_dim=edge_dim)
    if mechanism != "additive":
        raise ValueError(f"mechanism is {mechanism!r}, which {CONVS[conv].__name__} does not have. Use conv='gat'.")
    return partial(CONVS[conv], edge_dim=edge_dim)


def shape(
    hidden_channels: Sequence[int] | int,
    heads: Sequence[int] | int,
    residual: Sequence[bool | str] | bool | str,
    num_layers: int | None,
    to_out: bool,
    pre_linear: bool,
) -> tuple[list[int], list[int], list[bool | str]]:
    """Return C of each hidden layer, and H and the skip connection of each layer, the output layer's last.

    Args:
        hidden_channels, heads, residual, num_layers, pre_linear: as in `GAT`.
        to_out: whether the last layer is the output layer.

    Raises:
        ValueError: if the numbers of layers differ, or a skip connection is unknown.
    """
    if isinstance(hidden_channels, int):
        if num_layers is None:
            raise ValueError(
                f"hidden_channels is {hidden_channels}, expected a list with one entry per hidden layer, "
                f"[{hidden_channels}], or num_layers beside it."
            )
        hidden_channels = [hidden_channels] * (num_layers - to_out)
    depth = len(hidden_channels) + to_out
    if depth == 0 or num_layers not in (None, depth):
        raise ValueError(
            f"num_layers is {num_layers}, but hidden_channels and out_channels are of {depth} layers, expected the "
            "same number, at least 1. Give hidden_channels and heads as one number each."
        )
    if pre_linear and not hidden_channels:
        raise ValueError("pre_linear is a map to the width of the first hidden layer, but there is none.")
    if isinstance(heads, int) and num_layers is not None:
        heads = [heads] * depth
    for skip in [residual] if isinstance(residual, int | str) else residual:
        if skip not in (True, False, "identity", "linear"):
            raise ValueError(f"residual is {skip!r}, expected True, False, 'identity' or 'linear'.")
    if isinstance(residual, bool | str):
        first = 0 if pre_linear or residual == "linear" else 1
        if residual and depth - to_out <= first:
            layers = "hidden layer" + " after the first" * first
            raise ValueError(
                f"residual is {residual}, a skip connection for each {layers}, but there is no such layer. "
                f"Name the layers: residual={[True] + [False] * (depth - 1)}."
            )
        residual = [residual if first <= layer < depth - to_out else False for layer in range(depth)]
    for name, value in (("heads", heads), ("residual", residual)):
        if isinstance(value, int):
            raise ValueError(f"{name} is {value}, expected a list with one entry per layer: {[value] * depth}.")
        if len(value) != depth:
            entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
            layers = f"each of the {len(hidden_channels)} hidden layers" + " and one for the output layer" * to_out
            raise ValueError(f"{name} has {entries}, expected {depth}: one for {layers}.")
    skips = ["identity" if skip == "identity" else bool(skip) for skip in residual]  # 1 and "linear" are True
    return list(hidden_channels), list(cast(Sequence[int], heads)), skips
