"""The laws of attention over neighbourhoods, for any score, in float64, as assertions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gat_pyg.graph.edges import Edges
from tests.graphs import COMPLETE, Graph, union
from tests.scores import ADDITIVE, SCORES, SHAPES, leaves_of, messages

# One tolerance per dtype, relative and absolute, for every comparison of two ways to the same number.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

# Heads and channels of a dtype: odd ones in the one, the paper's in the other; for each size kernels are compiled.
SIZES = {torch.float64: (3, 5), torch.float32: (8, 8)}

Attend = Callable[..., tuple[Tensor, Tensor]]


def assert_close(actual: Tensor, expected: Tensor, case: str = "") -> None:
    """Check shape, dtype and values up to the dtype's tolerance; an error names the case and the largest difference."""
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


def sums_to_one(attend: Attend, names: str, graph: Graph) -> None:
    """Equation (2): attention over each neighbourhood sums to one, over none to zero."""
    _, alpha = attend(leaves_of(graph, 3, 5, names), edges_of(graph))
    mass = torch.zeros(graph.num_dst, alpha.size(1), dtype=torch.float64).index_add(0, graph.index[1], alpha)
    has_neighbours = torch.zeros(graph.num_dst, dtype=torch.float64).index_fill(0, graph.index[1], 1.0)
    assert_close(mass, has_neighbours[:, None].expand_as(mass), f"{names} {graph}")
    assert (alpha >= 0).all()


def renaming_renames(attend: Attend, names: str, graph: Graph) -> None:
    """Nodes have no order: permuting them and shuffling the edges permutes the outputs."""
    leaves = leaves_of(graph, 3, 5, names)
    out, alpha = attend(leaves, edges_of(graph))
    generator = torch.Generator().manual_seed(1)
    new_src, new_dst, order = (
        torch.randperm(n, generator=generator) for n in (graph.num_src, graph.num_dst, graph.index.size(1))
    )
    src, dst = graph.index[:, order]
    renamed = Graph(graph.name, torch.stack([new_src[src], new_dst[dst]]), graph.num_src, graph.num_dst)
    rows = {"N_src": new_src.argsort(), "N_dst": new_dst.argsort(), "E": order}
    moved = {name: leaf[rows[SHAPES[name][0]]] if SHAPES[name][0] in rows else leaf for name, leaf in leaves.items()}
    out_renamed, alpha_renamed = attend(moved, edges_of(renamed))
    assert_close(out_renamed[new_dst], out, f"{names} {graph} out")
    assert_close(alpha_renamed, alpha[order], f"{names} {graph} alpha")


def jacobian_is_zero_without_edge(attend: Attend, names: str, graph: Graph) -> None:
    """Masked attention: the output of node i depends on node j exactly if there is an edge from j to i."""
    leaves = leaves_of(graph, 3, 5, names)

    def out(x: Tensor) -> Tensor:
        return attend({**leaves, "x": x}, edges_of(graph))[0].sum((1, 2))

    depends = torch.autograd.functional.jacobian(out, leaves["x"]).abs().sum((2, 3)) > 0  # [N_dst, N_src]
    edge = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.bool)
    edge[graph.index[1], graph.index[0]] = True
    assert torch.equal(depends, edge), f"{names} {graph}"


def one_neighbour_is_returned(attend: Attend, names: str, graph: Graph) -> None:
    """A neighbourhood of one has nothing to weigh, whatever the score."""
    leaves = leaves_of(graph, 3, 5, names)
    leaves = {name: leaf if name == "x" else 100 * leaf for name, leaf in leaves.items()}
    out, _ = attend(leaves, edges_of(graph))
    src, dst = graph.index
    for i in range(graph.num_dst):
        if (dst == i).sum() == 1:
            assert_close(out[i], messages(leaves, src)[dst == i][0], f"{names} {graph} dst {i}")


def equal_scores_give_the_mean(attend: Attend, names: str, graph: Graph) -> None:
    """If all neighbours have the same score, attention is the mean: with zero operands, and with large equal ones."""
    leaves = leaves_of(graph, 3, 5, names)
    src, dst = graph.index
    count = torch.zeros(graph.num_dst, dtype=torch.float64).index_add(
        0, dst, torch.ones(dst.numel(), dtype=torch.float64)
    )
    for value in (0.0, -700.0, 1e4) if names == ADDITIVE else (0.0,):
        equal = {name: leaf if name == "x" else torch.full_like(leaf, value) for name, leaf in leaves.items()}
        each = messages(equal, src)
        sums = torch.zeros(graph.num_dst, *each.shape[1:], dtype=torch.float64).index_add(0, dst, each)
        mean = sums / count.clamp(min=1)[:, None, None]
        assert_close(attend(equal, edges_of(graph))[0], mean, f"{names} {graph} {value}")


def complete_graph_is_dense_attention(attend: Attend, names: str) -> None:
    """On a complete graph it is ordinary softmax attention over the definition of the score, the N x N form."""
    leaves, (src, dst) = leaves_of(COMPLETE, 3, 5, names), COMPLETE.index
    pairs = dict(leaves)
    for name in leaves:
        if SHAPES[name][0] == "E":
            pairs[name] = leaves[name].new_empty(5, 5, leaves[name].size(1))
            pairs[name][dst, src] = leaves[name]
    alpha = torch.softmax(SCORES[names].dense(**pairs), 1)
    out, edge_alpha = attend(leaves, edges_of(COMPLETE))
    each = torch.zeros(5, 5, *out.shape[1:], dtype=torch.float64).index_put((dst, src), messages(leaves, src))
    assert_close(out, torch.einsum("ijh,ijhc->ihc", alpha, each), names)
    assert_close(edge_alpha, alpha[dst, src], names)


def union_gives_both(attend: Attend, names: str, first: Graph, second: Graph) -> None:
    """A disjoint union of graphs gives the results of both."""
    one, other = (leaves_of(graph, 3, 5, names, seed=n) for n, graph in enumerate((first, second)))
    other |= {name: leaf for name, leaf in one.items() if SHAPES[name][0] == "H"}  # parameters, of no node
    both = {name: leaf if leaf is other[name] else torch.cat([leaf, other[name]]) for name, leaf in one.items()}
    out, alpha = attend(both, edges_of(union(first, second)))
    apart = [attend(one, edges_of(first)), attend(other, edges_of(second))]
    assert_close(out, torch.cat([o for o, _ in apart]), names)
    assert_close(alpha, torch.cat([a for _, a in apart]), names)
