"""The decision to train on the receptive field of the labelled nodes only."""

from __future__ import annotations

from torch_geometric.data import Data

MAX_FIELD = 0.75  # above this share of the rows and edges of all layers, extracting the field costs more than it saves


def _is_smaller(field: Data, data: Data) -> bool:
    """Return True if the layers of a model read less than `MAX_FIELD` of a graph's rows and edges."""
    nodes, edges = field.num_sampled_nodes, field.num_sampled_edges
    layers = range(len(edges), 0, -1)
    work = sum(sum(nodes[: hop + 1]) + sum(edges[:hop]) for hop in layers) or sum(nodes)
    whole = (data.x.size(0) + data.edge_index.size(1)) * len(layers) or data.x.size(0)
    return bool(work < MAX_FIELD * whole)
