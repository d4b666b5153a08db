"""What `gat-pyg doctor` says of an installation."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import numpy as np
import pytest

import gat_pyg
from gat_pyg import files
from gat_pyg.command import doctor
from gat_pyg.files import unmet

ROOT = Path(__file__).parents[2]


def test_doctor_names_what_is_missing_and_checks_the_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs = ["numpy>=99", "nowhere>=2; extra == 'tables'", "numpy; extra == 'tables'", "nowhere; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*needs, "numpy>=99; extra == 'search'"])
    monkeypatch.setattr(doctor, "unmet", unmet.__wrapped__)
    monkeypatch.setenv("GAT_PYG_DATA", str(tmp_path))
    (tmp_path / "Planetoid").mkdir()
    lines = gat_pyg.doctor()
    assert "torch " in lines["versions"] and "cores" in lines["devices"]
    assert lines["check on cpu"].startswith("right: GATConv differs from the reference by")
    assert lines["data"].startswith(f"{tmp_path}: Planetoid (")
    extras = {subject: text for subject, text in lines.items() if subject.startswith("extra")}
    install = "python -m pip install 'gat_pyg["
    assert extras == {
        "extra search": f"a search by Optuna; needs numpy>=99, but {np.__version__} is installed: {install}search]'",
        "extra tables": f"CSV, TSV and Parquet files; needs nowhere>=2, which is not installed: {install}tables]'",
    }
    monkeypatch.setattr(files, "unmet", unmet.__wrapped__)
    with pytest.raises(ImportError, match=r"^This needs numpy>=99, but .* is installed\. Run: .* 'gat_pyg\[search\]'$"):
        files.needs("numpy", "search")
    monkeypatch.setattr(doctor, "LIMIT", -1.0)
    assert doctor._check("cpu").startswith("WRONG, please report it")


def test_every_extra_has_its_words() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", section, re.MULTILINE)} - {"dev", "docs"}
    assert extras == {*doctor.EXTRAS}
    install = (ROOT / "docs" / "install.md").read_text()
    assert extras == {*re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE)}
