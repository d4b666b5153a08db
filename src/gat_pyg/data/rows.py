"""Later data of a run: the graphs and the names of their rows, from files of the same form as the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from ..tasks.preparation import Preparation
from .arrays.detection import check_kind, plain
from .arrays.formats import graphs_in, read
from .arrays.from_pyg import split_graphs
from .molecules.smiles import NAMES_OF_COLUMNS, molecules_of
from .tables.tables import rows_of


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


def _of_tables(source: Mapping[str, Any], data: Any) -> Rows:
    graph, *rest = rows_of(source, data)
    return Rows([graph], *rest)


def _of_molecules(source: Mapping[str, Any], data: Any) -> Rows:
    return Rows(*molecules_of(source, data))


READERS: dict[str, Callable[[Mapping[str, Any], Any], Rows]] = {  # by `source["_target_"]`; they take source and data
    "gat_pyg.data.tables": _of_tables,
    "gat_pyg.data.smiles": _of_molecules,
}


def read_rows(preparation: Preparation, data: Any = None) -> Rows:
    """Read data of the form that a run was trained on: new ids, and another order of columns or rows, are fine.

    Args:
        preparation: preparation of the run.
        data: the path of a file, several paths, frames, a graph, or a list or data set of graphs; None for the files
            that the run was trained on.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or it is of another form.

    Example:
        >>> import torch
        >>> rows = read_rows(Preparation(1, None), Data(torch.ones(2, 1), torch.tensor([[0], [1]])))
        >>> rows.graphs, rows.ids
        ([Data(x=[2, 1], edge_index=[2, 1])], {})
    """
    if isinstance(data, Data):
        return Rows(data.to_data_list() if isinstance(data, Batch) else [data], {})
    if isinstance(data, Dataset) or (isinstance(data, (list, tuple)) and all(isinstance(item, Data) for item in data)):
        return Rows(list(data), {})  # type: ignore[arg-type]
    source = preparation.source or {}
    target = str(source.get("_target_"))
    if target in READERS:
        return READERS[target](source, data)
    data = source.get("path") if data is None else data
    if data is None:
        raise ValueError("The run does not name files of its data. Give the data: a path, or graphs.")
    paths = list(data) if isinstance(data, (list, tuple)) else [data]
    return Rows([*chain(*map(_graphs, paths))], {})


def column_name(source: Mapping[str, Any] | None, key: str, column: int) -> str:
    """Return the name of a column of x or edge_attr: of molecules PyG's, else its number.

    Example:
        >>> column_name(None, "x", 3), column_name({"_target_": "gat_pyg.data.smiles"}, "edge_attr", 0)
        ('column 3 of x', 'bond_type of edge_attr')
    """
    is_of_molecules = (source or {}).get("_target_") == "gat_pyg.data.smiles"
    return f"{NAMES_OF_COLUMNS[key][column] if is_of_molecules else f'column {column}'} of {key}"


def _graphs(path: str | Path) -> list[Data]:
    """Return the graphs in a file that `from_file` reads; labels need not be there."""
    path, content = read(path)
    graphs = [*chain(*split_graphs(graphs_in(content, path, labelled=False), None, path.stem))]
    for graph in graphs:
        check_kind(graph, path.stem)
    return [plain(graph, path.stem, len(graphs) > 1) for graph in graphs]
