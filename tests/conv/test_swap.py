"""Built models: PyG's layers exchanged for ours in place and back, GraphGym's layers, weights of DGL's layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.graphgym.models.layer import GeneralLayer, LayerConfig

from gat_pyg import GATConv, GATv2Conv, TransformerConv, accelerate, from_dgl, restore
from tests.conv.test_draws import LAYERS, normal
from tests.graphs import RANDOM
from tests.laws import assert_close

pytestmark = pytest.mark.usefixtures("float64")

INDEX, BATCH = RANDOM.index, torch.arange(RANDOM.num_src) // 10
X, EDGE_ATTR = normal(RANDOM.num_src, 8, seed=1), normal(INDEX.size(1), 3, seed=2)
KINDS = ["user", "item"], [("user", "buys", "item"), ("item", "bought_by", "user")]
INDICES = dict(zip(KINDS[1], (INDEX, INDEX.flip(0)), strict=True))


class Lightning(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.TransformerConv(8, 3, heads=2, beta=True, edge_dim=3)

    def forward(self, *inputs: Any) -> Tensor:
        return self.conv(*inputs)


def hetero_conv() -> nn.Module:
    return pyg.HeteroConv({kind: pyg.GATConv((-1, -1), 4, add_self_loops=False) for kind in KINDS[1]})


def local(channels: int) -> nn.Module:
    options = {"local_layers": 2, "heads": 2, "local_attn": True, "in_dropout": 0.0, "dropout": 0.0}
    return pyg.Polynormer(channels, 4, 3, **options)


def typed(model: Any) -> Tensor:
    return torch.cat([*model({"user": X, "item": X[:, :8]}, INDICES).values()])


# How to build a model and how to call it, and how many of its layers are swapped
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]] = {
    "GAT": (lambda: pyg.GAT(8, 6, 2, 3, heads=2, norm="batch_norm", jk="cat"), lambda m: m(X, INDEX), 2),
    "GATv2": (lambda: pyg.GAT(8, 6, 2, v2=True, edge_dim=3), lambda m: m(X, INDEX, edge_attr=EDGE_ATTR), 2),
    "AttentiveFP": (lambda: pyg.AttentiveFP(8, 6, 1, 3, 2, 2), lambda m: m(X, INDEX, EDGE_ATTR, BATCH), 2),
    "Polynormer": (lambda: local(8), lambda m: m(X, INDEX, BATCH), 2),
    "SAGPooling": (lambda: pyg.SAGPooling(8, GNN=pyg.GATConv), lambda m: m(X, INDEX)[0], 1),
    "GPSConv": (
        lambda: pyg.GPSConv(8, pyg.GATv2Conv(8, 2, 4, edge_dim=3), heads=2),
        lambda m: m(X, INDEX, BATCH, edge_attr=EDGE_ATTR),
        1,
    ),
    "HeteroConv": (hetero_conv, typed, 2),
    "to_hetero": (lambda: pyg.to_hetero(pyg.GAT(8, 4, 1, v2=True, add_self_loops=False), KINDS), typed, 2),
    "GraphGym": (
        lambda: GeneralLayer("gatconv", LayerConfig(dim_in=8, dim_out=4, has_act=False)),
        lambda m: m(Data(x=X, edge_index=INDEX)).x,
        1,
    ),
    "Lightning": (Lightning, lambda m: m(X, INDEX, EDGE_ATTR), 1),
    "compiled": (
        lambda: torch.compile(pyg.GATv2Conv(8, 3, add_self_loops=False), backend="eager"),
        lambda m: m(X, INDEX),
        1,
    ),
    "loaded": (lambda: pickle.loads(pickle.dumps(pyg.GAT(8, 6, 1))), lambda m: m(X, INDEX), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_is_the_model(name: str) -> None:
    """Outputs, the state dict, parameters, hooks, random numbers, ten steps of its optimizer; and the way back."""
    torch._dynamo.reset()  # else it may have compiled message passing too often before
    build, call, count = MODELS[name]
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
        call(models[-1])  # lazy widths
        optimizers.append(torch.optim.Adam(models[-1].parameters(), lr=0.01))

    def assert_equal(steps: int) -> None:
        outs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(steps):
                optimizer.zero_grad()
                call(model).sin().sum().backward()
                optimizer.step()
            outs.append(call(model))
        assert_close(outs[1], outs[0], f"{name}, {steps} steps")

    assert_equal(1)
    ours, called = models[1], set()
    for layer in ours.modules():
        layer.register_forward_hook(lambda layer, *_: called.add(type(layer)))
    before = [(type(layer), set(vars(layer))) for layer in ours.modules()]
    weights, state, generator = [*ours.parameters()], ours.state_dict(), torch.get_rng_state()

    result = accelerate(ours)
    assert len(result.swapped) == count and {*result.left.values()} <= {"gat_pyg has no GATEConv."}
    assert torch.equal(generator, torch.get_rng_state())
    assert all(one is other for one, other in zip(ours.parameters(), weights, strict=True))
    for (key, value), (same, expected) in zip(ours.state_dict().items(), state.items(), strict=True):
        assert key == same and torch.equal(value, expected)
    assert_equal(0)
    assert called & {*LAYERS.values()}
    assert_equal(10)

    assert restore(ours) == (result.swapped, {})
    assert [(type(layer), set(vars(layer))) for layer in ours.modules()] == before
    assert_equal(1)


def test_lazy_layers_are_swapped_before_their_first_call() -> None:
    outs = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = hetero_conv()
        if swap:
            accelerate(model)
        outs.append(typed(model))
    assert_close(*outs)


class Subclass(pyg.GATConv):
    pass


def test_a_model_is_swapped_before_or_within_ddp() -> None:
    """In one process; DDP's hooks are on the parameters, which stay."""
    plain = pyg.GAT(8, 4, num_layers=2, out_channels=3, heads=2)
    plain(X, INDEX).square().sum().backward()

    def check(before: bool) -> None:  # a function, so that DDP is freed first: without a group it may wait for ever
        model = copy.deepcopy(plain)
        model.zero_grad()
        swapped = accelerate(model) if before else None
        parallel = DistributedDataParallel(model)
        assert len((swapped or accelerate(parallel)).swapped) == 2
        parallel(X, INDEX).square().sum().backward()
        for name, each in plain.named_parameters():
            assert_close(model.get_parameter(name).grad, each.grad)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check(before=True)
        check(before=False)
    finally:
        dist.destroy_process_group()


def test_what_is_left_alone_has_a_reason() -> None:
    replaced, dropping = pyg.GATConv(4, 4), pyg.GATConv(4, 4)
    replaced.message = MethodType(pyg.GATConv.message, replaced)
    layers = {
        "sub": (Subclass(4, 4), "Subclass is a subclass of GATConv."),
        "other": (pyg.GCNConv(4, 4), "gat_pyg has no GCNConv."),
        "replaced": (replaced, "its message was replaced."),
        "max": (pyg.GATv2Conv(4, 4, aggr="max"), "it aggregates by max, and the fused operation computes sums."),
        "decomposed": (pyg.GATConv(4, 4, decomposed_layers=2), "decomposed_layers is 2, and the fused operation is"),
    }
    model = nn.ModuleDict({name: layer for name, (layer, _) in layers.items()} | {"dropping": dropping})
    kinds = [type(layer) for layer in model.values()]
    result = accelerate(model)
    assert result.swapped == {"dropping": "GATConv"}
    assert result.left.keys() == layers.keys()
    for name, (_, reason) in layers.items():
        assert result.left[name].startswith(reason)
    assert "1 swapped: dropping (GATConv)\nleft sub: Subclass" in repr(result)
    assert [type(layer) for layer in model.values()] == [*kinds[:-1], GATConv]
    dropping.edge_dropout = 0.5
    own = nn.ModuleList([GATConv(4, 4), dropping])
    assert restore(own).left == {"1": "it has a mechanism or edge_dropout, which PyG's layer does not have."}
    assert repr(accelerate(own)) == "0 swapped: there is no layer to swap"
    with pytest.raises(TypeError, match=r"model is of type list, expected a torch\.nn\.Module\."):
        accelerate([dropping])  # type: ignore[arg-type]


# DGL ----------------------------------------------------------------------------------------------------------------

H, C = 2, 3


def of_dgl(kind: str, width: int, bipartite: bool, residual: bool, bias: bool, shared: bool) -> dict[str, Tensor]:
    """Weights with the names and shapes that the constructors of DGL's layers give them."""
    shapes: dict[str, tuple[int, ...]] = {}
    if kind == "GATConv":
        names = ["fc_src", "fc_dst"] if bipartite else ["fc"]
        shapes |= {f"{name}.weight": (H * C, width) for name in names}
        shapes |= {"attn_l": (1, H, C), "attn_r": (1, H, C)}
    else:
        for name in ("fc_src", "fc_dst"):
            shapes |= {f"{name}.weight": (H * C, width)} | ({f"{name}.bias": (H * C,)} if bias else {})
        shapes["attn"] = (1, H, C)
    linear = residual and width != H * C  # else DGL's identity
    if linear:
        shapes |= {"res_fc.weight": (H * C, width)} | ({"res_fc.bias": (H * C,)} if bias else {})
    if kind == "GATConv" and bias and not linear:
        shapes["bias"] = (H * C,)
    weights = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    if shared:
        weights |= {name.replace("src", "dst"): value for name, value in weights.items() if "fc_src" in name}
    return weights


def by_dgl(kind: str, weights: dict[str, Tensor], residual: bool, x: Tensor, edges: Tensor) -> Tensor:
    """DGL's layer, edge by edge: `[N, H, C]`."""

    def project(name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")).view(-1, H, C)

    src, dst = (project(name if f"{name}.weight" in weights else "fc") for name in ("fc_src", "fc_dst"))
    out = torch.zeros(x.size(0), H, C)
    for i in range(x.size(0)):
        neighbours = [int(j) for j, of in edges.t() if of == i]
        for head in range(H if neighbours else 0):
            scores = []
            for j in neighbours:
                if kind == "GATConv":
                    left, right = (weights[f"attn_{side}"][0, head] for side in "lr")
                    scores.append(F.leaky_relu(left @ src[j, head] + right @ dst[i, head], 0.2))
                else:
                    scores.append(weights["attn"][0, head] @ F.leaky_relu(src[j, head] + dst[i, head], 0.2))
            for alpha, j in zip(torch.stack(scores).softmax(0), neighbours, strict=True):
                out[i, head] += alpha * src[j, head]
    if residual:
        out = out + (project("res_fc") if "res_fc.weight" in weights else x.view(-1, H, C))
    return out + weights["bias"].view(H, C) if "bias" in weights else out


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_weights_of_dgl_give_what_dgls_equations_do(kind: str) -> None:
    edges = torch.tensor([[0, 1, 2, 2, 0, 3], [1, 1, 1, 0, 2, 2]])  # nobody points to node 3
    cases = [  # width, bipartite, residual, bias, concat
        *[(4, False, False, True, True), (4, True, True, True, False), (6, False, True, True, True)],
        *[(6, False, True, False, False), (4, False, True, False, True)],
    ]
    for width, bipartite, residual, bias, concat in cases:
        shared = kind == "GATv2Conv" and residual
        weights = of_dgl(kind, width, bipartite, residual, bias, shared)
        options: dict[str, Any] = {"share_weights": shared} if kind == "GATv2Conv" else {}
        options |= {"concat": concat, "residual": residual, "bias": bias, "add_self_loops": False}
        conv = LAYERS[kind]((width, width) if bipartite else width, C, H, **options)
        model = nn.ModuleDict({"conv": conv, "head": nn.Linear(2, 2)})
        state = {f"conv.{name}": value for name, value in weights.items()}
        model.load_state_dict(from_dgl(state | {f"head.{k}": v for k, v in model["head"].state_dict().items()}, model))
        x = normal(4, width, seed=9)
        expected = by_dgl(kind, weights, residual, x, edges)
        assert_close(conv(x, edges), expected.flatten(1) if concat else expected.mean(1), f"{kind} {width} {options}")


def test_a_network_without_its_layers_is_an_error() -> None:
    model = nn.ModuleDict({"conv": GATv2Conv(4, 4)})
    with pytest.raises(
        ValueError, match=r"no weights of a DGL layer 'conv', expected conv\.fc_src\.weight or the like"
    ):
        from_dgl({"layers.0.attn": torch.zeros(1, 1, 4)}, model)
    with pytest.raises(ValueError, match=r"no GATConv or GATv2Conv of gat_pyg.*accelerate\(model\) if its layers are"):
        from_dgl({}, nn.ModuleList([TransformerConv(4, 4)]))
