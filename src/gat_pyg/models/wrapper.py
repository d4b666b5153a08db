"""The base class of models around another model, which have its optional members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..tasks.model import Inputs, members


class Wrapper(nn.Module):
    """A model around `self.model`, for example with an encoder before it or a readout after it.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`.
        advice: the end of the error message.

    Raises:
        ValueError: if the model has its own loss over nodes (`penalty`, `fit`).
    """

    model: nn.Module

    def __init__(self, model: nn.Module, advice: str) -> None:
        super().__init__()
        if members(model).has_loss:
            raise ValueError(f"{type(model).__name__} has its own loss over nodes. {advice}")
        self.inner_inputs = Inputs.of(model)  # calls of the wrapper take these arguments, too

    @property
    def num_hops(self) -> int | None:
        """The number of hops to the farthest node that a row of the model's output depends on."""
        return members(self.model).num_hops

    @property
    def supports_edge_attr(self) -> bool:
        """True if edge features are used."""
        return "edge_attr" in self.inner_inputs.names

    @property
    def supports_sparse_features(self) -> bool:
        """True if the model takes sparse features."""
        return members(self.model).supports_sparse_features

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters with weight decay: the model's `decayed_parameters()` (or all), and the others."""
        selected = members(self.model).decayed_parameters
        excluded = set() if selected is None else {*self.model.parameters()} - {*selected()}
        return [parameter for parameter in self.parameters() if parameter not in excluded]

    def _called(self, x: Tensor, edge_index: Any, **options: Any) -> Tensor:
        """Call the model with the arguments that it takes, except for those that are None."""
        return self.inner_inputs.select(self.model, x, edge_index, **options)
