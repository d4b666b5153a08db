"""PyG's networks with the arguments that the command needs: GIN with edge features, and PNA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric import nn as pyg
from torch_geometric.nn.models.basic_gnn import BasicGNN


class GINE(BasicGNN):  # type: ignore[misc]  # PyG has no types
    r"""GIN with edge features (Hu et al., ICLR 2020): :math:`h'_i = f(h_i + \sum_j \mathrm{ReLU}(h_j + W u_{ij}))`.

    f is a perceptron of two layers. Without edge features it is `torch_geometric.nn.GIN`, whose arguments it takes.

    Args:
        edge_dim: the number of edge features, if any.

    Example:
        >>> model = GINE(16, 32, num_layers=2, out_channels=3, edge_dim=4)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), edge_attr=torch.randn(2, 4)).shape
        torch.Size([3, 3])
    """

    supports_edge_weight = False
    supports_edge_attr = True

    def __init__(self, *args: Any, edge_dim: int | None = None, **kwargs: Any) -> None:
        self.supports_edge_attr = edge_dim is not None
        super().__init__(*args, edge_dim=edge_dim, **kwargs)

    def init_conv(
        self, in_channels: int, out_channels: int, edge_dim: int | None = None, **kwargs: Any
    ) -> pyg.GINConv | pyg.GINEConv:
        """Return a layer."""
        mlp = pyg.MLP(
            [in_channels, out_channels, out_channels],
            act=self.act,
            act_first=self.act_first,
            norm=self.norm,
            norm_kwargs=self.norm_kwargs,
        )
        return pyg.GINConv(mlp, **kwargs) if edge_dim is None else pyg.GINEConv(mlp, edge_dim=edge_dim, **kwargs)


class PNA(pyg.PNA):  # type: ignore[misc]
    """Principal Neighbourhood Aggregation (Corso et al., NeurIPS 2020): PyG's, with the degrees as a list.

    Args:
        deg: the number of training nodes of each in-degree 0, 1, 2, ...
        aggregators: the names of the aggregations of the neighbours.
        scalers: the names of the functions of a node's degree that multiply the results.
        *args: those of `torch_geometric.nn.PNA`.
        **kwargs: those of `torch_geometric.nn.PNA`.

    Example:
        >>> model = PNA(16, 32, num_layers=2, out_channels=3, deg=[0, 10, 20])
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        *args: Any,
        deg: Sequence[float],
        aggregators: Sequence[str] = ("mean", "min", "max", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
        **kwargs: Any,
    ) -> None:
        degrees = torch.tensor([*deg], dtype=torch.float)
        super().__init__(*args, deg=degrees, aggregators=[*aggregators], scalers=[*scalers], **kwargs)
