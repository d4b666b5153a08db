"""The laws of every model, ours and anyone's, from one table; and the reading of a model's interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Batch, Data

from gat_pyg.models import GAT, Change, Encoded, LinkScores, Readout
from gat_pyg.models.baselines import GCN, MLP
from gat_pyg.paper.methods.chebyshev import Chebyshev
from gat_pyg.paper.methods.manireg import ManiReg
from gat_pyg.paper.methods.monet import MoNet
from gat_pyg.paper.methods.semiemb import SemiEmb
from gat_pyg.philox import keyed
from gat_pyg.seeds.planning import trial
from gat_pyg.seeds.stack import Stack
from gat_pyg.tasks.model import Inputs, is_compiled, members, takes_sparse
from gat_pyg.tasks.nodes import NodeLabels
from tests.graphs import CHAIN, LOOPS, RANDOM, REPEATED, STAR_IN, Graph, union
from tests.laws import assert_close


class Plain(nn.Linear):
    """A model of a user, which declares nothing."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "GAT": partial(GAT, 5, [4], 3, [2, 2], residual=[False, True]),
    "constant": partial(GAT, 5, [4], 3, [2, 2], mechanism="constant"),
    "dot": partial(GAT, 5, [4], 3, [2, 2], mechanism="dot"),
    "GATv2 scores": partial(GAT, 5, [4], 3, [2, 2], mechanism="gatv2"),
    "authors": partial(GAT, 5, [4, 4], 3, [2, 2, 2], residual=[False, False, True], reproduction=True),
    "authors, constant": partial(GAT, 5, [4], 3, [2, 2], mechanism="constant", reproduction=True),
    "GATv2": partial(GAT, 5, 4, 3, 2, num_layers=2, conv="gatv2"),
    "transformer": partial(GAT, 5, 4, 3, 2, num_layers=2, conv="transformer"),
    "blocks": lambda dropout=0.0: GAT(
        *(5, 2, 3, 2, dropout),
        **{"num_layers": 2, "pre_linear": "gelu", "norm": nn.LayerNorm, "norm_first": True, "feed_forward": 1},
        **{"separate_self": True, "act": "gelu", "head_layers": 2, "symmetric_norm": True},
        **{"input_dropout": dropout / 2, "attention_dropout": dropout / 4},
    ),
    "transformer's blocks": partial(
        *(GAT, 5, 2, 3, 2),
        **{"num_layers": 2, "conv": "transformer", "pre_linear": True, "jk": "cat", "norm": nn.LayerNorm},
        **{"feed_forward": 2, "residual": "identity", "initial_residual": 0.5},
    ),
    "encoded": lambda **options: Encoded(GAT(4, [4], 3, [2, 2], **options), 4, [0] * 5),
    "MLP": partial(MLP, 5, 4, 3),
    "GCN": partial(GCN, 5, 4, 3),
    "GCN of one layer": partial(GCN, 5, 4, 3, num_layers=1),
    "Chebyshev of order 1": partial(Chebyshev, 5, 4, 3, order=1),
    "Chebyshev of order 3": partial(Chebyshev, 5, 4, 3, order=3, num_layers=3),
    "MoNet": partial(MoNet, 5, 4, 3),
    "MoNet of 3 kernels": partial(MoNet, 5, 4, 3, dim=1, kernel_size=3, act="elu"),
    "ManiReg": lambda **options: ManiReg(5, 3),
    "SemiEmb": partial(SemiEmb, 5, 8, 3, dropout=0.0),
    "PyG's GCN": lambda **options: pyg.GCN(5, 4, 2, 3),
    "plain": lambda **options: Plain(5, 3),
    "linear": lambda **options: nn.Linear(5, 3),
}
every = pytest.mark.parametrize("name", MODELS)


def features(graph: Graph) -> Tensor:
    return torch.randn(graph.num_src, 5, dtype=torch.float64).relu()


def called(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
    return Inputs.of(model).call(model, Data(x, index))


@every
def test_every_parameter_has_a_gradient_and_sparse_features_give_that_of_dense_ones(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), features(RANDOM)
    results = []
    for each in (x, x.to_sparse_csr())[: 1 + takes_sparse(model)]:
        out = called(model, each, RANDOM.index)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    assert results[0][0].shape == (40, 3)
    assert all(gradient.any() for gradient in results[0])
    for dense, sparse in zip(results[0], results[-1], strict=True):
        assert_close(sparse, dense, name)


@every
def test_a_union_of_graphs_has_the_outputs_of_each(name: str) -> None:
    model = MODELS[name]().double().eval()
    graphs = [CHAIN, LOOPS, REPEATED, STAR_IN]
    xs = [features(graph) for graph in graphs]
    outs = [called(model, x, graph.index) for x, graph in zip(xs, graphs, strict=True)]
    assert_close(called(model, torch.cat(xs), union(*graphs).index), torch.cat(outs), name)
    changed = CHAIN.index.clone()
    called(model, xs[0], changed)
    changed[:, 0] = torch.tensor([3, 1])  # what is remembered of the graph does not outlive a change in place
    assert_close(called(model, xs[0], changed), called(model, xs[0], changed.clone()), name)


@every
@pytest.mark.parametrize("sparse", [False, True])
def test_a_stack_is_its_models_in_outputs_gradients_and_dropout(name: str, sparse: bool) -> None:
    torch.manual_seed(0)
    models = [MODELS[name](dropout=p) for p in (0.5, 0.0, 0.3)]
    if sparse and not takes_sparse(models[0]):
        pytest.skip("the model takes dense features")
    x = features(RANDOM).float()
    data = Data(x.to_sparse_csr() if sparse else x, RANDOM.index, y=torch.arange(40) % 3)
    for place, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = torch.arange(40) % 4 == place
    assert isinstance(trial(models, NodeLabels(3), data), int)
    stack, inputs, keys = Stack(models), Inputs.of(models[0]), torch.tensor([3, 5, 8])

    def drawn(model: Callable[..., Tensor], key: Tensor) -> Tensor:
        with keyed(key):
            return inputs.call(model, data)

    out = stack.each(drawn, keys)
    out.square().sum().backward()
    for row, model in enumerate(models):
        alone = drawn(model, keys[row])
        alone.square().sum().backward()
        assert_close(out[row], alone, name)
        for key, parameter in model.named_parameters():
            assert_close(stack.models.get_parameter(key).grad[row], parameter.grad, f"{name} {key}")


@pytest.mark.parametrize("name", ["GCN", "Chebyshev of order 3", "MoNet", "plain"])
def test_a_compiled_model_has_the_same_inputs_and_outputs(name: str) -> None:
    model, x = MODELS[name]().eval(), features(RANDOM).float()
    expected = called(model, x, RANDOM.index)
    wrapped = torch.compile(model, backend="eager")
    assert is_compiled(wrapped) and not is_compiled(model) and not takes_sparse(wrapped)
    assert Inputs.of(wrapped) == Inputs.of(model) and members(wrapped).num_hops == members(model).num_hops
    assert_close(called(wrapped, x, RANDOM.index), expected)
    model.compile(backend="eager")
    assert is_compiled(model) and not takes_sparse(model)
    assert_close(called(model, x, RANDOM.index), expected)


class Recorder(nn.Module):
    """A model that takes everything, and returns the names of what it was given."""

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, batch: Any = None, batch_size: Any = None,
        num_sampled_nodes_per_hop: Any = None, num_sampled_edges_per_hop: Any = None, edge_label_index: Any = None,
        edge_label_attr: Any = None,
    ) -> Any:  # fmt: skip
        return {key for key, value in locals().items() if value is not None} - {"self", "x", "edge_index"}


class Pooled(nn.Module):
    """A model whose `batch` has no default."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return pyg.global_add_pool(x, batch)


class OfData(nn.Module):
    """A model that is called with the graph."""

    def forward(self, data: Data) -> Tensor:
        batch = torch.arange(2) if "ptr" in data else data.batch
        return pyg.global_add_pool(data.x, batch)


class OfBatch(OfData):
    """The same, as in GraphGym."""

    def forward(self, batch: Data) -> Tensor:
        return super().forward(batch)


def test_a_model_gets_the_fields_that_it_takes_and_that_are_known() -> None:
    model = Recorder()
    inputs = Inputs.of(model)
    data = Data(torch.ones(2, 5), torch.tensor([[0], [1]]))
    assert inputs.call(model, data) == set()
    data.edge_attr, data.edge_label_index, data.edge_label_attr = torch.ones(1, 2), data.edge_index, torch.ones(1, 2)
    pairs = {"edge_label_index", "edge_label_attr"}
    assert inputs.call(model, data) == {"edge_attr", *pairs}
    for graphs in (Batch.from_data_list([data]), data.clone().update({"batch": torch.zeros(2, dtype=torch.long)})):
        assert inputs.call(model, graphs) == {"edge_attr", "batch", "batch_size", *pairs}
    data.num_sampled_nodes, data.num_sampled_edges = [1, 1], [1]
    per_hop = {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"}
    assert inputs.call(model, data, per_hop=True) == {"edge_attr", *pairs, *per_hop}
    model.supports_edge_attr = False  # type: ignore[assignment]
    for wrapped in (model, AveragedModel(model), nn.DataParallel(model)):
        assert Inputs.of(wrapped).call(wrapped, data) == pairs
    model.penalty = model.fit = 0.1  # type: ignore[assignment]  # numbers of a user's own
    assert not members(model).has_loss
    assert called(nn.Identity(), data.x, data.edge_index) is data.x
    for needy in (Pooled(), OfData(), OfBatch()):  # a graph on its own is one graph, and `ptr` shows several
        assert called(needy, data.x, data.edge_index).tolist() == [[2.0] * 5]
        assert Inputs.of(needy).call(needy, Data(data.x, data.edge_index, ptr=torch.tensor([0, 1, 2]))).size(0) == 2
        assert called(Readout(needy), data.x, data.edge_index).shape == (1, 5)
    assert members(pyg.GCN(5, 4, 2, 3)).inference is None  # PyG's method accepts only PyG's loader
    assert members(GAT(5, [4], 3, [2, 2])).inference is not None


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Readout": Readout,
    "Encoded": lambda model: Encoded(model, 5, [0] * 5, [0, 0]),
    "LinkScores": lambda model: LinkScores(model, 3),
    "Change": lambda model: Change(model, [0, 2], [2] * 3, [0.0] * 3, [1.0] * 3),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_has_the_members_of_its_model(name: str) -> None:
    make = WRAPPERS[name]
    gcn, gat = make(GCN(5, 4, 3)), make(GAT(5, [4], 3, [2, 2], edge_dim=5))
    decayed, inner = {*members(gcn).decayed_parameters()}, {*gcn.model.parameters()}
    assert decayed & inner == {*gcn.model.decayed_parameters()} < inner
    assert decayed - inner == {*gcn.parameters()} - inner
    assert members(gat).num_hops == (None if name == "Readout" else 2)  # a pooled row depends on all nodes
    assert members(gcn).supports_sparse_features is (name != "Encoded")
    assert members(gat).supports_edge_attr and members(make(GAT(5, [4], 3, [2, 2]))).supports_edge_attr is (
        name == "Encoded"
    )
    with pytest.raises(ValueError, match="SemiEmb has its own loss over nodes"):
        make(SemiEmb(5, 8, 3))


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrapper_of_any_model_is_compiled_and_exported(name: str, strict: bool) -> None:
    model, x = WRAPPERS[name](Plain(5, 3)).eval(), torch.randn(40, 5)
    batch = {"batch": torch.arange(40) // 20, "batch_size": 2}
    options: dict[str, Any] = {"Readout": batch, "LinkScores": {"edge_label_index": RANDOM.index[:, :7]}}.get(name, {})
    out = model(x, RANDOM.index, **options)
    assert_close(
        torch.export.export(model, (x, RANDOM.index), options, strict=strict).module()(x, RANDOM.index, **options), out
    )
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(x, RANDOM.index, **options), out)
