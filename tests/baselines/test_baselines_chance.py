from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from sklearn.dummy import DummyClassifier
from sklearn.metrics import f1_score

from gat_pyg.baselines.chance import Chance
from gat_pyg.seeds.stack import Stack
from gat_pyg.tasks.nodes import NodeMultiLabels


def test_labels_are_drawn_by_their_shares():
    torch.manual_seed(0)
    chance = Chance(3).eval()
    share = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    chance.bias.data = share.logit()
    true = (chance(torch.zeros(50_000, 2)) > 0).double().mean(0)
    assert ((true - share).abs() < 4 * (share * (1 - share) / 50_000).sqrt()).all()
    chance.bias.data = share.log() + 5.0
    classes = chance(torch.zeros(50_000, 2)).argmax(1).bincount(minlength=3)
    assert chisquare(classes.numpy(), (share * 50_000).numpy()).pvalue > 0.01


def test_it_learns_the_shares_and_scores_as_scikit_learns():
    torch.manual_seed(0)
    y = (torch.rand(20_000, 4) < torch.tensor([0.05, 0.2, 0.5, 0.8])).float()
    x, chance = torch.zeros(20_000, 1), Chance(4)
    adam = torch.optim.Adam(chance.parameters(), lr=0.1)
    for _ in range(100):
        adam.zero_grad()
        NodeMultiLabels(4).loss(chance(x), y).backward()
        adam.step()
    assert (chance.bias.sigmoid() - y.mean(0)).abs().max() < 0.005
    found = f1_score(y, chance.eval()(x) > 0, average="micro")
    dummy = DummyClassifier(strategy="stratified", random_state=0).fit(x, y)
    assert abs(found - f1_score(y, dummy.predict(x), average="micro")) < 0.01


def test_a_draw_of_zero_leaves_a_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "gat_pyg.baselines.chance.uniform", lambda seed, rows, columns: torch.eye(rows, columns) * (1 - 2**-24)
    )
    out = Chance(3).eval()(torch.zeros(5, 1))
    assert out.isfinite().all() and out[0].unique().numel() == 1 and out[1].unique().numel() == 2


def test_it_says_the_same_each_time_and_another_model_something_else():
    x = torch.zeros(50, 1)
    chance, other = Chance(4).eval(), Chance(4).eval()
    out = chance(x)
    assert torch.equal(chance(x), out)
    assert not torch.equal(other(x), out)
    other.load_state_dict(chance.state_dict())
    assert torch.equal(other(x), out)
    other.seed += 1
    assert torch.equal(Stack([chance, other]).eval()(x), torch.stack([out, other(x)]))
