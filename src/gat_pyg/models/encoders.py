"""Encoders: categorical and continuous features of nodes and edges, as they are, to vectors of one width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tasks.model import members
from .wrapper import Wrapper

MANY = 1000  # categories above which a tenth of them have to occur


class Encoder(nn.Module):
    r"""One embedding for each categorical column and a linear map of the continuous ones, summed.

    .. math::
        h_i = \sum_{c \text{ categorical}} \mathbf{E}^c_{x_{ic}} + \mathbf{W} x_i^{\text{continuous}} + \mathbf{b}

    With categories alone this is the convention of the Open Graph Benchmark's `AtomEncoder` and `BondEncoder`. A value
    that is no known category adds nothing. The ids of nodes as a single column, with N categories, are learnt
    embeddings of the nodes, for a graph without features.

    Args:
        categories: for each column of x the number of its categories, whose values are 0, 1, ...; 0 for a continuous
            column. `num_categories` counts them.
        out_channels: C, the width of the result.

    Raises:
        ValueError: if there is no column, or a number is negative.

    Cost: O(N F C) time; nothing of size N x F x C is stored.

    Example:
        >>> encoder = Encoder([119, 5, 0], 16)  # two categorical columns and a continuous one
        >>> encoder(torch.tensor([[6.0, 0.0, 0.3], [7.0, 4.0, -1.2]])).shape
        torch.Size([2, 16])
    """

    _sizes: Tensor
    _first: Tensor
    _discrete: Tensor
    _continuous: Tensor

    def __init__(self, categories: Sequence[int], out_channels: int) -> None:
        super().__init__()
        if not categories or min(categories) < 0:
            raise ValueError(
                f"categories is {list(categories)}, expected for each column the number of its categories, or 0 for a "
                "continuous column."
            )
        self.categories, self.out_channels = tuple(categories), out_channels
        sizes = torch.tensor([size for size in categories if size])
        discrete = [column for column, size in enumerate(categories) if size]
        continuous = [column for column, size in enumerate(categories) if not size]
        self.register_buffer("_sizes", sizes, persistent=False)
        self.register_buffer("_first", sizes.cumsum(0) - sizes, persistent=False)  # row of each column's category 0
        self.register_buffer("_discrete", torch.tensor(discrete), persistent=False)
        self.register_buffer("_continuous", torch.tensor(continuous), persistent=False)
        self.embedding = nn.Parameter(torch.empty(int(sizes.sum()), out_channels)) if discrete else None
        self.lin = nn.Linear(len(continuous), out_channels) if continuous else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters again: Glorot uniform for each column's embeddings."""
        if self.embedding is not None:
            for rows in self.embedding.split([size for size in self.categories if size]):
                nn.init.xavier_uniform_(rows)
        if self.lin is not None:
            self.lin.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return `[N, C]` for x `[N, F]`, integers or floats.

        Raises:
            ValueError: if x has another number of columns.
        """
        x = x[:, None] if x.dim() == 1 else x
        if x.dim() != 2 or x.size(1) != len(self.categories):
            raise ValueError(
                f"The features have shape {tuple(x.shape)}, expected (N, {len(self.categories)}): the columns that the "
                "encoder was built for."
            )
        out = None
        if self.embedding is not None:
            raw = x.index_select(1, self._discrete)
            value = raw.long()
            known = (value >= 0) & (value < self._sizes) & (value == raw)
            row = torch.where(known, value, 0) + self._first
            weights = known.to(self.embedding.dtype)
            if torch.compiler.is_exporting():  # ONNX has embedding bags as a loop over rows, which needs at least one
                out = (F.embedding(row, self.embedding) * weights[..., None]).sum(1)
            else:
                out = F.embedding_bag(row, self.embedding, mode="sum", per_sample_weights=weights)
        if self.lin is not None:
            continuous = self.lin(x.index_select(1, self._continuous).to(self.lin.weight.dtype))
            out = continuous if out is None else out + continuous
        assert out is not None
        return out


def num_categories(values: Iterable[Tensor], name: str = "x") -> list[int]:
    """Count the categories of each column of the training graphs' features; 0 for a continuous column.

    A column is categorical if all its values are whole numbers, at least 0: of a column of zeros and ones the two
    embeddings are as general as a linear map.

    Args:
        values: the features `[n, F]` of each graph.
        name: of the features, for errors.

    Raises:
        ValueError: if there is no row, or a column has more than 1,000 categories of which not a tenth occurs: it is a
            count, or needs other numbers.

    Example:
        >>> num_categories([torch.tensor([[6.0, 0.5]]), torch.tensor([[8.0, 1.0], [0.0, 2.0]])])
        [9, 0]
    """
    whole, largest = None, None
    rows = [value for value in values if value.size(0)]
    for value in rows:
        fits = ((value >= 0) & (value == value.round()) if value.is_floating_point() else value >= 0).all(0)
        most = value.amax(0).double()
        whole = fits if whole is None else whole & fits
        largest = most if largest is None else torch.maximum(largest, most)
    if whole is None or largest is None:
        raise ValueError("there is no row of features, so the categories cannot be counted.")
    categories = [int(most) + 1 if fits else 0 for fits, most in zip(whole.tolist(), largest.tolist(), strict=True)]
    for column, size in enumerate(categories):
        if size > MANY and (used := torch.cat([value[:, column] for value in rows]).unique().numel()) * 10 < size:
            raise ValueError(
                f"column {column} of {name} holds {used:,} different whole numbers up to {size - 1:,}, and an encoder "
                f"learns an embedding of each number from 0. If these are quantities, give their logarithm, for "
                "instance; if they are categories, number them by numpy.unique(column, return_inverse=True)[1]."
            )
    return categories


def num_unknown(values: Iterable[Tensor], categories: Sequence[int]) -> dict[int, int]:
    """Count the values that are no known category, to which `Encoder` adds nothing, in each column that has some.

    Args:
        values: the features `[n, F]` of each graph.
        categories: as in `Encoder`.

    Example:
        >>> num_unknown([torch.tensor([[6.0, 0.5], [9.0, 7.0], [6.5, 0.1]])], [9, 0])
        {0: 2}
    """
    sizes = torch.tensor(categories)
    unknown = torch.zeros(len(categories), dtype=torch.long)
    for value in values:
        known = (value.long() >= 0) & (value.long() < sizes.to(value.device)) & (value.long() == value)
        unknown += (~known).sum(0).cpu()
    return {column: int(unknown[column]) for column, size in enumerate(categories) if size and unknown[column]}


class Encoded(Wrapper):
    """A model on encoded features: `model(Encoder(x), edge_index, edge_attr=Encoder(edge_attr), ...)`.

    Args:
        model: any module with `in_channels=channels` and, if its layers take edge features, `edge_dim=channels`.
        channels: C, the width of the encoded features.
        categories: of the columns of x, as in `Encoder`.
        edge_categories: of the columns of edge_attr; None if there are none or the model does not take them.

    Raises:
        ValueError: if the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> from gat_pyg.models import GAT
        >>> model = Encoded(GAT(16, [8], 2, heads=[2, 1], edge_dim=16), 16, [119, 5], [4])
        >>> x, edge_attr = torch.tensor([[6, 0], [8, 1]]), torch.tensor([[3]])
        >>> model(x, torch.tensor([[0], [1]]), edge_attr).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        categories: Sequence[int],
        edge_categories: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model, "It reads the features: leave out the encoder.")
        self.encoder = Encoder(categories, channels)
        self.edge_encoder = None if edge_categories is None else Encoder(edge_categories, channels)
        self.model = model
        self.out_channels = members(model).out_channels

    @property
    def supports_edge_attr(self) -> bool:
        """True if edge features are encoded."""
        return self.edge_encoder is not None

    @property
    def supports_sparse_features(self) -> bool:
        """False: the encoder reads dense columns."""
        return False

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        num_sampled_nodes_per_hop: Sequence[int] | None = None,
        num_sampled_edges_per_hop: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the model's output for x `[N, F]` and edge_attr `[E, D]`; the other arguments are the model's."""
        if self.edge_encoder is not None and edge_attr is not None:
            edge_attr = self.edge_encoder(edge_attr)
        return self._called(
            self.encoder(x),
            edge_index,
            edge_attr=edge_attr,
            batch=batch,
            batch_size=batch_size,
            num_sampled_nodes_per_hop=num_sampled_nodes_per_hop,
            num_sampled_edges_per_hop=num_sampled_edges_per_hop,
        )
