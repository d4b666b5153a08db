from __future__ import annotations

from pathlib import Path

import pytest

from gat_pyg.data import tables
from gat_pyg.data.tables.files import read_table

TABLES = {  # every cell is text
    "id,a,b\n1,2,x\n2,,y\n": {"id": ["1", "2"], "a": ["2", None], "b": ["x", "y"]},
    "id;a\n1;2,5\n\n;\n2;3\n": {"id": ["1", "2"], "a": ["2,5", "3"]},
    "id,a\n007,true\n8,\n": {"id": ["007", "8"], "a": ["true", None]},
    'id\ta,\n"N\tA"\tNA\n\u00e4\tb\n': {"id": ["N\tA", "\u00e4"], "a,": ["NA", "b"]},
    'id, a\n1, "x, y"\n 2,5" of z\n': {"id": ["1", "2"], "a": ["x, y", '5" of z']},
    'id,a\n1,"the ""old"" town\nhall"\n': {"id": ["1"], "a": ['the "old" town\nhall']},
    "a b  c\n1  2 3\n": {"a": ["1"], "b": ["2"], "c": ["3"]},
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_are_read_as_they_are_written(tmp_path, text):
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252"):
        (tmp_path / "nodes.csv").write_text(text, encoding=encoding, newline="")
        table = read_table(tmp_path / "nodes.csv")
        assert table.astype(object).where(table.notna(), None).to_dict("list") == TABLES[text]
        is_noted = encoding == "cp1252" and not text.isascii()
        assert table.attrs["notes"] == ["nodes.csv is not UTF-8 and was read as Windows-1252"] * is_noted


def test_each_broken_table_is_named_with_its_row_and_column(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from broken_tables import broken_tables

    for name, (files, message) in broken_tables().items():
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError) as error:
            tables(*(tmp_path / file for file in files), "fraud")
        assert message in str(error.value), name
