"""The CPU kernels in the interpreter: the results of the compiled ones, and the faults that it finds."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg.attention import attend
from gat_pyg.attention.additive import cpu as additive
from gat_pyg.attention.layer import cpu as layer_kernels
from gat_pyg.attention.layer import cpu_scores, cpu_steps
from gat_pyg.attention.pair import cpu as pair
from gat_pyg.attention.pair import cpu_edges
from gat_pyg.attention.steps import cpu as steps
from gat_pyg.conv import GATConv, GATv2Conv, TransformerConv
from gat_pyg.features import cpu as features
from gat_pyg.features import mask, products
from gat_pyg.features.pattern import Pattern
from gat_pyg.graph import cpu as structure
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels.cpu import cache, rows
from gat_pyg.kernels.cpu import products as matrices
from gat_pyg.philox import keyed
from tests import interpreter
from tests.graphs import Graph
from tests.laws import SIZES, assert_close
from tests.scores import ADDITIVE, DOT_EDGES, GATV2_EDGES, leaves_of, score_of

FEW = [layer_kernels, cpu_scores, cpu_steps, matrices]
MODULES = [*FEW, additive, pair, cpu_edges, steps, features, rows, structure]
DOT = "x x_dst"
EDGES = Edges.from_index(torch.tensor([[0, 1, 2, 3, 0, 4, 4, 1], [0, 0, 0, 1, 2, 2, 2, 2]]), num_src=5, num_dst=4)


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Interpret every kernel from the call on; returns the names of those that have run."""
    ran: set[str] = set()

    def begin() -> set[str]:
        monkeypatch.setattr(cache, "INTERPRETED", interpreter.interpreted)
        for module in MODULES:
            for name, value in [*vars(module).items()]:
                if inspect.isfunction(getattr(value, "py_func", None)) and value in cache._LISTENER.kernels:
                    monkeypatch.setattr(module, name, noted(value))
        return ran

    def noted(kernel: Any) -> Callable[..., Any]:
        run = interpreter.interpreted(kernel)

        def call(*args: Any) -> Any:
            ran.add(f"{kernel.__module__}.{kernel.__name__}")
            return run(*args)

        return call

    return begin


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def results(run: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """The output and the gradient of every leaf, with dropout of one key."""
    with keyed(torch.tensor(7)):
        out = run(*leaves)
    direction = draw(*out.shape, seed=9, dtype=out.dtype).detach()
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


def operation(names: str, edges: Edges, heads: int, channels: int, dtype: Any, p: float, backend: str) -> list[Tensor]:
    graph = Graph("edges", edges.index, edges.num_src, edges.num_dst)
    leaves = leaves_of(graph, heads, channels, names, dtype)
    values = [leaf.requires_grad_() for leaf in leaves.values()]

    def run(*values: Tensor) -> Tensor:
        tensors = dict(zip(leaves, values, strict=True))
        weight = tensors.get("edge_weight")
        return attend(tensors["x"], score_of(tensors), edges, edge_weight=weight, dropout=p, backend=backend)

    return results(run, *values)


def sparse_results(dtype: torch.dtype) -> list[Tensor]:
    """Products of three sparse matrices, each with its own dropout, both ways, and a mask."""
    pattern = Pattern.of((draw(9, 7) > 0).float().to_sparse_csr())
    seeds, p = torch.tensor([1, 2**40, -5]), torch.tensor([0.4, 0.0, 0.9], dtype=torch.float64)
    values, weight = draw(3, pattern.col.numel(), dtype=dtype), draw(3, 7, 70, dtype=dtype)
    both = results(lambda v, w: products.sums(v, w, seeds, p, pattern, False), values, weight)
    return [*both, mask.mask_of(seeds, 100, p, dtype)]


LONG = torch.stack([torch.arange(rows.SPLIT + 3) % 4, torch.zeros(rows.SPLIT + 3, dtype=torch.long)])


def layers(dtype: torch.dtype, backend: Any) -> list[Tensor]:
    """Each layer by its kernels for few edges, with heads of part of a vector and of more than one, then by those for
    many, which have weights of the edges, and loops among them."""
    every, index = [], EDGES.index.long()
    few = index[:, index[0] != index[1]]
    for kind, channels in itertools.product((GATConv, GATv2Conv, TransformerConv), (5, 19)):
        torch.manual_seed(0)
        layer = kind(6, channels, heads=3, edge_dim=3, dropout=0.3, concat=channels == 5, backend=backend).to(dtype)
        leaves = draw(5, 6, dtype=dtype), draw(few.size(1), 3, dtype=dtype), *layer.parameters()
        every += results(lambda x, edge_attr, *_, layer=layer: layer(x, few, edge_attr), *leaves)
    leaves, edge_attr = (draw(5, 6, dtype=dtype), draw(8, 3, dtype=dtype)), draw(8, 3, dtype=dtype).detach()
    layer = GATConv(6, 5, heads=3, edge_dim=3, backend=backend).to(dtype)
    every += results(lambda x, weight: layer(x, index, edge_attr, edge_weight=weight), *leaves)
    return every


def everything(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Results that take every kernel: of the CPU kernels, or of plain torch."""
    heads, channels = SIZES.get(dtype, (8, 8))
    with monkeypatch.context() as patch:
        if backend != "fused":
            patch.setattr(mask, "missing_reason", lambda _: "not now")
            patch.setattr(products, "_weighted_rows", lambda *_: None)
        every = sparse_results(dtype)
        every += layers(torch.promote_types(dtype, torch.float32), backend)  # in which a layer's node is
    for speed in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr("gat_pyg.attention.additive.prefers_speed", lambda *_, speed=speed: speed)
            every += operation(ADDITIVE, EDGES, heads, channels, dtype, 0.3, backend)
    for index in (LONG, LONG.flip(0)):
        every += operation(ADDITIVE, Edges.from_index(index, 4, 4), heads, channels, dtype, 0.3, backend)
    every += operation(ADDITIVE, EDGES, 2, 19, dtype, 0.3, backend) + operation(DOT, EDGES, 2, 19, dtype, 0.0, backend)
    every += operation(f"{GATV2_EDGES} edge_weight", EDGES, heads, channels, dtype, 0.3, backend)
    return every + operation(DOT_EDGES, EDGES, heads, channels, dtype, 0.3, backend)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.weekly), torch.bfloat16], ids=str
)
def test_the_interpreted_kernels_compute_what_plain_torch_does(
    dtype: torch.dtype, interpret: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled ones do too, see tests/attention and tests/features."""
    expected = everything(dtype, "segment", monkeypatch)
    ran = interpret()
    for at, (one, other) in enumerate(zip(everything(dtype, "fused", monkeypatch), expected, strict=True)):
        assert_close(one, other, f"result {at}")
    kernels = {f"{kernel.__module__}.{kernel.__name__}" for kernel in cache._LISTENER.kernels}
    assert ran == {name for name in kernels if name.startswith("gat_pyg.")}


# A fault: the function that contains it, the code before and after, the call, and the message of the error.
FAULTS: dict[str, tuple[Any, str, str, Callable[[], Any], str]] = {
    "another edge's src": (
        (additive, "_add_terms"),
        "np.int64(node[edge])",
        "np.int64(node[edge + 1])",
        lambda: operation(ADDITIVE, EDGES, 3, 5, torch.float32, 0.0, "fused"),
        r"_forward: src\[8\] is out of bounds, its indices are 0 to 7",
    ),
    "a step's edge": (
        (steps, "load_end"),
        "edge = row.begin + k",
        "edge = row.begin + k + 1",
        lambda: operation(GATV2_EDGES, EDGES, 3, 5, torch.float32, 0.0, "fused"),
        r"_forward: src\[8\] is out of bounds",
    ),
    "the next row's result": (
        (steps, "_gather_together"),
        "store(out, row.to * row.channels",
        "store(out, (row.to + row.heads) * row.channels",
        lambda: operation(ADDITIVE, EDGES, 3, 5, torch.float32, 0.0, "fused"),
        r"_forward: out\[60:75\] is out of bounds, its indices are 0 to 59",
    ),
    "a vector that is too long": (
        (steps, "_store_lse"),
        "only_if(ragged, row.width)",
        "None",
        lambda: operation(ADDITIVE, EDGES, 3, 5, torch.float32, 0.0, "fused"),
        r"_forward: lse\[21:25\] is out of bounds, its indices are 0 to 23",
    ),
    "the next model": (
        (features, "_gather_rows"),
        "of_model((out_,), model, models)",
        "of_model((out_,), model + 1, models)",
        lambda: sparse_results(torch.float32),
        r"_gather_rows: out of model 3\[0:64\] is out of bounds, its indices are none",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_out_of_bounds_is_found(
    fault: str, interpret: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (module, name), old, new, run, message = FAULTS[fault]
    kernel = getattr(module, name)
    function, is_step = kernel.py_func, kernel not in cache._LISTENER.kernels
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    interpret()
    planted: dict[str, Any] = {}
    exec(source.split("\n", 1)[1].replace(old, new), function.__globals__, planted)  # without its decorator
    monkeypatch.setattr(
        module, name, SimpleNamespace(py_func=planted[name]) if is_step else interpreter.interpreted(planted[name])
    )
    with pytest.raises(IndexError, match=message):
        run()
