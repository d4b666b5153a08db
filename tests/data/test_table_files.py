from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from gat_pyg.data import tables
from gat_pyg.data.tables.files import read_table

TABLES = {
    "id,a,b\n1,2,x\n2,,y\n": {"id": [1, 2], "a": [2, None], "b": ["x", "y"]},
    "id;a\n1;2,5\n\n;\n2;3\n": {"id": [1, 2], "a": [2.5, 3]},
    "id,a\n007,true\n8,\n": {"id": ["007", "8"], "a": ["true", None]},
    'id\ta,\n"N\tA"\tNA\n\u00e4\tb\n': {"id": ["N\tA", "\u00e4"], "a,": [None, "b"]},
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_are_read_as_they_are_written(tmp_path, text):
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "nodes.csv").write_text(text, encoding=encoding, newline="")
        table = read_table(tmp_path / "nodes.csv", ["id"])
        assert table.astype(object).where(table.notna(), None).to_dict("list") == TABLES[text]


def test_row_numbers_without_a_name_are_no_features(tmp_path):
    nodes = pd.DataFrame({"id": list("abcdefgh"), "x": range(8), "y": ["y", "no"] * 4})
    edges = pd.DataFrame({"A": list("abcdefg"), "B": list("bcdefgh"), "w": range(7)})
    for name, frame in {"nodes.csv": nodes, "edges.csv": edges}.items():
        frame.to_csv(tmp_path / name)
    task = tables(tmp_path / "nodes.csv", tmp_path / "edges.csv", "y")
    assert torch.equal(task.train[0].x, tables(nodes, edges, "y").train[0].x)
    assert task.edge_dim == 2 and task.train[0].edge_index[:, 0].tolist() == [0, 1]


def test_each_broken_table_is_named_with_its_row_and_column(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from broken_tables import broken_tables

    for name, (files, message) in broken_tables().items():
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError) as error:
            tables(*(tmp_path / file for file in files), "fraud")
        assert message in str(error.value), name
