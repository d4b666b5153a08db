"""Training by clusters: the subgraphs that parts of a graph induce, each part once an epoch, and exact scores."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

from gat_pyg.training.clusters import Clusters
from gat_pyg.training.loading import TaskData
from tests.graphs import SQUARE, Graph
from tests.training.loaders import node_module, one_graph, steps_of

# Batches ------------------------------------------------------------------------------------------------------------


def test_a_square_by_hand():
    data = Data(torch.eye(4), torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]]), edge_attr=torch.arange(5.0)[:, None])
    data.y, data.train_mask = torch.arange(4), torch.tensor([True, False, True, True])
    clusters = Clusters(data, torch.tensor([1, 0, 1, 0]))
    batch = clusters([0])
    assert batch.n_id.tolist() == batch.y.tolist() == [1, 3] and batch.train_mask.tolist() == [False, True]
    assert batch.edge_index.tolist() == [[1], [1]] and batch.edge_attr.tolist() == [[4.0]]  # the loop
    batch = clusters([1, 0])
    assert batch.parts == [0, 1] and batch.n_id.tolist() == [1, 3, 0, 2] and torch.equal(batch.x, data.x[batch.n_id])
    assert batch.edge_index.tolist() == [[2, 3, 1, 1, 0], [0, 1, 1, 2, 3]]
    assert batch.edge_attr.flatten().tolist() == [0.0, 2.0, 4.0, 3.0, 1.0]
    batch = clusters([2])  # the empty part
    assert batch.n_id.tolist() == [1] and not batch.train_mask.any() and batch.edge_index.shape == (2, 0)


@pytest.mark.parametrize("graph", [graph for graph in SQUARE if graph.num_dst], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_a_batch_is_the_subgraph_of_its_nodes(graph: Graph, num_parts: int):
    N, E = graph.num_dst, graph.index.size(1)
    part = torch.randint(num_parts, (N,), generator=torch.Generator().manual_seed(0))  # some may be empty
    data = Data(torch.randn(N, 3), graph.index, torch.arange(E)[:, None], torch.arange(N), train_mask=torch.ones(N) > 0)
    for size in range(1, num_parts + 1):
        for some in itertools.combinations(range(int(part.max()) + 1), size):
            batch = Clusters(data, part)(some)
            nodes = torch.isin(part, torch.tensor(some)).nonzero().flatten()
            if not nodes.numel():
                continue
            _, e_id = subgraph(nodes, graph.index, torch.arange(E), num_nodes=N)
            assert batch.n_id.sort().values.tolist() == nodes.tolist() == batch.y.sort().values.tolist()
            assert batch.edge_attr.flatten().sort().values.tolist() == e_id.sort().values.tolist()
            assert torch.equal(batch.n_id[batch.edge_index], graph.index[:, batch.edge_attr.flatten()])
            assert (batch.edge_index[1].diff() >= 0).all()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("batch_size", "num_parts"), [(3, 12), (4, 10), (5, 11), (20, 4), (3, 60)])
def test_an_epoch_has_each_part_once_over_any_number_of_processes(world: int, batch_size: int, num_parts: int):
    task = one_graph()
    part = TaskData(task, num_parts=num_parts).loading.part
    orders = []
    for epoch in range(2):
        steps = steps_of(task, world, epoch, batch_size=batch_size, num_parts=num_parts)
        assert len(steps) == -(-num_parts // batch_size)
        orders.append([sorted(one for batch in step for one in batch.parts if one < num_parts) for step in steps])
        assert sorted(itertools.chain(*orders[-1])) == list(range(num_parts))
        labelled = torch.cat([batch.n_id[batch.train_mask] for step in steps for batch in step])
        assert labelled.sort().values.tolist() == list(range(0, 60, 3))
        for batch in itertools.chain(*steps):
            assert set(part[batch.n_id].tolist()) == set(batch.parts) - {num_parts} or batch.parts == [num_parts]
    if num_parts > batch_size:
        assert orders[0] != orders[1]
    steps = steps_of(task, batch_size=batch_size, num_parts=num_parts)
    assert orders[0] == [[one for one in batch.parts if one < num_parts] for (batch,) in steps]  # the step of one


def test_workers_return_the_same_batches():
    alone, ahead = (
        list(TaskData(one_graph(edge_dim=2), 3, num_parts=8, num_workers=n).train_dataloader()) for n in (0, 1)
    )
    for one, other in zip(alone, ahead, strict=True):
        assert one.parts == other.parts
        for key in ("x", "edge_index", "edge_attr", "y", "train_mask", "n_id"):
            assert torch.equal(one[key], other[key])


# Training -----------------------------------------------------------------------------------------------------------


def test_a_batch_without_a_training_node_has_a_loss_of_zero():
    task = one_graph()
    task.train[0].train_mask[:] = torch.arange(60) == 7
    module, losses = node_module(), []
    for (batch,) in steps_of(task, batch_size=1, num_parts=6):
        module.zero_grad()
        loss, (_, known) = module._loss(batch)
        loss.backward()
        zero = all(parameter.grad.count_nonzero() == 0 for parameter in module.parameters())
        losses.append((bool(known), bool(loss > 0), not zero))
    assert sorted(losses) == [(False,) * 3] * 5 + [(True,) * 3]


def test_each_batch_of_an_epoch_has_its_own_dropout_mask():
    (batch,), *_ = steps_of(one_graph(), batch_size=6, num_parts=12)
    module = node_module(dropout=0.5).train()
    module.begin_epoch(0, 0)
    assert not torch.equal(module(batch), module(batch))
