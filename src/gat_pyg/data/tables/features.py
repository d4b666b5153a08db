"""Columns of tables as features, by encodings that are fitted on training rows once and are plain data."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...files import needs
from ...tasks.scaling import scale
from .columns import FORMS, MISSING, MOST, Column, check_cells, kind_of, parsed, quantities
from .files import file_of, missing_column, refuse, unnamed
from .split_columns import warn_of_splits

TAIL = 10  # standard deviations from the mean to a number above which the column's logarithms are standardised
_LARGEST = float(np.finfo(np.float32).max)


class Features:
    """The features of a table's rows, in the form of `Preparation.source`.

    The training rows decide once if a column has numbers, dates or categories. A number is standardised by their mean
    and standard deviation; where it is missing, by their median, and a further feature is 1 if training rows lack it
    too. A column with a training row that is more than 10 standard deviations from the mean, such as amounts of money,
    is replaced by its logarithm, log(1 + abs(v)) with the sign of v. A date is the number of its days. A category is 1
    in the feature of its own, and 0 in all if it is none of training; numbers among categories are compared by value.

    Args:
        columns: the encoding of each column, as `fit` makes it.
        left_out: the columns that `fit` left out, with the reasons.
        spellings: how often `fit` has read a text as a missing number, by column and text.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"amount": ["1.0", "3.0", "?"], "city": ["Oslo", "Rome", "Oslo"]})
        >>> features = Features.fit(frame, ["amount", "city"], np.array([True, True, False]))
        >>> features(frame)
        tensor([[-1.,  1.,  0.],
                [ 1.,  0.,  1.],
                [ 0.,  1.,  0.]])
    """

    def __init__(
        self,
        columns: Mapping[str, dict[str, Any]],
        left_out: dict[str, str] | None = None,
        spellings: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.columns, self.left_out, self.spellings = columns, left_out or {}, spellings or {}

    @classmethod
    def fit(cls, frame: Any, names: Sequence[str], rows: Any, categories: Collection[str] = ()) -> Features:
        """Return the features of some columns, fitted on the training `rows`, a mask over the table.

        Columns without values or with one value only are left out, and texts that are rarely the same, as names.

        Raises:
            ValueError: for a formula, the header again, an infinite number, few other texts among numbers or dates, or
                dates that may begin with the day or the month.
        """
        columns, left_out, spellings = {}, {}, {}
        for name in names:
            column = Column(frame, name)
            check_cells(column)
            kind, form = kind_of(column, rows, name in categories)
            encoding = _categories(column, rows) if kind == "category" else _scale(column, rows, kind, form)
            if isinstance(encoding, str):
                left_out[name] = encoding
                continue
            gaps = column.codes < 0 if kind == "category" else ~column.known
            columns[name] = encoding | {"missing": float(np.mean(gaps[rows]))}
            if kind != "category":
                every = column.counts(slice(None)) if column.kind == "text" else {}
                spellings[name] = {text: count for text, count in every.items() if text.casefold() in MISSING}
        return cls(columns, left_out, {name: texts for name, texts in spellings.items() if texts})

    @classmethod
    def of_table(
        cls,
        frame: Any,
        names: Sequence[str],
        rows: Any,
        categories: Collection[str],
        like: Mapping[str, dict[str, Any]] | None = None,
    ) -> Features:
        """Return the features of those columns that have a name and are no split, or those of an earlier task.

        Args:
            frame, names, rows, categories: as in `fit`.
            like: the columns of the earlier task.
        """
        reasons = {name: "it has no name" for name in names if unnamed(name)}
        names = [name for name in names if not unnamed(name)]
        if like is not None:
            others = {name: "no feature of the earlier run" for name in names if name not in like}
            return cls(like, reasons | others)
        splits = warn_of_splits(frame, [name for name in names if name not in categories])
        result = cls.fit(frame, [name for name in names if name not in splits], rows, categories)
        result.left_out = reasons | dict.fromkeys(splits, "a split") | result.left_out
        return result

    @property
    def size(self) -> int:
        """The number of features."""
        return sum(map(width, self.columns.values()))

    def __call__(self, frame: Any, is_later: bool = True) -> Tensor:
        """Return the features of the rows of a table `[n, F]`, in torch's default dtype.

        Warns of categories that training did not have, with their number. In a later table, also of a column that is
        mostly missing, unlike in the table of the training, or mostly outside of the range of the training rows.

        Raises:
            ValueError: if a column is missing, or a value is not a number or date as in the training data.
        """
        x = torch.zeros(len(frame), self.size, dtype=torch.get_default_dtype())
        begin = 0
        for name, encoding in self.columns.items():
            if name not in frame.columns:
                raise missing_column([frame], name)
            column, block = Column(frame, name), x.numpy()[:, begin : begin + width(encoding)]
            encode = _encode_category if encoding["kind"] == "category" else _encode_number
            is_missing = encode(block, column, encoding)
            if is_later:
                _compare(column, encoding, is_missing)
            begin += width(encoding)
        return x


def width(encoding: Mapping[str, Any]) -> int:
    """Return the number of features of a column."""
    return len(encoding["values"]) if encoding["kind"] == "category" else 1 + bool(encoding["flag"])


def text_of(encoding: Mapping[str, Any], features: Any) -> str:
    """Return the value of a column from its features in one row, as text.

    >>> text_of({"kind": "category", "values": ["Oslo", "Rome"]}, np.array([0.0, 1.0]))
    'Rome'
    >>> text_of({"kind": "number", "log": False, "mean": 2e-8, "std": 1e-8}, np.array([1.0]))
    '3e-08'
    """
    if encoding["kind"] == "category":
        return next((value for value, is_it in zip(encoding["values"], features, strict=True) if is_it), "unknown")
    if len(features) == 2 and features[1]:
        return "missing"
    number = float(features[0]) * encoding["std"] + encoding["mean"]
    if abs(number) < 1e-6 * (encoding["std"] + abs(encoding["mean"])):  # a 0 of the table: features are float32
        number = 0.0
    number = float(np.sign(number) * np.expm1(abs(number))) if encoding["log"] else number
    if encoding["kind"] == "number":
        return f"{number:.4g}"
    pd = needs("pandas", "tables")
    return str(pd.Timestamp(0) + pd.Timedelta(days=round(number, 3))).removesuffix(" 00:00:00")


# Encodings ------------------------------------------------------------------------------------------------------------


def _scale(column: Column, rows: Any, kind: str, form: str) -> dict[str, Any] | str:
    """Return the encoding of numbers or dates, or the reason why there is none."""
    if kind == "date" and not form:
        example = next(compress(column.texts, parsed(column.texts, FORMS[0]).isna()))
        return f"dates of an unknown form, such as {example}: write them as 2021-12-31"
    values = quantities(column, kind, form, "")[rows]
    known = values[~np.isnan(values)]
    if not len(known):
        return "empty in the training rows"
    limits = [float(known.min()), float(known.max())]
    has_gaps = len(known) < len(values)
    with np.errstate(over="ignore", invalid="ignore"):  # of 1e308
        has_tail = not np.abs(known - known.mean()).max() <= TAIL * known.std() < np.inf
    if is_log := has_tail and not form:
        known = _logarithm(known)
    mean, fill = float(known.mean()), float(np.median(known))
    std = scale(float(known.std()), mean)
    if not std and not has_gaps:
        return "the same in all training rows"
    encoding = {"kind": kind, "log": is_log, "mean": mean, "std": std or 1.0, "fill": fill, "flag": has_gaps}
    return encoding | {"range": limits} | ({"form": form} if form else {})


def _logarithm(values: Any) -> Any:
    """Return log(1 + |v|) with the sign of v, by which few large values leave the others their differences."""
    return np.sign(values) * np.log1p(np.abs(values))


def _categories(column: Column, rows: Any) -> dict[str, Any] | str:
    """Return the encoding of categories, the most frequent ones first; a missing one is the category ""."""
    texts = column.counts(rows)
    counts: dict[str, int] = {}
    for text, value in zip(column.texts, column.keys, strict=True):
        if text in texts:
            counts[value] = counts.get(value, 0) + texts[text]
    total = len(column.codes[rows])
    if gaps := total - sum(counts.values()):
        counts[""] = gaps
    if len(counts) == 1:
        return "empty in the training rows" if gaps else "the same in all training rows"
    if len(counts) > max(total / 2, min(20, max(5, 0.9 * total))):
        return f"{len(counts):,} different texts"
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST]  # by name where equal
    return {"kind": "category", "values": [value for value, _ in order], "is_cut": len(counts) > MOST}


def _encode_number(x: Any, column: Column, encoding: Mapping[str, Any]) -> Any:
    """Write the features of numbers or dates into x, and return the mask of the missing ones."""
    name, kind = column.name, encoding["kind"]
    values = quantities(column, kind, encoding.get("form", ""), " as in the training data")
    missing = np.isnan(values)
    scaled = _logarithm(values) if encoding["log"] else values
    scaled = (np.where(missing, encoding["fill"], scaled) - encoding["mean"]) / encoding["std"]
    too_large = np.abs(scaled) > _LARGEST
    refuse(column.frame, too_large, f"{name} is {{{name}}}, expected a number of the size of those in training.")
    x[:, 0] = scaled
    if encoding["flag"]:
        x[:, 1] = missing
    return missing


def _encode_category(x: Any, column: Column, encoding: Mapping[str, Any]) -> Any:
    """Write the features of categories into x, and return the mask of the missing ones."""
    codes, other = column.places(encoding["values"])
    (known,) = (codes >= 0).nonzero()
    x[known, codes[known]] = 1
    if unknown := int((codes == -2).sum()) * (not encoding["is_cut"]):
        what = "values that are not a category of the training rows"
        _warn(column, f"has {unknown:,} {what}, such as {other}. Their features are 0")
    return column.codes < 0


def _compare(column: Column, encoding: Mapping[str, Any], is_missing: Any) -> None:
    """Warn if a column of a later table is mostly missing, unlike in training, or mostly outside of the range there."""
    part = column.frame.attrs.get("parts", {}).get(column.name.partition(".")[0], (0, None))  # of two tables
    is_missing, share = is_missing[slice(*part)], encoding["missing"]
    n, gaps = len(is_missing), int(is_missing.sum())
    if 2 * gaps >= n * (1 + share) > 0:
        before = f"{share:.0%}" if share else "none"
        value = "no category" if encoding["kind"] == "category" else "the median"
        _warn(column, f"is missing in {gaps:,} of {n:,} rows, but in {before} of those of training; {value} stands in")
    if "range" in encoding:
        is_date, (low, high) = "form" in encoding, encoding["range"]
        values = column.dates(encoding["form"]) if is_date else column.numbers
        if 2 * (outside := int(((values < low) | (values > high)).sum())) > n:
            limits = "before or after those" if is_date else f"outside of {low:.4g} to {high:.4g}, the range"
            other = (
                f"has {outside:,} of {n:,} {encoding['kind']}s {limits} of the training rows, so its feature is a guess"
            )
            _warn(column, f"{other}. A training with dataset.ignore=[{column.name}] does without it")


def _warn(column: Column, text: str) -> None:
    warnings.warn(f"{file_of(column.frame)}: {column.name} {text}.", stacklevel=6)
