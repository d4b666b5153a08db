"""A model with one output per pair of nodes, from a model with one output per node and a decoder."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .decoders import link_decoder


class LinkScores(nn.Module):
    """A model whose outputs `[N, C]` a decoder turns into scores `[L]` of pairs of nodes.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`. `edge_attr` is passed if its forward takes it.
        channels: C, the width of the model's outputs.
        decoder: "dot", "bilinear" or "mlp", see `link_decoder`.
        **options: further arguments of the decoder.

    Raises:
        ValueError: if there is no such decoder, or the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> import torch
        >>> scores = LinkScores(nn.Identity(), 2, "dot")
        >>> scores(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), edge_label_index=torch.tensor([[0, 1], [1, 1]]))
        tensor([11., 25.])
    """

    def __init__(self, model: nn.Module, channels: int, decoder: str = "mlp", **options: Any) -> None:
        super().__init__()
        if hasattr(model, "penalty") or hasattr(model, "fit"):
            raise ValueError(f"{type(model).__name__} has its own loss over nodes. Use another model for links.")
        self.model = model
        self.decoder = link_decoder(decoder, channels, **options)
        self._takes = frozenset(inspect.signature(model.forward).parameters)

    @property
    def supports_edge_attr(self) -> bool:
        """True if the model takes edge features."""
        return "edge_attr" in self._takes and bool(getattr(self.model, "supports_edge_attr", True))

    @property
    def supports_sparse_features(self) -> bool:
        """True if the model takes sparse features."""
        return bool(getattr(self.model, "supports_sparse_features", False))

    def decayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return those with weight decay: the model's `decayed_parameters()`, by default all; all of the decoder."""
        parameters: Iterable[nn.Parameter] = getattr(self.model, "decayed_parameters", self.model.parameters)()
        return [*parameters, *self.decoder.parameters()]

    def forward(
        self, x: Tensor, edge_index: Any = None, edge_attr: Tensor | None = None, *, edge_label_index: Tensor
    ) -> Tensor:
        """Return `[L]`.

        Args:
            x: `[N, F]`.
            edge_index: as the model takes it, the message-passing edges.
            edge_attr: `[E, D]`.
            edge_label_index: the pairs `[2, L]`.
        """
        options = {} if edge_attr is None or not self.supports_edge_attr else {"edge_attr": edge_attr}
        edges = [edge_index] if "edge_index" in self._takes else []
        scores: Tensor = self.decoder(self.model(x, *edges, **options), edge_label_index)
        return scores
