"""Training on the receptive field of the labelled nodes alone."""

from __future__ import annotations

from torch_geometric.data import Data

SEEN = 0.75  # of the rows and edges of all layers; where more are seen, the copy of the features is not worth it


def _is_less(part: Data, data: Data) -> bool:
    """Whether the layers of a model go through less than ``SEEN`` of a graph's rows and edges, the last hop first."""
    nodes, edges = part.num_sampled_nodes, part.num_sampled_edges
    layers = range(len(edges), 0, -1)
    work = sum(sum(nodes[: hop + 1]) + sum(edges[:hop]) for hop in layers) or sum(nodes)
    whole = (data.x.size(0) + data.edge_index.size(1)) * len(layers) or data.x.size(0)
    return bool(work < SEEN * whole)
