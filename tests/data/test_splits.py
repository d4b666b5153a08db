"""Users' data as tasks: their splits and the form of features and labels; receptive fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import k_hop_subgraph

from gat_pyg.data import from_dataset
from gat_pyg.graph.subgraph import receptive_field
from gat_pyg.tasks.nodes import NodeMultiLabels
from gat_pyg.tasks.objective import MASKS, SPLITS
from tests.graphs import CHAIN, SQUARE, Graph


def ring(N: int = 12, K: int = 3, **others: Any) -> Data:
    """A small, valid, labelled graph."""
    nodes = torch.arange(N)
    return Data(x=torch.eye(N), edge_index=torch.stack([nodes, nodes.roll(1)]), y=nodes % K).update(others)


def nodes(N: int, *chosen: int) -> Tensor:
    return torch.zeros(N, dtype=torch.bool).index_fill_(0, torch.tensor(chosen, dtype=torch.long), True)


def masks(N: int = 12) -> dict[str, Tensor]:
    return {"train_mask": nodes(N, 0, 1, 2), "val_mask": nodes(N, 3, 4), "test_mask": nodes(N, 5, 6, 7)}


# Any data set of PyG's ----------------------------------------------------------------------------------------------


def test_missing_masks_are_drawn_with_the_seed_and_given_ones_kept():
    club = KarateClub()  # has a train_mask with one node per class
    task = from_dataset(club, val=10, test=15)
    data = task.train[0]
    assert task.name == "karateclub"
    assert torch.equal(data.train_mask, club[0].train_mask)
    assert [int(data[key].sum()) for key in MASKS] == [4, 10, 15]
    assert "val_mask" not in club[0]  # the caller's graph stays as it was
    again, other = from_dataset(club, val=10, test=15), from_dataset(club, val=10, test=15, seed=1)
    assert torch.equal(data.test_mask, again.train[0].test_mask)
    assert not torch.equal(data.test_mask, other.train[0].test_mask)


def test_own_data_are_divided_by_shares_unless_numbers_are_given():
    data = ring(100, 4)
    data.y[::5] = -1  # 80 labelled nodes are left
    links = Data(data.x, data.edge_index, edge_label=torch.arange(100) % 3)
    graphs = [Data(torch.ones(2, 1), torch.tensor([[0], [1]]), y=torch.tensor([i % 2])) for i in range(40)]
    some = {"train_mask": nodes(100, *range(1, 12)), "val_mask": nodes(100, *range(12, 16))}  # 9 and 3 labelled ones
    cases: list[tuple[Any, dict[str, Any], list[int]]] = [
        (data, {}, [48, 16, 16]),
        (data, {"per_class": 3}, [12, 16, 16]),
        (data, {"val": 5}, [59, 5, 16]),
        (data, {"val": 5, "test": 6}, [69, 5, 6]),
        (Data(data.x, data.edge_index, y=data.y / 7 + 0.01), {}, [60, 20, 20]),
        (ring(100, 4).update({"y": data.y, "train_mask": some["train_mask"]}), {}, [9, 35, 35]),
        (ring(100, 4).update({"y": data.y, **some}), {}, [9, 3, 68]),
        (links, {}, [60, 20, 20]),
        (graphs, {}, [24, 8, 8]),
        (graphs[:3], {}, [1, 1, 1]),
        (ring(60).update({"y": torch.eye(60)[:, :5]}), {"per_class": 4, "val": 10, "test": 20}, [20, 10, 20]),
        (data, {"task": "link_prediction"}, [85, 10, 20]),  # 5 % and 10 % of the links, and as many other pairs
    ]
    for dataset, options, expected in cases:
        task = from_dataset(dataset, "own", **options)
        assert [len(task.labels(split)) for split in SPLITS] == expected, (expected, options)


def test_a_drawn_split_has_every_class():
    """Also a rare one, which a random order may leave out; otherwise the split is that of the random order."""
    y = torch.where(torch.arange(100) < 5, 1, torch.where(torch.arange(100) < 10, -1, 0))
    edges = torch.stack([torch.arange(100), (torch.arange(100) + 1) % 100])
    graphs = [Data(torch.ones(1, 1), torch.tensor([[0], [0]]), y=label[None]) for label in y[y >= 0]]
    own: list[Any] = [Data(torch.ones(100, 1), edges, y=y), Data(torch.ones(100, 1), edges, edge_label=y), graphs]
    for dataset in own:
        for seed in range(4):
            task = from_dataset(dataset, "own", seed=seed)
            counts = [task.labels(split).bincount(minlength=2).tolist() for split in SPLITS]
            assert [sum(count) for count in counts] == [57, 19, 19]
            assert min(rare for _, rare in counts) >= 1, counts
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    data = from_dataset(Data(torch.ones(100, 1), edges, y=torch.arange(100) % 2), "own", seed=3).train[0]
    assert [int(data[key][part].sum()) for key, part in zip(MASKS, order.split([60, 20, 20]), strict=True)] == [
        60,
        20,
        20,
    ]


def test_a_split_takes_so_many_of_each_class_and_labelled_nodes_only():
    data = ring(60, 4)
    data.y[::7] = -1
    split = from_dataset(data, per_class=3, val=10, test=20).train[0]
    assert split.y[split.train_mask].bincount().tolist() == [3, 3, 3, 3]
    assert [int(split[key].sum()) for key in MASKS] == [12, 10, 20]
    assert not any((split[key] & (data.y < 0)).any() for key in MASKS)
    assert not (split.train_mask & split.val_mask | split.test_mask & (split.train_mask | split.val_mask)).any()
    with pytest.raises(ValueError, match="ring: val_mask needs -1 nodes"):
        from_dataset(data, "ring", per_class=2, val=-1, test=5)
    with pytest.raises(ValueError, match="ring: per_class=-1 needs"):
        from_dataset(data, "ring", per_class=-1, val=5, test=5)


def test_a_column_of_the_masks_is_a_split():
    several = {key: torch.stack([mask, mask.roll(1), mask.roll(2)], 1) for key, mask in masks().items()}
    several["test_mask"] = nodes(12, 11)  # one for all splits
    for split in (0, 2):
        task = from_dataset(ring(**several), "ring", split=split)
        assert torch.equal(task.train[0].train_mask, several["train_mask"][:, split]) and task.num_splits == 3
        assert torch.equal(task.train[0].test_mask, several["test_mask"])
    with pytest.raises(ValueError, match=r"ring: train_mask has 3 columns, split=3 is none of them"):
        from_dataset(ring(**several), "ring", split=3)
    several["val_mask"] = several["val_mask"][:, :2]
    with pytest.raises(ValueError, match="different numbers of columns: 3 in train_mask, 2 in val_mask"):
        from_dataset(ring(**several), "ring")


def test_features_labels_and_edges_become_those_of_a_task():
    data = ring(edge_attr=torch.arange(12), y=ring().y[:, None].float(), **masks())  # y [N, 1]
    data.x, data.edge_index = data.x.long(), EdgeIndex(data.edge_index, sparse_size=(12, 12))
    task = from_dataset(data)
    graph = task.train[0]
    assert task.edge_dim == 1 and graph.x.dtype == torch.float32
    assert torch.equal(graph.edge_attr, torch.arange(12.0)[:, None])
    assert torch.equal(graph.edge_index, ring().edge_index) and torch.equal(graph.y, ring().y)
    floats = ring().y.double()
    floats[[0, 9]] = float("nan")
    unknown = from_dataset(ring(**masks(), y=floats)).train[0]
    assert unknown.y.tolist() == [-1, 1, 2, 0, 1, 2, 0, 1, 2, -1, 1, 2]
    assert unknown.train_mask.nonzero().flatten().tolist() == [1, 2]  # node 0 has no label
    many = torch.eye(12)[:, :5]
    many[3, 1] = float("nan")
    task = from_dataset(ring(**masks(), y=many))
    assert (task.objective, task.train[0].y.dtype) == (NodeMultiLabels(5), torch.float32)
    assert task.train[0].y[3, 1].isnan()


@pytest.mark.parametrize("key", ["x", "edge_attr"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_features_that_float32_makes_equal_are_named(key: str, dtype: torch.dtype):
    times = 1_700_000_000 + torch.arange(12)[:, None] * torch.tensor([0, 7])  # in float32 one of 128 seconds
    values = torch.cat([torch.arange(12)[:, None], times], 1).to(dtype)
    task = None if key == "x" else "link_prediction"
    with pytest.warns(UserWarning, match=f"own: in column 2 of {key}, different values are equal in float32"):
        from_dataset(ring(**masks(), **{key: values}), "own", task=task, val=2, test=2)
    from_dataset(ring(**masks(), **{key: values - values[:1]}), "own", task=task, val=2, test=2)


def test_the_split_of_an_ogb_data_set_is_kept():
    class Ogb(list):  # type: ignore[type-arg]
        def get_idx_split(self) -> dict[str, Tensor]:
            return {"train": torch.tensor([4, 0]), "valid": torch.tensor([1]), "test": torch.tensor([2, 3])}

    data = from_dataset(Ogb([ring()])).train[0]
    assert [data[key].nonzero().flatten().tolist() for key in MASKS] == [[0, 4], [1], [2, 3]]


@pytest.mark.parametrize("graph", [g for g in SQUARE if g.num_src > 1], ids=str)
@pytest.mark.parametrize("num_hops", [0, 1, 3])
def test_a_receptive_field_is_what_pyg_reaches_from_its_nodes(graph: Graph, num_hops: int):
    N, E = graph.num_src, graph.index.size(1)
    data = Data(x=torch.arange(N).float().view(-1, 1), edge_index=graph.index, edge_attr=torch.arange(E).float())
    nodes = torch.tensor([N - 1, 0])
    part = receptive_field(data, nodes, num_hops)
    assert set(part.n_id[: part.num_sampled_nodes[0]].tolist()) == set(nodes.tolist())
    for hop in range(num_hops + 1):
        reached = k_hop_subgraph(nodes, hop, graph.index, num_nodes=N)[0]
        assert set(part.n_id[: sum(part.num_sampled_nodes[: hop + 1])].tolist()) == set(reached.tolist())
        into = torch.isin(graph.index[1], reached).nonzero().flatten() if hop < num_hops else part.e_id
        assert set(part.e_id[: sum(part.num_sampled_edges[: hop + 1])].tolist()) == set(into.tolist())
    assert part.n_id[part.edge_index].equal(graph.index[:, part.e_id])
    assert part.x.flatten().equal(part.n_id.float()) and part.edge_attr.equal(part.e_id.float())


def test_a_receptive_field_has_its_rows_of_sparse_features():
    x = torch.eye(7)[:, [3, 1, 4, 0]]
    data, sparse = (Data(x=x, edge_index=CHAIN.index) for x in (x, x.to_sparse_csr()))
    nodes = torch.tensor([4, 2])
    assert receptive_field(sparse, nodes, 2).x.to_dense().equal(receptive_field(data, nodes, 2).x)
