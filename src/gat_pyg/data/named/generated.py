"""Data sets that need no download: `digits`, part of the package, and `planted`, generated."""

from __future__ import annotations

from importlib import resources
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

from ...tasks.metrics import RMSE
from ...tasks.nodes import NodeLabels, NodeMultiLabels
from ...tasks.targets import NodeTargets
from ...tasks.task import Task
from ..splits import draw_masks

# Digits: embedded ---------------------------------------------------------------------------------------------------


def digits(k: int = 5) -> Task:
    """Load the default data set: 1797 images of handwritten digits, each linked with its `k` nearest neighbours.

    `x` [1797, 64] are the 8 x 8 pixels in 0..1. Two images are linked if either is among the `k` nearest of the other
    by Euclidean distance. Ties go to the lower index, so that the graph is the same on every machine. 20 nodes per
    class are for training, 500 for validation and 1000 for test. A GAT classifies about 97 % of the test nodes
    correctly, an MLP about 91 %.

    Needs no network: the pixels are part of the package (45 KB). They are those of scikit-learn's `load_digits`, the
    test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998; CC BY 4.0).
    Costs a temporary [N, N] matrix of float64 (26 MB).

    >>> digits().train[0].test_mask.sum()
    tensor(1000)
    """
    with resources.files("gat_pyg").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        pixels, y = torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"]).long()
    data = Data(x=pixels / 16.0, edge_index=_nearest(pixels.double(), k), y=y)
    draw_masks(data, NodeLabels(10), per_class=20, val=500, test=1000, seed=0, name="digits")
    names = tuple(str(digit) for digit in range(10))
    return Task("digits", [data], [data], [data], num_features=64, objective=NodeLabels(10), class_names=names)


def _nearest(x: Tensor, k: int) -> Tensor:
    """Return the undirected k-nearest-neighbour graph of points with integer coordinates; ties go to lower indices."""
    N, square = x.size(0), x.square().sum(1)
    distance = square + square[:, None] - 2 * x @ x.t()  # [N, N], exact in float64
    rank = distance.mul_(N).add_(torch.arange(N)).fill_diagonal_(torch.inf)  # distance first, then number
    src = rank.topk(k, largest=False).values.remainder(N).long()  # [N, k]
    dst = torch.arange(N)[:, None].expand_as(src)
    return cast(Tensor, to_undirected(torch.stack([src.flatten(), dst.flatten()]), num_nodes=N))


# Planted: generated -------------------------------------------------------------------------------------------------


def planted(
    graphs: int = 20, nodes: int = 100, labels: int = 16, degree: int = 4, seed: int = 0, regression: bool = False
) -> Task:
    """Generate graphs in which the labels of each node are stored at the most salient node nearby.

    `x` [N, 1 + K] is a node's salience, drawn from the exponential distribution, and K = `labels` random bits. Its
    labels `y` [N, K] are the bits of the most salient node within two hops, including itself. A mean over neighbours
    blurs these bits, and shows only their frequencies, which differ between graphs. Attention can select them, since
    the score a_src . W h_j of equation (3) may grow with the salience of j. So with two layers, GAT > Const-GAT > MLP
    in micro-F1, by at least 0.3 and 0.1, within 30 epochs, which take seconds on one core. With `regression`, they are
    K targets, each normal with a mean of its own in each graph, and the order is the same in RMSE.

    Edges are random and undirected, with `degree` per node on average. `graphs` graphs are for training, and a quarter
    as many (at least one) for validation and for test. `seed` determines everything.

    Raises ValueError if a number is too small.

    >>> planted().train[0]
    Data(x=[100, 17], edge_index=[2, ...], y=[100, 16])
    """
    if min(graphs, nodes, labels) < 1 or degree < 0:
        raise ValueError(f"planted: {graphs=}, {nodes=}, {labels=}, {degree=}: expected at least 1, and a degree >= 0.")
    generator = torch.Generator().manual_seed(seed)
    quarter = max(1, graphs // 4)
    data = [_plant(nodes, labels, degree, regression, generator) for _ in range(graphs + 2 * quarter)]
    train, val, test = data[:graphs], data[graphs:-quarter], data[-quarter:]
    objective = NodeTargets(labels, RMSE) if regression else NodeMultiLabels(labels)
    name = "planted-regression" if regression else "planted"
    return Task(name, train, val, test, num_features=1 + labels, objective=objective)


def _plant(N: int, K: int, degree: int, regression: bool, generator: torch.Generator) -> Data:
    pairs, _ = remove_self_loops(torch.randint(N, (2, N * degree // 2), generator=generator))
    edge_index = to_undirected(pairs, num_nodes=N)
    salience = -torch.log1p(-torch.rand(N, generator=generator))
    frequency = 0.7 * torch.rand(K, generator=generator)  # frequency of each bit in this graph
    if regression:
        bits = frequency + torch.randn(N, K, generator=generator)
    else:
        bits = (torch.rand(N, K, generator=generator) < frequency).float()
    by_salience = salience.argsort(stable=True)
    highest = by_salience.argsort()  # the rank of the most salient node within reach, at first the node itself
    for _ in range(2):
        highest = highest.scatter_reduce(0, edge_index[1], highest[edge_index[0]], "amax")
    return Data(torch.cat([salience[:, None], bits], 1), edge_index, y=bits[by_salience[highest]].float())
