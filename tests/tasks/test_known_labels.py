"""Known labels as input: none helps to predict itself, and those of validation and test train nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from gat_pyg.seeds.member import Member
from gat_pyg.seeds.module import Stacked
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import SPLITS
from gat_pyg.tasks.targets import NodeTargets
from gat_pyg.tasks.task import Task
from gat_pyg.training import Transductive
from tests.objectives import GAT, many_graphs, one_graph, quantities_of_nodes, setup

TASKS = {"classes": one_graph, "labels": lambda: one_graph(True), "quantities": quantities_of_nodes}


def test_labels_spread_from_the_ends_of_a_path():
    path = Data(torch.zeros(4, 0), torch.tensor([[0, 1, 2], [1, 2, 3]]), y=torch.tensor([[2.0], [9.0], [9.0], [8.0]]))
    read, objective = torch.tensor([True, False, False, True]), NodeTargets(1, mean=(5.0,), std=(3.0,), label_rate=0.5)
    values, known, spread = objective.with_labels(path, read).x.t()
    torch.testing.assert_close(values, torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    assert known.tolist() == read.tolist()
    torch.testing.assert_close(spread, torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0]))  # the linear interpolation


@pytest.mark.parametrize("name", TASKS)
def test_no_label_helps_to_predict_itself(name: str):
    task = TASKS[name]().reading_labels(0.4)
    (data,), objective = task.train, task.objective

    def examples(changed: torch.Tensor) -> list[Data]:
        other = data.clone()
        other.y = torch.where(changed.view(-1, *[1] * (data.y.dim() - 1)), data.y.flip(0).roll(1, 0), data.y)
        random.seed(3)
        return [objective.example(other, split) for split in SPLITS]

    before = examples(torch.zeros(len(data.x), dtype=torch.bool))
    assert before[0].x.shape == (30, 6 + objective.num_labels)
    assert 0 < before[0].train_mask.sum() < 10 and not (before[0].train_mask & ~data.train_mask).any()
    for number, (split, example) in enumerate(zip(SPLITS, before, strict=True)):
        rows = example[f"{split}_mask"]  # whose labels are the loss, or the score
        unread = rows | data.val_mask | data.test_mask
        torch.testing.assert_close(examples(unread)[number].x, example.x, rtol=0, atol=0)
        assert not torch.equal(examples(~unread)[number].x, example.x)
    (permuted,), order = one_graph().train, torch.randperm(30)
    task = Task("one", [permuted], [permuted], [permuted], 6, NodeLabels(3, label_rate=0.4))
    x = task.objective.example(permuted, "test").x
    renamed = Data(permuted.x[order], order.argsort()[permuted.edge_index], y=permuted.y[order])
    renamed.train_mask = permuted.train_mask[order]
    torch.testing.assert_close(task.objective.example(renamed, "test").x, x[order])


@pytest.mark.parametrize("name", TASKS)
def test_labels_of_validation_and_test_change_no_weight(name: str):
    def weights(task: Task) -> list[torch.Tensor]:
        module: Any = setup(task.reading_labels(0.5))
        optimizer = module.optimisation.configure(module.parameters(), module.parameters(), None)[0]
        for epoch in range(3):
            module.begin_epoch(0, epoch)
            optimizer.zero_grad()
            module._loss(task.train[0])[0].backward()
            optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    other = TASKS[name]()
    (data,) = other.train
    data.y[~data.train_mask] = data.y[~data.train_mask].flip(0)
    for a, b in zip(weights(TASKS[name]()), weights(other), strict=True):
        assert torch.equal(a, b)


def test_a_stack_reads_what_each_seed_reads_alone():
    task = quantities_of_nodes().reading_labels(0.5)
    models = [GAT(6 + task.objective.num_labels, 4, 2, 3, heads=2) for _ in range(2)]
    alone: list[Any] = [Transductive(model, task.objective) for model in models]
    stack: Any = Stacked(models, [Member(seed, task.objective) for seed in (3, 5)])
    for epoch in (0, 1):
        sums = []
        for seed, module in zip((3, 5), alone, strict=True):
            module.begin_epoch(seed, epoch)
            sums.append(module._loss(task.train[0])[1])
        stack.begin_epoch(0, epoch)
        torch.testing.assert_close(stack._loss(task.train[0])[1], torch.stack(sums))


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match=r"needs labels of the nodes of one graph, but many predicts 3 node labels of"):
        many_graphs().reading_labels(0.5)
    assert Transductive(torch.nn.Linear(6, 3), one_graph().objective).objective.num_labels == 0
