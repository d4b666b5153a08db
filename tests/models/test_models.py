"""The networks: the paper's sizes, the authors' code as a dense transcription, PyG's layers as a stack."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

import gat_pyg.attention.fused
import gat_pyg.features
from gat_pyg import GAT, attention_of
from gat_pyg.conv.mechanisms import DotProduct, DynamicAttention
from gat_pyg.distributed.halo import layers_of
from gat_pyg.features import SparseFeatures
from gat_pyg.features.dropout import dropout
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.paper.authors import AUTHORS, AuthorsConv
from gat_pyg.tasks.model import Inputs
from gat_pyg.training import TorchSampler
from tests.graphs import CHAIN, ISOLATED, LOOPS, RANDOM, REPEATED, Graph, random, union
from tests.laws import assert_close


def data_of(graph: Graph, channels: int = 16) -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(x=torch.randn(graph.num_src, channels, generator=generator), edge_index=graph.index)


@pytest.mark.parametrize(
    ("name", "authors", "ours"),
    [
        ("cora", 92_391, 92_373),  # ours have no score biases: 18 and 18 fewer, and 32 on Pubmed,
        ("citeseer", 237_604, 237_586),
        ("pubmed", 33_832, 33_779),  # where the averaged heads share one bias: 21 fewer again
        ("ppi", 2_901_150, 2_899_493),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(name: str, authors: int, ours: int) -> None:
    assert sum(p.numel() for p in GAT.preset(name, reproduction=True).parameters()) == authors
    assert sum(p.numel() for p in GAT.preset(name).parameters()) == ours
    with pytest.raises(ValueError, match="no preset 'reddit', expected one of cora, citeseer, pubmed, ppi, const_ppi"):
        GAT.preset("reddit")


def test_const_gat_has_no_attention_parameters() -> None:
    gat = {name for name, _ in GAT.preset("ppi").named_parameters()}
    const = {name for name, _ in GAT.preset("const_ppi").named_parameters()}
    assert gat - const == {f"convs.{layer}.att_{side}" for layer in range(3) for side in ("src", "dst")}
    assert const < gat


def authors_head(seq: Tensor, bias_mat: Tensor, conv: AuthorsConv, k: int) -> Tensor:
    """The authors' `attn_head` with dropout off, in their names, for one graph without the batch axis."""
    seq_fts = seq @ conv.weight[k]
    logits = torch.zeros(len(seq), len(seq))
    if conv.att_src is not None and conv.att_dst is not None:
        assert conv.bias_src is not None and conv.bias_dst is not None
        f_1 = seq_fts @ conv.att_dst[k][:, None] + conv.bias_dst[k]
        f_2 = seq_fts @ conv.att_src[k][:, None] + conv.bias_src[k]
        logits = f_1 + f_2.t()
    coefs = torch.softmax(F.leaky_relu(logits, 0.2) + bias_mat, -1)
    ret = coefs @ seq_fts + conv.bias[k]
    if conv.res_weight is not None and conv.res_bias is not None:
        return ret + seq @ conv.res_weight[k] + conv.res_bias[k]
    return ret + seq if conv.residual else ret


@pytest.mark.parametrize("graph", [RANDOM, ISOLATED], ids=str)
@pytest.mark.parametrize("mechanism", ["additive", "constant"])
def test_reproduction_is_the_authors_network(graph: Graph, mechanism: str) -> None:
    index = torch.unique(graph.index, dim=1)
    model = GAT(16, [4, 8], 3, [2, 2, 5], residual=[False, True, False], mechanism=mechanism, reproduction=True)
    identity = GAT(8, [8], 3, [2, 2], residual=[True, False], reproduction=True)  # widths agree: no projection
    assert identity.convs[0].res_weight is None
    adjacency = torch.eye(graph.num_dst, dtype=torch.float64)
    adjacency[index[1], index[0]] = 1
    bias_mat = -1e9 * (1 - adjacency)
    for net in (model, identity):
        for parameter in net.double().parameters():
            nn.init.normal_(parameter)
        x = torch.randn(graph.num_src, 16 if net is model else 8, dtype=torch.float64)
        h = x
        for layer, conv in enumerate(net.convs):
            heads = [authors_head(h, bias_mat, conv, k) for k in range(conv.heads)]
            h = F.elu(torch.cat(heads, -1)) if layer < len(net.convs) - 1 else sum(heads) / conv.heads
        assert_close(net(x, index) / h.abs().max(), h / h.abs().max())
        with pytest.raises(ValueError, match=r"x has shape .*, expected \(N, F\): .* code take no batch"):
            net(x.expand(len(x), -1, -1), index)


@pytest.mark.parametrize("switch", [None, *AUTHORS])
def test_without_a_switch_of_the_authors_a_layer_is_pygs(switch: str | None) -> None:
    of_authors = () if switch is None else (switch,)
    conv = AuthorsConv(16, 8, heads=2, residual=True, of_authors=of_authors)
    plain = gat_pyg.GATConv(16, 8, heads=2, residual=True)
    weights = {
        "lin.weight": conv.weight.mT.flatten(0, 1),
        "bias": conv.bias.flatten(),
        "att_src": conv.att_src[None],
        "att_dst": conv.att_dst[None],
        "res.weight": conv.res_weight.mT.flatten(0, 1),
    }
    plain.load_state_dict(weights)
    data = data_of(RANDOM)
    assert_close(conv(data.x, data.edge_index), plain(data.x, data.edge_index))
    names = {name for name, _ in conv.named_parameters()}
    assert ("bias_src" in names) is (switch == "score_bias") and ("res_bias" in names) is (switch == "skip")
    wide = AuthorsConv(16, 64, heads=8, of_authors=of_authors)
    bound = 6 / (16 + 64 * (1 if switch == "init" else 8))
    assert wide.weight.abs().max().item() == pytest.approx(bound**0.5, rel=1e-2)
    wide.dropout = 0.5
    drawn = wide._drop_for_each_head(torch.ones(40, 16))
    assert drawn.equal(drawn[:1].expand_as(drawn)) is (switch != "input_dropout")


@pytest.mark.parametrize(("sparse", "share"), [(False, 0.4**2), (True, 0.4**3)])
def test_reproduction_drops_out_inputs_attention_and_values(sparse: bool, share: float) -> None:
    """Each is kept with 0.4; of 64 inputs some are always kept, of a single non-zero it counts."""
    torch.manual_seed(0)
    conv = AuthorsConv(64, 4, heads=8, dropout=0.6, mechanism="constant")
    nn.init.ones_(conv.weight)
    x = torch.eye(64)[[7]].expand(500, -1).to_sparse_csr() if sparse else torch.ones(500, 64)
    nonzero = conv(x, torch.empty(2, 0, dtype=torch.long)).view(500, 8, 4) != 0
    assert abs(nonzero.double().mean() - share) < 4 * math.sqrt(share * (1 - share) / (500 * 8))
    assert len({tuple(head.flatten().tolist()) for head in nonzero.unbind(1)}) == 8  # each head draws its own masks


def test_reproduction_draws_every_head_by_glorot() -> None:
    authors, ours = GAT.preset("ppi", reproduction=True).convs[0], GAT.preset("ppi").convs[0]
    for weight, fan in ((authors.weight, 50 + 256), (ours.lin.weight, 50 + 4 * 256)):
        bound = math.sqrt(6 / fan)
        assert 0.99 * bound < weight.abs().max() <= bound
    assert authors.att_src.abs().max() <= math.sqrt(6 / 257)
    assert not any(bias.any() for bias in (authors.bias, authors.bias_src, authors.bias_dst))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("one_mask")
def test_a_stack_of_pygs_layers(training: bool) -> None:
    torch.manual_seed(0)
    ours = GAT(16, [8, 8], 3, [4, 4, 6], dropout=0.5, residual=[0, 1, 0], edge_dim=2)  # as bools
    torch.manual_seed(0)
    stack = nn.ModuleList(
        [
            pyg.GATConv(16, 8, 4, dropout=0.5, edge_dim=2),
            pyg.GATConv(32, 8, 4, dropout=0.5, edge_dim=2, residual=True),
            pyg.GATConv(32, 3, 6, concat=False, dropout=0.5, edge_dim=2),
        ]
    )
    data, edge_attr = data_of(RANDOM), torch.randn(RANDOM.index.size(1), 2)
    ours.train(training), stack.train(training)
    torch.manual_seed(1)
    out = ours(data.x, data.edge_index, edge_attr)
    torch.manual_seed(1)
    x = data.x
    for layer, conv in enumerate(stack):
        x = conv(dropout(F.elu(x) if layer else x, 0.5, training), data.edge_index, edge_attr)
    assert_close(out, x)


class Dropout(nn.Dropout):
    """PyG's network with our masks."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


@pytest.mark.parametrize(
    ("norm", "jk", "conv", "act"),
    [
        (None, "last", "gat", "elu"),
        ("batch", "cat", "gatv2", "relu"),
        ("layer", "max", "gat", "elu"),
        ("graph", "lstm", "gatv2", "relu"),
        ("instance", None, "gat", "relu"),
        ("pair", "cat", "gatv2", "elu"),
    ],
)
@pytest.mark.usefixtures("one_mask")
def test_norms_jumping_knowledge_and_dropout_are_pygs(norm: str | None, jk: str | None, conv: str, act: str) -> None:
    torch.manual_seed(0)
    p = 0.5 if jk in (None, "last") else 0.0  # PyG drops each output before they are combined
    options: dict[str, Any] = {"act": act, "norm": norm, "jk": jk, "edge_dim": 2, "dropout": p}
    pygs = pyg.GAT(16, 12, 3, out_channels=4, heads=3, v2=conv == "gatv2", **options)
    pygs.dropout = Dropout(p)
    ours = GAT(16, 4, 4, heads=3, num_layers=3, conv=conv, input_dropout=0.0, **options)
    for parameter in pygs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(pygs.state_dict())
    data, edge_attr = data_of(RANDOM), torch.randn(RANDOM.index.size(1), 2)
    batch = torch.arange(RANDOM.num_src) // 30
    for training in (True, False):
        ours.train(training), pygs.train(training)
        graphs = {"batch": batch, "batch_size": int(batch.max()) + 1}
        for each in ({}, graphs):
            torch.manual_seed(1)
            out = ours(data.x, data.edge_index, edge_attr, **each)
            torch.manual_seed(1)
            assert_close(out, pygs(data.x, data.edge_index, edge_attr=edge_attr, **each))
    F.cross_entropy(ours(data.x, data.edge_index, edge_attr), torch.arange(40) % 3).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


FORM: dict[str, Any] = {"pre_linear": True, "norm_first": True, "head_layers": 2}
BLOCKS: dict[str, Any] = {**FORM, "feed_forward": 2, "separate_self": True}
BATCHES: dict[str, dict[str, Any]] = {
    **{str(norm): {"norm": norm} for norm in (None, "batch", "layer", "graph", "instance", "pair", "diff_group")},
    **{f"jk={jk}": {"jk": jk, "norm": "graph"} for jk in ("last", "cat", "max", "lstm")},
    **{
        f"norms of {conv}": {"conv": conv, "norm": "layer", "residual": "identity"} for conv in ("gatv2", "transformer")
    },
    "no activation": {"act": None, "norm": "layer", **FORM},
    **{f"blocks of {conv}": {"conv": conv, "norm": "layer", **BLOCKS} for conv in ("gat", "gatv2", "transformer")},
    "transformer's blocks": {"conv": "transformer", "norm": "graph", "residual": "identity", **BLOCKS},
}


@pytest.mark.parametrize("options", BATCHES.values(), ids=BATCHES)
def test_a_batch_on_one_graph_is_a_call_for_each(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kwargs = {"norm_kwargs": {"groups": 2}} if options.get("norm") == "diff_group" else {}
    model = GAT(6, 3, 2, heads=2, num_layers=3, **options, **kwargs).double()
    x, index = torch.randn(6, 40, 6, dtype=torch.float64), RANDOM.index  # as many features as there are graphs
    union = torch.cat([index + 40 * number for number in range(6)], 1)
    over_all = options.get("norm") in ("batch", "diff_group")  # in training, they are over all rows
    alone = (
        model(x.flatten(0, 1), union).view(6, 40, 2) if over_all else torch.stack([model(each, index) for each in x])
    )
    assert_close(model(x, index), alone)
    assert model(x[:0], index).shape == (0, 40, 2)
    model.eval()
    parts = torch.arange(40) // 20
    for graphs in ({}, {"batch": parts, "batch_size": 2}, {"batch": parts}):
        outs = model(x, index, **graphs)
        assert_close(outs, torch.stack([model(each, index, **graphs) for each in x]))
    hops = {"num_sampled_nodes_per_hop": [1, 2, 2, 3], "num_sampled_edges_per_hop": [2, 2, 3]}
    tree = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 3, 4, 4]])
    outs = model(x[:, :8], tree, **hops)
    assert_close(outs, torch.stack([model(each, tree, **hops) for each in x[:, :8]]))


def test_a_transformer_with_skips_is_a_stack_of_pygs_layers() -> None:
    ours = GAT(8, 4, None, heads=2, num_layers=3, conv="transformer", residual="identity", norm="batch", edge_dim=2)
    convs = [pyg.TransformerConv(8, 4, 2, edge_dim=2) for _ in range(3)]
    data, edge_attr = data_of(RANDOM, 8), torch.randn(RANDOM.index.size(1), 2)
    x = data.x
    for layer, (conv, its, norm) in enumerate(zip(convs, ours.convs, ours.norms, strict=True)):
        conv.load_state_dict(its.state_dict())
        out = conv(x, data.edge_index, edge_attr)
        x = F.elu(norm.module.train()(out + x if layer else out) if norm else out)
    assert ours.out_channels == 8 and ours.lin is None and not ours.supports_sparse_features
    assert_close(ours.train()(data.x, data.edge_index, edge_attr), x)


class OverGraphs(nn.LayerNorm):
    """A norm of a user's own."""

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        return super().forward(x - x.mean(0))


def test_norms_that_read_other_nodes_need_the_whole_graph() -> None:
    by_batch, by_node = GAT(4, 2, 3, 2, num_layers=2, norm="batch"), {"norm": "layer", "norm_kwargs": {"mode": "node"}}
    assert by_batch.num_hops is None and GAT(4, 2, 3, 2, num_layers=2, **by_node).num_hops == 2
    loader = NodeLoader(data_of(RANDOM, 4), TorchSampler(RANDOM.index, RANDOM.num_src, [-1]), batch_size=7)
    for norm in ("graph", type("OwnGraphNorm", (pyg.GraphNorm,), {}), OverGraphs):
        model = GAT(4, 2, 3, 2, num_layers=2, norm=norm).eval()
        with pytest.raises(ValueError, match="Graph.* is over all nodes of a graph, which batches of nodes"):
            model.inference(loader)
    with pytest.raises(ValueError, match="cannot be trained on a graph in parts, .* no norm over all nodes"):
        layers_of(GAT(4, 2, 3, 2, num_layers=2, norm="layer"))


@pytest.mark.parametrize("reproduction", [False, True])
def test_dropout_of_sparse_features_is_that_of_dense_ones(reproduction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    index, x = RANDOM.index, F.threshold(torch.rand(40, 16).double(), 0.8, 0.0)
    model = GAT(16, [5, 4, 4], 4, [3, 2, 2, 2], 0.5, [True, True, True, True], reproduction=reproduction)
    model.double()

    def keep(values: Tensor, p: float) -> Tensor:
        drawn = 2 * torch.rand(values.shape, generator=torch.Generator().manual_seed(0)).round()
        return drawn.to(values.dtype)

    def dropped(features: SparseFeatures, p: float, *times: int) -> SparseFeatures:
        drawn = keep(x.expand(*times, *x.shape), p)
        return SparseFeatures(features, features.content * drawn[..., x != 0])

    monkeypatch.setattr(gat_pyg.features.dropout, "drop", lambda values, p: values * keep(values, p))
    monkeypatch.setattr(SparseFeatures, "dropped", dropped)
    results = []
    for features in (x.to_sparse_csr(), x):
        model.zero_grad()
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "to_dense", None)  # no tensor becomes dense
            out = model(features, index)
        out.square().sum().backward()
        results.append({"out": out, **{name: p.grad for name, p in model.named_parameters()}})
    for name, dense in results[1].items():
        assert_close(results[0][name] / dense.abs().max(), dense / dense.abs().max(), name)


def test_attention_of_our_model_and_of_pygs() -> None:
    data = data_of(RANDOM)
    ours, theirs = GAT(16, [8], 3, [4, 1], dropout=0.6), pyg.GAT(16, 8, 2, 3, heads=4, dropout=0.6)
    authors = GAT(16, [8], 3, [4, 2], dropout=0.6, reproduction=True)
    constant = GAT(16, [8], 3, [4, 2], mechanism="constant", reproduction=True)
    for model, heads in ((ours, [4, 1]), (theirs, [4, 4]), (authors, [4, 2]), (constant, [4, 2])):
        model.train()
        layers = attention_of(model, data)
        assert [alpha.size(1) for _, alpha in layers] == heads
        for index, alpha in layers:
            own = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
            assert torch.equal(index, torch.cat([own, torch.arange(40).expand(2, -1)], 1))
            mass = torch.zeros(40, alpha.size(1)).index_add(0, index[1], alpha)
            assert_close(mass, torch.ones_like(mass))
            assert not alpha.requires_grad
        assert model.training
        assert isinstance(model(data.x, data.edge_index), Tensor)  # the hooks are removed
    _, (_, alpha) = theirs.eval().convs[0](data.x, data.edge_index, return_attention_weights=True)
    assert torch.equal(attention_of(theirs, data)[0][1], alpha)
    with pytest.raises(ValueError, match="no layer of Linear takes return_attention_weights"):
        attention_of(nn.Linear(16, 3), data)
    with pytest.raises(ValueError, match=r"data is a tuple, expected a graph: torch_geometric\.data\.Data\(x=x"):
        attention_of(ours, (data.x, data.edge_index))  # type: ignore[arg-type]


class Scaled(nn.Module):
    """A mechanism with a parameter for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads))

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        return self.scale * (x_dst * x_src).sum(-1)


def test_each_layer_has_its_own_modules() -> None:
    classes = GAT(16, [8], 3, [4, 2], mechanism=Scaled, norm=pyg.BatchNorm)
    partials = GAT(16, 8, 3, 4, num_layers=3, mechanism=lambda heads: Scaled(heads), norm=lambda C: nn.LayerNorm(C))
    named = GAT(16, [8], 3, [4, 2], mechanism=DynamicAttention, edge_dim=2)
    for model, shapes in ((classes, [4, 2]), (partials, [4, 4, 4])):
        assert [conv.mechanism.scale.numel() for conv in model.convs] == shapes
    assert [tuple(conv.mechanism.att.shape) for conv in named.convs] == [(1, 4, 8), (1, 2, 3)]
    assert [tuple(conv.mechanism.lin_edge.weight.shape) for conv in named.convs] == [(32, 2), (6, 2)]
    for model in (classes, partials):
        assert model(torch.randn(40, 16), RANDOM.index).shape == (40, 3)
        modules = [module for part in (*model.convs, *model.norms) for module in part.modules()]
        assert len({*map(id, modules)}) == len(modules)
    fixed = GAT(16, [8], 3, [4, 2], mechanism=partial(DynamicAttention, negative_slope=0.5))
    assert [conv.mechanism.negative_slope for conv in fixed.convs] == [0.5, 0.5]
    one = Scaled(4)
    assert GAT(16, [], 3, [4], mechanism=one).convs[0].mechanism is one  # of one layer
    GAT(16, [8], 3, [4, 2], mechanism=DotProduct())  # shares no parameter


class Asking(nn.Module):
    """A model with an argument of the layers' name, which requests the attention of its first layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gat_pyg.GATv2Conv(16, 16), pyg.TransformerConv(16, 16), pyg.GATConv(16, 3)])
        self.norm = nn.BatchNorm1d(16).eval()  # frozen

    def forward(self, x: Tensor, edge_index: Tensor, return_attention_weights: bool = False) -> Any:
        x, (_, alpha) = self.convs[0](x, edge_index, return_attention_weights=True)
        x = self.convs[1](self.norm(x), edge_index, None, None)
        out = self.convs[2](x, edge_index)
        return (out, alpha) if return_attention_weights else out


class Batched(nn.Module):
    """A model whose `batch` has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GATConv(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return pyg.global_mean_pool(self.conv(x, edge_index), batch)


class OfData(nn.Module):
    """A model that is called with the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Batched()

    def forward(self, data: Data) -> Tensor:
        return self.inner(data.x, data.edge_index, torch.zeros_like(data.x[:, 0], dtype=torch.long))


class OfEdges(nn.Module):
    """A model that reads edge features outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = gat_pyg.GATConv(16, 3), nn.Linear(2, 16)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        assert edge_attr is not None
        return self.conv(x.index_add(0, edge_index[1], self.lin(edge_attr)), edge_index)


class OtherNames(nn.Module):
    """A model whose arguments have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gat_pyg.GATConv(16, 8)

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        return self.inner(h, e)


def test_attention_of_any_model_leaves_it_as_it_was() -> None:
    data = data_of(RANDOM).update({"edge_attr": torch.randn(RANDOM.index.size(1), 2)})
    models = [Asking(), OfData(), Batched(), OfEdges(), OtherNames(), pyg.GAT(16, 8, 2, 3, v2=True)]
    others = gat_pyg.TransformerConv(16, 8), gat_pyg.GATv2Conv(16, 8)
    for model, layers in zip([*models, *others], (3, 1, 1, 1, 1, 2, 1, 1), strict=True):
        modes = [module.training for module in model.modules()]
        assert len(attention_of(model, data)) == layers
        assert torch.is_tensor(Inputs.of(model).call(model, data))
        assert modes == [module.training for module in model.modules()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mechanism": Scaled(8)},
            r"mechanism is one Scaled for 2 layers, which would share its parameters\. Pass its cl",
        ),
        (
            {"hidden_channels": [8, 8], "heads": [8, 8, 1], "norm": nn.BatchNorm1d(64)},
            r"norm is one BatchNorm1d for 2 la",
        ),
        ({"aggr": pyg.SoftmaxAggregation(learn=True)}, r"aggr is one SoftmaxAggregation for 2 layers, .*Build one for"),
        ({"mechanism": lambda: {}}, r"mechanism is \{\}, expected 'additive'"),
        ({"heads": [8]}, r"heads has 1 entry, expected 2: one for each of the 1 hidden layers"),
        ({"residual": [True]}, r"residual has 1 entry, expected 2"),
        ({"residual": True}, r"residual is True.* there is no such layer\. Name the layers: residual=\[True, False\]"),
        ({"hidden_channels": 8}, r"hidden_channels is 8, expected a list with one entry per hidden layer, \[8\], or"),
        ({"heads": 8}, r"heads is 8, expected a list with one entry per layer: \[8, 8\]"),
        ({"dropout": 1.5}, r"dropout is 1\.5, expected a probability in \[0, 1\]"),
        ({"heads": [8, 0]}, r"heads is 0, expected at least 1"),
        ({"heads": [8, 0], "reproduction": True}, r"heads is 0, expected at least 1"),
        ({"reproduction": True, "edge_dim": 2}, r"no edge features, no other mechanisms and no further options"),
        ({"conv": "gcn"}, r"conv is 'gcn', expected one of gat, gatv2, transformer"),
        ({"conv": "gatv2", "mechanism": "dot"}, r"mechanism is 'dot', which GATv2Conv does not have\. Use conv='gat'"),
        (
            {"jk": "sum", "heads": [8]},
            r"jk is 'sum' and the layers have 64 features, expected one of last, cat",
        ),
        ({"residual": [False, "identity"]}, r"'identity' in a layer whose input has 64 features .* output has 3, exp"),
        ({"heads": [8], "jk": "last", "feed_forward": 1}, r"feed_forward is 1 without a skip connection in a layer wh"),
        (
            {"separate_self": True},
            r"separate_self is True without a feed-forward part\. Give its width: feed_forward=1",
        ),
        (
            {"hidden_channels": [], "heads": [1], "pre_linear": True},
            r"pre_linear is a map to the width of the first hi",
        ),
        (
            {"heads": [8], "out_channels": None, "head_layers": 2},
            r"head_layers is 2, but the network returns embeddings",
        ),
        ({"reproduction": True, "input_dropout": 0.1}, r"which has one dropout, no pre_linear and no symmetric_norm"),
        (
            {"initial_residual": 0.1},
            r"in a layer of 64 features, but the input that it adds has 16, expected equal widths",
        ),
        ({"feed_forward": 0}, r"feed_forward is 0, expected a whole number, at least 1"),
        ({"heads": [8], "head_layers": 0}, r"head_layers is 0, expected at least 1"),
        ({"input_dropout": -0.5}, r"input_dropout is -0\.5, expected a probability in \[0, 1\]"),
        ({"residual": ["lin", False]}, r"residual is 'lin', expected True, False, 'identity' or 'linear'"),
        ({"norm": "foo"}, r"norm is 'foo' with norm_kwargs \{\}, expected the name of a norm of torch_geometric\.nn"),
        ({"norm": "graphsize"}, r"norm is 'graphsize' .* such as batch, layer"),
        ({"num_layers": 3}, r"num_layers is 3, but hidden_channels and out_channels are of 2 layers"),
        ({"reproduction": ["bias"]}, r"reproduction names bias, expected some of input_dropout, value_dropout, score_"),
        (
            {"mechanism": "sum"},
            r"mechanism is 'sum', expected 'additive', .*, 'cosine' or a module",
        ),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GAT(**{"in_channels": 16, "hidden_channels": [8], "out_channels": 3, "heads": [8, 1], **options})


NETWORKS: dict[str, dict[str, Any]] = {
    "one layer": {"hidden_channels": [], "heads": [2]},
    "skips": {"residual": [False, True, True]},
    "authors": {"residual": [False, True, True], "reproduction": True},
    "edges": {"edge_dim": 3},
    "constant": {"mechanism": "constant"},
    "dot": {"mechanism": "dot"},
    "gatv2": {"mechanism": "gatv2"},
    "no loops": {"add_self_loops": False},
    "identity": {"hidden_channels": [5, 5], "heads": [2, 2, 2], "residual": "identity"},
    "initial": {"hidden_channels": [5, 5], "heads": [2, 2, 2], "initial_residual": 0.5, "pre_linear": True},
    "jumps": {"heads": [3, 2], "jk": "cat"},
    "norm": {"norm": "layer", "norm_kwargs": {"mode": "node"}, "act": "relu"},
    "blocks": {"norm": nn.LayerNorm, "symmetric_norm": True, **BLOCKS, "heads": [3, 2], "hidden_channels": [4, 6]},
    "inner parts": {"heads": [3, 2], "residual": [True, True], "norm": nn.LayerNorm, "feed_forward": 2, "jk": "last"},
}


@pytest.mark.parametrize(("more", "sparse"), [(0, True), (2, False)], ids=["all hops", "two hops too many"])
@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_the_receptive_field_gives_the_outputs_and_gradients_of_the_whole_graph(
    options: dict[str, Any], more: int, sparse: bool
) -> None:
    graph = union(CHAIN, LOOPS, ISOLATED, REPEATED, random(30, 30, 60))
    torch.manual_seed(0)
    model = GAT(**{"in_channels": 5, "hidden_channels": [5, 4], "out_channels": 4, "heads": [3, 2, 2], **options})
    x, edge_attr = torch.randn(graph.num_src, 5).relu(), torch.randn(graph.index.size(1), 3)
    data = Data(x=x.double(), edge_index=graph.index, edge_attr=edge_attr.double() if "edge_dim" in options else None)
    data.x = data.x.to_sparse_csr() if sparse else data.x
    part = receptive_field(data, torch.tensor([4, 0, 9, 17, 25]), model.double().num_hops + more)
    hops = {"num_sampled_nodes_per_hop": part.num_sampled_nodes, "num_sampled_edges_per_hop": part.num_sampled_edges}
    results = []
    for each, numbers, rows in ((data, {}, part.n_id[:5]), (part, hops, slice(5))):
        out = model(each.x, each.edge_index, each.edge_attr, **numbers)
        assert len(out) == (sum(part.num_sampled_nodes[: more + 1]) if numbers else graph.num_src)
        gradients = torch.autograd.grad(out[rows].square().sum(), list(model.parameters()))
        results.append((out[rows], *gradients))
    for whole, field in zip(*results, strict=True):
        assert_close(field, whole)


def test_a_model_needs_as_many_hops_as_it_has_layers() -> None:
    model = GAT(4, [4, 4], 3, [1, 1, 1])
    with pytest.raises(ValueError, match="per_hop has 3 entries and .* 2, expected edges of at least 3 hops"):
        model(torch.ones(2, 4), RANDOM.index[:, :0], None, [1, 1, 0], [0, 0])
    assert GAT(4, [4], 3, [1, 1], flow="target_to_source").num_hops is None
