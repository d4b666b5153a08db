"""The random baseline: its labels have the learnt frequencies, and a seed in the state dict draws them."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from gat_pyg.paper.methods.chance import Chance
from gat_pyg.seeds.stack import Stack


def test_labels_have_the_frequencies_of_the_biases():
    torch.manual_seed(0)
    chance = Chance(3).eval()
    share = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    chance.bias.data = share.logit()
    positive = (chance(torch.zeros(50_000, 2)) > 0).double().mean(0)
    assert ((positive - share).abs() < 4 * (share * (1 - share) / 50_000).sqrt()).all()
    chance.bias.data = share.log() + 5.0
    classes = chance(torch.zeros(50_000, 2)).argmax(1).bincount(minlength=3)
    assert chisquare(classes.numpy(), (share * 50_000).numpy()).pvalue > 0.01
    assert torch.equal(chance.train()(torch.zeros(5, 2)), chance.bias.expand(5, -1))  # no noise in training


def test_the_smallest_draw_gives_a_finite_logit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "gat_pyg.paper.methods.chance.uniform", lambda seed, rows, columns: torch.eye(rows, columns) * (1 - 2**-24)
    )
    out = Chance(3).eval()(torch.zeros(5, 1))
    assert out.isfinite().all() and out[0].unique().numel() == 1 and out[1].unique().numel() == 2


def test_the_seed_in_the_state_dict_determines_the_labels():
    x = torch.zeros(50, 1)
    chance, other = Chance(4).eval(), Chance(4).eval()
    out = chance(x)
    assert torch.equal(chance(x), out)
    assert not torch.equal(other(x), out)
    other.load_state_dict(chance.state_dict())
    assert torch.equal(other(x), out)
    other.seed += 1
    assert torch.equal(Stack([chance, other]).eval()(x), torch.stack([out, other(x)]))
