"""Columns of numbers: constant ones, those whose differences float32 loses, and their quantiles as normal scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative standard deviations that are only rounding
QUANTILES, MOST, ROWS = 100, 400, 20  # of a column whose values become normal scores; one for 20 rows, at most 400
ROUNDED = 1e-4  # the rounding to float32, in units of the median deviation of a column, that loses its differences


def scale(std: Number, mean: Number, dtype: torch.dtype = torch.float64, unit: float = 0.0) -> Number:
    """Return the standard deviation of columns, or 0 where they are constant up to rounding.

    Args:
        std, mean: of each column, as floats or tensors.
        dtype: the dtype of the numbers: those of float32 may differ by more.
        unit: the size of numbers that may cancel to a column of rounding, such as 1 for probabilities.

    Example:
        >>> scale(1e-17, 0.1), scale(1e-5, 0.1), scale(1e-9, 0.0), scale(1e-17, 0.0, unit=1.0)
        (0.0, 1e-05, 1e-09, 0.0)
    """
    return std * (std > ROUNDING[dtype] * (abs(mean) + unit))


def rounded_columns(values: Sequence[Tensor]) -> list[int]:
    """Return the columns of `[n, F]` of several graphs in which float32 loses differences, such as times in seconds.

    Example:
        >>> rounded_columns([torch.tensor([[1e9, 0.1], [1e9 + 5, 0.3], [1e9 + 9, 0.6]], dtype=torch.float64)])
        [0]
    """
    if not sum(map(len, values)):
        return []
    wide = torch.cat([rows.double() for rows in values])
    rounding, spread = (
        difference.abs().nanmedian(0).values for difference in (wide.float() - wide, wide - wide.nanmedian(0).values)
    )
    columns: list[int] = ((rounding > ROUNDED * spread) & rounding.isfinite()).nonzero()[:, 0].tolist()
    return columns


def normal_knots(column: Tensor) -> list[float]:
    """Return quantiles of a column `[n]`, and after them their normal scores, for `normal_scores`.

    Equal quantiles are one, with the mean of their ranks, as in scikit-learn's `QuantileTransformer`. The least and the
    largest one have the scores of half a step, not infinite ones.

    Example:
        >>> [round(number, 2) for number in normal_knots(torch.tensor([1.0, 1.0, 1.0, 5.0, 9.0]))]
        [1.0, 5.0, 9.0, -0.67, 0.67, 1.15]
    """
    count = min(len(column), max(QUANTILES, min(len(column) // ROWS, MOST)))
    ranks = torch.linspace(0, 1, count, dtype=torch.float64)
    knots, ties = column.double().sort().values[(ranks * (len(column) - 1)).round().long()].unique(return_inverse=True)
    mean = torch.zeros_like(knots).index_add(0, ties, ranks) / ties.bincount()
    edge = 0.5 / max(count - 1, 1)
    return [*knots.tolist(), *torch.special.ndtri(mean.clamp(edge, 1 - edge)).tolist()]


def between_knots(x: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the knot after each element of x `[N, C]`, and the share of the way to it, from 0 to 1.

    The knots `[C, Q]` increase; elements beyond them are at the first or the last one.
    """
    columns = x.t().contiguous()
    if torch.compiler.is_exporting():  # ONNX has no search
        after = (columns[..., None] >= knots[:, None]).sum(-1)
    else:
        after = torch.searchsorted(knots, columns, right=True)
    after = after.clamp(1, knots.size(1) - 1)
    low, high = knots.gather(1, after - 1), knots.gather(1, after)
    return after.t(), ((columns - low) / (high - low)).clamp(0, 1).t()


def normal_scores(x: Tensor, knots: Tensor, scores: Tensor) -> Tensor:
    """Return the normal scores `[N, C]` of x `[N, C]`, interpolated between increasing `knots` `[C, Q]` and clipped."""
    after, share = between_knots(x, knots)
    first, last = (scores.gather(1, after.t() - k).t() for k in (1, 0))
    return first + share * (last - first)
