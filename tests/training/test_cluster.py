"""Training by clusters: the subgraphs that parts of a graph induce, each part once an epoch, and exact scores."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from safetensors.torch import load_file
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

import gat_pyg.graph.partition
import gat_pyg.run
from gat_pyg import GAT
from gat_pyg.data import Task, planted
from gat_pyg.experiments.result import Result, read
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Optimisation, PaperStopping, Resumable, Transductive
from gat_pyg.training.clusters import Clusters
from gat_pyg.training.loading import TaskData
from tests.graphs import SQUARE, Graph, random
from tests.laws import assert_close
from tests.processes import python


def one_graph(edge_dim: int | None = None) -> Task:
    graph, generator = random(60, 60, 400), torch.Generator().manual_seed(1)
    masks = {f"{split}_mask": torch.arange(60) % 3 == place for place, split in enumerate(("train", "val", "test"))}
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    data = Data(x, graph.index, y=torch.arange(60) % 7 % 3, **masks)
    if edge_dim is not None:
        data.edge_attr = torch.randn(400, edge_dim, generator=generator, dtype=torch.float64)
    return Task("one", [data], [data], [data], 6, NodeLabels(3), edge_dim=edge_dim)


class Place:
    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world


def steps_of(task: Task, batch_size: int, num_parts: int, world: int, epoch: int = 0) -> list[tuple[Data, ...]]:
    """Each step of an epoch: a batch of each process."""
    loaders = []
    for rank in range(world):
        data = TaskData(task, batch_size, num_parts=num_parts)
        data.trainer = Place(rank, world)
        loaders.append(data.train_dataloader())
        loaders[-1].sampler.set_epoch(epoch)
    return list(zip(*loaders, strict=True))


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
    batch = clusters([2])  # nobody's
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
            _, kept = subgraph(nodes, graph.index, torch.arange(E), num_nodes=N)
            assert batch.n_id.sort().values.tolist() == nodes.tolist() == batch.y.sort().values.tolist()
            assert batch.edge_attr.flatten().sort().values.tolist() == kept.sort().values.tolist()
            assert torch.equal(batch.n_id[batch.edge_index], graph.index[:, batch.edge_attr.flatten()])
            assert (batch.edge_index[1].diff() >= 0).all()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("batch_size", "num_parts"), [(3, 12), (4, 10), (5, 11), (20, 4), (3, 60)])
def test_an_epoch_has_each_part_once_over_any_number_of_processes(world: int, batch_size: int, num_parts: int):
    task = one_graph()
    part = TaskData(task, num_parts=num_parts).loading.part
    orders = []
    for epoch in range(2):
        steps = steps_of(task, batch_size, num_parts, world, epoch)
        assert len(steps) == -(-num_parts // batch_size)
        orders.append([sorted(one for batch in step for one in batch.parts if one < num_parts) for step in steps])
        assert sorted(itertools.chain(*orders[-1])) == list(range(num_parts))
        labelled = torch.cat([batch.n_id[batch.train_mask] for step in steps for batch in step])
        assert labelled.sort().values.tolist() == list(range(0, 60, 3))
        for batch in itertools.chain(*steps):
            assert set(part[batch.n_id].tolist()) == set(batch.parts) - {num_parts} or batch.parts == [num_parts]
    if num_parts > batch_size:
        assert orders[0] != orders[1]
    steps = steps_of(task, batch_size, num_parts, 1)
    assert orders[0] == [[one for one in batch.parts if one < num_parts] for (batch,) in steps]  # the step of one


@pytest.mark.parametrize("world", [2, 3])
def test_over_processes_the_loss_is_the_mean_over_all_labelled_nodes(world: int):
    module = Transductive(GAT(6, [4], 3, [2, 1]).double(), NodeLabels(3))
    for step in steps_of(one_graph(), 5, 12, world):
        parts = [module._loss(batch) for batch in step]
        outs = [module.labelled(module(batch), batch, "train") for batch in step]
        out, y = (torch.cat(values) for values in zip(*outs, strict=True))
        mean = torch.nn.functional.cross_entropy(out, y)
        assert_close(sum(loss * sums[1] for loss, sums in parts) / sum(sums[1] for _, sums in parts), mean)


def test_workers_cut_the_same_batches():
    alone, ahead = (
        list(TaskData(one_graph(edge_dim=2), 3, num_parts=8, num_workers=n).train_dataloader()) for n in (0, 1)
    )
    for one, other in zip(alone, ahead, strict=True):
        assert one.parts == other.parts
        for key in ("x", "edge_index", "edge_attr", "y", "train_mask", "n_id"):
            assert torch.equal(one[key], other[key])


# Training -----------------------------------------------------------------------------------------------------------

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def trained(data: TaskData, edge_dim: int | None = None) -> tuple[Transductive, PaperStopping]:
    torch.manual_seed(0)
    module, rule = (
        Transductive(GAT(6, [4], 3, [2, 1], edge_dim=edge_dim).double(), NodeLabels(3), Optimisation(lr=0.05)),
        PaperStopping(),
    )
    options = {"max_epochs": 6, "logger": False, "enable_checkpointing": False, **QUIET}
    Trainer(callbacks=[rule, Resumable(None)], **options).fit(module, datamodule=data)
    return module, rule


@pytest.mark.parametrize("edge_dim", [None, 2])
@pytest.mark.parametrize("num_parts", [1, 4, 60])
def test_all_parts_in_a_step_give_the_steps_and_scores_of_the_whole_graph(num_parts: int, edge_dim: int | None):
    task = one_graph(edge_dim)
    ours = TaskData(task, batch_size=num_parts, num_parts=num_parts)
    (whole, rule), (parts, its) = trained(TaskData(task), edge_dim), trained(ours, edge_dim)
    assert (rule.best_epoch, rule.kept_score) == (its.best_epoch, its.kept_score)
    assert rule.kept_loss == pytest.approx(its.kept_loss, rel=1e-6)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
    scores = [
        Trainer(logger=False, **QUIET).test(parts, datamodule=data, verbose=False)[0] for data in (TaskData(task), ours)
    ]
    assert scores[0] == pytest.approx(scores[1])


def test_scores_are_those_of_the_whole_graph_whatever_the_steps_are():
    task = one_graph()
    few = TaskData(task, batch_size=1, num_parts=9)
    module, _ = trained(few)
    trainer = Trainer(logger=False, **QUIET)
    for scored in (trainer.validate, trainer.test):
        exact, ours = (scored(module, datamodule=data, verbose=False)[0] for data in (TaskData(task), few))
        assert exact == pytest.approx(ours)


def test_a_batch_without_a_training_node_has_a_loss_of_zero():
    task = one_graph()
    task.train[0].train_mask[:] = torch.arange(60) == 7
    module, losses = Transductive(GAT(6, [4], 3, [2, 1]).double(), NodeLabels(3)), []
    for (batch,) in steps_of(task, 1, 6, 1):
        module.zero_grad()
        loss, (_, known) = module._loss(batch)
        loss.backward()
        zero = all(parameter.grad.count_nonzero() == 0 for parameter in module.parameters())
        losses.append((bool(known), bool(loss > 0), not zero))
    assert sorted(losses) == [(False,) * 3] * 5 + [(True,) * 3]
    trained_too, rule = trained(TaskData(task, 1, num_parts=6))
    assert all(value.isfinite().all() for value in trained_too.parameters()) and rule.epoch == 6


def test_each_step_drops_out_anew():
    (batch,), *_ = steps_of(one_graph(), 6, 12, 1)
    module = Transductive(GAT(6, [4], 3, [2, 1], dropout=0.5).double(), NodeLabels(3)).train()
    module.begin_epoch(0, 0)
    assert not torch.equal(module(batch), module(batch))


# Refusals -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="num_parts is 4, but planted has many graphs, which are used whole"):
        TaskData(planted(graphs=4, nodes=10), num_parts=4)
    with pytest.raises(ValueError, match=r"num_neighbors is \[2\] and num_parts is 4, expected only one"):
        TaskData(one_graph(), num_neighbors=[2], num_parts=4)
    for num_parts in (0, 61):
        with pytest.raises(ValueError, match=f"num_parts is {num_parts}, expected 1 to 60, the number of nodes"):
            TaskData(one_graph(), num_parts=num_parts).train_dataloader()
    data = TaskData(one_graph(), 2, num_parts=6)
    data.trainer = Place(0, 3)
    with pytest.raises(
        ValueError, match="batch_size is 2 parts in a step over all processes, but there are 3 .*batch_size=3"
    ):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loader.num_parts=0"], "loader.num_parts is 0, expected null or a whole number, at least 1"),
        (["loader.num_parts=1798"], "num_parts is 1798, expected 1 to 1797, the number of nodes: none may be empty"),
        (["loader.batch_size=0"], "loader.batch_size is 0, expected a whole number, at least 1"),
        (["dataset=planted"], "num_parts is 20, but planted has many graphs, which are used whole"),
        (["training.sparse=true"], "training.sparse is true, but batches of nodes have dense features"),
        (["runs=2", "vectorize=on"], "vectorize is on, but each draws its own batches"),
    ],
)
def test_settings_that_will_not_do_are_refused(
    settings: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["gat-pyg", "loader=cluster", *settings, f"outputs={tmp_path}"])
    with pytest.raises(SystemExit):
        gat_pyg.run.main()
    assert re.search(message, capsys.readouterr().err)


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metis", [True, False])
def test_the_command_trains_by_clusters(
    metis: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if metis and not gat_pyg.graph.partition.WITH_METIS:
        pytest.skip("pymetis is not installed")
    for module in (gat_pyg.graph.partition, gat_pyg.experiments.build):
        monkeypatch.setattr(module, "WITH_METIS", metis)
    epochs = 60 if metis else 2
    settings = ["loader=cluster", f"training.max_epochs={epochs}", "training.lr=0.02"]
    monkeypatch.setattr(sys, "argv", ["gat-pyg", *settings, f"outputs={tmp_path}"])
    gat_pyg.run.main()
    (result,) = read(tmp_path / "results.jsonl")
    assert result.epochs == epochs and (result.value > 93 or not metis)  # of the whole graph, 97
    told = (
        "20 parts by METIS, [0-9.]+ % of the" if metis else r"20 parts of node ids in a row \(by METIS with 'gat_pyg\[m"
    )
    assert re.search(f"digits: {told}", capsys.readouterr().err)


@pytest.mark.parametrize("model", ["gat", "gcn"])  # with and without a way of its own, one layer after the other
def test_scores_are_in_the_precision_of_the_training(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = ["loader=cluster", f"model={model}", "+trainer.precision=64-true", "training.max_epochs=1"]
    monkeypatch.setattr(sys, "argv", ["gat-pyg", *settings, f"outputs={tmp_path}"])
    gat_pyg.run.main()
    (result,) = read(tmp_path / "results.jsonl")
    assert 0 < result.value <= 100


def islands(path: Path, number: int = 6, size: int = 10) -> None:
    """A graph of so many complete ones, which parts need not cut."""
    generator = torch.Generator().manual_seed(0)
    N = number * size
    src, dst = torch.cartesian_prod(torch.arange(N), torch.arange(N)).t()
    kept = (src // size == dst // size) & (src != dst)
    masks = {f"{split}_mask": torch.arange(N) % 3 == place for place, split in enumerate(("train", "val", "test"))}
    masks["train_mask"][:size] = False  # an island has none
    x = torch.randn(N, 5, generator=generator)
    np.savez(path, x=x, edge_index=torch.stack([src, dst])[:, kept], y=(x[:, 0] > 0).long(), **masks)


def left(outputs: Path) -> tuple[Result, dict[str, Tensor]]:
    (result,) = read(outputs / "results.jsonl")
    return result, load_file(Path(result.run_dir) / "model.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="processes as in tests/distributed/test_ranks.py")
def test_processes_take_the_steps_of_one_where_no_edge_is_between_parts(tmp_path: Path):
    islands(tmp_path / "islands.npz")
    common = ["dataset=file", f"dataset.path={tmp_path}/islands.npz", "loader=cluster", "loader.num_parts=6"]
    common += ["loader.batch_size=4", "+trainer.precision=64-true", "training.max_epochs=5", "model.dropout=0"]
    found = []
    for world in (1, 3):
        several = ["trainer=ddp_cpu", f"trainer.devices={world}"] if world > 1 else []
        run = ["-m", "gat_pyg.run", *common, *several, f"outputs={tmp_path}/{world}"]
        process = python(*run, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, complaints = process.communicate(timeout=240)
        assert process.returncode == 0 and "Warning" not in complaints, complaints
        assert len(re.findall(r"islands: 6 parts .*, 0\.0 % of the edges between them", complaints)) == 1
        found.append(left(tmp_path / str(world)))
    (alone, weights), (result, its) = found
    assert (result.best_epoch, result.value, result.val) == (alone.best_epoch, alone.value, alone.val)
    for name, value in its.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)
