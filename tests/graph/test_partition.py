"""Parts of a graph: every node in one, none empty, the same every time, and few edges between those of METIS."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.utils import grid, to_undirected

import gat_pyg.graph.partition
from gat_pyg.graph.partition import WITH_METIS, Method, edge_cut, partition
from tests.graphs import random

METIS = pytest.param("metis", marks=pytest.mark.skipif(not WITH_METIS, reason="pymetis is not installed"))
METHODS = ["auto", "ranges", METIS]


def shuffled_grid(side: int) -> Tensor:
    """A grid whose nodes are numbered at random."""
    edge_index, _ = grid(side, side)
    return torch.randperm(side * side, generator=torch.Generator().manual_seed(0))[to_undirected(edge_index)]


def test_a_chain_by_hand():
    chain = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
    assert partition(chain, 7, 3, "ranges").tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert edge_cut(chain, partition(chain, 7, 3, "ranges")) == pytest.approx(2 / 6)
    assert edge_cut(chain, torch.zeros(7, dtype=torch.long)) == edge_cut(chain[:, :0], torch.arange(7)) == 0.0
    assert edge_cut(chain, torch.arange(7)) == 1.0


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(N=st.integers(1, 300), degree=st.integers(0, 6), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_every_node_is_in_one_part_and_none_is_empty(method: Method, N: int, degree: int, share: float, seed: int):
    num_parts, edge_index = max(1, round(share * N)), random(N, N, N * degree, seed).index
    part = partition(edge_index, N, num_parts, method)
    sizes = part.bincount()
    assert part.shape == (N,) and part.dtype == torch.int64
    assert len(sizes) == num_parts and sizes.min() >= 1
    if method == "ranges":
        assert sizes.max() - sizes.min() <= 1
    assert torch.equal(part, partition(edge_index, N, num_parts, method))


@pytest.mark.skipif(not WITH_METIS, reason="pymetis is not installed")
@pytest.mark.parametrize("num_parts", [2, 7, 16])
def test_metis_cuts_few_edges_of_a_shuffled_grid(num_parts: int):
    edge_index = shuffled_grid(40)
    ranges, metis = (partition(edge_index, 1600, num_parts, method) for method in ("ranges", "metis"))
    assert edge_cut(edge_index, metis) < 0.2 * edge_cut(edge_index, ranges)
    assert metis.bincount().max() <= 1.05 * 1600 / num_parts + 1
    assert torch.equal(partition(edge_index, 1600, num_parts), metis)  # is what auto means
    one_way = edge_index[:, edge_index[0] < edge_index[1]].int()  # 32 bits, loops and repeated edges change nothing
    messy = torch.cat([one_way, one_way[:, ::2], torch.arange(9).expand(2, 9)], 1)
    assert torch.equal(partition(messy, 1600, num_parts, "metis"), metis)


@pytest.mark.skipif(not WITH_METIS, reason="pymetis is not installed")
def test_a_large_graph_is_divided_alike_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    def run(command: list[Any], check: bool) -> None:
        """Run a module as a process would, in this one, which has imported torch."""
        assert command[:3] == [sys.executable, "-m", gat_pyg.graph.partition.__name__] and check
        monkeypatch.setattr(sys, "argv", [str(part) for part in command[2:]])
        runpy.run_path(gat_pyg.graph.partition.__file__, run_name="__main__")

    edge_index = shuffled_grid(20)
    here = partition(edge_index, 400, 5, "metis")
    monkeypatch.setattr("gat_pyg.graph.partition.LARGE", 0)
    monkeypatch.setattr("gat_pyg.graph.partition.subprocess", SimpleNamespace(run=run))
    assert torch.equal(partition(edge_index, 400, 5, "metis"), here)


def test_without_pymetis_auto_is_ranges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gat_pyg.graph.partition, "WITH_METIS", False)
    edge_index = shuffled_grid(4)
    assert torch.equal(partition(edge_index, 16, 3), partition(edge_index, 16, 3, "ranges"))
    with pytest.raises(ImportError, match=r"METIS needs pymetis. Run: python -m pip install 'gat_pyg\[metis\]'"):
        partition(edge_index, 16, 3, "metis")


def test_a_wrong_number_of_parts_or_method_is_an_error():
    for num_parts in (-1, 0, 4):
        with pytest.raises(ValueError, match=f"num_parts is {num_parts}, expected 1 to 3, the number of nodes"):
            partition(torch.tensor([[0], [1]]), 3, num_parts)
    with pytest.raises(ValueError, match="method is 'louvain', expected one of auto, metis, ranges"):
        partition(torch.tensor([[0], [1]]), 3, 2, "louvain")
