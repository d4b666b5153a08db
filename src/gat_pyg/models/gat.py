"""Graph attention networks: stacks of the layer with the paper's presets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conv.authors import AUTHORS, AuthorsConv
from ..conv.gat import GATConv
from ..conv.mechanisms import scored_by_layer
from ..features.dropout import dropout
from ..graph.subgraph import first_edges

_PLANETOID = {"hidden_channels": (8,), "heads": (8, 1), "dropout": 0.6}
_PPI = {"in_channels": 50, "out_channels": 121, "hidden_channels": (256, 256), "heads": (4, 4, 6)}
# Section 3.3 of the paper.
PRESETS: dict[str, dict[str, Any]] = {
    "cora": {"in_channels": 1433, "out_channels": 7, **_PLANETOID},
    "citeseer": {"in_channels": 3703, "out_channels": 6, **_PLANETOID},
    "pubmed": {"in_channels": 500, "out_channels": 3, **_PLANETOID, "heads": (8, 8)},
    "ppi": {**_PPI, "residual": (False, True, False)},
    "const_ppi": {**_PPI, "residual": (False, True, False), "mechanism": "constant"},
}


class GAT(nn.Module):
    r"""A graph attention network (Veličković et al., ICLR 2018): layers of multi-head attention with ELU between.

    Hidden layers concatenate their heads, equation (5); the last one averages them and has no activation, equation (6).
    In training, dropout acts on every layer's input and on the attention coefficients. Input features may be a
    torch.sparse CSR matrix: then it acts on the non-zeros, which comes to the same, and nothing is made dense.

    With the numbers of nodes and edges per hop that a batch of PyG's `NeighborLoader` tells, each layer leaves out what
    no later one looks at; with as many hops as layers the output has the rows of hop 0, the batch's own nodes.

    With `reproduction=True` the layers are those of the authors' code, which the paper's text leaves out in part: every
    head draws its own input dropout ("input_dropout") and its own Glorot weights ("init"), both score maps have a bias
    ("score_bias"), W h is dropped once more after it was scored ("value_dropout"), and a skip connection is the dropped
    input, through a projection with a bias per head where the widths differ ("skip"). A list of these takes some alone.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: C of each hidden layer; as many as there are hidden layers, none for a single layer.
        out_channels: K, the number of classes or labels.
        heads: H of each layer, the last one included.
        dropout: p, of the layers' inputs and of the attention coefficients.
        residual: which layers have a skip connection: one bool for each, or one for all hidden layers after the first.
        mechanism: "additive", as in `GATConv`; a module serves all layers.
        negative_slope: of the LeakyReLU.
        edge_dim: the number of edge features, if any.
        reproduction: whether to use the authors' form of the layer, or what of it.
        **kwargs: of `GATConv`.

    Raises:
        ValueError: if the lists do not fit each other or an argument is out of range.

    Example:
        >>> model = GAT(16, [8], 7, heads=[8, 1], dropout=0.6)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 7])
    """

    supports_sparse_features = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: Sequence[int],
        out_channels: int,
        heads: Sequence[int],
        dropout: float = 0.0,
        residual: Sequence[bool] | bool = False,
        mechanism: str | nn.Module = "additive",
        negative_slope: float = 0.2,
        edge_dim: int | None = None,
        reproduction: bool | Sequence[str] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        depth = len(hidden_channels) + 1
        if residual is True and depth < 3:
            raise ValueError(
                "residual is True, a skip connection for each hidden layer after the first, but there is no such "
                "layer. Name the layers: residual=[True, False]."
            )
        if isinstance(residual, bool):
            residual = [residual and 0 < layer < depth - 1 for layer in range(depth)]
        for name, given in (("heads", heads), ("residual", residual)):
            if isinstance(given, int):
                raise ValueError(f"{name} is {given}, expected a list with one entry per layer: {[given] * depth}.")
            if len(given) != depth:
                raise ValueError(
                    f"{name} has {len(given)} entries, expected {depth}: one for each of the {depth - 1} hidden layers "
                    f"and one for the output layer."
                )
        some = [reproduction] if isinstance(reproduction, str) else reproduction or ()
        of_authors = AUTHORS if some is True else tuple(some)
        if of_authors and (edge_dim is not None or not scored_by_layer(mechanism) or kwargs):
            raise ValueError(
                f"reproduction={reproduction} is the authors' layer: it has no edge features, no other mechanisms and "
                "no further options."
            )
        self.dropout = dropout
        self.reproduction = bool(of_authors)
        self.supports_edge_attr = edge_dim is not None
        self.convs = nn.ModuleList()
        for layer, (C, H) in enumerate(zip([*hidden_channels, out_channels], heads, strict=True)):
            options: dict[str, Any] = {
                "heads": H,
                "concat": layer < depth - 1,
                "negative_slope": negative_slope,
                "dropout": dropout,
                "residual": bool(residual[layer]),
                "mechanism": mechanism,
            }
            if of_authors:
                self.convs.append(AuthorsConv(in_channels, C, **options, of_authors=of_authors))
            else:
                self.convs.append(GATConv(in_channels, C, edge_dim=edge_dim, **options, **kwargs))
            in_channels = C * H

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GAT:
        """A network of the paper: "cora", "citeseer", "pubmed", "ppi" or "const_ppi", with `changes` to its arguments.

        Raises:
            ValueError: if there is no such network.

        Example:
            >>> sum(p.numel() for p in GAT.preset("cora", reproduction=True).parameters())
            92391
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}, expected one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for conv in self.convs:
            conv.reset_parameters()  # type: ignore[operator]

    @property
    def num_hops(self) -> int | None:
        """The number of hops that a row of the output depends on; None if edges run from target to source."""
        forward = all(getattr(conv, "flow", "source_to_target") == "source_to_target" for conv in self.convs)
        return len(self.convs) if forward else None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        num_sampled_nodes_per_hop: Sequence[int] | None = None,
        num_sampled_edges_per_hop: Sequence[int] | None = None,
    ) -> Tensor:
        """`[N, F]`, dense or torch.sparse CSR, to logits `[N, K]`; `edge_index` and `edge_attr` as in `GATConv`.

        Raises:
            ValueError: if there are numbers per hop, and fewer hops than layers.
        """
        nodes, edges = list(num_sampled_nodes_per_hop or ()), list(num_sampled_edges_per_hop or ())
        if edges and not len(self.convs) <= len(edges) == len(nodes) - 1:
            raise ValueError(
                f"There are nodes of {len(nodes)} hops and edges of {len(edges)}, expected at least the edges of "
                f"{len(self.convs)} hops, one a layer, and the nodes of one hop more."
            )
        for layer in range(len(self.convs)):
            size = None
            if edges:
                hops = len(edges) - layer
                edge_index, edge_attr = first_edges(edge_index, edge_attr, sum(edges[:hops]))
                size = (x.size(0), sum(nodes[:hops]))
            x = self._layer(layer, x, edge_index, edge_attr, size)
        return x

    def _layer(self, layer: int, x: Tensor, edge_index: Any, edge_attr: Tensor | None, size: Any = None) -> Tensor:
        x = x if layer == 0 else F.elu(x)
        if not self.reproduction:  # there, every head drops its own
            x = dropout(x, self.dropout, self.training)
        out: Tensor = self.convs[layer](x, edge_index, edge_attr, size=size)
        return out

    @torch.no_grad()
    def inference(
        self, loader: Any, device: torch.device | str | None = None, embedding_device: torch.device | str = "cpu"
    ) -> Tensor:
        """The logits `[N, K]` of a whole graph, one layer after the other, in the memory of a batch of nodes.

        Equal to calling the model on the graph, but for rounding. Beside a batch it holds the input and the output of
        one layer, on `embedding_device`, whatever the depth. Arguments as of PyG's models.

        Args:
            loader: batches of all nodes with all their neighbours, one hop away, from PyG's `NeighborLoader` or
                `NodeLoader`: `NodeLoader(data, gat_pyg.training.TorchSampler(edge_index, N, [-1]), batch_size=1024)`.
            device: where batches are computed; that of the model if None.
            embedding_device: where all nodes' features are kept.

        Raises:
            ValueError: if the model is in training mode, or the loader leaves out nodes or goes further than one hop.
        """
        if self.training:
            raise ValueError("The model is in training mode, and would drop out. Call model.eval() first.")
        weight = next(self.parameters())
        device = weight.device if device is None else device
        given: Tensor = loader.data.x.to(embedding_device)
        for layer in range(len(self.convs)):
            out: Tensor | None = None
            seen = 0
            for batch in loader:
                n = batch.batch_size
                edge_index, edge_attr = batch.edge_index.to(device), batch.edge_attr
                edge_attr = None if edge_attr is None else edge_attr.to(device, weight.dtype)
                x = given[batch.n_id.to(given.device)].to(device, weight.dtype)
                if seen == 0 and layer == 0 and edge_index.numel() and int(edge_index[1].max()) >= n:
                    raise ValueError("The loader goes further than one hop. Give it num_neighbors=[-1].")
                made = self._layer(layer, x, edge_index, edge_attr, (x.size(0), n)).to(embedding_device)
                out = made.new_empty(given.size(0), made.size(1)) if out is None else out
                out[batch.n_id[:n].to(out.device)] = made
                seen += n
            if out is None or seen != given.size(0):
                raise ValueError(f"The loader gives {seen} of {given.size(0)} nodes. Leave out its input_nodes.")
            given = out
        return given
