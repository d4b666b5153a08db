"""What `attention.py` compares: a case's problem, and every way there is to solve it, ours and other libraries'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops

from gat_pyg import conv, features
from gat_pyg.attention import attend
from gat_pyg.edges import Edges, neighbourhoods


@dataclass(frozen=True)
class Case:
    """A layer F -> H x C on a graph, or attention alone where F is 0."""

    name: str
    graph: str
    F: int
    H: int
    C: int
    x_grad: bool = True
    kind: str = "GATConv"
    sparse: bool = False  # x is given to ours as torch.sparse CSR
    dropout: float = 0.0  # of x, before the layer, when it is timed
    special: bool = False  # compile PyG's layer too, and replay CUDA graphs

    def __str__(self) -> str:
        what = f"{self.F} → {self.H}×{self.C}" if self.F else f"attention alone {self.H}×{self.C}"
        kind = ", GATv2" * (self.kind == "GATv2Conv") + ", sparse x" * self.sparse
        return what + kind + ", with its dropout" * (self.dropout > 0)


class Problem:
    """What every way of a case starts from: graph, features, weights, and the gradient that comes back."""

    def __init__(self, case: Case, index: Tensor, x: Tensor | None, N: int) -> None:
        torch.manual_seed(0)
        self.case, self.N, device = case, N, index.device
        self.p = 0.0  # the dropout of x: none where answers are compared
        self.looped, _ = add_self_loops(index, num_nodes=N)
        self.index = index if case.F else self.looped
        if case.F:
            if x is None or x.size(1) != case.F:
                x = torch.randn(N, case.F, device=device)
                if case.sparse:
                    x = x.relu() * (torch.rand_like(x) < 0.03)
            self.given = {"x": x}
            layer = getattr(pyg, case.kind)(case.F, case.C, case.H).to(device)
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)  # a bias of zeros would hide a wrong one
            self.weights = layer.state_dict()
        else:
            shapes = {"x": (N, case.H, case.C), "score_src": (N, case.H), "score_dst": (N, case.H)}
            self.given, self.weights = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}, {}
        for tensor in self.given.values():
            tensor.requires_grad_(case.x_grad)
        self.grad = torch.randn((N, case.H * case.C) if case.F else (N, case.H, case.C), device=device)

    @cached_property
    def edges(self) -> Edges:
        return neighbourhoods(self.looped, self.N, self.N)[1]

    @property
    def gathered(self) -> int:
        """Bytes of features gathered by a step, once each way."""
        return 2 * self.looped.size(1) * self.grad.nbytes // self.N

    @property
    def least(self) -> int:
        """Bytes a step must move: x, O, dO, x and dx, the scores twice and their gradients, ids and offsets, once."""
        return 5 * self.grad.nbytes + 6 * 4 * self.N * self.case.H + 2 * (4 * self.looped.size(1) + 8 * self.N)


@dataclass
class Way:
    """One implementation, ready to run on a problem."""

    forward: Callable[[], Tensor]
    step: Callable[[], dict[str, Tensor]]  # the output and every gradient by the name of PyG's parameter


def way(forward: Callable[[], Tensor], leaves: dict[str, Tensor], grad: Tensor) -> Way:
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}

    def step() -> dict[str, Tensor]:
        out = forward()
        return {"output": out.detach(), **dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], grad)))}  # noqa: B905

    return Way(forward, step)


def of_layer(
    layer: nn.Module,
    problem: Problem,
    index: Tensor,
    x: Tensor | None = None,
    call: Callable[..., Tensor] | None = None,
) -> Way:
    layer.to(problem.grad.device).load_state_dict(problem.weights)
    call, dense = layer if call is None else call, problem.given["x"]
    x, drop = (dense, F.dropout) if x is None else (x, features.dropout)
    return way(lambda: call(drop(x, problem.p), index), {"x": dense, **dict(layer.named_parameters())}, problem.grad)


def ours(problem: Problem, backend: Any) -> Way:
    case = problem.case
    if not case.F:
        x, src, dst = problem.given.values()
        forward = lambda: attend(x, src, dst, problem.edges, backend=backend)  # noqa: E731
        return way(forward, problem.given, problem.grad)
    x = problem.given["x"].to_sparse_csr() if case.sparse else None
    layer = getattr(conv, case.kind)(case.F, case.C, case.H, backend=backend)
    return of_layer(layer, problem, problem.index, x)


def pygs(problem: Problem, loops: bool = True) -> Way:
    case = problem.case
    if case.F:
        layer = getattr(pyg, case.kind)(case.F, case.C, case.H, add_self_loops=loops)
        return of_layer(layer, problem, problem.index if loops else problem.looped)
    x, src, dst = problem.given.values()
    layer, index = pyg.GATConv(1, case.C, case.H, add_self_loops=False).to(x.device), problem.looped

    def forward() -> Tensor:
        alpha = layer.edge_updater(index, alpha=(src, dst), edge_attr=None, size=None)
        return layer.propagate(index, x=(x, x), alpha=alpha, size=None)

    return way(forward, problem.given, problem.grad)


def compiled(problem: Problem) -> Way | None:
    case = problem.case
    if not case.special:
        return None
    layer = pyg.GATConv(case.F, case.C, case.H)
    return of_layer(layer, problem, problem.index, call=torch.compile(layer))


def linear(problem: Problem) -> Way | None:
    """The Linear of the layer by itself, of which attention is no part."""
    case, x = problem.case, problem.given["x"]
    if not case.F:
        return None
    names = ["lin.weight"] if case.kind == "GATConv" else ["lin_l.weight", "lin_r.weight"]
    weights = {name: problem.weights[name].clone().requires_grad_() for name in names}
    return way(lambda: sum(F.linear(x, weight) for weight in weights.values()), {"x": x, **weights}, problem.grad)


def dgls(problem: Problem) -> Way | None:
    case = problem.case
    if case.kind != "GATConv":
        return None
    import dgl  # type: ignore[import-not-found]

    graph = dgl.graph(tuple(problem.looped), num_nodes=problem.N)
    if not case.F:
        x, src, dst = problem.given.values()

        def forward() -> Tensor:
            e = F.leaky_relu(dgl.ops.u_add_v(graph, src.unsqueeze(-1), dst.unsqueeze(-1)), 0.2)
            return dgl.ops.u_mul_e_sum(graph, x, dgl.ops.edge_softmax(graph, e))

        return way(forward, problem.given, problem.grad)
    layer = dgl.nn.GATConv(case.F, case.C, case.H).to(problem.grad.device)
    names = {"lin.weight": "fc.weight", "att_src": "attn_l", "att_dst": "attn_r", "bias": "bias"}
    layer.load_state_dict({theirs: problem.weights[name] for name, theirs in names.items()})
    leaves = {name: layer.get_parameter(theirs) for name, theirs in names.items()}
    x = problem.given["x"]
    return way(lambda: layer(graph, x).flatten(1), {"x": x, **leaves}, problem.grad)


def cudnns(problem: Problem) -> Way | None:
    """cuDNN's operation, which scores the features itself, so it is no "attention alone"."""
    case, device = problem.case, problem.grad.device
    if device.type != "cuda" or case.kind != "GATConv" or not case.F:
        return None
    from cudnn.gnn import CscGraph, mha_gat  # type: ignore[import-not-found]

    edges, x = problem.edges, problem.given["x"]
    graph = CscGraph(edges.rowptr.to(edges.src.dtype), edges.src, problem.N)
    weights = {name: value.clone().requires_grad_() for name, value in problem.weights.items()}

    def forward() -> Tensor:
        att = torch.cat([weights["att_src"].flatten(), weights["att_dst"].flatten()])
        return mha_gat(graph, F.linear(x, weights["lin.weight"]), att, num_heads=case.H) + weights["bias"]

    return way(forward, {"x": x, **weights}, problem.grad)


def replayed(problem: Problem, make: Callable[[Problem], Way]) -> Way | None:
    """A CUDA graph of the forward and one of the step, captured once: no launch is waited for."""
    if problem.grad.device.type != "cuda" or not problem.case.special:
        return None
    made, held = make(problem), []
    for run, context in ((made.forward, torch.no_grad), (made.step, torch.enable_grad)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), context():
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), context():
            held.append((graph, run()))
    (forward, out), (step, results) = held
    return Way(lambda: (forward.replay(), out)[1], lambda: (step.replay(), results)[1])


# No PyG loops in its CUDA graph: dropping a graph's own loops waits for the device, which a capture cannot.
WAYS: dict[str, Callable[[Problem], Way | None]] = {
    "pyg": pygs,
    "auto": lambda problem: ours(problem, "auto"),
    "segment": lambda problem: ours(problem, "segment"),
    "pyg compiled": compiled,
    "dgl": dgls,
    "cudnn": cudnns,
    "Linear alone": linear,
    "auto, CUDA graph": lambda problem: replayed(problem, lambda p: ours(p, "auto")),
    "pyg, CUDA graph": lambda problem: replayed(problem, lambda p: pygs(p, loops=False)),
}
