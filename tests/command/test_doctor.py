"""What `gat-pyg doctor` says of an installation."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import gat_pyg
from gat_pyg import files
from gat_pyg.command import doctor
from gat_pyg.files import unmet

ROOT = Path(__file__).parents[2]


def test_doctor_checks_the_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GAT_PYG_DATA", str(tmp_path))
    (tmp_path / "Planetoid").mkdir()
    lines = gat_pyg.doctor()
    assert "torch " in lines["versions"] and "cores" in lines["devices"]
    assert lines["check on cpu"].startswith("right: GATConv differs from the reference by")
    assert lines["data"].startswith(f"{tmp_path}: Planetoid (")
    monkeypatch.setattr(doctor, "LIMIT", -1.0)
    assert doctor._check("cpu").startswith("WRONG, please report it")


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=99", "nowhere>=2; extra == 'tables'", "numpy; extra == 'tables'", "nowhere; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*needs, "numpy>=99; extra == 'search'"])
    monkeypatch.setattr(files, "unmet", unmet.__wrapped__)
    assert files.unmet("tables") == {"nowhere": "nowhere>=2, which is not installed"}
    with pytest.raises(ImportError, match=r"^This needs numpy>=99, but .* is installed\. Run: .* 'gat_pyg\[search\]'$"):
        files.needs("numpy", "search")


def test_every_extra_has_its_words() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", section, re.MULTILINE)} - {"dev", "docs"}
    install = (ROOT / "docs" / "install.md").read_text()
    assert extras == {*re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE)}
