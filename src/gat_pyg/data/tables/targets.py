"""Labels in columns of tables: classes by value, several labels, or regression targets."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...tasks.objective import Objective, any_known
from ...tasks.objectives import objective_for
from .columns import MISSING, MOST, Column, check_cells, is_code, kind_of, number
from .files import file_of, refuse, shown

CLASSES = ("na", "none", "null")  # spellings of missing numbers that may well be the names of classes
POSITIVE = 0.3  # share of the training rows below which the first of two classes is the positive one


class Targets:
    """The labels of a table's rows, in the form of `Preparation.source`.

    One column of texts or whole numbers has classes, in their order, which are compared by value: 1.50 is 1.5. Other
    numbers are regression targets. Several columns have a target each, or a label each if all values are 0 and 1. An
    empty value is unknown.

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

    def __init__(self, names: Sequence[str], classes: Sequence[str] | None) -> None:
        self.names, self.classes = [*names], None if classes is None else [*classes]

    @classmethod
    def fit(
        cls, frame: Any, names: Sequence[str], goal: str | None = None, categories: Collection[str] = ()
    ) -> Targets:
        """Return the labels of some columns; `goal` is classification, regression or None.

        Args:
            frame: the table.
            names: the columns.
            goal: classification, regression, or None if the values show it.
            categories: columns with classes, whatever their values.

        Raises:
            ValueError: if several columns are not numbers, targets are texts, some or all, or a value may be either a
                class or unknown, such as `?`.

        Warns of classes that may be unknown labels, -1 and `unknown`.
        """
        columns = [Column(frame, name) for name in names]
        if len(columns) > 1 or goal == "regression":
            for column in columns:
                numbers_of(column, "in each of several targets" * (len(columns) > 1))
            return cls(names, None)
        (column,) = columns
        check_cells(column)
        if not (column.is_category or names[0] in categories) and _are_numbers(column, goal):
            values = column.numbers[~np.isnan(column.numbers)]
            if goal is None and (values != values.round()).any():
                return cls(names, None)
        spelt = dict(zip(column.keys, column.texts, strict=True))
        classes = [spelt[value] if value in ("True", "False") else value for value in spelt]
        are_texts = any(np.isnan(number(name)) for name in classes)
        return cls(names, sorted(classes) if are_texts else sorted(classes, key=float))

    def note(self, y: Tensor, item: str) -> str:
        """Return a clause on the classes in y; "" without classes."""
        if self.classes is None:
            return ""
        counts = y[y >= 0].bincount(minlength=len(self.classes)).tolist()
        classes = [f"{name} ({count:,})" for name, count in zip(self.classes[:8], counts, strict=False)]
        classes += [f"{len(self.classes) - 8} others"] if len(self.classes) > 8 else []
        classes += [f"unknown ({unknown:,})"] if (unknown := int((y < 0).sum())) else []
        are_many = len(self.classes) > 20 and all(name.removeprefix("-").isdecimal() for name in self.classes)
        classes[-1] += f"; average precision is that of {self.classes[1]}" if len(self.classes) == 2 else ""
        hint = f". If they are numbers to predict, choose task={item}_regression" if are_many else ""
        return f"{self.names[0]} has the classes {', '.join(classes)}{hint}"

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
        columns = [Column(frame, name) for name in self.names]
        if self.classes is None:
            return torch.from_numpy(np.stack([*map(numbers_of, columns)], 1))
        (column,) = columns
        codes, example = column.places(self.classes)
        if other := int((codes == -2).sum()):
            text = f"{file_of(frame)}: {self.names[0]} has {other:,} values that are not a class of the training"
            warnings.warn(f"{text}, such as {example}. They count as unknown.", stacklevel=4)
        return torch.from_numpy(codes.clip(-1))

    def warn_of_copies(self, frame: Any, names: Collection[str], y: Tensor, rows: Any) -> None:
        """Warn of columns that are the class wherever they have not their usual value, such as one kind of fraud.

        Args:
            frame: the table.
            names: columns that are features.
            y: classes of all rows, -1 where they are unknown.
            rows: mask of the training rows.
        """
        if self.classes is None or len(self.names) > 1:
            return
        labels = y.numpy()[rows]
        counts = np.bincount(labels[labels >= 0])
        surprise = -np.log(np.maximum(counts, 1) / counts.sum())  # of a class, by chance
        first = frame.head(1000)
        for name in names:
            if len(Column(first, name).texts) > MOST:
                continue
            values = Column(frame, name).places(self.classes)[0][rows]
            usual = np.bincount(values + 2).argmax() - 2
            others = (values != usual) & (labels >= 0)
            is_sure = surprise[labels[others]].sum() > np.log(1e6 * len(names))  # else words of one class are named
            if is_sure and (values == labels)[others].all():
                warnings.warn(
                    f"{file_of(frame)}: {name} equals {self.names[0]} in all {others.sum():,} training rows in which "
                    f"it has not its usual value. If it is a part of the label, leave it out: dataset.ignore=[{name}].",
                    stacklevel=4,
                )


class Labels(NamedTuple):
    """The labels of a table's rows, which are nodes or edges."""

    targets: Targets
    y: Tensor  # [n] or [n, K]
    objective: Objective

    @classmethod
    def fit(
        cls,
        frame: Any,
        item: str,
        goal: str | None,
        names: Sequence[str],
        categories: Collection[str],
        like: Mapping[str, Any] | None,
        name: str,
    ) -> Labels:
        """Return the labels in columns of nodes or edges, with the classes of an earlier `Task.source` if any.

        Raises:
            ValueError: if none is known, a value cannot be meant, or the earlier task predicts something else.
        """
        targets = Targets.fit(frame, names, goal, categories) if like is None else Targets.like(like, names)
        y = targets(frame)
        if not any_known(y).any():
            raise ValueError(f"{file_of(frame)}: {' and '.join(names)} is empty in all rows, expected known values.")
        kind = objective_for([y], item, goal)
        (y,) = kind.convert([y], name)
        objective = kind.for_labels([y], name)
        if like is not None and targets.classes is not None:
            objective = kind(len(targets.classes))
        return cls(targets, y, objective)

    def with_positive(self, positive: str | None, rows: Tensor) -> Labels:
        """Return the same labels with the positive one of two classes as class 1.

        Args:
            positive: its name; None: the second, or of classes with names the first if it has few of the training rows.
            rows: a mask of the training rows.

        Raises:
            ValueError: if there are not two classes, or none has this name.
        """
        classes, column = self.targets.classes or [], " and ".join(self.targets.names)
        if len(classes) != 2:
            if positive is None:
                return self
            raise ValueError(f"dataset.positive is {positive}, but {column} has not two classes. Leave it out.")
        if positive is not None and str(positive) not in classes:
            raise ValueError(f"dataset.positive is {positive} of {column}, expected {' or '.join(classes)}.")
        have_names = all(np.isnan(number(name)) for name in classes) and {*classes} != {"False", "True"}
        is_rare = have_names and float((self.y[rows & (self.y >= 0)] == 0).double().mean()) < POSITIVE
        if not (is_rare if positive is None else str(positive) == classes[0]):
            return self
        targets = Targets(self.targets.names, classes[::-1])
        return self._replace(targets=targets, y=torch.where(self.y < 0, self.y, 1 - self.y))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs: of classes, labels or targets."""
        return tuple(self.targets.classes or self.targets.names)

    def describe(self) -> dict[str, Any]:
        """Return plain data by which `gat_pyg.data.tables.later` reads later labels."""
        item, goal = self.objective.item, self.objective.goal
        return {"item": item, "goal": goal, "names": self.targets.names, "classes": self.targets.classes}


def numbers_of(column: Column, where: str = "") -> Any:
    """Return the targets of the rows, NaN where unknown, float64 `[n]`; true and false are 1 and 0.

    Raises:
        ValueError: if a value is no finite number.
    """
    frame, name = column.frame, column.name
    check_cells(column)
    values = column.numbers
    if column.kind == "text" and {"True", "False"} & {*column.keys}:
        bools = {"True": 1.0, "False": 0.0}
        values = column.of_rows([bools.get(value, number(value)) for value in column.keys], np.nan)
    if column.kind == "date" or (np.isnan(values).all() and column.texts):
        example = f"{file_of(frame)}: {name} has values such as {shown(column.texts[0])}, expected numbers"
        raise ValueError(f"{f'{example} {where}'.strip()}.")
    refuse(frame, np.isnan(values) & (column.kind == "text") & (column.codes >= 0), _question(column))
    refuse(frame, np.isinf(values), f"{name} is {{{name}}}, expected a finite number. {_UNKNOWN}.")
    return values


_UNKNOWN = "Leave the field empty if it is unknown"


def _question(column: Column, text: str = "?", problem: str = "expected a number") -> str:
    name = column.name
    answers = f"list it: dataset.missing=[{text}]; if it is a class, choose dataset.categories=[{name}]"
    return f"{name} is {{{name}}}, {problem}. {_UNKNOWN}, or {answers}."


def _are_numbers(column: Column, goal: str | None) -> bool:
    """Return True for a column of numbers, False for one of texts.

    Raises:
        ValueError: if it has dates, or a text that may be a class or an unknown label.

    Warns of -1 among whole numbers from 0, and of texts such as `unknown`: both are labels in some data. An error would
    refuse labels such as -1, 0 and 1, which are as common.
    """
    frame, name, counts = column.frame, column.name, column.counts(slice(None))
    numbers = {text for text in counts if not np.isnan(number(text))} if not any(map(is_code, counts)) else set()
    if column.kind == "date" or (not numbers and kind_of(column, slice(None))[0] == "date"):
        raise ValueError(f"{file_of(frame)}: {name} has dates, expected classes or numbers.")
    others = counts.keys() - numbers
    spelt = {text for text in others if text.casefold() in MISSING}
    has_names = any(text[0].isalnum() for text in others)
    wrong = {text for text in spelt if numbers or (has_names and not text[0].isalnum())}  # ? is no name
    if goal is None and 2 * sum(map(counts.__getitem__, numbers)) >= sum(counts.values()):
        wrong = others
    for text in wrong:
        question = _question(column, text, "expected a number" if numbers else "which may be a missing value")
        column.refuse(wrong, question)
    doubtful = {text for text in spelt if text[0].isalnum() and text.casefold() not in CLASSES}
    are_whole = all(number(text) % 1 == 0 for text in counts)
    if not others and are_whole and "-1" in column.keys and {*column.keys} != {"-1", "1"}:
        doubtful = {column.texts[column.keys.index("-1")]}
    for text in doubtful:
        warnings.warn(
            f"{file_of(frame)}: {name} has the class {shown(text)} in {counts[text]:,} rows. If their labels are "
            f"unknown, choose dataset.missing=[{text}]; if it is a class, dataset.categories=[{name}].",
            stacklevel=5,
        )
    return bool(numbers) and not others
