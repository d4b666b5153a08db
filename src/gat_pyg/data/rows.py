"""Later data of a run: the graphs and the names of their rows, from files of the same form as the run's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from ..tasks.preparation import Preparation
from .arrays.from_pyg import FILES
from .molecules.smiles import MOLECULES
from .reader import Reader, Rows
from .tables.later import TABLES

READERS = {name: reader for reader in (FILES, TABLES, MOLECULES) for name in reader.targets}


def reader_of(source: Mapping[str, Any] | None) -> Reader:
    """Return the reader of data by `Task.source`: that of files of graphs for data that are no file of the user."""
    return READERS.get(str((source or {}).get("_target_")), FILES)


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
    return reader_of(preparation.source).reads(preparation.source or {}, data)


def column_name(source: Mapping[str, Any] | None, key: str, column: int) -> str:
    """Return the name of a column of x or edge_attr: of molecules PyG's, else its number.

    Example:
        >>> column_name(None, "x", 3), column_name({"_target_": "gat_pyg.data.smiles"}, "edge_attr", 0)
        ('column 3 of x', 'bond_type of edge_attr')
    """
    names = reader_of(source).columns
    return f"{names[key][column] if names else f'column {column}'} of {key}"
