"""GIN with edge features against the Open Graph Benchmark's layer written out, and PNA against PyG's network."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from gat_pyg.baselines.pyg import GINE, PNA
from tests.graphs import CHAIN, LOOPS, RANDOM, REPEATED, Graph
from tests.laws import assert_close

GRAPHS = [CHAIN, LOOPS, RANDOM, REPEATED]
F, D, WIDTH, K = 5, 3, 8, 4  # input features, edge features, hidden channels, outputs: all different


class Published(nn.Module):
    """Layers `GINConv` of OGB's examples: (1 + eps) h + the sum of ReLU(h_j + e_ij), then an MLP with batch norm.

    Their MLP is twice as wide inside, which changes sizes alone.
    """

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.eps = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in widths[1:])
        self.bonds = nn.ModuleList(nn.Linear(D, width) for width in widths[:-1])
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(one, other), nn.BatchNorm1d(other), nn.ReLU(), nn.Linear(other, other))
            for one, other in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:-1])

    def forward(self, h: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        src, dst = edge_index
        for layer, (eps, bond, mlp) in enumerate(zip(self.eps, self.bonds, self.mlps, strict=True)):
            messages = (h[src] + bond(edge_attr)).relu()
            h = mlp((1 + eps) * h + torch.zeros_like(h).index_add(0, dst, messages))
            if layer < len(self.norms):
                h = self.norms[layer](h).relu()
        return h


def compared(ours: nn.Module, theirs: nn.Module, graph: Graph, names: dict[str, str]) -> None:
    """Outputs and all gradients are those of the other network with our weights; `names` maps our names to its own."""
    for parameter in ours.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    state = {names.get(name, name): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    x, edge_attr = (torch.randn(n, width).double() for n, width in ((graph.num_src, F), (graph.index.size(1), D)))
    slopes: list[dict[str, Tensor]] = []
    outs: list[Tensor] = []
    for model in (ours, theirs):
        inputs = {"x": x.clone().requires_grad_(), "edge_attr": edge_attr.clone().requires_grad_()}
        outs.append(model(inputs["x"], graph.index, edge_attr=inputs["edge_attr"]))
        variables = {**inputs, **dict(model.named_parameters())}
        total = (outs[-1] * torch.linspace(-1, 1, outs[-1].numel()).view_as(outs[-1])).sum()
        slopes.append(dict(zip(variables, torch.autograd.grad(total, [*variables.values()]), strict=True)))
    assert_close(*outs)
    assert {names.get(name, name) for name in slopes[0]} == {*slopes[1]}
    for name, slope in slopes[0].items():
        assert_close(slope, slopes[1][names.get(name, name)])


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_gine_is_the_published_network(graph: Graph) -> None:
    torch.manual_seed(0)
    ours = GINE(F, WIDTH, num_layers=3, out_channels=K, edge_dim=D, norm="batch_norm", train_eps=True).double()
    names = {}
    for name in ours.state_dict():
        _, layer, *rest = name.split(".")
        part = ".".join(rest)
        parts = {"nn.lins.0": f"mlps.{layer}.0", "nn.norms.0.module": f"mlps.{layer}.1", "nn.lins.1": f"mlps.{layer}.3"}
        parts |= {"lin": f"bonds.{layer}", "eps": f"eps.{layer}", "module": f"norms.{layer}"}
        prefix = next(prefix for prefix in parts if part == prefix or part.startswith(f"{prefix}."))
        names[name] = parts[prefix] + part.removeprefix(prefix)
    compared(ours, Published([F, WIDTH, WIDTH, K]).double(), graph, names)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_pna_is_pygs(graph: Graph) -> None:
    torch.manual_seed(0)
    degrees = torch.bincount(torch.bincount(graph.index[1], minlength=graph.num_dst))
    options = {"num_layers": 2, "out_channels": K, "edge_dim": D, "norm": "batch_norm"}
    ours = PNA(F, WIDTH, deg=[float(count) for count in degrees], **options).double()
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    make = partial(pyg.PNA, F, WIDTH, aggregators=aggregators, scalers=scalers, **options)
    compared(ours, make(deg=degrees).double(), graph, {})
    layer = ours.convs[0]
    assert isinstance(layer, pyg.PNAConv) and layer.edge_encoder.in_channels == D
