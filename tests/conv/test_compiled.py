"""Layers under torch.compile and torch.export: what eager returns."""

from __future__ import annotations

import io
import itertools
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from gat_pyg import GATConv, GATv2Conv
from tests.conv.test_draws import LAYERS, NAMES, C, D, F, H, normal
from tests.graphs import BATCH, LOOPS, RANDOM, Graph
from tests.laws import assert_close

KINDS = [*LAYERS, *NAMES]  # layers, and mechanisms of GATConv


def weekly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.weekly)


def layer(kind: str, **options: Any) -> Any:
    """A layer with edge features, or `GATConv` with a mechanism."""
    torch.manual_seed(0)
    mechanism = {} if kind in LAYERS else {"mechanism": kind}
    edge_dim = None if kind == "constant" else D
    return LAYERS.get(kind, GATConv)(F, C, H, edge_dim=edge_dim, **mechanism, **options).double()


def inputs(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    return normal(graph.num_src, F, seed=0), graph.index, normal(graph.index.size(1), D, seed=1)


# torch.compile ------------------------------------------------------------------------------------------------------


class All(nn.Module):
    """A call with every argument; `weights`: with alpha."""

    def __init__(self, conv: Any, weights: bool) -> None:
        super().__init__()
        self.conv = conv
        self.weights = weights

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_weight: Tensor) -> Any:
        options = {"return_attention_weights": True} if self.weights else {}
        return self.conv(x, edge_index, edge_attr, edge_weight=edge_weight, **options)


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """The names of this package's operators in a graph."""
    names = (str(node.target) for node in graph.graph.nodes)
    return [name for name in names if name.startswith("gat_pyg.")]


def results(model: Any, graph: Graph, *batch: int) -> list[Tensor]:
    """Outputs and the gradients of features, edge features and weights."""
    _, index, edge_attr = inputs(graph)
    x = normal(*batch, graph.num_src, F, seed=0)
    leaves = [leaf.requires_grad_() for leaf in (x, edge_attr, normal(index.size(1), H, seed=4))]
    torch.manual_seed(3)
    out = model(leaves[0], index, *leaves[1:])
    out, (looped, alpha) = out if isinstance(out, tuple) else (out, (index, torch.zeros(1).double()))
    total = (out * normal(*out.shape, seed=5)).sum() + (alpha * normal(*alpha.shape, seed=6)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out, looped.double(), alpha, *(g for g in grads if g is not None)]


MORE_KINDS = [weekly(kind, True) for kind in ("GATv2Conv", *KINDS[3:])] + [weekly("GATConv", False)]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "weights"), [("GATConv", True), *(weekly(kind, False) for kind in KINDS[1:3]), *MORE_KINDS]
)
def test_compiled_as_one_operator_for_any_size(kind: str, weights: bool) -> None:
    """The kernels compute what the segment backend does, eager and compiled; no size is compiled again."""
    conv = layer(kind, dropout=0.4, edge_dropout=0.3, backend="fused")
    model = All(conv, weights)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for graph in (RANDOM, LOOPS, BATCH):
        fused = results(model, graph)
        for one, other in zip(results(compiled, graph), fused, strict=True):
            assert_close(one, other, f"{kind} {graph}")
        counts.append(counter.frame_count)
        conv.backend = "segment"
        for one, other in zip(fused, results(model, graph), strict=True):
            assert_close(one, other, f"{kind} {graph} segment")
        conv.backend = "fused"
    assert counts[1:] == counts[:1] * 2, "compiled again for another size"
    assert [name for graph in counter.graphs for name in operators(graph)] == ["gat_pyg.attend.default"]
    with pytest.raises(Exception, match=r"x \(src\) has 6 features, expected in_channels = 5"):
        compiled(normal(40, 6, seed=0), *inputs(RANDOM)[1:], normal(300, H, seed=4))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["GATConv", *(weekly(kind) for kind in KINDS[1:])])
def test_a_batch_is_compiled_as_one_operator(kind: str) -> None:
    model = All(layer(kind, edge_dropout=0.4, backend="fused"), True).eval()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for one, other in zip(results(compiled, RANDOM, 2), results(model, RANDOM, 2), strict=True):
        assert_close(one, other, kind)
    assert [name for graph in counter.graphs for name in operators(graph)] == ["gat_pyg.attend.default"]
    if kind == "GATConv":
        model.train().conv.dropout = 0.5
        _, looped, alpha, *_ = results(compiled, RANDOM, 2)
        dropped = (alpha == 0).all(2).all(0) & (looped[0] != looped[1])
        assert 0.3 < dropped.double().mean() < 0.52 and not torch.equal(alpha[0] == 0, alpha[1] == 0)


@torch._inductor.config.patch(compile_threads=1)  # else it starts processes, each of which imports torch
def test_compiled_by_inductor_for_the_first_rows_of_one_x() -> None:
    """Inductor turns plain operators into C++: those of PyG's message passing, by the segment backend."""
    conv, index = GATConv(5, 4, heads=2), (RANDOM.index % 6)[:, RANDOM.index[1] % 6 < 2]
    torch._dynamo.reset()
    x = torch.randn(6, 5)
    with torch.no_grad():
        compiled = torch.compile(conv, fullgraph=True)
        assert_close(compiled(x, index, size=(6, 2)), conv(x, index, size=(6, 2)))


# torch.export -------------------------------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "backend", "weights", "strict"),
    [
        ("GATConv", "fused", True, True),
        pytest.param("GATConv", "auto", False, False, marks=pytest.mark.weekly),
        ("GATv2Conv", "segment", True, True),
        ("TransformerConv", "segment", False, False),
        pytest.param("TransformerConv", "fused", False, False, marks=pytest.mark.weekly),
    ],
)
def test_exported_for_any_size(kind: str, backend: str, weights: bool, strict: bool) -> None:
    """The program has one operator with backend "fused", else plain ones."""
    model = All(layer(kind, backend=backend), weights).eval()
    N, E = torch.export.Dim("N", min=2), torch.export.Dim("E", min=2)
    arguments = *inputs(RANDOM), normal(300, H, seed=4)
    shapes = ({0: N}, {1: E}, {0: E}, {0: E})
    program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=strict)
    assert operators(program.graph_module) == (["gat_pyg.attend.default"] if backend == "fused" else [])
    for graph in (RANDOM, LOOPS, BATCH):
        for one, other in zip(results(program.module(), graph), results(model, graph), strict=True):
            assert_close(one, other, f"{kind} {graph}")


def test_exported_layers_share_one_sort_and_no_size_depends_on_an_id() -> None:
    first, second = (GATConv(4, 2, heads=2, edge_dim=D, fill_value="add").eval() for _ in range(2))

    class Two(nn.Module):
        def forward(self, x: Tensor, index: Tensor, edge_attr: Tensor) -> Tensor:
            return second(first(x, index, edge_attr), index, edge_attr)

    arguments, dynamic = (torch.randn(40, 4), RANDOM.index, torch.randn(300, D)), torch.export.Dim.DYNAMIC
    program = torch.export.export(Two(), arguments, dynamic_shapes=({0: dynamic}, {1: dynamic}, {0: dynamic}))
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("aten.sort.stable") == 1 and names.count("aten.segment_reduce.default") == 2
    assert not {"aten.nonzero.default", "aten.index.Tensor", "aten.item.default"} & {*names}
    for side, bad in itertools.product((0, 1), (2**40, -1, -(2**40), 40)):
        index = RANDOM.index.clone()
        index[side, 7] = bad
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
            program.module()(arguments[0], index, arguments[2])


@pytest.mark.filterwarnings("ignore")  # the ONNX exporter's, on what it is built of
def test_onnx_has_plain_operators_whatever_the_backend() -> None:
    conv = GATv2Conv(5, 4, backend="fused").eval()
    file = io.BytesIO()
    torch.onnx.export(conv, (torch.randn(10, 5), torch.randint(10, (2, 30))), file, verbose=False)
    model = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
