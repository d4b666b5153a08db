"""Readout against PyG's pooling, graph by graph, and the files of trained models that have one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN, MLP, global_max_pool, global_mean_pool

from gat_pyg import GAT, load
from gat_pyg.baselines.gcn import GCN
from gat_pyg.experiments.build import build_model
from gat_pyg.experiments.model_file import predict, save_model
from gat_pyg.experiments.settings import ModelFactory
from gat_pyg.models import Readout
from tests.objectives import labelled_graphs

MODELS = {
    "GAT": lambda: GAT(6, [4], 3, [2, 1]),
    "PyG's GIN": lambda: GIN(6, 4, 2, 3),
    "no edges": lambda: MLP([6, 3]),
    "norm of graphs": lambda: torch_geometric.nn.GCN(6, 4, 2, 3, norm="graph_norm"),
}


def batch() -> Batch:
    empty = Data(torch.zeros(0, 6), torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([0]))
    return Batch.from_data_list([*labelled_graphs().train, empty])


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_has_in_a_batch_the_output_that_it_has_alone(name: str):
    torch.manual_seed(0)
    model, graphs = Readout(MODELS[name]()).eval(), batch()
    out = model(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=6)
    alone = [model(data.x, data.edge_index) for data in labelled_graphs().train]
    torch.testing.assert_close(out[:5], torch.cat(alone))
    assert out.shape == (6, 3)  # the last has no node
    out.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(("aggr", "pool"), [("mean", global_mean_pool), ("max", global_max_pool)])
def test_it_is_the_pooling_of_pyg(aggr: str, pool: object):
    graphs, model = batch(), MODELS["GAT"]()
    out = Readout(model, aggr)(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=6)
    assert torch.equal(out, pool(model(graphs.x, graphs.edge_index), graphs.batch, 6))  # type: ignore[operator]


@pytest.mark.parametrize("aggr", ["attentional", "set2set", "softmax", ["mean", "max", "set2set"]], ids=str)
@pytest.mark.parametrize("name", ["GAT", "PyG's GIN"])
def test_a_learnt_readout_of_embeddings_is_that_of_each_graph(name: str, aggr: str | list[str]):
    torch.manual_seed(0)
    model = GAT(6, 4, None, 2, num_layers=2) if name == "GAT" else GIN(6, 8, 2)
    model, graphs = Readout(model, aggr, out_channels=3).eval(), batch()
    out = model(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=6)
    alone = [model(data.x, data.edge_index) for data in labelled_graphs().train]
    torch.testing.assert_close(out[:5], torch.cat(alone))
    assert out.shape == (6, 3)
    out.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_an_attentional_readout_is_a_softmax_of_a_linear_gate():
    data = labelled_graphs().train[0]
    model = Readout(GAT(6, 4, None, 2, num_layers=2), "attentional", out_channels=3)
    h = model.model(data.x, data.edge_index)
    gate = model.aggr.gate_nn(h).softmax(0)
    torch.testing.assert_close(model(data.x, data.edge_index), model.lin((gate * h).sum(0, keepdim=True)))


def test_edge_features_and_decayed_parameters_are_those_of_the_model():
    assert Readout(GAT(6, [4], 3, [2, 1], edge_dim=2)).supports_edge_attr
    assert not Readout(GAT(6, [4], 3, [2, 1])).supports_edge_attr and not Readout(MLP([6, 3])).supports_edge_attr
    model = Readout(GCN(6, 4, 3))
    assert {*model.decayed_parameters()} == {*model.model.decayed_parameters()} < {*model.parameters()}


def test_a_model_with_a_loss_over_nodes_is_refused():
    model = nn.Linear(6, 3)
    model.penalty = lambda out, data: out.sum()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Linear has its own loss over nodes"):
        Readout(model)


def test_a_readout_of_embeddings_without_a_width_or_arguments_is_refused():
    with pytest.raises(ValueError, match="Linear has no out_channels, expected the width of its embeddings"):
        Readout(nn.Linear(6, 3), "sum", out_channels=2)
    with pytest.raises(ValueError, match="aggr is lstm, which needs arguments: .*Pass an aggregation instead"):
        Readout(GAT(6, 4, None, 2, num_layers=2), "lstm", out_channels=2)


def test_a_trained_model_is_built_again_and_predicts_graphs(tmp_path: Path):
    task, graphs = labelled_graphs(), Batch.from_data_list(labelled_graphs().test)
    settings = {"_target_": "torch_geometric.nn.GIN", "hidden_channels": 4, "num_layers": 2}
    model, target, arguments = build_model(ModelFactory("model", settings), task)
    assert target == "gat_pyg.models.Readout"
    path = tmp_path / "model.safetensors"
    save_model(
        path, model, target, arguments, preparation=task.preparation.to_dict(), objective=task.objective.to_dict()
    )
    found = predict(tmp_path, graphs)
    out = model.eval()(graphs.x, graphs.edge_index, batch=graphs.batch)
    torch.testing.assert_close(found, out.softmax(-1))
    assert found.shape == (3, 3) and load(tmp_path).preparation == task.preparation
    has_readout = ModelFactory("model", {**settings, "readout": None})  # has one of its own
    own, target, _ = build_model(has_readout, task)
    assert target == "torch_geometric.nn.GIN" and isinstance(own, GIN)


def test_runs_of_several_seeds_are_loaded_as_one_stack(tmp_path: Path):
    task, graphs = labelled_graphs(), Batch.from_data_list(labelled_graphs().test)
    settings = {"_target_": "torch_geometric.nn.GIN", "hidden_channels": 4, "num_layers": 2}
    outs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model, target, arguments = build_model(ModelFactory("model", settings), task)
        path = tmp_path / f"seed-{seed}" / "model.safetensors"
        path.parent.mkdir()
        save_model(
            path, model, target, arguments, preparation=task.preparation.to_dict(), objective=task.objective.to_dict()
        )
        outs.append(model.eval()(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=3))
    stack = load(tmp_path, seed="all")
    out = stack(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=3)
    torch.testing.assert_close(out, torch.stack(outs))
