from __future__ import annotations

import csv
import errno
import gc
import io
import math
import os
import pickle
import re
import signal
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, is_tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAT, GCN, MLP

from gat_pyg.data import Task
from gat_pyg.distributed.halo import HaloStrategy
from gat_pyg.features import SparseFeatures
from gat_pyg.files import full
from gat_pyg.graph import adjacency, remembered
from gat_pyg.models import GAT as GAT_PYG
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import Objective
from gat_pyg.training import (
    Inductive,
    Optimisation,
    PaperStopping,
    Resumable,
    SafeCheckpoints,
    Transductive,
    cuda_graphs,
)
from gat_pyg.training.cuda_graphs import Captured, CudaGraphs, _components, _plain_tensors
from gat_pyg.training.epoch_seeds import seed_epoch
from gat_pyg.training.loading import TaskData, sparse_pays
from gat_pyg.training.progress import MetricsFile, Progress
from gat_pyg.training.shares import Batches
from tests.laws import assert_close
from tests.objectives import LABELLED, OBJECTIVES, WITH_GRAPHS, graph, headed, many_graphs, objective, one_graph, setup

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Graphs this small are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def objective_of(y: Tensor) -> Objective:
    return objective(y.is_floating_point())


def trainer(*callbacks: Callback, epochs: int = 5, accelerator: str = "cpu", **arguments: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        accelerator=accelerator,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **arguments,
    )


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


@given(st.integers(0, 1000), st.floats(0, 1), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_pooled_scores_are_those_of_scikit_learn(seed: int, unknown: float, batches: int):
    draw = torch.Generator().manual_seed(seed)
    out = torch.randn(24, 5, generator=draw)
    hidden = torch.rand(24, 5, generator=draw) < unknown
    y = torch.rand(24, 5, generator=draw).round()
    y = y.masked_fill(hidden, float("nan"))
    many, single = NodeMultiLabels(5), NodeLabels(5)
    sums = sum(many.statistics(a, b) for a, b in zip(out.chunk(batches), y.chunk(batches), strict=True)).tolist()
    loss, score = sums[0] / max(sums[1], 1), many.score(sums)
    if not hidden.all():
        assert score == pytest.approx(f1_score(y[~hidden].numpy(), (out > 0)[~hidden].numpy(), zero_division=0.0))
        assert loss == pytest.approx(F.binary_cross_entropy_with_logits(out[~hidden], y[~hidden]).item(), rel=1e-5)
    classes = torch.randint(5, (24,), generator=draw).masked_fill(hidden[:, 0], -1)
    sums = sum(single.statistics(a, b) for a, b in zip(out.chunk(batches), classes.chunk(batches), strict=True))
    known = classes >= 0
    if known.any():
        accuracy = accuracy_score(classes[known].numpy(), out.argmax(1)[known].numpy())
        assert single.score(sums.tolist()) == pytest.approx(100 * accuracy)


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


def test_many_labels_are_averaged_over_labels_then_nodes():
    out, y = torch.randn(7, 4), torch.rand(7, 4).round()
    each = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    torch.testing.assert_close(objective_of(y).loss(out, y), each.mean(1).mean(0))


def test_the_loss_is_as_wide_as_the_logits():
    out, y = torch.randn(7, 4, dtype=torch.float64), torch.rand(7, 4).round()
    expected = F.binary_cross_entropy_with_logits(out, y.double())
    torch.testing.assert_close(objective_of(y).loss(out, y), expected)


@pytest.mark.parametrize("y", [torch.tensor([-1, -1]), torch.full((2, 3), float("nan"))])
def test_a_batch_without_a_known_label_moves_nothing(y: Tensor):
    out = torch.randn(2, 3, requires_grad=True)
    loss = objective_of(y).loss(out, y)
    loss.backward()
    assert loss.item() == 0
    assert out.grad is not None
    assert not out.grad.any()


def test_an_unknown_label_gets_no_gradient():
    out = torch.randn(2, 2, requires_grad=True)
    objective_of(torch.tensor([[1.0, float("nan")], [0.0, 1.0]])).loss(
        out, torch.tensor([[1.0, float("nan")], [0.0, 1.0]])
    ).backward()
    assert out.grad is not None
    assert (out.grad == 0).tolist() == [[False, True], [False, False]]


class Seen(nn.Module):
    """Notes how it was called."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        self.seen = edge_attr
        return x


def test_the_model_gets_what_it_takes():
    data = graph(5, 3, 0, edge_attr=torch.ones(15, 2))
    model = Seen()
    assert torch.equal(Inductive(model, NodeLabels(3))(data), data.x)
    assert model.seen is data.edge_attr
    mlp = MLP([6, 4, 3], norm=None).eval()
    torch.testing.assert_close(Inductive(mlp, NodeLabels(3))(data), mlp(data.x))
    gcn = GCN(6, 4, 2, 3).eval()  # takes an edge_attr by name, and refuses it
    torch.testing.assert_close(Inductive(gcn, NodeLabels(3))(data), gcn(data.x, data.edge_index))


@pytest.mark.parametrize("name", LABELLED)
def test_scores_that_are_logged_are_those_of_the_whole_split(name: str):
    task = OBJECTIVES[name]()
    module, rule = setup(task), PaperStopping()
    fitted = trainer(rule, epochs=3)
    fitted.fit(module, datamodule=TaskData(task, batch_size=2))
    assert {"train_loss", "val_loss"} < fitted.callback_metrics.keys()
    scores = fitted.test(module, datamodule=TaskData(task, batch_size=2), verbose=False)[0]
    batch = Batch.from_data_list(task.test)
    rows = batch.test_mask if not task.has_many_graphs else torch.ones(len(batch.y), dtype=torch.bool)
    with torch.no_grad():
        out, y = module.eval()(batch)[rows], batch.y[rows]
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


def test_a_logger_and_callbacks_get_what_is_told(tmp_path: Path):
    task = one_graph()
    fitted = trainer(PaperStopping(), epochs=3, log_every_n_steps=1)
    fitted.loggers = [CSVLogger(tmp_path, name="", version="")]
    seen: list[dict[str, float]] = []

    class See(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    fitted.callbacks.append(See())
    fitted.fit(setup(task), datamodule=TaskData(task))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1"), ("1", "2"), ("2", "3")]
    for row, metrics in zip(rows, seen, strict=True):
        assert metrics.keys() == {"train_loss", "val_loss", "val_accuracy"}
        assert {key: pytest.approx(value) for key, value in metrics.items()} == {k: float(row[k]) for k in metrics}
    assert fitted.validate(setup(task), datamodule=TaskData(task), verbose=False)[0].keys() == {
        "val_loss",
        "val_accuracy",
    }


def test_l2_acts_on_biases_too():
    module = Transductive(GCN(6, 4, 2, 3), NodeLabels(3), Optimisation(lr=0.1, weight_decay=5e-4))
    optimizer = module.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 5e-4)]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.parameters()))


class Smoothed(nn.Linear):
    def decayed_parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        src, dst = data.edge_index
        return (out[src] - out[dst]).square().mean()


def test_a_model_says_what_decays_and_what_is_added_to_the_loss():
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
    assert sums.equal(plain_sums)  # what is told is the loss of the labels
    groups = module.configure_optimizers().param_groups
    assert [(group["params"], group["weight_decay"]) for group in groups] == [
        ([model.weight], 0.3),
        ([model.bias], 0.0),
    ]


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


# What a step costs -------------------------------------------------------------------------------------------------


WAITS = ("nonzero", "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "unique", "item", "bincount")


class Ops(TorchDispatchMode):
    """Which operations a piece of code runs, of those that make the CPU wait for a GPU."""

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


class Rows(nn.Linear):
    num_hops = 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: GAT_PYG(6, [4], 3, [2, 1]),
        lambda: GAT_PYG(6, [4, 4], 3, [2, 2, 1], reproduction=True),
        lambda: Rows(6, 3),
    ],
    ids=["GAT", "authors", "no edges"],
)
def test_a_step_on_what_is_seen_is_one_on_the_whole_graph(make: Callable[[], nn.Module]):
    N = 400
    data = graph(N, 3, seed=0)
    data.x, data.edge_index = data.x.double(), data.edge_index[:, :300]
    data.train_mask, data.val_mask, data.test_mask = (torch.arange(N) % 20 == k for k in range(3))
    module, found = Transductive(make().double(), NodeLabels(3)), []
    for num_hops in (None, module._num_hops):
        module._num_hops = num_hops
        module._fields.clear()
        module.zero_grad()
        loss, sums = module._loss(data)
        loss.backward()
        counts = [module._counts(data, split) for split in ("val", "test")]
        found.append([loss, sums, *counts, *(p.grad for p in module.parameters())])
        assert (module._field_of(data, "train").num_nodes < N) is (num_hops is not None)
        assert module._field_of(data, "train") is module._field_of(data, "train")
    for whole, seen in zip(*found, strict=True):
        assert_close(seen, whole)


def test_what_is_seen_follows_the_graph():
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


def test_where_nearly_all_is_seen_the_graph_stays_whole():
    (data,) = TaskData(one_graph()).train_dataloader()
    module = Transductive(GAT_PYG(6, [4], 3, [2, 1]), NodeLabels(3))
    data.train_mask = torch.ones_like(data.train_mask)
    data.num_sampled_nodes, data.num_sampled_edges = [24], []  # a loader's, of fewer hops than the model has
    assert module._field_of(data, "train") is data
    assert module._loss(data)[0].isfinite()


@pytest.mark.parametrize("name", ["nodes of one graph", "nodes of many graphs"])
def test_neighbourhoods_are_built_once_for_all_layers(name: str, monkeypatch: pytest.MonkeyPatch):
    task, built = OBJECTIVES[name](), []
    build = adjacency._dropout_ids  # looked at as a structure is built
    monkeypatch.setattr(adjacency, "_dropout_ids", lambda *args: built.append(args) or build(*args))
    kind = Inductive if task.has_many_graphs else Transductive
    module = kind(GAT_PYG(6, [4, 4], 3, [2, 2, 1]), task.objective)
    trainer(epochs=3).fit(module, datamodule=TaskData(task, batch_size=2))
    # 3 layers see less each, of training and of validation nodes, in all epochs; 5 graphs are 3 batches, new in each of
    # 3 epochs, and 3 graphs are 2 batches for validation, which stay
    assert len(built) == (3 * 3 + 2 if task.has_many_graphs else 3 * 2)


class FakeGraph:
    """A CUDA graph on a CPU: a replay computes anew and leaves the results in the same memory."""

    replays = 0
    cuda: FakeCuda

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.pool, self.valid = pool or self.cuda.graph_pool_handle(), True
        self.cuda.recording = self
        self.cuda.pools.append(self.pool)
        self.cuda.generator_is_recorded = True

    def capture_end(self) -> None:
        self.cuda.recording = None
        if self.valid or self.cuda.ends_failures:
            self.cuda.pools.remove(self.pool)
            self.cuda.generator_is_recorded = False
        if not self.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        FakeGraph.replays += 1
        for held, new in zip(self.captured.results, self.captured.compute(), strict=True):
            if held is not None:
                held.copy_(new)


class FakeCaptured(Captured):
    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        super().__init__(compute, buffers)
        self.compute, self.graph.captured = compute, self


class FakeCuda:
    """What a capture needs of torch.cuda, on the CPU, in the state that torch leaves it in where a capture fails.

    What `torch.cuda.graph` and `torch.cuda.stream` do in Python is torch's own.
    """

    def __init__(self, ends_failures: bool) -> None:
        self.ends_failures = ends_failures  # as torch 2.13 does; before, allocator and generator stay in the capture
        self.handles = 0
        self.pools: list[Any] = []  # that the allocator takes memory from for a capture
        self.recording: FakeGraph | None = None
        self.generator_is_recorded = False
        self.default = self.stream = self.new_stream()
        self.sync_mode = 0
        self.events: list[Any] = []

    def new_stream(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(device=0, wait_stream=lambda other: None)

    def set_stream(self, stream: types.SimpleNamespace) -> None:
        self.stream = stream

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def empty_cache(self) -> None:
        assert not self.pools, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def set_sync_debug_mode(self, mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)
        self.sync_mode = {"error": 2}.get(mode, mode)

    def is_usable(self) -> bool:
        return self.stream is self.default and not (self.generator_is_recorded or self.pools or self.sync_mode)


@pytest.fixture(params=[False, True], ids=["torch 2.11", "torch 2.13"])
def both_cudas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return faked(monkeypatch, request.param)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return faked(monkeypatch, False)


def faked(monkeypatch: pytest.MonkeyPatch, ends_failures: bool) -> FakeCuda:
    fake, zeros = FakeCuda(ends_failures), torch.zeros
    own = {
        "CUDAGraph": FakeGraph,
        "Stream": fake.new_stream,
        "current_stream": lambda device=None: fake.stream,
        "set_stream": fake.set_stream,
        "current_device": lambda: 0,
        "_get_device_index": lambda *given: 0,
        "synchronize": lambda: None,
        "empty_cache": fake.empty_cache,
        "graph_pool_handle": fake.graph_pool_handle,
        "get_sync_debug_mode": lambda: fake.sync_mode,
        "set_sync_debug_mode": fake.set_sync_debug_mode,
        "get_rng_state": torch.get_rng_state,  # the CPU's generator is the device's,
        "set_rng_state": torch.set_rng_state,
    }
    for name, value in own.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.empty(0, dtype=torch.uint8))  # and there is no other
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    monkeypatch.setattr(cuda_graphs, "Captured", FakeCaptured)
    monkeypatch.setattr(CudaGraphs, "_obstacle", lambda self, module: None)
    monkeypatch.setattr(FakeGraph, "cuda", fake, raising=False)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    return fake


def trained(
    task: Task, enabled: Any, accelerator: str = "cpu", model: nn.Module | None = None, *callbacks: Callback
) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    model = GAT(6, 4, 2, 3, heads=2, dropout=0.5, norm="batch_norm") if model is None else model  # which has buffers
    model.idle = nn.Parameter(torch.ones(2))  # without a gradient, it stays as it is
    module, rule = Transductive(model, task.objective, Optimisation(0.01, 5e-4), enabled), PaperStopping()
    callbacks = rule, Resumable(None, seed=3), *callbacks
    fitted = trainer(*callbacks, epochs=EPOCHS, gradient_clip_val=0.5, accelerator=accelerator)
    fitted.fit(module, datamodule=TaskData(task))
    assert not module.cuda_graphs._repeated
    return module.cpu().state_dict(), [rule.best_loss, float(fitted.callback_metrics["train_loss"])]


EPOCHS = 4  # of which the first runs as it is, and the second is captured


def assert_same(found: tuple[dict[str, Tensor], list[float]], expected: tuple[dict[str, Tensor], list[float]]) -> None:
    assert found[1] == expected[1]
    assert all(torch.equal(value, found[0][key]) for key, value in expected[0].items())


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.usefixtures("cuda")
def test_a_captured_step_is_a_step(multilabel: bool):
    task = one_graph(multilabel)
    plain, captured = trained(task, False), trained(task, True)
    assert FakeGraph.replays == 2 * (EPOCHS - 1)  # training and validation
    assert_same(captured, plain)
    assert torch.equal(plain[0]["model.idle"], torch.ones(2))


class Normed(nn.Module):
    """Our GAT, with buffers that change in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gat, self.norm = GAT_PYG(6, [4], 3, [2, 1], dropout=0.5), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(self.gat(x, edge_index))
        return out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("multilabel", [False, True])
def test_a_captured_step_is_a_step_on_a_gpu(multilabel: bool, monkeypatch: pytest.MonkeyPatch):
    captured = []
    call = Captured.__call__
    monkeypatch.setattr(Captured, "__call__", lambda self: captured.append(self) or call(self))
    task = one_graph(multilabel)

    plain, replayed = trained(task, False, "gpu", Normed()), trained(task, True, "gpu", Normed())
    assert len(captured) == 2 * (EPOCHS - 1)
    assert plain[1] == pytest.approx(replayed[1], rel=1e-5)
    for key, value in plain[0].items():
        torch.testing.assert_close(replayed[0][key], value, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_step_that_waits_trains_on_without_a_graph_on_a_gpu():
    """PyG's GAT adds self-loops by a boolean mask, whose size the host waits for."""
    task = one_graph()
    plain = trained(task, False, "gpu")
    with pytest.warns(UserWarning, match=r"cannot be captured as a CUDA graph: .*synchronizing CUDA operation \(in "):
        fallen = trained(task, True, "gpu")
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    F.dropout(torch.ones(3, device="cuda"))  # the generator is usable
    torch.cuda.empty_cache()  # and so is the allocator
    assert plain[1] == pytest.approx(fallen[1], rel=1e-5)
    for key, value in plain[0].items():
        torch.testing.assert_close(fallen[0][key], value, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_after_a_failed_capture_a_gpu_is_as_before():
    x = torch.ones(3, device="cuda")

    def step() -> tuple[Tensor, ...]:
        if torch.cuda.is_current_stream_capturing():
            F.dropout(x)[0].item()
        return (F.dropout(x),)

    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError, match="captur"):
        Captured(step)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), state)
    F.dropout(x)
    torch.cuda.empty_cache()
    torch.cuda.set_rng_state(state)
    expected = F.dropout(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(Captured(lambda: (F.dropout(x),))()[0], expected)


@pytest.mark.usefixtures("cuda")
def test_a_graph_of_many_edges_is_not_captured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_graphs, "SMALL", 89)
    trained(one_graph(), "auto")
    assert FakeGraph.replays == 0
    monkeypatch.setattr(cuda_graphs, "SMALL", 90)
    trained(one_graph(), "auto")
    assert FakeGraph.replays == 2 * (EPOCHS - 1)


class Failing(nn.Module):
    """A model whose forward cannot be captured, for a reason found in the warm-up or only in the capture."""

    def __init__(self, cuda: FakeCuda, reason: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gat = GAT(6, 4, 2, 3, heads=2, dropout=0.5, norm="batch_norm")
        self.cuda, self.reason = cuda, reason

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        cuda = self.cuda
        cuda.events.append("capture" if cuda.recording else "checked" if cuda.sync_mode else "step")
        if cuda.generator_is_recorded and not cuda.recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        out: Tensor = self.gat(x, edge_index)
        if self.reason == "wait" and cuda.sync_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.reason == "capture" and cuda.recording:
            cuda.recording.valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        return out * np.random.rand() if self.reason == "draw" else out


@pytest.mark.parametrize(
    ("reason", "match"),
    [
        ("wait", r"RuntimeError: called a synchronizing CUDA operation \(in forward, .*test_training"),
        ("draw", r"RuntimeError: the step draws random numbers on the CPU"),
        ("capture", r"RuntimeError: CUDA error: operation not permitted when stream is capturing \(in forward, "),
    ],
)
def test_what_cannot_be_captured_runs_without(reason: str, match: str, both_cudas: FakeCuda):
    cuda = both_cudas
    plain = trained(one_graph(), False, model=Failing(cuda, reason))
    cuda.events.clear()
    with pytest.warns(UserWarning, match=f"The train step cannot be captured as a CUDA graph: {match}") as warned:
        fallen = trained(one_graph(), "auto", model=Failing(cuda, reason))
    assert len([one for one in warned if "CUDA graph" in str(one.message)]) == 1  # validation does not try again
    # training and validation, the three calls before a capture, which only one of the reasons needs, and the rest
    tried = ["step", "step", "checked", *(["capture"] if reason == "capture" else [])]
    assert cuda.events == ["step"] * 2 + tried + ["step"] * 2 * (EPOCHS - 1)
    assert cuda.is_usable() and FakeGraph.replays == 0
    torch.cuda.empty_cache()
    assert_same(fallen, plain)


def test_the_mode_of_synchronisations_is_restored(cuda: FakeCuda):
    cuda.sync_mode, modes = 1, []
    for fails in (False, True):

        def step() -> tuple[Tensor, ...]:
            modes.append(cuda.sync_mode)
            if fails and cuda.sync_mode == 2:  # noqa: B023
                raise RuntimeError("it waits")
            return (torch.ones(1),)

        with pytest.raises(RuntimeError, match="it waits") if fails else nullcontext():
            Captured(step)
        assert cuda.sync_mode == 1
    assert modes == [1, 1, 2, 1, 1, 1, 2]  # of three calls and the capture; and of three


class Change(Callback):
    """Change the graph or the model before the third epoch."""

    def __init__(self, change: Callable[[Data, nn.Module], None]) -> None:
        self.change = change
        self.replays: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 2:
            self.change(next(iter(trainer.train_dataloader)), pl_module.model)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.replays.append(FakeGraph.replays)


def replaced(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Data, nn.Module], None]:
    return lambda data, model: data.__setattr__(key, change(data[key]))


CHANGES: dict[str, Callable[[Data, nn.Module], None]] = {
    "edges in place": lambda data, model: data.edge_index[0].copy_(data.edge_index[0].flip(0)),
    "mask in place": lambda data, model: data.train_mask.copy_(data.train_mask.roll(1)),
    "edges": replaced("edge_index", lambda edge_index: edge_index.flip(0)),
    "features": replaced("x", lambda x: 2 * x),
    "labels": replaced("y", lambda y: 2 - y),
    "memory": lambda data, model: setattr(data.x, "data", data.x.flip(0)),
    "a weight": lambda data, model: setattr(model.convs[0].lin.weight, "data", model.convs[0].lin.weight.data * 2),
    "frozen": lambda data, model: model.convs[0].lin.weight.requires_grad_(False),
    "mode": lambda data, model: model.eval(),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_replays_is_captured_anew(change: str, monkeypatch: pytest.MonkeyPatch):
    def task() -> Task:  # of its own for each, since it is changed
        return one_graph()

    class Recorded(FakeCaptured):
        """A capture that holds on to tensors instead of running Python again."""

        def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
            def recording() -> tuple[Tensor, ...]:
                if FakeGraph.cuda.recording is None:
                    return compute()
                self.recorded = make_fx(compute)()
                return replay()

            def replay() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return tuple(self.recorded())

            super().__init__(recording, buffers)
            self.compute = replay

    monkeypatch.setattr(cuda_graphs, "Captured", Recorded)
    monkeypatch.setattr(sys.modules[__name__], "EPOCHS", 6)
    plain, watch = trained(task(), False, "cpu", None, Change(CHANGES[change])), Change(CHANGES[change])
    assert_same(trained(task(), True, "cpu", None, watch), plain)
    eager = 1 if change == "mode" else 2  # steps: a validation is always in evaluation mode
    assert watch.replays == [0, 2, *(steps - eager for steps in (4, 6, 8, 10))]  # eager, captured, changed, captured


@pytest.mark.usefixtures("cuda")
def test_what_a_replay_reads_stays_in_memory():
    """The part of the graph that validation sees, when another graph is looked at between two replays."""
    data, parts = graph(400, 3, seed=0), []
    data.edge_index = data.edge_index[:, :300]
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(400) % 20 == i

    class Look(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                parts.append(weakref.ref(pl_module._fields["val"][2].edge_index))
                pl_module._counts(one_graph().train[0], "val")
                gc.collect()
                parts.append(parts[0]())

    module = Transductive(GAT_PYG(6, [4], 3, [2, 1]), NodeLabels(3), cuda_graphs=True)
    trainer(Look(), epochs=4).fit(module, Batches([data]), Batches([data]))
    assert FakeGraph.replays == 2 * 3
    assert parts[1] is not None


@pytest.mark.usefixtures("cuda")
def test_graphs_in_turn_are_not_captured():
    """A capture takes longer than a step, and gradients of one graph's are not another's."""
    states = []
    for enabled in (False, True):
        torch.manual_seed(0)
        first, second = one_graph().train[0], one_graph().train[0]
        second.x = second.x.flip(0)
        module = Transductive(GCN(6, 4, 2, 3), NodeLabels(3), cuda_graphs=enabled)
        trainer(epochs=3).fit(module, Batches([first, second]), Batches([first]))
        states.append(module.state_dict())
    assert FakeGraph.replays == 2  # of the validation
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.usefixtures("cuda")
def test_a_graph_whose_changes_cannot_be_seen_is_not_captured():
    task = one_graph()
    with torch.inference_mode():
        task.train[0].test_mask = task.train[0].test_mask.clone()
    trained(task, True)
    assert FakeGraph.replays == 0


def test_changes_of_sparse_features_are_seen():
    data = Data(x=torch.eye(3).to_sparse_csr())
    (x,) = _plain_tensors(data)
    state = remembered.ids_state(*_components(x))
    assert remembered.ids_state(*_components(x)) == state
    x.values().mul_(2)
    assert remembered.ids_state(*_components(x)) != state


@pytest.mark.usefixtures("cuda")
def test_a_fit_that_an_error_ended_leaves_the_next_one_nothing():
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise KeyError("stop")

    module = Transductive(GAT_PYG(6, [4], 3, [2, 1], dropout=0.5), NodeLabels(3), cuda_graphs=True)
    with pytest.raises(KeyError, match="stop"):
        trainer(Resumable(None), Stop()).fit(module, datamodule=TaskData(one_graph()))
    assert module._key is not None
    masks = []

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            masks.append(module._key)

    trainer(Watch(), epochs=1).fit(module, datamodule=TaskData(one_graph()))
    assert masks == [None]  # without Resumable, each epoch has its own dropout again


def test_why_there_is_no_cuda_graph():
    module = setup(one_graph())
    module.cuda_graphs = CudaGraphs(True)
    with pytest.raises(
        ValueError, match=r"cuda_graphs is true, but the device is a cpu\. Use cuda_graphs=auto or false"
    ):
        trainer().fit(module, datamodule=TaskData(one_graph()))

    def why(
        model: nn.Module | None = None,
        precision: str = "32-true",
        kind: type[Transductive] = Transductive,
        strategy: Any = SingleDeviceStrategy("cuda"),  # noqa: B008
        **changes: int,
    ) -> str | None:
        module = kind(GCN(6, 4, 2, 3) if model is None else model, NodeLabels(3))
        facts = {"world_size": 1, "accumulate_grad_batches": 1, **changes}
        module._trainer = types.SimpleNamespace(strategy=strategy, precision=precision, **facts)
        return module.cuda_graphs._obstacle(module)

    assert why() is None
    assert why(world_size=2) == "there are 2 processes"
    for many in (DDPStrategy, HaloStrategy):  # in a single process, too
        with_one = many(parallel_devices=[torch.device("cuda")], cluster_environment=LightningEnvironment())
        assert why(strategy=with_one) == f"the strategy is {many.__name__}, which communicates in the step"
    assert why(accumulate_grad_batches=2) == "gradients are accumulated over several steps"
    assert why(precision="16-mixed") == "precision is 16-mixed, whose casts and scales are not captured"
    compiled = GCN(6, 4, 2, 3)
    compiled.compile()
    assert why(compiled) == why(torch.compile(GCN(6, 4, 2, 3))) == "the model is compiled"

    class Regularised(Transductive):
        def training_step(self, data: Data, batch_idx: int) -> Tensor:
            return super().training_step(data, batch_idx) + self.model.convs[0].bias.abs().sum()

    assert why(kind=Regularised) == "Regularised has its own training_step, which a replay would skip"


@pytest.mark.parametrize("name", ["nodes of one graph", "nodes of many graphs, many labels"])
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
        trainer(epochs=2).fit(module, datamodule=TaskData(task, batch_size=2))
        states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)


# Data ---------------------------------------------------------------------------------------------------------------


class Place:
    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world


def test_the_one_graph_is_the_same_object_every_epoch():
    task = one_graph()
    loader = TaskData(task).train_dataloader()
    first, second = next(iter(loader)), next(iter(loader))
    assert first is second
    assert first.edge_index is task.train[0].edge_index  # so that what is remembered of its edges stays
    assert len(loader) == 1


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


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("multilabel", [False, True])
def test_over_processes_no_validation_graph_counts_twice(world: int, multilabel: bool):
    task, model = many_graphs(multilabel), GCN(6, 4, 2, 3).eval()
    data = [TaskData(task, batch_size=4) for _ in range(world)]
    for rank, part in enumerate(data):
        part.trainer = Place(rank, world)
    shares = [list(part.val_dataloader()) for part in data]
    assert len({len(share) for share in shares}) == 1  # as many batches on each
    whole = Batch.from_data_list(task.val)
    with torch.no_grad():
        sums = sum(task.objective.statistics(model(b.x, b.edge_index), b.y) for share in shares for b in share)
        expected = task.objective.statistics(model(whole.x, whole.edge_index), whole.y)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=0.0)  # the losses are float32
    graphs = [len(batch.x) for part in data for batch in part.train_dataloader()]
    assert sum(graphs) >= sum(len(data.x) for data in task.train)


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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_stopped_by_its_score(name: str):
    task = OBJECTIVES[name]()
    seen, rule = [], PaperStopping(patience=4)

    class See(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            metrics = trainer.callback_metrics
            seen.append((float(metrics[f"val_{task.objective.metric.name}"]), float(metrics["val_loss"])))

    trainer(See(), rule, epochs=60).fit(setup(task), datamodule=TaskData(task, batch_size=2))
    metric = task.objective.metric
    scores = [(1e3 - score if metric.lower else score, loss) for score, loss in seen]  # the oracle begins at 0
    assert (rule.epoch, rule.best_epoch) == oracle(scores, 4)
    assert (rule.kept_score, rule.kept_loss) == seen[rule.best_epoch - 1]


# The stopping rule --------------------------------------------------------------------------------------------------


def oracle(epochs: list[tuple[float, float]], patience: int) -> tuple[int, int]:
    """The loop of the authors' code: (epochs run, epoch kept)."""
    vacc_mx, vlss_mn, curr_step, kept = 0.0, float("inf"), 0, 0
    for epoch, (vacc, vlss) in enumerate(epochs, start=1):
        if vacc >= vacc_mx or vlss <= vlss_mn:
            if vacc >= vacc_mx and vlss <= vlss_mn:
                kept = epoch
            vacc_mx = max((vacc, vacc_mx))
            vlss_mn = min((vlss, vlss_mn))
            curr_step = 0
        else:
            curr_step += 1
            if curr_step == patience:
                return epoch, kept
    return len(epochs), kept


few = st.integers(0, 4).map(float)  # few values, so that ties come often
epochs_of = st.lists(st.tuples(few, few), min_size=1, max_size=40)


@given(epochs_of, st.integers(1, 5))
def test_the_rule_is_the_authors_rule(epochs: list[tuple[float, float]], patience: int):
    rule = PaperStopping(patience)
    for score, loss in epochs:
        rule.update(score, loss)
        if rule.left <= 0:
            break
    assert (rule.epoch, rule.best_epoch) == oracle(epochs, patience)


@given(epochs_of, st.integers(1, 5), st.integers(0, 40))
def test_the_rule_goes_on_from_its_state(epochs: list[tuple[float, float]], patience: int, cut: int):
    whole, before, after = (PaperStopping(patience) for _ in range(3))
    for score, loss in epochs:
        whole.update(score, loss)
    for score, loss in epochs[:cut]:
        before.update(score, loss)
    after.load_state_dict(before.state_dict())
    for score, loss in epochs[cut:]:
        after.update(score, loss)
    assert str(after.state_dict()) == str(whole.state_dict())


@given(epochs_of, st.sampled_from(["accuracy", "loss"]))
def test_a_single_criterion_looks_at_one_and_keeps_the_last_best(epochs: list[tuple[float, float]], criterion: Any):
    rule, column = PaperStopping(100, criterion), 0 if criterion == "accuracy" else 1
    for score, loss in epochs:
        rule.update(score, loss)
    values = [epoch[column] for epoch in epochs]
    best = max(values) if criterion == "accuracy" else min(values)
    assert rule.best_epoch == max(i for i, value in enumerate(values, start=1) if value == best)
    assert rule.wait == len(epochs) - rule.best_epoch


@given(
    st.lists(st.tuples(*2 * [st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])]), max_size=20),
    st.sampled_from(["both", "accuracy", "loss"]),
)
def test_epochs_that_are_not_finite_only_use_up_patience(epochs: list[tuple[float, float]], criterion: Any):
    rule, finite_epochs = PaperStopping(100, criterion), PaperStopping(100, criterion)
    for epoch in epochs:
        before = rule.wait
        keeps = rule.update(*epoch)
        if all(map(math.isfinite, epoch)):
            assert keeps == finite_epochs.update(*epoch)
        else:
            assert not keeps and rule.wait == before + 1
    assert (rule.best_score, rule.best_loss) == (finite_epochs.best_score, finite_epochs.best_loss)


def test_nan_is_no_improvement():
    rule, nan = PaperStopping(3), float("nan")
    kept = [rule.update(*epoch) for epoch in [(1.0, 1.0), (nan, nan), (nan, 2.0), (0.5, nan)]]
    assert kept == [True, False, False, False]
    assert (rule.best_score, rule.best_loss, rule.wait) == (1.0, 1.0, 3)


class Scripted(BoringModel):
    """Its weight is the epoch's number, its validation what a list says."""

    objective = NodeLabels(1)

    def __init__(self, epochs: list[tuple[float, float]]) -> None:
        super().__init__()
        self.epochs = epochs
        self.weight = nn.Parameter(torch.zeros(()))

    def on_train_epoch_end(self) -> None: ...

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.weight.fill_(self.current_epoch + 1)
        return 0 * self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        score, loss = self.epochs[self.current_epoch]
        self.log_dict({"val_loss": loss, "val_accuracy": score})

    def on_validation_epoch_end(self) -> None: ...


SCRIPT = [(1.0, 3.0), (2.0, 2.0), (1.0, 1.0), (2.0, 1.0), (3.0, 1.5), (2.0, 1.5), (2.0, 1.5), (9.0, 0.0)]


def test_training_stops_by_the_rule_with_the_weights_kept_last():
    module, rule = Scripted(SCRIPT), PaperStopping(patience=2)
    fitted = trainer(rule, epochs=8, limit_train_batches=1, limit_val_batches=1)
    fitted.fit(module)
    assert (rule.epoch, rule.best_epoch) == oracle(SCRIPT, 2) == (7, 4)
    assert fitted.current_epoch == 7
    assert module.weight.item() == 4.0
    assert (rule.kept_score, rule.kept_loss) == (2.0, 1.0)


class Diverging(Scripted):
    """`Scripted` whose weights are NaN from some epoch on."""

    def __init__(self, epochs: list[tuple[float, float]], last: int) -> None:
        super().__init__(epochs)
        self.last = last
        self.register_buffer("mask", torch.tensor(-torch.inf))  # no parameter: it may be what it likes

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch + 1 > self.last:
            with torch.no_grad():
                self.weight.fill_(torch.nan)
        return loss


@pytest.mark.parametrize(("last", "stops"), [(3, 4), (9, 8)])
def test_training_stops_once_the_weights_are_not_finite(last: int, stops: int):
    module, rule = Diverging([*SCRIPT[:3], *[(1.0, math.nan)] * 9], last), PaperStopping(patience=5)
    fitted = trainer(rule, epochs=12, limit_train_batches=1, limit_val_batches=1)
    message = r"Training diverged: its weights are not finite after epoch 4\. It stops with the weights of epoch 2\."
    with pytest.warns(UserWarning, match=message) if last == 3 else nullcontext():
        fitted.fit(module)
    assert (fitted.current_epoch, rule.best_epoch, rule.left) == (stops, 2, 0)  # by patience where they are finite
    assert module.weight.item() == 2.0


def test_at_the_last_epoch_too_the_weights_kept_are_put_back():
    module = Scripted(SCRIPT)
    trainer(PaperStopping(), epochs=3, limit_train_batches=1, limit_val_batches=1).fit(module)
    assert module.weight.item() == 2.0


def test_nothing_kept_is_said():
    nan = float("nan")
    fitted = trainer(PaperStopping(), epochs=2, limit_train_batches=1, limit_val_batches=1)
    with pytest.warns(UserWarning, match="The validation loss or score was not finite in any of 2 epochs"):
        fitted.fit(Scripted([(1.0, nan)] * 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience is 0, expected at least 1"),
        ({"criterion": "f1"}, "criterion is 'f1', expected one of both, accuracy, loss"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PaperStopping(**arguments)


def test_a_module_that_logs_something_else_is_told():
    with pytest.raises(ValueError, match=r"needs val_loss and val_auc, but the module logged .*val_accuracy"):
        trainer(PaperStopping(score="val_auc"), limit_train_batches=1, limit_val_batches=1).fit(Scripted(SCRIPT))


# Resume -------------------------------------------------------------------------------------------------------------


class Kill(Callback):
    """Ends the fit in the middle of an epoch, as a kill would: nothing is saved on the way out."""

    def __init__(self, epoch: int, hook: str) -> None:
        self.epoch, self.hook = epoch, hook

    def _die(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch:
            raise InterruptedError

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        self._die("start", trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._die("batch", trainer)

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        self._die("validation", trainer)


class Ask(Kill):
    """Asks the process to end in the middle of an epoch."""

    times = 1

    def _die(self, hook: str, trainer: Trainer) -> None:
        try:
            super()._die(hook, trainer)
        except InterruptedError:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


class Insist(Ask):
    times = 2


def resumed(
    name: str, folder: Path, kills: list[tuple[int, str]], saved: float, kind: type[Kill] = Kill
) -> tuple[LightningModule, Any]:
    """A run that is killed again and again; the checkpoint may be of some epochs ago."""
    path, task = folder / "last.ckpt", OBJECTIVES[name]()
    for kill in [*kills, None]:
        rule = PaperStopping(patience=6)
        callbacks = [rule, MetricsFile(folder / "metrics.csv"), Resumable(path, seed=1, every=saved)]
        fitted = trainer(*callbacks, *([kind(*kill)] if kill else []), epochs=40, plugins=[SafeCheckpoints()])
        torch.manual_seed(len(folder.name))  # chance before the first epoch must not matter
        module = setup(task)
        torch.rand(7)
        checkpoint = path if path.exists() else None
        try:
            fitted.fit(module, datamodule=TaskData(task, batch_size=2, seed=1), ckpt_path=checkpoint)
            assert kill is None
        except (InterruptedError, SystemExit):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return module, rule


KILLS = [(3, "start"), (4, "batch"), (4, "validation"), (8, "batch"), (9, "start"), (9, "start")]


SAVED = [(name, 0.0) for name in OBJECTIVES] + [("nodes of one graph", 0.05), ("nodes of one graph", 1e9)]  # seconds


@pytest.mark.parametrize(("name", "saved"), SAVED)
def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path: Path, name: str, saved: float):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, rule = resumed(name, tmp_path / "whole", [], saved=1e9)
    killed, again = resumed(name, tmp_path / "killed", KILLS, saved)
    assert rule.epoch > 10
    assert (again.epoch, again.best_epoch, again.kept_loss) == (rule.epoch, rule.best_epoch, rule.kept_loss)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), killed.parameters(), strict=True))
    metrics = [(tmp_path / run / "metrics.csv").read_text() for run in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    rows = list(csv.DictReader(io.StringIO(metrics[0])))
    assert [int(row["epoch"]) for row in rows] == list(range(1, rule.epoch + 1))
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_that_is_asked_to_end_goes_on_behind_its_epoch(tmp_path: Path, name: str):
    (tmp_path / "whole").mkdir()
    (tmp_path / "asked").mkdir()
    whole, rule = resumed(name, tmp_path / "whole", [], saved=1e9)
    asked, again = resumed(name, tmp_path / "asked", [(3, "start"), (4, "batch"), (5, "validation")], 1e9, Ask)
    assert torch.load(tmp_path / "asked" / "last.ckpt")["callbacks"]["PaperStopping"]["epoch"] == 6
    assert (again.epoch, again.best_epoch, again.kept_loss) == (rule.epoch, rule.best_epoch, rule.kept_loss)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), asked.parameters(), strict=True))
    metrics = [(tmp_path / run / "metrics.csv").read_text() for run in ("whole", "asked")]
    assert metrics[0] == metrics[1]


def test_a_run_that_is_asked_twice_does_not_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    callbacks = [Resumable(tmp_path / "last.ckpt"), Insist(2, "start")]
    with pytest.raises(SystemExit, match="130"):
        trainer(*callbacks).fit(setup(one_graph()), datamodule=TaskData(one_graph()))
    assert capsys.readouterr().err == "\nEnding after this epoch; Ctrl-C again does not wait.\n"
    assert not (tmp_path / "last.ckpt").exists()


def test_a_run_that_had_stopped_does_not_go_on(tmp_path: Path):
    task, path = one_graph(), tmp_path / "last.ckpt"
    rule = PaperStopping(patience=3)
    trainer(rule, Resumable(path, every=0), epochs=50).fit(setup(task), datamodule=TaskData(task))
    module, again = setup(task), PaperStopping(patience=3)
    trainer(again, Resumable(path, every=0), epochs=50, plugins=[SafeCheckpoints()]).fit(
        module, datamodule=TaskData(task), ckpt_path=path
    )
    assert (again.epoch, again.best_epoch) == (rule.epoch, rule.best_epoch)
    assert all(torch.equal(value, rule.weights[key]) for key, value in module.state_dict().items())


def test_seconds_add_up_over_a_resume(tmp_path: Path):
    resumable = Resumable(tmp_path / "last.ckpt")
    resumable.load_state_dict({"seconds": 5.0})
    assert resumable.seconds == 5.0
    trainer(resumable, epochs=1).fit(setup(one_graph()), datamodule=TaskData(one_graph()))
    assert 5.0 < resumable.seconds < 15.0
    assert resumable.seconds == resumable.seconds  # the clock has stopped


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_process_ends_all_after_the_epoch(tmp_path: Path, rank: int):
    saved: list[Path] = []
    asked = torch.tensor([0, 0] if rank == 0 else [0, 143])  # of the other process
    strategy = types.SimpleNamespace(
        root_device=torch.device("cpu"), reduce=lambda ours, reduce_op: torch.stack([ours, asked]).amax(0)
    )
    several: Any = types.SimpleNamespace(world_size=2, strategy=strategy, save_checkpoint=saved.append)
    resumable, module = Resumable(tmp_path / "last.ckpt"), setup(one_graph())
    resumable.on_train_start(several, module)
    if rank == 0:
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        resumable.on_train_epoch_end(several, module)
    assert saved == [tmp_path / "last.ckpt"]
    with pytest.raises(SystemExit, match="143"):
        resumable.on_train_end(several, module)


def test_a_seed_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"seed is -1, expected a number from 0 to 2\^32 - 1"):
        Resumable(None, seed=-1)


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path, task = tmp_path / "last.ckpt", one_graph()
    rule = PaperStopping()
    trainer(rule, Resumable(path, every=0), epochs=2, plugins=[SafeCheckpoints()]).fit(
        setup(task), datamodule=TaskData(task)
    )
    return path


def refit(path: Path, module: LightningModule | None = None) -> None:
    task = one_graph()
    fitted = trainer(PaperStopping(), Resumable(None), epochs=3, plugins=[SafeCheckpoints()])
    fitted.fit(module or setup(task), datamodule=TaskData(task), ckpt_path=path)


def test_a_checkpoint_holds_tensors_and_plain_values_only(checkpoint: Path):
    assert torch.load(checkpoint, weights_only=True)["callbacks"]["PaperStopping"]["epoch"] == 2
    refit(checkpoint)


def test_a_checkpoint_that_would_run_code_is_refused(checkpoint: Path):
    made = checkpoint.parent / "made"

    class Bomb:
        def __reduce__(self) -> object:
            return os.mkdir, (str(made),)

    found = torch.load(checkpoint, weights_only=True)
    torch.save({**found, "extra": Bomb()}, checkpoint)
    with pytest.raises(ValueError, match=r"last\.ckpt would run code on load: it needs \w+\.mkdir\. No code"):
        refit(checkpoint)
    checkpoint.write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(ValueError, match=r"last\.ckpt (would run code|cannot be read)"):
        refit(checkpoint)  # what torch.load says of such a file differs by version
    assert not made.exists()


@pytest.mark.parametrize("left", [0, 10, 1000, -1, -1000])
def test_a_truncated_checkpoint_says_so(checkpoint: Path, left: int):
    checkpoint.write_bytes(checkpoint.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read: it is truncated or no checkpoint"):
        refit(checkpoint)


@pytest.mark.parametrize("text", [b"a text", b"0", b"}", b"]", b"Rx", b"\x80\x02e."])
def test_a_text_is_no_checkpoint(checkpoint: Path, text: bytes):
    checkpoint.write_bytes(text)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read: it is truncated or no checkpoint"):
        refit(checkpoint)


def test_a_checkpoint_of_another_shape_says_so(checkpoint: Path):
    other = Transductive(GAT(6, 5, 2, 3, heads=1), NodeLabels(3))
    with pytest.raises(ValueError, match=r"does not fit this model: model\.convs\.0\.\w+ has shape .* in the file"):
        refit(checkpoint, other)


def test_what_is_no_checkpoint_says_so(checkpoint: Path):
    torch.save({"state_dict": {}}, checkpoint)
    with pytest.raises(ValueError, match="is no checkpoint of a training"):
        refit(checkpoint)
    checkpoint.unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*last\.ckpt"):
        refit(checkpoint)


@pytest.mark.parametrize("callbacks", [None, {}, {"PaperStopping": {}}, {"PaperStopping": {"epoch": 2}}])
def test_a_checkpoint_without_the_rule_is_refused(checkpoint: Path, callbacks: dict[str, Any] | None):
    torch.save({**torch.load(checkpoint, weights_only=True), "callbacks": callbacks}, checkpoint)
    with pytest.raises(ValueError, match=r"has no state of PaperStopping, expected epoch, wait, .*start anew without"):
        refit(checkpoint)


def test_a_checkpoint_without_the_clock_is_refused(checkpoint: Path):
    found = torch.load(checkpoint, weights_only=True)
    del found["callbacks"]["Resumable"]
    torch.save(found, checkpoint)
    with pytest.raises(ValueError, match="has no state of Resumable, expected seconds under callbacks.Resumable"):
        refit(checkpoint)


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")
def test_a_limit_on_the_size_of_files_names_the_checkpoint(checkpoint: Path):
    import resource

    before, limits = checkpoint.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="last.ckpt") as stopped:
            SafeCheckpoints().save_checkpoint({"weights": torch.zeros(10_000)}, checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stopped.value.errno == errno.EFBIG and full(stopped.value) == errno.EFBIG
    assert checkpoint.read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]


def test_a_write_that_dies_leaves_the_last_checkpoint_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    before = checkpoint.read_bytes()

    def die(found: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        SafeCheckpoints().save_checkpoint({}, checkpoint)
    assert checkpoint.read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]


# What one sees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LABELLED)
def test_progress_shows_epoch_loss_score_and_end(name: str, capsys: pytest.CaptureFixture[str]):
    task = OBJECTIVES[name]()
    callbacks = [PaperStopping(patience=50), Progress("mine", every=0.0)]
    trainer(*callbacks, epochs=2).fit(setup(task), datamodule=TaskData(task, batch_size=2))
    metric = task.objective.metric
    score = r"accuracy \d+\.\d %" if metric.name == "accuracy" else rf"{metric.title} \d+\.\d{{3}}"
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"mine: epoch 2, loss \d\.\d{{4}}, val {score}, "
        r"stops after epoch 2, [\d.]+ m?s per epoch",
        last,
    ), last


def test_progress_shows_the_patience_that_is_left(capsys: pytest.CaptureFixture[str]):
    task = one_graph()
    callbacks = [PaperStopping(patience=1), Progress("mine", every=0.0)]
    trainer(*callbacks, epochs=2).fit(setup(task), datamodule=TaskData(task))
    assert "mine: epoch 1," in (first := capsys.readouterr().err.splitlines()[0])
    assert "stops after 1 more epoch without improvement" in first


def test_a_batch_is_told_with_the_scores_of_the_epoch_before(capsys: pytest.CaptureFixture[str]):
    progress, losses = Progress("mine", every=1e9), []

    class Turn(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            if trainer.current_epoch == 3:
                progress._next = 0.0  # epochs 1 and 2 have ended between two lines

    task = many_graphs()
    trainer(progress, Turn(), epochs=4).fit(setup(task), datamodule=TaskData(task, batch_size=1))
    assert f"mine: epoch 4 batch 1/{len(task.train)}, loss {losses[2]:.4f}" in capsys.readouterr().err.splitlines()[-1]
