"""Graph attention networks: models of several layers, with the paper's presets."""

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
    torch.sparse CSR matrix. Dropout then acts on the non-zeros, which is equivalent, and nothing becomes dense.

    With the numbers of nodes and edges per hop of a batch from PyG's `NeighborLoader`, each layer skips the rows that
    no later layer reads. With as many hops as layers, the output has the rows of hop 0, the seed nodes.

    `reproduction=True` uses the layers of the authors' code, which differ from the paper's text: every head draws its
    own input dropout ("input_dropout") and its own Glorot weights ("init"), both score maps have a bias ("score_bias"),
    there is dropout of W h after the scores ("value_dropout"), and a skip connection takes the input after dropout,
    with a projection with a bias for each head if the widths differ ("skip"). A list selects some of these.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: C of each hidden layer; empty for a single layer.
        out_channels: K, the number of classes or labels.
        heads: H of each layer, including the last.
        dropout: p, for the layers' inputs and the attention coefficients.
        residual: the layers with a skip connection: one bool per layer, or one for all hidden layers after the first.
        mechanism: as in `GATConv`; a module is shared by all layers.
        negative_slope: of the LeakyReLU.
        edge_dim: the number of edge features, if any.
        reproduction: if true, the layers are those of the authors' code; a list selects some of their differences.
        **kwargs: further arguments of `GATConv`.

    Raises:
        ValueError: if the lengths of the lists differ or an argument is out of range.

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
        if isinstance(hidden_channels, int):
            raise ValueError(
                f"hidden_channels is {hidden_channels}, expected a list with one entry per hidden layer: "
                f"[{hidden_channels}]."
            )
        depth = len(hidden_channels) + 1
        if residual is True and depth < 3:
            raise ValueError(
                "residual is True, a skip connection for each hidden layer after the first, but there is no such "
                "layer. Name the layers: residual=[True, False]."
            )
        if isinstance(residual, bool):
            residual = [residual and 0 < layer < depth - 1 for layer in range(depth)]
        for name, value in (("heads", heads), ("residual", residual)):
            if isinstance(value, int):
                raise ValueError(f"{name} is {value}, expected a list with one entry per layer: {[value] * depth}.")
            if len(value) != depth:
                entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
                raise ValueError(
                    f"{name} has {entries}, expected {depth}: one for each "
                    f"of the {depth - 1} hidden layers and one for the output layer."
                )
        selected = [reproduction] if isinstance(reproduction, str) else reproduction or ()
        of_authors = AUTHORS if selected is True else tuple(selected)
        if of_authors and (edge_dim is not None or not scored_by_layer(mechanism) or kwargs):
            raise ValueError(
                f"reproduction={reproduction} uses the authors' layer, which has no edge features, no other mechanisms "
                "and no further options."
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
        """Build a network of the paper: "cora", "citeseer", "pubmed", "ppi" or "const_ppi".

        Args:
            name: the name of the network.
            **changes: arguments that replace those of the paper.

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
        """Initialise all parameters again."""
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
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR, and a graph as in `GATConv`.

        Raises:
            ValueError: if there are numbers per hop, but fewer hops than layers.
        """
        nodes, edges = list(num_sampled_nodes_per_hop or ()), list(num_sampled_edges_per_hop or ())
        if edges and not len(self.convs) <= len(edges) == len(nodes) - 1:
            raise ValueError(
                f"num_sampled_nodes_per_hop has {len(nodes)} entries and num_sampled_edges_per_hop {len(edges)}, "
                f"expected edges of at least {len(self.convs)} hops, one per layer, and nodes of one hop more."
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
        if not self.reproduction:  # with it, each head of the layer has its own dropout
            x = dropout(x, self.dropout, self.training)
        out: Tensor = self.convs[layer](x, edge_index, edge_attr, size=size)
        return out

    @torch.no_grad()
    def inference(
        self, loader: Any, device: torch.device | str | None = None, embedding_device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the logits `[N, K]` of a whole graph, computed layer by layer in batches of nodes.

        The result is that of calling the model on the graph, up to rounding. Beside a batch, only the input and the
        output of one layer are stored, on `embedding_device`. Arguments as in PyG's models.

        Args:
            loader: batches of all nodes with all their neighbours at one hop, from PyG's `NeighborLoader` or
                `NodeLoader`: `NodeLoader(data, gat_pyg.training.TorchSampler(edge_index, N, [-1]), batch_size=1024)`.
            device: the device on which batches are computed, by default that of the model.
            embedding_device: the device that stores the features of all nodes.

        Raises:
            ValueError: if the model is in training mode, or the loader omits nodes or samples more than one hop.
        """
        if self.training:
            raise ValueError("The model is in training mode, in which dropout is active. Call model.eval() first.")
        weight = next(self.parameters())
        device = weight.device if device is None else device
        features: Tensor = loader.data.x.to(embedding_device)
        for layer in range(len(self.convs)):
            out: Tensor | None = None
            count = 0
            for batch in loader:
                n = batch.batch_size
                edge_index, edge_attr = batch.edge_index.to(device), batch.edge_attr
                edge_attr = None if edge_attr is None else edge_attr.to(device, weight.dtype)
                x = features[batch.n_id.to(features.device)].to(device, weight.dtype)
                if count == 0 and layer == 0 and edge_index.numel() and int(edge_index[1].max()) >= n:
                    raise ValueError("The loader samples more than one hop. Give it num_neighbors=[-1].")
                rows = self._layer(layer, x, edge_index, edge_attr, (x.size(0), n)).to(embedding_device)
                out = rows.new_empty(features.size(0), rows.size(1)) if out is None else out
                out[batch.n_id[:n].to(out.device)] = rows
                count += n
            if out is None or count != features.size(0):
                raise ValueError(f"The loader has {count} of {features.size(0)} nodes. Leave out its input_nodes.")
            features = out
        return features
