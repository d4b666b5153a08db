"""A run that was interrupted ends like one that was not; checkpoints are whole, safe and checked."""

from __future__ import annotations

import csv
import errno
import math
import os
import pickle
import signal
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import optim
from torch.optim import lr_scheduler as lr
from torch_geometric.nn import GAT

from gat_pyg.files import full
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Optimisation, PaperStopping, Resumable, SafeCheckpoints, TaskData, Transductive
from gat_pyg.training.progress import MetricsFile
from tests.objectives import OBJECTIVES, one_graph, setup
from tests.training.loaders import Kill, pytestmark, trainer  # noqa: F401 (marks of this file)
from tests.training.test_stopping import oracle


class Interrupt(Kill):
    """Send SIGINT in the middle of an epoch."""

    times = 1

    def _die(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


class InterruptTwice(Interrupt):
    times = 2


class Scores(Callback):
    """The validation score and loss of each epoch; lower scores are negated."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics, metric = trainer.callback_metrics, pl_module.objective.metric
        self.values.append((float(metrics[f"val_{metric.name}"]), float(metrics["val_loss"])))


# The optimizer, its schedule and the rest of each objective's training, with the number of accumulated batches.
OPTIMISATIONS: list[tuple[Any, Any, dict[str, Any], int]] = [
    (optim.Adam, None, {}, 1),
    (partial(optim.LBFGS, max_iter=3), partial(lr.StepLR, step_size=2), {"weight_decay": 0.0}, 1),
    (optim.AdamW, lr.CosineAnnealingLR, {"warmup": 3, "ema": 0.7}, 2),
    (partial(optim.SGD, momentum=0.9, nesterov=True), partial(lr.ExponentialLR, gamma=0.9), {"ema": 0.5}, 1),
    (optim.RMSprop, partial(lr.ReduceLROnPlateau, patience=0), {"warmup": 4, "gradient_clip_val": 0.1}, 2),
    (optim.NAdam, partial(lr.ReduceLROnPlateau, patience=0, mode="max"), {"ema": 0.7}, 1),
    (optim.RAdam, partial(lr.MultiStepLR, milestones=[1, 4]), {"gradient_clip_val": 0.1}, 1),
    (optim.Adamax, partial(lr.LinearLR, total_iters=4), {}, 2),
    (optim.Adagrad, partial(lr.PolynomialLR, total_iters=12), {"warmup": 2}, 1),
    (optim.Adadelta, None, {"warmup": 6, "ema": 0.9}, 1),
    (optim.ASGD, partial(lr.ConstantLR, total_iters=3), {"ema": 0.7}, 1),
    (optim.Rprop, partial(lr.CosineAnnealingWarmRestarts, T_0=3), {"weight_decay": 0.0}, 1),
    (optim.Adafactor, partial(lr.StepLR, step_size=3), {"gradient_clip_val": 1.0, "ema": 0.7}, 2),
    (optim.SGD, partial(lr.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2), {}, 1),
    (partial(optim.Adam, amsgrad=True), partial(lr.OneCycleLR, max_lr=0.02, total_steps=13), {"ema": 0.5}, 1),
    (partial(optim.RMSprop, momentum=0.9, centered=True), None, {"lr": 0.001, "warmup": 5}, 2),
]


def interrupted(
    name: str, folder: Path, ends: list[Kill], saved: float
) -> tuple[LightningModule, PaperStopping, list[tuple[float, float]]]:
    """Train until each of `ends` in turn, and then to the end; the checkpoint may be some epochs old."""
    folder.mkdir()
    path, task = folder / "last.ckpt", OBJECTIVES[name]()
    make, schedule, others, accumulated = OPTIMISATIONS[list(OBJECTIVES).index(name) % len(OPTIMISATIONS)]
    optimisation = Optimisation(**{"lr": 0.01, "weight_decay": 5e-4, **others}, optimizer=make, scheduler=schedule)
    for end in [*ends, None]:
        rule, scores = PaperStopping(patience=4), Scores()
        callbacks = [scores, rule, MetricsFile(folder / "metrics.csv"), Resumable(path, seed=1, every=saved)]
        fitted = trainer(*callbacks, *([end] if end else []), epochs=12, accumulate_grad_batches=accumulated)
        torch.manual_seed(len(folder.name))  # random numbers before the first epoch must not matter
        module = setup(task)
        module.optimisation = optimisation
        torch.rand(7)
        checkpoint = path if path.exists() else None
        try:
            fitted.fit(module, datamodule=TaskData(task, batch_size=2, seed=1), ckpt_path=checkpoint)
            assert end is None
        except (InterruptedError, SystemExit):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return module, rule, scores.values


# kills at any point, two of the same epoch, and signals, after which the epoch is finished and saved
ENDS: list[Callable[[], Kill]] = [
    lambda: Kill(1, "batch"),
    lambda: Interrupt(2, "start"),
    lambda: Kill(4, "validation"),
    lambda: Kill(4, "start"),
    lambda: Interrupt(5, "validation"),
]
SAVED = [(name, 0.0) for name in OBJECTIVES] + [("nodes of one graph", 0.05), ("nodes of one graph", 1e9)]  # seconds


@pytest.mark.parametrize(("name", "saved"), SAVED)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str, saved: float):
    whole, rule, scores = interrupted(name, tmp_path / "whole", [], 1e9)
    metric = OBJECTIVES[name]().objective.metric
    ranks = [(1e3 - score if metric.lower else score, loss) for score, loss in scores]  # the oracle begins at 0
    assert (rule.epoch, rule.best_epoch) == oracle(ranks, 4) and rule.epoch >= 6
    assert (rule.kept_score, rule.kept_loss) == scores[rule.best_epoch - 1]
    ends = ENDS if saved else ENDS[list(OBJECTIVES).index(name) % 2 :: 2]
    parts, again, _ = interrupted(name, tmp_path / "parts", [end() for end in ends], saved)
    assert (again.epoch, again.best_epoch, again.kept_loss) == (rule.epoch, rule.best_epoch, rule.kept_loss)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    metrics = [(tmp_path / run / "metrics.csv").read_text() for run in ("whole", "parts")]
    assert metrics[0] == metrics[1]
    rows = list(csv.DictReader(metrics[0].splitlines()))
    assert [int(row["epoch"]) for row in rows] == list(range(1, rule.epoch + 1))
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())


def test_after_a_signal_the_epoch_is_finished_and_saved(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(SystemExit, match="130"):
        trainer(PaperStopping(), Resumable(path), Interrupt(2, "start")).fit(
            setup(one_graph()), datamodule=TaskData(one_graph())
        )
    assert torch.load(path)["callbacks"]["PaperStopping"]["epoch"] == 3


def test_a_second_signal_does_not_wait_for_the_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    callbacks = [Resumable(tmp_path / "last.ckpt"), InterruptTwice(2, "start")]
    with pytest.raises(SystemExit, match="130"):
        trainer(*callbacks).fit(setup(one_graph()), datamodule=TaskData(one_graph()))
    assert capsys.readouterr().err == "Finishing this epoch; press Ctrl-C again to stop now.\n"
    assert not (tmp_path / "last.ckpt").exists()


def test_a_run_that_had_stopped_is_not_continued_but_its_clock_is(tmp_path: Path):
    task, path, states = one_graph(), tmp_path / "last.ckpt", []
    for resume in (None, path):
        module, rule, resumable = setup(task), PaperStopping(patience=2), Resumable(path, every=0)
        trainer(rule, resumable, epochs=50).fit(module, datamodule=TaskData(task), ckpt_path=resume)
        assert resumable.seconds == resumable.seconds  # the clock has stopped
        states.append((rule.epoch, rule.best_epoch, resumable.seconds))
        assert all(torch.equal(value, rule.weights[key]) for key, value in module.state_dict().items())
    assert states[0][:2] == states[1][:2]
    assert 0.5 * states[0][2] < states[1][2] < states[0][2] + 5  # since the last checkpoint


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_process_ends_all_after_the_epoch(tmp_path: Path, rank: int):
    saved: list[Path] = []
    other = torch.tensor([0, 0] if rank == 0 else [0, 143])  # of the other process
    strategy = types.SimpleNamespace(
        root_device=torch.device("cpu"), reduce=lambda ours, reduce_op: torch.stack([ours, other]).amax(0)
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


def test_each_rank_draws_its_own_numbers_by_seed_and_epoch():
    def drawn(seed: int, rank: int, epoch: int) -> list[float]:
        place: Any = types.SimpleNamespace(global_rank=rank, current_epoch=epoch)
        module: Any = types.SimpleNamespace(device=torch.device("cpu"))
        Resumable(None, seed).on_train_epoch_start(place, module)
        return torch.rand(2).tolist()

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    draws = [drawn(*place) for place in places]
    assert draws == [drawn(*place) for place in places] and all(draws.count(each) == 1 for each in draws)


def test_an_impossible_seed_is_an_error():
    with pytest.raises(ValueError, match=r"seed is -1, expected a number from 0 to 2\^32 - 1"):
        Resumable(None, seed=-1)


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, task = tmp_path_factory.mktemp("checkpoint") / "last.ckpt", one_graph()
    trainer(PaperStopping(), Resumable(path, every=0), epochs=2).fit(setup(task), datamodule=TaskData(task))
    return path.read_bytes()


@pytest.fixture
def checkpoint(written: bytes, tmp_path: Path) -> Path:
    (tmp_path / "last.ckpt").write_bytes(written)
    return tmp_path / "last.ckpt"


def refit(path: Path, module: LightningModule | None = None) -> None:
    task = one_graph()
    fitted = trainer(PaperStopping(), Resumable(None), epochs=3)
    fitted.fit(module or setup(task), datamodule=TaskData(task), ckpt_path=path)


def test_a_checkpoint_that_would_run_code_is_an_error(checkpoint: Path):
    made = checkpoint.parent / "made"

    class Bomb:
        def __reduce__(self) -> object:
            return os.mkdir, (str(made),)

    plain = torch.load(checkpoint, weights_only=True)  # tensors and plain values only
    torch.save({**plain, "extra": Bomb()}, checkpoint)
    with pytest.raises(ValueError, match=r"last\.ckpt would run code on load: it needs \w+\.mkdir\. No code"):
        refit(checkpoint)
    checkpoint.write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(ValueError, match=r"last\.ckpt (would run code|cannot be read)"):
        refit(checkpoint)  # the message of torch.load differs by version
    assert not made.exists()


@pytest.mark.parametrize(
    "content", [0, 10, 1000, -1, -1000, b"a text", b"0", b"}", b"]", b"Rx", b"\x80\x02e."], ids=repr
)
def test_a_truncated_or_other_file_is_an_error(checkpoint: Path, content: int | bytes):
    checkpoint.write_bytes(content if isinstance(content, bytes) else checkpoint.read_bytes()[:content])
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read: it is truncated or not a checkpoint"):
        refit(checkpoint)


@pytest.mark.parametrize("callbacks", [None, {}, {"PaperStopping": {}}, {"PaperStopping": {"epoch": 2}}, "no clock"])
def test_a_checkpoint_without_the_state_of_a_callback_is_an_error(checkpoint: Path, callbacks: Any):
    state = torch.load(checkpoint, weights_only=True)
    message = r"has no state of PaperStopping, expected epoch, wait, .*start again without"
    if callbacks == "no clock":
        callbacks = {key: value for key, value in state["callbacks"].items() if key != "Resumable"}
        message = "has no state of Resumable, expected seconds under callbacks.Resumable"
    torch.save({**state, "callbacks": callbacks}, checkpoint)
    with pytest.raises(ValueError, match=message):
        refit(checkpoint)


def test_a_checkpoint_that_does_not_fit_is_an_error(checkpoint: Path):
    other = Transductive(GAT(6, 5, 2, 3, heads=1), NodeLabels(3))
    with pytest.raises(ValueError, match=r"does not fit this model: model\.convs\.0\.\w+ has shape .* in the file"):
        refit(checkpoint, other)
    torch.save({"state_dict": {}}, checkpoint)
    with pytest.raises(ValueError, match="is not a checkpoint of a training"):
        refit(checkpoint)
    checkpoint.unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*last\.ckpt"):
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

    def die(state: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        SafeCheckpoints().save_checkpoint({}, checkpoint)
    assert checkpoint.read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]
