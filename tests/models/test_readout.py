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
from gat_pyg.data import from_dataset
from gat_pyg.models import Readout
from gat_pyg.models.readout import GraphFeatures
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.network import build_model
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.tasks.model import Inputs
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
    "counts of GIN": lambda: Readout(
        GIN(6, 8, 2), out_channels=3, columns={"categories": [3, *[0] * 5], "mean": [0.0] * 5, "std": [1.0] * 5}
    ),
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


def test_columns_count_categories_and_do_not_depend_on_the_order_of_nodes():
    draw = torch.Generator().manual_seed(0)
    graphs = []
    for N in (3, 6, 9):
        x = torch.cat([torch.randint(4, (N, 1), generator=draw), torch.randn(N, 1, generator=draw)], 1)
        edge_attr = torch.randint(3, (2 * N, 1), generator=draw).float()
        edges = torch.randint(N, (2, 2 * N), generator=draw)
        graphs.append(Data(x, edges, edge_attr, y=torch.tensor([N % 2]), graph_attr=torch.tensor([[float(N), 1.0]])))
    task = from_dataset([*graphs, *graphs], val=2, test=1)
    settings = {"_target_": "gat_pyg.models.GAT", "hidden_channels": 4, "heads": 2, "num_layers": 2, "head_layers": 1}
    factory = ModelFactory("model", {**settings, "readout": ["mean", "count"]})
    model: Any = build_model(factory, task).model.eval()
    inputs = Inputs.of(model)
    plain = GraphFeatures([4, 0], [3])
    raw = torch.cat([inputs.call(plain, data) for data in task.train])
    nodes = torch.stack([(data.x[:, :1] == torch.arange(4)).sum(0) for data in task.train])
    bonds = torch.stack([(data.edge_attr == torch.arange(3)).sum(0) for data in task.train])
    sizes = torch.stack([nodes.sum(1), bonds.sum(1)], 1)
    torch.testing.assert_close(raw[:, :-2].expm1(), torch.cat([sizes, nodes, bonds], 1).float())
    std = raw.std(0, correction=0)
    scaled = inputs.call(model.columns, Batch.from_data_list(task.train))
    torch.testing.assert_close(scaled, (raw - raw.mean(0)) / std.where(std > 1e-6, torch.inf), atol=1e-5, rtol=1e-5)
    data, order = graphs[2], torch.randperm(9, generator=draw)
    other = Data(data.x[order], order.argsort()[data.edge_index], data.edge_attr, graph_attr=data.graph_attr)
    torch.testing.assert_close(inputs.call(model, other), inputs.call(model, data))
    with pytest.raises(ValueError, match=r"graph_attr has 0 columns for each graph, expected \(G, 2\) as in training"):
        model(data.x, data.edge_index, data.edge_attr)


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
