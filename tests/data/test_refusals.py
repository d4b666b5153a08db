"""What is no task is refused by its reason, in memory and from a file alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from gat_pyg.data import Task, from_dataset, from_file
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import MASKS
from tests.data.test_batched_graphs import SPLIT, arrays, linked
from tests.data.test_pyg_files import graphs, hetero, masked
from tests.data.test_series import STEPS, series
from tests.data.test_splits import masks, nodes, ring


def with_value(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[5] = value
    return tensor


def one(**changes: Any) -> Data:
    return ring(**{**masks(), **changes})


def many(number: int = 5, **changes: Any) -> list[Data]:
    """Twelve graphs, of which one is changed."""
    every = graphs()
    every[number].update(changes)
    return every


def split(number: int, **changes: Any) -> list[Data]:
    """Twelve graphs with masks, of which one is changed."""
    every = masked(lambda mask: mask[None])
    every[number].update(changes)
    return every


def data_of(values: dict[str, Any]) -> Data:
    return Data.from_dict({key: torch.as_tensor(value) for key, value in values.items() if value is not None})


def union(**changes: Any) -> Data:
    return data_of({**arrays("graph"), **changes})


def pairs(leaks: int = 0, **changes: Any) -> Data:
    """Links for training, validation and test, some of which also pass messages."""
    values = linked()
    of_val = values["edge_label_index"][:, values["val_mask"] & (values["edge_label"] == 1)][:, :leaks]
    return data_of(values | {"edge_index": np.concatenate([values["edge_index"], of_val], 1)} | changes)


def steps(**changes: Any) -> Data:
    return data_of(series(y=STEPS / 3) | changes)


EDGES, X, Y = ring().edge_index, ring().x, ring().y
BATCH = np.repeat(np.arange(8), np.arange(3, 11))
ATTRIBUTED, UNKNOWN = ring(edge_attr=torch.ones(12, 1)), ring(y=torch.full((12,), -1))
Case = tuple[Callable[[], Any], dict[str, Any]] | Callable[[], Any]

CASES: dict[str, Case] = {
    # a graph
    r"edge_index has shape \(7, 2\), expected \(2, E\). Did you mean edge_": lambda: one(edge_index=EDGES[:, :7].t()),
    r"edge_index has shape \(12,\), expected \(2, E\)\.$": lambda: one(edge_index=EDGES[0]),
    "edge_index is torch.float32, expected int64. Did you mean .*long": lambda: one(edge_index=EDGES.float()),
    "edge_index holds -1, expected nodes from 0 to 11": lambda: one(edge_index=with_value(EDGES, -1)),
    r"edge_index holds 12, but x has 12 rows \(nodes 0 to 11\)": lambda: one(edge_index=with_value(EDGES, 12)),
    "edge_index is missing. Give the edges|has no edge_index; its keys are": lambda: one(edge_index=None),
    "y is missing. Give every node a label|has no y; its keys are": lambda: one(y=None),
    r"x is NaN or infinite at node 0 as .*, in column 5\. Replace": lambda: one(x=with_value(X, torch.nan)),
    "x is NaN or infinite at node 0 as torch.float32": lambda: one(x=torch.full((12, 2), 1e300, dtype=torch.float64)),
    r"x has shape \(12,\), expected \(N, F\), a row for each node\. .*x\[:, None\]": lambda: one(x=X[0]),
    r"x is torch.sparse_coo, expected a dense tensor. Use x.to_dense\(\)": lambda: one(x=X.to_sparse()),
    "x is .*complex": lambda: one(x=X + 1j),
    r"edge_attr has shape \(11, 2\), expected \(12, 2\)": lambda: one(edge_attr=torch.ones(11, 2)),
    r"edge_attr has shape \(11, 1\), expected \(12, 1\)": lambda: one(edge_attr=torch.ones(11)),
    r"edge_attr has shape \(\), expected \(12, 1\)": lambda: one(edge_attr=torch.tensor(1.0)),
    "edge_attr is not of finite floats": lambda: one(edge_attr=torch.full((12, 1), torch.nan)),
    "x is missing, and edge_index or num_nodes shows 1000000000000 nodes, .* Number the nodes from 0": lambda: data_of(
        {"edge_index": [[7, 10**12]] * 2, "y": 0.0, "num_nodes": 10**12}
    ),
    # its labels
    r"y is torch.int64 of shape \(11,\), ex": lambda: ring(y=Y[:11], **{k: mask[:11] for k, mask in masks().items()}),
    "y holds the label -7, expected 0 to 2, or -1 where it is unknown": lambda: one(y=with_value(Y, -7)),
    "y holds the label 1000000000, but there are 12 nodes": lambda: one(y=with_value(Y, 10**9)),
    r"y has shape \(\), expected \(N,\), or \(N, K\)": lambda: one(y=torch.tensor(1)),
    "no node has a known label, so there is nothing to learn": lambda: one(y=torch.full((12, 3), torch.nan)),
    "y holds other values than 0, 1 and NaN": lambda: one(y=torch.full((12, 4), 2)),
    r"y holds inf\.\.\., expected whole numbers": lambda: one(y=with_value(Y.double(), torch.inf)),
    "y is infinite as float32": lambda: one(y=with_value(Y.double(), -1e300)),
    "y is .*complex": lambda: one(y=Y + 1j),
    # its split
    "train_mask and val_mask overlap in 1 nodes": lambda: one(val_mask=nodes(12, 2, 3)),
    "train_mask and test_mask overlap in 2 nodes": lambda: one(test_mask=nodes(12, 0, 1, 9)),
    "val_mask is empty, expected at least one node": lambda: one(val_mask=nodes(12)),
    r"val_mask is torch.bool of shape \(11,\), expected a bool, 0 or 1": lambda: one(val_mask=nodes(11, 3)),
    "val_mask is torch.int64 .*Are these node numbers": lambda: one(val_mask=torch.arange(12)),
    r"per_class=20 .* in class 0 \(\d\), 1 \(\d\), 2 \(\d\). Choose a smaller per_class \(split\.per_class": (
        *(lambda: one(train_mask=None), {"per_class": 20}),
    ),
    r"test_mask needs 1000 nodes, but only 7 labelled ones are left. Choose smaller test \(split\.\* in": (
        *(lambda: one(test_mask=None), {"test": 1000}),
    ),
    # several graphs
    r", train graph 1: x has shape \(12, 5\), expected": lambda: ([ring(), ring(x=X[:, :5])], [ring()], [ring()]),
    ", val graph 0: some graphs have edge_attr and others have none": lambda: ([ATTRIBUTED], [ring()], [ATTRIBUTED]),
    ": all labels of the test graphs are unknown": lambda: ([ring()], [ring()], [UNKNOWN]),
    ": there is no graph in val": lambda: ([ring()], [], []),
    r", graph 5: x has shape \(4, 2\), expected \(N, 1\)": lambda: many(x=torch.ones(4, 2)),
    ", graph 5: y is complex": lambda: many(y=torch.tensor([0.5j])),
    ", graph 5: some graphs have edge_attr": lambda: many(edge_attr=torch.ones(4, 1)),
    r"graph 0: y has shape \(2,\), but there are 3 nodes and 3 edges. For 2 labels of each graph give y\[None\]": (
        lambda: [data.update({"y": torch.rand(2)}) for data in graphs()]
    ),
    "graph 3 has no edge_label_attr, but others have": lambda: [
        *graphs(3, edge_label_attr=torch.rand(3, 1), edge_label=torch.zeros(3), y=None),
        *graphs(1, edge_label=torch.zeros(3), y=None),
    ],
    "val=500 and test=1000 must .* the number of graphs, which is 12": (graphs, {"val": 500, "test": 1000}),
    r"folds=2 and fold=0 \(split.\* in the command\), expected from 3 folds": (graphs, {"folds": 2}),
    "folds=5 and fold=5 .* a fold from 0 to one less": (graphs, {"folds": 5, "fold": 5}),
    "expected from 3 folds to as many as the 12 graphs": (graphs, {"folds": 13}),
    "folds=5.* and one label per graph": (lambda: [many(y=torch.tensor([[0.0, 1.0]]))[5]] * 6, {"folds": 5}),
    "y holds the label 77, but there are 12 graphs": (lambda: many(y=torch.tensor([77])), {"folds": 5}),
    # masks of graphs
    "graph 3: val_mask is missing, expected all three masks of the graphs, or": lambda: split(3, val_mask=None),
    ": val_mask is missing, expected all three masks": lambda: graphs(train_mask=torch.tensor([True])),
    r"graph 4: val_mask has shape \(3,\), expected \(1,\): of several": lambda: split(4, val_mask=torch.ones(3).bool()),
    "val_mask and test_mask overlap in 1 graphs": lambda: split(3, val_mask=torch.tensor([True])),
    "val_mask has 1 axes in graph 0 and 2 in graph 3, expected": lambda: split(3, val_mask=torch.zeros(1, 2).bool()),
    "val_mask is torch.int64 of shape .12,., expected a bool, 0 or 1": lambda: split(3, val_mask=torch.tensor([3])),
    "different numbers of columns: 3 in train_mask, 2 in val_mask": lambda: [
        data.update({"val_mask": data.val_mask[:, :2]}) for data in masked(lambda mask: mask.repeat(1, 3))
    ],
    # a union of graphs
    "batch is 0 at node 3 after 1, expected the numbers of the graphs 0, 1, ... in order": lambda: union(
        batch=np.r_[0, 0, 1, 0, BATCH[4:]]
    ),
    "batch is 2 at node 3 after 0, .* without gaps": lambda: union(batch=np.where(BATCH > 0, BATCH + 1, 0)),
    "batch has 7 numbers, but x has 52 rows": lambda: union(batch=BATCH[:7]),
    r"batch is torch.float64 of shape \(52,\), expected whole numbers": lambda: union(batch=BATCH + 0.5),
    r"ptr is torch.int64 of shape \(2, 2\), expected whole numbers": lambda: union(ptr=np.eye(2, dtype=int)),
    "ptr is not a division of the 52 nodes, expected 0, the first node of each further graph": lambda: union(
        ptr=[0, 9, 9, 52]
    ),
    "batch and ptr differ. Leave one of them out": lambda: union(ptr=[0, 9, 52]),
    r"pair 1, \(1, 20\), links graph 0 and graph 4, expected both ends": lambda: union(edge_index=[[0, 1], [1, 20]]),
    "edge_index holds 52, but x has 52 rows": lambda: union(edge_index=[[0, 1], [1, 52]]),
    r"y has shape \(7,\), expected a row for each of the 52 nodes or 8 graphs or 90 edges": lambda: union(
        y=np.arange(7) % 2
    ),
    r"edge_attr has shape \(7, 1\), expected a row for each of the 90 edges": lambda: union(edge_attr=np.ones((7, 1))),
    r"edge_label has shape \(7,\), expected a row for each of the 90 pairs": lambda: union(edge_label=np.arange(7) % 2),
    r"edge_label_index: pair 0, \(0, 50\), links graph 0 and graph 7": lambda: union(
        edge_label_index=[[0], [50]], edge_label=[1]
    ),
    "x is missing. Give the nodes features": lambda: union(x=None),
    r"train_mask has shape \(52,\), expected a row for each of the 8 graphs": lambda: union(
        **dict.fromkeys(MASKS, BATCH == 0)
    ),
    "there is no graph in test": lambda: union(train_mask=SPLIT < 1, val_mask=SPLIT > 0, test_mask=SPLIT > 5),
    "task=link_prediction needs a single graph, but there are 8": (union, {"task": "link_prediction"}),
    # a split of links
    "links of val_mask are message-passing edges": (lambda: pairs(leaks=1), {"task": "link_prediction"}),
    "edge_label is missing, expected edge_label, train_mask, val_mask and test_mask": (
        *(lambda: pairs(edge_label=None), {"task": "link_prediction"}),
    ),
    "test_mask is missing, expected edge_label, train_mask": (
        *(lambda: pairs(test_mask=None), {"task": "link_prediction"}),
    ),
    r"y is torch.int64 of shape|y holds": (
        *(lambda: pairs(edge_label=2 * linked()["edge_label"]), {"task": "link_prediction"}),
    ),
    # a series
    r": y has shape \(4,\), expected \(T, N\) = \(11, 4\), .* give x as \(N, T \* F\)": lambda: steps(y=np.zeros(4)),
    r"train_mask has shape \(4,\), expected \(T,\) = \(11,\): a step as a whole": lambda: steps(train_mask=np.ones(4)),
    r"train_mask has shape \(11, 4\), .* make their y NaN": lambda: steps(train_mask=np.ones((11, 4))),
    r"edge_attr has shape \(3, 7, 1\), expected a row for each of the 11 step": lambda: steps(
        edge_attr=np.ones((3, 7, 1))
    ),
    # other things
    r"holds a HeteroData, expected .*\. Use its to_homogeneous\(\)": hetero,
    r"graph 0 holds a HeteroData, .* Use its to_homogeneous\(\)": lambda: [hetero(), hetero()],
    r"^(mine|\S+mine.pt) (holds|is) .*HeteroData": lambda: Batch.from_data_list([hetero()] * 2),
    "is a str, expected a PyG Dataset": lambda: "cora",
    "is a Tensor, expected a PyG Dataset": lambda: torch.eye(3),
    "is a mapping of train, valid, expected train, val and test|has no edge_index": lambda: {"train": [], "valid": []},
    "has no graph": lambda: [],
    "task is 'nodes', expected None or one of node_regression, ": (ring, {"task": "nodes"}),
}


@pytest.mark.parametrize("message", CASES)
def test_what_is_no_task_is_refused_by_its_reason(message: str, tmp_path: Path):
    case = CASES[message]
    make, options = case if isinstance(case, tuple) else (case, {})
    options = {"val": 2, "test": 2} | options
    with pytest.raises(ValueError, match=message) as in_memory:
        from_dataset(make(), "mine", **options)
    assert str(in_memory.value).startswith("mine")
    torch.save(make(), tmp_path / "mine.pt")
    with pytest.raises(ValueError, match=message) as in_file:
        from_file(tmp_path / "mine.pt", **options)
    assert str(in_file.value).startswith(str(tmp_path / "mine.pt")) and "truncated" not in str(in_file.value)


def test_an_error_in_the_graph_comes_before_one_in_its_split():
    for changes in ({"edge_index": with_value(EDGES, -1)}, {"x": with_value(X, torch.nan)}, {"y": with_value(Y, -7)}):
        with pytest.raises(ValueError, match=r"mine: (edge_index holds -1|x is NaN|y holds the label -7)"):
            from_dataset(ring(**changes), "mine", val=500, test=1000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"val_mask": None}, "val_mask is missing. Give it, or split at random"),
        ({"val_mask": nodes(12, 3).long()}, r"val_mask is torch.int64 \(12,\), expected torch.bool \(12,\)"),
        ({"y": with_value(Y, -1)}, "test_mask holds nodes with unknown labels"),
        ({"y": Y.float()}, r"y is torch.float32 of shape \(12,\), expected torch.int64 of shape \(12,\)"),
        ({"y": with_value(Y, 3)}, "y holds the label 3, expected 0 to 2"),
        ({"x": X.long()}, r"x is torch.int64, expected floats. Use x.float\(\)"),
    ],
)
def test_a_task_from_its_constructor_is_checked_too(values: dict[str, Any], message: str):
    data = [one(**values)]
    with pytest.raises(ValueError, match=message):
        Task("mine", data, data, data, num_features=12, objective=NodeLabels(3))


class Untouched(Tensor):
    """A tensor whose elements must not be read."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (Tensor.isfinite, Tensor.aminmax, Tensor.split), f"{function} before all shapes"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("wrong", ["edge_index", "edge_attr", "y"])
def test_shapes_are_checked_before_elements(wrong: str):
    data = one(edge_attr=torch.ones(12, 1))
    data[wrong] = data[wrong][:1] if wrong == "edge_index" else data[wrong][:5]
    data.x = data.x.as_subclass(Untouched)
    with pytest.raises(ValueError, match=f"{wrong} .*shape"):
        Task("mine", [data], [data], [data], num_features=12, objective=NodeLabels(3), edge_dim=1)
