"""Molecules from tables: their graphs by PyG, splits by hand and by loops, and what is wrong with a row."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.utils import from_smiles

import gat_pyg.run
from gat_pyg.data import smiles
from gat_pyg.data.molecules.descriptors import descriptors, fingerprints
from gat_pyg.data.rows import read_rows
from gat_pyg.data.splits import split_by_group
from gat_pyg.tasks.graphs import GraphLabels, GraphMultiLabels
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.targets import GraphTargets
from gat_pyg.trained.predict import predict, selected, table
from gat_pyg.trained.trained import Trained
from tests.commands import result_of

BENZENES = ["c1ccccc1", "Cc1ccccc1", "Oc1ccccc1", "Nc1ccccc1", "Clc1ccccc1"]
PYRIDINES = ["c1ccncc1", "Cc1ccncc1"]
CHAINS = ["CCO", "CC(=O)[O-].[Na+]", "C[C@H](N)C(=O)O", "C/C=C/C"]  # a salt, a stereocentre, a double bond's side
MOLECULES = [*BENZENES, *CHAINS, *PYRIDINES, "C1CCCCC1"]


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"id": range(len(MOLECULES)), "SMILES": MOLECULES, **columns})


def y(K: int = 1) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(MOLECULES), K)).round(2)


def names(task: Any) -> list[list[str]]:
    return [[data.smiles for data in task.graphs(split)] for split in SPLITS]


def test_graphs_are_those_of_pyg() -> None:
    task = smiles(frame(y=y()[:, 0]), "y")
    assert sorted(chain(*names(task))) == sorted(MOLECULES)
    assert [len(part) for part in names(task)] == [8, 2, 2]
    for data in task.train:
        expected = from_smiles(data.smiles)
        assert all(torch.equal(data[key], expected[key].float()) for key in ("x", "edge_attr"))
        assert torch.equal(data.edge_index, expected.edge_index)
        assert float(data.y) == pytest.approx(y()[MOLECULES.index(data.smiles), 0])


def test_scaffolds_are_divided_by_their_size() -> None:
    task = smiles(frame(y=y()[:, 0]), "y", scaffold=True, val=4, test=3)
    assert names(task) == [BENZENES, CHAINS, [*PYRIDINES, "C1CCCCC1"]]
    assert task.split_arguments == ("scaffold", "val", "test")
    with pytest.raises(ValueError, match=r"gives 11 / 0 / 1 molecules .* since 5 of 12 .* or split\.scaffold=false"):
        smiles(frame(y=y()[:, 0]), "y", scaffold=True, val=0, test=1)


def deepchem(groups: list[int], train_size: int, val_size: int) -> list[list[int]]:
    """The loop of DeepChem's ScaffoldSplitter and of OGB's script."""
    sets: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        sets.setdefault(group, []).append(row)
    ordered = [rows for _, rows in sorted(sets.items(), key=lambda item: (len(item[1]), item[1][0]), reverse=True)]
    train: list[int] = []
    val: list[int] = []
    test: list[int] = []
    for rows in ordered:
        if len(train) + len(rows) > train_size:
            if len(train) + len(val) + len(rows) > train_size + val_size:
                test += rows
            else:
                val += rows
        else:
            train += rows
    return [sorted(train), sorted(val), sorted(test)]


def test_the_split_by_scaffolds_is_deepchems() -> None:
    for seed in range(20):
        groups = np.random.default_rng(seed).zipf(1.6, 60).tolist()
        largest = max(groups.count(group) for group in groups)
        val = test = 6 if largest <= 48 else (60 - largest) // 2
        assert split_by_group(groups, val, test) == deepchem(groups, 60 - val - test, val)
    assert split_by_group([0] * 8 + [1, 2], 2, 2) == [[*range(8)], [], [8, 9]]  # where they would test on the largest


@pytest.mark.parametrize(
    ("columns", "target", "options", "objective", "coded"),
    [
        ({"y": y()[:, 0]}, "y", {}, GraphTargets(1), None),
        ({"y": range(12)}, "y", {"task": "graph_regression"}, GraphTargets(1), None),
        ({"y": [-1.0, 0.5, "?"] * 4}, "y", {"missing": ["?"]}, GraphTargets(1), None),  # -1 is a number, no label
        ({"y": ["on", "off", None] * 4}, "y", {"val": 3, "test": 2}, GraphLabels(2), ("off", "on")),
        ({"a": [0, 1, None] * 4, "b": [1, 0, 0] * 4}, ["a", "b"], {}, GraphMultiLabels(2), ("a", "b")),
        ({"a": [0, 1, None] * 4, "b": y()[:, 0]}, ["a", "b"], {}, GraphTargets(2), ("a", "b")),
    ],
)
def test_targets_show_the_task(columns: Any, target: Any, options: Any, objective: Any, coded: Any) -> None:
    task = smiles(frame(**columns), target, **options)
    assert type(task.objective) is type(objective)
    assert task.num_classes == objective.out_channels
    assert task.class_names == (coded or ("y",))
    known = pd.DataFrame(columns).replace("?", None)[[target] if isinstance(target, str) else target]
    unknown = known.isna().all(axis=1).sum()
    assert sum(map(len, names(task))) == 12 - unknown
    assert [note for note in task.notes if note == "smiles: 4 of 12 molecules have no known y and are left out"] == [
        *task.notes
    ]


def test_a_column_is_the_split() -> None:
    part = ["train"] * 6 + ["valid"] * 3 + ["test"] * 2 + [None]
    assert names(smiles(frame(y=y()[:, 0], part=part), "y", column="part")) == [
        MOLECULES[:6],
        MOLECULES[6:9],
        MOLECULES[9:11],
    ]
    year = [2020 - row for row in range(12)]
    assert names(smiles(frame(y=y()[:, 0], year=year), "y", time="year"))[2] == MOLECULES[:2]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("smiles,y\nCCO,1.5\nC(C,2.5\n,3.5\nCC C,4.5\n", {}, r"wrong.csv: 3 of 4 SMILES cannot be "
     r"converted: row 3, 'C\(C' is no SMILES; row 4, the SMILES is empty; row 5, 'CC C' has a space. Correct or"),
    ("smiles,y\nCC(C)(C)(C)C,1.5\n[Fe+9],1.5\n", {}, r"row 2, 'CC\(C\)\(C\)\(C\)C' is no molecule: Explicit "
     r"valence for atom # 1 C, 5, is .*; row 3, '\[Fe\+9\]' has an atom with a charge"),
    ("smiles,y\n?,1.5\n!,2.5\n", {"invalid": "skip"}, "2 of 2 SMILES cannot be converted"),
    ("CCO,1.5\nCC,2.5\n", {}, "wrong.csv has no header: row 1 begins with the molecule CCO. Add a first row"),
    ("a,y\nCCO,1.5\n", {}, "wrong.csv has no column called smiles. Choose dataset.smiles from its columns: a, y"),
    ("smiles,y\nCCO,1.5\nCC,>20\nC,2.5\n", {}, "wrong.csv, row 3: y is '>20', expected a number. Leave the field"),
    ("smiles,y\nCCO,1.5\n", {"target": None}, "no column is to be predicted. Choose dataset.target=NAME .* columns: y"),
    ("smiles,y\nCCO,1.5\n", {"target": "z"}, "There is no column z: wrong.csv has smiles, y"),
    ("smiles,y\nCCO,1.5\n", {"smiles": "z"}, "There is no column z"),
    ("smiles,y\nCCO,1.5\n", {"invalid": "drop"}, "invalid is 'drop', expected error or skip"),
    ("smiles,y\nCCO,1.5\n", {"task": "node_regression"}, "task is node_regression, expected graph_classification or"),
    ("smiles,y\nCCO,1.5\n", {"scaffold": True, "time": "y"}, "each choose a split. Give one of them"),
]  # fmt: skip


def test_errors_name_the_file_and_the_row(tmp_path: Path) -> None:
    for text, options, message in WRONG:
        (tmp_path / "wrong.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            smiles(tmp_path / "wrong.csv", **{"target": "y", **options})


@pytest.mark.filterwarnings("ignore:.*no training molecule has")
def test_invalid_molecules_are_left_out_and_repeated_ones_reported() -> None:
    table = frame(y=y()[:, 0])
    table.loc[3, "SMILES"] = "C(C"
    table.loc[11, "SMILES"] = "OCC"  # the ethanol of row 5, written in another way
    part = ["train"] * 8 + ["val"] * 2 + ["test"] * 2
    repeated = "1 of the 2 molecules of test are in training too, such as 'OCC', written 'CCO' there"
    with pytest.warns(UserWarning, match=repeated):
        task = smiles(table.assign(part=part), "y", column="part", invalid="skip")
    assert task.notes == ("smiles: 1 of 12 SMILES cannot be converted: row 3, 'C(C' is no SMILES. They are left out",)
    assert [len(part) for part in names(task)] == [7, 2, 2]
    for same in ("[13CH3][CH2:1]O", "[CH3:1][CH2:2][OH:3]"):  # no features of PyG's graphs
        table.loc[11, "SMILES"] = same
        with pytest.warns(UserWarning, match=f"such as '{re.escape(same)}', written 'CCO' there"):
            smiles(table.assign(part=part), "y", column="part", invalid="skip")
    table.loc[11, "SMILES"] = MOLECULES[11]
    with pytest.warns(UserWarning, match=r"part looks like a split: split.column=part. The split is random instead\."):
        task = smiles(table.assign(part=part), "y", invalid="skip")
    with pytest.warns(UserWarning, match="row 3, 'C.C' is no SMILES. They are left out"):
        rows = read_rows(task.preparation, table)
    assert rows.left_out == {3: "'C(C' is no SMILES"} and rows.table["id"].tolist() == [*range(12)]
    assert rows.numbers == rows.ids["id"] == [row for row in range(12) if row != 3]


@pytest.mark.filterwarnings("ignore:.*no training molecule has")
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([*range(101, 113)], [*range(101, 113)]),
        ([f"{row:03}" for row in range(12)], [f"{row:03}" for row in range(12)]),
        ([f"CHEMBL{row % 4}" for row in range(12)], [f"CHEMBL{row % 4}" for row in range(12)]),
        ([*map(str, range(12))], [*range(12)]),
        ([1.5, *range(11)], None),  # a quantity
        ([1, 1, *range(10)], None),
        ([None, *"abcdefghijk"], [None, *"abcdefghijk"]),
    ],
)
def test_ids_of_any_type_name_the_molecules(column: list[Any], expected: list[Any] | None, tmp_path: Path) -> None:
    frame(y=y()[:, 0], ID=column).drop(columns="id").to_csv(tmp_path / "m.csv", index=False)
    task = smiles(tmp_path / "m.csv", "y")
    assert read_rows(task.preparation).ids == ({} if expected is None else {"ID": expected}) | {"SMILES": MOLECULES}


def test_the_command_trains_and_later_tables_are_read_alike(tmp_path: Path) -> None:
    targets = y(2) * [1, 100]
    frame(logS=targets[:, 0], boils=targets[:, 1]).to_csv(tmp_path / "data.csv", index=False)
    few = ["training.max_epochs=2", "model.hidden_channels=4", "model.heads=2", "model.num_layers=3", "model.encoder=8"]
    data = ["dataset=smiles", f"dataset.path={tmp_path}/data.csv", "dataset.target=[logS,boils]", "split.scaffold=true"]
    result = result_of(tmp_path / "o", *data, "split.val=2", "split.test=1", *few)
    preparation = gat_pyg.load(result.run_dir).preparation
    rows = read_rows(preparation)
    assert rows.ids == {"id": [*range(12)], "SMILES": MOLECULES}
    error = (predict(result.run_dir, rows.graphs[-1]) - torch.tensor(targets[-1:])).abs()[0]  # the only test molecule
    assert result.scores == pytest.approx({"rmse_0": float(error[0]), "rmse_1": float(error[1])}, rel=1e-4)  # rounded
    assert preparation.class_names == ("logS", "boils")

    new = pd.DataFrame({"boils": [1.0, None], "smiles": ["c1ccncc1", "C[Se]C"], "name": ["a", "b"]})
    new.to_csv(tmp_path / "new.csv", index=False)
    with pytest.warns(UserWarning, match=r"new.csv: no training molecule has Se in 'C\[Se\]C'"):
        later = read_rows(preparation, tmp_path / "new.csv")
    assert later.ids == {"name": ["a", "b"], "smiles": ["c1ccncc1", "C[Se]C"]}
    assert torch.equal(later.graphs[0].x, rows.graphs[-3].x)
    assert torch.stack([data.y for data in later.graphs]).nan_to_num(-9).tolist() == [[[-9, 1]], [[-9, -9]]]
    with pytest.warns(UserWarning, match="no training molecule has Se") as warned:
        predict(result.run_dir, tmp_path / "new.csv")
    assert len(warned) == 1  # by the reader, which names the molecule; of graphs it is the encoder's
    with pytest.warns(UserWarning, match="data: atomic_num of x has 1 values that are not a category"):
        predict(result.run_dir, later.graphs)

    source = {**(preparation.source or {}), "invalid": "skip"}
    skipping = Trained(Path(), gat_pyg.load(result.run_dir, predictions=True), replace(preparation, source=source))
    bad = pd.DataFrame({"smiles": ["CO", "C(C", "CC"], "id": [7, 8, 9], "lot": ["a", "b", "a"], "size": [1, 2, 2]})
    bad.to_csv(tmp_path / "bad.csv", index=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="1 of 3 SMILES cannot be converted: row 3, "):
        rows = table(skipping, selected(skipping, tmp_path / "bad.csv"), ["lot", "size"])
    assert rows["row"].tolist() == [0, 1, 2] and rows["id"].tolist() == [7, 8, 9]
    assert rows["lot"].tolist() == [*"aba"] and rows["size"].tolist() == [*"122"]  # as in the file
    assert rows["logS"].isna().tolist() == [False, True, False]
    assert rows["left_out"].fillna("").tolist() == ["", "'C(C' is no SMILES", ""]
    with torch.no_grad(), pytest.warns(UserWarning, match="1 of 3 SMILES"):
        rows = table(skipping, selected(skipping, bad.assign(row=["r9", "r8", "r7"])))
    assert rows["row"].tolist() == ["r9", "r8", "r7"]


def test_descriptors_are_finite_and_of_the_molecule_alone() -> None:
    odd = ["[Na+].[Cl-]", "[H][H]", "[Fe]", "O=[Pt](Cl)Cl", "*C", "C" * 150, "[B-](F)(F)(F)F", *MOLECULES]
    values = descriptors(odd)
    assert np.isfinite(values).all() and np.abs(values).max() < 1e5
    assert values.shape[1] > 200
    assert np.array_equal(descriptors(["OCC", *odd[::-1]])[1:], values[::-1])
    assert np.allclose(descriptors(["OCC"]), descriptors(["CCO"]), rtol=1e-5)
    for columns in (descriptors, fingerprints):
        with pytest.raises(ValueError, match="'C\\(C' is no SMILES of a molecule"):
            columns(["C(C"])
