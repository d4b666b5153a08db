"""The operation: the truth by hand, the laws for every backend, then every backend against the truth."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch_geometric.utils import softmax

import laws
from gat_pyg.attention import attend, reference, segment
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels.cpu import rows
from graphs import BATCH, BIPARTITE, CHAIN, LOOPS, RANDOM, REPEATED, STAR_IN, ZOO, Graph, random
from laws import assert_close, edges_of, inputs, moved

WAYS = ["reference", "fused", "segment", "segment in plain torch"]
weighted = functools.partial(attend, return_attention_weights=True)
DTYPES = [torch.float64, torch.float32]


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend; the segment one with torch_scatter, where it is installed, and without."""
    if request.param == "segment" and not segment.WITH_TORCH_SCATTER:
        pytest.skip("torch_scatter is not installed")
    monkeypatch.setattr(segment, "WITH_TORCH_SCATTER", request.param == "segment")
    return str(request.param).split()[0]


def backend(name: str) -> laws.Attend:
    return lambda *args, **kwargs: attend(*args, backend=name, return_attention_weights=True, **kwargs)


def test_by_hand(name: str) -> None:
    # 0 attends over 1 and 2 with scores log 1 and log 3; 1 hears 0 alone; 2 hears nobody.
    edges = Edges.from_index(torch.tensor([[1, 2, 0], [0, 0, 1]]), 3, 3)
    x = torch.tensor([[[1.0]], [[4.0]], [[8.0]]])
    score_src = torch.tensor([[0.0], [0.0], [math.log(3.0)]])
    out, alpha = weighted(x, score_src, torch.zeros(3, 1), edges, backend=name)
    assert_close(alpha, torch.tensor([[0.25], [0.75], [1.0]]))
    assert_close(out, torch.tensor([[[7.0]], [[1.0]], [[0.0]]]))
    _, alpha = weighted(x, -score_src, None, edges, negative_slope=0.5, backend=name)  # a negative score is halved
    assert_close(alpha, torch.tensor([[math.sqrt(3.0)], [1.0], [1.0 + math.sqrt(3.0)]]) / (1.0 + math.sqrt(3.0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_laws_on_every_graph(name: str, graph: Graph, dtype: torch.dtype) -> None:
    laws.sums_to_one(backend(name), graph, dtype)
    laws.renaming_renames(backend(name), graph, dtype)
    laws.one_neighbour_is_returned(backend(name), graph, dtype)
    laws.equal_scores_give_the_mean(backend(name), graph, dtype)


def test_laws(name: str) -> None:
    for dtype in DTYPES:
        laws.complete_graph_is_dense_attention(backend(name), dtype)
        for first, second in ((CHAIN, LOOPS), (BIPARTITE, STAR_IN), (RANDOM, REPEATED)):
            laws.union_gives_both(backend(name), first, second, dtype)
    for graph in (BATCH, BIPARTITE, REPEATED):
        laws.jacobian_is_zero_without_edge(backend(name), graph)


# Odd sizes, with any of the scores; a single number, the paper's two, and another dtype.
SIZES = [
    (3, 5, torch.float64),
    (3, 5, torch.float32),
    (1, 1, torch.float64),
    (8, 8, torch.float32),
    (1, 121, torch.float32),
]


@pytest.mark.parametrize(("heads", "channels", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize("graph", ZOO, ids=str)
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_every_backend_is_the_reference(name: str, graph: Graph, heads: int, channels: int, dtype: torch.dtype) -> None:
    edges = edges_of(graph)
    x, score_src, score_dst = inputs(graph, heads, channels, dtype)
    score_edge = torch.randn(edges.num_edges, heads, dtype=dtype)
    direction = torch.randn(graph.num_dst, heads, channels, dtype=dtype)
    every = [(score_src, score_dst, score_edge)]
    if (heads, channels, dtype) == SIZES[0]:
        every += [(score_src, score_dst, None), (score_src, None, None), (None,) * 3]
    for terms in every:
        answers = []
        for backend in (name, "reference"):
            leaves = {"x": x, "score_src": terms[0], "score_dst": terms[1], "score_edge": terms[2]}
            leaves = {k: v.clone().requires_grad_() for k, v in leaves.items() if v is not None}
            args = [leaves.get(k) for k in ("x", "score_src", "score_dst")]
            torch.manual_seed(0)
            out, alpha = weighted(
                *args, edges, score_edge=leaves.get("score_edge"), dropout=0.3, backend=backend, negative_slope=0.1
            )
            (out * direction).sum().backward()
            # Nothing to differentiate on a graph without edges: no gradient is a zero one.
            grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
            answers.append({"out": out.detach(), "alpha": alpha.detach(), **grads})
        for key, truth in answers[1].items():
            assert_close(answers[0][key], truth, f"{graph} {key}")


@pytest.mark.parametrize("graph", ZOO, ids=str)
def test_reference_is_the_dense_form(graph: Graph) -> None:
    x, score_src, score_dst = inputs(graph)
    count = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64)
    count.index_put_(
        (graph.index[1], graph.index[0]), torch.ones(graph.index.size(1), dtype=torch.float64), accumulate=True
    )
    dense, _ = reference.attend_dense(x, score_src, score_dst, count)
    out, _ = weighted(x, score_src, score_dst, edges_of(graph), backend="reference")
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
    x, score_src, score_dst = inputs(RANDOM, dtype=torch.float32)
    score_src.requires_grad_()
    out, alpha = weighted(x, score_src + offset, score_dst, edges_of(RANDOM), backend=name)
    out.sum().backward()
    assert alpha.isfinite().all() and out.isfinite().all() and score_src.grad is not None
    assert score_src.grad.isfinite().all()


@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_minus_infinity_masks_an_edge(name: str) -> None:
    edges = edges_of(STAR_IN)
    x, score_src, score_dst = inputs(STAR_IN)
    score_edge = torch.zeros(8, 3, dtype=torch.float64)
    score_edge[2:] = -torch.inf
    _, alpha = weighted(x, score_src, score_dst, edges, score_edge=score_edge, backend=name)
    kept = Edges.from_index(STAR_IN.index[:, :2], 9, 9)
    assert_close(alpha[:2], weighted(x, score_src, score_dst, kept, backend=name)[1])
    assert not alpha[2:].any()
    out, alpha = weighted(x, score_src, score_dst, edges, score_edge=score_edge.fill_(-torch.inf), backend=name)
    assert not alpha.any() and not out.any()


def test_twice_differentiable(name: str) -> None:
    graph = random(5, 4, 12)
    leaves = [t.requires_grad_() for t in inputs(graph, 2, 3)]
    score_edge = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    edges = edges_of(graph)

    def run(x: torch.Tensor, s: torch.Tensor, d: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weighted(x, s, d, edges, score_edge=u, backend=name)

    assert torch.autograd.gradcheck(run, (*leaves, score_edge))
    assert torch.autograd.gradgradcheck(run, (*leaves, score_edge))


@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_vmap_is_a_loop(name: str) -> None:
    edges = edges_of(RANDOM)
    x, score_src, score_dst = (torch.stack([inputs(RANDOM, seed=s)[k] for s in range(3)]) for k in range(3))

    def run(x: torch.Tensor, s: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return attend(x, s, d, edges, backend=name)

    def grad(x: torch.Tensor, s: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.grad(lambda *leaves: run(*leaves).square().sum(), argnums=(0, 1, 2))(x, s, d)

    looped = torch.stack([run(*leaves) for leaves in zip(x, score_src, score_dst, strict=True)])
    assert_close(torch.vmap(run)(x, score_src, score_dst), looped)
    assert_close(
        torch.vmap(run, (None, 0, None))(x[0], score_src, score_dst[0])[2], run(x[0], score_src[2], score_dst[0])
    )
    for mapped, alone in zip(
        torch.vmap(grad)(x, score_src, score_dst), grad(x[1], score_src[1], score_dst[1]), strict=True
    ):
        assert_close(mapped[1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS[1:], indirect=True)
def test_half_precision_sums_in_float32(name: str, dtype: torch.dtype) -> None:
    star = random(4000, 1, 4000)
    x, score_src, score_dst = inputs(star, dtype=dtype)
    out, alpha = weighted(x.abs(), score_src, score_dst, edges_of(star), backend=name)
    exact, _ = weighted(x.abs().double(), score_src.double(), score_dst.double(), edges_of(star), backend=name)
    assert out.dtype == alpha.dtype == dtype
    assert_close(out, exact.to(dtype))  # 4000 terms added up in half precision would be off by far more
    assert attend(x, score_src.float(), score_dst.float(), edges_of(star), backend=name).dtype == torch.float32


def test_dropout_keeps_one_in_two_and_scales() -> None:
    x, score_src, score_dst = inputs(RANDOM)
    _, alpha = weighted(x, score_src, score_dst, edges_of(RANDOM))
    drawn = torch.stack([weighted(x, score_src, score_dst, edges_of(RANDOM), dropout=0.4)[1] for _ in range(300)])
    kept = drawn != 0
    assert_close(drawn[kept], (alpha / 0.6).expand_as(drawn)[kept])
    n = kept.numel()
    assert abs(kept.double().mean() - 0.6) < 4 * math.sqrt(0.24 / n)  # four standard deviations
    out, alpha = weighted(x, score_src, score_dst, edges_of(RANDOM), dropout=1.0)
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
            leaves = [t.requires_grad_() for t in inputs(graph, 4, 16, torch.float32)]
            out = attend(*leaves, edges_of(graph), backend=name)
            out.square().sum().backward()
            runs.append([out, *(leaf.grad for leaf in leaves)])
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
    x, score_src, score_dst = inputs(BIPARTITE, dtype=torch.float32)
    arguments = {"x": x, "score_src": score_src, "score_dst": score_dst, "edges": edges_of(BIPARTITE), **changes}
    with pytest.raises(ValueError, match=message):
        attend(**arguments)
