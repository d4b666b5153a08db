"""Encodings of nodes: columns that are computed from the edges, or from the neighbours' features."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # imports its submodules on first use
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, BaseTransform
from torch_geometric.transforms.add_positional_encoding import add_node_attr
from torch_geometric.utils import degree, scatter, to_torch_csr_tensor, to_undirected

from .checks import check_edge_index, check_edge_index_shape
from .node_ids import has_ids, num_nodes

BLOCK = 1 << 20  # elements of a block of walks, which a core's cache holds
LONG = 10**12  # products above which the walks take minutes
SPEED = 3 * 10**9  # products per second
DENSE = 500  # nodes below which all eigenvectors are computed, which takes 40 ms
SMALLEST = 1e-6  # element of an eigenvector that is more than rounding
AT_ONCE = 1 << 25  # features of neighbours that are gathered at the same time
STATISTICS, OF_NODES = ("mean", "min", "max"), ("edges to it", "edges from it", "PageRank")  # of `GraphColumns`


class RandomWalkPE(BaseTransform):  # type: ignore[misc]
    r"""Append the probabilities that a random walk is back at its first node after 1, 2, ... steps, as columns of x.

    .. math::
        p_i = \left[ \mathbf{P}_{ii}, (\mathbf{P}^2)_{ii}, \ldots, (\mathbf{P}^k)_{ii} \right],
        \qquad \mathbf{P} = \mathbf{D}^{-1} \mathbf{A}

    The random walk structural encoding of Dwivedi et al. (ICLR 2022), as PyG's `AddRandomWalkPE`. Here a repeated edge
    counts each time, and the powers of P are computed for a block of nodes at a time. A walk follows the direction of
    the edges; a node without outgoing edges has zeros.

    Args:
        walk_length: number k of steps of the walk.

    Cost: O(k N E) time and O(N) memory, where PyG's sparse powers take O(N^2). On one core, 20 steps take 20 s on
    Pubmed and 6 s on Photo. If they take minutes, a warning has an estimate.

    Example:
        >>> path = Data(x=torch.empty(3, 0), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> RandomWalkPE(2)(path).x
        tensor([[0.0000, 0.5000],
                [0.0000, 1.0000],
                [0.0000, 0.5000]])
    """

    def __init__(self, walk_length: int) -> None:
        self.walk_length = _at_least_one("walk_length", walk_length)

    def forward(self, data: Data) -> Data:
        """Append the columns to `data.x`."""
        N, edge_index, dtype = num_nodes(data), data.edge_index, torch.get_default_dtype()
        products = self.walk_length * N * edge_index.size(1)
        if products > LONG:
            warnings.warn(
                f"The random walks on {N:,} nodes and {edge_index.size(1):,} edges take about "
                f"{products / SPEED / 60:,.0f} minutes. A smaller walk_length takes less.",
                stacklevel=2,
            )
        probability = degree(edge_index[0], N, dtype).reciprocal()[edge_index[0]]
        encoding = probability.new_zeros(N, self.walk_length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")  # torch's notes on CSR tensors
            step = to_torch_csr_tensor(edge_index, probability, size=(N, N))
            for nodes in torch.arange(N).split(max(16, BLOCK // max(N, 1))):
                column = torch.arange(len(nodes))
                walks = probability.new_zeros(N, len(nodes))
                walks[nodes, column] = 1.0
                for length in range(self.walk_length):
                    walks = step @ walks
                    encoding[nodes, length] = walks[nodes, column]
        result: Data = add_node_attr(data, encoding)
        return result


class LaplacianPE(BaseTransform):  # type: ignore[misc]
    r"""Append the eigenvectors of the k smallest nontrivial eigenvalues of the normalised Laplacian, as columns of x.

    .. math::
        \mathbf{L} = \mathbf{I} - \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2}

    The encoding of Dwivedi et al. (2020), by PyG's `AddLaplacianEigenvectorPE`, of the graph without the directions of
    its edges. It is deterministic: the iteration begins with a fixed vector, and the sum of the cubes of each
    eigenvector is positive (or, where it is 0, the first element that is not 0). This sign does not depend on the order
    of the nodes, so training does not need to flip signs at random. Of a repeated eigenvalue, as of a graph with
    symmetries or of several components, the basis is arbitrary and depends on the order of the nodes. From 500 nodes
    on, where SciPy's iteration may find fewer vectors than such an eigenvalue has, the next eigenvalues follow.

    A graph of N nodes has N - 1 nontrivial eigenvectors; the other columns are zeros.

    Args:
        k: the number of eigenvectors.

    Cost: O(N^3) time below 500 nodes, then that of SciPy's `eigsh` in O(N) memory: 0.3 s for Pubmed, and 80 s for
    160,000 nodes and a million edges.

    Example:
        >>> path = Data(x=torch.empty(3, 0), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> LaplacianPE(3)(path).x.abs().round(decimals=3)
        tensor([[0.7070, 0.5000, 0.0000],
                [0.0000, 0.7070, 0.0000],
                [0.7070, 0.5000, 0.0000]])
    """

    def __init__(self, k: int) -> None:
        self.k = _at_least_one("k", k)

    def forward(self, data: Data) -> Data:
        """Append the columns to `data.x`."""
        N = num_nodes(data)
        encoding, k = torch.zeros(N, self.k, dtype=torch.float64), min(self.k, N - 1)
        if k > 0:
            edges = to_undirected(data.edge_index, num_nodes=N)
            graph = Data(edge_index=edges, edge_weight=torch.ones(edges.size(1), dtype=torch.float64), num_nodes=N)
            start: dict[str, Any] = {"v0": np.random.RandomState(0).standard_normal(N)}
            if "rng" in inspect.signature(scipy.sparse.linalg.eigsh).parameters:  # since SciPy 1.17, for its draws
                start["rng"] = 0
            solver = AddLaplacianEigenvectorPE(k, None, is_undirected=True, **start)
            solver.SPARSE_THRESHOLD = max(DENSE, k + 2)  # `eigsh` cannot compute all of them
            with torch.random.fork_rng(devices=[]):  # the solver draws signs
                encoding[:, :k] = solver(graph).x
            encoding *= _signs(encoding)
        result: Data = add_node_attr(data, encoding.to(torch.get_default_dtype()))
        return result


class GraphColumns(BaseTransform):  # type: ignore[misc]
    r"""Append statistics of the neighbours' features, degrees and the PageRank of a node, as columns of x.

    .. math::
        \left[ \operatorname{mean}_j x_j \,\Vert\, \min_j x_j \,\Vert\, \max_j x_j \,\Vert\, \log(1 + d^{\text{in}}_i)
        \,\Vert\, \log(1 + d^{\text{out}}_i) \,\Vert\, \log(N \pi_i) \right], \qquad j \in \mathcal{N}(i)

    The columns that Bazhenov et al. (GraphLand, NeurIPS 2025) add to tables of nodes. The neighbours are those of edges
    in either direction, each counts once, and a node without any has its own features. The PageRank follows the
    edges, with a damping of 0.85. Features that are ids, or more than `most`, such as words, have no statistics.

    Args:
        k: further columns with eigenvectors of the Laplacian, as of `LaplacianPE`; they differ from graph to graph.
        most: the largest number of features with statistics.

    Cost: O(E F) time.

    Example:
        >>> path = Data(x=torch.tensor([[1.0], [2.0], [6.0]]), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> GraphColumns()(path).x[:, 1:4]
        tensor([[2.0000, 2.0000, 2.0000],
                [3.5000, 1.0000, 6.0000],
                [2.0000, 2.0000, 2.0000]])
    """

    reads_features = True  # not the edges alone

    def __init__(self, k: int = 0, most: int = 100) -> None:
        self.k, self.most = k and _at_least_one("k", k), most

    def forward(self, data: Data) -> Data:
        """Append the columns to `data.x`."""
        N, edge_index, x = num_nodes(data), data.edge_index, data.x.to(torch.get_default_dtype())
        columns = []
        if self.has_statistics(data.x):
            src, dst = to_undirected(edge_index, num_nodes=N)
            alone = degree(dst, N)[:, None] == 0
            blocks = x.split(max(1, AT_ONCE // max(len(src), 1)), 1)
            for reduce in STATISTICS:
                for block in blocks:
                    columns.append(torch.where(alone, block, scatter(block[src], dst, 0, N, reduce)))
        out_degree = degree(edge_index[0], N, x.dtype)
        columns += [degree(edge_index[1], N, x.dtype).log1p(), out_degree.log1p(), _page_rank(edge_index, out_degree)]
        if self.k:
            columns.append(LaplacianPE(self.k)(Data(x[:, :0], edge_index, num_nodes=N)).x)
        result: Data = add_node_attr(data, torch.cat([column.view(N, -1) for column in columns], 1))
        return result

    def has_statistics(self, x: Tensor) -> bool:
        """Return True if there are statistics of features: they are no ids, and not too many."""
        return 0 < x.size(1) <= self.most and not has_ids(x)


def _page_rank(edge_index: Tensor, out_degree: Tensor) -> Tensor:
    """Return log(N PageRank) `[N]`, after 50 steps."""
    src, dst = edge_index
    rank = torch.ones_like(out_degree)
    for _ in range(50):
        passed = scatter((rank / out_degree.clamp(min=1))[src], dst, 0, len(rank), "sum")
        rank = 0.15 + 0.85 * (passed + rank[out_degree == 0].sum() / len(rank))
    return rank.log()


def _at_least_one(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number, at least 1.")
    return value


def _signs(vectors: Tensor) -> Tensor:
    """Return the signs `[k]` by which the columns `[N, k]` are to be multiplied."""
    cubes = vectors.pow(3).sum(0)
    first = (vectors.abs() > SMALLEST).byte().argmax(0)
    symmetric = cubes.abs() <= SMALLEST * vectors.abs().pow(3).sum(0)
    return torch.where(symmetric, vectors.gather(0, first[None])[0], cubes).sign()


class Encoding(BaseTransform):  # type: ignore[misc]
    r"""Append the columns that a transform computes from the edges, standardised over the nodes of the training graphs.

    .. math::
        x_i \leftarrow \left[ x_i \,\Vert\, (p_i - \mu) / \sigma \right]

    The first linear map of a network embeds them together with the features, or, in `gat_pyg.models.Encoded`, together
    with the embeddings of categories. As columns of x they reach every model, batch, part and stack, also as sparse
    features. Standardising is what a batch norm of the encoding does, with the mean and deviation of all training nodes
    in place of a batch's.

    Args:
        transform: any transform that appends columns to x and reads `edge_index` alone: one of this module, PyG's
            `LocalDegreeProfile`, or a `Compose` of several. `GraphColumns` also reads x.
        mean: `[P]`, of each column over the training nodes.
        std: `[P]`; 0 for a column that is constant there, which becomes 0 everywhere.

    Example:
        >>> star = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]))
        >>> Encoding(RandomWalkPE(2), mean=[0.0, 0.5], std=[0.0, 0.25])(star).x
        tensor([[1., 0., 2.],
                [1., 0., 0.],
                [1., 0., 0.]])
    """

    def __init__(self, transform: BaseTransform, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        self.transform = transform
        self.mean, self.std = (torch.as_tensor(values, dtype=torch.float64) for values in (mean, std))

    @property
    def reads_features(self) -> bool:
        """True if the columns depend on x."""
        transforms = getattr(self.transform, "transforms", [self.transform])  # of a `Compose`
        return any(getattr(transform, "reads_features", False) for transform in transforms)

    def forward(self, data: Data) -> Data:
        """Append the standardised columns to `data.x`."""
        encoding = self.standardised(self.columns(data))
        data.x = torch.cat([data.x, encoding.to(data.x.device, data.x.dtype)], 1)
        return data

    def columns(self, data: Data) -> Tensor:
        """Return the columns `[N, P]` of a graph before they are standardised, on the CPU.

        Raises:
            ValueError: if there are no edges `[2, E]` of the graph's nodes, or the transform appends no columns.
        """
        N, edge_index = num_nodes(data), data.edge_index
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            kind = "missing" if edge_index is None else f"a {type(edge_index).__name__}"
            raise ValueError(f"edge_index is {kind}, expected [2, E], from which the encoding of nodes is computed.")
        check_edge_index_shape(edge_index, "data")
        check_edge_index(edge_index, N, "data")
        edge_index = edge_index.as_subclass(Tensor).cpu().long()
        if not N:
            return torch.empty(0, len(self.mean))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # for transforms that draw
            x = data.x.cpu() if self.reads_features else torch.empty(N, 0)
            graph = self.transform(Data(x, edge_index, num_nodes=N))
        columns = graph.x[:, x.size(1) :] if isinstance(graph.x, Tensor) and graph.x.dim() == 2 else graph.x
        if not isinstance(columns, Tensor) or columns.dim() != 2 or len(columns) != N or not columns.size(1):
            name = type(self.transform).__name__
            raise ValueError(f"{name} appends no columns to x. With an argument attr_name, set it to null.")
        return columns.to(torch.get_default_dtype())

    def standardised(self, columns: Tensor) -> Tensor:
        """Return `(columns - mean) / std`, and 0 where `std` is 0."""
        values = (columns.double() - self.mean) / self.std.where(self.std > 0, torch.inf)
        return values.to(columns.dtype)
