"""The operation in plain torch: the truth by hand, the laws of the reference, and `segment` against the reference."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch.nn.functional import leaky_relu

from gat_pyg.attention import Additive, GATv2, attend
from gat_pyg.graph.edges import Edges
from tests import laws
from tests.attention.comparisons import Place, answer, check, direction_of
from tests.graphs import BATCH, BIPARTITE, CHAIN, LOOPS, RANDOM, REPEATED, STAR_IN, ZOO, Graph, random
from tests.laws import assert_close, edges_of, moved
from tests.scores import CONSTANT, GATV2, SCORES, Tensors, call, leaves_of

weighted = functools.partial(attend, return_attention_weights=True)
double = functools.partial(torch.tensor, dtype=torch.float64)
ENDS = "x score_src score_dst"


@pytest.fixture(params=[pytest.param("torch_scatter", marks=pytest.mark.sparse), "segment_reduce"])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment backend with torch_scatter, where it is installed, and with torch.segment_reduce."""
    if request.param == "torch_scatter" and not torch_geometric.typing.WITH_TORCH_SCATTER:
        pytest.skip("torch_scatter is not installed")
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", request.param == "torch_scatter")


def by_reference(leaves: Tensors, edges: Edges) -> Any:
    return call(leaves, edges, "reference", return_attention_weights=True)


def test_by_hand() -> None:
    # 0 attends over 1 and 2 with scores log 1 and log 3; 1 over 0 alone; 2 over nobody.
    edges = Edges.from_index(torch.tensor([[1, 2, 0], [0, 0, 1]]), 3, 3)
    x = double([[[1.0]], [[4.0]], [[8.0]]])
    score_src = double([[0.0], [0.0], [math.log(3.0)]])
    for backend in ("reference", "segment"):
        out, alpha = weighted(x, Additive(score_src, torch.zeros_like(score_src)), edges, backend=backend)
        assert_close(alpha, double([[0.25], [0.75], [1.0]]))
        assert_close(out, double([[[7.0]], [[1.0]], [[0.0]]]))
        _, alpha = weighted(x, Additive(-score_src, negative_slope=0.5), edges, backend=backend)  # halved if negative
        assert_close(alpha, double([[math.sqrt(3.0)], [1.0], [1.0 + math.sqrt(3.0)]]) / (1.0 + math.sqrt(3.0)))


@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_laws_on_every_graph(graph: Graph) -> None:
    for names in (CONSTANT, *SCORES):
        laws.sums_to_one(by_reference, names, graph)
        laws.renaming_renames(by_reference, names, graph)
        laws.one_neighbour_is_returned(by_reference, names, graph)
        laws.equal_scores_give_the_mean(by_reference, names, graph)


@pytest.mark.parametrize("names", SCORES)
def test_laws(names: str) -> None:
    laws.complete_graph_is_dense_attention(by_reference, names)
    for first, second in ((CHAIN, LOOPS), (BIPARTITE, STAR_IN), (RANDOM, REPEATED)):
        laws.union_gives_both(by_reference, names, first, second)
    for graph in (BATCH, BIPARTITE, REPEATED):
        laws.jacobian_is_zero_without_edge(by_reference, names, graph)


@pytest.mark.parametrize("graph", ZOO, ids=str)
@pytest.mark.usefixtures("segments")
def test_segment_is_the_reference(graph: Graph) -> None:
    """The output, the attention and every gradient; on a GPU where there is one."""
    place = Place("cuda" if torch.cuda.is_available() else "cpu", torch.float64, "segment")
    for names in (CONSTANT, ENDS, "x score_src", *SCORES):
        check(place, graph, names, dropout=0.3, negative_slope=0.1, return_attention_weights=True)


def test_reference_is_the_dense_form() -> None:
    """The N x N form, as the authors' code has it: every pair is scored, and pairs without an edge are masked."""
    for graph in ZOO:
        x, score_src, score_dst = leaves_of(graph, 3, 4, ENDS).values()
        count = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64)
        ones = torch.ones(graph.index.size(1), dtype=torch.float64)
        count.index_put_((graph.index[1], graph.index[0]), ones, accumulate=True)
        e = leaky_relu(score_dst[:, None] + score_src[None, :], 0.2)  # [N_dst, N_src, H]
        alpha = torch.softmax(e + count.log()[:, :, None], dim=1).nan_to_num()  # an empty row is all -inf
        out, _ = weighted(x, Additive(score_src, score_dst), edges_of(graph), backend="reference")
        assert_close(out, torch.einsum("ijh,jhc->ihc", alpha, x), f"{graph}")


@pytest.mark.parametrize("backend", ["reference", "segment"])
@pytest.mark.parametrize("names", SCORES)
@pytest.mark.usefixtures("segments")
def test_twice_differentiable(names: str, backend: str) -> None:
    """Compare with finite differences; second derivatives of `fused` are those of `segment`, see test_fused."""
    graph = random(5, 4, 12)
    leaves, edges = leaves_of(graph, 3, 5, names), edges_of(graph)

    def run(*values: torch.Tensor) -> Any:
        return call(dict(zip(leaves, values, strict=True)), edges, backend, return_attention_weights=True)

    values = [leaf.requires_grad_() for leaf in leaves.values()]
    assert torch.autograd.gradcheck(run, values, fast_mode=True)  # along a random direction
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.usefixtures("segments", "two_threads")
def test_segment_gives_the_same_bits_every_time() -> None:
    graph = random(500, 500, 20_000)
    leaves, direction = leaves_of(graph, 8, 8, ENDS, torch.float32), direction_of(graph, 8, 8)
    first, *others = (answer(leaves, edges_of(graph), direction, "segment") for _ in range(3))
    assert all(torch.equal(again[name], value) for again in others for name, value in first.items())


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(5, 4)}, r"x has shape \(5, 4\), expected \(N_src, H, C\) with N_src = 5"),
    ({"x": torch.zeros(6, 3, 4)}, r"x has shape \(6, 3, 4\)"),
    ({"score_src": torch.zeros(5, 2)}, r"score_src has shape \(5, 2\), expected \(5, 3\)"),
    ({"score_dst": torch.zeros(5, 3)}, r"score_dst has shape \(5, 3\), expected \(3, 3\)"),
    ({"score_edge": torch.zeros(4, 3)}, r"score_edge has shape \(4, 3\), expected \(5, 3\)"),
    (
        {"edges": moved(edges_of(BIPARTITE), "meta")},
        r"edges is on meta, expected cpu, the device of x\. Build them from edge_index\.to\('cpu'\)\.",
    ),
    ({"score_dst": torch.zeros(3, 3, device="meta")}, r"score_dst is on meta, expected cpu"),
    ({"score_edge": torch.zeros(5, 3, device="meta")}, r"score_edge is on meta, expected cpu"),
    ({"dropout": 1.5}, r"dropout is 1\.5, expected a probability in \[0, 1\]"),
    ({"dropout": -0.1}, r"dropout is -0\.1"),
    ({"backend": "dense"}, r"backend is 'dense', expected one of 'auto', 'fused', 'segment', 'reference'"),
    ({"x_dst": torch.zeros(5, 3, 4)}, r"x_dst has shape \(5, 3, 4\), expected \(3, 3, 4\)"),
    ({"att": torch.zeros(1, 3, 4)}, r"att has shape \(1, 3, 4\), expected \(3, 4\)"),
    ({"x_dst": torch.zeros(3, 3, 4, device="meta")}, "x_dst is on meta, expected cpu"),
    (
        {"x_dst": torch.zeros(3, 3, 4), "edge_attr": torch.zeros(5, 2)},
        "lin_edge is None, but edge_attr and lin_edge go together",
    ),
    ({"att": torch.zeros(3, 4, device="meta")}, "att is on meta, expected cpu"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    score = GATv2 if {"x_dst", "att"} & {*changes} else Additive
    names = GATV2 if score is GATv2 else ENDS
    arguments: dict[str, Any] = {"edges": edges_of(BIPARTITE), **leaves_of(BIPARTITE, 3, 4, names), **changes}
    operands = {name: arguments.pop(name) for name in score.shapes if name in arguments}
    with pytest.raises(ValueError, match=message):
        attend(**arguments, score=score(**operands))
