"""The base class of the baselines that are a stack of layers: dropout before each, an activation between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.resolver import activation_resolver

from ..features.dropout import dropout


class Layers(nn.Module):
    """A model whose layers take dense or sparse features."""

    supports_sparse_features = True

    def __init__(self, dropout: float, act: str) -> None:
        super().__init__()
        self.act = activation_resolver(act)
        self.dropout = dropout

    def _through(self, layers: nn.ModuleList, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Return the output of the last layer; `call(layer, x)` returns the output of one layer."""
        for index, layer in enumerate(layers):
            x = self.act(x) if index > 0 else x
            x = call(layer, dropout(x, self.dropout, self.training))
        return x


def widths(in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of input and output features of each layer."""
    return pairwise([in_channels, *[hidden_channels] * (num_layers - 1), out_channels])
