"""One rule for constant columns: that of scikit-learn up to rounding, wherever a column is standardised."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch_geometric.data import Data

from gat_pyg.data import encoded, from_dataset
from gat_pyg.data.tables.features import Features
from gat_pyg.models.encoders import columns_of
from gat_pyg.tasks.scaling import scale
from gat_pyg.tasks.targets import NodeTargets


@pytest.mark.parametrize("value", [0.1, 1 / 3, 123456.7, 1.7e9, 0.0])
def test_a_constant_column_is_not_scaled_up_by_rounding(value: float):
    x = torch.full((1001, 1), value, dtype=torch.float64)
    std, mean = x.std(0, correction=0), x.mean(0)
    assert bool(std > 0) or value in (0.0, 1.7e9)  # by rounding
    assert scale(std, mean).tolist() == [0.0] and StandardScaler().fit(x.numpy()).scale_.tolist() == [1.0]
    assert NodeTargets(1).fitted(x).std == (1.0,)
    frame = pd.DataFrame({"v": [*x[:, 0].tolist(), None]})
    assert Features.fit(frame, ["v"], np.ones(1002, bool)).columns["v"]["std"] == 1.0  # kept for its gap
    rows = torch.cat([x, x * (1 + 1e-7)]).float()  # different in the last bit
    assert columns_of([torch.cat([rows, torch.rand(2002, 1)], 1)])[0] == ([pytest.approx(value), 1.0] if value else 1)


def test_a_small_deviation_is_scaled():
    x = torch.tensor([[1e-9], [3e-9]], dtype=torch.float64)
    assert NodeTargets(1).fitted(x).std == (pytest.approx(1e-9),)
    assert columns_of([torch.cat([x, torch.rand(2, 1)], 1).float()])[0] == [pytest.approx(2e-9), pytest.approx(1e-9)]


def test_probabilities_that_cancel_are_constant(tmp_path):
    edges = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])  # of a path: no walk of odd length is closed
    task = from_dataset(Data(torch.eye(4), edges, y=torch.arange(4) % 2), per_class=1, val=1, test=1)
    walks = {"_target_": "gat_pyg.tasks.encodings.RandomWalkPE", "walk_length": 4}
    assert [each > 0 for each in encoded(task, walks, tmp_path).encoding["std"]] == [False, True, False, True]
