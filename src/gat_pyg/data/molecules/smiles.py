"""Molecules: graphs from a table with a column of SMILES, and splits by their scaffolds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils.smiles import e_map, from_rdmol, x_map

from ...files import needs
from ...tasks.objective import SPLITS, any_known
from ...tasks.objectives import objective_for
from ...tasks.task import Task
from ..arrays.from_pyg import from_dataset
from ..reader import Reader, Rows, name_of_file
from ..splits import check_classes, masks_by_group
from ..tables.columns import Column, number
from ..tables.files import check_columns, file_of, named, path_of, read_table, where
from ..tables.graph import presented
from ..tables.split_columns import masks_of_rows, warn_of_splits
from ..tables.targets import Targets
from .descriptors import descriptors as descriptors_of

NAMES = ("smiles", "canonical_smiles", "isomeric_smiles", "smi", "structure", "molecule", "mol")  # of the column
LISTED = 3  # rows in a message
FEW = 10_000  # molecules for which descriptors are computed by default


def smiles(
    path: Any,
    target: str | Sequence[str] | None = None,
    smiles: str | None = None,
    invalid: Literal["error", "skip"] = "error",
    missing: Sequence[Any] = (),
    descriptors: bool | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    column: str | None = None,
    time: str | None = None,
    scaffold: bool = False,
    folds: int | str | Path | None = None,
    fold: int = 0,
    task: str | None = None,
    like: Mapping[str, Any] | None = None,
) -> Task:
    """Read molecules from a table with a column of SMILES, and one or several columns to predict.

    A molecule is the graph of PyG's `from_smiles`: x `[N, 9]` and edge_attr `[E, 3]` are categories of atoms and bonds,
    which `+model.encoder=64` embeds; stereochemistry is among them. Hydrogens are counted, unless they are atoms in the
    SMILES. A salt is one graph without edges between its parts.

    The table is part of the task's `source`, by which `gat_pyg.data.rows.read_rows` reads later molecules: columns may
    have another order, and the targets need not be there.

    Args:
        path: a CSV, TSV or Parquet file, several with the same columns, or a pandas frame.
        target: the column to predict, or several, as in `gat_pyg.data.tables.targets.Targets`. An empty value is
            unknown; molecules without any known target are left out.
        smiles: the column of SMILES; by default the one called smiles, canonical_smiles, smi or alike, in any case.
        invalid: "error" raises an error that lists the rows whose SMILES cannot be converted; "skip" leaves them out.
        missing: values of targets, and of `column` and `time`, that are unknown, such as "?".
        descriptors: if true, `graph_attr` `[1, D]` has RDKit's descriptors, which stand beside the readout; None: if
            there are at most 10,000 molecules.
        val, test, seed, folds, fold: arguments of a random split, as in `gat_pyg.data.from_dataset`.
        column: the column with the split of each row, train, val or test.
        time: a column of dates or numbers: the earliest rows are for training, the latest for the test.
        scaffold: a split by Bemis-Murcko scaffolds: see `split_by_group`.
        task: "graph_classification" or "graph_regression"; None if the targets show it.
        like: the `source` of an earlier task, whose classes are kept.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if pandas or RDKit is not installed.
        ValueError: if the file is not a table or lacks a column, a SMILES cannot be converted, or a split is empty.

    Warns if the same molecule is for training and for validation or the test.

    Cost: half a millisecond a molecule, and 5 to 15 ms with descriptors.

    Example:
        >>> import pandas as pd
        >>> boiling = {"C": -161.5, "CC": -88.6, "CCC": -42.1, "CO": 64.7, "CCO": 78.2}  # degrees Celsius
        >>> smiles(pd.DataFrame({"smiles": boiling.keys(), "y": boiling.values()}), "y")
        Task(name='smiles', num_features=9, objective=GraphTargets(out_channels=1), edge_dim=3)
    """
    if invalid not in ("error", "skip"):
        raise ValueError(f"invalid is {invalid!r}, expected error or skip (dataset.invalid in the command).")
    if task not in (None, "graph_classification", "graph_regression"):
        raise ValueError(f"task is {task}, expected graph_classification or graph_regression for molecules.")
    if sum(map(bool, (column, time, scaffold, folds))) > 1:
        raise ValueError(
            "split.column, split.time, split.scaffold and split.folds each choose a split. Give one of them."
        )
    needs("rdkit", "molecules")  # before pandas, whose extra has no RDKit
    frame = _table(path)
    missing = [*(missing if like is None else like.get("missing", ()))]
    frame.attrs["missing"] = missing
    smiles = _smiles_column(frame, smiles)
    targets = _target_columns(frame, target, smiles)
    goal = None if task is None else task.removeprefix("graph_")
    labels = Targets.fit(frame, targets, goal) if like is None else Targets.like(like, targets)
    source: dict[str, Any] = {"_target_": "gat_pyg.data.smiles", "path": path_of(path), "smiles": smiles}
    source |= {"missing": missing} if missing else {}
    source |= {"split": column} if column is not None else {}
    source |= {"descriptors": len(frame) <= FEW if descriptors is None else descriptors}
    source |= {"invalid": invalid, "target": {"names": labels.names, "classes": labels.classes, "goal": goal}}
    frame, by_row, mols, _, notes = _read(frame, source)
    graphs = [*by_row.values()]
    known = np.array([bool(any_known(graph.y)) for graph in graphs])
    if not known.all():
        without = f"{int((~known).sum()):,} of {len(known):,} molecules have no known {' or '.join(targets)}"
        if not known.any():
            raise ValueError(f"{file_of(frame)}: {without}, expected at least one.")
        notes.append(f"{file_of(frame)}: {without} and are left out")
    frame, graphs = frame[known], [graph for graph, is_known in zip(graphs, known, strict=True) if is_known]
    name, every = name_of_file(source["path"] or "smiles"), torch.ones(len(graphs), dtype=torch.bool)
    if not (column or time or scaffold or folds):
        used = (smiles, *targets)
        warn_of_splits(frame, [name for name in frame.columns if name not in used], "The split is random instead")
    masks, drawn = masks_of_rows(frame, every, column, time, val, test, seed)
    drawn = drawn or ("column", "time", "scaffold")
    if scaffold:
        groups = scaffolds(mols[graph.smiles] for graph in graphs)
        masks, drawn = masks_by_group(groups, val, test, name), ("scaffold", "val", "test")
    for key, mask in masks.items():
        for graph, row in zip(graphs, mask.split(1), strict=True):
            graph[key] = row
    goal = objective_for([graph.y for graph in graphs], "graph", goal).goal
    result = from_dataset(graphs, name, None, val, test, seed, 0, folds, fold, task=f"graph_{goal}")
    check_classes(result)
    _warn_of_duplicates(result, mols, file_of(frame))
    source["target"]["goal"], source["categories"] = goal, _categories(result.train)
    drawn, names = (*(result.split_arguments or ()), *drawn), labels.classes or targets
    return result.read_from(source, notes, class_names=tuple(names), split_arguments=drawn)


def rows_of(source: Mapping[str, Any], data: Any = None) -> Rows:
    """Return the graphs of later molecules, and the columns that name them: their SMILES, texts and ids.

    Ids are columns of text, and of whole numbers that are all different. `left_out` has the rows whose SMILES cannot be
    converted, by their number in `table` from 0.

    The column of SMILES is that of the run or has a usual name. Warns of atoms and bonds that no training molecule has.

    Args:
        source: `Task.source` of the run.
        data: a table, or several, as paths or a frame; None for those of the task.

    Raises:
        ValueError: as `smiles`.
    """
    table = _table(source["path"] if data is None else data)
    smiles = source["smiles"] if source["smiles"] in table.columns else _smiles_column(table, None)
    of = _read(table, {**source, "smiles": smiles})
    for note in of.notes:
        warnings.warn(f"{note}.", stacklevel=4)
    if text := unseen_atoms([*of.graphs.values()], source["categories"], file_of(table)):
        warnings.warn(text, stacklevel=4)
    ids: dict[str, Sequence[Any]] = {}
    used = (smiles, source.get("split"), *source["target"]["names"])
    for name in [name for name in table.columns if name not in used]:
        column = Column(table, name)
        are_texts = any(np.isnan(number(text)) for text in column.texts)
        if column.kind != "date" and column.texts and (are_texts or _are_ids(column)):
            values = column.of_rows(presented(column.texts, table, name), None)
            ids[name], table = values[[*of.graphs]].tolist(), table.assign(**{name: values.tolist()})
    ids[smiles] = [graph.smiles for graph in of.graphs.values()]
    return Rows([*of.graphs.values()], ids, table, [*of.graphs], of.reasons)


def _are_ids(column: Column) -> bool:
    """Return True for whole numbers that are all different."""
    return len(column.keys) == len(column.codes) and all(float(key).is_integer() for key in column.keys)


# Columns --------------------------------------------------------------------------------------------------------------


def _table(data: Any) -> Any:
    if data is None:
        raise ValueError("The run was trained on a frame. Give the molecules: the path of a table, or a frame.")
    return named(data, "smiles") if hasattr(data, "columns") else read_table(data)


def _smiles_column(frame: Any, column: str | None) -> str:
    """Return the column of SMILES: `column`, or the first with one of the usual names."""
    if column is not None:
        check_columns([frame], [column])
        return column
    columns = [str(name) for name in frame.columns]
    for usual in NAMES:
        for name in columns:
            if name.lower().replace(" ", "_") == usual:
                return name
    if molecules(columns[:1]).graphs:
        raise ValueError(
            f"{file_of(frame)} has no header: row 1 begins with the molecule {columns[0]}. Add a first row with the "
            "columns' names, such as smiles,y."
        )
    raise ValueError(
        f"{file_of(frame)} has no column called smiles. Choose dataset.smiles from its columns: {', '.join(columns)}."
    )


def _target_columns(frame: Any, target: str | Sequence[str] | None, smiles: str) -> list[str]:
    targets = [target] if isinstance(target, str) else list(target or ())
    if not targets:
        others = ", ".join(str(name) for name in frame.columns if name != smiles)
        raise ValueError(
            f"{file_of(frame)}: no column is to be predicted. Choose dataset.target=NAME or dataset.target=[NAME,NAME] "
            f"from its columns: {others}."
        )
    check_columns([frame], targets)
    return targets


# Rows -----------------------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """The rows of a table with a molecule, their graphs by row from 0, RDKit's molecules, and notes on other rows."""

    frame: Any
    graphs: dict[int, Data]
    mols: dict[str, Any]
    reasons: dict[int, str]
    notes: list[str]


def _read(frame: Any, source: Mapping[str, Any]) -> _Read:
    """Return the molecules of a table with their labels."""
    graphs, mols, reasons = molecules(frame[source["smiles"]])
    file, notes = file_of(frame), []
    if reasons:
        places = [where(frame, frame.index[row]).removeprefix(f"{file}, ") for row in [*reasons][:LISTED]]
        shown = [f"{place}, {reason}" for place, reason in zip(places, reasons.values(), strict=False)]
        text = f"{len(reasons):,} of {len(frame):,} SMILES cannot be converted: {'; '.join(shown)}"
        text += "; ..." * (len(reasons) > LISTED)
        if source["invalid"] == "error" or not graphs:
            raise ValueError(
                f"{file}: {text}. Correct or remove them. A run trained with dataset.invalid=skip leaves them out."
            )
        notes.append(f"{file}: {text}. They are left out")
    frame = frame.iloc[[*graphs]]
    names, classes, goal = (source["target"][key] for key in ("names", "classes", "goal"))
    absent = {name: np.nan for name in names if name not in frame.columns}
    labelled = frame.assign(**absent)
    labelled.attrs["missing"] = source.get("missing", ())
    y = Targets(names, classes)(labelled)
    (y,) = objective_for([y], "graph", goal).convert([y], file)
    for graph, row in zip(graphs.values(), y.split(1), strict=True):
        graph.y = row
        if source.get("descriptors"):
            graph.graph_attr = torch.from_numpy(descriptors_of([graph.smiles]))
    return _Read(frame, graphs, mols, reasons, notes)


class Molecules(NamedTuple):
    """Molecules of a column of SMILES: graphs by row from 0, RDKit's by SMILES, and why the other rows have none."""

    graphs: dict[int, Data]
    mols: dict[str, Any]
    reasons: dict[int, str]


def molecules(column: Iterable[Any]) -> Molecules:
    """Convert SMILES to graphs as PyG's `from_smiles` does, each with the text as `smiles`.

    Example:
        >>> result = molecules(["CO", "C(C", ""])
        >>> result.graphs
        {0: Data(x=[2, 9], edge_index=[2, 2], edge_attr=[2, 3], smiles='CO')}
        >>> result.reasons
        {1: "'C(C' is no SMILES", 2: 'the SMILES is empty'}
    """
    chem, base = needs("rdkit.Chem", "molecules"), needs("rdkit.rdBase", "molecules")
    graphs, mols, reasons = {}, {}, {}
    with base.BlockLogs():  # RDKit's messages, which do not name the row
        for row, value in enumerate(column):
            text = value.strip() if isinstance(value, str) else ""
            mol = chem.MolFromSmiles(text) if text and len(text.split()) == 1 else None
            try:
                graph = None if mol is None or not mol.GetNumAtoms() else from_rdmol(mol)
            except ValueError:
                graph = None
            if graph is None:
                reasons[row] = _reason(chem, text, mol)
                continue
            graph.smiles = text
            graphs[row], mols[text] = graph, mol
    return Molecules(graphs, mols, reasons)


def _reason(chem: Any, text: str, mol: Any) -> str:
    """Return the reason why a text gives no graph."""
    if not text:
        return "the SMILES is empty"
    if len(text.split()) > 1:
        return f"{text!r} has a space"
    if mol is not None:
        return f"{text!r} has an atom with a charge, a degree or the like that PyG's from_smiles does not know"
    raw = chem.MolFromSmiles(text, sanitize=False)
    problems = [] if raw is None else chem.DetectChemistryProblems(raw)
    return f"{text!r} is no molecule: {problems[0].Message()}" if problems else f"{text!r} is no SMILES"


# Scaffolds ------------------------------------------------------------------------------------------------------------


def scaffolds(mols: Iterable[Any]) -> list[str]:
    """Return the Bemis-Murcko scaffold of each molecule as SMILES without stereochemistry, "" without a ring.

    Example:
        >>> from rdkit.Chem import MolFromSmiles
        >>> scaffolds([MolFromSmiles("Cc1ccccc1"), MolFromSmiles("CCO")])
        ['c1ccccc1', '']
    """
    murcko = needs("rdkit.Chem.Scaffolds.MurckoScaffold", "molecules")
    return [murcko.MurckoScaffoldSmiles(mol=mol, includeChirality=False) for mol in mols]


# Warnings -------------------------------------------------------------------------------------------------------------


def _warn_of_duplicates(task: Task, mols: Mapping[str, Any], file: str) -> None:
    """Warn if a molecule of the validation or the test is one of training: the same graph for the model.

    They are compared by RDKit's canonical SMILES without isotopes and atom maps, which are no features of PyG's graphs.
    """
    chem = needs("rdkit.Chem", "molecules")

    def canonical(smiles: str) -> str:
        mol = chem.Mol(mols[smiles])
        for atom in mol.GetAtoms():
            atom.SetIsotope(0)
            atom.SetAtomMapNum(0)
        return str(chem.MolToSmiles(mol))

    train = {canonical(graph.smiles): graph.smiles for graph in task.train}
    for split in SPLITS[1:]:
        graphs = task.graphs(split)
        same = [(graph.smiles, train.get(canonical(graph.smiles))) for graph in graphs]
        if again := [(text, first) for text, first in same if first is not None]:
            (text, first), *_ = again
            example = repr(text) if text == first else f"{text!r}, written {first!r} there"
            warnings.warn(
                f"{file}: {len(again):,} of the {len(graphs):,} molecules of {split} are in training too, such as "
                f"{example}, so the score is too good. Leave the repetitions out, or choose split.scaffold=true.",
                stacklevel=3,
            )


_MAPS = {"x": x_map, "edge_attr": e_map}  # the values of each column


def _categories(graphs: Sequence[Data]) -> dict[str, list[list[int]]]:
    """Return the values of each column of x and edge_attr."""
    columns = {key: torch.cat([graph[key] for graph in graphs]).int().t() for key in _MAPS}
    return {key: [column.unique().tolist() for column in values] for key, values in columns.items()}


def unseen_atoms(graphs: Sequence[Data], known: Mapping[str, list[list[int]]], file: str) -> str:
    """Return a warning of atoms and bonds with a value that no training molecule has, or ""."""
    table = needs("rdkit.Chem", "molecules").GetPeriodicTable()
    texts = []
    for key, names in _MAPS.items():
        for column, (name, values) in enumerate(names.items()):
            seen = torch.tensor(known[key][column])
            values_here = torch.cat([graph[key][:, column] for graph in graphs]).int().unique()
            for value in values_here[~torch.isin(values_here, seen)].tolist():
                having = [graph.smiles for graph in graphs if (graph[key][:, column] == value).any()]
                label = table.GetElementSymbol(value) if name == "atomic_num" else f"{name} {values[value]}"
                texts.append(f"{label} in {having[0]!r}" + f" and {len(having) - 1} more" * (len(having) > 1))
    text = f"{file}: no training molecule has {', '.join(texts)}. Predictions of such molecules are guesses."
    return text if texts else ""


def _atoms(graph: Data) -> list[str]:
    table = needs("rdkit.Chem", "molecules").GetPeriodicTable()
    return [f"{table.GetElementSymbol(z)}{atom}" for atom, z in enumerate(graph.x[:, 0].int().tolist())]


MOLECULES = Reader(
    ("gat_pyg.data.smiles",), ("path",), rows_of, {key: [*columns] for key, columns in _MAPS.items()}, _atoms
)
