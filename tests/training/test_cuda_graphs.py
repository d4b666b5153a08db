"""Steps that are replayed as CUDA graphs are those that are computed."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

from gat_pyg.data import Task
from gat_pyg.distributed.halo import HaloStrategy
from gat_pyg.graph import remembered
from gat_pyg.models import GAT as GAT_PYG
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Optimisation, PaperStopping, Resumable, TaskData, Transductive, cuda_graphs
from gat_pyg.training.cuda_graphs import Captured, CudaGraphs, _components, _plain_tensors
from gat_pyg.training.shares import Batches
from tests.objectives import graph, one_graph, setup
from tests.training.fakes import FakeCaptured, FakeCuda, FakeGraph, faked
from tests.training.loaders import pytestmark, steps_of, trainer  # noqa: F401 (marks of this file)

EPOCHS = 4  # the first runs as it is, and the second is captured


@pytest.fixture(params=[False, True], ids=["torch 2.11", "torch 2.13"])
def both_cudas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return faked(monkeypatch, request.param)


def trained(
    task: Task,
    enabled: Any,
    model: nn.Module | None = None,
    *callbacks: Callback,
    accelerator: str = "cpu",
    epochs: int = EPOCHS,
) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    model = GAT(6, 4, 2, 3, heads=2, dropout=0.5, norm="batch_norm") if model is None else model  # which has buffers
    model.idle = nn.Parameter(torch.ones(2))  # without a gradient, it stays as it is
    averaged = Optimisation(0.01, 5e-4, warmup=2, ema=0.5)  # which changes the weights in place
    module, rule = Transductive(model, task.objective, averaged, enabled), PaperStopping()
    callbacks = rule, Resumable(None, seed=3), *callbacks
    fitted = trainer(*callbacks, epochs=epochs, gradient_clip_val=0.5, accelerator=accelerator)
    fitted.fit(module, datamodule=TaskData(task))
    assert not module.cuda_graphs._repeated
    return module.cpu().state_dict(), [rule.best_loss, float(fitted.callback_metrics["train_loss"])]


Trained = tuple[dict[str, Tensor], list[float]]


def assert_same(actual: Trained, expected: Trained) -> None:
    assert actual[1] == expected[1]
    assert all(torch.equal(value, actual[0][key]) for key, value in expected[0].items())


def assert_close(actual: Trained, expected: Trained) -> None:
    assert expected[1] == pytest.approx(actual[1], rel=1e-5)
    for key, value in expected[0].items():
        torch.testing.assert_close(actual[0][key], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.usefixtures("cuda")
def test_a_replayed_step_is_a_computed_step(multilabel: bool):
    task = one_graph(multilabel)
    plain, replayed = trained(task, False), trained(task, True)
    assert FakeGraph.replays == 2 * (EPOCHS - 1)  # training and validation
    assert_same(replayed, plain)
    assert torch.equal(plain[0]["model.idle"], torch.ones(2))


@pytest.mark.usefixtures("cuda")
def test_steps_that_may_not_repeat_are_not_captured(monkeypatch: pytest.MonkeyPatch):
    hidden = one_graph()
    with torch.inference_mode():  # torch does not count the changes of such a tensor
        hidden.train[0].test_mask = hidden.train[0].test_mask.clone()
    trained(hidden, True)
    monkeypatch.setattr(cuda_graphs, "SMALL", 89)
    trained(one_graph(), "auto")
    ((batch,),) = steps_of(one_graph(), batch_size=30, num_parts=30)
    module = Transductive(GCN(6, 4, 2, 3), NodeLabels(3))
    for _ in range(3):  # a batch that is drawn does not come back
        module.cuda_graphs.run(module, "train", batch, lambda: module._loss(batch), {})
    assert FakeGraph.replays == 0
    monkeypatch.setattr(cuda_graphs, "SMALL", 90)
    trained(one_graph(), "auto")
    assert FakeGraph.replays == 2 * (EPOCHS - 1)


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


class Failing(nn.Module):
    """A model whose forward cannot be captured, for a reason found in the warm-up or only in the capture."""

    def __init__(self, cuda: FakeCuda, reason: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gat = GAT(6, 4, 2, 3, heads=2, dropout=0.5, norm="batch_norm")
        self.cuda, self.reason = cuda, reason

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        cuda = self.cuda
        cuda.events.append("capture" if cuda.recording else "checked" if cuda.sync_mode == 2 else "step")
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
        ("wait", r"RuntimeError: called a synchronizing CUDA operation \(in forward, .*test_cuda_graphs"),
        ("draw", r"RuntimeError: the step draws random numbers on the CPU"),
        ("capture", r"RuntimeError: CUDA error: operation not permitted when stream is capturing \(in forward, "),
    ],
)
def test_a_step_that_cannot_be_captured_runs_without_and_warns_once(reason: str, match: str, both_cudas: FakeCuda):
    cuda = both_cudas
    plain = trained(one_graph(), False, Failing(cuda, reason))
    cuda.events.clear()
    cuda.sync_mode = 1
    with pytest.warns(UserWarning, match=f"The train step cannot be captured as a CUDA graph: {match}") as warned:
        fallen = trained(one_graph(), "auto", Failing(cuda, reason))
    assert len([one for one in warned if "CUDA graph" in str(one.message)]) == 1  # validation does not try again
    # training and validation, the three calls before a capture, which only one of the reasons needs, and the rest
    tried = ["step", "step", "checked", *(["capture"] if reason == "capture" else [])]
    assert cuda.events == ["step"] * 2 + tried + ["step"] * 2 * (EPOCHS - 1)
    assert cuda.sync_mode == 1
    cuda.sync_mode = 0
    assert cuda.is_usable() and FakeGraph.replays == 0
    torch.cuda.empty_cache()
    assert_same(fallen, plain)


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


LIKE_EDGES = ("features", "labels", "mask in place")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "change", [pytest.param(key, marks=[pytest.mark.weekly] * (key in LIKE_EDGES)) for key in CHANGES]
)
def test_a_step_is_captured_again_after_a_change(change: str, monkeypatch: pytest.MonkeyPatch):
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
    watch, results = Change(CHANGES[change]), []
    for enabled, callback in ((False, Change(CHANGES[change])), (True, watch)):
        torch.manual_seed(0)
        model = GCN(6, 4, 2, 3, dropout=0.5, norm="batch_norm")
        results.append(trained(one_graph(), enabled, model, callback, epochs=5))
    assert_same(*reversed(results))
    eager = 1 if change == "mode" else 2  # steps: a validation is always in evaluation mode
    assert watch.replays == [0, 2, *(steps - eager for steps in (4, 6, 8))]  # eager, captured, changed, captured


@pytest.mark.usefixtures("cuda")
def test_what_a_replay_reads_stays_in_memory():
    """The receptive field of the validation stays while another graph is evaluated between two replays."""
    data, fields = graph(400, 3, seed=0), []
    data.edge_index = data.edge_index[:, :300]
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(400) % 20 == i

    class Look(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                fields.append(weakref.ref(pl_module._fields["val"][2].edge_index))
                pl_module._counts(one_graph().train[0], "val")
                gc.collect()
                fields.append(fields[0]())

    module = Transductive(GAT_PYG(6, [4], 3, [2, 1]), NodeLabels(3), cuda_graphs=True)
    trainer(Look(), epochs=4).fit(module, Batches([data]), Batches([data]))
    assert FakeGraph.replays == 2 * 3
    assert fields[1] is not None


def test_a_change_of_sparse_features_changes_the_state():
    data = Data(x=torch.eye(3).to_sparse_csr())
    (x,) = _plain_tensors(data)
    state = remembered.ids_state(*_components(x))
    assert remembered.ids_state(*_components(x)) == state
    x.values().mul_(2)
    assert remembered.ids_state(*_components(x)) != state


@pytest.mark.usefixtures("cuda")
def test_an_aborted_fit_does_not_affect_the_next():
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


def test_obstacles_to_a_capture_are_named():
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
        options = {"world_size": 1, "accumulate_grad_batches": 1, **changes}
        module._trainer = types.SimpleNamespace(strategy=strategy, precision=precision, **options)
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


# On a GPU -------------------------------------------------------------------------------------------------------------


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
def test_a_replayed_step_is_a_computed_step_on_a_gpu(multilabel: bool, monkeypatch: pytest.MonkeyPatch):
    captured = []
    call = Captured.__call__
    monkeypatch.setattr(Captured, "__call__", lambda self: captured.append(self) or call(self))
    task = one_graph(multilabel)

    plain, replayed = (trained(task, enabled, Normed(), accelerator="gpu") for enabled in (False, True))
    assert len(captured) == 2 * (EPOCHS - 1)
    assert_close(replayed, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_step_that_waits_trains_on_without_a_graph_on_a_gpu():
    """PyG's GAT adds self-loops by a boolean mask, whose size the host waits for."""
    task = one_graph()
    plain = trained(task, False, accelerator="gpu")
    with pytest.warns(UserWarning, match=r"cannot be captured as a CUDA graph: .*synchronizing CUDA operation \(in "):
        fallen = trained(task, True, accelerator="gpu")
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    F.dropout(torch.ones(3, device="cuda"))  # the generator is usable
    torch.cuda.empty_cache()  # and so is the allocator
    assert_close(fallen, plain)


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
