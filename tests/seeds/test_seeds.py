"""Seeds trained as one are what each would be alone."""

from __future__ import annotations

import collections
import copy
import csv
import functools
import itertools
import re
import signal
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GAT as PYG_GAT
from torch_geometric.nn import GCN, MLP

from gat_pyg import philox
from gat_pyg.conv import GATConv
from gat_pyg.data import Task
from gat_pyg.models import GAT
from gat_pyg.philox import draw_seed, first_seeds, keyed
from gat_pyg.seeds import EachStopping, Outcome, Stacked, StackedInductive, fitting, train
from gat_pyg.seeds import callbacks as seeds_callbacks
from gat_pyg.seeds.callbacks import EachMetrics, EachProgress, _copy_all_rows
from gat_pyg.seeds.fitting import _built, _member, outcomes, seeded
from gat_pyg.seeds.member import Member
from gat_pyg.seeds.module import StackOfSeeds
from gat_pyg.seeds.planning import CPU_BUDGET, StackPlan, in_passes, out_of_memory, plan_stack, trial
from gat_pyg.seeds.stack import Stack
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.training import Inductive, Optimisation, PaperStopping, Resumable, Transductive
from gat_pyg.training.cuda_graphs import Captured, CudaGraphs
from gat_pyg.training.epoch_seeds import key_of
from gat_pyg.training.loading import TaskData
from tests.objectives import OBJECTIVES, headed
from tests.training.fakes import FakeGraph
from tests.training.loaders import Kill, pytestmark, trainer  # noqa: F401 (marks of this file)

Make = Callable[[], nn.Module]


def small(multilabel: bool = False) -> Task:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (60,), generator=draw)
    x = F.one_hot(y, 6) + 1.5 * torch.randn(60, 6, generator=draw)
    y = F.one_hot(y, 3).float() if multilabel else y
    data = Data(x, torch.randint(60, (2, 200), generator=draw), y=y)
    for i, key in enumerate(("train_mask", "val_mask", "test_mask")):
        data[key] = torch.arange(60) % 3 == i
    return Task("small", [data], [data], [data], 6, NodeMultiLabels(3) if multilabel else NodeLabels(3))


def of_seeds(seeds: Sequence[int], *arguments: Any, **options: Any) -> list[Member]:
    return [Member(seed, NodeLabels(3), *arguments, **options) for seed in seeds]


def in_float64(task: Task) -> Task:
    wide = {id(data): copy.copy(data) for split in (task.train, task.val, task.test) for data in split}
    for data in wide.values():
        for key, value in data.items():
            data[key] = value.double() if key in ("x", "edge_attr", "edge_label_attr") else value
    splits = {split: [wide[id(data)] for data in getattr(task, split)] for split in ("train", "val", "test")}
    return replace(task, **splits)


class Dropped(nn.Module):
    """A perceptron whose dropout is a function of the seeds that it draws, as that of this package's layers is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = layer(F.elu(self.drop(x)))
        return x

    def drop(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        word = draw_seed(x.device) + torch.arange(x.numel()).view_as(x) * 0x1E3779B97F4A7C15
        for shift, by in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            word = (word ^ word >> shift) * by
        return x * 2.0 * (word >> 40 & 1)


class Smoothed(nn.Linear):
    """Ridge on the weight alone, and a penalty on it and on outputs that differ along an edge."""

    def decayed_parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        src, dst = data.edge_index
        return 0.1 * (out[src] - out[dst]).square().mean() + 0.01 * self.weight.abs().sum()


class Masks(Dropped):
    """A model that returns the dropped features unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + 0 * self.first.bias[0]


MAKES: dict[str, Make] = {
    "GAT": lambda: GAT(6, [4], 3, [2, 1], dropout=0.5),
    "GAT, sparse features": lambda: GAT(6, [4], 3, [2, 1], dropout=0.5),
    "the authors' GAT": lambda: GAT(
        6, [4, 8], 3, [2, 1, 2], residual=[False, True, False], dropout=0.5, reproduction=True
    ),
    "the authors' GAT, sparse features": lambda: GAT(6, [4], 3, [2, 1], dropout=0.5, reproduction=True),
    "GATv2": lambda: GAT(6, [4], 3, [2, 1], dropout=0.5, mechanism="gatv2"),
    "PyG's GAT": lambda: PYG_GAT(6, 4, 2, 3, heads=2),
    # without the bias before it, which it takes away: there Adam makes much of rounding
    "GCN with batch norm": lambda: GCN(6, 4, 2, 3, norm="batch_norm", bias=False),
    "MLP": lambda: MLP([6, 4, 3], norm=None, dropout=0.0),
    "drawn seeds": Dropped,
    "a penalty": lambda: Smoothed(6, 3),
}


class Trajectory(Callback):
    """The weights of each seed after each epoch in which it was running."""

    def __init__(self) -> None:
        self.weights: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.left_at: list[int] = []  # the epochs at which seeds left

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        stacked = isinstance(pl_module, StackOfSeeds)
        for row, member in enumerate(pl_module.present if stacked else [pl_module.member]):
            state = pl_module.model.weights() if stacked else pl_module.model.state_dict()
            own = {key: (value[row] if stacked else value).detach().clone() for key, value in state.items()}
            self.weights[str(member), trainer.current_epoch] = own


class Leave(EachStopping):
    """Seeds leave at given epochs alone, however few they are."""

    def __init__(self, *arguments: Any, epochs: Sequence[int] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.epochs = epochs
        self.left_at: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        before = len(pl_module.rows)
        self.compact_at = 0.0 if trainer.current_epoch in self.epochs else 2.0
        super().on_train_epoch_end(trainer, pl_module)
        if len(pl_module.rows) < before:
            self.left_at.append(trainer.current_epoch)


Runs = tuple[dict[str, Outcome], dict[str, dict[str, Tensor]], Trajectory]


def several(
    task: Task, seeds: Sequence[int], steps: float | Optimisation, patience: int, settings: Sequence[dict[str, Any]]
) -> list[Member]:
    steps = steps if isinstance(steps, Optimisation) else Optimisation(steps, 5e-4)
    default = Member(0, task.objective, steps, patience)
    return [_member(default, task, setting, seed) for setting in settings for seed in seeds]


def alone(
    make: Make,
    task: Task,
    seeds: Sequence[int],
    epochs: int,
    patience: int = 100,
    sparse: bool = False,
    steps: float | Optimisation = 0.01,
    batch_size: int = 1,
    settings: Sequence[dict[str, Any]] = ({},),
    **options: Any,
) -> Runs:
    """Each member in a run of its own, on graphs in the order of the first seed."""
    results, weights, trajectory = {}, {}, Trajectory()
    for member in several(task, seeds, steps, patience, settings):
        kind, key = Inductive if task.has_many_graphs else Transductive, str(member)
        module = kind(_built(member, make), member.objective, member.optimisation)
        module.member = member
        rule = PaperStopping(member.patience, member.criterion)
        data = TaskData(task, batch_size, seeds[0], sparse)
        fitted = trainer(rule, Resumable(None, member.seed), trajectory, epochs=epochs, **options)
        fitted.fit(module, datamodule=data)
        (scores,) = fitted.test(module, datamodule=data, verbose=False)
        name = task.objective.metric.name
        tested = {key.removeprefix("test_"): score for key, score in scores.items() if key != "test_loss"}
        value, val = tested.pop(name), rule.kept_score
        ends = rule.epoch, rule.best_epoch, 0.0
        results[key] = Outcome(member.seed, name, value, val, *ends, tested, member.settings)
        weights[key] = {key: value.clone() for key, value in module.model.state_dict().items()}
    return results, weights, trajectory


def stacked(
    make: Make,
    task: Task,
    seeds: Sequence[int],
    epochs: int,
    patience: int = 100,
    sparse: bool = False,
    leave: Sequence[int] | None = None,
    steps: float | Optimisation = 0.01,
    accelerator: str = "cpu",
    batch_size: int = 1,
    order: int | None = None,
    settings: Sequence[dict[str, Any]] = ({},),
    **options: Any,
) -> Runs:
    """All members at once, on graphs in the order of the first seed or of `order`."""
    kind, members = (
        StackedInductive if task.has_many_graphs else Stacked,
        several(task, seeds, steps, patience, settings),
    )
    module = kind([_built(member, make) for member in members], members)
    stopping = EachStopping(members) if leave is None else Leave(members, epochs=leave)
    data, trajectory = TaskData(task, batch_size, seeds[0] if order is None else order, sparse), Trajectory()
    callbacks = stopping, Resumable(None, seeds[0]), trajectory
    fitted = trainer(*callbacks, epochs=epochs, accelerator=accelerator, **options)
    fitted.fit(module, datamodule=data)
    fitted.test(module, datamodule=data, verbose=False)
    trajectory.left_at = getattr(stopping, "left_at", [])
    keys = [str(member) for member in module.present]
    results = dict(zip(keys, outcomes(module, stopping), strict=True))
    return results, {key: module.model[row].state_dict() for row, key in enumerate(keys)}, trajectory


def assert_same(one: Runs, other: Runs, atol: float = 1e-10) -> None:
    """Same outcomes, same weights kept, and the same weights after each epoch that both have."""
    assert one[0].keys() == other[0].keys()
    for seed, outcome in one[0].items():
        a, b = outcome, other[0][seed]
        assert (a.epochs, a.best_epoch, a.metric) == (b.epochs, b.best_epoch, b.metric), seed
        assert (a.value, a.val) == pytest.approx((b.value, b.val), rel=1e-6, nan_ok=True), seed
        assert a.scores == pytest.approx(b.scores, rel=1e-6, abs=1e-5, nan_ok=True), seed
    pairs = [((seed, "kept"), own, other[1][seed]) for seed, own in one[1].items()]
    shared = one[2].weights.keys() & other[2].weights.keys()
    assert len(shared) >= max(outcome.epochs for outcome in one[0].values())
    pairs += [(key, one[2].weights[key], other[2].weights[key]) for key in shared]
    for where, a, b in pairs:
        for key, value in a.items():
            off = (value.double() - b[key].double()).abs().max().item()
            assert off <= atol, f"{key} of seed and epoch {where} is off by {off:.1e}"


# As each would be alone ---------------------------------------------------------------------------------------------


@contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MAKES)
def test_every_step_is_that_of_the_seed_alone(name: str):
    task = in_float64(small(multilabel=name in ("GATv2", "MLP")))
    with float64():
        assert_same(*(run(MAKES[name], task, [3, 0], 3, sparse="sparse" in name) for run in (alone, stacked)))


class Scaled(Dropped):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Penalised(Scaled):
    def __init__(self, ridge: float = 0.0, **arguments: float) -> None:
        super().__init__(**arguments)
        self.ridge = ridge

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        return self.ridge * self.first.weight.square().sum()


STEPS: list[dict[str, Any]] = [
    {"lr": 0.1, "ridge": 0.1},
    {"lr": 0.1, "scale": 2, "patience": 1},
    {"weight_decay": 0.1, "gradient_clip_val": 0.01},
    {"scale": 0.5, "patience": 2, "criterion": "loss"},
    {"optimizer": functools.partial(optim.Adam, betas=(0.5, 0.9)), "gradient_clip_val": 0.1},
]
TOGETHER = Optimisation(0.02, scheduler=CosineAnnealingLR, warmup=3, ema=0.5)
SETTINGS: dict[str, tuple[Callable[[], Task], Sequence[int], Optimisation, dict[str, Any]]] = {
    "one graph": (small, [3, 0], Optimisation(0.01), {}),
    "schedule and average": (small, [3], TOGETHER, {}),
    "graphs": (OBJECTIVES["graphs"], [3], TOGETHER, {"batch_size": 2, "accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_member_with_settings_of_its_own_is_its_own_run(name: str):
    (load, seeds, steps, options), settings = SETTINGS[name], STEPS
    task = in_float64(load())

    def make(**arguments: float) -> nn.Module:
        return headed(Scaled(**arguments), task) if task.has_many_graphs else Penalised(**arguments)

    if task.has_many_graphs:
        settings = STEPS[1:]
    options = {**options, "patience": 4, "settings": settings, "steps": steps}
    with float64():
        one, other = alone(make, task, seeds, 8, **options), stacked(make, task, seeds, 8, leave=range(99), **options)
    assert_same(one, other)
    assert len({outcome.epochs for outcome in one[0].values()}) > 1 or name == "schedule and average"


UNLIKE: list[dict[str, Any]] = [
    {"optimizer": optim.SGD, "lr": 0.1},
    {"scheduler": CosineAnnealingLR},
    {"warmup": 3},
    {"ema": 0.9},
    {"label_smoothing": 0.2},
]


def test_settings_that_no_stack_can_have_are_trained_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    sizes, options = [], {"max_epochs": 3, "progress": False, "accelerator": "cpu"}
    fit = fitting.fit_stack
    monkeypatch.setattr(
        fitting, "fit_stack", lambda models, *rest, **its: sizes.append(len(models)) or fit(models, *rest, **its)
    )
    results, stack = train(MAKES["MLP"], small(), [3], settings=[{}, *UNLIKE, {"lr": 0.1}], **options)
    assert sizes == [2, 1, 1, 1, 1, 1]
    assert [result.settings for result in results] == [{}, *UNLIKE, {"lr": 0.1}]
    _, own = train(MAKES["MLP"], small(), [3], settings=UNLIKE[:1], **options)
    for value, weights in zip(own.parameters(), stack.parameters(), strict=True):
        torch.testing.assert_close(value[0], weights[1])
        assert not torch.allclose(value[0], weights[0])
    (one, *_), (*_, other) = several(small(), [3], 0.1, 5, [{}]), several(small(), [3], 0.1, 5, [{"ema": 0.5}])
    with pytest.raises(
        ValueError, match=r"a member of the stack has seed 3, .*ema=0\.5.*, expected the loss, .*ema=None"
    ):
        Stacked([MAKES["MLP"](), MAKES["MLP"]()], [one, other])


def test_functions_of_one_name_are_schedules_of_their_own():
    schedules = [
        functools.partial(optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch, q=q: q**epoch) for q in (0.9, 1)
    ]
    keys = [
        Member(0, NodeLabels(3), Optimisation(0.1, scheduler=make)).stack_key for make in [*schedules, schedules[0]]
    ]
    assert keys[0] == keys[2] != keys[1]


def test_a_scheduler_that_is_not_torchs_has_one_setting_of_the_optimizer():
    def own(optimizer: optim.Optimizer) -> Any:
        return CosineAnnealingLR(optimizer, 9, eta_min=optimizer.param_groups[0]["lr"] / 2)

    keys = [
        {Member(0, NodeLabels(3), Optimisation(lr, scheduler=make)).stack_key for lr in (0.1, 0.2)}
        for make in (own, functools.partial(CosineAnnealingLR, T_max=9), None)
    ]
    assert [len(each) for each in keys] == [2, 1, 1]


@pytest.mark.parametrize("sparse", [False, True])
def test_members_may_differ_in_dropout(sparse: bool):
    task, names = in_float64(small()), ("dropout", "attention_dropout")
    settings = [dict(zip(names, p, strict=True)) for p in ((0.6, 0.6), (0.0, 0.4), (0.3, 0.0))]
    make = lambda **options: GAT(6, [4], 3, [2, 1], **options)  # noqa: E731
    with float64():
        assert_same(*(run(make, task, [3], 2, sparse=sparse, settings=settings) for run in (alone, stacked)))


def test_torchs_dropout_has_the_probability_of_each_member():
    stack = Stack([nn.Sequential(nn.Linear(1, 1), nn.Dropout(p)) for p in (0, 0.25, 1.0)])
    out = stack.each(lambda model: model(torch.ones(10_000, 1)))
    assert [round(share, 1) for share in (out == 0).double().mean((1, 2)).tolist()] == [0.0, 0.2, 1.0]
    kept = torch.stack([row[row != 0].unique() for row in out[:2]]).flatten()
    torch.testing.assert_close(kept, stack.eval()(torch.ones(1, 1)).flatten()[:2] / torch.tensor([1, 0.75]))
    assert [stack[row][1].p for row in range(3)] == [0, 0.25, 1.0]


def plain() -> nn.Module:
    return GAT(6, [4], 3, [2, 1])


@functools.cache
def six_alone() -> Runs:
    task = in_float64(small())
    with float64():
        return alone(plain, task, range(6), 300, patience=3)


@pytest.mark.parametrize("leave", [None, range(1, 1000, 7)], ids=str)
def test_each_stops_when_it_would_and_the_rest_go_on(leave: Sequence[int] | None):
    task = in_float64(small())
    with float64():
        other = stacked(plain, task, range(6), 300, patience=3, leave=leave)
    assert len({outcome.epochs for outcome in six_alone()[0].values()}) > 3
    assert_same(six_alone(), other)
    assert other[2].left_at or leave is None


# Random numbers -----------------------------------------------------------------------------------------------------


def splitmix64(key: int, n: int) -> int:
    """Return the n-th word of SplitMix64, as its authors' C code computes it, without its sign bit."""
    word = (key + n * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return (word ^ word >> 31) % 2**63


@pytest.mark.parametrize("first", [False, True], ids=["drawn one by one", "with the first seeds"])
def test_the_seeds_of_a_key_are_splitmix64(first: bool):
    keys = [0, 1, 1234567, 2**62 + 12345, 2**63 - 1, *(key_of(seed, 7) for seed in range(5))]

    def draw(key: Tensor) -> Tensor:
        with keyed(key):
            return torch.stack([draw_seed(key.device) for _ in range(70)])  # and more than those that are known

    state = first_seeds(torch.tensor(keys)) if first else torch.tensor(keys)
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64(1234567, n) for n in range(1, 6)] == [word % 2**63 for word in known]  # of the authors' C code
    expected = torch.tensor([[splitmix64(key, n) for n in range(1, 71)] for key in keys])
    assert torch.equal(torch.func.vmap(draw)(state), expected)
    assert torch.equal(torch.stack([draw(key) for key in state]), expected)

    def dropping(key: Tensor, p: Tensor) -> Tensor:
        with keyed(key):
            return torch.stack([draw_seed(key.device, each) for each in p])

    p = (torch.arange(700).view(10, 70) % 7 > 2).double()  # a draw for p = 0 does not count
    for drawn, each, words in zip(torch.func.vmap(dropping)(state, p), p > 0, expected, strict=True):
        assert torch.equal(drawn[each], words[: int(each.sum())])


class Kernels(TorchDispatchMode):
    """Count the operations that compute: on a GPU, each is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return out


def test_a_seed_of_an_epoch_is_one_kernel():
    device = torch.device("cpu")
    for models, keys in ((1, torch.tensor(7)), (3, torch.tensor([7, 8, 9]))):
        for key, expected in ((keys, 13), (first_seeds(keys), 1)):

            def draw(key: Tensor) -> Tensor:
                with keyed(key):
                    return draw_seed(device)

            with Kernels() as kernels:
                seed = draw(key) if models == 1 else torch.func.vmap(draw)(key)
            assert len(kernels.names) == expected and seed.is_contiguous()


@pytest.mark.parametrize("stack", [False, True])
def test_a_step_copies_its_seeds_from_memory_that_stays(stack: bool, monkeypatch: pytest.MonkeyPatch):
    make = lambda: GAT(6, [4], 3, [2, 1], dropout=0.5)  # noqa: E731
    module = Stacked([make(), make()], of_seeds(range(2))) if stack else Transductive(make(), NodeLabels(3))
    data, module = small().train[0], module.train()
    module.begin_epoch(0, 1)
    memory, first = module._key.data_ptr(), module(data)
    module.begin_epoch(0, 2)
    assert module._key.data_ptr() == memory  # where a CUDA graph reads it
    with Kernels() as kernels, monkeypatch.context() as patch:
        patch.setattr(philox, "_mixed", None)  # no seed is computed
        second = module(data)
    assert kernels.names.count("clone") >= 4  # of the features and the coefficients of each layer
    (first + second).sum().backward()  # a seed that was drawn is not overwritten
    module.begin_epoch(0, 1)
    assert torch.equal(module(data), first)


def test_within_a_key_each_draws_its_own_and_torchs_generator_stays():
    device, before = torch.device("cpu"), torch.get_rng_state()

    def draw(key: Tensor) -> Tensor:
        with keyed(key):
            first = draw_seed(device)
            with keyed(key + 1):
                other = draw_seed(device)
            return torch.stack([first, other, draw_seed(device)])

    keys = torch.tensor([0, 5, 2**63 - 1])
    together = torch.func.vmap(draw)(keys)
    assert torch.equal(together, torch.stack([draw(key) for key in keys]))
    assert together.unique().numel() == 9
    assert torch.equal(before, torch.get_rng_state())
    draw_seed(device)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_run_again_in_the_backward_pass_drops_the_same(reentrant: bool):
    """torch.utils.checkpoint restores torch's generator, and knows of no key."""
    torch.manual_seed(0)
    layer, index = GATConv(5, 4, heads=2, dropout=0.5), torch.randint(9, (2, 30))
    x = torch.randn(9, 5, requires_grad=True)
    torch.manual_seed(1)
    expected = layer(x, index)
    torch.manual_seed(1)
    with keyed(torch.tensor(7)):
        by_key, again = layer(x, index), checkpoint(layer, x, index, use_reentrant=reentrant)
    assert torch.equal(again, expected) and not torch.equal(by_key, expected)
    direction = torch.randn(9, 8)
    wanted = torch.autograd.grad((expected * direction).sum(), [x, *layer.parameters()])
    (again * direction).sum().backward()
    for one, own in zip(wanted, [x, *layer.parameters()], strict=True):
        assert torch.equal(one, own.grad)


def test_after_a_fit_each_call_draws_its_own_mask():
    task, module = small(), Transductive(GAT(6, [4], 3, [2, 1], dropout=0.5), NodeLabels(3))
    trainer(Resumable(None, 0), epochs=2).fit(module, datamodule=TaskData(task))
    module.train()
    assert not torch.equal(module(task.train[0]), module(task.train[0]))


def test_keys_of_seeds_and_epochs_are_far_apart():
    keys = {key_of(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(keys) == 2500 and max(keys) < 2**63
    bits = torch.tensor(sorted(keys))[:, None] >> torch.arange(63) & 1
    assert (bits.float().mean(0) - 0.5).abs().max() < 5 * 0.5 / 50


def test_masks_of_different_seeds_are_independent():
    seeds, p = 40, 0.5
    module = Stacked([Masks() for _ in range(seeds)], of_seeds(range(seeds)))
    module.train()
    module.begin_epoch(0, 3)
    data = Data(torch.ones(200, 50), y=torch.zeros(200, dtype=torch.long))
    selected = (module(data) > 0).double().flatten(1)  # [S, n]
    n = selected.size(1)
    assert ((selected.mean(1) - p).abs() < 5 * (p * (1 - p) / n) ** 0.5).all()
    together = torch.corrcoef(selected) * n**0.5  # each is standard normal where the masks are independent
    pairs = together[torch.ones_like(together).tril(-1) > 0]
    assert pairs.abs().max() < 5 and pairs.square().mean().item() == pytest.approx(1.0, abs=0.25)
    module.begin_epoch(0, 4)
    again = (module(data) > 0).double().flatten(1)
    assert (torch.corrcoef(torch.cat([selected, again]))[:seeds, seeds:].abs() * n**0.5).max() < 5


# Killed and resumed -------------------------------------------------------------------------------------------------


def interrupted(name: str, folder: Path, kills: Sequence[tuple[int, str]], saved: float) -> tuple[list[Outcome], Any]:
    """Train seeds as one until each of the kills in turn, and then to the end; a checkpoint may be some epochs old."""
    folder.mkdir(exist_ok=True)
    path, many = folder / "last.ckpt", name == "graphs"
    task = OBJECTIVES["graphs"]() if many else small()
    steps = replace(TOGETHER, optimizer=optim.AdamW) if many else 0.01
    own = {"lr": 0.03, "gradient_clip_val": 0.5, **({"dropout": 0.2} if many else {})}
    seeds = range(2 if many else 3)
    patience, kind, data = (2, StackedInductive, {"batch_size": 2}) if many else (6, Stacked, {})

    def make(dropout: float = 0.5) -> nn.Module:
        return headed(GAT(6, [4], 3, [2, 1], dropout=dropout), task) if many else MAKES["PyG's GAT"]()

    for kill in [*kills, None]:
        members = several(task, seeds, steps, patience, [{}, own])
        stopping = EachStopping(members)
        files = EachMetrics([folder / f"{number}.csv" for number in range(len(members))], stopping)
        callbacks = [files, stopping, Resumable(path, 0, every=saved), *([Kill(*kill)] if kill else [])]
        fitted = trainer(*callbacks, epochs=40)
        module = kind([_built(member, make) for member in members], members)
        torch.rand(7)
        try:
            fitted.fit(module, datamodule=TaskData(task, **data), ckpt_path=path if path.exists() else None)
            assert kill is None
        except InterruptedError:
            pass
    fitted.test(module, datamodule=TaskData(task, **data), verbose=False)
    return outcomes(module, stopping), module


@pytest.mark.parametrize(
    ("name", "saved"),
    [pytest.param("one graph", 0.0, marks=pytest.mark.weekly), ("one graph", 0.02), ("graphs", 0.0)],
)
def test_interrupted_seeds_end_like_uninterrupted_ones(name: str, saved: float, tmp_path: Path):
    whole, module = interrupted(name, tmp_path / "whole", [], 1e9)
    epochs = sorted(outcome.epochs for outcome in whole)
    first, last = epochs[0], epochs[-1]
    assert first < last - 1  # killed before and after some had left
    kills = [(1, "batch"), (first - 1, "start"), (last - 1, "batch")]
    killed, again = interrupted(name, tmp_path / "killed", kills, saved)
    for one, other in zip(whole, killed, strict=True):
        assert replace(other, seconds=one.seconds) == one
    assert all(torch.equal(value, again.model.weights()[key]) for key, value in module.model.weights().items())
    for number, outcome in enumerate(whole):
        texts = [(tmp_path / run / f"{number}.csv").read_text() for run in ("whole", "killed")]
        assert texts[0] == texts[1]
        rows = list(csv.DictReader(texts[0].splitlines()))
        assert [int(row["epoch"]) for row in rows] == list(range(1, outcome.epochs + 1))
        score = next(key for key in rows[0] if key.startswith("val_") and key != "val_loss")
        assert float(rows[outcome.best_epoch - 1][score]) == pytest.approx(outcome.val)
    if saved == 0.0:  # they have stopped, and do not continue
        same, _ = interrupted(name, tmp_path / "killed", [], 0.0)
        assert [outcome.epochs for outcome in same] == [outcome.epochs for outcome in whole]


def test_a_checkpoint_of_other_seeds_is_an_error(tmp_path: Path):
    path, task = tmp_path / "last.ckpt", small()
    for seed in (0, 77):
        members = of_seeds([seed])
        module, stopping = Stacked([MAKES["PyG's GAT"]()], members), EachStopping(members)
        fit = trainer(stopping, Resumable(path, every=0.0), epochs=1)
        if seed == 0:
            fit.fit(module, datamodule=TaskData(task))
    with pytest.raises(ValueError, match=r"is of seed 0, .*, this stack of seed 77, .*\. Resume with the settings"):
        fit.fit(module, datamodule=TaskData(task), ckpt_path=path)


@pytest.mark.usefixtures("cuda")
def test_a_captured_step_of_a_stack_is_a_step(monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"patience": 3, "leave": range(100), "settings": STEPS}
    replayed = stacked(Penalised, small(), [3], 12, **options)
    epochs, sizes = max(outcome.epochs for outcome in replayed[0].values()), 1 + len(replayed[2].left_at)
    assert FakeGraph.replays == 2 * (epochs - sizes) and sizes > 1  # the first epoch of each stack is not captured
    monkeypatch.setattr(CudaGraphs, "_obstacle", lambda self, module: "it is not to be")
    assert_same(stacked(Penalised, small(), [3], 12, **options), replayed, atol=0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_captured_step_of_a_stack_is_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    captured, init = [], Captured.__init__
    monkeypatch.setattr(Captured, "__init__", lambda self, *arguments: captured.append(self) or init(self, *arguments))
    make = MAKES["GAT"]
    replayed = stacked(make, small(), range(3), 6, accelerator="gpu")
    assert len(captured) == 2  # training and validation
    monkeypatch.setattr(CudaGraphs, "_obstacle", lambda self, module: "it is not to be")
    assert_same(stacked(make, small(), range(3), 6, accelerator="gpu"), replayed, atol=1e-4)


# Memory -------------------------------------------------------------------------------------------------------------


def test_passes_give_what_all_at_once_gives():
    make, task, results = MAKES["GAT"], small(), []
    for size in (5, 2):
        outcomes, stack = train(
            make, task, range(5), patience=5, max_epochs=7, seeds_per_pass=size, progress=False, accelerator="cpu"
        )
        assert [one.seed for one in outcomes] == [0, 1, 2, 3, 4] and len(stack) == 5 and not stack.training
        results.append([(one.epochs, one.best_epoch, one.val, one.value) for one in outcomes])
        with torch.no_grad():
            out = stack(task.test[0].x, task.test[0].edge_index)  # [S, N, K]
        right = (out.argmax(-1) == task.test[0].y)[:, task.test[0].test_mask].double().mean(1) * 100
        assert right.tolist() == pytest.approx([one.value for one in outcomes])
    assert results[0] == results[1]


def test_passes_of_a_cpu_have_equal_sizes_within_its_budget():
    task, make = small(), MAKES["GAT"]
    plans = [plan_stack([make() for _ in range(models)], task, 1, False, torch.device("cpu")) for models in (2, 6)]
    saved = [plan.bytes_per_model for plan in plans]
    assert saved[1] <= saved[0] < 2 * saved[1] and saved[1] > task.train[0].x.nbytes  # they share some of it
    plan = StackPlan(False, CPU_BUDGET // 5)
    assert [plan.size(torch.device("cpu"), count) for count in (1, 5, 6, 11)] == [1, 5, 3, 4]
    assert (
        plan.size(torch.device("cuda"), 100) == 100
        and StackPlan(False, 2 * CPU_BUDGET).size(torch.device("cpu"), 9) == 1
    )


def test_where_memory_runs_out_half_as_many_go_on(capsys: pytest.CaptureFixture[str]):
    done: list[int] = []
    sizes: list[int] = []

    def one_pass(seeds: list[int]) -> None:
        sizes.append(len(seeds))
        if len(seeds) > 2:
            torch.empty(2**62 // len(seeds), dtype=torch.uint8)  # which no machine has
        done.extend(seeds)

    in_passes(lambda: [seed for seed in range(7) if seed not in done], 7, one_pass)
    assert done == list(range(7)) and sizes == [7, 4, 2, 2, 2, 1]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Memory does not suffice for {n} runs at once: going on with {m}" for n, m in ((7, 4), (4, 2))]


def test_other_errors_and_a_single_seeds_memory_are_raised():
    def fails(error: Exception) -> Callable[[list[int]], object]:
        def one_pass(seeds: list[int]) -> object:
            raise error

        return one_pass

    with pytest.raises(RuntimeError, match="a bug"):
        in_passes(lambda: [1, 2], 2, fails(RuntimeError("a bug")))
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: 1")):
        assert out_of_memory(error)
        with pytest.raises(type(error)):
            in_passes(lambda: [1, 2], 2, fails(error))


# What cannot be stacked ---------------------------------------------------------------------------------------------


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.weight.sum() > 0 else -super().forward(x)


class Remembering(nn.Linear):
    """Reads what is not a parameter of its own, so that in a stack the first one's serves all."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = torch.rand(())

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Lost(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("there is no rule. Report it:\n  [native code]")


class Listing(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scales = [0.5, float(torch.rand(()))]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Branching(6, 3), r"vmap fails \(It looks like .* a Tensor in some data-dependent control flow\)"),
        (lambda: Remembering(6, 3), "its outputs in a stack differ from those of the model alone"),
        (
            lambda: Listing(6, 3),
            r"model 1 of the stack has scales=\[0\.5, .*\], expected \[0\.5, .*\] as in the first: m",
        ),
        (
            lambda: GCN(6, 4, 2, 3, norm="batch_norm", norm_kwargs={"momentum": None}),
            r"vmap fails \(It looks like you're calling \.item\(\) on a Tensor\)",
        ),
        (lambda: GCN(-1, 4, 2, 3), r"vmap fails \(.* uninitialized parameter"),
        (lambda: GAT(6, [4], 3, [2, 1], negative_slope=float(torch.rand(()))), r"model 1 .* but not negative_slope"),
        (lambda: GAT(6, [4], 3, [2, 1], edge_dropout=float(torch.rand(()))), r"model 1 .*edge_dropout=0"),
        (lambda: Lost(6, 3), r"torch\.func\.vmap fails \(there is no rule\)"),
    ],
)
def test_models_that_cannot_be_stacked_are_errors(make: Make, why: str):
    task = small()
    fit = trial([seeded(seed, make) for seed in (0, 1)], task.objective, task.train[0])
    assert isinstance(fit, str) and re.search(why, fit), fit
    with pytest.raises(ValueError, match=rf"cannot be stacked: (?s:.)*{why}.*Train its seeds one by one"):
        train(make, task, range(2), progress=False, accelerator="cpu")


def test_an_interrupt_that_a_compiler_swallows_is_raised_again():
    class Losing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            raise SystemError

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trial([Losing(6, 3), Losing(6, 3)], NodeLabels(3), small().train[0])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_models_of_different_shapes_are_no_stack():
    with pytest.raises(ValueError, match=r"model 1 of the stack has weight \(4, 2\), expected weight \(3, 2\)"):
        Stack([nn.Linear(2, 3), nn.Linear(2, 4)])
    with pytest.raises(ValueError, match=r"model 1 of the stack has no bias, expected bias \(3,\) as in the first"):
        Stack([nn.Linear(2, 3), nn.Linear(2, 3, bias=False)])
    with pytest.raises(ValueError, match="there is no model to stack"):
        Stack([])


def test_a_model_of_a_stack_is_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch):
    models = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    models[0][0].bias.requires_grad_(False)
    stack = Stack(models)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__deepcopy__", None)  # no copy of the others
        taken = stack[1]
    assert [type(value) for value in taken.parameters()] == [nn.Parameter] * 4
    assert not taken[0].bias.requires_grad and taken[0].weight.requires_grad
    for key, value in models[1].state_dict().items():
        assert torch.equal(taken.state_dict()[key], value)
        taken.state_dict()[key].zero_()
        assert torch.equal(stack.weights()[key][1], value)
    with pytest.raises(IndexError):
        stack[3]


SHARED = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": []}, r"seeds are \[\], expected at least one, from 0 to 2\^32 - 1, and none twice\."),
        ({"seeds": [3, 3]}, r"seeds are \[3, 3\], expected"),
        ({"seeds": [0, -1]}, r"seeds are \[0, -1\], expected"),
        ({"seeds": [2**32]}, r"seeds are \[4294967296\], expected"),
        ({"seeds_per_pass": 0}, r"seeds_per_pass is 0, expected 'auto' or a number of seeds, at least 1\."),
        ({"batch_size": 0}, "batch_size is 0, expected a number of graphs, at least 1"),
        ({"gradient_clip_val": 1.0}, "Seeds cannot be trained as one: gradients would be clipped over all seeds"),
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed, whose scale would be that of all seeds"),
        ({"check_val_every_n_epoch": 5}, "validation is every 5 epochs, and the stopping rule needs each epoch"),
        ({"devices": 2, "strategy": "ddp"}, r"trainer has 2 processes, expected one: each would train all seeds\."),
        ({"make_model": lambda: SHARED}, r"make_model\(\) returned the same weights again"),
        ({"make_model": lambda: nn.Sequential(SHARED)}, r"make_model\(\) returned the same weights again"),
        ({"settings": []}, "settings is empty, expected at least one"),
        (
            {"make_model": lambda C=4: MLP([6, C, 3], norm=None), "settings": [{"lr": 0.1}, {"C": 8}]},
            r"has .* \(8, 6\), expected .* \(4, 6\) as .*\. Tried with lr=0\.1, seed 0; C=8, seed 9\. Train settings",
        ),
    ],
)
def test_trainings_that_would_not_be_those_of_each_seed_are_errors(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        train(**{"make_model": MAKES["MLP"], "task": small(), "accelerator": "cpu", "max_epochs": 1, **arguments})


# Output -------------------------------------------------------------------------------------------------------------


def test_progress_shows_seeds_range_and_time_and_metrics_end_with_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # a second for each epoch
    monkeypatch.setattr("gat_pyg.seeds.callbacks.time", clock)
    members = of_seeds(range(6), Optimisation(0.01), patience=4)
    stopping = EachStopping(members, compact_at=0.9)  # the stack keeps members that have stopped
    module = Stacked([_built(member, MAKES["MLP"]) for member in members], members)
    callbacks = [EachMetrics([tmp_path / f"{member.seed}.csv" for member in members], stopping), stopping]
    trainer(*callbacks, EachProgress("mine", stopping, every=0.0), epochs=40).fit(module, datamodule=TaskData(small()))
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"mine  epoch 1  6/6 running  val \d+\.\d to \d+\.\d %", lines[0]), lines[0]
    for line in lines[1:-1]:
        assert " to " not in line or len({*re.findall(r"(\S+) to (\S+) %", line)[0]}) == 2
        assert re.fullmatch(
            r"mine  epoch \d+  \d/6 running  val (\d+\.\d to )?\d+\.\d %  at least \d+ s left  [\d.]+ m?s/epoch",
            line,
        ), line
    running = [int(re.search(r"(\d)/6 running", line)[1]) for line in lines]
    assert running == sorted(running, reverse=True) and len(set(running)) > 2
    epochs = [rule.epoch for rule in stopping.rules.values()]
    assert sum(stopping.seconds.values()) == pytest.approx(max(epochs))
    assert [len((tmp_path / f"{member.seed}.csv").read_text().splitlines()) - 1 for member in members] == epochs


def test_seeds_without_a_finite_epoch_warn_and_keep_the_last_weights():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float("nan")

    members = of_seeds([3, 4], patience=3)
    stopping = EachStopping(members)
    module = Stacked([Broken(6, 3), Broken(6, 3)], members)
    message = r"seed 3; seed 4: the validation loss or score was not finite in any epoch"
    with pytest.warns(UserWarning, match=message):
        trainer(stopping, epochs=9).fit(module, datamodule=TaskData(small()))
    assert [rule.epoch for rule in stopping.rules.values()] == [1, 1]
    assert module.model.weights()["weight"].isnan().all()


class Burning(nn.Linear):
    """A classifier that some seeds let overflow after six epochs at a learning rate of 0.01."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.fuse = nn.Parameter(torch.where(torch.rand(()) < 0.5, 0.0, -1e6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * (self.fuse * 1600).exp()  # inf from 0.0555 on

    def penalty(self, out: Tensor, data: Data) -> Tensor:
        return -self.fuse


@pytest.mark.filterwarnings("ignore:.* diverged:UserWarning")
def test_a_seed_that_diverges_stops_at_once_and_leaves_the_others_alone():
    task, seeds = small(), range(4)
    one, other = alone(Burning, task, seeds, 30), stacked(Burning, task, seeds, 30)
    diverged = [seed for seed, outcome in other[0].items() if outcome.epochs < 30]
    assert 0 < len(diverged) < 4  # both kinds took part
    for seed, outcome in other[0].items():
        assert (outcome.epochs, outcome.best_epoch <= 5) == ((7, True) if seed in diverged else (30, False))
        assert replace(outcome, seconds=0.0) == one[0][seed]
        for key, value in one[1][seed].items():
            torch.testing.assert_close(other[1][seed][key], value)


def test_rows_are_copied_and_no_others():
    def weights(offset: float) -> dict[str, Tensor]:
        numbers = torch.arange(24.0).view(4, 2, 3) + offset
        return {
            "matrix": numbers,
            "vector": numbers[:, 0],
            "scalar": numbers[:, 0, 0],
            "count": numbers[:, 0, 0].long(),
        }

    source = weights(100.0)
    source["matrix"][1], source["matrix"][2] = torch.nan, torch.inf
    for copy_rows in (seeds_callbacks._copy_each_row, _copy_all_rows):
        for rows in ([1], [3, 0, 2], [0, 1, 2, 3]):
            selected, before = {key: value.clone() for key, value in weights(0.0).items()}, weights(0.0)
            places = {key: value.data_ptr() for key, value in selected.items()}
            copy_rows(selected, source, rows)
            for key, value in selected.items():
                expected = [source[key][row] if row in rows else before[key][row] for row in range(4)]
                torch.testing.assert_close(value, torch.stack(expected), rtol=0, atol=0, equal_nan=True)
                assert value.data_ptr() == places[key]  # in place


def test_a_gpu_keeps_the_best_weights_by_one_kernel_per_tensor():
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called[str(func.overloadpacket)] += 1
            return func(*args, **(kwargs or {}))

    stopping, called = EachStopping(of_seeds(range(4))), collections.Counter[str]()
    module = Stacked([seeded(seed, MAKES["GAT"]) for seed in range(4)], of_seeds(range(4))).to("meta")
    stopping._update_best(module, [0])  # the first time, all are copied
    with Operators():
        stopping._update_best(module, [])
    assert not called
    with Operators():
        stopping._update_best(module, [0, 2, 3])
    assert called["aten.where"] == len(stopping.best_weights) > 4 and called["aten._to_copy"] == 1
    assert not called["aten.copy_"] and not called["aten.select"]


def test_a_module_of_one_model_is_an_error():
    with pytest.raises(TypeError, match=r"Transductive is not a stack of seeds, expected gat_pyg\.seeds\.Stacked"):
        trainer(EachStopping(of_seeds([0])), epochs=1).fit(
            Transductive(MAKES["MLP"](), NodeLabels(3)), datamodule=TaskData(small())
        )
