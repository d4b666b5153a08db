"""The operation: the truth by hand, the laws for every backend, then every backend against the truth."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch_geometric.utils import softmax

from gat_pyg.attention import Additive, attend, reference, segment
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels.cpu import rows
from tests import laws
from tests.graphs import BATCH, BIPARTITE, CHAIN, LOOPS, RANDOM, REPEATED, STAR_IN, ZOO, Graph, random
from tests.laws import assert_close, edges_of, moved
from tests.scores import ADDITIVE, CONSTANT, SCORES, Tensors, call, leaves_of, like

WAYS = ["reference", "fused", "segment", "segment in plain torch"]
weighted = functools.partial(attend, return_attention_weights=True)
double = functools.partial(torch.tensor, dtype=torch.float64)
DTYPES = [torch.float64, torch.float32]
ENDS = "x score_src score_dst"


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend; the segment one with torch_scatter, where it is installed, and without."""
    if request.param == "segment" and not segment.WITH_TORCH_SCATTER:
        pytest.skip("torch_scatter is not installed")
    monkeypatch.setattr(segment, "WITH_TORCH_SCATTER", request.param == "segment")
    return str(request.param).split()[0]


def backend(name: str) -> laws.Attend:
    return lambda leaves, edges: call(leaves, edges, name, return_attention_weights=True)


def test_by_hand(name: str) -> None:
    # 0 attends over 1 and 2 with scores log 1 and log 3; 1 over 0 alone; 2 over nobody.
    edges = Edges.from_index(torch.tensor([[1, 2, 0], [0, 0, 1]]), 3, 3)
    x = double([[[1.0]], [[4.0]], [[8.0]]])
    score_src = double([[0.0], [0.0], [math.log(3.0)]])
    out, alpha = weighted(x, Additive(score_src, torch.zeros_like(score_src)), edges, backend=name)
    assert_close(alpha, double([[0.25], [0.75], [1.0]]))
    assert_close(out, double([[[7.0]], [[1.0]], [[0.0]]]))
    _, alpha = weighted(x, Additive(-score_src, negative_slope=0.5), edges, backend=name)  # a negative score is halved
    assert_close(alpha, double([[math.sqrt(3.0)], [1.0], [1.0 + math.sqrt(3.0)]]) / (1.0 + math.sqrt(3.0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_laws_on_every_graph(name: str, graph: Graph, dtype: torch.dtype) -> None:
    for names in (CONSTANT, *SCORES):
        laws.sums_to_one(backend(name), names, graph, dtype)
        laws.renaming_renames(backend(name), names, graph, dtype)
        laws.one_neighbour_is_returned(backend(name), names, graph, dtype)
        laws.equal_scores_give_the_mean(backend(name), names, graph, dtype)


@pytest.mark.parametrize("names", SCORES)
def test_laws(name: str, names: str) -> None:
    for dtype in DTYPES:
        laws.complete_graph_is_dense_attention(backend(name), names, dtype)
        for first, second in ((CHAIN, LOOPS), (BIPARTITE, STAR_IN), (RANDOM, REPEATED)):
            laws.union_gives_both(backend(name), names, first, second, dtype)
    for graph in (BATCH, BIPARTITE, REPEATED):
        laws.jacobian_is_zero_without_edge(backend(name), names, graph)


# Odd sizes in the one dtype, the paper's in the other; a single number; the size of the paper's last layer.
SIZES = [
    (3, 5, torch.float64),
    (8, 8, torch.float32),
    (1, 1, torch.float64),
    (1, 121, torch.float32),
]


@pytest.mark.parametrize("graph", ZOO, ids=str)
@pytest.mark.parametrize("names", [CONSTANT, ENDS, "x score_src", *SCORES])
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_every_backend_is_the_reference(name: str, names: str, graph: Graph) -> None:
    several = SIZES if names == ADDITIVE else SIZES[:3] if graph is RANDOM else SIZES[:2]
    for heads, channels, dtype in several if names in SCORES else SIZES[:1]:
        leaves, edges = leaves_of(graph, heads, channels, names, dtype), edges_of(graph)
        direction = torch.randn(graph.num_dst, heads, channels, dtype=dtype)
        truth = answer({name: leaf.double() for name, leaf in leaves.items()}, edges, direction, "reference")
        for key, value in answer(leaves, edges, direction, name).items():
            assert_close(value, truth[key].to(dtype), f"{graph} {names} {heads}x{channels} {key}")


def answer(leaves: Tensors, edges: Edges, direction: torch.Tensor, backend: str) -> Tensors:
    """The output, the attention and every gradient by name."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    options = {"dropout": 0.3, "negative_slope": 0.1, "return_attention_weights": True}
    out, alpha = call(leaves, edges, backend, **options)
    (out * like(direction, out)).sum().backward()
    # Nothing to differentiate on a graph without edges: no gradient is a zero one.
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "alpha": alpha.detach(), **grads}


@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_reference_is_the_dense_form(graph: Graph) -> None:
    x, score_src, score_dst = leaves_of(graph, 3, 4, ENDS).values()
    count = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64)
    count.index_put_(
        (graph.index[1], graph.index[0]), torch.ones(graph.index.size(1), dtype=torch.float64), accumulate=True
    )
    dense, _ = reference.attend_dense(x, score_src, score_dst, count)
    out, _ = weighted(x, Additive(score_src, score_dst), edges_of(graph), backend="reference")
    assert_close(out, dense, f"{graph}")
    assert reference.concat_heads(out).shape == (graph.num_dst, 12) and reference.mean_heads(out).shape == (
        graph.num_dst,
        4,
    )


@pytest.mark.parametrize("name", WAYS[2:], indirect=True)
@pytest.mark.usefixtures("name")
def test_softmax_is_pygs() -> None:
    edges = edges_of(RANDOM)
    scores = torch.randn(edges.num_edges, 3, dtype=torch.float64)
    alpha = segment.segment_softmax(scores, edges)
    assert_close(alpha, softmax(scores, edges.dst.long(), num_nodes=edges.num_dst))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e30, -1e30])
def test_no_score_overflows(name: str, offset: float) -> None:
    x, score_src, score_dst = leaves_of(RANDOM, 8, 8, ENDS, torch.float32).values()
    score_src.requires_grad_()
    out, alpha = weighted(x, Additive(score_src + offset, score_dst), edges_of(RANDOM), backend=name)
    out.sum().backward()
    assert alpha.isfinite().all() and out.isfinite().all() and score_src.grad is not None
    assert score_src.grad.isfinite().all()


@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_minus_infinity_masks_an_edge(name: str) -> None:
    edges = edges_of(STAR_IN)
    x, *ends = leaves_of(STAR_IN, 3, 5, ENDS).values()
    score_edge = torch.zeros(8, 3, dtype=torch.float64)
    score_edge[2:] = -torch.inf
    _, alpha = weighted(x, Additive(*ends, score_edge), edges, backend=name)
    kept = Edges.from_index(STAR_IN.index[:, :2], 9, 9)
    assert_close(alpha[:2], weighted(x, Additive(*ends), kept, backend=name)[1])
    assert not alpha[2:].any()
    out, alpha = weighted(x, Additive(*ends, score_edge.fill_(-torch.inf)), edges, backend=name)
    assert not alpha.any() and not out.any()


@pytest.mark.parametrize("names", SCORES)
def test_twice_differentiable(name: str, names: str) -> None:
    graph = random(5, 4, 12)
    leaves, edges = leaves_of(graph, 3, 5, names), edges_of(graph)

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return call(dict(zip(leaves, values, strict=True)), edges, name, return_attention_weights=True)

    values = [leaf.requires_grad_() for leaf in leaves.values()]
    assert torch.autograd.gradcheck(run, values, fast_mode=True)  # along a random direction
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize("names", SCORES)
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_vmap_is_a_loop(name: str, names: str) -> None:
    edges = edges_of(RANDOM)
    batch = [leaves_of(RANDOM, 3, 5, names, seed=seed) for seed in range(3)]
    stack = {key: torch.stack([leaves[key] for leaves in batch]) for key in batch[0]}

    def run(leaves: Tensors) -> torch.Tensor:
        return call(leaves, edges, name)

    def grad(leaves: Tensors) -> Tensors:
        return torch.func.grad(lambda leaves: run(leaves).square().sum())(leaves)

    assert_close(torch.vmap(run)(stack), torch.stack([run(leaves) for leaves in batch]), names)
    last = [*stack][-1]
    shared = {key: stack[key] if key == last else batch[0][key] for key in stack}
    mapped = torch.vmap(run, ({key: 0 if key == last else None for key in stack},))(shared)
    assert_close(mapped[2], run({**batch[0], last: batch[2][last]}), f"{names} {last} alone")
    grads, alone = torch.vmap(grad)(stack), grad(batch[1])
    for key in stack:
        assert_close(grads[key][1], alone[key], f"{names} {key}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_half_precision_sums_in_float32(name: str, dtype: torch.dtype) -> None:
    star = random(4000, 1, 4000)
    x, score_src, score_dst = leaves_of(star, 8, 8, ENDS, dtype).values()
    out, alpha = weighted(x.abs(), Additive(score_src, score_dst), edges_of(star), backend=name)
    wide = Additive(score_src.double(), score_dst.double())
    exact, _ = weighted(x.abs().double(), wide, edges_of(star), backend=name)
    assert out.dtype == alpha.dtype == dtype
    assert_close(out, exact.to(dtype))  # 4000 terms added up in half precision would be off by far more
    mixed = Additive(score_src.float(), score_dst.float())
    assert attend(x, mixed, edges_of(star), backend=name).dtype == torch.float32


def test_dropout_keeps_one_in_two_and_scales() -> None:
    x, *ends = leaves_of(RANDOM, 3, 5, ENDS).values()
    _, alpha = weighted(x, Additive(*ends), edges_of(RANDOM))
    drawn = torch.stack([weighted(x, Additive(*ends), edges_of(RANDOM), dropout=0.4)[1] for _ in range(300)])
    kept = drawn != 0
    assert_close(drawn[kept], (alpha / 0.6).expand_as(drawn)[kept])
    n = kept.numel()
    assert abs(kept.double().mean() - 0.6) < 4 * math.sqrt(0.24 / n)  # four standard deviations
    out, alpha = weighted(x, Additive(*ends), edges_of(RANDOM), dropout=1.0)
    assert not out.any() and not alpha.any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_the_same_bits_every_time(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SMALL", 1)
    graph = random(500, 500, 20_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = []
        for _ in range(5):
            leaves = {k: v.requires_grad_() for k, v in leaves_of(graph, 8, 8, ENDS, torch.float32).items()}
            out = call(leaves, edges_of(graph), name)
            out.square().sum().backward()
            runs.append([out, *(leaf.grad for leaf in leaves.values())])
        for again in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(again, runs[0], strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
)
def test_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = leaves_of(BIPARTITE, 3, 4, ENDS, torch.float32)
    arguments |= {"edges": edges_of(BIPARTITE), **changes}
    score = Additive(**{name: arguments.pop(name) for name in Additive.shapes if name in arguments})
    with pytest.raises(ValueError, match=message):
        attend(**arguments, score=score)
