"""The subjects of `attention.py`: a case's problem, and every way to solve it, ours and other libraries'."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops

import gat_pyg
from gat_pyg.attention import Additive, attend
from gat_pyg.features import dropout as features_dropout
from gat_pyg.graph.adjacency import neighbourhoods
from gat_pyg.graph.edges import Edges
from machine import TRAIN, on_gpu


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
    dropout: float = 0.0  # when it is timed: of x, before the layer; alone, of the attention coefficients
    special: bool = False  # compile PyG's layer too, and replay CUDA graphs
    dtype: torch.dtype = torch.float32  # of the tensors; of a layer, autocast's
    edge_dim: int = 0  # features of an edge
    fresh: bool = False  # every call gets a graph that no call before had, as a batch of molecules is
    layers: int = 1  # one after the other, of H C channels each
    fill: str | None = None  # the `fill_value` of self-loops

    def __str__(self) -> str:
        what = f"{self.F} → {self.H}×{self.C}" if self.F else f"attention alone {self.H}×{self.C}"
        kind = "" if self.kind == "GATConv" else f", {self.kind.removesuffix('Conv')}"
        kind += f", {self.edge_dim} edge features" * (self.edge_dim > 0)
        kind += f", fill {self.fill}" * (self.fill is not None) + f", {self.layers} layers" * (self.layers > 1)
        kind += ", sparse x" * self.sparse + ", fresh graph" * self.fresh
        kind += f", {str(self.dtype).removeprefix('torch.')}" * (self.dtype != torch.float32)
        return what + kind + f", dropout {self.dropout}" * (self.dropout > 0)

    def layer(self, package: Any, **options: Any) -> Any:
        """The layer of a package."""
        if self.kind == "HeteroConv":
            return TwoKinds(package, self, **options)
        if self.fill is not None:
            options["fill_value"] = self.fill
        kind, widths = getattr(package, self.kind), [self.F] + [self.H * self.C] * (self.layers - 1)
        layers = [kind(width, self.C, self.H, edge_dim=self.edge_dim or None, **options) for width in widths]
        return layers[0] if self.layers == 1 else Stack(layers)


class Stack(nn.ModuleList):
    """Layers one after the other on one graph."""

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, *graph)
        return x


class TwoKinds(nn.Module):
    """PyG's `HeteroConv`: the nodes of each half attend over those of the other, as users and items do."""

    def __init__(self, package: Any, case: Case, **options: Any) -> None:
        super().__init__()
        both = (case.F, case.F)
        layers = (package.GATConv(both, case.C, case.H, add_self_loops=False, **options) for _ in range(2))
        self.conv = pyg.HeteroConv(dict(zip((("a", "to", "b"), ("b", "to", "a")), layers, strict=True)))
        self.graph: tuple[Tensor, dict[Any, Tensor]] | None = None

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        half = x.size(0) // 2
        if self.graph is None or self.graph[0] is not index:
            ab, ba = (index % half).tensor_split(2, 1)
            self.graph = index, {("a", "to", "b"): ab.contiguous(), ("b", "to", "a"): ba.contiguous()}
        out = self.conv({"a": x[:half], "b": x[half:]}, self.graph[1])
        return torch.cat([out["a"], out["b"]])


class Problem:
    """The inputs of every way of a case: graph, features, weights, and the gradient of the output."""

    def __init__(self, case: Case, index: Tensor, x: Tensor | None, N: int) -> None:
        torch.manual_seed(0)
        self.case, self.N, device = case, N, index.device
        self.p = 0.0  # the dropout
        self.looped, _ = add_self_loops(index, num_nodes=N)
        self.index = index if case.F else self.looped
        if case.F:
            if x is None or x.size(1) != case.F:
                x = torch.randn(N, case.F, device=device)
                if case.sparse:
                    x = x.relu() * (torch.rand_like(x) < 0.03)
            self.given = {"x": x}
            if case.edge_dim:
                self.given["edge_attr"] = torch.randn(index.size(1), case.edge_dim, device=device)
            layer = case.layer(pyg).to(device)
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)  # a bias of zeros would hide a wrong one
            self.weights = layer.state_dict()
        else:
            shapes = {"x": (N, case.H, case.C), "score_src": (N, case.H), "score_dst": (N, case.H)}
            made = {name: torch.randn(shape, device=device).to(case.dtype) for name, shape in shapes.items()}
            self.given, self.weights = made, {}
        for tensor in self.given.values():
            tensor.requires_grad_(case.x_grad)
        shape = (N, case.H * case.C) if case.F else (N, case.H, case.C)
        self.grad = torch.randn(shape, device=device).to(case.dtype)

    @cached_property
    def edges(self) -> Edges:
        return neighbourhoods(self.looped, self.N, self.N)

    @property
    def gathered(self) -> int:
        """Bytes of features gathered by a step, once each way."""
        return 2 * self.looped.size(1) * self.grad.nbytes // self.N

    @property
    def least(self) -> int:
        """Bytes a step must move: x, O, dO, x and dx, the scores twice and their gradients, ids and offsets, once."""
        scores = 6 * self.grad.element_size() * self.N * self.case.H
        return 5 * self.grad.nbytes + scores + 2 * (4 * self.looped.size(1) + 8 * self.N)

    def anew(self) -> Problem:
        """The same with nothing remembered of its graph."""
        other = copy.copy(self)
        other.__dict__.pop("edges", None)
        other.index, other.looped = self.index.clone(), self.looped.clone()
        return other


@dataclass
class Way:
    """One implementation, ready to run on a problem."""

    forward: Callable[[], Tensor]
    step: Callable[[], dict[str, Tensor]]  # the output and every gradient by the name of PyG's parameter
    times: int = 1  # that it runs in a row to be timed


def way(forward: Callable[[], Tensor], leaves: dict[str, Tensor], grad: Tensor) -> Way:
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}

    def step() -> dict[str, Tensor]:
        out = forward()
        grads = torch.autograd.grad(out, [*leaves.values()], grad.to(out.dtype))
        return {"output": out.detach(), **dict(zip(leaves, grads, strict=True))}

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
    x, drop = (dense, F.dropout) if x is None else (x, features_dropout.dropout)
    graph = index.clone if problem.case.fresh else lambda: index
    features = [problem.given["edge_attr"]] if problem.case.edge_dim else []
    leaves, dtype = problem.given | dict(layer.named_parameters()), problem.case.dtype
    context = nullcontext() if dtype == torch.float32 else torch.autocast(x.device.type, dtype)

    def forward() -> Tensor:
        with context:
            return call(drop(x, problem.p), graph(), *features)

    return way(forward, leaves, problem.grad)


def ours(problem: Problem, backend: Any) -> Way:
    case = problem.case
    if not case.F:
        x, src, dst = problem.given.values()
        forward = lambda: attend(x, Additive(src, dst), problem.edges, dropout=problem.p, backend=backend)  # noqa: E731
        return way(forward, problem.given, problem.grad)
    x = problem.given["x"].to_sparse_csr() if case.sparse else None
    layer = case.layer(gat_pyg, backend=backend)
    return of_layer(layer, problem, problem.index, x)


def pygs(problem: Problem, loops: bool = True) -> Way:
    case = problem.case
    if case.F:
        layer = case.layer(pyg, **({} if loops else {"add_self_loops": False}))
        return of_layer(layer, problem, problem.index if loops else problem.looped)
    x, src, dst = problem.given.values()
    layer, index = pyg.GATConv(1, case.C, case.H, add_self_loops=False).to(x.device), problem.looped

    def forward() -> Tensor:
        layer.dropout = problem.p
        alpha = layer.edge_updater(index, alpha=(src, dst), edge_attr=None, size=None)
        return layer.propagate(index, x=(x, x), alpha=alpha, size=None)

    return way(forward, problem.given, problem.grad)


def compiled(problem: Problem) -> Way | None:
    case = problem.case
    if not case.special or not case.F:
        return None
    layer = case.layer(pyg)
    return of_layer(layer, problem, problem.index, call=torch.compile(layer))


def linear(problem: Problem) -> Way | None:
    """The Linear of the layer by itself, of which attention is no part."""
    case, x = problem.case, problem.given["x"]
    if not case.F:
        return None
    names = [name for name, value in problem.weights.items() if value.shape == (case.H * case.C, case.F)]
    weights = {name: problem.weights[name].clone().requires_grad_() for name in names}
    return way(lambda: sum(F.linear(x, weight) for weight in weights.values()), {"x": x, **weights}, problem.grad)


DGLS = {  # DGL's name of each of PyG's weights
    "GATConv": {"lin.weight": "fc.weight", "att_src": "attn_l", "att_dst": "attn_r", "bias": "bias"},
    "GATv2Conv": {
        "att": "attn",
        "lin_l.weight": "fc_src.weight",
        "lin_l.bias": "fc_src.bias",
        "lin_r.weight": "fc_dst.weight",
        "lin_r.bias": "fc_dst.bias",
    },
}


def dgls(problem: Problem) -> Way | None:
    """DGL's layer on a graph with the self-loops, which are not added at each call. Its GATv2Conv has no last bias."""
    case = problem.case
    if case.kind not in DGLS or case.edge_dim or case.layers > 1 or case.fill is not None or case.sparse:
        return None
    import dgl  # type: ignore[import-not-found]

    graph = dgl.graph(tuple(problem.looped), num_nodes=problem.N)
    if not case.F:
        x, src, dst = problem.given.values()

        def forward() -> Tensor:
            e = F.leaky_relu(dgl.ops.u_add_v(graph, src.unsqueeze(-1), dst.unsqueeze(-1)), 0.2)
            return dgl.ops.u_mul_e_sum(graph, x, dgl.ops.edge_softmax(graph, e))

        return way(forward, problem.given, problem.grad)
    layer, names = getattr(dgl.nn, case.kind)(case.F, case.C, case.H).to(problem.grad.device), DGLS[case.kind]
    layer.load_state_dict({theirs: problem.weights[name] for name, theirs in names.items()})
    leaves = {name: layer.get_parameter(theirs) for name, theirs in names.items()}
    x, bias = problem.given["x"], problem.weights["bias"].clone().requires_grad_()

    def of_dgl() -> Tensor:
        of_call = dgl.graph(tuple(problem.looped), num_nodes=problem.N) if case.fresh else graph
        out = layer(of_call, F.dropout(x, problem.p)).flatten(1)
        return out if "bias" in leaves else out + bias

    return way(of_dgl, {"x": x, "bias": bias, **leaves}, problem.grad)


def cudnns(problem: Problem) -> Way | None:
    """cuDNN's operation, which scores the features itself, so it is no "attention alone"."""
    case, device = problem.case, problem.grad.device
    if device.type != "cuda" or case.kind != "GATConv" or not case.F or case.edge_dim:
        return None
    # cudnn looks in this path first; torch, which may have brought a cuDNN without graphs, has been loaded before
    with patch.dict(os.environ, LD_LIBRARY_PATH=os.environ.get("CUDNN_LIBRARIES", "")):
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
    if not on_gpu(problem.grad.device) or not problem.case.special:
        return None
    from gat_pyg.training.cuda_graphs import Captured

    made, names = make(problem), []

    def step() -> tuple[Tensor, ...]:
        results = made.step()
        names[:] = results
        return tuple(results.values())

    with torch.no_grad():
        forward = Captured(lambda: (made.forward(),))
    captured = Captured(step)
    return Way(lambda: forward()[0], lambda: dict(zip(names, captured(), strict=True)), TRAIN)


@contextmanager
def constant(name: str, value: int) -> Iterator[None]:
    """Set a constant of the CUDA kernels to another value."""
    from gat_pyg.graph import edges
    from gat_pyg.kernels.gpu import rows

    with patch.object(rows, name, value), patch.object(edges, name, value) if hasattr(edges, name) else nullcontext():
        rows.tile_for.cache_clear()
        yield
    rows.tile_for.cache_clear()


def narrowed(problem: Problem, channels: int) -> Way | None:
    """Attention alone, a head as several narrower ones with the same scores; their gradients are added by autograd."""
    case = problem.case
    if case.F or case.C % channels or problem.p:
        return None
    x, *scores = problem.given.values()
    parts = case.C // channels

    def forward() -> Tensor:
        several = [score.repeat_interleave(parts, 1) for score in scores]
        return attend(x.view(-1, case.H * parts, channels), Additive(*several), problem.edges).view(-1, case.H, case.C)

    return way(forward, problem.given, problem.grad)


def variant(setting: str) -> Callable[[Problem], Way | None]:
    """Our way with other constants of the CUDA kernels, such as SPLIT=64; with CHANNELS=32, as `narrowed`."""
    values = {name: int(value) for name, value in (part.split("=") for part in setting.split(","))}
    channels = values.pop("CHANNELS", 0)

    def make(problem: Problem) -> Way | None:
        problem = problem.anew()
        made = narrowed(problem, channels) if channels else ours(problem, "auto")

        def within(run: Callable[[], Any]) -> Callable[[], Any]:
            for name, value in values.items():
                run = constant(name, value)(run)
            return run

        return None if made is None else Way(within(made.forward), within(made.step))

    return make


def variants() -> list[str]:
    """Return the settings that only a measurement can decide on."""
    from gat_pyg.kernels.gpu import rows

    return [*rows.VARIANTS, "CHANNELS=32,SLAB=32"]


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
