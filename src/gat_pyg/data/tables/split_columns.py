"""Splits of a table's rows by one of its columns: the names of the splits, or a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tasks.objective import MASKS
from .columns import missing_column, quantities, texts
from .files import file_of, refuse

NAMES = {  # of splits
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("val", "valid", "validation", "dev"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}


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
    values = _column(frame, name)
    part = texts(values).str.strip().str.lower().map(NAMES)
    refuse(frame, part.isna() & values.notna(), f"{name} is {{{name}}}, expected train, val, test or nothing.")
    number = torch.tensor(part.fillna(-1).to_numpy(np.int64))
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
    values = _column(frame, name)
    times, _ = quantities(frame, name)
    if times is None:
        raise ValueError(
            f"{file_of(frame)}: {name} has values such as {values.dropna().iloc[0]!r}, expected dates or numbers."
        )
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


def _column(frame: Any, name: str) -> Any:
    if name not in frame.columns:
        raise missing_column([frame], name)
    return frame[name]


def _checked(masks: dict[str, Tensor], place: str, expected: str) -> dict[str, Tensor]:
    for key in MASKS:
        if not masks[key].any():
            raise ValueError(f"{place} gives {key.removesuffix('_mask')} no labelled row. It should {expected}.")
    return masks
