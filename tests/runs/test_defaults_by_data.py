"""Settings that suit one's own data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gat_pyg.runs import defaults_by_data as module
from gat_pyg.runs import task as task_file
from gat_pyg.runs.defaults_by_data import suited
from gat_pyg.runs.network import build_model
from gat_pyg.runs.task import read_task
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.overrides import translated
from gat_pyg.settings.settings import Settings
from tests.runs.test_named_data import platonov_file

KARATE = "dataset._target_=torch_geometric.datasets.KarateClub"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    N, edges = 200, draw.integers(200, size=(2, 600))
    y, x = np.arange(N) % 3, draw.normal(size=(N, 4)) * [1, 1000, 1, 1]
    np.savez("nodes.npz", x=x, edge_index=edges, y=y)
    np.savez("words.npz", x=draw.random((N, 120)) < 0.05, edge_index=edges, y=y)
    np.savez("rare.npz", x=x, edge_index=edges, y=np.arange(N) % 20 == 1, edge_attr=draw.integers(3, size=(600, 2)))
    for name, share in (("few", 0.25), ("some", 0.35)):
        np.savez(f"{name}.npz", x=x, edge_index=edges, y=(draw.random((N, 3)) < share).astype(float))
    np.savez("gaps.npz", x=x, edge_index=edges, y=draw.choice([0, 1, np.nan], (N, 3), p=[0.4, 0.4, 0.2]))
    np.savez("quarter.npz", x=x, edge_index=edges, y=np.arange(N) % 4 > 0)
    np.savez("never.npz", x=x, edge_index=edges, y=np.arange(N) == 7, train_mask=np.arange(N) < 150)
    np.savez("links.npz", edge_index=np.concatenate([edges, edges[::-1]], 1))
    pair = torch.tensor([[0, 1], [1, 0]])
    torch.save([Data(torch.randint(5, (2, 3)), pair, y=torch.rand(1)) for _ in range(40)], "graphs.pt")
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        yield


def of(*overrides: str) -> Settings:
    arguments = translated([*overrides])
    return suited(Settings.parse(compose("config", arguments)), arguments)


def file(name: str, *overrides: str) -> Settings:
    return of("dataset=file", f"dataset.path={name}", *overrides)


def test_settings_suit_the_task_its_size_and_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, words, graphs = file("nodes.npz"), file("words.npz"), file("graphs.pt")
    pairs = file("links.npz", "task=link_prediction")
    assert [each.model.get("encoder") for each in (nodes, words, graphs, pairs)] == [64, None, 64, 64]
    assert [each.training.batch_size for each in (nodes, graphs)] == [1, 32]
    assert graphs.model.get("readout") == ["mean", "sum", "max", "count"] and "readout" not in nodes.model.values
    every = (nodes, words, graphs, pairs)
    assert [each.model.get("norm") for each in every] == ["layer", "layer", None, "batch"]
    assert [each.model.get("pre_linear") for each in every] == [True, True, None, None]
    assert nodes.model.get("norm_kwargs") == {"mode": "node"}
    assert [each.training.max_epochs for each in (nodes, graphs)] == [500, 200]
    assert [each.training.criterion for each in (nodes, graphs)] == ["strict", "loss"]
    monkeypatch.setattr(module, "LARGE", 10)
    assert (file("graphs.pt").training.max_epochs, file("graphs.pt").training.patience) == (50, 10)
    assert file("nodes.npz", "model.norm=batch").model.get("norm_kwargs") is None
    assert "training.lr=0.003" in nodes.suited and nodes.max_epochs == nodes.training.max_epochs
    assert file("nodes.npz", "scheduler=cosine").max_epochs == 500  # where the cosine ends
    assert file("rare.npz").metric == "average_precision"
    ranked = {name: file(f"{name}.npz").metric for name in ("quarter", "few", "some", "gaps")}
    assert ranked == {"quarter": "roc_auc", "few": "roc_auc", "some": None, "gaps": "roc_auc"}
    assert file("never.npz").metric is None  # which no score but accuracy is defined for
    assert file("nodes.npz", "loader=neighbor", "loader.num_neighbors=[5,5]").model.get("num_layers") == 2
    encoder = build_model(nodes.model, read_task(nodes)).model.encoder
    torch.testing.assert_close(encoder._std[1] / encoder._std[0], torch.tensor(1000.0), rtol=0.2, atol=0)
    rare = file("rare.npz")
    model = build_model(rare.model, read_task(rare)).model  # two columns of three categories
    assert model.edge_encoder.out_channels == model.model.convs[0].edge_dim == 6
    assert not [*model.edge_encoder.parameters()]


def test_what_the_user_or_a_recipe_chose_stays() -> None:
    chosen = file("nodes.npz", "training.lr=0.005", "model.heads=8", "model.encoder=null", "metric=macro_f1")
    assert (chosen.training.lr, chosen.model.get("heads"), chosen.metric) == (0.005, 8, "macro_f1")
    assert chosen.model.get("encoder") is None and chosen.model.get("num_layers") == 3
    paper = file("nodes.npz", "model.heads=[4,1]")
    assert "num_layers" not in paper.model.values and paper.model.get("hidden_channels") == [8]
    for overrides in (("dataset=cora",), ("dataset=file", "dataset.path=nodes.npz", "recipe/on=papers-gat-pubmed")):
        settings = of(*overrides)
        assert not settings.suited and "norm" not in settings.model.values
    rule = file("nodes.npz", "recipe=strong/node", "training.lr=0.005")
    assert rule.suited == ("model.encoder=64",) and rule.model.get("act") == "relu"
    assert file("graphs.pt", "search=graph", "encoding=none").suited == ("training.batch_size=32", "model.encoder=64")
    for name, *task in (("nodes.npz",), ("graphs.pt",), ("links.npz", "task=link_prediction")):
        for layers in (1, 2):  # a network of any depth
            shallow = file(name, f"model.num_layers={layers}", *task)
            network = build_model(shallow.model, read_task(shallow)).model
            assert sum(isinstance(each, MessagePassing) for each in network.modules()) == layers
    gcn, gat = file("nodes.npz", "model=gcn"), file("nodes.npz")
    assert gcn.training == gat.training and gcn.model.get("hidden_channels") == 64  # not those of its paper


def test_a_data_set_by_name_without_settings_gets_those_that_suit_it() -> None:
    platonov_file(Path("HeterophilousGraphDataset/tolokers/raw/tolokers.npz"))
    here = ("dataset=tolokers", "data_root=.")
    tolokers, gcn = of(*here), of(*here, "recipe=auto", "model=gcn")
    assert (tolokers.model.get("num_layers"), tolokers.model.get("encoder"), tolokers.metric) == (3, 64, "roc_auc")
    assert gcn.training == tolokers.training and gcn.model.get("hidden_channels") == 64
    for recipe in ("papers", "none"):
        assert not of(*here, f"recipe={recipe}").suited


def test_the_data_are_read_once_and_a_run_keeps_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.runs.defaults_by_data.FACTS", {})
    reads: list[Settings] = []
    read_data = task_file.read_data
    monkeypatch.setattr("gat_pyg.runs.defaults_by_data.read_data", lambda *a: (reads.append(a[0]), read_data(*a))[1])
    monkeypatch.setattr(task_file, "read_data", lambda *a: (reads.append(a[0]), read_data(*a))[1])
    one, other = file("rare.npz"), file("rare.npz", "model=gcn")
    assert read_task(one) is read_task(other) and len(reads) == 1
    assert one.updated({}) == one and one.updated({}).hash == one.hash  # as config.yaml has it


def test_planetoids_split_becomes_shares_where_it_does_not_fit() -> None:
    karate = of(KARATE)
    assert (karate.split.per_class, karate.split.val, karate.split.test) == (None, None, None)
    task = read_task(karate)
    assert [len(task.labels(split)) for split in ("train", "val", "test")] == [4, 15, 15]  # it has training nodes
    assert of(KARATE, "split.val=5", "split.test=9").split.val == 5


def test_edges_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gat_pyg.runs.defaults_by_data.FACTS", {})
    note = "messages follow the edges, not all of which have a reverse one; or dataset.undirected=true"
    assert any(note in text for text in read_task(file("nodes.npz")).notes)
    task = read_task(file("nodes.npz", "dataset.undirected=true"))
    assert not any(note in text for text in task.notes)
    edges = {*map(tuple, task.train[0].edge_index.T.tolist())}
    assert edges == {(dst, src) for src, dst in edges}
    raw = Data(torch.zeros(3, 4), torch.tensor([[0, 1], [1, 2]]))
    assert task.preparation(raw).edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    with pytest.raises(ValueError, match="undirected=True is for labels of nodes and graphs, not of links"):
        file("links.npz", "task=link_prediction", "dataset.undirected=true")
