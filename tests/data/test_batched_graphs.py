"""Many graphs in the arrays of one file, link splits from files, graphs without features: laws and errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected

import gat_pyg.data.collate
from gat_pyg.data import Collate, Task, digits, from_dataset, from_file, links
from gat_pyg.data.arrays.detection import objective_class
from gat_pyg.models import GAT
from gat_pyg.models.encoders import Encoded, Encoder, num_categories, num_unknown
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.task import warn_of_unknown_categories
from gat_pyg.sweeps.messages import sizes
from gat_pyg.tasks.graphs import GraphLabels
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.trained.predict import predict

SPLITS = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)
SPLIT = np.array([0, 0, 0, 1, 1, 2, 2, 0])  # of eight graphs


def graphs(item: str) -> list[Data]:
    """Eight graphs of 3 to 10 nodes and 2 N edges, one without edges, with one of three classes for each item."""
    draw, result = torch.Generator().manual_seed(0), []
    for number, N in enumerate(range(3, 11)):
        edge_index = torch.randint(N, (2, 2 * N if number != 4 else 0), generator=draw)
        data = Data(torch.randn(N, 4, generator=draw), edge_index, torch.rand(edge_index.size(1), 2, generator=draw))
        size = {"graph": 1, "node": N, "edge": edge_index.size(1)}[item]
        data["edge_label" if item == "edge" else "y"] = torch.randint(3, (size,), generator=draw)
        result.append(data)
    return result


class Other(Data):
    """Graphs with a rule of their own."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 100 if key == "edge_index" else super().__inc__(key, value, *args, **kwargs)


CUT = {
    "labels": {},
    "numbers": {"y": lambda number, data: float(number)},
    "scalars": {"y": lambda number, data: torch.tensor(number), "root_index": lambda number, data: torch.tensor(0)},
    "nodes": {"pos": lambda number, data: data.x[:, :2], "face": lambda number, data: data.edge_index[:, :1].int()},
    "unread": {"smiles": lambda number, data: "C" * number},
}
WHOLE = {
    "words": {"name": lambda number, data: str(number)},
    "lengths": {"num_nodes": lambda number, data: data.num_nodes},
    "parts": {"part_batch": lambda number, data: torch.tensor([0, 1])},
    "sparse": {"weight": lambda number, data: data.x.to_sparse()},
    "missing": {"pos": lambda number, data: data.x, "x": lambda number, data: None},
    "dtypes": {"y": lambda number, data: number / 2 if number % 2 else number},
    "widths": {"apart": lambda number, data: torch.ones(2, 1 + (number > 7))},
    "gradients": {"x": lambda number, data: data.x.requires_grad_()},
}


@pytest.mark.parametrize("name", [*CUT, *WHOLE, "class", "memory"])
def test_collated_graphs_are_pygs_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, repeated, one alone; the cases of `WHOLE` are collated graph by graph. The ninth is in no batch."""
    kind = Other if name == "class" else Data
    made = [kind(**data.to_dict()) for data in [*graphs("graph"), graphs("graph")[0]]]
    for number, data in enumerate(made):
        for key, value in (CUT | WHOLE).get(name, {}).items():
            data[key] = value(number, data)
    if name == "memory":
        monkeypatch.setattr(gat_pyg.data.collate, "MOST", 100)
    collate = Collate(made, ["smiles"])
    for indices in ([3, 0, 3, 7], [4], [1, 4, 2], range(8)):
        expected, batch = Batch.from_data_list([made[i] for i in indices], exclude_keys=["smiles"]), collate(indices)
        assert (type(batch), batch.num_graphs) == (type(expected), expected.num_graphs)
        last = len(indices) - 1
        for one, other in ((batch, expected), (batch[last], expected[last])):  # cut apart again
            assert one.keys() == other.keys()
            for key, value in other:
                if isinstance(value, Tensor):
                    assert_close(one[key], value, rtol=0, atol=0)
                else:
                    assert one[key] == value
    assert (collate._union is None) == (name not in CUT)


def arrays(item: str, layout: str = "batch", **others: Any) -> dict[str, np.ndarray]:
    """The union of the graphs, by PyG's own Batch, with the edges in a random order."""
    union = Batch.from_data_list(graphs(item))
    order = torch.randperm(union.num_edges, generator=torch.Generator().manual_seed(1))
    keys = ["x", "edge_index", "edge_attr", layout, "edge_label" if item == "edge" else "y"]
    values = {key: union[key] for key in keys}
    for key in {"edge_index", "edge_attr", "edge_label"} & values.keys():
        values[key] = values[key].index_select(-1 if key == "edge_index" else 0, order)
    return {key: value.numpy() for key, value in values.items()} | others


def stored(path: Path, values: dict[str, Any], form: str) -> Path:
    if form == "npz":
        np.savez(path.with_suffix(".npz"), **values)
    elif form == "pt":
        torch.save({key: torch.as_tensor(value) for key, value in values.items()}, path.with_suffix(".pt"))
    else:
        path.mkdir()
        for key, value in values.items():
            np.save(path / f"{key}.npy", value)
    return path if form == "folder" else path.with_suffix(f".{form}")


def edges_of(data: Data) -> list[tuple[Any, ...]]:
    """The edges with their features and labels, in an order of their own."""
    rows = [*data.edge_index.tolist(), *data.edge_attr.t().tolist()]
    return sorted(zip(*rows, *([data.y.tolist()] if "edge_label_index" in data else []), strict=True))


def same(task: Task, other: Task) -> None:
    assert task.objective == other.objective and task.edge_dim == other.edge_dim
    for split in SPLITS:
        assert len(task.graphs(split)) == len(other.graphs(split))
        for data, expected in zip(task.graphs(split), other.graphs(split), strict=True):
            assert torch.equal(data.x, expected.x) and edges_of(data) == edges_of(expected)
            assert "edge_label_index" in data or torch.equal(data.y, expected.y)


@pytest.mark.parametrize("form", ["npz", "pt", "folder"])
@pytest.mark.parametrize("item", ["graph", "node", "edge"])
def test_a_union_in_a_file_is_the_list_of_its_graphs(item: str, form: str, tmp_path: Path):
    expected = from_dataset(graphs(item), "own", val=2, test=2)
    union = Batch.from_data_list(graphs(item))
    for data in (union, Data.from_dict({key: union[key] for key in union.keys() if key != "ptr"})):  # noqa: SIM118
        same(from_dataset(data, "own", val=2, test=2), expected)
    for layout in ("batch", "ptr"):
        path = stored(tmp_path / layout, arrays(item, layout), form)
        task = from_file(path, val=2, test=2)
        assert task.objective.item == item
        same(task, expected)


@pytest.mark.parametrize("item", ["graph", "node", "edge"])
def test_masks_of_a_union_are_of_graphs(item: str, tmp_path: Path):
    lists = [[data for data, part in zip(graphs(item), SPLIT, strict=True) if part == i] for i in range(3)]
    masks = {key: part == SPLIT for part, key in enumerate(MASKS)}
    path = stored(tmp_path / "own", arrays(item, **masks), "npz")
    same(from_file(path), from_dataset(lists, "own"))
    columns = {key: np.stack([np.roll(mask, 1), mask], 1) for key, mask in masks.items()}
    path = stored(tmp_path / "own", arrays(item, **columns), "npz")
    task = from_file(path, split=1)
    same(task, from_dataset(lists, "own"))
    assert task.num_splits == 2


def test_labels_of_edges_without_their_key_and_other_pairs(tmp_path: Path):
    values = arrays("edge")
    expected = from_file(stored(tmp_path / "own", values, "npz"), val=2, test=2)
    values["y"] = values.pop("edge_label")
    same(from_file(stored(tmp_path / "y", values, "npz"), val=2, test=2), expected)
    del values["y"]
    pairs = np.array([[9, 0, 0, 3, 7, 12], [7, 1, 2, 3, 7, 16]])  # of the graphs 2, 0, 0, 1, 2 and 3
    values |= {"edge_label_index": pairs, "edge_label": np.array([0, 1, 0, 1, 0, 1])}
    masks = {key: np.isin(np.arange(8), part) for key, part in zip(MASKS, ([0, 3], [1], [2, 4, 5, 6, 7]), strict=True)}
    task = from_file(stored(tmp_path / "pairs", values | masks, "npz"))
    first, second = task.train
    assert first.edge_label_index.tolist() == [[0, 0], [1, 2]] and first.y.tolist() == [1, 0]
    assert second.edge_label_index.tolist() == [[0], [4]] and second.y.tolist() == [1]  # nodes 12 to 17
    assert task.test[0].edge_label_index.tolist() == [[2, 0], [0, 0]] and not task.test[1].y.numel()


def test_the_task_decides_where_the_length_does_not(tmp_path: Path):
    ring = np.stack([np.arange(12), np.arange(12).reshape(3, 4)[:, [1, 2, 3, 0]].ravel()])
    values = {"x": np.eye(12), "edge_index": ring, "batch": np.arange(12) // 4, "y": np.arange(12) % 2}
    path = stored(tmp_path / "own", values, "npz")
    assert from_file(path, val=1, test=1).objective.item == "node"
    assert from_file(path, val=1, test=1, task="edge_classification").objective.item == "edge"
    with pytest.raises(ValueError, match=r"own.npz: y has shape \(12,\), expected a row for each of the 3 graphs"):
        from_file(path, val=1, test=1, task="graph_classification")


# Links from files -----------------------------------------------------------------------------------------------------


@cache
def drawn() -> Task:
    """Links of a graph of 80 nodes."""
    draw = torch.Generator().manual_seed(0)
    index = to_undirected(torch.randint(80, (2, 300), generator=draw))
    return links(Data(torch.randn(80, 5, generator=draw), index), "own", seed=1)


def linked() -> dict[str, Any]:
    """The drawn links, as a user would save them."""
    data = drawn().train[0]
    values = {key: data[key] for key in ("x", "edge_index", "edge_label_index", *MASKS)}
    return {key: value.numpy() for key, value in values.items()} | {"edge_label": data.y.numpy()}


def test_a_link_split_in_a_file_is_the_task_of_its_links(tmp_path: Path):
    expected = drawn()
    for kind in (np.int64, np.float32, bool):
        values = linked()
        values["edge_label"] = values["edge_label"].astype(kind)
        task = from_file(stored(tmp_path / "own", values, "npz"), task="link_prediction")
        assert task.objective == LinkLabels(16) == expected.objective
        for key in ("x", "edge_index", "edge_label_index", "y", *MASKS):
            assert torch.equal(task.train[0][key], expected.train[0][key])
    assert task.shared_graph is task.train[0]


def test_links_are_drawn_where_there_are_no_labels(tmp_path: Path):
    draw = torch.Generator().manual_seed(1)
    index = to_undirected(torch.randint(80, (2, 300), generator=draw))
    x, weights = torch.randn(80, 5, generator=draw), torch.ones(index.size(1), 1)
    values = {"x": x.numpy(), "edge_index": index.numpy(), "edge_attr": weights.int().numpy()}
    path = stored(tmp_path / "own", values, "npz")
    with pytest.raises(ValueError, match=r"own.npz has no y; .* choose task=link_prediction, which needs no labels"):
        from_file(path)
    for numbers in ({"disjoint": 0.3}, {"val": 30, "test": 40}):
        task = from_file(path, seed=3, task="link_prediction", **numbers)
        expected = links(Data(x, index, weights), seed=3, **numbers)
        for key in ("x", "edge_index", "edge_attr", "edge_label_index", "y", *MASKS):
            assert torch.equal(task.train[0][key], expected.train[0][key])
    with pytest.raises(ValueError, match=r"own.npz has \d+ edges, too few to sample val=9000 and test=0.1 of its"):
        from_file(path, val=9000, task="link_prediction")
    with pytest.raises(ValueError, match=r"disjoint=0.3 is a share of links. Leave it out, or choose task=link_predic"):
        from_dataset(digits().train[0], disjoint=0.3)
    with pytest.raises(ValueError, match=r"disjoint=0.3, but the pairs are given by edge_label_index. Leave it out"):
        from_dataset(expected.train[0], disjoint=0.3, task="link_prediction")


def test_links_of_a_file_without_features_are_predicted_by_ids(tmp_path: Path):
    graph = KarateClub()[0]
    np.savez(tmp_path / "own.npz", edge_index=graph.edge_index.numpy())
    task = from_file(tmp_path / "own.npz", task="link_prediction")
    assert sizes(task) == "34 nodes, 136 edges, links; 68 / 3 / 7 links (3 / 7 pairs without one)"
    gat = {"in_channels": 8, "hidden_channels": [4], "out_channels": 16, "heads": [2, 1], "backend": "segment"}
    about = {"channels": 8, "categories": [34]}
    described = {"preparation": task.preparation.to_dict(), "objective": task.objective.to_dict()}
    inner = {"model": {"_target_": "gat_pyg.models.GAT", **gat}}
    name = "gat_pyg.models.encoders.Encoded"
    save_model(tmp_path / "model.safetensors", Encoded(GAT(**gat), **about), name, inner | about, **described)
    pairs = torch.tensor([[0, 1], [5, 9]])
    data = Data(edge_index=graph.edge_index, edge_label_index=pairs)  # without x: the ids are filled in
    with_ids = data.clone().update({"x": torch.arange(34.0)[:, None]})
    assert torch.equal(predict(tmp_path, data), predict(tmp_path, with_ids))
    assert data.x is None
    with pytest.raises(ValueError, match="data has 36 nodes, but the run learnt embeddings of 34 nodes"):
        predict(tmp_path, Data(edge_index=graph.edge_index, edge_label_index=pairs, num_nodes=36))
    with pytest.raises(ValueError, match="expected a torch_geometric.data.Data with x"):
        digits().preparation(data)
    one = from_dataset([digits().train[0]], "digits", seed=2, task="link_prediction").train[0]
    assert torch.equal(one.edge_label_index, links(digits(), seed=2).train[0].edge_label_index)


# Hints ----------------------------------------------------------------------------------------------------------------


def ring(y: Tensor) -> Data:
    return Data(torch.eye(12), torch.stack([torch.arange(12), torch.arange(12).roll(1)]), y=y)


def test_labels_are_of_graphs_also_where_one_has_a_single_node():
    graphs = [Data(x=torch.ones(N, 1), edge_index=torch.zeros(2, 0).long(), y=torch.tensor([N % 2])) for N in (1, 2, 3)]
    assert objective_class(graphs, None) is GraphLabels


def test_one_hot_labels_are_many_labels_with_a_hint():
    y = torch.eye(3)[torch.arange(12) % 3]
    with pytest.warns(UserWarning, match=r"own: exactly one of the 3 labels in each row of y is 1.*give y.argmax\(1\)"):
        task = from_dataset(ring(y), "own", per_class=1, val=2, test=2)
    assert task.objective.columns == "labels"


def test_categories_that_training_lacks_are_warned_of_once_for_each_split():
    draw = torch.Generator().manual_seed(0)
    parts = []
    for most in (3, 3, 5):
        x = torch.cat([torch.arange(12)[:, None] % most, torch.rand(12, 1, generator=draw)], 1)
        data = ring(torch.arange(12) % 2).update({"x": x, "edge_attr": torch.arange(12)[:, None] % (most - 1)})
        parts.append([data, data])
    task = from_dataset(parts, "own")
    with pytest.warns(UserWarning, match="not a category of the training rows") as warned:
        warn_of_unknown_categories(task)
    (warning,) = [str(each.message) for each in warned]
    assert warning.startswith("own, test: column 0 of x has 8, column 0 of edge_attr has 12 values that are not a")
    categories = num_categories(data.x for data in task.train)
    (count,) = num_unknown([task.test[0].x], categories).values()
    encoder = Encoder(categories, 4)
    torch.nn.init.zeros_(encoder.lin.weight), torch.nn.init.zeros_(encoder.lin.bias)
    assert int((encoder(task.test[0].x) == 0).all(1).sum()) == count == 4
