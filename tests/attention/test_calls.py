"""Who calls the kernels: without Numba, from forks and threads, through compilers and exporters."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg import GATConv, GATv2Conv
from gat_pyg.attention import Additive, attend, fused
from gat_pyg.attention.additive import prefers_speed
from gat_pyg.conv import few
from gat_pyg.conv.mechanisms import MECHANISMS
from gat_pyg.graph import adjacency
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels import device
from gat_pyg.kernels.cpu import rows
from tests.attention.comparisons import FOLDERS, answer, assert_same, direction_of, spy
from tests.commands import result_of
from tests.graphs import BIPARTITE, RANDOM, random
from tests.laws import assert_close, edges_of, moved
from tests.scores import ADDITIVE, CONSTANT, DOT_EDGES, GATV2_EDGES, SCORES, Tensors, call, leaves_of, score_of

LAYERS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv}
LAYERS |= {name: partial(GATConv, mechanism=name) for name in MECHANISMS if name != "additive"}
weekly = pytest.mark.weekly
SAME = ("constant", "gatv2", "cosine", "dot")  # as GATConv or GATv2Conv to a compiler
every_layer = pytest.mark.parametrize("name", [pytest.param(name, marks=[weekly] * (name in SAME)) for name in LAYERS])


# --- Where the kernels are not available. ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"x": torch.complex64},
            "an operand has dtype torch.complex64, the kernels support torch.float32, torch.float64",
        ),
        ({"x": torch.int64}, "an operand has dtype torch.int64"),
        ({"score_src": torch.complex128}, "dtype torch.complex128"),
        ({"score_edge": torch.int32}, "dtype torch.int32"),
    ],
)
def test_what_the_kernels_do_not_know(changes: dict[str, torch.dtype], reason: str) -> None:
    leaves = leaves_of(BIPARTITE, 3, 4, ADDITIVE)
    leaves |= {name: leaves[name].to(dtype) for name, dtype in changes.items()}
    assert reason in str(device.unsupported_reason(*leaves.values()))
    with pytest.raises(ValueError, match=f"backend='fused' is not available here: .*{reason}.*backend='auto'"):
        call(leaves, edges_of(BIPARTITE))


def test_a_device_without_kernels() -> None:
    x = torch.empty(5, 3, 4, device="meta")
    reason = str(device.unsupported_reason(x))
    assert "x is on meta" in reason and "there are kernels for cpu and cuda" in reason
    with pytest.raises(ValueError, match=f"backend='fused' is not available here: {reason}"):
        attend(x, Additive(), moved(edges_of(BIPARTITE), "meta"), backend="fused")


@pytest.mark.parametrize("names", SCORES)
def test_without_numba(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, leaves, direction = edges_of(BIPARTITE), leaves_of(BIPARTITE, 3, 5, names), direction_of(BIPARTITE, 3, 5)
    truth = answer(leaves, edges, direction, "auto", dropout=0.3)
    monkeypatch.setitem(sys.modules, "numba", None)  # as where it is not installed
    for module in ("rows", "draw", "cache"):
        monkeypatch.delitem(sys.modules, f"gat_pyg.kernels.cpu.{module}")
    monkeypatch.setattr(device, "REASONS", {})
    monkeypatch.setattr(fused, "_forward", None)  # would fail
    assert_same(answer(leaves, edges, direction, "auto", dropout=0.3), truth, names)
    with pytest.raises(ValueError, match="is not available here: .*numba"):
        call(leaves, edges)


# --- Graphs that change, processes and threads. ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(rows, "SMALL", 1)
    leaves, edges = leaves_of(RANDOM, 8, 8, ADDITIVE, torch.float32), edges_of(RANDOM)
    direction = direction_of(RANDOM, 8, 8)
    truth = answer(leaves, edges, direction, dropout=0.3)
    assert rows._POOL  # the parent's threads, of which the child has none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process of several threads is forked
        child = os.fork()
    if child == 0:
        status = 1
        try:
            measured = answer(leaves, edges, direction, dropout=0.3)
            status = 0 if rows._POOL and all(torch.equal(measured[k], truth[k]) for k in truth) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(answer(leaves, edges, direction, dropout=0.3)["x"], truth["x"])  # the parent goes on


def test_two_callers_at_once(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(rows, "SMALL", 1)
    graph = random(300, 300, 3000)
    cases = [(leaves_of(graph, 3, 5, names), names) for names in (ADDITIVE, GATV2_EDGES)]
    direction = direction_of(graph, 3, 5)
    truths = [answer(leaves, edges_of(graph), direction, "segment") for leaves, _ in cases]
    shared, measured, start = edges_of(graph), [[], []], threading.Barrier(2)

    def caller(n: int) -> None:
        start.wait()
        for _ in range(10):
            measured[n].append(answer(cases[n][0], shared, direction))

    callers = [threading.Thread(target=caller, args=(n,)) for n in range(2)]
    for one in callers:
        one.start()
    for one in callers:
        one.join(60)
        assert not one.is_alive()
    for n in range(2):
        assert len(measured[n]) == 10
        for again in measured[n]:
            assert_same(again, truths[n], cases[n][1])


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
def test_the_command_trains_with_the_kernels(tmp_path: Path) -> None:
    """Of 3 heads of 5 channels in float64, which other tests compile."""
    network = ("+model.backend=fused", "model.heads=[3,3]", "model.hidden_channels=[5]", "+trainer.precision=64-true")
    small = ("dataset=planted", "dataset.graphs=4", "dataset.labels=5", "training.max_epochs=2", "runs=1")
    assert result_of(tmp_path, *small, *network).epochs == 2


# --- Compilers. ---


class Net(nn.Module):
    def __init__(self, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = LAYERS[name](5, 5, heads=3, dropout=dropout)
        self.second = LAYERS[name](15, 5, heads=3, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def operators(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if str(node.target).startswith("gat_pyg")]


def results(model: Callable[..., Tensor], net: nn.Module, x: Tensor, index: Tensor) -> Tensors:
    torch.manual_seed(0)
    net.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x, index)
    out.sin().sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in net.named_parameters()}


@every_layer
def test_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(operators(module))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    if name != "GATConv":  # an eager layer as it is for many edges, for whose kernels the operator calls
        monkeypatch.setattr(few, "FEW", 0)
    net, x, index = Net(name, dropout=0.5).double(), torch.randn(40, 5).double(), RANDOM.index.clone()
    compiled = torch.compile(net, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    measured = results(compiled, net, x, index)
    assert seen == [["gat_pyg.attend.default"] * 2, ["gat_pyg.attend_backward.default"] * 2]
    assert_same(measured, results(net, net, x, index), name)
    built = spy(monkeypatch, adjacency, "get_result")  # called as a structure is built
    for _ in range(3):
        assert torch.equal(results(compiled, net, x, index)["x"], measured["x"])
    assert not built.calls
    new = index.clone()
    for _ in range(3):
        results(compiled, net, x, new)
    assert len(built.calls) == 2  # with loops and without
    new[0] = new[0].flip(0)
    assert_same(results(compiled, net, x, new), results(net, net, x, new.clone()), "changed in place")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.10 as it loads
@every_layer
def test_exported(name: str) -> None:
    net, x, index = Net(name).eval().double(), torch.randn(40, 5).double(), RANDOM.index
    net.first.backend = net.second.backend = "fused"
    program = torch.export.export(net, (x, index))
    assert operators(program.graph_module) == ["gat_pyg.attend.default"] * 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_close(torch.export.load(file).module()(x, index), net(x, index))


def test_the_kernels_for_gpus_refuse_float64() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 2, 4, device="cuda")
        assert device.unsupported_reason(x, x.double()) == (
            "the CUDA kernels accumulate in float32 and do not support float64"
        )


def test_the_mode_on_a_gpu_follows_the_edges_per_row() -> None:
    """O and O+ are read where N H C elements have less than 6.7 bytes for each edge: 268 for 40. They are float32."""
    edges = Edges.from_index(torch.zeros(2, 40, dtype=torch.int64), 1, 1)
    for dtype in (torch.float32, torch.bfloat16):
        for channels, speed in ((64, True), (68, False)):
            assert prefers_speed(torch.empty(1, 1, channels, dtype=dtype, device="meta"), edges) is speed


def test_a_cuda_graph_does_not_hold_the_operators() -> None:
    for operator in (torch.ops.gat_pyg.attend, torch.ops.gat_pyg.attend_backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, in torch 2.14
@pytest.mark.parametrize(("names", "p"), [*((names, 0.5) for names in (CONSTANT, *FOLDERS)), (DOT_EDGES, 0.0)])
def test_the_operators_are_what_torch_expects(names: str, p: float) -> None:
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(BIPARTITE, 3, 5, names).items()}
    score, tensors = score_of(leaves), [*leaves.values()]
    present = [True, False, *(operand is not None for operand in score.operands)]
    draw = (torch.tensor(7), torch.tensor(p) if names == CONSTANT else None) if p else (None, None)
    rest = (present, *draw, BIPARTITE.index, 3, False, "source_to_target", type(score).__name__, [p, *score.values])
    for speed in (True, False) if score.saved else (True,):
        dropping = (torch.tensor(8), 0.5) if p else (None, 0.0)
        args = (tensors, *rest, speed, *dropping, p > 0)
        measured = torch.library.opcheck(torch.ops.gat_pyg.attend.default, args)
        assert set(measured.values()) == {"SUCCESS"}, measured
        results = [t.detach() for t in torch.ops.gat_pyg.attend(*args)]
        saved = results[0 if speed else 1 : len(results) - (p > 0)]  # as `_save_for_backward`
        detached = [t.detach() for t in tensors]
        for needs in {(True,) * len(tensors), (True,) * (len(tensors) - 1) + (False,)}:
            torch.library.opcheck(
                torch.ops.gat_pyg.attend_backward.default,
                (torch.ones_like(results[0]), detached, saved, list(needs), *rest, speed, *dropping),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", pytest.param("dot", marks=pytest.mark.weekly)])
def test_derivatives_in_batches(name: str) -> None:
    """Of every argument, first and second, by the older vmap of `torch.autograd`."""
    net, x, index = Net(name).double(), torch.randn(40, 5).double(), RANDOM.index
    names = [each for each, _ in net.named_parameters()]

    def loss(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x, index)).sin().sum(0)

    leaves = x, *(each.detach() for each in net.parameters())
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for measured, exact in zip(jacobian(loss, leaves, vectorize=True), jacobian(loss, leaves), strict=True):
        torch.testing.assert_close(measured, exact)
    bias = leaves[-1]

    def of_last(value: Tensor) -> Tensor:
        return loss(*leaves[:-1], value).square().sum()

    torch.testing.assert_close(hessian(of_last, bias, vectorize=True), hessian(of_last, bias))
