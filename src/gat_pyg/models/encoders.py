"""Encoders: categorical and continuous features of nodes and edges, as they are, to vectors of one width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graph.remembered import is_traced, remembered
from ..tasks.checks import CHECKED
from ..tasks.model import members
from ..tasks.scaling import between_knots, normal_knots, normal_scores, scale
from .wrapper import Wrapper

MANY = 100  # different values of categories; a column with more of them is continuous
LARGEST = 1000  # number of a category
FEW = 2  # categories per column, as of one-hot columns, up to which one product is much faster than a gather
SAMPLE = 100_000  # evenly spaced rows from which means are computed
INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "normal": nn.init.normal_,
    "orthogonal": nn.init.orthogonal_,
}
Column = int | Sequence[float]
Scaling = Literal["standard", "quantile"]


class Encoder(nn.Module):
    r"""One embedding for each categorical column and a linear map of the continuous ones, summed.

    .. math::
        h_i = \sum_{c \text{ categorical}} \mathbf{E}^c_{x_{ic}} + \mathbf{W} x_i^{\text{continuous}} + \mathbf{b}

    A continuous column may have a mean and a standard deviation, by which it is standardised:
    :math:`(x_{ic} - \mu_c) / \sigma_c` replaces :math:`x_{ic}`. In place of them it may have quantiles and their normal
    scores, between which it is interpolated; then it also adds a learnt piecewise linear function, first 0, with an
    embedding :math:`\mathbf{e}^c_q` at each quantile (Gorishniy et al., NeurIPS 2022):

    .. math::
        (1 - t) \, \mathbf{e}^c_q + t \, \mathbf{e}^c_{q + 1}, \qquad x_{ic} = (1 - t) \, k^c_q + t \, k^c_{q + 1}

    With categories alone this is the convention of the
    Open Graph Benchmark's `AtomEncoder` and `BondEncoder`. An unknown category adds nothing. The ids of
    nodes as a single column, with N categories, are learnt embeddings of the nodes, for a graph without features.

    Without `out_channels` there are no parameters: the result has the standardised continuous columns, then a column of
    0 and 1 for each category, or one for a column of two categories. It is cached for the lifetime of x, so it must not
    be modified in place.

    Args:
        categories: for each column of x the number of its categories, whose values are 0, 1, ...; for a continuous
            column its mean and standard deviation, its quantiles and their scores, or 0 to leave it as it is.
            `columns_of` computes them.
        out_channels: C, the width of the result; None for no parameters.
        init: the initial embeddings of each column: "xavier_uniform", "normal" or "orthogonal", as in `torch.nn.init`.

    Raises:
        ValueError: if there is no column, a number is negative, a standard deviation is not positive, or there is no
            such initialisation.

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
    _mean: Tensor
    _std: Tensor
    _ranked: Tensor
    _knots: Tensor
    _scores: Tensor

    def __init__(self, categories: Sequence[Column], out_channels: int | None, init: str = "xavier_uniform") -> None:
        super().__init__()
        scales = [(0.0, 1.0) if isinstance(column, int) else tuple(column) for column in categories]
        knots = {index: scale for index, scale in enumerate(scales) if len(scale) > 2}
        scales = [(0.0, 1.0) if index in knots else scale for index, scale in enumerate(scales)]
        self.categories = tuple(column if isinstance(column, int) else 0 for column in categories)
        if not categories or min(self.categories) < 0 or not all(len(scale) == 2 and scale[1] > 0 for scale in scales):
            raise ValueError(
                f"categories is {list(categories)}, expected for each column the number of its categories, or for a "
                "continuous column 0, or its mean and standard deviation."
            )
        if init not in INITS:
            raise ValueError(f"init is {init!r}, expected one of {', '.join(INITS)}.")
        self._columns = tuple(column if isinstance(column, int) else tuple(column) for column in categories)
        self.init = init
        sizes = torch.tensor([size for size in self.categories if size], dtype=torch.long)
        discrete = [column for column, size in enumerate(self.categories) if size]
        continuous = [column for column, size in enumerate(self.categories) if not size]
        self.register_buffer("_sizes", sizes, persistent=False)
        self.register_buffer("_first", sizes.cumsum(0) - sizes, persistent=False)  # row of each column's category 0
        self.register_buffer("_discrete", torch.tensor(discrete, dtype=torch.long), persistent=False)
        self.register_buffer("_continuous", torch.tensor(continuous, dtype=torch.long), persistent=False)
        chosen = [scales[column] for column in continuous]
        self._is_ranked = bool(knots)
        ranked = [place for place, column in enumerate(continuous) if column in knots]
        self.register_buffer("_ranked", torch.tensor(ranked, dtype=torch.long), persistent=False)
        for key, rows in zip(("_knots", "_scores"), _halves([*knots.values()]), strict=True):
            self.register_buffer(key, torch.tensor(rows), persistent=False)
        self._standardises = any(scale != (0.0, 1.0) for scale in chosen)
        for number, key in enumerate(("_mean", "_std")):
            self.register_buffer(key, torch.tensor([scale[number] for scale in chosen]), persistent=False)
        self.embedding = self.lin = self.knots = None
        if out_channels is not None:
            self.embedding = nn.Parameter(torch.empty(int(sizes.sum()), out_channels)) if discrete else None
            self.lin = nn.Linear(len(continuous), out_channels) if continuous else None
            self.knots = nn.Parameter(torch.empty(self._knots.numel(), out_channels)) if knots else None
        self.is_learnt = out_channels is not None
        self.out_channels = len(continuous) + int(_widths(sizes).sum()) if out_channels is None else out_channels
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters again, the embeddings of each column separately."""
        if self.embedding is not None:
            for rows in self.embedding.split([size for size in self.categories if size]):
                INITS[self.init](rows)
        if self.lin is not None:
            self.lin.reset_parameters()
        if self.knots is not None:
            nn.init.zeros_(self.knots)

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
        if not self.is_learnt:
            if is_traced(x) or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active() or x.requires_grad:
                return self._indicators(x)
            return _encoded(x, self._columns, self._mean.dtype)
        out = None
        if self.embedding is not None:
            value, known = self._known(x)
            row = value + self._first
            weights = known.to(self.embedding.dtype)
            out = _weighted_sum(self.embedding, row, weights)
        if self.lin is not None:
            continuous = self.lin(self._standardised(x))
            if self.knots is not None:
                ranked = x.index_select(1, self._continuous[self._ranked]).to(continuous.dtype)
                after, share = between_knots(ranked, self._knots)
                row = after + self._knots.size(1) * torch.arange(after.size(1), device=x.device)
                rows, weights = torch.cat([row - 1, row], 1), torch.cat([1 - share, share], 1)
                continuous = continuous + _weighted_sum(self.knots, rows, weights)
            out = continuous if out is None else out + continuous
        assert out is not None
        return out

    def _known(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the categories `[N, D]`, 0 for unknown ones, and which are known."""
        raw = x.index_select(1, self._discrete)
        value = raw.long()
        known = (value >= 0) & (value < self._sizes) & (value == raw)
        return torch.where(known, value, 0), known

    def _standardised(self, x: Tensor) -> Tensor:
        """Return the continuous columns `[N, F - D]`."""
        columns = x.index_select(1, self._continuous).to(self._mean.dtype)
        columns = (columns - self._mean) / self._std if self._standardises else columns
        if not self._is_ranked:
            return columns
        ranked = normal_scores(columns.index_select(1, self._ranked), self._knots, self._scores)
        return columns.index_copy(1, self._ranked, ranked)

    def _indicators(self, x: Tensor) -> Tensor:
        """Return the continuous columns, then one of 0 and 1 for each category; two categories have one column."""
        (value, known), columns = self._known(x), self._standardised(x)
        is_pair, widths = self._sizes <= 2, _widths(self._sizes)
        place = columns.size(1) + widths.cumsum(0) - widths + torch.where(is_pair, 0, value)
        ones = torch.where(is_pair, value, 1) * known
        out = F.pad(columns, (0, self.out_channels - columns.size(1)))
        return out.scatter(1, place, ones.to(out.dtype))


def _weighted_sum(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sums `[N, C]` of the rows `[N, D]` of a table `[R, C]` times their weights."""
    if len(table) <= FEW * rows.size(1):
        return weights.new_zeros(rows.size(0), len(table)).scatter_add(1, rows, weights) @ table
    if torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
        # ONNX has embedding bags as a loop over rows, of which at least one is needed; vmap has one over models
        return (F.embedding(rows, table) * weights[..., None]).sum(1)
    return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)


@remembered
def _encoded(x: Tensor, columns: tuple[Column, ...], dtype: torch.dtype) -> Tensor:
    """Return the result of an `Encoder` without parameters, which is the same at each step with the same x."""
    return _without_parameters(columns, x.device, dtype)._indicators(x)


@cache
def _without_parameters(columns: tuple[Column, ...], device: torch.device, dtype: torch.dtype) -> Encoder:
    """Return an encoder for all batches: its tensors take longer to create than a small batch to encode."""
    return Encoder(columns, None).to(device, dtype)


def _widths(sizes: Tensor) -> Tensor:
    """Return the number of columns of 0 and 1 for each number of categories."""
    return torch.where(sizes <= 2, 1, sizes)


def _halves(columns: Sequence[Sequence[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the quantiles and the scores of columns, with rows of one width: by steps of 1, and the last score."""
    width = max(map(len, columns), default=0) // 2
    knots, scores = [], []
    for column in columns:
        count = len(column) // 2
        knots.append([*column[:count], *(column[count - 1] + step for step in range(1, width - count + 1))])
        scores.append([*column[count:], *[column[-1]] * (width - count)])
    return knots, scores


def num_categories(values: Iterable[Tensor]) -> list[int]:
    """Count the categories of each column of the training graphs' features; 0 for a continuous column.

    A column is categorical if all its values are whole numbers from 0 to below 1,000, at most 100 different ones: of a
    column of zeros and ones the two embeddings are as general as a linear map. Larger whole numbers, or more of them,
    are continuous, such as counts. A single column with all numbers from 0 up to its largest one is categorical: ids.

    Args:
        values: the features `[n, F]` of each graph.

    Raises:
        ValueError: if there is no row.

    Example:
        >>> num_categories([torch.tensor([[6.0, 0.5]]), torch.tensor([[8.0, 1.0], [0.0, 2.0]])])
        [9, 0]
    """
    whole, largest = None, None
    graphs = [value for value in values if value.size(0)]
    for value in chain.from_iterable(x.split(max(1, CHECKED // max(1, x.size(1)))) for x in graphs):  # x may be a file
        fits = ((value >= 0) & (value == value.round()) if value.is_floating_point() else value >= 0).all(0)
        most = value.amax(0).double()
        whole = fits if whole is None else whole & fits
        largest = most if largest is None else torch.maximum(largest, most)
    if whole is None or largest is None:
        raise ValueError("there is no row of features, so the categories cannot be counted.")
    sizes = [int(most) + 1 if fits else 0 for fits, most in zip(whole.tolist(), largest.tolist(), strict=True)]
    for column, size in enumerate(sizes):
        if size > MANY:
            used = torch.cat([x[:, column] for x in graphs]).unique().numel()
            are_ids = len(sizes) == 1 and used == size
            sizes[column] = size if are_ids or (used <= MANY and size <= LARGEST) else 0
    return sizes


def columns_of(
    values: Sequence[Tensor], known: Sequence[Tensor] | None = None, scaling: Scaling = "standard"
) -> list[Column]:
    """Return for each column of the training graphs' features its number of categories, or its mean and deviation.

    These are the argument `categories` of `Encoder`. A standard deviation of 0 becomes 1.

    Args:
        values: the features `[n, F]` of each graph.
        known: the rows of which means are computed; by default all.
        scaling: "quantile" for quantiles and their normal scores in place of means and deviations.

    Example:
        >>> columns_of([torch.tensor([[6.0, 0.5]]), torch.tensor([[8.0, 1.0], [0.0, 1.5]])])
        [9, [1.0, 0.40...]]
    """
    columns: list[Column] = [*num_categories(values)]
    continuous = [column for column, size in enumerate(columns) if not size]
    if continuous:
        rows = torch.cat([value[:, continuous] for value in known or values])
        rows = rows[:: max(1, len(rows) // SAMPLE)].double()
        mean, std = rows.mean(0), rows.std(0, correction=0)
        std = scale(std, mean, torch.float32)
        scales = torch.stack([mean, std.where(std > 0, 1.0)], 1).float().tolist()
        for column, each in zip(continuous, scales, strict=True):
            columns[column] = each
        for number, column in enumerate(continuous if scaling == "quantile" else ()):
            if std[number] > 0:
                columns[column] = normal_knots(rows[:, number].float())
    return columns


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
        categories: argument of the `Encoder` of x.
        edge_categories: the same for edge_attr; None if there are no edge features or the model does not take them.
        init: initial embeddings, as in `Encoder`.
        learn_edges: if False, edge features have an `Encoder` without parameters, for layers with a linear map of their
            own. The model's `edge_dim` is the encoder's width.

    Raises:
        ValueError: if the model has its own loss over nodes (`penalty`, `fit`).

    Example:
        >>> from gat_pyg.models import GAT
        >>> model = Encoded(GAT(16, [8], 2, heads=[2, 1], edge_dim=16), 16, [119, 5], [4])
        >>> x, edge_attr = torch.tensor([[6, 0], [8, 1]]), torch.tensor([[3]])
        >>> model(x, torch.tensor([[0], [1]]), edge_attr).shape
        torch.Size([2, 2])
    """

    supports_sparse_features = False  # the encoder reads dense columns

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        categories: Sequence[Column],
        edge_categories: Sequence[Column] | None = None,
        init: str = "xavier_uniform",
        learn_edges: bool = True,
    ) -> None:
        super().__init__(model, "It reads the features: leave out the encoder.")
        self.encoder = Encoder(categories, channels, init)
        self.edge_encoder = None
        if edge_categories is not None:
            self.edge_encoder = Encoder(edge_categories, channels if learn_edges else None, init)
        self.model = model
        self.out_channels = members(model).out_channels

    @property
    def supports_edge_attr(self) -> bool:
        """True if edge features are encoded."""
        return self.edge_encoder is not None

    def forward(self, x: Tensor, edge_index: Any = None, edge_attr: Tensor | None = None, **options: Any) -> Tensor:
        """Return the model's output for x `[N, F]` and edge_attr `[E, D]`; the other arguments are the model's."""
        if self.edge_encoder is not None and edge_attr is not None:
            edge_attr = self.edge_encoder(edge_attr)
        return self._called(self.encoder(x), edge_index, edge_attr=edge_attr, **options)
