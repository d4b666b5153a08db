"""A run's data preparation: its description, its application, and the checks of a loaded model."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCN
from torch_geometric.transforms import AddSelfLoops, Compose, NormalizeFeatures

from gat_pyg import load, predict
from gat_pyg.data import Task, digits, from_dataset, planetoid, planted
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.network import build_model
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.tasks import losses
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.preparation import NORMALIZE, Preparation, Standardize, attach, build_transform, row_range
from gat_pyg.training import Inductive

real = pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA names no folder with the real data")


def bag(N: int = 40, F: int = 12) -> Data:
    """A graph with binary features, at least one in each row."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(N, F, generator=generator) < 0.4).float()
    x[:, 0] = 1.0
    return Data(x, torch.randint(N, (2, 4 * N), generator=generator), y=torch.arange(N) % 3)


def of(data: Data, *transforms: dict[str, Any]) -> Preparation:
    """The preparation of a run on `data` after these transforms."""
    x = Compose([build_transform(transform) for transform in transforms])(data).x
    return Preparation(x.size(1), None, None, transforms, row_range([x]))


@pytest.fixture
def model() -> nn.Module:
    return GCN(12, 4, 2, 3).eval()


# What is applied ----------------------------------------------------------------------------------------------------

ARGUMENTS = {"in_channels": 12, "hidden_channels": 4, "num_layers": 2, "out_channels": 3}
SHIFTED = bag().x * torch.linspace(1, 50, 12) + 7
DEVIATION = SHIFTED.double().std(0, correction=0)
STANDARD = Standardize(SHIFTED.double().mean(0), DEVIATION.masked_fill(DEVIATION == 0, 1.0)).describe()


@pytest.mark.parametrize("transform", [NORMALIZE, STANDARD], ids=["normalise", "standardise"])
def test_applied_twice_is_applied_once_and_the_callers_data_stay(transform: dict[str, Any]):
    data = bag()
    data.x = SHIFTED if transform is STANDARD else data.x
    x, preparation = data.x.clone(), of(data, transform)
    once = preparation(data)
    assert torch.equal(once.x, build_transform(transform)(data).x)
    assert not torch.allclose(once.x, x)
    assert torch.equal(preparation(once).x, once.x)
    assert torch.equal(data.x, x)
    assert torch.equal(preparation(Data(x.to_sparse_csr(), data.edge_index)).x, once.x)


def test_standardize_is_scikit_learns():
    scaler = StandardScaler().fit(SHIFTED.double().numpy())
    expected = torch.from_numpy(scaler.transform(SHIFTED.double().numpy())).float()
    assert torch.equal(build_transform(STANDARD)(Data(x=SHIFTED)).x, expected)


def test_transforms_inside_others_keep_their_order():
    inside = [
        NORMALIZE,
        {"_target_": "torch_geometric.transforms.AddSelfLoops", "attr": "edge_attr", "fill_value": 2.0},
    ]
    data = bag()
    data.edge_attr = torch.ones(data.num_edges)
    out = of(data, {"_target_": "torch_geometric.transforms.Compose", "transforms": inside})(data)
    expected = Compose([NormalizeFeatures(), AddSelfLoops("edge_attr", 2.0)])(data)
    assert all(torch.equal(out[key], expected[key]) for key in ("x", "edge_index", "edge_attr"))


OTHER = r"expected a class of torch_geometric\.transforms"
TRANSFORMS = {
    **{
        target: ({"_target_": target, "command": "true"}, rf"prepared by {target}, {OTHER}")
        for target in (
            *("os.system", "builtins.eval", "torch_geometric.transforms.Data", "torch_geometric.data.Data", "nowhere"),
            *("torch_geometric.transforms.functional_transform", "torch_geometric.transforms.os.system", None),
            "gat_pyg.tasks.preparation.Preparation",
        )
    },
    "arguments": ({**NORMALIZE, "unheard": 1}, r"NormalizeFeatures\(\*\*{'unheard': 1}\), which this version cannot"),
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_only_pygs_transforms_are_built_by_name(case: str | None):
    description, message = TRANSFORMS[case]
    with pytest.raises(ValueError, match=message):
        build_transform(description)


X, E = bag().x, bag().edge_index
GRAPHS: list[tuple[Any, str]] = [
    (Data(X, E), r"edge_attr is missing, expected \(E, 2\)"),
    (Data(X, E, torch.ones(160)), r"edge_attr is of shape \(160,\), expected \(E, 2\)"),
    (Data(X[:, :5], E, torch.ones(160, 2)), r"x has shape \(40, 5\), expected \(N, 12\)"),
    (Data(X, E, torch.ones(99, 2)), r"edge_attr is of shape \(99, 2\), expected \(E, 2\) .* with E = 160"),
    *(
        (wrong, rf"^data {what}, expected a torch_geometric\.data\.Data with x \[N, 12\]")
        for wrong, what in (
            *((None, "is a NoneType"), (X, "is a Tensor"), (X.numpy(), "is a ndarray"), ({"x": X}, "is a dict")),
            *((Data(edge_index=E), "has no x"), (HeteroData(), "is a HeteroData")),
        )
    ),
]


@pytest.mark.parametrize(("data", "message"), GRAPHS)
def test_other_dimensions_are_named(data: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Preparation(12, 2)(data)


# The preparation of a task -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [digits, planted, pytest.param("cora", marks=real)])
def test_all_parts_of_a_runs_data_are_recognised_as_prepared(make: Any):
    task: Task = planetoid(make) if isinstance(make, str) else make()
    preparation = task.preparation
    for data in (data for split in SPLITS for data in task.graphs(split)):
        assert torch.equal(preparation(data).x, data.x)
        assert preparation.fits(data.x)
        assert preparation.fits(data.x.to_sparse_csr())
        assert preparation.fits(receptive_field(data, torch.arange(10), 1).x)
        assert preparation.fits(data.x.bfloat16())
        assert not preparation.fits(10 * data.x)
    rows = torch.cat([data.x for data in task.train])
    assert sum(not preparation.fits(row[None]) for row in rows) <= 0.02 * len(rows)  # two tails of 1 % each


def test_a_preparation_comes_back_from_json():
    preparation = digits().preparation
    assert preparation.class_names == tuple("0123456789")
    assert Preparation.from_dict(json.loads(json.dumps(preparation.to_dict()))) == preparation


CLASSES = {  # the sizes of the classes in the literature; Citeseer's 15 papers without a label are of class 0 here
    "cora": {
        **{"Case Based": 298, "Genetic Algorithms": 418, "Neural Networks": 818, "Probabilistic Methods": 426},
        **{"Reinforcement Learning": 217, "Rule Learning": 180, "Theory": 351},
    },
    "citeseer": {"Agents": 596, "AI": 249 + 15, "DB": 701, "IR": 668, "ML": 590, "HCI": 508},
    "pubmed": {
        f"Diabetes Mellitus{kind}": n for kind, n in ((", Experimental", 4103), (" Type 1", 7739), (" Type 2", 7875))
    },
}


@real
@pytest.mark.parametrize("name", CLASSES)
def test_the_classes_have_the_names_of_their_sizes(name: str):
    task = planetoid(name)
    assert task.class_names is not None
    assert dict(zip(task.class_names, task.train[0].y.bincount().tolist(), strict=True)) == CLASSES[name]


def test_class_names_are_those_of_the_data_set():
    data = bag()
    data.class_names = ["a", "b", "c", "nobody"]
    task = from_dataset(data, per_class=3, val=5, test=5)
    assert task.class_names == ("a", "b", "c")
    with pytest.raises(ValueError, match="class_names has 2 names, expected one for each of the 3 classes"):
        Task("mine", task.train, task.val, task.test, 12, NodeLabels(3), class_names=("a", "b"))


# What a loaded model checks -----------------------------------------------------------------------------------------


def test_the_first_call_alone_warns_of_features_prepared_differently(model: nn.Module):
    data = bag()
    attach(model, of(data, NORMALIZE))
    with pytest.warns(UserWarning, match=r"training data 1\. .* by NormalizeFeatures, which gat_pyg\.predict"):
        model(data.x, data.edge_index)
    model(data.x, data.edge_index)
    attach(model, of(data, NORMALIZE))
    model(NormalizeFeatures()(data).x, data.edge_index)  # prepared: no warning
    attach(model, of(data))
    attach(model, of(data))  # as a second `load` into the same model
    with pytest.warns(UserWarning, match=r"were not transformed after they were read") as caught:
        model(x=100 * data.x.to_sparse_csr().to_dense(), edge_index=data.edge_index)
    assert len(caught) == 1 and len(model._forward_pre_hooks) == 1


def test_another_width_is_refused_each_time(model: nn.Module):
    attach(model, of(bag()))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x has shape \(4, 5\), expected \(N, 12\) as in the data"):
            model(torch.ones(4, 5), torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_checks_by_itself(model: nn.Module, copied: Any):
    data = bag()
    attach(model, of(data, NORMALIZE))
    for each in (copied(model), model):
        with pytest.warns(UserWarning, match="prepared differently"):
            each(data.x, data.edge_index)
        each(data.x, data.edge_index)


def test_the_model_is_otherwise_as_it_was(model: nn.Module):
    data, before = bag(), copy.deepcopy(model)
    attach(model, of(data, NORMALIZE))
    assert model.state_dict().keys() == before.state_dict().keys()
    assert inspect.signature(model.forward) == inspect.signature(before.forward)
    out = before(data.x, data.edge_index)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(data.x, data.edge_index), out)  # without a check, which would break the graph
    parameters = dict(model.named_parameters())

    def total(parameters: dict[str, Any]) -> Any:
        return torch.func.functional_call(model, parameters, (data.x, data.edge_index)).sum()

    assert torch.func.grad(total)(parameters).keys() == parameters.keys()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The runs of two seeds on row-normalised features."""
    for seed in range(2):
        torch.manual_seed(seed)
        about = {"preparation": of(bag(), NORMALIZE).to_dict(), "objective": NodeLabels(3).to_dict()}
        path = tmp_path / f"seed-{seed}" / "model.safetensors"
        save_model(path, GCN(**ARGUMENTS), "torch_geometric.nn.GCN", ARGUMENTS, **about)
    return tmp_path


def test_a_stack_and_its_models_check_too(folder: Path):
    data = bag()
    stack: Any = load(folder, seed="all")
    assert stack.preparation == stack[1].preparation == of(data, NORMALIZE)
    for model in (stack, stack[1]):
        with pytest.warns(UserWarning, match="prepared differently"):
            model(data.x, data.edge_index)
        model(data.x, data.edge_index)


def test_predict_is_the_model_on_prepared_data(folder: Path):
    data, seeds = bag(), []
    prepared = NormalizeFeatures()(data)
    for seed in range(2):
        out = load(folder, seed=seed)(prepared.x, prepared.edge_index).softmax(-1)
        seeds.append(predict(folder, data, seed=seed))
        torch.testing.assert_close(seeds[seed], out.detach())
        torch.testing.assert_close(predict(folder, prepared, seed=seed), out.detach())
    torch.testing.assert_close(predict(folder, data, seed="all"), (seeds[0] + seeds[1]) / 2)
    with pytest.warns(UserWarning, match="prepared differently"):
        predict(folder, Data(0.01 * data.x, data.edge_index), seed=0)


# Graphs of one label each: categories and a number of each node, a category of each edge, a quantity in its own unit


def molecule(N: int) -> Data:
    draw = torch.Generator().manual_seed(N)
    x = torch.stack([torch.randint(9, (N,), generator=draw), torch.randint(4, (N,), generator=draw)], 1).float()
    edge_index, edge_attr = torch.randint(N, (2, 2 * N), generator=draw), torch.randint(3, (2 * N, 1), generator=draw)
    return Data(x, edge_index, edge_attr.float(), y=100 + 20 * x[:, :1].mean(0, keepdim=True))


def saved(folder: Path, task: Task, settings: dict[str, Any], seeds: int = 2) -> Path:
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, target, arguments = build_model(ModelFactory("model", settings), task)
        about = {"preparation": task.preparation.to_dict(), "objective": task.objective.to_dict()}
        save_model(folder / f"seed-{seed}" / "model.safetensors", model, target, arguments, **about)
    return folder


@pytest.fixture
def molecules(tmp_path: Path) -> Path:
    """The runs of two seeds."""
    gat = {"_target_": "gat_pyg.GAT", "hidden_channels": 4, "heads": 2, "num_layers": 2, "encoder": 8, "norm": "graph"}
    return saved(tmp_path, from_dataset([molecule(N) for N in range(3, 11)], "m", val=2, test=2), gat)


def test_graphs_are_predicted_alone_and_together_in_every_form(molecules: Path):
    graphs = [molecule(N) for N in (4, 7, 5)]
    for seed in (1, "all"):
        alone = torch.cat([predict(molecules, graph, seed=seed) for graph in graphs])
        union = Batch.from_data_list(graphs)
        keys = {key: union[key] for key in ("x", "edge_index", "edge_attr")}
        forms = {
            "list": [graphs[0], Data(graphs[1].x, graphs[1].edge_index, graphs[1].edge_attr), graphs[2]],
            "Batch": union,
            "batch": Data(**keys, batch=union.batch),
            "ptr": Data(**keys, ptr=union.ptr),
        }
        for form, data in forms.items():
            torch.testing.assert_close(predict(molecules, data, seed=seed), alone, msg=form)
    assert alone.shape == (3, 1) and alone.min() > 50  # in the unit of y


def changed(**changes: Any) -> Data:
    return molecule(5).update(changes)


X5, E5 = molecule(5).x, molecule(5).edge_index
REFUSED: list[tuple[Any, str]] = [
    (Data(X5[:0], E5[:, :0], X5[:0, :1], num_nodes=0), r"data: the graph has no nodes, expected at least one"),
    ([molecule(4), changed(x=X5[:0], edge_index=E5[:, :0], edge_attr=X5[:0, :1])], r"data: graph 1 has no nodes"),
    ([molecule(4), changed(x=X5 / 0.0)], r"data: x is NaN or infinite at node 4 \(graph 1\) as torch.float32"),
    (changed(x=X5 + torch.nan), r"data: x is NaN or infinite at node 0 as torch.float32, in column 0\. Replace such"),
    (changed(edge_attr=torch.full((10, 1), torch.inf)), r"data: edge_attr is not of finite floats"),
    (changed(x=X5[:, :1]), r"x has shape \(5, 1\), expected \(N, 2\) as in the data that the run was trained on"),
    (changed(edge_index=E5 + 4), r"data: edge_index holds 8, but x has 5 rows"),
    (changed(edge_index=E5.float()), r"data: edge_index is torch.float32, expected int64"),
    (Data(X5, edge_attr=torch.ones(10, 1)), r"data has no edge_index\. Give the edges as \[2, E\]"),
    (changed(batch=torch.tensor([0, 1, 0, 1, 1])), r"data: batch is 0 at node 2 after 1, expected the numbers"),
    ([], r"data is a list of nothing, expected graphs"),
    ((X5, E5), r"^data is a tuple of Tensor, expected graphs: torch_geometric\.data\.Data\(x=x, edge_index"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_training_refuses_is_not_predicted(molecules: Path, data: Any, message: str):
    with pytest.raises(ValueError, match=message):
        predict(molecules, data, seed=0)


def test_categories_that_training_did_not_have_are_warned_of(molecules: Path):
    data = changed(x=X5 + torch.tensor([[0.0, 0.5]]))
    data.x[0, 0] = 82.0  # lead
    data.edge_attr[0] = 7.0
    with pytest.warns(UserWarning, match=r"column 0 of x has 1, column 1 of x has 5, column 0 of edge_attr has 1"):
        predict(molecules, data, seed=0)


def test_ids_of_nodes_that_were_not_embedded_are_refused(tmp_path: Path):
    ring = torch.stack([torch.arange(9), torch.arange(9).roll(1)])
    task = from_dataset(Data(edge_index=ring, y=torch.arange(9) % 3), per_class=1, val=3, test=3)
    saved(tmp_path, task, {"_target_": "gat_pyg.GAT", "hidden_channels": [2], "heads": [1, 1], "encoder": 2})
    ids = torch.arange(9.0)[:, None]
    assert predict(tmp_path, Data(ids.flip(0), ring), seed=0).shape == (9, 3)
    with pytest.warns(UserWarning, match="data.edge_attr is not read: the run was trained without edge features"):
        predict(tmp_path, Data(ids, ring, torch.ones(9, 1)), seed=0)
    for wrong, message in (
        (ids + 1, "x has the node 9, but .* of 9 nodes, expected ids from 0 to 8"),
        (ids / 2, "0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(tmp_path, Data(wrong, ring), seed=0)


def test_a_loaded_model_and_its_export_return_predictions_in_their_unit_on_request(molecules: Path):
    data = load(molecules, seed=0).preparation(molecule(6))  # type: ignore[operator]
    arguments = (data.x, data.edge_index, data.edge_attr)
    network, seeds = load(molecules, seed=0), [predict(molecules, molecule(6), seed=seed) for seed in (0, 1, "all")]
    assert torch.equal(network.objective.predictions(network(*arguments)), seeds[0])  # type: ignore[operator]
    for seed, expected in zip((0, 1, "all"), seeds, strict=True):
        model = load(molecules, seed=seed, predictions=True)  # type: ignore[arg-type]
        losses._copied.cache_clear()
        if seed == 1:
            exported: Tensor = torch.export.export(model, arguments).module()(*arguments)
            torch.testing.assert_close(exported, expected)
        assert torch.equal(model(*arguments), expected)  # nothing of the export is remembered
    with pytest.raises(ValueError, match="the model returns predictions, expected its outputs"):
        Inductive(model, NodeLabels(3))  # whose loss and score would be of them
    with pytest.raises(UserWarning, match=r"returns standardised targets, .*load\(run_dir, predictions=True\)"):
        torch.export.export(network, arguments)
    with pytest.raises(ValueError, match=r"shape \(4, 5\), expected \(N, 2\)"):
        model(torch.ones(4, 5), data.edge_index)


def test_each_graph_of_a_batch_is_transformed_on_its_own():
    preparation = Preparation(2, None, None, ({"_target_": "torch_geometric.transforms.VirtualNode"},))
    graphs = [molecule(4), molecule(5)]
    prepared = preparation(Batch.from_data_list(graphs))
    assert torch.equal(prepared.x, torch.cat([preparation(graph).x for graph in graphs]))
    assert prepared.num_graphs == 2 and prepared.ptr.tolist() == [0, 5, 11]
    with pytest.raises(ValueError, match=r"the run's transforms are of single graphs\. Pass a list of graphs"):
        preparation(Data(X5, E5, batch=torch.tensor([0, 0, 1, 1, 1])))


def test_a_file_without_a_preparation_or_an_objective_of_ours_loads_and_predicts_nothing(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_model(path, GCN(**ARGUMENTS), "torch_geometric.nn.GCN", ARGUMENTS, objective=NodeLabels(3).to_dict())
    model: Any = load(tmp_path)
    assert model.preparation is None and model.objective == NodeLabels(3)
    model(100 * bag().x, bag().edge_index)  # without a warning, which is an error in tests
    with pytest.raises(ValueError, match=r"saved without its data preparation\. Prepare the data yourself"):
        predict(tmp_path, bag())
    described = {"preparation": of(bag()).to_dict(), "objective": {"objective": "Theirs", "out_channels": 3}}
    save_model(path, GCN(**ARGUMENTS), "torch_geometric.nn.GCN", ARGUMENTS, **described)
    with pytest.raises(ValueError, match=r"saved without an objective of gat_pyg\. Prepare the data yourself"):
        predict(tmp_path, bag())


@pytest.mark.parametrize(
    "described",
    [
        {"preparation": 3},
        {"preparation": {"in_channels": 12}},
        {"objective": 3},
        {"objective": {"objective": "NodeLabels"}},
        {"objective": {**NodeLabels(3).to_dict(), "metric": "unheard"}},
    ],
    ids=str,
)
def test_a_description_in_another_form_is_named(tmp_path: Path, described: Any):
    save_model(tmp_path / "model.safetensors", GCN(**ARGUMENTS), "torch_geometric.nn.GCN", ARGUMENTS, **described)
    with pytest.raises(ValueError, match=r"describes its data preparation or objective in another form: .*Use the"):
        load(tmp_path)
