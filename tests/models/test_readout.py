"""Readout against PyG's pooling, graph by graph, and the files of trained models that have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN, MLP, global_max_pool, global_mean_pool

from gat_pyg import GAT, load
from gat_pyg.models import Readout
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.network import build_model
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.trained.predict import predict
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


READOUTS: dict[str, Callable[[], Readout]] = {
    **{f"mean of {name}": lambda make=make: Readout(make()) for name, make in MODELS.items()},  # type: ignore[misc]
    "attentional of GAT": lambda: Readout(GAT(6, 4, None, 2, num_layers=2), "attentional", out_channels=3),
    "set2set of GIN": lambda: Readout(GIN(6, 8, 2), "set2set", out_channels=3),
    "softmax of GAT": lambda: Readout(GAT(6, 4, None, 2, num_layers=2), "softmax", out_channels=3),
    "several of GIN": lambda: Readout(GIN(6, 8, 2), ["mean", "max", "set2set"], out_channels=3),
}


@pytest.mark.parametrize("name", READOUTS)
def test_a_graph_has_the_same_output_alone_and_in_a_batch(name: str):
    torch.manual_seed(0)
    model, graphs = READOUTS[name]().eval(), batch()
    out = model(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=6)
    alone = [model(data.x, data.edge_index) for data in labelled_graphs().train]
    torch.testing.assert_close(out[:5], torch.cat(alone))
    assert out.shape == (6, 3)  # the last has no node
    out.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(("aggr", "pool"), [("mean", global_mean_pool), ("max", global_max_pool)])
def test_it_is_pygs_pooling(aggr: str, pool: object):
    graphs, model = batch(), MODELS["GAT"]()
    out = Readout(model, aggr)(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=6)
    assert torch.equal(out, pool(model(graphs.x, graphs.edge_index), graphs.batch, 6))  # type: ignore[operator]


def test_an_attentional_readout_is_a_softmax_of_a_linear_gate():
    data = labelled_graphs().train[0]
    model = Readout(GAT(6, 4, None, 2, num_layers=2), "attentional", out_channels=3)
    h = model.model(data.x, data.edge_index)
    gate = model.aggr.gate_nn(h).softmax(0)
    torch.testing.assert_close(model(data.x, data.edge_index), model.lin((gate * h).sum(0, keepdim=True)))


def test_errors():
    with pytest.raises(ValueError, match="Linear has no out_channels, expected the width of its embeddings"):
        Readout(nn.Linear(6, 3), "sum", out_channels=2)
    with pytest.raises(ValueError, match="aggr is lstm, which needs arguments: .*Pass an aggregation instead"):
        Readout(GAT(6, 4, None, 2, num_layers=2), "lstm", out_channels=2)


def test_a_perceptron_is_pooled_before_the_head():
    data = labelled_graphs().train[0]
    settings = {"_target_": "gat_pyg.models.baselines.MLP", "hidden_channels": 4, "num_layers": 1}
    factory = ModelFactory("model", {**settings, "readout": "sum", "head_layers": 2})
    factory.check()
    model: Any = build_model(factory, labelled_graphs()).model.eval()
    h = model.model.lins[0](data.x).relu().sum(0, keepdim=True)
    first, last = model.lin.lins
    torch.testing.assert_close(model(data.x, data.edge_index), last(first(h).relu()))


SETTINGS = {"_target_": "torch_geometric.nn.GIN", "hidden_channels": 4, "num_layers": 2}


def test_saved_models_of_two_seeds_predict_graphs_alone_and_as_a_stack(tmp_path: Path):
    task, graphs = labelled_graphs(), Batch.from_data_list(labelled_graphs().test)
    outs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model, target, arguments = build_model(ModelFactory("model", {**SETTINGS, "head_layers": 2}), task)
        assert target == "gat_pyg.models.Readout" and [lin.out_features for lin in model.lin.lins] == [4, 3]
        path = tmp_path / f"seed-{seed}" / "model.safetensors"
        path.parent.mkdir()
        about = {"preparation": task.preparation.to_dict(), "objective": task.objective.to_dict()}
        save_model(path, model, target, arguments, **about)
        outs.append(model.eval()(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=3))
        torch.testing.assert_close(predict(path.parent, graphs), outs[-1].softmax(-1))
        assert load(path).preparation == task.preparation and load(path).objective == task.objective
    stack = load(tmp_path, seed="all")
    out = stack(graphs.x, graphs.edge_index, batch=graphs.batch, batch_size=3)
    torch.testing.assert_close(out, torch.stack(outs))
    torch.testing.assert_close(predict(tmp_path, graphs, seed="all"), out.softmax(-1).mean(0))
    torch.testing.assert_close(predict(tmp_path, task.test[0], seed="all"), out.softmax(-1).mean(0)[:1])


def test_a_null_readout_leaves_the_model_as_it_is():
    model, target, _ = build_model(ModelFactory("model", {**SETTINGS, "readout": None}), labelled_graphs())
    assert target == "torch_geometric.nn.GIN" and isinstance(model, GIN)
