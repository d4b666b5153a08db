"""Optimizers, learning rates, clipping, accumulation and averages: as by hand, and in stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch_geometric import nn as pyg

from gat_pyg.data import Task
from gat_pyg.models import GAT, Readout
from gat_pyg.seeds import train
from gat_pyg.seeds.fitting import seeded
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import Inductive, Optimisation, PaperStopping, Resumable, TaskData, Transductive
from gat_pyg.training.optimisation import ELEMENTWISE
from tests.objectives import labelled_graphs, one_graph
from tests.training.loaders import pytestmark, steps_of, trainer  # noqa: F401 (marks of this file)

EPOCHS, LR, DECAY = 8, 0.05, 0.1


def double(task: Task) -> Task:
    for data in (*task.train, *task.val, *task.test):
        data.x = data.x.double()
    return task


def network() -> nn.Module:
    torch.manual_seed(0)
    return Readout(pyg.GAT(6, 4, 2, 3, heads=2, norm="batch", bias=False)).double()


# By hand ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Tensor, Tensor, dict[str, Any], float], Tensor]


def adam(w: Tensor, g: Tensor, state: dict[str, Any], lr: float, decoupled: bool = False) -> Tensor:
    w, g = (w * (1 - lr * DECAY), g) if decoupled else (w, g + DECAY * w)
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = m = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = v = 0.999 * state.get("v", 0) + 0.001 * g**2
    return w - lr * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def sgd(w: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> Tensor:
    state["m"] = 0.9 * state.get("m", 0) + g + DECAY * w
    return w - lr * state["m"]


def rmsprop(w: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> Tensor:
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * (g + DECAY * w) ** 2
    return w - lr * (g + DECAY * w) / (state["v"].sqrt() + 1e-8)


def cosine(epoch: int, losses: list[float]) -> float:
    return 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))


def plateau(epoch: int, losses: list[float]) -> float:
    """Half after each second epoch in a row without a lower loss."""
    factor, best, bad = 1.0, math.inf, 0
    for loss in losses:
        best, bad = (loss, 0) if loss < best * (1 - 1e-4) else (best, bad + 1)
        factor, bad = (factor / 2, 0) if bad > 1 else (factor, bad)
    return factor


Factor = Callable[[int, list[float]], float]
CASES: dict[str, tuple[Rule, Factor, dict[str, Any], int]] = {
    "adam": (adam, lambda epoch, losses: 1.0, {}, 1),
    "adamw, cosine after a warm-up": (
        partial(adam, decoupled=True),
        lambda epoch, losses: min(1.0, (epoch + 1) / 3) * cosine(epoch, losses),
        {"optimizer": optim.AdamW, "scheduler": schedulers.CosineAnnealingLR, "warmup": 3},
        1,
    ),
    "sgd, steps, clipped, accumulated": (
        sgd,
        lambda epoch, losses: 0.5 ** (epoch // 3),
        {
            "optimizer": partial(optim.SGD, momentum=0.9),
            "scheduler": partial(schedulers.StepLR, step_size=3, gamma=0.5),
            "gradient_clip_val": 0.1,
        },
        2,
    ),
    "rmsprop, plateau, averaged": (
        rmsprop,
        plateau,
        {
            "optimizer": optim.RMSprop,
            "scheduler": partial(schedulers.ReduceLROnPlateau, factor=0.5, patience=1),
            "ema": 0.8,
        },
        1,
    ),
    "all of them": (
        rmsprop,
        lambda epoch, losses: min(1.0, (epoch + 1) / 2) * plateau(epoch, losses),
        {
            "optimizer": optim.RMSprop,
            "scheduler": partial(schedulers.ReduceLROnPlateau, factor=0.5, patience=1),
            "warmup": 2,
            "gradient_clip_val": 0.2,
            "ema": 0.9,
        },
        2,
    ),
}


def by_hand(
    rule: Rule, factor: Factor, accumulated: int, clip: float = math.inf, ema: float = 0.0
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of the epoch with the lowest validation loss, and its number."""
    task, model = double(labelled_graphs()), network()
    weights, states, average = list(model.parameters()), [], {}
    states = [{} for _ in weights]
    losses: list[float] = []
    for epoch in range(EPOCHS):
        batches = [batch for (batch,) in steps_of(task, epoch=epoch, batch_size=2, seed=1)]
        assert len(batches) == 3  # the last step of accumulated gradients has one batch
        for start in range(0, len(batches), accumulated):
            window = batches[start : start + accumulated]
            model.train()
            logits = [model(batch.x, batch.edge_index, batch=batch.batch) for batch in window]
            sums = [
                F.cross_entropy(out, batch.y, ignore_index=-1, reduction="sum")
                for out, batch in zip(logits, window, strict=True)
            ]
            loss = sum(sums) / sum(int((batch.y >= 0).sum()) for batch in window)
            gradients = torch.autograd.grad(loss, weights)
            length = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
            for weight, gradient, state in zip(weights, gradients, states, strict=True):
                gradient = gradient * min(1.0, clip / (length + 1e-6))  # as torch
                weight.data = rule(weight.data, gradient, state, LR * factor(epoch, losses))
            for name, value in model.state_dict().items():
                decay = ema if name in average and value.is_floating_point() else 0.0
                average[name] = decay * average.get(name, value) + (1 - decay) * value
        steps = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        model.eval()
        outs = [(model(data.x, data.edge_index), data.y) for data in task.val]
        losses.append(sum(F.cross_entropy(out, y).item() for out, y in outs) / len(outs))
        if losses[-1] <= min(losses):
            best = epoch + 1, {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(steps)
    return best[1], best[0]


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_that_of_a_loop_by_hand(name: str):
    rule, factor, options, accumulated = CASES[name]
    clip = {"clip": options["gradient_clip_val"]} if "gradient_clip_val" in options else {}
    ema = {"ema": options["ema"]} if "ema" in options else {}
    expected, best = by_hand(rule, factor, accumulated, **clip, **ema)
    task, stopping = double(labelled_graphs()), PaperStopping(None, "loss")
    module = Inductive(network(), task.objective, Optimisation(LR, DECAY, **options))
    fit = trainer(stopping, epochs=EPOCHS, precision="64-true", accumulate_grad_batches=accumulated)
    fit.fit(module, datamodule=TaskData(task, batch_size=2, seed=1))
    assert (stopping.epoch, stopping.best_epoch) == (EPOCHS, best)
    for key, value in module.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")


# Stacks -------------------------------------------------------------------------------------------------------------


USUAL = (optim.SGD, optim.AdamW, optim.RMSprop)


@pytest.mark.parametrize(
    "make", [make if make in USUAL else pytest.param(make, marks=pytest.mark.weekly) for make in ELEMENTWISE]
)
def test_a_stack_takes_the_steps_of_each_model_with_an_optimizer_of_each_element(make: type[optim.Optimizer]):
    task, decay = double(one_graph()), 0.0 if make is optim.Rprop else 0.1
    step = partial(schedulers.StepLR, step_size=2)
    optimisation = Optimisation(0.02, decay, make, step, warmup=3, gradient_clip_val=0.05, ema=0.7)

    def model() -> nn.Module:
        return GAT(6, [4], 3, [2, 1], dropout=0.5).double()

    options: dict[str, Any] = {"optimisation": optimisation, "max_epochs": 5, "progress": False, "accelerator": "cpu"}
    _, stack = train(model, task, [0, 1], patience=None, precision="64-true", **options)
    module = Transductive(seeded(1, model), task.objective, optimisation)
    fit = trainer(PaperStopping(None), Resumable(None, seed=1), epochs=5, precision="64-true")
    fit.fit(module, datamodule=TaskData(task))
    for one, other in zip(stack[1].parameters(), module.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


# Errors -------------------------------------------------------------------------------------------------------------


def refused(optimisation: Optimisation, max_epochs: int | None = 5) -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    optimisation.configure(weights, weights, max_epochs)


def together(optimisation: Optimisation) -> None:
    train(lambda: GAT(6, [4], 3, [2, 1]), one_graph(), [0, 1], optimisation=optimisation, progress=False)


def accumulated(optimisation: Optimisation) -> None:
    module = Transductive(GAT(6, [4], 3, [2, 1]), NodeLabels(3), optimisation)
    trainer(accumulate_grad_batches=2).fit(module, datamodule=TaskData(one_graph()))


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (refused, {"optimizer": partial(optim.Adam, betas=(0.9, 2))}, "Adam cannot be used: Invalid beta parameter at"),
        (refused, {"optimizer": optim.Muon}, "Muon cannot be used: Muon only supports 2D parameters"),
        (
            refused,
            {"optimizer": optim.LBFGS, "weight_decay": 0.1},
            r"LBFGS has no argument weight_decay, but weight_decay is 0\.1\. Set weight_decay to 0, or choose",
        ),
        (refused, {"scheduler": schedulers.OneCycleLR}, "OneCycleLR cannot be used: .*missing.*'max_lr'"),
        (
            partial(refused, max_epochs=-1),
            {"scheduler": schedulers.CosineAnnealingLR},
            r"max_epochs is -1, expected at least 1: CosineAnnealingLR ends there\. Give the trainer max_epochs, or",
        ),
        (accumulated, {"optimizer": optim.LBFGS}, r"LBFGS computes a step several times, .* or choose another opt"),
        (accumulated, {"ema": 1.0}, r"ema is 1\.0, expected a number above 0 and below 1\."),
        (together, {"optimizer": optim.Muon}, "cannot be trained as one: Muon is not known to act on each element of"),
    ],
)
def test_an_optimisation_that_is_impossible_is_an_error(
    call: Callable[[Optimisation], None], options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        call(Optimisation(**options))
