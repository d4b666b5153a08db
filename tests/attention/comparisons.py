"""A call of the operation, its output and every gradient, compared with those of another backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gat_pyg.graph.edges import Edges
from tests.graphs import Graph, random
from tests.laws import assert_close
from tests.scores import ADDITIVE, DOT_EDGES, GATV2_EDGES, Tensors, call, leaves_of

FOLDERS = [ADDITIVE, GATV2_EDGES, DOT_EDGES]  # a score of each kind of kernels, with all its operands
TERMS = ["x score_src score_dst", "x score_edge", "x score_src", "x score_dst"]  # of the additive score: some of them
WEIGHTED = [f"{names} edge_weight" for names in FOLDERS]
MEMORY = pytest.mark.parametrize("speed", [True, False], ids=["speed", "memory"])
EVERYWHERE = pytest.mark.parametrize("place", ["numba", "triton", "segment"], indirect=True)
SMALL = random(7, 6, 25)
MANY = 17  # features of an edge, more than are summed for all heads together


class Place(NamedTuple):
    """A backend, the device that it runs on, and the widest dtype of its kernels."""

    device: str
    dtype: torch.dtype
    backend: str = "fused"
    is_triton: bool = False

    def to(self, leaves: Tensors) -> Tensors:
        return {name: leaf.to(self.device, self.dtype) for name, leaf in leaves.items()}

    def edges(self, graph: Graph) -> Edges:
        return Edges.from_index(graph.index.to(self.device), graph.num_src, graph.num_dst)


NUMBA = Place("cpu", torch.float64)


def direction_of(graph: Graph, heads: int, channels: int) -> Tensor:
    return torch.randn(graph.num_dst, heads, channels, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def answer(leaves: Tensors, edges: Edges, direction: Tensor, backend: str = "fused", **options: Any) -> Tensors:
    """The output and every gradient by name; with `return_attention_weights=True`, alpha too."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    result = call(leaves, edges, backend, **options)
    out, *alpha = result if isinstance(result, tuple) else (result,)
    out.backward(direction.to(out))
    # Nothing to differentiate on a graph without edges: no gradient is a zero one.
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), **dict(zip(("alpha",), alpha, strict=False)), **grads}


def assert_same(results: Tensors, truth: Tensors, case: str) -> None:
    assert results.keys() == truth.keys()
    for name, expected in truth.items():
        assert_close(results[name], expected.to(results[name].dtype), f"{case} {name}")


def wide(leaves: Tensors) -> Tensors:
    return {name: leaf.double() for name, leaf in leaves.items()}


def compare(
    place: Place, graph: Graph | Edges, leaves: Tensors, direction: Tensor, truth_by: str = "reference", **options: Any
) -> Tensors:
    """Compare output and every gradient with those of a plain backend in float64; return them."""
    edges = graph if isinstance(graph, Edges) else place.edges(graph)
    direction = direction.to(place.device)
    results = answer(leaves, edges, direction, place.backend, **options)
    assert_same(results, answer(wide(leaves), edges, direction, truth_by, **options), f"{graph} {[*leaves]} {options}")
    return results


def check(
    place: Place, graph: Graph, names: str, heads: int = 3, channels: int = 5, dtype: Any = None, **options: Any
) -> Tensors:
    """The same with random operands by name."""
    leaves = place._replace(dtype=dtype or place.dtype).to(leaves_of(graph, heads, channels, names))
    return compare(place, graph, leaves, direction_of(graph, heads, channels), **options)


class Spy:
    """A function, or a kernel, that keeps the arguments of its calls, and counts its launches on a GPU."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls, self.launches = function, [], 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(args)
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.function[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Spy:
    watched = Spy(getattr(module, name))
    monkeypatch.setattr(module, name, watched)
    return watched


def stairs(*degrees: int) -> Graph:
    """dst i hears `degrees[i]` edges, from few src, in a shuffled order."""
    dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    dst = dst[torch.randperm(dst.numel(), generator=torch.Generator().manual_seed(0))]
    return Graph("stairs", torch.stack([torch.arange(dst.numel()) % 5, dst]), 5, len(degrees))


def turned(graph: Graph) -> Graph:
    return Graph(f"{graph} turned", graph.index.flip(0), graph.num_dst, graph.num_src)


def in_mode(monkeypatch: pytest.MonkeyPatch, speed: bool) -> None:
    """Let the additive score save O and O+ for the backward pass, or not."""
    monkeypatch.setattr("gat_pyg.attention.additive.prefers_speed", lambda *_: speed)


def modes_of(names: str) -> tuple[bool, ...]:
    return (True, False) if names.startswith("x score_") else (True,)


def split_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of edges above which a row is several chunks; 8 in Triton's interpreter, which takes long."""
    if not place.is_triton:
        from gat_pyg.kernels.cpu import rows

        return rows.SPLIT
    from gat_pyg.kernels.gpu import rows as gpu_rows

    if place.device == "cpu":
        monkeypatch.setattr(gpu_rows, "SPLIT", 8)
    return gpu_rows.SPLIT
