"""The record of a reader of users' files, the rows that it returns, and the name of its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch_geometric.data import Data


class Rows(NamedTuple):
    """Graphs to predict, as `gat_pyg.predict` takes them, and the columns that name the predicted rows.

    `y` of a graph has the labels that are known, in the run's coding: -1 or NaN where they are not. The rows are the
    nodes, the pairs of `edge_label_index` or the graphs, in order; `ids` is empty if they have no names but numbers.
    They are the rows `numbers` of `table`, the user's frame, by default all; `left_out` has the reasons for others.
    """

    graphs: list[Data]
    ids: dict[str, Sequence[Any]]
    table: Any = None
    numbers: Sequence[int] | None = None
    left_out: Mapping[int, str] = {}


@dataclass(frozen=True)
class Reader:
    """A reader of users' files: `gat_pyg.data.rows.READERS` lists all of them.

    Attributes:
        targets: names of its function as `_target_` in settings; the first one is also that in `Task.source`.
        paths: the arguments of the function that hold paths of the user's files.
        reads: `reads(source, data)` returns the rows of later data, or those of the run's own files if `data` is None.
        columns: names of the columns of x and edge_attr, if they have names.
        node_names: `node_names(graph)` returns the names of the nodes, if the graph has them.
    """

    targets: tuple[str, ...]
    paths: tuple[str, ...]
    reads: Callable[[Mapping[str, Any], Any], Rows]
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    node_names: Callable[[Data], list[str]] | None = None


def name_of_file(path: str | Path | Sequence[str | Path]) -> str:
    """Return the name of a data set in results, by its file, the first one of several.

    It is the stem; that of the folder for a table of nodes or edges that is called so.

    >>> name_of_file("fraud/nodes.csv"), name_of_file(["2024.csv", "2025.csv"])
    ('fraud', '2024')
    """
    file = Path(path if isinstance(path, (str, Path)) else path[0])
    return file.absolute().parent.name or file.stem if file.stem in ("nodes", "edges") else file.stem
