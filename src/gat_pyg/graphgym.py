"""Layers for PyG's GraphGym, with heads and edge features; importing this module registers them.

The values of `gnn.layer_type` are `gat_pyg.gatconv`, `gat_pyg.gatv2conv` and `gat_pyg.transformerconv`, with edge
features `gat_pyg.gatedgeconv`, `gat_pyg.gatv2edgeconv` and `gat_pyg.transformeredgeconv`. `gnn.att_heads` is the number
of heads, which share the channels of a layer, and `dataset.edge_dim` the number of edge features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.register import register_layer

from .conv import GATConv, GATv2Conv, TransformerConv

LAYERS: dict[str, Any] = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


class GraphGymLayer(nn.Module):
    """An attention layer with the call of GraphGym, which maps a batch to the batch with a new `x`.

    Args:
        layer_config: `LayerConfig` of GraphGym, with the sizes of the layer.
        conv: class of the layer.
        edges: use `batch.edge_attr`, `[E, D]`.

    Raises:
        ValueError: if the heads cannot share the channels.
    """

    def __init__(self, layer_config: Any, conv: Any, edges: bool, **kwargs: Any) -> None:
        super().__init__()
        heads, width = cfg.gnn.att_heads, layer_config.dim_out
        if width % heads:
            raise ValueError(
                f"gnn.att_heads is {heads}, and a layer has {width} channels, expected a multiple of the heads. "
                "Change gnn.att_heads or gnn.dim_inner."
            )
        edge_dim = layer_config.edge_dim if edges else None
        self.model = conv(layer_config.dim_in, width // heads, heads, edge_dim=edge_dim, bias=layer_config.has_bias)
        self.edges = edges

    def forward(self, batch: Any) -> Any:
        """Replace `batch.x`, `[N, F]`, by the output of the layer, `[N, dim_out]`."""
        batch.x = self.model(batch.x, batch.edge_index, batch.edge_attr if self.edges else None)
        return batch


for _name, _conv in LAYERS.items():
    for _edges in (False, True):
        register_layer(f"gat_pyg.{_name}{'edge' * _edges}conv", partial(GraphGymLayer, conv=_conv, edges=_edges))
