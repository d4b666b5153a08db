"""Change: what is predicted moves and grows with a series, and its columns are found in training rows."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from gat_pyg.models import Change
from gat_pyg.runs.network import build_model, earlier_values
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.targets import NodeTargets
from gat_pyg.tasks.task import Task


def series(T: int = 9, N: int = 8) -> Task:
    """Growing series, with a column that is no earlier value; each step is a graph."""
    draw = torch.Generator().manual_seed(0)
    level = 100 + 20 * torch.rand(N, generator=draw)
    values = level * 1.03 ** torch.arange(T + 3)[:, None] + torch.rand(T + 3, N, generator=draw)
    edge_index = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
    steps = [
        Data(torch.cat([torch.rand(N, 1), values[t : t + 3].t()], 1), edge_index, y=values[t + 3][:, None])
        for t in range(T)
    ]
    train, val, test = steps[:5], steps[5:7], steps[7:]
    return Task("series", train, val, test, 4, NodeTargets(1))


def test_predictions_move_and_grow_with_a_series():
    task = series()
    columns, last, scale = earlier_values(task)
    assert (columns, last) == ([1, 2, 3], [3]) and scale > 0
    factory = ModelFactory("model", {"_target_": "gat_pyg.models.GAT", "hidden_channels": [4], "heads": [2, 1]})
    assert not isinstance(build_model(factory, task).model, Change)
    values = {**factory.values, "change": True, "encoder": 8}
    model, objective, data = build_model(ModelFactory("model", values), task).model.eval(), task.objective, task.test[0]

    def predicted(x: torch.Tensor) -> torch.Tensor:
        return objective.predictions(model.double()(x, data.edge_index)).detach()

    assert isinstance(model, Change)
    x, moved = data.x.double(), data.x.double()
    moved[:, 1:] += 1000.0
    torch.testing.assert_close(predicted(moved), predicted(x) + 1000)
    model.scale, grown = 0.0, x.clone()
    grown[:, 1:] *= 7
    torch.testing.assert_close(predicted(grown), 7 * predicted(x))


def test_without_earlier_values_a_change_is_refused():
    task = series()
    for split in SPLITS:
        for data in task.graphs(split):
            data.x = torch.rand(8, 4)
    factory = ModelFactory("model", {"_target_": "gat_pyg.models.GAT", "hidden_channels": [4], "change": True})
    with pytest.raises(ValueError, match=r"model.change is true, but series has no two features that are earlier"):
        build_model(factory, task)
