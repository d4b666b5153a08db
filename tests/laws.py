"""What attention over neighbourhoods must obey, whoever computes it, as assertions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gat_pyg.attention import reference
from gat_pyg.graph.edges import Edges
from graphs import COMPLETE, Graph, union

# One tolerance per dtype, relative and absolute, for every comparison of two ways to the same number.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

Attend = Callable[..., tuple[Tensor, Tensor]]


def assert_close(actual: Tensor, expected: Tensor, case: str = "") -> None:
    """Equal shape, dtype and values up to the dtype's tolerance, with the case and the largest difference told."""
    assert actual.shape == expected.shape, f"{case}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{case}: dtype {actual.dtype}, expected {expected.dtype}"
    tolerance = TOLERANCE[actual.dtype]
    worst = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance), f"{case}: differs by up to {worst:.2e}"


def edges_of(graph: Graph) -> Edges:
    return Edges.from_index(graph.index, graph.num_src, graph.num_dst)


def moved(edges: Edges, device: str) -> Edges:
    """The same edges on another device."""
    return replace(
        edges, **{name: value.to(device) for name, value in vars(edges).items() if isinstance(value, Tensor)}
    )


def inputs(graph: Graph, heads: int = 3, channels: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Features and scores for a graph: (x, score_src, score_dst)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (graph.num_src, heads, channels), (graph.num_src, heads), (graph.num_dst, heads)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def sums_to_one(attend: Attend, graph: Graph, dtype: torch.dtype) -> None:
    """Equation (2): attention over each neighbourhood sums to one, over none to zero."""
    edges = edges_of(graph)
    _, alpha = attend(*inputs(graph, dtype=dtype), edges)
    mass = torch.zeros(graph.num_dst, alpha.size(1), dtype=dtype).index_add(0, graph.index[1], alpha)
    has_neighbours = torch.zeros(graph.num_dst, dtype=dtype).index_fill(0, graph.index[1], 1.0)
    assert_close(mass, has_neighbours[:, None].expand_as(mass), f"{graph}")
    assert (alpha >= 0).all()


def renaming_renames(attend: Attend, graph: Graph, dtype: torch.dtype) -> None:
    """Nodes have no order: permuting them and shuffling the edges permutes the outputs."""
    x, s, d = inputs(graph, dtype=dtype)
    out, alpha = attend(x, s, d, edges_of(graph))
    generator = torch.Generator().manual_seed(1)
    new_src, new_dst, order = (
        torch.randperm(n, generator=generator) for n in (graph.num_src, graph.num_dst, graph.index.size(1))
    )
    src, dst = graph.index[:, order]
    renamed = Graph(graph.name, torch.stack([new_src[src], new_dst[dst]]), graph.num_src, graph.num_dst)
    moved = [torch.empty_like(t).index_copy_(0, new, t) for t, new in ((x, new_src), (s, new_src), (d, new_dst))]
    out_renamed, alpha_renamed = attend(*moved, edges_of(renamed))
    assert_close(out_renamed[new_dst], out, f"{graph} out")
    assert_close(alpha_renamed, alpha[order], f"{graph} alpha")


def jacobian_is_zero_without_edge(attend: Attend, graph: Graph) -> None:
    """Masked attention: node i hears from node j exactly where there is an edge from j to i."""
    x, s, d = inputs(graph)
    jacobian = torch.autograd.functional.jacobian(lambda x: attend(x, s, d, edges_of(graph))[0].sum((1, 2)), x)
    heard = jacobian.abs().sum((2, 3)) > 0  # [N_dst, N_src]
    edge = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.bool)
    edge[graph.index[1], graph.index[0]] = True
    assert torch.equal(heard, edge), f"{graph}"


def one_neighbour_is_returned(attend: Attend, graph: Graph, dtype: torch.dtype) -> None:
    """A neighbourhood of one has nothing to weigh."""
    x, s, d = inputs(graph, dtype=dtype)
    out, _ = attend(x, 100 * s, 100 * d, edges_of(graph))
    src, dst = graph.index
    for i in range(graph.num_dst):
        if (dst == i).sum() == 1:
            assert_close(out[i], x[src[dst == i][0]], f"{graph} dst {i}")


def equal_scores_give_the_mean(attend: Attend, graph: Graph, dtype: torch.dtype) -> None:
    """Where all neighbours score the same, attention is the mean, whatever the score."""
    x, s, d = inputs(graph, dtype=dtype)
    src, dst = graph.index
    count = torch.zeros(graph.num_dst, dtype=dtype).index_add(0, dst, torch.ones(dst.numel(), dtype=dtype))
    mean = (
        torch.zeros(graph.num_dst, *x.shape[1:], dtype=dtype).index_add(0, dst, x[src])
        / count.clamp(min=1)[:, None, None]
    )
    for score in (None, torch.zeros_like(s), torch.full_like(s, -700.0), torch.full_like(s, 1e4)):
        out, _ = attend(x, score, d, edges_of(graph))
        assert_close(out, mean, f"{graph}")


def complete_graph_is_dense_attention(attend: Attend, dtype: torch.dtype) -> None:
    """On a complete graph it is ordinary softmax attention, the N x N form."""
    x, s, d = inputs(COMPLETE, dtype=dtype)
    dense, alpha = reference.attend_dense(x, s, d, torch.ones(5, 5))
    out, edge_alpha = attend(x, s, d, edges_of(COMPLETE))
    assert_close(out, dense)
    src, dst = COMPLETE.index
    assert_close(edge_alpha, alpha[dst, src])


def union_gives_both(attend: Attend, first: Graph, second: Graph, dtype: torch.dtype) -> None:
    """Graphs side by side don't see one another."""
    one, other = inputs(first, dtype=dtype), inputs(second, dtype=dtype, seed=1)
    both = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    out, alpha = attend(*both, edges_of(union(first, second)))
    apart = [attend(*one, edges_of(first)), attend(*other, edges_of(second))]
    assert_close(out, torch.cat([o for o, _ in apart]))
    assert_close(alpha, torch.cat([a for _, a in apart]))
