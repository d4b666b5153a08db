"""No leak from test rows: other targets and features of theirs leave the trained weights the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import gat_pyg
from gat_pyg.sweeps import candidates
from tests.commands import Command, runs, weights

SIZES = {"links": 200, "molecules": 40, "graph classes": 40, "series": 20}  # rows; of nodes 60
NODES = ("node classes", "quantities of nodes")
CHOSEN = "chosen by validation"  # graph columns and known labels
FEATURES = [  # kinds of data with a setting; other features and targets of the test rows
    *((kind, "") for kind in (*NODES, "edge classes", "links", "graph classes", "series")),
    *((kind, "encoding=columns") for kind in ("node classes", "edge classes")),
    *(("molecules", "dataset.descriptors=true"), ("quantities of nodes", CHOSEN)),
]
TARGETS = [(kind, "training.label_rate=0.8") for kind in NODES]  # other targets, which leave the predictions too


@pytest.fixture(scope="module")
def tables() -> Iterator[Any]:
    """The benchmark of leaks, which has the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import tables

        yield tables


@pytest.mark.filterwarnings("ignore:.*(not a category|no training molecule|outside)")
@pytest.mark.parametrize(
    ("kind", "setting", "features"), [*((*case, True) for case in FEATURES), *((*case, False) for case in TARGETS)]
)
def test_test_rows_do_not_reach_the_training(
    kind: str, setting: str, features: bool, tables: Any, command: Command, tmp_path: Path, monkeypatch: Any
) -> None:
    case, trained, predicted, chosen = tables.CASES[kind], [], [], []
    if setting == CHOSEN:
        for name, value in {"NODES": 60, "LABELS": 1, "EPOCHS": 1, "MOST": 2}.items():
            monkeypatch.setattr(candidates, name, value)
    for name in ("plain", "changed"):
        files = case.files(np.random.default_rng(0), SIZES.get(kind, 60))
        if name == "changed":
            case.change(files, np.random.default_rng(1), features)
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        tables.save_files(files, folder)
        settings = ["runs=1"] if setting == CHOSEN else setting.split()
        command(*case.settings, *settings, "outputs=outputs", "baselines=false", "training.max_epochs=3")
        chosen.append([file.read_text() for file in Path("outputs/chosen").glob("*")])
        (run,) = runs()
        trained.append(weights(run))
        predicted.append(None if features else gat_pyg.predict(run).select_dtypes("number"))
    assert chosen[0] == chosen[1] and bool(chosen[0]) == (setting == CHOSEN)  # the same scores, to the digit
    plain, changed = trained
    assert {key for key, values in plain.items() if not torch.equal(values, changed[key])} == set()
    if not features:
        pd.testing.assert_frame_equal(*predicted, check_exact=True)
