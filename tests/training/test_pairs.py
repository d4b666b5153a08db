"""Labelled pairs of nodes with sampled neighbours: the whole graph's steps, no link among the edges, any processes."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader
from torch_geometric.nn import GCN
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import is_undirected, k_hop_subgraph

from gat_pyg import GAT
from gat_pyg.data import Task, digits, links
from gat_pyg.models import LinkScores
from gat_pyg.tasks.edges import EdgeLabels, complete_pairs
from gat_pyg.trained.predict import predict
from gat_pyg.training import Transductive
from gat_pyg.training.loading import TaskData
from gat_pyg.training.neighbours import TorchSampler
from tests.commands import result_of
from tests.graphs import random
from tests.laws import assert_close
from tests.objectives import labelled_edges, quantities_of_edges
from tests.training.loaders import Place, trainer


def linked(directed: bool = False, disjoint: float = 0.0) -> Task:
    """A graph of 40 nodes with about 100 links, of which some have a reverse link if it is directed."""
    index = random(40, 40, 100).index
    index = torch.cat([index, index[:, :30].flip(0) if directed else index.flip(0)], 1)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return links(Data(x, index), val=0.1, test=0.2, channels=3, disjoint=disjoint)


def edges_with_features() -> Task:
    """Labelled edges whose features the layers and the decoder read."""
    data = labelled_edges().train[0]
    data.edge_attr = torch.randn(90, 2, generator=torch.Generator().manual_seed(1))
    complete_pairs(data)
    return Task("features", [data], [data], [data], 6, EdgeLabels(3), edge_dim=2)


TASKS = {
    "links": linked,
    "directed links": lambda: linked(directed=True),
    "disjoint links": lambda: linked(disjoint=0.4),
    "edges": labelled_edges,
    "quantities of edges": quantities_of_edges,
    "edges with features": edges_with_features,
}


def model_of(task: Task, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    outputs: dict[str, Any] = {} if task.objective.item == "link" else {"out_channels": task.num_classes}
    if task.edge_dim is not None:
        outputs |= {"combine": "concat", "edge_dim": task.edge_dim}
    return LinkScores(GAT(6, [4], 3, [2, 1], dropout=dropout, edge_dim=task.edge_dim), 3, "mlp", **outputs)


def wide(data: Data) -> Data:
    return copy.copy(data).apply(lambda value: value.double() if value.is_floating_point() else value)


def batches(
    task: Task, size: int, hops: list[int], epoch: int = 0, place: tuple[int, int] = (0, 1), num_workers: int = 0
) -> list[Data]:
    data = TaskData(task, size, seed=3, num_neighbors=hops, num_workers=num_workers)
    data.trainer = Place(*place)
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def numbers(index: Tensor, N: int = 40) -> Tensor:
    return index[0] * N + index[1]


def pairs_of(batch: Data) -> Tensor:
    """The labelled pairs of a batch, as nodes of the graph."""
    return batch.n_id[batch.edge_label_index]


def hidden(task: Task, links: Tensor) -> Tensor:
    """The edges that a step with these links must not have, as numbers."""
    both_ways = is_undirected(task.train[0].edge_index)
    return numbers(torch.cat([links, links.flip(0)], 1) if both_ways else links)


def whole(task: Task, batch: Data) -> Data:
    """The whole graph with the pairs of a batch, and without the links among them."""
    data = wide(task.train[0])
    data.edge_label_index, data.y = pairs_of(batch), wide(batch).y
    for key in ("train_mask", "val_mask", "test_mask"):
        del data[key]
    if "edge_label_attr" in data:
        rows = task.train[0].train_mask.nonzero().view(-1)[batch.input_id]
        assert torch.equal(task.train[0].edge_label_index[:, rows], data.edge_label_index)
        data.edge_label_attr = data.edge_label_attr[rows]
    if task.objective.item == "link":
        selected = ~torch.isin(numbers(data.edge_index), hidden(task, data.edge_label_index[:, data.y == 1]))
        data.edge_index = data.edge_index[:, selected]
    return data


@pytest.mark.parametrize(
    ("name", "decoded"),  # by an MLP, or inner products of the model's outputs
    [*itertools.product(TASKS, [True]), ("links", False), ("directed links", False)],
)
def test_with_all_neighbours_loss_and_gradients_are_those_of_the_whole_graph(name: str, decoded: bool) -> None:
    task = TASKS[name]()
    model = model_of(task) if decoded else GAT(6, [4], 3, [2, 1], dropout=0.0)
    module, compared = Transductive(model.double(), task.objective), 0
    for batch in batches(task, 7, [-1, -1]):
        assert module._is_by_hop(batch)  # each layer skips what no later layer reads
        results, graph = [], whole(task, batch)
        for step in (
            lambda batch=batch: module._loss(wide(batch)),
            lambda graph=graph: task.objective.train_statistics(*module.labelled(module(graph), graph, "train")),
        ):
            module.zero_grad()
            loss, sums = step()
            loss.backward()
            results.append((loss.detach(), sums, *(parameter.grad.clone() for parameter in module.parameters())))
        for one, other in zip(*results, strict=True):
            assert_close(one, other)
        compared += 1
    assert compared == -(-int(task.train[0].train_mask.sum()) // 7)


@pytest.mark.parametrize("name", ["links", "directed links", "disjoint links"])
@pytest.mark.parametrize("hops", [[-1, -1], [2, 3]])
def test_no_link_of_a_step_is_an_edge_of_its_subgraph(name: str, hops: list[int]) -> None:
    task, cut, reverse = TASKS[name](), 0, 0
    graph = task.train[0]
    edges = numbers(graph.edge_index)
    for batch in batches(task, 7, hops):
        links = pairs_of(batch)[:, batch.y == 1]
        messages = numbers(batch.n_id[batch.edge_index])
        assert torch.isin(messages, edges).all() and not torch.isin(messages, hidden(task, links)).any()
        assert torch.equal(messages, edges[batch.e_id])
        assert sum(batch.num_sampled_edges) == batch.edge_index.size(1) and len(batch.num_sampled_edges) == 2
        first, count = batch.num_sampled_nodes[0], batch.num_sampled_edges[0]
        assert (batch.edge_index[1, :count] < first).all() and (batch.edge_index[1, count:] >= first).all()
        assert batch.edge_label_index.max() < first
        cut += int(torch.isin(hidden(task, links), edges).sum())
        reverse += int(torch.isin(numbers(links.flip(0)), messages).sum())
    assert (cut > 0) == (name != "disjoint links")
    assert (reverse > 0) == (name == "directed links")  # another link, which this one does not imply


def test_the_edges_whose_labels_are_predicted_stay() -> None:
    task = labelled_edges()
    for batch in batches(task, 7, [-1, -1]):
        assert torch.isin(numbers(pairs_of(batch), 30), numbers(batch.n_id[batch.edge_index], 30)).all()


@pytest.mark.parametrize("name", TASKS)
def test_an_epoch_has_each_pair_once_with_its_label_and_new_negatives(name: str) -> None:
    task = TASKS[name]()
    graph, N = task.train[0], task.train[0].x.size(0)
    train = graph.edge_label_index[:, graph.train_mask]
    known = torch.cat([graph.edge_index, train, train.flip(0)], 1)
    is_link, orders, negatives = task.objective.item == "link", [], []
    for epoch in range(2):
        steps = batches(task, 7, [2, 2], epoch)
        pos = [pairs_of(step)[:, step.y == 1] if is_link else pairs_of(step) for step in steps]
        neg = [pairs_of(step)[:, step.y == 0] for step in steps] if is_link else []
        assert all(one.size(1) == other.size(1) for one, other in zip(pos, neg, strict=False))
        labels = torch.cat([step.y[: chosen.size(1)] for step, chosen in zip(steps, pos, strict=True)])
        order, expected = numbers(torch.cat(pos, 1), N).sort(), numbers(train, N).sort()
        assert torch.equal(order.values, expected.values)
        if N * N > train.size(1) == expected.values.unique().numel():
            torch.testing.assert_close(
                labels[order.indices], graph.y[graph.train_mask][expected.indices], equal_nan=True, rtol=0, atol=0
            )
        orders.append(torch.cat(pos, 1))
        negatives += [numbers(chosen, N).tolist() for chosen in neg]
    assert not torch.equal(*orders)
    assert not torch.isin(torch.tensor(list(itertools.chain(*negatives))), numbers(known, N)).any()
    assert len({tuple(chosen) for chosen in negatives}) == len(negatives)


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork",
    "ignore:This DataLoader will create 2 worker",  # on one core
)
@pytest.mark.parametrize("epoch", [0, 5])
def test_the_batches_of_a_seed_are_the_same_from_any_number_of_workers(epoch: int) -> None:
    task = linked()
    state = torch.get_rng_state()
    alone, again, two = (batches(task, 20, [2, 2], epoch, num_workers=number) for number in (0, 0, 2))
    for one, *others in zip(alone, again, two, strict=True):
        for other in others:
            for key in ("n_id", "edge_index", "edge_label_index", "y", "x", "e_id"):
                assert torch.equal(one[key], other[key])
    assert torch.equal(torch.get_rng_state(), state)  # of the dropout
    assert not torch.equal(alone[0].n_id, batches(task, 20, [2, 2], epoch + 1)[0].n_id)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("world", [2, 3])
def test_over_processes_a_step_has_the_same_pairs_and_loss(name: str, world: int) -> None:
    task = TASKS[name]()
    size = int(task.train[0].train_mask.sum())
    batch_size = size - 1  # so that the last step has one pair, less than there are processes
    module = Transductive(model_of(task).double(), task.objective)
    alone = batches(task, batch_size, [-1, -1])
    steps = list(zip(*(batches(task, batch_size, [-1, -1], 0, (rank, world)) for rank in range(world)), strict=True))
    assert len(steps) == len(alone) == 2
    for one, parts in zip(alone, steps, strict=True):
        together = torch.cat([pairs_of(part) for part in parts], 1)
        assert numbers(together).sort().values.tolist() == numbers(pairs_of(one)).sort().values.tolist()
        (loss, sums), *shares = (module._loss(wide(batch)) for batch in (one, *parts))
        assert_close(sum(its * part[1] for its, part in shares) / sums[1], loss)
        assert all(part.num_nodes > 0 for part in parts)


def scores(task: Task, data: TaskData, model: nn.Module) -> dict[str, float]:
    module = Transductive(model, task.objective)
    fit = trainer(precision="64-true")
    return {
        key: value
        for call in (fit.validate, fit.test)
        for key, value in call(module, datamodule=data, verbose=False)[0].items()
    }


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(TASKS, ["GAT with decoder", "PyG's GCN with decoder"]), ("links", "GAT")]
)
def test_validation_and_test_are_those_of_the_whole_graph(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gat_pyg.models.link_scores.CHUNK", 5)
    task = TASKS[name]()
    torch.manual_seed(0)
    model: nn.Module = model_of(task) if kind == "GAT with decoder" else GAT(6, [4], 3, [2, 1])
    if kind.startswith("PyG"):
        outputs = {} if task.objective.item == "link" else {"out_channels": task.num_classes}
        model = LinkScores(GCN(6, 4, 2, 3), 3, "bilinear", **outputs)
    expected = scores(task, TaskData(task), model)
    assert any(key.startswith("val_") for key in expected) and any(key.startswith("test_") for key in expected)
    assert scores(task, TaskData(task, 9, num_neighbors=[2, 2]), model) == pytest.approx(expected, rel=1e-6)


def test_pygs_loader_of_links_takes_the_sampler() -> None:
    graph = random(40, 40, 200)
    data = Data(torch.randn(40, 3), graph.index)
    options = {"edge_label_index": graph.index[:, :20], "edge_label": torch.arange(20), "batch_size": 6}
    loader = LinkLoader(data, TorchSampler(graph.index, 40, [-1, -1]), **options)
    for number, batch in enumerate(loader):
        assert torch.equal(pairs_of(batch), graph.index[:, :20][:, 6 * number : 6 * number + 6])
        assert torch.equal(batch.edge_label, torch.arange(20)[6 * number : 6 * number + 6])
        near, *_ = k_hop_subgraph(pairs_of(batch).unique(), 2, graph.index, num_nodes=40)
        assert sorted(batch.n_id.tolist()) == near.tolist()
        assert torch.equal(graph.index[:, batch.e_id], batch.n_id[batch.edge_index])
    sampler = TorchSampler(graph.index, 40, [2])
    batch = next(iter(LinkLoader(data, sampler, neg_sampling=NegativeSampling("binary"), batch_size=6)))
    assert batch.edge_label.tolist() == [1.0] * 6 + [0.0] * 6


def test_the_command_trains_by_batches_and_scores_the_whole_graph(tmp_path: Path) -> None:
    pairs = ["dataset._target_=gat_pyg.data.links", "+dataset.dataset._target_=gat_pyg.data.digits"]
    settings = ["loader=neighbor", "loader.batch_size=2000", "+model.decoder=mlp", "training.max_epochs=2"]
    result = result_of(tmp_path, *pairs, "+dataset.name=pairs", *settings)
    data = links(digits()).train[0]
    test = Data(data.x, data.edge_index, edge_label_index=data.edge_label_index[:, data.test_mask])
    assert roc_auc_score(data.y[data.test_mask], predict(result.run_dir, test)) == pytest.approx(result.value, abs=2e-5)
