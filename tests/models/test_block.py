"""Blocks: the networks of tunedGNN and of Platonov et al. in plain torch and PyG, in float64, and symmetric alpha."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, remove_self_loops

from gat_pyg import GAT
from gat_pyg.distributed.halo import layers_of
from gat_pyg.features.dropout import dropout
from tests.graphs import ISOLATED, LOOPS, RANDOM, REPEATED, Graph
from tests.laws import assert_close

P = 0.3  # of dropout, whose masks are drawn in the same order by both


def looped(graph: Graph) -> Tensor:
    return add_self_loops(remove_self_loops(graph.index)[0], num_nodes=graph.num_src)[0]


def dropped(x: Tensor) -> Tensor:
    return dropout(x, P, True)


def assert_same(ours: GAT, out: Tensor, plain: nn.Module, expected: Tensor, names: dict[str, str]) -> None:
    """Outputs and gradients are equal; `names` are ours by those of plain torch, up to the shape."""
    assert_close(out, expected)
    out.square().sum().backward(), expected.square().sum().backward()
    assert len(names) == len(list(plain.parameters())) == len(list(ours.parameters()))
    for name, our in names.items():
        gradient, truth = ours.get_parameter(our).grad, plain.get_parameter(name).grad
        assert gradient.any(), our
        assert_close(gradient.view_as(truth), truth, name)


def with_weights(ours: GAT, plain: nn.Module, names: dict[str, str]) -> GAT:
    """Return our network with the weights of plain torch's."""
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        for name, our in names.items():
            ours.get_parameter(our).copy_(plain.get_parameter(name).view_as(ours.get_parameter(our)))
    return ours


class TunedGNN(nn.Module):
    """Luo et al. (NeurIPS 2024): PyG's layer plus a linear map, batch norm, ReLU, dropout; a linear head."""

    def __init__(self, F: int, C: int, K: int, layers: int, pre_linear: bool) -> None:
        super().__init__()
        widths = [C if pre_linear else F] + [C] * (layers - 1)
        self.lin_in = nn.Linear(F, C) if pre_linear else None
        self.convs = nn.ModuleList(pyg.GATConv(width, C, add_self_loops=False) for width in widths)
        self.lins = nn.ModuleList(nn.Linear(width, C, bias=False) for width in widths)
        self.bns = nn.ModuleList(nn.BatchNorm1d(C) for _ in widths)
        self.pred_local = nn.Linear(C, K)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x if self.lin_in is None else dropped(self.lin_in(x))
        for conv, lin, bn in zip(self.convs, self.lins, self.bns, strict=True):
            x = dropped(F.relu(bn(conv(x, edge_index) + lin(x))))
        return self.pred_local(x)


@pytest.mark.parametrize("pre_linear", [False, True])
def test_fifteen_layers_are_tunedgnns(pre_linear: bool) -> None:
    torch.manual_seed(0)
    L = 15
    plain = TunedGNN(5, 8, 3, L, pre_linear).double()
    names = {"pred_local.weight": "lin.weight", "pred_local.bias": "lin.bias"}
    names |= {f"lin_in.{part}": f"pre_linear.{part}" for part in ("weight", "bias")} if pre_linear else {}
    for layer in range(L):
        names |= {f"convs.{layer}.{part}": f"convs.{layer}.{part}" for part in ("att_src", "att_dst", "bias")}
        names |= {f"convs.{layer}.lin.weight": f"convs.{layer}.lin.weight"}
        names |= {f"lins.{layer}.weight": f"convs.{layer}.res.weight"}
        names |= {f"bns.{layer}.{part}": f"norms.{layer}.module.{part}" for part in ("weight", "bias")}
    ours = with_weights(
        GAT(
            *(5, 8, 3, 1, P),
            **{"num_layers": L, "jk": "last", "residual": "linear", "norm": "batch", "act": "relu"},
            **{"input_dropout": 0.0, "attention_dropout": 0.0, "pre_linear": pre_linear},
        ).double(),
        plain,
        names,
    )
    x = torch.randn(40, 5, dtype=torch.float64)
    torch.manual_seed(1)
    out = ours(x, RANDOM.index)
    torch.manual_seed(1)
    assert_same(ours, out, plain, plain(x, looped(RANDOM)), names)


class Platonov(nn.Module):
    """GAT and GAT-sep of Platonov et al. (ICLR 2023) with dense attention, without biases of W and of the scores.

    The own features of GAT-sep are the norm's output, which their code maps by W before the perceptron does.
    """

    def __init__(self, F: int, C: int, K: int, heads: int, layers: int, sep: bool) -> None:
        super().__init__()
        self.heads, self.sep = heads, sep
        self.input_linear, self.output_linear = nn.Linear(F, C), nn.Linear(C, K)
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(layers + 1))
        self.W = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(layers))
        self.u, self.v = (nn.ParameterList(torch.empty(heads, C // heads) for _ in range(layers)) for _ in range(2))
        self.bias = nn.ParameterList(torch.empty(C) for _ in range(layers))
        self.linear_1 = nn.ModuleList(nn.Linear(2 * C if sep else C, 2 * C) for _ in range(layers))
        self.linear_2 = nn.ModuleList(nn.Linear(2 * C, C) for _ in range(layers))

    def attention(self, layer: int, x: Tensor, adjacency: Tensor) -> Tensor:
        z = self.W[layer](x).view(len(x), self.heads, -1)
        score = F.leaky_relu((z * self.v[layer]).sum(-1)[:, None] + (z * self.u[layer]).sum(-1)[None], 0.2)
        alpha = score.masked_fill(~adjacency[:, :, None], -torch.inf).softmax(1)  # [dst, src, H]
        return torch.einsum("ijh,jhc->ihc", alpha, z).flatten(1) + self.bias[layer]

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.gelu(dropped(self.input_linear(x)))
        for layer, norm in enumerate(self.norms[:-1]):
            normed = norm(x)
            h = self.attention(layer, normed, adjacency)
            h = torch.cat([normed, h], 1) if self.sep else h
            x = x + dropped(self.linear_2[layer](F.gelu(dropped(self.linear_1[layer](h)))))
        return self.output_linear(self.norms[-1](x))


@pytest.mark.parametrize("sep", [False, True], ids=["GAT", "GAT-sep"])
def test_the_block_is_platonovs(sep: bool) -> None:
    torch.manual_seed(0)
    plain = Platonov(5, 8, 3, 4, 2, sep).double()
    names = {f"{name}_linear.{part}": f"{our}.{part}" for name, our in (("input", "pre_linear"), ("output", "lin"))
             for part in ("weight", "bias")}  # fmt: skip
    for layer in range(2):
        parts = {"W.{}.weight": "lin.weight", "u.{}": "att_src", "v.{}": "att_dst", "bias.{}": "bias"}
        names |= {name.format(layer): f"convs.{layer}.{our}" for name, our in parts.items()}
        for part in ("weight", "bias"):
            names |= {f"linear_{n}.{layer}.{part}": f"blocks.{layer}.feed_forward.lins.{n - 1}.{part}" for n in (1, 2)}
    names |= {f"norms.{n}.{part}": f"norms.{n}.{part}" for n in range(3) for part in ("weight", "bias")}
    ours = GAT(
        *(5, 2, 3, 4, P),
        **{"num_layers": 2, "jk": "last", "norm": nn.LayerNorm, "norm_first": True, "feed_forward": 2, "act": "gelu"},
        **{"separate_self": sep, "pre_linear": "gelu", "input_dropout": 0.0, "attention_dropout": 0.0},
    )
    ours = with_weights(ours.double(), plain, names)
    x, adjacency = torch.randn(40, 5, dtype=torch.float64), torch.eye(40, dtype=torch.bool)
    index = RANDOM.index.unique(dim=1)
    adjacency[index[1], index[0]] = True
    torch.manual_seed(1)
    out = ours(x, index)
    torch.manual_seed(1)
    assert_same(ours, out, plain, plain(x, adjacency), names)


@pytest.mark.parametrize("norm_first", [True, False])
def test_with_a_skip_connection_the_block_is_torchs_transformer_layer(norm_first: bool) -> None:
    """The attention of one node is its linear map: alpha is 1."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(8, 1, 16, 0.0, F.gelu, norm_first=norm_first, dtype=torch.float64)
    options: dict[str, Any] = {"norm": nn.LayerNorm, "norm_first": norm_first, "feed_forward": 2, "act": "gelu"}
    ours = GAT(8, [8], None, [1], 0.0, ["identity"], conv="transformer", root_weight=False, **options).double()
    weights = theirs.state_dict()
    value = weights["self_attn.in_proj_weight"][16:]
    with torch.no_grad():
        ours.convs[0].lin_value.weight.copy_(weights["self_attn.out_proj.weight"] @ value)
        ours.convs[0].lin_value.bias.zero_()
    assert not weights["self_attn.in_proj_bias"].any() and not weights["self_attn.out_proj.bias"].any()
    for n in (1, 2):
        ours.blocks[0].feed_forward.lins[n - 1].load_state_dict(getattr(theirs, f"linear{n}").state_dict())
    x = torch.randn(1, 8, dtype=torch.float64)
    out = ours(x, torch.tensor([[0], [0]]))
    assert_close(out, ours.norms[1](theirs(x)) if norm_first else theirs(x))


def test_linear_propagation_with_its_input_is_that_of_refined_gae() -> None:
    """Ma et al. (CIKM 2025): two layers without an activation, and after each one the input times 0.1."""
    torch.manual_seed(0)
    plain = nn.ModuleList(pyg.GATConv(8, 4, heads=2) for _ in range(2)).double()
    names = {name: f"convs.{name}" for name, _ in plain.named_parameters()}
    ours = GAT(8, 4, None, 2, num_layers=2, act=None, initial_residual=0.1).double()
    ours = with_weights(ours, plain, names)
    h = x = torch.randn(40, 8, dtype=torch.float64)
    for conv in plain:
        h = conv(h, RANDOM.index) + 0.1 * x
    assert_same(ours, ours(x, RANDOM.index), plain, h, names)


@pytest.mark.parametrize("graph", [RANDOM, LOOPS, ISOLATED, REPEATED], ids=str)
@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"flow": "target_to_source"}], ids=str)
def test_symmetric_attention_is_dense(graph: Graph, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GAT(5, [], 3, [2], symmetric_norm=True, **options).double()
    x, N = torch.randn(graph.num_src, 5, dtype=torch.float64), graph.num_src
    theirs = pyg.GATConv(5, 3, 2, concat=False, **options).double()
    theirs.load_state_dict(model.convs[0].state_dict())
    _, (index, alpha) = theirs(x, graph.index, return_attention_weights=True)
    src, dst = index.flip(0) if "flow" in options else index
    matrix = torch.zeros(2, N, N, dtype=torch.float64).index_put((torch.tensor([[0], [1]]), dst, src), alpha.t(), True)
    root = dst.bincount(minlength=N).clamp(min=1).double().sqrt()
    z = theirs.lin(x).view(N, 2, 3).transpose(0, 1)
    expected = (root[:, None] * (matrix @ (z / root[:, None]))).mean(0) + theirs.bias
    assert_close(model(x, graph.index), expected)
    if "flow" not in options:
        assert_close(model(x, EdgeIndex(graph.index, sparse_size=(N, N))), expected)


def test_symmetric_attention_needs_every_edge() -> None:
    model = GAT(4, [4], 3, [1, 1], symmetric_norm=True)
    assert model.num_hops == 3
    with pytest.raises(ValueError, match="expected edges of at least 3 hops, one per layer and one for the degrees"):
        model(torch.ones(3, 4), RANDOM.index[:, :0], None, [1, 1, 1], [0, 0])
    with pytest.raises(ValueError, match=r"edge_index is a sparse matrix, but symmetric_norm counts edges: pass an"):
        model(torch.ones(3, 4), torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match="cannot be trained on a graph in parts, .* no symmetric_norm"):
        layers_of(model)
