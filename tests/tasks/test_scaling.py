"""One rule for constant columns: that of scikit-learn up to rounding, wherever a column is standardised."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import QuantileTransformer, StandardScaler
from torch_geometric.data import Data

from gat_pyg.data import encoded, from_dataset
from gat_pyg.data.tables.features import Features
from gat_pyg.models.encoders import Encoder, columns_of
from gat_pyg.seeds.stack import Stack
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.tasks.scaling import normal_knots, scale
from gat_pyg.tasks.targets import NodeTargets
from tests.laws import assert_close


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


def test_normal_scores_are_those_of_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randn(100, generator=draw).exp(), torch.randint(4, (100,), generator=draw) + 0.5], 1)
    columns = columns_of([x], scaling="quantile")
    encoder = Encoder(columns, 3)
    scores = encoder._standardised(x)
    oracle = QuantileTransformer(n_quantiles=100, output_distribution="normal").fit(x.numpy())
    inside = ((x > x.amin(0)) & (x < x.amax(0))).all(1)
    expected = torch.from_numpy(oracle.transform(x.numpy()))[inside].float()
    assert_close(scores[inside, 0], expected[:, 0])
    torch.testing.assert_close(scores[inside, 1], expected[:, 1], rtol=0, atol=0.02)  # whose ties are off by one rank
    assert scores.abs().max() < 3 and scores.isfinite().all()  # where scikit-learn has 5.2
    beyond = encoder._standardised(torch.tensor([[-1e9, 1e9]]))
    assert_close(beyond, torch.stack([scores[:, 0].min(), scores[:, 1].max()])[None])
    before = encoder(x)
    torch.nn.init.normal_(encoder.knots, generator=draw)  # a piecewise linear function of each column
    ends = zip(x.unbind(1), encoder._knots, encoder.knots.detach().split(encoder._knots.size(1)), strict=True)
    added = [[np.interp(column, knots, values) for values in rows.t()] for column, knots, rows in ends]
    assert_close(encoder(x) - before, torch.from_numpy(np.stack(added).sum(0).T).float())
    y = torch.randn(9, 2, generator=draw)
    exported = torch.export.export(encoder, (y,), strict=False).module()
    assert_close(exported(y), encoder(y))
    assert_close(Stack([encoder, encoder])(y)[1], encoder(y))
    assert [len(normal_knots(torch.rand(n))) // 2 for n in (50, 999, 7200, 9000)] == [50, 100, 360, 400]
    assert columns_of([torch.full((9, 1), 0.5)], scaling="quantile") == [[0.5, 1.0]]
    assert ModelFactory("model", {"encoder": {"scaling": "quantile"}}).encoder == {
        "channels": 64,
        "scaling": "quantile",
    }
    with pytest.raises(ValueError, match=r"model.encoder.scaling is 'rank', expected standard or quantile"):
        ModelFactory("model", {"_target_": "gat_pyg.GAT", "encoder": {"scaling": "rank"}}).check()
