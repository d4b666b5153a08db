"""A model with one output per pair of nodes, from a model with one output per node and a decoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import degree

from ..tasks.model import members
from .decoders import Popular, link_decoder
from .encoders import Column, Encoder
from .wrapper import Wrapper

CHUNK = 2**16  # pairs that `inference` decodes at a time


class LinkScores(Wrapper):
    """A model whose outputs `[N, C]` a decoder turns into scores `[L]` of pairs of nodes.

    Args:
        model: any module called `model(x, edge_index)` or `model(x)`. `edge_attr` is passed if its forward takes it.
        channels: C, the width of the model's outputs.
        decoder: "dot", "bilinear" or "mlp", see `link_decoder`.
        edge_categories: of the columns of the pairs' features, as in `Encoder`, if these are to be encoded to C
            columns.
        popularity: add the popularity of the second node to the score (`Popular`), which in-degrees in `edge_index`
            show; for pairs of users and items.
        **options: further arguments of the decoder, such as `edge_dim`, the number of features of each pair.

    Raises:
        ValueError: if there is no such decoder, or the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> import torch
        >>> scores = LinkScores(nn.Identity(), 2, "dot")
        >>> scores(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), edge_label_index=torch.tensor([[0, 1], [1, 1]]))
        tensor([11., 25.])
    """

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        decoder: str = "mlp",
        edge_categories: Sequence[Column] | None = None,
        popularity: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, "Use another model for links.")
        self.model = model
        self.edge_encoder = None if edge_categories is None else Encoder(edge_categories, channels)
        self.pair_dim = options.get("edge_dim") if edge_categories is None else len(edge_categories)  # None: not read
        if edge_categories is not None:
            options["edge_dim"] = channels
        self.decoder = link_decoder(decoder, channels, **options)
        if popularity:
            self.decoder = Popular(self.decoder)

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        *,
        edge_label_index: Tensor,
        edge_label_attr: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return `[L]`, or `[L, T]` if the decoder has T outputs.

        Args:
            x: `[N, F]`.
            edge_index: as the model takes it, the message-passing edges.
            edge_attr: `[E, D]`.
            edge_label_index: the pairs `[2, L]`.
            edge_label_attr: their features `[L, D]`, which only a decoder with `edge_dim` reads.
            **options: other arguments of the model's forward, such as `batch`.
        """
        z = self._called(x, edge_index, edge_attr=edge_attr, **options)
        return self._decoded(self.with_popularity(z, edge_index), edge_label_index, edge_label_attr)

    def with_popularity(self, z: Tensor, edge_index: Tensor) -> Tensor:
        """Return the embeddings `[N, C]` with the column that `Popular` reads, if the decoder is one."""
        if not isinstance(self.decoder, Popular):
            return z
        popularity = degree(edge_index[1], z.size(0), z.dtype).log1p()
        return torch.cat([z, (popularity - popularity[edge_index[1]].mean())[:, None]], 1)

    def _decoded(self, z: Tensor, edge_label_index: Tensor, edge_label_attr: Tensor | None) -> Tensor:
        """Return the outputs of pairs from the embeddings `[N, C]`."""
        features = {}
        if self.pair_dim is not None:
            encode = self.edge_encoder if edge_label_attr is not None else None
            features["edge_label_attr"] = edge_label_attr if encode is None else encode(edge_label_attr)
        scores: Tensor = self.decoder(z, edge_label_index, **features)
        return scores

    @torch.no_grad()
    def inference(self, loader: Any, *, edge_label_index: Tensor, edge_label_attr: Tensor | None = None) -> Tensor:
        """Return the outputs of pairs of a whole graph, from embeddings that are computed layer by layer.

        The result is that of `forward` on the graph, up to rounding. A model without a method `inference` such as
        `GAT.inference` is called on the whole graph.

        Args:
            loader: batches of all nodes with all their neighbours at one hop, as for `GAT.inference`.
            edge_label_index: the pairs `[2, L]`, on the CPU.
            edge_label_attr: their features `[L, D]`, on the CPU.
        """
        weight = next(self.parameters(), torch.empty(0))
        if (layer_by_layer := members(self.model).inference) is None:
            data = copy.copy(loader.data).to(weight.device)
            edge_attr = None if data.edge_attr is None else data.edge_attr.to(weight.dtype)
            pairs: dict[str, Any] = {"edge_label_index": edge_label_index.to(weight.device)}
            pairs |= {"edge_label_attr": _moved(edge_label_attr, weight)}
            out: Tensor = self(data.x.to(weight.dtype), data.edge_index, edge_attr, **pairs)
            return out.cpu()
        z, outputs = layer_by_layer(loader), []
        z = self.with_popularity(z, loader.data.edge_index)
        for chunk in torch.arange(edge_label_index.size(1)).split(CHUNK):
            nodes, ends = edge_label_index[:, chunk].unique(return_inverse=True)
            features = None if edge_label_attr is None else _moved(edge_label_attr[chunk], weight)
            outputs.append(self._decoded(z[nodes].to(weight.device), ends.to(weight.device), features).cpu())
        return torch.cat(outputs)


def _moved(features: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return features on the device of the weights, in their dtype if they are floats."""
    if features is None:
        return None
    return features.to(weight.device, weight.dtype if features.is_floating_point() else features.dtype)
