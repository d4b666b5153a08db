"""Logistic regression against scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gat_pyg.paper.methods._regression import fit_logistic


@pytest.mark.parametrize("K", [2, 3])
def test_the_probabilities_are_scikit_learns(K: int):
    linear_model = pytest.importorskip("sklearn.linear_model")
    torch.manual_seed(0)
    x, y, lin = torch.randn(12, 4), torch.arange(12) % K, nn.Linear(4, K)
    fit_logistic(lin, x, y, strength=10.0)
    oracle = linear_model.LogisticRegression(C=10.0, max_iter=1000).fit(x.numpy(), y.numpy())
    expected = torch.from_numpy(oracle.predict_proba(x.numpy())).float()
    torch.testing.assert_close(lin(x).softmax(1).detach(), expected, atol=1e-5, rtol=0)


def test_a_class_without_examples_is_never_predicted():
    lin = nn.Linear(4, 5)
    x, y = torch.randn(12, 4), torch.tensor([1, 3, 4] * 4)
    fit_logistic(lin, x, y, strength=1.0)
    assert not lin(100 * torch.randn(50, 4)).softmax(1)[:, [0, 2]].any()


def test_the_error_without_scikit_learn_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'gat_pyg\[baselines\]'"):
        fit_logistic(nn.Linear(2, 2), torch.eye(2), torch.arange(2), 1.0)
