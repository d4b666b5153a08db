"""Positions of nodes in the plane: by t-SNE of their features, or by their distances in the graph."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from ...files import needs

_LARGE = 500  # nodes; above, Kamada-Kawai takes seconds


def checked(layout: Tensor, num_nodes: int) -> Tensor:
    """Return the caller's positions of the nodes, `[N, 2]`, on the CPU.

    Raises:
        ValueError: if the shape differs, or a position is not finite.
    """
    layout = torch.as_tensor(layout, dtype=torch.float32).cpu()
    if layout.shape != (num_nodes, 2) or not layout.isfinite().all():
        raise ValueError(f"layout has shape {tuple(layout.shape)}, expected finite numbers [{num_nodes}, 2].")
    return layout


def tsne(features: Tensor, seed: int = 0) -> Tensor:
    """Return positions of the nodes in the plane, `[N, 2]`, by t-SNE of their features `[N, F']`.

    More than 50 features are reduced to 50 principal components, and the nodes start from the first two. The number of
    steps is fixed, so the time grows as N log N: 13 s on one core for Cora's 2,708 nodes, 50 s for Pubmed's 19,717.
    Above 5,000 nodes, there are half as many and coarser steps. The result is deterministic for a seed. The last two
    results are cached, so that figures of a model share them.

    Raises:
        ImportError: if scikit-learn is missing.
        ValueError: if there are fewer than 4 nodes, or a feature is not finite.
    """
    N, F = features.shape
    if N < 4:
        raise ValueError(f"the graph has {N} nodes, expected at least 4: t-SNE places nodes by their neighbours.")
    if not features.isfinite().all():
        raise ValueError("the first layer's output is not finite, expected numbers. Was the model trained to the end?")
    return torch.from_numpy(_tsne(features.float().numpy().tobytes(), N, F, seed).copy())


@lru_cache(maxsize=2)
def _tsne(content: bytes, N: int, F: int, seed: int) -> np.ndarray:
    decomposition, manifold = needs("sklearn.decomposition", "report"), needs("sklearn.manifold", "report")
    x = np.frombuffer(content, np.float32).reshape(N, F)
    if min(N, F) > 50:
        x = decomposition.PCA(50, random_state=seed).fit_transform(x)
    start = "pca" if F > 1 and x.std() > 0 else "random"
    coarse = {"angle": 0.8, "max_iter": 500} if N > 5000 else {}
    method = manifold.TSNE(perplexity=min(30.0, (N - 1) / 3), init=start, random_state=seed, **coarse)
    positions: np.ndarray = method.fit_transform(x)
    return positions


def graph_layout(data: Data, molecule: Any) -> NDArray[np.float64]:
    """Return positions of the nodes, `[N, 2]`, the long axis horizontal.

    RDKit places the atoms of a molecule. Other graphs have the layout of Kamada-Kawai, from 500 nodes on a spring
    layout. The result is deterministic.

    Raises:
        ImportError: if SciPy is missing.
    """
    if molecule is not None:
        from rdkit.Chem import rdDepictor

        rdDepictor.Compute2DCoords(molecule)
        rdDepictor.StraightenDepiction(molecule)
        place: NDArray[np.float64] = molecule.GetConformer().GetPositions()[:, :2]
        return place
    place = _by_distances(data)
    place -= place.mean(0)
    _, _, axes = np.linalg.svd(place, full_matrices=False)
    if len(place) > 1:
        place = place @ axes.T
    return place


def _by_distances(data: Data) -> NDArray[np.float64]:
    """Return positions by NetworkX whose distances approximate those in the graph.

    The distance between two components is the largest distance within one, plus 1.
    """
    import networkx as nx

    N, edges = int(data.num_nodes or 0), data.edge_index.cpu().clone().numpy()
    graph: Any = nx.Graph(edges.T.tolist())
    graph.add_nodes_from(range(N))
    if N >= _LARGE:
        place = nx.spring_layout(graph, seed=0)
    else:
        steps = dict(nx.all_pairs_shortest_path_length(graph))
        apart = 1 + max(max(row.values()) for row in steps.values())
        place = nx.kamada_kawai_layout(graph, {i: {**dict.fromkeys(range(N), apart), **steps[i]} for i in steps})
    return np.array([place[node] for node in range(N)])
