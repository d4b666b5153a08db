"""Attention dropout: random numbers by Philox, and masks that the kernels and the plain backends share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg import philox
from gat_pyg.graph.edges import Edges
from gat_pyg.philox import keep_mask
from tests.attention.comparisons import NUMBA, compare, direction_of
from tests.graphs import Graph
from tests.laws import assert_close
from tests.scores import ADDITIVE, SCORES, leaves_of

PAIRS = [names for names in SCORES if "x_dst" in names]
weekly = pytest.mark.weekly


class Counter:
    """The first two words of a counter, as `_philox` reads them from an edge."""

    def __init__(self, word: int) -> None:
        self.word = word

    def __and__(self, low: int) -> Tensor:
        return torch.tensor(self.word & low)

    def __rshift__(self, bits: int) -> Tensor:
        return torch.tensor(self.word)


@pytest.mark.parametrize(
    ("word", "known"),  # of Random123's kat_vectors, philox4x32 with 10 rounds
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_gives_the_known_answers(word: int, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # In use the last word of a counter is always zero, and no edge's number is negative.
    monkeypatch.setattr(torch, "zeros_like", lambda group: torch.full_like(group, word))
    key: Any = torch.tensor(-1 if word else 0)
    edge: Any = Counter(word)
    words = philox._philox(key, edge, torch.tensor(word))
    assert " ".join(f"{int(w):08x}" for w in words) == known


P = 0.3
SEEDS = [torch.tensor(s) for s in (0, 1, 2**62 + 12345)]


def test_one_minus_p_is_kept() -> None:
    for seed in SEEDS:
        for p in (0.001, P, 0.6, 0.999):
            selected = keep_mask(seed, 20_000, 7, p, torch.float64) != 0
            assert abs(selected.double().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / selected.numel()), (seed, p)
    mask = keep_mask(SEEDS[0], 500, 3, P, torch.float64)
    assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 1 / (1 - P)))
    assert (keep_mask(SEEDS[0], 500, 3, 0.0) == 1).all() and not keep_mask(SEEDS[0], 500, 3, 1.0).any()


def test_coefficients_are_dropped_independently() -> None:
    one = keep_mask(SEEDS[0], 40_000, 8, P) != 0
    other = keep_mask(SEEDS[1], 40_000, 8, P) != 0
    pairs = {
        "heads": (one[:, 0], one[:, 1]),
        "edges": (one[:-1].flatten(), one[1:].flatten()),
        "seeds": (one.flatten(), other.flatten()),
        "groups of four": (one[:, :4].flatten(), one[:, 4:].flatten()),
    }
    for between, (first, second) in pairs.items():
        counts = torch.bincount(first.long() * 2 + second.long(), minlength=4).double()
        expected = torch.tensor([P * P, P * (1 - P), P * (1 - P), (1 - P) ** 2]) * counts.sum()
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # of 3 degrees of freedom, at 4 standard deviations (two sides: 6.3e-5, here 2.2e-5)
        assert chi_square < 24.3, between


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
def test_masks_of_many_seeds_are_each_one_alone(heads: int) -> None:
    """Side by side in the heads, and under vmap, nested and of any dimension too: the same bits."""
    seeds = torch.stack(SEEDS)
    alone = torch.stack([keep_mask(seed, 50, heads, P) for seed in SEEDS])  # [S, E, H]
    assert torch.equal(keep_mask(seeds, 50, 3 * heads, P), alone.transpose(0, 1).flatten(1))
    assert torch.equal(keep_mask(seeds[:1], 50, heads, P), alone[0])

    def mapped(seed: Tensor) -> Tensor:
        return keep_mask(seed, 50, heads, P)

    assert torch.equal(torch.vmap(mapped)(seeds), alone)
    grid = torch.stack([seeds, seeds + 7])
    again = torch.stack([torch.stack([mapped(seed) for seed in row]) for row in grid])
    assert torch.equal(torch.vmap(torch.vmap(mapped))(grid), again)
    assert torch.equal(torch.vmap(torch.vmap(mapped), in_dims=1)(grid), again.transpose(0, 1))
    beside = torch.vmap(lambda row: keep_mask(row, 50, 3 * heads, P), in_dims=1)(grid.T)
    assert torch.equal(beside, again.transpose(1, 2).flatten(2))
    assert keep_mask(seeds, 0, 3 * heads, P).shape == (0, 3 * heads)


def ordered(order: str, num_src: int) -> tuple[Graph, Edges]:
    """Each src to each of 5 dst, by edges in an order that needs ids for the places they are put in, or none."""
    num_edges = 5 * num_src
    index = torch.stack([torch.arange(num_edges) % num_src, torch.arange(num_edges) // num_src])
    if order == "grouped":
        edges = Edges.from_csr(torch.arange(0, num_edges + 1, num_src), index[0], num_src)
        assert edges.perm is None
        return Graph(order, index, num_src, 5), edges
    if order == "shuffled":
        index = index[:, torch.randperm(num_edges, generator=torch.Generator().manual_seed(0))]
    return Graph(order, index, num_src, 5), Edges.from_index(index, num_src, 5)


ORDER = pytest.mark.parametrize("order", ["shuffled", "sorted", "grouped"])


@ORDER
@pytest.mark.parametrize("names", [ADDITIVE, *(pytest.param(names, marks=weekly) for names in PAIRS)])
def test_the_kernels_drop_what_keep_mask_does(names: str, order: str) -> None:
    """The output and every gradient have the mask of the plain backends, in any order of the edges."""
    graph, edges = ordered(order, 8)
    for p in (1e-9, 0.5, 1 - 1e-9, 1.0):
        compare(NUMBA, edges, leaves_of(graph, 3, 5, names), direction_of(graph, 3, 5), dropout=p)
