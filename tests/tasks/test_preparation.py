"""A run's data preparation: what is stored, what is applied, and what the loaded model checks."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.transforms import AddSelfLoops, Compose, NormalizeFeatures

from gat_pyg import load, predict
from gat_pyg.data import Task, digits, from_dataset, planetoid, planted, ppi
from gat_pyg.experiments.model_file import save_model
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.preparation import NORMALIZE, Preparation, Standardize, attach, build_transform, row_range

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


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "torch_geometric.transforms.Data",
        "torch_geometric.transforms.functional_transform",
        "torch_geometric.transforms.os.system",
        "torch_geometric.data.Data",
        "gat_pyg.tasks.preparation.Preparation",
        "nowhere",
        None,
    ],
)
def test_no_other_class_is_built_by_its_name(target: str | None):
    with pytest.raises(ValueError, match=rf"prepared by {target}, expected a class of torch_geometric\.transforms"):
        build_transform({"_target_": target, "command": "true"})


def test_arguments_of_another_version_are_named():
    with pytest.raises(ValueError, match=r"NormalizeFeatures\(\*\*{'unheard': 1}\), which this version cannot build"):
        build_transform({**NORMALIZE, "unheard": 1})


def test_other_dimensions_are_named():
    preparation = Preparation(12, 2)
    data = bag()
    with pytest.raises(ValueError, match=r"edge_attr is missing, expected \(E, 2\)"):
        preparation(data)
    data.edge_attr = torch.ones(data.num_edges)
    with pytest.raises(ValueError, match=rf"edge_attr is of shape \({data.num_edges},\), expected \(E, 2\)"):
        preparation(data)
    data.edge_attr = torch.ones(data.num_edges, 2, dtype=torch.float64)
    assert preparation(data).edge_attr.dtype == torch.float32
    with pytest.raises(ValueError, match=r"x has shape \(40, 5\), expected \(N, 12\)"):
        preparation(Data(data.x[:, :5], data.edge_index, data.edge_attr))
    for wrong in (None, data.x, Data(edge_index=data.edge_index)):
        with pytest.raises(ValueError, match=r"expected a torch_geometric\.data\.Data with x \[N, 12\]"):
            preparation(wrong)


# What a task knows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [digits, planted, *(pytest.param(name, marks=real) for name in ("cora", "citeseer"))])
def test_no_part_of_a_runs_own_data_is_taken_for_another(make: Any):
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
    described = json.loads(json.dumps(preparation.to_dict()))
    assert Preparation.from_dict(described) == preparation


CLASSES = {  # the sizes of the classes in the literature; Citeseer's 15 papers without a label are of class 0 here
    "cora": {
        "Case Based": 298,
        "Genetic Algorithms": 418,
        "Neural Networks": 818,
        "Probabilistic Methods": 426,
        "Reinforcement Learning": 217,
        "Rule Learning": 180,
        "Theory": 351,
    },
    "citeseer": {"Agents": 596, "AI": 249 + 15, "DB": 701, "IR": 668, "ML": 590, "HCI": 508},
    "pubmed": {
        "Diabetes Mellitus, Experimental": 4103,
        "Diabetes Mellitus Type 1": 7739,
        "Diabetes Mellitus Type 2": 7875,
    },
}


@real
@pytest.mark.parametrize("name", CLASSES)
def test_the_classes_have_the_names_of_their_sizes(name: str):
    task = planetoid(name)
    assert task.class_names is not None
    assert dict(zip(task.class_names, task.train[0].y.bincount().tolist(), strict=True)) == CLASSES[name]


@real
def test_ppi_is_standardised_as_before_and_again():
    task = ppi()
    (transform,) = task.preparation.transforms
    assert torch.tensor([transform["mean"], transform["std"]]).shape == (2, 50)
    for data in task.test:
        torch.testing.assert_close(task.preparation(data).x, data.x)


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
    attach(model, of(data))
    attach(model, of(data))  # as a second `load` into the same model
    with pytest.warns(UserWarning, match=r"were not transformed after they were read") as caught:
        model(x=100 * data.x.to_sparse_csr().to_dense(), edge_index=data.edge_index)
    assert len(caught) == 1
    assert not model._forward_pre_hooks


def test_the_same_features_are_taken_without_a_word(model: nn.Module):
    data = bag()
    attach(model, of(data, NORMALIZE))
    model(NormalizeFeatures()(data).x, data.edge_index)


def test_another_width_is_refused_each_time(model: nn.Module):
    attach(model, of(bag()))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x has shape \(4, 5\), expected \(N, 12\) as in the data"):
            model(torch.ones(4, 5), torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_checks_by_itself(model: nn.Module, copied: Any):
    data = bag()
    attach(model, of(data, NORMALIZE))
    for one in (copied(model), model):
        with pytest.warns(UserWarning, match="prepared differently"):
            one(data.x, data.edge_index)
        one(data.x, data.edge_index)


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
    arguments = {"in_channels": 12, "hidden_channels": 4, "num_layers": 2, "out_channels": 3}
    for seed in range(2):
        torch.manual_seed(seed)
        about = {"preparation": of(bag(), NORMALIZE).to_dict(), "objective": NodeLabels(3).to_dict()}
        path = tmp_path / f"seed-{seed}" / "model.safetensors"
        save_model(path, GCN(**arguments), "torch_geometric.nn.GCN", arguments, **about)
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


def test_a_file_without_a_preparation_loads_and_predicts_nothing(tmp_path: Path):
    arguments = {"in_channels": 12, "hidden_channels": 4, "num_layers": 2, "out_channels": 3}
    save_model(tmp_path / "model.safetensors", GCN(**arguments), "torch_geometric.nn.GCN", arguments)
    model: Any = load(tmp_path)
    assert model.preparation is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(100 * bag().x, bag().edge_index)
    with pytest.raises(ValueError, match=r"saved without its data preparation\. Prepare the data yourself"):
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
    arguments = {"in_channels": 12, "hidden_channels": 4, "num_layers": 2, "out_channels": 3}
    save_model(tmp_path / "model.safetensors", GCN(**arguments), "torch_geometric.nn.GCN", arguments, **described)
    with pytest.raises(ValueError, match=r"describes its data preparation or objective in another form: .*Use the"):
        load(tmp_path)
