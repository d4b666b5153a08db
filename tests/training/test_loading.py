"""Laws of all loaders that divide one graph: exact steps and scores, resume, processes, the command and its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gat_pyg.graph.partition
import gat_pyg.runs.build
from gat_pyg.data import planted
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Optimisation, TaskData, Transductive
from tests.commands import result_of
from tests.laws import assert_close
from tests.training.loaders import Place, fitted, model, node_module, one_graph, steps_of, trainer
from tests.training.test_pairs import linked, model_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork",
    "ignore:.*does not have many workers",
    "ignore:This DataLoader will create 2 worker",  # on one core
)
NEIGHBOURS: dict[str, Any] = {"batch_size": 60, "num_neighbors": [-1, -1]}


@pytest.mark.parametrize(
    ("options", "edge_dim"),
    [
        (NEIGHBOURS, None),
        ({"batch_size": 1, "num_parts": 1}, 2),
        ({"batch_size": 4, "num_parts": 4}, 2),
        ({"batch_size": 60, "num_parts": 60}, None),
    ],
)
def test_all_nodes_in_a_step_give_the_steps_and_scores_of_the_whole_graph(options: dict[str, Any], edge_dim: int):
    task = one_graph(edge_dim)
    modules = [node_module(edge_dim=edge_dim) for _ in range(2)]
    one, other = (fitted(*run) for run in zip(modules, (TaskData(task), TaskData(task, **options)), strict=True))
    assert (one.best_epoch, one.kept_score) == (other.best_epoch, other.kept_score)
    assert one.kept_loss == pytest.approx(other.kept_loss, rel=1e-6)
    for whole, batch in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(batch, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"batch_size": 7, "num_neighbors": [2, 2]}, {"num_parts": 9}], ids=str)
def test_scores_are_those_of_the_whole_graph_whatever_the_steps_are(options: dict[str, Any]):
    task, module = one_graph(), node_module()
    calls = ("validate", "test") if "num_parts" in options else ("test",)  # a validation samples seed nodes
    for call in calls:
        whole, batches = (
            getattr(trainer(), call)(module, datamodule=data, verbose=False)[0]
            for data in (TaskData(task), TaskData(task, **options))
        )
        assert batches == pytest.approx(whole)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"batch_size": 5, "num_parts": 6}),
        (3, {"batch_size": 4, "num_parts": 6}),
        (2, {"batch_size": 12, "num_neighbors": [-1, -1]}),
        (4, {"batch_size": 24, "num_neighbors": [-1, -1]}),  # the last step has two seeds: two processes have none
    ],
    ids=str,
)
def test_processes_have_the_loss_and_gradients_of_one(world: int, options: dict[str, Any]):
    task = one_graph()
    data = task.train[0]
    data.train_mask[:] = torch.arange(60) < 26
    if "num_parts" in options:  # complete graphs of ten nodes, so that no edge is between two parts
        src, dst = torch.cartesian_prod(torch.arange(60), torch.arange(60)).t()
        data.edge_index = torch.stack([src, dst])[:, (src // 10 == dst // 10) & (src != dst)]
    module = Transductive(model(), NodeLabels(3))
    weights = list(module.parameters())
    for (alone,), parts in zip(steps_of(task, **options), steps_of(task, world, **options), strict=True):
        (loss, sums), *shares = (module._loss(batch) for batch in (alone, *parts))
        mean = sum(part * own[1] for part, own in shares) / sums[1].clamp(min=1)
        assert_close(mean, loss)
        for own, expected in zip(torch.autograd.grad(mean, weights), torch.autograd.grad(loss, weights), strict=True):
            assert_close(own, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nodes", {"batch_size": 7, "num_neighbors": [2, 2]}),
        ("nodes", {"batch_size": 7, "num_neighbors": [2, 2], "num_workers": 2}),
        ("nodes", {"batch_size": 3, "num_parts": 8, "num_workers": 1}),
        ("links", {"batch_size": 20, "num_neighbors": [2, 2]}),
        ("links", {"num_links": 30}),
    ],
    ids=str,
)
def test_a_resumed_run_draws_the_batches_of_an_uninterrupted_one(name: str, options: dict[str, Any], tmp_path: Path):
    def run(epochs: int, resume: Path | None = None) -> tuple[list[Tensor], list[list[int]]]:
        task, drawn = linked() if name == "links" else one_graph(), []
        network = model_of(task, dropout=0.5) if name == "links" else model(dropout=0.5)
        module = Transductive(network, task.objective, Optimisation(lr=0.05))
        module.on_train_batch_start = lambda batch, _: drawn.append(batch["n_id" if "n_id" in batch else "input_id"])
        fitted(module, TaskData(task, seed=3, **options), epochs, path, resume)
        return list(module.parameters()), [ids.tolist() for ids in drawn]

    path = tmp_path / "last.ckpt"
    whole, drawn = run(3)
    _, first = run(1)
    resumed, rest = run(3, path)
    assert first + rest == drawn and drawn[: len(first)] != drawn[len(first) : 2 * len(first)]
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "world", "options", "message"),
    [
        (
            lambda: planted(graphs=4, nodes=10),
            1,
            {"num_parts": 4},
            "num_parts is 4, but planted has many graphs, which",
        ),
        (one_graph, 1, {"num_neighbors": [2], "num_parts": 4}, r"\[2\] and num_parts is 4, expected only one"),
        (one_graph, 1, {"num_parts": 0}, "num_parts is 0, expected 1 to 60, the number of nodes"),
        (one_graph, 1, {"num_parts": 61}, "num_parts is 61, expected 1 to 60, the number of nodes"),
        (one_graph, 1, {"num_links": 3}, "num_links is 3, but one has no labelled pairs of nodes"),
        (linked, 1, {"num_parts": 3}, "num_parts is 3, but links predicts links, whose ends may be in two parts"),
        (one_graph, 3, {"batch_size": 2, "num_parts": 6}, "batch_size is 2 parts in .* there are 3 .*batch_size=3"),
        (one_graph, 3, {"batch_size": 8, "num_neighbors": [1]}, "batch_size is 8 seed nodes in .*processes.*such as 9"),
    ],
)
def test_impossible_batches_are_errors(task: Any, world: int, options: dict[str, Any], message: str):
    def load() -> None:
        data = TaskData(task(), **options)
        data.trainer = Place(0, world)
        data.train_dataloader()

    with pytest.raises(ValueError, match=message):
        load()


LINKS = (
    "dataset._target_=gat_pyg.data.links",
    "+dataset.dataset._target_=gat_pyg.data.digits",
    "+dataset.name=pairs",
    "+model.decoder=mlp",
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loader=cluster", "loader.num_parts=0"], "num_parts is 0, expected null or a whole number, at least 1"),
        (
            ["loader=cluster", "loader.num_parts=1798"],
            "1798, expected 1 to 1797, the number of nodes: none may be empt",
        ),
        (["loader=neighbor", "loader.batch_size=0"], "loader.batch_size is 0, expected a whole number, at least 1"),
        (
            ["loader=neighbor", "dataset=planted"],
            r"num_neighbors is \[10, 10\], but planted has many graphs, which are",
        ),
        (["loader=cluster", "training.sparse=true"], "training.sparse is true, but batches of nodes have dense featur"),
        (["loader=cluster", "runs=2", "vectorize=on"], "vectorize is on, but each draws its own batches"),
        (["loader=neighbor", "loader.num_neighbors=[4]"], r"num_neighbors is \[4\], expected 2 numbers: one for each"),
        (
            [*LINKS, "loader=cluster"],
            "num_parts is 20, but pairs predicts links, whose ends may be in two parts. Use n",
        ),
        ([*LINKS, "loader=neighbor", "loader.num_links=8"], "and num_links is 8, expected only one: .* Set the others"),
        (
            [*LINKS, "trainer=ddp_cpu"],
            r"which 2 processes do not divide by default. Use loader=neighbor, or \+loader.n",
        ),
        (
            [*LINKS, "trainer=ddp_cpu", "trainer.strategy=halo"],
            "is halo, which divides the nodes, but pairs predicts l",
        ),
    ],
)
def test_impossible_settings_are_errors(
    settings: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit):
        result_of(tmp_path, *settings)
    assert re.search(message, capsys.readouterr().err)


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metis", "text"),
    [
        (True, "20 parts by METIS, [0-9.]+ % of the"),
        (False, r"20 parts of node ids in a row \(by METIS with 'gat_pyg\[m"),
    ],
)
def test_the_command_trains_by_clusters(
    metis: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By a model that is not computed layer by layer, and whose scores have the precision of the training."""
    if metis and not gat_pyg.graph.partition.WITH_METIS:
        pytest.skip("pymetis is not installed")
    for module in (gat_pyg.graph.partition, gat_pyg.runs.build):
        monkeypatch.setattr(module, "WITH_METIS", metis)
    settings = ["model=gcn", "+trainer.precision=64-true"] if metis else []
    result = result_of(tmp_path, "loader=cluster", "training.max_epochs=2", *settings)
    assert result.epochs == 2 and 0 < result.value <= 100
    assert re.search(f"digits: {text}", capsys.readouterr().err)


def test_the_command_trains_by_neighbours_with_a_worker(tmp_path: Path):
    settings = ["loader=neighbor", "loader.num_workers=1", "+trainer.precision=64-true", "training.max_epochs=2"]
    result = result_of(tmp_path, *settings)
    assert result.epochs == 2 and 0 < result.value <= 100
