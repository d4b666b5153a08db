"""Ids of nodes as text: 7.0 is 7 where all ids are whole numbers, and 1.10 is not 1.1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...files import needs
from .files import refuse, shown, where

LIMIT = 2**53  # floats do not tell larger whole numbers apart
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]{0,15}))(\.0*)?")
_LARGE = re.compile(r"[0-9]{16,}\.0*|[0-9]+\.[0-9]*[eE]\+?[0-9]+")  # of a float


class Ids(NamedTuple):
    """The ids in a column: the distinct ones as text, and the position of each row's among them."""

    frame: Any
    name: str
    codes: Any
    texts: list[str]

    @property
    def of_rows(self) -> Any:
        """The id of each row."""
        return np.array(self.texts, object)[self.codes]


def read_ids(columns: Sequence[tuple[Any, str]], remedy: str, known: Iterable[str] = ()) -> list[Ids]:
    """Return the ids in columns of tables, which are compared with each other and with `known` as they are written.

    If all of them are whole numbers below 2^53, as 7.0 in a column with empty fields, the point is left out.

    Raises:
        ValueError: for an empty id, one with a space at an end, or a large number that a float has rounded.
    """
    result = []
    for frame, name in columns:
        codes, values = needs("pandas", "tables").factorize(frame[name])
        texts = [*map(str, values.tolist())]
        empty = np.array([*(not text.strip() for text in texts), True])[codes]
        refuse(frame, empty, f"{name} is empty. {remedy}")
        for problem, wrong in (
            ("has a space at an end. Delete it: ids are compared as they are written.", lambda t: t != t.strip()),
            (
                "was written as a float, which rounds such numbers. Save the ids as text, or as whole numbers.",
                lambda t: _LARGE.fullmatch(t) and float(t) >= LIMIT,
            ),
        ):
            refuse(frame, np.array([bool(wrong(text)) for text in texts])[codes], f"{name} {{{name}}} {problem}")
        result.append(Ids(frame, name, codes, texts))
    every = [*(text for ids in result for text in ids.texts), *known]
    if any("." in text for text in every):
        wholes = [_WHOLE.fullmatch(text) for text in every]
        if all(whole is not None and abs(int(whole[1])) < LIMIT for whole in wholes):
            return [ids._replace(texts=[text.partition(".")[0] for text in ids.texts]) for ids in result]
    return result


def check_distinct(ids: Ids) -> Any:
    """Return the ids of a table of nodes as a pandas Index.

    Raises:
        ValueError: if two rows have the same.
    """
    index, frame, column = needs("pandas", "tables").Index(ids.of_rows, dtype=object), ids.frame, ids.name
    again = index.duplicated()
    if again.any():
        first = where(frame, frame.index[int((index == index[again][0]).argmax())])
        refuse(frame, again, f"{column} {{{column}}} stands twice, first in {first}. Give each node one row.")
    return index


def positions(ends: Ids, index: Any, nodes: str) -> Any:
    """Return the position in `index` of the id of each row, int64; `nodes` is the name of the table of the index.

    Raises:
        ValueError: if an id is not there.
    """
    found = index.get_indexer(ends.texts)
    if (found < 0).any():
        unknown = ends.texts[int(np.argmax(found < 0))]
        column = ends.name
        similar = [id for id in index if _alike(id) == _alike(unknown)]
        hint = f"Did you mean {shown(similar[0])}?" if similar else "Add its row there, or leave the edge out."
        refuse(ends.frame, (found < 0)[ends.codes], f"{column} {{{column}}} is not in {nodes}. {hint}")
    return found.astype(np.int64)[ends.codes]


def _alike(id: str) -> str:
    return id.strip().casefold().lstrip("0").removesuffix(".0")


def presented(ids: Sequence[str], frame: Any = None, name: str = "") -> list[Any]:
    """Return the ids of rows for tables of predictions: as they are in the user's frame, numbers of a CSV file as such.

    >>> presented(["7", "8"]), presented(["7", "08"])
    ([7, 8], ['7', '08'])
    """
    are_texts = frame is not None and not frame.attrs.get("is_text", False) and frame[name].dtype.kind not in "iuf"
    are_numbers = not are_texts and all(_WHOLE.fullmatch(id) and "." not in id for id in ids)
    return [*map(int, ids)] if are_numbers else [*ids]
