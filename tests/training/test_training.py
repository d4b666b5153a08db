"""A step of training: loss, scores and gradients; the receptive field; the graphs of each process; progress."""

from __future__ import annotations

import csv
import math
import os
import re
import select
import struct
import sys
import types
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAT

from gat_pyg.distributed.ranks import rank_zero_print
from gat_pyg.features import SparseFeatures
from gat_pyg.graph import adjacency
from gat_pyg.models import GAT as GAT_PYG
from gat_pyg.models.change import Change
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.tasks.objective import Objective
from gat_pyg.training import Inductive, Optimisation, PaperStopping, Resumable, TaskData, Transductive
from gat_pyg.training.epoch_seeds import seed_epoch
from gat_pyg.training.loading import sparse_pays
from gat_pyg.training.progress import Progress
from tests.laws import assert_close
from tests.objectives import LABELLED, OBJECTIVES, WITH_GRAPHS, graph, headed, many_graphs, objective, one_graph, setup
from tests.training.loaders import Place, pytestmark, trainer  # noqa: F401 (marks of this file)


def objective_of(y: Tensor) -> Objective:
    return objective(y.is_floating_point())


# Loss and score -----------------------------------------------------------------------------------------------------


def test_loss_and_score_by_hand():
    out = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    y = torch.tensor([0, 1, -1])
    assert objective_of(y).loss(out, y).item() == pytest.approx((math.log(2) + math.log(1 + math.exp(2))) / 2)
    assert objective_of(y).score(objective_of(y).statistics(out, y).tolist()) == 50.0
    y = torch.tensor([[1.0, float("nan")], [0.0, float("nan")], [1.0, 1.0]])
    # positive: (1, 0), wrong; (2, 1), right; missed: (0, 0) and (2, 0), whose logits are 0 and not above
    loss = (math.log(2) + math.log(1 + math.exp(2)) + math.log(2) + math.log(1 + math.exp(-3))) / 4
    assert objective_of(y).loss(out, y).item() == pytest.approx(loss)
    sums = objective_of(y).statistics(out, y).tolist()
    assert sums[:2] == [pytest.approx(4 * loss), 4]
    assert objective_of(y).score(sums) == 2 / (2 + 1 + 2)


@given(st.integers(0, 1000), st.floats(0, 0.9))
@settings(deadline=None, max_examples=50)
def test_no_prediction_that_is_the_same_for_all_nodes_scores_more_than_the_majority(seed: int, unknown: float):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.rand(12, 4, generator=draw) < unknown
    hidden[0] = False
    labels = (torch.rand(12, 4, generator=draw) < torch.rand(4, generator=draw)).float()
    for y, constants in (
        (labels.masked_fill(hidden, float("nan")), product((-1.0, 1.0), repeat=4)),
        (torch.randint(4, (12,), generator=draw).masked_fill(hidden[:, 0], -1), torch.eye(4).tolist()),
    ):
        labels_of = objective_of(y)
        outs = [torch.tensor(each).expand(12, 4) for each in constants]
        scores = [labels_of.score(labels_of.statistics(out, y).tolist()) for out in outs]
        assert labels_of.constant_score(y) == pytest.approx(max(scores))


@pytest.mark.parametrize(
    "y",
    [torch.tensor([-1, -1]), torch.full((2, 3), math.nan), torch.tensor([[1.0, math.nan, 0.0], [0.0, 1.0, 1.0]])],
)
def test_an_unknown_label_gets_no_gradient(y: Tensor):
    out = torch.randn(2, 3, requires_grad=True)
    loss = objective_of(y).loss(out, y)
    loss.backward()
    known = (y == y) & (y >= 0)
    assert out.grad is not None
    assert torch.equal(out.grad != 0, known if y.dim() == 2 else known[:, None].expand(2, 3))
    assert known.any() or loss.item() == 0


def test_predictions_of_links_of_sampled_graphs_and_of_loaders_of_ones_own():
    links, nodes = OBJECTIVES["links"](), OBJECTIVES["quantities of nodes"]()
    module, data = setup(links), links.test[0]
    (predicted,) = trainer().predict(module, datamodule=TaskData(links))
    src, dst = data.edge_label_index[:, data.test_mask]
    with torch.no_grad():
        z = module.model.eval()(data.x, data.edge_index)
    assert_close(predicted, (z[src] * z[dst]).sum(-1).sigmoid())
    for model in (GAT_PYG(6, 4, 3, 2, num_layers=2), GAT(6, 4, 2, 3)):  # one of them layer by layer
        module = Transductive(model, nodes.objective)
        whole, sampled = (
            trainer().predict(module, datamodule=TaskData(nodes, batch_size=9, num_neighbors=numbers))[0]
            for numbers in (None, [-1, -1])
        )
        assert_close(sampled, whole)
        assert whole.shape == (30, 3) and whole[:, 0].mean() > 50  # in the unit of y
    graphs = OBJECTIVES["quantities of graphs, by MAE"]()
    module, union = setup(graphs), Batch.from_data_list(graphs.test)
    own = Data(union.x, union.edge_index, batch=union.batch)  # no Batch, without labels
    (predicted,) = trainer().predict(module, dataloaders=DataLoader([own], batch_size=None))
    assert_close(predicted, torch.cat(trainer().predict(module, datamodule=TaskData(graphs))))


@pytest.mark.parametrize("name", LABELLED)
def test_scores_that_are_logged_are_those_of_the_whole_split(name: str):
    task = OBJECTIVES[name]()
    module, rule = setup(task), PaperStopping()
    fitted = trainer(rule, epochs=1)
    fitted.fit(module, datamodule=TaskData(task, batch_size=2))
    assert {"train_loss", "val_loss"} < fitted.callback_metrics.keys()
    scores = fitted.test(module, datamodule=TaskData(task, batch_size=2), verbose=False)[0]
    batch = Batch.from_data_list(task.test)
    rows = batch.test_mask if not task.has_many_graphs else torch.ones(len(batch.y), dtype=torch.bool)
    with torch.no_grad():
        out, y = module.eval()(batch)[rows], batch.y[rows]
    parts = fitted.predict(module, datamodule=TaskData(task, batch_size=2))
    predicted = torch.cat(parts)  # type: ignore[arg-type]
    of_rows = task.objective.item == "edge" or task.has_many_graphs
    assert_close(predicted if of_rows else predicted[rows], task.objective.predictions(out), name)
    metric = task.objective.metric
    if task.objective.by_rows:
        assert scores[f"test_{metric.name}"] == pytest.approx(task.objective.measure(out, y), rel=1e-5)
    elif task.objective.columns == "labels":
        known = ~y.isnan()
        expected = f1_score(y[known].numpy(), (out[known] > 0).numpy())
        assert scores["test_micro_f1"] == pytest.approx(expected, rel=1e-6)
    else:
        assert scores["test_accuracy"] == pytest.approx(100 * accuracy_score(y.numpy(), out.argmax(1).numpy()))
    assert scores["test_loss"] == pytest.approx(task.objective.loss(out, y).item(), rel=1e-5)


def test_loggers_and_callbacks_get_the_metrics(tmp_path: Path):
    task = one_graph()
    fitted = trainer(PaperStopping(), epochs=3, log_every_n_steps=1)
    fitted.loggers = [CSVLogger(tmp_path, name="", version="")]
    metrics_seen: list[dict[str, float]] = []

    class See(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            metrics_seen.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    fitted.callbacks.append(See())
    fitted.fit(setup(task), datamodule=TaskData(task))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1"), ("1", "2"), ("2", "3")]
    for row, metrics in zip(rows, metrics_seen, strict=True):
        assert metrics.keys() == {"train_loss", "val_loss", "val_accuracy"}
        assert {key: pytest.approx(value) for key, value in metrics.items()} == {k: float(row[k]) for k in metrics}
    assert fitted.validate(setup(task), datamodule=TaskData(task), verbose=False)[0].keys() == {
        "val_loss",
        "val_accuracy",
    }


class Smoothed(nn.Linear):
    def decayed_parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        src, dst = data.edge_index
        return (out[src] - out[dst]).square().mean()


def test_a_model_may_declare_a_penalty_and_the_decayed_parameters():
    data = one_graph().train[0]
    model = Smoothed(6, 3)
    module, bare = (
        Transductive(model, NodeLabels(3), Optimisation(lr=0.1, weight_decay=0.3)),
        Transductive(nn.Linear(6, 3), NodeLabels(3)),
    )
    bare.model.load_state_dict(model.state_dict())
    loss, sums = module._loss(data)
    plain, plain_sums = bare._loss(data)
    assert loss.item() == pytest.approx((plain + model.penalty(model(data.x), data)).item())
    assert sums.equal(plain_sums)  # the logged loss is that of the labels
    groups = module.configure_optimizers().param_groups
    assert [(group["params"], group["weight_decay"]) for group in groups] == [
        ([model.weight], 0.3),
        ([model.bias], 0.0),
    ]

    (group,) = bare.configure_optimizers().param_groups  # L2 acts on biases too
    assert group["params"] == list(bare.parameters()) and (group["lr"], group["weight_decay"]) == (0.005, 0.0)


def test_an_epoch_is_that_of_a_bare_loop():
    task = one_graph()
    module = setup(task)
    resumable = Resumable(None, seed=3)
    trainer(resumable, epochs=4).fit(module, datamodule=TaskData(task))
    bare, data = setup(task).model, task.train[0]
    optimizer = torch.optim.Adam(bare.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(4):
        seed_epoch(3, 0, epoch)
        optimizer.zero_grad()
        out = bare(data.x, data.edge_index)[data.train_mask]
        (F.cross_entropy(out, data.y[data.train_mask], reduction="sum") / 10).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), module.model.parameters(), strict=True))


# The cost of a step ---------------------------------------------------------------------------------------------------


WAITS = ("nonzero", "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "unique", "item", "bincount")


class Ops(TorchDispatchMode):
    """The operations of a piece of code that make the CPU wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in tree_leaves(args) if is_tensor(t))
        if by_mask or name.startswith(WAITS) or name.startswith("_unique"):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", LABELLED)
def test_a_step_never_waits_for_the_device(name: str, sparse: bool):
    task = OBJECTIVES[name]()
    module = setup(task)
    module.model = GAT_PYG(6, [4, 4], 3, [2, 2, 1], dropout=0.5, residual=[False, True, False])
    module.model = headed(module.model, task)
    module._inspect_model(module.model)
    (data, *_) = TaskData(task, sparse=sparse and not task.has_many_graphs).train_dataloader()
    data.x = SparseFeatures(data.x) if sparse and not task.has_many_graphs else data.x  # which Ops cannot look into
    module._loss(data)[0].backward()  # neighbourhoods, patterns and rows are found at the first step
    with Ops() as ops:
        module._loss(data)[0].backward()
    assert not ops.waits
    with Ops() as ops:
        data.y[data.y == data.y]
    assert ops.waits  # it would be seen


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_output_of_another_shape_is_an_error(name: str):
    """The columns beyond K would be read as the labels by a score that needs all rows."""
    task = OBJECTIVES[name]()
    (data, *_) = TaskData(task, batch_size=5).train_dataloader()
    wrong = [lambda out: out[:, 0], lambda out: torch.cat([out, out], 1), lambda out: torch.cat([out, out])]
    for change in wrong if task.objective.has_columns else [lambda out: out[:, :1]]:
        module = setup(task)
        module.model.register_forward_hook(lambda _, __, out, change=change: change(out))
        with pytest.raises(ValueError, match=r"The model returns \(.*\), expected "):
            module._loss(data)


class Rows(nn.Linear):
    num_hops = 0


class Centred(nn.LayerNorm):
    """A norm of a user's own, which reads all nodes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GAT_PYG(6, [4], 3, [2, 1]),
        lambda: GAT_PYG(6, [4, 4], 3, [2, 2, 1], reproduction=True),
        lambda: GAT_PYG(6, [4], 3, [2, 1], norm=Centred),
        lambda: Change(GAT_PYG(6, [4], 3, [2, 1]), [0, 2], [2] * 3, [0.0] * 3, [1.0] * 3),
        lambda: Rows(6, 3),
    ],
    ids=["GAT", "authors", "own norm", "change", "no edges"],
)
def test_a_step_on_the_receptive_field_is_one_on_the_whole_graph(make: Callable[[], nn.Module]):
    N = 400
    data = graph(N, 3, seed=0)
    data.x, data.edge_index = data.x.double(), data.edge_index[:, :300]
    data.train_mask, data.val_mask, data.test_mask = (torch.arange(N) % 20 == k for k in range(3))
    module, results = Transductive(make().double(), NodeLabels(3)), []
    for num_hops in (None, module._num_hops):
        module._num_hops = num_hops
        module._fields.clear()
        module.zero_grad()
        loss, sums = module._loss(data)
        loss.backward()
        counts = [module._counts(data, split) for split in ("val", "test")]
        results.append([loss, sums, *counts, *(p.grad for p in module.parameters())])
        assert (module._field_of(data, "train").num_nodes < N) is (num_hops is not None)
        assert module._field_of(data, "train") is module._field_of(data, "train")
    for whole, field in zip(*results, strict=True):
        assert_close(field, whole)


def test_the_receptive_field_follows_changes_of_the_graph():
    data = graph(400, 3, seed=0)
    data.edge_index = data.edge_index[:, :300]
    data.train_mask = torch.arange(400) % 20 == 0
    module = Transductive(GAT_PYG(6, [4], 3, [2, 1]), NodeLabels(3))
    first = module._field_of(data, "train")
    data.x.mul_(2)
    second = module._field_of(data, "train")
    assert second.x.equal(2 * first.x)
    data.train_mask = torch.arange(400) % 20 == 1
    assert module._field_of(data, "train").n_id[0] == 1
    data.x.requires_grad_()
    assert module._field_of(data, "train") is data


def test_a_graph_that_is_nearly_all_receptive_field_stays_whole():
    (data,) = TaskData(one_graph()).train_dataloader()
    module = Transductive(GAT_PYG(6, [4], 3, [2, 1]), NodeLabels(3))
    data.train_mask = torch.ones_like(data.train_mask)
    data.num_sampled_nodes, data.num_sampled_edges = [24], []  # a loader's, of fewer hops than the model has
    assert module._field_of(data, "train") is data
    assert module._loss(data)[0].isfinite()


@pytest.mark.parametrize("name", ["nodes of one graph", "nodes of many graphs"])
def test_neighbourhoods_are_built_once_for_all_layers(name: str, monkeypatch: pytest.MonkeyPatch):
    task, built = OBJECTIVES[name](), []
    find = adjacency.get_result  # called as a structure is built
    monkeypatch.setattr(adjacency, "get_result", lambda *args: built.append(args) or find(*args))
    kind = Inductive if task.has_many_graphs else Transductive
    module = kind(GAT_PYG(6, [4, 4], 3, [2, 2, 1]), task.objective)
    trainer(epochs=3).fit(module, datamodule=TaskData(task, batch_size=2))
    # 3 layers see less each, of training and of validation nodes, in all epochs; 5 graphs are 3 batches, new in each of
    # 3 epochs, and 3 graphs are 2 batches for validation, which stay
    assert len(built) == (3 * 3 + 2 if task.has_many_graphs else 3 * 2)


@pytest.mark.parametrize(
    "name", ["nodes of many graphs, many labels", pytest.param("nodes of one graph", marks=pytest.mark.weekly)]
)
def test_a_compiled_model_takes_the_same_steps(name: str):
    states = []
    for compiled in (False, True):
        task, model = OBJECTIVES[name](), GAT_PYG(6, [4], 3, [2, 2]).double()  # in float32, Adam makes much of rounding
        for data in {id(data): data for data in (*task.train, *task.val)}.values():
            data.x = data.x.double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        kind = Inductive if task.has_many_graphs else Transductive
        module = kind(model, task.objective, Optimisation(lr=0.01))
        trainer(epochs=2).fit(module, datamodule=TaskData(task, batch_size=8))  # one shape to compile
        states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)


# Graphs of each process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate", ["validate", "test"])
def test_a_graph_may_be_tested_before_it_is_trained_on(evaluate: str):
    task = one_graph()
    module, data = setup(task), TaskData(task)
    getattr(trainer(precision="64-true"), evaluate)(module, datamodule=data, verbose=False)  # copies it to float64
    trainer(precision="64-true", epochs=1).fit(module, datamodule=data)
    (batch,) = data.train_dataloader()
    assert batch.x.dtype == torch.float64 and not batch.x.is_inference()


@pytest.mark.parametrize(("density", "pays"), [(0.1, True), (0.4, False)])
def test_sparse_features_where_they_pay(density: float, pays: bool):
    task = one_graph()
    x = torch.zeros(180)
    x[: int(180 * density)] = 1
    task.train[0].x = x.view(30, 6)
    sparse_model = GAT_PYG(6, [2], 3, [2, 1])
    assert not sparse_pays(task, GAT(6, 4, 2, 3)) and not sparse_pays(many_graphs(), sparse_model)
    for device in ("cpu", "cuda", "mps"):
        stack, alone = (sparse_pays(task, sparse_model, device, stacked=stacked) for stacked in (True, False))
        assert (stack, alone) == (pays and device != "mps", pays and device == "cpu")
    data = TaskData(task, sparse=True)
    (graph,), (again,) = data.train_dataloader(), data.val_dataloader()
    assert graph is again and graph.x.layout == torch.sparse_csr and torch.equal(graph.x.to_dense(), task.train[0].x)
    assert task.train[0].x.layout == torch.strided


def test_the_order_of_training_graphs_follows_from_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        loader = TaskData(many_graphs(), seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [len(data.x) for data in loader]

    before = torch.random.get_rng_state()
    assert order(0, 1) == order(0, 1)
    assert torch.equal(before, torch.random.get_rng_state())  # the epoch's dropout is left alone
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) > 5
    assert sorted(order(5, 5)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_a_step_of_several_processes_is_that_of_one(name: str, world: int, monkeypatch: pytest.MonkeyPatch):
    task = OBJECTIVES[name]()
    module = setup(task, dropout=0.0).double()

    def batches(rank: int, world: int) -> list[Data]:
        data = TaskData(task, batch_size=4)
        data.trainer = Place(rank, world)
        return [
            batch.apply(lambda value: value.double() if value.is_floating_point() else value)
            for batch in data.train_dataloader()
        ]

    def grads(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(module.parameters())))

    steps = list(zip(*(batches(rank, world) for rank in range(world)), strict=True))
    whole = batches(0, 1)
    assert len(steps) == len(whole) == 2  # of 5 graphs, the second step has one: all others are padded
    module._trainer = types.SimpleNamespace(world_size=world)
    for step, batch in zip(steps, whole, strict=True):
        loss, sums = module._loss(batch)
        parts = [module._loss(own) for own in step]
        n = sum(own[1] for _, own in parts)
        torch.testing.assert_close(sum(own for _, own in parts), sums)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda size, n=n: size.copy_(n))
        each = [grads(module._weighted(own, own_sums[1])) for own, own_sums in parts]
        for expected, *others in zip(grads(loss), *each, strict=True):
            torch.testing.assert_close(sum(others) / world, expected)


# Progress -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LABELLED)
def test_progress_shows_epoch_loss_score_and_end(name: str, capsys: pytest.CaptureFixture[str]):
    task = OBJECTIVES[name]()
    callbacks = [PaperStopping(patience=50), Progress("mine", every=0.0)]
    trainer(*callbacks, epochs=2).fit(setup(task), datamodule=TaskData(task, batch_size=2))
    metric = task.objective.metric
    score = r"\d+\.\d %" if metric.name == "accuracy" else rf"{metric.title} \d+\.\d{{3}}"
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"mine  epoch 2  loss [\d.e-]+  val {score}  ends at 2  [\d.]+ m?s/epoch", last), last


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_progress_leaves_no_rows_in_a_terminal_that_is_resized(monkeypatch: pytest.MonkeyPatch):
    import fcntl
    import pty
    import termios

    screen, terminal = pty.openpty()
    widths = iter((200, 80, 100, 30, 120, 80))

    class Resized(Progress):
        def _show(self, trainer: Trainer, batch: str) -> None:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, next(widths), 0, 0))
            super()._show(trainer, batch)
            self._next = 0.0
            if trainer.current_epoch == 3:
                rank_zero_print("a message")

    task = one_graph()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = Resized("a data set with a rather long name, seed 12")
        trainer(PaperStopping(patience=9), progress, epochs=6).fit(setup(task), datamodule=TaskData(task))
        shown = ""
        while select.select([screen], [], [], 0.2)[0]:  # the kernel passes on what was written a part at a time
            shown += os.read(screen, 10_000).decode()
    os.close(screen)
    rows = [line.split("\r\x1b[K")[-1] for line in shown.split("\r\n")]
    assert rows == ["a message", ""]  # what is left
    lengths = [len(text) for text in re.split(r"\r\x1b\[K|\r\n", shown) if "a data set" in text]
    assert len(lengths) == 6 and lengths[3] == 29 and 60 < max(lengths) < 80  # no row wraps, also in the next width


def test_progress_within_an_epoch_shows_the_loss_of_the_epoch_before(capsys: pytest.CaptureFixture[str]):
    progress, losses = Progress("mine", every=1e9), []

    class Turn(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            if trainer.current_epoch == 3:
                progress._next = 0.0  # epochs 1 and 2 have ended between two lines

    task = many_graphs()
    trainer(progress, Turn(), epochs=4).fit(setup(task), datamodule=TaskData(task, batch_size=1))
    assert f"mine  epoch 4 batch 1/{len(task.train)}  loss {losses[2]:.3g}" in capsys.readouterr().err.splitlines()[-1]
