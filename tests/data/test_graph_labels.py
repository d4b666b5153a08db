"""Data sets with a label for each graph: what they are recognised by, and stratified folds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from gat_pyg.data import from_dataset
from gat_pyg.tasks.graphs import GraphLabels, GraphMultiLabels
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import SPLITS


def graphs(number: int = 40, nodes: int = 3) -> list[Data]:
    edges = torch.tensor([[0, 1], [1, 2]]) % nodes
    every_fourth = [torch.tensor([int(i % 4 == 0)]) for i in range(number)]
    return [Data(torch.full((nodes, 2), float(i)), edges, y=y) for i, y in enumerate(every_fourth)]


def numbers(task: Any) -> list[list[int]]:
    return [[int(data.x[0, 0]) for data in task.graphs(split)] for split in SPLITS]


def test_every_graph_is_tested_once_and_folds_are_stratified():
    tested = []
    for fold in range(5):
        task = from_dataset(graphs(), "many", folds=5, fold=fold)
        assert task.objective == GraphLabels(2) and task.num_splits == 5
        train, val, test = numbers(task)
        assert sorted(train + val + test) == list(range(40))
        assert [len(train), len(val), len(test)] == [24, 8, 8]
        assert [int(task.labels(split).sum()) for split in SPLITS] == [6, 2, 2]
        tested.append(test)
    assert sorted(itertools.chain(*tested)) == list(range(40))
    _, val, _ = numbers(from_dataset(graphs(), "many", folds=5, fold=4))
    assert val == tested[0]  # the next fold
    again = from_dataset(graphs(), "many", folds=5, fold=0)
    other = from_dataset(graphs(), "many", folds=5, fold=0, seed=1)
    assert numbers(again)[2] == tested[0] != numbers(other)[2]


def test_folds_need_several_graphs():
    one = Data(torch.eye(9), torch.tensor([[0], [1]]), y=torch.arange(9) % 2)
    with pytest.raises(ValueError, match=r"one: folds=3 divides .*, but this is a single graph\. Leave out folds"):
        from_dataset(one, "one", folds=3)


def errica(number: int = 12, folds: int = 3) -> list[dict[str, Any]]:
    """Folds of graphs in turn, the next graph after each test graph for validation."""
    content = []
    for fold in range(folds):
        test = [i for i in range(number) if i % folds == fold]
        val = [(i + 1) % number for i in test[:2]]
        train = [i for i in range(number) if i not in (*test, *val)]
        content.append({"test": test, "model_selection": [{"train": train, "validation": val}]})
    return content


def written(folder: Path, content: Any) -> Path:
    path = folder / "folds.json"
    path.write_text(json.dumps(content))
    return path


def test_every_fold_of_a_file_is_a_partition_and_every_graph_is_tested_once(tmp_path: Path):
    content = errica()
    path = written(tmp_path, content)
    tested = []
    for fold, expected in enumerate(content):
        task = from_dataset(graphs(12), "many", folds=path, fold=fold)
        train, val, test = numbers(task)
        assert (test, val) == (expected["test"], sorted(expected["model_selection"][0]["validation"]))
        assert sorted(train + val + test) == list(range(12)) and task.num_splits == 3
        tested += test
    assert sorted(tested) == list(range(12))
    with pytest.raises(ValueError, match=r"many: fold=3 \(split\.fold\), but .*folds\.json has 3 folds"):
        from_dataset(graphs(12), "many", folds=path, fold=3)


def moved(fold: int, source: str, target: str | None, index: int | None = None) -> list[dict[str, Any]]:
    """Folds in which the first index of one split is moved to another, or replaced by `index`."""
    content = errica()
    parts = {"test": content[fold]["test"], **content[fold]["model_selection"][0]}
    first = parts[source].pop(0)
    if target is not None:
        parts[target].append(first if index is None else index)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (moved(1, "train", None), "fold 1: graph 0 is there 0 times, expected once"),
        (moved(1, "train", "validation", 1), "fold 1: graph 0 is there 0 times"),
        (moved(2, "train", "train", 9), "fold 2: graph 0 is there 0 times"),
        (moved(2, "test", "test", 12), "fold 2 holds 12, expected indices of graphs from 0 to 11"),
        (moved(0, "train", "train", -1), "fold 0 holds -1, expected indices"),
        (moved(2, "train", "test"), "all tests: graph 0 is there 2 times"),
        (moved(2, "test", "train"), "all tests: graph 2 is there 0 times"),
        (moved(2, "test", "test", True), "fold 2 holds True, expected indices"),
        ([*errica(), {"test": []}], "fold 3: expected test, and train and validation in"),
        ({}, "is not a list, expected a JSON list of folds"),
    ],
)
def test_a_file_that_does_not_partition_the_graphs_is_refused(tmp_path: Path, content: Any, message: str):
    with pytest.raises(ValueError, match=rf"many: folds=.*folds\.json.*{message}"):
        from_dataset(graphs(12), "many", folds=written(tmp_path, content))


def test_a_file_of_folds_that_is_missing_or_no_json_is_refused(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"is not a file.* data_splits of https://github\.com/diningphil/gnn-comp"
    ):
        from_dataset(graphs(12), "many", folds=tmp_path / "folds.json")
    for content in ("[", "[" * 100_000):
        written(tmp_path, []).write_text(content)
        with pytest.raises(ValueError, match="cannot be read, expected a JSON list of folds"):
            from_dataset(graphs(12), "many", folds=tmp_path / "folds.json")


def test_labels_are_of_graphs_where_nodes_would_have_others():
    assert from_dataset(graphs(), val=5, test=5).objective == GraphLabels(2)
    assert from_dataset(graphs(nodes=1), val=5, test=5).objective == NodeLabels(2)  # a node each
    assert from_dataset((graphs(), graphs(), graphs())).objective == GraphLabels(2)
    floats = [data.update({"y": data.y.float()[:, None]}) for data in graphs()]
    floats[3].y[:] = float("nan")
    task = from_dataset(floats, val=5, test=5)
    assert sorted(torch.cat([task.labels(split) for split in SPLITS]).tolist()) == [-1] + [0] * 29 + [1] * 10


def test_many_labels_per_graph_are_detected():
    every = [data.update({"y": torch.tensor([[float(data.y), 1.0, float("nan")]])}) for data in graphs()]
    assert from_dataset(every, val=5, test=5).objective == GraphMultiLabels(3)


def test_one_graph_in_all_splits_has_no_labels_of_graphs():
    data = graphs()[0]
    with pytest.raises(ValueError, match="the single graph has only one label, but is used in all three splits"):
        GraphLabels(2).check_splits(data, "one")


def test_the_error_without_a_readout_names_it():
    with pytest.raises(ValueError, match=r"returns \(3, 2\), expected \(1, 2\): a row for each graph.*\.Readout"):
        GraphLabels(2).rows(torch.zeros(3, 2), graphs()[0], None)
