"""Random layers on random graphs: PyG's layers in float64 are the oracle, for outputs, attention and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gat_pyg.attention.operation import BACKENDS
from tests.conv.test_conv import FILLS, LAYERS, assert_same, float64, pair, run
from tests.graphs import Graph, random

__all__ = ["float64"]  # the fixture: PyG's arithmetic is the oracle in float64

DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]

GRAPHS = st.builds(
    lambda num_nodes, num_edges, loops, seed: with_loops(random(num_nodes, num_nodes, num_edges, seed), loops),
    num_nodes=st.integers(1, 100),
    num_edges=st.integers(0, 300),
    loops=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)


def with_loops(graph: Graph, loops: int) -> Graph:
    """Loops at the first nodes, the very first one twice."""
    ids = torch.arange(min(loops, graph.num_src)).repeat(2)[: loops + 1]
    return Graph(graph.name, torch.cat([graph.index, torch.stack([ids, ids])], 1), graph.num_src, graph.num_dst)


OPTIONS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([1, 3]),
        "concat": st.booleans(),
        "negative_slope": st.sampled_from([0.0, 0.2, 1.0]),
        "add_self_loops": st.booleans(),
        "edge_dim": st.sampled_from([None, 1, 3]),
        "fill_value": st.sampled_from(FILLS[:-1]),
        "bias": st.booleans(),
        "residual": st.booleans(),
        "flow": st.sampled_from(["source_to_target", "target_to_source"]),
    }
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    graph=GRAPHS,
    options=OPTIONS,
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from(BACKENDS),
    contiguous=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(
    graph=random(5, 5, 12),
    options={"heads": 3, "edge_dim": 3, "fill_value": "mul"},
    dtype=torch.int32,
    backend="auto",
    contiguous=True,
    seed=0,
)
def test_any_layer_is_pygs(
    name: str, graph: Graph, options: dict[str, Any], dtype: torch.dtype, backend: str, contiguous: bool, seed: int
) -> None:
    theirs, ours = pair(name, 5, 5, **options)  # 3x5 as in the other tests, for which kernels are there
    ours.backend = backend if options["heads"] == 3 or backend == "reference" else "segment"
    x, edge_attr = normal(graph.num_src, 5, seed=seed), None
    if options["edge_dim"] is not None:
        edge_attr = normal(graph.index.size(1), options["edge_dim"], seed=seed + 1)
        edge_attr = edge_attr[:, 0] if options["edge_dim"] == 1 and seed % 2 else edge_attr
    index = graph.index.to(dtype)
    index = index if contiguous else index.t().contiguous().t()
    answer, expected = run(ours, x, index, edge_attr), run(theirs, x, graph.index, edge_attr)
    assert torch.equal(answer.pop("order").long(), expected.pop("order"))
    assert_same(answer, expected, f"{name} {graph} {options} {dtype} {backend}")
