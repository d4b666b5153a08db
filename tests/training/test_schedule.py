"""The learning rate of each epoch, also after a resume and for the seeds of a stack."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import Callback

from gat_pyg.models import GAT
from gat_pyg.seeds import train
from gat_pyg.training import Optimisation, Resumable, SafeCheckpoints, TaskData
from tests.objectives import OBJECTIVES, one_graph, setup

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
T = 6


class Rates(Callback):
    """The learning rate of each epoch; ends the fit in the middle of epoch `kill`."""

    def __init__(self, kill: int | None = None) -> None:
        self.kill, self.rates = kill, []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.kill:
            raise InterruptedError

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fitted(name: str, path: Path, rates: Rates) -> LightningModule:
    task = OBJECTIVES[name]()
    module = setup(task)
    module.optimisation = Optimisation(0.01, 5e-4, "cosine")
    trainer = Trainer(
        max_epochs=T,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[rates, Resumable(path, seed=1, every=0.0)],
        plugins=[SafeCheckpoints()],
    )
    resumed = path if path.exists() else None
    try:
        trainer.fit(module, datamodule=TaskData(task, batch_size=2, seed=1), ckpt_path=resumed)
    except InterruptedError:
        assert rates.kill is not None
    return module


@pytest.mark.parametrize("name", ["nodes of one graph", "graphs"])
def test_the_learning_rate_is_half_a_cosine_also_after_a_kill(tmp_path: Path, name: str):
    whole, first, rest = Rates(), Rates(kill=3), Rates()
    alone = fitted(name, tmp_path / "whole.ckpt", whole)
    fitted(name, tmp_path / "killed.ckpt", first)
    resumed = fitted(name, tmp_path / "killed.ckpt", rest)
    expected = [0.01 / 2 * (1 + math.cos(math.pi * t / T)) for t in range(T)]
    assert whole.rates == pytest.approx(expected)
    assert first.rates[:3] + rest.rates == whole.rates
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), resumed.parameters(), strict=True))


def test_every_seed_of_a_stack_has_the_schedule():
    def weights(seeds: list[int]) -> list[torch.Tensor]:
        options: dict[str, Any] = {
            "optimisation": Optimisation(schedule="cosine"),
            "max_epochs": 4,
            "progress": False,
            "accelerator": "cpu",
        }
        _, stack = train(lambda: GAT(6, [4], 3, [2, 1]), task, seeds, **options)
        return [parameter.detach() for parameter in stack[len(seeds) - 1].parameters()]

    task = one_graph()
    torch.testing.assert_close(weights([0, 1]), weights([1]))


def test_a_cosine_needs_its_end():
    module = setup(one_graph())
    module.optimisation = Optimisation(0.01, 5e-4, "cosine")
    module._trainer = Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(ValueError, match=r"max_epochs is -1, expected at least 1: the cosine ends there\. Give the"):
        module.configure_optimizers()
