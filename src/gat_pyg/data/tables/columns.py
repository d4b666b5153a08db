"""Columns of tables as features and labels, by encodings that are fitted on training rows and are plain data."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...files import needs
from .files import file_of, refuse

MOST = 100  # categories of a column that get a feature each
TAIL = 10  # standard deviations from the mean to a number above which the column's logarithms are standardised
FORMS = (  # of dates, as pandas.to_datetime takes them
    *("ISO8601", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
    *(f"{day}/%Y{time}" for time in ("", " %H:%M", " %H:%M:%S") for day in ("%d/%m", "%m/%d")),
)


class Features:
    """The features of a table's rows, in the form of `Preparation.source`.

    A number is standardised by the mean and the standard deviation of the training rows; where it is missing, by the
    median, and a further feature is 1 if training rows lack it too. A column with a training row that is more than 10
    standard deviations from the mean, such as amounts of money, is replaced by its logarithm, log(1 + abs(v)) with the
    sign of v. A date is the number of its days. A category is 1 in the feature of its own, and 0 in all if it is none
    of training.

    Args:
        columns: the encoding of each column, as `fit` makes it.
        left_out: the columns that `fit` left out, with the reasons.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"amount": [1.0, 3.0, None], "city": ["Oslo", "Rome", "Oslo"]})
        >>> features = Features.fit(frame, ["amount", "city"], np.array([True, True, False]))
        >>> features(frame)
        tensor([[-1.,  1.,  0.],
                [ 1.,  0.,  1.],
                [ 0.,  1.,  0.]])
    """

    def __init__(self, columns: Mapping[str, Mapping[str, Any]], left_out: Sequence[str] = ()) -> None:
        self.columns, self.left_out = columns, left_out

    @classmethod
    def fit(cls, frame: Any, names: Sequence[str], rows: Any, categories: Collection[str] = ()) -> Features:
        """Return the features of some columns, fitted on the training `rows`, a mask over the table.

        Columns without values or with one value only are left out, and texts that are rarely the same, as names.
        """
        columns, left_out = {}, []
        for name in names:
            encoding = _fitted(frame, name, rows, name in categories)
            if isinstance(encoding, str):
                left_out.append(f"{name} ({encoding})")
            else:
                columns[name] = encoding
        return cls(columns, left_out)

    @property
    def size(self) -> int:
        """The number of features."""
        return sum(map(width, self.columns.values()))

    def __call__(self, frame: Any) -> Tensor:
        """Return the features of the rows of a table `[n, F]`, in torch's default dtype.

        Warns of categories that training did not have, with their number, and if most dates are before or after those
        of the training rows.

        Raises:
            ValueError: if a column is missing, or a value is not a number or date as in the training data.
        """
        x = torch.zeros(len(frame), self.size, dtype=torch.get_default_dtype())
        begin = 0
        for name, encoding in self.columns.items():
            if name not in frame.columns:
                raise missing_column([frame], name)
            _encode(x.numpy()[:, begin : begin + width(encoding)], frame, name, encoding)
            begin += width(encoding)
        return x


def missing_column(frames: Sequence[Any], name: str) -> ValueError:
    """Return the error of tables without a column, with those that they have."""
    names = [column for frame in frames for column in frame.columns]
    similar = [other for other in names if other.casefold() == name.casefold()] or get_close_matches(name, names, 1)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    have = [f"{file_of(frame)} has {', '.join(frame.columns[:20])}" for frame in frames]
    return ValueError(f"There is no column {name}: {'; '.join(have)}.{hint}")


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


def _fitted(frame: Any, name: str, rows: Any, is_category: bool) -> dict[str, Any] | str:
    """Return the encoding of a column, or the reason why it has none."""
    values, form = (None, "") if is_category else quantities(frame, name)
    if values is None:
        return _categories(texts(frame[name][rows]))
    known = values[rows]
    known = known[~np.isnan(known)]
    if not len(known):
        return "empty in the training rows"
    has_gaps, has_tail = len(known) < int(rows.sum()), np.abs(known - known.mean()).max() > TAIL * known.std()
    if is_log := bool(has_tail) and not form:
        known = _logarithm(known)
    mean, std, fill = float(known.mean()), float(known.std()), float(np.median(known))
    if std <= 1e-12 * abs(mean) and not has_gaps:
        return "the same in all training rows"
    encoding = {"kind": "number", "log": is_log, "mean": mean, "std": std or 1.0, "fill": fill, "flag": has_gaps}
    dates = {"kind": "date", "form": form, "range": [float(known.min()), float(known.max())]}
    return encoding | (dates if form else {})


def _logarithm(values: Any) -> Any:
    """Return log(1 + |v|) with the sign of v, by which few large values leave the others their differences."""
    return np.sign(values) * np.log1p(np.abs(values))


def _categories(values: Any) -> dict[str, Any] | str:
    """Return the encoding of texts, the most frequent ones first; a missing one is the category ""."""
    counts = values.fillna("").value_counts()
    if len(counts) == 1:
        return "the same in all training rows" if counts.index[0] else "empty in the training rows"
    if len(counts) > max(20, len(values) / 2):
        return f"{len(counts):,} different texts"
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST]  # by name where equal
    return {"kind": "category", "values": [value for value, _ in order], "is_cut": len(counts) > MOST}


def _encode(x: Any, frame: Any, name: str, encoding: Mapping[str, Any]) -> None:
    """Write the features of a column into x."""
    if encoding["kind"] != "category":
        values, _ = quantities(frame, name, encoding.get("form", ""))
        values, missing = _logarithm(values) if encoding["log"] else values, np.isnan(values)
        x[:, 0] = (np.where(missing, encoding["fill"], values) - encoding["mean"]) / encoding["std"]
        low, high = encoding.get("range", (-np.inf, np.inf))
        if 2 * (outside := int(((values < low) | (values > high)).sum())) > len(values):
            warnings.warn(
                f"{file_of(frame)}: {outside:,} of {len(values):,} dates of {name} are before or after those of the "
                f"training rows, so its feature is a guess. A training with dataset.ignore=[{name}] does without it.",
                stacklevel=5,
            )
        if encoding["flag"]:
            x[:, 1] = missing
        return
    pd = needs("pandas", "tables")
    column = texts(frame[name]).fillna("")
    codes = pd.Index(encoding["values"]).get_indexer(column)
    known = codes >= 0
    x[known, codes[known]] = 1
    unknown = column[~known & (column != "").to_numpy()]
    if len(unknown) and not encoding["is_cut"]:
        warnings.warn(
            f"{file_of(frame)}: {name} has {len(unknown):,} values that are not a category of the training rows, such "
            f"as {unknown.iloc[0]!r}. Their features are 0.",
            stacklevel=5,
        )


# Values ---------------------------------------------------------------------------------------------------------------


def texts(column: Any) -> Any:
    """Return the values of a column as text, whole numbers without a fraction; missing and empty ones are missing."""
    if getattr(column.dtype, "categories", None) is not None:
        column = column.astype(column.dtype.categories.dtype)
    if column.dtype.kind == "f":
        known = column.dropna()
        if (known == known.round()).all() and (known.abs() < 2**53).all():
            column = column.astype("Int64")
    return column.astype("str").where(column.notna() & (column != ""))


def quantities(frame: Any, name: str, form: str | None = None) -> tuple[Any, str]:
    """Return the numbers of a column, or its dates as days since 1970, as float64 `[n]`, and the form of the dates.

    NaN is a missing value, and the form "" that of numbers. The values are None if they are texts or categories; with a
    `form`, those that do not have it are an error.

    Raises:
        ValueError: if dates may begin with the day or the month, or a value is not of this `form`.
    """
    pd = needs("pandas", "tables")
    column = frame[name]
    kind = "text" if hasattr(column.dtype, "categories") else pd.api.types.infer_dtype(column, skipna=True)
    if kind in ("datetime64", "datetime", "date") and form != "":
        return _days(pd.to_datetime(column, utc=True)), form or FORMS[0]
    if kind in ("integer", "floating", "mixed-integer-float", "boolean", "decimal", "empty") and not form:
        return pd.to_numeric(column).to_numpy(float, na_value=np.nan), ""
    column = texts(column)
    forms = [form] if form is not None else _forms(column.dropna())
    if len(forms) > 1:
        example = column.dropna().iloc[0]
        raise ValueError(
            f"{file_of(frame)}: {name} has dates such as {example}, which may begin with the day or the month. Write "
            f"the year first, as in 2025-12-31, or leave the column out: ignore=[{name}]."
        )
    if not forms:
        return None, ""
    values = _parsed(column, forms[0]) if forms[0] else pd.to_numeric(column, errors="coerce")
    expected = f"a {'date' if forms[0] else 'number'} as in the training data"
    refuse(frame, values.isna() & column.notna(), f"{name} is {{{name}}}, expected {expected}, or nothing.")
    return _days(values) if forms[0] else values.to_numpy(float, na_value=np.nan), forms[0]


def _forms(known: Any) -> list[str]:
    """Return the forms in which all of some texts are dates; two if these may begin with the day or the month."""
    if not len(known) or not known.iloc[0][:1].isdigit() or known.iloc[0].isdigit():  # 0111 is a code, not a year
        return []
    distinct = known.drop_duplicates()
    possible = [form for form in FORMS if _parsed(distinct.iloc[:1], form).notna().all()]
    return [form for form in possible if _parsed(distinct, form).notna().all()]


def _parsed(column: Any, form: str) -> Any:
    pd = needs("pandas", "tables")
    return pd.to_datetime(column, format=form, errors="coerce", utc=True)


def _days(dates: Any) -> Any:
    pd = needs("pandas", "tables")
    since = dates.dt.as_unit("us") - pd.Timestamp(0, tz="UTC").as_unit("us")  # nanoseconds end in 2262
    return (since / pd.Timedelta(days=1)).to_numpy(float, na_value=np.nan)


# Labels ---------------------------------------------------------------------------------------------------------------


def _check_numbers(frame: Any, name: str) -> None:
    """Raise ValueError if a column has texts among fractions, such as >20: they would make all values classes."""
    column = texts(frame[name])
    numbers = needs("pandas", "tables").to_numeric(column, errors="coerce")
    wrong = column.notna() & numbers.isna()
    if (numbers % 1 > 0).any() and wrong.sum() <= numbers.notna().sum():
        refuse(frame, wrong, f"{name} is {{{name}}}, expected a number. Leave the field empty if it is unknown.")


class Targets:
    """The labels of a table's rows, in the form of `Preparation.source`.

    One column of texts or whole numbers has classes, in their order; other numbers are regression targets. Several
    columns have a target each, or a label each if all values are 0 and 1. A missing value is unknown.

    Args:
        names: the columns.
        classes: the classes as text, or None.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"fraud": ["yes", None, "no"]})
        >>> targets = Targets.fit(frame, ["fraud"])
        >>> targets.classes, targets(frame)
        (['no', 'yes'], tensor([ 1, -1,  0]))
    """

    def __init__(self, names: Sequence[str], classes: Sequence[str] | None = None) -> None:
        self.names, self.classes = list(names), None if classes is None else list(classes)

    @classmethod
    def fit(cls, frame: Any, names: Sequence[str], goal: str | None = None) -> Targets:
        """Return the labels of some columns; `goal` is classification, regression or None.

        Raises:
            ValueError: if several columns are not numbers, or targets are texts, some or all.
        """
        columns = [quantities(frame, name) for name in names]
        for name, (values, _) in zip(names, columns, strict=True):
            if values is None and goal != "classification":
                _check_numbers(frame, name)
        if len(names) > 1 or goal == "regression":
            for name, (values, form) in zip(names, columns, strict=True):
                if values is None or form:
                    raise ValueError(
                        f"{file_of(frame)}: {name} has values such as {frame[name].dropna().iloc[0]!r}, expected "
                        f"numbers{'' if len(names) == 1 else ' in each of several targets'}."
                    )
            return cls(names)
        ((values, form),) = columns
        if values is not None and form:
            raise ValueError(f"{file_of(frame)}: {names[0]} has dates, expected classes or numbers.")
        if values is not None and goal != "classification":
            known = values[~np.isnan(values)]
            if (known != known.round()).any():
                return cls(names)
        found = texts(frame[names[0]]).dropna().unique().tolist()
        try:
            found.sort(key=float)
        except ValueError:
            found.sort()
        return cls(names, found)

    def note(self, y: Tensor, item: str) -> str:
        """Return a clause on the classes in y; "" without classes."""
        if self.classes is None:
            return ""
        counts = y[y >= 0].bincount(minlength=len(self.classes)).tolist()
        shown = [f"{name} ({count:,})" for name, count in zip(self.classes[:8], counts, strict=False)]
        shown += [f"{len(self.classes) - 8} others"] if len(self.classes) > 8 else []
        shown += [f"unknown ({unknown:,})"] if (unknown := int((y < 0).sum())) else []
        are_many = len(self.classes) > 20 and all(name.removeprefix("-").isdecimal() for name in self.classes)
        hint = f". If they are numbers to predict, choose task={item}_regression" if are_many else ""
        return f"{self.names[0]} has the classes {', '.join(shown)}{hint}"

    @classmethod
    def like(cls, source: Mapping[str, Any], names: Sequence[str]) -> Targets:
        """Return the labels with the classes of an earlier task, from its `source`.

        Raises:
            ValueError: if it has other columns.
        """
        target = source.get("target") or {"names": ["links"]}
        if [*names] != [*target["names"]]:
            raise ValueError(
                f"The target is {' and '.join(names)}, but the earlier run predicts {' and '.join(target['names'])}. "
                "Choose the same."
            )
        return cls(target["names"], target["classes"])

    def __call__(self, frame: Any) -> Tensor:
        """Return the labels of the rows of a table: classes `[n]`, -1 where unknown, or numbers `[n, K]`, NaN where.

        Warns of classes that training did not have, which are unknown.
        """
        if self.classes is None:
            columns = [quantities(frame, name, "")[0] for name in self.names]
            return torch.from_numpy(np.stack(columns, 1))
        pd = needs("pandas", "tables")
        column = texts(frame[self.names[0]])
        codes = pd.Index(self.classes).get_indexer(column)
        other = column[(codes < 0) & column.notna().to_numpy()]
        if len(other):
            warnings.warn(
                f"{file_of(frame)}: {self.names[0]} has {len(other):,} values that are not a class of the training, "
                f"such as {other.iloc[0]!r}. They count as unknown.",
                stacklevel=4,
            )
        return torch.from_numpy(codes.astype(np.int64))
