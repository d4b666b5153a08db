"""GraphSAGE: the features of a node and of neighbours drawn at random, by one of four aggregators.

Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs (NeurIPS 2017). Their supervised code has
two layers of 256 features with S_1 = 25 and S_2 = 10 neighbours, no biases, ReLU between, rows of length one after the
last, and a linear layer on top; the LSTM has 128 features and the pooling layer 512. It draws in evaluation as well.

Otherwise here:

- W [h_i, h_N(i)] is the paper's, as in PyG's `SAGEConv`; the code has 128 features of h_i beside 128 of h_N(i).
- A layer draws neighbours once for each node of a batch of whole graphs, as in the paper's Algorithm 2. The code draws
  them for each of 512 nodes and again for each neighbour that they have, out of at most 128 drawn beforehand.
- Weights are initialised as in PyG, not by Glorot. Gradients are not clipped to [-5, 5]: with the mean aggregator, none
  exceeded 0.004 in six epochs on PPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...features.dropout import dropout
from ...graph.adjacency import neighbourhoods
from ...graph.edges import Edges
from ...philox import draw_seed, uniform

AGGREGATORS = ("gcn", "mean", "lstm", "pool")


class GraphSAGE(nn.Module):
    r"""GraphSAGE, whose layer k draws S_k neighbours of each node afresh, in training and in evaluation.

    .. math::
        h_i^k = \sigma(\mathbf{W}_1 h_i^{k-1} + \mathbf{W}_2\, \mathrm{aggr}(h_j^{k-1} : j \in N_k(i))),
        \qquad N_k(i): S_k \text{ draws with replacement from } \mathcal{N}_i

    "pool" is the maximum of ReLU(W h_j + b); "gcn" is a mean that includes h_i, without W_1. A node without neighbours
    aggregates S_k rows of zeros. In evaluation, the draws depend on a seed that is drawn with the initial weights and
    saved with them: a graph has the same logits every time, on every device.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: the features of each layer.
        out_channels: K, the number of classes or labels.
        num_neighbors: number of sampled neighbours S, for each layer.
        aggr: "gcn", "mean", "lstm" or "pool".
        aggr_channels: the features that "lstm" or "pool" aggregates to.
        dropout: p, for the inputs of the layers.

    Raises:
        ValueError: if there is no such aggregator, or the numbers do not fit each other.

    Example:
        >>> model = GraphSAGE(16, [32, 32], 7, num_neighbors=[25, 10], aggr="pool", aggr_channels=64)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 7])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: Sequence[int],
        out_channels: int,
        num_neighbors: Sequence[int],
        aggr: str = "mean",
        aggr_channels: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not hidden_channels or len(num_neighbors) != len(hidden_channels) or min(num_neighbors) < 1:
            raise ValueError(
                f"num_neighbors is {list(num_neighbors)}, expected a number of at least 1 for each of the "
                f"{len(hidden_channels)} layers of hidden_channels, and at least one layer."
            )
        self.num_neighbors = list(num_neighbors)
        self.dropout = dropout
        self.convs = nn.ModuleList(
            SampledConv(C_in, C_out, aggr, aggr_channels) for C_in, C_out in pairwise([in_channels, *hidden_channels])
        )
        self.lin = nn.Linear(hidden_channels[-1], out_channels)
        self.seed: Tensor
        self.register_buffer("seed", torch.randint(2**31, ()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """`[N, F]` and `[2, E]` (src, dst) to logits `[N, K]`."""
        edges = neighbourhoods(edge_index, x.size(0), x.size(0))
        for k, (conv, num) in enumerate(zip(self.convs, self.num_neighbors, strict=True)):
            x = x if k == 0 else x.relu()
            seed = draw_seed(x.device) if self.training else self.seed + k
            x = conv(dropout(x, self.dropout, self.training), sample(edges, num, seed))
        out: Tensor = self.lin(F.normalize(x))
        return out


class SampledConv(nn.Module):
    """A layer of `GraphSAGE`: PyG's `SAGEConv`, with the same parameter names, for a fixed number of neighbours.

    There is no scatter of size N S x C, and the LSTM's input projection is computed once per node, not once per draw.
    On one core, an epoch of PPI takes a seventh of the time with "pool" and half of the time with "lstm".
    """

    def __init__(self, in_channels: int, out_channels: int, aggr: str, aggr_channels: int | None) -> None:
        super().__init__()
        if aggr not in AGGREGATORS:
            raise ValueError(f"aggr is {aggr!r}, expected one of {', '.join(AGGREGATORS)}.")
        if (aggr in ("lstm", "pool")) != (aggr_channels is not None):
            raise ValueError(f"aggr_channels is {aggr_channels}, expected a number for lstm and pool, and only there.")
        C = aggr_channels or in_channels
        self.aggr = aggr
        self.lin = nn.Linear(in_channels, C) if aggr == "pool" else None
        self.lstm = nn.LSTM(in_channels, C) if aggr == "lstm" else None
        self.lin_l = nn.Linear(C, out_channels, bias=False)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False) if aggr != "gcn" else None

    def forward(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Return `[N, C_out]` for x `[N, C_in]` and the drawn neighbours `[N, S]`, where N stands for none."""
        if self.lstm is not None:
            aggregated = run_lstm(self.lstm, _with_zeros(x), drawn)
        elif self.lin is not None:
            aggregated = F.embedding_bag(drawn, _with_zeros(self.lin(x).relu()), mode="max")
        else:
            if self.lin_r is None:
                drawn = torch.cat([drawn, torch.arange(x.size(0), device=x.device)[:, None]], dim=1)
            aggregated = F.embedding_bag(drawn, _with_zeros(x), mode="mean")
        out: Tensor = self.lin_l(aggregated)
        return out if self.lin_r is None else out + self.lin_r(x)


def run_lstm(lstm: nn.LSTM, x: Tensor, drawn: Tensor) -> Tensor:
    """Return the last state of `lstm(x[drawn])`, `[N, C]` for `[N, S]`; W_ih x is computed before the rows are drawn.

    Example:
        >>> lstm, x, drawn = nn.LSTM(4, 2, batch_first=True), torch.randn(5, 4), torch.tensor([[3, 1], [0, 4]])
        >>> torch.allclose(run_lstm(lstm, x, drawn), lstm(x[drawn])[0][:, -1], atol=1e-6)
        True
    """
    W_ih, W_hh, b_ih, b_hh = lstm.all_weights[0]
    x = F.linear(x, W_ih, b_ih + b_hh)  # [N + 1, 4 C]
    h = c = x.new_zeros(drawn.size(0), lstm.hidden_size)
    for row in drawn.unbind(1):
        gates = torch.addmm(x.index_select(0, row), h, W_hh.t())
        i, f, g, o = gates.chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


def sample(edges: Edges, num: int, seed: Tensor) -> Tensor:
    """Draw neighbours of each node uniformly with replacement by a seed, `[N, num]`; N for a node without neighbours.

    Example:
        >>> edges = neighbourhoods(torch.tensor([[0, 2], [1, 1]]), 3, 3)
        >>> drawn = sample(edges, 4, torch.tensor(7))
        >>> drawn[::2].tolist(), set(drawn[1].tolist()) <= {0, 2}
        ([[3, 3, 3, 3], [3, 3, 3, 3]], True)
    """
    src, _ = edges.wide
    degree = edges.rowptr.diff()[:, None]
    place = (uniform(seed, edges.num_dst, num) * degree).long()  # below the degree
    place = torch.where(degree > 0, edges.rowptr[:-1, None] + place, edges.num_edges)
    return F.pad(src, (0, 1), value=edges.num_src)[place]


def _with_zeros(x: Tensor) -> Tensor:
    """Append a row of zeros for missing neighbours."""
    return F.pad(x, (0, 0, 0, 1))
