"""A multilayer perceptron of the features of each row, for feed-forward parts, heads and decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch_geometric.nn.resolver import activation_resolver

from ..features.dropout import dropout


class MLP(nn.Module):
    r"""Linear maps with dropout D and an activation between them, in the order of Platonov et al. (ICLR 2023).

    .. math::
        \mathrm{MLP}(x) = \mathbf{W}_L\, \sigma(D \cdots \mathbf{W}_2\, \sigma(D\, \mathbf{W}_1 x))

    with biases. With `residual`, x is added to the output of each map but the last.

    Args:
        channels: the widths, from that of x to that of the output.
        dropout: the probability that a hidden feature is dropped in training.
        act: the name of an activation in `torch.nn`, or a callable.
        residual: add skip connections from x to the hidden layers.

    Raises:
        ValueError: if there are skip connections, and a hidden layer has another width than x.

    Example:
        >>> import torch
        >>> MLP([16, 32, 7])(torch.randn(3, 16)).shape
        torch.Size([3, 7])
    """

    def __init__(
        self,
        channels: Sequence[int],
        dropout: float = 0.0,
        act: str | Callable[[Tensor], Tensor] = "relu",
        residual: bool = False,
    ) -> None:
        super().__init__()
        if residual and len({*channels[:-1]}) > 1:
            raise ValueError(
                f"residual is True and the widths of the perceptron are {list(channels[:-1])}, expected equal ones, to "
                "add the input to hidden features. Leave out hidden_channels or residual."
            )
        self.dropout, self.residual = dropout, residual
        self.act: Callable[[Tensor], Tensor] = activation_resolver(act)
        self.lins = nn.ModuleList(nn.Linear(*widths) for widths in pairwise(channels))

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        for lin in self.lins:
            lin.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., C]` for x `[..., F]`."""
        first = x
        for layer, lin in enumerate(self.lins[:-1]):
            x = lin(self._activated(x) if layer else x)
            x = x + first if self.residual else x
        return self._last(self._activated(x) if len(self.lins) > 1 else x)

    def _activated(self, x: Tensor) -> Tensor:
        return self.act(dropout(x, self.dropout, self.training))

    def _last(self, x: Tensor) -> Tensor:
        out: Tensor = self.lins[-1](x)
        return out


def head(
    channels: int, out_channels: int, num_layers: int, dropout: float, act: str | Callable[[Tensor], Tensor]
) -> nn.Module:
    """Return a linear map, or an `MLP` of several that keeps the width until the last.

    Raises:
        ValueError: unless there is at least one.
    """
    if num_layers < 1:
        raise ValueError(f"head_layers is {num_layers}, expected at least 1.")
    if num_layers == 1:
        return nn.Linear(channels, out_channels)
    return MLP([*[channels] * num_layers, out_channels], dropout, act)
