"""The learning rate of each epoch, also after a resume and for the seeds of a stack."""

import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import CosineAnnealingLR

from gat_pyg.models import GAT
from gat_pyg.seeds import train
from gat_pyg.training import Optimisation, Resumable, TaskData
from tests.objectives import OBJECTIVES, one_graph, setup
from tests.training.loaders import Kill, pytestmark, trainer  # noqa: F401 (marks of this file)

T = 6


class Rates(Callback):
    """The learning rate of each epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["nodes of one graph", "graphs"])
def test_the_learning_rate_is_half_a_cosine_also_after_a_kill(tmp_path: Path, name: str):
    def run(path: Path, *kill: Kill) -> tuple[LightningModule, list[float]]:
        task, rates = OBJECTIVES[name](), Rates()
        module = setup(task)
        module.optimisation = Optimisation(0.01, 5e-4, scheduler=CosineAnnealingLR)
        resume = path if path.exists() else None
        with suppress(InterruptedError):
            trainer(rates, Resumable(path, seed=1, every=0.0), *kill, epochs=T).fit(
                module, datamodule=TaskData(task, batch_size=2, seed=1), ckpt_path=resume
            )
        return module, rates.rates

    alone, whole = run(tmp_path / "whole.ckpt")
    _, first = run(tmp_path / "killed.ckpt", Kill(3, "batch"))
    resumed, rest = run(tmp_path / "killed.ckpt")
    assert whole == pytest.approx([0.01 / 2 * (1 + math.cos(math.pi * t / T)) for t in range(T)])
    assert first[:3] + rest == whole
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), resumed.parameters(), strict=True))


def test_every_seed_of_a_stack_has_the_schedule():
    def weights(seeds: list[int]) -> list[torch.Tensor]:
        _, stack = train(
            lambda: GAT(6, [4], 3, [2, 1]),
            one_graph(),
            seeds,
            optimisation=Optimisation(scheduler=CosineAnnealingLR),
            max_epochs=4,
            progress=False,
            accelerator="cpu",
        )
        return [parameter.detach() for parameter in stack[len(seeds) - 1].parameters()]

    torch.testing.assert_close(weights([0, 1]), weights([1]))


def test_a_cosine_needs_its_end():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(
        ValueError, match=r"max_epochs is -1, expected at least 1: CosineAnnealingLR ends there\. Give the"
    ):
        Optimisation(scheduler=CosineAnnealingLR).configure(parameters, parameters, -1)
