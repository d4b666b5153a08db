"""Random walks and the skip-gram loss, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gat_pyg.paper.methods._walks import Walks, skip_gram_loss
from tests.graphs import SQUARE, Graph


@pytest.mark.parametrize("graph", [g for g in SQUARE if g.num_src], ids=str)
def test_walks_follow_edges_and_stay_at_nodes_without_out_edges(graph: Graph):
    steps = set(zip(*graph.index.tolist(), strict=True))
    sources = {src for src, _ in steps}
    for walk in Walks(graph.index, graph.num_src)(torch.arange(graph.num_src).repeat(3), 7).tolist():
        assert all((a, b) in steps or (a == b and a not in sources) for a, b in pairwise(walk))


def test_walks_take_each_edge_equally_often():
    torch.manual_seed(0)
    walks = Walks(torch.tensor([[0, 0, 0, 0], [1, 2, 3, 3]]), 4)(torch.zeros(4000, dtype=torch.long), 2)
    share = walks[:, 1].bincount(minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.25, 0.25, 0.5]), atol=0.03, rtol=0)  # 4 standard deviations


def test_skip_gram_loss_by_hand(monkeypatch: pytest.MonkeyPatch):
    z, c = torch.randn(2, 4, 3, dtype=torch.double)
    walks = torch.tensor([[0, 1, 3], [2, 2, 0]])
    negatives = torch.tensor([3, 0])
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: negatives)
    pairs = [(0, 1), (1, 0), (1, 3), (3, 1), (2, 2), (2, 2), (2, 0), (0, 2)]
    meet = torch.stack([(z[v] @ c[u]).sigmoid().log() for v, u in pairs]).mean()
    miss = torch.stack([(-z[v] @ c[r]).sigmoid().log() for v in walks.flatten() for r in negatives]).mean()
    torch.testing.assert_close(skip_gram_loss(z, c, walks, 1, 5), -meet - 5 * miss)
