"""Series of features on one graph: a graph for each step, split in time."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.utils import is_undirected

from gat_pyg.data import Collate, from_dataset, from_file
from gat_pyg.data.arrays.series import graphs_of_series
from gat_pyg.models import GAT
from gat_pyg.runs.model_file import save_model
from gat_pyg.sweeps.messages import sizes
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.trained.predict import predict
from gat_pyg.training import TaskData

T, N, F, E = 11, 4, 2, 7


def series(**others: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    values = {"x": draw.normal(size=(T, N, F)), "edge_index": draw.integers(N, size=(2, E))}
    return {key: value for key, value in (values | others).items() if value is not None}


STEPS = np.arange(T)
FORMS: dict[str, tuple[dict[str, Any], str, int]] = {  # keys, what is predicted, K
    "nodes": ({"y": np.random.default_rng(1).normal(size=(T, N))}, "node_regression", 1),
    "nodes, some targets": ({"y": np.random.default_rng(1).normal(size=(T, N, 3))}, "node_regression", 3),
    "steps": ({"y": STEPS % 2}, "graph_classification", 2),
    "steps, some targets": ({"y": np.random.default_rng(1).normal(size=(T, 3))}, "graph_regression", 3),
    "edges": ({"y": np.random.default_rng(1).integers(2, size=(T, E))}, "edge_classification", 2),
    "pairs": (
        {"edge_label": np.random.default_rng(1).normal(size=(T, 2)), "edge_label_index": np.array([[0, 1], [2, 3]])},
        "edge_regression",
        1,
    ),
    "weights": ({"y": STEPS / 3, "edge_attr": np.linspace(0, 1, E)}, "graph_regression", 1),
    "weights of each step": ({"y": STEPS / 3, "edge_attr": np.random.rand(T, E, 2)}, "graph_regression", 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_series_is_the_list_of_its_steps_split_in_time(form: str, tmp_path: Path):
    keys, predicts, K = FORMS[form]
    values = series(**keys)
    np.savez(tmp_path / "own.npz", **values)
    task = from_file(tmp_path / "own.npz")
    assert (f"{task.objective.item}_{task.objective.goal}", task.num_classes) == (predicts, K)
    assert [len(task.graphs(split)) for split in SPLITS] == [7, 2, 2] and task.split_arguments == ("val", "test")
    assert re.search(rf"{task.objective.item} .* in 11 steps; 7 / 2 / 2 steps", sizes(task))
    steps = [data for split in SPLITS for data in task.graphs(split)]
    for step, data in enumerate(steps):
        assert torch.equal(data.x, torch.tensor(values["x"][step]).float())
        assert data.edge_index is steps[0].edge_index
        labels = values.get("edge_label", values.get("y"))[step]
        assert np.allclose(data.y.flatten(), labels.flatten())
        if "edge_attr" in values:
            weights = values["edge_attr"] if values["edge_attr"].ndim == 1 else values["edge_attr"][step]
            assert np.allclose(data.edge_attr, weights.reshape(E, -1))
    joined = TaskData(task, 3).loading._joined  # type: ignore[attr-defined]
    larger = copy.copy(steps[3])  # no step, but a graph with the same edges
    larger.x = torch.cat([larger.x, larger.x[:1]])
    for graphs in ([steps[4], steps[0], larger], [steps[4], steps[0], steps[2]], [steps[1], steps[5], steps[6]]):
        batch, expected = joined(None, Collate(graphs), range(3)), Batch.from_data_list(graphs)
        assert {*batch.keys()} == {*expected.keys()}
        assert all(torch.equal(batch[key], expected[key]) for key in expected.keys())  # noqa: SIM118
    assert joined(None, Collate(steps), range(3)).edge_index is batch.edge_index
    if not task.objective.has_pairs:
        both = from_file(tmp_path / "own.npz", undirected=True)
        assert "steps" in sizes(both) and is_undirected(both.train[0].edge_index, both.train[0].edge_attr)


def test_masks_of_steps_are_kept_and_several_series_come_split():
    masks = {f"{split}_mask": part == STEPS % 3 for part, split in enumerate(SPLITS)}
    task = from_dataset(Data.from_dict({k: torch.as_tensor(v) for k, v in series(y=STEPS / 3, **masks).items()}))
    assert torch.equal(task.labels("val").flatten(), torch.tensor(STEPS[1::3] / 3).float())
    one = Data.from_dict({k: torch.as_tensor(v) for k, v in series(y=STEPS / 3).items()})
    task = from_dataset({"train": [one, one], "val": one, "test": [one]}, "mine")
    assert [len(task.graphs(split)) for split in SPLITS] == [2 * T, T, T]
    with pytest.raises(ValueError, match=r"mine holds 2 graphs, and x of some is \(T, N, F\), a series. Expected one"):
        from_dataset([one, one], "mine")
    with pytest.raises(ValueError, match=r"folds=3 divides .* but this is a series"):
        from_dataset(one, "mine", folds=3)


def test_the_predictions_of_a_series_are_those_of_its_steps(tmp_path: Path):
    data = Data.from_dict({k: torch.as_tensor(v) for k, v in series(y=FORMS["nodes"][0]["y"]).items()})
    task = from_dataset(data, "mine")
    about = {"in_channels": F, "hidden_channels": [3], "out_channels": 1, "heads": [2, 1]}
    preparation, objective = task.preparation.to_dict(), task.objective.to_dict()
    save_model(
        tmp_path / "model.safetensors", GAT(**about), "gat_pyg.models.GAT", about,
        preparation=preparation, objective=objective,
    )  # fmt: skip
    out = predict(tmp_path, data)
    assert out.shape == (T, N, 1)
    for step, expected in zip(graphs_of_series(data, None, "mine"), out, strict=True):
        torch.testing.assert_close(predict(tmp_path, step), expected)
    assert torch.equal(predict(tmp_path, Data(data.x, data.edge_index)), out)
