"""Splits of a table's rows by one of its columns: the names of the splits, or a time."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tasks.objective import MASKS
from .columns import Column, kind_of, quantities
from .files import check_columns, file_of, refuse, shown
from .roles import words_of

MOST_FOLDS = 20  # values of a column of splits
NAMES = {  # of splits
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("val", "valid", "validation", "dev"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}


def masks_of_rows(
    frame: Any, known: Tensor, column: str | None, time: str | None, val: int | None, test: int | None, seed: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the masks of the labelled rows by a column or a time, and the arguments that they depend on, if any."""
    if column is not None:
        return masks_by_column(frame, column, known, val, seed)
    return masks_by_time(frame, time, known, val, test) if time is not None else ({}, ())


def masks_by_column(
    frame: Any, name: str, known: Tensor, val: int | None = None, seed: int = 0
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the masks of the labelled rows by the split that a column names, and the arguments that they depend on.

    The names are train, val and test, or others such as validation, in any case; empty rows are in no split. Without
    rows for validation, `val` of those for training are drawn, a quarter by default.

    Raises:
        ValueError: if there is no such column, it has other values, or no labelled row for training or test.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"part": ["train", "valid", "test", None]})
        >>> masks_by_column(frame, "part", torch.tensor([True, True, True, True]))[0]["val_mask"]
        tensor([False,  True, False, False])
    """
    check_columns([frame], [name])
    column = Column(frame, name)
    part = column.of_rows([NAMES.get(text.lower(), -2) for text in column.texts], -1)
    refuse(frame, part == -2, f"{name} is {{{name}}}, expected train, val, test or nothing.")
    number = torch.from_numpy(part)
    masks = {key: (number == split) & known for split, key in enumerate(MASKS)}
    drawn: tuple[str, ...] = ("column",)
    if not (number == 1).any():
        rows = masks["train_mask"].nonzero()[:, 0]
        size = len(rows) // 4 if val is None else val
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:size]]
        masks["val_mask"][rows], masks["train_mask"][rows] = True, False
        drawn = ("column", "val", "seed")
    return _checked(masks, f"{file_of(frame)}: {name}", "name rows for train and test"), drawn


def masks_by_time(
    frame: Any, name: str, known: Tensor, val: int | None = None, test: int | None = None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the masks of the labelled rows by a time, and the arguments that they depend on.

    The latest rows are for the test, those before for validation, the earliest for training: `val` and `test` rows, a
    fifth each by default. Rows of the same time are in the same split, so the sizes may differ. Rows without a time are
    in no split.

    Raises:
        ValueError: if there is no such column, it holds neither dates nor numbers, or a split would be empty.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"year": [2003, 2001, 2002, 2004]})
        >>> masks_by_time(frame, "year", torch.tensor([True, True, True, True]))[0]["test_mask"]
        tensor([False, False, False,  True])
    """
    times = times_of(frame, name)
    known = known & torch.from_numpy(~np.isnan(times))
    order = np.sort(times[known.numpy()])
    val, test = (max(len(order) // 5, 1) if size is None else size for size in (val, test))
    place = f"{file_of(frame)}: {name}"
    if not 0 < val + test < len(order):
        raise ValueError(
            f"{place} has a time in {len(order)} labelled rows, expected more than val={val} and test={test} of them."
        )
    first = {"val_mask": order[-val - test], "test_mask": order[len(order) - test] if test else np.inf}
    time = torch.tensor(times)
    masks = {
        "train_mask": known & (time < first["val_mask"]),
        "val_mask": known & (time >= first["val_mask"]) & (time < first["test_mask"]),
        "test_mask": known & (time >= first["test_mask"]),
    }
    return _checked(masks, place, "have more different times, or val and test other sizes"), ("time", "val", "test")


def times_of(frame: Any, name: str) -> Any:
    """Return the numbers of a column of dates or numbers, NaN where it is empty."""
    check_columns([frame], [name])
    column = Column(frame, name)
    kind, form = kind_of(column, slice(None))
    if kind == "category" or (kind == "date" and not form):
        place = f"{file_of(frame)}: {name} has values such as {shown([*column.texts, 'nothing'][0])}"
        raise ValueError(f"{place}, expected dates or numbers. Write dates as 2021-12-31.")
    return quantities(column, kind, form, "")


NO_FEATURE = "It is no feature, unless dataset.categories has it; dataset.ignore drops it"


def warn_of_splits(frame: Any, names: Collection[str], effect: str = NO_FEATURE) -> list[str]:
    """Return those of some columns that look like a split of the rows, after a warning: they are no features.

    These are columns of train, val and test, whatever their names, masks such as `train_mask` with two values, and
    small numbers in a column called split or fold.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"part": ["train", "test"], "Val mask": [0, 1], "fold": [0, 4], "age": [1, 0]})
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     warn_of_splits(frame, frame.columns)
        ['part', 'Val mask', 'fold']
    """
    splits, masks, folds, first = [], [], [], frame.head(1000)
    for name in names:
        words = {*words_of(name)}
        if any(len((column := Column(rows, name)).texts) > MOST_FOLDS for rows in (first, frame)):
            continue
        values = {text.lower() for text in column.texts}
        if {0, 2} & (parts := {NAMES.get(value, -1) for value in values}) and len(parts) > 1 and -1 not in parts:
            splits.append(name)
        elif words & NAMES.keys() and words & {"mask", "is", "in", "idx"} and len(values) <= 2:
            masks.append(name)
        elif words & {"split", "fold", "folds", "kfold"} and all(map(str.isdecimal, column.keys)):
            folds.append(name)
    for name in splits:
        _warn(frame, f"{name} looks like a split: split.column={name}", effect)
    if masks:
        names = f"{', '.join(masks)} look{'s' * (len(masks) == 1)} like a split"
        _warn(frame, f"{names}: write a column with train, val or test, and choose it by split.column", effect)
    for name in folds:
        text = f"{name} looks like the folds of a split: write a column with train, val or test for one of them"
        _warn(frame, text, effect)
    return [*splits, *masks, *folds]


def _warn(frame: Any, text: str, effect: str) -> None:
    warnings.warn(f"{file_of(frame)}: {text}. {effect}.", stacklevel=4)


def _checked(masks: dict[str, Tensor], place: str, expected: str) -> dict[str, Tensor]:
    for key in MASKS:
        if not masks[key].any():
            raise ValueError(f"{place} gives {key.removesuffix('_mask')} no labelled row. It should {expected}.")
    return masks
